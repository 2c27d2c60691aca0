# %% [markdown]
# # 5.11 One reader pool
#
# A forward pass knows which bytes it needs next. So threads can read them while the arithmetic is busy with others, and
# the same threads can do the arithmetic on what they have just read, while it is still in their core's cache. This
# chapter builds the one machine that does both, for the trunk (5.13) and for the experts (5.16). At the end you can
# show, from a page of invariants, why no buffer is filled while it is in use.
#
# Needs chapters [1.4] (threads), [5.9] (the disk) and [5.10] (the layout). Runs in half a minute. Makes
# `k3lib.prefetch`.
#
# [5.10 How a budget's bytes are laid out](10_layout.ipynb) ·
# [contents](../README.md) ·
# [5.12 Read, multiply, read, multiply](12_read_multiply.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | block | what is read together: rows of a matrix, an expert. The pool does not look inside | whatever `read` understands |
# | page buffer | memory that holds one block at a time, lent by the pool | `buffers` |
# | order | the sequence in which blocks will be used | `restart` |
# | batch | the next blocks of the order, worked on together: a matrix, a request of experts | `map_blocks` |
# | reader | a thread that reads, and works on what was read | `_serve` |
# | read-ahead | reading a block before its batch is opened | `_ahead` |
# | caller | the one thread that calls `restart` and `map_blocks` | |
#
# [1.4]: ../01_mxfp4/04_parallel.ipynb
# [5.9]: 09_disk.ipynb
# [5.10]: 10_layout.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "readers")


# %% [markdown]
# ## 5.11.1 By hand: six blocks, two buffers
#
# A matrix of six blocks, read in order. `r` is a read, `x` the product with its rows. Blocks are read while others are
# multiplied, because the order is known. But no read may enter a buffer before the `x` of the block in it is done.

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
# 2. **Read ahead.** Read a block before a job asks for it, into a free buffer or into the block's own memory. Most
#    often the block belongs to a batch that is not open yet ([5.11.5]).
# 3. **Stream.** Blocks of the open batch that nobody has begun to read are its *rest*. Call `stream(rest, buffer,
#    cursor)`: it takes items of the rest from a counter that all streaming readers share, and brings each through its
#    one buffer, reading and working by turns.
#
# The third job exists because choosing a job costs as much as multiplying a megabyte. A matrix of 176 MB has 85 blocks.
# As one job with a shared counter it costs one choice a reader, and all readers finish within an item of each other.
#
# While a rest is streamed, one reader at a time still reads ahead, so that a device has something to do when the batch
# ends. It never takes the last free buffer, which belongs to a reader that streams. And no more than `read_ahead`
# blocks wait: a block that waits longer would have left the cache when its batch is opened.
#
# [5.11.5]: #5.11.5-The-readers'-side

# %%
schematics.readers(read_config(ROOT / "fixtures/k3"))

# %% tags=["export"]
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np

from k3lib.parallel import CORES, EXHAUSTED, next_item


# %% [markdown]
# `stream` decides what an item of the rest is: a block, or a unit of a block's rows (5.12). If it is a block, `stream`
# takes it from `items`.

# %% tags=["export"]
def items(rest: list, cursor: np.ndarray) -> Iterator[Any]:
    "Yield the items of `rest` that this thread claims through `cursor`, int64 [1], until none is left."
    while (i := next_item(cursor)) < len(rest):
        yield rest[i]


# %% [markdown]
# Two small records. An entry is a block on its way through memory. A batch is what one call of `map_blocks` works on.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.11.3 What is true whenever nobody holds the lock
#
# This is the state of a pool. One lock, `_lock`, guards every change of it. Two more fields change under the lock and
# may be read without it: the sums `busy_seconds` and `wait_seconds`. Four things need no lock. The cursor of a batch
# is atomic, and so is the queue `_wake`. `_threads` belongs to the thread that makes and closes the pool. And `close`
# lets go of buffers and entries when all readers have ended.
#
# | field | meaning |
# |---|---|
# | `_order`, `_cyclic` | the blocks as they will be used; after the last one, does the order begin again? |
# | `_next` | index in `_order` of the first block that nobody has begun |
# | `_free` | buffers that hold nothing; the one used last is at the end and goes out first |
# | `_ahead` | entries, in order, that are being or have been read before their batch is opened |
# | `_batch` | the open batch, or None |
# | `_reading`, `_working` | jobs under way that read ahead; that work or stream |
# | `_idle` | readers that wait for a job and that nobody has woken |
# | `_wake` | a queue of tokens: a reader without a job waits for one |
# | `_sound` | no `restart` and no `map_blocks` is under way, and the last one has succeeded |
# | `_closed` | the readers are to end |
#
# While nobody holds the lock, no `restart` is under way, and no batch was interrupted or has failed since the last one:
#
# 1. **Buffers.** Each buffer of the pool is either in `_free` or in exactly one entry.
# 2. **Entries.** Each entry is in exactly one place: in `_ahead`, in `_batch.entries`, or with the one job that works
#    on it or streams through it. While its block is being read, the entry stays in `_ahead` or `_batch.entries`, and
#    its `data` is None. A job takes the entry out only when `data` is there.
# 3. **Blocks.** The next blocks are those of `_ahead`, then `_order[_next:]`, then, if `_cyclic`, those of `_order`
#    again.
# 4. **Jobs.** At most `_batch.limit` jobs work or stream. When `map_blocks` has returned, none does.
# 5. **Soundness.** `_sound` is True in a new pool, and if the last `map_blocks` or `restart` has succeeded. A batch
#    that fails or is interrupted keeps its entries and the buffers in them, and `map_blocks` raises until a `restart`
#    has succeeded.
# 6. **Waking.** A reader that waits is counted in `_idle`, or there is a token for it in `_wake`. Whoever puts a token
#    takes one reader off `_idle`. There may be more tokens than readers that wait: a reader that finds one for nothing
#    looks for a job once more.
#
# Why is no buffer filled while it is in use? A read fills the block's own memory, which no other block has, or it takes
# a buffer from `_free`. While an entry is in use, its buffer
# is in that entry (1), which is with the one job that works on it (2). The buffer goes to `_free` when that job has
# ended. So it is not in `_free` before. The same holds for the entry through which a reader streams.
#
# After an interrupt the invariants are not repaired, because any of them may be broken: the caller may have been
# stopped between any two lines. `restart` waits until no job is under way. Then nothing uses a buffer, so all of them
# are free, and the state can be made from nothing. It puts a token for every reader, since the caller may have been
# stopped after it took a reader off `_idle` and before it put the token.
#
# The lock is an `RLock`, although nobody takes it twice. Ctrl-C can interrupt the caller in `Condition.wait()`, while
# it takes its lock again. With a plain `Lock`, the `with` block would then give back a lock that a reader holds. An
# `RLock` is taken again inside the interpreter, where no signal is heard.
#
# **A pool that is dropped.** A notebook cell that is run again forgets its model without closing it. So nothing may
# keep a pool alive but its owner. A reader has a weak reference to the pool, a strong one only for the length of a job,
# and none while it waits. The callback of that weak reference is the `put` of `_wake`: when the pool dies, every
# reader gets a token, looks for the pool, finds none, and ends. A pool can die anywhere: on one of its own readers,
# when the job has ended that kept it alive; or inside the garbage collector, between any two lines of any thread. A
# callback that took a lock could wait for the very thread that runs it. `SimpleQueue.put` takes none and is one step
# of C, so that no signal interrupts it, which is why readers wait for a queue and not for a condition. Nobody waits for
# the readers of a dropped pool. `read` and `memory` must not refer to the pool's owner, or the pool would keep its
# owner, and with it itself, alive.

# %% tags=["export"]
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


# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# ## 5.11.4 The caller's side
#
# `restart` gives a new order. What was read ahead of the old one is dropped. `at_start` tells a caller whose order is
# cyclic that the next block is the first one, so that what was read ahead need not be dropped.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# `map_blocks` opens a batch and returns when all of it has been worked on. It can end early in three ways: a job fails,
# the pool is closed, or Ctrl-C interrupts the caller at any line. In all three it waits for the jobs of the batch
# before it raises, because they use the caller's arrays. (A second Ctrl-C ends that wait too; then `restart` waits for
# those jobs.)
#
# How long has the caller waited for bytes? The wall time of the call, less the processor time of its arithmetic over
# the threads that it had.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# The blocks that the caller names must be the next of the order. A caller that leaves out a matrix gets an error, never
# the rows of another.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# ## 5.11.5 The readers' side
#
# A reader settles its last job and chooses its next one in one visit to the lock. It works if it can, else it reads
# ahead, else it streams. It wakes another reader only when there is something for it to do: waking a thread for nothing
# costs as much as a small read.
#
# Between two jobs the reader gives up its reference to the pool and asks for it anew. So a pool that was dropped
# meanwhile reads nothing ahead any more. `outcome` is forgotten when it has been recorded: it may be an error. An error
# holds the frames of the functions that it came through, and those that called them, with all their variables. So the
# reader's functions empty their variables, too: an error that a notebook shows must not keep a pool alive.

# %% tags=["export"]
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


# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# Which block is read ahead? The next of the order. An order that is not cyclic is used up when its last batch is
# opened; for the experts (5.16) that is at once, because a request is one batch. Then a reader that may not work, since
# the limit is reached, takes blocks from the rest and reads those. They become entries of the open batch.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# Doing a job needs no lock. Settling it does: a read becomes data, a buffer becomes free, and the batch keeps the first
# error. The caller is woken if it waits for this.

# %% tags=["export"]
class Prefetcher(Prefetcher):
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


# %% [markdown]
# ## 5.11.6 The gate: every block once, with its own bytes
#
# Blocks are numbers here, and reading one fills a buffer with it. A buffer that is filled while it is in use then shows
# another number. Reads and calls last at random; the order is cyclic and cut into batches at random.

# %%
rng = np.random.default_rng(0)
pauses = iter(rng.random(1 << 16) * 3e-4)


def fill(block, buffer):
    time.sleep(next(pauses))
    buffer[:] = block
    return buffer


def worked_on(pool, blocks):
    "The blocks of one batch, in the order in which the readers have worked on them."
    done = []

    def work(block, data):
        assert (data == block).all()
        time.sleep(next(pauses))
        assert (data == block).all(), "filled while it was in use"
        done.append(block)

    def stream(rest, buffer, cursor):
        for block in items(rest, cursor):
            work(block, fill(block, buffer))
        return 0.0

    pool.map_blocks(blocks, work, stream, limit=2)
    return done


def passes(pool, order, times):
    "Go through a cyclic order so many times; was any batch worked on in another order than its own?"
    pool.restart(order, cyclic=True)
    shuffled = False
    for _ in range(times):
        cuts = [0, *sorted(rng.choice(np.arange(1, len(order)), 4, replace=False).tolist()), len(order)]
        for begin, end in zip(cuts, cuts[1:]):
            done = worked_on(pool, order[begin:end])
            assert sorted(done) == order[begin:end]
            shuffled |= done != sorted(done)
    assert pool.at_start()
    return shuffled


pool = Prefetcher(fill, [np.zeros(64, np.int64) for _ in range(3)], readers=3, read_ahead=2, name="gate")
assert passes(pool, list(range(20)), times=20)
print("20 times through 20 blocks, three readers and three buffers: every block once, with its own bytes: True")


# %% [markdown]
# A batch that is left out is an error and not a shift. After an error or an interrupt only `restart` goes on.

# %%
def interrupted(*_):
    raise KeyboardInterrupt


def shown(call, *args):
    try:
        call(*args)
    except (RuntimeError, KeyboardInterrupt) as error:
        print(type(error).__name__, error)
    else:
        raise AssertionError("went on")
    assert not pool.at_start()


shown(worked_on, pool, [4, 5])
shown(worked_on, pool, [0, 1])
pool.restart([0, 1, 2])
shown(pool.map_blocks, [0, 1, 2], interrupted, interrupted, 2)
pool.restart([7, 8, 9])
assert sorted(worked_on(pool, [7, 8, 9])) == [7, 8, 9]
pool.close()

# %% [markdown]
# The tests go further: every moment at which Ctrl-C can be heard, reads that fail, reads that never end, and pools of
# every size. Three pools that break the rules meet the gate of the trunk ([5.13.3]).
#
# ## 5.11.7 Summary
#
# - A reader chooses work, a read ahead, or a stream, in this order, and does it without the lock.
# - A buffer is free or in one entry. It becomes free when the job that works on that entry has ended, never before.
# - An interrupted batch is not repaired: `restart` waits for the jobs and begins anew.
#
# **Exercises.** Answer to 1: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. In `schedule`, let a product take 3 ticks and a read 2. How many buffers are enough, and what is the total for $n$
#    blocks?
# 2. Let buffers go out first in, first out (`popleft` of a deque). No bit changes. What does?
# 3. Let a reader take the last free buffer to read ahead while a batch streams. Find the schedule in which the batch
#    ends later, or never.
#
# Next: [5.12 Read, multiply, read, multiply](12_read_multiply.ipynb).
#
# [5.13.3]: 13_trunk.ipynb#5.13.3-The-gate:-streamed-equals-resident
