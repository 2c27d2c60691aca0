"""5.15 Which experts to keep: policies by replay

Made from book/05_streaming/15_cache_policy.py: edit that, then run `make export`.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable

from k3lib.trace import Pass, steps_of


Key = tuple[int, int]  # (layer, expert)
Score = Callable[[Key, int], float]


class ScoredCache:
    """A cache of the `capacity` experts of highest score, over all layers.

    score(key, now) is called at each use of an expert, key = (layer, e). A request is for experts of one layer, and
    `now` is the number of requests before this one.
    """

    def __init__(self, capacity: int, score: Score):
        self.capacity, self.score, self.now = capacity, score, 0
        self._scores: dict[Key, float] = {}  # of the cached experts
        self._heap: list[tuple[float, Key]] = []  # these scores, and older ones that have been replaced

    @property
    def cached(self) -> set[Key]:
        "The experts in the cache, as (layer, e)."
        return set(self._scores)

    def request(self, layer: int, ids: Iterable[int]) -> set[int]:
        "The set of those of `ids` that are cached. After that, choose anew which experts are cached."
        hits = {e for e in ids if (layer, e) in self._scores}
        for e in ids:
            value = self._scores[layer, e] = self.score((layer, e), self.now)
            heapq.heappush(self._heap, (value, (layer, e)))
        while len(self._scores) > self.capacity:
            value, key = heapq.heappop(self._heap)
            if self._scores.get(key) == value:  # else an older score, or the expert has been evicted already
                del self._scores[key]
        self.now += 1
        return hits


def last_use(key: Key, now: int) -> int:
    "The score of LRU."
    return now


def decayed_uses(half: float) -> Score:
    "The score of uses that lose half their weight in `half` requests: log2 of the sum of 2^(time of use / half)."
    scores: dict[Key, float] = {}

    def score(key, now):
        before = scores.get(key, -math.inf) - now / half
        scores[key] = now / half + math.log2(1 + 2 ** before)
        return scores[key]
    return score


def uses_in(steps: list[Pass]) -> Score:
    "The score of a pin: the number of uses in `steps`."
    uses = Counter((layer, e) for step in steps for layer, ids in step for e in ids)
    return lambda key, now: uses[key]


def next_use(steps: list[Pass], first: int) -> Score:
    "The clairvoyant score: the negative time of the next use. It gives the most hits possible from step `first` on."
    uses: dict[Key, list[int]] = {}
    requests = [(n, layer, ids) for n, step in enumerate(steps) for layer, ids in step]
    for now in range(len(requests) - 1, -1, -1):
        n, layer, ids = requests[now]
        for e in ids if n >= first else ():
            uses.setdefault((layer, e), []).append(now)

    def score(key, now):
        later = uses.get(key, [])
        while later and later[-1] <= now:
            later.pop()
        return -later[-1] if later else -math.inf
    return score


HISTORY_BITS = 16  # requests of its layer for which an expert's use is remembered


class AgingCache:
    """A cache of `capacity` experts of one layer: those that its last requests named, newest request first.

    `cached`: the experts in the cache.
    """

    def __init__(self, capacity: int):
        self.capacity, self.cached = capacity, frozenset[int]()
        self._history: dict[int, int] = {}  # expert: highest bit for the last request, next for the one before

    @property
    def history(self) -> dict[int, int]:
        "{expert: bits}, one for each of the last HISTORY_BITS requests, the newest highest: 1 if it named the expert."
        return dict(self._history)

    def request(self, ids: Iterable[int]) -> frozenset[int]:
        "The set of those of `ids` that are cached. After that, choose anew which experts are cached."
        before, newest = self.cached, 1 << HISTORY_BITS - 1
        history = {e: bits >> 1 for e, bits in self._history.items() if bits > 1}
        history.update([(e, history.get(e, 0) | newest) for e in ids])
        best = sorted(before.union(ids), key=lambda e: (history.get(e, 0), e in before, -e), reverse=True)
        self.cached, self._history = frozenset(best[:self.capacity]), history
        return before.intersection(ids)

    def forget(self, e: int) -> None:
        "Take expert `e` out of the cache: it could not be read."
        self.cached -= {e}


class LayerCaches:
    "A cache of `capacity` experts, an equal part of it for each of `layers`. This is the policy of Experts (5.16)."

    def __init__(self, layers: Iterable[int], capacity: int):
        layers = sorted(layers)
        n, ends = len(layers), range(len(layers) + 1)
        self._of = {layer: AgingCache(capacity * (i + 1) // n - capacity * i // n) for layer, i in zip(layers, ends)}

    def __getitem__(self, layer: int) -> AgingCache:
        return self._of[layer]

    def request(self, layer: int, ids: Iterable[int]) -> frozenset[int]:
        "As AgingCache.request, for one layer."
        return self._of[layer].request(ids)


CAPACITIES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)  # working sets
EXPERT_BYTES = 17_547_264  # in the released model

Cache = ScoredCache | LayerCaches


def replay(cache: Cache, steps: list[Pass], first: int = 0) -> tuple[int, int]:
    "(hits, requested experts) of `cache` from step `first` on. The steps before only fill it."
    hits = requests = 0
    for n, step in enumerate(steps):
        for layer, ids in step:
            found = len(cache.request(layer, ids))
            if n >= first:
                hits, requests = hits + found, requests + len(ids)
    return hits, requests


def policies(steps: list[Pass]) -> dict[str, Callable[[int], Cache]]:
    "{name: capacity -> cache} for a replay of `steps` whose second half is counted."
    half = len(steps) // 2
    layers = [layer for layer, _ in steps[0]]
    return {
        "LRU": lambda n: ScoredCache(n, last_use),
        "decayed, 1 step": lambda n: ScoredCache(n, decayed_uses(len(layers))),
        "decayed, 4 steps": lambda n: ScoredCache(n, decayed_uses(4 * len(layers))),
        "aging": lambda n: LayerCaches(layers, n),
        "honest pin": lambda n: ScoredCache(n, uses_in(steps[:half])),
        "hindsight pin": lambda n: ScoredCache(n, uses_in(steps[half:])),
        "clairvoyant": lambda n: ScoredCache(n, next_use(steps, half)),
    }


def working_set(steps: list[Pass]) -> int:
    "The number of experts that the last step requests: in a decoding run, those of a single token."
    return sum(len(ids) for _, ids in steps[-1])


def hit_rates(steps: list[Pass], sizes: Iterable[float] = CAPACITIES) -> dict[str, list[float]]:
    "{policy: its hit rate in the second half of `steps` for each of `sizes`, in working sets}."
    def rate(make, size):
        hits, requests = replay(make(int(size * working_set(steps))), steps, len(steps) // 2)
        return hits / requests
    return {name: [rate(make, size) for size in sizes] for name, make in policies(steps).items()}


def reuse(steps: list[Pass]) -> float:
    "The share of requests of the second half of `steps` that the step before has made too."
    pairs = [(set(a), b) for before, now in itertools.pairwise(steps[max(0, len(steps) // 2 - 1):])
             for (_, a), (_, b) in zip(before, now)]
    return sum(e in a for a, b in pairs for e in b) / max(1, sum(len(b) for _, b in pairs))


def replay_text(passes: list[Pass], expert_bytes: int = EXPERT_BYTES) -> str:
    "A table of hit rate against capacity for the passes of a trace. `expert_bytes`: bytes of one expert, for its GB."
    steps, repeated = steps_of(passes)
    n, rates = working_set(steps), hit_rates(steps)
    requests = sum(len(ids) for step in steps for _, ids in step)
    head = [f"{len(steps)} steps over {len(steps[0])} layers, {requests:,} requests; "
            f"the last step's {n:,} are the working set",
            f"{reuse(steps):.0%} of a step's experts were in the step before; "
            f"hits are counted from step {len(steps) // 2 + 1} on, and the steps before fill the caches"]
    if repeated:
        head.append(f"{repeated} steps compute everything before them again: only what they add is replayed")
    rows = [("working sets", "experts", "GB", *rates)]
    for i, size in enumerate(CAPACITIES):
        capacity = int(size * n)
        rows.append((f"{size:g}", f"{capacity:,}", f"{capacity * expert_bytes / 1e9:.3g}",
                     *(f"{rate[i]:.3f}" for rate in rates.values())))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join([*head, *("  ".join(word.rjust(width) for word, width in zip(row, widths)) for row in rows)])


__all__ = [
    "Key", "Score", "ScoredCache", "last_use", "decayed_uses", "uses_in", "next_use", "HISTORY_BITS", "AgingCache",
    "LayerCaches", "CAPACITIES", "EXPERT_BYTES", "Cache", "replay", "policies", "working_set", "hit_rates", "reuse",
    "replay_text",
]
