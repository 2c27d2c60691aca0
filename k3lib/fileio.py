"""5.2 Files read whole or refused, written whole or not at all

Made from book/05_streaming/02_fileio.py: edit that, then run `make export`.
"""

import errno
import json
import os
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from k3lib.system import pread, sync_folder, thread_shortage


class K3Error(Exception):
    "Any error that this package explains in one line. `exit_code` is the exit code of the command line."

    exit_code = 1


class UsageError(K3Error, ValueError):
    "A request that cannot be served: token ids, context, budget, config."

    exit_code = 2


class MissingFile(K3Error, FileNotFoundError):
    "A file or folder that was named and does not exist. One line: its path, and what was expected there."

    exit_code = 2


class ResourceError(UsageError):
    "Something that the system gives this process too little of: open files, threads, memory."


class CheckpointError(K3Error):
    "Weights that are missing, truncated or damaged. One line: file, tensor, what was found, what was expected."

    exit_code = 4


_TOO_LITTLE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def read_fault(text: str, cause: Exception, error: type[Exception] = CheckpointError) -> Exception:
    "What to raise where a file cannot be read because of `cause`: `error`, or ResourceError if the file may be good."
    return (ResourceError if getattr(cause, "errno", None) in _TOO_LITTLE else error)(text)


def require_threads(wanted: int, what: str) -> None:
    "Raise ResourceError if this process cannot start `wanted` more threads, as `what` does."
    if (shortage := thread_shortage(wanted, what)) is not None:
        raise ResourceError(shortage)


def shown_value(value: object) -> str:
    "A value as text for an error message: one line of at most 120 characters."
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 120 else text[:117] + "..."


def wrong_argument(name: str, value: object, expected: str) -> UsageError:
    "The error for the argument `name`: what was given, what is expected."
    return UsageError(f"{name} is {shown_value(value)}, expected {expected}")


def given_path(name: str, value: str | os.PathLike[str]) -> Path:
    """The argument `name`, a path, as an absolute Path. Links in it are not followed.

    Raises UsageError if it is no path, is empty, holds a NUL, or is relative to a folder that was removed.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise wrong_argument(name, value, "a path: text that is not empty, or an os.PathLike")
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise UsageError(f"{name} is {path!a}, expected a path that the file system can encode") from None
    try:
        return Path(path).absolute()
    except OSError as error:  # there is no name of the current folder
        raise wrong_argument(name, path, f"an absolute path, because the current folder has no path "
                                         f"({error.strerror})") from None


def function_argument(name: str, value: object) -> None:
    "Raise UsageError, which says `name`, for a value that is neither None nor a function."
    if value is not None and not callable(value):
        raise wrong_argument(name, value, "a function")


MAX_READ = 1 << 26  # bytes asked of one call: far below the systems' 2 GiB, so that Python handles signals soon


def read_exactly(
    file: BinaryIO, view: bytearray | memoryview, offset: int, where: str | os.PathLike[str]
) -> None:
    """Fill the writable bytes `view` from byte `offset` of `file`; `where` names the bytes in an error message.

    The file's position and its buffer, if it has any, are not used. Raises CheckpointError if the file ends early,
    cannot be read, or is closed, and ResourceError.
    """
    view, done = memoryview(view), 0
    try:
        while done < len(view) and (got := pread(file.fileno(), view[done:done + MAX_READ], offset + done)):
            done += got
    except (OSError, ValueError) as error:  # ValueError: the file was closed
        text = f"{where}: reading {len(view):,} bytes at offset {offset:,} failed: {error}"
        raise read_fault(text, error) from None
    if done < len(view):
        raise CheckpointError(f"{where}: got {done:,} bytes at offset {offset:,}, expected {len(view):,}: "
                              "the file ends there")


def _open(path: str | os.PathLike[str]) -> FileIO:
    "The file at `path`, open and unbuffered. Raises OSError if it is not a regular file, FileNotFoundError if absent."
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(0, "a link to nothing" if os.path.islink(path) else "no such file") from None
    if not stat.S_ISREG(mode):
        raise OSError(0, "not a file")
    return open(path, "rb", buffering=0)


def open_shard(path: str | os.PathLike[str]) -> FileIO:
    "The file at `path`, open and unbuffered. Raises CheckpointError if it cannot be opened, and ResourceError."
    try:
        return _open(path)
    except OSError as error:
        raise read_fault(f"{path}: cannot be opened: {error.strerror}", error) from None


def small_file(path: str | os.PathLike[str], most: int, error: type[Exception]) -> bytes:
    """All bytes of a file that has 1 to `most` of them. The size is checked before the first byte is read.

    Raises MissingFile if the file does not exist, `error` if it has another size or cannot be read, and ResourceError.
    """
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not 0 < size <= most:
                raise error(f"{path}: {size:,} bytes, expected 1 to {most:,}")
            return file.read()
    except FileNotFoundError as fault:
        raise MissingFile(f"{path}: {fault.strerror}") from None
    except OSError as fault:
        raise read_fault(f"{path}: cannot be read: {fault.strerror}", fault, error) from None


DEPTH_MAX = 16  # lists and objects inside one another: a header has 3, a config 6


class _Faulty(dict):
    "A JSON object with a fault, which matters only if the object is read."

    fault: str


def _object(pairs):
    "The JSON object of `pairs`, a dict; a _Faulty if a name comes twice or cannot be printed."
    found, fault = dict(pairs), ""
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        fault = f": name {shown_value(twice)} found twice, expected once"
    try:
        "".join(found).encode("utf-8")
    except UnicodeEncodeError as error:  # half a surrogate pair is valid JSON
        fault = f" is not JSON: {str(error)[:120]}, expected a JSON object in UTF-8"
    if fault:
        found = _Faulty(found)
        found.fault = fault
    return found


def _fault(tree: dict) -> str:
    "The fault of an object in `tree`, or that it nests too deep; '' if there is none."
    level: list = [tree]
    for _ in range(DEPTH_MAX):
        if faulty := next((found for found in level if type(found) is _Faulty), None):
            return faulty.fault
        level = [inner for outer in level for inner in (outer if type(outer) is list else outer.values())
                 if type(inner) in (dict, list, _Faulty)]
    return f" nests lists and objects more than {DEPTH_MAX} deep, expected {DEPTH_MAX} at most" if level else ""


def json_object(
    text: bytes | bytearray, where: str | os.PathLike[str], error: type[Exception] = CheckpointError,
    ignored: str | None = None
) -> dict:
    """The JSON object in the bytes `text`; `where` names the text in an error message.

    Raises `error` if the text is not a JSON object in UTF-8, has a name twice in one object, or nests more than
    DEPTH_MAX deep. The value of the name `ignored` may have a name twice, and may nest as deep as JSON can be parsed.
    """
    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as fault:
        raise error(f"{where} is not JSON: {str(fault)[:120]}, expected a JSON object in UTF-8") from None
    if not isinstance(found, dict):
        raise error(f"{where} holds a JSON {type(found).__name__}, expected an object")
    faulty = found.fault if type(found) is _Faulty else _fault({name: found[name] for name in found if name != ignored})
    if faulty:
        raise error(f"{where}{faulty}")
    return found


class Unusual:
    "What is odd about files and changes no number. `found` {what: (how many, the first one)}."

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, str]] = {}

    def note(self, what: str, first: str, count: int = 1) -> None:
        "Count `count` more of a kind; `first` is where the first of them is."
        if count:
            before, first = self.found.get(what, (0, first))
            self.found[what] = before + count, first

    def include(self, other: "Unusual") -> None:
        "Count what another one has found, too."
        for what, (count, first) in other.found.items():
            self.note(what, first, count)

    def lines(self) -> list[str]:
        "A line for each kind."
        return [f"{what}: {count:,}, {first}{', ...' * (count > 1)}" for what, (count, first) in self.found.items()]


Fingerprint = tuple[int, int, int, int]


def fingerprint(status: os.stat_result) -> Fingerprint:
    "(device, inode, bytes, time of the last write in ns) from an os.stat. Replacing or writing the file changes it."
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    "open(path, 'wb') for a `with` block. An OSError names the file and the byte at which writing failed."
    file = open(path, "wb")
    try:
        yield file
        file.flush()
    except OSError as error:
        place = f"{path}: writing at byte {os.lseek(file.fileno(), 0, os.SEEK_CUR):,} failed: {error.strerror}"
        raise OSError(error.errno, place) if error.filename is None else error from None
    finally:
        with suppress(OSError):  # close() tries once more to write what flush() could not
            file.close()


def refuse_to_replace(path: Path) -> None:
    """Raise UsageError if `path` is a link, a folder, a device or a pipe. It may be a regular file, or nothing.

    Raises MissingFile if there is no folder to write it in.
    """
    if path.is_symlink() or path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file, so it will not be replaced by one")
    if not path.parent.is_dir():
        raise MissingFile(f"{path}: there is no folder {path.parent} to write it in")


@contextmanager
def whole_file(
    path: str | os.PathLike[str], check: Callable[[Path], object] | None = None
) -> Iterator[BinaryIO]:
    """writing() for a `with` block, to a file that is complete and on the disk before it gets the name `path`.

    `check(part)`, if given, is called with the path of the complete file before it gets its name. If the block or
    `check` raises, the old file at `path` stays as it was and the new one is removed. Raises UsageError if `path` is no
    path, or not that of a regular file, and MissingFile if its folder does not exist.
    """
    path = given_path("path", path)
    refuse_to_replace(path)
    part = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex}.part")  # two threads may write `path` at once
    try:
        with writing(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if check is not None:
            check(part)
        os.replace(part, path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


__all__ = [
    "K3Error", "UsageError", "MissingFile", "ResourceError", "CheckpointError", "read_fault", "require_threads",
    "shown_value", "wrong_argument", "given_path", "function_argument", "MAX_READ", "read_exactly", "open_shard",
    "small_file", "DEPTH_MAX", "json_object", "Unusual", "Fingerprint", "fingerprint", "writing",
    "refuse_to_replace", "whole_file",
]
