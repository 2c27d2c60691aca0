# %% [markdown]
# # 5.15 Which experts to keep: policies by replay
#
# [5.14 Which experts a run requested](14_trace.ipynb) ·
# [contents](../README.md) ·
# [5.16 Experts: fetched when the router has spoken](16_experts.ipynb)

# %% [markdown]
# By hand: two layers, three passes. The second pass has read the first token again; the third is an incremental one.

# %%
by_hand = [(1, 7), (1, 3), (2, 0), (2, 5), (1, 7), (1, 3), (1, 3), (1, 9), (2, 0), (2, 5), (2, 6), (2, 7), (1, 4), (1, 3), (2, 5), (2, 1)]
(folder / "trace").write_bytes(packed_trace(by_hand))
for was, step in zip(read_trace(folder / "trace"), steps_of(read_trace(folder / "trace"))[0]):
    print(was, "->", step)
assert [pair for step in read_trace(folder / "trace") for layer, chosen in step for pair in zip([layer] * 9, chosen)] == by_hand
for damage, data in (("cut", packed_trace(by_hand)[:-5]), ("cut", packed_trace(by_hand[:-2])), ("one layer more", packed_trace(by_hand + [(3, 0)]))):
    (folder / "trace").write_bytes(data)
    try:
        read_trace(folder / "trace")
    except TraceError as error:
        print(damage, "-", str(error).replace(str(folder), "..."))

# %% [markdown]
# ## 5.15.1 Caches as scores
#
# A request meets what is resident: those are its hits. Then, of what was resident and what has now been read, a cache
# keeps the experts it likes best, and the policy is in that liking alone. Newly read ones may be refused: they pass
# through. Four likings, one cache:
#
# | policy | an expert's score | knows |
# |---|---|---|
# | LRU | time of its last use | the past |
# | decayed frequency | its uses, halved every so many steps | the past |
# | pin | its uses in some steps; it never changes | those steps, beforehand |
# | clairvoyant | minus the time of its next use | the future: no policy has more hits (Belady) |
#
# Scores change only with a use, so a heap finds the worst in $\log n$.

# %% tags=["export"]
import heapq
import itertools
import math
from collections import Counter
from k3lib.trace import steps_of


# %% tags=["export"]
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


# %% [markdown]
# None of the first three knows that layers take turns. When layer 5 has been read, what is resident of layer 6 is a
# whole step old, and it is exactly what is asked for next; by any clock that counts requests it looks oldest, and goes
# first. Time should be counted for each layer by its own visits. Then there is nothing to compare between layers: each
# has an equal share of the slots, and in it the experts that its last visits asked for, newest first. That is a shift
# register an expert.
#
# By hand: 1100 was asked for at this visit and the one before, 1000 only now, 0111 at the three before. They stay in
# this order, and of equals the one that is there already.

# %% tags=["export"]
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


# %%
share = AgingCache(2)
for ids in ([1, 2], [1, 3], [3, 4], [4], [4, 2]):
    hits = share.request(ids)
    print(f"asked for {ids}: {len(hits)} hits; keeps {sorted(share.kept)}; history", {e: f"{bits >> HISTORY_BITS - 4:04b}" for e, bits in sorted(share._history.items())})
assert share.kept == {2, 4}

# %% [markdown]
# ## 5.15.2 Which one: the replay
#
# The first half of the steps fills the caches, the second is counted. An honest pin knows the first half, as anyone
# would at that point; a pin with hindsight knows the half that is counted. The clairvoyant has its future in that half
# too. Sizes are given as shares of what one token requests.

# %% tags=["export"]
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


# %% [markdown]
# The public test data of the C engine *kimi-k3-in-c* (Apache-2.0) hold a real trace: a prompt of 5 tokens and 7 steps
# through the released 93-layer model. It is not part of this repository. That engine computed the whole prefix anew at
# every step, so only what each pass adds counts: 15,986 requests. 43% of a token's experts were requested by the token
# before (other engines report 29% for longer texts). Who has the file gets these figures, and the columns left out
# here, with `k3 trace --replay expert_trace.bin`:
#
# | working sets | GB | LRU | decayed, 4 steps | shares | honest pin | hindsight pin | clairvoyant |
# |---|---|---|---|---|---|---|---|
# | 0.1 | 2.58 | 0.000 | 0.020 | **0.068** | 0.068 | 0.100 | 0.100 |
# | 0.25 | 6.46 | 0.000 | 0.104 | **0.152** | 0.145 | 0.215 | 0.250 |
# | 0.5 | 12.9 | 0.000 | 0.202 | **0.267** | 0.209 | 0.354 | 0.433 |
# | 0.75 | 19.4 | 0.000 | 0.301 | **0.362** | 0.266 | 0.465 | 0.508 |
# | 1 | 25.8 | 0.435 | 0.347 | **0.435** | 0.319 | 0.519 | 0.571 |
# | 1.25 | 32.3 | 0.435 | 0.380 | **0.464** | 0.340 | 0.565 | 0.633 |
# | 1.5 | 38.7 | 0.461 | 0.392 | **0.485** | 0.356 | 0.594 | 0.645 |
# | 2 | 51.7 | 0.508 | 0.515 | **0.525** | 0.378 | 0.637 | 0.645 |
# | 3 | 77.5 | 0.556 | 0.564 | **0.569** | 0.437 | 0.645 | 0.645 |
#
# Shares are the best of those that do not know the future, at every size, and no honest pin beats them. So that is what
# `Experts` does. Eight steps are few: a longer recording may move the columns, and the command is there.
#
# What can be run here is a made-up trace with the statistic that matters most. In the recording the expert a router
# likes best is requested again by the next token in 74% of the cases, the sixteenth in 23%, in between about evenly
# less:

# %%
STAYS = np.linspace(0.74, 0.23, 16)  # by the router's rank, as in the recording


def made_up(layers, experts, steps, seed):
    "Steps of (layer, experts): those that stay keep their order and are joined by random others, at the lower ranks."
    rng = np.random.default_rng(seed)
    ranked = [rng.choice(experts, 16, replace=False) for _ in range(layers)]
    for _ in range(steps):
        for layer in range(layers):
            stay = ranked[layer][rng.random(16) < STAYS]
            ranked[layer] = np.concatenate([stay, rng.choice(np.setdiff1d(np.arange(experts), stay), 16 - len(stay), replace=False)])
        yield [(layer + 1, sorted(chosen.tolist())) for layer, chosen in enumerate(ranked)]


trace = list(made_up(92, 896, steps, seed))
print(replay_text(trace))
rates = hit_rates(trace)
assert all(rates["shares"][i] >= max(rates[name][i] for name in ("LRU", "decayed, 1 step", "decayed, 4 steps", "honest pin")) for i in range(len(CAPACITIES)))

# %%
RELEASED = {  # from the table above
    "LRU": (0, 0, 0, 0, 0.435, 0.435, 0.461, 0.508, 0.556),
    "decayed, 4 steps": (0.020, 0.104, 0.202, 0.301, 0.347, 0.380, 0.392, 0.515, 0.564),
    "shares": (0.068, 0.152, 0.267, 0.362, 0.435, 0.464, 0.485, 0.525, 0.569),
    "honest pin": (0.068, 0.145, 0.209, 0.266, 0.319, 0.340, 0.356, 0.378, 0.437),
    "hindsight pin": (0.100, 0.215, 0.354, 0.465, 0.519, 0.565, 0.594, 0.637, 0.645),
    "clairvoyant": (0.100, 0.250, 0.433, 0.508, 0.571, 0.633, 0.645, 0.645, 0.645),
}
LAYERS, K = 92, 16
TRUNK, WORKING_SET = 108.8, LAYERS * K * EXPERT_BYTES / 1e9
STYLES = {"LRU": "C3s-", "decayed, 4 steps": "C4v-", "shares": "C0o-", "honest pin": "C1^-", "hindsight pin": "C1^:", "clairvoyant": "k--"}
fig, axes = plt.subplots(1, 2, figsize=(7.5, 3.4), sharey=True)
for ax, curves, title in zip(axes, (RELEASED, rates), ("the released model, 8 steps", "made up, same reuse by rank")):
    for name, style in STYLES.items():
        ax.plot(np.array(CAPACITIES) * WORKING_SET, curves[name], style, ms=3.5, label=name)
    ax.axvline(WORKING_SET, color="0.7", lw=1, zorder=0)
    ax.set(xlabel="memory for experts, GB", title=title)
axes[0].set(ylabel="hit rate")
axes[0].legend(fontsize=7, loc="lower right")
fig.suptitle("Below one token's experts (grey line) an LRU keeps nothing, shares about 60% of what can be kept", fontsize=10)
plt.show()

# %% [markdown]
# The distance to the dashed line is what only the future tells. What a choice costs: a request of sixteen experts, with
# half a working set resident, and with three.

# %% tags=["nbval-ignore-output"]
for size in (0.5, 3.0):
    cache = LayerCaches(range(1, LAYERS + 1), int(size * LAYERS * K))
    began = time.perf_counter()
    replay(cache, trace)
    print(f"{size} working sets: {(time.perf_counter() - began) / len(trace) * 1e3:.1f} ms a token for its {LAYERS} choices")
