"The table of tensors: against files that another program wrote, against the released sums, and against damaged files."
import json
import math
from dataclasses import replace
from itertools import groupby

import pytest
from common import FIXTURES, MODEL
from hypothesis import given
from hypothesis import strategies as st
from shards import NAMES

from k3lib import tensors as module
from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.fileio import CheckpointError
from k3lib.header import ITEMSIZE, header_bytes
from k3lib.tensors import (
    EMBED,
    EXPERT_TENSORS,
    FINAL,
    HEAD,
    TABLE,
    census_part,
    check_tensors,
    expert_name,
    families,
    forward_order,
    is_router,
    join_name,
    layer_of,
    layer_parts,
    layer_tensors,
    part_of,
    place_of,
    row_multiples,
    shape_fits,
    split_name,
    tensor_name,
    text_tensors,
    used_entries,
)

WIDTH = {"BF16": 2, "F32": 4, "U8": 1}
FEW_EXPERTS = replace(read_config(FIXTURES / "k3"), num_experts=20)  # the released shape without half a million names


# Names

@given(st.sets(NAMES, max_size=30))
def test_split_names_join_and_stay_distinct(names):
    splits = [split_name(name) for name in names]
    assert [join_name(*s) for s in splits] == list(names)
    assert len(set(splits)) == len(names)
    assert all(-1 <= n < 1_000_000 for s in splits for n in s[1:])  # so that both fit a key


ODD_PLACES = [
    ("language_model.model.layers.3.self_attn.kv_b_proj.weight", (3, -1, "kv_b_proj"), "trunk", "trunk"),
    ("language_model.model.layers.0.self_attn.A_log", (0, -1, "A_log"), "trunk", "trunk"),
    ("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (1, -1, "e_score_correction_bias"),
     "trunk", "trunk"),
    ("language_model.model.layers.92.block_sparse_moe.experts.895.w2.weight_scale", (92, 895, "w2_scale"), "experts",
     "experts"),
    ("language_model.model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", (1, -1, "shared_experts.up_proj"),
     "trunk", "trunk"),
    (EMBED, (-1, -1, "embed_tokens"), "other", "embed"),
    (HEAD, (-1, -1, "lm_head"), "other", "lm_head"),
    (FINAL[2], (-1, -1, "norm"), "other", "globals"),
    ("vision_tower.encoder.blocks.7.wo.weight", (-1, -1, "vision_tower.encoder.blocks.7.wo.weight"), "other",
     "vision_tower"),
    ("language_model.model.layers.1.new.weight", (-1, -1, "language_model.model.layers.1.new.weight"), "trunk",
     "trunk"),
    ("language_model.model.layers.#.q", (-1, -1, "language_model.model.layers.#.q"), "other", "other"),
    ("layers.3.w", (-1, -1, "layers.3.w"), "other", "other"),
]


@pytest.mark.parametrize("name, place, part, fine", ODD_PLACES)
def test_place_and_part_of_a_name(name, place, part, fine):
    assert place_of(name) == place and part_of(name) == part and census_part(split_name(name)[0]) == fine


def test_names_go_both_ways():
    "What the table calls a tensor leads back to its layer, expert and short name."
    c = read_config(MODEL)
    for L in range(c.num_hidden_layers):
        for part in ("attention_norms", "ffn_norms", *layer_parts(c, L)):
            for row in TABLE[part]:
                name = tensor_name(L, part, row.short)
                assert place_of(name) == (L, -1, row.short) and layer_of(name) == L
                assert "norms" not in part or tensor_name(L, "norms", row.short) == name
    for short, pattern in EXPERT_TENSORS.items():
        assert expert_name(92, 895, short) == join_name(pattern, 92, 895)
        assert place_of(expert_name(92, 895, short)) == (92, 895, short)
    assert layer_of(EMBED) is None and layer_of("vision_tower.encoder.blocks.7.wo.weight") is None
    for part, short in ("kda", "kv_b_proj"), ("mla", "q_projj"), ("expert", "w4"), ("nothing", "q_proj"):
        with pytest.raises(KeyError):
            tensor_name(0, part, short)


# The order of the forward pass

def test_the_order_holds_every_tensor_but_the_embedding_and_the_experts():
    for c in read_config(MODEL), FEW_EXPERTS:
        order = list(forward_order(c))
        everything = {name for name, _, _ in text_tensors(c)}
        assert len({*order}) == len(order) and {*order} <= everything
        assert {part_of(name) for name in everything - {*order} - {EMBED}} == {"experts"} and EMBED not in order
        layers = [layer_of(name) for name in order]
        assert layers == sorted(layers, key=lambda L: math.inf if L is None else L) and order[-4:] == [*FINAL, HEAD]
        moe = [name for name in order if "block_sparse_moe" in name]
        for L, names in groupby(moe, layer_of):  # the router before all else of the experts' half
            router, *others = names
            assert is_router(router) and not any(map(is_router, others)) and not c.is_dense(L)


def test_rows_of_a_head_stay_together():
    k3 = read_config(FIXTURES / "k3")
    rows = row_multiples(k3)
    assert {*rows} == {tensor_name(L, "mla", "kv_b_proj") for L in k3.mla_layers} and {*rows.values()} == {256}


def test_tensors_of_some_experts():
    c = read_config(MODEL)
    some = list(layer_tensors(c, 1, [3, 7]))
    assert {place_of(name).expert for name, _, _ in some} == {-1, 3, 7}
    assert len(some) == len({name for name, _, _ in some})
    assert [name for name, _, _ in layer_tensors(c, 1, [])] == [n for n in forward_order(c) if layer_of(n) == 1]
    assert list(layer_tensors(c, 0)) == list(layer_tensors(c, 0, [3, 7]))  # a dense layer has none


def test_padding_is_not_used():
    c = read_config(MODEL)
    assert used_entries(c, tensor_name(0, "kda", "A_log")) == 4
    assert used_entries(c, tensor_name(0, "kda", "dt_bias")) is None


# Every tensor that a config implies

def stored_tensors(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as f:
            found |= json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return {name: (x["dtype"], tuple(x["shape"])) for name, x in found.items() if name != "__metadata__"}


def test_tensors_are_the_stored_ones():
    "The fixture's headers were written by another program."
    implied = {name: (dtype, shape) for name, dtype, shape in text_tensors(read_config(MODEL))}
    stored = {n: x for n, x in stored_tensors(MODEL).items() if not n.startswith(("mm_projector.", "vision_tower."))}
    differ = {n: (implied.get(n), stored.get(n)) for n in implied.keys() | stored.keys()
              if implied.get(n) != stored.get(n)}
    assert not differ


def test_tensors_of_the_released_model():
    "Counts and bytes of the released index, less 3 projector and 165 vision tensors."
    sizes = {n: WIDTH[d] * math.prod(s) for n, d, s in text_tensors(read_config(FIXTURES / "k3"))}
    assert len(sizes) == 497_220 - 168
    assert sum(sizes.values()) == 1_560_860_324_864 - 92_289_024 - 802_428_928
    assert sum(s for n, s in sizes.items() if ".experts.7." in n and ".layers.5." in n) == 17_547_264
    assert sum(s for n, s in sizes.items() if ".layers." in n and ".experts." not in n) == 108_811_877_376
    assert 2_340e6 < sum(s for n, s in sizes.items() if ".layers.0." in n) < 2_342e6


def unfolded(config):
    return [(pattern.replace("#", str(L), 1).replace("#", str(e), 1), dtype, shape)
            for pattern, dtype, shape, layers, experts in families(config) for L in layers for e in experts]


def test_families_are_the_tensors():
    all_dense = replace(read_config(MODEL), first_k_dense_replace=13)
    for c in read_config(MODEL), FEW_EXPERTS, all_dense:
        assert sorted(unfolded(c)) == sorted(text_tensors(c))
        for pattern, _, _, layers, experts in families(c):
            assert pattern.count("#") == (layers[0] >= 0) + (experts[0] >= 0)


MISSING = "language_model.model.layers.{}.block_sparse_moe.experts.{}.w2.weight_scale"
TOO_MANY = " found, expected no tensor of that name: the config does not imply it"


@pytest.mark.parametrize("wrong, told", [
    ({}, None),
    ({MISSING.format(7, 11): None}, ": 1 tensors are missing: " + MISSING.format(7, 11)),
    ({MISSING.format(12, e): None for e in range(5)} | {"language_model.model.layers.0.input_layernorm.weight": None},
     ": 6 tensors are missing: language_model.model.layers.0.input_layernorm.weight, "
     + ", ".join(MISSING.format(12, e) for e in range(3)) + ", ..."),
    ({"language_model.lm_head.weight": None}, ": 1 tensors are missing: language_model.lm_head.weight"),
    ({"language_model.model.layers.13.input_layernorm.weight": ("BF16", (128,))},
     ": language_model.model.layers.13.input_layernorm.weight" + TOO_MANY),
    ({MISSING.format(7, 16): ("U8", (64, 3))},
     f": {MISSING.format(7, 16)}" + TOO_MANY),
    ({MISSING.format(7, 16): ("U8", (64, 3)), MISSING.format(7, 11): None},
     ": 1 tensors are missing: " + MISSING.format(7, 11)),
    ({MISSING.format(7, 11): ("U8", (3, 64)), MISSING.format(1, 0): None},
     f": {MISSING.format(7, 11)} is U8 [3, 64], the config implies U8 [64, 3]"),
    ({MISSING.format(7, 11): ("BOOL", (64, 3)), "language_model.lm_head.weight": ("F32", (512, 128))},
     f": {MISSING.format(7, 11)} is BOOL [64, 3], the config implies U8 [64, 3]"),
    ({"language_model.model.layers.12.self_attn.g_proj.weight": ("BF16", (64, 127))},
     ": language_model.model.layers.12.self_attn.g_proj.weight is BF16 [64, 127], the config implies BF16 [64, 128]"),
    ({"language_model.model.layers.5.self_attn.A_log": ("F32", (4,)), "more.weight": ("I64", (2,))}, None),
    ({"language_model.model.layers.5.self_attn.A_log": ("F32", (3,))},
     ": language_model.model.layers.5.self_attn.A_log is F32 [3], the config implies F32 [32]"),
])
def test_a_checkpoint_against_its_config(tmp_path, monkeypatch, wrong, told):
    "By families, without naming half a million tensors, if it is right; else the first fault in the order of the list."
    c = read_config(MODEL)
    tensors = {name: (dtype, shape) for name, dtype, shape in text_tensors(c)} | wrong
    head = header_bytes((name, *kind) for name, kind in tensors.items() if kind)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + sum(ITEMSIZE[kind[0]] * math.prod(kind[1]) for kind in tensors.values() if kind))
    with Checkpoint(tmp_path) as checkpoint:
        if told is None:
            monkeypatch.setattr(module, "text_tensors", None)
            return check_tensors(c, checkpoint)
        with pytest.raises(CheckpointError) as caught:
            check_tensors(c, checkpoint)
    assert str(caught.value) == str(tmp_path if "missing" in told else tmp_path / "model.safetensors") + told


def test_a_log_may_be_padded():
    "Released: 128 entries for 96 heads. Any length from num_heads on is a padding."
    c, name = read_config(MODEL), "language_model.model.layers.0.self_attn.A_log"
    fits = [shape_fits(c, name, (32,), found) for found in [(3,), (4,), (5,), (32,), (64,), (1, 1, 4, 1), ()]]
    assert fits == [False, True, True, True, True, False, False]
    assert shape_fits(c, "x.weight", (2, 3), (2, 3)) and not shape_fits(c, "x.weight", (2, 3), (3, 2))


def test_more_heads_than_head_width():
    "A_log is per head: with 48 heads 32 wide it cannot have 32 entries."
    c = replace(read_config(MODEL), kda_num_heads=48)
    shapes = {n: s for n, _, s in text_tensors(c)}
    assert shapes["language_model.model.layers.0.self_attn.A_log"] == (48,)
    assert shapes["language_model.model.layers.0.self_attn.q_proj.weight"] == (48 * 32, 128)
