# %% [markdown]
# # 5.19 The trunk on a faster disk
#
# The trunk of K3, 108.8 GB, is read at every token; of the experts, 1,446 GB, a token reads 25.8. So a small fast disk
# is best used for a copy of the trunk. This chapter makes that copy, proves it equal to the checkpoint, and reads from
# it. At the end you can say what is left behind by a copy that is interrupted at any moment, and why the next one goes
# on from there.
#
# [5.18 The dial: bytes to plan](18_plan.ipynb) ·
# [contents](../README.md) ·
# [5.20 A sequence saved and loaded](20_state.ipynb)

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"

# %% tags=["export"]
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

# %% [markdown]
# ## 5.19.1 What it is worth
#
# Seconds of reading for a token, nothing pinned or cached, when the checkpoint lies on a disk of 1 GB/s and the trunk
# on a disk of its own: $25.8 / 1 + 108.8 / r$.

# %%
rates = np.linspace(1, 14, 200)
seconds = 25.8 / 1 + 108.8 / rates
fig, ax = plt.subplots()
ax.plot(rates, seconds, label="experts at 1 GB/s, trunk at the rate below")
ax.axhline(25.8, color="0.6", ls="--", label="experts alone")
ax.set(xlabel="rate of the trunk's disk, GB/s", ylabel="seconds of reading a token", ylim=0,
       title=f"Computed: {seconds[0]:.0f} s a token at 1 GB/s, {25.8 + 108.8 / 7:.0f} s with the trunk at 7 GB/s")
ax.legend()
plt.show()


# %% [markdown]
# ## 5.19.2 What a packed trunk is
#
# A packed trunk is a folder of safetensors files, one for each layer and one for the tensors after the last layer. In a
# file the tensors stand in the order in which a forward pass reads them, and nothing stands between them. So the folder
# is a checkpoint like any other, and its reads are one long run.
#
# The list of tensors is made beforehand, with every offset, so that the size of a file is known before its first byte
# is written.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.19.3 Copied, holes left out, and compared
#
# A synthetic checkpoint is mostly holes, parts of a file that take no disk. A copy of their zeros would take a hundred
# gigabytes, so only the data between the holes are written. The comparison reads all of both files, past the page
# cache, so it sees what is on the disk.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.19.4 A name means that the file is right
#
# A file is written under another name, flushed to the disk, compared with the checkpoint byte by byte, and only then
# renamed. From this order follow three promises:
#
# - a file that has its final name is equal to the checkpoint;
# - a run after an interrupted one goes on where that one stopped: it compares a file that has its final name, and does
#   not write it;
# - a folder in which a file is missing is refused as a checkpoint, because the names say how many there are.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# ## 5.19.5 Read from both
#
# Reading takes one class that looks a tensor up in the folder first. The folder could be of another checkpoint with the
# same shapes, so the first row of every tensor is compared.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.19.6 Interrupted, and gone on with
#
# The embedded model's trunk has fourteen files. A first run is interrupted at its sixtieth tensor. What it leaves is
# refused as a trunk. A second run goes on, and does not write again what the first one finished.

# %%
from k3lib.config import read_config
from k3lib.tensors import forward_order

config, checkpoint = read_config(FOLDER), Checkpoint(FOLDER)
names = list(forward_order(config))
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name) / "packed"
done = []


def interrupt_at_sixty(nbytes):
    done.append(nbytes)
    if len(done) == 60:
        raise KeyboardInterrupt


def times():
    "{file name: when it was written}."
    return {path.name: path.stat().st_mtime_ns for path in sorted(folder.iterdir())}


try:
    pack(checkpoint, names, folder, interrupt_at_sixty)
except KeyboardInterrupt:
    first = times()
    assert all(name.endswith(".safetensors") for name in first)
    print("interrupted:", len(first), "of 14 files have their names, nothing else is left")
try:
    Packed(checkpoint, names, folder)
except CheckpointError as error:
    print("refused:", str(error).replace(scratch.name, "..."))
pack(checkpoint, names, folder)
assert len(times()) == 14 and first.items() <= times().items()
print("gone on:", len(times()), "files; those of the first run were not written again")

# %% [markdown]
# ## 5.19.7 The gate
#
# Every tensor of the packed trunk has the checkpoint's bytes. And a forward pass over it multiplies the same numbers:
# each matrix of the model, streamed from the folder, times a fixed vector.

# %%
from k3lib.layout import trunk_layout
from k3lib.matmul import ResidentMatrix, linear
from k3lib.trunk import Trunk

source = Packed(checkpoint, names, folder)
assert all((Checkpoint(folder).raw(name) == checkpoint.raw(name)).all() for name in names)
extents = {name: source.extent(name) for name in names}
layout, files = trunk_layout(extents, {}, 2), Files(source.fingerprints)
trunk = Trunk(layout, files)
trunk.begin()
for name in layout.streamed:
    ramp = np.linspace(-1, 1, extents[name].shape[1], dtype=np.float32)[None]
    assert (linear(trunk.weight(name), ramp) == linear(ResidentMatrix(checkpoint.raw(name)), ramp)).all(), name
trunk.close()
print(f"{len(names)} tensors, {len(layout.streamed)} streamed, from {len(files.access())} packed files: the same bits")
files.close()

# %% [markdown]
# The folder of another model is refused, though its names and shapes are the same. Here a single weight differs.

# %%
victim = folder / "model-00003-of-000014.safetensors"
offset = Checkpoint(folder).extent(names[0].replace("layers.0", "layers.2")).offset
data = bytearray(victim.read_bytes())
data[offset] ^= 1
victim.write_bytes(data)
try:
    Packed(checkpoint, names, folder)
except CheckpointError as error:
    print(str(error).replace(scratch.name, "...").replace(str(FOLDER), "MODEL"))
else:
    raise AssertionError("another model's trunk was accepted")
scratch.cleanup()

# %% [markdown]
# ## Summary
#
# - The trunk is a fourteenth of the checkpoint and four fifths of the bytes of a token, so it is the part to copy to a
#   fast disk.
# - Write, flush, compare, rename, in this order: then a name means that the file is right, whenever a run ends.
# - A packed trunk is a checkpoint of its own. A row of every tensor is compared before it is used.
#
# ## Exercises
#
# 1. A power failure comes between `os.fsync` and `os.replace`, and another between `os.replace` and `sync_folder`. What
#    does the next run find in each case?
# 2. `Packed` compares first rows only. Which damage does that miss, and which command finds it?
# 3. Where does the curve of 5.19.1 go if half of the trunk is pinned?
#
# Next: [5.20 A sequence saved and loaded](20_state.ipynb) saves what a model has read, so that no token is read twice.
