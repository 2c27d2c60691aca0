"""RMSNorm and the three curves: hand values, fixtures, errors in ulp, and digests that were written down once."""
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, digest, distance
from numba import njit
from safetensors.numpy import load_file
from twin import case, numbers, twin

from k3lib.functions import exp, rms_norm, sigmoid, tanh

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
    centred = x - x.mean(-1, keepdims=True)
    assert distance(centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight, y) > 1000 * TOLERANCE
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
    spacing = np.spacing(np.maximum(np.abs(right).astype(np.float32), np.float32(2.0**-126)))
    return np.where(finite, np.abs(got - right), 0) / spacing


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


def contract(threads):
    "Digests that are the same on every CPU (test_contract.py); nothing here uses threads."
    found = {}
    for n, k, tokens in ((1, 1, 1), (6, 17, 3), (19, 48, 4), (67, 333, 7), (130, 100, 9)):
        _, x, weight = case(n, k, tokens)
        for eps in (1e-5, 1e-6):
            found[f"rms_norm {k} {tokens} {eps}"] = digest(rms_norm(x * np.float32(2**-12), weight, eps))[:16]
    x = np.arange(0, 2**32, 65521).astype(np.uint32).view(np.float32)
    x = np.concatenate([x[~np.isnan(x)], (np.arange(-20000, 20001) / 1000).astype(np.float32)])
    return found | {name: digest(y)[:16] for name, y in zip(("exp", "sigmoid", "tanh"), curves(x))}


WRITTEN_DOWN = dict(line.rsplit(" ", 1) for line in """
rms_norm 1 1 1e-05 03d305a6b9fec447
rms_norm 1 1 1e-06 f1ce2a1e0f5462c9
rms_norm 17 3 1e-05 143f4009ca94c16a
rms_norm 17 3 1e-06 614f83012f2f936c
rms_norm 48 4 1e-05 08f7b31a4e27f136
rms_norm 48 4 1e-06 35ff4b570962abfa
rms_norm 333 7 1e-05 a573df0a452985d8
rms_norm 333 7 1e-06 9ed63fc0d3edc961
rms_norm 100 9 1e-05 70e1fb0ff03165ad
rms_norm 100 9 1e-06 4602209d2c9a53ca
exp 3b3551b116e91aea
sigmoid 7f59ecc40a8b5534
tanh 7c218b1393339031
""".strip().splitlines())


def test_what_does_not_fit_is_refused():
    x, weight = np.ones((2, 40), np.float32), np.ones(40, np.float32)
    for args in ((x, weight[:3], 1e-5), (x, weight, 1e-5, np.zeros((1, 40), np.float32))):
        with pytest.raises(ValueError, match="rms_norm: x .* do not fit"):
            rms_norm(*args)
