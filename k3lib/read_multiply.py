"""5.12 Read, multiply, read, multiply

Made from book/05_streaming/12_read_multiply.py: edit that, then run `make export`.
"""

# built on simd 82ba8ef1cec4
# built on parallel b466791e900b
# built on matmul da409453befe
# built on disk d270426aac64
import math
import sys
from itertools import count
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from k3lib.simd import INNER, KERNEL
from k3lib.parallel import next_item
from k3lib.matmul import TILE, matmul_rows, mxfp4_rows
from k3lib.disk import ARRAY_DTYPE, PAGE, READ_UNIT, typed


COMPILED_READS = sys.platform == "linux" and sys.maxsize > 2**32  # elsewhere the same reads are made from Python, a slot at a time


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
def read_unit(descriptor, offset, nbytes, slot, at, journal, p):
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
def unit_multiplied(journal, p):
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
        p = next_item(drawn)
        if p >= pieces:
            return p
        at = p * stride % pieces * piece
        n = min(piece, rows - at)
        begin = read_unit(descriptor, offset + at * row, n * row, slot, 0, journal, done)
        if begin < 0 or begin % elements.itemsize:
            return p
        start = begin // elements.itemsize
        matmul_rows(elements[start:start + n * k].reshape(n, k), x, out, first + at)
        unit_multiplied(journal, done)
        done += 1


def read_units(rows, row_bytes, room=READ_UNIT):
    "(rows a piece, number of pieces) for `rows` rows of `row_bytes` that come to a place with `room` for at least one."
    fit = min(READ_UNIT, room) // row_bytes
    piece = fit // TILE * TILE or fit // 4 * 4 or 1  # as the kernels take them, where there is room
    return piece, -(-rows // piece)


def unit_stride(pieces):
    "How far apart, of `pieces` in a row, two are that are drawn one after the other. Each is drawn once, because the two have no common factor."
    return next(stride for stride in count(max(1, round(pieces * GOLDEN))) if math.gcd(stride, pieces) == 1)


def stream_rows(files, read, slot, x, out, drawn):
    """Read and multiply pieces of a read until `drawn` gives no more; any number of threads may, each with a slot of its own. A piece that
    compiled code cannot have, of a file read through the page cache, at an odd address, cut short, is File.read's: it says why."""
    row = read.nbytes // read.rows
    piece, pieces = read_units(read.rows, row, len(slot) - 2 * PAGE)  # compiled code does not look where a read ends
    stride = unit_stride(pieces)
    elements = slot.view(ARRAY_DTYPE[read.extent.dtype])
    while True:
        p = files.stream(read.extent, read.begin, read.part, pieces, lambda descriptor, journal: _stream_rows(
            descriptor, read.extent.offset + read.begin, read.rows, piece, stride, slot, elements, row // elements.itemsize, x, out,
            read.first, drawn, journal))
        p = next_item(drawn) if p is None else p
        if p >= pieces:
            return
        at = p * stride % pieces * piece
        n = min(piece, read.rows - at)
        start = files.read(slot, read.extent, read.begin + at * row, n * row, read.part)
        rows = typed(slot, start, n * row, read.extent.dtype).reshape(n, -1)
        files.multiply(rows.nbytes, matmul_rows, rows, x, out, read.first + at)


@njit(**KERNEL)
def place_in_slot(at, kept, offset, start):
    "Where in a slot the page of byte `start` goes: to slot[at:], where that of `offset` is, or as far behind it as in the file if `kept`."
    return at + (start - start % PAGE) - (offset - offset % PAGE) if kept else at


@njit(**KERNEL)
def stream_packed(descriptor, offset, rows, piece, slot, at, kept, scale_offset, groups, scale_at, halves, out, journal):
    """The rows of a packed matrix at `offset`, read `piece` at a time into slot[at:], one after the other if `kept`; before them their
    scales, [rows, groups] at `scale_offset`, into slot[scale_at:]. Returns the pieces of rows done."""
    journal[0, 1] = clock(WALL)
    begin, row = read_unit(descriptor, scale_offset, rows * groups, slot, scale_at, journal, 0), 16 * groups
    if begin < 0:
        return 0
    journal[1, 1] = journal[1, 0]  # nothing to multiply yet
    scale = slot[begin:begin + rows * groups].reshape(rows, groups)
    pieces = len(journal) - 2
    for p in range(pieces):
        first = p * piece
        n, start = min(piece, rows - first), offset + first * row
        begin = read_unit(descriptor, start, n * row, slot, place_in_slot(at, kept, offset, start), journal, p + 1)
        if begin < 0:
            return p
        mxfp4_rows(slot[begin:begin + n * row].reshape(n, row), scale[first:first + n], halves, out, first)
        unit_multiplied(journal, p + 1)
    return pieces


__all__ = [
    "COMPILED_READS", "GOLDEN", "WALL", "BUSY", "clock", "read_unit", "unit_multiplied", "read_units",
    "unit_stride", "stream_rows", "place_in_slot", "stream_packed",
]
