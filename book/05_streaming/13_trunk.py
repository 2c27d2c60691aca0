# %% [markdown]
# # 5.13 The trunk: rows that arrive
#
# 108.8 GB of K3 are read for every token, whatever the token is: projections, norms, shared experts. This chapter lets a matrix
# be multiplied that is never all in memory. At the end you can say what a block of rows goes through between the disk and the
# dot product, and why the first gigabytes of a budget belong to the front of the walk.
#
# [5.12 Read, multiply, read, multiply](12_read_multiply.ipynb) · [contents](../README.md) · [5.14 Which experts a run requested](14_trace.ipynb)
#
# | word | meaning | in code |
# |---|---|---|
# | extent | where a tensor's bytes lie: file, offset, length | `Extent` (5.6) |
# | block | as many whole rows of a matrix as one read brings | `Read` |
# | slot | page-aligned memory that holds one block | `Ring.memory` |
# | ring | a fixed number of slots, filled ahead of the arithmetic | `Ring` |
# | pass | one walk over all layers, in a fixed order | `Trunk.begin` |
# | pinned | kept in memory from the start, never read again | `Trunk.resident` |

# %% [markdown]
# How many readers may do this at a time? If the caller gives some of the cores, as many as that. If it gives all, more than there are
# cores: one that waits for its device leaves the core to another.
#
# What is no plain product, as attention with `kv_b_proj`, is handed to `share` as a function of whole blocks. A reader calls it on a block it
# has read.

# %% tags=["export"]
import numpy as np
from k3lib.parallel import CORES
from k3lib.matmul import ResidentMatrix, bf16_to_float32, matmul_rows
from k3lib.tensors import is_matrix
from k3lib.disk import MAX_READERS
from k3lib.layout import router_buffers, row_blocks
from k3lib.prefetch import Prefetcher
from k3lib.read_multiply import COMPILED_READS, stream_rows


# %% tags=["export"]
def max_concurrent_blocks(threads):
    "How many readers may read and multiply at a time when the arithmetic has `threads` threads."
    return threads if threads < CORES else max(threads, MAX_READERS)


class StreamedMatrix:
    "A matrix that goes by once: its blocks are slots of the ring, the first of them block `number`."

    def __init__(self, ring, extent, reads, number):
        self.ring, self.reads, self.number, self.shape = ring, reads, number, extent.shape

    def blocks(self, multiple=1):
        """Yields (first row, rows [m, k]) in order. The rows are valid until the next block is asked for.

        Whoever stops half-way keeps the slot until the ring is rewound: giving it back from a generator's end would leave
        the moment to the garbage collector.
        """
        for number, read in enumerate(self.reads, self.number):
            if read.rows % multiple and read.first + read.rows != self.shape[0]:
                raise ValueError(f"{multiple} rows must stay together, but a block has {read.rows}")
            data = self.ring.take(number)
            yield read.first, data.reshape(read.rows, *self.shape[1:])
            self.ring.release(number)

    def each(self, work, threads, stream=None):
        """Call work(first row, rows [m, k]) on every block, in any order, at most `threads` at a time, on the thread that
        has read it: the rows are still in that core's cache. Returns when all calls have. `stream`: as Ring.each takes it."""
        def call(read, data):
            work(read.first, data.reshape(read.rows, *self.shape[1:]))
        self.ring.each(self.number, len(self.reads), call, threads, stream)

    def share(self, work, threads):
        "The same for arithmetic that has `threads` threads: as many readers at a time as at_once() says."
        self.each(work, max_concurrent_blocks(threads))

    def multiply(self, x, out, threads):
        "out float32 [T, n] = x W^T for x as `linear` lays it out. What has not been read ahead is read and multiplied in pieces."
        def work(first, rows):
            matmul_rows(rows, x, out, first)

        def stream(read, slot, drawn):
            stream_rows(self.ring.files, read, slot, x, out, drawn)
        self.each(work, max_concurrent_blocks(threads), stream if COMPILED_READS else None)


# %% tags=["export"]
def as_float32(array):
    "A resident vector, [1, H] weight (as [H]) or convolution, float32."
    array = bf16_to_float32(array) if array.dtype == np.uint16 else array
    return array.reshape(-1) if array.ndim == 2 else array


# %% [markdown]
# Some matrices are worth having early. Until the **router** of a layer has spoken, no expert can be asked for, and all of its 12.8 MB are needed
# for that. Behind the blocks of the matrices before it, it would come last and then hold up everything. So it has a ring of its own, large
# enough for one router: as the router of this layer is used up, that of the next comes in, piece by piece, by a single reader, which
# is in nobody's way and has a whole layer's time.

# %% tags=["export"]
class Trunk:
    """Every tensor of the walk but the routed experts, resident or streamed.

    `walk`: tensor names in the order one pass takes them. `pinned`: matrices kept in memory. `multiples`: {name: rows that
    must stay together}. The other matrices stream through the ring, the same list of reads every pass, at most `ahead` blocks of
    it waiting; those of `early`, whose rows need not stay together, through a ring of early_room() with one reader.
    """

    def __init__(self, checkpoint, walk, pinned, multiples, files, parts, slots, slot_bytes, readers, progress=None, ahead=None, early=frozenset()):
        self.files, self.parts, self.checkpoint = files, parts, checkpoint
        self.extents = {name: checkpoint.extent(name) for name in walk}
        self.resident, self.reads = {}, {}
        room = router_buffers([self.extents[name] for name in early]) if early else None
        for name, extent in self.extents.items():
            if is_matrix(name, extent) and name not in pinned:
                self.reads[name] = row_blocks(extent, multiples.get(name, 1), room[1] if name in early else slot_bytes, parts(name))
        for name, extent in self.extents.items():
            if name not in self.reads:
                array = files.array(extent, parts(name))
                self.resident[name] = ResidentMatrix(array) if is_matrix(name, extent) else as_float32(array)
                if progress is not None:
                    progress(extent.nbytes)
        self._order, self._next, self._index, lines = list(self.reads), 0, {}, ([], [])
        for name in self._order:
            line = name in early
            self._index[name] = line, len(lines[line])
            lines[line].extend(self.reads[name])
        self.ring = Prefetcher(files, lines[0], slots, slot_bytes, readers, ahead) if lines[0] else None
        self.early = Prefetcher(files, lines[1], *room, 1, name="early") if lines[1] else None
        self._starts, self._closed = [0, 0], False

    def _rings(self):
        return [ring for ring in (self.ring, self.early) if ring is not None]

    def begin(self):
        "Start a pass: a ring whose last one stopped half-way begins anew."
        self._next, self._starts = 0, [ring and ring.begin() for ring in (self.ring, self.early)]

    def take(self, name):
        "A matrix with .shape and .blocks(), or a float32 array. A streamed tensor comes when its turn in the walk comes, once a pass."
        resident = self.resident.get(name)
        if resident is not None:
            return resident
        if self._closed:
            raise RuntimeError("the trunk is closed")
        if self._order[self._next] != name:
            raise RuntimeError(f"the walk asks for {name}, but {self._order[self._next]} is next")
        self._next = (self._next + 1) % len(self._order)
        line, index = self._index[name]
        return StreamedMatrix((self.ring, self.early)[line], self.extents[name], self.reads[name], self._starts[line] + index)

    def row(self, name, i):
        "Row `i` of a matrix outside the walk, float32: one read."
        return bf16_to_float32(self.files.array(self.checkpoint.extent(name), self.parts(name), i, 1)[0])

    @property
    def wait_seconds(self):
        "Seconds the arithmetic stood still for a row block."
        return sum(ring.wait_seconds for ring in self._rings())

    def close(self):
        "End the readers and give the memory back; whoever asks for a tensor gets a RuntimeError."
        self._closed = True
        for ring in self._rings():
            ring.close()
        self.resident.clear()


# %% [markdown]
# ## 5.13.1 The gate: streamed equals resident
#
# One layer and a half of the embedded model, multiplied resident and through rings of different sizes, twice over. A wrong slot, a stale
# block or a lost row would change bytes.

# %%
from k3lib.linear import NotFinite, linear

checkpoint = Checkpoint(FOLDER)
WALK = [name for name in checkpoint.names() if ".layers.0." in name or ".layers.1.self_attn." in name]
MATRICES = [name for name in WALK if is_matrix(name, checkpoint.extent(name))]


def ramp(n):
    return np.linspace(-1, 1, n, dtype=np.float32)[None]


class Whole(Prefetcher):
    "Every block is read whole before it is multiplied."

    def each(self, number, count, work, threads, stream=None):
        super().each(number, count, work, threads)


def products(slots, slot_bytes, readers, passes=2, ring=Prefetcher):
    "Every matrix of the walk times a fixed vector, in order, `passes` times over."
    files = Files()
    trunk = Trunk(checkpoint, WALK, frozenset(), {}, files, lambda name: "trunk", slots, slot_bytes, readers)
    if ring is not Prefetcher:
        trunk.ring.close()
        trunk.ring = ring(files, trunk.ring.reads, slots, slot_bytes, readers)
    out = []
    for _ in range(passes):
        trunk.begin()
        out += [linear(trunk.take(name), ramp(checkpoint.extent(name).shape[1])) for name in MATRICES]
    trunk.close()
    files.close()
    return np.concatenate([y.ravel() for y in out])


expected = np.concatenate([linear(ResidentMatrix(checkpoint.raw(name)), ramp(checkpoint.extent(name).shape[1])).ravel() for name in MATRICES] * 2)
for ring in (Prefetcher, Whole):
    for slots, slot_bytes, threads in ((1, 20_000, 1), (2, 20_000, 2), (3, 50_000, 2), (40, 80_000, 3)):
        assert products(slots, slot_bytes, threads, ring=ring).tobytes() == expected.tobytes()
print("four rings, in pieces and whole, two passes each, the bytes of the resident product: True")


# %% [markdown]
# Three rings that break the rule, on purpose. The first fills a slot that is still in use, the second gives out a block twice and skips
# one, the third begins the second pass one block late. None passes, and if there is an error it is luck.

# %%
class Hasty(Whole):
    "Its slots are free again the moment they are handed out."

    def take(self, number):
        data = super().take(number)
        self.release(number)
        time.sleep(1e-3)  # a product that takes its time
        return data

    def each(self, number, count, work, threads, stream=None):
        for n in range(number, number + count):
            work(self.reads[n % len(self.reads)], self.take(n))


class Stuttering(Whole):
    def _fill(self, slot, read):
        i = self.reads.index(read)
        return super()._fill(slot, self.reads[i - 1] if i % 2 and self.reads[i - 1].nbytes == read.nbytes else read)


class Shifted(Whole):
    def _fill(self, slot, read):
        i, late = self.reads.index(read), self._issued > len(self.reads)
        other = self.reads[(i + 1) % len(self.reads)]
        return super()._fill(slot, other if late and other.nbytes == read.nbytes else read)


def passes(ring):
    try:
        return products(2, 20_000, 2, ring=ring).tobytes() == expected.tobytes()
    except NotFinite:  # float32 read as bf16 has infinities
        return False


for ring in (Hasty, Stuttering, Shifted):
    assert not passes(ring)
    print(f"{ring.__name__:<11} fails the gate: True")

# %% [markdown]
# The tests go further: readers that sleep at random, every slot poisoned when it is given back, fifty runs; passes broken off at every
# block; a matrix abandoned half-way, which must be an error and not a shift by the rows that were left.
#
# ## 5.13.2 What waits for what
#
# A matrix of 16 MB of real bytes, eight tokens, and three ways through it: read a block, then multiply it; a ring, whose caller multiplies; a
# ring whose readers read and multiply in pieces. Every read and every product leaves an event.

# %%
from k3lib.mxfp4 import page_buffer as line_aligned

width = 4096
matrix = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
(scratch / "matrix").write_bytes(b"header!!" + matrix.tobytes())
with open(scratch / "holes", "wb") as file:
    file.truncate(8 + matrix.nbytes)


def first_rows(n, where="matrix"):
    return Extent(str(scratch / where), 8, n * width * 4, "F32", (n, width))


class OneByOne:
    "Read, multiply, read, multiply."

    def __init__(self, files, extent, reads):
        self.files, self.extent, self.reads, self.slot = files, extent, reads, page_buffer(max(read.nbytes for read in reads) + 2 * PAGE)

    def multiplied(self, block, x, out, first):
        began = time.perf_counter()
        matmul_rows(block, x, out, first)
        self.files.note("arithmetic", began, block.nbytes)

    def run(self, x, out):
        for read in self.reads:
            start = self.files.read(self.slot, self.extent, read.begin, read.nbytes, "trunk")
            self.multiplied(typed(self.slot, start, read.nbytes, "F32").reshape(read.rows, width), x, out, read.first)

    def close(self):
        self.files.close()


class CallerMultiplies(OneByOne):
    def __init__(self, files, extent, reads):
        self.files, self.extent, self.reads = files, extent, reads
        self.ring = Prefetcher(files, reads, 4, max(read.nbytes for read in reads) + 2 * PAGE, readers)

    def streamed(self):
        return StreamedMatrix(self.ring, self.extent, self.reads, self.ring.begin())

    def run(self, x, out):
        for first, block in self.streamed().blocks():
            self.multiplied(block, x, out, first)

    def close(self):
        self.ring.close()
        self.files.close()


class ReadersMultiply(CallerMultiplies):
    def run(self, x, out):
        self.streamed().multiply(x, out, readers)


def timed(way, extent, kib, tokens, passes=2):
    "(seconds, processor seconds, events, product) of one pass of `way` over a matrix, the fastest of a few."
    files, x = Files(), line_aligned((tokens, width))
    machine = way(files, extent, row_blocks(extent, 1, kib << 10, "trunk"))
    x[:] = ramp(width)
    runs = []
    for _ in range(passes):
        files.log, out = [], np.zeros((tokens, extent.shape[0]), np.float32)
        began, busy = time.perf_counter(), time.process_time()
        machine.run(x, out)
        runs.append((time.perf_counter() - began, time.process_time() - busy, files.log, out))
    machine.close()
    return min(runs, key=lambda run: run[0])


WAYS = {"read, then multiply": OneByOne, "a ring, the caller multiplies": CallerMultiplies, "readers read and multiply": ReadersMultiply}
sixteen = first_rows(1024)
digests = {hashlib.sha256(timed(way, sixteen, slot_kib // 4, 8)[3]).hexdigest() for way in WAYS.values()}
assert len(digests) == 1
print("three ways, one result: True")


# %% tags=["nbval-ignore-output"]
def timeline(ax, log, title):
    "Reads and products of each thread over time."
    start, threads = min(e.began for e in log), sorted({e.thread for e in log})
    for row, thread in enumerate(threads):
        for what, low, color in (("trunk", row - 0.4, "C0"), ("arithmetic", row, "C1")):
            spans = [((e.began - start) * 1e3, (e.ended - e.began) * 1e3) for e in log if e.thread == thread and e.what == what]
            ax.broken_barh(spans, (low, 0.4), color=color, edgecolor="white", lw=0.4)
    ax.set_yticks(range(len(threads)), [t.replace("MainThread", "caller").replace("k3-trunk-", "reader ") for t in threads])
    ax.set_title(title)


fig, axes = plt.subplots(3, 1, figsize=(6, 4.4), sharex=True)
for ax, (name, way) in zip(axes, WAYS.items()):
    seconds, _, log, _ = timed(way, sixteen, slot_kib // 4, 8, passes=12)
    timeline(ax, log, f"{name}: {seconds * 1e3:.0f} ms")
axes[2].set_xlabel("time, ms (blue: reading, orange: multiplying)")
plt.show()


# %% [markdown]
# In the first picture nothing overlaps. In the second the caller multiplies what readers have put down, at the price of fetching it from
# another core's cache or from memory. In the third every reader goes through its block in pieces of its own, and what one waits for the
# other does not. At the left edge of the last two the readers have run ahead: part of the next pass was there before it began.
#
# ## 5.13.3 Making it fast
#
# What does a byte cost on its way? The device sets a floor: no ring is faster than the disk. With holes, which the kernel fills with zeros as
# fast as it can write, the processor sets it, and then it matters where the bytes are between the read and the product. One token, a 64 MB matrix:

# %% tags=["nbval-ignore-output"]
def rates(way, where, kib=slot_kib):
    "(GB a second, GB a second of processor time) of the fastest of some passes over the whole matrix."
    seconds, busy, _, _ = timed(way, first_rows(rows, where), kib, 1, passes=8)
    return matrix.nbytes / 1e9 / seconds, matrix.nbytes / 1e9 / busy


print(f"{'':<32}{'from the device':>17}{'holes':>24}")
for name, way in WAYS.items():
    (device, _), (wall, worked_rate) = rates(way, "matrix"), rates(way, "holes")
    print(f"{name:<32}{device:>12.1f} GB/s{wall:>12.1f} GB/s, {worked_rate:.1f} per core")

# %% tags=["nbval-ignore-output"]
sizes, by_size, usual = [64, 128, 256, 512, 1024, 2048, 4096], [], READ_UNIT
for kib in sizes:
    READ_UNIT = kib << 10  # the compiled loop is told how many rows make a piece
    by_size.append(rates(ReadersMultiply, "holes")[1])
READ_UNIT = usual
fig, ax = plt.subplots()
ax.plot(sizes, by_size, "o-")
ax.axhline(rates(CallerMultiplies, "holes")[1], color="0.6", lw=1)
ax.text(sizes[0], rates(CallerMultiplies, "holes")[1] * 1.05, "the caller multiplies", fontsize=8, color="0.4")
ax.set_xscale("log", base=2)
ax.set_xticks(sizes, sizes)
ax.set(xlabel="bytes in a piece, KiB", ylabel="GB a second of processor time", title="The best piece fills the core's own cache, and no more", ylim=0)
plt.show()


# %% [markdown]
# ## 5.13.4 Why the front of the walk is pinned
#
# Memory left over could be a cache. But a pass is a cycle: when a block is asked for again, everything else has been asked for
# since. A least-recently-used cache smaller than the cycle has always just thrown away the block that comes next. Pinning any
# fixed part saves exactly that part, every pass; the front is as good as any, and it is ready when a pass begins. The third line
# knows the future and lets go of what is needed last. On a cycle that is the block just used, every time: the best of all caches pins.

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
# The same argument says that the trunk gets memory before experts do: a pinned trunk byte is used at every token, a cached
# expert only if the router comes back to it (chapter 5.16).
#
# ## 5.13.5 The trunk on a faster disk
#
# Streaming needs no preparation. But the trunk is 108.8 GB of 1,561, read at every token, and a small fast disk may be at hand. `pack` copies the
# walk, in use order, into plain safetensors files: a checkpoint of its own. What the source left as holes stays holes.

# %% [markdown]
# ## 5.13.6 What it costs in K3
#
# With the released shapes (`fixtures/k3`), slots of 4 MiB. Widening to whole pages adds at most two pages to a block. The ring replaces what an engine
# that loads layer by layer must hold: 2.34 GB for layer 0 alone.

# %%
from k3lib.config import read_config
from k3lib.tensors import text_tensors

SLOT, SLOTS = 4 << 20, 4
k3 = read_config(ROOT / "fixtures" / "k3")
trunk = [(name, Extent("", 8, int(np.prod(shape)) * ITEMSIZE[dtype], dtype, shape)) for name, dtype, shape in text_tensors(k3)
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
# - A slot is the unit of trust: filled once, multiplied once, given back once, and numbered so that nothing stale can touch it.
# - Pinning the front of a cyclic walk saves its share of every pass. An LRU of the same size saves nothing.
#
# ## Exercises
#
# 1. In `schedule`, let a product take 3 ticks and a read 2. How many slots are enough, and what is the total for $n$ blocks?
# 2. Change `lru_hits` to evict the *most* recently used block. What does it save at half the cycle, and why is that nearly the optimum?
# 3. How many bytes does widening add to one pass over the embedded model? `Files.moved` counts them; compare with K3's blocks.
# 4. Give `Ring` a first-in, first-out list of free slots and measure 5.13.3 again. Which column changes?
#
# Next: [5.4 Experts](04_experts.ipynb), the one part of a pass that nobody can order in advance.
