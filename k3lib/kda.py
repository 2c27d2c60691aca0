"""2.1 Kimi Delta Attention: a memory that never grows

Made from book/02_kda/01_kda.py: edit that, then run `make export`.
"""

# built on simd 82ba8ef1cec4
# built on parallel b466791e900b
# built on matmul da409453befe
# built on functions 81a78568089f
from typing import NamedTuple
import numpy as np
from numba import njit
from k3lib.simd import INNER, KERNEL, fma
from k3lib.parallel import chunk_done, next_chunk, parallel_for, threads_for
from k3lib.matmul import NotFinite, dot, linear
from k3lib.functions import exp, rms_norm, sigmoid


L2_EPS = np.float32(1e-6)  # added to the sum of squares, not to their mean


_ONE, _ZERO = np.float32(1), np.float32(0)


def _fits(what, array, shape):
    "Raise ValueError unless `array` has `shape`."
    if array.shape != tuple(shape):
        raise ValueError(f"{what} has shape {array.shape}, expected {tuple(shape)}")


@njit(**KERNEL)
def _short_conv(x, weight, state, out):
    T, channels = x.shape
    kernel = weight.shape[2]
    for t in range(T):
        for c in range(channels):
            out[t, c] = _ZERO
        for j in range(kernel):
            s = t + j - (kernel - 1)
            if s >= 0:
                for c in range(channels):
                    out[t, c] = fma(weight[c, 0, j], x[s, c], out[t, c])
            else:
                for c in range(channels):
                    out[t, c] = fma(weight[c, 0, j], state[c, s + kernel - 1], out[t, c])
        for c in range(channels):
            out[t, c] = out[t, c] * sigmoid(out[t, c])
    for c in range(channels):
        for j in range(kernel - 1):
            s = T + j - (kernel - 1)
            state[c, j] = x[s, c] if s >= 0 else state[c, T + j]


def short_conv(x, weight, state):
    """silu(causal depthwise convolution), float32 [T, P], of `x` float32 [T, P] with `weight` float32 [P, 1, kernel], oldest tap first.

    `state` float32 [P, kernel-1] holds the inputs before x[0], oldest first, and is moved on past x[T-1].
    """
    P, _, kernel = weight.shape
    _fits("short_conv: x", x, (len(x), P))
    _fits("short_conv: state", state, (P, kernel - 1))
    out = np.empty_like(x)
    _short_conv(x, weight, state, out)
    return out


@njit(**KERNEL)
def _l2norm(x, out):
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            squares = dot(x[t, h], x[t, h])
            if not squares < np.inf:
                return t * x.shape[1] + h
            scale = _ONE / np.sqrt(squares + L2_EPS)
            for i in range(x.shape[2]):
                out[t, h, i] = x[t, h, i] * scale
    return -1


def l2norm(x):
    "x / sqrt(sum(x^2) + 1e-6) over the last axis of float32 [T, heads, d]. Raises NotFinite where the sum is infinite or NaN."
    out = np.empty_like(x)
    bad = _l2norm(x, out)
    if bad >= 0:
        raise NotFinite(f"l2norm: the sum of squares of head {bad % x.shape[1]} is not a finite number")
    return out


@njit(**KERNEL)
def _kda_decay(z, A_log, dt_bias, lower_bound, out):
    low = np.float32(lower_bound)
    for t in range(z.shape[0]):
        for h in range(z.shape[1]):
            rate = exp(A_log[h])
            for i in range(z.shape[2]):
                x = rate * (z[t, h, i] + dt_bias[h, i])
                if not abs(x) < np.inf:  # the sigmoid would make an innocent 0 or 1 of it
                    return h
                out[t, h, i] = exp(low * sigmoid(x))
    return -1


def kda_decay(z, A_log, dt_bias, lower_bound):
    """alpha = exp(lower_bound * sigmoid(exp(A_log[head]) * (z + dt_bias))), float32 [T, heads, d], between e^lower_bound and 1.

    `z` float32 [T, heads, d], `dt_bias` float32 [heads*d], `A_log` float32 [heads or more]: one rate a head, the rest is padding.
    Raises NotFinite where the sigmoid's argument is infinite or NaN.
    """
    T, heads, d = z.shape
    if len(A_log) < heads:
        raise ValueError(f"kda_decay: A_log has {len(A_log)} entries, expected one for each of {heads} heads")
    _fits("kda_decay: dt_bias", dt_bias, (heads * d,))
    out = np.empty_like(z)
    bad = _kda_decay(z, A_log, dt_bias.reshape(heads, d), lower_bound, out)
    if bad >= 0:
        raise NotFinite(f"kda_decay: e^A_log (z + dt_bias) of head {bad}, whose A_log is {A_log[bad]}, is not a finite number")
    return out


@njit(**INNER)
def _recall_rows(S, alpha, k, first, out):
    "out += (diag(alpha) S)^T k, key rows from `first` on, one after another."
    for i in range(first, k.size):
        a = alpha[i] * k[i]
        for j in range(out.size):
            out[j] = fma(a, S[i, j], out[j])


@njit(**INNER)
def _correct_rows(S, alpha, k, delta, q, first, out):
    "S = diag(alpha) S + k delta^T, out += S^T q, key rows from `first` on, one after another."
    for i in range(first, k.size):
        a, b, c = alpha[i], k[i], q[i]
        for j in range(out.size):
            s = fma(b, delta[j], a * S[i, j])
            S[i, j] = s
            out[j] = fma(c, s, out[j])


@njit(**INNER)
def _recall(S, alpha, k, out):
    "out += (diag(alpha) S)^T k, four key rows a pass."
    i = 0
    while i + 4 <= k.size:
        a0, a1, a2, a3 = alpha[i] * k[i], alpha[i + 1] * k[i + 1], alpha[i + 2] * k[i + 2], alpha[i + 3] * k[i + 3]
        for j in range(out.size):
            out[j] = fma(a3, S[i + 3, j], fma(a2, S[i + 2, j], fma(a1, S[i + 1, j], fma(a0, S[i, j], out[j]))))
        i += 4
    _recall_rows(S, alpha, k, i, out)


@njit(**INNER)
def _correct(S, alpha, k, delta, q, out):
    "S = diag(alpha) S + k delta^T, out += S^T q, four key rows a pass."
    i = 0
    while i + 4 <= k.size:
        a0, a1, a2, a3 = alpha[i], alpha[i + 1], alpha[i + 2], alpha[i + 3]
        b0, b1, b2, b3 = k[i], k[i + 1], k[i + 2], k[i + 3]
        c0, c1, c2, c3 = q[i], q[i + 1], q[i + 2], q[i + 3]
        for j in range(out.size):
            e = delta[j]
            s0, s1 = fma(b0, e, a0 * S[i, j]), fma(b1, e, a1 * S[i + 1, j])
            s2, s3 = fma(b2, e, a2 * S[i + 2, j]), fma(b3, e, a3 * S[i + 3, j])
            S[i, j], S[i + 1, j], S[i + 2, j], S[i + 3, j] = s0, s1, s2, s3
            out[j] = fma(c3, s3, fma(c2, s2, fma(c1, s1, fma(c0, s0, out[j]))))
        i += 4
    _correct_rows(S, alpha, k, delta, q, i, out)


@njit(**KERNEL)
def _kda_recurrent(heads, q, k, v, alpha, beta, S, query, delta, out, drawn):
    "Head after head, as drawn, all its tokens one after another; query and delta [heads, d] are scratch."
    scale = _ONE / np.sqrt(np.float32(query.shape[1]))
    while True:
        begin, end = next_chunk(drawn, heads)
        if begin >= heads:
            return
        for h in range(begin, end):
            for t in range(len(v)):
                o = out[t, h]
                for j in range(o.size):
                    o[j] = _ZERO
                _recall(S[h], alpha[t, h], k[t, h], o)
                for j in range(o.size):
                    delta[h, j] = beta[t, h] * (v[t, h, j] - o[j])
                    query[h, j] = scale * q[t, h, j]
                    o[j] = _ZERO
                _correct(S[h], alpha[t, h], k[t, h], delta[h], query[h], o)
        chunk_done(drawn, begin, end)


def kda_recurrent(q, k, v, alpha, beta, S):
    """Per head: S = diag(alpha) S; S += beta k (v - S^T k)^T; out = S^T q / sqrt(d). Returns out float32 [T, heads, d].

    `q`, `k` (both l2-normed), `v`, `alpha` float32 [T, heads, d], `beta` float32 [T, heads]; `S` float32
    [heads, key, value] is moved on past the last token.
    """
    T, heads, d = v.shape
    for name, array in (("q", q), ("k", k), ("alpha", alpha)):
        _fits(f"kda_recurrent: {name}", array, v.shape)
    _fits("kda_recurrent: beta", beta, (T, heads))
    _fits("kda_recurrent: S", S, (heads, d, d))
    query, delta = np.empty((2, heads, d), np.float32)
    out = np.empty_like(v)
    parallel_for(threads_for(2 * T * S.size), heads, _kda_recurrent, q, k, v, alpha, beta, S, query, delta, out)
    return out


@njit(**KERNEL)
def _squash(x):
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[t, i] = sigmoid(x[t, i])


def squash(x):
    "sigmoid of float32 [T, n], in place."
    _squash(x)
    return x


class KDAState(NamedTuple):
    "What a layer carries from token to token: `conv` float32 [3 (q, k, v), P, kernel-1], oldest first; `S` float32 [heads, key, value]."

    conv: np.ndarray
    S: np.ndarray


def kda_state(heads, head_dim, kernel):
    "The state before the first token: zeros."
    return KDAState(np.zeros((3, heads * head_dim, kernel - 1), np.float32), np.zeros((heads, head_dim, head_dim), np.float32))


KDA_ORDER = ("q_proj", "q_conv1d", "k_proj", "k_conv1d", "v_proj", "v_conv1d", "b_proj", "f_a_proj", "f_b_proj",
             "A_log", "dt_bias", "g_proj", "o_norm", "o_proj")


def kda_layer(W, x, state, eps, lower_bound):
    """One layer's attention, float32 [T, H], for normed input `x` float32 [T, H], T >= 1; moves `state` on by T tokens.

    `W` maps each name of KDA_ORDER to a matrix or a float32 array; each is taken once, in that order. Heads and widths
    are the state's. Any cut of the tokens into calls gives the same bits.
    """
    heads, d, _ = state.S.shape
    each_head = (len(x), heads, d)
    q, k, v = (short_conv(linear(W[f"{n}_proj"], x), W[f"{n}_conv1d"], state.conv[i]).reshape(each_head)
               for i, n in enumerate("qkv"))
    beta = squash(linear(W["b_proj"], x))
    low = linear(W["f_a_proj"], x)  # taken before f_b_proj: a streamed matrix goes by in order
    z = linear(W["f_b_proj"], low).reshape(each_head)
    alpha = kda_decay(z, W["A_log"], W["dt_bias"], lower_bound)
    o = kda_recurrent(l2norm(q), l2norm(k), v, alpha, beta, state.S)
    gate = squash(linear(W["g_proj"], x))
    normed = rms_norm(o.reshape(-1, d), W["o_norm"], eps).reshape(gate.shape)
    return linear(W["o_proj"], normed * gate)


__all__ = [
    "L2_EPS", "short_conv", "l2norm", "kda_decay", "kda_recurrent", "squash", "KDAState", "kda_state", "KDA_ORDER",
    "kda_layer",
]
