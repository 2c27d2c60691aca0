# %% [markdown]
# # Answers: part 3, MLA and block residuals
#
# Try the exercises of chapters [3.1](../03_mla/01_mla.ipynb) and [3.2](../03_mla/02_residual.ipynb) before you read on.
# · [contents](../README.md)

# %%
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from k3lib.functions import rms_norm, sigmoid
from k3lib.matmul import ResidentMatrix, linear
from k3lib.mla import MLAShape, attend, mla_cache, mla_layer
from k3lib.residual import depth_weights, mix

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())

# %% [markdown]
# ## 3.1, 1. When expanding pays
#
# To expand the key and the value of one position for one head takes $(128 + 128) \times 512$ multiply-adds. It is done
# once for all $T$ tokens of the chunk. After that each token saves $1088 - 320$ multiply-adds for that position. So
# expanding pays if $T\,(1088 - 320) > 256 \times 512$. What absorption itself costs, $256 \times 512$ for each head and
# token, does not depend on the number of positions, and is left out.

# %%
expanded_fma, absorbed_fma, once = 128 + 64 + 128, 512 + 64 + 512, (128 + 128) * 512
T = once // (absorbed_fma - expanded_fma) + 1
print(f"from {T} tokens on")
assert once + T * expanded_fma < T * absorbed_fma and once + (T - 1) * expanded_fma >= (T - 1) * absorbed_fma


# %% [markdown]
# But expanded keys and values of 96 heads take 43 times the memory of the latents, for all positions at once. The
# engine never expands.
#
# ## 3.1, 2. The cache in bf16

# %%
def to_bf16(x):
    "Rounded to the nearest bf16, as float32."
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


fixture = load_file(ROOT / "fixtures/ops/mla.safetensors")
names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "g_proj",
         "o_proj")
W = {n: ResidentMatrix(fixture[n]) if fixture[n].ndim == 2 else fixture[n] for n in names}
shape = MLAShape(heads=3, nope=12, rope=4, v_dim=10, latent=16)
x, cache = fixture["x"], mla_cache(shape, 12)
y = mla_layer(W, x, cache, 0, shape, 1)
q = linear(W["q_b_proj"], rms_norm(linear(W["q_a_proj"], x), W["q_a_layernorm"], 1e-6)).reshape(12, 3, 16)
gate = linear(W["g_proj"], x)
gate = np.array([sigmoid(np.float32(g)) for g in gate.ravel()], np.float32).reshape(gate.shape)


def output(cache):
    return linear(W["o_proj"], attend(W["kv_b_proj"], q, cache, 0, 10, 1) * gate)


assert np.array_equal(output(cache), y)
far = np.abs(output(to_bf16(cache)) - y).max() / np.abs(y).max()
print(f"the outputs move by {far:.1e} of the largest: outside the gate of 1e-5, {far > 1e-5}")
assert 1e-4 < far < 1e-1

# %% [markdown]
# ## 3.1, 3. Weights that count as zero
#
# The sum of weights is at least 1, because the largest score has the weight $e^0$. A weight that is cut is at most
# $e^{-60}$. A million of them are far below half of the distance between 1 and the next float32.

# %%
print(f"a million times e^-60 is {1e6 * np.exp(-60.0):.1e}; half of the distance is {2.0 ** -24:.1e}")
assert np.float32(1) + np.float32(1e6 * np.exp(-60.0)) == 1

# %% [markdown]
# The context is a sum of the same weights times latents, and latents are normed, so the same holds for it.
#
# ## 3.2, 1. Blocks of one layer
#
# Each layer finishes a source. At the end there are the embedding, the sums of layers 0 to 91, and the running sum of
# layer 92.

# %%
sources = -(-93 // 1) + 1
print(f"{sources} sources; {sources * 64 * 7168 * 4 / 1e6:.0f} MB for a chunk of 64 tokens, "
      f"instead of {9 * 64 * 7168 * 4 / 1e6:.1f}")
assert sources == 94

# %% [markdown]
# ## 3.2, 2. The size of a source
#
# With $\varepsilon = 0$, RMSNorm divides by the source's own root mean square, so a positive factor cancels. With
# $\varepsilon$, the normed source is shorter by $\sqrt{m^2 / (m^2 + \varepsilon)}$, where $m$ is the root mean square.
# This is a half where $m^2 = \varepsilon / 3$.

# %%
rng = np.random.default_rng(3)
some, query = rng.standard_normal((3, 1, 64)).astype(np.float32), rng.standard_normal(64).astype(np.float32)
ones = np.ones(64, np.float32)
louder = some * np.array([1, 1000, 1], np.float32).reshape(3, 1, 1)
same = np.allclose(depth_weights(some, 3, ones, query, 0.0), depth_weights(louder, 3, ones, query, 0.0), rtol=1e-5)
m = np.sqrt(1e-5 / 3)
quiet = m * some[0, 0] / np.sqrt(np.mean(some[0, 0] ** 2))
score = [quiet @ query / np.sqrt(np.mean(quiet ** 2) + eps) for eps in (0, 1e-5)]
print(f"a thousand times as long, the same weights: {same}; at a root mean square of {m:.2e} "
      f"the score is {score[1] / score[0]:.3f} of what it was")
assert same and np.isclose(score[1] / score[0], .5, rtol=1e-5)

# %% [markdown]
# ## 3.2, 3. Where a mix may write
#
# A mix must not write over a source. When the second mix runs, `y` has already been added to the running sum, or copied
# as the start of a new one. It is no source and nobody reads it any more, so its memory may be used again. The function
# asks only whether memory is shared with the sources:

# %%
y = np.empty((1, 64), np.float32)
assert mix(some, 3, ones, query, 1e-5, y) is y
try:
    mix(some, 3, ones, query, 1e-5, some[2])
except ValueError as error:
    print(error)
