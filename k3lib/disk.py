"""5.9 Past the page cache

Made from book/05_streaming/09_disk.py: edit that, then run `make export`.
"""

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

from k3lib.fileio import MAX_READ, CheckpointError, Fingerprint, fingerprint, given_path, read_fault
from k3lib.header import ARRAY_DTYPES, ITEMSIZE, Extent
from k3lib.system import forget_pages, has_direct, keep_uncached, open_read, pread, zero_pages


PAGE = 4096  # bytes; offset, length and address of a direct read are multiples of it
READ_UNIT = 3 << 18  # bytes that a reader reads and multiplies at a time (5.12)


def whole_pages(nbytes: int) -> int:
    "`nbytes` rounded up to whole pages."
    return -(-nbytes // PAGE) * PAGE


def page_padded(nbytes: int) -> int:
    "Bytes of a buffer for an extent of `nbytes` that is read in whole pages, wherever in a page it begins."
    return whole_pages(nbytes) + PAGE


def page_buffer(nbytes: int) -> np.ndarray:
    "A page-aligned uint8 array of zeros: `nbytes` in whole pages, at least one. A page takes memory once written."
    return np.frombuffer(zero_pages(max(PAGE, whole_pages(nbytes))), np.uint8)


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

    def warn_stalled(self) -> None:
        "Log a warning for each read, or stream of reads, that is not done after STALL seconds."
        with self._lock:
            reads, now = [*self._under_way.values()], time.perf_counter()
        for path, offset, began in reads:
            if now - began >= STALL:
                _log.warning("%s: reading from offset %d on is not done after %.0f s; still waiting",
                             path, offset, now - began)


STALL = 60.0  # seconds: longer than a usual slow read, and than the first call of a kernel that is still being compiled
_log = logging.getLogger("k3lib")  # warnings go to stderr unless a program arranges otherwise




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

    over = files._over
    thread = threading.Thread(target=run, args=(weakref.ref(files, over.put), over), name="k3-watch", daemon=True)
    thread.start()
    return thread


def typed(buffer: np.ndarray, start: int, nbytes: int, dtype: str) -> np.ndarray:
    """buffer[start:start+nbytes] as an array of elements of the tensor's `dtype`: uint16 for BF16.

    The bytes are moved to the front of `buffer` if `start` is no multiple of the element's size.
    """
    if start % ITEMSIZE[dtype]:
        buffer[:nbytes] = buffer[start:start + nbytes]
        start = 0
    return buffer[start:start + nbytes].view(ARRAY_DTYPES[dtype])


MAX_READERS = 64  # threads


def read_rates(path: str | os.PathLike, counts: tuple[int, ...] = (1, 2, 4, 8, 16),
               seconds: float = 0.4) -> dict[int, float]:
    """{number of readers: bytes a second} for each number in `counts`, each measured for `seconds` on the file `path`.

    Raises OSError if there is no such file, CheckpointError if it cannot be read.
    """
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


__all__ = [
    "PAGE", "READ_UNIT", "whole_pages", "page_padded", "page_buffer", "File", "ReadCount", "Files", "STALL",
    "typed", "MAX_READERS", "read_rates", "enough_readers",
]
