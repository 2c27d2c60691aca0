# %% [markdown]
# # 5.4 Experts: fetched when the router has spoken
#
# 1.446 TB of K3 are routed experts, and a token uses 1,472 of the 82,432: sixteen a layer, named by the router a moment before
# they are needed. This chapter fetches them while other arithmetic goes on, keeps what it can, and shows how little that is.
# At the end you can say what a byte of expert cache is worth.
#
# [5.3 The trunk](03_trunk.ipynb) · [contents](../README.md) · [5.5 The walk](05_model.ipynb)
#
# | word | meaning | in K3 |
# |---|---|---|
# | expert | six tensors, packed weights and scales of $w_1, w_2, w_3$ | 17,547,264 bytes |
# | working set | what one token requests | 16 x 92 experts, 25.8 GB |
# | slot | memory for one expert | |
# | hit | an expert that was resident *before* it was requested | |

# %%
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"

# %% tags=["export"]
import threading
import time
from collections import OrderedDict, deque

from k3lib.moe import Expert
from k3lib.trunk import aligned, widened

# %% [markdown]
# ## 5.4.1 One expert, as few reads as its layout allows
#
# In the released files the six tensors of an expert lie side by side, so one read brings them. Nothing promises that for other
# files: extents are sorted and grouped into runs of adjacent bytes, one read a run.

# %% tags=["export"]
def runs(extents):
    "Indices of `extents` grouped into runs of adjacent bytes of one file, in file order: [[i, ...], ...]."
    order = sorted(range(len(extents)), key=lambda i: (extents[i].file, extents[i].offset))
    groups = [[order[0]]]
    for before, i in zip(order, order[1:]):
        a, b = extents[before], extents[i]
        if (a.file, a.offset + a.nbytes) == (b.file, b.offset):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def slot_bytes(extents):
    "Bytes of a slot that holds an expert however its tensors lie in the file."
    return sum(widened(e.nbytes) for e in extents)


def read_expert(files, extents, buffer):
    "Read the six tensors of one expert into a page-aligned `buffer`, one read a run. Returns an Expert of views into it."
    views, begin = [None] * len(extents), 0
    for group in runs(extents):
        first = extents[group[0]]
        nbytes = sum(extents[i].nbytes for i in group)
        at = begin + files.read(buffer[begin:], first._replace(nbytes=nbytes), 0, nbytes, "experts")
        for i in group:
            views[i] = buffer[at:at + extents[i].nbytes].reshape(extents[i].shape)
            at += extents[i].nbytes
        begin += widened(nbytes)
    return Expert(*views)

# %% [markdown]
# ## 5.4.2 Requested together, arriving in any order
#
# `request` starts the reads of a layer's experts as soon as the router has spoken; the down-projection and the shared experts
# compute meanwhile. `arrivals` hands out whatever is ready. The order is the disk's, and it may not matter: chapter 4.2 keeps each
# answer by (token, rank) and sums in rank order.
#
# A slot is refilled only when its expert has been used, and the least recently used expert goes first. An expert whose read failed
# is an exception in the arithmetic, never a smaller sum.

# %% tags=["export"]
class Experts:
    """Routed experts in a fixed number of slots: those of the last passes stay until the least recently used must go.

    `extents(layer, e)`: the six extents of an expert in the order of Expert's fields. A layer's experts are requested
    together and arrive in any order; a slot is not refilled before its expert has been used. Requests are numbered: what is
    left of an interrupted one can neither take arrivals of the next nor give its slots away.
    """

    def __init__(self, extents, files, slots, nbytes, readers):
        if slots and readers < 1:
            raise ValueError(f"{readers} readers fetch nothing")
        self.extents, self.files = extents, files
        self.requests = self.hits = 0
        self.wait_seconds = 0.0
        self._memory = [aligned(nbytes) for _ in range(slots)]
        self._turn = threading.Lock()
        self._work, self._news = threading.Condition(self._turn), threading.Condition(self._turn)  # for readers; for the consumer
        self._free = list(range(slots))
        self._resident = OrderedDict()  # (layer, e) -> (slot, Expert), least recently used first
        self._held, self._pending, self._ready = set(), deque(), deque()
        self._number = self._due = self._busy = 0
        self._stopped = False
        self._threads = [threading.Thread(target=self._serve, name=f"k3-experts-{i}", daemon=True) for i in range(readers)]
        for thread in self._threads:
            thread.start()

    def layer(self, number):
        "The experts of one layer, as moe_layer takes them: .request(ids), .arrivals()."
        return _Layer(self, number)

    def request(self, layer, ids):
        "Start fetching these experts of a layer, each named once. Those still resident are held and counted as hits."
        keys = [(layer, int(e)) for e in ids]
        if len(set(keys)) < len(keys) or keys and not self._memory:
            raise ValueError(f"experts {list(ids)} of layer {layer} are requested into {len(self._memory)} slots: an expert twice, or no slot")
        with self._turn:
            self._abandon()
            for key in keys:
                if key in self._resident:
                    self._held.add(key)
                    self._ready.append((key, self._resident[key][1]))
                    self.hits += 1
                else:
                    self._pending.append(key)
            self._due = len(keys)
            self.requests += len(keys)
            self._work.notify_all()

    def arrivals(self):
        "Yields (expert id, Expert) once for each requested id, as they arrive. The weights are valid until the next is asked for."
        return self._arrivals(self._number)

    def _arrivals(self, number):
        while True:
            began = time.perf_counter()
            with self._turn:
                self._check(number)
                if not self._due:
                    return
                while not self._ready and not self._stopped:
                    self._news.wait()
                self._check(number)
                key, expert = self._ready.popleft()
                self._due -= 1
                self.wait_seconds += time.perf_counter() - began
            if isinstance(expert, BaseException):
                raise expert
            yield key[1], expert
            self._used(number, key)

    def _check(self, number):
        if self._stopped or number != self._number:
            raise RuntimeError("the experts are closed" if self._stopped else "these arrivals belong to an earlier request")

    def _used(self, number, key):
        with self._turn:
            if number == self._number:
                self._held.discard(key)
                self._resident.move_to_end(key)
                self._work.notify()

    def _abandon(self):
        "Forget what an interrupted pass has left: its reads end, its results are dropped, nothing is held."
        self._number += 1
        self._due = 0
        self._pending.clear()
        while self._busy:
            self._news.wait()
        self._ready.clear()
        self._held.clear()

    def _serve(self):
        "A reader's life: settle the last fetch and choose the next under the lock, read outside."
        job = result = None
        while True:
            with self._turn:
                if job is not None:
                    self._settle(*job, result)
                while not self._stopped and (job := self._next()) is None:
                    self._work.wait()
                if self._stopped:
                    return
            try:
                key, slot = job
                result = read_expert(self.files, self.extents(*key), self._memory[slot])
            except BaseException as error:  # whatever it is, the consumer must hear of it
                result = error

    def _next(self):
        "The next (key, slot) to fetch, or None while nothing is pending or every slot is in use."
        slot = self._slot() if self._pending else None
        if slot is None:
            return None
        self._busy += 1
        return self._pending.popleft(), slot

    def _slot(self):
        "A slot to fill: a free one, else that of the least recently used expert that is not held."
        if self._free:
            return self._free.pop()
        for key in self._resident:
            if key not in self._held:
                return self._resident.pop(key)[0]
        return None

    def _settle(self, key, slot, result):
        self._busy -= 1
        if isinstance(result, BaseException):
            self._free.append(slot)
        else:
            self._resident[key] = (slot, result)
            self._held.add(key)
        self._ready.append((key, result))
        self._news.notify()

    def close(self):
        "End the readers; whoever waits for an expert gets a RuntimeError."
        with self._turn:
            self._stopped = True
            self._work.notify_all()
            self._news.notify_all()
        for thread in self._threads:
            thread.join()


class _Layer:
    def __init__(self, experts, number):
        self._experts, self._number = experts, number

    def request(self, ids):
        self._experts.request(self._number, ids)

    def arrivals(self):
        return self._experts.arrivals()


# %% [markdown]
# ## 5.4.3 The gate
#
# Experts of the embedded model through two slots and three readers: every one arrives once, with the bytes the checkpoint holds.

# %%
import numpy as np

from k3lib.checkpoint import Checkpoint
from k3lib.trunk import Files

checkpoint = Checkpoint(FOLDER)


def six(layer, e):
    return list(checkpoint.expert(layer, e).values())


files = Files()
experts = Experts(six, files, slots=2, nbytes=slot_bytes(six(1, 0)), readers=3)
wanted = [0, 3, 5, 9, 14]
for layer in (1, 2, 12):
    experts.layer(layer).request(wanted)
    seen = []
    for e, expert in experts.layer(layer).arrivals():
        name = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{e}."
        assert (expert.w1 == checkpoint.raw(name + "w1.weight_packed")).all()
        assert (expert.w2_scale == checkpoint.raw(name + "w2.weight_scale")).all()
        seen.append(e)
    assert sorted(seen) == wanted
experts.close()
files.close()
print(experts.requests, "requested,", experts.hits, "hits; one read each:", [len(runs(six(1, e))) for e in wanted])

# %% [markdown]
# ## 5.4.4 What a cache of experts is worth
#
# From one token to the next about 29% of K3's experts stay the same (reported by other engines on the released checkpoint). That
# sounds like something to keep. But an LRU meets a token's 1,472 requests as a stream: to find an expert of the last token
# again it must hold everything requested since, which is a whole working set. A model of that, with experts drawn so that the
# reuse is 29%:

# %%
def requests(layers, experts_a_layer, k, reuse, tokens, seed):
    "(layer, expert) pairs, token after token: of each layer's k, a share `reuse` stays from the token before."
    rng = np.random.default_rng(seed)
    chosen = [rng.choice(experts_a_layer, k, replace=False) for _ in range(layers)]
    for _ in range(tokens):
        for layer in range(layers):
            keep = chosen[layer][rng.random(k) < reuse]
            others = np.setdiff1d(np.arange(experts_a_layer), keep)
            chosen[layer] = np.concatenate([keep, rng.choice(others, k - len(keep), replace=False)])
            yield from ((layer, int(e)) for e in chosen[layer])


def lru_hit_rate(trace, capacity):
    kept, hits = OrderedDict(), 0
    for key in trace:
        hits += key in kept
        kept[key] = None
        kept.move_to_end(key)
        if len(kept) > capacity:
            kept.popitem(last=False)
    return hits / len(trace)


# %%
LAYERS, K, TOKENS = 92, 16, 12
trace = list(requests(LAYERS, 896, K, 0.29, TOKENS, seed=0))
working_set = LAYERS * K
shares = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0])
rates = [lru_hit_rate(trace, int(share * working_set)) for share in shares]
print("half a working set,", round(0.5 * 25.83, 1), "GB:", f"{rates[2]:.2f} of requests hit")
print("one and a half, ", round(1.5 * 25.83, 1), "GB:", f"{rates[7]:.2f}")
assert rates[2] < 0.03 and rates[7] > 0.2

# %%
fig, ax = plt.subplots()
ax.plot(shares * 25.83, rates, "o-")
ax.axvline(25.83, color="0.6", lw=1)
ax.text(26.5, 0.02, "one token's experts", fontsize=8, color="0.4")
ax.set(xlabel="memory for experts, GB", ylabel="hit rate", title="Below one working set an LRU keeps nothing")
plt.show()

# %% [markdown]
# So memory goes to the trunk first. A gigabyte there saves a gigabyte of reading at every token; here the first twenty-five save
# almost nothing. Slots below that are for overlap: enough of them to keep several reads in flight.
#
# ## Summary
#
# - Experts are requested the moment they are known, read by several threads, used in any order, summed in rank order.
# - A hit is an expert that was there before the request, so the report does not count a token's own fetches.
# - An LRU pays only beyond one token's working set, 25.8 GB.
#
# ## Exercises
#
# 1. Draw the same curve for a reuse of 60%. Where does it leave the axis, and why is that place the same?
# 2. Replace LRU by a cache that never evicts once full. For which traces is it better at half a working set?
# 3. With two slots and sixteen requests, how many reads can be in flight while one expert computes? Where in `Experts` is that decided?
#
# Next: [5.5 The walk](05_model.ipynb) puts trunk and experts under 93 layers.
