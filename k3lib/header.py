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

from k3lib.fileio import CheckpointError, json_object, read_exactly, shown_value
from k3lib.tensors import EXPERT_PATTERN, join_name, split_name


HEADER_MAX = 100_000_000  # bytes: the safetensors library's own cap
PLAIN_MAX = 16_000_000  # bytes of a header that is read entry by entry; the longest of the release has 0.82 MB
RANK_MAX = 32  # axes that an array may have in every version of numpy

ARRAY_DTYPES = {
    "BF16": "<u2", "F32": "<f4", "U8": "u1", "F16": "<f2", "F64": "<f8", "BOOL": "u1", "I8": "i1", "I16": "<i2",
    "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8", "C64": "<c8",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # BF16 and F8 as bits: numpy has no such types
ITEMSIZE = {dtype: np.dtype(code).itemsize for dtype, code in ARRAY_DTYPES.items()}


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


def braced_object(text: bytes | bytearray, where: str) -> dict:
    "json_object(text, where) of a text that must begin with its brace: safetensors allows no space before it."
    if text[:1] != b"{":
        raise CheckpointError(f"{where} begins with {bytes(text[:1])!r}, expected the '{{' of a JSON object")
    return json_object(text, where)


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
    if type(entry) is not dict or entry.keys() != _FIELDS:
        raise tensor_fault(where, name, f"found {shown_value(entry)}", "an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in ITEMSIZE:
        raise tensor_fault(where, name, f"dtype {shown_value(dtype)}", f"one of {' '.join(ITEMSIZE)}")
    if not _naturals(shape) or len(shape) > RANK_MAX or 0 in shape and prod(n or 1 for n in shape) >> 59:
        raise tensor_fault(where, name, f"shape {shown_value(shape)}",
                           f"at most {RANK_MAX} whole numbers that an array can have")
    if not _naturals(offsets) or len(offsets) != 2:
        raise tensor_fault(where, name, f"data_offsets {shown_value(offsets)}", "two whole numbers")
    begin, end = offsets
    nbytes = prod(shape) * ITEMSIZE[dtype]
    if end - begin != nbytes:
        raise tensor_fault(where, name, f"data_offsets {offsets} span {end - begin:,} bytes",
                           f"{nbytes:,} bytes for {dtype} {shape}")
    return name, dtype, tuple(shape), begin, end


def _metadata_checked(entries: dict, where: str) -> dict:
    "`entries` without the optional __metadata__, which must be an object of strings."
    metadata = entries.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ is {shown_value(metadata)}, expected an object of strings")
    return entries


def parse_header(text: bytes | bytearray, data_bytes: int, where: str) -> list[Entry]:
    """[(name, dtype, shape, begin, end)] in the order of the data, from a header's JSON bytes `text`.

    `data_bytes` is the number of bytes in the file after the header, `where` names the file in a message. Raises
    CheckpointError.
    """
    if len(text) > PLAIN_MAX:
        raise CheckpointError(f"{where}: header of {len(text):,} bytes is damaged or unusually written, "
                              f"expected at most {PLAIN_MAX:,} bytes for such a header")
    entries = _metadata_checked(braced_object(text, f"{where}: header"), where)
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


def _kind(text: str) -> tuple[tuple[str, tuple[int, ...]], int]:
    "((dtype, shape), bytes) from the text of an entry's first two fields. ValueError or CheckpointError if not right."
    entry = json.loads("{" + text + "}")
    entry["data_offsets"] = [0, prod(entry["shape"]) * ITEMSIZE.get(entry["dtype"], 0)]
    _, dtype, shape, _, nbytes = _entry("", "", entry)
    return (dtype, shape), nbytes


class HeaderColumns(NamedTuple):
    "A header's entries in the order of its text: tensor i is names[i], of type and shape kinds[kind[i]]."
    names: list[str]
    kind: np.ndarray  # int32 [tensors]
    begin: np.ndarray  # int64 [tensors], counted from the end of the header
    end: np.ndarray  # int64 [tensors]
    kinds: Sequence[tuple[str, tuple[int, ...]]]  # (dtype, shape)


def quick_header(text: bytes | bytearray, data_bytes: int) -> HeaderColumns | None:
    """The entries that parse_header returns, as columns in the order of the text.

    None if the text is damaged or not written the usual way; then parse_header must read it.
    """
    try:
        texts = _ENTRY.split(text.decode("utf-8"))
        between, names, kinds, *offsets = (texts[i::5] for i in range(5))
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
             and np.array_equal(end - begin, np.array(nbytes_of, np.int64)[kind])
             and np.array_equal(begin[order], ends[:-1]) and ends[-1] == data_bytes)
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
    never changes, and any thread may use it.
    """
    key: np.ndarray  # int64 [tensors]: key_of the name
    offset: np.ndarray  # int64 [tensors]: from the start of the file
    kind: np.ndarray  # int32 [tensors]: a place in `kinds`
    shard: np.ndarray  # int32 [tensors]: a place in `files`

    def __init__(self) -> None:
        self.files: list[str] = []
        self.file_sizes: list[int] = []
        self.patterns: list[str] = []  # by the number in a key
        self.kinds: list[tuple[str, tuple[int, ...], int]] = []  # dtype, shape, bytes
        self._number: dict[str, int] = {}  # of a pattern
        self._kind_number: dict[tuple[str, tuple[int, ...]], int] = {}
        self._columns = [bytearray() for _ in range(4)]

    def add(self, file: str, start: int, size: int, text: bytes | bytearray) -> None:
        """Add the tensors of a file of `size` bytes: its header's JSON is `text`, its data begin at byte `start`.

        Raises CheckpointError if the header is damaged.
        """
        columns = quick_header(text, size - start)
        if columns is None:
            rows = parse_header(text, size - start, file)
            begin, end = (np.array([row[i] for row in rows], np.int64) for i in (3, 4))
            kinds = [row[1:3] for row in rows]
            columns = HeaderColumns([row[0] for row in rows], np.arange(len(rows)), begin, end, kinds)
        key = keys_of(columns.names, lambda pattern: self._number.setdefault(pattern, len(self._number)))
        if len(self._number) > PATTERNS_MAX:
            raise CheckpointError(f"{file}: {len(self._number):,} different names so far, not counting numbers, "
                                  f"expected at most {PATTERNS_MAX:,}")
        numbers = [self._kind_number.setdefault(kind, len(self._kind_number)) for kind in columns.kinds]
        kind, shard = np.array(numbers, np.int32)[columns.kind], np.full(len(key), len(self.files), np.int32)
        for column, values in zip(self._columns, (key, columns.begin + start, kind, shard)):
            column += values.tobytes()
        self.files.append(file)
        self.file_sizes.append(size)

    def complete(self) -> None:
        "Sort the rows by key. Raises CheckpointError if two files hold a tensor of the same name."
        self.key, self.offset, self.kind, self.shard = map(
            np.frombuffer, self._columns, (np.int64, np.int64, np.int32, np.int32))
        self.patterns = list(self._number)
        self.kinds = [(dtype, shape, prod(shape) * ITEMSIZE[dtype]) for dtype, shape in self._kind_number]
        order = np.argsort(self.key)
        for column in self.key, self.offset, self.kind, self.shard:
            column[:] = column[order]
        twice = np.flatnonzero(self.key[1:] == self.key[:-1])  # equal neighbours after sorting: a name held twice
        if len(twice):
            one, other = sorted(self.files[self.shard[twice[0] + i]] for i in (0, 1))
            raise CheckpointError(f"{other}: tensor {shown_value(self.name(twice[0]))} is also in {one}, expected once")

    def __len__(self) -> int:
        return len(self.key)

    def name(self, row: int) -> str:
        "The name of the tensor in a row."
        key = int(self.key[row])
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

    def rows_of(self, names: list[str]) -> np.ndarray:
        "The row of each of `names`, int64 [names], -1 for a name that no tensor has."
        return self._rows(keys_of(names, lambda pattern: self._number.get(pattern, -1)))

    def _rows(self, keys: np.ndarray) -> np.ndarray:
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
        rows = self._rows(key_of(number, np.array(layers, np.int64)[:, None], np.array(experts, np.int64)).ravel())
        return {None if kind < 0 else self.kinds[kind][:2] for kind in np.unique(np.append(self.kind, -1)[rows])}

    def count_of(self, prefix: str) -> int:
        "How many tensors have a name that begins with `prefix`, which must not hold a number."
        begins = np.array([pattern.startswith(prefix) for pattern in self.patterns], bool)
        return int(begins[self.key >> 2 * NUMBER_BITS].sum())


__all__ = [
    "HEADER_MAX", "PLAIN_MAX", "RANK_MAX", "ARRAY_DTYPES", "ITEMSIZE", "header_bytes", "braced_object",
    "tensor_fault", "Entry", "parse_header", "read_header", "HeaderColumns", "quick_header", "PATTERNS_MAX",
    "NUMBER_BITS", "NUMBER_MASK", "key_of", "keys_of", "Extent", "TensorIndex",
]
