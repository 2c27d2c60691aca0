# %% [markdown]
# # 5.11 One reader pool
#
# A forward pass knows which bytes it needs next. So threads can read them while the arithmetic is busy with others, and
# the same threads can do the arithmetic on what they have just read, while it is still in their core's cache. This
# chapter builds the one machine that does both, for the trunk (5.13) and for the experts (5.16). At the end you can
# argue, on a page, why no buffer is filled while it is in use.
#
# [5.10 How a budget's bytes are laid out](10_layout.ipynb) ·
# [contents](../README.md) ·
# [5.12 Read, multiply, read, multiply](12_read_multiply.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | block | what is read together: rows of a matrix, an expert. The pool does not look inside | whatever `read` understands |
# | page buffer | memory that holds one block at a time, lent by the pool | `_free` |
# | order | the sequence in which blocks will be used | `restart` |
# | batch | the next blocks of the order, worked on together: a matrix, a request of experts | `map_blocks` |
# | reader | a thread that reads, and works on what was read | `_serve` |
# | read-ahead | reading a block before its batch is opened | `_ahead` |

# %% [markdown]
# ## 5.11.1 By hand: six blocks, two buffers
#
# A matrix of six blocks and two buffers. `r` is a read that arrives, `x` the product with its rows. Blocks are read
# while others are multiplied, because the order is known; but no read enters a buffer before the `x` of the block in it
# is done.

# %%
def schedule(blocks, buffers, read, multiply):
    "(begin, end) of every read and every product, one reader, when a read takes `read` ticks and a product `multiply`."
    reads, products = [], []
    for b in range(blocks):
        free = products[b - buffers][1] if b >= buffers else 0
        begin = max(free, reads[-1][1] if reads else 0)
        reads.append((begin, begin + read))
        begin = max(reads[b][1], products[-1][1] if products else 0)
        products.append((begin, begin + multiply))
    return reads, products


def drawn(spans, letter):
    line = ["."] * 26
    for b, (begin, end) in enumerate(spans):
        line[begin:end] = [letter + str(b)[-1]] * (end - begin)
    return " ".join(f"{cell:>2}" for cell in line[:19])


for buffers in (1, 2):
    reads, products = schedule(6, buffers, read=2, multiply=1)
    print(f"{buffers} buffer{'s' * (buffers > 1)}: {products[-1][1]} ticks")
    print("  disk ", drawn(reads, "r"))
    print("  core ", drawn(products, "x"))
assert [schedule(6, buffers, 2, 1)[1][-1][1] for buffers in (1, 2, 9)] == [18, 13, 13]

# %% [markdown]
# With one buffer the times add up: $6(2 + 1)$. With two they overlap, and what remains is the slower of the two plus
# one lead-in: $6 \cdot 2 + 1$. More buffers change nothing here; they are for reads and products that do not always
# take equally long.
#
# ## 5.11.2 Three jobs
#
# A reader without work chooses a job under the pool's one lock and does it without the lock. There are three:
#
# 1. **Work.** A block of the open batch has been read ahead: call `work(block, data)` on it.
# 2. **Read ahead.** Read a block of a batch that is not open yet into a free buffer.
# 3. **Stream.** Blocks of the open batch that nobody has begun to read are its *rest*. Call `stream(rest, buffer,
#    cursor)`: it takes items of the rest from a counter that all streaming readers share, and brings each through its
#    one buffer, reading and working in turn.
#
# The third job exists because choosing a job costs as much as multiplying a megabyte. A matrix of 176 MB has 85 blocks.
# As one job with a shared counter they cost one choice a reader, and all readers finish within an item of each other.
#
# While a rest is streamed, one reader at a time still reads ahead, so that a device is never idle when the batch ends;
# but it never takes the last free buffer. What waits longer than for a few blocks would have left the cache when its
# turn comes, so `read_ahead` limits what waits.
#
# ## 5.11.3 What is true whenever nobody holds the lock
#
# An entry is a block on its way through memory. The pool's state is small enough to be written down whole; `restart`
# can make it from nothing.

# %% tags=["export"]
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
import numpy as np
from k3lib.parallel import CORES, EXHAUSTED, next_item


# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# ## 5.11.4 The caller's side
#
# Three calls. `restart` gives a new order; what was read ahead of the old one is dropped. Because every job has ended
# by then, nothing of the old state is needed: all buffers are free again, whatever an interrupt may have left half
# done.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# `map_blocks` opens a batch and returns when all of it has been worked on. It can end early in three ways: a job fails,
# the pool is closed, or Ctrl-C interrupts the caller at any line. In all three it waits for the jobs of the batch
# before it raises, because they use the caller's arrays.
#
# The blocks that the caller names must be the next of the order. A caller that leaves out a matrix gets an error, never
# the rows of another.
#
# What is waiting? The wall time of the call, less the processor time of its arithmetic over the threads it had.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# ## 5.11.5 The readers' side
#
# A reader settles its last job and chooses its next one in one visit to the lock. A finished job wakes another reader
# only when there is something to do for it: waking a thread for nothing costs as much as a small read.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# Which block is read ahead? The next of the order. Once the order has been used up, as that of a request of experts is
# when its batch is opened, a reader that may not work takes items of the rest and reads those: they become entries of
# the batch.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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
