"Plan, memory accounting, sizes: what the last chapter promises before a token is decoded."
import dataclasses
import weakref

import numpy as np
import pytest
from common import MODEL, least
from small import write

import k3lib
from k3lib import engine, memory, plan
from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.fileio import CheckpointError, UsageError


@pytest.mark.parametrize("text, value", [("8GB", 8 * 10**9), ("8GiB", 8 * 2**30), ("900MB", 9 * 10**8), ("1.5 GB", 15 * 10**8), (12345, 12345), ("2kb", 2000)])
def test_sizes(text, value):
    assert memory.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 gigs", "1e9", "nan", "8GBs", None])
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(UsageError, match="is not a size"):
        memory.parse_size(text)


def group(folder, names, limit, usage, stat):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, usage, stat)):
        (folder / name).write_text(f"{text}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
V2 = ("memory.max", "memory.current", "memory.stat")


def test_cgroup_v2_nested_takes_every_limit(tmp_path):
    group(tmp_path / "a" / "b", V2, "max", 10, "inactive_file 0")
    group(tmp_path / "a", V2, 1000, 400, "anon 5\ninactive_file 100")
    (tmp_path / "self").write_text("0::/a/b\n")
    assert list(memory.cgroup_free(tmp_path / "self", tmp_path)) == [700]


def test_cgroup_v1_nested_in_a_hybrid_system(tmp_path):
    group(tmp_path / "memory" / "x" / "y", V1, 900, 100, "inactive_file 1\ntotal_inactive_file 30")
    group(tmp_path / "memory" / "x", V1, 500, 450, "total_inactive_file 0")
    (tmp_path / "self").write_text("5:cpu:/x/y\n4:memory:/x/y\n0::/\n")
    assert list(memory.cgroup_free(tmp_path / "self", tmp_path)) == [830, 50]


def test_a_cgroup_that_is_too_small_refuses_the_plan(monkeypatch):
    monkeypatch.setattr(memory, "cgroup_free", lambda: [1_000_000])
    with pytest.raises(plan.PlanError, match="only 1.0 MB of memory are free"):
        plan.make_plan(read_config(MODEL), Checkpoint(MODEL), 10**9, 32)


def test_the_number_a_refusal_names_would_do():
    config, checkpoint = read_config(MODEL), Checkpoint(MODEL)
    with pytest.raises(plan.PlanError, match="at least") as refused:
        plan.make_plan(config, checkpoint, 1000, 32)
    named = int(str(refused.value).rsplit("at least ", 1)[1].split(" MB")[0]) * 10**6
    assert plan.make_plan(config, checkpoint, named + 4_000_000, 32).total <= named + 4_000_000  # the process grows a little meanwhile
    with pytest.raises(plan.PlanError):
        plan.make_plan(config, checkpoint, refused.value.least - 4_000_000, 32)


def test_a_plan_never_exceeds_its_budget_and_more_pins_more(steady):
    config, checkpoint = read_config(MODEL), Checkpoint(MODEL)
    floor = least() + 2_000_000
    shares = []
    for extra in range(0, 12_000_000, 1_000_000):
        found = plan.make_plan(config, checkpoint, floor + extra, 32)
        assert found.total <= floor + extra
        shares.append(found.pinned_bytes)
    assert shares == sorted(shares) and shares[0] < shares[-1] == found.trunk_bytes


def test_a_longer_context_costs_the_latent_cache_alone():
    config, checkpoint = read_config(MODEL), Checkpoint(MODEL)
    one, two = (plan.make_plan(config, checkpoint, 10**9, n).parts for n in (1000, 2000))
    assert two["latent cache, 2000 positions"] - one["latent cache, 1000 positions"] == 1000 * plan.position_bytes(config)


def test_released_sizes():
    config = read_config(MODEL.parents[1] / "k3")
    assert plan.state_bytes(config) == 69 * 4 * (96 * 128 * 128 + 3 * 96 * 128 * 3)
    assert plan.position_bytes(config) == 24 * 576 * 4


def test_a_context_that_is_full_refuses_before_it_reads():
    model = k3lib.load(MODEL, context=4)
    model.prefill([1, 2, 3])
    before = dict(model.report.bytes_read)
    with pytest.raises(UsageError, match="context of 4"):
        model.prefill([4, 5])
    assert model.report.bytes_read == before and model.position == 3
    model.close()


def test_ties_go_to_the_lower_id_and_an_end_id_ends(monkeypatch):
    model = k3lib.load(MODEL)
    logits = np.zeros(512, np.float32)
    logits[[7, 9]] = 1
    monkeypatch.setattr(model, "prefill", lambda ids: logits)
    assert list(model.generate([1], 3)) == [7, 7, 7]
    model.stop = frozenset([7])
    assert list(model.generate([1], 3)) == [7]
    model.close()


def test_report_is_plain_data():
    import json
    model = k3lib.load(MODEL)
    list(model.generate([1, 2], 2))
    tree = json.loads(json.dumps(model.report.as_dict()))
    model.close()
    assert set(tree) == {f.name for f in dataclasses.fields(k3lib.Report)} | {"compute_seconds"}
    assert 12 * 4 < tree["expert_requests"] <= 3 * 12 * 4 and tree["expert_hits"] < tree["expert_requests"]


@pytest.mark.skipif(memory.read_call_bytes() is None, reason="this system does not count the bytes of read calls")
def test_bytes_read_are_those_the_kernel_counted():
    model = k3lib.load(MODEL)
    list(model.generate([1, 2], 2))
    report = model.report
    model.close()
    assert sum(report.bytes_read.values()) <= report.asked_bytes
    # The kernel also counts what other code read meanwhile (modules, caches), and gives no bytes past a file's end.
    assert abs(report.kernel_bytes - report.asked_bytes) < 2_000_000
    assert report.kernel_bytes > sum(report.bytes_read.values())


def test_a_sequence_that_was_overtaken_is_not_continued():
    model = k3lib.load(MODEL)
    first = model.generate([304, 206, 32], 3)
    next(first)
    second = model.generate([304, 206, 32], 3)
    one = next(second)
    with pytest.raises(RuntimeError, match="another sequence"):
        next(first)
    assert [one, *second] == list(model.generate([304, 206, 32], 3))
    model.close()


@pytest.mark.parametrize("ids", [[304.5], "123", b"12", ["3"], [True], None, [float("nan")], [[1, 2]], 512, -1, []])
def test_what_is_no_id_is_refused(ids):
    model = k3lib.load(MODEL)
    with pytest.raises(UsageError):
        model.prefill(ids)
    assert model.position == 0
    model.close()


def logits(ram, trunk=None):
    "Bytes of six steps' logits, and the files that were read."
    rows, model = [], k3lib.load(MODEL, ram, trunk, context=32)
    list(model.generate([304, 206, 32], 6, on_logits=lambda row: rows.append(row.tobytes())))
    model.close()
    return b"".join(rows), model.report


def test_a_packed_trunk_changes_where_bytes_come_from_and_no_bit(tmp_path, steady):
    engine.pack_trunk(MODEL, tmp_path / "trunk")
    plain, report = logits("1GB")
    assert report.trunk is None and "read from the model's own files" in report.text()
    for ram in ("1GB", least() + 1_500_000):  # all pinned; hardly anything
        packed, report = logits(ram, tmp_path / "trunk")
        assert packed == plain, f"ram={ram}: other logits"
        assert report.trunk == str(tmp_path / "trunk") and f"packed in {tmp_path}" in report.text()
        assert {f"model-{i:05}-of-000014.safetensors" for i in range(1, 15)} <= set(report.files)
    assert report.plan.pinned_bytes < report.plan.trunk_bytes


def test_a_pack_that_was_broken_off_is_no_trunk_until_it_is_taken_up_again(tmp_path, monkeypatch):
    class Broken:
        shown = 0

        def update(self, nbytes):
            self.shown += 1
            if self.shown == 100:
                raise KeyboardInterrupt

        __enter__, __exit__ = lambda self: self, lambda self, *_: None

    with monkeypatch.context() as patch:
        patch.setattr(engine, "progress_bar", lambda *_, **how: Broken())
        with pytest.raises(KeyboardInterrupt):
            engine.pack_trunk(MODEL, tmp_path / "trunk")
    there = {file: file.stat().st_mtime_ns for file in (tmp_path / "trunk").glob("*.safetensors")}
    assert 1 < len(there) < 14
    with pytest.raises(CheckpointError, match="missing"):
        k3lib.load(MODEL, trunk=tmp_path / "trunk")
    done = engine.pack_trunk(MODEL, tmp_path / "trunk")
    assert f"{14 - len(there)} written and {len(there)} found" in done
    assert all(file.stat().st_mtime_ns == when for file, when in there.items()), "a finished file was written again"
    assert logits("1GB", tmp_path / "trunk")[0] == logits("1GB")[0]
    assert not list((tmp_path / "trunk").glob("*.part"))


def test_the_trunk_of_another_model_is_refused_also_where_only_its_numbers_differ(tmp_path):
    engine.pack_trunk(write(tmp_path / "other"), tmp_path / "trunk")
    with pytest.raises(CheckpointError, match="not that of"):
        k3lib.load(MODEL, trunk=tmp_path / "trunk")
    with pytest.raises(CheckpointError, match="another checkpoint"):
        engine.pack_trunk(MODEL, tmp_path / "trunk")


def test_tokens_are_shown_as_they_come(monkeypatch):
    happened, prefill = [], k3lib.engine.Decoder.prefill
    monkeypatch.setattr(engine.Decoder, "prefill", lambda self, ids: (happened.append("a step"), prefill(self, ids))[1])
    report = engine.decode(MODEL, ids="304,206,32,407,493,375,224,286,48,367,487,230", max_new_tokens=3, ram="1GB", show=happened.append)
    first = happened.index("a step")
    assert happened[first::2][:3] == ["a step"] * 3
    lines = happened[first + 1:first + 6:2]
    assert [line.split(", ")[0] for line in lines] == [f"   {n}: id {i}" for n, i in enumerate(report.ids, 1)] == ["   1: id 468", "   2: id 342", "   3: id 411"]
    assert happened[first + 6] == "generated ids: 468,342,411"
    text = "".join(eval(line.split(" s, ", 1)[1]) for line in lines)
    assert happened[first + 7] == f"generated text: {text!r}" and text


def test_each_step_tells_what_it_read(steady):
    model = k3lib.load(MODEL, least() + 1_500_000, context=32)
    list(model.generate([1, 2], 3))
    report = model.report
    model.close()
    streamed = report.plan.trunk_bytes - report.plan.pinned_bytes
    assert len(report.step_bytes) == len(report.step_seconds) == 3
    for step in report.step_bytes:
        assert set(step) == {"trunk", "experts", "other"}
        assert 0.5 * streamed < step["trunk"] + step["other"] < 1.5 * streamed  # a pass, give or take what the ring holds
    assert "in the last step" in report.text()


def test_a_closed_model_says_so_and_gives_its_memory_back():
    with k3lib.load(MODEL, "1GB", context=8) as model:
        list(model.generate([304, 206], 2))
        held = weakref.ref(model.trunk.resident["language_model.model.norm.weight"])
        assert model.trunk.resident and model.experts._resident
    assert not model.trunk.resident and not model.experts._memory and held() is None
    for call in (lambda: model.step(1), lambda: list(model.generate([1], 1)), model.reset):
        with pytest.raises(RuntimeError, match="this model is closed"):
            call()
    assert len(model.report.ids) == 2, "what was done can still be told"
    model.close()


def test_an_id_out_of_range_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(engine, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match="token id 512 is out of range: the vocabulary has ids 0..511"):
        engine.decode(MODEL, ids="1,512", show=lambda text: None)


@pytest.mark.parametrize("ids, ram", [("9" * 5000, "1GB"), ("1", "9" * 400)])
def test_numbers_of_any_length_are_refused_by_name(ids, ram):
    with pytest.raises(UsageError, match="is not a"):
        engine.decode(MODEL, ids=ids, ram=ram, show=lambda text: None)
