"""The checkpoint reader: values checked by hand, the safetensors library beside it, every kind of damage, the release's census."""
import json
import os
import struct
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import numpy as np
import pytest
import safetensors
from common import MODEL, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lib import checkpoint, fileio, header
from k3lib.checkpoint import EXPERT_TENSORS, INDEX, Checkpoint, join_name, split_name
from k3lib.fileio import READ_MAX, CheckpointError
from k3lib.header import ITEMSIZE, header_bytes, parse_header, quick_header

LINUX = sys.platform == "linux"
TOY = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}'
TOY_DATA = struct.pack("<2f", 1, -2) + bytes.fromhex("803f c03f 0040")  # BF16 1, 1.5, 2


def file_of(text, data):
    return struct.pack("<Q", len(text)) + text + data


def write(folder, name, tensors, seed=0):
    "A shard of random bytes; returns them by tensor."
    random = np.random.default_rng(seed)
    parts = {n: random.bytes(prod(shape) * ITEMSIZE[dtype]) for n, dtype, shape in tensors}
    (folder / name).write_bytes(header_bytes(tensors) + b"".join(parts.values()))
    return parts


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


def test_header_is_padded_and_read_back():
    tensors = [("x", "F32", (3,)), ("language_model.y", "U8", (5, 2))]
    head = header_bytes(tensors)
    assert len(head) % 8 == 0 and int.from_bytes(head[:8], "little") == len(head) - 8
    assert parse_header(head[8:], 22, "f") == [("x", "F32", (3,), 0, 12), ("language_model.y", "U8", (5, 2), 12, 22)]


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


@pytest.mark.parametrize("layer, expert", [(0, 0), (12, 16), (13, 0), (1, -1), (1, 1 << 20), (1 << 20, 0), (0, (1 << 20) + 3)])
def test_no_such_expert(oracle, layer, expert):
    with pytest.raises(CheckpointError, match=rf"no tensor .*layers\.{layer}\..*experts"):
        oracle.expert(layer, expert)


def test_kinds_of_a_pattern(oracle):
    scale = EXPERT_TENSORS["w2_scale"]
    assert oracle.kinds_of(scale, range(1, 13), range(16)) == {("U8", (64, 3))}
    for layers, experts in ([0, 1], [0]), ([1, 2, 3], range(17)), ([13], [0]), ([1], [-1]):
        assert None in oracle.kinds_of(scale, layers, experts)
    norm, A_log = "language_model.model.layers.#.input_layernorm.weight", "language_model.model.layers.#.self_attn.A_log"
    assert oracle.kinds_of(norm, range(13), [-1]) == {("BF16", (128,))} and oracle.kinds_of(A_log, range(4), [-1]) == {("F32", (32,)), None}
    assert oracle.kinds_of("language_model.lm_head.weight", [-1], [-1]) == {("BF16", (512, 128))}
    assert oracle.kinds_of("no such", [-1], [-1]) == {None}


def test_tensors_of_a_prefix(oracle):
    names = list(oracle.names())
    for prefix in "", "language_model.", "mm_projector.", "vision", "none":
        assert oracle.count_of(prefix) == sum(name.startswith(prefix) for name in names)


def test_part_of_a_tensor(oracle):
    name = "language_model.model.embed_tokens.weight"
    row = np.empty(256, np.uint8)
    oracle.read_into(name, row, start=511 * 256)
    assert row.tobytes() == oracle.raw(name)[511].tobytes()
    for start in (-1, 511 * 256 + 1):
        with pytest.raises(CheckpointError, match="131,072"):
            oracle.read_into(name, row, start)


# Names

NAMES = st.one_of(
    st.text("a.#019", max_size=12),
    st.lists(st.sampled_from(["layers", "experts", "#", "0", "7", "07", "999999", "1000000", "²", "٣", "", "w1"]), max_size=7).map(".".join),
)


@given(st.sets(NAMES, max_size=30))
def test_split_names_join_and_stay_distinct(names):
    splits = [split_name(name) for name in names]
    assert [join_name(*s) for s in splits] == list(names)
    assert len(set(splits)) == len(names)
    assert all(-1 <= n < 1_000_000 for s in splits for n in s[1:])  # so that both fit a key


E5 = "language_model.model.layers.3.block_sparse_moe.experts.5."


@given(st.sets(st.one_of(NAMES, NAMES.map(lambda end: E5 + end), st.sampled_from([E5 + "\n", "a\nb", E5[:-1], E5.replace("3", "03")]))))
def test_any_names_are_listed_and_found(names):
    "The index is made of all names at once, a look-up knows one: both must mean the same tensor."
    with tempfile.TemporaryDirectory() as folder:
        parts = write(Path(folder), "model.safetensors", [(name, "U8", [i % 5]) for i, name in enumerate(sorted(names))])
        with Checkpoint(folder) as c:
            assert {*c.names()} == names == {name for name in names if name in c}
            assert {name: c.raw(name).tobytes() for name in names} == parts


def test_odd_names_are_found(tmp_path):
    names = ["a.5.b", "a.#.b", "a.05.b", "a.5", "5.a", "a.1000000.b", "a.1.2.3", "../x", "", "a.#.5", "é", "a.999999.b.999999"]
    parts = write(tmp_path, "model.safetensors", [(n, "U8", [3]) for n in names])
    c = Checkpoint(tmp_path)
    assert list(c.names()) == names
    for name in names:
        assert c.raw(name).tobytes() == parts[name], name


# Damage to a header

def entry(dtype="BF16", shape="[1,3]", offsets="[8,14]"):
    return f'"b":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


DAMAGE = {
    "not JSON": (TOY[:-2], ["not JSON"]),
    "not UTF-8": (TOY.replace(b'"b"', b'"\xff"'), ["not JSON", "utf-8"]),
    "nested past recursion": (b'{"a":' + b"[" * 100_000, ["not JSON"]),
    "nested": (TOY.replace(b"[1,3]", b"[" * 15 + b"]" * 15), ["lists and objects more than 16 deep"]),
    "a number of 5000 digits": (TOY.replace(b"[2]", b"[" + b"9" * 5000 + b"]"), ["not JSON"]),
    "a list": (b"[" + TOY + b"]", ["begins with", "expected"]),
    "half a surrogate pair": (TOY.replace(b'"b"', b'"\\ud800"'), ["not JSON", "surrogates"]),
    "metadata of numbers": (b'{"__metadata__":{"n":1},' + TOY[1:], ["__metadata__", "strings"]),
    "metadata a list": (b'{"__metadata__":["pt"],' + TOY[1:], ["__metadata__", "strings"]),
    "name twice": (TOY.replace(b'"b"', b'"a"'), ["'a'", "twice"]),
    "field twice": (TOY.replace(b'"shape":[2]', b'"shape":[2],"shape":[2]'), ["'shape'", "twice"]),
    "entry is a list": (TOY.replace(entry().encode(), b'"b":[1]'), ["'b'", "[1]", "dtype, shape and data_offsets"]),
    "field missing": (TOY.replace(b'"shape":[1,3],', b""), ["'b'", "dtype, shape and data_offsets"]),
    "field unknown": (TOY.replace(b'"shape":[1,3]', b'"shape":[1,3],"x":1'), ["'b'", "dtype, shape and data_offsets"]),
    "dtype unknown": (TOY.replace(b"BF16", b"BF17"), ["'b'", "'BF17'", "BF16 F32 U8"]),
    "dtype a list": (TOY.replace(b'"BF16"', b'["BF16"]'), ["'b'", "['BF16']"]),
    "shape too long": (TOY.replace(b"[1,3]", b"[1,1,3]"[:-1] + b",1" * 40 + b"]"), ["'b'", "at most 32"]),
    "shape too large": (TOY.replace(b"[1,3]", b"[1,4]"), ["'b'", "6 bytes", "8 bytes"]),
    "shape overflows": (TOY.replace(b"[1,3]", b"[4611686018427387904,6]"), ["'b'", "6 bytes", "BF16"]),
    "dimensions of 4000 digits": (TOY.replace(b"[1,3]", b"[%d,%d]" % (10**4000, 10**4000)), ["'b'", "whole numbers"]),
    "empty but too large": (TOY.replace(b"[1,3]", b"[4611686018427387904,0,4611686018427387904]"), ["'b'", "whole numbers that an array"]),
    "shape not a list": (TOY.replace(b"[1,3]", b"3"), ["'b'", "shape 3"]),
    "dtype too wide": (TOY.replace(b"BF16", b"F32"), ["'b'", "6 bytes", "12 bytes"]),
    "negative dimension": (TOY.replace(b"[1,3]", b"[-1,-3]"), ["'b'", "[-1, -3]", "whole numbers"]),
    "fraction": (TOY.replace(b"[1,3]", b"[1,3.0]"), ["'b'", "3.0", "whole numbers"]),
    "bool": (TOY.replace(b"[1,3]", b"[true,3]"), ["'b'", "True", "whole numbers"]),
    "NaN": (TOY.replace(b"[8,14]", b"[8,NaN]"), ["'b'", "nan", "whole numbers"]),
    "bool offset": (TOY.replace(b"[0,8]", b"[false,8]"), ["'a'", "False", "whole numbers"]),
    "negative offset": (TOY.replace(b"[0,8]", b"[-8,0]"), ["'a'", "[-8, 0]", "whole numbers"]),
    "three offsets": (TOY.replace(b"[8,14]", b"[8,14,14]"), ["'b'", "two whole numbers"]),
    "offsets backwards": (TOY.replace(b"[8,14]", b"[14,8]"), ["'b'", "-6 bytes", "6 bytes"]),
    "overlap": (TOY.replace(b"[8,14]", b"[6,12]"), ["'b'", "6", "8", "overlap of 2 bytes"]),
    "same place": (TOY.replace(b"[8,14]", b"[0,6]"), ["overlap"]),
    "gap": (TOY.replace(b"[8,14]", b"[9,15]"), ["'b'", "gap of 1 bytes"]),
    "gap in front": (TOY.replace(b"[0,8]", b"[2,10]").replace(b"[8,14]", b"[10,16]"), ["'a'", "the header ends", "gap of 2 bytes"]),
    "past the end": (TOY.replace(b"[8,14]", b"[80,86]"), ["'b'", "86", "truncated"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_header_is_refused(damage, tmp_path):
    text, words = DAMAGE[damage]
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(text, TOY_DATA + (b"\0\0" if "gap" in damage else b"")))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message and len(message) < 600, message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("cut, words", [(0, ["file of 0 bytes", "at least 10"]), (9, ["file of 9 bytes", "at least 10"]), (60, ["header length"]),
                                        (-1, ["'b'", "14", "13"]), (-6, ["'b'"]), (-13, ["'a'"])])
def test_truncated_file_is_refused(toy, cut, words):
    path = toy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(toy)
    assert str(path) in str(caught.value) and all(word in str(caught.value) for word in words), str(caught.value)


def test_trailing_bytes_are_refused(toy):
    with (toy / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match=r"15 bytes of data, expected 14, where 'b' ends: 1 bytes"):
        Checkpoint(toy)


@pytest.mark.parametrize("length", [0, 1, 1 << 63, (1 << 64) - 1, 101_000_000, 100_000_001, 400_000_000])
def test_header_length_is_judged_before_it_is_read(tmp_path, monkeypatch, length):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(300_000_000)
    asked = []
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: asked.append(len(views[0])) or os.readv(fd, views))
    with pytest.raises(CheckpointError, match=f"header length {length:,} bytes, expected 2 to 100,000,000"):
        Checkpoint(tmp_path)
    assert asked == [8]


def test_a_long_header_is_believed_by_columns_or_not_at_all(tmp_path, monkeypatch):
    "What Python makes of a text takes many times its room: a header that needs the plain reader has a bound of its own."
    monkeypatch.setattr(header, "PLAIN_MAX", len(TOY))
    for text, size in ((TOY, 14), (TOY.replace(b"14", b"13"), 13), (TOY.replace(b"}}", b"}}   "), 14)):
        (tmp_path / "model.safetensors").write_bytes(file_of(text, TOY_DATA[:size]))
        if size == 14:
            assert len(Checkpoint(tmp_path)) == 2
        else:
            with pytest.raises(CheckpointError, match="span 5 bytes"):
                Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(file_of(TOY.replace(b"}}", b"} }"), TOY_DATA))
    with pytest.raises(CheckpointError, match=rf"header of {len(TOY) + 1} bytes is not plainly right, expected at most {len(TOY)} "):
        Checkpoint(tmp_path)


def test_names_are_counted_before_their_keys_run_out(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PATTERNS_MAX", 3)
    for i in 1, 2:
        write(tmp_path, shard(i, 2, "")[0], [(f"{name}{i}", "U8", [1]) for name in ("a", "b", "layers.1.", "layers.2.")[:i + 1]])
    with pytest.raises(CheckpointError, match=r"model-00002-.*: 5 different names so far, numbers taken out, expected at most 3"):
        Checkpoint(tmp_path)


def test_metadata_padding_and_any_order_are_fine(tmp_path):
    a, b = TOY[1:-1].split(b',"b"')
    text = b'{"__metadata__":{"format":"pt"},\n "b"' + b + b" , " + a + b"}   \n"
    (tmp_path / "model.safetensors").write_bytes(file_of(text, TOY_DATA))
    c = Checkpoint(tmp_path)
    assert c.tensor("b").tolist() == [[1, 1.5, 2]] and list(c.names()) == ["a", "b"]


FIELD = st.one_of(st.integers(-2, 20), st.floats(), st.booleans(), st.none(), st.text(max_size=3), st.lists(st.integers(-1, 20), max_size=3),
                  st.sampled_from(["F32", "BF16", "U8"]))
ENTRY = st.one_of(FIELD, st.fixed_dictionaries({"dtype": st.sampled_from(["F32", "BF16", "U8", "F4"]), "shape": st.lists(st.integers(0, 4), max_size=3),
                                                "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2)}),
                  st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), FIELD))


def quick_rows(text, data_bytes):
    "What quick_header gives, as parse_header would, or None."
    columns = quick_header(text, data_bytes)
    if columns is None:
        return None
    names, kind, begin, end, kind_of = columns
    return sorted(((name, *kind_of[k], int(b), int(e)) for name, k, b, e in zip(names, kind, begin, end)), key=lambda row: row[3:])


def believed_only_if_the_library_does(text, data):
    quick = quick_rows(text, len(data))
    try:
        rows = parse_header(text, len(data), "f")
    except CheckpointError as error:
        assert "\n" not in str(error) and quick is None
        return
    assert quick is None or quick == rows
    theirs = dict(safetensors.deserialize(file_of(text, data)))
    assert {name: (dtype, list(shape), data[b:e]) for name, dtype, shape, b, e in rows} == {
        name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in theirs.items()}


def two_of(folder):
    "A checkpoint of two small shards and its index; {file name: bytes}."
    write(folder, *shard(1, 2, "layers.3.w"))
    write(folder, shard(2, 2, "")[0], [("b", "BF16", [1, 2]), ("layers.0.é", "F32", [1])])
    places = {name: shard(i, 2, "")[0] for i, name in ((1, "layers.3.w"), (2, "b"), (2, "layers.0.é"))}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 12}, "weight_map": places}))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


EDIT = st.tuples(st.floats(0, 1), st.sampled_from(["put", "take", "set"]), st.one_of(
    st.binary(max_size=3), st.sampled_from([b"\xff" * 8, b"[" * 30, b'"', b"1e9", b"-1", b"NaN", b"\\ud800", b"layers", b"}}", b'"b":'])))


@given(st.integers(0, 2), st.lists(EDIT, min_size=1, max_size=3), st.sampled_from([1 << 18, 100]))
def test_any_damaged_file_is_refused_or_consistent(tmp_path_factory, which, edits, block):
    "Bytes put in, taken out or changed in a shard or the index: CheckpointError, or what the library finds and the index, read plainly, lists."
    folder = tmp_path_factory.mktemp("two")
    name, data = sorted(two_of(folder).items())[which]
    for share, how, new in edits:
        at = int(share * len(data))
        data = data[:at] + new * (how != "take") + data[at + len(new) * (how != "put"):]
    (folder / name).write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_BLOCK", block)
        try:
            with Checkpoint(folder) as c:
                ours = {tensor: (os.path.basename(c.extent(tensor).file), c.extent(tensor).dtype, list(c.extent(tensor).shape), c.raw(tensor).tobytes()) for tensor in c.names()}
        except CheckpointError as error:
            assert "\n" not in str(error) and str(folder) in str(error) and len(str(error)) < 1000
            return
    theirs = {tensor: (f"model-{i:05d}-of-000002.safetensors", t["dtype"], t["shape"], bytes(t["data"])) for i in (1, 2)
              for tensor, t in safetensors.deserialize((folder / f"model-{i:05d}-of-000002.safetensors").read_bytes())}
    assert ours == theirs and json.loads((folder / INDEX).read_bytes())["weight_map"] == {tensor: place[0] for tensor, place in theirs.items()}


@pytest.mark.parametrize("depth", [*range(1, 20), *range(940, 1010, 3), 10**5])
def test_nesting_is_bounded_at_any_depth_of_calls(tmp_path, depth):
    "What can just be parsed must not fail to be printed."
    places = two_of(tmp_path)
    for name, text in ((INDEX, b'{"metadata":%s,"weight_map":{}}'), (shard(1, 2, "")[0], b'{"a":%s}'), (shard(1, 2, "")[0], b'{"__metadata__":%s}')):
        text = text % (b"[" * depth + b"]" * depth)
        (tmp_path / name).write_bytes(text if name == INDEX else file_of(text, b"abcd"))
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(tmp_path)
        assert str(tmp_path / name) in str(caught.value) and len(str(caught.value)) < 600
        assert depth < 16 or "16 deep" in str(caught.value) or "not JSON" in str(caught.value)
        (tmp_path / name).write_bytes(places[name])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=3), ENTRY, max_size=3), st.binary(max_size=16))
def test_any_json_is_believed_only_if_the_library_believes_it(entries, data):
    believed_only_if_the_library_does(json.dumps(entries).encode(), data)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(TOY) - 1), st.sampled_from(list(b'0123456789{}[]",:abU8 -.e\\\xff\n'))), max_size=3),
       st.sampled_from([0, 13, 14, 15]))
def test_any_damaged_text_is_believed_only_if_the_library_believes_it(edits, size):
    text = bytearray(TOY)
    for place, byte in edits:
        text[place] = byte
    believed_only_if_the_library_does(bytes(text), (TOY_DATA + b"\0")[:size])


@pytest.mark.parametrize("front", ["{", '{"__metadata__":{"format":"pt"},', '{ "__metadata__" : {},'])
def test_usual_headers_are_read_by_columns(front):
    tensors = [("z.é", "F32", [3]), (E5 + "w", "U8", [5, 2]), ("nil", "I64", [0]), ("one", "F64", []), ("a", "BF16", [1, 3])]
    text = header_bytes(tensors)[8:].replace(b"\\u00e9", "é".encode())
    text = front.encode() + text[1:]
    rows = parse_header(text, 36, "f")
    assert len(rows) == 5 and quick_rows(text, 36) == rows
    first, second, *rest = text[len(front):].rstrip()[:-1].decode().split("},")
    moved = (front + "},".join([second, *rest]) + "," + first + "}}").encode()  # not in the order of the data
    assert quick_rows(moved, 36) == parse_header(moved, 36, "f") == rows


@pytest.mark.parametrize("damage", [*DAMAGE, "comma in front", "metadata again", "metadata twice", "leading zero", "control character", "tail",
                                    "no comma", "two commas", "an axis left out"])
def test_damaged_headers_are_never_read_by_columns(damage):
    pt = b'{"__metadata__":{"a":"b"},'
    text = DAMAGE[damage][0] if damage in DAMAGE else {
        "comma in front": b"{," + TOY[1:], "metadata again": pt + TOY[1:-1] + b"," + entry(shape="[0]", offsets="[0,0]").replace("b", "__metadata__", 1).encode() + b"}",
        "metadata twice": pt.replace(b"}", b',"a":"b"}') + TOY[1:], "leading zero": TOY.replace(b"[0,8]", b"[0,08]"),
        "control character": TOY.replace(b'"a"', b'"a\n"'), "tail": TOY + b",",
        "no comma": TOY.replace(b'},"b"', b'};"b"'), "two commas": TOY.replace(b'},"b"', b'},,"b"'), "an axis left out": TOY.replace(b"[1,3]", b"[1,,3]"),
    }[damage]
    with pytest.raises(CheckpointError):
        parse_header(text, 16 if "gap" in damage else 14, "f")
    assert quick_header(text, 16 if "gap" in damage else 14) is None


# Files of a folder

def shard(i, of, name):
    return f"model-{i:05d}-of-{of:06d}.safetensors", [(name, "U8", [4])]


def test_shards_in_order(tmp_path):
    for i in (2, 3, 1):
        write(tmp_path, *shard(i, 3, f"t{i}"))
    (tmp_path / "other.safetensors").write_bytes(b"not read either")
    c = Checkpoint(tmp_path)
    assert [Path(c.extent(f"t{i}").file).name for i in (1, 2, 3)] == [shard(i, 3, "")[0] for i in (1, 2, 3)] == [Path(f).name for f in c.files]


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
    ([(1, 3), (2, 3), (3, 4)], ["model-00003-of-000003.safetensors is missing", "model-00003-of-000004.safetensors does not belong"]),
    ([(0, 2), (1, 2)], ["model-00002-of-000002.safetensors is missing", "model-00000-of-000002.safetensors does not belong"]),
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
    write(tmp_path, *shard(1, 2, "layers.3.w"))
    write(tmp_path, *shard(2, 2, "layers.3.w"))
    with pytest.raises(CheckpointError, match=r"model-00002-.*'layers.3.w' is also in .*model-00001-.*, expected once"):
        Checkpoint(tmp_path)


def indexed(folder, **change):
    "Two shards of four tensors; returns their index with entries of weight_map changed, None for none."
    write(folder, *shard(1, 2, "layers.3.w"))
    name, _ = shard(2, 2, "")
    write(folder, name, [("b", "U8", [1]), ("c", "U8", [1]), ("é\"},", "F32", [1])])
    places = {"layers.3.w": shard(1, 2, "")[0], "b": name, "c": name, "é\"},": name} | change
    return {"metadata": {"total_size": 10}, "weight_map": {tensor: file for tensor, file in places.items() if file is not None}}


def refused_index(folder, index):
    "The message that refuses the index, an object or bytes, less the folder."
    (folder / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert str(caught.value).startswith(f"{folder / INDEX}: ") and "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder) + os.sep, "").removeprefix(INDEX + ": ")


ONE, TWO = (shard(i, 2, "")[0] for i in (1, 2))


@pytest.mark.parametrize("block", [1 << 18, 200, 150])
@pytest.mark.parametrize("how", [{}, {"indent": 2}, {"ensure_ascii": False}, {"indent": 1, "sort_keys": True}])
def test_a_good_index_however_written_and_cut(tmp_path, monkeypatch, block, how):
    monkeypatch.setattr(checkpoint, "_BLOCK", block)
    index = indexed(tmp_path)
    for tree in index, dict(reversed(index.items())), {"weight_map": index["weight_map"]}, index | {"metadata": {"total_size": 10.0, "x": [1]}}:
        (tmp_path / INDEX).write_text(json.dumps(tree, **how), encoding="utf-8")
        assert len(Checkpoint(tmp_path)) == 4


def test_the_index_of_the_oracle_in_many_pieces(oracle, monkeypatch):
    whole = json.loads((MODEL / INDEX).read_text())
    monkeypatch.setattr(checkpoint, "_BLOCK", 1000)
    pieces = list(checkpoint.index_pieces(str(MODEL / INDEX), 10**6))
    assert len(pieces) > 100 and whole["weight_map"] == {name: file for piece in pieces for name, file in piece["weight_map"].items()}
    assert [piece.get("metadata") for piece in pieces] == [whole["metadata"]] + [None] * (len(pieces) - 1)
    checkpoint.check_index(oracle)


@pytest.mark.parametrize("block", [1 << 18, 150])
@pytest.mark.parametrize("change, told", [
    ({"layers.3.w": TWO}, f"tensor 'layers.3.w': found in {ONE}, expected '{TWO}'"),
    ({"layers.3.w": "model-00003-of-000002.safetensors"}, f"tensor 'layers.3.w': found in {ONE}, expected 'model-00003-of-000002.safetensors'"),
    ({"layers.3.w": 1}, f"tensor 'layers.3.w': found in {ONE}, expected 1"),
    ({"layers.3.w": [ONE]}, f"tensor 'layers.3.w': found in {ONE}, expected ['{ONE}']"),
    ({"layers.4.w": ONE}, f"tensor 'layers.4.w': found in no file, expected '{ONE}'"),
    ({"new": TWO}, f"tensor 'new': found in no file, expected '{TWO}'"),
    ({"new": "elsewhere.safetensors"}, "tensor 'new': found in no file, expected 'elsewhere.safetensors'"),
    ({"b": None}, f"tensor 'b': found in {TWO}, expected no file, because it is not listed"),
])
def test_an_index_that_disagrees(tmp_path, monkeypatch, block, change, told):
    monkeypatch.setattr(checkpoint, "_BLOCK", block)
    assert refused_index(tmp_path, indexed(tmp_path, **change)) == told


@pytest.mark.parametrize("block", [1 << 18, 150])
@pytest.mark.parametrize("total", [11, 0, -10, 10.5, True, "10", None, [10], float("nan")])
def test_an_index_of_another_size(tmp_path, monkeypatch, block, total):
    monkeypatch.setattr(checkpoint, "_BLOCK", block)
    index = indexed(tmp_path) | {"metadata": {"total_size": total}}
    told = f"metadata.total_size is {total!r}, expected 10, the bytes of all tensors"
    assert refused_index(tmp_path, index) == refused_index(tmp_path, dict(reversed(index.items()))) == told
    assert refused_index(tmp_path, index | {"metadata": 10.5}) == "metadata.total_size is 10.5, expected 10, the bytes of all tensors"


@pytest.mark.parametrize("block, told", [(1 << 18, "its text up to byte 327: name 'layers.3.w' found twice, expected once"),
                                         (150, "tensor 'b': listed twice, expected once")])
def test_a_tensor_listed_twice(tmp_path, monkeypatch, block, told):
    monkeypatch.setattr(checkpoint, "_BLOCK", block)
    text = json.dumps(indexed(tmp_path)).encode()
    twice = text[:-2] + b', "b": "%s", "layers.3.w": "%s"}}' % (TWO.encode(), ONE.encode())
    assert refused_index(tmp_path, twice) == told


@pytest.mark.parametrize("text, told", [
    (b"", "begins with b''"), (b"[]", "begins with b'['"), (b"\xff", "begins with"), (b"{}", "has [], expected an object weight_map"),
    (b'{"weight_map":[]}', "expected an object weight_map"), (b'{"metadata":{}}', "expected an object weight_map"),
    (b'{"weight_map":{"a":"\xff"}}', "is not JSON"), (b'{"weight_map":{}', "is not JSON"), (b'{"weight_map":{}}}', "is not JSON"),
    (b'{"weight_map":{},"weight_map":{}}', "name 'weight_map' found twice"),
    (b'{"weight_map":{' + b" " * 300 + b"}}", "without .safetensors"),
    (b'{"weight_map":{"b":"%s"},"more":{"x":"y.safetensors","layers.3.w":"%s"}}' % (TWO.encode(), ONE.encode()), "['weight_map', 'more']"),
])
def test_what_is_no_index(tmp_path, monkeypatch, text, told):
    monkeypatch.setattr(checkpoint, "_BLOCK", 100)
    indexed(tmp_path)
    assert told in refused_index(tmp_path, text)


def test_an_index_is_judged_by_its_size_before_it_is_read(tmp_path, monkeypatch):
    indexed(tmp_path)
    headers = sum(path.stat().st_size for path in tmp_path.iterdir()) - 10
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(10**12)  # sparse
    asked, real, index = [], os.preadv, (tmp_path / INDEX).stat().st_ino
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: asked.append(os.fstat(fd).st_ino) or real(fd, views, offset))
    with pytest.raises(CheckpointError, match=rf"{INDEX}: 1,000,000,000,000 bytes, expected at most {2 * headers + 10**6:,} for the tensors"):
        Checkpoint(tmp_path)
    assert asked and index not in asked


def test_an_index_that_cannot_be_opened(tmp_path):
    indexed(tmp_path)
    (tmp_path / INDEX).mkdir()
    with pytest.raises(CheckpointError, match=rf"{INDEX}: cannot be opened: not a file"):
        Checkpoint(tmp_path)
    (tmp_path / INDEX).rmdir()
    (tmp_path / INDEX).symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=rf"{INDEX}: cannot be opened: a link to nothing"):
        Checkpoint(tmp_path)


def test_an_index_of_nothing(tmp_path):
    write(tmp_path, "model.safetensors", [])
    (tmp_path / INDEX).write_text('{"metadata": {"total_size": 0}, "weight_map": {}}')
    assert len(Checkpoint(tmp_path)) == 0
    assert refused_index(tmp_path, {"weight_map": {"a": "model.safetensors"}}) == "tensor 'a': found in no file, expected 'model.safetensors'"
    assert "total_size is False, expected 0" in refused_index(tmp_path, {"metadata": {"total_size": False}, "weight_map": {}})


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
    assert READ_MAX < (1 << 31) - 4096
    asked, real = [], os.preadv
    monkeypatch.setattr(fileio, "READ_MAX", 5)
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
    monkeypatch.setattr(fileio, "READ_MAX", 1000)

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
        with pytest.raises(CheckpointError, match=r"tensor b: reading 6 bytes at offset \d+ failed: .*Input/output error"):
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


def test_f8_has_bits_but_no_values(tmp_path):
    parts = write(tmp_path, "model.safetensors", [("a", "F8_E4M3", [4])])
    c = Checkpoint(tmp_path)
    assert c.raw("a").tobytes() == parts["a"]
    with pytest.raises(CheckpointError, match="tensor a: F8_E4M3 has no numpy type"):
        c.tensor("a")


# Census and contiguity

def test_census_of_the_oracle_by_hand(oracle):
    census = oracle.census(4)
    sizes = {n: prod(oracle.extent(n).shape) * ITEMSIZE[oracle.extent(n).dtype] for n in oracle.names()}
    counts = {n: prod(oracle.extent(n).shape) for n in oracle.names()}
    experts = {n for n in sizes if ".experts." in n}
    layers = {n for n in sizes if ".layers." in n} - experts
    assert census.experts_bytes == sum(sizes[n] for n in experts) and census.experts == 192 and census.expert_layers == 12
    assert census.expert_bytes == 2 * (96 * 32 + 96 * 2) + 64 * 48 + 64 * 3 == 9792
    assert census.trunk_bytes == sum(sizes[n] for n in layers) and census.trunk_tensors == len(layers) and census.layers == 13
    assert (census.largest_layer, census.largest_layer_bytes) == (0, sum(sizes[n] for n in layers if ".layers.0." in n))
    assert census.embed_lm_head_bytes == 2 * 512 * 128 * 2 and census.globals_bytes == 3 * 128 * 2
    assert (census.mm_projector_tensors, census.vision_tower_tensors, census.other_tensors) == (2, 2, 0)
    always = sum(counts[n] for n in layers) + 2 * 512 * 128 + 3 * 128
    assert census.always_active == always
    assert census.parameters == always + 192 * 3 * 96 * 64
    assert census.active_per_token == always - 512 * 128 + 12 * 4 * 3 * 96 * 64
    assert census.file_bytes == sum(f.stat().st_size for f in MODEL.glob("*.safetensors")) and census.shards == 16
    assert json.loads(json.dumps(census.as_dict()))["payload_bytes"] == 6_612_160
    assert oracle.census().active_per_token is None and "per token" not in oracle.census().table()


def test_unknown_tensors_are_counted(tmp_path):
    write(tmp_path, "model.safetensors", [("mm_projector.x", "U8", [4]), ("vision_tower.y.0", "F16", [4]), ("z", "I64", [2]),
                                          ("language_model.model.layers.#.q", "U8", [7])])
    census = Checkpoint(tmp_path).census(16)
    assert (census.mm_projector_bytes, census.vision_tower_bytes, census.other_bytes, census.other_tensors) == (4, 8, 23, 2)
    assert (census.experts, census.layers, census.largest_layer, census.parameters, census.active_per_token) == (0, 0, -1, 0, 0)
    assert "other tensors, not used       2; 23 bytes" in census.table()


def test_census_of_nothing(tmp_path):
    write(tmp_path, "model.safetensors", [])
    c = Checkpoint(tmp_path)
    assert len(c) == 0 and list(c.names()) == [] and "a" not in c
    assert c.census().payload_bytes == 0 and c.contiguity() == ({}, 0, [])


LAYER = "language_model.model.layers."


def six(layer, expert):
    return [(pattern.replace("#", str(layer), 1).replace("#", str(expert)), "U8", [2]) for pattern in EXPERT_TENSORS.values()]


def test_contiguity_of_the_oracle(oracle):
    found = oracle.contiguity()
    assert not found.broken_layers and not found.broken_experts and found.experts == 192 and list(found.layers) == list(range(13))
    run = found.layers[5]
    mine = [oracle.extent(n) for n in oracle.names() if ".layers.5." in n and ".experts." not in n]
    assert (run.file, run.offset, run.nbytes, run.tensors) == (mine[0].file, mine[0].offset, sum(e.nbytes for e in mine), len(mine))
    assert found.text() == "trunk in one run: 13 of 13 layers; experts in one run: 192 of 192"


def test_contiguity_names_what_breaks(tmp_path):
    one = [(f"{LAYER}0.a", "U8", [3]), (f"{LAYER}1.a", "U8", [3]), (f"{LAYER}1.nil", "U8", [0]), (f"{LAYER}0.b", "U8", [3]),
           *six(1, 0), *six(1, 1)[:3], (f"{LAYER}2.a", "U8", [3]), *six(1, 1)[3:], *six(1, 2)]
    two = [(f"{LAYER}2.b", "U8", [3]), (f"{LAYER}3.a", "U8", [3]), (f"{LAYER}3.b", "U8", [3])]
    write(tmp_path, shard(1, 2, "")[0], one)
    write(tmp_path, shard(2, 2, "")[0], two)
    found = Checkpoint(tmp_path).contiguity()
    paths = [str(tmp_path / shard(i, 2, "")[0]) for i in (1, 2)]
    assert found.broken_layers == {0: f"{LAYER}1.a lies inside its run in {paths[0]}", 2: f"{LAYER}2.b lies in {paths[1]}"}
    assert found.broken_experts == [(1, 1)] and found.experts == 3
    assert found.layers[3] == (paths[1], found.layers[3].offset, 6, 2, "")
    assert "layer 1 expert 1 is not one run" in found.text()


def test_two_shards_are_not_one_run_though_the_sizes_add_up(tmp_path):
    write(tmp_path, shard(1, 2, "")[0], [(f"{LAYER}0.a", "U8", [3]), ("x", "U8", [3])])
    write(tmp_path, shard(2, 2, "")[0], [("y", "U8", [3]), (f"{LAYER}0.b", "U8", [3])])
    assert Checkpoint(tmp_path).contiguity().broken_layers == {0: f"{LAYER}0.b lies in {tmp_path / shard(2, 2, '')[0]}"}


# The release's shape: 497,220 tensors in 96 sparse files

H, VOCAB, P = 7168, 163_840, 12_288
NORMS = {"input_layernorm": [H], "post_attention_layernorm": [H], "self_attention_res_norm": [H], "mlp_res_norm": [H],
         "self_attention_res_proj": [1, H], "mlp_res_proj": [1, H]}
KDA = {"q_proj": [P, H], "k_proj": [P, H], "v_proj": [P, H], "g_proj": [P, H], "o_proj": [H, P], "b_proj": [96, H], "f_a_proj": [128, H],
       "f_b_proj": [P, 128]}
KDA_F32 = {"A_log": [128], "dt_bias": [P], "q_conv1d.weight": [P, 1, 4], "k_conv1d.weight": [P, 1, 4], "v_conv1d.weight": [P, 1, 4],
           "o_norm.weight": [128]}
MLA = {"q_a_proj": [1536, H], "q_a_layernorm": [1536], "q_b_proj": [18_432, 1536], "kv_a_proj_with_mqa": [576, H], "kv_a_layernorm": [512],
       "kv_b_proj": [24_576, 512], "g_proj": [P, H], "o_proj": [H, P]}
DENSE = {"gate_proj": [33_792, H], "up_proj": [33_792, H], "down_proj": [H, 33_792]}
MOE = {"gate": [896, H], "routed_expert_down_proj": [3584, H], "routed_expert_up_proj": [H, 3584], "routed_expert_norm": [3584],
       "shared_experts.gate_proj": [6144, H], "shared_experts.up_proj": [6144, H], "shared_experts.down_proj": [H, 6144]}
EXPERT = [(f"w{i}.weight_{kind}", [n, k // per]) for i, n, k in ((1, 3072, 3584), (2, 3584, 3072), (3, 3072, 3584))
          for kind, per in (("packed", 2), ("scale", 32))]
GLOBALS = {"model.embed_tokens": [VOCAB, H], "lm_head": [VOCAB, H], "model.norm": [H], "model.output_attn_res_norm": [H],
           "model.output_attn_res_proj": [1, H]}
PROJECTOR = {"post_norm": [7168], "proj.0": [4096, 4096], "proj.2": [7168, 4096]}
VISION = {"encoder.final_layernorm": [1024], "patch_embed.pos_emb": [64, 64, 1024], "patch_embed.proj": [1024, 3, 14, 14]}
BLOCK = {"wqkv": [4608, 1024], "wo": [1024, 1536], "mlp.fc0": [4096, 1024], "mlp.fc1": [1024, 4096], "norm0": [1024], "norm1": [1024]}


def bf16(prefix, shapes):
    return [(f"{prefix}{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def released_layer(layer):
    p = f"{LAYER}{layer}."
    mla = layer % 4 == 3 or layer == 92
    out = bf16(p, NORMS) + bf16(p + "self_attn.", MLA if mla else KDA)
    out += [] if mla else [(f"{p}self_attn.{name}", "F32", shape) for name, shape in KDA_F32.items()]
    if layer == 0:
        return out + bf16(p + "mlp.", DENSE)
    m = p + "block_sparse_moe."
    out += bf16(m, MOE) + [(m + "gate.e_score_correction_bias", "F32", [896])]
    return out + [(f"{m}experts.{e}.{name}", "U8", shape) for e in range(896) for name, shape in EXPERT]


def released_shards():
    yield from map(released_layer, range(93))
    yield bf16("language_model.", GLOBALS)
    yield bf16("mm_projector.", PROJECTOR)
    yield bf16("vision_tower.", VISION | {f"encoder.blocks.{b}.{name}": shape for b in range(27) for name, shape in BLOCK.items()})


TABLE = """\
shards / tensors              96 / 497,220
payload bytes                 1,560,860,324,864
file bytes, headers included  1,560,936,091,448
routed experts                896 x 92 layers = 82,432; 17,547,264 bytes each; 1,446,456,066,048 together
trunk                         108,811,877,376 bytes; largest layer run 2,341 MB (layer 0)
embed_tokens + lm_head        4,697,620,480 bytes
norm, output_attn_res_*       43,008 bytes
mm_projector / vision_tower   92,289,024 / 802,428,928 bytes (3 / 165 tensors), not part of the text stack
parameters                    2.78T total, 104B active per token; 56,743,648,000 always active"""

MEASURE = """
import sys
from k3lib.checkpoint import Checkpoint
def peak():
    try:
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    except OSError:
        return 0
before = peak()
with Checkpoint(sys.argv[1]) as c:
    print(peak() - before)
    print(c.contiguity().text())
    print(c.census(16).table())
"""


def test_the_release(tmp_path):
    "Exact census of the released shape; the process may grow by 40 MB at most while it indexes 497,220 tensors and reads their list."
    places = {}
    for i, tensors in enumerate(released_shards(), 1):
        tensors.sort(key=lambda t: (-ITEMSIZE[t[1]], t[0]))  # the order that gives the published file sizes
        head = header_bytes(tensors)
        with open(tmp_path / f"model-{i:05d}-of-000096.safetensors", "wb") as file:
            file.write(head)
            file.truncate(len(head) + sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors))
        places |= {name: os.path.basename(file.name) for name, _, _ in tensors}
    index = {"metadata": {"total_size": 1_560_860_324_864}, "weight_map": places}
    (tmp_path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    made = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    grown, runs, table = made.stdout.split("\n", 2)
    assert int(grown) <= 40e6, f"the index grew the process by {int(grown) / 1e6:.1f} MB"
    assert runs == "trunk in one run: 93 of 93 layers; experts in one run: 82,432 of 82,432"
    assert table.rstrip() == TABLE
