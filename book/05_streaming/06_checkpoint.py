# %% [markdown]
# # 5.6 Where every weight lies
#
# Kimi K3 is 1.56 TB in 96 files: too much to load in order to see what is in it. This chapter finds out where each of its 497,220 tensors
# begins and ends. At the end you can answer that from 76 MB of headers with an index of 12 MB, refuse a file whose header does not add up,
# and say what one token has to read.
#
# [5.5 One safetensors header](05_header.ipynb) · [contents](../README.md) · [5.8 Ninety-three layers, walked once a token](08_model.ipynb)

# %%
import os
import struct
import tempfile
import time
import tracemalloc
from pathlib import Path

import matplotlib.pyplot as plt
import safetensors

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% tags=["parameters"]
layers = 93  # of the sparse copy of the released shape, section 5.6.3
experts = 896

# %% [markdown]
# | symbol | meaning | in code |
# |---|---|---|
# | $n$ | length of the header's JSON text, the file's first 8 bytes, little-endian | `n` |
# | $[b, e)$ | a tensor's bytes, counted from the **end of the header** | `begin`, `end` |
# | $o = 8 + n + b$ | the same place counted from the start of the file | `Extent.offset` |
# | $L$, $E$ | layer and expert, the numbers inside a name | `layer`, `expert` |
# | payload | $\sum (e - b)$; file bytes are payload $+ \sum (8 + n)$ | `payload_bytes`, `file_bytes` |

# %% [markdown]
# ## 5.6.1 Names into numbers, entries into columns
#
# 494,592 of the 497,220 names differ only in two numbers, a layer and an expert. With the numbers taken out, 59 patterns are left
# (counted in 5.6.3), and a name is three small integers, which fit one 63-bit key.
#
# $$\text{key} = (\text{pattern} \cdot 2^{20} + (L+1)) \cdot 2^{20} + (E+1)$$

# %% tags=["export"]
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

# %% tags=["export"]
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


# %%
for name in "language_model.model.layers.92.block_sparse_moe.experts.895.w1.weight_packed", "lm_head.weight", "a.007.b", "a.#.5":
    assert join_name(*split_name(name)) == name
    print(*split_name(name))

# %% [markdown]
# One name at a time, that is a regular expression, two `int` and a tuple for each of 497,220. All but 2,628 begin alike, though, up to the
# expert's number: one regular expression splits all names of a file, numpy makes their keys, and only the others are split singly.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.6.2 The index
#
# Shards say in their names how many they are, so a missing one is known before any is opened.

# %% tags=["export"]
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


# %% [markdown]
# A checkpoint in pieces brings a list of its own, `model.safetensors.index.json`: for each tensor, the file that holds it. The headers know
# better, but where the two disagree, a file was exchanged or a tensor renamed, and neither is to be believed. Parsed whole, the list of the release
# would weigh more than everything here (5.6.4). So it is read a quarter of a megabyte at a time and cut behind a file's name. There one piece is closed with
# `}}`, the next opened with `{"weight_map":{`, and each is a JSON object to be read as strictly as a header.

# %% tags=["export"]
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


# %% [markdown]
# Our own index, in memory, has nothing to do with that list. Per tensor it keeps the key, the offset, the shard, and one number for type and
# shape together, of which the release has 39 kinds. Four numpy columns, sorted by key: 24 bytes a tensor, found by bisection. Equal neighbours
# after sorting are a name held twice.

# %% tags=["export"]
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


# %% [markdown]
# Against the `safetensors` library, an independent reader in Rust: same names, types, shapes and bytes in all 16 files of the embedded
# model, and the sum of the bytes is what the model's own `metadata.total_size` says.

# %%
MODEL = ROOT / "fixtures" / "oracle13" / "model"
oracle = Checkpoint(MODEL)
compared = 0
for file in oracle.files:
    for name, theirs in safetensors.deserialize(Path(file).read_bytes()):
        ours = oracle.raw(name)
        assert oracle.extent(name).dtype == theirs["dtype"] and list(ours.shape) == theirs["shape"] and ours.tobytes() == theirs["data"], name
        compared += ours.nbytes
total = json.loads((MODEL / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
assert compared == total and len(oracle) == len(set(oracle.names()))
print(f"{len(oracle):,} tensors, {compared:,} bytes equal")


# %% [markdown]
# The list that lies beside, wrong in one way at a time. Each line names the tensor, where it was found, and where it was expected.

# %%
def listed(change):
    "The embedded model with its index changed by change(index), as links to its files; the refusal, without the folder."
    with tempfile.TemporaryDirectory() as other:
        index = json.loads((MODEL / INDEX).read_text())
        change(index)
        Path(other, INDEX).write_text(json.dumps(index))
        for file in oracle.files:
            Path(other, os.path.basename(file)).symlink_to(Path(file).resolve())
        try:
            Checkpoint(other).close()
        except CheckpointError as error:
            return str(error).replace(other + os.sep, "")


head = "language_model.lm_head.weight"
for change in (
    lambda index: index["weight_map"].update({head: "model-00001-of-000016.safetensors"}),
    lambda index: index["weight_map"].update({"lm_head.bias": "model-00014-of-000016.safetensors"}),
    lambda index: index["weight_map"].pop(head),
    lambda index: index["metadata"].update(total_size=6_612_161),
):
    print(listed(change))
    assert listed(change)
assert listed(lambda index: None) is None

# %% [markdown]
# The two silent mistakes of 5.5.1 must fail this gate, or the gate is worth nothing.

# %%
name = "language_model.model.layers.3.self_attn.q_b_proj.weight"
place, right = oracle.extent(name), oracle.tensor(name)
file = Path(place.file).read_bytes()
header = 8 + int.from_bytes(file[:8], "little")
shifted = np.frombuffer(file, "<u2", place.nbytes // 2, place.offset - header)
as_half = oracle.raw(name).view(np.float16).astype(np.float32)
print("offsets from the file's start: equal bits", bool((shifted == oracle.raw(name).ravel()).all()))
print(f"BF16 read as float16: largest {np.abs(as_half).max():.3g}, expected {np.abs(right).max():.3g}")
assert not (shifted == oracle.raw(name).ravel()).all() and np.abs(as_half - right).max() > 0.1 * np.abs(right).max()

# %% [markdown]
# ## 5.6.3 The census of the release
#
# Where do 1.56 TB lie, and how much of it does a token read? Every tensor belongs to one part, told by its name. The trunk is what every
# token passes through: all of the layers except the routed experts, shared experts included.

# %% [markdown]
# The release itself is not needed to count it: its shapes are public, and a header is made of shapes. The next cells write all 96 shards
# as sparse files, true headers in front of holes, and the list of them. On disk they take 76 MB of headers and 60 MB of list.

# %%
H, V, P = 7168, 163_840, 96 * 128
KDA = dict(q_proj=[P, H], k_proj=[P, H], v_proj=[P, H], g_proj=[P, H], o_proj=[H, P], b_proj=[96, H], f_a_proj=[128, H], f_b_proj=[P, 128])
KDA_F32 = {"A_log": [128], "dt_bias": [P], "o_norm.weight": [128], **{f"{c}_conv1d.weight": [P, 1, 4] for c in "qkv"}}
MLA = dict(q_a_proj=[1536, H], q_a_layernorm=[1536], q_b_proj=[96 * 192, 1536], kv_a_proj_with_mqa=[576, H], kv_a_layernorm=[512],
           kv_b_proj=[96 * 256, 512], g_proj=[P, H], o_proj=[H, P])
MLP = dict(gate_proj=[33_792, H], up_proj=[33_792, H], down_proj=[H, 33_792])
MOE = {"gate": [896, H], "routed_expert_down_proj": [3584, H], "routed_expert_up_proj": [H, 3584], "routed_expert_norm": [3584],
       "shared_experts.gate_proj": [6144, H], "shared_experts.up_proj": [6144, H], "shared_experts.down_proj": [H, 6144]}
VISION = {"wqkv": [4608, 1024], "wo": [1024, 1536], "mlp.fc0": [4096, 1024], "mlp.fc1": [1024, 4096], "norm0": [1024], "norm1": [1024]}


def bf16(prefix, shapes):
    return [(f"{prefix}{name}.weight", "BF16", shape) for name, shape in shapes.items()]


# %%
def layer_tensors(L, experts):
    "Names, dtypes and shapes of layer L of the release, with that many experts."
    p = f"language_model.model.layers.{L}."
    norms = {n: [H] for n in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")}
    out = bf16(p, norms | {"self_attention_res_proj": [1, H], "mlp_res_proj": [1, H]})
    full = (L + 1) % 4 == 0 or L == 92
    out += bf16(p + "self_attn.", MLA if full else KDA) + ([] if full else [(f"{p}self_attn.{n}", "F32", s) for n, s in KDA_F32.items()])
    if L == 0:
        return out + bf16(p + "mlp.", MLP)
    m = p + "block_sparse_moe."
    out += bf16(m, MOE) + [(m + "gate.e_score_correction_bias", "F32", [896])]
    return out + [(f"{m}experts.{e}.{w}.weight_{kind}", "U8", [n, k // per]) for e in range(experts)
                  for w, n, k in (("w1", 3072, 3584), ("w2", 3584, 3072), ("w3", 3072, 3584)) for kind, per in (("packed", 2), ("scale", 32))]


def other_shards():
    "The three shards behind the layers."
    yield bf16("language_model.", {"model.embed_tokens": [V, H], "lm_head": [V, H], "model.norm": [H], "model.output_attn_res_norm": [H],
                                   "model.output_attn_res_proj": [1, H]})
    yield bf16("mm_projector.", {"post_norm": [7168], "proj.0": [4096, 4096], "proj.2": [7168, 4096]})
    patches = {"patch_embed.pos_emb": [64, 64, 1024], "patch_embed.proj": [1024, 3, 14, 14]}
    yield bf16("vision_tower.", {"encoder.final_layernorm": [1024]} | patches
               | {f"encoder.blocks.{b}.{name}": shape for b in range(27) for name, shape in VISION.items()})


# %% [markdown]
# The order inside a shard is not published in words, but the file sizes are, to the byte, and offsets are written in decimal: another
# order gives other sizes. Float32 first, then BF16, then bytes, by name within each, with no metadata, gives the published size of each
# kind of shard and the published sum.

# %%
def write_sparse(path, tensors):
    tensors = sorted(tensors, key=lambda t: (-ITEMSIZE[t[1]], t[0]))
    head = header_bytes(tensors)
    payload = sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors)
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + payload)
    return payload


scratch = tempfile.TemporaryDirectory()
folder, payload, places = Path(scratch.name), 0, {}
for i, tensors in enumerate([*(layer_tensors(L, experts) for L in range(layers)), *other_shards()], 1):
    file = f"model-{i:05d}-of-{layers + 3:06d}.safetensors"
    payload += write_sparse(folder / file, tensors)
    places |= {name: file for name, _, _ in tensors}
(folder / INDEX).write_text(json.dumps({"metadata": {"total_size": payload}, "weight_map": places}, indent=2, sort_keys=True))
del places

PUBLISHED = {1: 2_341_216_112, 2: 16_990_911_504, 4: 16_567_501_776, 93: 16_567_507_176, 94: 4_697_664_072, 95: 92_289_328, 96: 802_448_352}
if (layers, experts) == (93, 896):
    assert all((folder / f"model-{i:05d}-of-000096.safetensors").stat().st_size == size for i, size in PUBLISHED.items())

# %% tags=["nbval-ignore-output"]
start = time.perf_counter()
k3 = Checkpoint(folder)
spent = time.perf_counter() - start
start = time.perf_counter()
check_index(k3)
print(f"{len(k3):,} tensors indexed in {spent:.1f} s, {time.perf_counter() - start:.1f} s of it for the list of {(folder / INDEX).stat().st_size / 1e6:.0f} MB; "
      f"{sum(f.stat().st_blocks * 512 for f in folder.iterdir()) / 1e6:.0f} MB on disk")

# %%
census = k3.census(experts_per_token=16)
if (layers, experts) == (93, 896):
    assert (census.tensors, census.payload_bytes, census.file_bytes) == (497_220, 1_560_860_324_864, 1_560_936_091_448)
    assert census.always_active == 56_743_648_000 and census.trunk_bytes == 108_811_877_376
print(census.table())
print(f"\n{6 * census.experts:,} tensors of experts; {len(k3._names)} patterns of names, {len(k3._kinds)} kinds of dtype and shape")

# %% [markdown]
# Every figure of the release's own listing, from shapes alone. Now the picture that decides how this book is built: the experts fill the
# disk, but a token reads sixteen of 896 per layer, and all of the trunk, and one head.

# %%
token = {"routed experts": 16 * census.expert_layers * census.expert_bytes, "trunk": census.trunk_bytes,
         "lm_head": census.embed_lm_head_bytes // 2}
disk = {"routed experts": census.experts_bytes, "trunk": census.trunk_bytes, "embed, lm_head": census.embed_lm_head_bytes,
        "vision, projector": census.vision_tower_bytes + census.mm_projector_bytes}
for where, parts in ("on disk", disk), ("one token reads", token):
    print(f"{where:16s}", "; ".join(f"{name} {size / 1e9:,.2f} GB = {size / sum(parts.values()):.1%}" for name, size in parts.items()))

# %%
colour = dict(zip([*disk, "lm_head"], ["C1", "C0", "C2", "C5", "C2"]))
fig, axes = plt.subplots(2, 1, sharex=True, figsize=(6.5, 2.8))
for ax, title, parts in (axes[0], "On disk", disk), (axes[1], "Read for one token", token):
    left = 0
    for name, size in parts.items():
        width = 100 * size / sum(parts.values())
        ax.barh(0, width, left=left, color=colour[name])
        if width > 4:
            ax.text(left + width / 2, 0, f"{name}\n{size / 1e9:,.0f} GB", ha="center", va="center", color="white", fontsize=8)
        left += width
    green = "lm_head" if parts is token else "embed, lm_head"
    ax.set(yticks=[], xlim=(0, 100), title=f"{title}: {sum(parts.values()) / 1e9:,.0f} GB (green: {green})")
axes[1].set_xlabel("share of the bytes (%)")
fig.suptitle("The experts fill the disk, the trunk fills a token", x=0.01, ha="left", fontsize=10, fontweight="bold")
plt.show()


# %% [markdown]
# ## 5.6.4 What the index costs
#
# The obvious index is the parsed JSON. One layer's shard is enough to weigh it. Beside it, a dictionary of small tuples,
# what `index.json` costs (a name and a file for each tensor), and the four columns.

# %% tags=["nbval-ignore-output"]
def weigh(build):
    "Bytes that what build() makes keeps, as Python's allocators count them."
    tracemalloc.start()
    made = build()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return kept


with open_shard(k3.files[1]) as file:
    start, size, header = read_header(file, "shard 2")
rows = parse_header(header, size - start, "shard 2")
names = json.dumps({row[0]: os.path.basename(k3.files[1]) for row in rows})
for way, build in {
    "the parsed header": lambda: json.loads(header),
    "name -> (dtype, shape, begin, end)": lambda: {row[0]: row[1:] for row in parse_header(header, size - start, "shard 2")},
    "index.json, name -> file": lambda: json.loads(names),
}.items():
    each = weigh(build) / len(rows)
    print(f"{way:36s}{each:5.0f} bytes a tensor {each * 497_220 / 1e6:5.0f} MB for 497,220")
kept = sum(column.nbytes for column in (k3._key, k3._offset, k3._kind, k3._shard))
print(f"{'four sorted columns':36s}{kept / len(k3):5.0f} bytes a tensor {kept / len(k3) * 497_220 / 1e6:5.0f} MB")


# %% [markdown]
# And the time, for the same shard: entry by entry and name by name, as first written down, against columns. The plain forms stay: they say what
# is right, and in words what is wrong.

# %% tags=["nbval-ignore-output"]
def microseconds(make):
    "Shortest of five runs of make(), in microseconds a tensor of the shard."
    spent = []
    for _ in range(5):
        began = time.perf_counter()
        make()
        spent.append(time.perf_counter() - began)
    return 1e6 * min(spent) / len(rows)


numbers = {pattern: i for i, pattern in enumerate(dict.fromkeys(split_name(row[0])[0] for row in rows))}
names, kind, begin, end, kind_of = quick_header(header, size - start)
assert [(name, *kind_of[k], b, e) for name, k, b, e in zip(names, kind, begin, end)] == rows
assert _keys(names, numbers.get).tolist() == [_key(numbers[pattern], *LE) for pattern, *LE in map(split_name, names)]
for what, plain, quick in (
    ("entries", lambda: parse_header(header, size - start, "shard 2"), lambda: quick_header(header, size - start)),
    ("keys of names", lambda: [_key(numbers[pattern], *LE) for pattern, *LE in map(split_name, names)], lambda: _keys(names, numbers.get)),
):
    print(f"{what:14s} one by one {microseconds(plain):.1f} us a tensor, by columns {microseconds(quick):.1f} us")

# %% [markdown]
# A dictionary would answer faster. But a token asks for its 1,472 experts while it reads 137 GB, so splitting a name and bisecting may
# take its microseconds.

# %% tags=["nbval-ignore-output"]
chosen = [(L, E) for L in range(1, layers) for E in range(0, experts, max(1, experts // 16))]
start = time.perf_counter()
for L, E in chosen:
    k3.expert(L, E)
spent = time.perf_counter() - start
print(f"{len(chosen):,} experts: {1e3 * spent:.0f} ms a token, {1e6 * spent / len(chosen) / 6:.1f} us an extent")

# %% [markdown]
# ## 5.6.5 Summary
#
# - A safetensors header gives every tensor's place; 76 MB of headers stand for 1.56 TB, and 24 bytes a tensor are enough to remember them.
# - Bytes without structure need a header without doubt: types, sizes, no gap, no overlap, no byte too many, or one line that says what.
# - Half a million entries are checked as columns. What is plainly right passes; the rest goes to the reader that has words for it.
# - A second account, the list of files, must agree with the first, or neither is believed.
# - 93% of the disk are experts, 79% of a token's reads are trunk. RAM goes to the trunk first.
#
# **Exercises.**
# 1. Write `rows(checkpoint, name, first, count)` on `read_into`, so that a token's embedding row costs 14,336 bytes, not 2.35 GB. Check it
#    against `raw(name)[first:first + count]`.
# 2. Swap the `data_offsets` of two tensors of equal shape in a copy of a shard. Why does no check of this chapter object, and what would?
# 3. Put a tensor of shape `[0]` in front, in the middle and at the end of a file. Which of the checks of 5.5.2 must let it pass?
#
# Next: an expert's bytes are still four-bit codes and scales. [1.2 MXFP4](02_mxfp4.ipynb) makes numbers of them.

# %% tags=["export"]
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


# %% [markdown]
# Rows that belong together, a layer's trunk or an expert's six, are summed after one sort. A believed file has no gaps, so a group is one
# run exactly if it stays in one shard and its last end minus its first begin is the sum of its sizes.

# %% tags=["export"]
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


# %% [markdown]
# Parameters: a packed byte is two, a scale none. *Always active* is the whole text stack but the routed experts. *Active per token* adds
# the chosen experts and leaves out the embedding, of which a token looks up one row and multiplies nothing.

# %% tags=["export"]
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


# %% [markdown]
# The embedded model first: its config says four experts of sixteen for each token.

# %%
config = json.loads((MODEL / "config.json").read_text())["text_config"]
print(oracle.census(config["num_experts_per_token"]).table())


# %% [markdown]
# ## 5.6.6 In one piece, or not
#
# Nothing in the format says that a layer's tensors are neighbours. In the order that gives the published sizes they are, and whoever copies
# the trunk to a faster disk wants to be sure. So the report says which layer breaks it, and what lies in between.

# %% tags=["export"]
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


# %%
print(k3.contiguity().text())
print(oracle.contiguity().text())

# %% [markdown]
# Broken on purpose: layer 1 of the embedded model rewritten with its smallest tensors first, which puts scales of experts between norms and
# projections. Every tensor reads back equal, so this is legal, and only the report can tell.

# %%
with tempfile.TemporaryDirectory() as other:
    mine = sorted((name for name in oracle.names() if ".layers.1." in name), key=lambda name: oracle.extent(name).nbytes)
    head = header_bytes((name, *oracle.extent(name)[3:]) for name in mine)
    path = Path(other, "model.safetensors")
    path.write_bytes(head + b"".join(oracle.raw(name).tobytes() for name in mine))
    with Checkpoint(other) as by_size:
        assert all((by_size.raw(name) == oracle.raw(name)).all() for name in mine)
        print("\n".join(by_size.contiguity().text().replace(other + os.sep, "").splitlines()[:3]))

# %% [markdown]
# The map of the shard as it was. Neighbours differ in shade; a gap would be white, an overlap would darken, a tensor of the other kind
# inside a run would show as a stripe.

# %%
fig, ax = plt.subplots(figsize=(6.5, 2.2))
places = {"C0": [], "C1": []}
for name in oracle.names():
    if ".layers.1." in name:
        offset, nbytes = oracle.extent(name)[1:3]
        routed = ".experts." in name
        neighbour = split_name(name)[2] if routed else len(places["C0"])
        places["C1" if routed else "C0"].append((offset / 1e3, nbytes / 1e3))
        ax.broken_barh(places["C1" if routed else "C0"][-1:], (0, 1), facecolor="C1" if routed else "C0", alpha=(0.95, 0.6)[neighbour % 2])
ax.axvspan(0, places["C0"][0][0], ymax=1 / 1.2, color="C5")
ax.text(0, 1.05, "header")
for color, what in ("C0", "trunk, one tensor a shade"), ("C1", "experts, six tensors a shade"):
    x = (places[color][0][0] + sum(places[color][-1])) / 2
    ax.text(x, 1.05, f"{len(places[color])} tensors", ha="center", color=color)
    ax.text(x, 0.5, what.replace(", ", ",\n"), ha="center", va="center", color="white")
ax.set(yticks=[], ylim=(0, 1.2), xlim=(0, None), xlabel="place in the file (kB)",
       title="Layer 1 of the embedded model: one run of trunk, one of experts")
plt.show()

# %%
scratch.cleanup()
