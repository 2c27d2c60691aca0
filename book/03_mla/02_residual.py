# %% [markdown]
# # 3.2 Block attention residuals: a layer chooses its depth
#
# In most transformers a layer reads the sum of everything before it. K3's layers read a *mix* instead: a weighted
# average of the embedding, of the sums of earlier blocks of twelve layers, and of the sum so far. The weights are
# computed anew for each token. At the end you can say what is wrong with a plain sum, you can carry the blocks through
# the layers of a model, and you have seen eleven wrong versions fail.
#
# > **Without it:** every layer reads one sum, in which each of 187 earlier results has a share that no later layer can
# > change.
# >
# > **With it:** a layer chooses. It costs 258 kB<!--claim memory--> of memory for each token of a chunk, and
# > 5.4 MB<!--claim weights--> of weights.
#
# Needs chapter [1.6] (RMSNorm). Runs in ten seconds. Makes `k3lib.residual`.
#
# [3.1 Gated MLA: attention that caches 576 numbers](01_mla.ipynb) ·
# [contents](../README.md) ·
# [4.1 The router: sixteen of 896, steered by a bias](../04_moe_router/01_router.ipynb)
#
# [1.6]: ../01_mxfp4/06_functions.ipynb

# %%
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.tensors import ATTENTION_NORMS, FINAL, tensor_name

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

K3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model
schematics.where(K3, "mix")

# %% [markdown]
# | symbol | meaning | shape in K3 | in code |
# |---|---|---|---|
# | $B_0$ | the embedding of the token, first of the sources | 7168 | `sources[0]` |
# | $B_1, B_2 \dots$ | finished block sums: what twelve layers have added | 7168 each | `sources[1:n]` |
# | $p$ | running sum of the present block, the last source | 7168 | `sources[n]` |
# | $\gamma$ | weights of an RMSNorm, `*_res_norm` | 7168 | `norm_w` |
# | $q$ | query of the mix: a learned vector, `*_res_proj` | 7168 | `proj_w` |
# | $s_i$ | score of source $i$ | up to 9 | |
# | $a_i$ | weight of source $i$, the softmax of the scores | up to 9 | `weights` |
# | $m$ | the mix: what the layer's norm and its attention or experts see | 7168 | `h`, `out` |
#
# Equations: the published modelling code; `attn_res_block_size` is 12 in the config.

# %% tags=["export"]
import numpy as np

from k3lib.functions import exp
from k3lib.kernel_cache import kernel
from k3lib.matmul import NotFinite, dot
from k3lib.simd import fma

_ZERO = np.float32(0)
_LOWEST, _FAINT = np.float32(-np.inf), np.float32(-60)  # below every score; a weight e^-60 or smaller counts as 0

# %% tags=["parameters"]
seed = 32
toy_layers = 8  # of the model in 3.2.5
toy_block = 3

# %% [markdown]
# ## 3.2.1 What is wrong with a plain sum, and a mix by hand
#
# In a plain residual stream layer $L$ reads $x_L = B_0 + y_1 + y_2 + \dots + y_{L-1}$, the sum of the embedding and of
# all results before. The sum has one great merit: a layer that has nothing to say adds nothing, and the gradient
# reaches every layer directly. It has three faults.
#
# - **A share that only shrinks.** Suppose that the results have similar lengths and unrelated directions. The sum of
#   $n$ of them has $\sqrt n$ times the length of one. A layer norms what it reads, so the share of the embedding, and
#   of any early result, falls like $1/\sqrt n$ with the depth. A late layer that wants to be heard must be louder than
#   all others together.
# - **One recipe for all.** Every later layer reads the same sum. A layer that needs an early result cannot ask for more
#   of it.
# - **No way back.** Two vectors that have been added cannot be told apart any more.
#
# Attention over tokens has the answer to such faults: keep the vectors apart and let the reader weigh them. Block
# residuals do this over the depth. (These are arguments. Whether they were the reasons of K3's makers is a guess.)

# %%
rng = np.random.default_rng(seed)
results = rng.standard_normal((187, 7168)) / np.sqrt(7168)  # the embedding and 186 results, each of length 1
total = results.cumsum(0)
for n in (1, 12, 48, 187):
    share = results[0] @ total[n - 1] / np.linalg.norm(total[n - 1])
    print(f"sum of {n:3} vectors: length {np.linalg.norm(total[n - 1]):5.2f}, share of the first {share:.2f}, "
          f"1/sqrt(n) = {n ** -.5:.2f}")

# %% [markdown]
# The wiring, with the numbers of K3. Keeping all 187 vectors of a token apart would take 5.4 MB.<!--claim all--> So K3
# keeps the embedding and one sum for each block of twelve layers: nine vectors at most, 258 kB.

# %%
schematics.residual(K3)


# %% [markdown]
# **By hand.** Width 2, norm weights 1, query $q = (\tfrac52\ln 3,\ 0)$, no epsilon.
#
# | source | root mean square | normed | score $s$ | weight $a$ |
# |---|---|---|---|---|
# | $B_0 = (1, 1)$ | 1 | (1, 1) | 2.5 ln 3 | ¼ |
# | $p = (7, 1)$ | 5 | (1.4, 0.2) | 3.5 ln 3 | ¾ |
#
# $m = ¼(1,1) + ¾(7,1) = (5.5, 1)$. The norm is for the score alone: the sources are mixed as they are. Ten times $p$
# has the same score and the same weight, and gives $m = (52.75, 7.75)$. So a long source stays long in the mix, but its
# length does not raise its weight.

# %% [markdown]
# ## 3.2.2 The mix, in float64
#
# $$s_i = \big\langle \mathrm{RMSNorm}(B_i) \odot \gamma,\ q \big\rangle, \qquad a = \mathrm{softmax}(s),
# \qquad m = \sum_i a_i\, B_i$$
#
# The sum runs over all sources; the last one is $p$. This is softmax attention over depth: the normed source is the
# key, the source itself is the value, and the query is a learned vector, one for each mix of each layer.

# %%
def rms64(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def softmax64(s):
    e = np.exp(s - s.max(0))
    return e / e.sum(0)


def weights64(sources, norm_w, proj_w, eps):
    "float64 [n, T] of `sources` [n, T, H]."
    return softmax64((rms64(np.asarray(sources, np.float64), eps) * norm_w * proj_w).sum(-1))


def mix64(sources, norm_w, proj_w, eps):
    return (weights64(sources, norm_w, proj_w, eps)[..., None] * sources).sum(0)


hand = np.array([[[1., 1]], [[7, 1]]])
hand_norm, hand_proj = np.ones(2), np.array([2.5 * np.log(3), 0])
for loud in (1, 10):
    sources = hand * np.array([1, loud]).reshape(2, 1, 1)
    print(weights64(sources, hand_norm, hand_proj, 0).ravel().round(6),
          mix64(sources, hand_norm, hand_proj, 0)[0].round(6))


# %% [markdown]
# ## 3.2.3 The mix, in float32
#
# Norm weights and query only ever meet as a product. So the score is one dot product over one root, and no normed
# vector is written anywhere: $s_i = \langle B_i,\ \gamma \odot q\rangle / \sqrt{\overline{B_i^2} + \varepsilon}$. As in
# 3.1, weights below $e^{-60}$ are 0.

# %% tags=["export"]
@kernel
def _depth_weights(sources, query, eps, weights):
    "Write the weights; return the first source with a score or sum of squares that is not finite, or -1."
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


def depth_weights(sources: np.ndarray, n: int, norm_w: np.ndarray, proj_w: np.ndarray, eps: float) -> np.ndarray:
    """Mixing weights float32 [n, T]: the softmax over s < n of <RMSNorm(sources[s, t]; eps) * norm_w, proj_w>.

    `sources` float32 [S, T, H]; `norm_w` and `proj_w` float32 [H]. Raises ValueError where shapes do not fit, NotFinite
    where a source's score or sum of squares is infinite or NaN.
    """
    S, T, H = sources.shape
    if not 1 <= n <= S or norm_w.shape != (H,) or proj_w.shape != (H,):
        raise ValueError(f"mix: {n} of sources {sources.shape}, norm {norm_w.shape} and proj {proj_w.shape} do not fit")
    weights = np.empty((n, T), np.float32)
    bad = _depth_weights(sources[:n], norm_w * proj_w, eps, weights)
    if bad >= 0:
        raise NotFinite(f"mix: the score or the sum of squares of source {bad} of {n} is not a finite number")
    return weights


# %% [markdown]
# The sum runs over the sources in their order, for each of the 7168 elements on its own. `out` may not be one of the
# sources: the sum would overwrite a source that it still reads. [3.2.6] shows the result.
#
# [3.2.6]: #3.2.6-Four-wrong-forward-passes

# %% tags=["export"]
@kernel
def _weighted_sum(sources, weights, out):
    "out[t] = sum over s of weights[s, t] * sources[s, t], in the order of s."
    n, T, H = sources.shape
    for t in range(T):
        y = out[t]
        for i in range(H):
            y[i] = weights[0, t] * sources[0, t, i]
        for s in range(1, n):
            a, x = weights[s, t], sources[s, t]
            for i in range(H):
                y[i] = fma(a, x[i], y[i])


def mix(sources: np.ndarray, n: int, norm_w: np.ndarray, proj_w: np.ndarray, eps: float, out: np.ndarray) -> np.ndarray:
    """out[t] = sum over s < n of a[s, t] * sources[s, t], float32 [T, H], where a = depth_weights(...).

    The norm goes into the weights only; the sources are summed as they are. Returns `out`. The bits of a token depend
    on that token alone. Raises ValueError where shapes do not fit or `out` shares memory with `sources`, which this sum
    and later mixes still read; NotFinite as depth_weights does.
    """
    if out.shape != sources.shape[1:]:
        raise ValueError(f"mix: out has shape {out.shape}, expected {sources.shape[1:]}")
    if np.may_share_memory(out, sources):
        raise ValueError("mix: out shares memory with sources, which later mixes still read")
    _weighted_sum(sources[:n], depth_weights(sources, n, norm_w, proj_w, eps), out)
    return out


# %%
hand32 = hand.astype(np.float32)
y = mix(hand32, 2, np.ones(2, np.float32), hand_proj.astype(np.float32), 0.0, np.empty((1, 2), np.float32))
print(y.round(5).tolist())
assert np.allclose(y, [[5.5, 1]], rtol=1e-6)

# %% [markdown]
# `fixtures/ops/attn_res` holds nine sources whose size runs from 1e-3 to 1e4. fla-core's reference mixed one to nine of
# them in float64, and once all nine with scores in the hundreds. The gate allows 1e-5 of the largest output. With one
# source, the mix must return that source unchanged.

# %%
TOLERANCE = 1e-5
fixture = load_file(ROOT / "fixtures/ops/attn_res.safetensors")
sources, norm_w, proj_w = fixture["sources"], fixture["norm_weight"], fixture["proj"]


def off(found, expected):
    "Largest difference over the largest expected magnitude; infinity if anything is not finite."
    far = np.abs(found - expected.astype(np.float64)).max() / np.abs(expected).max()
    return far if np.isfinite(far) else np.inf


def mixed(n, proj=proj_w):
    return mix(sources, n, norm_w, proj, 1e-5, np.empty(sources.shape[1:], np.float32))


worst = max(off(mixed(n), fixture[f"out_{n}"]) for n in range(1, 10))
worst_weight = max(off(depth_weights(sources, n, norm_w, proj_w, 1e-5), fixture[f"weights_{n}"])
                   for n in range(1, 10))
hot = off(mixed(9, fixture["proj_hot"]), fixture["out_hot"])
print("mixes of 1 to 9:", worst < TOLERANCE, "  their weights:", worst_weight < TOLERANCE,
      "  hot scores:", hot < TOLERANCE)
print("one source returns itself, bit for bit:", np.array_equal(mixed(1), sources[0]))
assert max(worst, worst_weight, hot) < TOLERANCE and np.array_equal(mixed(1), sources[0])

# %% [markdown]
# Tokens do not see each other: five at once and one at a time give the same bytes.

# %%
each = [mix(np.ascontiguousarray(sources[:, t:t + 1]), 9, norm_w, proj_w, 1e-5, np.empty((1, 64), np.float32))
        for t in range(5)]
alone = np.concatenate(each).tobytes() == mixed(9).tobytes()
print("chunk and single tokens, byte for byte:", alone)
assert alone


# %% [markdown]
# ## 3.2.4 Seven wrong mixes
#
# Each gives finite numbers of the usual size. The gate takes the worst of nine mixes, with two to nine sources, and one
# with scores in the hundreds.

# %%
def wrong_mix(scores=lambda b: rms64(b, 1e-5) * norm_w, values=lambda b: b, weigh=softmax64):
    "A mix with one part replaced: mixes of 2 .. 9 sources, then the hot one."
    def one(b, proj):
        return (weigh((scores(b) * proj).sum(-1))[..., None] * values(b)).sum(0)
    b = sources.astype(np.float64)
    return [one(b[:n], proj_w) for n in range(2, 10)] + [one(b, fixture["proj_hot"])]


def careless(s):
    "Softmax in float32 that takes no maximum off."
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(s.astype(np.float32))
        return e / e.sum(0)


variants = {
    "sources normed in the mix": wrong_mix(values=lambda b: rms64(b, 1e-5)),
    "scores from raw sources": wrong_mix(scores=lambda b: b * norm_w),
    "norm weight left out": wrong_mix(scores=lambda b: rms64(b, 1e-5)),
    "epsilon 1e-6": wrong_mix(scores=lambda b: rms64(b, 1e-6) * norm_w),
    "plain mean": wrong_mix(weigh=lambda s: np.full(s.shape, 1 / len(s))),
    "plain sum": wrong_mix(weigh=np.ones_like),
    "softmax without the maximum": wrong_mix(weigh=careless),
}
truths = [fixture[f"out_{n}"] for n in range(2, 10)] + [fixture["out_hot"]]


def gate(name, outputs, truths):
    "All outputs, against all truths."
    far = max(off(y, t) for y, t in zip(outputs, truths))
    assert far < TOLERANCE, f"{name}: {far:.2g} of the largest, allowed {TOLERANCE}"
    print(f"{name:28} passes")


gate("as built", [mixed(n) for n in range(2, 10)] + [mixed(9, fixture["proj_hot"])], truths)
for name, outputs in variants.items():
    far = max(off(y, t) for y, t in zip(outputs, truths))
    how_far = f"off by {far:.2g}" if far < np.inf else "not finite"
    print(f"{name:28} {'passes' if far < TOLERANCE else 'fails'}, {how_far}")
    assert far > 1e-2

# %% tags=["raises-exception"]
gate("sources normed in the mix", variants["sources normed in the mix"], truths)


# %% [markdown]
# ## 3.2.5 When a block is finished
#
# There are two mixes a layer, one before attention and one before the feed-forward part. Where $L$ is a multiple of the
# block size, the running sum joins the finished blocks *after* the first mix has read it. A new sum then starts with
# that layer's attention output. One more mix comes after the last layer. Line for line, in float64. The places to go
# wrong are arguments:

# %%
def forward64(p, layers, block_size, final, clear=True, late=False, last_mix=True):
    """The forward pass from the embedding `p` [T, H]; `layers` is a list of (attention, ffn, first mix, second mix).

    Returns (final mix, blocks, running sum, number of sources of every mix). `clear`, `late` and `last_mix` are
    arguments so that they can be got wrong.
    """
    blocks, counts = [], []

    def look(w):
        counts.append(len(blocks) + 1)
        return mix64(np.stack([*blocks, p]), *w)

    for L, (attention, ffn, first, second) in enumerate(layers):
        h = look(first) if blocks else p
        y = attention(h)
        if L % block_size == 0 and not late:
            blocks.append(p)
            p = y if clear else p + y
        else:
            p = p + y
        h = look(second)
        p = p + ffn(h)
        if late and L % block_size == 0:
            blocks.append(p)
            p = 0 * p
    return (look(final) if last_mix else p), blocks, p, counts


# %% [markdown]
# A toy: eight layers in blocks of three, width 48, with a small random matrix and a tanh for attention and for the
# experts.

# %%
rng = np.random.default_rng(seed)
H, T = 48, 5


def random_part():
    A = rng.normal(0, H ** -.5, (H, H))
    return lambda h: 2 * np.tanh(rms64(h, 1e-5) @ A)


def random_mix():
    return rng.uniform(.5, 1.5, H).astype(np.float32), rng.normal(0, .3, H).astype(np.float32), 1e-5


embedding = rng.normal(size=(T, H)).astype(np.float32)
layers = [(random_part(), random_part(), random_mix(), random_mix()) for _ in range(toy_layers)]
final = random_mix()
truth, blocks, p, counts = forward64(embedding.astype(np.float64), layers, toy_block, final)
print("sources of every mix:", counts)


# %% [markdown]
# The decoder keeps all sources in one array, finished blocks first and the running sum behind them. Starting a block is
# then `n += 1`, and nothing is copied. Its mixes are the exported ones, in float32.

# %%
def forward32(embedding, layers, block_size, final):
    blocks = -(-len(layers) // block_size)
    sources = np.empty((blocks + 1, *embedding.shape), np.float32)
    h, n = np.empty_like(embedding), 0
    sources[0] = embedding
    for L, (attention, ffn, first, second) in enumerate(layers):
        y = attention(mix(sources, n + 1, *first, h) if n else sources[0]).astype(np.float32)
        if L % block_size == 0:
            n += 1
            sources[n] = y
        else:
            sources[n] += y
        sources[n] += ffn(mix(sources, n + 1, *second, h)).astype(np.float32)
    return mix(sources, n + 1, *final, h).copy(), sources[:n].copy(), sources[n].copy()


found, found_blocks, found_p = forward32(embedding, layers, toy_block, final)
for name, a, b in (("final mix", found, truth), ("blocks", found_blocks, np.stack(blocks)),
                   ("running sum", found_p, p)):
    print(f"{name:12} within 1e-5: {off(a, b) < TOLERANCE}")
    assert off(a, b) < TOLERANCE

# %% [markdown]
# A second opinion comes from `fixtures/oracle13`, thirteen layers in blocks of three, computed by another engine. It
# holds the five block sums and the running sum after the last layer; the final mix of these must be its
# `hidden_output_mix`.

# %%
oracle = load_file(ROOT / "fixtures/oracle13/expected.safetensors")
checkpoint = Checkpoint(ROOT / "fixtures/oracle13/model")
hidden, finished = oracle["hidden_after_layer"], oracle["residual_blocks"]


def mix_weights(L=None):
    "Norm weight and projection of the mix before layer L's attention, or of the final mix."
    names = FINAL[:2] if L is None else [tensor_name(L, "norms", short) for short in ATTENTION_NORMS[:2]]
    return [checkpoint.tensor(name).reshape(-1) for name in names]


output_w = mix_weights()
stack = np.concatenate([finished, hidden[12:]])
h = mix(stack, 6, *output_w, 1e-5, np.empty(hidden.shape[1:], np.float32))
print("output mix within 1e-5:", off(h, oracle["hidden_output_mix"]) < TOLERANCE)
assert off(h, oracle["hidden_output_mix"]) < TOLERANCE

# %% [markdown]
# ### Look: weights over depth
#
# The mix before each layer's attention, averaged over the twelve tokens of the fixture's prompt. Every row must sum to
# 1, and a block may be read only after it was finished: that is the staircase. The weights of this model are random, so
# the colours say nothing else.

# %%
table = np.full((13, 6), np.nan)
for L in range(1, 14):
    done = -(-L // 3) if L < 13 else 5
    b = np.concatenate([finished[:done], hidden[L - 1:L]])
    a = depth_weights(b, done + 1, *(mix_weights(L) if L < 13 else output_w), 1e-5).mean(1)
    table[L - 1, :done], table[L - 1, 5] = a[:-1], a[-1]
assert np.allclose(np.nansum(table, 1), 1, atol=1e-6)

# %%
fig, ax = plt.subplots(figsize=(6, 3.6))
image = ax.imshow(table, vmin=0, aspect="auto")
ax.set(xticks=range(6), xticklabels=["embedding", "0-2", "3-5", "6-8", "9-11", "running\nsum"], yticks=range(13),
       yticklabels=[*map(str, range(1, 13)), "output"],
       xlabel="source (block sums by their layers)", ylabel="mix before layer",
       title="A finished block is a source of every later mix")
fig.colorbar(image, label="mean weight")
plt.show()


# %% [markdown]
# ## 3.2.6 Four wrong forward passes
#
# On the toy: the boundary forgets to restart the sum; the block is finished one layer too late; the final mix is
# missing. The last one writes the final mix over its own input, as an engine would that saves a buffer.

# %%
def over_itself(sources, weights, out):
    "The sum of 3.2.3 without its guard."
    out[:] = weights[0][:, None] * sources[0]
    for s in range(1, len(sources)):
        out += weights[s][:, None] * sources[s]
    return out


stack = np.concatenate([np.stack(blocks), p[None]])
a = weights64(stack, *final)
wrong = {
    "sum not restarted": forward64(embedding.astype(np.float64), layers, toy_block, final, clear=False)[0],
    "block finished a layer late": forward64(embedding.astype(np.float64), layers, toy_block, final, late=True)[0],
    "final mix missing": forward64(embedding.astype(np.float64), layers, toy_block, final, last_mix=False)[0],
    "final mix over its running sum": over_itself(stack, a, stack[-1]),
}
gate("as built", [found], [truth])
for name, bad in wrong.items():
    print(f"{name:32} {'passes' if off(bad, truth) < TOLERANCE else 'fails'}, off by {off(bad, truth):.2g}")
    assert off(bad, truth) > 1e-2

# %% tags=["raises-exception"]
gate("sum not restarted", [wrong["sum not restarted"]], [truth])

# %% [markdown]
# The exported mix refuses the last one, and shapes that do not fit.

# %%
for n, out in ((9, sources[8]), (10, np.empty((5, 64), np.float32)), (9, np.empty((1, 64), np.float32))):
    try:
        mix(sources, n, norm_w, proj_w, 1e-5, out)
    except ValueError as error:
        print(error)

# %% [markdown]
# ## 3.2.7 How many sources, for K3
#
# 93 layers in blocks of 12: each of the layers 0, 12, …, 84 finishes a block. So eight sources are finished when the
# last layer runs, the embedding among them, and the running sum is the ninth. Here the forward pass itself counts them,
# with layers that do nothing:

# %%
nothing = (lambda h: h, lambda h: h, (np.ones(1), np.ones(1), 1e-5), (np.ones(1), np.ones(1), 1e-5))
_, blocks, _, counts = forward64(np.ones((1, 1)), [nothing] * 93, 12, nothing[2])
print(f"{len(counts)} mixes a token: 2 x 93, less the one of layer 0 that has nothing to choose from, "
      "and the final one")
print(f"finished sources at the end: {len(blocks)}, sources of the final mix: {counts[-1]}, "
      f"read in all mixes: {sum(counts)}")
assert (len(counts), len(blocks), max(counts), counts[-1]) == (186, 8, 9, 9)

# %%
fig, ax = plt.subplots()
ax.step(np.arange(1, 187) / 2, counts, where="post")
for start in range(0, 93, 12):
    ax.axvline(start, lw=.6, ls=":", color="C5")
ax.set(xlabel="layer (dotted: a block starts)", ylabel="sources in the mix", ylim=(0, 10), xticks=range(0, 97, 12),
       title="Each block adds one source, seen first by its own second mix: 9 at the end")
plt.show()

# %%
width = 7168
print(f"nine sources of one token: {9 * width * 4 / 1e3:.0f} kB")  # claim memory
print(f"    of a chunk of 64: {64 * 9 * width * 4 / 1e6:.1f} MB, needed for one forward pass only")
print(f"all 187 vectors of a token apart: {187 * width * 4 / 1e6:.1f} MB")  # claim all
print(f"weights: {(4 * 93 + 2) * width * 2 / 1e6:.1f} MB in bf16")  # claim weights
print(f"arithmetic: {sum(counts) * 3 * width / 1e6:.0f} M multiply-adds a token "
      "(two dot products and a sum for each source read)")


# %% [markdown]
# ## 3.2.8 Make it fast
#
# The plain form writes the normed sources, their products and the weighted sources to memory before it adds them up. In
# the kernel a source is only read, and a token's nine sources of 28 KB stay in the core's cache. Every version passes
# the fixture first.

# %%
def mix_numpy32(sources, norm_w, proj_w, eps):
    normed = sources / np.sqrt((sources * sources).mean(-1, keepdims=True) + np.float32(eps)) * norm_w
    s = (normed * proj_w).sum(-1)
    e = np.exp(s - s.max(0))
    return ((e / e.sum(0))[..., None] * sources).sum(0)


def fused(sources, norm_w, proj_w, eps):
    return mix(sources, len(sources), norm_w, proj_w, eps, np.empty(sources.shape[1:], np.float32))


versions = [("NumPy, float64", mix64, 8 * 8), ("NumPy, float32", mix_numpy32, 8 * 4), ("kernel", fused, 3 * 4)]
for name, version, per_element in versions:
    far = off(version(sources, norm_w, proj_w, 1e-5), fixture["out_9"])
    print(f"{name:16} about {9 * width * per_element / 1e6:.1f} MB moved a mix of 9, within 1e-5: {far < TOLERANCE}")
    assert far < TOLERANCE

# %% tags=["nbval-ignore-output"]
wide = rng.normal(size=(9, 1, width)).astype(np.float32)
wide_norm, wide_proj = np.ones(width, np.float32), rng.normal(0, .02, width).astype(np.float32)
for name, version, _ in versions:
    times = []
    for _ in range(50):
        began = time.perf_counter()
        version(wide, wide_norm, wide_proj, 1e-5)
        times.append(time.perf_counter() - began)
    print(f"{name:16} {np.median(times) * 1e6:8.1f} us a mix of 9, "
          f"{np.median(times) * 186e3:6.1f} ms for the 186 of a token, at most")

# %% [markdown]
# ## 3.2.9 What a trained model reads at which depth
#
# At the start of the training every mix is even, because its query is zero. `fixtures/stories` is a K3 of nine layers
# in blocks of four, trained to answer questions about very short stories. Below are the weights that it has learned,
# averaged over all words of 40 stories. A half-layer is attention (a) or feed-forward (f).

# %%
import sys

sys.path.insert(0, str(ROOT / "book"))
import learned

reader = learned.Reader()
readings = [reader.read(text) for text in learned.held_out_texts(1, 10)]
columns = ["embedding", "0-3", "4-7", "8"]
learned_mix = np.full((len(readings[0].mixes), 4), np.nan)
for i in range(len(learned_mix)):
    each = np.concatenate([reading.mixes[i] for reading in readings], axis=1).mean(1)  # the last one is the running sum
    learned_mix[i, :len(each)] = each
assert np.allclose(np.nansum(learned_mix, 1), 1, atol=1e-5)
assert (learned_mix[7:17:2, 0] > learned_mix[8:17:2, 0]).all()  # attention, feed-forward of layers 4 to 8

# %%
fig, ax = plt.subplots(figsize=(6, 4))
image = ax.imshow(learned_mix, vmin=0, vmax=1, aspect="auto")
labels = ["0 f", *(f"{L} {half}" for L in range(1, 9) for half in "af"), "head"]
ax.set(xticks=range(4), xticklabels=columns, yticks=range(len(labels)), yticklabels=labels,
       xlabel="source: the embedding, or a sum of these layers", ylabel="mix before half-layer",
       title="From layer 4 on, attention reads more of the embedding than feed-forward")
fig.colorbar(image, label="mean weight")
plt.show()

# %% [markdown]
# What the mixes are worth to this model: `python fixtures/stories/listen.py --broken` makes one thing wrong at a time
# and counts right answers.

# %%
print(learned.what_breaks("residual: a plain sum", "residual: an even mix", "residual: values normed",
                          "residual: sum not cleared", "residual: last mix missing"))

# %% [markdown]
# ## Summary
#
# - A plain sum gives each earlier result a share that shrinks with depth and that no layer can change. A mix keeps the
#   sums of blocks apart and lets each layer weigh them.
# - Score by the normed source, mix the raw one. The softmax is over depth, for every token anew.
# - At a block's first layer the sum is read, becomes a finished block, and restarts. One mix more follows the last
#   layer. At 93 layers and blocks of 12 a mix has at most 9 sources.
#
# ## Exercises
#
# Answers: [exercises of part 3](../answers/03_mla.ipynb).
#
# 1. With blocks of 1 a layer could choose among all layers before it. How many sources does the final mix have, and
#    what does a chunk of 64 tokens cost in memory?
# 2. Show that multiplying one source by any positive factor leaves all weights unchanged when $\varepsilon = 0$, and
#    find the size of a source at which $\varepsilon = 10^{-5}$ halves a score.
# 3. Make `out` of the second mix of each layer the array `y` of its attention in `forward32`: why is that allowed?
#
# Next: which sixteen of 896 experts read the mix. [4.1 The router](../04_moe_router/01_router.ipynb)
