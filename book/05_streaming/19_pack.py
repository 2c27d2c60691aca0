# %% [markdown]
# # 5.19 The trunk on a faster disk
#
# [5.18 The dial: bytes to plan](18_plan.ipynb) ·
# [contents](../README.md) ·
# [5.20 A sequence saved and loaded](20_state.ipynb)

# %% tags=["export"]
import errno
import os
import shutil
from itertools import groupby
from k3lib.system import data_runs, sync_folder
from k3lib.fileio import CheckpointError, writing
from k3lib.header import header_bytes
from k3lib.checkpoint import Checkpoint
from k3lib.disk import Files, page_buffer, page_padded

# %% tags=["export"]
COPY_BYTES = 1 << 20  # bytes copied or compared at a time


def _data_bytes(extent):
    with open(extent.file, "rb") as file:
        return sum(end - begin for begin, end in data_runs(file.fileno(), extent.offset, extent.offset + extent.nbytes))


def _copy_spans(begin, end):
    return ((at, min(COPY_BYTES, end - at)) for at in range(begin, end, COPY_BYTES))


def _copy(files, extent, target, offset):
    "Write a tensor's data to byte `offset` of the file `target`, but for the holes."
    buffer = page_buffer(page_padded(COPY_BYTES))
    with open(extent.file, "rb") as source:
        for begin, end in data_runs(source.fileno(), extent.offset, extent.offset + extent.nbytes):
            target.seek(offset + begin - extent.offset)
            for at, n in _copy_spans(begin - extent.offset, end - extent.offset):
                start = files.read(buffer, extent, at, n, "other")
                target.write(buffer[start:start + n])


def _same(files, a, b):
    "True if the extents `a` and `b` hold the same bytes."
    left, right = page_buffer(page_padded(COPY_BYTES)), page_buffer(page_padded(COPY_BYTES))
    for at, n in _copy_spans(0, a.nbytes):
        i, j = files.read(left, a, at, n, "other"), files.read(right, b, at, n, "other")
        if left[i:i + n].tobytes() != right[j:j + n].tobytes():
            return False
    return True


# %% [markdown]
# A file is written under another name, brought down to the disk, compared with the checkpoint byte by byte, and only
# then renamed. So a file that has its name is right, a run that was broken off goes on where it stopped, and a folder
# that is not complete is no checkpoint.

# %% tags=["export"]
def pack(checkpoint, walk, folder, progress=None):
    """Copy the tensors of `walk`, in its order, to safetensors files in `folder`, one a layer and one for the rest; holes stay holes.

    A file gets its name only when it is on the disk and equal to the checkpoint, so a run that was broken off can be taken up
    again: a file that is there is compared, not written. `progress` is shown the bytes of each tensor done. Raises
    CheckpointError if a layer does not lie in one piece or a file is of another checkpoint, OSError if the disk is full.
    """
    for layer, why in checkpoint.contiguity().broken_layers.items():
        raise CheckpointError(f"{checkpoint.path}: layer {layer} is not in one piece: {why}; it streams, but it is not packed")
    os.makedirs(folder, exist_ok=True)
    groups = [list(names) for _, names in groupby(walk, _layer)]
    paths = [os.path.join(folder, f"model-{i:05}-of-{len(groups):06}.safetensors") for i in range(1, len(groups) + 1)]
    strays = {name for name in os.listdir(folder) if name.endswith(".safetensors")} - {os.path.basename(path) for path in paths}
    if strays:
        raise CheckpointError(f"{folder}: holds {min(strays)}, which is no part of a packed trunk of {len(groups)} files")
    missing = [checkpoint.extent(name) for path, names in zip(paths, groups) if not os.path.exists(path) for name in names]
    need, free = sum(map(_data_bytes, missing)), shutil.disk_usage(folder).free
    if need > free:
        raise OSError(errno.ENOSPC, f"{folder}: {need} bytes are still to be written, but {free} are free")
    for path, names in zip(paths, groups):
        _pack_file(checkpoint, names, path, progress or (lambda nbytes: None))


def _layer(name):
    "The layer a tensor of the walk belongs to, or None."
    return name.split(".layers.")[1].split(".")[0] if ".layers." in name else None


def _pack_file(checkpoint, names, path, progress):
    extents = [checkpoint.extent(name) for name in names]
    head = header_bytes([(name, e.dtype, e.shape) for name, e in zip(names, extents)])
    offsets = [len(head) + sum(e.nbytes for e in extents[:i]) for i in range(len(extents))]
    there, part, files = os.path.exists(path), path + ".part", Files(checkpoint.fingerprints)
    try:
        if not there:
            _write_file(files, extents, head, offsets, part)
        packed = path if there else part
        with open(packed, "rb") as file:
            good = file.read(len(head)) == head and os.fstat(file.fileno()).st_size == offsets[-1] + extents[-1].nbytes
        for name, extent, offset in zip(names, extents, offsets):
            if not good or not _same(files, extent, extent._replace(file=packed, offset=offset)):
                raise CheckpointError(f"{packed}: {name if good else 'header or size'} is not as in {checkpoint.path}: another "
                                      "checkpoint's, or damaged; remove the file to have it written again")
            progress(extent.nbytes)
        files.check()
    except BaseException:
        if not there and os.path.exists(part):  # half a file is of no use to the next run
            os.unlink(part)
        raise
    finally:
        files.close()
    if not there:
        os.replace(part, path)
        sync_folder(os.path.dirname(path))


def _write_file(files, extents, head, offsets, part):
    "Header and tensors to `part`, and down to the disk."
    with writing(part) as target:
        target.write(head)
        target.truncate(offsets[-1] + extents[-1].nbytes)
        for extent, offset in zip(extents, offsets):
            _copy(files, extent, target, offset)
        target.flush()
        os.fsync(target.fileno())


# %% [markdown]
# Reading from it takes one class that looks a tensor up in the folder first. The folder could be of another checkpoint
# with the same shapes; the first row of every tensor tells.

# %% tags=["export"]
class Packed:
    """A checkpoint whose `walk` is read from a folder that pack() has filled; for Trunk, in the checkpoint's place.

    Raises FileNotFoundError if there is no such folder, CheckpointError if it is incomplete or packed from another checkpoint:
    dtypes, shapes and the first row of every tensor are compared.
    """

    def __init__(self, checkpoint, walk, folder):
        self.checkpoint, self.packed = checkpoint, Checkpoint(folder)
        self.fingerprints = checkpoint.fingerprints | self.packed.fingerprints
        files = Files(self.fingerprints)
        try:
            for name in walk:
                here, there = self.extent(name), checkpoint.extent(name)
                if here.file == there.file or here[2:] != there[2:] or self._row(files, here) != self._row(files, there):
                    raise CheckpointError(f"{folder}: {name} is missing or not that of {checkpoint.path}: pack this checkpoint again")
        finally:
            files.close()

    @staticmethod
    def _row(files, extent):
        return files.array(extent, "other", 0, 1).tobytes()

    def extent(self, name):
        "Extent of a tensor: in the packed folder if it is there."
        return (self.packed if name in self.packed else self.checkpoint).extent(name)


# %%
folder = scratch / "packed"
walk = [name for name in checkpoint.names() if ".layers." in name and ".experts." not in name]
done = []


def stop_after_five(nbytes):
    done.append(nbytes)
    if len(done) == 60:
        raise KeyboardInterrupt


try:
    pack(checkpoint, walk, folder, stop_after_five)
except KeyboardInterrupt:
    print("broken off:", len(list(folder.glob("*.safetensors"))), "of 13 files have their names")
try:
    Packed(checkpoint, walk, folder)
except CheckpointError as error:
    print("refused:", str(error).split("packed: ")[1])
pack(checkpoint, walk, folder)
source = Packed(checkpoint, walk, folder)
assert all((Checkpoint(folder).raw(name) == checkpoint.raw(name)).all() for name in walk)
print("taken up again:", len(Checkpoint(folder)), "tensors in", len(Checkpoint(folder).files), "files, the same bytes: True")

# %%
files = Files()
trunk = Trunk(source, WALK, frozenset(), {}, files, lambda name: "trunk", 3, 20_000, 2)
trunk.begin()
streamed = np.concatenate([linear(trunk.take(name), ramp(source.extent(name).shape[1])).ravel() for name in MATRICES])
assert streamed.tobytes() == expected[:len(streamed)].tobytes()
print("read from", sorted(files.how()))
trunk.close()
files.close()
shutil.rmtree(scratch)
