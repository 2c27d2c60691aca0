"""5.7 A checkpoint, opened

Made from book/05_streaming/07_checkpoint.py: edit that, then run `make export`.
"""

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


__all__ = [
    "shard_names", "INDEX", "INDEX_BLOCK", "index_pieces", "check_index", "DESCRIPTORS_A_FILE", "Checkpoint",
]
