"k3lib.pack: a packed trunk has the checkpoint's bytes or is refused, whenever the packing was interrupted."
import errno
import json
import os
import shutil
import threading
import time
from collections import namedtuple
from itertools import count

import numpy as np
import pytest
from common import MODEL, k3, refused, same, until
from interrupts import at_every_moment
from matrices import write_model

from k3lib import pack as pack_module
from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.disk import PAGE, Files
from k3lib.fileio import CheckpointError, UsageError
from k3lib.pack import Packed, pack, verify_packed
from k3lib.system import data_runs, lock_file
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


# Two runs at once

def held(folder):
    "A lock on the folder, as another process that packs into it has it: the open file."
    file = open(folder / ".packing", "ab")
    assert lock_file(file.fileno())
    return file


def test_a_run_waits_for_the_one_that_holds_the_lock(tmp_path, caplog):
    "And goes on when the lock ends, with the file that was locked there or gone; leftovers are removed then."
    tensors, order = layered()
    checkpoint = write_model(tmp_path / "m", tensors)
    for name, remove in ("there", False), ("gone", True):
        folder = tmp_path / name
        folder.mkdir()
        other, done = held(folder), []
        thread = threading.Thread(target=lambda: done.append(pack(checkpoint, order, folder)))
        thread.start()
        until(lambda: caplog.messages)
        time.sleep(0.3)
        assert not done and os.listdir(folder) == [".packing"]
        (folder / "model-00002-of-000004.safetensors.ab12.part").write_bytes(b"x")
        if remove:
            os.unlink(folder / ".packing")
        other.close()
        thread.join(60)
        assert done and len(os.listdir(folder)) == 4
        assert caplog.messages == [f"{folder}: another process packs into this folder; waiting until it has ended"]
        caplog.clear()
        check(Packed(checkpoint, order, folder), order, tensors)


@pytest.mark.parametrize("many", [2, 5])
@pytest.mark.parametrize("locks", [True, False], ids=["with locks", "without locks"])
def test_runs_at_once_write_every_file_once(tmp_path, monkeypatch, many, locks):
    "Also where the file system has no locks: then each run writes files of its own, and the first one gets the name."
    tensors, order = layered()
    checkpoint, folder, written, errors = write_model(tmp_path / "m", tensors), tmp_path / "packed", [], []
    barrier, really = threading.Barrier(many), pack_module._write_file

    def write(files, file, path):
        if not locks:
            barrier.wait(60)  # all of them have seen that the file is not there
        written.append(path)
        really(files, file, path)

    def run():
        try:
            pack(checkpoint, order, folder)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(pack_module, "_write_file", write)
    if not locks:
        monkeypatch.setattr(pack_module, "lock_file", lambda fd: None)
    threads = [threading.Thread(target=run) for _ in range(many)]
    [thread.start() for thread in threads], [thread.join(100) for thread in threads]
    assert not errors and len(written) == (4 if locks else 4 * many) and len({*written}) == len(written)
    assert len(os.listdir(folder)) == 4
    check(Packed(checkpoint, order, folder), order, tensors)


def test_two_checkpoints_at_once_without_locks_never_share_a_folder(tmp_path, monkeypatch):
    "The first file that gets its name decides; the other run is refused, whatever it has written."
    (tensors, order), (others, _) = layered(), layered(1)
    checkpoints = [write_model(tmp_path / "m", tensors), write_model(tmp_path / "o", others)]
    barrier, really, errors = threading.Barrier(2), pack_module._name_file, []

    def name(part, path):
        if "00001" in path:
            barrier.wait(60)
        return really(part, path)

    def run(checkpoint):
        try:
            pack(checkpoint, order, tmp_path / "packed")
        except CheckpointError as error:
            errors.append(str(error))

    monkeypatch.setattr(pack_module, "_name_file", name)
    monkeypatch.setattr(pack_module, "lock_file", lambda fd: None)
    threads = [threading.Thread(target=run, args=(checkpoint,)) for checkpoint in checkpoints]
    [thread.start() for thread in threads], [thread.join(100) for thread in threads]
    assert len(errors) == 1 and "model-00001-of-000004.safetensors: " in errors[0] and "differs from" in errors[0]
    winner = checkpoints["/m:" in errors[0]]
    assert not verify_packed(winner, order, tmp_path / "packed") and len(os.listdir(tmp_path / "packed")) == 4


def test_a_file_system_without_hard_links(tmp_path, monkeypatch):
    tensors, order = layered()
    checkpoint = write_model(tmp_path / "m", tensors)

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    pack(checkpoint, order, tmp_path / "packed")
    assert len(os.listdir(tmp_path / "packed")) == 4
    check(Packed(checkpoint, order, tmp_path / "packed"), order, tensors)


def test_a_half_file_that_another_program_removes_is_told(tmp_path, monkeypatch):
    tensors, order = layered()
    checkpoint, really = write_model(tmp_path / "m", tensors), pack_module._name_file
    monkeypatch.setattr(pack_module, "_name_file", lambda part, path: os.unlink(part) or really(part, path))
    with pytest.raises(OSError, match=r"00001-of-000004.safetensors.\w+.part: another program has removed it before"):
        pack(checkpoint, order, tmp_path / "packed")
    assert os.listdir(tmp_path / "packed") == []


# Every byte

def test_a_changed_byte_anywhere_is_found_when_every_byte_is_compared(tmp_path):
    "The first and the last row of a matrix, and any element of a vector, are seen when the folder is used, too."
    tensors, order = layered()
    checkpoint, folder = write_model(tmp_path / "m", tensors), tmp_path / "packed"
    pack(checkpoint, order, folder)
    told, lines = [], []
    assert verify_packed(checkpoint, order, folder, lines.append, told.append) == {} and not lines
    assert told == [checkpoint.extent(name).nbytes for name in order]
    with Checkpoint(folder) as packed:
        places = {name: packed.extent(name) for name in order}
    for name, at, seen in ((f"{PREFIX}1.a", 0, True), (f"{PREFIX}1.a", 65, True), (f"{PREFIX}1.a", 66, False),
                           (f"{PREFIX}1.a", -67, False), (f"{PREFIX}1.a", -66, True), (f"{PREFIX}1.a", -1, True),
                           (f"{PREFIX}2.bias", 15, True), (f"{PREFIX}0.norm", -1, True), ("head", 3000, False)):
        extent = places[name]
        place = extent.offset + at % extent.nbytes - os.path.getsize(extent.file)
        flip(extent.file, place)
        wrong = verify_packed(checkpoint, order, folder, lines.append)
        assert [*wrong] == [extent.file] and lines[-1:] == [*wrong.values()] and f": {name} is missing or" in lines[-1]
        if seen:
            with pytest.raises(CheckpointError, match=f"{name} is missing or not that of"):
                Packed(checkpoint, order, folder)
        else:
            Packed(checkpoint, order, folder)
        flip(extent.file, place)
    assert verify_packed(checkpoint, [*order, "table"], folder).keys() == {str(folder)}
    with pytest.raises(UsageError, match="is the checkpoint itself"):
        verify_packed(checkpoint, order, tmp_path / "m")
    with pytest.raises(FileNotFoundError):
        verify_packed(checkpoint, order, tmp_path / "nowhere")


@pytest.mark.parametrize("call, words", [
    (lambda c, folder: pack(c, ["head"], 5), "folder is 5, expected a path"),
    (lambda c, folder: pack(c, ["head"], ""), "folder is '', expected a path"),
    (lambda c, folder: pack(c, ["head"], b"packed"), "folder is b'packed', expected a path"),
    (lambda c, folder: pack("m", ["head"], folder), "checkpoint is 'm': a Checkpoint is needed"),
    (lambda c, folder: pack(c, "head", folder), "names is 'head': a list of the names of tensors is needed"),
    (lambda c, folder: pack(c, [], folder), r"names is \[\]: a list of the names of tensors is needed"),
    (lambda c, folder: pack(c, ["head", 3], folder), r"names is \['head', 3\]: a list of the names of tensors"),
    (lambda c, folder: Packed(c, ["head"], None), "folder is None, expected a path"),
    (lambda c, folder: verify_packed(c, 7, folder), "names is 7: a list of the names of tensors is needed"),
    (lambda c, folder: verify_packed(c, ["head"], True), "folder is True, expected a path"),
])
def test_arguments_of_a_wrong_type_are_refused_by_name(tmp_path, call, words):
    tensors, _ = layered()
    with pytest.raises(UsageError, match=words):
        call(write_model(tmp_path / "m", tensors), tmp_path / "packed")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# The command

def test_verify_compares_a_packed_trunk(tmp_path):
    trunk, report = tmp_path / "t", tmp_path / "r.json"
    said = k3("pack", MODEL, trunk).stdout
    assert "14 written and 0 found" in said and "0 written and 14 found" in k3("pack", MODEL, trunk).stdout
    good = k3("verify", MODEL, "--trunk", trunk, "--json", report)
    assert good.returncode == 0 and f"{trunk}: 339 tensors of 4.6 MB, each byte equal to {MODEL}'s" in good.stdout
    assert json.loads(report.read_text())["damaged"] == {}
    victim = trunk / "model-00005-of-000014.safetensors"
    with Checkpoint(trunk) as packed:
        extent = packed.extent(f"{PREFIX}4.self_attn.q_proj.weight")
    flip(victim, extent.offset + extent.nbytes // 2 - victim.stat().st_size)
    assert k3("decode", MODEL, "--ids", "1,2", "--max-new-tokens", 1, "--trunk", trunk).returncode == 0
    bad = k3("verify", MODEL, "--trunk", trunk, "--json", report)
    refused(bad, 4, f"1 damaged: {victim}: {PREFIX}4.self_attn.q_proj.weight is missing or differs", "pack this")
    assert [*json.loads(report.read_text())["damaged"]] == [str(victim)]
    refused(k3("verify", MODEL, "--trunk", tmp_path / "nowhere"), 2, "nowhere")
    refused(k3("verify", MODEL, "--trunk", MODEL), 2, "is the checkpoint itself")
    both = k3("verify", MODEL, "--trunk", trunk, "--write-manifest")
    assert both.returncode == 2 and "not allowed with" in both.stderr
