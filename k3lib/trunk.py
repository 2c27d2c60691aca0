"""5.3 The trunk: rows that arrive

Made from book/05_streaming/03_trunk.py: edit that, then run `make export`.
"""
# built on checkpoint b58d7a02cc27
# built on linear dccc736ce91a

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


def aligned(nbytes):
    "A page-aligned uint8 array of at least `nbytes`, from the operating system, zero and uncommitted until written."
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, max(PAGE, _pages(nbytes)), **private), np.uint8)


def _pages(nbytes):
    return -(-nbytes // PAGE) * PAGE


def widened(nbytes):
    "Buffer bytes that hold any extent of `nbytes` widened to whole pages at both ends."
    return _pages(nbytes) + PAGE


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


def typed(buffer, start, nbytes, dtype):
    "buffer[start:start+nbytes] as an array of the tensor's dtype; moved to the front if its offset is odd for that dtype."
    if start % ITEMSIZE[dtype]:
        buffer[:nbytes] = buffer[start:start + nbytes]
        start = 0
    return buffer[start:start + nbytes].view(ARRAY_DTYPE[dtype])


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


def as_float32(array):
    "A resident vector, [1, H] weight (as [H]) or convolution, float32."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


def is_matrix(name, extent):
    """True for what can arrive row by row. Vectors, [1, H] residual projections and convolutions (53 MB of 108.8 GB) always stay
    in memory; a projection to one row, as `b_proj` of a single head, is a matrix."""
    return len(extent.shape) == 2 and not name.endswith("_res_proj.weight")


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


__all__ = ['PAGE', 'MOST_READERS', 'ONE_READ', 'ITEMSIZE', 'ARRAY_DTYPE', 'aligned', 'widened', 'File', 'Event', 'Files', 'STALL', 'typed', 'Read', 'Ring', 'row_blocks', 'COMPILED_READS', 'PIECE', 'GOLDEN', 'WALL', 'BUSY', 'clock', 'read_piece', 'worked', 'pieces_of', 'stride_of', 'stream_rows', 'at_once', 'Streamed', 'as_float32', 'is_matrix', 'early_room', 'Trunk', 'read_rates', 'enough_readers', 'CHUNK', 'data_runs', 'pack', 'Packed']
