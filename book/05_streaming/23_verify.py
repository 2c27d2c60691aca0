# %% [markdown]
# # 5.23 Whether every byte is the one that was published
#
# A header says where a weight lies, not whether it is right. One wrong byte in 1.56 TB still gives fluent text, so this
# chapter compares files with hashes that somebody computed before the damage. At the end you can check a download
# against what the download itself left behind, write a manifest that `sha256sum` reads, break a check off and take it
# up again, and say what was *not* checked.
#
# [5.22 From a folder to a running model](22_engine.ipynb) ·
# [contents](../README.md) ·
# [5.24 A checkpoint without the weights](24_synth.ipynb)

# %%
import shutil
import subprocess
import tempfile

import matplotlib.pyplot as plt
import numpy as np

from k3lib.config import read_config
from k3lib.decode import check_tensors, decode, load

# %%
ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
ORACLE = ROOT / "fixtures" / "oracle13" / "model"
scratch = Path(tempfile.mkdtemp())

# %% [markdown]
# | symbol | meaning | in code |
# |---|---|---|
# | payload | the bytes behind a header, which it says nothing about | |
# | hash | 32 bytes (SHA-256) or 20 (SHA-1) that follow from all bytes of a file | `hashes` |
# | expected | a hash from elsewhere, and where it is from | `Expected` |
# | manifest | a text file of hashes and names | `read_manifest` |
# | stamp | size, times and inode of a file: what must not change while it is read | `stamp` |
#
# ## 5.23.1 By hand: one bit, and what sees it
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
# ## 5.23.2 A file's hashes, in four megabytes
#
# The file goes by in pieces through one buffer, and the page cache is told to forget each piece: 1.56 TB of once-read
# bytes would push out everything else. Size, times and inode are looked at before and after, since a file that changes
# meanwhile has no hash.

# %% tags=["export"]
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

# %% tags=["export"]
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


# %%
shard = ORACLE / "model-00001-of-000016.safetensors"
_, mine = hashes(shard, [SHA256, GIT])
whole = shard.read_bytes()
assert mine == {SHA256: hashlib.sha256(whole).hexdigest(), GIT: hashlib.sha1(b"blob %d\0" % len(whole) + whole).hexdigest()}
print(shard.name, mine[SHA256][:12], mine[GIT][:12])

# %% [markdown]
# ## 5.23.3 The manifest: a file that `sha256sum -c` reads
#
# A hash, two spaces, a name: the oldest format there is, so nobody needs this book to check it. A line that is not one
# is refused, and so is a name that leads out of the model's folder or stands there twice.

# %% tags=["export"]
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


# %% [markdown]
# Where should it lie? Not inside: this program never writes into a model's folder, which may be a cache's or read-only.
# So beside it, under the model's name. In a hub cache the folder of snapshots may hold nothing but snapshots, and
# beside is one level up.

# %% tags=["export"]
def manifest_path(folder):
    "Where the manifest of the model in `folder` is looked for: beside it, or beside `snapshots` in a hub cache."
    folder = Path(folder).resolve()
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
# ## 5.23.4 What a download leaves behind
#
# A hub cache stores each file under its hash, `blobs/<hash>`, and a snapshot is links to those. `hf download
# --local-dir` puts real files in place and keeps `.cache/huggingface/download/<name>.metadata`: commit, hash, time, a
# line each. 64 digits are SHA-256, 40 are git's.

# %% tags=["export"]
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


# %%
local = Path(shutil.copytree(ORACLE, scratch / "local"))
kept = local / ".cache" / "huggingface" / "download"
kept.mkdir(parents=True)
(kept / f"{shard.name}.metadata").write_text(f"{'1' * 40}\n{mine[SHA256]}\n1700000000.5\n")
repository = scratch / "models--toy"
(repository / "blobs").mkdir(parents=True)
(repository / "snapshots" / "abc").mkdir(parents=True)
(repository / "blobs" / mine[GIT]).write_bytes(whole)
(repository / "snapshots" / "abc" / shard.name).symlink_to(f"../../blobs/{mine[GIT]}")
for folder in (local, repository / "snapshots" / "abc"):
    print(*((e.kind, e.digest[:12], e.source) for e in download_hashes(folder, shard.name)))

# %% [markdown]
# ## 5.23.5 What can be said without reading the payload
#
# Headers, index and config must agree (5.6, 5.1). The file sizes of the released checkpoint are public, so they are
# checked where the config is the released one: where it implies that many tensors and bytes. Four sizes are enough for
# 92 of them: KDA or MLA, and a layer number of one digit or two, which makes each of some 5,400 names in a header a
# byte longer.

# %% tags=["export"]
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


# %%
lines = (ROOT / "fixtures" / "k3" / "shard_sizes.tsv").read_text().split("\n")
assert published_sizes() == {name: int(size) for name, size in (line.split("\t") for line in lines if line)}
assert is_released(read_config(ROOT / "fixtures" / "k3")) and not is_released(read_config(ORACLE))
print(f"{sum(published_sizes().values()):,} bytes in {len(published_sizes())} files")

# %% [markdown]
# ## 5.23.6 Taking up where it was broken off
#
# Hashing 1.56 TB takes a quarter of an hour on a fast disk and hours on a slow one. Each finished file's hash is
# appended to `MODEL.sha256.partial` with the file's stamp. A later run believes a line only if the stamp is still the
# same: a shard that was replaced or touched is hashed anew, and so is one whose line was cut off. What this cannot see
# is a disk that decays in between, so a run that ends well removes the file.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.23.7 All files, and an account of what was compared
#
# Several files are hashed at once: the arithmetic of SHA-256 is one long chain a file, and Python lets go of its lock
# meanwhile. A file that is known to be damaged is not hashed too. What has no expected hash is counted and said, not
# passed over.

# %% tags=["export"]
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
    run = subprocess.run(["sha256sum", "--check", "--quiet", "../model.sha256"], cwd=ORACLE, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
print("the folder and its manifest agree")

# %% [markdown]
# ## 5.23.8 Fluent, and wrong
#
# The sign of one weight, in the value projection of layer 4: one bit of 6.6 MB. The engine of chapter 5.25 reads the
# file, finds every size right and every number finite, and answers in the same tone. Only the hash names the shard.

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
    "What the engine says, and whether it said it without an error."
    said = []
    decode(model, ids="304,206,32", max_new_tokens=8, ram="1GB", show=said.append)
    return [line for line in said if line.startswith("generated ids")][0]


flip(bad / "model-00005-of-000016.safetensors", 83_793, 7)
right, wrong = answer(ORACLE), answer(bad)
print(right, wrong, sep="\n")
assert right != wrong

# %%
result = verify(bad, read_config(bad), check_tensors, show=lambda line: print(line.replace(str(scratch), ".")))
assert [*result.damaged] == ["model-00005-of-000016.safetensors"] and result.config_checked

# %% [markdown]
# How often does one flipped bit show? Forty bits at random places of the text stack, each in a copy of its own making,
# each decoded for eight tokens. Most change the logits and no id: nobody would notice, until the day a margin is small.
# The hash sees all of them.

# %%
with Checkpoint(ORACLE) as checkpoint:
    extents = [checkpoint.extent(name) for name in checkpoint.names() if name.startswith("language_model.")]
ends = np.cumsum([e.nbytes for e in extents])


def run(model):
    "(eight greedy ids, float32 [8, vocab])"
    logits, decoder = [], load(model, "1GB", context=16, prompt_tokens=3)
    try:
        return list(decoder.generate([304, 206, 32], 8, logits.append)), np.stack(logits)
    finally:
        decoder.close()


flip(bad / "model-00005-of-000016.safetensors", 83_793, 7)  # back again
rng, listed, points, refused = np.random.default_rng(0), read_manifest(manifest_path(bad)), [], 0
ids, logits = run(bad)
for _ in range(40):
    place, bit = int(rng.integers(ends[-1])), int(rng.integers(8))
    extent = extents[np.searchsorted(ends, place, "right")]
    file = bad / Path(extent.file).name
    at = extent.offset + place - int(ends[extents.index(extent)] - extent.nbytes)
    flip(file, at, bit)
    assert hashes(file, [SHA256])[1][SHA256] != listed[file.name]
    try:
        got, there = run(bad)
        points.append((float(np.abs(there[0] - logits[0]).max()), got != ids))
    except CheckpointError:  # a scale's high bit makes numbers that overflow
        refused += 1
    flip(file, at, bit)
changed = sum(different for _, different in points)
print(f"{changed} of 40 flips change an id, {sum(d == 0 for d, _ in points)} change no logit at all, {refused} are refused as damage, 40 change the hash")

# %%
points.sort()
fig, ax = plt.subplots()
for different, label in ((False, "the same eight ids"), (True, "other ids, and no error")):
    ax.plot(*zip(*[(i, max(d, 1e-7)) for i, (d, other) in enumerate(points) if other == different]), "o", ms=4, label=label)
top = np.sort(logits, axis=1)
margin = float((top[:, -1] - top[:, -2]).min())
ax.axhline(margin, color="0.6", lw=0.8)
ax.annotate("smallest margin between the first and the second of the eight", (0, 1.3 * margin), fontsize=8, color="0.4")
ax.set(yscale="log", xlabel="flipped bits, by what they do", ylabel="largest change of a first logit",
       title="One bit of one weight: mostly too small to be noticed, sometimes another text")
ax.legend(loc="lower right")
plt.show()


# %% [markdown]
# ## 5.23.9 Broken off, taken up, and traps
#
# A run that is stopped after some files leaves their lines. The next reads only the others. A shard that was touched
# since is not believed, nor is one whose line lost its end.

# %%
class Stopped(Exception):
    "What Ctrl-C would be."


def stop(line):
    raise Stopped


partial = Path(f"{manifest_path(bad)}.partial")
partial.unlink()  # of 5.23.8: a run that finds damage keeps what was right, so that only the repaired shard is read again
flip(bad / "tokenizer_config.json", 5, 0)  # a fault ends this run as soon as it is told
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
# Where nothing is known, nothing is compared, and that is said. This is also the state of a synthetic checkpoint.

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
assert hashes(one, [SHA256]) != hashes(other, [SHA256])
assert hashlib.sha1(whole).hexdigest() != mine[GIT]

# %% [markdown]
# ## 5.23.10 Make it fast
#
# The chain of SHA-256 is the work: a gigabyte or two a second and core where the processor has instructions for it.
# Pieces must be long enough that Python does not count; two files at once use two cores. The full model is 1.56 TB.

# %% tags=["nbval-ignore-output"]
big = [scratch / f"big{i}" for i in range(2)]
for path in big:
    path.write_bytes(rng.bytes(1 << 26))


def rate(files, piece):
    "GB/s of hashing `files`, each on a thread of its own."
    global PIECE
    usual, PIECE, began = PIECE, piece, time.perf_counter()
    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(lambda path: hashes(str(path), [SHA256]), files))
    PIECE = usual
    return sum(path.stat().st_size for path in files) / (time.perf_counter() - began) / 1e9


for label, files, piece in (("4 KiB at a time", big[:1], 4096), ("4 MiB at a time", big[:1], HASH_READ_BYTES), ("two files at once", big, HASH_READ_BYTES)):
    speed = max(rate(files, piece) for _ in range(3))
    print(f"{label:20s}{speed:6.2f} GB/s, {1561 / speed / 60:5.0f} min for 1.56 TB")

# %% [markdown]
# ## 5.23.11 Summary
#
# - A size and a header say nothing about a payload; a hash that was computed elsewhere does. Blob names and `.metadata`
#   are such hashes, and free.
# - `k3 verify MODEL --write-manifest` keeps today's hashes beside the model: proof against later damage, not against
#   damage that is there already.
# - What was not compared is part of the answer.
#
# **Exercises.**
# 1. Find the shortest list of byte positions whose flips leave all logits as they are. Which tensors are they in, and
#    why?
# 2. Hash a file's 4 MiB pieces separately and list them. What would a manifest of pieces cost for 1.56 TB, and what
#    could it say that this one cannot?
# 3. Verify while decoding: which bytes does one token read twice, and could a reader hash what it reads?
#
# Next: a layer whose memory never grows. [2.1 Kimi Delta Attention](../02_kda/01_kda.ipynb)

# %%
shutil.rmtree(scratch)
