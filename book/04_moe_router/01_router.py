# %% [markdown]
# # 4.1 The router: sixteen of 896, steered by a bias
#
# Before K3 reads any routed expert, its router picks the 16 of 896 that a token needs: 1.8% of the experts.<!--claim
# few--> At the end you can write that choice down exactly, ties included, you can say why a bias steers the choice and
# not the weights, and you have seen six wrong routers fail.
#
# > **Without it:** a token reads all experts, 1,446 GB,<!--claim all--> in 207 s<!--claim all seconds--> from a disk
# > of 7 GB/s.
# >
# > **With it:** 25.8 GB<!--claim chosen--> in 3.7 s,<!--claim chosen seconds--> and 1.2 GB<!--claim router--> of router
# > matrices.
#
# Needs chapter [1.6] (sigmoid). Runs in ten seconds. Makes `k3lib.router`.
#
# [3.2 Block attention residuals: a layer chooses its depth](../03_mla/02_residual.ipynb) ·
# [contents](../README.md) ·
# [4.2 Latent experts: sixteen in half the width, two that always speak](02_moe.ipynb)
#
# [1.6]: ../01_mxfp4/06_functions.ipynb

# %%
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

K3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model
schematics.where(K3, "router")

# %% [markdown]
# | symbol | meaning | shape in K3 | in code |
# |---|---|---|---|
# | $x$ | input of the feed-forward part for one token, mixed and normed | 7168 | `x` |
# | $W_r$ | router matrix, tensor `gate.weight`, bf16 | 896 × 7168 | `W["gate"]` |
# | $\ell = W_r x$ | logits of the experts, float32 | 896 | `logits` |
# | $s = \sigma(\ell)$ | scores of the experts, between 0 and 1 | 896 | `s` |
# | $b$ | bias, tensor `gate.e_score_correction_bias`, float32 | 896 | `bias` |
# | $K$ | how many experts are chosen, `num_experts_per_token` | 16 | `k` |
# | $\lambda$ | `routed_scaling_factor` | 1.0 | `scale` |
# | $e_1 \dots e_K$ | ids of the chosen experts, largest $s+b$ first | 16 | `ids` |
# | $w_1 \dots w_K$ | weight of each: what its answer is multiplied by | 16 | `weights` |

# %% tags=["export"]
import numpy as np

from k3lib.functions import sigmoid
from k3lib.kernel_cache import kernel

_ZERO, _TINY = np.float32(0), np.float32(1e-20)

# %% tags=["parameters"]
seed = 4
tokens = 1024  # for the load experiment of 4.1.5: 512 or more, with fewer an expert's load is mostly chance

# %%
for name, value, least in (("seed", seed, 0), ("tokens", tokens, 512)):
    if type(value) is not int or value < least:
        raise ValueError(f"{name} is {value!r}: a whole number from {least} on is needed")


# %% [markdown]
# ## 4.1.1 By hand: the two best scores lose
#
# Four experts, two to choose. Logits $0, \ln 3, -\ln 3, \ln 3$ give the scores ½, ¾, ¼, ¾. The bias adds 0.3 to expert
# 0 and 0.6 to expert 2.
#
# | expert | $s$ | $b$ | $s+b$ | rank | $w$ |
# |---|---|---|---|---|---|
# | 0 | 0.50 | 0.3 | 0.80 | 2nd | 0.50 / 0.75 = 2/3 |
# | 1 | 0.75 | 0.0 | 0.75 | | |
# | 2 | 0.25 | 0.6 | 0.85 | 1st | 0.25 / 0.75 = 1/3 |
# | 3 | 0.75 | 0.0 | 0.75 | | |
#
# The bias decides *which* experts are chosen. Their weights follow from $s$ alone: here the first-ranked expert gets
# the smaller weight. With $K=3$, experts 1 and 3 tie for the last place, and the lower id takes it.

# %% [markdown]
# ## 4.1.2 The rule, in float64
#
# $$e_1,\dots,e_K = \text{the } K \text{ largest of } s + b \ (\text{equal: the lower id first}), \qquad
# w_j = \lambda\,\frac{s_{e_j}}{\sum_i s_{e_i} + 10^{-20}}$$
#
# A stable sort of $-(s+b)$ is exactly this: equal values stay in the order of their ids.

# %%
def sigmoid64(x):
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def route_reference(logits, bias, k, scale):
    "ids int64 [T, k] and weights float64 [T, k] in rank order."
    s = sigmoid64(logits)
    ids = np.argsort(-(s + bias), axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(s, ids, 1)
    return ids, chosen / (chosen.sum(1, keepdims=True) + 1e-20) * scale


# %%
hand_logits = np.log(np.array([[1, 3, 1 / 3, 3]], np.float32))
hand_bias = np.array([.3, 0, .6, 0], np.float32)
for k in (2, 3):
    ids, weights = route_reference(hand_logits, hand_bias, k, 1.0)
    print(f"k = {k}: ids {ids[0].tolist()}, weights {[f'{w:.4f}' for w in weights[0]]}")

# %% [markdown]
# **Why a bias at all?** A router that is trained by its output alone sends most tokens to a few experts: what is chosen
# often is trained often, and gets chosen more. Most experts would hardly ever work. A usual remedy is a second loss for
# unequal load, but its gradient pulls the scores away from what is best for the output. The other remedy is a number
# for each expert that is no trained weight. After each batch it goes up a little for an idle expert and down for a
# crowded one. The name of the tensor says *correction*, and the DeepSeek-V3 report (section 2.1.2) describes a router
# of this form. That K3 was trained this way is a guess; its arithmetic is not.
#
# **Why does it steer the choice and not the weight?** The bias says how crowded an expert is. That is no property of
# the token, so it must not change what the chosen experts contribute. In the table above, weights from $s + b$ would be
# 0.80/1.65 and 0.85/1.65. Expert 2, which fits the token worst, would speak loudest, only because it was idle. There is
# a second reason. The bias moves in jumps that no gradient has asked for. If it were in the weights, each jump would
# change the output for every token. In the choice alone it changes nothing, except for tokens for which two experts
# were nearly equal at the cut. The fixture below shows both:

# %%
given = load_file(ROOT / "fixtures/ops/router.safetensors")
nudge = np.float32(.001) * np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), 896)


def spread_weights(bias, weigh_with_bias):
    "Weights [24, 896] of the chosen experts, zero elsewhere."
    ids, _ = route_reference(given["logits"], bias, 16, 1.0)
    s = sigmoid64(given["logits"]) + (bias if weigh_with_bias else 0)
    w, dense = np.take_along_axis(s, ids, 1), np.zeros((24, 896))
    np.put_along_axis(dense, ids, w / w.sum(1, keepdims=True), 1)
    return dense


moved = {}
for name, inside in (("in the choice alone", False), ("in the weights, too", True)):
    before, after = spread_weights(given["bias"], inside), spread_weights(given["bias"] + nudge, inside)
    moved[inside] = int((before != after).any(1).sum())
    print(f"every bias moves by 0.001, {name}: the weights of {moved[inside]} of 24 tokens change")
assert moved[True] == 24 and moved[False] < 12


# %% [markdown]
# ## 4.1.3 One pass, in float32
#
# The kernel keeps a sorted list of the $K$ best so far. An expert enters only with a *strictly* larger $s+b$. So of two
# experts with equal $s+b$, the one with the lower id stays ahead. The sum of scores runs in rank order: one order, one
# result.

# %% tags=["export"]
@kernel
def _route(logits, bias, scale, best, ids, weights):
    "Write ids and weights; best float32 [k] is scratch, the k largest s + bias so far in falling order."
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


# %% [markdown]
# The function around the kernel refuses inputs whose faults the kernel could not notice ([4.1.7]).
#
# [4.1.7]: #4.1.7-What-it-refuses,-and-why-float32

# %% tags=["export"]
def route(logits: np.ndarray, bias: np.ndarray, k: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32 [T, k], weights float32 [T, k]) in rank order, for `logits` float32 [T, E] and `bias` float32 [E].

    With s = sigmoid(logits), the chosen experts are those with the k largest s + bias; of equal ones the lower id wins.
    An expert's weight is s / (sum of the chosen s + 1e-20) * scale. Raises ValueError where shapes do not fit, or for a
    logit or a bias that is not finite.
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


# %% [markdown]
# The table of [4.1.1], then `fixtures/ops/router`: 24 tokens over 896 experts, computed in float64 by PyTorch. Its ids
# ascend within a row, ours are in rank order, so both are sorted before they are compared. Three of its rows hold exact
# ties across the cut.
#
# [4.1.1]: #4.1.1-By-hand:-the-two-best-scores-lose

# %%
for k in (2, 3):
    ids, weights = route(hand_logits, hand_bias, k, 1.0)
    print(f"k = {k}: ids {ids[0].tolist()}, weights {[f'{w:.4f}' for w in weights[0]]}")
assert ids[0].tolist() == [2, 0, 1] and np.allclose(weights[0], [1 / 6, 1 / 3, 1 / 2], rtol=1e-6)

# %%
fixture = load_file(ROOT / "fixtures/ops/router.safetensors")
logits, bias = fixture["logits"], fixture["bias"]


def by_id(ids, weights):
    order = np.argsort(ids, 1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)


for scale, name in ((1.0, "weights"), (2.5, "weights_scaled_2_5")):
    ids, weights = by_id(*route(logits, bias, 16, scale))
    worst = np.abs(weights - fixture[name]).max() / fixture[name].max()
    print(f"scale {scale}: ids equal {np.array_equal(ids, fixture['ids'])}, weights within 1e-5: {worst < 1e-5}")
    assert np.array_equal(ids, fixture["ids"]) and worst < 1e-5

# %% [markdown]
# A token's routing must not depend on its neighbours. One call for 24 tokens and 24 calls for one give the same bytes.

# %%
whole = route(logits, bias, 16, 1.0)
steps = [route(logits[t:t + 1], bias, 16, 1.0) for t in range(len(logits))]
same = all(a.tobytes() == np.concatenate(b).tobytes() for a, b in zip(whole, zip(*steps)))
assert same
print("chunk and single steps, byte for byte:", same)


# %% [markdown]
# ## 4.1.4 Six wrong routers
#
# Each variant changes one thing, and each picks sixteen plausible experts. The gate compares weights spread over all
# 896 experts, so that a wrong choice and a wrong weight both count: 1e-5 of the largest weight is allowed.

# %%
def spread(ids, weights, E=896):
    "float64 [T, E]: the weights at their experts, zero elsewhere."
    dense = np.zeros((len(ids), E))
    np.put_along_axis(dense, ids, weights, 1)
    return dense


def variant(choose_by, weigh_by, renormalise=True, low_id_first=True):
    "A router that chooses by one array and weighs by another."
    key = choose_by if low_id_first else choose_by[:, ::-1]
    ids = np.argsort(-key, axis=1, kind="stable")[:, :16]
    ids = ids if low_id_first else 895 - ids
    w = np.take_along_axis(weigh_by, ids, 1)
    return spread(ids, w / w.sum(1, keepdims=True) if renormalise else w)


s = sigmoid64(logits)
e = np.exp(logits.astype(np.float64))
softmax = e / e.sum(1, keepdims=True)
variants = {
    "bias left in the weights": variant(s + bias, s + bias),
    "bias ignored": variant(s, s),
    "bias added to the logit": variant(sigmoid64(logits + bias), s),
    "softmax scores": variant(softmax + bias, softmax),
    "not renormalised": variant(s + bias, s, renormalise=False),
    "ties to the higher id": variant(s + bias, s, low_id_first=False),
}

# %%
truth = fixture["dense_weights"]


def off(dense):
    "Largest difference from the fixture, relative to its largest weight."
    return np.abs(dense - truth).max() / truth.max()


def gate(name, dense):
    assert off(dense) < 1e-5, f"{name}: {off(dense):.2g} of the largest weight, allowed 1e-5"
    print(f"{name:26} passes")


gate("as built", spread(*whole))
for name, dense in variants.items():
    print(f"{name:26} {'passes' if off(dense) < 1e-5 else 'fails'}, off by {off(dense):.2g}")
assert all(off(dense) > 1e-2 for dense in variants.values())

# %% [markdown]
# The first mistake is the quietest: the experts are right, only the proportions of their weights are not. Its failure,
# at the gate:

# %% tags=["raises-exception"]
gate("bias left in the weights", variants["bias left in the weights"])

# %% [markdown]
# The norm that follows in 4.2 hides a common factor of the weights. So "not renormalised" needs a second gate there.
#
# ## 4.1.5 Look: who is in, and why
#
# The chosen experts lie above the dashed line. A router that ignored the bias would cut with a vertical line instead.

# %%
t = 0
score, steered = s[t], s[t] + bias
chosen, plain = whole[0][t], np.argsort(-score, kind="stable")[:16]
brought = np.setdiff1d(chosen, plain)
fig, ax = plt.subplots()
ax.plot(score, steered, ".", ms=3, color="C5", alpha=.5, label="not chosen")
ax.plot(score[chosen], steered[chosen], "o", ms=4, color="C0", label="chosen")
ax.plot(score[brought], steered[brought], "o", ms=4, color="C1", label=f"chosen thanks to the bias ({len(brought)})")
ax.axhline(steered[chosen].min(), ls="--", lw=.8, color="C5")
ax.axvline(score[plain].min(), ls=":", lw=.8, color="C5")
ax.set(xlabel="score s", ylabel="s + bias", title=f"The bias replaces {len(brought)} of the 16 experts of token {t}")
ax.legend(loc="upper left")
plt.show()

# %% [markdown]
# Now the training of the bias, on a toy: 64 experts of unequal popularity, four to a token. After every batch the bias
# of a crowded expert goes down by 0.004, that of an idle one up. `route` is the code under test in both curves.

# %%
rng = np.random.default_rng(seed)
popular = (rng.normal(0, .7, 64) + rng.normal(0, 1, (tokens, 64))).astype(np.float32)


def load(b):
    return np.bincount(route(popular, b, 4, 1.0)[0].ravel(), minlength=64)


trained = np.zeros(64, np.float32)
for _ in range(300):
    trained += np.float32(.004) * np.sign(tokens * 4 / 64 - load(trained)).astype(np.float32)
before, after = load(np.zeros(64, np.float32)), load(trained)
mean = tokens * 4 / 64

# %%
order = np.argsort(-before)
fig, ax = plt.subplots()
ax.bar(range(64), before[order], color="C5", alpha=.6, label="choice by s")
ax.step(range(64), after[order], where="mid", color="C1", label="choice by s + bias")
ax.axhline(mean, ls="--", lw=.8, color="C0", label="equal share")
ax.set(xlabel="expert, busiest first", ylabel=f"tokens of {tokens}",
       title=f"A bias evens the load: busiest expert {before.max() / mean:.1f} times its share, "
             f"then {after.max() / mean:.1f}")
ax.legend()
plt.show()
assert before.max() > 2.5 * mean and after.max() < 1.3 * mean

# %% [markdown]
# ## 4.1.6 Make it fast
#
# The plain form sorts all 896 to learn 16. In a random order, expert number $i$ is among the best $K$ of the first $i$
# with chance $K/i$. So a sorted list of $K$ changes only $K(1 + H_{896} - H_K)$ times, where $H_i = 1 + \tfrac12 +
# \dots + \tfrac1i$. The fixture agrees:

# %%
harmonic = np.cumsum(1 / np.arange(1, 897))
expected = 16 * (1 + harmonic[895] - harmonic[15])
steered = (s + bias).astype(np.float32)
entered = [sum(i < 16 or row[i] > np.partition(row[:i], -16)[-16] for i in range(896)) for row in steered]
print(f"entries into the list, of 896: expected {expected:.0f}, in the fixture {np.mean(entered):.0f} a token")
assert abs(np.mean(entered) - expected) < 10


# %% [markdown]
# Each version passes the fixture before it is timed. "Scratch" is what it writes besides the result: the table of
# scores, its sum with the bias and the order, or sixteen numbers.

# %%
def route_sort(logits, bias, k, scale):
    "The reference in float32."
    s = 1 / (1 + np.exp(-logits))
    ids = np.argsort(-(s + bias), axis=1, kind="stable")[:, :k].astype(np.int32)
    w = np.take_along_axis(s, ids, 1)
    return ids, w / (w.sum(1, keepdims=True) + np.float32(1e-20)) * np.float32(scale)


versions = [("sort, float64", route_reference, 896 * (8 + 8 + 8)), ("sort, float32", route_sort, 896 * (4 + 4 + 8)),
            ("one pass, list of 16", route, 16 * 4)]
for name, version, _ in versions:
    assert off(spread(*version(logits, bias, 16, 1.0))) < 1e-5, name

# %% tags=["nbval-ignore-output"]
for name, version, scratch in versions:
    times = []
    for _ in range(50):
        began = time.perf_counter()
        version(logits, bias, 16, 1.0)
        times.append(time.perf_counter() - began)
    print(f"{name:22} {np.median(times) / len(logits) * 1e6:6.1f} us a token, {scratch:6,} bytes of scratch a token")

# %% [markdown]
# ## 4.1.7 What it refuses, and why float32
#
# Every comparison with NaN is false. The kernel skips an expert only where `b <= best[k - 1]` is true, so it would not
# skip a NaN: the NaN would take the last place of the list. From then on every later expert passes the test, too, and
# takes that place. The last of the sixteen would be the wrong expert, and nothing would show it. `route` refuses NaN
# and infinity, and says where they are.

# %%
bad = logits.copy()
bad[3, 700] = np.nan
for arguments in ((bad, bias, 16, 1.0), (logits, bias[:-1], 16, 1.0), (logits, bias, 897, 1.0)):
    try:
        route(*arguments)
    except ValueError as error:
        print(error)


# %% [markdown]
# The released code computes the logits in float32 whatever the activations are. What if they were rounded to bf16, with
# eight bits of mantissa? Somewhere the 16th and the 17th expert are closer than that, and the token goes to another
# expert:

# %%
def to_bf16(x):
    "Rounded to the nearest bf16 (ties to even), as float32."
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


rounded = np.sort(route(to_bf16(logits), bias, 16, 1.0)[0], axis=1)
changed = int((rounded != fixture["ids"]).any(1).sum())
ranked = -np.sort(-(s + bias), axis=1)
gap = ranked[:, 15] - ranked[:, 16]
gap[fixture["tie_rows"]] = np.inf
print(f"rerouted by bf16 logits: {changed} of {len(logits)} tokens; closest cut outside the ties: {gap.min():.1e}")
assert changed > 0

# %% [markdown]
# ## 4.1.8 Cost for K3

# %%
layers = 92
expert_bytes = 3 * 3072 * 3584 * 17 // 32  # three matrices, 16 bytes of codes and one of scale per 32 weights
all_bytes, chosen_bytes = (n * layers * expert_bytes for n in (896, 16))
print(f"router matrix: {896 * 7168 * 2:,} bytes a layer")
print(f"    {896 * 7168 * 2 * layers / 1e9:.1f} GB a token")  # claim router
print(f"all experts {all_bytes / 1e9:,.0f} GB")  # claim all
print(f"    at 7 GB/s {all_bytes / 7e9:.0f} s")  # claim all seconds
print(f"{16 / 896:.1%} of the experts are chosen")  # claim few
print(f"the chosen ones {chosen_bytes / 1e9:.1f} GB")  # claim chosen
print(f"    at 7 GB/s {chosen_bytes / 7e9:.1f} s")  # claim chosen seconds
print(f"the router's own result: {16 * 8} bytes a token and layer")

# %% [markdown]
# ## 4.1.9 Which words go to which expert
#
# Nobody tells an expert what it is for. `fixtures/stories` is a small K3 that was trained to answer questions about
# very short stories: 32 experts a layer, of which each word gets four. We let it read 60 stories that it has never
# seen, and count for each kind of word which share of these words each expert gets. If the router looked at nothing,
# every share would be 4 / 32.

# %%
import sys

sys.path.insert(0, str(ROOT / "book"))
import learned

reader = learned.Reader()
readings = [reader.read(text) for text in learned.held_out_texts(1, 15)]
kinds = list(learned.WORDS)
L = 4
words = np.array([kinds.index(learned.kind_of(token)) for reading in readings for token in reading.tokens])
chosen = np.concatenate([reading.experts[L] for reading in readings])
share = np.array([np.bincount(chosen[words == i].ravel(), minlength=32) / (words == i).sum()
                  for i in range(len(kinds))])
favourite = share.max(1)  # of each kind's words, those that its favourite expert gets
assert (favourite > .5).sum() > len(kinds) / 2
order = np.argsort(share.argmax(0) - share.max(0), kind="stable")  # an expert stands at the kind it gets most of

# %%
fig, ax = plt.subplots(figsize=(8, 3.6))
image = ax.imshow(share[:, order], vmin=0, vmax=1, aspect="auto")
ax.set(yticks=range(len(kinds)), yticklabels=kinds, xticks=range(32), xlabel=f"expert of layer {L}",
       title=f"{(favourite > .5).sum()} of {len(kinds)} kinds of words go to one expert more often than not")
ax.set_xticklabels(order, rotation=90)
fig.colorbar(image, label="share")
plt.show()

# %% [markdown]
# The same scores without the bias: the load of every expert in these stories, chosen with and without it. During the
# training the bias moved by 0.001 a step towards experts that got less than their share.

# %%
alone = np.concatenate([reading.unsteered[L] for reading in readings])
with_bias, without = (np.bincount(ids.ravel(), minlength=32) / len(words) for ids in (chosen, alone))
order = np.argsort(-without, kind="stable")
busiest, then = without.max() * 32 / 4, with_bias.max() * 32 / 4
assert then < busiest
fig, ax = plt.subplots()
ax.bar(range(32), 100 * without[order], color="C5", alpha=.6, label="choice by s")
ax.step(range(32), 100 * with_bias[order], where="mid", color="C1", label="choice by s + bias")
ax.axhline(100 * 4 / 32, ls="--", lw=.8, color="C0", label="equal share")
ax.set(xlabel=f"expert of layer {L}, busiest without bias first", ylabel="words (%)",
       title=f"The bias evens the load: busiest expert {busiest:.1f} times its share, then {then:.1f}")
ax.legend()
plt.show()
print(f"the bias changes the experts of {(np.sort(chosen) != np.sort(alone)).any(1).mean():.0%} of the words")

# %% [markdown]
# What the router and the experts are worth to this model: `python fixtures/stories/listen.py --broken` makes one thing
# wrong at a time and counts right answers.

# %%
print(learned.what_breaks("router: bias in the weights", "router: no bias", "router: always the first experts",
                          "no routed experts", "no shared experts"))

# %% [markdown]
# ## Summary
#
# - Choose by $s + b$, weigh by $s$: the bias corrects the load of the experts and never reaches the output.
# - Ties go to the lower id; the strict comparison in the kernel is that rule.
# - Logits and scores stay float32; a logit in bf16 sends tokens to other experts.
#
# ## Exercises
#
# Answers: [exercises of part 4](../answers/04_moe_router.ipynb).
#
# 1. The weights of a token sum to $\lambda$, except when? Find finite logits for which `route` returns sixteen zeros.
# 2. Write `smallest_bias(logits, bias, e, k)`: how much must be added to `bias[e]` for token 0 to choose expert `e`?
#    Test it by adding slightly less and slightly more.
# 3. Permute the experts, route, and permute back. For which rows of the fixture does the result change, and why only
#    those?
#
# Next: [4.2](02_moe.ipynb) sends each token to its sixteen experts and adds up their answers.
