"Traces, replays and policies: the bound is a bound, a replay tells what the running cache does, and a damaged trace is refused with its place."
import itertools
from collections import OrderedDict

import numpy as np
import pytest
from common import MODEL, PROMPT, k3, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from test_experts import Store, consume

import k3lib
from k3lib.cache_policy import (
    CAPACITIES,
    HISTORY_BITS,
    AgingCache,
    LayerCaches,
    ScoredCache,
    decayed_uses,
    hit_rates,
    last_use,
    next_use,
    policies,
    replay,
    replay_text,
    reuse,
    uses_in,
    working_set,
)
from k3lib.disk import Files
from k3lib.experts import Experts
from k3lib.layout import expert_slot_bytes
from k3lib.trace import TraceError, packed_trace, read_trace, steps_of

LAYERS, EXPERTS = (2, 3, 7), 6
requests = st.sets(st.integers(0, EXPERTS - 1), min_size=1).map(sorted)
traces = st.lists(st.tuples(*[requests] * len(LAYERS)).map(lambda chosen: list(zip(LAYERS, chosen))), min_size=1, max_size=12)
capacities = st.integers(0, len(LAYERS) * EXPERTS + 1)


def caches(steps, capacity):
    return {name: make(capacity) for name, make in policies(steps).items()}


def kept(cache):
    if isinstance(cache, LayerCaches):
        return {(layer, e) for layer in LAYERS for e in cache[layer].kept}
    return set(cache._kept)


# Policies

@settings(max_examples=60, deadline=None)
@given(traces, capacities)
def test_every_cache_keeps_no_more_than_it_can_and_only_what_was_requested(steps, capacity):
    "And hits exactly what it kept."
    for name, cache in caches(steps, capacity).items():
        seen = set()
        for layer, ids in itertools.chain(*steps):
            before = kept(cache)
            hits = cache.request(layer, ids)
            seen |= {(layer, e) for e in ids}
            assert {(layer, e) for e in hits} == before & {(layer, e) for e in ids}, f"{name}: hits that were not kept, or the other way round"
            assert len(kept(cache)) <= capacity, f"{name} keeps {len(kept(cache))}, it has room for {capacity}"
            assert kept(cache) <= seen, f"{name} keeps what nobody requested"


def best_possible(steps, capacity, first):
    "The most hits from step `first` on that any choice of what to keep can have, by trying them all."
    reached = {frozenset(): 0}
    for n, step in enumerate(steps):
        for layer, ids in step:
            keys, after = {(layer, e) for e in ids}, {}
            for have, hits in reached.items():
                hits += len(have & keys) * (n >= first)
                for keep in itertools.combinations(sorted(have | keys), min(capacity, len(have | keys))):
                    after[frozenset(keep)] = max(after.get(frozenset(keep), -1), hits)
            reached = after
    return max(reached.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.sets(st.integers(0, 3), min_size=1, max_size=2).map(sorted)] * 2).map(lambda ids: list(zip((1, 2), ids))),
                min_size=1, max_size=5), st.integers(1, 3))
def test_the_clairvoyant_bound_is_the_best_of_all_choices(steps, capacity):
    first = len(steps) // 2
    assert replay(ScoredCache(capacity, next_use(steps, first)), steps, first)[0] == best_possible(steps, capacity, first)


@settings(max_examples=60, deadline=None)
@given(traces, capacities)
def test_nobody_beats_the_clairvoyant(steps, capacity):
    half = len(steps) // 2
    hits = {name: replay(cache, steps, half)[0] for name, cache in caches(steps, capacity).items()}
    assert max(hits.values()) == hits["clairvoyant"], hits


@settings(max_examples=60, deadline=None)
@given(traces, capacities)
def test_lru_is_the_one_everybody_knows(steps, capacity):
    cache, naive = ScoredCache(capacity, last_use), OrderedDict()
    for layer, ids in itertools.chain(*steps):
        hits = {e for e in ids if (layer, e) in naive}
        for e in ids:
            naive[layer, e] = None
            naive.move_to_end((layer, e))
        while len(naive) > capacity:
            naive.popitem(last=False)
        assert cache.request(layer, ids) == hits
        assert kept(cache) == set(naive)


@settings(max_examples=60, deadline=None)
@given(traces, st.sampled_from([0.5, 3.0, 12.0]))
def test_decayed_uses_are_a_sum(steps, half):
    "Against the sum over all uses, each worth 2^(-age/half): which of two experts is better is the same."
    score, uses, now = decayed_uses(half), {}, 0
    values = {}
    for layer, ids in itertools.chain(*steps):
        for e in ids:
            uses.setdefault((layer, e), []).append(now)
            values[layer, e] = score((layer, e), now)
        now += 1
    for key, value in values.items():
        assert abs(value - np.log2(sum(2 ** (use / half) for use in uses[key]))) < 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=1, max_size=3 * HISTORY_BITS), st.integers(0, EXPERTS))
def test_a_share_keeps_the_newest_visits(visits, capacity):
    "Against the list of all visits: newest first decides, then who was there; a use longer ago than VISITS is forgotten."
    share, before = AgingCache(capacity), set()
    for n, ids in enumerate(visits):
        share.request(ids)
        past = [set(v) for v in visits[n::-1]][:HISTORY_BITS]
        ranked = sorted(before.union(ids), key=lambda e: ([e in v for v in past], e in before, -e), reverse=True)
        assert sorted(share.kept) == sorted(ranked[:capacity])
        before = set(share.kept)
        assert set(share._history) == set().union(*past), "a history that is all zero is kept"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=30, unique=True), st.integers(0, 2000))
def test_shares_are_equal_and_add_up(layers, capacity):
    sizes = [LayerCaches(layers, capacity)[layer].capacity for layer in layers]
    assert sum(sizes) == capacity and max(sizes) - min(sizes) <= 1


def test_what_a_pin_knows():
    "One expert of room. The first half asks for 0 most, the second for 1."
    steps = [[(1, [0]), (2, [5])], [(1, [0, 1]), (2, [4])], [(1, [1]), (2, [3])], [(1, [1]), (2, [2])]]
    assert replay(ScoredCache(1, uses_in(steps[:2])), steps, 2) == (0, 4)
    assert replay(ScoredCache(1, uses_in(steps[2:])), steps, 2) == (2, 4)
    rates = hit_rates(steps, [0.5])  # the working set is two experts
    assert rates["honest pin"] == [0] and rates["hindsight pin"] == [0.5] == rates["clairvoyant"]


def recurring(reuse_, steps, layers=30, k=8, experts=64, seed=0):
    "A trace in which a share of each layer's experts stays from step to step."
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(experts, k, replace=False) for _ in range(layers)]
    for _ in range(steps):
        for layer in range(layers):
            keep = chosen[layer][rng.random(k) < reuse_]
            chosen[layer] = np.concatenate([keep, rng.choice(np.setdiff1d(np.arange(experts), keep), k - len(keep), replace=False)])
        yield [(layer, sorted(ids.tolist())) for layer, ids in enumerate(chosen)]


def test_half_a_working_set_is_worth_nothing_to_lru_and_half_the_reuse_to_shares():
    steps = list(recurring(0.4, 60))
    rates = hit_rates(steps, [0.5, 1.0])
    assert abs(reuse(steps) - 0.4) < 0.15 and working_set(steps) == 240
    assert rates["LRU"][0] == 0
    assert rates["shares"][0] > 0.45 * reuse(steps) and rates["shares"][1] >= rates["LRU"][1] > 0.9 * reuse(steps)
    assert rates["shares"][0] > max(rates["honest pin"][0], rates["decayed, 1 step"][0], rates["decayed, 4 steps"][0])


# The running cache

@pytest.mark.parametrize("slots", [3, 4, 9, 15, 27, 39, 60])
def test_the_running_cache_has_the_hits_of_the_replay(tmp_path, slots):
    "The same trace and the same capacity, whatever the readers do: every hit, layer by layer, and no others."
    store, readers = Store(tmp_path), 3
    steps = [[(layer, ids) for layer, ids in step] for step in recurring(0.5, 8, layers=3, k=5, experts=12)]
    experts = Experts(store.extents, Files(), slots, expert_slot_bytes(store.extents(0, 0)), readers, range(3))
    experts.trace = []
    cache, expected = LayerCaches(range(3), max(0, slots - readers)), 0
    for layer, ids in itertools.chain(*steps):
        consume(experts, store, layer, ids, 2)
        expected += len(cache.request(layer, ids))
        assert experts.hits == expected
    experts.close()
    (tmp_path / "trace").write_bytes(packed_trace(experts.trace))
    assert steps_of(read_trace(tmp_path / "trace")) == (steps, 0)
    assert replay(LayerCaches(range(3), max(0, slots - readers)), steps) == (experts.hits, experts.requests)
    assert (experts.hits > 0) == (slots > readers)


def test_the_decoder_has_the_hits_of_the_replay(tmp_path):
    "The embedded model with room for a part of its experts: prompt in one chunk, then steps."
    model = k3lib.load(MODEL, ram="1GB", threads=2, context=16)
    six = model.experts.extents(1, 0)
    model.experts.close()
    model.experts = Experts(model.experts.extents, model.trunk.files, 40, expert_slot_bytes(six), 4, range(1, 13))
    model.experts.trace = []
    list(model.generate([int(i) for i in PROMPT.split(",")][:3], 8))
    (tmp_path / "trace").write_bytes(packed_trace(model.experts.trace))
    steps, _ = steps_of(read_trace(tmp_path / "trace"))
    assert len(steps) == 8 and [layer for layer, _ in steps[0]] == list(range(1, 13)) and working_set(steps) == 48
    assert replay(LayerCaches(range(1, 13), 36), steps) == (model.report.expert_hits, model.report.expert_requests)
    assert model.report.expert_hits > 20
    model.close()


# The file

@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(*[st.lists(st.integers(0, 895), min_size=1, max_size=5)] * 3).map(lambda chosen: list(zip(LAYERS, chosen))), min_size=1, max_size=6))
def test_a_trace_file_gives_back_what_was_requested(tmp_path_factory, passes):
    path = tmp_path_factory.mktemp("trace") / "t"
    path.write_bytes(packed_trace([(layer, e) for one in passes for layer, chosen in one for e in chosen]))
    assert read_trace(path) == passes
    assert path.stat().st_size == 8 * sum(len(chosen) for one in passes for _, chosen in one)


def test_what_is_computed_again_is_replayed_once():
    again = [[(1, [5, 4]), (2, [0, 0])], [(1, [5, 4, 4, 7]), (2, [0, 0, 3, 1])], [(1, [5, 4, 4, 7, 9]), (2, [0, 0, 3, 1, 1])]]
    assert steps_of(again) == ([[(1, [4, 5]), (2, [0])], [(1, [4, 7]), (2, [1, 3])], [(1, [9]), (2, [1])]], 2)
    other = [again[0], [(1, [5, 4, 4, 7]), (2, [3, 1, 0, 0])], [(1, [5, 4]), (2, [0, 0])], again[0]]
    assert steps_of(other) == ([[(layer, sorted({*ids})) for layer, ids in step] for step in other], 0), "one layer that differs, or nothing new"


GOOD = [(1, 7), (1, 3), (2, 0), (5, 1), (1, 4), (2, 5), (5, 1)]


@pytest.mark.parametrize("data, words", [
    (b"", ["ends at byte 0", "8 bytes"]),
    (packed_trace(GOOD)[:-3], ["ends at byte 53", "8 bytes"]),
    (packed_trace(GOOD[:-1]), ["ends at byte 48", "layer 5 is next"]),
    (packed_trace(GOOD[:-2] + [(6, 5), (5, 1)]), ["request 5, at byte 40", "layer 6", "layer 2 is next"]),
    (packed_trace(GOOD + [(7, 0)]), ["request 7, at byte 56", "layer 7", "layer 1 is next"]),
    (packed_trace(GOOD[:3] + [(5, 65536)] + GOOD[4:]), ["request 3, at byte 24", "expert 65536"]),
    (packed_trace([(4, 1), (4, 2)]), ["every request is for layer 4"]),
], ids=["empty", "half a request", "a layer short", "a wrong layer", "one layer more", "no such expert", "one layer"])
def test_a_damaged_trace_is_refused_with_its_place(tmp_path, data, words):
    path = tmp_path / "bad.trace"
    path.write_bytes(data)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    refused(k3("trace", "--replay", path), 2, str(error.value), path, *words)


# The command

def test_a_run_is_recorded_and_replayed(tmp_path):
    file = tmp_path / "run.trace"
    run = k3("trace", MODEL, "--ids", PROMPT, "--max-new-tokens", 6, "--ram", "1GB", "--out", file)
    assert run.returncode == 0 and "generated ids" in run.stdout, run.stderr
    passes = read_trace(file)
    assert len(passes) == 6 and [layer for layer, _ in passes[0]] == list(range(1, 13))
    assert all(len(ids) == 4 for layer, ids in passes[-1])
    run = k3("trace", "--replay", file)
    assert run.returncode == 0 and run.stdout.strip() == replay_text(passes), run.stderr
    of_this_model = k3("trace", MODEL, "--replay", file)
    assert of_this_model.returncode == 0 and of_this_model.stdout != run.stdout
    small = sum(x.nbytes for x in k3lib.Checkpoint(MODEL).expert(1, 0).values())
    assert of_this_model.stdout.strip() == replay_text(passes, small)
    assert len(run.stdout.splitlines()) == 3 + len(CAPACITIES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.trace"]


@pytest.mark.parametrize("args, words", [
    (["--replay", "nothing.trace"], ["nothing.trace", "no such file"]),
    (["--replay", "."], ["is a folder"]),
    (["--ids", "1", "--out", "t"], ["MODEL"]),
    ([MODEL, "--ids", "1"], ["--out"]),
    ([MODEL, "--ids", "1", "--out", "no/t"], ["there is no folder no"]),
    ([MODEL, "--ids", "1", "--out", "."], [".: is a folder"]),
    (["--replay", "t", "--out", "u"], ["--out", "--replay records nothing"]),
    (["", "--ids", "1", "--out", "t"], ["MODEL", "empty"]),
    ([MODEL, "--ids", "1,x", "--out", "t"], ["'x'"]),
])
def test_bad_arguments(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(k3("trace", *args), 2, *words)
    assert not list(tmp_path.iterdir())


def test_a_trace_of_another_model_is_refused(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(packed_trace([(layer, e) for layer in (0, 1) for e in (1, 2)]))
    refused(k3("trace", MODEL, "--replay", path), 2, "expert 1 of layer 0", "another model's")
