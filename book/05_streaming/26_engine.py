# %% [markdown]
# # 5.26 From a folder to a running model
#
# By now there is a forward pass that knows no files (5.8), a trunk and experts that are read from a disk (5.13, 5.16),
# a plan that says how much of them stays in memory (5.18), and a tokenizer. This chapter puts them together. It adds
# four promises. A bad folder is refused before an hour of reading, not after it. Two threads cannot change one
# sequence. What is reported was measured. A number that is not finite is traced to a row of a file.
#
# At the end `k3lib.load(folder, ram="8GB")` gives a model that decodes.
#
# Needs chapters [5.8], [5.13], [5.16], [5.18], [5.20], [5.21] and [5.25]. Runs in seconds.
#
# [5.25 What a run has cost](25_report.ipynb) ·
# [contents](../README.md) ·
# [5.27 Whether every byte is the one that was published](27_verify.ipynb)
#
# [5.8]: 08_model.ipynb
# [5.13]: 13_trunk.ipynb
# [5.16]: 16_experts.ipynb
# [5.18]: 18_plan.ipynb
# [5.20]: 20_state.ipynb
# [5.21]: 21_tokenizer.ipynb
# [5.25]: 25_report.ipynb

# %%
import json
import shutil
import tempfile
from pathlib import Path

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
ORACLE = ROOT / "fixtures" / "oracle13"
EXPECTED = json.loads((ORACLE / "expected.json").read_text())

# %% tags=["export"]
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

# %% [markdown]
# ## 5.26.1 The engine
#
# `Engine` is what `load` returns. It owns one sequence and composes the rest: it asks `Model` for a forward pass, and
# `Trunk`, `Experts` and `Files` for weights and for what was read. None of these refers to the engine. So when the last
# reference to an engine goes, all of them are freed at once: memory, descriptors and readers ([5.11.3]).
#
# [5.11.3]: 11_prefetch.ipynb#5.11.3-What-is-true-whenever-nobody-holds-the-lock

# %% tags=["export"]
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


# %% [markdown]
# One caller at a time can change a sequence: with two, some layers would have read tokens that others have not. A
# forked child has a copy of its parent's memory but none of the reader threads, so the child would wait for them for
# ever. A second thread and a forked child get an EngineError at once. A sequence that an interrupted pass has left
# incomplete (5.8) is refused, too.

# %% tags=["export"]
class Engine(Engine):
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


# %% [markdown]
# A prompt is read in chunks, each as long as the plan has room for. Decoding needs the logits of the last token only,
# so the other chunks end before the head.

# %% tags=["export"]
class Engine(Engine):
    def prefill(self, ids: Iterable[int] | int) -> np.ndarray:
        "Read `ids`, one or more. Returns logits float32 [vocab] of the last. Raises what forward raises."
        return self.forward(ids, last_only=True)[-1]

    def step(self, token: int) -> np.ndarray:
        "Read one id. Returns logits float32 [vocab]. Raises what forward raises."
        return self.prefill([token])


# %% tags=["export"]
class Engine(Engine):
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


# %% [markdown]
# One chunk is one forward pass. `Model` shows a `watch` function what it computes, and the end of each layer is one of
# these events: a token of K3 takes seconds, and a program that shows progress wants to count layers.

# %% tags=["export"]
class Engine(Engine):
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


# %% [markdown]
# Ids come from people and programs: `[304.5]`, `"123"`, `True` and a set, which has no order, are refused before
# anything is read. They are kept as four bytes each, and are refused as soon as there are more than the context holds.

# %% tags=["export"]
class Engine(Engine):
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


@default_arithmetic()
def most_likely(logits: np.ndarray) -> int:
    "The id of the largest of `logits`, float32 [vocab]; of equal ones, the first."
    return int(np.argmax(logits))


def check_vocabulary(ids: Iterable[int], config: Config) -> None:
    "Raise UsageError for an id that is not in the vocabulary."
    for i in ids:
        if not 0 <= i < config.vocab_size:
            raise UsageError(f"token id {i} is out of range: the vocabulary has ids 0..{config.vocab_size - 1}")


# %% [markdown]
# ## 5.26.2 Decoding
#
# The first pass reads the whole prompt, every later one a single id. The largest logit wins; of equal ones the lower
# id, which is what `argmax` returns. With a temperature the id is drawn instead (5.24), and the draw depends on seed,
# position and logits alone. Decoding ends after `max_new_tokens` or on a stop id (5.21).
#
# The ids are read after those that the sequence has read already. So a state that was loaded, or a prefix that was read
# before, is gone on with, and reset() begins anew. One id is easily lost on the way: the last one that was yielded has
# been shown, but no pass has read it. To go on without it would leave a hole in the sequence, to read it unasked would
# read it twice for a caller who passes it. So `unread` keeps it, a saved state too, and the next ids must begin with
# it.
#
# Between two of its tokens a generator is suspended, and its caller may use the same engine for another sequence. The
# generator must not go on with that other sequence. So it compares the number of calls that may have changed the
# sequence.

# %% tags=["export"]
class Engine(Engine):
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


# %% tags=["export"]
class Engine(Engine):
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


# %% [markdown]
# The engine's sequence can be begun anew, saved and loaded (5.20). For that the engine knows its model's fingerprint.

# %% tags=["export"]
class Engine(Engine):
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


# %% tags=["export"]
class Engine(Engine):
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


# %% [markdown]
# Closing ends the readers and gives the weights' memory back. The report can still be asked for. An engine that is
# dropped without closing gives back the same. But a notebook may refer to it in ways that are easily forgotten: another
# variable, `Out`, a suspended `generate`.

# %% tags=["export"]
class Engine(Engine):
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


# %% [markdown]
# The report is put together from what model, experts and files have counted.

# %% tags=["export"]
class Engine(Engine):
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


# %% [markdown]
# ## 5.26.3 A number that is not finite
#
# When a product comes out infinite or NaN (1.5), the error names the weight that was taken last and the rows that were
# multiplied. The engine reads those rows again and says what is wrong: a damaged number in the file, or finite weights
# whose sum float32 could not hold.
#
# A damaged matrix shows in its products, since every weight is multiplied. A damaged vector may be multiplied by zero,
# or hidden by a $\tanh$, so vectors are checked when they are loaded. A row of the embedding is not multiplied at all
# and is checked where it is read.

# %% tags=["export"]
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


# %% tags=["export"]
def embedding_row(files: Files, extent: Extent, i: int) -> np.ndarray:
    "Row i of the embedding at `extent`, float32 [H]. Raises CheckpointError for a number that is not finite."
    row = bf16_to_float32(files.array(extent, part_of(EMBED), i, 1)[0])
    if not np.isfinite(row).all():
        raise CheckpointError(not_finite_in(files, extent, EMBED, i, i + 1))
    return row


class Engine(Engine):
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


# %% [markdown]
# ## 5.26.4 Loading
#
# `load` checks everything that can be checked without reading weights. The config is refused or accepted as a whole
# (5.3). Every tensor that it implies must be in the headers with its dtype and shape (5.4). The plan must fit the
# budget and the memory that is free (5.18). Only then is anything large allocated. A packed trunk (5.19) takes the
# checkpoint's place as the source of everything but embedding and experts.

# %% tags=["export"]
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


# %% [markdown]
# Trunk and experts start threads. If loading fails half-way, or Ctrl-C ends it, those threads must end too. So each
# part is put on a stack of parts to close, until the engine owns them all.

# %% tags=["export"]
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


# %% [markdown]
# What this process holds already is part of the budget. So what nobody uses any more is freed before the plan is made.
# An engine in a cycle of references, as `on_layer` may make one, waits for the garbage collector. An interactive
# session keeps the last error and, with it, all variables of the functions that the error came through, the engine
# among them; those of this package are cleared. An engine that is still bound to a name is in use, even if a notebook
# cell is about to give the name another value. If the budget is too small because of it, the message says so.

# %% tags=["export"]
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


# %% [markdown]
# `load` is the whole way from a folder to an engine: arguments, headers, plan, weights. Before a first run another
# process compiles the kernels ([5.18.2]), which takes some seconds; a plan that is refused is refused before.
#
# [5.18.2]: 18_plan.ipynb#5.18.2-What-compiling-takes

# %% tags=["export"]
def budget_argument(ram: str | int) -> int:
    "Bytes of the budget `ram`, a whole number or text. Raises UsageError."
    if not isinstance(ram, str):
        return whole_number("ram", ram, 1, 1 << 62)
    try:
        return parse_size(ram)
    except UsageError as error:
        raise UsageError(f"ram: {error}") from None


# %% tags=["export"]
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


# %% [markdown]
# ## 5.26.5 The gate
#
# The embedded model, from its folder to the twenty ids that another implementation generated.

# %%
with load(os.path.relpath(ORACLE / "model"), ram="1GB", context=32) as model:
    assert list(model.generate(EXPECTED["prompt_ids"], 20)) == EXPECTED["generated_ids"]
    try:
        next(model.generate(EXPECTED["prompt_ids"]))
    except EngineError as error:
        print("not begun anew:", error)
    report = model.report
print("20 of 20 ids;", len(report.step_seconds), "steps,", report.expert_requests, "experts requested")
assert sum(map(len, [report.ids, report.step_bytes])) == 40 and report.io_wait_seconds <= report.wall_seconds

# %% tags=["nbval-ignore-output"]
print(report.text().replace(f"{Path.cwd()}{os.sep}", ""))  # the report has the whole path

# %% [markdown]
# A second thread is refused while the first is inside a pass, and the first thread's answer stays the same.

# %%
with load(ORACLE / "model", ram="1GB", context=32) as model:
    alone = model.prefill(EXPECTED["prompt_ids"]).tobytes()
    model.reset()
    inside, go_on, answers = threading.Event(), threading.Event(), []

    def hold(L):
        inside.set()
        go_on.wait()

    model.on_layer = hold
    first = threading.Thread(target=lambda: answers.append(model.prefill(EXPECTED["prompt_ids"]).tobytes()))
    first.start()
    inside.wait()
    try:
        model.step(1)
    except RuntimeError as error:
        print("refused:", error)
    go_on.set()
    first.join()
    assert answers == [alone]


# %% [markdown]
# One scale byte of one expert becomes 255, which is NaN. The line names file, tensor, row and column.

# %%
def overwrite(extent, at, byte):
    with open(extent.file, "r+b") as file:
        file.seek(extent.offset + at)
        file.write(bytes([byte]))


with tempfile.TemporaryDirectory() as scratch:
    folder = Path(shutil.copytree(ORACLE / "model", Path(scratch, "model")))
    with load(folder, ram="1GB", context=32) as model:
        routed = []

        def watch(name, L, value):
            if name == "router":
                routed.append(value[0][0, 0])

        model.forward(EXPECTED["prompt_ids"], watch=watch)
    overwrite(Checkpoint(folder).extent(expert_name(1, routed[0], "w1_scale")), 7, 255)
    with load(folder, ram="1GB", context=32) as model:
        try:
            model.prefill(EXPECTED["prompt_ids"])
        except CheckpointError as error:
            print(str(error).replace(f"{folder}/", ""))

# %% [markdown]
# ## Summary
#
# - `load` checks config, headers, vocabulary and plan; only then are weights pinned and threads started.
# - An engine composes model, trunk, experts and files. It owns one sequence, and one caller at a time changes it.
# - A product that is not finite is traced to a row of a file, or reported as an overflow.
#
# ## Exercises
#
# 1. Raise an exception from `on_layer` in the middle of a prompt, then call `step`. Which attribute of the sequence
#    makes the engine refuse, and which calls make it usable again?
# 2. Suspend one `generate` after its first token, run another to its end, and go on with the first. What is the
#    earliest moment at which the first could notice?
#
# Next: [5.27 Whether every byte is the one that was published](27_verify.ipynb).
