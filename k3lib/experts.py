"""5.4 Experts: fetched when the router has spoken

Made from book/05_streaming/04_experts.py: edit that, then run `make export`.
"""
# built on moe f816c117959c
# built on trunk 86816fbfd014

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
    together and arrive in any order; a slot is not refilled before its expert has been used.
    """

    def __init__(self, extents, files, slots, nbytes, readers):
        self.extents, self.files = extents, files
        self.requests = self.hits = 0
        self.wait_seconds = 0.0
        self._memory = [aligned(nbytes) for _ in range(slots)]
        self._turn = threading.Condition()
        self._free = list(range(slots))
        self._resident = OrderedDict()  # (layer, e) -> (slot, Expert), least recently used first
        self._held, self._pending, self._ready = set(), deque(), deque()
        self._due = self._busy = 0
        self._stopped = False
        self._threads = [threading.Thread(target=self._fetch, name=f"k3-experts-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def layer(self, number):
        "The experts of one layer, as moe_layer takes them: .request(ids), .arrivals()."
        return _Layer(self, number)

    def request(self, layer, ids):
        "Start fetching these experts of a layer. Those still resident are held and counted as hits."
        with self._turn:
            self._abandon()
            for e in ids:
                key = (layer, int(e))
                if key in self._resident:
                    self._held.add(key)
                    self._ready.append((key, self._resident[key][1]))
                    self.hits += 1
                else:
                    self._pending.append(key)
            self._due = len(ids)
            self.requests += len(ids)
            self._turn.notify_all()

    def arrivals(self):
        "Yields (expert id, Expert) once for each requested id, as they arrive. The weights are valid until the next is asked for."
        while self._due:
            began = time.perf_counter()
            with self._turn:
                while not self._ready:
                    self._turn.wait()
                key, expert = self._ready.popleft()
                self._due -= 1
            self.wait_seconds += time.perf_counter() - began
            if isinstance(expert, BaseException):
                raise expert
            try:
                yield key[1], expert
            finally:
                with self._turn:
                    self._held.discard(key)
                    self._resident.move_to_end(key)
                    self._turn.notify_all()

    def _abandon(self):
        "Forget what an interrupted pass has left: its reads end, its results are dropped, nothing is held."
        self._pending.clear()
        while self._busy:
            self._turn.wait()
        self._ready.clear()
        self._held.clear()
        self._due = 0

    def _slot(self):
        "A slot to fill, or None while every slot is in use."
        if self._free:
            return self._free.pop()
        for key in self._resident:
            if key not in self._held:
                return self._resident.pop(key)[0]
        return None

    def _fetch(self):
        while True:
            with self._turn:
                slot = None
                while not self._stopped:
                    slot = self._slot() if self._pending else None
                    if slot is not None:
                        break
                    self._turn.wait()
                if self._stopped:
                    return
                key = self._pending.popleft()
                self._busy += 1
            try:
                result = read_expert(self.files, self.extents(*key), self._memory[slot])
            except BaseException as error:  # whatever it is, the consumer must hear of it
                result = error
            with self._turn:
                self._busy -= 1
                if isinstance(result, BaseException):
                    self._free.append(slot)
                else:
                    self._resident[key] = (slot, result)
                    self._held.add(key)
                self._ready.append((key, result))
                self._turn.notify_all()

    def close(self):
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
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
