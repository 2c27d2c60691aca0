"""The floating-point contract on the whole model: chunks, threads, recomputation and a baseline CPU give the same bytes.

Each run is a process of its own, because numba fixes CPU and thread count when it starts.
"""
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[1] / "fixtures" / "oracle13" / "model"
RUN = """
import hashlib, sys
import numpy as np
import k3lib
from k3lib import mxfp4
mxfp4.WORTH = 0  # by all threads, however little it is
ids = [304, 206, 32, 407, 493, 375, 224, 286, 48, 367]
model = k3lib.load(sys.argv[1], threads=int(sys.argv[2]))
def digest(rows): return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()
for chunk in (1, 2, 3, 7, 10):
    model.reset()
    model.chunk = chunk
    print("chunks of", chunk, digest(model.forward(ids)))
model.reset()
first = model.forward(ids[:4])
print("4 then steps", digest(np.concatenate([first] + [model.step(i)[None] for i in ids[4:]])))
rows = []
for n in range(1, len(ids) + 1):
    model.reset()
    rows.append(model.prefill(ids[:n]))
print("recomputed", digest(np.stack(rows)))
"""


def digests(threads, **env):
    run = subprocess.run([sys.executable, "-c", RUN, str(MODEL), str(threads)], capture_output=True, text=True, env={**os.environ, **env})
    assert run.returncode == 0, run.stderr
    return dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())


@pytest.fixture(scope="module")
def reference():
    found = digests(1)
    assert len(found) == 7
    return found


def test_every_way_to_cut_a_prompt_gives_the_same_bytes(reference):
    assert len(set(reference.values())) == 1, reference


@pytest.mark.skipif(os.cpu_count() < 2, reason="one core: there is no second thread to compare")
def test_two_threads(reference):
    assert digests(2) == reference


def test_a_baseline_cpu(reference):
    "No FMA, no AVX, no byte shuffle: fused multiply-adds become library calls, the bits stay."
    assert digests(1, NUMBA_CPU_NAME="generic") == reference
