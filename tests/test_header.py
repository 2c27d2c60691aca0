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
from k3lib.fileio import CheckpointError, Unusual
from k3lib.header import BITS, header_bytes, parse_header, quick_header


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
    "a list": (b"[" + TOY + b"]", ["holds a JSON list", "expected an object"]),
    "half a surrogate pair": (TOY.replace(b'"b"', b'"\\ud800"'), ["not JSON", "surrogates"]),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{},' + TOY[1:], ["'__metadata__'", "twice"]),
    "metadata nested past recursion": (b'{"__metadata__":' + b"[" * 100_000, ["not JSON"]),
    "name twice": (TOY.replace(b'"b"', b'"a"'), ["'a'", "twice"]),
    "field twice": (TOY.replace(b'"shape":[2]', b'"shape":[2],"shape":[2]'), ["'shape'", "twice"]),
    "entry is a list": (TOY.replace(entry().encode(), b'"b":[1]'), ["'b'", "[1]", "dtype, shape and data_offsets"]),
    "field missing": (TOY.replace(b'"shape":[1,3],', b""), ["'b'", "dtype, shape and data_offsets"]),
    "fields nested": (TOY.replace(b'"shape":[1,3]', b'"shape":[1,3],"x":' + b"[" * 15 + b"]" * 15), ["16 deep"]),
    "dtype a list": (TOY.replace(b'"BF16"', b'["BF16"]'), ["'b'", "['BF16']"]),
    "dtype a number": (TOY.replace(b'"BF16"', b"16"), ["'b'", "dtype 16", "expected text"]),
    "dtype of less than a byte": (TOY.replace(b"BF16", b"F4"), ["'b'", "6 bytes", "expected 12 bits for F4 [1, 3]"]),
    "shape too long": (TOY.replace(b"[1,3]", b"[1,1,3]"[:-1] + b",1" * 70 + b"]"), ["'b'", "at most 64"]),
    "shape too large": (TOY.replace(b"[1,3]", b"[1,4]"), ["'b'", "6 bytes", "8 bytes"]),
    "shape overflows": (TOY.replace(b"[1,3]", b"[4611686018427387904,6]"), ["'b'", "6 bytes", "BF16"]),
    "dimensions of 4000 digits": (TOY.replace(b"[1,3]", b"[%d,%d]" % (10**4000, 10**4000)), ["'b'", "whole numbers"]),
    "empty in six bytes": (TOY.replace(b"[1,3]", b"[4611686018427387904,0,4611686018427387904]"),
                           ["'b'", "6 bytes", "0 bytes for BF16"]),
    "a type that is not known, backwards": (TOY.replace(b"BF16", b"BF17").replace(b"[8,14]", b"[14,8]"),
                                            ["'b'", "span -6 bytes"]),
    "a type that is not known, overlap": (TOY.replace(b"BF16", b"BF17").replace(b"[8,14]", b"[7,14]"), ["overlap of"]),
    "a type that is not known, gap": (TOY.replace(b"BF16", b"BF17").replace(b"[8,14]", b"[9,16]"), ["gap of 1"]),
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


METADATA = "headers whose __metadata__ is not an object of strings"
FIELDS = "tensors with more fields than the format has"
TYPES = "tensors of a type that is not known here, of which only the places were checked"
ODD = {  # a header, and what is odd about it
    "metadata null": (b'{"__metadata__":null,' + TOY[1:], METADATA),
    "metadata of numbers": (b'{"__metadata__":{"n":1},' + TOY[1:], METADATA),
    "metadata a list": (b'{"__metadata__":["pt"],' + TOY[1:], METADATA),
    "metadata text": (b'{"__metadata__":"pt",' + TOY[1:], METADATA),
    "metadata at the end": (TOY[:-1] + b',"__metadata__":3.5}', METADATA),
    "metadata like a tensor": (b'{"__metadata__":' + TOY + b"," + TOY[1:], METADATA),
    "metadata nested": (b'{"__metadata__":' + b"[" * 30 + b"]" * 30 + b"," + TOY[1:], METADATA),
    "metadata with a name twice": (b'{"__metadata__":{"a":"b","a":"c"},' + TOY[1:], None),
    "metadata with half a surrogate pair": (b'{"__metadata__":{"\\ud800":"c"},' + TOY[1:], None),
    "a field more": (TOY.replace(b'"shape":[1,3]', b'"shape":[1,3],"x":1'), FIELDS),
    "an object more": (TOY.replace(b'"shape":[1,3]', b'"x":{"y":[1]},"shape":[1,3]'), FIELDS),
    "a type that is not known": (TOY.replace(b"BF16", b"F8_E8M0FNU"), TYPES),
    "a type in small letters": (TOY.replace(b"BF16", b"bf16"), TYPES),
    "no type": (TOY.replace(b"BF16", b""), TYPES),
    "a known type of less than a byte": (TOY.replace(b"BF16", b"F4").replace(b"[1,3]", b"[4,3]"), None),
    "six bits": (TOY.replace(b"BF16", b"F6_E2M3").replace(b"[1,3]", b"[4,2]"), None),
    "33 axes": (TOY.replace(b"[1,3]", b"[1,3" + b",1" * 31 + b"]"), None),
    "a space in front": (b" \n" + TOY, None),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_changes_no_number_is_told_and_not_refused(tmp_path, odd):
    "Read by columns or entry by entry: the other tensor is where it was."
    text, told = ODD[odd]
    (tmp_path / "model.safetensors").write_bytes(file_of(text, TOY_DATA))
    c, where = Checkpoint(tmp_path), tmp_path / "model.safetensors"
    assert c.tensor("a").tolist() == [1, -2] and "b" in c and c.extent("b").nbytes == 6
    first = {METADATA: str(where), FIELDS: f"'b' in {where}", TYPES: f"'b' in {where}", None: None}[told]
    assert c.unusual == ([] if told is None else [f"{told}: 1, {first}"])
    if c.extent("b").dtype not in ("BF16", "F32"):
        with pytest.raises(CheckpointError, match="'b': type .*, which numpy does not have, expected one of BF16 F32"):
            c.raw("b")
        with pytest.raises(CheckpointError, match="tensor 'b': type .*, which numpy does not have"):
            c.tensor("b")


@pytest.mark.parametrize("odd", ["metadata null", "metadata of numbers", "metadata text", "a type that is not known"])
def test_odd_headers_of_any_length_are_read_by_columns(odd):
    text, told = ODD[odd]
    unusual = Unusual()
    columns = quick_header(text, 14, "f", unusual)
    rows = parse_header(text, 14, "f", Unusual())
    assert quick_rows(text, 14) == rows and len(columns.names) == 2
    assert [*unusual.found] == ([METADATA] if told == METADATA else [])


def test_many_tensors_of_types_that_are_not_known(tmp_path):
    "Their sizes may differ although type and shape do not."
    entries, at = {}, 0
    for number, size in enumerate([0, 5, 3, 3, 9] * 200):
        entries[f"x.{number}"] = {"dtype": "NEW", "shape": [7], "data_offsets": [at, at + size]}
        at += size
    entries["y"] = {"dtype": "U8", "shape": [3], "data_offsets": [at, at + 3]}
    for separators in ((",", ":"), (", ", ": ")):  # by columns, entry by entry
        text = json.dumps(entries, separators=separators).encode()
        (tmp_path / "model.safetensors").write_bytes(file_of(text, bytes(at) + b"abc"))
        with Checkpoint(tmp_path) as c:
            assert c.raw("y").tobytes() == b"abc" and c.unusual == [f"{TYPES}: 1,000, 'x.0' in {c.files[0]}, ..."]
            assert [c.extent(f"x.{n}").nbytes for n in range(5)] == [0, 5, 3, 3, 9]
            assert c.census().payload_bytes == at + 3 and c.census().other_bytes == at + 3


def test_a_place_that_ends_before_it_begins_is_read_by_nobody(tmp_path):
    "The file ends where the last tensor does. Its type is not known, so its size is not, either."
    text = TOY.replace(b"BF16", b"NEW").replace(b"[8,14]", b"[8,4]")
    assert quick_header(text, 4) is None
    (tmp_path / "model.safetensors").write_bytes(file_of(text, TOY_DATA[:4]))
    with pytest.raises(CheckpointError, match=r"'b': data_offsets \[8, 4\] span -4 bytes"):
        Checkpoint(tmp_path)


def test_an_array_that_numpy_cannot_make(tmp_path):
    text = b'{"a":{"dtype":"F32","shape":[4611686018427387904,0,4],"data_offsets":[0,0]}}'
    (tmp_path / "model.safetensors").write_bytes(file_of(text, b""))
    with pytest.raises(CheckpointError, match=r"'a': shape \[4611686018427387904, 0, 4\]: .*, expected a shape of"):
        Checkpoint(tmp_path).raw("a")


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
    assert all(kind_of[k][2] == e - b for k, b, e in zip(kind, begin, end))
    return sorted(((name, *kind_of[k][:2], int(b), int(e)) for name, k, b, e in zip(names, kind, begin, end)),
                  key=lambda row: row[3:])


def believed_only_if_the_library_does(text, data):
    "The library may refuse what is odd: notes of any form, a type of a later version."
    quick, unusual = quick_rows(text, len(data)), Unusual()
    try:
        rows = parse_header(text, len(data), "f", unusual)
    except CheckpointError as error:
        assert "\n" not in str(error) and quick is None
        return
    assert quick is None or quick == rows
    if unusual.found or any(dtype not in BITS for _, dtype, *_ in rows):
        return
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


@pytest.mark.parametrize("damage", [*DAMAGE, "comma in front", "metadata again", "leading zero", "control character",
                                    "a comma after the metadata", "nothing and a comma", "tail", "no comma",
                                    "two commas", "an axis left out"])
def test_damaged_headers_are_never_read_by_columns(damage):
    pt = b'{"__metadata__":{"a":"b"},'
    again = entry(shape="[0]", offsets="[0,0]").replace("b", "__metadata__", 1)
    text = DAMAGE[damage][0] if damage in DAMAGE else {
        "comma in front": b"{," + TOY[1:],
        "metadata again": pt + TOY[1:-1] + b"," + again.encode() + b"}",
        "a comma after the metadata": pt + b"," + TOY[1:], "nothing and a comma": b"{ ," + TOY[1:],
        "leading zero": TOY.replace(b"[0,8]", b"[0,08]"),
        "control character": TOY.replace(b'"a"', b'"a\n"'), "tail": TOY + b",",
        "no comma": TOY.replace(b'},"b"', b'};"b"'), "two commas": TOY.replace(b'},"b"', b'},,"b"'),
        "an axis left out": TOY.replace(b"[1,3]", b"[1,,3]"),
    }[damage]
    with pytest.raises(CheckpointError):
        parse_header(text, 16 if "gap" in damage else 14, "f")
    assert quick_header(text, 16 if "gap" in damage else 14) is None
