# %% [markdown]
# # 5.10 How a budget's bytes are laid out
#
# The same forward pass runs at every budget. The budget only decides which weights stay in memory and which are read
# from the disk for every token. Both kinds need memory, and if different parts of a program computed these sizes, the
# sizes could disagree. So this chapter computes them in one place: which rows of a matrix are read together, through
# how many buffers, and how much memory an expert needs. At the end you can say from the shape of a tensor alone how
# much memory it takes while it streams.
#
# > **Without it:** one matrix of K3, `q_proj`, takes 176 MB<!--claim whole--> of memory.
# >
# > **With it:** its rows stream through buffers of 16.8 MB,<!--claim buffers--> and all other matrices of the trunk use
# > the same buffers.
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
# | part | where a report counts the bytes of a tensor: trunk, experts, other | `part_of` (5.4) |
#
# The code of this chapter neither reads nor allocates. Chapter [5.18] makes a `Layout` from a budget. The trunk (5.13)
# and the experts (5.16) are built from this layout and compute no sizes of their own. So they allocate exactly the
# memory that was planned.
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
# A matrix is cut into blocks of whole rows. The reason is chapter [1.5]: the dot product of one row has fixed bits, so
# a cut between rows changes no result. In some matrices several rows belong together, such as the key rows and value
# rows of a head in `kv_b_proj`. A block then contains all of them.

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
print(f"q_proj: {q_proj.nbytes / 1e6:.0f} MB")  # claim whole
kv_b = row_blocks(Extent("s", 8, 24576 * 1024, "BF16", (24576, 512)), 256, 1 << 20, "trunk")
print("kv_b_proj, a head's 256 rows together:", [block.rows for block in kv_b][:3], "...")
assert [block.rows for block in row_blocks(q_proj, 1, 2 << 20, "trunk")][:2] == [144, 144]

# %% [markdown]
# ## 5.10.2 Buffers for the trunk
#
# How large should a block be, and how many blocks may wait? A block that has been read ahead should still be in a cache
# of the processor when it is multiplied. So a block has at most two megabytes, and at most three blocks wait. In
# addition, each reader has one buffer, through which it reads and multiplies the rows that were not read ahead
# ([5.11.2]).
#
# A **router** is treated differently. The experts of its layer can be requested only when the product with the whole
# router is complete. So a router is read ahead as a whole, through buffers of its own. They hold one router, in blocks
# of one read unit.
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
# The layout of the trunk says for each tensor whether it is resident, and if not, in which row blocks it is streamed.

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
# `trunk_layout` makes a layout in which every matrix is streamed. `pin` makes some matrices resident. The buffers do
# not change, because the matrices that are still streamed need them. If no matrix is streamed any more, there are no
# buffers.

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
# A cached expert needs memory for its six tensors, and for the other bytes of the first and last page of each. An
# expert that streams needs less memory: room for the scales of one matrix, which are read before its rows, and for one
# read unit of rows.

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
# All slots of a layout have the same size: that of a whole expert, or that of a streaming one. If slots hold whole
# experts, each reader keeps one of them for experts that stream, and all other slots cache experts.

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
print(f"row buffers for five readers: {trunk.rows.total / 1e6:.1f} MB")  # claim buffers
assert trunk.rows == Buffers(8, BUFFER_BYTES) and not pinned.streamed


# %% [markdown]
# One mistake here would damage memory. An extent begins anywhere in a page, and a direct read brings whole pages. So a
# buffer must have room for two pages more than the rows of a block. A gate takes the worst place of a block in its
# pages:

# %%
def check_room(blocks, buffer_bytes):
    "The gate: wherever in a page a block begins, the whole pages that hold it fit the buffer."
    for block in blocks:
        pages = page_padded(block.nbytes)
        assert pages <= buffer_bytes, f"a block of {block.nbytes:,} bytes can need {pages:,}, more than the buffer has"
    print(f"{len(blocks)} blocks fit buffers of {buffer_bytes:,} bytes wherever they begin")


check_room(trunk.streamed["model.layers.0.q_proj.weight"], BUFFER_BYTES)
check_room(row_blocks(q_proj, 1, 1 << 20, "trunk"), 1 << 20)

# %% tags=["raises-exception"]
rows_that_fit = (1 << 20) // (2 * 7168)  # WRONG: no room for the rest of the first and the last page
check_room([RowBlock(q_proj, 0, rows_that_fit, 0, rows_that_fit * 2 * 7168, "trunk")], 1 << 20)

# %% [markdown]
# ## 5.10.5 Summary
#
# - A block consists of whole rows, so the bits of a product do not depend on the size of the buffers.
# - The matrices of the trunk stream through a few buffers, each large enough for any block. Routers have buffers of
#   their own.
# - The sizes are computed once, in a layout. Trunk and experts allocate what the layout says.
#
# ## Exercises
#
# The answers are in [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. A block of `kv_b_proj` keeps the 256 rows of a head together, 512 numbers each. How many rows of this width could a
#    head have before its rows need a buffer larger than `BUFFER_BYTES`?
# 2. K3 has 55,430 row blocks outside its routers when everything streams ([5.13.6]). How many bytes do their lists
#    take, and why are these bytes counted at all?
#
#
# Next: [5.11 One reader pool](11_prefetch.ipynb).
#
# [5.13.6]: 13_trunk.ipynb#5.13.6-What-it-costs-in-K3
