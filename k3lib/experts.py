"""5.4 Experts: fetched when the router has spoken

Made from book/05_streaming/04_experts.py: edit that, then run `make export`.
"""
# built on linear dccc736ce91a
# built on moe 998534e8456b
# built on mxfp4 0f1b34b47d7c
# built on trunk a43a46fcf595

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


__all__ = ['runs', 'slot_bytes', 'read_expert', 'passing_bytes', 'Arriving', 'MOST_EXPERTS', 'TraceError', 'packed_trace', 'read_trace', 'steps_of', 'Scored', 'last_use', 'decayed_uses', 'uses_in', 'next_use', 'replay', 'VISITS', 'Share', 'Shares', 'SIZES', 'EXPERT_BYTES', 'policies', 'working_set', 'hit_rates', 'reuse', 'replay_text', 'Experts']
