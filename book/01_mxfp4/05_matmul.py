# %% [markdown]
# # 1.5 One row, one order
#
# Almost all of K3's work is matrix times vector. The matrices have three formats: bf16, float32 and MXFP4. The kernel
# of this chapter must meet two demands. It must not be much slower than memory delivers the weights. And its results
# must have the same bits on any CPU, with any number of threads or tokens, however the rows arrive, because a different
# last digit can choose another expert and change the text. At the end you can write one kernel for all three formats,
# say why each output has only one possible value, and measure how close the kernel comes to the speed of memory
# ([1.5.9]).
#
# > **Without it:** a multiplication that first decodes an expert with NumPy moves 28.5 bytes<!--claim moved--> through
# > memory for each weight, and a library's sum can have other bits on another CPU or with another number of threads.
# >
# > **With it:** each weight is read once, as 0.53 bytes,<!--claim packed--> and each output is the sum of one row and
# > one token, in one order that is written down.
#
# Needs chapters [1.1] (MXFP4), [1.3] (lanes), [1.4] (threads). Runs in a minute. Makes `k3lib.matmul`.
#
# [1.4 Threads that share a kernel's work](04_parallel.ipynb) ·
# [contents](../README.md) ·
# [1.6 Exponential, tanh, sigmoid and RMSNorm with the same bits everywhere](06_functions.ipynb)
#
# [1.5.9]: #1.5.9-How-fast-may-it-be?
# [1.1]: 01_mxfp4.ipynb
# [1.3]: 03_simd.ipynb
# [1.4]: 04_parallel.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "kernels")

# %%
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
from numba import njit, prange
from safetensors.numpy import load_file

from k3lib.mxfp4 import E2M1, SCALE, decode
from k3lib.simd import TWICE_E2M1, float_of_bits, fma

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% tags=["export"]
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from k3lib.kernel_cache import inner, kernel
from k3lib.mxfp4 import GROUP
from k3lib.parallel import CORES, chunk_done, next_chunk, parallel_for, threads_for
from k3lib.simd import (
    HALF_SCALE,
    LANES,
    emit_fma,
    emit_load_part,
    emit_load_two,
    emit_nibbles,
    emit_prefetch,
    emit_splat,
    emit_sum,
    emit_zeros,
    f32x16,
    fma16,
    load16,
    load16_part,
    sum16,
    zeros16,
)

# %% tags=["parameters"]
rows, width = 12288, 7168  # q_proj of a KDA layer: 96 heads x 128, hidden_size
experts = 16  # held in memory for the timings: what one layer reads for one token, 281 MB
rounds = 5  # A B A B ... and the median
seed = 0


# %% [markdown]
# | symbol | meaning | in K3 | in code |
# |---|---|---|---|
# | $W$ | matrix of a projection, rows by columns | e.g. `q_proj` 12288 × 7168 | `W`: `.shape`, `.multiply` |
# | $x_t$ | input of the product for token $t$, float32 | 7168 | `x[t]` |
# | $y_{t,i} = \sum_j W_{i,j} x_{t,j}$ | output of row $i$ | 12288 | `out[t, r]` |
# | tile | rows that stay in the nearest cache while all tokens pass over them | 16 | `TILE` |

# %% [markdown]
# ## 1.5.1 By hand: half a float
#
# bf16 is a float32 without its lower sixteen bits. It keeps the sign, all eight bits of the exponent and seven bits of
# the mantissa. So a bf16 number becomes a float32 by sixteen zero bits at its lower end, and the conversion is exact.
#
# IEEE half precision also has two bytes, but five bits of exponent and ten of mantissa. The bytes do not say which of
# the two formats they are in. The cell below reads the same bytes both ways: the wrong numbers look possible.

# %% tags=["export"]
def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    "float32 of uint16 `bits`, any shape: bf16 is the upper half of a float32, so this is exact."
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


# %%
words = np.array([0x3F80, 0xC020, 0x4049, 0x0001, 0x7F80], np.uint16)
wide = bf16_to_float32(words)
assert wide.tolist() == [1, -2.5, 3.140625, 2.0**-133, math.inf]
for word, right, wrong in zip(words, wide, words.view(np.float16)):
    print(f"{word:04x}   bf16 {right:9.4g}   read as half precision {wrong:9.4g}")


# %% [markdown]
# ## 1.5.2 One row: sixteen lanes, one tree
#
# Chapter [1.3] fixed the order of a sum: element $j$ is added to lane $j \bmod 16$, in order, and at the end `sum16`
# adds the lanes by halves. If the length of a row is not a multiple of 16, the missing lanes of the last step are
# zeros. Nothing behind the row is read.
#
# [1.3]: 03_simd.ipynb

# %% tags=["export"]
@kernel
def dot(a, b):
    "a . b for float32 [n]: element m belongs to lane m % 16, lanes are summed by halves."
    acc = zeros16()
    whole = a.size - a.size % LANES
    for m in range(0, whole, LANES):
        acc = fma16(load16(a, m), load16(b, m), acc)
    if whole < a.size:
        acc = fma16(load16_part(a, whole, a.size - whole), load16_part(b, whole, a.size - whole), acc)
    return sum16(acc)


# %% [markdown]
# A result can show which lane an element was added to. The number $2^{24}+1$ is not a float32, so $2^{24} + 1$ is
# rounded to $2^{24}$. Add $2^{24}$, 1 and $-2^{24}$. If all three are in one lane, the 1 is lost by rounding and the
# sum is 0. If the 1 is in another lane, $2^{24}$ and $-2^{24}$ cancel first, and the sum is 1.

# %%
def pair(i, j):
    "dot of ones with 2^24 at i, 1 at j and -2^24 at i+32."
    a = np.zeros(48, np.float32)
    a[i], a[j], a[i + 32] = 2**24, 1, -2**24
    return dot(a, np.ones(48, np.float32))


assert pair(0, 16) == 0 and pair(0, 17) == 1
print("2^24 + 1 - 2^24, all in lane 0:", pair(0, 16), "   the 1 in lane 1:", pair(0, 17))

# %% [markdown]
# How far may `dot` be from the exact sum? An element passes through at most $\lceil k/16\rceil + 4$ additions: those of
# its lane and the four of the tree. Each addition rounds by at most $2^{-24}$ times its result, and no result is larger
# than the sum of the magnitudes of all products. The check compares `dot` with float64 for widths with every remainder
# from 0 to 15.

# %%
rng = np.random.default_rng(seed)
for k in [*range(1, 50), 7168]:
    a, b = rng.standard_normal((2, k)).astype(np.float32)
    bound = (math.ceil(k / 16) + 4) * 2.0**-24 * np.abs(a.astype(float) * b).sum()
    assert abs(dot(a, b) - a.astype(float) @ b.astype(float)) <= bound, k
print("within the rounding bound for 50 widths")

# %% [markdown]
# ## 1.5.3 A reassociating sum changes bits, `dot` does not
#
# Two processes multiply the same two arrays. One compiles for this CPU, the other for the oldest CPU of its family,
# which has narrower registers. Each computes a sum with `fastmath`, which the compiler may reorder, and `dot`, which it
# may not. The two results of `dot` must have equal bits.

# %%
script = '''
import numpy as np
from numba import njit
from k3lib.matmul import dot

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
        env = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
        env |= {"NUMBA_CPU_NAME": cpu} if cpu else {}
        run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        return run.stdout.split()


here, baseline = bits_of(None), bits_of("generic")
assert here[1] == baseline[1]
print("dot:", here[1], "here,", baseline[1], "on a baseline CPU")

# %% tags=["nbval-ignore-output"]
print("loose sum:", here[0], "here,", baseline[0], "on a baseline CPU")


# %% [markdown]
# ## 1.5.4 Four rows, four tokens: one template
#
# A kernel that multiplies one row at a time loads $x$ again for each row. If it multiplies four rows at a time, the
# four rows share each load of $x$, and the additions of the four sums do not wait for each other. If it also takes four
# tokens at a time, the tokens share the loading and unpacking of the weights. Then sixteen sums are in progress at
# once. None of this changes what happens to one pair of a row and a token: the lanes and their order stay the same.
#
# Three formats and three numbers of tokens would need nine kernels. This chapter writes one template instead. The loop
# over the columns, $k$, is written once. One step of this loop is an intrinsic ([1.3]). While a kernel is compiled, the
# intrinsic's code generator runs two Python loops, over the rows and over the tokens, and writes the instructions of
# the step. For everything that depends on the format it calls a method of an object. Such an object exists only during
# compilation. The first class, `_Rows`, knows where the rows of an array begin.
#
# [1.3]: 03_simd.ipynb

# %% tags=["export"]
class _Rows:
    "A two-dimensional array in C order inside a kernel that is being written. `shape`: its rows and columns."

    def __init__(self, context, builder, kind, array):
        if not (isinstance(kind, types.Array) and kind.ndim == 2 and kind.layout == "C"):
            raise TypingError(f"a product takes two-dimensional arrays in C order, not {kind}")
        fields = cgutils.create_struct_proxy(kind)(context, builder, array)
        self.context, self.builder, self.dtype = context, builder, kind.dtype
        self.data, self.shape = fields.data, cgutils.unpack_tuple(builder, fields.shape, 2)

    def pointer(self, row, column):
        "Pointer to element [row, column]."
        b = self.builder
        return b.gep(self.data, [b.add(b.mul(row, self.shape[1]), column)])


# %% [markdown]
# ### bf16 and float32
#
# In these formats, element $j$ of a row is multiplied by element $j$ of $x$. One step takes 32 elements, which in bf16
# are 64 bytes, a whole cache line. The last steps of a row may take fewer elements, at most sixteen each.
#
# A weight comes from memory, and the kernel would wait for it. So each step *prefetches*: it asks for the cache line
# that the kernel needs 1024 elements later. It does so in each of the four rows, because the four rows lie far apart in
# memory.

# %% tags=["export"]
_STEP = 2 * LANES  # elements of a row in one step of the k-loop; also a group of MXFP4
_PREFETCH_DISTANCE = 1024  # elements


class _Plain(_Rows):
    "Rows of bf16 (uint16) or float32."

    def prefetch(self, rows, m):
        for row in rows:
            ahead = self.builder.add(m, ir.Constant(m.type, _PREFETCH_DISTANCE))
            emit_prefetch(self.builder, self.pointer(row, ahead))

    def step(self, row, m):
        "The 32 elements of a row from m on: two vectors."
        return emit_load_two(self.context, self.builder, self.pointer(row, m), self.dtype)

    def last_step(self, row, m, count):
        "The `count` elements of a row from m on, at most sixteen: one vector."
        return [emit_load_part(self.builder, self.pointer(row, m), self.dtype, count)]

    def multiply_add(self, weights, x, acc):
        for w, v in zip(weights, x):
            acc = emit_fma(self.builder, w, v, acc)
        return acc


# %% [markdown]
# ### MXFP4
#
# A byte of MXFP4 holds two neighbouring weights: $2j$ in the low nibble and $2j+1$ in the high nibble. A vector of the
# sixteen low nibbles of a group therefore holds the even weights, and a vector of the high nibbles the odd weights. To
# put them back in order would cost instructions for every group of every row. It is cheaper to reorder $x$ once for all
# rows: in each group of 32, first the even elements, then the odd ones. The products of one group then take three
# instructions, and three roundings, in each lane $l$:
#
# $$\text{sum}_l \leftarrow \mathrm{fma}\bigl(\mathrm{fma}(\text{high}_l,\, x_{2l+1},\,
# \mathrm{mul}(\text{low}_l,\, x_{2l})),\; 2^{E-128},\; \text{sum}_l\bigr)$$
#
# Here $\text{sum}_l$ is the accumulator of lane $l$. $\text{low}_l$ and $\text{high}_l$ are twice the values of the low
# and of the high nibble of byte $l$, and $2^{E-128}$ is half the scale of the group. The kernel applies the scale to
# the sum of a group and never to a single weight. So the largest scales do no harm even if a single weight of that
# scale would be too large for float32.
#
# Prefetching differs, too. A row of K3's experts has 1,792 bytes, so two rows lie in one memory page of 4 KB. The
# prefetcher that is built into the CPU follows the accesses page by page, and four interleaved rows confuse it. So each
# step asks for 64 bytes of the *next* four rows. In one step the kernel uses 16 bytes of each of the four rows, also 64
# in all. So while it works through four rows, it has asked for all bytes of the next four.

# %% tags=["export"]
class _Packed(_Rows):
    "Rows of MXFP4: `packed` uint8 [n, k/2] with `scale` uint8 [n, k/32]. A step is one group of 32 weights."

    def __init__(self, context, builder, kind, pair):
        packed, scale = cgutils.unpack_tuple(builder, pair)
        super().__init__(context, builder, kind[0], packed)
        if not kind[0].dtype == kind[1].dtype == types.uint8:
            raise TypingError(f"MXFP4 is two arrays of uint8, not {kind}")
        self.scale = _Rows(context, builder, kind[1], scale)
        self.shape = [self.shape[0], builder.mul(self.shape[1], ir.Constant(self.shape[1].type, 2))]

    def pointer(self, row, m):
        "Pointer to the byte that holds elements m and m+1 of a row; m is even."
        b = self.builder
        return b.gep(self.data, [b.lshr(b.add(b.mul(row, self.shape[1]), m), ir.Constant(m.type, 1))])

    def prefetch(self, rows, m):
        b = self.builder
        next_rows = b.add(rows[0], ir.Constant(m.type, len(rows)))
        emit_prefetch(b, self.pointer(next_rows, b.mul(m, ir.Constant(m.type, len(rows)))))

    def step(self, row, m):
        "Twice the even weights of the group at m, twice the odd ones, half its scale."
        low, high = emit_nibbles(self.context, self.builder, self.pointer(row, m))
        return low, high, self._half_scale(row, self.builder.udiv(m, ir.Constant(m.type, GROUP)))

    def _half_scale(self, row, group):
        kind = types.Array(types.float32, 1, "C", readonly=True)
        array = self.context.make_constant_array(self.builder, kind, HALF_SCALE)
        table = cgutils.create_struct_proxy(kind)(self.context, self.builder, array).data
        code = self.builder.load(self.scale.pointer(row, group))
        place = self.builder.gep(table, [self.builder.zext(code, group.type)])
        return emit_splat(self.builder, self.builder.load(place))

    def multiply_add(self, weights, x, acc):
        (even, odd), (low, high, half_scale), b = x, weights, self.builder
        return emit_fma(b, emit_fma(b, high, odd, b.fmul(low, even)), half_scale, acc)


# %% [markdown]
# `_half_scale` writes the look-up of a scale as instructions. In the Python of a kernel it would be
# `HALF_SCALE[scale[r, g]]`. But in Python an index may be negative, so numba would test for a negative index, with four
# more instructions for each scale byte.
#
# ### The step
#
# `rows` and `tokens` are tuples of row numbers. The length of a tuple is part of its numba type, so the code generator
# knows how many rows and tokens there are. The accumulators are a tuple of tuples of vectors, one vector for each token
# and row. They begin as zeros, and each step returns new ones.

# %% tags=["export"]
def _matrix(context, builder, kind, w):
    "The object that writes code for the matrix `w`, which is an array or the pair (packed, scale)."
    return (_Packed if isinstance(kind, types.BaseTuple) else _Plain)(context, builder, kind, w)


@intrinsic
def _shape(typingctx, w):
    "(w) -> (rows, columns) of a matrix of any format."
    def codegen(context, builder, sig, args):
        return context.make_tuple(builder, sig.return_type, _matrix(context, builder, sig.args[0], args[0]).shape)
    return types.UniTuple(types.intp, 2)(w), codegen


def _accumulators(context, builder, kind, acc):
    "The tuple of tuples that holds acc[token][row]."
    return context.make_tuple(builder, kind, [context.make_tuple(builder, kind[0], of_token) for of_token in acc])


def _multiply_add(context, builder, kinds, args, last):
    "Write one step for all rows and tokens: 32 elements or, in the last steps of a row, `count` of them, at most 16."
    w, rows, x, tokens, at, acc = args
    matrix, inputs = _matrix(context, builder, kinds[0], w), _Rows(context, builder, kinds[2], x)
    rows, tokens, (m, column, *count) = (cgutils.unpack_tuple(builder, values) for values in (rows, tokens, at))
    acc = [cgutils.unpack_tuple(builder, of_token) for of_token in cgutils.unpack_tuple(builder, acc)]
    if len(rows) > 1 and not last:
        matrix.prefetch(rows, m)
    weights = [matrix.last_step(row, m, *count) if last else matrix.step(row, m) for row in rows]
    for t, token in enumerate(tokens):
        pointer = inputs.pointer(token, builder.add(column, m))
        v = ([emit_load_part(builder, pointer, inputs.dtype, *count)] if last
             else emit_load_two(context, builder, pointer, inputs.dtype))
        for r in range(len(rows)):
            acc[t][r] = matrix.multiply_add(weights[r], v, acc[t][r])
    return _accumulators(context, builder, kinds[5], acc)


# %% tags=["export"]
@intrinsic
def _add_step(typingctx, w, rows, x, tokens, at, acc):
    "(w, rows, x, tokens, (m, column), acc) -> acc + w[rows, m:m+32] . x[tokens, column+m:column+m+32]."
    def codegen(context, builder, sig, args):
        return _multiply_add(context, builder, sig.args, args, last=False)
    return acc(w, rows, x, tokens, at, acc), codegen


@intrinsic
def _add_last_step(typingctx, w, rows, x, tokens, at, acc):
    """Like _add_step, for `count` elements, where (m, column, count) = at and 0 < count <= 16.

    For MXFP4 the result is `acc` itself: a row of MXFP4 has whole groups only, so this step never runs.
    """
    def codegen(context, builder, sig, args):
        if isinstance(sig.args[0], types.BaseTuple):
            return args[5]
        return _multiply_add(context, builder, sig.args, args, last=True)
    return acc(w, rows, x, tokens, at, acc), codegen


@intrinsic
def _put_sums(typingctx, out, place, acc):
    "(out, (t0, r0), acc): out[t0 + t, r0 + r] = the sum of the lanes of acc[t][r]."
    if out.dtype != types.float32:
        raise TypingError(f"a product is written to float32, not {out}")

    def codegen(context, builder, sig, args):
        outputs = _Rows(context, builder, sig.args[0], args[0])
        t0, r0 = cgutils.unpack_tuple(builder, args[1])
        for t, of_token in enumerate(cgutils.unpack_tuple(builder, args[2])):
            for r, v in enumerate(cgutils.unpack_tuple(builder, of_token)):
                token, row = builder.add(t0, ir.Constant(t0.type, t)), builder.add(r0, ir.Constant(r0.type, r))
                builder.store(emit_sum(builder, v), outputs.pointer(token, row))
        return context.get_dummy_value()
    return types.void(out, place, acc), codegen


# %% [markdown]
# One cost does not show in the equations. A CPU with sixteen registers of eight floats cannot hold sixteen
# accumulators of sixteen lanes, so the compiler keeps some of them on the stack, in memory. LLVM aligns the stack to 16
# bytes only. A vector of 32 bytes that begins at such an address may lie in two cache lines, and then each access
# takes two. So `_zeros`, which creates the accumulators, asks LLVM for a stack aligned to 64 bytes in the function that
# calls it. This function must not be inlined into its caller, because LLVM then drops the request.

# %% tags=["export"]
@intrinsic
def _zeros(typingctx, rows, tokens):
    "(rows, tokens) -> accumulators of zero. The function that calls this gets an aligned stack."
    def codegen(context, builder, sig, args):
        builder.function.attributes.alignstack = 64
        builder.function.attributes.add("noinline")
        return _accumulators(context, builder, sig.return_type, [[emit_zeros()] * len(rows)] * len(tokens))
    return types.UniTuple(types.UniTuple(f32x16, len(rows)), len(tokens))(rows, tokens), codegen


@inner
def products(w, rows, x, tokens, column, out, place):
    """out[t0 + t, r0 + r] = w[rows[r]] . x[tokens[t], column:column+k], where (t0, r0) = place. For kernels.

    `w`: float32 or uint16 (bf16 bits) [n, k], or (packed, scale) uint8 [n, k/2] and [n, k/32]. `x`, `out`: float32. All
    in C order. `rows`, `tokens`: tuples of row numbers of w and of x. Element m of a product belongs to lane m % 16
    (MXFP4: m // 2 % 16) and lanes are summed by halves, so the bits depend on one row of w and one of x alone.
    """
    k = _shape(w)[1]
    whole = k - k % _STEP
    acc = _zeros(rows, tokens)
    for m in range(0, whole, _STEP):
        acc = _add_step(w, rows, x, tokens, (m, column), acc)
    for m in range(whole, k, LANES):
        acc = _add_last_step(w, rows, x, tokens, (m, column, min(LANES, k - m)), acc)
    _put_sums(out, place, acc)


# %% [markdown]
# ## 1.5.5 The matrix: tiles of sixteen rows
#
# With many tokens, each weight should be read from memory once and be used for all of them. So a kernel works on a
# *tile* of sixteen rows. For an expert a tile has 30 KB and fits into the cache nearest to the core. The kernel
# multiplies the tile with all tokens before it goes on to the next tile. Tiles are independent, so threads may share
# them. A thread takes several tiles at a time ([1.4]): after its last row a thread has prefetched rows that another
# thread will multiply, and this waste should be rare.
#
# Within a tile, `_tile` takes four tokens at a time, and two or one at the end. It takes four rows at a time, and the
# last one to three rows one by one. The loops use `range`, for a reason: a counter that begins as the literal 0 would
# have another numba type at first, and numba would compile every function that receives the counter twice.
#
# [1.4]: 04_parallel.ipynb

# %% tags=["export"]
TILE = 16  # rows that stay in the cache while all tokens pass


@inner
def _four_by_four(w, begin, end, x, tokens, out, first):
    "out[tokens, first+r] = w[r] . x[tokens] for the rows r in begin..end of w, whose number is a multiple of four."
    for r in range(begin, end, 4):
        products(w, (r, r + 1, r + 2, r + 3), x, tokens, 0, out, (tokens[0], first + r))


@inner
def _tile(w, x, out, first, tile):
    "out[:, first+r] = x w[r] for the rows r of one tile of w."
    tokens, begin = len(x), TILE * tile
    end = min(begin + TILE, _shape(w)[0])
    fours = end - (end - begin) % 4
    for t in range(0, tokens - 3, 4):
        _four_by_four(w, begin, fours, x, (t, t + 1, t + 2, t + 3), out, first)
    if tokens & 2:
        t = tokens // 4 * 4
        _four_by_four(w, begin, fours, x, (t, t + 1), out, first)
    if tokens & 1:
        _four_by_four(w, begin, fours, x, (tokens - 1,), out, first)
    for r in range(fours, end):
        for t in range(tokens):
            products(w, (r,), x, (t,), 0, out, (t, first + r))


# %% [markdown]
# Two kernels use the tiles. `_shared_matmul` shares the tiles of a matrix among threads. `matmul_rows` multiplies all
# tiles on the calling thread. Chapter [5.12] uses the second for rows that this thread has just read.
#
# [5.12]: ../05_streaming/12_read_multiply.ipynb

# %% tags=["export"]
@kernel
def _shared_matmul(tiles, w, x, out, cursor):
    while True:
        begin, end = next_chunk(cursor, tiles)
        if begin >= tiles:
            return
        for tile in range(begin, end):
            _tile(w, x, out, 0, tile)
        chunk_done(cursor, begin, end)


@kernel
def matmul_rows(w, x, out, first):
    """out[:, first:first+m] = x w^T for the m rows of `w`, on the calling thread alone.

    `w`: an array uint16 (bf16 bits) or float32 [m, k] with `x` = padded(x), or (packed, scale), uint8 [m, k/2] and
    [m, k/32], with `x` = deinterleaved(x). `out`: float32 [T, n]. All in C order. Shapes are not checked.
    """
    for tile in range((_shape(w)[0] + TILE - 1) // TILE):
        _tile(w, x, out, first, tile)


# %% [markdown]
# A cache works in lines of 64 bytes, which are sixteen floats. A NumPy array begins at a multiple of 16 bytes, so most
# loads of sixteen of its floats would need two lines. Therefore $x$ is copied to an address where a line begins. The
# copy costs little: $x$ has 28 KB, and the matrix has 176 MB. For MXFP4 the copy also puts the even elements of each
# group before the odd ones.

# %% tags=["export"]
def line_aligned(shape: tuple[int, ...]) -> np.ndarray:
    "float32 zeros of `shape` that begin on a cache line, so that no load of sixteen floats straddles two."
    size = math.prod(shape)
    raw = np.zeros(size + 16, np.float32)
    start = -raw.__array_interface__["data"][0] % 64 // 4
    return raw[start:start + size].reshape(shape)


def padded(x: np.ndarray) -> np.ndarray:
    "`x` [T, k] as bf16 and float32 kernels take it: float32 [T, k rounded up to 16], each row begins a cache line."
    T, k = x.shape
    out = line_aligned((T, k + -k % LANES))
    out[:, :k] = x
    return out


def deinterleaved(x: np.ndarray) -> np.ndarray:
    "`x` [T, k] as MXFP4 kernels take it: float32 [T, k], in each group of 32 the even elements before the odd ones."
    T, k = x.shape
    out = line_aligned((T, k // GROUP, 2, LANES))
    out[...] = x.reshape(T, k // GROUP, LANES, 2).swapaxes(-1, -2)
    return out.reshape(T, k)


# %% [markdown]
# ## 1.5.6 A matrix is rows that arrive
#
# A layer should not need to know whether a matrix is in memory or is read from a disk while it is used. So both kinds
# have the same attribute `shape` and the same two methods: `multiply`, and `map_blocks` for a layer that does its own
# arithmetic on the rows (chapter [3.1]). Each output depends on one row of the matrix. So it does not matter into which
# blocks the rows were cut, or in which order the blocks arrive.
#
# [3.1]: ../03_mla/01_mla.ipynb

# %% tags=["export"]
class Matrix(Protocol):
    "What every matrix offers, resident or streamed, in any format."

    @property
    def shape(self) -> tuple[int, int]:
        "Rows n and columns k."

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int) -> None:
        "out = x W^T for x float32 [T, k] and out float32 [T, n] in C order."

    def map_blocks(self, work: Callable[[int, Any, int], None], threads: int) -> None:
        """Call work(first_row, rows, threads) on row blocks that cover the matrix, each row once.

        A resident matrix makes one call for all rows with all threads. A streamed one may make concurrent calls from
        its reader threads, with threads = 1.
        """


def _multiply(w, x, out, threads):
    "out = x w^T, on `threads` threads if the work is worth sharing; `x` from padded() or deinterleaved()."
    n = out.shape[1]
    parallel_for(threads_for(x.size * n, threads), -(-n // TILE), _shared_matmul, w, x, out)


class ResidentMatrix:
    "A matrix in memory: `array` [n, k], uint16 bf16 bits or float32."

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = array.shape

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int) -> None:
        "As Matrix says. Raises ValueError for shapes that do not fit."
        check_shapes("ResidentMatrix", self.shape, x, out)
        _multiply(self.array, padded(x), out, threads)

    def map_blocks(self, work: Callable[[int, np.ndarray, int], None], threads: int) -> None:
        "Call work(0, array, threads)."
        work(0, self.array, threads)


# %% [markdown]
# Kernels do not check shapes: with a wrong shape a kernel would read other memory. So the Python code that calls a
# kernel checks the shapes first and refuses wrong ones.

# %% tags=["export"]
def check_shapes(what: str, shape: tuple[int, int], x: np.ndarray, out: np.ndarray | None) -> None:
    """Raise ValueError unless `x` [T, k] and `out`, None or float32 [T, n], fit a matrix of `shape` (n, k).

    `what`: the function or class that the message names.
    """
    n, k = shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"{what}: x has shape {x.shape}, W {shape}: the last dimensions differ")
    if out is not None and (out.shape != (x.shape[0], n) or out.dtype != np.float32):
        raise ValueError(f"{what}: out is {out.dtype} {out.shape}, expected float32 {(x.shape[0], n)}")


def check_packed(packed: Any, scale: Any, x_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a packed matrix takes x [T, k] to out [T, n].

    `packed` [n, k/2] and `scale` [n, k/32] are arrays, or anything else that has a `shape`.
    """
    n, groups = scale.shape
    if packed.shape != (n, groups * GROUP // 2) or x_shape != (*out_shape[:1], groups * GROUP) or out_shape[1:] != (n,):
        raise ValueError(f"MXFP4: packed {packed.shape}, scale {scale.shape}, x {x_shape} and out {out_shape} "
                         "do not fit")


# %% tags=["export"]
class PackedMatrix(NamedTuple):
    "An MXFP4 matrix in memory: `packed` uint8 [n, k/2], `scale` uint8 [n, k/32]. It is never unpacked in memory."

    packed: np.ndarray
    scale: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        "Rows n and columns k; a byte holds two columns."
        n, half = self.packed.shape
        return n, 2 * half

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int) -> None:
        "As Matrix says. Raises ValueError for shapes and dtypes that do not fit."
        check_packed(self.packed, self.scale, x.shape, out.shape)
        if not self.packed.dtype == self.scale.dtype == np.uint8:
            raise ValueError(f"MXFP4: packed is {self.packed.dtype} and scale {self.scale.dtype}, expected uint8")
        _multiply(tuple(self), deinterleaved(x), out, threads)

    def map_blocks(self, work: Callable[[int, "PackedMatrix", int], None], threads: int) -> None:
        "Call work(0, this matrix, threads)."
        work(0, self, threads)


# %% [markdown]
# A damaged file may contain weights that are infinite or NaN. To look at every weight would cost time. But the product
# of such a weight and a finite $x$ is infinite or NaN, even for $x = 0$, and no later addition makes the sum finite
# again. So it is enough to check each output, which is one number for a whole row of weights.

# %% tags=["export"]
class NotFinite(ArithmeticError):
    """A result is infinite or NaN.

    `rows`: (first, end) of the matrix rows that gave the result, None if no matrix did. `matrix`: which matrix of an
    expert has these rows, None if the matrix belongs to no expert. `tensor`: the name of the weight that was used last;
    layers know no names, so it is "" until the model sets it.
    """

    def __init__(self, message: str, rows: tuple[int, int] | None = None, matrix: Any = None, tensor: str = "") -> None:
        super().__init__(message)
        self.rows, self.matrix, self.tensor = rows, matrix, tensor


_INFINITE = np.int32(0x7f800000)  # bits of infinity; those of a NaN, without its sign, are larger


@kernel
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


# %% tags=["export"]
def check_product(out: np.ndarray, x: np.ndarray, rows_of: Callable[[int], tuple[int, int]] = lambda r: (r, r + 1),
                  matrix: Any = None) -> None:
    """Raise NotFinite unless the product `out` float32 [T, n] of `x` is finite.

    rows_of(r): first and end of the matrix rows behind output r. `matrix` goes into the error.
    """
    bad = first_not_finite(out)
    if bad >= 0:
        t, r = divmod(int(bad), out.shape[1])
        what = "a finite" if np.isfinite(x).all() else "an infinite or NaN"
        raise NotFinite(f"output row {r} is {out[t, r]} for token {t} of the chunk, from {what} input, "
                        "expected a finite number", rows_of(r), matrix)


# %%
for k in (0, 5, 1023, 1024, 2999):
    for value in (np.inf, -np.inf, np.nan):
        a = np.zeros((3, 1000), np.float32)
        a.reshape(-1)[[k, 2999]] = value
        assert first_not_finite(a) == k
assert first_not_finite(np.full((3, 1000), -3.4e38, np.float32)) == -1


# %% [markdown]
# Layers call `linear`. It allocates the output, multiplies, and checks that all outputs are finite.

# %% tags=["export"]
def linear(W: Matrix, x: np.ndarray, threads: int = CORES, out: np.ndarray | None = None) -> np.ndarray:
    """float32 [T, n] = x W^T for `x` float32 [T, k] and a matrix W [n, k], on `threads` threads.

    Each output is one row's dot product in a fixed order, so the bits do not depend on how the rows were cut, on T,
    or on the number of threads. The result is `out` if that is given. Raises ValueError where shapes do not fit,
    NotFinite for a product that is infinite or NaN.
    """
    check_shapes("linear", W.shape, x, out)
    if out is None:
        out = np.empty((x.shape[0], W.shape[0]), np.float32)
    W.multiply(x, out, threads)
    check_product(out, x)
    return out


# %% [markdown]
# The gate compares `linear` with `dot`, byte for byte. The rows are cut at random places. There are one to nine tokens,
# and the width is 1003, which leaves eleven elements after the last whole vector. The matrix comes as bf16 and as
# float32.

# %%
class Cut:
    "A matrix that arrives in blocks of 1 to 9 rows."

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def multiply(self, x, out, threads):
        first = 0
        while first < len(self.array):
            last = first + rng.integers(1, 10)
            matmul_rows(self.array[first:last], padded(x), out, first)
            first = last


bits = ((rng.integers(-2**20, 2**20, (61, 1003)) / 2**18).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
xs = (rng.integers(-2**20, 2**20, (9, 1003)) / 2**18).astype(np.float32)
expected = np.array([[dot(row, x) for row in bf16_to_float32(bits)] for x in xs], np.float32)


def check_bits(name, products, tokens):
    "The gate: the first `tokens` rows of outputs, byte for byte those of `dot`."
    wrong = np.argwhere(products.view(np.int32) != expected[:tokens].view(np.int32))
    assert not len(wrong), f"{name}: outputs have other bits than those of dot"


for T in range(1, 10):
    for W in (ResidentMatrix(bits), Cut(bits), Cut(bf16_to_float32(bits))):
        check_bits(type(W).__name__, linear(W, xs[:T]), T)
print("27 products, one answer:", hashlib.sha256(expected.tobytes()).hexdigest()[:16])

# %% [markdown]
# NumPy's own product of the same matrices fails this gate. It is no less exact. It only adds in another order.

# %% tags=["raises-exception"]
with_blas = xs @ bf16_to_float32(bits).T
print("close:", np.allclose(with_blas, expected, rtol=1e-4, atol=1e-3))
check_bits("numpy", with_blas, 9)

# %% [markdown]
# ## 1.5.7 MXFP4: which bits, exactly
#
# The first check is the gate of chapter [1.1]: a product from the fixture, which another implementation computed. The
# result may differ from it by 1e-5 of the largest output. The cell after it reads the nibbles in the wrong order. Every
# shape, type and range is right then, and only the values are wrong, so only this gate notices it.

# %%
fixture = {name: array.copy() for name, array in load_file(ROOT / "fixtures/ops/mxfp4.safetensors").items()}
packed, scale, x, y = (fixture[name] for name in ("matvec_packed", "matvec_scale", "x", "matvec_y"))
TOLERANCE = 1e-5  # fixtures/ops/README.md, section mxfp4


def distance(y, expected):
    "Largest difference, relative to the largest expected magnitude."
    return np.abs(y - expected).max() / np.abs(expected).max()


def check_fixture(name, product):
    "The gate: the fixture's outputs, within TOLERANCE of the largest."
    off = distance(product, y)
    assert off < TOLERANCE, f"{name}: {off:.2g} of the largest output, more than {TOLERANCE:.0e}"
    print(f"{name}: within {TOLERANCE:.0e} of the largest output")


fast = linear(PackedMatrix(packed, scale), x[None])
check_fixture("low nibble first", fast[0])

# %% tags=["raises-exception"]
swapped = packed << 4 | packed >> 4  # WRONG: the high nibble comes first
check_fixture("high nibble first", linear(PackedMatrix(swapped, scale), x[None])[0])


# %% [markdown]
# A tolerance is not enough for the promise of this chapter. The promise says which float32 each output is, down to the
# last bit. So the product can be written a second time, in NumPy, and must give the same bits.
#
# NumPy has no fused multiply-add. It can be built from float64: the product of two float32 is exact there. The sum of
# the product and $c$ is rounded to float64, and a second rounding to float32 could then go to the wrong side. *Rounding
# to odd* prevents this: where the first rounding loses something, the last bit of its result is set to 1. Then the
# result is never halfway between two float32, and the second rounding is right.

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


def packed_twin(packed, scale, x):
    "The bits that a packed matrix owes for one token x [k]."
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


assert fast[0].tobytes() == packed_twin(packed, scale, x).tobytes()
fast[0, :2].view(np.uint32)

# %% [markdown]
# The first two outputs are shown as integers, bit for bit. They, and all others, are the same on every machine that
# keeps the contract of [1.5.8]. The next cell shows that an output does not change either when seven tokens are
# multiplied together or when the matrix is cut. The last lines use the extreme scale bytes, where a weight alone would
# overflow.
#
# [1.5.8]: #1.5.8-The-contract

# %%
xs = rng.standard_normal((7, 3584)).astype(np.float32)
seven = linear(PackedMatrix(packed, scale), xs)
for t in range(7):
    alone = linear(PackedMatrix(packed, scale), xs[t:t + 1])
    part = linear(PackedMatrix(packed[:13], scale[:13]), xs[t:t + 1])
    assert alone.tobytes() == seven[t].tobytes() and part.tobytes() == seven[t, :13].tobytes()


def one_group(byte):
    "32 weights of 6 under this scale byte times 1/128, summed."
    out = np.empty((1, 1), np.float32)
    matrix = PackedMatrix(np.full((1, 16), 0x77, np.uint8), np.full((1, 1), byte, np.uint8))
    matrix.multiply(np.full((1, 32), 1 / 128, np.float32), out, 1)
    return out[0, 0]


ends = {byte: one_group(byte) for byte in (0, 1, 254, 255)}
assert ends[0] == 1.5 * 2.0**-127 and ends[1] == 1.5 * 2.0**-126
assert ends[254] == 1.5 * 2.0**127 and np.isnan(ends[255])
print({byte: f"{value:.4g}" for byte, value in ends.items()})


# %% [markdown]
# ## 1.5.8 The contract
#
# The table lists what could change a bit of an output, and what prevents it.
#
# | what could change a bit | what prevents it |
# |---|---|
# | registers of 4, 8 or 16 lanes | sixteen lanes are a value; `emit_sum` is the only tree |
# | threads, cut of the rows, tokens in a chunk | one output is one row's product with one token |
# | a compiler that fuses $ab+c$ | LLVM fuses only under `fastmath`; for one rounding we write `fma` |
# | exp, σ and tanh of some library | our own, from exact operations and shifts (chapter [1.6]) |
# | BLAS, `np.sum`, `np.dot` | none in the decode path; what LLVM vectorises is elementwise, which moves no bit |
#
# Two rows are statements about a compiler: that it does not reorder a sum, and that it does not fuse $ab + c$. The
# second can be tested with three numbers. $(1+2^{-12})^2 - (1 + 2^{-11})$ is exactly $2^{-24}$. A fused multiply-add
# gives this result. Two separate operations give 0, because the product is rounded to $1 + 2^{-11}$ first.
#
# [1.6]: 06_functions.ipynb

# %%
def two_roundings(a, b, c):
    return a * b + c


fused_by_us = njit(lambda a, b, c: fma(a, b, c))
a, c = np.float32(1 + 2.0**-12), np.float32(-(1 + 2.0**-11))
assert njit(two_roundings)(a, a, c) == 0 and fused_by_us(a, a, c) == 2.0**-24
print("a * b + c:", njit(two_roundings)(a, a, c), "   fma(a, b, c):", fused_by_us(a, a, c))

# %% tags=["nbval-ignore-output"]
fused = njit(two_roundings, fastmath=True)(a, a, c)
print("a * b + c with fastmath:", fused, " (2^-24 where the CPU can fuse, 0 elsewhere)")


# %% [markdown]
# The contract also has conditions. The book relies on these:
#
# - **IEEE 754 binary32.** Addition, multiplication, fused multiply-add, division and square root are rounded correctly,
#   to the nearest number and ties to even. This holds on all x86-64 and 64-bit Arm CPUs, unless the process changes
#   the rounding mode.
# - **No flush to zero.** Some libraries switch the CPU to a mode in which subnormal results become 0. Then results of
#   this size would change.
# - **`fmaf` of the C library** rounds once. It is used only where the target has no fused instruction: x86-64 CPUs
#   before 2013, and `NUMBA_CPU_NAME=generic`. There it is slow.
# - **LLVM** neither reorders nor fuses operations without `fastmath`, in every version of numba that the book supports.
#
# One thing is not promised: *which* NaN an operation gives. The bits of a NaN depend on the order of the operands. In
# this engine a NaN ends the run, so nothing compares its bits.
#
# The first two conditions can be tested in the running process. For the test, float64 computes the quotient or the
# root, and the result is rounded to float32. This gives the correctly rounded float32, because float64 has 53 bits,
# which is more than twice 24 plus two.

# %%
@njit
def divide_and_root(a, b):
    d, s = np.empty_like(a), np.empty_like(a)
    for i in range(a.size):
        d[i], s[i] = a[i] / b[i], np.sqrt(a[i])
    return d, s


a, b = np.exp(rng.uniform(-40, 40, (2, 1_000_000))).astype(np.float32)
quotient, root = divide_and_root(a, b)
assert np.array_equal(quotient, (a.astype(float) / b).astype(np.float32))
assert np.array_equal(root, np.sqrt(a.astype(float)).astype(np.float32))
tiny = dot(np.array([2.0**-75], np.float32), np.array([2.0**-74], np.float32))
assert tiny == 2.0**-149
print("a million quotients and roots correctly rounded; smallest subnormal kept:", tiny == 2.0**-149)

# %% [markdown]
# Under these conditions the bits are the same on any machine. `tests/test_contract.py` compares the bytes of processes
# that compile for this CPU and for a baseline CPU, with one thread and with two, and compares them with digests that
# were written down once.

# %% [markdown]
# ## 1.5.9 How fast may it be?
#
# To decode one token, the engine uses every weight once. So the product can hardly be faster than memory delivers the
# weights. A bf16 weight has two bytes, a weight of a routed expert 0.53. The cell below measures how fast this machine
# reads memory: every core sums its part of an array that is too large for the caches. This sum may be reordered
# (`fastmath`), because only its speed is wanted.

# %%
trunk = 108_811_877_376  # bytes, chapter 5.6: every tensor of layers 0..92 but the routed experts
intermediate, latent = 3072, 3584  # an expert's w1 and w3; w2 is 3584 x 3072, the same bytes
print(f"q_proj of one KDA layer: {rows * width:,} weights, {2 * rows * width / 1e6:.0f} MB;  "
      f"trunk: {trunk / 1e9:.1f} GB a token")
steps_of_numpy = 0.53 + 1 + 2 + 5 + 4 + 12 + 4  # bytes: packed, nibbles, codes, table, scales, product, dot
print(f"bytes moved for a weight of an expert, decoded with NumPy: {steps_of_numpy:.1f}")  # claim moved
print(f"multiplied packed: {1 / 2 + 1 / GROUP:.2f}")  # claim packed


@njit(parallel=True, fastmath=True)
def read_sum(a):
    s = np.float32(0)
    for i in prange(a.size):
        s += a[i]
    return s


def median_seconds(cases):
    "Median time of each function in `cases`, called one after another in each round: what disturbs one disturbs all."
    times = {name: [] for name in cases}
    for _ in range(rounds + 1):  # the first round compiles
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


# %% [markdown]
# Six versions are compared. In the first, NumPy converts the matrix to float32 and multiplies. In the second, a loop
# compiled by numba adds one product after the other. The third uses `products` with one row and one token at a time, so
# each row has sixteen lanes. The fourth is `linear`, which takes four rows at a time and prefetches. The last two
# multiply four tokens at once, so that each weight is read once for all four. They differ only in whether $x$ begins at
# a cache line.

# %%
@njit(parallel=True)
def in_order(w, x, out):
    "out[0] = W x[0] for bf16, one weight after the other."
    for r in prange(w.shape[0]):
        total = np.float32(0)
        for m in range(w.shape[1]):
            total += float_of_bits(np.int32(np.uint32(w[r, m]) << np.uint32(16))) * x[0, m]
        out[0, r] = total


@njit(parallel=True)
def in_order_packed(packed, scale, x, out):
    "The same for MXFP4."
    for r in prange(packed.shape[0]):
        total = np.float32(0)
        for j in range(packed.shape[1]):
            low, high = E2M1[packed[r, j] & 15], E2M1[packed[r, j] >> 4]
            total += (low * x[0, 2 * j] + high * x[0, 2 * j + 1]) * SCALE[scale[r, j // 16]]
        out[0, r] = total


@njit(nogil=True)
def row_by_row(n, w, x, out, cursor):
    while True:
        begin, end = next_chunk(cursor, n)
        if begin >= n:
            return
        for r in range(begin, end):
            products(w, (r,), x, (0,), 0, out, (0, r))
        chunk_done(cursor, begin, end)


# %% [markdown]
# One more version shows what prefetching is worth: the same template, compiled without prefetch instructions.

# %%
def silent_kernel():
    "products for four rows and one token, compiled without prefetch, and a kernel that uses it."
    asks = _Packed.prefetch
    _Packed.prefetch = lambda *_: None
    silent = inner(products.py_func)

    @njit(nogil=True)
    def four_rows(n, w, x, out, cursor):
        while True:
            begin, end = next_chunk(cursor, n)
            if begin >= n:
                return
            for r in range(4 * begin, 4 * end, 4):
                silent(w, (r, r + 1, r + 2, r + 3), x, (0,), 0, out, (0, r))
            chunk_done(cursor, begin, end)

    try:
        split, one = deinterleaved(x[None]), np.empty((1, 64), np.float32)
        four_rows(0, (packed, scale), split, one, np.zeros(4, np.int64))  # compiles
    finally:
        _Packed.prefetch = asks
    return four_rows


fours = silent_kernel()
for version, n in ((row_by_row, 64), (fours, 16)):
    one = np.empty((1, 64), np.float32)
    parallel_for(2, n, version, (packed, scale), deinterleaved(x[None]), one)
    assert one.tobytes() == fast.tobytes()

# %% tags=["nbval-ignore-output"]
pattern = (rng.standard_normal((rows // 16, width)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
w = np.concatenate([pattern] * 16)
x4 = padded(rng.standard_normal((4, width)))
x1 = padded(x4[:1])
crooked = line_aligned((4 * width + 4,))[4:].reshape(4, width)  # 16 bytes past a cache line
crooked[:] = x4
out1, out4 = (np.empty((t, rows), np.float32) for t in (1, 4))
large = np.ones(80_000_000, np.float32)
cases = {
    "numpy: convert, then @": (lambda: bf16_to_float32(w) @ x1[0], 1, 2 + 8 + 8 + 4),
    "numba: in order": (lambda: in_order(w, x1, out1), 1, 2),
    "row by row, 16 lanes": (lambda: parallel_for(CORES, rows, row_by_row, w, x1, out1), 1, 2),
    "four rows: linear": (lambda: linear(ResidentMatrix(w), x1, out=out1), 1, 2),
    "four tokens, x not aligned": (lambda: parallel_for(CORES, rows // TILE, _shared_matmul, w, crooked, out4), 4, 0.5),
    "four tokens: linear": (lambda: linear(ResidentMatrix(w), x4, out=out4), 4, 0.5),
}
seconds = median_seconds({"read": lambda: read_sum(large), **{name: run for name, (run, _, _) in cases.items()}})
bandwidth = large.nbytes / seconds.pop("read")
rates = {name: rows * width * tokens / seconds[name] for name, (_, tokens, _) in cases.items()}
assert out1.tobytes() == out4[:1].tobytes()
print(f"{'':28}      ms   G weights/s   bytes/weight    GB/s   (memory reads {bandwidth / 1e9:.1f} GB/s)")
for name, (_, _, moved) in cases.items():
    print(f"{name:28} {1e3 * seconds[name]:7.1f} {rates[name] / 1e9:13.2f} {moved:14.1f} "
          f"{rates[name] * moved / 1e9:7.1f}")
print(f"the trunk at this bandwidth: {trunk / bandwidth:.1f} s a token")

# %% [markdown]
# The next cell does the same for MXFP4. Sixteen experts, as many as one layer needs for a token, are in memory as 48
# matrices of 3072 × 3584.

# %% tags=["nbval-ignore-output"]
matrices = 3 * experts
P = rng.integers(0, 256, (matrices, intermediate, latent // 2), np.uint8)
S = rng.integers(110, 127, (matrices, intermediate, latent // GROUP), np.uint8)
z1, z4 = (rng.standard_normal((t, latent)).astype(np.float32) for t in (1, 4))
split, y1, y4 = deinterleaved(z1), *(np.empty((t, intermediate), np.float32) for t in (1, 4))


def over_all(multiply, count=matrices):
    return lambda: [multiply(P[m], S[m]) for m in range(count)]


def shared(version, rows_an_item):
    return over_all(lambda p, s: parallel_for(CORES, len(p) // rows_an_item, version, (p, s), split, y1))


few = 2  # matrices are enough to time the slow ones
cases = {
    "numpy: decode, then @": (over_all(lambda p, s: decode(p, s) @ z1[0], few), few, 1),
    "numba: in order": (over_all(lambda p, s: in_order_packed(p, s, z1, y1), few), few, 1),
    "row by row, 16 lanes": (shared(row_by_row, 1), matrices, 1),
    "four rows, no prefetch": (shared(fours, 4), matrices, 1),
    "four rows: PackedMatrix": (over_all(lambda p, s: PackedMatrix(p, s).multiply(z1, y1, CORES)), matrices, 1),
    "four tokens: PackedMatrix": (over_all(lambda p, s: PackedMatrix(p, s).multiply(z4, y4, CORES)), matrices, 4),
}
seconds = median_seconds({"read": lambda: read_sum(large), **{name: run for name, (run, _, _) in cases.items()}})
bandwidth = large.nbytes / seconds.pop("read")
moved = {"numpy: decode, then @": steps_of_numpy}
packed_rates = {}
print(f"{'':30} ms an expert  G weights/s    bytes/weight   GB/s   (memory reads {bandwidth / 1e9:.1f} GB/s)")
for name, (_, count, tokens) in cases.items():
    packed_rates[name] = count * intermediate * latent * tokens / seconds[name]
    bytes_each = moved.get(name, 0.53125 / tokens)
    print(f"{name:30} {3e3 * seconds[name] / count:12.2f} {packed_rates[name] / 1e9:12.2f} {bytes_each:15.2f} "
          f"{packed_rates[name] * bytes_each / 1e9:6.1f}")

# %% tags=["nbval-ignore-output"]
fig, axes = plt.subplots(2, 1, figsize=(6.5, 5), sharex=True)
bars = (("bf16, 12288 × 7168", rates, 2), ("MXFP4, 48 × 3072 × 3584", packed_rates, 0.53125))
for ax, (title, found, bytes_each) in zip(axes, bars):
    ax.plot([r / 1e9 for r in found.values()], list(found), "o")
    ax.axvline(bandwidth / bytes_each / 1e9, ls="--", c="C1", label="memory, each weight read once")
    ax.set(xscale="log", title=title)
    ax.invert_yaxis()
    ax.legend(loc="lower left")
axes[1].set_xlabel("G weights × tokens a second")
plt.show()

# %% [markdown]
# The dashed line is the rate at which the plain sum reads memory. It was measured in this run, on this machine, and
# other programs may have run at the same time. `linear` can be faster than the line, because the plain sum has no
# prefetch instructions. "Four rows" and "four rows, no prefetch" differ in the prefetch instructions alone.
#
# Some variants were tried and brought no gain: two rows at a time instead of four, two rows by four tokens, eight rows,
# and a prefetch of the scale bytes.

# %% [markdown]
# ## Summary
#
# - An output is the product of one row and one token, in sixteen lanes and one order. So the cut of the rows, the
#   number of tokens and the number of threads do not change it.
# - One template makes all kernels. Its code generator loops over rows and tokens in Python. A format supplies three
#   methods: load a step, multiply and add a step, prefetch.
# - The promise of equal bits rests on operations that IEEE 754 defines, and on an order that the code fixes.
#
# ## Exercises
#
# Answers to 1 and 2: [exercises of part 1](../answers/01_mxfp4.ipynb).
#
# 1. Write `dot32` with 32 lanes (two accumulators). Show that its bits differ from `dot`, and that its error does not
#    grow.
# 2. Add a format to the template: int8 with one float32 scale for each group of 32. Which methods of `_Packed` change?
# 3. Delete the line of `_zeros` that aligns the stack, and compile for an AVX2 machine (`NUMBA_CPU_NAME=x86-64-v3` and
#    its features). How does the time for four tokens change?
#
# Next: [1.6](06_functions.ipynb) writes exp, tanh and the norm from operations with the same bits everywhere.
