"""Rows, norms and the three curves: hand values, fixtures, and bit for bit a twin in NumPy.

The last part is the floating-point contract: digests that were written down once. test_contract.py compares them with those of processes
that compile for other CPUs.
"""
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, digest, distance
from common import bf16 as cut_to_bf16
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from safetensors.numpy import load_file

from k3lib.functions import exp, rms_norm, sigmoid, tanh
from k3lib.matmul import ResidentMatrix, bf16_to_float32, dot, linear


def numbers(shape, seed=0):
    "float32 with all 24 bits in use."
    return (np.random.default_rng(seed).integers(-2**24, 2**24, shape) / 2**21).astype(np.float32)


def bf16(shape, seed=0):
    return cut_to_bf16(numbers(shape, seed))


class Cut:
    "A matrix that arrives in blocks of the given sizes, over and over."

    def __init__(self, array, sizes):
        self.array, self.shape, self.sizes = array, array.shape, sizes

    def blocks(self, multiple=1):
        first = i = 0
        while first < len(self.array):
            last = first + self.sizes[i % len(self.sizes)]
            yield first, self.array[first:last]
            first, i = last, i + 1


# bf16


def test_bf16_is_the_upper_half_of_a_float():
    words = np.arange(2**16, dtype=np.uint16)
    assert bf16_to_float32(words).tobytes() == np.stack([np.zeros_like(words), words], -1).tobytes()  # little-endian halves
    assert bf16_to_float32(np.array([[0x3F80, 0xC020], [0x4049, 1]], np.uint16)).tolist() == [[1, -2.5], [3.140625, 2.0**-133]]


# Products


def fma_twin(a, b, c):
    "float32 a*b + c rounded once: the product is exact in float64, and the sum is rounded to odd before it is rounded to float32."
    p, c = a.astype(np.float64) * b, c.astype(np.float64)
    s = p + c
    z = s - p
    lost = (p - (s - z)) + (c - z)
    away = np.where((lost > 0) == (s > 0), 1, -1)
    bits = s.view(np.int64)
    bits += np.where((lost != 0) & (bits % 2 == 0), away, 0)
    return bits.view(np.float64).astype(np.float32)


def twin(a, b, lanes=16, fma=fma_twin):
    "The bits owed for a . b along the last axis: element m in lane m % 16, lanes added by halves."
    pad = [(0, 0)] * (np.ndim(a) - 1) + [(0, -a.shape[-1] % lanes)]
    a, b = np.pad(a, pad), np.pad(b, pad)
    acc = np.zeros((*np.broadcast_shapes(a.shape, b.shape)[:-1], lanes), np.float32)
    for m in range(0, a.shape[-1], lanes):
        acc = fma(a[..., m:m + lanes], b[..., m:m + lanes], acc)
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    return acc[..., 0]


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
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 2**32), st.data())
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
    assert linear(ResidentMatrix(W), x, out) is out
    assert out.tobytes() == linear(ResidentMatrix(W), x).tobytes()


def test_linear_refuses_another_width():
    for x in (numbers((2, 9)), numbers(10)):
        with pytest.raises(ValueError, match=r"linear: x has shape .*, W \(6, 10\)"):
            linear(ResidentMatrix(bf16((6, 10))), x)


def test_rows_is_one_block():
    array = bf16((6, 10))
    (first, block), = ResidentMatrix(array).blocks(multiple=4)
    assert first == 0 and block is array and ResidentMatrix(array).shape == (6, 10)


# RMSNorm


@pytest.fixture(scope="module")
def norm():
    return {name: array.copy() for name, array in load_file(FIXTURES / "ops/rmsnorm.safetensors").items()}


@pytest.mark.parametrize("eps, name", [(1e-5, "y_eps1e5"), (1e-6, "y_eps1e6")])
def test_rms_norm_of_the_fixture(norm, eps, name):
    assert distance(rms_norm(norm["x"], norm["weight"], eps), norm[name]) < TOLERANCE


@pytest.mark.parametrize("eps, name", [(1e-6, "y_eps1e5"), (1e-5, "y_eps1e6")])
def test_the_other_epsilon_fails_the_gate(norm, eps, name):
    assert distance(rms_norm(norm["x"], norm["weight"], eps), norm[name]) > 1000 * TOLERANCE


def test_wrong_norms_fail_the_gate(norm):
    x, weight, y = norm["x"].astype(float), norm["weight"], rms_norm(norm["x"], norm["weight"], 1e-5)
    rms = np.sqrt(np.mean(x**2, -1, keepdims=True))
    assert distance(x / (rms + 1e-5) * weight, y) > 1000 * TOLERANCE
    assert distance((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight, y) > 1000 * TOLERANCE
    assert distance(x / np.sqrt(rms**2 + 1e-5) * (1 + weight), y) > 1000 * TOLERANCE


def test_rms_norm_by_hand_in_place_and_of_zeros():
    x, weight = np.array([[3, -4], [0, 0]], np.float32), np.array([1, 2], np.float32)
    expected = np.array([[3, -8], [0, 0]]) / np.sqrt(12.5)
    assert distance(rms_norm(x, weight, 1e-12), expected) < 1e-6
    assert rms_norm(x, weight, 1e-12, out=x) is x
    assert distance(x, expected) < 1e-6


def test_rms_norm_has_the_bits_of_the_twin():
    x, weight = numbers((5, 37)), numbers(37, 1)
    scale = np.float32(1) / np.sqrt(twin(x, x) / np.float32(37) + np.float32(1e-5))
    assert rms_norm(x, weight, 1e-5).tobytes() == (x * scale[:, None] * weight).tobytes()


# exp, sigmoid, tanh


@njit
def curves(x):
    e, s, t = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    for i in range(x.size):
        e[i], s[i], t[i] = exp(x[i]), sigmoid(x[i]), tanh(x[i])
    return e, s, t


@pytest.fixture(scope="module")
def floats():
    "One float32 in 4099 of all there are, NaN left out."
    x = np.arange(0, 2**32, 4099).astype(np.uint32).view(np.float32)
    return x[~np.isnan(x)]


def ulps(got, right):
    "Error in units of the spacing of float32 at the right answer."
    finite = np.isfinite(right.astype(np.float32))
    assert np.array_equal(got[~finite], right.astype(np.float32)[~finite])
    right = np.where(finite, right, 0)
    return np.where(finite, np.abs(got - right), 0) / np.spacing(np.maximum(np.abs(right).astype(np.float32), np.float32(2.0**-126)))


@pytest.mark.parametrize("which, bound", [("exp", 1.1), ("sigmoid", 2.5), ("tanh", 2.5)])
def test_error_in_ulp(floats, which, bound):
    "Over every third float32 the largest errors are 1.06, 2.41 and 2.41 ulp."
    wide = floats.astype(float)
    with np.errstate(over="ignore", under="ignore"):
        right = {"exp": np.exp, "sigmoid": lambda v: 1 / (1 + np.exp(-v)), "tanh": np.tanh}[which](wide)
        error = ulps(curves(floats)[("exp", "sigmoid", "tanh").index(which)], right)
    worst = np.argmax(error)
    assert error[worst] < bound, f"{which}({floats[worst]!r}) is off by {error[worst]:.2f} ulp"


def test_special_arguments():
    x = np.array([0, -0., np.inf, -np.inf, 88.72, 88.73, -103.9, -104.1], np.float32)
    e, s, t = curves(x)
    assert e.tolist() == [1, 1, np.inf, 0, e[4], np.inf, 2.0**-149, 0] and np.isfinite(e[4])
    assert s.tolist() == [.5, .5, 1, 0, 1, 1, 2.0**-149, 0]
    assert t.tolist() == [0, 0, 1, -1, 1, 1, -1, -1]
    assert np.signbit(t).tolist() == [False, True, False, True, False, False, True, True]
    assert all(np.isnan(f[0]) for f in curves(np.array([np.nan], np.float32)))


def test_symmetry(floats):
    _, s, t = curves(floats)
    _, s_minus, t_minus = curves(-floats)
    assert t_minus.tobytes() == (-t).tobytes()
    assert np.abs(s + s_minus - 1).max() <= 2.0**-23


# The contract between machines


def case(n, k, tokens):
    "A bf16 matrix, tokens and a norm's weight from whole numbers alone, so that every machine starts from the same bytes."
    i = np.arange(n * k + tokens * k + k, dtype=np.int64) * 2654435761 % 33554393 - 16777196
    every = (i / 2**21).astype(np.float32)
    return ((every[:n * k].view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(n, k),
            every[n * k:n * k + tokens * k].reshape(tokens, k), every[n * k + tokens * k:])


def contract():
    "Digests that are the same on every CPU and for any number of threads (test_contract.py)."
    found = {}
    for shape in ((1, 1, 1), (6, 17, 3), (19, 48, 4), (67, 333, 7), (130, 100, 9)):
        W, x, weight = case(*shape)
        n, k, tokens = shape
        found[f"linear {n} {k} {tokens}"] = digest(linear(ResidentMatrix(W), x))[:16]
        found[f"dot {k}"] = digest(np.float32([dot(row, weight) for row in x]))[:16]
        for eps in (1e-5, 1e-6):
            found[f"rms_norm {k} {tokens} {eps}"] = digest(rms_norm(x * np.float32(2**-12), weight, eps))[:16]
    x = np.arange(0, 2**32, 65521).astype(np.uint32).view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], (np.arange(-20000, 20001) / 1000).astype(np.float32)])
    return found | {name: digest(y)[:16] for name, y in zip(("exp", "sigmoid", "tanh"), curves(x))}


WRITTEN_DOWN = dict(line.rsplit(" ", 1) for line in """
linear 1 1 1 8a46420ac424b0a4
dot 1 167110e01cd0db72
rms_norm 1 1 1e-05 03d305a6b9fec447
rms_norm 1 1 1e-06 f1ce2a1e0f5462c9
linear 6 17 3 5c6448462c3307d6
dot 17 c05075369bbd782c
rms_norm 17 3 1e-05 143f4009ca94c16a
rms_norm 17 3 1e-06 614f83012f2f936c
linear 19 48 4 32d8e9861ac937bd
dot 48 23720a45e4eadac9
rms_norm 48 4 1e-05 08f7b31a4e27f136
rms_norm 48 4 1e-06 35ff4b570962abfa
linear 67 333 7 ac6854560a30cea5
dot 333 a5408a6edf95e35c
rms_norm 333 7 1e-05 a573df0a452985d8
rms_norm 333 7 1e-06 9ed63fc0d3edc961
linear 130 100 9 0037bcf8a3ea6e05
dot 100 84b74d8e4b9a307d
rms_norm 100 9 1e-05 70e1fb0ff03165ad
rms_norm 100 9 1e-06 4602209d2c9a53ca
exp 3b3551b116e91aea
sigmoid 7f59ecc40a8b5534
tanh 7c218b1393339031
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


def test_what_does_not_fit_is_refused_before_memory_is_touched():
    x, W, weight = np.ones((2, 40), np.float32), ResidentMatrix(np.ones((70, 40), np.float32)), np.ones(40, np.float32)
    for out in (np.zeros((1, 1), np.float32), np.zeros((2, 70)), np.zeros((2, 71), np.float32)):
        with pytest.raises(ValueError, match=r"linear: out is .*, expected float32 \(2, 70\)"):
            linear(W, x, out)
    for args in ((x, weight[:3], 1e-5), (x, weight, 1e-5, np.zeros((1, 40), np.float32))):
        with pytest.raises(ValueError, match="rms_norm: x .* do not fit"):
            rms_norm(*args)
