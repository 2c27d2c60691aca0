# %% [markdown]
# # 5.19 The trunk on a faster disk
#
# The trunk of K3, 108.8 GB, is read at every token; of the experts, 1,446 GB, a token reads 25.8. So a small fast disk
# is best used for a copy of the trunk. This chapter makes that copy, proves it equal to the checkpoint, and reads from
# it. At the end you can say what is left behind by a copy that is interrupted at any moment, and why the next one goes
# on from there.
#
# > **Without it:** a token reads for 135 s<!--claim slow--> from a disk of 1 GB/s.
# >
# > **With it:** for 41 s,<!--claim fast--> with the trunk, 108.8 GB, on a second disk of 7 GB/s.
#
# Needs chapters [5.7] (the checkpoint) and [5.18] (the plan). Runs in seconds. Makes `k3lib.pack`.
#
# [5.18 The dial: bytes to plan](18_plan.ipynb) ·
# [contents](../README.md) ·
# [5.20 A sequence saved and loaded](20_state.ipynb)
#
# [5.7]: 07_checkpoint.ipynb
# [5.18]: 18_plan.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "files")

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
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import BinaryIO, NamedTuple

from k3lib.checkpoint import Checkpoint
from k3lib.disk import Files, page_buffer, page_padded
from k3lib.fileio import CheckpointError, ResourceError, UsageError, given_path, require_threads, shown_value, writing
from k3lib.header import Extent, header_bytes
from k3lib.system import data_runs, lock_file, open_files_shortage, sync_folder
from k3lib.tensors import is_matrix, layer_of

# %% [markdown]
# ## 5.19.1 What it is worth
#
# Seconds of reading for a token, nothing pinned or cached, when the checkpoint lies on a disk of 1 GB/s and the trunk
# on a disk of its own: 25.8 GB at 1 GB/s, and 108.8 GB at the rate of the second disk.

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
print(f"both at 1 GB/s: {seconds[0]:.0f} s")  # claim slow
print(f"the trunk at 7 GB/s: {25.8 + 108.8 / 7:.0f} s")  # claim fast


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
# gets its own name. From this order follow three promises:
#
# - a file that has its final name is equal to the checkpoint;
# - a run after an interrupted one goes on where that one stopped: it compares a file that has its final name, and does
#   not write it;
# - a folder in which a file is missing is refused as a checkpoint, because the names say how many there are.
#
# The other name is a new one in every run. So two runs never write to one file. And the final name is given by a hard
# link, which fails if there is a file of that name by then; a rename would replace it. The run that comes second to a
# name compares the file of the first, as it does with every file that it finds.

# %% tags=["export"]
def _pack_file(checkpoint: Checkpoint, file: _TrunkFile, progress: Callable[[int], object]) -> bool:
    "Write a file unless it exists, and compare it. Was it written? Raises CheckpointError if it differs."
    part, files = f"{file.path}.{uuid.uuid4().hex}.part", Files(checkpoint.fingerprints)
    try:
        found = os.path.exists(file.path)
        if not found:
            _write_file(files, file, part)
        _compare_file(files, file, file.path if found else part, checkpoint, progress)
        files.check()
        files.close()  # a file that is open gets no other name on Windows
        if found or _name_file(part, file.path):
            return not found
        return _pack_file(checkpoint, file, lambda nbytes: None)
    finally:
        with suppress(FileNotFoundError):  # half a file is of no use to the next run
            os.unlink(part)
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
def _name_file(part: str, path: str) -> bool:
    "Give the complete file `part` the name `path`. False, and no change, if there is a file `path` already."
    try:
        os.link(part, path)
        os.unlink(part)
    except FileExistsError:
        return False
    except FileNotFoundError:
        raise OSError(errno.ENOENT, f"{part}: another program has removed it before it got its name") from None
    except OSError:  # this file system has no hard links
        os.replace(part, path)
    sync_folder(os.path.dirname(path))
    return True


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


# %% [markdown]
# ## 5.19.5 Two at once
#
# Two runs into one folder would be right, and do all work twice. So a run holds a lock ([5.1.4]) on a file in the
# folder, and a second one waits until the first has ended. Then it compares what it finds, as any later run does. If
# the first was killed, its lock has ended with it, and the second goes on.
#
# A run that holds the lock also knows that nobody writes the unnamed files that lie in the folder: they are left over
# from a run that was killed, and are removed. Without a lock, on Windows or on a network file system that has none,
# they stay.
#
# [5.1.4]: 01_system.ipynb#5.1.4-A-name-that-survives-a-power-cut

# %% tags=["export"]
_LOCK = ".packing"  # the name of the file that is locked
_log = logging.getLogger("k3lib")  # warnings go to stderr unless a program arranges otherwise


@contextmanager
def _alone(folder: str) -> Iterator[bool]:
    "A `with` block in which no other run packs into `folder`. False if this file system has no locks."
    path, file, told = os.path.join(folder, _LOCK), None, False
    locked: bool | None = False
    try:
        with suppress(OSError):  # a folder that cannot be written to: its files can be compared all the same
            while locked is False:
                file = open(path, "ab", buffering=0)
                locked = _locked(file.fileno(), path)
                if locked is False:
                    file.close()
                    if not told:
                        _log.warning("%s: another process packs into this folder; waiting until it has ended", folder)
                    told = True
                    time.sleep(0.1)
        yield locked is True
    finally:
        try:
            if locked is not False:
                with suppress(OSError):  # Windows removes no file that is open
                    os.unlink(path)
        finally:
            if file is not None:
                file.close()


def _locked(fd: int, path: str) -> bool | None:
    "Has this call locked `fd`, the file at `path`? False too if the one who had locked it has removed it since."
    locked = lock_file(fd)
    with suppress(FileNotFoundError):
        return locked and os.path.samestat(os.fstat(fd), os.stat(path))
    return False


# %% tags=["export"]
def _remove_parts(files: list[_TrunkFile]) -> None:
    "Remove the files without a name that a run has left which was killed."
    folder, names = os.path.dirname(files[0].path), {os.path.basename(file.path) for file in files}
    for name in os.listdir(folder):
        whole, dot, rest = name.partition(".safetensors.")
        if rest.endswith("part") and f"{whole}.safetensors" in names:
            os.unlink(os.path.join(folder, name))


def checked_names(names: Iterable[str]) -> list[str]:
    "The names of tensors as a list. Raises UsageError unless they are one or more, each a str."
    found = [] if isinstance(names, (str, bytes)) or not isinstance(names, Iterable) else list(names)
    if not found or not all(isinstance(name, str) for name in found):
        raise UsageError(f"names is {shown_value(names)}: a list of the names of tensors is needed")
    return found


# %% tags=["export"]
def pack(checkpoint: Checkpoint, names: Iterable[str], folder: str | os.PathLike,
         progress: Callable[[int], object] | None = None) -> int:
    """Copy the tensors `names`, in this order, to safetensors files in `folder`: one for each layer, one for the rest.

    Returns how many files were written. Holes stay holes. A file gets its name only when it is on the disk and equal to
    the checkpoint. So a run that was interrupted can be repeated: files that have their names are compared, not
    written. If another run packs into the folder, this one waits for its end. progress(nbytes) is called for each
    tensor done. Raises CheckpointError if the tensors of a layer do not lie side by side, if a file is of another
    checkpoint, or if the folder holds other safetensors files; OSError if the disk is full; UsageError for an argument
    of a wrong type.
    """
    folder, names = given_path("folder", folder), checked_names(names)
    if not isinstance(checkpoint, Checkpoint):
        raise UsageError(f"checkpoint is {shown_value(checkpoint)}: a Checkpoint is needed")
    for layer, why in checkpoint.contiguity().broken_layers.items():
        if any(layer_of(name) == layer for name in names):
            raise CheckpointError(f"{checkpoint.path}: layer {layer} is not in one piece: {why}; it can be streamed, "
                                  "but not packed")
    require_threads(1, "a watch over reads")  # before there is a folder
    os.makedirs(folder, exist_ok=True)
    files = _trunk_files(checkpoint, names, str(folder))
    with _alone(str(folder)) as alone:
        found = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
        if strays := found - {os.path.basename(file.path) for file in files}:
            raise CheckpointError(f"{folder}: holds {min(strays)}, "
                                  f"which is no part of a packed trunk of {len(files)} files")
        if alone:
            _remove_parts(files)
        missing = [extent for file in files if not os.path.exists(file.path) for _, extent, _ in file.tensors]
        need, free = sum(map(_data_bytes, missing)), shutil.disk_usage(folder).free
        if need > free:
            raise OSError(errno.ENOSPC, f"{folder}: {need} bytes are still to be written, but {free} are free")
        return sum(_pack_file(checkpoint, file, progress or (lambda nbytes: None)) for file in files)


# %% [markdown]
# ## 5.19.6 Read from both
#
# Reading takes one class that looks a tensor up in the folder first. The folder could be of another checkpoint with the
# same shapes. So vectors are compared whole, and of every matrix the first and the last row. A fine-tuned model differs
# from its base model there: mostly in all rows, and in the last ones if it has only learned new tokens.
#
# More is not compared when a model is loaded. To find one changed byte in the middle of a matrix, all 108.8 GB would
# have to be read from both disks, or from one of them and hashed, before the first token. Sizes and times of files say
# little: a copy to another disk changes the times of good files. So the comparison of every byte is a command of its
# own, `k3 verify MODEL --trunk DIR`, which calls `verify_packed`.

# %% tags=["export"]
class Packed:
    """A checkpoint of which the tensors `names` are read from `folder`, which pack() has filled.

    `fingerprints`: those of the files of both. Raises FileNotFoundError if there is no such folder, CheckpointError if
    it is incomplete or packed from another checkpoint: dtypes and shapes are compared, vectors, and the first and the
    last row of every matrix. Raises ResourceError if this process may not have so many files open.
    """

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str], folder: str | os.PathLike):
        self.checkpoint, self.packed = checkpoint, Checkpoint(given_path("folder", folder))
        self.fingerprints = checkpoint.fingerprints | self.packed.fingerprints
        if shortage := open_files_shortage(len(self.fingerprints)):
            raise ResourceError(f"{folder}: {shortage}")
        files = Files(self.fingerprints)
        try:
            for name in names:
                copy, source = self.extent(name), checkpoint.extent(name)
                if (copy.file == source.file or copy[2:] != source[2:]
                        or self._sample(files, name, copy) != self._sample(files, name, source)):
                    raise CheckpointError(f"{folder}: {name} is missing or not that of {checkpoint.path}: "
                                          "pack this checkpoint again")
        finally:
            files.close()

    @staticmethod
    def _sample(files, name, extent):
        "The bytes of a vector, or of the first and the last row of a matrix."
        if not is_matrix(name, extent):
            return files.array(extent, "other").tobytes()
        return b"".join(files.array(extent, "other", row, 1).tobytes() for row in (0, extent.shape[0] - 1))

    def extent(self, name: str) -> Extent:
        "Where a tensor lies: in the packed folder if it is there, else in the checkpoint."
        return (self.packed if name in self.packed else self.checkpoint).extent(name)


# %% tags=["export"]
def verify_packed(checkpoint: Checkpoint, names: Iterable[str], folder: str | os.PathLike,
                  show: Callable[[str], object] = lambda line: None,
                  progress: Callable[[int], object] = lambda nbytes: None) -> dict[str, str]:
    """Compare every byte of the tensors `names` in `folder`, which pack() has filled, with the checkpoint.

    Returns {file: a line that names the first tensor in it that differs}, empty if all are equal. `show` is called with
    each line when it is found, progress(nbytes) for each tensor. Raises FileNotFoundError if there is no such folder,
    UsageError if it is the checkpoint's own, CheckpointError if a file of either is missing, cannot be read, or changes
    meanwhile.
    """
    wrong: dict[str, str] = {}
    folder, names = given_path("folder", folder), checked_names(names)
    with Checkpoint(folder) as packed:
        if os.path.samefile(folder, checkpoint.path):
            raise UsageError(f"{folder}: is the checkpoint itself, expected the folder of its packed trunk")
        files = Files(checkpoint.fingerprints | packed.fingerprints)
        try:
            for name in names:
                source = checkpoint.extent(name)
                copy = packed.extent(name) if name in packed else None
                file = str(folder) if copy is None else copy.file
                if file not in wrong and (copy is None or copy[2:] != source[2:] or not _same(files, source, copy)):
                    wrong[file] = f"{file}: {name} is missing or differs from that of {checkpoint.path}"
                    show(wrong[file])
                progress(source.nbytes)
            files.check()
        finally:
            files.close()
    return wrong


# %% [markdown]
# ## 5.19.7 Interrupted, and gone on with
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
# ## 5.19.8 The gate
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
# The folder of another model is refused, though its names and shapes are the same: here the first weight of a matrix
# differs. A weight in the middle of it is seen only where every byte is compared.

# %%
victim = folder / "model-00003-of-000014.safetensors"
matrix = Checkpoint(folder).extent("language_model.model.layers.2.self_attn.q_proj.weight")
good = victim.read_bytes()
for where, at in (("first weight", matrix.offset), ("in the middle", matrix.offset + matrix.nbytes // 2)):
    victim.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1:])
    try:
        Packed(checkpoint, names, folder)
        said = "accepted"
    except CheckpointError as error:
        said = str(error).replace(scratch.name, "...").replace(str(FOLDER), "MODEL")
    found = verify_packed(checkpoint, names, folder)
    print(f"{where}: loaded: {said}\n{' ' * len(where)}  compared: {len(found)} file differs")
    assert [*found] == [str(victim)] and (said == "accepted") == (where != "first weight")
victim.write_bytes(good)
assert not verify_packed(checkpoint, names, folder)

# %% [markdown]
# Two runs at once, in two threads, into a new folder. The second waits and compares; each file was written once.

# %%
from concurrent.futures import ThreadPoolExecutor

logging.disable(logging.WARNING)  # the second run's line, that it waits
other = Path(scratch.name) / "other"
with ThreadPoolExecutor(2) as pool:
    list(pool.map(lambda _: pack(checkpoint, names, other), range(2)))
logging.disable(logging.NOTSET)
assert not verify_packed(checkpoint, names, other)
print("two at once:", len(list(other.iterdir())), "files, all equal to the checkpoint")
scratch.cleanup()

# %% [markdown]
# ## Summary
#
# - The trunk is a fourteenth of the checkpoint and four fifths of the bytes of a token, so it is the part to copy to a
#   fast disk.
# - Write, flush, compare, name, in this order: then a name means that the file is right, whenever a run ends, and
#   however many run at once.
# - A packed trunk is a checkpoint of its own. Two rows of every matrix are compared before it is used, and every byte
#   by `k3 verify MODEL --trunk DIR`.
#
# ## Exercises
#
# 1. A power failure comes between `os.fsync` and `os.link`, and another between `os.link` and `sync_folder`. What does
#    the next run find in each case?
# 2. Replace `os.link` by `os.replace`, take the lock away, and let two runs pack two checkpoints into one folder. What
#    can the folder hold in the end?
# 3. Where does the curve of [5.19.1] go if half of the trunk is pinned?
#
# Next: [5.20 A sequence saved and loaded](20_state.ipynb) saves what a model has read, so that no token is read twice.
#
# [5.19.1]: #5.19.1-What-it-is-worth
