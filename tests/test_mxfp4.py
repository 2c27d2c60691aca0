"""MXFP4: the format by hand and from its fixture, the product against float64 and, bit for bit, against a twin in NumPy.

The last part is the floating-point contract: digests that were written down once. test_contract.py compares them with those of processes
that compile for other CPUs.
"""
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from common import FIXTURES, ROOT, TOLERANCE, digest, distance
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from safetensors.numpy import load_file

from k3lib import mxfp4, parallel
from k3lib.matmul import line_aligned, mxfp4_matmul
from k3lib.mxfp4 import E2M1, SCALE, decode
from k3lib.parallel import chunk_done, next_chunk, parallel_for, threads_for
from k3lib.simd import HALF_SCALE, TWICE_E2M1


@pytest.fixture(scope="module")
def fixture():
    return {name: array.copy() for name, array in load_file(FIXTURES / "ops/mxfp4.safetensors").items()}


def matmul(packed, scale, x):
    return mxfp4_matmul(packed, scale, x, np.full((len(x), len(packed)), np.nan, np.float32))


def random_matrix(n, groups, seed=0, low=100, high=140):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 16 * groups), np.uint8), rng.integers(low, high, (n, groups), np.uint8)


def random_x(tokens, groups, seed=1):
    "float32 with all 24 bits in use: with fewer, products by E2M1 values are exact and a missing fma goes unseen."
    return (np.random.default_rng(seed).integers(-2**24, 2**24, (tokens, 32 * groups)) / 2**22).astype(np.float32)


# The format


def test_a_code_is_a_small_float():
    for code in range(16):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        assert E2M1[code] == (-1) ** sign * value
        assert np.signbit(E2M1[code]) == bool(sign)
        assert TWICE_E2M1[code] == 2 * E2M1[code]


def test_a_block_by_hand():
    w = decode(np.frombuffer(bytes.fromhex("2f 71 08 53") * 4, np.uint8), np.array([126], np.uint8))
    assert w.dtype == np.float32 and w.shape == (32,)
    assert w[:8].tolist() == [-3, .5, .25, 3, 0, 0, .75, 1.5]
    assert np.signbit(w[4]) and not np.signbit(w[5])


def test_every_code_under_every_scale_is_exact(fixture):
    with np.errstate(over="ignore"):
        expected = fixture["table_f64"].astype(np.float32)
        got = decode(fixture["table_packed"][:255], fixture["table_scale"][:255])
    assert got.tobytes() == expected.tobytes()
    assert np.isnan(decode(fixture["table_packed"][255:], fixture["table_scale"][255:])).all()


def test_scales():
    assert SCALE[[0, 1, 127, 254]].tolist() == [2.0**-127, 2.0**-126, 1, 2.0**127]
    assert np.isnan(SCALE[255]) and np.isnan(HALF_SCALE[255])
    assert np.array_equal(2 * HALF_SCALE[:255], SCALE[:255])


def test_decode_keeps_leading_dimensions(fixture):
    packed, scale = fixture["matvec_packed"], fixture["matvec_scale"]
    assert decode(packed, scale).tobytes() == fixture["matvec_weight"].tobytes()
    assert np.array_equal(decode(packed.reshape(8, 8, -1), scale.reshape(8, 8, -1)).reshape(64, -1), fixture["matvec_weight"])


# The product


def test_product_of_the_fixture(fixture):
    got = matmul(fixture["matvec_packed"], fixture["matvec_scale"], fixture["x"][None])
    assert distance(got[0], fixture["matvec_y"]) < TOLERANCE


TRAPS = {
    "nibbles swapped": lambda packed, scale: (packed >> 4 | packed << 4, scale),
    "low nibbles first, then high": lambda packed, scale: (low_first(packed), scale),
    "scale bias 128": lambda packed, scale: (packed, scale - np.uint8(1)),
}


def low_first(packed):
    "Bytes whose low-high order gives the codes in the order: all low nibbles of a group, then all high ones."
    codes = np.concatenate([half.reshape(*packed.shape[:-1], -1, 16) for half in (packed & 15, packed >> 4)], -1).reshape(*packed.shape[:-1], -1)
    return codes[..., 0::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("trap", TRAPS)
def test_a_wrong_reading_fails_the_gate(fixture, trap):
    packed, scale = TRAPS[trap](fixture["matvec_packed"], fixture["matvec_scale"])
    assert distance(matmul(packed, scale, fixture["x"][None])[0], fixture["matvec_y"]) > 1000 * TOLERANCE


def test_int4_codes_fail_the_gate(fixture, monkeypatch):
    monkeypatch.setattr(mxfp4, "E2M1", np.arange(-8, 8, dtype=np.float32))
    weight = decode(fixture["matvec_packed"], fixture["matvec_scale"])
    assert distance(weight @ fixture["x"], fixture["matvec_y"]) > 1000 * TOLERANCE


def test_every_byte_of_a_row_meets_its_own_activations():
    "All 256 bytes in one row, one activation at a time: the output is that weight, exactly."
    packed, scale = np.arange(256, dtype=np.uint8)[None], np.full((1, 16), 127, np.uint8)
    assert np.array_equal(matmul(packed, scale, np.eye(512, dtype=np.float32))[:, 0], decode(packed, scale)[0])


def test_scale_bytes_at_the_ends():
    packed, x = np.full((5, 16), 0x77, np.uint8), np.full((1, 32), 1 / 128, np.float32)
    scale = np.array([[0], [1], [254], [255], [127]], np.uint8)
    got = matmul(packed, scale, x)[0]
    assert got[[0, 1, 2, 4]].tolist() == [1.5 * 2.0**-127, 1.5 * 2.0**-126, 1.5 * 2.0**127, 1.5]
    assert np.isnan(got[3])


def test_a_hole_is_zero():
    "Unwritten parts of a sparse file read as zeros: scale byte 0, codes 0."
    got = matmul(np.zeros((6, 32), np.uint8), np.zeros((6, 2), np.uint8), np.full((3, 64), 3e38, np.float32))
    assert got.tobytes() == np.zeros((3, 6), np.float32).tobytes()


def test_shapes_that_do_not_fit():
    packed, scale = random_matrix(4, 3)
    x, out = random_x(2, 3), np.empty((2, 4), np.float32)
    for bad in ((packed[:, 1:], scale, x, out), (packed, scale[:3], x, out), (packed, scale, x[:, :64], out), (packed, scale, x, out[:1])):
        with pytest.raises(ValueError, match="mxfp4_matmul: packed .* do not fit"):
            mxfp4_matmul(*bad)


def test_returns_the_array_it_filled():
    packed, scale = random_matrix(7, 1)
    out = np.full((3, 7), np.nan, np.float32)
    assert mxfp4_matmul(packed, scale, random_x(3, 1), out) is out and np.isfinite(out).all()


def test_aligned():
    for shape in ((1,), (3, 5), (2, 7, 2, 16)):
        a = line_aligned(shape)
        assert a.shape == shape and a.dtype == np.float32 and a.ctypes.data % 64 == 0 and not a.any() and a.flags.c_contiguous


# Which bits


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


def twin(packed, scale, x, lanes=16, fma=fma_twin):
    "The bits owed for one token: lane l takes elements 2l and 2l+1 of each group, lanes are added by halves."
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
def test_the_bits_are_those_of_the_twin(n, groups):
    packed, scale = random_matrix(n, groups)
    x = random_x(7, groups)
    expected = np.stack([twin(packed, scale, row) for row in x])
    assert matmul(packed, scale, x).tobytes() == expected.tobytes()


def test_the_twin_also_under_the_smallest_scales():
    packed, scale = random_matrix(5, 3, low=0, high=4)
    x = random_x(1, 3)
    assert matmul(packed, scale, x)[0].tobytes() == twin(packed, scale, x[0]).tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**32), st.data())
def test_no_cut_of_rows_or_tokens_moves_a_bit(n, groups, tokens, seed, data):
    packed, scale = random_matrix(n, groups, seed)
    x = random_x(tokens, groups, seed + 1)
    whole = matmul(packed, scale, x)
    row, token = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, tokens - 1))
    part = matmul(packed[row:], scale[row:], x[token:])
    assert part.tobytes() == whole[token:, row:].tobytes()


def test_strided_activations():
    packed, scale = random_matrix(9, 2)
    x = random_x(6, 2)
    assert matmul(packed, scale, x[::2]).tobytes() == matmul(packed, scale, x[::2].copy()).tobytes()


# The contract between machines



def case(n, groups, tokens):
    "A matrix and tokens from whole numbers alone, so that every machine starts from the same bytes; x has all 24 bits."
    i = np.arange(n * groups * 16, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(7)
    x = np.arange(tokens * groups * 32, dtype=np.int64) * 2654435761 % 33554393 - 16777196
    return ((i % 256).astype(np.uint8).reshape(n, -1), (90 + i[::16] % 64).astype(np.uint8).reshape(n, groups),
            (x / 2**21).astype(np.float32).reshape(tokens, -1))


def contract():
    "Digests that are the same on every CPU and for any number of threads (test_contract.py)."
    found = {}
    for shape in ((1, 1, 1), (6, 3, 3), (19, 11, 4), (67, 5, 7), (130, 12, 9)):
        packed, scale, x = case(*shape)
        found[" ".join(map(str, shape))] = digest(matmul(packed, scale, x))[:16]
    return found


WRITTEN_DOWN = dict(line.rsplit(" ", 1) for line in """
1 1 1 2afffb98e46b035a
6 3 3 707663ea4cc8eab6
19 11 4 de1635cb199be09b
67 5 7 ecc5c2096a8385b8
130 12 9 fbf9e703cbbebf3c
""".strip().splitlines())


@njit(nogil=True)
def record(parts, by, drawn):
    "by[i] += 1 for each part i that this thread draws."
    while True:
        begin, end = next_chunk(drawn, parts)
        if begin >= parts:
            return
        for part in range(begin, end):
            by[part] += 1
        chunk_done(drawn, begin, end)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_part_is_drawn_once(threads):
    by = np.zeros(100_000, np.int64)
    for n in range(1, 20):
        parallel_for(threads, len(by), record, by)
        assert (by == n).all()


@njit
def next_run(drawn, n):
    return next_chunk(drawn, n)


@njit
def count(drawn, begin, end):
    chunk_done(drawn, begin, end)


def in_turn(steps):
    "A kernel for spread in Python, and {thread: the parts it has done}; steps(part) is called in each."
    drawn_by = {}

    def kernel(parts, drawn):
        while (run := next_run(drawn, parts))[0] < parts:
            for part in range(*run):
                steps(part)
                drawn_by.setdefault(threading.get_ident(), []).append(part)
            count(drawn, *run)
    return kernel, drawn_by


def test_a_failure_of_any_thread_is_raised_and_ends_the_others():
    here = threading.get_ident()
    for mine in (True, False):
        came = threading.Event()

        def step(part):
            if (threading.get_ident() == here) == mine:
                came.set()
                raise ArithmeticError("mine" if mine else "a helper's")
            assert came.wait(5)
            time.sleep(0.001)

        kernel, drawn_by = in_turn(step)
        with pytest.raises(ArithmeticError, match="mine" if mine else "a helper's"):
            parallel_for(2, 1000, kernel)
        done = {thread: len(parts) for thread, parts in drawn_by.items()}
        if mine:
            assert sum(done.values()) < 200, "the others went on"
        time.sleep(0.02)
        assert done == {thread: len(parts) for thread, parts in drawn_by.items()}, "a helper outlived spread"


def test_a_helper_that_fails_at_once_is_heard():
    here, came = threading.get_ident(), threading.Event()

    def kernel(parts, drawn):
        if threading.get_ident() != here:
            came.set()
            raise ArithmeticError("a helper's")
        while (run := next_run(drawn, parts))[0] < parts:
            assert came.wait(20)
            time.sleep(0.001)  # it has yet to be heard
            count(drawn, *run)

    with pytest.raises(ArithmeticError, match="a helper's"):
        parallel_for(2, 100, kernel)


@njit(nogil=True)
def slow(n, out, drawn):
    while True:
        begin, end = next_chunk(drawn, n)
        if begin >= n:
            return
        for i in range(begin, end):
            for _ in range(20_000):
                out[i] = out[i] * 0.9999 + 1
        chunk_done(drawn, begin, end)


@pytest.mark.parametrize("new_helpers", [False, True])
def test_an_interrupt_at_any_line_leaves_nobody_at_work(new_helpers):
    "Ctrl-C comes between any two lines, also where a helper is started; afterwards nothing is written and helpers still come."
    ours = {module.__file__ for module in (parallel, threading)}
    parallel_for(2, 8, slow, np.zeros(8))  # is compiled
    line = interrupted = 0
    while True:
        out, lines = np.zeros(200), 0
        if new_helpers:
            parallel._forget_helpers()

        def trace(frame, event, _):
            nonlocal lines
            if frame.f_code.co_filename not in ours:
                return None
            lines += 1
            if lines == line + 1:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            parallel_for(2, len(out), slow, out)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        then = out.copy()
        time.sleep(0.005)
        assert (out == then).all(), f"a helper writes on after an interrupt at line {line}"
        if lines <= line:
            break
        line += 1
    assert interrupted > 10
    kernel, drawn_by = in_turn(lambda part: time.sleep(0.0001))
    parallel_for(2, 1000, kernel)
    assert len(drawn_by) == 2, "no helper comes any more"


def test_many_callers_at_once():
    def call(threads):
        by = np.zeros(5000, np.int64)
        for n in range(1, 30):
            parallel_for(threads, len(by), record, by)
            assert (by == n).all()
        return True

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(call, [2, 3, 2, 5, 1, 2])) == [True] * 6


def test_a_thread_that_outlives_the_main_one():
    run = subprocess.run([sys.executable, "-c", OUTLIVES], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (run.returncode, run.stdout, run.stderr) == (0, "20\n", "")


OUTLIVES = """
import threading
import numpy as np
from k3lib import matmul, parallel
parallel.MIN_PARALLEL_MACS = 0
def late():
    threading.main_thread().join()
    packed, scale, x, out = np.zeros((64, 16), np.uint8), np.zeros((64, 1), np.uint8), np.zeros((1, 32), np.float32), np.zeros((1, 64), np.float32)
    print(sum(matmul.mxfp4_matmul(packed, scale, x, out).shape[0] for _ in range(20)), flush=True)
threading.Thread(target=late).start()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_helpers_of_its_own():
    kernel, drawn_by = in_turn(lambda part: time.sleep(0.0001))
    parallel_for(2, 1000, kernel)
    assert len(drawn_by) == 2
    child = os.fork()
    if child == 0:
        drawn_by.clear()
        parallel_for(2, 1000, kernel)
        os._exit(0 if len(drawn_by) == 2 and sum(map(len, drawn_by.values())) == 1000 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_small_work_stays_with_the_caller(monkeypatch):
    monkeypatch.setattr(numba, "get_num_threads", lambda: 7)
    assert threads_for(parallel.MIN_PARALLEL_MACS) == 7 and threads_for(parallel.MIN_PARALLEL_MACS - 1) == 1


def test_what_was_written_down_is_the_contract():
    "The twin gives the digest; eight lanes, or a product rounded before it is added, as other CPUs and compilers would, do not."
    packed, scale, x = case(67, 5, 7)
    of_twin = lambda **other: digest(np.stack([twin(packed, scale, row, **other) for row in x]))[:16]
    written = WRITTEN_DOWN["67 5 7"]
    assert of_twin() == written
    assert of_twin(lanes=8) != written
    assert of_twin(fma=lambda a, b, c: a * b + c) != written


def test_packed_weights_are_bytes():
    packed, scale, x = case(5, 2, 1)
    with pytest.raises(ValueError, match="packed is int64 and scale uint8, expected uint8"):
        mxfp4_matmul(packed.astype(np.int64), scale, x, np.empty((1, 5), np.float32))
    assert mxfp4_matmul(packed, scale, x[:0], np.empty((0, 5), np.float32)).shape == (0, 5)
