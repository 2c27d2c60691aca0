"""5.4 Experts: fetched when the router has spoken

Made from book/05_streaming/04_experts.py: edit that, then run `make export`.
"""
# built on moe 7c7aee022490
# built on trunk ac7ec859a539

import threading
import time
from collections import OrderedDict, deque
from contextlib import nullcontext

from k3lib.moe import Expert
from k3lib.trunk import PAGE, Arithmetic, aligned, row_blocks, widened

PIECE = 1 << 20  # bytes of a matrix that pass at a time: they stay in a core's cache between the read and the product


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


class Passing:
    """An expert that is larger than its slot: the rows of its matrices are read as they are asked for.

    `arithmetic`: entered while a block is out, if it is given.
    """

    def __init__(self, files, extents, slot):
        self.files, self.extents, self.arithmetic = files, Expert(*extents), nullcontext()
        cut = _scale_bytes(self.extents)
        self._scale_slot, self._row_slot = slot[:cut], slot[cut:]
        self._matrix = self._block = None  # whose scales, and which rows are in the slot

    def begin(self):
        "Read what the first product begins with."
        self._load("w1", self._reads("w1")[0])
        return self

    def rows(self, name):
        "Number of rows of matrix w1, w2 or w3."
        return getattr(self.extents, name).shape[0]

    def blocks(self, name):
        "Yields (first row, packed rows, their scales) of matrix w1, w2 or w3. Valid until the next is asked for."
        for read in self._reads(name):
            self._load(name, read)
            with self.arithmetic:
                began = time.perf_counter()
                yield read.first, self._packed, self._scales[read.first:read.first + read.rows]
                self.files.note("arithmetic", began, read.nbytes)

    def _reads(self, name):
        return row_blocks(getattr(self.extents, name), 1, len(self._row_slot), "experts")

    def _load(self, name, read):
        if self._matrix != name:
            scale = getattr(self.extents, name + "_scale")
            self._matrix, self._scales = name, self._read(self._scale_slot, scale, 0, scale.nbytes)
        if self._block != (name, read.first):
            self._block, self._packed = (name, read.first), self._read(self._row_slot, read.extent, read.begin, read.nbytes)

    def _read(self, slot, extent, begin, nbytes):
        at = self.files.read(slot, extent, begin, nbytes, "experts")
        return slot[at:at + nbytes].reshape(-1, extent.shape[1])


class Experts:
    """Routed experts in a fixed number of slots of `nbytes`, filled by readers from the moment they are requested.

    `extents(layer, e)`: the six extents of an expert in the order of Expert's fields. A slot that has room for it keeps an
    expert until the least recently used must go; through a smaller one it passes in pieces. An expert leaves in one of two
    ways: arrivals() hands it to the caller, each() has the readers call a function on it; then its slot may be filled again.
    Requests are numbered: what is left of an interrupted one can neither take arrivals of the next nor give its slots away.
    """

    def __init__(self, extents, files, slots, nbytes, readers):
        if slots and readers < 1:
            raise ValueError(f"{readers} readers fetch nothing")
        self.extents, self.files, self.nbytes = extents, files, nbytes
        self.requests = self.hits = 0
        self.wait_seconds = 0.0
        self._memory = [aligned(nbytes)[:nbytes] for _ in range(slots)]
        self._turn = threading.Lock()
        self._work, self._news = threading.Condition(self._turn), threading.Condition(self._turn)  # for readers; for the consumer
        self._free = list(range(slots))
        self._resident = OrderedDict()  # (layer, e) -> (slot, Expert), least recently used first
        self._held, self._passing = set(), {}  # keys in use; key -> slot
        self._pending, self._ready = deque(), deque()
        self._number = self._due = self._fetching = self._calling = 0
        self._call = self._arithmetic = self._failure = None
        self._stopped = False
        self._threads = [threading.Thread(target=self._serve, name=f"k3-experts-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def layer(self, number):
        "The experts of one layer, as moe_layer takes them: .request(ids), .arrivals(), .each(work, threads)."
        return _Layer(self, number)

    def request(self, layer, ids):
        "Start fetching these experts of a layer, each named once. Those still resident are held and counted as hits."
        keys = [(layer, int(e)) for e in ids]
        if len(set(keys)) < len(keys) or keys and not self._memory:
            raise ValueError(f"experts {list(ids)} of layer {layer} are requested into {len(self._memory)} slots: an expert twice, or no slot")
        with self._turn:
            self._abandon()
            for key in keys:
                if key in self._resident:
                    self._held.add(key)
                    self._ready.append((key, self._resident[key][1]))
                    self.hits += 1
                else:
                    self._pending.append(key)
            self._due = len(keys)
            self.requests += len(keys)
            self._work.notify_all()

    def arrivals(self):
        "Yields (expert id, Expert) once for each requested id, as they arrive. The weights are valid until the next is asked for."
        return self._arrivals(self._number)

    def _arrivals(self, number):
        while True:
            began = time.perf_counter()
            with self._turn:
                self._check(number)
                if not self._due:
                    return
                while not self._ready and not self._stopped:
                    self._news.wait()
                self._check(number)
                key, expert = self._ready.popleft()
                self._due -= 1
                self.wait_seconds += time.perf_counter() - began
            if isinstance(expert, BaseException):
                raise expert
            yield key[1], expert
            with self._turn:
                if number == self._number:
                    self._give_back(key)
                    self._work.notify()

    def each(self, work, threads):
        """Have the readers call work(expert id, expert) on each requested expert, in any order; at most `threads` multiply at
        a time. Returns when all calls have ended; raises what one of them, or a read, raised."""
        with self._turn:
            self._call, self._arithmetic, self._failure = work, Arithmetic(threads), None
            self._work.notify_all()
            try:
                while (self._due or self._calling) and self._failure is None and not self._stopped:
                    self._news.wait()
            finally:
                self._call = None
                while self._calling:
                    self._news.wait()
            self.wait_seconds += self._arithmetic.idle
            self._check(self._number)
            if self._failure is not None:
                raise self._failure

    def _check(self, number):
        if self._stopped or number != self._number:
            raise RuntimeError("the experts are closed" if self._stopped else "these arrivals belong to an earlier request")

    def _abandon(self):
        "Forget what an interrupted pass has left: its reads end, its results are dropped, nothing is held."
        self._number += 1
        self._due = 0
        self._pending.clear()
        while self._fetching or self._calling:
            self._news.wait()
        self._ready.clear()
        self._held.clear()
        self._free += self._passing.values()
        self._passing.clear()

    def _serve(self):
        "A reader's life: settle the last job and choose the next under the lock, do it outside."
        job = result = None
        while True:
            with self._turn:
                if job is not None:
                    self._settle(*job, result)
                while not self._stopped and (job := self._next()) is None:
                    self._work.wait()
                if self._stopped:
                    return
            result = self._do(*job)

    def _next(self):
        "The next job, (key, expert, call) or (key, slot, None), or None: an expert that has arrived comes before another read."
        if self._call and self._ready and (self._passing or self._calling < self._arithmetic.threads):
            key, expert = self._ready.pop()
            self._due -= 1
            self._calling += 1
            return key, expert, self._call
        slot = self._slot() if self._pending else None
        if slot is None:
            return None
        self._fetching += 1
        return self._pending.popleft(), slot, None

    def _slot(self):
        "A slot to fill: a free one, else that of the least recently used expert that is not held."
        if self._free:
            return self._free.pop()
        for key in self._resident:
            if key not in self._held:
                return self._resident.pop(key)[0]
        return None

    def _do(self, key, what, call):
        "The expert fetched, None after a call; or what was raised."
        try:
            if call is None:
                extents, slot = self.extents(*key), self._memory[what]
                whole = slot_bytes(extents) <= self.nbytes
                return read_expert(self.files, extents, slot) if whole else Passing(self.files, extents, slot).begin()
            if isinstance(what, BaseException):
                raise what
            if isinstance(what, Passing):
                what.arithmetic = self._arithmetic
                call(key[1], what)
            else:
                with self._arithmetic:
                    began = time.perf_counter()
                    call(key[1], what)
                    self.files.note("arithmetic", began, self.nbytes)
        except BaseException as error:  # whatever it is, the consumer must hear of it
            return error

    def _settle(self, key, what, call, result):
        if call is not None:
            self._calling -= 1
            self._give_back(key)
            if result is not None:
                self._failure, self._call = result, None
        else:
            self._fetching -= 1
            if isinstance(result, BaseException):
                self._free.append(what)
            elif isinstance(result, Passing):
                self._passing[key] = what
            else:
                self._resident[key] = what, result
                self._held.add(key)
            self._ready.append((key, result))
        self._news.notify()
        self._work.notify()

    def _give_back(self, key):
        if key in self._passing:
            self._free.append(self._passing.pop(key))
        elif key in self._resident:
            self._held.discard(key)
            self._resident.move_to_end(key)

    def close(self):
        "End the readers; whoever waits for an expert gets a RuntimeError."
        with self._turn:
            self._stopped = True
            self._work.notify_all()
            self._news.notify_all()
        for thread in self._threads:
            thread.join()


class _Layer:
    def __init__(self, experts, number):
        self._experts, self._number = experts, number

    def request(self, ids):
        self._experts.request(self._number, ids)

    def arrivals(self):
        return self._experts.arrivals()

    def each(self, work, threads):
        self._experts.each(work, threads)


__all__ = ['PIECE', 'runs', 'slot_bytes', 'read_expert', 'passing_bytes', 'Passing', 'Experts']
