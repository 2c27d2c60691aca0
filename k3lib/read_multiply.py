"""5.12 Read, multiply, read, multiply

Made from book/05_streaming/12_read_multiply.py: edit that, then run `make export`.
"""

import functools
import math
import time
from itertools import count
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from k3lib.disk import MAX_READERS, PAGE, READ_UNIT, Files, ReadCount, typed
from k3lib.header import ARRAY_DTYPES
from k3lib.kernel_cache import kernel
from k3lib.layout import RowBlock
from k3lib.matmul import TILE, matmul_rows
from k3lib.parallel import CORES, next_item
from k3lib.system import COMPILED_PREAD


GOLDEN = (3 - math.sqrt(5)) / 2  # the stride as a fraction of the number of units: it keeps neighbours far apart


def unit_rows(row_bytes: int, room: int = READ_UNIT) -> int:
    """The number of rows in a unit, for rows of `row_bytes` and a buffer of `room` bytes, enough for one row.

    It is a multiple of a tile's rows if so many fit, else of the four rows that a kernel takes at a time, else 1.
    """
    fit = min(READ_UNIT, room) // row_bytes
    return fit // TILE * TILE or fit // 4 * 4 or 1


@functools.cache
def unit_stride(units: int) -> int:
    "The stride for `units` units. It has no common factor with their number, so each unit is taken once."
    return next(stride for stride in count(max(1, round(units * GOLDEN))) if math.gcd(stride, units) == 1)


class Product(NamedTuple):
    """A product with the rows W of `block`, which are read while they are multiplied.

    out[:, block.first:block.first + block.rows] = x W^T. `x`: float32 [T, k], prepared as matmul_rows takes it. `out`:
    float32 [T, n]. `scale`: None, or uint8 [rows, k/32] for packed rows.
    """

    block: RowBlock
    scale: np.ndarray | None
    x: np.ndarray
    out: np.ndarray


def read_rows(files: Files, block: RowBlock, buffer: np.ndarray, at: int = 0, rows: int | None = None) -> np.ndarray:
    """Read `rows` rows (None: all) of a block, from its row `at` on, into `buffer`. Returns them, a view of it.

    `buffer`: uint8, page-aligned, as long as the rows and two pages. The view is [rows, k], uint16 for BF16, else the
    matrix's own dtype. Raises CheckpointError.
    """
    rows, row = block.rows if rows is None else rows, block.nbytes // block.rows
    start = files.read(buffer, block.extent, block.begin + at * row, rows * row, block.part)
    return typed(buffer, start, rows * row, block.extent.dtype).reshape(rows, -1)


def _multiply_rows(files, product, buffer, at, n):
    "Read and multiply rows at .. at+n of the block from Python. Returns the processor seconds of the product."
    block, scale, x, out = product
    w = read_rows(files, block, buffer, at, n)
    began = time.thread_time()
    matmul_rows(_scaled(w, scale, at, n), x, out, block.first + at)
    return time.thread_time() - began


def _scaled(w, scale, at, n):
    "Rows at .. at+n as matmul_rows takes them: with their scales if the matrix is packed."
    return w if scale is None else (w, scale[at:at + n])


WALL, BUSY = 1, 3  # Linux's numbers of two clocks: that of time.perf_counter, and the processor time of this thread


@intrinsic
def _pread(typingctx, descriptor, array, nbytes, offset):
    "(int64, array [n], int64, int64) -> bytes read from `offset` of the file to the front of `array`, or -1."
    def codegen(context, builder, sig, args):
        descriptor, array, nbytes, offset = args
        byte, word, integer = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
        place = builder.bitcast(context.make_array(sig.args[1])(context, builder, array).data, byte)
        signature = ir.FunctionType(word, [integer, byte, word, word])
        pread = cgutils.get_or_insert_function(builder.module, signature, "pread")
        return builder.call(pread, [builder.trunc(descriptor, integer), place, nbytes, offset])
    return types.int64(types.int64, array, types.int64, types.int64), codegen


@intrinsic
def _clock(typingctx, which):
    "(WALL or BUSY) -> seconds of that clock, float64."
    def codegen(context, builder, sig, args):
        word, integer, double = ir.IntType(64), ir.IntType(32), ir.DoubleType()
        time_spec = cgutils.alloca_once(builder, ir.LiteralStructType([word, word]))
        signature = ir.FunctionType(integer, [integer, time_spec.type])
        call = cgutils.get_or_insert_function(builder.module, signature, "clock_gettime")
        builder.call(call, [builder.trunc(args[0], integer), time_spec])
        seconds, nanoseconds = (
            builder.sitofp(builder.load(cgutils.gep_inbounds(builder, time_spec, 0, i)), double) for i in (0, 1))
        return builder.fadd(seconds, builder.fmul(nanoseconds, double(1e-9)))
    return types.float64(types.int64), codegen


@overload(_scaled)
def _scaled_form(w, scale, at, n):
    "The form of _scaled that numba compiles for these types."
    if isinstance(scale, types.NoneType):
        return lambda w, scale, at, n: w
    return lambda w, scale, at, n: (w, scale[at:at + n])


READING, WANTED, TRANSFERRED = range(3)  # totals: seconds inside reads, bytes of rows, bytes of whole pages
WORKING, SAMPLED = 3, 4  # processor seconds of some products, and the bytes of their rows
SAMPLE = 8  # one unit in so many is timed


@kernel
def _stream(source, elements, scale, x, out, cursor, totals):
    """Read and multiply units until `cursor` has none left. Returns the first number from it that was not multiplied.

    If that is below the number of units, the unit's read failed or came short, or its rows lie at an odd address.
    `source`: file descriptor, offset of the rows in the file, bytes of a row, rows, rows a unit, stride, output of the
    first row. `elements`: the buffer, as elements of the matrix. `x`, `out`, `scale`: as matmul_rows takes them.
    `cursor`: int64 [1]. `totals`: float64 [5].
    """
    descriptor, offset, row_bytes, rows, unit, stride, first = source
    units, k, done = -(-rows // unit), row_bytes // elements.itemsize, 0
    while True:
        p = next_item(cursor)
        if p >= units:
            return p
        at = p * stride % units * unit
        n = min(unit, rows - at)
        begin = offset + at * row_bytes
        skip, nbytes = begin % PAGE, n * row_bytes
        if skip % elements.itemsize:
            return p
        began = _clock(WALL)
        got = _pread(descriptor, elements, (skip + nbytes + PAGE - 1) // PAGE * PAGE, begin - skip)
        totals[READING] += _clock(WALL) - began
        if got < skip + nbytes:
            return p
        totals[WANTED] += nbytes
        totals[TRANSFERRED] += got
        start = skip // elements.itemsize
        w = elements[start:start + n * k].reshape(n, k)
        began = _clock(BUSY) if done % SAMPLE == 0 else 0.0
        matmul_rows(_scaled(w, scale, at, n), x, out, first + at)
        if done % SAMPLE == 0:
            totals[WORKING] += _clock(BUSY) - began
            totals[SAMPLED] += nbytes
        done += 1


COMPILED_READS = COMPILED_PREAD  # whether compiled code reads where it can; False: Python reads the same units


def _multiply_compiled(files, product, buffer, unit, cursor):
    "(the number from `cursor` at which compiled code has stopped, processor seconds), or None if it cannot read here."
    block, scale, x, out = product
    row, totals = block.nbytes // block.rows, np.zeros(5)
    stride, elements = unit_stride(-(-block.rows // unit)), buffer.view(ARRAY_DTYPES[block.extent.dtype])

    def loop(descriptor):
        source = descriptor, block.extent.offset + block.begin, row, block.rows, unit, stride, block.first
        number = _stream(source, elements, scale, x, out, cursor, totals)
        seconds = totals[WORKING] * totals[WANTED] / totals[SAMPLED] if totals[SAMPLED] else 0.0
        count = ReadCount(float(totals[READING]), int(totals[WANTED]), int(totals[TRANSFERRED]))
        return (number, float(seconds)), count

    return files.stream(block.extent, block.begin, block.part, loop)


def read_multiply(files: Files, product: Product, buffer: np.ndarray, cursor: np.ndarray) -> float:
    """Read and multiply units of `product` until `cursor`, int64 [1], has none left.

    Any number of threads may share one cursor, each with a `buffer` of its own: uint8, page-aligned, whole elements, at
    least a row and two pages. Returns the processor seconds of the products. Raises CheckpointError.
    """
    block, seconds = product.block, 0.0
    unit = unit_rows(block.nbytes // block.rows, len(buffer) - 2 * PAGE)  # compiled code checks no bounds
    units = -(-block.rows // unit)
    while True:
        compiled = _multiply_compiled(files, product, buffer, unit, cursor) if COMPILED_READS else None
        number, busy = compiled or (next_item(cursor), 0.0)
        seconds += busy
        if number >= units:
            return seconds
        at = number * unit_stride(units) % units * unit
        seconds += _multiply_rows(files, product, buffer, at, min(unit, block.rows - at))


def max_concurrent_blocks(threads: int) -> int:
    "How many readers may read and multiply at a time when the arithmetic has `threads` threads."
    return threads if threads < CORES else max(threads, MAX_READERS)


__all__ = [
    "GOLDEN", "unit_rows", "unit_stride", "Product", "read_rows", "WALL", "BUSY", "READING", "WANTED",
    "TRANSFERRED", "WORKING", "SAMPLED", "SAMPLE", "COMPILED_READS", "read_multiply", "max_concurrent_blocks",
]
