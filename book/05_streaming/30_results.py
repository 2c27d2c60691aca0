# %% [markdown]
# # 5.30 Results on the disk before the run has ended
#
# The logits of a token of K3 are 655,360 bytes. Four hundred tokens of them are more than a quarter of a gigabyte, and
# a program that keeps them until the end pays for them three times: as rows, as one array, as the bytes of a file. None
# of that is in a plan. And if the run is killed at the last token, all of it is lost. After this chapter you can write
# results of any length in the memory of one row, in files that are readable at every moment.
#
# Needs chapters [5.2] (files written whole) and [5.14] (the form of a trace). Runs in seconds.
#
# [5.29 Showing must not cost the result](29_display.ipynb) ·
# [contents](../README.md) ·
# [5.31 One whole run](31_run.ipynb)
#
# ## 5.30.1 A file that grows
#
# `whole_file` ([5.2.5]) gives a file its name when it is complete, and removes it if anything goes wrong. That is right
# for a file of which a part is worth nothing. Of logits and traces each record is worth something alone. So these files
# are written record by record. While the run goes on, such a file has a private name, in which the process id shows
# whose it is. It is named in the user's words when the run ends, whole or not. A process that is killed cannot do that:
# then the private file stays, with all records.
#
# The order makes it readable at every moment: the bytes of a record come first, then the head that counts them. A
# record that was not completed is cut off at the end, and by the head before. A killed process's file of the same
# private name belongs to another run: it is left alone.
#
# [5.2]: 02_fileio.ipynb
# [5.14]: 14_trace.ipynb
# [5.2.5]: 02_fileio.ipynb#5.2.5-Written-whole

# %% tags=["export"]
import contextlib
import io
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from k3lib.fileio import UsageError, refuse_to_replace, whole_file
from k3lib.system import sync_folder
from k3lib.trace import packed_trace


class GrowingFile:
    """A file of records that can be read at any moment. The bytes of a record are written by append().

    It is made by the first append, as `private`: FILE.PID.part beside `path`. finish() gives it the name `path`.
    `records`: how many are in the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self.private = Path(path), Path(path).absolute()
        self._final = self.private  # the program may go to another folder meanwhile
        self.records = self._end = 0
        self._file: io.FileIO | None = None
        self._named = False

    def head(self, records: int) -> bytes:
        "The bytes with which a file of so many records begins: as many bytes for any number."
        return b""



# %% tags=["export"]
class GrowingFile(GrowingFile):
    def append(self, data: Any) -> None:
        "Add a record, bytes or an array. A reader finds it from now on. Raises OSError, which names file and byte."
        file = self._opened()
        self._write(file, self._end, data)
        self._write(file, 0, self.head(self.records + 1))
        self._end, self.records = self._end + memoryview(data).nbytes, self.records + 1

    def _opened(self):
        for n in itertools.count(1):
            if self._file is not None:
                return self._file
            name = self._final.name if len(os.fsencode(self._final.name)) < 200 else self._final.name[:40]
            self.private = self._final.with_name(f"{name}.{os.getpid()}{f'-{n}' * (n > 1)}.part")
            try:
                self._file = open(self.private, "xb", buffering=0)
            except FileExistsError:
                continue
            self._write(self._file, 0, self.head(0))
            self._end = len(self.head(0))

    def _write(self, file, at, data):
        view, done = memoryview(data).cast("B"), 0
        try:
            file.seek(at)
            while done < len(view):
                done += file.write(view[done:])
        except OSError as error:
            place = f"{self.path}: writing at byte {at + done:,} failed: {error.strerror}"
            raise OSError(error.errno, place) from None


# %% [markdown]
# Naming the file is the last step. A complete file is on the disk before it gets its name, as in `whole_file`. After a
# signal there is little time, and waiting for the disk could take all of it: the name comes at once, and the system
# writes the bytes when it can. A file without any record is removed.

# %% tags=["export"]
class GrowingFile(GrowingFile):
    def finish(self, whole: bool) -> None:
        """Give the file its name. It may be called again, and then does what an interrupt has left undone.

        `whole`: the run has reached its end, so that also a file without records is a result. Raises OSError.
        """
        if self._named or self._file is None and not whole:
            return
        file = self._opened()
        if not whole and not self.records:  # nothing to keep; also where not even the head could be written
            file.close()
        elif not file.closed:
            self._write(file, 0, self.head(self.records))
            try:
                file.truncate(self._end)
                if whole:
                    os.fsync(file.fileno())
                file.close()
            except OSError as error:
                raise OSError(error.errno, f"{self.path}: writing failed: {error.strerror}") from None
        if not whole and not self.records:
            self.private.unlink(missing_ok=True)
        elif self.private.exists():
            os.replace(self.private, self._final)
        self._named = True
        if whole:
            sync_folder(self._final.parent)


# %% [markdown]
# ## 5.30.2 Rows of logits
#
# An .npy file begins with a head that holds dtype and shape. NumPy pads the head so that the number of rows can be
# changed in place: its length is the same for any number of rows that fits a file.

# %% tags=["export"]
class RowsFile(GrowingFile):
    "An .npy file, float32 [rows, n], one row after the other."
    columns = 0

    def head(self, records: int) -> bytes:
        file = io.BytesIO()
        shape = {"descr": "<f4", "fortran_order": False, "shape": (records, self.columns)}
        np.lib.format.write_array_header_1_0(file, shape)
        return file.getvalue()

    def add(self, row: np.ndarray) -> None:
        "Add a row, float32 [n]. Raises OSError."
        self.columns = len(row)
        self.append(np.ascontiguousarray(row, np.float32))


# %%
rows = np.arange(12, dtype=np.float32).reshape(4, 3)
with tempfile.TemporaryDirectory() as scratch:
    file = RowsFile(Path(scratch, "l.npy"))
    for n, row in enumerate(rows, 1):
        file.add(row)
        assert np.array_equal(np.load(file.private), rows[:n])
        print(n, "rows:", file.private.name.replace(str(os.getpid()), "PID"), np.load(file.private).shape)
    file.finish(True)
    np.save(Path(scratch, "saved"), rows)
    print([path.name for path in sorted(Path(scratch).iterdir())])
    assert Path(scratch, "l.npy").read_bytes() == Path(scratch, "saved.npy").read_bytes()
file.columns = 163_840
assert len({len(file.head(n)) for n in (0, 1, 10**9, 2**60)}) == 1

# %% [markdown]
# **Break it.** A row is cut in the middle, as by a kill between two calls of the system. The head does not count it, so
# a reader finds the rows before it.

# %%
with tempfile.TemporaryDirectory() as scratch:
    file = RowsFile(Path(scratch, "l.npy"))
    file.add(rows[0])
    file._write(file._file, file._end, rows[1][:2])
    print("of the killed process:", np.load(file.private).tolist(), file.private.stat().st_size, "bytes")
    file.finish(False)
    print("of an interrupted one:", np.load(file.path).tolist(), file.path.stat().st_size, "bytes")
    assert file.path.stat().st_size == len(file.head(1)) + 12


# %% [markdown]
# ## 5.30.3 Requests of experts
#
# The record of a trace (5.14) is a whole forward pass: a trace that ends inside a pass is refused, and rightly. So the
# requests of a pass are kept until its last layer has ended. In K3 they are at most 92 layers of 896 experts, 660 kB.

# %% tags=["export"]
class TraceFile(GrowingFile):
    "A trace file to which whole forward passes are added."

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._pass = bytearray()

    def request(self, layer: int, ids: Iterable[int]) -> None:
        "A layer has requested these experts."
        self._pass += packed_trace([(layer, e) for e in ids])

    def end_pass(self) -> None:
        "Add the requests since the last call. Raises OSError."
        self.append(self._pass)
        self._pass = bytearray()


# %% [markdown]
# ## 5.30.4 JSON in pieces
#
# A report has an entry for each token. As one text, a million entries take a hundred megabytes, and the objects they
# are made from five times as much. So a list may be given as an iterator, and is written a thousand items at a time.

# %% tags=["export"]
def blocks(items: Iterable[Any], most: int = 1024) -> Iterator[list[Any]]:
    "The items in lists of `most`, the last one shorter."
    items = iter(items)
    while block := list(itertools.islice(items, most)):
        yield block


def json_pieces(tree: dict[str, Any]) -> Iterator[str]:
    "An object as JSON, in pieces. A value of `tree` that is an iterator is written as a list."
    for n, (name, value) in enumerate(tree.items()):
        yield f"{',' if n else '{'}\n {json.dumps(name)}: "
        if not isinstance(value, Iterator):
            yield json.dumps(value, indent=1).replace("\n", "\n ")
            continue
        yield "["
        for k, block in enumerate(blocks(value)):
            yield ", " * bool(k) + json.dumps(block)[1:-1]
        yield "]"
    yield "\n}\n" if tree else "{}\n"


def write_json(path: str | os.PathLike[str], tree: dict[str, Any]) -> None:
    "Write an object, whole or not at all. A value of `tree` that is an iterator is written as a list. Raises OSError."
    with whole_file(path) as file:
        for piece in json_pieces(tree):
            file.write(piece.encode())


# %%
import tracemalloc

with tempfile.TemporaryDirectory() as scratch:
    path = Path(scratch, "r.json")
    tracemalloc.start()
    write_json(path, {"whole": True, "ids": iter(range(300_000)), "plan": {"total": 5}, "none": iter(())})
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tree = json.loads(path.read_text())
    print(f"{path.stat().st_size:,} bytes written; less than 200 kB of memory: {taken < 200_000}")
assert tree == {"whole": True, "ids": list(range(300_000)), "plan": {"total": 5}, "none": []} and taken < 200_000


# %% [markdown]
# ## 5.30.5 Refused before the run
#
# A name that cannot be written to should be refused at the start of a run, not at its end. And an output must not take
# the place of something else: a file of the model, a device, a link.

# %% tags=["export"]
def check_outputs(model: str | os.PathLike[str], *paths: str | os.PathLike[str] | None,
                  read: Sequence[str | os.PathLike[str] | None] = ()) -> None:
    """Refuse, before the run, an output that could not be written after it, or that would replace something else.

    `model`: the model's folder. "-" is standard output. `read`: files that the run reads. Raises UsageError and
    MissingFile.
    """
    if paths.count("-") > 1:
        raise UsageError("standard output, -, is named for two outputs")
    given = [Path(path) for path in paths if path not in (None, "-")]
    for path in given:
        _check_output(path)
        if path.resolve().parent == Path(model).resolve():
            raise UsageError(f"{path}: lies in the model's own folder, which is never written to")
    if len({path.resolve() for path in given}) < len(given):
        raise UsageError(f"{given[0]}: is named for two outputs")
    if same := {path.resolve() for path in given} & {Path(path).resolve() for path in read if path not in (None, "-")}:
        raise UsageError(f"{min(same)}: is to be read and to be written")


def _check_output(path):
    if path.is_dir():
        raise UsageError(f"{path}: is a folder, expected a file to write")
    refuse_to_replace(path)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UsageError(f"{path}: the folder {path.parent} cannot be written to: {error.strerror}") from None


# %% [markdown]
# ## 5.30.6 The results of a run
#
# Four files can be asked for. Logits, trace and events grow during the run, and the report is written when they are
# named. An event is a line of JSON: a token as it comes. Events and report may go to standard output instead, for a
# program that reads the answer from a pipe.
#
# The report tells the peak of memory, so the peak is read after everything else was written. A run that fails or is
# interrupted leaves what it has made, and its error says how much that is.

# %% tags=["export"]
class Results:
    """The files that a run fills: `logits`, `trace`, `report` and `events`, each a path or None.

    `report` or `events` may be "-": it is then written by `out(text, end=)`, a report only after a complete run.
    `tree()`, which the run sets, gives the report as write_json takes it, or None as long as there is nothing to
    report. `saving`: save() or keep() is at work, and the process should not be ended before it has returned.
    """

    def __init__(self, logits: str | os.PathLike[str] | None = None, trace: str | os.PathLike[str] | None = None,
                 report: str | os.PathLike[str] | None = None, events: str | os.PathLike[str] | None = None,
                 out: Callable[..., object] = print):
        self.logits = None if logits is None else RowsFile(logits)
        self.trace = None if trace is None else TraceFile(trace)
        self.report = None if report in (None, "-") else Path(report)
        self.events = None if events in (None, "-") else GrowingFile(events)
        self._unwritten = None if self.report is None else self.report.absolute()
        self._out, self._shown = out, {name for name, path in (("report", report), ("events", events)) if path == "-"}
        self.tree: Callable[[], dict[str, Any] | None] = lambda: None
        self.saving, self._lock = False, threading.RLock()

    def row(self, row: np.ndarray) -> None:
        "The logits of a step, float32 [vocab]. Raises OSError."
        if self.logits is not None:
            self.logits.add(row)


# %% tags=["export"]
class Results(Results):
    def event(self, event: dict[str, Any]) -> None:
        "Something that happened, as a line of JSON. Raises what `out` raises, and OSError."
        if self.events is not None:
            self.events.append(f"{json.dumps(event)}\n".encode())
        elif "events" in self._shown:
            self._out(json.dumps(event))

    def request(self, layer: int, ids: Iterable[int]) -> None:
        "The experts that a layer has requested."
        if self.trace is not None:
            self.trace.request(layer, ids)

    def end_pass(self) -> None:
        "A forward pass has reached its last layer. Raises OSError."
        if self.trace is not None:
            self.trace.end_pass()


# %% [markdown]
# A thread that is caught in a read cannot save anything. So keep() may be called from another thread, and only one of
# the two is at work at a time.

# %% tags=["export"]
class Results(Results):
    def save(self) -> None:
        "The run has reached its end: name the files, then write the report. Raises OSError."
        with self._at_work():
            for file in self.logits, self.trace, self.events:
                if file is not None:
                    file.finish(True)
            self._write_report()

    def show(self) -> None:
        "After save(): the report on standard output, if it was asked for there. Raises what `out` raises."
        if "report" in self._shown and (tree := self.tree()) is not None:
            for piece in json_pieces(tree):
                self._out(piece, end="")

    def keep(self) -> list[str]:
        "The run has failed: name the files that hold something, write the report. Returns a sentence for each file."
        said = []
        with self._at_work():
            for file, what in (self.logits, "rows"), (self.trace, "forward passes"), (self.events, "events"):
                if file is None:
                    continue
                try:
                    file.finish(False)
                    said += [f"{file.path} holds {file.records} {what}"] * bool(file.records)
                except OSError as error:
                    said.append(f"{file.private} holds {file.records} {what}: {error.strerror}")
            try:
                said += [f"{self.report} holds the report"] * self._write_report()
            except OSError as error:
                said.append(str(error))
        return said


# %% tags=["export"]
class Results(Results):
    @contextlib.contextmanager
    def _at_work(self):
        with self._lock:
            self.saving = True
            try:
                yield
            finally:
                self.saving = False


# %% tags=["export"]
class Results(Results):
    def _write_report(self):
        """Write the report if there is one and it is not written yet. Returns whether it is written.

        What could not be written is not tried again, but what was interrupted is.
        """
        tree = None if self._unwritten is None else self.tree()
        if tree is not None:
            try:
                write_json(self._unwritten, tree)
            except OSError:
                self.report = self._unwritten = None
                raise
            self._unwritten = None
        return self.report is not None and self._unwritten is None


# %% [markdown]
# By hand: a run of three tokens that is interrupted after its second, in the middle of the third's forward pass.

# %%
with tempfile.TemporaryDirectory() as scratch:
    names = "l.npy", "run.trace", "r.json"
    results, made = Results(*(Path(scratch, name) for name in names)), []
    results.tree = lambda: {"finished": len(made) == 3, "ids": iter(made)}
    try:
        for token in range(3):
            results.request(1, [token, 7])
            if token == 2:
                raise KeyboardInterrupt
            results.request(2, [5])
            results.end_pass()
            results.row(rows[token])
            made.append(token)
        results.save()
    except KeyboardInterrupt:
        for line in results.keep():
            print(line.replace(scratch, "..."))
    assert sorted(path.name for path in Path(scratch).iterdir()) == sorted(names)
    assert np.array_equal(np.load(Path(scratch, "l.npy")), rows[:2])
    print(Path(scratch, "run.trace").read_bytes() == packed_trace([(1, 0), (1, 7), (2, 5), (1, 1), (1, 7), (2, 5)]),
          json.loads(Path(scratch, "r.json").read_text()))

# %% [markdown]
# ## Summary
#
# - A record is written before the head counts it, so a reader finds whole records at every moment.
# - A file gets its name when the run ends, however it ends. After a kill it still has its private name.
# - The memory that results take is that of one row, one forward pass, or a thousand entries of a list.
#
# ## Exercises
#
# 1. In `append`, write the head first. At which moment does a reader find a row of zeros, or no file that can be read?
# 2. `finish` does not wait for the disk after a signal. What can be lost by that, and in which event?
#
# Next: [5.31 One whole run](31_run.ipynb).
