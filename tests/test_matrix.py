"""The matrix on the embedded model: combinations of what may change the time must leave the bytes alone.

With `--all` every combination, otherwise a sample.

The baseline CPU, which needs kernels of its own, has its test in test_contract.py and its rows in `make matrix`.
"""
import itertools
import math

import matrix
import pytest
from common import MODEL, least

from k3lib import cli, parallel


def floor():
    "A budget a megabyte above the smallest one there is at this moment."
    return least() + 1_000_000


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix") / "trunk"
    cli.pack_trunk(MODEL, folder)
    return folder


@pytest.fixture(scope="module")
def reference():
    return matrix.answer(MODEL, "1GB", 1, None, matrix.as_planned, [len(matrix.IDS)], 2)[len(matrix.IDS)]


def test_one_answer(trunk, reference, everything):
    dimensions = [floor, "1GB"], sorted({1, parallel.CORES}), [None, trunk], matrix.CACHES
    rows = list(matrix.answers(MODEL, *dimensions, [1, 4, 6], 2, itertools.product if everything else matrix.pairs))
    assert len(rows) >= 3 * (math.prod(map(len, dimensions)) if everything else 6)
    others = [row for row in rows if row[-1] != reference]
    assert not others, f"{len(others)} of {len(rows)} differ, the first is {others[0]}"


def test_in_the_sample_every_two_values_meet():
    dimensions = "ab", [1, 2, 3], [None, True], "xyzw"
    sample = [*matrix.pairs(*dimensions)]
    assert sample == [*matrix.pairs(*dimensions)] and len(sample) <= 14 < math.prod(map(len, dimensions))
    for i, j in itertools.combinations(range(4), 2):
        assert {(one[i], one[j]) for one in sample} == {*itertools.product(dimensions[i], dimensions[j])}


@pytest.mark.parametrize("cache, cached", [(matrix.none_cached, 0), (matrix.a_few_cached, 24)])
def test_the_expert_cache_is_what_the_combination_says(cache, cached):
    with matrix.load(MODEL, "1GB", None, 1, cache, 16) as model:
        assert model.experts.layout.cached == cached
        model.prefill(matrix.IDS)
        model.reset()
        model.prefill(matrix.IDS)
        assert (model.experts.hits > 0) == (cached > 0)
