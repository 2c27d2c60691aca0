# %% [markdown]
# # 1.3 Rows, norms and the floating-point contract
#
# Everything in K3 that is not a routed expert is a bf16 matrix, a norm or one of three curves. At the end of this chapter you can
# multiply a matrix whose rows arrive in pieces, and promise the same bits for it on any CPU, with any number of threads or tokens.
#
# [1.2 MXFP4](02_mxfp4.ipynb) · [contents](../README.md) · [1.4 A checkpoint without the weights](04_synth.ipynb)

# %%
import hashlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.numpy import load_file

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% tags=["export"]
import numpy as np
from llvmlite import ir
from numba import get_num_threads, njit, types
from numba.extending import intrinsic

from k3lib.mxfp4 import (CORES, INNER, KERNEL, NO_MORE, aligned, draw, draw_run, finish, fma, fma16, load16, load16_part, load32, prefetch, put4, spread, sum16, threads_for,
                         zeros4, zeros16)

LANES = 16

# %% tags=["parameters"]
rows, width = 12288, 7168  # q_proj of a KDA layer: 96 heads x 128, hidden_size
rounds = 5  # A B A B ... and the median
seed = 0

# %% [markdown]
# | symbol | meaning | in K3 | in code |
# |---|---|---|---|
# | $W$ | matrix of a projection, bf16 | e.g. `q_proj` 12288 × 7168 | `W`: `.shape`, `.blocks()` |
# | $x_t$ | activations of token $t$, float32 | 7168 | `x[t]` |
# | $y_{t,r} = \sum_m W_{r,m} x_{t,m}$ | output | 12288 | `out[t, r]` |
# | $\epsilon$ | inside the root of a norm | 1e-5; 1e-6 in two norms of MLA | `eps` |
# | $\gamma$ | weight of a norm | 7168 | `weight` |
# | ulp | distance between neighbouring float32 at a value | | `np.spacing` |

# %%
KERNEL["cache"] = INNER["cache"] = False  # as in 1.2: cells will be edited, and the cache on disk would not see it

# %% [markdown]
# ## 1.3.1 By hand: half a float
#
# bf16 is a float32 with its lower sixteen bits cut off: sign, all eight exponent bits, seven bits of mantissa. Widening puts sixteen zero
# bits behind it, and is exact. Two bytes of another kind, IEEE half precision, look the same from outside.

# %% tags=["export"]
def bf16_to_float32(bits):
    "float32 of uint16 `bits`, any shape: bf16 is the upper half of a float32, so this is exact."
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


# %%
words = np.array([0x3F80, 0xC020, 0x4049, 0x0001, 0x7F80], np.uint16)
wide = bf16_to_float32(words)
assert wide.tolist() == [1, -2.5, 3.140625, 2.0**-133, math.inf]
for word, right, wrong in zip(words, wide, words.view(np.float16)):
    print(f"{word:04x}   bf16 {right:9.4g}   read as half precision {wrong:9.4g}")

# %% [markdown]
# ## 1.3.2 One row: sixteen lanes, one tree
#
# Chapter 1.2 made sixteen lanes a value. Here element $m$ goes to lane $m \bmod 16$, in order, and `sum16` adds the lanes by halves. A row
# whose length is no multiple of 16 ends with zeros in the missing lanes; nothing behind the row is read.

# %% tags=["export"]
@njit(**INNER)
def _dot(w, i, x, j, k):
    "w[i:i+k] . x[j:j+k], flat arrays: sixteen lanes, one accumulator, one tree."
    acc = zeros16()
    whole = k - k % LANES
    for m in range(0, whole, LANES):
        acc = fma16(load16(w, i + m), load16(x, j + m), acc)
    if whole < k:
        acc = fma16(load16_part(w, i + whole, k - whole), load16_part(x, j + whole, k - whole), acc)
    return sum16(acc)


@njit(**KERNEL)
def dot(a, b):
    "a . b for float32 [n]: element m belongs to lane m % 16, lanes are summed by halves."
    return _dot(a, 0, b, 0, a.size)


# %% [markdown]
# Lanes can be seen from outside. $2^{24}+1$ is no float32: in the same lane as $2^{24}$ a 1 is rounded away, in a lane of its own it
# survives until $-2^{24}$ has come.

# %%
def pair(i, j):
    "dot of ones with 2^24 at i, 1 at j and -2^24 at i+32."
    a = np.zeros(48, np.float32)
    a[i], a[j], a[i + 32] = 2**24, 1, -2**24
    return dot(a, np.ones(48, np.float32))


assert pair(0, 16) == 0 and pair(0, 17) == 1
print("2^24 + 1 - 2^24, all in lane 0:", pair(0, 16), "   the 1 in lane 1:", pair(0, 17))

# %% [markdown]
# Against float64, over widths that leave every remainder. The bound is the usual one for a sum: each of the
# $\lceil k/16\rceil + 4$ roundings on the way is at most half an ulp of the sum of magnitudes.

# %%
rng = np.random.default_rng(seed)
for k in [*range(1, 50), 7168]:
    a, b = rng.standard_normal((2, k)).astype(np.float32)
    bound = (math.ceil(k / 16) + 4) * 2.0**-24 * np.abs(a.astype(float) * b).sum()
    assert abs(dot(a, b) - a.astype(float) @ b.astype(float)) <= bound, k
print("within the rounding bound for 50 widths")

# %% [markdown]
# ## 1.3.3 A reassociating sum changes bits, `dot` does not
#
# The same two arrays go to two processes: one compiles for this CPU, the other for the plainest CPU of its family. A sum with `fastmath`
# may be cut to the width of the registers. `dot` may not.

# %%
script = '''
import numpy as np
from numba import njit
from k3lib.linear import dot

@njit(fastmath=True)
def loose(a, b):
    s = np.float32(0)
    for i in range(a.size):
        s += a[i] * b[i]
    return s

a, b = ((np.arange(2 * 7168) ** 2 * 40503 % 65521 - 32760) / 2**15).astype(np.float32).reshape(2, -1)
print(*(f"{np.float32(f(a, b)).view(np.uint32):08x}" for f in (loose, dot)))
'''


def bits_of(cpu):
    "(loose, dot) as computed by a process that compiles for `cpu`, or for this one."
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)} | ({"NUMBA_CPU_NAME": cpu} if cpu else {})
        return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout.split()


here, baseline = bits_of(None), bits_of("generic")
assert here[1] == baseline[1]
print("dot:", here[1], "here,", baseline[1], "on a baseline CPU")

# %% tags=["nbval-ignore-output"]
print("loose sum:", here[0], "here,", baseline[0], "on a baseline CPU")

# %% [markdown]
# ## 1.3.4 A matrix is rows that arrive
#
# `linear` never asks where a matrix lies. It asks for `blocks()`: pairs (first row, some rows). One that is in memory answers with one
# block; one that streams from disk answers with many. Each output belongs to one row, so the cut cannot change it.

# %% tags=["export"]
class Rows:
    "A resident matrix: `array` [n, k], uint16 bf16 bits or float32, handed out as one block of rows."

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def blocks(self, multiple=1):
        "Yields (first row, rows [m, k]); every block but the last has a number of rows divisible by `multiple`."
        yield 0, self.array


# %% [markdown]
# A damaged weight may be an infinity or a NaN. Times a finite $x$ it makes a product that is neither finite nor ever becomes so again by adding
# ($0\cdot\infty$ is NaN too), so the outputs tell of every weight that was multiplied: one number to look at instead of a row of $k$.

# %% tags=["export"]
class NotFinite(ArithmeticError):
    """Infinity or NaN where a finite number must come out. `rows`: those of the matrix that it was made from, None where there is none;
    `matrix`: which matrix, where only who multiplies knows."""

    def __init__(self, message, rows=None, matrix=None):
        super().__init__(message)
        self.rows, self.matrix = rows, matrix


_INFINITE = np.int32(0x7f800000)  # infinity's bits, and below every NaN's; signs aside


@njit(**KERNEL)
def first_not_finite(a):
    "Flat index of the first infinity or NaN in float32 [T, n], or -1."
    bits = a.reshape(-1).view(np.int32)
    for begin in range(0, bits.size, 1024):
        end, top = min(begin + 1024, bits.size), np.int32(0)
        for i in range(begin, end):
            top = max(top, bits[i] & np.int32(0x7fffffff))
        if top >= _INFINITE:
            for i in range(begin, end):
                if bits[i] & np.int32(0x7fffffff) >= _INFINITE:
                    return i
    return -1


def check_product(out, x, rows_of=lambda r: (r, r + 1), matrix=None):
    "Raise NotFinite unless the product `out` float32 [T, n] of `x` is finite; rows_of(r): first and end of the matrix rows behind output r."
    bad = first_not_finite(out)
    if bad >= 0:
        t, r = divmod(int(bad), out.shape[1])
        what = "a finite" if np.isfinite(x).all() else "an overflowing"
        raise NotFinite(f"output row {r} is {out[t, r]} for token {t} of the chunk, from {what} input, expected a finite number", rows_of(r), matrix)


# %%
for k in (0, 5, 1023, 1024, 2999):
    for value in (np.inf, -np.inf, np.nan):
        a = np.zeros((3, 1000), np.float32)
        a.reshape(-1)[[k, 2999]] = value
        assert first_not_finite(a) == k
assert first_not_finite(np.full((3, 1000), -3.4e38, np.float32)) == -1

# %% [markdown]
# As with MXFP4, four rows share the loads of $x$ and ask memory ahead. Four tokens share the widening of the rows, and then sixteen sums are under way at once:
# enough work per load that the arithmetic, not the cache, sets the pace.

# %% tags=["export"]
AHEAD = 1024  # elements: what is asked of memory this early has come when its turn is there


@njit(**INNER)
def _load4(w, i, k):
    "Sixteen elements of each of four rows of length k."
    return load16(w, i), load16(w, i + k), load16(w, i + 2 * k), load16(w, i + 3 * k)


@njit(**INNER)
def _load4_twice(w, i, k):
    "The same of the sixteen after them too. A step of 32 bf16 is a cache line of each row, so each is asked for once."
    prefetch(w, i + AHEAD)
    prefetch(w, i + k + AHEAD)
    prefetch(w, i + 2 * k + AHEAD)
    prefetch(w, i + 3 * k + AHEAD)
    return load32(w, i), load32(w, i + k), load32(w, i + 2 * k), load32(w, i + 3 * k)


@njit(**INNER)
def _load4_part(w, i, k, n):
    return load16_part(w, i, n), load16_part(w, i + k, n), load16_part(w, i + 2 * k, n), load16_part(w, i + 3 * k, n)


@njit(**INNER)
def _fma4(w, v, acc):
    return fma16(w[0], v, acc[0]), fma16(w[1], v, acc[1]), fma16(w[2], v, acc[2]), fma16(w[3], v, acc[3])


@njit(**INNER)
def _fma4_twice(w, v, acc):
    return (fma16(w[0][1], v[1], fma16(w[0][0], v[0], acc[0])), fma16(w[1][1], v[1], fma16(w[1][0], v[0], acc[1])),
            fma16(w[2][1], v[1], fma16(w[2][0], v[0], acc[2])), fma16(w[3][1], v[1], fma16(w[3][0], v[0], acc[3])))


@njit(**INNER)
def _rows4(w, i, k, x, j, out, t, r):
    a = zeros4()
    whole = k - k % (2 * LANES)
    for m in range(0, whole, 2 * LANES):
        a = _fma4_twice(_load4_twice(w, i + m, k), load32(x, j + m), a)
    for m in range(whole, k, LANES):
        n = min(LANES, k - m)
        a = _fma4(_load4_part(w, i + m, k, n), load16_part(x, j + m, n), a)
    put4(out, t, r, a)


@njit(**INNER)
def _rows4_tokens4(w, i, k, x, j, stride, out, t, r):
    a = b = c = d = zeros4()
    whole = k - k % (2 * LANES)
    for m in range(0, whole, 2 * LANES):
        v = _load4_twice(w, i + m, k)
        a = _fma4_twice(v, load32(x, j + m), a)
        b = _fma4_twice(v, load32(x, j + stride + m), b)
        c = _fma4_twice(v, load32(x, j + 2 * stride + m), c)
        d = _fma4_twice(v, load32(x, j + 3 * stride + m), d)
    for m in range(whole, k, LANES):
        n = min(LANES, k - m)
        v = _load4_part(w, i + m, k, n)
        a = _fma4(v, load16_part(x, j + m, n), a)
        b = _fma4(v, load16_part(x, j + stride + m, n), b)
        c = _fma4(v, load16_part(x, j + 2 * stride + m, n), c)
        d = _fma4(v, load16_part(x, j + 3 * stride + m, n), d)
    put4(out, t, r, a)
    put4(out, t + 1, r, b)
    put4(out, t + 2, r, c)
    put4(out, t + 3, r, d)


# %% tags=["export"]
TILE = 16  # rows that stay in the cache while all tokens pass


@njit(**INNER)
def _tile(w, x, out, first, tile):
    "out[:, first:first+n] = x[:, :k] w^T for one tile of the rows of w [n, k]; x may have wider rows than w."
    n, k = w.shape
    tokens, stride = x.shape
    flat, xs = w.reshape(-1), x.reshape(-1)
    last = min(TILE * tile + TILE, n)
    t = 0
    while t < tokens:
        step = 4 if tokens - t >= 4 else 1
        r = TILE * tile
        while r + 4 <= last:
            if step == 4:
                _rows4_tokens4(flat, r * k, k, xs, t * stride, stride, out, t, first + r)
            else:
                _rows4(flat, r * k, k, xs, t * stride, out, t, first + r)
            r += 4
        while r < last:
            for m in range(t, t + step):
                out[m, first + r] = _dot(flat, r * k, xs, m * stride, k)
            r += 1
        t += step


@njit(**KERNEL)
def _matmul(tiles, w, x, out, first, drawn):
    while True:
        begin, end = draw_run(drawn, tiles)
        if begin >= tiles:
            return
        for tile in range(begin, end):
            _tile(w, x, out, first, tile)
        finish(drawn, begin, end)


@njit(**KERNEL)
def matmul_rows(w, x, out, first):
    "The same on the calling thread alone, for rows that this thread has just read (chapter 5.3)."
    for tile in range((w.shape[0] + TILE - 1) // TILE):
        _tile(w, x, out, first, tile)


def linear(W, x, out=None):
    """float32 [T, n] = x W^T for `x` float32 [T, k] and a matrix W [n, k]: anything with .shape and .blocks(), or with
    .multiply(x, out, threads) if it has a way of its own.

    Each output is one row's dot product in a fixed order, so the bits do not depend on how the rows were cut, on T,
    or on the number of threads. Raises NotFinite for a product that is infinite or NaN.
    """
    n, k = W.shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"linear: x has shape {x.shape}, W {W.shape}: the last dimensions differ")
    if out is None:
        out = np.empty((x.shape[0], n), np.float32)
    elif out.shape != (x.shape[0], n) or out.dtype != np.float32:
        raise ValueError(f"linear: out is {out.dtype} {out.shape}, expected float32 {(x.shape[0], n)}")
    on_lines = aligned((x.shape[0], k + -k % LANES))
    on_lines[:, :k] = x
    if hasattr(W, "multiply"):
        W.multiply(on_lines, out, get_num_threads())
    else:
        for first, block in W.blocks():
            spread(threads_for(x.size * len(block)), -(-len(block) // TILE), _matmul, block, on_lines, out, first)
    check_product(out, x)
    return out


# %% [markdown]
# Against `dot`, byte for byte: rows cut at random, one to nine tokens, a width of 1003 that leaves a rest of eleven, bf16 and the same
# matrix as float32.

# %%
class Cut:
    "A matrix that arrives in blocks of 1 to 9 rows."

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def blocks(self, multiple=1):
        first = 0
        while first < len(self.array):
            last = first + rng.integers(1, 10)
            yield first, self.array[first:last]
            first = last


bits = ((rng.integers(-2**20, 2**20, (61, 1003)) / 2**18).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
xs = (rng.integers(-2**20, 2**20, (9, 1003)) / 2**18).astype(np.float32)
expected = np.array([[dot(row, x) for row in bf16_to_float32(bits)] for x in xs], np.float32)
for T in range(1, 10):
    for W in (Rows(bits), Cut(bits), Cut(bf16_to_float32(bits))):
        assert linear(W, xs[:T]).tobytes() == expected[:T].tobytes(), (T, W)
print("27 products, one answer:", hashlib.sha256(expected.tobytes()).hexdigest()[:16])

# %% [markdown]
# ## 1.3.5 RMSNorm, and an epsilon that hides
#
# $$y = \gamma\, \frac{x}{\sqrt{\frac1n \sum_m x_m^2 + \epsilon}}$$
#
# Root and division are rounded correctly by IEEE 754, so both are the same everywhere; the sum of squares is a `dot`. It overflows long before
# $x$ does, at 10^19, and then $y$ would be 0, a perfectly finite wrong answer: so this sum is looked at too.

# %% tags=["export"]
_f = np.float32
_ONE, _TWO, _ZERO = _f(1), _f(2), _f(0)


@njit(**KERNEL)
def rms_norm_row(x, weight, eps, out):
    "out = x * (mean(x^2) + eps)^-1/2 * weight for float32 [n]; `out` may be `x`. Returns the sum of squares."
    squares = dot(x, x)
    scale = _ONE / np.sqrt(squares / np.float32(x.size) + np.float32(eps))
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i]
    return squares


@njit(**KERNEL)
def _rms_norm(x, weight, eps, out):
    for t in range(x.shape[0]):
        if not rms_norm_row(x[t], weight, eps, out[t]) < np.inf:
            return t
    return -1


def rms_norm(x, weight, eps, out=None):
    """float32 [T, n]: every row of `x` divided by its root mean square (eps inside the root), times `weight` [n].

    Raises NotFinite where the sum of squares is infinite or NaN.
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
# K3 uses two values. `rms_norm_eps` of the config, 1e-5, holds for every norm except `q_a_layernorm` and `kv_a_layernorm` in MLA, which
# keep 1e-6, their class's default. The fixture has both; each must fail the other's gate.

# %%
TOLERANCE = 1e-5  # fixtures/ops/README.md, section rmsnorm


def distance(y, expected):
    "Largest difference, relative to the largest expected magnitude."
    return np.abs(y - expected).max() / np.abs(expected).max()


norm = {name: array.copy() for name, array in load_file(ROOT / "fixtures/ops/rmsnorm.safetensors").items()}
x, gamma, y5, y6 = norm["x"], norm["weight"], norm["y_eps1e5"], norm["y_eps1e6"]
assert distance(rms_norm(x, gamma, 1e-5), y5) < TOLERANCE and distance(rms_norm(x, gamma, 1e-6), y6) < TOLERANCE
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

# %% [markdown]
# Why this mistake survives in real engines: at the usual size of an activation the two agree to five digits. They part where
# the mean square comes near $\epsilon$, and MLA's latents are small.

# %%
sizes = np.geomspace(1e-4, 1e4, 200)
fig, ax = plt.subplots()
for eps, color, y in ((1e-5, "C0", y5), (1e-6, "C1", y6)):
    ax.loglog(sizes, 1 / np.sqrt(sizes**2 + eps), color=color, label=f"$\\epsilon$ = {eps:.0e}")
    ax.loglog(rms, np.median(y / (x * gamma), -1), "o", ms=5, color=color, label=f"rows of the fixture, {eps:.0e}")
ax.set(xlabel="root mean square of x", ylabel="factor applied to x", title="Below an rms of 0.01 the epsilon is the norm")
ax.legend()
plt.show()

# %% [markdown]
# ## 1.3.6 Three curves of our own
#
# K3 needs $e^x$, the logistic sigmoid $\sigma$ and tanh, millions of times a token, in gates, decays and SiTU. Every library has them,
# and each rounds its own way. Here are 200,000 float32 arguments, and how often two good implementations give different bits.

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
theirs = {"numpy": np.exp(arguments), "C library, float64, rounded": np.exp(arguments.astype(float)).astype(np.float32)}
for name, f in (("numba", numba_exp), ("numba, fastmath", numba_exp_fast)):
    theirs[name] = np.empty_like(arguments)
    f(arguments, theirs[name])
names = list(theirs)
for i, a in enumerate(names):
    for b in names[i + 1:]:
        print(f"{a:28} and {b:28} {100 * np.mean(theirs[a].view(np.uint32) != theirs[b].view(np.uint32)):6.2f}% differ")

# %% [markdown]
# NumPy picks a kernel by the CPU's vector width, numba calls the C library or a vector library where one is installed, and C libraries change
# with their version. None is wrong. But a router that compares $s+b$ of 896 experts sees the last bit, so K3's choice
# would follow the machine. Ours are made from operations IEEE 754 fixes: add, multiply, fused multiply-add, divide, and integer
# shifts.
#
# Write $x = n\ln 2 + r$ with $n$ whole and $|r| \le \frac12 \ln 2$. Then $e^x = 2^n e^r$. The power is an exponent field; $e^r$ is a
# polynomial. Two tricks: adding $1.5 \cdot 2^{23}$ rounds to a whole number and leaves it in the low bits; $\ln 2$ is kept as two
# floats, so that $r$ keeps its bits (Cody and Waite).

# %% tags=["export"]
@intrinsic
def _bits(typingctx, x):
    "(x float32) -> its bits, int32."
    return types.int32(types.float32), lambda c, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _float(typingctx, i):
    "(i int32) -> the float32 with these bits."
    return types.float32(types.int32), lambda c, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


_LOG2E, _LN2_HI, _LN2_LO = _f(1.44269504), _f(0.693145752), _f(1.42860677e-06)
_ROUND = _f(1.5 * 2**23)  # adding and taking off this number rounds to an integer, and leaves it in the low bits
_ROUND_BITS = int(np.float32(1.5 * 2**23).view(np.int32))
_SIGN_BIT = np.int32(-2**31)
_TAYLOR = tuple(_f(1 / d) for d in (5040, 720, 120, 24, 6, 2))
_EXP_MAX, _EXP_MIN, _TANH_MAX = _f(89), _f(-104), _f(10)


@njit(**INNER)
def _exp_parts(x):
    "(q, n) with e^x = 2^n (1 + q), |q| < 0.42: Cody-Waite reduction, then Taylor's series to r^7."
    shifted = fma(x, _LOG2E, _ROUND)
    n = np.int32(_bits(shifted) - np.int32(_ROUND_BITS))
    whole = shifted - _ROUND
    r = fma(whole, -_LN2_LO, fma(whole, -_LN2_HI, x))
    p = _TAYLOR[0]
    p = fma(p, r, _TAYLOR[1])
    p = fma(p, r, _TAYLOR[2])
    p = fma(p, r, _TAYLOR[3])
    p = fma(p, r, _TAYLOR[4])
    p = fma(p, r, _TAYLOR[5])
    return fma(p * r, r, r), n


@njit(**INNER)
def _power2(n):
    "2^n as float32 for -126 <= n <= 127."
    return _float(np.int32((n + np.int32(127)) << np.int32(23)))


# %% [markdown]
# The pieces for $x = 1$: $n$ = 1, the rest is $1 - \ln 2$, and $2^1 (1+q)$ is $e$ to seven digits.

# %%
@njit
def parts(x):
    q, n = _exp_parts(x)
    return q, n, _power2(n) * (_ONE + q)


q, n, e = parts(np.float32(1))
assert n == 1 and abs(math.log1p(q) - (1 - math.log(2))) < 1e-7
print(f"n = {n}, 1 + q = {1 + q:.6f}, together {e:.6f}")

# %% [markdown]
# $q = e^r - 1$ is kept apart from the 1 on purpose. `exp` adds it at the end. Results below $2^{-126}$ are subnormal, so the power is applied
# in two halves. tanh needs $m = e^{2|x|} - 1$, and near zero the 1 would swallow everything: with $q$ nothing is lost.
#
# $$\sigma(x) = \frac{1}{1+e^{-|x|}} \text{ or } \frac{e^{-|x|}}{1+e^{-|x|}}, \qquad \tanh|x| = \frac{m}{m+2}$$

# %% tags=["export"]
@njit(**KERNEL)
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


@njit(**KERNEL)
def sigmoid(x):
    "1 / (1 + e^-x), float32, from e^-|x| so that neither side overflows."
    e = exp(-abs(x))
    top = _ONE if x >= _ZERO else e
    return top / (_ONE + e)


@njit(**KERNEL)
def tanh(x):
    "tanh x, float32, as m / (m + 2) with m = e^2|x| - 1 kept apart from the 1, so that small x lose nothing; tanh(-0) is -0."
    y = abs(x)
    if y > _TANH_MAX:
        y = _TANH_MAX
    q, n = _exp_parts(y + y)
    s = _power2(n)
    m = fma(s, q, s - _ONE)
    r = m / (m + _TWO)
    return _float(np.int32(_bits(r) | np.int32(_bits(x) & _SIGN_BIT)))


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
# The error, against float64, in ulp of the right answer. Half an ulp would be perfect rounding. The arguments are a million floats over the
# whole range in which the answer is neither 0, 1 nor infinite, denser near zero.

# %%
def error_in_ulp(got, right):
    return (got - right) / np.spacing(np.maximum(np.abs(right).astype(np.float32), np.float32(2.0**-126)))


sizes = np.geomspace(1e-6, 1, 500_001)
sizes = np.concatenate([-sizes[::-1], sizes])
error = {}
for i, (name, reach, f) in enumerate((("exp", 87, np.exp), ("sigmoid", 87, lambda v: 1 / (1 + np.exp(-v))), ("tanh", 10, np.tanh))):
    v = np.concatenate([sizes * reach, np.linspace(-reach, reach, 1_000_001)]).astype(np.float32)
    error[name] = v, error_in_ulp(curves(v)[i], f(v.astype(float)))
    worst = np.abs(error[name][1]).max()
    print(f"{name:8} largest error {worst:.1f} ulp, rms {np.sqrt(np.mean(error[name][1]**2)):.2f} ulp")
    assert worst < {"exp": 1.1, "sigmoid": 2.5, "tanh": 2.5}[name]

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
# The spikes stand $\ln 2$ apart for exp, where one $n$ ends and the next begins and $|r|$ is largest, and half as far for tanh, which sees $2|x|$.
# They are equally high everywhere: with a single float for $\ln 2$ they would grow with $|x|$ (exercise 2).

# %% [markdown]
# ## 1.3.7 The contract
#
# | what could move a bit | what holds it |
# |---|---|
# | registers of 4, 8 or 16 lanes | sixteen lanes are a value; `sum16` is the only tree |
# | threads, cut of the rows, tokens in a chunk | one output is one row's product with one token, and no output reads another |
# | a compiler that fuses $ab+c$ | LLVM fuses only when allowed, which takes `fastmath`; where we want one rounding we write `fma` |
# | exp, σ and tanh of some library | our own, from exact operations and shifts |
# | BLAS, `np.sum`, `np.dot` | none in the decode path; loops that LLVM vectorises are elementwise, and that moves nothing |
#
# Two of these are claims about a compiler. The first is quick to test: $(1+2^{-12})^2 - (1 + 2^{-11})$ is $2^{-24}$ when fused, and
# 0 when the product is rounded first.

# %%
def two_roundings(a, b, c):
    return a * b + c


fused_by_us = njit(lambda a, b, c: fma(a, b, c))
a, c = np.float32(1 + 2.0**-12), np.float32(-(1 + 2.0**-11))
assert njit(two_roundings)(a, a, c) == 0 and fused_by_us(a, a, c) == 2.0**-24
print("a * b + c:", njit(two_roundings)(a, a, c), "   fma(a, b, c):", fused_by_us(a, a, c))

# %% tags=["nbval-ignore-output"]
print("a * b + c with fastmath:", njit(two_roundings, fastmath=True)(a, a, c), " (2^-24 where the CPU can fuse, 0 elsewhere)")

# %% [markdown]
# What it still leans on:
#
# - **IEEE 754 binary32**: add, multiply, fused multiply-add, divide and square root correctly rounded, to nearest, ties to even. All of
#   x86-64 (SSE2 on) and 64-bit Arm. A process that changes the rounding mode breaks it.
# - **No flush to zero.** Some libraries set the CPU's flush-to-zero bits for the whole thread when they are loaded; then subnormals vanish.
# - **`fmaf` of the C library** where there is no fused instruction (x86-64 before 2013, `NUMBA_CPU_NAME=generic`). It must round once. It
#   is slow there and right in the common C libraries.
# - **LLVM**, to not reassociate or fuse what it may not, in every version of numba this runs on.
# - Not promised: *which* NaN. The bits of a NaN depend on operand order; a NaN here ends a run, so they are never compared.
#
# The first two can be asked of the running process. Division and root of float32, done in float64 and then rounded, are right, because
# 53 bits are more than twice 24 plus two.

# %%
@njit
def divide_and_root(a, b):
    d, s = np.empty_like(a), np.empty_like(a)
    for i in range(a.size):
        d[i], s[i] = a[i] / b[i], np.sqrt(a[i])
    return d, s


a, b = np.exp(rng.uniform(-40, 40, (2, 1_000_000))).astype(np.float32)
quotient, root = divide_and_root(a, b)
assert np.array_equal(quotient, (a.astype(float) / b).astype(np.float32)) and np.array_equal(root, np.sqrt(a.astype(float)).astype(np.float32))
tiny = dot(np.array([2.0**-75], np.float32), np.array([2.0**-74], np.float32))
assert tiny == 2.0**-149
print("a million quotients and roots correctly rounded; smallest subnormal kept:", tiny == 2.0**-149)

# %% [markdown]
# The claim is then: the same bits on any machine. `tests/test_linear.py` and `tests/test_mxfp4.py` compare bytes between processes that
# compile for this CPU and for a baseline one, with one thread and two, and with digests that were written down once.

# %% [markdown]
# ## 1.3.8 Make it fast: the trunk is 109 GB a token
#
# Every bf16 weight of the trunk is used once a token: two bytes, two operations. Nothing can beat reading it once, so the roofline is
# bandwidth over two bytes.

# %%
trunk = 108_811_877_376  # bytes, chapter 1.1: every tensor of layers 0..92 but the routed experts
print(f"q_proj of one KDA layer: {rows * width:,} weights, {2 * rows * width / 1e6:.0f} MB;  trunk: {trunk / 1e9:.1f} GB a token")


from numba import prange


@njit(parallel=True, fastmath=True)
def read_sum(a):
    s = np.float32(0)
    for i in prange(a.size):
        s += a[i]
    return s


def median_seconds(cases):
    "Median time of each function in `cases`, taken in turn: what disturbs one disturbs all."
    times = {name: [] for name in cases}
    for _ in range(rounds + 1):  # the first round compiles
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


# %% [markdown]
# The rungs: NumPy widens the matrix and multiplies; a numba loop adds in order, one number after the other; `_dot` gives each row lanes;
# `linear` takes four rows a pass and asks ahead; with four tokens each weight is read once for all, and then it matters where $x$ begins.

# %%
@njit(parallel=True)
def in_order(w, x, out):
    for r in prange(w.shape[0]):
        total = _ZERO
        for m in range(w.shape[1]):
            total += _float(np.int32(np.uint32(w[r, m]) << np.uint32(16))) * x[0, m]
        out[0, r] = total


@njit(parallel=True)
def row_by_row(w, x, out):
    flat, k = w.reshape(-1), w.shape[1]
    for r in prange(w.shape[0]):
        out[0, r] = _dot(flat, r * k, x.reshape(-1), 0, k)


# %% tags=["nbval-ignore-output"]
pattern = (rng.standard_normal((rows // 16, width)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
w = np.concatenate([pattern] * 16)
x1, x4 = (aligned((t, width)) for t in (1, 4))
x4[:] = rng.standard_normal(x4.shape)
x1[:] = x4[:1]
crooked = aligned((4 * width + 4,))[4:].reshape(4, width)  # 16 bytes past a cache line
crooked[:] = x4
out1, out4 = (np.empty((t, rows), np.float32) for t in (1, 4))
large = np.ones(80_000_000, np.float32)
cases = {
    "numpy: widen, then @": (lambda: bf16_to_float32(w) @ x1[0], 1, 2 + 8 + 8 + 4),
    "numba: in order": (lambda: in_order(w, x1, out1), 1, 2),
    "row by row, 16 lanes": (lambda: row_by_row(w, x1, out1), 1, 2),
    "four rows: linear": (lambda: linear(Rows(w), x1, out1), 1, 2),
    "four tokens, x not aligned": (lambda: spread(get_num_threads(), rows // TILE, _matmul, w, crooked, out4, 0), 4, 0.5),
    "four tokens: linear": (lambda: linear(Rows(w), x4, out4), 4, 0.5),
}
seconds = median_seconds({"read": lambda: read_sum(large), **{name: run for name, (run, _, _) in cases.items()}})
bandwidth = large.nbytes / seconds.pop("read")
rates = {name: rows * width * tokens / seconds[name] for name, (_, tokens, _) in cases.items()}
assert out1.tobytes() == out4[:1].tobytes()
print(f"{'':28}      ms   G weights/s   bytes/weight    GB/s   (memory reads {bandwidth / 1e9:.1f} GB/s)")
for name, (_, tokens, moved) in cases.items():
    print(f"{name:28} {1e3 * seconds[name]:7.1f} {rates[name] / 1e9:13.2f} {moved:14.1f} {rates[name] * moved / 1e9:7.1f}")
print(f"the trunk at this bandwidth: {trunk / bandwidth:.1f} s a token")

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots()
ax.barh(list(rates), [r / 1e9 for r in rates.values()])
ax.axvline(bandwidth / 2e9, ls="--", c="C1", label="memory, each weight read once")
ax.set(xlabel="G weights × tokens a second", title="Four rows in lanes reach memory speed; more tokens pass it")
ax.invert_yaxis()
ax.legend()
plt.show()

# %% [markdown]
# `linear` can pass the dashed line: the plain sum that drew it leaves the asking to the hardware. What failed first for several tokens was
# two rows by four: four loads of $x$ for eight products, more than the second cache delivers. Four rows by four halve that, and a copy of $x$
# that begins on a cache line costs 28 KB against 176 MB.

# %% [markdown]
# ## Summary
#
# - A matrix is rows that arrive; an output is one row's product in sixteen lanes, so no cut, batch or thread changes it.
# - Two epsilons. At ordinary sizes nobody sees the wrong one; in MLA's small latents it is a different norm.
# - The contract is short because everything in it is an operation IEEE 754 defines, in an order the code spells out.
#
# ## Exercises
#
# 1. Write `dot32` with 32 lanes (two accumulators). Show that its bits differ from `dot`, and that its error does not grow.
# 2. Replace `_LN2_HI`, `_LN2_LO` by one float. Plot the error in ulp up to $x = 80$. What slope do you expect?
# 3. Find the smallest `x` for which `sigmoid(x)` is exactly 1, and explain it from the spacing of float32 below 1.
#
# Next: [2.1](../02_kda/01_kda.ipynb) builds an attention whose memory is a matrix, from `dot`, `fma`, `exp` and `linear`.
