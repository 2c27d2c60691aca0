"""5.4 The one table of tensors

Made from book/05_streaming/04_tensors.py: edit that, then run `make export`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from k3lib.config import Config
from k3lib.fileio import CheckpointError


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


__all__ = [
    "Row", "TABLE", "sizes", "TEXT_STACK", "LAYER_PREFIX", "LAYER_PATTERN", "EXPERT_PATTERN", "EXPERT_TENSORS",
    "ATTENTION_NORMS", "FFN_NORMS", "EMBED", "HEAD", "FINAL", "tensor_name", "expert_name", "layer_parts",
    "split_name", "join_name", "Place", "place_of", "layer_of", "PARTS", "census_part", "part_of", "Tensor",
    "layer_tensors", "global_tensors", "text_tensors", "forward_order", "row_multiples", "HasShape", "is_matrix",
    "is_router", "Family", "families", "used_entries", "shape_fits", "TensorList", "more_layers", "check_tensors",
]
