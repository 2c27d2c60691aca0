"A model that nobody refers to any more is gone: its readers, its descriptors and its memory; without close()."
import code
import contextlib
import gc
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import numpy as np
import pytest
from interrupts import time_limit

import k3lib

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "fixtures" / "oracle13" / "model"
EXPECTED = json.loads((MODEL.parent / "expected.json").read_text())
IDS, BYTES = EXPECTED["prompt_ids"], 6_612_160  # of all tensors of the embedded model


@pytest.fixture(autouse=True)
def bounded():
    with time_limit(100):
        yield


def least():
    "The smallest budget of the embedded model: it grows by what this process holds."
    try:
        k3lib.load(MODEL, 1, context=32)
    except k3lib.PlanError as error:
        return error.least


@pytest.fixture(scope="module", autouse=True)
def warm():
    "Compiled kernels, and the threads and descriptors that they need."
    with k3lib.load(MODEL, "1GB", context=32) as model:
        model.prefill(IDS)


@pytest.fixture
def counted():
    """counted() is what the models of this process have: (threads, descriptors).

    counted.when(expected) waits for it: readers of a dropped model end by themselves, a moment later.
    """
    def now():
        threads = sum(thread.name.startswith("k3-") for thread in threading.enumerate())
        return threads, len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0

    def when(expected, seconds=20):
        end = time.monotonic() + seconds
        while (found := now()) != expected and time.monotonic() < end:
            time.sleep(0.001)
        return found

    gc.collect()
    now.when = when
    return now


@pytest.fixture
def no_collector():
    "No garbage collection: reference counts alone free what goes."
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def smallest():
    "A budget at which the embedded model streams."
    return least() + 2_000_000


def test_four_models_one_after_another_leave_nothing(counted):
    before, held = counted(), least()
    for _ in range(4):
        m = k3lib.load(MODEL, "1GB", context=32)
        m.prefill([1])
        del m
        gc.collect()
    assert counted.when(before) == before
    assert least() - held < BYTES, "what was dropped counts as held"


def fails(model, folder):
    "A shard is cut off; the pass fails, and so does the next."
    path = sorted(folder.glob("*.safetensors"))[5]
    whole = path.read_bytes()
    os.truncate(path, 30_000)
    for _ in range(2):
        with pytest.raises(k3lib.CheckpointError):
            model.reset()
            for _ in range(3):  # blocks read before the damage may still be right
                model.prefill(IDS)
    path.write_bytes(whole)


def no_number(model, folder):
    "A number of the head that is none: the engine looks for it in the file."
    from k3lib.checkpoint import Checkpoint

    with Checkpoint(folder) as opened:
        head = opened.extent("language_model.lm_head.weight")
    with open(head.file, "r+b") as file:
        file.seek(head.offset)
        file.write(b"\xc0\x7f" * head.shape[1] * head.shape[0])
    with pytest.raises(k3lib.CheckpointError):
        for _ in range(2):
            model.reset()
            model.prefill(IDS)


def stopped(model, folder):
    def stop(L):
        if L == 5:
            raise KeyboardInterrupt

    model.on_layer = stop
    with pytest.raises(KeyboardInterrupt):
        model.prefill(IDS)


def refused(model, folder):
    with pytest.raises(k3lib.UsageError):
        model.prefill([10**9])


def half_generated(model, folder):
    generated = model.generate(IDS, 8)
    next(generated), next(generated)


def saved(model, folder):
    model.prefill(IDS)
    model.save_state(folder.parent / "state")
    model.load_state(folder.parent / "state")
    assert model.report.text()


@pytest.mark.parametrize("ram", ["1GB", "least"])
@pytest.mark.parametrize("use", [lambda *_: None, lambda model, _: model.prefill(IDS), refused, half_generated, saved,
                                 stopped, fails, no_number])
def test_the_last_reference_frees_a_model_whatever_it_has_done(tmp_path, counted, no_collector, use, ram):
    "At once, without the garbage collector: nothing that the model owns refers to it, also not the error of a pass."
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    before = counted()
    model = k3lib.load(folder, smallest() if ram == "least" else ram, context=32)
    parts = [weakref.ref(part) for part in (model, model.trunk, model.experts, model.files, model.source.checkpoint)]
    use(model, folder)
    del model
    assert counted.when(before) == before
    assert [part() for part in parts] == [None] * len(parts)


def test_a_suspended_generator_keeps_its_model_and_frees_it(counted, no_collector):
    before = counted()
    model = k3lib.load(MODEL, "1GB", context=32)
    generated, alive = model.generate(IDS, 4), weakref.ref(model)
    first = next(generated)
    del model
    assert [first, *generated] == EXPECTED["generated_ids"][:4]
    del generated
    assert alive() is None and counted.when(before) == before


def test_a_model_is_dropped_while_another_thread_uses_it(counted):
    "Its pass ends as if nothing had happened."
    before, answers = counted(), []
    with k3lib.load(MODEL, "1GB", context=32) as model:
        expected = model.prefill(IDS).tobytes()
    for _ in range(3):
        model = k3lib.load(MODEL, smallest(), context=32)
        thread = threading.Thread(target=lambda model: answers.append(model.prefill(IDS).tobytes()), args=(model,))
        thread.start()
        del model
        thread.join()
    assert answers == [expected] * 3
    del thread
    assert counted.when(before) == before


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads go through preadv")
def test_a_model_is_dropped_while_its_readers_read(counted, monkeypatch, no_collector):
    "The read that is under way has its descriptor and its buffer. The reader whose read ends last frees them."
    before, real, inside, gate = counted(), os.preadv, threading.Event(), threading.Event()
    model = k3lib.load(MODEL, smallest(), context=32)
    model.prefill(IDS)

    def wait(fd, views, offset):
        if threading.current_thread().name.startswith("k3-"):
            inside.set()
            assert gate.wait(60)
            os.fstat(fd)  # EBADF if it is closed
        return real(fd, views, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", wait)
        model.trunk.begin()
        for pool, blocks in model.trunk._pools.values():
            pool.restart(blocks, cyclic=True)
        assert inside.wait(60)
        alive = weakref.ref(model.files)
        del model, pool
        assert alive() is not None, "the files are gone during a read"
        gate.set()
        assert counted.when(before) == before
    assert alive() is None


# A notebook

@pytest.fixture
def cell():
    "cell(source) runs a cell as an interactive session does, which keeps the last error. Returns what it has shown."
    session = code.InteractiveInterpreter()

    def run(source):
        shown = io.StringIO()
        with contextlib.redirect_stderr(shown):
            session.runsource(source, "<cell>", "exec")
        if shown.getvalue():  # as IPython does, which shows variables of the functions
            assert all(frame.f_locals is not None for frame, _ in traceback.walk_tb(sys.last_value.__traceback__))
        return shown.getvalue()

    last = {name: getattr(sys, name) for name in ("last_type", "last_value", "last_traceback") if hasattr(sys, name)}
    run(f"import k3lib\nMODEL = {str(MODEL)!r}")
    yield run
    for name in "last_type", "last_value", "last_traceback", "last_exc":
        if hasattr(sys, name):
            delattr(sys, name)
    for name, value in last.items():
        setattr(sys, name, value)


def test_a_cell_that_loads_a_model_runs_again(counted, cell):
    "Ten times: then there is one model, with the budget of the first."
    before = counted()
    load = "m = k3lib.load(MODEL, '1GB', context=32)\nm.prefill([1])"
    assert cell(load) == ""
    one, held = counted(), least()
    for _ in range(10):
        assert cell(load) == ""
    assert counted.when(one) == one
    assert least() - held < BYTES
    assert cell("del m") == "" and counted.when(before) == before


def test_the_last_error_of_a_session_keeps_no_model_past_the_next_load(counted, cell):
    "Its traceback holds the frames of the call that failed, and those hold the model."
    before = counted()
    for _ in range(3):
        assert "UsageError" in cell("m = k3lib.load(MODEL, '1GB', context=32)\nm.prefill([10**9])")
        assert cell("del m") == ""
        assert cell("k3lib.load(MODEL, '1GB', context=32).close()") == ""
        assert counted.when(before) == before


def test_a_model_in_a_cycle_of_references_is_freed_by_the_next_load(counted, no_collector):
    before = counted()

    def cyclic():
        model = k3lib.load(MODEL, "1GB", context=32)
        model.on_layer = lambda L: model.position
        model.prefill(IDS)

    for _ in range(2):
        cyclic()
    k3lib.load(MODEL, "1GB", context=32).close()
    assert counted.when(before) == before


def test_a_budget_that_an_open_model_leaves_too_small(counted):
    "The message names the models that are still open, and no others."
    with pytest.raises(k3lib.PlanError) as alone:
        k3lib.load(MODEL, 1)
    assert "still open" not in str(alone.value)
    with k3lib.load(MODEL, "1GB") as model:
        with pytest.raises(k3lib.PlanError) as refused:
            k3lib.load(MODEL, 1)
        assert f"models that are still open, {model.report.model}: close() them first" in str(refused.value)
    with pytest.raises(k3lib.PlanError) as alone:
        k3lib.load(MODEL, 1)
    assert "still open" not in str(alone.value)


# Other ends

def test_a_checkpoint_that_is_dropped_closes_its_files(counted, no_collector):
    before = counted()
    for _ in range(3):
        opened = k3lib.Checkpoint(MODEL)
        opened.raw("language_model.lm_head.weight")
        with pytest.raises(k3lib.CheckpointError):
            opened.raw("no such tensor")
        del opened
        assert counted() == before


def test_helping_threads_keep_no_array_alive(no_collector):
    from k3lib.matmul import ResidentMatrix

    matrix, x, out = (np.zeros(shape, np.float32) for shape in ((4096, 1024), (4, 1024), (4, 4096)))
    arrays = [weakref.ref(array) for array in (matrix, x, out)]
    for _ in range(3):
        ResidentMatrix(matrix).multiply(x, out, 2)
    del matrix, x, out
    end = time.monotonic() + 20
    while any(array() is not None for array in arrays) and time.monotonic() < end:
        time.sleep(0.001)
    assert [array() for array in arrays] == [None] * 3


ENDS = """
import sys, threading, time, k3lib
models = [k3lib.load(sys.argv[1], "1GB", context=32) for _ in range(2)]
models[0].prefill([1])
generated = models[1].generate([1], 5)
next(generated)
if "passes" in sys.argv:
    many = lambda: [models[0].reset() or models[0].prefill([1] * 20) for _ in range(1000)]
    threading.Thread(target=many, daemon=True).start()
    time.sleep(0.02)
"""


@pytest.mark.parametrize("more", [(), ("passes",)])
def test_a_process_ends_with_models_open(more):
    run = subprocess.run([sys.executable, "-X", "dev", "-W", "error", "-c", ENDS, str(MODEL), *more],
                         capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


FORKS = """
import os, sys, threading, time, k3lib
model = k3lib.load(sys.argv[1], "1GB", context=32)
expected = list(model.generate([1], 3))
child = os.fork()
del model
if child == 0:
    with k3lib.load(sys.argv[1], "1GB", context=32) as model:
        same = list(model.generate([1], 3)) == expected
    os._exit(0 if same and threading.active_count() == 1 else 1)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_parent_and_child_drop_the_model_that_was_loaded_before_the_fork():
    run = subprocess.run([sys.executable, "-c", FORKS, str(MODEL)], capture_output=True, text=True, cwd=ROOT)
    assert (run.returncode, run.stdout, run.stderr) == (0, "0\n", "")
