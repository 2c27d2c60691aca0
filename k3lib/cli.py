"""The `k3` command. Arguments in, exit code out: every command passes on to a chapter's module."""
import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path


def _write(path, data):
    "Write bytes to `path`, whole or not at all."
    from k3lib.fileio import whole_file
    with whole_file(path) as file:
        file.write(data)


def _check_outputs(model, *paths):
    "Refuse, before the run, a file that could not be written after it or that would replace something else."
    import tempfile
    from k3lib.fileio import UsageError
    given = [Path(path) for path in paths if path is not None]
    for path in given:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder, expected a file to write")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.parent} to write it in")
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise UsageError(f"{path}: the folder {path.parent} cannot be written to: {error.strerror}") from None
        if path.is_symlink() or path.exists() and not path.is_file():
            raise UsageError(f"{path}: is no regular file, so it will not be replaced by one")
        if path.resolve().parent == Path(model).resolve():
            raise UsageError(f"{path}: lies in the model's own folder, which is never written to")
    if len({path.resolve() for path in given}) < len(given):
        raise UsageError(f"{given[0]}: is named for two outputs")


def _json(path, tree):
    _write(path, (json.dumps(tree, indent=1) + "\n").encode())


class OutputLost(Exception):
    "Standard output does not take what is written to it: an answer that nobody gets is no success."


def _say(text):
    "Print, at once. Raises OutputLost, and KeyboardInterrupt if a signal came whose own was lost in a callback of a library."
    if _came:
        raise KeyboardInterrupt
    try:
        print(text, flush=True)
    except (OSError, ValueError) as error:
        raise OutputLost(f"standard output cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _run(args, **lists):
    "Decode as the arguments say; the Report. `lists`: those that k3lib.engine.decode fills."
    from k3lib.engine import decode
    prompt = None if args.prompt is None else os.fsencode(args.prompt)  # bytes the shell gave that are not UTF-8 stay as they are
    if args.prompt_file is not None:
        if not Path(args.prompt_file).is_file():
            raise FileNotFoundError(f"{args.prompt_file}: {'is no regular file' if Path(args.prompt_file).exists() else 'no such file'}")
        prompt = Path(args.prompt_file).read_bytes()
    return decode(args.model, args.ids, prompt, args.max_new_tokens, args.ram, args.trunk, args.threads, show=_say, readers=args.readers, **lists)


def _decode(args):
    import io

    import numpy as np
    _check_outputs(args.model, args.json, args.logits)
    logits = [] if args.logits else None
    report = _run(args, logits=logits)
    if args.logits:
        buffer = io.BytesIO()
        np.save(buffer, np.stack(logits))
        _write(args.logits, buffer.getvalue())
    if args.json:
        _json(args.json, report.as_dict())


def _trace(args):
    from k3lib.cache_policy import EXPERT_BYTES, replay_text
    from k3lib.trace import packed_trace, read_trace
    from k3lib.fileio import UsageError
    if args.replay is not None:
        if args.out is not None:
            raise UsageError("--out: is what a recording is written to, and --replay records nothing")
        passes = read_trace(args.replay)
        return _say(replay_text(passes, EXPERT_BYTES if args.model is None else _expert_bytes(args.model, passes)))
    if args.model is None or args.out is None:
        raise UsageError(f"{'MODEL' if args.model is None else '--out FILE'} is missing: a run is recorded with `k3 trace MODEL --ids 1,2,3 --out FILE`")
    _check_outputs(args.model, args.out)
    requests = []
    _run(args, trace=requests)
    _write(args.out, packed_trace(requests))


def _expert_bytes(model, passes):
    "Bytes of an expert of the model that the passes of a trace belong to. Raises UsageError if they cannot."
    from k3lib.checkpoint import Checkpoint
    from k3lib.config import read_config
    from k3lib.fileio import UsageError
    config, asked = read_config(model), {(layer, e) for walk in passes for layer, experts in walk for e in experts}
    for layer, e in sorted(asked):
        if not config.first_k_dense_replace <= layer < config.num_hidden_layers or e >= config.num_experts:
            raise UsageError(f"{model}: the trace asks for expert {e} of layer {layer}, but this model has experts 0..{config.num_experts - 1} "
                             f"in layers {config.first_k_dense_replace}..{config.num_hidden_layers - 1}: the trace is another model's")
    return sum(extent.nbytes for extent in Checkpoint(model).expert(*min(asked)).values())


def _plan(args):
    from k3lib.checkpoint import Checkpoint
    from k3lib.config import read_config
    from k3lib.config import is_synthetic
    from k3lib.engine import whole_number
    from k3lib.memory import parse_size
    from k3lib.plan import make_plan, measured_readers
    ram, context = parse_size(args.ram), whole_number("context", args.context, 1, 1 << 30)
    config, checkpoint, readers = read_config(args.model), Checkpoint(args.model), None
    synthetic = is_synthetic(args.model)
    if args.measure:
        readers, why = measured_readers(checkpoint)
        _say(why + "; synthetic weights: a hole is read at the memory's speed" * synthetic)
    _say(make_plan(config, checkpoint, ram, context, readers=readers).text() + "\n  synthetic weights" * synthetic)


def _census(args):
    from k3lib.checkpoint import Checkpoint
    from k3lib.config import read_config
    from k3lib.config import is_synthetic
    _check_outputs(args.model, args.json)
    config = read_config(args.model)
    census = Checkpoint(args.model).census(experts_per_token=config.num_experts_per_token)
    _say(census.table() + "\nsynthetic weights" * is_synthetic(args.model))
    if args.json:
        _json(args.json, census.as_dict())


def _verify(args):
    from functools import partial

    from k3lib.fileio import CheckpointError
    from k3lib.config import read_config
    from k3lib.engine import progress_bar
    from k3lib.tensors import check_tensors
    from k3lib.verify import manifest_path, manifest_text, verify
    config = read_config(args.model)
    target = args.write_manifest and Path(args.write_manifest if args.write_manifest is not True else manifest_path(args.model))
    _check_outputs(args.model, args.json, target)
    found = verify(args.model, config, check_tensors, target or args.manifest, bool(target), show=_say,
                   progress=partial(progress_bar, unit="B", desc="hashing", unit_scale=True))
    _say(found.text())
    if args.json:
        _json(args.json, found.as_dict())
    if found.damaged:
        kept = f"; {target} is not written" if target else ""
        raise CheckpointError(f"{len(found.damaged)} damaged: {next(iter(found.damaged.values()))}" + " ..." * (len(found.damaged) > 1) + kept)
    if target:
        _write(target, manifest_text(found.hashes).encode())
        _say(f"{target}: the hashes of {len(found.hashes)} files, to be read by `k3 verify` or, in the model's folder, `sha256sum -c`")


def _pack(args):
    from k3lib.engine import pack_trunk
    _say(pack_trunk(args.model, args.folder))


def _synth(args):
    from k3lib.synth import synth
    _say(synth(args.folder, args.preset, args.seed, args.layers, args.experts, args.vocab,
               progress=lambda text: print(text, file=sys.stderr, flush=True)))


def _add_run(parser):
    "The arguments of a decoding run. Returns the group of which one must be given."
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--ids", metavar="1,2,3", help="the prompt as token ids")
    given.add_argument("--prompt", metavar="TEXT", help="the prompt as text; names of control tokens in it stay text")
    given.add_argument("--prompt-file", metavar="FILE", help="the prompt as a file's bytes")
    parser.add_argument("--max-new-tokens", metavar="N", default="8")
    parser.add_argument("--ram", metavar="SIZE", default="8GB", help="most memory to use: 8GB is 8e9 bytes, 8GiB 2^33 (default 8GB)")
    parser.add_argument("--trunk", metavar="DIR", help="read the trunk from a folder that `k3 pack` has filled from this model")
    parser.add_argument("--threads", metavar="N", default=None, help="threads of the arithmetic (default: all cores)")
    parser.add_argument("--readers", metavar="N", default=None, help="threads that read (default: 4; `k3 plan MODEL --measure` finds what the device wants)")
    return given


def _parser():
    parser = argparse.ArgumentParser(prog="k3", description="Kimi K3, decoded under the memory budget you choose.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True)

    decode = commands.add_parser("decode", help="greedy decoding of a prompt")
    decode.add_argument("model", help="folder of the checkpoint")
    _add_run(decode)
    decode.add_argument("--json", metavar="FILE", help="write the report as JSON")
    decode.add_argument("--logits", metavar="FILE.npy", help="write every step's logits, float32 [steps, vocab]")
    decode.set_defaults(run=_decode)

    trace = commands.add_parser("trace", help="record which experts a run requests; or what caches would make of such a record")
    trace.add_argument("model", nargs="?", help="folder of the checkpoint; with --replay only for the size of an expert (default: the released model's)")
    _add_run(trace).add_argument("--replay", metavar="FILE", help="print hit rate against capacity for a trace, and decode nothing")
    trace.add_argument("--out", metavar="FILE", help="write the trace: pairs of little-endian uint32, layer and expert, in the order of the requests")
    trace.set_defaults(run=_trace)

    plan = commands.add_parser("plan", help="what a budget would be spent on")
    plan.add_argument("model")
    plan.add_argument("--ram", metavar="SIZE", default="8GB")
    plan.add_argument("--context", metavar="N", default="1024", help="positions there must be room for (default 1024)")
    plan.add_argument("--measure", action="store_true", help="read from the model's device for two seconds, and plan with as many readers as it wants")
    plan.set_defaults(run=_plan)

    census = commands.add_parser("census", help="count a checkpoint's tensors and bytes from its headers")
    census.add_argument("model")
    census.add_argument("--json", metavar="FILE")
    census.set_defaults(run=_census)

    verify = commands.add_parser("verify", help="check every file: headers, sizes, and hashes against a manifest or what the download left behind; "
                                                "goes on where it was broken off")
    verify.add_argument("model")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--manifest", metavar="FILE", help="a sha256sum file of the model's files (default: MODEL.sha256 beside the model, if there is one)")
    which.add_argument("--write-manifest", metavar="FILE", nargs="?", const=True, help="write one, if nothing is damaged (default: MODEL.sha256 beside the model)")
    verify.add_argument("--json", metavar="FILE", help="write the account as JSON")
    verify.set_defaults(run=_verify)

    pack = commands.add_parser("pack", help="copy the trunk, read at every token, to a faster disk; goes on where it was broken off")
    pack.add_argument("model")
    pack.add_argument("folder", metavar="DIR")
    pack.set_defaults(run=_pack)

    synth = commands.add_parser("synth", help="write a checkpoint of the released layout with made-up weights")
    synth.add_argument("folder", metavar="DIR")
    synth.add_argument("--preset", choices=["full", "slice", "oracle"], default="full")
    synth.add_argument("--seed", type=int, default=0)
    for name, what in (("layers", "layers"), ("experts", "experts a layer"), ("vocab", "ids in the vocabulary")):
        synth.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} (default: the preset's)")
    synth.set_defaults(run=_synth)
    return parser


def _exit_code(error):
    "2 usage, config or plan refused; 4 weights unreadable or damaged; 1 anything else."
    from k3lib.fileio import CheckpointError
    from k3lib.config import ConfigError
    from k3lib.trace import TraceError
    from k3lib.fileio import UsageError
    from k3lib.synth import SynthError
    from k3lib.tokenizer import TokenizerError
    if isinstance(error, CheckpointError):
        return 4
    return 2 if isinstance(error, (UsageError, TraceError, ConfigError, TokenizerError, SynthError, FileNotFoundError, NotADirectoryError)) else 1


STOPPING = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
GRACE = 1.4  # seconds from a signal to the end, come what may
_came = []  # signals that this command has had


@contextlib.contextmanager
def _stopping(command):
    """The first SIGINT or SIGTERM raises KeyboardInterrupt, later ones do nothing. Yields the list of those that came.

    Python runs its handler between two instructions. It does not come to that while a read stalls or a kernel is long, so a thread hears of the
    signal too, and ends the process if it is still there after GRACE seconds.
    """
    came, (reader, writer) = _came, os.pipe()
    came.clear()

    def heed(number, frame):
        if not came:
            came.append(number)
            raise KeyboardInterrupt

    def watch():
        number = os.read(reader, 1)[0]
        if number:
            time.sleep(GRACE)
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.write(sys.stderr.fileno(), f"k3 {command}: {STOPPING[number]} in the middle of a read or a product that did not end\n".encode())
            os._exit(128 + number)

    def lost(unraisable):
        "A signal heard inside a callback of a library, which drops it: the walk raises it again (_say), and there is nothing to show."
        if not (came and unraisable.exc_type is KeyboardInterrupt):
            hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, lost
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, heed) for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN}
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, name="k3-signals", daemon=True)
    watcher.start()
    try:
        yield came
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(others)
        if not came:  # else the watcher stays, in case the end of the process takes long
            os.write(writer, b"\0")
            watcher.join()
            os.close(reader), os.close(writer)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if came else handler)


def main(argv=None):
    "Run one command and return its exit code: 0, what _exit_code says, or 128 and the number of the signal that ended it."
    args = _parser().parse_args(argv)
    if threading.current_thread() is not threading.main_thread():
        return _main(args, [])
    with _stopping(args.command) as came:
        return _main(args, came)


def _main(args, came):
    try:
        if sys.stdout is None:  # closed by whoever started us: print would lose the answer without a word
            raise OutputLost("standard output is closed")
        if getattr(args, "model", None) == "":  # the folder this runs in would do for it
            raise FileNotFoundError("MODEL is empty, expected a folder")
        args.run(args)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if args.debug:
            raise
        if came or isinstance(error, KeyboardInterrupt):  # an import that is broken off raises what it likes
            number = came[0] if came else signal.SIGINT
            code, text = 128 + number, f"{STOPPING[number]} {getattr(error, 'done', '')}".rstrip()
        else:
            code, text = 1, str(error)
            with contextlib.suppress(Exception):  # where it was an import that failed, it fails again
                code = _exit_code(error)
            if code == 1 and not isinstance(error, OutputLost):
                text = f"{type(error).__name__}: {error}"
        if sys.stderr is not None:
            print(f"k3 {args.command}: {text}", file=sys.stderr)
        return code
