# %% [markdown]
# # 1.2 MXFP4: four bits a weight
#
# Nearly all of Kimi K3 is routed experts, stored in blocks of 32 four-bit codes and one scale byte. At the end of this chapter you can
# decode a block on paper, multiply by a packed matrix without ever unpacking it in memory, and say which bits the answer has on any CPU.
#
# [1.1 Where every weight lies](01_checkpoint.ipynb) · [contents](../README.md) · [1.3 Rows, norms and the floating-point contract](03_linear.ipynb)

# %%
import statistics
import time
from pathlib import Path

import llvmlite.binding as llvm
import matplotlib.pyplot as plt
from safetensors.numpy import load_file

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% tags=["export"]
import math
import os
import time
from _thread import start_new_thread  # threading's waits for the thread, at locks that an interrupt may leave locked
from queue import SimpleQueue

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

# %% tags=["parameters"]
experts = 16  # held in memory for the timings: what one layer reads for one token, 281 MB
rounds = 5  # A B A B ... and the median
seed = 0

# %% [markdown]
# | symbol | meaning | in K3's `w1` | in code |
# |---|---|---|---|
# | $c$ | four-bit code of a weight: sign, two exponent bits, one mantissa bit (E2M1) | 0 to 15 | a nibble of `packed` |
# | $v_c$ | value of the code | 16 values, largest 6 | `E2M1[c]` |
# | $e$ | scale byte of 32 consecutive weights (E8M0: exponent only) | 0 to 254 | `scale` |
# | $w_i = 2^{e-127} v_{c_i}$ | weight | 3072 × 3584 | never stored |
# | $x$, $y = Wx$ | activations in and out, float32 | 3584, 3072 | `x`, `out` |
# | packed bytes | byte $j$ holds weight $2j$ in its **low** nibble, $2j+1$ in its high one | 3072 × 1792 | `packed` |
# | scales | one byte a group of 32 | 3072 × 112 | `scale` |
#
# The format is OCP Microscaling v1.0, "MXFP4". In the checkpoint a matrix is two tensors, `weight_packed` and `weight_scale`.

# %% [markdown]
# ## 1.2.1 By hand: one block
#
# A code is a tiny floating-point number. Exponent field 0 means no hidden one (a subnormal), as in IEEE formats; the exponent's bias is 1,
# and there is neither infinity nor NaN. Sixteen lines make the whole table.

# %%
def e2m1(code):
    "Value of a four-bit code, from its fields."
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
    return (-1) ** sign * magnitude


[e2m1(code) for code in range(16)]

# %% tags=["export"]
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SCALE = np.array([*np.ldexp(np.float32(1), np.arange(255) - 127), np.nan], np.float32)
GROUP = 32  # elements that share one scale byte

# %% [markdown]
# `SCALE` holds the meaning of every scale byte: $2^{e-127}$, and NaN for 255. Take sixteen bytes and one scale byte, 126, which stands for a half. The first byte is `0x2f`: its low nibble `f` is weight 0,
# its high nibble `2` is weight 1. A byte reads right to left.

# %%
assert E2M1.tolist() == [e2m1(code) for code in range(16)]
block = bytes.fromhex("2f 71 08 53") * 4
for j, byte in enumerate(block[:4]):
    low, high = byte & 15, byte >> 4
    print(f"byte {j} = {byte:02x}   w[{2 * j}] = {e2m1(low):4} / 2 = {e2m1(low) / 2:5}   w[{2 * j + 1}] = {e2m1(high):4} / 2 = {e2m1(high) / 2:5}")

# %% [markdown]
# ## 1.2.2 A block decodes to a scale times a table entry
#
# $$w_i = 2^{e-127}\, v_{c_i}$$
#
# The scale has no mantissa, so the multiplication only moves the exponent: it is exact as long as the result fits float32. The standard
# gives byte 255 to NaN.

# %% tags=["export"]
def decode(packed, scale):
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
# The fixture `fixtures/ops/mxfp4` was computed by another library in float64. Its table holds every code under every scale byte from 0 to
# 254. `decode` must give it **exactly**; the only difference allowed is the overflow of float32 itself.

# %%
fixture = {name: array.copy() for name, array in load_file(ROOT / "fixtures/ops/mxfp4.safetensors").items()}
with np.errstate(over="ignore"):
    table, exact = decode(fixture["table_packed"][:255], fixture["table_scale"][:255]), fixture["table_f64"].astype(np.float32)
assert np.array_equal(table, exact)
for byte in (0, 1, 2, 253, 254):
    print(f"scale {byte:3}: codes 1, 2, 7 ->", *(f"{v:.3g}" for v in table[byte, [1, 2, 7]]))
print("scale 255:", decode(fixture["table_packed"][255:], fixture["table_scale"][255:])[0, :3])

# %% [markdown]
# The ends of the range are where shortcuts break. $2^{-127}$ (byte 0) is subnormal in float32: 1 has no place in its exponent
# field for it. Bytes 253 and 254 overflow to infinity for large codes, as they should.
#
# The tempting shortcut puts the byte straight into the exponent field. Right for 1 to 254, wrong at both ends: a zero, and an
# infinity that looks like an overflow where a damaged file should be noticed.

# %%
def shifted(byte):
    "The scale byte as the exponent field of a float32: the shortcut."
    return (np.uint32(byte) << np.uint32(23)).view(np.float32)


wrong = [byte for byte in range(256) if not np.array_equal(shifted(byte), SCALE[byte], equal_nan=True)]
assert wrong == [0, 255]
for byte in (0, 1, 127, 254, 255):
    print(f"byte {byte:3}: right {SCALE[byte]:9.4g}   shifted {shifted(byte):9.4g}")

# %% [markdown]
# ## 1.2.3 The slow, certain product
#
# Decode, widen to float64, multiply, sum. Every faster form of this chapter must agree with it to the fixture's tolerance: 1e-5 of the
# largest output, more than ten times the distance between float32 and float64 arithmetic here.

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
print(f"{packed.shape[0]} rows of {x.size} weights: {packed.nbytes + scale.nbytes:,} bytes; relative difference below 1e-6:", distance(reference(packed, scale, x), y) < 1e-6)

# %% [markdown]
# ## 1.2.4 Four ways to read the same bytes wrongly
#
# Each of these runs without an error and yields numbers of the right size. Each must fail the gate.

# %%
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
for name, weight in traps.items():
    assert distance(weight @ x.astype(float), y) > 1000 * TOLERANCE, name
    print(f"{name:30} off by {distance(weight @ x.astype(float), y):.2g} of the largest output")

# %% [markdown]
# The first is the worst, because nothing else can find it. Two weights of one byte change places; they share a scale; so minimum, maximum,
# mean, deviation, histogram and the norm of every row stay what they were.

# %%
right, swapped = decode(packed, scale), traps["nibbles swapped"]
assert np.array_equal(np.sort(right, 1), np.sort(swapped, 1))
print("every row holds the same numbers:", np.array_equal(np.sort(right, 1), np.sort(swapped, 1)), "  correlation of the outputs:",
      f"{np.corrcoef(y, swapped @ x)[0, 1]:.2f}")
fig, (ax, ay) = plt.subplots(1, 2)
bins = np.linspace(-0.1, 0.1, 60)
ax.hist(right.ravel(), bins, label="right")
ax.hist(swapped.ravel(), bins, histtype="step", lw=1.4, label="nibbles swapped")
ax.set(xlabel="weight", ylabel="number of weights", yscale="log", ylim=(300, 3e5), title="Swapped nibbles keep the histogram")
ax.legend(loc="upper left")
ay.plot(y, reference(packed, scale, x), ".", label="right")
ay.plot(y, swapped @ x, ".", label="nibbles swapped")
ay.set(xlabel="output of the fixture", ylabel="computed output", title="and change every output")
ay.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## 1.2.5 What four bits can say
#
# Going the other way shows what the format costs. The standard's recipe takes the block's largest magnitude, sets $2^{e-127}$ so that it
# falls between 4 and 8, and rounds each weight to the nearest value. What lies above 6 is clipped to 6.

# %%
def quantise(w):
    "The nearest MXFP4 weights to float32 `w` [..., k]: (packed, scale)."
    blocks = w.reshape(*w.shape[:-1], -1, GROUP).astype(np.float64)
    exponent = np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2
    codes = np.abs(blocks[..., None] / 2.0**exponent[..., None] - (E2M1 + 0.0)).argmin(-1).reshape(w.shape).astype(np.uint8)
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
ay.set(xlabel="weight / scale", ylabel="relative error (%)", ylim=(0, 60), title="Worst below ½; above 6 it is clipped")
plt.show()

# %% [markdown]
# ## 1.2.6 Bytes, and the most that can be asked
#
# A decode step multiplies every weight it reads once. Nothing is used twice, so memory sets the pace: rate = bandwidth / bytes per weight.
# At 4.25 bits a weight needs 0.53 bytes; unpacked to float32 it would need 4.

# %%
intermediate, latent = 3072, 3584  # moe_intermediate_size, routed_expert_hidden_size
weights = 3 * intermediate * latent  # w1, w2, w3
expert_bytes = weights // 2 + weights // GROUP
assert expert_bytes == 17_547_264
print(f"one expert: {weights:,} weights, {expert_bytes:,} bytes, {8 * expert_bytes / weights} bits a weight")
print(f"all 92 x 896: {92 * 896 * expert_bytes:,} bytes; as float32 {92 * 896 * weights * 4 / 1e12:.1f} TB")
print(f"one token, 92 x 16: {92 * 16 * weights / 1e9:.1f} G weights, {92 * 16 * expert_bytes / 1e9:.2f} GB")

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
# ## 1.2.7 Two plain forms, and what is wrong with them
#
# NumPy's way builds the float32 matrix: per weight it reads half a byte, writes several temporaries and four bytes, and reads those again.
# A plain numba loop stays packed, but adds one product after the other.

# %%
@njit(parallel=True)
def plain(packed, scale, x, out):
    "out[0] = W x[0], one weight after the other."
    for r in prange(packed.shape[0]):
        total = np.float32(0)
        for j in range(packed.shape[1]):
            low, high = E2M1[packed[r, j] & 15], E2M1[packed[r, j] >> 4]
            total += (low * x[0, 2 * j] + high * x[0, 2 * j + 1]) * SCALE[scale[r, j // 16]]
        out[0, r] = total


check = np.empty((1, 64), np.float32)
plain(packed, scale, x[None], check)
assert distance(check[0], y) < TOLERANCE

# %% [markdown]
# The loop is slow because each addition waits for the one before. A compiler may not reorder a floating-point sum: that changes the
# rounding. With `fastmath` it may, and then sums 4, 8 or 16 partial totals, as wide as the CPU's registers. The bits would depend on
# who computes. Here is the same row summed with each width.

# %%
products = (decode(packed, scale)[0] * x).astype(np.float32)


def partial_sums(a, lanes):
    "Sum of float32 `a` [k] kept in `lanes` running totals, which are added last."
    total = np.zeros(lanes, np.float32)
    for part in a.reshape(-1, lanes):
        total += part
    while total.size > 1:
        total = total[:total.size // 2] + total[total.size // 2:]
    return total[0]


sums = {lanes: partial_sums(products, lanes) for lanes in (1, 4, 8, 16)}
assert len({s.tobytes() for s in sums.values()}) > 1
for lanes, s in sums.items():
    print(f"{lanes:2} lanes: {s.view(np.uint32):08x} = {s:.6f}")

# %% [markdown]
# K3 then rounds differently on every machine, and near a tie it *routes* differently. So we fix the number of lanes, sixteen, whatever the
# CPU has, and write the sum down once: a contract.
#
# ## 1.2.8 Make a vector a value
#
# Numba knows integers, floats, arrays. It can be taught a new kind of value: **sixteen float32 lanes**. Its type is `F32x16`; LLVM, the
# compiler below numba, has had such a value all along: `<16 x float>`.

# %% tags=["export"]
KERNEL = dict(cache=True, nogil=True, error_model="numpy")  # nogil: readers go on while a kernel runs
INNER = dict(KERNEL, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False)  # called by kernels only; own no array, count no references

_F32, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)


def _vector(scalar):
    return ir.VectorType(scalar, 16)


def _splat(vector, value):
    return ir.Constant(vector, [value] * vector.count)


class F32x16(types.Type):
    "Numba's type of a value of sixteen float32 lanes."

    def __init__(self):
        super().__init__(name="F32x16")


f32x16 = F32x16()


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _vector(_F32))


# %% [markdown]
# Numba counts the users of an array as Python does: a function that is handed one adds one to a counter and takes it off again, atomically.
# For a matrix taken four rows at a time that can be six atomic steps every microsecond, on counters that all threads share. The caller holds
# its arrays anyway, so what is called by kernels only (`INNER`) counts nothing: `_nrt=False`.
#
# Numba's cache on disk looks at one function's text only. In a notebook, where you will edit a function that others inline, that would run
# old code: here nothing is cached.

# %%
KERNEL["cache"] = INNER["cache"] = False

# %% [markdown]
# What can be done with such a value is a handful of *intrinsics*: a Python function that, instead of computing, emits LLVM's instruction.
# First the way in and out: load sixteen neighbours, or fewer at a row's end. bf16 numbers, the next chapter's, are widened on the way.

# %% tags=["export"]
def _pointer(context, builder, array_type, array, index, pointee):
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), pointee.as_pointer())


def _to_float(builder, v, dtype):
    "Sixteen loaded elements as float32: bf16 bits are the upper half of a float32, so widening is a shift."
    if dtype == types.float32:
        return v
    wide = builder.shl(builder.zext(v, _vector(_I32)), _splat(_vector(_I32), 16))
    return builder.bitcast(wide, _vector(_F32))


def _element(array_type):
    if array_type.dtype == types.float32:
        return _F32, 4
    if array_type.dtype == types.uint16:
        return _I16, 2
    raise TypeError(f"lanes are loaded from float32 or uint16 (bf16 bits), not {array_type.dtype}")


def _intrinsic(builder, name, result, *args):
    "Call of an LLVM intrinsic."
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _in_all_lanes(builder, x):
    undefined = ir.Constant(_vector(x.type), ir.Undefined)
    v = builder.insert_element(undefined, x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(v, undefined, _splat(_vector(_I32), 0))


@intrinsic
def zeros16(typingctx):
    "() -> sixteen zeros."
    return f32x16(), lambda context, builder, sig, args: _splat(_vector(_F32), 0.0)


@intrinsic
def load16(typingctx, a, i):
    "(a, i) -> a[i:i+16] of a flat float32 array, or of uint16 bf16 bits widened."
    def codegen(context, builder, sig, args):
        element, align = _element(sig.args[0])
        p = _pointer(context, builder, sig.args[0], args[0], args[1], _vector(element))
        return _to_float(builder, builder.load(p, align=align), sig.args[0].dtype)
    return f32x16(a, types.intp), codegen


@intrinsic
def load16_part(typingctx, a, i, n):
    "(a, i, n) -> a[i:i+n] and 16-n zeros, 0 < n <= 16. Nothing past a[i+n-1] is touched."
    def codegen(context, builder, sig, args):
        element, align = _element(sig.args[0])
        vector, lanes = _vector(element), _vector(args[2].type)
        p = _pointer(context, builder, sig.args[0], args[0], args[1], vector)
        inside = builder.icmp_signed("<", ir.Constant(lanes, list(range(16))), _in_all_lanes(builder, args[2]))
        name = f"llvm.masked.load.v16{'f32' if element == _F32 else 'i16'}.p0"
        v = _intrinsic(builder, name, vector, p, ir.Constant(_I32, align), inside, ir.Constant(vector, None))
        return _to_float(builder, v, sig.args[0].dtype)
    return f32x16(a, types.intp, types.intp), codegen


@intrinsic
def store16(typingctx, a, i, v):
    "(a, i, v): a[i:i+16] = v, a flat float32 array."
    def codegen(context, builder, sig, args):
        p = _pointer(context, builder, sig.args[0], args[0], args[1], _vector(_F32))
        builder.store(args[2], p, align=4)
        return context.get_dummy_value()
    return types.void(a, types.intp, f32x16), codegen


# %% [markdown]
# Then arithmetic. `fma16` rounds once, after the addition. `sum16` is the one reduction tree of the book: the upper eight lanes
# onto the lower eight, then four, two, one.

# %% tags=["export"]
@intrinsic
def fma16(typingctx, a, b, c):
    "(a, b, c) -> a*b + c in each lane, rounded once."
    def codegen(context, builder, sig, args):
        return _intrinsic(builder, "llvm.fma.v16f32", _vector(_F32), *args)
    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def mul16(typingctx, a, b):
    "(a, b) -> a*b in each lane."
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fmul(*args)


@intrinsic
def splat16(typingctx, x):
    "(x) -> x in all sixteen lanes."
    return f32x16(types.float32), lambda context, builder, sig, args: _in_all_lanes(builder, *args)


@intrinsic
def sum16(typingctx, v):
    "(v) -> the sum of the lanes, by halves: 16 -> 8 -> 4 -> 2 -> 1. The one reduction tree of the book."
    def codegen(context, builder, sig, args):
        x, n = args[0], 8
        while n:
            lanes = [ir.Constant(ir.VectorType(_I32, n), list(range(k, k + n))) for k in (0, n)]
            x = builder.fadd(*[builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), m) for m in lanes])
            n //= 2
        return builder.extract_element(x, ir.Constant(_I32, 0))
    return types.float32(f32x16), codegen


@intrinsic
def fma(typingctx, a, b, c):
    "(a, b, c) -> a*b + c for float32 scalars, rounded once."
    return types.float32(types.float32, types.float32, types.float32), lambda context, builder, sig, args: _intrinsic(
        builder, "llvm.fma.f32", _F32, *args)


# %% [markdown]
# A kernel now reads like its equation. Lane $l$ takes elements $l$, $l+16$, … in order; no compiler may move them, because nothing here
# permits it.

# %%
@njit
def dot16(a, b):
    acc = zeros16()
    for i in range(0, a.size, 16):
        acc = fma16(load16(a, i), load16(b, i), acc)
    return sum16(acc)


ones = np.ones(32, np.float32)
assert dot16(np.arange(32, dtype=np.float32), ones) == 31 * 32 / 2
dot16(np.arange(32, dtype=np.float32), ones)

# %% [markdown]
# The same sixteen lanes go to any machine. LLVM is a cross-compiler, so one CPU can show what others would run for one `fma16`: one
# instruction of 16 lanes, two of 8, four of 4, or, where there is no fused multiply-add, sixteen calls of the C library's `fmaf`.

# %% tags=["nbval-ignore-output"]
IR = """define void @f(ptr %a, ptr %b, ptr %c) {
  %x = load <16 x float>, ptr %a
  %y = load <16 x float>, ptr %b
  %z = load <16 x float>, ptr %c
  %r = call <16 x float> @llvm.fma.v16f32(<16 x float> %x, <16 x float> %y, <16 x float> %z)
  store <16 x float> %r, ptr %c
  ret void
}
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)"""
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
for label, triple, features in [("AVX-512", "x86_64", "+avx512f"), ("AVX2", "x86_64", "+avx2,+fma"), ("NEON", "aarch64", ""), ("baseline x86-64", "x86_64", "")]:
    try:
        machine = llvm.Target.from_triple(triple + "-unknown-linux-gnu").create_target_machine(features=features)
        lines = [" ".join(line.split()) for line in machine.emit_assembly(llvm.parse_assembly(IR)).splitlines()]
        found = [line for line in lines if any(name in line for name in ("fmadd", "fmla", "call"))]
        print(f"{label:16} {len(found):2} x   {found[0]}")
    except RuntimeError as error:
        print(f"{label:16} not in this build of LLVM: {error}")

# %% [markdown]
# ## 1.2.9 Sixteen codes become sixteen floats
#
# Doubled, the sixteen values are whole numbers: 0 1 2 3 4 6 8 12 and their negatives. The scale is halved in return, which is safe for
# every byte only if the halves come from a table: $2^{0-128}$ is subnormal, and byte 255 is still NaN.

# %% tags=["export"]
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
HALF_SCALE = SCALE / 2

# %% [markdown]
# Halving by taking one off the exponent field fails for three bytes. Byte 0 wraps around to minus infinity, so a *hole* in a file (scale 0,
# codes 0) turns from zeros into NaN; byte 1 becomes 0; and 255, which should raise an alarm, becomes an ordinary number.

# %%
assert np.array_equal(2 * E2M1, np.array(TWICE_E2M1, np.float32))
lowered = ((np.arange(256, dtype=np.uint32) - 1) << 23).view(np.float32)
print("bytes with a wrong half scale:", np.flatnonzero(~((lowered == HALF_SCALE) | np.isnan(HALF_SCALE) & np.isnan(lowered))).tolist())
with np.errstate(invalid="ignore"):
    print("a hole: right", np.float32(0) * HALF_SCALE[0], " lowered exponent", np.float32(0) * lowered[0])

# %% [markdown]
# A look-up per weight would cost sixteen loads. Three ways to do sixteen at once, from the plainest to the fastest; all give small
# integers or the same floats, so no bit depends on which is used:
#
# 1. arithmetic: from code 2 on, the doubled value is $(2+m) \ll (\mathrm{exponent}-1)$; works anywhere;
# 2. a byte shuffle, found in x86 since 2006 and on every 64-bit Arm: the table is one 16-byte register, the codes are the indices;
# 3. a float permutation (AVX-512): the table is one register of sixteen floats. It looks at the lowest four bits of an index only, so
#    the low nibble needs no mask, and nothing is left to convert.

# %% tags=["export"]
def _codes(builder, b, high):
    return builder.lshr(b, _splat(b.type, 4)) if high else builder.and_(b, _splat(b.type, 15))


def _by_arithmetic(context, builder, b, high):
    c = builder.zext(_codes(builder, b, high), _vector(_I32))
    zero, one, two, seven = (_splat(c.type, n) for n in (0, 1, 2, 7))
    t = builder.and_(c, seven)
    exponent = builder.lshr(t, one)
    shift = builder.select(builder.icmp_signed(">", exponent, zero), builder.sub(exponent, one), exponent)
    big = builder.shl(builder.or_(builder.and_(t, one), two), shift)
    m = builder.select(builder.icmp_signed("<", t, two), t, big)
    return builder.sitofp(builder.select(builder.icmp_signed(">", c, seven), builder.sub(zero, m), m), _vector(_F32))


def _by_bytes(context, builder, b, high):
    name = "llvm.x86.ssse3.pshuf.b.128" if _target(context)[0] == "x86_64" else "llvm.aarch64.neon.tbl1.v16i8"
    twice = _intrinsic(builder, name, b.type, ir.Constant(b.type, list(TWICE_E2M1)), _codes(builder, b, high))
    return builder.sitofp(builder.sext(twice, _vector(_I32)), _vector(_F32))


def _by_floats(context, builder, b, high):
    c, table = builder.zext(b, _vector(_I32)), ir.Constant(_vector(_F32), [float(v) for v in TWICE_E2M1])
    c = builder.lshr(c, _splat(c.type, 4)) if high else c
    return _intrinsic(builder, "llvm.x86.avx512.permvar.sf.512", table.type, table, c)


# %% [markdown]
# An instruction the target lacks makes LLVM abort the whole process, so the choice asks what code is being **made for**. That is not
# always the machine it is made on: `NUMBA_CPU_NAME=generic` makes code for the oldest x86-64.

# %% tags=["export"]
def _target(context):
    "What code is made for: (instruction set, list of features)."
    triple, _, features = context.codegen().magic_tuple()
    return triple.split("-")[0].replace("arm64", "aarch64"), features.split(",")


def _ways(context):
    "The look-ups this target can do, best first."
    arch, features = _target(context)
    if "+avx512f" in features:
        yield _by_floats
    if "+ssse3" in features or arch == "aarch64":
        yield _by_bytes
    yield _by_arithmetic


def _nibbles(high, ways=_ways):
    "Code generator: sixteen bytes -> twice the values of their low or high nibbles."
    def codegen(context, builder, sig, args):
        b = builder.load(_pointer(context, builder, sig.args[0], args[0], args[1], _vector(_I8)), align=1)
        return next(iter(ways(context)))(context, builder, b, high)
    return codegen


@intrinsic
def low16(typingctx, packed, i):
    "(packed, i) -> twice the values of the low nibbles of packed[i:i+16], flat uint8."
    return f32x16(packed, types.intp), _nibbles(high=False)


@intrinsic
def high16(typingctx, packed, i):
    "(packed, i) -> twice the values of the high nibbles of packed[i:i+16], flat uint8."
    return f32x16(packed, types.intp), _nibbles(high=True)


# %% [markdown]
# The same question decides how the next chapter's bf16 is widened. Zero-extending sixteen words and shifting them up are two vector
# instructions. A permutation of words that leaves zeros where its mask is off (AVX-512BW) is one, and takes 32 words from one load. LLVM knows
# that too, and would "improve" it: permuting with zeros as the second table, three instructions. A line of assembly that does nothing keeps
# from it that the mask is a constant.

# %% tags=["export"]
def _widened(context, builder, v):
    "Thirty-two bf16 words as two vectors of sixteen float32."
    by_permutation = "+avx512bw" in _target(context)[1]
    if by_permutation:
        upper = builder.asm(ir.FunctionType(_I32, [_I32]), "", "=r,0", [ir.Constant(_I32, 0xaaaaaaaa)], side_effect=False)
        upper.attributes.add("readnone")  # once, outside the loop
        upper = builder.bitcast(upper, ir.VectorType(ir.IntType(1), 32))
    for first in (0, 16):
        if by_permutation:
            words = _intrinsic(builder, "llvm.x86.avx512.permvar.hi.512", v.type, v, ir.Constant(v.type, [first + i // 2 for i in range(32)]))
            yield builder.bitcast(builder.select(upper, words, ir.Constant(v.type, None)), _vector(_F32))
        else:
            yield _to_float(builder, _half(builder, v, first), types.uint16)


def _half(builder, v, first):
    return builder.shuffle_vector(v, v, ir.Constant(_vector(_I32), list(range(first, first + 16))))


@intrinsic
def load32(typingctx, a, i):
    "(a, i) -> (a[i:i+16], a[i+16:i+32]), each as load16 has it."
    def codegen(context, builder, sig, args):
        element, align = _element(sig.args[0])
        v = builder.load(_pointer(context, builder, sig.args[0], args[0], args[1], ir.VectorType(element, 32)), align=align)
        parts = _widened(context, builder, v) if element == _I16 else [_half(builder, v, first) for first in (0, 16)]
        return context.make_tuple(builder, sig.return_type, list(parts))
    return types.UniTuple(f32x16, 2)(a, types.intp), codegen


# %%
@njit
def both(a):
    values = np.empty(32, np.float32)
    low, high = load32(a, 1)
    store16(values, 0, low)
    store16(values, 16, high)
    return values


words = np.arange(33, dtype=np.uint16) * 1927 + 5
assert both(words).tobytes() == (words[1:].astype(np.uint32) << 16).tobytes() and both(words.astype(np.float32)).tolist() == words[1:].tolist()

# %%
@njit
def nibbles(packed):
    values = np.empty(32, np.float32)
    store16(values, 0, low16(packed, 0))
    store16(values, 16, high16(packed, 0))
    return values


every = np.arange(256, dtype=np.uint8)
for start in range(0, 256, 16):
    part = every[start:start + 16].copy()
    assert np.array_equal(nibbles(part), 2 * np.concatenate([E2M1[part & 15], E2M1[part >> 4]]))
nibbles(every[:16].copy())[:16]

# %% [markdown]
# ## 1.2.10 The kernel
#
# A byte's nibbles are neighbours, $2j$ and $2j+1$. Rather than weave codes together, split the *activations* once: the sixteen low
# nibbles of a group meet the even $x$, the sixteen high nibbles the odd. A group of one row then is three roundings a lane:
#
# $$a_l \leftarrow \mathrm{fma}\bigl(\mathrm{fma}(h_l, x_{2l+1}, \mathrm{mul}(g_l, x_{2l})),\; 2^{e-128},\; a_l\bigr), \qquad g = 2 v_{\text{low}},\; h = 2 v_{\text{high}}$$

#
# Two details of the unpacking are worth a line. An index of Python may be negative, and numba asks: four
# instructions for each scale byte, so the look-up is an intrinsic too. And the high nibbles come first: their shift is the last to
# need the bytes untouched, so the permutation of the low ones may overwrite them, and no register has to be cleared for its result.

# %% tags=["export"]
@intrinsic
def look_up16(typingctx, table, codes, i):
    "(table, codes, i) -> table[codes[i]] in all sixteen lanes, for flat arrays float32 [256] and uint8."
    def codegen(context, builder, sig, args):
        code = builder.load(_pointer(context, builder, sig.args[1], args[1], args[2], _I8))
        value = builder.load(_pointer(context, builder, sig.args[0], args[0], builder.zext(code, args[2].type), _F32))
        return _in_all_lanes(builder, value)
    return f32x16(table, codes, types.intp), codegen


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
@intrinsic
def prefetch(typingctx, a, i):
    "(a, i): ask for the cache line of a[i], a flat array. Nothing is read, so i may lie behind the end."
    def codegen(context, builder, sig, args):
        line = _pointer(context, builder, sig.args[0], args[0], args[1], _I8)
        _intrinsic(builder, "llvm.prefetch", ir.VoidType(), line, *(ir.Constant(_I32, n) for n in (0, 3, 1)))  # to read, keep, data
        return context.get_dummy_value()
    return types.void(a, types.intp), codegen


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
def _rows4(p, s, r, x, t, groups, out, first):
    a = zeros4()
    for q in range(groups):
        prefetch(p, 16 * (r + 4) * groups + 64 * q)
        a = _group4(_unpack4(p, s, r * groups + q, groups), x, 32 * (t * groups + q), a)
    put4(out, t, first + r, a)


@njit(**INNER)
def _rows4_tokens2(p, s, r, x, t, groups, out, first):
    a = b = zeros4()
    for q in range(groups):
        prefetch(p, 16 * (r + 4) * groups + 64 * q)
        w, j = _unpack4(p, s, r * groups + q, groups), 32 * (t * groups + q)
        a = _group4(w, x, j, a)
        b = _group4(w, x, j + 32 * groups, b)
    put4(out, t, first + r, a)
    put4(out, t + 1, first + r, b)


@njit(**INNER)
def _rows4_tokens4(p, s, r, x, t, groups, out, first):
    a = b = c = d = zeros4()
    for q in range(groups):
        prefetch(p, 16 * (r + 4) * groups + 64 * q)
        w, j = _unpack4(p, s, r * groups + q, groups), 32 * (t * groups + q)
        a = _group4(w, x, j, a)
        b = _group4(w, x, j + 32 * groups, b)
        c = _group4(w, x, j + 64 * groups, c)
        d = _group4(w, x, j + 96 * groups, d)
    put4(out, t, first + r, a)
    put4(out, t + 1, first + r, b)
    put4(out, t + 2, first + r, c)
    put4(out, t + 3, first + r, d)


# %% [markdown]
# The driver cuts the matrix into tiles of sixteen rows, 30 KB here, which the nearest cache holds, and walks all tokens over a tile before the
# next one. Tiles are independent, so threads may take them in any way. They draw runs of them from one counter: whoever is done takes the
# next, and all end within a run of each other. The addition is atomic, so no tile is drawn twice. A run is several tiles, because at its end
# memory has been asked for rows that another thread will take.

# %% tags=["export"]
CORES = numba.config.NUMBA_NUM_THREADS
NO_MORE = 1 << 62  # a counter set to this gives nothing more to do
RUNS = 8  # that a thread draws of its share: few enough to lose little where one ends, enough to end together
_NEXT, _DONE, _STEP, _AT_WORK = range(4)  # the counters of spread(): int64, as is the one that chapter 5 draws from


@intrinsic
def _add(typingctx, counters, i, n):
    "(int64 [], int64, int64): counters[i] += n, whoever else does so at this moment; returns what it was. What was stored before is seen after."
    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _pointer(context, builder, sig.args[0], args[0], args[1], ir.IntType(64)), args[2], "acq_rel")
    return types.int64(counters, types.int64, types.int64), codegen


@njit(**KERNEL)
def draw(counter):
    "The next number, from 0, of a `counter` int64 [1] that several threads share."
    return _add(counter, _NEXT, 1)


@njit(**INNER)
def draw_run(drawn, n):
    "(begin, end) of the next run of range(n) for whoever draws; begin >= n if there is none. `drawn` is what spread() gives a kernel."
    begin = _add(drawn, _NEXT, drawn[_STEP])
    return begin, min(begin + drawn[_STEP], n)


@njit(**INNER)
def finish(drawn, begin, end):
    "Count that a run that was drawn is done."
    _add(drawn, _DONE, end - begin)


@njit(**KERNEL)
def _finished(drawn, n):
    "Whether all n are done, now or within some microseconds."
    for _ in range(1000):
        if _add(drawn, _DONE, 0) >= n:
            return True
    return False


@njit(**KERNEL)
def _count(drawn, i, n):
    return _add(drawn, i, n)


# %% [markdown]
# Who are they? The caller, and threads that wait at a queue: a kernel gives up the interpreter's lock while it runs. numba's `prange` would write
# this for us. But it takes the loop apart and compiles it once more, which is dear where a dozen kernels have to be ready for a first token, some
# of its layers of threads may not be called by two threads at once, and others spin while they wait, on cores that chapter 5 needs for reading.
# Python's own pool of threads hands over through locks that an interrupt at the wrong moment leaves locked; a `SimpleQueue` does it in one call.
#
# To wake a thread takes longer than a small product, so small work stays with the caller. And the caller, when nothing is left to draw, does not
# wait for the others to say that they have ended, which would cost more turns of the interpreter's lock: what counts is that every run is done.
# A helper that comes late finds nothing to draw. The first lines of 1.2.12 measure the prices.
#
# Ctrl-C ends this in order: nothing more can be drawn, and the caller leaves when no helper is at work on its arrays. It may come anywhere, so
# what must be taken back is inside the `try`.

# %% tags=["export"]
WORTH = 1 << 21  # multiply-adds: with fewer the caller alone is done before a second thread could help


def _have_helpers():
    global _tasks, _helpers
    _tasks, _helpers = SimpleQueue(), []


_have_helpers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_have_helpers)  # a child has none of its parent's threads


def _help(tasks):
    "A helper's life."
    while True:
        kernel, args, drawn, failed = tasks.get()
        _count(drawn, _AT_WORK, 1)
        try:
            kernel(*args, drawn)
        except BaseException as error:  # whatever it is, the caller must hear of it
            failed.append(error)
        finally:
            _count(drawn, _AT_WORK, -1)
        del kernel, args, drawn, failed  # or an idle helper would keep the arrays


def threads_for(work):
    "How many threads `work` multiply-adds are worth: numba's number, or one."
    return numba.get_num_threads() if work >= WORTH else 1


def spread(threads, n, kernel, *args):
    """kernel(n, *args, drawn) on `threads` threads at once, this one among them. Each does the run of range(n) that draw_run(drawn, n) gives it,
    says so by finish(drawn, begin, end), and draws again until there is none.

    Returns when all is done, or, if this thread is interrupted or any fails, when no other is at work any more. Raises what was raised.
    """
    drawn, failed = np.array([0, 0, n if threads == 1 else -(-n // (RUNS * threads)), 0], np.int64), []
    if threads == 1:
        return kernel(n, *args, drawn)
    kernel(0, *args, np.zeros_like(drawn))  # is compiled here, where Ctrl-C is heard, and not in a helper that would be waited for
    while len(_helpers) < min(threads, CORES) - 1:
        _helpers.append(start_new_thread(_help, (_tasks,)))
    try:
        for _ in range(threads - 1):
            _tasks.put((kernel, (n, *args), drawn, failed))
        kernel(n, *args, drawn)
        while not _finished(drawn, n) and not failed:
            time.sleep(0)  # for the rest of a run: a turn for whoever needs this core
    finally:
        if not _finished(drawn, n):
            _count(drawn, _NEXT, NO_MORE)
            while _count(drawn, _AT_WORK, 0):
                time.sleep(0)
    if failed:
        raise failed[0]


# %% tags=["export"]
TILE = 16  # rows


@njit(**INNER)
def _tile(packed, scale, halves, out, first, tile):
    "All tokens times one tile of the rows of a block; row 0 of the block is row `first` of the matrix."
    n, groups = scale.shape
    tokens = out.shape[0]
    p, s, x = packed.reshape(-1), scale.reshape(-1), halves.reshape(-1)
    last = min(TILE * tile + TILE, n)
    t = 0
    while t < tokens:
        step = 4 if tokens - t >= 4 else 2 if tokens - t >= 2 else 1
        r = TILE * tile
        while r + 4 <= last:
            if step == 4:
                _rows4_tokens4(p, s, r, x, t, groups, out, first)
            elif step == 2:
                _rows4_tokens2(p, s, r, x, t, groups, out, first)
            else:
                _rows4(p, s, r, x, t, groups, out, first)
            r += 4
        while r < last:
            for m in range(t, t + step):
                _row1(p, s, r, x, m, groups, out, first)
            r += 1
        t += step


@njit(**KERNEL)
def _matmul(tiles, packed, scale, halves, out, drawn):
    while True:
        begin, end = draw_run(drawn, tiles)
        if begin >= tiles:
            return
        for tile in range(begin, end):
            _tile(packed, scale, halves, out, 0, tile)
        finish(drawn, begin, end)


@njit(**KERNEL)
def mxfp4_rows(packed, scale, halves, out, first):
    """out[:, first:first+m] for the m rows `packed` uint8 [m, k/2], `scale` uint8 [m, k/32], on the calling thread alone: for rows that
    this thread has just read (chapter 5.4). `halves` is what halved(x) made of x."""
    for tile in range((scale.shape[0] + TILE - 1) // TILE):
        _tile(packed, scale, halves, out, first, tile)


# %% [markdown]
# One thing that no equation shows: where $x$ begins. Caches hand out lines of 64 bytes, sixteen floats. NumPy's arrays begin anywhere on a
# multiple of 16, so most loads of sixteen floats would straddle two lines. The split into halves copies $x$ anyway; 1.3 measures what this is
# worth.

# %% tags=["export"]
def aligned(shape):
    "float32 zeros that begin on a cache line, so that no load of sixteen floats straddles two."
    size = math.prod(shape)
    raw = np.zeros(size + 16, np.float32)
    start = -raw.__array_interface__["data"][0] % 64 // 4
    return raw[start:start + size].reshape(shape)


def halved(x):
    "`x` float32 [T, k] as the kernels take it: float32 [T, k/32, 2, 16], the even elements of each group, then the odd ones."
    halves = aligned((x.shape[0], x.shape[1] // GROUP, 2, 16))
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
    spread(threads_for(x.size * len(packed)), -(-len(packed) // TILE), _matmul, packed, scale, halved(x), out)
    return out


# %%
fast = mxfp4_matmul(packed, scale, x[None], np.empty((1, 64), np.float32))
assert distance(fast[0], y) < TOLERANCE
backwards = mxfp4_matmul(packed << 4 | packed >> 4, scale, x[None], np.empty((1, 64), np.float32))
assert distance(backwards[0], y) > 1000 * TOLERANCE
print("relative difference below 1e-6:", distance(fast[0], y) < 1e-6, "  nibbles swapped:", f"{distance(backwards[0], y):.2g}")

# %% [markdown]
# ## 1.2.11 Which bits, exactly
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
# ## 1.2.12 The ladder
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
            begin, end = draw_run(drawn, rows)
            if begin >= rows:
                return
            for r in range(begin, end):
                acc = zeros16()
                for q in range(groups):
                    g = r * groups + q
                    weights = low(p, 16 * g), high(p, 16 * g), splat16(HALF_SCALE[s[g]])
                    acc = _group(weights, load16(x, 32 * q), load16(x, 32 * q + 16), acc)
                out[0, r] = sum16(acc)
            finish(drawn, begin, end)
    return lambda packed, *args: spread(numba.get_num_threads(), len(packed), kernel, packed, *args)


@njit(nogil=True)
def fours(n, packed, scale, halves, out, drawn):
    "n times four rows for one token, without prefetch."
    p, s, x, groups = packed.reshape(-1), scale.reshape(-1), halves.reshape(-1), scale.shape[1]
    while True:
        begin, end = draw_run(drawn, n)
        if begin >= n:
            return
        for r in range(begin, end):
            a = zeros4()
            for q in range(groups):
                a = _group4(_unpack4(p, s, 4 * r * groups + q, groups), x, 32 * q, a)
            put4(out, 0, 4 * r, a)
        finish(drawn, begin, end)


def four_rows(packed, *args):
    spread(numba.get_num_threads(), len(packed) // 4, fours, packed, *args)


# %% [markdown]
# Before the rungs, the two prices of 1.2.10: compiling the driver either way, its `_tile` being there, and calling a second thread.

# %% tags=["nbval-ignore-output"]
@njit(parallel=True, nogil=True)
def with_prange(tiles, packed, scale, halves, out):
    for tile in prange(tiles):
        _tile(packed, scale, halves, out, 0, tile)


@njit(nogil=True)
def busy(n, sums, drawn):
    "n times a microsecond or so."
    while True:
        begin, end = draw_run(drawn, n)
        if begin >= n:
            return
        for part in range(begin, end):
            for i in range(1000):
                sums[part] *= 0.5
        finish(drawn, begin, end)


def first_call(kernel, *args):
    began = time.perf_counter()
    kernel(4, packed, scale, halved(x[None]), check, *args)
    return time.perf_counter() - began


print(f"first call: prange {first_call(with_prange):.2f} s, drawing {first_call(njit(nogil=True)(_matmul.py_func), np.array([0, 0, 4, 0])):.2f} s")
sums, parts = np.ones(400), (4, 40, 400)
called = median_seconds({(n, threads): lambda n=n, threads=threads: [spread(threads, n, busy, sums) for _ in range(50)] for n in parts for threads in (1, 2)})
for n in parts:
    print(f"{n:3} parts: {called[n, 1] / 50 * 1e6:6.0f} µs on one thread, {called[n, 2] / 50 * 1e6:6.0f} µs on two")

# %% tags=["nbval-ignore-output"]
from numba.core.registry import cpu_target

names = {_by_arithmetic: "one row, arithmetic", _by_bytes: "one row, byte shuffle", _by_floats: "one row, float permutation"}
kernels = {names[way]: row_kernel(way) for way in reversed(list(_ways(cpu_target.target_context)))} | {"four rows": four_rows}
halves = aligned((1, 112, 2, 16))
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
# asking for scale bytes ahead too. With everything in the cache and two threads that share a core's execution units, as chapter 5.4 has it, it is
# instructions that count: three for a pair of products in each lane, four to unpack it.

# %% [markdown]
# ## Summary
#
# - A weight is $2^{e-127}$ times one of sixteen values; low nibble first; 4.25 bits. Swapped nibbles pass every check but a product.
# - A vector of sixteen lanes is a value of the language here. That fixes the order of every sum, and the same IR runs everywhere.
# - A decode step is a stream of bytes: multiply packed, and the memory's speed is the speed of the experts.
#
# ## Exercises
#
# 1. Write `encode(w)` that returns the packed bytes of weights that *are* on the grid, and show `decode(encode(w))` keeps every bit,
#    minus zero included. (`quantise` above loses it. Where?)
# 2. `_by_arithmetic` uses two selects. Build the float directly from code bits, `0x3f000000 + (t << 22)` for $t \ge 2$; which codes need
#    care, and does it win on your CPU?
# 3. Give K3 groups of 16 instead of 32 weights a scale. How many bits a weight, how many bytes an expert, and which line of the kernel changes?
#
# Next: [1.3](03_linear.ipynb) does the same for bf16 rows, writes exp, tanh and the norm, and states the contract in full.
