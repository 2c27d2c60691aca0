"""5.11 One reader pool

Made from book/05_streaming/11_prefetch.py: edit that, then run `make export`.
"""

import threading
import time
import numpy as np
from k3lib.parallel import CORES, EXHAUSTED
from k3lib.disk import page_buffer, typed


class Prefetcher:
    """Aligned slots that readers fill in the order of a cyclic list of reads, ahead of the arithmetic.

    A block leaves in one of two ways: take() hands it to the caller, in order, until it is released; each() has the readers
    themselves call a function on the blocks of a matrix. Blocks are numbered once and for all, across passes and rewinds:
    whoever gives back a block of an interrupted pass gives back nothing. `ahead`: most blocks that wait in their slots, all if None.
    `name`: of the readers' threads.
    """

    def __init__(self, files, reads, slots, slot_bytes, readers, ahead=None, name="trunk"):
        if slots < 1 or readers < 1:
            raise ValueError(f"a ring of {slots} slots and {readers} readers moves nothing")
        self.files, self.reads, self.slots, self.ahead = files, reads, slots, ahead or slots
        self.memory = [page_buffer(slot_bytes) for _ in range(slots)]
        self.wait_seconds = 0.0
        self._turn = threading.RLock()
        self._work, self._news = threading.Condition(self._turn), threading.Condition(self._turn)  # for readers; for the consumer
        self._stopped = self._paused = self._failed = False
        self._issued = self._taken = self._first = 0  # next block to read ahead, next to hand out, the one the walk began with
        self._free = [*range(slots)]  # the slot given back last goes out first: it is still in a cache
        self._slot, self._filled = {}, {}  # block: slot, from its issue to its release; block: data or what was raised
        self._call = self._stream = self._failure = self._rest = self._drawn = None
        self._at = self._until = self._most = 0  # blocks from `at` to `until` are for `call` to read, at most so many at a time
        self._due = []  # blocks of the open matrix that were read ahead
        self._left = self._calling = self._busy = self._waiting = 0  # calls not ended; readers that call; at work; without work
        self._readers = [threading.Thread(target=self._serve, name=f"k3-{name}-{i}", daemon=True) for i in range(readers)]
        for thread in self._readers:
            thread.start()

    def take(self, number):
        "The data of block `number`, the next: a flat array inside its slot. Waits until it has arrived; raises what its reader raised."
        began = time.perf_counter()
        with self._turn:
            self._claim(number, 1)
            while number not in self._filled and not self._stopped:
                self._news.wait()
            self._check_open()
            result = self._filled.pop(number)
            self._work.notify()
            self.wait_seconds += time.perf_counter() - began
        if isinstance(result, BaseException):
            raise result
        return result

    def release(self, number):
        "Give a taken block's slot back to the readers."
        with self._turn:
            self._give_back(number)
            self._work.notify()

    def each(self, number, count, work, threads, stream=None):
        """Have the readers call work(read, data) on each of `count` blocks from `number`, the next, in any order, at most
        `threads` at a time.

        With stream(read, slot, drawn), only the blocks that were read ahead come to `work`. The others, as one read, are left to readers
        that all call `stream` and share the counter `drawn`, int64 [1], until it has no pieces left. Returns when all calls have ended; raises what one of them, or a reader, raised.
        """
        def call(read, data):
            self.files.multiply(read.nbytes, work, read, data)

        began, busy = time.perf_counter(), self.files.seconds["arithmetic"]
        with self._turn:
            self._claim(number, count)
            self._call, self._stream, self._most, self._failure = call, stream, threads, None
            self._until = number + count
            self._at = min(max(number, self._issued), self._until)
            self._left = count if stream is None else self._at - number
            self._rest = self._read(self._at).through(self._read(self._until - 1)) if self._at < self._until else None
            self._drawn = np.zeros(1, np.int64)
            self._issued = max(self._issued, self._until)
            self._due = [n for n in range(number, self._at) if n in self._filled]
            self._work.notify_all()
            try:
                while not self._all_done() and self._failure is None and not self._stopped:
                    self._news.wait()
            finally:
                self._failed = not self._all_done() or self._failure is not None
                self._call, self._at, self._until = None, 0, 0
                self._drawn[0] = EXHAUSTED
                self._due.clear()
                while self._calling:
                    self._news.wait()
            busy = self.files.seconds["arithmetic"] - busy
            self.wait_seconds += max(0.0, time.perf_counter() - began - busy / min(threads, CORES))
            self._check_open()
            if self._failure is not None:
                raise self._failure

    def _all_done(self):
        return not (self._left or self._at < self._until or self._calling)

    def _claim(self, number, count):
        self._check_open()
        if number != self._taken:
            raise RuntimeError(f"block {number} is asked for, but block {self._taken} is next")
        self._taken += count

    def _check_open(self):
        if self._stopped:
            raise RuntimeError("the ring is closed")

    def begin(self):
        "Number of the block that starts a pass: the next one, if the pass before has ended well; else the ring is rewound."
        with self._turn:
            out = self._issued < self._taken or any(number < self._taken for number in self._slot)
            if out or self._failed or (self._taken - self._first) % len(self.reads):
                self._rewind()
            return self._taken

    def _rewind(self):
        "Drop what was read ahead and what was not given back, and begin again at the first read."
        self._paused, self._failed = True, False
        try:
            while self._busy:
                self._news.wait()
            self._first = self._taken = self._issued
            self._slot, self._filled, self._free = {}, {}, [*range(self.slots)]
        finally:
            self._paused = False
            self._work.notify_all()

    def close(self):
        "End the readers; whoever waits for a block gets a RuntimeError."
        with self._turn:
            self._stopped = True
            self._work.notify_all()
            self._news.notify_all()
        for thread in self._readers:
            thread.join()
        self.memory = []

    def _serve(self):
        "A reader's life: under the lock settle the last job and choose the next, outside it do that."
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
        """(block, slot, call): a block of the open matrix that was read ahead, else one to read ahead, else one of the matrix; block None
        for whoever streams what is left of it. None while there is no slot for it."""
        call = self._call if self._calling < self._most else None
        number = slot = None
        if self._due and call is not None:
            number = self._due.pop()
            slot = self._slot[number]
        elif self._free and not self._paused:
            if self._reads_ahead():
                number, call = self._issued, None
                self._issued += 1
            elif call is None or self._at == self._until:
                return None
            elif self._stream is None:
                number = self._at
                self._at += 1
            slot = self._free.pop()
            if number is not None:
                self._slot[number] = slot
        if slot is None:
            return None
        self._busy += 1
        self._calling += call is not None
        if self._waiting and (self._free or self._due):
            self._work.notify()
        return number, slot, call

    def _reads_ahead(self):
        "Whether the next free reader goes beyond the open matrix. While that has blocks to read one at a time does, and never into the last slot."
        coming = self._busy - self._calling
        open_matrix = self._at < self._until
        return len(self._filled) + coming < self.ahead and not (open_matrix and (coming or len(self._free) == 1))

    def _read(self, number):
        return self.reads[(number - self._first) % len(self.reads)]

    def _do(self, number, slot, call):
        "The block's data, or None if they, or the rest of the matrix, were given to `call` or streamed; or what was raised."
        try:
            memory = self.memory[slot]
            if number is None:
                return self._stream(self._rest, memory, self._drawn)
            data = self._filled.pop(number, None)
            if data is None:
                data = self._fill(memory, self._read(number))
            if call is None:
                return data
            if isinstance(data, BaseException):
                raise data
            call(self._read(number), data)
        except BaseException as error:  # whatever it is, the consumer must hear of it
            return error

    def _fill(self, slot, read):
        start = self.files.read(slot, read.extent, read.begin, read.nbytes, read.part)
        return typed(slot, start, read.nbytes, read.extent.dtype)

    def _settle(self, number, slot, call, result):
        self._busy -= 1
        if call is None:
            self._filled[number] = result
            if number < self._until:  # its matrix was opened meanwhile
                self._due.append(number)
            self._news.notify()
            return
        self._calling -= 1
        if number is None:
            self._at = self._until
            self._free.append(slot)
        else:
            self._left -= 1
            self._give_back(number)
        if result is not None:
            self._failure = result
        if self._all_done() or self._failure is not None or self._call is None:
            self._news.notify()

    def _give_back(self, number):
        slot = self._slot.pop(number, None)
        if slot is not None:
            self._free.append(slot)


__all__ = [
    "Prefetcher",
]
