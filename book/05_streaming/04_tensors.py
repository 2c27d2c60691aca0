# %% [markdown]
# # 5.4 The one table of tensors
#
# The config has 30 numbers, and the text stack of the checkpoint has 497,052 tensors. Reading, planning, multiplying
# and copying all need the names of tensors, their shapes and their order. If each of these modules spelled them for
# itself, they could disagree. So one table leads from the config to the tensors. At the end of this chapter you can say
# of any tensor its name, its type and shape, the part of the model that it belongs to, and when the forward pass uses
# it. And you can refuse files that do not have exactly these tensors.
#
# > **Without it:** 497,052 names<!--claim names--> have to be known.
# >
# > **With it:** a table of 50 rows<!--claim rows--> gives all of them, in the order of use.
#
# Needs chapter [5.3] (the config). Runs in seconds. Makes `k3lib.tensors`.
#
# [5.3 A config that is accepted, or refused](03_config.ipynb) ·
# [contents](../README.md) ·
# [5.5 Headers, and half a million tensors in four columns](05_header.ipynb)
#
# [5.3]: 03_config.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "files")

# %% [markdown]
# No other module of the book spells the name of a tensor. In the table the sizes are written as letters. These letters
# are used in the code of this chapter and nowhere else.
#
# | size | meaning | in K3 |
# |---|---|---|
# | `H`, `V` | width of the residual stream, vocabulary | 7168, 163,840 |
# | `P`, `h`, `d`, `k` | KDA: heads times head width, heads, head width, convolution | 12,288, 96, 128, 4 |
# | `q`, `c`, `R` | MLA: query rank, latent rank, latent and extra dims | 1536, 512, 576 |
# | `Q`, `O` | MLA: query rows, output columns | 18,432, 12,288 |
# | `K`, `r` | MLA: key and value rows of all heads, of one head | 24,576, 256 |
# | `I` | width of the dense MLP | 33,792 |
# | `E`, `z`, `m`, `S` | experts, their latent, their width, width of the shared path | 896, 3584, 3072, 6144 |

# %% tags=["export"]
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from k3lib.config import Config
from k3lib.fileio import CheckpointError

# %%
import json
import math
import time
from collections import Counter
from dataclasses import replace

import matplotlib.pyplot as plt

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")
MODEL = ROOT / "fixtures/oracle13/model"
small, k3 = read_config(MODEL), read_config(ROOT / "fixtures/k3")


# %% [markdown]
# ## 5.4.1 The table
#
# One row of the table is one tensor of a layer: the short name that the equations of the layer use, its name in the
# checkpoint, its type, and its shape in the letters above. A model that does not fit in memory is read in the order of
# use. So **the rows of a part are in the order in which the forward pass uses them**, and other modules take the order
# from the table.

# %% tags=["export"]
class Row(NamedTuple):
    """One row of TABLE: a tensor that every layer of a kind has, or that the model has once.

    `short` is its name in a layer's equations. `name` is its name in the checkpoint without the layer's prefix, with
    '#' for an expert's number. `shape` holds symbols of `sizes`. `together` is a symbol too: its value is the
    number of neighbouring rows that must stay in one row block.
    """
    short: str
    name: str
    dtype: str
    shape: tuple[str, ...]
    together: str = "1"


def _rows(prefix: str, *lines: tuple[str, ...]) -> tuple[Row, ...]:
    "Rows of one part from (short name, dtype, shape[, name in the checkpoint if not `short`.weight[, together]])."
    return tuple(Row(short, prefix + (rest[0] if rest else f"{short}.weight"), dtype, tuple(shape.split()), *rest[1:])
                 for short, dtype, shape, *rest in lines)


# %% [markdown]
# Before each half of a layer, the residual stream is mixed over depth (3.2) and normed. Then one of the two kinds of
# attention follows. `A_log` has one entry for each head, but the released files pad it to the width of a head: its
# length `a` is 128 for 96 heads. MLA multiplies with the key rows and value rows of one head at a time. So the rows of
# a head in `kv_b_proj` must be read together.

# %% tags=["export"]
_ATTENTION_NORMS = _rows("", ("self_attention_res_norm", "BF16", "H"), ("self_attention_res_proj", "BF16", "1 H"),
                         ("input_layernorm", "BF16", "H"))
_FFN_NORMS = _rows("", ("mlp_res_norm", "BF16", "H"), ("mlp_res_proj", "BF16", "1 H"),
                   ("post_attention_layernorm", "BF16", "H"))
_KDA = _rows(
    "self_attn.",
    ("q_proj", "BF16", "P H"), ("q_conv1d", "F32", "P 1 k"),
    ("k_proj", "BF16", "P H"), ("k_conv1d", "F32", "P 1 k"),
    ("v_proj", "BF16", "P H"), ("v_conv1d", "F32", "P 1 k"),
    ("b_proj", "BF16", "h H"),
    ("f_a_proj", "BF16", "d H"), ("f_b_proj", "BF16", "P d"),
    ("A_log", "F32", "a", "A_log"), ("dt_bias", "F32", "P", "dt_bias"),
    ("g_proj", "BF16", "P H"), ("o_norm", "F32", "d"), ("o_proj", "BF16", "H P"),
)
_MLA = _rows(
    "self_attn.",
    ("q_a_proj", "BF16", "q H"), ("q_a_layernorm", "BF16", "q"), ("q_b_proj", "BF16", "Q q"),
    ("kv_a_proj_with_mqa", "BF16", "R H"), ("kv_a_layernorm", "BF16", "c"),
    ("kv_b_proj", "BF16", "K c", "kv_b_proj.weight", "r"),
    ("g_proj", "BF16", "O H"), ("o_proj", "BF16", "H O"),
)

# %% [markdown]
# The feed-forward half is one dense MLP in the first layer, and latent experts in all others. The router comes first,
# because only its result says which experts are needed. A matrix of an expert is two tensors: one has a packed byte for
# two weights, the other a scale byte for 32 weights. Before the layers comes the embedding, of which a token uses one
# row. After the layers come the last mix, the last norm and the head.

# %% tags=["export"]
_DENSE = _rows("mlp.", ("gate_proj", "BF16", "I H"), ("up_proj", "BF16", "I H"), ("down_proj", "BF16", "H I"))
_MOE = _rows(
    "block_sparse_moe.",
    ("gate", "BF16", "E H"), ("e_score_correction_bias", "F32", "E", "gate.e_score_correction_bias"),
    ("routed_expert_down_proj", "BF16", "z H"),
    ("shared_experts.gate_proj", "BF16", "S H"), ("shared_experts.up_proj", "BF16", "S H"),
    ("shared_experts.down_proj", "BF16", "H S"),
    ("routed_expert_norm", "BF16", "z"), ("routed_expert_up_proj", "BF16", "H z"),
)
_EXPERT = _rows(
    "block_sparse_moe.experts.#.",
    ("w1", "U8", "m z/2", "w1.weight_packed"), ("w1_scale", "U8", "m z/32", "w1.weight_scale"),
    ("w2", "U8", "z m/2", "w2.weight_packed"), ("w2_scale", "U8", "z m/32", "w2.weight_scale"),
    ("w3", "U8", "m z/2", "w3.weight_packed"), ("w3_scale", "U8", "m z/32", "w3.weight_scale"),
)
_FIRST = _rows("language_model.model.", ("embed_tokens", "BF16", "V H"))
_LAST = (*_rows("language_model.model.", ("output_attn_res_norm", "BF16", "H"), ("output_attn_res_proj", "BF16", "1 H"),
                ("norm", "BF16", "H")), *_rows("language_model.", ("lm_head", "BF16", "V H")))

TABLE = {
    "attention_norms": _ATTENTION_NORMS, "kda": _KDA, "mla": _MLA,
    "ffn_norms": _FFN_NORMS, "dense": _DENSE, "moe": _MOE, "expert": _EXPERT,
    "first": _FIRST, "last": _LAST,
}

# %%
for part, rows in TABLE.items():
    print(f"{part:16s}", *(f"{row.short} [{', '.join(row.shape)}]" for row in rows[:3]), "..." * (len(rows) > 3))
print("rows of the table:", sum(map(len, TABLE.values())))  # claim rows


# %% [markdown]
# The values of the letters follow from the config alone. `A_log` is padded to the width of a head only if the width is
# larger than the number of heads: with 48 heads of width 32 it has 48 entries.

# %% tags=["export"]
def sizes(config: Config) -> dict[str, int]:
    "The value of each symbol that TABLE's shapes are written in."
    c = config
    size = {
        "1": 1, "H": c.hidden_size, "V": c.vocab_size, "I": c.intermediate_size,
        "P": c.kda_num_heads * c.kda_head_dim, "h": c.kda_num_heads, "d": c.kda_head_dim, "k": c.kda_conv_kernel,
        "a": max(c.kda_head_dim, c.kda_num_heads),
        "q": c.q_lora_rank, "c": c.kv_lora_rank, "R": c.kv_lora_rank + c.qk_rope_head_dim,
        "Q": c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        "K": c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), "r": c.qk_nope_head_dim + c.v_head_dim,
        "O": c.num_attention_heads * c.v_head_dim,
        "E": c.num_experts, "z": c.routed_expert_hidden_size, "m": c.moe_intermediate_size,
        "S": c.moe_intermediate_size * c.num_shared_experts,
    }
    return size | {f"{s}/{n}": size[s] // n for s in "zm" for n in (2, 32)}


# %% [markdown]
# ## 5.4.2 Names
#
# The equations of a layer name a tensor by the layer, the part and the short name. A short name that is not in the
# table raises a `KeyError`. So a misspelled name fails when it is first used.

# %% tags=["export"]
TEXT_STACK = "language_model."
LAYER_PREFIX = "language_model.model.layers."
LAYER_PATTERN = LAYER_PREFIX + "#."
EXPERT_PATTERN = LAYER_PATTERN + "block_sparse_moe.experts.#."
EXPERT_TENSORS = {row.short: LAYER_PATTERN + row.name for row in _EXPERT}  # the pattern of w1, w1_scale, ...

ATTENTION_NORMS = tuple(row.short for row in _ATTENTION_NORMS)
FFN_NORMS = tuple(row.short for row in _FFN_NORMS)
EMBED, HEAD = _FIRST[0].name, _LAST[-1].name
FINAL = tuple(row.name for row in _LAST[:-1])  # the last mix and the last norm, in the order of use

_NAMES = {(part, row.short): row.name for part, rows in TABLE.items() for row in rows}
_NAMES |= {("norms", row.short): row.name for row in (*_ATTENTION_NORMS, *_FFN_NORMS)}


def tensor_name(L: int, part: str, short: str) -> str:
    """The checkpoint's name of a tensor of layer L.

    `part` is a key of TABLE, or "norms" for the norms and mixes before both halves. `short` is a short name of that
    part. Raises KeyError for any other.
    """
    return f"{TEXT_STACK}model.layers.{L}.{_NAMES[part, short]}"


def expert_name(L: int, expert: int, short: str) -> str:
    "The checkpoint's name of a routed expert's w1, w1_scale, w2, w2_scale, w3 or w3_scale. Raises KeyError for others."
    return tensor_name(L, "expert", short).replace("#", str(expert))


def layer_parts(config: Config, L: int) -> tuple[str, str]:
    "The attention part and the feed-forward part of layer L: 'kda' or 'mla', 'dense' or 'moe'."
    return config.layer_kind(L), "dense" if config.is_dense(L) else "moe"


# %%
print(tensor_name(3, "mla", "kv_b_proj"), expert_name(92, 895, "w1_scale"), EMBED, sep="\n")
try:
    tensor_name(3, "mla", "kv_proj")
except KeyError as error:
    print("KeyError", error)

# %% [markdown]
# The other direction leads from a name in the checkpoint to its place in the model. Of the 497,220 names of the
# release, 494,592 belong to experts, and differ only in a few endings and two numbers: the layer and the expert. If
# every number is replaced by `#`, only 59 different patterns remain. The index of the next chapter stores patterns. The
# functions below find out from a pattern where a tensor belongs.

# %% tags=["export"]
_NUMBER = re.compile(r"\.(0|[1-9][0-9]{0,5})(?=\.|\Z)")


def split_name(name: str) -> tuple[str, int, int]:
    """(pattern, first, second): the name with '#' for its first two numbers, and the numbers, -1 for none.

    A number stands between dots, or after the last dot, and is one of 0..999999 without leading zeros, so that
    join_name returns the name. A name that has a '#' of its own is kept whole, with one more '#' in front.
    """
    if "#" in name:
        return "#" + name, -1, -1
    texts = _NUMBER.split(name, 2)  # text, number, text, number, text
    if len(texts) == 5:
        return f"{texts[0]}.#{texts[2]}.#{texts[4]}", int(texts[1]), int(texts[3])
    return (f"{texts[0]}.#{texts[2]}", int(texts[1]), -1) if len(texts) == 3 else (name, -1, -1)


def join_name(pattern: str, first: int, second: int) -> str:
    "The name from what split_name returned."
    if first < 0:
        return pattern.removeprefix("#")
    name = pattern.replace("#", str(first), 1)
    return name if second < 0 else name.replace("#", str(second), 1)


# %%
for name in expert_name(92, 895, "w1"), "lm_head.weight", "a.007.b", "a.#.5":
    assert join_name(*split_name(name)) == name
    print(*split_name(name))


# %% [markdown]
# The place of a tensor and its part follow from the pattern. A report counts the bytes of the trunk, of the experts,
# and of all other tensors. The census of 5.6 divides the other tensors further.

# %% tags=["export"]
class Place(NamedTuple):
    "A tensor's layer and routed expert, -1 for none, and its short name: the whole name if it is not in TABLE."
    layer: int
    expert: int
    short: str


_SHORT = {("" if part in ("first", "last") else LAYER_PATTERN) + row.name: row.short
          for part, rows in TABLE.items() for row in rows}


def place_of(name: str) -> Place:
    "The Place of a tensor."
    pattern, layer, expert = split_name(name)
    return Place(layer, expert, _SHORT[pattern]) if pattern in _SHORT else Place(-1, -1, name)


def layer_of(name: str) -> int | None:
    "The layer that a tensor belongs to, or None if it belongs to no layer."
    pattern, layer, _ = split_name(name)
    return layer if pattern.startswith(LAYER_PATTERN) else None


# %% tags=["export"]
_PREFIXES = {
    EXPERT_PATTERN: "experts", LAYER_PATTERN: "trunk",
    EMBED.removesuffix("weight"): "embed", HEAD.removesuffix("weight"): "lm_head",
    **{name.removesuffix("weight"): "globals" for name in FINAL},
    "mm_projector.": "mm_projector", "vision_tower.": "vision_tower", "": "other",
}
PARTS = tuple(dict.fromkeys(_PREFIXES.values()))


def census_part(pattern: str) -> str:
    "The part of the model, one of PARTS, that the tensors of a pattern from split_name belong to."
    return next(part for prefix, part in _PREFIXES.items() if pattern.startswith(prefix))


def part_of(name: str) -> str:
    "The part under which a report counts a tensor's bytes: 'trunk', 'experts' or 'other'."
    part = census_part(split_name(name)[0])
    return part if part in ("experts", "trunk") else "other"


# %% [markdown]
# ## 5.4.3 Every tensor that a config implies
#
# The table, repeated for each layer of the config, is the list of all tensors that a checkpoint must have. If a number
# that decides a name or a shape is wrong, the list is wrong, too. So if the list agrees with the files, these numbers
# are right.

# %% tags=["export"]
class Tensor(NamedTuple):
    "A tensor as a checkpoint must hold it."
    name: str
    dtype: str
    shape: tuple[int, ...]


def _layer_rows(config: Config, L: int) -> Iterator[Row]:
    "The rows of layer L in the order of the forward pass; the routed experts' are not among them."
    attention, ffn = layer_parts(config, L)
    for part in ("attention_norms", attention, "ffn_norms", ffn):
        yield from TABLE[part]


def _shape(row: Row, size: dict[str, int]) -> tuple[int, ...]:
    return tuple(size[symbol] for symbol in row.shape)


# %% tags=["export"]
def layer_tensors(config: Config, L: int, experts: Iterable[int] | None = None) -> Iterator[Tensor]:
    "Tensors of layer L in the order of the forward pass, then those of its routed experts: of all, or of `experts`."
    size, prefix = sizes(config), LAYER_PATTERN.replace("#", str(L))
    for row in _layer_rows(config, L):
        yield Tensor(prefix + row.name, row.dtype, _shape(row, size))
    if not config.is_dense(L):
        of_expert = [(prefix + row.name, row.dtype, _shape(row, size)) for row in TABLE["expert"]]
        for e in range(config.num_experts) if experts is None else experts:
            for name, dtype, shape in of_expert:
                yield Tensor(name.replace("#", str(e)), dtype, shape)


def global_tensors(config: Config) -> list[Tensor]:
    "The five tensors outside the layers: the embedding, the last mix (two tensors), the last norm, the head."
    size = sizes(config)
    return [Tensor(row.name, row.dtype, _shape(row, size)) for row in (*TABLE["first"], *TABLE["last"])]


def text_tensors(config: Config) -> Iterator[Tensor]:
    "Every tensor of the text stack: the embedding, layer by layer, the last mix, the last norm, the head."
    embedding, *last = global_tensors(config)
    yield embedding
    for L in range(config.num_hidden_layers):
        yield from layer_tensors(config, L)
    yield from last


# %% [markdown]
# The check uses the embedded model, which a generator wrote that shares no code with this book. The list must agree
# with the headers of its files in every name, dtype and shape. The files have four more tensors, which belong to the
# image side.

# %%
def headers(folder):
    "{tensor name: (dtype, shape)} from the headers of a folder's shards."
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as f:
            found |= json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in found.items() if name != "__metadata__"}


stored = headers(MODEL)
implied = {name: (dtype, shape) for name, dtype, shape in text_tensors(small)}
print(f"{len(implied)} implied, {len(stored)} stored; stored only:")
print(*sorted(stored.keys() - implied.keys()), sep="\n")
assert all(stored.get(name) == what for name, what in implied.items())
assert {census_part(split_name(name)[0]) for name in stored.keys() - implied.keys()} == {"mm_projector", "vision_tower"}

# %% [markdown]
# The second check uses the released numbers. The released index has 497,220 tensors with 1,560,860,324,864 bytes. Of
# these, 168 tensors belong to the projector and the vision tower, which this engine does not run. The bytes of the
# others must agree exactly.

# %%
WIDTH = {"BF16": 2, "F32": 4, "U8": 1}
bytes_of = {name: WIDTH[dtype] * math.prod(shape) for name, dtype, shape in text_tensors(k3)}
print(f"{len(bytes_of):,} tensors, {sum(bytes_of.values()):,} bytes")
assert len(bytes_of) == 497_220 - 168 == 497_052  # claim names
assert sum(bytes_of.values()) == 1_560_860_324_864 - 92_289_024 - 802_428_928

# %% [markdown]
# The comparison also refuses the two mistakes of [5.3.7]. Layer lists that are counted from zero, or replaced by the
# rule of four, imply other tensors than the embedded model has. (Its last two layers are both MLA, like those of K3.)
#
# [5.3.7]: 03_config.ipynb#5.3.7-Two-traps-of-the-layer-lists

# %%
everyone = range(small.num_hidden_layers)


def check_stored(label, mla):
    "The gate: with these MLA layers, every tensor that the config implies is stored."
    mla = frozenset(mla) & {*everyone}
    read = replace(small, mla_layers=mla, kda_layers=frozenset(everyone) - mla)
    absent = sum(stored.get(name) != (dtype, shape) for name, dtype, shape in text_tensors(read))
    assert not absent, f"{label}: {absent} of {len(implied)} tensors are not stored like this"
    print(f"{label}: all tensors as stored")


check_stored("the lists", small.mla_layers)

# %% tags=["raises-exception"]
check_stored("counted from 0", {L + 1 for L in small.mla_layers})

# %% tags=["raises-exception"]
check_stored("every fourth", {L for L in everyone if L % 4 == 3})


# %% [markdown]
# ## 5.4.4 The order of the forward pass
#
# Streamed tensors are read in this order: the tensors of the layers, the last mix, the last norm, the head. The routed
# experts are not in this order, because only the router's result says which of them a token needs.

# %% tags=["export"]
def forward_order(config: Config) -> Iterator[str]:
    "Names of every tensor but the embedding and the routed experts, in the order in which one forward pass uses them."
    for L in range(config.num_hidden_layers):
        yield from (LAYER_PATTERN.replace("#", str(L)) + row.name for row in _layer_rows(config, L))
    yield from (row.name for row in TABLE["last"])


def row_multiples(config: Config) -> dict[str, int]:
    "{name: rows that must stay in one row block} of the matrices that have such rows."
    size = sizes(config)
    return {LAYER_PATTERN.replace("#", str(L)) + row.name: size[row.together]
            for L in range(config.num_hidden_layers) for row in _layer_rows(config, L) if row.together != "1"}


# %%
order = list(forward_order(small))
print(len(order), "tensors a forward pass;", "layer 3 is", small.layer_kind(3))
for name in order:
    if layer_of(name) == 3:
        print("  ", name.removeprefix("language_model.model."), list(implied[name][1]))

# %% [markdown]
# Every tensor of the text stack is in this order exactly once, with two exceptions: the tensors of routed experts, and
# the embedding, of which a forward pass reads one row for each token.

# %%
others = implied.keys() - {*order} - {EMBED}
assert len({*order}) == len(order) and {*order} <= implied.keys()
assert all(part_of(name) == "experts" for name in others)
print(len(implied), "=", len(order), "in the order +", len(others), "of experts + 1 embedding")


# %% [markdown]
# The streaming chapters need two more facts about a tensor. Is it a matrix, which can be read in row blocks? Vectors,
# convolutions and projections to one row always stay in memory; they are 53 MB of 108.8 GB. And is it a router, which
# is read before all other tensors of its half of the layer?

# %% tags=["export"]
class HasShape(Protocol):
    "Anything with a tensor's shape, as header.Extent."

    @property
    def shape(self) -> tuple[int, ...]: ...


def is_matrix(name: str, extent: HasShape) -> bool:
    """True if the tensor can be read in row blocks: it has two axes and is not a [1, H] projection of the residual mix.

    A projection that has one row in a small model, such as `b_proj` of a single head, is a matrix.
    """
    return len(extent.shape) == 2 and not name.endswith("_res_proj.weight")


def is_router(name: str) -> bool:
    "True for the matrix of a router: the experts to read are known only from its product."
    return name.endswith(".gate.weight")


# %% [markdown]
# ## 5.4.5 The files against the list
#
# Before a run, the files are compared with the list. To spell half a million names takes a second. So the comparison
# works with *families*: all tensors that differ only in layer and expert are one family, and the index checks a whole
# family at once.
#
# Two differences are allowed. `A_log` may have any padding after its heads, and no code reads the padding. And a
# checkpoint may have the layers that predict further tokens, if its config says how many they are ([5.3.4]). Their
# tensors are not checked. Without that number, an additional layer is refused, because the config may belong to another
# model.
#
# [5.3.4]: 03_config.ipynb#5.3.4-Layer-lists-count-from-one

# %% tags=["export"]
class Family(NamedTuple):
    "Tensors of one pattern, dtype and shape: each pair of `layers` and `experts`, [-1] for no such number."
    pattern: str
    dtype: str
    shape: tuple[int, ...]
    layers: Sequence[int]
    experts: Sequence[int]


def families(config: Config) -> Iterator[Family]:
    "The tensors of text_tensors as families: each tensor belongs to exactly one."
    size, layers = sizes(config), dict[Row, list[int]]()
    for L in range(config.num_hidden_layers):
        for row in _layer_rows(config, L):
            layers.setdefault(row, []).append(L)
    for row, where in layers.items():
        yield Family(LAYER_PATTERN + row.name, row.dtype, _shape(row, size), where, [-1])
    if with_experts := [L for L in range(config.num_hidden_layers) if not config.is_dense(L)]:
        for row in TABLE["expert"]:
            yield Family(LAYER_PATTERN + row.name, row.dtype, _shape(row, size), with_experts,
                         range(config.num_experts))
    yield from (Family(*tensor, [-1], [-1]) for tensor in global_tensors(config))


def used_entries(config: Config, name: str) -> int | None:
    "How many entries of `A_log` are used, from the first on: its heads. None for tensors without padding."
    return config.kda_num_heads if name.endswith(".A_log") else None


def shape_fits(config: Config, name: str, expected: Sequence[int], found: Sequence[int]) -> bool:
    "True if a tensor `name` may have the shape `found`: it equals `expected`, or is that of a vector with padding."
    used = used_entries(config, name)
    return tuple(found) == tuple(expected) if used is None else len(found) == 1 and found[0] >= used


# %%
folded = list(families(k3))
unfolded = Counter(join_name(f.pattern, L, e) for f in folded for L in f.layers for e in f.experts)
assert unfolded == Counter(bytes_of.keys())
print(f"{len(folded)} families unfold to {len(unfolded):,} names; of routed experts are")
for f in folded:
    if len(f.experts) > 1:
        short = f.pattern.removeprefix(EXPERT_PATTERN)
        print(f"  {short:18} {f.dtype} {f.shape}: layers {min(f.layers)}..{max(f.layers)}")


# %% [markdown]
# For this comparison a checkpoint must answer two questions. How many tensors have a prefix, in all layers or in some?
# Which types and shapes do the tensors of a family have?

# %% tags=["export"]
class TensorList(Protocol):
    "What check_tensors needs of a checkpoint. Class Checkpoint (5.7) provides it."

    path: Path

    def __contains__(self, name: str) -> bool: ...
    def extent(self, name: str) -> Any: ...
    def names(self) -> Iterator[str]: ...
    def count_of(self, prefix: str, layers: range | None = None) -> int: ...
    def kinds_of(self, pattern: str, layers: Sequence[int], experts: Sequence[int]) -> set: ...


def more_layers(config: Config) -> range:
    "The numbers of the layers after the last, which predict further tokens and which greedy decoding does not use."
    return range(config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers)


def _families_agree(config: Config, checkpoint: TensorList) -> bool:
    "Are the text stack's tensors in `checkpoint` exactly those the config implies?"
    lines = list(families(config))
    implied = sum(len(f.layers) * len(f.experts) for f in lines)
    more = checkpoint.count_of(LAYER_PREFIX, more_layers(config))
    return checkpoint.count_of(TEXT_STACK) == implied + more and all(
        kind is not None and kind[0] == f.dtype and shape_fits(config, f.pattern, f.shape, kind[1])
        for f in lines for kind in checkpoint.kinds_of(f.pattern, f.layers, f.experts))


# %% [markdown]
# `check_tensors` spells names only if the families do not agree. Then it finds the first tensor that is missing, has
# another type or shape, or is not implied by the config.

# %% tags=["export"]
def check_tensors(config: Config, checkpoint: TensorList) -> None:
    """Raise CheckpointError unless the text stack's tensors in `checkpoint` are those the config implies and no others.

    Tensors of more_layers(config) are not looked at. The message names the file, the tensor that is missing, different
    or not implied, what was found and what was expected.
    """
    if _families_agree(config, checkpoint):
        return
    missing = []
    for name, dtype, shape in text_tensors(config):
        if name not in checkpoint:
            missing.append(name)
            continue
        found = checkpoint.extent(name)
        if found.dtype != dtype or not shape_fits(config, name, shape, found.shape):
            raise CheckpointError(f"{found.file}: {name} is {found.dtype} {list(found.shape)}, "
                                  f"the config implies {dtype} {list(shape)}")
    if missing:
        raise CheckpointError(f"{checkpoint.path}: {len(missing)} tensors are missing: "
                              f"{', '.join(missing[:4])}{', ...' * (len(missing) > 4)}")
    known, more = {name for name, _, _ in text_tensors(config)}, more_layers(config)
    extra = next(name for name in checkpoint.names()
                 if name.startswith(TEXT_STACK) and name not in known and layer_of(name) not in more)
    raise CheckpointError(f"{checkpoint.extent(extra).file}: {extra} found, expected no tensor of that name: "
                          "the config does not imply it")


# %% [markdown]
# ## 5.4.6 What the list weighs
#
# More than nine tenths of the bytes are routed experts. A token needs only 16 of the 896 experts of a layer. Therefore
# the chapters that follow stream the weights.

# %%
def label(name):
    "What a tensor is, for the picture."
    layer, expert, short = place_of(name)
    if layer < 0:
        return "embedding, lm_head" if name in (EMBED, HEAD) else "norms, residual mixing"
    if expert >= 0:
        return "routed experts"
    attention, ffn = layer_parts(k3, layer)
    if short in ATTENTION_NORMS + FFN_NORMS:
        return "norms, residual mixing"
    if any(row.short == short for row in TABLE[attention]):
        return f"attention, {attention.upper()}"
    return "dense MLP, layer 0" if ffn == "dense" else "shared experts" if "shared" in short else "router and latent"


parts = Counter()
for name, size in bytes_of.items():
    parts[label(name)] += size
for what, size in parts.most_common():
    print(f"{what:24} {size / 1e9:12,.3f} GB")
trunk = sum(size for name, size in bytes_of.items() if part_of(name) == "trunk")
print(f"{'trunk (layers, no routed)':24} {trunk:,} bytes")
assert trunk == 108_811_877_376 and parts["routed experts"] == 1_446_456_066_048

# %%
labels, values = zip(*parts.most_common()[::-1])
fig, ax = plt.subplots()
ax.plot([v / 1e9 for v in values], labels, "o")
ax.set_xscale("log")
ax.grid(axis="x", alpha=0.4)
ax.set_xlabel("size in the checkpoint (GB, logarithmic)")
ax.set_title(f"Routed experts are {parts['routed experts'] / sum(values):.1%} of the text stack's "
             f"{sum(values) / 1e12:.2f} TB")
plt.show()

# %% tags=["nbval-ignore-output"]
start = time.perf_counter()
count = sum(1 for _ in text_tensors(k3))
print(f"{count:,} tensors named in {time.perf_counter() - start:.2f} s")
start = time.perf_counter()
folded = [*families(k3)]
print(f"{len(folded)} families found in {1e3 * (time.perf_counter() - start):.0f} ms")

# %% [markdown]
# ## 5.4.7 Summary
#
# - One table has the short name of each tensor, its name in the checkpoint, its dtype, its shape in letters, and the
#   rows that must stay together. Its rows are in the order of use.
# - The numbers of the config turn the table into the exact list of a checkpoint's tensors, with 1,559,965,606,912
#   bytes.
# - Layer, part and short name give the name in the checkpoint, and this name gives them back.
#
# ## Exercises
#
# Answers to 1 and 3: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Which integers of K3's config can change without a change of `text_tensors`? Find them by trying each one.
# 2. `shape_fits` accepts any padding of `A_log`. Which check could tell padding from a file that has one entry for each
#    channel?
# 3. Exchange two rows of `_KDA` in the table. Which part of the engine notices it, and how?
