"""5.10 How a budget's bytes are laid out

Made from book/05_streaming/10_layout.py: edit that, then run `make export`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from k3lib.tensors import is_matrix, is_router, part_of
from k3lib.disk import PAGE, READ_UNIT, page_padded


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


__all__ = [
    "RowBlock", "row_blocks", "BUFFER_BYTES", "READ_AHEAD", "BLOCK_ENTRY_BYTES", "Buffers", "row_buffers",
    "router_buffers", "ResidentTensor", "TrunkLayout", "trunk_layout", "expert_slot_bytes", "scale_bytes",
    "streaming_slot_bytes", "ExpertLayout", "Layout",
]
