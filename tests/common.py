"What tests share: the embedded model, comparisons that name the place, budgets, the command, samples of large grids."
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import k3lib
from k3lib import engine
from k3lib.cli import main
from k3lib.plan import PlanError, make_plan

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures"
ORACLE = FIXTURES / "oracle13"
MODEL = ORACLE / "model"
EXPECTED = json.loads((ORACLE / "expected.json").read_text())
PROMPT = ",".join(map(str, EXPECTED["prompt_ids"]))

CONTROL_TOKENS = {  # of the release, by id
    163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>",
    163589: "<|sep|>", 163590: "[start_header_id]", 163591: "[end_header_id]", 163593: "[EOT]",
    163602: "<|media_begin|>", 163603: "<|media_content|>", 163604: "<|media_end|>", 163605: "<|media_pad|>",
    163649: "<osagent_mode>", 163838: "[UNK]", 163839: "[PAD]",
}

# of the largest magnitude: at least ten times what float32 differs from float64 (fixtures/ops/README.md)
TOLERANCE = 1e-5


# Comparisons

def distance(found, expected):
    "The largest difference, relative to the largest magnitude expected; infinity if it is not finite."
    expected = np.asarray(expected, np.float64)
    far = np.abs(found - expected).max() / np.abs(expected).max()
    return far if np.isfinite(far) else np.inf


def within(name, found, expected, allowed):
    "Every element of `found` is finite and differs from `expected` by `allowed` at most."
    expected = np.asarray(expected, np.float64)
    assert found.shape == expected.shape, f"{name}: shape {found.shape}, expected {expected.shape}"
    assert np.isfinite(found).all(), f"{name}: not finite first at {np.argwhere(~np.isfinite(found))[0]}"
    difference = np.abs(found - expected)
    where = np.unravel_index(difference.argmax(), difference.shape)
    assert difference.max() <= allowed, (
        f"{name}: largest difference {difference.max():.3g} at {where}, allowed {allowed:.3g}")


def close(name, found, expected, tolerance=TOLERANCE):
    "Every element of `found` is finite and differs from `expected` by at most `tolerance` of the largest magnitude."
    within(name, found, expected, tolerance * np.abs(expected).max())


def same(name, found, expected):
    "Both arrays have one dtype, one shape and the same bytes."
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (
        f"{name}: {found.dtype} {found.shape}, expected {expected.dtype} {expected.shape}")
    bits = np.dtype(f"u{found.itemsize}")
    different = np.argwhere(found.view(bits) != expected.view(bits))
    if len(different):
        at = tuple(map(int, different[0]))
        pytest.fail(f"{name}: {len(different)} of {found.size} elements differ, "
                    f"the first at {at}: {found[at]!r} and {expected[at]!r}")


def bf16(array):
    "float32 numbers cut to bfloat16: the upper halves of their bits, uint16."
    return (array.view(np.uint32) >> 16).astype(np.uint16)


def bytes_by_the_system():
    "A function: the bytes that read calls of this process have brought since now; None where the system does not tell."
    def rchar():
        with open("/proc/self/io") as file:
            return int(next(line for line in file if line.startswith("rchar")).split()[1])

    if not os.path.exists("/proc/self/io"):
        return lambda: None
    before = rchar()
    cost = rchar() - before  # of looking
    return lambda: rchar() - before - 2 * cost


def digest(*arrays):
    "sha256 of the arrays' bytes, one after another."
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def until(true, seconds=5):
    "Wait for true() to become true, and a little longer for what should not happen."
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)


# Budgets

def least(folder=MODEL, context=32):
    "The smallest budget in bytes for the model in `folder`, in this process, now."
    with pytest.raises(PlanError) as refused:
        k3lib.load(folder, 1, context=context)
    return refused.value.least


def load_with(experts, *args, **options):
    "k3lib.load(*args, **options) with the plan's layout of experts replaced by `experts`, or by experts(layout)."
    def changed(*args, **options):
        plan = make_plan(*args, **options)
        layout = experts(plan.layout.experts) if callable(experts) else experts
        return dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, experts=layout))

    with mock.patch.object(engine, "make_plan", changed):
        return k3lib.load(*args, **options)


# The command

def k3(*args):
    "Run `k3` with these arguments in this process; a CompletedProcess with returncode, stdout and stderr."
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stop:  # argparse
            code = stop.code
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def k3_process(*args, **options):
    "Run `k3` with these arguments in a process of its own: where the process is what is tested."
    return subprocess.run([sys.executable, "-m", "k3lib", *map(str, args)], capture_output=True, text=True, **options)


def token_line(n):
    "How the event of token number `n` begins."
    return f'{{"event": "token", "n": {n}, '


def refused(run, code, *words):
    "The run ended with `code` and one line on stderr that holds every word; no traceback, nothing decoded."
    assert run.returncode == code, run.stderr or run.stdout
    lines = run.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("k3 "), run.stderr
    assert "Traceback" not in run.stderr + run.stdout
    for word in words:
        assert str(word) in lines[0], f"{word!r} is not in {lines[0]!r}"
    assert "generated ids" not in run.stderr


# Large grids

def grid(cases, sampled):
    """The cases for pytest.mark.parametrize; those for which `sampled(number, case)` is false run only with `--all`.

    A sample is drawn by rule, never by chance, and the rule names the hard cases.
    """
    def large(case):
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.large)
    return [case if sampled(number, case) else large(case) for number, case in enumerate(cases)]


# Requests of experts

def recurring(reuse, steps, layers=30, k=8, experts=64, seed=0):
    "Steps of a trace, [(layer, ids)], in which a share `reuse` of each layer's `k` experts stays from step to step."
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(experts, k, replace=False) for _ in range(layers)]
    for _ in range(steps):
        for layer in range(layers):
            keep = chosen[layer][rng.random(k) < reuse]
            others = np.setdiff1d(np.arange(experts), keep)
            chosen[layer] = np.concatenate([keep, rng.choice(others, k - len(keep), replace=False)])
        yield [(layer, sorted(ids.tolist())) for layer, ids in enumerate(chosen)]
