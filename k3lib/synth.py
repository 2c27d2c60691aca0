"""5.28 A checkpoint without the weights

Made from book/05_streaming/28_synth.py: edit that, then run `make export`.
"""

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


def file_order(tensors: Iterable[Tensor]) -> list[Tensor]:
    "The tensors of a file in the released order: float32, BF16, bytes, and by name within each."
    return sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.name))


def random_bits(seed: int, *key: str | int) -> np.random.PCG64:
    "A generator of the random bits that belong to `key`, a tensor's name. They depend on nothing but seed and key."
    text = " ".join(map(str, (seed, *key))).encode()
    return np.random.PCG64(int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little"))


def to_bf16(x: np.ndarray) -> np.ndarray:
    "The bits, uint16, of the BF16 numbers nearest to float32 `x`, all finite; a tie goes to the even one."
    bits = x.view(np.uint32)
    near = bits >> 16
    near &= 1
    near += 0x7FFF
    near += bits
    near >>= 16
    return near.astype(np.uint16)


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


def write_index(folder: Path, shards: list[Shard]) -> None:
    "Write model.safetensors.index.json: the bytes of all tensors, and the file of each."
    total = sum(shard.size - len(shard.header) for shard in shards)
    lines = (f'    "{tensor.name}": "{shard.file}"' for shard in shards for tensor in shard.tensors)
    text = (f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": {{\n'
            + ",\n".join(lines) + "\n  }\n}\n")
    with writing(folder / "model.safetensors.index.json") as file:
        file.write(text.encode())


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


__all__ = [
    "SynthError", "RELEASED", "SLICE", "ORACLE", "PRESETS", "LIMITS", "SHORT", "ARGUMENTS", "checked", "numbers",
    "CONTROL", "UNFLAGGED", "control_ids", "tokenizer_tree", "config_tree", "Recipe", "write_config", "TOWER",
    "outside_tensors", "files", "tensor_bytes", "file_order", "random_bits", "to_bf16", "draw", "ROWS", "HEADS",
    "EXPERTS", "EXPERT_ROWS", "LOW_IDS", "ID_STEP", "WHOLE", "ALWAYS", "choose", "heads_of", "live_heads",
    "live_experts", "head_rows", "live_rows", "GAIN", "E2M1_RMS", "INTERVAL", "LIVE_INPUTS", "live_inputs",
    "interval", "RowRange", "row_ranges", "FilledTensor", "Shard", "plan_shard", "plan_shards", "CHUNK",
    "write_shard", "shown_bytes", "write_shards", "prepare", "give_name", "keeps_holes", "check_space",
    "write_index", "Written", "written", "synth",
]
