# %% [markdown]
# # 5.16 Experts: fetched when the router has spoken
#
# 1.446 TB of K3 are routed experts, and a token uses 1,472 of the 82,432: sixteen a layer, named by the router a moment
# before they are needed. This chapter multiplies them while they arrive, keeps those that a replay of recorded requests
# says, and shows what that saves. At the end you can say why an expert is never read before it is multiplied, and which
# experts are worth keeping.
#
# [5.15 Which experts to keep: policies by replay](15_cache_policy.ipynb) ·
# [contents](../README.md) ·
# [5.17 What a process has, and what it may still have](17_memory.ipynb)
#
# | word | meaning | in K3 |
# |---|---|---|
# | expert | six tensors, packed weights and scales of $w_1, w_2, w_3$ | 17,547,264 bytes |
# | working set | what one token requests | 16 × 92 experts, 25.8 GB |
# | slot | memory that an expert is kept in, or passes through | 17.6 MB, or 1.4 |
# | piece | rows that are read and multiplied at a time | 576 or 672 rows, 1 MB |
# | hit | an expert that was resident *before* it was requested | |
# | share | the experts that one layer may keep | slots / 92 |

# %%
import hashlib
import random
import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"

# %% tags=["parameters"]
seed = 0
steps = 16  # of the trace that is replayed in 5.15.2

# %% [markdown]
# ## 5.16.1 One expert, as few reads as its layout allows
#
# In the released files the six tensors of an expert lie side by side, so one read brings them. Nothing promises that
# for other files: extents are sorted and grouped into runs of adjacent bytes, one read a run. By hand: the second
# tensor lies elsewhere.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %%
import numpy as np

from k3lib.checkpoint import Checkpoint, CheckpointError, Extent
from k3lib.trunk import Files


def at(offset, file="shard"):
    return Extent(file, offset, 10, "U8", (10,))


print("side by side:     ", adjacent_runs([at(0), at(10), at(20)]))
print("one elsewhere:    ", adjacent_runs([at(0), at(90), at(10)]))
print("another file's 10:", adjacent_runs([at(0), at(10, "other")]))
assert adjacent_runs([at(0), at(90), at(10)]) == [[0, 2], [1]]


# %% [markdown]
# ## 5.16.2 Multiplied as it arrives
#
# For one token every weight of an expert is used once, and then it is in the way. A core has a cache of its own, of one
# or two megabytes. An expert that is read whole first goes through it and out again, and the product fetches back all
# 17.5 MB. A piece of a matrix that is smaller than the cache, multiplied by the thread that has just read it, is still
# there.
#
# By hand, what an expert moves between a core and whatever lies outside its own cache: read, pushed out, fetched again
# make three times 17.5 MB; piece by piece it is once, into a megabyte that is used again and again. 5.16.3 measures
# what that is worth.
#
# So a loop of compiled code reads a piece, multiplies it, reads the next, without Python in between and without the
# lock that Python threads share. The scales are a seventeenth of the expert; those of a matrix are read before its
# rows.
#
# It also follows that an expert may be larger than its slot. Only what is kept must be whole. Through a slot with room
# for one matrix's scales and a piece of rows an expert *passes*. Where the slot has room for all six tensors each piece
# is put in its own place, and when the third product is done the slot holds the expert.

# %% tags=["export"]
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


# %%
def k3_expert():
    "The six extents of an expert of the released shape."
    shapes = dict(w1=(3072, 1792), w1_scale=(3072, 112), w2=(3584, 1536), w2_scale=(3584, 96), w3=(3072, 1792), w3_scale=(3072, 112))
    return [Extent("shard", 8, n * m, "U8", (n, m)) for n, m in shapes.values()]


print(f"an expert of K3: {sum(e.nbytes for e in k3_expert()):,} bytes; kept in {expert_slot_bytes(k3_expert()) / 1e6:.1f} MB, "
      f"passing through {streaming_slot_bytes(k3_expert()) / 1e6:.1f} MB")
for name in ("w1", "w2"):
    n, row = getattr(Expert(*k3_expert()), name).shape
    piece, pieces = read_units(n, row)
    print(f"{name}: {n} rows of {row} bytes in {pieces} pieces of {piece} rows, {piece * row:,} bytes; the last has {n - (pieces - 1) * piece}")

# %% [markdown]
# A piece begins where the one before ended, in the middle of a page as a rule, and reads move whole pages. In a slot
# that keeps, the page that two pieces share is read twice into the same place. An expert of the embedded model in
# pieces of at most 2 kB: the product of the whole, kept or not; and the same from Python, which reads where compiled
# code cannot.

# %%
from k3lib import trunk
from k3lib.linear import NotFinite
from k3lib.moe import expert_mlp


def six(layer, e):
    return list(checkpoint.expert(layer, e).values())


def product(expert):
    "The bytes of the expert's answer to one vector."
    return expert_mlp(expert, vector, 4.0, 25.0, np.empty_like(vector)).tobytes()


def whole(layer, e):
    return read_expert(Files(), six(layer, e), page_buffer(expert_slot_bytes(six(layer, e))))


checkpoint = Checkpoint(FOLDER)
vector = np.random.default_rng(seed).standard_normal((1, 2 * six(1, 0)[0].shape[1])).astype(np.float32)
MEGABYTE, trunk.PIECE = trunk.PIECE, 2048
READ_UNIT = trunk.PIECE
SMALL, LARGE = streaming_slot_bytes(six(1, 0)), expert_slot_bytes(six(1, 0))
print([(e.offset % PAGE, *e.shape) for e in six(1, 0)], "- w1 in", read_units(*six(1, 0)[0].shape)[1], "pieces")
for COMPILED_READS in (COMPILED_READS, False):
    for nbytes in (SMALL, LARGE):
        arriving = StreamingExpert(Files(), six(1, 0), page_buffer(nbytes)[:nbytes])
        assert product(arriving) == product(whole(1, 0))
        kept = arriving.expert()
        assert (kept is not None) == (nbytes == LARGE) and (kept is None or all(map(np.array_equal, kept, whole(1, 0))))
        print(f"slot of {nbytes:,} bytes, {'kept' if kept else 'passed'}: the product of the whole, bit for bit: True")
COMPILED_READS = trunk.COMPILED_READS

# %% [markdown]
# ## 5.16.3 What it is worth
#
# Sixteen experts of K3's shape in a file of holes: the system makes up the zeros, so that no disk is slower than what
# we want to see. One thread, four ways: each read whole into a slot of its own, as if all of a layer were fetched
# first; each multiplied as it arrives in a slot of its own; whole through the same slot; in pieces through the same
# slot.

# %% tags=["nbval-ignore-output"]
folder = Path(tempfile.mkdtemp())
(folder / "holes").touch()
sixteen = [[x._replace(file=str(folder / "holes"), offset=77 + e * sum(x.nbytes for x in k3_expert()) + sum(x.nbytes for x in k3_expert()[:i]))
            for i, x in enumerate(k3_expert())] for e in range(16)]
with open(folder / "holes", "r+b") as file:
    file.truncate(sixteen[-1][-1].offset + sixteen[-1][-1].nbytes)
z = np.random.default_rng(seed).standard_normal((1, 3584)).astype(np.float32)


def ms_an_expert(way, slots, piece=MEGABYTE):
    "The best of three rounds over the sixteen."
    global PIECE
    PIECE = trunk.PIECE = piece
    files, best = Files(), np.inf
    nbytes = expert_slot_bytes(sixteen[0]) if way is read_expert or slots > 1 else streaming_slot_bytes(sixteen[0])
    memory = [page_buffer(nbytes) for _ in range(slots)]
    for _ in range(3):
        began = time.perf_counter()
        for i, extents in enumerate(sixteen):
            expert_mlp(way(files, extents, memory[i % slots]), z, 4.0, 25.0, np.empty_like(z))
        best = min(best, (time.perf_counter() - began) / 16 * 1e3)
    files.close()
    return best


times = {"whole, 16 slots": ms_an_expert(read_expert, 16), "in pieces, 16 slots that keep": ms_an_expert(StreamingExpert, 16),
         "whole, one slot": ms_an_expert(read_expert, 1), "in pieces, one slot": ms_an_expert(StreamingExpert, 1)}
sizes = 2 ** np.arange(15, 23)
by_size = [ms_an_expert(StreamingExpert, 1, int(size)) for size in sizes]
for name, ms in times.items():
    print(f"{name:30} {ms:5.2f} ms an expert")

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots()
ax.plot(sizes / 2**20, by_size, "o-", label="in pieces, one slot")
ax.axhline(times["whole, one slot"], color="C1", ls="--", label="whole, one slot of 17.6 MB")
ax.axhline(times["whole, 16 slots"], color="C3", ls=":", label="whole, sixteen slots, 281 MB")
ax.set_xscale("log", base=2)
ax.set_xticks(sizes / 2**20, [f"{size >> 10} kB" if size < 1 << 20 else f"{size >> 20} MiB" for size in sizes.tolist()])
ax.set(xlabel="piece", ylabel="ms an expert, read and multiplied", title="In pieces an expert passes through the cache, and is done sooner",
       ylim=(0, 1.1 * max(*times.values(), *by_size)))
ax.legend(loc="lower right")
plt.show()


# %% [markdown]
# ## 5.16.4 Requested together, arriving in any order
#
# `request` starts as soon as the router has spoken; the down-projection and the shared experts compute meanwhile. Where
# slots keep, experts are fetched ahead, whole. Where they do not, nothing is read before its turn: a piece that waits
# for its product is a piece that leaves the cache.
#
# Then `each` has the readers do the products. A reader takes what is there first; if nothing is, it reads as it
# multiplies. The order is the disk's, and it may not matter: chapter 4.2 keeps each answer by (token, rank) and sums in
# rank order.
#
# What a layer keeps is decided at the request, before a byte is read, so it does not depend on the disk: the replay of
# a run's trace has the run's hits. One slot a reader keeps nothing. Through those goes what was not chosen; the others
# have an expert until it is no longer chosen. A slot is refilled only when its expert has been used. One whose read
# failed is an exception in the arithmetic, never a smaller sum, and what was multiplied in part is not kept.

# %% tags=["export"]
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


# %% [markdown]
# `Experts` owns the pool. A request becomes the pool's whole order, and `map` its one batch.

# %% tags=["export"]
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


# %% tags=["export"]
class Experts(Experts):
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


# %% [markdown]
# What was read ahead of the call is `present` in the pool already. What was not is either to be cached, and then read
# whole into its slot, or it streams through the reader's buffer.

# %% tags=["export"]
class Experts(Experts):
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


# %% [markdown]
# ## 5.16.5 The gate
#
# Experts of the embedded model with three readers: in two slots; in 39, three of them for each of the 12 layers to
# keep; in 195, enough for all; and in three through which they pass. Every one comes once, with the product of the
# bytes that the checkpoint holds, on one thread or two.

# %%
WANTED = [0, 3, 5, 9, 14]
READ_UNIT = trunk.PIECE = 2048


def fetched(slots, nbytes, threads, kind=Experts, layers=(1, 2, 1, 12)):
    "[(layer, expert, its product)] in the order in which they came, and the Experts they came from."
    files, seen = Files(), []
    experts = kind(six, files, slots, nbytes, 3, range(1, 13))
    for layer in layers:
        experts.request(layer, WANTED)
        experts.each(lambda e, expert: seen.append((layer, e, product(expert))), threads)
    experts.close()
    files.close()
    return seen, experts


expected = sorted((L, e, product(whole(L, e))) for L in (1, 2, 1, 12) for e in WANTED)
raw = checkpoint.raw("language_model.model.layers.12.block_sparse_moe.experts.14.w1.weight_packed")
assert np.array_equal(whole(12, 14).w1, raw)
for slots, nbytes in ((2, LARGE), (39, LARGE), (195, LARGE), (3, SMALL)):
    for threads in (1, 2):
        seen, experts = fetched(slots, nbytes, threads)
        assert sorted(seen) == expected
        assert experts.files.bytes_read["experts"] == (20 - experts.hits) * sum(x.nbytes for x in six(1, 0))
        print(f"{slots:3} slots of {nbytes:,} bytes, {threads} at a time: {experts.requests} requested, {experts.hits} hits, right bytes: True")


# %% [markdown]
# Layer 1 was asked for twice. Three of its five experts were there the second time, or all five: true hits. Two slots
# are fewer than readers, so nothing stays in them, and what passes is never kept.
#
# Four mistakes that would still produce an answer. The first refills a slot whose expert is in use. The second drops an
# expert that could not be read: chapter 4.2 would notice the missing one, and so must this gate. The third calls its
# own fetches hits. The fourth keeps whatever is in the slot when a call ends, though the call has taken one matrix of
# three: the next request calls that a hit.

# %%
class Hasty(Experts):
    "Where no slot is free it takes the oldest, in use or not."

    def _slot(self):
        slot = super()._slot()
        return self._resident.pop(next(iter(self._resident)))[0] if slot is None and self._resident else slot


class Forgiving(Experts):
    "An expert that cannot be read is left out."

    def each(self, work, threads):
        super().each(lambda e, expert: e == 9 or work(e, expert), threads)


class Boastful(Experts):
    "Counts what arrived before it was asked for, as any fetch that was early does."

    def _settle(self, key, what, call, result):
        super()._settle(key, what, call, result)
        self.hits += isinstance(what, int)


class Hopeful(StreamingExpert):
    "Is whole as soon as the call has ended."
    _missing = property(lambda self: set(), lambda self, names: None)


def answers_of(experts, layer, ids, pause=0.05):
    came = []
    experts.request(layer, ids)
    time.sleep(pause)  # everything that can be fetched ahead has been
    experts.each(lambda e, expert: came.append((e, product(expert))), 1)
    return sorted(came)


right = [(e, product(whole(1, e))) for e in range(16)]
for kind, same in ((Experts, True), (Hasty, False)):
    experts = kind(six, Files(), 2, LARGE, 3, range(1, 13))
    try:
        agree = answers_of(experts, 1, range(16)) == right
    except NotFinite:  # scales of another expert's bytes
        agree = False
    assert agree == same
    experts.close()
assert sorted(fetched(2, LARGE, 1, Forgiving)[0]) != expected
assert fetched(2, LARGE, 1, Boastful)[1].hits != 0
for kind, whole_kept in ((StreamingExpert, False), (Hopeful, True)):
    slot = page_buffer(LARGE)
    arriving = kind(Files(), six(1, 0), slot)
    arriving.multiply("w1", np.zeros((1, vector.shape[1] // GROUP, 2, 16), np.float32), np.empty((1, arriving.width), np.float32))
    assert (arriving.expert() is not None) == whole_kept
assert product(arriving.expert()) != product(whole(1, 0))
print("hasty, forgiving, boastful, hopeful: each fails the gate: True")


# %% [markdown]
# ## 5.16.6 The disk's order and the router's
#
# Reads that begin together end in any order. Sixteen answers, added in the order in which a slow disk delivered their
# experts: float32 addition is not associative, so every run has its own bits. Kept by rank and added at the end, there
# is one result.

# %%
class Slow(Files):
    "Files whose reads end at random moments; every one is made from Python, where a moment can be added."

    def __init__(self, seed, most=1e-3):
        super().__init__()
        self.random, self.most = random.Random(seed), most

    def stream(self, *args):
        return 0

    def note(self, what, began, nbytes, seconds=None):
        if what == "experts":
            time.sleep(self.random.random() * self.most)
        super().note(what, began, nbytes, seconds)


answers = np.random.default_rng(seed).standard_normal((16, 512)).astype(np.float32)
orders, as_they_come, by_rank = [], set(), set()
for run in range(12):
    experts, order = Experts(six, Slow(run), 4, SMALL, 4, range(1, 13)), []
    experts.request(1, range(16))
    experts.each(lambda e, expert: order.append((product(expert), e)[1]), 4)
    experts.close()
    orders.append(order)
    kept = np.empty_like(answers)
    for e in order:
        kept[e] = answers[e]
    for found, rows in ((as_they_come, answers[order]), (by_rank, kept)):
        total = np.zeros(512, np.float32)
        for row in rows:
            total += row
        found.add(hashlib.sha256(total.tobytes()).hexdigest())
assert len(by_rank) == 1 < len(as_they_come)
print("12 runs: results of adding in rank order:", len(by_rank), "- in order of arrival: more than one:", len(as_they_come) > 1)

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots()
for order in orders:
    ax.plot(range(16), order, "-", color="C0", alpha=0.25)
ax.plot(range(16), orders[0], "o-", color="C1", label="one run")
ax.set(xlabel="arrival", ylabel="rank of the expert that arrives", title=f"Twelve runs of one request: {len(set(map(tuple, orders)))} orders of arrival")
ax.legend()
plt.show()


# %% [markdown]
# ## 5.16.7 Many in flight
#
# Eight experts of K3's shape and a device that takes up to two milliseconds to answer, once with one reader and once
# with four, while the caller does something else for the first twelve, as the shared experts would. Four slots have
# room for a whole expert each.

# %% tags=["nbval-ignore-output"]
def events(readers, slots, busy=12e-3):
    files = Slow(seed, 2e-3)
    files.log = []
    experts = Experts(lambda layer, e: sixteen[e], files, slots, expert_slot_bytes(sixteen[0]), readers, [1])
    for memory in experts._memory:
        memory[:] = 0  # the system hands out memory at its first use; not in this picture
    began = time.perf_counter()
    experts.request(1, range(8))
    time.sleep(busy)
    experts.each(lambda e, expert: expert_mlp(expert, z, 4.0, 25.0, np.empty_like(z)), 64)
    experts.close()
    return [(e.thread, e.what, e.began - began, e.ended - began) for e in files.log]


READ_UNIT = trunk.PIECE = MEGABYTE
fig, axes = plt.subplots(2, 1, figsize=(6, 3.6), sharex=True, height_ratios=[2, 5])
for ax, readers in zip(axes, (1, 4)):
    log = events(readers, 4)
    ax.broken_barh([(0, 12)], (-1.4, 0.8), color="C5")
    threads = sorted({thread for thread, *_ in log})
    for thread, what, begin, end in log:
        color = "C1" if what == "arithmetic" else "C0"
        ax.broken_barh([(begin * 1e3, (end - begin) * 1e3)], (threads.index(thread) - 0.4, 0.8), color=color)
    ax.set_yticks(range(-1, readers), ["caller"] + [f"reader {i}" for i in range(readers)])
    ax.set_title(f"{readers} reader{'s' * (readers > 1)}: {max(end for *_, end in log) * 1e3:.0f} ms")
axes[1].set_xlabel("time, ms (grey: other arithmetic, blue: reading, orange: multiplying)")
plt.show()
shutil.rmtree(folder)


# %% [markdown]
# Reading begins with the request, not when the caller first looks: by then the slots hold whole experts, which are
# multiplied first. The others come in pieces as slots are given back, blue and orange in turn on one row. While one
# reader waits for its piece another has the core.
#
# ## 5.16.8 What a gigabyte saves
#
# Bytes read for a token, when the first gigabytes go to the trunk and when they go to experts. A gigabyte of pinned
# trunk is a gigabyte less at every token. A gigabyte of experts saves its hits: at best two thirds of one, the first
# two and a half of them (0.068 × 25.8 GB), and less from there on. Here with the rates of the released model's trace.

# %%
def read_a_token(trunk_gb, experts_gb):
    hit = np.interp(experts_gb, [0, *(size * WORKING_SET for size in CAPACITIES)], [0, *RELEASED["shares"]])
    return TRUNK - min(trunk_gb, TRUNK) + WORKING_SET * (1 - hit)


budgets = np.arange(0, 171, 5)
trunk_first = [read_a_token(b, max(b - TRUNK, 0)) for b in budgets]
experts_first = [read_a_token(max(b - 1.5 * WORKING_SET, 0), min(b, 1.5 * WORKING_SET)) for b in budgets]
assert all(t <= e + 1e-9 for t, e in zip(trunk_first, experts_first))
fig, ax = plt.subplots()
ax.plot(budgets, trunk_first, "-", label="trunk first")
ax.plot(budgets, experts_first, "--", label="experts first, one and a half working sets")
ax.set(xlabel="memory for weights, GB", ylabel="GB read a token", title="A gigabyte of trunk is worth more than a gigabyte of experts", ylim=0)
ax.legend()
plt.show()
print("at 40 GB:", f"{trunk_first[8]:.0f} GB a token trunk first,", f"{experts_first[8]:.0f} GB experts first")

# %% [markdown]
# So memory goes to the trunk first. Until all of it is pinned, experts need no more than slots to pass through: one for
# each reader, and as many readers as keep the device busy. What is left beyond that is cut into shares.
#
# ## 5.16.9 What it costs in K3

# %%
print(f"a token reads {WORKING_SET:.2f} GB of experts in {LAYERS * K:,} requests: {WORKING_SET / (WORKING_SET + TRUNK):.0%} of its bytes")
print(f"4 slots to pass through: {4 * streaming_slot_bytes(k3_expert()) / 1e6:.0f} MB; 16 slots that keep: {16 * expert_slot_bytes(k3_expert()) / 1e6:.0f} MB; "
      f"a working set: {LAYERS * K * expert_slot_bytes(k3_expert()) / 1e9:.1f} GB")

# %% [markdown]
# ## Summary
#
# - Experts are requested the moment they are known, read by several threads, multiplied in any order, summed in rank
#   order.
# - The thread that reads a piece multiplies it: a megabyte is still in its core's cache. What is not kept need not be
#   whole.
# - Only what has been multiplied to the last row is kept, and a slot is refilled only when its expert has been used.
# - A hit is an expert that was there before the request, so the report does not count a token's own fetches.
# - By the clock of requests the layer that comes next looks oldest: an LRU saves nothing below one working set, 25.8
#   GB. By each layer's own visits half a set saves 27%, more than any pin that does not know the future.
# - A gigabyte of trunk still saves more than a gigabyte of experts.
#
# ## Exercises
#
# 1. Let 60% stay at every rank. Where does the LRU leave the axis, and why is that place the same? Where would the
#    other curves be if every expert were equally likely to stay?
# 2. The router's ranks say more than the past does: 74% of the experts it likes best stay, 23% of the last. `request`
#    has them in ascending order. Let a share prefer the better ranks among equals, and replay it.
# 3. With two slots that keep and sixteen requests, how many reads can be in flight while one expert computes? And with
#    two slots through which experts pass? Where in `Experts` is that decided?
# 4. `Arriving` reads the scales of a matrix before its rows. What would change if they were read with each piece, in
#    bytes and in reads?
# 5. Draw the curve of 5.16.3 for a chunk of 16 tokens. Why does it become flat?
#
# Next: [5.5 The walk](05_model.ipynb) puts trunk and experts under 93 layers.
