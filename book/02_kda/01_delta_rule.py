# %% [markdown]
# # 2.1 From softmax attention to a memory that corrects itself
#
# Attention lets a token read what earlier tokens wrote. This chapter starts from the usual kind, softmax attention,
# which keeps every key and every value, and derives step by step the rule of Kimi Delta Attention (KDA), which keeps
# one matrix. Every step answers a fault of the step before it. At the end you can derive the rule of KDA on paper, in
# the form for one token and in the form for many tokens at once, and you can say why this engine uses the first.
#
# > **Without it:** keys and values for 69 layers take 6,783 GB after a million tokens,<!--claim grows--> and every new
# > token reads them all.
# >
# > **With it:** the matrices of these layers take 0.43 GB,<!--claim constant--> after any number of tokens. (The
# > whole layers keep 0.46 GB:<!--claim history--> chapter [2.2] adds a short convolution and its last inputs.)
#
# Needs vectors, matrices, a gradient. Runs in ten seconds. Exports nothing: chapter [2.2] builds the layer.
#
# [1.6 Exponential, tanh, sigmoid and RMSNorm with the same bits everywhere](../01_mxfp4/06_functions.ipynb) ·
# [contents](../README.md) ·
# [2.2 Kimi Delta Attention: a memory that never grows](02_kda.ipynb)
#
# [2.2]: 02_kda.ipynb

# %%
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from safetensors.numpy import load_file

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

K3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model
schematics.where(K3, "kda")

# %% [markdown]
# | symbol | meaning | shape in K3 | in code |
# |---|---|---|---|
# | $t$, $i$ | a token, and a token before it | | `t`, `i` |
# | $q, k, v$ | query, key and value of a token, in one head | 128 each | `q`, `k`, `v` |
# | $d$ | width of a head | 128 | `d` |
# | $o$ | what the query reads: the output of the head | 128 | `o` |
# | $a_i$ | weight of token $i$ in a softmax | one for each earlier token | `a` |
# | $S$ | state: a matrix whose rows are key channels, whose columns are value channels | 128 × 128 | `S` |
# | $\hat v = S^\top k$ | recalled value: what the state returns for a key | 128 | `recall(S, k)` |
# | $\beta$ | write strength, 0 to 1 | one number | `beta` |
# | $\alpha$ | what each key channel keeps from one token to the next, 0 to 1 | 128 | `alpha` |
# | $\delta = \beta\,(v - \hat v)$ | the correction that is written | 128 | `delta` |
# | $\Gamma_t$ | product of $\alpha_1 \dots \alpha_t$, channel by channel | 128 | `kept` |
# | $T$ | tokens of a chunk | | `len(q)` |
# | $S_0$ | state before the chunk | 128 × 128 | `S` |
# | $V$, $\tilde K$, $\Delta$ | with the rows $v_t$, $\Gamma_t \odot k_t$ and $\delta_t$ | tokens × 128 | `v`, `kept * k`, `delta` |
# | $G$ | how the tokens of a chunk disturb each other, strictly lower triangular | tokens × tokens | `G` |
#
# All vectors are columns. An index of a vector names a token: $k_i$ is the key of token $i$. Only [2.1.4], which is
# about one token, needs the channels of a key and of a value; there the indices $i$, $j$ and $l$ count channels. $k
# v^\top$ is a matrix: its row $i$ and column $j$ hold the product of channel $i$ of $k$ and channel $j$ of $v$. $k^\top
# q = k \cdot q$ is a number.
#
# [2.1.4]: #2.1.4-The-repair:-one-step-of-gradient-descent

# %% tags=["parameters"]
seed = 1
d = 128  # width of a head in the experiments


# %% [markdown]
# ## 2.1.1 Softmax attention keeps every pair
#
# Each token makes a key, a value and a query. The query of token $t$ is compared with the keys of all tokens up to $t$,
# and the output is an average of their values:
#
# $$o_t = \sum_{i \le t} a_i\, v_i, \qquad a = \mathrm{softmax}_{i \le t}\Big(\frac{k_i \cdot q_t}{\sqrt d}\Big)$$
#
# The exponential in the softmax makes all weights positive, and one large score can take nearly all of the weight. So a
# query can pick out one token among thousands.

# %%
def softmax_attention(q, k, v):
    "Outputs [T, d] of one head for q, k, v [T, d]: token t reads the tokens 0..t."
    out = []
    for t in range(len(q)):
        scores = k[:t + 1] @ q[t] / np.sqrt(q.shape[1])
        a = np.exp(scores - scores.max())
        out.append(a / a.sum() @ v[:t + 1])
    return np.array(out)


# %% [markdown]
# The fault is the cost. The next query may ask for any token, so every key and every value must be kept. Here are the
# bytes for the 69 layers of K3 in which KDA takes the place of softmax attention:

# %%
layers, heads, width = len(K3.kda_layers), K3.kda_num_heads, K3.kda_head_dim
a_token = layers * heads * 2 * width * 4  # keys and values, float32
print(f"keys and values: {a_token / 1e6:.2f} MB for each token")
print(f"after a million tokens: {a_token * 1e6 / 1e9:,.0f} GB")  # claim grows
print(f"one matrix a head: {layers * heads * width * width * 4 / 1e9:.2f} GB, always")  # claim constant
history = layers * 3 * heads * width * (K3.kda_conv_kernel - 1) * 4  # the last inputs of q, k and v, of chapter 2.2
print(f"    with the convolutions {(layers * heads * width * width * 4 + history) / 1e9:.2f} GB")  # claim history


# %% [markdown]
# ## 2.1.2 Without the exponential, the sum can be carried along
#
# Leave the softmax out and weigh each value by the plain product of query and key. Then the query can be taken out of
# the sum:
#
# $$o_t = \sum_{i \le t} v_i\,(k_i^\top q_t) = \Big(\sum_{i \le t} k_i v_i^\top\Big)^{\!\top} q_t = S_t^\top q_t,
# \qquad S_t = S_{t-1} + k_t v_t^\top$$
#
# This is *linear attention*. The sum over all tokens has become a matrix $S$ of $d \times d$ numbers, and a new token
# only adds its product $k v^\top$. No key and no value is kept. To write is to add $k v^\top$; to read is to compute
# $S^\top q$. The step that takes $q_t$ out of the sum is not possible with an exponential around $k_i^\top q_t$: there
# each new query needs all keys again.

# %%
def linear_attention(q, k, v):
    S, out = np.zeros((k.shape[1], v.shape[1])), []
    for t in range(len(q)):
        S = S + np.outer(k[t], v[t])
        out.append(S.T @ q[t])
    return np.array(out)


rng = np.random.default_rng(seed)
q, k, v = rng.standard_normal((3, 10, 16))
listed = np.array([sum((k[i] @ q[t]) * v[i] for i in range(t + 1)) for t in range(10)])
print("sum over tokens equals one matrix:", np.allclose(linear_attention(q, k, v), listed))
print("and softmax attention is something else:", not np.allclose(softmax_attention(q, k, v), listed))
assert np.allclose(linear_attention(q, k, v), listed)


# %% [markdown]
# ## 2.1.3 Its fault: pairs disturb each other
#
# Ask for a key that was written, $q = k_j$, and let all keys have length 1:
#
# $$S^\top k_j = \sum_i v_i\,(k_i^\top k_j) = \underbrace{v_j}_{\text{what we want}} +
# \underbrace{\sum_{i \ne j} (k_i^\top k_j)\, v_i}_{\text{interference}}$$
#
# The answer is exact only if the other keys are orthogonal to $k_j$. At most $d$ keys can be orthogonal to each other.
#
# How large is the interference for random keys? The square of $k_i^\top k_j$ is $1/d$ on average: the squares of a unit
# vector's $d$ components sum to 1, and no direction is preferred. So each of the $n - 1$ other pairs, with a value of
# length 1, contributes a vector whose squared length is $1/d$. These vectors have unrelated directions, so their
# squared lengths add up: the interference has length $\sqrt{(n-1)/d}$. It is as large as the value itself when $n$
# reaches $d + 1$, and it grows without end. The worst case is a key that comes a second time with a new value: the sum
# returns both values, added. A softmax would give the largest score most of the weight; a plain sum cannot.

# %%
def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def recall(S, k):
    "The recalled value S^T k."
    return S.T @ k


def plain_sum(S, k, v, beta=1.0):
    return S + beta * np.outer(k, v)


keys, values = unit(rng.standard_normal((2, 3 * d, d)))


def errors(write, n):
    "Length of the error for each of the first n pairs, after all n were written."
    S = np.zeros((d, d))
    for i in range(n):
        S = write(S, keys[i], values[i])
    return np.linalg.norm(keys[:n] @ S - values[:n], axis=1)


for n in (16, 64, 129, 384):
    print(f"{n:3} pairs: mean error {errors(plain_sum, n).mean():.2f}, expected {np.sqrt((n - 1) / d):.2f}")
assert abs(errors(plain_sum, 129).mean() - 1) < .1


# %% [markdown]
# ## 2.1.4 The repair: one step of gradient descent
#
# A memory should return $v$ when it is asked for $k$. Say so as a loss, and improve $S$ by a step against its gradient.
#
# $$\mathcal L(S) = \tfrac12\, \lVert v - S^\top k \rVert^2 = \tfrac12 \sum_j \Big(v_j - \sum_i S_{ij} k_i\Big)^{\!2}$$
#
# The entry $S_{ij}$ occurs only in the term of column $j$, with the factor $k_i$:
#
# $$\frac{\partial \mathcal L}{\partial S_{ij}} = -k_i \Big(v_j - \sum_l S_{lj} k_l\Big),
# \qquad \nabla \mathcal L = -\,k\,(v - S^\top k)^\top$$
#
# A step of length $\beta$ against the gradient is the **delta rule**:
#
# $$S \leftarrow S - \beta\, \nabla\mathcal L = S + \beta\, k\,(v - S^\top k)^\top$$
#
# In words: ask the memory what it holds under $k$, and write only the difference from $v$. Linear attention is a step,
# too, on the loss $-v^\top S^\top k$. That loss has no minimum, so $S$ can grow for ever.
# The first cell checks the gradient: it moves each entry of a small $S$ a little and looks at the loss.

# %%
def delta_rule(S, k, v, beta=1.0):
    return S + beta * np.outer(k, v - recall(S, k))


def loss(S, k, v):
    return ((v - recall(S, k)) ** 2).sum() / 2


S, k1, v1, h = rng.standard_normal((4, 3)), rng.standard_normal(4), rng.standard_normal(3), 1e-6
slopes = np.zeros_like(S)
for i, j in np.ndindex(S.shape):
    moved = np.zeros_like(S)
    moved[i, j] = h
    slopes[i, j] = (loss(S + moved, k1, v1) - loss(S - moved, k1, v1)) / (2 * h)
print("gradient by formula and by difference agree:", np.allclose(-np.outer(k1, v1 - recall(S, k1)), slopes))
assert np.allclose(-np.outer(k1, v1 - recall(S, k1)), slopes)

# %% [markdown]
# How large may the step be? Ask again for the same key after the step:
#
# $$v - S_{\text{new}}^\top k = v - S^\top k - \beta\,(v - S^\top k)\, k^\top k
# = (1 - \beta\, k^\top k)\,(v - S^\top k)$$
#
# With $\lVert k \rVert = 1$ the error shrinks by the factor $1 - \beta$. At $\beta = 1$ nothing of it is left; at
# $\beta = \tfrac12$ half of it is. With keys of another length the same $\beta$ means another step: a key whose *mean*
# square is 1 has $k^\top k = 128$, and with $\beta = 1$ each write would multiply the error by $-127$. Therefore KDA
# scales every key to length 1 ([2.2.3]).
#
# By hand, with $k = (0.6, 0.8)$, whose length is 1, and $\beta = 1$. First $v = (1, 2)$, then, under the same key,
# $v = (3, 0)$:
#
# | step | recalled $\hat v$ | error | $S$ after the write |
# |---|---|---|---|
# | write $(1, 2)$ | $(0, 0)$ | $(1, 2)$ | rows $(0.6, 1.2)$ and $(0.8, 1.6)$ |
# | write $(3, 0)$ | $(1, 2)$ | $(2, -2)$ | rows $(1.8, 0)$ and $(2.4, 0)$ |
# | read | $(3, 0)$ | | a plain sum returns $(4, 2)$ |
#
# [2.2.3]: 02_kda.ipynb#2.2.3-Keys-of-length-one

# %%
hand_k, S, total = np.array([.6, .8]), np.zeros((2, 2)), np.zeros((2, 2))
for value in ([1., 2], [3., 0]):
    S, total = delta_rule(S, hand_k, value), plain_sum(total, hand_k, value)
    print("S", S.round(3).tolist(), "  recalled", recall(S, hand_k).round(3).tolist())
print("plain sum recalls", recall(total, hand_k).round(3).tolist())
assert np.allclose(recall(S, hand_k), [3, 0]) and np.allclose(recall(total, hand_k), [4, 2])

# %% [markdown]
# The next figure repeats the experiment of [2.1.3] with both rules. The newest pair is exact under the delta rule.
# Older pairs are disturbed by later writes here, too, but less. And the disturbance has a limit. A write removes the
# part of $S$ along $k$, which for a random direction is $1/d$ of $\lVert S \rVert^2$ on average, and adds $\lVert v
# \rVert^2 = 1$. So $\lVert S \rVert^2$ comes to rest near $d$, where both are equal. Under the plain sum it grows by 1
# with every write.
#
# [2.1.3]: #2.1.3-Its-fault:-pairs-disturb-each-other

# %%
counts = [1, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384]
rules = {"plain sum": plain_sum, "delta rule": delta_rule}
found = {name: np.array([(e.mean(), e[-1]) for e in (errors(rule, n) for n in counts)]) for name, rule in rules.items()}
fig, ax = plt.subplots()
for (name, curves), color in zip(found.items(), ("C1", "C0")):
    ax.plot(counts, curves[:, 0], "o-", ms=3, color=color, label=f"{name}, all pairs")
    ax.plot(counts, curves[:, 1], "--", color=color, label=f"{name}, newest pair")
ax.axvline(d, lw=.8, ls=":", color="C5")
ax.set(xlabel=f"pairs written into a {d} × {d} state", ylabel="length of the error, values have 1", ylim=(0, 2))
ax.set_title("Correcting keeps the newest pair exact and the others closer")
ax.legend(ncol=2, loc="upper left")
plt.show()
assert found["delta rule"][:, 1].max() < 1e-12 and found["delta rule"][-1, 0] < found["plain sum"][-1, 0]

# %%
for name, rule in rules.items():
    S = np.zeros((d, d))
    for _ in range(8 * d):
        S = rule(S, *unit(rng.standard_normal((2, d))))
    print(f"{name}: after {8 * d} writes the squared length of S is {(S * S).sum() / d:.1f} times {d}")


# %% [markdown]
# ## 2.1.5 Forgetting: each key channel fades at its own speed
#
# The delta rule removes an old value only when its key comes again. A pair whose key never comes again stays, and
# disturbs all later pairs. A state of $d \times d$ has room for $d$ exact pairs, and a text has many more tokens. So
# before each write the state fades: each of its rows, which belongs to one key channel, is multiplied by a number of
# its own between 0 and 1. The layer computes these $d$ numbers, the vector $\alpha$, from the token ([2.2.4]).
#
# Why one number for each channel and not one for the whole state? With one number, everything is forgotten at one
# speed. With one for each channel, a head can keep some directions for a whole document and use others for a few
# words. KDA is the delta rule with such a decay:
#
# $$S \leftarrow \mathrm{diag}(\alpha)\, S, \qquad S \leftarrow S + \beta\, k\, (v - S^\top k)^\top$$
#
# Put the first step into the second, and write $S^\top k$ out. This is the **closed form**:
#
# $$S_t = \mathrm{diag}(\alpha)S_{t-1} - \beta\, k k^\top \mathrm{diag}(\alpha) S_{t-1} + \beta\, k v^\top
# = \big(I - \beta\, k k^\top\big)\, \mathrm{diag}(\alpha)\, S_{t-1} + \beta\, k\, v^\top$$
#
# The matrix $I - \beta k k^\top$ shrinks one direction, that of $k$, by $1 - \beta$, and leaves all directions
# orthogonal to $k$ as they are.
#
# **How large can the state become?** After a write the state returns under $k$ the average $(1-\beta)\,\hat v + \beta
# v$, which is no longer than the longer of $\hat v$ and $v$. Orthogonal to $k$ nothing is added. So a token raises the
# squared length $\lVert S \rVert^2$ by $\beta \lVert v \rVert^2$ at most. A plain sum has no such bound: written $n$
# times, the same pair of length 1 gives a state of length $n$. With decay there is a limit, too. Begin with an empty
# state. If every channel keeps at most $\alpha_{\max} < 1$ and no value is longer than 1, then $\lVert S \rVert^2$
# never exceeds $1 / (1 - \alpha_{\max}^2)$: there one fading takes away what one write can add.
#
# [2.2.4]: 02_kda.ipynb#2.2.4-How-fast-a-channel-forgets

# %%
def step(S, k, v, alpha, beta):
    "KDA for one token: fade, recall, write the correction."
    S = alpha[:, None] * S
    return S + np.outer(k, beta * (v - recall(S, k)))


def closed(S, k, v, alpha, beta):
    return (np.eye(len(k)) - beta * np.outer(k, k)) @ np.diag(alpha) @ S + beta * np.outer(k, v)


def tokens(T, d, fastest=.5):
    "Random q, k, v, alpha [T, d] and beta [T]; keys and queries of length 1."
    q, k, v = rng.standard_normal((3, T, d))
    return unit(q), unit(k), v, rng.uniform(fastest, 1, (T, d)), rng.uniform(0, 1, T)


def recurrent(q, k, v, alpha, beta, S):
    "Outputs [T, d] and the last state, token by token."
    out = []
    for t in range(len(q)):
        S = step(S, k[t], v[t], alpha[t], beta[t])
        out.append(recall(S, q[t]) / np.sqrt(q.shape[1]))
    return np.array(out), S


q, k, v, alpha, beta = tokens(40, 16)
S = S_closed = np.zeros((16, 16))
for t in range(40):
    before = (S * S).sum()
    S, S_closed = step(S, k[t], v[t], alpha[t], beta[t]), closed(S_closed, k[t], v[t], alpha[t], beta[t])
    assert (S * S).sum() <= before + beta[t] * v[t] @ v[t]
print("step by step equals the closed form:", np.allclose(S, S_closed, atol=1e-12))
assert np.allclose(S, S_closed, atol=1e-12)
S, total, k1, v1 = np.zeros((16, 16)), np.zeros((16, 16)), unit(k[0]), unit(v[0])
for _ in range(100):
    S, total = step(S, k1, v1, np.ones(16), .5), plain_sum(total, k1, v1)
print(f"the same pair 100 times: length of S {np.linalg.norm(S):.2f}, of a plain sum {np.linalg.norm(total):.2f}")

# %% [markdown]
# The rules that the literature knows differ in two choices: what is written, and how the state fades.
#
# | | write $k v^\top$ | write the error |
# |---|---|---|
# | no decay | linear attention | DeltaNet |
# | one $\alpha$ for the whole state | RetNet (fixed), Mamba-2 | Gated DeltaNet |
# | one $\alpha$ for each key channel | gated linear attention | **KDA** (Kimi Linear report) |
#
# An experiment shows what decay is for. A head is told 16 facts, whose keys use the first half of the channels. Then
# 600 pairs of passing interest come, whose keys use the second half. At the end we ask for the facts and for the last
# 16 pairs: without decay, with the same decay in all channels, and with decay in the second half alone.

# %%
facts = np.eye(d)[:16]
passing = unit(np.concatenate([np.zeros((600, d // 2)), rng.standard_normal((600, d // 2))], axis=1))
asked, told = np.concatenate([facts, passing]), unit(rng.standard_normal((616, d)))
second_half = np.arange(d) >= d // 2


def errors_after(alpha):
    "Mean error of the facts, and of the last 16 pairs."
    S = np.zeros((d, d))
    for key, value in zip(asked, told):
        S = step(S, key, value, alpha, 1.0)
    error = np.linalg.norm(asked @ S - told, axis=1)
    return error[:16].mean(), error[-16:].mean()


decays = {"no decay": np.ones(d), "0.99 in all channels": np.full(d, .99),
          "0.99 in the second half": np.where(second_half, .99, 1)}
table = {name: errors_after(alpha) for name, alpha in decays.items()}
for name, (of_facts, of_last) in table.items():
    print(f"{name:24} error of the facts {of_facts:.2f}, of the last 16 pairs {of_last:.2f}")
none, everywhere, chosen = table.values()
assert chosen[0] < 1e-9 and everywhere[0] > .99  # claim facts
assert chosen[1] < none[1]  # claim last


# %% [markdown]
# One decay for all channels erases the facts.<!--claim facts--> A decay for each channel keeps them, and the last pairs
# are recalled somewhat better than without decay,<!--claim last--> because less of the 584 pairs before them is left.
#
# ## 2.1.6 Many tokens at once: the chunkwise form
# This engine does not use this form ([2.1.7] says why), and no later chapter needs it. Training and GPUs do: the
# recurrence takes tokens one after another. A GPU prefers a few large products to many small steps. So there is a
# second form, which takes a chunk of $T$ tokens at once. It needs no new idea, only the recurrence unrolled.
#
# Let $S_0$ be the state before the chunk, and $\delta_i = \beta_i\,(v_i - \hat v_i)$ the correction that token $i$
# writes under its key. The recurrence is then
#
# $$S_t = \mathrm{diag}(\alpha_t)\, S_{t-1} + k_t\, \delta_t^\top$$
#
# **Unroll it.** A correction that token $i$ has written fades at each later token, up to $t$. Row by row, what is left
# of it is the product $\alpha_{i+1} \odot \dots \odot \alpha_t$. With $\Gamma_t = \alpha_1 \odot \dots \odot \alpha_t$
# that is the quotient $\Gamma_t / \Gamma_i$, channel by channel:
#
# $$S_t = \mathrm{diag}(\Gamma_t)\, S_0 + \sum_{i \le t} \mathrm{diag}(\Gamma_t / \Gamma_i)\, k_i\, \delta_i^\top$$
#
# **Recall.** Token $t$ recalls from the state after the fading and before its own write. That is the same sum without
# its last term. Transpose it and apply it to $k_t$:
#
# $$\hat v_t = S_0^\top (\Gamma_t \odot k_t)
# + \sum_{i < t} \big(k_i^\top \mathrm{diag}(\Gamma_t / \Gamma_i)\, k_t\big)\, \delta_i$$
#
# **Solve.** Put this into $\delta_t = \beta_t\,(v_t - \hat v_t)$. Only the corrections are unknown, and each depends on
# earlier ones alone. So they are the solution of a triangular system. Let the rows of $\Delta$, $V$ and $\tilde K$ be
# $\delta_t$, $v_t$ and $\Gamma_t \odot k_t$, and let
#
# $$G_{ti} = \beta_t\; k_i^\top \mathrm{diag}(\Gamma_t / \Gamma_i)\, k_t \quad \text{for } i < t, \text{ else } 0$$
#
# Then, with all $\delta$ on the left,
#
# $$(I + G)\, \Delta = \mathrm{diag}(\beta)\,(V - \tilde K S_0)$$
#
# **Read.** With $\Delta$ known, everything else is a product of matrices. KDA divides its output by $\sqrt d$, as
# softmax attention divides its scores:
#
# $$o_t = \frac{1}{\sqrt d}\Big( S_0^\top (\Gamma_t \odot q_t)
# + \sum_{i \le t} \big(k_i^\top \mathrm{diag}(\Gamma_t / \Gamma_i)\, q_t\big)\, \delta_i \Big), \qquad
# S_T = \mathrm{diag}(\Gamma_T)\, S_0 + \sum_{i \le T} \mathrm{diag}(\Gamma_T / \Gamma_i)\, k_i\, \delta_i^\top$$
#
# [2.1.7]: #2.1.7-Why-this-engine-takes-the-tokens-one-by-one

# %%
def scores(a, k, kept):
    "float [T, T]: a_t^T diag(kept_t / kept_i) k_i for i <= t, else 0."
    fade = kept[:, None] / kept  # [T, T, d]; entries with i > t are not used
    return np.tril(np.einsum("td,tid,id->ti", a, fade, k))


def chunk(q, k, v, alpha, beta, S):
    "The recurrence over a whole chunk, without a loop over tokens."
    kept = np.cumprod(alpha, axis=0)
    G = beta[:, None] * np.tril(scores(k, k, kept), -1)
    delta = np.linalg.solve(np.eye(len(k)) + G, beta[:, None] * (v - (kept * k) @ S))
    out = (kept * q) @ S + scores(q, k, kept) @ delta
    return out / np.sqrt(q.shape[1]), kept[-1][:, None] * S + (kept[-1] / kept * k).T @ delta


# %% [markdown]
# The first cell compares outputs and state of both forms, from a random state, for one chunk and for three in a row.
# The second compares the chunkwise form with values that another library computed by the recurrence.

# %%
def check(name, found, expected, tolerance=1e-10):
    far = np.abs(found - expected).max() / np.abs(expected).max()
    assert far < tolerance, f"{name}: {far:.2g} of the largest, allowed {tolerance}"
    print(f"{name}: within {tolerance} of the largest")


chunk_of_24, start = tokens(24, 16), rng.standard_normal((16, 16))
o, S = recurrent(*chunk_of_24, start)
o_chunk, S_chunk = chunk(*chunk_of_24, start)
check("outputs of a chunk of 24", o_chunk, o)
check("state after it", S_chunk, S)
parts, S_parts = [], start
for a in range(0, 24, 8):
    o_part, S_parts = chunk(*(x[a:a + 8] for x in chunk_of_24), S_parts)
    parts.append(o_part)
check("three chunks of 8", np.concatenate(parts), o)

# %%
fixture = load_file(ROOT / "fixtures/ops/kda_recurrent.safetensors")
for head in range(3):
    inputs = [fixture[n][:, head].astype(np.float64) for n in ("q", "k", "v", "g", "beta")]
    inputs[3] = np.exp(inputs[3])  # the fixture holds the logarithm of alpha
    o_chunk, _ = chunk(*inputs, fixture["initial_state"][head].astype(np.float64))
    check(f"fixture, head {head}", o_chunk, fixture["o_s0"][:, head], 1e-5)


# %% [markdown]
# The tempting short cut leaves the triangular solve out. Then all tokens of the chunk recall from $S_0$ and do not see
# each other's writes. The gate shows it:

# %% tags=["raises-exception"]
def chunk_without_solve(q, k, v, alpha, beta, S):
    kept = np.cumprod(alpha, axis=0)
    delta = beta[:, None] * (v - (kept * k) @ S)  # WRONG: tokens of one chunk correct each other
    return ((kept * q) @ S + scores(q, k, kept) @ delta) / np.sqrt(q.shape[1])


check("outputs without the solve", chunk_without_solve(*chunk_of_24, start), o)

# %% [markdown]
# **Two thin matrices: the WY form.** This paragraph may be skipped, too. It says where a name in the literature comes
# from. Without decay $\tilde K$ has the keys themselves as rows. Let all values be 0. The closed form of [2.1.5] then
# says that the chunk multiplies $S_0$ by $(I - \beta_T k_T k_T^\top) \cdots (I - \beta_1 k_1 k_1^\top)$, a product of
# $T$ matrices of $d \times d$. The system above says $\Delta = -\Omega S_0$ with $\Omega = (I + G)^{-1}\,
# \mathrm{diag}(\beta)\, \tilde K$, and the unrolled state is $S_T = S_0 + \tilde K^\top \Delta = (I - \tilde K^\top
# \Omega)\, S_0$. So the whole product needs only two thin matrices of $T \times d$, $\tilde K$ and $\Omega$. Numerical
# algebra writes products of Householder reflections in this way. There the matrix of the vectors (here the keys) is
# called $Y$, and the one that is computed from them (here $\Omega$, up to its sign) is called $W$.
#
# [2.1.5]: #2.1.5-Forgetting:-each-key-channel-fades-at-its-own-speed

# %%
_, k, _, _, beta = chunk_of_24
product = np.eye(16)
for key, b in zip(k, beta):
    product = (np.eye(16) - b * np.outer(key, key)) @ product
G = beta[:, None] * np.tril(k @ k.T, -1)
omega = np.linalg.solve(np.eye(24) + G, beta[:, None] * k)
check("24 factors equal I minus two thin matrices", np.eye(16) - k.T @ omega, product)

# %% [markdown]
# ## 2.1.7 Why this engine takes the tokens one by one
#
# **There is little to gain.** What makes a token slow here is not the state but the weights. Count the
# multiply-and-adds of a KDA layer for one token: those of the state, and those of its matrices. Chapter [2.2] derives
# the matrices. Here only their sizes count: five are as large as the query's, one gives $\beta$, and two thin ones give
# $\alpha$.
#
# [2.2]: 02_kda.ipynb

# %%
H, P = K3.hidden_size, heads * width
state = 4 * heads * width * width  # fade, recall, write, read: each once over the state
matrices = 5 * P * H  # for q, k, v, for the gate of the output, and from the heads back to the stream
matrices += heads * H + width * H + P * width  # for beta; for alpha from x to `width` numbers, and from these to P
print(f"state {state / 1e6:.1f} million, matrices {matrices / 1e6:.1f} million: {state / matrices:.1%}")  # claim little

# %% [markdown]
# The state's share is 1.4%.<!--claim little--> In a chunk the weights are read once for all its tokens anyway: that
# needs no chunkwise recurrence, because only the state depends on the token before.
# **Float32 has too small a range for it.** The formulas hold $\Gamma_t / \Gamma_i$. As products of matrices they need
# the factors apart, $\Gamma_t \odot k_t$ and $k_i / \Gamma_i$. A channel of K3 may keep as little as $e^{-5}$ a token,
# so after 18 tokens $\Gamma$ is no longer a normal float32.<!--claim range--> A chunkwise kernel must work in
# sub-chunks, or compute $T^2 d$ ratios one by one, as `scores` above does.

# %%
most = int(np.log(np.finfo(np.float32).tiny) / K3.kda_gate_lower_bound)  # tokens after which it still is
print(f"e^{K3.kda_gate_lower_bound:g} a token: below the normal float32 numbers after {most + 1} tokens")  # claim range
kept = np.exp(np.float32(-5) * np.arange(1, 25, dtype=np.float32))
with np.errstate(divide="ignore", over="ignore"):
    inverse = 1 / kept
print(f"1 / kept after 17 tokens {inverse[16]:.1e}, after 24 tokens {inverse[23]}")

# %% [markdown]
# **The bits would depend on the cut.** The sums of a chunk run over its tokens. Cut the same text into other chunks and
# the sums have another order, so they round differently. This engine promises the same bytes however a prompt is cut.
# In float32, for 24 tokens:

# %%
small = [x.astype(np.float32) for x in chunk_of_24]


def cut(n):
    "Bytes of the outputs in float32 for chunks of n tokens."
    S, parts = start.astype(np.float32), []
    for a in range(0, 24, n):
        o_part, S = chunk(*(x[a:a + n] for x in small), S)
        parts.append(o_part.astype(np.float32))
    return np.concatenate(parts)


cuts = [cut(n) for n in (1, 2, 3, 4, 6, 8, 12, 24)]
far = max(np.abs(c - o).max() for c in cuts) / np.abs(o).max()
one = len({c.tobytes() for c in cuts}) == 1
print(f"{len(cuts)} cuts: all within 1e-5: {far < 1e-5}; all the same bytes: {one}")
assert far < 1e-5 and not one

# %% [markdown]
# So the chunkwise form is right, and it is what training and GPUs use: there, tokens one by one would leave the machine
# idle. Here it would save little and cost the promise.
#
# ## Summary
#
# - Softmax attention keeps all pairs. Without the exponential the pairs fit one matrix, but they disturb each other.
# - The delta rule is a gradient step on $\tfrac12\lVert v - S^\top k\rVert^2$: it writes the error. With a key of
#   length 1 and $\beta = 1$ the newest pair is exact.
# - KDA lets each key channel fade first: $S \leftarrow (I - \beta k k^\top)\,\mathrm{diag}(\alpha) S + \beta k v^\top$.
#   A triangular system gives the same for many tokens at once.
#
# ## Exercises
#
# Answers: [exercises of part 2](../answers/02_kda.ipynb).
#
# 1. With orthonormal keys, no decay and $\beta = 1$, the plain sum and the delta rule build the same matrix. Show it on
#    paper, then check it with 16 keys. Which term of the delta rule vanishes?
# 2. Write the same pair again and again. For which $\beta$ does the error go to zero, and for which does it grow?
# 3. A chunk of two tokens without decay: write $(I + G)^{-1}$ by hand, and say in words what its one entry off the
#    diagonal does.
#
# Next: [2.2 Kimi Delta Attention](02_kda.ipynb) makes $q, k, v, \alpha, \beta$ from a token, and builds the layer.
