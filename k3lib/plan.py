"""5.18 The dial: bytes to plan

Made from book/05_streaming/18_plan.py: edit that, then run `make export`.
"""

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


JIT_RSS = 28_000_000  # private memory of compiled kernels and their threads after the first forward pass
LIBRARY_RSS = 97_000_000  # resident pages of shared libraries after the first forward pass
LIBRARY_RSS_GROWTH = 12_000_000  # bytes of them still to come, even if most are resident before the first pass
PROCESS_RSS = 150_000_000  # assumed for an interpreter with its libraries, where the system does not tell
LIBRARY_RSS_BEFORE = 60_000_000  # assumed for its libraries' resident pages, where the system does not tell
COMPILE_RSS = 115_000_000  # what a process that compiles all kernels has more than one that loads them


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


MAX_CHUNK = 64  # tokens


def longest_chunk(config: Config, longest: int, spare: int) -> int:
    "The largest of `longest`, its half, its quarter, ... tokens that leaves three quarters of `spare` bytes."
    one, chunk = activation_bytes(config, 1), longest
    while chunk > 1 and activation_bytes(config, chunk) > one + spare // 4:
        chunk //= 2
    return chunk


READERS = 5  # threads that read by default; never fewer than the threads of arithmetic


class TrunkSource(Protocol):
    "Where the trunk is read from: a checkpoint, or a packed trunk (5.19)."

    def extent(self, name: str) -> Extent:
        "Where a tensor's bytes lie."


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


def measured_readers(checkpoint: Checkpoint, threads: int = CORES) -> tuple[int, str]:
    "(readers, a line that says why): as many as keep the device of the largest shard busy, and `threads` more."
    rates = read_rates(max(checkpoint.files, key=os.path.getsize))
    enough = enough_readers(rates)
    shown = ", ".join(f"{n}: {rate / 1e9:.2f}" for n, rate in rates.items())
    return enough + threads, (f"GB/s by readers: {shown}; {enough} keep the device busy while {threads} multiply: "
                              f"--readers {enough + threads}")


__all__ = [
    "state_bytes", "position_bytes", "RECORD_BYTES", "activation_bytes", "JIT_RSS", "LIBRARY_RSS",
    "LIBRARY_RSS_GROWTH", "PROCESS_RSS", "LIBRARY_RSS_BEFORE", "COMPILE_RSS", "Held", "fixed_costs", "vector_bytes",
    "COMPILER_RSS", "PROGRAM", "compile_first", "compile_kernels", "Plan", "PlanError", "expert_readers",
    "streaming_experts", "first_fit", "streamed_sizes", "pin_from_front", "cache_experts", "MAX_CHUNK",
    "longest_chunk", "READERS", "TrunkSource", "make_plan", "run_threads", "measured_readers",
]
