# %% [markdown]
# # 1.3 Sixteen lanes as one value
#
# Every output of a matrix product is a sum of thousands of float32 numbers. Each addition rounds, so another order of
# the additions gives other bits. A compiler that makes the sum fast chooses the order by the width of the CPU's
# registers. This chapter fixes the order instead: sixteen float32 numbers become one value inside a kernel, whatever
# the width of a register. At the end you can write a sum whose order is part of the program, and you can say what
# instructions it becomes on a given CPU.
#
# > **Without it:** registers of 4, 8 and 16 numbers give 3 different results<!--claim widths--> for one sum of 3,584
# > products, so the text that K3 writes can depend on the machine.
# >
# > **With it:** the sum has one result, and a CPU with the widest registers adds sixteen products with one
# > instruction.
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
# A plain loop adds one product after the other, and each addition waits for the addition before it. A sum with several
# partial totals is faster, because the additions to different totals do not wait for each other. But it adds in another
# order, and that changes the rounding. So a compiler may use partial totals only if the option `fastmath` allows it. It
# then keeps 4, 8 or 16 of them, as many as a register of the CPU holds, and the bits of the result depend on the
# machine. The cell below computes the same sum with each number of partial totals. A place in a register that holds
# one partial total is called a *lane*.

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
assert len({sums[lanes].tobytes() for lanes in (4, 8, 16)}) == 3  # claim widths
for lanes, s in sums.items():
    print(f"{lanes:2} lanes: {s.view(np.uint32):08x} = {s:.6f}")

# %% [markdown]
# The differences are in the last digits, and yet they matter. The router of a layer chooses the sixteen experts with
# the highest scores. Where two scores are almost equal, a difference in the last digit exchanges one expert for
# another, and the text goes on differently. So this engine fixes the number of lanes at sixteen on every CPU. A test
# for this asks for equal bits, and a tolerance would hide the mistake:

# %% tags=["raises-exception"]
on_another_machine = partial_sums(terms, 8)
print("equal to 1e-5:", np.isclose(on_another_machine, sums[16], rtol=1e-5))
assert on_another_machine == sums[16], "eight lanes give other bits than sixteen"

# %% [markdown]
# ## 1.3.2 Make a vector a value
#
# Numba compiles Python functions to machine code. It translates a function into the language of the compiler LLVM,
# called *IR* (intermediate representation), and LLVM translates the IR into instructions of the CPU. The IR has a type
# for sixteen float32 numbers, `<16 x float>`. Numba has none: it knows integers, floats and arrays. But a program can
# add types to numba.
#
# A new type needs two classes. A `types.Type` is the name under which numba follows the value through a function. A
# *data model*, which `register_model` binds to this type, says which type of the IR the value has.

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
# A kernel works on such a value through *intrinsics*. An intrinsic is a Python function that runs while a kernel is
# compiled. The intrinsic does not compute the result. It writes the IR instructions that will compute the result each
# time the kernel runs. It writes them by calls of an object called `builder`: `builder.fmul(a, b)` writes one
# multiplication and returns the name of its result. A Python `for` loop around that call writes one instruction in each
# iteration, so the kernel itself contains no loop. Chapter [1.5] builds all its kernels in this way.
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
# A load takes sixteen neighbouring elements of an array. The elements are float32 or bf16. A bf16 number is the upper
# half of a float32: sixteen bits, which NumPy keeps as uint16. To make a float32 of the same value, the code extends
# the sixteen bits with zeros to 32 bits and shifts them up by sixteen places.
#
# At the end of a row, fewer than sixteen elements may be left. A *masked* load reads only the lanes whose mask bit is
# set, and puts zero into the other lanes. So it never reads past the end of the array.

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
# Next come the arithmetic instructions. A fused multiply-add computes $ab+c$ and rounds once, after the addition.
# `emit_sum` adds up the sixteen lanes. It adds the upper eight lanes to the lower eight, then four to four, two to two
# and one to one. All kernels of the book use this order and no other.

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
# An intrinsic returns two things to numba: its signature, written `result(arguments)`, and the function that writes the
# code. After that, a kernel calls the intrinsic like any other function. The intrinsics of this section take
# one-dimensional arrays, and indices that count from 0. They do not check that an index lies inside the array.

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
# Now a kernel can be written much like its equation. Lane $l$ adds the products of elements $l$, $l+16$, $l+32$ and so
# on, in this order. LLVM may not change the order of these additions, because kernels are compiled without `fastmath`.
# The second cell checks the masked load for each number of remaining elements.

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
# What do the sixteen lanes become on other CPUs? LLVM can compile for a CPU that it does not run on, so this machine
# can show the instructions of others for one `fma16`. A CPU with registers of 16, 8 or 4 floats needs one, two or four
# instructions. A CPU without a fused multiply-add gets sixteen calls of `fmaf`, a function of the C library.

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
# Kernels must turn MXFP4 codes ([1.1]) into floats, sixteen at once. The values of the codes are multiples of ½. Twice
# the values are whole numbers: 0 1 2 3 4 6 8 12 and their negatives. Whole numbers fit in a byte, and some CPUs have an
# instruction that looks up sixteen bytes at once. So the kernels use twice the value of a code, and half of the scale.
#
# The half scales come from a table of 256 floats, because two scale bytes need care. Half of byte 0's scale is
# $2^{-128}$, a subnormal number, and byte 255 means NaN, which must stay NaN.
#
# [1.1]: 01_mxfp4.ipynb

# %% tags=["export"]
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value of each code
_BITS = SCALE.view(np.uint32)
# float32 [256]: half the value of each scale byte, which is the value of the byte before; 2^-128 for byte 0
HALF_SCALE = np.array([1 << 21, *_BITS[:254], _BITS[255]], np.uint32).view(np.float32)


# %% [markdown]
# The gate compares a table with the exact halves, computed in float64. The tempting short cut builds the float directly
# and takes 1 from its exponent. It is wrong for three bytes. Byte 0 gives minus infinity, so a part of a file that was
# never written, where scales and codes are 0, decodes to NaN instead of zeros. Byte 1 gives 0. Byte 255, which must
# give NaN so that damage is noticed, gives an ordinary number.

# %%
def check_half_scales(table):
    "The gate: every entry is exactly half the value of its scale byte, and byte 255 is NaN."
    exact = np.array([2.0**(byte - 128) for byte in range(255)] + [np.nan])
    wrong = np.flatnonzero((table != exact) & ~(np.isnan(table) & np.isnan(exact)))
    assert not len(wrong), f"wrong half scale for the bytes {wrong.tolist()}"
    print("half scales: all 256 bytes right")


assert np.array_equal(2 * E2M1, np.array(TWICE_E2M1, np.float32))
check_half_scales(HALF_SCALE)

# %% tags=["raises-exception"]
lowered = ((np.arange(256, dtype=np.uint32) - 1) << 23).view(np.float32)  # WRONG: the exponent of byte 0 wraps around
check_half_scales(lowered)


# %% [markdown]
# One look-up for each weight would cost sixteen loads for sixteen weights. Three methods decode sixteen codes at once.
# All three give the same floats, so the result does not depend on which one a CPU uses.
#
# 1. **Arithmetic** works on any CPU. A code has a sign bit, two exponent bits and one mantissa bit. From code 2 on,
#    twice its magnitude is 2 plus the mantissa bit, shifted left by the exponent minus 1.
# 2. **A byte shuffle** exists on x86 CPUs with SSSE3 and on every 64-bit Arm CPU. One register of 16 bytes holds the
#    table, and the codes are the indices.
# 3. **A float permutation** exists on CPUs with AVX-512. One register of sixteen floats holds the table, so the results
#    need no conversion. The instruction uses only the lowest four bits of an index, so the low nibble needs no mask.

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
# If the IR asks for an instruction that the target CPU does not have, LLVM aborts the whole process. So the method is
# chosen for the **target**: the CPU that the code is made for. The target need not be the CPU that runs the compiler:
# with `NUMBA_CPU_NAME=generic`, numba makes code for the oldest x86-64 CPU.

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
# `emit_nibbles` decodes the high nibbles first. Their shift leaves the packed bytes unchanged. The low nibbles come
# last, and after them nothing needs the bytes, so the permutation may write its result over the bytes. In the other
# order the CPU would have to clear another register for that result.
#
# The check decodes all 256 byte values with each method that this CPU has.

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
# The target also decides how bf16 becomes float32. The usual way takes two vector instructions for sixteen words: one
# extends the words with zeros, one shifts them up. A CPU with AVX-512BW can do both in one instruction: it moves each
# word to the upper half of a lane, and a mask sets the lower half to zero. One load then serves 32 words.
#
# LLVM does not keep this instruction if it knows that the mask is a constant. It then chooses a more general
# permutation, which takes three instructions. So the code below passes the mask through an empty line of inline
# assembly. The assembly does nothing, but LLVM cannot see through it and no longer knows that the mask is a constant.

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
# - The order of a floating-point sum decides its bits. A vector type of sixteen lanes makes the order part of the
#   program, the same on every CPU.
# - An intrinsic is a Python function that writes instructions while a kernel is compiled. It must write only
#   instructions that the target CPU has.
# - Sixteen codes are decoded by a permutation, by a byte shuffle or by arithmetic. The floats are the same.
#
# ## Exercises
#
# The answers are in [exercises of part 1](../answers/01_mxfp4.ipynb).
#
# 1. `_by_arithmetic` makes an integer and converts it. Build the float's bits directly instead: for $t \ge 2$, where
#    $t$ is the code without its sign, the bits of twice the value are `0x3f800000 + (t << 22)`. Which codes need care?
# 2. Write `max16`, the largest lane, with `shuffle_vector` and `llvm.maxnum`. Does its order matter?
#
# Next: [1.4](04_parallel.ipynb) shares a kernel's work among threads.
