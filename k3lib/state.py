"""5.20 A sequence saved and loaded

Made from book/05_streaming/20_state.py: edit that, then run `make export`.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
import numpy as np
from k3lib.fileio import (
    CheckpointError, MissingFile, UsageError, given_path, open_shard, read_exactly, whole_file,
)
from k3lib.config import Config
from k3lib.header import Extent, header_bytes
from k3lib.model import Sequence


class StateError(CheckpointError):
    "A saved state that is damaged, or that belongs to another model or version."


STATE_FORMAT, STATE_VERSION = "k3lib state", 1
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


def about_bytes(model: str, position: int, sha256: str = "") -> bytes:
    "The description, JSON of ABOUT_BYTES. The checksum covers a description in which `sha256` is still empty."
    about = {"format": STATE_FORMAT, "version": STATE_VERSION, "model": model, "position": position, "sha256": sha256}
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


def save_sequence(file: str | os.PathLike, sequence: Sequence, model: str) -> None:
    """Write the sequence to `file`, whole or not at all. `model`: the model's fingerprint.

    Raises OSError, and UsageError if `file` is no path.
    """
    path = given_path("file", file)
    arrays = saved_arrays(sequence, sequence.position)
    contents: list[bytes | memoryview] = [state_header(arrays), *(array.reshape(-1).data for _, array in arrays)]
    digest = hashlib.sha256(about_bytes(model, sequence.position))
    with whole_file(path) as out:
        for data in contents:
            digest.update(data)
            out.write(data)
        out.write(about_bytes(model, sequence.position, digest.hexdigest()))


def load_sequence(file: str | os.PathLike, sequence: Sequence, model: str) -> None:
    """Replace what `sequence` holds by the state that save_sequence has written to `file`.

    `model`: the model's fingerprint. Raises MissingFile; StateError for a file that is damaged, or of another
    model or version; UsageError for a `file` that is no path, or more positions than the context. After an error the
    sequence is unchanged, unless the second of two readings failed: then it is incomplete and must be reset.
    """
    path = given_path("file", file)
    if not path.is_file():
        raise MissingFile(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}, expected a saved state")
    with open_shard(path) as source:
        try:
            position = check_state(source, path, sequence, model)
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


def check_state(source: FileIO, path: Path, sequence: Sequence, model: str) -> int:
    "Check every byte of the state in the open file `source`. Returns its position. Raises as load_sequence does."
    size = os.fstat(source.fileno()).st_size
    last = b"".join(file_chunks(source, max(0, size - ABOUT_BYTES), size, path))
    position, sha256 = check_about(last, size, path, sequence, model)
    arrays = saved_arrays(sequence, position)
    expected = len(state_header(arrays)) + sum(array.nbytes for _, array in arrays) + ABOUT_BYTES
    if size != expected:
        raise StateError(f"{path}: {size:,} bytes, expected {expected:,} for {position} positions")
    digest = hashlib.sha256(about_bytes(model, position))
    for chunk in file_chunks(source, 0, size - ABOUT_BYTES, path):
        digest.update(chunk)
    if last != about_bytes(model, position, digest.hexdigest()):
        raise StateError(f"{path}: sha256 {digest.hexdigest()!r:.17}..., expected {sha256!r:.17}...: damaged")
    return position


def check_about(last: bytes, size: int, path: Path, sequence: Sequence, model: str) -> tuple[int, str]:
    """Check the description, the `last` ABOUT_BYTES of a file of `size` bytes. Returns (position, sha256) from it.

    Raises StateError, and UsageError for a position beyond the context.
    """
    try:
        about = json.loads(last)
        position, sha256 = about["position"], about["sha256"]
        good = about["format"] == STATE_FORMAT and type(position) is int and 0 <= position < 1 << 40
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise StateError(f"{path}: the last {ABOUT_BYTES} of {size:,} bytes are not the description of a saved state: "
                         "truncated, damaged, or another kind of file")
    if about["version"] != STATE_VERSION:
        raise StateError(f"{path}: a state of version {about['version']!r:.40}, expected {STATE_VERSION}")
    if about["model"] != model:
        raise StateError(f"{path}: the state of another model, {about['model']!r:.20}, expected {model:.16}")
    if position > sequence.context:
        raise UsageError(f"{path}: a state of {position} positions does not fit the context of {sequence.context} "
                         "this model was loaded for")
    return position, sha256


def file_chunks(file: FileIO, begin: int, end: int, where: Path) -> Iterator[bytearray]:
    "Bytes begin..end of an open file, READ_BYTES at a time. Raises CheckpointError where the file ends early."
    for at in range(begin, end, READ_BYTES):
        chunk = bytearray(min(READ_BYTES, end - at))
        read_exactly(file, chunk, at, where)
        yield chunk


__all__ = [
    "StateError", "STATE_FORMAT", "STATE_VERSION", "ABOUT_BYTES", "READ_BYTES", "saved_arrays", "state_header",
    "about_bytes", "model_fingerprint", "save_sequence", "load_sequence", "check_state", "check_about",
    "file_chunks",
]
