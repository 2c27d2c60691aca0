# %% [markdown]
# # 5.28 A checkpoint without the weights
#
# The engine of this book must open, index, plan and stream 1.56 TB that few readers have. This chapter writes a
# stand-in: the released names, types, shapes and file sizes, in about 5 GB of real bytes and a great many zeros. At the
# end you can make one of any shape, know why a decode of its holes is exact, and know what it cannot show.
#
# Needs chapters [5.3] (the config), [5.4] (the table of tensors), [5.5] (headers) and [5.7] (the checkpoint). Runs in
# half a minute.
#
# [5.27 Whether every byte is the one that was published](27_verify.ipynb) ·
# [contents](../README.md) ·
# [5.29 Showing must not cost the result](29_display.ipynb)
#
# [5.3]: 03_config.ipynb
# [5.4]: 04_tensors.ipynb
# [5.5]: 05_header.ipynb
# [5.7]: 07_checkpoint.ipynb

# %%
import tempfile
import time
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import safetensors

from k3lib.checkpoint import Checkpoint
from k3lib.mxfp4 import decode
from k3lib.system import data_runs
from k3lib.tensors import census_part, expert_name, split_name

# %%
ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
scratch = tempfile.TemporaryDirectory()

# %% [markdown]
# | symbol | meaning | in code |
# |---|---|---|
# | hole | part of a file that was never written: reads as zeros, takes no disk | |
# | live | a row, head or expert that has values | `live_rows`, `live_heads`, `live_experts` |
# | $n$ | inputs of a matrix that are not always zero | `live_inputs` |
# | $[l, h]$ | interval from which the values of adjacent rows are drawn | `RowRange.low`, `RowRange.high` |
# | seed | a number that decides, with a tensor's name, the tensor's bits | `random_bits(seed, name)` |
#
# ## 5.28.1 By hand: three bytes in a megabyte
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
# Where the data are, `lseek` answers (5.1): `SEEK_DATA` finds the next byte on disk, `SEEK_HOLE` the next that is not.
# Three bytes cost a page.

# %% tags=["nbval-ignore-output"]
def data_extents(path):
    "[(first byte, bytes)] of the parts of a file that are on disk."
    with open(path, "rb") as file:
        return [(begin, end - begin) for begin, end in data_runs(file.fileno(), 0, path.stat().st_size)]


print(f"on disk {toy.stat().st_blocks * 512:,} bytes; data at {data_extents(toy)}")

# %% [markdown]
# ## 5.28.2 The numbers of a config
#
# Chapter [5.3] reads a `config.json`, and 5.4 derives every tensor's name and shape from it. Here the same tables are
# used the other way: from numbers to the file. Three presets: the released shape, a slice of it at full width, and the
# small 13-layer graph.
#
# [5.3]: 03_config.ipynb

# %% tags=["export"]
import hashlib
import json
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from math import ceil, floor, log2, prod, sqrt
from pathlib import Path
from typing import Any, NamedTuple
import numpy as np
from k3lib.system import disk_bytes
from k3lib.fileio import MissingFile, UsageError, given_path, require_threads, shown_value, writing
from k3lib.config import FIXED, INTEGERS, REALS, Config, ConfigError, read_config
from k3lib.tensors import Place, Tensor, global_tensors, layer_tensors, place_of
from k3lib.header import ITEMSIZE, header_bytes


class SynthError(UsageError):
    "A synthetic checkpoint that cannot be written as asked. One line: the argument, what was found, what was expected."


# %% tags=["export"]
RELEASED = {
    "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "attn_res_block_size": 12,
    "first_k_dense_replace": 1, "intermediate_size": 33792, "num_attention_heads": 96, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 896,
    "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584, "kda_num_heads": 96, "kda_head_dim": 128, "kda_conv_kernel": 4,
    "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0, "kda_gate_lower_bound": -5.0,
}
SLICE = RELEASED | {"num_hidden_layers": 4, "num_experts": 32, "vocab_size": 16384}
ORACLE = RELEASED | {
    "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 13, "attn_res_block_size": 3, "intermediate_size": 256,
    "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 96,
    "routed_expert_hidden_size": 64, "kda_num_heads": 4, "kda_head_dim": 32,
}
PRESETS = {"full": (RELEASED, True), "slice": (SLICE, False), "oracle": (ORACLE, False)}  # True: most rows are holes

# %% [markdown]
# Any number can be changed, since a test wants odd models: more KDA heads than MLA heads, widths that divide nothing.
# Each number must be within the limits that the reader has. A refusal names the argument.

# %% tags=["export"]
LIMITS: dict[str, tuple] = {
    **{name: (int, low, high) for name, low, high in INTEGERS.values()},
    **{name: (float, low, high) for name, low, high in REALS.values()},
}  # field of Config -> type and limits
SHORT = {"num_hidden_layers": "layers", "num_experts": "experts", "vocab_size": "vocab"}
ARGUMENTS = {SHORT.get(name, name): name for name in LIMITS}  # argument of synth -> field of Config


def checked(argument: str, value: Any, kind: type, low: float, high: float) -> Any:
    "`value` as Python's number if it is one of `kind`, int or float, within low..high. Raises SynthError."
    number = value.item() if isinstance(value, np.generic) else value
    if type(number) in (kind, int) and low <= number <= high:
        return number
    wanted = "an integer" if kind is int else "a number"
    raise SynthError(f"{argument} is {shown_value(value)}, expected {wanted} in {low:,}..{high:,}")


def numbers(preset: str, **changes: Any) -> dict[str, Any]:
    """{field of Config: value} of a preset with `changes`, given by the names of ARGUMENTS; None changes nothing.

    Raises SynthError.
    """
    if type(preset) is not str or preset not in PRESETS:
        raise SynthError(f"preset is {shown_value(preset)}, expected one of {', '.join(PRESETS)}")
    found: dict[str, Any] = dict(PRESETS[preset][0])
    for argument, value in changes.items():
        if argument not in ARGUMENTS:
            raise SynthError(f"argument {argument!r} is unknown, expected one of {', '.join(ARGUMENTS)}")
        if value is not None:
            found[ARGUMENTS[argument]] = checked(argument, value, *LIMITS[ARGUMENTS[argument]])
    checked("experts", found["num_experts"], int, found["num_experts_per_token"], LIMITS["num_experts"][2])
    return found


# %%
for preset, changes in (("huge", {}), ("slice", {"layers": 0}), ("full", {"experts": 15}),
                        ("oracle", {"kda_num_heads": 2.5}), ("oracle", {"depth": 3})):
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
    7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 65: "<osagent_mode>", -2: "[UNK]", -1: "[PAD]",
}  # by place among the control ids; the other places have no name
UNFLAGGED = ("<|open|>", "<|close|>", "<|sep|>")  # those the released file does not call special


def control_ids(vocab: int) -> int:
    "How many ids at the end of a vocabulary are control tokens: 256 as released, 16 in a small one, 0 in a tiny one."
    return 256 if vocab >= 4096 else 16 if vocab >= 64 else 0


def tokenizer_tree(vocab: int) -> dict[str, Any]:
    "tokenizer_config.json as an object: names and ids of the control tokens of a vocabulary of `vocab` ids."
    n = control_ids(vocab)
    table = {vocab - n + place % n: name for place, name in CONTROL.items() if place < n - 2} if n else {}
    entries = {str(i): {"content": table[i], "special": table[i] not in UNFLAGGED} for i in sorted(table)}
    names = {f"{x.lower()}_token": f"[{x}]" for x in ("BOS", "EOS", "UNK", "PAD")} if n else {}
    return {"added_tokens_decoder": entries, **names}


# %% [markdown]
# `config.json` says at its top that it is synthetic, and how it was made. The layers follow the released rule, counted
# from one: every fourth is MLA, and the last.

# %% tags=["export"]
def config_tree(found: dict[str, Any], marker: dict[str, Any]) -> dict[str, Any]:
    "config.json as an object, from {field of Config: value}; `marker` says what is synthetic about it."
    text: dict[str, Any] = {"linear_attn_config": {}}
    last = found["num_hidden_layers"]
    fields = {path: found[name] for path, (name, *_) in (INTEGERS | REALS).items()}
    for path, value in (fields | FIXED).items():
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
# Reading the file back gives the recipe: a config that the reader accepts, whether rows may stay holes, and a seed.
# These decide every byte from here on.

# %% tags=["export"]
class Recipe(NamedTuple):
    "What decides every byte of a synthetic checkpoint. `sparse`: most rows are holes."
    config: Config
    sparse: bool
    seed: int


def write_config(folder: Path, preset: str, seed: int, **changes: Any) -> Recipe:
    """Write config.json and tokenizer_config.json into `folder`. Returns the Recipe of its files.

    `changes`: as in `numbers`. Raises SynthError, OSError.
    """
    found = numbers(preset, **changes)
    seed = checked("seed", seed, int, 0, 2**64 - 1)
    note = "made-up values, not the weights of any model"
    marker = {"generator": "k3 synth", "preset": preset, "seed": seed, "note": note}
    trees = {"config.json": config_tree(found, marker),
             "tokenizer_config.json": tokenizer_tree(found["vocab_size"])}
    for name, tree in trees.items():
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
# ## 5.28.3 The sizes of the files betray the order of the tensors
#
# Layer $L$ is file $L + 1$; then come one file with tables and globals, the projector, the vision tower. A text reader
# skips the last two, so small models get two tiny ones, to be skipped.

# %% tags=["export"]
TOWER = {"wqkv": (4608, 1024), "wo": (1024, 1536), "mlp.fc0": (4096, 1024), "mlp.fc1": (1024, 4096),
         "norm0": (1024,), "norm1": (1024,)}  # a block of the vision tower


def outside_tensors(released: bool) -> list[list[Tensor]]:
    "The tensors of two files, projector and vision tower: the released ones, or tiny ones."
    projector: dict[str, tuple[int, ...]] = {"post_norm": (8,), "proj.0": (4, 8)}
    tower: dict[str, tuple[int, ...]] = {"encoder.final_layernorm": (8,), "patch_embed.proj": (4, 3, 2, 2)}
    if released:
        projector = {"post_norm": (7168,), "proj.0": (4096, 4096), "proj.2": (7168, 4096)}
        tower = {"encoder.final_layernorm": (1024,), "patch_embed.pos_emb": (64, 64, 1024),
                 "patch_embed.proj": (1024, 3, 14, 14)}
        tower |= {f"encoder.blocks.{b}.{name}": shape for b in range(27) for name, shape in TOWER.items()}
    return [[Tensor(f"{prefix}.{name}.weight", "BF16", shape) for name, shape in shapes.items()]
            for prefix, shapes in (("mm_projector", projector), ("vision_tower", tower))]


def files(config: Config, released: bool) -> Iterator[list[Tensor]]:
    "The tensors of each file of a checkpoint."
    yield from (list(layer_tensors(config, L)) for L in range(config.num_hidden_layers))
    yield from (global_tensors(config), *outside_tensors(released))


def tensor_bytes(tensor: Tensor) -> int:
    "Bytes of a tensor."
    return prod(tensor.shape) * ITEMSIZE[tensor.dtype]


# %% [markdown]
# In what order do the tensors of a file lie? That is not published, but the size of each file is, to the byte. Offsets
# are written in decimal, so another order makes a header longer or shorter. The format's own library saves by type,
# then by name; that is the guess.

# %% tags=["export"]
def file_order(tensors: Iterable[Tensor]) -> list[Tensor]:
    "The tensors of a file in the released order: float32, BF16, bytes, and by name within each."
    return sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.name))


# %%
lines = (ROOT / "fixtures" / "k3" / "shard_sizes.tsv").read_text().splitlines()
published = {int(line[6:11]): int(line.split()[1]) for line in lines}
metadata = len('"__metadata__":{"format":"pt"},')


def off_by(tensors, size, extra=0):
    "Bytes by which the file of `tensors`, in that order, is longer than `size`."
    return len(header_bytes(tensors)) + 8 * ceil(extra / 8) + sum(map(tensor_bytes, tensors)) - size


orders = {
    "by type, then name": lambda tensors: file_order(tensors),
    "as chapter 5.4 lists them": lambda tensors: tensors,
    "by name alone": lambda tensors: sorted(tensors),
}
some = {i: tensors for i, tensors in enumerate(files(full.config, True), 1) if i % 12 in (2, 4) or i in (1, 94, 95, 96)}
off = {label: [off_by(order(tensors), published[i]) for i, tensors in some.items()] for label, order in orders.items()}
with_metadata = [off_by(file_order(tensors), published[i], metadata) for i, tensors in some.items()]
off["by type, then name, with metadata"] = with_metadata
for label, values in off.items():
    print(f"{label:34s} {values.count(0):2d} of {len(values)} sizes equal; others off by {sorted({*values} - {0})}")

# %% [markdown]
# Only the guess survives, and it does so for all 96 files (checked in [5.28.7]). Two wrong orders agree in files that
# hold one type only and few tensors, so a check on the smallest file would have passed them.
#
# [5.28.7]: #5.28.7-A-plan,-and-the-census-without-a-file

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
# A matching size is evidence, not proof: two tensors of one shape could be exchanged unseen. Nothing depends on the
# order. A reader follows the header, and the tests of this module shuffle the tensors.
#
# ## 5.28.4 Bits that belong to a name
#
# A value must not depend on other values written before it, or a file could not be written alone, nor several in
# parallel. So each tensor has its own stream of random bits: a hash of seed and name starts the generator.

# %% tags=["export"]
def random_bits(seed: int, *key: str | int) -> np.random.PCG64:
    "A generator of the random bits that belong to `key`, a tensor's name. They depend on nothing but seed and key."
    text = " ".join(map(str, (seed, *key))).encode()
    return np.random.PCG64(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little"))


# %% [markdown]
# BF16 is the upper half of a float32, rounded to nearest; a tie goes to the even one. Adding `0x7fff` and the last kept
# bit, then cutting, does exactly that.

# %% tags=["export"]
def to_bf16(x: np.ndarray) -> np.ndarray:
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
    largest, shrinking = np.abs(error).max(), -(error * np.sign(x)).mean()
    print(f"{label:8s} largest error 2^{np.log2(largest):.1f}, mean shrinking {shrinking:.1e}")
    assert (largest <= 2**-8) == (label == "nearest")


# %% [markdown]
# Values are evenly spread over an interval: sums of hundreds of them are close to normal anyway, and sixteen random
# bits each are plenty for a type that keeps eight. The generator's raw output is what numpy promises never to change.

# %% tags=["export"]
def draw(bits: np.random.PCG64, dtype: str, count: int, low: float, high: float) -> np.ndarray:
    """`count` values, evenly spread over low..high, from the generator `bits`.

    `dtype` BF16 gives uint16 bits, F32 float32, U8 uint8 (low and high are whole numbers then).
    """
    if dtype == "U8":
        raw: np.ndarray = bits.random_raw(ceil(count / 8)).view(np.uint8)[:count]
        return (raw.astype(np.uint16) * (high - low + 1) // 256 + low).astype(np.uint8)
    x = bits.random_raw(ceil(count / 4)).view(np.uint16)[:count].astype(np.float32)
    x *= (high - low) / 65535
    x += low
    return to_bf16(x) if dtype == "BF16" else x


# %%
def norm(seed, n):
    "The first n values of the last norm's weight."
    return wide(draw(random_bits(seed, "language_model.model.norm.weight"), "BF16", n, 0.75, 1.25))


print("a norm:", norm(0, 6), "| again:", norm(0, 2))
print("seed 1:", norm(1, 6), "| scales:", draw(random_bits(0, "scale"), "U8", 6, 121, 122))

# %% [markdown]
# ## 5.28.5 Which rows live
#
# The sparse preset may cost 6 GB of 1,561, and those must still make a model: its output must depend on the input
# token, on every kind of layer, on the experts chosen. So live rows are chosen to meet each other: the same heads in q,
# k, v and gate, the same rows in both halves of a gated MLP.

# %% tags=["export"]
ROWS = 128  # live rows of a large matrix
HEADS = 2  # live heads of a layer
EXPERTS = 16  # live experts of a layer
EXPERT_ROWS = 64  # live rows of each of their matrices
LOW_IDS = 4096  # ids with a live row in both vocabulary tables; above them every ID_STEP-th, and the control ids
ID_STEP = 80
WHOLE = 2_000_000  # bytes up to which a tensor has no holes
ALWAYS = ("gate", "kv_a_proj_with_mqa")  # no holes: a router needs every expert, kv_a_proj the 64 rows after its latent


@cache
def choose(seed: int, what: str, layer: int, n: int, k: int) -> tuple[int, ...]:
    "k of the numbers 0..n-1, ascending, another choice for each layer; all n of them if k is larger."
    return tuple(sorted(np.argsort(random_bits(seed, what, layer).random_raw(n), kind="stable")[:k].tolist()))


# %% [markdown]
# A head is a block of rows in the projections that lead to heads. In a head that is a hole, q, k and v are zero, and so
# is its output: the L2 norm and the RMSNorm of zero are zero, not NaN, thanks to their epsilon.

# %% tags=["export"]
def heads_of(config: Config, layer: int) -> int:
    "How many heads a layer's attention has."
    return config.kda_num_heads if config.layer_kind(layer) == "kda" else config.num_attention_heads


def live_heads(recipe: Recipe, layer: int) -> tuple[int, ...]:
    "Heads of a layer's attention that have values, in a sparse checkpoint."
    return choose(recipe.seed, "heads", layer, heads_of(recipe.config, layer), HEADS)


def live_experts(recipe: Recipe, layer: int) -> tuple[int, ...]:
    "Experts of a layer that have values, in a sparse checkpoint."
    return choose(recipe.seed, "experts", layer, recipe.config.num_experts, EXPERTS)


def head_rows(config: Config, place: Place) -> int:
    "Rows that one head has in a projection to heads, 0 for any other tensor."
    if place.layer < 0:
        return 0
    if config.layer_kind(place.layer) == "kda":
        return config.kda_head_dim if place.short in ("q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj") else 0
    nope, v = config.qk_nope_head_dim, config.v_head_dim
    return {"q_b_proj": nope + config.qk_rope_head_dim, "kv_b_proj": nope + v, "g_proj": v}.get(place.short, 0)


# %% [markdown]
# Every other matrix gets 128 adjacent rows, at a place of the layer's own but the same for matrices of equal height.
# They are adjacent so that a page of 4,096 bytes is seldom half used.

# %% tags=["export"]
def live_rows(recipe: Recipe, tensor: Tensor) -> list[tuple[int, int]]:
    "[(first row, rows)] of a tensor that have values."
    height = tensor.shape[0]
    if not recipe.sparse:
        return [(0, height)]
    place = place_of(tensor.name)
    if place.expert >= 0 and place.expert not in live_experts(recipe, place.layer):
        return []
    if place.expert < 0 and (tensor.dtype == "F32" or place.short in ALWAYS or tensor_bytes(tensor) <= WHOLE):
        return [(0, height)]
    if place.short in ("embed_tokens", "lm_head"):
        low, control = min(LOW_IDS, height), height - control_ids(height)
        return [(0, low), *((i, 1) for i in range(low, control, ID_STEP)), (control, height - control)]
    if of_head := head_rows(recipe.config, place):
        return [(head * of_head, of_head) for head in live_heads(recipe, place.layer)]
    rows = min(height, ROWS if place.expert < 0 else EXPERT_ROWS)
    return [(random_bits(recipe.seed, "rows", place.layer, height).random_raw() % (height - rows + 1), rows)]


# %%
projections = "q_proj", "q_b_proj", "kv_b_proj", "g_proj", "o_proj"
for L, kind in (0, "KDA"), (3, "MLA"):
    print(f"layer {L} ({kind}): heads {live_heads(full, L)}")
    for tensor in layer_tensors(full.config, L, experts=()):
        if (short := place_of(tensor.name).short) in projections:
            print(f"  {short:11s} {tensor.shape} live rows {live_rows(full, tensor)}")

# %% [markdown]
# ## 5.28.6 How large a weight should be
#
# A weight drawn from $\pm\sqrt{3/n}$ has variance $1/n$, and a sum over $n$ inputs of size one has size one again. The
# $n$ that counts is the number of *live* inputs: an output projection reads two heads of 96. With $n$ = 12,288 its
# output would be too small, and a norm would then cancel most of what a wrong kernel does.

# %% tags=["export"]
GAIN = {"o_proj": 2.0, "down_proj": 2.0, "shared_experts.down_proj": 2.0,  # a gate halves their inputs
        "lm_head": 3.0}
E2M1_RMS = sqrt((0.5**2 + 1 + 1.5**2 + 2**2 + 3**2 + 4**2 + 6**2) / 8)  # root mean square of codes drawn evenly
INTERVAL = {
    "A_log": (-1.0, 1.0), "dt_bias": (-5.0, 1.0), "e_score_correction_bias": (-0.1, 0.1),
    "embed_tokens": (-0.87, 0.87), "q_conv1d": (-0.87, 0.87), "k_conv1d": (-0.87, 0.87), "v_conv1d": (-0.87, 0.87),
}
LIVE_INPUTS = {"down_proj": ROWS, "shared_experts.down_proj": ROWS, "w1": ROWS, "w3": ROWS, "w2": EXPERT_ROWS}


def live_inputs(recipe: Recipe, layer: int, short: str, columns: int) -> int:
    "How many of the `columns` inputs of a layer's matrix `short` are not always zero."
    if not recipe.sparse:
        return columns
    if short == "o_proj":
        return len(live_heads(recipe, layer)) * columns // heads_of(recipe.config, layer)
    return min(columns, LIVE_INPUTS.get(short, columns))


def interval(recipe: Recipe, tensor: Tensor) -> tuple[float, float]:
    "(low, high) of a tensor's values; for scale bytes, two whose powers of two enclose the wanted size."
    layer, expert, short = place_of(tensor.name)
    if expert >= 0:
        matrix = short.removesuffix("_scale")
        if matrix == short:
            return 0, 255
        scale = 127 + floor(-log2(E2M1_RMS * sqrt(live_inputs(recipe, layer, matrix, 32 * tensor.shape[1]))))
        return scale, scale + 1
    if "norm" in short:
        return 0.75, 1.25
    half = GAIN.get(short, 1.0) * sqrt(3 / live_inputs(recipe, layer, short, prod(tensor.shape[1:])))
    return INTERVAL.get(short, (-half, half))


# %% [markdown]
# Three tensors have rows of their own kind. `A_log` is padded with entries that must not be used. The head's rows of
# control ids are small, so that no decode stops by accident. And a sparse router's bias favours live experts, since
# chance would seldom choose 16 of 896.

# %% tags=["export"]
class RowRange(NamedTuple):
    "Adjacent rows of a tensor, and the interval of their values."
    first: int
    rows: int
    low: float
    high: float


def row_ranges(recipe: Recipe, tensor: Tensor) -> list[RowRange]:
    "Rows of a tensor that have values, in the order they are drawn. A later range may overwrite part of an earlier."
    spans = live_rows(recipe, tensor)
    if not spans:
        return []
    layer, _, short = place_of(tensor.name)
    low, high = interval(recipe, tensor)
    found = [RowRange(first, rows, low, high) for first, rows in spans if rows]
    height, heads = tensor.shape[0], recipe.config.kda_num_heads
    if short == "A_log" and height > heads:
        found.append(RowRange(heads, height - heads, 7.7, 7.7))
    if short == "lm_head" and (control := control_ids(height)):
        found.append(RowRange(height - control, control, low / 64, high / 64))
    if short == "e_score_correction_bias" and recipe.sparse:
        found += [RowRange(expert, 1, 0.3, 0.5) for expert in live_experts(recipe, layer)]
    return found


# %% [markdown]
# The check: one router of the released width, fed 40 random inputs of size one. A useful choice takes live experts and
# others, and changes from token to token. In a short recording of the released model a token's router chooses 43% of
# the experts of the token before (5.15); other engines report 29% for longer texts. Without the bias, the live experts
# are hardly ever chosen.

# %%
def values(recipe, tensor):
    "A whole small tensor as written."
    out = np.zeros(tensor.shape, {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}[tensor.dtype])
    bits = random_bits(recipe.seed, tensor.name)
    for first, rows, low, high in row_ranges(recipe, tensor):
        drawn = draw(bits, tensor.dtype, rows * prod(tensor.shape[1:]), low, high)
        out[first:first + rows] = drawn.reshape(-1, *tensor.shape[1:])
    return out


router = {place_of(tensor.name).short: tensor for tensor in layer_tensors(full.config, 5, experts=())}
gate, bias = (values(full, router[short]) for short in ("gate", "e_score_correction_bias"))
tokens = np.random.default_rng(0).standard_normal((40, 7168))
score = 1 / (1 + np.exp(-tokens @ wide(gate).T.astype(np.float64)))
for label, b in ("with the bias", bias), ("without", 0):
    chosen = np.argsort(-(score + b), axis=1)[:, :16]
    again = np.mean([len({*x} & {*y}) / 16 for x, y in zip(chosen.tolist(), chosen.tolist()[1:])])
    live = np.isin(chosen, live_experts(full, 5)).mean()
    print(f"{label:14s} live among the chosen {live:.0%}, chosen again by the next token {again:.0%}, "
          f"{len(np.unique(chosen))} different")
    assert (0.25 < live < 0.75 and 0.1 < again < 0.5) == (label != "without")


# %% [markdown]
# ## 5.28.7 A plan, and the census without a file
#
# Everything so far is arithmetic on shapes. Put together, file by file, it says which bytes would be written, before
# any is.

# %% tags=["export"]
class FilledTensor(NamedTuple):
    "A tensor that has values: where it begins in its file, elements a row, and its rows that have values."
    name: str
    dtype: str
    offset: int
    row: int
    ranges: list[RowRange]

    def spans(self) -> list[tuple[int, int]]:
        "(first byte in the file, bytes) of each range."
        size = self.row * ITEMSIZE[self.dtype]
        return [(self.offset + first * size, rows * size) for first, rows, _, _ in self.ranges]


class Shard(NamedTuple):
    "A file to be written, `size` bytes long: its header, and its tensors, of which those in `filled` have values."
    file: str
    tensors: list[Tensor]
    header: bytes
    size: int
    filled: list[FilledTensor]

    def written(self) -> int:
        "Bytes of values."
        return sum(size for tensor in self.filled for _, size in tensor.spans())

    def pages(self, page: int = 4096) -> int:
        "Bytes of the pages that are touched: the space the file takes on disk."
        total, seen = 0, 0
        for begin, size in [(0, len(self.header)), *sorted(span for tensor in self.filled for span in tensor.spans())]:
            end = ceil((begin + size) / page)
            total += max(0, end - max(begin // page, seen))
            seen = max(seen, end)
        return total * page


# %% tags=["export"]
def plan_shard(recipe: Recipe, file: str, tensors: Iterable[Tensor]) -> Shard:
    "The Shard of the file `file` that holds `tensors`."
    tensors, filled = file_order(tensors), []
    header = header_bytes(tensors)
    at = len(header)
    for tensor in tensors:
        if found := row_ranges(recipe, tensor):
            filled.append(FilledTensor(tensor.name, tensor.dtype, at, prod(tensor.shape[1:]), found))
        at += tensor_bytes(tensor)
    return Shard(file, tensors, header, at, filled)


def plan_shards(recipe: Recipe) -> list[Shard]:
    "The Shards of a checkpoint."
    total = recipe.config.num_hidden_layers + 3
    return [plan_shard(recipe, f"model-{i:05d}-of-{total:06d}.safetensors", tensors)
            for i, tensors in enumerate(files(recipe.config, recipe.sparse), 1)]


# %% [markdown]
# The gate at full scale: 96 file sizes, and the figures of the released checkpoint, part by part.

# %%
shards = plan_shards(full)
assert [shard.size for shard in shards] == list(published.values())
payload, live = Counter(), Counter()
for shard in shards:
    for tensor in shard.tensors:
        payload[census_part(split_name(tensor.name)[0])] += tensor_bytes(tensor)
    for tensor in shard.filled:
        live[census_part(split_name(tensor.name)[0])] += sum(size for _, size in tensor.spans())
for part in payload:
    print(f"{part:14s}{payload[part]:24,} bytes, {live[part] / 1e6:9,.1f} MB of them written")
tensors, file_bytes = sum(len(shard.tensors) for shard in shards), sum(shard.size for shard in shards)
print(f"{'payload':14s}{payload.total():24,} bytes in {tensors:,} tensors")
print(f"{'files':14s}{file_bytes:24,} bytes in {len(shards)} files")
assert (payload["experts"], payload["trunk"]) == (1_446_456_066_048, 108_811_877_376)
assert (payload.total(), file_bytes) == (1_560_860_324_864, 1_560_936_091_448)

# %%
pages = sum(shard.pages() for shard in shards)
fig, ax = plt.subplots(figsize=(6, 3))
parts = sorted(payload, key=payload.get)
ax.hlines(parts, [live[part] / 1e9 for part in parts], [payload[part] / 1e9 for part in parts], color="0.8", zorder=0)
ax.plot([payload[part] / 1e9 for part in parts], parts, "o", color="C5", label="in the checkpoint")
ax.plot([live[part] / 1e9 for part in parts], parts, "o", color="C0", label="written")
ax.set(xscale="log", xlabel="size (GB, logarithmic)",
       title=f"{live.total() / 1e9:.1f} GB of values stand for {payload.total() / 1e9:,.0f} GB")
ax.legend(loc="lower right")
plt.show()
print(f"on disk, with headers and half-used pages: {pages / 1e9:.1f} GB")
assert pages < 6e9

# %% [markdown]
# ## 5.28.8 Written whole or not at all
#
# One file: its length, its header, its values. The values are made 32,768 at a time, which fits a core's cache. Before
# each of these chunks `write_shard` looks at `stop`, so that Ctrl-C does not wait for 17 GB.

# %% tags=["export"]
CHUNK = 1 << 15  # values made at a time


def write_shard(folder: Path, shard: Shard, seed: int, stop: threading.Event) -> None:
    "Write one file, until `stop` is set. Bytes without values are never touched and stay a hole. Raises OSError."
    with writing(folder / shard.file) as file:
        file.truncate(shard.size)
        file.write(shard.header)
        for tensor in shard.filled:
            bits = random_bits(seed, tensor.name)
            for (_, rows, low, high), (begin, _) in zip(tensor.ranges, tensor.spans()):
                file.seek(begin)
                count = rows * tensor.row
                for at in range(0, count, CHUNK):
                    if stop.is_set():
                        return
                    file.write(draw(bits, tensor.dtype, min(CHUNK, count - at), low, high).data)


# %% tags=["export"]
def shown_bytes(n: int) -> str:
    "A number of bytes with a unit."
    units = ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)
    return next((f"{n / size:.2f} {unit}" for unit, size in units if n >= size), f"{n:,} bytes")


def write_shards(folder: Path, shards: list[Shard], seed: int, progress: Callable[[str], object]) -> None:
    """Write all files, a thread for each core, at most 8; files with most values come first.

    `progress` is called with a line for each tenth of the values. If anything is raised, the threads have ended before.
    Raises ResourceError if they cannot be started.
    """
    stop, done, tenths, total = threading.Event(), 0, 0, sum(map(Shard.written, shards))
    threads = min(8, os.cpu_count() or 1)
    require_threads(threads, "writing a checkpoint")
    with ThreadPoolExecutor(threads) as pool:
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
# Two refusals come before the first shard: of a folder that is not empty, and of a disk that is too full. The space
# needed is that of the plan's pages, plus 1% for the file system's own records. A file system that keeps no holes needs
# the whole length of the files, so `keeps_holes` tries that first.

# %% tags=["export"]
def prepare(folder: str | os.PathLike) -> Path:
    """The full path of `folder`, which is new or empty.

    Raises FileNotFoundError if there is no folder to make it in, SynthError if it is a file or is not empty, UsageError
    if it is no path.
    """
    folder = given_path("folder", folder).resolve()
    if not folder.parent.is_dir():
        raise MissingFile(f"{folder.parent}: no such folder to make {folder.name} in")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        fault = "exists and is not empty" if folder.is_dir() else "is a file"
        raise SynthError(f"{folder}: {fault}, expected a new or an empty folder")
    return folder


def give_name(part: Path, folder: Path) -> None:
    "Rename the complete folder `part` to `folder`. Raises SynthError if another program has filled that meanwhile."
    try:
        part.rename(folder)
    except OSError:
        if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
            raise SynthError(f"{folder}: another program has filled it meanwhile, expected it to stay empty") from None
        raise


def keeps_holes(folder: Path) -> bool:
    "True if a file in `folder` can be longer than the space it takes on disk. Raises OSError, which names the folder."
    with tempfile.TemporaryFile(dir=folder) as probe:
        try:
            probe.truncate(1 << 24)
        except OSError as error:
            raise OSError(error.errno, f"{folder}: a file of 16.8 MB cannot be made: {error.strerror}") from None
        return disk_bytes(os.fstat(probe.fileno())) < 1 << 24


# %% tags=["export"]
def check_space(folder: Path, shards: list[Shard]) -> None:
    "Raise SynthError unless the file system of `folder` has room for the pages that will be written."
    holes = keeps_holes(folder)
    index = 160 * sum(len(shard.tensors) for shard in shards)
    need = sum(1.01 * shard.pages() if holes else shard.size for shard in shards) + index
    free = shutil.disk_usage(folder).free
    if need > free:
        kind = "" if holes else ", since this file system keeps no holes"
        raise SynthError(f"{folder.parent}: {shown_bytes(free)} free, "
                         f"expected at least {shown_bytes(ceil(need))}{kind}")


# %% tags=["export"]
def write_index(folder: Path, shards: list[Shard]) -> None:
    "Write model.safetensors.index.json: the bytes of all tensors, and the file of each."
    total = sum(shard.size - len(shard.header) for shard in shards)
    lines = (f'    "{tensor.name}": "{shard.file}"' for shard in shards for tensor in shard.tensors)
    text = (f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n'
            + ",\n".join(lines) + "\n  }\n}\n")
    with writing(folder / "model.safetensors.index.json") as file:
        file.write(text.encode())


# %% [markdown]
# Everything goes to a folder beside the one asked for, which gets its name in the end. If anything fails before that, a
# full disk or Ctrl-C, that folder is removed and nothing half-written is left to be mistaken for a model. Two calls for
# one folder write to two such folders. The first to be ready gets the name; the second is refused and removes its own.

# %% tags=["export"]
class Written(NamedTuple):
    "The files that `synth` wrote."
    folder: Path
    shards: int
    tensors: int
    payload_bytes: int  # of tensors
    file_bytes: int  # with headers
    value_bytes: int  # that are not holes
    disk_bytes: int  # that the file system took

    def __str__(self) -> str:
        return (f"{self.folder}: synthetic checkpoint of {self.tensors:,} tensors in {self.shards} files, "
                f"{self.file_bytes:,} bytes long ({self.payload_bytes:,} of tensors), "
                f"{self.disk_bytes:,} bytes on disk")


def written(folder: Path, shards: list[Shard]) -> Written:
    "The account of `shards`, before or after they are written to `folder`: disk_bytes are those of the folder's files."
    size = sum(shard.size for shard in shards)
    return Written(folder, len(shards), sum(len(shard.tensors) for shard in shards),
                   size - sum(len(shard.header) for shard in shards), size, sum(map(Shard.written, shards)),
                   sum(disk_bytes(path.stat()) for path in folder.iterdir()))


# %% tags=["export"]
def synth(folder: str | os.PathLike, preset: str = "full", seed: int = 0, layers: int | None = None,
          experts: int | None = None, vocab: int | None = None, *, progress: Callable[[str], object] | None = None,
          **changes: Any) -> Written:
    """Write a synthetic checkpoint in the released layout into `folder`, new or empty, whole or not at all.

    preset: 'full' (released shape, sparse: about 5 GB on disk), 'slice' (full width, every byte real) or 'oracle'
    (small). Any field of ARGUMENTS can be changed. `progress` is called with lines of text. Raises SynthError, also if
    another program fills the folder meanwhile, UsageError, FileNotFoundError, OSError.
    """
    folder, tell = prepare(folder), progress or (lambda line: None)
    part = folder.with_name(f".{folder.name[:40]}.{uuid.uuid4().hex}.part")
    try:
        part.mkdir()  # inside, because a signal may come as soon as the folder is there
        recipe = write_config(part, preset, seed, layers=layers, experts=experts, vocab=vocab, **changes)
        shards = plan_shards(recipe)
        check_space(part, shards)
        sizes = written(part, shards)
        tell(f"synthetic checkpoint, preset {preset}, seed {seed}: {sizes.tensors:,} tensors in {sizes.shards} files "
             f"of {shown_bytes(sizes.file_bytes)}, {shown_bytes(sizes.value_bytes)} of it values"
             + (", the rest holes" if recipe.sparse else ""))
        write_shards(part, shards, recipe.seed, tell)
        write_index(part, shards)
        sizes = written(part, shards)
        give_name(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return sizes._replace(folder=folder)


# %% [markdown]
# The small preset, really written. The `safetensors` library, a reader we did not write, finds the bytes of every
# tensor, and the census of chapter [5.6] counts the graph.
#
# [5.6]: 06_census.ipynb

# %%
home = Path(scratch.name) / "oracle"
done = synth(home, "oracle")
small = Checkpoint(home)
for file in small.files:
    for name, theirs in safetensors.deserialize(Path(file).read_bytes()):
        assert small.raw(name).tobytes() == theirs["data"] and list(small.extent(name).shape) == theirs["shape"]
print(json.loads((home / "config.json").read_bytes())["synthetic"]["generator"], f"wrote {done.tensors:,} tensors\n")
print(small.census(experts_per_token=4).table())


# %% [markdown]
# Same seed, same bytes, in any order of writing. The trap is one generator for all tensors: correct values, no two
# alike, and a different checkpoint as soon as two threads race.

# %%
def digest(tensors, bits_of):
    "One hash over the first values of tensors, drawn in the order given, listed by name."
    made = {name: draw(bits_of(name), "BF16", 64, -1, 1).tobytes() for name in tensors}
    return hashlib.sha256(b"".join(made[name] for name in sorted(made))).hexdigest()[:8]


names = [tensor.name for tensor in layer_tensors(full.config, 0)]
own = [digest(order, lambda name: random_bits(0, name)) for order in (names, names[::-1])]
generator = {way: np.random.PCG64(0) for way in ("forward", "backward")}
print("a generator for each name:", *own)
print("one generator for all:    ", digest(names, lambda name: generator["forward"]),
      digest(names[::-1], lambda name: generator["backward"]))
assert own[0] == own[1]
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
# ## 5.28.9 Holes, looked at
#
# The same code at full width, three layers and 64 experts: layer 1 is KDA with a MoE. The bytes that the file system
# has on disk must be those that the plan writes, and no others.

# %%
wide_home = Path(scratch.name) / "wide"
done = synth(wide_home, "full", layers=3, experts=64, vocab=4096)
thin = Recipe(read_config(wide_home), True, 0)
layer = plan_shard(thin, "model-00002-of-000006.safetensors", layer_tensors(thin.config, 1))
disk = data_extents(wide_home / layer.file)
planned = sorted([(0, len(layer.header)), *(span for tensor in layer.filled for span in tensor.spans())])
inside = all(any(a <= begin and begin + n <= a + m for a, m in disk) for begin, n in planned)
print(f"{done.file_bytes / 1e9:.2f} GB long, {done.value_bytes / 1e9:.2f} GB of values; "
      f"every planned byte is on disk: {inside}")
assert inside and sum(n for _, n in disk) <= layer.pages(os.statvfs(wide_home).f_frsize)

# %%
trunk = [tensor for tensor in layer.tensors if place_of(tensor.name).expert < 0]
trunk_end = len(layer.header) + sum(map(tensor_bytes, trunk))
fig, axes = plt.subplots(2, 1, figsize=(6, 2.8), sharex=True)
for ax, spans, label in (axes[0], planned, "planned"), (axes[1], disk, "on disk"):
    for side, color in (True, "C0"), (False, "C1"):
        # a bar is 6 MB wide at least, or it could not be seen
        bars = [(begin / 1e6, max(n / 1e6, 6)) for begin, n in spans if (begin < trunk_end) == side]
        ax.broken_barh(bars, (0, 1), facecolor=color)
    ax.set(yticks=[], ylabel=label, ylim=(0, 1), xlim=(0, layer.size / 1e6))
axes[1].set_xlabel("place in the file (MB); blue: trunk, orange: experts, white: hole")
values_of = f"{layer.written() / 1e6:.0f} of {layer.size / 1e6:,.0f} MB are values"
axes[0].set_title(f"Layer 1: {values_of}, where planned and nowhere else")
plt.show()

# %% [markdown]
# What is the product with a hole expert? Scale byte 0 means $2^{-127}$, code 0 means zero: its weights are exactly
# zero. A decoder that lowers the exponent before it multiplies, a trick worth having, wraps byte 0 to $-\infty$ and
# turns the hole into NaN. So holes are a test, too.

# %%
hole = next(expert for expert in range(64) if expert not in live_experts(thin, 1))
with Checkpoint(wide_home) as ckpt:
    for label, expert in ("live", live_experts(thin, 1)[0]), ("hole", hole):
        packed, scale = (ckpt.raw(expert_name(1, expert, short)) for short in ("w1", "w1_scale"))
        w = decode(packed, scale)
        lowered = ((scale.astype(np.uint32) - 1) << 23).view(np.float32)  # 2^(s-128), and byte 0 wraps
        with np.errstate(invalid="ignore"):
            naive = np.repeat(lowered, 32, axis=1) * np.where(w == 0, 0, 1)
        print(f"{label}: {np.count_nonzero(w.any(axis=1)):4d} of {len(w):,} rows not zero, "
              f"largest {np.abs(w).max():.3g}; lowered exponent gives NaN: {np.isnan(naive).any()}")
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
# ## 5.28.10 Make it fast
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
    print(f"{label:26s}{cost:6.1f} ns a value, {2 / cost:5.2f} GB/s; "
          f"{live.total() / 2 * cost / 1e9:4.0f} s of processor time for the full preset")

# %%
small.close()
scratch.cleanup()

# %% [markdown]
# ## Summary
#
# - A checkpoint's layout follows from a config: names, order, header, sizes. Ours gives all 96 published sizes and all
#   497,220 names.
# - Bits belong to names. Equal seeds give equal bytes in any order of writing, on any number of threads.
# - A hole takes no disk and no device read, and decodes to exact zeros. That is also its limit.
#
# ## Exercises
#
# 1. Which heads are live in no KDA layer of seed 0? Find a seed that leaves fewer, or change `live_heads` so that 69
#    layers cover all 96.
# 2. Give layer 50 an `o_proj` of zeros (`row_ranges` returns nothing). How many of eight generated ids change? What if
#    it were layer 92?
# 3. Write `resize(home, vocab)`, which cuts a synthetic checkpoint's vocabulary without writing any other file again.
#
# Next: [5.29 Showing must not cost the result](29_display.ipynb).
