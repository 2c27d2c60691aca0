"""1.6 Exponential, tanh, sigmoid and RMSNorm with the same bits everywhere

Made from book/01_mxfp4/06_functions.py: edit that, then run `make export`.
"""

import numpy as np

from k3lib.kernel_cache import inner, kernel
from k3lib.matmul import NotFinite, dot
from k3lib.simd import float_bits, float_of_bits, fma


_f = np.float32
_ONE, _TWO, _ZERO = _f(1), _f(2), _f(0)


@kernel
def rms_norm_row(x, weight, eps, out):
    "out = x * (mean(x^2) + eps)^-1/2 * weight for float32 [n]; `out` may be `x`. Returns the sum of squares."
    squares = dot(x, x)
    scale = _ONE / np.sqrt(squares / np.float32(x.size) + np.float32(eps))
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i]
    return squares


@kernel
def _rms_norm(x, weight, eps, out):
    for t in range(x.shape[0]):
        if not rms_norm_row(x[t], weight, eps, out[t]) < np.inf:
            return t
    return -1


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray | None = None) -> np.ndarray:
    """float32 [T, n]: each row of `x` [T, n] divided by its root mean square (eps inside the root), times `weight` [n].

    The result is `out` if that is given; it may be `x`. Raises ValueError where shapes do not fit, NotFinite where the
    sum of squares is infinite or NaN.
    """
    if out is None:
        out = np.empty_like(x)
    if weight.shape != x.shape[1:] or out.shape != x.shape:
        raise ValueError(f"rms_norm: x {x.shape}, weight {weight.shape} and out {out.shape} do not fit")
    bad = _rms_norm(x, weight, eps, out)
    if bad >= 0:
        raise NotFinite(f"the sum of squares of row {bad} is {dot(x[bad], x[bad])}, expected a finite number")
    return out


_LOG2E, _LN2_HI, _LN2_LO = _f(1.44269504), _f(0.693145752), _f(1.42860677e-06)
_ROUND = _f(1.5 * 2**23)  # x + _ROUND has round(x) in its low bits; subtracting _ROUND again gives round(x)
_ROUND_BITS = int(np.float32(1.5 * 2**23).view(np.int32))
_SIGN_BIT = np.int32(-2**31)
_TAYLOR = tuple(_f(1 / d) for d in (5040, 720, 120, 24, 6, 2))
_EXP_MAX, _EXP_MIN, _TANH_MAX = _f(89), _f(-104), _f(10)


@inner
def _exp_parts(x):
    "(q, n) with e^x = 2^n (1 + q), |q| < 0.42: Cody-Waite reduction, then Taylor's series to r^7."
    shifted = fma(x, _LOG2E, _ROUND)
    n = np.int32(float_bits(shifted) - np.int32(_ROUND_BITS))
    whole = shifted - _ROUND
    r = fma(whole, -_LN2_LO, fma(whole, -_LN2_HI, x))
    p = _TAYLOR[0]
    p = fma(p, r, _TAYLOR[1])
    p = fma(p, r, _TAYLOR[2])
    p = fma(p, r, _TAYLOR[3])
    p = fma(p, r, _TAYLOR[4])
    p = fma(p, r, _TAYLOR[5])
    return fma(p * r, r, r), n


@inner
def _power2(n):
    "2^n as float32 for -126 <= n <= 127."
    return float_of_bits(np.int32((n + np.int32(127)) << np.int32(23)))


@kernel
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


@kernel
def sigmoid(x):
    "1 / (1 + e^-x), float32, from e^-|x| so that neither side overflows."
    e = exp(-abs(x))
    top = _ONE if x >= _ZERO else e
    return top / (_ONE + e)


@kernel
def tanh(x):
    "tanh x, float32, as m / (m + 2) with m = e^2|x| - 1. The 1 is never added, so small x lose nothing; -0 stays -0."
    y = abs(x)
    if y > _TANH_MAX:
        y = _TANH_MAX
    q, n = _exp_parts(y + y)
    s = _power2(n)
    m = fma(s, q, s - _ONE)
    r = m / (m + _TWO)
    return float_of_bits(np.int32(float_bits(r) | np.int32(float_bits(x) & _SIGN_BIT)))


__all__ = [
    "rms_norm_row", "rms_norm", "exp", "sigmoid", "tanh",
]
