# %% [markdown]
# # 5.16 Experts: fetched when the router has spoken
#
# The routed experts of K3 are 1.446 TB. A token uses 1,472 of the 82,432 experts: sixteen in each of 92 layers. Which
# sixteen, the router says only a moment before they are needed, so they cannot be read long in advance. This chapter
# reads them with several threads as soon as the router has chosen, multiplies them in whatever order they arrive, and
# keeps those that the policy of 5.15 chooses. At the end you can say why an expert that is not kept is multiplied while
# it is read, why the order of arrival does not change the result, and what happens to an expert whose read fails.
#
# > **Without it:** all experts in memory take 1,446 GB.<!--claim all-->
# >
# > **With it:** four readers need 4.6 MB<!--claim streaming--> of memory. The experts of a token then take
# > 3.7 s<!--claim seconds--> from a disk of 7 GB/s, and a cache saves a part of this time.
#
# Needs chapters [4.2] (experts), [5.11] and [5.12] (readers) and [5.15] (the policy). Runs in half a minute. Makes
# `k3lib.experts`.
#
# [5.15 Which experts to keep: policies by replay](15_cache_policy.ipynb) ·
# [contents](../README.md) ·
# [5.17 What a process has, and what it may still have](17_memory.ipynb)
#
# | word | meaning | in K3 |
# |---|---|---|
# | expert | six tensors, packed weights and scales of $w_1, w_2, w_3$ | 17,547,264 bytes |
# | working set | what one token requests | 16 × 92 experts, 25.8 GB |
# | slot | memory in which an expert is kept, or through which it streams | 17.6 MB, or 1.1 MB |
# | unit | rows that are read and multiplied at a time (5.12) | 432 or 512 rows, 768 KiB |
# | hit | an expert that was cached *before* it was requested | |
#
# [4.2]: ../04_moe_router/02_moe.ipynb
# [5.11]: 11_prefetch.ipynb
# [5.12]: 12_read_multiply.ipynb
# [5.15]: 15_cache_policy.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "experts")

# %%
import hashlib
import random
import shutil
import tempfile
import threading
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"

# %% tags=["parameters"]
seed = 0

# %% tags=["export"]
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


# %% [markdown]
# ## 5.16.1 One expert, as few reads as its layout allows
#
# An expert has six tensors: three packed matrices and their scales. In the released files the six lie side by side, so
# one read can bring all of them. In other files they may lie apart. So the code sorts the extents and groups them into
# runs of adjacent bytes. It makes one read for each run.

# %% tags=["export"]
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


# %% [markdown]
# By hand, with three tensors of ten bytes: all side by side, then with the second one at another place, then with the
# second one in another file.

# %%
def at(offset, file="shard"):
    return Extent(file, offset, 10, "U8", (10,))


print("side by side:     ", adjacent_runs([at(0), at(10), at(20)]))
print("one elsewhere:    ", adjacent_runs([at(0), at(90), at(10)]))
print("another file's 10:", adjacent_runs([at(0), at(10, "other"), at(20)]))
assert adjacent_runs([at(0), at(10), at(20)]) == [[0, 1, 2]]
assert adjacent_runs([at(0), at(90), at(10)]) == [[0, 2], [1]]


# %% [markdown]
# ## 5.16.2 Multiplied while it is read
#
# A token uses every weight of an expert once. If the processor copies the bytes, from the page cache or as zeros of a
# hole, a whole expert crosses memory three times: the copy reads 17.5 MB, the core's cache of one or two megabytes must
# write them out to memory, and the product reads them back. In units that fit the cache (5.12), the bytes cross once. A
# device that is read past the page cache writes to memory itself; then units save room, and no crossing.
#
# So an expert that is not kept **streams**: each of its three matrices is read while it is multiplied. This needs
# memory for one unit of rows, and for the scales of one matrix, which are read before the rows. Together they take 1.1
# MB; the whole expert takes 17.6 MB. A streaming matrix has the methods of every other matrix, so `expert_mlp` of
# chapter [4.2] works on both.
#
# [4.2]: ../04_moe_router/02_moe.ipynb

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# The same for an expert of K3's shape, in numbers:

# %%
from k3lib.disk import PAGE
from k3lib.read_multiply import unit_rows


def k3_expert(file="shard", offset=8):
    "The six extents of an expert of the released shape, side by side from byte `offset` of a file."
    extents = []
    for n, packed in ((3072, 1792), (3584, 1536), (3072, 1792)):
        for m in (packed, packed // 16):
            extents.append(Extent(file, offset, n * m, "U8", (n, m)))
            offset += n * m
    return extents


EXPERT_BYTES = sum(e.nbytes for e in k3_expert())
print(f"an expert of K3: {EXPERT_BYTES:,} bytes; kept in {expert_slot_bytes(k3_expert()) / 1e6:.1f} MB, "
      f"streaming through {streaming_slot_bytes(k3_expert()) / 1e6:.1f} MB")
for name, extent in zip(("w1", "w2"), k3_expert()[::2]):
    n, row = extent.shape
    unit = unit_rows(row)
    print(f"{name}: {n} rows of {row} bytes in {-(-n // unit)} units of {unit} rows, {unit * row:,} bytes; "
          f"the last has {n % unit or unit}")

# %% [markdown]
# The check streams an expert of the embedded model in units of at most 2 kB. The product must have the bits of the
# whole expert's product. The expert is streamed twice: once by compiled code, and once by Python, which reads where
# compiled code cannot.

# %%
from k3lib import layout
from k3lib import read_multiply as units
from k3lib.checkpoint import Checkpoint
from k3lib.fileio import CheckpointError
from k3lib.layout import Buffers
from k3lib.matmul import NotFinite
from k3lib.moe import Situ, expert_mlp


def set_unit(nbytes):
    "Units of at most `nbytes` from now on."
    layout.READ_UNIT = units.READ_UNIT = nbytes


def six(layer, e):
    return list(checkpoint.expert(layer, e).values())


def product(expert):
    "The bytes of the expert's answer to one vector."
    return expert_mlp(expert, vector, Situ(4.0, 25.0), np.empty_like(vector)).tobytes()


def whole(layer, e):
    return read_expert(Files(), six(layer, e), page_buffer(expert_slot_bytes(six(layer, e))))


checkpoint, USUAL_UNIT, COMPILED = Checkpoint(FOLDER), units.READ_UNIT, units.COMPILED_READS
vector = np.random.default_rng(seed).standard_normal((1, 2 * six(1, 0)[0].shape[1])).astype(np.float32)
set_unit(2048)
SMALL, LARGE = streaming_slot_bytes(six(1, 0)), expert_slot_bytes(six(1, 0))
n, row = six(1, 0)[0].shape
print([(e.offset % PAGE, *e.shape) for e in six(1, 0)], f"- w1 in {-(-n // unit_rows(row))} units")
for units.COMPILED_READS in (COMPILED, False):
    assert product(streaming_expert(Files(), six(1, 0), page_buffer(SMALL))) == product(whole(1, 0))
    print(f"read by {'compiled code' if units.COMPILED_READS else 'Python'}: the product of the whole, bit for bit")
units.COMPILED_READS = COMPILED

# %% [markdown]
# ## 5.16.3 What streaming is worth
#
# The experiment takes sixteen experts of K3's shape. Their file is one large hole, for which the system returns zeros
# without a disk. So the experiment measures how the bytes move in memory, not how fast a disk is. The cell measures the
# processor time of one thread in three cases: each expert is read as a whole into a slot of its own, as if all experts
# of a layer were read first; each is read as a whole into the same slot; each is streamed through the same small slot.

# %% tags=["nbval-ignore-output"]
folder = Path(tempfile.mkdtemp())
sixteen = [k3_expert(str(folder / "holes"), 77 + e * EXPERT_BYTES) for e in range(16)]
with open(folder / "holes", "wb") as file:
    file.truncate(77 + 16 * EXPERT_BYTES)
z = np.random.default_rng(seed).standard_normal((1, 3584)).astype(np.float32)


def ms_an_expert(way, slots, unit=USUAL_UNIT):
    "Processor time, the best of three rounds over the sixteen experts."
    set_unit(unit)
    files, best = Files(), np.inf
    nbytes = (expert_slot_bytes if way is read_expert else streaming_slot_bytes)(sixteen[0])
    memory = [page_buffer(nbytes) for _ in range(slots)]
    for _ in range(3):
        began = time.thread_time()
        for i, extents in enumerate(sixteen):
            expert_mlp(way(files, extents, memory[i % slots]), z, Situ(4.0, 25.0), np.empty_like(z))
        best = min(best, (time.thread_time() - began) / 16 * 1e3)
    files.close()
    return best


separate, same = ms_an_expert(read_expert, 16), ms_an_expert(read_expert, 1)
sizes = 2 ** np.arange(15, 23)
by_size = [ms_an_expert(streaming_expert, 1, int(size)) for size in sizes]
streamed = ms_an_expert(streaming_expert, 1)
for name, ms in (("whole, 16 slots", separate), ("whole, one slot", same), ("streamed", streamed)):
    print(f"{name:16} {ms:5.2f} ms an expert")

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots()
ax.plot(sizes / 2**20, by_size, "o-", label="streamed through one unit and the scales of one matrix")
ax.axhline(same, color="C1", ls="--", label="whole, one slot of 17.6 MB")
ax.axhline(separate, color="C3", ls=":", label="whole, sixteen slots, 281 MB")
ax.set_xscale("log", base=2)
ax.set_xticks(sizes / 2**20, [f"{n >> 10} KiB" if n < 1 << 20 else f"{n >> 20} MiB" for n in sizes.tolist()])
ax.set(xlabel="bytes of a unit", ylabel="processor ms an expert",
       ylim=(0, 1.1 * max(same, separate, *by_size)),
       title=f"From holes, units of 768 KiB: {streamed / same:.0%} of the time of whole reads into one slot")
ax.legend(loc="lower right")
plt.show()


# %% [markdown]
# The arithmetic is the same in all cases. Only the ways of the bytes differ. Small units need many calls of the system.
# Large units leave the core's cache before they are multiplied. One slot for all experts can be faster than sixteen
# slots, because memory that was written a moment ago may still be in a cache. How large these effects are depends on
# the machine, and on other programs that run at the same time.
#
# With a real disk the comparison is another one. There the device writes the bytes to memory, not the processor, and
# streaming makes 26 calls of the system where a whole read makes one. From a file of real bytes on a disk of 1.2 GB/s
# the three cases took 3.3, 3.0 and 4.0 ms of processor time, while the disk needed 15 ms. So streaming saved no time
# there. What it always saves is memory: a reader needs 1.1 MB instead of 17.6.
#
# ## 5.16.4 What a layer keeps
#
# The policy chooses at the request which experts the layer keeps, before any byte is read. So the choice does not
# depend on the speed of the disk, and a replay of the run's trace (5.15) has the same hits as the run.
#
# An expert that the layer will keep gets a slot of its own. The slot belonged to an expert that the layer no longer
# keeps. An expert counts as kept only when it has been read to the last byte. If its read fails or is interrupted, its
# slot holds no expert, and the next request of the layer removes it from the cache. An expert on which the arithmetic
# has failed is removed, too, because damaged bytes may be the reason.

# %% tags=["export"]
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


# %% tags=["export"]
class KeptExperts(KeptExperts):
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


# %% [markdown]
# ## 5.16.5 A request and its answer
#
# A layer uses its experts in two steps. It calls `request` as soon as the router has chosen. Then it computes the
# down-projection and the shared experts, and calls `map` for the products of the routed experts.
#
# **Between the two calls** experts are read ahead if a slot holds a whole expert: into slots of their own, or into
# buffers that the pool lends. If slots are smaller, nothing is read ahead, because a unit that waits for its product
# would leave the core's cache.
#
# **In `map`** each reader works on one expert at a time. Experts that have been read come first. Their order depends on
# the disk, but the result does not: chapter [4.2] stores each answer by token and rank, and adds the answers in the
# order of the ranks.
#
# `Experts` owns a pool of 5.11. The experts of a request are the pool's whole order, and `map` opens one batch of all
# of them. The pool has no reference to the `Experts` that owns it, only a function that reads. So `Experts` that
# nothing refers to any more are freed at once, and their readers end ([5.11.3]).
#
# [4.2]: ../04_moe_router/02_moe.ipynb
# [5.11.3]: 11_prefetch.ipynb#5.11.3-What-is-true-whenever-nobody-holds-the-lock

# %% tags=["export"]
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


# %% tags=["export"]
def read_requested(files: Files, extents: Callable[[int, int], list[Extent]], requested: RequestedExpert,
                   buffer: np.ndarray) -> Expert:
    "Read an expert whole into `buffer`: its own slot, or one that the pool lends. Raises CheckpointError."
    expert = read_expert(files, extents(requested.layer, requested.e), buffer)
    if requested.slot is not None:
        requested.expert = expert
    return expert


# %% tags=["export"]
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


# %% tags=["export"]
class Experts(Experts):
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


# %% [markdown]
# `map` treats three kinds of experts. An expert that is cached or has been read ahead is given to `work`. An expert
# that the layer will keep is first read as a whole into its slot. Any other expert streams through the reader's buffer.

# %% tags=["export"]
class Experts(Experts):
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


# %% [markdown]
# ## 5.16.6 The gate
#
# The gate requests experts of the embedded model, with three readers and four amounts of memory: two slots; 39 slots,
# so that each of the 12 layers keeps three experts; 195 slots, enough for all experts; and three small slots, through
# which experts stream. Every requested expert must come exactly once, with the product that the bytes of the checkpoint
# give. `limit` is the number of readers that may work at a time.

# %%
REQUESTED = [0, 3, 5, 9, 14]
LAYERS = tuple(range(1, 13))
set_unit(2048)


def answers(slots, nbytes, limit, kind=Experts, layers=(1, 2, 1, 12)):
    "[(layer, expert, its product)] in the order of the calls, and the Experts that made them."
    files, seen = Files(), []
    experts = kind(ExpertLayout(LAYERS, Buffers(slots, nbytes), 3, nbytes == LARGE), six, files)
    for layer in layers:
        experts.layer(layer).request(REQUESTED)
        experts.map(lambda e, expert: seen.append((layer, e, product(expert))), limit)
    experts.close()
    files.close()
    return seen, experts


expected = sorted((L, e, product(whole(L, e))) for L in (1, 2, 1, 12) for e in REQUESTED)
raw = checkpoint.raw("language_model.model.layers.12.block_sparse_moe.experts.14.w1.weight_packed")
assert np.array_equal(whole(12, 14).w1.packed, raw)


def check_answers(slots, nbytes, limit, kind=Experts):
    "The gate: every requested expert once, with the right product, and no more bytes read than the hits leave."
    try:
        seen, experts = answers(slots, nbytes, limit, kind)
    except NotFinite:  # the scales are another expert's bytes
        raise AssertionError("a product of the wrong bytes") from None
    assert len(seen) == len(expected), f"{len(seen)} answers, {len(expected)} experts were requested"
    assert sorted(seen) == expected, "a product of the wrong bytes"
    read, each = experts.files.bytes_read["experts"], sum(x.nbytes for x in six(1, 0))
    assert read == (20 - experts.hits) * each, f"{experts.hits} hits of 20, but {read // each} experts were read"
    print(f"{slots:3} slots of {nbytes:,} bytes, {limit} at a time: {experts.requests} requested, "
          f"{experts.hits} hits, the right bytes")


for slots, nbytes in ((2, LARGE), (39, LARGE), (195, LARGE), (3, SMALL)):
    for limit in (1, 2):
        check_answers(slots, nbytes, limit)


# %% [markdown]
# Layer 1 was requested twice. The hits are those of its five experts that were cached the second time: three of them
# with 39 slots, all five with 195. Two slots are fewer than the readers, so they keep nothing. An expert that streams
# is never kept.
#
# Three mistakes would still produce an answer, and the gate must notice them. The first uses the same memory for all
# slots, so experts overwrite each other. The second leaves out one expert, as if its read had failed without an error.
# The third counts the experts that it reads as hits.

# %%
class OneSlot(Experts):
    def _slots(self, count):
        shared = page_buffer(LARGE)
        return [shared[:LARGE] for _ in range(count)]


class LeavesOneOut(Experts):
    def map(self, work, limit):
        super().map(lambda e, expert: e == 9 or work(e, expert), limit)


class CountsItsReads(Experts):
    def map(self, work, limit):
        self.hits += len(self._missing)
        super().map(work, limit)


# %% tags=["raises-exception"]
check_answers(39, LARGE, 1, OneSlot)

# %% tags=["raises-exception"]
check_answers(2, LARGE, 1, LeavesOneOut)

# %% tags=["raises-exception"]
check_answers(195, LARGE, 1, CountsItsReads)


# %% [markdown]
# What happens when a read fails? The error reaches the layer, so the layer never computes a sum in which an expert is
# missing. And the expert is not a hit at the next request.

# %%
class FailsOnce(Files):
    "Files whose first read of an expert's bytes fails."

    failed = False

    def read(self, buffer, extent, offset, nbytes, part):
        if not self.failed:
            self.failed = True
            raise CheckpointError(f"{Path(extent.file).name}: cannot be read")
        return super().read(buffer, extent, offset, nbytes, part)


experts, before = Experts(ExpertLayout(LAYERS, Buffers(39, LARGE), 3, True), six, FailsOnce()), 0
for attempt in (1, 2, 3):
    experts.layer(1).request([3])
    try:
        experts.map(lambda e, expert: print(f"request {attempt}:", product(expert) == product(whole(1, e))), 1)
    except CheckpointError as error:
        print(f"request {attempt}:", error)
    print(f"           hits: {experts.hits - before}")
    before = experts.hits
experts.close()
assert experts.hits == 1  # at the third request


# %% [markdown]
# ## 5.16.7 The disk's order and the router's
#
# Reads that begin at the same time end in any order. If the answers of sixteen experts were added in the order of
# arrival, each run could have other bits, because the rounding of a float32 sum depends on its order. If the answers
# are kept by rank and added in the order of the ranks, there is only one result. The experiment delays each read by a
# random time.

# %%
class Slow(Files):
    "Files whose reads end at random moments; `events` receives (thread, colour, begin, end) of each."

    def __init__(self, seed, longest=1e-3):
        super().__init__()
        self.random, self.longest, self.events = random.Random(seed), longest, []

    def event(self, color, call, *args):
        began = time.perf_counter()
        result = call(*args)
        self.events.append((threading.current_thread().name, color, began, time.perf_counter()))
        return result

    def read(self, *args):
        return self.event("C0", self._late, *args)

    def _late(self, *args):
        start = super().read(*args)
        time.sleep(self.random.random() * self.longest)
        return start


parts = np.random.default_rng(seed).standard_normal((16, 512)).astype(np.float32)
orders, as_they_come, by_rank = [], set(), set()
for run in range(12):
    files, order = Slow(run), []
    experts = Experts(ExpertLayout(LAYERS, Buffers(4, LARGE), 4, True), six, files)
    experts.layer(1).request(list(range(16)))
    experts.map(lambda e, expert: order.append((product(expert), e)[1]), 4)
    experts.close()
    files.close()
    orders.append(order)
    for results, ranks in ((as_they_come, order), (by_rank, sorted(order))):
        total = np.zeros(512, np.float32)
        for rank in ranks:
            total += parts[rank]
        results.add(hashlib.sha256(total.tobytes()).hexdigest())
assert len(by_rank) == 1 < len(as_they_come)
print(f"12 runs: {len(by_rank)} result of adding in rank order; more than one in order of arrival")

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots()
for order in orders:
    ax.plot(range(16), order, "-", color="C0", alpha=0.25)
ax.plot(range(16), orders[0], "o-", color="C1", label="one run")
ax.set(xlabel="arrival", ylabel="rank of the expert that arrives",
       title=f"Twelve runs of one request: {len(set(map(tuple, orders)))} orders of arrival")
ax.legend()
plt.show()


# %% [markdown]
# ## 5.16.8 Several reads at once
#
# This experiment shows what several readers are good for. A request names eight experts of K3's shape, and each read
# takes up to 0.4 ms longer than usual. There is memory for four whole experts. For the first 6 ms the caller does other
# work, as a layer does with its shared experts. Then it calls `map`. Python reads here, not compiled code, so that the
# start and the end of each read and each product can be recorded.

# %% tags=["nbval-ignore-output"]
def events(readers, slots=4, busy=6e-3):
    files = Slow(seed, 4e-4)
    layout = ExpertLayout((1,), Buffers(slots, expert_slot_bytes(sixteen[0])), readers, True)
    experts = Experts(layout, lambda layer, e: sixteen[e], files)

    def work(e, expert):
        files.event("C1", expert_mlp, expert, z, Situ(4.0, 25.0), np.empty_like(z))

    for ids in (range(8, 16), range(8)):  # a rehearsal first: the system hands out memory at first use
        files.events.clear()
        began = time.perf_counter()
        experts.layer(1).request(list(ids))
        time.sleep(busy)
        experts.map(work, 64)
    experts.close()
    files.close()
    return [(thread, color, (begin - began) * 1e3, (end - began) * 1e3) for thread, color, begin, end in files.events]


set_unit(USUAL_UNIT)
units.COMPILED_READS = False
fig, axes = plt.subplots(2, 1, figsize=(6, 3.6), sharex=True, height_ratios=[2, 5])
for ax, readers in zip(axes, (1, 4)):
    log = events(readers)
    ax.broken_barh([(0, 6)], (-1.4, 0.8), color="C5")
    threads = sorted({thread for thread, *_ in log})
    for thread, color, begin, end in sorted(log, key=lambda event: event[1], reverse=True):
        ax.broken_barh([(begin, end - begin)], (threads.index(thread) - 0.4, 0.8), facecolor=color)
    ax.set_yticks(range(-1, readers), ["caller"] + [f"reader {i}" for i in range(readers)])
    ax.set_title(f"{readers} reader{'s' * (readers > 1)}: {max(end for *_, end in log):.0f} ms")
axes[1].set_xlabel("time, ms (grey: other arithmetic, blue: reading, orange: multiplying)")
plt.show()
units.COMPILED_READS = COMPILED
shutil.rmtree(folder)

# %% [markdown]
# Reading begins with the request. So when `map` is called, some slots hold whole experts, and these are multiplied
# first. The other experts stream: in one row of the figure, reads and products alternate. While one reader waits for
# its next unit, another reader uses the core.
#
# ## 5.16.9 What it costs in K3
#
# The last cell computes the numbers of the problem box, and what whole experts would take.

# %%
working_set, trunk = 92 * 16 * EXPERT_BYTES / 1e9, 108.8
print(f"a token reads {working_set:.2f} GB of experts in {92 * 16:,} requests: "
      f"{working_set / (working_set + trunk):.0%} of its bytes")
print(f"    at 7 GB/s {working_set / 7:.1f} s")  # claim seconds
print(f"4 slots to stream through: {4 * streaming_slot_bytes(k3_expert()) / 1e6:.1f} MB")  # claim streaming
print(f"16 slots for whole experts: {16 * expert_slot_bytes(k3_expert()) / 1e6:.0f} MB; "
      f"for a working set: {92 * 16 * expert_slot_bytes(k3_expert()) / 1e9:.1f} GB")
print(f"all {92 * 896:,} experts: {92 * 896 * EXPERT_BYTES / 1e9:,.0f} GB")  # claim all

# %% [markdown]
# ## Summary
#
# - Experts are requested as soon as the router has chosen. Several threads read and multiply them in any order. Their
#   answers are added in the order of the ranks.
# - An expert that is not kept streams: the thread that has read a unit multiplies it. This takes 1.1 MB of memory for
#   an expert of 17.5 MB.
# - The policy chooses at the request which experts a layer keeps. So the replay of a trace has the hits of the run.
# - An expert is cached when its last byte has been read. A read that fails raises an error, and the expert is no hit
#   later.
#
# ## Exercises
#
# Answer to 2: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. With two slots for whole experts and sixteen requested experts, how many reads can be under way while one expert is
#    multiplied? And with two slots through which experts stream? Which lines of the code decide it?
# 2. `StreamedPackedMatrix` reads the scales of a matrix before its rows. How many reads and how many bytes would an
#    expert of K3 take if the scales of each unit were read with the unit?
# 3. Draw the curve of [5.16.3] for a chunk of 16 tokens. Why does it become flat?
#
# Next: [5.17 What a process has](17_memory.ipynb) counts the memory that slots, buffers and everything else may take.
#
# [5.16.3]: #5.16.3-What-streaming-is-worth
