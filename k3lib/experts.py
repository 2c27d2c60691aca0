"""5.16 Experts: fetched when the router has spoken

Made from book/05_streaming/16_experts.py: edit that, then run `make export`.
"""

import threading
import time
from collections import deque
import numpy as np
from k3lib.mxfp4 import GROUP
from k3lib.parallel import CORES
from k3lib.matmul import check_fit, mxfp4_rows
from k3lib.moe import Expert
from k3lib.disk import PAGE, page_buffer, page_padded
from k3lib.layout import expert_slot_bytes, scale_bytes, streaming_slot_bytes
from k3lib.read_multiply import COMPILED_READS, place_in_slot, read_units, stream_packed
from k3lib.trunk import max_concurrent_blocks
from k3lib.cache_policy import LayerCaches


def adjacent_runs(extents):
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


def read_expert(files, extents, buffer):
    "Read the six tensors of one expert into a page-aligned `buffer`, one read a run. Returns an Expert of views into it."
    views, begin = [None] * len(extents), 0
    for group in adjacent_runs(extents):
        first = extents[group[0]]
        nbytes = sum(extents[i].nbytes for i in group)
        at = begin + files.read(buffer[begin:], first._replace(nbytes=nbytes), 0, nbytes, "experts")
        for i in group:
            views[i] = buffer[at:at + extents[i].nbytes].reshape(extents[i].shape)
            at += extents[i].nbytes
        begin += page_padded(nbytes)
    return Expert(*views)


class StreamingExpert:
    """An expert that has yet to be read: its matrices are multiplied while their rows come. Takes the place of an Expert in expert_mlp.

    Where the slot has room for all six tensors they stay there, and expert() is the whole afterwards. Raises ValueError for a slot
    through which the expert cannot even pass: compiled code does not look where a read ends.
    """

    def __init__(self, files, extents, slot):
        if len(slot) < min(expert_slot_bytes(extents), streaming_slot_bytes(extents)):
            raise ValueError(f"an expert passes through a slot of {streaming_slot_bytes(extents)} bytes, this one has {len(slot)}")
        self.files, self.extents, self.slot = files, Expert(*extents), slot
        self.kept = len(slot) >= expert_slot_bytes(extents)
        ends = np.cumsum([page_padded(e.nbytes) for e in extents]).tolist()
        rows = scale_bytes(self.extents)
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
        piece, pieces = read_units(n, row)
        done = self.files.stream(packed, 0, "experts", pieces + 1, lambda descriptor, journal: stream_packed(
            descriptor, packed.offset, n, piece, self.slot, at, self.kept, scale.offset, scale.shape[1], scale_at, halves, out, journal)
        ) if COMPILED_READS and scale.file == packed.file else None
        if done != pieces:  # compiled code could not read them all
            self._multiply_rest(packed, at, (done or 0) * piece, piece, self._read(scale, 0, None, scale_at), halves, out)
        self._missing.discard(name)

    def _multiply_rest(self, packed, at, first, piece, scale, halves, out):
        "From row `first` on, with reads that say what is wrong."
        n, row = packed.shape
        for first in range(first, n, piece):
            place = place_in_slot.py_func(at, self.kept, packed.offset, packed.offset + first * row)
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
        self._memory = [page_buffer(nbytes)[:nbytes] for _ in range(slots)]
        self._turn = threading.RLock()  # as the ring's
        self._work, self._news = threading.Condition(self._turn), threading.Condition(self._turn)  # for readers; for the caller
        self._free = list(range(slots))
        self._kept = LayerCaches(layers, max(0, slots - readers))
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
            self._whole, self._passing = bool(keys) and self.nbytes >= expert_slot_bytes(extents), streaming_slot_bytes(extents) if keys else 0
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
            arriving = StreamingExpert(self.files, self.extents(*key), slot if self._stays(key) else slot[:self._passing])
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
        self._experts.each(work, max_concurrent_blocks(threads))


__all__ = [
    "adjacent_runs", "read_expert", "StreamingExpert", "Experts",
]
