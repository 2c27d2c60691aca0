"""1.1 Where every weight lies

Made from book/01_mxfp4/01_checkpoint.py: edit that, then run `make export`.
"""

import json
import os
import re
import stat
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np


class CheckpointError(Exception):
    "Weights that are missing, truncated or damaged. One line: file, tensor, what was found, what was expected."


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


DEPTH_MAX = 16  # lists and objects inside one another: a header has 3, a config 6


def _show(value):
    "A value out of a file, on one line, cut where it gets long."
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _is_deep(tree):
    "Whether `tree` holds more than DEPTH_MAX lists and objects inside one another."
    level = [tree]
    for _ in range(DEPTH_MAX):
        level = [inner for outer in level for inner in (outer.values() if type(outer) is dict else outer) if type(inner) in (dict, list)]
    return bool(level)


def json_object(text, where, error=CheckpointError):
    """The JSON object in the bytes `text`, which `where` names.

    Raises `error` if it is none in UTF-8, has a name twice in one object, or nests more than DEPTH_MAX deep.
    """
    def unique(pairs):
        found = dict(pairs)
        "".join(found).encode("utf-8")  # half a surrogate pair is JSON, but no name that could be printed
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: name {_show(twice)} found twice, expected once")
        return found

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except error:
        raise
    except (ValueError, RecursionError) as fault:
        raise error(f"{where} is not JSON: {str(fault)[:120]}, expected a JSON object in UTF-8") from None
    if type(found) is not dict:
        raise error(f"{where} holds a JSON {type(found).__name__}, expected an object")
    if _is_deep(found):
        raise error(f"{where} nests lists and objects more than {DEPTH_MAX} deep, expected {DEPTH_MAX} at most")
    return found


def _braced(text, where):
    "json_object of `text`, of which the format says that it begins with the brace."
    if text[:1] != b"{":
        raise CheckpointError(f"{where} begins with {bytes(text[:1])!r}, expected the '{{' of a JSON object")
    return json_object(text, where)


_FIELDS = {"dtype", "shape", "data_offsets"}


def _wrong(where, name, found, expected):
    return CheckpointError(f"{where}: tensor {_show(name)}: {found}, expected {expected}")


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
        raise _wrong(where, name, f"found {_show(entry)}", "an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in ITEMSIZE:
        raise _wrong(where, name, f"dtype {_show(dtype)}", f"one of {' '.join(ITEMSIZE)}")
    if not _naturals(shape) or len(shape) > RANK_MAX or 0 in shape and prod(n or 1 for n in shape) >> 59:
        raise _wrong(where, name, f"shape {_show(shape)}", f"at most {RANK_MAX} whole numbers that an array can have")
    if not _naturals(offsets) or len(offsets) != 2:
        raise _wrong(where, name, f"data_offsets {_show(offsets)}", "two whole numbers")
    begin, end = offsets
    nbytes = prod(shape) * ITEMSIZE[dtype]
    if end - begin != nbytes:
        raise _wrong(where, name, f"data_offsets {offsets} span {end - begin:,} bytes", f"{nbytes:,} bytes for {dtype} {shape}")
    return name, dtype, tuple(shape), begin, end


def parse_header(text, data_bytes, where):
    """[(name, dtype, shape, begin, end)] in the order of the data, from a header's JSON bytes `text`.

    `data_bytes` is what the file holds behind the header, `where` names the file in a CheckpointError.
    """
    if len(text) > PLAIN_MAX:
        raise CheckpointError(f"{where}: header of {len(text):,} bytes is not plainly right, expected at most {PLAIN_MAX:,} to look for the fault in")
    entries = _braced(text, f"{where}: header")
    metadata = entries.pop("__metadata__", {})
    if type(metadata) is not dict or any(type(v) is not str for v in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ is {_show(metadata)}, expected an object of strings")
    rows = sorted((_entry(where, name, entry) for name, entry in entries.items()), key=itemgetter(3, 4))
    at, before = 0, "the header"
    for name, _, _, begin, end in rows:
        if end > data_bytes:
            raise CheckpointError(f"{where}: tensor {_show(name)} ends at data byte {end:,}, expected at most {data_bytes:,}, "
                                  "which is what the file holds: truncated?")
        if begin != at:
            what = "gap" if begin > at else "overlap"
            raise CheckpointError(f"{where}: tensor {_show(name)} begins at data byte {begin:,}, expected {at:,} where {before} ends: "
                                  f"{what} of {abs(begin - at):,} bytes")
        at, before = end, _show(name)
    if at != data_bytes:
        raise CheckpointError(f"{where}: {data_bytes:,} bytes of data, expected {at:,}, where {before} ends: "
                              f"{data_bytes - at:,} bytes belong to no tensor")
    return rows


READ_MAX = 1 << 30  # bytes asked of one call: Linux moves at most 2 GiB - 4 KiB, macOS refuses more than 2 GiB
_POSITION = threading.Lock()


def _preadv(file, view, offset):
    return os.preadv(file.fileno(), [view], offset)


def _seek_read(file, view, offset):
    "The same where the system has no preadv: a file's position is shared, so one at a time."
    with _POSITION:
        file.seek(offset)
        return file.readinto(view)


_read_some = _preadv if hasattr(os, "preadv") else _seek_read


def read_exactly(file, view, offset, where):
    "Fill `view`, writable bytes, from byte `offset` of the unbuffered `file`; CheckpointError if it ends early or fails."
    view, done = memoryview(view), 0
    try:
        while done < len(view) and (got := _read_some(file, view[done:done + READ_MAX], offset + done)):
            done += got
    except (OSError, ValueError) as error:  # ValueError: the file was closed
        raise CheckpointError(f"{where}: reading {len(view):,} bytes at offset {offset:,} failed: {error}") from None
    if done < len(view):
        raise CheckpointError(f"{where}: got {done:,} bytes at offset {offset:,}, expected {len(view):,}: the file ends there")


@contextmanager
def writing(path):
    "open(path, 'wb') in a `with`, whose OSError names the file and the byte at which it could not be written."
    file = open(path, "wb")
    try:
        yield file
        file.flush()
    except OSError as error:
        place = f"{path}: writing at byte {os.lseek(file.fileno(), 0, os.SEEK_CUR):,} failed: {error.strerror}"
        raise OSError(error.errno, place) if error.filename is None else error from None
    finally:
        with suppress(OSError):  # what could not be written above cannot be at the end either
            file.close()


def sync_folder(folder):
    "A new name in a folder is on the disk when the folder is."
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def whole_file(path):
    "writing() a file that gets its name when it is complete and on the disk; if anything fails before that, nothing of it stays."
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def identity(status):
    "(device, inode, bytes, time of the last write in ns) of an os.stat: what tells that a file is another, or was written to, since."
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _open(path):
    "An open unbuffered file; OSError otherwise. Links are followed: a hub cache is made of them. A pipe, which would wait, is not opened."
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(0, "a link to nothing" if os.path.islink(path) else "no such file") from None
    if not stat.S_ISREG(mode):
        raise OSError(0, "not a file")
    return open(path, "rb", buffering=0)


def open_shard(path):
    "An open unbuffered file; CheckpointError if there is none."
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None


def small_file(path, most, error):
    "The bytes of a file of 1 to `most`, judged before one is read. FileNotFoundError if there is none, `error` if it is not to be had."
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not 0 < size <= most:
                raise error(f"{path}: {size:,} bytes, expected 1 to {most:,}")
            return file.read()
    except FileNotFoundError as fault:
        raise FileNotFoundError(f"{path}: {fault.strerror}") from None
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None


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


PATTERNS_MAX = 1 << 20  # a key has room for 2^23
_BITS = 20  # for a number below a million, plus one
_ALL_ONES = (1 << _BITS) - 1
_NUMBER = re.compile(r"\.(0|[1-9][0-9]{0,5})(?=\.|\Z)")


def split_name(name):
    """(pattern, first, second): the first two whole-number parts of a dotted name become '#'; -1 stands for none.

    Only 0..999999 behind a dot and without leading zeros count, so join_name gives the name back. A name that has a '#'
    of its own is kept whole behind one more '#'.
    """
    if "#" in name:
        return "#" + name, -1, -1
    pieces = _NUMBER.split(name, 2)  # text, number, text, number, text
    if len(pieces) == 5:
        return f"{pieces[0]}.#{pieces[2]}.#{pieces[4]}", int(pieces[1]), int(pieces[3])
    return (f"{pieces[0]}.#{pieces[2]}", int(pieces[1]), -1) if len(pieces) == 3 else (name, -1, -1)


def join_name(pattern, first, second):
    "The name that split_name took apart."
    if first < 0:
        return pattern.removeprefix("#")
    name = pattern.replace("#", str(first), 1)
    return name if second < 0 else name.replace("#", str(second), 1)


def _key(number, first, second):
    "The sort key of pattern `number` and a name's two numbers."
    return (number << _BITS | first + 1) << _BITS | second + 1


_LAYER = "language_model.model.layers.#."
_EXPERT = _LAYER + "block_sparse_moe.experts.#."
_LINES = re.compile(f"(?:{re.escape(_EXPERT)})?(.*)\n".replace(r"\#", "(0|[1-9][0-9]{0,5})"))


def _keys(names, number):
    "The sort keys of a list of names, int64: _key of split_name, with `number(pattern)` for the pattern's number."
    text = "\n".join(names) + "\n"
    pieces = _LINES.split(text)
    layer, expert, rest = (pieces[i::4] for i in (1, 2, 3))
    if "#" in text or len(rest) != len(names):  # a name with a '#' or a line's end of its own
        layer = expert = rest = [None] * len(names)
    singly = [i for i, digits in enumerate(layer) if digits is None]
    for i in singly:
        rest[i] = None
    value = {digits: int(digits or -1) for digits in {*layer, *expert}}
    pattern = {end: 0 if end is None else number(_EXPERT + end) for end in dict.fromkeys(rest)}
    columns = (pattern, rest), (value, layer), (value, expert)
    keys = _key(*(np.fromiter(map(table.get, column), np.int64) for table, column in columns))
    for i in singly:
        name, *numbers = split_name(names[i])
        keys[i] = _key(number(name), *numbers)
    return keys


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


_SHARD = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors", re.ASCII)


def shard_names(folder):
    "The checkpoint's file names in order: model.safetensors alone, or every model-XXXXX-of-YYYYYY.safetensors."
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{folder}: {'a file' if os.path.exists(folder) else 'no such folder'}, expected a checkpoint's folder")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error.strerror}") from None
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if "model.safetensors" in names and not shards:
        return ["model.safetensors"]
    if not shards or "model.safetensors" in names:
        raise CheckpointError(f"{folder}: {'both kinds of weight file' if shards else 'no weight files'}, expected either "
                              "model.safetensors or model-00001-of-0000NN.safetensors and its siblings")
    digits, of = len(shards[0][1]), shards[0][2]
    found, wanted = [match[0] for match in shards], [f"model-{i:0{digits}d}-of-{of}.safetensors" for i in range(1, int(of) + 1)]
    if found != wanted:
        missing, stray = sorted({*wanted} - {*found}), sorted({*found} - {*wanted})
        what = [f"{name} is missing" for name in missing[:1]] + [f"{name} does not belong to them" for name in stray[:1]]
        raise CheckpointError(f"{folder}: {len(found):,} weight files, expected {int(of):,}: {', '.join(what)}")
    return found


INDEX = "model.safetensors.index.json"
_BLOCK = 1 << 18  # bytes of it that are read and parsed at a time
_CUT = b'.safetensors",'


def index_pieces(path, most):
    "The JSON object in file `path`, of at most `most` bytes, as several: each holds a part of its \"weight_map\"."
    with open_shard(path) as file:
        size, text, front = os.fstat(file.fileno()).st_size, b"", b""
        if size > most:
            raise CheckpointError(f"{path}: {size:,} bytes, expected at most {most:,} for the tensors that are here")
        for begin in range(0, size or 1, _BLOCK):
            block = bytearray(min(_BLOCK, size - begin))
            read_exactly(file, block, begin, path)
            text, end = text + block, begin + len(block)
            where, last = f"{path}: its text up to byte {end:,}", end >= size
            part, cut, text = (text, b"", b"") if last else text.rpartition(_CUT)
            if not (cut or last):
                raise CheckpointError(f"{where} is {len(text):,} bytes without {_CUT.decode()}, expected one after every tensor's file")
            piece = _braced(front + part + (b"" if last else cut[:-1] + b"}}"), where)
            if type(piece.get("weight_map")) is not dict or not last and [*piece][-1] != "weight_map":
                raise CheckpointError(f"{where} has {_show([*piece])}, expected an object weight_map of all tensors and their files")
            yield piece
            front = b'{"weight_map":{'


def check_index(checkpoint):
    "CheckpointError unless the index, if there is one, lists the tensors that are there and no others, each in its file, and their bytes."
    path = str(checkpoint.path / INDEX)
    if not os.path.lexists(path):
        return
    payload = int(checkpoint._nbytes().sum())
    number = {os.path.basename(file): i for i, file in enumerate(checkpoint.files)}
    shard = np.append(checkpoint._shard, -1)  # row -1: a tensor that is nowhere
    seen, metadata = np.zeros(len(shard), bool), []
    for piece in index_pieces(path, 2 * (sum(checkpoint.file_sizes) - payload) + 1_000_000):
        names, files = [*piece["weight_map"]], [*piece["weight_map"].values()]
        rows = checkpoint._rows(_keys(names, lambda pattern: checkpoint._patterns.get(pattern, -1)))
        wrong = np.flatnonzero((rows < 0) | (shard[rows] != [number.get(file, -1) if type(file) is str else -1 for file in files]))
        if len(wrong):
            i = wrong[0]
            found = checkpoint.files[shard[rows[i]]] if rows[i] >= 0 else "no file"
            raise _wrong(path, names[i], f"found in {found}", _show(files[i]))
        if seen[rows].any():
            raise _wrong(path, names[np.argmax(seen[rows])], "listed twice", "once")
        seen[rows] = True
        metadata.append(piece.get("metadata", {}))
    if not seen[:-1].all():
        row = np.argmin(seen)
        raise _wrong(path, checkpoint._name(row), f"found in {checkpoint.files[shard[row]]}", "no file, because it is not listed")
    for each in metadata:
        total = each.get("total_size", payload) if type(each) is dict else each
        if type(total) not in (int, float) or total != payload:
            raise CheckpointError(f"{path}: metadata.total_size is {_show(total)}, expected {payload:,}, the bytes of all tensors")


class Extent(NamedTuple):
    "Where a tensor's bytes lie: `offset` counts from the start of `file`, a full path."
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple


EXPERT_TENSORS = {w + short: f"{_EXPERT}{w}.weight_{long}"
                  for w in ("w1", "w2", "w3") for short, long in (("", "packed"), ("_scale", "scale"))}


class Checkpoint:
    """The tensors of a folder of safetensors files, found from the headers alone: 24 bytes of memory a tensor.

    Raises FileNotFoundError if there is no such folder, CheckpointError if a file is missing or its header is not
    believed. The files stay open until `close()` or the end of a `with` block; reads may come from any thread.
    """

    def __init__(self, path):
        self._files, self._patterns, self.identities, kinds = [], {}, {}, {}
        self.path = Path(path)
        self.files = [str(self.path / name) for name in shard_names(self.path)]
        self.file_sizes = []
        try:
            columns = [bytearray() for _ in range(4)]  # which grow where they are; joining arrays would hold all of them twice
            for shard in range(len(self.files)):
                for column, values in zip(columns, self._read_shard(shard, kinds)):
                    column += values.tobytes()
            self._key, self._offset, self._kind, self._shard = map(np.frombuffer, columns, (np.int64, np.int64, np.int32, np.int32))
            self._names = list(self._patterns)
            self._kinds = [(dtype, shape, prod(shape) * ITEMSIZE[dtype]) for dtype, shape in kinds]
            self._sort()
            check_index(self)
        except BaseException:
            self.close()
            raise

    def _read_shard(self, shard, kinds):
        path = self.files[shard]
        self._files.append(open_shard(path))
        self.identities[path] = identity(os.fstat(self._files[shard].fileno()))
        start, size, text = read_header(self._files[shard], path)
        self.file_sizes.append(size)
        columns = quick_header(text, size - start)
        if columns is None:
            rows = parse_header(text, size - start, path)
            columns = [row[0] for row in rows], range(len(rows)), [row[3] for row in rows], [], [row[1:3] for row in rows]
        names, kind, begin, _, kind_of = columns
        key = _keys(names, lambda pattern: self._patterns.setdefault(pattern, len(self._patterns)))
        if len(self._patterns) > PATTERNS_MAX:
            raise CheckpointError(f"{path}: {len(self._patterns):,} different names so far, numbers taken out, expected at most {PATTERNS_MAX:,}")
        kind = np.array([kinds.setdefault(each, len(kinds)) for each in kind_of], np.int32)[kind]
        return key, np.array(begin, np.int64) + start, kind, np.full(len(names), shard, np.int32)

    def _sort(self):
        order = np.argsort(self._key)
        for column in self._key, self._offset, self._kind, self._shard:
            column[:] = column[order]
        twice = np.flatnonzero(self._key[1:] == self._key[:-1])
        if len(twice):
            one, other = sorted(self.files[self._shard[twice[0] + i]] for i in (0, 1))
            raise CheckpointError(f"{other}: tensor {_show(self._name(twice[0]))} is also in {one}, expected once")

    def _name(self, row):
        key = int(self._key[row])
        return join_name(self._names[key >> 2 * _BITS], (key >> _BITS & _ALL_ONES) - 1, (key & _ALL_ONES) - 1)

    def _row(self, pattern, first, second):
        "The index row of a split name, or -1."
        number = self._patterns.get(pattern)
        if number is None or not (-1 <= first < _ALL_ONES and -1 <= second < _ALL_ONES):
            return -1
        key = _key(number, int(first), int(second))
        row = int(self._key.searchsorted(key))
        return row if row < len(self) and self._key[row] == key else -1

    def _rows(self, keys):
        "The index row of each key in an array, or -1."
        row = self._key.searchsorted(keys)
        return np.where(self._key.searchsorted(keys, "right") > row, row, -1)

    def _nbytes(self):
        "Bytes of the tensor of each index row, int64."
        return np.array([nbytes for *_, nbytes in self._kinds], np.int64)[self._kind]

    def _extent(self, row, split):
        if row < 0:
            raise CheckpointError(f"{self.path}: no tensor {join_name(*split)} among the {len(self):,} of its {len(self.files)} files")
        dtype, shape, nbytes = self._kinds[self._kind[row]]
        return Extent(self.files[self._shard[row]], int(self._offset[row]), nbytes, dtype, shape)

    def __len__(self):
        return len(self._key)

    def __contains__(self, name):
        return self._row(*split_name(name)) >= 0

    def names(self):
        "Every name, in the order of the files and of the data within each."
        return map(self._name, np.lexsort((self._offset, self._shard)))

    def extent(self, name):
        "Extent of a tensor; CheckpointError if there is none of that name."
        split = split_name(name)
        return self._extent(self._row(*split), split)

    def expert(self, layer, expert):
        "{w1, w1_scale, w2, w2_scale, w3, w3_scale: Extent} of one routed expert."
        return {short: self._extent(self._row(pattern, layer, expert), (pattern, layer, expert))
                for short, pattern in EXPERT_TENSORS.items()}

    def kinds_of(self, pattern, layers, experts):
        "{(dtype, shape)} of the tensors with `pattern` and any pair of numbers from two lists, as split_name gives them; None if one is absent."
        keys = _key(self._patterns.get(pattern, -1), np.array(layers, np.int64)[:, None], np.array(experts, np.int64))
        rows = self._rows(keys.ravel())
        return {None if kind < 0 else self._kinds[kind][:2] for kind in np.unique(np.append(self._kind, -1)[rows])}

    def count_of(self, prefix):
        "How many tensors have a name that begins with `prefix`, in which there is no number."
        begins = np.array([pattern.startswith(prefix) for pattern in self._names], bool)
        return int(begins[self._key >> 2 * _BITS].sum())

    def read_into(self, name, out, start=0):
        "Fill `out`, uint8, with a tensor's bytes from byte `start` on: a row of the embedding without the table."
        split = split_name(name)
        row = self._row(*split)
        extent = self._extent(row, split)
        if not 0 <= start <= start + len(out) <= extent.nbytes:
            raise CheckpointError(f"{extent.file}: tensor {name}: bytes {start:,} to {start + len(out):,} asked, it has {extent.nbytes:,}")
        read_exactly(self._files[self._shard[row]], out, extent.offset + start, f"{extent.file}: tensor {name}")

    def raw(self, name):
        "A tensor's bits as stored: uint16 for BF16, uint8 for F8, else numpy's own type of that name."
        extent = self.extent(name)
        out = np.empty(extent.shape, ARRAY_DTYPES[extent.dtype])
        self.read_into(name, out.reshape(-1).view(np.uint8))
        return out

    def tensor(self, name):
        "A tensor's values: BF16 as float32, exactly; other types as they are. CheckpointError for F8."
        extent, bits = self.extent(name), self.raw(name)
        if extent.dtype.startswith("F8"):
            raise CheckpointError(f"{extent.file}: tensor {name}: {extent.dtype} has no numpy type, expected BF16, F32 or U8")
        if extent.dtype != "BF16":
            return bits
        wide = bits.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)

    def census(self, experts_per_token=None):
        "Census: where the bytes and parameters are; active parameters only if told how many experts a token uses."
        return count(self, experts_per_token)

    def contiguity(self):
        "Contiguity: which layers' trunks and which experts can be read in one piece."
        return contiguity(self)

    def close(self):
        for file in self._files:
            file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()


_TEXT = "language_model."
_PREFIXES = {
    _EXPERT: "experts", _LAYER: "trunk", _TEXT + "model.embed_tokens.": "embed", _TEXT + "lm_head.": "lm_head",
    _TEXT + "model.norm.": "globals", _TEXT + "model.output_attn_res_norm.": "globals",
    _TEXT + "model.output_attn_res_proj.": "globals", "mm_projector.": "mm_projector", "vision_tower.": "vision_tower", "": "other",
}
PARTS = tuple(dict.fromkeys(_PREFIXES.values()))


def part_of(pattern):
    "The part of the model a split name's pattern belongs to: one of PARTS."
    return next(part for prefix, part in _PREFIXES.items() if pattern.startswith(prefix))


def _params_per_element(pattern):
    "2 for a byte of packed MXFP4, 0 for its scales, 1 for everything else."
    return {"packed": 2, "scale": 0}.get(pattern.rpartition("_")[2], 1) if part_of(pattern) == "experts" else 1


def _columns(checkpoint):
    "Of every index row: (number of its part in PARTS, bytes, parameters), int8 and int64 arrays."
    number, kinds = checkpoint._key >> 2 * _BITS, checkpoint._kinds
    part = np.array([PARTS.index(part_of(pattern)) for pattern in checkpoint._names], np.int8)[number]
    nbytes = checkpoint._nbytes()
    elements = np.array([size // ITEMSIZE[dtype] for dtype, _, size in kinds], np.int64)[checkpoint._kind]
    elements *= np.array([_params_per_element(pattern) for pattern in checkpoint._names], np.int64)[number]
    return part, nbytes, elements


class Groups(NamedTuple):
    "Index rows of equal label, arrays with one element a group; `whole` says whether it is one contiguous run."
    label: np.ndarray
    shard: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    tensors: np.ndarray
    whole: np.ndarray


def _groups(checkpoint, rows, label, nbytes):
    "Groups of the index rows chosen by the boolean array `rows`; `label` int64 >= 0 and `nbytes` are arrays over all rows."
    rows = np.flatnonzero(rows)
    rows = rows[np.lexsort((checkpoint._offset[rows], checkpoint._shard[rows], label[rows]))]
    label, shard, offset, nbytes = label[rows], checkpoint._shard[rows], checkpoint._offset[rows], nbytes[rows]
    first = np.flatnonzero(np.diff(label, prepend=-1))
    last = np.append(first[1:], len(rows))[:len(first)] - 1
    total, end = np.add.reduceat(nbytes, first), np.maximum.reduceat(offset + nbytes, first)
    whole = (shard[first] == shard[last]) & (end - offset[first] == total)
    return Groups(label[first], shard[first], offset[first], total, last - first + 1, whole)


def _trunk_groups(checkpoint, part, nbytes):
    "A group a layer; label - 1 is the layer."
    return _groups(checkpoint, part == PARTS.index("trunk"), checkpoint._key >> _BITS & _ALL_ONES, nbytes)


def _expert_groups(checkpoint, part, nbytes):
    "A group an expert; the label is its part of the key."
    return _groups(checkpoint, part == PARTS.index("experts"), checkpoint._key & (1 << 2 * _BITS) - 1, nbytes)


def _short(n):
    "2,779,484,478,208 as 2.78T."
    for unit, size in ("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3):
        if n >= size:
            return f"{n / size:.{2 if n < 10 * size else 1 if n < 100 * size else 0}f}{unit}"
    return str(n)


@dataclass(frozen=True)
class Census:
    """What a checkpoint holds, counted from its headers; sizes in bytes.

    `expert_bytes` is the largest expert's size. Parameters are those of the text stack: `always_active` without the
    routed experts; `active_per_token` with `experts_per_token` of them in each layer that has any, without the
    embedding table, and None if that number is not known.
    """
    shards: int
    tensors: int
    payload_bytes: int
    file_bytes: int
    expert_layers: int
    experts: int
    expert_bytes: int
    experts_bytes: int
    layers: int
    trunk_tensors: int
    trunk_bytes: int
    largest_layer: int
    largest_layer_bytes: int
    embed_lm_head_bytes: int
    globals_bytes: int
    mm_projector_tensors: int
    mm_projector_bytes: int
    vision_tower_tensors: int
    vision_tower_bytes: int
    other_tensors: int
    other_bytes: int
    parameters: int
    always_active: int
    active_per_token: int | None

    def as_dict(self):
        "For JSON."
        return asdict(self)

    def table(self):
        "The census as text, a line a row."
        c, largest = self, self.largest_layer_bytes
        each = f"{c.experts // c.expert_layers if c.experts else 0} x {c.expert_layers} layers = {c.experts:,}"
        run = f"{largest / 1e6:,.0f} MB" if largest >= 1e7 else f"{largest:,} bytes"
        active = "" if c.active_per_token is None else f", {_short(c.active_per_token)} active per token"
        rows = {
            "shards / tensors": f"{c.shards} / {c.tensors:,}",
            "payload bytes": f"{c.payload_bytes:,}",
            "file bytes, headers included": f"{c.file_bytes:,}",
            "routed experts": f"{each}; {c.expert_bytes:,} bytes each; {c.experts_bytes:,} together",
            "trunk": f"{c.trunk_bytes:,} bytes; largest layer run {run} (layer {c.largest_layer})",
            "embed_tokens + lm_head": f"{c.embed_lm_head_bytes:,} bytes",
            "norm, output_attn_res_*": f"{c.globals_bytes:,} bytes",
            "mm_projector / vision_tower": f"{c.mm_projector_bytes:,} / {c.vision_tower_bytes:,} bytes "
                                           f"({c.mm_projector_tensors} / {c.vision_tower_tensors} tensors), not part of the text stack",
            "other tensors, not used": f"{c.other_tensors:,}; {c.other_bytes:,} bytes",
            "parameters": f"{_short(c.parameters)} total{active}; {c.always_active:,} always active",
        }
        return "\n".join(f"{what:29s} {value}" for what, value in rows.items() if what[:5] != "other" or c.other_tensors)


def count(checkpoint, experts_per_token=None):
    "The Census of a Checkpoint."
    part, nbytes, parameters = _columns(checkpoint)
    tensors = {name: int((part == i).sum()) for i, name in enumerate(PARTS)}
    size, params = ({name: int(column[part == i].sum()) for i, name in enumerate(PARTS)} for column in (nbytes, parameters))
    trunk, experts = _trunk_groups(checkpoint, part, nbytes), _expert_groups(checkpoint, part, nbytes)
    expert_layers, largest = len(np.unique(experts.label >> _BITS)), int(trunk.nbytes.argmax()) if len(trunk.label) else None
    always = sum(params[name] for name in ("trunk", "embed", "lm_head", "globals"))
    active = always - params["embed"]
    if experts_per_token is not None and len(experts.label):
        active += experts_per_token * expert_layers * (params["experts"] // len(experts.label))
    return Census(
        shards=len(checkpoint.files), tensors=len(checkpoint), payload_bytes=int(nbytes.sum()), file_bytes=sum(checkpoint.file_sizes),
        expert_layers=expert_layers, experts=len(experts.label), expert_bytes=int(experts.nbytes.max(initial=0)),
        experts_bytes=size["experts"], layers=len(trunk.label), trunk_tensors=tensors["trunk"], trunk_bytes=size["trunk"],
        largest_layer=-1 if largest is None else int(trunk.label[largest]) - 1,
        largest_layer_bytes=int(trunk.nbytes.max(initial=0)), embed_lm_head_bytes=size["embed"] + size["lm_head"],
        globals_bytes=size["globals"], mm_projector_tensors=tensors["mm_projector"], mm_projector_bytes=size["mm_projector"],
        vision_tower_tensors=tensors["vision_tower"], vision_tower_bytes=size["vision_tower"], other_tensors=tensors["other"],
        other_bytes=size["other"], parameters=always + params["experts"], always_active=always,
        active_per_token=None if experts_per_token is None else active)


class Run(NamedTuple):
    "A layer's trunk from its first byte on; `broken` says why it is not one contiguous run, '' if it is."
    file: str
    offset: int
    nbytes: int
    tensors: int
    broken: str


class Contiguity(NamedTuple):
    "Run of each layer by number, how many experts there are, and the (layer, expert) pairs that are not one run."
    layers: dict
    experts: int
    broken_experts: list

    @property
    def broken_layers(self):
        return {layer: run.broken for layer, run in self.layers.items() if run.broken}

    def text(self):
        "A line for what is whole, then one for each layer and up to ten experts that are not."
        broken = self.broken_layers
        lines = [f"trunk in one run: {len(self.layers) - len(broken):,} of {len(self.layers):,} layers; "
                 f"experts in one run: {self.experts - len(self.broken_experts):,} of {self.experts:,}"]
        lines += [f"layer {layer}: {why}" for layer, why in broken.items()]
        return "\n".join(lines + [f"layer {layer} expert {expert} is not one run" for layer, expert in self.broken_experts[:10]])


def contiguity(checkpoint):
    "The Contiguity of a Checkpoint."
    part, nbytes, _ = _columns(checkpoint)
    trunk, experts = _trunk_groups(checkpoint, part, nbytes), _expert_groups(checkpoint, part, nbytes)
    layers = {}
    for i, label in enumerate(trunk.label):
        file, offset = checkpoint.files[trunk.shard[i]], int(trunk.offset[i])
        broken = "" if trunk.whole[i] else _breaker(checkpoint, part, label, trunk.shard[i], offset)
        layers[int(label) - 1] = Run(file, offset, int(trunk.nbytes[i]), int(trunk.tensors[i]), broken)
    broken = [(int(label >> _BITS) - 1, int(label & _ALL_ONES) - 1) for label in experts.label[~experts.whole]]
    return Contiguity(layers, len(experts.label), broken)


def _breaker(checkpoint, part, label, shard, offset):
    "What interrupts the trunk group `label` that begins at `offset` of `shard`."
    mine = (part == PARTS.index("trunk")) & (checkpoint._key >> _BITS & _ALL_ONES == label)
    elsewhere = np.flatnonzero(mine & (checkpoint._shard != shard))
    if len(elsewhere):
        return f"{checkpoint._name(elsewhere[0])} lies in {checkpoint.files[checkpoint._shard[elsewhere[0]]]}"
    foreign = np.flatnonzero(~mine & (checkpoint._shard == shard) & (checkpoint._offset > offset))
    first = foreign[np.argmin(checkpoint._offset[foreign])]
    return f"{checkpoint._name(first)} lies inside its run in {checkpoint.files[shard]}"


__all__ = ['CheckpointError', 'HEADER_MAX', 'PLAIN_MAX', 'RANK_MAX', 'ARRAY_DTYPES', 'ITEMSIZE', 'header_bytes', 'DEPTH_MAX', 'json_object', 'parse_header', 'READ_MAX', 'read_exactly', 'writing', 'sync_folder', 'whole_file', 'identity', 'open_shard', 'small_file', 'read_header', 'PATTERNS_MAX', 'split_name', 'join_name', 'quick_header', 'shard_names', 'INDEX', 'index_pieces', 'check_index', 'Extent', 'EXPERT_TENSORS', 'Checkpoint', 'PARTS', 'part_of', 'Groups', 'Census', 'count', 'Run', 'Contiguity', 'contiguity']
