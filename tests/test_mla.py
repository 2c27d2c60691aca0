"""k3lib.mla: attention from the latent cache by hand, by fixture and against float64; any cut of tokens, heads and threads to the same bytes."""
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, bf16, close, digest, distance, same
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from safetensors.numpy import load_file

from k3lib.matmul import NotFinite, ResidentMatrix, bf16_to_float32
from k3lib.mla import MLA_ORDER, _softmax_tile, attend, mla_layer

F = load_file(FIXTURES / "ops/mla.safetensors")
DIMS = dict(heads=3, nope=12, rope=4, v_dim=10)
TRUTH = np.concatenate([F["y_prefill"], F["y_steps"]])


# The layer in float64, keys and values expanded. Every doubtful part can be swapped for a wrong one.

def softmax64(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms64(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def attend64(kv_b, q, cache, pos, v, scale_dims=None, value_first=False, extra=lambda a: a):
    "float64 [T, heads * v]."
    T, heads, d = q.shape
    latent = kv_b.shape[1]
    rope = cache.shape[1] - latent
    rows = cache[:pos + T].astype(np.float64)
    kv = (rows[:, :latent] @ kv_b.T.astype(np.float64)).reshape(pos + T, heads, -1)
    key, value = (kv[..., v:], kv[..., :v]) if value_first else (kv[..., :-v], kv[..., -v:])
    shared = extra(np.broadcast_to(rows[:, None, latent:], (pos + T, heads, rope)))
    q_extra = extra(np.concatenate([np.zeros((pos, heads, rope)), q[..., d - rope:]]))[pos:]
    s = (np.einsum("thn,phn->htp", q[..., :d - rope].astype(np.float64), key) + np.einsum("thr,phr->htp", q_extra, shared))
    s = s * (scale_dims or d) ** -.5
    seen = np.arange(pos + T) <= pos + np.arange(T)[:, None]
    return np.einsum("htp,phv->thv", softmax64(np.where(seen, s, -np.inf)), value).reshape(T, -1)


def layer64(x, eps=1e-6, gated=True, heads=3, nope=12, rope=4, v_dim=10, **wrong):
    W, x = {n: F[n].astype(np.float64) for n in MLA_ORDER}, x.astype(np.float64)
    q = (rms64(x @ W["q_a_proj"].T, W["q_a_layernorm"], eps) @ W["q_b_proj"].T).reshape(len(x), heads, nope + rope)
    kv = x @ W["kv_a_proj_with_mqa"].T
    cache = np.concatenate([rms64(kv[:, :16], W["kv_a_layernorm"], eps), kv[:, 16:]], 1)
    o = attend64(W["kv_b_proj"], q, cache, 0, v_dim, **wrong)
    return (o / (1 + np.exp(-x @ W["g_proj"].T)) if gated else o) @ W["o_proj"].T


def rotated(a):
    half = a.shape[-1] // 2
    angle = np.arange(len(a))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    return np.concatenate([a[..., :half] * np.cos(angle) - a[..., half:] * np.sin(angle),
                           a[..., :half] * np.sin(angle) + a[..., half:] * np.cos(angle)], -1)


class Blocks(ResidentMatrix):
    "A matrix in blocks of so many heads, as a ring would deliver it; remembers what was asked."

    def __init__(self, array, heads):
        super().__init__(array)
        self.heads, self.asked = heads, []

    def blocks(self, multiple=1):
        self.asked.append(multiple)
        step = self.heads * multiple
        for first in range(0, len(self.array), step):
            yield first, self.array[first:first + step].copy()


class Readers(Blocks):
    "The same, whose readers do the work on what they have read, in any order."

    def share(self, work, threads):
        blocks = list(self.blocks(22))
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda block: work(*block), blocks[::-1]))


def case(heads, nope, rope, v, latent, T, pos, seed=0, hot=1.0):
    "(kv_b, q, cache), float32."
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return draw(heads * (nope + v), latent) / np.float32(latent ** .5), draw(T, heads, nope + rope) * np.float32(hot), draw(pos + T, latent + rope)


def weights(**changed):
    return {n: ResidentMatrix(w) if w.ndim == 2 else w for n, w in ({n: F[n] for n in MLA_ORDER} | changed).items()}


def run(cuts, W=None, **changes):
    "The fixture's twelve tokens, cut as `cuts` says: (output, cache)."
    cache, out, pos = np.zeros((12, 20), np.float32), [], 0
    for T in cuts:
        out.append(mla_layer(W or weights(), F["x"][pos:pos + T], cache, pos, **{**DIMS, **changes}))
        pos += T
    return np.concatenate(out), cache


# By hand

def test_two_positions_by_hand():
    "Weights 3/4 and 1/4 of the values (4, 0) and (0, 8)."
    kv_b = np.array([[1, 0], [0, 1], [1, 1], [4, 0], [0, 8]], np.float32)
    cache = np.array([[1, 0, 0], [0, 1, 1]], np.float32)
    q = np.array([[[2, 0, 1, 2 - 2 * np.log(3)]]], np.float32)
    close("position 0", attend(ResidentMatrix(kv_b), q, cache, 0, 2), [[4, 0]], 1e-6)
    close("position 1", attend(ResidentMatrix(kv_b), q, cache, 1, 2), [[3, 2]], 1e-6)


@njit
def softmax_tile(s, m, l):
    return _softmax_tile(s, m, l)


def test_a_tile_of_softmax_by_hand():
    s = np.log(np.array([2, 4, 1], np.float32))
    top, total, shrink = softmax_tile(s, np.float32(np.log(1)), np.float32(3))
    close("weights", s, [.5, 1, .25], 1e-6)
    close("sum and shrinkage", np.array([total, shrink]), [3 / 4 + 1.75, 1 / 4], 1e-6)
    assert np.isclose(top, np.log(4))


def test_a_tile_that_raises_nothing_leaves_the_past():
    s = np.full(3, -1, np.float32)
    top, total, shrink = softmax_tile(s, np.float32(5), np.float32(2))
    assert (top, shrink) == (5, 1) and np.isclose(total, 2 + 3 * np.exp(-6))


def test_faint_weights_are_exactly_zero():
    "None may be subnormal: they slow the loops that follow three hundredfold."
    s = np.array([0, -59, -61, -90, -100], np.float32)
    softmax_tile(s, np.float32(-np.inf), np.float32(0))
    assert s[0] == 1 and s[1] > 0 and (s[2:] == 0).all()
    _, _, shrink = softmax_tile(np.zeros(1, np.float32), np.float32(-95), np.float32(1))
    assert shrink == 0


# Fixture and traps

def test_fixture():
    y, cache = run([9, 1, 1, 1])
    close("y", y, TRUTH)
    close("cache_latent", cache[:, :16], F["cache_latent"])
    close("cache_rope", cache[:, 16:], F["cache_rope"])


def test_the_reference_here_is_the_fixture():
    close("float64", layer64(F["x"]), TRUTH)


@pytest.mark.parametrize("wrong", [
    dict(scale_dims=12), dict(extra=rotated), dict(extra=np.zeros_like), dict(value_first=True), dict(eps=1e-5), dict(gated=False)],
    ids=["scale over nope", "extra dims rotated", "extra dims dropped", "value first", "1e-5 in latent norms", "no gate"])
def test_the_gate_rejects(wrong):
    assert distance(layer64(F["x"], **wrong), TRUTH) > 1000 * TOLERANCE


def test_the_latent_epsilon_is_1e_6_unless_said():
    "And it is that of both norms: with another one the layer is the reference with that one."
    assert distance(run([12], eps_latent=1e-5)[0], TRUTH) > 1000 * TOLERANCE
    close("1e-5 in both", run([12], eps_latent=1e-5)[0], layer64(F["x"], eps=1e-5))
    same("default", run([12])[0], run([12], eps_latent=1e-6)[0])


def test_extra_dims_are_cached_raw():
    close("extra dims", run([12])[1][:, 16:], (F["x"].astype(np.float64) @ F["kv_a_proj_with_mqa"].T)[:, 16:])


# Shapes

SHAPES = [(5, 7, 3, 9, 50, 11, 130), (4, 16, 4, 8, 96, 9, 60), (1, 12, 0, 4, 33, 70, 5), (6, 128, 64, 128, 512, 3, 200),
          (1, 1, 1, 1, 1, 3, 0), (17, 3, 2, 5, 16, 2, 126), (33, 4, 4, 4, 32, 1, 63), (2, 5, 17, 3, 47, 1, 700)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_any_shape_against_float64(shape, dtype):
    kv_b, q, cache = case(*shape)
    if dtype == "bf16":
        kv_b = bf16(kv_b)
    exact = bf16_to_float32(kv_b) if dtype == "bf16" else kv_b
    close(dtype, attend(ResidentMatrix(kv_b), q, cache, shape[6], shape[3]), attend64(exact, q, cache, shape[6], shape[3]))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20), st.integers(1, 70), st.integers(1, 20), st.integers(0, 150))
def test_shapes_nobody_thought_of(heads, nope, rope, v, latent, T, pos):
    kv_b, q, cache = case(heads, nope, rope, v, latent, T, pos, seed=heads + T)
    whole = attend(ResidentMatrix(kv_b), q, cache, pos, v)
    expected = attend64(kv_b, q, cache, pos, v)
    mixed = cache[:, :latent] @ kv_b.reshape(heads, nope + v, latent)[:, nope:].reshape(-1, latent).T
    cancelled = np.abs(mixed).max() / np.abs(expected).max()  # the error of a sum is that of its terms
    close("whole", whole, expected, TOLERANCE * max(1, cancelled))
    steps = [attend(Blocks(kv_b, 1), q[t:t + 1], cache, pos + t, v) for t in range(T)]
    same("single steps, one head a block", np.concatenate(steps), whole)


def test_hot_scores_stay_finite():
    "Scores near a thousand: e^s alone would overflow at 88. A float32 score of 1000 is off by 6e-5, and so is its e^s: 1e-3 is allowed."
    kv_b, q, cache = case(3, 16, 8, 6, 48, 20, 300, hot=300)
    close("hot", attend(ResidentMatrix(kv_b), q, cache, 300, 6), attend64(kv_b, q, cache, 300, 6), 1e-3)


def test_scores_far_below_zero():
    "All of them near -1000: the maximum begins at -infinity, not at 0."
    kv_b, q, cache = case(3, 1, 1, 6, 48, 3, 70)
    q[..., 0], q[..., 1], cache[:, -1] = 0, -1500, 1 + np.abs(cache[:, -1]) / 1000
    close("cold", attend(ResidentMatrix(kv_b), q, cache, 70, 6), attend64(kv_b, q, cache, 70, 6), 1e-3)


# One set of bits

@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 7], [11, 1], [2, 3, 4, 3]], ids=str)
def test_any_cut_of_the_layer(cuts):
    y, cache = run([9, 1, 1, 1])
    found, rows = run(cuts)
    same("output", found, y)
    same("cache", rows, cache)


@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 63, 64, 65, 150])
def test_chunks_across_tiles(T):
    "150 tokens from position 0: tiles begin at 0, 64, 128, whatever the chunk."
    kv_b, q, cache = case(3, 12, 4, 10, 40, 150, 0)
    whole = attend(ResidentMatrix(kv_b), q, cache, 0, 10)
    parts = [attend(ResidentMatrix(kv_b), q[t:t + T], cache, t, 10) for t in range(0, 150, T)]
    same(f"chunks of {T}", np.concatenate(parts), whole)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 16, 40])
def test_blocks_of_heads(heads):
    kv_b, q, cache = case(40, 12, 4, 10, 40, 3, 70)
    kv_b = bf16(kv_b)
    matrix = Blocks(kv_b, heads)
    same(f"{heads} heads a block", attend(matrix, q, cache, 70, 10), attend(ResidentMatrix(kv_b), q, cache, 70, 10))
    assert matrix.asked == [22], "kv_b_proj goes by once, in whole heads of 12 + 10 rows"
    by_readers = Readers(kv_b, heads)
    same(f"{heads} heads a block, by readers", attend(by_readers, q, cache, 70, 10), attend(ResidentMatrix(kv_b), q, cache, 70, 10))
    assert by_readers.asked == [22]


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread: there is no second to compare")
@pytest.mark.parametrize("heads", [12, 40])
def test_threads(heads, all_threads):
    "Two threads take 12 heads as 8 and 4, one takes them at once; 40 are always cut by sixteens."
    kv_b, q, cache = case(heads, 12, 4, 10, 40, 5, 70)
    two = attend(ResidentMatrix(kv_b), q, cache, 70, 10)
    numba.set_num_threads(1)
    try:
        same("one thread and more", attend(ResidentMatrix(kv_b), q, cache, 70, 10), two)
    finally:
        numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)


def contract():
    "Digests that are the same on every CPU (test_contract.py): attention over three tiles of cache."
    kv_b, q, cache = case(5, 24, 8, 20, 72, 5, 150)
    return {"attend, 5 heads": digest(attend(ResidentMatrix(bf16(kv_b)), q, cache, 150, 20))}


# What it touches

def test_the_future_is_not_read():
    "Rows after a token, and rows no token has reached, may hold anything."
    kv_b, q, cache = case(5, 12, 4, 10, 40, 6, 66)
    whole = attend(ResidentMatrix(kv_b), q, cache, 66, 10)
    for t in range(6):
        spoiled = np.concatenate([cache, cache])
        spoiled[66 + t + 1:] = np.nan
        same(f"token {t}", attend(ResidentMatrix(kv_b), q[t:t + 1], spoiled, 66 + t, 10), whole[t:t + 1])


def test_only_its_own_cache_rows_are_written():
    cache = np.full((16, 20), 7, np.float32)
    cache[:5] = run([5])[1][:5]
    before = cache.copy()
    mla_layer(weights(), F["x"][5:8], cache, 5, **DIMS)
    same("rows before", cache[:5], before[:5])
    same("rows after", cache[8:], before[8:])
    assert (cache[5:8] != 7).all()


def test_a_nan_is_not_swallowed():
    "A bad query is told of at its own head and token; a bad cache row at the first token that sees it."
    kv_b, q, cache = case(5, 12, 4, 10, 40, 6, 66)
    q[2, 3, 5] = np.nan
    with pytest.raises(NotFinite, match="output row 30 is nan for token 2") as caught:
        attend(ResidentMatrix(kv_b), q, cache, 66, 10)
    assert caught.value.rows == (3 * 22, 4 * 22)
    q[2, 3, 5] = 0
    cache[69, -1] = np.nan  # an extra dim: in the score, not in the context
    with pytest.raises(NotFinite, match="output row 0 is nan for token 3"):
        attend(ResidentMatrix(kv_b), q, cache, 66, 10)


def test_every_weight_is_taken_once_and_in_order():
    class Watched(dict):
        taken = []

        def __getitem__(self, name):
            self.taken.append(name)
            return super().__getitem__(name)

    W = Watched(weights())
    mla_layer(W, F["x"], np.zeros((12, 20), np.float32), 0, **DIMS)
    assert tuple(W.taken) == MLA_ORDER


def test_scratch_does_not_grow_with_context_or_chunk():
    "64 tokens x 8 heads x 2,000 positions are 4 MB of scores; none of them are kept."
    peaks = []
    for T, pos in ((8, 100), (8, 2000), (64, 2000)):
        kv_b, q, cache = case(8, 8, 8, 8, 32, T, pos)
        attend(ResidentMatrix(kv_b), q, cache, pos, 8)
        tracemalloc.start()
        attend(ResidentMatrix(kv_b), q, cache, pos, 8)
        peaks.append(tracemalloc.get_traced_memory()[1] - T * 8 * 8 * 4)  # the result itself
        tracemalloc.stop()
    assert max(peaks) < 200_000 and max(peaks) - min(peaks) < 20_000, f"peaks {peaks} bytes"


# Bad input

def test_a_full_cache_is_refused():
    with pytest.raises(ValueError, match="positions 10 to 12 do not fit a cache of 12"):
        mla_layer(weights(), F["x"][:3], np.zeros((12, 20), np.float32), 10, **DIMS)


@pytest.mark.parametrize("change", [dict(v=9), dict(pos=2), dict(rows=21), dict(width=5), dict(heads=4)], ids=str)
def test_shapes_that_do_not_fit_are_refused(change):
    rows, width, heads = change.get("rows", 22), change.get("width", 20), change.get("heads", 3)
    with pytest.raises(ValueError, match="do not fit"):
        attend(ResidentMatrix(np.zeros((3 * rows, 16), np.float32)), np.zeros((1, heads, 16), np.float32), np.zeros((2, width), np.float32),
               change.get("pos", 1), change.get("v", 10))


def test_half_a_head_is_refused():
    class Torn(ResidentMatrix):
        def blocks(self, multiple=1):
            yield 0, self.array[:30]
            yield 30, self.array[30:]

    with pytest.raises(ValueError, match="has 30 rows, expected whole heads of 22"):
        attend(Torn(np.zeros((66, 16), np.float32)), np.zeros((1, 3, 16), np.float32), np.zeros((2, 20), np.float32), 0, 10)
