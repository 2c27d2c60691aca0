# %% [markdown]
# # 5.24 A draw that can be repeated
#
# The model gives a number for each id that may come next. Greedy decoding takes the largest. Sampling draws one, so
# that a story is not the same story every time. After this chapter you can draw with the settings that servers have,
# and the same draw comes again after a crash, at another budget, with other chunks of the prompt and on another CPU.
#
# Without this chapter a run that was resumed says something else than the run that was not, and nobody can tell a
# mistake in the saved state from another throw of the dice.
#
# Needs chapter [5.2] (errors). Runs in seconds.
#
# [5.23 A reply as it comes](23_reply.ipynb) ·
# [contents](../README.md) ·
# [5.25 What a run has cost](25_report.ipynb)
#
# [5.2]: 02_fileio.ipynb

# %%
import time
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% [markdown]
# | symbol | meaning | shape | name in code |
# |---|---|---|---|
# | $z$ | the model's output for the next id | [vocab] | `logits` |
# | $T$ | temperature: below 1 sharper, above 1 flatter, 0 greedy | | `temperature` |
# | $w, p$ | weights, and the same divided by their sum | [kept] | `weights` |
# | $t$ | position: how many ids stand before the one that is drawn | | `position` |
# | $s$ | seed: which of the $2^{64}$ possible runs | | `seed` |
# | $u$ | a number in $[0, 1)$, the draw | | `uniform` |
#
# ## 5.24.1 Weights: shift first
#
# $$p_i = \frac{e^{z_i/T}}{\sum_j e^{z_j/T}} = \frac{e^{(z_i - \max z)/T}}{\sum_j e^{(z_j - \max z)/T}}$$
#
# Both forms are equal on paper. In the first, a logit of 30 at temperature 0.04 is $e^{750}$, which is more than
# float64 holds. In the second, the largest exponent is 0, and what underflows has no chance anyway.
#
# `np.exp` uses what vector instructions the CPU has, and some of its last bits are others with AVX-512 than without.
# Everything else in this
# book has the same bits everywhere (1.6), so the exponential is made here from operations that IEEE 754 defines to the
# bit: $e^x = 2^n e^r$ with $|r| \le \tfrac12\ln 2$, and Taylor's series up to $r^{13}$, whose rest is below
# $5\cdot10^{-18}$.

# %% tags=["export"]
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


# %%
x = -np.concatenate([[0.0], np.geomspace(1e-300, 745, 100_000)])
ours, theirs = exponentials(x), np.exp(x)
normal = theirs > 1e-300
far = np.max(np.abs(ours - theirs)[normal] / np.spacing(theirs[normal]))
print(f"e^0 = {ours[0]}, e^-800 = {exponentials(np.array([-800.0]))[0]}; "
      f"{far:.0f} unit in the last place at most from np.exp")
assert ours[0] == 1 and far <= 2 and LN2_HIGH + LN2_LOW == math.log(2)

# %% [markdown]
# The trap is the unshifted form. It gives NaN, and a comparison with NaN is false, so the draw below always takes the
# same id and no error is seen.

# %%
z = np.array([30.0, 29.9, 3.0], np.float32)


def unshifted(z, temperature):
    with np.errstate(all="ignore"):
        weights = np.exp(z.astype(np.float64) / temperature)
        return weights / weights.sum()


def shifted(z, temperature):
    weights = exponentials((z.astype(np.float64) - z.max()) / temperature)
    return weights / weights.sum()


for temperature in (1, 0.04):
    print(temperature, unshifted(z, temperature), shifted(z, temperature))
assert np.isclose(shifted(z, 0.04).sum(), 1)
assert not np.isclose(unshifted(z, 0.04).sum(), 1)  # the check sees the trap


# %% [markdown]
# ## 5.24.2 The draw is a function of seed and position
#
# A generator with a state gives its numbers in turn. Then a draw depends on how many draws the program has made, which
# is not what a saved conversation knows. A *counter-based* generator has no state: it scrambles a counter under a key.
#
# $$u_{s,t} = 2^{-53} \left\lfloor \mathrm{Philox}_{s}(t + 1)_0 \,/\, 2^{11} \right\rfloor$$
#
# Philox4x64-10 (Salmon et al., SC 2011) multiplies, swaps and adds the key, ten times. NumPy has it. The seed is the
# key and the position is the counter, to which NumPy adds one before it scrambles. Of the four words that come out, the
# first is taken, and of its 64 bits the upper 53.

# %% tags=["export"]
def uniform(seed: int, position: int) -> float:
    "A multiple of 2^-53 in [0, 1) that depends on the two integers in [0, 2^64) alone."
    return (Philox(key=seed, counter=position).random_raw() >> 11) * 2.0**-53


# %% [markdown]
# **Slow reference.** The generator in eight lines, on Python's integers. Three known answers were published with it
# (Random123, `kat_vectors`).

# %%
WORD = 2**64 - 1


def philox(counter, key):
    "Four words of 64 bits from a counter of four words and a key of two."
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        ab, cd = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (cd >> 64) ^ b ^ k0, cd & WORD, (ab >> 64) ^ d ^ k1, ab & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return a, b, c, d


PI = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
answers = {
    ((0,) * 4, (0,) * 2): 0x16554D9ECA36314C,
    ((WORD,) * 4, (WORD,) * 2): 0x87B092C3013FE90B,
    (PI, (0x452821E638D01377, 0xBE5466CF34E90C6C)): 0xA528F45403E61D95,
}
assert all(philox(*arguments)[0] == first for arguments, first in answers.items())
for seed, position in ((0, 0), (0, 1), (1, 0), (7, 163_840), (WORD, WORD)):
    word = philox(((position + 1) & WORD, (position + 1) >> 64, 0, 0), (seed, 0))[0]
    assert uniform(seed, position) == (word >> 11) / 2**53
    print(f"seed {seed:20} position {position:20} u = {uniform(seed, position):.6f}")


# %% [markdown]
# Will another NumPy give other numbers? NumPy's policy (NEP 19, and *Compatibility policy* in its manual) lets the
# methods of `Generator` change between versions. Bit generators have the stronger promise, and Philox's own
# documentation says that a fixed seed always gives the same integers. So no method of `Generator` is called here, only
# `random_raw`. If the stream changed all the same, the cell above and the tests would fail, and its eight lines could
# take the generator's place.

# %% [markdown]
# **Two traps.** The first is the generator with a state. A run of eight ids that stops after five and goes on draws
# other numbers than the run that did not stop.

# %%
def with_a_state(seed, positions):
    generator = np.random.default_rng(seed)
    return [generator.random() for _ in positions]


def by_position(seed, positions):
    return [uniform(seed, t) for t in positions]


for draw in (with_a_state, by_position):
    once, resumed = draw(7, range(8)), draw(7, range(5)) + draw(7, range(5, 8))
    print(f"{draw.__name__:13}", "the same" if once == resumed else "differs from position 5 on")
assert by_position(7, range(8)) == by_position(7, range(5)) + by_position(7, range(5, 8))
assert with_a_state(7, range(8)) != with_a_state(7, range(5)) + with_a_state(7, range(5, 8))  # the trap is seen


# %% [markdown]
# The second looks like a cure: a new generator for each position, seeded with seed + position. Then seed 2 is seed 1
# moved by one place. Whoever retries an answer with the next seed gets a shifted copy of the same luck.

# %%
def seeded_with_the_sum(seed, positions):
    return [np.random.default_rng(seed + t).random() for t in positions]


assert seeded_with_the_sum(1, range(1, 9)) == seeded_with_the_sum(2, range(8))
assert not set(by_position(1, range(1000))) & set(by_position(2, range(1000)))

# %% [markdown]
# ## 5.24.3 Filters and their order
#
# A vocabulary of 163,840 ids has a long tail: each id in it is hopeless, and together they are drawn every few words.
# Three filters cut it. Each keeps the most probable id, and the kept ids share the probability.
#
# | filter | keeps |
# |---|---|
# | top-k | the $k$ most probable ids |
# | top-p | the fewest most probable ids whose probabilities add up to at least $p$ |
# | min-p | ids with at least $m$ times the probability of the most probable id |
#
# The order changes the result, and servers differ:
#
# | program | order | source |
# |---|---|---|
# | transformers | temperature, top-k, top-p, min-p | `_get_logits_processor`, `generation/utils.py` |
# | SGLang | temperature, top-k, top-p, min-p | `_sample_from_probs`, `layers/sampler.py` |
# | vLLM | temperature, min-p, top-k, top-p | `Sampler`, `v1/sample/sampler.py` |
# | llama.cpp | top-k, top-p, min-p, temperature | default of `--samplers`, `tools/server/README.md` |
#
# This module takes the first: **temperature, top-k, top-p, min-p**. Top-p adds up the probabilities of what top-k kept,
# as in transformers and vLLM; SGLang adds up those before top-k. Min-p compares with the most probable id, which every
# filter keeps, so its place matters only to top-p. Where the temperature stands matters most:

# %%
toy = np.log(np.array([0.5, 0.2, 0.12, 0.08, 0.06, 0.04]))


def nucleus(p, top_p):
    "How many of the probabilities p, sorted downwards, top-p keeps."
    return int(np.searchsorted(np.cumsum(p / p.sum()), top_p) + 1)


for temperature in (0.5, 1, 2):
    before = nucleus(shifted(toy, temperature), 0.85)
    print(f"temperature {temperature}: top-p 0.85 keeps {before} after it, {nucleus(shifted(toy, 1), 0.85)} before it")


# %% [markdown]
# Ties and the order of ids must not be left to a sorting algorithm. Equal logits are ranked by id, lower first, which a
# stable sort does. After the filters the kept ids stand in ascending order. The draw is the first id at which the
# running sum of weights exceeds $u$ times their total. The running sum is added one by one, so its bits are defined;
# `np.sum` adds in blocks. An id of weight 0 is never drawn, because the sum does not grow there.

# %% tags=["export"]
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


# %% [markdown]
# Settings are checked when they are made. A setting that has no effect is refused too: whoever asks for top-p and gives
# no temperature wants to draw, and would get greedy decoding. A temperature of 0 is greedy by request, and the filters,
# which keep the most probable id, then change nothing.

# %% tags=["export"]
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


# %% tags=["export"]
class Sampling(Sampling):
    @classmethod
    def parsed(cls, **words: str | None) -> "Sampling":
        "From the words of a command line; None stands for the default. Raises SamplingError."
        values: dict[str, Any] = {}
        for name, word in words.items():
            kind, expected = (int, "an integer") if name in ("top_k", "seed") else (float, "a number")
            try:
                values |= {} if word is None else {name: kind(word)}
            except ValueError:
                raise SamplingError(f"{name}: {word!a:.40}, expected {expected}") from None
        return cls(**values)

    @property
    def greedy(self) -> bool:
        "Is the most probable id chosen, without a draw?"
        return not self.temperature


# %% tags=["export"]
class Sampling(Sampling):
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


# %% [markdown]
# **By hand.** Four ids with probabilities 0.1, 0.6, 0.1, 0.2, and $u$ for seed 0 at positions 0 to 3.

# %%
four = np.log([0.1, 0.6, 0.1, 0.2])
sampling = Sampling(temperature=1)
for t in range(4):
    print(f"position {t}: u = {uniform(0, t):.3f}, running sums 0.1 0.7 0.8 1.0, id {sampling.choose(four, t)}")
assert [sampling.choose(four, t) for t in range(4)] == [int(np.searchsorted([0.1, 0.7, 0.8], uniform(0, t)))
                                                        for t in range(4)]
print("top-k 2 keeps", Sampling(1, top_k=2).candidates(four)[0], "of the tie between 0 and 2: top-k 3 keeps",
      Sampling(1, top_k=3).candidates(four)[0])


# %% [markdown]
# **Slow reference.** The definition in plain Python: exact sums by `math.fsum`, no arrays, Philox as
# above. Random logits with many ties, random settings.

# %%
def reference(logits, s, position):
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: s.top_k or None]
    weight = {i: math.exp((logits[i] - logits[ranked[0]]) / s.temperature) for i in ranked}
    whole = math.fsum(weight.values())
    kept = [i for n, i in enumerate(ranked) if math.fsum(weight[j] for j in ranked[:n]) < s.top_p * whole]
    kept = sorted(i for i in kept if weight[i] >= s.min_p * weight[ranked[0]])
    u = philox((position + 1, 0, 0, 0), (s.seed, 0))[0] / 2**64
    whole = math.fsum(weight[i] for i in kept)
    return next(i for n, i in enumerate(kept) if math.fsum(weight[j] for j in kept[: n + 1]) > u * whole)


rng = np.random.default_rng(0)
for case in range(2_000):
    logits = np.round(rng.normal(0, 4, rng.integers(1, 40)), 1)
    s = Sampling(float(rng.uniform(0.05, 3)), int(rng.integers(0, 8)), float(rng.uniform(0.3, 1)),
                 float(rng.choice([0, 0.1])), int(rng.integers(0, 2**63)))
    assert s.choose(logits, case) == reference(logits.tolist(), s, case), (logits, s, case)
print("2,000 random settings: the same ids as the definition")

# %% [markdown]
# ## 5.24.4 The gate: frequencies against probabilities
#
# A sampler can be wrong in ways that no single draw shows. So many draws are counted. With $N$ independent draws, the
# frequency $f$ of an id of probability $p$ obeys Bernstein's inequality:
#
# $$P\big(|f - p| \ge t\big) \le \delta, \qquad
#   t = \sqrt{\frac{2\,p(1-p)\,L}{N}} + \frac{2L}{3N}, \qquad L = \ln\frac{2}{\delta}$$
#
# It needs no large numbers and no normal distribution. With $\delta = 10^{-9}$ for each id and 60 ids and settings, a
# right sampler fails with a chance of less than $10^{-7}$ over the choice of the seed. The seed is fixed, so it fails
# never or always.

# %%
N, DELTA = 20_000, 1e-9
z12 = np.array([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -1.5, -2.0, -4.0], np.float32)


def bound(p):
    L = math.log(2 / DELTA)
    return np.sqrt(2 * p * (1 - p) * L / N) + 2 * L / (3 * N)


def exact(s, logits):
    "The probabilities of all ids, from their definition in exact sums."
    scaled = [math.exp((float(x) - float(max(logits))) / s.temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: s.top_k or None]
    whole, running, kept = math.fsum(scaled[i] for i in ranked), 0.0, []
    for i in ranked:
        if running < s.top_p * whole and scaled[i] >= s.min_p * scaled[ranked[0]]:
            kept.append(i)
        running += scaled[i]
    share = math.fsum(scaled[i] for i in kept)
    return np.array([scaled[i] / share if i in kept else 0.0 for i in range(len(logits))])


def frequencies(s, logits, choose=None):
    choose = choose or s.choose
    return np.bincount([choose(logits, t) for t in range(N)], minlength=len(logits)) / N


settings = [Sampling(1.0, seed=1), Sampling(0.5, seed=2), Sampling(1.5, top_k=7, seed=3),
            Sampling(1.0, top_p=0.8, seed=4), Sampling(2.0, min_p=0.2, top_p=0.95, seed=5)]
measured = {s: frequencies(s, z12) for s in settings}
for s, f in measured.items():
    p = exact(s, z12)
    print(f"largest |f - p| / bound {np.max(np.abs(f - p) / bound(p)):.2f}, {np.count_nonzero(p)} ids kept: {s}")
    assert np.all(np.abs(f - p) <= bound(p)) and np.all(f[p == 0] == 0)


# %% [markdown]
# A sampler that is wrong in one place goes through the same gate: it applies the temperature last, as llama.cpp does.
# It draws from nearly the same ids, and the gate sees it.

# %%
def temperature_last(logits, t):
    s = settings[4]
    ids, weights = Sampling(1.0, s.top_k, s.top_p, s.min_p).candidates(logits)
    return int(ids[Sampling(s.temperature, seed=s.seed).choose(np.log(weights), t)])


off = np.abs(frequencies(settings[4], z12, temperature_last) - exact(settings[4], z12)) / bound(exact(settings[4], z12))
print(f"temperature last: {off.max():.1f} times the bound")
assert off.max() > 1

# %% [markdown]
# Neighbouring positions must not know of each other, nor neighbouring seeds. Pairs of draws of the fair twelve are
# counted in 144 fields, with the same bound.

# %%
draws, other = (np.array([int(12 * uniform(seed, t)) for t in range(N)]) for seed in (6, 7))
for label, first, second in (("positions t, t+1", draws[::2], draws[1::2]), ("seeds s, s+1", draws, other)):
    f = np.bincount(first * 12 + second, minlength=144) / len(first)
    L = math.log(2 / DELTA)
    most = math.sqrt(2 / 144 * (143 / 144) * L / len(first)) + 2 * L / (3 * len(first))
    print(f"{label:17} largest |f - p| / bound {np.abs(f - 1 / 144).max() / most:.2f}")
    assert np.abs(f - 1 / 144).max() <= most

# %% [markdown]
# The figure shows the probabilities as bars and the frequencies as points, with the bound. A filter that cuts at the
# wrong place leaves a bar without a point, or a point without a bar.

# %%
fig, axes = plt.subplots(1, 3, figsize=(8, 2.6), sharey=True)
titles = ("T 1", "T 1, top-p 0.8", "T 2, top-p 0.95, min-p 0.2")
for ax, s, title in zip(axes, (settings[0], settings[3], settings[4]), titles):
    p, f = exact(s, z12), measured[s]
    ax.bar(range(12), p, color="C0", alpha=0.45, label="probability")
    ax.errorbar(range(12), f, yerr=bound(p), fmt=".", color="C1", ms=5, lw=1, label=f"frequency of {N:,} draws")
    ax.set(xlabel="id", title=title, xticks=range(0, 12, 2))
axes[0].set_ylabel("probability")
axes[0].legend()
plt.show()


# %% [markdown]
# ## 5.24.5 What was likely
#
# Log probabilities are those of the model: temperature 1, nothing filtered, as OpenAI's API and vLLM report them. They
# say how sure the model was, whatever the sampler then did.
#
# A logarithm is taken once a token and printed, not decided by, so it may come from the system's library, and its last
# digit may differ from machine to machine.

# %% tags=["export"]
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


# %%
print([(i, round(x, 4)) for i, x in logprobs(four, 3)])
assert [i for i, _ in logprobs(four, 3)] == [1, 3, 0]
assert np.allclose([x for _, x in logprobs(four, 3)], np.log([0.6, 0.2, 0.1]), rtol=1e-15)
assert abs(np.exp(log_probabilities(z12)).sum() - 1) < 1e-15

# %% [markdown]
# ## 5.24.6 The same everywhere
#
# Threads, budgets and chunks of the prompt cannot change a draw, because they cannot change a bit of the logits
# (chapter [5.34]), and position and seed are integers. One thread computes the draw from these, without a reduction
# whose order could vary. A digest of 300 draws is written down here. Another CPU, or another NumPy, must give the same.
#
# [5.34]: 34_decode.ipynb

# %%
import hashlib

spread = (np.arange(163_840, dtype=np.int64) * 2_654_435_761 % 1_000_003 / 62_500).astype(np.float32)
chosen = [Sampling(0.8, top_p=0.95, seed=2).choose(np.roll(spread[:4096], t), t) for t in range(300)]
digest = hashlib.sha256(np.array(chosen, "<u4").tobytes()).hexdigest()
print(chosen[:8], digest[:16])
assert digest.startswith("f7d8772c3ec2c9d0")

# %% tags=["nbval-ignore-output"]
start = time.perf_counter()
for t in range(10):
    Sampling(0.8, top_p=0.95).choose(spread, t)
print(f"{(time.perf_counter() - start) * 100:.0f} ms for a draw from 163,840 ids")

# %% [markdown]
# ## 5.24.7 Refusals, live

# %%
wrong = [dict(temperature=-1), dict(temperature=float("nan")), dict(temperature="hot"), dict(temperature=1, top_k=2.5),
         dict(temperature=1, top_p=0), dict(temperature=1, min_p=1.5), dict(temperature=1, seed=-1), dict(top_p=0.9),
         dict(temperature=True)]
for fields in wrong:
    try:
        Sampling(**fields)
        raise AssertionError(fields)
    except SamplingError as error:
        print(error)
for logits in ([0.0, float("nan")], [float("inf"), 0.0], [-float("inf")] * 2):
    try:
        Sampling(1.0).choose(np.array(logits), 0)
        raise AssertionError(logits)
    except K3Error as error:
        print(error)

# %% [markdown]
# ## Summary
#
# - A draw is a function of seed, position and logits. A counter-based generator makes it one, and a resumed run repeats
#   it.
# - Weights are shifted before the exponential, sorted stably, summed in a fixed order: the bits of a draw are defined.
# - The order is temperature, top-k, top-p, min-p. Other programs have other orders, and the gate can tell them apart.
#
# ## Exercises
#
# 1. A user presses retry and expects another answer. Which of the three arguments of a draw must change, and who keeps
#    it?
# 2. Draw with the Gumbel trick, $\arg\max_i (z_i/T + g_{s,t,i})$, with a counter for each id. What does it cost for
#    163,840 ids, and which filter becomes easier?
# 3. How many draws does the gate need to tell top-p 0.95 from 0.94 for `z12`?
