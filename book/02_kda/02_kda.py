# %% [markdown]
# # 2.2 Kimi Delta Attention: a memory that never grows
#
# In 69 of K3's 93 layers attention keeps no list of the past. Each head holds one 128 × 128 matrix, the state. Every
# key channel of it fades at its own speed, and a new value is written as a correction. Chapter [2.1] derives this rule;
# this chapter builds the layer around it. At the end you can run such a layer token by token or in chunks with the same
# bits, and you have seen fourteen wrong layers fail.
#
# > **Without it:** the keys and values of 69 layers take 6,783 GB<!--claim a million--> after a million tokens. For
# > every new token a disk of 7 GB/s would read them in 969 s.<!--claim seconds-->
# >
# > **With it:** the state takes 0.43 GB<!--claim state--> and the history of the convolutions
# > 0.03 GB,<!--claim history--> after any number of tokens. Both stay in memory.
#
# Needs chapters [2.1] (the rule), [1.5] and [1.6] (products, exp and sigmoid with fixed bits). Runs in half a minute.
# Makes `k3lib.kda`.
#
# [2.1 From softmax attention to a memory that corrects itself](01_delta_rule.ipynb) ·
# [contents](../README.md) ·
# [3.1 Gated MLA: attention that caches 576 numbers](../03_mla/01_mla.ipynb)
#
# [2.1]: 01_delta_rule.ipynb
# [1.5]: ../01_mxfp4/05_matmul.ipynb
# [1.6]: ../01_mxfp4/06_functions.ipynb

# %%
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.matmul import ResidentMatrix
from k3lib.parallel import CORES
from k3lib.tensors import EMBED, TABLE, tensor_name

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

K3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model
schematics.where(K3, "kda")

# %% [markdown]
# | symbol | meaning | shape in K3 | in code |
# |---|---|---|---|
# | $x$ | input of the layer for one token, mixed and normed | 7168 | `x` |
# | $q, k, v$ | query, key, value, each after its own projection and convolution | 96 heads × 128 | `q`, `k`, `v` |
# | $\theta_j$ | taps of a channel's convolution, oldest first | 4 a channel | `weight` |
# | $\beta$ | write strength, 0 to 1 | one a head | `beta` |
# | $\zeta$ | input of the decay | 96 × 128 | `z` |
# | $A$ | logarithm of a head's decay rate, tensor `A_log` | 128, the first 96 count | `A_log` |
# | $\alpha$ | what a key channel keeps from one token to the next, 0 to 1 | 96 × 128 | `alpha` |
# | $S$ | state: rows are key channels, columns value channels | 96 × 128 × 128 | `S` |
# | $\hat v = S^\top k$ | recalled value | 96 × 128 | `recall(S, k)` |
# | $\delta = \beta\,(v - \hat v)$ | the correction that is written | 96 × 128 | `delta` |
# | $o$ | what the query reads from the state | 96 × 128 | `o` |
# | $d$ | width of a head | 128 | `d` |
# | $y$ | output of the layer | 7168 | `y` |
#
# Two constants come from elsewhere: the lower bound of $\log \alpha$, `gate_lower_bound` in the config, is −5; the
# $10^{-6}$ in the norm of keys is in the published code. Source of the equations: that code and the Kimi Linear report.
# The fixtures were computed by others (`fixtures/README.md`).
#
# The data flow of one layer for one token, with the shapes of K3:

# %%
schematics.kda(K3)

# %% tags=["export"]
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


# %% tags=["parameters"]
seed = 2
timed_layers = 69  # states swept by the timing of 2.2.6: one of K3's KDA layers each


# %% [markdown]
# ## 2.2.1 By hand: one key, two values
#
# A 2 × 2 state, one head, $\beta = 1$. Token 1 writes $v=(3,4)$ under $k=(1,0)$: row 0 becomes $(3,4)$. Token 2 writes
# $(5,6)$ under the same key, while channel 0 keeps half: $\alpha=(½,1)$.
#
# | step of token 2 | | |
# |---|---|---|
# | fade | $S \leftarrow \mathrm{diag}(\alpha)\,S$ | row 0 is $(1.5, 2)$ |
# | recall | $\hat v = S^\top k$ | $(1.5, 2)$ |
# | error | $v - \hat v$ | $(3.5, 4)$ |
# | correct | $S \leftarrow S + \beta\, k\,(v - \hat v)^\top$ | row 0 is $(5, 6)$ |
#
# A plain sum would hold $(6.5, 8)$, which is neither value. With $\beta=½$ the row ends halfway, at $(3.25, 4)$. The
# rest of the layer computes $q, k, v, \alpha$ and $\beta$ from $x$, and turns $o$ into $y$.

# %% [markdown]
# ## 2.2.2 The short convolution: a look at three tokens before
#
# One token's $q$, $k$ and $v$ often depend on its neighbours: "New" means something else before "York". So before they
# meet the state, $q$, $k$ and $v$ pass a short convolution. It is *depthwise*: each of 12,288 channels mixes its own
# last four inputs and no other channel. It is *causal*: it never sees a later token.
#
# $$y_t = \mathrm{silu}\Big(\sum_{j=0}^{3} \theta_j\; x_{t-3+j}\Big), \qquad \mathrm{silu}(a) = a\,\sigma(a)$$
#
# Here $x_t$ and $y_t$ are one channel before and after the convolution. Tap 3 meets the newest input. First in float64,
# then the kernel.

# %%
def sigmoid64(x):
    return np.exp(-np.logaddexp(0, -np.asarray(x, np.float64)))


def silu64(x):
    return x * sigmoid64(x)


def conv64(x, weight, past=None, activation=silu64):
    "float64 [T, P] of `x` [T, P], `weight` [P, 1, taps] and `past` [taps-1, P], zeros if absent."
    taps = weight.shape[2]
    past = np.zeros((taps - 1, x.shape[1])) if past is None else past
    line = np.concatenate([past, x]).astype(np.float64)
    return activation(sum(weight[:, 0, j] * line[j:j + len(x)] for j in range(taps)))


# %% [markdown]
# The next call needs the last three inputs of each channel, taken *before* the activation. A call with one or two
# tokens is shorter than this history, so part of the old history stays: that is the branch on `s`. The kernel shifts
# the history in place. This is safe, because position `T+j` is read before it is overwritten.

# %% tags=["export"]
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


# %% [markdown]
# The fixture `fixtures/ops/short_conv` was computed by PyTorch in float64. Every operation of this chapter has the same
# gate: the largest difference must be below 1e-5 of the output's largest magnitude. Float32 itself stays within a tenth
# of that (`ops/README.md`). `check` is the gate. `rejects` turns it around: a wrong version must be a hundred times
# outside.

# %%
TOLERANCE = 1e-5


def distance(found, expected):
    "Largest difference over the largest expected magnitude."
    return np.abs(found - expected.astype(np.float64)).max() / np.abs(expected).max()


def check(name, found, expected):
    far = distance(found, expected)
    assert found.shape == expected.shape and far < TOLERANCE, f"{name}: {far:.3g} of the largest, allowed {TOLERANCE}"
    print(f"{name}: within {TOLERANCE} of the largest")


def rejects(expected, wrong):
    for name, found in wrong.items():
        far = distance(found, expected)
        print(f"{name:38} off by {far:.2g} of the largest")
        assert far > 100 * TOLERANCE, f"the gate does not see: {name}"


# %%
fixture = load_file(ROOT / "fixtures/ops/short_conv.safetensors")
x, weight = fixture["x"], fixture["weight"]
state = np.zeros((24, 3), np.float32)
check("y", short_conv(x, weight, state), fixture["y"])
check("final state", state.T, fixture["final_state"])
state = np.ascontiguousarray(fixture["initial_state"].T)
check("y from a given state", short_conv(x, weight, state), fixture["y_from_state"])

steps = np.zeros((24, 3), np.float32)
rows = [short_conv(x[t:t + 1], weight, steps) for t in range(11)]
check("y, one token a call", np.concatenate(rows), fixture["y_steps"])
first2 = np.zeros((24, 3), np.float32)
check("y of a two-token prompt", short_conv(x[:2], weight, first2), fixture["y_first2"])
check("state after it", first2.T, fixture["state_first2"])

# %%
rejects(fixture["y"], {
    "taps reversed": conv64(x, weight[:, :, ::-1]),
    "no silu": conv64(x, weight, activation=lambda y: y),
    "sees the future": conv64(x[::-1], weight[:, :, ::-1])[::-1],
})
rejects(fixture["y_from_state"], {
    "history newest first": conv64(x, weight, fixture["initial_state"][::-1]),
    "history forgotten": conv64(x, weight),
})

# %% [markdown]
# ## 2.2.3 Keys of length one
#
# $$\hat k = \frac{k}{\sqrt{\sum_i k_i^2 + 10^{-6}}}$$
#
# A *sum*, so $\hat k$ has length 1, and a write with $\beta = 1$ replaces exactly what was stored under that key
# ([2.1.4]). With the mean in place of the sum, the length would be $\sqrt{128} = 11.3$, each write would multiply the
# error by $1 - 128\beta$, and the state would explode. The query is scaled in the same way. The value is not, because
# its length is part of what is remembered. From here on $k$ and $q$ stand for the scaled vectors.
#
# [2.1.4]: 01_delta_rule.ipynb#2.1.4-The-repair:-one-step-of-gradient-descent

# %% tags=["export"]
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


# %%
def l2norm64(x):
    return x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)


def mean_norm64(x):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)


fixture = load_file(ROOT / "fixtures/ops/l2norm.safetensors")
check("l2norm", l2norm(fixture["x"]), fixture["y"])
rejects(fixture["y"], {
    "mean instead of sum": mean_norm64(fixture["x"]),
    "mean, rescaled by sqrt(d): eps d times": mean_norm64(fixture["x"]) / np.sqrt(16),
    "no eps": fixture["x"] / np.linalg.norm(fixture["x"].astype(np.float64), axis=-1, keepdims=True),
})

# %% [markdown]
# ## 2.2.4 How fast a channel forgets
#
# $$\zeta = W_{fb} W_{fa} x + b_{dt}, \qquad \alpha = \exp\!\big(-5\;\sigma(e^{A} \zeta)\big)$$
#
# The layer computes from the token how much each channel keeps. Two thin matrices, $W_{fa}$ and $W_{fb}$, do this with
# 2.5 million weights a layer<!--claim thin--> where one full matrix would take 88 million.<!--claim full--> The sigmoid
# bounds the loss: a channel keeps at least $e^{-5}$, which is 0.7%,<!--claim least--> of its content.
#
# `A_log` is one number a *head*, stored in a vector padded to 128 entries, of which only the first 96 count. A version
# that reads it per channel finds a plausible but wrong number for every channel.

# %%
thin = K3.kda_head_dim * (K3.hidden_size + K3.kda_num_heads * K3.kda_head_dim)
print(f"two thin matrices: {thin / 1e6:.1f} million weights")  # claim thin
print(f"one full matrix: {K3.hidden_size * K3.kda_num_heads * K3.kda_head_dim / 1e6:.0f} million")  # claim full
print(f"a channel keeps at least {np.exp(K3.kda_gate_lower_bound):.1%}")  # claim least


# %% tags=["export"]
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


# %%
def decay64(z, A_log, dt_bias):
    "g, float64 [T, heads, d]."
    heads = z.shape[1]
    return -5 * sigmoid64(np.exp(A_log[:heads, None]) * (z + dt_bias.reshape(heads, -1)))


def per_channel64(z, A_log, dt_bias):
    return -5 * sigmoid64(np.exp(A_log[:z.shape[2]].astype(np.float64)) * (z + dt_bias.reshape(z.shape[1], -1)))


def softplus64(z, A_log, dt_bias):
    "The decay of Kimi Linear and Mamba: unbounded."
    heads = z.shape[1]
    return -np.exp(A_log[:heads, None]) * np.logaddexp(0, z + dt_bias.reshape(heads, -1))


# %% [markdown]
# The fixture pads `A_log` with 7.7. Replacing the padding by NaN changes nothing: those entries are never read.

# %%
fixture = load_file(ROOT / "fixtures/ops/kda_decay.safetensors")
z, A_log, dt_bias = fixture["z"], fixture["A_log"], fixture["dt_bias"]
poisoned = A_log.copy()
poisoned[3:] = np.nan
alpha = kda_decay(z, poisoned, dt_bias, -5.0)
check("alpha", alpha, fixture["alpha"])
check("g = log alpha", np.log(alpha), fixture["g"])
rejects(fixture["g"], {
    "A_log per channel": per_channel64(z, A_log, dt_bias),
    "A_log not exponentiated": -5 * sigmoid64(A_log[:3, None] * (z + dt_bias.reshape(3, 16))),
    "softplus decay": softplus64(z, A_log, dt_bias),
    "dt_bias outside the factor": -5 * sigmoid64(np.exp(A_log[:3, None]) * z + dt_bias.reshape(3, 16)),
    "no dt_bias": decay64(z, A_log, 0 * dt_bias),
})

# %% [markdown]
# Each dot of the next figure is a channel of the fixture: the number of tokens after which half is left, against the
# $\zeta$ that the channel saw. All dots of a head must lie on one curve. If `A_log` were read per channel, each channel
# would have a curve of its own, and the dots of a head would form a cloud.

# %%
lived = np.linspace(-8.5, 8, 200)
for h in range(3):
    curve = np.log(2) / (5 * sigmoid64(np.exp(A_log[h]) * lived))
    plt.plot(lived, curve, color=f"C{h}", lw=1)
    u = (z + dt_bias.reshape(3, 16))[:, h].ravel()
    half_life = np.log(2) / -np.log(alpha[:, h].ravel().clip(max=1 - 1e-7))
    plt.plot(u, half_life, ".", color=f"C{h}", ms=4, label=f"head {h}: A_log {A_log[h]:.1f}")
plt.axhline(np.log(2) / 5, color="0.6", lw=1, ls=":")
plt.semilogy()
plt.ylim(.1, 1e5)
plt.xlabel("input of the decay, ζ")
plt.ylabel("half-life [tokens]")
plt.title("One curve a head, from a seventh of a token to no forgetting at all")
plt.legend()
plt.show()


# %% [markdown]
# ## 2.2.5 The recurrence
#
# $$S \leftarrow \mathrm{diag}(\alpha)\,S, \qquad S \leftarrow S + \beta\, k\,(v - S^\top k)^\top,
# \qquad o = \tfrac{1}{\sqrt d}\, S^\top q$$
#
# Derived in [2.1.5]. In float64, line for line, for all heads at once. The update is a function of its own, so that it
# can be replaced by a wrong one.
#
# [2.1.5]: 01_delta_rule.ipynb#2.1.5-Forgetting:-each-key-channel-fades-at-its-own-speed

# %%
def recall(S, k):
    "S^T k for every head, [heads, value]."
    return np.einsum("hkv,hk->hv", S, k)


def outer(k, e):
    return k[:, :, None] * e[:, None, :]


def delta_rule(S, k, v, alpha, beta):
    S = alpha[:, :, None] * S
    return S + outer(beta * k, v - recall(S, k))


def recurrent64(q, k, v, alpha, beta, S, update=delta_rule):
    "o float64 [T, heads, d] and the last state, from a state `S` [heads, key, value]."
    S, out = S.astype(np.float64), []
    for t in range(len(v)):
        S = update(S, k[t], v[t], alpha[t], beta[t][:, None])
        out.append(recall(S, q[t]) / np.sqrt(v.shape[2]))
    return np.stack(out), S


# %% [markdown]
# The table of [2.2.1], then 33 tokens of three heads, `fixtures/ops/kda_recurrent` (fla-core's reference in float64).
#
# [2.2.1]: #2.2.1-By-hand:-one-key,-two-values

# %%
key, values = np.array([[[1., 0]], [[1, 0]]]), np.array([[[3., 4]], [[5, 6]]])
fade = np.array([[[1., 1]], [[.5, 1]]])
for beta in (1., .5):
    o, S = recurrent64(key, key, values, fade, np.array([[1.], [beta]]), np.zeros((1, 2, 2)))
    print(f"beta {beta}: row 0 holds {S[0, 0].tolist()}, row 1 {S[0, 1].tolist()}")
    assert S[0, 0].tolist() == ([5, 6] if beta == 1 else [3.25, 4])

# %%
fixture = load_file(ROOT / "fixtures/ops/kda_recurrent.safetensors")
tokens = [fixture[n].astype(np.float64) for n in ("q", "k", "v")]
tokens += [np.exp(fixture["g"].astype(np.float64)), fixture["beta"]]
zero, given = np.zeros((3, 16, 16)), fixture["initial_state"]
for start, o_name, S_name in ((zero, "o", "final_state"), (given, "o_s0", "final_state_s0")):
    o, S = recurrent64(*tokens, start)
    check(o_name, o, fixture[o_name])
    check(S_name, S, fixture[S_name])


# %% [markdown]
# Nine wrong versions. The second is the closest: it takes the error from the state before it has faded. Where channels
# hardly fade, this is almost the right error. The fixture fades enough to show the difference. One of the nine goes
# through the gate itself, so that its failure can be seen.

# %%
def keyed(S, alpha):
    return alpha[:, :, None] * S


WRONG_UPDATE = {
    "decay along the value axis":
        lambda S, k, v, a, b: a[:, None, :] * S + outer(b * k, v - recall(a[:, None, :] * S, k)),
    "error of the undecayed state": lambda S, k, v, a, b: keyed(S, a) + outer(b * k, v - recall(S, k)),
    "beta on the value only": lambda S, k, v, a, b: keyed(S, a) + outer(k, b * v - recall(keyed(S, a), k)),
    "a plain sum, no error": lambda S, k, v, a, b: keyed(S, a) + outer(b * k, v),
    "decay after the write": lambda S, k, v, a, b: keyed(S + outer(b * k, v - recall(S, k)), a),
}
rejects(fixture["o"], {name: recurrent64(*tokens, zero, update)[0] for name, update in WRONG_UPDATE.items()})
rejects(fixture["o"], {"query not scaled by 1/sqrt(d)": recurrent64(*tokens, zero)[0] * 4})
rejects(fixture["o"], {"values L2-normed": recurrent64(*tokens[:2], l2norm64(tokens[2]), *tokens[3:], zero)[0]})
rejects(fixture["o_s0"], {"state read as [value, key]": recurrent64(*tokens, given.transpose(0, 2, 1))[0],
                          "state forgotten": recurrent64(*tokens, zero)[0]})

# %% tags=["raises-exception"]
check("o of a plain sum", recurrent64(*tokens, zero, WRONG_UPDATE["a plain sum, no error"])[0], fixture["o"])


# %% [markdown]
# ## 2.2.6 Make it fast: two passes over a state that fits the cache
#
# For every token the states of 69 layers must be read and written, 434 MB in each direction.<!--claim moved--> The
# state of one head takes 64 KB,<!--claim a head--> which fits a core's L2 cache. So the kernel goes over a head's state
# twice. Pass 1 reads $S$ from memory and recalls with $\alpha_i k_i$; it writes nothing. Pass 2 finds $S$ in the cache.
# It fades, corrects, stores and reads out.
#
# Both passes take the key rows in order and treat all value channels alike. A compiler may take 4, 8 or 16 channels at
# a time: each channel's sum keeps its order, so the bits stay the same.

# %% tags=["export"]
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


# %% [markdown]
# Threads share the heads. The kernel takes its arrays as one tuple, because it has nine of them.

# %% tags=["export"]
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


# %%
@kernel
def one_row_a_pass(heads, arrays, cursor):
    "For each head of a chunk: all its tokens, one after another."
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
                _recall_rows(S[h], alpha[t, h], k[t, h], 0, o)
                for j in range(o.size):
                    delta[h, j] = beta[t, h] * (v[t, h, j] - o[j])
                    query[h, j] = scale * q[t, h, j]
                    o[j] = _ZERO
                _correct_rows(S[h], alpha[t, h], k[t, h], delta[h], query[h], 0, o)
        chunk_done(cursor, begin, end)


# %% [markdown]
# The next version changes one thing. Above, the sums in `out` are loaded and stored once for each key row, as often as
# the state itself. Here four rows nest four fused multiply-adds in the order of the keys. That is a quarter of the
# traffic for `out`, with the same bits. If the width of a head is no multiple of four, the last one to three rows take
# the form above.
#
# Written as `for i in range(0, n, 4)`, the second loop runs several times slower. The likely reason: a negative `i + 1`
# would count from the end, as in Python. The compiler cannot rule that out, so it uses no vectors. With `while` it can.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# Both versions pass the fixture; then a head of 128 and one of 35, which leaves three rows over: they agree to the bit.

# %%
def with_kernel(kernel):
    "`kda_recurrent` with another kernel."
    def recurrent(q, k, v, alpha, beta, S, threads):
        query, delta = np.empty((2, *v.shape[1:]), np.float32)
        arrays = Recurrence(q, k, v, alpha, beta, S, query, delta, np.empty_like(v))
        parallel_for(threads_for(2 * len(v) * S.size, threads), len(S), kernel, arrays)
        return arrays.out
    return recurrent


one_row = with_kernel(one_row_a_pass)
inputs = [fixture[n] for n in ("q", "k", "v")] + [np.exp(fixture["g"]), fixture["beta"]]
for name, recurrent in (("one row", one_row), ("four rows", kda_recurrent)):
    for start, o_name, S_name in ((zero, "o", "final_state"), (given, "o_s0", "final_state_s0")):
        S = start.astype(np.float32)
        check(f"{name}: {o_name}", recurrent(*inputs, S, CORES), fixture[o_name])
        check(f"{name}: {S_name}", S, fixture[S_name])


# %%
def some_tokens(T, heads, d):
    "q, k, v, alpha, beta of random tokens."
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, T, heads, d)).astype(np.float32)
    alpha = rng.uniform(.5, 1, (T, heads, d)).astype(np.float32)
    return l2norm(q), l2norm(k), v, alpha, rng.uniform(0, 1, (T, heads)).astype(np.float32)


for d in (128, 35):
    some, A, B = some_tokens(5, 2, d), np.ones((2, d, d), np.float32), np.ones((2, d, d), np.float32)
    same = np.array_equal(one_row(*some, A, CORES), kda_recurrent(*some, B, CORES)) and np.array_equal(A, B)
    print(f"head of {d}: one row and four rows a pass give the same bits: {same}")
    assert same

# %% [markdown]
# The time for one token's worth of state. Beside the versions run two loops that compute nothing: one reads the state,
# one reads and writes it. Each kernel takes a layer that the other kernels have not touched for a while, so that it
# finds nothing in the cache. The best time of each layer counts.

# %%
from numba import njit, prange


def numpy_step(S):
    q, k, v, alpha, beta = (a[0] for a in token)
    S *= alpha[:, :, None]
    S += outer(beta[:, None] * k, v - recall(S, k))
    return recall(S, q) / np.float32(np.sqrt(128))


@njit(parallel=True, nogil=True, error_model="numpy")
def read_all(S, out):
    "A bare read: every element once, into 64 sums a head."
    for h in prange(len(S)):
        row, o = S[h].reshape(-1, 64), out[h]
        for i in range(0, len(row), 4):
            for j in range(64):
                o[j] += row[i, j] + row[i + 1, j] + (row[i + 2, j] + row[i + 3, j])


@njit(parallel=True, nogil=True, error_model="numpy")
def read_write_all(S):
    "A bare read and write: every element times a number."
    for h in prange(len(S)):
        row = S[h].reshape(-1)
        for i in range(len(row)):
            row[i] *= np.float32(.999)


def sweep(kernels, states, rounds):
    "Seconds of each kernel over all states: the sum of every state's best."
    best = {name: np.full(len(states), np.inf) for name in kernels}
    for _ in range(rounds):
        for i in range(len(states)):
            for m, (name, run) in enumerate(kernels.items()):
                at = (i + m * len(states) // len(kernels)) % len(states)
                began = time.perf_counter()
                run(states[at])
                best[name][at] = min(best[name][at], time.perf_counter() - began)
    return {name: times.sum() for name, times in best.items()}


# %% tags=["nbval-ignore-output"]
token = some_tokens(1, 96, 128)
states = np.full((timed_layers, 96, 128, 128), .01, np.float32)
sums = np.zeros((96, 64), np.float32)
kernels = {
    "two passes, one row": lambda S: one_row(*token, S, CORES),
    "two passes, four rows": lambda S: kda_recurrent(*token, S, CORES),
    "read the state": lambda S: read_all(S, sums),
    "read and write it": read_write_all,
}
sweep(kernels, states[:1], 1)
took = sweep({"NumPy, five passes": numpy_step}, states, 1) | sweep(kernels, states, 8)
print(f"{f'{states.nbytes / 1e6:.0f} MB of state':24} {'time':>12} {'moved':>16} {'against read + write':>22}")
for name, seconds in took.items():
    moved = states.nbytes * (1 if name == "read the state" else 2)
    rate, ratio = moved / seconds / 1e9, seconds / took["read and write it"]
    print(f"{name:24} {seconds * 1e3:9.1f} ms {rate:11.1f} GB/s {ratio:20.2f} x")
del states


# %% [markdown]
# The last column compares each kernel with the loop that only moves the same bytes. If the four-row kernel needs
# clearly more than 1, then memory does not set its pace: the arithmetic does. It reads each head twice, the second time
# from L2, and does three multiply-adds and a product for each number.

# %% [markdown]
# ## 2.2.7 What the state remembers
#
# One head of width 16, written by hand. The key has the same value in all channels, so each row of $S$ is a copy of the
# value. First we write a rising value, then a falling one under the same key. Then twelve tokens pass that write
# nothing, while higher channels fade faster.

# %%
def written(key, values, alpha):
    "The state, [16, 16], after each of `values` is written under `key`; None writes nothing."
    S, seen = np.zeros((1, 16, 16), np.float32), []
    for value in values:
        v = np.zeros(16) if value is None else value
        q, k, v, a = (np.asarray(u, np.float32).reshape(1, 1, 16) for u in (key, key, v, alpha))
        kda_recurrent(q, k, v, a, np.full((1, 1), value is not None, np.float32), S, CORES)
        seen.append(S[0].copy())
    return seen


flat, rising = np.full(16, .25), np.linspace(0, 1, 16)
first, second = written(flat, [rising, rising[::-1]], np.ones(16))
faded = written(flat, [rising[::-1]] + [None] * 12, np.linspace(1, .7, 16))[-1]
fig, axes = plt.subplots(1, 3, sharey=True)
for axis, S, title in zip(axes, (first, second, faded), ("rising value", "falling, same key", "12 tokens later")):
    image = axis.imshow(S, vmin=0, vmax=.25)
    axis.set_title(title)
    axis.set_xlabel("value channel")
axes[0].set_ylabel("key channel")
fig.colorbar(image, label="S")
fig.suptitle("A write replaces what its key held; forgetting goes row by row", fontsize=10, x=.02, ha="left")
plt.show()

# %%
print("rising value gone after the second write:", np.allclose(second, .25 * rising[::-1], atol=1e-6))
print("key channel 0 kept, channel 15 down to", f"{faded[15, 0] / faded[0, 0]:.3f}, which is 0.7^12 = {.7**12:.3f}")
assert np.allclose(second, .25 * rising[::-1], atol=1e-6) and np.isclose(faded[15, 0] / faded[0, 0], .7**12, rtol=1e-4)

# %% [markdown]
# Now a key among others. Key $a$ is given value 1 at token 4 and value 2 at token 16; other keys and values come in
# between. After every token we ask for $a$ and measure how much of each value comes back.

# %%
T, d = 32, 64
rng = np.random.default_rng(seed)
k, v = l2norm(rng.standard_normal((2, T, d)).astype(np.float32))
a = k[4].copy()
k[16] = a
v[16] -= v[16] @ v[4] * v[4]  # so that neither value is part of the other
v[16] /= np.linalg.norm(v[16])
beta = np.full((T, 1), .6, np.float32)
beta[[4, 16]] = 1
ask = np.tile(a, (T, 1))[:, None]
told = [ask, k[:, None], v[:, None], np.full((T, 1, d), .99, np.float32), beta]
S = np.zeros((1, d, d), np.float32)
answers = {"delta rule": kda_recurrent(*told, S.copy(), CORES),
           "plain sum": recurrent64(*told, S, WRONG_UPDATE["a plain sum, no error"])[0]}
came_back = {name: o[:, 0] * np.sqrt(d) @ v[[4, 16]].T.astype(np.float64) for name, o in answers.items()}
fig, axes = plt.subplots(1, 2, sharey=True)
for axis, (name, part) in zip(axes, came_back.items()):
    axis.plot(part[:, 0], label="value 1, told at 4")
    axis.plot(part[:, 1], label="value 2, told at 16")
    axis.set_xlabel("token")
    axis.set_title(name)
axes[0].set_ylabel("share in the answer to key a")
axes[1].legend(loc="lower right", bbox_to_anchor=(1, .3))
fig.suptitle("The delta rule answers with the newest value, a plain sum with both", fontsize=10, x=.02, ha="left")
plt.show()

# %%
for name, part in came_back.items():
    old, new = np.abs(part[16]).round(2)
    print(f"{name}: after token 16 the answer holds {old} of value 1 and {new} of value 2")
assert np.allclose(answers["delta rule"][16, 0] * np.sqrt(d), v[16], atol=1e-5)


# %% [markdown]
# ## 2.2.8 The layer
#
# What remains is the output of the layer: RMSNorm over each head's 128 numbers, with weights that all heads share,
# *then* the gate, *then* `o_proj`.
#
# $$y = W_o\,\big[\,\mathrm{RMSNorm}(o)\odot\sigma(W_g x)\,\big]$$
#
# The norm is needed because the length of $o$ depends on how much the state holds, which changes through a text. The
# gate lets a token take less from a head, down to nothing. If the gate came first, the norm would undo most of it.

# %% tags=["export"]
@kernel
def _sigmoid_in_place(x):
    for t in range(x.shape[0]):
        for i in range(x.shape[1]):
            x[t, i] = sigmoid(x[t, i])


def sigmoid_in_place(x: np.ndarray) -> np.ndarray:
    "Replace every number of `x` float32 [T, n] by its sigmoid. Returns `x`."
    _sigmoid_in_place(x)
    return x


# %% [markdown]
# A layer function gets its sizes and constants as one tuple, and the state as another. The caller owns the state, and
# the layer updates it in place.

# %% tags=["export"]
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


# %% [markdown]
# Weights come from a mapping `W` of short names. A matrix may be one that is read from disk while it is multiplied,
# once for each forward pass. So a layer takes each weight once, in the order in which the equations use it, and uses a
# matrix before it takes the next.

# %% tags=["export"]
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


# %% [markdown]
# ## 2.2.9 Check against a model that ran elsewhere
#
# `fixtures/oracle13` is a 13-layer checkpoint in K3's layout. Another implementation, mlx-lm, ran it and kept the
# hidden state after layer 0, whose attention is KDA. Between our output and that state lie one residual mix and one
# dense MLP. Chapters [3.2] and [4.2] derive them; here they are six lines of float64.
#
# [3.2]: ../03_mla/02_residual.ipynb
# [4.2]: ../04_moe_router/02_moe.ipynb

# %%
model = Checkpoint(ROOT / "fixtures/oracle13/model")
oracle = load_file(ROOT / "fixtures/oracle13/expected.safetensors")


def tensor(part, short):
    "A tensor of layer 0, float64."
    return model.tensor(tensor_name(0, part, short)).astype(np.float64)


def rms64(x, weight=1.0, eps=1e-5):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


embedding = model.tensor(EMBED)[oracle["prompt_ids"]].astype(np.float64)
x64 = rms64(embedding, tensor("norms", "input_layernorm"))


def after_layer0(y):
    "The hidden state after layer 0 if its attention gave `y`: the mix, then y plus the MLP's output."
    sources = np.stack([embedding, y])
    score = (rms64(sources, tensor("norms", "mlp_res_norm")) * tensor("norms", "mlp_res_proj")[0]).sum(-1)
    mixed = (np.exp(score - score.max(0)) / np.exp(score - score.max(0)).sum(0))[..., None] * sources
    h = rms64(mixed.sum(0), tensor("norms", "post_attention_layernorm"))
    gate, up = h @ tensor("dense", "gate_proj").T, h @ tensor("dense", "up_proj").T
    hidden = 4 * np.tanh(gate / 4) * sigmoid64(gate) * 25 * np.tanh(up / 25)
    return y + hidden @ tensor("dense", "down_proj").T


# %% [markdown]
# The layer in float64. Each step has a name, so that one step can be replaced by a wrong one.

# %%
def norm_then_gate(o, gate, weight):
    return (rms64(o, weight) * sigmoid64(gate)).reshape(len(o), -1)


STEPS = dict(conv=conv64, norm=l2norm64, value=lambda v: v, decay=decay64, update=delta_rule,
             out=norm_then_gate, scale=1.0)


def layer64(W, x, heads, **swap):
    "The attention of one layer in float64, from an empty state."
    do = {**STEPS, **swap}
    q, k, v = (do["conv"](x @ W[f"{n}_proj"].T, W[f"{n}_conv1d"]).reshape(len(x), heads, -1) for n in "qkv")
    beta = sigmoid64(x @ W["b_proj"].T)
    alpha = np.exp(do["decay"]((x @ W["f_a_proj"].T @ W["f_b_proj"].T).reshape(q.shape), W["A_log"], W["dt_bias"]))
    S = np.zeros((heads, q.shape[2], q.shape[2]))
    o, _ = recurrent64(do["norm"](q) * do["scale"], do["norm"](k), do["value"](v), alpha, beta, S, do["update"])
    return do["out"](o, (x @ W["g_proj"].T).reshape(q.shape), W["o_norm"]) @ W["o_proj"].T


# %%
names = {row.short: tensor_name(0, "kda", row.short) for row in TABLE["kda"]}
W = {n: ResidentMatrix(model.raw(name)) if n.endswith("_proj") else model.tensor(name)
     for n, name in names.items()}
W64 = {n: model.tensor(name).astype(np.float64) for n, name in names.items()}
x = x64.astype(np.float32)
shape = KDAShape(heads=4, head_dim=32, conv_kernel=4, lower_bound=-5.0, eps=1e-5)
y = kda_layer(W, x, kda_state(shape), shape, CORES)
check("kda_layer against layer64", y, layer64(W64, x64, 4))
check("hidden state after layer 0, float64", after_layer0(layer64(W64, x64, 4)), oracle["hidden_after_layer"][0])
check("hidden state after layer 0, kda_layer", after_layer0(y), oracle["hidden_after_layer"][0])

# %% [markdown]
# Now each mistake alone, in a whole layer. The norms around it hide them: every one gives finite numbers of the usual
# size. All fall far outside the gate of 1e-5. The first of them goes through the gate as a reader would run it:

# %% tags=["raises-exception"]
check("A_log per channel", after_layer0(layer64(W64, x64, 4, decay=per_channel64)), oracle["hidden_after_layer"][0])

# %%
wrong_steps = {
    "A_log per channel": dict(decay=per_channel64),
    "conv taps reversed": dict(conv=lambda x, w: conv64(x, w[:, :, ::-1])),
    "no silu after the conv": dict(conv=lambda x, w: conv64(x, w, activation=lambda y: y)),
    "v L2-normed": dict(value=l2norm64),
    "mean instead of sum in the L2 norm": dict(norm=mean_norm64),
    "gate before norm": dict(out=lambda o, gate, w: rms64(o * sigmoid64(gate), w).reshape(len(o), -1)),
    "no gate": dict(out=lambda o, gate, w: rms64(o, w).reshape(len(o), -1)),
    "softplus decay": dict(decay=softplus64),
    "query not scaled": dict(scale=np.sqrt(32)),
} | {name: dict(update=update) for name, update in WRONG_UPDATE.items()}
rejects(oracle["hidden_after_layer"][0],
        {name: after_layer0(layer64(W64, x64, 4, **swap)) for name, swap in wrong_steps.items()})


# %% [markdown]
# ## 2.2.10 Any cut, the same bits
#
# A prompt may come in one chunk, token by token, or in any other cut. Every output is a sum whose order does not depend
# on the cut. So the outputs and both parts of the state agree to the byte, also for prompts that are shorter than the
# convolution.

# %%
def run(cuts):
    "Outputs and state after x was fed in chunks of these lengths."
    state, outputs, at = kda_state(shape), [], 0
    for n in cuts:
        outputs.append(kda_layer(W, x[at:at + n], state, shape, CORES))
        at += n
    return np.concatenate(outputs).tobytes(), state.S.tobytes(), state.conv.tobytes()


for T in (1, 2, 3, 4, 5, 12):
    cuts = [(T,), (1,) * T, (1, T - 1), (T - 1, 1), (T // 2, T - T // 2)]
    same = len({run([n for n in cut if n]) for cut in cuts}) == 1
    print(f"{T:2} tokens, five cuts: same bytes {same}")
    assert same

# %% [markdown]
# ## 2.2.11 What the memory costs
#
# Everything in float32, for the released shape: 69 KDA layers, 96 heads of 128, four taps.

# %%
layers, heads, d, taps, H = 69, 96, 128, 4, 7168
P = heads * d
state_bytes = layers * heads * d * d * 4
conv_bytes = layers * 3 * P * (taps - 1) * 4
weight_bytes = layers * 2 * (5 * P * H + heads * H + d * H + P * d)
print(f"state S            {state_bytes / 1e9:6.2f} GB, read once and written once a token")  # claim state
print(f"    {state_bytes / 1e6:.0f} MB")  # claim moved
print(f"    {d * d * 4 / 1024:.0f} KB a head and layer")  # claim a head
print(f"conv history       {conv_bytes / 1e9:6.2f} GB")  # claim history
print(f"weights, bf16      {weight_bytes / 1e9:6.1f} GB, read once a token: "
      f"{weight_bytes / (2 * state_bytes):.0f} times the state's traffic")
assert (round(state_bytes / 1e6), round(conv_bytes / 1e6)) == (434, 31)


# %% [markdown]
# If these 69 layers were softmax attention, they would keep keys and values: 96 × 256 numbers a token and layer, or 576
# in the latent form of chapter [3.1]. The figure shows when these caches pass the state of KDA.
#
# [3.1]: ../03_mla/01_mla.ipynb

# %%
def growing(floats):
    "Bytes of 69 layers that cache `floats` numbers a position."
    return positions * layers * floats * 4.0


positions = np.logspace(0, 6, 60)
constant = state_bytes + conv_bytes
plt.loglog(positions, growing(96 * 256) / 1e9, label="keys and values of 96 heads")
plt.loglog(positions, growing(576) / 1e9, label="latent cache, 576 floats")
plt.loglog(positions, np.full(60, constant) / 1e9, lw=2.5, label="KDA state + conv history")
plt.xlabel("positions read")
plt.ylabel("69 layers hold [GB]")
plt.title("KDA holds 0.46 GB at any length; a cache passes it and goes on growing")
plt.legend()
plt.show()

# %%
for name, floats in (("keys and values", 96 * 256), ("latent", 576)):
    print(f"{name}: as large as the state S after {state_bytes / (layers * floats * 4):,.0f} positions")
    print(f"    at one million {layers * floats * 4e6 / 1e9:,.0f} GB")  # claim a million
print(f"    7 GB/s read the keys and values of a million in {layers * 96 * 256 * 4e6 / 7e9:,.0f} s")  # claim seconds

# %% [markdown]
# ## 2.2.12 What a trained state remembers
#
# `fixtures/stories` is a K3 of nine layers that was trained to read very short stories and to answer questions about
# them. Six of its layers are KDA, with four heads of 32 channels each. How fast does each channel forget? Its
# half-life is the number of words after which half of what it holds is left, if nothing new is written.

# %%
import copy
import sys

sys.path.insert(0, str(ROOT / "book"))
import learned

reader = learned.Reader()
readings = [reader.read(text) for text in learned.held_out_texts(1, 5)]
half_life = {L: np.log(.5) / np.log(np.concatenate([reading.kda[L].alpha for reading in readings])).mean(0)
             for L in readings[0].kda}  # [heads, channels] of each layer
story_length = np.mean([len(reading.tokens) for reading in readings])

# %% [markdown]
# Now the model reads a story. Just before the question comes, some channels of all its states are set to zero: those
# with a half-life below six words, which is a sentence, or all others.

# %%
slow = {L: life >= 6 for L, life in half_life.items()}
lost = {"none": {}, "fast": {L: ~channels for L, channels in slow.items()}, "slow": slow}
right = {name: reader.accuracy(learned.Forgetful(reader.memory, channels), 10) for name, channels in lost.items()}
few, many = (sum(int(channels.sum()) for channels in lost[name].values()) for name in ("slow", "fast"))
assert many > 2 * few
for kind, share in right["none"].items():
    assert right["fast"][kind] > share - .15 and right["slow"][kind] < share - .3

# %%
fig, (left, middle) = plt.subplots(1, 2, figsize=(9, 3.2))
for L, life in half_life.items():
    left.semilogy(np.sort(life.ravel()), label=f"layer {L}")
left.axhline(6, ls="--", lw=.8, color="0.4")
left.axhline(story_length, ls=":", lw=.8, color="0.4")
left.set(xlabel="channels of a layer, sorted", ylabel="half-life (words)", ylim=(.1, 1e4),
         title=f"{many} of {few + many} channels lose half within a sentence")
left.legend(ncol=2)
for i, (name, share) in enumerate(right.items()):
    label = {"none": "nothing lost", "fast": f"{many} fast channels lost", "slow": f"{few} slow channels lost"}[name]
    middle.bar(np.arange(4) + .26 * (i - 1), [100 * x for x in share.values()], .24, label=label)
middle.set(xticks=range(4), xticklabels=share, ylabel="right answers (%)", ylim=(0, 150),
           title="What the answers need stands in the slow channels")
middle.legend()
plt.show()

# %% [markdown]
# In which head does a fact stand? "Mia has the white cup. ... Mia gave the cup to Tom." overwrites who has the cup. We
# let the model read the whole story, put the state of one head back to what it was before the last sentence, and ask.
# Everything else stays as it is: the other 23 heads, the convolutions, the caches of MLA.

# %%
back = np.zeros((len(half_life), 4))
cases = learned.gifts(1, 16)
for case in cases:
    before, after = reader.after(case.before), reader.after(case.before + case.sentence)
    for i, L in enumerate(half_life):
        for h in range(4):
            undone = copy.deepcopy(after)
            undone.layers[L].S[h] = before.layers[L].S[h]
            words = reader.next_word(undone, case.question)
            back[i, h] += (max(words, key=words.get) == case.old) / len(cases)
i, h = np.unravel_index(back.argmax(), back.shape)
L = list(half_life)[i]
assert back[i, h] > .8 and np.delete(back.ravel(), 4 * i + h).max() < .3

# %% [markdown]
# The same for one story, word by word: the state of this head is put back to what it was after each word of the story,
# and the question is asked.

# %%
story = "Mia has the white cup. Tom has the blue box. Mia gave the cup to Tom."
ids = reader.tokenizer.encode(story)
after, told = reader.after(story), {" Mia": [], " Tom": []}
for n in range(1, len(ids) + 1):
    undone = copy.deepcopy(after)
    undone.layers[L].S[h] = reader.after(reader.tokenizer.decode(ids[:n]).decode()).layers[L].S[h]
    words = reader.next_word(undone, " Who has the cup?")
    for name in told:
        told[name].append(words[name])
assert told[" Mia"][4] > .9 and told[" Tom"][-1] > .9  # after "cup", after the last word

# %%
fig, (left, right_) = plt.subplots(1, 2, figsize=(9, 3.2), width_ratios=[1, 2])
image = left.imshow(100 * back, vmin=0, vmax=100, aspect="auto")
left.set(xlabel="head", ylabel="layer", xticks=range(4), yticks=range(len(half_life)), yticklabels=half_life,
         title=f"Head {h} of layer {L} holds who has it")
fig.colorbar(image, ax=left, label="old answers (%)")
for name, share in told.items():
    right_.plot(share, "o-", ms=3, label=name)
right_.set_xticks(range(len(ids)), [reader.tokenizer.token(i).decode().strip() for i in ids], rotation=90)
right_.set(xlabel="word after which the head's state is taken", ylabel="probability of the answer", ylim=(-.05, 1.25),
           title='Who has the cup? The answer follows the state of this head')
right_.legend(ncol=2)
plt.show()

# %% [markdown]
# What each part of the layer is worth to this model: `python fixtures/stories/listen.py --broken` makes one thing wrong
# at a time and counts right answers.

# %%
print(learned.what_breaks("no decay", "no delta correction", "write strength 1", "no KDA gate", "KDA: gate before norm",
                          "convolution taps reversed", "KDA state not carried", "no KDA layers"))

# %% [markdown]
# ## Summary
#
# - Fade by key channel, recall, write the *error*: a new value replaces the old one under its key, and the memory stays
#   64 KB a head.
# - One `A_log` a head; a *sum* in the norm of keys; the newest input meets the last tap; values are not scaled; the
#   norm comes before the gate.
# - Sums run key after key in every value channel, so neither the cut of the tokens nor the width of a vector changes a
#   bit.
#
# ## Exercises
#
# Answers: [exercises of part 2](../answers/02_kda.ipynb).
#
# 1. With $\alpha = 1$ and $\beta = 1$, show that asking for the key just written returns its value exactly. Check with
#    `kda_recurrent`.
# 2. $S_{\text{new}}^\top q = S^\top(\alpha \odot q) + (k^\top q)\,\delta$ moves the read-out into pass 1. Write that
#    kernel, pass the fixture, and say why its bits differ from those of `kda_recurrent`.
# 3. Store $S$ as bf16 between tokens. The traffic halves. After how many tokens of `fixtures/ops/kda_recurrent` does
#    the output leave the gate?
#
# Next, the other 24 layers: [3.1 Gated MLA](../03_mla/01_mla.ipynb), which forgets nothing and keeps 576 numbers for
# every token.
