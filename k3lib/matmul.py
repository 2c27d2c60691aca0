"""1.4 One row, one order

Made from book/01_mxfp4/04_matmul.py: edit that, then run `make export`.
"""

# built on mxfp4 ada01661af2a
# built on simd 82ba8ef1cec4
# built on parallel b466791e900b
import math
import numpy as np
from numba import get_num_threads, njit
from k3lib.mxfp4 import GROUP
from k3lib.simd import (
    HALF_SCALE,
    INNER,
    KERNEL,
    fma16,
    high16,
    load16,
    load16_part,
    load32,
    look_up16,
    low16,
    mul16,
    prefetch_line,
    sum16,
    zeros16,
)
from k3lib.parallel import chunk_done, next_chunk, parallel_for, threads_for


LANES = 16


def bf16_to_float32(bits):
    "float32 of uint16 `bits`, any shape: bf16 is the upper half of a float32, so this is exact."
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@njit(**INNER)
def row_dot(w, i, x, j, k):
    "w[i:i+k] . x[j:j+k], flat arrays: sixteen lanes, one accumulator, one tree."
    acc = zeros16()
    whole = k - k % LANES
    for m in range(0, whole, LANES):
        acc = fma16(load16(w, i + m), load16(x, j + m), acc)
    if whole < k:
        acc = fma16(load16_part(w, i + whole, k - whole), load16_part(x, j + whole, k - whole), acc)
    return sum16(acc)


@njit(**KERNEL)
def dot(a, b):
    "a . b for float32 [n]: element m belongs to lane m % 16, lanes are summed by halves."
    return row_dot(a, 0, b, 0, a.size)


class ResidentMatrix:
    "A resident matrix: `array` [n, k], uint16 bf16 bits or float32, handed out as one block of rows."

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def blocks(self, multiple=1):
        "Yields (first row, rows [m, k]); every block but the last has a number of rows divisible by `multiple`."
        yield 0, self.array


class NotFinite(ArithmeticError):
    """Infinity or NaN where a finite number must come out. `rows`: those of the matrix that it was made from, None where there is none;
    `matrix`: which matrix, where only who multiplies knows."""

    def __init__(self, message, rows=None, matrix=None):
        super().__init__(message)
        self.rows, self.matrix = rows, matrix


_INFINITE = np.int32(0x7f800000)  # infinity's bits, and below every NaN's; signs aside


@njit(**KERNEL)
def first_not_finite(a):
    "Flat index of the first infinity or NaN in float32 [T, n], or -1."
    bits = a.reshape(-1).view(np.int32)
    for begin in range(0, bits.size, 1024):
        end, top = min(begin + 1024, bits.size), np.int32(0)
        for i in range(begin, end):
            top = max(top, bits[i] & np.int32(0x7fffffff))
        if top >= _INFINITE:
            for i in range(begin, end):
                if bits[i] & np.int32(0x7fffffff) >= _INFINITE:
                    return i
    return -1


def check_product(out, x, rows_of=lambda r: (r, r + 1), matrix=None):
    "Raise NotFinite unless the product `out` float32 [T, n] of `x` is finite; rows_of(r): first and end of the matrix rows behind output r."
    bad = first_not_finite(out)
    if bad >= 0:
        t, r = divmod(int(bad), out.shape[1])
        what = "a finite" if np.isfinite(x).all() else "an overflowing"
        raise NotFinite(f"output row {r} is {out[t, r]} for token {t} of the chunk, from {what} input, expected a finite number", rows_of(r), matrix)


PREFETCH_DISTANCE = 1024  # elements: what is asked of memory this early has come when its turn is there


@njit(**INNER)
def load4(w, i, k):
    "Sixteen elements of each of four rows of length k."
    return load16(w, i), load16(w, i + k), load16(w, i + 2 * k), load16(w, i + 3 * k)


@njit(**INNER)
def _load4_twice(w, i, k):
    "The same of the sixteen after them too. A step of 32 bf16 is a cache line of each row, so each is asked for once."
    prefetch_line(w, i + PREFETCH_DISTANCE)
    prefetch_line(w, i + k + PREFETCH_DISTANCE)
    prefetch_line(w, i + 2 * k + PREFETCH_DISTANCE)
    prefetch_line(w, i + 3 * k + PREFETCH_DISTANCE)
    return load32(w, i), load32(w, i + k), load32(w, i + 2 * k), load32(w, i + 3 * k)


@njit(**INNER)
def _load4_part(w, i, k, n):
    return load16_part(w, i, n), load16_part(w, i + k, n), load16_part(w, i + 2 * k, n), load16_part(w, i + 3 * k, n)


@njit(**INNER)
def fma4(w, v, acc):
    return fma16(w[0], v, acc[0]), fma16(w[1], v, acc[1]), fma16(w[2], v, acc[2]), fma16(w[3], v, acc[3])


@njit(**INNER)
def _fma4_twice(w, v, acc):
    return (fma16(w[0][1], v[1], fma16(w[0][0], v[0], acc[0])), fma16(w[1][1], v[1], fma16(w[1][0], v[0], acc[1])),
            fma16(w[2][1], v[1], fma16(w[2][0], v[0], acc[2])), fma16(w[3][1], v[1], fma16(w[3][0], v[0], acc[3])))


@njit(**INNER)
def rows4(w, i, k, x, j, out, t, r):
    a = zeros4()
    whole = k - k % (2 * LANES)
    for m in range(0, whole, 2 * LANES):
        a = _fma4_twice(_load4_twice(w, i + m, k), load32(x, j + m), a)
    for m in range(whole, k, LANES):
        n = min(LANES, k - m)
        a = fma4(_load4_part(w, i + m, k, n), load16_part(x, j + m, n), a)
    put4(out, t, r, a)


@njit(**INNER)
def rows4_tokens4(w, i, k, x, j, stride, out, t, r):
    a = b = c = d = zeros4()
    whole = k - k % (2 * LANES)
    for m in range(0, whole, 2 * LANES):
        v = _load4_twice(w, i + m, k)
        a = _fma4_twice(v, load32(x, j + m), a)
        b = _fma4_twice(v, load32(x, j + stride + m), b)
        c = _fma4_twice(v, load32(x, j + 2 * stride + m), c)
        d = _fma4_twice(v, load32(x, j + 3 * stride + m), d)
    for m in range(whole, k, LANES):
        n = min(LANES, k - m)
        v = _load4_part(w, i + m, k, n)
        a = fma4(v, load16_part(x, j + m, n), a)
        b = fma4(v, load16_part(x, j + stride + m, n), b)
        c = fma4(v, load16_part(x, j + 2 * stride + m, n), c)
        d = fma4(v, load16_part(x, j + 3 * stride + m, n), d)
    put4(out, t, r, a)
    put4(out, t + 1, r, b)
    put4(out, t + 2, r, c)
    put4(out, t + 3, r, d)


TILE = 16  # rows that stay in the cache while all tokens pass


@njit(**INNER)
def _tile(w, x, out, first, tile):
    "out[:, first:first+n] = x[:, :k] w^T for one tile of the rows of w [n, k]; x may have wider rows than w."
    n, k = w.shape
    tokens, stride = x.shape
    flat, xs = w.reshape(-1), x.reshape(-1)
    last = min(TILE * tile + TILE, n)
    t = 0
    while t < tokens:
        step = 4 if tokens - t >= 4 else 1
        r = TILE * tile
        while r + 4 <= last:
            if step == 4:
                rows4_tokens4(flat, r * k, k, xs, t * stride, stride, out, t, first + r)
            else:
                rows4(flat, r * k, k, xs, t * stride, out, t, first + r)
            r += 4
        while r < last:
            for m in range(t, t + step):
                out[m, first + r] = row_dot(flat, r * k, xs, m * stride, k)
            r += 1
        t += step


@njit(**KERNEL)
def _matmul(tiles, w, x, out, first, drawn):
    while True:
        begin, end = next_chunk(drawn, tiles)
        if begin >= tiles:
            return
        for tile in range(begin, end):
            _tile(w, x, out, first, tile)
        chunk_done(drawn, begin, end)


@njit(**KERNEL)
def matmul_rows(w, x, out, first):
    "The same on the calling thread alone, for rows that this thread has just read (chapter 5.13)."
    for tile in range((w.shape[0] + TILE - 1) // TILE):
        _tile(w, x, out, first, tile)


def linear(W, x, out=None):
    """float32 [T, n] = x W^T for `x` float32 [T, k] and a matrix W [n, k]: anything with .shape and .blocks(), or with
    .multiply(x, out, threads) if it has a way of its own.

    Each output is one row's dot product in a fixed order, so the bits do not depend on how the rows were cut, on T,
    or on the number of threads. Raises NotFinite for a product that is infinite or NaN.
    """
    n, k = W.shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"linear: x has shape {x.shape}, W {W.shape}: the last dimensions differ")
    if out is None:
        out = np.empty((x.shape[0], n), np.float32)
    elif out.shape != (x.shape[0], n) or out.dtype != np.float32:
        raise ValueError(f"linear: out is {out.dtype} {out.shape}, expected float32 {(x.shape[0], n)}")
    on_lines = line_aligned((x.shape[0], k + -k % LANES))
    on_lines[:, :k] = x
    if hasattr(W, "multiply"):
        W.multiply(on_lines, out, get_num_threads())
    else:
        for first, block in W.blocks():
            parallel_for(threads_for(x.size * len(block)), -(-len(block) // TILE), _matmul, block, on_lines, out, first)
    check_product(out, x)
    return out


@njit(**INNER)
def _unpack(p, s, g):
    "Group g of the matrix: twice its even weights, twice its odd weights, half its scale."
    high = high16(p, 16 * g)
    return low16(p, 16 * g), high, look_up16(HALF_SCALE, s, g)


@njit(**INNER)
def _group(weights, even, odd, acc):
    "acc + one group of one row against 16 even and 16 odd activations."
    low, high, half_scale = weights
    return fma16(fma16(high, odd, mul16(low, even)), half_scale, acc)


@njit(**INNER)
def _row1(p, s, r, x, t, groups, out, first):
    a = zeros16()
    for q in range(groups):
        j = 32 * (t * groups + q)
        a = _group(_unpack(p, s, r * groups + q), load16(x, j), load16(x, j + 16), a)
    out[t, first + r] = sum16(a)


@njit(**INNER)
def zeros4():
    "Accumulators of four rows."
    return zeros16(), zeros16(), zeros16(), zeros16()


@njit(**INNER)
def put4(out, t, r, acc):
    "out[t, r:r+4] = the sums of four accumulators."
    out[t, r], out[t, r + 1], out[t, r + 2], out[t, r + 3] = sum16(acc[0]), sum16(acc[1]), sum16(acc[2]), sum16(acc[3])


@njit(**INNER)
def _unpack4(p, s, g, groups):
    return _unpack(p, s, g), _unpack(p, s, g + groups), _unpack(p, s, g + 2 * groups), _unpack(p, s, g + 3 * groups)


@njit(**INNER)
def _group4(w, x, j, acc):
    even, odd = load16(x, j), load16(x, j + 16)
    return (_group(w[0], even, odd, acc[0]), _group(w[1], even, odd, acc[1]),
            _group(w[2], even, odd, acc[2]), _group(w[3], even, odd, acc[3]))


@njit(**INNER)
def _packed_rows4(p, s, r, x, t, groups, out, first):
    a = zeros4()
    for q in range(groups):
        prefetch_line(p, 16 * (r + 4) * groups + 64 * q)
        a = _group4(_unpack4(p, s, r * groups + q, groups), x, 32 * (t * groups + q), a)
    put4(out, t, first + r, a)


@njit(**INNER)
def _packed_rows4_tokens2(p, s, r, x, t, groups, out, first):
    a = b = zeros4()
    for q in range(groups):
        prefetch_line(p, 16 * (r + 4) * groups + 64 * q)
        w, j = _unpack4(p, s, r * groups + q, groups), 32 * (t * groups + q)
        a = _group4(w, x, j, a)
        b = _group4(w, x, j + 32 * groups, b)
    put4(out, t, first + r, a)
    put4(out, t + 1, first + r, b)


@njit(**INNER)
def _packed_rows4_tokens4(p, s, r, x, t, groups, out, first):
    a = b = c = d = zeros4()
    for q in range(groups):
        prefetch_line(p, 16 * (r + 4) * groups + 64 * q)
        w, j = _unpack4(p, s, r * groups + q, groups), 32 * (t * groups + q)
        a = _group4(w, x, j, a)
        b = _group4(w, x, j + 32 * groups, b)
        c = _group4(w, x, j + 64 * groups, c)
        d = _group4(w, x, j + 96 * groups, d)
    put4(out, t, first + r, a)
    put4(out, t + 1, first + r, b)
    put4(out, t + 2, first + r, c)
    put4(out, t + 3, first + r, d)


PACKED_TILE = 16  # rows


@njit(**INNER)
def _packed_tile(packed, scale, halves, out, first, tile):
    "All tokens times one tile of the rows of a block; row 0 of the block is row `first` of the matrix."
    n, groups = scale.shape
    tokens = out.shape[0]
    p, s, x = packed.reshape(-1), scale.reshape(-1), halves.reshape(-1)
    last = min(PACKED_TILE * tile + PACKED_TILE, n)
    t = 0
    while t < tokens:
        step = 4 if tokens - t >= 4 else 2 if tokens - t >= 2 else 1
        r = PACKED_TILE * tile
        while r + 4 <= last:
            if step == 4:
                _packed_rows4_tokens4(p, s, r, x, t, groups, out, first)
            elif step == 2:
                _packed_rows4_tokens2(p, s, r, x, t, groups, out, first)
            else:
                _packed_rows4(p, s, r, x, t, groups, out, first)
            r += 4
        while r < last:
            for m in range(t, t + step):
                _row1(p, s, r, x, m, groups, out, first)
            r += 1
        t += step


@njit(**KERNEL)
def _packed_matmul(tiles, packed, scale, halves, out, drawn):
    while True:
        begin, end = next_chunk(drawn, tiles)
        if begin >= tiles:
            return
        for tile in range(begin, end):
            _packed_tile(packed, scale, halves, out, 0, tile)
        chunk_done(drawn, begin, end)


@njit(**KERNEL)
def mxfp4_rows(packed, scale, halves, out, first):
    """out[:, first:first+m] for the m rows `packed` uint8 [m, k/2], `scale` uint8 [m, k/32], on the calling thread alone: for rows that
    this thread has just read (chapter 5.16). `halves` is what halved(x) made of x."""
    for tile in range((scale.shape[0] + PACKED_TILE - 1) // PACKED_TILE):
        _packed_tile(packed, scale, halves, out, first, tile)


def line_aligned(shape):
    "float32 zeros that begin on a cache line, so that no load of sixteen floats straddles two."
    size = math.prod(shape)
    raw = np.zeros(size + 16, np.float32)
    start = -raw.__array_interface__["data"][0] % 64 // 4
    return raw[start:start + size].reshape(shape)


def deinterleaved(x):
    "`x` float32 [T, k] as the kernels take it: float32 [T, k/32, 2, 16], the even elements of each group, then the odd ones."
    halves = line_aligned((x.shape[0], x.shape[1] // GROUP, 2, 16))
    halves[...] = x.reshape(len(x), -(-x.shape[1] // GROUP), 16, 2).swapaxes(-1, -2)
    return halves


def check_fit(packed, scale, x_shape, out):
    "Raise ValueError unless arrays or extents `packed` [n, k/2] and `scale` [n, k/32] take x [T, k] to `out` [T, n]. The kernels do not look."
    n, groups = scale.shape
    if packed.shape != (n, groups * 16) or x_shape != (len(out), groups * GROUP) or out.shape[1] != n:
        raise ValueError(f"mxfp4_matmul: packed {packed.shape}, scale {scale.shape}, x {x_shape} and out {out.shape} do not fit")


def mxfp4_matmul(packed, scale, x, out):
    """out[t] = W x[t] for a packed W: `packed` uint8 [n, k/2], `scale` uint8 [n, k/32], `x` float32 [T, k], `out` float32 [T, n].

    W is never unpacked in memory. Lane l of a row's accumulator takes elements 2l and 2l+1 of every group, group
    after group, so the bits of out[t, r] depend on row r and token t alone. Returns `out`.
    """
    check_fit(packed, scale, x.shape, out)
    if not packed.dtype == scale.dtype == np.uint8:
        raise ValueError(f"mxfp4_matmul: packed is {packed.dtype} and scale {scale.dtype}, expected uint8")
    parallel_for(threads_for(x.size * len(packed)), -(-len(packed) // PACKED_TILE), _packed_matmul, packed, scale, deinterleaved(x), out)
    return out


__all__ = [
    "LANES", "bf16_to_float32", "row_dot", "dot", "ResidentMatrix", "NotFinite", "first_not_finite",
    "check_product", "PREFETCH_DISTANCE", "load4", "fma4", "rows4", "rows4_tokens4", "TILE", "matmul_rows",
    "linear", "zeros4", "put4", "PACKED_TILE", "mxfp4_rows", "line_aligned", "deinterleaved", "check_fit",
    "mxfp4_matmul",
]
