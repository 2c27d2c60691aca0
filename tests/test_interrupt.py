"""Ctrl-C, SIGTERM, fork and company: real processes and real signals, at moments drawn from a seed.

Nothing hangs, nothing half-written stays.
"""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from common import EXPECTED, MODEL, PROMPT, ROOT, k3_process, token_line

SOON = 2.0  # seconds from signal to end
posix = pytest.mark.skipif(os.name != "posix", reason="signals and process groups are POSIX")


def start(*command, script=None, module="k3lib"):
    words = [sys.executable, *(("-c", script) if script else ("-m", module)), *map(str, command)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            start_new_session=True)


def stopped(run, number, may_be_done=False):
    """Send the signal. The process ends soon, with its group, the right code, and one line if k3 listened. That line.

    `may_be_done`: the command may have done its work, with exit code 0, when the signal comes.
    """
    began = time.monotonic()
    run.send_signal(number)
    output, error = run.communicate(timeout=60)
    took = time.monotonic() - began
    assert took < SOON, f"{took:.1f} s after signal {number}"
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)
    allowed = (128 + number, -number, 0) if may_be_done else (128 + number, -number)
    assert run.returncode in allowed, (run.returncode, error)
    if run.returncode == 128 + number:
        assert "Traceback" not in error and '"event": "end"' not in output, error
    return error


BEGUN = """
import runpy
print("begun", flush=True)
runpy.run_module("k3lib", run_name="__main__", alter_sys=True)
"""


@posix
def test_any_moment_of_a_decode(tmp_path, tmp_path_factory, monkeypatch):
    """The moments lie in importing, loading, prefill and steps: a start takes a second or some.

    They are counted from where Python itself has begun. An interrupt before that is a fatal error of Python.
    """
    modules = tmp_path_factory.mktemp("modules")
    (modules / "begun.py").write_text(BEGUN)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    rng = np.random.default_rng(5)
    for number, moment in zip([signal.SIGINT, signal.SIGTERM] * 3, np.sort(rng.uniform(0, 2.5, 6))):
        run = start("decode", MODEL, "--ids", PROMPT, "--max-new-tokens", 5000, "--quiet", "--json",
                    tmp_path / "r.json", "--logits", tmp_path / "l.npy", module="begun")
        assert run.stdout.readline() == "begun\n"
        time.sleep(moment)
        error = stopped(run, number)
        if run.returncode > 0:
            assert error.startswith(f"k3 decode: {'interrupted' if number == signal.SIGINT else 'terminated'}"), error
        made = sorted(path.name for path in tmp_path.iterdir())
        assert made in ([], ["r.json"], ["l.npy", "r.json"]), made  # a step is counted before its logits are saved
        assert made == [path.name for path in sorted(tmp_path.iterdir()) if f"{path} holds" in error], error
        if made:
            report = json.loads((tmp_path / "r.json").read_text())
            rows = np.load(tmp_path / "l.npy").argmax(1).tolist() if made[0] == "l.npy" else []
            assert not report["finished"] and report["ids"][:len(rows)] == rows and len(report["ids"]) <= len(rows) + 1
        for path in tmp_path.iterdir():
            path.unlink()


MOMENTS = """
import os, signal, sys
from k3lib import cli

done = False

def census(args):
    global done
    done = True

def run_with_signal_at(moment):
    "The exit code; 98 if a signal that came before the command had run is lost, 99 if there are fewer moments."
    events, listening, early = 0, False, False

    def at_call_or_return(frame, event, _):
        nonlocal events, listening, early
        listening |= frame.f_code is cli._stopping.__wrapped__.__code__
        events += listening and event in ("call", "return")
        if events > moment:
            sys.setprofile(None)
            early = not done
            signal.raise_signal(signal.SIGTERM)

    sys.setprofile(at_call_or_return)
    code = cli.main(["census", "nowhere"])
    sys.setprofile(None)
    return 99 if events <= moment else 98 if early and code == 0 else code

cli.COMMANDS["census"] = census
moment, status = 0, None
while status != 99:
    child = os.fork()
    if child == 0:
        code = 97  # what main raises
        try:
            code = run_with_signal_at(moment)
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status)
    moment += 1
"""


@posix
def test_any_moment_of_beginning_and_ending_to_listen():
    """SIGTERM ends the process itself while k3 does not listen, and gives code 143 until the command has run.

    Then the command's own code stands. Each moment, at which Python calls or returns from a function, has a child of
    its own.
    """
    run = subprocess.run([sys.executable, "-c", MOMENTS], capture_output=True, text=True, cwd=ROOT, timeout=100)
    *found, last = map(int, run.stdout.split())
    assert set(found) == {-signal.SIGTERM, 143, 0} and last == 99, (found, run.stderr)
    assert found[0] == found[-1] == -signal.SIGTERM
    assert run.stderr == "k3 census: terminated\n" * found.count(143)


DURING = """
import signal, sys
from k3lib import __main__, cli

def read_config(path):
    exec("import signal; signal.raise_signal(signal.Signals[path])", {"path": path})

cli.read_config = read_config
sys.exit(__main__.run())
"""


@posix
@pytest.mark.parametrize("number, word", [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_during_code_that_is_run_from_a_string(tmp_path, number, word):
    "Modules make their named tuples and data classes from such code. Python treats Ctrl-C in it in a way of its own."
    (tmp_path / "during.py").write_text(DURING)
    run = subprocess.run([sys.executable, "-m", "during", "plan", number.name], capture_output=True, text=True,
                         timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert (run.returncode, run.stderr) == (128 + number, f"k3 plan: {word}\n")


@posix
@pytest.mark.parametrize("number, word", [
    (signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "hung up"),
    (signal.SIGXCPU, "out of processor time")] if sys.platform != "win32" else [])
def test_the_tokens_so_far_are_named(number, word):
    run = start("decode", MODEL, "--ids", PROMPT, "--max-new-tokens", 5000, "--quiet", "--jsonl", "-")
    while not run.stdout.readline().startswith(token_line(3)):
        assert run.poll() is None, run.stderr.read()
    error = stopped(run, number)
    assert run.returncode == 128 + number and error.count("\n") == 1
    assert error.startswith(f"k3 decode: {word} after ") and " of 5000 tokens: 468,342,411" in error, error


@posix
def test_pack_and_synth(tmp_path):
    for command in (["pack", MODEL, tmp_path / "t"], ["synth", tmp_path / "m", "--preset", "slice"]):
        run, part = start(*command), []
        while run.poll() is None and not part:
            part = [*tmp_path.glob("t/*.part"), *tmp_path.glob(".m.*.part")]
        error = stopped(run, signal.SIGTERM, may_be_done=True)
        assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob(".m*")), error
        assert run.returncode == 0 or not (tmp_path / "m").exists()
    done = k3_process("pack", MODEL, tmp_path / "t", cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr


LONG = """
import contextlib, hashlib, sys
from k3lib import cli
def compiled(path):
    with contextlib.suppress(KeyboardInterrupt):  # the signal may come before the product has begun
        print("now", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
cli.read_config = compiled
sys.exit(cli.main(["plan", "nowhere"]))
"""


@posix
def test_code_that_never_comes_back_to_python_is_ended():
    run = start(script=LONG)
    assert run.stdout.readline() == "now\n"
    error = stopped(run, signal.SIGTERM)
    assert run.returncode == 143
    assert error == "k3 plan: terminated in the middle of a read or a product that did not end\n", error


STUCK = """
import contextlib, hashlib, sys
from k3lib import __main__, display

def stuck(self, text, end="\\n", show=display.Display.__call__):
    with contextlib.suppress(KeyboardInterrupt):  # the signal may come before the product has begun
        show(self, text, end)
    if text.startswith('{"event": "token", "n": 3, '):
        with contextlib.suppress(KeyboardInterrupt):
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

display.Display.__call__ = stuck
sys.exit(__main__.run())
"""


@posix
def test_what_was_made_is_saved_although_the_main_thread_never_comes_back(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    out = tmp_path / "out"
    out.mkdir()
    run = subprocess.Popen([sys.executable, tmp_path / "stuck.py", "decode", MODEL, "--ids", PROMPT, "--max-new-tokens",
                            "8", "--quiet", "--jsonl", "-", "--logits", out / "l.npy", "--json", out / "r.json"],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    while not run.stdout.readline().startswith(token_line(3)):
        assert run.poll() is None, run.stderr.read()
    error = stopped(run, signal.SIGTERM)
    words = "terminated in the middle of a read or a product that did not end"
    assert error == f"k3 decode: {words}; {out / 'l.npy'} holds 3 rows; {out / 'r.json'} holds the report\n"
    assert sorted(path.name for path in out.iterdir()) == ["l.npy", "r.json"]
    assert np.load(out / "l.npy").shape == (3, 512)
    assert json.loads((out / "r.json").read_text())["ids"] == EXPECTED["generated_ids"][:3]


# Two at once


def test_two_decodes_of_one_checkpoint():
    runs = [start("decode", MODEL, "--ids", PROMPT, "--max-new-tokens", 8) for _ in range(2)]
    for run in runs:
        output, error = run.communicate(timeout=120)
        assert run.returncode == 0, error
        assert "generated ids: " + ",".join(map(str, EXPECTED["generated_ids"][:8])) + "\n" in error


FORKS = """
import multiprocessing, os, sys
import k3lib
from k3lib import parallel

parallel.MIN_PARALLEL_MACS = 0  # a helper in every product

def run():
    model = k3lib.load(sys.argv[1], "1GB", context=8)
    try:
        return list(model.generate([304, 206], 3))
    finally:
        model.close()

def in_fork(call):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    status = os.waitpid(child, 0)[1]
    return os.read(reader, 1000).decode(), status

def spawned(queue):
    queue.put(run())

if __name__ == "__main__":
    print(in_fork(run))
    alone = run()
    model = k3lib.load(sys.argv[1], "1GB", context=8)
    model.step(1)
    print(in_fork(lambda: model.step(1)))
    print(in_fork(model.close))
    print(in_fork(run))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=spawned, args=(queue,))
    child.start()
    print(queue.get(), child.join())
    print(alone, run())
    model.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_fork_and_spawn(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    run = subprocess.run([sys.executable, tmp_path / "forks.py", MODEL], capture_output=True, text=True, timeout=120,
                         env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    early, theirs, closed, late, spawned, alone = run.stdout.splitlines()
    ids = alone.split("] ")[0] + "]"
    assert early == str((ids, 0)) and alone == f"{ids} {ids}" and spawned == f"{ids} None"
    assert "EngineError: this model belongs to process" in theirs and closed == str(("None", 0))
    assert late == str((ids, 0))  # threads do not survive a fork: a child's begin anew


KERNEL = """
import subprocess, sys
import k3lib
p = subprocess.Popen([sys.executable, "-m", "k3lib", "decode", {model!r}, "--ids", "1,2", "--max-new-tokens", "5000"],
                     stdout=subprocess.PIPE)
with open({pid!r}, "w") as file:
    file.write(str(p.pid))
m = k3lib.load({model!r}, "1GB", context=5000)
for _ in range(4000):
    m.step(1)
"""


def state_of(pid):
    "Linux's letter for what a process does: Z if it has ended and nobody has waited for it. None if there is no such."
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


def test_a_notebook_kernel_restarted_in_the_middle_leaves_no_process(tmp_path):
    from jupyter_client.manager import start_new_kernel
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(ROOT))
    try:
        client.execute(KERNEL.format(model=str(MODEL), pid=str(tmp_path / "pid")))
        end = time.monotonic() + 60
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert time.monotonic() < end
            time.sleep(0.05)
        child = int((tmp_path / "pid").read_text())
        time.sleep(2)
        manager.restart_kernel(now=True)
        while state_of(child) not in (None, "Z"):
            assert time.monotonic() < end, "the decode of the old kernel goes on"
            time.sleep(0.05)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
