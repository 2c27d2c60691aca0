"""5.2 Files read whole or refused, written whole or not at all

Made from book/05_streaming/02_fileio.py: edit that, then run `make export`.
"""

import json
import os
import stat
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from k3lib.system import pread_into, sync_folder


class CheckpointError(Exception):
    "Weights that are missing, truncated or damaged. One line: file, tensor, what was found, what was expected."


class UsageError(ValueError):
    "An argument that cannot be served: token ids, context, budget."


DEPTH_MAX = 16  # lists and objects inside one another: a header has 3, a config 6


def shown_value(value):
    "A value out of a file, on one line, cut where it gets long."
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _is_deep(tree):
    "Whether `tree` holds more than DEPTH_MAX lists and objects inside one another."
    level = [tree]
    for _ in range(DEPTH_MAX):
        level = [inner for outer in level for inner in (outer.values() if type(outer) is dict else outer) if type(inner) in (dict, list)]
    return bool(level)


def json_object(text, where, error=CheckpointError):
    """The JSON object in the bytes `text`, which `where` names.

    Raises `error` if it is none in UTF-8, has a name twice in one object, or nests more than DEPTH_MAX deep.
    """
    def unique(pairs):
        found = dict(pairs)
        "".join(found).encode("utf-8")  # half a surrogate pair is JSON, but no name that could be printed
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: name {shown_value(twice)} found twice, expected once")
        return found

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except error:
        raise
    except (ValueError, RecursionError) as fault:
        raise error(f"{where} is not JSON: {str(fault)[:120]}, expected a JSON object in UTF-8") from None
    if type(found) is not dict:
        raise error(f"{where} holds a JSON {type(found).__name__}, expected an object")
    if _is_deep(found):
        raise error(f"{where} nests lists and objects more than {DEPTH_MAX} deep, expected {DEPTH_MAX} at most")
    return found


READ_MAX = 1 << 30  # bytes asked of one call: Linux moves at most 2 GiB - 4 KiB, macOS refuses more than 2 GiB


def read_exactly(file, view, offset, where):
    "Fill `view`, writable bytes, from byte `offset` of the unbuffered `file`; CheckpointError if it ends early or fails."
    view, done = memoryview(view), 0
    try:
        while done < len(view) and (got := pread_into(file, view[done:done + READ_MAX], offset + done)):
            done += got
    except (OSError, ValueError) as error:  # ValueError: the file was closed
        raise CheckpointError(f"{where}: reading {len(view):,} bytes at offset {offset:,} failed: {error}") from None
    if done < len(view):
        raise CheckpointError(f"{where}: got {done:,} bytes at offset {offset:,}, expected {len(view):,}: the file ends there")


@contextmanager
def writing(path):
    "open(path, 'wb') in a `with`, whose OSError names the file and the byte at which it could not be written."
    file = open(path, "wb")
    try:
        yield file
        file.flush()
    except OSError as error:
        place = f"{path}: writing at byte {os.lseek(file.fileno(), 0, os.SEEK_CUR):,} failed: {error.strerror}"
        raise OSError(error.errno, place) if error.filename is None else error from None
    finally:
        with suppress(OSError):  # what could not be written above cannot be at the end either
            file.close()


@contextmanager
def whole_file(path):
    "writing() a file that gets its name when it is complete and on the disk; if anything fails before that, nothing of it stays."
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync_folder(path.parent)
    finally:
        part.unlink(missing_ok=True)


def fingerprint(status):
    "(device, inode, bytes, time of the last write in ns) of an os.stat: what tells that a file is another, or was written to, since."
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _open(path):
    "An open unbuffered file; OSError otherwise. Links are followed: a hub cache is made of them. A pipe, which would wait, is not opened."
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(0, "a link to nothing" if os.path.islink(path) else "no such file") from None
    if not stat.S_ISREG(mode):
        raise OSError(0, "not a file")
    return open(path, "rb", buffering=0)


def open_shard(path):
    "An open unbuffered file; CheckpointError if there is none."
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None


def small_file(path, most, error):
    "The bytes of a file of 1 to `most`, judged before one is read. FileNotFoundError if there is none, `error` if it is not to be had."
    try:
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not 0 < size <= most:
                raise error(f"{path}: {size:,} bytes, expected 1 to {most:,}")
            return file.read()
    except FileNotFoundError as fault:
        raise FileNotFoundError(f"{path}: {fault.strerror}") from None
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None


__all__ = [
    "CheckpointError", "UsageError", "DEPTH_MAX", "shown_value", "json_object", "READ_MAX", "read_exactly",
    "writing", "whole_file", "fingerprint", "open_shard", "small_file",
]
