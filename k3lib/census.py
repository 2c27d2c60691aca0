"""5.6 Where 1.56 TB lie

Made from book/05_streaming/06_census.py: edit that, then run `make export`.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from k3lib.fileio import Unusual
from k3lib.header import BITS, NUMBER_BITS, NUMBER_MASK, TensorIndex
from k3lib.tensors import LAYER_PREFIX, PARTS, census_part


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


def _short(n: int) -> str:
    "2,779,484,478,208 as 2.78T."
    for unit, size in ("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3):
        if n >= size:
            return f"{n / size:.{2 if n < 10 * size else 1 if n < 100 * size else 0}f}{unit}"
    return str(n)


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


__all__ = [
    "Census", "census", "Run", "Contiguity", "contiguity",
]
