# %% [markdown]
# # 5.2 Files read whole or refused, written whole or not at all
#
# A model is 1.56 TB in files that took hours to download, and each of them may be truncated, damaged or replaced. At
# the end of this chapter you can read a file so that no such fault is taken for data, and write one so that a power cut
# leaves the old file or the new one, never a part of either.
#
# Needs chapter [5.1] (what the system offers). Runs in seconds. Makes `k3lib.fileio`.
#
# [5.1 What depends on the operating system](01_system.ipynb) ·
# [contents](../README.md) ·
# [5.3 A config that is accepted, or refused](03_config.ipynb)
#
# [5.1]: 01_system.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "files")

# %% tags=["export"]
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

# %%
import tempfile

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)


# %% [markdown]
# ## 5.2.1 Kinds of error
#
# The user of the engine must know what to repair: the command, the download, or neither. So each class of error carries
# the exit code of the command line: 2 for a request that cannot be served, 4 for weights that are missing or damaged, 1
# for anything else. Later chapters derive classes of their own from these. A `UsageError` is also a `ValueError`, which
# is what Python raises for a bad argument. A `MissingFile` is also a `FileNotFoundError`. So a program can catch all
# that this package explains as `K3Error`, and a missing file as it would anywhere else.
#
# A good file cannot be opened by a process that has as many files open as it may have. That is no damage, and no
# download repairs it. So `read_fault` looks at the system's reason, and makes such a failure a `ResourceError`. A
# command that works with threads asks for them with `require_threads` before its first read.

# %% tags=["export"]
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


# %% [markdown]
# An argument of a wrong type must not get far: `open(5)` opens whatever has the descriptor 5. So public functions
# refuse it by name, and say what they expected.
#
# A path is made absolute where it enters. Files are opened hours after that, and by then a program may have changed its
# current folder: a relative path would lead to another file or to none. Links in a path are not followed here. The
# files of a hub's cache are links, whose own names say which shard they are.

# %% tags=["export"]
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


# %%
assert given_path("path", "model") == Path.cwd() / "model"
for value in 5, None, b"model", "":
    try:
        given_path("path", value)
        raise AssertionError("accepted")
    except UsageError as error:
        print(error)

# %% [markdown]
# ## 5.2.2 Bytes from a file
#
# One call may read fewer bytes than it was asked for, and never reads more than 2 GiB; K3's embedding has 2.35 GB. So a
# read is a loop, which ends early only when a call returns no bytes: the file ends there. `where` names the file and
# the tensor in the error message.

# %% tags=["export"]
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


# %% [markdown]
# Opening a path has traps of its own. A pipe would wait for a writer for ever. A folder can be opened on some systems.
# A broken link fails with "no such file", though a file of that name is listed. Links that are not broken are followed:
# the caches of model hubs consist of links.

# %% tags=["export"]
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


# %%
(folder / "three").write_bytes(b"abc")
(folder / "nowhere").symlink_to("gone")
with open_shard(folder / "three") as file:
    two = bytearray(2)
    read_exactly(file, two, 1, "three")
    print(bytes(two))
    for attempt in (lambda: read_exactly(file, bytearray(5), 1, "three"), lambda: open_shard(folder / "nowhere"),
                    lambda: open_shard(folder), lambda: small_file(folder / "three", 2, UsageError)):
        try:
            attempt()
            raise AssertionError("accepted")
        except (CheckpointError, UsageError) as error:
            print(f"exit code {error.exit_code}: {str(error).replace(str(folder), '.')}")

# %% [markdown]
# ## 5.2.3 JSON, read strictly
#
# Python's JSON reader is lenient: if an object holds a name twice, it keeps the last value and says nothing. So each
# object is checked for equal names when its closing brace is read. Nesting has a bound of its own, because Python
# parses and prints nested values by recursion, and printing may hit Python's recursion limit where parsing just
# passed. Headers (5.5), configs (5.3) and vocabularies (5.21) are read by this one function. A value that nobody reads,
# as the notes in a header, may have these faults. So a fault is kept with its object, and told only if the object is
# not under the name `ignored`.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %%
for text in b'{"a": 1, "a": 2}', b"[]", b'{"a": ' + b"[" * 20 + b"]" * 20 + b"}", b'{"a": \xff}':
    try:
        json_object(text, "toy")
        raise AssertionError("accepted")
    except CheckpointError as error:
        print(error)
assert json_object(b'{"notes": {"a": 1, "a": 2}, "b": 3}', "toy", ignored="notes")["b"] == 3


# %% [markdown]
# Some things are odd about a file and change no number: notes of another form than usual, a list that leaves out what
# nobody computes. Whoever refuses these calls a good checkpoint damaged. They are counted, and `k3 census` (5.6) tells
# them.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.2.4 Is it still the same file?
#
# During a run of several days someone may replace a file. Four numbers reveal it. If the device or the inode differs,
# it is another file; if the length or the time of the last write differs, it is the same file with other bytes.

# %% tags=["export"]
Fingerprint = tuple[int, int, int, int]


def fingerprint(status: os.stat_result) -> Fingerprint:
    "(device, inode, bytes, time of the last write in ns) from an os.stat. Replacing or writing the file changes it."
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


# %%
before = fingerprint(os.stat(folder / "three"))
(folder / "other").write_bytes(b"abc")
os.replace(folder / "other", folder / "three")
assert fingerprint(os.stat(folder / "three")) != before, "equal bytes, another file"


# %% [markdown]
# ## 5.2.5 Written whole
#
# When the disk is full, Python's error does not name the file, and may come only when the file is closed. `writing`
# adds the file's name and the byte at which writing failed.

# %% tags=["export"]
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


# %% [markdown]
# A file must never be found incomplete under its final name. So the bytes go to a hidden file in the same folder. When
# they are on the disk, the hidden file is renamed, in one step, and the folder is synced because it holds the name
# ([5.1.4]). Before the renaming a caller may check what was written: the copy of the trunk in 5.19 gets its name only
# if it equals the original.
#
# Renaming removes what had the name before. For a user with all rights that may be a device: a state saved to
# `/dev/null` would take it from every program of the machine. So only a regular file is replaced. A link is not,
# because the file that it leads to would keep its old bytes.
#
# [5.1.4]: 01_system.ipynb#5.1.4-A-name-that-survives-a-power-cut

# %% tags=["export"]
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


# %% [markdown]
# **Check.** An error during writing, and one in `check`: each time the old file stays, and no other file is left.

# %%
def refuse(part):
    raise RuntimeError(f"{part.stat().st_size} bytes, but wrong ones")


for check in None, refuse:
    try:
        with whole_file(folder / "three", check) as file:
            file.write(b"defgh")
            if check is None:
                raise KeyboardInterrupt
    except (KeyboardInterrupt, RuntimeError) as error:
        print(repr(error), (folder / "three").read_bytes(), sorted(p.name for p in folder.iterdir()))
    assert (folder / "three").read_bytes() == b"abc"
with whole_file(folder / "three") as file:
    file.write(b"defgh")
assert (folder / "three").read_bytes() == b"defgh"
scratch.cleanup()

# %% [markdown]
# ## 5.2.6 Summary
#
# - A read ends with all bytes, or with one line: which file, at which offset, how many bytes came and how many were
#   expected.
# - JSON with a name twice, or nested too deep, is refused. A lenient reader would choose one of the two values.
# - A file is written under a hidden name, synced, and renamed. A reader finds the old file or the new one.
#
# **Exercises.**
# 1. Leave out the `fsync` in `whole_file`. Which crash does it guard against, and why does the check above still pass?
# 2. Two processes write the same path with `whole_file` at once. What can a reader find?
# 3. Replace a file by one of equal length and equal time of the last write, but with other bytes. Which of the four
#    numbers of `fingerprint` differs?
