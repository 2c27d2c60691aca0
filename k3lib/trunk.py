"""5.3 The trunk: rows that arrive

Made from book/05_streaming/03_trunk.py: edit that, then run `make export`.
"""
# built on checkpoint 6ca62c46ee2f
# built on linear ec0b27f72b5b

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
    memory = mmap.mmap(-1, max(PAGE, -(-nbytes // PAGE) * PAGE))
    return np.frombuffer(memory, np.uint8)


def widened(nbytes):
    "Buffer bytes that hold any extent of `nbytes` widened to whole pages at both ends."
    return -(-nbytes // PAGE) * PAGE + PAGE


class File:
    """One shard, read past the page cache where the file system allows it.

    `how` says "direct", or "buffered" and why. Without O_DIRECT the pages a read leaves behind are dropped again.
    """

    def __init__(self, path):
        self.path = path
        self._lock = threading.Lock()
        self._open(getattr(os, "O_DIRECT", 0))
        self.size = os.fstat(self.fd).st_size

    def _open(self, direct, why="this system has no O_DIRECT"):
        try:
            self.fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | direct)
        except OSError as error:
            if not direct:
                raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from None
            return self._open(0, f"O_DIRECT refused at open: {error.strerror}")
        self.direct = bool(direct)
        self.how = "direct" if direct else f"buffered: {why}"

    def read(self, buffer, offset, nbytes):
        """Read `nbytes` at `offset` into `buffer`, a page-aligned uint8 array of at least widened(nbytes).

        Returns the index in `buffer` at which the extent begins. Raises CheckpointError on a short file or a failed read.
        """
        low = offset - offset % PAGE
        need = offset - low + nbytes
        want = -(-need // PAGE) * PAGE
        view, done = memoryview(buffer), 0
        while done < need:
            try:
                got = _read_at(self, view[done:min(want, done + ONE_READ)], low + done)
            except OSError as error:
                if self.direct and error.errno == 22:  # EINVAL: this file system takes O_DIRECT at open and refuses it here
                    with self._lock:
                        if self.direct:
                            os.close(self.fd)
                            self._open(0, "O_DIRECT refused at read")
                    continue
                raise CheckpointError(f"{self.path}: reading {nbytes} bytes at offset {offset} failed: {error.strerror}") from None
            if got == 0:
                raise CheckpointError(f"{self.path}: ends at byte {low + done}, but bytes {offset} to {offset + nbytes} are needed")
            done += got
            if self.direct and done < need:
                done -= done % PAGE
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, low, want, os.POSIX_FADV_DONTNEED)
        return offset - low

    def close(self):
        os.close(self.fd)


if hasattr(os, "preadv"):
    def _read_at(file, view, offset):
        return os.preadv(file.fd, [view], offset)
else:
    def _read_at(file, view, offset):
        with file._lock:  # seek and read are two calls here: one reader at a time
            os.lseek(file.fd, offset, os.SEEK_SET)
            data = os.read(file.fd, len(view))
        view[:len(data)] = data
        return len(data)


class Files:
    "The shards of one checkpoint, each opened once, and the bytes read from them by part."

    def __init__(self):
        self._files, self._lock = {}, threading.Lock()
        self.bytes_read = {"trunk": 0, "experts": 0, "other": 0}
        self.read_seconds = 0.0  # summed over readers: seconds inside read calls

    def read(self, buffer, extent, offset, nbytes, part):
        "Read part of `extent` (from byte `offset` of it) into `buffer`; returns where it begins there."
        with self._lock:
            if extent.file not in self._files:
                self._files[extent.file] = File(extent.file)
            file = self._files[extent.file]
        began = time.perf_counter()
        start = file.read(buffer, extent.offset + offset, nbytes)
        with self._lock:
            self.bytes_read[part] += nbytes
            self.read_seconds += time.perf_counter() - began
        return start

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
        for file in self._files.values():
            file.close()
        self._files.clear()


def typed(buffer, start, nbytes, dtype):
    "buffer[start:start+nbytes] as an array of the tensor's dtype; moved to the front if its offset is odd for that dtype."
    if start % ITEMSIZE[dtype]:
        buffer[:nbytes] = buffer[start:start + nbytes].copy()
        start = 0
    return buffer[start:start + nbytes].view(ARRAY_DTYPE[dtype])


class Read(NamedTuple):
    "One read of the walk: rows `first` .. `first + rows` of a tensor."
    extent: object
    first: int
    rows: int
    part: str

    @property
    def nbytes(self):
        return self.rows * (self.extent.nbytes // self.extent.shape[0])


class Ring:
    """Aligned slots that readers fill in the order of a cyclic list of reads, ahead of the one consumer.

    Slot k holds read k, k + slots, k + 2 slots, ...: a reader may fill it only after the consumer has given it back.
    """

    def __init__(self, files, reads, slots, slot_bytes, readers):
        self.files, self.reads, self.slots = files, reads, slots
        self.memory = [aligned(slot_bytes) for _ in range(slots)]
        self.wait_seconds = 0.0
        self._turn = threading.Condition()
        self._issued = self._taken = self._released = self._busy = 0
        self._filled, self._stopped, self._paused = {}, False, False
        self._threads = [threading.Thread(target=self._fill, name=f"k3-trunk-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def _fill(self):
        while True:
            with self._turn:
                while not self._stopped and (self._paused or self._issued - self._released >= self.slots):
                    self._turn.wait()
                if self._stopped:
                    return
                number = self._issued
                self._issued += 1
                self._busy += 1
            read, buffer = self.reads[number % len(self.reads)], self.memory[number % self.slots]
            try:
                row = read.nbytes // read.rows
                start = self.files.read(buffer, read.extent, read.first * row, read.nbytes, read.part)
                result = typed(buffer, start, read.nbytes, read.extent.dtype)
            except BaseException as error:  # whatever it is, the consumer must hear of it
                result = error
            with self._turn:
                self._busy -= 1
                self._filled[number] = result
                self._turn.notify_all()

    def take(self):
        "The next read's data, a flat array inside its slot. Blocks until it has arrived; raises what its reader raised."
        began = time.perf_counter()
        with self._turn:
            while self._taken not in self._filled:
                self._turn.wait()
            result = self._filled.pop(self._taken)
            self._taken += 1
        self.wait_seconds += time.perf_counter() - began
        if isinstance(result, BaseException):
            raise result
        return result

    def release(self):
        "Give the oldest taken slot back to the readers."
        with self._turn:
            self._released += 1
            self._turn.notify_all()

    @property
    def position(self):
        "Index in the list of reads of the next one to be taken."
        return self._taken % len(self.reads)

    def rewind(self):
        "Drop what was read ahead and begin again at the first read."
        with self._turn:
            self._paused = True
            while self._busy:
                self._turn.wait()
            self._issued = self._taken = self._released = 0
            self._filled.clear()
            self._paused = False
            self._turn.notify_all()

    def close(self):
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        for thread in self._threads:
            thread.join()


def row_blocks(extent, multiple, slot_bytes, part):
    "The reads that bring a matrix through slots of `slot_bytes`: as many whole rows a read as fit, a multiple of `multiple`."
    n, row = extent.shape[0], extent.nbytes // extent.shape[0]
    rows = (slot_bytes - 2 * PAGE) // row // multiple * multiple
    if rows == 0:
        raise ValueError(f"a ring slot of {slot_bytes} bytes does not hold {multiple} rows of {row} bytes")
    return [Read(extent, first, min(rows, n - first), part) for first in range(0, n, rows)]


class Streamed:
    "A matrix that goes by once: its blocks are slots of the ring, each given back when the next is asked for."

    def __init__(self, ring, extent, reads):
        self.ring, self.reads, self.shape = ring, reads, extent.shape

    def blocks(self, multiple=1):
        "Yields (first row, rows [m, k]). The rows are valid until the next block is asked for."
        for read in self.reads:
            if read.rows % multiple and read.first + read.rows != self.shape[0]:
                raise ValueError(f"{multiple} rows must stay together, but a block has {read.rows}")
            data = self.ring.take()
            try:
                yield read.first, data.reshape(read.rows, *self.shape[1:])
            finally:
                self.ring.release()


def as_float32(array):
    "A resident vector, [1, H] weight (as [H]) or convolution, float32."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


def is_matrix(extent):
    "True for what can arrive row by row. Vectors, [1, H] weights and convolutions (51 MB of 108.8 GB) always stay in memory."
    return len(extent.shape) == 2 and extent.shape[0] > 1


class Trunk:
    """Every tensor of the walk but the routed experts, resident or streamed.

    `walk`: tensor names in the order one pass takes them. `pinned`: matrices kept in memory. `multiples`: {name: rows that
    must stay together}. The other matrices stream through the ring, the same list of reads every pass.
    """

    def __init__(self, checkpoint, walk, pinned, multiples, files, parts, slots, slot_bytes, readers, progress=None):
        self.files, self.parts, self.checkpoint = files, parts, checkpoint
        self.extents = {name: checkpoint.extent(name) for name in walk}
        self.resident, self.reads = {}, {}
        for name in walk:
            extent = self.extents[name]
            if not is_matrix(extent) or name in pinned:
                array = files.array(extent, parts(name))
                self.resident[name] = Rows(array) if is_matrix(extent) else as_float32(array)
                if progress is not None:
                    progress(extent.nbytes)
            else:
                self.reads[name] = row_blocks(extent, multiples.get(name, 1), slot_bytes, parts(name))
        self._order = list(self.reads)
        self._next = 0
        self.ring = Ring(files, [r for reads in self.reads.values() for r in reads], slots, slot_bytes, readers) if self.reads else None

    def begin(self):
        "Start a pass: if the last one stopped half-way, the ring begins anew."
        if self.ring is not None and (self._next or self.ring.position):
            self.ring.rewind()
        self._next = 0

    def take(self, name):
        "A matrix with .shape and .blocks(), or a float32 array. A streamed tensor comes when its turn in the walk comes, once a pass."
        if name in self.resident:
            return self.resident[name]
        if self._order[self._next] != name:
            raise RuntimeError(f"the walk asks for {name}, but {self._order[self._next]} is next")
        self._next = (self._next + 1) % len(self._order)
        return Streamed(self.ring, self.extents[name], self.reads[name])

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


__all__ = ['PAGE', 'ONE_READ', 'ITEMSIZE', 'ARRAY_DTYPE', 'aligned', 'widened', 'File', 'Files', 'typed', 'Read', 'Ring', 'row_blocks', 'Streamed', 'as_float32', 'is_matrix', 'Trunk']
