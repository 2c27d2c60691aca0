# %% [markdown]
# # 5.5 One safetensors header
#
# [5.4 The one table of tensors](04_tensors.ipynb) · [contents](../README.md) · [5.6 Where every weight lies](06_checkpoint.ipynb)

# %% [markdown]
# ## 5.5.1 By hand: a file of two tensors
#
# A safetensors file is three things one after the other: eight bytes that say how long the header is, the header as JSON, the numbers.
# Here is a whole one. Shapes and types are in the text; the numbers have no structure of their own.

# %%
text = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}'
toy = struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1, -2) + bytes.fromhex("803f c03f 0040")
print(toy[:8].hex(" "), "->", int.from_bytes(toy[:8], "little"), "bytes of text")
print(toy[-14:].hex(" "), " the data: a is 8 bytes, b is 6")

# %% [markdown]
# `b` begins at byte $8 + 111 + 8 = 127$. Its type BF16 is the upper half of a float32, so sixteen zero bits put behind it give the value
# back exactly: `803f`, low byte first, is `3f80 0000`, which is one.

# %%
at = 8 + len(text) + 8
struct.unpack("<3f", b"".join(b"\0\0" + toy[i:i + 2] for i in range(at, at + 6, 2)))

# %% [markdown]
# Two mistakes give numbers, not errors: counting `data_offsets` from the start of the file, and reading BF16 as IEEE half precision,
# which is two bytes wide as well. Neither can be seen from a size.

# %%
for label, six in ("offset from the file's start", toy[8:14]), ("BF16 read as float16", toy[at:at + 6]):
    print(f"{label:30s}", *(f"{x:.3g}" for x in struct.unpack("<3e", six)))

# %% [markdown]
# ## 5.5.2 A header, taken apart
#
# The module needs one error type (the command line turns it into exit code 4) and one table: the type names of the format, and the
# numpy type that holds the bits of one element.

# %% tags=["export"]
import json
import os
import re
from math import prod
from operator import itemgetter
import numpy as np
from k3lib.fileio import CheckpointError, json_object, read_exactly, shown_value

# %% tags=["export"]
HEADER_MAX = 100_000_000  # bytes: the safetensors library's own cap


PLAIN_MAX = 16_000_000  # bytes of a header that is read entry by entry; the longest of the release has 0.82 MB


RANK_MAX = 32  # axes that every numpy's arrays can have


ARRAY_DTYPES = {
    "BF16": "<u2", "F32": "<f4", "U8": "u1", "F16": "<f2", "F64": "<f8", "BOOL": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2",
    "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "C64": "<c8", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # BF16 and F8 as bits: numpy has no such types


ITEMSIZE = {dtype: np.dtype(code).itemsize for dtype, code in ARRAY_DTYPES.items()}


# %% [markdown]
# Writing comes first because it is the shorter half: the places follow from the shapes. The text is padded with spaces to a multiple
# of eight, as the format's own library does.

# %% tags=["export"]
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


# %%
assert header_bytes([("a", "F32", [2]), ("b", "BF16", [1, 3])])[8:].rstrip() == text


# %% tags=["export"]
def braced_object(text, where):
    "json_object of `text`, of which the format says that it begins with the brace."
    if text[:1] != b"{":
        raise CheckpointError(f"{where} begins with {bytes(text[:1])!r}, expected the '{{' of a JSON object")
    return json_object(text, where)


# %% [markdown]
# One entry passes if it has the three fields, a known type, whole numbers, and if its shape fills its bytes exactly:
# $e - b = \text{itemsize} \cdot \prod \text{shape}$.

# %% tags=["export"]
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


# %% [markdown]
# Then the entries together: sorted by place they must tile the data, each beginning where the one before ends. One pass finds overlap,
# gap, trailing bytes, and a file cut short.

# %% tags=["export"]
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


# %%
n = int.from_bytes(toy[:8], "little")
parse_header(toy[8:8 + n], len(toy) - 8 - n, "toy")

# %% [markdown]
# ## 5.5.3 Believed or refused
#
# A wrong offset in a weight file still decodes to fluent text, so nothing here may be guessed. Each line changes the toy's header in one
# way; each is refused with the place, what was found and what was expected.

# %%
changes = {
    "a list": ("{", "["), "cut": ("}}", ""), "same name": ('"b"', '"a"'), "unknown type": ("BF16", "BF17"),
    "wrong shape": ("[1,3]", "[1,4]"), "negative": ("[0,8]", "[-8,0]"), "fraction": ("[1,3]", "[1,3.0]"), "bool": ("[1,3]", "[true,3]"),
    "overlap": ("[8,14]", "[6,12]"), "gap": ("[8,14]", "[9,15]"), "past the end": ("[8,14]", "[12,18]"), "field gone": ('"shape":[2],', ""),
}
for label, (old, new) in changes.items():
    try:
        parse_header(text.decode().replace(old, new, 1).encode(), 16 if label == "gap" else 14, "toy")
        raise AssertionError(f"{label} was believed")
    except CheckpointError as error:
        print(f"{label:13s} {error}"[:150])


# %% [markdown]
# The header's length is judged before a byte of it is read, against the file and against 100 MB: a damaged length of $2^{63}$ must not become
# an allocation, nor 300 MB of brackets a parse. The bound is the format's own, and all 497,220 tensors in one file would need 76 MB. Python's
# objects take some fifteen times the text they are read from, so the reader that goes entry by entry stops at 16 MB; what is larger is right by columns (5.6.1) or refused.

# %% tags=["export"]
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


# %% [markdown]
# Broken on purpose: the toy's first eight bytes, in a sparse file of 400 MB so that the file's end is no help, and a header of good length that is one
# large list. None gets as far as Python's JSON reader.

# %%
with tempfile.TemporaryDirectory() as other:
    path = Path(other, "toy")
    for n, body in (0, b""), (1 << 63, b""), (300_000_000, b"{"), (20_000_000, b'{"a":[[],[],[]'):
        path.write_bytes(n.to_bytes(8, "little") + body)
        os.truncate(path, 400_000_000)
        try:
            with open_shard(path) as file:
                start, size, header = read_header(file, "toy")
            parse_header(header, size - start, "toy")
            raise AssertionError(f"a header of {n:,} bytes was believed")
        except CheckpointError as error:
            print(error)

# %% [markdown]
# The entries likewise. A header as libraries write it, without spaces or escapes, is the same text over and over, and one regular expression
# splits it into columns. Of the pairs of type and shape, few are different: each of those goes through `_entry`, once. The rest is
# arithmetic on columns: sizes fit, begins meet ends. This reader has no words of its own. Whatever is not plainly right, it leaves to `parse_header`.

# %% tags=["export"]
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


# %%
print(*quick_header(text, 14))
assert all(quick_header(text.decode().replace(old, new, 1).encode(), 16 if label == "gap" else 14) is None
           for label, (old, new) in changes.items())
