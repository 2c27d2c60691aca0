# %% [markdown]
# # 1.3 Rows, norms and the floating-point contract

# %% tags=["export"]
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from k3lib.mxfp4 import KERNEL, fma, fma16, load16, load16_part, sum16, zeros16

LANES = 16


# %% tags=["export"]
def bf16_to_float32(bits):
    "float32 of uint16 `bits`, any shape: bf16 is the upper half of a float32, so this is exact."
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


# %% tags=["export"]
@njit(**KERNEL)
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


@njit(**KERNEL)
def _dot4x1(w, i, x, j, k):
    "Four rows w[i], w[i+k], ... against one token."
    a = b = c = d = zeros16()
    whole = k - k % LANES
    for m in range(0, whole, LANES):
        v = load16(x, j + m)
        a = fma16(load16(w, i + m), v, a)
        b = fma16(load16(w, i + k + m), v, b)
        c = fma16(load16(w, i + 2 * k + m), v, c)
        d = fma16(load16(w, i + 3 * k + m), v, d)
    if whole < k:
        n = k - whole
        v = load16_part(x, j + whole, n)
        a = fma16(load16_part(w, i + whole, n), v, a)
        b = fma16(load16_part(w, i + k + whole, n), v, b)
        c = fma16(load16_part(w, i + 2 * k + whole, n), v, c)
        d = fma16(load16_part(w, i + 3 * k + whole, n), v, d)
    return sum16(a), sum16(b), sum16(c), sum16(d)


@njit(**KERNEL)
def _dot2x4(w, i, x, j, k):
    "Two rows against four tokens: a weight is widened once for all four."
    a = b = c = d = e = f = g = h = zeros16()
    whole = k - k % LANES
    for m in range(0, whole, LANES):
        u, v = load16(w, i + m), load16(w, i + k + m)
        s, t = load16(x, j + m), load16(x, j + k + m)
        a, e = fma16(u, s, a), fma16(v, s, e)
        b, f = fma16(u, t, b), fma16(v, t, f)
        s, t = load16(x, j + 2 * k + m), load16(x, j + 3 * k + m)
        c, g = fma16(u, s, c), fma16(v, s, g)
        d, h = fma16(u, t, d), fma16(v, t, h)
    if whole < k:
        n, m = k - whole, whole
        u, v = load16_part(w, i + m, n), load16_part(w, i + k + m, n)
        s, t = load16_part(x, j + m, n), load16_part(x, j + k + m, n)
        a, e = fma16(u, s, a), fma16(v, s, e)
        b, f = fma16(u, t, b), fma16(v, t, f)
        s, t = load16_part(x, j + 2 * k + m, n), load16_part(x, j + 3 * k + m, n)
        c, g = fma16(u, s, c), fma16(v, s, g)
        d, h = fma16(u, t, d), fma16(v, t, h)
    return (sum16(a), sum16(b), sum16(c), sum16(d)), (sum16(e), sum16(f), sum16(g), sum16(h))


@njit(parallel=True, **KERNEL)
def _matmul(w, x, out, first):
    n, k = w.shape
    tokens = x.shape[0]
    flat, xs = w.reshape(-1), x.reshape(-1)
    for tile in prange((n + 3) // 4):
        r = 4 * tile
        last = min(r + 4, n)
        t = 0
        while t + 4 <= tokens:
            q = r
            while q + 2 <= last:
                upper, lower = _dot2x4(flat, q * k, xs, t * k, k)
                for m in range(4):
                    out[t + m, first + q] = upper[m]
                    out[t + m, first + q + 1] = lower[m]
                q += 2
            if q < last:
                for m in range(4):
                    out[t + m, first + q] = _dot(flat, q * k, xs, (t + m) * k, k)
            t += 4
        while t < tokens:
            if last == r + 4:
                a, b, c, d = _dot4x1(flat, r * k, xs, t * k, k)
                out[t, first + r], out[t, first + r + 1], out[t, first + r + 2], out[t, first + r + 3] = a, b, c, d
            else:
                for q in range(r, last):
                    out[t, first + q] = _dot(flat, q * k, xs, t * k, k)
            t += 1


# %% tags=["export"]
class Rows:
    "A resident matrix: `array` [n, k], uint16 bf16 bits or float32, handed out as one block of rows."

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def blocks(self, multiple=1):
        "Yields (first row, rows [m, k]); every block but the last has a number of rows divisible by `multiple`."
        yield 0, self.array


def linear(W, x, out=None):
    """float32 [T, n] = x W^T for `x` float32 [T, k] and a matrix W [n, k]: anything with .shape and .blocks().

    Each output is one row's dot product in a fixed order, so the bits do not depend on how the rows were cut, on T,
    or on the number of threads.
    """
    n, k = W.shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"linear: x has shape {x.shape}, W {W.shape}: the last dimensions differ")
    if out is None:
        out = np.empty((x.shape[0], n), np.float32)
    for first, rows in W.blocks():
        _matmul(rows, x, out, first)
    return out


# %% tags=["export"]
@intrinsic
def _bits(typingctx, x):
    "(x float32) -> its bits, int32."
    return types.int32(types.float32), lambda c, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float(typingctx, i):
    "(i int32) -> the float32 with these bits."
    return types.float32(types.int32), lambda c, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


_f = np.float32
_LOG2E, _LN2_HI, _LN2_LO = _f(1.44269504), _f(0.693145752), _f(1.42860677e-06)
_ROUND = _f(1.5 * 2**23)  # adding and taking off this number rounds to an integer, and leaves it in the low bits
_ROUND_BITS = int(np.float32(1.5 * 2**23).view(np.int32))
_TAYLOR = tuple(_f(1 / d) for d in (5040, 720, 120, 24, 6, 2))
_ONE, _TWO, _ZERO = _f(1), _f(2), _f(0)
_EXP_MAX, _EXP_MIN, _TANH_MAX = _f(89), _f(-104), _f(10)


@njit(**KERNEL)
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


@njit(**KERNEL)
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
    "tanh x, float32, as m / (m + 2) with m = e^2|x| - 1 kept apart from the 1, so that small x lose nothing."
    y = abs(x)
    if y > _TANH_MAX:
        y = _TANH_MAX
    q, n = _exp_parts(y + y)
    s = _power2(n)
    m = fma(s, q, s - _ONE)
    r = m / (m + _TWO)
    return r if x >= _ZERO else -r


# %% tags=["export"]
@njit(**KERNEL)
def rms_norm_row(x, weight, eps, out):
    "out = x * (mean(x^2) + eps)^-1/2 * weight for float32 [n]; `out` may be `x`."
    scale = _ONE / np.sqrt(dot(x, x) / np.float32(x.size) + np.float32(eps))
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i]


@njit(**KERNEL)
def _rms_norm(x, weight, eps, out):
    for t in range(x.shape[0]):
        rms_norm_row(x[t], weight, eps, out[t])


def rms_norm(x, weight, eps, out=None):
    "float32 [T, n]: every row of `x` divided by its root mean square (eps inside the root), times `weight` [n]."
    if out is None:
        out = np.empty_like(x)
    _rms_norm(x, weight, eps, out)
    return out
