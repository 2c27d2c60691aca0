"""5.19 The trunk on a faster disk

Made from book/05_streaming/19_pack.py: edit that, then run `make export`.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import BinaryIO, NamedTuple

from k3lib.checkpoint import Checkpoint
from k3lib.disk import Files, page_buffer, page_padded
from k3lib.fileio import CheckpointError, given_path, writing
from k3lib.header import Extent, header_bytes
from k3lib.system import data_runs, sync_folder
from k3lib.tensors import layer_of


class _TrunkFile(NamedTuple):
    "A file of a packed trunk: its `path`, its header, and for each tensor name, source extent and offset in the file."
    path: str
    head: bytes
    tensors: list[tuple[str, Extent, int]]

    @property
    def nbytes(self) -> int:
        _, extent, offset = self.tensors[-1]
        return offset + extent.nbytes


def _trunk_files(checkpoint: Checkpoint, names: Iterable[str], folder: str) -> list[_TrunkFile]:
    "The files of a packed trunk of the tensors `names`, in which the tensors of a layer are adjacent."
    groups = [list(group) for _, group in groupby(names, layer_of)]
    files = []
    for i, group in enumerate(groups, 1):
        extents = [checkpoint.extent(name) for name in group]
        head = header_bytes([(name, e.dtype, e.shape) for name, e in zip(group, extents)])
        offsets = [len(head) + sum(e.nbytes for e in extents[:k]) for k in range(len(extents))]
        path = os.path.join(folder, f"model-{i:05}-of-{len(groups):06}.safetensors")
        files.append(_TrunkFile(path, head, list(zip(group, extents, offsets))))
    return files


COPY_BYTES = 1 << 20  # bytes copied or compared at a time


def _data_bytes(extent):
    "Bytes of an extent that are not holes."
    with open(extent.file, "rb") as file:
        return sum(end - begin for begin, end in data_runs(file.fileno(), extent.offset, extent.offset + extent.nbytes))


def _copy_spans(begin: int, end: int) -> Iterator[tuple[int, int]]:
    "Cut begin..end into spans (begin, length) of at most COPY_BYTES."
    return ((at, min(COPY_BYTES, end - at)) for at in range(begin, end, COPY_BYTES))


def _copy(files: Files, extent: Extent, target: BinaryIO, offset: int) -> None:
    "Write a tensor's data, but not its holes, to the file `target` from byte `offset` on."
    buffer = page_buffer(page_padded(COPY_BYTES))
    with open(extent.file, "rb") as source:
        for begin, end in data_runs(source.fileno(), extent.offset, extent.offset + extent.nbytes):
            target.seek(offset + begin - extent.offset)
            for at, n in _copy_spans(begin - extent.offset, end - extent.offset):
                start = files.read(buffer, extent, at, n, "other")
                target.write(buffer[start:start + n].data)


def _same(files: Files, a: Extent, b: Extent) -> bool:
    "True if the extents `a` and `b` hold the same bytes."
    left, right = page_buffer(page_padded(COPY_BYTES)), page_buffer(page_padded(COPY_BYTES))
    for at, n in _copy_spans(0, a.nbytes):
        i, j = files.read(left, a, at, n, "other"), files.read(right, b, at, n, "other")
        if left[i:i + n].tobytes() != right[j:j + n].tobytes():
            return False
    return True


def _pack_file(checkpoint: Checkpoint, file: _TrunkFile, progress: Callable[[int], object]) -> None:
    "Write a file unless it exists, and compare it with the checkpoint. Raises CheckpointError if it differs."
    complete, part, files = os.path.exists(file.path), file.path + ".part", Files(checkpoint.fingerprints)
    try:
        if not complete:
            _write_file(files, file, part)
        _compare_file(files, file, file.path if complete else part, checkpoint, progress)
        files.check()
        files.close()  # a file that is open gets no other name on Windows
        if not complete:
            os.replace(part, file.path)
            sync_folder(os.path.dirname(file.path))
    except BaseException:
        if not complete and os.path.exists(part):  # half a file is of no use to the next run
            os.unlink(part)
        raise
    finally:
        files.close()


def _write_file(files: Files, file: _TrunkFile, path: str) -> None:
    "Write header and tensors to `path` and flush them to the disk."
    with writing(path) as target:
        target.write(file.head)
        target.truncate(file.nbytes)
        for _, extent, offset in file.tensors:
            _copy(files, extent, target, offset)
        target.flush()
        os.fsync(target.fileno())


def _compare_file(files: Files, file: _TrunkFile, path: str, checkpoint: Checkpoint,
                  progress: Callable[[int], object]) -> None:
    "Compare the file at `path` with the checkpoint. Raises CheckpointError with the first tensor that differs."
    with open(path, "rb") as packed:
        good = packed.read(len(file.head)) == file.head and os.fstat(packed.fileno()).st_size == file.nbytes
    for name, extent, offset in file.tensors:
        if not good or not _same(files, extent, extent._replace(file=path, offset=offset)):
            what = name if good else "header or size"
            raise CheckpointError(f"{path}: {what} differs from that of {checkpoint.path}: the file is of another "
                                  "checkpoint or damaged; remove it, and it is written again")
        progress(extent.nbytes)


def pack(checkpoint: Checkpoint, names: Iterable[str], folder: str | os.PathLike,
         progress: Callable[[int], object] | None = None) -> None:
    """Copy the tensors `names`, in this order, to safetensors files in `folder`: one for each layer, one for the rest.

    Holes stay holes. A file gets its name only when it is on the disk and equal to the checkpoint. So a run that was
    interrupted can be repeated: files that have their names are compared, not written. progress(nbytes) is called for
    each tensor done. Raises CheckpointError if the tensors of a layer do not lie side by side, if a file is of another
    checkpoint, or if the folder holds other safetensors files; OSError if the disk is full; UsageError if `folder` is
    no path.
    """
    folder, names = given_path("folder", folder), [*names]
    for layer, why in checkpoint.contiguity().broken_layers.items():
        if any(layer_of(name) == layer for name in names):
            raise CheckpointError(f"{checkpoint.path}: layer {layer} is not in one piece: {why}; it can be streamed, "
                                  "but not packed")
    os.makedirs(folder, exist_ok=True)
    files = _trunk_files(checkpoint, names, os.fspath(folder))
    found = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    if strays := found - {os.path.basename(file.path) for file in files}:
        raise CheckpointError(f"{folder}: holds {min(strays)}, "
                              f"which is no part of a packed trunk of {len(files)} files")
    missing = [extent for file in files if not os.path.exists(file.path) for _, extent, _ in file.tensors]
    need, free = sum(map(_data_bytes, missing)), shutil.disk_usage(folder).free
    if need > free:
        raise OSError(errno.ENOSPC, f"{folder}: {need} bytes are still to be written, but {free} are free")
    for file in files:
        _pack_file(checkpoint, file, progress or (lambda nbytes: None))


class Packed:
    """A checkpoint of which the tensors `names` are read from `folder`, which pack() has filled.

    `fingerprints`: those of the files of both. Raises FileNotFoundError if there is no such folder, CheckpointError if
    it is incomplete or packed from another checkpoint: dtypes, shapes and the first row of every tensor are compared.
    """

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str], folder: str | os.PathLike):
        self.checkpoint, self.packed = checkpoint, Checkpoint(folder)
        self.fingerprints = checkpoint.fingerprints | self.packed.fingerprints
        files = Files(self.fingerprints)
        try:
            for name in names:
                copy, source = self.extent(name), checkpoint.extent(name)
                if (copy.file == source.file or copy[2:] != source[2:]
                        or self._first_row(files, copy) != self._first_row(files, source)):
                    raise CheckpointError(f"{folder}: {name} is missing or not that of {checkpoint.path}: "
                                          "pack this checkpoint again")
        finally:
            files.close()

    @staticmethod
    def _first_row(files, extent):
        return files.array(extent, "other", 0, 1).tobytes()

    def extent(self, name: str) -> Extent:
        "Where a tensor lies: in the packed folder if it is there, else in the checkpoint."
        return (self.packed if name in self.packed else self.checkpoint).extent(name)


__all__ = [
    "COPY_BYTES", "pack", "Packed",
]
