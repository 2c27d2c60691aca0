# %% [markdown]
# # 5.10 How a budget's bytes are laid out
#
# The same forward pass runs at every budget. The budget only decides which weights wait in memory and which on the
# disk. This chapter lays out the memory for both, once: which rows of a matrix are read together, how many buffers they
# go through, how much memory an expert needs. At the end you can say from a tensor's shape alone how much memory it
# takes while it streams.
#
# Needs chapters [5.4] (the tensors) and [5.9] (pages). Runs in seconds. Makes `k3lib.layout`.
#
# [5.9 Past the page cache](09_disk.ipynb) ·
# [contents](../README.md) ·
# [5.11 One reader pool](11_prefetch.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | row block | rows of a matrix that are read and multiplied together | `RowBlock` |
# | page buffer | memory aligned for direct reads, used again and again | `Buffers` counts them |
# | read unit | bytes that one reader reads and multiplies at a time | `READ_UNIT` (5.9) |
# | resident | in memory from the start: vectors, and the matrices that are pinned | `ResidentTensor` |
# | streamed | read again in every forward pass | `TrunkLayout.streamed` |
# | part | what a tensor is for, in the account of bytes read: trunk, experts, other | `part_of` (5.4) |
#
# Nothing here reads or allocates. Chapter [5.18] spends a budget and makes a `Layout`. The trunk (5.13) and the experts
# (5.16) are built from that layout and compute no size of their own. So the memory that was promised is the memory that
# is allocated.
#
# [5.4]: 04_tensors.ipynb
# [5.9]: 09_disk.ipynb
# [5.18]: 18_plan.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "plan")

# %% tags=["export"]
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from k3lib.disk import PAGE, READ_UNIT, page_padded
from k3lib.header import Extent
from k3lib.tensors import is_matrix, is_router, part_of


# %% [markdown]
# ## 5.10.1 Whole rows
#
# A matrix is cut into blocks of whole rows, because a row's dot product is the unit whose bits are fixed (chapter
# [1.5]). Where rows belong together, as a head's key and value rows of `kv_b_proj` do, blocks keep them together.
#
# [1.5]: ../01_mxfp4/05_matmul.ipynb

# %% tags=["export"]
class RowBlock(NamedTuple):
    """Rows `first` .. `first + rows` of the matrix at `extent`, read together on the account of `part`.

    They are the `nbytes` bytes from byte `begin` of the extent on.
    """

    extent: Extent
    first: int
    rows: int
    begin: int
    nbytes: int
    part: str

    def through(self, last: "RowBlock") -> "RowBlock":
        "One block of all rows from the first of this block to the end of `last`, a later block of the same matrix."
        return self._replace(rows=last.first + last.rows - self.first, nbytes=last.begin + last.nbytes - self.begin)


def row_blocks(extent: Extent, multiple: int, buffer_bytes: int, part: str) -> list[RowBlock]:
    """Cut a matrix into as few row blocks as buffers of `buffer_bytes` allow, all but the last of equal size.

    The rows of a block are a multiple of `multiple`. Where there is room, they are also a multiple of the four rows
    that a kernel takes at a time. Raises ValueError if `multiple` rows do not fit a buffer.
    """
    n, row = extent.shape[0], extent.nbytes // extent.shape[0]
    room = (buffer_bytes - 2 * PAGE) // row  # rows that fit wherever in a page they begin
    unit = math.lcm(multiple, 4) if room >= math.lcm(multiple, 4) else multiple
    if room < unit:
        raise ValueError(f"a buffer of {buffer_bytes} bytes does not hold {multiple} rows of {row} bytes")
    blocks = -(-n // (room // unit * unit))
    rows = -(-n // (blocks * unit)) * unit
    return [RowBlock(extent, first, min(rows, n - first), first * row, min(rows, n - first) * row, part)
            for first in range(0, n, rows)]


# %%
q_proj = Extent("shard", 8, 12288 * 7168 * 2, "BF16", (12288, 7168))
for kib in (256, 1024, 8192):
    cut = row_blocks(q_proj, 1, kib << 10, "trunk")
    print(f"q_proj through buffers of {kib:4} KiB: {len(cut):3} blocks of {cut[0].rows} rows, "
          f"{cut[0].nbytes / 1e6:.2f} MB, the last of {cut[-1].rows}")
kv_b = row_blocks(Extent("s", 8, 24576 * 1024, "BF16", (24576, 512)), 256, 1 << 20, "trunk")
print("kv_b_proj, a head's 256 rows together:", [block.rows for block in kv_b][:3], "...")
assert [block.rows for block in row_blocks(q_proj, 1, 2 << 20, "trunk")][:2] == [144, 144]

# %% [markdown]
# ## 5.10.2 Buffers for the trunk
#
# A block of two megabytes that is read ahead is still in a core's cache when it is multiplied. At most three blocks
# wait: with more, the first would have left the cache by then. Besides these, every reader has one buffer, through
# which it reads and multiplies the rows that were not read ahead ([5.11.2]).
#
# A **router** is different. No expert of its layer can be requested before the router's product is complete. So all of
# a router is read ahead, through buffers of its own. They hold one router, in blocks of one read unit.
#
# [5.11.2]: 11_prefetch.ipynb#5.11.2-Three-jobs

# %% tags=["export"]
BUFFER_BYTES = 2 << 20  # of a row block's buffer; less if all matrices are smaller, more for larger groups of rows
READ_AHEAD = 3  # the most row blocks that are read before their matrix is used
BLOCK_ENTRY_BYTES = 250  # memory of one RowBlock in a list


@dataclass(frozen=True)
class Buffers:
    "`count` page buffers of `nbytes` each."

    count: int
    nbytes: int

    @property
    def total(self) -> int:
        "Bytes of all buffers."
        return self.count * self.nbytes


def row_buffers(matrices: dict[str, Extent], multiples: dict[str, int], readers: int) -> Buffers:
    """The buffers through which `matrices`, {name: extent}, stream: one for each reader, and READ_AHEAD more.

    `multiples`: {name: rows that must stay together}.
    """
    if not matrices:
        return Buffers(0, 0)
    widest = max(multiples.get(name, 1) * (e.nbytes // e.shape[0]) for name, e in matrices.items())
    usual = min(BUFFER_BYTES, max(page_padded(e.nbytes) + PAGE for e in matrices.values()))
    return Buffers(readers + READ_AHEAD, max(usual, page_padded(widest) + PAGE))


def router_buffers(extents: Collection[Extent]) -> Buffers:
    "Buffers that hold any one of the matrices `extents` whole, in blocks of one read unit."
    if not extents:
        return Buffers(0, 0)
    unit = page_padded(max(READ_UNIT, *(e.nbytes // e.shape[0] for e in extents)))
    nbytes = min(unit, max(page_padded(e.nbytes) for e in extents)) + PAGE
    return Buffers(max(len(row_blocks(e, 1, nbytes, "")) for e in extents), nbytes)


# %% [markdown]
# ## 5.10.3 The trunk's layout
#
# The layout says of each tensor that it is resident, or in which row blocks it is streamed.

# %% tags=["export"]
class ResidentTensor(NamedTuple):
    "A tensor that stays in memory: where it lies in the checkpoint, its part, and whether it is a matrix or a vector."

    extent: Extent
    part: str
    is_matrix: bool


@dataclass(frozen=True)
class TrunkLayout:
    """Which tensors of a forward pass, all but the routed experts, are resident or streamed. Dicts are in its order.

    `resident`: {name: ResidentTensor}. `streamed`: {name: its row blocks}. `routers`: names of the streamed matrices
    that are read ahead whole. `router_rows`: their buffers. `rows`: the buffers of all other streamed matrices.
    `readers`: threads that read and multiply row blocks. `read_ahead`: the most row blocks read ahead into `rows`.
    """

    resident: dict[str, ResidentTensor]
    streamed: dict[str, list[RowBlock]]
    routers: frozenset[str]
    rows: Buffers
    router_rows: Buffers
    readers: int
    read_ahead: int = READ_AHEAD

    @property
    def buffer_bytes(self) -> int:
        "Bytes of all buffers and of the lists of blocks."
        blocks = sum(len(blocks) for name, blocks in self.streamed.items() if name not in self.routers)
        routers = self.router_rows.total + BLOCK_ENTRY_BYTES * self.router_rows.count * len(self.routers)
        return self.rows.total + BLOCK_ENTRY_BYTES * blocks + routers


# %% [markdown]
# `trunk_layout` streams every matrix. `pin` makes some of them resident. The buffers stay as they are: matrices that
# still stream need them. When nothing streams any more, there are no buffers.

# %% tags=["export"]
class TrunkLayout(TrunkLayout):
    def pin(self, names: frozenset[str]) -> "TrunkLayout":
        "The same layout with the matrices `names` resident too, and without buffers if no matrix is streamed any more."
        resident, streamed = dict(self.resident), {}
        for name, blocks in self.streamed.items():
            if name in names:
                resident[name] = ResidentTensor(blocks[0].extent, blocks[0].part, True)
            else:
                streamed[name] = blocks
        rows, router_rows = (self.rows, self.router_rows) if streamed else (Buffers(0, 0), Buffers(0, 0))
        return replace(self, resident=resident, streamed=streamed, routers=self.routers & streamed.keys(),
                       rows=rows, router_rows=router_rows)


def trunk_layout(extents: dict[str, Extent], multiples: dict[str, int], readers: int) -> TrunkLayout:
    """The layout that streams every matrix of `extents`, {name: extent} in the order of the forward pass.

    `multiples`: {name: rows that must stay together}; a router has none. `readers`: threads.
    """
    matrices = {name: e for name, e in extents.items() if is_matrix(name, e)}
    routers = frozenset(filter(is_router, matrices))
    rows = row_buffers({name: e for name, e in matrices.items() if name not in routers}, multiples, readers)
    router_rows = router_buffers([matrices[name] for name in routers])
    streamed = {}
    for name, e in matrices.items():
        nbytes = (router_rows if name in routers else rows).nbytes
        streamed[name] = row_blocks(e, multiples.get(name, 1), nbytes, part_of(name))
    resident = {name: ResidentTensor(e, part_of(name), False) for name, e in extents.items() if name not in matrices}
    return TrunkLayout(resident, streamed, routers, rows, router_rows, readers)


# %% [markdown]
# ## 5.10.4 Room for experts
#
# An expert that is cached needs room for its six tensors, each with the rest of its first and last page. An expert that
# streams needs far less: the scales of one matrix, which are read before its rows, and one read unit of rows.

# %% tags=["export"]
def expert_slot_bytes(extents: list[Extent]) -> int:
    "Bytes of a slot that holds an expert of the six tensors `extents`, however they lie in the file."
    return sum(page_padded(e.nbytes) for e in extents)


def scale_bytes(extents: list[Extent]) -> int:
    "Bytes that hold the scales of any one matrix; `extents` in the order packed, scale, packed, scale, packed, scale."
    return max(page_padded(e.nbytes) for e in extents[1::2])


def streaming_slot_bytes(extents: list[Extent]) -> int:
    "Bytes of a slot through which an expert streams: the scales of one matrix, and one read unit of its rows."
    return scale_bytes(extents) + max(READ_UNIT, *(e.nbytes // e.shape[0] for e in extents[::2])) + 2 * PAGE


# %% [markdown]
# In a layout all slots have one size: that of a whole expert, or that of a streaming one. If they have room for whole
# experts, one slot for each reader is set aside, and all others cache experts.

# %% tags=["export"]
@dataclass(frozen=True)
class ExpertLayout:
    """The memory of the routed experts.

    `layers`: the numbers of the layers that have routed experts, ascending. `slots`: memory for one expert each.
    `readers`: threads that read and multiply experts, each with one slot through which experts stream. `whole`: a slot
    holds a whole expert. Only then are experts read ahead, and only then do the other slots cache experts.
    """

    layers: tuple[int, ...]
    slots: Buffers
    readers: int
    whole: bool

    @property
    def cached(self) -> int:
        "How many experts are cached, over all layers."
        return max(0, self.slots.count - self.readers) if self.whole else 0


@dataclass(frozen=True)
class Layout:
    "Everything that trunk and experts need to know about memory, made once (chapter 5.18)."

    trunk: TrunkLayout
    experts: ExpertLayout


# %%
shapes = [(3072, 1792), (3072, 112), (3584, 1536), (3584, 96), (3072, 1792), (3072, 112)]
expert = [Extent("shard", 8, n * m, "U8", (n, m)) for n, m in shapes]
print(f"an expert of K3: {expert_slot_bytes(expert):,} bytes to cache it, "
      f"{streaming_slot_bytes(expert):,} to stream it")
trunk = trunk_layout({"model.layers.0.q_proj.weight": q_proj}, {}, 5)
pinned = trunk.pin(frozenset(trunk.streamed))
print(f"its q_proj: {q_proj.nbytes:,} bytes, streamed through {trunk.buffer_bytes:,}; "
      f"pinned, through {pinned.buffer_bytes}")
assert trunk.rows == Buffers(8, BUFFER_BYTES) and not pinned.streamed

# %% [markdown]
# ## 5.10.5 Summary
#
# - A block is as many whole rows as fit a buffer, so the bits of a product do not depend on the buffer's size.
# - Matrices stream through a few buffers, each large enough for any block. Routers have buffers of their own.
# - A layout is made once, and trunk and experts allocate what it says. So what is allocated is what was planned.
#
# **Exercises.**
# 1. Which matrix of K3 decides the size of the row buffers, if heads' rows must stay together? From which head size on
#    would it be larger than `BUFFER_BYTES`?
# 2. How many bytes do the lists of row blocks take at the smallest budget, and why are they counted at all?
#
# Next: [5.11 One reader pool](11_prefetch.ipynb).
