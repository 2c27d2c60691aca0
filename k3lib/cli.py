"""The `k3` command: it reads the arguments, calls a chapter's module, and returns an exit code.

The order of this file: one function a command, signals, exit codes. The arguments are in `arguments`.
Modules that import numpy or numba are imported inside the functions, so that `k3 --help` does not wait for them.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from k3lib.arguments import parsed
from k3lib.config import is_synthetic, read_config
from k3lib.display import Display, OutputLost, ReaderLeft, complain, printable, progress_bar
from k3lib.fileio import CheckpointError, K3Error, MissingFile, UsageError, whole_file
from k3lib.memory import parse_size, shown_size, whole_number
from k3lib.system import disk_bytes, make_nonblocking, memory_limits

# Commands: each one has its output as args.show


def _run(args, **options):
    """Decode as the arguments say. `options`: those of run.decode that only this command has; "files", for Results.

    Standard output gets the generated text, or what else is asked for there; standard error all else.
    """
    from k3lib.results import Results, check_outputs
    from k3lib.run import decode, quietly

    files, written = options.pop("files"), args.show
    check_outputs(args.model, *files.values(), options.get("save_state"), read=[args.prompt_file])
    args.results = Results(**files, out=written)
    options |= {name: getattr(args, name) for name in ("max_new_tokens", "ram", "trunk", "threads", "readers", "stop")}
    options |= {"write": quietly if "-" in files.values() else written, "sampling": _sampling(args)}
    talk = _heeding_signals(args.talk)
    decode(args.model, args.ids, _prompt(args), show=talk, quiet=args.quiet, results=args.results, **options)


def _prompt(args):
    "The prompt as bytes, or as blocks of bytes; None if it is given in another way."
    from k3lib.run import file_blocks, stdin_blocks

    if "-" in (args.prompt, args.prompt_file):
        return stdin_blocks()
    if args.prompt_file is not None:
        return file_blocks(args.prompt_file)
    try:
        return None if args.prompt is None else os.fsencode(args.prompt)  # bytes that are not UTF-8 stay as they are
    except UnicodeEncodeError as error:  # in some charsets Python cannot turn every byte into text and back
        text = f"--prompt: is no text in the locale's charset, {error.encoding}: give it as a file, with --prompt-file"
        raise UsageError(text) from None


def _decode(args):
    from k3lib.state import PrefixCache

    if args.logprobs is not None and args.json is None and args.jsonl is None:
        raise UsageError("--logprobs: are written with --json or --jsonl, and neither is given")
    if args.load_state is not None and args.state_cache is not None:
        raise UsageError("--load-state and --state-cache: a run begins with one state, so give one of the two")
    cache = None if args.state_cache is None else PrefixCache(args.state_cache, parse_size(args.state_cache_size))
    files = {"logits": args.logits, "report": args.json, "events": args.jsonl}
    options = {name: getattr(args, name) for name in ("logprobs", "load_state", "save_state")}
    _run(args, files=files, cache=cache, **options)


def _chat(args):
    from k3lib.conversation import Conversation
    from k3lib.engine import budget_argument
    from k3lib.run import quietly, shown_load
    from k3lib.talk import Talk
    from k3lib.tokenizer import open_tokenizer

    most, sampling = whole_number("max_new_tokens", args.max_new_tokens, 1, 1 << 20), _sampling(args)
    given = {"system": args.system, "thinking": False if args.no_thinking else None, "effort": args.effort}
    given = {name: value for name, value in given.items() if value is not None}
    tokenizer = open_tokenizer(args.model, read_config(args.model))
    if tokenizer is None:
        raise UsageError(f"{args.model}: holds no tiktoken.model, so it cannot be talked to")
    tokenizer.encode("")  # what the encoder takes is part of the plan: every turn needs it
    options = {name: getattr(args, name) for name in ("context", "trunk", "threads", "readers")}
    talk, ram = quietly if args.quiet else args.talk, budget_argument(args.ram)
    with shown_load(args.model, talk, not args.quiet, ram=ram, **options) as model:
        with Conversation(model, tokenizer, args.file, given, sampling, most) as conversation:
            Talk(conversation, args.show, args.quiet).run()


def _sampling(args):
    from k3lib.sampling import Sampling

    names = "temperature", "top_k", "top_p", "min_p", "seed"
    return Sampling.parsed(**{name: getattr(args, name) for name in names})


def _trace(args):
    if args.replay is not None:
        return _replay(args)
    if args.model is None or args.out is None:
        missing = "MODEL" if args.model is None else "--out FILE"
        raise UsageError(f"{missing} is missing: a run is recorded with `k3 trace MODEL --ids 1,2,3 --out FILE`")
    _run(args, files={"trace": args.out, "events": args.jsonl})


def _replay(args):
    "Print the hit rates of caches of every size for a recorded trace."
    from k3lib.cache_policy import EXPERT_BYTES, replay_text
    from k3lib.trace import read_trace

    if args.out is not None:
        raise UsageError("--out: names the file for a recording, but --replay records nothing")
    passes = read_trace(args.replay)
    if args.model is not None:
        args.show(replay_text(passes, _expert_bytes(args.model, passes)))
    else:
        released = f"GB: with experts of {shown_size(EXPERT_BYTES)}, as in the released model; name MODEL for another"
        args.show(f"{replay_text(passes)}\n{released}")


def _expert_bytes(model, passes):
    "Bytes of an expert of the model that the passes of a trace belong to. Raises UsageError if they cannot."
    from k3lib.checkpoint import Checkpoint

    config, requested = read_config(model), {(L, e) for layers in passes for L, experts in layers for e in experts}
    first, end = config.first_k_dense_replace, config.num_hidden_layers
    for L, e in sorted(requested):
        if not first <= L < end or e >= config.num_experts:
            raise UsageError(
                f"{model}: the trace asks for expert {e} of layer {L}, but this model has experts "
                f"0..{config.num_experts - 1} in layers {first}..{end - 1}: the trace is another model's"
            )
    return sum(extent.nbytes for extent in Checkpoint(model).expert(*min(requested)).values())


def _plan(args):
    from k3lib.checkpoint import Checkpoint
    from k3lib.plan import make_plan, measured_readers

    ram, context = parse_size(args.ram), whole_number("context", args.context, 1, 1 << 30)
    config, checkpoint, readers = read_config(args.model), Checkpoint(args.model), None
    synthetic = is_synthetic(args.model)
    if args.measure:
        readers, why = measured_readers(checkpoint)
        args.show(why + "; synthetic weights: a hole is read at the memory's speed" * synthetic)
    args.show(make_plan(config, checkpoint, ram, context, readers=readers).text() + "\n  synthetic weights" * synthetic)


def _census(args):
    from k3lib.checkpoint import Checkpoint
    from k3lib.results import check_outputs, write_json

    check_outputs(args.model, args.json)
    config = read_config(args.model)
    census = Checkpoint(args.model).census(config=config)
    with _shown_after(lambda: args.show(census.table() + "\nsynthetic weights" * is_synthetic(args.model))):
        if args.json is not None:
            write_json(args.json, census.as_dict())


def _verify(args):
    from functools import partial

    from k3lib.results import check_outputs, write_json
    from k3lib.tensors import check_tensors
    from k3lib.verify import manifest_path, manifest_text, verify

    if args.trunk is not None:
        return _verify_trunk(args)
    config, target = read_config(args.model), args.write_manifest
    target = Path(manifest_path(args.model) if target is True else target) if target else None
    check_outputs(args.model, args.json, target, read=[] if args.write_manifest else [args.manifest])
    progress = partial(progress_bar, unit="B", desc="hashing", unit_scale=True)
    manifest, every = target or args.manifest, bool(target)
    found = verify(args.model, config, check_tensors, manifest, every, show=args.show, progress=progress)
    verdict = _verdict(found.damaged, target and f"; {target} is not written")
    with _shown_after(lambda: args.show(found.text()), verdict):
        if args.json is not None:
            write_json(args.json, found.as_dict())
        if target and not found.damaged:
            with whole_file(target) as file:
                file.write(manifest_text(found.hashes).encode())
    if target:
        readers = "`k3 verify` or, in the model's folder, `sha256sum -c`"
        args.show(f"{target}: the hashes of {len(found.hashes)} files, to be read by {readers}")


@contextlib.contextmanager
def _shown_after(show, verdict=None):
    """A `with` block that saves results; then show() is called, also if they cannot be saved, and `verdict` is raised.

    A disk that is full must not hide what the command has found. Without a verdict the error of the block is raised.
    """
    failed = None
    try:
        yield
    except OSError as error:
        failed = error
    show()
    if verdict is not None and failed is not None:
        verdict.add_note(f"not saved: {failed}")
    outcome = verdict or failed
    if outcome is not None:
        raise outcome


def _verdict(damaged, more):
    "The error for what is damaged, {name: fault}; None if nothing is."
    if not damaged:
        return None
    text = f"{len(damaged)} damaged: {next(iter(damaged.values()))}{' ...' * (len(damaged) > 1)}"
    return CheckpointError(text + (more or ""))


def _verify_trunk(args):
    from k3lib.pack import verify_packed
    from k3lib.results import check_outputs, write_json

    check_outputs(args.model, args.json)
    checkpoint, names, nbytes = _trunk_of(args.model)
    with progress_bar(nbytes, "B", desc="comparing", unit_scale=True) as bar:
        wrong = verify_packed(checkpoint, names, args.trunk, args.show, bar.update)
    found = {"model": args.model, "trunk": args.trunk, "tensors": len(names), "bytes": nbytes, "damaged": wrong}
    with _shown_after(lambda: None, _verdict(wrong, ": pack this checkpoint again")):
        if args.json is not None:
            write_json(args.json, found)
    args.show(f"{args.trunk}: {len(names)} tensors of {shown_size(nbytes)}, each byte equal to {args.model}'s")


def _trunk_of(model):
    "The checkpoint, the names of its trunk's tensors, and their bytes. Raises what `load` raises."
    from k3lib.checkpoint import Checkpoint
    from k3lib.tensors import check_tensors, forward_order

    config, checkpoint = read_config(model), Checkpoint(model)
    check_tensors(config, checkpoint)
    names = list(forward_order(config))
    return checkpoint, names, sum(checkpoint.extent(name).nbytes for name in names)


def pack_trunk(path: str | os.PathLike, folder: str | os.PathLike) -> str:
    """Copy the trunk of the checkpoint in `path` to `folder`, except for files that an interrupted call has completed.

    Returns a line that says what was done. Raises what `load` and `pack` raise, UsageError if `folder` is a file or
    lies in the model's own folder, and Interrupted.
    """
    from k3lib.pack import pack
    from k3lib.run import Interrupted

    (checkpoint, names, nbytes), folder = _trunk_of(path), Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file, but the packed trunk needs a folder")
    if checkpoint.path.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UsageError(f"{folder}: lies in the model's own folder, which is never written to")
    began = time.perf_counter()
    try:
        with progress_bar(nbytes, "B", desc="packing", unit_scale=True) as bar:
            written = pack(checkpoint, names, folder, bar.update)
    except KeyboardInterrupt:
        done = f"with {len(_shards(folder))} files in {folder}"
        raise Interrupted(f"{done}: the same command goes on from there") from None
    seconds, files = time.perf_counter() - began, [file.stat() for file in _shards(folder)]
    sizes = shown_size(sum(file.st_size for file in files)), shown_size(sum(disk_bytes(file) for file in files))
    counts = f"{written} written and {len(files) - written} found, all compared with {path}, in {seconds:.1f} s"
    return f"{folder}: {len(files)} files of {sizes[0]}, {sizes[1]} on disk; {counts}"


def _shards(folder):
    return list(folder.glob("*.safetensors"))


def _pack(args):
    args.show(pack_trunk(args.model, args.folder))


def _synth(args):
    from k3lib.synth import synth

    made = synth(args.folder, args.preset, args.seed, args.layers, args.experts, args.vocab, progress=complain)
    args.show(str(made))


COMMANDS: dict[str, Callable] = {
    "decode": _decode,
    "chat": _chat,
    "trace": _trace,
    "plan": _plan,
    "census": _census,
    "verify": _verify,
    "pack": _pack,
    "synth": _synth,
}


# Signals

_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up", "SIGXCPU": "out of processor time"}
STOPPING = {getattr(signal, name): word for name, word in _WORDS.items() if hasattr(signal, name)}
GRACE = 1.4  # seconds from a signal to the end of the process, whatever it is doing but saving
SAVING = 60  # seconds more for what the run has made to be saved
_received: list[int] = []  # the signals that this command has received
_raises = False  # whether a signal raises KeyboardInterrupt: only while a command runs, where it is caught


@contextlib.contextmanager
def _stopping(args) -> Iterator[list[int]]:
    """Listen to the signals in STOPPING: the first one is written down, later ones do nothing. Yields the list that
    holds it.

    Python runs a signal's handler between two instructions of the main thread. During a read that stalls or a kernel
    that runs long there is no such moment. So a thread is told of the signal too, through a pipe, and ends the process
    if it is still alive after GRACE seconds. While results are being saved it waits for up to SAVING seconds more.
    """
    _received.clear()
    reader, writer = os.pipe()
    make_nonblocking(writer)
    hook, sys.unraisablehook = sys.unraisablehook, _hook_without_lost_signals(sys.unraisablehook)
    heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _receive) for number in heard}
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_end_late, args=(args, reader), name="k3-signals", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started: the plan refuses a run for that, in words
        watcher.start()
    try:
        yield _received
    finally:
        sys.unraisablehook = hook
        signal.set_wakeup_fd(others)
        if not _received:  # otherwise the watcher stays, in case the end of the process takes long
            os.write(writer, b"\0")
            if watcher.ident is not None:
                watcher.join()
            os.close(reader)
            os.close(writer)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if _received else handler)


def _receive(number, frame):
    "The signal handler."
    if not _received:
        _received.append(number)
        if _raises:
            raise KeyboardInterrupt


def _run_until_signal(args):
    """Run the command; the first signal raises KeyboardInterrupt, and no signal does so once this has ended.

    A signal that came while the handlers were put in place raises it here. One that comes after the command has ended
    does not disturb the report of how it ended.
    """
    global _raises
    try:
        _raises = True
        if _received:
            raise KeyboardInterrupt
        args.run(args)
    finally:
        _raises = False


def _end_late(args, reader):
    "The watching thread: read a signal's number from the pipe, then end the process after GRACE seconds; 0 ends it."
    number = os.read(reader, 1)[0]
    if number:
        time.sleep(GRACE)
        kept = _kept(getattr(args, "results", None))
        line = f"k3 {args.command}: {STOPPING[number]} in the middle of a read or a product that did not end{kept}"
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), f"{line}\n".encode(errors="backslashreplace"))
        os._exit(128 + number)


def _kept(results):
    """Wait while the main thread saves `results`. If it does not, save them here. Returns what the files hold.

    A disk that does not answer may hold up either, but not the end of the process.
    """
    end = time.monotonic() + SAVING
    if results is None:
        return ""
    if results.saving:
        while results.saving and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(GRACE)  # in which the main thread ends the process
    said = []
    saver = threading.Thread(target=lambda: said.extend(results.keep()), name="k3-saving", daemon=True)
    saver.start()
    saver.join(max(0, end - time.monotonic()))
    return "".join(f"; {line}" for line in said)


def _hook_without_lost_signals(hook):
    """sys.unraisablehook that is silent about a signal's KeyboardInterrupt.

    A library drops an exception that is raised in its callback. What shows the next line raises this one again, so it
    need not be shown.
    """

    def shown(unraisable):
        if not (_received and unraisable.exc_type is KeyboardInterrupt):
            hook(unraisable)

    return shown


# Exit codes


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    0; 2 usage, config or plan refused; 4 weights unreadable or damaged; 1 any other error; 128 plus the number of the
    signal that came.
    """
    args = parsed(COMMANDS, argv)
    if args is None:
        return 0
    if threading.current_thread() is not threading.main_thread() or args.command == "chat":
        return _main(args, args.run, [])  # a chat hears Ctrl-C itself, and what it has made is on the disk
    with _stopping(args) as received:
        return _main(args, _run_until_signal, received)


FILES = ("json", "jsonl", "logits", "out", "save_state", "write_manifest", "folder")  # name what a command makes


def _main(args, run, received):
    "The exit code of run(args). What went wrong is one line on stderr."
    display = Display(goes_on=any(getattr(args, name, None) not in (None, "-") for name in FILES))
    args.show = _heeding_signals(display)

    def talk(text, end="\n"):
        with contextlib.suppress(OutputLost):
            display.end_line()
        complain(text, end)

    args.talk = talk
    try:
        display.check()
        if getattr(args, "model", None) == "":  # an empty path is the current folder
            raise MissingFile("MODEL is empty, expected a folder")
        run(args)
        display.end_line()
        display.end()
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if args.debug and not received:
            raise
        code, text = _outcome(error, received)
        if not isinstance(error, ReaderLeft):
            talk(f"k3 {args.command}: {printable(text)}")
        return code


def _heeding_signals(display):
    "`display`, which raises KeyboardInterrupt if a signal came and a library dropped its exception."

    def show(text, end="\n"):
        if _received:
            raise KeyboardInterrupt
        display(text, end)

    return show


def _outcome(error, received):
    "(exit code, one line) for what ended a command."
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    if isinstance(error, FileNotFoundError) and _folder_is_gone():
        notes = f"; the current folder has been removed{notes}"
    if received or isinstance(error, KeyboardInterrupt):  # an interrupted import may raise any other exception
        number = received[0] if received else signal.SIGINT
        done = f" {error}" if isinstance(error, KeyboardInterrupt) and str(error) else ""
        return 128 + number, STOPPING[number] + done + notes
    if isinstance(error, K3Error):
        return error.exit_code, f"{error}{notes}"
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return 2, f"{error}{notes}"
    text = str(error) or "this process can have no more memory" * isinstance(error, MemoryError)
    if isinstance(error, (ImportError, MemoryError, SystemError)) or isinstance(error, OSError) and error.errno is None:
        if limits := memory_limits():  # libraries that could not be loaded say so in many ways
            return 2, f"{type(error).__name__}: {text}; {limits}, which may be too little{notes}"
    return 1, f"{type(error).__name__}: {text}{notes}"


def _folder_is_gone():
    "Has the current folder been removed? Then what asks for its name fails, and that error names no file."
    try:
        os.getcwd()
        return False
    except OSError:
        return True
