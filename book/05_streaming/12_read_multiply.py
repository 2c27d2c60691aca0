# %% [markdown]
# # 5.12 Read, multiply, read, multiply
#
# A reader that streams takes a unit of rows, reads it, multiplies it, and reads the next one into the same memory. This
# is the one place where reading and multiplying meet in compiled code. At the end you can say what that is worth, on
# which machines, and what happens when a read goes wrong.
#
# [5.11 One reader pool](11_prefetch.ipynb) ·
# [contents](../README.md) ·
# [5.13 The trunk: rows that arrive](13_trunk.ipynb)

# %% tags=["export"]
import functools
import math
import sys
import time
from itertools import count
from typing import NamedTuple
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from k3lib.kernel_cache import kernel
from k3lib.parallel import next_item
from k3lib.matmul import TILE, matmul_rows
from k3lib.disk import ARRAY_DTYPE, PAGE, READ_UNIT, Files, typed
from k3lib.layout import RowBlock

# %% [markdown]
# ## 5.12.1 Units
#
# A unit is small enough that two of them and a vector stay in a core's own cache. The product finds its rows there, and
# they are never written out to memory: the next unit overwrites them. A larger unit would make calls rarer, and each
# byte dearer.
#
# Which unit does the next number of the cursor stand for? Units are not equally fast: some lie in a hole of the file or
# in the device's own cache, some do not, and slow ones come in runs. Readers that went in file order would all meet a
# run at once and wait for the device with nothing left to multiply. So number $p$ of $n$ stands for unit $p s \bmod n$,
# with $s$ near $0.38\,n$ and no common factor with $n$: the unit taken next lies far away, and a slow run is met by one
# reader at a time.

# %% tags=["export"]
GOLDEN = (3 - math.sqrt(5)) / 2  # of the units lie between two that are taken in a row: no other step keeps so many in a row apart


def unit_rows(row_bytes: int, room: int = READ_UNIT) -> int:
    "How many rows of `row_bytes` make a unit in a buffer with `room` for at least one: as many as a kernel takes at a time, where there is room."
    fit = min(READ_UNIT, room) // row_bytes
    return fit // TILE * TILE or fit // 4 * 4 or 1


@functools.cache
def unit_stride(units: int) -> int:
    "How far apart, of `units`, two are that are taken one after the other. Each is taken once, because the two numbers have no common factor."
    return next(stride for stride in count(max(1, round(units * GOLDEN))) if math.gcd(stride, units) == 1)


# %%
print("eight units are taken in the order", [p * unit_stride(8) % 8 for p in range(8)])

# %% [markdown]
# ## 5.12.2 Two functions of the C library
#
# Compiled code calls `pread` and `clock_gettime` directly, and it takes an intrinsic each to say so. The two clocks are
# those of `time.perf_counter` and `time.thread_time`.

# %% tags=["export"]
COMPILED_READS = sys.platform == "linux" and sys.maxsize > 2**32  # elsewhere Python reads the same units
WALL, BUSY = 1, 3  # Linux's numbers of two clocks: that of time.perf_counter, and the processor time of this thread


@intrinsic
def _pread(typingctx, descriptor, array, nbytes, offset):
    "(int64, array [n], int64, int64) -> bytes read from `offset` of the file to the front of `array`, or -1."
    def codegen(context, builder, sig, args):
        descriptor, array, nbytes, offset = args
        byte, word, integer = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
        place = builder.bitcast(context.make_array(sig.args[1])(context, builder, array).data, byte)
        pread = cgutils.get_or_insert_function(builder.module, ir.FunctionType(word, [integer, byte, word, word]), "pread")
        return builder.call(pread, [builder.trunc(descriptor, integer), place, nbytes, offset])
    return types.int64(types.int64, array, types.int64, types.int64), codegen


@intrinsic
def _clock(typingctx, which):
    "(WALL or BUSY) -> its seconds, float64."
    def codegen(context, builder, sig, args):
        word, integer = ir.IntType(64), ir.IntType(32)
        time_spec = cgutils.alloca_once(builder, ir.LiteralStructType([word, word]))
        call = cgutils.get_or_insert_function(builder.module, ir.FunctionType(integer, [integer, time_spec.type]), "clock_gettime")
        builder.call(call, [builder.trunc(args[0], integer), time_spec])
        seconds, nanoseconds = (builder.sitofp(builder.load(cgutils.gep_inbounds(builder, time_spec, 0, i)), ir.DoubleType()) for i in (0, 1))
        return builder.fadd(seconds, builder.fmul(nanoseconds, ir.DoubleType()(1e-9)))
    return types.float64(types.int64), codegen


# %% [markdown]
# ## 5.12.3 The loop
#
# One loop serves the trunk's rows and the experts' packed matrices: `scale` is None for bf16 and float32. Numba
# compiles only the branch that a caller needs. The loop ends when the cursor gives no more, or at a unit that is not
# the plain case.
#
# What it counts it adds to five totals. Asking for processor time is a system call and costs about a microsecond, a
# twentieth of a unit; one unit in eight is asked about and stands for the others.

# %% tags=["export"]
READING, WANTED, TRANSFERRED, WORKING, SAMPLED = range(5)  # seconds in reads; bytes; bytes of whole pages; processor seconds; bytes they were spent on
SAMPLE = 8


@kernel
def _stream(source, elements, scale, x, out, cursor, totals):
    """Read and multiply units as long as `cursor` gives some: the number that is no unit any more, or that of a unit that did not come as it should.

    `source`: file descriptor, offset of the rows in the file, bytes of a row, number of rows, rows a unit, stride, output of the first row.
    `elements`: the buffer, as elements of the matrix. `x`, `out`, `scale`: as matmul_rows takes them.
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
        began = _clock(WALL)
        got = _pread(descriptor, elements, (skip + nbytes + PAGE - 1) // PAGE * PAGE, begin - skip)
        totals[READING] += _clock(WALL) - began
        if got < skip + nbytes or skip % elements.itemsize:
            return p
        totals[WANTED] += nbytes
        totals[TRANSFERRED] += got
        start = skip // elements.itemsize
        w = elements[start:start + n * k].reshape(n, k)
        sampled = done % SAMPLE == 0
        began = _clock(BUSY) if sampled else 0.0
        if scale is None:
            matmul_rows(w, x, out, first + at)
        else:
            matmul_rows((w, scale[at:at + n]), x, out, first + at)
        if sampled:
            totals[WORKING] += _clock(BUSY) - began
            totals[SAMPLED] += nbytes
        done += 1


# %% [markdown]
# ## 5.12.4 Whatever is not the plain case
#
# A read that fails or comes short, a matrix at an odd address, a file that is read through the page cache, a system
# other than Linux: the unit is then read by `Files.read`, which repeats, goes on, or says which bytes of which file are
# missing. After it compiled code takes over again. So the Python half of this function is complete by itself, and the
# compiled half only ever does what that half would do.

# %% tags=["export"]
class Product(NamedTuple):
    """out[:, block.first:] = x W^T for the rows W of `block`, read while they are multiplied.

    `x`: float32 [T, k], prepared as matmul_rows takes it. `out`: float32 [T, n]. `scale`: None, or uint8 [rows, k/32] for packed rows.
    """

    block: RowBlock
    scale: np.ndarray | None
    x: np.ndarray
    out: np.ndarray


def read_multiply(files: Files, product: Product, buffer: np.ndarray, cursor: np.ndarray) -> float:
    """Read and multiply units of `product` until `cursor`, int64 [1], gives no more; the processor seconds of the products.

    Any number of threads may do so at a time with one cursor, each with a page-aligned `buffer` of its own. Raises CheckpointError.
    """
    block, scale, x, out = product
    extent, row = block.extent, block.nbytes // block.rows
    unit = unit_rows(row, len(buffer) - 2 * PAGE)  # compiled code does not look where the buffer ends
    units = -(-block.rows // unit)
    stride, elements, seconds = unit_stride(units), buffer.view(ARRAY_DTYPE[extent.dtype]), 0.0

    def loop(descriptor, journal):
        source = descriptor, extent.offset + block.begin, row, block.rows, unit, stride, block.first
        totals = np.zeros(5)
        nonlocal seconds
        p = _stream(source, elements, scale, x, out, cursor, totals)
        if totals[SAMPLED]:
            seconds += totals[WORKING] * totals[WANTED] / totals[SAMPLED]
        journal[0, 0], journal[0, 2], journal[0, 4] = totals[READING], totals[TRANSFERRED], totals[WANTED]
        return p

    while True:
        p = files.stream(extent, block.begin, block.part, 0, loop) if COMPILED_READS else None
        p = next_item(cursor) if p is None else p
        if p >= units:
            return seconds
        at = p * stride % units * unit
        seconds += _read_multiply_rows(files, product, buffer, at, min(unit, block.rows - at))


def _read_multiply_rows(files, product, buffer, at, n):
    "Rows at .. at+n of the product, read by Python; the processor seconds of the product."
    block, scale, x, out = product
    row = block.nbytes // block.rows
    start = files.read(buffer, block.extent, block.begin + at * row, n * row, block.part)
    w = typed(buffer, start, n * row, block.extent.dtype).reshape(n, -1)
    began = time.thread_time()
    matmul_rows(w if scale is None else (w, scale[at:at + n]), x, out, block.first + at)
    return time.thread_time() - began
