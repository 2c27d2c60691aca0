"""1.2 MXFP4: four bits a weight

Made from book/01_mxfp4/02_mxfp4.py: edit that, then run `make export`.
"""

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


E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SCALE = np.array([*np.ldexp(np.float32(1), np.arange(255) - 127), np.nan], np.float32)
GROUP = 32  # elements that share one scale byte


def decode(packed, scale):
    """Weights float32 [..., k] from `packed` uint8 [..., k/2], low nibble first, and `scale` uint8 [..., k/32].

    OCP Microscaling v1.0: value = E2M1[nibble] * 2^(scale - 127); scale byte 255 is NaN.
    """
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return E2M1[codes] * np.repeat(SCALE[scale], GROUP, -1)


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


__all__ = ['E2M1', 'SCALE', 'GROUP', 'decode', 'KERNEL', 'INNER', 'F32x16', 'f32x16', 'zeros16', 'load16', 'load16_part', 'store16', 'fma16', 'mul16', 'splat16', 'sum16', 'fma', 'TWICE_E2M1', 'HALF_SCALE', 'low16', 'high16', 'load32', 'look_up16', 'prefetch', 'zeros4', 'put4', 'CORES', 'NO_MORE', 'RUNS', 'draw', 'draw_run', 'finish', 'WORTH', 'threads_for', 'spread', 'TILE', 'mxfp4_rows', 'aligned', 'halved', 'check_fit', 'mxfp4_matmul']
