"""5.24 A checkpoint without the weights

Made from book/05_streaming/24_synth.py: edit that, then run `make export`.
"""

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


def file_order(tensors):
    "The tensors of a file in the released order: float32, BF16, bytes, and by name within each."
    return sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor[1]], tensor[0]))


def stream(seed, *what):
    "The random bits that belong to a name: nothing drawn or written before has a part in them."
    key = " ".join(map(str, (seed, *what))).encode()
    return np.random.PCG64(int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little"))


def to_bf16(x):
    "The bits, uint16, of the BF16 numbers nearest to float32 `x`, all finite; a tie goes to the even one."
    bits = x.view(np.uint32)
    near = bits >> 16
    near &= 1
    near += 0x7FFF
    near += bits
    near >>= 16
    return near.astype(np.uint16)


def draw(bits, dtype, count, low, high):
    "`count` values evenly from low..high out of the stream `bits`: uint16 for BF16, float32 for F32, uint8 for U8."
    if dtype == "U8":
        raw = bits.random_raw(ceil(count / 8)).view(np.uint8)[:count]
        return (raw.astype(np.uint16) * (high - low + 1) // 256 + low).astype(np.uint8)
    x = bits.random_raw(ceil(count / 4)).view(np.uint16)[:count].astype(np.float32)
    x *= (high - low) / 65535
    x += low
    return to_bf16(x) if dtype == "BF16" else x


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


__all__ = [
    "SynthError", "RELEASED", "SLICE", "ORACLE", "PRESETS", "LIMITS", "SHORT", "ARGUMENTS", "checked", "numbers",
    "CONTROL", "UNFLAGGED", "control_ids", "tokenizer_tree", "config_tree", "Recipe", "write_config", "TOWER",
    "outside_tensors", "layer_file", "files", "file_order", "stream", "to_bf16", "draw", "ROWS", "HEADS", "EXPERTS",
    "EXPERT_ROWS", "LOW_IDS", "ID_STEP", "WHOLE", "ALWAYS", "choose", "place", "head_rows", "live_heads",
    "live_experts", "live_rows", "GAIN", "E2M1_RMS", "INTERVAL", "live_inputs", "interval", "Run", "runs", "Piece",
    "Shard", "plan_shard", "plan", "CHUNK", "write_shard", "shown_bytes", "write_shards", "prepare", "keeps_holes",
    "check_space", "write_index", "Written", "synth",
]
