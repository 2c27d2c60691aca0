"""5.11 One reader pool

Made from book/05_streaming/11_prefetch.py: edit that, then run `make export`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
import numpy as np
from k3lib.parallel import CORES, EXHAUSTED, next_item


class Entry:
    """A block on its way through `buffer`. `lent`: the buffer is the pool's. `data`: what read() returned or raised, None until then.

    A job to stream is an Entry whose `block` is None: a buffer and nothing in it.
    """

    __slots__ = "block", "buffer", "data", "lent"

    def __init__(self, block: Any, buffer: Any, lent: bool, data: Any = None):
        self.block, self.buffer, self.lent, self.data = block, buffer, lent, data


class Batch:
    """The blocks of one call of map_blocks.

    `entries`: those that are being read, or have been read and not yet taken for work. `rest`: the blocks that nobody had begun when the batch
    was opened; `cursor`, int64 [1], counts how many items of it were taken, and `rest_done` says that a stream() has found no more.
    `limit`: how many jobs may work or stream at a time. `failure`: what one of them raised.
    """

    def __init__(self, entries: list[Entry], rest: list, work: Callable, stream: Callable, limit: int):
        self.entries, self.rest, self.work, self.stream, self.limit = entries, rest, work, stream, limit
        self.cursor, self.rest_done = np.zeros(1, np.int64), not rest
        self.failure: BaseException | None = None

    def take_read(self) -> Entry | None:
        "Remove and return an entry that has been read: the one read last, because it is still in a cache."
        for i in reversed(range(len(self.entries))):
            if self.entries[i].data is not None:
                return self.entries.pop(i)
        return None


class Prefetcher:
    """`readers` threads that read blocks ahead of the arithmetic and call the arithmetic on what they have read.

    read(block, buffer) -> data fills `buffer`, one of the page buffers `buffers`, or the block's own memory where memory(block) is not None.
    At most `read_ahead` blocks wait for their batch. `name` is that of the threads and of errors.

    Every field below is guarded by `_lock`. Whenever nobody holds it:
    - A buffer of the pool is in exactly one place: in `_free` (the one used last at the end), in an entry, or with a job that streams.
    - An entry is in exactly one place: in `_ahead` (in order, before its batch is opened), in `_batch.entries`, or with a job that works.
      So one call uses its data, and its buffer becomes free when that call has ended, never before.
    - `_order[_next:]` are the blocks that nobody has begun; if `_cyclic`, the order begins again after its last block.
    - `_batch` is the batch that is open, or None. `_reading` jobs read ahead; `_working` jobs work or stream, at most `_batch.limit`,
      and none when map_blocks has returned or raised.
    - `_sound` is False from the moment map_blocks begins until it ends well: what an interrupt has left is good for restart() alone.
    Readers wait for `_work`, of whom `_idle` do now; the caller waits for `_news`. The lock is an RLock although nobody takes it twice: Ctrl-C can
    interrupt a wait while it takes a plain lock again, and would then give back a lock that another thread holds.
    """

    def __init__(self, read: Callable, buffers: list, readers: int, read_ahead: int, name: str, memory: Callable | None = None):
        if not buffers or readers < 1:
            raise ValueError(f"{name}: {len(buffers)} buffers and {readers} readers bring nothing")
        self._read, self._buffers, self._read_ahead, self.name = read, buffers, read_ahead, name
        self._memory = memory or (lambda block: None)
        self.wait_seconds = 0.0  # the caller stood still for bytes
        self.busy_seconds = 0.0  # processor time of the arithmetic, over all readers
        self._lock = threading.RLock()
        self._work, self._news = threading.Condition(self._lock), threading.Condition(self._lock)
        self._order: list = []
        self._next, self._cyclic, self._sound, self._closed = 0, False, True, False
        self._free, self._ahead = list(buffers), deque[Entry]()
        self._batch: Batch | None = None
        self._reading = self._working = self._idle = 0
        self._threads = [threading.Thread(target=self._serve, name=f"k3-{name}-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def restart(self, order: list, cyclic: bool = False) -> None:
        """Forget all blocks and what an interrupted batch has left, once the jobs under way have ended; then read ahead in `order`.

        `cyclic`: after the last block of `order` comes the first one again, without end.
        """
        with self._lock:
            self._sound = False
            self._end_batch()
            self._order, self._next = [], 0  # so nobody begins a job
            while self._reading or self._working:
                self._news.wait()
            self._check_open()
            self._ahead.clear()
            self._free = list(self._buffers)
            self._order, self._cyclic, self._sound = order, cyclic, True
            self._work.notify_all()

    def at_start(self) -> bool:
        "True if the next block of a batch is the first of the order, and nothing was interrupted."
        with self._lock:
            return self._sound and (self._next - len(self._ahead)) % max(1, len(self._order)) == 0

    def _end_batch(self):
        "Begin no more jobs of the open batch; those that stream find nothing more."
        if self._batch is not None:
            self._batch.cursor[0] = EXHAUSTED
            self._batch = None

    def _check_open(self):
        if self._closed:
            raise RuntimeError(f"{self.name}: the readers have ended, the model is closed")

    def map_blocks(self, blocks: list, work: Callable, stream: Callable, limit: int, present: list[tuple] = []) -> None:
        """Have the readers work on `blocks`, the next of the order, in any order, with at most `limit` jobs at a time.

        work(block, data) is called on each block that was read ahead, and on `present`, (block, data) that need no read. All other blocks
        are given to stream(rest, buffer, cursor) -> processor seconds, which may run on several readers at a time, each with a buffer of
        its own, and returns when items(rest, cursor) has no more. Raises what a call or a read raised; RuntimeError if the pool is
        closed or the blocks are not the next.
        """
        began, busy = time.perf_counter(), self.busy_seconds
        with self._lock:
            self._check_open()
            self._sound = False
            try:
                batch = self._batch = self._open(blocks, Batch([Entry(block, None, False, data) for block, data in present], [], work, stream, limit))
                self._work.notify_all()
                while not (self._finished(batch) or batch.failure or self._closed):
                    self._news.wait()
            finally:
                self._end_batch()
                while self._working:
                    self._news.wait()
            seconds = time.perf_counter() - began
            self.wait_seconds += max(0.0, seconds - (self.busy_seconds - busy) / min(limit, CORES))
            if batch.failure is not None:
                raise batch.failure
            self._check_open()
            self._sound = True

    def _open(self, blocks, batch):
        "Put the next len(blocks) blocks of the order into `batch`; those that were read ahead are its entries, the others its rest."
        begun = [self._ahead.popleft() for _ in range(min(len(blocks), len(self._ahead)))]
        end = self._next + len(blocks) - len(begun)
        batch.rest = self._order[self._next:end]
        if [entry.block for entry in begun] + batch.rest != blocks:
            raise RuntimeError(f"{self.name}: these blocks are not the next ones, a batch before them was left out")
        self._next = 0 if self._cyclic and end == len(self._order) else end
        batch.entries += begun
        batch.rest_done = not batch.rest
        return batch

    def _finished(self, batch):
        return batch.rest_done and not batch.entries and not self._working

    def close(self) -> None:
        "End the readers, once their reads have ended, and let go of the buffers. A caller that waits gets a RuntimeError."
        with self._lock:
            self._closed = True
            self._work.notify_all()
            self._news.notify_all()
        for thread in self._threads:
            thread.join()
        self._buffers, self._free = [], []
        self._ahead.clear()

    def _serve(self):
        "The life of a reader."
        job = outcome = None
        while True:
            with self._lock:
                if job is not None:
                    self._settle(*job, outcome)
                while not self._closed and (job := self._choose()) is None:
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                if self._closed:
                    return
            outcome = self._do(*job)

    def _choose(self):
        "The next job, (entry, batch), or None: work or stream for `batch`, or read ahead where `batch` is None."
        batch = self._batch
        may_work = batch is not None and batch.failure is None and self._working < batch.limit
        if may_work and (entry := batch.take_read()) is not None:
            self._working += 1
        elif (entry := self._begin_read(may_work)) is not None:
            batch = None
            self._reading += 1
        elif may_work and not batch.rest_done and self._free:
            entry = Entry(None, self._free.pop(), True)
            self._working += 1
        else:
            return None
        if self._idle and (self._free or self._batch is not None and self._batch.entries):
            self._work.notify()
        return entry, batch

    def _begin_read(self, may_work):
        "An entry for the block to be read ahead now, put where it belongs; or None."
        batch = self._batch
        streaming = batch is not None and not batch.rest_done
        waiting = len(self._ahead) + (len(batch.entries) if batch is not None else 0)
        if waiting >= self._read_ahead or streaming and self._reading:
            return None
        lendable = len(self._free) > streaming  # the last one is for the stream
        if self._next < len(self._order):
            entry = self._entry(self._order[self._next], lendable)
            if entry is not None:
                self._next = 0 if self._cyclic and self._next + 1 == len(self._order) else self._next + 1
                self._ahead.append(entry)
            return entry
        if streaming and lendable and not may_work and (i := next_item(batch.cursor)) < len(batch.rest):
            entry = self._entry(batch.rest[i], True)
            batch.entries.append(entry)
            return entry
        return None

    def _entry(self, block, lendable):
        memory = self._memory(block)
        if memory is not None:
            return Entry(block, memory, False)
        return Entry(block, self._free.pop(), True) if lendable else None

    def _do(self, entry, batch):
        "Without the lock: the data of a read, the processor seconds of arithmetic, or what was raised."
        try:
            if batch is None:
                return self._read(entry.block, entry.buffer)
            if entry.block is None:
                return batch.stream(batch.rest, entry.buffer, batch.cursor)
            if isinstance(entry.data, BaseException):
                raise entry.data
            began = time.thread_time()
            batch.work(entry.block, entry.data)
            return time.thread_time() - began
        except BaseException as error:  # whatever it is, the caller must hear of it
            return error

    def _settle(self, entry, batch, outcome):
        "Under the lock: write down what has become of a job."
        if batch is None:
            self._reading -= 1
            entry.data = outcome
        else:
            self._working -= 1
            batch.rest_done |= entry.block is None
            if entry.lent:
                self._free.append(entry.buffer)
            if isinstance(outcome, BaseException):
                batch.failure = batch.failure or outcome
                batch.cursor[0] = EXHAUSTED
            else:
                self.busy_seconds += outcome
        if self._batch is None or self._batch.failure or self._finished(self._batch):
            self._news.notify()


def items(rest: list, cursor: np.ndarray) -> Iterator:
    "Items of `rest` that no other reader takes, as long as `cursor` gives some."
    while (i := next_item(cursor)) < len(rest):
        yield rest[i]


__all__ = [
    "Entry", "Batch", "Prefetcher", "items",
]
