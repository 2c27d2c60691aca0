# %% [markdown]
# # 5.14 Which experts a run requested
#
# Which experts should stay in memory is not a matter of taste: record which experts a run requests, and replay the
# record through any cache. This chapter defines the record. At the end you can read one by eye, and say where a forward
# pass begins in it.
#
# Needs chapter [4.1] (the router). Runs in seconds. Makes `k3lib.trace`.
#
# [5.13 The trunk: rows that arrive](13_trunk.ipynb) ·
# [contents](../README.md) ·
# [5.15 Which experts to keep: policies by replay](15_cache_policy.ipynb)
#
# | word | meaning |
# |---|---|
# | request | one expert of one layer, asked for in a forward pass |
# | trace | all requests of a run, in order |
# | pass | the requests of one forward pass: for each MoE layer the experts that it requested |
# | step | what a cache is asked for in a pass: each expert of a layer once |
#
# [4.1]: ../04_moe_router/01_router.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "experts")

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% tags=["export"]
from os import PathLike
from pathlib import Path

import numpy as np

from k3lib.fileio import MissingFile, UsageError

# %% [markdown]
# ## 5.14.1 Pairs of numbers
#
# A trace file holds nothing but pairs of little-endian uint32, `(layer, expert)`, in the order of the requests. There
# is no header, so that the file can be read by anything. A run adds each forward pass to it when the pass has ended
# ([5.30.3]). The public recording of the released model that [5.15.5] quotes
# has the same form.
#
# [5.30.3]: 30_results.ipynb#5.30.3-Requests-of-experts
# [5.15.5]: 15_cache_policy.ipynb#5.15.5-The-released-model,-eight-steps

# %% tags=["export"]
Pass = list[tuple[int, list[int]]]  # (layer, experts) for each MoE layer, in the order of the requests

MAX_EXPERTS = 1 << 16  # the most that a layer may have; a larger number of an expert is damage
MAX_TRACE_BYTES = 1 << 28  # of a file that is read whole: as Python's lists it takes fifteen times the memory


class TraceError(UsageError):
    "A trace that cannot be replayed. One line: the file, the place, what was found, what was expected."


def packed_trace(requests: list[tuple[int, int]]) -> bytes:
    "The bytes of a trace file for `requests`, (layer, expert) pairs in order: two little-endian uint32 each."
    return np.array(requests, "<u4").reshape(-1, 2).tobytes()


# %% [markdown]
# By hand: two MoE layers, 1 and 2, each asked for two experts by the one token of a first pass. Four requests are
# thirty-two bytes.

# %%
first_pass = [(1, 7), (1, 3), (2, 0), (2, 5)]
print(packed_trace(first_pass).hex(" ", 4))
assert len(packed_trace(first_pass)) == 32


# %% [markdown]
# ## 5.14.2 Where a forward pass begins
#
# The file does not say where a forward pass begins. It need not: layers run in ascending order, so where the layer
# number falls, a new pass has begun. Two things follow. A trace of a single layer cannot be divided into passes. And
# every pass must have the same layers as the first. A pass with other layers is damage, and its place can be named.

# %% tags=["export"]
def read_trace(path: str | PathLike) -> list[Pass]:
    """The passes of a trace file, each a list of (layer, experts), in the order of the requests.

    Raises MissingFile if there is no such file. Raises TraceError if the file ends too early or is too long, if an
    expert's number is too large, or if a pass has other layers than the first.
    """
    if not Path(path).is_file():
        raise MissingFile(f"{path}: {'is a folder' if Path(path).is_dir() else 'no such file'}")
    if (size := Path(path).stat().st_size) > MAX_TRACE_BYTES:
        raise TraceError(f"{path}: {size:,} bytes, expected {MAX_TRACE_BYTES:,} at most: replay the first passes alone")
    data = Path(path).read_bytes()
    if not data or len(data) % 8:
        raise TraceError(f"{path}: ends at byte {len(data)}, but a trace is whole requests of 8 bytes, at least one")
    layers, experts = np.frombuffer(data, "<u4").reshape(-1, 2).T.astype(np.int64)
    largest = int(experts.argmax())
    if experts[largest] >= MAX_EXPERTS:
        raise TraceError(f"{path}: request {largest}, at byte {8 * largest}, is for expert {experts[largest]}: "
                         f"no layer has more than {MAX_EXPERTS} experts")
    ends = [*(np.flatnonzero(np.diff(layers)) + 1).tolist(), len(layers)]
    groups = [(begin, int(layers[begin]), experts[begin:end].tolist()) for begin, end in zip([0, *ends], ends)]
    return _passes(path, groups, len(data))


def _passes(path, groups, nbytes):
    "Divide `groups`, (number of its first request, layer, experts) each, into passes. Raises TraceError."
    n = next((i for i in range(1, len(groups)) if groups[i][1] < groups[i - 1][1]), len(groups))  # layers of a pass
    if n == 1:
        raise TraceError(f"{path}: every request is for layer {groups[0][1]}, "
                         "but only two layers or more show where a pass ends")
    for i, (begin, layer, _) in enumerate(groups):
        if layer != groups[i % n][1]:
            raise TraceError(f"{path}: request {begin}, at byte {8 * begin}, is for layer {layer}: "
                             f"layer {groups[i % n][1]} is next, as in the first pass")
    if len(groups) % n:
        raise TraceError(f"{path}: ends at byte {nbytes}, inside a pass: layer {groups[len(groups) % n][1]} is next")
    return [[(layer, chosen) for _, layer, chosen in groups[i:i + n]] for i in range(0, len(groups), n)]


# %% [markdown]
# By hand, three passes. The second one reads two tokens, so each layer has four requests, one expert perhaps twice. The
# third reads one token.

# %%
by_hand = [*first_pass,
           (1, 7), (1, 3), (1, 3), (1, 9), (2, 0), (2, 5), (2, 6), (2, 7),
           (1, 4), (1, 3), (2, 5), (2, 1)]
folder = tempfile.TemporaryDirectory()
file = Path(folder.name) / "trace"
file.write_bytes(packed_trace(by_hand))
passes = read_trace(file)
for number, layers in enumerate(passes, 1):
    print(f"pass {number}:", layers)
assert [(layer, e) for layers in passes for layer, chosen in layers for e in chosen] == by_hand

# %%
fig, ax = plt.subplots(figsize=(6, 2.2))
ax.plot([layer for layer, _ in by_hand], "o", drawstyle="steps-mid", ls="-", lw=0.8)
for i, (layer, e) in enumerate(by_hand):
    ax.annotate(str(e), (i, layer), (0, 5), textcoords="offset points", ha="center", fontsize=8)
for begin in np.flatnonzero(np.diff([layer for layer, _ in by_hand]) < 0) + 0.5:
    ax.axvline(begin, color="C1", ls="--")
ax.set(xlabel="request, with the number of its expert", ylabel="layer", yticks=(1, 2), ylim=(0.7, 2.5),
       title="Where the layer number falls (dashed), a new pass has begun")
plt.show()

# %% [markdown]
# Three kinds of damage, each reported with its place: the file cut inside a request, the file cut inside a pass, a
# third pass with one layer more than the first.

# %%
for damage, data in (("inside a request", packed_trace(by_hand)[:-5]), ("inside a pass", packed_trace(by_hand[:-2])),
                     ("one layer more", packed_trace([*by_hand, (3, 0)]))):
    file.write_bytes(data)
    try:
        read_trace(file)
    except TraceError as error:
        print(f"{damage}: {str(error).replace(folder.name, '...')}")
    else:
        raise AssertionError(f"{damage}: read without an error")
folder.cleanup()


# %% [markdown]
# ## 5.14.3 What is computed again counts once
#
# Not every recording comes from a decoder that keeps its state. A decoder without state reads the whole text again for
# each new token, so each of its passes repeats all requests of the pass before, layer by layer, and then adds those of
# the new token. A cache should be judged by the new ones: `steps_of` removes the repeated requests. A prompt of several
# tokens, or one expert chosen by two tokens, also counts once: a step names each expert once a layer.

# %% tags=["export"]
def steps_of(passes: list[Pass]) -> tuple[list[Pass], int]:
    """What a cache is asked for: (steps, number of passes that repeat the one before).

    A step is a list of (layer, its experts, each once, ascending). A pass repeats the one before if in every layer it
    begins with all of that pass's requests and then has more. Only the new requests of such a pass are in the step.
    """
    steps, repeated = [], 0
    for before, now in zip([[], *passes], passes):
        repeats = before != [] and all(len(b) > len(a) and b[:len(a)] == a for (_, a), (_, b) in zip(before, now))
        skipped = [len(chosen) for _, chosen in before] if repeats else [0] * len(now)
        steps.append([(layer, sorted(set(chosen[skip:]))) for (layer, chosen), skip in zip(now, skipped)])
        repeated += repeats
    return steps, repeated


# %% [markdown]
# By hand: the second pass begins with all requests of the first, in both layers, so only the last two of each layer
# count. The third does not begin as the second did: it is the pass of a decoder with state.

# %%
steps, repeated = steps_of(passes)
for number, (layers, step) in enumerate(zip(passes, steps), 1):
    print(f"pass {number}:", layers, "->", step)
assert repeated == 1 and steps[1] == [(1, [3, 9]), (2, [6, 7])] and steps[2] == [(1, [3, 4]), (2, [1, 5])]

# %% [markdown]
# ## Summary
#
# - A trace is pairs of uint32, `(layer, expert)`. A pass begins where the layer number falls.
# - A damaged trace is refused with the byte at which it stops making sense.
# - A pass that computes earlier tokens again counts only with what it adds.
#
# ## Exercises
#
# 1. Record the embedded model with `k3 trace fixtures/oracle13/model --ids 304,5 --out run.trace`. How many bytes must
#    the file have, before you look?
# 2. Two passes of one token each, by chance with the same experts in every layer: does `steps_of` call the second a
#    repetition? And a prompt chunk of two tokens after a pass of the first of them alone?
#
# Next: [5.15 Which experts to keep](15_cache_policy.ipynb) replays traces through caches.
