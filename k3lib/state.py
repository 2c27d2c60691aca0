"""5.20 A sequence saved and loaded

Made from book/05_streaming/20_state.py: edit that, then run `make export`.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any
import numpy as np
from k3lib.fileio import (
    CheckpointError, MissingFile, UsageError, given_path, open_shard, read_exactly, whole_file,
)
from k3lib.config import Config
from k3lib.header import Extent, header_bytes
from k3lib.model import Sequence


class StateError(CheckpointError):
    "A saved state that is damaged, or that belongs to another model or version."


STATE_FORMAT, STATE_VERSION = "k3lib state", 2
ABOUT_BYTES = 512  # the description at the end of the file
READ_BYTES = 1 << 20  # bytes read at a time


def saved_arrays(sequence: Sequence, position: int) -> list[tuple[str, np.ndarray]]:
    "[(name, float32 array)], views of a sequence's arrays in the order of the file; of a KV cache the rows in use."
    named = []
    for L, layer in enumerate(sequence.layers):
        parts = {"latent": layer[:position]} if isinstance(layer, np.ndarray) else layer._asdict()
        named += [(f"layers.{L}.{part}", array) for part, array in parts.items()]
    return named


def state_header(arrays: list[tuple[str, np.ndarray]]) -> bytes:
    "The header of a state file with these `arrays`, which determine it."
    return header_bytes([*((name, "F32", array.shape) for name, array in arrays), ("about", "U8", (ABOUT_BYTES,))])


def about_bytes(model: str, position: int, unread: int | None, sha256: str = "") -> bytes:
    "The description, JSON of ABOUT_BYTES. The checksum covers a description in which `sha256` is still empty."
    about = {"format": STATE_FORMAT, "version": STATE_VERSION, "model": model, "position": position, "unread": unread,
             "sha256": sha256}
    return json.dumps(about).encode().ljust(ABOUT_BYTES)


def model_fingerprint(config: Config, tensors: Iterable[tuple[str, Extent, np.ndarray]]) -> str:
    """The name of a model in its saved states: a sha256, in hex, of the config and of `tensors`.

    `tensors`: (name, extent, values) of every tensor of the forward pass, in its order. `values` is all of a vector, or
    the first row of a matrix.
    """
    fields = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in dataclasses.asdict(config).items()
              if k not in ("num_nextn_predict_layers", "unusual")}  # nothing is computed from these
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name, extent, values in tensors:
        digest.update(f"{name} {extent.dtype} {extent.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def save_sequence(file: str | os.PathLike, sequence: Sequence, model: str, unread: int | None = None) -> None:
    """Write the sequence to `file`, whole or not at all. `model`: the model's fingerprint. `unread`: an id, or None.

    Raises OSError, and UsageError if `file` is no path.
    """
    path = given_path("file", file)
    arrays = saved_arrays(sequence, sequence.position)
    contents: list[bytes | memoryview] = [state_header(arrays), *(array.reshape(-1).data for _, array in arrays)]
    digest = hashlib.sha256(about_bytes(model, sequence.position, unread))
    with whole_file(path) as out:
        for data in contents:
            digest.update(data)
            out.write(data)
        out.write(about_bytes(model, sequence.position, unread, digest.hexdigest()))


def load_sequence(file: str | os.PathLike, sequence: Sequence, model: str) -> int | None:
    """Replace what `sequence` holds by the state that save_sequence has written to `file`. Returns its unread id.

    `model`: the model's fingerprint. Raises MissingFile; StateError for a file that is damaged, or of another
    model or version; UsageError for a `file` that is no path, or more positions than the context. After an error the
    sequence is unchanged, unless the second of two readings failed: then it is incomplete and must be reset.
    """
    path = given_path("file", file)
    if not path.is_file():
        raise MissingFile(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}, expected a saved state")
    with open_shard(path) as source:
        try:
            position, unread = check_state(source, path, sequence, model)
            arrays = saved_arrays(sequence, position)
            at = len(state_header(arrays))
            sequence.complete = False
            for _, array in arrays:
                read_exactly(source, array.reshape(-1).view(np.uint8).data, at, path)
                at += array.nbytes
            check_state(source, path, sequence, model)
        except CheckpointError as error:
            raise StateError(str(error)) from None
        sequence.position, sequence.complete = position, True
        return unread


def check_state(source: FileIO, path: Path, sequence: Sequence, model: str) -> tuple[int, int | None]:
    "Check every byte of the state in the open file `source`: (position, unread id). Raises as load_sequence does."
    size = os.fstat(source.fileno()).st_size
    last = b"".join(file_chunks(source, max(0, size - ABOUT_BYTES), size, path))
    position, unread, sha256 = check_about(last, size, path, sequence, model)
    arrays = saved_arrays(sequence, position)
    expected = len(state_header(arrays)) + sum(array.nbytes for _, array in arrays) + ABOUT_BYTES
    if size != expected:
        raise StateError(f"{path}: {size:,} bytes, expected {expected:,} for {position} positions")
    digest = hashlib.sha256(about_bytes(model, position, unread))
    for chunk in file_chunks(source, 0, size - ABOUT_BYTES, path):
        digest.update(chunk)
    if last != about_bytes(model, position, unread, digest.hexdigest()):
        raise StateError(f"{path}: sha256 {digest.hexdigest()!r:.17}..., expected {sha256!r:.17}...: damaged")
    return position, unread


def described(last: bytes, size: int, path: Path) -> dict[str, Any]:
    "The description in the `last` ABOUT_BYTES of a file of `size` bytes. Raises StateError, also for another version."
    try:
        about = json.loads(last)
        position, unread, good = about["position"], about.get("unread"), about["format"] == STATE_FORMAT
        good &= type(about["version"]) is int and type(about["sha256"]) is str and type(about["model"]) is str
        good &= type(position) is int and 0 <= position < 1 << 40
        good &= unread is None or type(unread) is int and 0 <= unread < 1 << 32
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        good = False
    if not good:
        raise StateError(f"{path}: the last {ABOUT_BYTES} of {size:,} bytes are not the description of a saved state: "
                         "truncated, damaged, or another kind of file")
    if about["version"] != STATE_VERSION:
        raise StateError(f"{path}: a state of version {about['version']!r:.40}, expected {STATE_VERSION}")
    return about


def check_about(last: bytes, size: int, path: Path, sequence: Sequence, model: str) -> tuple[int, int | None, str]:
    """Check the description, the `last` ABOUT_BYTES of a file of `size` bytes: (position, unread id, sha256) from it.

    Raises StateError, and UsageError for a position beyond the context.
    """
    about = described(last, size, path)
    if about["model"] != model:
        raise StateError(f"{path}: the state of another model, {about['model']!r:.20}, expected {model:.16}")
    if about["position"] > sequence.context:
        raise UsageError(f"{path}: a state of {about['position']} positions does not fit the context of "
                         f"{sequence.context} this model was loaded for")
    return about["position"], about["unread"], about["sha256"]


def description(file: str | os.PathLike) -> dict[str, Any]:
    """The description of the saved state in `file`, of which nothing else is checked: position, unread, model, ...

    Raises MissingFile, StateError, and UsageError if `file` is no path.
    """
    path = given_path("file", file)
    if not path.is_file():
        raise MissingFile(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}, expected a saved state")
    with open_shard(path) as source:
        size = os.fstat(source.fileno()).st_size
        return described(b"".join(file_chunks(source, max(0, size - ABOUT_BYTES), size, path)), size, path)


def file_chunks(file: FileIO, begin: int, end: int, where: Path) -> Iterator[bytearray]:
    "Bytes begin..end of an open file, READ_BYTES at a time. Raises CheckpointError where the file ends early."
    for at in range(begin, end, READ_BYTES):
        chunk = bytearray(min(READ_BYTES, end - at))
        read_exactly(file, chunk, at, where)
        yield chunk


class PrefixCache:
    """States in `folder`, found again by the ids that they have read. `most`: bytes of all of them together.

    Two processes may use one folder. Raises OSError where it cannot be made, read or written.
    """

    def __init__(self, folder: str | os.PathLike, most: int):
        self.folder, self.most = given_path("folder", folder).absolute(), most
        self.folder.mkdir(parents=True, exist_ok=True)

    def longest(self, model: str, ids: Iterable[int]) -> tuple[Path, int] | None:
        "(file, ids read) of the state that has read the most of `ids`, but not all; None if there is none."
        words = np.fromiter(ids, "<u4")
        lengths = sorted({int(name[1]) for file in self._files() if (name := re.match("([0-9]{1,12})-", file.name))})
        digest, read, found = hashlib.sha256(model.encode()), 0, None
        for n in lengths:
            if not 0 < n < len(words):
                continue
            digest.update(words[read:n].tobytes())
            read, file = n, self.folder / f"{n}-{digest.hexdigest()}.state"
            if file.is_file():
                found = file, n
        return found

    def name(self, model: str, ids: Iterable[int]) -> Path:
        "The file of the state that has read exactly `ids`."
        words = np.fromiter(ids, "<u4")
        return self.folder / f"{len(words)}-{hashlib.sha256(model.encode() + words.tobytes()).hexdigest()}.state"

    def used(self, file: Path) -> None:
        "Note that the state in `file` was used now."
        with contextlib.suppress(OSError):  # another process may have removed it
            os.utime(file)

    def room(self, nbytes: int) -> bool:
        "Remove the states that were used longest ago until `nbytes` more fit. False if they can never fit."
        if nbytes > self.most:
            return False
        kept = []
        for file in self._files():
            with contextlib.suppress(FileNotFoundError):
                kept.append((file.stat().st_mtime_ns, file.stat().st_size, file))
        total = sum(size for _, size, _ in kept)
        for _, size, file in sorted(kept):
            if total + nbytes <= self.most:
                break
            file.unlink(missing_ok=True)
            total -= size
        return True

    def _files(self):
        return list(self.folder.glob("*.state"))


def state_file_bytes(sequence: Sequence) -> int:
    "The size of the file that save_sequence writes."
    arrays = saved_arrays(sequence, sequence.position)
    return len(state_header(arrays)) + sum(array.nbytes for _, array in arrays) + ABOUT_BYTES


__all__ = [
    "StateError", "STATE_FORMAT", "STATE_VERSION", "ABOUT_BYTES", "READ_BYTES", "saved_arrays", "state_header",
    "about_bytes", "model_fingerprint", "save_sequence", "load_sequence", "check_state", "described", "check_about",
    "description", "file_chunks", "PrefixCache", "state_file_bytes",
]
