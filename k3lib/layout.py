"""5.10 How a budget's bytes are laid out

Made from book/05_streaming/10_layout.py: edit that, then run `make export`.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from k3lib.disk import PAGE, READ_UNIT, page_padded
from k3lib.header import Extent
from k3lib.tensors import is_matrix, is_router, part_of


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


def expert_slot_bytes(extents: list[Extent]) -> int:
    "Bytes of a slot that holds an expert of the six tensors `extents`, however they lie in the file."
    return sum(page_padded(e.nbytes) for e in extents)


def scale_bytes(extents: list[Extent]) -> int:
    "Bytes that hold the scales of any one matrix; `extents` in the order packed, scale, packed, scale, packed, scale."
    return max(page_padded(e.nbytes) for e in extents[1::2])


def streaming_slot_bytes(extents: list[Extent]) -> int:
    "Bytes of a slot through which an expert streams: the scales of one matrix, and one read unit of its rows."
    return scale_bytes(extents) + max(READ_UNIT, *(e.nbytes // e.shape[0] for e in extents[::2])) + 2 * PAGE


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


__all__ = [
    "RowBlock", "row_blocks", "BUFFER_BYTES", "READ_AHEAD", "BLOCK_ENTRY_BYTES", "Buffers", "row_buffers",
    "router_buffers", "ResidentTensor", "TrunkLayout", "trunk_layout", "expert_slot_bytes", "scale_bytes",
    "streaming_slot_bytes", "ExpertLayout", "Layout",
]
