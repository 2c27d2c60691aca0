"""5.26 From a folder to a running model

Made from book/05_streaming/26_engine.py: edit that, then run `make export`.
"""

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple, NoReturn
import numpy as np
from k3lib.parallel import CORES, default_arithmetic
from k3lib.matmul import NotFinite, bf16_to_float32
from k3lib.system import peak_bytes, read_call_bytes, return_freed_memory, trim_freed_memory
from k3lib.fileio import CheckpointError, K3Error, UsageError, function_argument, given_path, shown_value
from k3lib.config import Config, is_synthetic, read_config
from k3lib.tensors import (
    EMBED, check_tensors, expert_name, forward_order, layer_of, part_of, used_entries,
)
from k3lib.header import Extent
from k3lib.checkpoint import Checkpoint
from k3lib.model import Model, Sequence
from k3lib.disk import Files, MAX_READERS
from k3lib.trunk import Trunk
from k3lib.experts import Experts
from k3lib.memory import parse_size, whole_number
from k3lib.plan import Plan, PlanError, compile_first, make_plan
from k3lib.pack import Packed
from k3lib.sampling import Sampling
from k3lib.report import Report, Step, Steps
from k3lib.state import load_sequence, model_fingerprint, save_sequence
from k3lib.tokenizer import Tokenizer, ids_argument, is_whole, open_tokenizer


OPEN: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # {id: engine} of the engines that are not closed


class EngineError(K3Error, RuntimeError):
    "A call that a model cannot serve: it is closed, busy, in another process, or its sequence is incomplete."


class Engine:
    """A model that decodes under its plan, and the one sequence that it reads. Made by `load`.

    Methods that read or change the sequence run one at a time, in the process that made the engine: a second thread
    and a forked child get an EngineError. After an interrupted pass, all of them but reset() and load_state() raise it.

    `config`, `plan`, `tokenizer` (or None), `stop` (the stop ids, which end a reply). `chunk`: the most tokens of a
    forward pass. `on_layer(L)` is called after every layer of every pass. `steps`: a Step for each generated token.
    `unread`: the id that was generated last, until it is read or the sequence is another; else None.
    """

    def __init__(self, source: "Source", plan: Plan, files: Files, trunk: Trunk, experts: Experts, threads: int,
                 read_calls_before: int | None):
        "`read_calls_before`: the result of read_call_bytes() before the first weight was read."
        self.source, self.plan, self.files, self.trunk, self.experts = source, plan, files, trunk, experts
        self.config, self.tokenizer, self.threads = source.config, source.tokenizer, threads
        self.chunk, self.context = plan.chunk, plan.context
        self.stop = frozenset(self.config.eos_token_ids) | frozenset(self.tokenizer.stop_ids if self.tokenizer else ())
        self.on_layer: Callable[[int], object] = lambda L: None
        self.steps = Steps(files.bytes_read)
        self._read_calls_before, self._wall_seconds, self._io_wait_seconds = read_calls_before, 0.0, 0.0
        self._process, self._lock, self._closed = os.getpid(), threading.Lock(), False
        self._moves = 0  # calls that may have changed the sequence
        self.unread: int | None = None
        self._fingerprint: str | None = None
        check_vectors(self.config, trunk, files)
        row = partial(embedding_row, files, self._extent(EMBED))  # a method would refer to the engine
        self.model = Model(self.config, row, trunk.weight, experts, threads)
        self.sequence = Sequence(self.config, self.context)
        OPEN[id(self)] = self

    @contextlib.contextmanager
    def _exclusive(self):
        "Run one call that uses the sequence. EngineError in a forked child, after close(), during another call."
        if os.getpid() != self._process:
            raise EngineError(f"this model belongs to process {self._process}, and a forked process has none of its "
                              "readers: load a model here")
        if self._closed:
            raise EngineError("this model is closed: load one")
        if not self._lock.acquire(blocking=False):
            raise EngineError("another call of this model is under way: one at a time, so load a model for each "
                              "thread")
        try:
            yield
        finally:
            self._lock.release()

    def _check_complete(self):
        if not self.sequence.complete:
            raise EngineError("a forward pass was interrupted, so some layers have read tokens that others have not: "
                              "reset() or load_state() first")

    def prefill(self, ids: Iterable[int] | int) -> np.ndarray:
        "Read `ids`, one or more. Returns logits float32 [vocab] of the last. Raises what forward raises."
        return self.forward(ids, last_only=True)[-1]

    def step(self, token: int) -> np.ndarray:
        "Read one id. Returns logits float32 [vocab]. Raises what forward raises."
        return self.prefill([token])

    def forward(self, ids: Iterable[int] | int, last_only: bool = False, watch: Callable | None = None) -> np.ndarray:
        """Read `ids` after the tokens read so far. Returns logits float32 [T, vocab], or [1, vocab] if `last_only`.

        The bits do not depend on `chunk`. `watch(name, layer, value)` is called as Model.forward calls it, a chunk at a
        time. The plan has room for one row of logits; those of all tokens are memory of the caller. Raises UsageError
        for values that are no ids or do not fit the context, CheckpointError for weights that cannot be read or are
        damaged, and EngineError as the class says.
        """
        function_argument("watch", watch)
        function_argument("on_layer", self.on_layer)
        with self._exclusive():
            self._moves += 1
            tokens, self.unread = self._checked(ids), None
            began, waited = time.perf_counter(), self._waited()
            every = None if last_only else np.empty((len(tokens), self.config.vocab_size), np.float32)
            for first in range(0, len(tokens), self.chunk):
                chunk = tokens[first:first + self.chunk]
                wanted = len(chunk) if not last_only else int(first + len(chunk) == len(tokens))
                rows = self._pass(chunk, wanted, watch)
                if every is not None:
                    every[first:first + len(chunk)] = rows
            self.files.check()
            self._wall_seconds += time.perf_counter() - began
            self._io_wait_seconds += self._waited() - waited
            return rows if every is None else every

    @default_arithmetic()
    def _pass(self, chunk, wanted, watch):
        "One forward pass: logits float32 [wanted, vocab]."
        def watched(name, L, value):
            if watch is not None:
                watch(name, L, value)
            if name == "hidden":
                self.on_layer(L)

        self.trunk.begin()
        try:
            return self.model.forward(chunk, self.sequence, wanted, watched)
        except NotFinite as error:
            raise CheckpointError(self._cause(error)) from None

    def _waited(self):
        return self.trunk.wait_seconds + self.experts.wait_seconds

    def _checked(self, ids):
        "The ids as an array of uint32. Raises UsageError for a value that is no id or does not fit, and EngineError."
        self._check_complete()
        tokens, room = array("I"), self.context - self.position
        for i in [ids] if is_whole(ids) else ids_argument("ids", ids):
            if not is_whole(i):
                raise UsageError(f"ids holds {shown_value(i)} at place {len(tokens)}: whole numbers are needed")
            check_vocabulary([i], self.config)
            if len(tokens) == room:
                count = len(ids) if hasattr(ids, "__len__") else f"more than {room}"
                raise UsageError(f"{self.position} + {count} positions do not fit the context of {self.context} "
                                 "this model was loaded for")
            tokens.append(i)
        if not tokens:
            raise UsageError("the prompt is empty: at least one token id is needed")
        return tokens

    def generate(self, ids: Iterable[int], max_new_tokens: int = 8,
                 on_logits: Callable[[np.ndarray], object] | None = None,
                 sampling: Sampling | None = None) -> Iterator[int]:
        """Read `ids` after the tokens read so far, then yield at most `max_new_tokens` ids, none after a stop id.

        The sequence goes on where it stands; reset() begins anew. If an earlier call has yielded an id that was not
        read yet, `ids` must begin with that id (`unread`). The most likely id is chosen, or what `sampling` draws.
        `on_logits` is called with each step's logits, float32 [vocab]. An engine has one sequence: if another call has
        changed it since the last token, this generator ends with an EngineError. Raises UsageError for a wrong argument
        at once, later EngineError and what forward raises.
        """
        function_argument("on_logits", on_logits)
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 1, 1 << 30)
        if not isinstance(sampling, Sampling | None):
            raise UsageError(f"sampling is {shown_value(sampling)}: a k3lib.Sampling is needed, or None")
        return self._generated(ids_argument("ids", ids), max_new_tokens, on_logits, sampling or Sampling())

    def _generated(self, unread, max_new_tokens, on_logits, sampling):
        unread = self._from_unread(unread)
        for _ in range(max_new_tokens):
            began, before = time.perf_counter(), dict(self.files.bytes_read)
            logits = self.prefill(unread)
            token = most_likely(logits) if sampling.greedy else sampling.choose(logits, self.position)
            bytes_read = {part: n - before[part] for part, n in self.files.bytes_read.items()}
            self.steps.append(Step(token, time.perf_counter() - began, bytes_read))
            self.unread = token
            if on_logits is not None:
                on_logits(logits)
            moves = self._moves
            yield token
            if token in self.stop:
                return
            if self._moves != moves:
                raise EngineError("the model has begun or read another sequence since the last token: one sequence "
                                  "at a time")
            unread = [token]

    def _from_unread(self, ids):
        "The same ids. Raises EngineError if they do not begin with the id that was yielded and not read."
        with self._exclusive():
            unread = self.unread
        if unread is None:
            return ids
        ids = ids if hasattr(ids, "__getitem__") else array("I", ids)
        if not len(ids) or ids[0] != unread:
            raise EngineError(f"the sequence stands after {self.position} tokens, and id {unread}, which was "
                              "generated last, has not been read: begin the ids with it, or reset() to begin anew")
        return ids

    @property
    def position(self) -> int:
        "Tokens of the sequence read so far."
        return self.sequence.position

    def reset(self) -> None:
        "Forget the sequence: zero KDA states, empty KV caches, position 0."
        with self._exclusive():
            self._moves += 1
            self.sequence.reset()
            self.unread = None

    def __reduce__(self) -> NoReturn:
        "Neither copied nor pickled: two objects would close the same files. Raises UsageError."
        raise UsageError(f"a model holds open files and threads, so it has no copies: load {self.source.path} again")

    def save_state(self, file: str | os.PathLike) -> None:
        "Write the sequence to `file`, whole or not at all: a safetensors file (5.20). Raises OSError, UsageError."
        file = given_path("file", file)
        if os.path.realpath(file.parent) == os.path.realpath(self.source.path):
            raise UsageError(f"{file}: lies in the model's own folder, which is never written to")
        with self._exclusive():
            self._check_complete()
            save_sequence(file, self.sequence, self.fingerprint(), self.unread)

    def load_state(self, file: str | os.PathLike) -> None:
        """Go on with the sequence that save_state has written to `file`, at any budget, number of threads and context.

        Raises MissingFile; StateError for a file that is damaged, or of another model or version; UsageError if the
        context is too small. After an error the sequence is unchanged or, as load_sequence says, incomplete.
        """
        file = given_path("file", file)
        with self._exclusive():
            self._moves += 1
            self.unread = load_sequence(file, self.sequence, self.fingerprint())

    def fingerprint(self) -> str:
        "The name of this model in saved states (5.20.2), in hex. The first call reads a row of every matrix."
        if self._fingerprint is None:
            extents = ((name, self._extent(name)) for name in forward_order(self.config))
            tensors = ((name, extent, self._first_row(name, extent)) for name, extent in extents)
            self._fingerprint = model_fingerprint(self.config, tensors)
        return self._fingerprint

    def _first_row(self, name, extent):
        "A vector whole, or row 0 of a matrix."
        value = self.trunk.resident.get(name)
        return value if isinstance(value, np.ndarray) else self.files.array(extent, "other", 0, 1)

    def close(self) -> None:
        """End the readers, close the shards and give the weights' memory back; `with` does it too.

        In a forked process this does nothing: the readers and descriptors are those of the parent.
        """
        if os.getpid() != self._process:
            return
        self._closed = True
        OPEN.pop(id(self), None)
        self.experts.close()
        self.trunk.close()
        self.files.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def report(self) -> Report:
        "A Report of everything this model has done so far."
        files, counted = self.files, read_call_bytes()
        from_kernel = None if counted is None or self._read_calls_before is None else counted - self._read_calls_before
        seconds = files.read_seconds
        return Report(
            model=self.source.path, synthetic=self.source.synthetic, threads=self.threads, plan=self.plan,
            trunk=self.source.trunk_folder,
            steps=self.steps.snapshot(), wall_seconds=self._wall_seconds, io_wait_seconds=self._io_wait_seconds,
            peak_rss_bytes=peak_bytes(), bytes_read=dict(files.bytes_read),
            expert_requests=self.experts.requests, expert_hits=self.experts.hits, files=files.access(),
            asked_bytes=files.bytes_transferred, kernel_bytes=from_kernel,
            read_bytes_per_second=sum(files.bytes_read.values()) / seconds if seconds else 0.0)

    def _cause(self, error):
        "One line on a NotFinite: the damaged number in the rows it names, or the tensor where an activation overflows."
        name, L = error.tensor, layer_of(error.tensor)
        with_numbers = name  # the tensor whose rows may hold the number that is not finite
        if error.matrix:
            e, matrix = error.matrix
            name, with_numbers = expert_name(L, e, matrix), expert_name(L, e, f"{matrix}_scale")
        if error.rows:
            damage = not_finite_in(self.files, self._extent(with_numbers), with_numbers, *error.rows)
            if damage:
                return damage
        where = "after the last layer" if L is None else f"layer {L}"
        return (f"{self._extent(name).file}: {where}, {name}: {error}; the numbers in the file are finite: "
                "an activation overflows")

    def _extent(self, name):
        "Where a tensor is read from: a packed trunk's folder, or the checkpoint's."
        return self.source.trunk.extent(name)


@default_arithmetic()
def most_likely(logits: np.ndarray) -> int:
    "The id of the largest of `logits`, float32 [vocab]; of equal ones, the first."
    return int(np.argmax(logits))


def check_vocabulary(ids: Iterable[int], config: Config) -> None:
    "Raise UsageError for an id that is not in the vocabulary."
    for i in ids:
        if not 0 <= i < config.vocab_size:
            raise UsageError(f"token id {i} is out of range: the vocabulary has ids 0..{config.vocab_size - 1}")


def not_finite_in(files: Files, extent: Extent, name: str, begin: int, end: int) -> str | None:
    "One line on the first infinity, NaN or E8M0 scale of 255 in rows begin..end of a tensor, or None if all is finite."
    rows = files.array(extent, "other", begin, end - begin)
    values = bf16_to_float32(rows) if extent.dtype == "BF16" else rows
    bad = rows == 255 if extent.dtype == "U8" else ~np.isfinite(values)
    if not bad.any():
        return None
    row, *columns = np.argwhere(bad)[0].tolist()
    value, kind = rows[row, *columns], {"U8": "E8M0 scale", "BF16": "bfloat16", "F32": "float32"}[extent.dtype]
    found = f"{kind} 0x{value:04x}" if extent.dtype == "BF16" else f"{kind} {value}"
    place = ", ".join([f"row {begin + row}", *(f"column {i}" for i in columns)])
    return f"{extent.file}: {name}, {place}: {found}, expected a finite number: damaged"


def check_vectors(config: Config, trunk: Trunk, files: Files) -> None:
    "Raise CheckpointError, naming file, tensor and row, for a vector of the trunk that is not finite."
    for name, value in trunk.resident.items():
        if isinstance(value, np.ndarray) and not np.isfinite(value[:used_entries(config, name)]).all():
            extent = trunk.layout.resident[name].extent
            raise CheckpointError(not_finite_in(files, extent, name, 0, extent.shape[0]))


def embedding_row(files: Files, extent: Extent, i: int) -> np.ndarray:
    "Row i of the embedding at `extent`, float32 [H]. Raises CheckpointError for a number that is not finite."
    row = bf16_to_float32(files.array(extent, part_of(EMBED), i, 1)[0])
    if not np.isfinite(row).all():
        raise CheckpointError(not_finite_in(files, extent, EMBED, i, i + 1))
    return row


class Source(NamedTuple):
    "What is known of a model from config, headers and vocabulary, before any weight is read."
    path: str
    config: Config
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    synthetic: bool
    trunk: Checkpoint | Packed  # where the trunk is read from
    trunk_folder: str | None

    def expert_extents(self, L: int, e: int) -> list[Extent]:
        "Where the six tensors of expert `e` of layer L lie, in the order of the files."
        return list(self.checkpoint.expert(L, e).values())


def open_source(path: str | os.PathLike, trunk: str | os.PathLike | None) -> Source:
    """Read and check a checkpoint's config, headers and vocabulary, and a packed trunk's headers in folder `trunk`.

    Raises ConfigError, CheckpointError, TokenizerError, MissingFile, and UsageError for what is no path.
    """
    path, trunk = given_path("path", path), None if trunk is None else given_path("trunk", trunk)
    config, checkpoint = read_config(path), Checkpoint(path)
    check_tensors(config, checkpoint)
    read_from = checkpoint if trunk is None else Packed(checkpoint, forward_order(config), trunk)
    return Source(str(path), config, checkpoint, open_tokenizer(path, config), is_synthetic(path), read_from,
                  None if trunk is None else str(trunk))


@default_arithmetic()
def start(source: Source, plan: Plan, threads: int, progress: Callable[[int], object] | None) -> Engine:
    "Read the tensors that stay in memory, start the readers, and return the Engine that owns both."
    with contextlib.ExitStack() as opened:
        files, read_calls_before = Files(source.trunk.fingerprints), read_call_bytes()
        opened.callback(files.close)
        trunk = Trunk(plan.layout.trunk, files, progress)
        opened.callback(trunk.close)
        experts = Experts(plan.layout.experts, source.expert_extents, files)
        opened.callback(experts.close)
        engine = Engine(source, plan, files, trunk, experts, threads, read_calls_before)
        opened.pop_all()  # closes nothing: from here on Engine.close() does it
        return engine


def free_dropped_models() -> None:
    "Free the models that nobody uses any more, and give their memory back to the system."
    error = getattr(sys, "last_value", None)  # what an interactive session keeps of the last error that it showed
    while isinstance(error, BaseException):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("k3lib."):
                with contextlib.suppress(RuntimeError):  # a function that still runs
                    frame.clear()
                    _ = frame.f_locals  # empties the copy that a debugger has asked for
        error = error.__context__
    if OPEN:
        gc.collect()
    return_freed_memory()
    trim_freed_memory()


def still_open() -> str:
    "For a message: which models are open in this process, and what to do about it; '' if none is."
    engines = [engine for reference in OPEN.valuerefs() if (engine := reference()) is not None]
    folders = sorted(engine.source.path for engine in engines if engine._process == os.getpid())
    return f"; part of that are models that are still open, {', '.join(folders)}: close() them first" if folders else ""


def budget_argument(ram: str | int) -> int:
    "Bytes of the budget `ram`, a whole number or text. Raises UsageError."
    if not isinstance(ram, str):
        return whole_number("ram", ram, 1, 1 << 62)
    try:
        return parse_size(ram)
    except UsageError as error:
        raise UsageError(f"ram: {error}") from None


def load(path: str | os.PathLike, ram: str | int = "8GB", trunk: str | os.PathLike | None = None,
         threads: int | None = None, *, context: int = 1024, prompt_tokens: int | None = None,
         readers: int | None = None, on_plan: Callable[[Plan], object] | None = None,
         progress: Callable[[int], object] | None = None, say: Callable[[str], object] | None = None) -> Engine:
    """An Engine that decodes the checkpoint in folder `path`.

    `ram`: the most memory that this process may hold, in bytes or as text ("8GB", "1GiB"). The memory that the process
    already holds is part of it, that of other models included. Models that nobody refers to are freed before. Two loads
    at the same time do not see each other's plans. `context`: positions for which there is room. `prompt_tokens`: the
    longest prompt, if known; a prefill chunk is never longer. `trunk`: a folder that `k3 pack` has filled from this
    checkpoint; the trunk is read from there.

    `threads`: threads of arithmetic, all cores if None. `readers`: threads that read, never fewer than `threads`;
    `k3 plan --measure` says how many the device can use. `on_plan(plan)` is called before anything large is allocated,
    `progress(nbytes)` after each tensor that is pinned, `say(line)` when kernels have to be compiled first.

    A path is a str or an os.PathLike of one; bytes are none. Raises ConfigError, CheckpointError, TokenizerError,
    PlanError, UsageError and MissingFile, each of which is a K3Error.
    """
    path, trunk = given_path("path", path), None if trunk is None else given_path("trunk", trunk)
    for name, function in ("on_plan", on_plan), ("progress", progress), ("say", say):
        function_argument(name, function)
    free_dropped_models()
    budget = budget_argument(ram)
    threads = CORES if threads is None else whole_number("threads", threads, 1, CORES)
    readers = None if readers is None else whole_number("readers", readers, 1, MAX_READERS)
    prompt_tokens = None if prompt_tokens is None else whole_number("prompt_tokens", prompt_tokens, 1, 1 << 30)
    context = whole_number("context", context, 1, 1 << 30)
    source = open_source(path, trunk)
    planned = partial(make_plan, source.config, source.checkpoint, budget, context, trunk=source.trunk,
                      prompt_tokens=prompt_tokens, threads=threads, readers=readers)
    try:
        plan = planned()
        if compile_first(say):
            plan = planned()
    except PlanError as error:
        raise PlanError(error.least, f"{error}{still_open()}") from None
    if on_plan is not None:
        on_plan(plan)
    return start(source, plan, threads, progress)


__all__ = [
    "OPEN", "EngineError", "Engine", "most_likely", "check_vocabulary", "not_finite_in", "check_vectors",
    "embedding_row", "Source", "open_source", "start", "free_dropped_models", "still_open", "budget_argument",
    "load",
]
