"""3.1 Gated MLA: attention that caches 576 numbers

Made from book/03_mla/01_mla.py: edit that, then run `make export`.
"""

from typing import NamedTuple

import numpy as np

from k3lib.functions import exp, rms_norm, sigmoid
from k3lib.kda import LayerWeights
from k3lib.kernel_cache import inner, kernel
from k3lib.matmul import Matrix, check_product, line_aligned, linear, products
from k3lib.parallel import chunk_done, next_chunk, parallel_for, threads_for
from k3lib.simd import fma16, load16, load16_part, splat16, store16

_ONE, _ZERO, _NAN = np.float32(1), np.float32(0), np.float32(np.nan)
_LOWEST, _FAINT = np.float32(-np.inf), np.float32(-60)  # the maximum before any score; a weight below e^-60 counts as 0


CACHE_TILE = 64  # cache rows between two updates of the maximum, counted from position 0


class Item(NamedTuple):
    "An item: some heads, some tokens. Query r belongs to the token at position + r // heads and to head r % heads."

    cache: np.ndarray  # float32 [capacity, latent + rope]
    latent: int  # width of the latent, the first columns of a cache row
    position: int  # of the first token
    heads: int  # queries of each token
    work: np.ndarray  # float32 [queries, pitch]: absorbed query, then context, then (last two) maximum and sum
    context: int  # column of `work` at which the context begins
    scores: np.ndarray  # float32 [4, CACHE_TILE]: scratch


@inner
def _start(w, i, latent, x, nope, row, context):
    """row[:latent+rope] = [W_uk^T x[:nope] | x[nope:]] / sqrt(x.size). W_uk: the `nope` rows of kv_b from w[i] on.

    Sets the context, row[context:-2], to zero, the maximum to -infinity and the sum to zero.
    """
    scale = _ONE / np.sqrt(np.float32(x.size))
    whole = latent - latent % 16
    for m in range(context, row.size):
        row[m] = _ZERO
    for n in range(nope):
        at, v = i + n * latent, splat16(x[n])
        for m in range(0, whole, 16):
            store16(row, context + m, fma16(load16(w, at + m), v, load16(row, context + m)))
        if whole < latent:
            part = load16_part(w, at + whole, latent - whole)
            store16(row, context + whole, fma16(part, v, load16(row, context + whole)))
    for m in range(latent):
        row[m], row[context + m] = scale * row[context + m], _ZERO
    for m in range(nope, x.size):
        row[latent + m - nope] = scale * x[m]
    row[row.size - 2] = _LOWEST


@inner
def softmax_tile(s, m, l):
    """Replace the scores `s` float32 [n] by e^(s - new maximum), or by 0 where that is below e^-60.

    `m` and `l` are the maximum and the sum before this tile. Returns (new maximum, new sum, factor by which the context
    before this tile shrinks). The new sum is NaN if a score is -infinity or NaN.
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


@inner
def _load4(rows, i, m):
    "rows[i + r, m:m+16] for r = 0 .. 3."
    return load16(rows[i], m), load16(rows[i + 1], m), load16(rows[i + 2], m), load16(rows[i + 3], m)


@inner
def _store4(rows, i, m, v):
    "rows[i + r, m:m+16] = v[r] for r = 0 .. 3."
    store16(rows[i], m, v[0])
    store16(rows[i + 1], m, v[1])
    store16(rows[i + 2], m, v[2])
    store16(rows[i + 3], m, v[3])


@inner
def _fma4(a, v, acc):
    return fma16(a[0], v, acc[0]), fma16(a[1], v, acc[1]), fma16(a[2], v, acc[2]), fma16(a[3], v, acc[3])


@inner
def _context4(item, start, n, g, m):
    "Elements m .. m+32 of the contexts of queries g .. g+4: add weight times row for `n` cache rows from `start` on."
    cache, work, s, u = item.cache, item.work, item.scores, item.context + m
    a, b = _load4(work, g, u), _load4(work, g, u + 16)
    for p in range(n):
        row, weights = cache[start + p], (splat16(s[0, p]), splat16(s[1, p]), splat16(s[2, p]), splat16(s[3, p]))
        a = _fma4(weights, load16(row, m), a)
        b = _fma4(weights, load16(row, m + 16), b)
    _store4(work, g, u, a)
    _store4(work, g, u + 16, b)


@inner
def _context1(cache, start, weights, context, m, end):
    "Elements m .. end of one context: add weight times row for the cache rows from `start` on, one for each weight."
    while m < end:
        a = load16(context, m)
        for p in range(weights.size):
            row = cache[start + p]
            a = fma16(splat16(weights[p]), load16(row, m) if m + 16 <= end else load16_part(row, m, end - m), a)
        store16(context, m, a)
        m += 16


@inner
def _seen(item, r, start):
    "Number of rows that query r sees in the tile that begins at cache row `start`: those up to its own position."
    return max(0, min(CACHE_TILE, item.position + r // item.heads + 1 - start))


@inner
def _visit(item, start, g, count):
    """Let queries g .. g+count, at most four, attend to the tile that begins at cache row `start`.

    Computes their scores in item.scores and updates their maxima, sums and contexts in item.work.
    """
    cache, latent, work, s = item.cache, item.latent, item.work, item.scores
    common = _seen(item, g, start) if count == 4 else 0  # rows that all four queries see
    fours = common - common % 4
    paired = latent - latent % 32 if common else 0  # columns that _context4 adds, two vectors at a time
    for p in range(0, fours, 4):
        i = start + p
        products(cache, (i, i + 1, i + 2, i + 3), work, (g, g + 1, g + 2, g + 3), 0, s, (0, p))
    for r in range(count):
        n, row = _seen(item, g + r, start), work[g + r]
        for p in range(fours, n):
            products(cache, (start + p,), work, (g + r,), 0, s, (r, p))
        if n:
            m, l = row.size - 2, row.size - 1
            row[m], row[l], shrink = softmax_tile(s[r, :n], row[m], row[l])
            if shrink != _ONE:
                for i in range(item.context, item.context + latent):
                    row[i] *= shrink
    for m in range(0, paired, 32):
        _context4(item, start, common, g, m)
    for r in range(count):
        n, context = _seen(item, g + r, start), work[g + r, item.context:]
        _context1(cache, start + common, s[r, common:n], context, 0, paired)
        _context1(cache, start, s[r, :n], context, paired, latent)


class HeadBlock(NamedTuple):
    "What the kernel reads and writes for one row block of kv_b_proj. Threads share its items of `span` heads."

    kv_b: np.ndarray  # uint16 or float32 [rows, latent]: for each head its nope key rows, then its v_dim value rows
    first: int  # number of the block's first head
    span: int  # heads of an item
    q: np.ndarray  # float32 [T, heads, nope + rope]
    cache: np.ndarray  # float32 [capacity, latent + rope]
    position: int  # of the first token
    v_dim: int
    work: np.ndarray  # float32 [items, queries of an item, pitch]: scratch
    scores: np.ndarray  # float32 [items, 4, CACHE_TILE]: scratch
    out: np.ndarray  # float32 [T, heads * v_dim]: written


@inner
def _value(block, item, r, value_row, out, column):
    "out[column:column+v_dim] of query r's token = W_uv u / l; W_uv is the v_dim rows of kv_b from `value_row` on."
    kv_b, work, t, v = block.kv_b, item.work, r // item.heads, block.v_dim
    whole = v - v % 4
    for n in range(0, whole, 4):
        i = value_row + n
        products(kv_b, (i, i + 1, i + 2, i + 3), work, (r,), item.context, out, (t, column + n))
    for n in range(whole, v):
        products(kv_b, (value_row + n,), work, (r,), item.context, out, (t, column + n))
    total = work[r, work.shape[1] - 1]
    for n in range(column, column + v):
        out[t, n] /= total


TOKENS_AT_ONCE = 8  # tokens whose queries and contexts an item holds at once


@inner
def _attend_item(block, number, first_token):
    "Item `number` of the block: its heads attend for up to TOKENS_AT_ONCE tokens from `first_token` on."
    kv_b, q, v = block.kv_b, block.q, block.v_dim
    latent, width = kv_b.shape[1], block.cache.shape[1]
    nope, position = q.shape[2] - (width - latent), block.position + first_token
    each = nope + v
    h = number * block.span
    heads = min(block.span, kv_b.shape[0] // each - h)
    tokens = min(TOKENS_AT_ONCE, q.shape[0] - first_token)
    w, context = kv_b.reshape(-1), (width + 15) // 16 * 16
    item = Item(block.cache, latent, position, heads, block.work[number], context, block.scores[number])
    for r in range(tokens * heads):
        head, t = h + r % heads, first_token + r // heads
        _start(w, head * each * latent, latent, q[t, block.first + head], nope, item.work[r], context)
    for start in range(0, position + tokens, CACHE_TILE):
        for g in range(0, tokens * heads, 4):
            _visit(item, start, g, min(4, tokens * heads - g))
    out = block.out[first_token:]
    for r in range(tokens * heads):
        head = h + r % heads
        _value(block, item, r, head * each + nope, out, (block.first + head) * v)


@kernel
def _attend(items, block, cursor):
    while True:
        begin, end = next_chunk(cursor, items)
        if begin >= items:
            return
        for number in range(begin, end):
            for first_token in range(0, block.q.shape[0], TOKENS_AT_ONCE):
                _attend_item(block, number, first_token)
        chunk_done(cursor, begin, end)


def attend(kv_b: Matrix, q: np.ndarray, cache: np.ndarray, position: int, v_dim: int, threads: int) -> np.ndarray:
    """Causal attention on the latent cache, float32 [T, heads * v_dim].

    `q` float32 [T, heads, nope + rope]: the queries of the tokens at `position` .. position+T-1. `kv_b`: the matrix
    kv_b_proj [heads * (nope + v_dim), latent], for each head its nope key rows, then its v_dim value rows. Its
    map_blocks is called once, and every block must hold whole heads. `cache` float32 [capacity, latent + rope] holds
    [c | r] of all positions up to position+T-1.

    The bits of a head and token depend on that head, that token and the cache up to it, and on nothing else. Raises
    ValueError where shapes do not fit, NotFinite where a score or a value is infinite or NaN.
    """
    T, heads, d = q.shape
    latent, width = kv_b.shape[1], cache.shape[1]
    each = d - (width - latent) + v_dim
    if kv_b.shape[0] != heads * each or not latent <= width <= latent + d or not 0 <= position <= len(cache) - T:
        raise ValueError(f"attend: queries {q.shape} at position {position}, cache {cache.shape}, "
                         f"kv_b_proj {kv_b.shape} and values of width {v_dim} do not fit")
    pitch = -(-width // 16) * 16 + -(-latent // 16) * 16 + 16
    out = np.empty((T, heads * v_dim), np.float32)

    def work(first_row, rows, threads):
        if len(rows) % each:
            raise ValueError(f"attend: a block of kv_b_proj has {len(rows)} rows, expected whole heads of {each}")
        here = len(rows) // each
        threads = threads_for(T * len(rows) * latent + 2 * T * here * (position + T) * width, threads)
        span = min(16, 4 * -(-here // (4 * threads)))
        items = -(-here // span)
        scratch = line_aligned((items, min(T, TOKENS_AT_ONCE) * span, pitch)), line_aligned((items, 4, CACHE_TILE))
        block = HeadBlock(rows, first_row // each, span, q, cache, position, v_dim, *scratch, out)
        parallel_for(threads, items, _attend, block)

    kv_b.map_blocks(work, threads)
    check_product(out, q, lambda r: (r // v_dim * each, (r // v_dim + 1) * each))
    return out


LATENT_EPS = 1e-6  # epsilon of the two latent norms: the reference class's default, not the config's rms_norm_eps


class MLAShape(NamedTuple):
    "Sizes and constants of an MLA layer, the same in all MLA layers of a model."

    heads: int  # 96 in K3
    nope: int  # key numbers of each head's own, qk_nope_head_dim: 128
    rope: int  # extra key numbers that all heads share, qk_rope_head_dim: 64
    v_dim: int  # width of a head's value, v_head_dim: 128
    latent: int  # width of the latent, kv_lora_rank: 512
    latent_eps: float = LATENT_EPS  # of q_a_layernorm and kv_a_layernorm

    @property
    def cache_width(self) -> int:
        "float32 numbers that the cache holds of a position: latent + rope."
        return self.latent + self.rope


def mla_cache(shape: MLAShape, capacity: int) -> np.ndarray:
    "The latent KV cache of one layer before the first token: zeros, float32 [capacity, cache_width]."
    return np.zeros((capacity, shape.cache_width), np.float32)


@kernel
def _gate(o, g):
    "o *= sigmoid(g)."
    for t in range(o.shape[0]):
        for i in range(o.shape[1]):
            o[t, i] *= sigmoid(g[t, i])


def mla_layer(W: LayerWeights, x: np.ndarray, cache: np.ndarray, position: int, shape: MLAShape,
              threads: int) -> np.ndarray:
    """The attention of one layer for the T >= 1 tokens at `position` .. position+T-1, float32 [T, H].

    `x` float32 [T, H] is the layer's normed input. `W` has the short names that `tensors` lists for "mla"; each is
    taken once, in that order. `cache` float32 [capacity, latent + rope] holds the rows before `position`; the call
    writes [normed latent | extra dims] of `x` to the next T rows. The bits depend neither on how the
    tokens are cut into calls nor on `threads`. Raises ValueError where shapes do not fit, NotFinite where a number is
    infinite or NaN.
    """
    T, latent = len(x), shape.latent
    if position + T > len(cache):
        raise ValueError(f"mla_layer: positions {position} to {position + T - 1} do not fit a cache of {len(cache)}")
    low = rms_norm(linear(W["q_a_proj"], x, threads), W["q_a_layernorm"], shape.latent_eps)
    q = linear(W["q_b_proj"], low, threads).reshape(T, shape.heads, shape.nope + shape.rope)
    kv = linear(W["kv_a_proj_with_mqa"], x, threads)
    rows = cache[position:position + T]
    rows[:, :latent] = rms_norm(np.ascontiguousarray(kv[:, :latent]), W["kv_a_layernorm"], shape.latent_eps)
    rows[:, latent:] = kv[:, latent:]
    o = attend(W["kv_b_proj"], q, cache, position, shape.v_dim, threads)
    _gate(o, linear(W["g_proj"], x, threads))
    return linear(W["o_proj"], o, threads)


__all__ = [
    "CACHE_TILE", "Item", "softmax_tile", "HeadBlock", "TOKENS_AT_ONCE", "attend", "LATENT_EPS", "MLAShape",
    "mla_cache", "mla_layer",
]
