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


def function_of(path, name):
    "A function of a chapter, alone."
    for cell in jupytext.read(ROOT / "book/05_streaming" / path).cells:
        for node in ast.parse(cell.source).body if cell.cell_type == "code" else ():
            if isinstance(node, ast.FunctionDef) and node.name == name:
                names = {}
                exec(ast.unparse(node), names)
                return names[name]
    raise ValueError(f"{path} has no {name}")


# %% [markdown]
# ## 5.5, 1. Two places exchanged
#
# Both tensors keep their type, shape and length, and the ranges still fill the file without gap or overlap. So all
# checks of the header hold. Only the values are wrong. What notices it is a hash of the file (chapter [5.27]), or the
# model: its logits move.
#
# ## 5.6, 1. All experts, and a trunk of four bits
#
# [5.27]: ../05_streaming/27_verify.ipynb

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
# ## 5.11, 1. A product that takes longer than a read
#
# Two buffers are enough: while one is multiplied, the next is read, and a read is ready before its product's turn. The
# core never waits after the first read. So the total is $2 + 3n$.
#
# [5.6]: ../05_streaming/06_census.ipynb

# %%
schedule = function_of("11_prefetch.py", "schedule")
totals = {buffers: [schedule(n, buffers, 2, 3)[1][-1][1] for n in (1, 6, 20)] for buffers in (1, 2, 9)}
print("ticks for 1, 6 and 20 blocks:", totals)
assert totals[2] == totals[9] == [2 + 3 * n for n in (1, 6, 20)]


# %% [markdown]
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
