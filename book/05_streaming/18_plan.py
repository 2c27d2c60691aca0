# %% [markdown]
# # 5.18 The dial: bytes to plan
#
# K3's weights are 1.56 TB, and a machine has 8 or 64 GB of memory. An engine that allocates memory while it runs may
# find out in the middle of a long run that the memory is used up, or the system ends it without a message. So this
# engine begins with the budget. It makes a plan that says how many bytes each part of the run takes, before it
# allocates anything large. It refuses a budget that is too small, and names one that is large enough. After a run, the
# report shows the plan and the measured peak. At the end of this chapter you can say what each byte of a budget is
# spent on, and why in this order.
#
# > **Without it:** a token reads 137 GB<!--claim none--> of weights, however much memory the machine has.
# >
# > **With it:** a budget of 32 GB keeps 28%<!--claim share--> of the streamed weights in memory, and a token reads
# > 106 GB.<!--claim pinned-->
#
# Needs chapters [1.2] (kernels are kept), 5.4 (the tensors), 5.10 (the layout) and 5.17 (what a process may have). Runs
# in seconds. Makes `k3lib.plan`.
#
# [5.17 What a process has, and what it may still have](17_memory.ipynb) ·
# [contents](../README.md) ·
# [5.19 The trunk on a faster disk](19_pack.ipynb)
#
# [1.2]: ../01_mxfp4/02_kernel_cache.ipynb

# %%
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

ORACLE = ROOT / "fixtures" / "oracle13" / "model"
K3 = read_config(ROOT / "fixtures" / "k3")  # the numbers of the released model
schematics.where(K3, "plan")

# %% [markdown]
# ## 5.18.1 What a byte saves
#
# The engine spends a budget in three steps, the most useful bytes first.
#
# 1. **What every run needs:** interpreter and kernels, the states of KDA, the latent KV cache, vectors, activations,
#    buffers for row blocks, and one expert slot for each thread that reads experts.
# 2. **The trunk**, from the front of the forward pass. A pinned byte saves one byte of reading at **every** token.
# 3. **Cached experts**, when the whole trunk is pinned. A byte of an expert saves reading only if the router chooses
#    the expert again (5.15).
#
# | part | bytes | in K3 |
# |---|---|---|
# | KDA state and history | 4 × KDA layers × 96 heads × 128 × (128 + 3 × 3) | 434 + 31 MB, at any length |
# | latent KV cache | 4 × MLA layers × (512 + 64) a position | 55 KB a position |
# | records of the run | 64 a position | the bytes read and the seconds of each step |
# | trunk | pinned or streamed | 108.8 GB |
# | one expert | | 17.5 MB, of which there are 82,432 |
#
# The first two, and the memory for activations, follow from the config alone.

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
width = K3.kda_num_heads * K3.kda_head_dim
matrices = 4 * len(K3.kda_layers) * width * K3.kda_head_dim
print("KDA state", shown_size(matrices), "+", shown_size(state_bytes(K3) - matrices), "of history")
position = position_bytes(K3)
print("latent KV cache", shown_size(position), "a position,", shown_size(4096 * position), "at 4,096")

# %% [markdown]
# Other parts must be measured. The interpreter and its libraries are in memory when the plan is made, so the engine
# asks the system for their size. The compiled kernels come later, in the first forward pass. For them the plan uses two
# constants, which were measured.
#
# A shared library takes memory only for those of its pages that are resident. In a process that has just begun, most of
# these pages will still be loaded. In a process that has already decoded a text, most of them are resident. The number
# also depends on the page cache: right after an installation, the system loads libraries in larger groups of pages. On
# one machine the first line of `k3 plan` was then about 75 MB higher.
#
# Where the system does not say what a process holds, the plan uses a constant, and its text says so.

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
# A process that has compiled the kernels holds about 115 MB more than one that has loaded compiled kernels from a file.
# These bytes would be missing in the budget. So another process compiles the kernels first, and keeps them in files
# ([1.2.7]).
#
# The program of that process must call every kernel that a run can call. It writes a small synthetic checkpoint (5.28)
# and runs one forward pass over it, with all weights in memory. This calls all kernels except two kinds. Helper threads
# are used only for larger products, so the program adds one larger product. And whether a run calls the kernels of
# streaming depends on the file system and on chance, so the program compiles them for their types of arguments, without
# a call.
#
# The other process needs memory while it runs. If this memory is not free, or if no folder can be written, the run
# compiles the kernels itself, and the plan has a part for it.
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
# A plan consists of the parts in bytes and of the layout (5.10). The trunk and the experts are built from this layout
# and compute no sizes of their own. So they allocate exactly the bytes that the plan has counted.

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
# A plan can be printed as a table before the first weight is read. As plain data it goes into the report of a run.

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
# At the smallest budget, each reader of experts has one slot, through which its experts stream (5.16). How many such
# readers are useful? A token has sixteen experts in a layer. Seven readers need three rounds for them, and in the last
# round only two of them have work. Six readers need three rounds, too, and less memory. Five readers need four rounds.
# So of seven readers the plan uses six.

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
# Two rules spend the bytes above the smallest budget. First, matrices are pinned from the front of the forward pass. If
# a large matrix does not fit any more, smaller ones behind it may still fit. If the whole trunk is pinned, buffers for
# row blocks are not needed, and the plan spends their bytes, too. Second, when the whole trunk is pinned, expert slots
# become large enough for whole experts, and there are more of them than readers.

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
# A prompt is read in chunks of several tokens. A chunk of 64 tokens reads the trunk once; 64 single tokens read it 64
# times. But the activations of a chunk take memory. So the plan gives the chunk up to a quarter of the spare bytes,
# before it pins anything.

# %% tags=["export"]
MAX_CHUNK = 64  # tokens


def longest_chunk(config: Config, longest: int, spare: int) -> int:
    "The largest of `longest`, its half, its quarter, ... tokens that leaves three quarters of `spare` bytes."
    one, chunk = activation_bytes(config, 1), longest
    while chunk > 1 and activation_bytes(config, chunk) > one + spare // 4:
        chunk //= 2
    return chunk


# %% [markdown]
# `make_plan` spends the budget in this order. It refuses three things:
#
# - a budget that is smaller than what this model needs in this process,
# - a plan for which the machine has too little free memory,
# - a run for which the system gives this process too few open files, threads or addresses ([5.1.7]).
#
# Two processes that do the same work differ by some tenths of a megabyte. So a refusal rounds the budget that it names
# up.
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
# First the plan of the released model. Its files are not here, but a plan needs only shapes, and the config gives them.
# `Shapes` takes the place of a checkpoint. This machine may have less memory than the budgets, so for this experiment
# alone the plan does not ask how much is free. One part is smaller than in a real run: the index of the real
# checkpoint, whose 497,220 tensors this process has not read.

# %%
class Shapes:
    "In place of a checkpoint: where the tensors of a config would lie. No file exists."

    files = ()

    def __init__(self, config):
        self.config, L = config, range(config.num_hidden_layers)
        tensors = [*global_tensors(config), *(t for layer in L for t in layer_tensors(config, layer, experts=()))]
        self.extents = {t.name: self.placed(t) for t in tensors}

    def placed(self, tensor):
        nbytes = math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]
        return Extent("", 8, nbytes, tensor.dtype, tensor.shape)

    def extent(self, name):
        return self.extents[name]

    def expert(self, layer, e):
        tensors = layer_tensors(self.config, layer, experts=(e,))
        return {t.name: self.placed(t) for t in tensors if t.name not in self.extents}


from k3lib.header import ITEMSIZE
from k3lib.tensors import global_tensors, layer_tensors

released = Shapes(K3)


def plan_of_k3(ram, context=4096):
    "The plan of the released model, whether or not this machine has the memory."
    global available
    usual, available = available, lambda: (None, ())
    try:
        return make_plan(K3, released, int(ram), context)
    finally:
        available = usual


def read_a_token(plan):
    "GB of weights that a token reads, without hits of cached experts."
    return (sum(schematics.token_bytes(K3).values()) - plan.pinned_bytes) / 1e9


def check_plan(plan):
    "The gate: no plan takes more than its budget."
    assert plan.total <= plan.ram, "the parts of the plan take more than its budget"


print(f"nothing pinned: a token reads {sum(schematics.token_bytes(K3).values()) / 1e9:.0f} GB")  # claim none
for gb in (2, 8, 32, 64, 120):
    plan = plan_of_k3(gb * 1e9)
    check_plan(plan)
    print(f"{gb:3} GB: {plan.pinned_bytes / plan.trunk_bytes:4.0%} of the streamed weights pinned, "
          f"a token reads {read_a_token(plan):.0f} GB, {'whole' if plan.layout.experts.whole else 'streaming'} experts")
plan = plan_of_k3(32e9)
assert round(plan.pinned_bytes / plan.trunk_bytes * 100) == 28  # claim share
assert round(read_a_token(plan)) == 106  # claim pinned

# %% tags=["nbval-ignore-output"]
schematics.memory_plan(plan)


# %% [markdown]
# A plan can be wrong in a way that no result shows: the run only takes more memory than it was given. The tempting
# mistake spends the bytes of the buffers on pinned matrices although some matrices still stream and need the buffers.
# The gate notices it:

# %% tags=["raises-exception"]
def spends_the_buffers(trunk, spare):
    return pin_as_usual(trunk, spare + trunk.buffer_bytes)  # WRONG where a matrix still streams


pin_as_usual, pin_from_front = pin_from_front, spends_the_buffers
try:
    too_large = plan_of_k3(32e9)
finally:
    pin_from_front = pin_as_usual
check_plan(too_large)

# %% [markdown]
# The embedded model is so small that the interpreter takes nearly all of any plan. Near its smallest budget most of its
# matrices stream, and with fifty megabytes more none does. A budget below the smallest one is refused.

# %% tags=["nbval-ignore-output"]
config, checkpoint = read_config(ORACLE), Checkpoint(ORACLE)


def smallest_budget(context):
    "The smallest budget that make_plan accepts now: the refusal of a smaller one names it."
    try:
        make_plan(config, checkpoint, 1, context)
    except PlanError as error:
        print("refused:", error)
        return error.least


least = smallest_budget(context=32)
for extra in (500_000, 2_500_000, 50_000_000):
    plan = make_plan(config, checkpoint, least + extra, context=32)
    print(f"{extra / 1e6:4.1f} MB above the smallest budget: {100 * plan.pinned_bytes / plan.trunk_bytes:3.0f}% of the "
          f"trunk pinned, {plan.layout.trunk.rows.count} buffers, {plan.layout.experts.slots.count} expert slots")
    assert plan.total <= least + extra

# %% [markdown]
# What a token reads falls with the budget, until the whole trunk is pinned. The figure has the plans of the released
# model; hits of cached experts are not counted.

# %%
budgets = [2, *range(8, 137, 8)]
reads = [read_a_token(plan_of_k3(gb * 1e9)) for gb in budgets]
fig, ax = plt.subplots()
ax.plot(budgets, reads, "o-", ms=3)
ax.set(xlabel="budget, GB", ylabel="GB read a token", ylim=0,
       title="A gigabyte of budget saves a gigabyte of reading, until the trunk is pinned")
plt.show()
slope = (reads[1] - reads[8]) / (budgets[8] - budgets[1])
print(f"from {budgets[1]} to {budgets[8]} GB: {slope:.2f} GB less for each GB of budget")
assert abs(slope - 1) < .01 and len({round(r) for r in reads[-2:]}) == 1


# %% [markdown]
# ## 5.18.4 How many readers
#
# A reader waits for one read at a time, but most disks answer several reads at once. `k3 plan --measure` reads from the
# device of the model with 1 to 16 readers. It takes the smallest number that is within a tenth of the best rate (5.9).
# A reader also multiplies the rows that it has read, and does not read meanwhile. So the command adds one reader for
# each thread of arithmetic.

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
# - A budget pays first for what every run needs, then for the trunk from the front, then for cached experts.
# - The plan is made before anything large is allocated. Trunk and experts allocate exactly what its layout says.
# - A run is refused before the first weight is read if memory, open files, threads or addresses are too few.
# - The prefill chunk is part of the plan: with more tokens in a pass, the trunk is read fewer times.
#
# ## Exercises
#
# Answers to 1 and 2: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. What is the smallest budget, to a gigabyte, at which the whole trunk of K3 is pinned? What differs in the plan just
#    below it?
# 2. Let the chunk have half of the spare bytes instead of a quarter. At which budgets does the plan of K3 change?
#
# Next: [5.19 The trunk on a faster disk](19_pack.ipynb).
