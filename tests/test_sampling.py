"""k3lib.sampling: draws that depend on seed, position and logits alone, against exact probabilities, known answers of
the generator, a definition in plain Python, and settings that are refused by name."""
import dataclasses
import hashlib
import math
import os
import pickle
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy._core._multiarray_umath import __cpu_dispatch__
from numpy.random import Philox

from k3lib.fileio import K3Error, UsageError
from k3lib.sampling import Sampling, SamplingError, exponentials, log_probabilities, logprobs, uniform

WORD = 2**64 - 1


def philox(counter, key):
    "Philox4x64-10 on Python's integers: four words from a counter of four words and a key of two."
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        ab, cd = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (cd >> 64) ^ b ^ k0, cd & WORD, (ab >> 64) ^ d ^ k1, ab & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return a, b, c, d


# --- the generator -------------------------------------------------------------------------------------------------

ANSWERS = [  # Random123, kat_vectors: counter, key, four words
    ((0, 0, 0, 0), (0, 0),
     (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B)),
    ((WORD,) * 4, (WORD, WORD),
     (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)),
    ((0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
     (0x452821E638D01377, 0xBE5466CF34E90C6C),
     (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6)),
]


@pytest.mark.parametrize("counter, key, words", ANSWERS)
def test_numpys_stream_is_the_published_one(counter, key, words):
    "NumPy adds one to the counter before it scrambles. If this fails, NumPy has changed the stream that it promised."
    whole = sum(word << 64 * n for n, word in enumerate(counter))
    generator = Philox(key=np.array(key, np.uint64), counter=(whole - 1) % 2**256)
    assert tuple(generator.random_raw(4).tolist()) == words == philox(counter, key)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, WORD), st.integers(0, WORD))
def test_a_draw_is_the_first_word_of_its_counter_and_key(seed, position):
    word = philox(((position + 1) & WORD, (position + 1) >> 64, 0, 0), (seed, 0))[0]
    assert uniform(seed, position) == (word >> 11) / 2**53 < 1


def test_written_down_draws():
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(WORD, WORD)] == [
        0.011546754286331562, 0.5023796042735054, 0.3035680343067586, 0.8837444827274451]


# --- exponentials --------------------------------------------------------------------------------------------------


DIGEST_EXP = "3835666c4e72243f2c0963e560eef8e2b49c2b7592541ba26a5ea35bd8a7750e"
DIGEST_CHOICES = "f7d8772c3ec2c9d0d0d7da2a56780338257e340f148f4958648d43f7a676774a"
WHOLE = [32312, 110045, 139587, 94166]


def test_exponentials_against_the_library():
    x = np.concatenate([[0.0, -0.0, -700.0, -745.13], -np.geomspace(1e-310, 708, 50_000), -np.linspace(0, 708, 50_000)])
    expected = [math.exp(v) for v in x]
    difference = np.abs(exponentials(x) - expected)
    assert (difference <= 2 * np.spacing(expected)).all(), x[np.argmax(difference / np.spacing(expected))]
    assert exponentials(np.array([-746.0, -800.0, -1e300, -np.inf])).tolist() == [0, 0, 0, 0]
    assert exponentials(np.zeros(3)).tolist() == [1, 1, 1]


def test_exponentials_of_one_are_those_of_many():
    "No vector form rounds differently: an element does not depend on where it stands."
    x = -np.random.default_rng(0).exponential(20, 1001)
    assert exponentials(x).tolist() == [exponentials(x[i : i + 1])[0] for i in range(x.size)]


def test_written_down_exponentials():
    "The same bits on every CPU."
    x = -np.arange(4096) / 7.0
    digest = hashlib.sha256(exponentials(x).astype("<f8").tobytes()).hexdigest()
    assert digest == DIGEST_EXP


def test_the_same_bits_without_vector_instructions():
    "np.exp has other bits where NumPy may not use AVX-512 or AVX2, as on another CPU. A draw has not."
    code = ("import hashlib, numpy as np; from k3lib.sampling import Sampling; x = -np.arange(4096) / 7.0; "
            "print(hashlib.sha256(Sampling(1.0).candidates(x)[1].astype('<f8').tobytes()).hexdigest())")
    without = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=without, check=True)
    assert run.stdout.strip() == DIGEST_EXP


def test_written_down_choices():
    spread = (np.arange(163_840, dtype=np.int64) * 2_654_435_761 % 1_000_003 / 62_500).astype(np.float32)
    chosen = [Sampling(0.8, top_p=0.95, seed=2).choose(np.roll(spread[:4096], t), t) for t in range(300)]
    assert hashlib.sha256(np.array(chosen, "<u4").tobytes()).hexdigest() == DIGEST_CHOICES
    assert [Sampling(1.2, top_k=50, min_p=0.01, seed=9).choose(spread, t) for t in range(4)] == WHOLE


# --- against the definition ----------------------------------------------------------------------------------------


def kept(logits, s):
    "{id: weight} of what the filters keep, ids ascending, with exact sums."
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: s.top_k or None]
    weight = {i: math.exp((logits[i] - logits[ranked[0]]) / s.temperature) for i in ranked}
    whole = math.fsum(weight.values())
    nucleus = [i for n, i in enumerate(ranked) if math.fsum(weight[j] for j in ranked[:n]) < s.top_p * whole]
    return {i: weight[i] for i in sorted(nucleus) if weight[i] >= s.min_p * weight[ranked[0]]}


def reference(logits, s, position):
    weight = kept(logits, s)
    u = philox((position + 1, 0, 0, 0), (s.seed, 0))[0] / 2**64 * math.fsum(weight.values())
    ids = list(weight)
    return next(i for n, i in enumerate(ids) if math.fsum(weight[j] for j in ids[: n + 1]) > u)


def test_choices_are_those_of_the_definition():
    "Random logits with many ties, random settings. A difference in the last bit of a sum would need a draw of luck."
    rng = random.Random(1)
    for case in range(3_000):
        logits = [round(rng.gauss(0, 4), 1) for _ in range(rng.randrange(1, 40))]
        s = Sampling(rng.uniform(0.05, 3), rng.randrange(8), rng.uniform(0.3, 1), rng.choice([0, 0.1, 1]),
                     rng.randrange(2**64))
        ids, weights = s.candidates(np.array(logits, np.float32))
        # the draw is over float32 logits as given: compare with the same numbers
        exact = np.array(logits, np.float32).astype(float).tolist()
        assert dict(zip(ids.tolist(), weights)) == pytest.approx(kept(exact, s), rel=1e-14)
        assert s.choose(np.array(logits, np.float32), case) == reference(exact, s, case), (logits, s, case)


@pytest.mark.parametrize("s, ids", [
    (Sampling(1.0), [0, 1, 2, 3, 4, 5]), (Sampling(1.0, top_k=1), [1]), (Sampling(1.0, top_k=3), [0, 1, 3]),
    (Sampling(1.0, top_k=99), [0, 1, 2, 3, 4, 5]), (Sampling(1.0, top_p=0.5), [0, 1]), (Sampling(1.0, top_p=0.3), [1]),
    (Sampling(1.0, top_p=1e-300), [1]), (Sampling(1.0, min_p=1.0), [1]), (Sampling(1.0, min_p=0.5), [0, 1, 3]),
    (Sampling(1e-300), [0, 1, 2, 3, 4, 5]), (Sampling(1.0, top_k=2, top_p=0.7), [0, 1])])
def test_what_the_filters_keep(s, ids):
    "Probabilities 0.2, 0.4, 0.05, 0.2, 0.05, 0.1. Of equal ones the lower id comes first, also where a filter cuts."
    found, weights = s.candidates(np.log([0.2, 0.4, 0.05, 0.2, 0.05, 0.1]))
    assert found.tolist() == ids and weights.shape == found.shape


def test_top_p_counts_what_top_k_kept():
    "Of the two that top-k keeps, the first has 2/3 of the probability; of all, it has 0.4."
    p = np.log([0.4, 0.2, 0.2, 0.2])
    assert Sampling(1.0, top_k=2, top_p=0.6).candidates(p)[0].tolist() == [0]
    assert Sampling(1.0, top_p=0.6).candidates(p)[0].tolist() == [0, 1]


def test_temperature_comes_first():
    p = np.log([0.5, 0.2, 0.12, 0.08, 0.06, 0.04])
    assert [Sampling(t, top_p=0.85).candidates(p)[0].size for t in (0.5, 1, 2)] == [2, 4, 5]


# --- frequencies ---------------------------------------------------------------------------------------------------

N, DELTA = 5_000, 1e-9
Z = np.array([2.0, 1.5, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -1.5, -2.0, -4.0], np.float32)


def bound(p, n=N):
    """Bernstein: |frequency - p| of n independent draws exceeds this with a chance below DELTA.

    The seeds are fixed. Over the choice of seeds a right sampler would fail with a chance below 1e-6 in all.
    """
    L = math.log(2 / DELTA)
    return np.sqrt(2 * p * (1 - p) * L / n) + 2 * L / (3 * n)


@pytest.mark.parametrize("s", [
    Sampling(1.0, seed=1), Sampling(0.5, seed=2), Sampling(1.5, top_k=7, seed=3), Sampling(1.0, top_p=0.8, seed=4),
    Sampling(2.0, top_p=0.95, min_p=0.2, seed=WORD)])
def test_frequencies_are_the_probabilities(s):
    weight = kept(Z.tolist(), s)
    p = np.array([weight.get(i, 0.0) for i in range(Z.size)]) / math.fsum(weight.values())
    f = np.bincount([s.choose(Z, t) for t in range(N)], minlength=Z.size) / N
    assert (np.abs(f - p) <= bound(p)).all() and (f[p == 0] == 0).all()


def test_pairs_of_draws_know_nothing_of_each_other():
    one, other = ([int(12 * uniform(s, t)) for t in range(20_000)] for s in (6, 7))
    assert one[:9] == [Sampling(1.0, seed=6).choose(np.zeros(12), t) for t in range(9)]
    for first, second in ((one[::2], one[1::2]), (one, other), (one[:-1:2], other[1::2])):
        f = np.bincount(np.array(first) * 12 + np.array(second), minlength=144) / len(first)
        assert (np.abs(f - 1 / 144) <= bound(1 / 144, len(first))).all()


# --- a function of seed, position and logits -----------------------------------------------------------------------


def test_a_resumed_run_draws_the_same():
    "Draws in order, in another order, one by one by new objects, and after others were drawn."
    logits = np.random.default_rng(3).normal(0, 3, (50, 200))
    once = [Sampling(0.9, top_p=0.9, seed=5).choose(logits[t], t) for t in range(50)]
    s = Sampling(0.9, top_p=0.9, seed=5)
    backwards = {t: s.choose(logits[t], t) for t in reversed(range(50))}
    assert [backwards[t] for t in range(50)] == once
    assert [pickle.loads(pickle.dumps(s)).choose(logits[t], t) for t in range(20, 50)] == once[20:]
    assert once != [Sampling(0.9, top_p=0.9, seed=6).choose(logits[t], t) for t in range(50)]
    assert len({s.choose(logits[0], t) for t in range(200)}) > 3


def test_neighbouring_seeds_are_not_shifted():
    "As seed + position would make them."
    assert not {uniform(1, t) for t in range(2000)} & {uniform(2, t) for t in range(2000)}


def test_nothing_else_is_read_or_changed():
    "Not the process's random numbers, not NumPy's, not the caller's array; views and other types give the same."
    logits = np.random.default_rng(4).normal(0, 3, 300).astype(np.float32)
    before, state, states = logits.copy(), random.getstate(), np.random.get_state()[1].copy()
    s = Sampling(0.7, top_k=40, top_p=0.9, min_p=0.01, seed=8)
    chosen = s.choose(logits, 3)
    assert (logits == before).all() and random.getstate() == state and (np.random.get_state()[1] == states).all()
    strided = np.zeros((300, 2), np.float32)
    strided[:, 1] = logits
    assert {s.choose(x, 3) for x in (strided[:, 1], logits.astype(np.float64), logits.tolist())} == {chosen}
    logits.flags.writeable = False
    assert s.choose(logits, np.int64(3)) == chosen and type(chosen) is int


def test_threads_draw_the_same():
    logits = np.random.default_rng(5).normal(0, 3, (40, 500))
    s, found = Sampling(1.0, top_p=0.9, seed=1), {}
    threads = [threading.Thread(target=lambda k=k: found.update({k: [s.choose(z, t) for t, z in enumerate(logits)]}))
               for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[k] for k in range(4)] == [[s.choose(z, t) for t, z in enumerate(logits)]] * 4


def test_another_process_draws_the_same():
    code = ("import numpy as np; from k3lib.sampling import Sampling; s = Sampling(1.0, seed=3); "
            "print([s.choose(np.arange(9) / 3, t) for t in range(20)])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str([Sampling(1.0, seed=3).choose(np.arange(9) / 3, t) for t in range(20)])


# --- edges ---------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-2.0**100, 2.0**100, width=32) | st.sampled_from([0.0, -0.0, 1.0, -np.inf]),
                min_size=1, max_size=30),
       st.floats(1e-300, 1e300), st.integers(0, 5), st.floats(1e-9, 1), st.floats(0, 1), st.integers(0, WORD))
def test_any_settings_choose_an_id_that_is_kept_and_possible(values, t, k, p, m, position):
    z = np.array(values, np.float32)
    if z.max() == -np.inf:
        z[0] = 0
    with np.errstate(all="raise", under="ignore"):
        s = Sampling(t, k, p, m)
        chosen = s.choose(z, position)
        ids, weights = s.candidates(z)
    assert chosen in ids and z[chosen] > -np.inf and np.argmax(z) in ids
    assert (np.diff(ids) > 0).all() and ids.size <= (k or z.size) and np.isfinite(weights).all() and weights.max() == 1


def test_the_largest_and_the_smallest_draw(monkeypatch):
    "An id of weight 0 is not drawn by a draw of 0, and no draw is beyond the last id."
    z = np.array([-np.inf, 0.0, -np.inf, 0.1, -np.inf])
    for u, expected in ((0.0, 1), (1 - 2**-53, 3)):
        monkeypatch.setattr("k3lib.sampling.uniform", lambda seed, position: u)
        assert Sampling(1.0).choose(z, 0) == expected
        assert Sampling(1.0).choose(np.full(5, 7.0), 0) == (0 if u == 0 else 4)


def test_greedy():
    z = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    for s in (Sampling(), Sampling(0), Sampling(temperature=0.0, top_k=2, top_p=0.5, min_p=0.1, seed=9)):
        assert s.greedy and [s.choose(z, t) for t in range(5)] == [1] * 5 and s.candidates(z)[0].tolist() == [1]
    assert not Sampling(1e-9).greedy


def test_a_small_temperature_is_nearly_greedy_and_does_not_overflow():
    z = np.array([100.0, 99.0, -100.0], np.float32)
    for t in (0.01, 1e-5, 1e-300, 5e-324):
        assert [Sampling(t, seed=1).choose(z, n) for n in range(50)] == [0] * 50


@pytest.mark.parametrize("logits, words", [
    ([0.0, np.nan], "logits: nan for id 1, expected a finite number"),
    ([np.inf, 0.0], "logits: inf for id 0, expected a finite number"),
    ([-np.inf, -np.inf], "logits: minus infinity for all ids, expected a finite number for one")])
def test_broken_logits_are_refused(logits, words):
    for call in (lambda z: Sampling().choose(z, 0), lambda z: Sampling(1.0).choose(z, 0), log_probabilities):
        with pytest.raises(K3Error) as caught:
            call(np.array(logits))
        assert str(caught.value) == words and caught.value.exit_code == 1


@pytest.mark.parametrize("shape", [(), (0,), (1, 4)])
def test_logits_of_another_shape(shape):
    with pytest.raises(ValueError, match="expected one number for each id"):
        Sampling(1.0).choose(np.zeros(shape), 0)


REFUSED = [
    (dict(temperature=-0.1), "temperature: -0.1, expected a finite number, 0 or more"),
    (dict(temperature=math.nan), "temperature: nan, expected a finite number, 0 or more"),
    (dict(temperature=math.inf), "temperature: inf, expected a finite number, 0 or more"),
    (dict(temperature="1"), "temperature: '1', expected a finite number, 0 or more"),
    (dict(temperature=True), "temperature: True, expected a finite number, 0 or more"),
    (dict(temperature=1, top_k=-1), "top_k: -1, expected an integer, 0 or more"),
    (dict(temperature=1, top_k=2.0), "top_k: 2.0, expected an integer, 0 or more"),
    (dict(temperature=1, top_p=0), "top_p: 0, expected a number above 0 and at most 1"),
    (dict(temperature=1, top_p=1.01), "top_p: 1.01, expected a number above 0 and at most 1"),
    (dict(temperature=1, top_p=None), "top_p: None, expected a number above 0 and at most 1"),
    (dict(temperature=1, min_p=-1e-9), "min_p: -1e-09, expected a number from 0 to 1"),
    (dict(temperature=1, min_p=math.nan), "min_p: nan, expected a number from 0 to 1"),
    (dict(temperature=1, seed=2**64), "seed: 18446744073709551616, expected an integer from 0 to 2^64 - 1"),
    (dict(temperature=1, seed=-1), "seed: -1, expected an integer from 0 to 2^64 - 1"),
    (dict(temperature=1, seed=1.0), "seed: 1.0, expected an integer from 0 to 2^64 - 1"),
    *((fields, f"{words} without a temperature: greedy decoding does not draw. Temperature 1 draws with the model's "
               "own probabilities")
      for fields, words in ((dict(top_k=5), "top_k 5"), (dict(top_p=0.9), "top_p 0.9"), (dict(min_p=0.1), "min_p 0.1"),
                            (dict(seed=3), "seed 3"))),
]


@pytest.mark.parametrize("fields, words", REFUSED, ids=lambda v: str(v)[:24])
def test_settings_are_refused_by_name(fields, words):
    with pytest.raises(SamplingError) as caught:
        Sampling(**fields)
    assert str(caught.value) == words and isinstance(caught.value, UsageError) and caught.value.exit_code == 2


@pytest.mark.parametrize("position", [-1, 2**64, 1.0, None, True])
def test_positions_are_checked(position):
    for s in (Sampling(), Sampling(1.0)):
        with pytest.raises(SamplingError, match="^position: .*, expected an integer from 0 to 2.64 - 1$"):
            s.choose(np.zeros(3), position)


def test_settings_are_plain_numbers_and_do_not_change():
    s = Sampling(np.float32(0.5), np.int64(3), np.float32(1), 0, np.uint64(WORD))
    assert s == Sampling(0.5, 3, 1.0, 0.0, WORD) and hash(s) == hash(Sampling(0.5, 3, 1.0, 0.0, WORD))
    assert [type(v) for v in dataclasses.astuple(s)] == [float, int, float, float, int]
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.seed = 1


# --- logprobs ------------------------------------------------------------------------------------------------------


def test_log_probabilities():
    p = np.array([0.1, 0.6, 0.1, 0.2])
    assert log_probabilities(np.log(p) + 1000) == pytest.approx(np.log(p), rel=1e-12)
    assert [i for i, _ in logprobs(np.log(p), 4)] == [1, 3, 0, 2]
    assert logprobs(np.log(p), 2) == [(1, pytest.approx(math.log(0.6))), (3, pytest.approx(math.log(0.2)))]
    assert logprobs(np.log(p), 0) == []
    assert log_probabilities(np.array([0.0, -np.inf])).tolist() == [0, -np.inf]
    assert all(type(i) is int and type(x) is float for i, x in logprobs(Z, 12))
    z = np.random.default_rng(6).normal(0, 5, 163_840).astype(np.float32)
    assert math.fsum(np.exp(log_probabilities(z))) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("n", [-1, 13, 1.0, None])
def test_the_number_of_logprobs_is_checked(n):
    with pytest.raises(SamplingError, match="^logprobs: .*, expected an integer from 0 to 12$"):
        logprobs(Z, n)
