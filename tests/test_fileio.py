"Files read whole or refused, written whole or not at all; the kinds of error and their exit codes."
import errno
import os
import stat

import pytest

from k3lib import fileio
from k3lib.checkpoint import files_in
from k3lib.disk import File
from k3lib.fileio import (
    DEPTH_MAX,
    CheckpointError,
    K3Error,
    ResourceError,
    UsageError,
    fingerprint,
    json_object,
    open_shard,
    read_exactly,
    small_file,
    whole_file,
    writing,
)


def test_exit_codes():
    assert (K3Error.exit_code, UsageError.exit_code, CheckpointError.exit_code) == (1, 2, 4)
    assert issubclass(UsageError, ValueError) and not issubclass(CheckpointError, ValueError)
    assert issubclass(UsageError, K3Error) and issubclass(CheckpointError, K3Error)


@pytest.mark.parametrize("number, kind, code", [
    (errno.EMFILE, ResourceError, 2), (errno.ENFILE, ResourceError, 2), (errno.ENOMEM, ResourceError, 2),
    (errno.EIO, CheckpointError, 4)])
def test_what_the_system_gives_too_little_of_is_no_damage(tmp_path, monkeypatch, number, kind, code):
    def refuse(*args, **more):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "f"
    path.write_bytes(b"x")
    with path.open("rb") as file:
        for name in "builtins.open", "k3lib.fileio.pread", "k3lib.disk.open_read", "k3lib.checkpoint.os.listdir":
            monkeypatch.setattr(name, refuse)
        for attempt in (lambda: open_shard(path), lambda: small_file(path, 9, CheckpointError), lambda: File(str(path)),
                        lambda: read_exactly(file, bytearray(1), 0, "f"), lambda: files_in(tmp_path)):
            with pytest.raises(kind, match=os.strerror(number)) as caught:
                attempt()
            assert type(caught.value) is kind and caught.value.exit_code == code
    monkeypatch.undo()


# Reading

@pytest.mark.parametrize("preadv", [True, False])
def test_read_exactly(tmp_path, monkeypatch, preadv):
    if not preadv:
        monkeypatch.delattr(os, "preadv", raising=False)
    monkeypatch.setattr(fileio, "MAX_READ", 3)
    path = tmp_path / "f"
    path.write_bytes(bytes(range(20)))
    with open_shard(path) as file:
        buffer = bytearray(10)
        read_exactly(file, buffer, 5, "f")
        assert buffer == bytes(range(5, 15))
        read_exactly(file, bytearray(), 20, "f")
        with pytest.raises(CheckpointError, match="^f: got 5 bytes at offset 15, expected 10: the file ends there$"):
            read_exactly(file, buffer, 15, "f")
    with pytest.raises(CheckpointError, match="^f: reading 10 bytes at offset 5 failed: .*closed file"):
        read_exactly(file, buffer, 5, "f")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders")
def test_what_is_no_file_is_not_opened(tmp_path):
    "A pipe would wait for a writer."
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("gone")
    for name, told in (("pipe", "not a file"), (".", "not a file"), ("link", "a link to nothing"),
                       ("none", "no such file")):
        with pytest.raises(CheckpointError, match=f"cannot be opened: {told}$"):
            open_shard(tmp_path / name)


def test_small_files(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert small_file(path, 5, UsageError) == b"12345"
    with pytest.raises(UsageError, match="f: 5 bytes, expected 1 to 4$"):
        small_file(path, 4, UsageError)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="f: 0 bytes, expected 1 to 4$"):
        small_file(path, 4, CheckpointError)
    with pytest.raises(FileNotFoundError, match="none: no such file$"):
        small_file(tmp_path / "none", 4, UsageError)
    with pytest.raises(UsageError, match="cannot be read: not a file$"):
        small_file(tmp_path, 4, UsageError)


@pytest.mark.parametrize("text, told", [
    (b'{"a": 1, "b": {"c": 2, "c": 3}}', "x: name 'c' found twice, expected once"),
    (b"[1]", "x holds a JSON list, expected an object"),
    (b'{"a": ', "x is not JSON: .*, expected a JSON object in UTF-8"),
    (b'{"\xff": 1}', "x is not JSON: .*utf-8.*"),
    (b'{"\\ud800": 1}', "x is not JSON: .*surrogates.*"),
    (b'{"a": ' + b"[" * DEPTH_MAX + b"]" * DEPTH_MAX + b"}",
     f"x nests lists and objects more than {DEPTH_MAX} deep, .*"),
    (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "x is not JSON: .*"),
])
def test_json_is_read_strictly(text, told):
    for error in CheckpointError, UsageError:
        with pytest.raises(error, match=f"^{told}$"):
            json_object(text, "x", error)
    deep = DEPTH_MAX - 1
    assert json_object(b'{"a": ' + b"[" * deep + b"]" * deep + b', "b": 1.5}', "x")["b"] == 1.5


# Writing

def left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "link to nothing"])
def test_only_a_regular_file_is_replaced(tmp_path, kind):
    "A device stands for the pipe here: a state saved to /dev/null by a user with all rights took it away."
    path, other = tmp_path / "f", tmp_path / "other"
    other.write_bytes(b"mine")
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: path.symlink_to(other),
     "link to nothing": lambda path: path.symlink_to("nothing")}[kind](path)
    before = path.lstat()
    with pytest.raises(UsageError, match="f: is no regular file, so it will not be replaced by one"):
        with whole_file(path):
            raise AssertionError("the block runs")
    assert path.lstat() == before and sorted(os.listdir(tmp_path)) == ["f", "other"] and other.read_bytes() == b"mine"


def test_a_file_is_written_whole(tmp_path):
    path = tmp_path / "f"
    for data in b"first", b"second":
        with whole_file(path) as file:
            file.write(data)
            assert path.exists() == (data == b"second") and (not path.exists() or path.read_bytes() == b"first")
        assert path.read_bytes() == data and left(tmp_path) == ["f"]


@pytest.mark.parametrize("where", ["write", "fsync", "check", "replace", "interrupt"])
@pytest.mark.parametrize("old", [None, b"old"])
def test_what_fails_leaves_the_old_file(tmp_path, monkeypatch, where, old):
    path = tmp_path / "f"
    if old is not None:
        path.write_bytes(old)

    def fail(*_):
        raise OSError(28, "No space left on device")

    def check(part):
        assert part.read_bytes() == b"new" and part != path
        if where == "check":
            raise CheckpointError("another checkpoint's")

    if where in ("fsync", "replace"):
        monkeypatch.setattr(os, where, fail)
    with pytest.raises((OSError, CheckpointError, KeyboardInterrupt)):
        with whole_file(path, check) as file:
            file.write(b"new")
            if where == "write":
                fail()
            if where == "interrupt":
                raise KeyboardInterrupt
    assert left(tmp_path) == ([] if old is None else ["f"]) and (old is None or path.read_bytes() == old)


def test_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    "File, check, name, folder: in this order, or a power cut leaves a name without its bytes."
    done, fsync, replace = [], os.fsync, os.replace

    def synced(fd):
        done.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: done.append("name") or replace(a, b))
    with whole_file(tmp_path / "f", lambda part: done.append("check")) as file:
        file.write(b"x")
    assert done in (["file", "check", "name", "folder"], ["file", "check", "name"])


def test_a_failed_write_names_file_and_byte(tmp_path):
    with pytest.raises(OSError, match=r"f: writing at byte 7 failed: No space left on device") as caught:
        with writing(tmp_path / "f") as file:
            file.write(b"seven b")
            file.flush()
            raise OSError(28, "No space left on device")
    assert caught.value.errno == 28


def test_a_fingerprint_tells_another_file_or_other_bytes(tmp_path):
    path, prints = tmp_path / "f", set()
    path.write_bytes(b"one")
    prints.add(fingerprint(os.stat(path)))
    assert fingerprint(os.stat(path)) in prints
    os.utime(path, ns=(0, 1))
    prints.add(fingerprint(os.stat(path)))
    path.write_bytes(b"longer")
    os.utime(path, ns=(0, 1))
    prints.add(fingerprint(os.stat(path)))
    (tmp_path / "g").write_bytes(b"longer")
    os.utime(tmp_path / "g", ns=(0, 1))
    os.replace(tmp_path / "g", path)
    prints.add(fingerprint(os.stat(path)))
    assert len(prints) == 4
