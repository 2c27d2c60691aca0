# %% [markdown]
# # 5.18 The dial: bytes to plan
#
# K3's weights are 1.56 TB, and a machine has 8 or 64 GB. An engine that allocates as it goes finds out at the tenth
# layer that the memory is used up, or the system kills it without a message. Here the budget comes first: it becomes a
# plan, part by part in bytes, before anything large is allocated. A budget that is too small is refused, and the
# refusal names one that is large enough. At the end of a run the plan stands beside the measured peak.
#
# At the end you can say what any byte of a budget buys, and in which order.
#
# Needs chapters [1.2] (kernels are kept), 5.4 (the tensors), 5.10 (the layout) and 5.17 (what a process may have). Runs
# in seconds.
#
# [5.17 What a process has, and what it may still have](17_memory.ipynb) ·
# [contents](../README.md) ·
# [5.19 The trunk on a faster disk](19_pack.ipynb)
#
# [1.2]: ../01_mxfp4/02_kernel_cache.ipynb

# %%
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
ORACLE = ROOT / "fixtures" / "oracle13" / "model"

# %% [markdown]
# ## 5.18.1 What a byte saves
#
# A budget is spent in the order of what a byte saves. First comes what every run needs: interpreter and kernels,
# KDA states, latent KV cache, vectors, activations, buffers for row blocks, one expert slot for each reader of experts.
# Then the trunk, from the front of the forward pass: a pinned byte saves one byte of reading on **every** token. When
# all of the trunk is pinned, what remains becomes slots that cache experts. A byte there saves something only if its
# expert is chosen again (5.16).
#
# | part | bytes | in K3 |
# |---|---|---|
# | KDA state and history | 4 × KDA layers × 96 heads × 128 × (128 + 3 × 3) | 434 + 31 MB, at any length |
# | latent KV cache | 4 × MLA layers × (512 + 64) a position | 55 KB a position |
# | records of the run | 64 a position | what each step read and how long it took |
# | trunk | pinned or streamed | 108.8 GB |
# | one expert | | 17.5 MB, of which there are 82,432 |
#
# Three of these follow from the config alone.

# %% tags=["export"]
import dataclasses
import os
from collections.abc import Callable
from typing import Protocol
import numpy as np
from k3lib.kernel_cache import compile_apart, compile_for, compiles_here, write_list
from k3lib.parallel import CORES, default_arithmetic
from k3lib.matmul import ResidentMatrix, linear
from k3lib.system import (
    address_shortage, open_files_shortage, resident_bytes, resident_file_bytes, thread_shortage, trim_freed_memory,
)
from k3lib.fileio import UsageError
from k3lib.config import Config, read_config
from k3lib.tensors import forward_order, row_multiples
from k3lib.header import Extent
from k3lib.checkpoint import Checkpoint
from k3lib.model import Model, Sequence
from k3lib.disk import Files, enough_readers, page_padded, read_rates
from k3lib.layout import (
    Buffers, ExpertLayout, Layout, TrunkLayout, expert_slot_bytes, streaming_slot_bytes, trunk_layout,
)
from k3lib.trunk import Trunk
from k3lib.experts import Experts
from k3lib.memory import available, shown_size


# %% tags=["export"]
def state_bytes(config: Config) -> int:
    "Bytes of recurrent state and convolution history of the KDA layers, at any length."
    c = config
    width = c.kda_num_heads * c.kda_head_dim
    return 4 * len(c.kda_layers) * (width * c.kda_head_dim + 3 * width * (c.kda_conv_kernel - 1))


def position_bytes(config: Config) -> int:
    "Bytes by which the latent KV cache grows with each position."
    return 4 * len(config.mla_layers) * (config.kv_lora_rank + config.qk_rope_head_dim)


RECORD_BYTES = 64  # of what is kept of a step: its token, its seconds, its bytes read by part


def activation_bytes(config: Config, tokens: int) -> int:
    "Upper estimate of what a forward pass over `tokens` tokens allocates: every array of the widest layer, float32."
    c = config
    kda = 8 * c.kda_num_heads * c.kda_head_dim
    mla = c.num_attention_heads * (2 * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim) + 2 * c.kv_lora_rank)
    moe = (c.num_experts_per_token * c.routed_expert_hidden_size + 3 * c.num_shared_experts * c.moe_intermediate_size
           + 4 * c.num_experts + 6 * c.moe_intermediate_size)
    blocks = -(-c.num_hidden_layers // c.attn_res_block_size)
    row = (blocks + 7) * c.hidden_size + max(kda, mla, moe, 4 * c.intermediate_size)
    return 4 * tokens * row + 8 * c.vocab_size + (1 << 20)


# %%
K3 = read_config(ROOT / "fixtures" / "k3")
width = K3.kda_num_heads * K3.kda_head_dim
matrices = 4 * len(K3.kda_layers) * width * K3.kda_head_dim
print("KDA state", shown_size(matrices), "+", shown_size(state_bytes(K3) - matrices), "of history")
position = position_bytes(K3)
print("latent KV cache", shown_size(position), "a position,", shown_size(4096 * position), "at 4,096")

# %% [markdown]
# Other parts are measured. The memory of interpreter and libraries exists when the plan is made, so it is asked of the
# system. What compiled kernels will add comes later, in the first forward pass: two constants say how much that was
# when it was measured.
#
# A shared library costs memory only for those of its pages that are resident. In a process that has just begun, most of
# them are still to come. In one that has already decoded something, most of them are resident, and few more will be.
# The number also depends on the page cache: right after an installation the system maps libraries in larger groups of
# pages. The first line of `k3 plan` was then some 75 MB higher on one machine.
#
# Where the system does not tell what a process holds, a constant stands in for it, and the plan's text says so.

# %% tags=["export"]
JIT_RSS = 28_000_000  # private memory of compiled kernels and their threads after the first forward pass
LIBRARY_RSS = 97_000_000  # resident pages of shared libraries after the first forward pass
LIBRARY_RSS_GROWTH = 12_000_000  # bytes of them still to come, even if most are resident before the first pass
PROCESS_RSS = 150_000_000  # assumed for an interpreter with its libraries, where the system does not tell
LIBRARY_RSS_BEFORE = 60_000_000  # assumed for its libraries' resident pages, where the system does not tell
COMPILE_RSS = 115_000_000  # what a process that compiles all kernels has more than one that loads them


# %% tags=["export"]
class Held:
    """What this process holds when a plan is made: `nbytes`, and `libraries` bytes of shared libraries to come.

    `notes`: which of the two was assumed, because the system does not tell.
    """

    def __init__(self) -> None:
        trim_freed_memory()  # reading headers leaves one to three megabytes of it, never the same in two processes
        nbytes, libraries = resident_bytes(), resident_file_bytes()
        self.nbytes = PROCESS_RSS if nbytes is None else nbytes
        before = LIBRARY_RSS_BEFORE if libraries is None else libraries
        self.libraries = max(LIBRARY_RSS_GROWTH, LIBRARY_RSS - before)
        assumed = [("memory of this process", nbytes, PROCESS_RSS), ("of libraries", libraries, LIBRARY_RSS_BEFORE)]
        self.notes = tuple(f"{what}: {shown_size(n)} assumed, the system does not tell"
                           for what, told, n in assumed if told is None)


def fixed_costs(config: Config, trunk: TrunkLayout, context: int, held: Held, compiles: bool) -> dict[str, int]:
    "{part: bytes} at any budget: what this process already holds, and what decoding adds. `compiles`: kernels, too."
    compiling = {"compiling kernels, which no folder keeps": COMPILE_RSS} if compiles else {}
    return {
        "interpreter, libraries, checkpoint index": held.nbytes,
        "compiled kernels and threads": JIT_RSS + held.libraries,
        **compiling,
        "KDA state": state_bytes(config),
        f"latent KV cache, {context} positions": context * position_bytes(config),
        f"records of the run, {context} positions": context * RECORD_BYTES,
        "vectors and convolutions": sum(vector_bytes(tensor.extent) for tensor in trunk.resident.values()),
    }


def vector_bytes(extent: Extent) -> int:
    "Bytes of a vector in memory, where it is float32 even if the file has bfloat16."
    return 2 * extent.nbytes if extent.dtype == "BF16" else page_padded(extent.nbytes)


# %% [markdown]
# ## 5.18.2 What compiling takes
#
# A process that has compiled the kernels holds some 115 MB more than one that has loaded them. So they are compiled by
# another process first, and kept ([1.2.7]). The program of that process writes a small synthetic checkpoint (5.28) and
# reads it with everything in memory. That calls every kernel that a run calls, but for two kinds. Small products never
# wake a helper, so one larger product is added. And which rows are multiplied by the kernels of streaming depends on
# which thread comes first and on the file system. So those kernels are compiled for the types of their arguments, bf16
# and MXFP4, and not called.
#
# The other process needs memory of its own while it runs. Where that is not free, or where no folder can be written,
# the plan has a part for compiling.
#
# [1.2.7]: ../01_mxfp4/02_kernel_cache.ipynb#1.2.7-Compile-in-another-process

# %% tags=["export"]
COMPILER_RSS = 320_000_000  # what the process that compiles may need at its peak
PROGRAM = """
from k3lib.synth import synth
from k3lib.plan import compile_kernels
synth(sys.argv[1] + "/model", "oracle")
compile_kernels(sys.argv[1] + "/model")
"""


def _room_for_compiler(free):
    return free is None or free >= COMPILER_RSS


def compile_first(say: Callable[[str], object] | None = None) -> bool:
    """Let another process compile the kernels that no folder keeps, if there is memory for one and it can be started.

    `say`: as of compile_apart. Returns whether one was started: a plan is then to be made anew.
    """
    return _room_for_compiler(available()[0]) and compile_apart(PROGRAM, say)


def _advice(parts):
    "What can be done about a part for compiling."
    if COMPILE_RSS not in parts.values():
        return ""
    return (f"; {shown_size(COMPILE_RSS)} less once the kernels are compiled and kept, as a run does it for which "
            f"{shown_size(COMPILER_RSS)} more are free and NUMBA_CACHE_DIR can be written")


# %% tags=["export"]
@default_arithmetic()
def compile_kernels(folder: str) -> None:
    """Compile every kernel with every signature, and list their entries (1.2.7).

    `folder`: a synthetic checkpoint. Raises what reading it raises, and RuntimeError if a kernel cannot be kept.
    """
    config, checkpoint, files = read_config(folder), Checkpoint(folder), Files()
    extents = {name: checkpoint.extent(name) for name in forward_order(config)}
    streamed = trunk_layout(extents, row_multiples(config), 1)
    layout, nbytes = streaming_experts(config, checkpoint, 1)
    trunk = Trunk(streamed.pin(frozenset(streamed.streamed)), files)
    experts = Experts(dataclasses.replace(layout, slots=Buffers(2, nbytes), whole=True),
                      lambda L, e: list(checkpoint.expert(L, e).values()), files)
    model = Model(config, lambda i: np.zeros(config.hidden_size, np.float32), trunk.weight, experts, 1)
    model.forward([*range(7)], Sequence(config, 7), 1, lambda *_: None)
    linear(ResidentMatrix(np.zeros((2048, 2048), np.uint16)), np.zeros((1, 2048), np.float32), 2)
    _compile_streaming()
    write_list()


def _compile_streaming():
    "Compile the kernels of streamed matrices for rows of bf16 and of MXFP4."
    rows, packed = np.zeros((1, 32), np.uint16), np.zeros((1, 16), np.uint8)
    x, cursor, totals = np.zeros((1, 32), np.float32), np.zeros(1, np.int64), np.zeros(5)
    for w, matrix, scale in (rows, rows, None), (packed, (packed, packed), packed):
        compile_for("matmul.matmul_rows", matrix, x, x, 0)
        compile_for("read_multiply._stream", (0,) * 7, w.ravel(), scale, x, x, cursor, totals)


# %% [markdown]
# ## 5.18.3 The plan
#
# A plan holds the parts in bytes, and the layout (5.10) from which trunk and experts are built. They compute no size of
# their own, so the bytes that are promised here and the bytes that are allocated there are the same numbers.

# %% tags=["export"]
@dataclasses.dataclass(frozen=True)
class Plan:
    """What a budget of `ram` bytes is spent on.

    `parts`: {part: bytes}. `layout`: where trunk and experts lie in memory. `pinned_bytes` of the `trunk_bytes` of
    matrices stay in memory. `context`: positions for which there is room. `chunk`: the most tokens of a forward pass.
    `notes`: what stands in for numbers that the system does not tell.
    """
    ram: int
    parts: dict[str, int]
    layout: Layout
    pinned_bytes: int
    trunk_bytes: int
    context: int
    chunk: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        "Bytes of all parts."
        return sum(self.parts.values())

    @property
    def pinned(self) -> frozenset[str]:
        "Names of the matrices that stay in memory."
        return frozenset(name for name, tensor in self.layout.trunk.resident.items() if tensor.is_matrix)


# %% [markdown]
# A plan can be shown as a table, before the first weight is read, and as plain data, for the report.

# %% tags=["export"]
class Plan(Plan):
    def as_dict(self) -> dict:
        "Plain data, ready for JSON."
        rows, slots, readers = self.layout.trunk.rows, self.layout.experts.slots, self.layout.trunk.readers
        return {"total": self.total, "parts": dict(self.parts), "ram": self.ram, "slots": rows.count,
                "slot_bytes": rows.nbytes, "expert_slots": slots.count, "expert_slot_bytes": slots.nbytes,
                "readers": readers, "context": self.context, "chunk": self.chunk, "pinned_bytes": self.pinned_bytes,
                "trunk_bytes": self.trunk_bytes, "notes": list(self.notes)}

    def text(self) -> str:
        "The plan as a table."
        rows = [f"  {part:<44}{shown_size(n):>12}" for part, n in self.parts.items()]
        share = 100 * self.pinned_bytes / max(self.trunk_bytes, 1)
        return "\n".join([
            f"plan for {shown_size(self.ram)} of memory, {self.context} positions, prompts in chunks of {self.chunk}",
            *rows, f"  {'together':<44}{shown_size(self.total):>12}",
            f"  {share:.1f}% of the streamed weights pinned, {self.layout.experts.slots.count} expert slots",
            *(f"  {note}" for note in self.notes)])


class PlanError(UsageError):
    """A budget that cannot hold the model. The text says how much is missing and which budget is large enough.

    `least`: the smallest budget in bytes; None where the budget is large enough, but the machine's memory is not, or
    where the system gives this process too few open files, threads or addresses.
    """

    def __init__(self, least: int | None, message: str):
        super().__init__(least, message)  # both, so that the error can go from one process to another
        self.least = least

    def __str__(self) -> str:
        return self.args[1]


# %% [markdown]
# At the smallest budget one expert slot a reader is enough: an expert streams through it (5.16). How many readers,
# then? With sixteen experts a token, seven readers take three rounds, and so do six; five take four. With seven, the
# last round would have work for two of them only. So six readers do as well, and need less memory.

# %% tags=["export"]
def expert_readers(config: Config, readers: int) -> int:
    "The fewest readers that need no more rounds for the experts of a token than all `readers` do."
    chosen = config.num_experts_per_token
    return -(-chosen // -(-chosen // readers))


def streaming_experts(config: Config, checkpoint: Checkpoint, readers: int) -> tuple[ExpertLayout, int]:
    "(the layout with the least memory, bytes of a slot that holds a whole expert)."
    layers = tuple(range(config.first_k_dense_replace, config.num_hidden_layers))
    if not layers:
        return ExpertLayout((), Buffers(0, 0), 0, False), 0
    an_expert = list(checkpoint.expert(layers[0], 0).values())
    whole_bytes, streaming_bytes = expert_slot_bytes(an_expert), streaming_slot_bytes(an_expert)
    count = expert_readers(config, readers)
    return ExpertLayout(layers, Buffers(count, min(whole_bytes, streaming_bytes)), count,
                        whole_bytes <= streaming_bytes), whole_bytes


# %% [markdown]
# The bytes above the smallest budget are spent by two rules. Matrices are pinned from the front of the forward pass;
# where a large one does not fit, later ones may. When the whole trunk is pinned, no buffers for row blocks are needed,
# and their bytes are spent too. Only then do expert slots become large enough for whole experts, and more than one a
# reader.

# %% tags=["export"]
def first_fit(sizes: dict[str, int], nbytes: int) -> tuple[frozenset[str], int]:
    "(names, their bytes): in the order of `sizes` {name: bytes}, each one that fits into what is left of `nbytes`."
    taken, names = 0, []
    for name, size in sizes.items():
        if taken + size <= nbytes:
            names.append(name)
            taken += size
    return frozenset(names), taken


def streamed_sizes(trunk: TrunkLayout) -> dict[str, int]:
    "{name: bytes it takes in memory} of the matrices that `trunk` streams."
    return {name: page_padded(blocks[0].extent.nbytes) for name, blocks in trunk.streamed.items()}


def pin_from_front(trunk: TrunkLayout, spare: int) -> tuple[TrunkLayout, int, int]:
    "Spend `spare` bytes on pinned matrices: (layout, bytes pinned, bytes of `spare` that are left)."
    sizes = streamed_sizes(trunk)
    if spare + trunk.buffer_bytes >= sum(sizes.values()):
        spare += trunk.buffer_bytes  # nothing streams, so there are no buffers
    pinned, nbytes = first_fit(sizes, spare)
    return trunk.pin(pinned), nbytes, spare - nbytes


def cache_experts(config: Config, experts: ExpertLayout, whole_bytes: int, spare: int) -> ExpertLayout:
    "Spend `spare` bytes on slots of `whole_bytes`, if they pay for at least one slot more than one a reader."
    slots, nbytes = experts.slots, spare + experts.slots.total
    if not slots.count or nbytes < (slots.count + 1) * whole_bytes:
        return experts
    every = config.num_experts * len(experts.layers) + slots.count  # a reader's own slot caches nothing
    return dataclasses.replace(experts, slots=Buffers(min(nbytes // whole_bytes, every), whole_bytes), whole=True)


# %% [markdown]
# Activations grow with the prefill chunk, and a chunk of 64 tokens reads the trunk once instead of 64 times. So the
# chunk gets up to a quarter of what is spare, before anything is pinned.

# %% tags=["export"]
MAX_CHUNK = 64  # tokens


def longest_chunk(config: Config, longest: int, spare: int) -> int:
    "The largest of `longest`, its half, its quarter, ... tokens that leaves three quarters of `spare` bytes."
    one, chunk = activation_bytes(config, 1), longest
    while chunk > 1 and activation_bytes(config, chunk) > one + spare // 4:
        chunk //= 2
    return chunk


# %% [markdown]
# `make_plan` spends the budget in that order. It refuses three things: a budget below what this model needs in this
# process, a plan for which the machine has too little free memory, and a run for which the system gives this process
# too few open files, threads or addresses ([5.1.7]). Two processes that do the same work differ by some tenths of a
# megabyte, so the number that a refusal names is rounded up.
#
# [5.1.7]: 01_system.ipynb#5.1.7-Limits-of-a-process,-and-signals

# %% tags=["export"]
READERS = 5  # threads that read by default; never fewer than the threads of arithmetic


class TrunkSource(Protocol):
    "Where the trunk is read from: a checkpoint, or a packed trunk (5.19)."

    def extent(self, name: str) -> Extent:
        "Where a tensor's bytes lie."


# %% tags=["export"]
def make_plan(config: Config, checkpoint: Checkpoint, ram: int, context: int, *, trunk: TrunkSource | None = None,
              prompt_tokens: int | None = None, threads: int = CORES, readers: int | None = None) -> Plan:
    """Spend `ram` bytes: fixed costs, states, KV cache, buffers, then the trunk from the front, then expert slots.

    `trunk`: where the trunk is read from, if not from the checkpoint. `prompt_tokens`: the longest prompt, if known.
    `readers`: threads that read, never fewer than `threads` of arithmetic. Allocates nothing large. Raises PlanError if
    `ram` is too small, or if the system does not give what the plan takes.
    """
    held = Held()  # measured before the row blocks are listed: the layout counts those lists
    free, notes = available()
    readers, source = max(READERS if readers is None else readers, threads), trunk or checkpoint
    extents = {name: source.extent(name) for name in forward_order(config)}
    unpinned = trunk_layout(extents, row_multiples(config), readers)
    experts, whole_bytes = streaming_experts(config, checkpoint, readers)
    parts = fixed_costs(config, unpinned, context, held, compiles_here(_room_for_compiler(free)))
    one = activation_bytes(config, 1)
    least = sum(parts.values()) + one + unpinned.buffer_bytes + experts.slots.total
    if ram < least:
        raise PlanError(least, f"a budget of {shown_size(ram)} is {shown_size(least - ram)} short: with "
                               f"{shown_size(held.nbytes)} that this process already holds, this model with "
                               f"{context} positions needs at least {_enough(least)} MB{_advice(parts)}")
    chunk = longest_chunk(config, min(MAX_CHUNK, prompt_tokens or MAX_CHUNK), ram - least)
    activations = activation_bytes(config, chunk)
    pinned, pinned_bytes, spare = pin_from_front(unpinned, ram - least + one - activations)
    if experts.whole or not pinned.streamed:
        experts = cache_experts(config, experts, whole_bytes, spare)
    parts |= {f"activations, chunks of {chunk}": activations,
              "row block buffers": unpinned.buffer_bytes if pinned.streamed else 0,
              "pinned trunk": pinned_bytes, f"expert slots, {experts.slots.count}": experts.slots.total}
    plan = Plan(ram, parts, Layout(pinned, experts), pinned_bytes, sum(streamed_sizes(unpinned).values()), context,
                chunk, held.notes + notes)
    _check_free(plan, held.nbytes, free, least)
    _check_limits(plan, held, {extent.file for extent in extents.values()} | {*checkpoint.files}, threads)
    return plan


# %% tags=["export"]
def _check_free(plan, held, free, least):
    "Raise PlanError if the plan takes more than the `free` bytes that this process, which holds `held`, can take."
    if free is None or plan.total - held <= free:
        return
    fits = int(0.99 * (held + free))  # the free bytes change while they are counted
    advice = (f"a budget of {fits // 10**6} MB would fit" if fits > least
              else f"not even the smallest budget, {_enough(least)} MB, would fit")
    raise PlanError(None, f"the plan takes {shown_size(plan.total - held)} more, but only {shown_size(free)} of memory "
                          f"are free here: {advice}")


def _enough(least):
    "Megabytes: `least` bytes rounded up, with room for what differs from one process to the next."
    return -(-(least + 500_000) // 10**6)


def run_threads(layout: Layout, threads: int) -> int:
    "How many threads a run starts beside its own: readers, helpers of `threads` of arithmetic, the watch over reads."
    trunk, experts = layout.trunk, layout.experts
    routers, rows = bool(trunk.routers), len(trunk.streamed) > len(trunk.routers)
    return trunk.readers * rows + routers + experts.readers * bool(experts.slots.count) + threads - 1 + 1


def _check_limits(plan, held, files, threads):
    "Raise PlanError if the system does not let this process open the `files`, start the threads or reserve the memory."
    started = run_threads(plan.layout, threads)
    shortage = (open_files_shortage(len(files))
                or address_shortage(plan.total - held.nbytes - held.libraries, started)
                or thread_shortage(started, "a run"))
    if shortage is not None:
        raise PlanError(None, shortage)


# %% [markdown]
# The embedded model is so small that the interpreter dominates any plan. Near its smallest budget nearly every matrix
# streams, and with fifty megabytes more none does. A budget below the smallest is refused.

# %% tags=["nbval-ignore-output"]
config, checkpoint = read_config(ORACLE), Checkpoint(ORACLE)


def floor(context):
    "The smallest budget that make_plan accepts now: the refusal of a smaller one names it."
    try:
        make_plan(config, checkpoint, 1, context)
    except PlanError as error:
        print("refused:", error)
        return error.least


least = floor(context=32)
for extra in (500_000, 2_500_000, 50_000_000):
    plan = make_plan(config, checkpoint, least + extra, context=32)
    print(f"{extra / 1e6:4.1f} MB above the smallest budget: {100 * plan.pinned_bytes / plan.trunk_bytes:3.0f}% of the "
          f"trunk pinned, {plan.layout.trunk.rows.count} buffers, {plan.layout.experts.slots.count} expert slots")
    assert plan.total <= least + extra

# %% [markdown]
# The parts of a plan between these budgets, which pins some of the trunk.

# %% tags=["nbval-ignore-output"]
parts = {what.split(",")[0]: n / 1e6 for what, n in make_plan(config, checkpoint, least + 2_500_000, 32).parts.items()}
fig, ax = plt.subplots()
ax.barh(list(parts), list(parts.values()), color="C5")
ax.set(xlabel="MB", title="Of the embedded model's plan, interpreter and kernels are nearly all")
ax.invert_yaxis()
plt.show()


# %% [markdown]
# ## 5.18.4 How many readers
#
# One reader waits for one read at a time; a disk answers many at once. `k3 plan --measure` reads from the model's own
# device with 1 to 16 readers and takes the fewest that reach its full rate (5.9), and one more for each thread of
# arithmetic, since a reader also multiplies the rows that it has read.

# %% tags=["export"]
def measured_readers(checkpoint: Checkpoint, threads: int = CORES) -> tuple[int, str]:
    "(readers, a line that says why): as many as keep the device of the largest shard busy, and `threads` more."
    rates = read_rates(max(checkpoint.files, key=os.path.getsize))
    enough = enough_readers(rates)
    shown = ", ".join(f"{n}: {rate / 1e9:.2f}" for n, rate in rates.items())
    return enough + threads, (f"GB/s by readers: {shown}; {enough} keep the device busy while {threads} multiply: "
                              f"--readers {enough + threads}")

# %% [markdown]
# ## Summary
#
# - A budget is spent on what saves most: fixed costs, then the trunk from the front, then slots that cache experts.
# - The plan is made, and shown or refused, before anything large is allocated. Trunk and experts are built from its
#   layout.
# - Open files, threads and addresses are asked for before the first weight is read, as memory is.
# - The prefill chunk is part of the plan: with more tokens a pass, the trunk is read fewer times.
#
# ## Exercises
#
# 1. Plan K3 from shapes alone: give `make_plan` a checkpoint whose extents come from the config (5.4). At which budget
#    is the whole trunk pinned?
# 2. Let the chunk have half of what is spare instead of a quarter. At which budgets does a 64-token prompt read less?
#
# Next: [5.19 The trunk on a faster disk](19_pack.ipynb).
