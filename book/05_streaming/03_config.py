# %% [markdown]
# # 5.3 A config that is believed, or refused
#
# Everything this engine knows about the shape of Kimi K3 it reads from one small file, `config.json`. After this chapter you can
# turn that file into the exact list of the checkpoint's 497,052 text tensors, or say in one line why you will not.
#
# [5.2 Files read whole or refused, written whole or not at all](02_fileio.ipynb) · [contents](../README.md) · [5.4 The one table of tensors](04_tensors.ipynb)

# %%
import math
import shutil
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% [markdown]
# A wrong byte in a weight damages one number. A wrong number in the config damages all of them, and still prints fluent text: an
# epsilon ten times too small, one layer of the wrong kind, another activation. So there is no default here. A value is read from
# the file or the file is refused.
#
# | symbol | meaning | in K3 | name in code |
# |---|---|---|---|
# | $L$ | layer, counted from 0 | 0..92 | `L` |
# | $H$ | width of the residual stream | 7168 | `hidden_size` |
# | $V$ | vocabulary | 163,840 | `vocab_size` |
# | $P$ | KDA heads times head width | 96 x 128 | `kda_num_heads * kda_head_dim` |
# | $A$ | MLA heads | 96 | `num_attention_heads` |
# | $E$, $k$ | routed experts in a layer, chosen for a token | 896, 16 | `num_experts`, `num_experts_per_token` |
# | $m$, $z$ | width of an expert, of the latent it works in | 3072, 3584 | `moe_intermediate_size`, `routed_expert_hidden_size` |
#
# ## 5.3.1 JSON, read strictly
#
# Python's reader lets a key appear twice and keeps the last one; it will also load a file of any size. Neither is wanted. The strict reader
# of headers (5.5.2) serves here too, behind a size that is judged before the first byte is read. The released file has some thousand bytes;
# 4 MB would hold a list of exceptions with every trunk tensor's name in it thirty times over, and even hostile text of that size stays under 100 MB as Python's objects.

# %% tags=["export"]
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from k3lib.fileio import json_object, small_file


# %% tags=["export"]
class ConfigError(ValueError):
    "A config.json that cannot be read, lacks a field, or asks for something this engine does not do."


def shown(value):
    "A value as one short line for an error message."
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


# %% tags=["export"]
MAX_CONFIG_BYTES = 4_000_000


def load_json(path):
    "The JSON object in file `path` as a dict. ConfigError for what is above 4 MB, nests deep or has a key twice."
    return json_object(small_file(path, MAX_CONFIG_BYTES, ConfigError), path, ConfigError)


# %% [markdown]
# By hand: a two-line object with a key given twice, and lists a hundred deep. The plain reader shrugs.

# %%
scratch = Path(tempfile.mkdtemp())
twice, deep = '{"hidden_size": 7168,\n "hidden_size": 128}', '{"hidden_size": ' + "[" * 100 + "]" * 100 + "}"
print("json.loads:", json.loads(twice))
for text in twice, deep:
    (scratch / "config.json").write_text(text)
    try:
        load_json(scratch / "config.json")
        raise AssertionError("believed")
    except ConfigError as e:
        print("load_json: ", e.args[0].split("config.json")[1].lstrip(": "))


# %% [markdown]
# ## 5.3.2 Faults are collected, then told together
#
# Whoever repairs a config should not have to run the engine once per missing field. A `Reading` walks dotted paths through the
# tree and writes down two lists: what was missing, and what was wrong with what was there.

# %% tags=["export"]
@dataclass
class Reading:
    "A config tree being read: `missing` fields and `wrong` values are collected, so that one message can tell all."

    tree: dict
    missing: list = field(default_factory=list)
    wrong: list = field(default_factory=list)

    def get(self, path):
        "The value at a dotted path, or None where it or an object above it is absent."
        value = self.tree
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def need(self, path):
        "Like get, and notes what was missing: the field, or the whole object it should stand in."
        value, keys = self.get(path), path.split(".")
        if value is None:
            absent = next(p for i in range(len(keys)) if self.get(p := ".".join(keys[: i + 1])) is None)
            above = absent.rpartition(".")[0]
            if above and not isinstance(self.get(above), dict):
                self.expect(above, self.get(above), "an object")
            else:
                self.missing.append(absent)
        return value

    def expect(self, path, found, expected):
        "Notes a fault at `path`: what was found, what was expected."
        self.wrong.append(f"{path} is {shown(found)}, expected {expected}")

    def whole(self, path, low, high):
        "The integer at `path`, within low..high; true, 4.0 and \"4\" are not integers."
        value = self.need(path)
        if value is None or type(value) is int and low <= value <= high:
            return value
        return self.expect(path, value, f"an integer in {low}..{high:,}")

    def real(self, path, low, high):
        "The finite number at `path` as a float, within low..high."
        value = self.need(path)
        if value is None or type(value) in (int, float) and low <= value <= high:
            return None if value is None else float(value)
        return self.expect(path, value, f"a number in {low:g}..{high:g}")

    def fixed(self, path, expected):
        "Notes a fault unless the value at `path`, if there is one, is `expected` in value and type."
        found = self.get(path)
        if found is not None and (type(found) is not type(expected) or found != expected):
            self.expect(path, found, f"{shown(expected)}, the only value implemented")

    def either(self, name, needed=False):
        "Path and value of a field that may stand in text_config, at the top, or in both if they agree."
        inner, outer = self.get(f"text_config.{name}"), self.get(name)
        if inner is not None and outer is not None and inner != outer:
            self.expect(name, outer, f"{shown(inner)} as in text_config.{name}")
        if inner is None and outer is not None:
            return name, outer
        return f"text_config.{name}", self.need(f"text_config.{name}") if needed else inner


# %% [markdown]
# Three faults in a toy tree. `True` is an integer to Python's `isinstance`, and 4.0 equals 4; neither is what a config may say for a
# count. JSON's `NaN` is read as a number and falls to the range test, because no comparison with it is true.

# %%
toy = Reading({"text_config": {"hidden_size": True, "rms_norm_eps": float("nan"), "num_experts": 896}})
print(toy.whole("text_config.num_experts", 1, 2**16))
toy.whole("text_config.hidden_size", 1, 2**17)
toy.real("text_config.rms_norm_eps", 1e-12, 1.0)
toy.whole("text_config.linear_attn_config.num_heads", 1, 2**14)
print("missing:", *toy.missing)
print("wrong:  ", *toy.wrong, sep="\n  ")

# %% [markdown]
# ## 5.3.3 What is asked of the file
#
# Four tables say it all. Integers and reals come with the range in which they are believed: the upper ends are ten or more
# times K3's own numbers, and an absurd size is refused before anything is allocated for it. `FIXED` holds the choices this book derives:
# SiTU, sigmoid routing without groups, no rotary embedding. Any other value is another model.

# %% tags=["export"]
INTEGERS = {
    "vocab_size": ("vocab_size", 1, 2**24),
    "hidden_size": ("hidden_size", 1, 2**17),
    "num_hidden_layers": ("num_hidden_layers", 1, 2**12),
    "attn_res_block_size": ("attn_res_block_size", 1, 2**12),
    "first_k_dense_replace": ("first_k_dense_replace", 0, 2**12),
    "intermediate_size": ("intermediate_size", 1, 2**20),
    "num_attention_heads": ("num_attention_heads", 1, 2**14),
    "q_lora_rank": ("q_lora_rank", 1, 2**17),
    "kv_lora_rank": ("kv_lora_rank", 1, 2**17),
    "qk_nope_head_dim": ("qk_nope_head_dim", 1, 2**12),
    "qk_rope_head_dim": ("qk_rope_head_dim", 1, 2**12),
    "v_head_dim": ("v_head_dim", 1, 2**12),
    "num_experts": ("num_experts", 1, 2**16),
    "num_experts_per_token": ("num_experts_per_token", 1, 2**10),
    "num_shared_experts": ("num_shared_experts", 1, 2**10),
    "moe_intermediate_size": ("moe_intermediate_size", 1, 2**17),
    "routed_expert_hidden_size": ("routed_expert_hidden_size", 1, 2**17),
    "linear_attn_config.num_heads": ("kda_num_heads", 1, 2**14),
    "linear_attn_config.head_dim": ("kda_head_dim", 1, 2**12),
    "linear_attn_config.short_conv_kernel_size": ("kda_conv_kernel", 2, 64),
}


REALS = {
    "rms_norm_eps": ("rms_norm_eps", 1e-12, 1.0),
    "routed_scaling_factor": ("routed_scaling_factor", 1e-6, 1e6),
    "activation_situ_beta": ("activation_situ_beta", 1e-6, 1e6),
    "activation_situ_linear_beta": ("activation_situ_linear_beta", 1e-6, 1e6),
    "linear_attn_config.gate_lower_bound": ("kda_gate_lower_bound", -1e3, -1e-6),
}


FIXED = {
    "hidden_act": "situ",
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config.use_full_rank_gate": True,
}


FIXED_IF_GIVEN = {
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
}


# %% [markdown]
# `num_nextn_predict_layers`, `moe_layer_freq` and `topk_method` may be absent, which means what the only supported value means. A null
# counts as absent everywhere. Then come the rules between fields: MXFP4 shares one scale among 32 weights of a row, so the two widths that
# experts multiply over must be multiples of 32.

# %% tags=["export"]
def check_widths(r, n):
    "Notes faults between fields: `n` maps the names of Config to the values read, None where one was refused."
    text = "text_config."
    for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if n[name] is not None and n[name] % 32:
            r.expect(text + name, n[name], "a multiple of 32, the weights that share one MXFP4 scale")
    for name, of in (("num_experts_per_token", "num_experts"), ("first_k_dense_replace", "num_hidden_layers")):
        if None not in (n[name], n[of]) and n[name] > n[of]:
            r.expect(text + name, n[name], f"at most {of} = {n[of]}")
    heads, shared = n["num_attention_heads"], r.get(text + "num_key_value_heads")
    if None not in (heads, shared) and shared != heads:
        r.expect(text + "num_key_value_heads", shared, f"num_attention_heads = {heads}")


# %% tags=["export"]
def check_quantization(r):
    "Notes a fault unless the experts are declared as MXFP4: 4-bit floats in groups of 32."
    path, quantization = r.either("quantization_config", needed=True)
    if quantization is None:
        return
    r.need(f"{path}.format")
    r.fixed(f"{path}.format", "mxfp4-pack-quantized")
    groups = r.need(f"{path}.config_groups")
    if groups is not None and not (isinstance(groups, dict) and groups):
        r.expect(f"{path}.config_groups", groups, "an object with at least one group")
    want = {"num_bits": 4, "group_size": 32, "type": "float"}
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        found = {key: weights.get(key) for key in want} if isinstance(weights, dict) else weights
        if found != want:
            r.expect(f"{path}.config_groups.*.weights", found, shown(want))


# %% [markdown]
# The released file keeps bos, eos and pad ids, like `tie_word_embeddings`, outside `text_config`; other files keep them inside. Either place will
# do, two places that disagree will not.

# %% tags=["export"]
def read_token_ids(r, vocab):
    "bos, eos (a tuple: the field may be a list) and pad id, each optional, each below `vocab`."

    (bos_path, bos), (eos_path, eos), (pad_path, pad) = (r.either(f"{x}_token_id") for x in ("bos", "eos", "pad"))
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    given = [(path, i) for path, i in ((bos_path, bos), (pad_path, pad)) if i is not None]
    for path, i in given + [(eos_path, i) for i in eos]:
        if vocab is not None and not (type(i) is int and 0 <= i < vocab):
            r.expect(path, i, f"a token id in 0..{vocab - 1:,}")
    return {"bos_token_id": bos, "eos_token_ids": eos, "pad_token_id": pad}


# %% [markdown]
# ## 5.3.4 Layer lists count from one
#
# `linear_attn_config` gives two lists, `kda_layers` and `full_attn_layers`. They count from 1; tensor names and this
# book count from 0. The lists must share out $1..93$: each layer once, none in both, none in neither.

# %% tags=["export"]
def read_layer_lists(r, layers):
    "The KDA and MLA layers as two sets counted from 0. The lists count from 1 and must share out 1..layers."
    lists = {}
    for name in ("kda_layers", "full_attn_layers"):
        path = f"text_config.linear_attn_config.{name}"
        value = r.need(path)
        if isinstance(value, list) and all(type(i) is int for i in value):
            lists[name] = value
        elif value is not None:
            r.expect(path, value, "a list of integers")
    if len(lists) < 2 or layers is None:
        return frozenset(), frozenset()
    both = lists["kda_layers"] + lists["full_attn_layers"]
    times = Counter(both)
    for fault, found in (
        ("out of range", sorted(i for i in times if not 1 <= i <= layers)),
        ("listed twice", sorted(i for i in times if times[i] > 1)),
        ("in neither list", [i for i in range(1, layers + 1) if i not in times]),
    ):
        if found:
            numbers = ", ".join(shown(i) for i in found[:8]) + (", ..." if len(found) > 8 else "")
            r.wrong.append(f"text_config.linear_attn_config.kda_layers and full_attn_layers: {numbers} {fault}, "
                           f"expected each of 1..{layers} once")
    return tuple(frozenset(i - 1 for i in layers) for layers in lists.values())


# %%
def lists_of(kda, full, layers):
    r = Reading({"text_config": {"linear_attn_config": {"kda_layers": kda, "full_attn_layers": full}}})
    return read_layer_lists(r, layers), r.missing + r.wrong


(kda, mla), faults = lists_of([1, 2, 3], [4, 5], 5)
print("counted from 0:", sorted(kda), sorted(mla), faults)
print(*lists_of([0, 1, 2, 3], [3], 5)[1], sep="\n")


# %% [markdown]
# ## 5.3.5 The numbers, and every tensor they imply
#
# `Config` is a frozen record with `config.json`'s own names. Its one method of weight is `tensors()`: name, dtype and shape of all that
# a checkpoint of this shape must hold. If that list and the files agree, the numbers are right; if the numbers are wrong,
# the list is. `families()` is the same list folded: tensors that differ only in layer and expert are one line, which is enough to compare them all at once.

# %% tags=["export"]
@dataclass(frozen=True)
class Config:
    "The text stack's numbers. Layers count from 0 here; names are config.json's, `kda_*` from linear_attn_config."

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    attn_res_block_size: int
    first_k_dense_replace: int
    intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    kda_num_heads: int
    kda_head_dim: int
    kda_conv_kernel: int
    rms_norm_eps: float
    routed_scaling_factor: float
    activation_situ_beta: float
    activation_situ_linear_beta: float
    kda_gate_lower_bound: float
    kda_layers: frozenset
    mla_layers: frozenset
    bos_token_id: int | None = None
    eos_token_ids: tuple = ()
    pad_token_id: int | None = None

    def layer_kind(self, L):
        "'kda' or 'mla' for layer L, counted from 0."
        if not 0 <= L < self.num_hidden_layers:
            raise IndexError(f"layer {L}: the model has layers 0..{self.num_hidden_layers - 1}")
        return "kda" if L in self.kda_layers else "mla"

    def is_dense(self, L):
        "True where layer L, counted from 0, has one dense MLP and no experts."
        return L < self.first_k_dense_replace

    def tensors(self):
        "Every tensor of the text stack as (name, dtype, shape), layer by layer, the globals last."
        for L in range(self.num_hidden_layers):
            for name, dtype, shape in layer_tensors(self, L):
                yield f"language_model.model.layers.{L}.{name}", dtype, shape
        yield from global_tensors(self)

    def families(self):
        """The same tensors by the dozen: (pattern, dtype, shape, layers, experts).

        The pattern is a name with '#' for its numbers, a layer and an expert: every pair of the two lists, -1 where a name has no such number.
        """
        layers = {}
        for L in range(self.num_hidden_layers):
            for family in layer_tensors(self, L, ["#"]):
                layers.setdefault(family, []).append(L)
        for (name, dtype, shape), where in layers.items():
            yield f"language_model.model.layers.#.{name}", dtype, shape, where, range(self.num_experts) if ".#." in name else [-1]
        for name, dtype, shape in global_tensors(self):
            yield name, dtype, shape, [-1], [-1]

    def shape_fits(self, name, expected, found):
        "True if a tensor of shape `found` can serve as `name`. `A_log` may carry any padding after its heads."
        if name.endswith(".A_log"):
            return len(found) == 1 and found[0] >= self.kda_num_heads
        return tuple(found) == tuple(expected)


# %% [markdown]
# The two attentions. `A_log` has one entry a head, but the released files pad it to the head width (128 entries for 96 heads), so its shape is
# a least one: `shape_fits` takes any padding. Everything else must match exactly.

# %% tags=["export"]
def kda_tensors(c):
    "Short name, dtype and shape of a KDA attention's tensors."
    H, P, d, k = c.hidden_size, c.kda_num_heads * c.kda_head_dim, c.kda_head_dim, c.kda_conv_kernel
    return [
        *((f"{x}_proj.weight", "BF16", (P, H)) for x in "qkvg"),
        ("b_proj.weight", "BF16", (c.kda_num_heads, H)),
        ("f_a_proj.weight", "BF16", (d, H)),
        ("f_b_proj.weight", "BF16", (P, d)),
        ("o_proj.weight", "BF16", (H, P)),
        ("A_log", "F32", (max(d, c.kda_num_heads),)),
        ("dt_bias", "F32", (P,)),
        ("o_norm.weight", "F32", (d,)),
        *((f"{x}_conv1d.weight", "F32", (P, 1, k)) for x in "qkv"),
    ]


def mla_tensors(c):
    "Short name, dtype and shape of a gated MLA attention's tensors."
    H, A, q, kv = c.hidden_size, c.num_attention_heads, c.q_lora_rank, c.kv_lora_rank
    return [
        ("q_a_proj.weight", "BF16", (q, H)),
        ("q_a_layernorm.weight", "BF16", (q,)),
        ("q_b_proj.weight", "BF16", (A * (c.qk_nope_head_dim + c.qk_rope_head_dim), q)),
        ("kv_a_proj_with_mqa.weight", "BF16", (kv + c.qk_rope_head_dim, H)),
        ("kv_a_layernorm.weight", "BF16", (kv,)),
        ("kv_b_proj.weight", "BF16", (A * (c.qk_nope_head_dim + c.v_head_dim), kv)),
        ("g_proj.weight", "BF16", (A * c.v_head_dim, H)),
        ("o_proj.weight", "BF16", (H, A * c.v_head_dim)),
    ]


# %% [markdown]
# The feed-forward part: one dense MLP in the first layer, latent experts above it. An expert's matrix is two tensors: a packed byte for two
# weights, a scale byte for 32.

# %% tags=["export"]
def gated_mlp_tensors(H, width):
    "Short name, dtype and shape of a dense gated MLP `width` wide."
    return [
        ("gate_proj.weight", "BF16", (width, H)),
        ("up_proj.weight", "BF16", (width, H)),
        ("down_proj.weight", "BF16", (H, width)),
    ]


def moe_tensors(c, experts):
    "Short name, dtype and shape of a latent MoE's tensors, those of the routed `experts` last."
    H, E, z, m = c.hidden_size, c.num_experts, c.routed_expert_hidden_size, c.moe_intermediate_size
    yield "gate.weight", "BF16", (E, H)
    yield "gate.e_score_correction_bias", "F32", (E,)
    yield "routed_expert_down_proj.weight", "BF16", (z, H)
    yield "routed_expert_up_proj.weight", "BF16", (H, z)
    yield "routed_expert_norm.weight", "BF16", (z,)
    for name, dtype, shape in gated_mlp_tensors(H, m * c.num_shared_experts):
        yield f"shared_experts.{name}", dtype, shape
    for e in experts:
        for w, rows, width in (("w1", m, z), ("w2", z, m), ("w3", m, z)):
            yield f"experts.{e}.{w}.weight_packed", "U8", (rows, width // 2)
            yield f"experts.{e}.{w}.weight_scale", "U8", (rows, width // 32)


# %% tags=["export"]
def layer_tensors(c, L, experts=None):
    "Name within layer L, dtype and shape of all its tensors, with all of its experts or those given."
    H = c.hidden_size
    for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm"):
        yield f"{name}.weight", "BF16", (H,)
    yield "self_attention_res_proj.weight", "BF16", (1, H)
    yield "mlp_res_norm.weight", "BF16", (H,)
    yield "mlp_res_proj.weight", "BF16", (1, H)
    for name, dtype, shape in kda_tensors(c) if c.layer_kind(L) == "kda" else mla_tensors(c):
        yield f"self_attn.{name}", dtype, shape
    prefix, rest = ("mlp", gated_mlp_tensors(H, c.intermediate_size)) if c.is_dense(L) else ("block_sparse_moe", moe_tensors(c, experts or range(c.num_experts)))
    for name, dtype, shape in rest:
        yield f"{prefix}.{name}", dtype, shape


def global_tensors(c):
    "Full name, dtype and shape of the five tensors outside the layers."
    H, V = c.hidden_size, c.vocab_size
    yield "language_model.model.embed_tokens.weight", "BF16", (V, H)
    yield "language_model.lm_head.weight", "BF16", (V, H)
    yield "language_model.model.norm.weight", "BF16", (H,)
    yield "language_model.model.output_attn_res_norm.weight", "BF16", (H,)
    yield "language_model.model.output_attn_res_proj.weight", "BF16", (1, H)


# %% [markdown]
# ## 5.3.6 Reading it

# %% tags=["export"]
def read_config(model_dir):
    "Config from model_dir/config.json. ConfigError lists every missing field and every refused value in one line."
    folder = Path(model_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    path = folder / "config.json"
    r = Reading(load_json(path))
    r.fixed("model_type", "kimi_k3")
    n = {name: r.whole(f"text_config.{key}", low, high) for key, (name, low, high) in INTEGERS.items()}
    n |= {name: r.real(f"text_config.{key}", low, high) for key, (name, low, high) in REALS.items()}
    for key, expected in FIXED.items():
        r.need(f"text_config.{key}")
        r.fixed(f"text_config.{key}", expected)
    for key, expected in FIXED_IF_GIVEN.items():
        r.fixed(f"text_config.{key}", expected)
    r.fixed(r.either("tie_word_embeddings", needed=True)[0], False)
    check_quantization(r)
    check_widths(r, n)
    n["kda_layers"], n["mla_layers"] = read_layer_lists(r, n["num_hidden_layers"])
    n |= read_token_ids(r, n["vocab_size"])
    missing = [f"missing {', '.join(dict.fromkeys(r.missing))}"] if r.missing else []
    if missing or r.wrong:
        raise ConfigError(f"{path}: {'; '.join(missing + list(dict.fromkeys(r.wrong)))}")
    return Config(**n)


# %% [markdown]
# **Check.** The embedded model was written by a generator that shares nothing with this code. The list must equal its headers:
# every name, dtype and shape, with only the image side left over.

# %%
def headers(folder):
    "{tensor name: (dtype, shape)} from the headers of a folder's shards."
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as f:
            found |= json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in found.items() if name != "__metadata__"}


MODEL = ROOT / "fixtures/oracle13/model"
small, stored = read_config(MODEL), headers(MODEL)
implied = {name: (dtype, shape) for name, dtype, shape in small.tensors()}
print(f"{len(implied)} implied, {len(stored)} stored; stored only:", *sorted(stored.keys() - implied.keys()), sep="\n  ")
assert all(stored.get(name) == what for name, what in implied.items())
assert all(name.startswith(("mm_projector.", "vision_tower.")) for name in stored.keys() - implied.keys())

# %% [markdown]
# And the released numbers (`fixtures/k3`, typed in from the published configuration). The released index has 497,220 tensors in 1,560,860,324,864 bytes; 168 of
# them, the projector and the vision tower, are no business of ours. The sum must come out to the byte.

# %%
WIDTH = {"BF16": 2, "F32": 4, "U8": 1}
k3 = read_config(ROOT / "fixtures/k3")
sizes = {name: WIDTH[dtype] * math.prod(shape) for name, dtype, shape in k3.tensors()}
print(f"{len(sizes):,} tensors, {sum(sizes.values()):,} bytes")
assert len(sizes) == 497_220 - 168
assert sum(sizes.values()) == 1_560_860_324_864 - 92_289_024 - 802_428_928


# %% [markdown]
# ## 5.3.7 Two traps of the layer lists
#
# **Trap: a one-based layer list read as zero-based.** 45 of the 93 layers change kind, and nothing crashes.
#
# **Trap: layer 93 taken for KDA.** Replace the lists by the rule they seem to follow, "every fourth layer is MLA", and one layer is
# wrong: counted from one, 92 and 93 are both MLA.

# %%
def maps(c):
    "Kinds of the layers (1 = MLA): as the lists say, as read from zero, by the rule of four."
    lists = [L + 1 for L in c.mla_layers]
    layers = range(c.num_hidden_layers)
    return [[L in c.mla_layers for L in layers], [L in lists for L in layers], [L % 4 == 3 for L in layers]]


rows = maps(k3)
wrong = [sum(a != b for a, b in zip(row, rows[0])) for row in rows]
fig, ax = plt.subplots(figsize=(6, 2.2))
ax.imshow(rows, aspect="auto", cmap="Blues", vmin=-0.4, vmax=1.4, interpolation="nearest")
for y, row in enumerate(rows):
    bad = [L for L, kind in enumerate(row) if kind != rows[0][L]]
    ax.plot(bad, [y] * len(bad), ".", color="C1", ms=4)
ax.set_yticks(range(3), ["the lists", "counted from 0", "every fourth"])
ax.set_xticks(range(0, 93, 12))
ax.set_xlabel("layer, counted from 0 (dark: MLA, light: KDA, dot: wrong kind)")
ax.set_title(f"Misread lists move {wrong[1]} of 93 layers; the rule of four misses {wrong[2]}, the last")
plt.show()

# %% [markdown]
# Neither gets past the gate on the embedded model, whose last two layers are both MLA as well: the list of tensors it leads to
# is not the list in the files.

# %%
from dataclasses import replace

for label, row in zip(("the lists", "counted from 0", "every fourth"), maps(small)):
    mla = frozenset(L for L, kind in enumerate(row) if kind)
    c = replace(small, mla_layers=mla, kda_layers=frozenset(range(small.num_hidden_layers)) - mla)
    absent = sum(stored.get(name) != (dtype, shape) for name, dtype, shape in c.tensors())
    print(f"{label:15} {absent:3} of {len(implied)} tensors not as stored")
    assert (absent == 0) == (label == "the lists")


# %% [markdown]
# ## 5.3.8 Refusals, live
#
# One line each: the file, the field, what was found, what was expected. The last two faults were made together and are told together.

# %%
def refusal(*changes):
    "The message for the embedded model's config after `changes`: (dotted path, new value or None to delete)."
    tree = json.loads((MODEL / "config.json").read_text())
    for path, value in changes:
        *above, key = path.split(".")
        part = tree["text_config"]
        for name in above:
            part = part[name]
        part.pop(key) if value is None else part.update({key: value})
    (scratch / "config.json").write_text(json.dumps(tree))
    try:
        read_config(scratch)
    except ConfigError as e:
        return e.args[0].split("config.json: ")[1]


for change in [("hidden_act", "silu"), ("moe_intermediate_size", 100), ("hidden_size", 10**12), ("rms_norm_eps", float("nan")),
               ("linear_attn_config.full_attn_layers", [4, 8, 12]), ("num_expert_group", 8)]:
    print("-", refusal(change))
    assert refusal(change)
print("-", refusal(("q_lora_rank", None), ("linear_attn_config.head_dim", None)))
assert refusal() is None
shutil.rmtree(scratch)

# %% [markdown]
# ## 5.3.9 What it costs
#
# The list also weighs the model. Nine tenths of the bytes are routed experts, of which a token needs 16 in 896: this is why the rest of the
# chapter streams. (Bytes of the config itself: a few thousand. There is no kernel here and so no ladder; the one thing that
# takes time is naming half a million tensors.)

# %%
PARTS = [
    (".experts.", "routed experts"), ("shared_experts", "shared experts"), ("self_attn", "attention"),
    ("block_sparse_moe", "router and latent"), (".mlp.", "dense MLP, layer 0"),
    ("embed_tokens", "embedding, lm_head"), ("lm_head", "embedding, lm_head"), ("", "norms, residual mixing"),
]


def part(name):
    "The part of the model a tensor belongs to."
    label = next(label for key, label in PARTS if key in name)
    return f"attention, {k3.layer_kind(int(name.split('.')[3])).upper()}" if label == "attention" else label


parts = {}
for name, size in sizes.items():
    parts[part(name)] = parts.get(part(name), 0) + size
for label, size in sorted(parts.items(), key=lambda p: -p[1]):
    print(f"{label:24} {size / 1e9:12,.3f} GB")
trunk = sum(size for name, size in sizes.items() if ".layers." in name and ".experts." not in name)
print(f"{'trunk (layers, no routed)':24} {trunk:,} bytes")
assert trunk == 108_811_877_376 and parts["routed experts"] == 1_446_456_066_048

# %%
labels, values = zip(*sorted(parts.items(), key=lambda p: p[1]))
fig, ax = plt.subplots()
ax.barh(labels, [v / 1e9 for v in values])
ax.set_xscale("log")
ax.set_xlabel("size in the checkpoint (GB, logarithmic)")
ax.set_title(f"Routed experts are {parts['routed experts'] / sum(values):.1%} of the text stack's {sum(values) / 1e12:.2f} TB")
plt.show()

# %% tags=["nbval-ignore-output"]
start = time.perf_counter()
count = sum(1 for _ in k3.tensors())
print(f"{count:,} tensors named in {time.perf_counter() - start:.2f} s")
start = time.perf_counter()
folded = [*k3.families()]
print(f"{len(folded)} families found in {1e3 * (time.perf_counter() - start):.0f} ms")

# %% [markdown]
# So a checkpoint is compared family by family (5.22.3), and unfolding them must give the list again, nothing twice.

# %%
unfolded = [pattern.replace("#", str(L), 1).replace("#", str(e), 1) for pattern, _, _, layers, experts in folded for L in layers for e in experts]
assert len(unfolded) == len(sizes) and {*unfolded} == {*sizes}
print(f"{len(folded)} families unfold to {len(unfolded):,} names; of routed experts are")
for pattern, dtype, shape, layers, experts in folded:
    if len(experts) > 1:
        print(f"  {pattern.partition('experts.')[2]:18} {dtype} {shape}: layers {min(layers)}..{max(layers)}, experts 0..{max(experts)}")


# %% [markdown]
# ## Summary
#
# - No defaults: a field is read, or missing (all missing ones in one message), or refused with what was expected.
# - Layer lists count from one and must share out the layers; a rule of thumb gets the last layer wrong.
# - The config implies the checkpoint's tensor list exactly, down to 1,559,965,606,912 bytes.
#
# ## Exercises
#
# 1. Which single integer of K3's config can change without `tensors()` changing? Find all of them by trying each, and say what
#    would catch each one.
# 2. Write the message a config with `qk_rope_head_dim: 0` should get, and the change that would support it.
# 3. `shape_fits` accepts any padding of `A_log`. Which check could tell padding from a file that holds one entry per channel?
#
# Next: [5.2](02_tokenizer.ipynb) turns text into the ids this model eats.

# %% tags=["export"]
def is_synthetic(path):
    "True where config.json says that `k3 synth` made these weights up."
    return "synthetic" in json.loads((Path(path) / "config.json").read_text())
