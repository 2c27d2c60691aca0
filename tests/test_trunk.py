"k3lib.trunk: a streamed matrix has the bits of a resident one, and no pass takes rows of another or of an older one."
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from common import same
from interrupts import time_limit
from matrices import BUFFER, MATRICES, Slow, layout_of, some_tensors, write_model

from k3lib import prefetch, read_multiply
from k3lib.disk import MAX_READERS, PAGE, Files
from k3lib.fileio import CheckpointError
from k3lib.layout import Buffers
from k3lib.matmul import ResidentMatrix, linear
from k3lib.parallel import CORES
from k3lib.read_multiply import max_concurrent_blocks, read_rows
from k3lib.trunk import Trunk, as_float32

ROUTERS = ("1.gate.weight", "2.gate.weight")


@pytest.fixture(autouse=True)
def bounded():
    with time_limit(100):
        yield


@pytest.fixture
def tensors():
    return some_tensors()


@pytest.fixture
def make(tmp_path, tensors):
    "make(**layout) is a trunk of some_tensors() on Files of its own, closed when the test has ended."
    made = []

    def trunk_of(files=None, pad=0, progress=None, **layout):
        checkpoint = write_model(tmp_path / "m", tensors, pad)
        made.append(Trunk(layout_of(checkpoint, tensors, **layout), files or Files(), progress))
        return made[-1]

    yield trunk_of
    for each in made:
        each.close()
        each.files.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("k3-")]


def multiplied(trunk, name, array, tokens=2, threads=CORES):
    "The product of a matrix of the trunk, compared bit by bit with that of the array."
    x = np.random.default_rng(len(name)).standard_normal((tokens, array.shape[1])).astype(np.float32)
    same(f"product of {name}", linear(trunk.weight(name), x, threads), linear(ResidentMatrix(array), x, 1))


def mapped(trunk, name, array, threads=2, use=None):
    "Blocks of a matrix, compared with what was written, before and after use(name, rows)."
    W, seen, running, most, lock = trunk.weight(name), [], [0], [0], threading.Lock()
    assert W.shape == array.shape

    def work(first, rows, threads):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        same(name, rows, array[first:first + len(rows)])
        if use is not None:
            use(name, rows)
        same(f"{name} after its use", rows, array[first:first + len(rows)])
        with lock:
            running[0] -= 1
            seen.append((first, len(rows)))

    W.map_blocks(work, threads)
    seen.sort()
    assert running[0] == 0, f"{name}: map_blocks has returned before its calls"
    assert [first for first, _ in seen] == [sum(n for _, n in seen[:i]) for i in range(len(seen))]
    assert sum(n for _, n in seen) == len(array)
    if isinstance(W, ResidentMatrix):
        assert len(seen) == 1
    elif threads < CORES:
        assert most[0] <= threads, f"{name}: {most[0]} calls at a time, {threads} allowed"
    if name == "heads":
        assert all(first % 24 == 0 for first, _ in seen), "rows that must stay together do not"


def one_pass(trunk, tensors, rng=None, use=None, threads=2):
    "Every tensor in order: products, blocks, or by chance one or the other; vectors as they were written."
    trunk.begin()
    for name, (_, array) in tensors.items():
        if name not in MATRICES:
            same(name, trunk.weight(name), as_float32(array.copy()))
        elif use is None and (rng is None or rng.random() < 0.5):
            multiplied(trunk, name, array, threads=threads)
        else:
            mapped(trunk, name, array, threads, use)


# The same bits

@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("pinned", [(), ("a", "heads"), ("a", "heads", "c", "d", "e"), tuple(MATRICES)])
@pytest.mark.parametrize("routers", [(), ("1.gate.weight",), ROUTERS])
def test_any_buffers_and_any_pinned_part_give_the_same_bytes(make, tensors, count, pinned, routers):
    "One buffer, or more than blocks; routers; everything pinned. Several passes, and what was pinned is read once."
    told, rng = [], random.Random(count)
    trunk = make(pinned=pinned, routers=routers, count=count, progress=told.append, readers=3, read_ahead=2)
    resident = sum(tensors[name][1].nbytes for name in tensors if name not in MATRICES or name in pinned)
    assert sum(told) == resident
    streamed = sum(tensors[name][1].nbytes for name in MATRICES if name not in pinned)
    for number in range(3):
        one_pass(trunk, tensors, rng if number else None)
    trunk.close()
    beyond = trunk.files.bytes_read["trunk"] - resident - 3 * streamed
    assert 0 <= beyond <= (2 * BUFFER + sum(tensors[name][1].nbytes for name in routers)) * (streamed > 0)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("pad", [0, 1, 6])
def test_products_of_a_streamed_matrix_are_those_of_a_resident_one(make, tensors, monkeypatch, tokens, compiled, pad):
    "At odd offsets too, and where Python reads; read ahead or not."
    monkeypatch.setattr(read_multiply, "COMPILED_READS", compiled and read_multiply.COMPILED_READS)
    trunk = make(pad=pad, nbytes=60_000, count=4)
    for pause in (0, 0.01):
        trunk.begin()
        for name in MATRICES:
            time.sleep(pause)
            multiplied(trunk, name, tensors[name][1], tokens)


def test_a_block_is_never_overwritten_while_in_use(make):
    "Thirty trunks with readers that sleep at random, and work that takes its time."
    for run in range(30):
        rng, tensors = random.Random(run), some_tensors()
        trunk = make(Slow(run), rng.randrange(4), count=rng.choice([1, 2, 3, 5, 40]), readers=rng.choice([1, 2, 4]),
                     read_ahead=rng.choice([1, 3]), routers=rng.choice([(), ROUTERS]))
        for number in range(2):
            one_pass(trunk, tensors, rng, (lambda name, rows: time.sleep(rng.random() * 2e-4)) if number else None)
        trunk.close()


def test_a_wrong_shape_is_refused(make):
    trunk = make()
    trunk.begin()
    W = trunk.weight("a")
    with pytest.raises(ValueError, match="the last dimensions differ"):
        W.multiply(np.ones((1, 99), np.float32), np.empty((1, 257), np.float32), 1)
    with pytest.raises(ValueError, match="expected float32"):
        W.multiply(np.ones((1, 100), np.float32), np.empty((1, 256), np.float32), 1)


def test_vectors_are_float32():
    bits = np.array([[0x3f80, 0xc000]], np.uint16)
    same("[1, H] weight", as_float32(bits), np.array([1, -2], np.float32))
    same("vector", as_float32(bits[0]), np.array([1, -2], np.float32))
    convolution = np.ones((3, 1, 4), np.float32)
    assert as_float32(convolution) is convolution


def test_a_block_is_read_into_its_buffer(make, tensors):
    trunk = make(pad=1)
    block, buffer = trunk.layout.streamed["c"][0], np.zeros(BUFFER, np.uint8)
    rows = read_rows(trunk.files, block, buffer)
    same("rows", rows, tensors["c"][1][:block.rows])
    assert np.shares_memory(rows, buffer)


# Threads

def test_fewer_threads_than_cores_are_a_limit_and_all_cores_are_none(monkeypatch):
    monkeypatch.setattr(read_multiply, "CORES", 4)
    assert [max_concurrent_blocks(threads) for threads in (1, 3, 4, 100)] == [1, 3, MAX_READERS, 100]


def test_arithmetic_on_one_thread_and_readers_on_four(make, tensors, monkeypatch):
    "The limit of threads holds although more readers than that have something to multiply."
    monkeypatch.setattr(read_multiply, "CORES", 4)
    monkeypatch.setattr(sys.modules[__name__], "CORES", 4)
    four = make(readers=4, count=5)
    for _ in range(3):
        one_pass(four, tensors, use=lambda name, rows: time.sleep(1e-4), threads=1)


# How far ahead

class Counting(Files):
    "Files that count how many reads have ended for each tensor."

    def __init__(self):
        super().__init__()
        self.reads = {}

    def read(self, buffer, extent, *args):
        start = super().read(buffer, extent, *args)
        self.reads[extent] = self.reads.get(extent, 0) + 1
        return start


def settled(files, extents, seconds=10):
    "How many blocks of these tensors have been read when nothing more is, for a while."
    def now():
        return [files.reads.get(extent, 0) for extent in extents]

    before, deadline = None, time.time() + seconds
    while before != now() and time.time() < deadline:
        before = now()
        time.sleep(0.1)
    return before


@pytest.mark.parametrize("read_ahead", [1, 2, 4])
def test_readers_run_ahead_as_far_as_they_may(make, tensors, read_ahead):
    "Before the first pass, and from one pass into the next."
    trunk = make(files := Counting(), count=6, readers=3, read_ahead=read_ahead)
    extents = [blocks[0].extent for blocks in trunk.layout.streamed.values()]
    assert sum(settled(files, extents)) == read_ahead
    files.reads.clear()
    one_pass(trunk, tensors, use=lambda name, rows: None)
    blocks = sum(map(len, trunk.layout.streamed.values()))
    assert sum(settled(files, extents)) == blocks, "a pass reads as many blocks as there are, some of them of the next"


def test_a_router_is_read_whole_before_its_turn_and_the_next_when_it_has_gone(make, tensors):
    "However far back in the order, while the other matrices wait for their first block to be used; in several blocks."
    trunk = make(files := Counting(), routers=ROUTERS, count=1, read_ahead=1, router_nbytes=4 * PAGE)
    extents = [trunk.layout.streamed[name][0].extent for name in ROUTERS]
    first, second = (len(trunk.layout.streamed[name]) for name in ROUTERS)
    assert trunk.layout.router_rows.count == second > first > 1
    for number in range(1, 4):
        assert settled(files, extents)[0] == number * first, "the first router is not in memory when the pass begins"
        trunk.begin()
        for name in MATRICES:
            if name == ROUTERS[1]:
                assert settled(files, extents)[1] == number * second, "the second is not in memory when its turn comes"
            mapped(trunk, name, tensors[name][1])


# Interruption

def interrupting(stop):
    "What use() does so that a pass ends after `stop` blocks."
    left, lock = [stop], threading.Lock()

    def use(name, rows):
        with lock:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

    return use


def test_a_pass_that_fails_after_any_number_of_blocks_leaves_nothing_behind(make, tensors):
    "The next pass begins at its beginning, also that of the routers."
    trunk = make(Slow(5, 1e-4), routers=ROUTERS, router_nbytes=4 * PAGE)
    blocks, errors = sum(map(len, trunk.layout.streamed.values())), []
    for stop in [*range(blocks), 0, 1, 0]:
        with pytest.raises(KeyboardInterrupt) as caught:
            one_pass(trunk, tensors, use=interrupting(stop))
        errors.append(caught.value)  # its traceback keeps frames alive, as a notebook's last error does
        one_pass(trunk, tensors)
    one_pass(trunk, tensors, use=interrupting(blocks))


def test_a_pass_given_up_between_two_matrices(make, tensors):
    "Nothing is in use, nothing has failed. The next pass must still begin at its beginning."
    trunk = make(routers=ROUTERS)
    for names in (MATRICES[:1], MATRICES[:2], MATRICES[:-1]):
        trunk.begin()
        for name in names:
            multiplied(trunk, name, tensors[name][1])
        one_pass(trunk, tensors)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal for this")
def test_ctrl_c_in_the_middle_of_a_product(make, tensors):
    "It is raised when no reader works any more, and the next pass works."
    trunk, main = make(Slow(1, 1e-3)), threading.main_thread().ident
    for number in range(8):
        trunk.begin()
        begun, ended, lock = [], [], threading.Lock()

        def work(first, rows, threads):
            with lock:
                begun.append(first)
                now = len(begun) == number % 4 + 1
            if now:
                signal.pthread_kill(main, signal.SIGINT)
            time.sleep(5e-3)
            ended.append(first)

        with pytest.raises(KeyboardInterrupt):
            trunk.weight("a").map_blocks(work, 1 + number % 2)
        assert sorted(begun) == sorted(ended), "raised while a reader was at work"
        one_pass(trunk, tensors)


def test_a_matrix_of_an_interrupted_pass_is_not_one_of_the_next(make, tensors):
    "What a caller keeps of an old pass is refused, and the new pass begins anew."
    trunk = make()
    trunk.begin()
    stale = trunk.weight("a")
    trunk.begin()
    multiplied(trunk, "a", tensors["a"][1])
    for use in (lambda: stale.map_blocks(lambda *_: pytest.fail("called"), 1),
                lambda: linear(stale, np.ones((1, 100), np.float32))):
        with pytest.raises(RuntimeError, match="trunk: (these blocks are not the next ones|the batch before)"):
            use()
    one_pass(trunk, tensors)


def test_a_matrix_left_out_is_an_error_not_a_shift(tmp_path):
    "Rows of one matrix must never be taken for those of the next, even where the shapes would allow it."
    tensors = {name: ("BF16", np.full((64, 256), i, np.uint16)) for i, name in enumerate("pqr")}
    checkpoint, files = write_model(tmp_path / "m", tensors), Files()
    trunk = Trunk(layout_of(checkpoint, tensors), files)
    trunk.begin()
    with pytest.raises(RuntimeError, match="the forward pass asks for q, but p is next"):
        trunk.weight("q")
    trunk.weight("p")
    with pytest.raises(RuntimeError, match="trunk: these blocks are not the next ones"):
        trunk.weight("q").map_blocks(lambda *_: pytest.fail("called"), 1)
    with pytest.raises(RuntimeError, match="the forward pass asks for p, but r is next"):
        trunk.weight("p")
    trunk.begin()
    for _ in range(2):
        for name in "pqr":
            mapped(trunk, name, tensors[name][1])
    trunk.close()
    files.close()


def test_a_name_that_the_trunk_does_not_have(make):
    for pinned, following in ((MATRICES, "nothing"), ((), "a")):
        trunk = make(pinned=pinned)
        with pytest.raises(RuntimeError, match=f"asks for lm_head, but {following} is next"):
            trunk.weight("lm_head")


# Errors

@pytest.mark.parametrize("way", ["products", "blocks"])
def test_a_damaged_file_is_reported_and_can_be_repaired(make, tensors, tmp_path, way):
    trunk, path = make(), tmp_path / "m" / "model.safetensors"
    whole, extent = path.read_bytes(), trunk.layout.streamed["heads"][0].extent
    use = None if way == "products" else lambda name, rows: None
    one_pass(trunk, tensors, use=use)
    os.truncate(path, extent.offset + 5000)
    for _ in range(2):
        where = r"model.safetensors: ends at byte \d+, but bytes \d+ to \d+ are needed"
        with pytest.raises(CheckpointError, match=where) as caught:
            for _ in range(3):  # blocks read before the damage may still be right
                one_pass(trunk, tensors, use=use)
        assert str(extent.offset + 5000) in str(caught.value)
    path.write_bytes(whole)
    for _ in range(2):
        one_pass(trunk, tensors, use=use)


def test_a_resident_tensor_that_cannot_be_read(tmp_path, tensors):
    checkpoint, files = write_model(tmp_path / "m", tensors), Files()
    os.truncate(tmp_path / "m" / "model.safetensors", checkpoint.extent("conv").offset + 5)
    with pytest.raises(CheckpointError, match="model.safetensors: ends at byte"):
        Trunk(layout_of(checkpoint, tensors), files)
    files.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("k3-")]


def test_rows_that_do_not_fit_a_buffer_are_refused(tmp_path):
    tensors = {"heads": ("BF16", np.zeros((96, 1024), np.uint16))}
    with pytest.raises(ValueError, match="a buffer of 24576 bytes does not hold 24 rows of 2048 bytes"):
        layout_of(write_model(tmp_path / "m", tensors), tensors)


# The end

def test_a_closed_trunk_says_so_and_has_let_go(make, tensors):
    trunk = make(pinned=["a"], routers=ROUTERS)
    one_pass(trunk, tensors)
    trunk.begin()
    W = trunk.weight("1.gate.weight")
    trunk.close()
    assert not trunk.resident
    for name in ("a", "b", "norm"):
        with pytest.raises(RuntimeError, match="the trunk is closed"):
            trunk.weight(name)
    with pytest.raises(RuntimeError, match="the readers have ended because the model is closed"):
        W.multiply(np.ones((1, 100), np.float32), np.empty((1, 96), np.float32), 1)
    trunk.close()


def gone(prefix, seconds=20):
    "Wait until no thread has such a name."
    deadline = time.monotonic() + seconds
    while any(thread.name.startswith(prefix) for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return not any(thread.name.startswith(prefix) for thread in threading.enumerate())


def test_a_dropped_trunk_is_freed_and_its_readers_end(tmp_path, tensors):
    "By its reference count alone, after a pass too."
    checkpoint = write_model(tmp_path / "m", tensors)
    gc.collect()
    gc.disable()
    try:
        for passes in (0, 1):
            trunk = Trunk(layout_of(checkpoint, tensors, pinned=["a"], routers=ROUTERS), Files())
            for _ in range(passes):
                one_pass(trunk, tensors)
            alive = [weakref.ref(trunk), weakref.ref(trunk.weight("a")), weakref.ref(trunk.files)]
            del trunk
            assert gone("k3-") and [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["a", ROUTERS[0]])
def test_waiting_is_counted_in_all_pools(make, tensors, name, monkeypatch):
    """For the rows of one matrix, or one router, that come a thousand seconds after the product began.

    The pools see a clock that only the late read moves. So it does not matter when the system lets a thread run.
    """
    clock, begun, wanted, now = [0.0], threading.Event(), threading.Event(), [False]

    def perf_counter():
        found = clock[0]
        if now[0]:
            wanted.set()
        return found

    class Late(Files):
        def read(self, buffer, extent, *args):
            if extent.shape == tensors[name][1].shape and not begun.is_set():
                begun.set()
                assert wanted.wait(60), "the product did not begin"
                clock[0] += 1000
            return super().read(buffer, extent, *args)

    monkeypatch.setattr(prefetch, "time", SimpleNamespace(perf_counter=perf_counter, thread_time=time.thread_time))
    trunk = make(Late(), routers=ROUTERS, count=2, read_ahead=1)
    assert begun.wait(60), "the rows are not read ahead"
    trunk.begin()
    for other in MATRICES[:MATRICES.index(name)]:
        multiplied(trunk, other, tensors[other][1])
    assert trunk.wait_seconds == 0
    now[0] = True
    multiplied(trunk, name, tensors[name][1])
    assert 990 < trunk.wait_seconds <= 1000, "all but the processor time of a small product"


def test_a_trunk_without_matrices_has_no_readers(make, tensors):
    trunk = make(pinned=MATRICES)
    assert trunk.layout.rows == Buffers(3, BUFFER)
    for _ in range(2):
        one_pass(trunk, tensors)
    assert trunk.wait_seconds == 0.0
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("k3-trunk")]
