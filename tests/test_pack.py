"k3lib.pack: a packed trunk has the checkpoint's bytes or is refused, whenever the packing was interrupted."
import errno
import os
import shutil
from collections import namedtuple
from itertools import count

import numpy as np
import pytest
from common import MODEL, same
from interrupts import at_every_moment
from matrices import write_model

from k3lib import pack as pack_module
from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.disk import PAGE, Files
from k3lib.fileio import CheckpointError
from k3lib.pack import Packed, pack
from k3lib.system import data_runs
from k3lib.tensors import forward_order

PREFIX = "language_model.model.layers."


def layered(seed=0, layers=3):
    "A checkpoint's tensors and the order of a forward pass: other than in the file, with a head, without the table."
    rng, tensors = np.random.default_rng(seed), {}
    for L in range(layers):
        for short, shape in (("b", (40, 50)), ("a", (70, 33)), ("norm", (50,))):
            tensors[f"{PREFIX}{L}.{short}"] = "BF16", rng.integers(0x3c00, 0x4100, shape).astype(np.uint16)
        tensors[f"{PREFIX}{L}.bias"] = "F32", rng.standard_normal(7).astype(np.float32)
    tensors["table"] = tensors["head"] = "BF16", rng.integers(0x3c00, 0x4100, (60, 50)).astype(np.uint16)
    order = [f"{PREFIX}{L}.{short}" for L in range(layers) for short in ("norm", "a", "bias", "b")] + ["head"]
    return tensors, order


def check(source, names, tensors):
    "Every tensor as it is read through `source` is the one that was written. The names of the files read from."
    files = Files(source.fingerprints)
    for name in names:
        same(name, files.array(source.extent(name), "trunk"), tensors[name][1])
    files.check()
    files.close()
    return set(files.access())


def flip(path, place, bit=1):
    "One bit of a file, counted from its end."
    with open(path, "r+b") as file:
        file.seek(place, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(place, os.SEEK_END)
        file.write(bytes([byte ^ bit]))


def interrupted(checkpoint, order, folder, after):
    "Pack until `after` tensors are done, then an interrupt."
    done = []

    def stop(nbytes):
        done.append(nbytes)
        if len(done) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, order, folder, stop)


def test_a_packed_trunk_has_the_same_bytes(tmp_path):
    "In the order of a pass, readable as a checkpoint of its own; a tensor that is not in it comes from where it was."
    tensors, order = layered()
    checkpoint, told = write_model(tmp_path / "m", tensors), []
    pack(checkpoint, order, tmp_path / "packed", told.append)
    assert told == [checkpoint.extent(name).nbytes for name in order]
    packed = Checkpoint(tmp_path / "packed")
    assert list(packed.names()) == order and len(packed.files) == 4
    for name in order:
        same(name, packed.raw(name), tensors[name][1])
    source = Packed(checkpoint, order, tmp_path / "packed")
    assert check(source, order, tensors) == {f"model-0000{i}-of-000004.safetensors" for i in range(1, 5)}
    assert check(source, ["table"], tensors) == {"model.safetensors"}


def test_the_embedded_model_packs(tmp_path):
    checkpoint, order = Checkpoint(MODEL), list(forward_order(read_config(MODEL)))
    pack(checkpoint, order, tmp_path / "packed")
    packed = Checkpoint(tmp_path / "packed")
    assert len(packed.files) == 14 and list(packed.names()) == order
    for name in order:
        same(name, packed.raw(name), checkpoint.raw(name))
    assert all(name.endswith(".safetensors") for name in os.listdir(tmp_path / "packed"))


@pytest.mark.parametrize("tensor", range(13))
def test_an_interrupted_packing_is_gone_on_with(tmp_path, tensor):
    "Files that were done stay as they are, half a file is not left; until all are there the folder is no checkpoint."
    tensors, order = layered()
    checkpoint, folder = write_model(tmp_path / "m", tensors), tmp_path / "packed"
    interrupted(checkpoint, order, folder, tensor + 1)
    done = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(done) == tensor // 4, f"{len(done)} files after {tensor + 1} tensors"
    with pytest.raises(CheckpointError):
        Packed(checkpoint, order, folder)
    pack(checkpoint, order, folder)
    assert all(path.stat().st_mtime_ns == when for path, when in done.items()), "a complete file was written again"
    assert len(list(folder.iterdir())) == 4
    check(Packed(checkpoint, order, folder), order, tensors)


def test_an_interrupt_at_any_moment_leaves_no_half_file(tmp_path):
    "Also between the comparison of a file and its name. What has a name is right, and packing goes on from it."
    tensors, order = layered(layers=1)
    checkpoint, folders = write_model(tmp_path / "m", tensors), count()

    def check_folder(folder):
        assert not list(folder.glob("*.part"))
        pack(checkpoint, order, folder)

    at_every_moment(pack_module.__file__, lambda: tmp_path / f"t{next(folders)}",
                    lambda folder: pack(checkpoint, order, folder), check_folder, least=100)


def test_half_a_file_of_a_run_that_died_is_written_again(tmp_path):
    "After a power failure nobody has tidied up."
    tensors, order = layered()
    checkpoint, folder = write_model(tmp_path / "m", tensors), tmp_path / "packed"
    interrupted(checkpoint, order, folder, 6)
    (folder / "model-00002-of-000004.safetensors.part").write_bytes(b"x" * 100_000)
    pack(checkpoint, order, folder)
    assert all(path.suffix == ".safetensors" for path in folder.iterdir())
    check(Packed(checkpoint, order, folder), order, tensors)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="the file behind a descriptor is found in /proc")
def test_a_file_is_compared_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    tensors, order = layered()
    checkpoint, folder = write_model(tmp_path / "m", tensors), tmp_path / "packed"
    really = os.fsync

    def spoil(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        if "00002" in path:
            flip(path, -9)
        really(fd)

    monkeypatch.setattr(os, "fsync", spoil)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-000004.safetensors.\w+.part: {PREFIX}1.b differs"):
        pack(checkpoint, order, folder)
    assert os.listdir(folder) == ["model-00001-of-000004.safetensors"]


def test_another_checkpoint_s_packed_trunk_is_refused(tmp_path):
    "The same names and shapes with other values, when packing goes on and when the folder is used."
    (tensors, order), (others, _) = layered(), layered(1)
    checkpoint, other = write_model(tmp_path / "m", tensors), write_model(tmp_path / "o", others)
    folder = tmp_path / "packed"
    pack(other, order, folder)
    with pytest.raises(CheckpointError, match=rf"model-00001-of-000004.safetensors: {PREFIX}0.norm differs from"):
        pack(checkpoint, order, folder)
    words = rf"packed: {PREFIX}0.norm is missing or not that of .*m: pack this checkpoint again"
    with pytest.raises(CheckpointError, match=words):
        Packed(checkpoint, order, folder)
    with pytest.raises(CheckpointError, match=r"packed: table is missing"):
        Packed(other, [*order, "table"], folder)
    with pytest.raises(FileNotFoundError):
        Packed(checkpoint, order, tmp_path / "nowhere")


def test_a_damaged_file_is_found_when_packing_goes_on(tmp_path):
    tensors, order = layered()
    checkpoint, path = write_model(tmp_path / "m", tensors), tmp_path / "packed" / "model-00003-of-000004.safetensors"
    pack(checkpoint, order, path.parent)
    flip(path, -1, 128)
    with pytest.raises(CheckpointError, match=rf"model-00003-of-000004.safetensors: {PREFIX}2.b differs from"):
        pack(checkpoint, order, path.parent)
    assert path.exists(), "a file that has its name was removed"
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(CheckpointError, match=r"model-00003-of-000004.safetensors: header or size differs from"):
        pack(checkpoint, order, path.parent)


def test_a_folder_of_something_else_is_refused(tmp_path):
    "The checkpoint's own, above all: packing must not write between its shards."
    tensors, order = layered()
    checkpoint = write_model(tmp_path / "m", tensors)
    with pytest.raises(CheckpointError, match="holds model.safetensors, which is no part of a packed trunk of 4 files"):
        pack(checkpoint, order, tmp_path / "m")
    assert os.listdir(tmp_path / "m") == ["model.safetensors"]


def test_a_layer_that_does_not_lie_side_by_side_is_named(tmp_path):
    "It streams as well as any other; but it is not packed."
    tensors, order = layered()
    names = list(tensors)
    names.insert(5, names.pop(names.index("table")))
    checkpoint = write_model(tmp_path / "m", {name: tensors[name] for name in names})
    words = "layer 1 is not in one piece: table lies inside its run in .*; it can be streamed, but not packed"
    with pytest.raises(CheckpointError, match=words):
        pack(checkpoint, order, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_holes_stay_holes(tmp_path):
    "A matrix of nothing but zeros takes no blocks in the copy, as in the original; the bytes are the same."
    tensors, order = layered()
    big = np.zeros((4096, 1024), np.uint16)
    big[1500, 3:9] = 0x4000
    tensors[f"{PREFIX}2.b"] = "BF16", big
    write_model(tmp_path / "m", tensors)
    path = tmp_path / "m" / "model.safetensors"
    data = path.read_bytes()
    with open(path, "wb") as file:
        file.truncate(len(data))
        for at in range(0, len(data), PAGE):
            if any(data[at:at + PAGE]):
                file.seek(at)
                file.write(data[at:at + PAGE])
        os.fsync(file.fileno())
    with open(path, "rb") as file:
        if sum(end - begin for begin, end in data_runs(file.fileno(), 0, len(data))) > 1 << 20:
            pytest.skip("this file system knows no holes")
    checkpoint = Checkpoint(tmp_path / "m")  # of the file as it is now
    pack(checkpoint, order, tmp_path / "packed")
    copy = (tmp_path / "packed" / "model-00003-of-000004.safetensors").stat()
    assert copy.st_size > 8 << 20 and copy.st_blocks * 512 < 200_000, f"{copy.st_blocks * 512} bytes on the disk"
    check(Packed(checkpoint, order, tmp_path / "packed"), order, tensors)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    tensors, order = layered()
    checkpoint = write_model(tmp_path / "m", tensors)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("usage", "free")(1000))
    with pytest.raises(OSError, match="bytes are still to be written, but 1000 are free") as caught:
        pack(checkpoint, order, tmp_path / "packed")
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path / "packed") == []


def test_room_is_needed_only_for_what_is_missing(tmp_path, monkeypatch):
    tensors, order = layered()
    checkpoint, folder = write_model(tmp_path / "m", tensors), tmp_path / "packed"
    pack(checkpoint, order, folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("usage", "free")(1000))
    pack(checkpoint, order, folder)
