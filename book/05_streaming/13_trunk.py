# %% [markdown]
# # 5.13 The trunk: rows that arrive
#
# 108.8 GB of K3 are read for every token, whatever the token is: projections, norms, shared experts. This chapter lets
# a matrix be multiplied that is never all in memory. At the end you can say what a block of rows goes through between
# the disk and the dot product, and why the first gigabytes of a budget belong to the front of the forward pass.
#
# [5.12 Read, multiply, read, multiply](12_read_multiply.ipynb) ·
# [contents](../README.md) ·
# [5.14 Which experts a run requested](14_trace.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | extent | where a tensor's bytes lie: file, offset, length | `Extent` (5.6) |
# | row block | as many whole rows of a matrix as one read brings | `RowBlock` (5.10) |
# | pinned | kept in memory from the start, never read again | `Trunk.resident` |
# | streamed | read again in every forward pass, through the buffers of a reader pool | `StreamedMatrix` |

# %% tags=["export"]
import time
import numpy as np
from k3lib.parallel import CORES
from k3lib.matmul import ResidentMatrix, bf16_to_float32, matmul_rows, padded
from k3lib.disk import MAX_READERS, Files, page_buffer, typed
from k3lib.layout import RowBlock, TrunkLayout
from k3lib.prefetch import Prefetcher, items
from k3lib.read_multiply import Product, read_multiply


# %% [markdown]
# ## 5.13.1 A matrix that is never all there
#
# A streamed matrix answers the calls of a resident one. A plain product is read and multiplied in units (5.12); work of
# another kind, as attention with `kv_b_proj`, is called on whole blocks by the reader that has read them.
#
# How many readers may do this at a time? If the caller gives some of the cores, as many as that. If it gives all, more
# than there are cores: a reader that waits for its device leaves the core to another.

# %% tags=["export"]
def max_concurrent_blocks(threads: int) -> int:
    "How many readers may read and multiply at a time when the arithmetic has `threads` threads."
    return threads if threads < CORES else max(threads, MAX_READERS)


def read_rows(files: Files, block: RowBlock, buffer: np.ndarray) -> np.ndarray:
    "Read a block into `buffer`: its rows [m, k] in there, uint16 for bf16, else the matrix's own dtype. Raises CheckpointError."
    start = files.read(buffer, block.extent, block.begin, block.nbytes, block.part)
    return typed(buffer, start, block.nbytes, block.extent.dtype).reshape(block.rows, -1)


class StreamedMatrix:
    """A matrix of the trunk that is read while it is used, `blocks` by the readers of `pool`. It can be used once in a forward pass.

    The protocol of all matrices: `shape`, multiply(x, out, threads), map_blocks(work, threads).
    """

    def __init__(self, pool: Prefetcher, files: Files, blocks: list[RowBlock]):
        self.pool, self.files, self.blocks = pool, files, blocks
        self.shape: tuple[int, ...] = blocks[0].extent.shape

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int) -> None:
        "out float32 [T, n] = x W^T for x float32 [T, k]. Raises CheckpointError."
        prepared = padded(x)

        def work(block, rows):
            matmul_rows(rows, prepared, out, block.first)

        def stream(rest, buffer, cursor):
            return read_multiply(self.files, Product(rest[0].through(rest[-1]), None, prepared, out), buffer, cursor)

        self.pool.map_blocks(self.blocks, work, stream, max_concurrent_blocks(threads))

    def map_blocks(self, work, threads: int) -> None:
        """Call work(first row, rows [m, k], 1) on blocks that cover the matrix, on readers, in any order, several at a time.

        Returns when all calls have ended. Raises what one of them raised, and CheckpointError.
        """
        def call(block, rows):
            work(block.first, rows, 1)

        def stream(rest, buffer, cursor):
            seconds = 0.0
            for block in items(rest, cursor):
                rows, began = read_rows(self.files, block, buffer), time.thread_time()
                work(block.first, rows, 1)
                seconds += time.thread_time() - began
            return seconds

        self.pool.map_blocks(self.blocks, call, stream, max_concurrent_blocks(threads))


# %% [markdown]
# ## 5.13.2 The trunk
#
# Vectors and pinned matrices are read once. The other matrices stream, in the order of the forward pass; after the last
# one the first one is read again, so the readers run ahead from one token into the next.
#
# Some matrices are worth having whole before their turn. Until the **router** of a layer has spoken, no expert can be
# requested, and all of its 12.8 MB are needed for that. Behind the blocks of the matrices before it, it would come last
# and then hold up everything. So routers have a pool of their own with buffers for one router: as the router of this
# layer is used up, that of the next comes in, block by block, by a single reader, which has a whole layer's time.

# %% tags=["export"]
def as_float32(array: np.ndarray) -> np.ndarray:
    "A resident vector, [1, H] weight (as [H]) or convolution, float32."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


class Trunk:
    """Every tensor of a forward pass but the routed experts, resident or streamed, as `layout` says.

    `resident`: {name: ResidentMatrix, or a float32 vector}. `progress`, if given, is shown the bytes of each resident tensor as it is read.
    Used by one thread. Streamed matrices are asked for in the order of layout.streamed, each once between two calls of begin().
    """

    def __init__(self, layout: TrunkLayout, files: Files, progress=None):
        self.files, self.layout, self.resident = files, layout, {}
        for name, tensor in layout.resident.items():
            array = files.array(tensor.extent, tensor.part)
            self.resident[name] = ResidentMatrix(array) if tensor.is_matrix else as_float32(array)
            if progress is not None:
                progress(tensor.extent.nbytes)
        self._names, self._next, self._closed = list(layout.streamed), 0, False
        rows = [block for name in self._names if name not in layout.routers for block in layout.streamed[name]]
        routers = [block for name in self._names if name in layout.routers for block in layout.streamed[name]]
        self._pools: list[tuple[Prefetcher, list[RowBlock]]] = []
        self._rows = self._pool("trunk", rows, layout.rows, layout.readers, layout.read_ahead)
        self._routers = self._pool("routers", routers, layout.router_rows, 1, layout.router_rows.count)

    def _pool(self, name, blocks, buffers, readers, read_ahead):
        "A pool that reads `blocks` over and over, or None where there are none."
        if not blocks:
            return None
        memory = [page_buffer(buffers.nbytes) for _ in range(buffers.count)]
        pool = Prefetcher(lambda block, buffer: read_rows(self.files, block, buffer), memory, readers, read_ahead, name)
        pool.restart(blocks, cyclic=True)
        self._pools.append((pool, blocks))
        return pool

    def begin(self) -> None:
        "Begin a forward pass. If the one before was interrupted, the readers begin anew at its first block."
        self._next = 0
        for pool, blocks in self._pools:
            if not pool.at_start():
                pool.restart(blocks, cyclic=True)


# %% tags=["export"]
class Trunk(Trunk):
    def weight(self, name: str):
        "The matrix or the float32 vector `name`. RuntimeError if the trunk is closed or another streamed matrix is next."
        resident = self.resident.get(name)
        if resident is not None:
            return resident
        if self._closed:
            raise RuntimeError("the trunk is closed")
        if self._names[self._next] != name:
            raise RuntimeError(f"the forward pass asks for {name}, but {self._names[self._next]} is next")
        self._next = (self._next + 1) % len(self._names)
        pool = self._routers if name in self.layout.routers else self._rows
        return StreamedMatrix(pool, self.files, self.layout.streamed[name])

    @property
    def wait_seconds(self) -> float:
        "Seconds the arithmetic stood still for a row block."
        return sum(pool.wait_seconds for pool, _ in self._pools)

    def close(self) -> None:
        "End the readers and give the memory back; whoever asks for a tensor gets a RuntimeError."
        self._closed = True
        for pool, _ in self._pools:
            pool.close()
        self.resident.clear()


# %% [markdown]
# ## 5.13.3 The gate: streamed equals resident
#
# One layer and a half of the embedded model, multiplied resident and through buffers of different sizes, twice over. A
# wrong buffer, a stale block or a lost row would change bytes.

# %%
import hashlib
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt

from k3lib.checkpoint import Checkpoint, Extent
from k3lib.disk import PAGE
from k3lib.layout import Buffers, row_blocks, trunk_layout
from k3lib.matmul import NotFinite, linear

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"
scratch = Path(tempfile.mkdtemp())

# %% tags=["parameters"]
seed = 0
rows = 4096  # of the matrix that is timed below, 16 kB each
block_kib = 1024
readers = 2

# %%
checkpoint = Checkpoint(FOLDER)
ORDER = [name for name in checkpoint.names() if ".layers.0." in name or ".layers.1.self_attn." in name]
EXTENTS = {name: checkpoint.extent(name) for name in ORDER}
MATRICES = list(trunk_layout(EXTENTS, {}, 1).streamed)


def ramp(n):
    return np.linspace(-1, 1, n, dtype=np.float32)[None]


def layout_of(count, nbytes, readers):
    "Everything streams through `count` buffers of `nbytes`."
    layout = trunk_layout(EXTENTS, {}, readers)
    blocks = {name: row_blocks(EXTENTS[name], 1, nbytes, "trunk") for name in layout.streamed}
    return replace(layout, streamed=blocks, routers=frozenset(), rows=Buffers(count, nbytes))


def products(count, nbytes, readers, passes=2, pool=Prefetcher):
    "Every matrix times a fixed vector, in order, `passes` times over, with blocks read ahead by a pool of the kind `pool`."
    global Prefetcher
    files, usual, Prefetcher = Files(), Prefetcher, pool
    trunk = Trunk(layout_of(count, nbytes, readers), files)
    Prefetcher, out = usual, []
    for _ in range(passes):
        trunk.begin()
        for name in MATRICES:
            time.sleep(2e-4)  # other arithmetic: the readers run ahead
            out.append(linear(trunk.weight(name), ramp(EXTENTS[name].shape[1])))
    trunk.close()
    files.close()
    return np.concatenate([y.ravel() for y in out])


expected = np.concatenate([linear(ResidentMatrix(checkpoint.raw(name)), ramp(EXTENTS[name].shape[1])).ravel() for name in MATRICES] * 2)
for count, nbytes, threads in ((1, 20_000, 1), (2, 20_000, 2), (3, 50_000, 2), (40, 80_000, 3)):
    assert products(count, nbytes, threads).tobytes() == expected.tobytes()
print("through one buffer, two, three and forty, two forward passes each: the bytes of the resident product: True")


# %% [markdown]
# Three pools that break the rule, on purpose. The first lends one buffer to everybody. The second reads the block
# before in every other block's place, the third begins the second forward pass one block late. None passes, and if
# there is an error it is luck.

# %%
class Hasty(Prefetcher):
    "Whoever asks gets the same buffer, in use or not."

    def __init__(self, read, buffers, *more):
        super().__init__(read, [buffers[0]] * len(buffers), *more)

    def _do(self, entry, batch):
        time.sleep(1e-3 if entry.data is not None else 0)  # a product that takes its time
        return super()._do(entry, batch)


class Stuttering(Prefetcher):
    def __init__(self, read, *more):
        def again(block, buffer):
            i = self._order.index(block)
            before = self._order[i - 1]
            return read(before if i % 2 and before.nbytes == block.nbytes else block, buffer)
        super().__init__(again, *more)


class Shifted(Prefetcher):
    def __init__(self, read, *more):
        begun = []

        def late(block, buffer):
            begun.append(block)
            after = self._order[(self._order.index(block) + 1) % len(self._order)]
            return read(after if len(begun) > 5 and after.nbytes == block.nbytes else block, buffer)
        super().__init__(late, *more)


def passes_the_gate(pool):
    try:
        return products(4, 20_000, 2, pool=pool).tobytes() == expected.tobytes()
    except NotFinite:  # float32 read as bf16 has infinities
        return False


for pool in (Hasty, Stuttering, Shifted):
    assert not passes_the_gate(pool)
    print(f"{pool.__name__:<11} fails the gate: True")

# %% [markdown]
# The tests go further: readers that sleep at random, every order of arrival; forward passes interrupted at every line;
# a matrix left out, which must be an error and not a shift.
#
# ## 5.13.4 What waits for what
#
# A matrix of 16 MB of real bytes, eight tokens, and two ways through it: one thread that reads a block and then
# multiplies it, and a pool. Python reads here, so that every read and every product can leave an event.

# %%
width = 4096
matrix = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
(scratch / "matrix").write_bytes(b"header!!" + matrix.tobytes())
with open(scratch / "holes", "wb") as file:
    file.truncate(8 + matrix.nbytes)


def first_rows(n, where="matrix"):
    return Extent(str(scratch / where), 8, n * width * 4, "F32", (n, width))


class Logged(Files):
    "Files that write down who read from when to when."

    def __init__(self):
        super().__init__()
        self.events = []

    def read(self, *args):
        began = time.perf_counter()
        start = super().read(*args)
        self.events.append((threading.current_thread().name, "C0", began, time.perf_counter()))
        return start

    def multiplied(self, block, x, out, first):
        began = time.perf_counter()
        matmul_rows(block, x, out, first)
        self.events.append((threading.current_thread().name, "C1", began, time.perf_counter()))


def one_thread(extent, x, out, files):
    buffer = page_buffer((block_kib << 10) + 2 * PAGE)
    for block in row_blocks(extent, 1, block_kib << 10, "trunk"):
        files.multiplied(read_rows(files, block, buffer), x, out, block.first)


def pooled(extent, x, out, files):
    layout = replace(layout_of(4, block_kib << 10, readers), streamed={"m": row_blocks(extent, 1, block_kib << 10, "trunk")}, resident={})
    trunk = Trunk(layout, files)
    for _ in range(2):
        files.events.clear()
        trunk.begin()
        trunk.weight("m").map_blocks(lambda first, block, threads: files.multiplied(block, x, out, first), readers)
    trunk.close()


# %% tags=["nbval-ignore-output"]
fig, axes = plt.subplots(2, 1, figsize=(6, 3.4), sharex=True)
results, sixteen, eight = set(), first_rows(1024), padded(np.repeat(ramp(width), 8, 0))
for ax, way in zip(axes, (one_thread, pooled)):
    files, out = Logged(), np.zeros((8, 1024), np.float32)
    way(sixteen, eight, out, files)
    results.add(out.tobytes())
    start, threads = min(began for _, _, began, _ in files.events), sorted({thread for thread, *_ in files.events})
    for thread, color, began, ended in files.events:
        low = threads.index(thread) - (0.4 if color == "C0" else 0)
        ax.broken_barh([((began - start) * 1e3, (ended - began) * 1e3)], (low, 0.4), color=color, edgecolor="white", lw=0.4)
    ax.set_yticks(range(len(threads)), [thread.replace("MainThread", "caller").replace("k3-trunk-", "reader ") for thread in threads])
    ax.set_title(f"{way.__name__.replace('_', ' ')}: {(max(ended for *_, ended in files.events) - start) * 1e3:.0f} ms")
    files.close()
axes[1].set_xlabel("time, ms (blue: reading, orange: multiplying)")
plt.show()
assert len(results) == 1

# %% [markdown]
# In the first picture nothing overlaps. In the second every reader goes through blocks of its own, and what one waits
# for another does not.
#
# ## 5.13.5 Making it fast
#
# Is the compiled loop of 5.12 worth its room? Against it stands the same loop in Python, unit by unit. One token, a 64
# MB matrix, from this disk and from holes, which the kernel fills with zeros as fast as it can write:

# %% tags=["nbval-ignore-output"]
from k3lib import read_multiply as loops


def rate(where, compiled, rounds=7):
    "GB a second of the fastest of some products."
    extent, files, x = first_rows(rows, where), Files(), ramp(width)
    loops.COMPILED_READS, usual = compiled and loops.COMPILED_READS, loops.COMPILED_READS
    layout = replace(layout_of(readers + 3, 2 << 20, readers), streamed={"m": row_blocks(extent, 1, 2 << 20, "trunk")}, resident={})
    trunk, best = Trunk(layout, files), np.inf
    for _ in range(rounds):
        trunk.begin()
        began = time.perf_counter()
        linear(trunk.weight("m"), x)
        best = min(best, time.perf_counter() - began)
    trunk.close()
    files.close()
    loops.COMPILED_READS = usual
    return extent.nbytes / 1e9 / best


print(f"{'':<10}{'compiled':>10}{'Python':>10}")
for where in ("matrix", "holes"):
    print(f"{where:<10}{rate(where, True):>10.1f}{rate(where, False):>10.1f}  GB/s")
shutil.rmtree(scratch)


# %% [markdown]
# Measured with more care, two readers and two cores, against the leanest Python loop that can be written (file opened
# once a matrix, no lock a unit):
#
# | bytes from | compiled, GB/s | Python, GB/s | Python takes |
# |---|---|---|---|
# | a device of 3, 7 or 14 GB/s that delivers without the processor | 2.9, 6.7, 13.2 | 2.9, 6.7, 13.2 | 1.00 |
# | real bytes in memory, copied by the kernel | 13.4 to 13.9 | 13.4 to 14.0 | 1.00 to 1.03 |
# | holes | 46 | 42 to 43 | 1.04 to 1.14 |
# | a step of the full shape at 1 GB, nearly all of it holes | | | 1.05 of processor time |
#
# So no disk of today needs the compiled loop. It stays for what is read at memory speed, where the interpreter's two
# microseconds a unit show, and because it leaves the interpreter's lock alone when a machine has more readers than
# cores. Should it ever be in the way, the Python half of `read_multiply` is complete without it.
#
# What did not help: huge pages for the buffers; reading far ahead, because what waits has left the cache when its turn
# comes. What did: one counter for the units of a matrix instead of a lock a block; waking a thread only when there is
# something for it; a block or two of the next matrix read while this one is multiplied, so that a device is never idle;
# buffers that go out last in, first out.
#
# ## 5.13.6 Why the front of the forward pass is pinned
#
# Memory left over could be a cache. But a forward pass is a cycle: when a block is asked for again, everything else has
# been asked for since. A least-recently-used cache smaller than the cycle has always just thrown away the block that
# comes next. Pinning any fixed part saves exactly that part, every pass; the front is as good as any, and it is ready
# when a pass begins. The third line knows the future and lets go of what is needed last. On a cycle that is the block
# just used, every time: the best of all caches pins.

# %%
def lru_hits(capacity, cycle, passes):
    "Share of the requests after the first pass that a cache answers which evicts the least recently used of `capacity` blocks."
    kept, hits = [], 0
    for n in range(cycle * passes):
        block = n % cycle
        hits += block in kept
        kept = [b for b in kept if b != block][-(capacity - 1):] + [block] if capacity > 1 else [block]
    return hits / (cycle * (passes - 1))


def clairvoyant_hits(capacity, cycle, passes):
    "The same for a cache that evicts the block whose next request is farthest away."
    kept, hits = set(), 0
    for n in range(cycle * passes):
        block = n % cycle
        hits += block in kept
        kept.add(block)
        if len(kept) > capacity:
            kept.remove(max(kept, key=lambda b: (b - block - 1) % cycle))
    return hits / (cycle * (passes - 1))


CYCLE, PASSES = 60, 10
shares = np.arange(6, CYCLE + 1, 6)
lru, best = ([f(int(c), CYCLE, PASSES) for c in shares] for f in (lru_hits, clairvoyant_hits))
assert lru[:-1] == [0] * (len(lru) - 1) and lru[-1] == 1
assert np.allclose(best, shares / CYCLE)
print("with 90% of the cycle in memory: LRU", f"{lru[-2]:.2f},", "the pinned front", f"{shares[-2] / CYCLE:.2f},", "clairvoyant", f"{best[-2]:.2f}")

# %%
fig, ax = plt.subplots()
ax.plot(shares / CYCLE, best, ":", lw=3, color="C5", label="clairvoyant")
ax.plot(shares / CYCLE, shares / CYCLE, "o-", label="pin the front")
ax.plot(shares / CYCLE, lru, "s--", label="least recently used")
ax.set(xlabel="memory, share of the cycle", ylabel="share of reads saved", title="On a cycle, LRU saves nothing until it holds everything")
ax.legend()
plt.show()

# %% [markdown]
# The same argument says that the trunk gets memory before experts do: a pinned trunk byte is used at every token, a
# cached expert only if the router comes back to it (chapter 5.16).

# %% [markdown]
# ## 5.13.7 What it costs in K3
#
# With the released shapes (`fixtures/k3`), slots of 4 MiB. Widening to whole pages adds at most two pages to a block.
# The ring replaces what an engine that loads layer by layer must hold: 2.34 GB for layer 0 alone.

# %%
from k3lib.config import read_config

SLOT, SLOTS = 4 << 20, 4
k3 = read_config(ROOT / "fixtures" / "k3")
trunk = [(name, Extent("", 8, int(np.prod(shape)) * ITEMSIZE[dtype], dtype, shape)) for name, dtype, shape in k3.tensors()
         if ".layers." in name and ".experts." not in name or "lm_head" in name]
streams = [e for name, e in trunk if is_matrix(name, e)]
blocks = [read for e in streams for read in row_blocks(e, 1, SLOT, "trunk")]
streamed = sum(read.nbytes for read in blocks)
print(f"{len(streams):,} matrices in {len(blocks):,} blocks, {streamed / 1e9:.1f} GB a pass, lm_head with its 2.35 GB included")
print(f"vectors, always resident: {sum(e.nbytes for _, e in trunk) / 1e6 - streamed / 1e6:.0f} MB")
print(f"widening: at most {2 * PAGE * len(blocks) / streamed:.1%} more bytes; the ring: {SLOTS * SLOT / 1e6:.0f} MB, 1/{2341e6 / (SLOTS * SLOT):.0f} of layer 0")

# %% [markdown]
# ## Summary
#
# - A matrix is rows that arrive: blocks of whole rows through a few reused slots, in an order known in advance.
# - Reads bypass the page cache where the file system allows it, and the report says where it does not.
# - A slot is the unit of trust: filled once, multiplied once, given back once, and numbered so that nothing stale can
#   touch it.
# - Pinning the front of a cyclic walk saves its share of every pass. An LRU of the same size saves nothing.
#
# ## Exercises
#
# 1. In `schedule`, let a product take 3 ticks and a read 2. How many slots are enough, and what is the total for $n$
#    blocks?
# 2. Change `lru_hits` to evict the *most* recently used block. What does it save at half the cycle, and why is that
#    nearly the optimum?
# 3. How many bytes does widening add to one pass over the embedded model? `Files.moved` counts them; compare with K3's
#    blocks.
# 4. Give `Ring` a first-in, first-out list of free slots and measure 5.13.3 again. Which column changes?
#
# Next: [5.4 Experts](04_experts.ipynb), the one part of a pass that nobody can order in advance.
