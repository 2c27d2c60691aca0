# %% [markdown]
# # 5.7 A checkpoint, opened
#
# A checkpoint is a folder with files of weights, and perhaps a list of the tensors in them. At the end of this chapter
# you can open one from its headers alone, refuse it if a file is missing or if the list and the files disagree, and
# read any of its tensors.
#
# [5.6 Where 1.56 TB lie](06_census.ipynb) ·
# [contents](../README.md) ·
# [5.8 Ninety-three layers, one forward pass a token](08_model.ipynb)

# %% tags=["parameters"]
layers = 93  # of the sparse copy of the released shape, section 5.7.5
experts = 896

# %% tags=["export"]
import os
import re
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np

from k3lib.census import Census, Contiguity, census, contiguity
from k3lib.fileio import (
    CheckpointError, Fingerprint, MissingFile, ResourceError, fingerprint, given_path, open_shard, read_exactly,
    read_fault, shown_value,
)
from k3lib.header import ARRAY_DTYPES, Extent, TensorIndex, braced_object, read_header, tensor_fault
from k3lib.system import allow_open_files, open_files_shortage
from k3lib.tensors import EXPERT_TENSORS, join_name, split_name

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
# The name of a shard says how many shards there are, so a missing one is found before any is opened.

# %% tags=["export"]
_SHARD = re.compile(r"model-(\d{5,6})-of-(\d{5,6})\.safetensors", re.ASCII)


def shard_names(folder: str | os.PathLike[str]) -> list[str]:
    """The checkpoint's file names in order: model.safetensors alone, or every model-XXXXX-of-YYYYYY.safetensors.

    Raises FileNotFoundError if the folder does not exist, CheckpointError if there is a file too few or too many.
    """
    if not os.path.isdir(folder):
        what = "a file" if os.path.exists(folder) else "no such folder"
        raise MissingFile(f"{folder}: {what}, expected a checkpoint's folder")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise read_fault(f"{folder}: cannot be listed: {error.strerror}", error) from None
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
# A checkpoint of several files comes with a list, `model.safetensors.index.json`: for each tensor, the file that holds
# it. The headers would be enough. But if the list disagrees with them, a file was replaced or a tensor renamed, and
# neither is accepted. As one Python object, the list of the release would take more memory than all else in this
# chapter (5.5.7). So it is read a quarter of a megabyte at a time, and each block is cut after the last name of a file.
# There one part is closed with `}}` and the next is opened with `{"weight_map":{`, so that each part is a JSON object,
# which is read as strictly as a header.

# %% tags=["export"]
INDEX = "model.safetensors.index.json"
INDEX_BLOCK = 1 << 18  # bytes of it that are read and parsed at a time
_CUT = b'.safetensors",'


def index_pieces(path: str, most: int) -> Iterator[dict]:
    """The JSON object in the file `path` as several objects, each with a part of its "weight_map".

    Raises CheckpointError if the file has more than `most` bytes, cannot be read, or holds no such object.
    """
    with open_shard(path) as file:
        size, text, front = os.fstat(file.fileno()).st_size, b"", b""
        if size > most:
            raise CheckpointError(f"{path}: {size:,} bytes, expected at most {most:,} for the tensors that are here")
        for begin in range(0, size or 1, INDEX_BLOCK):
            block = bytearray(min(INDEX_BLOCK, size - begin))
            read_exactly(file, block, begin, path)
            text, end = text + block, begin + len(block)
            where, last = f"{path}: its text up to byte {end:,}", end >= size
            part, cut, text = (text, b"", b"") if last else text.rpartition(_CUT)
            if not (cut or last):
                raise CheckpointError(f"{where} is {len(text):,} bytes without {_CUT.decode()}, "
                                      "expected one after every tensor's file")
            piece = braced_object(front + part + (b"" if last else cut[:-1] + b"}}"), where)
            if type(piece.get("weight_map")) is not dict or not last and [*piece][-1] != "weight_map":
                raise CheckpointError(f"{where} has {shown_value([*piece])}, "
                                      "expected an object weight_map of all tensors and their files")
            yield piece
            front = b'{"weight_map":{'


# %% [markdown]
# Each part is compared with the index that was made from the headers. A tensor that is listed but not in any file has
# row -1. One more row at the end of the shard's column has the value -1, which is no file's number, so the comparison
# fails for such a tensor too.

# %% tags=["export"]
def _mark_listed(index: TensorIndex, shard: np.ndarray, path: str, listed: dict, seen: np.ndarray) -> None:
    """Mark the rows of `listed`, {tensor: file}, in `seen`; `shard` is the index's column with one more row of -1.

    Raises CheckpointError if a tensor lies in another file or was listed before.
    """
    number = {os.path.basename(file): i for i, file in enumerate(index.files)}
    names, files = [*listed], [*listed.values()]
    rows = index.rows_of(names)
    wanted = [number.get(file, -1) if type(file) is str else -1 for file in files]
    wrong = np.flatnonzero((rows < 0) | (shard[rows] != wanted))
    if len(wrong):
        i = wrong[0]
        found = index.files[shard[rows[i]]] if rows[i] >= 0 else "no file"
        raise tensor_fault(path, names[i], f"found in {found}", shown_value(files[i]))
    if seen[rows].any():
        raise tensor_fault(path, names[np.argmax(seen[rows])], "listed twice", "once")
    seen[rows] = True


def check_index(index: TensorIndex, path: str) -> None:
    "Raise CheckpointError unless the file `path` does not exist or lists exactly the tensors of `index`."
    if not os.path.lexists(path):
        return
    payload = int(index.nbytes().sum())
    shard, totals = np.append(index.shard, -1), []
    seen = np.zeros(len(shard), bool)  # the last element is row -1, which is never marked
    for piece in index_pieces(path, 2 * (sum(index.file_sizes) - payload) + 1_000_000):
        _mark_listed(index, shard, path, piece["weight_map"], seen)
        metadata = piece.get("metadata", {})
        totals.append(metadata.get("total_size", payload) if type(metadata) is dict else metadata)
    if not seen[:-1].all():
        row = int(np.argmin(seen))
        raise tensor_fault(path, index.name(row), f"found in {index.files[index.shard[row]]}",
                           "no file, because it is not listed")
    for total in totals:
        if type(total) not in (int, float) or total != payload:
            raise CheckpointError(f"{path}: metadata.total_size is {shown_value(total)}, expected {payload:,}, "
                                  "the bytes of all tensors")


# %% [markdown]
# ## 5.7.3 The checkpoint
#
# A checkpoint is opened in three steps: find the files, read their headers into the index of 5.5, compare the list. The
# files stay open. The fingerprint of each is kept, so that a file that is replaced during a run is noticed (5.9). The
# process may need more open files than the system grants at first (5.1.7): one here, and up to two for the reader of
# 5.9, which bypasses the page cache where it can.

# %% tags=["export"]
DESCRIPTORS_A_FILE = 3  # one in Checkpoint, one or two in the reader of 5.9


class Checkpoint:
    """The tensors of a folder of safetensors files, found from the headers alone: 24 bytes of memory a tensor.

    Raises FileNotFoundError if the folder does not exist, CheckpointError if a file is missing or a header is damaged,
    ResourceError if this process may not have so many files open. The files stay open until `close()` or the end of a
    `with` block. Any thread may read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._files: list = []
        self.path = given_path("path", path)
        self.index = TensorIndex()
        self.fingerprints: dict[str, Fingerprint] = {}  # of each file whose header was read
        try:
            names = shard_names(self.path)
            allow_open_files(DESCRIPTORS_A_FILE * len(names))
            if shortage := open_files_shortage(len(names)):
                raise ResourceError(f"{self.path}: {shortage}")
            for name in names:
                self._add(str(self.path / name))
            self.index.complete()
            check_index(self.index, str(self.path / INDEX))
        except BaseException:
            self.close()
            raise

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
# A checkpoint that is dropped closes its files too, without the warning that Python gives for each file left open.

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


# %% [markdown]
# These methods tell which tensors the checkpoint has, and where they lie. The error for an absent name says how many
# tensors and files were searched.

# %% tags=["export"]
class Checkpoint(Checkpoint):
    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, name: str) -> bool:
        return self.index.row(*split_name(name)) >= 0

    def names(self) -> Iterator[str]:
        "Every name, in the order of the files and of the data within each."
        return map(self.index.name, self.index.in_file_order())

    def _row(self, pattern: str, first: int, second: int) -> int:
        row = self.index.row(pattern, first, second)
        if row < 0:
            raise CheckpointError(f"{self.path}: no tensor {join_name(pattern, first, second)} among the {len(self):,} "
                                  f"of its {len(self.files)} files")
        return row

    def extent(self, name: str) -> Extent:
        "Where a tensor lies. Raises CheckpointError if the checkpoint has no tensor of that name."
        return self.index.extent(self._row(*split_name(name)))

    def expert(self, layer: int, expert: int) -> dict[str, Extent]:
        "{w1, w1_scale, w2, w2_scale, w3, w3_scale: Extent} of an expert. Raises CheckpointError if one is missing."
        return {short: self.index.extent(self._row(pattern, layer, expert))
                for short, pattern in EXPERT_TENSORS.items()}

    def kinds_of(self, pattern: str, layers: Sequence[int], experts: Sequence[int]) -> set:
        "As TensorIndex.kinds_of."
        return self.index.kinds_of(pattern, layers, experts)

    def count_of(self, prefix: str) -> int:
        "As TensorIndex.count_of."
        return self.index.count_of(prefix)


# %% [markdown]
# Values are read here for checks and small uses; a run reads them past the page cache (5.9). BF16 is the upper half of
# a float32, so its values are exact in float32.

# %% tags=["export"]
class Checkpoint(Checkpoint):
    def raw(self, name: str) -> np.ndarray:
        "A tensor's bits: uint16 for BF16, uint8 for F8, else numpy's type of that name. Raises CheckpointError."
        row = self._row(*split_name(name))
        extent = self.index.extent(row)
        out = np.empty(extent.shape, ARRAY_DTYPES[extent.dtype])
        file, bits = self._files[self.index.shard[row]], out.reshape(-1).view(np.uint8)
        read_exactly(file, bits.data, extent.offset, f"{extent.file}: tensor {name}")
        return out

    def tensor(self, name: str) -> np.ndarray:
        "A tensor's values: BF16 as float32, exactly; other types as they are. Raises CheckpointError, also for F8."
        extent, bits = self.extent(name), self.raw(name)
        if extent.dtype.startswith("F8"):
            raise CheckpointError(f"{extent.file}: tensor {name}: {extent.dtype} has no numpy type, "
                                  "expected BF16, F32 or U8")
        if extent.dtype != "BF16":
            return bits
        wide = bits.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)

    def census(self, experts_per_token: int | None = None) -> Census:
        "Counts and sizes by part. Active parameters are None unless `experts_per_token` is given."
        return census(self.index, experts_per_token)

    def contiguity(self) -> Contiguity:
        "Which layers' trunks and which experts are contiguous in their files."
        return contiguity(self.index)


# %% [markdown]
# ## 5.7.4 Accepted or refused
#
# The `safetensors` library is an independent reader in Rust. In all 16 files of the embedded model it must find the
# same names, types, shapes and bytes, and the sum of the bytes must be the model's own `metadata.total_size`.

# %%
oracle = Checkpoint(MODEL)
compared = 0
for file in oracle.files:
    for name, theirs in safetensors.deserialize(Path(file).read_bytes()):
        ours = oracle.raw(name)
        assert (oracle.extent(name).dtype, list(ours.shape)) == (theirs["dtype"], theirs["shape"]), name
        assert ours.tobytes() == theirs["data"], name
        compared += ours.nbytes
total = json.loads((MODEL / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
assert compared == total and len(oracle) == len(set(oracle.names()))
print(f"{len(oracle):,} tensors, {compared:,} bytes equal")


# %% [markdown]
# The list beside the files, wrong in one way at a time. Each line names the tensor, where it was found, and where it
# was expected.

# %%
def listed(change):
    "The refusal of the embedded model with its index changed by change(index), as links to its files."
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


for change in (
    lambda index: index["weight_map"].update({HEAD: "model-00001-of-000016.safetensors"}),
    lambda index: index["weight_map"].update({"lm_head.bias": "model-00014-of-000016.safetensors"}),
    lambda index: index["weight_map"].pop(HEAD),
    lambda index: index["metadata"].update(total_size=6_612_161),
):
    print(listed(change))
    assert listed(change)
assert listed(lambda index: None) is None

# %% [markdown]
# The two silent mistakes of 5.5.1 must fail this comparison, or the comparison proves nothing.

# %%
name = tensor_name(3, "mla", "q_b_proj")
place, right = oracle.extent(name), oracle.tensor(name)
file = Path(place.file).read_bytes()
header = 8 + int.from_bytes(file[:8], "little")
shifted = np.frombuffer(file, "<u2", place.nbytes // 2, place.offset - header)
as_half = oracle.raw(name).view(np.float16).astype(np.float32)
print("offsets from the file's start: equal bits", bool((shifted == oracle.raw(name).ravel()).all()))
print(f"BF16 read as float16: largest {np.abs(as_half).max():.3g}, expected {np.abs(right).max():.3g}")
assert not (shifted == oracle.raw(name).ravel()).all()
assert np.abs(as_half - right).max() > 0.1 * np.abs(right).max()

# %% [markdown]
# ## 5.7.5 Half a million tensors
#
# The released shape as sparse files: true headers, then holes, and the list of all tensors. On the disk the headers
# take 76 MB and the list 60 MB. Only the layers are written here; the census of all 96 files is in 5.6.

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
check_index(k3.index, str(folder / INDEX))
print(f"{len(k3):,} tensors indexed in {spent:.1f} s, {time.perf_counter() - start:.1f} s of it for the list of "
      f"{(folder / INDEX).stat().st_size / 1e6:.0f} MB; "
      f"{sum(disk_bytes(f.stat()) for f in folder.iterdir()) / 1e6:.0f} MB on disk")

# %% [markdown]
# A token needs 16 experts in each of 92 layers, six tensors each.

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
# - A checkpoint is opened from its headers alone. No file may be missing, and the index takes 24 bytes a tensor.
# - The list beside the files must agree with the headers, or neither is accepted.
# - Two silent mistakes, an offset from the file's start and BF16 read as float16, fail the comparison with another
#   reader.
#
# **Exercises.**
# 1. Write `rows(checkpoint, name, first, count)` with `extent` and `read_exactly`, so that a token's row of the
#    embedding is read in 14,336 bytes and not in 2.35 GB. Compare it with `raw(name)[first:first + count]`.
# 2. Add `"made_from": ["a.safetensors", "b.safetensors"]` to a list's metadata. For which values of `INDEX_BLOCK` is
#    the list refused, and with which message?
