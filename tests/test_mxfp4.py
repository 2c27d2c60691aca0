"""MXFP4, the format: by hand, and from a fixture that another library computed in float64."""
import numpy as np
import pytest
from common import FIXTURES, TOLERANCE, distance
from safetensors.numpy import load_file

from k3lib import mxfp4
from k3lib.mxfp4 import E2M1, SCALE, decode


@pytest.fixture(scope="module")
def fixture():
    return {name: array.copy() for name, array in load_file(FIXTURES / "ops/mxfp4.safetensors").items()}


def test_a_code_is_a_small_float():
    for code in range(16):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        value = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        assert E2M1[code] == (-1) ** sign * value
        assert np.signbit(E2M1[code]) == bool(sign)


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
    assert np.isnan(SCALE[255])


def test_decode_keeps_leading_dimensions(fixture):
    packed, scale = fixture["matvec_packed"], fixture["matvec_scale"]
    assert decode(packed, scale).tobytes() == fixture["matvec_weight"].tobytes()
    cut = decode(packed.reshape(8, 8, -1), scale.reshape(8, 8, -1))
    assert np.array_equal(cut.reshape(64, -1), fixture["matvec_weight"])


def test_int4_codes_fail_the_gate(fixture, monkeypatch):
    monkeypatch.setattr(mxfp4, "E2M1", np.arange(-8, 8, dtype=np.float32))
    weight = decode(fixture["matvec_packed"], fixture["matvec_scale"])
    assert distance(weight @ fixture["x"], fixture["matvec_y"]) > 1000 * TOLERANCE
