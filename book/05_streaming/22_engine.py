# %% [markdown]
# # 5.22 From a folder to a running model
#
# [5.21 Bytes to ids and back](21_tokenizer.ipynb) · [contents](../README.md) · [5.23 Whether every byte is the one that was published](23_verify.ipynb)

# %% [markdown]
# ## 5.22.1 The report
#
# What the plan promised is compared with what happened: bytes by part, hits among the experts, seconds computing and seconds
# waiting, the measured peak beside the planned one.

# %% tags=["export"]
import contextlib
import dataclasses
import sys
import time
from pathlib import Path
import numpy as np
from tqdm import tqdm
from k3lib.parallel import CORES
from k3lib.system import return_freed_memory
from k3lib.fileio import UsageError
from k3lib.config import is_synthetic, read_config
from k3lib.tensors import check_tensors, forward_order, is_router, part_of, row_multiples
from k3lib.checkpoint import Checkpoint
from k3lib.model import Model, check_range
from k3lib.disk import Files, MAX_READERS
from k3lib.trunk import Trunk
from k3lib.experts import Experts
from k3lib.memory import parse_size, peak_bytes, read_call_bytes, shown_size
from k3lib.plan import Plan, READ_AHEAD, expert_readers, make_plan
from k3lib.pack import Packed, pack
from k3lib.tokenizer import open_tokenizer


# %% tags=["export"]
@dataclasses.dataclass
class Report:
    "What a run did and what it cost. Bytes are bytes, times are seconds."
    model: str
    synthetic: bool
    threads: int
    plan: Plan
    trunk: str | None = None  # the folder of a packed trunk
    ids: list = dataclasses.field(default_factory=list)
    step_seconds: list = dataclasses.field(default_factory=list)
    step_bytes: list = dataclasses.field(default_factory=list)  # bytes read in each step, by part
    wall_seconds: float = 0.0
    io_wait_seconds: float = 0.0
    peak_rss_bytes: int | None = None
    bytes_read: dict = dataclasses.field(default_factory=dict)
    expert_requests: int = 0
    expert_hits: int = 0
    files: dict = dataclasses.field(default_factory=dict)
    asked_bytes: int = 0
    kernel_bytes: int | None = None
    read_bytes_per_second: float = 0.0

    @property
    def compute_seconds(self):
        return self.wall_seconds - self.io_wait_seconds

    def as_dict(self):
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
                "plan": self.plan.as_dict(), "compute_seconds": self.compute_seconds}

    def text(self):
        "The report as a table."
        peak = "not told by this system" if self.peak_rss_bytes is None else (
            f"{shown_size(self.peak_rss_bytes)} ({100 * self.peak_rss_bytes / self.plan.total:.0f}% of the plan's {shown_size(self.plan.total)})")
        how = {}
        for name, way in self.files.items():
            how.setdefault(way, []).append(name)
        rows = [
            ("model", self.model + " (synthetic weights)" * self.synthetic),
            ("trunk", "read from the model's own files" if self.trunk is None else f"packed in {self.trunk}"),
            ("tokens", f"{len(self.ids)} new, {self.threads} threads"),
            ("seconds a step", ", ".join(f"{s:.3g}" for s in self.step_seconds[:6]) + (", ..." if len(self.step_seconds) > 6 else "")),
            ("wall", f"{self.wall_seconds:.2f} s: {self.compute_seconds:.2f} s computing, {self.io_wait_seconds:.2f} s waiting for bytes"),
            ("read", _by_part(self.bytes_read)),
            ("in the last step", _by_part(self.step_bytes[-1]) if self.step_bytes else "no step yet"),
            ("read calls", f"{shown_size(self.asked_bytes)} in whole pages, "
                           + ("the system keeps no count" if self.kernel_bytes is None else f"the system counted {shown_size(self.kernel_bytes)}, compiled kernels included")
                           + f"; {shown_size(self.read_bytes_per_second)}/s a reader"),
            ("experts", f"{self.expert_requests} requested, {self.expert_hits} of them resident"),
            ("files", "; ".join(f"{len(names)} {way}" for way, names in how.items())),
            ("peak memory", peak),
        ]
        return "\n".join(["report", *(f"  {k:<18}{v}" for k, v in rows)])


def _by_part(bytes_read):
    return ", ".join(f"{part} {shown_size(n)}" for part, n in bytes_read.items())


# %% [markdown]
# ## 5.22.2 Greedy decoding
#
# The first pass reads the whole prompt, every later one a single id. The largest logit wins; of equal ones the lower id, which
# is what `argmax` returns. Decoding ends after `max_new_tokens` or on an end id.

# %% tags=["export"]
class Decoder(Model):
    "A Model that knows its plan, generates greedily and keeps the account. Made by `load`."

    def __init__(self, config, trunk, experts, plan, report, stop, tokenizer, read_before):
        self._read_before, self._report = read_before, report
        self.plan, self.threads, self.stop, self.tokenizer = plan, report.threads, stop, tokenizer
        super().__init__(config, trunk, experts, plan.context, plan.chunk)

    def forward(self, ids, last_only=False, watch=None):
        began, waited = time.perf_counter(), self._waited()
        result = super().forward(ids, last_only, watch)
        self.trunk.files.check()
        self._report.wall_seconds += time.perf_counter() - began
        self._report.io_wait_seconds += self._waited() - waited
        return result

    forward.__doc__ = Model.forward.__doc__

    def _waited(self):
        return self.trunk.wait_seconds + self.experts.wait_seconds

    def generate(self, ids, max_new_tokens=8, on_logits=None):
        """Greedy decoding of a new sequence: yields up to `max_new_tokens` ids, the last an end id if one comes.

        The largest logit wins, ties go to the lower id. `on_logits` is shown each step's logits, float32 [vocab]. A model
        carries one sequence: whoever resets it or reads on meanwhile ends this one with a RuntimeError.
        """
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 1, 1 << 30)
        self.reset()
        fed = list(ids)
        for _ in range(max_new_tokens):
            began, before = time.perf_counter(), dict(self.trunk.files.bytes_read)
            logits = self.prefill(fed)
            token = int(np.argmax(logits))
            self._report.step_seconds.append(time.perf_counter() - began)
            self._report.step_bytes.append({part: n - before[part] for part, n in self.trunk.files.bytes_read.items()})
            self._report.ids.append(token)
            if on_logits is not None:
                on_logits(logits)
            mine = self.turn
            yield token
            if token in self.stop:
                return
            if self.turn != mine:
                raise RuntimeError("the model has begun or read another sequence since: one sequence at a time")
            fed = [token]

    @property
    def report(self):
        "The Report of everything this model has done so far."
        r, files = self._report, self.trunk.files
        r.asked_bytes, counted = files.moved, read_call_bytes()
        r.kernel_bytes = None if counted is None else counted - self._read_before
        r.read_bytes_per_second = sum(files.bytes_read.values()) / files.read_seconds if files.read_seconds else 0.0
        r.peak_rss_bytes = peak_bytes()
        r.bytes_read = dict(files.bytes_read)
        r.expert_requests, r.expert_hits = self.experts.requests, self.experts.hits
        r.files = files.how()
        return r


# %% [markdown]
# ## 5.22.3 From a folder to a decoder
#
# `load` trusts nothing: the config is refused or believed as a whole (5.3), every tensor it implies must be in the headers with
# its dtype and shape, and the plan must hold, also against the memory that is free, before anything large is allocated. Half a million tensors
# are asked for family by family (5.3.5), which is quick; only if one is not right, the plain loop goes through the names to say which.
# A packed trunk (5.13.5) takes the checkpoint's place as the source of everything but embedding and experts.

# %% tags=["export"]
def load(path, ram="8GB", trunk=None, threads=None, context=1024, prompt_tokens=None, on_plan=None, progress=None, readers=None):
    """A Decoder for the checkpoint in folder `path`, for a process that may hold `ram` bytes of memory in all ("8GB", "1GiB", an int): what
    it holds already, other models too, counts. Two that load at once do not know of each other.

    `trunk`: a folder that pack_trunk has filled from this checkpoint, to read the trunk from. `threads`: arithmetic threads,
    all cores if None. `context`: positions there must be room for. `prompt_tokens`: the longest prompt, if known: the
    prefill chunk need not be larger. `on_plan` is shown the Plan before anything large is allocated, `progress` the bytes
    of each tensor pinned. `readers`: threads that read, of the trunk and of experts, at least one a thread of arithmetic; see
    `k3 plan --measure`. Raises ConfigError, CheckpointError, TokenizerError, UsageError and FileNotFoundError.
    """
    return_freed_memory()
    budget = parse_size(ram)
    threads = CORES if threads is None else whole_number("threads", threads, 1, CORES)
    readers = None if readers is None else whole_number("readers", readers, 1, MAX_READERS)
    context = whole_number("context", context, 1, 1 << 30)
    config = read_config(path)
    checkpoint = Checkpoint(path)
    check_tensors(config, checkpoint)
    walk = list(forward_order(config))
    source = checkpoint if trunk is None else Packed(checkpoint, walk, trunk)
    tokenizer = open_tokenizer(path, config)
    plan = make_plan(config, checkpoint, budget, context, prompt_tokens, threads, readers)
    if on_plan is not None:
        on_plan(plan)
    with contextlib.ExitStack() as undo:  # whatever ends this half-way, Ctrl-C among them, ends the readers
        files, read_before = Files(source.fingerprints), read_call_bytes()
        undo.callback(files.close)
        weights = Trunk(source, walk, plan.pinned, row_multiples(config), files, part_of,
                        plan.slots, plan.slot_bytes, plan.readers, progress, READ_AHEAD, frozenset(filter(is_router, walk)))
        undo.callback(weights.close)
        experts = Experts(lambda L, e: list(checkpoint.expert(L, e).values()), files, plan.expert_slots,
                          plan.expert_slot_bytes, expert_readers(config, plan.readers),
                          range(config.first_k_dense_replace, config.num_hidden_layers))
        undo.callback(experts.close)
        report = Report(str(path), is_synthetic(path), threads, plan, None if trunk is None else str(trunk))
        stop = frozenset(config.eos_token_ids) | frozenset(tokenizer.stop_ids if tokenizer else ())
        model = Decoder(config, weights, experts, plan, report, stop, tokenizer, read_before)
        undo.pop_all()
        return model


# %% [markdown]
# The folder that `trunk` names is made once, by the `k3 pack` command. It does not need to be on the disk the checkpoint is on.

# %% tags=["export"]
def pack_trunk(path, folder):
    """Copy the trunk of the checkpoint in `path` to `folder`, or go on where that was broken off; a line on what is there now.

    Raises what load and pack raise, and UsageError if `folder` cannot be one.
    """
    config, checkpoint, folder = read_config(path), Checkpoint(path), Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file, but the packed trunk needs a folder")
    if checkpoint.path.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise UsageError(f"{folder}: lies in the model's own folder, which is never written to")
    check_tensors(config, checkpoint)
    walk, there, began = list(forward_order(config)), set(folder.glob("*.safetensors")), time.perf_counter()
    try:
        with progress_bar(sum(checkpoint.extent(name).nbytes for name in walk), "B", desc="packing", unit_scale=True) as bar:
            pack(checkpoint, walk, folder, bar.update)
    except KeyboardInterrupt as stop:
        stop.done = f"with {len(list(folder.glob('*.safetensors')))} files in {folder}: the same command goes on from there"
        raise
    files = [file.stat() for file in folder.glob("*.safetensors")]
    size, on_disk = sum(file.st_size for file in files), 512 * sum(file.st_blocks for file in files)
    return (f"{folder}: {len(files)} files of {shown_size(size)}, {shown_size(on_disk)} on disk; {len(files) - len(there)} written "
            f"and {len(there)} found, all compared with {path}, in {time.perf_counter() - began:.1f} s")


# %% [markdown]
# A whole run, as the `k3 decode` command makes it, is these pieces in order. The prompt is encoded first, so that the
# encoder's memory is gone before the large buffers come.

# %% tags=["export"]
def whole_number(name, value, low, high):
    "`value` as an int between `low` and `high`. Raises UsageError naming the argument."
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, float) and value != number or not low <= number <= high:
        raise UsageError(f"{name} is {value!r}: a whole number from {low} to {high} is needed")
    return number


def parse_ids(text):
    "Token ids from '1,2,3'. Raises UsageError naming what is not an id."
    ids = []
    for word in str(text).replace(" ", "").split(","):
        if not word.isdecimal() or len(word) > 18:
            raise UsageError(f"ids: {word!r} is not a token id: write them like 1,2,3")
        ids.append(int(word))
    return ids


def prompt_ids(path, ids, prompt):
    "Token ids of the one of `ids` ('1,2,3') and `prompt` (str or bytes) that is given. The encoder is gone again when this returns."
    if (ids is None) == (prompt is None):
        raise UsageError("give a prompt or ids: exactly one of the two")
    if ids is not None:
        return parse_ids(ids)
    config = read_config(path)
    tokenizer = open_tokenizer(path, config)
    if tokenizer is None:
        raise UsageError(f"{path}: holds no tiktoken.model, so a text prompt cannot be encoded: give ids")
    encoded = tokenizer.encode(prompt)
    tokenizer.drop_encoder()
    return encoded


def progress_bar(total, unit, **how):
    "A bar on stderr where that is a terminal, else nothing. tqdm: terminal widths and rates are not ours to write."
    return tqdm(total=total, unit=unit, disable=sys.stderr is None or not sys.stderr.isatty(), leave=False, **how)


def decode(path, ids=None, prompt=None, max_new_tokens=8, ram="8GB", trunk=None, threads=None, logits=None, show=print, trace=None, readers=None):
    """One whole run: encode, plan, load, decode greedily, report. Returns the Report.

    `ids` '1,2,3' or `prompt` str or bytes; `logits`: a list that receives each step's float32 [vocab]; `trace`: one that
    receives (layer, expert) of every request. `show` is given the plan, the prompt, each token as it comes, all ids and their
    text, and the report. Raises what `load` raises.
    """
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 1, 1 << 20)
    ids = prompt_ids(path, ids, prompt)
    if not ids:
        raise UsageError("the prompt is empty: at least one token id is needed")
    check_range(ids, read_config(path))  # before gigabytes are read for it
    pinning = progress_bar(None, "B", desc="pinning", unit_scale=True)
    model = load(path, ram, trunk, threads, context=len(ids) + max_new_tokens, prompt_tokens=len(ids),
                 on_plan=lambda plan: show(plan.text()), progress=pinning.update, readers=readers)
    pinning.close()
    model.experts.trace = trace
    passes = -(-len(ids) // model.chunk) + max_new_tokens - 1
    bar = progress_bar(passes * model.config.num_hidden_layers, "layer")
    model.on_layer = lambda L: bar.update()
    try:
        stream = model.tokenizer.stream() if model.tokenizer else None
        show(f"prompt ids: {','.join(map(str, ids))}")
        pieces = []
        for n, token in enumerate(model.generate(ids, max_new_tokens, on_logits=None if logits is None else logits.append)):
            line = f"{n + 1:>4}: id {token}, {model.report.step_seconds[n]:.3g} s"
            if stream is not None and token not in model.stop:
                pieces.append(stream.feed(token))
                line += f", {pieces[-1]!r}"
            with bar.external_write_mode():
                show(line)
        bar.close()
        show(f"generated ids: {','.join(map(str, model.report.ids))}")
        if stream is not None:
            show(f"generated text: {''.join(pieces) + stream.finish()!r}")
        show(model.report.text())
        return model.report
    except KeyboardInterrupt as stop:
        ids = model.report.ids
        stop.done = f"after {len(ids)} of {max_new_tokens} tokens" + f": {','.join(map(str, ids))}" * bool(ids)
        raise
    finally:
        bar.close()
        model.close()
