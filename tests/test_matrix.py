"""The matrix on the embedded model: every combination of what may change the time must leave the bytes alone.

The baseline CPU, which needs kernels of its own, has its test in test_contract.py and its rows in `make matrix`.
"""
from pathlib import Path

import matrix
import pytest

import k3lib
from k3lib import engine, parallel, plan

MODEL = Path(__file__).parents[1] / "fixtures" / "oracle13" / "model"


def floor(extra):
    "A budget `extra` bytes above the smallest one there is at that moment."
    def ram():
        with pytest.raises(plan.PlanError) as refused:
            k3lib.load(MODEL, 1, context=32)
        return refused.value.least + extra
    return ram


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix") / "trunk"
    engine.pack_trunk(MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def reference():
    return matrix.answer(MODEL, "1GB", 1, None, matrix.as_planned, [len(matrix.IDS)], 2)[len(matrix.IDS)]


def test_one_answer(trunk, reference):
    rows = list(matrix.answers(MODEL, [floor(1_000_000), "1GB"], sorted({1, parallel.CORES}), [None, trunk], matrix.CACHES, [1, 4, 6], 2))
    assert len(rows) == 2 * len({1, parallel.CORES}) * 2 * len(matrix.CACHES) * 3
    others = [row for row in rows if row[-1] != reference]
    assert not others, f"{len(others)} of {len(rows)} differ, the first is {others[0]}"
