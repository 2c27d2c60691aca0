# %% [markdown]
# # 5.7 A checkpoint, opened
#
# A checkpoint is a folder with files of weights, and often a list that says which tensor is in which file. The parts of
# such a folder may not fit together: a file may be missing, or come from another download than the list. Then the model
# would compute with wrong weights. At the end of this chapter you can open a checkpoint from its headers alone, refuse
# it if a file is missing or if list and files disagree about a tensor that is computed with, and read any of its
# tensors.
#
# > **Without it:** a folder with a file of another download is loaded, and its weights are used.
# >
# > **With it:** every tensor of the list is looked up in the headers, and every byte of the embedded model is the one
# > that another reader finds: 6,612,160 bytes.<!--claim equal-->
#
# Needs chapters [5.3] to [5.6]. Runs in seconds. Makes `k3lib.checkpoint`.
#
# [5.6 Where 1.56 TB lie](06_census.ipynb) ·
# [contents](../README.md) ·
# [5.8 Ninety-three layers, one forward pass a token](08_model.ipynb)
#
# [5.3]: 03_config.ipynb
# [5.6]: 06_census.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "files")

# %% tags=["parameters"]
layers = 93  # of the sparse copy of the released shape, section 5.7.5
experts = 896

# %% tags=["export"]
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from k3lib.census import Census, Contiguity, census, contiguity
from k3lib.config import Config
from k3lib.fileio import (
    CheckpointError, Fingerprint, MissingFile, ResourceError, Unusual, UsageError, fingerprint, given_path, json_object,
    open_shard, read_exactly, read_fault, shown_value, wrong_argument,
)
from k3lib.header import ARRAY_DTYPES, NUMBER_MASK, Extent, TensorIndex, read_header, tensor_fault
from k3lib.system import allow_open_files, open_files_shortage
from k3lib.tensors import EXPERT_TENSORS, LAYER_PREFIX, join_name, split_name

# %%
import json
import tempfile
import time
from math import prod
from pathlib import Path

import safetensors

from k3lib.config import read_config
from k3lib.header import ITEMSIZE, header_bytes
from k3lib.system import disk_bytes
from k3lib.tensors import HEAD, layer_tensors, tensor_name

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
MODEL = ROOT / "fixtures" / "oracle13" / "model"

# %% [markdown]
# ## 5.7.1 Which files
#
# The name of a shard says how many shards there are. So a missing shard is noticed before any is opened. The names
# decide only if there is no list. If the files of two downloads are in the folder, the names do not say which of them
# are meant, and the folder is refused.

# %% tags=["export"]
_SHARD = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors", re.ASCII)


def files_in(folder: str | os.PathLike[str]) -> list[str]:
    "The names of a folder's files, in order. Raises FileNotFoundError if there is no folder, CheckpointError."
    if not os.path.isdir(folder):
        what = "a file" if os.path.exists(folder) else "no such folder"
        raise MissingFile(f"{folder}: {what}, expected a checkpoint's folder")
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise read_fault(f"{folder}: cannot be listed: {error.strerror}", error) from None


def shard_names(folder: str | os.PathLike[str], names: list[str]) -> list[str]:
    """Of the `names` in a folder those of weight files: model.safetensors, or every model-XXXXX-of-YYYYYY.safetensors.

    Raises CheckpointError if there is a file too few or too many.
    """
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if "model.safetensors" in names and not shards:
        return ["model.safetensors"]
    if not shards or "model.safetensors" in names:
        what = "both kinds of weight file" if shards else "no weight files"
        raise CheckpointError(f"{folder}: {what}, expected either "
                              "model.safetensors or model-00001-of-0000NN.safetensors and its siblings")
    digits, of = len(shards[0][1]), shards[0][2]
    found = [match[0] for match in shards]
    wanted = [f"model-{i:0{digits}d}-of-{of}.safetensors" for i in range(1, int(of) + 1)]
    if found != wanted:
        missing, stray = sorted({*wanted} - {*found}), sorted({*found} - {*wanted})
        faults = [f"{name} is missing" for name in missing[:1]]
        faults += [f"{name} does not belong to them" for name in stray[:1]]
        raise CheckpointError(f"{folder}: {len(found):,} weight files, expected {int(of):,}: {', '.join(faults)}")
    return found


# %% [markdown]
# ## 5.7.2 The list beside the files
#
# A checkpoint of several files has a list, `model.safetensors.index.json`. It names the file of each tensor. If there
# is a list, it decides which files are meant, whatever their names are, and whatever other files are in the folder.
#
# As one Python object, the list of the release would take more memory than everything else in this chapter ([5.5.7]).
# So it is read in blocks of a quarter of a megabyte. Each block is cut after the last name of a file. The part before
# the cut is closed with `}}`, and the part after it is opened with `{"weight_map":{`. So each part is a complete JSON
# object, and is read as strictly as a header. A list may also have other entries. A cut inside such an entry does not
# give a JSON object. Then the next block is read, too, and the cut is tried again.
#
# [5.5.7]: 05_header.ipynb#5.5.7-What-the-index-costs

# %% tags=["export"]
INDEX = "model.safetensors.index.json"
INDEX_MAX = 200_000_000  # bytes of it; that of the release has 60 MB
INDEX_BLOCK = 1 << 18  # bytes of it that are read and parsed at a time
_UNCUT = 8  # blocks that are read while every cut fails
_CUT = re.compile(rb'\.safetensors"[ \t\r\n]*,')


def _piece(text: bytes, where: str, last: bool) -> dict:
    "The JSON object in a part of a list, which ends in its weight_map unless it is the last one."
    piece = json_object(text, where, ignored="metadata")
    if type(piece.get("weight_map")) is not dict or not last and [*piece][-1] != "weight_map":
        raise CheckpointError(f"{where} has {shown_value([*piece])}, "
                              "expected an object weight_map of all tensors and their files")
    return piece


# %% tags=["export"]
def index_pieces(path: str) -> Iterator[dict]:
    """The JSON object in the file `path` as several objects, each with a part of its "weight_map".

    Raises CheckpointError if the file has more than INDEX_MAX bytes, cannot be read, or holds no such object.
    """
    with open_shard(path) as file:
        size, text, front = os.fstat(file.fileno()).st_size, b"", b""
        if size > INDEX_MAX:
            raise CheckpointError(f"{path}: {size:,} bytes, expected at most {INDEX_MAX:,}")
        for begin in range(0, size or 1, INDEX_BLOCK):
            block = bytearray(min(INDEX_BLOCK, size - begin))
            read_exactly(file, block, begin, path)
            text, end = text + block, begin + len(block)
            where = f"{path}: its text up to byte {end:,}"
            if end >= size:
                yield _piece(front + text, where, True)
                return
            try:
                *_, cut = _CUT.finditer(text)
                piece = _piece(front + text[:cut.end() - 1] + b"}}", where, False)
            except (CheckpointError, ValueError) as error:  # ValueError: there is no cut
                if len(text) < _UNCUT * INDEX_BLOCK:
                    continue
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(f'{where} is {len(text):,} bytes without .safetensors", expected it after every '
                                      "tensor's file") from None
            yield piece
            front, text = b'{"weight_map":{', text[cut.end():]


# %% [markdown]
# For each listed tensor, the key of its name ([5.5.5]) and a number for its file are kept, in 12 bytes.
#
# [5.5.5]: 05_header.ipynb#5.5.5-A-name-is-three-small-integers

# %% tags=["export"]
class Listed(NamedTuple):
    """The list of a checkpoint in the file `path`, in its order: tensor i has the sort key key[i] and is in file[i].

    `files`: what the numbers in `file` stand for, the name of a file; if the list has no text there, a tuple that holds
    it as text for a message. `total`: what stands under metadata.total_size, or in place of the metadata.
    """
    path: str
    key: np.ndarray  # int64 [tensors]
    file: np.ndarray  # int32 [tensors]
    files: list[Any]
    total: Any

    def shown(self, tensor: int) -> str:
        "The file that a tensor is said to be in, for a message."
        file = self.files[self.file[tensor]]
        return shown_value(file) if type(file) is str else file[0]


def read_list(path: str, index: TensorIndex) -> Listed:
    "The list in the file `path`, with sort keys of `index`. Raises CheckpointError."
    keys, places, number, total = bytearray(), bytearray(), dict[Any, int](), None
    for piece in index_pieces(path):
        listed = piece["weight_map"]
        files = [file if type(file) is str else (shown_value(file),) for file in listed.values()]
        keys += index.new_keys([*listed], path).tobytes()
        places += np.array([number.setdefault(file, len(number)) for file in files], np.int32).tobytes()
        metadata = piece.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else total if metadata is None else metadata
    key, file = np.frombuffer(keys, np.int64), np.frombuffer(places, np.int32)
    if not len(key):
        raise CheckpointError(f"{path}: lists no tensor, expected the file of every tensor")
    ordered = np.sort(key)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise tensor_fault(path, index.name_of(int(ordered[twice[0]])), "listed twice", "once")
    return Listed(path, key, file, [*number], total)


# %% [markdown]
# The list names the files to open. If a file is missing that should have a tensor of the text stack, the checkpoint is
# refused, because nothing can be computed without it. A file that has only other tensors, such as those of the image
# encoder, may be missing. So a user need not download it.

# %% tags=["export"]
def listed_files(folder: str, names: list[str], listed: Listed, index: TensorIndex) -> list[str]:
    """The files to open, of those in `folder`, whose `names` are given. Notes other ones in index.unusual.

    Raises CheckpointError if one that a tensor of the text stack is said to be in is not there, or none is.
    """
    present, meant = {*names}, {*listed.files}
    here = [file in present for file in listed.files]
    needed = index.in_text_stack(listed.key)
    lost = np.flatnonzero(needed & ~np.array(here, bool)[listed.file])
    if len(lost):
        raise tensor_fault(listed.path, index.name_of(int(listed.key[lost[0]])), f"found no such file in {folder}",
                           listed.shown(lost[0]))
    if not any(here):
        raise CheckpointError(f"{listed.path}: lists {len(here):,} files, the first is {listed.shown(0)}, "
                              f"expected at least one that is in {folder}")
    missing = [file if type(file) is str else file[0] for file, found in zip(listed.files, here) if not found]
    for file in missing:
        index.unusual.note("listed files of tensors that nothing is computed from, missing", file)
    for name in names:
        if name.endswith(".safetensors") and name not in meant:
            index.unusual.note("weight files that are not listed, and not read", name)
    return sorted(file for file, found in zip(listed.files, here) if found)


# %% [markdown]
# When the headers have been read, each listed tensor is looked up in them. If a tensor of the text stack is in another
# file than the list says, or in none, a file was replaced or a tensor renamed. Then the checkpoint is refused. If the
# list is wrong about other tensors, or about the sum of all bytes, this is only counted as unusual, because programs
# compute this sum in different ways.
#
# In the code, a tensor that is listed but is in no file gets row -1. The column of shards has one more element at its
# end, -2, which is the number of no file. So row -1 finds this element, and the comparison fails, as it should.

# %% tags=["export"]
def check_list(index: TensorIndex, listed: Listed) -> None:
    """Compare the list with the index that was made from the headers, and note what is odd in index.unusual.

    Raises CheckpointError if a tensor of the text stack is not listed, or is not in the file that it is said to be in.
    """
    number = {os.path.basename(file): i for i, file in enumerate(index.files)}
    place = np.array([number.get(file, -1) for file in listed.files], np.int32)[listed.file]
    rows, shard = np.empty(len(listed.key), np.int32), np.append(index.shard, np.int32(-2))
    for part in (slice(begin, begin + 10_000) for begin in range(0, len(rows), 10_000)):  # a look-up takes 40 bytes
        rows[part] = index.rows_of(listed.key[part])
    wrong = np.flatnonzero(shard[rows] != place)
    refused = wrong[index.in_text_stack(listed.key[wrong])]
    if len(refused):
        row = rows[refused[0]]
        found = index.files[index.shard[row]] if row >= 0 else "no file"
        raise tensor_fault(listed.path, index.name_of(int(listed.key[refused[0]])), f"found in {found}",
                           listed.shown(refused[0]))
    for what, some in (("that no file has", wrong[rows[wrong] < 0]), ("in another file", wrong[rows[wrong] >= 0])):
        if len(some):
            name = index.name_of(int(listed.key[some[0]]))
            index.unusual.note(f"listed tensors that nothing is computed from, {what}", name, len(some))
    unlisted = np.ones(len(index) + 1, bool)
    unlisted[rows] = unlisted[-1] = False
    _check_unlisted(index, listed, np.flatnonzero(unlisted))
    payload = int(index.nbytes().sum())
    if type(listed.total) not in (int, float) or listed.total != payload:
        found = "missing" if listed.total is None else shown_value(listed.total)
        index.unusual.note("lists whose total_size is not the bytes of all tensors", f"{found}, not {payload:,}")


def _check_unlisted(index, listed, rows):
    "Refuse a row of the text stack that is not listed, count others."
    refused = rows[index.in_text_stack(index.key[rows])]
    if len(refused):
        raise tensor_fault(listed.path, index.name(refused[0]), f"found in {index.files[index.shard[refused[0]]]}",
                           "no file, because it is not listed")
    if len(rows):
        index.unusual.note("tensors that nothing is computed from, not listed", index.name(rows[0]), len(rows))


# %% [markdown]
# ## 5.7.3 The checkpoint
#
# A checkpoint is opened in four steps: read the list, find the files, read their headers into the index of 5.5, and
# compare the list with the index. The files stay open. The fingerprint of each file is kept, so that a run notices if a
# file is replaced (5.9). Each file needs one descriptor here, and up to two more in 5.9. This can be more than the
# process may have at first, so the limit is raised ([5.1.7]).
#
# [5.1.7]: 01_system.ipynb#5.1.7-Limits-of-a-process,-and-signals

# %% tags=["export"]
DESCRIPTORS_A_FILE = 3  # one in Checkpoint, one or two in the reader of 5.9


class Checkpoint:
    """The tensors of a folder of safetensors files, found from the headers alone: 24 bytes of memory a tensor.

    Raises FileNotFoundError if the folder does not exist, CheckpointError if a file is missing or a header is damaged,
    UsageError if `path` is no path, ResourceError if this process may not have so many files open. The files stay open
    until `close()`, the end of a `with` block, or until the checkpoint is dropped. Any thread may read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._files: list = []
        self.path = given_path("path", path)
        self.index = TensorIndex()
        self.fingerprints: dict[str, Fingerprint] = {}  # of each file whose header was read
        try:
            names = files_in(self.path)
            listed = read_list(str(self.path / INDEX), self.index) if INDEX in names else None
            files = (shard_names(self.path, names) if listed is None
                     else listed_files(str(self.path), names, listed, self.index))
            allow_open_files(DESCRIPTORS_A_FILE * len(files))
            if shortage := open_files_shortage(len(files)):
                raise ResourceError(f"{self.path}: {shortage}")
            for name in files:
                self._add(str(self.path / name))
            self.index.complete()
            if listed is not None:
                check_list(self.index, listed)
        except BaseException:
            self.close()
            raise


# %% tags=["export"]
class Checkpoint(Checkpoint):
    def _add(self, path: str) -> None:
        "Open a file and put its tensors into the index."
        file = open_shard(path)
        self._files.append(file)
        self.fingerprints[path] = fingerprint(os.fstat(file.fileno()))
        self.index.add(path, *read_header(file, path))

    @property
    def files(self) -> list[str]:
        "The full paths of the files, in order."
        return self.index.files


# %% [markdown]
# If nothing refers to a checkpoint any more, it closes its files. Without this, Python would print a warning for each
# open file.

# %% tags=["export"]
class Checkpoint(Checkpoint):
    def close(self) -> None:
        "Close the files. Later reads raise CheckpointError."
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        "Neither copied nor pickled: two objects would close the same files. Raises UsageError."
        raise UsageError(f"a Checkpoint holds open files, so it has no copies: open {self.path} again")


# %% [markdown]
# The next methods say which tensors the checkpoint has, and where they lie. The error for an unknown name says how many
# tensors and files were searched. An argument of a wrong type is refused ([5.2.1]).
#
# [5.2.1]: 02_fileio.ipynb#5.2.1-Kinds-of-error

# %% tags=["export"]
def given_text(name: str, value: str) -> str:
    "The argument `name`, a str. Raises UsageError if it is none."
    if not isinstance(value, str):
        raise wrong_argument(name, value, "text, a str")
    return value


def given_number(name: str, value: int) -> int:
    "The argument `name`, a whole number. Raises UsageError if it is none."
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise wrong_argument(name, value, "a whole number")
    return int(value)


def given_numbers(name: str, value: Sequence[int]) -> Sequence[int]:
    "The argument `name`, whole numbers. Raises UsageError if it is something else."
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, (str, bytes)):
        raise wrong_argument(name, value, "a list of whole numbers")
    return value if isinstance(value, range) else [given_number(name, number) for number in value]


# %% tags=["export"]
class Checkpoint(Checkpoint):
    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, name: str) -> bool:
        return self.index.row(*split_name(given_text("name", name))) >= 0

    def names(self) -> Iterator[str]:
        "Every name, in the order of the files and of the data within each."
        return map(self.index.name, self.index.in_file_order())

    @property
    def unusual(self) -> list[str]:
        "A line for each kind of thing that is odd about the checkpoint and changes no number."
        return self.index.unusual.lines()

    def _row(self, pattern: str, first: int, second: int) -> int:
        row = self.index.row(pattern, first, second)
        if row < 0:
            raise CheckpointError(f"{self.path}: no tensor {join_name(pattern, first, second)} among the {len(self):,} "
                                  f"of its {len(self.files)} files")
        return row

    def extent(self, name: str) -> Extent:
        "Where a tensor lies. Raises CheckpointError if the checkpoint has no tensor of that name, UsageError."
        return self.index.extent(self._row(*split_name(given_text("name", name))))

    def expert(self, layer: int, expert: int) -> dict[str, Extent]:
        """{w1, w1_scale, w2, w2_scale, w3, w3_scale: Extent} of an expert. Raises CheckpointError if one is missing.

        Raises UsageError for what is no number.
        """
        layer, expert = given_number("layer", layer), given_number("expert", expert)
        return {short: self.index.extent(self._row(pattern, layer, expert))
                for short, pattern in EXPERT_TENSORS.items()}


# %% tags=["export"]
class Checkpoint(Checkpoint):
    def kinds_of(self, pattern: str, layers: Sequence[int], experts: Sequence[int]) -> set:
        "As TensorIndex.kinds_of. Raises UsageError for what is no text and no list of numbers."
        pattern, layers = given_text("pattern", pattern), given_numbers("layers", layers)
        return self.index.kinds_of(pattern, layers, given_numbers("experts", experts))

    def count_of(self, prefix: str, layers: range | None = None) -> int:
        "As TensorIndex.count_of. Raises UsageError for what is no text and no range."
        if not isinstance(layers, (range, type(None))):
            raise wrong_argument("layers", layers, "a range or None")
        return self.index.count_of(given_text("prefix", prefix), layers)


# %% [markdown]
# The methods that read values are for checks and small uses. A run reads weights past the page cache (5.9). BF16 is the
# upper half of a float32, so a float32 has its exact value.

# %% tags=["export"]
class Checkpoint(Checkpoint):
    def raw(self, name: str) -> np.ndarray:
        """A tensor's bits: uint16 for BF16, uint8 for F8, else numpy's type of that name.

        Raises CheckpointError, also for a type or a shape that numpy does not have, and UsageError.
        """
        row = self._row(*split_name(given_text("name", name)))
        extent = self.index.extent(row)
        if extent.dtype not in ARRAY_DTYPES:
            raise tensor_fault(extent.file, name, f"type {extent.dtype}, which numpy does not have",
                               f"one of {' '.join(ARRAY_DTYPES)}")
        try:
            out = np.empty(extent.shape, ARRAY_DTYPES[extent.dtype])
        except ValueError as error:
            raise tensor_fault(extent.file, name, f"shape {list(extent.shape)}: {error}", "a shape of numpy") from None
        file, bits = self._files[self.index.shard[row]], out.reshape(-1).view(np.uint8)
        read_exactly(file, bits.data, extent.offset, f"{extent.file}: tensor {name}")
        return out

    def tensor(self, name: str) -> np.ndarray:
        "A tensor's values: BF16 as float32, exactly; others as they are. Raises what raw() raises, and that for F8."
        extent, bits = self.extent(name), self.raw(name)
        if extent.dtype.startswith("F8"):
            raise CheckpointError(f"{extent.file}: tensor {name}: {extent.dtype} has no numpy type, "
                                  "expected BF16, F32 or U8")
        if extent.dtype != "BF16":
            return bits
        wide = bits.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)


# %% tags=["export"]
class Checkpoint(Checkpoint):
    def census(self, experts_per_token: int | None = None, config: Config | None = None) -> Census:
        """Counts and sizes by part, and what is unusual. Without `experts_per_token` active parameters are None.

        `config`: the model's, which knows `experts_per_token`, the layers that are decoded, and its own odd fields.
        Raises UsageError if `experts_per_token` is no number or `config` no Config.
        """
        active = None if experts_per_token is None else given_number("experts_per_token", experts_per_token)
        if not isinstance(config, (Config, type(None))):
            raise wrong_argument("config", config, "a Config or None")
        if config is None:
            return census(self.index, active, None, self.index.unusual)
        unusual = Unusual()
        unusual.include(self.index.unusual)
        for line in config.unusual:
            unusual.note("fields of the config that nothing is computed from", line)
        layers = range(config.num_hidden_layers, NUMBER_MASK)
        unusual.note("tensors of layers that greedy decoding does not use", f"layer {layers.start} and after it",
                     self.count_of(LAYER_PREFIX, layers))
        return census(self.index, config.num_experts_per_token if active is None else active, layers.start, unusual)

    def contiguity(self) -> Contiguity:
        "Which layers' trunks and which experts are contiguous in their files."
        return contiguity(self.index)


# %% [markdown]
# ## 5.7.4 Accepted or refused
#
# The `safetensors` library is an independent reader, written in Rust. In all 16 files of the embedded model it must
# find the same names, types, shapes and bytes. The sum of the bytes must be the `metadata.total_size` of the model.

# %%
oracle = Checkpoint(MODEL)
compared = 0
for file in oracle.files:
    for name, theirs in safetensors.deserialize(Path(file).read_bytes()):
        ours = oracle.raw(name)
        assert (oracle.extent(name).dtype, list(ours.shape)) == (theirs["dtype"], theirs["shape"]), name
        assert ours.tobytes() == theirs["data"], name
        compared += ours.nbytes
total = json.loads((MODEL / "model.safetensors.index.json").read_bytes())["metadata"]["total_size"]
assert compared == total and len(oracle) == len(set(oracle.names()))
print(f"{len(oracle):,} tensors, {compared:,} bytes equal")  # claim equal


# %% [markdown]
# The next cell changes the list in one way at a time. The first three changes concern tensors of the text stack, and
# are refused. Each error names the tensor, the place where it was found, and the place where it was expected. The last
# three lists are unusual, but right about every tensor that is computed with. They are accepted.

# %%
def listed(change):
    "What opening the embedded model says, with its index changed by change(index), as links to its files."
    with tempfile.TemporaryDirectory() as other:
        index = json.loads((MODEL / INDEX).read_bytes())
        change(index)
        Path(other, INDEX).write_text(json.dumps(index))
        for file in oracle.files:
            Path(other, os.path.basename(file)).symlink_to(Path(file).resolve())
        try:
            with Checkpoint(other) as checkpoint:
                return "accepted; " + "; ".join(checkpoint.unusual)
        except CheckpointError as error:
            return str(error).replace(other + os.sep, "")


for change in (
    lambda index: index["weight_map"].update({HEAD: "model-00001-of-000016.safetensors"}),
    lambda index: index["weight_map"].update({"language_model.x": "model-00014-of-000016.safetensors"}),
    lambda index: index["weight_map"].pop(HEAD),
):
    print(listed(change))
    assert "accepted" not in listed(change)
for change in (
    lambda index: index["metadata"].update(total_size=6_612_161),
    lambda index: index["weight_map"].update({"audio.weight": "audio.safetensors"}),
    lambda index: index["weight_map"].update({"mm_projector.proj.0.bias": "model-00001-of-000016.safetensors"}),
):
    print(listed(change))
    assert listed(change).startswith("accepted; ")
assert listed(lambda index: None) == "accepted; "

# %% [markdown]
# The two mistakes of [5.5.1] must fail a comparison with another reader: an offset from the start of the file, and BF16
# that is read as half precision. The gate compares one tensor.
#
# [5.5.1]: 05_header.ipynb#5.5.1-By-hand:-a-file-of-two-tensors

# %%
name = tensor_name(3, "mla", "q_b_proj")
place, right = oracle.extent(name), oracle.tensor(name)
file = Path(place.file).read_bytes()
header = 8 + int.from_bytes(file[:8], "little")
shifted = np.frombuffer(file, "<u2", place.nbytes // 2, place.offset - header)
as_half = oracle.raw(name).view(np.float16).astype(np.float32)
theirs = dict(safetensors.deserialize(file))[name]["data"]


def check_values(what, found):
    "The gate: the float32 values of the bf16 bits that the other reader has found."
    expected = (np.frombuffer(theirs, "<u2").astype(np.uint32) << 16).view(np.float32)
    wrong = (found.ravel() != expected).mean()
    assert not wrong, f"{what}: {wrong:.0%} of the values differ from those of the other reader"
    print(f"{what}: all values equal")


check_values("this chapter's reader", right)

# %% tags=["raises-exception"]
check_values("offset from the start of the file", (shifted.astype(np.uint32) << 16).view(np.float32))

# %% tags=["raises-exception"]
check_values("BF16 read as float16", as_half)

# %% [markdown]
# ## 5.7.5 Half a million tensors
#
# How long does it take to open the released checkpoint? The next cell writes sparse files of its shape: true headers,
# holes in place of the weights, and the list of all tensors. On the disk the headers take 76 MB and the list 60 MB.
# Only the layers are written here. The census of all 96 files is in 5.6.

# %%
scratch = tempfile.TemporaryDirectory()
folder, payload, places, config = Path(scratch.name), 0, {}, read_config(ROOT / "fixtures/k3")
for L in range(layers):
    tensors = sorted(layer_tensors(config, L, range(experts)), key=lambda t: (-ITEMSIZE[t[1]], t[0]))
    head, nbytes = header_bytes(tensors), sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors)
    file = f"model-{L + 1:05d}-of-{layers:06d}.safetensors"
    with open(folder / file, "wb") as out:
        out.write(head)
        out.truncate(len(head) + nbytes)
    payload += nbytes
    places |= {name: file for name, _, _ in tensors}
text = json.dumps({"metadata": {"total_size": payload}, "weight_map": places}, indent=2, sort_keys=True)
(folder / INDEX).write_text(text)
del places, text

# %% tags=["nbval-ignore-output"]
start = time.perf_counter()
k3 = Checkpoint(folder)
spent = time.perf_counter() - start
start = time.perf_counter()
check_list(k3.index, read_list(str(folder / INDEX), k3.index))
print(f"{len(k3):,} tensors indexed in {spent:.1f} s, {time.perf_counter() - start:.1f} s of it for the list of "
      f"{(folder / INDEX).stat().st_size / 1e6:.0f} MB; "
      f"{sum(disk_bytes(f.stat()) for f in folder.iterdir()) / 1e6:.0f} MB on disk")

# %% [markdown]
# A token needs 16 experts in each of 92 layers, and each expert has six tensors. The next cell looks them up.

# %% tags=["nbval-ignore-output"]
chosen = [(L, E) for L in range(1, layers) for E in range(0, experts, max(1, experts // 16))]
start = time.perf_counter()
for L, E in chosen:
    k3.expert(L, E)
spent = time.perf_counter() - start
print(f"{len(chosen):,} experts: {1e3 * spent:.0f} ms a token, {1e6 * spent / len(chosen) / 6:.1f} us an extent")

# %%
k3.close()
scratch.cleanup()

# %% [markdown]
# ## 5.7.6 Summary
#
# - A checkpoint is opened from its headers alone. No file of the text stack may be missing.
# - The list beside the files says which files are meant. It must agree with the headers about every tensor that is
#   computed with. If it is wrong about others, this is counted as unusual.
# - Two mistakes raise no error: an offset from the start of the file, and BF16 read as float16. A comparison with
#   another reader notices both.
#
# ## Exercises
#
# Answer to 1: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Write `rows(checkpoint, name, first, count)` with `extent` and `read_exactly`, so that a token's row of the
#    embedding is read in 14,336 bytes and not in 2.35 GB. Compare it with `raw(name)[first:first + count]`.
# 2. Add `"made_from": ["a.safetensors", "b.safetensors"]` to a list's metadata. For which values of `INDEX_BLOCK` does
#    a cut fall into it, and what does `index_pieces` do then? How long may such a value be?
