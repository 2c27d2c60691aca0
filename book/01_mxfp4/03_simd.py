# %% [markdown]
# # 1.3 Sixteen lanes as one value
#
# A sum of floating-point numbers has different bits in a different order. At the end of this chapter you can add in an
# order that is written down, in a way that every CPU runs fast: sixteen float32 numbers become one value inside a
# kernel.
#
# Needs chapter [1.2] (kernels; the first section is enough). Runs in ten seconds. Makes `k3lib.simd`.
#
# [1.2 Kernels: compiled once, never stale](02_kernel_cache.ipynb) ·
# [contents](../README.md) ·
# [1.4 Threads that share a kernel's work](04_parallel.ipynb)
#
# [1.2]: 02_kernel_cache.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "kernels")

# %%
import llvmlite.binding as llvm
from numba import njit

from k3lib.mxfp4 import E2M1

# %% tags=["export"]
from collections.abc import Callable, Iterator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.errors import TypingError
from numba.extending import intrinsic, models, register_model

from k3lib.mxfp4 import SCALE

# %% tags=["parameters"]
seed = 1

# %% [markdown]
# ## 1.3.1 The width of a register must not decide
#
# A plain loop adds one product after the other, and each addition waits for the one before. A compiler may not
# reorder a floating-point sum, because that changes the rounding. With `fastmath` it may. It then keeps 4, 8 or 16
# partial totals, as many as a register of the CPU holds, and the bits depend on the machine. Here is the same sum
# with each width.

# %%
rng = np.random.default_rng(seed)
terms = (rng.standard_normal(3584) * rng.standard_normal(3584)).astype(np.float32)


def partial_sums(a, lanes):
    "Sum of float32 `a` [k] kept in `lanes` running totals, which are added last."
    total = np.zeros(lanes, np.float32)
    for part in a.reshape(-1, lanes):
        total += part
    while total.size > 1:
        total = total[:total.size // 2] + total[total.size // 2:]
    return total[0]


sums = {lanes: partial_sums(terms, lanes) for lanes in (1, 4, 8, 16)}
assert len({s.tobytes() for s in sums.values()}) == 4
for lanes, s in sums.items():
    print(f"{lanes:2} lanes: {s.view(np.uint32):08x} = {s:.6f}")

# %% [markdown]
# K3 would then round differently on every machine, and near a tie it would *route* differently. So the number of
# lanes is fixed at sixteen, whatever the CPU has, and the order of the sum is written down once.
#
# ## 1.3.2 Make a vector a value
#
# Numba compiles Python functions to machine code. It hands them to LLVM, a compiler that has its own language: the
# *IR* (intermediate representation), typed instructions on values. Numba knows integers, floats and arrays. It can be
# taught a new kind of value.
#
# Two things are needed. A `types.Type` is the name under which numba tracks the value through a function. A *data
# model*, bound to it by `register_model`, says what the value is in LLVM. LLVM has had sixteen float32 lanes all
# along: `<16 x float>`.

# %% tags=["export"]
LANES = 16

_F32, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_VECTOR = ir.VectorType(_F32, LANES)


class F32x16(types.Type):
    "Numba's type of a value of sixteen float32 lanes."

    def __init__(self) -> None:
        super().__init__(name="F32x16")


f32x16 = F32x16()


@register_model(F32x16)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _VECTOR)


# %% [markdown]
# ## 1.3.3 Functions that write instructions
#
# Kernels use such a value through a handful of *intrinsics*. An intrinsic is a Python function that runs while a kernel
# is compiled. It computes nothing; it writes LLVM instructions into the kernel, by calls of a `builder`.
# `builder.fmul(a, b)` writes one multiplication and returns the name of its result. A Python `for` loop around that
# call writes one instruction in each iteration, and the kernel contains no loop. Chapter [1.5] is built on this.
#
# The functions that write instructions come first; most of their names begin with `emit_`. Three of LLVM's instructions
# need an explanation:
#
# - `gep` (get element pointer) is arithmetic on addresses: pointer plus index times the size of an element. It reads
#   nothing.
# - `bitcast` changes the type of a value or of a pointer and no bit of it.
# - `shuffle_vector` makes a vector of any lanes of two others. The lanes are listed in a constant.
#
# A numba array is a structure in LLVM: a pointer to the data, the shape, the strides. The first function finds an
# element.
#
# [1.5]: 05_matmul.ipynb

# %% tags=["export"]
def element_pointer(context: BaseContext, builder: ir.IRBuilder, array_type: types.Array, array: ir.Value,
                    index: ir.Value) -> ir.Value:
    "Pointer to element `index` of the flat array `array`."
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    "Write a call of LLVM's function `name`, which becomes one instruction where the CPU has it. Returns its result."
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _constant(scalar, value):
    "A vector constant: `value` in all sixteen lanes, or a list of sixteen values."
    return ir.Constant(ir.VectorType(scalar, LANES), value if isinstance(value, list) else [value] * LANES)


def emit_zeros() -> ir.Value:
    "Sixteen zeros."
    return _constant(_F32, 0.0)


def emit_splat(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    "The scalar x in all sixteen lanes."
    undefined = ir.Constant(ir.VectorType(x.type, LANES), ir.Undefined)
    v = builder.insert_element(undefined, x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(v, undefined, _constant(_I32, 0))


# %% [markdown]
# Loading takes sixteen neighbours. The elements are float32, or bf16, which is the upper half of a float32: sixteen
# bits, kept as uint16. Zero-extending a bf16 word to 32 bits and shifting it up by sixteen gives the float32 with the
# same value.
#
# Where a row ends, fewer than sixteen elements are left. A *masked* load touches only the lanes whose mask is set,
# and gives zero in the others.

# %% tags=["export"]
def _element(dtype):
    "LLVM's type of an element that lanes are loaded from, and its size in bytes."
    if dtype == types.float32:
        return _F32, 4
    if dtype == types.uint16:
        return _I16, 2
    raise TypingError(f"lanes are loaded from float32 or uint16 (bf16 bits), not {dtype}")


def _to_float(builder, v):
    "Sixteen loaded elements as float32."
    if v.type.element == _F32:
        return v
    wide = builder.shl(builder.zext(v, ir.VectorType(_I32, LANES)), _constant(_I32, 16))
    return builder.bitcast(wide, _VECTOR)


def emit_load(builder: ir.IRBuilder, pointer: ir.Value, dtype: types.Type) -> ir.Value:
    "The sixteen elements from `pointer` on, as float32."
    element, size = _element(dtype)
    pointer = builder.bitcast(pointer, ir.VectorType(element, LANES).as_pointer())
    return _to_float(builder, builder.load(pointer, align=size))


def emit_load_part(builder: ir.IRBuilder, pointer: ir.Value, dtype: types.Type, count: ir.Value) -> ir.Value:
    "The `count` elements from `pointer` on, 0 < count <= 16, and zeros behind them. No byte past them is touched."
    element, size = _element(dtype)
    vector = ir.VectorType(element, LANES)
    pointer = builder.bitcast(pointer, vector.as_pointer())
    inside = builder.icmp_signed("<", _constant(count.type, list(range(LANES))), emit_splat(builder, count))
    name = f"llvm.masked.load.v16{'f32' if element == _F32 else 'i16'}.p0"
    v = call_llvm(builder, name, vector, pointer, ir.Constant(_I32, size), inside, ir.Constant(vector, None))
    return _to_float(builder, v)


# %% [markdown]
# Then arithmetic. A fused multiply-add, $ab+c$, rounds once, after the addition. `emit_sum` is the one reduction tree
# of the book: the upper eight lanes onto the lower eight, then four, two, one.

# %% tags=["export"]
def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    "a*b + c in each lane, rounded once."
    return call_llvm(builder, "llvm.fma.v16f32", _VECTOR, a, b, c)


def emit_sum(builder: ir.IRBuilder, v: ir.Value) -> ir.Value:
    "The sum of the lanes, by halves: 16 -> 8 -> 4 -> 2 -> 1. The one reduction tree of the book."
    n = LANES // 2
    while n:
        low, high = (ir.Constant(ir.VectorType(_I32, n), list(range(k, k + n))) for k in (0, n))
        undefined = ir.Constant(v.type, ir.Undefined)
        v = builder.fadd(builder.shuffle_vector(v, undefined, low), builder.shuffle_vector(v, undefined, high))
        n //= 2
    return builder.extract_element(v, ir.Constant(_I32, 0))


def emit_prefetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    "Hint that the cache line at `pointer` will be read. A hint cannot fault, so `pointer` may lie past an array's end."
    hints = (ir.Constant(_I32, n) for n in (0, 3, 1))  # to read; keep in every cache; data
    call_llvm(builder, "llvm.prefetch", ir.VoidType(), builder.bitcast(pointer, _I8.as_pointer()), *hints)


# %% [markdown]
# ## 1.3.4 Intrinsics that kernels call
#
# An intrinsic gives numba two things: the signature (`result(arguments)`) and the function that writes the code.
# Kernels then call it like any function. The intrinsics here take flat arrays, and indices that count from 0. They do
# not check that an index lies inside the array.

# %% tags=["export"]
@intrinsic
def zeros16(typingctx):
    "() -> sixteen zeros."
    return f32x16(), lambda context, builder, sig, args: emit_zeros()


@intrinsic
def load16(typingctx, a, i):
    "(a, i) -> a[i:i+16] as float32, of a flat array of float32 or of uint16 (bf16 bits)."
    def codegen(context, builder, sig, args):
        return emit_load(builder, element_pointer(context, builder, sig.args[0], *args), sig.args[0].dtype)
    return f32x16(a, types.intp), codegen


@intrinsic
def load16_part(typingctx, a, i, n):
    "(a, i, n) -> a[i:i+n] and 16-n zeros, 0 < n <= 16. Nothing past a[i+n-1] is touched."
    def codegen(context, builder, sig, args):
        a, i, n = args
        return emit_load_part(builder, element_pointer(context, builder, sig.args[0], a, i), sig.args[0].dtype, n)
    return f32x16(a, types.intp, types.intp), codegen


@intrinsic
def store16(typingctx, a, i, v):
    "(a, i, v): a[i:i+16] = v, a flat float32 array."
    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()
    return types.void(a, types.intp, f32x16), codegen


# %% tags=["export"]
@intrinsic
def fma16(typingctx, a, b, c):
    "(a, b, c) -> a*b + c in each lane, rounded once."
    return f32x16(f32x16, f32x16, f32x16), lambda context, builder, sig, args: emit_fma(builder, *args)


@intrinsic
def splat16(typingctx, x):
    "(x) -> x in all sixteen lanes."
    return f32x16(types.float32), lambda context, builder, sig, args: emit_splat(builder, *args)


@intrinsic
def sum16(typingctx, v):
    "(v) -> the sum of the lanes, by halves: 16 -> 8 -> 4 -> 2 -> 1."
    return types.float32(f32x16), lambda context, builder, sig, args: emit_sum(builder, *args)


# %% [markdown]
# Three more intrinsics take scalars: the fused multiply-add, and the conversions from a float32 to its bits and back.

# %% tags=["export"]
@intrinsic
def fma(typingctx, a, b, c):
    "(a, b, c) -> a*b + c for float32 scalars, rounded once."
    def codegen(context, builder, sig, args):
        return call_llvm(builder, "llvm.fma.f32", _F32, *args)
    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def float_bits(typingctx, x):
    "(x float32) -> its bits, int32."
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], _I32)


@intrinsic
def float_of_bits(typingctx, i):
    "(i int32) -> the float32 with these bits."
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], _F32)


# %% [markdown]
# A kernel now reads like its equation. Lane $l$ takes elements $l$, $l+16$, … in order. No compiler may reorder these
# additions, because kernels are compiled without `fastmath`.

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


# %%
@njit
def first(a, n):
    out = np.empty(16, np.float32)
    store16(out, 0, load16_part(a, 0, n))
    return out


numbers = np.arange(1, 17, dtype=np.float32)
for n in range(1, 17):
    for array in (numbers, (numbers.view(np.uint32) >> 16).astype(np.uint16)):  # float32, and the same as bf16
        assert first(array, n).tolist() == [*range(1, n + 1), *[0] * (16 - n)]

# %% [markdown]
# The same sixteen lanes go to any machine. LLVM is a cross-compiler, so one CPU can show what others would run for
# one `fma16`: one instruction of 16 lanes, two of 8, four of 4, or, where there is no fused multiply-add, sixteen
# calls of the C library's `fmaf`.

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
machines = {"AVX-512": ("x86_64", "+avx512f"), "AVX2": ("x86_64", "+avx2,+fma"), "NEON": ("aarch64", ""),
            "baseline x86-64": ("x86_64", "")}
for label, (arch, features) in machines.items():
    try:
        target = llvm.Target.from_triple(arch + "-unknown-linux-gnu")
        assembly = target.create_target_machine(features=features).emit_assembly(llvm.parse_assembly(IR))
        lines = [" ".join(line.split()) for line in assembly.splitlines()]
        found = [line for line in lines if any(name in line for name in ("fmadd", "fmla", "call"))]
        print(f"{label:16} {len(found):2} x   {found[0]}")
    except RuntimeError as error:
        print(f"{label:16} not in this build of LLVM: {error}")

# %% [markdown]
# ## 1.3.5 Sixteen codes become sixteen floats
#
# Doubled, the sixteen values of an MXFP4 code are whole numbers: 0 1 2 3 4 6 8 12 and their negatives. In return the
# kernels take half the scale. That is safe for every byte only if the halves come from a table: $2^{0-128}$ is
# subnormal, and byte 255 is still NaN.

# %% tags=["export"]
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value of each code
_BITS = SCALE.view(np.uint32)
# float32 [256]: half the value of each scale byte, which is the value of the byte before; 2^-128 for byte 0
HALF_SCALE = np.array([1 << 21, *_BITS[:254], _BITS[255]], np.uint32).view(np.float32)

# %% [markdown]
# Halving by taking one off the exponent field fails for three bytes. Byte 0 wraps around to minus infinity, so a
# *hole* in a file (scale 0, codes 0) turns from zeros into NaN. Byte 1 becomes 0. Byte 255, which should raise an
# alarm, becomes an ordinary number.

# %%
assert np.array_equal(2 * E2M1, np.array(TWICE_E2M1, np.float32))
lowered = ((np.arange(256, dtype=np.uint32) - 1) << 23).view(np.float32)
same = (lowered == HALF_SCALE) | np.isnan(HALF_SCALE) & np.isnan(lowered)
print("bytes with a wrong half scale:", np.flatnonzero(~same).tolist())
with np.errstate(invalid="ignore"):
    print("a hole: right", np.float32(0) * HALF_SCALE[0], " lowered exponent", np.float32(0) * lowered[0])


# %% [markdown]
# A look-up per weight would cost sixteen loads. There are three ways to do sixteen at once. All give the same floats,
# so no bit depends on which is used:
#
# 1. Arithmetic: from code 2 on, the doubled value is $(2+m) \ll (\mathrm{exponent}-1)$. It works anywhere.
# 2. A byte shuffle, found in x86 since 2006 and on every 64-bit Arm: the table is one 16-byte register, the codes are
#    the indices.
# 3. A float permutation (AVX-512): the table is one register of sixteen floats. It uses only the lowest four bits of
#    an index, so the low nibble needs no mask, and nothing is left to convert.

# %% tags=["export"]
def _codes(builder, packed, high):
    "The codes, 0 to 15, in the low or high nibbles of sixteen bytes."
    return builder.lshr(packed, _constant(_I8, 4)) if high else builder.and_(packed, _constant(_I8, 15))


def _by_arithmetic(context, builder, packed, high):
    c = builder.zext(_codes(builder, packed, high), ir.VectorType(_I32, LANES))
    zero, one, two, seven = (_constant(_I32, n) for n in (0, 1, 2, 7))
    t = builder.and_(c, seven)
    exponent = builder.lshr(t, one)
    shift = builder.select(builder.icmp_signed(">", exponent, zero), builder.sub(exponent, one), exponent)
    big = builder.shl(builder.or_(builder.and_(t, one), two), shift)
    m = builder.select(builder.icmp_signed("<", t, two), t, big)
    return builder.sitofp(builder.select(builder.icmp_signed(">", c, seven), builder.sub(zero, m), m), _VECTOR)


def _by_bytes(context, builder, packed, high):
    name = "llvm.x86.ssse3.pshuf.b.128" if _target(context)[0] == "x86_64" else "llvm.aarch64.neon.tbl1.v16i8"
    table = _constant(_I8, list(TWICE_E2M1))
    twice = call_llvm(builder, name, packed.type, table, _codes(builder, packed, high))
    return builder.sitofp(builder.sext(twice, ir.VectorType(_I32, LANES)), _VECTOR)


def _by_floats(context, builder, packed, high):
    c, table = builder.zext(packed, ir.VectorType(_I32, LANES)), _constant(_F32, [float(v) for v in TWICE_E2M1])
    c = builder.lshr(c, _constant(_I32, 4)) if high else c
    return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, table, c)


# %% [markdown]
# An instruction that the CPU lacks makes LLVM abort the whole process. So the look-up is chosen for the CPU that the
# code is **made for**. That is not always the CPU it is made on: `NUMBA_CPU_NAME=generic` makes code for the oldest
# x86-64.

# %% tags=["export"]
def _target(context):
    "(instruction set, list of features) of the CPU that code is made for."
    triple, _, features = context.codegen().magic_tuple()
    return triple.split("-")[0].replace("arm64", "aarch64"), features.split(",")


def nibble_lookups(context: BaseContext) -> Iterator[Callable]:
    "The look-ups that the target of `context` can run, best first: lookup(context, builder, sixteen bytes, high)."
    arch, features = _target(context)
    if "+avx512f" in features:
        yield _by_floats
    if "+ssse3" in features or arch == "aarch64":
        yield _by_bytes
    yield _by_arithmetic


def emit_nibbles(context: BaseContext, builder: ir.IRBuilder, pointer: ir.Value,
                 lookup: Callable | None = None) -> tuple[ir.Value, ir.Value]:
    "(low, high): twice the values of the low and of the high nibbles of the sixteen bytes at `pointer`, as float32."
    lookup = lookup or next(nibble_lookups(context))
    packed = builder.load(builder.bitcast(pointer, ir.VectorType(_I8, LANES).as_pointer()), align=1)
    high = lookup(context, builder, packed, True)  # first: its shift needs the bytes unchanged
    return lookup(context, builder, packed, False), high


# %% [markdown]
# The high nibbles are decoded first, because their shift needs the bytes unchanged. After that the bytes are no longer
# needed: the permutation of the low nibbles may overwrite the bytes, and no register has to be cleared for its result.
#
# All 256 bytes, by each look-up that this CPU has:

# %%
def nibbles_by(lookup):
    "A function: the 32 doubled values of sixteen bytes, low nibbles first."
    @intrinsic
    def both(typingctx, packed, i):
        def codegen(context, builder, sig, args):
            values = emit_nibbles(context, builder, element_pointer(context, builder, sig.args[0], *args), lookup)
            return context.make_tuple(builder, sig.return_type, values)
        return types.UniTuple(f32x16, 2)(packed, types.intp), codegen

    @njit
    def nibbles(packed):
        values = np.empty(32, np.float32)
        low, high = both(packed, 0)
        store16(values, 0, low)
        store16(values, 16, high)
        return values
    return nibbles


from numba.core.registry import cpu_target

every = np.arange(256, dtype=np.uint8)
for lookup in nibble_lookups(cpu_target.target_context):
    nibbles = nibbles_by(lookup)
    for start in range(0, 256, 16):
        part = every[start:start + 16].copy()
        assert np.array_equal(nibbles(part), 2 * np.concatenate([E2M1[part & 15], E2M1[part >> 4]]))
nibbles(every[:16].copy())[:16]


# %% [markdown]
# ## 1.3.6 Thirty-two bf16 words at once
#
# The target also decides how bf16 becomes float32. Zero-extending sixteen words and shifting them up are two vector
# instructions. A permutation of words that leaves zeros where its mask is off (AVX-512BW) is one, and takes 32 words
# from one load. LLVM would replace it by a permutation of two tables, the second of zeros, which takes three
# instructions. A line of assembly that does nothing prevents this: it hides from LLVM that the mask is a constant.

# %% tags=["export"]
def _half(builder, v, first):
    "Sixteen of the thirty-two lanes of `v`, from lane `first` on."
    return builder.shuffle_vector(v, v, _constant(_I32, list(range(first, first + LANES))))


def _words_to_floats(builder, words):
    "Thirty-two bf16 words as two vectors of sixteen float32, by permutation."
    upper = builder.asm(ir.FunctionType(_I32, [_I32]), "", "=r,0", [ir.Constant(_I32, 0xaaaaaaaa)], side_effect=False)
    upper.attributes.add("readnone")  # so that LLVM moves it out of the loop
    upper = builder.bitcast(upper, ir.VectorType(ir.IntType(1), 2 * LANES))
    for first in (0, LANES):
        order = ir.Constant(words.type, [first + i // 2 for i in range(2 * LANES)])
        twice = call_llvm(builder, "llvm.x86.avx512.permvar.hi.512", words.type, words, order)
        yield builder.bitcast(builder.select(upper, twice, ir.Constant(words.type, None)), _VECTOR)


def emit_load_two(context: BaseContext, builder: ir.IRBuilder, pointer: ir.Value,
                  dtype: types.Type) -> list[ir.Value]:
    "The thirty-two elements from `pointer` on, as two vectors of float32."
    element, size = _element(dtype)
    v = builder.load(builder.bitcast(pointer, ir.VectorType(element, 2 * LANES).as_pointer()), align=size)
    if element == _I16 and "+avx512bw" in _target(context)[1]:
        return list(_words_to_floats(builder, v))
    return [_to_float(builder, _half(builder, v, first)) for first in (0, LANES)]


# %%
@intrinsic
def load32(typingctx, a, i):
    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], *args)
        values = emit_load_two(context, builder, pointer, sig.args[0].dtype)
        return context.make_tuple(builder, sig.return_type, values)
    return types.UniTuple(f32x16, 2)(a, types.intp), codegen


@njit
def both(a):
    values = np.empty(32, np.float32)
    low, high = load32(a, 1)
    store16(values, 0, low)
    store16(values, 16, high)
    return values


words = np.arange(33, dtype=np.uint16) * 1927 + 5
assert both(words).tobytes() == (words[1:].astype(np.uint32) << 16).tobytes()
assert both(words.astype(np.float32)).tolist() == words[1:].tolist()

# %% [markdown]
# ## Summary
#
# - A vector of sixteen lanes is a value of the language here. That fixes the order of every sum, and the same IR runs
#   everywhere.
# - An intrinsic is a Python function that writes instructions. An instruction that the CPU lacks must not be written.
# - Sixteen codes are decoded by one permutation, one byte shuffle or some arithmetic, to the same floats.
#
# ## Exercises
#
# Answer to 2: [exercises of part 1](../answers/01_mxfp4.ipynb).
#
# 1. `_by_arithmetic` uses two selects. Build the float directly from code bits, `0x3f000000 + (t << 22)` for $t \ge
#    2$. Which codes need care, and does it win on your CPU?
# 2. Write `max16`, the largest lane, with `shuffle_vector` and `llvm.maxnum`. Does its order matter?
#
# Next: [1.4](04_parallel.ipynb) shares a kernel's work among threads.
