"""The budget is a promise, measured in processes of their own: the same bytes at every budget, no more memory than it
says, and a refusal that names one that is large enough."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from common import MODEL
from small import rewritten

import k3lib
from k3lib import cli, disk, memory, system
from k3lib.checkpoint import Checkpoint
from k3lib.fileio import UsageError
from k3lib.header import header_bytes
from k3lib.synth import synth

resource = pytest.importorskip("resource")
pytestmark = pytest.mark.skipif(system.peak_bytes() is None, reason="this system does not tell a process its peak")
TWO = {**os.environ, "NUMBA_NUM_THREADS": "2"}  # also where there is one core, and no more threads where there are many


class Run:
    "One `k3 decode` in a process of its own: its logits as bytes, its report, and what it said."

    def __init__(self, model, folder, ram, *args, ids="5,9", tokens=2, **how):
        command = [sys.executable, "-m", "k3lib", "decode", model, "--ids", ids, "--max-new-tokens", tokens,
                   "--ram", ram, "--logits", folder / "l.npy", "--json", folder / "r.json", *args]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=TWO, **how)
        self.code, self.error = done.returncode, done.stderr
        if self.code == 0:
            self.logits = np.load(folder / "l.npy").tobytes()
            self.report = json.loads((folder / "r.json").read_text())
            self.plan = self.report["plan"]


def kept(run, ram):
    "The run stayed below its budget, and within 10% of its plan."
    assert run.code == 0, run.error
    peak, planned = run.report["peak_rss_bytes"], run.plan["total"]
    print(f"budget {ram}, planned {planned / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB")
    assert planned <= memory.parse_size(ram), f"the plan of {planned} bytes exceeds the budget {ram}"
    assert peak <= memory.parse_size(ram), f"peak of {peak} bytes, the budget is {ram}"
    assert 0.9 * planned <= peak <= 1.1 * planned, f"peak of {peak} bytes, planned were {planned}"


def floor(model, folder, *args):
    "The budget that the refusal of a smaller one names."
    run = Run(model, folder, "100MB", *args)
    assert run.code == 2, run.error
    assert len(run.error.strip().splitlines()) == 1, run.error
    return re.search(r"is .+ short: .* needs at least (\d+) MB$", run.error.strip())[1] + "MB"


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    """Every kernel compiled and cached, streamed and resident: a process that compiles takes more memory.

    Returns the smallest budget of the embedded model.
    """
    folder = tmp_path_factory.mktemp("compiled")
    least = floor(MODEL, folder)
    for ram in least, "4GB":
        assert Run(MODEL, folder, ram).code == 0
    return least


@pytest.fixture(scope="module")
def slice_(tmp_path_factory, everything):
    """Five layers of full width, 64 experts: 12.4 GB of tensors, 0.4 GB on disk. Layers 3 and 4 are MLA.

    A tenth of the vocabulary: the rest takes time and tests nothing else. With `--all` it is whole, 16.6 GB of tensors.
    """
    folder = tmp_path_factory.mktemp("slice")
    synth(folder / "model", "full", layers=5, experts=64, vocab=None if everything else 16_384)
    cli.pack_trunk(folder / "model", folder / "trunk")
    return folder


def only(ram):
    "For a child: no more private memory than `ram`. A thread's stack counts whole, used or not, so stacks are small."
    def limits():
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))
        resource.setrlimit(resource.RLIMIT_DATA, (memory.parse_size(ram),) * 2)
    return {"preexec_fn": limits}


@pytest.fixture(scope="module")
def lowest(slice_, tmp_path_factory):
    "The smallest budget for the slice, and its run where the system gives no more than that."
    folder = tmp_path_factory.mktemp("lowest")
    ram = floor(slice_ / "model", folder)
    assert Run(slice_ / "model", folder, "1GB").code == 0  # compiles the kernels that this shape is the first to need
    return ram, Run(slice_ / "model", folder, ram, **only(ram))


# The dial


def test_the_floor_where_the_system_gives_no_more(lowest):
    ram, run = lowest
    kept(run, ram)
    assert run.plan["expert_slots"] * run.plan["expert_slot_bytes"] < 10e6 and run.plan["pinned_bytes"] < 2e6


def test_the_same_bytes_at_every_budget(slice_, lowest, tmp_path, everything):
    model, trunk = slice_ / "model", ["--trunk", slice_ / "trunk"]
    lowest_packed = floor(model, tmp_path, *trunk)
    pinned = []
    runs = [(lowest_packed, 1, trunk), ("450MB", 1, []), ("600MB", 2, trunk), ("1GB", 2, []), ("2GB", 1, trunk)]
    for ram, threads, more in runs if everything else [runs[0], runs[3], runs[4]]:
        run = Run(model, tmp_path, ram, "--threads", threads, *more)
        kept(run, ram)
        assert run.logits == lowest[1].logits, f"{ram}, {threads} threads{', packed' * bool(more)}: other logits"
        assert run.report["trunk"] == (str(trunk[1]) if more else None)
        pinned.append(run.plan["pinned_bytes"])
    assert pinned == sorted(pinned) and pinned[0] < 2e6 and pinned[-1] > 1e9


def test_a_budget_below_the_floor_is_refused(slice_, lowest, tmp_path):
    run = Run(slice_ / "model", tmp_path, f"{int(lowest[0][:-2]) - 3}MB")
    assert run.code == 2 and "short" in run.error, run.error


def test_a_prompt_in_one_chunk_stays_within_its_budget(slice_, tmp_path):
    ids = ",".join(str(5 + 37 * i) for i in range(64))
    run = Run(slice_ / "model", tmp_path, "700MB", ids=ids, tokens=1)
    kept(run, "700MB")
    assert run.plan["chunk"] == 64


def test_more_than_the_model_needs(tmp_path):
    kept(Run(MODEL, tmp_path, "4GB"), "4GB")


# Layouts


def scattered(source, target, seed=0):
    "A copy whose tensors lie in as many files at random: no layer and no expert is in one piece. Returns `target`."
    shutil.copytree(source, target)
    (target / "model.safetensors.index.json").unlink()  # it would be right to say that tensors lie elsewhere now
    with Checkpoint(source) as ckpt:
        names = list(ckpt.names())
        names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
        for i, file in enumerate(ckpt.files):
            mine = names[i::len(ckpt.files)]
            (target / Path(file).name).write_bytes(header_bytes((name, *ckpt.extent(name)[3:]) for name in mine)
                                                   + b"".join(ckpt.raw(name).tobytes() for name in mine))
    return target


def test_other_layouts_stream_to_the_same_bytes(tmp_path):
    synth(tmp_path / "m", "oracle", seed=11)
    rewritten(tmp_path / "m", tmp_path / "shuffled", seed=3)
    scattered(tmp_path / "m", tmp_path / "scattered")
    ram, broken = floor(tmp_path / "m", tmp_path), {}
    first = Run(tmp_path / "m", tmp_path, ram, ids="5,9,17", tokens=4)
    for name in "shuffled", "scattered":
        with Checkpoint(tmp_path / name) as ckpt:
            broken[name] = ckpt.contiguity()
        run = Run(tmp_path / name, tmp_path, ram, ids="5,9,17", tokens=4)
        kept(run, ram)
        assert run.plan["pinned_bytes"] < 0.5 * run.plan["trunk_bytes"], "nothing streamed"
        assert run.logits == first.logits, f"{name}: other logits"
    assert len(broken["shuffled"].broken_layers) > 5 and len(broken["scattered"].broken_layers) == 13
    assert len(broken["scattered"].broken_experts) > 100


# Time and length

GROWTH = """
import sys, k3lib
from k3lib.system import resident_bytes
model, token, seen = k3lib.load(sys.argv[1], sys.argv[2], context=220), 5, []
for i in range(220):
    token = int(model.step(token).argmax())
    seen.append(resident_bytes())
print(seen[19], seen[-1])
"""


def test_memory_does_not_grow_with_tokens(compiled):
    ram = memory.parse_size(compiled) + 1_000_000
    done = subprocess.run([sys.executable, "-c", GROWTH, MODEL, str(ram)], capture_output=True, text=True, check=True,
                          env=TWO)
    early, late = map(int, done.stdout.split())
    assert late - early < 10_000_000, f"{(late - early) / 200 / 1000:.0f} kB more memory a token, over 200 tokens"


def test_a_context_that_does_not_fit_is_refused_before_the_first_read(slice_, tmp_path, monkeypatch):
    monkeypatch.setattr(disk.Files, "__init__", lambda *_: pytest.fail("a file was opened for reading"))
    with pytest.raises(UsageError, match="1000000 positions needs at least"):
        k3lib.load(slice_ / "model", ram="2GB", context=1_000_000)
    run = Run(slice_ / "model", tmp_path, "2GB", tokens=1_000_000)
    assert run.code == 2 and "1000002 positions needs at least" in run.error and "generated" not in run.error


FULL = """
import sys, k3lib
model = k3lib.load(sys.argv[1], sys.argv[2], context=4096)
for state in model.sequence.layers:
    if not isinstance(state, tuple):  # a KV cache, as it is after so many tokens
        state[:] = 0.01
model.sequence.position = 4094
model.prefill([5, 9])
print(model.report.peak_rss_bytes, model.plan.total)
"""


def test_a_step_at_4096_positions_stays_within_its_plan(slice_, tmp_path):
    run = subprocess.run([sys.executable, "-c", FULL, slice_ / "model", "400MB"], capture_output=True, text=True,
                         env=TWO)
    assert run.returncode == 0, run.stderr
    peak, planned = map(int, run.stdout.split())
    within_plan = peak <= 400_000_000 and 0.9 * planned <= peak <= 1.1 * planned
    assert within_plan, f"peak of {peak} bytes, planned were {planned}"
