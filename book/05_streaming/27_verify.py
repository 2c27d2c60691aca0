# %% [markdown]
# # 5.27 Whether every byte is the one that was published
#
# A header says where a weight lies, not whether it is right. One wrong byte in 1.56 TB changes no size and raises no
# error, so this chapter compares files with hashes that somebody computed before the damage. At the end you can check a
# download against the hashes that the download itself left behind, write a manifest that `sha256sum` reads, interrupt a
# check and continue it, and say what was *not* checked.
#
# Needs chapters [5.2] (files), [5.5] (headers), [5.7] (the checkpoint) and [5.26] (the engine). Runs in half a minute.
#
# [5.26 From a folder to a running model](26_engine.ipynb) ·
# [contents](../README.md) ·
# [5.28 A checkpoint without the weights](28_synth.ipynb)
#
# [5.2]: 02_fileio.ipynb
# [5.5]: 05_header.ipynb
# [5.7]: 07_checkpoint.ipynb
# [5.26]: 26_engine.ipynb

# %%
import hashlib
import shutil
import subprocess
import tempfile

import matplotlib.pyplot as plt
import numpy as np

from k3lib.config import read_config
from k3lib.engine import load
from k3lib.tensors import check_tensors

# %% [markdown]
# | symbol | meaning | in code |
# |---|---|---|
# | payload | the bytes after the header, whose values the header does not describe | |
# | hash | 32 bytes (SHA-256) or 20 (SHA-1) that follow from all bytes of a file | `hashes` |
# | expected | a hash from elsewhere, and its source | `Expected` |
# | manifest | a text file of hashes and names | `read_manifest` |
# | stamp | size, times and inode of a file: they must not change while it is read | `FileStamp` |
#
# ## 5.27.1 By hand: one bit, and what sees it
#
# Flip the lowest bit of one weight. The size is the same, the header is the same, and the sum of the bytes moves by one
# in 1.56 TB. A hash is made so that about half of its 256 bits change.

# %%
toy = bytes(range(64))
wrong = bytes([toy[0] ^ 1]) + toy[1:]
one, other = (hashlib.sha256(data).digest() for data in (toy, wrong))
print("sums of the bytes:", sum(toy), sum(wrong))
print("SHA-256:", one[:6].hex(), "...", other[:6].hex(), "...")
print("bits that differ:", sum((a ^ b).bit_count() for a, b in zip(one, other)), "of 256")

# %% [markdown]
# Two kinds of hash come with a download. Large files are known by their SHA-256. Small ones live in git, whose hash is
# SHA-1 of the word `blob`, the length and a zero byte, then the file. Plain SHA-1 is another number, as git itself
# says.

# %%
git_of_hello = "ce013625030ba8dba906f756967f9e9ca394464a"  # what `git hash-object` prints for these six bytes
hello = b"hello\n"
assert hashlib.sha1(b"blob %d\0" % len(hello) + hello).hexdigest() == git_of_hello
assert hashlib.sha1(hello).hexdigest() != git_of_hello

# %% [markdown]
# ## 5.27.2 A file's hashes, in four megabytes
#
# A stamp tells whether a file was changed or replaced. It has one time more than the fingerprint of 5.2: the time of
# the last change to file or attributes, which no program can set. So a stamp differs even if a copying tool has
# restored the time of writing.

# %% tags=["export"]
import hashlib
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from k3lib.system import expect_sequential, forget_pages
from k3lib.fileio import (
    CheckpointError, MissingFile, UsageError, given_path, open_shard, read_exactly, require_threads, shown_value,
)
from k3lib.config import Config
from k3lib.tensors import families
from k3lib.header import ITEMSIZE, parse_header, read_header
from k3lib.checkpoint import INDEX, Checkpoint
from k3lib.memory import whole_number


class FileStamp(NamedTuple):
    "Properties of a file of which at least one changes when it is written to or replaced."
    nbytes: int
    written_ns: int  # time of the last write; a program can set it, as copying tools do
    changed_ns: int  # time of the last change to file or attributes; no program can set it
    inode: int


# %% tags=["export"]
def file_stamp(status: os.stat_result) -> FileStamp:
    "The FileStamp of an os.stat result."
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def stamp_of(path: str | Path) -> FileStamp:
    "The stamp of the file at `path` now. Raises CheckpointError if there is no file."
    try:
        return file_stamp(os.stat(path))
    except OSError as error:
        raise CheckpointError(f"{path}: its size and times cannot be read: {error.strerror}") from None


# %% [markdown]
# A file is read through one buffer of 4 MiB, and the page cache is told to forget each block: 1.56 TB of bytes that are
# read once would evict everything else. The stamp is taken before and after, since the hash of a file that changes in
# between says nothing.

# %% tags=["export"]
SHA256, GIT = "sha256", "git's sha1"
KINDS = {64: SHA256, 40: GIT}  # by the number of hexadecimal digits
HASH_READ_BYTES = 4 << 20  # bytes of a file in memory at a time


class FileHashes(NamedTuple):
    "A file's stamp, and {kind: hash in hexadecimal}."
    stamp: FileStamp
    digests: dict[str, str]


def _new_hash(kind, size):
    if kind not in KINDS.values():
        raise UsageError(f"kind of hash is {shown_value(kind)}, expected {SHA256!r} or {GIT!r}")
    return hashlib.sha256() if kind == SHA256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


# %% tags=["export"]
def hashes(path: str | Path, kinds: Iterable[str], progress: Callable[[int], object] = lambda nbytes: None,
           stop: threading.Event | None = None, read_bytes: int = HASH_READ_BYTES) -> FileHashes | None:
    """The hashes of `kinds`, out of SHA256 and GIT, of the file at `path`; None if `stop` was set before the end.

    `progress` is called with the number of bytes of each read, of `read_bytes` at most. Raises CheckpointError if the
    file cannot be read, or changes while it is read; UsageError for another kind.
    """
    path, read_bytes = given_path("path", path), whole_number("read_bytes", read_bytes, 1, 1 << 30)
    with open_shard(path) as file:
        fd = file.fileno()
        before = file_stamp(os.fstat(fd))
        found = {kind: _new_hash(kind, before.nbytes) for kind in kinds}
        buffer = bytearray(min(read_bytes, before.nbytes))
        expect_sequential(fd)
        for begin in range(0, before.nbytes, read_bytes):
            if stop is not None and stop.is_set():
                return None
            data = memoryview(buffer)[:before.nbytes - begin]
            read_exactly(file, data, begin, path)
            for digest in found.values():
                digest.update(data)
            forget_pages(fd, begin, len(data))
            progress(len(data))
        if file_stamp(os.fstat(fd)) != before or stamp_of(path) != before:
            raise CheckpointError(f"{path}: was changed or replaced while it was read, "
                                  "expected the same file at the end")
    return FileHashes(before, {kind: digest.hexdigest() for kind, digest in found.items()})


# %%
ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
ORACLE = ROOT / "fixtures" / "oracle13" / "model"
scratch = Path(tempfile.mkdtemp())

shard = ORACLE / "model-00001-of-000016.safetensors"
mine = hashes(shard, [SHA256, GIT]).digests
whole = shard.read_bytes()
assert mine[SHA256] == hashlib.sha256(whole).hexdigest()
assert mine[GIT] == hashlib.sha1(b"blob %d\0" % len(whole) + whole).hexdigest()
print(shard.name, mine[SHA256][:12], mine[GIT][:12])

# %% [markdown]
# ## 5.27.3 The manifest: a file that `sha256sum -c` reads
#
# A hash, two spaces, a name: the oldest format there is, so nobody needs this book to check it. A line of another form
# is refused, and so is a name that leads out of the model's folder or stands in the manifest twice.

# %% tags=["export"]
_MANIFEST_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)*([^\x00-\x1f]+)")
MANIFEST_MAX = 1 << 24  # bytes


def manifest_text(found: dict[str, str]) -> str:
    "The manifest of {name: SHA-256 in hexadecimal}."
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items()))


def read_manifest(path: str | Path) -> dict[str, str]:
    """{name: SHA-256} of a sha256sum file.

    Raises FileNotFoundError if there is no such file, CheckpointError if it is no manifest, UsageError for no path.
    """
    path = given_path("path", path)
    if not os.path.lexists(path):
        raise MissingFile(f"{path}: no such manifest")
    with open_shard(path) as file:
        text = bytearray(min(os.fstat(file.fileno()).st_size, MANIFEST_MAX + 1))
        read_exactly(file, text, 0, path)
    if not 0 < len(text) <= MANIFEST_MAX:
        raise CheckpointError(f"{path}: {len(text):,} bytes or more, expected a manifest of 1 to {MANIFEST_MAX:,}")
    found = dict[str, str]()
    for number, line in enumerate(text.decode("utf-8", "replace").rstrip("\r\n").split("\n"), 1):
        match = _MANIFEST_LINE.fullmatch(line.rstrip("\r"))
        if match is None or PurePosixPath(match[2]).is_absolute() or ".." in PurePosixPath(match[2]).parts:
            raise CheckpointError(f"{path}: line {number} is {line[:100]!r}, "
                                  "expected 64 hexadecimal digits, two spaces, a name in the folder")
        if match[2] in found:
            raise CheckpointError(f"{path}: line {number}: {match[2]!r} is listed twice, expected once")
        found[match[2]] = match[1].lower()
    return found


# %% [markdown]
# Where should the manifest lie? This program never writes into a model's folder, which may be read-only or belong to a
# cache. So the manifest lies beside the folder, under the model's name. In a hub cache the folder of snapshots may hold
# nothing but snapshots, so there the manifest lies one level up.

# %% tags=["export"]
def manifest_path(folder: str | Path) -> Path:
    "Where the manifest of the model in `folder` is looked for: beside it, or beside `snapshots` in a hub cache."
    folder = given_path("folder", folder).resolve()
    home = folder.parents[1] if folder.parent.name == "snapshots" else folder.parent
    return home / f"{folder.name}.sha256"


# %%
text = manifest_text({"b.safetensors": "ab" * 32, "a.json": "cd" * 32})
(scratch / "toy.sha256").write_text(text)
assert read_manifest(scratch / "toy.sha256") == {"a.json": "cd" * 32, "b.safetensors": "ab" * 32}
for bad in ("", "ab" * 31 + "  a\n", "ab" * 32 + "  ../a\n", text + text):
    (scratch / "toy.sha256").write_text(bad)
    try:
        read_manifest(scratch / "toy.sha256")
    except CheckpointError as error:
        print(str(error).partition("toy.sha256: ")[2][:110])


# %% [markdown]
# ## 5.27.4 What a download leaves behind
#
# A hub cache stores each file under its hash, `blobs/<hash>`, and a snapshot is links to those. `hf download
# --local-dir` puts real files in place and keeps `.cache/huggingface/download/<name>.metadata`: commit, hash, time, a
# line each. 64 digits are SHA-256, 40 are git's.

# %% tags=["export"]
class Expected(NamedTuple):
    "A hash that a file should have, in hexadecimal, and where that is said."
    kind: str
    digest: str
    source: str


def _expected(digest, source):
    if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", digest):
        yield Expected(KINDS[len(digest)], digest, source)


def download_hashes(folder: str | Path, name: str) -> Iterator[Expected]:
    """The hashes that a download has left for the file `name` of `folder`.

    They are the name of its blob in a hub cache, and the second line of its .metadata.
    """
    blob = Path(os.path.realpath(Path(folder, name)))
    if blob.parent.name == "blobs":
        yield from _expected(blob.name, "the hub cache's name for it")
    try:
        with open(Path(folder, ".cache", "huggingface", "download", f"{name}.metadata"), encoding="ascii") as file:
            lines = file.read(1000).split("\n")
    except (OSError, ValueError):  # ValueError: not ASCII
        return
    yield from _expected(lines[1].strip() if len(lines) > 2 else "", "its download's .metadata")


# %%
local = Path(shutil.copytree(ORACLE, scratch / "local"))
notes = local / ".cache" / "huggingface" / "download"
notes.mkdir(parents=True)
(notes / f"{shard.name}.metadata").write_text(f"{'1' * 40}\n{mine[SHA256]}\n1700000000.5\n")
repository = scratch / "models--toy"
(repository / "blobs").mkdir(parents=True)
(repository / "snapshots" / "abc").mkdir(parents=True)
(repository / "blobs" / mine[GIT]).write_bytes(whole)
(repository / "snapshots" / "abc" / shard.name).symlink_to(f"../../blobs/{mine[GIT]}")
for folder in (local, repository / "snapshots" / "abc"):
    print(*((e.kind, e.digest[:12], e.source) for e in download_hashes(folder, shard.name)))

# %% [markdown]
# ## 5.27.5 What can be said without reading the payload
#
# Headers, index and config must agree (5.7, 5.4). The file sizes of the released checkpoint are public, so they are
# checked where the config is the released one: where it implies that many tensors and bytes. Four sizes are enough for
# 92 of them: KDA or MLA, and a layer number of one digit or two, which makes each of some 5,400 names in a header a
# byte longer.

# %% tags=["export"]
RELEASED_TENSORS, RELEASED_BYTES = 497_052, 1_559_965_606_912  # of the text stack


def is_released(config: Config) -> bool:
    "True if the config implies as many tensors and bytes as the released model's."
    tensors = nbytes = 0
    for _, dtype, shape, layers, experts in families(config):
        tensors += len(layers) * len(experts)
        nbytes += len(layers) * len(experts) * prod(shape) * ITEMSIZE[dtype]
    return (tensors, nbytes) == (RELEASED_TENSORS, RELEASED_BYTES)


def published_sizes() -> dict[str, int]:
    "{file name: bytes} of the 96 released shards."
    kda = 16_990_911_504, 16_990_916_912  # bytes of a layer's file: layer number of one digit, of two
    mla = 16_567_501_776, 16_567_507_176
    layers = [(mla if L % 4 == 3 or L == 92 else kda)[L > 9] for L in range(1, 93)]
    sizes = [2_341_216_112, *layers, 4_697_664_072, 92_289_328, 802_448_352]
    return {f"model-{i:05d}-of-000096.safetensors": size for i, size in enumerate(sizes, 1)}


def header_fault(path: str | Path) -> str | None:
    "What is wrong with a shard's header, or None."
    try:
        with open_shard(path) as file:
            start, size, text = read_header(file, str(path))
            parse_header(text, size - start, str(path))
    except CheckpointError as error:
        return str(error)
    return None


# %%
lines = (ROOT / "fixtures" / "k3" / "shard_sizes.tsv").read_text().split("\n")
assert published_sizes() == {name: int(size) for name, size in (line.split("\t") for line in lines if line)}
assert is_released(read_config(ROOT / "fixtures" / "k3")) and not is_released(read_config(ORACLE))
print(f"{sum(published_sizes().values()):,} bytes in {len(published_sizes())} files")

# %% [markdown]
# ## 5.27.6 Continuing an interrupted check
#
# Hashing 1.56 TB takes from a quarter of an hour to hours, as the disk and the cores are. Each finished file's hash is
# appended to `MODEL.sha256.partial` with the file's stamp. A later run uses a line only if the stamp is still the same:
# a shard that was replaced or touched is hashed anew, and so is one whose line was cut off. Stamps do not show that a
# disk decayed between two runs. So a run that finds no damage removes the file.

# %% tags=["export"]
_LOG_LINE = re.compile(r"([0-9a-f]{64}) (\d+) (\d+) (\d+) (\d+) (.+)")  # SHA-256, FileStamp, name


class HashLog:
    """The SHA-256 of files that unfinished runs have hashed, in the file `path`, one line a file.

    A log that cannot be read counts as empty. `failure`: why it could not be written or removed, or None.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.failure: str | None = None
        self._found = dict[str, tuple[FileStamp, str]]()
        try:
            lines = self.path.read_text("utf-8", "replace").split("\n")
        except OSError:
            lines = []
        for line in lines[:-1]:  # what follows the last newline is empty or an unfinished line
            if match := _LOG_LINE.fullmatch(line):
                self._found[match[6]] = FileStamp(*map(int, match.group(2, 3, 4, 5))), match[1]

    def get(self, name: str, stamp: FileStamp) -> str | None:
        "The SHA-256 of the file `name` if the log has it with this stamp, else None."
        stamp_then, digest = self._found.get(name, (None, None))
        return digest if stamp_then == stamp else None

    def add(self, name: str, stamp: FileStamp, digest: str) -> None:
        "Append the line of a file. A failure is noted, not raised."
        try:
            with open(self.path, "a", encoding="utf-8", newline="\n") as file:
                file.write(" ".join([digest, *map(str, stamp), f"{name}\n"]))
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror}"

    def remove(self) -> None:
        "Delete the log, if there is one. A failure is noted, not raised."
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror}"


# %% [markdown]
# ## 5.27.7 An account of what was compared
#
# The result says what was compared with what. Files without an expected hash are counted and named as not checked: an
# account that is silent about them would be read as a success.

# %% tags=["export"]
@dataclass
class Verified:
    """What verify() has compared with what.

    `damaged`: {file name, or the model's path for a fault of several files: a line that says what is wrong}.
    `unusual`: lines on what is odd and changes no number.
    `compared`: {source of expected hashes: how many files have them}. `unknown`: names of files without an
    expected hash. `hashes`: {name: SHA-256} of the files that were hashed and are not damaged. `resumed`: how many of
    them an unfinished run had hashed. `not_kept`: why a later run cannot continue this one, or None.
    `bytes_hashed` and `seconds` are those of this run's hashing.
    """
    model: str
    shards: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    tensors: int = 0
    config_checked: bool = False
    published_sizes: bool = False
    damaged: dict[str, str] = field(default_factory=dict)
    unusual: list[str] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    resumed: int = 0
    not_kept: str | None = None
    bytes_hashed: int = 0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        "All fields, for JSON."
        return asdict(self)


# %% tags=["export"]
class Verified(Verified):
    def text(self) -> str:
        "The account as a table of two columns."
        damaged = f"{len(self.damaged)}: {', '.join(self.damaged)}" if self.damaged else "nothing found"
        unusual = [("unusual", f"but harmless: {line}") for line in self.unusual]
        rows = [*self._structure(), *self._contents(), *unusual, ("damaged", damaged)]
        return "\n".join([f"{self.model}: {len(self.files)} files", *(f"  {what:<17}{text}" for what, text in rows)])

    def _structure(self):
        "Rows on headers, config and sizes."
        shards = f"{len(self.shards)} shards"
        yield "headers", (f"{self.tensors:,} tensors in {shards}, which have the sizes that their headers imply"
                          if self.tensors else "not all could be read, see above")
        yield "config", ("all tensors that it implies are there, with its types and shapes"
                         if self.config_checked else "NOT compared")
        yield "published sizes", (f"{shards} compared"
                                  if self.published_sizes else "not compared: no config of the released shape")

    def _contents(self):
        "Rows on hashes."
        yield from (("hashes", f"{n} files equal to {source}") for source, n in sorted(self.compared.items()))
        unknown = Counter("shards" if name in self.shards else "other files" for name in self.unknown)
        for what, n in sorted(unknown.items(), reverse=True):
            checked = "only sizes were checked" if what == "shards" else "their bytes were not checked"
            yield "NOT CHECKED", f"no expected hash for {n} {what}: {checked}"
        rate = self.bytes_hashed / 1e9 / max(self.seconds, 1e-9)
        resumed = f"; {self.resumed} files taken from an unfinished run" if self.resumed else ""
        yield "hashed", f"{self.bytes_hashed:,} bytes in {self.seconds:.3g} s, {rate:.2f} GB/s{resumed}"
        if self.not_kept:
            yield "not kept", f"{self.not_kept}: an interrupted run would begin anew"


# %% [markdown]
# ## 5.27.8 All files
#
# Headers, index, config and sizes come first. `Checkpoint` (5.7) stops at the first header that is wrong; here every
# damaged shard is to be named, so after a failure each header is read alone.

# %% tags=["export"]
_SHARD_FILE = re.compile(r"model(-\d{5,6}-of-\d{5,6})?\.safetensors", re.ASCII)
SMALL = "config.json", INDEX, "tiktoken.model", "tokenizer_config.json"


def _check_structure(result, folder, config, check):
    "Compare headers, index, config and sizes, and note the outcome in `result`."
    try:
        with Checkpoint(folder) as checkpoint:
            result.tensors, result.unusual = len(checkpoint), [*checkpoint.unusual, *(config.unusual if config else ())]
            others = [name for file in checkpoint.files if (name := os.path.basename(file)) not in result.shards]
            result.shards, result.files = result.shards + others, result.files + others
            if check is not None:
                check(config, checkpoint)
                result.config_checked = True
    except CheckpointError as error:
        result.damaged |= {name: fault for name in result.shards if (fault := header_fault(folder / name))}
        if str(error) not in result.damaged.values():
            result.damaged[str(folder)] = str(error)
    result.published_sizes = config is not None and is_released(config)
    for name, size in published_sizes().items() if result.published_sizes else ():
        if name in result.shards and name not in result.damaged and (found := stamp_of(folder / name).nbytes) != size:
            result.damaged[name] = f"{folder / name}: {found:,} bytes, expected {size:,}, the published size"


def _expectations(result, folder, manifest):
    "{name: [Expected]} of all files. A missing file that the manifest lists is noted as damaged."
    listed = read_manifest(manifest) if os.path.lexists(manifest) else {}
    for name in listed.keys() - {*result.files}:
        if (folder / name).is_file():
            result.files.append(name)
        else:
            result.damaged[name] = f"{folder / name}: found no file, expected one that {manifest} lists"
    return {name: [*_expected(listed.get(name, ""), str(manifest)), *download_hashes(folder, name)]
            for name in result.files}


# %% [markdown]
# Then each file is compared with every hash that is expected of it. A file that is known to be damaged is not hashed
# too. One that an unfinished run has hashed is not hashed again, unless git's hash is needed, which the log does not
# keep.

# %% tags=["export"]
class Job(NamedTuple):
    "A file that has to be hashed."
    name: str
    path: str
    nbytes: int
    kinds: set[str]


class Comparison:
    """Compares the files of `folder` with their `expected` hashes, {name: [Expected]}. Notes the outcome in `result`.

    Only the thread that calls verify() uses it.
    """

    def __init__(self, result: Verified, folder: Path, expected: dict[str, list[Expected]], log: HashLog):
        self.result, self.folder, self.expected, self.log = result, folder, expected, log

    def jobs(self, every: bool) -> list[Job]:
        """The files still to be hashed, the largest first, so that all threads end together.

        With `every`, also those of which no hash is expected. Raises CheckpointError if a file is gone.
        """
        jobs = []
        for name in self.result.files:
            if name in self.result.damaged or not (self.expected[name] or every):
                continue
            path, kinds = str(self.folder / name), {SHA256, *(each.kind for each in self.expected[name])}
            stamp = stamp_of(path)
            digest = self.log.get(name, stamp)
            if digest is not None and kinds == {SHA256} and not self._mismatch(name, {SHA256: digest}):
                self._accept(name, digest)
                self.result.resumed += 1
            else:
                jobs.append(Job(name, path, stamp.nbytes, kinds))
        return sorted(jobs, reverse=True, key=lambda job: job.nbytes)


# %% tags=["export"]
class Comparison(Comparison):
    def note(self, name: str, found: FileHashes | CheckpointError) -> str | None:
        "Note what hashing a file gave. Returns the line that says what is wrong, or None."
        if isinstance(found, CheckpointError):
            fault = str(found)
        elif wrong := self._mismatch(name, found.digests):
            fault = (f"{self.folder / name}: {wrong.kind} is {found.digests[wrong.kind]}, "
                     f"expected {wrong.digest} from {wrong.source}")
        else:
            self._accept(name, found.digests[SHA256])
            self.log.add(name, found.stamp, found.digests[SHA256])
            return None
        self.result.damaged[name] = fault
        return fault

    def _mismatch(self, name, digests):
        "The first Expected of a file that differs from its hashes {kind: hash}, or None."
        return next((each for each in self.expected[name] if digests[each.kind] != each.digest), None)

    def _accept(self, name, digest):
        "Note a file that is as expected, and its SHA-256."
        self.result.hashes[name] = digest
        for source in {each.source for each in self.expected[name]}:
            self.result.compared[source] = self.result.compared.get(source, 0) + 1


# %% [markdown]
# Several files are hashed at once: the arithmetic of SHA-256 is one long chain for each file, and Python releases its
# lock meanwhile. When the caller stops early, for Ctrl-C or an error, the threads see `stop` after their current read.

# %% tags=["export"]
def _hash_all(jobs, threads, progress):
    "Yields (name, FileHashes or the CheckpointError that was raised) of the jobs, in the order they end."
    stop, lock = threading.Event(), threading.Lock()

    def locked(nbytes):
        with lock:
            progress(nbytes)

    require_threads(threads, "hashing files")
    with ThreadPoolExecutor(threads) as pool:
        try:
            running = {pool.submit(hashes, job.path, job.kinds, locked, stop): job.name for job in jobs}
            for job in as_completed(running):
                error = job.exception()
                if error is not None and not isinstance(error, CheckpointError):
                    raise error
                yield running[job], error or job.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _compare_all(comparison, every, threads, show, progress):
    "Hash what has to be hashed, and note and show the outcomes."
    result, jobs = comparison.result, comparison.jobs(every)
    began, result.bytes_hashed = time.perf_counter(), sum(job.nbytes for job in jobs)
    with progress(result.bytes_hashed) as bar, closing(_hash_all(jobs, threads, bar.update)) as outcomes:
        for name, found in outcomes:
            if fault := comparison.note(name, found):
                show(fault)
    result.seconds = time.perf_counter() - began


@contextmanager
def _no_bar(total):
    "A progress bar that shows nothing."
    yield SimpleNamespace(update=lambda nbytes: None)


# %% tags=["export"]
def verify(path: str | Path, config: Config | None = None, check: Callable[[Config, Checkpoint], object] | None = None,
           manifest: str | Path | None = None, every: bool = False, *, threads: int | None = None,
           show: Callable[[str], object] = lambda line: None,
           progress: Callable[[int], AbstractContextManager[Any]] = _no_bar) -> Verified:
    """Check the model in folder `path`, without writing into it. The result's `damaged` is empty if all is as expected.

    `config`: the model's. `check(config, checkpoint)` raises CheckpointError if the checkpoint does not fit it.
    `manifest`: a sha256sum file; None means the one at manifest_path, if there is one. `every`: hash also files without
    an expected hash. `threads`: files hashed at a time, by default one a core, at most 8. `show` is called with a line
    for each fault when it is found. `progress(bytes)` gives a bar for a `with` block, whose update() is called with the
    bytes of each read. Raises FileNotFoundError, CheckpointError if `manifest` is no manifest, and UsageError for an
    argument of a wrong type.
    """
    folder, manifest = given_path("path", path), None if manifest is None else given_path("manifest", manifest)
    threads = min(8, os.cpu_count() or 1) if threads is None else whole_number("threads", threads, 1, 1024)
    if config is not None and not isinstance(config, Config):
        raise UsageError(f"config is {shown_value(config)}: a Config is needed, as read_config returns it")
    if not folder.is_dir():
        raise MissingFile(f"{folder}: no such model folder")
    if manifest is not None and not every and not os.path.lexists(manifest):
        raise MissingFile(f"{manifest}: no such manifest")
    manifest = manifest or manifest_path(folder)
    result = Verified(str(path), sorted(name for name in os.listdir(folder) if _SHARD_FILE.fullmatch(name)))
    result.files = result.shards + [name for name in SMALL if (folder / name).is_file()]
    _check_structure(result, folder, config, check)
    expected, log = _expectations(result, folder, manifest), HashLog(f"{manifest_path(folder)}.partial")
    for line in result.damaged.values():
        show(line)
    result.unknown = [name for name in result.files if not expected[name]]
    comparison = Comparison(result, folder, expected, log)
    _compare_all(comparison, every, threads, show, progress)
    if not result.damaged:
        log.remove()
    result.not_kept = log.failure
    return result


# %% [markdown]
# The embedded model has a manifest beside it, made when its files were. Everything is equal.

# %% tags=["nbval-ignore-output"]
result = verify(ORACLE, read_config(ORACLE), check_tensors)
assert not result.damaged and not result.unknown and result.hashes == read_manifest(manifest_path(ORACLE))
print(result.text().replace(str(ORACLE.parent), "."))

# %% [markdown]
# Anyone can do the same without this book.

# %%
if shutil.which("sha256sum"):
    command = ["sha256sum", "--check", "--quiet", "../model.sha256"]
    run = subprocess.run(command, cwd=ORACLE, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
print("the folder and its manifest agree")

# %% [markdown]
# ## 5.27.9 Wrong, without an error
#
# The sign of one weight, in the value projection of layer 4: one bit of 6.6 MB. The engine (5.26) reads the file, finds
# every size right and every number finite, and answers. Only the hash names the shard.

# %%
bad = Path(shutil.copytree(ORACLE, scratch / "model"))
shutil.copy(manifest_path(ORACLE), scratch)


def flip(path, at, bit):
    "Flip one bit of byte `at` of a file, in place."
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def answer(model):
    "(eight greedy ids, float32 [8, vocab])"
    logits = []
    with load(model, "1GB", context=16, prompt_tokens=3) as engine:
        return list(engine.generate([304, 206, 32], 8, logits.append)), np.stack(logits)


flip(bad / "model-00005-of-000016.safetensors", 83_793, 7)
right, logits = answer(ORACLE)
wrong, _ = answer(bad)
print(right, wrong, sep="\n")
assert right != wrong

# %%
result = verify(bad, read_config(bad), check_tensors, show=lambda line: print(line.replace(str(scratch), ".")))
assert [*result.damaged] == ["model-00005-of-000016.safetensors"] and result.config_checked

# %% [markdown]
# How often does one flipped bit show? Forty bits at random places of the text stack are flipped, one at a time, and
# eight tokens are decoded for each. Most flips change the logits and no id: nobody would notice, until the day a margin
# is small. The hash sees all of them.

# %%
with Checkpoint(ORACLE) as checkpoint:
    extents = [checkpoint.extent(name) for name in checkpoint.names() if name.startswith("language_model.")]
ends = np.cumsum([e.nbytes for e in extents])
flip(bad / "model-00005-of-000016.safetensors", 83_793, 7)  # back again
rng, listed, points, refused = np.random.default_rng(0), read_manifest(manifest_path(bad)), [], 0
for _ in range(40):
    place, bit = int(rng.integers(ends[-1])), int(rng.integers(8))
    extent = extents[np.searchsorted(ends, place, "right")]
    file = bad / Path(extent.file).name
    at = extent.offset + place - int(ends[extents.index(extent)] - extent.nbytes)
    flip(file, at, bit)
    assert hashes(file, [SHA256]).digests[SHA256] != listed[file.name]
    try:
        ids, changed = answer(bad)
        points.append((float(np.abs(changed[0] - logits[0]).max()), ids != right))
    except CheckpointError:  # a scale's high bit makes numbers that overflow
        refused += 1
    flip(file, at, bit)
print(f"{sum(other for _, other in points)} of 40 flips change an id, {sum(d == 0 for d, _ in points)} change no logit "
      f"at all, {refused} are refused as damage, 40 change the hash")

# %%
points.sort()
fig, ax = plt.subplots()
for other_ids, label in ((False, "the same eight ids"), (True, "other ids, and no error")):
    shown = [(i, max(d, 1e-7)) for i, (d, other) in enumerate(points) if other == other_ids]
    ax.plot(*zip(*shown), "o", ms=4, label=label)
top = np.sort(logits, axis=1)
margin = float((top[:, -1] - top[:, -2]).min())
ax.axhline(margin, color="0.6", lw=0.8)
ax.annotate("smallest margin between the first and the second of the eight", (0, 1.3 * margin), fontsize=8, color="0.4")
ax.set(yscale="log", xlabel="flipped bits, by what they do", ylabel="largest change of a first logit",
       title="One bit of one weight: mostly too small to be noticed, sometimes other ids")
ax.set_yticks([1e-7, 1e-5, 1e-3, 1e-1, 10], ["none", "$10^{-5}$", "$10^{-3}$", "0.1", "10"])
ax.legend(loc="lower right")
plt.show()


# %% [markdown]
# ## 5.27.10 Interrupted, continued, and traps
#
# A run that is stopped after some files leaves their lines. The next reads only the others. A shard that was touched
# since is not believed, nor is one whose line lost its end.

# %%
class Stopped(Exception):
    "What Ctrl-C would be."


def stop(line):
    raise Stopped


partial = Path(f"{manifest_path(bad)}.partial")
partial.unlink()  # of 5.27.9: a run that finds damage keeps the other hashes, so only the repaired shard is read again
flip(bad / "tokenizer_config.json", 5, 0)  # a fault ends this run as soon as it is shown
try:
    verify(bad, threads=1, show=stop)
except Stopped:
    pass
flip(bad / "tokenizer_config.json", 5, 0)
lines = partial.read_text().split("\n")[:-1]
partial.write_text("\n".join(lines)[:-3])
os.utime(bad / lines[0].split(" ")[-1])
result = verify(bad)
print(f"{len(lines)} lines kept, one touched, one cut: {result.resumed} believed")
assert result.resumed == len(lines) - 2 and not result.damaged and not partial.exists()

# %% [markdown]
# Where nothing is known, nothing is compared, and the account says so. This is also the state of a synthetic
# checkpoint.

# %%
os.remove(manifest_path(bad))
print("\n".join(line for line in verify(bad).text().split("\n") if "NOT" in line))

# %% [markdown]
# The traps: a hash of the first megabytes only, plain SHA-1 for git's, and a size taken for a proof.

# %%
flip(bad / "model-00014-of-000016.safetensors", 131_072, 0)
one, other = (folder / "model-00014-of-000016.safetensors" for folder in (ORACLE, bad))
head = [hashlib.sha256(path.read_bytes()[:65_536]).hexdigest() for path in (one, other)]
assert head[0] == head[1] and one.stat().st_size == other.stat().st_size  # neither sees it
assert hashes(one, [SHA256]).digests != hashes(other, [SHA256]).digests
assert hashlib.sha1(whole).hexdigest() != mine[GIT]

# %% [markdown]
# ## 5.27.11 Make it fast
#
# The chain of SHA-256 is the work, and the processor's instructions for it set the pace. Reads must be long enough that
# Python does not count; two files at once use two cores. The full model is 1.56 TB.

# %% tags=["nbval-ignore-output"]
big = [scratch / f"big{i}" for i in range(2)]
for path in big:
    path.write_bytes(rng.bytes(1 << 26))


def rate(files, read_bytes):
    "GB/s of hashing `files`, each on a thread of its own."
    began = time.perf_counter()
    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(lambda path: hashes(path, [SHA256], read_bytes=read_bytes), files))
    return sum(path.stat().st_size for path in files) / (time.perf_counter() - began) / 1e9


for label, files, read_bytes in (("4 KiB at a time", big[:1], 4096), ("4 MiB at a time", big[:1], HASH_READ_BYTES),
                                 ("two files at once", big, HASH_READ_BYTES)):
    speed = max(rate(files, read_bytes) for _ in range(3))
    print(f"{label:20s}{speed:6.2f} GB/s, {1561 / speed / 60:5.0f} min for 1.56 TB")

# %%
shutil.rmtree(scratch)

# %% [markdown]
# ## Summary
#
# - A size and a header say nothing about a payload; a hash that was computed elsewhere does. Blob names and `.metadata`
#   are such hashes, and free.
# - `k3 verify MODEL --write-manifest` keeps today's hashes beside the model: they show later damage, not damage that
#   was there before.
# - The files that were not compared are part of the answer.
#
# ## Exercises
#
# 1. Find the shortest list of byte positions whose flips leave all logits as they are. Which tensors are they in, and
#    why?
# 2. Hash a file's blocks of 4 MiB separately and list the hashes. What would such a manifest cost for 1.56 TB, and what
#    could it say that this one cannot?
# 3. Verify while decoding: which bytes does one token read twice, and could a reader hash what it reads?
#
# Next: [5.28 A checkpoint without the weights](28_synth.ipynb).
