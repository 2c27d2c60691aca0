# %% [markdown]
# # 3.1 Gated MLA: attention that caches 576 numbers
#
# In 24 of K3's 93 layers every token looks back at every earlier one. In most models such a layer keeps 96 keys and 96
# values of each token. MLA (multi-head latent attention) keeps one vector of 576 numbers, from which all of them
# follow. At the end you can attend straight from that cache, token by token or in chunks with the same bits, and you
# have seen six wrong layers fail.
#
# > **Without it:** keys and values of 24 layers take 2.37 MB a token,<!--claim expanded--> and
# > 2,365 GB<!--claim expanded million--> after a million tokens.
# >
# > **With it:** 55.3 kB a token,<!--claim latent--> and 55 GB<!--claim latent million--> after a million.
#
# Needs [2.1.1] (softmax attention) and chapters [1.5] and [1.6] (products, exp and norm with fixed bits). Runs in half
# a minute. Makes `k3lib.mla`.
#
# [2.2 Kimi Delta Attention: a memory that never grows](../02_kda/02_kda.ipynb) ·
# [contents](../README.md) ·
# [3.2 Block attention residuals: a layer chooses its depth](02_residual.ipynb)
#
# [2.1.1]: ../02_kda/01_delta_rule.ipynb#2.1.1-Softmax-attention-keeps-every-pair
# [1.5]: ../01_mxfp4/05_matmul.ipynb
# [1.6]: ../01_mxfp4/06_functions.ipynb

# %%
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from k3lib.config import read_config
from k3lib.matmul import ResidentMatrix, bf16_to_float32, dot
from k3lib.parallel import CORES

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

K3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model
schematics.where(K3, "mla")

# %% [markdown]
# | symbol | meaning | shape in K3 | in code |
# |---|---|---|---|
# | $x$ | input of the layer for one token, mixed and normed | 7168 | `x` |
# | $t$, $i$ | position of the token that reads, and of one that is read, $i \le t$ | | `t`, `p` |
# | $c$ | latent of a position: low rank, normed, cached | 512 (`kv_lora_rank`) | `cache[p, :512]` |
# | $r$ | extra key numbers of a position, shared by all heads, cached | 64 (`qk_rope_head_dim`) | `cache[p, 512:]` |
# | $q = [\,q^n \mid q^r\,]$ | a head's query in two parts: one meets $c$, one meets $r$ | 96 heads × (128 + 64) | `q[t, h]` |
# | $k, v$ | a head's key and value of a position | 192, 128 | never stored |
# | $W_{uk}, W_{uv}$ | a head's key rows and value rows of `kv_b_proj` | 128 × 512 each | `w` |
# | $s_i$ | score: how well the query fits position $i$ | one a position and head | `s` |
# | $a_i$ | weight of position $i$: the softmax of the scores | one a position and head | `s`, after the softmax |
# | $\bar c = \sum_i a_i c_i$ | context: the average latent | 96 × 512 | context part of `work` |
# | $\mu, Z$ | largest score so far, sum of the weights so far ([3.1.4]) | one a head | `m`, `l` |
# | $o$, $y$ | output of a head; of the layer | 96 × 128; 7168 | `out`, `y` |
# | $W_g, W_o$ | gate; back to the width of the stream | 12288 × 7168; 7168 × 12288 | `W["g_proj"]`, `W["o_proj"]` |
#
# The extra numbers $r$ are named after RoPE, the rotation by position that other models apply to them. K3 applies none
# (`mla_use_nope` is true): they are plain numbers. Equations: the published modelling code, and the DeepSeek-V2 report
# (section 2.1) for the latent form.
#
# [3.1.4]: #3.1.4-Softmax-in-one-pass

# %% tags=["export"]
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

# %% tags=["parameters"]
seed = 3
timed_positions = 1024  # of the versions timed in 3.1.8
full_positions = 4096  # of the full-width timing in 3.1.9

# %% [markdown]
# ## 3.1.1 By hand: two positions, one head
#
# The latent has width 2; a key has three numbers from it and one extra; a value has two. The scale is
# $(3+1)^{-1/2} = ½$.
#
# $$W_{uk} = \begin{pmatrix}1&0\\0&1\\1&1\end{pmatrix},\quad W_{uv} = \begin{pmatrix}4&0\\0&8\end{pmatrix},\quad
# q^n = (2,0,1),\quad q^r = 2 - 2\ln 3$$
#
# | position | $c$ | $r$ | key $W_{uk}c$ | $s = ½(q^n\cdot W_{uk}c + q^r r)$ | $a$ | value $W_{uv}c$ |
# |---|---|---|---|---|---|---|
# | 0 | (1, 0) | 0 | (1, 0, 1) | 1.5 | ¾ | (4, 0) |
# | 1 | (0, 1) | 1 | (0, 1, 1) | 1.5 − ln 3 | ¼ | (0, 8) |
#
# The output is $¾(4,0) + ¼(0,8) = (3, 2)$. Now without keys and values: $W_{uk}^\top q^n = (3,1)$, whose products with
# $c$ are the same 3 and 1. The context is $\bar c = ¾(1,0)+¼(0,1)$, and $W_{uv}\, \bar c = (3, 2)$.

# %%
W_uk, W_uv = np.array([[1., 0], [0, 1], [1, 1]]), np.array([[4., 0], [0, 8]])
c, r = np.eye(2), np.array([0., 1])
q_n, q_r = np.array([2., 0, 1]), 2 - 2 * np.log(3)


def softmax64(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


expanded = softmax64(.5 * (c @ W_uk.T @ q_n + r * q_r)) @ (c @ W_uv.T)
absorbed = W_uv @ (softmax64(.5 * (c @ (W_uk.T @ q_n) + r * q_r)) @ c)
print("keys and values:", expanded.round(6), "  latents only:", absorbed.round(6))
assert np.allclose(expanded, [3, 2]) and np.allclose(absorbed, [3, 2])


# %% [markdown]
# ## 3.1.2 The layer as published, in float64
#
# Why a latent? The keys and values of 96 heads are 24,576 numbers, and all are linear functions of the same $x$
# of 7168. A trained model does not need 24,576 independent ones. So $x$ is first projected to a latent $c$ of 512
# numbers, and a second matrix, `kv_b_proj`, makes all keys and values from $c$. The two matrices together are one
# matrix of rank 512: what does not pass through the 512 numbers, no head can see. Queries take such a path, too, with
# 1536 numbers in the middle, which saves weights.
#
# $$q = W_b^q\,\mathrm{norm}(W_a^q x),\qquad [\,\tilde c \mid r\,] = W_a^{kv} x,\qquad c = \mathrm{norm}(\tilde c)$$
# $$k = [\,W_{uk}\, c \mid r\,],\qquad v = W_{uv}\, c$$
# $$s_i = \tfrac{1}{\sqrt{128+64}}\; q \cdot k_i,\qquad a = \mathrm{softmax}_{i \le t}(s),\qquad
# o = \sum_{i \le t} a_i v_i,
# \qquad y = W_o\,(o \odot \sigma(W_g x))$$
#
# The second and third line hold for each head. `kv_b_proj` has, head after head, 128 key rows and then 128 value rows.
# Only $\tilde c$ is normed; $r$ is used as it comes. The gate $\sigma(W_g x)$ multiplies each number of the output.
#
# The function below takes its questionable parts as arguments, so that [3.1.7] can get each of them wrong.
#
# [3.1.7]: #3.1.7-Six-wrong-layers

# %%
def rms64(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid64(x):
    return 1 / (1 + np.exp(-x))


def attention64(q, k, v, scale):
    "(output, weights [heads, T, T]) of causal attention, float64, for q and k [T, heads, d], v [T, heads, v]."
    s = np.einsum("thd,phd->htp", q, k) * scale
    weights = softmax64(np.where(np.tri(len(q), dtype=bool), s, -np.inf))
    return np.einsum("htp,phv->thv", weights, v), weights


def mla64(W, x, *, heads, nope, rope, v_dim, eps=1e-6, scale_dims=None, extra=lambda a: a, value_first=False,
          gated=True):
    """The layer by expansion. `eps`, `scale_dims`, `extra` (what happens to the extra dims), `value_first` and `gated`
    are arguments so that they can be got wrong."""
    T, latent = len(x), W["kv_b_proj"].shape[1]
    W, x = {name: w.astype(np.float64) for name, w in W.items()}, x.astype(np.float64)
    q = (rms64(x @ W["q_a_proj"].T, W["q_a_layernorm"], eps) @ W["q_b_proj"].T).reshape(T, heads, nope + rope)
    kv = x @ W["kv_a_proj_with_mqa"].T
    c = rms64(kv[:, :latent], W["kv_a_layernorm"], eps)
    r = np.broadcast_to(kv[:, None, latent:], (T, heads, rope))
    kv_b = (c @ W["kv_b_proj"].T).reshape(T, heads, nope + v_dim)
    k, v = (kv_b[..., v_dim:], kv_b[..., :v_dim]) if value_first else (kv_b[..., :nope], kv_b[..., nope:])
    q, k = (np.concatenate([a, extra(b)], -1) for a, b in ((q[..., :nope], q[..., nope:]), (k, r)))
    o = attention64(q, k, v, (scale_dims or nope + rope) ** -.5)[0].reshape(T, -1)
    return (o * sigmoid64(x @ W["g_proj"].T) if gated else o) @ W["o_proj"].T


# %% [markdown]
# `fixtures/ops/mla` was computed by PyTorch's own attention in float64: three heads, 12 + 4 numbers in a key, 10 in a
# value, a latent of 16. It has nine tokens at once, then three one at a time. The gate allows 1e-5 of the largest
# output; float32 itself stays within a tenth of that.

# %%
fixture = load_file(ROOT / "fixtures/ops/mla.safetensors")
names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj",
         "o_proj")
weights = {name: fixture[name] for name in names}
dims = dict(heads=3, nope=12, rope=4, v_dim=10)
x, truth = fixture["x"], np.concatenate([fixture["y_prefill"], fixture["y_steps"]])
TOLERANCE = 1e-5


def off(y, expected=truth):
    "Largest difference over the largest expected magnitude."
    return np.abs(y - expected.astype(np.float64)).max() / np.abs(expected).max()


def gate(name, y):
    far = off(y)
    assert far < TOLERANCE, f"{name}: {far:.2g} of the largest, allowed {TOLERANCE}"
    print(f"{name}: within {TOLERANCE} of the fixture")


gate("reference", mla64(weights, x, **dims))

# %% [markdown]
# ## 3.1.3 Absorb: move the matrix to the other side
#
# The cache could hold keys and values, 24,640 numbers a token and layer.<!--claim numbers--> It could hold $c$ and $r$,
# 576 numbers, and compute all keys and values again for every new token. There is a third way, which computes them
# never.
#
# **Scores.** A product does not care where the brackets stand:
#
# $$q^n \cdot (W_{uk}\, c_i) = (q^n)^\top W_{uk}\, c_i = (W_{uk}^\top q^n) \cdot c_i$$
#
# At the left, a matrix acts on each of the cached positions. At the right, it acts on the query, once. The result has
# 512 numbers, and its product with $c_i$ is the score. The part of the extra numbers, $q^r \cdot r_i$, is added as
# before.
#
# **Outputs.** The matrix is the same for all positions, so it can be taken out of the sum:
#
# $$o = \sum_i a_i\,(W_{uv}\, c_i) = W_{uv} \sum_i a_i\, c_i = W_{uv}\, \bar c$$
#
# The average is taken in the latent, and one product makes the output from it. No key and no value is ever formed. The
# matrices have been *absorbed* into the query and into the output.
#
# **When it fails.** Both steps need that nothing stands between $c_i$ and the matrix, and that the matrix is the same
# for all positions. RoPE rotates keys by an angle that depends on the position. Between query $t$ and key $i$ would
# then stand a rotation $R_{t-i}$, and the absorbed query $W_{uk}^\top R_{t-i}^\top q^n$ would be another one for every
# position. Models with RoPE therefore rotate only the extra numbers $r$, which are outside of the latent. K3 has these
# 64 numbers and rotates nothing.

# %%
schematics.mla(K3)


# %%
def absorbed64(kv_b, q, cache, pos, v_dim):
    "Attention from cache rows [c | r] alone, float64 [T, heads, v]; q [T, heads, nope+rope], the first token at `pos`."
    T, heads, d = q.shape
    latent = kv_b.shape[1]
    nope = d - (cache.shape[1] - latent)
    w = kv_b.reshape(heads, nope + v_dim, latent).astype(np.float64)
    rows, q = cache[:pos + T].astype(np.float64), q.astype(np.float64)
    queries = np.concatenate([np.einsum("thn,hnl->thl", q[..., :nope], w[:, :nope]), q[..., nope:]], -1)
    s = np.einsum("thd,pd->htp", queries, rows) * d ** -.5
    seen = np.arange(pos + T) <= pos + np.arange(T)[:, None]
    context = np.einsum("htp,pl->htl", softmax64(np.where(seen, s, -np.inf)), rows[:, :latent])
    return np.einsum("htl,hvl->thv", context, w[:, nope:])


rng = np.random.default_rng(seed)
some_q, some_cache, some_w = rng.normal(size=(5, 3, 16)), rng.normal(size=(12, 20)), rng.normal(size=(66, 16))
kv = (some_cache[:, :16] @ some_w.T).reshape(12, 3, 22)
keys = np.concatenate([kv[..., :12], np.broadcast_to(some_cache[:, None, 16:], (12, 3, 4))], -1)
whole_q = np.concatenate([np.zeros((7, 3, 16)), some_q])
expanded = attention64(whole_q, keys, kv[..., 12:], 16 ** -.5)[0][7:]
same = off(absorbed64(some_w, some_q, some_cache, 7, 10), expanded) < 1e-12
print("absorbed equals expanded to 1e-12:", same)
assert same

# %% [markdown]
# What it buys, and what it costs, for K3's shape in float32. Memory falls 43 times.<!--claim memory--> Arithmetic per
# position and head rises 3.4 times,<!--claim arithmetic--> because keys of 192 numbers and values of 128 become 576 and
# 512.

# %%
heads, nope, rope, v_dim, latent, layers = 96, 128, 64, 128, 512, 24
per_position = {"keys and values": 4 * layers * (heads * (nope + v_dim) + rope),
                "latent": 4 * layers * (latent + rope)}
full, small = per_position.values()
print(f"keys and values: {full / 1e6:.2f} MB a position")  # claim expanded
print(f"    {full * 1e6 / 1e9:,.0f} GB after a million")  # claim expanded million
print(f"latent and extra: {small / 1e3:.1f} kB a position")  # claim latent
print(f"    {small * 1e6 / 1e9:.0f} GB after a million")  # claim latent million
print(f"    {full // (4 * layers):,} numbers a layer, against {latent + rope}")  # claim numbers
print(f"memory: {full / small:.0f} times less")  # claim memory
expanded_fma, absorbed_fma = nope + rope + v_dim, latent + rope + latent
print(f"multiply-adds a position and head: {expanded_fma} expanded, {absorbed_fma} absorbed")
print(f"    {absorbed_fma / expanded_fma:.1f} times")  # claim arithmetic
assert per_position["latent"] == 55296

# %%
context = 2.0 ** np.arange(8, 18)
fig, ax = plt.subplots()
for (name, nbytes), style in zip(per_position.items(), ("o-", "s-")):
    ax.loglog(context, context * nbytes / 1e9, style, ms=3, label=name)
kda_state = 69 * 4 * (heads * 128 * 128 + 3 * heads * 128 * 3)  # a matrix a head, 3 past inputs of 3 x 12,288 channels
ax.axhline(kda_state / 1e9, ls="--", lw=.8, color="C5", label="state of the 69 KDA layers, any length")
ax.set(xlabel="positions", ylabel="cache, GB", xlim=(200, 2e5),
       title=f"The latent cache passes the KDA state only at {kda_state / per_position['latent']:,.0f} positions")
ax.legend()
plt.show()


# %% [markdown]
# ## 3.1.4 Softmax in one pass
#
# A plain softmax needs all scores before the first weight: 101 MB of them<!--claim scores--> for 64 tokens at 4,096
# positions. One pass over the cache is enough if the sums can be corrected later. Keep, for each query, the largest
# score so far $\mu$, the sum of weights $Z$, and the sum of weighted latents $C$. A new tile of scores may raise the
# maximum to $\mu'$. All earlier weights were computed with $\mu$, so both sums shrink by $e^{\mu - \mu'}$:
#
# $$Z \leftarrow Z\,e^{\mu-\mu'} + \sum_i e^{s_i - \mu'},\qquad
# C \leftarrow C\,e^{\mu-\mu'} + \sum_i e^{s_i-\mu'}\,c_i,\qquad \bar c = C/Z$$
#
# By hand, with tiles of one position, scores $0, \ln 2, \ln 4$ and $c = 7, 7, 14$: the weights are $1, 2, 4$ over 7, so
# the result is 11.

# %%
def one_pass(s, c, tile):
    m, l, u = -np.inf, 0.0, 0.0
    for first in range(0, len(s), tile):
        part = s[first:first + tile]
        top = max(m, part.max())
        e, shrink = np.exp(part - top), np.exp(m - top)
        m, l, u = top, l * shrink + e.sum(), u * shrink + e @ c[first:first + tile]
        if tile == 1:
            print(f"maximum {m:.3f}  sum {l:.3f}  u {u:.3f}")
    return u / l


print(f"scores of 96 heads, 64 tokens, 4,096 positions: {96 * 64 * 4096 * 4 / 1e6:.0f} MB")  # claim scores
print("result", round(one_pass(np.log([1., 2, 4]), np.array([7., 7, 14]), 1), 6))

# %% [markdown]
# Where does a tile end? At multiples of 64 positions, counted from position 0. If tiles began with the chunk instead, a
# token would round differently in a prompt of 9 and in 9 steps. The mathematics is the same, the bits are not:

# %%
s32, c32 = rng.normal(0, 3, 200).astype(np.float32), rng.normal(size=200).astype(np.float32)


def one_pass32(s, c, cuts):
    "float32, tiles end at `cuts`."
    m, l, u = np.float32(-np.inf), np.float32(0), np.float32(0)
    for a, b in zip([0, *cuts], [*cuts, len(s)]):
        top = max(m, s[a:b].max())
        shrink = np.exp(m - top)
        l, u, m = l * shrink, u * shrink, top
        for e, value in zip(np.exp(s[a:b] - top), c[a:b]):
            l, u = l + e, u + e * value
    return u / l


by_position = one_pass32(s32, c32, range(64, 200, 64))
others = [one_pass32(s32, c32, range(start, 200, 64)) for start in range(1, 64)]
apart = max(abs(o - by_position) for o in others) / abs(by_position)
print("all within 1e-5:", apart < 1e-5, "  all the same bits:", all(o == by_position for o in others))
assert apart < 1e-5 and not all(o == by_position for o in others)

# %% [markdown]
# ## 3.1.5 The kernel, part by part
#
# The kernel works on *items*. An item is up to 16 heads, and takes up to eight tokens at a time. Each query of an item
# has a row of scratch memory: `[ W_uk^T q^n | q^r ]`, then its context, then $\mu$ and $Z$. The functions below take an
# item's arrays and numbers as one tuple.

# %% tags=["export"]
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


# %% [markdown]
# The absorbed query is summed over the key rows, in order. The scale is applied here, once, instead of to every score.
# The sum is formed in the columns of the context, because loads and stores of sixteen numbers need padding, and only
# the context has it.

# %% tags=["export"]
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


# %% [markdown]
# The one-pass softmax for one query and one tile. Weights under $e^{-60}$ become 0: against a sum of at least 1 they
# are far below float32's last bit. [3.1.8] shows that this also saves time. A NaN score fails every comparison, so it
# stays NaN and is found in the output. A score of $-\infty$ would become an ordinary weight of 0. For that case the
# function returns a sum of NaN.
#
# [3.1.8]: #3.1.8-Make-it-fast

# %% tags=["export"]
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


# %% [markdown]
# The context adds cache rows in the order of their positions, each element on its own, so any grouping gives the same
# bits. Four queries share every cache row: eight accumulators stay in registers while the tile is read.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# Scores are a matrix product in which the cache takes the place of the weights: each cache row meets every head's
# query, as a row of a matrix meets every token. So it is the product of chapter [1.5], four rows by four queries. A
# cache row is loaded once for four heads, and no dot product depends on its neighbours.
#
# The four queries may be heads of one token, which see the same positions. They may also reach into the next token,
# which sees one position more. The positions that all four see are done together, the others one by one.
#
# [1.5]: ../01_mxfp4/05_matmul.ipynb

# %% tags=["export"]
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


# %% [markdown]
# The value rows read the finished context. The division by $Z$ comes last: 128 divisions a head instead of one for
# every position.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# An item starts its queries, reads the cache once, and reads the values. A tile (64 rows of 2,304 bytes) stays in the
# core's cache while all the item's queries visit it. A long chunk is taken eight tokens at a time, so that scratch
# memory grows neither with the chunk nor with the context.

# %% tags=["export"]
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


# %% [markdown]
# `kv_b_proj` comes in blocks of whole heads, each once. A matrix in memory is one block, and threads share its items. A
# matrix that is read from disk (chapter [5.13]) has a block for each read: the thread that has read a block attends
# with its heads.
#
# [5.13]: ../05_streaming/13_trunk.ipynb

# %% tags=["export"]
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


# %% [markdown]
# First the table of [3.1.1], through the kernel: at position 0 the value is $(4,0)$, at position 1 it is $(3,2)$.
#
# [3.1.1]: #3.1.1-By-hand:-two-positions,-one-head

# %%
hand_w = np.concatenate([W_uk, W_uv]).astype(np.float32)
hand_q = np.array([[[2, 0, 1, q_r]]], np.float32)
hand_cache = np.array([[1, 0, 0], [0, 1, 1]], np.float32)
hand = np.concatenate([attend(ResidentMatrix(hand_w), hand_q, hand_cache, pos, 2, CORES) for pos in (0, 1)])
print(hand.round(5).tolist())
assert np.allclose(hand, [[4, 0], [3, 2]], atol=1e-6)


# %% [markdown]
# Then shapes that fill no vector, several tiles, scores in the hundreds, float32 and bf16 weights, against float64.

# %%
def case(heads, nope, rope, v_dim, latent, T, pos, hot=1.0):
    "Random (kv_b, q, cache) of a shape."
    shapes = (heads * (nope + v_dim), latent), (T, heads, nope + rope), (pos + T, latent + rope)
    kv_b, q, cache = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return kv_b / np.float32(latent ** .5), q * np.float32(hot), cache


def to_bf16(a):
    "The upper halves, uint16."
    return (a.view(np.uint32) >> 16).astype(np.uint16)


for shape in ((5, 7, 3, 9, 50, 11, 130, 1), (4, 16, 4, 8, 96, 9, 60, 1), (1, 12, 0, 4, 33, 70, 5, 1),
              (6, 128, 64, 128, 512, 3, 200, 1), (3, 16, 8, 6, 48, 20, 300, 100)):
    heads_, nope_, rope_, v_, latent_, T, pos, hot = shape
    w, q, rows = case(heads_, nope_, rope_, v_, latent_, T, pos, hot)
    bits = to_bf16(w)
    for kind, matrix, exact in (("float32", w, w), ("bf16", bits, bf16_to_float32(bits))):
        y, expected = attend(ResidentMatrix(matrix), q, rows, pos, v_, CORES), absorbed64(exact, q, rows, pos, v_)
        far = off(y.reshape(expected.shape), expected)
        assert np.isfinite(y).all() and far < (1e-4 if hot > 1 else TOLERANCE), (heads_, kind, far)
    print(f"{heads_} heads, key {nope_}+{rope_}, value {v_}, latent {latent_}, "
          f"{pos}+{T} positions, scores x{hot}: fits")

# %% [markdown]
# The case with scores in the hundreds is allowed 1e-4. A score near 1,000 has the absolute error of float32 at that
# size, and $e^s$ turns an absolute error into a relative one.
#
# ## 3.1.6 The layer
#
# The layer projects its input, writes the cache rows, attends, gates the result and projects it back. The two latent
# norms use an epsilon of 1e-6 whatever `rms_norm_eps` says. It is the default of the reference class, and the config
# does not mention it.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# The fixture: nine tokens in one call, then three single ones. Compared are the output and both parts of the cache.

# %%
matrices = {name: ResidentMatrix(w) if w.ndim == 2 else w for name, w in weights.items()}
shape = MLAShape(**dims, latent=16)


def run(cuts):
    "The layer over the fixture's twelve tokens, cut as `cuts` says: (output, cache)."
    cache, out, pos = mla_cache(shape, 12), [], 0
    for T in cuts:
        out.append(mla_layer(matrices, x[pos:pos + T], cache, pos, shape, CORES))
        pos += T
    return np.concatenate(out), cache


y, cache = run([9, 1, 1, 1])
for name, found, expected in (("output", y, truth), ("latent rows", cache[:, :16], fixture["cache_latent"]),
                              ("extra dims", cache[:, 16:], fixture["cache_rope"])):
    print(f"{name:12} within 1e-5: {off(found, expected) < TOLERANCE}")
    assert off(found, expected) < TOLERANCE


# %% [markdown]
# The cut of a prompt must not change a byte. Here every cut gives the same output and the same cache, and so does every
# cut of `kv_b_proj` into blocks.

# %%
class HeadByHead(ResidentMatrix):
    "A matrix that comes in blocks of one head, last head first."

    def map_blocks(self, work, threads):
        for first in reversed(range(0, len(self.array), 22)):
            work(first, self.array[first:first + 22], 1)


cuts = ([12], [1] * 12, [5, 7], [11, 1], [2, 3, 4, 3])
equal = all(a.tobytes() == b.tobytes() for cut in cuts for a, b in zip(run(cut), (y, cache)))
whole_block = matrices["kv_b_proj"]
matrices["kv_b_proj"] = HeadByHead(weights["kv_b_proj"])
equal_blocks = run([12])[0].tobytes() == y.tobytes()
matrices["kv_b_proj"] = whole_block
print("cuts of the prompt:", equal, "  one head a block:", equal_blocks)
assert equal and equal_blocks

# %% [markdown]
# ## 3.1.7 Six wrong layers
#
# Each is the reference with one thing wrong. The epsilon is the most treacherous: it changes nothing where a latent is
# large. This fixture has tokens with small latents, so the gate sees it:

# %% tags=["raises-exception"]
gate("1e-5 in the latent norms", mla64(weights, x, **dims, eps=1e-5))


# %%
def rotated(a):
    "RoPE, as other models would do it here: pairs of extra dims turn by an angle that grows with the position."
    half = a.shape[-1] // 2
    angle = np.arange(len(a))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    even, odd = a[..., :half], a[..., half:]
    return np.concatenate([even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)], -1)


wrong = {
    "softmax scale over nope alone": dict(scale_dims=12),
    "extra dims rotated": dict(extra=rotated),
    "extra dims dropped": dict(extra=np.zeros_like),
    "value rows before key rows": dict(value_first=True),
    "1e-5 in the latent norms": dict(eps=1e-5),
    "no output gate": dict(gated=False),
}
variants = {name: mla64(weights, x, **dims, **change) for name, change in wrong.items()}
print(f"{'as built':30} {'passes' if off(y) < TOLERANCE else 'FAILS'}")
for name, bad in variants.items():
    print(f"{name:30} {'passes' if off(bad) < TOLERANCE else 'fails'}, off by {off(bad):.2g}")
assert off(y) < TOLERANCE and all(off(bad) > 1e-2 for bad in variants.values())


# %% [markdown]
# Two of them again, now through the exported layer, where a caller could make the mistake: the wrong epsilon, and key
# and value rows of `kv_b_proj` exchanged.

# %%
def layer(eps=1e-6, **changed):
    W = matrices | {name: ResidentMatrix(w) for name, w in changed.items()}
    return mla_layer(W, x, mla_cache(shape, 12), 0, shape._replace(latent_eps=eps), CORES)


by_head = weights["kv_b_proj"].reshape(3, 22, 16)
swapped = np.concatenate([by_head[:, 12:], by_head[:, :12]], 1).reshape(66, 16)
for name, bad in (("1e-5", layer(eps=1e-5)), ("value rows first", layer(kv_b_proj=swapped))):
    print(f"{name:18} {'passes' if off(bad) < TOLERANCE else 'fails'}, off by {off(bad):.2g}")
    assert off(bad) > 1e-2

# %% [markdown]
# ### Look: the weights themselves
#
# Attention can be made to show its weights. Give it one-hot latents, the right keys as columns of $W_{uk}$, and the
# identity as $W_{uv}$. Then its output is $a$ itself. A weight above the diagonal would be a look into the future.

# %%
low = rms_norm(linear(matrices["q_a_proj"], x), weights["q_a_layernorm"], 1e-6)
q = linear(matrices["q_b_proj"], low).reshape(12, 3, 16)
keys = np.einsum("hnl,pl->hnp", by_head[:, :12], cache[:, :16])
printer = np.concatenate([keys, np.broadcast_to(np.eye(12, dtype=np.float32), (3, 12, 12))], 1).reshape(72, 12)
one_hot = np.concatenate([np.eye(12, dtype=np.float32), cache[:, 16:]], 1)
p = attend(ResidentMatrix(np.ascontiguousarray(printer)), q, one_hot, 0, 12, CORES).reshape(12, 3, 12)

fig, axes = plt.subplots(1, 3, sharey=True)
for h, ax in enumerate(axes):
    image = ax.imshow(p[:, h], vmin=0, vmax=1)
    ax.set(title=f"head {h}", xlabel="position read", xticks=(0, 4, 8), yticks=(0, 4, 8))
axes[0].set_ylabel("position reading")
fig.colorbar(image, ax=axes, label="weight", shrink=.7)
fig.suptitle("No weight above the diagonal: no head reads the future", fontsize=10, x=.02, y=.9, ha="left")
plt.show()
assert np.allclose(p.sum(2), 1, atol=1e-6) and (np.triu(p.transpose(1, 0, 2), 1) == 0).all()


# %% [markdown]
# ## 3.1.8 Make it fast
#
# One token, 16 heads of K3's width. Four versions: expand keys and values from the cached latents, in NumPy; absorb, in
# NumPy; a kernel that reads the cache once per head, first for scores, then for the context; and the kernel above,
# where four heads share each row and the cache is read once.

# %%
@kernel
def _plain(queries, cache, latent, s, u):
    "One query after another over the whole cache: scores, softmax, context."
    for h in range(len(queries)):
        for p in range(len(cache)):
            s[p] = dot(cache[p], queries[h])
        top = s.max()
        total = np.float32(0)
        for p in range(len(cache)):
            s[p] = exp(s[p] - top)
            total += s[p]
        for p in range(len(cache)):
            for m in range(latent):
                u[h, m] += s[p] / total * cache[p, m]


def expand(kv_b, q, cache, v):
    heads, latent = q.shape[1], kv_b.shape[1]
    kv = (cache[:, :latent] @ kv_b.T).reshape(len(cache), heads, -1)
    s = np.einsum("hd,phd->hp", q[0, :, :-64], kv[..., :-v]) + q[0, :, -64:] @ cache[:, latent:].T
    return np.einsum("hp,phv->hv", softmax64(s * np.float32(q.shape[2] ** -.5)), kv[..., -v:])


def absorb(kv_b, q, cache, v, kernel=None):
    w, latent = kv_b.reshape(q.shape[1], -1, kv_b.shape[1]), kv_b.shape[1]
    queries = np.concatenate([np.einsum("hn,hnl->hl", q[0, :, :-64], w[:, :-v]), q[0, :, -64:]], 1)
    queries *= np.float32(q.shape[2] ** -.5)
    if kernel is None:
        u = softmax64(queries @ cache.T) @ cache[:, :latent]
    else:
        u = np.zeros((len(w), latent), np.float32)
        kernel(queries, cache, latent, np.empty(len(cache), np.float32), u)
    return np.einsum("hvl,hl->hv", w[:, -v:], u)


# %% [markdown]
# Every version gives the answer before it is timed. Bytes are what has to move from memory: the weights of 16 heads in
# float32, or in bf16 for the last version, and the cache as often as it is read. NumPy's matrix products are those of
# BLAS, whose order of sums is not fixed. What the last version gains over absorption in NumPy is therefore not only
# time: it has the same bits everywhere, and it never holds all scores.

# %%
w, q, rows = case(16, nope, rope, v_dim, latent, 1, timed_positions - 1)
w = bf16_to_float32(to_bf16(w))
resident = ResidentMatrix(to_bf16(w))
cache_bytes = rows.nbytes
versions = [
    ("expand, NumPy", lambda: expand(w, q, rows, v_dim), w.nbytes + cache_bytes + 2 * timed_positions * 16 * 256 * 4),
    ("absorb, NumPy", lambda: absorb(w, q, rows, v_dim), w.nbytes + 2 * cache_bytes),
    ("absorb, one head at a time", lambda: absorb(w, q, rows, v_dim, _plain), w.nbytes + 32 * cache_bytes),
    ("four heads a row, one pass", lambda: attend(resident, q, rows, timed_positions - 1, v_dim, CORES),
     w.nbytes // 2 + 2 * cache_bytes),
]
expected = absorbed64(w, q, rows, timed_positions - 1, v_dim)[0]
for name, version, nbytes in versions:
    far = off(version().reshape(16, -1), expected)
    print(f"{name:28} {nbytes / 1e6:6.1f} MB moved, within 1e-5: {far < TOLERANCE}")
    assert far < TOLERANCE


# %% tags=["nbval-ignore-output"]
def median_seconds(work, repeat=9, clock=time.perf_counter):
    times = []
    for _ in range(repeat):
        began = clock()
        work()
        times.append(clock() - began)
    return np.median(times)


fma = 16 * timed_positions * absorbed_fma
for name, version, _ in versions:
    seconds = median_seconds(version)
    print(f"{name:28} {seconds * 1e3:7.2f} ms, {fma / seconds / 1e9:5.1f} G useful multiply-adds/s")


# %% [markdown]
# Weights between $e^{-87}$ and $e^{-104}$ are subnormal float32 numbers. On some CPUs a multiply-add that meets one
# takes many times as long, so without the cut at $e^{-60}$ the kernel would be slow there whenever scores are far
# apart. Is this CPU one of them? The same tile, with either kind of weight:

# %%
@kernel
def _repeat_context(item, times):
    for _ in range(times):
        for m in range(0, 512, 32):
            _context4(item, 0, CACHE_TILE, 0, m)


tile = line_aligned((CACHE_TILE, 576))
tile[:] = rng.normal(size=tile.shape)
mild, subnormal = (Item(tile, 512, 0, 4, np.zeros((4, 512), np.float32), 0, np.full((4, CACHE_TILE), value, np.float32))
                   for value in (1e-3, 1e-40))
print(f"smallest weight exp gives: {np.float32(exp(np.float32(-103))):.1e}   smallest weight kept: {np.exp(-60.0):.1e}")
_repeat_context(mild, 1)

# %% tags=["nbval-ignore-output"]
fast, slow = (median_seconds(lambda: _repeat_context(item, 100)) for item in (mild, subnormal))
print(f"a tile of context with normal weights {fast * 1e4:.1f} us, with subnormal ones {slow * 1e4:.1f} us")

# %% [markdown]
# ## 3.1.9 Cost for K3
#
# One layer at full width and 4,096 positions, measured. For comparison take a step of 6 s: that is the time in which
# the weights of a token, trunk and experts, pass two cores at some 22 GB/s. The wall clock also counts whatever else
# the machine is doing. The CPU's seconds divided by the threads are what an idle machine would need.

# %% tags=["nbval-ignore-output"]
w, q, rows = case(heads, nope, rope, v_dim, latent, 1, full_positions - 1)
resident = ResidentMatrix(to_bf16(w))
attend(resident, q, rows, full_positions - 1, v_dim, CORES)
fma = heads * full_positions * absorbed_fma
for pos in (0, full_positions - 1):
    wall = median_seconds(lambda: attend(resident, q, rows, pos, v_dim, CORES), 7)
    busy = median_seconds(lambda: attend(resident, q, rows, pos, v_dim, CORES), 7, time.process_time) / CORES
    print(f"position {pos:5}, {CORES} threads: {wall * 1e3:5.1f} ms a layer by the wall, "
          f"{busy * 1e3:5.1f} ms by the CPU; 24 layers {24 * busy:.2f} s, {24 * busy / 6:.1%} of 6 s")
print(f"{fma / busy / 1e9:.0f} G multiply-adds/s")
step_bytes = 108_811_877_376 + 92 * 16 * 17_547_264
print(f"weights of a step: {step_bytes / 1e9:.1f} GB, in 6 s {step_bytes / 6e9:.1f} GB/s")

# %% [markdown]
# And in bytes: the projections, the cache, and the scratch memory.

# %%
hidden, q_lora = 7168, 1536
shapes = {"q_a_proj": (q_lora, hidden), "q_b_proj": (heads * (nope + rope), q_lora),
          "kv_a_proj_with_mqa": (latent + rope, hidden), "kv_b_proj": (heads * (nope + v_dim), latent),
          "g_proj": (heads * v_dim, hidden), "o_proj": (hidden, heads * v_dim)}
total = sum(2 * n * k for n, k in shapes.values())
for name, (n, k) in shapes.items():
    print(f"{name:20} {n:>6} x {k:<6} {2 * n * k / 1e6:7.1f} MB")
print(f"{'together':36} {total / 1e6:7.1f} MB a layer, {24 * total / 1e9:.2f} GB a token")
print(f"cache: {4 * (latent + rope):,} bytes a position and layer, "
      f"{24 * 4 * (latent + rope) * full_positions / 1e6:.0f} MB at {full_positions:,} positions")
scratch = heads * 4 * (576 + 512 + 16)
print(f"scratch: {scratch / 1e6:.2f} MB for one token, {TOKENS_AT_ONCE * scratch / 1e6:.2f} MB for eight or more")

# %% [markdown]
# ## 3.1.10 What a trained head looks at
#
# The heads above have random weights. Those of `fixtures/stories` have learned to read very short stories and to answer
# questions about them. It is a K3 of nine layers, and three of them are MLA. Here the model has read a story and a
# question, and the next word is the answer. Each row is a head, each column a word, the colour is the weight.

# %%
import sys

sys.path.insert(0, str(ROOT / "book"))
import learned

reader = learned.Reader()
reading = reader.read(f"{learned.world.SHOWN.story} Who has the cup?")
heads = [f"layer {L}, head {h}" for L in reading.mla for h in range(4)]
looked = np.concatenate([weights[:, -1] for weights in reading.mla.values()])
assert looked.shape == (12, len(reading.tokens)) and np.allclose(looked.sum(1), 1)
assert reader.tokenizer.token(int(reading.logits[-1].argmax())) == b" Tom"

# %%
fig, ax = plt.subplots(figsize=(8, 3.4))
image = ax.imshow(looked, vmin=0, vmax=1, aspect="auto")
ax.set(yticks=range(12), yticklabels=heads, title='Where each head looks when the model must say "Tom"')
ax.set_xticks(range(len(reading.tokens)), [token.strip() for token in reading.tokens], rotation=90)
fig.colorbar(image, label="weight")
plt.show()

# %% [markdown]
# One story proves nothing. So the same for many held-out stories: how much of its weight does each head give to the
# word that is the answer, wherever in the story it stands, just before the model must say it?

# %%
on_answer = {}
for example in learned.world.held_out_examples(4, 15):
    question = example.asked[0]
    if question.word in example.story:  # the answer to "How many?" is not
        said = question.answer.rpartition(question.word)[0].rstrip()  # "In the", "It is", or nothing
        reading = reader.read(f"{example.story} {question.text} {said}".rstrip())
        is_answer = np.array([token.strip() == question.word for token in reading.tokens])
        weight = np.concatenate([weights[:, -1] for weights in reading.mla.values()])[:, is_answer]
        on_answer.setdefault(question.text.split()[0], []).append(weight.sum(1))
mean = {asked: np.mean(on_answer[asked], 0) for asked in sorted(on_answer)}

# %%
fig, ax = plt.subplots(figsize=(8, 2.8))
for i, (asked, weight) in enumerate(mean.items()):
    ax.bar(np.arange(12) + .27 * (i - 1), weight, .25, label=f"{asked} ... ? ({len(on_answer[asked])} stories)")
best = mean["Who"].argmax()
assert mean["Who"][best] > .4
ax.set(ylabel="weight on the answer", ylim=(0, 1),
       title=f"Asked who has a thing, {heads[best]} gives {mean['Who'][best]:.0%} of its weight to the answer")
ax.set_xticks(range(12), heads, rotation=45, ha="right")
ax.legend()
plt.show()

# %% [markdown]
# What each part of the layer is worth to this model: `python fixtures/stories/listen.py --broken` makes one thing wrong
# at a time and counts right answers.

# %%
print(learned.what_breaks("no MLA layers", "no MLA gate", "MLA: scale without the extra dims",
                          "MLA: extra dims dropped", "MLA: extra dims rotated", "MLA: 1e-5 in the latent norms"))

# %% [markdown]
# To look at the answer is one thing, to be needed is another. Without any MLA layer, counting suffers and most other
# answers stay right: this model also keeps the facts of such short stories in the states of its KDA layers.

# %%
rows = {row["name"]: row["right"] for row in learned.broken_table()["rows"]}
assert rows["no MLA layers"]["counting"] < 1 - .2 and rows["no KDA layers"]["recency"] == 0

# %% [markdown]
# ## Summary
#
# - Keys and values are linear in a latent of 512, so the matrix can act on the query and on the average instead, and
#   576 numbers a position are the whole cache.
# - Softmax in one pass needs tiles that belong to positions, not to calls. Then every cut of the prompt gives the same
#   bits.
# - The scale counts all 192 numbers of a key, the extra 64 are used as they are, key rows come first, and the latent
#   norms have their own epsilon.
#
# ## Exercises
#
# Answers: [exercises of part 3](../answers/03_mla.ipynb).
#
# 1. From which number $T$ of tokens in a chunk on would it pay, in multiply-adds, to expand the keys and values of all
#    positions once instead of absorbing? Count with `expanded_fma`, `absorbed_fma` and the cost of expanding a
#    position.
# 2. Keep the cache in bf16. How far do the outputs of the fixture move, and is that inside the gate?
# 3. Show that the weights which the cut at $e^{-60}$ sets to 0 cannot change a float32 sum, not even a million of them.
#
# Next: a layer chooses which depth to read. [3.2 Block attention residuals](02_residual.ipynb)
