# %% [markdown]
# # 5.14 Which experts a run requested
#
# [5.13 The trunk: rows that arrive](13_trunk.ipynb) ·
# [contents](../README.md) ·
# [5.15 Which experts to keep: policies by replay](15_cache_policy.ipynb)

# %% [markdown]
# The arithmetic is the same every time; what differs is how far the bytes travel. Small pieces pay for their calls,
# large ones leave the cache. Most of all it counts how much memory the experts are spread over: a slot of its own is
# dear for an expert that will not be used again, and where one must be filled, pieces gain little.
#
# ## 5.14.1 A trace
#
# Which experts should stay is no matter of taste: record what a run requests, and replay that through any cache. A
# trace is the plainest of files, pairs of little-endian uint32 `(layer, expert)` in the order of the requests; where
# the layer number falls, a new pass begins. The public recording of the released model that 5.15.2 quotes has the same
# form.

# %% tags=["export"]
from pathlib import Path
import numpy as np

# %% tags=["export"]
MOST_EXPERTS = 1 << 16  # of a layer; a larger number is damage


class TraceError(ValueError):
    "A trace that cannot be replayed: names the file, the place, and what was expected there."


def packed_trace(requests):
    "The bytes of a trace file for `requests`, (layer, expert) pairs in order: two little-endian uint32 each."
    return np.array(requests, "<u4").reshape(-1, 2).tobytes()


def read_trace(path):
    """The passes of a trace file, each a list of (layer, experts), as they were requested.

    Raises FileNotFoundError, and TraceError for a file that ends too early or whose passes do not all walk the layers of the first.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: {'is a folder' if Path(path).is_dir() else 'no such file'}")
    data = Path(path).read_bytes()
    if not data or len(data) % 8:
        raise TraceError(f"{path}: ends at byte {len(data)}, but a trace is whole requests of 8 bytes, at least one")
    layers, experts = np.frombuffer(data, "<u4").reshape(-1, 2).T.astype(np.int64)
    worst = int(experts.argmax())
    if experts[worst] >= MOST_EXPERTS:
        raise TraceError(f"{path}: request {worst}, at byte {8 * worst}, is for expert {experts[worst]}: no layer has {MOST_EXPERTS}")
    ends = [*(np.flatnonzero(np.diff(layers)) + 1).tolist(), len(layers)]
    return _passes(path, [(begin, int(layers[begin]), experts[begin:end].tolist()) for begin, end in zip([0, *ends], ends)], len(data))


def _passes(path, groups, nbytes):
    "`groups`, (first request, layer, experts), cut where a pass begins. Raises TraceError."
    n = next((i for i in range(1, len(groups)) if groups[i][1] < groups[i - 1][1]), len(groups))
    if n == 1:
        raise TraceError(f"{path}: every request is for layer {groups[0][1]}, and where a pass ends is seen only with two layers or more")
    for i, (begin, layer, _) in enumerate(groups):
        if layer != groups[i % n][1]:
            raise TraceError(f"{path}: request {begin}, at byte {8 * begin}, is for layer {layer}: layer {groups[i % n][1]} is next, as in the first pass")
    if len(groups) % n:
        raise TraceError(f"{path}: ends at byte {nbytes}, inside a pass: layer {groups[len(groups) % n][1]} is next")
    return [[(layer, chosen) for _, layer, chosen in groups[i:i + n]] for i in range(0, len(groups), n)]


def steps_of(passes):
    """What a cache is asked for: (steps, number of recomputed passes). A step is a list of (layer, each expert once, ascending).

    A pass that begins, in every layer, with all requests of the pass before and goes on has computed those tokens again, as a
    decoder without state does. Of such a pass only what is new is replayed.
    """
    steps, recomputed = [], 0
    for before, now in zip([None, *passes], passes):
        again = before is not None and all(len(b) > len(a) and b[:len(a)] == a for (_, a), (_, b) in zip(before, now))
        skipped = [len(chosen) for _, chosen in before] if again else [0] * len(now)
        steps.append([(layer, sorted(set(chosen[skip:]))) for (layer, chosen), skip in zip(now, skipped)])
        recomputed += again
    return steps, recomputed
