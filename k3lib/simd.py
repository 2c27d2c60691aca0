"""1.2 Sixteen lanes as one value

Made from book/01_mxfp4/02_simd.py: edit that, then run `make export`.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from k3lib.mxfp4 import SCALE


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


def element_pointer(context, builder, array_type, array, index, pointee):
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
        p = element_pointer(context, builder, sig.args[0], args[0], args[1], _vector(element))
        return _to_float(builder, builder.load(p, align=align), sig.args[0].dtype)
    return f32x16(a, types.intp), codegen


@intrinsic
def load16_part(typingctx, a, i, n):
    "(a, i, n) -> a[i:i+n] and 16-n zeros, 0 < n <= 16. Nothing past a[i+n-1] is touched."
    def codegen(context, builder, sig, args):
        element, align = _element(sig.args[0])
        vector, lanes = _vector(element), _vector(args[2].type)
        p = element_pointer(context, builder, sig.args[0], args[0], args[1], vector)
        inside = builder.icmp_signed("<", ir.Constant(lanes, list(range(16))), _in_all_lanes(builder, args[2]))
        name = f"llvm.masked.load.v16{'f32' if element == _F32 else 'i16'}.p0"
        v = _intrinsic(builder, name, vector, p, ir.Constant(_I32, align), inside, ir.Constant(vector, None))
        return _to_float(builder, v, sig.args[0].dtype)
    return f32x16(a, types.intp, types.intp), codegen


@intrinsic
def store16(typingctx, a, i, v):
    "(a, i, v): a[i:i+16] = v, a flat float32 array."
    def codegen(context, builder, sig, args):
        p = element_pointer(context, builder, sig.args[0], args[0], args[1], _vector(_F32))
        builder.store(args[2], p, align=4)
        return context.get_dummy_value()
    return types.void(a, types.intp, f32x16), codegen


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


TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


HALF_SCALE = SCALE / 2


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
        b = builder.load(element_pointer(context, builder, sig.args[0], args[0], args[1], _vector(_I8)), align=1)
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
        v = builder.load(element_pointer(context, builder, sig.args[0], args[0], args[1], ir.VectorType(element, 32)), align=align)
        parts = _widened(context, builder, v) if element == _I16 else [_half(builder, v, first) for first in (0, 16)]
        return context.make_tuple(builder, sig.return_type, list(parts))
    return types.UniTuple(f32x16, 2)(a, types.intp), codegen


@intrinsic
def look_up16(typingctx, table, codes, i):
    "(table, codes, i) -> table[codes[i]] in all sixteen lanes, for flat arrays float32 [256] and uint8."
    def codegen(context, builder, sig, args):
        code = builder.load(element_pointer(context, builder, sig.args[1], args[1], args[2], _I8))
        value = builder.load(element_pointer(context, builder, sig.args[0], args[0], builder.zext(code, args[2].type), _F32))
        return _in_all_lanes(builder, value)
    return f32x16(table, codes, types.intp), codegen


@intrinsic
def prefetch_line(typingctx, a, i):
    "(a, i): ask for the cache line of a[i], a flat array. Nothing is read, so i may lie behind the end."
    def codegen(context, builder, sig, args):
        line = element_pointer(context, builder, sig.args[0], args[0], args[1], _I8)
        _intrinsic(builder, "llvm.prefetch", ir.VoidType(), line, *(ir.Constant(_I32, n) for n in (0, 3, 1)))  # to read, keep, data
        return context.get_dummy_value()
    return types.void(a, types.intp), codegen


@intrinsic
def float_bits(typingctx, x):
    "(x float32) -> its bits, int32."
    return types.int32(types.float32), lambda c, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def float_of_bits(typingctx, i):
    "(i int32) -> the float32 with these bits."
    return types.float32(types.int32), lambda c, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


__all__ = [
    "KERNEL", "INNER", "F32x16", "f32x16", "element_pointer", "zeros16", "load16", "load16_part", "store16",
    "fma16", "mul16", "splat16", "sum16", "fma", "TWICE_E2M1", "HALF_SCALE", "low16", "high16", "load32",
    "look_up16", "prefetch_line", "float_bits", "float_of_bits",
]
