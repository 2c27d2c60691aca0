# %% [markdown]
# # 5.14 Which experts a run requested
#
# Which experts should stay in memory? The answer depends on which experts a run requests, and in which order. So a run
# can record its requests, and the record can be replayed through caches of any kind and size without the model. This
# chapter defines the record, called a *trace*. At the end you can read a trace by eye, say where a forward pass begins
# in it, and say which of its requests should count.
#
# > **Without it:** each cache size must be tried in a run that reads 25.8 GB<!--claim read--> of experts for each
# > token.
# >
# > **With it:** a token leaves 11.8 kB<!--claim trace--> in the trace, and a replay reads nothing else.
#
# Needs chapter [4.1] (the router). Runs in seconds. Makes `k3lib.trace`.
#
# [5.13 The trunk: rows that arrive](13_trunk.ipynb) ·
# [contents](../README.md) ·
# [5.15 Which experts to keep: policies by replay](15_cache_policy.ipynb)
#
# | word | meaning |
# |---|---|
# | request | one expert of one layer that a forward pass needs |
# | trace | all requests of a run, in order |
# | pass | the requests of one forward pass: for each MoE layer the experts that it requested |
# | step | what a pass requests from a cache: each expert of a layer once |
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
# A trace file consists of pairs of little-endian uint32, `(layer, expert)`, in the order of the requests. It has no
# header, so any program can read it with one line. A run adds the requests of a forward pass to the file when the pass
# has ended ([5.30.3]). The public recording of the released model that [5.15.5] quotes has the same form.
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
# By hand: a first pass of one token, with two MoE layers, 1 and 2. The token requests two experts of each layer. These
# four requests are 32 bytes. For K3 the numbers are larger:

# %%
first_pass = [(1, 7), (1, 3), (2, 0), (2, 5)]
print(packed_trace(first_pass).hex(" ", 4))
assert len(packed_trace(first_pass)) == 32
print(f"a token of K3 reads {92 * 16 * 17_547_264 / 1e9:.1f} GB of experts")  # claim read
print(f"its requests in a trace: {len(packed_trace([(1, 0)] * 92 * 16)) / 1e3:.1f} kB")  # claim trace


# %% [markdown]
# ## 5.14.2 Where a forward pass begins
#
# The file does not mark where a forward pass begins. But the layers of a pass run in ascending order. So where the
# number of the layer becomes smaller, a new pass has begun. This has two consequences. A trace of a single layer cannot
# be divided into passes, and is refused. And every pass must have the same layers as the first one. If it has not, the
# file is damaged, and the error names the place.

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
# By hand, three passes. The second pass reads two tokens, so each layer has four requests, and one expert may be
# requested twice. The third pass reads one token.

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
# Three damaged files are refused, each with the place of the damage: a file that was cut off inside a request, a file
# that was cut off inside a pass, and a file whose third pass has one layer more than the first.

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
# Not every decoder keeps its state between tokens. A decoder without state reads the whole text again for each new
# token. Then each pass repeats all requests of the pass before, in each layer, and adds the requests of the new token.
# If the repeated requests counted, every cache would look better than it is. So `steps_of` removes them.
#
# There is a second kind of repetition. If two tokens of a prompt choose the same expert in the same pass, the expert is
# read once. So a step names each expert of a layer once.

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
# By hand: the second pass begins with all requests of the first, in both layers. So only the last two requests of each
# layer count. The third pass does not begin like the second, so all its requests count.

# %%
steps, repeated = steps_of(passes)
for number, (layers, step) in enumerate(zip(passes, steps), 1):
    print(f"pass {number}:", layers, "->", step)


def check_new_requests(steps):
    "The gate: the second step of the example has only the requests that its pass adds."
    assert steps[1] == [(1, [3, 9]), (2, [6, 7])], f"the second step is {steps[1]}"
    print("the second step has only new requests")


check_new_requests(steps)
assert repeated == 1 and steps[2] == [(1, [3, 4]), (2, [1, 5])]

# %% [markdown]
# A version that only removes equal experts keeps the repeated requests. For a cache they would all be hits:

# %% tags=["raises-exception"]
all_requests = [[(layer, sorted(set(chosen))) for layer, chosen in layers] for layers in passes]  # WRONG
check_new_requests(all_requests)

# %% [markdown]
# ## Summary
#
# - A trace is pairs of uint32, `(layer, expert)`. A pass begins where the number of the layer becomes smaller.
# - A damaged trace is refused, and the error names the byte where the damage begins.
# - If a pass computes earlier tokens again, only the requests that it adds count.
#
# ## Exercises
#
# The answers are in [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. `k3 trace fixtures/oracle13/model --ids 304,5 --out run.trace` records a pass of two tokens. How many bytes will
#    the file have?
# 2. Two passes of one token each request, by chance, the same experts in every layer. Does `steps_of` treat the second
#    one as a repetition? And a pass of two tokens that follows a pass of the first of them alone?
#
# Next: [5.15 Which experts to keep](15_cache_policy.ipynb) replays traces through caches.
