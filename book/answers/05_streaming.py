# %% [markdown]
# # Answers: part 5, streaming
#
# Some of the exercises of part 5. Try them before you read on. · [contents](../README.md)

# %%
import ast
import contextlib
import copy
import functools
import io
import sys
from pathlib import Path

import jupytext
import numpy as np

from k3lib.config import read_config
from k3lib.model import ResidualStream

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

config, k3 = (read_config(ROOT / folder) for folder in ("fixtures/oracle13/model", "fixtures/k3"))


def function_of(path, name, **names):
    "A function or class of a chapter, alone. `names`: what it uses."
    for cell in jupytext.read(ROOT / "book/05_streaming" / path).cells:
        for node in ast.parse(cell.source).body if cell.cell_type == "code" else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                exec(ast.unparse(node), names)
                return names[name]
    raise ValueError(f"{path} has no {name}")


# %% [markdown]
# ## 5.1, 2. Holes of a pipe, and of a file in `/proc`
#
# Neither can tell holes from data: the system's call fails. So the fallback answers, the whole range as one part. The
# answer is right as a list of what must be copied. But it is not a promise that these bytes exist: a pipe has no
# offsets, and a file in `/proc` has no length before it is read.

# %%
import os

from k3lib.system import data_runs

reading, writing = os.pipe()
status = os.open("/proc/self/status", os.O_RDONLY)
print("pipe:", list(data_runs(reading, 0, 100)), "  /proc:", list(data_runs(status, 0, 100)))
assert list(data_runs(reading, 0, 100)) == [(0, 100)]
for descriptor in (reading, writing, status):
    os.close(descriptor)

# %% [markdown]
# ## 5.2, 1. Without `fsync`
#
# It helps against a power failure, or a crash of the whole system, soon after the renaming. The name may then be on the
# disk before the bytes are. The check only raises errors inside the process. The system keeps running, so the bytes
# reach the disk later, and the check passes without `fsync`.
#
# ## 5.2, 2. Two processes, one path
#
# Each process writes a hidden file of its own, and each renaming is one step. So a reader finds the old file, the file
# of the first process or that of the second, and always a whole one. The process that renames last wins.
#
# ## 5.2, 3. Equal length and equal time
#
# The inode differs, because the replacement is another file. If the new file is on another file system that is mounted
# there, the device differs, too. If somebody writes to the same file and then sets the old time again, no number
# differs. Only a hash of the bytes notices this.
#
# ## 5.3, 2. A field that the reader does not know
#
# For a refusal: the field may describe another model, which this engine would compute wrongly. Against it: published
# configs have many fields that concern training or other programs, and new versions add more. A refusal would reject
# good checkpoints. The reader accepts unknown fields, and relies on two facts. The choices that it knows are fixed in
# `FIXED`, and the list of tensors must agree with the files ([5.4.3]).
#
#
# ## 5.4, 1. Integers that change no tensor
#
# The cell adds 32 to each integer, so that widths remain multiples of 32, and compares the families.
#
# [5.4.3]: ../05_streaming/04_tensors.ipynb#5.4.3-Every-tensor-that-a-config-implies

# %%
from dataclasses import replace

from k3lib.config import INTEGERS
from k3lib.tensors import families

usual = [*families(k3)]
same = [name for name, _, _ in INTEGERS.values()
        if [*families(replace(k3, **{name: getattr(k3, name) + 32}))] == usual]
print("no change of the tensors:", *same)
assert same == ["attn_res_block_size", "num_experts_per_token"]

# %% [markdown]
# A wrong block size or a wrong number of experts gives other logits, and no comparison of shapes notices it. The check
# against another implementation's logits does ([5.8.1]). Some pairs also hide each other: 16 more of
# `qk_nope_head_dim` and 16 fewer of `v_head_dim` leave `kv_b_proj` as it is, but `q_b_proj` and `o_proj` change.
#
#
# ## 5.4, 3. Two rows exchanged
#
# With all matrices in memory nothing changes, because a layer asks for its tensors by name. When matrices are streamed,
# the trunk notices it at the first layer: the forward pass asks for one matrix, and the other one is next ([5.13.2]). A
# packed trunk would have the two tensors in the other order, and its files would differ from those of an earlier run.
#
# [5.8.1]: ../05_streaming/08_model.ipynb#5.8.1-The-whole-model-in-float64
# [5.13.2]: ../05_streaming/13_trunk.ipynb#5.13.2-The-trunk

# %% [markdown]
# ## 5.5, 1. Two places exchanged
#
# Both tensors keep their type, shape and length, and the ranges still fill the file without gap or overlap. So all
# checks of the header hold. Only the values are wrong. What notices it is a hash of the file (chapter [5.27]), or the
# model: its logits move.
#
# ## 5.5, 2. A tensor without numbers
#
# Its bytes begin and end at the same place. The check of one entry accepts it: no bytes, and a shape whose product is
# 0. The check of all entries must accept it at any place: it begins where the entry before it ends, and the next entry
# begins there, too. So entries must be sorted by begin and end, not by begin alone.
#
# [5.27]: ../05_streaming/27_verify.ipynb

# %%
from k3lib.header import header_bytes, parse_header

four, none = ("F32", [1]), ("F32", [0])
for kinds in ([none, four, four], [four, none, four], [four, four, none]):
    head = header_bytes([(name, *kind) for name, kind in zip("abc", kinds)])[8:]
    print([entry[3:] for entry in parse_header(head, 8, "example")])

# %% [markdown]
# ## 5.6, 1. All experts, and a trunk of four bits

# %%
token = schematics.token_bytes(k3)
expert = schematics.part_bytes(k3, "expert")
every = sum(token.values()) - token["experts"] + 92 * 896 * expert
packed = sum(token.values()) - token["trunk"] + token["trunk"] / 16 * 4.25
print(f"all experts active: {every / 1e9:,.0f} GB a token")
print(f"the trunk in MXFP4, too: about {packed / 1e9:.0f} GB a token")
assert round(every / 1e9) == 1558

# %% [markdown]
# (The count takes all of the trunk for bf16. Its few float32 vectors change nothing in these digits.)
#
# ## 5.6, 2. Two files, and sizes that agree
#
# The first one: all tensors of a contiguous group lie in one shard. Offsets of different files have nothing to do with
# each other, so their difference may have any value.
#
# ## 5.7, 1. Some rows of a tensor

# %%
from k3lib.checkpoint import Checkpoint
from k3lib.fileio import read_exactly
from k3lib.tensors import EMBED


def rows(checkpoint, name, first, count):
    "Rows first .. first+count of a matrix, as raw() gives them, without reading the others."
    extent = checkpoint.extent(name)
    dtype = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}[extent.dtype]
    out = np.empty((count, *extent.shape[1:]), dtype)
    row_bytes = extent.nbytes // extent.shape[0]
    with open(extent.file, "rb") as file:
        read_exactly(file, out.reshape(-1).view(np.uint8), extent.offset + first * row_bytes, extent.file)
    return out


with Checkpoint(ROOT / "fixtures/oracle13/model") as small:
    same = np.array_equal(rows(small, EMBED, 304, 2), small.raw(EMBED)[304:306])
print("the same rows:", same, f"  one row of K3: {2 * k3.hidden_size:,} bytes")
assert same and 2 * k3.hidden_size == 14_336

# %% [markdown]
# ## 5.8, 1. Sources of the first mix
#
# Layers 0, 3, 6, 9 and 12 finish a block, after their first mix. So layer 4 is the first whose first mix sees three
# sources: the embedding, the sum of layers 0 to 2, and the running sum.

# %%
stream, seen = ResidualStream(1, config), []
for L in range(config.num_hidden_layers):
    seen.append(stream.n + 1)
    if L % config.attn_res_block_size == 0:
        stream.end_block(np.zeros((1, config.hidden_size), np.float32))
print("sources of the first mix:", seen)
assert next(L for L, n in enumerate(seen) if n > 2) == 4

# %% [markdown]
# ## 5.8, 2. Two mixes exchanged in one layer
#
# The forward pass of chapter [0.1] has its weights in a list, so a layer's can be exchanged.
#
# [0.1]: ../00_k3/01_k3.ipynb

# %%
names = {}
for cell in jupytext.read(ROOT / "book/00_k3/01_k3.py").cells:
    if "while len(ids)" in cell.source:
        break  # the forward pass and the weights are there; writing takes most of the chapter's time
    if cell.cell_type == "code":
        with contextlib.redirect_stdout(io.StringIO()):
            exec(cell.source, names)
ids, expected, layers = names["prompt"] + names["answer"], names["expected"], names["layers"]
names["expert_weights"] = functools.cache(names["expert_weights"])  # unpack each expert once for all passes
moved, right = [], []
first_row = len(names["prompt"]) - 1  # its logits predict the first id of the answer
for L in range(len(layers)):
    W = copy.copy(layers[L])
    for end in ("norm", "proj"):
        first, second = f"self_attention_res_{end}", f"mlp_res_{end}"
        W[first], W[second] = layers[L][second], layers[L][first]
    names["layers"] = [*layers[:L], W, *layers[L + 1:]]
    logits = names["forward"](ids)
    moved.append(np.abs(logits - expected["logits_full"]).max())
    right.append(int((logits[first_row:-1].argmax(1) == names["answer"]).sum()))
print("largest logit difference:", *(f"{m:.1f}" for m in moved))
print(f"ids still right, of {len(names['answer'])}: ", *right)
assert min(moved) > .01

# %% [markdown]
# Here each id follows the right ones before it; a model that writes would go on from its own wrong ids.
#
# ## 5.8, 3. Bytes of one forward pass

# %%
print(f"trunk {token['trunk'] / 1e9:.1f} GB, experts {token['experts'] / 1e9:.1f}, head {token['head'] / 1e9:.1f}: "
      f"{sum(token.values()) / 1e9:.1f} GB")
assert token["trunk"] == 108_811_877_376

# %% [markdown]
# The trunk of chapter [5.6] has 108.8 GB. A pass also reads sixteen experts in each of 92 layers, the head, and one row
# of the embedding.
#
#
# ## 5.9, 1. What whole pages add
#
# [5.6]: ../05_streaming/06_census.ipynb

# %%
from k3lib.disk import Files

checkpoint, files = Checkpoint(ROOT / "fixtures/oracle13/model"), Files()
for name in checkpoint.names():
    files.array(checkpoint.extent(name), "other")
asked, moved = sum(files.bytes_read.values()), files.bytes_transferred
files.close()
print(f"asked for {asked:,} bytes, transferred {moved:,}: {moved / asked:.1f} times as many")
assert moved > 1.5 * asked

# %% [markdown]
# A read is widened by less than two pages, however long it is. Most tensors of the embedded model are shorter than a
# page. In K3 a read has hundreds of kilobytes, so two pages are about one percent of it or less.
#
# ## 5.9, 2. Without `got >= PAGE`
#
# With direct reads the loop never ends. The last read returns a part of a page. The rest would begin at the same whole
# page, so the same read is repeated, and `done` does not grow. Without direct reads the next read begins after the last
# byte of the file and returns nothing. Then `read` raises its error.
#
# ## 5.9, 3. Units in a random order
#
# On a hard disk, because its head must move to each unit. On network storage that reads ahead, too. On a solid-state
# disk a unit of 768 KiB is large enough that the order hardly matters.
#
# ## 5.10, 1. More rows for a head

# %%
from k3lib.header import Extent
from k3lib.layout import BLOCK_ENTRY_BYTES, BUFFER_BYTES, row_buffers


def buffer_of(rows):
    "Bytes of a row buffer if so many rows of `kv_b_proj` must stay together."
    return row_buffers({"kv_b_proj": Extent("", 8, 96 * rows * 1024, "BF16", (96 * rows, 512))}, {"kv_b_proj": rows}, 5)


most = next(rows for rows in range(256, 1 << 16) if buffer_of(rows + 1).nbytes > BUFFER_BYTES)
print(f"up to {most:,} rows of a head, {most / 256:.1f} times those of K3")
assert most == 2040

# %% [markdown]
# ## 5.10, 2. The lists of row blocks

# %%
print(f"{BLOCK_ENTRY_BYTES * 55_430 / 1e6:.1f} MB")

# %% [markdown]
# They are counted because they are memory of the process, like the buffers themselves: almost as much as seven of the
# eight buffers. A plan that leaves them out would exceed its budget by this much.
#
#
# ## 5.11, 1. A product that takes longer than a read
#
# Two buffers are enough: while one is multiplied, the next is read, and a read is ready before its product's turn. The
# core never waits after the first read. So the total is $2 + 3n$.

# %%
schedule = function_of("11_prefetch.py", "schedule")
totals = {buffers: [schedule(n, buffers, 2, 3)[1][-1][1] for n in (1, 6, 20)] for buffers in (1, 2, 9)}
print("ticks for 1, 6 and 20 blocks:", totals)
assert totals[2] == totals[9] == [2 + 3 * n for n in (1, 6, 20)]

# %% [markdown]
# ## 5.11, 2. First in, first out
#
# The time. A buffer that has just become free is likely to be in a cache of the processor still. If the pool lends it
# next, the read writes to memory that is in the cache. The buffer that became free first has been evicted, so the read
# needs more traffic to memory. The results are the same.
#
# ## 5.12, 1. A slow part of a file

# %%
from k3lib.read_multiply import unit_stride

for name, stride in (("1", 1), (str(unit_stride(64)), unit_stride(64))):
    order = [p * stride % 64 for p in range(64)]
    slow = [sum(24 <= unit < 40 for unit in order[p:p + 4]) for p in range(0, 64, 4)]
    print(f"stride {name:>2}: slow units in each round of four: {slow}")
assert max(slow) == 2


# %% [markdown]
# With a stride of 1 all four readers wait in four rounds, and no product can run. With the stride of the chapter, at
# least two readers of each round have a fast unit.
#
# ## 5.13, 1. Evict the block used last
#
# On a cycle the block that was just used is the one whose next request is farthest away. So evicting it is nearly what
# a cache would do that knows the future; that one may also decline to keep a block at all.

# %%
def mru_hits(capacity, cycle, passes):
    "As lru_hits, but the most recently used block is evicted."
    kept, hits = [], 0
    for n in range(cycle * passes):
        block = n % cycle
        hits += block in kept
        kept = [b for b in kept if b != block]
        kept = [*(kept if len(kept) < capacity else kept[:-1]), block]
    return hits / (cycle * (passes - 1))


lru, best = (function_of("13_trunk.py", name) for name in ("lru_hits", "clairvoyant_hits"))
for name, hits in (("least recently used", lru), ("most recently used", mru_hits), ("clairvoyant", best)):
    print(f"{name:20} half of the cycle: {hits(30, 60, 10):.1%} of the requests are hits")
assert lru(30, 60, 10) == 0 and mru_hits(30, 60, 10) > .95 * best(30, 60, 10)

# %% [markdown]
# ## 5.14, 1. The size of a trace
#
# Two tokens, the layers with experts, the experts that a token chooses, and eight bytes for a request:

# %%
layers = config.num_hidden_layers - config.first_k_dense_replace
print(2 * layers * config.num_experts_per_token * 8, "bytes")
assert 2 * layers * config.num_experts_per_token * 8 == 768

# %% [markdown]
# ## 5.14, 2. Is it a repetition?
#
# Two equal passes: no. A pass is a repetition only if it has more requests than the pass before, in every layer. So
# both passes count whole. The pass of two tokens after a pass of the first token: yes. In each layer it begins with the
# requests of the first token and adds those of the second.

# %%
from k3lib.trace import steps_of

one, two = [(1, [7, 3]), (2, [0, 5])], [(1, [7, 3, 3, 9]), (2, [0, 5, 6, 7])]
print("equal passes:", steps_of([one, one])[1], "repetitions; one token, then two:", steps_of([one, two])[1])
assert (steps_of([one, one])[1], steps_of([one, two])[1]) == (0, 1)

# %% [markdown]
# ## 5.15, 1. Where LRU begins to hit
#
# From almost one working set on, whatever the share that stays. Between two requests of the same expert, all other
# layers request theirs. LRU still has the expert only if the cache holds all experts that were requested since: those
# of 91 other layers in K3, of 7 others in the cell below. The share that stays decides how many hits there are then.

# %%
from k3lib.cache_policy import hit_rates

made_up = function_of("15_cache_policy.py", "made_up", np=np, K=16, STAYS=np.full(16, 0.6))
lru = hit_rates(list(made_up(8, 896, 16, 0)), (0.5, 0.87, 1.0))["LRU"]
print("LRU at 0.5, 0.87 and 1 working sets:", *(f"{rate:.2f}" for rate in lru))
assert lru[1] == 0 and lru[2] > 0.5

# %% [markdown]
# ## 5.15, 3. A pin and the clairvoyant cache
#
# A pin keeps the same experts all the time. An expert that is used in three steps in a row and never again is worth a
# place only in these steps. The clairvoyant cache gives the place to another expert afterwards; the pin cannot.
#
# ## 5.16, 2. Scales with each unit

# %%
from k3lib.read_multiply import unit_rows

together = apart = extra = 0
for n, row in ((3072, 1792), (3584, 1536), (3072, 1792)):
    units = -(-n // unit_rows(row))
    together, apart = together + units + 1, apart + 2 * units
    extra += (units - 1) * 2 * 4096
print(f"{together} reads for an expert, scales read at once; {apart} with the scales of each unit")
print(f"at most {extra / 1e3:.0f} kB more in whole pages, {extra / 17_547_264:.1%} of an expert")
assert (together, apart) == (26, 46)

# %% [markdown]
# The bytes hardly change, but the reads nearly double. The buffer for scales would be smaller by some hundred
# kilobytes.
#
# ## 5.17, 2. Page cache that counts as free
#
# 8 − (7.5 − 6) = 6.5 GB are free. If inactive page cache did not count as free, only 0.5 GB would be, and a plan that
# takes 2 GB would be refused although the system would give the memory.
#
# ## 5.18, 1. The smallest budget for the whole trunk

# %%
import math

import k3lib.plan
from k3lib.header import ITEMSIZE
from k3lib.tensors import global_tensors, layer_tensors

Shapes = function_of("18_plan.py", "Shapes", math=math, global_tensors=global_tensors, layer_tensors=layer_tensors,
                     ITEMSIZE=ITEMSIZE, Extent=Extent)
k3lib.plan.available = lambda: (None, ())  # this machine need not have the memory
released = Shapes(k3)
low, high = 64, 128
while high - low > 1:
    middle = (low + high) // 2
    plan = k3lib.plan.make_plan(k3, released, middle * 10**9, 4096)
    low, high = (low, middle) if plan.pinned_bytes == plan.trunk_bytes else (middle, high)
below = k3lib.plan.make_plan(k3, released, low * 10**9, 4096)
print(f"from {high} GB on; at {low} GB {below.pinned_bytes / below.trunk_bytes:.0%} is pinned, and "
      f"{below.layout.trunk.rows.count} buffers are needed")
assert high in (112, 113)

# %% [markdown]
# Just below it some matrices still stream, so the plan has buffers for row blocks. When the whole trunk is pinned there
# are no buffers, and the rest goes to experts.
#
# ## 5.18, 2. Half of the spare bytes for the chunk

# %%
from k3lib.plan import activation_bytes

full = activation_bytes(k3, 64) - activation_bytes(k3, 1)
print(f"a chunk of 64 tokens takes {full / 1e6:.0f} MB more than one of 1 token")
print(f"a quarter is enough from {4 * full / 1e6:.0f} MB of spare bytes on, a half from {2 * full / 1e6:.0f} MB on")

# %% [markdown]
# So the plan changes only for budgets that are less than these few hundred megabytes above the smallest one. There a
# prompt of 64 tokens would read the trunk fewer times.
#
# ## 5.19, 1. Two power failures
#
# After the first one the next run finds a temporary file and no final name. It removes the temporary file and writes
# the file again. After the second one the final name may be on the disk or not. If it is, the file is complete, because
# it was flushed before, and the next run compares it. If it is not, the next run writes the file again.
#
# ## 5.19, 2. Renaming, without a lock
#
# A rename replaces a file that has the name already. So each file of the folder is that of one run or of the other, and
# the folder can be a mixture of two checkpoints. Each file was compared with its own checkpoint, so no run notices it.
#
# ## 5.19, 3. Half of the trunk pinned

# %%
for rate in (1, 7):
    print(f"the trunk at {rate} GB/s: {25.8 + 108.8 / 2 / rate:.1f} s")
