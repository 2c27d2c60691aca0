"""5.13 The trunk: rows that arrive

Made from book/05_streaming/13_trunk.py: edit that, then run `make export`.
"""

import time
import numpy as np
from k3lib.parallel import CORES
from k3lib.matmul import ResidentMatrix, bf16_to_float32, matmul_rows, padded
from k3lib.disk import MAX_READERS, Files, page_buffer, typed
from k3lib.layout import RowBlock, TrunkLayout
from k3lib.prefetch import Prefetcher, items
from k3lib.read_multiply import Product, read_multiply


def max_concurrent_blocks(threads: int) -> int:
    "How many readers may read and multiply at a time when the arithmetic has `threads` threads."
    return threads if threads < CORES else max(threads, MAX_READERS)


def read_rows(files: Files, block: RowBlock, buffer: np.ndarray) -> np.ndarray:
    "Read a block into `buffer`: its rows [m, k] in there, uint16 for bf16, else the matrix's own dtype. Raises CheckpointError."
    start = files.read(buffer, block.extent, block.begin, block.nbytes, block.part)
    return typed(buffer, start, block.nbytes, block.extent.dtype).reshape(block.rows, -1)


class StreamedMatrix:
    """A matrix of the trunk that is read while it is used, `blocks` by the readers of `pool`. It can be used once in a forward pass.

    The protocol of all matrices: `shape`, multiply(x, out, threads), map_blocks(work, threads).
    """

    def __init__(self, pool: Prefetcher, files: Files, blocks: list[RowBlock]):
        self.pool, self.files, self.blocks = pool, files, blocks
        self.shape: tuple[int, ...] = blocks[0].extent.shape

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int) -> None:
        "out float32 [T, n] = x W^T for x float32 [T, k]. Raises CheckpointError."
        prepared = padded(x)

        def work(block, rows):
            matmul_rows(rows, prepared, out, block.first)

        def stream(rest, buffer, cursor):
            return read_multiply(self.files, Product(rest[0].through(rest[-1]), None, prepared, out), buffer, cursor)

        self.pool.map_blocks(self.blocks, work, stream, max_concurrent_blocks(threads))

    def map_blocks(self, work, threads: int) -> None:
        """Call work(first row, rows [m, k], 1) on blocks that cover the matrix, on readers, in any order, several at a time.

        Returns when all calls have ended. Raises what one of them raised, and CheckpointError.
        """
        def call(block, rows):
            work(block.first, rows, 1)

        def stream(rest, buffer, cursor):
            seconds = 0.0
            for block in items(rest, cursor):
                rows, began = read_rows(self.files, block, buffer), time.thread_time()
                work(block.first, rows, 1)
                seconds += time.thread_time() - began
            return seconds

        self.pool.map_blocks(self.blocks, call, stream, max_concurrent_blocks(threads))


def as_float32(array: np.ndarray) -> np.ndarray:
    "A resident vector, [1, H] weight (as [H]) or convolution, float32."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


class Trunk:
    """Every tensor of a forward pass but the routed experts, resident or streamed, as `layout` says.

    `resident`: {name: ResidentMatrix, or a float32 vector}. `progress`, if given, is shown the bytes of each resident tensor as it is read.
    Used by one thread. Streamed matrices are asked for in the order of layout.streamed, each once between two calls of begin().
    """

    def __init__(self, layout: TrunkLayout, files: Files, progress=None):
        self.files, self.layout, self.resident = files, layout, {}
        for name, tensor in layout.resident.items():
            array = files.array(tensor.extent, tensor.part)
            self.resident[name] = ResidentMatrix(array) if tensor.is_matrix else as_float32(array)
            if progress is not None:
                progress(tensor.extent.nbytes)
        self._names, self._next, self._closed = list(layout.streamed), 0, False
        rows = [block for name in self._names if name not in layout.routers for block in layout.streamed[name]]
        routers = [block for name in self._names if name in layout.routers for block in layout.streamed[name]]
        self._pools: list[tuple[Prefetcher, list[RowBlock]]] = []
        self._rows = self._pool("trunk", rows, layout.rows, layout.readers, layout.read_ahead)
        self._routers = self._pool("routers", routers, layout.router_rows, 1, layout.router_rows.count)

    def _pool(self, name, blocks, buffers, readers, read_ahead):
        "A pool that reads `blocks` over and over, or None where there are none."
        if not blocks:
            return None
        memory = [page_buffer(buffers.nbytes) for _ in range(buffers.count)]
        pool = Prefetcher(lambda block, buffer: read_rows(self.files, block, buffer), memory, readers, read_ahead, name)
        pool.restart(blocks, cyclic=True)
        self._pools.append((pool, blocks))
        return pool

    def begin(self) -> None:
        "Begin a forward pass. If the one before was interrupted, the readers begin anew at its first block."
        self._next = 0
        for pool, blocks in self._pools:
            if not pool.at_start():
                pool.restart(blocks, cyclic=True)

    def weight(self, name: str):
        "The matrix or the float32 vector `name`. RuntimeError if the trunk is closed or another streamed matrix is next."
        resident = self.resident.get(name)
        if resident is not None:
            return resident
        if self._closed:
            raise RuntimeError("the trunk is closed")
        if self._names[self._next] != name:
            raise RuntimeError(f"the forward pass asks for {name}, but {self._names[self._next]} is next")
        self._next = (self._next + 1) % len(self._names)
        pool = self._routers if name in self.layout.routers else self._rows
        return StreamedMatrix(pool, self.files, self.layout.streamed[name])

    @property
    def wait_seconds(self) -> float:
        "Seconds the arithmetic stood still for a row block."
        return sum(pool.wait_seconds for pool, _ in self._pools)

    def close(self) -> None:
        "End the readers and give the memory back; whoever asks for a tensor gets a RuntimeError."
        self._closed = True
        for pool, _ in self._pools:
            pool.close()
        self.resident.clear()


__all__ = [
    "max_concurrent_blocks", "read_rows", "StreamedMatrix", "as_float32", "Trunk",
]
