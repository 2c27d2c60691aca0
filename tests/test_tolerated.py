"""A good checkpoint is not called damaged for what a run does not need; what would be computed wrongly is refused.

Every change below is made to a copy of the embedded model. It must decode to the same ids, and `k3 census` must say
what is odd. The last part holds changes that must stay refused, and arguments of a wrong type.
"""
import io
import json
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

import k3lib
from k3lib.cli import main

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "fixtures" / "oracle13" / "model"
EXPECTED = json.loads((MODEL.parent / "expected.json").read_text())
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
SHARDS = sorted(path.name for path in MODEL.glob("*.safetensors"))
LAYER, PLACES = "language_model.model.layers.", json.loads((MODEL / INDEX).read_text())["weight_map"]
IMAGE_SIDE = sorted(name for name in PLACES if not name.startswith("language_model."))


# Pieces of a model

def header(shard, change):
    "Change the header of a shard, a dict: `change` edits it, or returns text to take its place."
    def apply(folder):
        data = (folder / shard).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:end])
        entries.pop("__metadata__", None)
        changed = change(entries)
        text = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
        (folder / shard).unlink()
        (folder / shard).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return apply


def tree(name, change):
    "Change the JSON tree of a file."
    def apply(folder):
        changed = json.loads((folder / name).read_text())
        change(changed)
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(changed, indent=2))
    return apply


def at(path, value):
    def change(found):
        *above, key = path.split(".")
        for name in above:
            found = found[name]
        found[key] = value
    return change


def shard_of(tensors):
    "The bytes of a shard of {name: (dtype, shape, bytes)}."
    entries, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + len(data)]}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values())


def more(name, tensors, listed=True):
    "One more file, and its tensors in the list."
    def apply(folder):
        (folder / name).write_bytes(shard_of(tensors))
        if listed:
            tree(INDEX, lambda index: index["weight_map"].update(dict.fromkeys(tensors, name)))(folder)
    return apply


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def image_side(change):
    "Change the list's entries of the tensors that are no part of the text stack."
    def edit(index):
        for name in [*index["weight_map"]]:
            if not name.startswith("language_model."):
                change(index["weight_map"], name)
    return tree(INDEX, edit)


def without_image_side(folder):
    (folder / SHARDS[14]).unlink()
    (folder / SHARDS[15]).unlink()


def next_layers(folder):
    "Two layers after the last, as layers that predict further tokens are stored, and the config says so."
    tree(CONFIG, at("text_config.num_nextn_predict_layers", 2))(folder)
    names = [f"{LAYER}{L}.{end}" for L in (13, 14) for end in
             ("eh_proj.weight", "enorm.weight", "self_attn.q_proj.weight",
              "block_sparse_moe.experts.3.w1.weight_packed", "block_sparse_moe.experts.3.w1.weight_scale",
              "shared_head.head.weight")]
    more("next.safetensors", {name: ("BF16", [2, 3], bytes(12)) for name in names})(folder)


def dtype(value, nbytes=5):
    return more("other.safetensors", {"audio.3.w": (value, [2, 3], bytes(nbytes)), "audio.4.w": ("U8", [3], b"abc")})


KDA, MLA = "text_config.linear_attn_config.kda_layers", "text_config.linear_attn_config.full_attn_layers"

TOLERATED = {  # a change, and what the census says of it; None: there is nothing odd about it
    # headers
    "metadata null": (header(SHARDS[3], lambda e: e.update(__metadata__=None)), "__metadata__ is not an object of"),
    "metadata of numbers": (header(SHARDS[0], lambda e: e.update(__metadata__={"step": 1})), "__metadata__ is not an"),
    "metadata a list": (header(SHARDS[0], lambda e: e.update(__metadata__=[1])), "__metadata__ is not an object of"),
    "metadata nested": (header(SHARDS[0], lambda e: e.update(__metadata__={"a": {"b": {}}})), "__metadata__ is not an"),
    "metadata in front": (header(SHARDS[5], lambda e: b'{"__metadata__":null,' + json.dumps(
        e, separators=(",", ":")).encode()[1:]), "__metadata__ is not an object of"),
    "metadata twice the same name": (header(SHARDS[1], lambda e: b'{"__metadata__":{"a":"b","a":"b"},' + json.dumps(
        e).encode()[1:]), None),
    "fields without a meaning": (header(SHARDS[2], lambda e: e[next(iter(e))].update(strides=[1])), "more fields"),
    "a type of a later version": (dtype("F4_E2M1"), "type that is not known here"),
    "a type of a later version, no bytes": (dtype("I4", 0), "type that is not known here"),
    "F8_E8M0FNU": (dtype("F8_E8M0FNU", 6), "type that is not known here"),
    "half a byte": (dtype("F4", 3), None),
    "an 8-bit type": (dtype("F8_E4M3FNUZ", 6), None),
    "no elements": (more("o.safetensors", {"x": ("F32", [0], b""), "y": ("U8", [1], b"a"), "z": ("U8", [0, 3], b"")}),
                    None),
    "a scalar": (more("o.safetensors", {"x": ("F32", [], bytes(4))}), None),
    "spaces before the header's brace": (header(SHARDS[4], lambda e: b"  \n" + json.dumps(e).encode()), None),
    # the list: its sum
    "no total_size": (tree(INDEX, at("metadata", {})), "total_size is not the bytes of all tensors"),
    "no metadata": (tree(INDEX, lambda index: index.pop("metadata")), "total_size is not the bytes of all tensors"),
    "metadata of the list null": (tree(INDEX, at("metadata", None)), "total_size is not the bytes of all tensors"),
    "metadata of the list text": (tree(INDEX, at("metadata", "x")), "total_size is not the bytes of all tensors"),
    "total_size a float": (tree(INDEX, at("metadata.total_size", 6_612_160.0)), None),
    "total_size a float of other digits": (tree(INDEX, at("metadata.total_size", 6.6e6)), "total_size is not the byte"),
    "total_size text": (tree(INDEX, at("metadata.total_size", "6612160")), "total_size is not the bytes of all tensor"),
    "total_size of another sum": (tree(INDEX, at("metadata.total_size", 1)), "total_size is not the bytes of all tens"),
    "total_size null": (tree(INDEX, at("metadata.total_size", None)), "total_size is not the bytes of all tensors"),
    "total_size NaN": (tree(INDEX, at("metadata.total_size", float("nan"))), "total_size is not the bytes of all tens"),
    "more in the list": (tree(INDEX, lambda index: index.update(x=SHARDS, y=None)), None),
    "more in the list's metadata": (tree(INDEX, at("metadata.all", SHARDS)), None),
    # the list: its files
    "a shard of other tensors": (more("vision.safetensors", {"vision.w": ("BF16", [4], bytes(8))}), "total_size is no"),
    "a shard of other tensors, not listed": (more("vision.safetensors", {"v": ("U8", [4], bytes(4))}, False),
                                             "weight files that are not listed"),
    "files of another download": (lambda folder: [shutil.copy(MODEL / SHARDS[3], folder / name) for name in (
        "model-00001-of-000002.safetensors", "model-00017-of-000016.safetensors", "model-00003-of-00017.safetensors")],
        "weight files that are not listed"),
    "model.safetensors beside the shards": (lambda folder: shutil.copy(MODEL / SHARDS[3], folder / "model.safetensors"),
                                            "weight files that are not listed"),
    "a damaged file that is not listed": (lambda folder: (folder / "x.safetensors").write_bytes(b"<html>"),
                                          "weight files that are not listed"),
    "names of another kind": (lambda folder: [[(folder / name).rename(folder / name.replace("model-", "shard_"))
                                               for name in SHARDS], tree(INDEX, lambda index: index.update(weight_map={
                                                   tensor: file.replace("model-", "shard_") for tensor, file
                                                   in index["weight_map"].items()}))(folder)], None),
    # the list: tensors of the image side
    "tensors not listed": (image_side(dict.pop), "not listed"),
    "tensors listed that no file has": (tree(INDEX, lambda index: index["weight_map"].update(
        {f"audio.{n}": SHARDS[0] for n in range(9)})), "that no file has"),
    "tensors listed in a file that is not there": (tree(INDEX, lambda index: index["weight_map"].update(
        {"audio.w": "audio.safetensors"})), "missing"),
    "tensors listed in another file": (tree(INDEX, lambda index: index["weight_map"].update(
        {IMAGE_SIDE[0]: SHARDS[2]})), "in another file"),
    "all of them listed in another file": (image_side(lambda places, name: places.update({name: SHARDS[2]})),
                                           "weight files that are not listed, and not read: 2"),
    "no name of a file": (tree(INDEX, at("weight_map", {**PLACES, IMAGE_SIDE[0]: None, IMAGE_SIDE[2]: 3})),
                          "missing: 2"),
    "the image side was not downloaded": (without_image_side, "missing: 2"),
    "the image side was deleted, the list too": (both(without_image_side, image_side(dict.pop)), "total_size is not"),
    "a tensor twice": (both(more("a.safetensors", {"a.w": ("U8", [2], b"ab"), "a.v": ("U8", [1], b"a")}),
                            more("b.safetensors", {"b.w": ("U8", [2], b"ab"), "a.w": ("U8", [2], b"xy")})),
                       "in two files"),
    # layers that greedy decoding does not use
    "layers that predict further tokens": (next_layers, "layers that greedy decoding does not use"),
    "layers that predict further tokens, in the lists": (both(next_layers, lambda folder: tree(
        CONFIG, lambda c: [at("text_config.num_nextn_predict_layers", 2)(c), at(MLA, [4, 8, 12, 13, 14])(c),
                           at(KDA, [1, 2, 3, 5, 6, 7, 9, 10, 11, 15])(c)])(folder)), "layers that greedy decoding"),
    "such layers announced, not there": (tree(CONFIG, at("text_config.num_nextn_predict_layers", 1)), None),
    # the config
    "a pad id of -1": (tree(CONFIG, at("pad_token_id", -1)), "pad_token_id is -1"),
    "a pad id after the vocabulary": (tree(CONFIG, at("text_config.pad_token_id", 512)), "pad_token_id is 512"),
    "a bos id that is text": (tree(CONFIG, at("bos_token_id", "<s>")), "bos_token_id is"),
    "two pad ids": (tree(CONFIG, lambda c: [at("pad_token_id", 3)(c), at("text_config.pad_token_id", 4)(c)]),
                    "pad_token_id is 3"),
    "moe_layer_freq a list": (tree(CONFIG, at("text_config.moe_layer_freq", [1] * 13)), None),
    "moe_layer_freq with the dense layer": (tree(CONFIG, at("text_config.moe_layer_freq", [0] + [1] * 12)), None),
    "key and value heads": (tree(CONFIG, at("text_config.num_key_value_heads", 1)), "num_key_value_heads is 1"),
    "the quantization twice": (tree(CONFIG, lambda c: c.update(quantization_config={
        **c["text_config"]["quantization_config"], "ignore": ["lm_head"]})), None),
}


@pytest.fixture(scope="module")
def right():
    with k3lib.load(MODEL, "1GB", context=32) as model:
        return model.prefill(EXPECTED["prompt_ids"]).tobytes()


def copied(folder):
    "A folder of links to the model's files."
    folder.mkdir(exist_ok=True)
    for path in MODEL.iterdir():
        os.link(path, folder / path.name) if same_disk(path, folder) else shutil.copy(path, folder)
    return folder


def same_disk(path, folder):
    return path.stat().st_dev == folder.stat().st_dev


def k3(*args):
    "The exit code of a command, its output and its error output; in this process."
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(arg) for arg in args])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("what", TOLERATED)
def test_a_good_checkpoint_is_not_called_damaged(tmp_path, right, what):
    "It gives the logits of the model, and the census says what is odd."
    change, told = TOLERATED[what]
    folder = copied(tmp_path / "model")
    change(folder)
    with k3lib.load(folder, "1GB", context=32) as model:
        assert model.prefill(EXPECTED["prompt_ids"]).tobytes() == right
    code, out, err = k3("census", folder, "--json", tmp_path / "census.json")
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("unusual, but harmless")]
    counted = json.loads((tmp_path / "census.json").read_text())["unusual"]
    assert len(lines) == len(counted)
    if told is None:
        assert set(counted) <= {"lists whose total_size is not the bytes of all tensors"}, lines
    else:
        assert any(told in line for line in lines), lines
        assert all(odd["count"] >= 1 and odd["first"] for odd in counted.values())


def test_the_model_as_it_is_has_nothing_unusual(tmp_path):
    assert k3lib.Checkpoint(MODEL).census(4).as_dict()["unusual"] == {} == k3lib.Checkpoint(MODEL).index.unusual.found
    code, out, _ = k3("census", MODEL)
    assert code == 0 and "unusual" not in out


def test_verify_calls_it_unusual_and_not_damaged(tmp_path):
    "A file that is missing is damage where a manifest lists it."
    folder = copied(tmp_path / "model")
    assert k3("verify", folder, "--write-manifest")[0] == 0
    for change, told in (TOLERATED["total_size text"], TOLERATED["a shard of other tensors, not listed"]):
        change(folder)
        code, out, _ = k3("verify", folder)
        assert told in out and "unusual" in out and code == (4 if "total_size" in told else 0)
        (folder / INDEX).unlink()
        shutil.copy(MODEL / INDEX, folder)
    (tmp_path / "model.sha256").unlink()
    without_image_side(folder)
    tree(CONFIG, at("pad_token_id", -1))(folder)
    code, out, err = k3("verify", folder)
    assert (code, err) == (0, "") and "damaged          nothing found" in out
    assert "but harmless: listed files of tensors that nothing is computed from, missing: 2" in out
    assert "but harmless: pad_token_id is -1, not a token id in 0..511" in out


def test_verify_hashes_the_files_that_the_list_means(tmp_path):
    folder = copied(tmp_path / "model")
    TOLERATED["names of another kind"][0](folder)
    code, out, _ = k3("verify", folder, "--write-manifest")
    assert code == 0 and "16 shards" in out
    manifest = (tmp_path / "model.sha256").read_text()
    assert manifest.count("shard_000") == 16
    path = next(folder.glob("shard_00005*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    assert k3("verify", folder)[0] == 4


def test_a_census_of_layers_that_are_not_decoded(tmp_path):
    "They are no part of the trunk, of the experts, and of the active parameters."
    folder = copied(tmp_path / "model")
    assert k3("census", folder, "--json", tmp_path / "before")[0] == 0
    next_layers(folder)
    assert k3("census", folder, "--json", tmp_path / "after")[0] == 0
    before, after = (json.loads((tmp_path / name).read_text()) for name in ("before", "after"))
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert changed.pop("unusual")[1]["tensors of layers that greedy decoding does not use"]["count"] == 12
    assert set(changed) == {"tensors", "payload_bytes", "file_bytes", "shards", "other_tensors", "other_bytes"}
    assert changed["other_tensors"] == (0, 12) and changed["other_bytes"] == (0, 144)


# What stays refused: it would be computed wrongly, or nobody knows

REFUSED = {
    "a tensor that is needed has a type that is not known": (
        header(SHARDS[1], lambda e: e[next(iter(e))].update(dtype="F7")), 4, "F7"),
    "a needed shard is missing": (lambda folder: (folder / SHARDS[4]).unlink(), 4, SHARDS[4]),
    "a shard is missing, and there is no list": (
        lambda folder: [(folder / SHARDS[15]).unlink(), (folder / INDEX).unlink()], 4, SHARDS[15]),
    "files of two downloads, and no list": (
        lambda folder: [shutil.copy(MODEL / SHARDS[3], folder / "model.safetensors"), (folder / INDEX).unlink()], 4,
        "both kinds of weight file"),
    "a needed tensor is listed in another shard": (
        tree(INDEX, lambda i: i["weight_map"].update({"language_model.lm_head.weight": SHARDS[3]})), 4, SHARDS[3]),
    "a needed tensor is not listed": (
        tree(INDEX, lambda i: i["weight_map"].pop("language_model.lm_head.weight")), 4, "lm_head"),
    "a needed tensor in two files": (
        more("copy.safetensors", {"language_model.model.norm.weight": ("BF16", [128], bytes(256))}), 4, "norm.weight"),
    "a gap between tensors": (header(SHARDS[15], lambda e: [
        entry.update(data_offsets=[n + 8 for n in entry["data_offsets"]]) for entry in e.values()] and None), 4,
        SHARDS[15]),
    "bytes after the last tensor": (
        lambda folder: (folder / SHARDS[15]).write_bytes((MODEL / SHARDS[15]).read_bytes() + b"\0"), 4, SHARDS[15]),
    "a layer too many, not announced": (
        more("next.safetensors", {f"{LAYER}13.enorm.weight": ("BF16", [2], bytes(4))}), 4, "layers.13.enorm"),
    "a layer more than announced": (both(next_layers, lambda folder: tree(CONFIG, at(
        "text_config.num_nextn_predict_layers", 1))(folder)), 4, "layers.14."),
    "a layer of the model missing, others announced": (
        tree(CONFIG, lambda c: [at("text_config.num_nextn_predict_layers", 1)(c),
                                at("text_config.num_hidden_layers", 14)(c)]), 2, "14 in neither list"),
    "a tensor of the text stack that the config does not imply": (
        more("bias.safetensors", {f"{LAYER}1.self_attn.q_proj.bias": ("BF16", [2], bytes(4))}), 4, "q_proj.bias"),
    "an end id after the vocabulary": (tree(CONFIG, at("eos_token_id", 512)), 2, "eos_token_id"),
    "two ends": (tree(CONFIG, lambda c: [at("eos_token_id", 3)(c), at("text_config.eos_token_id", 4)(c)]), 2, "eos"),
    "a dense layer among the others": (tree(CONFIG, at("text_config.moe_layer_freq", [0, 1, 0] + [1] * 10)), 2,
                                       "moe_layer_freq"),
    "another choice of experts": (tree(CONFIG, at("text_config.topk_method", "greedy")), 2, "topk_method"),
    "two quantizations": (tree(CONFIG, lambda c: c.update(quantization_config={"format": "int4"})), 2, "int4"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, what):
    change, code, word = REFUSED[what]
    folder = copied(tmp_path / "model")
    if what == "bytes after the last tensor":
        (folder / SHARDS[15]).unlink()
    change(folder)
    found, out, err = k3("decode", folder, "--ids", "1", "--max-new-tokens", 1)
    assert found == code and len(err.splitlines()) == 1 and word in err and "generated" not in out, err


# Arguments of a wrong type

CALLS = {
    "name": lambda c, v: [lambda: c.tensor(v), lambda: c.raw(v), lambda: c.extent(v), lambda: v in c],
    "layer": lambda c, v: [lambda: c.expert(v, 1)], "expert": lambda c, v: [lambda: c.expert(1, v)],
    "experts_per_token": lambda c, v: [lambda: c.census(experts_per_token=v)],
    "prefix": lambda c, v: [lambda: c.count_of(v)], "pattern": lambda c, v: [lambda: c.kinds_of(v, [1], [1])],
}
GOOD = {"name": str, "layer": int, "expert": int, "experts_per_token": (int, type(None)), "prefix": str, "pattern": str}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_a_wrong_type_are_refused_by_name(name):
    with k3lib.Checkpoint(MODEL) as opened:
        for value in 5, None, "a", b"a", 1.5, True, [], ("a",), object():
            if not isinstance(value, GOOD[name]) or value is True:
                for call in CALLS[name](opened, value):
                    with pytest.raises(k3lib.UsageError, match=f"^{name} is .*, expected (text, a str|a whole num)"):
                        call()
    assert issubclass(k3lib.UsageError, ValueError)


def test_lists_of_a_wrong_type_are_refused_by_name():
    with k3lib.Checkpoint(MODEL) as opened:
        for name, layers, experts in (("layers", 5, [1]), ("layers", ["1"], [1]), ("experts", [1], "12"),
                                      ("experts", [1], [None]), ("layers", None, [1]), ("layers", [1.0], [1])):
            with pytest.raises(k3lib.UsageError, match=f"^{name} is .*, expected a"):
                opened.kinds_of("a", layers, experts)
        with pytest.raises(k3lib.UsageError, match="^layers is 5, expected a range or None"):
            opened.count_of("a", 5)
        with pytest.raises(k3lib.UsageError, match="^config is 4, expected a Config or None"):
            opened.census(config=4)
