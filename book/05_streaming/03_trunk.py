# %% [markdown]
# # 5.3 The trunk: rows that arrive
#
# 108.8 GB of K3 are read for every token, whatever the token is: projections, norms, shared experts. This chapter lets a matrix
# be multiplied that is never all in memory. At the end you can say what a block of rows goes through between the disk and the
# dot product, and why the first gigabytes of a budget belong to the front of the walk.
#
# [5.2 The tokenizer](02_tokenizer.ipynb) · [contents](../README.md) · [5.4 Experts](04_experts.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | extent | where a tensor's bytes lie: file, offset, length | `Extent` (1.1) |
# | block | as many whole rows of a matrix as one read brings | `Read` |
# | slot | page-aligned memory that holds one block | `Ring.memory` |
# | ring | a fixed number of slots, filled ahead of the arithmetic | `Ring` |
# | pinned | kept in memory from the start, never read again | `Trunk.resident` |

# %%
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"

# %% [markdown]
# ## 5.3.1 Memory of our own
#
# Mapping the file would be less code, but every mapped page a product touches counts as resident until the kernel takes it
# back, and the kernel takes it back when it likes. A budget needs memory whose size we chose: anonymous, aligned to pages
# because direct reads ask for that, and reused.

# %% tags=["export"]
import ctypes
import errno
import math
import mmap
import os
import threading
import time
from typing import NamedTuple

import numpy as np

from k3lib.checkpoint import CheckpointError
from k3lib.linear import Rows, bf16_to_float32

PAGE = 4096  # O_DIRECT wants offsets, lengths and addresses in whole pages
ONE_READ = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call
ITEMSIZE = {"BF16": 2, "F32": 4, "U8": 1}
ARRAY_DTYPE = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}


def aligned(nbytes):
    "A page-aligned uint8 array of at least `nbytes`, from the operating system, zero and uncommitted until written."
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, max(PAGE, _pages(nbytes)), **private), np.uint8)


def _pages(nbytes):
    return -(-nbytes // PAGE) * PAGE


def widened(nbytes):
    "Buffer bytes that hold any extent of `nbytes` widened to whole pages at both ends."
    return _pages(nbytes) + PAGE

# %% [markdown]
# ## 5.3.2 Reading past the page cache
#
# A buffered read copies every byte twice and leaves a second copy in the page cache, which for a walk of 108.8 GB only pushes
# out what someone else wanted. `O_DIRECT` moves bytes from the device to our buffer. Its price: offset, length and address must
# be whole pages, so an extent is *widened* to the pages it touches and the answer is an index into the buffer.
#
# Some file systems refuse, at open or at the first read. Then the read is buffered and its pages are dropped behind it; the
# report says which files went which way, and why.

# %% tags=["export"]
_READ_ONLY, _DIRECT = os.O_RDONLY | getattr(os, "O_BINARY", 0), getattr(os, "O_DIRECT", 0)


class File:
    """One shard, read past the page cache where the file system allows it; for any number of threads at once.

    `how` says "direct", or "buffered" and why. Without O_DIRECT the pages a read leaves behind are dropped again.
    """

    def __init__(self, path):
        self.path, self._lock, self._open = path, threading.Lock(), []
        if not _DIRECT:
            return self._go_buffered("this system has no O_DIRECT")
        try:
            self._use(_DIRECT, "direct")
        except OSError as error:
            self._go_buffered(f"O_DIRECT refused at open: {error.strerror}")

    def _use(self, flag, how):
        fd = os.open(self.path, _READ_ONLY | flag)
        self._open.append(fd)
        self._fd, self.how = (fd, flag != 0), how

    def _go_buffered(self, why):
        "From now on through the page cache. The first descriptor stays open: another reader may be inside a call on it."
        with self._lock:
            if self._open and not self._fd[1]:
                return
            try:
                self._use(0, f"buffered: {why}")
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from None

    def read(self, buffer, offset, nbytes):
        """Read `nbytes` at `offset` into `buffer`, a page-aligned uint8 array of at least widened(nbytes).

        Returns the index in `buffer` at which the extent begins, and the bytes that were moved: those of whole pages.
        Raises CheckpointError on a short file or a failed read.
        """
        low, end = offset - offset % PAGE, offset + nbytes
        want = _pages(end - low)
        view, done = memoryview(buffer)[:want], 0
        if len(view) < want:
            raise ValueError(f"{nbytes} bytes at offset {offset} need a buffer of {want}, this one has {len(view)}")
        while low + done < end:
            fd, direct = self._fd
            try:
                got = _read_at(self, fd, view[done:done + ONE_READ], low + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # some file systems take O_DIRECT at open and refuse it here
                    self._go_buffered(f"O_DIRECT refused at read: {error.strerror}")
                    continue
                raise CheckpointError(f"{self.path}: reading {nbytes} bytes at offset {offset} failed: {error.strerror}") from None
            if low + done + got < end and (got == 0 or direct and got < PAGE):
                raise CheckpointError(f"{self.path}: ends at byte {os.fstat(fd).st_size}, but bytes {offset} to {end} are needed")
            done += got if low + done + got >= end or not direct else got - got % PAGE
        if not self._fd[1] and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd[0], low, want, os.POSIX_FADV_DONTNEED)
        return offset - low, done

    def close(self):
        "Close the descriptors. No read may be under way."
        while self._open:
            os.close(self._open.pop())


if hasattr(os, "preadv"):
    def _read_at(file, fd, view, offset):
        return os.preadv(fd, [view], offset)
else:
    def _read_at(file, fd, view, offset):
        with file._lock:  # seek and read are two calls here: one reader at a time
            os.lseek(fd, offset, os.SEEK_SET)
            data = os.read(fd, len(view))
        view[:len(data)] = data
        return len(data)


# %% tags=["export"]
class Event(NamedTuple):
    "What a thread did from `began` to `ended`, seconds of time.perf_counter: read `nbytes` for a part, or multiply them."
    what: str
    thread: str
    began: float
    ended: float
    nbytes: int


class Files:
    """The shards of one checkpoint, each opened once, and the bytes read from them by part.

    `moved` counts what the system was asked for: extents widened to whole pages. `log`, if it is a list, gets an Event a read.
    """

    def __init__(self):
        self._files, self._turn = {}, threading.Condition(threading.Lock())
        self._reading, self._closed = 0, False
        self.bytes_read = {"trunk": 0, "experts": 0, "other": 0}
        self.moved = 0
        self.read_seconds = 0.0  # summed over readers: seconds inside read calls
        self.log = None

    def read(self, buffer, extent, offset, nbytes, part):
        "Read part of `extent` (from byte `offset` of it) into `buffer`; returns where it begins there."
        with self._turn:
            if self._closed:
                raise CheckpointError(f"{extent.file}: bytes at offset {extent.offset + offset} are asked for after the files were closed")
            file = self._files.get(extent.file)
            if file is None:
                file = self._files[extent.file] = File(extent.file)
            self._reading += 1
        began, moved = time.perf_counter(), 0
        try:
            start, moved = file.read(buffer, extent.offset + offset, nbytes)
        finally:
            ended = time.perf_counter()
            with self._turn:
                self._reading -= 1
                self.bytes_read[part] += nbytes if moved else 0
                self.moved += moved
                self.read_seconds += ended - began
                if self._closed:
                    self._turn.notify_all()
        self.note(part, began, nbytes)
        return start

    def note(self, what, began, nbytes):
        "Add an Event that ends now to the log, if one is kept."
        if self.log is not None:
            self.log.append(Event(what, threading.current_thread().name, began, time.perf_counter(), nbytes))

    def array(self, extent, part, first=0, rows=None):
        "The tensor, or `rows` rows of it from row `first`, as an owned array: uint16 for BF16, else its own dtype."
        row = extent.nbytes // extent.shape[0]
        rows = extent.shape[0] - first if rows is None else rows
        buffer = aligned(widened(rows * row))
        start = self.read(buffer, extent, first * row, rows * row, part)
        return typed(buffer, start, rows * row, extent.dtype).reshape(rows, *extent.shape[1:])

    def how(self):
        "{file name: how it is read} for every file opened so far."
        return {os.path.basename(path): file.how for path, file in sorted(self._files.items())}

    def close(self):
        "Close the shards once the reads under way have ended; later reads raise CheckpointError."
        with self._turn:
            self._closed = True
            while self._reading:
                self._turn.wait()
            for file in self._files.values():
                file.close()


def typed(buffer, start, nbytes, dtype):
    "buffer[start:start+nbytes] as an array of the tensor's dtype; moved to the front if its offset is odd for that dtype."
    if start % ITEMSIZE[dtype]:
        ctypes.memmove(buffer.ctypes.data, buffer.ctypes.data + start, nbytes)  # numpy would copy to a second buffer first
        start = 0
    return buffer[start:start + nbytes].view(ARRAY_DTYPE[dtype])

# %% [markdown]
# ## 5.3.3 A ring of slots
#
# The order of reads within a pass is known before it starts (chapter 5.5 writes it down), and after the last read comes the first
# one again. So readers may run ahead, across layers and from one token into the next, as far as there are free slots. A slot is
# free again when its block has been multiplied, never before: that rule is all that keeps the answer right, and the tests
# poison every slot on release to see it kept.

# %% tags=["export"]
class Read(NamedTuple):
    "One read of the walk: rows `first` .. `first + rows` of a tensor."
    extent: object
    first: int
    rows: int
    part: str

    @property
    def nbytes(self):
        return self.rows * (self.extent.nbytes // self.extent.shape[0])


class _Job(NamedTuple):
    "What a reader does next with block `number`: fill its slot (`work` is None), or call work(read, data) on what fills it."
    number: int
    read: Read
    slot: int
    work: object
    data: object


class Ring:
    """Aligned slots that readers fill in the order of a cyclic list of reads, ahead of the arithmetic.

    A block leaves in one of two ways: take() hands it to the caller, in order, until it is released; each() has the readers
    themselves call a function on the blocks of a matrix. Blocks are numbered once and for all, across passes and rewinds:
    whoever gives back a block of an interrupted pass gives back nothing.
    """

    def __init__(self, files, reads, slots, slot_bytes, readers):
        if slots < 1 or readers < 1:
            raise ValueError(f"a ring of {slots} slots and {readers} readers moves nothing")
        self.files, self.reads, self.slots = files, reads, slots
        self.memory = [aligned(slot_bytes) for _ in range(slots)]
        self.wait_seconds = 0.0
        self._turn = threading.Lock()
        self._work, self._news = threading.Condition(self._turn), threading.Condition(self._turn)  # for readers; for the consumer
        self._stopped = self._paused = False
        self._issued = self._taken = self._first = 0  # next block to read, next to hand out, the one the walk began with
        self._free = [*range(slots)]  # the slot given back last goes out first: it is still in a cache
        self._slot, self._filled = {}, {}  # block: slot, from its issue to its release; block: data or what was raised
        self._filling = self._calling = self._threads = self._left = 0
        self._call, self._until, self._due, self._failure = None, 0, [], None  # blocks below `until` are for `call`
        self._still = 0.0  # since when no call has been running
        self._readers = [threading.Thread(target=self._serve, name=f"k3-trunk-{i}", daemon=True) for i in range(readers)]
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
            self.wait_seconds += time.perf_counter() - began
        if isinstance(result, BaseException):
            raise result
        return result

    def release(self, number):
        "Give a taken block's slot back to the readers."
        with self._turn:
            self._give_back(number)
            self._work.notify()

    def each(self, number, count, work, threads):
        """Have the readers call work(read, data) on each of `count` blocks from `number`, the next, in any order, at most
        `threads` at a time.

        Returns when all calls have ended; raises what one of them, or a reader, raised.
        """
        with self._turn:
            self._claim(number, count)
            self._call, self._threads, self._left, self._until, self._failure = work, threads, count, number + count, None
            self._due = [n for n in range(number, self._until) if n in self._filled]
            self._still = time.perf_counter()
            self._work.notify_all()
            try:
                while self._left and self._failure is None and not self._stopped:
                    self._news.wait()
            finally:
                self._until = 0
                self._due.clear()
                while self._calling:
                    self._news.wait()
            self._check_open()
            if self._failure is not None:
                raise self._failure

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
            if out or (self._taken - self._first) % len(self.reads):
                self._rewind()
            return self._taken

    def _rewind(self):
        "Drop what was read ahead and what was not given back, and begin again at the first read."
        self._paused = True
        try:
            while self._filling or self._calling:
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

    def _serve(self):
        "A reader's life: settle the last job and choose the next under the lock, do it outside."
        job = result = None
        while True:
            with self._turn:
                if job is not None:
                    self._settle(job, result)
                while not self._stopped and (job := self._next()) is None:
                    self._work.wait()
                if self._stopped:
                    return
            result = self._do(job)

    def _next(self):
        "The next job, or None: a call that is due, else a read into a free slot."
        if self._due and self._calling < self._threads:
            number, work = self._due.pop(), self._call
            if self._calling == 0:
                self.wait_seconds += time.perf_counter() - self._still
            self._calling += 1
        elif self._free and not self._paused:
            number, work = self._issued, None
            self._issued += 1
            self._filling += 1
            self._slot[number] = self._free.pop()
        else:
            return None
        if self._free or self._due:
            self._work.notify()
        return _Job(number, self.reads[(number - self._first) % len(self.reads)], self._slot[number], work, self._filled.pop(number, None))

    def _do(self, job):
        "The data read, None after a call; or what was raised."
        read, buffer = job.read, self.memory[job.slot]
        try:
            if job.work is None:
                row = read.nbytes // read.rows
                start = self.files.read(buffer, read.extent, read.first * row, read.nbytes, read.part)
                return typed(buffer, start, read.nbytes, read.extent.dtype)
            if isinstance(job.data, BaseException):
                raise job.data
            began = time.perf_counter()
            job.work(read, job.data)
            self.files.note("arithmetic", began, read.nbytes)
        except BaseException as error:  # whatever it is, the consumer must hear of it
            return error

    def _settle(self, job, result):
        if job.work is None:
            self._filling -= 1
            self._filled[job.number] = result
            if job.number < self._until:
                self._due.append(job.number)
        else:
            self._calling -= 1
            self._left -= 1
            self._give_back(job.number)
            if result is not None:
                self._failure = result
                self._until = 0
                self._due.clear()
            if self._calling == 0:
                self._still = time.perf_counter()
        self._news.notify()

    def _give_back(self, number):
        slot = self._slot.pop(number, None)
        if slot is not None:
            self._free.append(slot)

# %% [markdown]
# ## 5.3.4 Whole rows, and a matrix that goes by once
#
# A matrix is cut into blocks of whole rows, because a row's dot product is the unit whose bits are fixed (chapter 1.3). Where rows
# belong together, as a head's key and value rows of `kv_b_proj` do, blocks keep them together.

# %% tags=["export"]
def row_blocks(extent, multiple, slot_bytes, part):
    """The reads that bring a matrix through slots of `slot_bytes`: as many whole rows a read as fit, of equal size but the last.

    Rows come in multiples of `multiple`, and of the four that a kernel takes at once where there is room for them.
    """
    n, row = extent.shape[0], extent.nbytes // extent.shape[0]
    room = (slot_bytes - 2 * PAGE) // row
    unit = math.lcm(multiple, 4) if room >= math.lcm(multiple, 4) else multiple
    if room < unit:
        raise ValueError(f"a ring slot of {slot_bytes} bytes does not hold {multiple} rows of {row} bytes")
    blocks = -(-n // (room // unit * unit))
    rows = -(-n // (blocks * unit)) * unit
    return [Read(extent, first, min(rows, n - first), part) for first in range(0, n, rows)]


class Streamed:
    "A matrix that goes by once: its blocks are slots of the ring, the first of them block `number`."

    def __init__(self, ring, extent, reads, number):
        self.ring, self.reads, self.number, self.shape = ring, reads, number, extent.shape

    def blocks(self, multiple=1):
        """Yields (first row, rows [m, k]) in order. The rows are valid until the next block is asked for.

        Whoever stops half-way keeps the slot until the ring is rewound: giving it back from a generator's end would leave
        the moment to the garbage collector.
        """
        for number, read in enumerate(self.reads, self.number):
            if read.rows % multiple and read.first + read.rows != self.shape[0]:
                raise ValueError(f"{multiple} rows must stay together, but a block has {read.rows}")
            data = self.ring.take(number)
            yield read.first, data.reshape(read.rows, *self.shape[1:])
            self.ring.release(number)

    def each(self, work, threads):
        """Call work(first row, rows [m, k]) on every block, in any order, at most `threads` at a time, on the thread that
        has read it: the rows are still in that core's cache. Returns when all calls have."""
        def call(read, data):
            work(read.first, data.reshape(read.rows, *self.shape[1:]))
        self.ring.each(self.number, len(self.reads), call, threads)


def as_float32(array):
    "A resident vector, [1, H] weight (as [H]) or convolution, float32."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


def is_matrix(name, extent):
    """True for what can arrive row by row. Vectors, [1, H] residual projections and convolutions (51 MB of 108.8 GB) always stay
    in memory; a projection to one row, as `b_proj` of a single head, is a matrix."""
    return len(extent.shape) == 2 and not name.endswith("_res_proj.weight")


class Trunk:
    """Every tensor of the walk but the routed experts, resident or streamed.

    `walk`: tensor names in the order one pass takes them. `pinned`: matrices kept in memory. `multiples`: {name: rows that
    must stay together}. The other matrices stream through the ring, the same list of reads every pass.
    """

    def __init__(self, checkpoint, walk, pinned, multiples, files, parts, slots, slot_bytes, readers, progress=None):
        self.files, self.parts, self.checkpoint = files, parts, checkpoint
        self.extents = {name: checkpoint.extent(name) for name in walk}
        self.resident, self.reads = {}, {}
        for name, extent in self.extents.items():
            if is_matrix(name, extent) and name not in pinned:
                self.reads[name] = row_blocks(extent, multiples.get(name, 1), slot_bytes, parts(name))
        for name, extent in self.extents.items():
            if name not in self.reads:
                array = files.array(extent, parts(name))
                self.resident[name] = Rows(array) if is_matrix(name, extent) else as_float32(array)
                if progress is not None:
                    progress(extent.nbytes)
        self._order, self._next, self._start, self._index, reads = list(self.reads), 0, 0, {}, []
        for name in self._order:
            self._index[name] = len(reads)
            reads += self.reads[name]
        self.ring = Ring(files, reads, slots, slot_bytes, readers) if reads else None

    def begin(self):
        "Start a pass: if the last one stopped half-way, the ring begins anew."
        if self.ring is not None:
            self._next, self._start = 0, self.ring.begin()

    def take(self, name):
        "A matrix with .shape and .blocks(), or a float32 array. A streamed tensor comes when its turn in the walk comes, once a pass."
        if name in self.resident:
            return self.resident[name]
        if self._order[self._next] != name:
            raise RuntimeError(f"the walk asks for {name}, but {self._order[self._next]} is next")
        self._next = (self._next + 1) % len(self._order)
        return Streamed(self.ring, self.extents[name], self.reads[name], self._start + self._index[name])

    def row(self, name, i):
        "Row `i` of a matrix outside the walk, float32: one read."
        return bf16_to_float32(self.files.array(self.checkpoint.extent(name), self.parts(name), i, 1)[0])

    @property
    def wait_seconds(self):
        "Seconds the arithmetic stood still for a row block."
        return self.ring.wait_seconds if self.ring else 0.0

    def close(self):
        if self.ring is not None:
            self.ring.close()


# %% [markdown]
# ## 5.3.5 The gate: streamed equals resident
#
# One projection of the embedded model, multiplied resident and through rings of different sizes. A wrong slot, a stale block or a
# lost row would change bytes.

# %%
from k3lib.checkpoint import Checkpoint
from k3lib.linear import linear

checkpoint = Checkpoint(FOLDER)
WALK = [name for name in checkpoint.names() if ".layers.0." in name or ".layers.1.self_attn." in name]
MATRICES = [name for name in WALK if len(checkpoint.extent(name).shape) == 2 and checkpoint.extent(name).shape[0] > 1]


def products(slots, slot_bytes, readers, passes=2, log=None):
    "Every matrix of the walk times a fixed vector, in order, `passes` times over."
    files = Files()
    files.log = log
    trunk = Trunk(checkpoint, WALK, frozenset(), {}, files, lambda name: "trunk", slots, slot_bytes, readers)
    out = []
    for _ in range(passes):
        trunk.begin()
        for name in WALK:
            if name in MATRICES:
                W = trunk.take(name)
                out.append(linear(W, np.linspace(-1, 1, W.shape[1], dtype=np.float32)[None]))
    trunk.close()
    files.close()
    return np.concatenate([y.ravel() for y in out])


resident = np.concatenate([linear(Rows(checkpoint.raw(name)), np.linspace(-1, 1, checkpoint.extent(name).shape[1], dtype=np.float32)[None]).ravel()
                           for name in MATRICES] * 2)
for slots, slot_bytes, readers in ((1, 20_000, 1), (2, 20_000, 2), (3, 50_000, 2), (40, 80_000, 3)):
    assert products(slots, slot_bytes, readers).tobytes() == resident.tobytes()
print("four rings, two passes each, the bytes of the resident product: True")

# %% [markdown]
# ## 5.3.6 What waits for what
#
# Every read leaves an event: when it began, when it ended, on which thread. With one slot a read can only begin when the product
# before it is done; with several, readers stay ahead and the bars close up.

# %% tags=["nbval-ignore-output"]
fig, axes = plt.subplots(1, 2, figsize=(9, 2.6), sharey=True)
for ax, slots in zip(axes, (1, 6)):
    log = []
    products(slots, 20_000, 2, log=log)
    start = min(event.began for event in log)
    reads = [event for event in log if event.what == "trunk"]
    threads = sorted({event.thread for event in reads})
    for row, thread in enumerate(threads):
        spans = [((e.began - start) * 1e3, (e.ended - e.began) * 1e3) for e in reads if e.thread == thread]
        ax.broken_barh(spans, (row - 0.4, 0.8), color=f"C{row % 6}")
    ax.set(xlabel="time, ms", yticks=range(len(threads)), yticklabels=["vectors", "reader 1", "reader 2"][:len(threads)],
           title="one slot: reads" if slots == 1 else f"{slots} slots: reads")
plt.show()

# %% [markdown]
# ## 5.3.7 Why the front of the walk is pinned
#
# Memory left over could be a cache. But a pass is a cycle: when a block is asked for again, everything else has been asked for
# since. A least-recently-used cache smaller than the cycle has always just thrown away the block that comes next. Pinning any
# fixed part saves exactly that part, every pass; the front is as good as any, and it is ready when a pass begins.

# %%
def lru_hits(capacity, cycle, passes):
    "Share of requests an LRU of `capacity` blocks answers on a cyclic walk over `cycle` blocks."
    kept, hits = [], 0
    for n in range(cycle * passes):
        block = n % cycle
        if block in kept:
            hits += 1
            kept.remove(block)
        kept = kept[-(capacity - 1):] + [block] if capacity > 1 else [block]
    return hits / (cycle * (passes - 1))


CYCLE, PASSES = 60, 5
shares = np.arange(6, CYCLE + 1, 6)
lru = [lru_hits(int(c), CYCLE, PASSES) for c in shares]
assert lru[:-1] == [0] * (len(lru) - 1) and lru[-1] == 1
print("LRU hit rate with 90% of the cycle in memory:", lru[-2])

# %%
fig, ax = plt.subplots()
ax.plot(shares / CYCLE, shares / CYCLE, "o-", label="pin the front")
ax.plot(shares / CYCLE, lru, "s--", label="least recently used")
ax.set(xlabel="memory, share of the cycle", ylabel="share of reads saved", title="On a cycle, LRU saves nothing until it holds everything")
ax.legend()
plt.show()

# %% [markdown]
# The same argument says that the trunk gets memory before experts do: a pinned trunk byte is used at every token, a cached
# expert only if the router comes back to it (chapter 5.4).
#
# ## Summary
#
# - A matrix is rows that arrive: blocks of whole rows through a few reused slots, in an order known in advance.
# - Reads bypass the page cache where the file system allows it, and the report says where it does not.
# - Pinning the front of a cyclic walk saves its share of every pass. An LRU of the same size saves nothing.
#
# ## Exercises
#
# 1. With one reader and one slot, which events can overlap? Predict the left picture for `readers=1`, then draw it.
# 2. Change `lru_hits` to evict the *most* recently used block. What does it save at half the cycle, and why is that the optimum?
# 3. How many bytes does widening add to one pass over the embedded model? `Files.moved` counts them; compare with K3's blocks.
#
# Next: [5.4 Experts](04_experts.ipynb), the one part of a pass that nobody can order in advance.
