# %% [markdown]
# # 1.6 Exponential, tanh, sigmoid and RMSNorm with the same bits everywhere
#
# Besides products, K3 needs a norm and three functions of one number: exponential, sigmoid and tanh. Every mathematical
# library has these functions, but libraries round them differently, so K3 could choose other experts on another
# machine. This chapter builds the norm and the functions from operations whose results IEEE 754 fixes. At the end you
# can say why such a function has the same bits everywhere, how exact it is, and which of K3's norms need another
# epsilon.
#
# > **Without it:** two good libraries differ in some last bits of the exponential, and an epsilon of 1e-6 in place of
# > 1e-5 is off by 39% of the largest output.<!--claim epsilon-->
# >
# > **With it:** the three functions have the same bits on every machine, and err by at most 2.5 units of the last
# > place.<!--claim error-->
#
# Needs chapters [1.3] (fused multiply-add) and [1.5] (dot products). Runs in ten seconds. Makes `k3lib.functions`.
#
# [1.5 One row, one order](05_matmul.ipynb) ·
# [contents](../README.md) ·
# [2.1 From softmax attention to a memory that corrects itself](../02_kda/01_delta_rule.ipynb)
#
# [1.3]: 03_simd.ipynb
# [1.5]: 05_matmul.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "kernels")

# %%
import math
from pathlib import Path

import matplotlib.pyplot as plt
from numba import njit
from safetensors.numpy import load_file

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% tags=["export"]
import numpy as np

from k3lib.kernel_cache import inner, kernel
from k3lib.matmul import NotFinite, dot
from k3lib.simd import float_bits, float_of_bits, fma

# %% [markdown]
# | symbol | meaning | in K3 | in code |
# |---|---|---|---|
# | $\varepsilon$ | inside the root of a norm | 1e-5; 1e-6 in two norms of MLA | `eps` |
# | $\gamma$ | weight of a norm | 7168 | `weight` |
# | ulp | distance between neighbouring float32 at a value | | `np.spacing` |

# %% [markdown]
# ## 1.6.1 RMSNorm, and an epsilon that hides
#
# $$y = \gamma\, \frac{x}{\sqrt{\frac1n \sum_m x_m^2 + \varepsilon}}$$
#
# RMSNorm divides a vector $x$ of $n$ numbers by its root mean square and multiplies each number by a learned weight.
# The small number $\varepsilon$ prevents a division by zero. IEEE 754 requires that root and division are rounded
# correctly, so both are the same everywhere. The sum of squares is a `dot` of chapter [1.5].
#
# The sum of squares can become infinite although $x$ is finite, when a number of $x$ is larger than about $10^{19}$.
# Then $y$ would be 0: a finite number, and a wrong one. So the norm checks this sum.
#
# [1.5]: 05_matmul.ipynb

# %% tags=["export"]
_f = np.float32
_ONE, _TWO, _ZERO = _f(1), _f(2), _f(0)


@kernel
def rms_norm_row(x, weight, eps, out):
    "out = x * (mean(x^2) + eps)^-1/2 * weight for float32 [n]; `out` may be `x`. Returns the sum of squares."
    squares = dot(x, x)
    scale = _ONE / np.sqrt(squares / np.float32(x.size) + np.float32(eps))
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i]
    return squares


@kernel
def _rms_norm(x, weight, eps, out):
    for t in range(x.shape[0]):
        if not rms_norm_row(x[t], weight, eps, out[t]) < np.inf:
            return t
    return -1


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray | None = None) -> np.ndarray:
    """float32 [T, n]: each row of `x` [T, n] divided by its root mean square (eps inside the root), times `weight` [n].

    The result is `out` if that is given; it may be `x`. Raises ValueError where shapes do not fit, NotFinite where the
    sum of squares is infinite or NaN.
    """
    if out is None:
        out = np.empty_like(x)
    if weight.shape != x.shape[1:] or out.shape != x.shape:
        raise ValueError(f"rms_norm: x {x.shape}, weight {weight.shape} and out {out.shape} do not fit")
    bad = _rms_norm(x, weight, eps, out)
    if bad >= 0:
        raise NotFinite(f"the sum of squares of row {bad} is {dot(x[bad], x[bad])}, expected a finite number")
    return out


# %%
try:
    rms_norm(np.full((1, 4), 1e20, np.float32), np.ones(4, np.float32), 1e-5)
except NotFinite as error:
    print("refused:", error)

# %% [markdown]
# K3 uses two values of $\varepsilon$. The config's `rms_norm_eps`, 1e-5, holds for every norm except `q_a_layernorm`
# and `kv_a_layernorm` in MLA. These two have 1e-6, the default of their class in the reference code. The fixture has
# outputs for both values. Below, five wrong norms are compared with it.

# %%
TOLERANCE = 1e-5  # fixtures/ops/README.md, section rmsnorm


def distance(y, expected):
    "Largest difference, relative to the largest expected magnitude."
    return np.abs(y - expected).max() / np.abs(expected).max()


norm = {name: array.copy() for name, array in load_file(ROOT / "fixtures/ops/rmsnorm.safetensors").items()}
x, gamma, y5, y6 = norm["x"], norm["weight"], norm["y_eps1e5"], norm["y_eps1e6"]


def check_norm(name, y, expected):
    "The gate: the fixture's outputs, within TOLERANCE of the largest."
    off = distance(y, expected)
    assert off < TOLERANCE, f"{name}: off by {off:.0%} of the largest output"
    print(f"{name}: within {TOLERANCE:.0e} of the largest output")


check_norm("eps 1e-5", rms_norm(x, gamma, 1e-5), y5)
check_norm("eps 1e-6", rms_norm(x, gamma, 1e-6), y6)

# %% tags=["raises-exception"]
check_norm("eps 1e-6 where 1e-5 is meant", rms_norm(x, gamma, 1e-6), y5)

# %%
rms = np.sqrt(np.mean(x.astype(float) ** 2, -1, keepdims=True))
traps = {
    "eps 1e-6 where 1e-5 is meant": (rms_norm(x, gamma, 1e-6), y5),
    "eps 1e-5 where 1e-6 is meant": (rms_norm(x, gamma, 1e-5), y6),
    "eps outside the root": (x / (rms + 1e-5) * gamma, y5),
    "mean subtracted": ((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gamma, y5),
    "weight taken as 1 + weight": (x / np.sqrt(rms**2 + 1e-5) * (1 + gamma), y5),
}
for name, (wrong, y) in traps.items():
    assert distance(wrong, y) > 1000 * TOLERANCE, name
    print(f"{name:30} off by {distance(wrong, y):.2f} of the largest output")
shown = round(distance(*traps["eps 1e-6 where 1e-5 is meant"]) * 100)
print(f"the wrong epsilon: off by {shown}%")  # claim epsilon

# %% [markdown]
# A wrong epsilon is easy to miss. At the usual size of an activation, the two norms agree to about five digits. They
# differ where the mean square of $x$ is near $\varepsilon$, and the latents of MLA are small. The fixture contains such
# rows.

# %%
sizes = np.geomspace(1e-4, 1e4, 200)
fig, ax = plt.subplots()
for eps, color, y in ((1e-5, "C0", y5), (1e-6, "C1", y6)):
    ax.loglog(sizes, 1 / np.sqrt(sizes**2 + eps), color=color, label=f"$\\epsilon$ = {eps:.0e}")
    ax.loglog(rms, np.median(y / (x * gamma), -1), "o", ms=5, color=color, label=f"rows of the fixture, {eps:.0e}")
ax.set(xlabel="root mean square of x", ylabel="factor applied to x")
ax.set_title("Below an rms of 0.01 the epsilon is the norm")
ax.legend()
plt.show()


# %% [markdown]
# ## 1.6.2 Three curves of our own
#
# K3 computes $e^x$, the sigmoid $\sigma$ and tanh millions of times for a token: in gates, decays and SiTU. Every
# mathematical library has these functions, and each rounds them in its own way. The next cell takes 200,000 float32
# numbers and shows how often two good implementations give different bits.

# %% tags=["nbval-ignore-output"]
@njit
def numba_exp(x, out):
    for i in range(x.size):
        out[i] = np.exp(x[i])


@njit(fastmath=True)
def numba_exp_fast(x, out):
    for i in range(x.size):
        out[i] = np.exp(x[i])


arguments = np.linspace(-20, 20, 200_000).astype(np.float32)
rounded = np.exp(arguments.astype(float)).astype(np.float32)
theirs = {"numpy": np.exp(arguments), "C library, float64, rounded": rounded}
for name, f in (("numba", numba_exp), ("numba, fastmath", numba_exp_fast)):
    theirs[name] = np.empty_like(arguments)
    f(arguments, theirs[name])
names = list(theirs)
for i, a in enumerate(names):
    for b in names[i + 1:]:
        different = np.mean(theirs[a].view(np.uint32) != theirs[b].view(np.uint32))
        print(f"{a:28} and {b:28} {100 * different:6.2f}% differ")

# %% [markdown]
# NumPy chooses its code by the width of the CPU's registers. Numba calls the C library, or another library if one is
# installed. C libraries change from version to version. None of their results is wrong. But the router compares the
# scores of 896 experts, and there the last bit can decide. So the functions of this chapter use only operations whose
# results IEEE 754 fixes, add, multiply, fused multiply-add and divide, and shifts of whole numbers.
#
# The exponential is split into two parts. Write $x = \nu\ln 2 + \rho$ with a whole number $\nu$ and $|\rho| \le \frac12
# \ln 2$. Then $e^x = 2^\nu e^\rho$. The power $2^\nu$ needs no arithmetic: $\nu$ is written into the exponent bits of a
# float. And $e^\rho$ is a polynomial, because $\rho$ is small.
#
# Two details need an explanation. To find $\nu$, the code adds $1.5 \cdot 2^{23}$ to $x / \ln 2$. At this size,
# neighbouring floats are 1 apart, so the addition rounds to a whole number and leaves it in the low bits of the sum.
# And $\ln 2$ is kept as the sum of two floats. With one float, its rounding error would be multiplied by $\nu$ and
# would make $\rho$ wrong (Cody and Waite).

# %% tags=["export"]
_LOG2E, _LN2_HI, _LN2_LO = _f(1.44269504), _f(0.693145752), _f(1.42860677e-06)
_ROUND = _f(1.5 * 2**23)  # x + _ROUND has round(x) in its low bits; subtracting _ROUND again gives round(x)
_ROUND_BITS = int(np.float32(1.5 * 2**23).view(np.int32))
_SIGN_BIT = np.int32(-2**31)
_TAYLOR = tuple(_f(1 / d) for d in (5040, 720, 120, 24, 6, 2))
_EXP_MAX, _EXP_MIN, _TANH_MAX = _f(89), _f(-104), _f(10)


@inner
def _exp_parts(x):
    "(q, n) with e^x = 2^n (1 + q), |q| < 0.42: Cody-Waite reduction, then Taylor's series to r^7."
    shifted = fma(x, _LOG2E, _ROUND)
    n = np.int32(float_bits(shifted) - np.int32(_ROUND_BITS))
    whole = shifted - _ROUND
    r = fma(whole, -_LN2_LO, fma(whole, -_LN2_HI, x))
    p = _TAYLOR[0]
    p = fma(p, r, _TAYLOR[1])
    p = fma(p, r, _TAYLOR[2])
    p = fma(p, r, _TAYLOR[3])
    p = fma(p, r, _TAYLOR[4])
    p = fma(p, r, _TAYLOR[5])
    return fma(p * r, r, r), n


@inner
def _power2(n):
    "2^n as float32 for -126 <= n <= 127."
    return float_of_bits(np.int32((n + np.int32(127)) << np.int32(23)))


# %% [markdown]
# By hand, $x = 1$: the nearest whole number to $1 / \ln 2 = 1.44$ is $\nu = 1$, so $\rho = 1 - \ln 2$. With $\eta =
# e^\rho - 1$, the result $2^1 (1+\eta)$ is $e$ to seven digits. In the code $\eta$ is `q` and $\nu$ is `n`.

# %%
@njit
def parts(x):
    q, n = _exp_parts(x)
    return q, n, _power2(n) * (_ONE + q)


q, n, e = parts(np.float32(1))
assert n == 1 and abs(math.log1p(q) - (1 - math.log(2))) < 1e-7
print(f"n = {n}, 1 + q = {1 + q:.6f}, together {e:.6f}")


# %% [markdown]
# `_exp_parts` returns $\eta = e^\rho - 1$ and not $e^\rho$. `exp` adds the 1 at the end. `tanh` needs
# $\eta_2 = e^{2|x|} - 1$. Near zero, $e^{2|x|}$ is close to 1. If the 1 were added and then subtracted, most digits of
# $\eta_2$ would be lost by rounding. From $\eta$ it is computed without this loss. One more detail: results of `exp`
# below $2^{-126}$ are subnormal, and no float has an exponent field for such a power. So `exp` multiplies twice by half
# of the power.
#
# $$\sigma(x) = \frac{1}{1+e^{-|x|}} \text{ or } \frac{e^{-|x|}}{1+e^{-|x|}}, \qquad
# \tanh|x| = \frac{\eta_2}{\eta_2+2}$$

# %% tags=["export"]
@kernel
def exp(x):
    "e^x, float32: 0 below -104, infinity above 88.72, NaN for NaN."
    c = x
    if c > _EXP_MAX:
        c = _EXP_MAX
    if c < _EXP_MIN:
        c = _EXP_MIN
    q, n = _exp_parts(c)
    half = np.int32(n >> np.int32(1))
    return (_ONE + q) * _power2(half) * _power2(np.int32(n - half))


@kernel
def sigmoid(x):
    "1 / (1 + e^-x), float32, from e^-|x| so that neither side overflows."
    e = exp(-abs(x))
    top = _ONE if x >= _ZERO else e
    return top / (_ONE + e)


@kernel
def tanh(x):
    "tanh x, float32, as m / (m + 2) with m = e^2|x| - 1. The 1 is never added, so small x lose nothing; -0 stays -0."
    y = abs(x)
    if y > _TANH_MAX:
        y = _TANH_MAX
    q, n = _exp_parts(y + y)
    s = _power2(n)
    m = fma(s, q, s - _ONE)
    r = m / (m + _TWO)
    return float_of_bits(np.int32(float_bits(r) | np.int32(float_bits(x) & _SIGN_BIT)))


# %%
@njit
def curves(x):
    e, s, t = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    for i in range(x.size):
        e[i], s[i], t[i] = exp(x[i]), sigmoid(x[i]), tanh(x[i])
    return e, s, t


special = np.array([0, -0., np.inf, -np.inf, np.nan, 88.72, 88.73, -103.9, -104.1, 1e-30], np.float32)
for name, values in zip(("x", "exp", "sigmoid", "tanh"), (special, *curves(special))):
    print(f"{name:8}", *(f"{v:9.4g}" for v in values))


# %% [markdown]
# How exact are the functions? The next cell compares them with float64 and gives the error in ulp: the distance between
# neighbouring float32 numbers at the right answer. A perfectly rounded result is off by at most half an ulp. The
# arguments are two million floats from the whole range in which the answer is not yet constant, more of them near zero.

# %%
def error_in_ulp(got, right):
    return (got - right) / np.spacing(np.maximum(np.abs(right).astype(np.float32), np.float32(2.0**-126)))


sizes = np.geomspace(1e-6, 1, 500_001)
sizes = np.concatenate([-sizes[::-1], sizes])
error = {}
right = {"exp": (87, np.exp), "sigmoid": (87, lambda v: 1 / (1 + np.exp(-v))), "tanh": (10, np.tanh)}
for i, (name, (reach, f)) in enumerate(right.items()):
    v = np.concatenate([sizes * reach, np.linspace(-reach, reach, 1_000_001)]).astype(np.float32)
    error[name] = v, error_in_ulp(curves(v)[i], f(v.astype(float)))
    worst = np.abs(error[name][1]).max()
    print(f"{name:8} largest error {worst:.1f} ulp, rms {np.sqrt(np.mean(error[name][1]**2)):.2f} ulp")
    assert worst < {"exp": 1.1, "sigmoid": 2.5, "tanh": 2.5}[name]  # claim ulp
assert max(np.abs(err).max() for _, err in error.values()) < 2.5  # claim error

# %%
fig, axes = plt.subplots(1, 3, sharey=True, figsize=(7, 3))
for ax, (name, reach) in zip(axes, (("exp", 8), ("sigmoid", 8), ("tanh", 4))):
    v, err = (a[1_000_002:] for a in error[name])
    near = np.flatnonzero(np.abs(v) < reach)[::7]
    ax.plot(v[near], err[near], ",")
    ax.set(xlabel="x", title=name)
axes[0].set(ylabel="error (ulp)", title="exp: never above 1.1 ulp")
plt.show()

# %% [markdown]
# The error of exp has spikes at a distance of $\ln 2$. There one $\nu$ ends and the next one begins, and $|\rho|$ is
# largest. The spikes of tanh are half as far apart, because tanh uses $2|x|$. Their height does not grow with $|x|$.
# With a single float for $\ln 2$ it would (exercise 2).

# %% [markdown]
# ## Summary
#
# - K3 has two epsilons. At the usual size of an activation, a wrong one is hardly visible. For the small latents of MLA
#   it changes the result.
# - Each library rounds exp and tanh in its own way. The functions of this chapter use only operations that IEEE 754
#   fixes, and err by at most 2.5 ulp.<!--claim ulp-->
#
# ## Exercises
#
# Answers: [exercises of part 1](../answers/01_mxfp4.ipynb).
#
# 1. Find the smallest `x` for which `sigmoid(x)` is exactly 1, and explain it from the spacing of float32 below 1.
# 2. Replace `_LN2_HI` and `_LN2_LO` by one float. Plot the error of exp in ulp up to $x = 80$. What slope do you
#    expect?
#
# Next: [2.1](../02_kda/01_delta_rule.ipynb) derives an attention whose memory is a matrix, and
# [2.2](../02_kda/02_kda.ipynb) builds it from `dot`, `fma`, `exp` and `linear`.
