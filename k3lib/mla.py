"""3.1 Gated MLA: attention that caches 576 numbers

Made from book/03_mla/01_mla.py: edit that, then run `make export`.
"""

# built on simd 82ba8ef1cec4
# built on parallel b466791e900b
# built on matmul da409453befe
# built on functions 81a78568089f
import numpy as np
from numba import get_num_threads, njit
from k3lib.simd import INNER, KERNEL, fma16, load16, load16_part, splat16, store16
from k3lib.parallel import chunk_done, next_chunk, parallel_for, threads_for
from k3lib.matmul import check_product, fma4, line_aligned, linear, load4, row_dot, rows4, rows4_tokens4
from k3lib.functions import exp, rms_norm, sigmoid


TILE = 64  # cache rows between two looks at the maximum, counted from position 0


SLICE = 8  # tokens whose queries and contexts are held at once


_ONE, _ZERO, _LOWEST, _FAINT, _NAN = np.float32(1), np.float32(0), np.float32(-np.inf), np.float32(-60), np.float32(np.nan)


@njit(**INNER)
def _start(w, i, latent, x, nope, scale, row, o):
    """row[:width] = scale * [W_uk^T x[:nope] | x[nope:]], the key rows begin at w[i]. What follows from row[o] on, context,
    maximum and sum, is set to zero, -infinity and zero."""
    whole = latent - latent % 16
    for m in range(o, row.size):
        row[m] = _ZERO
    for n in range(nope):
        v, at = splat16(x[n]), i + n * latent
        for m in range(0, whole, 16):
            store16(row, o + m, fma16(load16(w, at + m), v, load16(row, o + m)))
        if whole < latent:
            store16(row, o + whole, fma16(load16_part(w, at + whole, latent - whole), v, load16(row, o + whole)))
    for m in range(latent):
        row[m], row[o + m] = scale * row[o + m], _ZERO
    for m in range(nope, x.size):
        row[latent + m - nope] = scale * x[m]
    row[row.size - 2] = _LOWEST


@njit(**INNER)
def _softmax_tile(s, m, l):
    """Scores s -> e^(s - new maximum), in place, 0 below e^-60. Returns (new maximum, new sum, what the past shrinks by).

    The sum is NaN if a score was not finite: of one that is -infinity a weight of 0 would be the only trace.
    """
    top, low = m, _ONE
    for p in range(s.size):
        top = max(top, s[p])
        low = min(low, s[p])
    for p in range(s.size):
        x = s[p] - top
        e = exp(x)
        s[p] = _ZERO if x < _FAINT else e
    shrink = _ZERO if m - top < _FAINT else exp(m - top)
    total = l * shrink
    for p in range(s.size):
        total += s[p]
    if low == _LOWEST:
        total = _NAN
    return top, total, shrink


@njit(**INNER)
def _context4(c, i, n, width, s, work, j, pitch):
    "32 lanes of four contexts, work[j + r*pitch:] += sum over n cache rows of s[r, p] * row p, positions in order."
    a, b = load4(work, j, pitch), load4(work, j + 16, pitch)
    for p in range(n):
        weights = splat16(s[0, p]), splat16(s[1, p]), splat16(s[2, p]), splat16(s[3, p])
        a = fma4(weights, load16(c, i + p * width), a)
        b = fma4(weights, load16(c, i + p * width + 16), b)
    for at, v in ((j, a), (j + 16, b)):
        store16(work, at, v[0])
        store16(work, at + pitch, v[1])
        store16(work, at + 2 * pitch, v[2])
        store16(work, at + 3 * pitch, v[3])


@njit(**INNER)
def _context1(c, i, width, weights, work, j, m, latent):
    "Lanes m..latent of one context, work[j:] += sum over cache rows of weights[p] * row p, positions in order."
    while m < latent:
        a = load16(work, j + m)
        for p in range(weights.size):
            at = i + p * width + m
            a = fma16(splat16(weights[p]), load16(c, at) if m + 16 <= latent else load16_part(c, at, latent - m), a)
        store16(work, j + m, a)
        m += 16


@njit(**INNER)
def _visit(c, start, pos, heads, width, latent, work, o, pitch, s, g, rows):
    """Queries g..g+rows, at most four, meet the tile of cache rows from `start`; maxima, sums and contexts move on.

    Query r is of the token at pos + r // heads and sees positions up to its own.
    """
    i, j = start * width, g * pitch
    common = max(0, min(TILE, pos + g // heads + 1 - start)) if rows == 4 else 0
    fours = common - common % 4
    paired = latent - latent % 32 if common else 0
    for p in range(0, fours, 4):
        rows4_tokens4(c, i + p * width, width, work, j, pitch, s, 0, p)
    for r in range(rows):
        n = max(0, min(TILE, pos + (g + r) // heads + 1 - start))
        for p in range(fours, n):
            s[r, p] = row_dot(c, i + p * width, work, j + r * pitch, width)
        if n:
            end = j + (r + 1) * pitch
            work[end - 2], work[end - 1], shrink = _softmax_tile(s[r, :n], work[end - 2], work[end - 1])
            if shrink != _ONE:
                for m in range(j + r * pitch + o, j + r * pitch + o + latent):
                    work[m] *= shrink
    for m in range(0, paired, 32):
        _context4(c, i + m, common, width, s, work, j + o + m, pitch)
    for r in range(rows):
        n = max(0, min(TILE, pos + (g + r) // heads + 1 - start))
        _context1(c, i + common * width, width, s[r, common:n], work, j + r * pitch + o, 0, paired)
        _context1(c, i, width, s[r, :n], work, j + r * pitch + o, paired, latent)


@njit(**INNER)
def _value(w, i, latent, work, j, total, out, t, first, v):
    "out[t, first:first+v] = W_uv work[j:] / total; the value rows begin at w[i]."
    whole = v - v % 4
    for n in range(0, whole, 4):
        rows4(w, i + n * latent, latent, work, j, out, t, first + n)
    for n in range(whole, v):
        out[t, first + n] = row_dot(w, i + n * latent, work, j, latent)
    for n in range(first, first + v):
        out[t, n] /= total


@njit(**KERNEL)
def _attend(items, span, kv_b, first, x, cache, pos, v, work, s, out, drawn):
    "Items of heads item*span .. (item+1)*span of the block, as drawn; work and s have scratch for each."
    latent, width, pitch = kv_b.shape[1], cache.shape[1], work.shape[2]
    nope, o = x.shape[2] - (width - latent), (width + 15) // 16 * 16
    each = nope + v
    scale = _ONE / np.sqrt(np.float32(x.shape[2]))
    w, c = kv_b.reshape(-1), cache.reshape(-1)
    while True:
        begin, end = next_chunk(drawn, items)
        if begin >= items:
            return
        for item in range(begin, end):
            h, flat = item * span, work[item].reshape(-1)
            heads = min(span, kv_b.shape[0] // each - h)
            for t in range(0, x.shape[0], SLICE):
                tokens = min(SLICE, x.shape[0] - t)
                rows = tokens * heads
                for r in range(rows):
                    head = h + r % heads
                    _start(w, head * each * latent, latent, x[t + r // heads, first + head], nope, scale, work[item, r], o)
                for start in range(0, pos + t + tokens, TILE):
                    for g in range(0, rows, 4):
                        _visit(c, start, pos + t, heads, width, latent, flat, o, pitch, s[item], g, min(4, rows - g))
                for r in range(rows):
                    head = h + r % heads
                    _value(w, (head * each + nope) * latent, latent, flat, r * pitch + o, flat[(r + 1) * pitch - 1],
                           out, t + r // heads, (first + head) * v, v)
        chunk_done(drawn, begin, end)


def attend(kv_b, q, cache, pos, v):
    """Causal attention on the latent cache, float32 [T, heads*v], of queries `q` float32 [T, heads, nope+rope] at pos .. pos+T-1.

    `kv_b` is the matrix kv_b_proj, per head its nope key rows, then its v value rows; it is taken once, in blocks of whole
    heads, by .blocks(), or by .share(work, threads) if it has readers that do the work on what they have read. `cache` float32
    [capacity, latent+rope] holds [c | r] of all positions up to pos+T-1. The bits of a head and token depend on nothing but
    that head, that token and the cache before it. Raises ValueError where shapes do not fit, NotFinite where a score or a value
    is infinite or NaN.
    """
    T, heads, d = q.shape
    latent, width = kv_b.shape[1], cache.shape[1]
    each = d - (width - latent) + v
    if kv_b.shape[0] != heads * each or not latent <= width <= latent + d or not 0 <= pos <= len(cache) - T:
        raise ValueError(f"attend: queries {q.shape} at position {pos}, cache {cache.shape}, kv_b_proj {kv_b.shape} and values of {v} do not fit")
    pitch = -(-width // 16) * 16 + -(-latent // 16) * 16 + 16
    out = np.empty((T, heads * v), np.float32)

    def some_heads(first, rows, threads=1):
        if len(rows) % each:
            raise ValueError(f"attend: a block of kv_b_proj has {len(rows)} rows, expected whole heads of {each}")
        here = len(rows) // each
        span = min(16, 4 * -(-here // (4 * threads)))
        items = -(-here // span)
        work, s = line_aligned((items, min(T, SLICE) * span, pitch)), line_aligned((items, 4, TILE))
        parallel_for(threads, items, _attend, span, rows, first // each, q, cache, pos, v, work, s, out)

    if hasattr(kv_b, "share"):
        kv_b.share(some_heads, get_num_threads())
    else:
        for first, rows in kv_b.blocks(each):
            some_heads(first, rows, threads_for(T * len(rows) * latent + 2 * T * len(rows) // each * (pos + T) * width))
    check_product(out, q, lambda r: (r // v * each, (r // v + 1) * each))
    return out


@njit(**KERNEL)
def _gate(o, g):
    for t in range(o.shape[0]):
        for i in range(o.shape[1]):
            o[t, i] *= sigmoid(g[t, i])


MLA_ORDER = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj", "o_proj")


def mla_layer(W, x, cache, pos, heads, nope, rope, v_dim, eps_latent=1e-6):
    """One layer's attention, float32 [T, H], for normed input `x` float32 [T, H] at positions pos .. pos+T-1, T >= 1.

    `W` maps each name of MLA_ORDER to a matrix or a float32 vector; each is taken once, in that order. `cache` float32
    [capacity, kv_lora+rope] holds the rows before `pos` and receives [normed latent | extra dims] of `x`. Any cut of the
    tokens into calls gives the same bits. `eps_latent` is the epsilon of the two latent norms.
    """
    T, latent = len(x), cache.shape[1] - rope
    if pos + T > len(cache):
        raise ValueError(f"mla_layer: positions {pos} to {pos + T - 1} do not fit a cache of {len(cache)}")
    low = rms_norm(linear(W["q_a_proj"], x), W["q_a_layernorm"], eps_latent)
    q = linear(W["q_b_proj"], low).reshape(T, heads, nope + rope)
    kv = linear(W["kv_a_proj_with_mqa"], x)
    cache[pos:pos + T, :latent] = rms_norm(np.ascontiguousarray(kv[:, :latent]), W["kv_a_layernorm"], eps_latent)
    cache[pos:pos + T, latent:] = kv[:, latent:]
    o = attend(W["kv_b_proj"], q, cache, pos, v_dim)
    _gate(o, linear(W["g_proj"], x))
    return linear(W["o_proj"], o)


__all__ = [
    "TILE", "SLICE", "attend", "MLA_ORDER", "mla_layer",
]
