"""1.3 Rows, norms and the floating-point contract

Made from book/01_mxfp4/03_linear.py: edit that, then run `make export`.
"""
# built on mxfp4 0f1b34b47d7c

import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, types
from numba.extending import intrinsic

from k3lib.mxfp4 import (CORES, INNER, KERNEL, NO_MORE, aligned, draw, draw_run, finish, fma, fma16, load16, load16_part, load32, prefetch, put4, spread, sum16, threads_for,
                         zeros4, zeros16)

LANES = 16


def bf16_to_float32(bits):
    "float32 of uint16 `bits`, any shape: bf16 is the upper half of a float32, so this is exact."
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@njit(**INNER)
def _dot(w, i, x, j, k):
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
    return _dot(a, 0, b, 0, a.size)


class Rows:
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


AHEAD = 1024  # elements: what is asked of memory this early has come when its turn is there


@njit(**INNER)
def _load4(w, i, k):
    "Sixteen elements of each of four rows of length k."
    return load16(w, i), load16(w, i + k), load16(w, i + 2 * k), load16(w, i + 3 * k)


@njit(**INNER)
def _load4_twice(w, i, k):
    "The same of the sixteen after them too. A step of 32 bf16 is a cache line of each row, so each is asked for once."
    prefetch(w, i + AHEAD)
    prefetch(w, i + k + AHEAD)
    prefetch(w, i + 2 * k + AHEAD)
    prefetch(w, i + 3 * k + AHEAD)
    return load32(w, i), load32(w, i + k), load32(w, i + 2 * k), load32(w, i + 3 * k)


@njit(**INNER)
def _load4_part(w, i, k, n):
    return load16_part(w, i, n), load16_part(w, i + k, n), load16_part(w, i + 2 * k, n), load16_part(w, i + 3 * k, n)


@njit(**INNER)
def _fma4(w, v, acc):
    return fma16(w[0], v, acc[0]), fma16(w[1], v, acc[1]), fma16(w[2], v, acc[2]), fma16(w[3], v, acc[3])


@njit(**INNER)
def _fma4_twice(w, v, acc):
    return (fma16(w[0][1], v[1], fma16(w[0][0], v[0], acc[0])), fma16(w[1][1], v[1], fma16(w[1][0], v[0], acc[1])),
            fma16(w[2][1], v[1], fma16(w[2][0], v[0], acc[2])), fma16(w[3][1], v[1], fma16(w[3][0], v[0], acc[3])))


@njit(**INNER)
def _rows4(w, i, k, x, j, out, t, r):
    a = zeros4()
    whole = k - k % (2 * LANES)
    for m in range(0, whole, 2 * LANES):
        a = _fma4_twice(_load4_twice(w, i + m, k), load32(x, j + m), a)
    for m in range(whole, k, LANES):
        n = min(LANES, k - m)
        a = _fma4(_load4_part(w, i + m, k, n), load16_part(x, j + m, n), a)
    put4(out, t, r, a)


@njit(**INNER)
def _rows4_tokens4(w, i, k, x, j, stride, out, t, r):
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
        a = _fma4(v, load16_part(x, j + m, n), a)
        b = _fma4(v, load16_part(x, j + stride + m, n), b)
        c = _fma4(v, load16_part(x, j + 2 * stride + m, n), c)
        d = _fma4(v, load16_part(x, j + 3 * stride + m, n), d)
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
                _rows4_tokens4(flat, r * k, k, xs, t * stride, stride, out, t, first + r)
            else:
                _rows4(flat, r * k, k, xs, t * stride, out, t, first + r)
            r += 4
        while r < last:
            for m in range(t, t + step):
                out[m, first + r] = _dot(flat, r * k, xs, m * stride, k)
            r += 1
        t += step


@njit(**KERNEL)
def _matmul(tiles, w, x, out, first, drawn):
    while True:
        begin, end = draw_run(drawn, tiles)
        if begin >= tiles:
            return
        for tile in range(begin, end):
            _tile(w, x, out, first, tile)
        finish(drawn, begin, end)


@njit(**KERNEL)
def matmul_rows(w, x, out, first):
    "The same on the calling thread alone, for rows that this thread has just read (chapter 5.3)."
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
    on_lines = aligned((x.shape[0], k + -k % LANES))
    on_lines[:, :k] = x
    if hasattr(W, "multiply"):
        W.multiply(on_lines, out, get_num_threads())
    else:
        for first, block in W.blocks():
            spread(threads_for(x.size * len(block)), -(-len(block) // TILE), _matmul, block, on_lines, out, first)
    check_product(out, x)
    return out


_f = np.float32
_ONE, _TWO, _ZERO = _f(1), _f(2), _f(0)


@njit(**KERNEL)
def rms_norm_row(x, weight, eps, out):
    "out = x * (mean(x^2) + eps)^-1/2 * weight for float32 [n]; `out` may be `x`. Returns the sum of squares."
    squares = dot(x, x)
    scale = _ONE / np.sqrt(squares / np.float32(x.size) + np.float32(eps))
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i]
    return squares


@njit(**KERNEL)
def _rms_norm(x, weight, eps, out):
    for t in range(x.shape[0]):
        if not rms_norm_row(x[t], weight, eps, out[t]) < np.inf:
            return t
    return -1


def rms_norm(x, weight, eps, out=None):
    """float32 [T, n]: every row of `x` divided by its root mean square (eps inside the root), times `weight` [n].

    Raises NotFinite where the sum of squares is infinite or NaN.
    """
    if out is None:
        out = np.empty_like(x)
    if weight.shape != x.shape[1:] or out.shape != x.shape:
        raise ValueError(f"rms_norm: x {x.shape}, weight {weight.shape} and out {out.shape} do not fit")
    bad = _rms_norm(x, weight, eps, out)
    if bad >= 0:
        raise NotFinite(f"the sum of squares of row {bad} is {dot(x[bad], x[bad])}, expected a finite number")
    return out


@intrinsic
def _bits(typingctx, x):
    "(x float32) -> its bits, int32."
    return types.int32(types.float32), lambda c, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float(typingctx, i):
    "(i int32) -> the float32 with these bits."
    return types.float32(types.int32), lambda c, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


_LOG2E, _LN2_HI, _LN2_LO = _f(1.44269504), _f(0.693145752), _f(1.42860677e-06)
_ROUND = _f(1.5 * 2**23)  # adding and taking off this number rounds to an integer, and leaves it in the low bits
_ROUND_BITS = int(np.float32(1.5 * 2**23).view(np.int32))
_SIGN_BIT = np.int32(-2**31)
_TAYLOR = tuple(_f(1 / d) for d in (5040, 720, 120, 24, 6, 2))
_EXP_MAX, _EXP_MIN, _TANH_MAX = _f(89), _f(-104), _f(10)


@njit(**INNER)
def _exp_parts(x):
    "(q, n) with e^x = 2^n (1 + q), |q| < 0.42: Cody-Waite reduction, then Taylor's series to r^7."
    shifted = fma(x, _LOG2E, _ROUND)
    n = np.int32(_bits(shifted) - np.int32(_ROUND_BITS))
    whole = shifted - _ROUND
    r = fma(whole, -_LN2_LO, fma(whole, -_LN2_HI, x))
    p = _TAYLOR[0]
    p = fma(p, r, _TAYLOR[1])
    p = fma(p, r, _TAYLOR[2])
    p = fma(p, r, _TAYLOR[3])
    p = fma(p, r, _TAYLOR[4])
    p = fma(p, r, _TAYLOR[5])
    return fma(p * r, r, r), n


@njit(**INNER)
def _power2(n):
    "2^n as float32 for -126 <= n <= 127."
    return _float(np.int32((n + np.int32(127)) << np.int32(23)))


@njit(**KERNEL)
def exp(x):
    "e^x, float32: 0 below -104, infinity above 88.72, NaN for NaN."
    c = x
    if c > _EXP_MAX:
        c = _EXP_MAX
    if c < _EXP_MIN:
        c = _EXP_MIN
    q, n = _exp_parts(c)
    half = np.int32(n >> np.int32(1))
    return (_ONE + q) * _power2(half) * _power2(np.int32(n - half))


@njit(**KERNEL)
def sigmoid(x):
    "1 / (1 + e^-x), float32, from e^-|x| so that neither side overflows."
    e = exp(-abs(x))
    top = _ONE if x >= _ZERO else e
    return top / (_ONE + e)


@njit(**KERNEL)
def tanh(x):
    "tanh x, float32, as m / (m + 2) with m = e^2|x| - 1 kept apart from the 1, so that small x lose nothing; tanh(-0) is -0."
    y = abs(x)
    if y > _TANH_MAX:
        y = _TANH_MAX
    q, n = _exp_parts(y + y)
    s = _power2(n)
    m = fma(s, q, s - _ONE)
    r = m / (m + _TWO)
    return _float(np.int32(_bits(r) | np.int32(_bits(x) & _SIGN_BIT)))


__all__ = ['LANES', 'bf16_to_float32', 'dot', 'Rows', 'NotFinite', 'first_not_finite', 'check_product', 'AHEAD', 'TILE', 'matmul_rows', 'linear', 'rms_norm_row', 'rms_norm', 'exp', 'sigmoid', 'tanh']
