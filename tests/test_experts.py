"k3lib.experts: every requested expert is called for once, with its own bytes, in any memory, order and interruption."
import _thread
import contextlib
import errno
import gc
import itertools
import os
import random
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from common import MODEL, PROMPT, load_with, recurring, until
from hypothesis import given
from hypothesis import strategies as st
from interrupts import at_every_moment
from matrices import Slow

import k3lib
from k3lib import experts as experts_module
from k3lib import layout, prefetch, read_multiply
from k3lib.cache_policy import LayerCaches, replay, working_set
from k3lib.disk import PAGE, File, Files, page_buffer
from k3lib.experts import Experts, StreamedPackedMatrix, adjacent_runs, read_expert, streaming_expert
from k3lib.fileio import CheckpointError
from k3lib.header import Extent
from k3lib.layout import Buffers, ExpertLayout, expert_slot_bytes, streaming_slot_bytes
from k3lib.matmul import PackedMatrix
from k3lib.moe import Expert, Situ, expert_mlp, routed_sum
from k3lib.parallel import CORES
from k3lib.read_multiply import max_concurrent_blocks
from k3lib.trace import packed_trace, read_trace, steps_of

LAYERS, EXPERTS = 3, 12
LATENT, WIDTH = 96, 64
MATRICES = ("w1", "w2", "w3")
SITU = Situ(4.0, 25.0)


def shapes_of(latent, width):
    sides = dict(w1=(width, latent), w2=(latent, width), w3=(width, latent))
    return {name + end: (n, k // per) for name, (n, k) in sides.items() for end, per in (("", 2), ("_scale", 32))}


SHAPES = shapes_of(LATENT, WIDTH)
SIZE = sum(n * m for n, m in SHAPES.values())
UNIT = 48 * 48  # bytes: 48 of 64 and 64 of 96 rows at a time
Z = np.random.default_rng(5).standard_normal((3, LATENT)).astype(np.float32)


def product(expert, z=Z):
    return expert_mlp(expert, z, SITU, np.empty_like(z))


class Store:
    """Experts of random bytes in files of one layer each. Offsets are odd.

    Their six tensors lie side by side, or anywhere in any order if `scattered`.
    """

    def __init__(self, folder, scattered=False, seed=0, shapes=SHAPES, layers=LAYERS, experts=EXPERTS, gap=3, name=""):
        rng = np.random.default_rng(seed)
        self.bytes, self.where, self.shapes = {}, {}, shapes
        for L in range(layers):
            tensors = [(e, short) for e in range(experts) for short in shapes]
            if scattered:
                random.Random(seed + L).shuffle(tensors)
            path, blob = str(folder / f"{name}layer{L}.bin"), bytearray(b"h" * (18 + gap))
            for e, short in tensors:
                low, high = (118, 125) if short.endswith("scale") else (0, 256)
                array = rng.integers(low, high, shapes[short]).astype(np.uint8)
                self.bytes[L, e, short] = array
                self.where[L, e, short] = Extent(path, len(blob), array.nbytes, "U8", array.shape)
                blob += array.tobytes()
            with open(path, "wb") as file:
                file.write(blob)
        self._products = {}

    def extents(self, L, e):
        return [self.where[L, e, short] for short in self.shapes]

    def whole(self, L, e):
        return Expert.packed([self.bytes[L, e, short] for short in self.shapes])

    def product(self, L, e):
        if (L, e) not in self._products:
            self._products[L, e] = product(self.whole(L, e))
        return self._products[L, e]

    def check(self, L, e, expert, when=""):
        "The product; and the bytes, of an expert that is whole."
        found, expected = product(expert), self.product(L, e)
        assert found.tobytes() == expected.tobytes(), (
            f"layer {L} expert {e}{when}: a product that differs by {np.abs(found - expected).max():.3g} "
            f"at {np.argmax(found != expected)}")
        if is_whole(expert):
            self.check_bytes(L, e, expert, when)

    def check_bytes(self, L, e, expert, when=""):
        arrays = [array for matrix in expert for array in (matrix.packed, matrix.scale)]
        for (short, shape), found in zip(self.shapes.items(), arrays):
            assert found.shape == shape and found.dtype == np.uint8 and found.flags.c_contiguous
            assert np.array_equal(found, self.bytes[L, e, short]), (
                f"layer {L} expert {e} {short}{when}: other bytes than the file's")


def is_whole(expert):
    "Does it lie in memory? Else it streams: all three matrices do the one or the other."
    kinds = {type(matrix) for matrix in expert}
    assert kinds in ({PackedMatrix}, {StreamedPackedMatrix})
    return kinds == {PackedMatrix}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


class Overwriting(Slow):
    "Files that are slow, and whose reads overwrite all of the buffer that they are given."

    def read(self, buffer, *args):
        buffer[:] = 0xEE
        return super().read(buffer, *args)


class Gated(Files):
    "Files whose reads wait until the gate is opened."

    def __init__(self):
        super().__init__()
        self.gate, self.waits = threading.Event(), threading.Event()

    def read(self, *args):
        self.waits.set()
        assert self.gate.wait(10)
        return super().read(*args)


@contextlib.contextmanager
def running(store, slots, readers=3, files=None, nbytes=None, extents=None):
    "Experts in `slots` slots of `nbytes`, of a whole expert if None. They and their files are closed in the end."
    files, whole = files or Files(), nbytes is None
    memory = Buffers(slots, expert_slot_bytes(store.extents(0, 0)) if whole else nbytes)
    experts = Experts(ExpertLayout(tuple(range(LAYERS)), memory, readers, whole), extents or store.extents, files)
    try:
        yield experts
    finally:
        experts.close()
        files.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("k3-experts")]


def set_unit(monkeypatch, nbytes):
    monkeypatch.setattr(layout, "READ_UNIT", nbytes)
    monkeypatch.setattr(read_multiply, "READ_UNIT", nbytes)


@pytest.fixture
def small(store, monkeypatch):
    "Bytes of a slot through which the store's experts stream."
    set_unit(monkeypatch, UNIT)
    nbytes = streaming_slot_bytes(store.extents(0, 0))
    assert nbytes < expert_slot_bytes(store.extents(0, 0))
    return nbytes


@pytest.fixture(params=["compiled", "from Python", "buffered"])
def way(request, monkeypatch):
    "How the rows of an expert that streams are read."
    if request.param == "from Python":
        monkeypatch.setattr(read_multiply, "COMPILED_READS", False)
    if request.param == "buffered":
        really_open = os.open

        def without_direct(path, flags, *more):
            if flags & getattr(os, "O_DIRECT", 0):
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return really_open(path, flags, *more)
        monkeypatch.setattr(os, "open", without_direct)
    return request.param


def consume(experts, store, L, ids, limit=1, use=lambda: None):
    "Request and have the readers compare; the ids in the order in which they came."
    order, inside, lock = [], [], threading.Lock()

    def work(e, expert):
        with lock:
            inside.append(e)
            assert len(inside) <= limit, f"{len(inside)} calls at a time, {limit} allowed"
        store.check(L, e, expert)
        use()
        if is_whole(expert):
            store.check_bytes(L, e, expert, " after its use")
        with lock:
            inside.remove(e)
            order.append(e)

    experts.layer(L).request(sorted(ids))
    experts.map(work, limit)
    assert not inside, "map() has returned before its calls"
    assert sorted(order) == sorted(ids), f"requested {sorted(ids)}, called for {sorted(order)}"
    return order


def hits_of(experts, store, L, ids):
    "How many of a request's experts are hits."
    before = experts.hits
    consume(experts, store, L, ids, 2)
    return experts.hits - before


def read_bytes(experts):
    return experts.files.bytes_read["experts"]


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
    for L, e in itertools.product(range(LAYERS), range(EXPERTS)):
        extents = store.extents(L, e)
        before = files.bytes_transferred
        store.check(L, e, read_expert(files, extents, page_buffer(expert_slot_bytes(extents))))
        if not scattered:
            assert files.bytes_transferred - before <= SIZE + 2 * PAGE, "six neighbours took more than one read"
    assert files.bytes_read == {"trunk": 0, "other": 0, "experts": LAYERS * EXPERTS * SIZE}
    files.close()


# Multiplied while it is read

@pytest.mark.parametrize("unit", [1, 16 * 48, UNIT, 64 * 48])
def test_an_expert_that_streams_has_the_product_of_the_whole(tmp_path, monkeypatch, way, unit):
    "At any offset, row by row, in units of which the last is not full, and at once."
    set_unit(monkeypatch, unit)
    for gap in (0, 1, 4095, 4077):
        store, files = Store(tmp_path, gap % 2 == 0, gap, layers=1, experts=3, gap=gap), Files()
        for e in range(3):
            extents = store.extents(0, e)
            buffer = page_buffer(streaming_slot_bytes(extents))
            buffer[:] = 0xEE
            streaming = streaming_expert(files, extents, buffer)
            assert [matrix.shape for matrix in streaming] == [matrix.shape for matrix in store.whole(0, e)]
            assert read_bytes_of(files) == e * SIZE, "nothing is read before it is multiplied"
            store.check(0, e, streaming)
            assert read_bytes_of(files) == (e + 1) * SIZE, "every byte is counted once"
        files.close()


def read_bytes_of(files):
    return files.bytes_read["experts"]


def test_rows_are_read_by_compiled_code_where_that_can(store, small, way):
    "Python reads the three scales of an expert, and the units only where it must."
    calls, files = [], Files()
    read, files.read = files.read, lambda *args: [calls.append(args), read(*args)][1]
    store.check(0, 0, streaming_expert(files, store.extents(0, 0), page_buffer(small)))
    direct = read_multiply.COMPILED_READS and File(store.where[0, 0, "w1"].file).access == "direct"
    assert way != "buffered" or not direct
    assert len(calls) == (3 if direct else 3 + 2 + 2 + 2), f"{way}: {len(calls)} reads from Python"
    assert read_bytes_of(files) == SIZE
    files.close()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3 * PAGE), st.integers(0, PAGE), st.booleans(),
       st.booleans(), st.integers(1, 5))
def test_an_expert_fits_its_buffer(tmp_path_factory, latent, width, unit, gap, whole, scattered, tokens):
    "Compiled reads do not look where the buffer ends: nothing behind it is touched."
    shapes = shapes_of(32 * latent, 32 * width)
    store = Store(tmp_path_factory.mktemp("one"), scattered, gap, shapes, 1, 1, gap)
    z = np.random.default_rng(gap).standard_normal((tokens, 32 * latent)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        set_unit(patch, unit)
        nbytes = (expert_slot_bytes if whole else streaming_slot_bytes)(store.extents(0, 0))
        memory, files = page_buffer(nbytes + 2 * PAGE), Files()
        memory[:] = 0xEE
        expert = (read_expert if whole else streaming_expert)(files, store.extents(0, 0), memory[:nbytes])
        assert product(expert, z).tobytes() == product(store.whole(0, 0), z).tobytes()
        assert (memory[nbytes:] == 0xEE).all(), "bytes behind the buffer were written"
        files.close()


@pytest.mark.parametrize("unit", [1, UNIT, 1 << 20])
def test_the_blocks_of_a_matrix_that_streams_cover_it(store, monkeypatch, unit):
    set_unit(monkeypatch, unit)
    extents, files = store.extents(1, 5), Files()
    streaming = streaming_expert(files, extents, page_buffer(streaming_slot_bytes(extents)))
    for name in MATRICES:
        blocks, whole = [], getattr(store.whole(1, 5), name)
        getattr(streaming, name).map_blocks(
            lambda first, rows, threads: blocks.append((first, rows.packed.copy(), rows.scale.copy(), threads)), 2)
        assert [first for first, *_ in blocks] == np.cumsum([0, *(len(rows) for _, rows, _, _ in blocks[:-1])]).tolist()
        assert np.array_equal(np.concatenate([rows for _, rows, _, _ in blocks]), whole.packed)
        assert np.array_equal(np.concatenate([scale for _, _, scale, _ in blocks]), whole.scale)
        assert {threads for *_, threads in blocks} == {1}
    files.close()


def test_a_buffer_that_is_too_small_is_refused(store, small):
    "By an error, before compiled code writes behind its end."
    extents = store.extents(0, 0)
    streaming_expert(None, extents, np.zeros(small, np.uint8))
    with pytest.raises(ValueError, match=f"streams through a buffer of {small} bytes, this one has {small - 1}"):
        streaming_expert(None, extents, np.zeros(small - 1, np.uint8))
    with running(store, 2, nbytes=PAGE) as experts:
        with pytest.raises(ValueError, match="streams through a buffer"):
            consume(experts, store, 0, [1])


@pytest.mark.parametrize("short, first, rows", [
    ("w1_scale", 0, 64), ("w1", 0, 48), ("w1", 48, 16), ("w3_scale", 0, 64), ("w2_scale", 0, 96), ("w2", 64, 32)])
def test_a_file_that_ends_too_early(store, small, way, short, first, rows):
    "The message names the file, where it ends, and the bytes of the scales or of the unit that are missing."
    extent, row = store.where[1, EXPERTS - 1, short], SHAPES[short][1]
    begin, end = extent.offset + first * row, extent.offset + (first + rows) * row
    copy = extent.file + ".cut"
    with open(extent.file, "rb") as file, open(copy, "wb") as cut:
        cut.write(file.read()[:end - 1])
    extents = [x._replace(file=copy) if x == extent else x for x in store.extents(1, EXPERTS - 1)]
    files, name = Files(), short.removesuffix("_scale")
    streaming = streaming_expert(files, extents, page_buffer(small))
    words = rf"layer1.bin.cut: ends at byte {end - 1}, but bytes {begin} to {end} are needed"
    with pytest.raises(CheckpointError, match=words):
        product(streaming)
    n, k = getattr(streaming, name).shape
    out = np.full((3, n), 7, np.float32)
    with pytest.raises(CheckpointError, match=words):
        getattr(streaming, name).multiply(np.ones((3, k), np.float32), out)
    assert (out[:, first:first + rows] == 7).all(), "products of rows that are not in the file"
    with pytest.raises(CheckpointError, match=f"layer1.bin.cut: ends at byte {end - 1}, but bytes {extent.offset} to"):
        read_expert(files, extents, page_buffer(expert_slot_bytes(extents)))
    files.close()


# Any memory, any order

@pytest.mark.parametrize("streams", [False, True])
def test_fifty_runs_have_the_same_bytes(tmp_path, monkeypatch, streams):
    "Readers that sleep at random and overwrite what they are lent, one slot to more than all: right bytes, one sum."
    set_unit(monkeypatch, UNIT)
    stores = [Store(tmp_path, scattered, 1, name=f"{scattered}-") for scattered in (False, True)]
    orders, sums = set(), set()
    z = np.random.default_rng(8).standard_normal((4, LATENT)).astype(np.float32)
    every = np.tile(np.arange(EXPERTS, dtype=np.int32), (4, 1))
    ids = np.random.default_rng(9).permuted(every, axis=1)[:, :5].copy()
    weights = np.random.default_rng(10).random((4, 5)).astype(np.float32)
    for run in range(50):
        rng, store = random.Random(run), stores[run % 2]
        monkeypatch.setattr(read_multiply, "COMPILED_READS", run % 4 < 2)
        nbytes = streaming_slot_bytes(store.extents(0, 0)) if streams else None
        slots, readers = rng.choice([1, 2, 5, 8, 11, 40]), rng.choice([1, 2, 4])
        with running(store, slots, readers, Overwriting(run, 1e-4), nbytes) as experts:
            for _, L in itertools.product(range(2), range(LAYERS)):
                some, limit = rng.sample(range(EXPERTS), rng.randint(1, 8)), rng.choice([1, 2, 9])
                order = consume(experts, store, L, some, limit, lambda: time.sleep(rng.random() * 1e-4))
                orders.add(order == sorted(order))
            experts.layer(2).request(np.unique(ids).tolist())
            sums.add((run % 2, routed_sum(experts.layer(2), z, ids, weights, SITU, 2).tobytes()))
            assert not (streams and experts.hits)
    assert orders == {True, False}, "all came in the order of their ids: nothing was shuffled"
    assert len(sums) == 2, "one sum for each store"


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_fewer_slots_than_experts(store, slots):
    with running(store, slots) as experts:
        for _ in range(3):
            consume(experts, store, 0, range(8))
        assert experts.requests == 24


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("slots, readers", [(0, 2), (1, 3), (3, 3), (8, 3), (40, 2)])
def test_as_many_slots_as_the_layout_says(store, monkeypatch, slots, readers, whole):
    "The plan's promise rests on it: memory for the slots, and no other."
    taken = []
    monkeypatch.setattr(experts_module, "page_buffer", lambda nbytes: [taken.append(nbytes), page_buffer(nbytes)][1])
    nbytes = expert_slot_bytes(store.extents(0, 0))
    memory = ExpertLayout(tuple(range(LAYERS)), Buffers(slots, nbytes), readers, whole)
    experts = Experts(memory, store.extents, Files())
    assert taken == [nbytes] * slots
    capacities = [experts.layer(L).kept.cache.capacity for L in range(LAYERS)]
    assert sum(capacities) == (max(0, slots - readers) if whole else 0) and max(capacities) - min(capacities) <= 1
    if slots:
        for L in (0, 1, 0):
            consume(experts, store, L, range(8), 2)
        assert taken == [nbytes] * slots, "memory was taken after the start"
    experts.close()


@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("streams", [False, True])
def test_so_many_calls_at_a_time(store, small, streams, limit):
    "As many as allowed, and no more, however many readers there are."
    now, most, lock = [0], [0], threading.Lock()

    def work(e, expert):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(5e-3)
        store.check(1, e, expert)
        with lock:
            now[0] -= 1

    with running(store, 6, 6, nbytes=small if streams else None) as experts:
        experts.layer(1).request(range(8))
        experts.map(work, limit)
    assert most[0] == limit


def test_a_layer_lets_any_reader_multiply_once_all_cores_are_to_be_used(store):
    seen = []
    with running(store, 2) as experts:
        experts.map = lambda work, limit: seen.append(limit)
        for threads in (1, CORES, CORES + 1):
            experts.layer(0).map(None, threads)
    assert seen == [max_concurrent_blocks(threads) for threads in (1, CORES, CORES + 1)]


# What is cached, and what counts as a hit

@pytest.mark.parametrize("readers", [1, 3])
def test_hits_were_cached_before_the_request(store, readers):
    "Read ahead for this request is no hit; kept since an earlier one is. Layers do not take slots from one another."
    with running(store, LAYERS * 4 + readers, readers) as experts:
        told = [hits_of(experts, store, L, ids) for L, ids in (
            (0, range(4)),     # nothing is cached yet
            (0, range(4)),     # all are
            (1, range(5)),     # the same ids of another layer are other experts, and one more than are cached
            (0, range(4)),     # they took nothing from layer 0
            (0, range(4, 8)),  # all new
            (0, range(4)),     # and nothing is left
            (1, range(5)))]
        assert told == [0, 4, 0, 4, 0, 0, 4], told
        assert (experts.requests, experts.hits) == (30, 12)
        assert read_bytes(experts) == 18 * SIZE, "a hit is not read"


def test_an_expert_that_was_not_read_ahead_is_cached_or_streams(store, small):
    "The only reader waits for the first of six until the calls have begun. Two are to be cached; the others stream."
    files, kinds = Gated(), {}

    def work(e, expert):
        kinds[e] = is_whole(expert)
        store.check(0, e, expert)
        if not is_whole(expert):
            assert len(expert.w1.scale_buffer) + len(expert.w1.row_buffer) == small, "the less memory the better"

    with running(store, LAYERS * 2 + 1, 1, files) as experts:
        experts.layer(0).request(range(6))
        assert files.waits.wait(5)
        threading.Timer(0.05, files.gate.set).start()
        experts.map(work, 1)
        assert kinds == {e: e < 2 for e in range(6)}
        assert hits_of(experts, store, 0, range(2)) == 2
        assert read_bytes(experts) == 6 * SIZE


def test_an_expert_on_which_a_call_failed_is_not_cached(store):
    "Its bytes may be what was wrong, and mended by the next request."
    def fails(e, expert):
        raise ArithmeticError("not finite")

    with running(store, LAYERS * 4 + 3) as experts:
        consume(experts, store, 0, [1, 2])
        experts.layer(0).request([1])
        assert experts.hits == 1, "this test needs an expert that is cached"
        with pytest.raises(ArithmeticError):
            experts.map(fails, 2)
        assert hits_of(experts, store, 0, [1]) == 0
        assert hits_of(experts, store, 0, [1]) == 1
        assert read_bytes(experts) == 3 * SIZE


def test_the_newest_requests_stay(store):
    with running(store, LAYERS * 2 + 1, 1) as experts:
        for ids in ([0], [1], [2], [1], [3]):  # 1 was requested last but one, 2 before that
            consume(experts, store, 0, ids)
        assert experts.hits == 1
        assert hits_of(experts, store, 0, [1, 3]) == 2


def test_a_requested_expert_that_is_cached_is_not_evicted_by_its_neighbours(store):
    "The last of the request is cached: reading the others must not push it out before it is used."
    with running(store, LAYERS + 2, 2, Overwriting()) as experts:
        for L in (1, 2, 0):
            consume(experts, store, L, [9])
        experts.layer(0).request([1, 2, 5, 9])
        until(lambda: read_bytes(experts) >= 5 * SIZE)
        seen = []
        experts.map(lambda e, expert: seen.append((e, store.check(0, e, expert))), 1)
        assert sorted(e for e, _ in seen) == [1, 2, 5, 9] and experts.hits == 1


@pytest.mark.parametrize("cached", [0, 1])
def test_an_expert_in_use_keeps_its_slot(store, cached):
    "One call lingers over its expert while the other reader works through the rest of the request."
    with running(store, LAYERS * cached + 2, 2, Overwriting(longest=1e-4)) as experts:
        for ids in ([0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9]):
            done, first = [], threading.Event()

            def work(e, expert):
                lingers = not first.is_set() and not first.set()
                store.check(0, e, expert)
                if lingers:
                    until(lambda: len(done) == len(ids) - 1)
                    if is_whole(expert):
                        store.check_bytes(0, e, expert, " while others were read")
                    else:
                        store.check(0, e, expert, " while others were read")
                done.append(e)

            experts.layer(0).request(ids)
            experts.map(work, 2)
            assert sorted(done) == ids


def test_an_expert_that_was_multiplied_in_part_is_right_the_next_time(store, small):
    "A call that takes one matrix of three, or none."
    def lazy(e, expert):
        for name in MATRICES[:e]:
            n, k = getattr(expert, name).shape
            getattr(expert, name).multiply(np.ones((1, k), np.float32), np.empty((1, n), np.float32), 1)

    for slots, nbytes in ((LAYERS * 2 + 3, None), (3, small)):
        with running(store, slots, nbytes=nbytes) as experts:
            experts.layer(0).request(range(4))
            experts.map(lazy, 2)
            consume(experts, store, 0, range(4))


def test_reading_begins_with_the_request(store):
    "Nobody waits for an expert yet, and reads are under way: into the layer's slots and those of the readers."
    with running(store, LAYERS + 2, 2) as experts:
        experts.layer(0).request(range(8))
        until(lambda: read_bytes(experts) >= 3 * SIZE)
        assert read_bytes(experts) == 3 * SIZE
        consume(experts, store, 0, range(8))  # the first request was replaced; what it has read into its slot is a hit
        assert read_bytes(experts) == 10 * SIZE and experts.hits == 1


def test_a_request_waits_for_the_reads_of_the_one_it_replaces(store):
    "So what counts as a hit does not depend on how fast they were."
    files = Gated()
    with running(store, LAYERS + 1, 1, files) as experts:
        experts.layer(0).request([0, 1, 2])
        assert files.waits.wait(5)
        threading.Timer(0.05, files.gate.set).start()
        assert hits_of(experts, store, 0, [0]) == 1 and read_bytes(experts) == SIZE


def test_an_expert_that_could_not_be_read_leaves_its_slot_to_others(store):
    "Of two that were to be cached the second was read. It stays, and not the first, when a third comes."
    def lost(L, e):
        if e == 0:
            raise KeyError("lost")
        return store.extents(L, e)

    with running(store, LAYERS * 2 + 1, 1, extents=lost) as experts:
        experts.layer(0).request([0, 1])
        until(lambda: read_bytes(experts) == SIZE)
        with pytest.raises(KeyError, match="lost"):
            experts.map(lambda e, expert: None, 1)
        assert hits_of(experts, store, 0, [2]) == 0
        assert hits_of(experts, store, 0, [1, 2]) == 2


def test_an_expert_that_streams_is_read_when_it_is_multiplied_and_not_cached(store, small):
    with running(store, 3, nbytes=small) as experts:
        experts.layer(0).request(range(8))
        time.sleep(0.02)
        assert read_bytes(experts) == 0
        for n in (1, 2):
            consume(experts, store, 0, range(8))
            assert experts.files.bytes_read == {"trunk": 0, "other": 0, "experts": 8 * n * SIZE}
        assert experts.hits == 0 and experts.requests == 24


@pytest.mark.parametrize("slots", [3, 4, 9, 15, 27, 39, 60])
def test_the_hits_of_the_replay(tmp_path, store, slots):
    "The same trace and the same capacity, whatever the readers do: every hit, layer by layer, and no others."
    readers = 3
    steps = list(recurring(0.5, 8, layers=3, k=5, experts=12))
    capacity = max(0, slots - readers)
    with running(store, slots, readers) as experts:
        requests = []
        experts.on_request = lambda layer, ids: requests.extend((layer, e) for e in ids)
        caches, expected = LayerCaches(range(3), capacity), 0
        for layer, ids in itertools.chain(*steps):
            consume(experts, store, layer, ids, 2)
            expected += len(caches.request(layer, ids))
            assert experts.hits == expected
    (tmp_path / "trace").write_bytes(packed_trace(requests))
    assert steps_of(read_trace(tmp_path / "trace")) == (steps, 0)
    assert replay(LayerCaches(range(3), capacity), steps) == (experts.hits, experts.requests)
    assert (experts.hits > 0) == (slots > readers)


def test_a_decoder_has_the_hits_of_the_replay(tmp_path):
    "The embedded model with room for a part of its experts: prompt in one chunk, then steps."
    memory = Buffers(40, expert_slot_bytes([*k3lib.Checkpoint(MODEL).expert(1, 0).values()]))
    with load_with(ExpertLayout(tuple(range(1, 13)), memory, 4, True), MODEL, "1GB", context=16) as model:
        requests = []
        model.experts.on_request = lambda layer, ids: requests.extend((layer, e) for e in ids)
        list(model.generate([int(i) for i in PROMPT.split(",")][:3], 8))
        (tmp_path / "trace").write_bytes(packed_trace(requests))
        steps, _ = steps_of(read_trace(tmp_path / "trace"))
        assert len(steps) == 8 and [layer for layer, _ in steps[0]] == list(range(1, 13)) and working_set(steps) == 48
        report = model.report
        assert replay(LayerCaches(range(1, 13), 36), steps) == (report.expert_hits, report.expert_requests)
        assert report.expert_hits > 20


# What goes wrong

def test_a_request_is_answered_once(store):
    "After map() has returned or raised, the next one without a request is refused and calls nothing."
    calls, refused = [], "no request is open"

    def work(e, expert):
        calls.append(e)
        if len(calls) > 5:
            raise ZeroDivisionError("in a call")

    with running(store, 2) as experts:
        with pytest.raises(RuntimeError, match=refused):
            experts.map(work, 1)
        for ids, error in (([0, 1, 2, 3], None), ([0, 1, 2, 3], ZeroDivisionError), ([], None)):
            experts.layer(0).request(ids)
            with pytest.raises(error) if error else contextlib.nullcontext():
                experts.map(work, 1)
            before = len(calls)
            with pytest.raises(RuntimeError, match=refused):
                experts.map(work, 1)
            assert len(calls) == before
        consume(experts, store, 0, [1, 2])


@pytest.mark.parametrize("called", [0, 1, 3, 7])
@pytest.mark.parametrize("streams", [False, True])
def test_an_interrupted_request_leaves_nothing_behind(store, small, streams, called):
    "Whether map() was never called, or a call has failed: no call runs on, and the next request has its own experts."
    slots, nbytes = (3, small) if streams else (LAYERS * 2 + 3, None)
    with running(store, slots, files=Overwriting(called), nbytes=nbytes) as experts:
        for L in (0, 1, 0, 2):
            begun, ended, lock = [], [], threading.Lock()

            def work(e, expert):
                with lock:
                    begun.append(e)
                    if len(begun) > called:
                        raise ZeroDivisionError("in a call")
                store.check(L, e, expert)
                time.sleep(1e-3)
                ended.append(e)

            experts.layer(L).request(range(8))
            if called:
                with pytest.raises(ZeroDivisionError):
                    experts.map(work, 2)
                seen = len(begun), len(ended)
                time.sleep(5e-3)
                assert (len(begun), len(ended)) == seen, "a call began or ran on after map() had raised"
            consume(experts, store, L, [1, 2, 10, 11], 2)


@pytest.mark.parametrize("streams", [False, True])
def test_a_keyboard_interrupt_waits_for_the_calls_and_the_next_request_works(store, small, streams):
    inside = []

    def work(e, expert):
        inside.append(e)
        if len(inside) == 1:
            _thread.interrupt_main()
        time.sleep(0.01)
        store.check(0, e, expert)
        inside.remove(e)

    with running(store, 3, nbytes=small if streams else None) as experts:
        experts.layer(0).request(range(8))
        with pytest.raises(KeyboardInterrupt):
            experts.map(work, 2)
        assert not inside, "calls go on after map() has raised"
        consume(experts, store, 1, range(8), 2)


@pytest.mark.parametrize("streams", [False, True])
def test_an_interrupt_at_any_moment_leaves_experts_that_work(store, small, streams):
    "In the caller's thread, during a request and its answer: afterwards no slot is lost and every expert is right."
    begun = []

    def begin():
        slots, nbytes = (2, small) if streams else (LAYERS * 2 + 2, None)
        begun.append(running(store, slots, 2, nbytes=nbytes))
        experts = begun[-1].__enter__()
        consume(experts, store, 0, [0, 1, 2], 2)
        return experts

    def run(experts):
        experts.layer(0).request([1, 3, 4])
        experts.map(lambda e, expert: store.check(0, e, expert), 2)

    def check(experts):
        consume(experts, store, 1, [1, 3, 4], 2)
        for _ in range(2):
            hits = hits_of(experts, store, 0, [5, 6])
        assert hits == 2 * (not streams)
        begun[-1].__exit__(None, None, None)

    at_every_moment(experts_module.__file__, begin, run, check, 40)


@pytest.mark.parametrize("streams", [False, True])
def test_a_failing_read_reaches_the_caller_and_the_next_request_works(store, small, streams):
    "As long as the file is short every request that needs its end fails, and no other; afterwards none does."
    path, last = store.where[1, 0, "w1"].file, EXPERTS - 1
    with open(path, "rb") as file:
        data = file.read()
    cut = store.where[1, last, "w2"].offset + 3
    os.truncate(path, cut)
    slots, nbytes = (2, small) if streams else (LAYERS * 2 + 3, None)
    with running(store, slots, nbytes=nbytes) as experts:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=rf"layer1.bin: ends at byte {cut}, but bytes \d+ to \d+ are"):
                consume(experts, store, 1, [last, 0, 1, 2, 3], 2)
            consume(experts, store, 0, range(6), 2)
        with open(path, "r+b") as file:
            file.write(data)
        assert hits_of(experts, store, 1, [last]) == 0, "an expert that could not be read was called a hit"
        assert hits_of(experts, store, 1, [last]) == (not streams)


def test_an_error_is_raised_whatever_it_is(store):
    "A bug in finding an expert's extents ends no reader: it is the caller who hears of it."
    def lost(L, e):
        if e >= 3:
            raise KeyError(f"expert {e}")
        return store.extents(L, e)

    for ids, pause in itertools.product(([3], [1, 3], [1, 2, 3, 4, 5]), (0, 0.02)):
        with running(store, 2, 2, extents=lost) as experts:
            with pytest.raises(KeyError, match="expert [345]"):
                experts.layer(0).request(ids)
                time.sleep(pause)
                experts.map(lambda e, expert: None, 1)
            consume(experts, store, 0, [0, 1, 2])


@pytest.mark.parametrize("streams", [False, True])
def test_closing_wakes_a_caller_that_waits(store, small, streams):
    "At once while an expert is read ahead; after the call while one is multiplied, for that uses the caller's arrays."
    files, raised = Gated(), []
    with running(store, 2, 1, files, small if streams else None) as experts:
        experts.layer(0).request([1, 2])

        def wait():
            try:
                experts.map(lambda e, expert: store.check(0, e, expert), 1)
            except RuntimeError as error:
                raised.append(str(error))

        if not streams:
            assert files.waits.wait(5)
        caller = threading.Thread(target=wait)
        caller.start()
        assert files.waits.wait(5)
        time.sleep(0.02)
        closer = threading.Thread(target=experts.close)
        closer.start()
        caller.join(0.1 if streams else 5)
        assert caller.is_alive() == streams
        files.gate.set()
        caller.join(5)
        closer.join(5)
        assert not caller.is_alive() and not closer.is_alive()
    assert raised == ["experts: the readers have ended because the model is closed"]


def test_after_closing_nothing_is_requested(store):
    with running(store, 2) as experts:
        layer = experts.layer(0)
        consume(experts, store, 0, [1])
    with pytest.raises(RuntimeError, match="closed"):
        layer.request([1])
    experts.close()


@pytest.mark.parametrize("streams", [False, True])
def test_dropped_experts_are_freed_and_their_readers_end(store, small, streams):
    "By their reference count alone: before a request, after one, and with one that nobody has answered."
    slots, nbytes = (3, small) if streams else (LAYERS * 2 + 3, expert_slot_bytes(store.extents(0, 0)))
    gc.collect()
    gc.disable()
    try:
        for use in (lambda experts: None, lambda experts: consume(experts, store, 0, range(6), 2),
                    lambda experts: experts.layer(1).request(range(6))):
            memory = ExpertLayout(tuple(range(LAYERS)), Buffers(slots, nbytes), 3, not streams)
            experts = Experts(memory, store.extents, Files())
            use(experts)
            alive = [weakref.ref(experts), weakref.ref(experts.files)]
            del experts
            until(lambda: not any(thread.name.startswith("k3-") for thread in threading.enumerate()), 20)
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("k3-")]
            assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


def test_what_cannot_be_requested(store):
    with running(store, 2) as experts:
        with pytest.raises(ValueError, match=r"experts \[3, 3\] of layer 0 .* an expert is named twice"):
            experts.layer(0).request([3, 3])
        with pytest.raises(RuntimeError, match="no request is open"):
            experts.map(None, 1)
        consume(experts, store, 0, [])
        assert experts.requests == 0
    with running(store, 0) as experts:
        consume(experts, store, 0, [])
        with pytest.raises(ValueError, match="requested into 0 slots"):
            experts.layer(0).request([1])
    with pytest.raises(ValueError, match="0 readers"):
        Experts(ExpertLayout((0,), Buffers(2, PAGE), 0, True), store.extents, Files())


def test_a_model_of_dense_layers_has_no_experts(store):
    before = threading.active_count()
    experts = Experts(ExpertLayout((), Buffers(0, 0), 2, False), store.extents, Files())
    assert threading.active_count() == before
    assert (experts.requests, experts.hits, experts.wait_seconds) == (0, 0, 0.0)
    experts.close()


# The account

class Clocks:
    """Clocks that only late reads and products of a test move: no matter when the system lets a thread run.

    A read takes `read` seconds, and waits until map() has looked at the clock. Only work() is processor time.
    """

    def __init__(self, monkeypatch, read):
        self.wall, self.read_seconds, self.busy, self.lock = 0, read, threading.local(), threading.Lock()
        self.mapped = threading.Event()
        fake = SimpleNamespace(perf_counter=self.perf_counter, thread_time=self.thread_time)
        for module in (prefetch, experts_module, read_multiply):
            monkeypatch.setattr(module, "time", fake)

    def perf_counter(self):
        now = self.wall
        self.mapped.set()
        return now

    def thread_time(self):
        return getattr(self.busy, "seconds", 0)

    def work(self, seconds):
        with self.lock:
            self.wall += seconds
        self.busy.seconds = self.thread_time() + seconds

    def files(self):
        clocks = self

        class Late(Files):
            def read(self, *args):
                assert clocks.mapped.wait(20), "map() did not begin"
                with clocks.lock:
                    clocks.wall += clocks.read_seconds
                return super().read(*args)

        return Late()


def test_waiting_is_counted(store, monkeypatch):
    clocks = Clocks(monkeypatch, 40)
    with running(store, 4, 1, clocks.files()) as experts:
        consume(experts, store, 0, [1])
        assert experts.wait_seconds == 40
        consume(experts, store, 0, [1])
        assert experts.hits == 1 and experts.wait_seconds == 40


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("kind", ["read ahead", "to be cached", "streams"])
def test_waiting_and_working_are_told_apart(store, small, monkeypatch, kind, limit):
    "The wall is reads and products; what the processor has done, over the readers, is not waiting."
    clocks, real = Clocks(monkeypatch, 100), read_multiply.matmul_rows
    monkeypatch.setattr(read_multiply, "COMPILED_READS", False)
    monkeypatch.setattr(read_multiply, "matmul_rows", lambda *args: (clocks.work(1), real(*args))[1])
    busy = []

    def work(e, expert):
        if is_whole(expert):
            clocks.work(7)
        store.check(0, e, expert)
        busy.append(7 if is_whole(expert) else sum(matrix.seconds for matrix in expert))

    slots, nbytes = (1, small) if kind == "streams" else (LAYERS * 2 + 1, None) if kind == "to be cached" else (2, None)
    with running(store, slots, 1, clocks.files(), nbytes) as experts:
        if kind == "read ahead":
            clocks.mapped.set()
        experts.layer(0).request([1, 2])
        if kind == "read ahead":
            until(lambda: read_bytes(experts) == SIZE)
            assert read_bytes(experts) == SIZE, "one is read ahead; there is no memory for another"
        began = clocks.wall
        experts.map(work, limit)
        wall = clocks.wall - began
    reads = {"read ahead": 9, "to be cached": 2, "streams": 2 * 9}[kind]  # 9: three scales, two units of w1, w2 and w3
    assert sorted(busy) == {"read ahead": [6, 7], "to be cached": [7, 7], "streams": [6, 6]}[kind]
    assert wall == 100 * reads + sum(busy)
    assert experts.wait_seconds == wall - sum(busy) / min(limit, CORES)
