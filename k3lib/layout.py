"""5.10 How a budget's bytes are laid out

Made from book/05_streaming/10_layout.py: edit that, then run `make export`.
"""

import math
from typing import NamedTuple
from k3lib.moe import Expert
from k3lib.disk import PAGE, READ_UNIT, page_padded


class RowBlock(NamedTuple):
    "One read of the walk: rows `first` .. `first + rows` of a tensor, `nbytes` from byte `begin` of it."
    extent: object
    first: int
    rows: int
    begin: int
    nbytes: int
    part: str

    def after(self, rows):
        "The same read without its first `rows` rows."
        skipped = rows * (self.nbytes // self.rows)
        return self._replace(first=self.first + rows, rows=self.rows - rows, begin=self.begin + skipped, nbytes=self.nbytes - skipped)

    def through(self, last):
        "One read from here to the end of `last`, a later read of the same tensor."
        return self._replace(rows=last.first + last.rows - self.first, nbytes=last.begin + last.nbytes - self.begin)


def row_blocks(extent, multiple, slot_bytes, part):
    """The reads that bring a matrix through slots of `slot_bytes`: as many whole rows a read as fit, of equal size but the last.

    Rows come in multiples of `multiple`, and of the four that a kernel takes at once where there is room for them.
    """
    n, row = extent.shape[0], extent.nbytes // extent.shape[0]
    room = (slot_bytes - 2 * PAGE) // row
    unit = math.lcm(multiple, 4) if room >= math.lcm(multiple, 4) else multiple
    if room < unit:
        raise ValueError(f"a ring slot of {slot_bytes} bytes does not hold {multiple} rows of {row} bytes")
    blocks = -(-n // (room // unit * unit))
    rows = -(-n // (blocks * unit)) * unit
    return [RowBlock(extent, first, min(rows, n - first), first * row, min(rows, n - first) * row, part) for first in range(0, n, rows)]


def router_buffers(extents):
    "(slots, bytes of each) of a ring that holds any of the matrices `extents` whole, in pieces."
    slot = min(page_padded(max(READ_UNIT, *(e.nbytes // e.shape[0] for e in extents))), max(page_padded(e.nbytes) for e in extents)) + PAGE
    return max(len(row_blocks(e, 1, slot, "")) for e in extents), slot


def streaming_slot_bytes(extents):
    "Bytes of a slot through which an expert passes in pieces: the scales of one matrix and some of its rows."
    e = Expert(*extents)
    return scale_bytes(e) + max(READ_UNIT, *(m.nbytes // m.shape[0] for m in (e.w1, e.w2, e.w3))) + 2 * PAGE


def scale_bytes(e):
    return max(page_padded(m.nbytes) for m in (e.w1_scale, e.w2_scale, e.w3_scale))


def expert_slot_bytes(extents):
    "Bytes of a slot that holds an expert however its tensors lie in the file."
    return sum(page_padded(e.nbytes) for e in extents)


__all__ = [
    "RowBlock", "row_blocks", "router_buffers", "streaming_slot_bytes", "scale_bytes", "expert_slot_bytes",
]
