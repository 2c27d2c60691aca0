"""5.16 Experts: fetched when the router has spoken

Made from book/05_streaming/16_experts.py: edit that, then run `make export`.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from k3lib.cache_policy import AgingCache, LayerCaches
from k3lib.disk import Files, page_buffer, page_padded
from k3lib.header import Extent
from k3lib.layout import (
    ExpertLayout, RowBlock, expert_slot_bytes, row_blocks, scale_bytes, streaming_slot_bytes,
)
from k3lib.matmul import PackedMatrix, check_packed, deinterleaved
from k3lib.moe import Expert
from k3lib.prefetch import Prefetcher, items
from k3lib.read_multiply import Product, max_concurrent_blocks, read_multiply, read_rows


def adjacent_runs(extents: list[Extent]) -> list[list[int]]:
    "Indices of `extents` grouped into runs of adjacent bytes of one file, in file order: [[i, ...], ...]."
    order = sorted(range(len(extents)), key=lambda i: (extents[i].file, extents[i].offset))
    groups = [[order[0]]]
    for before, i in zip(order, order[1:]):
        a, b = extents[before], extents[i]
        if (a.file, a.offset + a.nbytes) == (b.file, b.offset):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def read_expert(files: Files, extents: list[Extent], buffer: np.ndarray) -> Expert:
    """Read the six tensors of one expert into `buffer`, one read for each run of adjacent bytes.

    `buffer`: uint8, page-aligned, of expert_slot_bytes. Returns an Expert of matrices in it. Raises CheckpointError.
    """
    views, begin = [buffer] * len(extents), 0
    for group in adjacent_runs(extents):
        first = extents[group[0]]
        nbytes = sum(extents[i].nbytes for i in group)
        at = begin + files.read(buffer[begin:], first._replace(nbytes=nbytes), 0, nbytes, "experts")
        for i in group:
            views[i] = buffer[at:at + extents[i].nbytes].reshape(extents[i].shape)
            at += extents[i].nbytes
        begin += page_padded(nbytes)
    return Expert.packed(views)


class StreamedPackedMatrix:
    """A packed matrix of an expert that is read while it is multiplied, its scales and then its rows, through `buffer`.

    The protocol of all matrices, on the calling thread alone: `shape`, multiply(x, out, threads),
    map_blocks(work, threads). `seconds`: processor time of multiply(). `scale_room`: bytes of `buffer` for the scales;
    the remaining bytes are for rows.
    """

    def __init__(self, files: Files, packed: Extent, scale: Extent, buffer: np.ndarray, scale_room: int):
        self.files, self.packed, self.scale, self.seconds = files, packed, scale, 0.0
        self.scale_buffer, self.row_buffer = buffer[:scale_room], buffer[scale_room:]
        self.shape: tuple[int, int] = (packed.shape[0], 2 * packed.shape[1])

    def _read_scale(self):
        start = self.files.read(self.scale_buffer, self.scale, 0, self.scale.nbytes, "experts")
        return self.scale_buffer[start:start + self.scale.nbytes].reshape(self.scale.shape)

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int = 1) -> None:
        "out float32 [T, n] = x W^T for x float32 [T, k]. Raises CheckpointError."
        check_packed(self.packed, self.scale, x.shape, out.shape)
        rows = RowBlock(self.packed, 0, self.shape[0], 0, self.packed.nbytes, "experts")
        product = Product(rows, self._read_scale(), deinterleaved(x), out)
        self.seconds += read_multiply(self.files, product, self.row_buffer, np.zeros(1, np.int64))

    def map_blocks(self, work: Callable[[int, PackedMatrix, int], None], threads: int = 1) -> None:
        "Call work(first row, rows, 1) on blocks that cover the matrix, one after the other. Raises CheckpointError."
        scale = self._read_scale()
        for block in row_blocks(self.packed, 1, len(self.row_buffer), "experts"):
            rows = read_rows(self.files, block, self.row_buffer)
            work(block.first, PackedMatrix(rows, scale[block.first:block.first + block.rows]), 1)


def streaming_expert(files: Files, extents: list[Extent], buffer: np.ndarray) -> Expert:
    """An Expert whose three matrices are read while they are multiplied, one after the other.

    They share a page-aligned uint8 `buffer` of streaming_slot_bytes, or of expert_slot_bytes if that is less. Raises
    ValueError if it is smaller, because compiled code does not check where a buffer ends.
    """
    need = streaming_slot_bytes(extents)
    if len(buffer) < min(need, expert_slot_bytes(extents)):
        raise ValueError(f"an expert streams through a buffer of {need} bytes, this one has {len(buffer)}")
    room = scale_bytes(extents)
    w1, w2, w3 = (StreamedPackedMatrix(files, packed, scale, buffer[:need], room)
                  for packed, scale in zip(extents[::2], extents[1::2]))
    return Expert(w1, w2, w3)


class RequestedExpert:
    """Expert `e` of a request of layer `layer`.

    `slot`: memory of its own if the expert is to be cached, else None. `expert`: the Expert in that slot; None until
    all of it has been read, and again after the work on it has failed.
    """

    __slots__ = "e", "expert", "layer", "slot"

    def __init__(self, layer: int, e: int, slot: np.ndarray | None):
        self.layer, self.e, self.slot = layer, e, slot
        self.expert: Expert | None = None


class KeptExperts:
    """What layer `number` keeps of its experts.

    `cache` says which experts are to be cached. `slots` is the memory for them. `cached` {e: RequestedExpert} holds
    those that have a slot.
    """

    def __init__(self, number: int, cache: AgingCache, slots: list[np.ndarray]):
        self.number, self.cache, self.slots = number, cache, slots
        self.cached: dict[int, RequestedExpert] = {}

    def choose(self, ids: list[int]) -> list[RequestedExpert]:
        """Let the cache choose for a request of `ids`: a RequestedExpert for each, with its expert if that is a hit.

        No reader may be at work.
        """
        read = {e: kept for e, kept in self.cached.items() if kept.expert is not None}
        for e in self.cache.cached - read.keys():
            self.cache.forget(e)
        if self.cache.capacity:
            self.cache.request(ids)
        stays = self.cache.cached
        self.cached = {e: kept for e, kept in read.items() if e in stays}
        used = {id(kept.slot) for kept in self.cached.values()}
        free = [slot for slot in self.slots if id(slot) not in used]
        new = {e: RequestedExpert(self.number, e, free.pop() if e in stays else None)
               for e in ids if e not in self.cached}
        self.cached.update((e, requested) for e, requested in new.items() if e in stays)
        return [self.cached.get(e) or new[e] for e in ids]


class LayerExperts:
    "The experts of one layer, with the methods that moe_layer calls. `kept`: what the layer keeps."

    def __init__(self, experts: "Experts", kept: KeptExperts):
        self.experts, self.kept = experts, kept

    def request(self, ids: list[int]) -> None:
        "Say which experts the next map() is for, each named once. Reading begins now if slots hold whole experts."
        self.experts.request(self.kept, [int(e) for e in ids])

    def map(self, work: Callable[[int, Expert], None], threads: int) -> None:
        "Call work(expert id, expert) once for each requested expert, on readers, in any order, several at a time."
        self.experts.map(work, max_concurrent_blocks(threads))


def read_requested(files: Files, extents: Callable[[int, int], list[Extent]], requested: RequestedExpert,
                   buffer: np.ndarray) -> Expert:
    "Read an expert whole into `buffer`: its own slot, or one that the pool lends. Raises CheckpointError."
    expert = read_expert(files, extents(requested.layer, requested.e), buffer)
    if requested.slot is not None:
        requested.expert = expert
    return expert


class Experts:
    """Routed experts in the memory that `layout` gives them. Used by one thread, one request at a time.

    extents(layer, e): the six extents of an expert, packed weights and scales of w1, of w2, of w3. All experts have one
    shape. A request takes the place of the one before. `requests`, `hits`: how many experts were requested, and how
    many of them were cached before their request. `on_request(layer, ids)` is called with every request.

    Between calls `_cached` and `_missing` are the hits and the other experts of the last request, and `_answered` says
    whether map() was called for it. A reader sets the `expert` of the RequestedExpert that it works on. The calling
    thread reads that field only while the pool has no job.

    Dropping Experts ends their readers, as close() does, without waiting for them.
    """

    def __init__(self, layout: ExpertLayout, extents: Callable[[int, int], list[Extent]], files: Files):
        self.layout, self.extents, self.files = layout, extents, files
        self.requests = self.hits = 0
        self.on_request: Callable[[int, list[int]], object] = lambda layer, ids: None
        self._cached: list[tuple[RequestedExpert, Expert]] = []
        self._missing: list[RequestedExpert] = []
        self._answered = True
        caches = LayerCaches(layout.layers, layout.cached)
        self._kept = {number: KeptExperts(number, caches[number], self._slots(caches[number].capacity))
                      for number in layout.layers}
        lent = self._slots(layout.slots.count - layout.cached)
        read_ahead = layout.slots.count if layout.whole else 0
        read = partial(read_requested, files, extents)
        self._pool = Prefetcher(read, lent, layout.readers, read_ahead, "experts",
                                memory=lambda requested: requested.slot) if layout.slots.count else None

    def _slots(self, count):
        nbytes = self.layout.slots.nbytes
        return [page_buffer(nbytes)[:nbytes] for _ in range(count)]

    def layer(self, number: int) -> LayerExperts:
        "The experts of one layer."
        return LayerExperts(self, self._kept[number])

    def request(self, layer: KeptExperts, ids: list[int]) -> None:
        """Begin a request of experts `ids` of a layer, and count its hits.

        Waits until the reads of the request before have ended. Raises ValueError for an expert that is named twice, and
        where there are no slots; RuntimeError after close().
        """
        if len(set(ids)) < len(ids) or ids and self._pool is None:
            raise ValueError(f"experts {ids} of layer {layer.number} are requested into {self.layout.slots.count} "
                             "slots: an expert is named twice, or there is no slot")
        self._answered, self._cached, self._missing = True, [], []
        if self._pool is not None:
            self._pool.restart([])  # from here on no reader is at work
            chosen = layer.choose(ids)
            self._cached = [(requested, requested.expert) for requested in chosen if requested.expert is not None]
            self._missing = [requested for requested in chosen if requested.expert is None]
            self._pool.restart(self._missing)  # reading begins
        self.requests += len(ids)
        self.hits += len(self._cached)
        self.on_request(layer.number, ids)
        self._answered = False

    @property
    def wait_seconds(self) -> float:
        "An estimate of the seconds for which the arithmetic waited for experts."
        return self._pool.wait_seconds if self._pool else 0.0

    def close(self) -> None:
        "End the readers and give the memory back. A thread that waits for an expert gets a RuntimeError."
        if self._pool:
            self._pool.close()
        self._kept, self._cached, self._missing = {}, [], []

    def map(self, work: Callable[[int, Expert], None], limit: int) -> None:
        """Have the readers call work(expert id, expert) on each requested expert, at most `limit` at a time.

        The calls come in any order. Returns when all have ended. Raises what a call or a read raised. map() answers a
        request once, even if it raises: RuntimeError without an open request, and after close().
        """
        if self._answered:
            raise RuntimeError("no request is open: map() answers a request once")
        self._answered = True

        def use(requested, expert):
            try:
                work(requested.e, expert)
            except BaseException:
                requested.expert = None
                raise

        def stream(rest, buffer, cursor):
            return sum(self._stream(requested, buffer, use) for requested in items(rest, cursor))

        if self._pool is not None:
            self._pool.map_blocks(self._missing, use, stream, limit, self._cached)

    def _stream(self, requested, buffer, use):
        "Read and use an expert that has not been read ahead. Returns the processor seconds of its products."
        if requested.slot is not None:
            expert = read_requested(self.files, self.extents, requested, requested.slot)
            began = time.thread_time()
            use(requested, expert)
            return time.thread_time() - began
        expert = streaming_expert(self.files, self.extents(requested.layer, requested.e), buffer)
        use(requested, expert)
        return sum(matrix.seconds for matrix in expert)


__all__ = [
    "adjacent_runs", "read_expert", "StreamedPackedMatrix", "streaming_expert", "RequestedExpert", "KeptExperts",
    "LayerExperts", "read_requested", "Experts",
]
