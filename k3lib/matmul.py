"""1.5 One row, one order

Made from book/01_mxfp4/05_matmul.py: edit that, then run `make export`.
"""

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


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    "float32 of uint16 `bits`, any shape: bf16 is the upper half of a float32, so this is exact."
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


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


__all__ = [
    "bf16_to_float32", "dot", "products", "TILE", "matmul_rows", "line_aligned", "padded", "deinterleaved",
    "Matrix", "ResidentMatrix", "check_shapes", "check_packed", "PackedMatrix", "NotFinite", "first_not_finite",
    "check_product", "linear",
]
