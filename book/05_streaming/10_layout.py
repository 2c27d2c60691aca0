# %% [markdown]
# # 5.10 How a budget's bytes are laid out
#
# Whatever the budget is, the same forward pass runs; only where the bytes wait differs. This chapter computes that
# place for every tensor, once: which rows of a matrix are read together, how many buffers they go through, what an
# expert needs. At the end you can say from a tensor's shape alone how much memory it takes while it streams.
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
#
# Nothing here reads or allocates. Chapter 5.18 spends a budget and makes a `Layout`; the trunk (5.13) and the experts
# (5.16) are built from that layout and compute no size of their own, so what was promised and what is allocated cannot
# differ.

# %% tags=["export"]
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from k3lib.tensors import is_matrix, is_router, part_of
from k3lib.disk import PAGE, READ_UNIT, page_padded


# %% [markdown]
# ## 5.10.1 Whole rows
#
# A matrix is cut into blocks of whole rows, because a row's dot product is the unit whose bits are fixed (chapter 1.5).
# Where rows belong together, as a head's key and value rows of `kv_b_proj` do, blocks keep them together.

# %% tags=["export"]
class RowBlock(NamedTuple):
    "Rows `first` .. `first + rows` of a matrix, read together: `nbytes` from byte `begin` of its extent, for `part` of the account."

    extent: Any
    first: int
    rows: int
    begin: int
    nbytes: int
    part: str

    def through(self, last: "RowBlock") -> "RowBlock":
        "All rows from here to the end of `last`, a later block of the same matrix."
        return self._replace(rows=last.first + last.rows - self.first, nbytes=last.begin + last.nbytes - self.begin)


def row_blocks(extent, multiple: int, buffer_bytes: int, part: str) -> list[RowBlock]:
    """The blocks of a matrix for buffers of `buffer_bytes`: as many whole rows a block as fit, all blocks but the last of equal size.

    The rows of a block are a multiple of `multiple`, and of the four that a kernel takes at once where there is room for them.
    Raises ValueError if `multiple` rows do not fit.
    """
    n, row = extent.shape[0], extent.nbytes // extent.shape[0]
    room = (buffer_bytes - 2 * PAGE) // row
    unit = math.lcm(multiple, 4) if room >= math.lcm(multiple, 4) else multiple
    if room < unit:
        raise ValueError(f"a buffer of {buffer_bytes} bytes does not hold {multiple} rows of {row} bytes")
    blocks = -(-n // (room // unit * unit))
    rows = -(-n // (blocks * unit)) * unit
    return [RowBlock(extent, first, min(rows, n - first), first * row, min(rows, n - first) * row, part)
            for first in range(0, n, rows)]


# %%
from k3lib.header import Extent

q_proj = Extent("shard", 8, 12288 * 7168 * 2, "BF16", (12288, 7168))
for kib in (256, 1024, 8192):
    cut = row_blocks(q_proj, 1, kib << 10, "trunk")
    print(f"q_proj through buffers of {kib:4} KiB: {len(cut):3} blocks of {cut[0].rows} rows, {cut[0].nbytes / 1e6:.2f} MB, the last of {cut[-1].rows}")
kv_b = row_blocks(Extent("s", 8, 24576 * 1024, "BF16", (24576, 512)), 256, 1 << 20, "trunk")
print("kv_b_proj, a head's 256 rows together:", [block.rows for block in kv_b][:3], "...")

# %% [markdown]
# ## 5.10.2 Buffers for the trunk
#
# A block of two megabytes is read ahead in one piece and is still in a core's cache when it is multiplied. At most
# three blocks wait: with more, the first would have left the cache. Every reader has one buffer besides, through which
# it multiplies what was not read ahead.
#
# A **router** is different. Until it has spoken no expert of its layer can be requested, so all of it is read ahead,
# through buffers of its own.

# %% tags=["export"]
BUFFER_BYTES = 2 << 20  # bytes of a buffer for row blocks, unless the matrices are smaller or one group of rows is larger
READ_AHEAD = 3  # row blocks that wait for their matrix
BLOCK_ENTRY_BYTES = 250  # memory of one RowBlock in a list


class Buffers(NamedTuple):
    "`count` page buffers of `nbytes` each."

    count: int
    nbytes: int

    @property
    def total(self) -> int:
        return self.count * self.nbytes


def row_buffers(matrices: dict, multiples: dict, readers: int) -> Buffers:
    "Buffers through which any of `matrices` {name: extent} streams; `multiples` {name: rows that must stay together}."
    if not matrices:
        return Buffers(0, 0)
    widest = max(multiples.get(name, 1) * (e.nbytes // e.shape[0]) for name, e in matrices.items())
    usual = min(BUFFER_BYTES, max(page_padded(e.nbytes) + PAGE for e in matrices.values()))
    return Buffers(readers + READ_AHEAD, max(usual, page_padded(widest) + PAGE))


def router_buffers(extents: list) -> Buffers:
    "Buffers that hold any one of the matrices `extents` whole, in blocks of one read unit."
    if not extents:
        return Buffers(0, 0)
    unit = page_padded(max(READ_UNIT, *(e.nbytes // e.shape[0] for e in extents)))
    nbytes = min(unit, max(page_padded(e.nbytes) for e in extents)) + PAGE
    return Buffers(max(len(row_blocks(e, 1, nbytes, "")) for e in extents), nbytes)


# %% [markdown]
# ## 5.10.3 The trunk's layout
#
# `trunk_layout` streams every matrix. `pin` makes some of them resident and leaves the buffers as they are, until
# nothing is streamed.

# %% tags=["export"]
class ResidentTensor(NamedTuple):
    "A tensor that stays in memory: where it lies in the checkpoint, its part of the account, and whether it is a matrix or a vector."

    extent: Any
    part: str
    is_matrix: bool


@dataclass(frozen=True)
class TrunkLayout:
    """Where every tensor of a forward pass but the routed experts waits. All dicts are in the order of the forward pass.

    resident: {name: ResidentTensor}. streamed: {name: its row blocks}. routers: names of streamed matrices that are read ahead
    whole. rows, router_rows: the buffers of the others and of the routers. readers: threads that read and multiply row blocks;
    read_ahead: the most row blocks that wait in their buffers.
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
        "Bytes of all buffers and of the lists of blocks, everything streamed."
        blocks = sum(len(blocks) for name, blocks in self.streamed.items() if name not in self.routers)
        routers = self.router_rows.total + BLOCK_ENTRY_BYTES * self.router_rows.count * len(self.routers)
        return self.rows.total + BLOCK_ENTRY_BYTES * blocks + routers

    def pin(self, names: frozenset[str]) -> "TrunkLayout":
        "The same layout with the matrices `names` resident. Buffers stay as they are while anything is streamed."
        resident, streamed = dict(self.resident), {}
        for name, blocks in self.streamed.items():
            if name in names:
                resident[name] = ResidentTensor(blocks[0].extent, blocks[0].part, True)
            else:
                streamed[name] = blocks
        none = {} if streamed else {"rows": Buffers(0, 0), "router_rows": Buffers(0, 0)}
        return replace(self, resident=resident, streamed=streamed, routers=self.routers & streamed.keys(), **none)


def trunk_layout(extents: dict, multiples: dict, readers: int) -> TrunkLayout:
    """The layout that streams every matrix of `extents`, {name: extent} in the order of the forward pass, with `readers` threads.

    `multiples` {name: rows that must stay together}; routers' rows need not. Raises ValueError where they do not fit a buffer.
    """
    matrices = {name: e for name, e in extents.items() if is_matrix(name, e)}
    routers = frozenset(filter(is_router, matrices))
    rows = row_buffers({name: e for name, e in matrices.items() if name not in routers}, multiples, readers)
    router_rows = router_buffers([matrices[name] for name in routers])
    streamed = {name: row_blocks(e, multiples.get(name, 1), (router_rows if name in routers else rows).nbytes, part_of(name))
                for name, e in matrices.items()}
    resident = {name: ResidentTensor(e, part_of(name), False) for name, e in extents.items() if name not in matrices}
    return TrunkLayout(resident, streamed, routers, rows, router_rows, readers)


# %% [markdown]
# ## 5.10.4 Room for experts
#
# An expert that is cached needs room for its six tensors, each widened to whole pages. One that streams needs far less:
# the scales of one matrix, which are read before its rows, and one read unit of rows.

# %% tags=["export"]
def expert_slot_bytes(extents: list) -> int:
    "Bytes of a slot that holds an expert of the six tensors `extents`, however they lie in the file."
    return sum(page_padded(e.nbytes) for e in extents)


def scale_bytes(extents: list) -> int:
    "Bytes that hold the scales of any one matrix of an expert; `extents` in the order packed, scale, packed, scale, packed, scale."
    return max(page_padded(e.nbytes) for e in extents[1::2])


def streaming_slot_bytes(extents: list) -> int:
    "Bytes of a slot through which an expert streams: the scales of one matrix, and one read unit of its rows."
    return scale_bytes(extents) + max(READ_UNIT, *(e.nbytes // e.shape[0] for e in extents[::2])) + 2 * PAGE


@dataclass(frozen=True)
class ExpertLayout:
    """Where routed experts wait. `layers`: the numbers of the layers that have some, ascending.

    slots: the memory for them. readers: threads that read and multiply experts, each with one slot through which experts stream.
    whole: a slot holds a whole expert. Only then are experts read ahead, and the slots beyond one a reader cache them.
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
print(f"an expert of K3: {expert_slot_bytes(expert):,} bytes to cache it, {streaming_slot_bytes(expert):,} to stream it")
trunk = trunk_layout({"model.layers.0.q_proj.weight": q_proj}, {}, 5)
print(f"its q_proj, {q_proj.nbytes:,} bytes, streams through {trunk.buffer_bytes:,}; pinned: {trunk.pin(frozenset(trunk.streamed)).buffer_bytes}")
