"Damaged numbers: an infinity, a NaN or an E8M0 scale of 255 that is multiplied ends the run, and its place is named."
import contextlib
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from common import MODEL, least

import k3lib
from k3lib import plan
from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.fileio import CheckpointError
from k3lib.functions import rms_norm
from k3lib.kda import kda_decay, l2norm
from k3lib.matmul import NotFinite, PackedMatrix, ResidentMatrix, linear
from k3lib.mla import attend
from k3lib.moe import Expert, Situ, expert_mlp
from k3lib.residual import mix
from k3lib.tensors import EMBED, HEAD, expert_name, forward_order, is_matrix, tensor_name

TOKEN = 5
BAD = (np.inf, -np.inf, np.nan)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A copy of the embedded model, to damage and to repair."
    return Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("damage") / "model"))


@pytest.fixture(scope="module")
def checkpoint(folder):
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def streaming(folder):
    "A model that reads every matrix anew at every pass."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "first_fit", lambda sizes, nbytes: (frozenset(), 0))
        model = k3lib.load(folder, least(folder) + 1_000_000, context=32)
    yield model
    model.close()


@contextlib.contextmanager
def damaged(extent, at, data):
    "The bytes of element number `at` of a tensor replaced, and put back afterwards."
    when = Path(extent.file).stat()
    with open(extent.file, "r+b") as file:
        file.seek(extent.offset + at * len(data))
        good = file.read(len(data))
        file.seek(extent.offset + at * len(data))
        file.write(data)
        file.flush()
        os.utime(extent.file, ns=(when.st_atime_ns, when.st_mtime_ns))  # as if no program had written to it
        try:
            yield
        finally:
            file.seek(extent.offset + at * len(data))
            file.write(good)
            file.flush()
            os.utime(extent.file, ns=(when.st_atime_ns, when.st_mtime_ns))


def coded(value, dtype):
    bits = np.float32(value).tobytes()
    return bits[2:] if dtype == "BF16" else bits


def complaint(model):
    "What the model says within two passes: rows that were read ahead of the damage may still serve the first."
    with pytest.raises(CheckpointError) as caught:
        for _ in range(2):
            model.reset()
            model.prefill([TOKEN])
    return str(caught.value)


def one_of_each(checkpoint, config, wanted):
    "Names of the forward pass, one of each kind of tensor, from one layer after another."
    kinds = {}
    for name in forward_order(config):
        if is_matrix(name, checkpoint.extent(name)) == wanted:
            kinds.setdefault(re.sub(r"layers\.\d+\.", "", name), []).append(name)
    return [names[i % len(names)] for i, names in enumerate(kinds.values())]


def test_a_number_in_any_matrix(streaming, checkpoint):
    rng = np.random.default_rng(0)
    names = one_of_each(checkpoint, streaming.config, True)
    assert len(names) == 22
    for name in names:
        e = checkpoint.extent(name)
        for value in BAD:
            row, column = (int(rng.integers(n)) for n in e.shape)
            with damaged(e, row * e.shape[1] + column, coded(value, e.dtype)):
                said = complaint(streaming)
            for word in (e.file, name + ",", f"row {row}, column {column}:", "finite", "damaged"):
                assert word in said, f"{word!r} is not in {said!r} for {value}"
    streaming.reset()
    assert np.isfinite(streaming.prefill([TOKEN])).all()


def test_a_number_in_any_vector_is_found_before_the_first_token(folder, checkpoint):
    names = one_of_each(checkpoint, read_config(folder), False)
    assert len(names) == 19
    for i, name in enumerate(names):
        e = checkpoint.extent(name)
        at = 1
        with damaged(e, at, coded(BAD[i % 3], e.dtype)), pytest.raises(CheckpointError) as caught:
            k3lib.load(folder, "1GB", context=4)
        assert e.file in str(caught.value) and f"{name}, row " in str(caught.value) and "damaged" in str(caught.value)


def test_a_pinned_matrix(folder, checkpoint):
    name = tensor_name(3, "mla", "o_proj")
    e = checkpoint.extent(name)
    with damaged(e, 7 * e.shape[1] + 3, coded(np.nan, "BF16")):
        model = k3lib.load(folder, "1GB", context=4)
        assert name in model.plan.pinned
        said = complaint(model)
        model.close()
    assert f"{e.file}: {name}, row 7, column 3: bfloat16 0x7fc0" in said


def routed(model, L):
    "The experts of layer L that the token goes to."
    found = {}

    def watch(what, layer, value):
        if what == "router":
            found[layer] = value[0][0].tolist()

    model.reset()
    model.forward([TOKEN], watch=watch)
    return found[L]


@pytest.mark.parametrize("ram", ["1GB", "least"])
def test_a_scale_of_255(folder, streaming, checkpoint, ram):
    for L, matrix in ((1, "w1"), (7, "w3"), (12, "w2")):
        # a model of its own for each: it may cache the damaged expert
        model = k3lib.load(folder, least(folder) + 1_000_000 if ram == "least" else ram, context=32)
        name = expert_name(L, routed(streaming, L)[0], f"{matrix}_scale")
        scale = checkpoint.extent(name)
        row, group = scale.shape[0] - 1, scale.shape[1] - 1
        with damaged(scale, row * scale.shape[1] + group, b"\xff"):
            said = complaint(model)
        model.close()
        assert f"{scale.file}: {name}, row {row}, column {group}: E8M0 scale 255" in said


def test_an_expert_that_is_not_chosen_and_a_row_that_is_not_read_harm_nobody(streaming, checkpoint):
    other = next(e for e in range(16) if e not in routed(streaming, 1))
    scale, embed = checkpoint.extent(expert_name(1, other, "w1_scale")), checkpoint.extent(EMBED)
    with damaged(scale, 0, b"\xff"), damaged(embed, (TOKEN + 1) * embed.shape[1], coded(np.nan, "BF16")):
        streaming.reset()
        assert np.isfinite(streaming.prefill([TOKEN])).all()


def test_an_embedding_row(streaming, checkpoint):
    e = checkpoint.extent(EMBED)
    with damaged(e, TOKEN * e.shape[1] + 9, coded(np.inf, "BF16")):
        assert f"{EMBED}, row {TOKEN}, column 9: bfloat16 0x7f80" in complaint(streaming)


@pytest.mark.parametrize("name, words", [
    (EMBED, ["layer 0, ", "input_layernorm.weight", "sum of squares"]),
    (tensor_name(3, "mla", "kv_b_proj"), ["layer 3, ", "self_attn.kv_b_proj.weight", "row"]),
    (tensor_name(2, "kda", "q_proj"), ["layer 2, "]),  # its squares, in the norm
    (HEAD, ["after the last layer", "lm_head.weight", "row"]),
])
def test_finite_numbers_whose_sum_is_not(streaming, checkpoint, name, words):
    e = checkpoint.extent(name)
    rows = np.full(e.shape[1], 0x60ad if name == EMBED else 0x7f7f, np.uint16)
    rows[::2] |= 0x8000 if name == HEAD else 0
    at = TOKEN if name == EMBED else e.shape[0] - 1
    with damaged(e, at, rows.tobytes()):
        said = complaint(streaming)
    for word in ("an activation overflows", "expected a finite number", *words):
        assert word in said, f"{word!r} is not in {said!r}"


# The kernels


@pytest.mark.parametrize("T", [1, 2, 4, 5])
def test_no_position_and_no_zero_hides_a_number_from_linear(T):
    for dtype in (np.float32, np.uint16):
        for k in (16, 37):
            for row in range(6):
                for value in BAD:
                    W = np.zeros((6, k), np.float32)
                    W[row, (5 * row + T) % k] = value
                    W = W if dtype == np.float32 else (W.view(np.uint32) >> 16).astype(np.uint16)
                    with pytest.raises(NotFinite) as caught:
                        linear(ResidentMatrix(W), np.zeros((T, k), np.float32))
                    assert caught.value.rows == (row, row + 1)


@pytest.mark.parametrize("T", [1, 2, 4, 5])
def test_a_scale_of_255_makes_nan_of_zeros(T):
    for row in range(6):
        for group in range(3):
            packed, scale = np.zeros((6, 48), np.uint8), np.full((6, 3), 127, np.uint8)
            scale[row, group] = 255
            out = np.empty((T, 6), np.float32)
            PackedMatrix(packed, scale).multiply(np.zeros((T, 96), np.float32), out, 1)
            assert np.isnan(out[:, row]).all() and np.isfinite(np.delete(out, row, 1)).all()


@pytest.mark.parametrize("which", ["w1", "w3", "w2"])
def test_an_expert_looks_before_the_nonlinearity(which):
    rng = np.random.default_rng(1)
    parts = {name: PackedMatrix(rng.integers(0, 256, (32, 16), np.uint8), np.full((32, 1), 120, np.uint8))
             for name in Expert._fields}
    parts[which].scale[9] = 255
    z = rng.standard_normal((3, 32)).astype(np.float32)
    with pytest.raises(NotFinite) as caught:
        expert_mlp(Expert(**parts), z, Situ(4, 25), np.empty_like(z))
    assert caught.value.matrix == which and caught.value.rows == (9, 10)


def test_what_a_norm_a_root_a_sigmoid_or_a_softmax_would_swallow():
    big, ones = np.full((2, 1, 32), 1e20, np.float32), np.ones(32, np.float32)
    for refused in (
        lambda: rms_norm(big[0], ones, 1e-5),
        lambda: l2norm(big),
        lambda: mix(big, 2, ones, ones, 1e-5, np.empty((1, 32), np.float32)),
        lambda: kda_decay(np.ones((1, 1, 32), np.float32), np.float32([200]), ones, -5.0),
        lambda: kda_decay(np.full((1, 1, 32), 3e38, np.float32), np.float32([1]), ones, -5.0),
    ):
        with pytest.raises(NotFinite):
            refused()


@pytest.mark.parametrize("sign", [1, -1])
def test_a_score_of_minus_infinity_is_no_weight_of_zero(sign):
    "Position 0 scores sign * infinity, position 1 zero: the softmax of it is finite."
    kv_b = np.zeros((8, 32), np.float32)
    kv_b[:4] = 1e20
    cache = np.zeros((2, 32), np.float32)
    cache[0] = sign * 1e19
    with pytest.raises(NotFinite) as caught:
        attend(ResidentMatrix(kv_b), np.ones((1, 1, 4), np.float32), cache, 1, 4, 1)
    assert caught.value.rows == (0, 8)
