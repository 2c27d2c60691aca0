"k3lib.cache_policy: a cache hits what it holds, the bound is a bound, each policy is what its name says."
import itertools
import math
from collections import OrderedDict

import pytest
from common import recurring
from hypothesis import example, given, settings
from hypothesis import strategies as st

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

LAYERS, EXPERTS = (2, 3, 7), 6
requests = st.sets(st.integers(0, EXPERTS - 1), min_size=1).map(sorted)
traces = st.lists(st.tuples(*[requests] * len(LAYERS)).map(lambda ids: list(zip(LAYERS, ids))), min_size=1, max_size=12)
capacities = st.integers(0, len(LAYERS) * EXPERTS + 1)
two_layers = st.tuples(*[st.sets(st.integers(0, 3), min_size=1, max_size=2).map(sorted)] * 2)


def caches(steps, capacity):
    return {name: make(capacity) for name, make in policies(steps).items()}


def cached(cache):
    "The (layer, e) that a cache holds."
    if isinstance(cache, LayerCaches):
        return {(layer, e) for layer in LAYERS for e in cache[layer].cached}
    return cache.cached


@settings(max_examples=60)
@given(traces, capacities)
def test_every_cache_holds_no_more_than_it_can_and_only_what_was_requested(steps, capacity):
    "And hits exactly what it held."
    for name, cache in caches(steps, capacity).items():
        seen = set()
        for layer, ids in itertools.chain(*steps):
            before = cached(cache)
            hits = cache.request(layer, ids)
            seen |= {(layer, e) for e in ids}
            assert {(layer, e) for e in hits} == before & {(layer, e) for e in ids}, f"{name}: hits it did not hold"
            assert len(cached(cache)) <= capacity, f"{name} holds {len(cached(cache))}, it has room for {capacity}"
            assert cached(cache) <= seen, f"{name} holds an expert that was never requested"


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


@settings(max_examples=60)
@given(st.lists(two_layers.map(lambda ids: list(zip((1, 2), ids))), min_size=1, max_size=5), st.integers(1, 3))
def test_the_clairvoyant_bound_is_the_best_of_all_choices(steps, capacity):
    first = len(steps) // 2
    hits, _ = replay(ScoredCache(capacity, next_use(steps, first)), steps, first)
    assert hits == best_possible(steps, capacity, first)


@settings(max_examples=60)
@given(traces, capacities)
def test_no_policy_beats_the_clairvoyant(steps, capacity):
    half = len(steps) // 2
    hits = {name: replay(cache, steps, half)[0] for name, cache in caches(steps, capacity).items()}
    assert max(hits.values()) == hits["clairvoyant"], hits


@settings(max_examples=60)
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
        assert cache.cached == set(naive)


@settings(max_examples=60)
@given(traces, st.sampled_from([0.5, 3.0, 12.0]))
def test_decayed_uses_are_a_sum(steps, half):
    "Against the sum over all uses, each worth 2^(-age/half): which of two experts is better is the same."
    score, uses, values = decayed_uses(half), {}, {}
    for now, (layer, ids) in enumerate(itertools.chain(*steps)):
        for e in ids:
            uses.setdefault((layer, e), []).append(now)
            values[layer, e] = score((layer, e), now)
    for key, value in values.items():
        assert abs(value - math.log2(sum(2 ** (use / half) for use in uses[key]))) < 1e-9


@settings(max_examples=60)
@given(st.lists(requests, min_size=1, max_size=3 * HISTORY_BITS), st.integers(0, EXPERTS))
@example([[1], *[[0, 1]] * HISTORY_BITS], 1)  # in the end equals: the one that is cached stays
@example([[3], *[[4]] * HISTORY_BITS], 2)  # in the end 3 is forgotten
def test_aging_keeps_the_newest_requests(visits, capacity):
    "Against the list of all requests: newest first decides, then what was cached; what is too long ago is forgotten."
    cache, before = AgingCache(capacity), set()
    for n, ids in enumerate(visits):
        hits = cache.request(ids)
        past = [set(v) for v in visits[n::-1]][:HISTORY_BITS]
        ranked = sorted(before.union(ids), key=lambda e: ([e in v for v in past], e in before, -e), reverse=True)
        assert hits == before.intersection(ids)
        assert sorted(cache.cached) == sorted(ranked[:capacity])
        before = set(cache.cached)
        assert set(cache.history) == set().union(*past), "a history that is all zero is kept"


def test_an_expert_that_could_not_be_read_is_no_hit():
    cache = AgingCache(2)
    cache.request([1, 2])
    cache.forget(1)
    assert cache.cached == {2} and cache.request([1, 2]) == {2}
    cache.forget(5)
    assert cache.cached == {1, 2}


@settings(max_examples=50)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=30, unique=True), st.integers(0, 2000))
def test_layers_have_equal_parts_that_add_up(layers, capacity):
    sizes = [LayerCaches(layers, capacity)[layer].capacity for layer in layers]
    assert sum(sizes) == capacity and max(sizes) - min(sizes) <= 1


def test_no_layer_takes_from_another():
    caches = LayerCaches([1, 2], 2)
    assert [caches.request(layer, [e]) for layer, e in ((1, 5), (2, 5), (2, 6), (2, 7), (1, 5))] == [set()] * 4 + [{5}]


def test_what_a_pin_knows():
    "One expert of room. The first half asks for 0 most, the second for 1."
    steps = [[(1, [0]), (2, [5])], [(1, [0, 1]), (2, [4])], [(1, [1]), (2, [3])], [(1, [1]), (2, [2])]]
    assert replay(ScoredCache(1, uses_in(steps[:2])), steps, 2) == (0, 4)
    assert replay(ScoredCache(1, uses_in(steps[2:])), steps, 2) == (2, 4)
    rates = hit_rates(steps, [0.5])  # the working set is two experts
    assert rates["honest pin"] == [0] and rates["hindsight pin"] == [0.5] == rates["clairvoyant"]


def test_half_a_working_set_is_worth_nothing_to_lru_and_half_the_reuse_to_aging():
    steps = list(recurring(0.4, 60))
    rates = hit_rates(steps, [0.5, 1.0])
    assert abs(reuse(steps) - 0.4) < 0.15 and working_set(steps) == 240
    assert rates["LRU"][0] == 0
    assert rates["aging"][0] > 0.45 * reuse(steps) and rates["aging"][1] >= rates["LRU"][1] > 0.9 * reuse(steps)
    assert rates["aging"][0] > max(rates[name][0] for name in ("honest pin", "decayed, 1 step", "decayed, 4 steps"))


@pytest.mark.parametrize("repeats", [False, True])
def test_the_table_by_hand(repeats):
    """Two layers, four steps that request the same: with room for all of a step every policy hits everything.

    With half the room, whatever counts time by all requests evicts the layer that comes next; the others keep a half.
    """
    passes = [[(1, [4, 9] * (n + 1 if repeats else 1)), (2, [3, 5] * (n + 1 if repeats else 1))] for n in range(4)]
    head, about, *rest = replay_text(passes, 10**9).splitlines()
    assert head == "4 steps over 2 layers, 16 requests; the last step's 4 are the working set"
    assert about.startswith("100% of a step's experts were in the step before; hits are counted from step 3 on")
    assert rest[0].startswith("3 steps compute everything before them again") == repeats
    names, *rows = rest[repeats:]
    assert names.split("  ")[-1].strip() == "clairvoyant" and len(rows) == len(CAPACITIES)
    assert rows[2].split() == ["0.5", "2", "2", *["0.000"] * 3, *["0.500"] * 4]
    assert rows[4].split() == ["1", "4", "4", *["1.000"] * 7]
