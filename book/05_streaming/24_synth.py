# %% [markdown]
# # 5.24 A checkpoint without the weights
#
# The engine of this book must open, index, plan and stream 1.56 TB that few readers have. This chapter writes a
# stand-in: the released names, types, shapes and file sizes, in about 5 GB of real bytes and a great many zeros. At the
# end you can make one of any shape, know why its holes are honest, and know what it cannot show.
#
# [5.23 Whether every byte is the one that was published](23_verify.ipynb) ·
# [contents](../README.md) ·
# [5.25 The dial: one model, any budget](25_decode.ipynb)

# %%
import time
from collections import Counter

import matplotlib.pyplot as plt
import safetensors

from k3lib.checkpoint import Checkpoint
from k3lib.tensors import census_part
from k3lib.mxfp4 import decode

# %%
ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
scratch = tempfile.TemporaryDirectory()

# %% [markdown]
# | symbol | meaning | in code |
# |---|---|---|
# | hole | a stretch of a file that was never written: reads as zeros, takes no disk | |
# | live | a row, head or expert that has values | `live_rows`, `live_heads`, `live_experts` |
# | $n$ | inputs of a matrix that are not always zero | `live_inputs` |
# | $[l, h]$ | interval from which a run's values are drawn | `Run.low`, `Run.high` |
# | seed | with a tensor's name, what decides its bits | `stream(seed, name)` |
#
# ## 5.24.1 By hand: three bytes in a megabyte
#
# A file's length and its bytes on disk are two numbers. Set the length, seek, write; the file system remembers where
# data are, page by page, and invents zeros elsewhere. A reader cannot tell them from zeros that were written.

# %%
toy = Path(scratch.name) / "toy"
with open(toy, "wb") as file:
    file.truncate(1 << 20)
    file.seek(500_000)
    file.write(b"K3!")
data = toy.read_bytes()
print(f"length {toy.stat().st_size:,}; bytes that are not zero: {sum(map(bool, data))}, at {data.index(b'K3!'):,}")


# %% [markdown]
# Where the data are, `lseek` answers: `SEEK_DATA` finds the next byte on disk, `SEEK_HOLE` the next that is not. Three
# bytes cost a page.

# %% tags=["nbval-ignore-output"]
def data_extents(path):
    "[(first byte, bytes)] of the stretches of a file that are on disk."
    found, at, end = [], 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while at < end:
            try:
                begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # nothing but a hole from here on
                break
            at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            found.append((begin, at - begin))
    return found


print(f"on disk {toy.stat().st_blocks * 512:,} bytes; data at {data_extents(toy)}")

# %% [markdown]
# ## 5.24.2 The numbers of a config
#
# Chapter 5.1 reads a `config.json` and derives every tensor's name and shape from it. Here the same tables are used the
# other way: from numbers to the file. Three presets: the released shape, a slice of it at full width, and the small
# 13-layer graph.

# %% tags=["export"]
import hashlib
import json
import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from math import ceil, floor, log2, prod, sqrt
from pathlib import Path
from typing import NamedTuple
import numpy as np
from k3lib.fileio import writing
from k3lib.config import (
    Config,
    ConfigError,
    FIXED,
    INTEGERS,
    REALS,
    read_config,
)
from k3lib.tensors import global_tensors, layer_tensors, split_name
from k3lib.header import ITEMSIZE, header_bytes


# %% tags=["export"]
class SynthError(ValueError):
    "A synthetic checkpoint that cannot be written as asked. One line: the argument, what was found, what was expected."


RELEASED = {
    "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "attn_res_block_size": 12, "first_k_dense_replace": 1,
    "intermediate_size": 33792, "num_attention_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
    "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "kda_num_heads": 96, "kda_head_dim": 128,
    "kda_conv_kernel": 4, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0, "kda_gate_lower_bound": -5.0,
}


SLICE = RELEASED | {"num_hidden_layers": 4, "num_experts": 32, "vocab_size": 16384}


ORACLE = RELEASED | {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 13, "attn_res_block_size": 3, "intermediate_size": 256,
    "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 96,
    "routed_expert_hidden_size": 64, "kda_num_heads": 4, "kda_head_dim": 32,
}


PRESETS = {"full": (RELEASED, True), "slice": (SLICE, False), "oracle": (ORACLE, False)}  # numbers, and whether most rows stay holes

# %% [markdown]
# Any number can be changed, since a test wants odd models: more KDA heads than MLA heads, widths that divide nothing.
# Each is held to the limits the reader has, and refused by the name of the argument.

# %% tags=["export"]
LIMITS = {name: (int, low, high) for name, low, high in INTEGERS.values()} | {name: (float, low, high) for name, low, high in REALS.values()}


SHORT = {"num_hidden_layers": "layers", "num_experts": "experts", "vocab_size": "vocab"}


ARGUMENTS = {SHORT.get(name, name): name for name in LIMITS}  # argument of synth -> field of Config


def checked(argument, value, kind, low, high):
    "`value` if it is a number of `kind` within low..high, else SynthError."
    if type(value) in (kind, int) and low <= value <= high:
        return value
    raise SynthError(f"{argument} is {value!r}, expected {'an integer' if kind is int else 'a number'} in {low:,}..{high:,}")


def numbers(preset, **changes):
    "{field of Config: value} of a preset with changes, given by the names of ARGUMENTS. None changes nothing."
    if preset not in PRESETS:
        raise SynthError(f"preset is {preset!r}, expected one of {', '.join(PRESETS)}")
    found = dict(PRESETS[preset][0])
    for argument, value in changes.items():
        if argument not in ARGUMENTS:
            raise SynthError(f"argument {argument!r} is unknown, expected one of {', '.join(ARGUMENTS)}")
        if value is not None:
            found[ARGUMENTS[argument]] = checked(argument, value, *LIMITS[ARGUMENTS[argument]])
    checked("experts", found["num_experts"], int, found["num_experts_per_token"], LIMITS["num_experts"][2])
    return found


# %%
for preset, changes in ("huge", {}), ("slice", {"layers": 0}), ("full", {"experts": 15}), ("oracle", {"kda_num_heads": 2.5}), ("oracle", {"depth": 3}):
    try:
        numbers(preset, **changes)
        raise AssertionError("believed")
    except SynthError as error:
        print(str(error)[:110])

# %% [markdown]
# The last 256 ids of the released vocabulary are control tokens (16 in a small one). Their names are facts, so
# `tokenizer_config.json` can be written and generation knows where to stop. The vocabulary itself, `tiktoken.model`, is
# not ours to write: copy the released file into the folder and `--prompt` works, provided the vocabulary has its
# 163,840 ids.

# %% tags=["export"]
CONTROL = {
    0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 6: "[start_header_id]",
    7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
    65: "<osagent_mode>", -2: "[UNK]", -1: "[PAD]",
}  # by place among the control ids; the other places have no name


UNFLAGGED = ("<|open|>", "<|close|>", "<|sep|>")  # those the released file does not call special


def control_ids(vocab):
    "How many ids at the end of a vocabulary are control tokens: 256 as released, 16 in a small one, none in a tiny one."
    return 256 if vocab >= 4096 else 16 if vocab >= 64 else 0


def tokenizer_tree(vocab):
    "tokenizer_config.json as an object: names and ids of the control tokens."
    n = control_ids(vocab)
    table = {vocab - n + place % n: name for place, name in CONTROL.items() if place < n - 2} if n else {}
    entries = {str(i): {"content": table[i], "special": table[i] not in UNFLAGGED} for i in sorted(table)}
    names = {f"{x.lower()}_token": f"[{x}]" for x in ("BOS", "EOS", "UNK", "PAD")} if n else {}
    return {"added_tokens_decoder": entries} | names


# %% [markdown]
# `config.json` says at its top that it is synthetic, and how it was made. The layers follow the released rule, counted
# from one: every fourth is MLA, and the last.

# %% tags=["export"]
def config_tree(found, marker):
    "config.json as an object, from numbers by Config's field names; `marker` says what is synthetic about it."
    text, last = {"linear_attn_config": {}}, found["num_hidden_layers"]
    for path, value in ({path: found[name] for path, (name, *_) in (INTEGERS | REALS).items()} | FIXED).items():
        group, _, key = path.rpartition(".")
        (text[group] if group else text)[key] = value
    mla = [i for i in range(1, last + 1) if i % 4 == 0 or i == last]
    text["linear_attn_config"] |= {"kda_layers": sorted({*range(1, last + 1)} - {*mla}), "full_attn_layers": mla}
    weights = {"num_bits": 4, "group_size": 32, "type": "float"}
    text["quantization_config"] = {"format": "mxfp4-pack-quantized", "config_groups": {"group_0": {"weights": weights}}}
    tree = {"model_type": "kimi_k3", "synthetic": marker, "text_config": text, "tie_word_embeddings": False}
    n = control_ids(found["vocab_size"])
    first = found["vocab_size"] - n
    return tree | ({"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": first + n - 1} if n else {})


# %% [markdown]
# Reading the file back gives what decides every byte from here on: a believed config, whether rows may stay holes, and
# a seed.

# %% tags=["export"]
class Recipe(NamedTuple):
    "What decides every byte of a synthetic checkpoint."
    config: Config
    sparse: bool
    seed: int


def write_config(folder, preset, seed, **changes):
    "Write config.json and tokenizer_config.json into `folder`; the Recipe they stand for."
    found = numbers(preset, **changes)
    checked("seed", seed, int, 0, 2**64 - 1)
    marker = {"generator": "k3 synth", "preset": preset, "seed": seed, "note": "made-up values, not the weights of any model"}
    for name, tree in ("config.json", config_tree(found, marker)), ("tokenizer_config.json", tokenizer_tree(found["vocab_size"])):
        with writing(folder / name) as file:
            file.write((json.dumps(tree, indent=1) + "\n").encode())
    try:
        return Recipe(read_config(folder), PRESETS[preset][1], seed)
    except ConfigError as error:
        raise SynthError(str(error).partition(": ")[2]) from None


# %% [markdown]
# The gate: what the reader makes of our released preset equals what it makes of `fixtures/k3/config.json`, field by
# field.

# %%
full = write_config(Path(scratch.name), "full", 0)
theirs = read_config(ROOT / "fixtures" / "k3")
print("equal to the released config:", full.config == theirs, "| MLA layers", sorted(theirs.mla_layers)[-3:])
assert full.config == theirs

# %% [markdown]
# ## 5.24.3 The sizes of the files betray the order of the tensors
#
# Layer $L$ is file $L + 1$; then come one file with tables and globals, the projector, the vision tower. A text reader
# skips the last two, so small models get two tiny ones, to be skipped.

# %% tags=["export"]
TOWER = {"wqkv": (4608, 1024), "wo": (1024, 1536), "mlp.fc0": (4096, 1024), "mlp.fc1": (1024, 4096), "norm0": (1024,), "norm1": (1024,)}


def outside_tensors(released):
    "Two lists of (name, dtype, shape), projector and vision tower: the released ones, or tiny ones."
    projector = {"post_norm": (8,), "proj.0": (4, 8)}
    tower = {"encoder.final_layernorm": (8,), "patch_embed.proj": (4, 3, 2, 2)}
    if released:
        projector = {"post_norm": (7168,), "proj.0": (4096, 4096), "proj.2": (7168, 4096)}
        tower = {"encoder.final_layernorm": (1024,), "patch_embed.pos_emb": (64, 64, 1024), "patch_embed.proj": (1024, 3, 14, 14)}
        tower |= {f"encoder.blocks.{b}.{name}": shape for b in range(27) for name, shape in TOWER.items()}
    return [[(f"{prefix}.{name}.weight", "BF16", shape) for name, shape in part.items()]
            for prefix, part in (("mm_projector", projector), ("vision_tower", tower))]


def layer_file(c, L):
    "(name, dtype, shape) of the tensors of layer L."
    return list(layer_tensors(c, L))


def files(c, released):
    "Per file of a checkpoint, its tensors (name, dtype, shape)."
    yield from (layer_file(c, L) for L in range(c.num_hidden_layers))
    yield from ([*global_tensors(c)], *outside_tensors(released))


# %% [markdown]
# In what order do they lie? Nobody says, but the size of each file is published, to the byte. Offsets are written in
# decimal, so another order makes a header longer or shorter. The format's own library saves by type, then by name; that
# is the guess.

# %% tags=["export"]
def file_order(tensors):
    "The tensors of a file in the released order: float32, BF16, bytes, and by name within each."
    return sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor[1]], tensor[0]))


# %%
published = {int(line[6:11]): int(line.split()[1]) for line in (ROOT / "fixtures" / "k3" / "shard_sizes.tsv").read_text().splitlines()}
metadata = len('"__metadata__":{"format":"pt"},')


def off_by(tensors, size, extra=0):
    "Bytes by which the file of `tensors`, in that order, is longer than `size`."
    return len(header_bytes(tensors)) + 8 * ceil(extra / 8) + sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors) - size


orders = {
    "by type, then name": lambda tensors: file_order(tensors),
    "as chapter 5.3 lists them": lambda tensors: tensors,
    "by name alone": lambda tensors: sorted(tensors),
}
some = {i: tensors for i, tensors in enumerate(files(full.config, True), 1) if i % 12 in (2, 4) or i in (1, 94, 95, 96)}
off = {label: [off_by(order(tensors), published[i]) for i, tensors in some.items()] for label, order in orders.items()}
off["by type, then name, with metadata"] = [off_by(file_order(tensors), published[i], metadata) for i, tensors in some.items()]
for label, values in off.items():
    print(f"{label:34s} {values.count(0):2d} of {len(values)} sizes equal; others off by {sorted({*values} - {0})}")

# %% [markdown]
# Only the guess survives, and it does so for all 96 files (checked in 5.24.7). Two wrong orders agree in files that
# hold one type only and few tensors, so a check on the smallest file would have passed them.

# %%
fig, ax = plt.subplots(figsize=(6, 3))
for (label, values), marker in zip(off.items(), "osv^"):
    ax.plot([*some], values, marker, ms=5, label=label)
ax.set_yscale("symlog", linthresh=30)
ax.set_yticks([-1000, -100, -30, 0, 30, 100], ["-1000", "-100", "-30", "0", "30", "100"])
ax.set(xlabel="file, 1 to 96", ylabel="longer than published (bytes)", ylim=(-3000, 3000),
       title="One order of the tensors gives the published size of every file")
ax.legend(loc="upper left", ncols=2)
plt.show()


# %% [markdown]
# A matching size is evidence, not proof: two tensors of one shape could be exchanged unseen. Nothing depends on it. A
# reader goes by the header, and the tests of this module shuffle the order.
#
# ## 5.24.4 Bits that belong to a name
#
# A value must not depend on what was written before it, or files could not be written in parallel, nor one alone. So
# each tensor has its own stream: a hash of seed and name starts the generator.

# %% tags=["export"]
def stream(seed, *what):
    "The random bits that belong to a name: nothing drawn or written before has a part in them."
    key = " ".join(map(str, (seed, *what))).encode()
    return np.random.PCG64(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little"))


# %% [markdown]
# BF16 is the upper half of a float32, rounded to nearest; a tie goes to the even one. Adding `0x7fff` and the last kept
# bit, then cutting, does exactly that.

# %% tags=["export"]
def to_bf16(x):
    "The bits, uint16, of the BF16 numbers nearest to float32 `x`, all finite; a tie goes to the even one."
    bits = x.view(np.uint32)
    near = bits >> 16
    near &= 1
    near += 0x7FFF
    near += bits
    near >>= 16
    return near.astype(np.uint16)


# %% [markdown]
# By hand: BF16 has 7 bits behind the point, so its neighbours of one are $1 + 2^{-7}$ and $1 - 2^{-8}$. Halfway points
# go to the side with a last bit of zero. Cutting instead of rounding pulls every weight towards zero.

# %%
halves = np.array([1, 1 + 2**-8, 1 + 2**-7 + 2**-8, 1 - 2**-9, -1 - 2**-8 - 2**-12], np.float32)
wide = lambda bits: (bits.astype(np.uint32) << 16).view(np.float32)
print("nearest:", *(hex(b) for b in to_bf16(halves)), "=", wide(to_bf16(halves)))
assert to_bf16(halves).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F80, 0xBF81]
x = np.random.default_rng(4).standard_normal(1 << 16).astype(np.float32)
for label, bits in ("nearest", to_bf16(x)), ("cut", (x.view(np.uint32) >> 16).astype(np.uint16)):
    error = (wide(bits) - x.astype(np.float64)) / np.abs(x)
    print(f"{label:8s} largest error 2^{np.log2(np.abs(error).max()):.1f}, mean shrinking {-(error * np.sign(x)).mean():.1e}")
    assert (np.abs(error).max() <= 2**-8) == (label == "nearest")


# %% [markdown]
# Values are evenly spread over an interval: sums of hundreds of them are close to normal anyway, and sixteen random
# bits each are plenty for a type that keeps eight. The generator's raw output is what numpy promises never to change.

# %% tags=["export"]
def draw(bits, dtype, count, low, high):
    "`count` values evenly from low..high out of the stream `bits`: uint16 for BF16, float32 for F32, uint8 for U8."
    if dtype == "U8":
        raw = bits.random_raw(ceil(count / 8)).view(np.uint8)[:count]
        return (raw.astype(np.uint16) * (high - low + 1) // 256 + low).astype(np.uint8)
    x = bits.random_raw(ceil(count / 4)).view(np.uint16)[:count].astype(np.float32)
    x *= (high - low) / 65535
    x += low
    return to_bf16(x) if dtype == "BF16" else x


# %%
name = "language_model.model.norm.weight"
print("a norm:", wide(draw(stream(0, name), "BF16", 6, 0.75, 1.25)), "| again:", wide(draw(stream(0, name), "BF16", 2, 0.75, 1.25)))
print("seed 1:", wide(draw(stream(1, name), "BF16", 6, 0.75, 1.25)), "| scales:", draw(stream(0, "scale"), "U8", 6, 121, 122))

# %% [markdown]
# ## 5.24.5 Which rows live
#
# The sparse preset may cost 6 GB of 1,561, and what it leaves must still be a model: its output must depend on the
# input token, on every kind of layer, on the experts chosen. So live rows are chosen to meet each other: the same heads
# in q, k, v and gate, the same rows in both halves of a gated MLP.

# %% tags=["export"]
ROWS = 128  # live rows of a large matrix


HEADS = 2  # live heads of a layer


EXPERTS = 16  # live experts of a layer


EXPERT_ROWS = 64  # live rows of each of their matrices


LOW_IDS = 4096  # ids with a live row in both vocabulary tables; above them every ID_STEP-th, and the control ids


ID_STEP = 80


WHOLE = 2_000_000  # bytes up to which a tensor has no holes


ALWAYS = ("gate", "kv_a_proj_with_mqa")  # and these have none at any size: a router must see all experts, a latent has 64 extra rows


@lru_cache(maxsize=None)
def choose(seed, what, layer, n, k):
    "k of the numbers 0..n-1, ascending, a layer's own; all of them if there are no more."
    return tuple(sorted(np.argsort(stream(seed, what, layer).random_raw(n), kind="stable")[:k].tolist()))


def place(name):
    "(layer, expert, short name) of a tensor; -1 where there is none."
    pattern, layer, expert = split_name(name)
    *_, before, last = pattern.split(".")
    if not pattern.startswith("language_model.model.layers.#."):
        layer = expert = -1
    return layer, expert, before if last == "weight" else f"{before}.{last}" if expert >= 0 else last


# %%
for name in "language_model.model.layers.3.self_attn.o_proj.weight", "language_model.model.layers.9.block_sparse_moe.experts.70.w2.weight_scale", "mm_projector.proj.0.weight":
    print(*place(name))


# %% [markdown]
# A head is a block of rows in the projections that lead to heads. In a hole head q, k and v are zero, and so is what it
# says: the L2 norm and the RMSNorm of zero are zero, not NaN, thanks to their epsilon.

# %% tags=["export"]
def head_rows(c, layer, short):
    "Rows that one head has in a projection to heads, 0 for any other tensor."
    if layer < 0:
        return 0
    if c.layer_kind(layer) == "kda":
        return c.kda_head_dim if short in ("q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj") else 0
    nope, v = c.qk_nope_head_dim, c.v_head_dim
    return {"q_b_proj": nope + c.qk_rope_head_dim, "kv_b_proj": nope + v, "g_proj": v}.get(short, 0)


def live_heads(r, layer):
    "Heads of a layer's attention that have values, in a sparse checkpoint."
    heads = r.config.kda_num_heads if r.config.layer_kind(layer) == "kda" else r.config.num_attention_heads
    return choose(r.seed, "heads", layer, heads, HEADS)


def live_experts(r, layer):
    "Experts of a layer that have values, in a sparse checkpoint."
    return choose(r.seed, "experts", layer, r.config.num_experts, EXPERTS)


# %% [markdown]
# Every other matrix gets a run of 128 rows, at a place of the layer's own but the same for matrices of equal height.
# Rows of one matrix lie next to each other, so that a page of 4,096 bytes is seldom half used.

# %% tags=["export"]
def live_rows(r, name, dtype, shape):
    "[(first row, rows)] of a tensor that have values."
    if not r.sparse:
        return [(0, shape[0])]
    layer, expert, short = place(name)
    if expert >= 0 and expert not in live_experts(r, layer):
        return []
    if expert < 0 and (dtype == "F32" or short in ALWAYS or prod(shape) * ITEMSIZE[dtype] <= WHOLE):
        return [(0, shape[0])]
    if short in ("embed_tokens", "lm_head"):
        low, control = min(LOW_IDS, shape[0]), shape[0] - control_ids(shape[0])
        return [(0, low), *((i, 1) for i in range(low, control, ID_STEP)), (control, shape[0] - control)]
    if height := head_rows(r.config, layer, short):
        return [(head * height, height) for head in live_heads(r, layer)]
    rows = min(shape[0], ROWS if expert < 0 else EXPERT_ROWS)
    return [(stream(r.seed, "rows", layer, shape[0]).random_raw() % (shape[0] - rows + 1), rows)]


# %%
for L, kind in (0, "KDA"), (3, "MLA"):
    print(f"layer {L} ({kind}): heads {live_heads(full, L)}")
    for name, dtype, shape in layer_file(full.config, L):
        if name.rpartition("attn.")[2] in ("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight", "g_proj.weight", "o_proj.weight"):
            print(f"  {name.rpartition('attn.')[2]:18s} {shape} live rows {live_rows(full, name, dtype, shape)}")

# %% [markdown]
# ## 5.24.6 How large a weight should be
#
# A weight drawn from $\pm\sqrt{3/n}$ has variance $1/n$, and a sum over $n$ inputs of size one has size one again. The
# $n$ that counts is the number of *live* inputs: an output projection reads two heads of 96. With $n$ = 12,288 it would
# whisper; a norm would then cancel most of what a wrong kernel does.

# %% tags=["export"]
GAIN = {"o_proj": 2.0, "down_proj": 2.0, "lm_head": 3.0}  # the first two follow a gate that halves


E2M1_RMS = sqrt((0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 8)  # of the four-bit codes, evenly drawn


INTERVAL = {
    "A_log": (-1.0, 1.0), "dt_bias": (-5.0, 1.0), "e_score_correction_bias": (-0.1, 0.1), "embed_tokens": (-0.87, 0.87),
    "q_conv1d": (-0.87, 0.87), "k_conv1d": (-0.87, 0.87), "v_conv1d": (-0.87, 0.87),
}


def live_inputs(r, layer, short, columns):
    "How many of a matrix's `columns` inputs are not always zero."
    if r.sparse and short == "o_proj":
        heads = r.config.kda_num_heads if r.config.layer_kind(layer) == "kda" else r.config.num_attention_heads
        return len(live_heads(r, layer)) * columns // heads
    live = {"down_proj": ROWS, "w1": ROWS, "w3": ROWS, "w2": EXPERT_ROWS} if r.sparse else {}
    return min(columns, live.get(short, columns))


def interval(r, layer, short, shape):
    "(low, high) of a tensor's values; of a scale byte, the two powers of two around the size wanted."
    if short.endswith("weight_packed"):
        return 0, 255
    if short.endswith("weight_scale"):
        s = 127 + floor(-log2(E2M1_RMS * sqrt(live_inputs(r, layer, short[:2], 32 * shape[1]))))
        return s, s + 1
    if "norm" in short:
        return 0.75, 1.25
    half = GAIN.get(short, 1.0) * sqrt(3 / live_inputs(r, layer, short, prod(shape[1:])))
    return INTERVAL.get(short, (-half, half))


# %% [markdown]
# Three tensors have rows of their own kind. `A_log` is padded with entries that must not be used. The head's rows of
# control ids are small, so that no decode stops by accident. And a sparse router's bias favours live experts, since
# chance would seldom choose 16 of 896.

# %% tags=["export"]
class Run(NamedTuple):
    "Rows of a tensor next to each other, and the interval of their values."
    first: int
    rows: int
    low: float
    high: float


def runs(r, name, dtype, shape):
    "The runs of a tensor in the order they are drawn; a later one may overwrite part of an earlier."
    spans = live_rows(r, name, dtype, shape)
    if not spans:
        return []
    layer, _, short = place(name)
    low, high = interval(r, layer, short, shape)
    found = [Run(first, rows, low, high) for first, rows in spans if rows]
    heads, control = r.config.kda_num_heads, control_ids(shape[0])
    if short == "A_log" and shape[0] > heads:
        found.append(Run(heads, shape[0] - heads, 7.7, 7.7))
    if short == "lm_head" and control:
        found.append(Run(shape[0] - control, control, low / 64, high / 64))
    if short == "e_score_correction_bias" and r.sparse:
        found += [Run(expert, 1, 0.3, 0.5) for expert in live_experts(r, layer)]
    return found


# %% [markdown]
# The check: one router of the released width, fed 40 random inputs of size one. A useful choice takes live experts and
# others, and changes from token to token. The released model chooses again about 29% of a token's experts for the next.
# Without the bias, the live ones are as good as absent.

# %%
def values(r, name, dtype, shape):
    "A whole small tensor as written."
    out = np.zeros(shape, {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}[dtype])
    bits = stream(r.seed, name)
    for run in runs(r, name, dtype, shape):
        out[run.first:run.first + run.rows] = draw(bits, dtype, run.rows * prod(shape[1:]), run.low, run.high).reshape(-1, *shape[1:])
    return out


gate, bias = (next(values(full, *t) for t in layer_file(full.config, 5) if t[0].endswith(end)) for end in ("moe.gate.weight", "correction_bias"))
tokens = np.random.default_rng(0).standard_normal((40, 7168))
score = 1 / (1 + np.exp(-tokens @ wide(gate).T.astype(np.float64)))
for label, b in ("with the bias", bias), ("without", 0):
    chosen = np.argsort(-(score + b), axis=1)[:, :16]
    again = np.mean([len({*x} & {*y}) / 16 for x, y in zip(chosen.tolist(), chosen.tolist()[1:])])
    live = np.isin(chosen, live_experts(full, 5)).mean()
    print(f"{label:14s} live among the chosen {live:.0%}, chosen again by the next token {again:.0%}, {len(np.unique(chosen))} different")
    assert (0.25 < live < 0.75 and 0.1 < again < 0.5) == (label != "without")


# %% [markdown]
# ## 5.24.7 A plan, and the census without a file
#
# Everything so far is arithmetic on shapes. Put together, file by file, it says what would be written where, before a
# byte is.

# %% tags=["export"]
class Piece(NamedTuple):
    "A tensor that has values: its first byte in the file, elements a row, runs."
    name: str
    dtype: str
    offset: int
    row: int
    runs: list

    def spans(self):
        "(first byte in the file, bytes) of each run."
        size = self.row * ITEMSIZE[self.dtype]
        return [(self.offset + run.first * size, run.rows * size) for run in self.runs]


class Shard(NamedTuple):
    "A file to be written."
    file: str
    tensors: list
    header: bytes
    size: int
    pieces: list

    def written(self):
        "Bytes of values."
        return sum(nbytes for piece in self.pieces for _, nbytes in piece.spans())

    def pages(self, page=4096):
        "Bytes of the pages that are touched: what the file takes on disk."
        total, seen = 0, 0
        for begin, nbytes in [(0, len(self.header)), *sorted(span for piece in self.pieces for span in piece.spans())]:
            end = ceil((begin + nbytes) / page)
            total += max(0, end - max(begin // page, seen))
            seen = max(seen, end)
        return total * page


def plan_shard(r, file, tensors):
    "The Shard of `tensors`, (name, dtype, shape)."
    tensors, pieces = file_order(tensors), []
    header = header_bytes(tensors)
    at = len(header)
    for name, dtype, shape in tensors:
        if found := runs(r, name, dtype, shape):
            pieces.append(Piece(name, dtype, at, prod(shape[1:]), found))
        at += prod(shape) * ITEMSIZE[dtype]
    return Shard(file, tensors, header, at, pieces)


def plan(r):
    "The Shards of a Recipe."
    total = r.config.num_hidden_layers + 3
    return [plan_shard(r, f"model-{i:05d}-of-{total:06d}.safetensors", tensors) for i, tensors in enumerate(files(r.config, r.sparse), 1)]


# %% [markdown]
# The gate at full scale: 96 file sizes, and the figures of the released checkpoint, part by part.

# %%
shards = plan(full)
assert [shard.size for shard in shards] == list(published.values())
payload, live = Counter(), Counter()
for shard in shards:
    for name, dtype, shape in shard.tensors:
        payload[census_part(split_name(name)[0])] += prod(shape) * ITEMSIZE[dtype]
    for piece in shard.pieces:
        live[census_part(split_name(piece.name)[0])] += sum(nbytes for _, nbytes in piece.spans())
for part in payload:
    print(f"{part:14s}{payload[part]:24,} bytes, {live[part] / 1e6:9,.1f} MB of them written")
file_bytes = sum(shard.size for shard in shards)
print(f"{'payload':14s}{payload.total():24,} bytes in {sum(len(shard.tensors) for shard in shards):,} tensors\n{'files':14s}{file_bytes:24,} bytes in {len(shards)} files")
assert (payload["experts"], payload["trunk"]) == (1_446_456_066_048, 108_811_877_376)
assert (payload.total(), file_bytes) == (1_560_860_324_864, 1_560_936_091_448)

# %%
pages = sum(shard.pages() for shard in shards)
fig, ax = plt.subplots(figsize=(6, 3))
parts = sorted(payload, key=payload.get)
ax.barh(parts, [payload[part] / 1e9 for part in parts], color="C5", alpha=0.35, label="in the checkpoint")
ax.barh(parts, [live[part] / 1e9 for part in parts], height=0.4, label="written")
ax.set(xscale="log", xlabel="size (GB, logarithmic)", title=f"{live.total() / 1e9:.1f} GB of values stand for {payload.total() / 1e9:,.0f} GB")
ax.legend(loc="lower right")
plt.show()
print(f"on disk, with headers and half-used pages: {pages / 1e9:.1f} GB")
assert pages < 6e9

# %% [markdown]
# ## 5.24.8 Written whole or not at all
#
# One file: its length, its header, its runs. Values are made 32,768 at a time, which fits a core's cache. A file checks
# whether it was told to stop, so that Ctrl-C does not wait for 17 GB.

# %% tags=["export"]
CHUNK = 1 << 15  # values made at a time


def write_shard(folder, shard, seed, stop):
    "Write one file. What lies between its runs is never touched and stays a hole."
    with writing(folder / shard.file) as file:
        file.truncate(shard.size)
        file.write(shard.header)
        for piece in shard.pieces:
            bits = stream(seed, piece.name)
            for run, (begin, _) in zip(piece.runs, piece.spans()):
                file.seek(begin)
                for at in range(0, run.rows * piece.row, CHUNK):
                    if stop.is_set():
                        return
                    file.write(draw(bits, piece.dtype, min(CHUNK, run.rows * piece.row - at), run.low, run.high))


def shown_bytes(n):
    "A number of bytes with a unit."
    return next((f"{n / size:.2f} {unit}" for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if n >= size), f"{n:,} bytes")


def write_shards(folder, shards, seed, progress):
    "Write all files, a thread for each core, those with most to write first."
    stop, done, tenths, total = threading.Event(), 0, 0, sum(map(Shard.written, shards))
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        try:
            order = sorted(shards, key=Shard.written, reverse=True)
            jobs = {pool.submit(write_shard, folder, shard, seed, stop): shard.written() for shard in order}
            for job in as_completed(jobs):
                job.result()
                done += jobs[job]
                if 10 * done // total > tenths:
                    tenths = 10 * done // total
                    progress(f"{10 * tenths}%: {shown_bytes(done)} of {shown_bytes(total)} written")
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


# %% [markdown]
# Two refusals come before the first shard: a folder that holds anything, and a disk that is too full. The plan's pages
# count, plus 1% for what the file system notes about them. Where it keeps no holes the whole length counts, so it is
# asked.

# %% tags=["export"]
def prepare(folder):
    "The folder's full path. FileNotFoundError if there is no place to make it in, SynthError if something is there already."
    folder = Path(folder).resolve()
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder.parent}: no such folder to make {folder.name} in")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SynthError(f"{folder}: {'exists and is not empty' if folder.is_dir() else 'is a file'}, expected a new or an empty folder")
    return folder


def keeps_holes(folder):
    "Whether a file in `folder` can be longer than what it takes on disk."
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.truncate(1 << 24)
        return os.fstat(probe.fileno()).st_blocks * 512 < 1 << 24


def check_space(folder, shards):
    "SynthError unless the file system of `folder` has room for what will really be written."
    holes = keeps_holes(folder)
    need = sum(1.01 * shard.pages() if holes else shard.size for shard in shards) + 160 * sum(len(shard.tensors) for shard in shards)
    free = shutil.disk_usage(folder).free
    if need > free:
        kind = "" if holes else ", since this file system keeps no holes"
        raise SynthError(f"{folder.parent}: {shown_bytes(free)} free, expected at least {shown_bytes(ceil(need))}{kind}")


def write_index(folder, shards):
    "model.safetensors.index.json: the bytes of all tensors, and the file of each."
    total = sum(shard.size - len(shard.header) for shard in shards)
    lines = (f'    "{name}": "{shard.file}"' for shard in shards for name, _, _ in shard.tensors)
    text = f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    with writing(folder / "model.safetensors.index.json") as file:
        file.write(text.encode())


# %% [markdown]
# Everything goes to a folder beside the one asked for, which gets its name in the end. Whatever happens before that, a
# full disk or Ctrl-C, that folder is removed and nothing half-written is left to be mistaken for a model.

# %% tags=["export"]
class Written(NamedTuple):
    "What `synth` wrote: `value_bytes` are not holes, `disk_bytes` are what the file system took."
    folder: Path
    shards: int
    tensors: int
    payload_bytes: int
    file_bytes: int
    value_bytes: int
    disk_bytes: int

    def __str__(self):
        return (f"{self.folder}: synthetic checkpoint of {self.tensors:,} tensors in {self.shards} files, {self.file_bytes:,} bytes long "
                f"({self.payload_bytes:,} of tensors), {self.disk_bytes:,} bytes on disk")


def synth(folder, preset="full", seed=0, layers=None, experts=None, vocab=None, progress=None, **changes):
    """Write a synthetic checkpoint in the released layout into `folder`, new or empty; returns Written.

    preset: 'full' (released shape, sparse: about 5 GB on disk), 'slice' (full width, every byte real) or 'oracle' (small).
    Any field of ARGUMENTS can be changed. `progress` takes lines of text. Raises SynthError, FileNotFoundError, OSError.
    """
    folder, tell = prepare(folder), progress or (lambda line: None)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        recipe = write_config(part, preset, seed, layers=layers, experts=experts, vocab=vocab, **changes)
        shards = plan(recipe)
        check_space(part, shards)
        count, size, written = sum(len(shard.tensors) for shard in shards), sum(shard.size for shard in shards), sum(map(Shard.written, shards))
        tell(f"synthetic checkpoint, preset {preset}, seed {seed}: {count:,} tensors in {len(shards)} files of {shown_bytes(size)}, "
             f"{shown_bytes(written)} of it values" + (", the rest holes" if recipe.sparse else ""))
        write_shards(part, shards, seed, tell)
        write_index(part, shards)
        disk = sum(path.stat().st_blocks * 512 for path in part.iterdir())
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Written(folder, len(shards), count, size - sum(len(shard.header) for shard in shards), size, written, disk)


# %% [markdown]
# The small preset, really written. The `safetensors` library, a reader we did not write, finds the bytes of every
# tensor, and the census of chapter 5.6 counts the graph.

# %%
home = Path(scratch.name) / "oracle"
done = synth(home, "oracle")
small = Checkpoint(home)
for file in small.files:
    for name, theirs in safetensors.deserialize(Path(file).read_bytes()):
        assert small.raw(name).tobytes() == theirs["data"] and list(small.extent(name).shape) == theirs["shape"]
print(json.loads((home / "config.json").read_text())["synthetic"]["generator"], f"wrote {done.tensors:,} tensors\n")
print(small.census(experts_per_token=4).table())


# %% [markdown]
# Same seed, same bytes, in whatever order the files are written. The trap is one generator for all: correct values, no
# two alike, and a different checkpoint as soon as two threads race.

# %%
def digest(tensors, bits_of):
    "One hash over the first values of tensors, drawn in the order given, listed by name."
    made = {name: draw(bits_of(name), "BF16", 64, -1, 1).tobytes() for name in tensors}
    return hashlib.sha256(b"".join(made[name] for name in sorted(made))).hexdigest()[:8]


names = [name for name, _, _ in layer_file(full.config, 0)]
one = {way: np.random.PCG64(0) for way in ("forward", "backward")}
print("a stream for each name:", digest(names, lambda name: stream(0, name)), digest(names[::-1], lambda name: stream(0, name)))
print("one generator for all: ", digest(names, lambda name: one["forward"]), digest(names[::-1], lambda name: one["backward"]))
assert digest(names, lambda name: stream(0, name)) == digest(names[::-1], lambda name: stream(0, name))
again = Path(scratch.name) / "again"
synth(again, "oracle")
assert all((again / path.name).read_bytes() == path.read_bytes() for path in home.iterdir())

# %% [markdown]
# And it is written once. A second call into the same folder is refused, with the bytes of the first untouched.

# %%
try:
    synth(home, "oracle", seed=1)
except SynthError as error:
    print(str(error).rpartition("/")[2])
print("left behind:", [path.name for path in Path(scratch.name).iterdir() if path.name.endswith(".part")])

# %% [markdown]
# ## 5.24.9 Holes, looked at
#
# The same code at full width, three layers and 64 experts: layer 1 is KDA with a MoE. What the file system says is on
# disk must be what the plan says was written, and nothing else.

# %%
wide_home = Path(scratch.name) / "wide"
done = synth(wide_home, "full", layers=3, experts=64, vocab=4096)
layer = plan_shard(Recipe(read_config(wide_home), True, 0), "model-00002-of-000006.safetensors", layer_file(read_config(wide_home), 1))
disk = data_extents(wide_home / layer.file)
planned = sorted([(0, len(layer.header)), *(span for piece in layer.pieces for span in piece.spans())])
inside = all(any(a <= begin and begin + n <= a + m for a, m in disk) for begin, n in planned)
print(f"{done.file_bytes / 1e9:.2f} GB long, {done.value_bytes / 1e9:.2f} GB of values; every planned run is on disk: {inside}")
assert inside and sum(n for _, n in disk) <= layer.pages(os.statvfs(wide_home).f_frsize)

# %%
start = next(at for at, (name, _, _) in enumerate(layer.tensors) if ".experts." in name)
trunk_end = len(layer.header) + sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in layer.tensors[:start])
fig, axes = plt.subplots(2, 1, figsize=(6, 2.8), sharex=True)
for ax, spans, label in (axes[0], planned, "planned"), (axes[1], disk, "on disk"):
    for side, color in (True, "C0"), (False, "C1"):
        bars = [(begin / 1e6, max(n / 1e6, 6)) for begin, n in spans if (begin < trunk_end) == side]  # 6 MB, or it could not be seen
        ax.broken_barh(bars, (0, 1), facecolor=color)
    ax.set(yticks=[], ylabel=label, ylim=(0, 1), xlim=(0, layer.size / 1e6))
axes[1].set_xlabel("place in the file (MB); blue: trunk, orange: experts, white: hole")
axes[0].set_title(f"Layer 1: {layer.written() / 1e6:.0f} of {layer.size / 1e6:,.0f} MB are values, where planned and nowhere else")
plt.show()

# %% [markdown]
# What does a hole expert say? Scale bytes 0 mean $2^{-127}$, code 0 means zero: its weights are exactly zero. A decoder
# that lowers the exponent before it multiplies, a trick worth having, wraps byte 0 to $-\infty$ and turns the hole into
# NaN. So holes are a test, too.

# %%
recipe = Recipe(read_config(wide_home), True, 0)
hole = next(expert for expert in range(64) if expert not in live_experts(recipe, 1))
alive = live_experts(recipe, 1)[0]
with Checkpoint(wide_home) as ckpt:
    for label, expert in ("live", alive), ("hole", hole):
        packed, scale = (ckpt.raw(f"language_model.model.layers.1.block_sparse_moe.experts.{expert}.w1.weight_{kind}") for kind in ("packed", "scale"))
        w = decode(packed, scale)
        lowered = ((scale.astype(np.uint32) - 1) << 23).view(np.float32)  # 2^(s-128), and byte 0 wraps
        with np.errstate(invalid="ignore"):
            naive = np.repeat(lowered, 32, axis=1) * np.where(w == 0, 0, 1)
        print(f"{label}: {np.count_nonzero(w.any(axis=1)):4d} of {len(w):,} rows not zero, largest {np.abs(w).max():.3g}; lowered exponent gives NaN: {np.isnan(naive).any()}")
        assert np.isfinite(w).all()
assert not w.any() and np.isnan(naive).any()


# %% [markdown]
# | a sparse checkpoint shows | it cannot show |
# |---|---|
# | index, plan, memory, every offset and size at 1.56 TB | the device: reading a hole moves nothing, at memory speed |
# | 93 layers in order, routing that changes, all kinds of tensors | an error confined to rows that are zero |
# | equal bits at every budget, chunk and thread count | what trained weights do: outliers, skewed routing, text |
#
# For the device there is `slice`, whose every byte is real. A copy must keep holes (`cp --sparse=always`, `tar -S`), or
# 5 GB become 1,561.
#
# ## 5.24.10 Make it fast
#
# Drawing is the work. Each step of the ladder changes one thing. Normal deviates need a table and sometimes a
# logarithm; a float32 takes 32 random bits of which BF16 keeps 8; arrays that leave the cache wait for memory.

# %% tags=["nbval-ignore-output"]
def per_value(make, count, repeats=5):
    "Nanoseconds of processor time for each value, the best of some."
    best = min((lambda t: (make(), time.process_time() - t)[1])(time.process_time()) for _ in range(repeats))
    return 1e9 * best / count


rng, bits, n = np.random.Generator(np.random.PCG64(0)), np.random.PCG64(0), 1 << 20
ladder = {
    "normal deviates, float32": lambda: to_bf16(rng.standard_normal(n, dtype=np.float32)),
    "even deviates, float32": lambda: to_bf16(rng.random(n, dtype=np.float32) * np.float32(0.2) - np.float32(0.1)),
    "16 raw bits each": lambda: draw(bits, "BF16", n, -0.1, 0.1),
    "and 32,768 at a time": lambda: [draw(bits, "BF16", CHUNK, -0.1, 0.1) for _ in range(n // CHUNK)],
}
for label, make in ladder.items():
    cost = per_value(make, n)
    print(f"{label:26s}{cost:6.1f} ns a value, {2 / cost:5.2f} GB/s; {live.total() / 2 * cost / 1e9:4.0f} s of processor time for the full preset")

# %% [markdown]
# ## 5.24.11 Summary
#
# - A checkpoint's layout follows from a config: names, order, header, sizes. Ours gives all 96 published sizes and all
#   497,220 names.
# - Bits belong to names. Equal seeds give equal bytes in any order of writing, on any number of threads.
# - A hole is an honest zero: it costs no disk and no device read, and decodes to exactly nothing. That is also its
#   limit.
#
# **Exercises.**
# 1. Which heads are live in no KDA layer of seed 0? Find a seed that leaves fewer, or change `live_heads` so that 69
#    layers cover all 96.
# 2. Give layer 50 an `o_proj` of zeros (`runs` returns nothing). How many of eight generated ids change? What if it
#    were layer 92?
# 3. Write `resize(home, vocab)`, which cuts a synthetic checkpoint's vocabulary without writing any other file again.
#
# Next: what neither names nor sizes can see. [1.5 Whether every byte is the one that was published](05_verify.ipynb)

# %%
small.close()
scratch.cleanup()
