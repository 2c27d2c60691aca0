"""5.4 Experts: fetched when the router has spoken

Made from book/05_streaming/04_experts.py: edit that, then run `make export`.
"""
# built on moe 5ac1d689ee87
# built on trunk a0782ed3a07c

import threading
import time
from collections import OrderedDict, deque

from k3lib.moe import Expert
from k3lib.trunk import aligned, widened


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


class Experts:
    """Routed experts in a fixed number of slots: those of the last passes stay until the least recently used must go.

    `extents(layer, e)`: the six extents of an expert in the order of Expert's fields. A layer's experts are requested
    together and arrive in any order; a slot is not refilled before its expert has been used. Requests are numbered: what is
    left of an interrupted one can neither take arrivals of the next nor give its slots away.
    """

    def __init__(self, extents, files, slots, nbytes, readers):
        if slots and readers < 1:
            raise ValueError(f"{readers} readers fetch nothing")
        self.extents, self.files = extents, files
        self.requests = self.hits = 0
        self.wait_seconds = 0.0
        self._memory = [aligned(nbytes) for _ in range(slots)]
        self._turn = threading.Lock()
        self._work, self._news = threading.Condition(self._turn), threading.Condition(self._turn)  # for readers; for the consumer
        self._free = list(range(slots))
        self._resident = OrderedDict()  # (layer, e) -> (slot, Expert), least recently used first
        self._held, self._pending, self._ready = set(), deque(), deque()
        self._number = self._due = self._busy = 0
        self._stopped = False
        self._threads = [threading.Thread(target=self._serve, name=f"k3-experts-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def layer(self, number):
        "The experts of one layer, as moe_layer takes them: .request(ids), .arrivals()."
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
            self._used(number, key)

    def _check(self, number):
        if self._stopped or number != self._number:
            raise RuntimeError("the experts are closed" if self._stopped else "these arrivals belong to an earlier request")

    def _used(self, number, key):
        with self._turn:
            if number == self._number:
                self._held.discard(key)
                self._resident.move_to_end(key)
                self._work.notify()

    def _abandon(self):
        "Forget what an interrupted pass has left: its reads end, its results are dropped, nothing is held."
        self._number += 1
        self._due = 0
        self._pending.clear()
        while self._busy:
            self._news.wait()
        self._ready.clear()
        self._held.clear()

    def _serve(self):
        "A reader's life: settle the last fetch and choose the next under the lock, read outside."
        job = result = None
        while True:
            with self._turn:
                if job is not None:
                    self._settle(*job, result)
                while not self._stopped and (job := self._next()) is None:
                    self._work.wait()
                if self._stopped:
                    return
            try:
                key, slot = job
                result = read_expert(self.files, self.extents(*key), self._memory[slot])
            except BaseException as error:  # whatever it is, the consumer must hear of it
                result = error

    def _next(self):
        "The next (key, slot) to fetch, or None while nothing is pending or every slot is in use."
        slot = self._slot() if self._pending else None
        if slot is None:
            return None
        self._busy += 1
        return self._pending.popleft(), slot

    def _slot(self):
        "A slot to fill: a free one, else that of the least recently used expert that is not held."
        if self._free:
            return self._free.pop()
        for key in self._resident:
            if key not in self._held:
                return self._resident.pop(key)[0]
        return None

    def _settle(self, key, slot, result):
        self._busy -= 1
        if isinstance(result, BaseException):
            self._free.append(slot)
        else:
            self._resident[key] = (slot, result)
            self._held.add(key)
        self._ready.append((key, result))
        self._news.notify()

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


__all__ = ['runs', 'slot_bytes', 'read_expert', 'Experts']
