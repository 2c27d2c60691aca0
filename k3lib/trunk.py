"""5.13 The trunk: rows that arrive

Made from book/05_streaming/13_trunk.py: edit that, then run `make export`.
"""

import numpy as np
from k3lib.parallel import CORES
from k3lib.matmul import ResidentMatrix, bf16_to_float32, matmul_rows
from k3lib.tensors import is_matrix
from k3lib.disk import MAX_READERS
from k3lib.layout import router_buffers, row_blocks
from k3lib.prefetch import Prefetcher
from k3lib.read_multiply import COMPILED_READS, stream_rows


def max_concurrent_blocks(threads):
    "How many readers may read and multiply at a time when the arithmetic has `threads` threads."
    return threads if threads < CORES else max(threads, MAX_READERS)


class StreamedMatrix:
    "A matrix that goes by once: its blocks are slots of the ring, the first of them block `number`."

    def __init__(self, ring, extent, reads, number):
        self.ring, self.reads, self.number, self.shape = ring, reads, number, extent.shape

    def blocks(self, multiple=1):
        """Yields (first row, rows [m, k]) in order. The rows are valid until the next block is asked for.

        Whoever stops half-way keeps the slot until the ring is rewound: giving it back from a generator's end would leave
        the moment to the garbage collector.
        """
        for number, read in enumerate(self.reads, self.number):
            if read.rows % multiple and read.first + read.rows != self.shape[0]:
                raise ValueError(f"{multiple} rows must stay together, but a block has {read.rows}")
            data = self.ring.take(number)
            yield read.first, data.reshape(read.rows, *self.shape[1:])
            self.ring.release(number)

    def each(self, work, threads, stream=None):
        """Call work(first row, rows [m, k]) on every block, in any order, at most `threads` at a time, on the thread that
        has read it: the rows are still in that core's cache. Returns when all calls have. `stream`: as Ring.each takes it."""
        def call(read, data):
            work(read.first, data.reshape(read.rows, *self.shape[1:]))
        self.ring.each(self.number, len(self.reads), call, threads, stream)

    def share(self, work, threads):
        "The same for arithmetic that has `threads` threads: as many readers at a time as at_once() says."
        self.each(work, max_concurrent_blocks(threads))

    def multiply(self, x, out, threads):
        "out float32 [T, n] = x W^T for x as `linear` lays it out. What has not been read ahead is read and multiplied in pieces."
        def work(first, rows):
            matmul_rows(rows, x, out, first)

        def stream(read, slot, drawn):
            stream_rows(self.ring.files, read, slot, x, out, drawn)
        self.each(work, max_concurrent_blocks(threads), stream if COMPILED_READS else None)


def as_float32(array):
    "A resident vector, [1, H] weight (as [H]) or convolution, float32."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


class Trunk:
    """Every tensor of the walk but the routed experts, resident or streamed.

    `walk`: tensor names in the order one pass takes them. `pinned`: matrices kept in memory. `multiples`: {name: rows that
    must stay together}. The other matrices stream through the ring, the same list of reads every pass, at most `ahead` blocks of
    it waiting; those of `early`, whose rows need not stay together, through a ring of early_room() with one reader.
    """

    def __init__(self, checkpoint, walk, pinned, multiples, files, parts, slots, slot_bytes, readers, progress=None, ahead=None, early=frozenset()):
        self.files, self.parts, self.checkpoint = files, parts, checkpoint
        self.extents = {name: checkpoint.extent(name) for name in walk}
        self.resident, self.reads = {}, {}
        room = router_buffers([self.extents[name] for name in early]) if early else None
        for name, extent in self.extents.items():
            if is_matrix(name, extent) and name not in pinned:
                self.reads[name] = row_blocks(extent, multiples.get(name, 1), room[1] if name in early else slot_bytes, parts(name))
        for name, extent in self.extents.items():
            if name not in self.reads:
                array = files.array(extent, parts(name))
                self.resident[name] = ResidentMatrix(array) if is_matrix(name, extent) else as_float32(array)
                if progress is not None:
                    progress(extent.nbytes)
        self._order, self._next, self._index, lines = list(self.reads), 0, {}, ([], [])
        for name in self._order:
            line = name in early
            self._index[name] = line, len(lines[line])
            lines[line].extend(self.reads[name])
        self.ring = Prefetcher(files, lines[0], slots, slot_bytes, readers, ahead) if lines[0] else None
        self.early = Prefetcher(files, lines[1], *room, 1, name="early") if lines[1] else None
        self._starts, self._closed = [0, 0], False

    def _rings(self):
        return [ring for ring in (self.ring, self.early) if ring is not None]

    def begin(self):
        "Start a pass: a ring whose last one stopped half-way begins anew."
        self._next, self._starts = 0, [ring and ring.begin() for ring in (self.ring, self.early)]

    def take(self, name):
        "A matrix with .shape and .blocks(), or a float32 array. A streamed tensor comes when its turn in the walk comes, once a pass."
        resident = self.resident.get(name)
        if resident is not None:
            return resident
        if self._closed:
            raise RuntimeError("the trunk is closed")
        if self._order[self._next] != name:
            raise RuntimeError(f"the walk asks for {name}, but {self._order[self._next]} is next")
        self._next = (self._next + 1) % len(self._order)
        line, index = self._index[name]
        return StreamedMatrix((self.ring, self.early)[line], self.extents[name], self.reads[name], self._starts[line] + index)

    def row(self, name, i):
        "Row `i` of a matrix outside the walk, float32: one read."
        return bf16_to_float32(self.files.array(self.checkpoint.extent(name), self.parts(name), i, 1)[0])

    @property
    def wait_seconds(self):
        "Seconds the arithmetic stood still for a row block."
        return sum(ring.wait_seconds for ring in self._rings())

    def close(self):
        "End the readers and give the memory back; whoever asks for a tensor gets a RuntimeError."
        self._closed = True
        for ring in self._rings():
            ring.close()
        self.resident.clear()


__all__ = [
    "max_concurrent_blocks", "StreamedMatrix", "as_float32", "Trunk",
]
