"fixtures/stories/broken.py: the model that it breaks has the engine's bits, and each break changes what is computed."

import importlib.util

import numpy as np
import pytest
from common import EXPECTED, MODEL, ROOT

import k3lib

spec = importlib.util.spec_from_file_location("broken", ROOT / "fixtures" / "stories" / "broken.py")
broken = importlib.util.module_from_spec(spec)
spec.loader.exec_module(broken)

IDS, CUT = EXPECTED["prompt_ids"], 5


@pytest.fixture(scope="module")
def weights():
    config, weights = broken.read_weights(MODEL)
    return config, {name: array for name, array in weights.items() if name.startswith("language_model.")}


@pytest.fixture(scope="module")
def right(weights):
    return broken.MemoryModel(*weights).logits(IDS, CUT)


def test_the_model_in_memory_has_the_bits_of_the_engine(right):
    with k3lib.load(MODEL, ram="1GB", context=32) as model:
        assert model.prefill(IDS).tobytes() == right.tobytes()


@pytest.mark.parametrize("which", broken.TRAPS + broken.PARTS, ids=lambda which: which.name)
def test_a_break_changes_the_logits(which, weights, right):
    with np.errstate(over="ignore"), which.applied(*weights) as model:
        assert np.abs(model.logits(IDS, CUT) - right).max() > 1  # of logits up to 13: no rounding


def test_after_a_break_the_model_is_whole_again(weights, right):
    for which in broken.TRAPS + broken.PARTS:
        with which.applied(*weights):
            pass
    assert broken.MemoryModel(*weights).logits(IDS, CUT).tobytes() == right.tobytes()
