"k3lib.experts: every requested expert is called for once with its own bytes, whatever the slots, the order and the interruptions."
import _thread
import contextlib
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest

from hypothesis import given, settings
from hypothesis import strategies as st

from k3lib import disk, read_multiply
from k3lib import disk
from k3lib.header import Extent
from k3lib.fileio import CheckpointError
from k3lib.experts import Experts, StreamingExpert, adjacent_runs, read_expert
from k3lib.layout import expert_slot_bytes, streaming_slot_bytes
from k3lib.moe import Expert, expert_mlp, routed_sum
from k3lib.matmul import deinterleaved
from k3lib.disk import File, Files, PAGE, page_buffer
from k3lib.parallel import CORES
from k3lib.read_multiply import COMPILED_READS
from k3lib.trunk import max_concurrent_blocks

LAYERS, EXPERTS = 3, 12
LATENT, WIDTH = 96, 64
MATRICES = ("w1", "w3", "w2")  # as expert_mlp takes them


def shapes_of(latent, width):
    sides = dict(w1=(width, latent), w2=(latent, width), w3=(width, latent))
    return {name + end: (n, k // per) for name, (n, k) in sides.items() for end, per in (("", 2), ("_scale", 32))}


SHAPES = shapes_of(LATENT, WIDTH)
SIZE = sum(n * m for n, m in SHAPES.values())
Z = np.random.default_rng(5).standard_normal((3, LATENT)).astype(np.float32)


def product(expert, z=Z):
    return expert_mlp(expert, z, 4.0, 25.0, np.empty_like(z))


class Store:
    "Experts of random bytes in files of one layer each; their six tensors adjacent, or anywhere in any order. Offsets are odd."

    def __init__(self, folder, scattered=False, seed=0, shapes=SHAPES, layers=LAYERS, experts=EXPERTS, gap=3, name=""):
        rng = np.random.default_rng(seed)
        self.bytes, self.where, self.shapes = {}, {}, shapes
        for L in range(layers):
            pieces = [(e, short) for e in range(experts) for short in shapes]
            if scattered:
                random.Random(seed + L).shuffle(pieces)
            path, blob = str(folder / f"{name}layer{L}.bin"), bytearray(b"h" * (18 + gap))
            for e, short in pieces:
                low, high = (118, 125) if short.endswith("scale") else (0, 256)
                array = rng.integers(low, high, shapes[short]).astype(np.uint8)
                self.bytes[L, e, short], self.where[L, e, short] = array, Extent(path, len(blob), array.nbytes, "U8", array.shape)
                blob += array.tobytes()
            with open(path, "wb") as file:
                file.write(blob)
        self._products = {}

    def extents(self, L, e):
        return [self.where[L, e, short] for short in self.shapes]

    def whole(self, L, e):
        return Expert(*(self.bytes[L, e, short] for short in self.shapes))

    def product(self, L, e):
        if (L, e) not in self._products:
            self._products[L, e] = product(self.whole(L, e))
        return self._products[L, e]

    def check(self, L, e, expert, when=""):
        "The product, and the bytes of what is or has been made whole."
        found, expected = product(expert), self.product(L, e)
        assert found.tobytes() == expected.tobytes(), (
            f"layer {L} expert {e}{when}: a product that differs by {np.abs(found - expected).max():.3g} at {np.argmax(found != expected)}")
        if isinstance(expert, StreamingExpert):
            assert expert.kept == (len(expert.slot) >= expert_slot_bytes(self.extents(L, e)))
            expert = expert.expert()
        if expert is not None:
            self.check_bytes(L, e, expert, when)

    def check_bytes(self, L, e, expert, when=""):
        assert isinstance(expert, Expert)
        for short, found in zip(self.shapes, expert):
            assert found.shape == self.shapes[short] and found.dtype == np.uint8 and found.flags.c_contiguous
            assert np.array_equal(found, self.bytes[L, e, short]), f"layer {L} expert {e} {short}{when}: other bytes than the file's"


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


class Slow(Files):
    "Files whose reads end at random moments, and so in any order."

    def __init__(self, seed, most=5e-4):
        super().__init__()
        self.random, self.most = random.Random(seed), most

    def read(self, *args):
        time.sleep(self.random.random() * self.most)
        start = super().read(*args)
        time.sleep(self.random.random() * self.most)
        return start

    def stream(self, *args):
        time.sleep(self.random.random() * self.most)
        return super().stream(*args)


def always(most):
    files = Slow(0, most)
    files.random = type("Always", (), {"random": staticmethod(lambda: 1.0)})()
    return files


class Poisoned(Experts):
    "Experts whose slots are overwritten when they are chosen to be filled again."

    def _slot(self):
        slot = super()._slot()
        if slot is not None:
            self._memory[slot][:] = 0xEE
        return slot


class Late(Poisoned):
    "Experts that fetch nothing before it is its turn: they all arrive."

    def _next(self):
        return super()._next() if self._call and self._calling < self._most else None


def make(store, slots, readers=3, files=None, kind=Experts, nbytes=None):
    return kind(store.extents, files or Files(), slots, nbytes or expert_slot_bytes(store.extents(0, 0)), readers, range(LAYERS))


def in_pieces_of(monkeypatch, nbytes):
    monkeypatch.setattr(disk, "READ_UNIT", nbytes)
    monkeypatch.setattr(disk, "READ_UNIT", nbytes)


@pytest.fixture
def small(store, monkeypatch):
    "Bytes of a slot through which the store's experts pass, 48 of 64 and 64 of 96 rows at a time."
    in_pieces_of(monkeypatch, 48 * 48)
    nbytes = streaming_slot_bytes(store.extents(0, 0))
    assert nbytes < expert_slot_bytes(store.extents(0, 0))
    return nbytes


@pytest.fixture(params=["compiled", "from Python", "buffered"])
def way(request, monkeypatch):
    "How the rows of what arrives are read."
    if request.param == "from Python":
        monkeypatch.setattr(read_multiply, "COMPILED_READS", False)
    if request.param == "buffered":
        monkeypatch.setattr(disk, "_DIRECT", 0)
    return request.param


def consume(experts, store, L, ids, threads=1, use=lambda: None):
    "Request and have the readers compare; the ids in the order in which they came."
    order, running, lock = [], [], threading.Lock()

    def work(e, expert):
        with lock:
            running.append(e)
            assert len(running) <= threads, f"{len(running)} calls at a time, {threads} allowed"
        store.check(L, e, expert)
        use()
        whole = expert.expert() if isinstance(expert, StreamingExpert) else expert
        if whole is not None:
            store.check_bytes(L, e, whole, " after its use")
        with lock:
            running.remove(e)
            order.append(e)

    experts.layer(L).request(sorted(ids))
    experts.each(work, threads)
    assert not running, "each() has returned before its calls"
    assert sorted(order) == sorted(ids), f"requested {sorted(ids)}, called for {sorted(order)}"
    return order


def until(true, seconds=5):
    "Wait for something to become true, and a little longer for what should not happen."
    deadline = time.time() + seconds
    while not true() and time.time() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)


def resident(experts):
    "The keys of what is kept. What the shares say must be there, and nothing else."
    with experts._turn:
        experts._abandon()
    assert {*experts._resident} == {(L, e) for L, share in experts._kept._of.items() for e in share.kept}, "kept and resident are not the same"
    return sorted(experts._resident)


def close(experts):
    "End them; every slot is free or has its expert, and the experts are those that were chosen to stay."
    resident(experts)
    assert sorted([*experts._free, *(slot for slot, _ in experts._resident.values())]) == list(range(len(experts._memory))), (
        "a slot was lost or counted twice")
    experts.close()
    experts.files.close()


# How an expert lies in its file, and how it is read whole

def test_adjacent_tensors_are_one_read():
    def at(file, *offsets):
        return [Extent(file, offset, 10, "U8", (10,)) for offset in offsets]
    assert adjacent_runs(at("f", 0, 10, 20, 30)) == [[0, 1, 2, 3]]
    assert adjacent_runs(at("f", 20, 0, 10)) == [[1, 2, 0]]
    assert adjacent_runs(at("f", 0, 10, 21, 31)) == [[0, 1], [2, 3]]
    assert adjacent_runs(at("f", 10) + at("g", 20, 30)) == [[0], [1, 2]]


@pytest.mark.parametrize("scattered", [False, True])
def test_an_expert_is_read_into_one_slot_however_it_lies(tmp_path, scattered):
    store, files = Store(tmp_path, scattered), Files()
    for L in range(LAYERS):
        for e in range(EXPERTS):
            extents = store.extents(L, e)
            buffer = page_buffer(expert_slot_bytes(extents))
            before = files.moved
            store.check(L, e, read_expert(files, extents, buffer))
            if not scattered:
                assert files.moved - before <= sum(x.nbytes for x in extents) + 2 * PAGE, "six neighbours took more than one read"
    assert files.bytes_read == {"trunk": 0, "other": 0, "experts": sum(a.nbytes for a in store.bytes.values())}
    files.close()


# Multiplied as it arrives

@pytest.mark.parametrize("piece", [1, 16 * 48, 48 * 48, 64 * 48])
@pytest.mark.parametrize("kept", [False, True])
def test_what_arrives_has_the_product_of_the_whole(tmp_path, monkeypatch, way, kept, piece):
    "At any offset, row by row, in pieces of which the last is not full, and at once: the bytes of the product, and of what is kept."
    in_pieces_of(monkeypatch, piece)
    for gap in (0, 1, 4095, 4077):
        store, files = Store(tmp_path, gap % 2 == 0, gap, layers=1, experts=3, gap=gap), Files()
        for e in range(3):
            extents = store.extents(0, e)
            slot = page_buffer(10 * PAGE + expert_slot_bytes(extents))[:expert_slot_bytes(extents) if kept else streaming_slot_bytes(extents)]
            slot[:] = 0xEE
            arriving = StreamingExpert(files, extents, slot)
            assert arriving.width == WIDTH and arriving.expert() is None
            store.check(0, e, arriving)
            assert (arriving.expert() is not None) == kept
            assert files.bytes_read["experts"] == (e + 1) * SIZE, "every byte is counted once"
        files.close()


def test_rows_are_read_by_compiled_code_where_that_can(store, small, way):
    "Python reads only where it must: then three scales an expert, and each piece."
    count, files = [], Files()
    read, files.read = files.read, lambda *args: [count.append(args), read(*args)][1]
    store.check(0, 0, StreamingExpert(files, store.extents(0, 0), page_buffer(small)))
    direct = COMPILED_READS and way == "compiled" and File(store.where[0, 0, "w1"].file).how == "direct"
    assert len(count) == (0 if direct else 3 + 2 + 2 + 2), f"{way}: {len(count)} reads from Python"
    assert files.bytes_read["experts"] == SIZE
    files.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3 * PAGE), st.integers(0, PAGE), st.booleans(), st.booleans(), st.integers(1, 5))
def test_whatever_arrives_fits_its_slot(tmp_path_factory, latent, width, piece, gap, kept, scattered, tokens):
    "Compiled reads do not look where the slot ends: nothing behind it is touched."
    shapes = shapes_of(32 * latent, 32 * width)
    store = Store(tmp_path_factory.mktemp("one"), scattered, gap, shapes, 1, 1, gap)
    z = np.random.default_rng(gap).standard_normal((tokens, 32 * latent)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        in_pieces_of(patch, piece)
        nbytes = (expert_slot_bytes if kept else streaming_slot_bytes)(store.extents(0, 0))
        memory, files = page_buffer(nbytes + 2 * PAGE), Files()
        memory[:] = 0xEE
        arriving = StreamingExpert(files, store.extents(0, 0), memory[:nbytes])
        assert product(arriving, z).tobytes() == product(store.whole(0, 0), z).tobytes()
        assert (memory[nbytes:] == 0xEE).all(), "bytes behind the slot were written"
        if kept:
            store.check_bytes(0, 0, arriving.expert())
        files.close()


def test_a_slot_that_is_too_small_is_refused(store, small):
    "By an error, before compiled code writes behind its end."
    extents = store.extents(0, 0)
    StreamingExpert(None, extents, np.zeros(small, np.uint8))
    with pytest.raises(ValueError, match=f"passes through a slot of {small} bytes, this one has {small - 1}"):
        StreamingExpert(None, extents, np.zeros(small - 1, np.uint8))
    experts = make(store, 2, nbytes=PAGE)
    with pytest.raises(ValueError, match="passes through a slot"):
        consume(experts, store, 0, [1])
    close(experts)


@pytest.mark.parametrize("short, first, rows", [("w1_scale", 0, 64), ("w1", 0, 48), ("w1", 48, 16), ("w3_scale", 0, 64), ("w2_scale", 0, 96), ("w2", 64, 32)])
def test_a_file_that_ends_too_early(store, small, way, short, first, rows):
    "The message names the file, where it ends, and the bytes of the scales or of the piece that are not there."
    extent, last = store.where[1, EXPERTS - 1, short], (1, EXPERTS - 1)
    row = SHAPES[short][1]
    begin, end = extent.offset + first * row, extent.offset + (first + rows) * row
    copy = extent.file + ".cut"
    with open(extent.file, "rb") as file, open(copy, "wb") as cut:
        cut.write(file.read()[:end - 1])
    extents = [x._replace(file=copy) if x == extent else x for x in store.extents(*last)]
    for nbytes in (small, expert_slot_bytes(extents)):
        files, out = Files(), np.full((3, SHAPES[short.removesuffix("_scale")][0]), 7, np.float32)
        arriving = StreamingExpert(files, extents, page_buffer(nbytes)[:nbytes])
        with pytest.raises(CheckpointError, match=rf"layer1.bin.cut: ends at byte {end - 1}, but bytes {begin} to {end} are needed"):
            product(arriving)
        name = short.removesuffix("_scale")
        with pytest.raises(CheckpointError):
            arriving.multiply(name, deinterleaved(np.ones((3, 2 * SHAPES[name][1]), np.float32)), out)
        assert (out[:, :first] != 7).all() and (out[:, first:] == 7).all(), "rows before the piece that is missing, and no others"
        assert arriving.expert() is None
        files.close()


# Any number of slots, any order

@pytest.mark.parametrize("passing", [False, True])
def test_fifty_runs_have_the_same_bytes(tmp_path, monkeypatch, passing):
    "Readers that sleep at random, poisoned slots, one slot to more than all: right bytes before and after use, each expert once, one sum."
    in_pieces_of(monkeypatch, 48 * 48)
    stores = [Store(tmp_path, scattered, 1, name=f"{scattered}-") for scattered in (False, True)]
    orders, sums, z = set(), set(), np.random.default_rng(8).standard_normal((4, LATENT)).astype(np.float32)
    ids = np.random.default_rng(9).permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (4, 1)), axis=1)[:, :5].copy()
    weights = np.random.default_rng(10).random((4, 5)).astype(np.float32)
    for run in range(50):
        rng, store = random.Random(run), stores[run % 2]
        nbytes = streaming_slot_bytes(store.extents(0, 0)) if passing else None
        experts = make(store, rng.choice([1, 2, 5, 8, 11, 40]), rng.choice([1, 2, 4]), Slow(run, 2e-4), Poisoned, nbytes)
        for _ in range(2):
            for L in range(LAYERS):
                some, threads = rng.sample(range(EXPERTS), rng.randint(1, 8)), rng.choice([1, 2, 9])
                order = consume(experts, store, L, some, threads, lambda: time.sleep(rng.random() * 2e-4))
                orders.add(order == sorted(order))
        experts.layer(2).request(np.unique(ids).tolist())
        sums.add((run % 2, routed_sum(experts.layer(2), z, ids, weights, 4, 25).tobytes()))
        assert not (passing and experts.hits)
        close(experts)
    assert orders == {True, False}, "all came in the order of their ids: nothing was shuffled"
    assert len(sums) == 2, "one sum for each store"


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_fewer_slots_than_experts(store, slots):
    "More is requested than fits: the rest is read as slots come free, also while every slot holds a hit."
    experts = make(store, slots)
    for _ in range(3):
        consume(experts, store, 0, range(8))
    assert experts.requests == 24
    close(experts)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("passing", [False, True])
def test_so_many_calls_at_a_time(store, small, passing, threads):
    "As many as allowed, and no more, however many readers there are."
    experts = make(store, 6, 6, nbytes=small if passing else None)
    experts.request(1, range(8))
    now, most, lock = [0], [0], threading.Lock()

    def work(e, expert):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(5e-3)
        store.check(1, e, expert)
        with lock:
            now[0] -= 1

    experts.each(work, threads)
    assert most[0] == threads
    close(experts)


def test_a_layer_lets_any_reader_multiply_once_all_cores_are_to_be_used(store):
    seen = []
    experts = make(store, 2)
    experts.each = lambda work, threads: seen.append(threads)
    for threads in (1, CORES, CORES + 1):
        experts.layer(0).each(None, threads)
    assert seen == [max_concurrent_blocks(threads) for threads in (1, CORES, CORES + 1)]
    close(experts)


# What is kept, and what counts as a hit

@pytest.mark.parametrize("threads", [1, 3])
def test_hits_were_resident_before_the_request(store, threads):
    "Fetched for this request is no hit, however early it came; kept since an earlier one is. A layer's share is its own."
    experts = make(store, LAYERS * 4 + threads, readers=threads)
    told = []

    def step(L, ids):
        before = experts.hits
        consume(experts, store, L, ids, threads)
        told.append(experts.hits - before)

    step(0, [0, 1, 2, 3])   # nothing there yet
    step(0, [0, 1, 2, 3])   # all there
    step(1, [0, 1, 2, 3, 4])  # the same ids of another layer are other experts, and one more than its share
    step(0, [0, 1, 2, 3])   # they took nothing from layer 0
    step(0, [4, 5, 6, 7])   # all new
    step(0, [0, 1, 2, 3])   # and nothing is left
    step(1, [0, 1, 2, 3, 4])
    assert told == [0, 4, 0, 4, 0, 0, 4], told
    assert (experts.requests, experts.hits) == (30, 12)
    assert experts.files.bytes_read["experts"] == 18 * SIZE, "what is a hit is not read"
    assert resident(experts) == [(L, e) for L in (0, 1) for e in range(4)]
    close(experts)


def test_what_was_kept_as_it_arrived_is_a_hit(store, small):
    experts, kinds = make(store, LAYERS * 4 + 3, kind=Late), []
    for kind in (StreamingExpert, Expert):
        experts.request(0, range(4))
        experts.each(lambda e, expert: kinds.append((type(expert), store.check(0, e, expert))), 2)
        assert [k for k, _ in kinds[-4:]] == [kind] * 4
    assert experts.hits == 4 and experts.files.bytes_read["experts"] == 4 * SIZE
    close(experts)


def test_what_could_not_be_used_is_not_kept(store):
    "Its bytes may be what was wrong, and mended by then."
    experts = make(store, LAYERS * 4 + 3)
    consume(experts, store, 0, [1, 2])

    def fails(e, expert):
        raise ArithmeticError("not finite")
    experts.request(0, [1])
    assert experts.hits == 1, "this test needs an expert that was kept"
    with pytest.raises(ArithmeticError):
        experts.each(fails, 2)
    consume(experts, store, 0, [1])
    assert experts.hits == 1 and experts.files.bytes_read["experts"] == 3 * SIZE
    close(experts)


def test_what_does_not_stay_passes_through_the_front_of_its_slot(store, small):
    "Even where the slot has room for it all: the less memory it goes through the better."
    experts, kept = make(store, LAYERS * 2 + 3, kind=Late), {}
    experts.request(0, range(6))
    experts.each(lambda e, expert: kept.update({e: (expert.kept, len(expert.slot))}), 1)
    nbytes = expert_slot_bytes(store.extents(0, 0))
    assert kept == {e: (True, nbytes) if e < 2 else (False, small) for e in range(6)}
    close(experts)


def test_the_newest_visits_stay(store):
    experts = make(store, LAYERS * 2 + 1, readers=1)
    for ids in ([0], [1], [2], [1], [3]):  # 1 was asked for last but one, 2 before that
        consume(experts, store, 0, ids)
    assert experts.hits == 1 and resident(experts) == [(0, 1), (0, 3)]
    close(experts)


def test_a_requested_expert_that_is_resident_is_not_evicted_by_its_neighbours(store):
    "The last of the request is resident: fetching the others must not push it out before it is used."
    experts = make(store, LAYERS + 2, readers=2, kind=Poisoned)
    for L in (1, 2, 0):
        consume(experts, store, L, [9])
    experts.request(0, [1, 2, 5, 9])
    until(lambda: len(experts._ready) == 3)
    seen = []
    experts.each(lambda e, expert: seen.append((e, store.check(0, e, expert))), 1)
    assert sorted(e for e, _ in seen) == [1, 2, 5, 9]
    assert experts.hits == 1 and (0, 9) in resident(experts)
    close(experts)


@pytest.mark.parametrize("kept", [0, 1])
def test_what_is_in_use_keeps_its_slot(store, kept):
    "One call lingers over its expert while the other reader works through the rest of the request."
    experts = make(store, LAYERS * kept + 2, readers=2, kind=Poisoned)
    for ids in ([0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9]):
        experts.request(0, ids)
        done, first = [], threading.Event()

        def work(e, expert):
            lingers = not first.is_set() and not first.set()
            store.check(0, e, expert)
            if lingers:
                until(lambda: len(done) == len(ids) - 1)
                whole = expert.expert() if isinstance(expert, StreamingExpert) else expert
                store.check_bytes(0, e, whole, " while others were fetched")
            done.append(e)

        experts.each(work, 2)
        assert sorted(done) == ids and len(resident(experts)) == kept
    close(experts)


def test_what_was_multiplied_in_part_is_not_kept(store):
    "A call that takes one matrix of three, or none, leaves a slot that holds no expert."
    experts = make(store, LAYERS * 4 + 3, kind=Late)

    def lazy(e, expert):
        for name in MATRICES[:e]:
            expert.multiply(name, deinterleaved(np.ones((1, 2 * SHAPES[name][1]), np.float32)), np.empty((1, SHAPES[name][0]), np.float32))

    experts.request(0, range(4))
    experts.each(lazy, 2)
    assert resident(experts) == [(0, 3)]
    consume(experts, store, 0, range(4))
    assert experts.hits == 1
    close(experts)


def test_reading_starts_with_the_request(store):
    "Nobody waits for an expert yet, and the bytes are already on their way: as many as there are slots that keep."
    experts = make(store, LAYERS + 2, readers=2)
    experts.request(0, range(8))
    until(lambda: experts.files.bytes_read["experts"] >= 5 * SIZE)
    assert experts.files.bytes_read["experts"] == 5 * SIZE
    consume(experts, store, 0, range(8))  # the first request was replaced; what it has read of its share is there
    assert experts.files.bytes_read["experts"] == 12 * SIZE and experts.hits == 1
    close(experts)


def test_a_request_is_answered_once(store):
    "After each() has returned or raised, the next one without a request is refused and calls nothing."
    experts = make(store, 2)
    calls, refused = [], "no request is open"

    def work(e, expert):
        calls.append(e)
        if len(calls) > 5:
            raise ZeroDivisionError("in a call")

    with pytest.raises(RuntimeError, match=refused):
        experts.each(work, 1)
    for ids, error in (([0, 1, 2, 3], None), ([0, 1, 2, 3], ZeroDivisionError), ([], None)):
        experts.request(0, ids)
        with pytest.raises(error) if error else contextlib.nullcontext():
            experts.each(work, 1)
        before = len(calls)
        with pytest.raises(RuntimeError, match=refused):
            experts.each(work, 1)
        assert len(calls) == before
    consume(experts, store, 0, [1, 2])
    close(experts)


def test_what_passes_is_read_when_it_is_multiplied_and_not_kept(store, small):
    experts = make(store, 3, nbytes=small)
    experts.request(0, range(8))
    until(lambda: experts.files.bytes_read["experts"], 0.02)
    assert experts.files.bytes_read["experts"] == 0
    for n in (1, 2):
        consume(experts, store, 0, range(8))
        assert experts.files.bytes_read == {"trunk": 0, "other": 0, "experts": 8 * n * SIZE}
    assert experts.hits == 0 and experts.requests == 24
    close(experts)


# What goes wrong

@pytest.mark.parametrize("taken", [0, 1, 3, 7])
@pytest.mark.parametrize("passing", [False, True])
def test_an_interrupted_request_leaves_nothing_behind(store, small, passing, taken):
    "Whether the caller never looked, or a call has failed: no call runs on, and the next request has its own experts only."
    experts = make(store, 3 if passing else LAYERS * 2 + 3, files=Slow(taken), kind=Poisoned, nbytes=small if passing else None)
    for L in (0, 1, 0, 2):
        begun, ended, lock = [], [], threading.Lock()

        def work(e, expert):
            with lock:
                begun.append(e)
                if len(begun) > taken:
                    raise ZeroDivisionError("in a call")
            store.check(L, e, expert)
            time.sleep(1e-3)
            ended.append(e)

        experts.layer(L).request(range(8))
        if taken:
            with pytest.raises(ZeroDivisionError):
                experts.each(work, 2)
            seen = len(begun), len(ended)
            time.sleep(5e-3)
            assert (len(begun), len(ended)) == seen, "a call began or ran on after each() had raised"
        consume(experts, store, L, [1, 2, 10, 11], 2)
    close(experts)


@pytest.mark.parametrize("passing", [False, True])
def test_a_keyboard_interrupt_waits_for_the_calls_and_the_next_request_works(store, small, passing):
    experts = make(store, 3, nbytes=small if passing else None)
    running = []

    def work(e, expert):
        running.append(e)
        if len(running) == 1:
            _thread.interrupt_main()
        time.sleep(0.01)
        store.check(0, e, expert)
        running.remove(e)

    experts.request(0, range(8))
    with pytest.raises(KeyboardInterrupt):
        experts.each(work, 2)
    assert not running, "calls go on after each() has raised"
    consume(experts, store, 1, range(8), 2)
    close(experts)


def interrupted_while_it_takes_the_lock_again(thing, wait):
    "A thread that holds the lock wakes the waiting main thread and interrupts it before letting go; what that thread raises."
    errors, there = [], threading.Event()

    def hold():
        there.wait()
        try:
            with thing._turn:
                thing._news.notify_all()
                time.sleep(0.05)  # now it wants the lock
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
        except RuntimeError as error:
            errors.append(error)
    holder = threading.Thread(target=hold)
    holder.start()
    with pytest.raises(KeyboardInterrupt):
        wait(there)
    holder.join()
    return errors


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal for this")
def test_an_interrupt_while_the_lock_is_taken_again(store):
    experts = make(store, 3)
    experts.request(0, [1])
    errors = interrupted_while_it_takes_the_lock_again(experts, lambda there: experts.each(
        lambda e, expert: (there.set(), time.sleep(0.3)), 1))
    assert not errors, "the interrupted thread gave back a lock that it did not hold"
    consume(experts, store, 1, range(8), 2)
    close(experts)


def test_an_interrupt_before_anyone_waits_leaves_no_call_behind(store):
    experts = make(store, 3)
    notify_all, calls = experts._work.notify_all, []

    def interrupted():
        experts._work.notify_all = notify_all
        raise KeyboardInterrupt

    experts.request(0, range(3))
    experts._work.notify_all = interrupted
    with pytest.raises(KeyboardInterrupt):
        experts.each(lambda e, expert: calls.append(e), 2)
    seen = len(calls)
    experts.request(1, range(8))
    time.sleep(0.02)
    assert len(calls) == seen, "a call of an earlier request took experts of this one"
    consume(experts, store, 1, range(8))
    close(experts)


@pytest.mark.parametrize("passing", [False, True])
def test_a_read_error_reaches_the_caller_and_the_next_request_works(store, small, passing):
    "As long as the file is short, every request that needs its end fails, and no other; what failed half-way is not resident."
    experts = make(store, 2 if passing else LAYERS * 2 + 3, nbytes=small if passing else None)
    path = store.where[1, 0, "w1"].file
    with open(path, "rb") as file:
        whole = file.read()
    cut = store.where[1, EXPERTS - 1, "w2"].offset + 3
    os.truncate(path, cut)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"layer1.bin: ends at byte {cut}, but bytes \d+ to \d+ are needed"):
            consume(experts, store, 1, [EXPERTS - 1, 0, 1, 2, 3], 2)
        assert (1, EXPERTS - 1) not in resident(experts)
        consume(experts, store, 0, range(6), 2)
    with open(path, "wb") as file:
        file.write(whole)
    close(experts)
    experts = make(store, 2, nbytes=small if passing else None)
    consume(experts, store, 1, [EXPERTS - 1, 0, 1])
    close(experts)


def test_an_error_is_raised_whatever_it_is(store):
    "A bug in finding an expert's extents ends no reader: it is the caller who hears of it."
    def lost(L, e):
        if e >= 3:
            raise KeyError(f"expert {e}")
        return store.extents(L, e)

    for ids in ([3], [1, 3], [1, 2, 3, 4, 5]):
        experts = Experts(lost, Files(), 2, expert_slot_bytes(store.extents(0, 0)), 2, range(LAYERS))
        for pause in (0, 0.02):
            with pytest.raises(KeyError, match="expert [345]"):
                experts.request(0, ids)
                time.sleep(pause)
                experts.each(lambda e, expert: None, 1)
        consume(experts, store, 0, [0, 1, 2])
        close(experts)


class Stuck(Files):
    "Files whose reads wait for a gate."

    def __init__(self):
        super().__init__()
        self.gate, self.waits = threading.Event(), threading.Event()

    def read(self, *args):
        self._wait()
        return super().read(*args)

    def stream(self, *args):
        self._wait()
        return super().stream(*args)

    def _wait(self):
        self.waits.set()
        assert self.gate.wait(10)


@pytest.mark.parametrize("passing", [False, True])
def test_closing_wakes_whoever_waits(store, small, passing):
    "At once while an expert is fetched; when the call has ended, while one is multiplied: the caller's arrays are in use until then."
    files = Stuck()
    experts, raised = make(store, 2, 1, files, nbytes=small if passing else None), []
    experts.request(0, [1, 2])

    def wait():
        try:
            experts.each(lambda e, expert: store.check(0, e, expert), 1)
        except RuntimeError as error:
            raised.append(str(error))

    if not passing:
        assert files.waits.wait(5)
    caller = threading.Thread(target=wait)
    caller.start()
    assert files.waits.wait(5)
    time.sleep(0.02)
    closer = threading.Thread(target=experts.close)
    closer.start()
    caller.join(0.1 if passing else 5)
    assert caller.is_alive() == passing
    files.gate.set()
    caller.join(5)
    closer.join(5)
    assert raised == ["the experts are closed"] and not caller.is_alive() and not closer.is_alive()


def test_what_cannot_be_requested(store):
    experts = make(store, 2)
    with pytest.raises(ValueError, match="an expert twice, or no slot"):
        experts.request(0, [3, 3])
    consume(experts, store, 0, [])
    close(experts)
    none = Experts(store.extents, Files(), 0, 0, 2, [])  # a model of dense layers
    none.request(0, [])
    with pytest.raises(ValueError, match="requested into 0 slots"):
        none.request(0, [1])
    close(none)
    with pytest.raises(ValueError, match="0 readers fetch nothing"):
        make(store, 2, readers=0)


# The account

def test_waiting_is_counted(store):
    experts = make(store, 4, readers=1, files=always(0.02))
    consume(experts, store, 0, [1])
    assert experts.wait_seconds >= 0.039
    before = experts.wait_seconds
    consume(experts, store, 0, [1])
    assert experts.wait_seconds - before < 0.01
    close(experts)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("passing", [False, True])
def test_waiting_and_working_are_told_apart(store, small, passing, threads):
    "The wall is reads and products; what the processor has done, over the threads, is not waiting."
    experts = make(store, 1, 1, always(0.005), nbytes=small if passing else None)
    z = np.random.default_rng(0).standard_normal((4000, LATENT)).astype(np.float32)
    product(store.whole(0, 0), z)
    experts.request(0, [1, 2])
    if not passing:
        until(lambda: experts._ready)
    began = time.perf_counter()
    experts.each(lambda e, expert: product(expert, z), threads)
    wall, busy = time.perf_counter() - began, experts.files.seconds["arithmetic"]
    assert busy > 1e-3, "eight thousand products of an expert take longer than that"
    assert abs(experts.wait_seconds - (wall - busy / min(threads, CORES))) < 5e-3, f"{experts.wait_seconds} s of {wall} s waiting, {busy} s at work"
    assert experts.wait_seconds >= (0.03 if passing else 0.01)
    close(experts)


def test_the_log_tells_reads_from_products(store, small):
    experts = make(store, 1, 1, nbytes=small)
    experts.files.log = []
    consume(experts, store, 0, [1, 2])
    read = [e.nbytes for e in experts.files.log if e.what == "experts"]
    assert sum(read) == 2 * SIZE
    assert sum(e.nbytes for e in experts.files.log if e.what == "arithmetic") == 2 * sum(SHAPES[n][0] * SHAPES[n][1] for n in MATRICES)
    assert all(e.began <= e.ended for e in experts.files.log)
    assert all(a.ended <= b.began + 1e-6 for a, b in zip(experts.files.log, experts.files.log[1:])), "one reader does one thing at a time"
    close(experts)
