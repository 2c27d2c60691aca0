"""5.5 One safetensors header

Made from book/05_streaming/05_header.py: edit that, then run `make export`.
"""

import json
import os
import re
from math import prod
from operator import itemgetter
import numpy as np
from k3lib.fileio import CheckpointError, json_object, read_exactly, shown_value


HEADER_MAX = 100_000_000  # bytes: the safetensors library's own cap


PLAIN_MAX = 16_000_000  # bytes of a header that is read entry by entry; the longest of the release has 0.82 MB


RANK_MAX = 32  # axes that every numpy's arrays can have


ARRAY_DTYPES = {
    "BF16": "<u2", "F32": "<f4", "U8": "u1", "F16": "<f2", "F64": "<f8", "BOOL": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2",
    "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "C64": "<c8", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # BF16 and F8 as bits: numpy has no such types


ITEMSIZE = {dtype: np.dtype(code).itemsize for dtype, code in ARRAY_DTYPES.items()}


def header_bytes(tensors):
    "The first bytes of a file whose data are `tensors`, (name, dtype, shape), one behind the other: length and padded JSON."
    entries, at = {}, 0
    for name, dtype, shape in tensors:
        end = at + prod(shape) * ITEMSIZE[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def braced_object(text, where):
    "json_object of `text`, of which the format says that it begins with the brace."
    if text[:1] != b"{":
        raise CheckpointError(f"{where} begins with {bytes(text[:1])!r}, expected the '{{' of a JSON object")
    return json_object(text, where)


_FIELDS = {"dtype", "shape", "data_offsets"}


def tensor_fault(where, name, found, expected):
    return CheckpointError(f"{where}: tensor {shown_value(name)}: {found}, expected {expected}")


def _naturals(value):
    "Whether `value` is a list of whole numbers below 2^63; True is not the number 1 here."
    if type(value) is not list:
        return False
    for n in value:
        if type(n) is not int or not 0 <= n < 1 << 63:
            return False
    return True


def _entry(where, name, entry):
    "(name, dtype, shape, begin, end) from a header's `entry`."
    if type(entry) is not dict or entry.keys() != _FIELDS:
        raise tensor_fault(where, name, f"found {shown_value(entry)}", "an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in ITEMSIZE:
        raise tensor_fault(where, name, f"dtype {shown_value(dtype)}", f"one of {' '.join(ITEMSIZE)}")
    if not _naturals(shape) or len(shape) > RANK_MAX or 0 in shape and prod(n or 1 for n in shape) >> 59:
        raise tensor_fault(where, name, f"shape {shown_value(shape)}", f"at most {RANK_MAX} whole numbers that an array can have")
    if not _naturals(offsets) or len(offsets) != 2:
        raise tensor_fault(where, name, f"data_offsets {shown_value(offsets)}", "two whole numbers")
    begin, end = offsets
    nbytes = prod(shape) * ITEMSIZE[dtype]
    if end - begin != nbytes:
        raise tensor_fault(where, name, f"data_offsets {offsets} span {end - begin:,} bytes", f"{nbytes:,} bytes for {dtype} {shape}")
    return name, dtype, tuple(shape), begin, end


def parse_header(text, data_bytes, where):
    """[(name, dtype, shape, begin, end)] in the order of the data, from a header's JSON bytes `text`.

    `data_bytes` is what the file holds behind the header, `where` names the file in a CheckpointError.
    """
    if len(text) > PLAIN_MAX:
        raise CheckpointError(f"{where}: header of {len(text):,} bytes is not plainly right, expected at most {PLAIN_MAX:,} to look for the fault in")
    entries = braced_object(text, f"{where}: header")
    metadata = entries.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ is {shown_value(metadata)}, expected an object of strings")
    rows = sorted((_entry(where, name, entry) for name, entry in entries.items()), key=itemgetter(3, 4))
    at, before = 0, "the header"
    for name, _, _, begin, end in rows:
        if end > data_bytes:
            raise CheckpointError(f"{where}: tensor {shown_value(name)} ends at data byte {end:,}, expected at most {data_bytes:,}, "
                                  "which is what the file holds: truncated?")
        if begin != at:
            what = "gap" if begin > at else "overlap"
            raise CheckpointError(f"{where}: tensor {shown_value(name)} begins at data byte {begin:,}, expected {at:,} where {before} ends: "
                                  f"{what} of {abs(begin - at):,} bytes")
        at, before = end, shown_value(name)
    if at != data_bytes:
        raise CheckpointError(f"{where}: {data_bytes:,} bytes of data, expected {at:,}, where {before} ends: "
                              f"{data_bytes - at:,} bytes belong to no tensor")
    return rows


def read_header(file, where):
    "(bytes before the data, file bytes, the header's JSON bytes) of an open safetensors file."
    size = os.fstat(file.fileno()).st_size
    if size < 10:
        raise CheckpointError(f"{where}: file of {size} bytes, expected at least 10: a header's length and its '{{}}'")
    head, most = bytearray(8), min(HEADER_MAX, size - 8)
    read_exactly(file, head, 0, where)
    n = int.from_bytes(head, "little")
    if not 2 <= n <= most:
        raise CheckpointError(f"{where}: header length {n:,} bytes, expected 2 to {most:,} (the file has {size:,} bytes)")
    text = bytearray(n)
    read_exactly(file, text, 8, where)
    return 8 + n, size, text


_WHOLE = "(0|[1-9][0-9]{0,17})"  # any 18 digits fit an int64


_ENTRY = re.compile(r'"([^"\\\x00-\x1f]*)":\{("dtype":"[A-Z0-9_]+","shape":\[[0-9,]{0,400}\]),"data_offsets":\[W,W\]\}'.replace("W", _WHOLE))


def _kind(text):
    "((dtype, shape), bytes) from the text of an entry's first two fields; ValueError or CheckpointError if they are not right."
    entry = json.loads("{" + text + "}")
    entry["data_offsets"] = [0, prod(entry["shape"]) * ITEMSIZE.get(entry["dtype"], 0)]
    _, dtype, shape, _, nbytes = _entry("", "", entry)
    return (dtype, shape), nbytes


def quick_header(text, data_bytes):
    """What parse_header gives, in the order of the text: names, kind numbers, begins, ends and a list of (dtype, shape) for the kind numbers.

    All but the first and last are integer arrays. None if parse_header has to look: the text is damaged, or good but not written the usual way.
    """
    try:
        pieces = _ENTRY.split(text.decode("utf-8"))
        between, names, kinds, *offsets = (pieces[i::5] for i in range(5))
        front, back = between[0], between[-1].rstrip(" ")  # '{', perhaps '"__metadata__":{...},'; and '}'
        if front != "{" and (front[-2:] != "}," or parse_header((front[:-1] + "}").encode(), 0, "")):
            return None
        number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
        kind_of, nbytes_of = zip(*map(_kind, number))
    except (ValueError, CheckpointError):
        return None
    kind = np.fromiter(map(number.get, kinds), np.int32)
    begin, end = (np.array(column, np.int64) for column in offsets)
    order = np.lexsort((end, begin))
    ends = np.append(0, end[order])
    right = (back == "}" and {*between[1:-1]} <= {","} and len({*names, "__metadata__"}) == len(names) + 1
             and np.array_equal(end - begin, np.array(nbytes_of, np.int64)[kind]) and np.array_equal(begin[order], ends[:-1]) and ends[-1] == data_bytes)
    return (names, kind, begin, end, kind_of) if right else None


__all__ = [
    "HEADER_MAX", "PLAIN_MAX", "RANK_MAX", "ARRAY_DTYPES", "ITEMSIZE", "header_bytes", "braced_object",
    "tensor_fault", "parse_header", "read_header", "quick_header",
]
