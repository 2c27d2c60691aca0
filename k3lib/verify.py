"""5.27 Whether every byte is the one that was published

Made from book/05_streaming/27_verify.py: edit that, then run `make export`.
"""

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
    CheckpointError, MissingFile, UsageError, given_path, open_shard, read_exactly, shown_value,
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


def file_stamp(status: os.stat_result) -> FileStamp:
    "The FileStamp of an os.stat result."
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def stamp_of(path: str | Path) -> FileStamp:
    "The stamp of the file at `path` now. Raises CheckpointError if there is no file."
    try:
        return file_stamp(os.stat(path))
    except OSError as error:
        raise CheckpointError(f"{path}: its size and times cannot be read: {error.strerror}") from None


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


def manifest_path(folder: str | Path) -> Path:
    "Where the manifest of the model in `folder` is looked for: beside it, or beside `snapshots` in a hub cache."
    folder = given_path("folder", folder).resolve()
    home = folder.parents[1] if folder.parent.name == "snapshots" else folder.parent
    return home / f"{folder.name}.sha256"


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


def _hash_all(jobs, threads, progress):
    "Yields (name, FileHashes or the CheckpointError that was raised) of the jobs, in the order they end."
    stop, lock = threading.Event(), threading.Lock()

    def locked(nbytes):
        with lock:
            progress(nbytes)

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


__all__ = [
    "FileStamp", "file_stamp", "stamp_of", "SHA256", "GIT", "KINDS", "HASH_READ_BYTES", "FileHashes", "hashes",
    "MANIFEST_MAX", "manifest_text", "read_manifest", "manifest_path", "Expected", "download_hashes",
    "RELEASED_TENSORS", "RELEASED_BYTES", "is_released", "published_sizes", "header_fault", "HashLog", "Verified",
    "SMALL", "Job", "Comparison", "verify",
]
