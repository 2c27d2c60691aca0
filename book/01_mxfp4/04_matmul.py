# %% [markdown]
# # 1.4 One row, one order
#
# Everything in K3 that is not a routed expert is a bf16 matrix, a norm or one of three curves. At the end of this chapter you can
# multiply a matrix whose rows arrive in pieces, and promise the same bits for it on any CPU, with any number of threads or tokens.
#
# [1.3 Threads that share a kernel's work](03_parallel.ipynb) · [contents](../README.md) · [1.5 Exponential, tanh, sigmoid and RMSNorm with the same bits everywhere](05_functions.ipynb)

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
import math
import numpy as np
from numba import get_num_threads, njit
from k3lib.mxfp4 import GROUP
from k3lib.simd import (
    HALF_SCALE,
    INNER,
    KERNEL,
    fma16,
    high16,
    load16,
    load16_part,
    load32,
    look_up16,
    low16,
    mul16,
    prefetch_line,
    sum16,
    zeros16,
)
from k3lib.parallel import chunk_done, next_chunk, parallel_for, threads_for

# %% tags=["export"]
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
# ## 1.4.1 By hand: half a float
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
# ## 1.4.2 One row: sixteen lanes, one tree
#
# Chapter 1.2 made sixteen lanes a value. Here element $m$ goes to lane $m \bmod 16$, in order, and `sum16` adds the lanes by halves. A row
# whose length is no multiple of 16 ends with zeros in the missing lanes; nothing behind the row is read.

# %% tags=["export"]
@njit(**INNER)
def row_dot(w, i, x, j, k):
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
    return row_dot(a, 0, b, 0, a.size)


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
# ## 1.4.3 A reassociating sum changes bits, `dot` does not
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
# ## 1.4.4 A matrix is rows that arrive
#
# `linear` never asks where a matrix lies. It asks for `blocks()`: pairs (first row, some rows). One that is in memory answers with one
# block; one that streams from disk answers with many. Each output belongs to one row, so the cut cannot change it.

# %% tags=["export"]
class ResidentMatrix:
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
PREFETCH_DISTANCE = 1024  # elements: what is asked of memory this early has come when its turn is there


@njit(**INNER)
def load4(w, i, k):
    "Sixteen elements of each of four rows of length k."
    return load16(w, i), load16(w, i + k), load16(w, i + 2 * k), load16(w, i + 3 * k)


@njit(**INNER)
def _load4_twice(w, i, k):
    "The same of the sixteen after them too. A step of 32 bf16 is a cache line of each row, so each is asked for once."
    prefetch_line(w, i + PREFETCH_DISTANCE)
    prefetch_line(w, i + k + PREFETCH_DISTANCE)
    prefetch_line(w, i + 2 * k + PREFETCH_DISTANCE)
    prefetch_line(w, i + 3 * k + PREFETCH_DISTANCE)
    return load32(w, i), load32(w, i + k), load32(w, i + 2 * k), load32(w, i + 3 * k)


@njit(**INNER)
def _load4_part(w, i, k, n):
    return load16_part(w, i, n), load16_part(w, i + k, n), load16_part(w, i + 2 * k, n), load16_part(w, i + 3 * k, n)


@njit(**INNER)
def fma4(w, v, acc):
    return fma16(w[0], v, acc[0]), fma16(w[1], v, acc[1]), fma16(w[2], v, acc[2]), fma16(w[3], v, acc[3])


@njit(**INNER)
def _fma4_twice(w, v, acc):
    return (fma16(w[0][1], v[1], fma16(w[0][0], v[0], acc[0])), fma16(w[1][1], v[1], fma16(w[1][0], v[0], acc[1])),
            fma16(w[2][1], v[1], fma16(w[2][0], v[0], acc[2])), fma16(w[3][1], v[1], fma16(w[3][0], v[0], acc[3])))


@njit(**INNER)
def rows4(w, i, k, x, j, out, t, r):
    a = zeros4()
    whole = k - k % (2 * LANES)
    for m in range(0, whole, 2 * LANES):
        a = _fma4_twice(_load4_twice(w, i + m, k), load32(x, j + m), a)
    for m in range(whole, k, LANES):
        n = min(LANES, k - m)
        a = fma4(_load4_part(w, i + m, k, n), load16_part(x, j + m, n), a)
    put4(out, t, r, a)


@njit(**INNER)
def rows4_tokens4(w, i, k, x, j, stride, out, t, r):
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
        a = fma4(v, load16_part(x, j + m, n), a)
        b = fma4(v, load16_part(x, j + stride + m, n), b)
        c = fma4(v, load16_part(x, j + 2 * stride + m, n), c)
        d = fma4(v, load16_part(x, j + 3 * stride + m, n), d)
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
                rows4_tokens4(flat, r * k, k, xs, t * stride, stride, out, t, first + r)
            else:
                rows4(flat, r * k, k, xs, t * stride, out, t, first + r)
            r += 4
        while r < last:
            for m in range(t, t + step):
                out[m, first + r] = row_dot(flat, r * k, xs, m * stride, k)
            r += 1
        t += step


@njit(**KERNEL)
def _matmul(tiles, w, x, out, first, drawn):
    while True:
        begin, end = next_chunk(drawn, tiles)
        if begin >= tiles:
            return
        for tile in range(begin, end):
            _tile(w, x, out, first, tile)
        chunk_done(drawn, begin, end)


@njit(**KERNEL)
def matmul_rows(w, x, out, first):
    "The same on the calling thread alone, for rows that this thread has just read (chapter 5.13)."
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
    on_lines = line_aligned((x.shape[0], k + -k % LANES))
    on_lines[:, :k] = x
    if hasattr(W, "multiply"):
        W.multiply(on_lines, out, get_num_threads())
    else:
        for first, block in W.blocks():
            parallel_for(threads_for(x.size * len(block)), -(-len(block) // TILE), _matmul, block, on_lines, out, first)
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
    for W in (ResidentMatrix(bits), Cut(bits), Cut(bf16_to_float32(bits))):
        assert linear(W, xs[:T]).tobytes() == expected[:T].tobytes(), (T, W)
print("27 products, one answer:", hashlib.sha256(expected.tobytes()).hexdigest()[:16])

# %% [markdown]
# Read bandwidth is measured, not looked up: every core sums its part of an array too large for the caches. This sum may be reordered
# (`fastmath`), because only its speed is wanted.

# %%
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


# %% tags=["nbval-ignore-output"]
large = np.ones(80_000_000, np.float32)
bandwidth = large.nbytes / median_seconds({"read": lambda: read_sum(large)})["read"]
print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, so at most {bandwidth / (expert_bytes / weights) / 1e9:.0f} G weights/s packed, "
      f"{bandwidth / 4e9:.1f} G weights/s as float32")


# %% [markdown]
# ## 1.4.5 The kernel
#
# A byte's nibbles are neighbours, $2j$ and $2j+1$. Rather than weave codes together, split the *activations* once: the sixteen low
# nibbles of a group meet the even $x$, the sixteen high nibbles the odd. A group of one row then is three roundings a lane:
#
# $$a_l \leftarrow \mathrm{fma}\bigl(\mathrm{fma}(h_l, x_{2l+1}, \mathrm{mul}(g_l, x_{2l})),\; 2^{e-128},\; a_l\bigr), \qquad g = 2 v_{\text{low}},\; h = 2 v_{\text{high}}$$
#
#
# Two details of the unpacking are worth a line. An index of Python may be negative, and numba asks: four
# instructions for each scale byte, so the look-up is an intrinsic too. And the high nibbles come first: their shift is the last to
# need the bytes untouched, so the permutation of the low ones may overwrite them, and no register has to be cleared for its result.

# %% tags=["export"]
@njit(**INNER)
def _unpack(p, s, g):
    "Group g of the matrix: twice its even weights, twice its odd weights, half its scale."
    high = high16(p, 16 * g)
    return low16(p, 16 * g), high, look_up16(HALF_SCALE, s, g)


@njit(**INNER)
def _group(weights, even, odd, acc):
    "acc + one group of one row against 16 even and 16 odd activations."
    low, high, half_scale = weights
    return fma16(fma16(high, odd, mul16(low, even)), half_scale, acc)


@njit(**INNER)
def _row1(p, s, r, x, t, groups, out, first):
    a = zeros16()
    for q in range(groups):
        j = 32 * (t * groups + q)
        a = _group(_unpack(p, s, r * groups + q), load16(x, j), load16(x, j + 16), a)
    out[t, first + r] = sum16(a)


# %% [markdown]
# Four rows at a time share the loads of $x$, and their four sums do not wait for each other. Two or four tokens at a time share the
# unpacking. No variant changes what happens to one (row, token) pair: same lanes, same order.
#
# One thing must be asked for. A row is 1,792 bytes, so four rows interleaved are several streams within one 4 KB page, and the CPU's own
# prefetcher, which follows a page at a time, loses them. Each step therefore asks for one cache line of the *next* four rows:
# 64 bytes a group, which is exactly what four rows of a group weigh.

# %% tags=["export"]
@njit(**INNER)
def zeros4():
    "Accumulators of four rows."
    return zeros16(), zeros16(), zeros16(), zeros16()


@njit(**INNER)
def put4(out, t, r, acc):
    "out[t, r:r+4] = the sums of four accumulators."
    out[t, r], out[t, r + 1], out[t, r + 2], out[t, r + 3] = sum16(acc[0]), sum16(acc[1]), sum16(acc[2]), sum16(acc[3])


@njit(**INNER)
def _unpack4(p, s, g, groups):
    return _unpack(p, s, g), _unpack(p, s, g + groups), _unpack(p, s, g + 2 * groups), _unpack(p, s, g + 3 * groups)


@njit(**INNER)
def _group4(w, x, j, acc):
    even, odd = load16(x, j), load16(x, j + 16)
    return (_group(w[0], even, odd, acc[0]), _group(w[1], even, odd, acc[1]),
            _group(w[2], even, odd, acc[2]), _group(w[3], even, odd, acc[3]))


@njit(**INNER)
def _packed_rows4(p, s, r, x, t, groups, out, first):
    a = zeros4()
    for q in range(groups):
        prefetch_line(p, 16 * (r + 4) * groups + 64 * q)
        a = _group4(_unpack4(p, s, r * groups + q, groups), x, 32 * (t * groups + q), a)
    put4(out, t, first + r, a)


@njit(**INNER)
def _packed_rows4_tokens2(p, s, r, x, t, groups, out, first):
    a = b = zeros4()
    for q in range(groups):
        prefetch_line(p, 16 * (r + 4) * groups + 64 * q)
        w, j = _unpack4(p, s, r * groups + q, groups), 32 * (t * groups + q)
        a = _group4(w, x, j, a)
        b = _group4(w, x, j + 32 * groups, b)
    put4(out, t, first + r, a)
    put4(out, t + 1, first + r, b)


@njit(**INNER)
def _packed_rows4_tokens4(p, s, r, x, t, groups, out, first):
    a = b = c = d = zeros4()
    for q in range(groups):
        prefetch_line(p, 16 * (r + 4) * groups + 64 * q)
        w, j = _unpack4(p, s, r * groups + q, groups), 32 * (t * groups + q)
        a = _group4(w, x, j, a)
        b = _group4(w, x, j + 32 * groups, b)
        c = _group4(w, x, j + 64 * groups, c)
        d = _group4(w, x, j + 96 * groups, d)
    put4(out, t, first + r, a)
    put4(out, t + 1, first + r, b)
    put4(out, t + 2, first + r, c)
    put4(out, t + 3, first + r, d)


# %% tags=["export"]
PACKED_TILE = 16  # rows


@njit(**INNER)
def _packed_tile(packed, scale, halves, out, first, tile):
    "All tokens times one tile of the rows of a block; row 0 of the block is row `first` of the matrix."
    n, groups = scale.shape
    tokens = out.shape[0]
    p, s, x = packed.reshape(-1), scale.reshape(-1), halves.reshape(-1)
    last = min(PACKED_TILE * tile + PACKED_TILE, n)
    t = 0
    while t < tokens:
        step = 4 if tokens - t >= 4 else 2 if tokens - t >= 2 else 1
        r = PACKED_TILE * tile
        while r + 4 <= last:
            if step == 4:
                _packed_rows4_tokens4(p, s, r, x, t, groups, out, first)
            elif step == 2:
                _packed_rows4_tokens2(p, s, r, x, t, groups, out, first)
            else:
                _packed_rows4(p, s, r, x, t, groups, out, first)
            r += 4
        while r < last:
            for m in range(t, t + step):
                _row1(p, s, r, x, m, groups, out, first)
            r += 1
        t += step


@njit(**KERNEL)
def _packed_matmul(tiles, packed, scale, halves, out, drawn):
    while True:
        begin, end = next_chunk(drawn, tiles)
        if begin >= tiles:
            return
        for tile in range(begin, end):
            _packed_tile(packed, scale, halves, out, 0, tile)
        chunk_done(drawn, begin, end)


@njit(**KERNEL)
def mxfp4_rows(packed, scale, halves, out, first):
    """out[:, first:first+m] for the m rows `packed` uint8 [m, k/2], `scale` uint8 [m, k/32], on the calling thread alone: for rows that
    this thread has just read (chapter 5.16). `halves` is what halved(x) made of x."""
    for tile in range((scale.shape[0] + PACKED_TILE - 1) // PACKED_TILE):
        _packed_tile(packed, scale, halves, out, first, tile)


# %% [markdown]
# One thing that no equation shows: where $x$ begins. Caches hand out lines of 64 bytes, sixteen floats. NumPy's arrays begin anywhere on a
# multiple of 16, so most loads of sixteen floats would straddle two lines. The split into halves copies $x$ anyway; 1.3 measures what this is
# worth.

# %% tags=["export"]
def line_aligned(shape):
    "float32 zeros that begin on a cache line, so that no load of sixteen floats straddles two."
    size = math.prod(shape)
    raw = np.zeros(size + 16, np.float32)
    start = -raw.__array_interface__["data"][0] % 64 // 4
    return raw[start:start + size].reshape(shape)


def deinterleaved(x):
    "`x` float32 [T, k] as the kernels take it: float32 [T, k/32, 2, 16], the even elements of each group, then the odd ones."
    halves = line_aligned((x.shape[0], x.shape[1] // GROUP, 2, 16))
    halves[...] = x.reshape(len(x), -(-x.shape[1] // GROUP), 16, 2).swapaxes(-1, -2)
    return halves


def check_fit(packed, scale, x_shape, out):
    "Raise ValueError unless arrays or extents `packed` [n, k/2] and `scale` [n, k/32] take x [T, k] to `out` [T, n]. The kernels do not look."
    n, groups = scale.shape
    if packed.shape != (n, groups * 16) or x_shape != (len(out), groups * GROUP) or out.shape[1] != n:
        raise ValueError(f"mxfp4_matmul: packed {packed.shape}, scale {scale.shape}, x {x_shape} and out {out.shape} do not fit")


def mxfp4_matmul(packed, scale, x, out):
    """out[t] = W x[t] for a packed W: `packed` uint8 [n, k/2], `scale` uint8 [n, k/32], `x` float32 [T, k], `out` float32 [T, n].

    W is never unpacked in memory. Lane l of a row's accumulator takes elements 2l and 2l+1 of every group, group
    after group, so the bits of out[t, r] depend on row r and token t alone. Returns `out`.
    """
    check_fit(packed, scale, x.shape, out)
    if not packed.dtype == scale.dtype == np.uint8:
        raise ValueError(f"mxfp4_matmul: packed is {packed.dtype} and scale {scale.dtype}, expected uint8")
    parallel_for(threads_for(x.size * len(packed)), -(-len(packed) // PACKED_TILE), _packed_matmul, packed, scale, deinterleaved(x), out)
    return out


# %%
fast = mxfp4_matmul(packed, scale, x[None], np.empty((1, 64), np.float32))
assert distance(fast[0], y) < TOLERANCE
backwards = mxfp4_matmul(packed << 4 | packed >> 4, scale, x[None], np.empty((1, 64), np.float32))
assert distance(backwards[0], y) > 1000 * TOLERANCE
print("relative difference below 1e-6:", distance(fast[0], y) < 1e-6, "  nibbles swapped:", f"{distance(backwards[0], y):.2g}")


# %% [markdown]
# ## 1.4.6 Which bits, exactly
#
# "Close to float64" is not the contract. The contract says which float32 comes out, so it can be written a second time, in NumPy, without
# vectors. NumPy has no fused multiply-add; but a product of two float32 is exact in float64, and if the sum is *rounded to odd* there,
# the second rounding to float32 is right.

# %%
def fma_twin(a, b, c):
    "float32 a*b + c with one rounding. a, b, c: finite float32 arrays."
    p, c = a.astype(np.float64) * b, c.astype(np.float64)
    s = p + c
    z = s - p
    lost = (p - (s - z)) + (c - z)  # exactly what the addition rounded away
    bits = s.view(np.int64)
    away = np.where((lost > 0) == (s > 0), 1, -1)
    bits += np.where((lost != 0) & (bits % 2 == 0), away, 0)
    return bits.view(np.float64).astype(np.float32)


def matmul_twin(packed, scale, x):
    "The bits mxfp4_matmul owes for one token x [k]."
    twice, half = np.array(TWICE_E2M1, np.float32), HALF_SCALE[scale]
    low, high = (twice[c].reshape(*scale.shape, 16) for c in (packed & 15, packed >> 4))
    even, odd = x[0::2].reshape(-1, 16), x[1::2].reshape(-1, 16)
    acc = np.zeros((len(packed), 16), np.float32)
    for g in range(scale.shape[1]):
        group = fma_twin(high[:, g], odd[g], low[:, g] * even[g])
        acc = fma_twin(group, half[:, g:g + 1], acc)
    for n in (8, 4, 2, 1):
        acc = acc[:, :n] + acc[:, n:]
    return acc[:, 0]


assert fast[0].tobytes() == matmul_twin(packed, scale, x).tobytes()
fast[0, :2].view(np.uint32)

# %% [markdown]
# Those two words, and all others, are the same on every machine. They are also the same for one token or seven, for rows cut
# anywhere, and for scale bytes that make a single weight overflow: the kernel scales a group's sum, never one weight.

# %%
xs = rng.standard_normal((7, 3584)).astype(np.float32)
seven = mxfp4_matmul(packed, scale, xs, np.empty((7, 64), np.float32))
for t in range(7):
    alone = mxfp4_matmul(packed, scale, xs[t:t + 1], np.empty((1, 64), np.float32))
    part = mxfp4_matmul(packed[:13], scale[:13], xs[t:t + 1], np.empty((1, 13), np.float32))
    assert alone.tobytes() == seven[t].tobytes() and part.tobytes() == seven[t, :13].tobytes()
ends = {byte: mxfp4_matmul(np.full((1, 16), 0x77, np.uint8), np.full((1, 1), byte, np.uint8), np.full((1, 32), 1 / 128, np.float32),
                           np.empty((1, 1), np.float32))[0, 0] for byte in (0, 1, 254, 255)}
assert ends[0] == 1.5 * 2.0**-127 and ends[1] == 1.5 * 2.0**-126 and ends[254] == 1.5 * 2.0**127 and np.isnan(ends[255])
print({byte: f"{value:.4g}" for byte, value in ends.items()})


# %% [markdown]
# ## 1.4.7 The ladder
#
# Sixteen experts, what one layer reads for a token, lie in memory as 48 matrices of 3072 × 3584. (`w2` is 3584 × 3072: the same bytes.)
# The rungs between plain loop and kernel: one row at a time with each look-up this CPU has, then four rows that do not ask ahead.

# %%
def row_kernel(way):
    "A kernel of one row a pass whose look-up is `way`."
    @intrinsic
    def low(typingctx, packed, i):
        return f32x16(packed, types.intp), _nibbles(False, lambda context: [way])

    @intrinsic
    def high(typingctx, packed, i):
        return f32x16(packed, types.intp), _nibbles(True, lambda context: [way])

    @njit(nogil=True)
    def kernel(rows, packed, scale, halves, out, drawn):
        p, s, x, groups = packed.reshape(-1), scale.reshape(-1), halves.reshape(-1), scale.shape[1]
        while True:
            begin, end = next_chunk(drawn, rows)
            if begin >= rows:
                return
            for r in range(begin, end):
                acc = zeros16()
                for q in range(groups):
                    g = r * groups + q
                    weights = low(p, 16 * g), high(p, 16 * g), splat16(HALF_SCALE[s[g]])
                    acc = _group(weights, load16(x, 32 * q), load16(x, 32 * q + 16), acc)
                out[0, r] = sum16(acc)
            chunk_done(drawn, begin, end)
    return lambda packed, *args: parallel_for(numba.get_num_threads(), len(packed), kernel, packed, *args)


@njit(nogil=True)
def fours(n, packed, scale, halves, out, drawn):
    "n times four rows for one token, without prefetch."
    p, s, x, groups = packed.reshape(-1), scale.reshape(-1), halves.reshape(-1), scale.shape[1]
    while True:
        begin, end = next_chunk(drawn, n)
        if begin >= n:
            return
        for r in range(begin, end):
            a = zeros4()
            for q in range(groups):
                a = _group4(_unpack4(p, s, 4 * r * groups + q, groups), x, 32 * q, a)
            put4(out, 0, 4 * r, a)
        chunk_done(drawn, begin, end)


def four_rows(packed, *args):
    parallel_for(numba.get_num_threads(), len(packed) // 4, fours, packed, *args)


# %% tags=["nbval-ignore-output"]
from numba.core.registry import cpu_target

names = {_by_arithmetic: "one row, arithmetic", _by_bytes: "one row, byte shuffle", _by_floats: "one row, float permutation"}
kernels = {names[way]: row_kernel(way) for way in reversed(list(_ways(cpu_target.target_context)))} | {"four rows": four_rows}
halves = line_aligned((1, 112, 2, 16))
halves[...] = x.reshape(1, 112, 16, 2).swapaxes(-1, -2)
for name, kernel in kernels.items():
    one = np.empty((1, 64), np.float32)
    kernel(packed, scale, halves, one)
    assert one.tobytes() == fast.tobytes(), name
print("byte for byte the result of mxfp4_matmul:", ", ".join(kernels))

# %% tags=["nbval-ignore-output"]
matrices = 3 * experts
P = rng.integers(0, 256, (matrices, intermediate, latent // 2), np.uint8)
S = rng.integers(110, 127, (matrices, intermediate, latent // GROUP), np.uint8)
x1, x4 = (rng.standard_normal((t, latent)).astype(np.float32) for t in (1, 4))
out1, out4 = (np.empty((t, intermediate), np.float32) for t in (1, 4))
halves[...] = x1.reshape(1, 112, 16, 2).swapaxes(-1, -2)


def over_all(multiply, count=matrices):
    return lambda: [multiply(P[m], S[m]) for m in range(count)]


few = 2  # matrices are enough to time the slow ones
cases = {
    "numpy: decode, then @": (over_all(lambda p, s: decode(p, s) @ x1[0], few), few, 1),
    "numba: plain loop": (over_all(lambda p, s: plain(p, s, x1, out1), few), few, 1),
    **{name: (over_all(lambda p, s, kernel=kernel: kernel(p, s, halves, out1)), matrices, 1) for name, kernel in kernels.items()},
    "and prefetch: mxfp4_matmul": (over_all(lambda p, s: mxfp4_matmul(p, s, x1, out1)), matrices, 1),
    "four tokens: mxfp4_matmul": (over_all(lambda p, s: mxfp4_matmul(p, s, x4, out4)), matrices, 4),
}
seconds = median_seconds({"read": lambda: read_sum(large), **{name: run for name, (run, _, _) in cases.items()}})
bandwidth = large.nbytes / seconds.pop("read")
moved = {"numpy: decode, then @": 0.53 + 1 + 2 + 5 + 4 + 12 + 4}  # packed, nibbles, codes, table, scales, product, dot
rates = {}
print(f"{'':30} ms an expert  G weights/s    bytes/weight   GB/s   (memory reads {bandwidth / 1e9:.1f} GB/s)")
for name, (_, count, tokens) in cases.items():
    rates[name] = count * intermediate * latent * tokens / seconds[name]
    bytes_each = moved.get(name, 0.53125 / tokens)
    print(f"{name:30} {3e3 * seconds[name] / count:12.2f} {rates[name] / 1e9:12.2f} {bytes_each:15.2f} {rates[name] * bytes_each / 1e9:6.1f}")

# %% tags=["nbval-ignore-output"]
fig, ax = plt.subplots()
ax.barh(list(rates), [r / 1e9 for r in rates.values()])
ax.axvline(bandwidth / 0.53125 / 1e9, ls="--", c="C1", label="memory, each weight read once")
ax.set(xlabel="G weights × tokens a second", xscale="log", title="Lanes bring the packed product near the speed of memory")
ax.invert_yaxis()
ax.legend(loc="upper right", bbox_to_anchor=(0.85, 1))
plt.show()


# %% [markdown]
# The look-up matters until memory sets the pace; then four rows alone can even be a step back, and the best step is no arithmetic at all:
# asking for the next rows in time. Two things tried here gave nothing: two rows a pass in place of four, and
# asking for scale bytes ahead too. With everything in the cache and two threads that share a core's execution units, as chapter 5.16 has it, it is
# instructions that count: three for a pair of products in each lane, four to unpack it.

# %% [markdown]
# ## 1.4.8 The contract
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
# ## 1.4.9 Make it fast: the trunk is 109 GB a token
#
# Every bf16 weight of the trunk is used once a token: two bytes, two operations. Nothing can beat reading it once, so the roofline is
# bandwidth over two bytes.

# %%
trunk = 108_811_877_376  # bytes, chapter 5.6: every tensor of layers 0..92 but the routed experts
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
            total += float_of_bits(np.int32(np.uint32(w[r, m]) << np.uint32(16))) * x[0, m]
        out[0, r] = total


@njit(parallel=True)
def row_by_row(w, x, out):
    flat, k = w.reshape(-1), w.shape[1]
    for r in prange(w.shape[0]):
        out[0, r] = row_dot(flat, r * k, x.reshape(-1), 0, k)


# %% tags=["nbval-ignore-output"]
pattern = (rng.standard_normal((rows // 16, width)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
w = np.concatenate([pattern] * 16)
x1, x4 = (line_aligned((t, width)) for t in (1, 4))
x4[:] = rng.standard_normal(x4.shape)
x1[:] = x4[:1]
crooked = line_aligned((4 * width + 4,))[4:].reshape(4, width)  # 16 bytes past a cache line
crooked[:] = x4
out1, out4 = (np.empty((t, rows), np.float32) for t in (1, 4))
large = np.ones(80_000_000, np.float32)
cases = {
    "numpy: widen, then @": (lambda: bf16_to_float32(w) @ x1[0], 1, 2 + 8 + 8 + 4),
    "numba: in order": (lambda: in_order(w, x1, out1), 1, 2),
    "row by row, 16 lanes": (lambda: row_by_row(w, x1, out1), 1, 2),
    "four rows: linear": (lambda: linear(ResidentMatrix(w), x1, out1), 1, 2),
    "four tokens, x not aligned": (lambda: parallel_for(get_num_threads(), rows // TILE, _matmul, w, crooked, out4, 0), 4, 0.5),
    "four tokens: linear": (lambda: linear(ResidentMatrix(w), x4, out4), 4, 0.5),
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
