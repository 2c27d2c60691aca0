"""5.30 Results on the disk before the run has ended

Made from book/05_streaming/30_results.py: edit that, then run `make export`.
"""

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

    @contextlib.contextmanager
    def _at_work(self):
        with self._lock:
            self.saving = True
            try:
                yield
            finally:
                self.saving = False

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


__all__ = [
    "GrowingFile", "RowsFile", "TraceFile", "blocks", "json_pieces", "write_json", "check_outputs", "Results",
]
