# %% [markdown]
# # 5.6 Where 1.56 TB lie
#
# Before an engine for 1.56 TB of weights is designed, some numbers must be known. How much of the checkpoint is
# experts? How much of it does one token read? Are the tensors of a layer, or of an expert, stored side by side? The
# headers of the files answer these questions. At the end of this chapter you can count a checkpoint of any size without
# reading one weight, and you can say which part of it should be in memory first.
#
# > **Without it:** to count the tensors, 1,561 GB<!--claim files--> are read, which takes 223 s<!--claim seconds--> at
# > 7 GB/s.
# >
# > **With it:** only the headers are read, 76 MB.<!--claim headers-->
#
# Needs chapters [5.4] (names) and [5.5] (headers). Runs in seconds. Makes `k3lib.census`.
#
# [5.5 Headers, and half a million tensors in four columns](05_header.ipynb) ·
# [contents](../README.md) ·
# [5.7 A checkpoint, opened](07_checkpoint.ipynb)
#
# [5.4]: 04_tensors.ipynb
# [5.5]: 05_header.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "files")

# %% tags=["parameters"]
layers = 93  # of the index of the released shape, section 5.6.1
experts = 896

# %% tags=["export"]
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from k3lib.fileio import Unusual
from k3lib.header import BITS, NUMBER_BITS, NUMBER_MASK, TensorIndex
from k3lib.tensors import LAYER_PREFIX, PARTS, census_part

# %%
import time
from math import prod
from pathlib import Path

import matplotlib.pyplot as plt

from k3lib.config import read_config
from k3lib.fileio import open_shard
from k3lib.header import ITEMSIZE, header_bytes, read_header
from k3lib.tensors import layer_of, layer_tensors, part_of, place_of, text_tensors

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
MODEL = ROOT / "fixtures/oracle13/model"

# %% [markdown]
# ## 5.6.1 The release, from shapes alone
#
# The files of the release are not here, and they are not needed to count it. A header consists of names and shapes, and
# the shapes are public. Those of the text stack come from the table of 5.4. Those of the image side, which this engine
# does not run, are listed in the next cell.

# %%
VISION = {"wqkv": [4608, 1024], "wo": [1024, 1536], "mlp.fc0": [4096, 1024], "mlp.fc1": [1024, 4096],
          "norm0": [1024], "norm1": [1024]}


def bf16(prefix, shapes):
    return [(f"{prefix}{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def released_shards(config):
    "The tensors of each of the 96 files: the layers, the tensors outside of them, the projector, the vision tower."
    for L in range(layers):
        yield list(layer_tensors(config, L, range(experts)))
    yield [(name, dtype, shape) for name, dtype, shape in text_tensors(config) if layer_of(name) is None]
    yield bf16("mm_projector.", {"post_norm": [7168], "proj.0": [4096, 4096], "proj.2": [7168, 4096]})
    patches = {"patch_embed.pos_emb": [64, 64, 1024], "patch_embed.proj": [1024, 3, 14, 14]}
    yield bf16("vision_tower.", {"encoder.final_layernorm": [1024]} | patches
               | {f"encoder.blocks.{b}.{name}": shape for b in range(27) for name, shape in VISION.items()})


# %% [markdown]
# In which order are the tensors in a shard? No document says it, but the sizes of the files are published. A header
# writes offsets as decimal numbers, so another order gives a header of another length. One order gives the published
# size of each kind of shard and the published sum: first float32, then BF16, then bytes, and by name within each type,
# without metadata. So this order is used here.

# %% tags=["nbval-ignore-output"]
k3 = TensorIndex()
start = time.perf_counter()
for i, tensors in enumerate(released_shards(read_config(ROOT / "fixtures/k3")), 1):
    tensors.sort(key=lambda t: (-ITEMSIZE[t[1]], t[0]))
    head = header_bytes(tensors)
    payload = sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors)
    k3.add(f"model-{i:05d}-of-{layers + 3:06d}.safetensors", len(head), len(head) + payload, head[8:])
k3.complete()
print(f"{len(k3):,} tensors indexed in {time.perf_counter() - start:.1f} s, most of it to make the headers")

# %%
PUBLISHED = {1: 2_341_216_112, 2: 16_990_911_504, 4: 16_567_501_776, 93: 16_567_507_176,
             94: 4_697_664_072, 95: 92_289_328, 96: 802_448_352}
if (layers, experts) == (93, 896):
    assert all(k3.file_sizes[i - 1] == size for i, size in PUBLISHED.items())
print(f"{len(k3.patterns)} patterns of names, {len(k3.kinds)} kinds of dtype and shape")


# %% [markdown]
# ## 5.6.2 Rows by part
#
# The name of a tensor says to which part of the model it belongs. The *trunk* is the part of the layers that every
# token uses: everything but the routed experts. So the shared experts belong to the trunk. A packed byte counts as two
# parameters, and a scale as none. The layers that predict further tokens ([5.3.4]) are not used for decoding, so their
# tensors count as others.
#
# [5.3.4]: 03_config.ipynb#5.3.4-Layer-lists-count-from-one

# %% tags=["export"]
def _params_per_element(pattern: str) -> int:
    "2 for a byte of packed MXFP4, 0 for its scales, 1 for everything else."
    return {"packed": 2, "scale": 0}.get(pattern.rpartition("_")[2], 1) if census_part(pattern) == "experts" else 1


class _Columns(NamedTuple):
    "For each row of an index: its part's number in PARTS (int8), its bytes and its parameters (int64)."
    part: np.ndarray
    nbytes: np.ndarray
    params: np.ndarray


def _columns(index: TensorIndex, layers: int | None = None) -> _Columns:
    "The columns of a model of so many layers, None if their number is not known."
    number = index.key >> 2 * NUMBER_BITS
    part = np.array([PARTS.index(census_part(pattern)) for pattern in index.patterns], np.int8)[number]
    if layers is not None:
        in_layer = np.array([pattern.startswith(LAYER_PREFIX) for pattern in index.patterns], bool)[number]
        part[in_layer & (_layer_label(index) > layers)] = PARTS.index("other")
    counts = [8 * size // BITS[dtype] if dtype in BITS else 0 for dtype, _, size in index.kinds]
    params = np.array(counts, np.int64)[index.kind]
    params *= np.array([_params_per_element(pattern) for pattern in index.patterns], np.int64)[number]
    return _Columns(part, index.nbytes(), params)


# %% [markdown]
# A *group* is the trunk tensors of one layer, or the six tensors of one expert. After one sort, the rows of a group lie
# side by side and can be summed. Is a group contiguous in its file? A file with a valid header has no gaps. So a group
# is contiguous exactly if two conditions hold: all its tensors lie in one shard, and from the beginning of its first
# tensor to the end of its last there are as many bytes as its tensors have together.

# %% tags=["export"]
class _Groups(NamedTuple):
    "Groups of rows of equal label, one element a group; `whole` is True if the group is contiguous in one file."
    label: np.ndarray
    shard: np.ndarray  # of the group's first tensor
    offset: np.ndarray  # of the group's first tensor, from the start of the file
    nbytes: np.ndarray  # of all its tensors
    tensors: np.ndarray  # how many
    whole: np.ndarray


def _groups(index: TensorIndex, chosen: np.ndarray, label: np.ndarray, nbytes: np.ndarray) -> _Groups:
    "Groups of the rows that the boolean array `chosen` marks; `label` int64 >= 0 and `nbytes` are of all rows."
    rows = np.flatnonzero(chosen)
    rows = rows[np.lexsort((index.offset[rows], index.shard[rows], label[rows]))]
    label, shard, offset, nbytes = label[rows], index.shard[rows], index.offset[rows], nbytes[rows]
    first = np.flatnonzero(np.diff(label, prepend=-1))
    last = np.append(first[1:], len(rows))[:len(first)] - 1
    total, end = np.add.reduceat(nbytes, first), np.maximum.reduceat(offset + nbytes, first)
    whole = (shard[first] == shard[last]) & (end - offset[first] == total)
    return _Groups(label[first], shard[first], offset[first], total, last - first + 1, whole)


def _layer_label(index: TensorIndex) -> np.ndarray:
    "For each row: the first number of its name plus one."
    return index.key >> NUMBER_BITS & NUMBER_MASK


def _trunk_groups(index: TensorIndex, columns: _Columns) -> _Groups:
    "One group for each layer's trunk tensors; its label is the layer plus one."
    return _groups(index, columns.part == PARTS.index("trunk"), _layer_label(index), columns.nbytes)


def _expert_groups(index: TensorIndex, columns: _Columns) -> _Groups:
    "One group for each expert; its label is the key without the pattern."
    label = index.key & (1 << 2 * NUMBER_BITS) - 1
    return _groups(index, columns.part == PARTS.index("experts"), label, columns.nbytes)


# %% [markdown]
# ## 5.6.3 The census
#
# Two counts of parameters have names. *Always active* is the whole text stack except the routed experts. *Active per
# token* adds the experts that a token chooses, and leaves out the embedding, because a token only copies one row of it.

# %% tags=["export"]
@dataclass(frozen=True)
class Census:
    """Counts and sizes of a checkpoint, from its headers. Sizes are in bytes.

    `expert_bytes` is the size of the largest expert. `largest_layer` is the layer with the most bytes of trunk, -1 if
    no layer has any. `parameters` are those of the text stack, `always_active` are those without the routed experts.
    `active_per_token` counts `experts_per_token` experts in each layer that has any, and no embedding; it is None if
    experts_per_token is not known. `unusual` {what: {"count": how many, "first": the first one}}: what is odd about the
    checkpoint and changes no number.
    """
    shards: int
    tensors: int
    payload_bytes: int
    file_bytes: int
    expert_layers: int
    experts: int
    expert_bytes: int
    experts_bytes: int
    layers: int
    trunk_tensors: int
    trunk_bytes: int
    largest_layer: int
    largest_layer_bytes: int
    embed_lm_head_bytes: int
    globals_bytes: int
    mm_projector_tensors: int
    mm_projector_bytes: int
    vision_tower_tensors: int
    vision_tower_bytes: int
    other_tensors: int
    other_bytes: int
    parameters: int
    always_active: int
    active_per_token: int | None
    unusual: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        "The fields by name, for JSON."
        return asdict(self)


# %% [markdown]
# As text, the census has a line for each part. A line for other tensors, or for unusual facts, is shown only if there
# are any.

# %% tags=["export"]
def _short(n: int) -> str:
    "2,779,484,478,208 as 2.78T."
    for unit, size in ("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3):
        if n >= size:
            return f"{n / size:.{2 if n < 10 * size else 1 if n < 100 * size else 0}f}{unit}"
    return str(n)


class Census(Census):
    def table(self) -> str:
        "The census as text, a line for each part of the model."
        c, largest = self, self.largest_layer_bytes
        each = f"{c.experts // c.expert_layers if c.experts else 0} x {c.expert_layers} layers = {c.experts:,}"
        run = f"{largest / 1e6:,.0f} MB" if largest >= 1e7 else f"{largest:,} bytes"
        active = "" if c.active_per_token is None else f", {_short(c.active_per_token)} active per token"
        rows = {
            "shards / tensors": f"{c.shards} / {c.tensors:,}",
            "payload bytes": f"{c.payload_bytes:,}",
            "file bytes, headers included": f"{c.file_bytes:,}",
            "routed experts": f"{each}; {c.expert_bytes:,} bytes each; {c.experts_bytes:,} together",
            "trunk": f"{c.trunk_bytes:,} bytes; largest layer run {run} (layer {c.largest_layer})",
            "embed_tokens + lm_head": f"{c.embed_lm_head_bytes:,} bytes",
            "norm, output_attn_res_*": f"{c.globals_bytes:,} bytes",
            "mm_projector / vision_tower":
                f"{c.mm_projector_bytes:,} / {c.vision_tower_bytes:,} bytes "
                f"({c.mm_projector_tensors} / {c.vision_tower_tensors} tensors), not part of the text stack",
            "other tensors, not used": f"{c.other_tensors:,}; {c.other_bytes:,} bytes",
            "parameters": f"{_short(c.parameters)} total{active}; {c.always_active:,} always active",
        }
        if not c.other_tensors:
            del rows["other tensors, not used"]
        lines = [f"{what:29s} {value}" for what, value in rows.items()]
        lines += [f"{'unusual, but harmless':29s} {what}: {odd['count']:,}; {odd['first']}"
                  for what, odd in c.unusual.items()]
        return "\n".join(lines)


# %% [markdown]
# The counts are sums over the columns, by part.

# %% tags=["export"]
def census(index: TensorIndex, experts_per_token: int | None = None, layers: int | None = None,
           unusual: Unusual | None = None) -> Census:
    """The Census of an index. Its active parameters are None unless `experts_per_token` is given.

    `layers`: the number of layers that are decoded; None means all. `unusual`: what is to be told as unusual.
    """
    columns = _columns(index, layers)
    tensors, size, params = (dict(zip(PARTS, (int(values[columns.part == i].sum()) for i in range(len(PARTS)))))
                             for values in (np.ones(len(index), np.int64), columns.nbytes, columns.params))
    trunk, experts = _trunk_groups(index, columns), _expert_groups(index, columns)
    expert_layers = len(np.unique(experts.label >> NUMBER_BITS))
    largest = int(trunk.nbytes.argmax()) if len(trunk.label) else None
    always = sum(params[part] for part in ("trunk", "embed", "lm_head", "globals"))
    active = always - params["embed"]
    if experts_per_token is not None and len(experts.label):
        active += experts_per_token * expert_layers * (params["experts"] // len(experts.label))
    return Census(
        shards=len(index.files), tensors=len(index),
        payload_bytes=int(columns.nbytes.sum()), file_bytes=sum(index.file_sizes),
        expert_layers=expert_layers, experts=len(experts.label),
        expert_bytes=int(experts.nbytes.max(initial=0)), experts_bytes=size["experts"],
        layers=len(trunk.label), trunk_tensors=tensors["trunk"], trunk_bytes=size["trunk"],
        largest_layer=-1 if largest is None else int(trunk.label[largest]) - 1,
        largest_layer_bytes=int(trunk.nbytes.max(initial=0)),
        embed_lm_head_bytes=size["embed"] + size["lm_head"], globals_bytes=size["globals"],
        mm_projector_tensors=tensors["mm_projector"], mm_projector_bytes=size["mm_projector"],
        vision_tower_tensors=tensors["vision_tower"], vision_tower_bytes=size["vision_tower"],
        other_tensors=tensors["other"], other_bytes=size["other"],
        parameters=always + params["experts"], always_active=always,
        active_per_token=None if experts_per_token is None else active,
        unusual={} if unusual is None else {what: {"count": count, "first": first}
                                            for what, (count, first) in unusual.found.items()})


# %% [markdown]
# First, the census of the embedded model. Its config says that a token uses four experts of sixteen.

# %%
oracle = TensorIndex()
for path in sorted(MODEL.glob("*.safetensors")):
    with open_shard(path) as file:
        oracle.add(path.name, *read_header(file, path.name))
oracle.complete()
print(census(oracle, read_config(MODEL).num_experts_per_token).table())

# %% [markdown]
# Then the census of the release. Every number of its published listing follows from shapes alone.

# %%
whole = census(k3, 16)
if (layers, experts) == (93, 896):
    assert (whole.tensors, whole.payload_bytes, whole.file_bytes) == (497_220, 1_560_860_324_864, 1_560_936_091_448)
    assert whole.always_active == 56_743_648_000 and whole.trunk_bytes == 108_811_877_376
print(whole.table())
print(f"\nall files: {1_560_936_091_448 / 1e9:,.0f} GB")  # claim files
print(f"    read at 7 GB/s: {1_560_936_091_448 / 7e9:.0f} s")  # claim seconds
print(f"their headers: {(1_560_936_091_448 - 1_560_860_324_864) / 1e6:.0f} MB")  # claim headers

# %% [markdown]
# The next figure decides how the engine is built. The experts take most of the disk, but a token reads only sixteen of
# 896 in each layer. The trunk and the head are read completely for every token.

# %%
token = {"routed experts": 16 * whole.expert_layers * whole.expert_bytes, "trunk": whole.trunk_bytes,
         "lm_head": whole.embed_lm_head_bytes // 2}
disk = {"routed experts": whole.experts_bytes, "trunk": whole.trunk_bytes, "embed, lm_head": whole.embed_lm_head_bytes,
        "vision, projector": whole.vision_tower_bytes + whole.mm_projector_bytes}
for where, parts in ("on disk", disk), ("one token reads", token):
    shares = (f"{name} {size / 1e9:,.2f} GB = {size / sum(parts.values()):.1%}" for name, size in parts.items())
    print(f"{where:16s}", "; ".join(shares))

# %%
colour = dict(zip([*disk, "lm_head"], ["C1", "C0", "C2", "C5", "C2"]))
fig, axes = plt.subplots(2, 1, sharex=True, figsize=(6.5, 2.8))
for ax, title, parts in (axes[0], "On disk", disk), (axes[1], "Read for one token", token):
    left = 0
    for name, size in parts.items():
        width = 100 * size / sum(parts.values())
        ax.barh(0, width, left=left, color=colour[name])
        if width > 4:
            text = f"{name}\n{size / 1e9:,.0f} GB"
            ax.text(left + width / 2, 0, text, ha="center", va="center", color="white", fontsize=8)
        left += width
    green = "lm_head" if parts is token else "embed, lm_head"
    ax.set(yticks=[], xlim=(0, 100), title=f"{title}: {sum(parts.values()) / 1e9:,.0f} GB (green: {green})")
axes[1].set_xlabel("share of the bytes (%)")
shares = disk["routed experts"] / sum(disk.values()), token["trunk"] / sum(token.values())
title = "Experts are {:.0%} of the bytes on disk, the trunk {:.0%} of a token's reads".format(*shares)
fig.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
plt.show()


# %% [markdown]
# ## 5.6.4 Contiguous, or not
#
# In the order that gives the published sizes, the trunk tensors of a layer lie side by side. A copy of the trunk to a
# faster disk (5.19) relies on this. But the format does not promise it. So the engine checks it, and names each layer
# whose trunk is not contiguous, and the tensor that interrupts it.

# %% tags=["export"]
class Run(NamedTuple):
    "A layer's trunk: its first byte, its size, and in `broken` why it is not contiguous, '' if it is."
    file: str
    offset: int
    nbytes: int
    tensors: int
    broken: str


class Contiguity(NamedTuple):
    "The Run of each layer by number, the number of experts, and the (layer, expert) pairs that are not contiguous."
    layers: dict[int, Run]
    experts: int
    broken_experts: list[tuple[int, int]]

    @property
    def broken_layers(self) -> dict[int, str]:
        "The reason, for each layer that is not contiguous."
        return {layer: run.broken for layer, run in self.layers.items() if run.broken}


# %% [markdown]
# The trunk of a layer can be interrupted in two ways. One of its tensors may lie in another shard. Or a tensor of
# another layer or of an expert may lie between its tensors.

# %% tags=["export"]
def contiguity(index: TensorIndex) -> Contiguity:
    "The Contiguity of an index."
    columns = _columns(index)
    trunk, experts = _trunk_groups(index, columns), _expert_groups(index, columns)
    layers = {}
    for i, label in enumerate(trunk.label):
        file, offset = index.files[trunk.shard[i]], int(trunk.offset[i])
        why = "" if trunk.whole[i] else _breaker(index, columns, label, trunk.shard[i], offset)
        layers[int(label) - 1] = Run(file, offset, int(trunk.nbytes[i]), int(trunk.tensors[i]), why)
    broken = [(int(label >> NUMBER_BITS) - 1, int(label & NUMBER_MASK) - 1) for label in experts.label[~experts.whole]]
    return Contiguity(layers, len(experts.label), broken)


def _breaker(index: TensorIndex, columns: _Columns, label: int, shard: int, offset: int) -> str:
    "A sentence on the tensor that interrupts the trunk group `label`, which begins at byte `offset` of `shard`."
    mine = (columns.part == PARTS.index("trunk")) & (_layer_label(index) == label)
    elsewhere = np.flatnonzero(mine & (index.shard != shard))
    if len(elsewhere):
        return f"{index.name(elsewhere[0])} lies in {index.files[index.shard[elsewhere[0]]]}"
    foreign = np.flatnonzero(~mine & (index.shard == shard) & (index.offset > offset))
    first = foreign[np.argmin(index.offset[foreign])]
    return f"{index.name(first)} lies inside its run in {index.files[shard]}"


# %%
for label, index in ("released", k3), ("embedded", oracle):
    found = contiguity(index)
    print(f"{label}: {len(found.layers) - len(found.broken_layers)} of {len(found.layers)} layers, "
          f"{found.experts - len(found.broken_experts):,} of {found.experts:,} experts contiguous")

# %% [markdown]
# The check must fail for a file in another order. The next cell writes the header of layer 1 of the embedded model
# again, with the smallest tensors first, so that scales of experts lie between norms and projections. Such a file is
# valid, and every tensor in it could be read. But a copy of the trunk could not read it in one piece.

# %%
named = {oracle.name(row): oracle.extent(row) for row in oracle.in_file_order() if layer_of(oracle.name(row)) == 1}
by_size = TensorIndex()
head = header_bytes((name, e.dtype, e.shape) for name, e in sorted(named.items(), key=lambda item: item[1].nbytes))
by_size.add("by_size", len(head), len(head) + sum(e.nbytes for e in named.values()), head[8:])
by_size.complete()


def check_contiguous(index):
    "The gate: the trunk of every layer and the tensors of every expert lie side by side."
    found = contiguity(index)
    assert not found.broken_layers, "; ".join(f"layer {layer}: {why}" for layer, why in found.broken_layers.items())
    assert not found.broken_experts, f"{len(found.broken_experts)} of {found.experts} experts are not contiguous"
    print(f"{len(found.layers)} layers and {found.experts:,} experts are contiguous")


check_contiguous(k3)
check_contiguous(oracle)

# %% tags=["raises-exception"]
check_contiguous(by_size)

# %% [markdown]
# The figure is a map of the original shard. Neighbouring tensors differ in shade. A gap would be white, an overlap
# would be darker, and a tensor of the other kind would show as a stripe.

# %%
fig, ax = plt.subplots(figsize=(6.5, 2.2))
places = {"C0": [], "C1": []}
for name, extent in named.items():
    color, neighbour = ("C1", place_of(name).expert) if part_of(name) == "experts" else ("C0", len(places["C0"]))
    places[color].append((extent.offset / 1e3, extent.nbytes / 1e3))
    ax.broken_barh(places[color][-1:], (0, 1), facecolor=color, alpha=(0.95, 0.6)[neighbour % 2])
ax.axvspan(0, places["C0"][0][0], ymax=1 / 1.2, color="C5")
ax.text(0, 1.05, "header")
for color, what in ("C0", "trunk, one tensor a shade"), ("C1", "experts, six tensors a shade"):
    x = (places[color][0][0] + sum(places[color][-1])) / 2
    ax.text(x, 1.05, f"{len(places[color])} tensors", ha="center", color=color)
    ax.text(x, 0.5, what.replace(", ", ",\n"), ha="center", va="center", color="white")
ax.set(yticks=[], ylim=(0, 1.2), xlim=(0, None), xlabel="place in the file (kB)",
       title="Layer 1 of the embedded model: the trunk is contiguous, then come the experts")
plt.show()

# %% [markdown]
# ## 5.6.5 Summary
#
# - Headers of 76 MB describe 1.56 TB: the place and the size of every tensor are known without reading a weight.
# - Experts are 93% of the bytes on the disk. The trunk is 79% of the bytes that a token reads. So memory goes to the
#   trunk first.
# - In these files the trunk of a layer is contiguous. The format does not promise it, so the engine checks it.
#
# ## Exercises
#
# The answers are in [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. How many bytes would a token read if all experts were active? And if the trunk were in MXFP4, too?
# 2. The trunk of a layer lies in two files. From the first offset to the last end there happen to be as many bytes as
#    the tensors have. Which condition of [5.6.2] notices that the trunk is not contiguous?
#
# [5.6.2]: #5.6.2-Rows-by-part
