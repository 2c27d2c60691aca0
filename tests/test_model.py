"k3lib.model: the order of weights and experts, what a sequence carries, what a failed pass leaves, which one is named."
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from common import MODEL, ORACLE, close, same, within
from safetensors.numpy import load_file

from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.matmul import NotFinite, ResidentMatrix, bf16_to_float32
from k3lib.mla import LATENT_EPS
from k3lib.model import Model, PassWeights, ResidualStream, Sequence, kda_shape, mla_shape, moe_shape
from k3lib.moe import Expert
from k3lib.residual import mix
from k3lib.tensors import EMBED, FINAL, HEAD, TABLE, expert_name, forward_order, is_matrix, tensor_name

CONFIG, CHECKPOINT = read_config(MODEL), Checkpoint(MODEL)
EXPECTED = load_file(ORACLE / "expected.safetensors")
IDS = EXPECTED["prompt_ids"].tolist()
EMBEDDING = bf16_to_float32(CHECKPOINT.raw(EMBED))
LOGITS = 4e-3  # what the fixture's README allows a float32 implementation


class Weights(dict):
    "The embedded model's weights in memory. `taken`: the names that were asked for, in order."

    def __init__(self):
        super().__init__({name: self.read(name) for name in forward_order(CONFIG)})
        self.taken = []

    def read(self, name):
        array = CHECKPOINT.raw(name)
        if is_matrix(name, CHECKPOINT.extent(name)):
            return ResidentMatrix(array)
        array = bf16_to_float32(array) if array.dtype == np.uint16 else array
        return array.reshape(-1) if array.ndim == 2 else array

    def __call__(self, name):
        self.taken.append(name)
        return self[name]


class Experts:
    "The embedded model's routed experts in memory. `events`: (what, layer) of every call, in order."

    def __init__(self):
        self.read, self.events = {}, []

    def layer(self, L):
        return OfLayer(self, L)

    def expert(self, L, e):
        if (L, e) not in self.read:
            arrays = [CHECKPOINT.raw(expert_name(L, e, row.short)) for row in TABLE["expert"]]
            self.read[L, e] = Expert.packed(arrays)
        return self.read[L, e]


class OfLayer:
    def __init__(self, experts, L):
        self.experts, self.L = experts, L

    def request(self, ids):
        self.ids = ids
        self.experts.events.append(("request", self.L))

    def map(self, work, threads):
        self.experts.events.append(("map", self.L))
        for e in self.ids:
            work(e, self.experts.expert(self.L, e))


@pytest.fixture(scope="module")
def loaded():
    return Weights(), Experts()


@pytest.fixture
def model(loaded):
    weights, experts = loaded
    weights.taken, experts.events = [], []
    return Model(CONFIG, EMBEDDING.__getitem__, weights, experts, threads=1)


def sequence():
    return Sequence(CONFIG, context=32)


# The order

def test_a_pass_takes_every_weight_once_in_the_order_of_the_table(model, loaded):
    model.forward(IDS[:2], sequence(), wanted=1)
    assert loaded[0].taken == list(forward_order(CONFIG))
    moe_layers = range(CONFIG.first_k_dense_replace, CONFIG.num_hidden_layers)
    assert loaded[1].events == [(what, L) for L in moe_layers for what in ("request", "map")]


def test_a_pass_without_logits_ends_before_the_head(model, loaded):
    logits = model.forward(IDS[:2], sequence(), wanted=0)
    assert logits.shape == (0, CONFIG.vocab_size) and logits.dtype == np.float32
    assert loaded[0].taken == [name for name in forward_order(CONFIG) if name != HEAD]


def test_what_is_watched_and_when(model):
    seen = []
    model.forward(IDS[:3], sequence(), wanted=0, watch=lambda *what: seen.append(what))
    layers = [(name, L) for L in range(CONFIG.num_hidden_layers) for name in ("router", "hidden")
              if name == "hidden" or not CONFIG.is_dense(L)]
    assert [what[:2] for what in seen] == layers + [("blocks", None), ("mix", None), ("norm", None)]
    for name, _, value in seen:
        if name == "router":
            assert value[0].shape == value[1].shape == (3, CONFIG.num_experts_per_token)
        else:
            assert value.shape[-2:] == (3, CONFIG.hidden_size)


# The answer

def test_logits_of_the_fixture_and_their_bytes_in_any_cut(model):
    whole = model.forward(IDS, sequence(), wanted=len(IDS))
    within("logits", whole, EXPECTED["logits_full"][:len(IDS)], LOGITS)
    for size in (1, 5):
        parts, state = [], sequence()
        for at in range(0, len(IDS), size):
            chunk = IDS[at:at + size]
            parts.append(model.forward(chunk, state, wanted=len(chunk)))
        same(f"chunks of {size}", np.concatenate(parts), whole)
        assert state.position == len(IDS) and state.complete
    same("the last two alone", model.forward(IDS, sequence(), wanted=2), whole[-2:])


def test_any_number_of_threads_gives_the_same_bytes(model, loaded, all_threads):
    two = Model(CONFIG, EMBEDDING.__getitem__, *loaded, threads=2)
    same("logits", two.forward(IDS, sequence(), wanted=12), model.forward(IDS, sequence(), wanted=12))


def test_two_sequences_of_one_model_share_nothing(model):
    a, b = sequence(), sequence()
    model.forward(IDS[:4], a, wanted=0)
    model.forward(IDS[6:9], b, wanted=0)
    alone = sequence()
    model.forward(IDS[:4], alone, wanted=0)
    same("logits", model.forward(IDS[4:5], a, wanted=1), model.forward(IDS[4:5], alone, wanted=1))


# What a sequence carries

def states(of):
    "All arrays of a sequence."
    return [array for layer in of.layers for array in (layer if isinstance(layer, tuple) else (layer,))]


def test_a_sequence_is_a_state_or_a_cache_for_each_layer():
    empty = Sequence(CONFIG, context=7)
    assert len(empty.layers) == CONFIG.num_hidden_layers
    for L, layer in enumerate(empty.layers):
        if CONFIG.layer_kind(L) == "kda":
            assert layer.S.shape == (4, 32, 32) and layer.conv.shape == (3, 128, 3)
        else:
            assert layer.shape == (7, CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim)
    assert all(array.dtype == np.float32 and not array.any() for array in states(empty))
    assert (empty.position, empty.context, empty.complete) == (0, 7, True)


def test_reset_is_a_new_sequence(model):
    used = sequence()
    first = model.forward(IDS[:5], used, wanted=1)
    assert all(array.any() for array in states(used))
    used.reset()
    assert used.position == 0 and used.complete and not any(array.any() for array in states(used))
    same("logits", model.forward(IDS[:5], used, wanted=1), first)


def test_reset_gives_the_old_arrays_back_before_it_makes_new_ones():
    used = Sequence(CONFIG, context=4096)
    size = sum(array.nbytes for array in states(used))
    tracemalloc.start()
    used.reset()  # what is traced from here on: the new arrays
    traced = tracemalloc.get_traced_memory()[0]
    used.reset()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size <= traced < 1.1 * size and peak < 1.1 * size, f"peak {peak}, one set is {size} bytes"


@pytest.mark.parametrize("after", [0, 5, 40, 200])
def test_a_pass_that_fails_leaves_an_incomplete_sequence(model, loaded, after):
    "Whatever the moment: an error while the weight number `after` is taken."
    state = sequence()
    model.forward(IDS[:3], state, wanted=0)

    def weight(name):
        if len(loaded[0].taken) == after:
            raise KeyboardInterrupt
        return loaded[0](name)

    loaded[0].taken = []
    with pytest.raises(KeyboardInterrupt):
        Model(CONFIG, EMBEDDING.__getitem__, weight, loaded[1], 1).forward(IDS[3:5], state, wanted=1)
    assert not state.complete and state.position == 3
    state.reset()
    assert state.complete and state.position == 0


# Which weight

@pytest.mark.parametrize("part, short, L", [("kda", "k_proj", 4), ("mla", "kv_b_proj", 3), ("dense", "down_proj", 0),
                                            ("moe", "shared_experts.up_proj", 7)])
def test_a_number_that_is_not_finite_is_named(model, loaded, monkeypatch, part, short, L):
    name = tensor_name(L, part, short)
    damaged = loaded[0][name].array.copy()
    damaged[2, 1] = 0x7F80  # infinity in bf16
    monkeypatch.setitem(loaded[0], name, ResidentMatrix(damaged))
    with pytest.raises(NotFinite) as caught:
        model.forward(IDS[:2], sequence(), wanted=1)
    first, end = caught.value.rows
    assert caught.value.tensor == name and first <= 2 < end and caught.value.matrix is None


def test_an_expert_that_is_not_finite_is_named_by_layer_id_and_matrix(model, loaded, monkeypatch):
    chosen = {}
    model.forward(IDS[:2], sequence(), wanted=0, watch=lambda name, L, value: chosen.setdefault(L, value))
    L, e = 5, int(chosen[5][0][1, 0])
    good = loaded[1].expert(L, e)
    scale = good.w2.scale.copy()
    scale[3, 0] = 255
    monkeypatch.setitem(loaded[1].read, (L, e), good._replace(w2=good.w2._replace(scale=scale)))
    with pytest.raises(NotFinite) as caught:
        model.forward(IDS[:2], sequence(), wanted=1)
    assert caught.value.matrix == (e, "w2") and caught.value.rows == (3, 4)
    assert f".layers.{L}." in caught.value.tensor


def test_part_weights_ask_by_full_name_and_the_last_name_is_known():
    asked = []
    weights = PassWeights(lambda name: asked.append(name) or name.upper())
    assert weights.last == ""
    part = weights.part(3, "mla")
    assert [part["q_a_proj"], part["o_proj"]] == [tensor_name(3, "mla", n).upper() for n in ("q_a_proj", "o_proj")]
    assert weights.take(HEAD) == HEAD.upper() and weights.last == HEAD
    assert asked == [tensor_name(3, "mla", "q_a_proj"), tensor_name(3, "mla", "o_proj"), HEAD]


# The residual stream

def test_the_residual_stream_counts_blocks_and_mixes_what_is_finished():
    stream = ResidualStream(2, CONFIG)
    assert stream.sources.shape == (6, 2, CONFIG.hidden_size)  # thirteen layers in blocks of three, and the running sum
    rng = np.random.default_rng(1)
    first, second = rng.standard_normal((2, 2, CONFIG.hidden_size)).astype(np.float32)
    norm, proj = rng.standard_normal((2, CONFIG.hidden_size)).astype(np.float32)
    stream.sources[:] = np.nan  # what is not yet written must not be read
    stream.sources[0] = first
    same("the embedding alone", stream.mixed(norm, proj), first)
    stream.end_block(second)
    stream.running_sum[:] += first
    assert stream.n == 1
    same("the running sum", stream.running_sum, second + first)
    expected = mix(np.stack([first, second + first]), 2, norm, proj, CONFIG.rms_norm_eps, np.empty_like(first))
    same("two sources", stream.mixed(norm, proj), expected)


# The numbers of the layers

def test_shapes_are_read_from_the_config():
    "Every field has a number of its own, so that none can stand for another."
    config = replace(CONFIG, kda_num_heads=2, kda_head_dim=3, kda_conv_kernel=4, kda_gate_lower_bound=-5.0,
                     num_attention_heads=6, qk_nope_head_dim=7, qk_rope_head_dim=8, v_head_dim=9, kv_lora_rank=10,
                     num_experts_per_token=11, routed_scaling_factor=12.0, activation_situ_beta=13.0,
                     activation_situ_linear_beta=14.0, rms_norm_eps=0.15)
    assert kda_shape(config)._asdict() == dict(heads=2, head_dim=3, conv_kernel=4, lower_bound=-5.0, eps=0.15)
    mla = mla_shape(config)
    assert mla._asdict() == dict(heads=6, nope=7, rope=8, v_dim=9, latent=10, latent_eps=LATENT_EPS)
    assert mla.cache_width == 18
    assert moe_shape(config)._asdict() == dict(top_k=11, scale=12.0, situ=(13.0, 14.0), eps=0.15)
    assert moe_shape(config).situ._asdict() == dict(beta=13.0, linear_beta=14.0)


def test_the_final_norms_are_taken_by_name(model, loaded):
    "Mix and norm after the last layer, from what is watched, in float64."
    seen = {}
    model.forward(IDS, sequence(), wanted=0,
                  watch=lambda name, L, value: seen.update({name: np.array(value)}) if name != "router" else None)
    norm, proj, last = (loaded[0][name].astype(np.float64) for name in FINAL)
    sources = np.concatenate([seen["blocks"], seen["hidden"][None]]).astype(np.float64)
    score = (sources / np.sqrt((sources**2).mean(-1, keepdims=True) + 1e-5) * norm * proj).sum(-1)
    weights = np.exp(score - score.max(0)) / np.exp(score - score.max(0)).sum(0)
    h = (weights[..., None] * sources).sum(0)
    close("mix", seen["mix"], h)
    close("norm", seen["norm"], h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-5) * last)
