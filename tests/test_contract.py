"""The floating-point contract: for any CPU and any number of threads, the bytes are those written down here.

contract.py computes all digests of a CPU in one process.
"""
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_functions
import test_matmul
from common import ROOT
from numba.core.registry import cpu_target

MODEL = "0e33c8adb6a79b6098051b71fdbc136bea025666aaa239efca7116cdc5819a70"  # of the logits of contract.IDS
# What is None here is compared with this CPU and one thread: numpy draws its numbers, and another system's numpy may
# draw others.
WRITTEN_DOWN = {
    "test_matmul": test_matmul.WRITTEN_DOWN,
    "test_functions": test_functions.WRITTEN_DOWN,
    "test_mla": None,
    "test_residual": None,
    "model": {f"chunks of {n}": MODEL for n in (1, 2, 3, 7, 10)} | {"4, then steps": MODEL, "each prefix anew": MODEL},
}
KERNELS = [name for name in WRITTEN_DOWN if name != "model"]


def targets():
    """{CPU this machine can compile for: (what is computed there, the environment that asks for that CPU)}.

    The generic CPU has no FMA and no AVX.
    """
    found = {"this CPU": ([*WRITTEN_DOWN], {}), "generic": ([*WRITTEN_DOWN], {"NUMBA_CPU_NAME": "generic"})}
    features = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    if platform.machine() in ("x86_64", "AMD64") and {"+avx2", "+fma"} <= set(features):
        avx2 = "+avx,+avx2,+fma,+ssse3,+sse4.1,+sse4.2,+bmi,+bmi2,+popcnt"
        found["AVX2"] = KERNELS, {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": avx2}
    return found


TARGETS = targets()


@pytest.fixture(scope="module")
def found():
    "{CPU: (exit code, error, {threads: {name: {what: digest}}})}"
    def run(target):
        names, environment = target
        done = subprocess.run([sys.executable, ROOT / "tests" / "contract.py", *names], capture_output=True, text=True,
                              env={**os.environ, "NUMBA_NUM_THREADS": "2", **environment})
        rows = map(json.loads, done.stdout.splitlines())
        return done.returncode, done.stderr, {row["threads"]: row["found"] for row in rows}

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(TARGETS, pool.map(run, TARGETS.values())))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cpu, name", [(cpu, name) for cpu, (names, _) in TARGETS.items() for name in names])
def test_same_bytes(found, cpu, name, threads):
    code, error, rows = found[cpu]
    assert code == 0, error
    assert rows[threads][name] == (WRITTEN_DOWN[name] or found["this CPU"][2][1][name])
