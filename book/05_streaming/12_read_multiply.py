# %% [markdown]
# # 5.12 Read, multiply, read, multiply
#
# A reader that streams a matrix takes a small unit of its rows, reads the unit, multiplies it, and reads the next unit
# into the same memory. So few bytes of memory are used again and again. Where the processor writes these bytes, because
# it copies them from the page cache or fills a hole, they are still in the core's cache when they are multiplied. A
# device that is read past the page cache writes them to memory itself. This chapter writes the loop twice: in Python,
# where it handles every case, and in compiled code, where it handles only the usual one. At the end you can say on
# which machines the compiled loop is worth having, and what happens when a read fails.
#
# > **Without it:** the rest of a matrix of 176 MB needs 176 MB of memory between its reads and its product.
# >
# > **With it:** a reader needs 0.77 MB<!--claim unit--> for the rows, and rows that the processor itself has written
# > are not fetched back from memory.
#
# Needs chapters [1.5] (the product), [5.9] (the disk) and [5.11] (readers). Runs in half a minute. Makes
# `k3lib.read_multiply`.
#
# [5.11 One reader pool](11_prefetch.ipynb) ·
# [contents](../README.md) ·
# [5.13 The trunk: rows that arrive](13_trunk.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | unit | whole rows, about 768 KiB, that a reader reads and multiplies at a time | `READ_UNIT` (5.9), `unit_rows` |
# | cursor | a counter that readers share; each number is given once | `next_item` (1.4) |
# | stride | how far apart two units lie that are taken one after the other | `unit_stride` |
#
# [1.5]: ../01_mxfp4/05_matmul.ipynb
# [5.9]: 09_disk.ipynb
# [5.11]: 11_prefetch.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "readers")

# %% tags=["export"]
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

# %%
import shutil
import tempfile
from pathlib import Path

from k3lib.disk import page_buffer
from k3lib.header import Extent
from k3lib.matmul import PackedMatrix, ResidentMatrix, deinterleaved, padded

scratch = Path(tempfile.mkdtemp())

# %% tags=["parameters"]
seed = 0

# %% [markdown]
# ## 5.12.1 Units
#
# How large should a unit be? A unit and a vector should fit into a core's own cache, which has one or two megabytes
# today. Then the product finds rows that the processor has copied or filled with zeros in the cache, and the next unit
# overwrites them before they are written out to memory. Rows that a device has written come from memory in any case.
# With larger units there would be fewer calls of the system, but rows would leave the cache before they are multiplied.
#
# In which order are the units taken? Some units can be read faster than others: a unit may lie in a hole of the file,
# or in the device's own cache. Slow units often lie side by side. If the readers took the units in the order of the
# file, all of them would be at slow units at the same time, and none would have something to multiply. So number $p$ of
# $n$ stands for unit $p s \bmod n$, where the stride $s$ is near $0.38\,n$ and has no common factor with $n$. Then two
# units that are taken one after the other lie far apart, and in most cases only one reader is at a slow unit.

# %% tags=["export"]
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


# %%
print("eight units are taken in the order", [p * unit_stride(8) % 8 for p in range(8)])
print("a unit of K3's q_proj:", unit_rows(2 * 7168), "rows; of an expert's w1:", unit_rows(3584 // 2))
print(f"a unit of an expert's w1: {unit_rows(3584 // 2) * 3584 // 2 / 1e6:.2f} MB")  # claim unit


# %% [markdown]
# ## 5.12.2 A unit, from Python
#
# The loop computes the product of a row block with one or more vectors. The rows of the block are not in an array yet.
# They are bytes of a file: `block.nbytes` bytes from `block.begin` on.

# %% tags=["export"]
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


# %% [markdown]
# `Files.read` continues a read that returned too few bytes, uses the page cache where it must, and raises an error that
# names the missing bytes. `typed` handles odd addresses. So `_multiply_rows` handles every case, and a loop that calls
# it until no unit is left would give the right result. Its only fault is that each unit is handled by Python.
#
# ## 5.12.3 The same loop, compiled
#
# A thread that runs Python holds the interpreter lock, so only one reader can run Python at a time. Between two units a
# reader has little to do: it calls the read, calls the product, and counts the bytes. The compiled loop does this
# without Python. The whole rest of a matrix is then one call, during which other threads can hold the lock.
#
# Compiled code calls two functions of the C library directly: `pread` and `clock_gettime`. Each call needs an intrinsic
# (1.3). The two clocks are those of `time.perf_counter` and `time.thread_time`.

# %% tags=["export"]
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


# %% [markdown]
# The same loop multiplies the trunk's rows and the experts' packed matrices. For bf16 and float32, `scale` is None and
# `_scaled` returns an array; for packed rows it returns a pair. A compiled function can return only one type. So numba
# gets two forms of `_scaled`, and chooses by the type of `scale`.

# %% tags=["export"]
@overload(_scaled)
def _scaled_form(w, scale, at, n):
    "The form of _scaled that numba compiles for these types."
    if isinstance(scale, types.NoneType):
        return lambda w, scale, at, n: w
    return lambda w, scale, at, n: (w, scale[at:at + n])


# %% [markdown]
# The loop ends when the cursor has no unit left. It also ends at a unit that it does not handle: if a read fails or
# returns too few bytes, or if rows lie at an odd address.
#
# The loop counts five totals. To ask for the processor time is a call of the system, which takes time. So the loop
# times only one unit in eight, and this unit stands for the other seven.

# %% tags=["export"]
READING, WANTED, TRANSFERRED = range(3)  # totals: seconds inside reads, bytes of rows, bytes of whole pages
WORKING, SAMPLED = 3, 4  # processor seconds of some products, and the bytes of their rows
SAMPLE = 8  # one unit in so many is timed


# %% tags=["export"]
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


# %% [markdown]
# ## 5.12.4 Together
#
# `read_multiply` uses both loops. The compiled loop runs until it ends. If it has ended at a unit that it does not
# handle, Python reads and multiplies this one unit from its first byte, and then the compiled loop goes on. If the read
# fails again, `Files.read` raises the error. The compiled loop cannot be used for a file that is not read directly, or
# on a system other than Linux. There Python handles every unit.

# %% tags=["export"]
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


# %% [markdown]
# How many readers may stream at the same time? If the arithmetic may use fewer threads than there are cores, as many
# readers as it has threads. If it may use all cores, there may be more readers than cores, because a reader that waits
# for its device leaves its core to another one.

# %% tags=["export"]
def max_concurrent_blocks(threads: int) -> int:
    "How many readers may read and multiply at a time when the arithmetic has `threads` threads."
    return threads if threads < CORES else max(threads, MAX_READERS)


# %% [markdown]
# ## 5.12.5 The gate: the bits of the resident product
#
# The gate streams matrices of the three formats. They begin at even and odd offsets of a file, and the buffers have
# room for one page of rows or for more. Both loops are tested. Every product must have the bits of the product with the
# matrix in memory.

# %%
rng = np.random.default_rng(seed)
MATRICES = {
    "BF16": (rng.integers(0x3c00, 0x4100, (700, 100)).astype(np.uint16), None),
    "F32": (rng.standard_normal((700, 50)).astype(np.float32), None),
    "U8": (rng.integers(0, 256, (700, 96), np.uint8), rng.integers(118, 125, (700, 6), np.uint8)),
}


def streamed(dtype, offset, pages, compiled):
    "The product of a matrix that lies at `offset` of a file, through a buffer of so many pages; what `Files` counted."
    global COMPILED_READS
    array, scale = MATRICES[dtype]
    path = scratch / f"{dtype}-{offset}"
    path.write_bytes(bytes(offset) + array.tobytes())
    block = RowBlock(Extent(str(path), offset, array.nbytes, dtype, array.shape), 0, 700, 0, array.nbytes, "trunk")
    x = np.linspace(-1, 1, 2 * 192, dtype=np.float32).reshape(2, -1)[:, :array.shape[1] * (1 + (dtype == "U8"))]
    prepared, out = (padded if scale is None else deinterleaved)(x), np.zeros((2, 700), np.float32)
    files, usual, COMPILED_READS = Files(), COMPILED_READS, compiled and COMPILED_READS
    read_multiply(files, Product(block, scale, prepared, out), page_buffer(pages * PAGE), np.zeros(1, np.int64))
    COMPILED_READS = usual
    files.close()
    resident = np.zeros_like(out)
    (ResidentMatrix(array) if scale is None else PackedMatrix(array, scale)).multiply(x, resident, 1)
    assert out.tobytes() == resident.tobytes(), (dtype, offset, pages, compiled)
    return files.bytes_read["trunk"]


for dtype, (array, _) in MATRICES.items():
    for offset in (0, 1, 8, 4099):
        for pages in (3, 8, 40):
            assert {streamed(dtype, offset, pages, compiled) for compiled in (True, False)} == {array.nbytes}
print("three formats, four offsets, three buffers, two loops: the bytes of the resident product: True")

# %% [markdown]
# The order of the units has a condition: the stride has no common factor with their number. Without it some units would
# be taken several times and others never. With 44 units and a stride of 22 the gate fails:

# %% tags=["raises-exception"]
usual_stride, unit_stride = unit_stride, lambda units: max(1, units // 2)  # WRONG: a common factor with most numbers
try:
    streamed("F32", 0, 3, compiled=False)
finally:
    unit_stride = usual_stride

# %%
shutil.rmtree(scratch)

# %% [markdown]
# ## 5.12.6 Is the compiled loop worth its room?
#
# Both loops multiply a unit right after it was read. The compiled loop saves only the Python code between two
# units. How much time is that? `tests/bench_reads.py` measures it. It streams a bf16 matrix of 88 MB through the pool
# with three loops by turns: the compiled loop; `lean`, which is the least that Python can do for a unit, without a lock
# and without counting; and the Python half of `read_multiply`.
#
# The devices in the table are simulated: a read waits, without using the processor, until a device of this rate would
# have delivered its bytes. Real bytes in memory are copied by the operating system, and holes are filled with zeros by
# it.
#
# | bytes from | compiled | lean takes | processor time | Python half takes |
# |---|---|---|---|---|
# | a device of 3 GB/s | 2.9 GB/s | 1.00 | 1.3 to 1.5 | 1.00 |
# | a device of 7 GB/s | 6.7 GB/s | 1.00 to 1.01 | 1.2 to 1.6 | 1.00 to 1.01 |
# | a device of 14 GB/s | 13 GB/s | 1.03 to 1.14 | 1.3 to 1.4 | 1.1 to 1.3 |
# | real bytes in memory | 8 GB/s | 1.01 to 1.12 | 1.0 to 1.1 | 1.1 to 1.2 |
# | holes | 27 to 35 GB/s | 1.3 to 1.4 | 1.0 to 1.3 | 1.8 to 2.3 |
# | a step of K3's width, five layers, 600 MB | 0.6 s | 1.3 to 1.6 | 1.1 to 1.3 | 1.9 to 2.0 |
#
# *Five runs of `python tests/bench_reads.py --rounds 61` and two with `--model DIR --ram 600MB` on the model of
# [5.34.3], nearly all of it holes; two cores that had other work too, so ranges. Times are multiples of the compiled
# loop's.*
#
# For a disk of 3 or 7 GB/s the compiled loop saves no time: the disk takes the time, and Python takes 1.2 to 1.6 times
# the processor time, on a processor that would otherwise wait. With bytes that come at the speed of memory the compiled
# loop does save time, because readers wait for each other at the interpreter lock. The synthetic models that test the
# full shape (5.28) consist of such bytes.
#
# So one loop of about 25 lines is compiled, and all other cases are left to Python. Without the compiled loop the
# engine would still give the same results.
#
# Some other ideas were tried. Huge pages for the buffers brought no gain. Reading far ahead brought none either,
# because a block that waits long has left the cache. These helped: one counter for all units of a matrix instead of a
# lock for each block; waking a thread only if it has something to do; reading a block or two of the next matrix while
# this one is multiplied, so that the device is not idle; and lending the buffer that was used last (5.11).
#
# ## 5.12.7 Summary
#
# - A unit is multiplied right after it was read. Then the next unit overwrites it. If the processor wrote it, it is
#   still in the core's cache.
# - The compiled loop handles only the usual case. The Python loop handles every case.
# - Units that are taken one after the other lie far apart, so that the readers are not all at a slow part of the file.
#
# ## Exercises
#
# Answer to 1: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Four readers take 64 units by turns. The 16 units in the middle of the file are slow. How many of the first four
#    units that are taken in one round can be slow, with a stride of 1 and with the stride of this chapter?
# 2. Measure `bench_reads.py` with 1, 2 and 5 readers. Why does `lean` lose more with five than with one?
# 3. Double `READ_UNIT`. Which row of the table changes, and which cache explains it?
#
# Next: [5.13 The trunk: rows that arrive](13_trunk.ipynb).
#
# [5.34.3]: 34_decode.ipynb#5.34.3-One-token,-layer-by-layer
