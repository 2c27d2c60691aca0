"A checkpoint: the files of a folder, their list, values checked by hand and against the safetensors library."
import json
import os
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors
from common import MODEL
from hypothesis import given
from hypothesis import strategies as st
from shards import E5, NAMES, TOY, TOY_DATA, file_of, shard, two_of, write

from k3lib import checkpoint, fileio
from k3lib.checkpoint import INDEX, Checkpoint
from k3lib.fileio import MAX_READ, CheckpointError
from k3lib.header import header_bytes
from k3lib.tensors import EXPERT_TENSORS

LINUX = sys.platform == "linux"


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(file_of(TOY, TOY_DATA))
    return tmp_path


@pytest.fixture(scope="module")
def oracle():
    with Checkpoint(MODEL) as opened:
        yield opened


# Values

def test_toy_by_hand(toy):
    with Checkpoint(toy) as c:
        assert c.extent("b") == (str(toy / "model.safetensors"), 8 + len(TOY) + 8, 6, "BF16", (1, 3))
        assert c.tensor("a").tolist() == [1, -2] and c.tensor("a").dtype == np.float32
        assert c.raw("b").tolist() == [[0x3F80, 0x3FC0, 0x4000]] and c.raw("b").dtype == np.uint16
        assert c.tensor("b").tolist() == [[1, 1.5, 2]] and c.tensor("b").dtype == np.float32
        assert list(c.names()) == ["a", "b"] and len(c) == 2 and "a" in c and "c" not in c


def test_bf16_widens_exactly(tmp_path):
    bits = np.arange(65536, dtype=np.uint16)
    (tmp_path / "model.safetensors").write_bytes(header_bytes([("w", "BF16", [256, 256])]) + bits.tobytes())
    wide = Checkpoint(tmp_path).tensor("w").view(np.uint32).ravel()
    assert (wide == bits.astype(np.uint32) * 65536).all()


def test_empty_and_scalar_shapes(tmp_path):
    tensors = [("none", "F32", [0, 4]), ("one", "F32", []), ("nil", "U8", [0]), ("b", "BF16", [2])]
    parts = write(tmp_path, "model.safetensors", tensors)
    c = Checkpoint(tmp_path)
    for name, _, shape in tensors:
        assert c.raw(name).shape == tuple(shape) and c.raw(name).tobytes() == parts[name], name


def test_empty_tensor_named_after_the_one_it_precedes(toy):
    text = TOY[:-1] + b',"nil":{"dtype":"F32","shape":[2,0],"data_offsets":[8,8]}}'
    (toy / "model.safetensors").write_bytes(file_of(text, TOY_DATA))
    assert Checkpoint(toy).tensor("nil").shape == (2, 0) and Checkpoint(toy).tensor("b").tolist() == [[1, 1.5, 2]]


def test_oracle_equals_the_safetensors_library(oracle):
    total = 0
    for file in oracle.files:
        for name, theirs in safetensors.deserialize(Path(file).read_bytes()):
            extent, bits = oracle.extent(name), oracle.raw(name)
            assert (extent.file, extent.dtype, list(extent.shape)) == (file, theirs["dtype"], theirs["shape"]), name
            assert bits.tobytes() == theirs["data"] and bits.flags.c_contiguous and bits.flags.writeable, name
            total += extent.nbytes
    assert total == json.loads((MODEL / "model.safetensors.index.json").read_text())["metadata"]["total_size"]


def test_names_come_in_file_order(oracle):
    places = [(e.file, e.offset) for e in map(oracle.extent, oracle.names())]
    assert places == sorted(places) and len(set(oracle.names())) == len(oracle) == 1496


def test_expert_is_its_six_tensors(oracle):
    p = "language_model.model.layers.12.block_sparse_moe.experts.15."
    expert = oracle.expert(np.int32(12), np.int32(15))  # a router gives int32
    assert list(expert) == ["w1", "w1_scale", "w2", "w2_scale", "w3", "w3_scale"]
    for short, extent in expert.items():
        w, _, scale = short.partition("_")
        assert extent == oracle.extent(f"{p}{w}.weight_{scale or 'packed'}"), short


@pytest.mark.parametrize("layer, expert", [
    (0, 0), (12, 16), (13, 0), (1, -1), (1, 1 << 20), (1 << 20, 0), (0, (1 << 20) + 3)])
def test_no_such_expert(oracle, layer, expert):
    with pytest.raises(CheckpointError, match=rf"no tensor .*layers\.{layer}\..*experts"):
        oracle.expert(layer, expert)


def test_kinds_of_a_pattern(oracle):
    scale = EXPERT_TENSORS["w2_scale"]
    assert oracle.kinds_of(scale, range(1, 13), range(16)) == {("U8", (64, 3))}
    for layers, experts in ([0, 1], [0]), ([1, 2, 3], range(17)), ([13], [0]), ([1], [-1]):
        assert None in oracle.kinds_of(scale, layers, experts)
    norm = "language_model.model.layers.#.input_layernorm.weight"
    A_log = "language_model.model.layers.#.self_attn.A_log"
    assert oracle.kinds_of(norm, range(13), [-1]) == {("BF16", (128,))}
    assert oracle.kinds_of(A_log, range(4), [-1]) == {("F32", (32,)), None}
    assert oracle.kinds_of("language_model.lm_head.weight", [-1], [-1]) == {("BF16", (512, 128))}
    assert oracle.kinds_of("no such", [-1], [-1]) == {None}


def test_tensors_of_a_prefix(oracle):
    names = list(oracle.names())
    for prefix in "", "language_model.", "mm_projector.", "vision", "none":
        assert oracle.count_of(prefix) == sum(name.startswith(prefix) for name in names)


# Names

@given(st.sets(st.one_of(NAMES, NAMES.map(lambda end: E5 + end),
                         st.sampled_from([E5 + "\n", "a\nb", E5[:-1], E5.replace("3", "03")]))))
def test_any_names_are_listed_and_found(names):
    "The index is made of all names at once, a look-up knows one: both must mean the same tensor."
    with tempfile.TemporaryDirectory() as folder:
        parts = write(Path(folder), "model.safetensors",
                      [(name, "U8", [i % 5]) for i, name in enumerate(sorted(names))])
        with Checkpoint(folder) as c:
            assert {*c.names()} == names == {name for name in names if name in c}
            assert {name: c.raw(name).tobytes() for name in names} == parts


def test_odd_names_are_found(tmp_path):
    names = ["a.5.b", "a.#.b", "a.05.b", "a.5", "5.a", "a.1000000.b", "a.1.2.3", "../x", "", "a.#.5", "é",
             "a.999999.b.999999"]
    parts = write(tmp_path, "model.safetensors", [(n, "U8", [3]) for n in names])
    c = Checkpoint(tmp_path)
    assert list(c.names()) == names
    for name in names:
        assert c.raw(name).tobytes() == parts[name], name


TEXTS = [b"\xff" * 8, b"[" * 30, b'"', b"1e9", b"-1", b"NaN", b"\\ud800", b"layers", b"}}", b'"b":']
EDIT = st.tuples(st.floats(0, 1), st.sampled_from(["put", "take", "set"]),
                 st.one_of(st.binary(max_size=3), st.sampled_from(TEXTS)))


@given(st.integers(0, 2), st.lists(EDIT, min_size=1, max_size=3), st.sampled_from([1 << 18, 100]))
def test_any_damaged_file_is_refused_or_consistent(tmp_path_factory, which, edits, block):
    """Bytes put in, taken out or changed in a shard or the index.

    CheckpointError, or what the library finds and the index, read plainly, lists.
    """
    folder = tmp_path_factory.mktemp("two")
    name, data = sorted(two_of(folder).items())[which]
    for share, how, new in edits:
        at = int(share * len(data))
        data = data[:at] + new * (how != "take") + data[at + len(new) * (how != "put"):]
    (folder / name).write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "INDEX_BLOCK", block)
        try:
            with Checkpoint(folder) as c:
                ours = {tensor: (os.path.basename(c.extent(tensor).file), c.extent(tensor).dtype,
                                 list(c.extent(tensor).shape), c.raw(tensor).tobytes()) for tensor in c.names()}
                odd = c.unusual
        except CheckpointError as error:
            assert "\n" not in str(error) and str(folder) in str(error) and len(str(error)) < 1000
            return
    if odd:  # what the library may refuse, or what is no tensor of the text stack
        return
    theirs = {tensor: (f"model-{i:05d}-of-000002.safetensors", t["dtype"], t["shape"], bytes(t["data"])) for i in (1, 2)
              for tensor, t in safetensors.deserialize((folder / f"model-{i:05d}-of-000002.safetensors").read_bytes())}
    assert ours == theirs
    assert json.loads((folder / INDEX).read_bytes())["weight_map"] == {tensor: place[0] for tensor,
                                                                       place in theirs.items()}


@pytest.mark.parametrize("depth", [*range(1, 20), *range(940, 1010, 3), 10**5])
def test_nesting_is_bounded_at_any_depth_of_calls(tmp_path, depth):
    "What can just be parsed must not fail to be printed."
    places = two_of(tmp_path)
    for name, text in ((INDEX, b'{"more":%s,"weight_map":{}}'), (INDEX, b'{"weight_map":{"a":%s}}'),
                       (shard(1, 2, "")[0], b'{"language_model.a":%s}')):
        text = text % (b"[" * depth + b"]" * depth)
        (tmp_path / name).write_bytes(text if name == INDEX else file_of(text, b"abcd"))
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(tmp_path)
        assert str(tmp_path / name) in str(caught.value) and len(str(caught.value)) < 600
        assert depth < 16 or "16 deep" in str(caught.value) or "not JSON" in str(caught.value)
        (tmp_path / name).write_bytes(places[name])


# Files of a folder

def test_shards_in_order(tmp_path):
    for i in (2, 3, 1):
        write(tmp_path, *shard(i, 3, f"t{i}"))
    (tmp_path / "other.safetensors").write_bytes(b"not read either")
    c = Checkpoint(tmp_path)
    assert [Path(c.extent(f"t{i}").file).name for i in (1, 2, 3)] == [shard(i, 3, "")[0]
                                                                      for i in (1, 2, 3)] == [Path(f).name
                                                                                              for f in c.files]


def test_five_digit_totals_are_read(tmp_path):
    for i in (1, 2):
        write(tmp_path, f"model-{i:05d}-of-00002.safetensors", [(f"t{i}", "U8", [4])])
    assert len(Checkpoint(tmp_path)) == 2


@pytest.mark.parametrize("present, words", [
    ([(1, 3), (3, 3)], ["model-00002-of-000003.safetensors is missing", "2 weight files", "expected 3"]),
    ([(1, 3), (2, 3)], ["model-00003-of-000003.safetensors is missing"]),
    ([(2, 2)], ["model-00001-of-000002.safetensors is missing"]),
    ([(1, 2), (2, 2), (3, 2)], ["model-00003-of-000002.safetensors does not belong"]),
    ([(0, 1), (1, 1)], ["model-00000-of-000001.safetensors does not belong"]),
    ([(1, 1), (1, 2), (2, 2)], ["of-00000", "does not belong"]),
    ([(1, 3), (2, 3), (3, 4)], ["model-00003-of-000003.safetensors is missing",
                                "model-00003-of-000004.safetensors does not belong"]),
    ([(0, 2), (1, 2)], ["model-00002-of-000002.safetensors is missing",
                        "model-00000-of-000002.safetensors does not belong"]),
])
def test_shard_count_must_match(tmp_path, present, words):
    for i, of in present:
        write(tmp_path, *shard(i, of, f"t{i}.{of}"))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value) and all(w in str(caught.value) for w in words), str(caught.value)


def test_no_weights_and_two_kinds_of_weights(tmp_path):
    with pytest.raises(CheckpointError, match="no weight files, expected either model.safetensors or model-00001"):
        Checkpoint(tmp_path)
    write(tmp_path, "model.safetensors", [("a", "U8", [1])])
    write(tmp_path, *shard(1, 1, "a"))
    with pytest.raises(CheckpointError, match="both kinds of weight file"):
        Checkpoint(tmp_path)


def test_no_such_folder(tmp_path, toy):
    with pytest.raises(FileNotFoundError, match=r"absent: no such folder, expected"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="a file, expected a checkpoint's folder"):
        Checkpoint(toy / "model.safetensors")


def test_name_in_two_shards(tmp_path):
    "Of the text stack it is refused, whatever the list says; of others the first one is kept."
    parts = {name: [write(tmp_path, *shard(i, 2, name), seed=i)[name] for i in (1, 2)] for name in ("layers.3.w", T3)}
    for places in (None, {T3: TWO}, {T3: ONE}):
        if places is not None:
            (tmp_path / INDEX).write_text(json.dumps({"weight_map": places | {"x": {ONE: TWO, TWO: ONE}[places[T3]]}}))
        with pytest.raises(CheckpointError, match=rf"model-00002-.*'{T3}' is also in .*model-00001-.*, expected once"):
            Checkpoint(tmp_path)
    (tmp_path / INDEX).unlink()
    for i in (1, 2):
        (tmp_path / shard(i, 2, "")[0]).unlink()
        write(tmp_path, *shard(i, 2, "layers.3.w"), seed=i)
    with Checkpoint(tmp_path) as c:
        assert len(c) == 1 and c.raw("layers.3.w").tobytes() == parts["layers.3.w"][0]
        assert c.unusual == ["tensors that nothing is computed from in two files: 1, layers.3.w"]
        assert c.census().tensors == 1 and [*c.names()] == ["layers.3.w"]


T3, ONE, TWO = "language_model.layers.3.w", *(shard(i, 2, "")[0] for i in (1, 2))
TB, ODD = "language_model.b", "language_model.é\"},"


def indexed(folder, **change):
    "Two shards of three tensors; returns their index with entries of weight_map changed, None for none."
    write(folder, ONE, [(T3, "U8", [4]), ("language_model.a", "U8", [1])])
    write(folder, TWO, [(TB, "U8", [1]), ("language_model.c", "U8", [1]), (ODD, "F32", [1]), ("v", "U8", [1])])
    places = {T3: ONE, "language_model.a": ONE, TB: TWO, "language_model.c": TWO, ODD: TWO, "v": TWO} | change
    listed = {tensor: file for tensor, file in places.items() if file is not None}
    return {"metadata": {"total_size": 12}, "weight_map": listed}


def refused_index(folder, index):
    "The message that refuses the index, an object or bytes, less the folder."
    (folder / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert str(caught.value).startswith(f"{folder / INDEX}: ") and "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder) + os.sep, "").removeprefix(INDEX + ": ")


def odd_index(folder, index):
    "What is unusual about a checkpoint whose index, an object or bytes, is accepted."
    (folder / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    with Checkpoint(folder) as c:
        assert {T3, TB, "language_model.c", ODD} <= {*c.names()}
        return c.unusual


@pytest.mark.parametrize("block", [1 << 18, 200, 150])
@pytest.mark.parametrize("how", [{}, {"indent": 2}, {"ensure_ascii": False}, {"indent": 1, "sort_keys": True},
                                 {"separators": (" , ", " : ")}])
def test_a_good_index_however_written_and_cut(tmp_path, monkeypatch, block, how):
    monkeypatch.setattr(checkpoint, "INDEX_BLOCK", block)
    index = indexed(tmp_path)
    trees = [index, dict(reversed(index.items())), index | {"metadata": {"total_size": 12.0, "x": [1]}},
             index | {"more": {"x": [ONE, TWO] * 3, "y": None}}, {"more": [ONE, TWO] * 3} | index,
             {"a": {"files": [ONE, TWO] * 3}} | index | {"metadata": {"total_size": 12, "files": [ONE, TWO] * 3}}]
    for tree in trees:
        for front in "", " \n":
            (tmp_path / INDEX).write_text(front + json.dumps(tree, **how), encoding="utf-8")
            with Checkpoint(tmp_path) as c:
                assert len(c) == 6 and c.unusual == []


def test_the_index_of_the_oracle_in_many_pieces(oracle, monkeypatch):
    whole = json.loads((MODEL / INDEX).read_text())
    monkeypatch.setattr(checkpoint, "INDEX_BLOCK", 1000)
    pieces = list(checkpoint.index_pieces(str(MODEL / INDEX)))
    assert len(pieces) > 100
    assert whole["weight_map"] == {name: file for piece in pieces for name, file in piece["weight_map"].items()}
    assert [piece.get("metadata") for piece in pieces] == [whole["metadata"]] + [None] * (len(pieces) - 1)
    with Checkpoint(MODEL) as c:
        assert c.files == oracle.files and c.unusual == oracle.unusual == []


@pytest.mark.parametrize("block", [1 << 18, 150])
@pytest.mark.parametrize("change, told", [
    ({T3: TWO}, f"tensor '{T3}': found in {ONE}, expected '{TWO}'"),
    ({T3: "model-00003-of-000002.safetensors"},
     f"tensor '{T3}': found no such file in FOLDER, expected 'model-00003-of-000002.safetensors'"),
    ({T3: 1}, f"tensor '{T3}': found no such file in FOLDER, expected 1"),
    ({T3: [ONE]}, f"tensor '{T3}': found no such file in FOLDER, expected ['{ONE}']"),
    ({T3: "../" + ONE}, f"tensor '{T3}': found no such file in FOLDER, expected '../{ONE}'"),
    ({T3: ""}, f"tensor '{T3}': found no such file in FOLDER, expected ''"),
    ({T3: ".."}, f"tensor '{T3}': found no such file in FOLDER, expected '..'"),
    ({"language_model.4": ONE}, f"tensor 'language_model.4': found in no file, expected '{ONE}'"),
    ({"language_model.new": TWO}, f"tensor 'language_model.new': found in no file, expected '{TWO}'"),
    ({TB: None}, f"tensor '{TB}': found in {TWO}, expected no file, because it is not listed"),
])
def test_an_index_that_disagrees_about_the_text_stack(tmp_path, monkeypatch, block, change, told):
    monkeypatch.setattr(checkpoint, "INDEX_BLOCK", block)
    assert refused_index(tmp_path, indexed(tmp_path, **change)) == told.replace("FOLDER", str(tmp_path))


LISTED = "listed tensors that nothing is computed from, "
SIZE = "lists whose total_size is not the bytes of all tensors: 1, "


@pytest.mark.parametrize("block", [1 << 18, 150])
@pytest.mark.parametrize("change, told", [
    ({"v": ONE}, [LISTED + "in another file: 1, v"]),
    ({"v": None}, ["tensors that nothing is computed from, not listed: 1, v"]),
    ({"v.3": TWO, "v.4": TWO}, [LISTED + "that no file has: 2, v.3, ..."]),
    ({"w": "gone.safetensors", "x": 3, "y": None, "z": "../" + TWO},
     ["listed files of tensors that nothing is computed from, missing: 3, gone.safetensors, ...",
      LISTED + "that no file has: 3, w, ..."]),
    ({"v": "gone.safetensors"}, ["listed files of tensors that nothing is computed from, missing: 1, gone.safetensors",
                                 LISTED + "in another file: 1, v"]),
])
def test_an_index_that_is_wrong_about_other_tensors(tmp_path, monkeypatch, block, change, told):
    monkeypatch.setattr(checkpoint, "INDEX_BLOCK", block)
    assert odd_index(tmp_path, indexed(tmp_path, **change)) == told


@pytest.mark.parametrize("block", [1 << 18, 150])
@pytest.mark.parametrize("total", [13, 0, -12, 12.5, True, "12", [12], float("nan"), {"a": 1}])
def test_an_index_of_another_size(tmp_path, monkeypatch, block, total):
    monkeypatch.setattr(checkpoint, "INDEX_BLOCK", block)
    index = indexed(tmp_path) | {"metadata": {"total_size": total}}
    assert odd_index(tmp_path, index) == [f"{SIZE}{total!r}, not 12"]
    assert odd_index(tmp_path, dict(reversed(index.items()))) == [f"{SIZE}{total!r}, not 12"]
    assert odd_index(tmp_path, index | {"metadata": total}) == [f"{SIZE}{total!r}, not 12"] or type(total) is dict
    for metadata in ({}, None, {"total_size": None}, {"x": 12}):
        assert odd_index(tmp_path, index | {"metadata": metadata}) == [SIZE + "missing, not 12"]
    assert odd_index(tmp_path, {"weight_map": index["weight_map"]}) == [SIZE + "missing, not 12"]


def test_the_list_says_which_files_are_meant(tmp_path):
    "Whatever their names are, and whatever else lies in the folder."
    index = indexed(tmp_path)
    right = {name: Checkpoint(tmp_path).raw(name).tobytes() for name in (T3, TB, ODD, "v")}
    write(tmp_path, "vision.safetensors", [("vision", "U8", [3])])
    for name in ("model.safetensors", "model-00003-of-000002.safetensors", "model-00001-of-000016.safetensors"):
        write(tmp_path, name, [(T3, "U8", [4])], seed=7)
    (tmp_path / "damaged.safetensors").write_bytes(b"not read")
    (tmp_path / "3").write_bytes(b"not read either")
    index["weight_map"] |= {"vision": "vision.safetensors", "sound": 3}
    index["metadata"]["total_size"] += 3
    assert odd_index(tmp_path, index) == [
        "listed files of tensors that nothing is computed from, missing: 1, 3",
        "weight files that are not listed, and not read: 4, damaged.safetensors, ...",
        LISTED + "that no file has: 1, sound"]
    del index["weight_map"]["sound"]
    with Checkpoint(tmp_path) as c:
        assert {name: c.raw(name).tobytes() for name in right} == right and c.raw("vision").shape == (3,)
        assert [os.path.basename(file) for file in c.files] == [ONE, TWO, "vision.safetensors"]
    (tmp_path / ONE).rename(tmp_path / "first.bin")
    index["weight_map"] |= {T3: "first.bin", "language_model.a": "first.bin"}
    assert len(odd_index(tmp_path, index)) == 1


@pytest.mark.parametrize("block, told", [
    (1 << 18, f"its text up to byte 516: name '{T3}' found twice, expected once"),
    (150, f"tensor '{T3}': listed twice, expected once")])
def test_a_tensor_listed_twice(tmp_path, monkeypatch, block, told):
    monkeypatch.setattr(checkpoint, "INDEX_BLOCK", block)
    text = json.dumps(indexed(tmp_path)).encode()
    twice = text[:-2] + b', "%s": "%s", "%s": "%s"}}' % tuple(map(str.encode, (TB, TWO, T3, ONE)))
    assert refused_index(tmp_path, twice) == told


@pytest.mark.parametrize("text, told", [
    (b"", "is not JSON"), (b"[]", "holds a JSON list"), (b"\xff", "is not JSON"), (b"\xef\xbb\xbf{}", "is not JSON"),
    (b"{}", "has [], expected an object weight_map"),
    (b'{"weight_map":[]}', "expected an object weight_map"), (b'{"metadata":{}}', "expected an object weight_map"),
    (b'{"weight_map":{}}', "lists no tensor, expected the file of every tensor"),
    (b'{"weight_map":{"v":"x","w":3,"x":null}}', "lists 3 files, the first is 'x', expected at least one that is in"),
    (b'{"weight_map":{"a":"\xff"}}', "is not JSON"), (b'{"weight_map":{}', "is not JSON"),
    (b'{"weight_map":{}}}', "is not JSON"),
    (b'{"weight_map":{},"weight_map":{}}', "name 'weight_map' found twice"),
    (b'{"weight_map":{' + b" " * 900 + b"}}", "without .safetensors"),
    (b'{"weight_map":{"b":"%s"},"more":{"x":"y.safetensors","layers.3.w":"%s"%s}}' % (
        TWO.encode(), ONE.encode(), b" " * 1000), "['weight_map', 'more']"),
])
def test_what_is_no_index(tmp_path, monkeypatch, text, told):
    monkeypatch.setattr(checkpoint, "INDEX_BLOCK", 100)
    indexed(tmp_path)
    assert told in refused_index(tmp_path, text)


def test_an_index_is_judged_by_its_size_before_it_is_read(tmp_path, monkeypatch):
    indexed(tmp_path)
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(10**12)  # sparse
    asked, real, index = [], os.preadv, (tmp_path / INDEX).stat().st_ino

    def noted(fd, views, offset):
        asked.append(os.fstat(fd).st_ino)
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", noted)
    with pytest.raises(CheckpointError, match=f"{INDEX}: 1,000,000,000,000 bytes, expected at most 200,000,000"):
        Checkpoint(tmp_path)
    assert index not in asked


def test_an_index_that_cannot_be_opened(tmp_path):
    indexed(tmp_path)
    (tmp_path / INDEX).mkdir()
    with pytest.raises(CheckpointError, match=rf"{INDEX}: cannot be opened: not a file"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX).rmdir()
    (tmp_path / INDEX).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"{INDEX}: cannot be opened: a link to nothing"):
        Checkpoint(tmp_path)


def test_absent_tensor(oracle):
    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight among the 1,496 of its 16 files"):
        oracle.tensor("lm_head.weight")


@pytest.mark.skipif(os.name == "nt", reason="links")
def test_links_of_a_hub_cache(tmp_path):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), folder.mkdir()
    parts = write(blobs, "8a7f", [("a", "U8", [4])])
    (folder / "model.safetensors").symlink_to("../blobs/8a7f")
    c = Checkpoint(folder)
    assert c.raw("a").tobytes() == parts["a"] and c.extent("a").file == str(folder / "model.safetensors")
    (blobs / "8a7f").unlink()
    with pytest.raises(CheckpointError, match="model.safetensors: cannot be opened: a link to nothing"):
        Checkpoint(folder)


def test_a_folder_in_place_of_a_shard(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="model.safetensors: cannot be opened: not a file"):
        Checkpoint(tmp_path)


# Reading

def test_reads_are_split(toy, monkeypatch):
    assert MAX_READ < (1 << 31) - 4096
    asked, real = [], os.preadv
    monkeypatch.setattr(fileio, "MAX_READ", 5)
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: asked.append(len(views[0])) or real(fd, views, offset))
    assert Checkpoint(toy).tensor("a").tolist() == [1, -2]
    assert max(asked) == 5


def test_short_reads_continue(oracle, monkeypatch):
    name, real, random = "language_model.lm_head.weight", os.preadv, np.random.default_rng(1)
    right = oracle.raw(name)
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:random.integers(1, 5000)]], offset))
    assert (oracle.raw(name) == right).all()


def test_without_preadv_from_many_threads(oracle, monkeypatch):
    names = [n for n in oracle.names() if ".experts.0." in n or "q_proj" in n]
    right = {n: oracle.raw(n).tobytes() for n in names}
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(fileio, "MAX_READ", 1000)

    def wrong(i):
        return [n for n in names[i:] + names[:i] if oracle.raw(n).tobytes() != right[n]]

    with ThreadPoolExecutor(4) as pool:
        assert not sum(pool.map(wrong, range(4)), [])


def test_file_that_shrinks_after_it_was_indexed(toy):
    c = Checkpoint(toy)
    path, at = toy / "model.safetensors", c.extent("b").offset
    os.truncate(path, at + 4)
    with pytest.raises(CheckpointError) as caught:
        c.raw("b")
    assert str(caught.value) == f"{path}: tensor b: got 4 bytes at offset {at}, expected 6: the file ends there"


def test_failed_read_and_closed_file(toy, monkeypatch):
    def fail(fd, views, offset):
        raise OSError(5, "Input/output error")

    c = Checkpoint(toy)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fail)
        told = r"tensor b: reading 6 bytes at offset \d+ failed: .*Input/output error"
        with pytest.raises(CheckpointError, match=told):
            c.raw("b")
    c.close()
    with pytest.raises(CheckpointError, match="tensor b: .*closed file"):
        c.raw("b")


@pytest.mark.skipif(not LINUX, reason="/proc")
def test_files_are_closed(tmp_path):
    def open_files():
        links = [os.path.join("/proc/self/fd", n) for n in os.listdir("/proc/self/fd")]
        return sum(os.path.islink(p) and str(tmp_path) in os.readlink(p) for p in links)

    write(tmp_path, *shard(1, 2, "a"))
    write(tmp_path, *shard(2, 2, "b"))
    with Checkpoint(tmp_path) as c:
        c.raw("a"), c.raw("a")
        assert open_files() == 2
    assert open_files() == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        c = Checkpoint(tmp_path)
        del c
    assert open_files() == 0 and not caught, caught  # Python would close them as well, with a ResourceWarning
    (tmp_path / shard(2, 2, "")[0]).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert open_files() == 0, caught


def test_open_files_are_allowed_for_the_reader_too(monkeypatch):
    "A reader (k3lib.disk) opens each file once or twice more."
    asked = []
    monkeypatch.setattr(checkpoint, "allow_open_files", asked.append)
    with Checkpoint(MODEL) as c:
        assert asked == [3 * len(c.files)]


def test_f8_has_bits_but_no_values(tmp_path):
    parts = write(tmp_path, "model.safetensors", [("a", "F8_E4M3", [4])])
    c = Checkpoint(tmp_path)
    assert c.raw("a").tobytes() == parts["a"]
    with pytest.raises(CheckpointError, match="tensor a: F8_E4M3 has no numpy type"):
        c.tensor("a")
