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
# | pass | one walk over all layers, in a fixed order | `Trunk.begin` |
# | pinned | kept in memory from the start, never read again | `Trunk.resident` |

# %%
import hashlib
import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"

# %% tags=["export"]
import errno
import logging
import math
import mmap
import os
import shutil
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import count, groupby
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from k3lib.checkpoint import Checkpoint, CheckpointError, header_bytes, identity, sync_folder, writing
from k3lib.linear import CORES, INNER, KERNEL, NO_MORE, TILE, Rows, bf16_to_float32, draw, matmul_rows

PAGE = 4096  # O_DIRECT wants offsets, lengths and addresses in whole pages
MOST_READERS = 64
ONE_READ = 1 << 26  # Linux moves at most 2 GiB - 4 KiB a call; after less a signal is heard sooner
ITEMSIZE = {"BF16": 2, "F32": 4, "U8": 1}
ARRAY_DTYPE = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}

# %% tags=["parameters"]
rows = 4096  # of the matrix that is timed in 5.3.9, of 4096 float32 each
slot_kib = 4096
readers = 2
seed = 0

# %% [markdown]
# ## 5.3.1 By hand: six rows, two slots
#
# A matrix of six rows, two rows a read, two slots. `r` is a read that arrives, `x` the product with its rows. The second matrix begins
# while the first is still being multiplied, because what will be read next is known; but no read enters a slot before its `x` is done.

# %%
def schedule(blocks, slots, read, multiply):
    "(begin, end) of every read and every product, one reader, when a read takes `read` ticks and a product `multiply`."
    reads, products = [], []
    for b in range(blocks):
        free = products[b - slots][1] if b >= slots else 0
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


for slots in (1, 2):
    reads, products = schedule(6, slots, read=2, multiply=1)
    print(f"{slots} slot{'s' * (slots > 1)}: {products[-1][1]} ticks")
    print("  disk ", drawn(reads, "r"))
    print("  core ", drawn(products, "x"))
assert [schedule(6, slots, 2, 1)[1][-1][1] for slots in (1, 2, 9)] == [18, 13, 13]

# %% [markdown]
# With one slot the times add up: $6(2 + 1)$. With two they overlap, and what remains is the slower of the two plus one lead-in:
# $6 \cdot 2 + 1$. More slots change nothing here; they are for reads and products that do not always take equally long.
#
# ## 5.3.2 Memory of our own
#
# Mapping the file would be less code. But every mapped page that a product touches counts as resident until the kernel takes it
# back, and the kernel takes it back when it likes. One pass over a mapped file of 64 MB, and one through a 1 MB buffer of our own:

# %% tags=["export"]
def aligned(nbytes):
    "A page-aligned uint8 array of at least `nbytes`, from the operating system, zero and uncommitted until written."
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, max(PAGE, _pages(nbytes)), **private), np.uint8)


def _pages(nbytes):
    return -(-nbytes // PAGE) * PAGE


def widened(nbytes):
    "Buffer bytes that hold any extent of `nbytes` widened to whole pages at both ends."
    return _pages(nbytes) + PAGE

# %%
scratch = Path(tempfile.mkdtemp())
(scratch / "64MB").write_bytes(np.random.default_rng(seed).bytes(64_000_000))


def resident():
    "Bytes of this process in memory, in MB; 0 where the system does not tell."
    status = Path("/proc/self/status")
    return int(status.read_text().split("VmRSS:")[1].split()[0]) / 1e3 if status.exists() else 0.


def mapped():
    array = np.memmap(scratch / "64MB", np.uint8)
    return int(array[::512].max()), resident()


def through_a_buffer():
    buffer, top = aligned(1 << 20), 0
    with open(scratch / "64MB", "rb", buffering=0) as file:
        while n := file.readinto(memoryview(buffer)):
            top = max(top, int(buffer[:n:512].max()))
    return top, resident()


before = resident()
(top, grown), before_buffer = mapped(), resident()
assert through_a_buffer()[0] == top

# %% tags=["nbval-ignore-output"]
print(f"mapped: {grown - before:.0f} MB more in memory; through a buffer: {through_a_buffer()[1] - before_buffer:.0f} MB more")

# %% [markdown]
# A budget needs memory whose size we chose: anonymous, private, reused, and aligned to pages because the next section asks for it.
#
# ## 5.3.3 Reading past the page cache
#
# A buffered read moves every byte twice and leaves a copy in the page cache, which for a walk of 108.8 GB only pushes
# out what someone else wanted. `O_DIRECT` moves bytes from the device to our buffer. Its price: offset, length and address must
# be whole pages, so an extent is *widened* to the pages it touches, and what comes back is an index into the buffer.

# %% tags=["export"]
_READ_ONLY, _DIRECT = os.O_RDONLY | getattr(os, "O_BINARY", 0), getattr(os, "O_DIRECT", 0)


class File:
    """One shard, read past the page cache where the file system allows it; for any number of threads at once.

    `how` says "direct", or "buffered" and why; `descriptor` is (file descriptor, whether it reads directly). Without O_DIRECT the
    pages a read leaves behind are dropped again. `known`: the identity of the file whose header was read.
    """

    def __init__(self, path, known=None):
        self.path, self._known, self._lock, self._open = path, known, threading.Lock(), []
        if not _DIRECT:
            return self._go_buffered("this system has no O_DIRECT")
        try:
            self._use(_DIRECT, "direct")
        except OSError as error:
            self._go_buffered(f"O_DIRECT refused at open: {error.strerror}")

    def _use(self, flag, how):
        fd = os.open(self.path, _READ_ONLY | flag)
        self._open.append(fd)
        self._compare(os.fstat(fd))
        self.descriptor, self.how = (fd, flag != 0), how

    def _compare(self, status):
        now = identity(status)
        self._known = self._known or now
        if now != self._known:
            what = "was replaced by another file" if now[:2] != self._known[:2] else "was written to"
            found, expected = (f"{size} bytes of {time.ctime(ns / 1e9)}" for *_, size, ns in (now, self._known))
            raise CheckpointError(f"{self.path}: {what} during the run: found {found}, expected {expected}")

    def check(self):
        "CheckpointError unless the file is still the one at its path and has not been written to."
        try:
            for status in (os.fstat(self.descriptor[0]), os.stat(self.path)):
                self._compare(status)
        except OSError as error:
            raise CheckpointError(f"{self.path}: was removed during the run: {error.strerror}") from None

    def _go_buffered(self, why):
        "From now on through the page cache. The first descriptor stays open: another reader may be inside a call on it."
        with self._lock:
            if self._open and not self.descriptor[1]:
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
            fd, direct = self.descriptor
            try:
                got = _read_at(self, fd, view[done:done + ONE_READ], low + done)
            except OSError as error:
                if direct and error.errno == errno.EINVAL:  # some file systems take O_DIRECT at open and refuse it here
                    self._go_buffered(f"O_DIRECT refused at read: {error.strerror}")
                    continue
                raise CheckpointError(f"{self.path}: reading {nbytes} bytes at offset {offset} failed: {error.strerror}") from None
            if low + done + got < end and (got == 0 or direct and got < PAGE):
                size = os.fstat(fd).st_size
                if direct and size >= end:  # not the end: what is less than a page cannot be gone on from
                    self._go_buffered(f"O_DIRECT gave {got} bytes, less than a page")
                    continue
                where = f"ends at byte {size}" if size < end else f"gave nothing at byte {low + done} of {size}"
                raise CheckpointError(f"{self.path}: {where}, but bytes {offset} to {end} are needed")
            done += got if low + done + got >= end or not direct else got - got % PAGE
        if not self.descriptor[1] and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor[0], low, want, os.POSIX_FADV_DONTNEED)
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

# %% [markdown]
# Some file systems refuse, at open or only at the first read. Then reads are buffered and their pages are dropped behind them. The
# first descriptor stays open all the same: another reader may be inside a call on it, and a closed descriptor's number is soon another
# file's.
#
# Any extent of a small file, against the plain bytes:

# %%
content = np.random.default_rng(seed).bytes(5 * PAGE + 100)
(scratch / "small").write_bytes(content)
small, rng = File(str(scratch / "small")), np.random.default_rng(seed)
for _ in range(300):
    low, high = np.sort(rng.integers(0, len(content) + 1, 2)).tolist()
    buffer = aligned(widened(high - low))
    start, moved = small.read(buffer, low, high - low)
    assert buffer[start:start + high - low].tobytes() == content[low:high]
print("300 extents read exactly: True; bytes 4095 to 4097 lie in", small.read(aligned(widened(2)), 4095, 2)[1] // PAGE, "pages")

# %% tags=["nbval-ignore-output"]
print("this file is read", small.how)

# %% [markdown]
# **What failed first.** A direct read that comes back short is asked again from the last whole page. At a file cut off in the middle of
# a page that is the same page again, for ever. Less than a page of progress means the end:

# %%
try:
    small.read(aligned(widened(3 * PAGE)), 4 * PAGE, 2 * PAGE)
except CheckpointError as error:
    print("refused:", str(error).replace(str(scratch), "..."))
else:
    raise AssertionError("read beyond the end")
small.close()

# %% [markdown]
# All shards together, with the account of what was read for which part, and what that came to in whole pages. `log` keeps an event
# a read for the timelines below.
#
# A shard that is written to, replaced or cut off during a run would mix two models in one answer. So each must be the file whose header was
# read, and `check` asks again when a pass has ended. A read that does not end cannot be told from one that is slow: it is waited for, and said.

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
    `identities`: {path: identity} of files whose headers were read: others are refused. A read that does not end is logged.
    """

    def __init__(self, identities=None):
        self._files, self._identities, self._turn = {}, identities or {}, threading.RLock()
        self._under_way, self._watcher, self._over = {}, None, threading.Event()  # {thread: (path, offset, began)}
        self._ended = threading.Condition(self._turn)
        self._closed = False
        self.bytes_read = {"trunk": 0, "experts": 0, "other": 0}
        self.moved = 0
        self.seconds = {"trunk": 0.0, "experts": 0.0, "other": 0.0, "arithmetic": 0.0}  # inside reads; processor time; over all threads
        self.log = None

    def read(self, buffer, extent, offset, nbytes, part):
        "Read part of `extent` (from byte `offset` of it) into `buffer`; returns where it begins there."
        began, used, moved = time.perf_counter(), 0, 0
        try:
            file = self._begin(extent, offset)
            start, moved = file.read(buffer, extent.offset + offset, nbytes)
            used = nbytes
        finally:
            self._end(part, used, moved)
        self.note(part, began, nbytes)
        return start

    def stream(self, extent, offset, part, pieces, loop):
        """Have compiled code read from byte `offset` of `extent` and work on what it reads, in at most so many `pieces`: the result of
        loop(descriptor, journal), or None for a file that is not read directly.

        In the rows of `journal`, float64 [1 + pieces, 5], after the first, the loop writes when a piece was there, when it was done
        with, the bytes moved, the processor seconds of the work, and the bytes it was after; in row 0 the seconds of all reads, when
        the loop began, and the sums of the last three.
        """
        result, journal = None, np.zeros((pieces + 1, 5))
        try:
            file = self._begin(extent, offset)
            descriptor, direct = file.descriptor
            if direct:
                result = loop(descriptor, journal)
        finally:
            read, _, moved, worked, nbytes = journal[0].tolist()
            self._end(part, int(nbytes), int(moved), read, worked)
        if self.log is not None:
            name = threading.current_thread().name
            with self._turn:
                for before, (arrived, ended, _, _, nbytes) in zip(journal[:, 1], journal[1:]):
                    if nbytes:
                        self.log.append(Event(part, name, before, arrived, int(nbytes)))
                    if ended > arrived:
                        self.log.append(Event("arithmetic", name, arrived, ended, int(nbytes)))
        return result

    def _begin(self, extent, offset):
        "The File of an extent, opened at its first use; it stays open until _end."
        with self._turn:
            if self._closed:
                raise CheckpointError(f"{extent.file}: bytes at offset {extent.offset + offset} are asked for after the files were closed")
            file = self._files.get(extent.file)
            if file is None:
                file = self._files[extent.file] = File(extent.file, self._identities.get(extent.file))
            if self._watcher is None:
                watcher = threading.Thread(target=_watch, args=(weakref.ref(self), self._over), name="k3-watch", daemon=True)
                watcher.start()
                self._watcher = watcher
            self._under_way[threading.get_ident()] = extent.file, extent.offset + offset, time.perf_counter()
            return file

    def _end(self, part, nbytes, moved, read=0.0, worked=0.0):
        with self._turn:
            self.seconds[part] += read
            self.seconds["arithmetic"] += worked
            self._under_way.pop(threading.get_ident(), None)
            self.bytes_read[part] += nbytes
            self.moved += moved
            if self._closed:
                self._ended.notify_all()

    def note(self, what, began, nbytes, seconds=None):
        "Count `seconds`, or else the time since `began`, for `what`; an Event in the log, if one is kept."
        ended = time.perf_counter()
        with self._turn:
            self.seconds[what] += ended - began if seconds is None else seconds
            if self.log is not None:
                self.log.append(Event(what, threading.current_thread().name, began, ended, nbytes))

    def multiply(self, nbytes, work, *args):
        "work(*args), its processor time and its Event counted as arithmetic on `nbytes`."
        began, busy = time.perf_counter(), time.thread_time()
        work(*args)
        self.note("arithmetic", began, nbytes, time.thread_time() - busy)

    @property
    def read_seconds(self):
        "Seconds inside read calls, summed over the readers."
        return sum(seconds for what, seconds in self.seconds.items() if what != "arithmetic")

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

    def check(self):
        "CheckpointError if a file that was opened has been written to, replaced or removed since its header was read."
        with self._turn:
            files = [] if self._closed else [*self._files.values()]
        for file in files:
            file.check()

    def tell_stalled(self):
        "Log each read, or run of them, not done after STALL seconds. It is waited for: only the system can know whether it will end."
        with self._turn:
            reads, now = [*self._under_way.values()], time.perf_counter()
        for path, offset, began in reads:
            if now - began >= STALL:
                _log.warning("%s: reading from offset %d on is not done after %.0f s; still waiting", path, offset, now - began)

    def close(self):
        "Close the shards once the reads under way have ended; later reads raise CheckpointError."
        with self._turn:
            self._closed = True
            while self._under_way.keys() - {threading.get_ident()}:  # a read of this thread's own was broken off by Ctrl-C, before it could say so
                self._ended.wait()
            for file in self._files.values():
                file.close()
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()


STALL = 60.0  # seconds: longer than any read that is merely slow, and than the first call of a kernel that is still being compiled
_log = logging.getLogger("k3lib")  # says warnings on stderr unless a program arranges otherwise


def _watch(files, over):
    "The life of a thread that tells of stalled reads. `files`: a weak reference; whoever forgets to close them shall not be kept by it."
    while not over.wait(STALL):
        there = files()
        if there is None:
            return
        there.tell_stalled()
        del there

# %% [markdown]
# A header can have any length, so a bf16 matrix may begin at an odd address. Kernels take aligned arrays only; such data is moved to the
# front of its slot, inside the slot.

# %% tags=["export"]
def typed(buffer, start, nbytes, dtype):
    "buffer[start:start+nbytes] as an array of the tensor's dtype; moved to the front if its offset is odd for that dtype."
    if start % ITEMSIZE[dtype]:
        buffer[:nbytes] = buffer[start:start + nbytes]
        start = 0
    return buffer[start:start + nbytes].view(ARRAY_DTYPE[dtype])

# %%
buffer = aligned(PAGE)
buffer[:9] = [255, 0x80, 0x3f, 0x00, 0x40, 0x40, 0x40, 7, 7]
print([float(v) for v in bf16_to_float32(typed(buffer, 1, 6, "BF16"))])
assert bf16_to_float32(typed(buffer, 0, 6, "BF16")).tolist() == [1, 2, 3]

# %% [markdown]
# ## 5.3.4 A ring of slots
#
# The order of reads within a pass is known before it starts (chapter 5.5 writes it down), and after the last read comes the first
# one again. So readers may run ahead, across layers and from one token into the next, as far as there are free slots. A slot is
# free again when its block has been multiplied, never before: that rule is all that keeps the answer right.

# %% tags=["export"]
class Read(NamedTuple):
    "One read of the walk: rows `first` .. `first + rows` of a tensor, `nbytes` from byte `begin` of it."
    extent: object
    first: int
    rows: int
    begin: int
    nbytes: int
    part: str

    def after(self, rows):
        "The same read without its first `rows` rows."
        skipped = rows * (self.nbytes // self.rows)
        return self._replace(first=self.first + rows, rows=self.rows - rows, begin=self.begin + skipped, nbytes=self.nbytes - skipped)

    def through(self, last):
        "One read from here to the end of `last`, a later read of the same tensor."
        return self._replace(rows=last.first + last.rows - self.first, nbytes=last.begin + last.nbytes - self.begin)

# %% [markdown]
# A block can leave the ring in two ways. `take` hands it to whoever asks, in order. `each` turns it round: the caller hands over a
# function, and readers call it on the blocks of a matrix, as many at a time as there are threads for arithmetic. A block that was read
# ahead is multiplied out of its slot. One that was not is better read by whoever multiplies it, a piece at a time (5.3.6).
#
# Three decisions in the ring are not obvious. Slots go out last in, first out, so that a ring of sixteen slots uses two as long as two
# are enough. Blocks are numbered for good, across passes: a late release of a block that no longer exists frees nothing. And readers wait
# on one condition, the consumer on another, so that a finished block wakes whoever it concerns. The lock is an RLock, though nobody takes it twice:
# Ctrl-C may break off a wait while it takes a plain lock again, and then it gives back one that another thread holds.

# Choosing a job costs the interpreter as much as multiplying a megabyte. So those who read and multiply get one job for all that is left of
# the matrix, and draw its pieces from one counter that they share, in compiled code: no lock, and all end within a piece of each other.

# %% tags=["export"]
class Ring:
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
        self.memory = [aligned(slot_bytes) for _ in range(slots)]
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
                self._drawn[0] = NO_MORE
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

# %% [markdown]
# ## 5.3.5 Whole rows, and a matrix that goes by once
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
    return [Read(extent, first, min(rows, n - first), first * row, min(rows, n - first) * row, part) for first in range(0, n, rows)]

# %%
from k3lib.checkpoint import Extent

q_proj = Extent("shard", 8, 12288 * 7168 * 2, "BF16", (12288, 7168))
for kib in (256, 1024, 8192):
    cut = row_blocks(q_proj, 1, kib << 10, "trunk")
    print(f"q_proj through slots of {kib:4} KiB: {len(cut):3} blocks of {cut[0].rows} rows, {cut[0].nbytes / 1e6:.2f} MB, the last of {cut[-1].rows}")
print("kv_b_proj, a head's 256 rows together:", [r.rows for r in row_blocks(Extent("s", 8, 24576 * 1024, "BF16", (24576, 512)), 256, 1 << 20, "trunk")][:3], "...")

# %% [markdown]
# ## 5.3.6 Read, multiply, read, multiply
#
# A reader that fills a slot and then calls a kernel from Python does each of these steps under the interpreter's lock, for every megabyte. Larger
# slots would make the calls rarer, but a slot that does not fit the core's own cache is written out to memory and fetched back. So the
# loop over pieces is compiled: read a megabyte, multiply its rows, read the next into the same place. `pread` and the clock are two
# functions of the C library, and an intrinsic is all it takes to call them; what the loop has done it leaves in a journal.
#
# Which piece does a draw stand for? Pieces are not equally fast: some lie in a hole of the file or in the device's own cache, some do not, and
# what is slow comes in runs. Readers that went in file order would all meet a run at once and wait for the device with nothing left to multiply.
# So draw $p$ of $n$ stands for piece $p s \bmod n$, with $s$ near $0.38\,n$ and no common factor with $n$: what is drawn next lies far
# away, and a slow run is met by one reader at a time.
#
# Nothing unusual is handled here. A read that fails, comes short or begins at an odd address ends the loop, and the rest of the block takes
# the way through `File.read`, which knows what to do or what to say. Systems other than Linux always take that way.

# %% tags=["export"]
COMPILED_READS = sys.platform == "linux" and sys.maxsize > 2**32  # elsewhere the same reads are made from Python, a slot at a time
PIECE = 3 << 18  # bytes read and multiplied at a time: two readers' pieces and a vector stay in a core's own cache
GOLDEN = (3 - math.sqrt(5)) / 2  # of the pieces lie between two draws: no other step keeps so many draws in a row apart
WALL, BUSY = 1, 3  # Linux's numbers of two clocks: that of time.perf_counter, and the processor time of this thread


@intrinsic
def _pread(typingctx, descriptor, buffer, at, nbytes, offset):
    "(int64, uint8[:], int64, int64, int64) -> bytes read into buffer[at:], or -1."
    signature = types.int64(types.int64, types.Array(types.uint8, 1, "C"), types.int64, types.int64, types.int64)

    def codegen(context, builder, sig, args):
        descriptor, buffer, at, nbytes, offset = args
        place = builder.gep(context.make_array(sig.args[1])(context, builder, buffer).data, [at])
        word, integer = ir.IntType(64), ir.IntType(32)
        pread = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [integer, place.type, word, word]), "pread")
        return builder.call(pread, [builder.trunc(descriptor, integer), place, nbytes, offset])
    return signature, codegen


@intrinsic
def clock(typingctx, which):
    "(WALL or BUSY) -> its seconds, float64."
    def codegen(context, builder, sig, args):
        word, integer = ir.IntType(64), ir.IntType(32)
        time_spec = cgutils.alloca_once(builder, ir.LiteralStructType([word, word]))
        call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(integer, [integer, time_spec.type]), "clock_gettime")
        builder.call(call, [builder.trunc(args[0], integer), time_spec])
        seconds, nanoseconds = (builder.sitofp(builder.load(cgutils.gep_inbounds(builder, time_spec, 0, i)), ir.DoubleType()) for i in (0, 1))
        return builder.fadd(seconds, builder.fmul(nanoseconds, ir.DoubleType()(1e-9)))
    return types.float64(types.int64), codegen


@njit(**INNER)
def read_piece(descriptor, offset, nbytes, slot, at, journal, p):
    "Read piece `p`, `nbytes` at `offset`, into slot[at:], `at` a whole page; returns where it begins, -1 if not all of it came."
    low = offset - offset % PAGE
    want = (offset + nbytes - low + PAGE - 1) // PAGE * PAGE
    got = _pread(descriptor, slot, at, want, low)
    if got < offset + nbytes - low:
        return -1
    journal[p + 1, 0], journal[p + 1, 2], journal[p + 1, 3], journal[p + 1, 4] = clock(WALL), got, clock(BUSY), nbytes
    journal[0, 0] += journal[p + 1, 0] - journal[p, 1]
    journal[0, 2] += got
    journal[0, 4] += nbytes
    return at + offset - low


@njit(**INNER)
def worked(journal, p):
    "Write down that piece `p` has been multiplied."
    journal[p + 1, 1], journal[p + 1, 3] = clock(WALL), clock(BUSY) - journal[p + 1, 3]
    journal[0, 3] += journal[p + 1, 3]


@njit(**KERNEL)
def _stream_rows(descriptor, offset, rows, piece, stride, slot, elements, k, x, out, first, drawn, journal):
    """Rows [rows, k] at `offset`, read `piece` at a time into `slot`, of which `elements` is another view, as long as `drawn` gives
    pieces. Returns the number that is no piece any more, or that of a piece which did not come as it should."""
    journal[0, 1] = clock(WALL)
    row, done, pieces = k * elements.itemsize, 0, -(-rows // piece)
    while True:
        p = draw(drawn)
        if p >= pieces:
            return p
        at = p * stride % pieces * piece
        n = min(piece, rows - at)
        begin = read_piece(descriptor, offset + at * row, n * row, slot, 0, journal, done)
        if begin < 0 or begin % elements.itemsize:
            return p
        start = begin // elements.itemsize
        matmul_rows(elements[start:start + n * k].reshape(n, k), x, out, first + at)
        worked(journal, done)
        done += 1


def pieces_of(rows, row_bytes, room=PIECE):
    "(rows a piece, number of pieces) for `rows` rows of `row_bytes` that come to a place with `room` for at least one."
    fit = min(PIECE, room) // row_bytes
    piece = fit // TILE * TILE or fit // 4 * 4 or 1  # as the kernels take them, where there is room
    return piece, -(-rows // piece)


def stride_of(pieces):
    "How far apart, of `pieces` in a row, two are that are drawn one after the other. Each is drawn once, because the two have no common factor."
    return next(stride for stride in count(max(1, round(pieces * GOLDEN))) if math.gcd(stride, pieces) == 1)


def stream_rows(files, read, slot, x, out, drawn):
    """Read and multiply pieces of a read until `drawn` gives no more; any number of threads may, each with a slot of its own. A piece that
    compiled code cannot have, of a file read through the page cache, at an odd address, cut short, is File.read's: it says why."""
    row = read.nbytes // read.rows
    piece, pieces = pieces_of(read.rows, row, len(slot) - 2 * PAGE)  # compiled code does not look where a read ends
    stride = stride_of(pieces)
    elements = slot.view(ARRAY_DTYPE[read.extent.dtype])
    while True:
        p = files.stream(read.extent, read.begin, read.part, pieces, lambda descriptor, journal: _stream_rows(
            descriptor, read.extent.offset + read.begin, read.rows, piece, stride, slot, elements, row // elements.itemsize, x, out,
            read.first, drawn, journal))
        p = draw(drawn) if p is None else p
        if p >= pieces:
            return
        at = p * stride % pieces * piece
        n = min(piece, read.rows - at)
        start = files.read(slot, read.extent, read.begin + at * row, n * row, read.part)
        rows = typed(slot, start, n * row, read.extent.dtype).reshape(n, -1)
        files.multiply(rows.nbytes, matmul_rows, rows, x, out, read.first + at)

# %% [markdown]
# How many readers may do this at a time? If the caller gives some of the cores, as many as that. If it gives all, more than there are
# cores: one that waits for its device leaves the core to another.
#
# What is no plain product, as attention with `kv_b_proj`, is handed to `share` as a function of whole blocks. A reader calls it on a block it
# has read.

# %% tags=["export"]
def at_once(threads):
    "How many readers may read and multiply at a time when the arithmetic has `threads` threads."
    return threads if threads < CORES else max(threads, MOST_READERS)


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

    def each(self, work, threads, stream=None):
        """Call work(first row, rows [m, k]) on every block, in any order, at most `threads` at a time, on the thread that
        has read it: the rows are still in that core's cache. Returns when all calls have. `stream`: as Ring.each takes it."""
        def call(read, data):
            work(read.first, data.reshape(read.rows, *self.shape[1:]))
        self.ring.each(self.number, len(self.reads), call, threads, stream)

    def share(self, work, threads):
        "The same for arithmetic that has `threads` threads: as many readers at a time as at_once() says."
        self.each(work, at_once(threads))

    def multiply(self, x, out, threads):
        "out float32 [T, n] = x W^T for x as `linear` lays it out. What has not been read ahead is read and multiplied in pieces."
        def work(first, rows):
            matmul_rows(rows, x, out, first)

        def stream(read, slot, drawn):
            stream_rows(self.ring.files, read, slot, x, out, drawn)
        self.each(work, at_once(threads), stream if COMPILED_READS else None)

# %% tags=["export"]
def as_float32(array):
    "A resident vector, [1, H] weight (as [H]) or convolution, float32."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


def is_matrix(name, extent):
    """True for what can arrive row by row. Vectors, [1, H] residual projections and convolutions (53 MB of 108.8 GB) always stay
    in memory; a projection to one row, as `b_proj` of a single head, is a matrix."""
    return len(extent.shape) == 2 and not name.endswith("_res_proj.weight")

# %% [markdown]
# Some matrices are worth having early. Until the **router** of a layer has spoken, no expert can be asked for, and all of its 12.8 MB are needed
# for that. Behind the blocks of the matrices before it, it would come last and then hold up everything. So it has a ring of its own, large
# enough for one router: as the router of this layer is used up, that of the next comes in, piece by piece, by a single reader, which
# is in nobody's way and has a whole layer's time.

# %% tags=["export"]
def early_room(extents):
    "(slots, bytes of each) of a ring that holds any of the matrices `extents` whole, in pieces."
    slot = min(widened(max(PIECE, *(e.nbytes // e.shape[0] for e in extents))), max(widened(e.nbytes) for e in extents)) + PAGE
    return max(len(row_blocks(e, 1, slot, "")) for e in extents), slot


class Trunk:
    """Every tensor of the walk but the routed experts, resident or streamed.

    `walk`: tensor names in the order one pass takes them. `pinned`: matrices kept in memory. `multiples`: {name: rows that
    must stay together}. The other matrices stream through the ring, the same list of reads every pass, at most `ahead` blocks of
    it waiting; those of `early`, whose rows need not stay together, through a ring of early_room() with one reader.
    """

    def __init__(self, checkpoint, walk, pinned, multiples, files, parts, slots, slot_bytes, readers, progress=None, ahead=None, early=frozenset()):
        self.files, self.parts, self.checkpoint = files, parts, checkpoint
        self.extents = {name: checkpoint.extent(name) for name in walk}
        self.resident, self.reads = {}, {}
        room = early_room([self.extents[name] for name in early]) if early else None
        for name, extent in self.extents.items():
            if is_matrix(name, extent) and name not in pinned:
                self.reads[name] = row_blocks(extent, multiples.get(name, 1), room[1] if name in early else slot_bytes, parts(name))
        for name, extent in self.extents.items():
            if name not in self.reads:
                array = files.array(extent, parts(name))
                self.resident[name] = Rows(array) if is_matrix(name, extent) else as_float32(array)
                if progress is not None:
                    progress(extent.nbytes)
        self._order, self._next, self._index, lines = list(self.reads), 0, {}, ([], [])
        for name in self._order:
            line = name in early
            self._index[name] = line, len(lines[line])
            lines[line].extend(self.reads[name])
        self.ring = Ring(files, lines[0], slots, slot_bytes, readers, ahead) if lines[0] else None
        self.early = Ring(files, lines[1], *room, 1, name="early") if lines[1] else None
        self._starts, self._closed = [0, 0], False

    def _rings(self):
        return [ring for ring in (self.ring, self.early) if ring is not None]

    def begin(self):
        "Start a pass: a ring whose last one stopped half-way begins anew."
        self._next, self._starts = 0, [ring and ring.begin() for ring in (self.ring, self.early)]

    def take(self, name):
        "A matrix with .shape and .blocks(), or a float32 array. A streamed tensor comes when its turn in the walk comes, once a pass."
        resident = self.resident.get(name)
        if resident is not None:
            return resident
        if self._closed:
            raise RuntimeError("the trunk is closed")
        if self._order[self._next] != name:
            raise RuntimeError(f"the walk asks for {name}, but {self._order[self._next]} is next")
        self._next = (self._next + 1) % len(self._order)
        line, index = self._index[name]
        return Streamed((self.ring, self.early)[line], self.extents[name], self.reads[name], self._starts[line] + index)

    def row(self, name, i):
        "Row `i` of a matrix outside the walk, float32: one read."
        return bf16_to_float32(self.files.array(self.checkpoint.extent(name), self.parts(name), i, 1)[0])

    @property
    def wait_seconds(self):
        "Seconds the arithmetic stood still for a row block."
        return sum(ring.wait_seconds for ring in self._rings())

    def close(self):
        "End the readers and give the memory back; whoever asks for a tensor gets a RuntimeError."
        self._closed = True
        for ring in self._rings():
            ring.close()
        self.resident.clear()

# %% [markdown]
# ## 5.3.7 The gate: streamed equals resident
#
# One layer and a half of the embedded model, multiplied resident and through rings of different sizes, twice over. A wrong slot, a stale
# block or a lost row would change bytes.

# %%
from k3lib.linear import NotFinite, linear

checkpoint = Checkpoint(FOLDER)
WALK = [name for name in checkpoint.names() if ".layers.0." in name or ".layers.1.self_attn." in name]
MATRICES = [name for name in WALK if is_matrix(name, checkpoint.extent(name))]


def ramp(n):
    return np.linspace(-1, 1, n, dtype=np.float32)[None]


class Whole(Ring):
    "Every block is read whole before it is multiplied."

    def each(self, number, count, work, threads, stream=None):
        super().each(number, count, work, threads)


def products(slots, slot_bytes, readers, passes=2, ring=Ring):
    "Every matrix of the walk times a fixed vector, in order, `passes` times over."
    files = Files()
    trunk = Trunk(checkpoint, WALK, frozenset(), {}, files, lambda name: "trunk", slots, slot_bytes, readers)
    if ring is not Ring:
        trunk.ring.close()
        trunk.ring = ring(files, trunk.ring.reads, slots, slot_bytes, readers)
    out = []
    for _ in range(passes):
        trunk.begin()
        out += [linear(trunk.take(name), ramp(checkpoint.extent(name).shape[1])) for name in MATRICES]
    trunk.close()
    files.close()
    return np.concatenate([y.ravel() for y in out])


expected = np.concatenate([linear(Rows(checkpoint.raw(name)), ramp(checkpoint.extent(name).shape[1])).ravel() for name in MATRICES] * 2)
for ring in (Ring, Whole):
    for slots, slot_bytes, threads in ((1, 20_000, 1), (2, 20_000, 2), (3, 50_000, 2), (40, 80_000, 3)):
        assert products(slots, slot_bytes, threads, ring=ring).tobytes() == expected.tobytes()
print("four rings, in pieces and whole, two passes each, the bytes of the resident product: True")

# %% [markdown]
# Three rings that break the rule, on purpose. The first fills a slot that is still in use, the second gives out a block twice and skips
# one, the third begins the second pass one block late. None passes, and if there is an error it is luck.

# %%
class Hasty(Whole):
    "Its slots are free again the moment they are handed out."

    def take(self, number):
        data = super().take(number)
        self.release(number)
        time.sleep(1e-3)  # a product that takes its time
        return data

    def each(self, number, count, work, threads, stream=None):
        for n in range(number, number + count):
            work(self.reads[n % len(self.reads)], self.take(n))


class Stuttering(Whole):
    def _fill(self, slot, read):
        i = self.reads.index(read)
        return super()._fill(slot, self.reads[i - 1] if i % 2 and self.reads[i - 1].nbytes == read.nbytes else read)


class Shifted(Whole):
    def _fill(self, slot, read):
        i, late = self.reads.index(read), self._issued > len(self.reads)
        other = self.reads[(i + 1) % len(self.reads)]
        return super()._fill(slot, other if late and other.nbytes == read.nbytes else read)


def passes(ring):
    try:
        return products(2, 20_000, 2, ring=ring).tobytes() == expected.tobytes()
    except NotFinite:  # float32 read as bf16 has infinities
        return False


for ring in (Hasty, Stuttering, Shifted):
    assert not passes(ring)
    print(f"{ring.__name__:<11} fails the gate: True")

# %% [markdown]
# The tests go further: readers that sleep at random, every slot poisoned when it is given back, fifty runs; passes broken off at every
# block; a matrix abandoned half-way, which must be an error and not a shift by the rows that were left.
#
# ## 5.3.8 What waits for what
#
# A matrix of 16 MB of real bytes, eight tokens, and three ways through it: read a block, then multiply it; a ring, whose caller multiplies; a
# ring whose readers read and multiply in pieces. Every read and every product leaves an event.

# %%
from k3lib.mxfp4 import aligned as on_a_line

width = 4096
matrix = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
(scratch / "matrix").write_bytes(b"header!!" + matrix.tobytes())
with open(scratch / "holes", "wb") as file:
    file.truncate(8 + matrix.nbytes)


def first_rows(n, where="matrix"):
    return Extent(str(scratch / where), 8, n * width * 4, "F32", (n, width))


class OneByOne:
    "Read, multiply, read, multiply."

    def __init__(self, files, extent, reads):
        self.files, self.extent, self.reads, self.slot = files, extent, reads, aligned(max(read.nbytes for read in reads) + 2 * PAGE)

    def multiplied(self, block, x, out, first):
        began = time.perf_counter()
        matmul_rows(block, x, out, first)
        self.files.note("arithmetic", began, block.nbytes)

    def run(self, x, out):
        for read in self.reads:
            start = self.files.read(self.slot, self.extent, read.begin, read.nbytes, "trunk")
            self.multiplied(typed(self.slot, start, read.nbytes, "F32").reshape(read.rows, width), x, out, read.first)

    def close(self):
        self.files.close()


class CallerMultiplies(OneByOne):
    def __init__(self, files, extent, reads):
        self.files, self.extent, self.reads = files, extent, reads
        self.ring = Ring(files, reads, 4, max(read.nbytes for read in reads) + 2 * PAGE, readers)

    def streamed(self):
        return Streamed(self.ring, self.extent, self.reads, self.ring.begin())

    def run(self, x, out):
        for first, block in self.streamed().blocks():
            self.multiplied(block, x, out, first)

    def close(self):
        self.ring.close()
        self.files.close()


class ReadersMultiply(CallerMultiplies):
    def run(self, x, out):
        self.streamed().multiply(x, out, readers)


def timed(way, extent, kib, tokens, passes=2):
    "(seconds, processor seconds, events, product) of one pass of `way` over a matrix, the fastest of a few."
    files, x = Files(), on_a_line((tokens, width))
    machine = way(files, extent, row_blocks(extent, 1, kib << 10, "trunk"))
    x[:] = ramp(width)
    runs = []
    for _ in range(passes):
        files.log, out = [], np.zeros((tokens, extent.shape[0]), np.float32)
        began, busy = time.perf_counter(), time.process_time()
        machine.run(x, out)
        runs.append((time.perf_counter() - began, time.process_time() - busy, files.log, out))
    machine.close()
    return min(runs, key=lambda run: run[0])


WAYS = {"read, then multiply": OneByOne, "a ring, the caller multiplies": CallerMultiplies, "readers read and multiply": ReadersMultiply}
sixteen = first_rows(1024)
digests = {hashlib.sha256(timed(way, sixteen, slot_kib // 4, 8)[3]).hexdigest() for way in WAYS.values()}
assert len(digests) == 1
print("three ways, one result: True")

# %% tags=["nbval-ignore-output"]
def timeline(ax, log, title):
    "Reads and products of each thread over time."
    start, threads = min(e.began for e in log), sorted({e.thread for e in log})
    for row, thread in enumerate(threads):
        for what, low, color in (("trunk", row - 0.4, "C0"), ("arithmetic", row, "C1")):
            spans = [((e.began - start) * 1e3, (e.ended - e.began) * 1e3) for e in log if e.thread == thread and e.what == what]
            ax.broken_barh(spans, (low, 0.4), color=color, edgecolor="white", lw=0.4)
    ax.set_yticks(range(len(threads)), [t.replace("MainThread", "caller").replace("k3-trunk-", "reader ") for t in threads])
    ax.set_title(title)


fig, axes = plt.subplots(3, 1, figsize=(6, 4.4), sharex=True)
for ax, (name, way) in zip(axes, WAYS.items()):
    seconds, _, log, _ = timed(way, sixteen, slot_kib // 4, 8, passes=12)
    timeline(ax, log, f"{name}: {seconds * 1e3:.0f} ms")
axes[2].set_xlabel("time, ms (blue: reading, orange: multiplying)")
plt.show()

# %% [markdown]
# In the first picture nothing overlaps. In the second the caller multiplies what readers have put down, at the price of fetching it from
# another core's cache or from memory. In the third every reader goes through its block in pieces of its own, and what one waits for the
# other does not. At the left edge of the last two the readers have run ahead: part of the next pass was there before it began.
#
# ## 5.3.9 Making it fast
#
# What does a byte cost on its way? The device sets a floor: no ring is faster than the disk. With holes, which the kernel fills with zeros as
# fast as it can write, the processor sets it, and then it matters where the bytes are between the read and the product. One token, a 64 MB matrix:

# %% tags=["nbval-ignore-output"]
def rates(way, where, kib=slot_kib):
    "(GB a second, GB a second of processor time) of the fastest of some passes over the whole matrix."
    seconds, busy, _, _ = timed(way, first_rows(rows, where), kib, 1, passes=8)
    return matrix.nbytes / 1e9 / seconds, matrix.nbytes / 1e9 / busy


print(f"{'':<32}{'from the device':>17}{'holes':>24}")
for name, way in WAYS.items():
    (device, _), (wall, worked_rate) = rates(way, "matrix"), rates(way, "holes")
    print(f"{name:<32}{device:>12.1f} GB/s{wall:>12.1f} GB/s, {worked_rate:.1f} per core")

# %% tags=["nbval-ignore-output"]
sizes, by_size, usual = [64, 128, 256, 512, 1024, 2048, 4096], [], PIECE
for kib in sizes:
    PIECE = kib << 10  # the compiled loop is told how many rows make a piece
    by_size.append(rates(ReadersMultiply, "holes")[1])
PIECE = usual
fig, ax = plt.subplots()
ax.plot(sizes, by_size, "o-")
ax.axhline(rates(CallerMultiplies, "holes")[1], color="0.6", lw=1)
ax.text(sizes[0], rates(CallerMultiplies, "holes")[1] * 1.05, "the caller multiplies", fontsize=8, color="0.4")
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, sizes)
ax.set(xlabel="bytes in a piece, KiB", ylabel="GB a second of processor time", title="The best piece fills the core's own cache, and no more", ylim=0)
plt.show()

# %% [markdown]
# What did not help: huge pages for the slots; a Python call a megabyte (at K3's 111 GB a token that is 110,000 calls, and two readers stand in
# line for one interpreter); reading far ahead, because what waits has left the cache when its turn comes. What did: the compiled loop; one counter
# for the pieces of a matrix instead of a lock a block; waking a thread only when there is something for it; a block or two of the next matrix read
# while this one is multiplied, so that a device is never idle; slots that go out last in, first out.
#
# How many readers a device wants is measured, on the device. Pieces come from all over a file, once each; the fewest readers that come
# within a tenth of the best rate are enough, and to them come those that multiply meanwhile.

# %% tags=["export"]
def read_rates(path, counts=(1, 2, 4, 8, 16), seconds=0.4):
    "{readers: bytes a second} for each of `counts` readers, that many seconds each, of the file `path`. Raises CheckpointError."
    size, turn, rates, file = os.path.getsize(path), count(), {}, File(path)
    pieces = max(1, size // PIECE)

    def read(until):
        buffer, moved = aligned(widened(PIECE)), 0
        while time.perf_counter() < until:
            at = next(turn) % pieces * PIECE
            moved += file.read(buffer, at, min(PIECE, size - at))[1]
        return moved

    try:
        for readers in counts:
            began = time.perf_counter()
            with ThreadPoolExecutor(readers) as pool:
                moved = sum(pool.map(read, [began + seconds] * readers))
            rates[readers] = moved / (time.perf_counter() - began)
    finally:
        file.close()
    return rates


def enough_readers(rates):
    "The fewest readers whose rate is within a tenth of the best."
    return min(readers for readers, rate in rates.items() if rate >= 0.9 * max(rates.values()))

# %% tags=["nbval-ignore-output"]
rates_here = read_rates(scratch / "matrix", seconds=0.1)
print("; ".join(f"{readers} readers {rate / 1e9:.2f} GB/s" for readers, rate in rates_here.items()), "- enough:", enough_readers(rates_here))

# %%
assert enough_readers({1: 1.0, 2: 1.85, 4: 2.0, 8: 1.9}) == 2

# %% [markdown]
# ## 5.3.10 Why the front of the walk is pinned
#
# Memory left over could be a cache. But a pass is a cycle: when a block is asked for again, everything else has been asked for
# since. A least-recently-used cache smaller than the cycle has always just thrown away the block that comes next. Pinning any
# fixed part saves exactly that part, every pass; the front is as good as any, and it is ready when a pass begins. The third line
# knows the future and lets go of what is needed last. On a cycle that is the block just used, every time: the best of all caches pins.

# %%
def lru_hits(capacity, cycle, passes):
    "Share of the requests after the first pass that a cache answers which evicts the least recently used of `capacity` blocks."
    kept, hits = [], 0
    for n in range(cycle * passes):
        block = n % cycle
        hits += block in kept
        kept = [b for b in kept if b != block][-(capacity - 1):] + [block] if capacity > 1 else [block]
    return hits / (cycle * (passes - 1))


def clairvoyant_hits(capacity, cycle, passes):
    "The same for a cache that evicts the block whose next request is farthest away."
    kept, hits = set(), 0
    for n in range(cycle * passes):
        block = n % cycle
        hits += block in kept
        kept.add(block)
        if len(kept) > capacity:
            kept.remove(max(kept, key=lambda b: (b - block - 1) % cycle))
    return hits / (cycle * (passes - 1))


CYCLE, PASSES = 60, 10
shares = np.arange(6, CYCLE + 1, 6)
lru, best = ([f(int(c), CYCLE, PASSES) for c in shares] for f in (lru_hits, clairvoyant_hits))
assert lru[:-1] == [0] * (len(lru) - 1) and lru[-1] == 1
assert np.allclose(best, shares / CYCLE)
print("with 90% of the cycle in memory: LRU", f"{lru[-2]:.2f},", "the pinned front", f"{shares[-2] / CYCLE:.2f},", "clairvoyant", f"{best[-2]:.2f}")

# %%
fig, ax = plt.subplots()
ax.plot(shares / CYCLE, best, ":", lw=3, color="C5", label="clairvoyant")
ax.plot(shares / CYCLE, shares / CYCLE, "o-", label="pin the front")
ax.plot(shares / CYCLE, lru, "s--", label="least recently used")
ax.set(xlabel="memory, share of the cycle", ylabel="share of reads saved", title="On a cycle, LRU saves nothing until it holds everything")
ax.legend()
plt.show()

# %% [markdown]
# The same argument says that the trunk gets memory before experts do: a pinned trunk byte is used at every token, a cached
# expert only if the router comes back to it (chapter 5.4).
#
# ## 5.3.11 The trunk on a faster disk
#
# Streaming needs no preparation. But the trunk is 108.8 GB of 1,561, read at every token, and a small fast disk may be at hand. `pack` copies the
# walk, in use order, into plain safetensors files: a checkpoint of its own. What the source left as holes stays holes.

# %% tags=["export"]
CHUNK = 1 << 20  # bytes copied or compared at a time


def data_runs(fd, begin, end):
    "(begin, end) of the parts of a file's bytes begin..end that are not holes; all of it where the system cannot tell."
    while begin < end:
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
            stop = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) == errno.ENXIO:  # nothing but a hole up to the end
                return
            stop = end
        if begin < end:
            yield begin, stop
        begin = stop


def _data_bytes(extent):
    with open(extent.file, "rb") as file:
        return sum(end - begin for begin, end in data_runs(file.fileno(), extent.offset, extent.offset + extent.nbytes))


def _pieces(begin, end):
    return ((at, min(CHUNK, end - at)) for at in range(begin, end, CHUNK))


def _copy(files, extent, target, offset):
    "Write a tensor's data to byte `offset` of the file `target`, but for the holes."
    buffer = aligned(widened(CHUNK))
    with open(extent.file, "rb") as source:
        for begin, end in data_runs(source.fileno(), extent.offset, extent.offset + extent.nbytes):
            target.seek(offset + begin - extent.offset)
            for at, n in _pieces(begin - extent.offset, end - extent.offset):
                start = files.read(buffer, extent, at, n, "other")
                target.write(buffer[start:start + n])


def _same(files, a, b):
    "True if the extents `a` and `b` hold the same bytes."
    left, right = aligned(widened(CHUNK)), aligned(widened(CHUNK))
    for at, n in _pieces(0, a.nbytes):
        i, j = files.read(left, a, at, n, "other"), files.read(right, b, at, n, "other")
        if left[i:i + n].tobytes() != right[j:j + n].tobytes():
            return False
    return True

# %% [markdown]
# A file is written under another name, brought down to the disk, compared with the checkpoint byte by byte, and only then renamed. So a file
# that has its name is right, a run that was broken off goes on where it stopped, and a folder that is not complete is no checkpoint.

# %% tags=["export"]
def pack(checkpoint, walk, folder, progress=None):
    """Copy the tensors of `walk`, in its order, to safetensors files in `folder`, one a layer and one for the rest; holes stay holes.

    A file gets its name only when it is on the disk and equal to the checkpoint, so a run that was broken off can be taken up
    again: a file that is there is compared, not written. `progress` is shown the bytes of each tensor done. Raises
    CheckpointError if a layer does not lie in one piece or a file is of another checkpoint, OSError if the disk is full.
    """
    for layer, why in checkpoint.contiguity().broken_layers.items():
        raise CheckpointError(f"{checkpoint.path}: layer {layer} is not in one piece: {why}; it streams, but it is not packed")
    os.makedirs(folder, exist_ok=True)
    groups = [list(names) for _, names in groupby(walk, _layer)]
    paths = [os.path.join(folder, f"model-{i:05}-of-{len(groups):06}.safetensors") for i in range(1, len(groups) + 1)]
    strays = {name for name in os.listdir(folder) if name.endswith(".safetensors")} - {os.path.basename(path) for path in paths}
    if strays:
        raise CheckpointError(f"{folder}: holds {min(strays)}, which is no part of a packed trunk of {len(groups)} files")
    missing = [checkpoint.extent(name) for path, names in zip(paths, groups) if not os.path.exists(path) for name in names]
    need, free = sum(map(_data_bytes, missing)), shutil.disk_usage(folder).free
    if need > free:
        raise OSError(errno.ENOSPC, f"{folder}: {need} bytes are still to be written, but {free} are free")
    for path, names in zip(paths, groups):
        _pack_file(checkpoint, names, path, progress or (lambda nbytes: None))


def _layer(name):
    "The layer a tensor of the walk belongs to, or None."
    return name.split(".layers.")[1].split(".")[0] if ".layers." in name else None


def _pack_file(checkpoint, names, path, progress):
    extents = [checkpoint.extent(name) for name in names]
    head = header_bytes([(name, e.dtype, e.shape) for name, e in zip(names, extents)])
    offsets = [len(head) + sum(e.nbytes for e in extents[:i]) for i in range(len(extents))]
    there, part, files = os.path.exists(path), path + ".part", Files(checkpoint.identities)
    try:
        if not there:
            _write_file(files, extents, head, offsets, part)
        packed = path if there else part
        with open(packed, "rb") as file:
            good = file.read(len(head)) == head and os.fstat(file.fileno()).st_size == offsets[-1] + extents[-1].nbytes
        for name, extent, offset in zip(names, extents, offsets):
            if not good or not _same(files, extent, extent._replace(file=packed, offset=offset)):
                raise CheckpointError(f"{packed}: {name if good else 'header or size'} is not as in {checkpoint.path}: another "
                                      "checkpoint's, or damaged; remove the file to have it written again")
            progress(extent.nbytes)
        files.check()
    except BaseException:
        if not there and os.path.exists(part):  # half a file is of no use to the next run
            os.unlink(part)
        raise
    finally:
        files.close()
    if not there:
        os.replace(part, path)
        sync_folder(os.path.dirname(path))


def _write_file(files, extents, head, offsets, part):
    "Header and tensors to `part`, and down to the disk."
    with writing(part) as target:
        target.write(head)
        target.truncate(offsets[-1] + extents[-1].nbytes)
        for extent, offset in zip(extents, offsets):
            _copy(files, extent, target, offset)
        target.flush()
        os.fsync(target.fileno())

# %% [markdown]
# Reading from it takes one class that looks a tensor up in the folder first. The folder could be of another checkpoint with the same shapes; the first
# row of every tensor tells.

# %% tags=["export"]
class Packed:
    """A checkpoint whose `walk` is read from a folder that pack() has filled; for Trunk, in the checkpoint's place.

    Raises FileNotFoundError if there is no such folder, CheckpointError if it is incomplete or packed from another checkpoint:
    dtypes, shapes and the first row of every tensor are compared.
    """

    def __init__(self, checkpoint, walk, folder):
        self.checkpoint, self.packed = checkpoint, Checkpoint(folder)
        self.identities = checkpoint.identities | self.packed.identities
        files = Files(self.identities)
        try:
            for name in walk:
                here, there = self.extent(name), checkpoint.extent(name)
                if here.file == there.file or here[2:] != there[2:] or self._row(files, here) != self._row(files, there):
                    raise CheckpointError(f"{folder}: {name} is missing or not that of {checkpoint.path}: pack this checkpoint again")
        finally:
            files.close()

    @staticmethod
    def _row(files, extent):
        return files.array(extent, "other", 0, 1).tobytes()

    def extent(self, name):
        "Extent of a tensor: in the packed folder if it is there."
        return (self.packed if name in self.packed else self.checkpoint).extent(name)

# %%
folder = scratch / "packed"
walk = [name for name in checkpoint.names() if ".layers." in name and ".experts." not in name]
done = []


def stop_after_five(nbytes):
    done.append(nbytes)
    if len(done) == 60:
        raise KeyboardInterrupt


try:
    pack(checkpoint, walk, folder, stop_after_five)
except KeyboardInterrupt:
    print("broken off:", len(list(folder.glob("*.safetensors"))), "of 13 files have their names")
try:
    Packed(checkpoint, walk, folder)
except CheckpointError as error:
    print("refused:", str(error).split("packed: ")[1])
pack(checkpoint, walk, folder)
source = Packed(checkpoint, walk, folder)
assert all((Checkpoint(folder).raw(name) == checkpoint.raw(name)).all() for name in walk)
print("taken up again:", len(Checkpoint(folder)), "tensors in", len(Checkpoint(folder).files), "files, the same bytes: True")

# %%
files = Files()
trunk = Trunk(source, WALK, frozenset(), {}, files, lambda name: "trunk", 3, 20_000, 2)
trunk.begin()
streamed = np.concatenate([linear(trunk.take(name), ramp(source.extent(name).shape[1])).ravel() for name in MATRICES])
assert streamed.tobytes() == expected[:len(streamed)].tobytes()
print("read from", sorted(files.how()))
trunk.close()
files.close()
shutil.rmtree(scratch)

# %% [markdown]
# ## 5.3.12 What it costs in K3
#
# With the released shapes (`fixtures/k3`), slots of 4 MiB. Widening to whole pages adds at most two pages to a block. The ring replaces what an engine
# that loads layer by layer must hold: 2.34 GB for layer 0 alone.

# %%
from k3lib.config import read_config

SLOT, SLOTS = 4 << 20, 4
k3 = read_config(ROOT / "fixtures" / "k3")
trunk = [(name, Extent("", 8, int(np.prod(shape)) * ITEMSIZE[dtype], dtype, shape)) for name, dtype, shape in k3.tensors()
         if ".layers." in name and ".experts." not in name or "lm_head" in name]
streams = [e for name, e in trunk if is_matrix(name, e)]
blocks = [read for e in streams for read in row_blocks(e, 1, SLOT, "trunk")]
streamed = sum(read.nbytes for read in blocks)
print(f"{len(streams):,} matrices in {len(blocks):,} blocks, {streamed / 1e9:.1f} GB a pass, lm_head with its 2.35 GB included")
print(f"vectors, always resident: {sum(e.nbytes for _, e in trunk) / 1e6 - streamed / 1e6:.0f} MB")
print(f"widening: at most {2 * PAGE * len(blocks) / streamed:.1%} more bytes; the ring: {SLOTS * SLOT / 1e6:.0f} MB, 1/{2341e6 / (SLOTS * SLOT):.0f} of layer 0")

# %% [markdown]
# ## Summary
#
# - A matrix is rows that arrive: blocks of whole rows through a few reused slots, in an order known in advance.
# - Reads bypass the page cache where the file system allows it, and the report says where it does not.
# - A slot is the unit of trust: filled once, multiplied once, given back once, and numbered so that nothing stale can touch it.
# - Pinning the front of a cyclic walk saves its share of every pass. An LRU of the same size saves nothing.
#
# ## Exercises
#
# 1. In `schedule`, let a product take 3 ticks and a read 2. How many slots are enough, and what is the total for $n$ blocks?
# 2. Change `lru_hits` to evict the *most* recently used block. What does it save at half the cycle, and why is that nearly the optimum?
# 3. How many bytes does widening add to one pass over the embedded model? `Files.moved` counts them; compare with K3's blocks.
# 4. Give `Ring` a first-in, first-out list of free slots and measure 5.3.9 again. Which column changes?
#
# Next: [5.4 Experts](04_experts.ipynb), the one part of a pass that nobody can order in advance.
