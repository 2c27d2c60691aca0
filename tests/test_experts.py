"k3lib.experts: every requested expert arrives once with its own bytes, whatever the slots, the order and the interruptions."
import os
import random
import threading
import time

import numpy as np
import pytest

from hypothesis import given, settings
from hypothesis import strategies as st

from k3lib import experts as experts_module
from k3lib.checkpoint import CheckpointError, Extent
from k3lib.experts import Experts, Passing, passing_bytes, read_expert, runs, slot_bytes
from k3lib.moe import Expert
from k3lib.trunk import PAGE, Files, aligned

LAYERS, EXPERTS = 3, 12
SHAPES = dict(w1=(24, 16), w1_scale=(24, 1), w2=(32, 12), w2_scale=(32, 1), w3=(24, 16), w3_scale=(24, 1))


class Store:
    "Experts of random bytes in files of one layer each; their six tensors adjacent, or anywhere in any order."

    def __init__(self, folder, scattered=False, seed=0):
        rng = np.random.default_rng(seed)
        self.bytes, self.where = {}, {}
        for L in range(LAYERS):
            pieces = [(e, short) for e in range(EXPERTS) for short in SHAPES]
            if scattered:
                random.Random(seed + L).shuffle(pieces)
            path, blob = str(folder / f"layer{L}.bin"), bytearray(b"head" * 5)
            for e, short in pieces:
                array = rng.integers(0, 256, SHAPES[short]).astype(np.uint8)
                self.bytes[L, e, short], self.where[L, e, short] = array, Extent(path, len(blob), array.nbytes, "U8", array.shape)
                blob += array.tobytes()
            with open(path, "wb") as file:
                file.write(blob)

    def extents(self, L, e):
        return [self.where[L, e, short] for short in SHAPES]

    def check(self, L, e, expert, when=""):
        if isinstance(expert, Passing):
            return self.check_passing(L, e, expert)
        assert isinstance(expert, Expert)
        for short, found in zip(SHAPES, expert):
            assert found.shape == SHAPES[short] and found.dtype == np.uint8 and found.flags.c_contiguous
            assert np.array_equal(found, self.bytes[L, e, short]), f"layer {L} expert {e} {short}{when}: other bytes than the file's"

    def check_passing(self, L, e, expert):
        for name in ("w1", "w3", "w2"):
            packed, scale, rows = self.bytes[L, e, name], self.bytes[L, e, name + "_scale"], 0
            assert expert.rows(name) == len(packed)
            for first, some, scales in expert.blocks(name):
                assert first == rows and len(some) == len(scales), f"{name}: a block of {len(some)} rows and {len(scales)} scales at {first}, not {rows}"
                for short, found, expected in ((name, some, packed), (name + "_scale", scales, scale)):
                    assert found.flags.c_contiguous and np.array_equal(found, expected[first:first + len(some)]), (
                        f"layer {L} expert {e} {short} rows {first}..: other bytes than the file's")
                rows += len(some)
            assert rows == len(packed)


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


class Poisoned(Experts):
    "Experts whose slots are overwritten when they are chosen to be filled again."

    def _slot(self):
        slot = super()._slot()
        if slot is not None:
            self._memory[slot][:] = 0xEE
        return slot


def make(store, slots, readers=3, files=None, kind=Experts, nbytes=None):
    return kind(store.extents, files or Files(), slots, nbytes or slot_bytes(store.extents(0, 0)), readers)


@pytest.fixture
def small(store, monkeypatch):
    "Bytes of a slot through which the store's experts pass four rows at a time."
    monkeypatch.setattr(experts_module, "PIECE", 64)
    nbytes = passing_bytes(store.extents(0, 0))
    assert nbytes < slot_bytes(store.extents(0, 0))
    return nbytes


def consume(experts, store, L, ids, use=lambda: None):
    "Request and take all; the ids in the order in which they came."
    layer, order = experts.layer(L), []
    layer.request(sorted(ids))
    for e, expert in layer.arrivals():
        store.check(L, e, expert)
        use()
        store.check(L, e, expert, " after its use")
        order.append(e)
    assert sorted(order) == sorted(ids), f"requested {sorted(ids)}, arrived {sorted(order)}"
    return order


def close(experts):
    experts.close()
    experts.files.close()


def test_adjacent_tensors_are_one_read():
    def at(file, *offsets):
        return [Extent(file, offset, 10, "U8", (10,)) for offset in offsets]
    assert runs(at("f", 0, 10, 20, 30)) == [[0, 1, 2, 3]]
    assert runs(at("f", 20, 0, 10)) == [[1, 2, 0]]
    assert runs(at("f", 0, 10, 21, 31)) == [[0, 1], [2, 3]]
    assert runs(at("f", 10) + at("g", 20, 30)) == [[0], [1, 2]]


@pytest.mark.parametrize("scattered", [False, True])
def test_an_expert_is_read_into_one_slot_however_it_lies(tmp_path, scattered):
    store, files = Store(tmp_path, scattered), Files()
    for L in range(LAYERS):
        for e in range(EXPERTS):
            extents = store.extents(L, e)
            buffer = aligned(slot_bytes(extents))
            before = files.moved
            store.check(L, e, read_expert(files, extents, buffer))
            if not scattered:
                assert files.moved - before <= sum(x.nbytes for x in extents) + 2 * PAGE, "six neighbours took more than one read"
    assert files.bytes_read == {"trunk": 0, "other": 0, "experts": sum(a.nbytes for a in store.bytes.values())}
    files.close()


def test_fifty_runs_of_shuffled_arrivals(tmp_path):
    "Readers that sleep at random, poisoned slots, one slot to more than all: right bytes before and after use, each expert once."
    orders = set()
    for run in range(50):
        rng = random.Random(run)
        store = Store(tmp_path, run % 2 == 1, run)
        experts = make(store, rng.choice([1, 2, 5, 40]), rng.choice([1, 2, 4]), Slow(run), Poisoned)
        for _ in range(2):
            for L in range(LAYERS):
                order = consume(experts, store, L, rng.sample(range(EXPERTS), rng.randint(1, 8)), lambda: time.sleep(rng.random() * 2e-4))
                orders.add(order == sorted(order))
        close(experts)
    assert orders == {True, False}, "all arrivals came in the order of their ids: nothing was shuffled"


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_fewer_slots_than_experts(store, slots):
    "More is requested than fits: the rest is read as slots come free, also while every slot holds a hit."
    experts = make(store, slots)
    for _ in range(3):
        consume(experts, store, 0, range(8))
    assert experts.requests == 24
    close(experts)


def test_hits_were_resident_before_the_request(store):
    "Fetched for this request is no hit, however early it came; resident since an earlier one is; the least recently used goes first."
    experts = make(store, 4, readers=1)
    told = []

    def step(L, ids):
        before = experts.hits
        consume(experts, store, L, ids)
        told.append(experts.hits - before)

    step(0, [0, 1, 2, 3])   # nothing there yet
    step(0, [0, 1, 2, 3])   # all there
    step(1, [0, 1])         # the same ids of another layer are other experts; two of layer 0 go
    step(0, [0, 1, 2, 3])   # two of four are left
    step(0, [4, 5, 6, 7])   # all new
    step(0, [0, 1, 2, 3])   # and nothing is left
    assert told == [0, 4, 0, 2, 0, 0], told
    assert (experts.requests, experts.hits) == (22, 6)
    close(experts)


def test_the_least_recently_used_goes_first(store):
    experts = make(store, 3, readers=1)
    for ids in ([0], [1], [2], [0], [3]):  # 1 is now the oldest, and goes for 3
        consume(experts, store, 0, ids)
    before = experts.hits
    consume(experts, store, 0, [0, 2, 3])
    assert experts.hits - before == 3
    consume(experts, store, 0, [1])
    assert experts.hits - before == 3
    close(experts)


def test_a_requested_expert_that_is_resident_is_not_evicted_by_its_neighbours(store):
    "The last of the request is resident and oldest: fetching the others must not push it out before it is used."
    experts = make(store, 2, readers=2, kind=Poisoned)
    consume(experts, store, 0, [9])
    consume(experts, store, 0, [3])
    experts.request(0, [1, 2, 5, 9])
    deadline = time.time() + 2
    while len(experts._ready) < 2 and time.time() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    seen = [(e, store.check(0, e, expert)) for e, expert in experts.arrivals()]
    assert sorted(e for e, _ in seen) == [1, 2, 5, 9] and seen[0][0] == 9
    assert experts.hits == 1
    close(experts)


def test_reading_starts_with_the_request(store):
    "Nobody has asked for an arrival yet, and the bytes are already on their way: as many as there are slots."
    experts = make(store, 3)
    experts.request(0, range(8))
    size, deadline = sum(x.nbytes for x in store.extents(0, 0)), time.time() + 5
    while experts.files.bytes_read["experts"] < 3 * size and time.time() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert experts.files.bytes_read["experts"] == 3 * size
    close(experts)


@pytest.mark.parametrize("taken", [0, 1, 3, 8])
def test_an_interrupted_request_leaves_nothing_behind(store, taken):
    experts = make(store, 3, files=Slow(taken), kind=Poisoned)
    kept = []
    for L in (0, 1, 0, 2):
        layer = experts.layer(L)
        layer.request(range(8))
        arrivals = layer.arrivals()
        for _ in range(taken):
            next(arrivals)
        kept.append(arrivals)  # alive, as in a traceback somebody keeps
        consume(experts, store, L, [1, 2, 10, 11])
    assert len(experts._free) + len(experts._resident) == 3, "a slot was lost or counted twice"
    for arrivals in kept:
        if taken != 0:
            with pytest.raises(RuntimeError, match="these arrivals belong to an earlier request"):
                next(arrivals)
    close(experts)


def test_arrivals_of_an_earlier_request_release_nothing(store):
    "An abandoned loop ends while the next request's expert is in use: its slot must not be filled again."
    experts = make(store, 1, kind=Poisoned)
    experts.request(0, [4, 5])
    stale = experts.arrivals()
    next(stale)
    experts.request(0, [4, 6])
    current = experts.arrivals()
    e, expert = next(current)
    stale.close()
    time.sleep(0.02)
    store.check(0, e, expert, " after an earlier loop has ended")
    rest = [(e, store.check(0, e, expert)) for e, expert in current]
    assert {e, *(e for e, _ in rest)} == {4, 6}
    close(experts)


def test_a_reader_s_error_reaches_the_consumer_and_the_next_request_works(store):
    path = store.where[1, 0, "w1"].file
    with open(path, "rb") as file:
        whole = file.read()
    last = store.extents(1, EXPERTS - 1)
    begin = last[0].offset
    experts = make(store, 2)
    os.truncate(path, begin + 100)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"layer1.bin: ends at byte {begin + 100}, but bytes {begin} to \d+ are needed"):
            consume(experts, store, 1, [EXPERTS - 1, 0, 1])
        consume(experts, store, 0, range(6))
    with open(path, "wb") as file:
        file.write(whole)
    experts.close()
    experts = make(store, 2)
    consume(experts, store, 1, [EXPERTS - 1, 0, 1])
    close(experts)


def test_an_error_is_raised_whatever_it_is(store):
    "A bug in finding an expert's extents must not leave the consumer waiting."
    def lost(L, e):
        raise KeyError(f"expert {e}")

    experts = Experts(lost, Files(), 2, 4 * PAGE, 2)
    with pytest.raises(KeyError, match="expert 3"):
        experts.request(0, [3])
        next(experts.arrivals())
    close(experts)


def test_closing_wakes_whoever_waits(store):
    gate = threading.Event()

    class Stuck(Files):
        def read(self, *args):
            gate.wait()
            return super().read(*args)

    experts, raised = make(store, 2, files=Stuck()), []

    def wait():
        try:
            consume(experts, store, 0, [1])
        except RuntimeError as error:
            raised.append(str(error))

    consumer = threading.Thread(target=wait)
    consumer.start()
    time.sleep(0.02)
    closer = threading.Thread(target=experts.close)
    closer.start()
    consumer.join(5)
    assert not consumer.is_alive() and raised == ["the experts are closed"]
    gate.set()
    closer.join(5)
    assert not closer.is_alive()


def test_what_cannot_be_requested(store):
    experts = make(store, 2)
    with pytest.raises(ValueError, match="an expert twice, or no slot"):
        experts.request(0, [3, 3])
    consume(experts, store, 0, [])
    close(experts)
    none = Experts(store.extents, Files(), 0, 0, 2)  # a model of dense layers
    none.request(0, [])
    with pytest.raises(ValueError, match="requested into 0 slots"):
        none.request(0, [1])
    close(none)
    with pytest.raises(ValueError, match="0 readers fetch nothing"):
        make(store, 2, readers=0)


def test_waiting_is_counted(store):
    experts = make(store, 4, readers=1, files=Slow(0))
    experts.files.random = type("Always", (), {"random": staticmethod(lambda: 1.0)})()
    experts.files.most = 0.02
    consume(experts, store, 0, [1])
    assert experts.wait_seconds >= 0.039
    before = experts.wait_seconds
    consume(experts, store, 0, [1])
    assert experts.wait_seconds - before < 0.01
    close(experts)


# Multiplied by the readers

def each(experts, store, L, ids, threads=2, use=lambda: None):
    "Request and have the readers compare; returns the ids in the order in which they came."
    layer, order, running, most, lock = experts.layer(L), [], [0], [0], threading.Lock()
    layer.request(sorted(ids))

    def work(e, expert):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        store.check(L, e, expert)
        use()
        if not isinstance(expert, Passing):
            store.check(L, e, expert, " after its use")
        with lock:
            running[0] -= 1
            order.append(e)

    layer.each(work, threads)
    assert running[0] == 0, "each() has returned before its calls"
    assert sorted(order) == sorted(ids), f"requested {sorted(ids)}, called for {sorted(order)}"
    return most[0]


def test_fifty_runs_of_experts_multiplied_where_they_were_read(tmp_path, monkeypatch):
    "Whole or in pieces, few slots or many, slow readers, poisoned slots, taking and calling in turn."
    monkeypatch.setattr(experts_module, "PIECE", 64)
    for run in range(50):
        rng = random.Random(run)
        store = Store(tmp_path, run % 2 == 1, run)
        nbytes = passing_bytes(store.extents(0, 0)) if run % 3 else None
        threads, slots = rng.choice([1, 2]), rng.choice([1, 2, 5, 40])
        experts = make(store, slots, rng.choice([1, 2, 4]), Slow(run, 1e-4), Poisoned, nbytes)
        for number in range(2):
            for L in range(LAYERS):
                ids = rng.sample(range(EXPERTS), rng.randint(1, 8))
                if number + L == 2:
                    consume(experts, store, L, ids)
                else:
                    most = each(experts, store, L, ids, threads, lambda: time.sleep(rng.random() * 2e-4))
                    assert nbytes or most <= threads, f"{most} calls at a time, {threads} allowed"
        assert not (nbytes and experts.hits)
        close(experts)


def test_hits_are_counted_whoever_multiplies(store):
    experts = make(store, 4)
    for ids, hits in (([0, 1, 2, 3], 0), ([0, 1, 2, 3], 4), ([2, 3, 4, 5], 6), ([2, 3, 4, 5], 10)):
        each(experts, store, 0, ids)
        assert experts.hits == hits
    close(experts)


def test_what_passes_is_begun_with_the_request_and_not_kept(store, small):
    experts, size = make(store, 3, nbytes=small), sum(x.nbytes for x in store.extents(0, 0))
    first = sum(store.where[0, 0, short].nbytes for short in ("w1_scale",)) + 4 * SHAPES["w1"][1]
    experts.request(0, range(8))
    deadline = time.time() + 5
    while experts.files.bytes_read["experts"] < 3 * first and time.time() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert experts.files.bytes_read["experts"] == 3 * first, "each of three slots holds the beginning of an expert"
    for _ in range(2):
        each(experts, store, 0, range(8))
    assert experts.hits == 0 and experts.requests == 24
    assert experts.files.bytes_read["experts"] == 16 * size + 3 * first  # the first request was replaced
    close(experts)


def test_pieces_are_multiplied_on_as_many_threads_as_allowed(store, small):
    "Four readers let experts pass; a block is out on one thread at a time."
    experts = make(store, 4, 4, nbytes=small)
    experts.request(1, range(8))
    out, most, lock = [0], [0], threading.Lock()

    def work(e, expert):
        for _ in expert.blocks("w1"):
            with lock:
                out[0] += 1
                most[0] = max(most[0], out[0])
            time.sleep(1e-3)
            with lock:
                out[0] -= 1

    experts.each(work, 1)
    assert most[0] == 1
    close(experts)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 400))
def test_whatever_passes_fits_its_slot(latent, width, piece):
    def extent(*shape):
        return Extent("f", 4095, shape[0] * shape[1], "U8", shape)
    a, b = extent(32 * width, 16 * latent), extent(32 * latent, 16 * width)
    extents = [a, extent(32 * width, latent), b, extent(32 * latent, width), a, extent(32 * width, latent)]
    before, experts_module.PIECE = experts_module.PIECE, piece * PAGE
    try:
        slot = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (passing_bytes(extents),), (0,))
        passing = Passing(None, extents, slot)
        for name, scale in (("w1", extents[1]), ("w2", extents[3])):
            reads = passing._reads(name)
            assert sum(r.rows for r in reads) == passing.rows(name)
            assert all(-(-(4095 + r.nbytes) // PAGE) * PAGE <= len(passing._row_slot) for r in reads)
            assert -(-(4095 + scale.nbytes) // PAGE) * PAGE <= len(passing._scale_slot) and len(passing._scale_slot) % PAGE == 0
    finally:
        experts_module.PIECE = before


@pytest.mark.parametrize("passing", [False, True])
def test_an_error_reaches_the_caller_of_each_and_the_next_request_works(store, small, passing):
    "Of a read and of a call; no call runs on, no slot is lost."
    experts = make(store, 3, nbytes=small if passing else None)
    path = store.where[1, 0, "w1"].file
    with open(path, "rb") as file:
        whole = file.read()
    cut = store.where[1, EXPERTS - 1, "w2"].offset + 3
    os.truncate(path, cut)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"layer1.bin: ends at byte {cut}, but bytes \d+ to \d+ are needed"):
            each(experts, store, 1, [EXPERTS - 1, 0, 1, 2, 3])
        each(experts, store, 0, range(6))
    with open(path, "wb") as file:
        file.write(whole)
    begun, ended = [], []

    def work(e, expert):
        begun.append(e)
        if len(begun) == 2:
            raise ZeroDivisionError("in a call")
        time.sleep(5e-3)
        ended.append(e)

    experts.request(0, range(6))
    with pytest.raises(ZeroDivisionError):
        experts.each(work, 2)
    running = len(begun) - len(ended) - 1
    time.sleep(0.01)
    assert running == 0 and len(begun) - len(ended) == 1, "a call began or ran on after each() had raised"
    each(experts, store, 2, range(6))
    assert len(experts._free) + len(experts._resident) + len(experts._passing) == 3, "a slot was lost or counted twice"
    close(experts)


def test_closing_wakes_the_caller_of_each(store):
    gate = threading.Event()

    class Stuck(Files):
        def read(self, *args):
            gate.wait()
            return super().read(*args)

    experts, raised = make(store, 2, files=Stuck()), []
    experts.request(0, [1, 2])

    def wait():
        try:
            experts.each(lambda e, expert: None, 1)
        except RuntimeError as error:
            raised.append(str(error))

    consumer = threading.Thread(target=wait)
    consumer.start()
    time.sleep(0.02)
    closer = threading.Thread(target=experts.close)
    closer.start()
    consumer.join(5)
    assert not consumer.is_alive() and raised == ["the experts are closed"]
    gate.set()
    closer.join(5)
    assert not closer.is_alive()


@pytest.mark.parametrize("passing", [False, True])
def test_waiting_and_working_are_told_apart(store, small, passing):
    experts = make(store, 1, 1, Slow(0, 0), nbytes=small if passing else None)
    experts.files.random = type("Always", (), {"random": staticmethod(lambda: 1.0)})()
    experts.files.most = 0.005  # twice a read
    experts.files.log = []

    def work(e, expert):
        for name in ("w1", "w3", "w2") if passing else ("w1",):
            for _ in expert.blocks(name) if passing else (0,):
                time.sleep(0.02)

    began = time.perf_counter()
    experts.request(0, [1, 2])
    experts.each(work, 1)
    wall = time.perf_counter() - began
    worked = sum(e.ended - e.began for e in experts.files.log if e.what == "arithmetic")
    assert len([e for e in experts.files.log if e.what == "arithmetic"]) == (2 * (6 + 6 + 8) if passing else 2)
    assert 0.01 <= experts.wait_seconds <= wall - worked + 0.01, f"{experts.wait_seconds} s of {wall} s waiting, {worked} s at work"
    close(experts)
