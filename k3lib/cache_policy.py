"""5.15 Which experts to keep: policies by replay

Made from book/05_streaming/15_cache_policy.py: edit that, then run `make export`.
"""

import heapq
import itertools
import math
from collections import Counter
from k3lib.trace import steps_of


class ScoredCache:
    """A cache of the `capacity` experts of highest score, over all layers. score(key, now) is asked at each use of key = (layer, e),
    `now` counting the requests, of one layer each, from 0. What is used is admitted only if it is among the best."""

    def __init__(self, capacity, score):
        self.capacity, self.score = capacity, score
        self.now, self._kept, self._heap = 0, {}, []

    def request(self, layer, ids):
        "The set of those of `ids` that were kept until now; then the best are kept."
        hits = {e for e in ids if (layer, e) in self._kept}
        for e in ids:
            value = self._kept[layer, e] = self.score((layer, e), self.now)
            heapq.heappush(self._heap, (value, (layer, e)))
        while len(self._kept) > self.capacity:
            value, key = heapq.heappop(self._heap)
            if self._kept.get(key) == value:  # else an older score of an expert that has been used since, or that has gone
                del self._kept[key]
        self.now += 1
        return hits


def last_use(key, now):
    "LRU."
    return now


def decayed_uses(half):
    "Uses that lose half their weight in `half` requests of a layer each, as a logarithm that need not be touched between uses."
    scores = {}

    def score(key, now):
        before = scores.get(key, -math.inf) - now / half
        scores[key] = now / half + math.log2(1 + 2 ** before)
        return scores[key]
    return score


def uses_in(steps):
    "A pin: the number of uses in `steps`, once and for all."
    uses = Counter((layer, e) for step in steps for layer, ids in step for e in ids)
    return lambda key, now: uses[key]


def next_use(steps, first):
    "The clairvoyant bound for the hits from step `first` on."
    uses, requests = {}, [(n, layer, ids) for n, step in enumerate(steps) for layer, ids in step]
    for now in range(len(requests) - 1, -1, -1):
        n, layer, ids = requests[now]
        for e in ids if n >= first else ():
            uses.setdefault((layer, e), []).append(now)

    def score(key, now):
        mine = uses.get(key, [])
        while mine and mine[-1] <= now:
            mine.pop()
        return -mine[-1] if mine else -math.inf
    return score


def replay(cache, steps, first=0):
    "(hits, requests) of `cache` from step `first` on; the steps before fill it."
    hits = requests = 0
    for n, step in enumerate(steps):
        for layer, ids in step:
            found = len(cache.request(layer, ids))
            if n >= first:
                hits, requests = hits + found, requests + len(ids)
    return hits, requests


HISTORY_BITS = 16  # of its layer that an expert's use is remembered for


class AgingCache:
    "What one layer keeps: the `capacity` experts that its last visits asked for, newest visit first."

    def __init__(self, capacity):
        self.capacity, self.kept = capacity, frozenset()
        self._history = {}  # expert: bit VISITS - 1 is this visit, the one below it the visit before

    def request(self, ids):
        "The set of those of `ids` that were kept until now; then the best are kept."
        before, new = self.kept, 1 << HISTORY_BITS - 1
        history = {e: bits >> 1 for e, bits in self._history.items() if bits > 1}
        history.update([(e, history.get(e, 0) | new) for e in ids])
        best = sorted(before.union(ids), key=lambda e: (history.get(e, 0), e in before, -e), reverse=True)
        self.kept, self._history = frozenset(best[:self.capacity]), history
        return before.intersection(ids)

    def forget(self, e):
        "Expert `e` could not be kept after all."
        self.kept -= {e}


class LayerCaches:
    "A cache of `capacity` experts in which each of `layers` has an equal share: the one that Experts uses."

    def __init__(self, layers, capacity):
        layers, n = sorted(layers), len(layers)
        self._of = {layer: AgingCache(capacity * (i + 1) // n - capacity * i // n) for i, layer in enumerate(layers)}

    def __getitem__(self, layer):
        return self._of[layer]

    def request(self, layer, ids):
        "The set of those of `ids` that were kept until now; then the best are kept."
        return self._of[layer].request(ids)


CAPACITIES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # of a working set


EXPERT_BYTES = 17_547_264  # in the released model


def policies(steps):
    "{name: capacity -> cache} for a replay of `steps` whose second half is counted."
    half = len(steps) // 2
    layers = [layer for layer, _ in steps[0]]
    return {
        "LRU": lambda n: ScoredCache(n, last_use),
        "decayed, 1 step": lambda n: ScoredCache(n, decayed_uses(len(layers))),
        "decayed, 4 steps": lambda n: ScoredCache(n, decayed_uses(4 * len(layers))),
        "shares": lambda n: LayerCaches(layers, n),
        "honest pin": lambda n: ScoredCache(n, uses_in(steps[:half])),
        "hindsight pin": lambda n: ScoredCache(n, uses_in(steps[half:])),
        "clairvoyant": lambda n: ScoredCache(n, next_use(steps, half)),
    }


def working_set(steps):
    "Experts that the last step requests, a single token's in a decoding run."
    return sum(len(ids) for _, ids in steps[-1])


def hit_rates(steps, sizes=CAPACITIES):
    "{policy: hit rate in the second half of `steps` for each of `sizes`, in working sets}."
    def rate(make, size):
        hits, requests = replay(make(int(size * working_set(steps))), steps, len(steps) // 2)
        return hits / requests
    return {name: [rate(make, size) for size in sizes] for name, make in policies(steps).items()}


def reuse(steps):
    "Share of the counted steps' requests that the step before has made too."
    pairs = [(set(a), b) for before, now in itertools.pairwise(steps[max(0, len(steps) // 2 - 1):]) for (_, a), (_, b) in zip(before, now)]
    return sum(e in a for a, b in pairs for e in b) / max(1, sum(len(b) for _, b in pairs))


def replay_text(passes, expert_bytes=EXPERT_BYTES):
    "Hit rate against capacity for the passes of a trace, as a table."
    steps, recomputed = steps_of(passes)
    n, rates = working_set(steps), hit_rates(steps)
    head = [f"{len(steps)} steps over {len(steps[0])} layers, {sum(len(ids) for step in steps for _, ids in step):,} requests; the last step's {n:,} are the working set",
            f"{reuse(steps):.0%} of a step's experts were in the step before; hits are counted from step {len(steps) // 2 + 1} on, and the steps before fill the caches"]
    if recomputed:
        head.append(f"{recomputed} steps compute everything before them again: only what they add is replayed")
    rows = [("working sets", "experts", "GB", *rates)]
    for i, size in enumerate(CAPACITIES):
        rows.append((f"{size:g}", f"{int(size * n):,}", f"{int(size * n) * expert_bytes / 1e9:.3g}", *(f"{rate[i]:.3f}" for rate in rates.values())))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join([*head, *("  ".join(word.rjust(width) for word, width in zip(row, widths)) for row in rows)])


__all__ = [
    "ScoredCache", "last_use", "decayed_uses", "uses_in", "next_use", "replay", "HISTORY_BITS", "AgingCache",
    "LayerCaches", "CAPACITIES", "EXPERT_BYTES", "policies", "working_set", "hit_rates", "reuse", "replay_text",
]
