# %% [markdown]
# # 5.3 A config that is accepted, or refused
#
# The engine reads the shape of Kimi K3 from one small file, `config.json`: how many layers, how wide, which layer has
# which attention. A wrong byte in a weight damages one number. A wrong number in the config damages all of them, and no
# program crashes: the model computes with an epsilon ten times too small, or with one layer of the wrong kind, and
# still writes text. So this chapter gives no field a default if anything is computed from it. At the end you can turn
# the file into 30 numbers on which the rest of the book relies, or refuse the file with one line that says why.
#
# > **Without it:** an engine that reads the layer lists from zero gives 45 layers the wrong kind,<!--claim moved--> and
# > nothing crashes.
# >
# > **With it:** each field is read, or the file is refused with the field, the value found and the value expected.
#
# Needs chapter [5.2] (files) and the parts of the model, chapters [2.2] to [4.2]. Runs in seconds. Makes
# `k3lib.config`.
#
# [5.2 Files read whole or refused, written whole or not at all](02_fileio.ipynb) ·
# [contents](../README.md) ·
# [5.4 The one table of tensors](04_tensors.ipynb)
#
# [5.2]: 02_fileio.ipynb
# [2.2]: ../02_kda/02_kda.ipynb
# [4.2]: ../04_moe_router/02_moe.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "files")

# %%
import shutil
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% [markdown]
# There are two kinds of fields. If the engine computes with a field, its value is read from the file, or the file is
# refused. If nothing is computed from a field, it may have any value. If this value is unusual, the reader notes it,
# and `k3 census` (5.6) shows it.
#
# | symbol | meaning | in K3 | name in code |
# |---|---|---|---|
# | $L$ | layer, counted from 0 | 0..92 | `L` |
# | $H$ | width of the residual stream | 7168 | `hidden_size` |
# | `V` | vocabulary | 163,840 | `vocab_size` |
# | `P` | KDA heads times head width | 96 x 128 | `kda_num_heads * kda_head_dim` |
# | `A` | MLA heads | 96 | `num_attention_heads` |
# | `E`, `k` | routed experts in a layer, chosen for a token | 896, 16 | `num_experts`, `num_experts_per_token` |
# | `m`, `z` | width of an expert, of its latent | 3072, 3584 | `moe_intermediate_size`, `routed_expert_hidden_size` |
#
# ## 5.3.1 The file
#
# The strict JSON reader of [5.2.3] reads the file. The size of the file is checked before the first byte is read. The
# released file has a few thousand bytes. The bound of 4 MB leaves room for a long list of tensor names. Even hostile
# text of this size becomes less than 100 MB of Python objects.
#
# [5.2.3]: 02_fileio.ipynb#5.2.3-JSON,-read-strictly

# %% tags=["export"]
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from k3lib.fileio import MissingFile, UsageError, given_path, json_object, small_file


# %% tags=["export"]
class ConfigError(UsageError):
    "A config.json that cannot be read, lacks a field, or asks for something this engine does not do."


def shown(value: object) -> str:
    "A value of the config for an error message: JSON on one line of at most 60 characters."
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


# %% tags=["export"]
MAX_CONFIG_BYTES = 4_000_000


def load_json(path: str | os.PathLike[str]) -> dict:
    """The JSON object in the file `path`.

    Raises FileNotFoundError if it does not exist, ConfigError if it is empty, has over 4 MB or json_object refuses it.
    """
    return json_object(small_file(path, MAX_CONFIG_BYTES, ConfigError), path, ConfigError)


# %% [markdown]
# By hand: an object that has a key twice, and lists that are nested a hundred deep. For the first, Python's own reader
# keeps the last value.

# %%
scratch = Path(tempfile.mkdtemp())
twice, deep = '{"hidden_size": 7168,\n "hidden_size": 128}', '{"hidden_size": ' + "[" * 100 + "]" * 100 + "}"
print("json.loads:", json.loads(twice))
for text in twice, deep:
    (scratch / "config.json").write_text(text)
    try:
        load_json(scratch / "config.json")
        raise AssertionError("accepted")
    except ConfigError as e:
        print("load_json: ", e.args[0].split("config.json")[1].lstrip(": "))


# %% [markdown]
# ## 5.3.2 Faults are collected, then reported together
#
# A user who repairs a config should see all faults at once, and not one in each run. So a `Reading` collects them. It
# follows dotted paths through the tree, and fills three lists: fields that are missing, values that are wrong, and
# unusual values that are not used.

# %% tags=["export"]
@dataclass
class Reading:
    """A config tree and the faults found in it: `missing` fields, `wrong` values, so that one message names them all.

    `unusual`: values that are not as usual and that nothing is computed from.
    """

    tree: dict
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unusual: list[str] = field(default_factory=list)

    def get(self, path: str) -> Any:
        "The value at a dotted path, or None if it or an object above it is absent."
        value: Any = self.tree
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def need(self, path: str) -> Any:
        "Like get, and records a missing field: its path, or the path of the whole object that should hold it."
        value, keys = self.get(path), path.split(".")
        if value is None:
            absent = next(p for i in range(len(keys)) if self.get(p := ".".join(keys[: i + 1])) is None)
            above = absent.rpartition(".")[0]
            if above and not isinstance(self.get(above), dict):
                self.expect(above, self.get(above), "an object")
            else:
                self.missing.append(absent)
        return value

    def expect(self, path: str, found: object, expected: str) -> None:
        "Record a fault at `path`: the value found, and what was expected."
        self.wrong.append(f"{path} is {shown(found)}, expected {expected}")

    def odd(self, path: str, found: object, usual: str) -> None:
        "Record a value at `path` that is not as usual and that nothing is computed from."
        self.unusual.append(f"{path} is {shown(found)}, not {usual}")


# %% [markdown]
# Each kind of field has its own method. The method returns the value, or it records a fault and returns None.

# %% tags=["export"]
class Reading(Reading):
    def whole(self, path: str, low: int, high: int) -> int | None:
        "The integer at `path`, within low..high; true, 4.0 and \"4\" are not integers."
        value = self.need(path)
        if value is None or type(value) is int and low <= value <= high:
            return value
        self.expect(path, value, f"an integer in {low}..{high:,}")
        return None

    def real(self, path: str, low: float, high: float) -> float | None:
        "The finite number at `path` as a float, within low..high."
        value = self.need(path)
        if value is None or type(value) in (int, float) and low <= value <= high:
            return None if value is None else float(value)
        self.expect(path, value, f"a number in {low:g}..{high:g}")
        return None

    def fixed(self, path: str, expected: object) -> None:
        "Record a fault unless the field at `path` is absent or equals `expected` in value and type."
        found = self.get(path)
        if found is not None and (type(found) is not type(expected) or found != expected):
            self.expect(path, found, f"{shown(expected)}, the only value implemented")

    def either(self, name: str, needed: bool = False) -> tuple[str, Any]:
        "Path and value of a field that may stand in text_config, at the top, or in both if they agree."
        inner, outer = self.get(f"text_config.{name}"), self.get(name)
        if inner is not None and outer is not None and inner != outer:
            self.expect(name, outer, f"{shown(inner)} as in text_config.{name}")
        if inner is None and outer is not None:
            return name, outer
        return f"text_config.{name}", self.need(f"text_config.{name}") if needed else inner


# %% [markdown]
# A small tree with three faults. For Python's `isinstance`, `True` is an integer, and 4.0 equals 4. A config may use
# neither as a count. Python reads `NaN` as a number. It fails the test of its range, because every comparison with NaN
# is false.

# %%
toy = Reading({"text_config": {"hidden_size": True, "rms_norm_eps": float("nan"), "num_experts": 896}})
print(toy.whole("text_config.num_experts", 1, 2**16))
toy.whole("text_config.hidden_size", 1, 2**17)
toy.real("text_config.rms_norm_eps", 1e-12, 1.0)
toy.whole("text_config.linear_attn_config.num_heads", 1, 2**14)
print("missing:", *toy.missing)
print("wrong:  ", *toy.wrong, sep="\n  ")

# %% [markdown]
# ## 5.3.3 The fields that are read
#
# Four tables list most fields. An integer or a real number must be in a range. The upper end of each range is at least
# ten times K3's own number. A larger size is refused before anything is allocated for it.

# %% tags=["export"]
INTEGERS = {  # key in text_config: (name in Config, least and greatest value that is accepted)
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

# %% tags=["export"]
REALS = {  # the same for real numbers
    "rms_norm_eps": ("rms_norm_eps", 1e-12, 1.0),
    "routed_scaling_factor": ("routed_scaling_factor", 1e-6, 1e6),
    "activation_situ_beta": ("activation_situ_beta", 1e-6, 1e6),
    "activation_situ_linear_beta": ("activation_situ_linear_beta", 1e-6, 1e6),
    "linear_attn_config.gate_lower_bound": ("kda_gate_lower_bound", -1e3, -1e-6),
}

# %% [markdown]
# `FIXED` lists the choices for which this book has code: SiTU, sigmoid routing without groups, no rotary embedding. A
# config with another value describes another model, and is refused. `topk_method` may be absent, which means the only
# supported value. A null counts as absent.

# %% tags=["export"]
FIXED = {  # key in text_config: its only value that is implemented
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


FIXED_IF_GIVEN = {"topk_method": "noaux_tc"}  # as FIXED, but the field may be absent


# %% [markdown]
# Some rules concern several fields. In MXFP4, 32 weights of a row share one scale. So the two widths of the rows of
# experts must be multiples of 32. In MLA each head has its own keys and values, and the shape of `kv_b_proj` shows how
# many (5.4). So nothing is computed from `num_key_value_heads`.

# %% tags=["export"]
def check_widths(r: Reading, n: dict[str, Any]) -> None:
    "Record faults between fields: `n` maps the names of Config to the values read, None where one was refused."
    text = "text_config."
    for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if n[name] is not None and n[name] % 32:
            r.expect(text + name, n[name], "a multiple of 32, the weights that share one MXFP4 scale")
    for name, of in (("num_experts_per_token", "num_experts"), ("first_k_dense_replace", "num_hidden_layers")):
        if None not in (n[name], n[of]) and n[name] > n[of]:
            r.expect(text + name, n[name], f"at most {of} = {n[of]}")
    heads, shared = n["num_attention_heads"], r.get(text + "num_key_value_heads")
    if None not in (heads, shared) and shared != heads:
        r.odd(text + "num_key_value_heads", shared, f"num_attention_heads = {heads}")


def check_moe_layers(r: Reading, layers: int | None, first: int | None) -> None:
    """Record a fault unless `moe_layer_freq` is absent or says that every layer from `first` on has experts.

    It is 1, or a list of 0 and 1, one for each of `layers` layers or more.
    """
    path = "text_config.moe_layer_freq"
    found = r.get(path)
    if isinstance(found, list) and layers is not None and first is not None:
        if len(found) < layers or any(type(n) is not int or n not in (L >= first, 1) for L, n in enumerate(found)):
            r.expect(path, found, f"1 for each layer from {first} on, the only value implemented")
    else:
        r.fixed(path, 1)


# The experts must be declared as MXFP4. The declaration may stand in `text_config`, at the top, or in both places.

# %% tags=["export"]
def check_quantization(r: Reading) -> None:
    "Record a fault unless the experts are declared as MXFP4: 4-bit floats in groups of 32."
    paths = [path for path in ("quantization_config", "text_config.quantization_config") if r.get(path) is not None]
    if not paths:
        r.need("text_config.quantization_config")
    for path in paths:
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
# The released file has the ids of bos, eos and pad, and `tie_word_embeddings`, outside `text_config`. Other files have
# them inside. Both places are read. The eos ids end an answer, so a file whose two places disagree about them is
# refused. Nothing is computed from bos and pad, so they may also be -1, which means none.

# %% tags=["export"]
def read_token_ids(r: Reading, vocab: int | None) -> dict[str, Any]:
    "bos, eos (a tuple: the field may be a list) and pad id, each optional, each below `vocab`."
    def is_id(i):
        return vocab is None or type(i) is int and 0 <= i < vocab

    expected = f"a token id in 0..{(vocab or 1) - 1:,}"
    eos_path, eos = r.either("eos_token_id")
    eos = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    for i in eos:
        if not is_id(i):
            r.expect(eos_path, i, expected)
    found: dict[str, Any] = {"eos_token_ids": eos}
    for name in "bos_token_id", "pad_token_id":
        given = [path for path in (f"text_config.{name}", name) if r.get(path) is not None]
        good = [path for path in given if is_id(r.get(path))]
        for path in given:
            if path not in good:
                r.odd(path, r.get(path), expected)
            elif r.get(path) != r.get(good[0]):
                r.odd(path, r.get(path), f"{r.get(good[0])} as in {good[0]}")
        found[name] = r.get(good[0]) if good else None
    return found


# %% [markdown]
# ## 5.3.4 Layer lists count from one
#
# `linear_attn_config` has two lists, `kda_layers` and `full_attn_layers`. The lists count layers from 1. The names of
# tensors, and this book, count from 0. Each number from 1 to 93 must be in exactly one of the two lists, once. A model
# may have `num_nextn_predict_layers` more layers, which predict further tokens. Greedy decoding does not use these, so
# the lists may name them or not.

# %% tags=["export"]
def read_layer_lists(r: Reading, layers: int | None, more: int = 0) -> tuple[frozenset[int], frozenset[int]]:
    """The KDA and MLA layers as sets that count from 0.

    The lists count from 1. Each of 1..layers must be in one list, once; the `more` layers after them may be.
    """
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
    lists = {name: [i for i in found if not layers < i <= layers + more] for name, found in lists.items()}
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
    kda, mla = (frozenset(i - 1 for i in lists[name]) for name in ("kda_layers", "full_attn_layers"))
    return kda, mla


# %%
def lists_of(kda, full, layers):
    r = Reading({"text_config": {"linear_attn_config": {"kda_layers": kda, "full_attn_layers": full}}})
    return read_layer_lists(r, layers), r.missing + r.wrong


(kda, mla), faults = lists_of([1, 2, 3], [4, 5], 5)
print("counted from 0:", sorted(kda), sorted(mla), faults)
print(*lists_of([0, 1, 2, 3], [3], 5)[1], sep="\n")


# %% [markdown]
# ## 5.3.5 The numbers
#
# `Config` is a frozen record with the names of `config.json`. From it the next chapter derives the name, dtype and
# shape of every tensor that a checkpoint of this shape must have. If the files have exactly these tensors, the numbers
# that decide a shape are right.

# %% tags=["export"]
@dataclass(frozen=True)
class Config:
    "The numbers of the text stack. Layers count from 0; names are config.json's, `kda_*` from linear_attn_config."

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
    kda_layers: frozenset[int]
    mla_layers: frozenset[int]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_nextn_predict_layers: int = 0  # layers after the others, which greedy decoding does not use
    unusual: tuple[str, ...] = field(default=(), compare=False)  # a line for each odd value that is not used


# %% [markdown]
# Many chapters need two facts about a layer: which attention it has, and whether its feed-forward half is one dense
# MLP.

# %% tags=["export"]
class Config(Config):
    def layer_kind(self, L: int) -> str:
        "'kda' or 'mla' for layer L, counted from 0. Raises IndexError if the model has no such layer."
        if not 0 <= L < self.num_hidden_layers:
            raise IndexError(f"layer {L}: the model has layers 0..{self.num_hidden_layers - 1}")
        return "kda" if L in self.kda_layers else "mla"

    def is_dense(self, L: int) -> bool:
        "True if layer L, counted from 0, has one dense MLP and no experts."
        return L < self.first_k_dense_replace


# %% [markdown]
# ## 5.3.6 Reading the config
#
# `read_config` reads all fields, applies all rules, and raises one error with all faults.

# %% tags=["export"]
MORE_LAYERS = "num_nextn_predict_layers"


def read_config(model_dir: str | os.PathLike[str]) -> Config:
    """The Config in model_dir/config.json.

    Raises FileNotFoundError if the folder or the file does not exist, ConfigError with every missing field and every
    refused value in one line, UsageError if `model_dir` is no path.
    """
    folder = given_path("model_dir", model_dir)
    if not folder.is_dir():
        raise MissingFile(f"{folder}: no such model folder")
    path = folder / "config.json"
    r = Reading(load_json(path))
    r.fixed("model_type", "kimi_k3")
    n: dict[str, Any] = {name: r.whole(f"text_config.{key}", low, high) for key, (name, low, high) in INTEGERS.items()}
    n |= {name: r.real(f"text_config.{key}", low, high) for key, (name, low, high) in REALS.items()}
    for key, expected in FIXED.items():
        r.need(f"text_config.{key}")
        r.fixed(f"text_config.{key}", expected)
    for key, expected in FIXED_IF_GIVEN.items():
        r.fixed(f"text_config.{key}", expected)
    r.fixed(r.either("tie_word_embeddings", needed=True)[0], False)
    check_quantization(r)
    check_widths(r, n)
    check_moe_layers(r, n["num_hidden_layers"], n["first_k_dense_replace"])
    if r.get(f"text_config.{MORE_LAYERS}") is not None:
        n[MORE_LAYERS] = r.whole(f"text_config.{MORE_LAYERS}", 0, 2**12)
    n["kda_layers"], n["mla_layers"] = read_layer_lists(r, n["num_hidden_layers"], n.get(MORE_LAYERS) or 0)
    n |= read_token_ids(r, n["vocab_size"])
    missing = [f"missing {', '.join(dict.fromkeys(r.missing))}"] if r.missing else []
    if missing or r.wrong:
        raise ConfigError(f"{path}: {'; '.join(missing + list(dict.fromkeys(r.wrong)))}")
    return Config(**n, unusual=tuple(dict.fromkeys(r.unusual)))


# %% [markdown]
# `k3 synth` (5.28) makes models with random weights, and marks their config. Every command that prints results of such
# a model says so. Otherwise a reader could take them for results of the released model.

# %% tags=["export"]
def is_synthetic(model_dir: str | os.PathLike[str]) -> bool:
    "True if the folder's config.json says that `k3 synth` made its weights."
    return "synthetic" in load_json(given_path("model_dir", model_dir) / "config.json")


# %% [markdown]
# Here are the numbers of the released model (`fixtures/k3`, typed in from the published configuration), beside those of
# the small model in this repository.

# %%
MODEL = ROOT / "fixtures/oracle13/model"
small, k3 = read_config(MODEL), read_config(ROOT / "fixtures/k3")
for name in ("hidden_size", "num_hidden_layers", "vocab_size", "num_experts", "num_experts_per_token", "rms_norm_eps"):
    print(f"{name:22s} {getattr(k3, name):>10,} {getattr(small, name):>8,}")
assert (len(k3.kda_layers), len(k3.mla_layers)) == (69, 24) and not is_synthetic(MODEL)


# %% [markdown]
# ## 5.3.7 Two traps of the layer lists
#
# **First trap: the lists are read as if they counted from zero.** Then 45 of the 93 layers have the wrong kind, and
# nothing crashes.
#
# **Second trap: the last layer is taken for KDA.** The lists seem to follow the rule that every fourth layer is MLA.
# The rule is wrong for one layer: counted from one, layers 92 and 93 are both MLA.

# %%
def maps(c):
    "Kinds of the layers (1 = MLA): as the lists say, as read from zero, by the rule of four."
    lists = [L + 1 for L in c.mla_layers]
    layers = range(c.num_hidden_layers)
    return [[L in c.mla_layers for L in layers], [L in lists for L in layers], [L % 4 == 3 for L in layers]]


rows = maps(k3)
wrong = [sum(a != b for a, b in zip(row, rows[0])) for row in rows]
assert wrong[1] == 45  # claim moved
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
# Neither mistake crashes. A gate that counts the MLA layers and looks at the last two notices both, as the next cells
# show. The comparison of [5.4.3] needs no such knowledge: the tensors that a wrong list implies are not those in the
# files.
#
# [5.4.3]: 04_tensors.ipynb#5.4.3-Every-tensor-that-a-config-implies

# %%
def check_kinds(name, is_mla):
    "The gate: 24 layers are MLA, and the last two are among them."
    assert sum(is_mla) == 24 and is_mla[-2:] == [True, True], f"{name}: {sum(is_mla)} layers are MLA, expected 24"
    print(f"{name}: 24 layers are MLA, the last two among them")


check_kinds("the lists", rows[0])

# %% tags=["raises-exception"]
check_kinds("counted from 0", rows[1])

# %% tags=["raises-exception"]
check_kinds("every fourth", rows[2])


# %% [markdown]
# ## 5.3.8 Refusals, live
#
# Each refusal is one line with the field, the value found and the value expected. The last file has two faults, and one
# line reports both.

# %%
def refusal(*changes):
    "The message for the embedded model's config after `changes`: (dotted path, new value or None to delete)."
    tree = json.loads((MODEL / "config.json").read_bytes())
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


for change in [("hidden_act", "silu"), ("moe_intermediate_size", 100), ("hidden_size", 10**12),
               ("rms_norm_eps", float("nan")),
               ("linear_attn_config.full_attn_layers", [4, 8, 12]), ("num_expert_group", 8)]:
    print("-", refusal(change))
    assert refusal(change)
print("-", refusal(("q_lora_rank", None), ("linear_attn_config.head_dim", None)))
assert refusal() is None
shutil.rmtree(scratch)

# %% [markdown]
# ## 5.3.9 Summary
#
# - A field that is computed with has no default. It is read, or the file is refused with all its faults in one line. A
#   field that is not computed with is never a reason to refuse a file.
# - The layer lists count from one, and each layer is in one of them. The rule of four is wrong for the last layer.
# - An accepted config is 30 numbers. The next chapter derives from them which tensors the files must have.
#
# ## Exercises
#
# Answer to 2: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Which message should a config with `qk_rope_head_dim: 0` get, and what would have to change to support it?
# 2. Add a field to the embedded model's config that the reader does not read. Should the config be refused? What speaks
#    for it, and what against it?
