"""1.2 MXFP4: four bits a weight

Made from book/01_mxfp4/02_mxfp4.py: edit that, then run `make export`.
"""

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
GROUP = 32  # elements that share one scale byte


def decode(packed, scale):
    """Weights float32 [..., k] from `packed` uint8 [..., k/2], low nibble first, and `scale` uint8 [..., k/32].

    OCP Microscaling v1.0: value = E2M1[nibble] * 2^(scale - 127); scale byte 255 is NaN.
    """
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    power = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
    power[scale == 255] = np.nan
    return E2M1[codes] * np.repeat(power, GROUP, -1)


KERNEL = dict(cache=True, nogil=True, error_model="numpy")  # nogil: readers go on while a kernel runs

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
        array, i, n = args
        v = ir.Constant(_vector(element), None)
        for lane in range(16):
            inside = builder.icmp_signed("<", ir.Constant(n.type, lane), n)
            index = builder.select(inside, builder.add(i, ir.Constant(i.type, lane)), i)
            p = _pointer(context, builder, sig.args[0], array, index, element)
            x = builder.select(inside, builder.load(p, align=align), ir.Constant(element, None))
            v = builder.insert_element(v, x, ir.Constant(_I32, lane))
        return _to_float(builder, v, sig.args[0].dtype)
    return f32x16(a, types.intp, types.intp), codegen


@intrinsic
def fma16(typingctx, a, b, c):
    "(a, b, c) -> a*b + c in each lane, rounded once."
    def codegen(context, builder, sig, args):
        v = _vector(_F32)
        f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(v, [v] * 3), "llvm.fma.v16f32")
        return builder.call(f, args)
    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def mul16(typingctx, a, b):
    "(a, b) -> a*b in each lane."
    return f32x16(f32x16, f32x16), lambda context, builder, sig, args: builder.fmul(*args)


@intrinsic
def splat16(typingctx, x):
    "(x) -> x in all sixteen lanes."
    def codegen(context, builder, sig, args):
        v = builder.insert_element(ir.Constant(_vector(_F32), ir.Undefined), args[0], ir.Constant(_I32, 0))
        return builder.shuffle_vector(v, ir.Constant(_vector(_F32), ir.Undefined), _splat(_vector(_I32), 0))
    return f32x16(types.float32), codegen


@intrinsic
def store16(typingctx, a, i, v):
    "(a, i, v): a[i:i+16] = v, a flat float32 array."
    def codegen(context, builder, sig, args):
        p = _pointer(context, builder, sig.args[0], args[0], args[1], _vector(_F32))
        builder.store(args[2], p, align=4)
        return context.get_dummy_value()
    return types.void(a, types.intp, f32x16), codegen


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
    def codegen(context, builder, sig, args):
        f = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_F32, [_F32] * 3), "llvm.fma.f32")
        return builder.call(f, args)
    return types.float32(types.float32, types.float32, types.float32), codegen


TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
HALF_SCALE = np.ldexp(np.float32(1), np.arange(256, dtype=np.int32) - 128)
HALF_SCALE[255] = np.nan


def _byte_shuffle(context, builder):
    "The target's 16-entry byte table look-up, or None. Asked of the target, not of the host: LLVM aborts on a wrong guess."
    triple, _, features = context.codegen().magic_tuple()
    v = ir.VectorType(_I8, 16)
    if triple.startswith("x86_64") and "+ssse3" in features.split(","):
        name = "llvm.x86.ssse3.pshuf.b.128"
    elif triple.startswith(("aarch64", "arm64")):
        name = "llvm.aarch64.neon.tbl1.v16i8"
    else:
        return None
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(v, [v, v]), name)


def _twice_values(context, builder, codes):
    "Sixteen 4-bit codes (bytes) -> twice their E2M1 values, float32."
    wide = _vector(_I32)
    shuffle = _byte_shuffle(context, builder)
    if shuffle is not None:
        table = ir.Constant(codes.type, list(TWICE_E2M1))
        return builder.sitofp(builder.sext(builder.call(shuffle, [table, codes]), wide), _vector(_F32))
    c = builder.zext(codes, wide)
    t = builder.and_(c, _splat(wide, 7))
    # From code 2 on, 2*value = (2 + mantissa) << (exponent - 1); below, 2*value is the code itself.
    exponent = builder.lshr(t, _splat(wide, 1))
    shift = builder.select(builder.icmp_signed(">", exponent, _splat(wide, 0)), builder.sub(exponent, _splat(wide, 1)), exponent)
    big = builder.shl(builder.or_(builder.and_(t, _splat(wide, 1)), _splat(wide, 2)), shift)
    m = builder.select(builder.icmp_signed("<", t, _splat(wide, 2)), t, big)
    negative = builder.icmp_signed(">", c, _splat(wide, 7))
    return builder.sitofp(builder.select(negative, builder.sub(_splat(wide, 0), m), m), _vector(_F32))


def _nibbles(high):
    def codegen(context, builder, sig, args):
        v = _vector(_I8)
        b = builder.load(_pointer(context, builder, sig.args[0], args[0], args[1], v), align=1)
        codes = builder.lshr(b, _splat(v, 4)) if high else builder.and_(b, _splat(v, 15))
        return _twice_values(context, builder, codes)
    return codegen


@intrinsic
def low16(typingctx, packed, i):
    "(packed, i) -> twice the values of the low nibbles of packed[i:i+16], flat uint8."
    return f32x16(packed, types.intp), _nibbles(high=False)


@intrinsic
def high16(typingctx, packed, i):
    "(packed, i) -> twice the values of the high nibbles of packed[i:i+16], flat uint8."
    return f32x16(packed, types.intp), _nibbles(high=True)


@njit(**KERNEL)
def _group(p, i, even, odd, acc, half_scale):
    "acc + one group: sixteen bytes at p[i] against the even and the odd activations."
    t = fma16(high16(p, i), odd, mul16(low16(p, i), even))
    return fma16(t, splat16(half_scale), acc)


@njit(**KERNEL)
def _rows4(p, s, r, groups, even, odd, j):
    "Four rows from row r against one token whose halves start at even[j], odd[j]."
    i, g = r * groups * 16, r * groups
    a = b = c = d = zeros16()
    for q in range(groups):
        e, o = load16(even, j + 16 * q), load16(odd, j + 16 * q)
        a = _group(p, i + 16 * q, e, o, a, HALF_SCALE[s[g + q]])
        b = _group(p, i + 16 * (groups + q), e, o, b, HALF_SCALE[s[g + groups + q]])
        c = _group(p, i + 16 * (2 * groups + q), e, o, c, HALF_SCALE[s[g + 2 * groups + q]])
        d = _group(p, i + 16 * (3 * groups + q), e, o, d, HALF_SCALE[s[g + 3 * groups + q]])
    return sum16(a), sum16(b), sum16(c), sum16(d)


@njit(**KERNEL)
def _row1(p, s, r, groups, even, odd, j):
    a = zeros16()
    for q in range(groups):
        a = _group(p, 16 * (r * groups + q), load16(even, j + 16 * q), load16(odd, j + 16 * q), a,
                   HALF_SCALE[s[r * groups + q]])
    return sum16(a)


@njit(**KERNEL)
def _tokens4(p, s, r, groups, even, odd, j):
    "One row against four tokens: its nibbles are decoded once."
    half = 16 * groups
    a = b = c = d = zeros16()
    for q in range(groups):
        i, k = 16 * (r * groups + q), j + 16 * q
        scale = splat16(HALF_SCALE[s[r * groups + q]])
        low, high = low16(p, i), high16(p, i)
        a = fma16(fma16(high, load16(odd, k), mul16(low, load16(even, k))), scale, a)
        b = fma16(fma16(high, load16(odd, k + half), mul16(low, load16(even, k + half))), scale, b)
        c = fma16(fma16(high, load16(odd, k + 2 * half), mul16(low, load16(even, k + 2 * half))), scale, c)
        d = fma16(fma16(high, load16(odd, k + 3 * half), mul16(low, load16(even, k + 3 * half))), scale, d)
    return sum16(a), sum16(b), sum16(c), sum16(d)


@njit(parallel=True, **KERNEL)
def _matmul(packed, scale, even, odd, out):
    n, groups = scale.shape
    tokens = even.shape[0]
    p, s, e, o = packed.reshape(-1), scale.reshape(-1), even.reshape(-1), odd.reshape(-1)
    for tile in prange((n + 3) // 4):
        first = 4 * tile
        rows = min(4, n - first)
        t = 0
        while t + 4 <= tokens:
            for r in range(first, first + rows):
                out[t, r], out[t + 1, r], out[t + 2, r], out[t + 3, r] = _tokens4(p, s, r, groups, e, o, 16 * groups * t)
            t += 4
        while t < tokens:
            if rows == 4:
                out[t, first], out[t, first + 1], out[t, first + 2], out[t, first + 3] = _rows4(
                    p, s, first, groups, e, o, 16 * groups * t)
            else:
                for r in range(first, first + rows):
                    out[t, r] = _row1(p, s, r, groups, e, o, 16 * groups * t)
            t += 1


def mxfp4_matmul(packed, scale, x, out):
    """out[t] = W x[t] for a packed W: `packed` uint8 [n, k/2], `scale` uint8 [n, k/32], `x` float32 [T, k], `out` float32 [T, n].

    W is never unpacked in memory. Lane l of a row's accumulator takes elements 2l and 2l+1 of every group, group
    after group, so the bits of out[t, r] depend on row r and token t alone. Returns `out`.
    """
    n, groups = scale.shape
    if packed.shape != (n, groups * 16) or x.shape[1] != groups * GROUP or out.shape != (x.shape[0], n):
        raise ValueError(f"mxfp4_matmul: packed {packed.shape}, scale {scale.shape}, x {x.shape} and out {out.shape} do not fit")
    _matmul(packed, scale, np.ascontiguousarray(x[:, 0::2]), np.ascontiguousarray(x[:, 1::2]), out)
    return out


__all__ = ['E2M1', 'GROUP', 'decode', 'KERNEL', 'F32x16', 'f32x16', 'zeros16', 'load16', 'load16_part', 'fma16', 'mul16', 'splat16', 'store16', 'sum16', 'fma', 'TWICE_E2M1', 'HALF_SCALE', 'low16', 'high16', 'mxfp4_matmul']
