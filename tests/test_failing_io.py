"""Between disk and answer: reads that are short, interrupted, failing or stalled; files that change; full disks.

Either the same bytes as without, or one error with file and place. Never other numbers, never a dropped expert. Reads
are failed where compiled code and Python make them (shim.py), and below both in the C library's place (shim.c) where a
compiler is at hand.
"""
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from common import MODEL, PROMPT, ROOT, k3_process

import k3lib
from k3lib.checkpoint import Checkpoint
from k3lib.cli import main
from k3lib.disk import Files, page_buffer, page_padded
from k3lib.fileio import CheckpointError, writing


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    "What happened in the process of shim.py, to a copy of the model: `k3 verify` keeps its notes beside it."
    model = shutil.copytree(MODEL, tmp_path_factory.mktemp("shim") / "model")
    shutil.copy(MODEL.parent / "model.sha256", model.parent)
    command = [sys.executable, ROOT / "tests" / "shim.py", model]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)


def test_the_shim_is_where_reads_are_made(found):
    assert found["who"]["python"] > 100
    if found["how"] == ["direct"] and sys.platform == "linux":
        assert found["who"]["compiled"] > 100  # else compiled code has made no reads, with or without a shim


@pytest.mark.parametrize("case", ["compiled reads short", "compiled reads interrupted",
                                  "compiled reads failing, repeated by Python", "all reads short by pages",
                                  "all reads short by bytes", "afterwards", "stalled"])
def test_what_can_be_repeated_gives_the_same_bits(found, case):
    assert found[case].get("error") is None
    for what in ("ids", "logits"):
        assert found[case][what] == found["as it is"][what]


@pytest.mark.parametrize("kind, words", [
    ("failed", "reading [0-9]+ bytes at offset [0-9]+ failed: Input/output error"),
    ("ended", "gave nothing at byte [0-9]+ of [0-9]+, but bytes [0-9]+ to [0-9]+ are needed")])
def test_no_read_of_a_pass_can_fail_silently(found, kind, words):
    "Trunk, head, embedding and experts alike, by the draw of the places."
    assert len(found[kind]) == 24
    for each in found[kind]:
        assert re.fullmatch(f"CheckpointError: {re.escape(each['path'])}: {words}", each.get("error", "no error")), each


def test_among_them_are_experts_and_trunk(found):
    with Checkpoint(MODEL) as checkpoint:
        extents = [(checkpoint.extent(name), name) for name in checkpoint.names()]
    kinds = set()
    for each in found["failed"]:
        if at := re.search(r"at offset (\d+)", each.get("error", "")):
            kinds |= {"expert" if ".experts." in name else "trunk" for e, name in extents
                      if Path(e.file).name == Path(each["path"]).name and e.offset <= int(at[1]) < e.offset + e.nbytes}
    assert kinds == {"expert", "trunk"}


def test_a_read_that_stalls_is_told_and_waited_for(found):
    said, path = found["stalled"]["said"], found["stalled"]["path"]
    assert any(line.startswith(f"{path}: ") for line in said), said  # a busy machine may let others take 0.4 s too
    words = r".+: reading from offset [0-9]+ on is not done after [0-9]+ s; still waiting"
    assert all(re.fullmatch(words, line) for line in said), said
    assert found["threads left"] == []


@pytest.mark.parametrize("what, words", [("header", "bytes at offset 8 failed: [Errno 5] Input/output error"),
                                         ("decode", "at offset 83792 failed: Input/output error"),
                                         ("hash", "at offset 0 failed: [Errno 5] Input/output error")])
def test_the_command_says_it_in_one_line_and_ends_with_4(found, what, words):
    run = found[f"k3 {what}"]
    assert run["code"] == 4 and run["err"].count("\n") == 1 and run["path"] in run["err"] and words in run["err"]
    assert "generated" not in run["out"]
    if what == "hash":
        assert "19 files equal to" in run["out"] and Path(run["path"]).name in run["out"]


# Files that change


@pytest.fixture
def model(tmp_path):
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


SHARD = "model-00006-of-000016.safetensors"


def rewrite(path):
    "Other bytes of the same number, in place."
    os.utime(path, ns=(1, 1))  # as if the file had been there for long: the clock of a file system is coarse
    with open(path, "r+b") as file:
        file.seek(300_000)
        file.write(b"\x3c" * 1000)


def replace(path):
    "Another file of the same bytes and time takes the name: a download that is repeated."
    shutil.copy2(path, f"{path}.new")
    os.replace(f"{path}.new", path)


@pytest.mark.parametrize("change, words", [
    (rewrite, "was written to during the run: found 547600 bytes of .*, expected 547600 bytes of "),
    (replace, "was replaced by another file during the run"),
    (lambda path: os.truncate(path, 400_000),
     "was written to during the run: found 400000 bytes of .*, expected 547600|ends at byte 400000, but bytes"),
    (lambda path: os.unlink(path), "was removed during the run: No such file"),
], ids=["rewritten", "replaced", "truncated", "removed"])
def test_a_shard_that_changes_during_a_run_ends_it(model, change, words):
    decoder = k3lib.load(model, "1GB", context=32)
    try:
        tokens = decoder.generate([304, 206, 32], 8)
        next(tokens)
        change(model / SHARD)
        with pytest.raises(CheckpointError, match=f"{SHARD}: ({words})"):
            next(tokens)
    finally:
        decoder.close()


@pytest.mark.parametrize("change", [rewrite, replace])
def test_a_shard_that_changed_after_its_header_was_read_is_not_opened(model, change):
    with Checkpoint(model) as checkpoint:
        name = next(name for name in checkpoint.names() if ".layers.5." in name)
        extent, files = checkpoint.extent(name), Files(checkpoint.fingerprints)
        change(model / SHARD)
        with pytest.raises(CheckpointError, match=f"{SHARD}: was .* during the run"):
            files.read(page_buffer(page_padded(extent.nbytes)), extent, 0, extent.nbytes, "trunk")
        files.close()


def test_a_model_that_is_left_alone_passes_the_check(model):
    "Reading, linking and a change of rights are no change of what is read."
    decoder = k3lib.load(model, "1GB", context=32)
    try:
        tokens = decoder.generate([304, 206, 32], 8)
        next(tokens)
        (model / SHARD).read_bytes()
        os.link(model / SHARD, model.parent / "backup")
        os.chmod(model / SHARD, 0o444)
        next(tokens)
    finally:
        decoder.close()


# Disks that are full


@pytest.fixture
def limited():
    "Calls main() with files of at most so many bytes: EFBIG at a place of our choosing, on every machine."
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run(most, *args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            return main([str(arg) for arg in args])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    main(["decode", str(MODEL), "--ids", PROMPT, "--max-new-tokens", "1"])  # what numba keeps on the disk is there
    return run


CASES = {
    "json": ("decode", MODEL, "--quiet", "--ids", PROMPT, "--max-new-tokens", 2, "--json", "{}/out"),
    "logits": ("decode", MODEL, "--quiet", "--ids", PROMPT, "--max-new-tokens", 2, "--logits", "{}/out"),
    "census": ("census", MODEL, "--json", "{}/out"),
    "manifest": ("verify", MODEL, "--write-manifest", "{}/out"),
    "synth": ("synth", "{}/out", "--preset", "oracle"),
    "pack": ("pack", MODEL, "{}/out"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_write_that_fails_is_one_line_with_file_and_place_and_leaves_nothing(tmp_path, capsys, limited, case):
    args = [str(arg).format(tmp_path) for arg in CASES[case]]
    capsys.readouterr()
    code = limited(500, *args)
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("synthetic checkpoint")]
    assert code == 1 and len(err) == 1, err
    assert re.search(rf"{re.escape(str(tmp_path))}/.*: writing at byte [0-9,]+ failed: File too large", err[0]), err
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".partial"]
    assert not left, left
    assert limited(1 << 40, *args) == 0  # what was left does not stand in the way


def test_what_was_there_stays_when_its_successor_cannot_be_written(tmp_path, capsys, limited):
    (tmp_path / "out").write_text("of the run before")
    assert limited(500, "census", MODEL, "--json", tmp_path / "out") == 1
    assert (tmp_path / "out").read_text() == "of the run before" and os.listdir(tmp_path) == ["out"]


def test_an_error_of_a_read_inside_a_write_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"), writing(tmp_path / "a"):
        open(tmp_path / "nowhere")


MOUNT = "mount -t tmpfs -o size=4k none {folder} && {{ {more}; }}; exec {python} -m k3lib {args}"


@pytest.mark.parametrize("case", ["census", "synth", "pack"])
@pytest.mark.parametrize("more, words", [
    ("cat /dev/zero > {folder}/full 2>/dev/null",
     "No space left on device|bytes are still to be written|free, expected at least"),
    ("mount -o remount,ro {folder}", "Read-only file system")], ids=["full", "read-only"])
def test_full_and_read_only_file_systems(tmp_path, case, more, words):
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no user namespaces here: the limit on the size of files stands for the full disk")
    args = " ".join(f"'{str(arg).format(folder)}'" for arg in CASES[case])
    command = MOUNT.format(folder=folder, more=more.format(folder=folder), python=sys.executable, args=args)
    run = subprocess.run(["unshare", "-rm", "sh", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=300)
    err = run.stderr.splitlines()
    assert run.returncode in (1, 2) and re.search(words, err[-1]) and str(folder) in err[-1], run.stderr
    assert "Traceback" not in run.stderr


# Below everything: the C library's own calls


@pytest.fixture(scope="module")
def preload(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("no C compiler: shim.py has failed the same reads from inside the process")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, ROOT / "tests" / "shim.c", "-ldl"], check=True)
    return library


def preloaded(library, kind, path, start, *args):
    fault = {"FAULT_KIND": kind, "FAULT_PATH": path, "FAULT_FROM": str(start), "FAULT_LOG": str(library.parent / "log")}
    return k3_process(*args, env=os.environ | {"LD_PRELOAD": str(library)} | fault, cwd=ROOT, timeout=300)


def test_short_and_interrupted_system_calls_change_no_bit(preload, tmp_path):
    args, logits = ["decode", MODEL, "--ids", PROMPT, "--max-new-tokens", 3, "--logits", tmp_path / "out", "--ram"], []
    least = re.search("at least ([0-9]+) MB", preloaded(preload, "", "", 0, *args, "1MB").stderr)[1]
    for kind in ("", "short", "eintr"):  # with little memory, so that compiled code reads
        run = preloaded(preload, kind, ".safetensors", 0, *args, f"{int(least) + 1}MB")
        assert run.returncode == 0, run.stderr
        logits.append(np.load(tmp_path / "out").tobytes())
        compiled, python = map(int, (preload.parent / "log").read_text().split())
        assert python > 20 or not kind
        assert compiled > 20 or not kind or "buffered" in run.stderr
    assert logits[0] == logits[1] == logits[2]


@pytest.mark.parametrize("start", [0, 15])
def test_a_failing_disk_ends_the_run_with_4(preload, start):
    run = preloaded(preload, "eio", "model-00009-of-000016.safetensors", start, "decode", MODEL, "--ids", PROMPT,
                    "--quiet")
    where = r"\S*model-00009-of-000016.safetensors: reading [0-9,]+ bytes at offset [0-9,]+ failed"
    assert run.returncode == 4 and re.fullmatch(rf"k3 decode: {where}: .*Input/output error\n", run.stderr), run.stderr


def test_a_full_disk_under_a_shard_of_synth(preload, tmp_path):
    shard = "model-00003-of-000016.safetensors"
    run = preloaded(preload, "enospc", shard, 1, "synth", tmp_path / "out", "--preset", "oracle")
    assert run.returncode == 1
    assert re.search(rf"{shard}: writing at byte [0-9,]+ failed: No space left on device", run.stderr), run.stderr
    assert os.listdir(tmp_path) == []
