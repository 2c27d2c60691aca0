"One safetensors header: written, read, and every kind of damage refused; the safetensors library beside it."
import json
import os
import struct

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import E5, TOY, TOY_DATA, file_of, shard, write

from k3lib import header
from k3lib.checkpoint import Checkpoint
from k3lib.fileio import CheckpointError
from k3lib.header import header_bytes, parse_header, quick_header


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(file_of(TOY, TOY_DATA))
    return tmp_path


def test_header_is_padded_and_read_back():
    tensors = [("x", "F32", (3,)), ("language_model.y", "U8", (5, 2))]
    head = header_bytes(tensors)
    assert len(head) % 8 == 0 and int.from_bytes(head[:8], "little") == len(head) - 8
    assert parse_header(head[8:], 22, "f") == [("x", "F32", (3,), 0, 12), ("language_model.y", "U8", (5, 2), 12, 22)]


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
    "empty but too large": (TOY.replace(b"[1,3]", b"[4611686018427387904,0,4611686018427387904]"),
                            ["'b'", "whole numbers that an array"]),
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
    "gap in front": (TOY.replace(b"[0,8]", b"[2,10]").replace(b"[8,14]", b"[10,16]"),
                     ["'a'", "the header ends", "gap of 2 bytes"]),
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


@pytest.mark.parametrize("cut, words", [
    (0, ["file of 0 bytes", "at least 10"]), (9, ["file of 9 bytes", "at least 10"]), (60, ["header length"]),
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
    "Python's objects take many times the text's room: a header that needs the plain reader has a bound of its own."
    monkeypatch.setattr(header, "PLAIN_MAX", len(TOY))
    for text, size in ((TOY, 14), (TOY.replace(b"14", b"13"), 13), (TOY.replace(b"}}", b"}}   "), 14)):
        (tmp_path / "model.safetensors").write_bytes(file_of(text, TOY_DATA[:size]))
        if size == 14:
            assert len(Checkpoint(tmp_path)) == 2
        else:
            with pytest.raises(CheckpointError, match="span 5 bytes"):
                Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(file_of(TOY.replace(b"}}", b"} }"), TOY_DATA))
    told = rf"header of {len(TOY) + 1} bytes is damaged or unusually written, expected at most {len(TOY)} bytes "
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(tmp_path)


def test_names_are_counted_before_their_keys_run_out(tmp_path, monkeypatch):
    monkeypatch.setattr(header, "PATTERNS_MAX", 3)
    for i in 1, 2:
        names = [f"{name}{i}" for name in ("a", "b", "layers.1.", "layers.2.")[:i + 1]]
        write(tmp_path, shard(i, 2, "")[0], [(name, "U8", [1]) for name in names])
    told = r"model-00002-.*: 5 different names so far, not counting numbers, expected at most 3"
    with pytest.raises(CheckpointError, match=told):
        Checkpoint(tmp_path)


def test_metadata_padding_and_any_order_are_fine(tmp_path):
    a, b = TOY[1:-1].split(b',"b"')
    text = b'{"__metadata__":{"format":"pt"},\n "b"' + b + b" , " + a + b"}   \n"
    (tmp_path / "model.safetensors").write_bytes(file_of(text, TOY_DATA))
    c = Checkpoint(tmp_path)
    assert c.tensor("b").tolist() == [[1, 1.5, 2]] and list(c.names()) == ["a", "b"]


FIELD = st.one_of(st.integers(-2, 20), st.floats(), st.booleans(), st.none(), st.text(max_size=3),
                  st.lists(st.integers(-1, 20), max_size=3), st.sampled_from(["F32", "BF16", "U8"]))
ENTRY = st.one_of(FIELD, st.fixed_dictionaries({"dtype": st.sampled_from(["F32", "BF16", "U8", "F4"]),
                                                "shape": st.lists(st.integers(0, 4), max_size=3),
                                                "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2)}),
                  st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), FIELD))


def quick_rows(text, data_bytes):
    "What quick_header gives, as parse_header would, or None."
    columns = quick_header(text, data_bytes)
    if columns is None:
        return None
    names, kind, begin, end, kind_of = columns
    return sorted(((name, *kind_of[k], int(b), int(e)) for name, k, b, e in zip(names, kind, begin, end)),
                  key=lambda row: row[3:])


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


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=3), ENTRY, max_size=3), st.binary(max_size=16))
def test_any_json_is_believed_only_if_the_library_believes_it(entries, data):
    believed_only_if_the_library_does(json.dumps(entries).encode(), data)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(TOY) - 1), st.sampled_from(list(b'0123456789{}[]",:abU8 -.e\\\xff\n'))),
                max_size=3),
       st.sampled_from([0, 13, 14, 15]))
def test_any_damaged_text_is_believed_only_if_the_library_believes_it(edits, size):
    text = bytearray(TOY)
    for place, byte in edits:
        text[place] = byte
    believed_only_if_the_library_does(bytes(text), (TOY_DATA + b"\0")[:size])


@pytest.mark.parametrize("front", ["{", '{"__metadata__":{"format":"pt"},', '{ "__metadata__" : {},'])
def test_usual_headers_are_read_by_columns(front):
    tensors = [("z.é", "F32", [3]), (E5 + "w", "U8", [5, 2]), ("nil", "I64", [0]), ("one", "F64", []),
               ("a", "BF16", [1, 3])]
    text = header_bytes(tensors)[8:].replace(b"\\u00e9", "é".encode())
    text = front.encode() + text[1:]
    rows = parse_header(text, 36, "f")
    assert len(rows) == 5 and quick_rows(text, 36) == rows
    first, second, *rest = text[len(front):].rstrip()[:-1].decode().split("},")
    moved = (front + "},".join([second, *rest]) + "," + first + "}}").encode()  # not in the order of the data
    assert quick_rows(moved, 36) == parse_header(moved, 36, "f") == rows


@pytest.mark.parametrize("damage", [*DAMAGE, "comma in front", "metadata again", "metadata twice", "leading zero",
                                    "control character", "tail", "no comma", "two commas", "an axis left out"])
def test_damaged_headers_are_never_read_by_columns(damage):
    pt = b'{"__metadata__":{"a":"b"},'
    again = entry(shape="[0]", offsets="[0,0]").replace("b", "__metadata__", 1)
    text = DAMAGE[damage][0] if damage in DAMAGE else {
        "comma in front": b"{," + TOY[1:],
        "metadata again": pt + TOY[1:-1] + b"," + again.encode() + b"}",
        "metadata twice": pt.replace(b"}", b',"a":"b"}') + TOY[1:], "leading zero": TOY.replace(b"[0,8]", b"[0,08]"),
        "control character": TOY.replace(b'"a"', b'"a\n"'), "tail": TOY + b",",
        "no comma": TOY.replace(b'},"b"', b'};"b"'), "two commas": TOY.replace(b'},"b"', b'},,"b"'),
        "an axis left out": TOY.replace(b"[1,3]", b"[1,,3]"),
    }[damage]
    with pytest.raises(CheckpointError):
        parse_header(text, 16 if "gap" in damage else 14, "f")
    assert quick_header(text, 16 if "gap" in damage else 14) is None
