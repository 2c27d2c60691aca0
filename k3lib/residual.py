"""3.2 Block attention residuals: a layer chooses its depth

Made from book/03_mla/02_residual.py: edit that, then run `make export`.
"""

# built on simd 82ba8ef1cec4
# built on matmul da409453befe
# built on functions 81a78568089f
import numpy as np
from numba import njit
from k3lib.simd import KERNEL, fma
from k3lib.matmul import NotFinite, dot
from k3lib.functions import exp


_ZERO, _LOWEST, _FAINT = np.float32(0), np.float32(-np.inf), np.float32(-60)


@njit(**KERNEL)
def _depth_weights(sources, query, eps, weights):
    n, T, H = sources.shape
    for t in range(T):
        top = _LOWEST
        for s in range(n):
            x = sources[s, t]
            score, squares = dot(x, query), dot(x, x)
            if not (abs(score) < np.inf and squares < np.inf):
                return s
            weights[s, t] = score / np.sqrt(squares / np.float32(H) + np.float32(eps))
            top = max(top, weights[s, t])
        total = _ZERO
        for s in range(n):
            below = weights[s, t] - top
            weights[s, t] = _ZERO if below < _FAINT else exp(below)
            total += weights[s, t]
        for s in range(n):
            weights[s, t] /= total
    return -1


def depth_weights(sources, n, norm_w, proj_w, eps):
    """float32 [n, T]: softmax over s < n of <RMSNorm(sources[s, t]; eps) * norm_w, proj_w>.

    `sources` float32 [S, T, H], `norm_w` and `proj_w` float32 [H]. Raises ValueError where shapes do not fit, NotFinite where a
    source's score or sum of squares is infinite or NaN.
    """
    S, T, H = sources.shape
    if not 1 <= n <= S or norm_w.shape != (H,) or proj_w.shape != (H,):
        raise ValueError(f"mix: {n} of sources {sources.shape}, norm {norm_w.shape} and proj {proj_w.shape} do not fit")
    weights = np.empty((n, T), np.float32)
    bad = _depth_weights(sources[:n], norm_w * proj_w, eps, weights)
    if bad >= 0:
        raise NotFinite(f"mix: the score or the sum of squares of source {bad} of {n} is not a finite number")
    return weights


@njit(**KERNEL)
def _weighted_sum(sources, weights, out):
    n, T, H = sources.shape
    for t in range(T):
        y = out[t]
        for i in range(H):
            y[i] = weights[0, t] * sources[0, t, i]
        for s in range(1, n):
            a, x = weights[s, t], sources[s, t]
            for i in range(H):
                y[i] = fma(a, x[i], y[i])


def mix(sources, n, norm_w, proj_w, eps, out):
    """out[t] = sum over s < n of a[s, t] * sources[s, t], float32 [T, H], with a = depth_weights: the norm is for the scores alone.

    Raises ValueError where shapes do not fit, or where `out` shares memory with `sources`, which this sum and every later
    mix still read. Returns `out`. The bits of a token depend on that token alone.
    """
    if out.shape != sources.shape[1:]:
        raise ValueError(f"mix: out has shape {out.shape}, expected {sources.shape[1:]}")
    if np.may_share_memory(out, sources):
        raise ValueError("mix: out shares memory with sources, which later mixes still read")
    _weighted_sum(sources[:n], depth_weights(sources, n, norm_w, proj_w, eps), out)
    return out


__all__ = [
    "depth_weights", "mix",
]
