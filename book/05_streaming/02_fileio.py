# %% [markdown]
# # 5.2 Files read whole or refused, written whole or not at all
#
# The 1.56 TB of the model are in files that took hours to download. Any of them may be cut short, damaged or replaced,
# and a wrong byte in a weight raises no error by itself. So a file must be read in such a way that a fault is never
# taken for data. A file that the engine writes must be complete under its name, or not be there. At the end of this
# chapter you can read a file so that every fault of this kind is refused, and write a file so that a power cut leaves
# the old file or the new one.
#
# > **Without it:** a JSON reader that meets a name twice keeps the last value, and an interrupted write leaves half a
# > file under the final name.
# >
# > **With it:** both cases are tested below: the first is refused in one line, and after the second the old file is
# > unchanged.
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
# When something fails, the user must know what to repair: the command, the download, or neither. So each class of error
# has an exit code for the command line: 2 for a request that cannot be served, 4 for weights that are missing or
# damaged, and 1 for anything else. Later chapters derive classes of their own from these. A `UsageError` is also a
# `ValueError`, Python's error for a bad argument. A `MissingFile` is also a `FileNotFoundError`. So a program can catch
# all errors of this package as `K3Error`, or a missing file as usual.
#
# A process may have only a limited number of files open. If it has reached the limit, it cannot open a good file. The
# file is not damaged then, and a new download does not help. So `read_fault` looks at the reason that the system gives,
# and turns such a failure into a `ResourceError`. A command that needs threads checks with `require_threads`, before
# its first read, that they can be started.

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
# An argument of a wrong type must be refused early: `open(5)` opens the file that happens to have the descriptor 5. So
# public functions check their arguments. The error names the argument and says what was expected.
#
# A path is made absolute when a function receives it. Some files are opened hours later. By then the program may have
# changed its current folder, and a relative path would lead to another file or to none. Links in a path are not
# followed at this point: the files in the cache of a model hub are links, and only the name of the link says which
# shard it is.

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
# One call of the system may read fewer bytes than it was asked for, and it never reads more than 2 GiB. K3's embedding
# has 2.35 GB. So a read is a loop. It ends early only if a call returns no bytes, because then the file ends there.
# `where` is the text that names the file and the tensor in an error message.

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
# Three kinds of paths are refused when a file is opened. A pipe would make the program wait for a writer. A folder can
# be opened like a file on some systems. A broken link fails with "no such file", although its name is listed in the
# folder, so the error says that it is a link. Other links are followed, because the caches of model hubs consist of
# links.

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
# JSON files describe the model: headers (5.5), configs (5.3) and vocabularies (5.21). One function reads them all. It
# is stricter than Python's JSON reader in two points:
#
# - **Equal names.** If an object has the same name twice, Python keeps the last value without a message. Another
#   program may keep the first. So the object is refused.
# - **Nesting.** Python parses and prints nested values by recursion. A text can be parsed just below the recursion
#   limit and then fail when it is printed. So the depth has a bound.
#
# Some values are not used for anything, for example the notes in a header. A fault in them does no harm. So a fault is
# stored with its object, and raised only if the object is not under the name `ignored`.

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
# A gate says what a strict reader must do, and Python's own reader fails it:

# %%
def check_strict(read):
    "The gate: an object with a name twice is refused."
    try:
        found = read(b'{"hidden_size": 7168, "hidden_size": 128}')
    except CheckpointError as error:
        print("refused:", error)
    else:
        raise AssertionError(f"a name that is found twice was read as {found}")


check_strict(lambda text: json_object(text, "toy"))

# %% tags=["raises-exception"]
check_strict(json.loads)


# %% [markdown]
# Some facts about a file are unusual and change no number: notes in another form, or a list that leaves out tensors
# that are not used. A reader that refuses such a file calls a good checkpoint damaged. So these facts are counted, and
# `k3 census` (5.6) shows them.

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
# A run may take several days, and somebody may replace a file meanwhile. Four numbers show it. If the device or the
# inode differs, the path leads to another file. If the length or the time of the last write differs, the file has been
# written to.

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
# If the disk is full, Python's error does not name the file, and it may occur only when the file is closed. `writing`
# adds the name of the file and the byte at which writing failed.

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
# A file must be complete when it has its final name. So `whole_file` writes to a hidden file in the same folder. When
# all bytes are on the disk, it renames the hidden file in one step, and then syncs the folder, which stores the name
# ([5.1.4]). Before the file gets its name, the caller may check it.
#
# Renaming removes the file that had the name before. For a user with all rights this could be a device: a state that is
# saved to `/dev/null` would remove it for every program of the machine. So only a regular file is replaced. A link is
# not replaced, because the file that it leads to would keep its old bytes.
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
# The check raises an error while the file is written, and then an error in `check`. Each time the old file must stay,
# and no other file may be left.

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
# - A read returns all its bytes or raises an error: one line with the file, the offset, the bytes that came and those
#   that were expected.
# - JSON that has a name twice, or is nested too deep, is refused.
# - A file is written under a hidden name, synced, and renamed. A reader finds the old file or the new one.
#
# ## Exercises
#
# The answers are in [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Remove the `fsync` from `whole_file`. Against which failure does it help, and why does the check above still pass?
# 2. Two processes write the same path with `whole_file` at the same time. What can a reader find?
# 3. A file is replaced by another one with the same length and the same time of the last write. Which of the four
#    numbers of `fingerprint` differs?
