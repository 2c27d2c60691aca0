"""The products: by hand, against float64, and bit for bit against a twin in NumPy, for every format.

The last part is the floating-point contract: digests that were written down once. test_contract.py compares them with
those of processes that compile for other CPUs.
"""
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, digest, distance
from common import bf16 as cut_to_bf16
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core.errors import TypingError
from safetensors.numpy import load_file
from twin import case, fma_twin, numbers, twin

from k3lib.matmul import (
    PackedMatrix,
    ResidentMatrix,
    bf16_to_float32,
    deinterleaved,
    dot,
    line_aligned,
    linear,
    matmul_rows,
    padded,
    products,
)
from k3lib.mxfp4 import decode
from k3lib.simd import HALF_SCALE, TWICE_E2M1


def bf16(shape, seed=0):
    return cut_to_bf16(numbers(shape, seed))


class Cut:
    "A matrix that is multiplied in blocks of the given sizes, over and over."

    def __init__(self, array, sizes):
        self.array, self.shape, self.sizes = array, array.shape, sizes

    def multiply(self, x, out, threads):
        first = i = 0
        while first < len(self.array):
            last = first + self.sizes[i % len(self.sizes)]
            matmul_rows(self.array[first:last], padded(x), out, first)
            first, i = last, i + 1


# bf16


def test_bf16_is_the_upper_half_of_a_float():
    words = np.arange(2**16, dtype=np.uint16)
    halves = np.stack([np.zeros_like(words), words], -1)  # little-endian
    assert bf16_to_float32(words).tobytes() == halves.tobytes()
    some = np.array([[0x3F80, 0xC020], [0x4049, 1]], np.uint16)
    assert bf16_to_float32(some).tolist() == [[1, -2.5], [3.140625, 2.0**-133]]


# Products


def test_dot_by_hand():
    assert dot(np.arange(20, dtype=np.float32), np.ones(20, np.float32)) == 190
    a = np.zeros(48, np.float32)
    a[[0, 16, 32]] = 2**24, 1, -2**24
    assert dot(a, np.ones(48, np.float32)) == 0  # one lane: the 1 is rounded away
    a[[16, 17]] = 0, 1
    assert dot(a, np.ones(48, np.float32)) == 1  # a lane of its own


@pytest.mark.parametrize("k", [*range(1, 36), 1003, 7168])
def test_dot_has_the_bits_of_the_twin(k):
    a, b = numbers((2, k))
    assert np.float32(dot(a, b)) == twin(a, b)


@pytest.mark.parametrize("n, k", [(1, 1), (5, 15), (4, 16), (18, 33), (67, 100)])
def test_linear_has_the_bits_of_the_twin(n, k):
    W, x = bf16((n, k)), numbers((9, k), 1)
    expected = twin(bf16_to_float32(W)[None], x[:, None])
    for T in range(1, 10):
        assert linear(ResidentMatrix(W), x[:T]).tobytes() == expected[:T].tobytes()
        assert linear(ResidentMatrix(bf16_to_float32(W)), x[:T]).tobytes() == expected[:T].tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5),
       st.integers(0, 2**32), st.data())
def test_no_cut_of_rows_or_tokens_moves_a_bit(n, k, tokens, sizes, seed, data):
    W, x = bf16((n, k), seed), numbers((tokens, k), seed + 1)
    whole = linear(ResidentMatrix(W), x)
    token = data.draw(st.integers(0, tokens - 1))
    assert linear(Cut(W, sizes), x[token:]).tobytes() == whole[token:].tobytes()


@pytest.mark.parametrize("n", [7, 8])
@pytest.mark.parametrize("tokens", [1, 5])
def test_nothing_behind_a_row_is_read(n, tokens):
    "NaN lies behind the last row and behind every token."
    memory = np.full(n * 21 + 64, 0x7FC0, np.uint16)
    memory[:n * 21] = bf16(n * 21)
    x = np.full((tokens, 40), np.nan, np.float32)
    x[:, :21] = numbers((tokens, 21))
    assert np.isfinite(linear(ResidentMatrix(memory[:n * 21].reshape(n, 21)), x[:, :21])).all()
    assert np.isfinite(dot(x.reshape(-1)[:21], x.reshape(-1)[:21]))


def test_linear_fills_and_returns_out():
    W, x, out = bf16((6, 10)), numbers((2, 10)), np.full((2, 6), np.nan, np.float32)
    assert linear(ResidentMatrix(W), x, out=out) is out
    assert out.tobytes() == linear(ResidentMatrix(W), x).tobytes()


def test_linear_refuses_another_width():
    for x in (numbers((2, 9)), numbers(10)):
        with pytest.raises(ValueError, match=r"linear: x has shape .*, W \(6, 10\)"):
            linear(ResidentMatrix(bf16((6, 10))), x)


def test_what_does_not_fit_is_refused_before_memory_is_touched():
    x, W = np.ones((2, 40), np.float32), ResidentMatrix(np.ones((70, 40), np.float32))
    for out in (np.zeros((1, 1), np.float32), np.zeros((2, 70)), np.zeros((2, 71), np.float32)):
        with pytest.raises(ValueError, match=r"linear: out is .*, expected float32 \(2, 70\)"):
            linear(W, x, out=out)
        with pytest.raises(ValueError, match=r"ResidentMatrix: out is .*, expected float32 \(2, 70\)"):
            W.multiply(x, out, 1)


def test_arrays_that_a_kernel_cannot_index_are_refused():
    w, x, out = np.ones((4, 32), np.float32), np.ones((2, 32), np.float32), np.zeros((2, 4), np.float32)
    packed, scale = np.zeros((4, 16), np.uint8), np.zeros((4, 1), np.uint8)
    for bad in ((w[:, ::2], x, out), (w, x[:, ::2], out), (w, x, out[:, ::2]), (w, x, out.astype(np.float64)),
                (w.astype(np.int32), x, out), ((packed, scale[::2]), x, out), ((packed, w), x, out)):
        with pytest.raises(TypingError):
            matmul_rows(*bad, 0)


def test_a_resident_matrix_is_one_block():
    array, packed, calls = bf16((6, 10)), PackedMatrix(*random_matrix(5, 2)), []
    assert ResidentMatrix(array).shape == (6, 10) and packed.shape == (5, 64)
    for matrix in (ResidentMatrix(array), packed):
        matrix.map_blocks(lambda *call: calls.append(call), 3)
    assert calls == [(0, array, 3), (0, packed, 3)]


@njit
def four_by_two(w, x, column, out):
    products(w, (4, 5, 6, 7), x, (1, 3), column, out, (2, 1))


def test_products_reads_and_writes_what_it_is_told():
    "Rows 4 to 7 of w with tokens 1 and 3, from a column of x on, go to their place in out; nothing else is touched."
    w, x = numbers((9, 40)), numbers((4, 64), 1)
    for column in (0, 3, 24):
        out = np.full((5, 6), 7, np.float32)
        four_by_two(w, x, column, out)
        expected = np.full((5, 6), 7, np.float32)
        for t in range(2):
            for r in range(4):
                expected[2 + t, 1 + r] = dot(w[4 + r], x[1 + 2 * t, column:column + 40].copy())
        assert out.tobytes() == expected.tobytes()


# MXFP4


@pytest.fixture(scope="module")
def fixture():
    return {name: array.copy() for name, array in load_file(FIXTURES / "ops/mxfp4.safetensors").items()}


def multiplied(packed, scale, x, threads=2):
    out = np.full((len(x), len(packed)), np.nan, np.float32)
    PackedMatrix(packed, scale).multiply(x, out, threads)
    return out


def random_matrix(n, groups, seed=0, low=100, high=140):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 16 * groups), np.uint8), rng.integers(low, high, (n, groups), np.uint8)


def random_x(tokens, groups, seed=1):
    "float32 with all 24 bits in use: with fewer, products by E2M1 values are exact and a missing fma goes unseen."
    return (np.random.default_rng(seed).integers(-2**24, 2**24, (tokens, 32 * groups)) / 2**22).astype(np.float32)


def test_product_of_the_fixture(fixture):
    got = multiplied(fixture["matvec_packed"], fixture["matvec_scale"], fixture["x"][None])
    assert distance(got[0], fixture["matvec_y"]) < TOLERANCE


TRAPS = {
    "nibbles swapped": lambda packed, scale: (packed >> 4 | packed << 4, scale),
    "low nibbles first, then high": lambda packed, scale: (low_first(packed), scale),
    "scale bias 128": lambda packed, scale: (packed, scale - np.uint8(1)),
}


def low_first(packed):
    "Bytes whose low-high order gives the codes in the order: all low nibbles of a group, then all high ones."
    halves = [half.reshape(*packed.shape[:-1], -1, 16) for half in (packed & 15, packed >> 4)]
    codes = np.concatenate(halves, -1).reshape(*packed.shape[:-1], -1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("trap", TRAPS)
def test_a_wrong_reading_fails_the_gate(fixture, trap):
    packed, scale = TRAPS[trap](fixture["matvec_packed"], fixture["matvec_scale"])
    assert distance(multiplied(packed, scale, fixture["x"][None])[0], fixture["matvec_y"]) > 1000 * TOLERANCE


def test_every_byte_of_a_row_meets_its_own_activations():
    "All 256 bytes in one row, one activation at a time: the output is that weight, exactly."
    packed, scale = np.arange(256, dtype=np.uint8)[None], np.full((1, 16), 127, np.uint8)
    assert np.array_equal(multiplied(packed, scale, np.eye(512, dtype=np.float32))[:, 0], decode(packed, scale)[0])


def test_scale_bytes_at_the_ends():
    packed, x = np.full((5, 16), 0x77, np.uint8), np.full((1, 32), 1 / 128, np.float32)
    scale = np.array([[0], [1], [254], [255], [127]], np.uint8)
    got = multiplied(packed, scale, x)[0]
    assert got[[0, 1, 2, 4]].tolist() == [1.5 * 2.0**-127, 1.5 * 2.0**-126, 1.5 * 2.0**127, 1.5]
    assert np.isnan(got[3])


def test_a_hole_is_zero():
    "Unwritten parts of a sparse file read as zeros: scale byte 0, codes 0."
    got = multiplied(np.zeros((6, 32), np.uint8), np.zeros((6, 2), np.uint8), np.full((3, 64), 3e38, np.float32))
    assert got.tobytes() == np.zeros((3, 6), np.float32).tobytes()


def test_shapes_that_do_not_fit():
    packed, scale = random_matrix(4, 3)
    x, out = random_x(2, 3), np.empty((2, 4), np.float32)
    for bad in ((packed[:, 1:], scale, x, out), (packed, scale[:3], x, out), (packed, scale, x[:, :64], out),
                (packed, scale, x, out[:1]), (packed, scale, x, out[:, :3])):
        with pytest.raises(ValueError, match="MXFP4: packed .* do not fit"):
            PackedMatrix(*bad[:2]).multiply(*bad[2:], 1)


def test_packed_weights_are_bytes():
    packed, scale, x = packed_case(5, 2, 1)
    with pytest.raises(ValueError, match="packed is int64 and scale uint8, expected uint8"):
        PackedMatrix(packed.astype(np.int64), scale).multiply(x, np.empty((1, 5), np.float32), 1)
    assert linear(PackedMatrix(packed, scale), x[:0]).shape == (0, 5)


def test_line_aligned():
    for shape in ((1,), (3, 5), (2, 7, 2, 16)):
        a = line_aligned(shape)
        assert a.shape == shape and a.dtype == np.float32 and a.ctypes.data % 64 == 0 and not a.any()
        assert a.flags.c_contiguous


def test_activations_as_kernels_take_them():
    x = np.arange(3 * 64).reshape(3, 64)
    split = deinterleaved(x)
    assert split.shape == (3, 64) and split.ctypes.data % 64 == 0
    assert split[0].tolist() == [*range(0, 32, 2), *range(1, 32, 2), *range(32, 64, 2), *range(33, 64, 2)]
    wide = padded(x[:, :37])
    assert wide.shape == (3, 48) and wide.ctypes.data % 64 == 0 and wide[:, :37].tolist() == x[:, :37].tolist()


def packed_twin(packed, scale, x, lanes=16, fma=fma_twin):
    "The bits that MXFP4 owes for one token: lane l takes elements 2l and 2l+1 of each group, lanes added by halves."
    twice = np.array(TWICE_E2M1, np.float32)
    low, high = (twice[codes].reshape(*scale.shape, 16) for codes in (packed & 15, packed >> 4))
    even, odd = x[0::2].reshape(-1, 16), x[1::2].reshape(-1, 16)
    acc = np.zeros((len(packed), lanes), np.float32)
    for g in range(scale.shape[1]):
        for start in range(0, 16, lanes):
            part = slice(start, start + lanes)
            t = fma(high[:, g, part], odd[g, part], low[:, g, part] * even[g, part])
            acc = fma(t, HALF_SCALE[scale[:, g:g + 1]], acc)
    while acc.shape[1] > 1:
        half = acc.shape[1] // 2
        acc = acc[:, :half] + acc[:, half:]
    return acc[:, 0]


@pytest.mark.parametrize("n, groups", [(1, 1), (3, 2), (4, 7), (17, 3), (64, 112)])
def test_mxfp4_has_the_bits_of_the_twin(n, groups):
    packed, scale = random_matrix(n, groups)
    x = random_x(7, groups)
    expected = np.stack([packed_twin(packed, scale, row) for row in x])
    assert multiplied(packed, scale, x).tobytes() == expected.tobytes()


def test_the_twin_also_under_the_smallest_scales():
    packed, scale = random_matrix(5, 3, low=0, high=4)
    x = random_x(1, 3)
    assert multiplied(packed, scale, x)[0].tobytes() == packed_twin(packed, scale, x[0]).tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32), st.data())
def test_no_cut_of_mxfp4_rows_or_tokens_moves_a_bit(n, groups, tokens, seed, data):
    packed, scale = random_matrix(n, groups, seed)
    x = random_x(tokens, groups, seed + 1)
    whole = multiplied(packed, scale, x)
    row, token = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, tokens - 1))
    part = multiplied(packed[row:], scale[row:], x[token:])
    assert part.tobytes() == whole[token:, row:].tobytes()


def test_strided_activations():
    packed, scale = random_matrix(9, 2)
    x = random_x(6, 2)
    assert multiplied(packed, scale, x[::2]).tobytes() == multiplied(packed, scale, x[::2].copy()).tobytes()


# The contract between machines


def packed_case(n, groups, tokens):
    "A matrix and tokens from whole numbers alone: every machine starts from the same bytes; x has all 24 bits."
    i = np.arange(n * groups * 16, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(7)
    x = np.arange(tokens * groups * 32, dtype=np.int64) * 2654435761 % 33554393 - 16777196
    return ((i % 256).astype(np.uint8).reshape(n, -1), (90 + i[::16] % 64).astype(np.uint8).reshape(n, groups),
            (x / 2**21).astype(np.float32).reshape(tokens, -1))


def contract(threads):
    "Digests that are the same on every CPU and for any number of threads (test_contract.py)."
    found = {}
    for n, k, tokens in ((1, 1, 1), (6, 17, 3), (19, 48, 4), (67, 333, 7), (130, 100, 9)):
        W, x, weight = case(n, k, tokens)
        found[f"linear {n} {k} {tokens}"] = digest(linear(ResidentMatrix(W), x, threads))[:16]
        found[f"dot {k}"] = digest(np.float32([dot(row, weight) for row in x]))[:16]
    for n, groups, tokens in ((1, 1, 1), (6, 3, 3), (19, 11, 4), (67, 5, 7), (130, 12, 9)):
        packed, scale, x = packed_case(n, groups, tokens)
        found[f"packed {n} {groups} {tokens}"] = digest(multiplied(packed, scale, x, threads))[:16]
    return found


WRITTEN_DOWN = dict(line.rsplit(" ", 1) for line in """
linear 1 1 1 8a46420ac424b0a4
dot 1 167110e01cd0db72
linear 6 17 3 5c6448462c3307d6
dot 17 c05075369bbd782c
linear 19 48 4 32d8e9861ac937bd
dot 48 23720a45e4eadac9
linear 67 333 7 ac6854560a30cea5
dot 333 a5408a6edf95e35c
linear 130 100 9 0037bcf8a3ea6e05
dot 100 84b74d8e4b9a307d
packed 1 1 1 2afffb98e46b035a
packed 6 3 3 707663ea4cc8eab6
packed 19 11 4 de1635cb199be09b
packed 67 5 7 ecc5c2096a8385b8
packed 130 12 9 fbf9e703cbbebf3c
""".strip().splitlines())


def test_what_was_written_down_is_the_contract():
    "The twin gives the digest; other lanes, or a product rounded before it is added, do not."
    W, x, _ = case(67, 333, 7)
    of_twin = lambda **other: digest(twin(bf16_to_float32(W)[None], x[:, None], **other))[:16]
    written = WRITTEN_DOWN["linear 67 333 7"]
    assert of_twin() == written
    for lanes in (1, 4, 8, 32):
        assert of_twin(lanes=lanes) != written, f"{lanes} lanes"
    assert of_twin(fma=lambda a, b, c: a * b + c) != written


def test_what_was_written_down_of_mxfp4_is_the_contract():
    "The twin gives the digest; eight lanes, or a product rounded before it is added, do not."
    packed, scale, x = packed_case(67, 5, 7)
    of_twin = lambda **other: digest(np.stack([packed_twin(packed, scale, row, **other) for row in x]))[:16]
    written = WRITTEN_DOWN["packed 67 5 7"]
    assert of_twin() == written
    assert of_twin(lanes=8) != written
    assert of_twin(fma=lambda a, b, c: a * b + c) != written


def test_a_sum_the_compiler_may_reorder_would_be_caught():
    @njit(fastmath=True)
    def loose(a, b):
        total = np.float32(0)
        for i in range(a.size):
            total += a[i] * b[i]
        return total

    _, x, weight = case(67, 333, 7)
    got = np.array([loose(row, weight) for row in x], np.float32)
    written = WRITTEN_DOWN["dot 333"]
    assert digest(np.array([dot(row, weight) for row in x], np.float32))[:16] == written
    assert digest(got)[:16] != written


def test_a_product_and_a_sum_are_two_roundings():
    "What every kernel relies on: the compiler fuses nothing by itself."
    @njit
    def plain(a, b, c):
        return a * b + c

    assert plain(np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(-(1 + 2.0**-11))) == 0


def test_subnormals_are_kept():
    assert dot(np.array([2.0**-75], np.float32), np.array([2.0**-74], np.float32)) == 2.0**-149
