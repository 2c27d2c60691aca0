"A path is resolved once, where it enters: a program may change its folder, or lose it, while a model is open."
import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import k3lib

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "fixtures" / "oracle13" / "model"
EXPECTED = json.loads((MODEL.parent / "expected.json").read_text())
IDS, NEW = EXPECTED["prompt_ids"], EXPECTED["generated_ids"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    "The current folder, in which `model` leads to the embedded model; beside it are other places to go."
    for place in "here", "empty":
        (tmp_path / place).mkdir()
    (tmp_path / "here" / "model").symlink_to(MODEL)
    shutil.copytree(MODEL, tmp_path / "copy" / "model")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def smallest():
    "A budget at which the embedded model streams: files are opened during every pass."
    try:
        k3lib.load(MODEL, 1, context=32)
    except k3lib.PlanError as error:
        return error.least + 2_000_000


@pytest.mark.parametrize("place", ["empty", "copy"])
@pytest.mark.parametrize("path", ["model", Path("model"), "./model/", "../here/model"])
def test_a_model_goes_on_after_its_program_has_changed_the_folder(here, path, place):
    "To a folder without a `model`, and to one with another: its files have other fingerprints."
    with k3lib.load(path, smallest(), context=32) as model:
        os.chdir(here / place)
        assert list(model.generate(IDS, 3)) == NEW[:3]
        os.chdir("/")
        model.reset()
        assert int(model.prefill(IDS).argmax()) == NEW[0]
        assert os.path.isabs(model.report.model) and os.path.samefile(model.report.model, MODEL)


@pytest.mark.parametrize("place", ["empty", "copy"])
def test_the_folder_changes_while_the_model_is_loaded(here, place):
    "From on_plan, before the first weight is read, and between two of them."
    with k3lib.load("model", "1GB", context=32, on_plan=lambda plan: os.chdir(here / place)) as model:
        assert list(model.generate(IDS, 2)) == NEW[:2]
    os.chdir(here / "here")
    with k3lib.load("model", "1GB", context=32, progress=lambda nbytes: os.chdir(here / place)) as model:
        assert list(model.generate(IDS, 2)) == NEW[:2]


def test_a_checkpoint_is_read_from_another_folder(here):
    opened = k3lib.Checkpoint("model")
    os.chdir(here / "empty")
    for name in "language_model.lm_head.weight", "vision_tower.encoder.final_layernorm.weight":
        if name in opened:
            extent = opened.extent(name)
            assert os.path.isabs(extent.file) and Path(extent.file).parent == here / "here" / "model"
            with open(extent.file, "rb") as file:
                file.seek(extent.offset)
                assert file.read(extent.nbytes) == opened.raw(name).tobytes()
    assert opened.path == here / "here" / "model" and all(map(os.path.isabs, opened.files))
    opened.close()


def test_links_are_not_followed_when_a_path_is_resolved(here):
    "In a hub's cache the names of shards are links to blobs; and `link/..` is the folder that the link leads to."
    blobs, snapshot = here / "blobs", here / "here" / "snapshot"
    blobs.mkdir(), snapshot.mkdir()
    for number, path in enumerate(sorted(MODEL.iterdir())):
        (blobs / f"{number:064x}").symlink_to(path)
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    (here / "here" / "deep").symlink_to(here / "copy" / "model")
    with k3lib.load("snapshot", smallest(), context=32) as model:
        os.chdir(here / "empty")
        assert list(model.generate(IDS, 2)) == NEW[:2]
        assert {Path(file).parent for file in model.source.checkpoint.files} == {snapshot}
    os.chdir(here / "here")
    with k3lib.Checkpoint("deep/../model") as opened:  # copy/model, not here/model
        assert os.path.samefile(opened.files[0], here / "copy" / "model" / Path(opened.files[0]).name)


def test_a_packed_trunk_is_read_from_another_folder(here):
    command = [sys.executable, "-m", "k3lib", "pack", "model", "packed"]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True).returncode == 0
    with k3lib.load("model", smallest(), "packed", context=32) as model:
        os.chdir(here / "copy")
        assert list(model.generate(IDS, 2)) == NEW[:2]
        assert Path(model.report.trunk) == here / "here" / "packed"


def test_packing_and_verifying_go_on_from_another_folder(here):
    from k3lib.pack import pack
    from k3lib.verify import verify

    class Bar:
        def update(self, nbytes):
            os.chdir(here / "empty")

    names = ["language_model.model.norm.weight", "language_model.lm_head.weight"]
    with k3lib.Checkpoint("model") as opened:
        pack(opened, names, "packed", lambda nbytes: os.chdir(here / "empty"))
    with k3lib.Checkpoint(here / "here" / "packed") as packed:
        assert [*packed.names()] == names
    assert not [*(here / "empty").iterdir()]

    os.chdir(here / "copy")
    found = verify("model", every=True, progress=lambda nbytes: contextlib.nullcontext(Bar()))
    assert not found.damaged and found.not_kept is None and len(found.hashes) > 16
    assert not [*(here / "empty").iterdir()] and not [*(here / "copy").glob("*.partial")]


def test_a_state_is_saved_where_the_program_was(here, monkeypatch):
    "The folder changes while it is written."
    with k3lib.load("model", "1GB", context=32) as model:
        model.prefill(IDS)
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: [os.chdir(here / "empty"), real(fd)][1])
        model.save_state("state")
        assert (here / "here" / "state").is_file() and not [*(here / "empty").iterdir()]


# A program whose folder was removed. Where the package `coverage` is installed, numba imports it, and it asks for the
# current folder at once; it is no part of this package.

WITHOUT_COVERAGE = "import sys; sys.modules['coverage'] = None\n"
GONE = WITHOUT_COVERAGE + """
import os, k3lib
os.makedirs(sys.argv[1] + "/model")
os.chdir(sys.argv[1])
os.rmdir("model"), os.rmdir(sys.argv[1])
for call in k3lib.load, k3lib.Checkpoint:
    try:
        call("model")
    except k3lib.UsageError as error:
        print(error)
with k3lib.load(sys.argv[2], "1GB", context=32) as model:
    print(*model.generate(map(int, sys.argv[3].split(",")), 2))
"""


def test_the_current_folder_was_removed(tmp_path):
    "A relative path has no meaning any more, an absolute one has."
    run = subprocess.run([sys.executable, "-c", GONE, str(tmp_path / "gone"), str(MODEL), ",".join(map(str, IDS))],
                         capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    one, other, ids = run.stdout.splitlines()
    told = "path is 'model', expected an absolute path, because the current folder has no path (No such file"
    assert one.startswith(told) and other.startswith(told) and ids == f"{NEW[0]} {NEW[1]}"


@pytest.mark.skipif(os.name == "nt", reason="a shell")
@pytest.mark.parametrize("command", ["census {}", "plan {}", "decode {} --ids 1", "verify {}"])
def test_the_command_in_a_folder_that_was_removed(tmp_path, command):
    for path, code in (("model", 2), (MODEL, 0)):
        (tmp_path / "gone").mkdir()
        run_k3 = f"""{sys.executable} -c "{WITHOUT_COVERAGE}from k3lib.__main__ import run; sys.exit(run())" """
        line = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && {run_k3} {command.format(path)}"
        run = subprocess.run(["sh", "-c", line], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                             text=True)
        assert run.returncode == code, run.stderr
        if code:
            assert len(run.stderr.splitlines()) == 1 and "model" in run.stderr and "absolute path" in run.stderr


# What is no path

@pytest.mark.parametrize("call", [k3lib.load, k3lib.Checkpoint])
@pytest.mark.parametrize("value", [5, 0, True, None, b"model", 1.5, [], ["model"], "", "a\0b", object()])
def test_what_is_no_path_is_refused_by_name(call, value):
    "Not opened: 5 would be a descriptor."
    with pytest.raises(k3lib.UsageError, match="^path is .*, expected a path: text that is not empty, or an os.PathLi"):
        call(value)


def test_other_paths_are_refused_by_name():
    with pytest.raises(k3lib.UsageError, match="trunk is 7, expected a path"):
        k3lib.load(MODEL, trunk=7)
    with k3lib.load(MODEL, "1GB", context=32) as model:
        for call in model.save_state, model.load_state:
            with pytest.raises(k3lib.UsageError, match="file is 1, expected a path"):
                call(1)


def test_any_object_that_is_a_path_is_one():
    class Where:
        def __fspath__(self):
            return str(MODEL)

    with k3lib.Checkpoint(Where()) as opened:
        assert opened.path == MODEL
