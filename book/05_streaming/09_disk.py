# %% [markdown]
# # 5.9 Past the page cache
#
# [5.8 Ninety-three layers, one forward pass a token](08_model.ipynb) ·
# [contents](../README.md) ·
# [5.10 How a budget's bytes are laid out](10_layout.ipynb)

# %%
import hashlib
import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"

# %% tags=["parameters"]
rows = 4096  # of the matrix that is timed in 5.13.3, of 4096 float32 each
slot_kib = 4096
readers = 2
seed = 0

# %% tags=["export"]
import errno
import logging
import mmap
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple
import numpy as np
from k3lib.fileio import CheckpointError, fingerprint

# %% tags=["export"]
PAGE = 4096  # O_DIRECT wants offsets, lengths and addresses in whole pages


MAX_READERS = 64


MAX_READ = 1 << 26  # Linux moves at most 2 GiB - 4 KiB a call; after less a signal is heard sooner


ITEMSIZE = {"BF16": 2, "F32": 4, "U8": 1}


ARRAY_DTYPE = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}


# %% [markdown]
# With one slot the times add up: $6(2 + 1)$. With two they overlap, and what remains is the slower of the two plus one
# lead-in: $6 \cdot 2 + 1$. More slots change nothing here; they are for reads and products that do not always take
# equally long.
#
# ## 5.9.1 Memory of our own
#
# Mapping the file would be less code. But every mapped page that a product touches counts as resident until the kernel
# takes it back, and the kernel takes it back when it likes. One pass over a mapped file of 64 MB, and one through a 1
# MB buffer of our own:

# %% tags=["export"]
def page_buffer(nbytes):
    "A page-aligned uint8 array of at least `nbytes`, from the operating system, zero and uncommitted until written."
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, max(PAGE, whole_pages(nbytes)), **private), np.uint8)


def whole_pages(nbytes):
    return -(-nbytes // PAGE) * PAGE


def page_padded(nbytes):
    "Buffer bytes that hold any extent of `nbytes` widened to whole pages at both ends."
    return whole_pages(nbytes) + PAGE


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
    buffer, top = page_buffer(1 << 20), 0
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
# A budget needs memory whose size we chose: anonymous, private, reused, and aligned to pages because the next section
# asks for it.
#
# ## 5.9.2 Reading past the page cache
#
# A buffered read moves every byte twice and leaves a copy in the page cache, which for a walk of 108.8 GB only pushes
# out what someone else wanted. `O_DIRECT` moves bytes from the device to our buffer. Its price: offset, length and
# address must be whole pages, so an extent is *widened* to the pages it touches, and what comes back is an index into
# the buffer.

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
        now = fingerprint(status)
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
        want = whole_pages(end - low)
        view, done = memoryview(buffer)[:want], 0
        if len(view) < want:
            raise ValueError(f"{nbytes} bytes at offset {offset} need a buffer of {want}, this one has {len(view)}")
        while low + done < end:
            fd, direct = self.descriptor
            try:
                got = _read_at(self, fd, view[done:done + MAX_READ], low + done)
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
# Some file systems refuse, at open or only at the first read. Then reads are buffered and their pages are dropped
# behind them. The first descriptor stays open all the same: another reader may be inside a call on it, and a closed
# descriptor's number is soon another file's.
#
# Any extent of a small file, against the plain bytes:

# %%
content = np.random.default_rng(seed).bytes(5 * PAGE + 100)
(scratch / "small").write_bytes(content)
small, rng = File(str(scratch / "small")), np.random.default_rng(seed)
for _ in range(300):
    low, high = np.sort(rng.integers(0, len(content) + 1, 2)).tolist()
    buffer = page_buffer(page_padded(high - low))
    start, moved = small.read(buffer, low, high - low)
    assert buffer[start:start + high - low].tobytes() == content[low:high]
print("300 extents read exactly: True; bytes 4095 to 4097 lie in", small.read(page_buffer(page_padded(2)), 4095, 2)[1] // PAGE, "pages")

# %% tags=["nbval-ignore-output"]
print("this file is read", small.how)

# %% [markdown]
# **What failed first.** A direct read that comes back short is asked again from the last whole page. At a file cut off
# in the middle of a page that is the same page again, for ever. Less than a page of progress means the end:

# %%
try:
    small.read(page_buffer(page_padded(3 * PAGE)), 4 * PAGE, 2 * PAGE)
except CheckpointError as error:
    print("refused:", str(error).replace(str(scratch), "..."))
else:
    raise AssertionError("read beyond the end")
small.close()


# %% [markdown]
# All shards together, with the account of what was read for which part, and what that came to in whole pages. `log`
# keeps an event a read for the timelines below.
#
# A shard that is written to, replaced or cut off during a run would mix two models in one answer. So each must be the
# file whose header was read, and `check` asks again when a pass has ended. A read that does not end cannot be told from
# one that is slow: it is waited for, and said.

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
        buffer = page_buffer(page_padded(rows * row))
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
# A header can have any length, so a bf16 matrix may begin at an odd address. Kernels take aligned arrays only; such
# data is moved to the front of its slot, inside the slot.

# %% tags=["export"]
def typed(buffer, start, nbytes, dtype):
    "buffer[start:start+nbytes] as an array of the tensor's dtype; moved to the front if its offset is odd for that dtype."
    if start % ITEMSIZE[dtype]:
        buffer[:nbytes] = buffer[start:start + nbytes]
        start = 0
    return buffer[start:start + nbytes].view(ARRAY_DTYPE[dtype])


# %%
buffer = page_buffer(PAGE)
buffer[:9] = [255, 0x80, 0x3f, 0x00, 0x40, 0x40, 0x40, 7, 7]
print([float(v) for v in bf16_to_float32(typed(buffer, 1, 6, "BF16"))])
assert bf16_to_float32(typed(buffer, 0, 6, "BF16")).tolist() == [1, 2, 3]

# %% tags=["export"]
READ_UNIT = 3 << 18  # bytes read and multiplied at a time: two readers' pieces and a vector stay in a core's own cache


# %% [markdown]
# What did not help: huge pages for the slots; a Python call a megabyte (at K3's 111 GB a token that is 110,000 calls,
# and two readers stand in line for one interpreter); reading far ahead, because what waits has left the cache when its
# turn comes. What did: the compiled loop; one counter for the pieces of a matrix instead of a lock a block; waking a
# thread only when there is something for it; a block or two of the next matrix read while this one is multiplied, so
# that a device is never idle; slots that go out last in, first out.
#
# How many readers a device wants is measured, on the device. Pieces come from all over a file, once each; the fewest
# readers that come within a tenth of the best rate are enough, and to them come those that multiply meanwhile.

# %% tags=["export"]
def read_rates(path, counts=(1, 2, 4, 8, 16), seconds=0.4):
    "{readers: bytes a second} for each of `counts` readers, that many seconds each, of the file `path`. Raises CheckpointError."
    size, turn, rates, file = os.path.getsize(path), count(), {}, File(path)
    pieces = max(1, size // READ_UNIT)

    def read(until):
        buffer, moved = page_buffer(page_padded(READ_UNIT)), 0
        while time.perf_counter() < until:
            at = next(turn) % pieces * READ_UNIT
            moved += file.read(buffer, at, min(READ_UNIT, size - at))[1]
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
