"""3.2 Block attention residuals

Made from book/03_mla/02_residual.py: edit that, then run `make export`.
"""
# built on linear a03a069750fc

import numpy as np
from numba import njit, prange

from k3lib.linear import KERNEL, dot, exp, fma


@njit(parallel=True, **KERNEL)
def _mix(sources, query, eps, out):
    n, T, H = sources.shape
    weights = np.empty((T, n), np.float32)
    for t in prange(T):
        w = weights[t]
        for s in range(n):
            x = sources[s, t]
            w[s] = dot(x, query) / np.sqrt(dot(x, x) / np.float32(H) + eps)
        top = w[0]
        for s in range(1, n):
            top = max(top, w[s])
        total = np.float32(0)
        for s in range(n):
            w[s] = exp(w[s] - top)
            total += w[s]
        y = out[t]
        for i in range(H):
            y[i] = np.float32(0)
        for s in range(n):
            x, p = sources[s, t], w[s] / total
            for i in range(H):
                y[i] = fma(p, x[i], y[i])


def mix(sources, n, norm_w, proj_w, eps, out):
    """out[t] = sum over s < n of p[s, t] sources[s, t], p the softmax over s of <RMSNorm(sources[s, t]; eps) * norm_w, proj_w>.

    `sources` float32 [S, T, H], `norm_w`, `proj_w` float32 [H], `out` float32 [T, H]. The sources are mixed raw: the norm
    is for the score alone. Raises ValueError if `out` shares memory with `sources`, which it would overwrite while reading.
    """
    if np.may_share_memory(out, sources):
        raise ValueError("mix: out shares memory with sources, which are still to be read")
    _mix(sources[:n], norm_w * proj_w, np.float32(eps), out)
    return out


__all__ = ['mix']
