"""5.5 Headers, and half a million tensors in four columns

Made from book/05_streaming/05_header.py: edit that, then run `make export`.
"""

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


class HeaderColumns(NamedTuple):
    "A header's entries in the order of its text: tensor i is names[i], of type and shape kinds[kind[i]]."
    names: list[str]
    kind: np.ndarray  # int32 [tensors]
    begin: np.ndarray  # int64 [tensors], counted from the end of the header
    end: np.ndarray  # int64 [tensors]
    kinds: Sequence[Kind]


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


__all__ = [
    "HEADER_MAX", "PLAIN_MAX", "RANK_MAX", "ARRAY_DTYPES", "ITEMSIZE", "BITS", "header_bytes", "tensor_fault",
    "Entry", "parse_header", "read_header", "Kind", "HeaderColumns", "quick_header", "PATTERNS_MAX", "NUMBER_BITS",
    "NUMBER_MASK", "key_of", "keys_of", "Extent", "TensorIndex",
]
