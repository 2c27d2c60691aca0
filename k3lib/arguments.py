"""The arguments of the `k3` command: one function a command adds its own.

Nothing is imported here that takes long, so that `k3 --help` appears at once.
"""

import argparse
import sys
from collections.abc import Callable

from k3lib.display import Display, OutputLost, ReaderLeft, complain


def option(parser, flag, metavar, help=None, default=None):
    parser.add_argument(flag, metavar=metavar, help=help, default=default)


def add_model(parser):
    "Options of a command that loads a model and generates with it."
    option(parser, "--ram", "SIZE", "most memory to use: 8GB is 8e9 bytes, 8GiB 2^33 (default: 8GB)", "8GB")
    option(parser, "--trunk", "DIR", "read the trunk from a folder that `k3 pack` has filled from this model")
    option(parser, "--threads", "N", "threads that compute (default: all cores)")
    option(parser, "--readers", "N", "threads that read (default: 5; `k3 plan MODEL --measure` finds the best number)")
    likeliest = "draw each token at this temperature; 1: the model's own probabilities (default: the likeliest token)"
    option(parser, "--temperature", "T", likeliest)
    option(parser, "--top-k", "N", "draw from the N likeliest tokens (default: 0, all)")
    option(parser, "--top-p", "P", "draw from the likeliest tokens whose probabilities add up to P (default: 1)")
    option(parser, "--min-p", "P", "draw from tokens at least P times as likely as the likeliest (default: 0)")
    option(parser, "--seed", "N", "decides the draws, with position and logits (default: 0)")
    quiet = "nothing on standard error but warnings and errors: no plan, progress and report"
    parser.add_argument("--quiet", action="store_true", help=quiet)


def add_run(parser):
    "The arguments of a decoding run. Returns the group of which one must be given, or a saved state."
    given = parser.add_mutually_exclusive_group()
    names = "names of control tokens in it stay text"
    option(given, "--ids", "1,2,3", "the prompt as token ids")
    option(given, "--prompt", "TEXT", f"the prompt as text, - for standard input; {names}")
    option(given, "--prompt-file", "FILE", "the prompt as the bytes of a file, - for standard input")
    option(parser, "--max-new-tokens", "N", "most tokens to generate (default: 8)", "8")
    add_model(parser)
    stop = "end before this text; may be given several times"
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help=stop)
    lines = "write a line of JSON for each token as it comes. -: to standard output, in place of the text"
    option(parser, "--jsonl", "FILE", lines)
    return given


def add_decode(parser):
    parser.description = "The generated text goes to standard output; plan, progress and report to standard error."
    parser.add_argument("model", help="folder of the checkpoint")
    add_run(parser)
    whole = "write prompt ids, ids, text, stop reason and report as JSON, at the end; also of a run that ends early"
    option(parser, "--json", "FILE", f"{whole}. -: to standard output, in place of the text")
    likeliest = "the N likeliest ids of each token, 0 to 20, and their log probabilities"
    option(parser, "--logprobs", "N", f"with --json or --jsonl: {likeliest}")
    logits = "write every step's logits, float32 [steps, vocab]; until the run ends they are in"
    option(parser, "--logits", "FILE", f"{logits} FILE.PID.part, which can be read at any moment")
    option(parser, "--load-state", "FILE", "go on after the tokens of a saved state; a prompt, if given, follows them")
    option(parser, "--save-state", "FILE", "save the state after the last token, to go on from it with --load-state")
    prefix = "begin with the longest prefix of the prompt whose state is in this folder, and keep this prompt's there"
    option(parser, "--state-cache", "DIR", prefix)
    bound = "most bytes of that folder (default: 10GB); the state used longest ago makes room"
    option(parser, "--state-cache-size", "SIZE", bound, "10GB")


def add_chat(parser):
    parser.description = "Talk with a model. /help, typed there, names the commands."
    parser.add_argument("model", help="folder of the checkpoint")
    option(parser, "--file", "CONVERSATION", "keep the conversation in this file after every turn, or go on with it")
    option(parser, "--system", "TEXT", "a system message in front of the conversation")
    parser.add_argument("--no-thinking", action="store_true", help="replies without thinking")
    parser.add_argument("--effort", choices=["low", "high", "max"], help="say how much to think (default: not said)")
    option(parser, "--context", "N", "positions for which there must be room (default: 4096)", "4096")
    option(parser, "--max-new-tokens", "N", "most tokens of a reply (default: 1024)", "1024")
    add_model(parser)


def add_trace(parser):
    folder = "folder of the checkpoint; with --replay only for the size of an expert (default: the released model's)"
    parser.add_argument("model", nargs="?", help=folder)
    option(add_run(parser), "--replay", "FILE", "print hit rate against capacity for a trace, and decode nothing")
    pairs = "pairs of little-endian uint32, layer and expert, in the order of the requests"
    option(parser, "--out", "FILE", f"write the trace: {pairs}; until the run ends it is in FILE.PID.part")


def add_plan(parser):
    parser.add_argument("model", help="folder of the checkpoint")
    option(parser, "--ram", "SIZE", "most memory to use (default: 8GB)", "8GB")
    option(parser, "--context", "N", "positions for which there must be room (default: 1024)", "1024")
    measure = "read from the model's device for two seconds, and plan with as many readers as it can use"
    parser.add_argument("--measure", action="store_true", help=measure)


def add_census(parser):
    parser.add_argument("model", help="folder of the checkpoint")
    option(parser, "--json", "FILE", "write the counts as JSON")


def add_verify(parser):
    parser.add_argument("model", help="folder of the checkpoint")
    which = parser.add_mutually_exclusive_group()
    beside = "default: MODEL.sha256 beside the model"
    option(which, "--manifest", "FILE", f"a sha256sum file of the model's files ({beside}, if there is one)")
    written = f"hash every file and, if nothing is damaged, write such a file ({beside})"
    which.add_argument("--write-manifest", metavar="FILE", nargs="?", const=True, help=written)
    packed = "compare, instead, each byte of a folder that `k3 pack` has filled with the model that it was packed from"
    option(which, "--trunk", "DIR", packed)
    option(parser, "--json", "FILE", "write the result as JSON")


def add_pack(parser):
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("folder", metavar="DIR", help="folder for the packed trunk, outside the model's folder")


def add_synth(parser):
    presets = "full: the released shape, mostly holes; slice: full width, few layers; oracle: small (default: full)"
    parser.add_argument("folder", metavar="DIR", help="new or empty folder for the checkpoint")
    parser.add_argument("--preset", choices=["full", "slice", "oracle"], default="full", help=presets)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides the values (default: 0)")
    for name, what in (("layers", "number of layers"), ("experts", "experts a layer"), ("vocab", "vocabulary size")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default: the preset's)")


RESUMES = "after an interrupt, the same command goes on from there"
COMMANDS: dict[str, tuple[Callable, str]] = {  # name: (adds its arguments, its line of help)
    "decode": (add_decode, "continue a prompt: text to standard output"),
    "chat": (add_chat, "a conversation in the terminal, kept in a file if you like"),
    "trace": (add_trace, "record which experts a run requests; or replay such a trace in caches of all sizes"),
    "plan": (add_plan, "what a budget would be spent on"),
    "census": (add_census, "count a checkpoint's tensors and bytes from its headers"),
    "verify": (add_verify, f"check every file: its header, its size, and its published hash; {RESUMES}"),
    "pack": (add_pack, f"copy the trunk, which is read for every token, to a faster disk; {RESUMES}"),
    "synth": (add_synth, "write a checkpoint of the released layout with made-up weights"),
}


class Parser(argparse.ArgumentParser):
    "A parser whose help and whose refusals appear whatever the output can encode."

    def print_help(self, file=None):
        self.show(self.format_help())

    def show(self, text):
        "Show `text` on standard output. Where that is lost, end with exit code 1."
        display = Display(goes_on=False)
        try:
            display(text, end="")
        except OutputLost as error:
            if not isinstance(error, ReaderLeft):
                complain(f"{self.prog}: {error}")
            self.exit(1)

    def error(self, message):
        complain(f"{self.format_usage()}{self.prog}: error: {message}")
        self.exit(2)


def make_parser(runs: dict[str, Callable]) -> Parser:
    "The parser of all commands. `runs`: {name: what runs}, a field `run` of the arguments."
    parser = Parser(prog="k3", description="Kimi K3, decoded under the memory budget you choose.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (add_arguments, text) in COMMANDS.items():
        command = subparsers.add_parser(name, help=text)
        add_arguments(command)
        command.set_defaults(run=runs[name])
    return parser


def parsed(runs: dict[str, Callable], argv: list[str] | None) -> argparse.Namespace | None:
    "The arguments `argv`, None for those of the process. None if all that was asked for, help or version, is shown."
    parser = make_parser(runs)
    args = parser.parse_args(argv)
    if args.command is not None:
        return args
    parser.show(f"k3 {sys.modules['k3lib'].__version__}\n" if args.version else parser.format_help())
    return None
