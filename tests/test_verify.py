"k3lib.verify: every byte of every file is read, every source of expected hashes counts, what is unchecked is said."
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from common import FIXTURES
from common import MODEL as ORACLE
from common import k3 as run_k3

from k3lib.config import read_config
from k3lib.fileio import CheckpointError, UsageError
from k3lib.header import header_bytes
from k3lib.verify import (
    GIT,
    HASH_READ_BYTES,
    SHA256,
    hashes,
    is_released,
    manifest_path,
    published_sizes,
    read_manifest,
    verify,
)

LISTED = read_manifest(ORACLE.parent / "model.sha256")
SHARD = "model-00005-of-000016.safetensors"


@pytest.fixture
def model(tmp_path):
    "A copy of the embedded model with its manifest beside it, to damage."
    shutil.copy(ORACLE.parent / "model.sha256", tmp_path)
    return Path(shutil.copytree(ORACLE, tmp_path / "model"))


def k3(*args):
    "(exit code, what was printed, the one line of the error) of `k3 verify`."
    run = run_k3("verify", *args)
    assert run.stderr.count("\n") == (run.returncode != 0)
    return run.returncode, run.stdout, run.stderr


def git_sha1(data):
    return hashlib.sha1(b"blob " + str(len(data)).encode() + b"\0" + data).hexdigest()


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_the_embedded_model_is_what_its_manifest_says():
    code, out, _ = k3(ORACLE)
    assert code == 0 and "20 files equal to" in out and "nothing found" in out and "NOT" not in out
    assert not manifest_path(ORACLE).with_suffix(".sha256.partial").exists()


def test_a_flipped_bit_anywhere_in_any_file_names_that_file(model):
    rng = np.random.default_rng(5)
    for name in LISTED:
        path, size = model / name, (model / name).stat().st_size
        for at in (0, size - 1, int(rng.integers(size))):
            bit = int(rng.integers(8))
            flip(path, at, bit)
            found = verify(model)
            assert name in found.damaged and str(path) in found.damaged[name], (name, at, bit, found.damaged)
            # the model's own path stands for a header or index that contradicts another file
            assert {*found.damaged} <= {name, str(model)}, found.damaged
            flip(path, at, bit)
    assert not verify(model).damaged


def test_a_payload_mismatch_is_one_line_with_file_found_and_expected(model):
    flip(model / SHARD, 83_793, 7)
    code, out, err = k3(model)
    now = hashlib.sha256((model / SHARD).read_bytes()).hexdigest()
    assert code == 4 and out.count(now) == 1
    for word in (model / SHARD, f"sha256 is {now}", f"expected {LISTED[SHARD]}", model.parent / "model.sha256"):
        assert str(word) in out and str(word) in err
    assert "all tensors that it implies are there" in out  # headers and sizes see nothing


@pytest.mark.parametrize("damage, words", [
    (lambda path: os.truncate(path, path.stat().st_size - 5), "truncated"),
    (lambda path: os.truncate(path, 0), "file of 0 bytes"),
    (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "belong to no tensor"),
    (lambda path: path.unlink(), "found no file"),
    (lambda path: (path.unlink(), path.symlink_to("nowhere")), "a link to nothing"),
    (lambda path: (path.unlink(), path.mkdir()), "not a file"),
    (lambda path: shutil.copy(path.with_name("model-00006-of-000016.safetensors"), path), "sha256 is"),
], ids=["short", "empty", "long", "missing", "dangling", "folder", "another shard"])
def test_damaged_shards_are_named_and_the_others_still_hashed(model, damage, words):
    damage(model / SHARD)
    flip(model / "model-00009-of-000016.safetensors", 100_000)
    code, out, _ = k3(model)
    assert code == 4
    assert any(str(model / SHARD) in line and words in line for line in out.splitlines()), out
    assert any("model-00009" in line and "sha256 is" in line for line in out.splitlines()), out
    assert "18 files equal" in out


def test_every_damaged_header_is_told_not_only_the_first(model):
    for number in (3, 8, 11):
        flip(model / f"model-{number:05d}-of-000016.safetensors", 8)
    assert [name[6:11] for name in verify(model).damaged] == ["00003", "00008", "00011"]


def test_a_config_that_does_not_fit_the_tensors(model):
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["num_attention_heads"] = 2
    config["text_config"].pop("num_key_value_heads", None)
    (model / "config.json").write_text(json.dumps(config))
    code, out, _ = k3(model)
    assert code == 4 and "the config implies" in out and "config.json: sha256 is" in out


def test_without_expected_hashes_that_is_said_and_nothing_is_hashed(model):
    (model.parent / "model.sha256").unlink()
    code, out, _ = k3(model)
    assert code == 0
    assert "no expected hash for 16 shards: only sizes were checked" in out
    assert "no expected hash for 4 other files" in out and " 0 bytes in" in out and "equal to" not in out


def test_a_written_manifest_is_what_sha256sum_reads_and_finds_later_damage(model):
    (model.parent / "model.sha256").unlink()
    code, out, _ = k3(model, "--write-manifest")
    path = model.parent / "model.sha256"
    assert code == 0 and f"{path}: the hashes of 20 files" in out
    digests = {name: hashlib.sha256((model / name).read_bytes()).hexdigest() for name in LISTED}
    assert path.read_text() == "".join(f"{digests[name]}  {name}\n" for name in sorted(LISTED))
    if shutil.which("sha256sum"):
        run = subprocess.run(["sha256sum", "--strict", "-c", "../model.sha256"], cwd=model, capture_output=True)
        assert run.returncode == 0
    flip(model / SHARD, 70_000)
    assert k3(model)[0] == 4
    before = path.read_text()
    code, _, err = k3(model, "--write-manifest")
    assert code == 4 and f"{path} is not written" in err and path.read_text() == before
    code, _, _ = k3(model, "--write-manifest", model.parent / "other")  # no expectation there: today's bytes
    assert code == 0 and read_manifest(model.parent / "other")[SHARD] != LISTED[SHARD]
    assert k3(model, "--manifest", model.parent / "other")[0] == 0


def test_a_manifest_is_never_written_into_the_model(model):
    before = sorted(os.listdir(model))
    code, _, err = k3(model, "--write-manifest", model / "sums")
    assert code == 2 and "never written to" in err and sorted(os.listdir(model)) == before


def test_files_that_only_the_manifest_names_are_checked_too(model):
    (model / "more").mkdir()
    (model / "more" / "notes.txt").write_text("x")
    with open(model.parent / "model.sha256", "a") as file:
        file.write(f"{hashlib.sha256(b'x').hexdigest()} *./more/notes.txt\n")
    found = verify(model)
    assert not found.damaged and len(found.files) == 21
    (model / "more" / "notes.txt").write_text("y")
    assert [*verify(model).damaged] == ["more/notes.txt"]


@pytest.mark.parametrize("text, words", [
    (b"", "0 bytes"), (b"\n", "line 1"), (b"abc  config.json\n", "line 1"), (b"0" * 64 + b" config.json\n", "line 1"),
    (b"0" * 64 + b"  ../config.json\n", "line 1"), (b"0" * 64 + b"  /etc/passwd\n", "line 1"),
    (b"g" * 64 + b"  config.json\n", "line 1"), (b"0" * 64 + b"  a\n" + b"0" * 63 + b"  b\n", "line 2"),
    ((b"0" * 64 + b"  a\n") * 2, "listed twice"), (b"\xff\x00" * 40, "line 1"),
    (b"0" * 64 + b"  a\n\n" + b"0" * 64 + b"  b\n", "line 2"),
])
def test_a_manifest_that_is_not_one_is_refused(model, text, words):
    (model.parent / "model.sha256").write_bytes(text)
    code, _, err = k3(model)
    assert code == 4 and "model.sha256" in err and words in err


def test_a_manifest_the_user_names_must_be_there(model):
    code, _, err = k3(model, "--manifest", model.parent / "no.sha256")
    assert code == 2 and "no.sha256: no such manifest" in err
    code, _, err = k3(model.parent / "no")
    assert code == 2 and "no such model folder" in err


def as_the_hub(file, data):
    "The hash under which the hub keeps a file: git's for small ones, else SHA-256."
    return git_sha1(data) if file.endswith(".json") else hashlib.sha256(data).hexdigest()


def hub_cache(home, name=as_the_hub):
    "The embedded model as a hub cache holds it: blobs under their hashes, a snapshot of links. Returns the snapshot."
    repository = home / "models--toy--k3"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in LISTED:
        data = (ORACLE / file).read_bytes()
        (repository / "blobs" / name(file, data)).write_bytes(data)
        (snapshot / file).symlink_to(Path("..", "..", "blobs", name(file, data)))
    return snapshot


def test_blob_names_of_a_hub_cache_are_expected_hashes_of_both_kinds(tmp_path):
    snapshot = hub_cache(tmp_path)
    code, out, _ = k3(snapshot)
    assert code == 0 and "20 files equal to the hub cache's name for it" in out and "NOT CHECKED" not in out
    for file, kind in ((SHARD, SHA256), ("tokenizer_config.json", GIT)):
        blob = (snapshot / file).resolve()
        flip(blob, blob.stat().st_size - 2)
        found = verify(snapshot)
        assert [*found.damaged] == [file] and f"{kind} is" in found.damaged[file] and blob.name in found.damaged[file]
        flip(blob, blob.stat().st_size - 2)


def test_plain_sha1_is_not_gits(tmp_path):
    snapshot = hub_cache(tmp_path, lambda file, data: hashlib.sha1(data).hexdigest())
    assert {*verify(snapshot).damaged} == {*LISTED}


def test_beside_a_snapshot_of_a_hub_cache_is_one_level_up(tmp_path):
    snapshot = hub_cache(tmp_path)
    assert k3(snapshot, "--write-manifest")[0] == 0
    assert os.listdir(snapshot.parent) == [snapshot.name]
    assert read_manifest(snapshot.parents[1] / "0123abcd.sha256") == LISTED


def metadata(model, name, etag, rest="\n1700000000.25\n"):
    path = model / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1" * 40 + "\n" + etag + rest)


def test_metadata_beside_a_local_download_are_expected_hashes_of_both_kinds(model):
    (model.parent / "model.sha256").unlink()
    for name in LISTED:
        metadata(model, name, as_the_hub(name, (model / name).read_bytes()))
    code, out, _ = k3(model)
    assert code == 0 and "20 files equal to its download's .metadata" in out and "NOT CHECKED" not in out
    flip(model / SHARD, 60_000)
    flip(model / "tokenizer_config.json", 3)
    found = verify(model)
    assert {*found.damaged} == {SHARD, "tokenizer_config.json"}
    assert "git's sha1 is" in found.damaged["tokenizer_config.json"] and ".metadata" in found.damaged[SHARD]


@pytest.mark.parametrize("etag, rest", [
    ("d41d8cd9", "\n1.5\n"), ("0" * 64, ""), ("G" * 40, "\n1.5\n"), ("\u00e9" * 64, "\n1.5\n"), ("", "\n1.5\n")])
def test_metadata_without_a_hash_leave_the_file_unchecked_and_said(model, etag, rest):
    (model.parent / "model.sha256").unlink()
    metadata(model, SHARD, etag, rest)
    found = verify(model)
    assert SHARD in found.unknown and "no expected hash for 16 shards" in found.text()


def test_all_sources_must_agree(model):
    metadata(model, SHARD, "0" * 64)
    found = verify(model)
    assert [*found.damaged] == [SHARD] and "expected " + "0" * 64 in found.damaged[SHARD]


class Stopped(Exception):
    pass


def interrupted(model, victim):
    """A run on one thread, stopped when it reaches the damage of `victim`, which is then repaired.

    Returns the path of its log, and the lines in it.
    """
    def stop(line):
        raise Stopped
    flip(model / victim, 70_000)
    with pytest.raises(Stopped):
        verify(model, threads=1, show=stop)
    flip(model / victim, 70_000)
    partial = model.parent / "model.sha256.partial"
    return partial, partial.read_text().splitlines(keepends=True)


SIZES = {name: (ORACLE / name).stat().st_size for name in LISTED if name.startswith("model-")}
SMALLEST = min((name for name in SIZES if SIZES[name] > 70_000), key=SIZES.get)


def test_an_interrupted_run_is_continued_with_the_other_files(model):
    partial, lines = interrupted(model, SMALLEST)
    assert 5 < len(lines) < 20
    code, out, _ = k3(model)
    assert code == 0 and f"{len(lines)} files taken from an unfinished run" in out and "20 files equal" in out
    assert not partial.exists()
    assert "unfinished" not in k3(model)[1]


def test_a_file_that_changed_since_is_hashed_anew(model):
    partial, lines = interrupted(model, SMALLEST)
    name = lines[0].split()[-1]
    flip(model / name, 65_000)
    found = verify(model)
    assert [*found.damaged] == [name] and found.resumed == len(lines) - 1


def test_same_size_and_times_do_not_hide_a_change(model):
    "A copy that restores times (cp -p, rsync -t): the time of the change itself cannot be set."
    partial, lines = interrupted(model, SMALLEST)
    name = lines[0].split()[-1]
    before = os.stat(model / name)
    flip(model / name, 65_000)
    os.utime(model / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [*verify(model).damaged] == [name]


def test_lines_that_are_damaged_are_not_believed(model):
    partial, lines = interrupted(model, SMALLEST)
    wrong = lines[1].replace(lines[1][:64], "0" * 64)
    partial.write_text(lines[0][:30] + "\n" + wrong + "\0\n" + "".join(lines[2:])[:-2])
    found = verify(model)
    assert not found.damaged and found.resumed == len(lines) - 3


def test_after_damage_only_the_repaired_file_is_read_again(model):
    flip(model / SHARD, 70_000)
    assert k3(model)[0] == 4
    shutil.copy(ORACLE / SHARD, model / SHARD)
    code, out, _ = k3(model)
    assert code == 0 and "19 files taken from an unfinished run" in out and f"{SIZES[SHARD]:,} bytes in" in out


def test_a_place_that_cannot_be_written_does_not_stop_the_check(model):
    (model.parent / "model.sha256.partial").mkdir()  # root may write into a read-only folder, but not onto a folder
    code, out, _ = k3(model)
    assert code == 0 and "20 files equal" in out and "not kept" in out and "would begin anew" in out


def test_a_file_that_changes_while_it_is_read_is_damage(tmp_path):
    path, link, other = tmp_path / "a", tmp_path / "a.safetensors", tmp_path / "b"
    for change in (lambda n: os.utime(path, ns=(1, 1)), lambda n: path.write_bytes(b"y" * n),
                   lambda n: path.unlink(), lambda n: os.truncate(path, 10),
                   lambda n: (link.unlink(), link.symlink_to(other)), lambda n: link.unlink()):
        link.unlink(missing_ok=True)
        link.symlink_to(path)
        for each in (path, other):
            each.write_bytes(b"x" * 1000)
        with pytest.raises(CheckpointError, match="a.safetensors: (was changed or replaced|.* cannot be read)"):
            hashes(str(link), [SHA256], progress=change)


def test_hashes_are_those_of_hashlib_across_borders_of_reads(tmp_path):
    path = tmp_path / "a"
    for size in (0, 1, HASH_READ_BYTES - 1, HASH_READ_BYTES, HASH_READ_BYTES + 1):
        data = np.random.default_rng(size).bytes(size)
        path.write_bytes(data)
        seen, expected = [], {SHA256: hashlib.sha256(data).hexdigest(), GIT: git_sha1(data)}
        assert hashes(path, [SHA256, GIT], seen.append).digests == expected
        assert sum(seen) == size
        assert hashes(path, [SHA256, GIT], read_bytes=1 << 16).digests == expected


def test_memory_is_one_read_a_thread(tmp_path):
    with open(tmp_path / "a", "wb") as file:
        file.truncate(16 * HASH_READ_BYTES)
    tracemalloc.start()
    hashes(str(tmp_path / "a"), [SHA256])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * HASH_READ_BYTES


def test_published_sizes_are_checked_where_the_shape_is_the_released_one(tmp_path):
    lines = (FIXTURES / "k3" / "shard_sizes.tsv").read_text().splitlines()
    assert published_sizes() == {name: int(size) for name, size in map(str.split, lines)}
    config = read_config(FIXTURES / "k3")
    assert is_released(config) and not is_released(read_config(ORACLE))
    for name, size in published_sizes().items():  # one tensor in each, as long as the file
        with open(tmp_path / name, "wb") as file:
            file.write(one_tensor(name, size))
            file.truncate(size)
    found = verify(tmp_path, config)
    assert found.published_sizes and not found.damaged
    assert "no expected hash for 96 shards: only sizes were checked" in found.text()
    name = "model-00033-of-000096.safetensors"
    with open(tmp_path / name, "r+b") as file:
        file.write(one_tensor(name, published_sizes()[name] - 4096))
        file.truncate(published_sizes()[name] - 4096)
    found = verify(tmp_path, config)
    assert [*found.damaged] == [name]
    assert "16,990,912,816 bytes, expected 16,990,916,912, the published size" in found.damaged[name]
    assert not verify(tmp_path).damaged  # without a config nothing says what the sizes should be


def one_tensor(name, size):
    "The header of a file of `size` bytes with one tensor."
    length = len(header_bytes([(name, "U8", [size])]))
    for _ in range(3):
        length = len(head := header_bytes([(name, "U8", [size - length])]))
    assert json.loads(head[8:])[name]["shape"] == [size - length]
    return head


def test_the_account_as_json(model, tmp_path):
    assert k3(model, "--json", tmp_path / "r.json")[0] == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["hashes"] == LISTED and found["damaged"] == {} and found["unknown"] == []
    assert found["bytes_hashed"] == sum((ORACLE / name).stat().st_size for name in LISTED)


def test_progress_is_told_the_bytes_to_hash_and_each_read(model):
    told = []

    @contextlib.contextmanager
    def bar(total):
        told.append(total)
        yield SimpleNamespace(update=told.append)

    result = verify(model, progress=bar)
    assert told[0] == sum(told[1:]) == result.bytes_hashed > 6_000_000


def test_when_a_callback_raises_no_thread_goes_on_hashing(model):
    "As Ctrl-C does, wherever it comes: the threads have ended when the exception is out, and while its frames live."
    def stop(line):
        raise Stopped
    with open(model / "big.bin", "wb") as file:
        file.truncate(1 << 36)  # a hole that takes a minute to hash
    with open(model.parent / "model.sha256", "a") as file:
        file.write("0" * 64 + "  big.bin\n")
    flip(model / SMALLEST, 70_000)
    before, began = threading.active_count(), time.monotonic()
    with pytest.raises(Stopped) as caught:
        verify(model, threads=2, show=stop)
    assert threading.active_count() == before and time.monotonic() - began < 10, caught.traceback


def test_ctrl_c_ends_it_soon_and_keeps_what_is_done(model):
    size = 1 << 35  # a hole that takes half a minute to hash
    path = model / "big.bin"
    with open(path, "wb") as file:
        file.truncate(size)
    with open(model.parent / "model.sha256", "a") as file:
        file.write("0" * 64 + "  big.bin\n")
    run = subprocess.Popen([sys.executable, "-m", "k3lib", "verify", str(model)], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True)
    partial = model.parent / "model.sha256.partial"
    for _ in range(600):
        done = partial.exists() and partial.read_text().count("\n") == 20
        if run.poll() is not None or done or os.cpu_count() == 1:
            break
        time.sleep(0.1)
    time.sleep(5 if os.cpu_count() == 1 else 0)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 130 and err == "k3 verify: interrupted\n"
    assert os.cpu_count() == 1 or partial.read_text().count("\n") == 20


@pytest.mark.parametrize("call, words", [
    (lambda model: verify(5), "path is 5, expected a path"),
    (lambda model: verify(""), "path is '', expected a path"),
    (lambda model: verify(model, manifest=3), "manifest is 3, expected a path"),
    (lambda model: verify(model, "config.json"), "config is 'config.json': a Config is needed"),
    (lambda model: verify(model, threads=0), "threads is 0: a whole number from 1"),
    (lambda model: verify(model, threads="x"), "threads is 'x': a whole number from 1"),
    (lambda model: verify(model, threads=-1), "threads is -1: a whole number from 1"),
    (lambda model: hashes(5, [SHA256]), "path is 5, expected a path"),  # not the file that has descriptor 5
    (lambda model: read_manifest(5), "path is 5, expected a path"),
    (lambda model: manifest_path(None), "folder is None, expected a path"),
    (lambda model: hashes(model / SHARD, ["md5"]), "kind of hash is 'md5', expected 'sha256' or"),
    (lambda model: hashes(model / SHARD, [SHA256], read_bytes=0), "read_bytes is 0: a whole number from 1"),
    (lambda model: hashes(model / SHARD, [SHA256], read_bytes=-4096), "read_bytes is -4096: a whole number from 1"),
])
def test_arguments_of_a_wrong_type_are_refused_by_name(model, call, words):
    with pytest.raises(UsageError) as refused:
        call(model)
    assert str(refused.value).startswith(words) and "\n" not in str(refused.value)


def test_two_checks_at_once_share_their_log(model):
    "Lines of both are whole, and the one that ends last leaves no log."
    barrier, errors = threading.Barrier(2), []

    def run():
        try:
            for _ in range(10):
                barrier.wait(60)
                assert not verify(model, threads=2).damaged
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run) for _ in range(2)]
    [thread.start() for thread in threads], [thread.join(100) for thread in threads]
    assert not errors and not (model.parent / "model.sha256.partial").exists()
