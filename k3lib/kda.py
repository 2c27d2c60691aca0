"""2.2 Kimi Delta Attention: a memory that never grows

Made from book/02_kda/02_kda.py: edit that, then run `make export`.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np

from k3lib.functions import exp, rms_norm, sigmoid
from k3lib.kernel_cache import inner, kernel
from k3lib.matmul import NotFinite, dot, linear
from k3lib.parallel import chunk_done, next_chunk, parallel_for, threads_for
from k3lib.simd import fma

_ONE, _ZERO = np.float32(1), np.float32(0)


def _check_shape(what, array, shape):
    "Raise ValueError unless `array` has `shape`."
    if array.shape != tuple(shape):
        raise ValueError(f"{what} has shape {array.shape}, expected {tuple(shape)}")


@kernel
def _short_conv(x, weight, state, out):
    T, channels = x.shape
    taps = weight.shape[2]
    for t in range(T):
        for c in range(channels):
            out[t, c] = _ZERO
        for j in range(taps):
            s = t + j - (taps - 1)
            if s >= 0:
                for c in range(channels):
                    out[t, c] = fma(weight[c, 0, j], x[s, c], out[t, c])
            else:
                for c in range(channels):
                    out[t, c] = fma(weight[c, 0, j], state[c, s + taps - 1], out[t, c])
        for c in range(channels):
            out[t, c] = out[t, c] * sigmoid(out[t, c])
    for c in range(channels):
        for j in range(taps - 1):
            s = T + j - (taps - 1)
            state[c, j] = x[s, c] if s >= 0 else state[c, T + j]


def short_conv(x: np.ndarray, weight: np.ndarray, state: np.ndarray) -> np.ndarray:
    """silu(causal depthwise convolution of `x`), float32 [T, P].

    `x` float32 [T, P]; `weight` float32 [P, 1, taps], oldest tap first. `state` float32 [P, taps-1]
    holds the inputs before x[0], oldest first. The call replaces them by the last taps-1 inputs up to x[T-1].
    Raises ValueError where shapes do not fit.
    """
    P, _, taps = weight.shape
    _check_shape("short_conv: x", x, (len(x), P))
    _check_shape("short_conv: state", state, (P, taps - 1))
    out = np.empty_like(x)
    _short_conv(x, weight, state, out)
    return out


L2_EPS = np.float32(1e-6)  # added to the sum of squares, not to the mean of squares


@kernel
def _l2norm(x, out):
    "Write the normed heads to `out`; return the flat index of the first head whose sum is not finite, or -1."
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            squares = dot(x[t, h], x[t, h])
            if not squares < np.inf:
                return t * x.shape[1] + h
            scale = _ONE / np.sqrt(squares + L2_EPS)
            for i in range(x.shape[2]):
                out[t, h, i] = x[t, h, i] * scale
    return -1


def l2norm(x: np.ndarray) -> np.ndarray:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, float32 [T, heads, d], of `x` float32 [T, heads, d].

    Raises NotFinite where a sum is infinite or NaN.
    """
    out = np.empty_like(x)
    bad = _l2norm(x, out)
    if bad >= 0:
        raise NotFinite(f"l2norm: the sum of squares of head {bad % x.shape[1]} is not a finite number")
    return out


@kernel
def _kda_decay(z, A_log, dt_bias, lower_bound, out):
    "Write alpha to `out`; return the first head at which the sigmoid's argument is not finite, or -1."
    low = np.float32(lower_bound)
    for t in range(z.shape[0]):
        for h in range(z.shape[1]):
            rate = exp(A_log[h])
            for i in range(z.shape[2]):
                x = rate * (z[t, h, i] + dt_bias[h, i])
                if not abs(x) < np.inf:  # the sigmoid of infinity is an ordinary 0 or 1: check before it
                    return h
                out[t, h, i] = exp(low * sigmoid(x))
    return -1


def kda_decay(z: np.ndarray, A_log: np.ndarray, dt_bias: np.ndarray, lower_bound: float) -> np.ndarray:
    """alpha = exp(lower_bound * sigmoid(exp(A_log[head]) * (z + dt_bias))), float32 [T, heads, d].

    alpha lies between e^lower_bound and 1. `z` float32 [T, heads, d]; `dt_bias` float32 [heads*d]; `A_log` float32
    [heads or more] has one entry for each head; the entries after those are padding that is never read.
    Raises ValueError where shapes do not fit, NotFinite where the sigmoid's argument is infinite or NaN.
    """
    T, heads, d = z.shape
    if len(A_log) < heads:
        raise ValueError(f"kda_decay: A_log has {len(A_log)} entries, expected one for each of {heads} heads")
    _check_shape("kda_decay: dt_bias", dt_bias, (heads * d,))
    out = np.empty_like(z)
    bad = _kda_decay(z, A_log, dt_bias.reshape(heads, d), lower_bound, out)
    if bad >= 0:
        raise NotFinite(f"kda_decay: e^A_log (z + dt_bias) of head {bad}, whose A_log is {A_log[bad]}, "
                        "is not a finite number")
    return out


@inner
def _recall_rows(S, alpha, k, first, out):
    "out += (diag(alpha) S)^T k over the key rows from `first` on, one row at a time."
    for i in range(first, k.size):
        a = alpha[i] * k[i]
        for j in range(out.size):
            out[j] = fma(a, S[i, j], out[j])


@inner
def _correct_rows(S, alpha, k, delta, q, first, out):
    "S = diag(alpha) S + k delta^T, then out += S^T q, over the key rows from `first` on, one row at a time."
    for i in range(first, k.size):
        a, b, c = alpha[i], k[i], q[i]
        for j in range(out.size):
            s = fma(b, delta[j], a * S[i, j])
            S[i, j] = s
            out[j] = fma(c, s, out[j])


class Recurrence(NamedTuple):
    "The arrays of the recurrence's kernel, all float32. d is the width of a head."

    q: np.ndarray  # [T, heads, d], of length 1
    k: np.ndarray  # [T, heads, d], of length 1
    v: np.ndarray  # [T, heads, d]
    alpha: np.ndarray  # [T, heads, d]
    beta: np.ndarray  # [T, heads]
    S: np.ndarray  # [heads, key, value]: the state, updated in place
    query: np.ndarray  # [heads, d]: scratch, q / sqrt(d)
    delta: np.ndarray  # [heads, d]: scratch, beta (v - S^T k)
    out: np.ndarray  # [T, heads, d]: written


@inner
def _recall(S, alpha, k, out):
    "out += (diag(alpha) S)^T k, four key rows at a time."
    i = 0
    while i + 4 <= k.size:
        a0, a1 = alpha[i] * k[i], alpha[i + 1] * k[i + 1]
        a2, a3 = alpha[i + 2] * k[i + 2], alpha[i + 3] * k[i + 3]
        for j in range(out.size):
            out[j] = fma(a3, S[i + 3, j], fma(a2, S[i + 2, j], fma(a1, S[i + 1, j], fma(a0, S[i, j], out[j]))))
        i += 4
    _recall_rows(S, alpha, k, i, out)


@inner
def _correct(S, alpha, k, delta, q, out):
    "S = diag(alpha) S + k delta^T, then out += S^T q, four key rows at a time."
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


@kernel
def _kda_recurrent(heads, arrays, cursor):
    "For each head of a chunk: all its tokens, one after another. `arrays` is a Recurrence."
    q, k, v, alpha, beta, S, query, delta, out = arrays
    scale = _ONE / np.sqrt(np.float32(query.shape[1]))
    while True:
        begin, end = next_chunk(cursor, heads)
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
        chunk_done(cursor, begin, end)


def kda_recurrent(q: np.ndarray, k: np.ndarray, v: np.ndarray, alpha: np.ndarray, beta: np.ndarray,
                  S: np.ndarray, threads: int) -> np.ndarray:
    """For each head and token: S = diag(alpha) S; S += beta k (v - S^T k)^T; out = S^T q / sqrt(d).

    `q` and `k` (both l2-normed), `v` and `alpha` float32 [T, heads, d]; `beta` float32 [T, heads]. `S` float32
    [heads, key, value] is the state before the first token and, after the call, the state after the last.
    Returns `out` float32 [T, heads, d]. Raises ValueError where shapes do not fit.
    """
    T, heads, d = v.shape
    for name, array in (("q", q), ("k", k), ("alpha", alpha)):
        _check_shape(f"kda_recurrent: {name}", array, v.shape)
    _check_shape("kda_recurrent: beta", beta, (T, heads))
    _check_shape("kda_recurrent: S", S, (heads, d, d))
    query, delta = np.empty((2, heads, d), np.float32)
    arrays = Recurrence(q, k, v, alpha, beta, S, query, delta, np.empty_like(v))
    parallel_for(threads_for(2 * T * S.size, threads), heads, _kda_recurrent, arrays)
    return arrays.out


@kernel
def _sigmoid_in_place(x):
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[t, i] = sigmoid(x[t, i])


def sigmoid_in_place(x: np.ndarray) -> np.ndarray:
    "Replace every number of `x` float32 [T, n] by its sigmoid. Returns `x`."
    _sigmoid_in_place(x)
    return x


class KDAShape(NamedTuple):
    "Sizes and constants of a KDA layer, the same in all KDA layers of a model."

    heads: int  # 96 in K3
    head_dim: int  # width of a head's query, key and value: 128
    conv_kernel: int  # taps of the short convolution: 4
    lower_bound: float  # of log alpha, the config's gate_lower_bound: -5
    eps: float  # of the norm before the output gate, the config's rms_norm_eps: 1e-5


class KDAState(NamedTuple):
    "What a layer carries from one token to the next. P = heads * head_dim."

    conv: np.ndarray  # float32 [3, P, conv_kernel - 1]: the last inputs of the convolutions of q, k and v, oldest first
    S: np.ndarray  # float32 [heads, key, value]


def kda_state(shape: KDAShape) -> KDAState:
    "The state before the first token: zeros."
    heads, d, taps = shape[:3]
    return KDAState(np.zeros((3, heads * d, taps - 1), np.float32), np.zeros((heads, d, d), np.float32))


class LayerWeights(Protocol):
    "The weights of one layer: W[short name] is a matmul.Matrix or a float32 array."

    def __getitem__(self, name: str, /) -> Any: ...


def kda_layer(W: LayerWeights, x: np.ndarray, state: KDAState, shape: KDAShape, threads: int) -> np.ndarray:
    """The attention of one layer for T >= 1 tokens, float32 [T, H].

    `x` float32 [T, H] is the layer's normed input. `W` has the short names that `tensors` lists for "kda"; each is
    taken once, in that order. `state` is advanced by T tokens. The bits depend neither on how the tokens are cut into
    calls nor on `threads`. Raises ValueError where shapes do not fit, NotFinite where a number is infinite or NaN.
    """
    by_head = (len(x), shape.heads, shape.head_dim)
    q, k, v = (short_conv(linear(W[f"{n}_proj"], x, threads), W[f"{n}_conv1d"], state.conv[i]).reshape(by_head)
               for i, n in enumerate("qkv"))
    beta = sigmoid_in_place(linear(W["b_proj"], x, threads))
    low = linear(W["f_a_proj"], x, threads)  # a line of its own, so that f_a_proj is used before f_b_proj is taken
    z = linear(W["f_b_proj"], low, threads).reshape(by_head)
    alpha = kda_decay(z, W["A_log"], W["dt_bias"], shape.lower_bound)
    o = kda_recurrent(l2norm(q), l2norm(k), v, alpha, beta, state.S, threads)
    gate = sigmoid_in_place(linear(W["g_proj"], x, threads))
    normed = rms_norm(o.reshape(-1, shape.head_dim), W["o_norm"], shape.eps).reshape(gate.shape)
    return linear(W["o_proj"], normed * gate, threads)


__all__ = [
    "short_conv", "L2_EPS", "l2norm", "kda_decay", "Recurrence", "kda_recurrent", "sigmoid_in_place", "KDAShape",
    "KDAState", "kda_state", "LayerWeights", "kda_layer",
]
