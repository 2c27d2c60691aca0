"""5.16 Experts: fetched when the router has spoken

Made from book/05_streaming/16_experts.py: edit that, then run `make export`.
"""

import numpy as np
from k3lib.matmul import check_packed, deinterleaved
from k3lib.moe import Expert
from k3lib.disk import Files, page_buffer, page_padded
from k3lib.layout import ExpertLayout, RowBlock, expert_slot_bytes, scale_bytes, streaming_slot_bytes
from k3lib.prefetch import Prefetcher, items
from k3lib.read_multiply import Product, read_multiply
from k3lib.trunk import max_concurrent_blocks
from k3lib.cache_policy import AgingCache, LayerCaches
import time
from collections.abc import Callable


def adjacent_runs(extents: list) -> list[list[int]]:
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


def read_expert(files: Files, extents: list, buffer: np.ndarray) -> Expert:
    """Read the six tensors of one expert into a page-aligned `buffer` of expert_slot_bytes, one read a run of adjacent bytes.

    Returns an Expert of matrices in that buffer. Raises CheckpointError.
    """
    views, begin = [None] * len(extents), 0
    for group in adjacent_runs(extents):
        first = extents[group[0]]
        nbytes = sum(extents[i].nbytes for i in group)
        at = begin + files.read(buffer[begin:], first._replace(nbytes=nbytes), 0, nbytes, "experts")
        for i in group:
            views[i] = buffer[at:at + extents[i].nbytes].reshape(extents[i].shape)
            at += extents[i].nbytes
        begin += page_padded(nbytes)
    return Expert.packed(views)


class StreamingMatrix:
    """A packed matrix of an expert that is read while it is multiplied, its scales and then its rows, through `buffer`.

    The protocol of all matrices, for the calling thread: `shape`, multiply(x, out, threads). `seconds`: processor time of its products.
    """

    def __init__(self, files: Files, packed, scale, buffer: np.ndarray, scale_room: int):
        self.files, self.packed, self.scale, self.seconds = files, packed, scale, 0.0
        self.scale_buffer, self.row_buffer = buffer[:scale_room], buffer[scale_room:]
        self.shape = packed.shape[0], 2 * packed.shape[1]

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int = 1) -> None:
        "out float32 [T, n] = x W^T for x float32 [T, k]. Raises CheckpointError."
        check_packed(self.packed, self.scale, x.shape, out.shape)
        start = self.files.read(self.scale_buffer, self.scale, 0, self.scale.nbytes, "experts")
        scale = self.scale_buffer[start:start + self.scale.nbytes].reshape(self.scale.shape)
        rows = RowBlock(self.packed, 0, self.shape[0], 0, self.packed.nbytes, "experts")
        product = Product(rows, scale, deinterleaved(x), out)
        self.seconds += read_multiply(self.files, product, self.row_buffer, np.zeros(1, np.int64))


def streaming_expert(files: Files, extents: list, buffer: np.ndarray) -> Expert:
    "An Expert whose three matrices are read while they are multiplied, one after the other, through a page-aligned `buffer`."
    need = streaming_slot_bytes(extents)
    if len(buffer) < min(need, expert_slot_bytes(extents)):
        raise ValueError(f"an expert streams through a buffer of {need} bytes, this one has {len(buffer)}")
    room = scale_bytes(extents)
    return Expert(*(StreamingMatrix(files, packed, scale, buffer[:need], room)
                    for packed, scale in zip(extents[::2], extents[1::2])))


class Wanted:
    """Expert `e` of a request. `slot`: memory of its own if it is to be cached, else None. `expert`: the Expert in that slot,
    None until all of it has been read, and again None when a call has failed on it: its bytes may be what was wrong."""

    __slots__ = "e", "expert", "layer", "slot"

    def __init__(self, layer: int, e: int, slot: np.ndarray | None):
        self.layer, self.e, self.slot = layer, e, slot
        self.expert: Expert | None = None


class LayerExperts:
    """The experts of layer `number`: what is cached of them, and the calls that moe_layer makes.

    `cache` says which experts are to be cached, `slots` is memory for as many, and `cached` {e: Wanted} holds those that have a slot.
    """

    def __init__(self, experts: "Experts", number: int, cache: AgingCache, slots: list[np.ndarray]):
        self.experts, self.number, self.cache, self.slots = experts, number, cache, slots
        self.cached: dict[int, Wanted] = {}

    def request(self, ids: list[int]) -> None:
        "Announce these experts, each named once. Reading them begins now where slots hold whole experts."
        self.experts.request(self, [int(e) for e in ids])

    def map(self, work: Callable, threads: int) -> None:
        "Call work(expert id, expert) on each requested expert once, on readers, in any order, several at a time."
        self.experts.map(work, max_concurrent_blocks(threads))

    def choose(self, ids: list[int], whole: bool) -> list[Wanted]:
        """Let the cache choose for a request of `ids`: a Wanted for each, with its expert if that is a hit.

        No reader may be at work. What is not wholly there, of a request that failed or was interrupted, is forgotten first.
        """
        for e in self.cache.cached - {e for e, wanted in self.cached.items() if wanted.expert is not None}:
            self.cache.forget(e)
        if whole:
            self.cache.request(ids)
        stays = self.cache.cached
        self.cached = {e: wanted for e, wanted in self.cached.items() if e in stays and wanted.expert is not None}
        used = {id(wanted.slot) for wanted in self.cached.values()}
        free = [slot for slot in self.slots if id(slot) not in used]
        new = {e: Wanted(self.number, e, free.pop() if e in stays else None) for e in ids if e not in self.cached}
        self.cached.update((e, wanted) for e, wanted in new.items() if e in stays)
        return [self.cached.get(e) or new[e] for e in ids]


class Experts:
    """Routed experts in the memory that `layout` gives them.

    extents(layer, e): the six extents of an expert, in the order packed, scale, packed, scale, packed, scale of w1, w2, w3. All experts have one
    shape. Used by one thread, one request at a time; a request takes the place of the one before. `requests`, `hits`: how many
    experts were requested, and how many of them were cached before their request. `trace`: None, or a list that receives
    (layer, e) of every request.

    Between calls: `_present` and `_missing` are the last request, what was cached and what must be read, and `_answered` says that map() was
    called for it. A reader sets the `expert` of a Wanted that it has in hand; this thread looks at it only while the pool has no job.
    """

    def __init__(self, layout: ExpertLayout, extents: Callable, files: Files):
        self.layout, self.extents, self.files = layout, extents, files
        self.requests = self.hits = 0
        self.trace: list | None = None
        self._present: list[tuple[Wanted, Expert]] = []
        self._missing: list[Wanted] = []
        self._answered = True
        caches, count = LayerCaches(layout.layers, layout.cached), layout.slots.count - layout.cached
        self._layers = {number: LayerExperts(self, number, caches[number], [self._slot() for _ in range(caches[number].capacity)])
                        for number in layout.layers}
        read_ahead = layout.slots.count if layout.whole else 0
        self._pool = Prefetcher(self._read, [self._slot() for _ in range(count)], layout.readers, read_ahead, "experts",
                                memory=lambda wanted: wanted.slot) if count else None

    def _slot(self):
        return page_buffer(self.layout.slots.nbytes)[:self.layout.slots.nbytes]

    def layer(self, number: int) -> LayerExperts:
        "The experts of one layer."
        return self._layers[number]

    @property
    def wait_seconds(self) -> float:
        "Seconds the arithmetic stood still for an expert."
        return self._pool.wait_seconds if self._pool else 0.0

    def close(self) -> None:
        "End the readers and give the memory back; whoever waits for an expert gets a RuntimeError."
        if self._pool:
            self._pool.close()
        self._layers, self._present, self._missing = {}, [], []

    def request(self, layer: LayerExperts, ids: list[int]) -> None:
        "Begin a request of experts `ids` of a layer, once the reads of the request before have ended; count its hits."
        if len(set(ids)) < len(ids) or ids and self._pool is None:
            raise ValueError(f"experts {ids} of layer {layer.number} are requested into {self.layout.slots.count} slots: an expert twice, or no slot")
        self._answered, self._present, self._missing = True, [], []
        if self._pool is not None:
            self._pool.restart([])  # from here on no reader is at work
            chosen = layer.choose(ids, self.layout.whole)
            self._present = [(wanted, wanted.expert) for wanted in chosen if wanted.expert is not None]
            self._missing = [wanted for wanted in chosen if wanted.expert is None]
            self._pool.restart(self._missing)  # reading begins
        self.requests += len(ids)
        self.hits += len(self._present)
        if self.trace is not None:
            self.trace += [(layer.number, e) for e in ids]
        self._answered = False

    def map(self, work: Callable, limit: int) -> None:
        """Have the readers call work(expert id, expert) on each requested expert, in any order, at most `limit` at a time.

        An expert is whole, or is read while it is multiplied. Returns when all calls have ended; raises what one of them, or a read,
        raised. A request is answered once, well or not: RuntimeError without one.
        """
        if self._answered:
            raise RuntimeError("no request is open: map() answers a request once")
        self._answered = True

        def use(wanted, expert):
            try:
                work(wanted.e, expert)
            except BaseException:
                wanted.expert = None
                raise

        def stream(rest, buffer, cursor):
            return sum(self._stream(wanted, buffer, use) for wanted in items(rest, cursor))

        if self._pool is not None:
            self._pool.map_blocks(self._missing, use, stream, limit, self._present)

    def _read(self, wanted, buffer):
        "Read an expert whole into `buffer`: its own slot, or one that the pool lends."
        expert = read_expert(self.files, self.extents(wanted.layer, wanted.e), buffer)
        if wanted.slot is not None:
            wanted.expert = expert
        return expert

    def _stream(self, wanted, buffer, use):
        "Use an expert that has not been read ahead; the processor seconds of its products."
        if wanted.slot is not None:
            expert, began = self._read(wanted, wanted.slot), time.thread_time()
            use(wanted, expert)
            return time.thread_time() - began
        expert = streaming_expert(self.files, self.extents(wanted.layer, wanted.e), buffer)
        use(wanted, expert)
        return sum(matrix.seconds for matrix in expert)


__all__ = [
    "adjacent_runs", "read_expert", "StreamingMatrix", "streaming_expert", "Wanted", "LayerExperts", "Experts",
]
