"Small K3-graph checkpoints with dimensions of the test's choosing, and the book's own float64 model to judge them by."
import ast
import json
import shutil
from pathlib import Path

import jupytext
import numpy as np
from common import MODEL, ROOT

from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.header import header_bytes
from k3lib.tensors import layer_of, text_tensors


def write(folder, seed=0, a_log_tail=7.7, linear=None, **fields):
    """A random checkpoint in `folder`: the embedded model's config with changes.

    `fields` take the place of its fields, `linear` of those of its linear_attn_config. There is one shard a layer and
    one for the rest, BF16 except where the released layout says otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    config["text_config"].update(fields)
    config["text_config"]["linear_attn_config"].update(linear or {})
    (folder / "config.json").write_text(json.dumps(config))
    config = read_config(folder)
    rng = np.random.default_rng(seed)
    shards = {}
    for name, dtype, shape in text_tensors(config):
        layer = layer_of(name)
        shard = config.num_hidden_layers if layer is None else layer
        shards.setdefault(shard, []).append((name, dtype, shape, values(rng, name, dtype, shape, config, a_log_tail)))
    for number, (_, tensors) in enumerate(sorted(shards.items()), 1):
        path = folder / f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        path.write_bytes(header_bytes([t[:3] for t in tensors]) + b"".join(t[3] for t in tensors))
    return folder


def values(rng, name, dtype, shape, config, a_log_tail):
    "The bytes of one tensor, of a size that keeps activations near one."
    if dtype == "U8":
        low, high = (117, 122) if name.endswith("scale") else (0, 256)
        return rng.integers(low, high, shape, np.uint8).tobytes()
    fan = shape[-1] if len(shape) == 2 else 4
    x = rng.standard_normal(shape).astype(np.float32) * np.float32(fan ** -0.5)
    if "norm" in name:
        x = 1 + 0.1 * x
    if name.endswith("embed_tokens.weight"):
        x *= np.float32(fan ** 0.5)
    if name.endswith("A_log"):
        x[config.kda_num_heads:] = a_log_tail
    x = x.astype(np.float32)
    return x.tobytes() if dtype == "F32" else (x.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def forward64(folder, ids):
    "Logits of the float64 model that the model's chapter writes out, for another checkpoint than the chapter's."
    chapter, = (ROOT / "book").glob("*/[0-9]*_model.py")
    cells = [cell.source for cell in jupytext.read(chapter, fmt="py:percent").cells if cell.cell_type == "code"]
    last = next(i for i, cell in enumerate(cells) if "def forward64(" in cell)
    tree = ast.parse("\n".join(cells[:last + 1]))
    tree.body = [node for node in tree.body if isinstance(node, (ast.ImportFrom, ast.FunctionDef))
                 or isinstance(node, ast.Import) and node.names[0].name != "schematics"  # the chapter's pictures
                 or isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]
    space = {"config": read_config(folder), "checkpoint": Checkpoint(folder)}
    exec(compile(tree, str(chapter), "exec"), space)
    return space["forward64"](list(ids))[0]


def rewritten(source, target, seed=0):
    """A copy in the same layout with tensors shuffled inside each file, metadata and padding in the header.

    Returns `target`.
    """
    shutil.copytree(source, target)
    rng = np.random.default_rng(seed)
    with Checkpoint(source) as ckpt:
        for file in ckpt.files:
            names = [name for name in ckpt.names() if ckpt.extent(name).file == file]
            names = [names[i] for i in rng.permutation(len(names))]
            text = header_bytes((name, *ckpt.extent(name)[3:]) for name in names)[8:].rstrip()
            text = b'{"__metadata__":{"format":"pt"},' + text[1:] + b" " * int(rng.integers(0, 5000))
            data = b"".join(ckpt.raw(name).tobytes() for name in names)
            (target / Path(file).name).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return target
