"The engine: what load refuses, one sequence and one caller at a time, greedy decoding, a report of what was measured."
import dataclasses
import itertools
import json
import shutil
import threading
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
from common import MODEL, least
from small import write

import k3lib
from k3lib import cli, system
from k3lib.fileio import CheckpointError, UsageError
from k3lib.report import Step, Steps

IDS, MORE = [304, 206, 32, 407, 493], [375, 224, 286]


@pytest.fixture(scope="module")
def model():
    with k3lib.load(MODEL, "1GB", context=32) as model:
        yield model


# What is read


@pytest.mark.parametrize("ids", [
    [304.5], "123", b"12", ["3"], [True], None, [float("nan")], [[1, 2]], [512], 512, -1, [],
])
def test_what_is_no_id_is_refused(model, ids):
    model.reset()
    with pytest.raises(UsageError):
        model.prefill(ids)
    assert model.position == 0


@pytest.mark.parametrize("ids", [7, [7], (7,), np.array([7]), np.int64(7), iter([7])])
def test_what_is_an_id_is_read(model, ids):
    model.reset()
    logits = model.prefill(ids)
    assert model.position == 1 and logits.shape == (512,) and logits.dtype == np.float32


def test_a_context_that_is_full_refuses_before_it_reads():
    with k3lib.load(MODEL, context=4) as model:
        model.prefill([1, 2, 3])
        before = dict(model.report.bytes_read)
        with pytest.raises(UsageError, match="context of 4"):
            model.prefill([4, 5])
        assert model.report.bytes_read == before and model.position == 3


def test_logits_of_all_tokens_or_of_the_last(model):
    model.reset()
    rows = model.forward(IDS)
    model.reset()
    last = model.forward(IDS, last_only=True)
    model.reset()
    assert rows.shape == (5, 512) and last.shape == (1, 512)
    assert rows[-1].tobytes() == last.tobytes() == model.prefill(IDS).tobytes()


def test_the_end_of_each_layer_of_each_pass_is_told(model, monkeypatch):
    told = []
    monkeypatch.setattr(model, "on_layer", told.append)
    monkeypatch.setattr(model, "chunk", 2)
    model.reset()
    model.prefill(IDS)  # three passes
    assert told == [*range(13)] * 3


def test_ids_are_read_without_a_list_of_them():
    "An endless iterator of ids is refused when the context is full."
    with k3lib.load(MODEL, "1GB", context=8) as model, pytest.raises(UsageError, match="more than 8 positions do not"):
        model.prefill(itertools.repeat(7))


def test_chunks_fill_one_array_of_logits(model, monkeypatch):
    model.reset()
    whole = model.forward(IDS)
    monkeypatch.setattr(model, "chunk", 2)
    model.reset()
    chunked = model.forward(IDS)
    assert chunked.tobytes() == whole.tobytes() and chunked.shape == (5, 512) and chunked.base is None


# Greedy decoding


def test_ties_go_to_the_lower_id_and_an_end_id_ends(model, monkeypatch):
    logits = np.zeros(512, np.float32)
    logits[[7, 9]] = 1
    monkeypatch.setattr(model, "prefill", lambda ids: logits)
    model.reset()
    assert list(model.generate([1], 3)) == [7, 7, 7]
    model.reset()
    monkeypatch.setattr(model, "stop", frozenset([7]))
    assert list(model.generate([1], 3)) == [7]


def test_the_ids_of_the_config_and_the_vocabulary_end_an_answer(model):
    assert model.stop == {*model.config.eos_token_ids, *model.tokenizer.stop_ids} != set()


@pytest.mark.parametrize("new", [0, -1, 1.5, "many", None])
def test_a_number_of_new_tokens_that_is_none_is_refused(model, new):
    with pytest.raises(UsageError, match="max_new_tokens"):
        next(model.generate(IDS, new))


# One sequence at a time


@pytest.mark.parametrize("between", [
    lambda model, state: model.reset(),
    lambda model, state: model.step(1),
    lambda model, state: model.load_state(state),
    lambda model, state: (model.reset(), next(model.generate(IDS, 3))),
], ids=["reset", "step", "load_state", "generate"])
def test_a_generator_does_not_go_on_with_another_sequence(model, between, tmp_path):
    model.reset()
    model.save_state(tmp_path / "state")
    generated = model.generate(IDS, 4)
    next(generated)
    between(model, tmp_path / "state")
    with pytest.raises(RuntimeError, match="another sequence"):
        next(generated)


def test_a_state_saved_between_two_tokens_does_not_end_a_generator(model, tmp_path):
    model.reset()
    whole = list(model.generate(IDS, 4))
    model.reset()
    generated = model.generate(IDS, 4)
    first = [next(generated), next(generated)]
    model.save_state(tmp_path / "state")
    assert [*first, *generated] == whole


def test_a_generator_that_overtakes_another_is_not_disturbed(model):
    model.reset()
    first = model.generate(IDS, 3)
    next(first)
    model.reset()
    second = model.generate(IDS, 3)
    one = next(second)
    with pytest.raises(RuntimeError, match="another sequence"):
        next(first)
    rest = list(second)
    model.reset()
    assert [one, *rest] == list(model.generate(IDS, 3))


def test_generate_goes_on_where_the_sequence_stands(model, tmp_path):
    "After prefill, after another generate, after a saved state; never from the beginning without a word."
    model.reset()
    whole = list(model.generate(IDS, 8))
    model.reset()
    model.prefill(IDS[:2])
    first = list(model.generate(IDS[2:], 3))
    assert first == whole[:3] and model.unread == whole[2] and model.position == len(IDS) + 2
    model.save_state(tmp_path / "state")
    for ids in IDS, [], iter([whole[2] + 1]), np.array([], int):
        with pytest.raises(k3lib.EngineError, match=f"id {whole[2]}, which was generated last, has not been read"):
            next(model.generate(ids, 3))
    assert list(model.generate(iter([whole[2]]), 2)) == whole[3:5]
    model.load_state(tmp_path / "state")
    assert model.unread == whole[2] and list(model.generate([whole[2]], 2)) == whole[3:5]
    with k3lib.load(MODEL, "1GB", context=32) as other:
        other.load_state(tmp_path / "state")
        assert other.unread == whole[2] and list(other.generate([other.unread, *whole[3:5]], 3)) == whole[5:]
    model.step(whole[4])
    assert model.unread is None and next(model.generate(whole[5:6], 1)) == whole[6]
    model.reset()
    assert model.unread is None and next(model.generate(IDS, 1)) == whole[0]


# Sampling


def drawn(sampling, new=6, chunk=None, **how):
    "The ids that are drawn after IDS."
    with k3lib.load(MODEL, **{"ram": "1GB", "context": 32, **how}) as model:
        model.chunk = chunk or model.chunk
        return list(model.generate(IDS, new, sampling=sampling))


def test_a_draw_depends_on_seed_position_and_logits_alone(model, tmp_path, steady):
    sampling = k3lib.Sampling(temperature=2.0, top_k=50, seed=7)
    whole = drawn(sampling)
    assert drawn(sampling, chunk=2) == drawn(sampling, threads=1) == drawn(sampling, ram=least() + 1_500_000) == whole
    assert drawn(k3lib.Sampling(temperature=2.0, top_k=50, seed=8)) != whole != drawn(None)
    model.reset()
    list(model.generate(MORE, 2, sampling=sampling))  # draws before are of no account
    model.reset()
    assert list(model.generate(IDS, 3, sampling=sampling)) == whole[:3]
    model.save_state(tmp_path / "state")
    model.reset()
    model.load_state(tmp_path / "state")
    assert list(model.generate([model.unread], 3, sampling=sampling)) == whole[3:]


def test_greedy_is_the_default_and_what_is_no_sampling_is_refused(model):
    greedy = drawn(None)
    assert drawn(k3lib.Sampling()) == drawn(k3lib.Sampling(temperature=0)) == greedy
    for value in "greedy", 0.7, {"temperature": 1}:
        with pytest.raises(UsageError, match="sampling is .*: a k3lib.Sampling is needed"):
            model.generate(IDS, 1, sampling=value)


def test_an_interrupted_pass_is_not_continued(model, tmp_path):
    def stop(L):
        if L == 6:
            raise KeyboardInterrupt

    model.reset()
    alone = model.prefill(IDS).tobytes()
    model.reset()
    model.on_layer = stop
    with pytest.raises(KeyboardInterrupt):
        model.prefill(IDS)
    model.on_layer = lambda L: None
    for call in (lambda: model.step(1), lambda: model.prefill(IDS), lambda: model.save_state(tmp_path / "state")):
        with pytest.raises(RuntimeError, match="interrupted"):
            call()
    assert not list(tmp_path.iterdir())
    model.reset()
    assert model.prefill(IDS).tobytes() == alone


def test_a_second_thread_is_refused_and_the_first_goes_on(model, tmp_path):
    model.reset()
    alone = model.prefill(IDS).tobytes()
    inside, go_on, found = threading.Event(), threading.Event(), []

    def hold(L):
        inside.set()
        go_on.wait(60)

    model.reset()
    model.on_layer = hold
    first = threading.Thread(target=lambda: found.append(model.prefill(IDS).tobytes()))
    first.start()
    assert inside.wait(60)
    calls = [lambda: model.step(1), model.reset, lambda: model.save_state(tmp_path / "state"),
             lambda: model.load_state(tmp_path / "state"), lambda: list(model.generate([1], 1))]
    try:
        for call in calls:
            with pytest.raises(RuntimeError, match="another call"):
                call()
    finally:
        go_on.set()
        first.join()
        model.on_layer = lambda L: None
    assert found == [alone] and not list(tmp_path.iterdir())


def test_two_models_in_two_threads_share_nothing():
    found = {}

    def run(name, ids):
        with k3lib.load(MODEL, "1GB", context=32) as model:
            found[name] = list(model.generate(ids, 12))

    run("a alone", IDS), run("b alone", MORE)
    threads = [threading.Thread(target=run, args=args) for args in (("a", IDS), ("b", MORE))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["a"] == found["a alone"] and found["b"] == found["b alone"]


# Beginning and end


def test_the_plan_is_shown_before_anything_is_read_and_each_pinned_tensor_after():
    happened = []
    with k3lib.load(MODEL, "1GB", context=8, on_plan=happened.append, progress=happened.append) as model:
        assert happened[0] is model.plan
        assert sum(happened[1:]) == sum(tensor.extent.nbytes for tensor in model.plan.layout.trunk.resident.values())


@pytest.mark.parametrize("how, words", [
    (dict(ram="lots"), "is not a size"),
    (dict(threads=0), "threads is 0"),
    (dict(threads=10**6), "threads is 1000000"),
    (dict(readers=0), "readers is 0"),
    (dict(context=0), "context is 0"),
    (dict(context=2**31), "context is 2147483648"),
    (dict(prompt_tokens=-5), "prompt_tokens is -5"),
    (dict(prompt_tokens=0), "prompt_tokens is 0"),
    (dict(prompt_tokens=2.5), "prompt_tokens is 2.5"),
])
def test_what_load_refuses_by_name(how, words):
    with pytest.raises(UsageError, match=words):
        k3lib.load(MODEL, **how)


def test_a_failed_load_ends_its_readers(tmp_path, steady):
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    extent = k3lib.Checkpoint(folder).extent("language_model.model.layers.12.input_layernorm.weight")
    with open(extent.file, "r+b") as file:
        file.seek(extent.offset)
        file.write(b"\xc0\x7f")  # not a number
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="layers.12.input_layernorm.weight"):
        k3lib.load(folder, least(context=8) + 1_000_000, context=8)
    assert threading.active_count() == before


def test_a_closed_model_says_so_and_gives_its_memory_back():
    with k3lib.load(MODEL, "1GB", context=8) as model:
        list(model.generate(IDS[:2], 2))
        held = [weakref.ref(model.trunk.weight("language_model.model.norm.weight")),
                weakref.ref(model.experts.layer(1).kept.slots[0])]
        assert all(ref() is not None for ref in held)
    assert all(ref() is None for ref in held)
    for call in (lambda: model.step(1), lambda: list(model.generate([1], 1)), model.reset):
        with pytest.raises(RuntimeError, match="this model is closed"):
            call()
    assert len(model.report.ids) == 2, "what was done can still be told"
    model.close()


# The report


def test_a_report_is_plain_data():
    with k3lib.load(MODEL) as model:
        list(model.generate([1, 2], 2))
        tree = json.loads(json.dumps(model.report.as_dict()))
    lists = {"ids", "step_seconds", "step_bytes"}
    fields = {f.name for f in dataclasses.fields(k3lib.Report)} - {"steps"}
    assert set(tree) == fields | lists | {"compute_seconds"} and all(len(tree[name]) == 2 for name in lists)
    assert 12 * 4 < tree["expert_requests"] <= 3 * 12 * 4 and tree["expert_hits"] < tree["expert_requests"]
    assert tree["wall_seconds"] == pytest.approx(tree["compute_seconds"] + tree["io_wait_seconds"])
    assert 0 <= tree["io_wait_seconds"] and 0 < tree["compute_seconds"] and sum(tree["step_seconds"]) > 0


def test_a_report_before_the_first_step(model):
    report = dataclasses.replace(model.report, steps=Steps([]))
    assert "no step yet" in report.text() and "0 new" in report.text()


@pytest.mark.skipif(system.read_call_bytes() is None, reason="this system does not count the bytes of read calls")
def test_bytes_read_are_those_the_kernel_counted():
    with k3lib.load(MODEL) as model:
        list(model.generate([1, 2], 2))
        report = model.report
    assert sum(report.bytes_read.values()) <= report.asked_bytes
    # The kernel also counts what other code read meanwhile (modules, caches), and gives no bytes past a file's end.
    assert abs(report.kernel_bytes - report.asked_bytes) < 2_000_000
    assert report.kernel_bytes > sum(report.bytes_read.values())


def test_each_step_tells_what_it_read(steady):
    with k3lib.load(MODEL, least() + 1_500_000, context=32) as model:
        list(model.generate([1, 2], 3))
        report = model.report
    streamed = report.plan.trunk_bytes - report.plan.pinned_bytes
    assert len(report.step_bytes) == len(report.step_seconds) == 3
    for step in report.step_bytes:
        assert set(step) == {"trunk", "experts", "other"}
        assert 0.5 * streamed < step["trunk"] + step["other"] < 1.5 * streamed  # a pass, and what is read ahead
    assert "in the last step" in report.text()


def test_the_record_of_a_token_is_small():
    steps = Steps(["trunk", "experts", "other"])
    tracemalloc.start()
    for n in range(20_000):
        steps.append(Step(n, n / 7, {"trunk": 1 << 40, "experts": n, "other": 7}))
        if n == 9_999:
            before = steps.snapshot()
    taken = tracemalloc.get_traced_memory()[0] / 20_000
    tracemalloc.stop()
    assert taken < 48, f"{taken:.0f} bytes a token"
    assert len(before) == 10_000 and len(steps) == 20_000 and [step.token for step in before] == list(range(10_000))
    assert steps[-1] == Step(19_999, 19_999 / 7, {"trunk": 1 << 40, "experts": 19_999, "other": 7})
    assert steps[0] == next(iter(steps)) and before[-1] == steps[9_999]
    for n in 20_000, -20_001:
        with pytest.raises(IndexError):
            steps[n]


# A packed trunk


def logits(ram, trunk=None):
    "Bytes of six steps' logits, and the report."
    rows = []
    with k3lib.load(MODEL, ram, trunk, context=32) as model:
        list(model.generate(IDS[:3], 6, on_logits=lambda row: rows.append(row.tobytes())))
        return b"".join(rows), model.report


def test_a_packed_trunk_changes_where_bytes_come_from_and_no_bit(tmp_path, steady):
    cli.pack_trunk(MODEL, tmp_path / "trunk")
    plain, report = logits("1GB")
    assert report.trunk is None and "read from the model's own files" in report.text()
    for ram in ("1GB", least() + 1_500_000):  # all pinned; hardly anything
        packed, report = logits(ram, tmp_path / "trunk")
        assert packed == plain, f"ram={ram}: other logits"
        assert report.trunk == str(tmp_path / "trunk") and f"packed in {tmp_path}" in report.text()
        assert {f"model-{i:05}-of-000014.safetensors" for i in range(1, 15)} <= set(report.files)
    assert report.plan.pinned_bytes < report.plan.trunk_bytes


def test_an_interrupted_pack_is_no_trunk_until_it_is_complete(tmp_path, monkeypatch):
    class Bar:
        updates = 0

        def update(self, nbytes):
            self.updates += 1
            if self.updates == 100:
                raise KeyboardInterrupt

        __enter__, __exit__ = lambda self: self, lambda self, *_: None

    trunk = tmp_path / "trunk"
    with monkeypatch.context() as patch:
        patch.setattr(cli, "progress_bar", lambda *_, **how: Bar())
        with pytest.raises(KeyboardInterrupt) as stopped:
            cli.pack_trunk(MODEL, trunk)
    whole = {file: file.stat().st_mtime_ns for file in trunk.glob("*.safetensors")}
    assert 1 < len(whole) < 14
    assert str(stopped.value) == f"with {len(whole)} files in {trunk}: the same command goes on from there"
    with pytest.raises(CheckpointError, match="missing"):
        k3lib.load(MODEL, trunk=trunk)
    done = cli.pack_trunk(MODEL, trunk)
    assert f"{14 - len(whole)} written and {len(whole)} found" in done
    assert all(file.stat().st_mtime_ns == when for file, when in whole.items()), "a complete file was written again"
    assert logits("1GB", trunk)[0] == logits("1GB")[0]
    assert not list(trunk.glob("*.part"))


def test_the_trunk_of_another_model_is_refused_also_where_only_its_numbers_differ(tmp_path):
    cli.pack_trunk(write(tmp_path / "other"), tmp_path / "trunk")
    with pytest.raises(CheckpointError, match="not that of"):
        k3lib.load(MODEL, trunk=tmp_path / "trunk")
    with pytest.raises(CheckpointError, match="another checkpoint"):
        cli.pack_trunk(MODEL, tmp_path / "trunk")
