# %% [markdown]
# # 5.13 The trunk: rows that arrive
#
# The *trunk* of K3 is every weight but the routed experts: projections, norms, routers, shared experts. Its 108.8 GB
# are needed for every token, whatever the token is. Few machines have memory for them. This chapter multiplies with a
# matrix that is never in memory as a whole: its rows are read in blocks, and each block is multiplied when it has
# arrived. At the end you can say what happens to a block of rows between the disk and the dot product, and why the
# first gigabytes of a budget are spent on the matrices at the front of the forward pass.
#
# > **Without it:** trunk and head take 111 GB<!--claim whole--> of memory.
# >
# > **With it:** buffers of 45 MB<!--claim buffers--> are enough. Then every token reads the whole trunk, which takes
# > 15.9 s<!--claim seconds--> from a disk of 7 GB/s. With more memory, matrices are pinned, and a token reads less.
#
# Needs chapters [5.10] to [5.12]. Runs in half a minute. Makes `k3lib.trunk`.
#
# [5.12 Read, multiply, read, multiply](12_read_multiply.ipynb) ·
# [contents](../README.md) ·
# [5.14 Which experts a run requested](14_trace.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | extent | where a tensor's bytes lie: file, offset, length | `Extent` (5.5) |
# | row block | as many whole rows of a matrix as one read brings | `RowBlock` (5.10) |
# | pinned | kept in memory from the start, never read again | `Trunk.resident` |
# | streamed | read again in every forward pass, through the buffers of a reader pool | `StreamedMatrix` |
#
# [5.10]: 10_layout.ipynb
# [5.12]: 12_read_multiply.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "readers")

# %% tags=["export"]
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from k3lib.disk import Files, page_buffer
from k3lib.layout import Buffers, RowBlock, TrunkLayout
from k3lib.matmul import ResidentMatrix, bf16_to_float32, check_shapes, matmul_rows, padded
from k3lib.prefetch import Prefetcher, items
from k3lib.read_multiply import Product, max_concurrent_blocks, read_multiply, read_rows


# %% [markdown]
# ## 5.13.1 A matrix that is never all in memory
#
# A layer must not need to know whether a matrix is in memory. So a streamed matrix has the same methods as a resident
# one ([1.5.6]). Its blocks are one batch of the reader pool (5.11). The two methods differ in what a reader does:
#
# - `multiply` is a plain product. The blocks that no reader has begun, the rest of the batch ([5.11.2]), form one range
#   of rows. Readers read and multiply this range in units (5.12).
# - `map_blocks` calls a function of the layer, such as attention with `kv_b_proj`. It takes the rest block by block.
#   The reader that has read a block calls the function on it.
#
# [1.5.6]: ../01_mxfp4/05_matmul.ipynb#1.5.6-A-matrix-is-rows-that-arrive
# [5.11.2]: 11_prefetch.ipynb#5.11.2-Three-jobs

# %% tags=["export"]
class StreamedMatrix:
    """A matrix of the trunk that the readers of `pool` read, in `blocks`, while it is used: once in a forward pass.

    The protocol of all matrices: `shape`, multiply(x, out, threads), map_blocks(work, threads).
    """

    def __init__(self, pool: Prefetcher, files: Files, blocks: list[RowBlock]):
        self.pool, self.files, self.blocks = pool, files, blocks
        n, k = blocks[0].extent.shape
        self.shape: tuple[int, int] = (n, k)

    def multiply(self, x: np.ndarray, out: np.ndarray, threads: int) -> None:
        "out = x W^T for x float32 [T, k] and out float32 [T, n]. Raises CheckpointError."
        check_shapes("StreamedMatrix", self.shape, x, out)
        prepared = padded(x)

        def work(block, rows):
            matmul_rows(rows, prepared, out, block.first)

        def stream(rest, buffer, cursor):
            rows = rest[0].through(rest[-1])
            return read_multiply(self.files, Product(rows, None, prepared, out), buffer, cursor)

        self.pool.map_blocks(self.blocks, work, stream, max_concurrent_blocks(threads))


# %% tags=["export"]
class StreamedMatrix(StreamedMatrix):
    def map_blocks(self, work: Callable[[int, np.ndarray, int], Any], threads: int) -> None:
        """Call work(first row, rows [m, k], 1) on blocks that cover the matrix, on readers, several at a time.

        `rows`: uint16 (bf16) or float32. The blocks come in any order. Returns when all calls have ended. Raises what
        one of them raised, and CheckpointError.
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
# Vectors and pinned matrices are read once, at the start. The other matrices are streamed in the order of the forward
# pass. After the last matrix the first one is read again, so at the end of a token the readers already read ahead for
# the next token.
#
# **Routers** get a pool of their own. The experts of a layer can be requested only when all 12.8 MB of its router have
# been multiplied. In one pool with the other matrices, the router's blocks would come after those of the matrices
# before it, and the requests for experts would wait for them. So the routers' pool has buffers for one whole router. As
# soon as the router of one layer has been used, a single reader reads the router of the next layer. It has the time of
# a whole layer for this.
#
# The pools read through `files` and have no reference to the trunk. So a trunk that nothing refers to any more is freed
# at once, and its readers end ([5.11.3]).
#
# [5.11.3]: 11_prefetch.ipynb#5.11.3-What-is-true-whenever-nobody-holds-the-lock

# %% tags=["export"]
def as_float32(array: np.ndarray) -> np.ndarray:
    "A vector or convolution `array`, uint16 (bf16) or float32, as float32. A weight [1, H] becomes [H]."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


# %% tags=["export"]
class Trunk:
    """Every tensor of a forward pass but the routed experts, resident or streamed, as `layout` says. For one thread.

    `resident`: {name: ResidentMatrix, or a float32 vector}. progress(nbytes) is called when one of them has been read.
    Between two calls of begin(), weight() is called once for each streamed matrix, in the order of layout.streamed.
    Raises CheckpointError. Dropping a trunk ends its readers, as close() does, without waiting for them.
    """

    def __init__(self, layout: TrunkLayout, files: Files, progress: Callable[[int], Any] | None = None):
        self.files, self.layout = files, layout
        self.resident: dict[str, Any] = {}
        for name, tensor in layout.resident.items():
            array = files.array(tensor.extent, tensor.part)
            self.resident[name] = ResidentMatrix(array) if tensor.is_matrix else as_float32(array)
            if progress is not None:
                progress(tensor.extent.nbytes)
        self._names, self._next, self._closed = list(layout.streamed), 0, False
        rows = [block for name in self._names if name not in layout.routers for block in layout.streamed[name]]
        routers = [block for name in self._names if name in layout.routers for block in layout.streamed[name]]
        self._pools: dict[str, tuple[Prefetcher, list[RowBlock]]] = {}
        try:
            self._add_pool("trunk", rows, layout.rows, layout.readers, layout.read_ahead)
            self._add_pool("routers", routers, layout.router_rows, 1, layout.router_rows.count)
        except BaseException:  # no caller has this trunk yet to close it
            self.close()
            raise


# %% tags=["export"]
class Trunk(Trunk):
    def _add_pool(self, name: str, blocks: list[RowBlock], buffers: Buffers, readers: int, read_ahead: int):
        "Add a pool that reads `blocks` over and over, if there are any blocks."
        if blocks:
            memory = [page_buffer(buffers.nbytes) for _ in range(buffers.count)]
            pool = Prefetcher(partial(read_rows, self.files), memory, readers, read_ahead, name)
            self._pools[name] = pool, blocks
            pool.restart(blocks, cyclic=True)

    def begin(self) -> None:
        "Begin a forward pass. If the pass before was interrupted, the readers begin again at the first block."
        self._next = 0
        for pool, blocks in self._pools.values():
            if not pool.at_start():
                pool.restart(blocks, cyclic=True)


# %% [markdown]
# The trunk checks the order by name. So if a caller leaves out a matrix, the error names the matrix that should have
# come next.

# %% tags=["export"]
class Trunk(Trunk):
    def weight(self, name: str) -> Any:
        "The matrix or float32 vector `name`. RuntimeError if the trunk is closed or another streamed matrix is next."
        resident = self.resident.get(name)
        if resident is not None:
            return resident
        if self._closed:
            raise RuntimeError("the trunk is closed")
        following = self._names[self._next] if self._names else "nothing"
        if following != name:
            raise RuntimeError(f"the forward pass asks for {name}, but {following} is next")
        self._next = (self._next + 1) % len(self._names)
        pool, _ = self._pools["routers" if name in self.layout.routers else "trunk"]
        return StreamedMatrix(pool, self.files, self.layout.streamed[name])

    @property
    def wait_seconds(self) -> float:
        "An estimate of the seconds for which the arithmetic waited for row blocks."
        return sum(pool.wait_seconds for pool, _ in self._pools.values())

    def close(self) -> None:
        "End the readers and give the memory back. Waiting for rows or asking for a tensor then raises RuntimeError."
        self._closed = True
        for pool, _ in self._pools.values():
            pool.close()
        self.resident.clear()


# %% [markdown]
# ## 5.13.3 The gate: streamed equals resident
#
# The gate takes one and a half layers of the embedded model. It multiplies their matrices in memory, and then streamed
# through buffers of different number and size, for two forward passes. The results must have equal bytes. A wrong
# buffer, a block of the pass before or a lost row would change them.

# %%
import shutil
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt

from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.disk import PAGE
from k3lib.header import ITEMSIZE, Extent
from k3lib.layout import row_blocks, trunk_layout
from k3lib.matmul import NotFinite, linear
from k3lib.tensors import HEAD, forward_order, layer_of, row_multiples, text_tensors

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
FOLDER = ROOT / "fixtures" / "oracle13" / "model"
scratch = Path(tempfile.mkdtemp())

# %% tags=["parameters"]
seed = 0
rows = 1024  # of the matrix that is timed in 5.13.4, 16 kB each
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
    "Every matrix times a fixed vector, in order, `passes` times over, with blocks read by a pool of the kind `pool`."
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


resident = [linear(ResidentMatrix(checkpoint.raw(name)), ramp(EXTENTS[name].shape[1])).ravel() for name in MATRICES]
expected = np.concatenate(resident * 2)


def check_streamed(name, count, nbytes, readers, pool=Prefetcher):
    "The gate: the bytes of the resident products, whichever pool streams the matrices."
    try:
        same = products(count, nbytes, readers, pool=pool).tobytes() == expected.tobytes()
    except NotFinite:  # rows of another type or matrix can have infinities
        same = False
    assert same, f"{name}: not the bytes of the resident products"
    print(f"{name}: the bytes of the resident products")


for count, nbytes, threads in ((1, 20_000, 1), (2, 20_000, 2), (3, 50_000, 2), (40, 80_000, 3)):
    check_streamed(f"{count} buffers of {nbytes:,} bytes, {threads} readers", count, nbytes, threads)


# %% [markdown]
# Three wrong pools must fail this gate. The first lends the same buffer for every read, whether it is in use or not.
# The second reads the block before, in place of every second block. The third is one block late from its seventh read
# on.

# %%
class OneBuffer(Prefetcher):
    "Every read gets the same buffer, in use or not, and a product takes its time."

    def __init__(self, read, buffers, *more):
        super().__init__(read, [buffers[0]] * len(buffers), *more)

    def map_blocks(self, blocks, work, *more):
        super().map_blocks(blocks, lambda block, rows: (time.sleep(1e-3), work(block, rows)), *more)


def shape(block):
    return block.rows, block.extent.dtype, block.extent.shape[1]


class WrongBlock(Prefetcher):
    "Block number `wrong(number, reads so far)` of the order is read in place of a block, if it has the same shape."

    def __init__(self, read, *more):
        order = [block for blocks in layout_of(4, 20_000, 2).streamed.values() for block in blocks]
        reads = []

        def other(block, buffer):
            reads.append(block)
            wrong = order[self.wrong(order.index(block), len(reads)) % len(order)]
            return read(wrong if shape(wrong) == shape(block) else block, buffer)
        super().__init__(other, *more)


class Stuttering(WrongBlock):
    def wrong(self, i, reads):
        return i - i % 2


class Late(WrongBlock):
    def wrong(self, i, reads):
        return i + (reads > 6)


# %% tags=["raises-exception"]
check_streamed("one buffer for all reads", 4, 20_000, 2, OneBuffer)

# %% tags=["raises-exception"]
check_streamed("every second block is the one before", 4, 20_000, 2, Stuttering)

# %% tags=["raises-exception"]
check_streamed("one block late", 4, 20_000, 2, Late)

# %% [markdown]
# The tests of the repository go further: readers that sleep for random times, all orders of arrival, forward passes
# that are interrupted at every line, and a matrix that is left out, which must cause an error.
#
# ## 5.13.4 What waits for what
#
# A matrix of 16 MB is multiplied with 64 tokens in two ways. First one thread reads a block, multiplies it, and reads
# the next. Then a pool does both at the same time. In this experiment Python reads the blocks, not compiled code, so
# that the start and the end of each read and each product can be recorded. The figure shows the second pass, when
# kernels are compiled and files are open.

# %%
width = 4096
matrix = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
(scratch / "matrix").write_bytes(b"header!!" + matrix.tobytes())
sixteen = Extent(str(scratch / "matrix"), 8, matrix.nbytes, "F32", (rows, width))


class Logged(Files):
    "Files that write down which thread has read, and multiplied, from when to when."

    def __init__(self):
        super().__init__()
        self.events = []

    def event(self, color, call, *args):
        began = time.perf_counter()
        result = call(*args)
        self.events.append((threading.current_thread().name, color, began, time.perf_counter()))
        return result

    def read(self, *args):
        return self.event("C0", super().read, *args)

    def multiply(self, block, x, out, first):
        self.event("C1", matmul_rows, block, x, out, first)


def one_thread(extent, x, out, files):
    buffer = page_buffer((block_kib << 10) + 2 * PAGE)
    for _ in range(2):
        files.events.clear()
        for block in row_blocks(extent, 1, block_kib << 10, "trunk"):
            files.multiply(read_rows(files, block, buffer), x, out, block.first)


def pool(extent, x, out, files):
    blocks = row_blocks(extent, 1, block_kib << 10, "trunk")
    layout = replace(layout_of(4, block_kib << 10, readers), streamed={"m": blocks}, resident={})
    trunk = Trunk(layout, files)
    for _ in range(2):
        files.events.clear()
        trunk.begin()
        trunk.weight("m").map_blocks(lambda first, block, threads: files.multiply(block, x, out, first), readers)
    trunk.close()


# %% tags=["nbval-ignore-output"]
fig, axes = plt.subplots(2, 1, figsize=(6, 3.4), sharex=True)
results, tokens = set(), padded(np.repeat(ramp(width), 64, 0))
for ax, way in zip(axes, (one_thread, pool)):
    files, out = Logged(), np.zeros((64, rows), np.float32)
    way(sixteen, tokens, out, files)
    results.add(out.tobytes())
    start = min(began for _, _, began, _ in files.events)
    events = [(thread, color, began - start, ended - start) for thread, color, began, ended in files.events]
    threads = sorted({thread for thread, *_ in events})
    for thread, color, began, ended in events:
        low = threads.index(thread) - (0.4 if color == "C0" else 0)
        ax.broken_barh([(began * 1e3, (ended - began) * 1e3)], (low, 0.4), color=color, edgecolor="white", lw=0.4)
    names = [name.replace("MainThread", "caller").replace("k3-trunk-", "reader ") for name in threads]
    ax.set_yticks(range(len(threads)), names)
    end = max(ended for _, color, _, ended in events if color == "C1")
    ax.set_title(f"{way.__name__.replace('_', ' ')}: {end * 1e3:.0f} ms until the last product has ended")
    files.close()
axes[1].set_xlabel("time, ms (blue: reading, orange: multiplying)")
plt.show()
assert len(results) == 1
shutil.rmtree(scratch)


# %% [markdown]
# With one thread, reads and products take turns. With the pool, the blocks that were read ahead are multiplied at once.
# Then every reader takes blocks of its own, and while one reader waits for the device, another one multiplies. At the
# end of the matrix the readers read ahead again.
#
# ## 5.13.5 Why the front of the forward pass is pinned
#
# What should the engine do with memory beyond the buffers? The usual answer is a cache that evicts the least recently
# used block (LRU). But forward passes are a cycle: between two uses of one block, every other block is used once. When
# such a cache is smaller than the cycle, the block that is needed next is always the one that was used longest ago. LRU
# has just evicted it. So LRU saves nothing until the whole cycle fits.
#
# A fixed part that stays in memory, a *pinned* part, saves exactly its own bytes in every pass. No cache can save more
# on a cycle. The figure shows this with a cache that knows the future and evicts the block whose next use is farthest
# away. Any part could be pinned. The engine pins the front, because then the first matrices of a pass are in memory
# while the readers begin.

# %%
def lru_hits(capacity, cycle, passes):
    "Share of the requests after the first pass that a cache of `capacity` blocks answers, the oldest evicted first."
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
print(f"with 90% of the cycle in memory: LRU {lru[-2]:.2f}, the pinned front {shares[-2] / CYCLE:.2f}, "
      f"clairvoyant {best[-2]:.2f}")

# %%
fig, ax = plt.subplots()
ax.plot(shares / CYCLE, best, ":", lw=3, color="C5", label="clairvoyant")
ax.plot(shares / CYCLE, shares / CYCLE, "o-", label="pin the front")
ax.plot(shares / CYCLE, lru, "s--", label="least recently used")
ax.set(xlabel="memory, share of the cycle", ylabel="share of reads saved",
       title="On a cycle, LRU saves nothing until it holds everything")
ax.legend()
plt.show()

# %% [markdown]
# The same reason gives memory to the trunk before the experts. A pinned byte of the trunk saves a read at every token.
# A cached expert saves a read only if the router chooses the expert again (chapter [5.16]).
#
# [5.16]: 16_experts.ipynb

# %% [markdown]
# ## 5.13.6 What it costs in K3
#
# The cell below lists the matrices of the released model (`fixtures/k3`) as five readers stream them. An engine that
# loads one layer after another must hold a whole layer in memory. This engine holds eight buffers for row blocks and
# the buffers of one router. A read is widened to whole pages, which adds at most two pages to a block.

# %%
k3 = read_config(ROOT / "fixtures" / "k3")
wanted = frozenset(forward_order(k3))
kinds = {name: (dtype, shape) for name, dtype, shape in text_tensors(k3) if name in wanted}
extents = {name: Extent("", 8, int(np.prod(kinds[name][1])) * ITEMSIZE[kinds[name][0]], *kinds[name])
           for name in forward_order(k3)}
layout = trunk_layout(extents, row_multiples(k3), 5)
sizes = {name: sum(block.nbytes for block in blocks) for name, blocks in layout.streamed.items()}
count, streamed = sum(map(len, layout.streamed.values())), sum(sizes.values())
vectors = sum(tensor.extent.nbytes for tensor in layout.resident.values())
layers = [sum(n for name, n in sizes.items() if layer_of(name) == L) for L in range(k3.num_hidden_layers)]
print(f"{len(sizes):,} matrices in {count:,} blocks, {streamed / 1e9:.1f} GB a pass, "
      f"{sizes[HEAD] / 1e9:.2f} of them the head")
print(f"vectors, always resident: {vectors / 1e6:.0f} MB")
print(f"widening: at most {2 * PAGE * count / streamed:.1%} more bytes")
print(f"buffers: {layout.rows.count} of {layout.rows.nbytes / 1e6:.1f} MB and {layout.router_rows.count} of "
      f"{layout.router_rows.nbytes / 1e6:.2f} MB; layer 0 alone: {layers[0] / 1e6:,.0f} MB")
print(f"    with the lists of blocks {layout.buffer_bytes / 1e6:.0f} MB")  # claim buffers
print(f"trunk and head in memory: {(streamed + vectors) / 1e9:.0f} GB")  # claim whole
print(f"    read anew at 7 GB/s: {streamed / 7e9:.1f} s")  # claim seconds
assert layout.buffer_bytes < max(layers) / 50

# %% [markdown]
# ## 5.13.7 Summary
#
# - A streamed matrix is never in memory as a whole. Blocks of its rows pass through a few buffers, in an order that is
#   known in advance.
# - A streamed matrix has the methods of a resident one, and its products have the same bits.
# - Matrices must be used in the order of the forward pass. A matrix that is left out causes an error.
# - Pinned matrices save their bytes in every pass. An LRU cache of the same size saves nothing unless all fits.
#
# ## Exercises
#
# Answer to 1: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Change `lru_hits` to evict the *most* recently used block. What does it save at half the cycle, and why is that
#    nearly the optimum?
# 2. Put the routers into the pool of the other matrices (`routers=frozenset()`). How does `wait_seconds` change on a
#    slow disk?
# 3. `max_concurrent_blocks` lets all readers work if the caller has all cores. Let it always return `threads`, and
#    measure a step on a disk that needs more than one reader.
#
# Next: [5.14 Which experts a run requested](14_trace.ipynb).
