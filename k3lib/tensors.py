"""5.4 The one table of tensors

Made from book/05_streaming/04_tensors.py: edit that, then run `make export`.
"""

from k3lib.kda import KDA_ORDER
from k3lib.mla import MLA_ORDER
from k3lib.moe import DENSE_ORDER, MOE_ORDER
from k3lib.fileio import CheckpointError


EMBED, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"


FINAL = tuple(f"language_model.model.{n}.weight" for n in ("output_attn_res_norm", "output_attn_res_proj", "norm"))


WITHOUT_WEIGHT_SUFFIX = {"A_log", "dt_bias", "gate.e_score_correction_bias"}  # tensors whose name does not end in `.weight`


PART_ORDER = {"kda": KDA_ORDER, "mla": MLA_ORDER, "dense": DENSE_ORDER, "moe": MOE_ORDER}


PART_PREFIX = {"kda": "self_attn.", "mla": "self_attn.", "dense": "mlp.", "moe": "block_sparse_moe."}


NORMS = ("self_attention_res_norm", "self_attention_res_proj", "input_layernorm",
         "mlp_res_norm", "mlp_res_proj", "post_attention_layernorm")


def tensor_name(L, part, short):
    "The checkpoint's name of a layer's tensor: part 'kda', 'mla', 'dense', 'moe' or 'norms', `short` as in that part's ORDER."
    if short == "e_score_correction_bias":
        short = "gate.e_score_correction_bias"
    suffix = "" if short in WITHOUT_WEIGHT_SUFFIX else ".weight"
    return f"language_model.model.layers.{L}.{PART_PREFIX.get(part, '')}{short}{suffix}"


def layer_parts(config, L):
    "The attention part and the feed-forward part of layer L."
    return config.layer_kind(L), "dense" if config.is_dense(L) else "moe"


def forward_order(config):
    "Names of every tensor but the embedding and the routed experts, in the order one pass over the model takes them."
    for L in range(config.num_hidden_layers):
        attention, ffn = layer_parts(config, L)
        for part, shorts in ((attention, PART_ORDER[attention]), (ffn, PART_ORDER[ffn])):
            half = NORMS[:3] if part == attention else NORMS[3:]
            yield from (tensor_name(L, "norms", short) for short in half)
            yield from (tensor_name(L, part, short) for short in shorts)
    yield from FINAL
    yield HEAD


def row_multiples(config):
    "{name: rows that must arrive together}: a head's key and value rows of kv_b_proj."
    rows = config.qk_nope_head_dim + config.v_head_dim
    return {tensor_name(L, "mla", "kv_b_proj"): rows for L in sorted(config.mla_layers)}


EXPERT_NAME = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}.weight_{}"


def is_matrix(name, extent):
    """True for what can arrive row by row. Vectors, [1, H] residual projections and convolutions (53 MB of 108.8 GB) always stay
    in memory; a projection to one row, as `b_proj` of a single head, is a matrix."""
    return len(extent.shape) == 2 and not name.endswith("_res_proj.weight")


def is_router(name):
    "True for a router: until it has spoken no expert can be asked for."
    return name.endswith(".gate.weight")


TEXT_STACK = "language_model."


def check_tensors(config, checkpoint):
    "Raise CheckpointError unless every tensor the config implies is there with its dtype and shape, and no other of the text stack."
    families = [*config.families()]
    implied = sum(len(layers) * len(experts) for *_, layers, experts in families)
    if checkpoint.count_of(TEXT_STACK) == implied and all(
            kind is not None and kind[0] == dtype and config.shape_fits(pattern, shape, kind[1])
            for pattern, dtype, shape, layers, experts in families for kind in checkpoint.kinds_of(pattern, layers, experts)):
        return
    missing = []
    for name, dtype, shape in config.tensors():
        if name not in checkpoint:
            missing.append(name)
            continue
        found = checkpoint.extent(name)
        if found.dtype != dtype or not config.shape_fits(name, shape, found.shape):
            raise CheckpointError(f"{found.file}: {name} is {found.dtype} {list(found.shape)}, the config implies {dtype} {list(shape)}")
    if missing:
        raise CheckpointError(f"{checkpoint.path}: {len(missing)} tensors are missing: {', '.join(missing[:4])}{', ...' * (len(missing) > 4)}")
    known = {name for name, _, _ in config.tensors()}
    extra = next(name for name in checkpoint.names() if name.startswith(TEXT_STACK) and name not in known)
    raise CheckpointError(f"{checkpoint.extent(extra).file}: {extra} is there, the config implies no such tensor: its layers or experts are fewer")


def part_of(name):
    "Which part of the account a tensor of the walk belongs to."
    return "trunk" if ".layers." in name else "other"


__all__ = [
    "EMBED", "HEAD", "FINAL", "WITHOUT_WEIGHT_SUFFIX", "PART_ORDER", "PART_PREFIX", "NORMS", "tensor_name",
    "layer_parts", "forward_order", "row_multiples", "EXPERT_NAME", "is_matrix", "is_router", "TEXT_STACK",
    "check_tensors", "part_of",
]
