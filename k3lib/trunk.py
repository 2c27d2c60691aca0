"""5.13 The trunk: rows that arrive

Made from book/05_streaming/13_trunk.py: edit that, then run `make export`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from k3lib.disk import Files, page_buffer
from k3lib.layout import Buffers, RowBlock, TrunkLayout
from k3lib.matmul import ResidentMatrix, bf16_to_float32, check_shapes, matmul_rows, padded
from k3lib.prefetch import Prefetcher, items
from k3lib.read_multiply import Product, max_concurrent_blocks, read_multiply, read_rows


class StreamedMatrix:
    """A matrix of the trunk that the readers of `pool` read, in `blocks`, while it is used: once in a forward pass.

    The protocol of all matrices: `shape`, multiply(x, out, threads), map_blocks(work, threads).
    """

    def __init__(self, pool: Prefetcher, files: Files, blocks: list[RowBlock]):
        self.pool, self.files, self.blocks = pool, files, blocks
        n, k = blocks[0].extent.shape
        self.shape: tuple[int, int] = (n, k)

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int) -> None:
        "out = x W^T for x float32 [T, k] and out float32 [T, n]. Raises CheckpointError."
        check_shapes("StreamedMatrix", self.shape, x, out)
        prepared = padded(x)

        def work(block, rows):
            matmul_rows(rows, prepared, out, block.first)

        def stream(rest, buffer, cursor):
            rows = rest[0].through(rest[-1])
            return read_multiply(self.files, Product(rows, None, prepared, out), buffer, cursor)

        self.pool.map_blocks(self.blocks, work, stream, max_concurrent_blocks(threads))

    def map_blocks(self, work: Callable[[int, np.ndarray, int], Any], threads: int) -> None:
        """Call work(first row, rows [m, k], 1) on blocks that cover the matrix, on readers, several at a time.

        `rows`: uint16 (bf16) or float32. The blocks come in any order. Returns when all calls have ended. Raises what
        one of them raised, and CheckpointError.
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
    "A vector or convolution `array`, uint16 (bf16) or float32, as float32. A weight [1, H] becomes [H]."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


class Trunk:
    """Every tensor of a forward pass but the routed experts, resident or streamed, as `layout` says. For one thread.

    `resident`: {name: ResidentMatrix, or a float32 vector}. progress(nbytes) is called when one of them has been read.
    Between two calls of begin(), weight() is called once for each streamed matrix, in the order of layout.streamed.
    Raises CheckpointError. Dropping a trunk ends its readers, as close() does, without waiting for them.
    """

    def __init__(self, layout: TrunkLayout, files: Files, progress: Callable[[int], Any] | None = None):
        self.files, self.layout = files, layout
        self.resident: dict[str, Any] = {}
        for name, tensor in layout.resident.items():
            array = files.array(tensor.extent, tensor.part)
            self.resident[name] = ResidentMatrix(array) if tensor.is_matrix else as_float32(array)
            if progress is not None:
                progress(tensor.extent.nbytes)
        self._names, self._next, self._closed = list(layout.streamed), 0, False
        rows = [block for name in self._names if name not in layout.routers for block in layout.streamed[name]]
        routers = [block for name in self._names if name in layout.routers for block in layout.streamed[name]]
        self._pools: dict[str, tuple[Prefetcher, list[RowBlock]]] = {}
        try:
            self._add_pool("trunk", rows, layout.rows, layout.readers, layout.read_ahead)
            self._add_pool("routers", routers, layout.router_rows, 1, layout.router_rows.count)
        except BaseException:  # no caller has this trunk yet to close it
            self.close()
            raise

    def _add_pool(self, name: str, blocks: list[RowBlock], buffers: Buffers, readers: int, read_ahead: int):
        "Add a pool that reads `blocks` over and over, if there are any blocks."
        if blocks:
            memory = [page_buffer(buffers.nbytes) for _ in range(buffers.count)]
            pool = Prefetcher(partial(read_rows, self.files), memory, readers, read_ahead, name)
            self._pools[name] = pool, blocks
            pool.restart(blocks, cyclic=True)

    def begin(self) -> None:
        "Begin a forward pass. If the pass before was interrupted, the readers begin again at the first block."
        self._next = 0
        for pool, blocks in self._pools.values():
            if not pool.at_start():
                pool.restart(blocks, cyclic=True)

    def weight(self, name: str) -> Any:
        "The matrix or float32 vector `name`. RuntimeError if the trunk is closed or another streamed matrix is next."
        resident = self.resident.get(name)
        if resident is not None:
            return resident
        if self._closed:
            raise RuntimeError("the trunk is closed")
        following = self._names[self._next] if self._names else "nothing"
        if following != name:
            raise RuntimeError(f"the forward pass asks for {name}, but {following} is next")
        self._next = (self._next + 1) % len(self._names)
        pool, _ = self._pools["routers" if name in self.layout.routers else "trunk"]
        return StreamedMatrix(pool, self.files, self.layout.streamed[name])

    @property
    def wait_seconds(self) -> float:
        "An estimate of the seconds for which the arithmetic waited for row blocks."
        return sum(pool.wait_seconds for pool, _ in self._pools.values())

    def close(self) -> None:
        "End the readers and give the memory back. Waiting for rows or asking for a tensor then raises RuntimeError."
        self._closed = True
        for pool, _ in self._pools.values():
            pool.close()
        self.resident.clear()


__all__ = [
    "StreamedMatrix", "as_float32", "Trunk",
]
