"Small safetensors files written byte by byte, for the tests of headers, checkpoints and the census."
import json
import struct
from math import prod

import numpy as np
from hypothesis import strategies as st

from k3lib.checkpoint import INDEX
from k3lib.header import ITEMSIZE, header_bytes
from k3lib.tensors import expert_name

TOY = (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
       b'"b":{"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]}}')
TOY_DATA = struct.pack("<2f", 1, -2) + bytes.fromhex("803f c03f 0040")  # BF16 1, 1.5, 2


def file_of(text, data):
    return struct.pack("<Q", len(text)) + text + data


def write(folder, name, tensors, seed=0):
    "A shard of random bytes; returns them by tensor."
    random = np.random.default_rng(seed)
    parts = {n: random.bytes(prod(shape) * ITEMSIZE[dtype]) for n, dtype, shape in tensors}
    (folder / name).write_bytes(header_bytes(tensors) + b"".join(parts.values()))
    return parts


def shard(i, of, name):
    return f"model-{i:05d}-of-{of:06d}.safetensors", [(name, "U8", [4])]


def two_of(folder):
    "A checkpoint of two small shards and its index; {file name: bytes}."
    write(folder, *shard(1, 2, "layers.3.w"))
    write(folder, shard(2, 2, "")[0], [("b", "BF16", [1, 2]), ("layers.0.é", "F32", [1])])
    places = {name: shard(i, 2, "")[0] for i, name in ((1, "layers.3.w"), (2, "b"), (2, "layers.0.é"))}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 12}, "weight_map": places}))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Names of any kind: with numbers, with what looks like one, with the sign that stands for one
NAMES = st.one_of(
    st.text("a.#019", max_size=12),
    st.lists(st.sampled_from(["layers", "experts", "#", "0", "7", "07", "999999", "1000000", "²", "٣", "", "w1"]),
             max_size=7).map(".".join),
)

E5 = expert_name(3, 5, "w1").removesuffix("w1.weight_packed")  # what the names of an expert's tensors begin with
