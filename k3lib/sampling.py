"""5.24 A draw that can be repeated

Made from book/05_streaming/24_sampling.py: edit that, then run `make export`.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any
import numpy as np
from numpy.random import Philox
from k3lib.fileio import K3Error, UsageError


class SamplingError(UsageError):
    "A setting of sampling that is not allowed. One line: the field, what was found, what was expected."


LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # their sum is ln 2; n * LN2_HIGH is exact
TAYLOR = tuple(1 / math.factorial(k) for k in range(13, -1, -1))


def exponentials(x: np.ndarray) -> np.ndarray:
    "e^x float64 for float64 `x` <= 0, within two units in the last place. The same bits on every CPU."
    x = np.maximum(x, -800.0)  # e^-800 is 0 in float64
    n = np.rint(x * LOG2_E)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    series = np.full_like(r, TAYLOR[0])
    for term in TAYLOR[1:]:
        series *= r
        series += term
    return np.ldexp(series, n.astype(np.int32))


def uniform(seed: int, position: int) -> float:
    "A multiple of 2^-53 in [0, 1) that depends on the two integers in [0, 2^64) alone."
    return (Philox(key=seed, counter=position).random_raw() >> 11) * 2.0**-53


def checked_logits(logits: np.ndarray) -> np.ndarray:
    """`logits` [vocab] as float64. Minus infinity is allowed: that id has no chance.

    Raises ValueError for another shape, K3Error for NaN, infinity, or minus infinity everywhere.
    """
    z = np.asarray(logits, np.float64)
    if z.ndim != 1 or not z.size:
        raise ValueError(f"logits: shape {z.shape}, expected one number for each id")
    bad = np.flatnonzero(~(z < np.inf))
    if bad.size:
        raise K3Error(f"logits: {z[bad[0]]} for id {bad[0]}, expected a finite number")
    if z.max() == -np.inf:
        raise K3Error("logits: minus infinity for all ids, expected a finite number for one")
    return z


def _within(value: Any, low: float, high: float) -> bool:
    "Is `value` a number from low to high? False for NaN and for what is no number."
    number: Any = value if isinstance(value, Real) else math.nan
    return bool(low <= number <= high)


def _number(name: str, value: Any, kind: type, good: bool, expected: str) -> None:
    "Raise SamplingError unless `value` is a number of this kind, not a bool, and `good`."
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, kind) or not good:
        raise SamplingError(f"{name}: {value!a:.40}, expected {expected}")


@dataclass(frozen=True)
class Sampling:
    """How the next id is chosen: greedily, or by a draw at a temperature from what top_k, top_p and min_p keep.

    temperature >= 0; None or 0 is greedy. top_k >= 0, 0 keeps all. 0 < top_p <= 1. 0 <= min_p <= 1. 0 <= seed < 2^64.
    Without a temperature the others must have their defaults. Raises SamplingError.
    """

    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        t, k, p, m, seed = self.temperature, self.top_k, self.top_p, self.min_p, self.seed
        if t is not None:
            _number("temperature", t, Real, _within(t, 0, math.inf) and t != math.inf, "a finite number, 0 or more")
        _number("top_k", k, Integral, _within(k, 0, math.inf), "an integer, 0 or more")
        _number("top_p", p, Real, _within(p, 0, 1) and p != 0, "a number above 0 and at most 1")
        _number("min_p", m, Real, _within(m, 0, 1), "a number from 0 to 1")
        _number("seed", seed, Integral, _within(seed, 0, 2**64 - 1), "an integer from 0 to 2^64 - 1")
        unused = [f"{name} {value}" for name, value, default in
                  (("top_k", k, 0), ("top_p", p, 1), ("min_p", m, 0), ("seed", seed, 0)) if value != default]
        if t is None and unused:
            raise SamplingError(f"{unused[0]} without a temperature: greedy decoding does not draw. "
                                "Temperature 1 draws with the model's own probabilities")
        plain = (None if t is None else float(t), int(k), float(p), float(m), int(seed))
        for name, value in zip(("temperature", "top_k", "top_p", "min_p", "seed"), plain):
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        "Is the most probable id chosen, without a draw?"
        return not self.temperature

    def candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 ascending, weights float64) of what temperature and filters keep. Probabilities: weights / sum.

        Greedy: one id. Raises as checked_logits.
        """
        z = checked_logits(logits)
        if not self.temperature:
            return np.array([np.argmax(z)]), np.ones(1)
        ids = np.argsort(-z, kind="stable")[: self.top_k or None]
        with np.errstate(over="ignore"):  # far below the largest, at a tiny temperature: minus infinity
            weights = exponentials((z[ids] - z[ids[0]]) / self.temperature)
        if self.top_p < 1:
            total = np.cumsum(weights)
            enough = int(np.searchsorted(total, self.top_p * total[-1])) + 1
            ids, weights = ids[:enough], weights[:enough]
        kept = weights >= self.min_p * weights[0]
        order = np.argsort(ids[kept])
        return ids[kept][order], weights[kept][order]

    def choose(self, logits: np.ndarray, position: int) -> int:
        """The next id. `logits`: [vocab], after `position` ids were read. Of equal logits the lower id comes first.

        The same for the same settings, logits and position, whatever was drawn before. Raises as checked_logits, and
        SamplingError for a position that is not in [0, 2^64).
        """
        _number("position", position, Integral, _within(position, 0, 2**64 - 1), "an integer from 0 to 2^64 - 1")
        ids, weights = self.candidates(logits)
        if self.greedy:
            return int(ids[0])
        total = np.cumsum(weights)
        return int(ids[np.searchsorted(total, uniform(self.seed, int(position)) * total[-1], side="right")])


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    "float64 [vocab]: the logarithm of each id's probability at temperature 1. Raises as checked_logits."
    z = checked_logits(logits)
    z = z - z.max()
    return z - math.log(np.cumsum(exponentials(z))[-1])


def logprobs(logits: np.ndarray, n: int) -> list[tuple[int, float]]:
    """The `n` most probable ids with the logarithms of their probabilities; of equal ones the lower id comes first.

    Raises as checked_logits, and SamplingError unless 0 <= n <= vocab.
    """
    logs = log_probabilities(logits)
    _number("logprobs", n, Integral, _within(n, 0, logs.size), f"an integer from 0 to {logs.size}")
    return [(int(i), float(logs[i])) for i in np.argsort(-logs, kind="stable")[:n]]


__all__ = [
    "SamplingError", "LOG2_E", "LN2_HIGH", "LN2_LOW", "TAYLOR", "exponentials", "uniform", "checked_logits",
    "Sampling", "log_probabilities", "logprobs",
]
