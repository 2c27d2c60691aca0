"""The kernel cache is dispensable: a folder that cannot be used costs time, one line says so, and damage is replaced.

Each run is a process of its own. The package is copied to a folder where no machine code can be kept beside it.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import k3lib

PACKAGE = Path(k3lib.__file__).parent
MODEL = Path(__file__).resolve().parents[1] / "fixtures" / "oracle13" / "model"
LINE = re.compile(r"k3: kernels are compiled anew in every process, because no folder can keep them \(.+\)\. "
                  r"Set NUMBA_CACHE_DIR to a folder that can be written\.\n")
DECODE = ("-m", "k3lib", "decode", MODEL, "--ids", "5,9,17", "--max-new-tokens", "3", "--ram", "1GB")


def python(package, *command, cwd=None, preexec_fn=None, stderr=subprocess.PIPE, **env):
    "Run Python, in the folder of the package if not in `cwd`, with the variables `env`; None takes one away."
    clean = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    env = {k: v for k, v in {**clean, "PYTHONPATH": str(package), **env}.items() if v is not None}
    return subprocess.run([sys.executable, *map(str, command)], env=env, cwd=cwd or package, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8", errors="replace",
                          preexec_fn=preexec_fn)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    "A folder with the package, which cannot keep machine code beside it: as in an installation that is read-only."
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGE, folder / "k3lib", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "k3lib" / "__pycache__").write_text("a file, so no folder")
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    "A folder with the machine code of all kernels that DECODE calls."
    run = python(PACKAGE.parent, *DECODE, NUMBA_CACHE_DIR=os.environ.get("NUMBA_CACHE_DIR"))
    assert run.returncode == 0, run.stderr
    folder = tmp_path_factory.mktemp("kept") / "kernels"
    shutil.copytree(os.environ.get("NUMBA_CACHE_DIR") or PACKAGE / "__pycache__", folder)
    return folder


@pytest.fixture(scope="module")
def ids(installed, kept):
    "The line of ids that DECODE prints."
    return generated(python(installed, *DECODE, NUMBA_CACHE_DIR=str(kept)))


def generated(run):
    assert run.returncode == 0, run.stderr
    return re.search(r"^generated ids: .+", run.stdout, re.M)[0]


def entries(folder, kernel):
    "The files that decide whether a kernel is compiled."
    found = [path for path in folder.rglob(f"{kernel}-*") if path.suffix in (".kernel", ".nbi")]
    assert found, f"{kernel} is not kept in {folder}"
    return found


# Nowhere to keep anything

NO_PASSWD = "import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n"
COMMAND = "import sys; from k3lib.cli import main; sys.exit(main(sys.argv[1:]))"
HOMES = {"none": None, "gone": "/dev/null/gone", "relative": "a/b", "a file": "/dev/null", "empty": ""}


def large(cases, *kept):
    "The cases for pytest.mark.parametrize: all but those to be `kept` run only with `--all`."
    return [case if case in kept else pytest.param(case, marks=pytest.mark.large) for case in cases]


@pytest.mark.parametrize("home", large(HOMES, "none", "a file"))
def test_a_command_that_needs_no_kernel_says_nothing(installed, tmp_path, home):
    run = python(installed, "-c", NO_PASSWD + COMMAND, "census", MODEL, HOME=HOMES[home], cwd=tmp_path)
    assert run.returncode == 0 and "parameters" in run.stdout and run.stderr == ""
    assert list(tmp_path.iterdir()) == []


LOAD = f"import k3lib; k3lib.load({str(MODEL)!r}, '1GB').close(); print('loaded')"


@pytest.mark.parametrize("env", large([{"HOME": None}, {"NUMBA_CACHE_DIR": "/dev/null/kernels"}], {"HOME": None}),
                         ids=str)
def test_one_line_names_folders_and_variable(installed, env):
    run = python(installed, "-c", NO_PASSWD + LOAD, **env)
    assert run.returncode == 0 and run.stdout == "loaded\n" and LINE.fullmatch(run.stderr), run.stderr
    assert env.get("NUMBA_CACHE_DIR", str(installed / "k3lib" / "__pycache__")) in run.stderr


BROKEN = {
    "full": "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
    "ascii": "import io, sys; sys.stderr = io.TextIOWrapper(io.BytesIO(), 'ascii', 'strict', write_through=True)",
    "none": "import sys; sys.stderr = None",
    "closed": "import os; os.close(2)",
}


@pytest.mark.parametrize("stderr", large(BROKEN, "full"))
def test_a_stderr_that_cannot_be_written_stops_nothing(installed, stderr):
    folder = "/dev/null/\N{CJK UNIFIED IDEOGRAPH-795E}"
    run = python(installed, "-c", f"{BROKEN[stderr]}\n{LOAD}", NUMBA_CACHE_DIR=folder)
    assert (run.returncode, run.stdout) == (0, "loaded\n")


@pytest.mark.large
def test_the_same_ids_where_every_kernel_is_compiled_anew(installed, ids):
    run = python(installed, *DECODE, HOME="/dev/null/gone")
    assert generated(run) == ids and LINE.fullmatch(run.stderr), run.stderr


def test_the_plan_counts_what_compiling_takes(installed):
    "115 MB more, where kernels cannot be kept: the plan says what they are for."
    run = python(installed, "-m", "k3lib", "plan", MODEL, "--ram", "1GB", HOME="/dev/null/gone")
    assert re.search(r"compiling kernels, which no folder keeps +115\.0 MB", run.stdout), run.stderr


# A folder that fails

def test_damaged_entries_are_replaced(installed, kept, ids, tmp_path):
    folder = tmp_path / "kernels"
    shutil.copytree(kept, folder)
    damages = {
        "router._route": lambda path: path.write_bytes(b""),
        "residual._weighted_sum": lambda path: path.write_bytes(path.read_bytes()[:100]),
        "moe._situ_glu": lambda path: path.write_bytes(bytes(path.stat().st_size)),
        "moe._weighted_sum": lambda path: path.chmod(0),
        "kda._l2norm": lambda path: (path.unlink(), path.mkdir()),
        "residual._depth_weights": lambda path: path.unlink(),
    }
    damaged = {path: damage for kernel, damage in damages.items() for path in entries(folder, kernel)}
    for path, damage in damaged.items():
        damage(path)
    assert generated(python(installed, *DECODE, NUMBA_CACHE_DIR=str(folder))) == ids
    for kernel in damages:  # a file of another version of the kernel stays as it is
        assert any(path.is_file() and path.stat().st_size > 1000 and path.read_bytes().strip(b"\0")
                   for path in entries(folder, kernel)), kernel
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    run = python(installed, *DECODE, NUMBA_CACHE_DIR=str(folder))
    assert generated(run) == ids and run.stderr == "" and "compiling" not in run.stdout
    assert written == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_full_device_costs_time_and_is_named(installed, kept, ids, tmp_path):
    "A limit on the size of files stands for the device: no file of more than a kilobyte can be written."
    resource = pytest.importorskip("resource")
    folder = tmp_path / "kernels"
    shutil.copytree(kept, folder)
    for path in entries(folder, "router._route"):
        path.unlink()
    before = sorted(path.name for path in folder.rglob("*"))
    run = python(installed, *DECODE, NUMBA_CACHE_DIR=str(folder),
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)))
    assert generated(run) == ids and LINE.fullmatch(run.stderr) and str(folder) in run.stderr, run.stderr
    assert sorted(path.name for path in folder.rglob("*")) == before, "something half-written was left"


RELATIVE = f"""
import os, k3lib
model = k3lib.load({str(MODEL)!r}, "1GB")
os.chdir("elsewhere")
model.prefill([5, 9, 17])
print("done")
"""


def test_a_relative_folder_is_the_one_where_the_process_began(installed, kept, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(kept, tmp_path / "kernels")
    run = python(installed, "-c", RELATIVE, cwd=tmp_path, NUMBA_CACHE_DIR="kernels")
    assert (run.returncode, run.stdout, run.stderr) == (0, "done\n", "")
    assert list((tmp_path / "elsewhere").iterdir()) == [], "it looked for kernels here, and compiled them anew"


@pytest.mark.skipif(sys.platform == "win32", reason="a current folder cannot be removed here")
def test_a_current_folder_that_was_removed_is_named(installed, tmp_path):
    "numba imports the package `coverage` where that is installed, and its import asks for the current folder."
    run = python(installed, *DECODE, cwd=tmp_path, preexec_fn=tmp_path.rmdir)
    lines = run.stderr.splitlines()
    assert run.returncode == 0 or len(lines) == 1 and "the current folder has been removed" in lines[0], run.stderr


def test_a_source_that_cannot_be_read_stops_nothing(installed, tmp_path):
    "Editors leave links to nothing beside a file that is open, with its ending."
    shutil.copytree(installed, tmp_path / "copy")
    strays = [tmp_path / "copy" / "k3lib" / name for name in (".#plan.py", "folder.py", "unreadable.py")]
    strays[0].symlink_to("user@host.1234:5678")
    strays[1].mkdir()
    strays[2].write_text("")
    strays[2].chmod(0)
    run = python(tmp_path / "copy", "-m", "k3lib", "plan", MODEL, "--ram", "1GB", HOME="/dev/null/gone")
    assert run.returncode == 0, run.stderr
