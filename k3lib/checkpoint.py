"""5.6 Where every weight lies

Made from book/05_streaming/06_checkpoint.py: edit that, then run `make export`.
"""

import os
import re
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple
import numpy as np
from k3lib.fileio import CheckpointError, fingerprint, open_shard, read_exactly, shown_value
from k3lib.header import (
    ARRAY_DTYPES,
    ITEMSIZE,
    braced_object,
    parse_header,
    quick_header,
    read_header,
    tensor_fault,
)


PATTERNS_MAX = 1 << 20  # a key has room for 2^23


NUMBER_BITS = 20  # for a number below a million, plus one


NUMBER_MASK = (1 << NUMBER_BITS) - 1


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
    return (number << NUMBER_BITS | first + 1) << NUMBER_BITS | second + 1


LAYER_PATTERN = "language_model.model.layers.#."


EXPERT_PATTERN = LAYER_PATTERN + "block_sparse_moe.experts.#."


_LINES = re.compile(f"(?:{re.escape(EXPERT_PATTERN)})?(.*)\n".replace(r"\#", "(0|[1-9][0-9]{0,5})"))


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
    pattern = {end: 0 if end is None else number(EXPERT_PATTERN + end) for end in dict.fromkeys(rest)}
    columns = (pattern, rest), (value, layer), (value, expert)
    keys = _key(*(np.fromiter(map(table.get, column), np.int64) for table, column in columns))
    for i in singly:
        name, *numbers = split_name(names[i])
        keys[i] = _key(number(name), *numbers)
    return keys


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
            piece = braced_object(front + part + (b"" if last else cut[:-1] + b"}}"), where)
            if type(piece.get("weight_map")) is not dict or not last and [*piece][-1] != "weight_map":
                raise CheckpointError(f"{where} has {shown_value([*piece])}, expected an object weight_map of all tensors and their files")
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
            raise tensor_fault(path, names[i], f"found in {found}", shown_value(files[i]))
        if seen[rows].any():
            raise tensor_fault(path, names[np.argmax(seen[rows])], "listed twice", "once")
        seen[rows] = True
        metadata.append(piece.get("metadata", {}))
    if not seen[:-1].all():
        row = np.argmin(seen)
        raise tensor_fault(path, checkpoint._name(row), f"found in {checkpoint.files[shard[row]]}", "no file, because it is not listed")
    for each in metadata:
        total = each.get("total_size", payload) if type(each) is dict else each
        if type(total) not in (int, float) or total != payload:
            raise CheckpointError(f"{path}: metadata.total_size is {shown_value(total)}, expected {payload:,}, the bytes of all tensors")


class Extent(NamedTuple):
    "Where a tensor's bytes lie: `offset` counts from the start of `file`, a full path."
    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple


EXPERT_TENSORS = {w + short: f"{EXPERT_PATTERN}{w}.weight_{long}"
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
        self.identities[path] = fingerprint(os.fstat(self._files[shard].fileno()))
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
            raise CheckpointError(f"{other}: tensor {shown_value(self._name(twice[0]))} is also in {one}, expected once")

    def _name(self, row):
        key = int(self._key[row])
        return join_name(self._names[key >> 2 * NUMBER_BITS], (key >> NUMBER_BITS & NUMBER_MASK) - 1, (key & NUMBER_MASK) - 1)

    def _row(self, pattern, first, second):
        "The index row of a split name, or -1."
        number = self._patterns.get(pattern)
        if number is None or not (-1 <= first < NUMBER_MASK and -1 <= second < NUMBER_MASK):
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
        return int(begins[self._key >> 2 * NUMBER_BITS].sum())

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
    EXPERT_PATTERN: "experts", LAYER_PATTERN: "trunk", _TEXT + "model.embed_tokens.": "embed", _TEXT + "lm_head.": "lm_head",
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
    number, kinds = checkpoint._key >> 2 * NUMBER_BITS, checkpoint._kinds
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
    return _groups(checkpoint, part == PARTS.index("trunk"), checkpoint._key >> NUMBER_BITS & NUMBER_MASK, nbytes)


def _expert_groups(checkpoint, part, nbytes):
    "A group an expert; the label is its part of the key."
    return _groups(checkpoint, part == PARTS.index("experts"), checkpoint._key & (1 << 2 * NUMBER_BITS) - 1, nbytes)


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
    expert_layers, largest = len(np.unique(experts.label >> NUMBER_BITS)), int(trunk.nbytes.argmax()) if len(trunk.label) else None
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
    broken = [(int(label >> NUMBER_BITS) - 1, int(label & NUMBER_MASK) - 1) for label in experts.label[~experts.whole]]
    return Contiguity(layers, len(experts.label), broken)


def _breaker(checkpoint, part, label, shard, offset):
    "What interrupts the trunk group `label` that begins at `offset` of `shard`."
    mine = (part == PARTS.index("trunk")) & (checkpoint._key >> NUMBER_BITS & NUMBER_MASK == label)
    elsewhere = np.flatnonzero(mine & (checkpoint._shard != shard))
    if len(elsewhere):
        return f"{checkpoint._name(elsewhere[0])} lies in {checkpoint.files[checkpoint._shard[elsewhere[0]]]}"
    foreign = np.flatnonzero(~mine & (checkpoint._shard == shard) & (checkpoint._offset > offset))
    first = foreign[np.argmin(checkpoint._offset[foreign])]
    return f"{checkpoint._name(first)} lies inside its run in {checkpoint.files[shard]}"


__all__ = [
    "PATTERNS_MAX", "NUMBER_BITS", "NUMBER_MASK", "split_name", "join_name", "LAYER_PATTERN", "EXPERT_PATTERN",
    "shard_names", "INDEX", "index_pieces", "check_index", "Extent", "EXPERT_TENSORS", "Checkpoint", "PARTS",
    "part_of", "Groups", "Census", "count", "Run", "Contiguity", "contiguity",
]
