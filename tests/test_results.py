"k3lib.results: files that can be read at every moment, and what is left of them after an interrupt at any moment."
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from interrupts import at_every_moment

from k3lib import results
from k3lib.fileio import UsageError
from k3lib.results import GrowingFile, Results, RowsFile, TraceFile, blocks, check_outputs, write_json
from k3lib.trace import packed_trace, read_trace

ROWS = np.arange(50, dtype=np.float32).reshape(10, 5) / 7


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# Files that grow

def test_rows_can_be_read_after_each_and_are_what_numpy_writes(tmp_path):
    file = RowsFile(tmp_path / "l.npy")
    for n, row in enumerate(ROWS, 1):
        file.add(row)
        assert np.load(file.private).tobytes() == ROWS[:n].tobytes()
        assert np.load(file.private, mmap_mode="r").shape == (n, 5)
        assert names(tmp_path) == [f"l.npy.{os.getpid()}.part"]
    file.finish(True)
    np.save(tmp_path / "expected", ROWS)
    assert (tmp_path / "l.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()
    assert names(tmp_path) == ["expected.npy", "l.npy"]


@pytest.mark.parametrize("row", [ROWS[0].astype(np.float64), ROWS.T[0][::-1], list(map(float, ROWS[0]))])
def test_a_row_of_another_layout_is_written_as_float32(row, tmp_path):
    file = RowsFile(tmp_path / "l.npy")
    file.add(row)
    file.finish(True)
    assert np.array_equal(np.load(tmp_path / "l.npy"), np.array([row], np.float32))


def test_the_head_has_one_length(tmp_path):
    file = RowsFile(tmp_path / "l.npy")
    for file.columns in 1, 512, 163840:
        assert {len(file.head(n)) for n in (0, 1, 9, 10, 2**31, 2**62)} == {128}


def test_a_file_of_which_not_even_the_head_could_be_written(tmp_path, monkeypatch):
    "Nothing is left of it, and it is closed."
    def refuse(*_):
        raise OSError(errno.EFBIG, "File too large")

    file = RowsFile(tmp_path / "l.npy")
    monkeypatch.setattr(GrowingFile, "_write", refuse)
    with pytest.raises(OSError):
        file.add(ROWS[0])
    assert names(tmp_path) == [file.private.name]
    file.finish(False)
    assert names(tmp_path) == [] and file._file.closed


@pytest.mark.parametrize("whole", [True, False])
def test_a_file_without_records(whole, tmp_path):
    "A whole run without requests has an empty trace; what fails before its first record leaves no file, and the old."
    (tmp_path / "t").write_bytes(b"old")
    for file in GrowingFile(tmp_path / "t"), TraceFile(tmp_path / "t"):
        file.finish(whole)
        assert names(tmp_path) == ["t"] and (tmp_path / "t").read_bytes() == (b"" if whole else b"old")


def test_the_private_file_of_another_run_is_left_alone(tmp_path):
    "A killed run may have had the same process id, as every first process of a container has."
    (tmp_path / f"l.npy.{os.getpid()}.part").write_bytes(b"theirs")
    file = RowsFile(tmp_path / "l.npy")
    file.add(ROWS[0])
    assert file.private.name == f"l.npy.{os.getpid()}-2.part"
    file.finish(True)
    assert names(tmp_path) == ["l.npy", f"l.npy.{os.getpid()}.part"] and np.load(tmp_path / "l.npy").shape == (1, 5)
    assert (tmp_path / f"l.npy.{os.getpid()}.part").read_bytes() == b"theirs"


@pytest.mark.parametrize("name", ["x" * 255, "\u4e16" * 85, "x" * 199])
def test_a_name_that_leaves_no_room_for_more_letters(name, tmp_path):
    file = RowsFile(tmp_path / name)
    file.add(ROWS[0])
    assert file.private.name.startswith(name[:40])
    file.finish(True)
    assert names(tmp_path) == [name]


def test_a_trace_holds_whole_passes(tmp_path):
    file = TraceFile(tmp_path / "t")
    for token in range(3):
        file.request(1, [token, 7])
        file.request(2, [token])
        if token < 2:
            file.end_pass()
        assert token == 0 or len(read_trace(file.private)) == 2
    file.finish(False)
    assert (tmp_path / "t").read_bytes() == packed_trace([(1, 0), (1, 7), (2, 0), (1, 1), (1, 7), (2, 1)])


class Failing:
    "A file whose write fails after `room` bytes, each call taking half of what it is given."
    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self.file.write(data[:min(self.room, (len(data) + 1) // 2)])
        self.room -= done
        return done

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_write_that_comes_short_is_continued_and_one_that_fails_is_named(tmp_path):
    file = RowsFile(tmp_path / "l.npy")
    file.add(ROWS[0])
    whole, file._file = file._file, Failing(file._file, 10**6)
    file.add(ROWS[1])
    file._file = Failing(whole, 7)
    with pytest.raises(OSError, match=r"l.npy: writing at byte 175 failed: No space left on device") as failed:
        file.add(ROWS[2])
    assert failed.value.errno == errno.ENOSPC and np.array_equal(np.load(file.private), ROWS[:2])
    file._file = whole
    file.finish(False)
    assert (tmp_path / "l.npy").stat().st_size == 128 + 40 and np.array_equal(np.load(tmp_path / "l.npy"), ROWS[:2])


# JSON

def test_json_in_pieces(tmp_path):
    tree = {"a": [1, {"b": None}], "c": {"d": 1.5, "e": "\u4e16\udcff"}, "f": True}
    write_json(tmp_path / "j", {**tree, "none": iter(()), "many": iter(range(5000)), "objects": iter([{"x": 1}, {}])})
    found = json.loads((tmp_path / "j").read_text())
    assert found == {**tree, "none": [], "many": list(range(5000)), "objects": [{"x": 1}, {}]}
    write_json(tmp_path / "j", {})
    assert json.loads((tmp_path / "j").read_text()) == {}


def test_json_that_fails_leaves_the_old_file(tmp_path):
    (tmp_path / "j").write_text("old")

    def failing():
        yield from range(3000)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_json(tmp_path / "j", {"a": failing()})
    assert names(tmp_path) == ["j"] and (tmp_path / "j").read_text() == "old"


@pytest.mark.parametrize("n", [0, 1, 3, 4, 8, 9])
def test_blocks(n):
    assert [len(block) for block in blocks(range(n), 4)] == [4] * (n // 4) + [n % 4] * (n % 4 > 0)
    assert [i for block in blocks(iter(range(n)), 4) for i in block] == list(range(n))


def test_outputs_are_checked_each_by_name(tmp_path):
    check_outputs("nowhere", None, tmp_path / "a", tmp_path / "b")
    for paths, words in (([tmp_path], "is a folder"), ([tmp_path / "a", tmp_path / "." / "a"], "two outputs"),
                         ([tmp_path / "no" / "a"], "there is no folder")):
        with pytest.raises((UsageError, FileNotFoundError), match=words):
            check_outputs("nowhere", *paths)
    assert not names(tmp_path)


def test_relative_names_are_those_of_the_folder_of_the_start(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    files = Results("l.npy", "t", "r.json")
    files.tree = lambda: {"ids": []}
    files.row(ROWS[0])
    os.chdir("other")
    files.row(ROWS[1])
    files.save()
    assert names(tmp_path) == ["l.npy", "other", "r.json", "t"] and not names(tmp_path / "other")
    assert files.keep() == ["l.npy holds 2 rows", "r.json holds the report"]


def test_a_report_that_cannot_be_written_is_said_once(tmp_path, monkeypatch):
    def fails(path, tree):
        raise OSError(errno.ENOSPC, "r.json: writing at byte 0 failed: No space left on device")

    monkeypatch.setattr(results, "write_json", fails)
    files = Results(tmp_path / "l.npy", None, tmp_path / "r.json")
    files.tree = lambda: {"ids": []}
    files.row(ROWS[0])
    with pytest.raises(OSError, match="No space left"):
        files.save()
    assert files.keep() == [f"{tmp_path / 'l.npy'} holds 1 rows"] and names(tmp_path) == ["l.npy"]
    files = Results(None, None, tmp_path / "r.json")
    files.tree = lambda: {"ids": []}
    assert ["No space left" in line for line in files.keep()] == [True] and files.keep() == []


# A run that is interrupted at any moment

def test_an_interrupt_at_any_moment_leaves_files_that_agree(tmp_path_factory):
    """Three tokens, with logits, trace and report, interrupted in each place of the module where a signal is heard.

    Rows and ids begin as those of the whole run. What keep() says a file holds, it holds.
    """
    def begin():
        folder = tmp_path_factory.mktemp("run")
        made, files = [], Results(folder / "l.npy", folder / "t", folder / "r.json")
        files.tree = lambda: {"finished": len(made) == 3, "ids": iter(made)} if made else None
        return folder, files, made

    def run(thing):
        folder, files, made = thing
        try:
            for token in range(3):
                for layer in 1, 2:
                    files.request(layer, [token, 9])
                files.end_pass()
                made.append(token)
                files.row(ROWS[token])
            files.save()
        except KeyboardInterrupt:
            files.said = files.keep()
            raise

    def check(thing):
        folder, files, made = thing
        left = set(names(folder))
        opened = {name for name in left if name.endswith(".part")}  # between opening a file and knowing that it is open
        assert not opened or all((folder / name).stat().st_size == 0 for name in opened)
        assert left - opened <= {"l.npy", "t", "r.json"} and ("r.json" in left) == bool(made)
        said = getattr(files, "said", None)
        if said is not None:
            assert len(said) == len(left - opened)
        if "l.npy" in left:
            rows = np.load(folder / "l.npy")
            assert np.array_equal(rows, ROWS[:len(rows)]) and len(rows) in (len(made), len(made) - 1)
            assert said is None or f"{folder / 'l.npy'} holds {len(rows)} rows" in said
        else:
            assert len(made) < 2
        if "t" in left:
            assert len(read_trace(folder / "t")) - len(made) in (0, 1)
        if made:
            report = json.loads((folder / "r.json").read_text())
            assert report == {"finished": len(made) == 3, "ids": made}

    at_every_moment(results.__file__, begin, run, check, 100)
