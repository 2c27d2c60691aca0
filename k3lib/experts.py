"""5.4 Experts: fetched when the router has spoken

Made from book/05_streaming/04_experts.py: edit that, then run `make export`.
"""
# built on linear 553a4e3bbffb
# built on moe de87a7a41ad7
# built on mxfp4 912a37cabbe0
# built on trunk 5ddda4ce6870

import threading
import time
from collections import OrderedDict, deque

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
def _stream_packed(descriptor, offset, rows, piece, slot, at, kept, scale, halves, out, journal):
    "The rows of a packed matrix at `offset`, read `piece` at a time into slot[at:], one after the other if `kept`; returns the pieces done."
    journal[0, 1] = clock(WALL)
    row, low = 16 * scale.shape[1], offset - offset % PAGE
    for p in range(len(journal) - 1):
        first = p * piece
        n, start = min(piece, rows - first), offset + first * row
        place = at + start - start % PAGE - low if kept else at
        begin = read_piece(descriptor, start, n * row, slot, place, journal[p + 1])
        if begin < 0:
            return p
        mxfp4_rows(slot[begin:begin + n * row].reshape(n, row), scale[first:first + n], halves, out, first)
        worked(journal[p + 1])
    return len(journal) - 1


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
        check_fit(packed, getattr(self.extents, name + "_scale"), (len(halves), GROUP * halves.shape[1]), out)
        scale = self._read(getattr(self.extents, name + "_scale"), 0, None, getattr(self._places, name + "_scale"))
        n, row = packed.shape
        piece, pieces = pieces_of(n, row)
        done = self.files.stream(packed, 0, "experts", pieces, lambda descriptor, journal: _stream_packed(
            descriptor, packed.offset, n, piece, self.slot, at, self.kept, scale, halves, out, journal)) if COMPILED_READS else 0
        for first in range(done * piece, n, piece):  # what compiled code could not read
            start = packed.offset + first * row
            place = at + (start - start % PAGE - packed.offset + packed.offset % PAGE if self.kept else 0)
            rows = self._read(packed, first, min(piece, n - first), place)
            self.files.multiply(rows.nbytes, mxfp4_rows, rows, scale[first:first + piece], halves, out, first)
        self._missing.discard(name)

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


class Experts:
    """Routed experts in a fixed number of slots of `nbytes`, filled by readers from the moment they are requested.

    `extents(layer, e)`: the six extents of an expert in the order of Expert's fields. A slot that has room for it keeps an
    expert until the least recently used must go; through a smaller one it passes in pieces. The experts of a layer have one shape.
    A request takes the place of the one before, which leaves it nothing if it was interrupted.
    """

    def __init__(self, extents, files, slots, nbytes, readers):
        if slots and readers < 1:
            raise ValueError(f"{readers} readers fetch nothing")
        self.extents, self.files, self.nbytes = extents, files, nbytes
        self.requests = self.hits = 0
        self.wait_seconds = 0.0
        self._memory = [aligned(nbytes)[:nbytes] for _ in range(slots)]
        self._turn = threading.Lock()
        self._work, self._news = threading.Condition(self._turn), threading.Condition(self._turn)  # for readers; for the caller
        self._free = list(range(slots))
        self._resident = OrderedDict()  # (layer, e) -> (slot, Expert), least recently used first
        self._held = set()  # resident keys that are requested and not yet used
        self._pending, self._ready = deque(), deque()  # keys to fetch; (key, Expert or what was raised)
        self._due = self._fetching = self._calling = self._most = 0
        self._call = self._failure = None
        self._ahead = self._stopped = False  # ahead: these slots keep, so what is requested can be fetched before its turn
        self._threads = [threading.Thread(target=self._serve, name=f"k3-experts-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def layer(self, number):
        "The experts of one layer, as moe_layer takes them: .request(ids), .each(work, threads)."
        return _Layer(self, number)

    def request(self, layer, ids):
        "Start fetching these experts of a layer, each named once. Those still resident are held and counted as hits."
        keys = [(layer, int(e)) for e in ids]
        if len(set(keys)) < len(keys) or keys and not self._memory:
            raise ValueError(f"experts {list(ids)} of layer {layer} are requested into {len(self._memory)} slots: an expert twice, or no slot")
        ahead = bool(keys) and self.nbytes >= slot_bytes(self.extents(*keys[0]))
        with self._turn:
            self._abandon()
            self._ahead = ahead
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

    def each(self, work, threads):
        """Have the readers call work(expert id, expert) on each requested expert, in any order, at most `threads` at a time.

        The expert is an Expert that is there, or one that is Arriving and is read as it is multiplied. Returns when all calls
        have ended; raises what one of them, or a read, raised.
        """
        began, busy = time.perf_counter(), self.files.seconds["arithmetic"]
        with self._turn:
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
        self._held.clear()

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
        "The next job: (key, expert or slot, call or None), or None. What is there comes first; whoever may call reads as it multiplies."
        call = self._call if self._calling < self._most else None
        if call and self._ready:
            key, what = self._ready.pop()
        elif self._pending and (call or self._ahead) and (what := self._slot()) is not None:
            key = self._pending.popleft()
        else:
            return None
        self._calling += call is not None
        self._fetching += call is None
        return key, what, call

    def _slot(self):
        "A slot to fill: a free one, else that of the least recently used expert that is not held."
        if self._free:
            return self._free.pop()
        for key in self._resident:
            if key not in self._held:
                return self._resident.pop(key)[0]
        return None

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
            arriving = Arriving(self.files, self.extents(*key), self._memory[what])
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
            if isinstance(result, Expert):
                self._held.add(key)
        else:
            self._calling -= 1
            self._due -= 1
            self._held.discard(key)
            if key in self._resident:
                self._resident.move_to_end(key)
            if isinstance(result, BaseException):
                self._failure, self._call = result, None
        self._news.notify()
        self._work.notify()

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

    def each(self, work, threads):
        self._experts.each(work, at_once(threads))


__all__ = ['runs', 'slot_bytes', 'read_expert', 'passing_bytes', 'Arriving', 'Experts']
