"""3.1 Gated MLA on a latent cache

Made from book/03_mla/01_mla.py: edit that, then run `make export`.
"""
# built on linear a03a069750fc
# built on mxfp4 daee53fa54cb

import numpy as np
from numba import njit, prange

from k3lib.linear import KERNEL, _dot, _matmul, exp, linear, rms_norm, sigmoid
from k3lib.mxfp4 import fma, fma16, load16, load16_part, splat16, store16, zeros16

SCORES = 2_500_000  # float32 scores held at a time: 10 MB, whatever the context and the chunk
MLA_ORDER = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj", "o_proj")


@njit(parallel=True, **KERNEL)
def _queries(w, q, first, heads, nope, rope, rank, scale, row, out):
    "out[t * heads + h] = scale * [W_uk^T q_nope | q_rope] for the heads of one block; `row` is scratch."
    T = q.shape[0]
    flat = w.reshape(-1)
    per_head = w.shape[0] // heads
    whole = rank - rank % 16
    for h in prange(heads):
        acc = row[h]
        for t in range(T):
            for i in range(acc.size):
                acc[i] = np.float32(0)
            for k in range(nope):
                qk = splat16(q[t, first + h, k])
                base = (h * per_head + k) * rank
                for i in range(0, whole, 16):
                    store16(acc, i, fma16(qk, load16(flat, base + i), load16(acc, i)))
                if whole < rank:
                    store16(acc, whole, fma16(qk, load16_part(flat, base + whole, rank - whole), load16(acc, whole)))
            for i in range(rank):
                out[t * heads + h, i] = scale * acc[i]
            for i in range(rope):
                out[t * heads + h, rank + i] = scale * q[t, first + h, nope + i]


@njit(parallel=True, **KERNEL)
def _softmax(scores, heads, first):
    "Rows of token t become probabilities over positions 0 .. first + t, in place."
    for m in prange(scores.shape[0]):
        row = scores[m]
        n = first + m // heads + 1
        top = row[0]
        for i in range(1, n):
            top = max(top, row[i])
        for i in range(n):
            row[i] = exp(row[i] - top)
        total = np.float32(0)
        for i in range(n):
            total += row[i]
        inverse = np.float32(1) / total
        for i in range(n):
            row[i] *= inverse


@njit(parallel=True, **KERNEL)
def _context(scores, cache, heads, first, rank, out):
    "out[m] = sum over positions, in order, of scores[m, p] * cache[p, :rank]. Heads of one token, four at a time, share a cache row."
    tiles = (heads + 3) // 4
    T = scores.shape[0] // heads
    D = cache.shape[1]
    flat = cache.reshape(-1)
    dst = out.reshape(-1)
    R = out.shape[1]
    for tile in prange(T * tiles):
        t, h = tile // tiles, (tile % tiles) * 4
        n = first + t + 1
        m = t * heads + h
        count = min(4, heads - h)
        m1, m2, m3 = m + min(1, count - 1), m + min(2, count - 1), m + min(3, count - 1)
        for i in range(0, rank, 16):
            a = b = c = d = zeros16()
            if i + 16 <= rank:
                for p in range(n):
                    v = load16(flat, p * D + i)
                    a = fma16(splat16(scores[m, p]), v, a)
                    b = fma16(splat16(scores[m1, p]), v, b)
                    c = fma16(splat16(scores[m2, p]), v, c)
                    d = fma16(splat16(scores[m3, p]), v, d)
            else:
                for p in range(n):
                    v = load16_part(flat, p * D + i, rank - i)
                    a = fma16(splat16(scores[m, p]), v, a)
                    b = fma16(splat16(scores[m1, p]), v, b)
                    c = fma16(splat16(scores[m2, p]), v, c)
                    d = fma16(splat16(scores[m3, p]), v, d)
            store16(dst, m * R + i, a)
            store16(dst, m1 * R + i, b)
            store16(dst, m2 * R + i, c)
            store16(dst, m3 * R + i, d)


@njit(parallel=True, **KERNEL)
def _values(w, context, first, heads, nope, v_dim, rank, out):
    "out[t, first + h] = W_uv context, for the heads of one block."
    flat, ctx = w.reshape(-1), context.reshape(-1)
    per_head, R = nope + v_dim, context.shape[1]
    for h in prange(heads):
        for j in range(v_dim):
            for t in range(out.shape[0]):
                out[t, first + h, j] = _dot(flat, (h * per_head + nope + j) * rank, ctx, (t * heads + h) * R, rank)


@njit(**KERNEL)
def _gate(o, g):
    for t in range(o.shape[0]):
        for i in range(o.shape[1]):
            o[t, i] *= sigmoid(g[t, i])


def mla_layer(W, x, cache, pos, heads, nope, rope, v_dim, eps_latent=1e-6):
    """One layer's attention, float32 [T, H], for normed input `x` float32 [T, H] at positions pos .. pos + T - 1.

    `cache` float32 [capacity, kv_lora + rope] holds a normed latent and the shared extra dims of every position before `pos`
    and receives those of `x`. `W` maps each name of MLA_ORDER to a matrix or a float32 vector; each is taken once, in that
    order. Query and value are mapped through kv_b_proj a block of whole heads at a time, so no head's keys or values are ever
    expanded over positions. Any cut of the tokens into calls gives the same bits. `eps_latent`: of the two latent norms.
    """
    T, rank = len(x), cache.shape[1] - rope
    q = rms_norm(linear(W["q_a_proj"], x), W["q_a_layernorm"], eps_latent)
    q = linear(W["q_b_proj"], q).reshape(T, heads, nope + rope)
    kv = linear(W["kv_a_proj_with_mqa"], x)
    cache[pos:pos + T, :rank] = rms_norm(np.ascontiguousarray(kv[:, :rank]), W["kv_a_layernorm"], eps_latent)
    cache[pos:pos + T, rank:] = kv[:, rank:]
    past, n = cache[:pos + T], pos + T
    scale = np.float32((nope + rope) ** -0.5)
    o = np.empty((T, heads, v_dim), np.float32)
    per_head = nope + v_dim
    group = max(1, SCORES // (T * n))
    for row, block in W["kv_b_proj"].blocks(multiple=per_head):
        for h in range(row // per_head, (row + len(block)) // per_head, group):
            m = min(group, (row + len(block)) // per_head - h)
            w = block[h * per_head - row:(h + m) * per_head - row]
            queries = np.empty((T * m, rank + rope), np.float32)
            _queries(w, q, h, m, nope, rope, rank, scale, np.empty((m, -(-rank // 16) * 16), np.float32), queries)
            scores = np.empty((T * m, n), np.float32)
            _matmul(past, queries, scores, 0)
            _softmax(scores, m, pos)
            context = np.empty((T * m, -(-rank // 16) * 16), np.float32)
            _context(scores, past, m, pos, rank, context)
            _values(w, context, h, m, nope, v_dim, rank, o)
    o = o.reshape(T, -1)
    _gate(o, linear(W["g_proj"], x))
    return linear(W["o_proj"], o)


__all__ = ['SCORES', 'MLA_ORDER', 'mla_layer']
