# %% [markdown]
# # Answers: part 4, router and experts
#
# Try the exercises of chapters [4.1](../04_moe_router/01_router.ipynb) and [4.2](../04_moe_router/02_moe.ipynb) before
# you read on. · [contents](../README.md)

# %%
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from k3lib.matmul import ResidentMatrix
from k3lib.moe import Expert, MoEShape, Situ, moe_layer
from k3lib.router import route

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
fixture = load_file(ROOT / "fixtures/ops/router.safetensors")
logits, bias = fixture["logits"], fixture["bias"]

# %% [markdown]
# ## 4.1, 1. Weights that do not sum to $\lambda$
#
# The $10^{-20}$ in the denominator counts where the sum of the chosen scores is as small. Far below, the sigmoid itself
# is 0 in float32, and so are the weights.

# %%
for logit in (-30, -50, -200):
    _, weights = route(np.full((1, 896), logit, np.float32), bias * 0, 16, 1.0)
    print(f"all logits {logit}: the weights sum to {weights.sum():.3f}")
assert (weights == 0).all()


# %% [markdown]
# ## 4.1, 2. The smallest bias
#
# Expert $e$ is chosen when its $s + b$ passes the $K$-th largest of the others.

# %%
def smallest_bias(logits, bias, e, k):
    "What must be added to bias[e] so that token 0 chooses e; 0 if it does already. Ties aside."
    key = 1 / (1 + np.exp(-logits[0].astype(np.float64))) + bias
    return max(0.0, np.sort(np.delete(key, e))[-k] - key[e])


def chosen_with(e, extra):
    changed = bias.copy()
    changed[e] += np.float32(extra)
    return e in route(logits[:1], changed, 16, 1.0)[0]


for e in (3, 100, 895):
    need = smallest_bias(logits, bias, e, 16)
    less, more = chosen_with(e, need - 1e-5), chosen_with(e, need + 1e-5)
    print(f"expert {e}: {need:.4f}; chosen with slightly less: {less}, with slightly more: {more}")
    assert (less, more) == (False, True)

# %% [markdown]
# ## 4.1, 3. Permuted experts
#
# The rule uses the id only between equal values of $s + b$. So only rows with a tie across the cut can change. In the
# reverse order of the experts every such tie is decided the other way.

# %%
order = np.arange(896)[::-1]
ids, _ = route(np.ascontiguousarray(logits[:, order]), np.ascontiguousarray(bias[order]), 16, 1.0)
changed = [t for t in range(24) if set(order[ids[t]]) != set(fixture["ids"][t])]
print("rows that change:", changed, "  rows with a tie:", fixture["tie_rows"].tolist())
assert changed == fixture["tie_rows"].tolist()

# %% [markdown]
# ## 4.2, 1. How quiet the experts must be
#
# A byte more in all scales doubles the experts' answers. The larger their sum is, the less `eps` counts in the norm,
# and the less a factor can be seen.

# %%
moe = load_file(ROOT / "fixtures/ops/latent_moe.safetensors")
W = {n: ResidentMatrix(moe[n]) if moe[n].ndim == 2 else moe[n]
     for n in ("gate", "e_score_correction_bias", "routed_expert_down_proj", "routed_expert_norm",
               "routed_expert_up_proj")}
W |= {f"shared_experts.{n}": ResidentMatrix(moe[f"shared_{n}"]) for n in ("gate_proj", "up_proj", "down_proj")}


class Louder:
    "The fixture's experts with quiet answers, their w2 scales raised."

    def __init__(self, raised):
        self.raised = raised

    def request(self, ids):
        self.ids = ids

    def map(self, work, threads):
        for e in self.ids:
            scale = moe["w2_scale_quiet"][e] + np.uint8(self.raised)
            arrays = moe["w1_packed"][e], moe["w1_scale"][e], moe["w2_packed"][e], scale, moe["w3_packed"][e], moe[
                "w3_scale"][e]
            work(e, Expert.packed([np.ascontiguousarray(a) for a in arrays]))


def dropped(raised):
    "How far the output moves without the factor of 2.5."
    right, wrong = (moe_layer(W, Louder(raised), moe["x"], MoEShape(3, scale, Situ(4, 25), 1e-5), 1)
                    for scale in (2.5, 1.0))
    return np.abs(wrong - right).max() / np.abs(right).max()


raised = next(n for n in range(40) if dropped(n) < 1e-5)
print(f"raised by 0: off by {dropped(0):.2g}; by {raised - 1}: {dropped(raised - 1):.2g}; by {raised}: it passes")

# %% [markdown]
# ## 4.2, 2. A float64 accumulator
#
# Its sums depend on the order, too, but only by about $10^{-16}$, and rounding to float32 nearly always hides that.

# %%
rng = np.random.default_rng(5)
answers, weights = rng.standard_normal((16, 3584)).astype(np.float32), np.full(16, 1 / 16, np.float32)
products = weights[:, None].astype(np.float64) * answers
results = {}
for _ in range(1000):
    total = np.zeros(3584)
    for r in rng.permutation(16):
        total += products[r]
    key = total.astype(np.float32).tobytes()
    results[key] = results.get(key, 0) + 1
usual = max(results.values())
print(f"{1000 - usual} of 1,000 shuffles differ from the most frequent result, {len(results)} results in all")

# %% [markdown]
# "Nearly always" is no promise: a sum that lies close to the middle between two float32 numbers is rounded to either.
# The engine adds in rank order, and then needs no luck.
#
# ## 4.2, 3. Answers released early
#
# Answers of a token can be added as soon as all of lower rank are there. An answer that comes before one of lower rank
# must be kept. So count, for random arrivals, the most that are kept at one time.

# %%
ids, _ = route(rng.normal(size=(64, 896)).astype(np.float32), np.zeros(896, np.float32), 16, 1.0)
kept, most, there, added = 0, 0, np.zeros(ids.shape, bool), np.zeros(64, int)
for e in rng.permutation(np.unique(ids)):
    rows = np.argwhere(ids == e)
    there[tuple(rows.T)] = True
    kept += len(rows)
    most = max(most, kept)
    for t in np.unique(rows[:, 0]):
        while added[t] < 16 and there[t, added[t]]:
            added[t], kept = added[t] + 1, kept - 1
print(f"at most {most} of {ids.size} answers are kept at one time")
assert kept == 0 and most < ids.size
