"k3lib.router: the choice, the weights, ties, independence of the cut, what is refused, and which wrong routers the fixture rejects."
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, close
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from k3lib.functions import sigmoid
from k3lib.router import route

FIXTURE = load_file(FIXTURES / "ops" / "router.safetensors")
LOGITS, BIAS, IDS = FIXTURE["logits"], FIXTURE["bias"], FIXTURE["ids"]


def by_id(ids, weights):
    order = np.argsort(ids, 1)
    return np.take_along_axis(ids, order, 1), np.take_along_axis(weights, order, 1)


def logits_of(scores):
    s = np.array(scores, np.float64)
    return np.log(s / (1 - s)).astype(np.float32)


def test_by_hand():
    "The two best scores lose to the bias; the weights know nothing of it; the tie for third goes to the lower id."
    logits, bias = logits_of([[.5, .75, .25, .75]]), np.array([.3, 0, .6, 0], np.float32)
    ids, weights = route(logits, bias, 2, 1.0)
    assert ids.tolist() == [[2, 0]] and ids.dtype == np.int32 and weights.dtype == np.float32
    close("weights", weights, np.array([[1 / 3, 2 / 3]]), 1e-6)
    ids, weights = route(logits, bias, 3, 3.0)
    assert ids.tolist() == [[2, 0, 1]]
    close("weights of three, scale 3", weights, np.array([[.5, 1., 1.5]]), 1e-6)


@pytest.mark.parametrize("scale, name", [(1.0, "weights"), (2.5, "weights_scaled_2_5")])
def test_fixture(scale, name):
    ids, weights = by_id(*route(LOGITS, BIAS, 16, scale))
    assert np.array_equal(ids, IDS), f"ids differ in rows {np.flatnonzero((ids != IDS).any(1))}"
    close(name, weights, FIXTURE[name])


def test_ties_go_to_the_lower_id():
    ids, weights = route(np.zeros((1, 40), np.float32), np.zeros(40, np.float32), 5, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    close("weights", weights, np.full((1, 5), .2))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(0, 2**32 - 1), st.data())
def test_is_a_stable_sort(E, seed, data):
    "Whatever E and k: rank order is a stable sort of the float32 s + bias. Coarse logits make ties common."
    k, rng = data.draw(st.integers(1, E)), np.random.default_rng(seed)
    logits = rng.integers(-4, 5, (3, E)).astype(np.float32)
    bias = rng.integers(-2, 3, E).astype(np.float32) / np.float32(4)
    ids, weights = route(logits, bias, k, 2.0)
    s = np.array([[sigmoid(x) for x in row] for row in logits], np.float32)
    assert np.array_equal(ids, np.argsort(-(s + bias), axis=1, kind="stable")[:, :k])
    chosen = np.take_along_axis(s, ids, 1).astype(np.float64)
    close("weights", weights, 2 * chosen / chosen.sum(1, keepdims=True))


def test_any_cut_of_the_tokens_gives_the_same_bytes():
    whole = route(LOGITS, BIAS, 16, 1.0)
    for size in (1, 5, 23):
        parts = [route(LOGITS[t:t + size], BIAS, 16, 1.0) for t in range(0, len(LOGITS), size)]
        for name, a, b in zip(("ids", "weights"), whole, zip(*parts)):
            assert a.tobytes() == np.concatenate(b).tobytes(), f"{name} differ when cut into {size}"


def test_the_bias_never_reaches_the_weights():
    "When every expert is chosen the bias can only change their order."
    plain = by_id(*route(LOGITS[:, :16].copy(), np.zeros(16, np.float32), 16, 1.0))[1]
    close("weights", by_id(*route(LOGITS[:, :16].copy(), BIAS[:16] * np.float32(9), 16, 1.0))[1], plain, 1e-6)


def test_extremes():
    "Scores of exactly 0 and 1; a sum of 0 gives weights of 0, not NaN."
    bias = np.zeros(4, np.float32)
    ids, weights = route(np.array([[-3e38, 3e38, -3e38, 3e38], [-200, -200, -200, -200]], np.float32), bias, 3, 1.0)
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2]]
    assert weights.tolist() == [[.5, .5, 0], [0, 0, 0]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_refuses_what_is_not_finite(value):
    logits, bias = LOGITS.copy(), BIAS.copy()
    logits[3, 700] = value
    with pytest.raises(ValueError, match=f"token row 3: expert 700 has {value}"):
        route(logits, BIAS, 16, 1.0)
    bias[5] = value
    with pytest.raises(ValueError, match=f"bias.* expert 5 has {value}"):
        route(LOGITS, bias, 16, 1.0)


@pytest.mark.parametrize("experts, k", [(895, 16), (896, 0), (896, 897)])
def test_refuses_what_does_not_fit(experts, k):
    with pytest.raises(ValueError, match="do not fit"):
        route(LOGITS, BIAS[:experts], k, 1.0)


def wrong(choose_by, weigh_by, renormalise=True, low_id_first=True):
    ids = np.argsort(-(choose_by if low_id_first else choose_by[:, ::-1]), axis=1, kind="stable")[:, :16]
    ids = ids if low_id_first else 895 - ids
    weights = np.take_along_axis(weigh_by, ids, 1)
    return ids, weights / weights.sum(1, keepdims=True) if renormalise else weights


def wrong_routers():
    x, b = LOGITS.astype(np.float64), BIAS.astype(np.float64)
    s, soft = 1 / (1 + np.exp(-x)), np.exp(x) / np.exp(x).sum(1, keepdims=True)
    return {
        "bias left in the weights": wrong(s + b, s + b),
        "bias ignored": wrong(s, s),
        "bias added to the logit": wrong(1 / (1 + np.exp(-x - b)), s),
        "softmax scores": wrong(soft + b, soft),
        "not renormalised": wrong(s + b, s, renormalise=False),
        "ties to the higher id": wrong(s + b, s, low_id_first=False),
    }


def dense(ids, weights):
    out = np.zeros((len(ids), 896))
    np.put_along_axis(out, ids, weights, 1)
    return out


def test_dense_weights():
    close("dense weights", dense(*route(LOGITS, BIAS, 16, 1.0)), FIXTURE["dense_weights"])


@pytest.mark.parametrize("name", wrong_routers())
def test_the_fixture_rejects(name):
    "Each wrong router is off by at least a thousand tolerances."
    with pytest.raises(AssertionError, match="largest difference"):
        close(name, dense(*wrong_routers()[name]), FIXTURE["dense_weights"], 1000 * TOLERANCE)
