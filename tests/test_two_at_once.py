"""Two programs, or two threads, that write one thing at once: one wins or both agree, and nothing is half done.

And two cells or chapters that define one name. Only the command line, `k3lib.load` and `book/tangle.py` are used.
"""
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import k3lib

ROOT = Path(k3lib.__file__).parents[1]
MODEL = ROOT / "fixtures" / "oracle13" / "model"
ROUNDS = 2
posix = pytest.mark.skipif(os.name != "posix", reason="a process is stopped in the middle by a signal")


def start(*words, **options):
    return subprocess.Popen([sys.executable, "-m", "k3lib", *map(str, words)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **options)


def ended(*runs):
    "The runs as [(exit code, what was said on stderr)], the exit codes ascending."
    texts = [run.communicate(timeout=100) for run in runs]
    return sorted((run.returncode, err) for run, (_, err) in zip(runs, texts))


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    "What one run packs: {file name: hash}."
    folder = tmp_path_factory.mktemp("packed")
    assert ended(start("pack", MODEL, folder)) == [(0, "")]
    return contents(folder)


# k3 pack

def test_two_packs_into_one_folder(packed, tmp_path):
    for n in range(ROUNDS):
        folder = tmp_path / str(n)
        runs = ended(start("pack", MODEL, folder), start("pack", MODEL, folder))
        assert [code for code, _ in runs] == [0, 0], runs
        assert all(err.count("\n") <= 1 for _, err in runs) and contents(folder) == packed


def stopped_in_the_middle(folder):
    "A `k3 pack` that has begun to write and is then stopped by the system."
    for _ in range(20):  # it may have ended before the signal comes
        run = start("pack", MODEL, folder)
        while run.poll() is None and not list(folder.glob("*.part")):
            time.sleep(0.001)
        run.send_signal(signal.SIGSTOP)
        if run.poll() is None and len(list(folder.glob("*.safetensors"))) < 14:
            return run
        run.send_signal(signal.SIGCONT)
        run.communicate()
        shutil.rmtree(folder)
    raise AssertionError("no run was seen in the middle")


@posix
def test_a_second_pack_while_the_first_is_in_the_middle(packed, tmp_path):
    "It says in one line that it waits, and then succeeds, as the first one does."
    first = stopped_in_the_middle(tmp_path / "t")
    try:
        second = start("pack", MODEL, tmp_path / "t")
        assert "another process packs into this folder" in second.stderr.readline()
        assert second.poll() is None
    finally:
        first.send_signal(signal.SIGCONT)
    assert ended(first, second) == [(0, ""), (0, "")] and contents(tmp_path / "t") == packed


@posix
def test_a_pack_that_is_killed_while_another_waits(packed, tmp_path):
    "The lock ends with its process. The other goes on, and removes the half file."
    first = stopped_in_the_middle(tmp_path / "t")
    second = start("pack", MODEL, tmp_path / "t")
    second.stderr.readline()
    first.kill()
    assert ended(second) == [(0, "")] and contents(tmp_path / "t") == packed
    first.communicate()


@posix
def test_the_models_of_two_packs_are_never_mixed(packed, tmp_path):
    shutil.copytree(MODEL, tmp_path / "other")
    victim = tmp_path / "other" / "model-00014-of-000016.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1  # the last byte of the file before the image side's: of the table or the head
    victim.write_bytes(data)
    first = stopped_in_the_middle(tmp_path / "t")
    second = start("pack", tmp_path / "other", tmp_path / "t")
    first.send_signal(signal.SIGCONT)
    (good, _), (bad, said) = ended(first, second)
    assert (good, bad) == (0, 4) and "differs from that of" in said.splitlines()[-1], said
    assert contents(tmp_path / "t") == packed


# Other commands

def test_two_synths_into_one_folder(tmp_path):
    for n in range(ROUNDS):
        folder = tmp_path / str(n)
        runs = ended(*(start("synth", folder, "--preset", "oracle", "--layers", "5", "--seed", n) for n in (0, 1)))
        said = [line for line in runs[1][1].splitlines() if line.startswith("k3 synth: ")]
        assert [code for code, _ in runs] == [0, 2] and len(said) == 1 and str(folder) in said[0], runs
        assert not list(tmp_path.glob(".*")) and ended(start("census", folder)) == [(0, "")]


def test_two_verifies_write_one_manifest(tmp_path):
    shutil.copytree(MODEL, tmp_path / "m")
    for _ in range(ROUNDS):
        runs = ended(*(start("verify", tmp_path / "m", "--write-manifest") for _ in range(2)))
        assert runs == [(0, ""), (0, "")]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "m.sha256"]
        listed = dict(line.split("  ")[::-1] for line in (tmp_path / "m.sha256").read_text().splitlines())
        assert listed == contents(tmp_path / "m")


def test_two_reports_into_one_file(tmp_path):
    outputs = "--json", tmp_path / "r", "--logits", tmp_path / "l"
    words = "decode", MODEL, "--ids", "1,2", "--max-new-tokens", "2", "--quiet", *outputs
    assert ended(start(*words), start(*words)) == [(0, ""), (0, "")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l", "r"]


def test_two_threads_save_states_to_one_file(tmp_path):
    "The file is one state or the other, whole, and nothing else is left."
    models = [k3lib.load(MODEL, "1GB", context=16) for _ in range(2)]
    try:
        states, errors = set(), []
        for n, model in enumerate(models):
            model.prefill([1, 2, 3][:n + 1])
            model.save_state(tmp_path / "state")
            states.add((tmp_path / "state").read_bytes())
        barrier = threading.Barrier(2, timeout=60)

        def save(model):
            try:
                for _ in range(50):
                    barrier.wait()
                    model.save_state(tmp_path / "state")
                    barrier.wait()
                    assert (tmp_path / "state").read_bytes() in states
            except Exception as error:
                errors.append(error)
                barrier.abort()

        threads = [threading.Thread(target=save, args=(model,)) for model in models]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert not errors and [path.name for path in tmp_path.iterdir()] == ["state"]
    finally:
        [model.close() for model in models]


NBFORMAT = """
import pathlib, time
class Notebook:
    cells = []
def read(source, version):
    notebook = Notebook()
    notebook.text = pathlib.Path(source).read_text()
    return notebook
def write(notebook, target):
    target.write_text(notebook.text[:50])
    pathlib.Path(f"{target}.begun").touch()
    while len(list(target.parent.glob("*.begun"))) < 2:
        time.sleep(0.01)
    with open(target, "a") as file:
        file.write(notebook.text[50:])
"""
NBCLIENT = """
class NotebookClient:
    def __init__(self, notebook, **options):
        pass
    def execute(self):
        pass
"""
NOTEBOOK = """{"cells": [{"cell_type": "code", "id": "a", "execution_count": 1, "metadata": {}, "outputs": [
{"output_type": "stream", "name": "stdout", "text": "said 42\\n"}], "source": ""}], "metadata": {}, "nbformat": 4,
"nbformat_minor": 5}"""


def test_two_executions_of_one_notebook(tmp_path):
    "As two `make decode` do. Here both have written half of the notebook when either goes on."
    (tmp_path / "in.ipynb").write_text(NOTEBOOK)
    (tmp_path / "fake" / "nbclient").mkdir(parents=True)
    (tmp_path / "fake" / "nbformat.py").write_text(NBFORMAT)
    (tmp_path / "fake" / "nbclient" / "__init__.py").write_text(NBCLIENT)
    (tmp_path / "fake" / "nbclient" / "exceptions.py").write_text("class CellExecutionError(Exception): pass")
    (tmp_path / "out").mkdir()
    command = [sys.executable, ROOT / "book" / "show_run.py", tmp_path / "in.ipynb", tmp_path / "out" / "out.ipynb"]
    env = os.environ | {"PYTHONPATH": str(tmp_path / "fake")}
    for code, said in ended(*(subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                               env=env) for _ in range(2))):
        assert (code, said) == (0, "")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".ipynb"] == ["out.ipynb"]
    assert (tmp_path / "out" / "out.ipynb").read_text() == NOTEBOOK


# Two definitions of one name

CHAPTER = '# %% [markdown]\n# # 4.1 A chapter\n\n# %% tags=["export"]\nSIZE = 2\n'


@pytest.fixture
def book(tmp_path):
    "A book of one chapter, and a function that runs its exporter: (exit code, stderr)."
    chapter, module = tmp_path / "book" / "04_moe" / "01_router.py", tmp_path / "k3lib" / "router.py"
    chapter.parent.mkdir(parents=True)
    module.parent.mkdir()
    for name in "tangle.py", "jupytext.toml":
        shutil.copy(ROOT / "book" / name, tmp_path / "book")
    chapter.write_text(CHAPTER)

    def export():
        run = subprocess.run([sys.executable, "book/tangle.py"], capture_output=True, text=True, cwd=tmp_path)
        return run.returncode, run.stderr

    return chapter, module, export


def test_two_chapters_that_make_one_module(book):
    chapter, module, export = book
    other = chapter.parents[1] / "05_more" / "01_router.py"
    other.parent.mkdir()
    other.write_text(CHAPTER.replace("4.1", "5.1").replace("SIZE = 2", "SIZE = 3"))
    code, said = export()
    assert code == 1 and "05_more/01_router.py" in said and "04_moe/01_router.py" in said and not module.exists(), said


def test_two_cells_that_define_one_name(book):
    chapter, module, export = book
    chapter.write_text(CHAPTER + '\n# %% tags=["export"]\ndef SIZE():\n    return 3\n')
    code, said = export()
    assert code == 1 and "SIZE twice, in the exported cells at lines 5 and 8\n" in said and not module.exists(), said
