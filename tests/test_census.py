"The census and the report on contiguity: counted by hand, of odd files, and of the release's shape."
import json
import os
import subprocess
import sys
from math import prod

import pytest
from common import MODEL, ROOT
from shards import shard, write

from k3lib.checkpoint import INDEX, Checkpoint
from k3lib.header import ITEMSIZE, header_bytes
from k3lib.tensors import EXPERT_TENSORS


@pytest.fixture(scope="module")
def oracle():
    with Checkpoint(MODEL) as opened:
        yield opened


# Census and contiguity

def test_census_of_the_oracle_by_hand(oracle):
    census = oracle.census(4)
    sizes = {n: prod(oracle.extent(n).shape) * ITEMSIZE[oracle.extent(n).dtype] for n in oracle.names()}
    counts = {n: prod(oracle.extent(n).shape) for n in oracle.names()}
    experts = {n for n in sizes if ".experts." in n}
    layers = {n for n in sizes if ".layers." in n} - experts
    assert census.experts_bytes == sum(sizes[n] for n in experts) and census.experts == 192
    assert census.expert_layers == 12
    assert census.expert_bytes == 2 * (96 * 32 + 96 * 2) + 64 * 48 + 64 * 3 == 9792
    assert census.trunk_bytes == sum(sizes[n] for n in layers) and census.trunk_tensors == len(layers)
    assert census.layers == 13
    assert (census.largest_layer, census.largest_layer_bytes) == (0, sum(sizes[n] for n in layers if ".layers.0." in n))
    assert census.embed_lm_head_bytes == 2 * 512 * 128 * 2 and census.globals_bytes == 3 * 128 * 2
    assert (census.mm_projector_tensors, census.vision_tower_tensors, census.other_tensors) == (2, 2, 0)
    always = sum(counts[n] for n in layers) + 2 * 512 * 128 + 3 * 128
    assert census.always_active == always
    assert census.parameters == always + 192 * 3 * 96 * 64
    assert census.active_per_token == always - 512 * 128 + 12 * 4 * 3 * 96 * 64
    assert census.file_bytes == sum(f.stat().st_size for f in MODEL.glob("*.safetensors")) and census.shards == 16
    assert json.loads(json.dumps(census.as_dict()))["payload_bytes"] == 6_612_160
    assert oracle.census().active_per_token is None and "per token" not in oracle.census().table()


def test_unknown_tensors_are_counted(tmp_path):
    write(tmp_path, "model.safetensors", [("mm_projector.x", "U8", [4]), ("vision_tower.y.0", "F16", [4]),
                                          ("z", "I64", [2]), ("language_model.model.layers.#.q", "U8", [7])])
    census = Checkpoint(tmp_path).census(16)
    assert (census.mm_projector_bytes, census.vision_tower_bytes) == (4, 8)
    assert (census.other_bytes, census.other_tensors) == (23, 2)
    assert (census.experts, census.layers, census.largest_layer) == (0, 0, -1)
    assert (census.parameters, census.active_per_token) == (0, 0)
    assert "other tensors, not used       2; 23 bytes" in census.table()


def test_census_of_nothing(tmp_path):
    write(tmp_path, "model.safetensors", [])
    c = Checkpoint(tmp_path)
    assert len(c) == 0 and list(c.names()) == [] and "a" not in c
    assert c.census().payload_bytes == 0 and c.contiguity() == ({}, 0, [])


LAYER = "language_model.model.layers."


def six(layer, expert):
    return [(pattern.replace("#", str(layer), 1).replace("#", str(expert)), "U8", [2])
            for pattern in EXPERT_TENSORS.values()]


def test_contiguity_of_the_oracle(oracle):
    found = oracle.contiguity()
    assert not found.broken_layers and not found.broken_experts and found.experts == 192
    assert list(found.layers) == list(range(13))
    run = found.layers[5]
    mine = [oracle.extent(n) for n in oracle.names() if ".layers.5." in n and ".experts." not in n]
    assert (run.file, run.offset) == (mine[0].file, mine[0].offset)
    assert (run.nbytes, run.tensors) == (sum(e.nbytes for e in mine), len(mine))


def test_contiguity_names_what_breaks(tmp_path):
    one = [(f"{LAYER}0.a", "U8", [3]), (f"{LAYER}1.a", "U8", [3]), (f"{LAYER}1.nil", "U8", [0]),
           (f"{LAYER}0.b", "U8", [3]), *six(1, 0), *six(1, 1)[:3], (f"{LAYER}2.a", "U8", [3]), *six(1, 1)[3:],
           *six(1, 2)]
    two = [(f"{LAYER}2.b", "U8", [3]), (f"{LAYER}3.a", "U8", [3]), (f"{LAYER}3.b", "U8", [3])]
    write(tmp_path, shard(1, 2, "")[0], one)
    write(tmp_path, shard(2, 2, "")[0], two)
    found = Checkpoint(tmp_path).contiguity()
    paths = [str(tmp_path / shard(i, 2, "")[0]) for i in (1, 2)]
    assert found.broken_layers == {0: f"{LAYER}1.a lies inside its run in {paths[0]}",
                                   2: f"{LAYER}2.b lies in {paths[1]}"}
    assert found.broken_experts == [(1, 1)] and found.experts == 3
    assert found.layers[3] == (paths[1], found.layers[3].offset, 6, 2, "")


def test_two_shards_are_not_one_run_though_the_sizes_add_up(tmp_path):
    write(tmp_path, shard(1, 2, "")[0], [(f"{LAYER}0.a", "U8", [3]), ("x", "U8", [3])])
    write(tmp_path, shard(2, 2, "")[0], [("y", "U8", [3]), (f"{LAYER}0.b", "U8", [3])])
    assert Checkpoint(tmp_path).contiguity().broken_layers == {0: f"{LAYER}0.b lies in {tmp_path / shard(2, 2, '')[0]}"}


# The release's shape: 497,220 tensors in 96 sparse files

H, VOCAB, P = 7168, 163_840, 12_288
NORMS = {"input_layernorm": [H], "post_attention_layernorm": [H], "self_attention_res_norm": [H], "mlp_res_norm": [H],
         "self_attention_res_proj": [1, H], "mlp_res_proj": [1, H]}
KDA = {"q_proj": [P, H], "k_proj": [P, H], "v_proj": [P, H], "g_proj": [P, H], "o_proj": [H, P], "b_proj": [96, H],
       "f_a_proj": [128, H], "f_b_proj": [P, 128]}
KDA_F32 = {"A_log": [128], "dt_bias": [P], "q_conv1d.weight": [P, 1, 4], "k_conv1d.weight": [P, 1, 4],
           "v_conv1d.weight": [P, 1, 4], "o_norm.weight": [128]}
MLA = {"q_a_proj": [1536, H], "q_a_layernorm": [1536], "q_b_proj": [18_432, 1536], "kv_a_proj_with_mqa": [576, H],
       "kv_a_layernorm": [512], "kv_b_proj": [24_576, 512], "g_proj": [P, H], "o_proj": [H, P]}
DENSE = {"gate_proj": [33_792, H], "up_proj": [33_792, H], "down_proj": [H, 33_792]}
MOE = {"gate": [896, H], "routed_expert_down_proj": [3584, H], "routed_expert_up_proj": [H, 3584],
       "routed_expert_norm": [3584], "shared_experts.gate_proj": [6144, H], "shared_experts.up_proj": [6144, H],
       "shared_experts.down_proj": [H, 6144]}
EXPERT = [(f"w{i}.weight_{kind}", [n, k // per]) for i, n, k in ((1, 3072, 3584), (2, 3584, 3072), (3, 3072, 3584))
          for kind, per in (("packed", 2), ("scale", 32))]
GLOBALS = {"model.embed_tokens": [VOCAB, H], "lm_head": [VOCAB, H], "model.norm": [H],
           "model.output_attn_res_norm": [H], "model.output_attn_res_proj": [1, H]}
PROJECTOR = {"post_norm": [7168], "proj.0": [4096, 4096], "proj.2": [7168, 4096]}
VISION = {"encoder.final_layernorm": [1024], "patch_embed.pos_emb": [64, 64, 1024],
          "patch_embed.proj": [1024, 3, 14, 14]}
BLOCK = {"wqkv": [4608, 1024], "wo": [1024, 1536], "mlp.fc0": [4096, 1024], "mlp.fc1": [1024, 4096], "norm0": [1024],
         "norm1": [1024]}


def bf16(prefix, shapes):
    return [(f"{prefix}{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def released_layer(layer):
    p = f"{LAYER}{layer}."
    mla = layer % 4 == 3 or layer == 92
    out = bf16(p, NORMS) + bf16(p + "self_attn.", MLA if mla else KDA)
    out += [] if mla else [(f"{p}self_attn.{name}", "F32", shape) for name, shape in KDA_F32.items()]
    if layer == 0:
        return out + bf16(p + "mlp.", DENSE)
    m = p + "block_sparse_moe."
    out += bf16(m, MOE) + [(m + "gate.e_score_correction_bias", "F32", [896])]
    return out + [(f"{m}experts.{e}.{name}", "U8", shape) for e in range(896) for name, shape in EXPERT]


def released_shards():
    yield from map(released_layer, range(93))
    yield bf16("language_model.", GLOBALS)
    yield bf16("mm_projector.", PROJECTOR)
    blocks = {f"encoder.blocks.{b}.{name}": shape for b in range(27) for name, shape in BLOCK.items()}
    yield bf16("vision_tower.", VISION | blocks)


TABLE = """\
shards / tensors              96 / 497,220
payload bytes                 1,560,860,324,864
file bytes, headers included  1,560,936,091,448
routed experts                896 x 92 layers = 82,432; 17,547,264 bytes each; 1,446,456,066,048 together
trunk                         108,811,877,376 bytes; largest layer run 2,341 MB (layer 0)
embed_tokens + lm_head        4,697,620,480 bytes
norm, output_attn_res_*       43,008 bytes
mm_projector / vision_tower   92,289,024 / 802,428,928 bytes (3 / 165 tensors), not part of the text stack
parameters                    2.78T total, 104B active per token; 56,743,648,000 always active"""

MEASURE = """
import sys
from k3lib.checkpoint import Checkpoint
def peak():
    try:
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    except OSError:
        return 0
before = peak()
with Checkpoint(sys.argv[1]) as c:
    print(peak() - before)
    runs = c.contiguity()
    print(len(runs.layers), runs.broken_layers, runs.experts, runs.broken_experts)
    print(c.census(16).table())
"""


def test_the_release(tmp_path):
    """The exact census of the released shape.

    The process may grow by 40 MB at most while it indexes 497,220 tensors and reads their list.
    """
    places = {}
    for i, tensors in enumerate(released_shards(), 1):
        tensors.sort(key=lambda t: (-ITEMSIZE[t[1]], t[0]))  # the order that gives the published file sizes
        head = header_bytes(tensors)
        with open(tmp_path / f"model-{i:05d}-of-000096.safetensors", "wb") as file:
            file.write(head)
            file.truncate(len(head) + sum(prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in tensors))
        places |= {name: os.path.basename(file.name) for name, _, _ in tensors}
    index = {"metadata": {"total_size": 1_560_860_324_864}, "weight_map": places}
    (tmp_path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))
    made = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert made.returncode == 0, made.stderr
    grown, runs, table = made.stdout.split("\n", 2)
    assert int(grown) <= 40e6, f"the index grew the process by {int(grown) / 1e6:.1f} MB"
    assert runs == "93 {} 82432 []"
    assert table.rstrip() == TABLE
