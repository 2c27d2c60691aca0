"""1.3 Sixteen lanes as one value

Made from book/01_mxfp4/03_simd.py: edit that, then run `make export`.
"""

from collections.abc import Callable, Iterator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.errors import TypingError
from numba.extending import intrinsic, models, register_model

from k3lib.mxfp4 import SCALE


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


TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the value of each code
_BITS = SCALE.view(np.uint32)
# float32 [256]: half the value of each scale byte, which is the value of the byte before; 2^-128 for byte 0
HALF_SCALE = np.array([1 << 21, *_BITS[:254], _BITS[255]], np.uint32).view(np.float32)


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


__all__ = [
    "LANES", "F32x16", "f32x16", "element_pointer", "call_llvm", "emit_zeros", "emit_splat", "emit_load",
    "emit_load_part", "emit_fma", "emit_sum", "emit_prefetch", "zeros16", "load16", "load16_part", "store16",
    "fma16", "splat16", "sum16", "fma", "float_bits", "float_of_bits", "TWICE_E2M1", "HALF_SCALE", "nibble_lookups",
    "emit_nibbles", "emit_load_two",
]
