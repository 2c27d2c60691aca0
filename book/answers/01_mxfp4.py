# %% [markdown]
# # Answers: part 1, MXFP4
#
# Try the exercises of part 1 before you read on. · [contents](../README.md)

# %%
import numpy as np

from k3lib.mxfp4 import E2M1, GROUP, decode


# %% [markdown]
# ## 1.1, 1. An encoder that keeps every bit
#
# `quantise` looks for the nearest value with `argmin` over `E2M1 + 0.0`. The addition turns −0 into 0, so code 0 always
# wins over code 8, and the sign of a zero is lost. Here the sign bit is taken from the number itself, and the code only
# from the magnitude. The scale is that of `quantise`; a block on the grid of another scale is on this grid, too,
# because a magnitude of 4 or 6 leaves room for all smaller ones.

# %%
def encode(w):
    "(packed, scale) of float32 `w` [..., k] whose numbers are all on an MXFP4 grid."
    blocks = w.reshape(*w.shape[:-1], -1, GROUP).astype(np.float64)
    largest = np.abs(blocks).max(-1, keepdims=True)
    exponent = np.maximum(np.floor(np.log2(np.where(largest, largest, 1))) - 2, -127)
    codes = np.searchsorted(E2M1[:8], np.abs(blocks) / 2.0**exponent) | np.signbit(blocks) << 3
    codes = codes.reshape(w.shape).astype(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent[..., 0] + 127).astype(np.uint8)


rng = np.random.default_rng(1)
w = decode(rng.integers(0, 256, (500, 64), np.uint8), rng.integers(0, 250, (500, 4), np.uint8))
again = decode(*encode(w))
print("every bit kept:", np.array_equal(w.view(np.uint32), again.view(np.uint32)),
      "  minus zeros among them:", bool((np.signbit(w) & (w == 0)).any()))
assert np.array_equal(w.view(np.uint32), again.view(np.uint32))

# %% [markdown]
# ## 1.1, 2. A scale for every 16 weights

# %%
weights = 3 * 3072 * 3584
for group in (32, 16):
    nbytes = weights // 2 + weights // group
    print(f"groups of {group}: {8 * nbytes / weights} bits a weight, {nbytes:,} bytes an expert")
assert nbytes == 18_579_456

# %% [markdown]
# ## 1.2, 1. A constant, and a variable of the environment
#
# The digest is taken over the text of the sources. An edit of `TILE = 8` changes the text, so it changes the digest and
# the name of the entry. The text `TILE = int(os.environ["TILE"])` stays the same when the variable of the environment
# gets another value. Numba would then load a kernel that contains the old value. (The digest contains the variables of
# the environment whose names begin with `NUMBA_`, and no others.)
#
# ## 1.3, 1. Floats from the bits of a code
#
# The code without its sign, $t$, has two exponent bits and one mantissa bit. Shifted left by 22, they are in the places
# of a float32: the mantissa bit is the highest mantissa bit, and the exponent bits are the lowest exponent bits. The
# exponent of `0x3f800000` stands for $2^0$. This is right from $t = 2$ on. Codes 0 and 1 have exponent 0, which means a
# subnormal value in E2M1. They need the values 0 and 1 instead.

# %%
t = np.arange(8, dtype=np.uint32)
direct = (np.uint32(0x3F800000) + (t << np.uint32(22))).view(np.float32)
print("built directly:", direct.tolist())
print("twice a code:  ", (2 * E2M1[:8]).tolist())
assert (direct[2:] == 2 * E2M1[2:8]).all() and (direct[:2] != 2 * E2M1[:2]).all()


# %% [markdown]
# ## 1.3, 2. The largest of sixteen
#
# The maximum of finite numbers does not depend on the order: of two numbers it always gives one of them, unrounded. So
# halving, as for the sum, gives the same bits as one lane after another. Two cases remain. With a NaN among the lanes
# `llvm.maxnum` gives the other number, in any order. Of $+0$ and $-0$ it may give either one.

# %%
def by_halves(v):
    while len(v) > 1:
        v = np.fmax(v[:len(v) // 2], v[len(v) // 2:])
    return v[0]


lanes = rng.standard_normal((1000, 16)).astype(np.float32)
same = all(by_halves(v) == by_halves(rng.permutation(v)) == np.fmax.reduce(v) for v in lanes)
print("the same number in any order:", same)
assert same


# %% [markdown]
# ## 1.4, 1. Few chunks and many
#
# With one chunk for each thread, the thread with the long item works alone at the end. With eight, the other thread
# takes nearly all other items.

# %%
def ticks(chunk, durations=(8, *[1] * 15), threads=2):
    "The tick at which the last of the threads ends, if they take chunks of so many items from one counter."
    free = [0] * threads
    for begin in range(0, len(durations), chunk):
        first = free.index(min(free))
        free[first] += sum(durations[begin:begin + chunk])
    return max(free)


print("1 chunk a thread:", ticks(8), "ticks; 8 chunks a thread:", ticks(1), "ticks")
assert (ticks(8), ticks(1)) == (15, 12)


# %% [markdown]
# ## 1.5, 1. Thirty-two lanes
#
# More lanes are another order of the same sum. Each lane has half as many terms, so the rounding errors do not get
# larger: they tend to get smaller. (NumPy has no fused multiply-add here; the argument is the same.)

# %%
def lane_sum(products, lanes):
    "The sum in float32: element j goes to lane j mod `lanes`; then the lanes are added by halves."
    acc = np.zeros(lanes, np.float32)
    for row in products.reshape(-1, lanes):
        acc += row
    while len(acc) > 1:
        acc = acc[:len(acc) // 2] + acc[len(acc) // 2:]
    return acc[0]


errors, different = {16: [], 32: []}, 0
for _ in range(200):
    a, b = rng.standard_normal((2, 7168)).astype(np.float32)
    sums = {n: lane_sum(a * b, n) for n in errors}
    different += sums[16] != sums[32]
    for n, found in sums.items():
        errors[n].append(abs(float(found) - (a * b).astype(np.float64).sum()))
print(f"{different} of 200 sums differ; mean error with 16 lanes {np.mean(errors[16]):.1e}, "
      f"with 32 {np.mean(errors[32]):.1e}")
assert different > 100 and np.mean(errors[32]) < np.mean(errors[16])

# %% [markdown]
# ## 1.5, 2. A format of int8
#
# The new class has the methods of `_Packed`. `__init__` accepts int8 rows and float32 scales, and the number of columns
# is not doubled. `pointer` is that of `_Rows`, because an element is a byte. `step` loads 32 bytes and converts them to
# two vectors of float32, and loads the scale of the group. `_half_scale` becomes a plain load of a float32.
# `multiply_add` computes `fma(second, x1, first * x0)`, and then one `fma` with the scale, as for MXFP4. The elements
# are in order, so $x$ needs no other order than for bf16. `prefetch` asks for twice as many bytes, because a group has
# 32 bytes and not 16.

# %% [markdown]
# ## 1.6, 1. Where the sigmoid becomes 1
#
# $\sigma(x) = 1 / (1 + e^{-x})$. Above 1 the spacing of float32 is $2^{-23}$, so $1 + e^{-x}$ rounds to 1 when $e^{-x}$
# is at most half of that, $2^{-24}$. That is $x = 24 \ln 2$. (Below 1 the spacing is $2^{-24}$. The exact sigmoid is
# nearer to 1 than to the number below it only when $e^{-x} < 2^{-25}$, so near this place the result is one step too
# large.)

# %%
from k3lib.functions import sigmoid

low, high = np.float32(1), np.float32(30)
while np.nextafter(low, high) < high:
    middle = np.float32((low + high) / 2)
    low, high = (low, middle) if sigmoid(middle) == 1 else (middle, high)
print(f"smallest x: {high:.6f}; 24 ln 2 = {24 * np.log(2):.6f}")
assert abs(high - 24 * np.log(2)) < 1e-3

# %% [markdown]
# ## 1.6, 2. One float for $\ln 2$
#
# The nearest float32 to $\ln 2$ is off by $2 \cdot 10^{-9}$. The remainder $\rho = x - \nu \ln 2$ is then off by $\nu$
# times this, and $e^\rho$ by the same relative amount. Since $\nu = x / \ln 2$, the error grows in proportion to $x$.

# %%
x = np.linspace(1, 80, 2000)
nu = np.round(x / np.log(2))
off = nu * (np.log(2) - np.float64(np.float32(np.log(2))))  # what the remainder is off by
ulp = np.abs(np.expm1(off)) / 2.0**-24  # relative error in units of half the spacing above 1: ulp, to a factor of two
slope = np.polyfit(x, ulp, 1)[0]
print(f"error at 80: {ulp[-1]:.1f} ulp; slope {slope:.3f} ulp for each 1 of x")
assert abs(slope - abs(np.log(2) - float(np.float32(np.log(2)))) / np.log(2) / 2.0**-24) < 1e-3
