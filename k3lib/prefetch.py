"""5.11 One reader pool

Made from book/05_streaming/11_prefetch.py: edit that, then run `make export`.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np

from k3lib.parallel import CORES, EXHAUSTED, next_item


def items(rest: list, cursor: np.ndarray) -> Iterator[Any]:
    "Yield the items of `rest` that this thread claims through `cursor`, int64 [1], until none is left."
    while (i := next_item(cursor)) < len(rest):
        yield rest[i]


class Entry:
    """A block on its way through `buffer`. `lent`: the buffer belongs to the pool and goes back to it.

    `data`: what read() has returned or raised, or what the caller gave; None until then. An Entry whose `block` is None
    is the buffer through which one reader streams.
    """

    __slots__ = "block", "buffer", "data", "lent"

    def __init__(self, block: Any, buffer: Any, lent: bool, data: Any = None):
        self.block, self.buffer, self.lent, self.data = block, buffer, lent, data


class Batch:
    """The blocks of one call of map_blocks.

    `entries`: the blocks that are being read, or that have been read and that no job has taken yet. `rest`: the blocks
    that no job had begun when the batch was opened. `cursor`, int64 [1]: the next item of the rest; it may be past all.
    `rest_done`: the rest was empty, or a call of stream() has returned. `limit`: how many jobs may work or stream at a
    time. `failure`: what the first job that failed has raised.
    """

    def __init__(self, entries: list[Entry], rest: list, work: Callable, stream: Callable, limit: int):
        self.entries, self.rest, self.work, self.stream, self.limit = entries, rest, work, stream, limit
        self.cursor, self.rest_done = np.zeros(1, np.int64), not rest
        self.failure: BaseException | None = None

    def take_read(self) -> Entry | None:
        "Remove and return an entry that has been read: the last one, which is most likely to be in a cache still."
        for i in reversed(range(len(self.entries))):
            if self.entries[i].data is not None:
                return self.entries.pop(i)
        return None

    def take_failure(self) -> BaseException:
        "Remove and return the failure: kept here, it would hold the frame that raises it, which holds this batch."
        failure, self.failure = self.failure, None
        assert failure is not None
        return failure


class Prefetcher:
    """`readers` threads that read blocks ahead of the arithmetic, and call the arithmetic on what they have read.

    read(block, buffer) -> data fills `buffer`: one of the page buffers `buffers`, or the block's own memory where
    memory(block) is not None. No block is read ahead while `read_ahead` blocks wait for work, those of the open batch
    included. Threads and errors carry `name`.
    `busy_seconds`: processor time of the arithmetic, summed over the readers. `wait_seconds`: an estimate of how long
    the arithmetic waited for bytes, the duration of map_blocks less what `busy_seconds` explains with as many cores as
    may work. Raises ValueError without buffers or readers. Dropping the pool ends the readers, too, if `read` and
    `memory` do not refer to its owner.

    One thread, the caller, uses restart, at_start and map_blocks. `_lock` guards every change of a field; 5.11.3 names
    the exceptions. While nobody holds the lock, no restart is under way and no batch was interrupted or has failed
    since the last one:
    1. A buffer of the pool is either in `_free` or in exactly one entry.
    2. An entry is in exactly one place: in `_ahead` or in `_batch.entries`, also while its block is being read, or with
       the one job that works on it or streams through it. Its buffer becomes free when that job has ended.
    3. The next blocks are those of `_ahead`, then `_order[_next:]`, then, if `_cyclic`, those of `_order` again.
    4. `_reading` is the number of jobs that read ahead. `_working`, at most `_batch.limit`, is the number that work or
       stream; it is 0 when map_blocks has returned. `_batch` is the open batch or None.
    5. `_sound` is True in a new pool, and if the last map_blocks() or restart() has succeeded. After a failure
       map_blocks() raises until restart() has waited for all jobs and made the state from nothing.
    6. A reader that waits is counted in `_idle`, or a token for it is in `_wake`.
    """

    def __init__(self, read: Callable[[Any, Any], Any], buffers: list, readers: int, read_ahead: int, name: str,
                 memory: Callable[[Any], Any] | None = None):
        if not buffers or readers < 1:
            raise ValueError(f"{name}: {len(buffers)} buffers and {readers} readers, at least one of each is needed")
        self.name, self.wait_seconds, self.busy_seconds = name, 0.0, 0.0
        self._read, self._buffers, self._read_ahead, self._memory = read, buffers, read_ahead, memory
        self._lock = threading.RLock()  # with a plain Lock, Ctrl-C in a wait could release a reader's lock
        self._for_caller, self._wake = threading.Condition(self._lock), SimpleQueue[object]()
        self._order: list = []
        self._next, self._cyclic, self._sound, self._closed = 0, False, True, False
        self._free, self._ahead = list(buffers), deque[Entry]()
        self._batch: Batch | None = None
        self._reading = self._working = self._idle = 0
        self._threads: list[threading.Thread] = []
        self._start(readers)

    def _start(self, readers):
        "Start the threads, all or none."
        try:
            for i in range(readers):
                this = weakref.ref(self, self._wake.put)  # one for each: its death puts a token for each
                thread = threading.Thread(target=_serve, args=(this, self._lock, self._wake),
                                          name=f"k3-{self.name}-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # no thread left, or Ctrl-C: no caller has this pool yet to close it
            self.close()
            raise

    def restart(self, order: list, cyclic: bool = False) -> None:
        """Wait for the jobs under way, forget all blocks, those of a failed batch included, and begin `order`.

        `cyclic`: after the last block of `order` comes the first one again, without end. Raises RuntimeError if the
        pool is closed.
        """
        with self._lock:
            was_sound, self._sound = self._sound, False
            self._end_batch()
            self._order, self._next = [], 0  # so no reader begins a job
            while self._reading or self._working:
                self._for_caller.wait()
            self._check_open()
            self._ahead.clear()
            self._free = list(self._buffers)
            self._order, self._cyclic = order, cyclic
            self._rouse(self._idle if was_sound else len(self._threads))
            self._sound = True

    def at_start(self) -> bool:
        "True if a cyclic order is at its first block and the last map_blocks() or restart() has succeeded."
        with self._lock:
            return self._sound and (self._next - len(self._ahead)) % max(1, len(self._order)) == 0

    def _end_batch(self):
        "Close the open batch: none of its jobs begins any more, and those that stream find no item left."
        if self._batch is not None:
            self._batch.cursor[0] = EXHAUSTED
            self._batch = None

    def _rouse(self, readers):
        "Wake so many readers that wait."
        self._idle = max(0, self._idle - readers)
        for _ in range(readers):
            self._wake.put(None)

    def _check_open(self):
        if self._closed:
            raise RuntimeError(f"{self.name}: the readers have ended because the model is closed")

    def map_blocks(self, blocks: list, work: Callable[[Any, Any], object], stream: Callable[[list, Any, Any], float],
                   limit: int, present: Iterable[tuple[Any, Any]] = ()) -> None:
        """Have the readers work on `blocks`, the next ones of the order, with at most `limit` jobs at a time.

        The blocks may finish in any order. work(block, data) is called on each block that was read ahead, and on
        `present`, pairs (block, data) that need no read. All other blocks are given to stream(rest, buffer, cursor) ->
        processor seconds. It may run on several readers at a time, each with a buffer of its own, and returns when
        `cursor` has no item left. In an order that is not cyclic, one step of the cursor must be one block, as items()
        does it: readers that wait for their turn to work claim blocks from the same cursor to read them ahead.

        Raises what a call or a read has raised; RuntimeError if the pool is closed, if `blocks` are not the next ones,
        or if the batch before has failed and restart() was not called.
        """
        began, busy = time.perf_counter(), self.busy_seconds
        with self._lock:
            self._check_open()
            if not self._sound:
                raise RuntimeError(f"{self.name}: the batch before was interrupted or has failed: call restart() first")
            self._sound = False
            try:
                batch = self._batch = self._open(blocks, work, stream, limit, present)
                self._rouse(self._idle)
                while not (self._finished(batch) or batch.failure or self._closed):
                    self._for_caller.wait()
            finally:
                self._end_batch()
                while self._working:
                    self._for_caller.wait()
            seconds = time.perf_counter() - began
            self.wait_seconds += max(0.0, seconds - (self.busy_seconds - busy) / min(limit, CORES))
            if batch.failure is not None:
                raise batch.take_failure()
            self._check_open()
            self._sound = True

    def _open(self, blocks, work, stream, limit, present):
        "The Batch of the next len(blocks) blocks: those that were read ahead are its entries, the others its rest."
        begun = [self._ahead.popleft() for _ in range(min(len(blocks), len(self._ahead)))]
        end = self._next + len(blocks) - len(begun)
        rest = self._order[self._next:end]
        if [entry.block for entry in begun] + rest != blocks:
            raise RuntimeError(f"{self.name}: these blocks are not the next ones: a batch before them was left out")
        self._next = 0 if self._cyclic and end == len(self._order) else end
        entries = [Entry(block, None, False, data) for block, data in present]
        return Batch(entries + begun, rest, work, stream, limit)

    def _finished(self, batch):
        return batch.rest_done and not batch.entries and not self._working

    def close(self) -> None:
        "End the readers once their reads have ended, and let go of the buffers. A waiting caller gets a RuntimeError."
        with self._lock:
            self._closed = True
            self._rouse(len(self._threads))
            self._for_caller.notify_all()
        for thread in self._threads:
            thread.join()
        self._buffers, self._free = [], []
        self._ahead.clear()

    def _begin_job(self):
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
            self._rouse(1)
        return entry, batch

    def _begin_read(self, may_work):
        "The entry of a block to read ahead now, already in `_ahead` or in the open batch; None if there is none."
        batch = self._batch
        streaming = batch is not None and not batch.rest_done
        waiting = len(self._ahead) + (len(batch.entries) if batch is not None else 0)
        if waiting >= self._read_ahead or streaming and self._reading:
            return None
        lendable = len(self._free) > (1 if streaming else 0)  # the last one is for a reader that streams
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
        "An Entry of `block` with its own memory, or else with a buffer of the pool; None if there is neither."
        memory = self._memory(block) if self._memory is not None else None
        if memory is not None:
            return Entry(block, memory, False)
        return Entry(block, self._free.pop(), True) if lendable else None

    def _do(self, entry, batch):
        "Do a job, without the lock: the data of a read, the processor seconds of arithmetic, or what was raised."
        try:
            if batch is None:
                return self._read(entry.block, entry.buffer)
            if entry.block is None:
                return float(batch.stream(batch.rest, entry.buffer, batch.cursor))
            if isinstance(entry.data, BaseException):
                raise entry.data
            began = time.thread_time()
            batch.work(entry.block, entry.data)
            return time.thread_time() - began
        except BaseException as error:  # of any kind: map_blocks raises it in the caller
            return error
        finally:
            del self, entry, batch  # an error holds this frame; through it, it would hold the pool

    def _settle(self, entry, batch, outcome):
        "Under the lock: record the outcome of a job."
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
            else:
                self.busy_seconds += outcome
        if self._batch is None or self._batch.failure or self._finished(self._batch):
            self._for_caller.notify()


def _serve(pool_reference, lock, wake):
    """What a reader runs: settle its last job, choose the next one and do it, until the pool is closed or dropped.

    `lock`, `wake`: the pool's own `_lock` and `_wake`. Without a job the reader waits for `wake`, and refers to
    neither pool nor block.
    """
    job = outcome = None
    while (pool := pool_reference()) is not None:
        with lock:
            if job is not None:
                pool._settle(*job, outcome)
            job = outcome = None
            closed = pool._closed
            if not closed and (job := pool._begin_job()) is None:
                pool._idle += 1
        if job is not None:
            outcome = pool._do(*job)
        pool = None
        if closed:
            return
        if job is None:
            wake.get()
    del job, outcome  # an error holds this frame, too


__all__ = [
    "items", "Entry", "Batch", "Prefetcher",
]
