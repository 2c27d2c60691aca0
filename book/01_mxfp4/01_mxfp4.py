# %% [markdown]
# # 1.1 Four bits a weight
#
# Nearly all bytes of Kimi K3 are routed experts, 93% of them.<!--claim most--> Their weights are stored in MXFP4:
# blocks of 32 four-bit codes with one scale byte. At the end of this chapter you can decode a block on paper, recognise
# four wrong readings of the same bytes, and say what the format costs.
#
# > **Without it:** the experts take 5.4 TB<!--claim wide total--> in bf16. For each token a disk of 7 GB/s reads those
# > that the token needs in 13.9 s.<!--claim wide seconds-->
# >
# > **With it:** 1.45 TB<!--claim packed total--> and 3.7 s.<!--claim packed seconds-->
#
# Needs NumPy, and the idea of a floating-point number. Runs in five seconds. Makes `k3lib.mxfp4`.
#
# [0.1 K3 on one page](../00_k3/01_k3.ipynb) ·
# [contents](../README.md) ·
# [1.2 Kernels: compiled once, never stale](02_kernel_cache.ipynb)

# %%
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
sys.path.insert(0, str(ROOT / "book"))
import schematics

K3 = read_config(ROOT / "fixtures/k3")  # the numbers of the released model
schematics.where(K3, "experts")

# %% tags=["export"]
import numpy as np

# %% tags=["parameters"]
seed = 0


# %% [markdown]
# | symbol | meaning | in K3's `w1` | in code |
# |---|---|---|---|
# | $n$ | four-bit code of a weight: sign, two exponent bits, one mantissa bit (E2M1) | 0 to 15 | a nibble of `packed` |
# | $\mathrm{E2M1}(n)$ | value of the code | 16 values, largest 6 | `E2M1[n]` |
# | $E$ | scale byte of 32 consecutive weights (E8M0: exponent only) | 0 to 254 | `scale` |
# | $W_i = 2^{E-127}\, \mathrm{E2M1}(n_i)$ | weight $i$ of a row | 3072 × 3584 in the matrix | never stored |
# | $x$, $y = Wx$ | input and output of a product, float32 | 3584, 3072 | `x`, `out` |
#
# A byte holds two codes, its two *nibbles*: byte $j$ of a row has weight $2j$ in its **low** nibble and weight $2j+1$
# in its high one. So a row of 3584 weights takes 1792 bytes in `packed` and 112 scale bytes.
#
# The format is OCP Microscaling v1.0, "MXFP4". In the checkpoint a matrix is two tensors, `weight_packed` and
# `weight_scale`.

# %% [markdown]
# ## 1.1.1 By hand: one block
#
# A code is a tiny floating-point number. Exponent field 0 means that there is no hidden leading 1 (a subnormal), as in
# IEEE formats. The exponent's bias is 1, and there is neither infinity nor NaN. The whole format has sixteen values:

# %%
def e2m1(code):
    "Value of a four-bit code, from its fields."
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
    return (-1) ** sign * magnitude


[e2m1(code) for code in range(16)]

# %% tags=["export"]
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # value of each code
SCALE = np.array([1 << 22, *(e << 23 for e in range(1, 255)), 0x7fc00000], np.uint32).view(np.float32)  # of each byte
GROUP = 32  # elements that share one scale byte

# %% [markdown]
# `SCALE` holds the meaning of every scale byte: $2^{E-127}$, and NaN for 255. It is made from bits. A float32 with the
# exponent field $E$ has the factor $2^{E-127}$. Only byte 0 needs care: $2^{-127}$ is subnormal, and arithmetic may
# flush it to zero ([1.4.3]).
#
# Here is a block, to the bit. Its scale byte is 126, which stands for a half.
#
# [1.4.3]: 04_parallel.ipynb#1.4.3-The-mode-of-a-thread's-arithmetic

# %%
schematics.mxfp4()

# %% [markdown]
# The first byte is `0x2f`. Its low nibble `f` is weight 0, its high nibble `2` is weight 1. In each byte the low nibble
# comes first.

# %%
assert E2M1.tolist() == [e2m1(code) for code in range(16)]
block = bytes.fromhex("2f 71 08 53") * 4
for j, byte in enumerate(block[:4]):
    low, high = byte & 15, byte >> 4
    print(f"byte {j} = {byte:02x}   w[{2 * j}] = {e2m1(low):4} / 2 = {e2m1(low) / 2:5}"
          f"   w[{2 * j + 1}] = {e2m1(high):4} / 2 = {e2m1(high) / 2:5}")


# %% [markdown]
# ## 1.1.2 A block decodes to a scale times a table entry
#
# $$W_i = 2^{E-127}\, \mathrm{E2M1}(n_i)$$
#
# The scale has no mantissa, so the multiplication changes only the exponent. It is exact as long as the result fits
# float32. In the standard, byte 255 means NaN.

# %% tags=["export"]
def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights float32 [..., k] from `packed` uint8 [..., k/2], low nibble first, and `scale` uint8 [..., k/32].

    OCP Microscaling v1.0: value = E2M1[nibble] * 2^(scale - 127); scale byte 255 is NaN.
    """
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return E2M1[codes] * np.repeat(SCALE[scale], GROUP, -1)


# %%
by_hand = decode(np.frombuffer(block, np.uint8), np.array([126], np.uint8))
assert by_hand[:8].tolist() == [-3, .5, .25, 3, -0., 0, .75, 1.5]
by_hand[:8]

# %% [markdown]
# The fixture `fixtures/ops/mxfp4` was computed by another library in float64. Its table holds every code under every
# scale byte from 0 to 254. `decode` must reproduce the table **exactly**; it may differ only where float32 overflows.

# %%
fixture = {name: array.copy() for name, array in load_file(ROOT / "fixtures/ops/mxfp4.safetensors").items()}
with np.errstate(over="ignore"):
    table = decode(fixture["table_packed"][:255], fixture["table_scale"][:255])
    exact = fixture["table_f64"].astype(np.float32)
assert np.array_equal(table, exact)
for byte in (0, 1, 2, 253, 254):
    print(f"scale {byte:3}: codes 1, 2, 7 ->", *(f"{v:.3g}" for v in table[byte, [1, 2, 7]]))
print("scale 255:", decode(fixture["table_packed"][255:], fixture["table_scale"][255:])[0, :3])


# %% [markdown]
# Short cuts fail at the ends of the range. $2^{-127}$ (byte 0) is below the smallest normal float32, so an exponent
# field cannot hold it. Bytes 253 and 254 overflow to infinity for large codes, as they should.
#
# The tempting short cut puts the byte into the exponent field. It is right for 1 to 254 and wrong at both ends. Byte 0
# becomes a zero. Byte 255 becomes an infinity, which looks like an overflow where a damaged file should be noticed.

# %%
def shifted(byte):
    "The scale byte as the exponent field of a float32: the shortcut."
    return (np.uint32(byte) << np.uint32(23)).view(np.float32)


wrong = [byte for byte in range(256) if not np.array_equal(shifted(byte), SCALE[byte], equal_nan=True)]
assert wrong == [0, 255]
for byte in (0, 1, 127, 254, 255):
    print(f"byte {byte:3}: right {SCALE[byte]:9.4g}   shifted {shifted(byte):9.4g}")

# %% [markdown]
# ## 1.1.3 The slow, certain product
#
# Decode, convert to float64, multiply, sum. The fast product of chapter [1.5] must agree with this one to the fixture's
# tolerance, 1e-5 of the largest output. That is more than ten times the distance between float32 and float64 arithmetic
# here.
#
# [1.5]: 05_matmul.ipynb

# %%
TOLERANCE = 1e-5  # fixtures/ops/README.md, section mxfp4


def reference(packed, scale, x):
    "y = W x in float64: x [k] -> y [n]."
    return decode(packed, scale).astype(np.float64) @ x.astype(np.float64)


def distance(y, expected):
    "Largest difference, relative to the largest expected magnitude."
    return np.abs(y - expected).max() / np.abs(expected).max()


packed, scale, x, y = (fixture[name] for name in ("matvec_packed", "matvec_scale", "x", "matvec_y"))
assert np.array_equal(decode(packed, scale), fixture["matvec_weight"])
assert distance(reference(packed, scale, x), y) < TOLERANCE
print(f"{packed.shape[0]} rows of {x.size} weights: {packed.nbytes + scale.nbytes:,} bytes; "
      f"relative difference below 1e-6: {distance(reference(packed, scale, x), y) < 1e-6}")


# %% [markdown]
# ## 1.1.4 Four ways to read the same bytes wrongly
#
# Each of these runs without an error and gives numbers of the right size. Each must fail the gate, which compares a
# product.

# %%
def gate(name, weight):
    "The product with `weight`, against the fixture."
    far = distance(weight @ x.astype(float), y)
    assert far < TOLERANCE, f"{name}: off by {far:.2g} of the largest output, allowed {TOLERANCE}"


def from_codes(codes, bias=127, values=E2M1):
    return values[codes] * np.repeat(np.ldexp(1.0, scale.astype(int) - bias), GROUP, -1)


low, high = packed & 15, packed >> 4
groups = [half.reshape(*scale.shape, 16) for half in (low, high)]
traps = {
    "nibbles swapped": from_codes(np.stack([high, low], -1).reshape(len(low), -1)),
    "low nibbles first, then high": from_codes(np.concatenate(groups, -1).reshape(len(low), -1)),
    "scale bias 128": from_codes(np.stack([low, high], -1).reshape(len(low), -1), bias=128),
    "codes read as int4 - 8": from_codes(np.stack([low, high], -1).reshape(len(low), -1), values=np.arange(16.0) - 8),
}
gate("right", from_codes(np.stack([low, high], -1).reshape(len(low), -1)))
for name, weight in traps.items():
    assert distance(weight @ x.astype(float), y) > 1000 * TOLERANCE, name
    print(f"{name:30} off by {distance(weight @ x.astype(float), y):.2g} of the largest output")

# %% tags=["raises-exception"]
gate("nibbles swapped", traps["nibbles swapped"])

# %% [markdown]
# The first one is the hardest to notice. Two weights of one byte change places, and they share a scale. So minimum,
# maximum, mean, deviation, histogram and the norm of every row stay what they were. Only a product shows the mistake.

# %%
right, swapped = decode(packed, scale), traps["nibbles swapped"]
assert np.array_equal(np.sort(right, 1), np.sort(swapped, 1))
print("every row holds the same numbers:", np.array_equal(np.sort(right, 1), np.sort(swapped, 1)),
      f"  correlation of the outputs: {np.corrcoef(y, swapped @ x)[0, 1]:.2f}")
fig, (ax, ay) = plt.subplots(1, 2)
bins = np.linspace(-0.1, 0.1, 60)
ax.hist(right.ravel(), bins, label="right")
ax.hist(swapped.ravel(), bins, histtype="step", lw=1.4, label="swapped")
ax.set(xlabel="weight", ylabel="number of weights", yscale="log", ylim=(300, 3e5))
ax.set_title("Swapped nibbles keep the histogram")
ax.legend(loc="upper left")
ay.plot(y, reference(packed, scale, x), ".", label="right")
ay.plot(y, swapped @ x, ".", label="swapped")
ay.set(xlabel="output of the fixture", ylabel="computed output", title="and change every output")
ay.legend(loc="lower right")
plt.show()


# %% [markdown]
# ## 1.1.5 What four bits can say
#
# What does the format cost? To see it, go the other way and store weights in it. The standard's recipe takes the
# block's largest magnitude and chooses $2^{E-127}$ so that this magnitude falls between 4 and 8. Then it rounds each
# weight to the nearest value. A magnitude above 6 becomes 6.

# %%
def quantise(w):
    "The nearest MXFP4 weights to float32 `w` [..., k]: (packed, scale)."
    blocks = w.reshape(*w.shape[:-1], -1, GROUP).astype(np.float64)
    exponent = np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2
    codes = np.abs(blocks[..., None] / 2.0**exponent[..., None] - (E2M1 + 0.0)).argmin(-1)
    codes = codes.reshape(w.shape).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent[..., 0] + 127).astype(np.uint8)


rng = np.random.default_rng(seed)
w = rng.standard_normal((64, 3584)).astype(np.float32)
again = decode(*quantise(w))
assert np.array_equal(decode(*quantise(again)), again)  # a value of the grid is its own nearest
print(f"Gaussian weights: rms error {100 * np.sqrt(np.mean((again - w)**2) / np.mean(w**2)):.0f}% of the rms weight")

# %%
v = np.linspace(0.05, 8, 2000)
q = E2M1[np.abs(v[:, None] - E2M1[:8]).argmin(1)]
fig, (ax, ay) = plt.subplots(1, 2)
ax.plot(v, q)
ax.plot(E2M1[:8], E2M1[:8], "o", ms=4)
ax.set(xlabel="weight / scale", ylabel="nearest value", title="Eight magnitudes: steps of ½, 1, 2")
ay.plot(v, 100 * np.abs(q - v) / v)
ay.set(xlabel="weight / scale", ylabel="relative error (%)", ylim=(0, 60))
ay.set_title("Worst below ½; above 6 it is clipped")
plt.show()

# %% [markdown]
# ## 1.1.6 Bytes, and the most that can be asked
#
# To compute one token, each weight is read once and used once. So the time of a product cannot be less than the bytes
# of its weights divided by the bandwidth, of the memory or of the disk. At 4.25 bits<!--claim bits--> a weight takes
# 0.53 bytes;<!--claim bytes--> unpacked to float32 it would take 4. Therefore the product must take the weights packed.

# %%
intermediate, latent = 3072, 3584  # moe_intermediate_size, routed_expert_hidden_size
weights = 3 * intermediate * latent  # w1, w2, w3
expert_bytes = weights // 2 + weights // GROUP
assert expert_bytes == 17_547_264
print(f"one expert: {weights:,} weights, {expert_bytes:,} bytes")
print(f"{8 * expert_bytes / weights} bits a weight")  # claim bits
print(f"    {expert_bytes / weights:.2f} bytes")  # claim bytes
wide, experts, chosen = 2 * weights, 92 * 896, 92 * 16  # bytes of an expert in bf16; all experts; those of a token
print(f"all {experts:,} experts: {experts * wide / 1e12:.1f} TB in bf16")  # claim wide total
print(f"    {experts * expert_bytes / 1e12:.2f} TB in MXFP4")  # claim packed total
print(f"    that is {experts * expert_bytes / 1_560_860_324_864:.0%} of the checkpoint's bytes")  # claim most
print(f"the {chosen:,} of a token: {chosen * wide / 1e9:.1f} GB in bf16, {chosen * expert_bytes / 1e9:.2f} in MXFP4")
print(f"    at 7 GB/s {chosen * wide / 7e9:.1f} s in bf16")  # claim wide seconds
print(f"    {chosen * expert_bytes / 7e9:.1f} s in MXFP4")  # claim packed seconds

# %% [markdown]
# ## 1.1.7 What the grid costs a model that has learned
#
# `fixtures/stories` is a small K3 that was trained to read very short stories and to answer questions about them. Its
# experts were rounded to MXFP4 in every step of the training, as those of the release were. So what a grid costs can be
# counted: it is the share of right answers that is lost. The training kept the experts' weights in float32 as well; the
# fixture has what that version answered.
#
# Four versions of the model answer the same held-out questions. One is as trained. In the second the experts have a
# coarser grid, which the model has never seen: each of the sixteen codes is replaced by the code of 0, 3 or -3,
# whichever is nearest. In the third the experts are as trained, and the matrices of attention, router, dense and shared
# path are on the grid, too, though they were trained in bfloat16. In the fourth those have the coarser grid.

# %%
import json
import sys

sys.path.insert(0, str(ROOT / "book"))
import learned

rounding = json.loads((learned.FOLDER / "rounding.json").read_text())
print(f"{'right words, experts in':<32}", *(f"{kind:>9}" for kind in rounding["MXFP4"]))
for name in ("float32", "MXFP4"):
    print(f"{name:<32}", *(f"{share:>9.0%}" for share in rounding[name].values()))

# %%
reader = learned.Reader()


def coarser(values):
    "A function that replaces the codes of packed weights by those of the nearest of some magnitudes."
    left = [int(np.flatnonzero(E2M1[:8] == v)[0]) for v in values]
    nearest = [left[np.abs(E2M1[left] - v).argmin()] for v in E2M1[:8]]
    table = np.array([*nearest, *(code + 8 for code in nearest)], np.uint8)
    return lambda packed: table[packed & 15] | table[packed >> 4] << 4


def on_the_grid(bits, change=lambda packed: packed):
    "bfloat16 numbers, as uint16, rounded to MXFP4. A code times a power of two is a bfloat16 number."
    packed, scale = quantise((bits.astype(np.uint32) << 16).view(np.float32))
    return (decode(change(packed), scale).view(np.uint32) >> 16).astype(np.uint16)


def is_code(name):
    return ".experts." in name and name.endswith("_packed")


def is_other_matrix(name):
    w = reader.weights[name]
    return w.dtype == np.uint16 and w.ndim == 2 and len(w) > 1 and ".layers." in name


grids = {"as trained": reader.memory,
         "experts: three values": reader.changed(coarser([0, 3]), is_code),
         "all others: MXFP4": reader.changed(on_the_grid, is_other_matrix),
         "all others: three values": reader.changed(lambda w: on_the_grid(w, coarser([0, 3])), is_other_matrix)}
right = {name: reader.accuracy(model) for name, model in grids.items()}
mean = [np.mean(list(share.values())) for share in right.values()]
assert max(mean[:3]) - min(mean[:3]) < .1 and mean[3] < mean[0] - .1

# %%
fig, ax = plt.subplots(figsize=(7, 3))
for i, (name, share) in enumerate(right.items()):
    ax.bar(np.arange(4) + .2 * (i - 1.5), [100 * x for x in share.values()], .18, label=name)
ax.set(xticks=range(4), xticklabels=share, ylabel="right answers (%)", ylim=(0, 150),
       title="Three values do for the experts, not for the other matrices")
ax.legend(ncol=2)
plt.show()

# %% [markdown]
# ## Summary
#
# - A weight is $2^{E-127}$ times one of sixteen values; low nibble first; 4.25 bits. Swapped nibbles pass every check
#   but a product.
# - Both ends of the scale need care: byte 0 is subnormal, byte 255 is NaN.
# - Every weight of a token's experts is read once, so the product takes the weights packed.
#
# ## Exercises
#
# Answers: [exercises of part 1](../answers/01_mxfp4.ipynb).
#
# 1. Write `encode(w)` that returns the packed bytes of weights that *are* on the grid, and show `decode(encode(w))`
#    keeps every bit, minus zero included. (`quantise` above loses it. Where?)
# 2. Give K3 groups of 16 instead of 32 weights a scale. How many bits a weight, how many bytes an expert?
#
# Next: [1.2](02_kernel_cache.ipynb) keeps compiled kernels on disk and never runs a stale one. On a first reading go on
# to [1.3](03_simd.ipynb), which makes sixteen float32 lanes one value of the language.
