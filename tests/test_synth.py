"k3lib.synth: the released layout to the byte, bytes that only seed and name decide, and nothing half-written."
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from common import CONTROL_TOKENS, FIXTURES, MODEL
from small import rewritten

import k3lib
from k3lib import synth as module
from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.fileio import UsageError
from k3lib.header import ITEMSIZE
from k3lib.mxfp4 import decode
from k3lib.synth import (
    SynthError,
    draw,
    file_order,
    files,
    head_rows,
    live_experts,
    live_heads,
    plan_shard,
    random_bits,
    row_ranges,
    synth,
    to_bf16,
)
from k3lib.system import disk_bytes
from k3lib.tensors import (
    EMBED,
    HEAD,
    Tensor,
    expert_name,
    global_tensors,
    place_of,
    tensor_name,
    text_tensors,
)

# full width in little: every kind of tensor, large enough to have holes
THIN = dict(layers=4, experts=32, vocab=300, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=256,
            routed_expert_hidden_size=512, attn_res_block_size=2)
# no two dimensions alike, none a multiple of 16 where it may be otherwise
ODD = dict(layers=6, experts=7, vocab=101, hidden_size=50, attn_res_block_size=4, intermediate_size=70,
           num_attention_heads=3, q_lora_rank=22, kv_lora_rank=18, qk_nope_head_dim=10, qk_rope_head_dim=6,
           v_head_dim=14, num_experts_per_token=3, num_shared_experts=1, moe_intermediate_size=32,
           routed_expert_hidden_size=96, kda_num_heads=5, kda_head_dim=12, kda_conv_kernel=3, first_k_dense_replace=2,
           rms_norm_eps=1e-6, routed_scaling_factor=2.5)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    "The Recipe of the full preset, seed 0."
    return module.write_config(tmp_path_factory.mktemp("full"), "full", 0)


@pytest.fixture(scope="module")
def thin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thin") / "model"
    return synth(folder, "full", **THIN), module.Recipe(read_config(folder), True, 0)


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# The released layout


def test_released_numbers_are_those_of_the_fixture(released):
    assert released.config == read_config(FIXTURES / "k3") and released.sparse


def test_all_released_names_and_the_published_sizes(released):
    "Four whole files and one of each kind of layer, to the byte; names and payload of all 96."
    published = [int(line.split()[1]) for line in (FIXTURES / "k3" / "shard_sizes.tsv").read_text().splitlines()]
    lists = list(files(released.config, True))
    assert len(lists) == len(published) == 96 and sum(published) == 1_560_936_091_448
    names = [name for tensors in lists for name, _, _ in tensors]
    assert len(names) == len(set(names)) == 497_220
    kinds = Counter((dtype, shape) for tensors in lists for _, dtype, shape in tensors)
    payload = sum(n * math.prod(shape) * ITEMSIZE[dtype] for (dtype, shape), n in kinds.items())
    assert payload == 1_560_860_324_864
    for i in (0, 1, 3, 10, 11, 92, 93, 94, 95):
        shard = plan_shard(released, "", lists[i])
        assert shard.size == published[i], f"file {i + 1} has {shard.size:,} bytes, published {published[i]:,}"


def test_full_preset_stays_below_six_gigabytes(released):
    lists = list(files(released.config, True))
    kda, mla = (plan_shard(released, "", lists[L]).pages() for L in (1, 3))
    rest = sum(plan_shard(released, "", lists[i]).pages() for i in (0, 93, 94, 95))
    index = 497_220 * 160
    assert 68 * kda + 24 * mla + rest + index < 6e9


def test_order_inside_a_file():
    dtypes = {"b": "U8", "c": "BF16", "a": "U8", "z": "F32", "b.10": "BF16", "b.2": "BF16"}
    tensors = [Tensor(name, dtype, (1,)) for name, dtype in dtypes.items()]
    assert [t.name for t in file_order(tensors)] == ["z", "b.10", "b.2", "c", "a", "b"]


# Values


def test_bf16_rounds_to_nearest_and_ties_to_even():
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.3895314e38, 0, -0.0], np.float32)
    assert [hex(b) for b in to_bf16(x)] == ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0xbf80", "0x7f7f", "0x0", "0x8000"]


def test_draws_fill_their_interval_and_no_more():
    x = draw(random_bits(0, "a"), "F32", 1 << 17, -0.3, 0.5)
    assert x.dtype == np.float32 and -0.3001 < x.min() < -0.2999 and 0.4999 < x.max() < 0.5001
    assert abs(x.mean() - 0.1) < 0.002 and abs(x.std() - 0.8 / 12**0.5) < 0.002  # 10 standard errors at most
    assert set(draw(random_bits(0, "a"), "U8", 5000, 119, 120).tolist()) == {119, 120}
    assert len(set(draw(random_bits(0, "a"), "U8", 20000, 0, 255).tolist())) == 256
    assert (draw(random_bits(0, "a"), "F32", 9, 7.7, 7.7) == np.float32(7.7)).all()
    bits = draw(random_bits(0, "a"), "BF16", 99, -0.3, 0.5)
    assert bits.dtype == np.uint16 and (bits == to_bf16(x[:99].copy())).all()


def test_bits_belong_to_names():
    def bits(seed, name):
        return random_bits(seed, name).random_raw(4).tolist()

    one = bits(3, "a.weight")
    assert one == bits(3, "a.weight") != bits(3, "b.weight") and one != bits(4, "a.weight")


def test_a_seed_stays_the_model_it_was():
    "Fails if a change gives every seed another model: ids and digests noted elsewhere would then mean nothing."
    bits = draw(random_bits(0, "language_model.model.norm.weight"), "BF16", 4, 0.75, 1.25)
    assert bits.tolist() == [0x3F59, 0x3F98, 0x3F7D, 0x3F94]
    assert draw(random_bits(0, "x"), "U8", 8, 0, 255).tolist() == [212, 207, 255, 124, 169, 82, 25, 161]


def test_same_seed_same_bytes_other_seed_others(tmp_path):
    for name, seed in ("a", 7), ("b", 7), ("c", 8):
        synth(tmp_path / name, "oracle", seed=seed)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    same = {name for name in a if a[name] == c[name]}
    assert same == {"model.safetensors.index.json", "tokenizer_config.json"}


def test_a_file_alone_and_chunks_of_any_order(tmp_path):
    "A shard does not depend on the others having been written."
    synth(tmp_path / "whole", "oracle")
    (tmp_path / "alone").mkdir()
    recipe = module.write_config(tmp_path / "alone", "oracle", 0)
    shard = module.plan_shards(recipe)[9]
    module.write_shard(tmp_path / "alone", shard, 0, threading.Event())
    assert (tmp_path / "alone" / shard.file).read_bytes() == (tmp_path / "whole" / shard.file).read_bytes()


# What a reader finds


def test_a_reader_finds_what_the_config_implies(tmp_path):
    for name, changes in ("oracle", {}), ("odd", ODD), ("one", {"layers": 1}):
        done = synth(tmp_path / name, "oracle", **changes)
        config = read_config(tmp_path / name)
        with Checkpoint(tmp_path / name) as ckpt:
            wanted = {n: (dtype, shape) for n, dtype, shape in text_tensors(config)}
            text = [n for n in ckpt.names() if n.startswith("language_model.")]
            assert {n: (ckpt.extent(n).dtype, ckpt.extent(n).shape) for n in text} == wanted
            census = ckpt.census()
            for field in "shards", "tensors", "payload_bytes", "file_bytes":
                assert getattr(done, field) == getattr(census, field), field
            assert census.mm_projector_tensors == census.vision_tower_tensors == 2
            assert ckpt.contiguity().broken_layers == {} and ckpt.contiguity().broken_experts == []
            heads = config.kda_num_heads
            tails = [ckpt.tensor(n)[heads:] for n in ckpt.names() if n.endswith("A_log")]
            assert all((tail == np.float32(7.7)).all() for tail in tails)
    config = read_config(tmp_path / "odd")
    assert (config.kda_num_heads, config.num_attention_heads, sorted(config.mla_layers)) == (5, 3, [3, 5])


def test_the_index_file_agrees_with_the_headers(tmp_path):
    synth(tmp_path / "m", "oracle", layers=2)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    with Checkpoint(tmp_path / "m") as ckpt:
        assert index["weight_map"] == {name: Path(ckpt.extent(name).file).name for name in ckpt.names()}
        assert index["metadata"] == {"total_size": ckpt.census().payload_bytes}


def test_it_says_that_it_is_synthetic(tmp_path):
    done = synth(tmp_path / "m", "oracle", seed=5, layers=1)
    marker = json.loads((tmp_path / "m" / "config.json").read_text())["synthetic"]
    assert (marker["generator"], marker["preset"], marker["seed"]) == ("k3 synth", "oracle", 5)
    assert "synthetic" in str(done) and f"{done.disk_bytes:,} bytes on disk" in str(done)


def test_control_tokens_have_the_released_ids():
    table = module.tokenizer_tree(163_840)["added_tokens_decoder"]
    assert {int(i): entry["content"] for i, entry in table.items()} == CONTROL_TOKENS
    assert [i for i, entry in table.items() if not entry["special"]] == ["163587", "163588", "163589"]


def test_a_vocabulary_copied_in_is_taken(tmp_path):
    synth(tmp_path / "m", "oracle")
    shutil.copy(MODEL / "tiktoken.model", tmp_path / "m")
    tokenizer = k3lib.Tokenizer(tmp_path / "m", 512)
    assert tokenizer.stop_ids == (497, 498) and tokenizer.decode(tokenizer.encode("hello")) == b"hello"


# Holes


def test_a_sparse_layer_has_values_where_they_meet(thin):
    done, r = thin
    assert done.disk_bytes < 0.25 * done.file_bytes
    with Checkpoint(done.folder) as ckpt:
        for L, kind, shorts in ((0, "kda", "q_proj k_proj v_proj g_proj f_b_proj"),
                                (3, "mla", "q_b_proj kv_b_proj g_proj")):
            for short in shorts.split():
                name = tensor_name(L, kind, short)
                w = ckpt.raw(name)
                if w.nbytes > module.WHOLE:
                    heads = np.unique(np.flatnonzero(w.any(axis=1)) // head_rows(r.config, place_of(name)))
                    assert tuple(heads) == live_heads(r, L), f"{name}: heads {heads}, expected {live_heads(r, L)}"
        alive = live_experts(r, 1)
        assert len(alive) == module.EXPERTS
        for expert in range(32):
            w1, w3 = (decode(ckpt.raw(expert_name(1, expert, w)), ckpt.raw(expert_name(1, expert, f"{w}_scale")))
                      for w in ("w1", "w3"))
            live = w1.any(axis=1)
            assert (live == w3.any(axis=1)).all(), f"expert {expert}: w1 and w3 live in different rows"
            assert live.sum() == (module.EXPERT_ROWS if expert in alive else 0)
        bias = ckpt.tensor(tensor_name(1, "moe", "e_score_correction_bias"))
        assert (np.flatnonzero(bias > 0.2) == alive).all()


def test_holes_take_no_disk_and_read_as_zeros(thin):
    done, r = thin
    for shard in module.plan_shards(r)[:4]:
        path = done.folder / shard.file
        assert path.stat().st_size == shard.size
        took, planned = disk_bytes(path.stat()), shard.pages(os.statvfs(path).f_frsize)
        # A file system may count its list of extents, some bytes each: 1% and two pages are plenty.
        assert took <= 1.01 * planned + 8192, f"{shard.file} takes {took:,} bytes on disk, planned {planned:,}"
        data = np.fromfile(path, np.uint8)
        for begin, nbytes in [(0, len(shard.header)), *(span for tensor in shard.filled for span in tensor.spans())]:
            data[begin:begin + nbytes] = 0
        assert not data.any(), f"{shard.file}: byte {data.argmax():,} is written but not planned"


def test_every_byte_of_a_slice_is_planned(tmp_path):
    done = synth(tmp_path / "m", "slice", layers=2, vocab=64, hidden_size=64, intermediate_size=64, kda_num_heads=2,
                 num_attention_heads=2, moe_intermediate_size=64, routed_expert_hidden_size=64)
    assert done.value_bytes >= done.payload_bytes
    with Checkpoint(tmp_path / "m") as ckpt:
        for name in ckpt.names():
            bits = ckpt.raw(name).ravel()
            assert (bits != 0).mean() > 0.95, f"{name}: {(bits == 0).mean():.0%} zeros"


def test_live_ids_of_both_tables_are_the_same_and_reach_far(released):
    tables = {tensor.name: row_ranges(released, tensor) for tensor in global_tensors(released.config)}
    embed, head = ({i for first, rows, _, _ in tables[name] for i in range(first, first + rows)}
                   for name in (EMBED, HEAD))
    assert embed == head and {5, 9, 17, 3, 11, 163_584} <= embed and len(embed) > 6000
    loud = max(rows.high for rows in tables[HEAD])
    last = tables[HEAD][-1]
    assert (last.first, last.rows) == (163_584, 256) and last.high < loud / 50, "an end id may be generated by accident"


# Refusals, and nothing left behind


@pytest.mark.parametrize("changes, message", [
    ({"preset": "huge"}, "preset is 'huge', expected one of full, slice, oracle"),
    ({"preset": ["full"]}, "preset is ['full'], expected one of full, slice, oracle"),
    ({"preset": None}, "preset is None, expected one of full, slice, oracle"),
    ({"seed": True}, "seed is True, expected an integer in 0.."),
    ({"seed": 1.0}, "seed is 1.0, expected an integer in 0.."),
    ({"seed": np.bool_(True)}, ", expected an integer in 0.."),
    ({"layers": "4"}, "layers is '4', expected an integer in 1..4,096"),
    ({"experts": [16]}, "experts is [16], expected an integer in 1..65,536"),
    ({"vocab": 10**400}, "..., expected an integer in 1..16,777,216"),
    ({"layers": 0}, "layers is 0, expected an integer in 1..4,096"),
    ({"layers": True}, "layers is True, expected an integer in 1..4,096"),
    ({"layers": 2.5}, "layers is 2.5, expected an integer in 1..4,096"),
    ({"experts": 3}, "experts is 3, expected an integer in 4..65,536"),
    ({"vocab": -1}, "vocab is -1, expected an integer in 1..16,777,216"),
    ({"seed": -1}, "seed is -1, expected an integer in 0..18,446,744,073,709,551,615"),
    ({"seed": "0"}, "seed is '0', expected an integer in 0.."),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number in 1e-12..1.0"),
    ({"moe_intermediate_size": 40}, "moe_intermediate_size is 40, expected a multiple of 32"),
    ({"first_k_dense_replace": 14}, "first_k_dense_replace is 14, expected at most num_hidden_layers = 13"),
    ({"depth": 3}, "argument 'depth' is unknown, expected one of vocab, hidden_size, layers"),
])
def test_refusals_name_argument_found_and_expected(tmp_path, changes, message):
    with pytest.raises(SynthError) as caught:
        synth(tmp_path / "m", **{"preset": "oracle"} | changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", [5, None, b"m", "", ["m"], True])
def test_a_folder_that_is_no_path_is_refused_by_name(folder):
    with pytest.raises(UsageError, match=r"^folder is .*, expected a path"):
        synth(folder, "oracle", layers=1)


def test_numbers_of_numpy_are_numbers(tmp_path):
    synth(tmp_path / "a", "oracle", seed=np.uint8(3), layers=np.int64(1), rms_norm_eps=np.float32(0.5))
    synth(tmp_path / "b", "oracle", seed=3, layers=1, rms_norm_eps=0.5)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("made", ["folder", "file", "empty folder"])
def test_a_folder_that_another_program_fills_meanwhile(tmp_path, monkeypatch, made):
    "It keeps what the other wrote; an empty one is filled."
    target, really = tmp_path / "m", module.write_index

    def write_index(folder, shards):
        really(folder, shards)
        target.write_text("theirs") if made == "file" else target.mkdir()
        if made == "folder":
            (target / "file").write_text("theirs")

    monkeypatch.setattr(module, "write_index", write_index)
    if made == "empty folder":
        assert synth(target, "oracle", layers=1).folder == target
    else:
        with pytest.raises(SynthError, match="m: another program has filled it meanwhile, expected it to stay empty$"):
            synth(target, "oracle", layers=1)
        assert (target / "file" if made == "folder" else target).read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_two_threads_make_two_checkpoints_at_once(tmp_path):
    "Into one folder: one of them wins, whole, and the other is refused, whichever is first."
    barrier, ended = threading.Barrier(2), []

    def run(seed):
        barrier.wait(60)
        try:
            ended.append((seed, synth(tmp_path / "m", "oracle", seed=seed, layers=2)))
        except SynthError as error:
            ended.append((None, str(error)))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    [thread.start() for thread in threads], [thread.join(100) for thread in threads]
    (winner,) = (seed for seed, _ in ended if seed is not None)
    assert len(ended) == 2 and list(tmp_path.iterdir()) == [tmp_path / "m"]
    synth(tmp_path / "alone", "oracle", seed=winner, layers=2)
    assert contents(tmp_path / "m") == contents(tmp_path / "alone")


def test_a_folder_that_holds_anything_is_left_alone(tmp_path):
    target = tmp_path / "m"
    target.mkdir()
    (target / "mine").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for path in target, tmp_path / "file":
        with pytest.raises(SynthError, match="(exists and is not empty|is a file), expected a new or an empty folder"):
            synth(path, "oracle", layers=1)
    assert contents(target) == {"mine": b"keep"} and sorted(p.name for p in tmp_path.iterdir()) == ["file", "m"]
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder to make m in"):
        synth(tmp_path / "nowhere" / "m", "oracle", layers=1)


def test_an_empty_folder_or_a_link_to_one_is_filled(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert synth(tmp_path / "link", "oracle", layers=1).folder == (tmp_path / "real").resolve()
    assert (tmp_path / "link").is_symlink() and len(contents(tmp_path / "real")) == 4 + 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "real"]


def test_too_little_room_is_known_before_the_first_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "write_shards", lambda *_: pytest.fail("began to write"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(SynthError, match=r"1.00 MB free, expected at least 7\.\d+ MB$"):
        synth(tmp_path / "m", "oracle")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000_000))
    assert module.keeps_holes(tmp_path)
    monkeypatch.setattr(module, "keeps_holes", lambda folder: False)
    with pytest.raises(SynthError, match=r"expected at least 31\.\d+ GB, since this file system keeps no holes"):
        synth(tmp_path / "m", "full", layers=8, experts=128)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()],
                         ids=["disk full", "Ctrl-C"])
def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch, error):
    drawn = []

    def failing(*args):
        drawn.append(args)
        if len(drawn) == 200:
            raise error
        return draw(*args)

    monkeypatch.setattr(module, "draw", failing)
    (tmp_path / "m").mkdir()
    with pytest.raises(type(error)):
        synth(tmp_path / "m", "oracle")
    assert list(tmp_path.iterdir()) == [tmp_path / "m"] and list((tmp_path / "m").iterdir()) == []


def test_ctrl_c_right_after_the_folder_was_made_leaves_none(tmp_path, monkeypatch):
    mkdir, made = Path.mkdir, []

    def mkdir_interrupted(path, *args, **options):
        mkdir(path, *args, **options)
        made.append(path.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "mkdir", mkdir_interrupted)
    with pytest.raises(KeyboardInterrupt):
        synth(tmp_path / "m", "oracle")
    assert len(made) == 1 and re.fullmatch(r"\.m\.\w{32}\.part", made[0]) and list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    what = "'slice', layers=2, experts=16, vocab=64, intermediate_size=2048"  # 2.1 GB, seconds of work
    target = str(tmp_path / "m")
    code = f"from k3lib.synth import synth; synth({target!r}, {what}, progress=lambda t: print(t, flush=True))"
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline().startswith("synthetic checkpoint")
    assert [re.sub(r"\w{32}", "", p.name) for p in tmp_path.iterdir()] == [".m..part"]
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    asked = time.monotonic()
    lines, text = run.communicate(timeout=60)
    assert run.returncode != 0 and "KeyboardInterrupt" in text
    assert time.monotonic() - asked < 4 and "100%" not in lines, "it went on writing"
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_one_of_usage():
    "So the command ends with code 2, and code that expects a ValueError goes on working."
    assert issubclass(SynthError, UsageError) and issubclass(SynthError, ValueError) and SynthError.exit_code == 2


def test_progress_begins_with_the_size_and_ends_with_all_of_it(tmp_path):
    lines = []
    synth(tmp_path / "m", "oracle", progress=lines.append)
    assert lines[0] == ("synthetic checkpoint, preset oracle, seed 0: 1,496 tensors in 16 files of 6.81 MB, "
                        "6.62 MB of it values")
    assert lines[-1].startswith("100%: 6.62 MB of 6.62 MB") and 2 <= len(lines) <= 11


# The engine on it


def decoded(folder, ids=(5, 9, 17, 3, 11), tokens=8):
    "Greedy ids, logits [tokens, vocab], and the routing {layer: chosen experts} of each step."
    logits, routes = [], []

    def watch(name, layer, value):
        if name == "router":
            routes[-1][layer] = frozenset(value[0].ravel().tolist())

    with k3lib.load(folder, ram="1GB") as model:
        got = list(model.generate(list(ids), max_new_tokens=tokens, on_logits=lambda x: logits.append(x.copy())))
        model.reset()
        for i in (*ids, *got):
            routes.append({})
            model.forward([i], watch=watch)
    return got, np.stack(logits), routes


def test_the_decode_is_not_degenerate(tmp_path):
    for name, preset, changes in ("oracle", "oracle", {}), ("odd", "oracle", ODD), ("thin", "full", THIN):
        synth(tmp_path / name, preset, **changes)
        ids, logits, routes = decoded(tmp_path / name)
        best = np.sort(logits, axis=1)[:, -2:]
        assert len(set(ids)) >= 6, f"{name}: ids {ids}"
        assert (best[:, 1] - best[:, 0]).min() > 1e-3, f"{name}: margins {best[:, 1] - best[:, 0]}"
        changed = np.mean([a[L] != b[L] for a, b in zip(routes, routes[1:]) for L in a])
        assert changed > 0.9, f"{name}: only {changed:.0%} of the choices of experts change from token to token"


def test_another_order_in_the_files_decodes_to_the_same_bits(tmp_path):
    synth(tmp_path / "m", "oracle", seed=2)
    rewritten(tmp_path / "m", tmp_path / "other")
    with Checkpoint(tmp_path / "other") as other:
        assert len(other.contiguity().broken_layers) > 5
    ids, logits, _ = decoded(tmp_path / "m")
    same, others, _ = decoded(tmp_path / "other")
    assert ids == same and logits.tobytes() == others.tobytes()
