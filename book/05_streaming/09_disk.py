# %% [markdown]
# # 5.9 Past the page cache
#
# A token needs more bytes of weights than most machines have memory, so the engine reads the weights from a disk, again
# for every token. An ordinary read goes through the *page cache*: memory in which the operating system keeps parts of
# files. For this engine the page cache is of no use, and it takes memory that the budget does not count. This chapter
# reads any part of a shard past the page cache, into memory that the engine owns, where the file system allows it. At
# the end you can say what such a read costs, what happens where it is refused, and how a run notices that a shard has
# been changed during the run.
#
# > **Without it:** the weights of a token are copied from the page cache, so memory is written with
# > 274 GB<!--claim twice--> for each token, and the operating system decides how much memory the pages take.
# >
# > **With it:** memory is written with 137 GB<!--claim once--> for each token, and each read under way takes a buffer
# > of 0.79 MB.<!--claim buffer-->
#
# Needs chapters [5.1] (what the system offers) and [5.2] (files). Runs in seconds. Makes `k3lib.disk`.
#
# [5.8 Ninety-three layers, one forward pass a token](08_model.ipynb) ·
# [contents](../README.md) ·
# [5.10 How a budget's bytes are laid out](10_layout.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | extent | where a tensor's bytes lie: file, offset, length | `Extent` (5.5) |
# | page | 4,096 bytes; a direct read moves whole ones | `PAGE` |
# | page buffer | memory of the engine that begins at a page | `page_buffer` |
# | direct, buffered | a read past the page cache; a read through it | `File.access` |
# | part | what a read is for: `trunk`, `experts` or `other` | `Files.bytes_read` |
#
# [5.1]: 01_system.ipynb
# [5.2]: 02_fileio.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "disk")

# %%
import shutil
import tempfile
from pathlib import Path

from k3lib.matmul import bf16_to_float32

scratch = Path(tempfile.mkdtemp())

# %% tags=["parameters"]
seed = 0

# %% tags=["export"]
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from k3lib.fileio import MAX_READ, CheckpointError, Fingerprint, fingerprint, given_path, read_fault, require_threads
from k3lib.header import ARRAY_DTYPES, ITEMSIZE, Extent
from k3lib.system import forget_pages, has_direct, keep_uncached, open_read, pread, zero_pages

# %% tags=["export"]
PAGE = 4096  # bytes; offset, length and address of a direct read are multiples of it
READ_UNIT = 3 << 18  # bytes that a reader reads and multiplies at a time (5.12)

# %% [markdown]
# ## 5.9.1 Memory of our own
#
# A program can *map* a file: the file then looks like an array, and the system loads each page when the program touches
# it. That would take less code. But every page that was touched counts as memory of the process until the operating
# system takes the page back, and the operating system decides when. So the memory of the process grows with the file,
# whatever the budget says.
#
# This chapter uses *page buffers* instead. The engine chooses their size and uses the same buffer for one read after
# another. A page buffer begins at a multiple of 4,096 bytes, because direct reads require it. The figure shows the way
# of a weight through the page cache, on the left, and past it, on the right.

# %%
K3 = read_config(ROOT / "fixtures/k3")
schematics.disk(K3)


# %% tags=["export"]
def whole_pages(nbytes: int) -> int:
    "`nbytes` rounded up to whole pages."
    return -(-nbytes // PAGE) * PAGE


def page_padded(nbytes: int) -> int:
    "Bytes of a buffer for an extent of `nbytes` that is read in whole pages, wherever in a page it begins."
    return whole_pages(nbytes) + PAGE


def page_buffer(nbytes: int) -> np.ndarray:
    "A page-aligned uint8 array of zeros: `nbytes` in whole pages, at least one. A page takes memory once written."
    return np.frombuffer(zero_pages(max(PAGE, whole_pages(nbytes))), np.uint8)


# %% [markdown]
# Here are the numbers of the problem box, and then an experiment: one pass over a mapped file of 64 MB, and one pass
# over the same file through a buffer of a megabyte. Each measures by how much the memory of the process grows.

# %%
token = sum(schematics.token_bytes(K3).values())
print(f"read past the page cache, memory is written once:  {token / 1e9:.0f} GB a token")  # claim once
print(f"read through the page cache, it is written twice:  {2 * token / 1e9:.0f} GB a token")  # claim twice
print(f"the buffer of one reader: {page_padded(READ_UNIT) / 1e6:.2f} MB")  # claim buffer

# %%
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
(top, with_map), before_buffer = mapped(), resident()
top_again, with_buffer = through_a_buffer()
assert top_again == top

# %% tags=["nbval-ignore-output"]
print(f"memory grows by {with_map - before:.0f} MB for the mapped file, by {with_buffer - before_buffer:.0f} MB with "
      "a buffer")


# %% [markdown]
# ## 5.9.2 One shard
#
# A buffered read moves every byte twice: from the device to the page cache, and from there to the buffer of the engine.
# A copy in the page cache would be useful if the same bytes were read again soon. But the next forward pass reads them
# again only after 108.8 GB of other weights, and by then a smaller page cache has dropped them.
#
# A direct read moves the bytes from the device into the engine's buffer at once. On Linux a program asks for it by
# opening the file with the flag `O_DIRECT`. In return, the offset in the file, the length of the read and the address
# of the buffer must be multiples of the page size. So a read is widened to all pages that its extent touches.
#
# **Refusal.** A file system may refuse direct reads, either when the file is opened or at the first read. After a
# refusal, all reads of this file are buffered, and after each of them the engine asks the system to drop the pages from
# the page cache. The first descriptor stays open, because another reader may still use it: if it were closed, the
# system could give its number to another file, and that reader would read the wrong file.
#
# **Change.** If a shard is written to, replaced or cut off during a run, the answer would mix the weights of two
# models. So the engine remembers the fingerprint ([5.2.4]) that the file had when its header was read. It compares the
# fingerprint when it opens the file for reading, and after each forward pass with `check`. `check` looks up the path
# again. The path is absolute, so that it leads to the same file even if the program has changed its working folder.
#
# **Closing.** A `File` that nothing refers to any more closes its descriptors. Every read holds a reference to its
# `File` until the read has ended, so no read is under way at that moment.
#
# [5.2.4]: 02_fileio.ipynb#5.2.4-Is-it-still-the-same-file?

# %% tags=["export"]
class File:
    """One shard, read past the page cache where the file system allows it. Any number of threads may read at a time.

    `access`: "direct", or "buffered: " and the reason. `descriptor`: the descriptor, and whether it reads directly.
    `known`: the fingerprint that the file had when its header was read; None means the one at the first open. Raises
    CheckpointError if the file cannot be opened or has another fingerprint. Dropping a File closes it.
    """

    def __init__(self, path: str, known: Fingerprint | None = None):
        self._opened: list[int] = []  # all descriptors, open until close(); first, because __del__ needs it
        self.path, self._known, self._lock = str(given_path("path", path)), known, threading.Lock()
        self.descriptor: tuple[int, bool]
        self.access: str
        if not has_direct():
            self._go_buffered("this system has no O_DIRECT")
            return
        try:
            self._use(True, "direct")
        except OSError as error:
            self._go_buffered(f"O_DIRECT refused at open: {error.strerror}")

    def _use(self, direct, access):
        fd = open_read(self.path, direct)
        try:
            self._compare(os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        self._opened.append(fd)
        self.descriptor, self.access = (fd, direct), access


# %% tags=["export"]
class File(File):
    def _go_buffered(self, why):
        "Read through the page cache from now on."
        with self._lock:
            if self._opened and not self.descriptor[1]:
                return  # another reader has done it
            try:
                self._use(False, f"buffered: {why}")
            except OSError as error:
                raise read_fault(f"{self.path}: cannot be opened: {error.strerror}", error) from None
            keep_uncached(self.descriptor[0])


# %% tags=["export"]
class File(File):
    def _compare(self, status):
        now = fingerprint(status)
        self._known = self._known or now
        if now != self._known:
            what = "was replaced by another file" if now[:2] != self._known[:2] else "was written to"
            found, expected = (f"{size} bytes of {time.ctime(ns / 1e9)}" for *_, size, ns in (now, self._known))
            raise CheckpointError(f"{self.path}: {what} during the run: found {found}, expected {expected}")

    def check(self) -> None:
        "Raise CheckpointError unless the file is still the one at its path and has not been written to."
        try:
            for status in (os.fstat(self.descriptor[0]), os.stat(self.path)):
                self._compare(status)
        except OSError as error:
            raise CheckpointError(f"{self.path}: was removed during the run: {error.strerror}") from None

    def close(self) -> None:
        "Close the descriptors. No read may be under way."
        while self._opened:
            os.close(self._opened.pop())

    def __del__(self) -> None:
        self.close()


# %% [markdown]
# The system may return fewer bytes than the program has asked for. The rest needs another read. A direct read must
# begin at a whole page, so it continues after the last whole page that was read. If the file ends in the middle of a
# page, the next read would return the same part of this page again, and so on without end. So `read` does not repeat a
# direct read that has returned less than a page. If the file ends there, the file is too short, and `read` raises an
# error. Otherwise the file is read through the page cache from then on.

# %% tags=["export"]
class File(File):
    def read(self, buffer: np.ndarray, offset: int, nbytes: int) -> tuple[int, int]:
        """Read `nbytes` at `offset` into `buffer`, a page-aligned uint8 array of at least page_padded(nbytes).

        Returns the index in `buffer` at which these bytes begin, and how many bytes the system transferred for them, in
        whole pages up to the end of the file. Raises CheckpointError if the file is too short or cannot be read,
        ValueError if the buffer is too small.
        """
        low, end = offset - offset % PAGE, offset + nbytes
        want = whole_pages(end - low)
        view, done = buffer.data[:want], 0
        if len(view) < want:
            raise ValueError(f"{nbytes} bytes at offset {offset} need a buffer of {want} bytes, not {len(view)}")
        while low + done < end:
            fd, direct = self.descriptor
            try:
                got = pread(fd, view[done:done + MAX_READ], low + done)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    where = f"{self.path}: reading {nbytes} bytes at offset {offset} failed: {error.strerror}"
                    raise CheckpointError(where) from None
                self._go_buffered(f"O_DIRECT refused at read: {error.strerror}")  # some file systems refuse it here
                continue
            if low + done + got >= end or got >= PAGE or got and not direct:
                done += got - got % PAGE if direct and low + done + got < end else got
            elif direct and os.fstat(fd).st_size >= end:
                self._go_buffered(f"O_DIRECT gave {got} bytes, less than a page")
            else:
                raise CheckpointError(self._too_short(os.fstat(fd).st_size, low + done, offset, end))
        if not self.descriptor[1]:
            forget_pages(self.descriptor[0], low, want)
        return offset - low, done

    def _too_short(self, size, at, offset, end):
        where = f"ends at byte {size}" if size < end else f"gave nothing at byte {at} of {size}"
        return f"{self.path}: {where}, but bytes {offset} to {end} are needed"


# %% [markdown]
# The gate reads 300 extents of a small file, at random places, and compares them with the bytes of the file. The file
# does not end at a whole page.

# %%
content = np.random.default_rng(seed).bytes(5 * PAGE + 100)
(scratch / "small").write_bytes(content)


def check_extents(file):
    "The gate: 300 extents at random places have the bytes of the file."
    rng = np.random.default_rng(seed)
    for _ in range(300):
        low, high = np.sort(rng.integers(0, len(content) + 1, 2)).tolist()
        buffer = page_buffer(page_padded(high - low))
        start, _ = file.read(buffer, low, high - low)
        assert buffer[start:start + high - low].tobytes() == content[low:high], f"wrong bytes from {low} to {high}"
    print("300 extents read exactly")


small = File(str(scratch / "small"))
check_extents(small)
_, transferred = small.read(page_buffer(page_padded(2)), 4095, 2)
print("bytes 4095 and 4096 lie in", transferred // PAGE, "pages")


# %% [markdown]
# The tempting mistake forgets that a widened read begins at a whole page. The extent then begins somewhere in the
# buffer and not at its front.

# %% tags=["raises-exception"]
class BeginsAtFront(File):
    def read(self, buffer, offset, nbytes):
        _, transferred = super().read(buffer, offset, nbytes)
        return 0, transferred  # WRONG: right only for extents that begin at a page


check_extents(BeginsAtFront(str(scratch / "small")))

# %% tags=["nbval-ignore-output"]
print("this file is read", small.access)

# %% [markdown]
# If a file ends too soon, the error says where it ends and which bytes were needed:

# %%
try:
    small.read(page_buffer(page_padded(3 * PAGE)), 4 * PAGE, 2 * PAGE)
except CheckpointError as error:
    print("refused:", str(error).replace(str(scratch), "..."))
else:
    raise AssertionError("read beyond the end")
small.close()


# %% [markdown]
# ## 5.9.3 All shards, and the account
#
# A checkpoint has many shards. `Files` opens each shard at its first read, and counts the bytes that are read for each
# part of the model. It keeps two counts: the bytes that were asked for, and the bytes of the whole pages that the
# system transferred for them.
#
# Many threads read at the same time. So one lock guards every change of a field. It is an `RLock`; [5.11.3] gives the
# reason. A thread takes the lock before its read, to note that the read begins, and after its read, to note that the
# read has ended. The read itself runs without the lock, so reads do not wait for each other.
#
# [5.11.3]: 11_prefetch.ipynb#5.11.3-What-is-true-whenever-nobody-holds-the-lock

# %% tags=["export"]
class ReadCount(NamedTuple):
    "The account of some reads: seconds inside them, bytes that were asked for, bytes of whole pages transferred."

    seconds: float
    nbytes: int
    transferred: int


class Files:
    """The shards of one checkpoint, each opened at its first read, and the account of what was read from them.

    `fingerprints`: {path: fingerprint} of files whose headers were read; another fingerprint is refused.
    `bytes_read`: {part: bytes of the extents that were read}. `bytes_transferred`: bytes of the whole pages that hold
    them. `read_seconds`: time inside reads, summed over the threads. A read that does not end is logged (5.9.4).

    `_lock` guards every change of a field. A report may read the three counts without it. `_under_way` {thread: (path,
    offset, when it began)}: the reads that have begun and not ended. A file is closed only when no other thread has
    a read under way. Dropping a Files closes them too, because a read refers to it until it has ended.
    """

    def __init__(self, fingerprints: dict[str, Fingerprint] | None = None):
        self.bytes_read = {"trunk": 0, "experts": 0, "other": 0}
        self.bytes_transferred, self.read_seconds = 0, 0.0
        self._fingerprints = fingerprints or {}
        self._lock = threading.RLock()
        self._read_ended = threading.Condition(self._lock)
        self._files: dict[str, File] = {}
        self._under_way: dict[int, tuple[str, int, float]] = {}
        self._closed, self._over = False, SimpleQueue[object]()  # of tokens, each of which ends the watcher
        self._watcher: threading.Thread | None = None


# %% tags=["export"]
class Files(Files):
    def _begin(self, extent, offset):
        "Note that a read begins, and return the File of the extent. It stays open until _end is called."
        with self._lock:
            at = extent.offset + offset
            if self._closed:
                raise CheckpointError(f"{extent.file}: read at offset {at} after the files were closed")
            file = self._files.get(extent.file)
            if file is None:
                file = self._files[extent.file] = File(extent.file, self._fingerprints.get(extent.file))
            if self._watcher is None:
                self._watcher = _watch(self)
            self._under_way[threading.get_ident()] = extent.file, at, time.perf_counter()
            return file

    def _end(self, part, count):
        with self._lock:
            self._under_way.pop(threading.get_ident(), None)
            self.bytes_read[part] += count.nbytes
            self.bytes_transferred += count.transferred
            self.read_seconds += count.seconds
            if self._closed:
                self._read_ended.notify_all()


# %% [markdown]
# `Files` has two methods that read. `read` makes one read from Python. `stream` lends the descriptor to a loop of
# compiled code, which reads and multiplies by turns (5.12) and reports afterwards how much it has read. The compiled
# loop handles only direct reads that return all their bytes. All other cases are left to `read`.

# %% tags=["export"]
class Files(Files):
    def read(self, buffer: np.ndarray, extent: Extent, offset: int, nbytes: int, part: str) -> int:
        """Read `nbytes` from byte `offset` of `extent` into `buffer`, on the account of `part`.

        `buffer`: a page-aligned uint8 array of page_padded(nbytes). Returns the index in it at which these bytes begin.
        Raises CheckpointError, and ValueError if the buffer is too small.
        """
        began, used, transferred = time.perf_counter(), 0, 0
        try:
            start, transferred = self._begin(extent, offset).read(buffer, extent.offset + offset, nbytes)
            used = nbytes
        finally:
            self._end(part, ReadCount(time.perf_counter() - began, used, transferred))
        return start

    def stream(self, extent: Extent, offset: int, part: str, loop: Callable[[int], tuple[Any, ReadCount]]) -> Any:
        """Let `loop` read the file of `extent`, from byte `offset` of the extent on, on the account of `part`.

        loop(file descriptor) returns a result and a ReadCount. Returns the result; or None, without calling `loop`, if
        the file is read through the page cache. Raises CheckpointError if the file cannot be opened.
        """
        result, count = None, ReadCount(0.0, 0, 0)
        try:
            descriptor, direct = self._begin(extent, offset).descriptor
            if direct:
                result, count = loop(descriptor)
        finally:
            self._end(part, count)
        return result

    def array(self, extent: Extent, part: str, first: int = 0, rows: int | None = None) -> np.ndarray:
        """The tensor, or `rows` rows of it from row `first` on, in memory of its own: uint16 for BF16, else its dtype.

        Raises CheckpointError.
        """
        row = extent.nbytes // extent.shape[0]
        rows = extent.shape[0] - first if rows is None else rows
        buffer = page_buffer(page_padded(rows * row))
        start = self.read(buffer, extent, first * row, rows * row, part)
        return typed(buffer, start, rows * row, extent.dtype).reshape(rows, *extent.shape[1:])


# %% tags=["export"]
class Files(Files):
    def access(self) -> dict[str, str]:
        "{file name: how it is read} of every file opened so far."
        with self._lock:
            return {os.path.basename(path): file.access for path, file in sorted(self._files.items())}

    def check(self) -> None:
        "Raise CheckpointError if an opened file was written to, replaced or removed since its header was read."
        with self._lock:
            files = [] if self._closed else [*self._files.values()]
        for file in files:
            file.check()

    def close(self) -> None:
        "Close the shards once the reads of other threads have ended; later reads raise CheckpointError."
        with self._lock:
            self._closed = True
            # an entry of this thread is no read under way: Ctrl-C came before _end could remove it
            while self._under_way.keys() - {threading.get_ident()}:
                self._read_ended.wait()
            for file in self._files.values():
                file.close()
        self._over.put(None)
        if self._watcher is not None:
            self._watcher.join()


# %% [markdown]
# ## 5.9.4 A read that does not end
#
# A disk that fails, or a network file system whose server is gone, may never answer a read. A program cannot tell such
# a read from a slow one. So the run goes on waiting, and it logs a warning that names the file and the offset. A thread
# looks for such reads once in `STALL` seconds.
#
# This thread must not keep a `Files` alive that a caller forgot to close. So the thread holds only a weak reference to
# it. When the `Files` is freed, the weak reference calls its callback, and the callback ends the thread. Python may
# call it at any moment, even inside the garbage collector, in a thread that holds a lock. So the callback must not
# take a lock. `SimpleQueue.put` takes none ([5.11.3]).
#
# [5.11.3]: 11_prefetch.ipynb#5.11.3-What-is-true-whenever-nobody-holds-the-lock

# %% tags=["export"]
STALL = 60.0  # seconds: longer than a usual slow read, and than the first call of a kernel that is still being compiled
_log = logging.getLogger("k3lib")  # warnings go to stderr unless a program arranges otherwise


class Files(Files):
    def warn_stalled(self) -> None:
        "Log a warning for each read, or stream of reads, that is not done after STALL seconds."
        with self._lock:
            reads, now = [*self._under_way.values()], time.perf_counter()
        for path, offset, began in reads:
            if now - began >= STALL:
                _log.warning("%s: reading from offset %d on is not done after %.0f s; still waiting",
                             path, offset, now - began)


def _watch(files):
    "Start a thread that warns of stalled reads until `files` is closed or garbage-collected. Returns the thread."
    def run(reference, over):
        while True:
            try:
                return over.get(timeout=STALL)
            except Empty:
                alive = reference()
                if alive is not None:
                    alive.warn_stalled()
                del alive

    require_threads(1, "a watch over reads")
    over = files._over
    thread = threading.Thread(target=run, args=(weakref.ref(files, over.put), over), name="k3-watch", daemon=True)
    thread.start()
    return thread


# %% [markdown]
# ## 5.9.5 Odd addresses
#
# The header of a shard can have any length. So the first byte of a bf16 matrix may lie at an odd address. Kernels take
# only arrays whose address is a multiple of the element's size. `typed` moves the bytes of such a matrix to the front
# of the buffer that they are in, so it needs no second buffer.

# %% tags=["export"]
def typed(buffer: np.ndarray, start: int, nbytes: int, dtype: str) -> np.ndarray:
    """buffer[start:start+nbytes] as an array of elements of the tensor's `dtype`: uint16 for BF16.

    The bytes are moved to the front of `buffer` if `start` is no multiple of the element's size.
    """
    if start % ITEMSIZE[dtype]:
        buffer[:nbytes] = buffer[start:start + nbytes]
        start = 0
    return buffer[start:start + nbytes].view(ARRAY_DTYPES[dtype])


# %%
buffer = page_buffer(PAGE)
buffer[:9] = [255, 0x80, 0x3f, 0x00, 0x40, 0x40, 0x40, 7, 7]
print([float(v) for v in bf16_to_float32(typed(buffer, 1, 6, "BF16"))])
assert bf16_to_float32(typed(buffer, 0, 6, "BF16")).tolist() == [1, 2, 3]

# %% [markdown]
# Now `Files` is complete. Here it reads three float32 numbers that lie at an odd address in their file. The count
# shows the twelve bytes that were asked for.

# %%
(scratch / "shard").write_bytes(b"h" + np.array([1, 2, 3], np.float32).tobytes())
with_header = Extent(str(scratch / "shard"), 1, 12, "F32", (3,))
files = Files()
print(files.array(with_header, "other").tolist(), files.bytes_read)
assert files.bytes_transferred == 13  # the file ends in its first page
files.close()

# %% [markdown]
# ## 5.9.6 How many readers a device wants
#
# A reader waits for one read at a time. But most devices answer several reads at once, so with a single reader part of
# the device is idle. How many readers keep a device busy differs between devices, so it is measured. The readers of the
# measurement share one file: each reads the next unit of 768 KiB, and after the last unit the first one follows. The
# smallest number of readers whose rate is within a tenth of the best rate is enough. `k3 plan --measure` (5.18) adds
# one reader for each thread that multiplies at the same time.

# %% tags=["export"]
MAX_READERS = 64  # threads


def read_rates(path: str | os.PathLike, counts: tuple[int, ...] = (1, 2, 4, 8, 16),
               seconds: float = 0.4) -> dict[int, float]:
    """{number of readers: bytes a second} for each number in `counts`, each measured for `seconds` on the file `path`.

    Raises OSError if there is no such file, CheckpointError if it cannot be read, ResourceError without the threads.
    """
    require_threads(max(counts), "measuring the disk")
    size, order, rates, file = os.path.getsize(path), count(), {}, File(str(path))
    units = max(1, size // READ_UNIT)

    def read(until):
        buffer, transferred = page_buffer(page_padded(READ_UNIT)), 0
        while time.perf_counter() < until:
            at = next(order) % units * READ_UNIT
            transferred += file.read(buffer, at, min(READ_UNIT, size - at))[1]
        return transferred

    try:
        for readers in counts:
            began = time.perf_counter()
            with ThreadPoolExecutor(readers) as pool:
                transferred = sum(pool.map(read, [began + seconds] * readers))
            rates[readers] = transferred / (time.perf_counter() - began)
    finally:
        file.close()
    return rates


def enough_readers(rates: dict[int, float]) -> int:
    "The fewest readers whose rate is within a tenth of the best."
    return min(readers for readers, rate in rates.items() if rate >= 0.9 * max(rates.values()))


# %%
assert enough_readers({1: 1.0, 2: 1.85, 4: 2.0, 8: 1.9}) == 2

# %% tags=["nbval-ignore-output"]
rates_here = read_rates(scratch / "64MB", seconds=0.1)
print("; ".join(f"{readers} readers {rate / 1e9:.2f} GB/s" for readers, rate in rates_here.items()),
      "- enough:", enough_readers(rates_here))
shutil.rmtree(scratch)

# %% [markdown]
# ## 5.9.7 Summary
#
# - The engine chooses the size of a page buffer. The operating system chooses how much memory a mapped file takes.
# - Reads go past the page cache where the file system allows it. The report of a run names the files where it does not.
# - A read returns all its bytes or raises an error. The error is one line that names the file and the bytes, and says
#   what was found instead.
# - During a run, a shard must keep the fingerprint that it had when its header was read.
#
# ## Exercises
#
# The answers are in [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. The embedded model is read once, tensor by tensor. How many bytes does the widening to whole pages add?
#    `Files.bytes_transferred` counts them. Why is the share so much smaller for K3?
# 2. Remove the condition `got >= PAGE` from `File.read`, and read a file that was cut off in the middle of a page. What
#    happens on a file system with direct reads, and what on one without?
# 3. Let `read_rates` read the units in a random order. On which devices do you expect another result?
#
# Next: [5.10 How a budget's bytes are laid out](10_layout.ipynb).
