# %% [markdown]
# # 4.2 Latent experts: sixteen in half the width, two that always speak
#
# K3 keeps 93%<!--claim share--> of its bytes in routed experts. They work on a projection of the hidden state that has
# half its width, 3,584 of 7,168 numbers. At the end you can run one such layer from packed weights, fetch each expert
# once for a whole chunk, and get the same bytes in whatever order the experts arrive.
#
# > **Without it:** sixteen experts of the full width take 562 MB a layer,<!--claim full width--> 51.7 GB a
# > token,<!--claim full token--> and a disk of 7 GB/s reads them in 7.4 s.<!--claim full seconds-->
# >
# > **With it:** in half the width 281 MB,<!--claim half width--> 25.83 GB<!--claim half token--> and 3.7
# > s,<!--claim half seconds--> and two more matrices, into the latent and back, together 103 MB<!--claim latent--> a
# > layer and 9.5 GB<!--claim latent token--> a token. In all 35.3 GB<!--claim net--> in place of 51.7: a third
# > less,<!--claim third--> not half.
#
# Needs chapters [1.1] (MXFP4), [1.5] and [1.6] (products, tanh and norm with fixed bits), [4.1] (the router). Runs in
# half a minute. Makes `k3lib.moe`.
#
# [4.1 The router: sixteen of 896, steered by a bias](01_router.ipynb) ·
# [contents](../README.md) ·
# [5.1 What depends on the operating system](../05_streaming/01_system.ipynb)
#
# [1.1]: ../01_mxfp4/01_mxfp4.ipynb
# [1.5]: ../01_mxfp4/05_matmul.ipynb
# [1.6]: ../01_mxfp4/06_functions.ipynb
# [4.1]: 01_router.ipynb

# %%
import sys
import time
from itertools import permutations
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from k3lib.config import read_config
from k3lib.matmul import ResidentMatrix
from k3lib.mxfp4 import decode
from k3lib.parallel import CORES

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

K3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model
schematics.where(K3, "experts")

# %% [markdown]
# | symbol | meaning | shape in K3 | in code |
# |---|---|---|---|
# | $x$ | input of the feed-forward part for one token, mixed and normed | 7168 | `x` |
# | $D$ | into the latent, `routed_expert_down_proj` | 3584 × 7168 | `W["routed_expert_down_proj"]` |
# | $z = Dx$ | latent input: what the routed experts see | 3584 | `z` |
# | $W_1, W_3$ | an expert's gate and up matrices, MXFP4 | 3072 × 3584 | `expert.w1`, `expert.w3` |
# | $W_2$ | an expert's down matrix, MXFP4 | 3584 × 3072 | `expert.w2` |
# | $g_1 = W_1 z$, $g_3 = W_3 z$ | gate and up: the two inputs of the activation | 3072 | `gate`, `up` |
# | $\kappa_1, \kappa_3$ | their ceilings, `activation_situ_beta`, `activation_situ_linear_beta` | 4, 25 | `beta`, `linear_beta` |
# | $e_j, w_j$ | id and weight of the expert of rank $j$, from 4.1 | 16 | `ids`, `weights` |
# | $u$ | weighted sum of the experts' answers | 3584 | `u` |
# | $\gamma$ | weights of an RMSNorm, `routed_expert_norm` | 3584 | `W["routed_expert_norm"]` |
# | $U$ | back out, `routed_expert_up_proj` | 7168 × 3584 | `W["routed_expert_up_proj"]` |
# | $\mathrm{shared}(x)$ | two shared experts in one MLP of width 6144, `shared_experts.*` | 7168 → 7168 | `dense_mlp` |
#
# $$u = \sum_{j=1}^{16} w_j\, W_2^{(e_j)}\, \mathrm{SiTU}(W_1^{(e_j)} z,\; W_3^{(e_j)} z), \qquad
# y = U\,\big(\mathrm{RMSNorm}(u) \odot \gamma\big) + \mathrm{shared}(x)$$
#
# **Why a latent?** The bytes of an expert grow with the width of what it sees. All experts see the same token, so the
# reduction to half the width can be done once, by a matrix $D$ that all share. The matrices $D$ and $U$ stand in bf16,
# nearly four times as many bits a weight as an expert has. They take back more than a third of what the narrower
# experts save ([4.2.8]). They are also part of the trunk, which memory can keep and a chunk reads once, while experts
# change from token to token. **Why shared experts?** What every token needs would otherwise have to be learned by every
# expert. Two experts that see every token, at the full width, leave the others free to specialise.
#
# [4.2.8]: #4.2.8-Cost-for-K3

# %%
schematics.moe(K3)

# %% tags=["export"]
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from k3lib.functions import rms_norm, sigmoid, tanh
from k3lib.kda import LayerWeights
from k3lib.kernel_cache import kernel
from k3lib.matmul import Matrix, NotFinite, PackedMatrix, check_product, linear
from k3lib.router import route
from k3lib.simd import fma

_ZERO = np.float32(0)

# %% tags=["parameters"]
seed = 42
latent, intermediate = 3584, 3072  # of the expert that is timed in 4.2.7: K3's own

# %% [markdown]
# ## 4.2.1 By hand: a bounded gate, and a norm in the right place
#
# SiTU at two friendly points: the gate $g_1 = 4\,\mathrm{artanh}\,\tfrac12 = 2\ln 3$ and the up value
# $g_3 = 25\,\mathrm{artanh}\,\tfrac12$. The capped gate is $4 \cdot \tfrac12 = 2$, the sigmoid of $2 \ln 3$ is 0.9, the
# capped up value is $25 \cdot \tfrac12$; together $2 \cdot 0.9 \cdot 12.5 = 22.5$.
#
# Two experts answer $(3, 0)$ and $(0, 1)$, each with weight ½. The sum is $(1.5, 0.5)$, its root mean square
# $\sqrt{1.25}$, so the norm gives $(1.342, 0.447)$. Norming each answer first would give $(0.707, 0.707)$: the
# information that one answer was three times as large would be lost.

# %%
answers, half = np.array([[3., 0], [0, 1]]), np.array([.5, .5])


def rms64(v, eps=0.):
    return v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + eps)


print("norm of the sum ", [f"{v:.3f}" for v in rms64(half @ answers)])
print("norm per expert ", [f"{v:.3f}" for v in half @ rms64(answers)])


# %% [markdown]
# ## 4.2.2 SiTU: SiLU with a ceiling
#
# $$\mathrm{SiTU}(g_1, g_3) = \kappa_1 \tanh(g_1/\kappa_1)\,\sigma(g_1)\;\cdot\;\kappa_3 \tanh(g_3/\kappa_3)$$
#
# For small arguments this is $g_1\,\sigma(g_1)\,g_3$, the usual SwiGLU. For large ones it stops at $4 \cdot 25 = 100$,
# so no channel can grow without bound. The sigmoid sees $g_1$ itself, not its capped form.

# %%
def situ_reference(gate, up, beta=4., linear_beta=25.):
    "The equation in float64."
    gate, up = gate.astype(np.float64), up.astype(np.float64)
    return beta * np.tanh(gate / beta) * sigmoid64(gate) * linear_beta * np.tanh(up / linear_beta)


def sigmoid64(x):
    return np.exp(-np.logaddexp(0, -x))


# %% tags=["export"]
class Situ(NamedTuple):
    "The two ceilings of the activation. They are the same in all layers of a model."

    beta: float  # of the gate side, the config's activation_situ_beta: 4
    linear_beta: float  # of the up side, activation_situ_linear_beta: 25


@kernel
def _situ_glu(gate, up, beta, linear_beta, out):
    "SiTU of float32 [n]; `out` may be `gate` or `up`, which is slower."
    for i in range(out.size):
        g = gate[i]
        out[i] = beta * tanh(g / beta) * sigmoid(g) * (linear_beta * tanh(up[i] / linear_beta))


def situ_glu(gate: np.ndarray, up: np.ndarray, situ: Situ, out: np.ndarray | None = None) -> np.ndarray:
    """beta tanh(gate / beta) * sigmoid(gate) * linear_beta tanh(up / linear_beta), float32 [...].

    `gate` and `up`: float32 [...]. The sigmoid sees the uncapped gate. The result is written to `out` (C order) if it
    is given. Raises ValueError where shapes do not fit.
    """
    if out is None:
        out = np.empty(gate.shape, np.float32)
    if gate.shape != up.shape or out.shape != gate.shape or not out.flags.c_contiguous:
        raise ValueError(f"situ_glu: gate {gate.shape}, up {up.shape} and out {out.shape} (contiguous) do not fit")
    beta, linear_beta = map(np.float32, situ)
    _situ_glu(gate.reshape(-1), up.reshape(-1), beta, linear_beta, out.reshape(-1))
    return out


# %%
SITU = Situ(4, 25)
hand_gate, hand_up = np.float32([2 * np.log(3)]), np.float32([25 * np.arctanh(.5)])
print(f"{situ_glu(hand_gate, hand_up, SITU)[0]:.3f}")
fixture = load_file(ROOT / "fixtures/ops/situ_glu.safetensors")
y = situ_glu(fixture["gate"], fixture["up"], SITU)
assert abs(situ_glu(hand_gate, hand_up, SITU)[0] - 22.5) < 1e-4
assert (np.abs(y - fixture["y"]) <= 1e-5 * np.abs(fixture["y"]) + 1e-12).all()
print(f"{len(y)} pairs, each within 1e-5 of its value: True; largest {np.abs(y).max():.1f}")

# %% [markdown]
# The fixture combines 51 values from ±0.001 to ±1000 and 0. Below are six wrong forms. For inputs up to 0.01 all but
# one of them agree with SiTU to the 1e-5 of the gate, and the one is off by about a hundredth: gate and up differ
# there only in the sigmoid, which is near ½ for both. So a test with small numbers alone passes five of the six.

# %%
g, u = fixture["gate"].astype(np.float64), fixture["up"].astype(np.float64)
cap = 4 * np.tanh(g / 4)
wrong = {
    "sigmoid of the capped gate": cap * sigmoid64(cap) * 25 * np.tanh(u / 25),
    "gate and up swapped": situ_reference(u, g),
    "the two betas swapped": situ_reference(g, u, 25., 4.),
    "up not capped": cap * sigmoid64(g) * u,
    "silu(gate) * up": g * sigmoid64(g) * u,
    "tanh of the whole silu": 4 * np.tanh(g * sigmoid64(g) / 4) * 25 * np.tanh(u / 25),
}
for name, value in wrong.items():
    off = np.abs(value - fixture["y"]).max() / np.abs(fixture["y"]).max()
    near = (np.abs(g) <= 1e-2) & (np.abs(u) <= 1e-2)
    small = np.abs(value - fixture["y"])[near].max() / np.abs(fixture["y"][near]).max()
    print(f"{name:27} fails, off by {off:.2g} of the largest value; for small inputs off by {small:.1g}: "
          f"{'passes' if small < 1e-5 else 'fails'}")
    assert off > 1e-3 and (small < 1e-5 or name == "gate and up swapped" and 1e-3 < small < .01)

# %%
t = np.linspace(-12, 12, 241, dtype=np.float32)
big = np.linspace(-100, 100, 241, dtype=np.float32)
fig, (left, right) = plt.subplots(1, 2)
left.plot(t, t * sigmoid64(t), "--", label="SiLU")
left.plot(t, situ_glu(t, np.full_like(t, 1e9), SITU) / 25, label="SiTU, gate side")
left.axhline(4, lw=.8, ls=":", color="C5")
left.set(xlabel="gate", ylabel="factor", ylim=(-1, 8), title="SiTU: the gate side stops at 4,")
right.plot(big, big, "--", label="linear")
right.plot(big, situ_glu(np.full_like(big, 1e9), big, SITU) / 4, label="SiTU, up side")
for bound in (-25, 25):
    right.axhline(bound, lw=.8, ls=":", color="C5")
right.set(xlabel="up", ylabel="factor", ylim=(-60, 60), title="the up side at ±25")
left.legend(), right.legend()
plt.show()


# %% [markdown]
# ## 4.2.3 The dense MLP, used twice
#
# Layer 0 has one MLP of width 33,792 in place of experts. Every other layer has the shared experts, which K3 stores as
# one MLP of width 6,144. Both are the same three products on the full-width $x$; only the prefix of the tensor names
# differs.

# %% tags=["export"]
def dense_mlp(W: LayerWeights, x: np.ndarray, situ: Situ, threads: int, prefix: str = "") -> np.ndarray:
    """down SiTU(gate x, up x), float32 [T, H], for `x` float32 [T, H].

    Takes W[prefix + name] once for gate_proj, up_proj and down_proj, in that order. Any number of `threads` gives the
    same bits. Raises ValueError where shapes do not fit, NotFinite where a product is infinite or NaN.
    """
    gate, up = linear(W[prefix + "gate_proj"], x, threads), linear(W[prefix + "up_proj"], x, threads)
    return linear(W[prefix + "down_proj"], situ_glu(gate, up, situ), threads)


# %% [markdown]
# `W` gives each matrix once, in order, because a streamed matrix is read once for each forward pass.
# `fixtures/ops/latent_moe` holds a layer of width 48 with a shared MLP of width 64, in float32.

# %%
moe = load_file(ROOT / "fixtures/ops/latent_moe.safetensors")
W = {n: ResidentMatrix(moe[n]) if moe[n].ndim == 2 else moe[n]
     for n in ("gate", "e_score_correction_bias", "routed_expert_down_proj", "routed_expert_norm",
               "routed_expert_up_proj")}
W |= {f"shared_experts.{n}": ResidentMatrix(moe[f"shared_{n}"]) for n in ("gate_proj", "up_proj", "down_proj")}


def mlp64(x):
    gate, up, down = (moe[f"shared_{n}"].astype(np.float64) for n in ("gate_proj", "up_proj", "down_proj"))
    return down @ situ_reference(gate @ x, up @ x)


shared = dense_mlp(W, moe["x"], SITU, CORES, "shared_experts.")[0]
expected = mlp64(moe["x"][0].astype(np.float64))
assert np.abs(shared - expected).max() < 1e-5 * np.abs(expected).max()
print("shared path against float64, within 1e-5:", True)


# %% [markdown]
# ## 4.2.4 One routed expert, never unpacked
#
# An expert is three packed matrices: six byte arrays. Its products run on the packed form of 1.1. Unpacked to float32
# it would be 7.5 times as large, and would have to be written and read again for every token that chose it.
#
# The three are matrices like any other: they have a shape and a product. So an expert whose bytes are still to be read
# from disk (chapter [5.16]) can stand in the same place. Each product runs on the thread that calls it, because a layer
# has sixteen experts to share among the threads.
#
# [5.16]: ../05_streaming/16_experts.ipynb

# %% tags=["export"]
class Expert(NamedTuple):
    "One routed expert of width I in a latent of width L."

    w1: Matrix  # gate [I, L]
    w2: Matrix  # down [L, I]
    w3: Matrix  # up [I, L]

    @classmethod
    def packed(cls, arrays: Sequence[Any]) -> "Expert":
        "An Expert from six arrays or extents, in file order: packed weights and scales of w1, of w2, of w3."
        return cls(*(PackedMatrix(*arrays[i:i + 2]) for i in (0, 2, 4)))


def expert_mlp(expert: Expert, z: np.ndarray, situ: Situ, out: np.ndarray) -> np.ndarray:
    """out = w2 SiTU(w1 z, w3 z), float32 [m, L], for `z` float32 [m, L], on the calling thread.

    Raises NotFinite, whose .matrix is "w1", "w2" or "w3", where a product is infinite or NaN.
    """
    gate, up, hidden = np.empty((3, len(z), expert.w1.shape[0]), np.float32)
    expert.w1.multiply(z, gate, 1)
    check_product(gate, z, matrix="w1")  # before SiTU, because the tanh of infinity is an ordinary 1
    expert.w3.multiply(z, up, 1)
    check_product(up, z, matrix="w3")
    situ_glu(gate, up, situ, hidden)
    expert.w2.multiply(hidden, out, 1)
    check_product(out, hidden, matrix="w2")
    return out


# %%
def expert_of(f, e, suffix=""):
    "Expert e of the fixture; `suffix` picks its second set of w2 scales."
    names = ("w1_packed", "w1_scale", "w2_packed", "w2_scale" + suffix, "w3_packed", "w3_scale")
    return Expert.packed([np.ascontiguousarray(f[name][e]) for name in names])


def expert64(expert, z):
    w1, w2, w3 = (decode(*matrix).astype(np.float64) for matrix in expert)
    return w2 @ situ_reference(w1 @ z, w3 @ z)


z = np.random.default_rng(seed).normal(size=(5, 64)).astype(np.float32)
worst = 0
for e in range(8):
    found = expert_mlp(expert_of(moe, e), z, SITU, np.empty_like(z))
    expected = np.stack([expert64(expert_of(moe, e), row) for row in z.astype(np.float64)])
    worst = max(worst, np.abs(found - expected).max() / np.abs(expected).max())
assert worst < 1e-5
print("8 experts, 5 tokens each, against float64, within 1e-5:", worst < 1e-5)

# %% [markdown]
# ## 4.2.5 Any order of arrival, one result
#
# Experts come from a disk in an order that changes from run to run. Float addition is not associative, so adding each
# answer as it arrives would make the output depend on the disk. Does it matter? Three chosen experts, in all six
# orders:

# %%
ids, weights = route(linear(W["gate"], moe["x"]), moe["e_score_correction_bias"], 3, 1.0)
z = linear(W["routed_expert_down_proj"], moe["x"])
answer = {e: expert_mlp(expert_of(moe, e), z, SITU, np.empty_like(z)) for e in ids[0].tolist()}
sums = set()
for order in permutations(range(3)):
    u = np.zeros_like(z)
    for r in order:
        u += weights[0, r] * answer[int(ids[0, r])]
    sums.add(u.tobytes())
print(f"added as they arrive: {len(sums)} different results from 6 orders")
assert len(sums) > 1


# %% [markdown]
# So answers are stored until all have been computed, and the sum runs in rank order. The layer does not know where an
# expert comes from. It first announces which experts it needs, so that reading can begin. Later it passes the function
# that is to be called with each of them.

# %% tags=["export"]
class LayerExperts(Protocol):
    "The routed experts of one layer."

    def request(self, ids: list[int]) -> None:
        "Announce the experts of the next map(): each id once, in rising order. Reading may begin now."

    def map(self, work: Callable[[int, Expert], None], threads: int) -> None:
        "Call work(id, expert) once for each requested expert, in any order, on at most `threads` threads at once."


# %% [markdown]
# The (token, rank) pairs of a chunk are sorted by expert. Then the tokens of one expert are neighbouring rows, which
# one product writes, and `place` says where each pair went. Those rows belong to that expert alone, so `experts.map`
# may call `work` for several experts at once, on any thread.
#
# By hand: three tokens, two experts each. Token 0 has chosen the experts 7 and 2, token 1 has chosen 2 and 5, token 2
# has chosen 7 and 5. Pair 2t + r is rank r of token t.
#
# | pair | token, rank | expert | | row | its pair | the row holds |
# |---|---|---|---|---|---|---|
# | 0 | 0, 0 | 7 | | 0 | 1 | expert 2 of token 0 |
# | 1 | 0, 1 | 2 | | 1 | 2 | expert 2 of token 1 |
# | 2 | 1, 0 | 2 | | 2 | 3 | expert 5 of token 1 |
# | 3 | 1, 1 | 5 | | 3 | 5 | expert 5 of token 2 |
# | 4 | 2, 0 | 7 | | 4 | 0 | expert 7 of token 0 |
# | 5 | 2, 1 | 5 | | 5 | 4 | expert 7 of token 2 |
#
# `pairs` is the column "its pair". `place` is the way back: pair 0 went to row 4, pair 1 to row 0, and so on. Expert 5
# multiplies tokens 1 and 2 at once and writes rows 2 and 3. The sum of token 2 reads its rank 0 from row 5, then its
# rank 1 from row 3.

# %%
small_ids = np.array([[7, 2], [2, 5], [7, 5]])
pairs = np.argsort(small_ids, axis=None, kind="stable")
place = np.empty(6, np.int64)
place[pairs] = np.arange(6)
print("pairs", pairs.tolist(), "  tokens of these rows", (pairs // 2).tolist(), "  place", place.reshape(3, 2).tolist())
assert pairs.tolist() == [1, 2, 3, 5, 0, 4] and place.tolist() == [4, 0, 1, 2, 5, 3]


# %% [markdown]
# The kernel adds in rank order, whatever the rows' order is.

# %% tags=["export"]
@kernel
def _weighted_sum(rows, place, weights, out):
    "out[t] = sum over ranks r of weights[t, r] * rows[place[t, r]], in rank order."
    for t in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[t, i] = _ZERO
        for r in range(place.shape[1]):
            w, row = weights[t, r], rows[place[t, r]]
            for i in range(out.shape[1]):
                out[t, i] = fma(w, row[i], out[t, i])


# %% tags=["export"]
def routed_sum(experts: LayerExperts, z: np.ndarray, ids: np.ndarray, weights: np.ndarray, situ: Situ,
               threads: int) -> np.ndarray:
    """u[t] = sum over ranks r of weights[t, r] * (expert ids[t, r] of z[t]), float32 [T, L], in rank order.

    `z` float32 [T, L]; `ids` int32 [T, k], already requested; `weights` float32 [T, k]. The order in which experts.map
    brings the experts does not change a bit. Raises RuntimeError if it brings an expert that was not chosen, brings one
    twice or leaves one out; NotFinite, whose .matrix is (expert id, "w1", "w2" or "w3"), where a product is not finite.
    """
    T, k = ids.shape
    pairs = np.argsort(ids, axis=None, kind="stable")  # (token, rank) pairs, those of one expert side by side
    place = np.empty(T * k, np.int64)
    place[pairs] = np.arange(T * k)
    chosen, counts = np.unique(ids, return_counts=True)
    rows_of = {int(e): slice(end - n, end) for e, n, end in zip(chosen, counts, np.cumsum(counts))}  # yet to compute
    rows = np.empty((T * k, z.shape[1]), np.float32)

    def work(e, expert):
        if e not in rows_of:
            raise RuntimeError(f"expert {e} arrived, expected one of {sorted(rows_of)}, each once")
        mine = rows_of.pop(e)
        try:
            expert_mlp(expert, z[pairs[mine] // k], situ, rows[mine])
        except NotFinite as error:
            error.matrix = e, error.matrix
            raise

    experts.map(work, threads)
    if rows_of:
        raise RuntimeError(f"experts {sorted(rows_of)} were requested and did not arrive")
    u = np.empty_like(z)
    _weighted_sum(rows, place.reshape(T, k), weights, u)
    return u


# %%
class Resident:
    "Experts in memory that arrive in a shuffled order."

    def __init__(self, experts, rng):
        self.experts, self.rng, self.fetched = experts, rng, 0

    def request(self, ids):
        self.ids = ids

    def map(self, work, threads):
        for e in self.rng.permutation(self.ids):
            self.fetched += 1
            work(int(e), self.experts[e])


def random_expert(rng, L, I):
    "Random codes; scales near 2^-5."
    def matrix(n, k):
        return rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(120, 124, (n, k // 32), np.uint8)
    return Expert.packed([*matrix(I, L), *matrix(L, I), *matrix(I, L)])


rng = np.random.default_rng(seed)
crowd = Resident([random_expert(rng, 64, 96) for _ in range(12)], rng)
z = rng.normal(size=(23, 64)).astype(np.float32)
ids, weights = route(rng.normal(size=(23, 12)).astype(np.float32), np.zeros(12, np.float32), 4, 1.0)


def run(first, last):
    crowd.request(np.unique(ids[first:last]).tolist())
    return routed_sum(crowd, z[first:last], ids[first:last], weights[first:last], SITU, CORES)


whole = run(0, 23).tobytes()
orders = {run(0, 23).tobytes() for _ in range(10)}
cuts = {b"".join(run(t, min(t + size, 23)).tobytes() for t in range(0, 23, size)) for size in (1, 5, 22)}
assert orders == cuts == {whole}
print("10 shuffled arrivals and 3 ways to cut 23 tokens: different results", len(orders | cuts))


# %% [markdown]
# An expert that does not arrive, arrives twice or was not chosen must be an error. Otherwise the sum would be wrong and
# nothing would show it.

# %%
class Faulty(Resident):
    def __init__(self, change):
        super().__init__(crowd.experts, rng)
        self.change = change

    def map(self, work, threads):
        for e in self.change(self.ids):
            work(int(e), self.experts[e])


stranger = min({*range(12)} - {*ids[0].tolist()})
for change in (lambda ids: ids[:-1], lambda ids: ids + ids[:1], lambda ids: [stranger] + ids):
    faulty = Faulty(change)
    faulty.request(np.unique(ids[:1]).tolist())
    try:
        routed_sum(faulty, z[:1], ids[:1], weights[:1], SITU, CORES)
    except RuntimeError as error:
        print(error)


# %% [markdown]
# ## 4.2.6 The layer
#
# The router comes first, and its experts are requested at once: the down-projection and the shared path compute while
# the disk reads. Then follow the norm of the sum and the up-projection, and the shared path is added without a weight.

# %% tags=["export"]
class MoEShape(NamedTuple):
    "Sizes and constants of an MoE layer, the same in all MoE layers of a model."

    top_k: int  # experts a token chooses, the config's num_experts_per_token: 16
    scale: float  # routed_scaling_factor: 1
    situ: Situ
    eps: float  # of the norm on the sum of the experts, rms_norm_eps: 1e-5


def moe_layer(W: LayerWeights, experts: LayerExperts, x: np.ndarray, shape: MoEShape, threads: int,
              on_route: Callable[[np.ndarray, np.ndarray], None] | None = None) -> np.ndarray:
    """The feed-forward part of one layer, latent experts plus the shared path, float32 [T, H].

    `x` float32 [T, H] is the normed input. `W` has the short names that `tensors` lists for "moe"; each is taken once,
    in that order. `experts` are requested as soon as they are known; on_route(ids, weights) is then called with the
    routing, int32 and float32 [T, top_k]. The bits depend neither on how the tokens are cut into calls nor on
    `threads` nor on the order of the experts. Raises ValueError where shapes do not fit, NotFinite where a number is
    infinite or NaN.
    """
    ids, weights = route(linear(W["gate"], x, threads), W["e_score_correction_bias"], shape.top_k, shape.scale)
    experts.request(np.unique(ids).tolist())
    if on_route is not None:
        on_route(ids, weights)
    z = linear(W["routed_expert_down_proj"], x, threads)
    shared = dense_mlp(W, x, shape.situ, threads, "shared_experts.")
    u = routed_sum(experts, z, ids, weights, shape.situ, threads)
    normed = rms_norm(u, W["routed_expert_norm"], shape.eps)
    return linear(W["routed_expert_up_proj"], normed, threads) + shared


# %%
class FromFixture(Resident):
    def __init__(self, suffix):
        super().__init__([expert_of(moe, e, suffix) for e in range(8)], np.random.default_rng(seed))


cases = {"plain": ("", 1.0), "quiet": ("_quiet", 2.5)}
for case, (suffix, scale) in cases.items():
    seen = []
    shape = MoEShape(top_k=3, scale=scale, situ=SITU, eps=1e-5)
    y = moe_layer(W, FromFixture(suffix), moe["x"], shape, CORES, on_route=lambda *routing: seen.extend(routing))
    off = np.abs(y[0] - moe["y" + suffix]).max() / np.abs(moe["y" + suffix]).max()
    print(f"{case}: experts {np.sort(seen[0][0]).tolist()}, output within 1e-5: {off < 1e-5}")
    assert off < 1e-5 and np.array_equal(np.sort(seen[0][0]), moe["ids" + suffix])


# %% [markdown]
# The fixture has two cases: *plain*, and *quiet*, where the experts' answers are small (small `w2` scales) and the
# scaling factor is 2.5. The norm divides any common factor of the weights away, unless the sum is so small that `eps`
# counts. Only there can a wrong factor be seen.
#
# Below is the layer in float64, with eleven places to go wrong.

# %%
def layer64(case, wrong=None):
    "The layer in float64 on the fixture's token, right or with one named mistake."
    suffix, scale = cases[case]
    f = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in moe.items()}
    x, b, eps = f["x"][0], f["e_score_correction_bias"], 1e-6 if wrong == "norm with eps 1e-6" else 1e-5
    s = sigmoid64(f["gate"] @ x)
    ids = np.argsort(-(s if wrong == "bias ignored" else s + b), kind="stable")[:3]
    w = (s + b if wrong == "bias left in the weights" else s)[ids]
    w = w if wrong == "not renormalised" else w / w.sum()
    w = w if wrong == "scaling factor dropped" else w * scale
    z = f["routed_expert_down_proj"] @ x
    experts = [expert_of(moe, e, suffix) for e in ids]
    if wrong == "w1 and w3 swapped":
        experts = [Expert(e.w3, e.w2, e.w1) for e in experts]
    answers = np.stack([expert64(e, z) for e in experts])
    n, U = f["routed_expert_norm"], f["routed_expert_up_proj"]
    if wrong == "norm per expert":
        routed = U @ (w @ rms64(answers, eps) * n)
    elif wrong == "no norm":
        routed = U @ (w @ answers)
    elif wrong == "norm after the up-projection":
        routed = rms64(U @ (w @ answers * n), eps)
    else:
        routed = U @ (rms64(w @ answers, eps) * n)
    shared = mlp64(x) * (scale if wrong == "shared experts scaled too" else wrong != "shared experts dropped")
    return routed + shared


mistakes = ("norm per expert", "no norm", "norm after the up-projection", "norm with eps 1e-6", "w1 and w3 swapped",
            "not renormalised", "scaling factor dropped", "shared experts scaled too", "shared experts dropped",
            "bias left in the weights", "bias ignored")


# %%
def off(case, wrong=None):
    "Largest difference from the fixture, relative to its largest magnitude."
    truth = moe["y" + cases[case][0]]
    return np.abs(layer64(case, wrong) - truth).max() / np.abs(truth).max()


def gate(case, wrong=None):
    far, name = off(case, wrong), wrong or "as built"
    assert far < 1e-5, f"{name}, {case}: {far:.2g} of the largest, allowed 1e-5"
    print(f"{name}, {case}: passes")


gate("plain")
gate("quiet")
table = {wrong: (off("plain", wrong), off("quiet", wrong)) for wrong in mistakes}
print(f"{'':30}{'plain':>8}{'quiet':>8}")
for wrong, pair in table.items():
    print(f"{wrong:30}" + "".join(f"{'passes' if o < 1e-5 else f'{o:.2g}':>8}" for o in pair))
assert all(quiet > 1e-2 for _, quiet in table.values())
hidden = sum(plain < 1e-5 for plain, _ in table.values())
print(f"seen by the plain case alone: {len(mistakes) - hidden} of {len(mistakes)}")

# %% [markdown]
# A mistake that passes the plain case and fails the quiet one:

# %% tags=["raises-exception"]
gate("plain", "not renormalised")
gate("quiet", "not renormalised")

# %%
fig, ax = plt.subplots(figsize=(6, 3.6))
rows = np.arange(len(mistakes))
for case, marker in (("plain", "o"), ("quiet", "s")):
    ax.plot([table[m][case == "quiet"] for m in mistakes], rows, marker, label=case)
ax.axvline(1e-5, ls="--", lw=.8, color="C5", label="tolerance")
ax.set(xscale="log", xlim=(1e-8, 1e3), xlabel="largest difference from the fixture, relative",
       title=f"{hidden} of {len(mistakes)} mistakes pass the plain case")
ax.set_yticks(rows, mistakes)
ax.invert_yaxis()
ax.legend(loc="upper right")
plt.show()


# %% [markdown]
# ## 4.2.7 Make it fast
#
# Two comparisons. The first is SiTU over 6,144 channels: NumPy writes an array for every operation, the kernel one
# array in all. If the result is written over the input, the kernel falls back to one channel at a time, because vectors
# are safe only where nothing overlaps, and that is tested as it runs. Hence the third buffer in `expert_mlp`.

# %%
def seconds(f, repeat=15):
    "Median of a few runs after one that does not count."
    times = []
    for _ in range(repeat + 1):
        began = time.perf_counter()
        f()
        times.append(time.perf_counter() - began)
    return float(np.median(times[1:]))


def situ_numpy(gate, up):
    return 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * (25 * np.tanh(up / 25))


rng = np.random.default_rng(seed)
gate, up = rng.normal(size=(2, 6144)).astype(np.float32) * np.float32(4)
out, over = np.empty_like(gate), np.empty_like(gate)


def in_place():
    over[:] = gate
    situ_glu(over, up, SITU, over)


in_place()
truth = situ_reference(gate, up)
for name, found in (("numpy", situ_numpy(gate, up)), ("kernel", situ_glu(gate, up, SITU, out)), ("in place", over)):
    assert np.abs(found - truth).max() < 1e-5 * np.abs(truth).max(), name

# %% tags=["nbval-ignore-output"]
for name, f in (("numpy, float32", lambda: situ_numpy(gate, up)), ("kernel, over its own input", in_place),
                ("kernel, into a third buffer", lambda: situ_glu(gate, up, SITU, out))):
    print(f"{name:28} {seconds(f, 100) / 6144 * 1e9:5.1f} ns a channel")


# %% [markdown]
# The second is an expert of K3's own shape that eight tokens of a chunk chose. What matters is how often its bytes
# cross memory.

# %%
def unpack(expert, z):
    "The plain form: three float32 matrices, then numpy."
    w1, w2, w3 = (decode(*matrix) for matrix in expert)
    return situ_numpy(z @ w1.T, z @ w3.T) @ w2.T


def token_by_token(expert, z):
    return np.concatenate([expert_mlp(expert, z[t:t + 1], SITU, np.empty_like(z[:1])) for t in range(len(z))])


def once(expert, z):
    return expert_mlp(expert, z, SITU, np.empty_like(z))


expert = random_expert(rng, latent, intermediate)
z = rng.normal(size=(8, latent)).astype(np.float32)
packed_bytes, wide_bytes = sum(a.nbytes for matrix in expert for a in matrix), 3 * latent * intermediate * 4
versions = [("unpacked to float32", unpack, packed_bytes + 2 * wide_bytes),
            ("packed, token by token", token_by_token, 8 * packed_bytes), ("packed, once for all", once, packed_bytes)]
plain = unpack(expert, z)
for name, version, _ in versions:
    assert np.abs(version(expert, z) - plain).max() < 1e-5 * np.abs(plain).max(), name
assert once(expert, z).tobytes() == token_by_token(expert, z).tobytes()
print(f"one expert: {packed_bytes:,} bytes packed, {wide_bytes:,} as float32")

# %% tags=["nbval-ignore-output"]
for name, version, moved in versions:
    print(f"{name:24} {seconds(lambda: version(expert, z), 3) * 1e3:7.1f} ms for 8 tokens, {moved / 1e6:6.1f} MB moved")

# %% [markdown]
# What remains is Python's share: three products, a gather and the bookkeeping of one expert, measured on one too small
# to cost anything else. A token has 16 × 92 of them.

# %% tags=["nbval-ignore-output"]
small = Resident([random_expert(rng, 32, 32) for _ in range(16)], rng)
small.request(list(range(16)))
z, ids, weights = z[:1, :32].copy(), np.arange(16, dtype=np.int32)[None], np.full((1, 16), np.float32(1 / 16))
an_expert = seconds(lambda: routed_sum(small, z, ids, weights, SITU, 1), 100) / 16
print(f"overhead {an_expert * 1e6:.0f} us an expert, {an_expert * 16 * 92 * 1e3:.0f} ms a token")

# %% [markdown]
# ## 4.2.8 Cost for K3

# %%
layers, expert_bytes = 92, 3 * 3584 * 3072 * 17 // 32
shared_bytes, latent_bytes = 3 * 6144 * 7168 * 2, 2 * 3584 * 7168 * 2
print(f"an expert {expert_bytes:,} bytes, {expert_bytes * 8 / (3 * 3584 * 3072)} bits a weight")
print(f"all {896 * layers:,} of them {896 * layers * expert_bytes:,} bytes")
print(f"    {896 * layers * expert_bytes / 1_560_860_324_864:.0%} of the checkpoint's payload")  # claim share
print(f"sixteen of them {16 * expert_bytes / 1e6:.0f} MB a layer")  # claim half width
print(f"    a token reads {16 * layers * expert_bytes / 1e9:.2f} GB")  # claim half token
print(f"    at 7 GB/s {16 * layers * expert_bytes / 7e9:.1f} s")  # claim half seconds
print(f"of the full width {32 * expert_bytes / 1e6:.0f} MB a layer")  # claim full width
print(f"    a token would read {32 * layers * expert_bytes / 1e9:.1f} GB")  # claim full token
print(f"    at 7 GB/s {32 * layers * expert_bytes / 7e9:.1f} s")  # claim full seconds
print(f"a layer's shared path {shared_bytes / 1e6:.0f} MB")
print(f"into the latent and back {latent_bytes / 1e6:.0f} MB a layer, both matrices")  # claim latent
print(f"    {latent_bytes * layers / 1e9:.1f} GB a token")  # claim latent token
with_latent, without = layers * (16 * expert_bytes + latent_bytes), layers * 32 * expert_bytes
print(f"experts and these matrices {with_latent / 1e9:.1f} GB a token")  # claim net
print(f"    {1 - with_latent / without:.0%} less than in the full width")
assert .3 < 1 - with_latent / without < .36  # claim third
print(f"a token's trunk and experts, without the head: {(108_811_877_376 + 16 * layers * expert_bytes) / 1e9:.1f} GB")
print(f"answers stored until the sum: {16 * 3584 * 4:,} bytes a token")

# %% [markdown]
# In a chunk each byte of the trunk and each chosen expert is read once. How many experts that is depends on how alike
# the tokens are. Unrelated tokens are the worst case; here they are made at random. The counts come from `routed_sum`
# on small stand-ins for the experts, 896 of them.

# %%
many = Resident([random_expert(rng, 32, 32)] * 896, rng)
chunks, fetched = [1, 4, 16, 64], []
for T in chunks:
    ids, weights = route(rng.normal(size=(T, 896)).astype(np.float32), np.zeros(896, np.float32), 16, 1.0)
    many.fetched = 0
    many.request(np.unique(ids).tolist())
    routed_sum(many, np.ones((T, 32), np.float32), ids, weights, SITU, CORES)
    fetched.append(many.fetched)
trunk = np.array([108_811_877_376 / T / 1e9 for T in chunks])
routed = np.array([n * layers * expert_bytes / T / 1e9 for n, T in zip(fetched, chunks)])
for T, n, a, b in zip(chunks, fetched, trunk, routed):
    print(f"chunk of {T:2}: {n:3} of {min(16 * T, 896):3} experts a layer, {a + b:6.1f} GB read a token")
assert fetched[0] == 16 and all(n <= 896 for n in fetched)

# %%
fig, ax = plt.subplots()
ax.bar(range(len(chunks)), routed, color="C0", label="routed experts")
ax.bar(range(len(chunks)), trunk, bottom=routed, color="C5", alpha=.6, label="trunk")
ax.axhline(25.83, ls="--", lw=.8, color="C1", label="experts, one token at a time")
ax.set_xticks(range(len(chunks)), chunks)
ax.set(xlabel="tokens in the chunk", ylabel="GB read a token",
       title="A chunk shares the trunk at once, the experts slowly")
ax.legend()
plt.show()

# %% [markdown]
# ## Summary
#
# - SiTU is SwiGLU with a ceiling of 100; its sigmoid sees the uncapped gate.
# - The norm is on the weighted sum, once. It hides every common factor, so the gate needs a quiet case.
# - Answers are kept until all are there and are added in rank order: neither the disk nor the size of a chunk can
#   change a bit.
#
# ## Exercises
#
# Answers: [exercises of part 4](../answers/04_moe_router.ipynb).
#
# 1. With `eps` = 0 the scaling factor could be any positive number. With 1e-5: by how much must all bytes of
#    `w2_scale_quiet` be raised until dropping the factor of 2.5 passes the gate?
# 2. Write `routed_sum` with a float64 accumulator that adds answers as they arrive. For how many of 1,000 shuffles do
#    the float32 results differ?
# 3. A chunk of 64 tokens stores 64 × 16 answers. Rewrite the sum so that a token's answers are released as soon as its
#    last expert is there, still in rank order, and count how many are stored at most.
#
# Next: [5.1](../05_streaming/01_system.ipynb) begins the part that brings these weights from a disk.
