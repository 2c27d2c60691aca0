"""Open files, threads and addresses are planned for like memory: the same ids, or one line before the first weight.

A limit is set for a process of its own. Whatever it is, the run ends with the ids that it has without a limit, or with
one line that says what is missing. It never takes a limit for damage.
"""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import k3lib

resource = pytest.importorskip("resource")
PACKAGE = Path(k3lib.__file__).parent
MODEL = Path(__file__).resolve().parents[1] / "fixtures" / "oracle13" / "model"
MB = 10**6
DECODE = "decode", MODEL, "--ids", "5,9,17", "--max-new-tokens", "3", "--quiet", "--ram", "1GB"


def k3(*args, code=None, preexec_fn=None, **env):
    "Run `k3` with these arguments, through `code` if there is any, where preexec_fn() sets limits."
    command = ["-m", "k3lib"] if code is None else ["-c", code]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "NUMBA_NUM_THREADS": "2", **env}
    return subprocess.run([sys.executable, *command, *map(str, args)], env=env, cwd=PACKAGE.parent, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, preexec_fn=preexec_fn)


def limit(*names, **limits):
    "A preexec_fn that sets {RLIMIT_name: (soft, hard)}, and nothing for None."
    def apply():
        for name, values in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), values)
    return apply


@pytest.fixture(scope="module")
def ids():
    "The text without a limit. Kernels are compiled and kept by then."
    run = k3(*DECODE)
    assert run.returncode == 0, run.stderr
    return generated(run)


def generated(run):
    assert run.stdout
    return run.stdout


def same_or_refused(run, ids, option):
    "Whether the run gave the text. If not, it has said in one line which `ulimit` would let it."
    if run.returncode == 0:
        assert generated(run) == ids and run.stderr == ""
        return True
    assert run.returncode == 2 and len(run.stderr.splitlines()) == 1, (run.returncode, run.stderr)
    assert re.match(rf"k3 decode: .*`ulimit {option}`? (is at least )?", run.stderr), run.stderr
    assert run.stdout == ""
    return False


# Open files

@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    "The packed trunk of the embedded model: 14 files beside the 14 of the checkpoint."
    folder = tmp_path_factory.mktemp("packed") / "trunk"
    assert k3("pack", MODEL, folder).returncode == 0
    return folder


def test_too_few_open_files_are_refused_before_the_first_read(ids, trunk):
    "As `ulimit -n 256` for 96 files and a packed trunk of 94: every limit on the way is refused in words."
    runs = {n: k3(*DECODE, "--trunk", trunk, preexec_fn=limit(NOFILE=(n, n))) for n in (12, 40, 64)}
    passed = [same_or_refused(run, ids, "-n") for run in runs.values()]
    assert passed == [False, False, False]
    for n, run in runs.items():
        named = int(re.search(r"`ulimit -n` is at least (\d+)", run.stderr)[1])
        assert n < named <= 160
    enough = k3(*DECODE, "--trunk", trunk, preexec_fn=limit(NOFILE=(named, named)))
    assert same_or_refused(enough, ids, "-n"), "the number that the last refusal named"


def test_soft_limits_are_raised(ids, trunk):
    soft = limit(NOFILE=(16, 500), AS=(600 * MB, resource.RLIM_INFINITY), DATA=(150 * MB, resource.RLIM_INFINITY))
    assert same_or_refused(k3(*DECODE, "--trunk", trunk, preexec_fn=soft), ids, "-n")


@pytest.mark.parametrize("command", ["census", "verify", pytest.param("plan", marks=pytest.mark.large)])
def test_no_command_takes_the_limit_for_damage(command):
    run = k3(command, MODEL, preexec_fn=limit(NOFILE=(12, 12)))
    assert run.returncode in (1, 2) and len(run.stderr.splitlines()) == 1, (run.returncode, run.stderr)
    assert "ulimit -n" in run.stderr or "Too many open files" in run.stderr, run.stderr


# Threads

FEW = """
import _thread, sys, threading
from k3lib.cli import main
start, most = _thread.start_new_thread, int(sys.argv.pop(1))
def few(*args, **more):
    if len(sys._current_frames()) >= most:
        raise RuntimeError("can't start new thread")
    return start(*args, **more)
_thread.start_new_thread = threading._start_new_thread = few
sys.exit(main(sys.argv[1:]))
"""


def test_too_few_threads_are_refused_before_the_first_read(ids):
    "The system gives this process no more than `most` threads, as a limit of its user or of a container would."
    passed = [same_or_refused(k3(most, *DECODE, code=FEW), ids, "-u") for most in (6, 12)]
    assert passed == [False, True]


@pytest.mark.parametrize("command", [
    ("plan", MODEL, "--measure"), ("verify", MODEL), ("synth", "new", "--preset", "oracle"), ("pack", MODEL, "new")])
def test_no_command_leaves_anything_where_no_thread_can_start(command, tmp_path):
    run = k3(1, *(tmp_path / word if word == "new" else word for word in command), code=FEW)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1 + (command[0] == "synth")), run.stderr
    assert "but this process can start 0 more: run it where `ulimit -u`" in run.stderr and not list(tmp_path.iterdir())


ONE = """
import os, sys
from k3lib.__main__ import run
run()
print("threads:", len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="this system does not list threads")
def test_no_thread_is_started_for_products_that_nobody_needs():
    "numpy's library starts one a core when it is loaded, and ends the process by SIGINT where it may not."
    assert k3("census", MODEL, code=ONE).stdout.splitlines()[-1] == "threads: 1"


# Addresses

def test_too_few_addresses_end_in_words(ids):
    """A limit on addresses (`ulimit -v`): refused before the first weight, or the same ids.

    With the lowest one, the libraries cannot be loaded: one line, too, and no traceback.
    """
    runs = {n: k3(*DECODE, preexec_fn=limit(AS=(n * MB, n * MB))) for n in (300, 500, 800)}
    assert runs[300].returncode == 2 and len(runs[300].stderr.splitlines()) == 1, runs[300].stderr
    assert runs[300].stderr.endswith("`ulimit -v` is 292968, which may be too little\n"), runs[300].stderr
    passed = [same_or_refused(run, ids, "-v") for n, run in runs.items() if n > 300]
    assert passed == [False, False]
    named = int(re.search(r"`ulimit -v` is at least (\d+)", runs[800].stderr)[1]) * 1024
    assert same_or_refused(k3(*DECODE, preexec_fn=limit(AS=(named + 5 * MB,) * 2)), ids, "-v")


def test_too_little_private_memory_ends_in_words(ids):
    runs = [k3(*DECODE, preexec_fn=limit(DATA=(n * MB, n * MB))) for n in (160, 500)]
    assert [same_or_refused(run, ids, "-d") for run in runs] == [False, True]


NO_MEMORY = """
import sys
from k3lib import cli, config
def none(*args, **more):
    raise MemoryError
cli.read_config = config.read_config = none
sys.exit(cli.main(sys.argv[1:]))
"""


def test_no_memory_is_said_in_words():
    run = k3("census", MODEL, code=NO_MEMORY)
    assert run.returncode == 1 and re.fullmatch(r"k3 census: MemoryError: \w.+\n", run.stderr), run.stderr


# Files that may not grow

OUTPUTS = {
    "decode": (*DECODE, "--logits"), "report": (*DECODE, "--json"), "trace": ("trace", *DECODE[1:], "--out"),
    "census": ("census", MODEL, "--json"), "manifest": ("verify", MODEL, "--write-manifest"),
    "synth": ("synth", "--preset", "oracle"), "pack": ("pack", MODEL),
}


SOONEST = "decode", "manifest", "synth"


@pytest.mark.parametrize("output", [*SOONEST, *(pytest.param(output, marks=pytest.mark.large)
                                                for output in OUTPUTS if output not in SOONEST)])
def test_an_output_that_may_not_grow_is_named_and_leaves_nothing(ids, tmp_path, output):
    "`ulimit -f`, as a full disk: the line names the file, and nothing half-written stays behind."
    run = k3(*OUTPUTS[output], tmp_path / "out", preexec_fn=limit(FSIZE=(300, 300)))
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1, (run.returncode, run.stderr)
    assert str(tmp_path) in run.stderr and "File too large" in run.stderr, run.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("command", [
    ("census", MODEL), ("verify", MODEL), [word for word in DECODE if word != "--quiet"]], ids=lambda words: words[0])
def test_what_cannot_be_saved_is_shown(command, tmp_path):
    shown = [k3(*command, *more, preexec_fn=limit(FSIZE=(300, 300)))
             for more in ([], ["--json", tmp_path / "r.json"])]
    words = {"census": "parameters", "verify": "damaged", "decode": "peak memory"}[command[0]]
    assert [run.returncode for run in shown] == [0, 1], shown[1].stderr
    assert all(words in run.stdout + run.stderr for run in shown) and "File too large" in shown[1].stderr


def test_damage_is_told_by_the_exit_code_where_nothing_can_be_saved(tmp_path):
    shutil.copytree(MODEL, tmp_path / "m")
    shard = min((tmp_path / "m").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    run = k3("verify", tmp_path / "m", "--json", tmp_path / "r.json", preexec_fn=limit(FSIZE=(300, 300)))
    assert run.returncode == 4 and "1 damaged" in run.stderr and "File too large" in run.stderr, run.stderr


SAVE = f"""
import sys, k3lib
model = k3lib.load({str(MODEL)!r}, "1GB")
model.prefill([5, 9])
try:
    model.save_state(sys.argv[1])
except OSError as error:
    print(error)
"""


@pytest.mark.large
def test_a_state_that_may_not_grow_is_named_and_leaves_nothing(ids, tmp_path):
    run = k3(tmp_path / "state", code=SAVE, preexec_fn=limit(FSIZE=(300, 300)))
    assert str(tmp_path) in run.stdout and "File too large" in run.stdout and run.stderr == ""
    assert list(tmp_path.iterdir()) == []


# The first run

@pytest.mark.large
def test_a_first_run_stays_within_its_plan(ids, tmp_path):
    "Nothing is compiled yet: what compiling takes is in another process, or in the plan."
    shutil.copytree(PACKAGE, tmp_path / "k3lib", ignore=shutil.ignore_patterns("__pycache__"))
    for name, folder in ("kept", tmp_path / "kernels"), ("not kept", "/dev/null/kernels"):
        run = k3(*DECODE, "--json", tmp_path / "r.json", PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(folder))
        report = json.loads((tmp_path / "r.json").read_bytes())
        assert run.returncode == 0 and generated(run) == ids, run.stderr
        peak, planned = report["peak_rss_bytes"], report["plan"]["total"]
        # a run that streams nothing compiles no kernels of streaming
        assert 0.85 * planned <= peak <= planned, f"{name}: peak of {peak} bytes, planned were {planned}"
    entries = sorted(path.name for path in (tmp_path / "kernels").iterdir())
    refused = k3(*DECODE[:-1], "1MB", PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "kernels"))
    least = re.search(r"at least (\d+) MB", refused.stderr)[1]
    run = k3(*DECODE[:-1], f"{least}MB", PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "kernels"))
    assert generated(run) == ids
    assert sorted(path.name for path in (tmp_path / "kernels").iterdir()) == entries, "streaming compiled something"
