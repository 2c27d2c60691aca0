"k3lib.simd: each lane by hand, the order of the sum, what lies behind an array, every nibble by every look-up."
import numpy as np
import pytest
from common import bf16, same
from numba import njit, types
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from k3lib.mxfp4 import E2M1, SCALE
from k3lib.simd import (
    HALF_SCALE,
    TWICE_E2M1,
    element_pointer,
    emit_load_two,
    emit_nibbles,
    f32x16,
    float_bits,
    float_of_bits,
    fma,
    fma16,
    load16,
    load16_part,
    nibble_lookups,
    splat16,
    store16,
    sum16,
    zeros16,
)

LOOKUPS = list(nibble_lookups(cpu_target.target_context))
EVERY_WORD = np.arange(2**16, dtype=np.uint16)


def floats(n, seed=0):
    "float32 with all 24 bits in use."
    return (np.random.default_rng(seed).integers(-2**24, 2**24, n) / 2**21).astype(np.float32)


# Lanes

@njit
def load_and_store(a, i, out, at):
    store16(out, at, load16(a, i))


@njit
def load_part_and_store(a, i, n, out):
    store16(out, 0, load16_part(a, i, n))


def test_load_and_store_move_sixteen_neighbours():
    a, out = floats(40), np.full(40, 7, np.float32)
    load_and_store(a, 5, out, 3)
    same("loaded", out[3:19], a[5:21])
    assert (out[:3] == 7).all() and (out[19:] == 7).all()
    load_and_store(bf16(a), 5, out, 3)
    same("from bf16", out[3:19], (bf16(a)[5:21].astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_a_part_is_followed_by_zeros_whatever_lies_behind(dtype):
    a = np.full(40, np.nan, np.float32)
    a[3:19] = floats(16)
    for n in range(1, 17):
        a[3 + n:] = np.nan
        loaded, out = a if dtype == np.float32 else bf16(a), np.full(16, 7, np.float32)
        load_part_and_store(loaded, 3, n, out)
        wanted = a[3:3 + n] if dtype == np.float32 else (loaded[3:3 + n].astype(np.uint32) << 16).view(np.float32)
        same(f"{n} lanes", out[:n], wanted)
        assert not out[n:].any()


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8])
def test_lanes_of_another_type_are_refused(dtype):
    with pytest.raises(TypingError, match="lanes are loaded from float32 or uint16"):
        load_and_store(np.zeros(16, dtype), 0, np.zeros(16, np.float32), 0)


@intrinsic
def load32(typingctx, a, i):
    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], *args)
        values = emit_load_two(context, builder, pointer, sig.args[0].dtype)
        return context.make_tuple(builder, sig.return_type, values)
    return types.UniTuple(f32x16, 2)(a, types.intp), codegen


@njit
def through_32_lanes(a, out):
    for i in range(0, a.size, 32):
        low, high = load32(a, i)
        store16(out, i, low)
        store16(out, i + 16, high)


def test_every_bf16_word_becomes_its_float_thirty_two_at_a_time():
    out = np.empty(EVERY_WORD.size, np.float32)
    through_32_lanes(EVERY_WORD, out)
    assert np.array_equal(out.view(np.uint32), EVERY_WORD.astype(np.uint32) << 16)
    a = floats(64)
    through_32_lanes(a, out[:64])
    same("float32", out[:64], a)


# Arithmetic

@njit
def sum_of(a):
    return sum16(load16(a, 0))


def by_halves(a):
    while a.size > 1:
        a = a[:a.size // 2] + a[a.size // 2:]
    return a[0]


def test_the_sum_is_by_halves():
    "For these numbers a sum in order, or one of neighbours, has other bits."
    a = floats(16) * np.float32(2) ** np.arange(-8, 8, dtype=np.float32)
    in_order, neighbours = np.float32(0), a
    for x in a:
        in_order += x
    while neighbours.size > 1:
        neighbours = neighbours[::2] + neighbours[1::2]
    assert sum_of(a) == by_halves(a) and sum_of(a) not in (in_order, neighbours[0])


@njit
def fma_of(a, b, c, out):
    store16(out, 0, fma16(load16(a, 0), load16(b, 0), load16(c, 0)))


@njit
def fma_scalar(a, b, c):
    return fma(a, b, c)


def test_fma_rounds_once():
    a, c = np.float32(1 + 2.0**-12), np.float32(-(1 + 2.0**-11))
    assert fma_scalar(a, a, c) == 2.0**-24
    out = np.empty(16, np.float32)
    fma_of(np.full(16, a), np.full(16, a), np.full(16, c), out)
    assert (out == 2.0**-24).all()


@njit
def constants(x, out):
    store16(out, 0, zeros16())
    store16(out, 16, splat16(x))


def test_zeros_and_splat():
    out = np.full(32, 7, np.float32)
    constants(np.float32(-2.5), out)
    assert out.tolist() == [0] * 16 + [-2.5] * 16 and not np.signbit(out[:16]).any()


@njit
def there_and_back(x):
    return float_bits(x), float_of_bits(float_bits(x))


def test_bits_of_a_float():
    for x in np.array([1, -0., np.inf, 2.0**-149, -3.4e38], np.float32):
        bits, back = there_and_back(x)
        assert bits == x.view(np.int32) and np.float32(back).tobytes() == x.tobytes()


# MXFP4 codes

def test_twice_the_values_and_half_the_scales():
    assert list(TWICE_E2M1) == (2 * E2M1).tolist()
    assert np.array_equal(2 * HALF_SCALE[:255], SCALE[:255]) and np.isnan(HALF_SCALE[255])
    assert HALF_SCALE[0] == 2.0**-128


@pytest.mark.parametrize("lookup", LOOKUPS, ids=lambda lookup: lookup.__name__)
def test_every_byte_by_every_lookup_of_this_cpu(lookup):
    @intrinsic
    def both(typingctx, packed, i):
        def codegen(context, builder, sig, args):
            values = emit_nibbles(context, builder, element_pointer(context, builder, sig.args[0], *args), lookup)
            return context.make_tuple(builder, sig.return_type, values)
        return types.UniTuple(f32x16, 2)(packed, types.intp), codegen

    @njit
    def nibbles(packed, low, high):
        for i in range(0, packed.size, 16):
            a, b = both(packed, i)
            store16(low, i, a)
            store16(high, i, b)

    every, (low, high) = np.arange(256, dtype=np.uint8), np.empty((2, 256), np.float32)
    nibbles(every, low, high)
    assert np.array_equal(low, 2 * E2M1[every & 15]) and np.array_equal(high, 2 * E2M1[every >> 4])


class Target:
    "A context as nibble_lookups asks it: what code is made for."

    def __init__(self, triple, features):
        self.tuple = triple, "some cpu", features

    def codegen(self):
        return self

    def magic_tuple(self):
        return self.tuple


@pytest.mark.parametrize("triple, features, names", [
    ("x86_64-unknown-linux-gnu", "+ssse3,+avx2,+avx512f", ["_by_floats", "_by_bytes", "_by_arithmetic"]),
    ("x86_64-unknown-linux-gnu", "+ssse3,-avx512f", ["_by_bytes", "_by_arithmetic"]),
    ("x86_64-unknown-linux-gnu", "", ["_by_arithmetic"]),
    ("arm64-apple-darwin", "+neon", ["_by_bytes", "_by_arithmetic"]),
    ("riscv64-unknown-linux-gnu", "", ["_by_arithmetic"]),
])
def test_a_target_is_given_no_instruction_it_lacks(triple, features, names):
    "An instruction that the CPU lacks ends the process without a message."
    assert [lookup.__name__ for lookup in nibble_lookups(Target(triple, features))] == names
