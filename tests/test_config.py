"The config reader: what it reads, and every way it refuses."
import copy
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from common import FIXTURES, MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3lib.config import FIXED, FIXED_IF_GIVEN, INTEGERS, REALS, Config, ConfigError, read_config
from k3lib.tensors import text_tensors

TREE = json.loads((MODEL / "config.json").read_text())
ABSENT = object()
NEEDED = [*INTEGERS, *REALS, *FIXED, "linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers",
          "quantization_config", "quantization_config.format", "quantization_config.config_groups"]


def changed(*changes):
    "The embedded model's config tree with (dotted path, value or ABSENT) changes."
    tree = copy.deepcopy(TREE)
    for path, value in changes:
        *above, key = path.split(".")
        part = tree
        for name in above:
            part = part[name]
        part.pop(key, None) if value is ABSENT else part.update({key: value})
    return tree


def read(tmp_path, tree):
    (tmp_path / "config.json").write_bytes(tree if isinstance(tree, bytes) else json.dumps(tree).encode())
    return read_config(tmp_path)


def refusal(tmp_path, tree):
    "The one-line message, checked to name the file."
    with pytest.raises(ConfigError) as e:
        read(tmp_path, tree)
    message = str(e.value)
    assert message.startswith(str(tmp_path / "config.json")) and "\n" not in message
    return message.removeprefix(str(tmp_path / "config.json"))


def test_the_embedded_config():
    c = read_config(MODEL)
    assert (c.hidden_size, c.num_hidden_layers, c.vocab_size, c.rms_norm_eps) == (128, 13, 512, 1e-5)
    assert (c.kda_num_heads, c.kda_head_dim, c.kda_conv_kernel, c.kda_gate_lower_bound) == (4, 32, 4, -5.0)
    assert c.mla_layers == {3, 7, 11, 12} and c.kda_layers == set(range(13)) - c.mla_layers
    assert (c.bos_token_id, c.eos_token_ids, c.pad_token_id) == (None, (), None)


def test_layer_kinds():
    c = read_config(FIXTURES / "k3")
    assert [c.layer_kind(L) for L in (0, 2, 3, 4, 90, 91, 92)] == ["kda", "kda", "mla", "kda", "kda", "mla", "mla"]
    assert len(c.mla_layers) == 24 and len(c.kda_layers) == 69
    assert c.is_dense(0) and not c.is_dense(1)
    for L in (-1, 93):
        with pytest.raises(IndexError):
            c.layer_kind(L)


@pytest.mark.parametrize("field", NEEDED)
def test_a_missing_field_is_named(tmp_path, field):
    for value in (ABSENT, None):
        assert refusal(tmp_path, changed((f"text_config.{field}", value))) == f": missing text_config.{field}"


def test_all_missing_fields_in_one_message(tmp_path):
    gone = [f for f in NEEDED if "quantization_config." not in f and f != "quantization_config"]
    message = refusal(tmp_path, changed(*((f"text_config.{f}", ABSENT) for f in gone)))
    assert set(message.removeprefix(": missing ").split(", ")) == {f"text_config.{f}" for f in gone}


def test_missing_and_wrong_are_told_together(tmp_path):
    message = refusal(tmp_path, changed(("text_config.q_lora_rank", ABSENT), ("text_config.hidden_act", "silu")))
    assert message == (': missing text_config.q_lora_rank; text_config.hidden_act is "silu", '
                       'expected "situ", the only value implemented')


@pytest.mark.parametrize("above", ["text_config", "text_config.linear_attn_config"])
def test_a_missing_or_wrong_object_is_named_once(tmp_path, above):
    assert refusal(tmp_path, changed((above, ABSENT))) == f": missing {above}"
    assert refusal(tmp_path, changed((above, [1]))) == f": {above} is [1], expected an object"


@pytest.mark.parametrize("field", [*FIXED, *FIXED_IF_GIVEN])
def test_unsupported_values_are_refused(tmp_path, field):
    expected = {**FIXED, **FIXED_IF_GIVEN}[field]
    for value in ("other", 2, False if expected is True else True,
                  float(expected) if type(expected) is int else "SITU"):
        message = refusal(tmp_path, changed((f"text_config.{field}", value)))
        assert f"text_config.{field} is {json.dumps(value)}, expected {json.dumps(expected)}" in message


@pytest.mark.parametrize("field", FIXED_IF_GIVEN)
def test_optional_fields_may_be_absent(tmp_path, field):
    assert read(tmp_path, changed((f"text_config.{field}", ABSENT))) == read_config(MODEL)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [True, 4.0, "4", [4], {}, -1, 2**63, 10**400])
def test_integers_are_strict(tmp_path, field, value):
    message = refusal(tmp_path, changed((f"text_config.{field}", value)))
    assert f"text_config.{field} is {str(json.dumps(value))[:20]}" in message and "expected an integer in" in message


def test_zero_and_the_upper_bounds(tmp_path):
    for field, (_, low, high) in INTEGERS.items():
        for value in (low - 1, high + 1):
            assert f"text_config.{field} is {value}" in refusal(tmp_path, changed((f"text_config.{field}", value)))


@pytest.mark.parametrize("field", REALS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", 0, 0.0, 10**400])
def test_reals_are_strict(tmp_path, field, value):
    assert f"text_config.{field} is " in refusal(tmp_path, changed((f"text_config.{field}", value)))


def test_a_real_may_be_written_as_an_integer(tmp_path):
    scale = read(tmp_path, changed(("text_config.routed_scaling_factor", 2))).routed_scaling_factor
    assert scale == 2.0 and type(scale) is float


KDA, MLA = "text_config.linear_attn_config.kda_layers", "text_config.linear_attn_config.full_attn_layers"


@pytest.mark.parametrize("changes, told", [
    # one-based lists taken for zero-based
    ([(KDA, [0, 1, 2, 4, 5, 6, 8, 9, 10]), (MLA, [3, 7, 11, 12])], "0 out of range"),
    ([(KDA, [0, 1, 2, 4, 5, 6, 8, 9, 10]), (MLA, [3, 7, 11, 12])], "13 in neither list"),
    ([(KDA, [1, 2, 3, 5, 6, 7, 9, 10, 11, 13])], "13 listed twice"),  # the last layer taken for KDA
    ([(KDA, [1, 1, 2, 3, 5, 6, 7, 9, 10, 11])], "1 listed twice"),
    ([(MLA, [4, 8, 12])], "13 in neither list"),
    ([(MLA, [])], "4, 8, 12, 13 in neither list"),
    ([(MLA, [4, 8, 12, 13, 14])], "14 out of range"),
    ([(MLA, [4, 8, 12, 13, -1])], "-1 out of range"),
    ([(MLA, list(range(1, 14)))], "1, 2, 3, 5, 6, 7, 9, 10, ... listed twice"),
])
def test_layer_lists_must_share_out_the_layers(tmp_path, changes, told):
    message = refusal(tmp_path, changed(*changes))
    assert f"kda_layers and full_attn_layers: {told}, expected each of 1..13 once" in message


@pytest.mark.parametrize("value", ["4", 4, {"4": 1}, [4, 8, 12, "13"], [4, 8, 12, 13.0], [4, 8, 12, True]])
def test_layer_lists_hold_integers(tmp_path, value):
    assert f"{MLA} is {json.dumps(value)}, expected a list of integers" in refusal(tmp_path, changed((MLA, value)))


def test_one_kind_of_layer_is_enough(tmp_path):
    c = read(tmp_path, changed((KDA, []), (MLA, list(range(1, 14)))))
    assert c.kda_layers == frozenset() and c.mla_layers == frozenset(range(13))


@pytest.mark.parametrize("field, value, told", [
    ("routed_expert_hidden_size", 48, "a multiple of 32"),
    ("moe_intermediate_size", 100, "a multiple of 32"),
    ("num_experts_per_token", 17, "at most num_experts = 16"),
    ("first_k_dense_replace", 14, "at most num_hidden_layers = 13"),
])
def test_fields_must_agree(tmp_path, field, value, told):
    message = refusal(tmp_path, changed((f"text_config.{field}", value)))
    assert message == f": text_config.{field} is {value}, expected {told}" + (
        ", the weights that share one MXFP4 scale" if "32" in told else "")


def test_quantization(tmp_path):
    path = "text_config.quantization_config"
    assert f'{path}.format is "int4"' in refusal(tmp_path, changed((f"{path}.format", "int4")))
    for key, value in (("num_bits", 8), ("group_size", 16), ("type", "int"), ("group_size", ABSENT)):
        message = refusal(tmp_path, changed((f"{path}.config_groups.group_0.weights.{key}", value)))
        assert f"{path}.config_groups.*.weights is {{" in message and '"group_size": 32' in message
    for value in ({}, [], {"group_0": 3}, {"a.b": {}}):
        assert f"{path}.config_groups" in refusal(tmp_path, changed((f"{path}.config_groups", value)))
    tree = changed((path, ABSENT), ("quantization_config", TREE["text_config"]["quantization_config"]))
    assert read(tmp_path, tree) == read_config(MODEL)


def test_tied_embeddings(tmp_path):
    inner, outer = "text_config.tie_word_embeddings", "tie_word_embeddings"
    assert read(tmp_path, changed((inner, ABSENT))) == read(tmp_path, changed((outer, ABSENT))) == read_config(MODEL)
    assert refusal(tmp_path, changed((inner, ABSENT), (outer, ABSENT))) == f": missing {inner}"
    assert f"{inner} is true, expected false" in refusal(tmp_path, changed((inner, True), (outer, True)))
    assert f"{outer} is true, expected false" in refusal(tmp_path, changed((outer, True)))


@pytest.mark.parametrize("where", ["", "text_config."])
def test_token_ids_in_either_place(tmp_path, where):
    c = read(tmp_path, changed((where + "bos_token_id", 496), (where + "eos_token_id", [498, 497]),
                               (where + "pad_token_id", 0)))
    assert (c.bos_token_id, c.eos_token_ids, c.pad_token_id) == (496, (498, 497), 0)
    assert read(tmp_path, changed((where + "eos_token_id", 498))).eos_token_ids == (498,)
    for value in (512, -1, True, "498", 1.0):
        message = refusal(tmp_path, changed((f"{where}eos_token_id", value)))
        assert f"{where}eos_token_id is {json.dumps(value)}, expected a token id in 0..511" in message
        for name in ("bos", "pad"):
            c = read(tmp_path, changed((f"{where}{name}_token_id", value)))
            assert c == read_config(MODEL)
            assert c.unusual == (f"{where}{name}_token_id is {json.dumps(value)}, not a token id in 0..511",)
    assert "eos_token_id is null" in refusal(tmp_path, changed((where + "eos_token_id", [498, None])))


NEXT = "text_config.num_nextn_predict_layers"


@pytest.mark.parametrize("changes, told", [
    ([("text_config.num_key_value_heads", 2)], "text_config.num_key_value_heads is 2, not num_attention_heads = 4"),
    ([("bos_token_id", 5), ("text_config.bos_token_id", 6)], "bos_token_id is 5, not 6 as in text_config.bos_token_id"),
    ([("pad_token_id", {}), ("text_config.pad_token_id", 6)], "pad_token_id is {}, not a token id in 0..511"),
])
def test_what_is_not_computed_with_is_told_and_not_refused(tmp_path, changes, told):
    c = read(tmp_path, changed(*changes))
    assert c.unusual == (told,) and read_config(MODEL).unusual == ()
    assert replace(c, bos_token_id=None, pad_token_id=None) == read_config(MODEL)


@pytest.mark.parametrize("value, good", [
    (1, True), ([1] * 13, True), ([0] + [1] * 12, True), ([1] * 15, True), ([1] * 12, False),
    ([1, 0] + [1] * 11, False), ([True] * 13, False), ([1.0] * 13, False), ([2] * 13, False), ([], False), (2, False),
    (1.0, False), ("1", False), (True, False), ({}, False)])
def test_experts_in_every_layer_after_the_dense_ones(tmp_path, value, good):
    tree = changed(("text_config.moe_layer_freq", value))
    if good:
        assert read(tmp_path, tree) == read_config(MODEL)
    else:
        assert f"text_config.moe_layer_freq is {json.dumps(value)[:50]}" in refusal(tmp_path, tree)


def test_layers_after_the_last(tmp_path):
    "They may be in the lists of layers. A list that names more of them is refused."
    for value, kda, mla in ((0, [], []), (1, [], []), (1, [14], []), (2, [15], [14]), (3, [14], [])):
        tree = changed((NEXT, value), (KDA, [1, 2, 3, 5, 6, 7, 9, 10, 11, *kda]), (MLA, [4, 8, 12, 13, *mla]))
        c = read(tmp_path, tree)
        assert c == replace(read_config(MODEL), num_nextn_predict_layers=value)
    tree = changed((NEXT, 1), (MLA, [4, 8, 12, 13, 15]))
    assert "15 out of range" in refusal(tmp_path, tree)
    for value in (-1, 1.0, True, "1", [1], 5000):
        message = refusal(tmp_path, changed((NEXT, value)))
        assert f"{NEXT} is {json.dumps(value)}, expected an integer in 0..4,096" in message


def test_a_declaration_of_the_experts_in_both_places(tmp_path):
    "Each must be right. What nobody reads may differ."
    path = "quantization_config"
    right = TREE["text_config"][path]
    assert read(tmp_path, changed((path, right | {"ignore": ["x"]}))) == read_config(MODEL)
    assert f"; {path}.format" not in refusal(tmp_path, changed((path, right | {"format": "int4"})))
    assert f'{path}.format is "int4"' in refusal(tmp_path, changed((path, right | {"format": "int4"})))
    assert f"missing {path}.config_groups" in refusal(tmp_path, changed((path, {"format": right["format"]})))


def test_two_places_must_agree(tmp_path):
    assert "expected 497 as in text_config.eos_token_id" in refusal(
        tmp_path, changed(("eos_token_id", 498), ("text_config.eos_token_id", 497)))


def test_another_model(tmp_path):
    assert 'model_type is "llama", expected "kimi_k3"' in refusal(tmp_path, changed(("model_type", "llama")))


@pytest.mark.parametrize("content, told", [
    (b"", "0 bytes, expected 1 to 4,000,000"), (b"{", "not JSON"), (b"[1]", "a JSON list, expected an object"),
    (b"[" * 100_000, "not JSON"), (b"\xff\xfe{", "not JSON"), (b'{"a": 1, "a": 2}', "name 'a' found twice"),
    (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"), (b'{"text_config": {"\\ud800": 1}}', "not JSON"),
    (b'{"text_config": {"b": {"c": 1, "c": 1}}}', "name 'c' found twice"),
    *((b'{"text_config": ' + b"[" * depth + b"]" * depth + b"}", "more than 16 deep" if depth < 900 else "")
      for depth in (16, *range(940, 1010, 3))),
])
def test_not_a_config(tmp_path, content, told):
    assert told in refusal(tmp_path, content)


def test_a_huge_file_is_not_read(tmp_path):
    with (tmp_path / "config.json").open("wb") as f:
        f.truncate(10**12)  # sparse
    with pytest.raises(ConfigError, match="1,000,000,000,000 bytes, expected 1 to 4,000,000"):
        read_config(tmp_path)


def test_missing_folder_and_file(tmp_path):
    for path, told in ((tmp_path / "nowhere", "nowhere: no such model folder"), (tmp_path, "no such file")):
        with pytest.raises(FileNotFoundError, match=told):
            read_config(path)
    (tmp_path / "config.json").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match="config.json: a link to nothing"):
        read_config(tmp_path)


@pytest.mark.parametrize("make, told", [
    (Path.mkdir, "not a file"), (os.mkfifo, "not a file"),
    (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    (lambda path: path.symlink_to("/dev/zero"), "not a file")])
def test_what_is_no_file_is_not_opened(tmp_path, make, told):
    make(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=f"config.json: cannot be read: {told}"):
        read_config(tmp_path)


def test_a_config_is_frozen():
    with pytest.raises(AttributeError):
        read_config(MODEL).hidden_size = 1


def leaves(tree, path=()):
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.integers(0, 20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(list(leaves(TREE))), ANY), min_size=1, max_size=3))
def test_any_value_anywhere_is_read_or_refused(tmp_path, changes):
    "Whatever stands in a field, the answer is a Config whose numbers are within bounds or one line."
    tree = copy.deepcopy(TREE)
    for path, value in changes:
        part = tree
        for name in path[:-1]:
            part = part.get(name) if isinstance(part, dict) else None
        if isinstance(part, dict):
            part[path[-1]] = value
    try:
        c = read(tmp_path, tree)
    except ConfigError as e:
        assert "\n" not in str(e) and len(str(e)) < 20_000
        return
    assert isinstance(c, Config)
    assert all(low <= asdict(c)[name] <= high for name, low, high in [*INTEGERS.values(), *REALS.values()])
    assert c.kda_layers | c.mla_layers == set(range(c.num_hidden_layers)) and not c.kda_layers & c.mla_layers
    next(text_tensors(c))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path, content):
    refusal(tmp_path, content)
