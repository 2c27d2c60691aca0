"""5.6 The dial: one model, any budget

Made from book/05_streaming/06_decode.py: edit that, then run `make export`.
"""
# built on checkpoint b58d7a02cc27
# built on config e3e1d35a4c85
# built on experts b4011c96500a
# built on model 0a4835fe37d1
# built on tokenizer c06b8d1ee8ea
# built on trunk a43a46fcf595

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path

import numba
import numpy as np
from tqdm import tqdm

from k3lib.checkpoint import Checkpoint, CheckpointError
from k3lib.config import read_config
from k3lib.experts import Experts, passing_bytes, slot_bytes
from k3lib.model import HEAD, Model, UsageError, check_range, row_multiples, tensor_name, walk_order
from k3lib.tokenizer import Tokenizer
from k3lib.trunk import (CORES, MOST_READERS, PAGE, Files, Packed, Trunk, early_room, enough_readers, is_matrix, pack, read_rates, row_blocks,
                         widened)


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text):
    "Bytes of '8GB' (8e9), '8GiB' (2^33), '900MB' or a whole number. Raises UsageError."
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].upper() not in UNITS:
        raise UsageError(f"{text!r} is not a size: write it like 8GB (8e9 bytes) or 8GiB (2^33)")
    return int(float(match[1]) * UNITS[match[2].upper()])


def shown_size(n):
    "A number of bytes with a unit: 17.5 MB."
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n) >= size:
            return f"{n / size:.{2 if unit in ('GB', 'TB') else 1}f} {unit}"
    return f"{n} B"


def _status(field):
    "A field of /proc/self/status in bytes, or None where there is no /proc."
    try:
        with open("/proc/self/status") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)
    except OSError:
        return None


def resident_bytes():
    "Bytes of this process in memory now, or None where the system does not tell."
    return _status("VmRSS")


def peak_bytes():
    "The most bytes this process has had in memory, or None. VmHWM: ru_maxrss would count what a forking parent had."
    return _status("VmHWM")


def read_call_bytes():
    "Bytes this process has been given by read calls, as the kernel counts them (rchar), or None where it does not."
    try:
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))
    except OSError:
        return None


def available_bytes():
    "Bytes this process can still have: what the machine has free, or its cgroup if that is less; None where the system does not tell."
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except OSError:
        return None
    return min([free, *cgroup_free()])


# Per version: where the memory controller's folders begin, and the files for limit, usage and, in memory.stat, cold page cache.
CGROUPS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def cgroup_free(membership="/proc/self/cgroup", root="/sys/fs/cgroup"):
    """Free bytes of each memory cgroup the process is in, the enclosing ones included, as far as they have a limit.

    Page cache that nobody has used lately counts as free: the kernel drops it before it refuses memory.
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit_file, usage_file, cold = CGROUPS[1 if controllers else 2]
        folder = Path(root, top, path.lstrip("/"))
        for group in (folder, *folder.parents):
            try:
                limit, usage = ((group / name).read_text().strip() for name in (limit_file, usage_file))
                stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
            except OSError:
                limit = "max"
            if limit != "max":
                yield int(limit) - int(usage) + int(stat.get(cold, 0))
            if group == Path(root, top):
                break


class PlanError(UsageError):
    "A budget that does not hold the model: says what is short and what would do; `least` is that number of bytes."

    def __init__(self, least, message):
        super().__init__(message)
        self.least = least


KERNELS = 28_000_000  # private memory of compiled kernels and their threads, after the first pass
LIBRARIES, MORE_OF_THEM = 97_000_000, 12_000_000  # pages of library files in memory by then; or, where most were before, how many more
SLOT = 2 << 20  # bytes of a ring slot, and of a block that is read ahead
READ_BYTES = 250  # of one entry in the list of reads
READERS = 5  # each with a slot at hand; at least: never fewer than arithmetic threads
AHEAD = 3  # row blocks that wait for their matrix: more would have left the cache by then
MOST_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Plan:
    "What a budget is spent on. `parts`: {what: bytes}; the rest are the choices that follow."
    ram: int
    parts: dict
    pinned: frozenset
    pinned_bytes: int
    trunk_bytes: int
    slots: int
    slot_bytes: int
    expert_slots: int
    expert_slot_bytes: int
    readers: int
    context: int
    chunk: int

    @property
    def total(self):
        return sum(self.parts.values())

    def as_dict(self):
        keys = ("ram", "slots", "slot_bytes", "expert_slots", "expert_slot_bytes", "readers", "context", "chunk", "pinned_bytes", "trunk_bytes")
        return {"total": self.total, "parts": dict(self.parts), **{k: getattr(self, k) for k in keys}}

    def text(self):
        "The plan as a table."
        rows = [f"  {what:<44}{shown_size(n):>12}" for what, n in self.parts.items()]
        head = f"plan for {shown_size(self.ram)} of memory, {self.context} positions, prompts in chunks of {self.chunk}"
        share = 100 * self.pinned_bytes / self.trunk_bytes
        return "\n".join([head, *rows, f"  {'together':<44}{shown_size(self.total):>12}",
                          f"  {share:.1f}% of the streamed weights pinned, {self.expert_slots} expert slots"])


def activation_bytes(config, tokens):
    "Upper estimate of what a pass over `tokens` tokens allocates: every array of the widest layer, float32."
    c = config
    kda = 8 * c.kda_num_heads * c.kda_head_dim
    mla = c.num_attention_heads * (2 * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim) + 2 * c.kv_lora_rank)
    moe = (c.num_experts_per_token * c.routed_expert_hidden_size + 3 * c.num_shared_experts * c.moe_intermediate_size
           + 4 * c.num_experts + 6 * c.moe_intermediate_size)
    blocks = -(-c.num_hidden_layers // c.attn_res_block_size)
    row = (blocks + 7) * c.hidden_size + max(kda, mla, moe, 4 * c.intermediate_size)
    return 4 * tokens * row + 8 * c.vocab_size + (1 << 20)


def state_bytes(config):
    "Bytes of recurrent state and convolution history of the KDA layers, at any length."
    c = config
    width = c.kda_num_heads * c.kda_head_dim
    return 4 * len(c.kda_layers) * (width * c.kda_head_dim + 3 * width * (c.kda_conv_kernel - 1))


def position_bytes(config):
    "Bytes the latent cache grows by with each position."
    return 4 * len(config.mla_layers) * (config.kv_lora_rank + config.qk_rope_head_dim)


def make_plan(config, checkpoint, ram, context, prompt_tokens=None, threads=CORES, readers=None):
    """Spend `ram` bytes: fixed costs, state, cache, ring, then the trunk from the front of the walk, then expert slots.

    Raises PlanError with the smallest budget that would do. Nothing large is allocated here.
    """
    extents = {name: checkpoint.extent(name) for name in walk_order(config)}
    streams = {name: e for name, e in extents.items() if is_matrix(name, e)}
    trunk = sum(widened(e.nbytes) for e in streams.values())
    readers = max(READERS if readers is None else readers, threads)
    slots = readers + AHEAD
    slot, ring = _ring_bytes({name: e for name, e in streams.items() if not comes_early(name)}, row_multiples(config), slots)
    ring += _early_bytes([e for name, e in streams.items() if comes_early(name)])
    first_moe = config.first_k_dense_replace
    an_expert = list(checkpoint.expert(first_moe, 0).values()) if first_moe < config.num_hidden_layers else []
    whole, passing = (slot_bytes(an_expert), passing_bytes(an_expert)) if an_expert else (1, 0)
    expert, experts = min(whole, passing), expert_readers(config, readers) if an_expert else 0

    now = resident_bytes() or 150_000_000
    fixed = {
        "interpreter, libraries, checkpoint index": now,
        "compiled kernels and threads": KERNELS + max(MORE_OF_THEM, LIBRARIES - (_status("RssFile") or LIBRARIES)),
        "KDA state": state_bytes(config),
        f"latent cache, {context} positions": context * position_bytes(config),
        "vectors and convolutions": sum(_vector_bytes(e) for name, e in extents.items() if name not in streams),
    }
    least = sum(fixed.values()) + activation_bytes(config, 1) + ring + experts * expert
    if ram < least:
        raise PlanError(least, f"a budget of {shown_size(ram)} is {shown_size(least - ram)} short: with {shown_size(now)} that this process already holds, this model with {context} positions "
                        f"needs at least {_enough(least)} MB")
    chunk = min(MOST_CHUNK, prompt_tokens or MOST_CHUNK)
    while chunk > 1 and activation_bytes(config, chunk) > activation_bytes(config, 1) + (ram - least) // 4:
        chunk //= 2
    left = ram - least + activation_bytes(config, 1) - activation_bytes(config, chunk)
    if left + ring >= trunk:
        left, ring, slots = left + ring, 0, 0
    pinned, pinned_bytes = _front(streams, left)
    left -= pinned_bytes
    if (len(pinned) == len(streams) or whole == expert) and left + experts * expert >= (experts + 1) * whole:
        all_experts = config.num_experts * (config.num_hidden_layers - first_moe)
        expert, experts = whole, min((left + experts * expert) // whole, all_experts + experts)  # one a reader keeps nothing
    parts = {**fixed, f"activations, chunks of {chunk}": activation_bytes(config, chunk), "ring of row blocks": ring,
             "pinned trunk": pinned_bytes, f"expert slots, {experts}": experts * expert}
    plan = Plan(ram, parts, pinned, pinned_bytes, max(trunk, 1), slots, slot, experts, expert, readers, context, chunk)
    free = available_bytes()
    if free is not None and plan.total - now > free:
        fits = int(0.99 * (now + free))  # what is free changes while it is looked at
        advice = f"a budget of {fits // 10**6} MB would fit" if fits > least else f"not even the smallest budget, {_enough(least)} MB, would fit"
        raise PlanError(None, f"the plan takes {shown_size(plan.total - now)} more, but only {shown_size(free)} of memory are free here: {advice}")
    return plan


def expert_readers(config, readers):
    "The fewest of `readers` that take the experts of a token in as many rounds: with one more, the last round would be one expert's, and one core's."
    chosen = config.num_experts_per_token
    return -(-chosen // -(-chosen // readers))


def measured_readers(checkpoint, threads=CORES):
    "(readers, one line on why): as many as keep the device of the largest shard busy, and one for each thread of arithmetic."
    rates = read_rates(max(checkpoint.files, key=os.path.getsize))
    enough = enough_readers(rates)
    shown = ", ".join(f"{n}: {rate / 1e9:.2f}" for n, rate in rates.items())
    return enough + threads, f"GB/s by readers: {shown}; {enough} keep the device busy while {threads} multiply: --readers {enough + threads}"


def _ring_bytes(streams, multiples, slots):
    "(bytes of a slot, bytes of `slots` of them and of the list of reads) for the matrices `streams`, {name: extent}."
    if not streams:
        return 0, 0
    widest = max(multiples.get(name, 1) * (e.nbytes // e.shape[0]) for name, e in streams.items())
    slot = max(min(SLOT, max(widened(e.nbytes) + PAGE for e in streams.values())), widened(widest) + PAGE)
    reads = sum(len(row_blocks(e, multiples.get(name, 1), slot, "")) for name, e in streams.items())
    return slot, slots * slot + READ_BYTES * reads


def comes_early(name):
    "True for a router: until it has spoken no expert can be asked for."
    return name.endswith(".gate.weight")


def _early_bytes(extents):
    "Bytes of the ring of the matrices that come early, and of its list of reads."
    if not extents:
        return 0
    slots, slot = early_room(extents)
    return slots * (slot + READ_BYTES * len(extents))


def _vector_bytes(extent):
    "Bytes a vector takes: float32, whatever the file has."
    return 2 * extent.nbytes if extent.dtype == "BF16" else widened(extent.nbytes)


def _front(streams, nbytes):
    "The names from the front of `streams` that fit into `nbytes`, then later ones that still do; and the bytes they take."
    taken, front = 0, []
    for name, e in streams.items():
        if taken + widened(e.nbytes) <= nbytes:
            front.append(name)
            taken += widened(e.nbytes)
    return frozenset(front), taken


def _enough(least):
    "Megabytes that will do: two processes of a kind differ by some tenths."
    return -(-(least + 500_000) // 10**6)


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


class Decoder(Model):
    "A Model that knows its plan, generates greedily and keeps the account. Made by `load`."

    def __init__(self, config, trunk, experts, plan, report, stop, tokenizer, read_before):
        self._read_before, self._report = read_before, report
        self.plan, self.threads, self.stop, self.tokenizer = plan, report.threads, stop, tokenizer
        super().__init__(config, trunk, experts, plan.context, plan.chunk)

    def forward(self, ids, last_only=False, watch=None):
        numba.set_num_threads(self.threads)  # per calling thread, so set where the arithmetic starts
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


TEXT_STACK = "language_model."


def check_tensors(config, checkpoint):
    "Raise CheckpointError unless every tensor the config implies is there with its dtype and shape, and no other of the text stack."
    families = [*config.families()]
    implied = sum(len(layers) * len(experts) for *_, layers, experts in families)
    if checkpoint.count_of(TEXT_STACK) == implied and all(
            kind is not None and kind[0] == dtype and config.shape_fits(pattern, shape, kind[1])
            for pattern, dtype, shape, layers, experts in families for kind in checkpoint.kinds_of(pattern, layers, experts)):
        return
    missing = []
    for name, dtype, shape in config.tensors():
        if name not in checkpoint:
            missing.append(name)
            continue
        found = checkpoint.extent(name)
        if found.dtype != dtype or not config.shape_fits(name, shape, found.shape):
            raise CheckpointError(f"{found.file}: {name} is {found.dtype} {list(found.shape)}, the config implies {dtype} {list(shape)}")
    if missing:
        raise CheckpointError(f"{checkpoint.path}: {len(missing)} tensors are missing: {', '.join(missing[:4])}{', ...' * (len(missing) > 4)}")
    known = {name for name, _, _ in config.tensors()}
    extra = next(name for name in checkpoint.names() if name.startswith(TEXT_STACK) and name not in known)
    raise CheckpointError(f"{checkpoint.extent(extra).file}: {extra} is there, the config implies no such tensor: its layers or experts are fewer")


def is_synthetic(path):
    "True where config.json says that `k3 synth` made these weights up."
    return "synthetic" in json.loads((Path(path) / "config.json").read_text())


def open_tokenizer(path, config):
    "The folder's Tokenizer, or None where it holds no vocabulary; a link to one that is gone is not none."
    return Tokenizer(path, config.vocab_size) if os.path.lexists(Path(path) / "tiktoken.model") else None


def part_of(name):
    "Which part of the account a tensor of the walk belongs to."
    return "trunk" if ".layers." in name else "other"


def return_freed_memory():
    """Have freed arrays of a megabyte and more go back to the system at once, where the C library is glibc.

    Left alone, it learns from the first large array it frees to keep such pieces, of up to 32 MB, and they would count as ours.
    """
    try:
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        pass


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
    readers = None if readers is None else whole_number("readers", readers, 1, MOST_READERS)
    context = whole_number("context", context, 1, 1 << 30)
    config = read_config(path)
    checkpoint = Checkpoint(path)
    check_tensors(config, checkpoint)
    walk = list(walk_order(config))
    source = checkpoint if trunk is None else Packed(checkpoint, walk, trunk)
    tokenizer = open_tokenizer(path, config)
    plan = make_plan(config, checkpoint, budget, context, prompt_tokens, threads, readers)
    if on_plan is not None:
        on_plan(plan)
    with contextlib.ExitStack() as undo:  # whatever ends this half-way, Ctrl-C among them, ends the readers
        files, read_before = Files(source.identities), read_call_bytes()
        undo.callback(files.close)
        weights = Trunk(source, walk, plan.pinned, row_multiples(config), files, part_of,
                        plan.slots, plan.slot_bytes, plan.readers, progress, AHEAD, frozenset(filter(comes_early, walk)))
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
    walk, there, began = list(walk_order(config)), set(folder.glob("*.safetensors")), time.perf_counter()
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


__all__ = ['UNITS', 'parse_size', 'shown_size', 'resident_bytes', 'peak_bytes', 'read_call_bytes', 'available_bytes', 'CGROUPS', 'cgroup_free', 'PlanError', 'KERNELS', 'LIBRARIES', 'MORE_OF_THEM', 'SLOT', 'READ_BYTES', 'READERS', 'AHEAD', 'MOST_CHUNK', 'Plan', 'activation_bytes', 'state_bytes', 'position_bytes', 'make_plan', 'expert_readers', 'measured_readers', 'comes_early', 'Report', 'Decoder', 'TEXT_STACK', 'check_tensors', 'is_synthetic', 'open_tokenizer', 'part_of', 'return_freed_memory', 'load', 'pack_trunk', 'whole_number', 'parse_ids', 'prompt_ids', 'progress_bar', 'decode']
