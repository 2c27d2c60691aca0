# %% [markdown]
# # 5.20 A sequence saved and loaded
#
# Reading a long prompt takes minutes; the recurrent state and the KV cache that it leaves are half a gigabyte. Without
# this chapter an interrupted run reads the prompt again. With it, a sequence goes on from where it was saved: at
# another budget, with another number of threads, in another context, and to the same bytes.
#
# A saved state is also a way to be wrong without noticing. With half a state, or with that of another model of the same
# shape, the engine decodes without any error. So a state is written whole or not at all, and it is refused unless every
# byte of it is the one that was written.
#
# Needs chapters [5.2] (files), [5.5] (the header) and [5.8] (the model). Runs in seconds.
#
# [5.19 The trunk on a faster disk](19_pack.ipynb) ·
# [contents](../README.md) ·
# [5.21 Bytes to ids and back](21_tokenizer.ipynb)
#
# [5.2]: 02_fileio.ipynb
# [5.5]: 05_header.ipynb
# [5.8]: 08_model.ipynb

# %%
import tempfile
from pathlib import Path

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
FOLDER = ROOT / "fixtures" / "oracle13" / "model"

# %% [markdown]
# ## 5.20.1 The file
#
# A state is a safetensors file, so any reader of that format can look into it. The library that writes such files needs
# all of the file in memory a second time. The smallest budget for K3 has no room for that, so the file is written array
# by array.
#
# | part | bytes |
# |---|---|
# | header | follows from the config and the position alone |
# | of each KDA layer: `conv`, the convolution history, and `S`, the recurrent state | float32 |
# | of each MLA layer: `latent`, the KV cache's rows in use | float32 |
# | `about`: version, model, position, unread id, sha256 of all before it | 512, JSON, padded with spaces |
#
# The unread id was generated last, and no pass has read it ([5.26.2]). With it a run goes on that ended at its last
# token.
#
# The description is a tensor like the others, and it is the last one, because the checksum is known last. The header
# carries no information: config and position determine it. So it need not be parsed. The checksum compares it, like all
# other bytes.
#
# [5.26.2]: 26_engine.ipynb#5.26.2-Decoding

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# ## 5.20.2 Which model
#
# The header says which shapes a state has, and two models of one shape have the same header. So a state names its
# model: a hash of the config, of every tensor's dtype and shape, of all vectors and of the first row of every matrix.
# For K3 that reads a few megabytes of 1.56 TB. The hash is the same at every budget and for a packed trunk. It does not
# depend on the other rows: `k3 verify` (5.27) is what compares every byte of the weights.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.20.3 Saving
#
# `whole_file` (5.2) writes under another name and renames at the end. A full disk or a power cut leaves the old file,
# or none.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.20.4 Loading
#
# A file that is refused must leave the sequence as it was, so it is read twice: once to be checked and once to be
# loaded. Between the two, another program may write to it. Therefore it is checked again after loading, and the
# sequence is not `complete` until that check has passed.
#
# Every check has its own message. They come in the order of their cost: a description at the end of the file, its
# version and its model, a position that fits the context, the size of the file, the checksum.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# The last bytes of a file that is no state may be anything, for example JSON that nests 512 deep. Each exception of
# the parser means the same: this is not a description.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# ## 5.20.5 The gate
#
# A sequence of made-up numbers goes through a file and comes back as the same bytes, into a larger context. Each way to
# be wrong is refused, and the refused sequence still holds what it held.

# %%
from k3lib.config import read_config

config = read_config(FOLDER)


def made_up(context, position, seed=0):
    "A sequence whose arrays hold random numbers."
    sequence, rng = Sequence(config, context), np.random.default_rng(seed)
    sequence.position = position
    for _, array in saved_arrays(sequence, position):
        array[...] = rng.standard_normal(array.shape, np.float32)
    return sequence


def content(sequence):
    return [array.tobytes() for _, array in saved_arrays(sequence, sequence.position)]


def refusal(file, sequence, model="a model"):
    "What load_sequence says; the sequence must not change."
    before = content(sequence)
    try:
        load_sequence(file, sequence, model)
    except (StateError, UsageError) as error:
        assert content(sequence) == before and sequence.complete
        return str(error).replace(f"{Path(file).parent}/", "")


with tempfile.TemporaryDirectory() as scratch:
    file = Path(scratch, "state")
    saved = made_up(context=8, position=5)
    save_sequence(file, saved, "a model")
    other = made_up(context=32, position=3, seed=1)
    load_sequence(file, other, "a model")
    assert other.position == 5 and content(other) == content(saved)
    print(f"{file.stat().st_size:,} bytes, back again as the same bytes: True")

    good = file.read_bytes()
    print(refusal(file, made_up(8, 3), model="another model"))
    print(refusal(file, made_up(4, 3)))
    for what, data in (("cut short", good[:-1]), ("one bit", good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])):
        file.write_bytes(data)
        print(f"{what}:", refusal(file, made_up(8, 3)))


# %% [markdown]
# The last refusal shows what the checksum is for: one bit of a recurrent state has changed, nothing else in the file is
# wrong, and the model would go on with a slightly different memory.
#
# ## 5.20.6 Prompts that begin alike
#
# Many prompts begin with the same long text. A state after that text serves all of them. So states of prefixes are kept
# in a folder, each under a name that tells what it has read: the number of ids, and a hash of the model and of these
# ids. For a new prompt the hash of every length in the folder is computed, and the longest that agrees is found without
# opening a file.
#
# A state of K3 is half a gigabyte, so the folder has a bound. The state that was used longest ago goes first, and it
# goes before the new one is written, so the bound holds at every moment. A prompt's last id always has to be read,
# because the logits of the next one come from it. So what is kept is the state before that id: then it serves the same
# prompt again, too.

# %% tags=["export"]
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


# %% tags=["export"]
class PrefixCache(PrefixCache):
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


# %% tags=["export"]
def state_file_bytes(sequence: Sequence) -> int:
    "The size of the file that save_sequence writes."
    arrays = saved_arrays(sequence, sequence.position)
    return len(state_header(arrays)) + sum(array.nbytes for _, array in arrays) + ABOUT_BYTES


# %%
with tempfile.TemporaryDirectory() as scratch:
    ids, size = [7, 11, 13, 17, 19], state_file_bytes(made_up(8, 2))
    cache = PrefixCache(scratch, 2 * size + 10_000)
    for n in 2, 4, 3:
        assert cache.room(state_file_bytes(made_up(8, n)))
        save_sequence(cache.name("a model", ids[:n]), made_up(8, n), "a model")
    print("kept:", *sorted(file.name[:8] + "..." for file in Path(scratch).iterdir()))
    for prompt in ids, ids[:4], [7, 11, 13, 18, 19], [8, *ids]:
        found = cache.longest("a model", prompt)
        print(prompt, "begins after", found[1] if found else 0, "ids")
    assert cache.longest("another model", ids) is None and cache.longest("a model", ids)[1] == 4

# %% [markdown]
# ## Summary
#
# - The state of a sequence is a safetensors file whose header follows from its position, and whose last tensor says
#   what it is.
# - The file is written whole or not at all, and loaded only after every byte was checked.
# - It names its model by a hash for which megabytes are read, not terabytes.
# - States of prefixes are found by what they have read, and the one used longest ago makes room.
#
# ## Exercises
#
# 1. Open a state with the safetensors library and plot the singular values of one layer's `S` against the position.
# 2. Swap the order of check and load in `load_sequence`. Which of the refusals above now leaves a changed sequence?
#
# Next: [5.21 Bytes to ids and back](21_tokenizer.ipynb).
