"k3lib.residual: the mix by hand, by fixture, by what it must not depend on; blocks against float64 and another engine."
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, close, digest, distance, same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from k3lib.checkpoint import Checkpoint
from k3lib.matmul import NotFinite
from k3lib.residual import depth_weights, mix
from k3lib.tensors import FINAL

F = load_file(FIXTURES / "ops/attn_res.safetensors")
SOURCES, NORM, PROJ, HOT = F["sources"], F["norm_weight"], F["proj"], F["proj_hot"]
EPS = 1e-5


def mixed(sources, n, norm=NORM, proj=PROJ, eps=EPS):
    return mix(sources, n, norm, proj, eps, np.empty(sources.shape[1:], np.float32))


def f32(*rows):
    return np.array(rows, np.float32)


# By hand

TWO = f32([[1, 1]], [[7, 1]])
THREE = f32(2.5 * np.log(3), 0)


def test_two_sources_by_hand():
    "Normed they are (1, 1) and (1.4, 0.2): weights 1/4 and 3/4 of the raw ones."
    close("weights", depth_weights(TWO, 2, f32(1, 1), THREE, 0.0), [[.25], [.75]], 1e-6)
    close("mix", mixed(TWO, 2, f32(1, 1), THREE, 0.0), [[5.5, 1]], 1e-6)


def test_a_loud_source_keeps_its_weight():
    loud = TWO * f32(1, 10).reshape(2, 1, 1)
    close("mix", mixed(loud, 2, f32(1, 1), THREE, 0.0), [[52.75, 7.75]], 1e-6)


def test_norm_weight_is_in_the_score_and_not_in_the_values():
    "Half the projection times twice the norm weight is the same score."
    same("mix", mixed(TWO, 2, f32(2, 2), THREE / 2, 0.0), mixed(TWO, 2, f32(1, 1), THREE, 0.0))


def test_epsilon_is_inside_the_root():
    "A source of rms 1 with eps 3: its score is half of what it was."
    sources = f32([[1, 1]], [[0, 0]])
    close("weights", depth_weights(sources, 2, f32(1, 1), f32(2 * np.log(3), 0), 3.0), [[.75], [.25]], 1e-6)


# Fixture and traps

@pytest.mark.parametrize("n", range(1, 10))
def test_fixture(n):
    close(f"out_{n}", mixed(SOURCES, n), F[f"out_{n}"])
    close(f"weights_{n}", depth_weights(SOURCES, n, NORM, PROJ, EPS), F[f"weights_{n}"])


def test_hot_scores():
    close("out_hot", mixed(SOURCES, 9, proj=HOT), F["out_hot"])
    close("weights_hot", depth_weights(SOURCES, 9, NORM, HOT, EPS), F["weights_hot"])


def test_faint_weights_are_exactly_zero():
    "None may be subnormal: a multiply-add that meets one is slow."
    sources = np.repeat(f32([[1]], [[-1]]), 4, 2)
    for below, wanted in ((58, True), (62, False), (100, False)):
        w = depth_weights(sources, 2, np.ones(4, np.float32), f32(*[below / 8] * 4), 0.0)
        assert (w[1, 0] > 0) == wanted and w[0, 0] == 1


def test_scores_of_a_million_choose_one_source():
    sources, hot = f32([[1] * 20], [[-1] * 20]), np.full(20, 5e4, np.float32)
    assert depth_weights(sources, 2, np.ones(20, np.float32), hot, EPS).tolist() == [[1], [0]]
    same("mix", mixed(sources, 2, np.ones(20, np.float32), hot), sources[0])


def test_sources_of_zero_share_evenly():
    close("weights", depth_weights(np.zeros((4, 2, 64), np.float32), 4, NORM, HOT, EPS), np.full((4, 2), .25))


def softmax64(s):
    e = np.exp(s - s.max(0))
    return e / e.sum(0)


def rms64(x, eps=EPS):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def careless(s):
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(s.astype(np.float32))
        return e / e.sum(0)


def mix64(sources, norm=NORM, proj=PROJ, scores=None, values=lambda b: b, weigh=softmax64):
    b = np.asarray(sources, np.float64)
    s = (rms64(b) * norm if scores is None else scores(b)) * proj
    return (weigh(s.sum(-1))[..., None] * values(b)).sum(0)


WRONG = {
    "values normed": dict(values=rms64), "raw scores": dict(scores=lambda b: b * NORM),
    "no norm weight": dict(scores=rms64), "eps 1e-6": dict(scores=lambda b: rms64(b, 1e-6) * NORM),
    "mean": dict(weigh=lambda s: np.full(s.shape, 1 / len(s))),
    "sum": dict(weigh=np.ones_like), "no maximum": dict(weigh=careless)}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_gate_rejects(wrong):
    far = [distance(mix64(SOURCES[:n], **WRONG[wrong]), F[f"out_{n}"]) for n in range(2, 10)]
    far.append(distance(mix64(SOURCES, proj=HOT, **WRONG[wrong]), F["out_hot"]))
    assert max(far) > 1000 * TOLERANCE, far


def test_the_reference_here_is_the_fixture():
    close("float64", mix64(SOURCES), F["out_9"])


# What it must not depend on

def test_one_source_is_itself():
    same("one source", mixed(SOURCES, 1), SOURCES[0])


def test_sources_behind_n_are_not_read():
    spoiled = SOURCES.copy()
    spoiled[4:] = np.nan
    same("four of nine", mixed(spoiled, 4), mixed(SOURCES, 4))


def test_sources_are_left_alone():
    kept = SOURCES.copy()
    mixed(kept, 9)
    same("sources", kept, SOURCES)


def test_tokens_do_not_see_each_other():
    whole = mixed(SOURCES, 9)
    for first, last in ((0, 1), (1, 2), (4, 5), (1, 4)):
        same(f"tokens {first} to {last}", mixed(np.ascontiguousarray(SOURCES[:, first:last]), 9), whole[first:last])


@pytest.mark.parametrize("width", [1, 15, 16, 50, 200])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_any_cut_of_any_width(width, size):
    sources, norm, proj = (np.random.default_rng(width).normal(size=shape).astype(np.float32)
                           for shape in ((5, 11, width), width, width))
    parts = [mixed(np.ascontiguousarray(sources[:, t:t + size]), 5, norm, proj) for t in range(0, 11, size)]
    same(f"chunks of {size}", np.concatenate(parts), mixed(sources, 5, norm, proj))


def contract(threads):
    "Digests that are the same on every CPU (test_contract.py): a mix of seven sources."
    sources, norm, proj = (np.random.default_rng(3).normal(size=shape).astype(np.float32)
                           for shape in ((7, 3, 100), 100, 100))
    return {"mix, 7 sources": digest(mixed(sources, 7, norm, proj))}


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 3), st.integers(1, 70), st.integers(0, 9), st.integers(-12, 12))
def test_any_shape(n, T, H, behind, power):
    rng = np.random.default_rng(n + 10 * T + 100 * H)
    sources, norm, proj = (rng.normal(size=shape).astype(np.float32) for shape in ((n + behind, T, H), H, H))
    expected = mix64(sources[:n], norm, proj)
    cancelled = np.abs(sources[:n]).max() / np.abs(expected).max()  # the error of a sum is that of its terms
    close("mix", mixed(sources, n, norm, proj), expected, TOLERANCE * cancelled)
    weights = depth_weights(sources, n, norm, proj, 0.0)
    assert np.allclose(weights.sum(0), 1, atol=1e-6)
    sources[n - 1] *= np.float32(2) ** power
    same("weights of a source times a power of two", depth_weights(sources, n, norm, proj, 0.0), weights)


def test_a_nan_is_not_swallowed():
    spoiled = SOURCES.copy()
    for value in (np.nan, np.inf, 1e25):
        spoiled[3, 2, 7] = value
        with pytest.raises(NotFinite, match="source 3 of 9"):
            mixed(spoiled, 9)


# Bad input

@pytest.mark.parametrize("out", [SOURCES[8], SOURCES[0], SOURCES.reshape(-1)[7:7 + 320].reshape(5, 64)],
                         ids=["last", "first", "askew"])
def test_out_may_not_be_a_source(out):
    before = SOURCES.copy()
    with pytest.raises(ValueError, match="out shares memory with sources"):
        mix(SOURCES, 9, NORM, PROJ, EPS, out)
    same("sources", SOURCES, before)


@pytest.mark.parametrize("n, norm, proj, out", [
    (0, 64, 64, (5, 64)), (-1, 64, 64, (5, 64)), (10, 64, 64, (5, 64)), (9, 63, 64, (5, 64)), (9, 64, 1, (5, 64)),
    (9, 64, 64, (1, 64))])
def test_shapes_that_do_not_fit_are_refused(n, norm, proj, out):
    with pytest.raises(ValueError, match="mix: "):
        mix(SOURCES, n, np.ones(norm, np.float32), np.ones(proj, np.float32), EPS, np.empty(out, np.float32))


# The forward pass

def test_the_final_mix_of_another_engine():
    "Five block sums and the running sum of oracle13, as mlx-lm left them."
    oracle, checkpoint = load_file(FIXTURES / "oracle13/expected.safetensors"), Checkpoint(FIXTURES / "oracle13/model")
    norm, proj = (checkpoint.tensor(name).reshape(-1) for name in FINAL[:2])
    sources = np.concatenate([oracle["residual_blocks"], oracle["hidden_after_layer"][12:]])
    close("hidden_output_mix", mixed(sources, 6, norm, proj), oracle["hidden_output_mix"])
    far = distance(oracle["hidden_after_layer"][12], oracle["hidden_output_mix"])
    assert far > .1, "a forward pass without the final mix would pass"


RNG = np.random.default_rng(7)
H, LAYERS, BLOCK = 32, 8, 3
PARTS = [(RNG.normal(0, H ** -.5, (H, H)), RNG.normal(0, H ** -.5, (H, H))) for _ in range(LAYERS)]
MIXES = [tuple(RNG.normal(0, .5, H).astype(np.float32) for _ in range(2)) for _ in range(2 * LAYERS + 1)]
EMBEDDING = RNG.normal(size=(4, H)).astype(np.float32)


def part(h, A):
    return 2 * np.tanh(rms64(np.asarray(h, np.float64)) @ A)


def forward64(clear=True, late=False, last=True, spoil=False):
    "A toy of eight layers in blocks of three, straight from the model's description."
    blocks, p = [], EMBEDDING.astype(np.float64)
    for L, (A, B) in enumerate(PARTS):
        y = part(mix64([*blocks, p], *MIXES[2 * L]) if blocks else p, A)
        if L % BLOCK == 0 and not late:
            blocks.append(p)
            p = y if clear else p + y
        else:
            p = p + y
        p = p + part(mix64([*blocks, p], *MIXES[2 * L + 1]), B)
        if late and L % BLOCK == 0:
            blocks.append(p)
            p = 0 * p
    sources = np.stack([*blocks, p])
    if spoil:
        weights = softmax64((rms64(sources) * MIXES[-1][0] * MIXES[-1][1]).sum(-1))[..., None]
        sources[-1] = weights[0] * sources[0]
        for s in range(1, len(sources)):
            sources[-1] += weights[s] * sources[s]
        return sources[-1]
    return mix64(sources, *MIXES[-1]) if last else p


def forward32():
    "The same with one array of sources, float32, and the exported mix."
    sources, h, n = np.full((5, *EMBEDDING.shape), np.nan, np.float32), np.empty_like(EMBEDDING), 0
    sources[0] = EMBEDDING
    for L, (A, B) in enumerate(PARTS):
        y = part(mix(sources, n + 1, *MIXES[2 * L], EPS, h) if n else sources[0], A)
        n, restart = n + (L % BLOCK == 0), L % BLOCK == 0
        sources[n] = y if restart else sources[n] + y
        sources[n] += part(mix(sources, n + 1, *MIXES[2 * L + 1], EPS, h), B).astype(np.float32)
    return mix(sources, n + 1, *MIXES[-1], EPS, h)


def test_the_forward_pass_on_the_exported_mix():
    close("final mix", forward32(), forward64())


@pytest.mark.parametrize("wrong", [dict(clear=False), dict(late=True), dict(last=False), dict(spoil=True)], ids=str)
def test_wrong_forward_passes_are_outside_the_gate(wrong):
    "Sum not restarted, block finished late, no final mix, final mix over its own running sum."
    assert distance(forward64(**wrong), forward64()) > 1000 * TOLERANCE
