"""5.23 Whether every byte is the one that was published

Made from book/05_streaming/23_verify.py: edit that, then run `make export`.
"""

import hashlib
import os
import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from tqdm import tqdm
from k3lib.fileio import CheckpointError, open_shard, read_exactly
from k3lib.tensors import families
from k3lib.header import ITEMSIZE, parse_header, read_header
from k3lib.checkpoint import Checkpoint, INDEX


SHA256, GIT = "sha256", "git's sha1"


KINDS = {64: SHA256, 40: GIT}  # by the number of hexadecimal digits


HASH_READ_BYTES = 4 << 20  # bytes of a file in memory at a time


def file_stamp(stat):
    "What changes when a file does, of an os.stat: bytes, two times in ns, inode."
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def stamp_of(path):
    "The stamp of the file at `path` now; CheckpointError if there is none."
    try:
        return file_stamp(os.stat(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be looked at: {error.strerror}") from None


def _begin(kind, size):
    return hashlib.sha256() if kind == SHA256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def _advise(file, begin, nbytes, advice):
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, nbytes, getattr(os, advice))


def hashes(path, kinds, progress=lambda nbytes: None, stop=None):
    """(stamp, {kind: hexadecimal hash}) of the file `path` for `kinds` out of KINDS; None if the event `stop` was set meanwhile.

    `progress` is told the bytes of each piece. CheckpointError if the file cannot be read, or changes while it is.
    """
    with open_shard(path) as file:
        before = file_stamp(os.fstat(file.fileno()))
        found, buffer = {kind: _begin(kind, before[0]) for kind in kinds}, bytearray(min(HASH_READ_BYTES, before[0]))
        _advise(file, 0, 0, "POSIX_FADV_SEQUENTIAL")
        for begin in range(0, before[0], HASH_READ_BYTES):
            if stop is not None and stop.is_set():
                return None
            piece = memoryview(buffer)[:before[0] - begin]
            read_exactly(file, piece, begin, path)
            for each in found.values():
                each.update(piece)
            _advise(file, begin, len(piece), "POSIX_FADV_DONTNEED")
            progress(len(piece))
        if file_stamp(os.fstat(file.fileno())) != before or stamp_of(path) != before:
            raise CheckpointError(f"{path}: was changed or replaced while it was read, expected the same file at the end")
    return before, {kind: each.hexdigest() for kind, each in found.items()}


_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)*([^\x00-\x1f]+)")


MANIFEST_MAX = 1 << 24  # bytes


def manifest_text(found):
    "The manifest of {name: hash}."
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(found.items()))


def read_manifest(path):
    "{name: hash} of a sha256sum file. FileNotFoundError if there is none, CheckpointError for a line that is not one."
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path}: no such manifest")
    with open_shard(path) as file:
        text = bytearray(min(os.fstat(file.fileno()).st_size, MANIFEST_MAX + 1))
        read_exactly(file, text, 0, path)
    if not 0 < len(text) <= MANIFEST_MAX:
        raise CheckpointError(f"{path}: {len(text):,} bytes or more, expected a manifest of 1 to {MANIFEST_MAX:,}")
    found = {}
    for number, line in enumerate(text.decode("utf-8", "replace").rstrip("\r\n").split("\n"), 1):
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None or PurePosixPath(match[2]).is_absolute() or ".." in PurePosixPath(match[2]).parts:
            raise CheckpointError(f"{path}: line {number} is {line[:100]!r}, expected 64 hexadecimal digits, two spaces, a name in the folder")
        if match[2] in found:
            raise CheckpointError(f"{path}: line {number}: {match[2]!r} is listed twice, expected once")
        found[match[2]] = match[1].lower()
    return found


def manifest_path(folder):
    "Where the manifest of the model in `folder` is looked for: beside it, or beside `snapshots` in a hub cache."
    folder = Path(folder).resolve()
    home = folder.parents[1] if folder.parent.name == "snapshots" else folder.parent
    return home / f"{folder.name}.sha256"


class Expected(NamedTuple):
    "A hash that a file should have, and where that is said."
    kind: str
    digest: str
    source: str


def _expected(digest, source):
    if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", digest):
        yield Expected(KINDS[len(digest)], digest, source)


def download_hashes(folder, name):
    "The Expected that a download has left for a file of `folder`: the name of the cache's blob, the second line of .metadata."
    blob = Path(os.path.realpath(Path(folder, name)))
    if blob.parent.name == "blobs":
        yield from _expected(blob.name, "the hub cache's name for it")
    try:
        with open(Path(folder, ".cache", "huggingface", "download", f"{name}.metadata"), encoding="ascii") as file:
            lines = file.read(1000).split("\n")
    except (OSError, ValueError):  # ValueError: not ASCII
        return
    yield from _expected(lines[1].strip() if len(lines) > 2 else "", "its download's .metadata")


RELEASED = 497_052, 1_559_965_606_912  # tensors of the text stack and their bytes


def is_released(config):
    "Whether a Config implies as many tensors and bytes as the released model's."
    tensors = nbytes = 0
    for _, dtype, shape, layers, experts in families(config):
        tensors += len(layers) * len(experts)
        nbytes += len(layers) * len(experts) * prod(shape) * ITEMSIZE[dtype]
    return (tensors, nbytes) == RELEASED


def published_sizes():
    "{file name: bytes} of the 96 released shards."
    kda, mla = (16_990_911_504, 16_990_916_912), (16_567_501_776, 16_567_507_176)  # one digit of a layer's number, two
    layers = [(mla if L % 4 == 3 or L == 92 else kda)[L > 9] for L in range(1, 93)]
    sizes = [2_341_216_112, *layers, 4_697_664_072, 92_289_328, 802_448_352]
    return {f"model-{i:05d}-of-000096.safetensors": size for i, size in enumerate(sizes, 1)}


def header_fault(path):
    "What is wrong with a shard's header, or None."
    try:
        with open_shard(path) as file:
            start, size, text = read_header(file, path)
            parse_header(text, size - start, path)
    except CheckpointError as error:
        return str(error)


_KEPT = re.compile(r"([0-9a-f]{64}) (\d+) (\d+) (\d+) (\d+) (.+)")


class Kept:
    "The hashes of earlier, unfinished runs in the file `path`, and those of this one; `failure` says why they could not be kept."

    def __init__(self, path):
        self.path, self.failure, self._found = Path(path), None, {}
        try:
            lines = self.path.read_text("utf-8", "replace").split("\n")
        except OSError:
            lines = []
        for line in lines[:-1]:  # the last one has no end, if it is not empty
            if match := _KEPT.fullmatch(line):
                self._found[match[6]] = tuple(map(int, match.group(2, 3, 4, 5))), match[1]

    def get(self, name, stamp):
        "The SHA-256 of a file that had this stamp, or None."
        then, digest = self._found.get(name, (None, None))
        return digest if then == stamp else None

    def add(self, name, stamp, digest):
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(" ".join([digest, *map(str, stamp), f"{name}\n"]))
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror}"

    def remove(self):
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror}"


_SHARD_FILE = re.compile(r"model(-\d{5,6}-of-\d{5,6})?\.safetensors", re.ASCII)


SMALL = "config.json", INDEX, "tiktoken.model", "tokenizer_config.json"


@dataclass
class Verified:
    "What was compared with what. `damaged`: {file name, or the model's path for what concerns several: a line}; `hashes`: {name: SHA-256}."
    model: str
    shards: list = field(default_factory=list)
    files: list = field(default_factory=list)
    tensors: int = 0
    config_checked: bool = False
    published_sizes: bool = False
    damaged: dict = field(default_factory=dict)
    compared: dict = field(default_factory=dict)  # {source of expected hashes: files equal to them}
    unknown: list = field(default_factory=list)  # names without an expected hash
    hashes: dict = field(default_factory=dict)
    resumed: int = 0
    not_kept: str | None = None
    bytes_hashed: int = 0
    seconds: float = 0.0  # of hashing

    def as_dict(self):
        "For JSON."
        return asdict(self)

    def text(self):
        "The account as a table."
        unknown = Counter("shards" if name in self.shards else "other files" for name in self.unknown)
        rate = f"{self.bytes_hashed:,} bytes in {self.seconds:.3g} s, {self.bytes_hashed / 1e9 / max(self.seconds, 1e-9):.2f} GB/s"
        rows = [
            ("headers", f"{self.tensors:,} tensors in {len(self.shards)} shards, which have the sizes that their headers imply" if self.tensors
                        else "not all could be read, see above"),
            ("config", "all tensors that it implies are there, with its types and shapes" if self.config_checked else "NOT compared"),
            ("published sizes", f"{len(self.shards)} shards compared" if self.published_sizes else "not compared: no config of the released shape"),
            *(("hashes", f"{n} files equal to {source}") for source, n in sorted(self.compared.items())),
            *(("NOT CHECKED", f"no expected hash for {n} {what}: only sizes were checked" if what == "shards" else
               f"no expected hash for {n} {what}: their bytes were not checked") for what, n in sorted(unknown.items(), reverse=True)),
            ("hashed", rate + (f"; {self.resumed} files taken from an unfinished run" if self.resumed else "")),
            *([("not kept", f"{self.not_kept}: a run that is broken off would begin anew")] if self.not_kept else []),
            ("damaged", f"{len(self.damaged)}: {', '.join(self.damaged)}" if self.damaged else "nothing found"),
        ]
        return "\n".join([f"{self.model}: {len(self.files)} files", *(f"  {what:<17}{value}" for what, value in rows)])


def _look(result, folder, config, check):
    "Fill in what headers, index, config and sizes say."
    try:
        with Checkpoint(folder) as checkpoint:
            result.tensors = len(checkpoint)
            if check is not None:
                check(config, checkpoint)
                result.config_checked = True
    except CheckpointError as error:
        result.damaged |= {name: fault for name in result.shards if (fault := header_fault(str(folder / name)))}
        if str(error) not in result.damaged.values():
            result.damaged[str(folder)] = str(error)
    result.published_sizes = config is not None and is_released(config)
    for name, size in published_sizes().items() if result.published_sizes else ():
        if name in result.shards and name not in result.damaged and (found := stamp_of(folder / name)[0]) != size:
            result.damaged[name] = (f"{folder / name}: {found:,} bytes, expected {size:,}, the published size")


def _expectations(result, folder, manifest):
    "{name: [Expected]} of all files; those that are listed but missing become damage."
    listed = read_manifest(manifest) if os.path.lexists(manifest) else {}
    for name in listed.keys() - {*result.files}:
        if (folder / name).is_file():
            result.files.append(name)
        else:
            result.damaged[name] = f"{folder / name}: found no file, expected one that {manifest} lists"
    return {name: [*_expected(listed.get(name, ""), str(manifest)), *download_hashes(folder, name)] for name in result.files}


def _same(expected, found):
    "The first Expected that a file's hashes {kind: hash} do not fulfil, or None."
    return next((each for each in expected if found[each.kind] != each.digest), None)


def _take_up(result, name, expected, digest):
    "Note a file that is as expected, and its SHA-256."
    result.hashes[name] = digest
    for source in {each.source for each in expected}:
        result.compared[source] = result.compared.get(source, 0) + 1


def _jobs(result, folder, expected, every, kept):
    "[(bytes, name, path, kinds)] still to be hashed, the largest first so that all threads end together; what is Kept is taken up."
    jobs = []
    for name in result.files:
        if name in result.damaged or not (expected[name] or every):
            continue
        path, kinds = str(folder / name), {SHA256, *(each.kind for each in expected[name])}
        now = stamp_of(path)
        digest = kept.get(name, now)
        if digest is not None and kinds == {SHA256} and not _same(expected[name], {SHA256: digest}):
            _take_up(result, name, expected[name], digest)
            result.resumed += 1
        else:
            jobs.append((now[0], name, path, kinds))
    return sorted(jobs, reverse=True, key=lambda job: job[0])


def _hash_all(jobs, threads, bar):
    "Yields (name, what `hashes` gave or the CheckpointError it raised) for the _jobs, in the order they end."
    stop, turn = threading.Event(), threading.Lock()

    def progress(nbytes):
        with turn:
            bar.update(nbytes)

    with ThreadPoolExecutor(threads) as pool:
        try:
            running = {pool.submit(hashes, path, kinds, progress, stop): name for _, name, path, kinds in jobs}
            for job in as_completed(running):
                error = job.exception()
                if error is not None and not isinstance(error, CheckpointError):
                    raise error
                yield running[job], error or job.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _hash(result, folder, expected, every, threads, kept, show, progress):
    "Hash the files that have to be, compare, and keep what is right."
    jobs, began = _jobs(result, folder, expected, every, kept), time.perf_counter()
    result.bytes_hashed = sum(size for size, *_ in jobs)
    with progress(result.bytes_hashed) as bar:
        for name, found in _hash_all(jobs, threads, bar):
            if isinstance(found, CheckpointError):
                result.damaged[name] = str(found)
            elif wrong := _same(expected[name], found[1]):
                result.damaged[name] = f"{folder / name}: {wrong.kind} is {found[1][wrong.kind]}, expected {wrong.digest} from {wrong.source}"
            else:
                _take_up(result, name, expected[name], found[1][SHA256])
                kept.add(name, found[0], found[1][SHA256])
                continue
            show(result.damaged[name])
    result.seconds = time.perf_counter() - began


def verify(path, config=None, check=None, manifest=None, every=False, threads=None, show=lambda line: None,
           progress=lambda total: tqdm(total=total, disable=True)):
    """Check the model in folder `path`, without writing into it; returns Verified, whose `damaged` is empty if all is as expected.

    `config`: what it is to be; `check(config, checkpoint)` raises CheckpointError if it is not. `manifest`: a sha256sum file, else the one
    at manifest_path, if there is one. `every`: hash also what has no expected hash. `show` gets a line for each fault as it is found,
    `progress(bytes)` makes a bar with update(). Raises FileNotFoundError, and CheckpointError for a manifest that is not one.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    if manifest is not None and not every and not os.path.lexists(manifest):
        raise FileNotFoundError(f"{manifest}: no such manifest")
    manifest = manifest_path(folder) if manifest is None else Path(manifest)
    result = Verified(str(path), sorted(name for name in os.listdir(folder) if _SHARD_FILE.fullmatch(name)))
    result.files = result.shards + [name for name in SMALL if (folder / name).is_file()]
    _look(result, folder, config, check)
    expected, kept = _expectations(result, folder, manifest), Kept(f"{manifest_path(folder)}.partial")
    for line in result.damaged.values():
        show(line)
    result.unknown = [name for name in result.files if not expected[name]]
    _hash(result, folder, expected, every, threads or min(8, os.cpu_count() or 1), kept, show, progress)
    if not result.damaged:
        kept.remove()
    result.not_kept = kept.failure
    return result


__all__ = [
    "SHA256", "GIT", "KINDS", "HASH_READ_BYTES", "file_stamp", "stamp_of", "hashes", "MANIFEST_MAX",
    "manifest_text", "read_manifest", "manifest_path", "Expected", "download_hashes", "RELEASED", "is_released",
    "published_sizes", "header_fault", "Kept", "SMALL", "Verified", "verify",
]
