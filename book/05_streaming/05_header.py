# %% [markdown]
# # 5.5 Headers, and half a million tensors in four columns
#
# Kimi K3 is 1.56 TB in 96 files. To load them only to see which tensors they have would take minutes. Each file begins
# with a header that says where its tensors lie. If a place in a header is wrong, the model computes with wrong weights
# and no error occurs. So a header must be checked before it is used. At the end of this chapter you can read such a
# header, refuse one that contradicts itself or its file, and keep the places of all tensors in little memory.
#
# > **Without it:** an offset that is counted from the wrong place gives wrong numbers, and no check of sizes notices.
# >
# > **With it:** every place is checked, and all 497,220 tensors are kept in 12 MB.<!--claim index-->
#
# Needs chapters [5.2] (files) and [5.4] (names). Runs in seconds. Makes `k3lib.header`.
#
# [5.4 The one table of tensors](04_tensors.ipynb) ·
# [contents](../README.md) ·
# [5.6 Where 1.56 TB lie](06_census.ipynb)
#
# [5.2]: 02_fileio.ipynb
# [5.4]: 04_tensors.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "files")

# %% [markdown]
# | symbol | meaning | in code |
# |---|---|---|
# | `n` | length of the header's JSON text, the file's first 8 bytes, little-endian | `n` |
# | `[b, e)` | a tensor's bytes, counted from the **end of the header** | `begin`, `end` |
# | `8 + n + b` | the same place counted from the start of the file | `Extent.offset` |
# | `L`, `E` | layer and expert, the numbers inside a name | `layer`, `expert` |

# %%
import struct
import tempfile
import time
import tracemalloc
from pathlib import Path

from k3lib.config import read_config
from k3lib.fileio import open_shard
from k3lib.tensors import layer_tensors

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())

# %% [markdown]
# ## 5.5.1 By hand: a file of two tensors
#
# A safetensors file has three parts: eight bytes with the length of the header, the header as JSON text, and the data.
# Shapes, types and places are in the header. The data are numbers without any structure. Here is a whole file:

# %%
text = (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}')
toy = struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1, -2) + bytes.fromhex("803f c03f 0040")
print(toy[:8].hex(" "), "->", int.from_bytes(toy[:8], "little"), "bytes of text")
print(toy[-14:].hex(" "), " the data: a is 8 bytes, b is 6")

# %% [markdown]
# Tensor `b` begins at byte $8 + 111 + 8 = 127$ of the file. Its type, BF16, is the upper half of a float32. So sixteen
# zero bits at the lower end give the value exactly: `803f`, low byte first, becomes `3f80 0000`, which is one.

# %%
at = 8 + len(text) + 8


def check_toy(name, values):
    "The gate: the three numbers of b."
    assert list(values) == [1, 1.5, 2], f"{name}: b is {', '.join(f'{v:.3g}' for v in values)}, expected 1, 1.5, 2"
    print(f"{name}: b is", *values)


def bf16_at(at):
    return struct.unpack("<3f", b"".join(b"\0\0" + toy[i:i + 2] for i in range(at, at + 6, 2)))


check_toy("offset from the end of the header", bf16_at(at))

# %% [markdown]
# Two mistakes give wrong numbers without an error: to count `data_offsets` from the start of the file, and to read BF16
# as IEEE half precision, which also has two bytes. The sizes are right in both cases, so only the values show it.

# %% tags=["raises-exception"]
check_toy("offset from the start of the file", bf16_at(8))

# %% tags=["raises-exception"]
check_toy("BF16 read as float16", struct.unpack("<3e", toy[at:at + 6]))

# %% [markdown]
# ## 5.5.2 Parsing a header
#
# The first cell lists the types of the format, each with the number of its bits and with the NumPy type that holds one
# element. Two types have less than a byte, so NumPy has no type for their elements.

# %% tags=["export"]
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from io import FileIO
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from k3lib.fileio import CheckpointError, Unusual, json_object, read_exactly, shown_value
from k3lib.tensors import EXPERT_PATTERN, TEXT_STACK, join_name, split_name

# %% tags=["export"]
HEADER_MAX = 100_000_000  # bytes: the safetensors library's own cap
PLAIN_MAX = 16_000_000  # bytes of a header that is read entry by entry; the longest of the release has 0.82 MB
RANK_MAX = 64  # axes of a tensor: numpy's arrays have no more

ARRAY_DTYPES = {
    "BF16": "<u2", "F32": "<f4", "U8": "u1", "F16": "<f2", "F64": "<f8", "BOOL": "u1", "I8": "i1", "I16": "<i2",
    "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "C64": "<c8",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1", "F8_E4M3FNUZ": "u1", "F8_E5M2FNUZ": "u1",
}  # BF16 and F8 as bits: numpy has no such types
ITEMSIZE = {dtype: np.dtype(code).itemsize for dtype, code in ARRAY_DTYPES.items()}
BITS = {dtype: 8 * size for dtype, size in ITEMSIZE.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


# %% [markdown]
# To write a header is easier than to read one, because the places follow from the shapes. The text is padded with
# spaces to a multiple of eight bytes, as the format's own library does it.

# %% tags=["export"]
def header_bytes(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> bytes:
    "The length and the padded JSON of the header of a file that holds `tensors`, (name, dtype, shape), in this order."
    entries: dict[str, dict] = {}
    at = 0
    for name, dtype, shape in tensors:
        end = at + prod(shape) * ITEMSIZE[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# %%
assert header_bytes([("a", "F32", [2]), ("b", "BF16", [1, 3])])[8:].rstrip() == text

# %% [markdown]
# To read a header is to check it. An entry must have three fields with whole numbers, and its shape must fill its bytes
# exactly: `8 (e - b)` is the number of bits of the type times the product of the shape. Other fields are ignored, as in
# the format's own library.
#
# New versions of the format may bring new types. If the number of bits of a type is not known here, the shape cannot be
# compared with the bytes, and only the place is checked. This is enough for a tensor that is not computed with. The
# types of all other tensors are compared with those that the config implies ([5.4.5]).
#
# [5.4.5]: 04_tensors.ipynb#5.4.5-The-files-against-the-list

# %% tags=["export"]
_FIELDS = {"dtype", "shape", "data_offsets"}


def tensor_fault(where: str, name: str, found: str, expected: str) -> CheckpointError:
    "The error for a tensor of the file `where`: what was found, what was expected."
    return CheckpointError(f"{where}: tensor {shown_value(name)}: {found}, expected {expected}")


def _naturals(value: object) -> bool:
    "Is `value` a list of whole numbers below 2^63? The value True does not count as the number 1."
    if type(value) is not list:
        return False
    for n in value:
        if type(n) is not int or not 0 <= n < 1 << 63:
            return False
    return True


Entry = tuple[str, str, tuple[int, ...], int, int]  # name, dtype, shape, begin, end


def _entry(where: str, name: str, entry: Any) -> Entry:
    "(name, dtype, shape, begin, end) from a header's `entry`. Raises CheckpointError."
    if type(entry) is not dict or not entry.keys() >= _FIELDS:
        raise tensor_fault(where, name, f"found {shown_value(entry)}", "an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str:
        raise tensor_fault(where, name, f"dtype {shown_value(dtype)}", "text")
    if not _naturals(shape) or len(shape) > RANK_MAX:
        raise tensor_fault(where, name, f"shape {shown_value(shape)}", f"at most {RANK_MAX} whole numbers")
    if not _naturals(offsets) or len(offsets) != 2:
        raise tensor_fault(where, name, f"data_offsets {shown_value(offsets)}", "two whole numbers")
    begin, end = offsets
    bits = prod(shape) * BITS.get(dtype, 0)
    if end < begin or dtype in BITS and 8 * (end - begin) != bits:
        expected = f"{bits:,} bits" if bits % 8 else f"{bits // 8:,} bytes"
        raise tensor_fault(where, name, f"data_offsets {offsets} span {end - begin:,} bytes",
                           f"{expected} for {dtype} {shape}")
    return name, dtype, tuple(shape), begin, end


# %% [markdown]
# Then all entries are checked together. Sorted by offset, each must begin where the entry before it ends, and the last
# must end where the file ends. One loop finds an overlap, a gap, additional bytes at the end, and a file that was cut
# short.
#
# A gap or additional bytes would change no number. But the specification of the format forbids them, and its library
# refuses them. They are a sign of a download that went wrong. So they are refused here, too.
#
# The notes under `__metadata__` should be an object of strings. Nothing is computed from them, so other values are
# accepted. The library itself reads `null` as no notes.

# %% tags=["export"]
_METADATA = "__metadata__"


def _tensors_of(text, where, unusual):
    "The entries of a header without its notes; notes of an odd form and fields without a meaning are counted."
    entries = json_object(text, f"{where}: header", ignored=_METADATA)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or any(type(value) is not str for value in metadata.values()):
        unusual.note("headers whose __metadata__ is not an object of strings", where)
    for name, entry in entries.items():
        if type(entry) is dict and entry.keys() > _FIELDS:
            unusual.note("tensors with more fields than the format has", f"{shown_value(name)} in {where}")
    return entries


# %% tags=["export"]
def parse_header(
    text: bytes | bytearray, data_bytes: int, where: str, unusual: Unusual | None = None
) -> list[Entry]:
    """[(name, dtype, shape, begin, end)] in the order of the data, from a header's JSON bytes `text`.

    `data_bytes` is the number of bytes in the file after the header, `where` names the file in a message. What is odd
    and changes no number is noted in `unusual`. Raises CheckpointError.
    """
    if len(text) > PLAIN_MAX:
        raise CheckpointError(f"{where}: header of {len(text):,} bytes is damaged or unusually written, "
                              f"expected at most {PLAIN_MAX:,} bytes for such a header")
    entries = _tensors_of(text, where, unusual or Unusual())
    rows = sorted((_entry(where, name, entry) for name, entry in entries.items()), key=itemgetter(3, 4))
    at, before = 0, "the header"
    for name, _, _, begin, end in rows:
        if end > data_bytes:
            raise CheckpointError(f"{where}: tensor {shown_value(name)} ends at data byte {end:,}, "
                                  f"expected at most {data_bytes:,}, the data bytes of the file: truncated?")
        if begin != at:
            what = "gap" if begin > at else "overlap"
            raise CheckpointError(f"{where}: tensor {shown_value(name)} begins at data byte {begin:,}, "
                                  f"expected {at:,} where {before} ends: {what} of {abs(begin - at):,} bytes")
        at, before = end, shown_value(name)
    if at != data_bytes:
        raise CheckpointError(f"{where}: {data_bytes:,} bytes of data, expected {at:,}, where {before} ends: "
                              f"{data_bytes - at:,} bytes belong to no tensor")
    return rows


# %%
n = int.from_bytes(toy[:8], "little")
parse_header(toy[8:8 + n], len(toy) - 8 - n, "toy")

# %% [markdown]
# ## 5.5.3 Accepted or refused
#
# The cell below changes the header of the example in one way at a time. Each change must be refused, with the place,
# the value found and the value expected.

# %%
changes = {
    "a list": ("{", "["), "cut": ("}}", ""), "same name": ('"b"', '"a"'), "half a type": ('"BF16"', "16"),
    "wrong shape": ("[1,3]", "[1,4]"), "negative": ("[0,8]", "[-8,0]"), "fraction": ("[1,3]", "[1,3.0]"),
    "bool": ("[1,3]", "[true,3]"), "overlap": ("[8,14]", "[6,12]"), "gap": ("[8,14]", "[9,15]"),
    "past the end": ("[8,14]", "[12,18]"), "field gone": ('"shape":[2],', ""),
}
for label, (old, new) in changes.items():
    try:
        parse_header(text.decode().replace(old, new, 1).encode(), 16 if label == "gap" else 14, "toy")
        raise AssertionError(f"{label} was accepted")
    except CheckpointError as error:
        print(f"{label:13s} {error}"[:150])

# %% [markdown]
# Other headers are unusual, but no number depends on it. They are read, and the unusual facts are counted.

# %%
for old, new in (('{"a"', '{"__metadata__":null,"a"'), ('{"a"', '{"__metadata__":{"step":1},"a"'),
                 ('"shape":[2]', '"shape":[2],"note":"x"')):
    odd, unusual = text.decode().replace(old, new, 1).encode(), Unusual()
    assert len(parse_header(odd, 14, "toy", unusual)) == 2
    print(f"{new:35s}", *unusual.lines())


# %% [markdown]
# The length of the header is checked before the header is read. It must not be larger than the file, nor than 100 MB,
# the bound of the format. Otherwise a damaged length of $2^{63}$ would become an allocation of this size. The bound is
# large enough: all 497,220 tensors in one file would need a header of 76 MB.
#
# Python's objects take about fifteen times as much memory as the text from which they are parsed. So the parser above
# refuses a text of more than 16 MB. A longer header is read by columns ([5.5.4]), or refused.
#
# [5.5.4]: #5.5.4-By-columns

# %% tags=["export"]
def read_header(file: FileIO, where: str) -> tuple[int, int, bytearray]:
    """(bytes before the data, bytes of the file, the header's JSON bytes) of an open safetensors file.

    `where` names the file in a message. Raises CheckpointError.
    """
    size = os.fstat(file.fileno()).st_size
    if size < 10:
        raise CheckpointError(f"{where}: file of {size} bytes, expected at least 10: a header's length and its '{{}}'")
    head, most = bytearray(8), min(HEADER_MAX, size - 8)
    read_exactly(file, head, 0, where)
    n = int.from_bytes(head, "little")
    if not 2 <= n <= most:
        raise CheckpointError(f"{where}: header length {n:,} bytes, expected 2 to {most:,} "
                              f"(the file has {size:,} bytes)")
    text = bytearray(n)
    read_exactly(file, text, 8, where)
    return 8 + n, size, text


# %% [markdown]
# The next cell tests damaged lengths in a sparse file of 400 MB, so that the size of the file does not refuse them. The
# last header has a permitted length, but it consists of one large list. None of these headers is parsed.

# %%
with tempfile.TemporaryDirectory() as other:
    path = Path(other, "toy")
    for length, body in (0, b""), (1 << 63, b""), (300_000_000, b"{"), (20_000_000, b'{"a":[[],[],[]'):
        path.write_bytes(length.to_bytes(8, "little") + body)
        os.truncate(path, 400_000_000)
        try:
            with open_shard(path) as file:
                start, size, header = read_header(file, "toy")
            parse_header(header, size - start, "toy")
            raise AssertionError(f"a header of {length:,} bytes was accepted")
        except CheckpointError as error:
            print(error)

# %% [markdown]
# ## 5.5.4 By columns
#
# To parse half a million entries one by one takes seconds. But libraries write headers without spaces or escapes, so
# the text repeats one pattern, and one regular expression can split it into columns. There are few different pairs of
# type and shape, so `_entry` checks each different pair once. All other checks are arithmetic on whole columns. If a
# type is not known here, its size does not follow from its shape, so each such tensor has a kind of its own. This
# reader makes no error messages. If a check fails, it returns None. Then `parse_header` reads the text and names the
# fault.

# %% tags=["export"]
_WHOLE = "(0|[1-9][0-9]{0,17})"  # any 18 digits fit an int64
_ENTRY = re.compile(r'"([^"\\\x00-\x1f]*)":\{("dtype":"[A-Z0-9_]+","shape":\[[0-9,]{0,400}\]),'
                    rf'"data_offsets":\[{_WHOLE},{_WHOLE}\]\}}')


Kind = tuple[str, tuple[int, ...], int]  # dtype, shape, bytes


def _kind(text: str) -> Kind:
    """(dtype, shape, bytes) from the text of an entry's first two fields; -1 bytes if they are not known.

    Raises ValueError or CheckpointError if they are not right.
    """
    entry = json.loads("{" + text + "}")
    entry["data_offsets"] = [0, prod(entry["shape"]) * BITS.get(entry["dtype"], 0) // 8]
    _, dtype, shape, _, nbytes = _entry("", "", entry)
    return dtype, shape, nbytes if dtype in BITS else -1


# %% tags=["export"]
class HeaderColumns(NamedTuple):
    "A header's entries in the order of its text: tensor i is names[i], of type and shape kinds[kind[i]]."
    names: list[str]
    kind: np.ndarray  # int32 [tensors]
    begin: np.ndarray  # int64 [tensors], counted from the end of the header
    end: np.ndarray  # int64 [tensors]
    kinds: Sequence[Kind]


# %% tags=["export"]
def quick_header(
    text: bytes | bytearray, data_bytes: int, where: str = "", unusual: Unusual | None = None
) -> HeaderColumns | None:
    """The entries that parse_header returns, as columns in the order of the text; `where`, `unusual` are as there.

    None if the text is damaged or not written the usual way; then parse_header must read it.
    """
    odd = Unusual()
    try:
        texts = _ENTRY.split(text.decode("utf-8"))
        between, names, kinds, *offsets = (texts[i::5] for i in range(5))
        front, back = between[0], between[-1].rstrip(" ")  # '{', perhaps '"__metadata__":{...},'; and '}'
        notes = front[-1:] == "," and _METADATA in front
        if front != "{" and (not notes or parse_header((front[:-1] + "}").encode(), 0, where, odd)):
            return None
        number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
        kind_of = [*map(_kind, number)]
    except (ValueError, CheckpointError):
        return None
    kind = np.fromiter(map(number.get, kinds), np.int32)
    begin, end = (np.array(column, np.int64) for column in offsets)
    for row in np.flatnonzero(np.array([nbytes for *_, nbytes in kind_of], np.int64)[kind] < 0):
        kind_of.append((*kind_of[kind[row]][:2], int(end[row] - begin[row])))
        kind[row] = len(kind_of) - 1
    order = np.lexsort((end, begin))
    ends = np.append(0, end[order])
    right = (back == "}" and {*between[1:-1]} <= {","} and len({*names, _METADATA}) == len(names) + 1
             and np.array_equal(end - begin, np.array([nbytes for *_, nbytes in kind_of], np.int64)[kind])
             and np.array_equal(begin[order], ends[:-1]) and ends[-1] == data_bytes and (begin <= end).all())
    if right and unusual is not None:
        unusual.include(odd)
    return HeaderColumns(names, kind, begin, end, kind_of) if right else None


# %%
print(*quick_header(text, 14))
assert all(quick_header(text.decode().replace(old, new, 1).encode(), 16 if label == "gap" else 14) is None
           for label, (old, new) in changes.items())

# %% [markdown]
# ## 5.5.5 A name is three small integers
#
# A name is a pattern and two numbers, the layer and the expert ([5.4.2]). The three fit one 63-bit key.
#
# $$\text{key} = (\text{pattern} \cdot 2^{20} + (\text{layer}+1)) \cdot 2^{20} + (\text{expert}+1)$$
#
# To split one name takes a regular expression, two calls of `int` and a tuple, and there are 497,220 names. But all
# except 2,628 of them belong to experts and begin alike. So one regular expression splits all names of experts in a
# file, and NumPy computes their keys. Only the other names are split one by one.
#
# [5.4.2]: 04_tensors.ipynb#5.4.2-Names

# %% tags=["export"]
PATTERNS_MAX = 1 << 20  # a key has room for 2^23
NUMBER_BITS = 20  # for a number below a million, plus one
NUMBER_MASK = (1 << NUMBER_BITS) - 1
_LINES = re.compile(f"(?:{re.escape(EXPERT_PATTERN)})?(.*)\n".replace(r"\#", "(0|[1-9][0-9]{0,5})"))


def key_of(number: Any, first: Any, second: Any) -> Any:
    "The sort key of pattern `number` and a name's two numbers, -1 for none: ints, or int64 arrays that broadcast."
    return (number << NUMBER_BITS | first + 1) << NUMBER_BITS | second + 1


def keys_of(names: list[str], number: Callable[[str], int]) -> np.ndarray:
    "The sort key of each of `names`, int64 [names]: key_of(number(pattern), first, second), as split_name splits it."
    text = "\n".join(names) + "\n"
    texts = _LINES.split(text)
    layer, expert, ending = (texts[i::4] for i in (1, 2, 3))
    if "#" in text or len(ending) != len(names):  # a name has a '#' or a line feed of its own
        layer = expert = ending = [None] * len(names)
    one_by_one = [i for i, digits in enumerate(layer) if digits is None]
    for i in one_by_one:
        ending[i] = None
    value = {digits: int(digits or -1) for digits in {*layer, *expert}}
    pattern = {end: 0 if end is None else number(EXPERT_PATTERN + end) for end in dict.fromkeys(ending)}
    columns = (pattern, ending), (value, layer), (value, expert)
    keys = key_of(*(np.fromiter(map(table.get, column), np.int64) for table, column in columns))
    for i in one_by_one:
        name, *numbers = split_name(names[i])
        keys[i] = key_of(number(name), *numbers)
    return keys


# %% [markdown]
# ## 5.5.6 The index
#
# The index keeps four numbers of each tensor: the key, the offset, the shard, and the kind. A kind is a type, a shape
# and a size; the release has 39 kinds. The numbers are in four NumPy columns, sorted by key, with 24 bytes for each
# tensor. A tensor is found by bisection.
#
# If two files have a tensor of the same name, it is not clear which one is meant. A name of the text stack is then
# refused. Any other tensor is not computed with. For such a name the first tensor is kept, and the second one is
# counted as unusual.

# %% tags=["export"]
class Extent(NamedTuple):
    "Where a tensor's bytes lie: `offset` counts from the start of `file`, a full path."
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class TensorIndex:
    """Where the tensors of a checkpoint's files lie: one row a tensor, 24 bytes, sorted by key.

    add() is called for each file, then complete() once. Before complete() the index has no columns; after it, the index
    never changes, and any thread may use it. `unusual`: what is odd about the files and changes no number.
    """
    key: np.ndarray  # int64 [tensors]: key_of the name
    offset: np.ndarray  # int64 [tensors]: from the start of the file
    kind: np.ndarray  # int32 [tensors]: a place in `kinds`
    shard: np.ndarray  # int32 [tensors]: a place in `files`

    def __init__(self) -> None:
        self.files: list[str] = []
        self.file_sizes: list[int] = []
        self.patterns: list[str] = []  # by the number in a key
        self.kinds: list[Kind] = []
        self.unusual = Unusual()
        self._number: dict[str, int] = {}  # of a pattern
        self._kind_number: dict[Kind, int] = {}
        self._columns = [bytearray() for _ in range(4)]


# %% [markdown]
# The columns grow in place. To join arrays would need memory for the data twice. `quick_header` reads a header, and
# `parse_header` reads it only if `quick_header` returns None.

# %% tags=["export"]
class TensorIndex(TensorIndex):
    def add(self, file: str, start: int, size: int, text: bytes | bytearray) -> None:
        """Add the tensors of a file of `size` bytes: its header's JSON is `text`, its data begin at byte `start`.

        Raises CheckpointError if the header is damaged.
        """
        columns = quick_header(text, size - start, file, self.unusual)
        if columns is None:
            rows = parse_header(text, size - start, file, self.unusual)
            begin, end = (np.array([row[i] for row in rows], np.int64) for i in (3, 4))
            kinds = [(dtype, shape, end - begin) for _, dtype, shape, begin, end in rows]
            columns = HeaderColumns([row[0] for row in rows], np.arange(len(rows)), begin, end, kinds)
        key = self.new_keys(columns.names, file)
        odd = np.flatnonzero(np.array([dtype not in BITS for dtype, *_ in columns.kinds], bool)[columns.kind])
        if len(odd):
            what = "tensors of a type that is not known here, of which only the places were checked"
            self.unusual.note(what, f"{shown_value(columns.names[odd[0]])} in {file}", len(odd))
        numbers = [self._kind_number.setdefault(kind, len(self._kind_number)) for kind in columns.kinds]
        kind, shard = np.array(numbers, np.int32)[columns.kind], np.full(len(key), len(self.files), np.int32)
        for column, values in zip(self._columns, (key, columns.begin + start, kind, shard)):
            column += values.tobytes()
        self.files.append(file)
        self.file_sizes.append(size)

    def new_keys(self, names: list[str], where: str) -> np.ndarray:
        "The sort key of each of `names`, int64. Raises CheckpointError if there are too many patterns."
        def number(pattern):
            if pattern not in self._number:
                self._number[pattern] = len(self.patterns)
                self.patterns.append(pattern)
            return self._number[pattern]

        keys = keys_of(names, number)
        if len(self.patterns) > PATTERNS_MAX:
            raise CheckpointError(f"{where}: {len(self.patterns):,} different names so far, not counting numbers, "
                                  f"expected at most {PATTERNS_MAX:,}")
        return keys


# %% tags=["export"]
class TensorIndex(TensorIndex):
    def complete(self) -> None:
        "Sort the rows by key. Raises CheckpointError if two files hold a tensor of the text stack with the same name."
        self.key, self.offset, self.kind, self.shard = map(
            np.frombuffer, self._columns, (np.int64, np.int64, np.int32, np.int32))
        self.kinds = list(self._kind_number)
        order = np.lexsort((self.shard, self.key))
        for column in self.key, self.offset, self.kind, self.shard:
            column[:] = column[order]
        twice = np.flatnonzero(self.key[1:] == self.key[:-1])  # equal neighbours after sorting: a name held twice
        if not len(twice):
            return
        refused = twice[self.in_text_stack(self.key[twice])]
        row = int(refused[0] if len(refused) else twice[0])
        one, other = (self.files[self.shard[row + i]] for i in (0, 1))
        if len(refused):
            raise CheckpointError(f"{other}: tensor {shown_value(self.name(row))} is also in {one}, expected once")
        self.unusual.note("tensors that nothing is computed from in two files", self.name(row), len(twice))
        self.key, self.offset, self.kind, self.shard = (
            np.delete(column, twice + 1) for column in (self.key, self.offset, self.kind, self.shard))

    def in_text_stack(self, keys: np.ndarray) -> np.ndarray:
        "Which of some sort keys belong to the text stack: bool."
        return np.array([pattern.startswith(TEXT_STACK) for pattern in self.patterns], bool)[keys >> 2 * NUMBER_BITS]


# %% [markdown]
# The next methods find the row of a name, and the name of a row. A number that is too large for its field of the key
# belongs to no tensor. It must not change the neighbouring field.

# %% tags=["export"]
class TensorIndex(TensorIndex):
    def __len__(self) -> int:
        return len(self.key)

    def name(self, row: int) -> str:
        "The name of the tensor in a row."
        return self.name_of(int(self.key[row]))

    def name_of(self, key: int) -> str:
        "The name that a sort key stands for."
        first, second = key >> NUMBER_BITS & NUMBER_MASK, key & NUMBER_MASK
        return join_name(self.patterns[key >> 2 * NUMBER_BITS], first - 1, second - 1)

    def row(self, pattern: str, first: int, second: int) -> int:
        "The row of the tensor whose name split_name splits into these three parts, or -1 if there is none."
        number = self._number.get(pattern)
        if number is None or not (-1 <= first < NUMBER_MASK and -1 <= second < NUMBER_MASK):
            return -1
        key = key_of(number, int(first), int(second))
        row = int(self.key.searchsorted(key))
        return row if row < len(self) and self.key[row] == key else -1

    def rows_of(self, keys: np.ndarray) -> np.ndarray:
        "The row of each of some sort keys, int64, -1 for a key that no tensor has."
        row = self.key.searchsorted(keys)
        return np.where(self.key.searchsorted(keys, "right") > row, row, -1)

    def extent(self, row: int) -> Extent:
        "The Extent of the tensor in a row, which must not be -1."
        dtype, shape, nbytes = self.kinds[self.kind[row]]
        return Extent(self.files[self.shard[row]], int(self.offset[row]), nbytes, dtype, shape)


# %% [markdown]
# The last methods answer questions about many tensors at once, for the census (5.6) and for the comparison with the
# config ([5.4.5]).
#
# [5.4.5]: 04_tensors.ipynb#5.4.5-The-files-against-the-list

# %% tags=["export"]
class TensorIndex(TensorIndex):
    def nbytes(self) -> np.ndarray:
        "Bytes of the tensor of each row, int64."
        return np.array([nbytes for *_, nbytes in self.kinds], np.int64)[self.kind]

    def in_file_order(self) -> np.ndarray:
        "The rows in the order of the files, and of the data within each."
        return np.lexsort((self.offset, self.shard))

    def kinds_of(self, pattern: str, layers: Sequence[int], experts: Sequence[int]) -> set:
        """{(dtype, shape)} of the tensors with `pattern` and each pair of numbers from the two lists.

        -1 stands for no number, as in split_name. The set holds None if one of these tensors is absent.
        """
        number = self._number.get(pattern, -1)
        rows = self.rows_of(key_of(number, np.array(layers, np.int64)[:, None], np.array(experts, np.int64)).ravel())
        return {None if kind < 0 else self.kinds[kind][:2] for kind in np.unique(np.append(self.kind, -1)[rows])}

    def count_of(self, prefix: str, layers: range | None = None) -> int:
        """How many tensors have a name that begins with `prefix`, which must not hold a number.

        With `layers`: how many of those have such a number first.
        """
        begins = np.array([pattern.startswith(prefix) for pattern in self.patterns], bool)[self.key >> 2 * NUMBER_BITS]
        first = (self.key >> NUMBER_BITS & NUMBER_MASK) - 1
        return int((begins if layers is None else begins & (first >= layers.start) & (first < layers.stop)).sum())


# %% [markdown]
# The check builds an index of the example, with a type for `b` that is not known. A second file with the same names is
# counted as unusual. If a name belongs to the text stack, the second file is refused.

# %%
def indexed(text, *files):
    "An index of files of the toy's size that have the header `text`."
    index = TensorIndex()
    for file in files:
        index.add(file, 8 + len(text), 8 + len(text) + 14, text)
    index.complete()
    return index


index = indexed(text.replace(b"BF16", b"X48"), "toy")
print(*(index.extent(index.row(*split_name(name))) for name in "ab"), *index.unusual.lines(), sep="\n")
print(*indexed(text, "one", "other").unusual.lines())
try:
    indexed(text.replace(b'"a"', b'"language_model.a"'), "one", "other")
    raise AssertionError("accepted")
except CheckpointError as error:
    print(error)

# %% [markdown]
# ## 5.5.7 What the index costs
#
# The simplest index would be the parsed JSON. How much memory would it take? The header of one layer is enough to
# measure it, and the table of 5.4 gives this header. The next cell also measures a dictionary of small tuples, the
# contents of `model.safetensors.index.json`, which has a name and a file for each tensor, and the four columns.

# %%
layer1 = sorted(layer_tensors(read_config(ROOT / "fixtures/k3"), 1), key=lambda t: (-ITEMSIZE[t[1]], t[0]))
header, data_bytes = header_bytes(layer1)[8:], sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in layer1)
rows = parse_header(header, data_bytes, "layer 1")
index = TensorIndex()
index.add("layer 1", 8 + len(header), 8 + len(header) + data_bytes, header)
index.complete()
assert len(index) == len(rows) == len(layer1)
assert all(index.extent(index.row(*split_name(name)))[1:] == (8 + len(header) + begin, end - begin, dtype, shape)
           for name, dtype, shape, begin, end in rows)


# %% tags=["nbval-ignore-output"]
def weigh(build):
    "Bytes of the object that build() makes, as Python's allocators count them."
    tracemalloc.start()
    made = build()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return kept


names = json.dumps({row[0]: "model-00002-of-000096.safetensors" for row in rows})
for way, build in {
    "the parsed header": lambda: json.loads(header),
    "name -> (dtype, shape, begin, end)": lambda: {row[0]: row[1:] for row in parse_header(header, data_bytes, "")},
    "index.json, name -> file": lambda: json.loads(names),
}.items():
    each = weigh(build) / len(rows)
    print(f"{way:36s}{each:5.0f} bytes a tensor {each * 497_220 / 1e6:5.0f} MB for 497,220")
each = sum(column.nbytes for column in (index.key, index.offset, index.kind, index.shard)) / len(index)
print(f"{'four sorted columns':36s}{each:5.0f} bytes a tensor {each * 497_220 / 1e6:5.0f} MB")  # claim index


# %% [markdown]
# The next cell measures the time on the same header: entry by entry and name by name, and then by columns. The slow
# forms are still needed. They define the right result, and they name a fault.

# %% tags=["nbval-ignore-output"]
def microseconds(make):
    "Shortest of five runs of make(), in microseconds a tensor of the header."
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        make()
        spent.append(time.perf_counter() - began)
    return 1e6 * min(spent) / len(rows)


quick = quick_header(header, data_bytes)
numbers = {pattern: i for i, pattern in enumerate(dict.fromkeys(split_name(name)[0] for name in quick.names))}
assert [(name, *quick.kinds[k][:2], b, e) for name, k, b, e in zip(*quick[:4])] == rows


def one_by_one():
    return [key_of(numbers[pattern], *LE) for pattern, *LE in map(split_name, quick.names)]


assert keys_of(quick.names, numbers.get).tolist() == one_by_one()
for what, plain, columns in (
    ("entries", lambda: parse_header(header, data_bytes, ""), lambda: quick_header(header, data_bytes)),
    ("keys of names", one_by_one, lambda: keys_of(quick.names, numbers.get)),
):
    print(f"{what:14s} one by one {microseconds(plain):.1f} us a tensor, by columns {microseconds(columns):.1f} us")

# %% [markdown]
# A dictionary would find a tensor faster. But a token looks up only 1,472 experts while it reads 137 GB. So the
# microseconds for splitting a name and for the bisection do not matter.
#
# ## 5.5.8 Summary
#
# - A safetensors header has the place of every tensor. The index keeps it in 24 bytes for each tensor.
# - The data have no structure, so a wrong place cannot be seen in them. Therefore every place is checked: size,
#   overlap, gap, and the end of the file. A fact on which no number depends is counted and not refused.
# - Half a million entries are checked as columns. A header that fails is read again, entry by entry, to name the fault.
#
# ## Exercises
#
# The answers are in [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Exchange the `data_offsets` of two tensors of equal shape. Why does no check of this chapter notice it, and what
#    would?
# 2. Put a tensor of shape `[0]` at the front, in the middle or at the end of a file. Which of the checks of [5.5.2]
#    must accept it?
#
# [5.5.2]: #5.5.2-Parsing-a-header
