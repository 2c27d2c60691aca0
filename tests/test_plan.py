"A plan keeps its budget, spends it in the order of what a byte saves, and refuses it with one that is large enough."
import math
import pickle
import re
import threading
from types import SimpleNamespace

import pytest
from common import FIXTURES, MODEL, least

import k3lib
from k3lib import memory, plan, system
from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.disk import page_padded
from k3lib.header import ITEMSIZE, Extent
from k3lib.layout import trunk_layout
from k3lib.tensors import EXPERT_TENSORS, forward_order, row_multiples, text_tensors


@pytest.fixture(scope="module")
def embedded():
    "Config and checkpoint of the embedded model."
    with Checkpoint(MODEL) as checkpoint:
        yield read_config(MODEL), checkpoint


def test_a_cgroup_that_is_too_small_refuses_the_plan(embedded, monkeypatch):
    monkeypatch.setattr(memory, "cgroup_free", lambda: [(1_000_000, "")])
    with pytest.raises(plan.PlanError, match="only 1.0 MB of memory are free") as refused:
        plan.make_plan(*embedded, 10**9, 32)
    assert refused.value.least is None


def test_the_number_a_refusal_names_is_large_enough(embedded):
    with pytest.raises(plan.PlanError, match="at least") as refused:
        plan.make_plan(*embedded, 1000, 32)
    named = int(str(refused.value).rsplit("at least ", 1)[1].split(" MB")[0]) * 10**6
    allowed = named + 4_000_000  # the process grows a little meanwhile
    assert plan.make_plan(*embedded, allowed, 32).total <= allowed
    with pytest.raises(plan.PlanError):
        plan.make_plan(*embedded, refused.value.least - 4_000_000, 32)


@pytest.mark.skipif(system.resident_bytes() is None, reason="this system does not tell what a process holds")
@pytest.mark.parametrize("short, advice", [
    (6_000_000, r"a budget of (\d+) MB would fit"),
    (-2_000_000, r"not even the smallest budget, (\d+) MB, would fit"),
])
def test_a_plan_that_the_machine_cannot_hold_says_what_would_fit(embedded, steady, monkeypatch, short, advice):
    with pytest.raises(plan.PlanError) as refused:
        plan.make_plan(*embedded, 1, 32)
    free = refused.value.least - plan.resident_bytes() + short
    monkeypatch.setattr(plan, "available", lambda: (free, ()))
    with pytest.raises(plan.PlanError, match=advice) as caught:
        plan.make_plan(*embedded, 10**9, 32)
    named = int(re.search(advice, str(caught.value))[1]) * 10**6
    if short > 0:
        assert plan.make_plan(*embedded, named, 32).total <= named


def test_a_plan_never_exceeds_its_budget_and_more_pins_more(embedded, steady):
    smallest = least() + 2_000_000
    shares = []
    for extra in range(0, 12_000_000, 1_000_000):
        found = plan.make_plan(*embedded, smallest + extra, 32)
        assert found.total <= smallest + extra
        shares.append(found.pinned_bytes)
    assert shares == sorted(shares) and shares[0] < shares[-1] == found.trunk_bytes


def test_the_front_is_pinned_first_and_experts_are_cached_last(embedded, steady):
    "Pinned is the front of the forward pass, and later matrices that fit. Experts are cached when all are pinned."
    order = [name for name in forward_order(embedded[0]) if name in plan.make_plan(*embedded, 10**9, 32).pinned]
    smallest = least()
    for extra in range(200_000, 6_000_000, 400_000):
        found = plan.make_plan(*embedded, smallest + extra, 32)
        names, streamed = found.pinned, [*found.layout.trunk.streamed]
        if streamed:
            assert {*order[:order.index(streamed[0])]} <= names, "a hole at the front"
            assert found.layout.experts.cached == 0
        assert names | {*streamed} == {*order} and not names & {*streamed}
    assert plan.make_plan(*embedded, 10**9, 32).layout.experts.cached == embedded[0].num_experts * 12


def test_first_fit():
    sizes = {"a": 4, "b": 10, "c": 3, "d": 2}
    assert plan.first_fit(sizes, 3) == ({"c"}, 3)
    assert plan.first_fit(sizes, 8) == ({"a", "c"}, 7)
    assert plan.first_fit(sizes, 19) == ({"a", "b", "c", "d"}, 19)
    assert plan.first_fit(sizes, 1) == (frozenset(), 0)


def test_the_buffers_of_a_trunk_that_is_all_pinned_are_spent_on_it(embedded):
    config, checkpoint = embedded
    extents = {name: checkpoint.extent(name) for name in forward_order(config)}
    streaming = trunk_layout(extents, row_multiples(config), 5)
    matrices = sum(page_padded(blocks[0].extent.nbytes) for blocks in streaming.streamed.values())
    layout, nbytes, left = plan.pin_from_front(streaming, matrices - streaming.buffer_bytes)
    assert not layout.streamed and layout.buffer_bytes == 0 and (nbytes, left) == (matrices, 0)
    layout, nbytes, left = plan.pin_from_front(streaming, matrices - streaming.buffer_bytes - 1)
    assert layout.streamed and layout.buffer_bytes > 0 and nbytes + left == matrices - streaming.buffer_bytes - 1


@pytest.mark.parametrize("readers, enough", [
    (1, 1), (4, 4), (5, 4), (6, 6), (7, 6), (8, 8), (15, 8), (16, 16), (64, 16),
])
def test_expert_readers(readers, enough):
    "Of sixteen experts, seven readers need as many rounds as six."
    assert plan.expert_readers(SimpleNamespace(num_experts_per_token=16), readers) == enough


def test_readers_are_never_fewer_than_threads(embedded):
    for threads, readers, found in ((1, None, plan.READERS), (9, None, 9), (2, 3, 3), (4, 3, 4), (1, 12, 12)):
        made = plan.make_plan(*embedded, 10**9, 32, threads=threads, readers=readers)
        assert made.as_dict()["readers"] == found, (threads, readers)


def test_a_longer_context_costs_the_kv_cache_and_the_records_alone(embedded):
    one, two = (plan.make_plan(*embedded, 10**9, n).parts for n in (1000, 2000))
    for part, a_position in ("latent KV cache", plan.position_bytes(embedded[0])), ("records of the run", 64):
        assert two[f"{part}, 2000 positions"] - one[f"{part}, 1000 positions"] == 1000 * a_position


def test_a_chunk_is_no_longer_than_the_prompt_and_leaves_three_quarters_to_the_trunk(embedded, steady):
    assert plan.make_plan(*embedded, 10**9, 64).chunk == plan.MAX_CHUNK
    assert plan.make_plan(*embedded, 10**9, 64, prompt_tokens=5).chunk == 5
    one, chunks = plan.activation_bytes(embedded[0], 1), []
    for spare in (0, 10**5, 10**6, 10**7):
        chunks.append(plan.longest_chunk(embedded[0], 64, spare))
        grown = plan.activation_bytes(embedded[0], chunks[-1]) - one
        assert grown <= spare / 4 and (chunks[-1] == 64 or 2 * grown + one >= spare / 4)
    assert chunks[0] == 1 and chunks == sorted(chunks) and chunks[-1] == 64


def test_a_plan_as_text_and_as_plain_data(embedded):
    made = plan.make_plan(*embedded, 10**9, 32)
    tree, lines = made.as_dict(), made.text().splitlines()
    assert tree["total"] == sum(tree["parts"].values()) == made.total <= tree["ram"] == 10**9
    assert lines[0] == f"plan for 1.00 GB of memory, 32 positions, prompts in chunks of {plan.MAX_CHUNK}"
    assert [line[2:46].strip() for line in lines[1:len(made.parts) + 2]] == [*made.parts, "together"]
    assert lines[len(made.parts) + 2].startswith("  100.0% of the streamed weights pinned, ")
    assert [line[2:] for line in lines[len(made.parts) + 3:]] == tree["notes"] == [*made.notes]


@pytest.mark.parametrize("lacks, told", [
    ("resident_bytes", "memory of this process: 150.0 MB assumed"),
    ("resident_file_bytes", "of libraries: 60.0 MB assumed"),
])
def test_what_is_assumed_is_said(embedded, monkeypatch, lacks, told):
    monkeypatch.setattr(plan, lacks, lambda: None)
    assert f"  {told}, the system does not tell" in plan.make_plan(*embedded, 10**9, 32).text().splitlines()
    monkeypatch.setattr(plan, "available", lambda: (None, ("something stands in",)))
    assert plan.make_plan(*embedded, 10**9, 32).notes[1:] == ("something stands in",)


# Limits of a process

def test_what_a_run_starts_is_what_it_is_planned_for(embedded):
    "The threads that load() and a forward pass start, in every form of the layout, are those that were asked for."
    def running():
        return {thread.ident for thread in threading.enumerate() if thread.name.startswith("k3")}

    for ram in (least() + 2_000_000, 10**9):
        before = running()
        with k3lib.load(MODEL, ram, context=32, threads=1, readers=3) as model:
            model.prefill([5, 9])
            assert len(running() - before) == plan.run_threads(model.plan.layout, 1), ram


@pytest.mark.parametrize("lacks, shortage", [
    ("open_files_shortage", "too many files"), ("address_shortage", "too few addresses")])
def test_a_shortage_refuses_the_plan(embedded, monkeypatch, lacks, shortage):
    monkeypatch.setattr(plan, lacks, lambda *_: shortage)
    with pytest.raises(plan.PlanError, match=shortage) as refused:
        plan.make_plan(*embedded, 10**9, 32)
    assert refused.value.least is None and refused.value.exit_code == 2


def test_a_refused_plan_can_go_from_one_process_to_another():
    error = plan.PlanError(5, "too little")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.least, str(copy), str(error)) == (5, "too little", "too little")


def test_too_few_threads_refuse_the_plan(embedded, monkeypatch):
    monkeypatch.setattr(system, "startable_threads", lambda wanted: wanted - 2)
    with pytest.raises(plan.PlanError, match=r"a run starts 5 threads, but this process can start 3 more: .*ulimit -u"):
        plan.make_plan(*embedded, 10**9, 32, threads=1)


# Compiling

def test_kernels_that_are_not_kept_are_part_of_the_plan(embedded, monkeypatch):
    "The part is there only where this process compiles, and a refusal says which folder would help."
    asked = []
    monkeypatch.setattr(plan, "compiles_here", lambda apart: asked.append(apart) or True)
    monkeypatch.setattr(plan, "available", lambda: (10**9, ()))
    made = plan.make_plan(*embedded, 10**9, 32)
    assert made.parts["compiling kernels, which no folder keeps"] == plan.COMPILE_RSS
    with pytest.raises(plan.PlanError, match="MB; 115.0 MB less once .*NUMBA_CACHE_DIR can be written"):
        plan.make_plan(*embedded, 10**8, 32)
    monkeypatch.setattr(plan, "available", lambda: (plan.COMPILER_RSS - 1, ()))
    plan.make_plan(*embedded, 10**9, 32)
    assert asked == [True, True, False], "another process may compile only where it has room"


# The released shape


class Released:
    "The headers of the released checkpoint as far as a plan looks at them, from the config alone."

    files: tuple[str, ...] = ()

    def __init__(self, config):
        self.extents = {}
        for name, dtype, shape in text_tensors(config):
            if ".experts." not in name or ".layers.1.block_sparse_moe.experts.0." in name:
                self.extents[name] = Extent("", 8, math.prod(shape) * ITEMSIZE[dtype], dtype, shape)

    def extent(self, name):
        return self.extents[name]

    def expert(self, layer, number):
        names = ((short, pattern.replace("#", str(layer), 1).replace("#", str(number), 1))
                 for short, pattern in EXPERT_TENSORS.items())
        return {short: self.extents[name] for short, name in names}


@pytest.fixture(scope="module")
def released():
    config = read_config(FIXTURES / "k3")
    return config, Released(config)


@pytest.fixture
def small_process(monkeypatch):
    "As in a process of its own: this one has pytest and more in memory."
    monkeypatch.setattr(plan, "resident_bytes", lambda: 130_000_000)
    monkeypatch.setattr(plan, "available", lambda: (None, ()))
    monkeypatch.setattr(plan, "compiles_here", lambda apart: False)


def test_no_expert_is_cached_while_a_matrix_streams(released, small_process):
    everything = plan.make_plan(*released, 200 * 10**9, 1024)
    assert everything.pinned_bytes == everything.trunk_bytes and everything.layout.experts.cached > 1000
    slots = everything.layout.experts.slots.total
    nearly = plan.make_plan(*released, everything.total - slots - 10**9, 1024)
    assert [*nearly.layout.trunk.streamed] == ["language_model.lm_head.weight"]
    assert nearly.layout.experts.cached == 0 and nearly.ram - nearly.total > 10**9, "room for experts"


def test_released_sizes(released):
    config, _ = released
    assert plan.state_bytes(config) == 69 * 4 * (96 * 128 * 128 + 3 * 96 * 128 * 3)
    assert plan.position_bytes(config) == 24 * 576 * 4


def test_the_released_shape_fits_a_gigabyte_and_4096_positions_cost_226_megabytes(released, small_process):
    short, long = (plan.make_plan(*released, 2 * 10**9, context) for context in (9, 4096))
    assert all(plan.make_plan(*released, 10**9, context).total <= 10**9 for context in (9, 4096))
    cache = long.parts["latent KV cache, 4096 positions"]
    assert cache == 4096 * 24 * 576 * 4 and 226e6 < cache < 227e6 and 55_000 < cache / 4096 < 55_500
    assert long.total <= 2 * 10**9
    assert short.pinned_bytes - long.pinned_bytes > 200e6, "the cache takes memory from the trunk"
    assert min(short.total, long.total) > 1.99e9, "most of the budget is spent"
    with pytest.raises(plan.PlanError, match=r"16384 positions needs at least \d+ MB"):
        plan.make_plan(*released, 10**9, 16_384)


# {budget: bytes of activations, row block buffers, pinned trunk, expert slots}
WRITTEN_DOWN = {
    10**9: [36_569_088, 44_937_948, 131_575_808, 4_571_136],
    8 * 10**9: [70_778_880, 44_937_948, 7_097_856_000, 4_571_136],
    130 * 10**9: [70_778_880, 0, 111_112_568_832, 18_028_707_840],
}


def test_the_parts_of_the_released_plan_are_what_they_were(released, small_process, monkeypatch):
    """Bytes as version 0.1.0 planned them in a process of this size, and 64 more a position for the records of a run.

    A plan that changes is to be changed on purpose.
    """
    monkeypatch.setattr(plan, "resident_file_bytes", lambda: 60_000_000)
    fixed = [130_000_000, 65_000_000, 464_633_856, 56_623_104, 65_536, 64_704_512]
    for ram, parts in WRITTEN_DOWN.items():
        assert list(plan.make_plan(*released, ram, 1024, threads=2).parts.values()) == fixed + parts
