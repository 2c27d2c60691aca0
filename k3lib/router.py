"""4.1 The router: sixteen of 896, steered by a bias

Made from book/04_moe_router/01_router.py: edit that, then run `make export`.
"""

# built on simd 82ba8ef1cec4
# built on functions 81a78568089f
import numpy as np
from numba import njit
from k3lib.simd import KERNEL
from k3lib.functions import sigmoid


_ZERO, _TINY = np.float32(0), np.float32(1e-20)


@njit(**KERNEL)
def _route(logits, bias, scale, best, ids, weights):
    k = ids.shape[1]
    for t in range(logits.shape[0]):
        filled = 0
        for e in range(bias.size):
            s = sigmoid(logits[t, e])
            b = s + bias[e]
            if filled == k and b <= best[k - 1]:
                continue
            r = filled if filled < k else k - 1
            while r > 0 and best[r - 1] < b:
                best[r], ids[t, r], weights[t, r] = best[r - 1], ids[t, r - 1], weights[t, r - 1]
                r -= 1
            best[r], ids[t, r], weights[t, r] = b, e, s
            filled = min(filled + 1, k)
        total = _ZERO
        for r in range(k):
            total += weights[t, r]
        for r in range(k):
            weights[t, r] = weights[t, r] / (total + _TINY) * scale


def route(logits, bias, k, scale):
    """(ids int32 [T, k], weights float32 [T, k]) in rank order, for `logits` float32 [T, E] and `bias` float32 [E].

    s = sigmoid(logits); the k largest of s + bias, equal ones by the lower id; weight = s / (sum of the chosen s + 1e-20) * scale.
    Raises ValueError on a logit or a bias that is not finite.
    """
    T, E = logits.shape
    if bias.shape != (E,) or not 1 <= k <= E:
        raise ValueError(f"route: logits {logits.shape}, bias {bias.shape} and k = {k} do not fit")
    for what, rows in (("logits of token row", logits), ("bias, row", bias[None])):
        bad = ~np.isfinite(rows)
        if bad.any():
            t, e = np.argwhere(bad)[0]
            raise ValueError(f"route: {what} {t}: expert {e} has {rows[t, e]}, expected a finite number")
    ids, weights = np.empty((T, k), np.int32), np.empty((T, k), np.float32)
    _route(logits, bias, np.float32(scale), np.empty(k, np.float32), ids, weights)
    return ids, weights


__all__ = [
    "route",
]
