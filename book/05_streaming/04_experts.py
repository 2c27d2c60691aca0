# %% [markdown]
# # 5.4 Experts: fetched when the router has spoken
#
# 1.446 TB of K3 are routed experts, and a token uses 1,472 of the 82,432: sixteen a layer, named by the router a moment before
# they are needed. This chapter multiplies them while they arrive, keeps those that a replay of recorded requests says, and shows what that saves.
# At the end you can say why an expert is never read before it is multiplied, and which experts are worth keeping.
#
# [5.3 The trunk](03_trunk.ipynb) · [contents](../README.md) · [5.5 The walk](05_model.ipynb)
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

# %% tags=["export"]
import heapq
import itertools
import math
import threading
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np
from numba import njit

from k3lib.linear import KERNEL
from k3lib.moe import Expert
from k3lib.mxfp4 import GROUP, check_fit, mxfp4_rows
from k3lib.trunk import COMPILED_READS, CORES, PAGE, PIECE, WALL, aligned, at_once, clock, pieces_of, read_piece, widened, worked


# %% tags=["parameters"]
seed = 0
steps = 16  # of the trace that is replayed in 5.4.6

# %% [markdown]
# ## 5.4.1 One expert, as few reads as its layout allows
#
# In the released files the six tensors of an expert lie side by side, so one read brings them. Nothing promises that for other
# files: extents are sorted and grouped into runs of adjacent bytes, one read a run. By hand: the second tensor lies elsewhere.

# %% tags=["export"]
def runs(extents):
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


def slot_bytes(extents):
    "Bytes of a slot that holds an expert however its tensors lie in the file."
    return sum(widened(e.nbytes) for e in extents)


def read_expert(files, extents, buffer):
    "Read the six tensors of one expert into a page-aligned `buffer`, one read a run. Returns an Expert of views into it."
    views, begin = [None] * len(extents), 0
    for group in runs(extents):
        first = extents[group[0]]
        nbytes = sum(extents[i].nbytes for i in group)
        at = begin + files.read(buffer[begin:], first._replace(nbytes=nbytes), 0, nbytes, "experts")
        for i in group:
            views[i] = buffer[at:at + extents[i].nbytes].reshape(extents[i].shape)
            at += extents[i].nbytes
        begin += widened(nbytes)
    return Expert(*views)

# %%
import numpy as np

from k3lib.checkpoint import Checkpoint, CheckpointError, Extent
from k3lib.trunk import Files


def at(offset, file="shard"):
    return Extent(file, offset, 10, "U8", (10,))


print("side by side:     ", runs([at(0), at(10), at(20)]))
print("one elsewhere:    ", runs([at(0), at(90), at(10)]))
print("another file's 10:", runs([at(0), at(10, "other")]))
assert runs([at(0), at(90), at(10)]) == [[0, 2], [1]]

# %% [markdown]
# ## 5.4.2 Multiplied as it arrives
#
# For one token every weight of an expert is used once, and then it is in the way. A core has a cache of its own, of one or two
# megabytes. An expert that is read whole first goes through it and out again, and the product fetches back all 17.5 MB. A piece of a matrix
# that is smaller than the cache, multiplied by the thread that has just read it, is still there.
#
# By hand, what an expert moves between a core and whatever lies outside its own cache: read, pushed out, fetched again make three times
# 17.5 MB; piece by piece it is once, into a megabyte that is used again and again. 5.4.3 measures what that is worth.
#
# So a loop of compiled code reads a piece, multiplies it, reads the next, without Python in between and without the lock that Python threads
# share. The scales are a seventeenth of the expert; those of a matrix are read before its rows.
#
# It also follows that an expert may be larger than its slot. Only what is kept must be whole. Through a slot with room for one matrix's
# scales and a piece of rows an expert *passes*. Where the slot has room for all six tensors each piece is put in its own place, and when the
# third product is done the slot holds the expert.

# %% tags=["export"]
def passing_bytes(extents):
    "Bytes of a slot through which an expert passes in pieces: the scales of one matrix and some of its rows."
    e = Expert(*extents)
    return _scale_bytes(e) + max(PIECE, *(m.nbytes // m.shape[0] for m in (e.w1, e.w2, e.w3))) + 2 * PAGE


def _scale_bytes(e):
    return max(widened(m.nbytes) for m in (e.w1_scale, e.w2_scale, e.w3_scale))


@njit(**KERNEL)
def _place(at, kept, offset, start):
    "Where in a slot the page of byte `start` goes: to slot[at:], where that of `offset` is, or as far behind it as in the file if `kept`."
    return at + (start - start % PAGE) - (offset - offset % PAGE) if kept else at


@njit(**KERNEL)
def _stream_packed(descriptor, offset, rows, piece, slot, at, kept, scale_offset, groups, scale_at, halves, out, journal):
    """The rows of a packed matrix at `offset`, read `piece` at a time into slot[at:], one after the other if `kept`; before them their
    scales, [rows, groups] at `scale_offset`, into slot[scale_at:]. Returns the pieces of rows done."""
    journal[0, 1] = clock(WALL)
    begin, row = read_piece(descriptor, scale_offset, rows * groups, slot, scale_at, journal, 0), 16 * groups
    if begin < 0:
        return 0
    journal[1, 1] = journal[1, 0]  # nothing to multiply yet
    scale = slot[begin:begin + rows * groups].reshape(rows, groups)
    pieces = len(journal) - 2
    for p in range(pieces):
        first = p * piece
        n, start = min(piece, rows - first), offset + first * row
        begin = read_piece(descriptor, start, n * row, slot, _place(at, kept, offset, start), journal, p + 1)
        if begin < 0:
            return p
        mxfp4_rows(slot[begin:begin + n * row].reshape(n, row), scale[first:first + n], halves, out, first)
        worked(journal, p + 1)
    return pieces


class Arriving:
    """An expert that has yet to be read: its matrices are multiplied while their rows come. Takes the place of an Expert in expert_mlp.

    Where the slot has room for all six tensors they stay there, and expert() is the whole afterwards. Raises ValueError for a slot
    through which the expert cannot even pass: compiled code does not look where a read ends.
    """

    def __init__(self, files, extents, slot):
        if len(slot) < min(slot_bytes(extents), passing_bytes(extents)):
            raise ValueError(f"an expert passes through a slot of {passing_bytes(extents)} bytes, this one has {len(slot)}")
        self.files, self.extents, self.slot = files, Expert(*extents), slot
        self.kept = len(slot) >= slot_bytes(extents)
        ends = np.cumsum([widened(e.nbytes) for e in extents]).tolist()
        rows = _scale_bytes(self.extents)
        self._places = Expert(0, *ends[:-1]) if self.kept else Expert(rows, 0, rows, 0, rows, 0)
        self._missing = {"w1", "w2", "w3"}  # of the slot

    @property
    def width(self):
        "The number of rows of w1, and of w3."
        return self.extents.w1.shape[0]

    def multiply(self, name, halves, out):
        "As Expert's: out float32 [m, n] = x W^T for W one of w1, w2 and w3, on the calling thread, read piece by piece."
        packed, at = getattr(self.extents, name), getattr(self._places, name)
        scale, scale_at = getattr(self.extents, name + "_scale"), getattr(self._places, name + "_scale")
        check_fit(packed, scale, (len(halves), GROUP * halves.shape[1]), out)
        n, row = packed.shape
        piece, pieces = pieces_of(n, row)
        done = self.files.stream(packed, 0, "experts", pieces + 1, lambda descriptor, journal: _stream_packed(
            descriptor, packed.offset, n, piece, self.slot, at, self.kept, scale.offset, scale.shape[1], scale_at, halves, out, journal)
        ) if COMPILED_READS and scale.file == packed.file else None
        if done != pieces:  # compiled code could not read them all
            self._multiply_rest(packed, at, (done or 0) * piece, piece, self._read(scale, 0, None, scale_at), halves, out)
        self._missing.discard(name)

    def _multiply_rest(self, packed, at, first, piece, scale, halves, out):
        "From row `first` on, with reads that say what is wrong."
        n, row = packed.shape
        for first in range(first, n, piece):
            place = _place.py_func(at, self.kept, packed.offset, packed.offset + first * row)
            rows = self._read(packed, first, min(piece, n - first), place)
            self.files.multiply(rows.nbytes, mxfp4_rows, rows, scale[first:first + piece], halves, out, first)

    def _read(self, extent, first, rows, place):
        n, row = extent.shape
        nbytes = (n if rows is None else rows) * row
        begin = place + self.files.read(self.slot[place:], extent, first * row, nbytes, "experts")
        return self.slot[begin:begin + nbytes].reshape(-1, row)

    def expert(self):
        "The Expert that the slot holds when all three matrices have been multiplied; None before that, and if they only passed."
        def view(extent, place):
            begin = place + extent.offset % PAGE
            return self.slot[begin:begin + extent.nbytes].reshape(extent.shape)
        return Expert(*map(view, self.extents, self._places)) if self.kept and not self._missing else None

# %%
def k3_expert():
    "The six extents of an expert of the released shape."
    shapes = dict(w1=(3072, 1792), w1_scale=(3072, 112), w2=(3584, 1536), w2_scale=(3584, 96), w3=(3072, 1792), w3_scale=(3072, 112))
    return [Extent("shard", 8, n * m, "U8", (n, m)) for n, m in shapes.values()]


print(f"an expert of K3: {sum(e.nbytes for e in k3_expert()):,} bytes; kept in {slot_bytes(k3_expert()) / 1e6:.1f} MB, "
      f"passing through {passing_bytes(k3_expert()) / 1e6:.1f} MB")
for name in ("w1", "w2"):
    n, row = getattr(Expert(*k3_expert()), name).shape
    piece, pieces = pieces_of(n, row)
    print(f"{name}: {n} rows of {row} bytes in {pieces} pieces of {piece} rows, {piece * row:,} bytes; the last has {n - (pieces - 1) * piece}")

# %% [markdown]
# A piece begins where the one before ended, in the middle of a page as a rule, and reads move whole pages. In a slot that keeps, the page that
# two pieces share is read twice into the same place. An expert of the embedded model in pieces of at most 2 kB: the product of the
# whole, kept or not; and the same from Python, which reads where compiled code cannot.

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
    return read_expert(Files(), six(layer, e), aligned(slot_bytes(six(layer, e))))


checkpoint = Checkpoint(FOLDER)
vector = np.random.default_rng(seed).standard_normal((1, 2 * six(1, 0)[0].shape[1])).astype(np.float32)
MEGABYTE, trunk.PIECE = trunk.PIECE, 2048
PIECE = trunk.PIECE
SMALL, LARGE = passing_bytes(six(1, 0)), slot_bytes(six(1, 0))
print([(e.offset % PAGE, *e.shape) for e in six(1, 0)], "- w1 in", pieces_of(*six(1, 0)[0].shape)[1], "pieces")
for COMPILED_READS in (COMPILED_READS, False):
    for nbytes in (SMALL, LARGE):
        arriving = Arriving(Files(), six(1, 0), aligned(nbytes)[:nbytes])
        assert product(arriving) == product(whole(1, 0))
        kept = arriving.expert()
        assert (kept is not None) == (nbytes == LARGE) and (kept is None or all(map(np.array_equal, kept, whole(1, 0))))
        print(f"slot of {nbytes:,} bytes, {'kept' if kept else 'passed'}: the product of the whole, bit for bit: True")
COMPILED_READS = trunk.COMPILED_READS

# %% [markdown]
# ## 5.4.3 What it is worth
#
# Sixteen experts of K3's shape in a file of holes: the system makes up the zeros, so that no disk is slower than what we want to see. One thread,
# four ways: each read whole into a slot of its own, as if all of a layer were fetched first; each multiplied as it arrives in a slot of its own; whole
# through the same slot; in pieces through the same slot.

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
    nbytes = slot_bytes(sixteen[0]) if way is read_expert or slots > 1 else passing_bytes(sixteen[0])
    memory = [aligned(nbytes) for _ in range(slots)]
    for _ in range(3):
        began = time.perf_counter()
        for i, extents in enumerate(sixteen):
            expert_mlp(way(files, extents, memory[i % slots]), z, 4.0, 25.0, np.empty_like(z))
        best = min(best, (time.perf_counter() - began) / 16 * 1e3)
    files.close()
    return best


times = {"whole, 16 slots": ms_an_expert(read_expert, 16), "in pieces, 16 slots that keep": ms_an_expert(Arriving, 16),
         "whole, one slot": ms_an_expert(read_expert, 1), "in pieces, one slot": ms_an_expert(Arriving, 1)}
sizes = 2 ** np.arange(15, 23)
by_size = [ms_an_expert(Arriving, 1, int(size)) for size in sizes]
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
# The arithmetic is the same every time; what differs is how far the bytes travel. Small pieces pay for their calls, large ones leave the cache.
# Most of all it counts how much memory the experts are spread over: a slot of its own is dear for an expert that will not be used again, and where
# one must be filled, pieces gain little.
#
# ## 5.4.4 A trace
#
# Which experts should stay is no matter of taste: record what a run requests, and replay that through any cache. A trace is the plainest
# of files, pairs of little-endian uint32 `(layer, expert)` in the order of the requests; where the layer number falls, a new pass begins. The
# public recording of the released model that 5.4.6 quotes has the same form.

# %% tags=["export"]
MOST_EXPERTS = 1 << 16  # of a layer; a larger number is damage


class TraceError(ValueError):
    "A trace that cannot be replayed: names the file, the place, and what was expected there."


def packed_trace(requests):
    "The bytes of a trace file for `requests`, (layer, expert) pairs in order: two little-endian uint32 each."
    return np.array(requests, "<u4").reshape(-1, 2).tobytes()


def read_trace(path):
    """The passes of a trace file, each a list of (layer, experts), as they were requested.

    Raises FileNotFoundError, and TraceError for a file that ends too early or whose passes do not all walk the layers of the first.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: {'is a folder' if Path(path).is_dir() else 'no such file'}")
    data = Path(path).read_bytes()
    if not data or len(data) % 8:
        raise TraceError(f"{path}: ends at byte {len(data)}, but a trace is whole requests of 8 bytes, at least one")
    layers, experts = np.frombuffer(data, "<u4").reshape(-1, 2).T.astype(np.int64)
    worst = int(experts.argmax())
    if experts[worst] >= MOST_EXPERTS:
        raise TraceError(f"{path}: request {worst}, at byte {8 * worst}, is for expert {experts[worst]}: no layer has {MOST_EXPERTS}")
    ends = [*(np.flatnonzero(np.diff(layers)) + 1).tolist(), len(layers)]
    return _passes(path, [(begin, int(layers[begin]), experts[begin:end].tolist()) for begin, end in zip([0, *ends], ends)], len(data))


def _passes(path, groups, nbytes):
    "`groups`, (first request, layer, experts), cut where a pass begins. Raises TraceError."
    n = next((i for i in range(1, len(groups)) if groups[i][1] < groups[i - 1][1]), len(groups))
    if n == 1:
        raise TraceError(f"{path}: every request is for layer {groups[0][1]}, and where a pass ends is seen only with two layers or more")
    for i, (begin, layer, _) in enumerate(groups):
        if layer != groups[i % n][1]:
            raise TraceError(f"{path}: request {begin}, at byte {8 * begin}, is for layer {layer}: layer {groups[i % n][1]} is next, as in the first pass")
    if len(groups) % n:
        raise TraceError(f"{path}: ends at byte {nbytes}, inside a pass: layer {groups[len(groups) % n][1]} is next")
    return [[(layer, chosen) for _, layer, chosen in groups[i:i + n]] for i in range(0, len(groups), n)]


def steps_of(passes):
    """What a cache is asked for: (steps, number of recomputed passes). A step is a list of (layer, each expert once, ascending).

    A pass that begins, in every layer, with all requests of the pass before and goes on has computed those tokens again, as a
    decoder without state does. Of such a pass only what is new is replayed.
    """
    steps, recomputed = [], 0
    for before, now in zip([None, *passes], passes):
        again = before is not None and all(len(b) > len(a) and b[:len(a)] == a for (_, a), (_, b) in zip(before, now))
        skipped = [len(chosen) for _, chosen in before] if again else [0] * len(now)
        steps.append([(layer, sorted(set(chosen[skip:]))) for (layer, chosen), skip in zip(now, skipped)])
        recomputed += again
    return steps, recomputed

# %% [markdown]
# By hand: two layers, three passes. The second pass has read the first token again; the third is an incremental one.

# %%
by_hand = [(1, 7), (1, 3), (2, 0), (2, 5), (1, 7), (1, 3), (1, 3), (1, 9), (2, 0), (2, 5), (2, 6), (2, 7), (1, 4), (1, 3), (2, 5), (2, 1)]
(folder / "trace").write_bytes(packed_trace(by_hand))
for was, step in zip(read_trace(folder / "trace"), steps_of(read_trace(folder / "trace"))[0]):
    print(was, "->", step)
assert [pair for step in read_trace(folder / "trace") for layer, chosen in step for pair in zip([layer] * 9, chosen)] == by_hand
for damage, data in (("cut", packed_trace(by_hand)[:-5]), ("cut", packed_trace(by_hand[:-2])), ("one layer more", packed_trace(by_hand + [(3, 0)]))):
    (folder / "trace").write_bytes(data)
    try:
        read_trace(folder / "trace")
    except TraceError as error:
        print(damage, "-", str(error).replace(str(folder), "..."))

# %% [markdown]
# ## 5.4.5 Caches as scores
#
# A request meets what is resident: those are its hits. Then, of what was resident and what has now been read, a cache keeps the experts it
# likes best, and the policy is in that liking alone. Newly read ones may be refused: they pass through. Four likings, one cache:
#
# | policy | an expert's score | knows |
# |---|---|---|
# | LRU | time of its last use | the past |
# | decayed frequency | its uses, halved every so many steps | the past |
# | pin | its uses in some steps; it never changes | those steps, beforehand |
# | clairvoyant | minus the time of its next use | the future: no policy has more hits (Belady) |
#
# Scores change only with a use, so a heap finds the worst in $\log n$.

# %% tags=["export"]
class Scored:
    """A cache of the `capacity` experts of highest score, over all layers. score(key, now) is asked at each use of key = (layer, e),
    `now` counting the requests, of one layer each, from 0. What is used is admitted only if it is among the best."""

    def __init__(self, capacity, score):
        self.capacity, self.score = capacity, score
        self.now, self._kept, self._heap = 0, {}, []

    def request(self, layer, ids):
        "The set of those of `ids` that were kept until now; then the best are kept."
        hits = {e for e in ids if (layer, e) in self._kept}
        for e in ids:
            value = self._kept[layer, e] = self.score((layer, e), self.now)
            heapq.heappush(self._heap, (value, (layer, e)))
        while len(self._kept) > self.capacity:
            value, key = heapq.heappop(self._heap)
            if self._kept.get(key) == value:  # else an older score of an expert that has been used since, or that has gone
                del self._kept[key]
        self.now += 1
        return hits


def last_use(key, now):
    "LRU."
    return now


def decayed_uses(half):
    "Uses that lose half their weight in `half` requests of a layer each, as a logarithm that need not be touched between uses."
    scores = {}

    def score(key, now):
        before = scores.get(key, -math.inf) - now / half
        scores[key] = now / half + math.log2(1 + 2 ** before)
        return scores[key]
    return score


def uses_in(steps):
    "A pin: the number of uses in `steps`, once and for all."
    uses = Counter((layer, e) for step in steps for layer, ids in step for e in ids)
    return lambda key, now: uses[key]


def next_use(steps, first):
    "The clairvoyant bound for the hits from step `first` on."
    uses, requests = {}, [(n, layer, ids) for n, step in enumerate(steps) for layer, ids in step]
    for now in range(len(requests) - 1, -1, -1):
        n, layer, ids = requests[now]
        for e in ids if n >= first else ():
            uses.setdefault((layer, e), []).append(now)

    def score(key, now):
        mine = uses.get(key, [])
        while mine and mine[-1] <= now:
            mine.pop()
        return -mine[-1] if mine else -math.inf
    return score


def replay(cache, steps, first=0):
    "(hits, requests) of `cache` from step `first` on; the steps before fill it."
    hits = requests = 0
    for n, step in enumerate(steps):
        for layer, ids in step:
            found = len(cache.request(layer, ids))
            if n >= first:
                hits, requests = hits + found, requests + len(ids)
    return hits, requests

# %% [markdown]
# None of the first three knows that layers take turns. When layer 5 has been read, what is resident of layer 6 is a whole step old, and it is
# exactly what is asked for next; by any clock that counts requests it looks oldest, and goes first. Time should be counted for each layer
# by its own visits. Then there is nothing to compare between layers: each has an equal share of the slots, and in it the experts that its
# last visits asked for, newest first. That is a shift register an expert.
#
# By hand: 1100 was asked for at this visit and the one before, 1000 only now, 0111 at the three before. They stay in this order, and of equals the
# one that is there already.

# %% tags=["export"]
VISITS = 16  # of its layer that an expert's use is remembered for


class Share:
    "What one layer keeps: the `capacity` experts that its last visits asked for, newest visit first."

    def __init__(self, capacity):
        self.capacity, self.kept = capacity, frozenset()
        self._history = {}  # expert: bit VISITS - 1 is this visit, the one below it the visit before

    def request(self, ids):
        "The set of those of `ids` that were kept until now; then the best are kept."
        before, new = self.kept, 1 << VISITS - 1
        history = {e: bits >> 1 for e, bits in self._history.items() if bits > 1}
        history.update([(e, history.get(e, 0) | new) for e in ids])
        best = sorted(before.union(ids), key=lambda e: (history.get(e, 0), e in before, -e), reverse=True)
        self.kept, self._history = frozenset(best[:self.capacity]), history
        return before.intersection(ids)

    def forget(self, e):
        "Expert `e` could not be kept after all."
        self.kept -= {e}


class Shares:
    "A cache of `capacity` experts in which each of `layers` has an equal share: the one that Experts uses."

    def __init__(self, layers, capacity):
        layers, n = sorted(layers), len(layers)
        self._of = {layer: Share(capacity * (i + 1) // n - capacity * i // n) for i, layer in enumerate(layers)}

    def __getitem__(self, layer):
        return self._of[layer]

    def request(self, layer, ids):
        "The set of those of `ids` that were kept until now; then the best are kept."
        return self._of[layer].request(ids)

# %%
share = Share(2)
for ids in ([1, 2], [1, 3], [3, 4], [4], [4, 2]):
    hits = share.request(ids)
    print(f"asked for {ids}: {len(hits)} hits; keeps {sorted(share.kept)}; history", {e: f"{bits >> VISITS - 4:04b}" for e, bits in sorted(share._history.items())})
assert share.kept == {2, 4}

# %% [markdown]
# ## 5.4.6 Which one: the replay
#
# The first half of the steps fills the caches, the second is counted. An honest pin knows the first half, as anyone would at that point; a pin
# with hindsight knows the half that is counted. The clairvoyant has its future in that half too. Sizes are given as shares of what
# one token requests.

# %% tags=["export"]
SIZES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # of a working set
EXPERT_BYTES = 17_547_264  # in the released model


def policies(steps):
    "{name: capacity -> cache} for a replay of `steps` whose second half is counted."
    half = len(steps) // 2
    layers = [layer for layer, _ in steps[0]]
    return {
        "LRU": lambda n: Scored(n, last_use),
        "decayed, 1 step": lambda n: Scored(n, decayed_uses(len(layers))),
        "decayed, 4 steps": lambda n: Scored(n, decayed_uses(4 * len(layers))),
        "shares": lambda n: Shares(layers, n),
        "honest pin": lambda n: Scored(n, uses_in(steps[:half])),
        "hindsight pin": lambda n: Scored(n, uses_in(steps[half:])),
        "clairvoyant": lambda n: Scored(n, next_use(steps, half)),
    }


def working_set(steps):
    "Experts that the last step requests, a single token's in a decoding run."
    return sum(len(ids) for _, ids in steps[-1])


def hit_rates(steps, sizes=SIZES):
    "{policy: hit rate in the second half of `steps` for each of `sizes`, in working sets}."
    def rate(make, size):
        hits, requests = replay(make(int(size * working_set(steps))), steps, len(steps) // 2)
        return hits / requests
    return {name: [rate(make, size) for size in sizes] for name, make in policies(steps).items()}


def reuse(steps):
    "Share of the counted steps' requests that the step before has made too."
    pairs = [(set(a), b) for before, now in itertools.pairwise(steps[max(0, len(steps) // 2 - 1):]) for (_, a), (_, b) in zip(before, now)]
    return sum(e in a for a, b in pairs for e in b) / max(1, sum(len(b) for _, b in pairs))


def replay_text(passes, expert_bytes=EXPERT_BYTES):
    "Hit rate against capacity for the passes of a trace, as a table."
    steps, recomputed = steps_of(passes)
    n, rates = working_set(steps), hit_rates(steps)
    head = [f"{len(steps)} steps over {len(steps[0])} layers, {sum(len(ids) for step in steps for _, ids in step):,} requests; the last step's {n:,} are the working set",
            f"{reuse(steps):.0%} of a step's experts were in the step before; hits are counted from step {len(steps) // 2 + 1} on, and the steps before fill the caches"]
    if recomputed:
        head.append(f"{recomputed} steps compute everything before them again: only what they add is replayed")
    rows = [("working sets", "experts", "GB", *rates)]
    for i, size in enumerate(SIZES):
        rows.append((f"{size:g}", f"{int(size * n):,}", f"{int(size * n) * expert_bytes / 1e9:.3g}", *(f"{rate[i]:.3f}" for rate in rates.values())))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join([*head, *("  ".join(word.rjust(width) for word, width in zip(row, widths)) for row in rows)])

# %% [markdown]
# The public test data of the C engine *kimi-k3-in-c* (Apache-2.0) hold a real trace: a prompt of 5 tokens and 7 steps through the released 93-layer
# model. It is not part of this repository. That engine computed the whole prefix anew at every step, so only what each pass adds counts:
# 15,986 requests. 43% of a token's experts were requested by the token before (other engines report 29% for longer texts). Who has the file gets
# these figures, and the columns left out here, with `k3 trace --replay expert_trace.bin`:
#
# | working sets | GB | LRU | decayed, 4 steps | shares | honest pin | hindsight pin | clairvoyant |
# |---|---|---|---|---|---|---|---|
# | 0.1 | 2.58 | 0.000 | 0.020 | **0.068** | 0.068 | 0.100 | 0.100 |
# | 0.25 | 6.46 | 0.000 | 0.104 | **0.152** | 0.145 | 0.215 | 0.250 |
# | 0.5 | 12.9 | 0.000 | 0.202 | **0.267** | 0.209 | 0.354 | 0.433 |
# | 0.75 | 19.4 | 0.000 | 0.301 | **0.362** | 0.266 | 0.465 | 0.508 |
# | 1 | 25.8 | 0.435 | 0.347 | **0.435** | 0.319 | 0.519 | 0.571 |
# | 1.25 | 32.3 | 0.435 | 0.380 | **0.464** | 0.340 | 0.565 | 0.633 |
# | 1.5 | 38.7 | 0.461 | 0.392 | **0.485** | 0.356 | 0.594 | 0.645 |
# | 2 | 51.7 | 0.508 | 0.515 | **0.525** | 0.378 | 0.637 | 0.645 |
# | 3 | 77.5 | 0.556 | 0.564 | **0.569** | 0.437 | 0.645 | 0.645 |
#
# Shares are the best of those that do not know the future, at every size, and no honest pin beats them. So that is what `Experts` does. Eight steps are few:
# a longer recording may move the columns, and the command is there.
#
# What can be run here is a made-up trace with the statistic that matters most. In the recording the expert a router likes best is requested
# again by the next token in 74% of the cases, the sixteenth in 23%, in between about evenly less:

# %%
STAYS = np.linspace(0.74, 0.23, 16)  # by the router's rank, as in the recording


def made_up(layers, experts, steps, seed):
    "Steps of (layer, experts): those that stay keep their order and are joined by random others, at the lower ranks."
    rng = np.random.default_rng(seed)
    ranked = [rng.choice(experts, 16, replace=False) for _ in range(layers)]
    for _ in range(steps):
        for layer in range(layers):
            stay = ranked[layer][rng.random(16) < STAYS]
            ranked[layer] = np.concatenate([stay, rng.choice(np.setdiff1d(np.arange(experts), stay), 16 - len(stay), replace=False)])
        yield [(layer + 1, sorted(chosen.tolist())) for layer, chosen in enumerate(ranked)]


trace = list(made_up(92, 896, steps, seed))
print(replay_text(trace))
rates = hit_rates(trace)
assert all(rates["shares"][i] >= max(rates[name][i] for name in ("LRU", "decayed, 1 step", "decayed, 4 steps", "honest pin")) for i in range(len(SIZES)))

# %%
RELEASED = {  # from the table above
    "LRU": (0, 0, 0, 0, 0.435, 0.435, 0.461, 0.508, 0.556),
    "decayed, 4 steps": (0.020, 0.104, 0.202, 0.301, 0.347, 0.380, 0.392, 0.515, 0.564),
    "shares": (0.068, 0.152, 0.267, 0.362, 0.435, 0.464, 0.485, 0.525, 0.569),
    "honest pin": (0.068, 0.145, 0.209, 0.266, 0.319, 0.340, 0.356, 0.378, 0.437),
    "hindsight pin": (0.100, 0.215, 0.354, 0.465, 0.519, 0.565, 0.594, 0.637, 0.645),
    "clairvoyant": (0.100, 0.250, 0.433, 0.508, 0.571, 0.633, 0.645, 0.645, 0.645),
}
LAYERS, K = 92, 16
TRUNK, WORKING_SET = 108.8, LAYERS * K * EXPERT_BYTES / 1e9
STYLES = {"LRU": "C3s-", "decayed, 4 steps": "C4v-", "shares": "C0o-", "honest pin": "C1^-", "hindsight pin": "C1^:", "clairvoyant": "k--"}
fig, axes = plt.subplots(1, 2, figsize=(7.5, 3.4), sharey=True)
for ax, curves, title in zip(axes, (RELEASED, rates), ("the released model, 8 steps", "made up, same reuse by rank")):
    for name, style in STYLES.items():
        ax.plot(np.array(SIZES) * WORKING_SET, curves[name], style, ms=3.5, label=name)
    ax.axvline(WORKING_SET, color="0.7", lw=1, zorder=0)
    ax.set(xlabel="memory for experts, GB", title=title)
axes[0].set(ylabel="hit rate")
axes[0].legend(fontsize=7, loc="lower right")
fig.suptitle("Below one token's experts (grey line) an LRU keeps nothing, shares about 60% of what can be kept", fontsize=10)
plt.show()

# %% [markdown]
# The distance to the dashed line is what only the future tells. What a choice costs: a request of sixteen experts, with half a working set
# resident, and with three.

# %% tags=["nbval-ignore-output"]
for size in (0.5, 3.0):
    cache = Shares(range(1, LAYERS + 1), int(size * LAYERS * K))
    began = time.perf_counter()
    replay(cache, trace)
    print(f"{size} working sets: {(time.perf_counter() - began) / len(trace) * 1e3:.1f} ms a token for its {LAYERS} choices")

# %% [markdown]
# ## 5.4.7 Requested together, arriving in any order
#
# `request` starts as soon as the router has spoken; the down-projection and the shared experts compute meanwhile. Where slots keep, experts
# are fetched ahead, whole. Where they do not, nothing is read before its turn: a piece that waits for its product is a piece that leaves the cache.
#
# Then `each` has the readers do the products. A reader takes what is there first; if nothing is, it reads as it multiplies. The order is the
# disk's, and it may not matter: chapter 4.2 keeps each answer by (token, rank) and sums in rank order.
#
# What a layer keeps is decided at the request, before a byte is read, so it does not depend on the disk: the replay of a run's trace has the run's
# hits. One slot a reader keeps nothing. Through those goes what was not chosen; the others have an expert until it is no longer chosen. A slot
# is refilled only when its expert has been used. One whose read failed is an exception in the arithmetic, never a smaller sum, and what was
# multiplied in part is not kept.

# %% tags=["export"]
class Experts:
    """Routed experts in a fixed number of slots of `nbytes`, filled by readers from the moment they are requested.

    `extents(layer, e)`: the six extents of an expert in the order of Expert's fields. Slots that have room for it keep the experts
    that Shares says, of `layers`, in all but a slot a reader; through those, and through smaller ones, an expert passes. All experts
    have one shape. A request takes the place of the one before, which leaves it nothing if it was interrupted. `trace`: None, or a
    list that receives (layer, e) of every request.
    """

    def __init__(self, extents, files, slots, nbytes, readers, layers):
        if slots and readers < 1:
            raise ValueError(f"{readers} readers fetch nothing")
        self.extents, self.files, self.nbytes = extents, files, nbytes
        self.requests = self.hits = 0
        self.wait_seconds = 0.0
        self.trace = None
        self._memory = [aligned(nbytes)[:nbytes] for _ in range(slots)]
        self._turn = threading.RLock()  # as the ring's
        self._work, self._news = threading.Condition(self._turn), threading.Condition(self._turn)  # for readers; for the caller
        self._free = list(range(slots))
        self._kept = Shares(layers, max(0, slots - readers))
        self._resident = {}  # (layer, e) -> (slot, Expert): what is kept, and what is requested and not yet used
        self._asked, self._answered = (), True  # keys of the last request; whether each() has been called for it
        self._pending, self._ready = deque(), deque()  # keys to fetch; (key, Expert or what was raised)
        self._due = self._fetching = self._calling = self._most = self._waiting = 0
        self._call = self._failure = None
        self._whole = self._stopped = False  # whole: these slots have room for an expert, so what is requested can be fetched before its turn
        self._threads = [threading.Thread(target=self._serve, name=f"k3-experts-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def layer(self, number):
        "The experts of one layer, as moe_layer takes them: .request(ids), .each(work, threads)."
        return _Layer(self, number)

    def request(self, layer, ids):
        "Start fetching these experts of a layer, each named once. Those still resident are counted as hits."
        keys = [(layer, int(e)) for e in ids]
        if len(set(keys)) < len(keys) or keys and not self._memory:
            raise ValueError(f"experts {list(ids)} of layer {layer} are requested into {len(self._memory)} slots: an expert twice, or no slot")
        extents = self.extents(*keys[0]) if keys else ()
        with self._turn:
            self._abandon()
            self._asked, self._due = keys, len(keys)
            self._whole, self._passing = bool(keys) and self.nbytes >= slot_bytes(extents), passing_bytes(extents) if keys else 0
            hits = self._choose(layer, [e for _, e in keys]) if self._whole else ()
            for key in keys:
                if key[1] in hits:
                    self._ready.append((key, self._resident[key][1]))
                else:
                    self._pending.append(key)
            self.hits += len(hits)
            self.requests += len(keys)
            if self.trace is not None:
                self.trace += keys
            self._answered = False
            self._work.notify_all()

    def _choose(self, layer, ids):
        "Let the layer's share choose what it keeps. Returns the hits; what goes and is not asked for gives its slot back."
        share = self._kept[layer]
        before = share.kept
        hits = share.request(ids)
        for e in before - share.kept - hits:
            self._free.append(self._resident.pop((layer, e))[0])
        return hits

    def each(self, work, threads):
        """Have the readers call work(expert id, expert) on each requested expert, in any order, at most `threads` at a time.

        The expert is an Expert that is there, or one that is Arriving and is read as it is multiplied. Returns when all calls
        have ended; raises what one of them, or a read, raised. A request is answered once, well or not: RuntimeError without one.
        """
        began, busy = time.perf_counter(), self.files.seconds["arithmetic"]
        with self._turn:
            if self._answered:
                raise RuntimeError("no request is open: each() answers a request once")
            self._answered = True
            try:
                self._call, self._most, self._failure = work, threads, None
                self._work.notify_all()
                while self._due and self._failure is None and not self._stopped:
                    self._news.wait()
            finally:
                self._call = None
                while self._calling:
                    self._news.wait()
            busy = self.files.seconds["arithmetic"] - busy
            self.wait_seconds += max(0.0, time.perf_counter() - began - busy / min(threads, CORES))
            if self._stopped:
                raise RuntimeError("the experts are closed")
            if self._failure is not None:
                raise self._failure

    def _abandon(self):
        "Forget what an interrupted pass has left: its reads end, its results are dropped, nothing is held."
        self._call, self._due = None, 0
        self._pending.clear()
        while self._fetching or self._calling:
            self._news.wait()
        self._ready.clear()
        for key in self._asked:
            self._leave(key)
        self._asked = ()

    def _serve(self):
        "A reader's life: settle the last job and choose the next under the lock, do it outside."
        job = result = None
        while True:
            with self._turn:
                if job is not None:
                    self._settle(*job, result)
                while not self._stopped and (job := self._next()) is None:
                    self._waiting += 1
                    self._work.wait()
                    self._waiting -= 1
                if self._stopped:
                    return
            result = self._do(*job)

    def _next(self):
        "The next job: (key, expert or slot, call or None), or None. What is there comes first; whoever may call reads as it multiplies."
        call = self._call if self._calling < self._most else None
        if call and self._ready:
            key, what = self._ready.pop()
        elif self._pending and (call or self._whole) and (what := self._slot()) is not None:
            key = self._pending.popleft()
        else:
            return None
        self._calling += call is not None
        self._fetching += call is None
        return key, what, call

    def _slot(self):
        "A slot to fill, the one given back last, or None: what is kept, and what is requested and not yet used, has its own."
        return self._free.pop() if self._free else None

    def _stays(self, key):
        return self._whole and key[1] in self._kept[key[0]].kept

    def _do(self, key, what, call):
        "The Expert that is in the slot now, or None; or what was raised."
        try:
            if isinstance(what, BaseException):
                raise what
            if isinstance(what, Expert):
                self.files.multiply(self.nbytes, call, key[1], what)
                return what
            if call is None:
                return read_expert(self.files, self.extents(*key), self._memory[what])
            slot = self._memory[what]
            arriving = Arriving(self.files, self.extents(*key), slot if self._stays(key) else slot[:self._passing])
            call(key[1], arriving)
            return arriving.expert()
        except BaseException as error:  # whatever it is, the caller must hear of it
            return error

    def _settle(self, key, what, call, result):
        if isinstance(what, int):
            if isinstance(result, Expert):
                self._resident[key] = what, result
            else:
                self._free.append(what)
        if call is None:
            self._fetching -= 1
            self._ready.append((key, result))
        else:
            self._calling -= 1
            self._due -= 1
            if isinstance(result, BaseException):
                self._failure, self._call = result, None
                if self._stays(key):  # its bytes may be what was wrong: the next request reads them again
                    self._kept[key[0]].forget(key[1])
            self._leave(key)
        if self._due == 0 or self._call is None:
            self._news.notify()
        if self._waiting and (self._ready or self._pending):
            self._work.notify()

    def _leave(self, key):
        "After its use, or when nobody will use it: an expert that does not stay gives its slot back, one that is not whole is not kept."
        if key in self._resident and not self._stays(key):
            self._free.append(self._resident.pop(key)[0])
        elif key not in self._resident and self._stays(key):
            self._kept[key[0]].forget(key[1])

    def close(self):
        "End the readers; whoever waits for an expert gets a RuntimeError."
        with self._turn:
            self._stopped = True
            self._work.notify_all()
            self._news.notify_all()
        for thread in self._threads:
            thread.join()
        self._memory, self._resident = [], {}


class _Layer:
    def __init__(self, experts, number):
        self._experts, self._number = experts, number

    def request(self, ids):
        self._experts.request(self._number, ids)

    def each(self, work, threads):
        self._experts.each(work, at_once(threads))

# %% [markdown]
# ## 5.4.8 The gate
#
# Experts of the embedded model with three readers: in two slots; in 39, three of them for each of the 12 layers to keep; in 195, enough for all;
# and in three through which they pass. Every one comes once, with the product of the bytes that the checkpoint holds, on one thread or two.

# %%
WANTED = [0, 3, 5, 9, 14]
PIECE = trunk.PIECE = 2048


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
# Layer 1 was asked for twice. Three of its five experts were there the second time, or all five: true hits. Two slots are fewer than readers, so
# nothing stays in them, and what passes is never kept.
#
# Four mistakes that would still produce an answer. The first refills a slot whose expert is in use. The second drops an expert that could not
# be read: chapter 4.2 would notice the missing one, and so must this gate. The third calls its own fetches hits. The fourth keeps whatever
# is in the slot when a call ends, though the call has taken one matrix of three: the next request calls that a hit.

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


class Hopeful(Arriving):
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
for kind, whole_kept in ((Arriving, False), (Hopeful, True)):
    slot = aligned(LARGE)
    arriving = kind(Files(), six(1, 0), slot)
    arriving.multiply("w1", np.zeros((1, vector.shape[1] // GROUP, 2, 16), np.float32), np.empty((1, arriving.width), np.float32))
    assert (arriving.expert() is not None) == whole_kept
assert product(arriving.expert()) != product(whole(1, 0))
print("hasty, forgiving, boastful, hopeful: each fails the gate: True")

# %% [markdown]
# ## 5.4.9 The disk's order and the router's
#
# Reads that begin together end in any order. Sixteen answers, added in the order in which a slow disk delivered their experts: float32 addition
# is not associative, so every run has its own bits. Kept by rank and added at the end, there is one result.

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
# ## 5.4.10 Many in flight
#
# Eight experts of K3's shape and a device that takes up to two milliseconds to answer, once with one reader and once with four, while the caller does
# something else for the first twelve, as the shared experts would. Four slots have room for a whole expert each.

# %% tags=["nbval-ignore-output"]
def events(readers, slots, busy=12e-3):
    files = Slow(seed, 2e-3)
    files.log = []
    experts = Experts(lambda layer, e: sixteen[e], files, slots, slot_bytes(sixteen[0]), readers, [1])
    for memory in experts._memory:
        memory[:] = 0  # the system hands out memory at its first use; not in this picture
    began = time.perf_counter()
    experts.request(1, range(8))
    time.sleep(busy)
    experts.each(lambda e, expert: expert_mlp(expert, z, 4.0, 25.0, np.empty_like(z)), 64)
    experts.close()
    return [(e.thread, e.what, e.began - began, e.ended - began) for e in files.log]


PIECE = trunk.PIECE = MEGABYTE
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
# Reading begins with the request, not when the caller first looks: by then the slots hold whole experts, which are multiplied first. The others
# come in pieces as slots are given back, blue and orange in turn on one row. While one reader waits for its piece another has the core.
#
# ## 5.4.11 What a gigabyte saves
#
# Bytes read for a token, when the first gigabytes go to the trunk and when they go to experts. A gigabyte of pinned trunk is a gigabyte less at
# every token. A gigabyte of experts saves its hits: at best two thirds of one, the first two and a half of them (0.068 × 25.8 GB), and less from
# there on. Here with the rates of the released model's trace.

# %%
def read_a_token(trunk_gb, experts_gb):
    hit = np.interp(experts_gb, [0, *(size * WORKING_SET for size in SIZES)], [0, *RELEASED["shares"]])
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
# So memory goes to the trunk first. Until all of it is pinned, experts need no more than slots to pass through: one for each reader, and as many
# readers as keep the device busy. What is left beyond that is cut into shares.
#
# ## 5.4.12 What it costs in K3

# %%
print(f"a token reads {WORKING_SET:.2f} GB of experts in {LAYERS * K:,} requests: {WORKING_SET / (WORKING_SET + TRUNK):.0%} of its bytes")
print(f"4 slots to pass through: {4 * passing_bytes(k3_expert()) / 1e6:.0f} MB; 16 slots that keep: {16 * slot_bytes(k3_expert()) / 1e6:.0f} MB; "
      f"a working set: {LAYERS * K * slot_bytes(k3_expert()) / 1e9:.1f} GB")

# %% [markdown]
# ## Summary
#
# - Experts are requested the moment they are known, read by several threads, multiplied in any order, summed in rank order.
# - The thread that reads a piece multiplies it: a megabyte is still in its core's cache. What is not kept need not be whole.
# - Only what has been multiplied to the last row is kept, and a slot is refilled only when its expert has been used.
# - A hit is an expert that was there before the request, so the report does not count a token's own fetches.
# - By the clock of requests the layer that comes next looks oldest: an LRU saves nothing below one working set, 25.8 GB. By each layer's own visits
#   half a set saves 27%, more than any pin that does not know the future.
# - A gigabyte of trunk still saves more than a gigabyte of experts.
#
# ## Exercises
#
# 1. Let 60% stay at every rank. Where does the LRU leave the axis, and why is that place the same? Where would the other curves be if every
#    expert were equally likely to stay?
# 2. The router's ranks say more than the past does: 74% of the experts it likes best stay, 23% of the last. `request` has them in ascending order.
#    Let a share prefer the better ranks among equals, and replay it.
# 3. With two slots that keep and sixteen requests, how many reads can be in flight while one expert computes? And with two slots through which
#    experts pass? Where in `Experts` is that decided?
# 4. `Arriving` reads the scales of a matrix before its rows. What would change if they were read with each piece, in bytes and in reads?
# 5. Draw the curve of 5.4.3 for a chunk of 16 tokens. Why does it become flat?
#
# Next: [5.5 The walk](05_model.ipynb) puts trunk and experts under 93 layers.
