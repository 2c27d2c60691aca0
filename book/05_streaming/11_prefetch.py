# %% [markdown]
# # 5.11 One reader pool
#
# A program that reads some weights, multiplies them, and then reads the next ones leaves the disk idle during each
# product and the cores idle during each read. But the order in which a forward pass uses its weights is known. So
# threads can read the next weights while the cores still multiply with the last ones. This chapter builds a pool of
# threads, called *readers*, that do both. A reader multiplies with rows that have just been read, so that the rows are
# still in a cache of the processor. The trunk (5.13) and the experts (5.16) use the same pool. At the end you can show,
# from a list of invariants, why no buffer is filled while it is in use.
#
# > **Without it:** a disk and a core that take turns need 18 ticks<!--claim turns--> for six blocks that take two ticks
# > to read and one to multiply.
# >
# > **With it:** they work at the same time and need 13 ticks,<!--claim overlap--> with memory for two blocks.
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
# | block | what is read together: rows of a matrix, or an expert | any object that `read` takes |
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
# A matrix has six blocks, which are read in order. In the output, `r` is a read and `x` is the product with the rows of
# this block. One column is one tick of time. A block can be read while another one is multiplied. But a read may fill a
# buffer only when the product with the block that was in this buffer has ended.

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
totals = {buffers: schedule(6, buffers, 2, 1)[1][-1][1] for buffers in (1, 2, 9)}
assert totals[1] == 18  # claim turns
assert totals[2] == 13  # claim overlap
assert totals[9] == totals[2]

# %% [markdown]
# With one buffer the times add up to $6 \cdot (2 + 1)$ ticks. With two buffers reads and products overlap. Then the
# total is the time of all reads and of the last product: $6 \cdot 2 + 1$ ticks. More than two buffers bring nothing
# here. They help where reads and products do not always take the same time: then some blocks wait in memory, and a slow
# read does not stop the cores.
#
# ## 5.11.2 Three jobs
#
# A reader that has nothing to do chooses a job. It chooses under the one lock of the pool and does the job without the
# lock. There are three kinds of jobs.
#
# 1. **Work.** A block of the open batch has been read ahead. The reader calls `work(block, data)` on it.
# 2. **Read ahead.** The reader reads a block that is not needed yet, into a free buffer or into the block's own memory.
#    In most cases the block belongs to a batch that is not open yet ([5.11.5]).
# 3. **Stream.** When a batch is opened, some of its blocks may not have been begun by any reader. These blocks are the
#    *rest* of the batch. The reader calls `stream(rest, buffer, cursor)`. This function takes one item of the rest
#    after another, reads it into its buffer and works on it. All streaming readers share the counter `cursor`, so that
#    each item is taken once.
#
# Why is there a third kind? To choose a job takes about as long as to multiply a megabyte. A matrix of 176 MB has 85
# blocks, and work that is chosen block by block would cost 85 choices. With the shared counter it costs one choice for
# each reader. All readers also finish at almost the same time, because none takes a new item after the last one.
#
# While the readers stream a rest, one of them at a time may still read ahead. Otherwise the device would have nothing
# to do when the batch ends. This reader never takes the last free buffer, because another reader may need it to stream.
# And at most `read_ahead` blocks wait: of many waiting blocks, the first would have left the cache before its batch is
# opened.
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
# The function `stream` decides what an item of the rest is: a block, or a unit of a block's rows (5.12). If its items
# are blocks, it takes them from `items`.

# %% tags=["export"]
def items(rest: list, cursor: np.ndarray) -> Iterator[Any]:
    "Yield the items of `rest` that this thread claims through `cursor`, int64 [1], until none is left."
    while (i := next_item(cursor)) < len(rest):
        yield rest[i]


# %% [markdown]
# The pool keeps two kinds of records. An `Entry` is a block on its way through memory. A `Batch` holds the blocks of
# one call of `map_blocks`.

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
# The table shows the state of a pool. One lock, `_lock`, guards every change of this state. The two sums `busy_seconds`
# and `wait_seconds` also change under the lock, but may be read without it. Four things need no lock:
#
# - The cursor of a batch is changed by an atomic instruction.
# - The queue `_wake` is safe for several threads.
# - Only the thread that makes and closes the pool uses `_threads`.
# - `close` drops buffers and entries only when all readers have ended.
#
# | field | meaning |
# |---|---|
# | `_order`, `_cyclic` | the blocks as they will be used; after the last one, does the order begin again? |
# | `_next` | index in `_order` of the first block that no job has begun |
# | `_free` | buffers that hold nothing; the one used last is at the end and goes out first |
# | `_ahead` | entries, in order, that are being or have been read before their batch is opened |
# | `_batch` | the open batch, or None |
# | `_reading`, `_working` | jobs under way that read ahead; that work or stream |
# | `_idle` | readers that wait for a job and that have not been woken |
# | `_wake` | a queue of tokens: a reader without a job waits for one |
# | `_sound` | no `restart` and no `map_blocks` is under way, and the last one has succeeded |
# | `_closed` | the readers are to end |
#
# While no thread holds the lock, no `restart` is under way, and no batch was interrupted or has failed since the last
# one:
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
# 6. **Waking.** A reader that waits is counted in `_idle`, or there is a token for it in `_wake`. A thread that puts a
#    token lowers `_idle` by one. There may be more tokens than waiting readers. A reader that takes such a token looks
#    for a job, finds none and waits again.
#
# **Why is no buffer filled while it is in use?** A read fills either the block's own memory, which no other block uses,
# or a buffer that it has taken from `_free`. While a job uses an entry, the buffer is in this entry (1), and the entry
# is with this one job (2). The buffer returns to `_free` when the job has ended. So during the job the buffer is not in
# `_free`, and no read can take it. The same holds for the entry through which a reader streams.
#
# **After an interrupt** the pool does not repair the invariants. Ctrl-C may have stopped the caller between any two
# lines, so any of the invariants may be broken. `restart` waits until no job is under way. Then no job uses a buffer,
# so all buffers are free, and `restart` can build the state from nothing. It also puts a token for every reader: the
# caller may have been stopped after it lowered `_idle` and before it put the token.
#
# **The lock is an `RLock`**, although no thread takes it twice. `Condition.wait()` releases the lock and takes it again
# at its end. Ctrl-C can interrupt the caller at that moment, before it has the lock. With a plain `Lock`, the end of
# the `with` block would then release a lock that a reader holds. An `RLock` is taken again inside the interpreter,
# where no signal is handled, so the caller always has it when the `with` block ends.
#
# **A pool that nothing refers to any more** must end its readers. A user who runs a notebook cell again replaces the
# model without closing the old one. So only the owner of a pool may keep it alive. Each reader has a weak reference to
# its pool, and a strong one only during a job. When the pool is freed, the weak reference calls its callback, which is
# the `put` of `_wake`. So every reader gets a token, finds that the pool is gone, and ends.
#
# Python can free a pool at any moment: on one of the pool's own readers, at the end of the job that kept it alive, or
# in the garbage collector, between two lines of any thread. If the callback took a lock, it could wait for a lock that
# its own thread holds. `SimpleQueue.put` takes no lock, and a signal cannot interrupt it. Therefore readers wait for a
# queue and not for a condition. One rule follows for the user of a pool: `read` and `memory` must not refer to the
# pool's owner. Otherwise the pool would keep its owner alive, and the owner the pool.

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
# `restart` begins a new order and drops the blocks of the old order that were read ahead. A caller whose order is
# cyclic can ask `at_start` whether the next block is the first one. If so, it does not call `restart`, and keeps the
# blocks that were read ahead.

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
# `map_blocks` opens a batch and returns when the readers have worked on all its blocks. It ends early in three cases: a
# job fails, the pool is closed, or Ctrl-C interrupts the caller. In all three cases it first waits for the jobs of the
# batch that are under way, because these jobs use the caller's arrays. Then it raises an error. (A second Ctrl-C ends
# this wait, too. Then the next `restart` waits for the jobs.)
#
# The pool also estimates for how long the caller has waited for bytes. It takes the duration of the call and subtracts
# the processor time of the arithmetic, divided by the number of threads that could do arithmetic.

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
# The blocks that the caller names must be the next ones of the order. So a caller that leaves out a matrix gets an
# error, and never the rows of another matrix.

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
# A reader takes the lock once between two jobs. It records the outcome of the last job and chooses the next one. It
# prefers work to reading ahead, and reading ahead to streaming. It wakes another reader only if there is a job for that
# reader, because to wake a thread costs as much time as a small read.
#
# Between two jobs the reader drops its strong reference to the pool and asks the weak reference for a new one. So if
# the pool has been freed in the meantime, the reader ends.
#
# The reader also drops `outcome` after recording it. The outcome may be an error, and a Python error keeps the
# variables of all functions that it passed through. A notebook keeps the last error that it has shown. So, without
# care, an error on display would keep a pool alive. Therefore the reader's functions delete their variables at the end.

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
# Which block does a reader read ahead? The next block of the order. An order that is not cyclic has no such block once
# its last batch is open. For the experts (5.16) this is so from the beginning, because a request is a single batch. If
# then as many readers work as the limit allows, another reader takes blocks from the rest of the open batch and reads
# them. These blocks become entries of the open batch.

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
# `_do` does a job, without the lock. `_settle` records its outcome, under the lock: the data of a read go into the
# entry, the buffer of finished work becomes free, and the first error goes into the batch. `_settle` wakes the caller
# if the batch is finished or has failed.

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
# In the gate a block is a number, and to read a block is to fill a buffer with this number. So a buffer that is filled
# while it is in use shows another number. Reads and work take random times. The order is cyclic, and it is cut into
# batches at random places.

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
        assert (data == block).all(), "a buffer was filled while it was in use"
        time.sleep(next(pauses))
        assert (data == block).all(), "a buffer was filled while it was in use"
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
# A pool that breaks invariant 1 must fail this gate. This one believes that it has three buffers, and all three are the
# same memory:

# %% tags=["raises-exception"]
shared = np.zeros(64, np.int64)
one_memory = Prefetcher(fill, [shared] * 3, readers=3, read_ahead=2, name="one memory")  # WRONG
passes(one_memory, list(range(20)), times=20)

# %%
one_memory.close()


# %% [markdown]
# A batch that is left out causes an error and never a shift by one block. After an error or an interrupt, every batch
# raises until `restart` has been called.

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
# The tests of the repository go further. They interrupt the caller at every line, let reads fail or never end, and use
# pools of many sizes. In [5.13.3] three more pools that break the rules meet the gate of the trunk.
#
# ## 5.11.7 Summary
#
# - A reader prefers work to reading ahead, and reading ahead to streaming. It chooses under the lock and does the job
#   without it.
# - A buffer is free or in one entry. It becomes free when the job that uses this entry has ended, and never before.
# - An interrupted batch is not repaired. `restart` waits for the jobs under way and builds the state from nothing.
#
# ## Exercises
#
# Answers to 1 and 2: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. In `schedule`, let a product take 3 ticks and a read 2. How many buffers are enough, and what is the total for $n$
#    blocks?
# 2. Let the pool lend its free buffers in the order in which they became free (`popleft` of a deque). No bit of a
#    result changes. What does change?
# 3. Let a reader that reads ahead take the last free buffer while a batch streams. Find a schedule in which the batch
#    ends later, or never.
#
# Next: [5.12 Read, multiply, read, multiply](12_read_multiply.ipynb).
#
# [5.13.3]: 13_trunk.ipynb#5.13.3-The-gate:-streamed-equals-resident
