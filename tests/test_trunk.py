"k3lib.trunk: reads that are exact however the system serves them, a ring that never mixes blocks up, a walk that survives interruption."
import errno
import os
import random
import shutil
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lib import disk, parallel, read_multiply, trunk
from k3lib.checkpoint import Checkpoint
from k3lib.header import Extent
from k3lib.fileio import CheckpointError
from k3lib.header import header_bytes
from k3lib.matmul import ResidentMatrix, linear
from k3lib.disk import File, Files, PAGE, page_buffer, page_padded, typed
from k3lib.layout import router_buffers, row_blocks
from k3lib.pack import Packed, pack
from k3lib.parallel import CORES
from k3lib.prefetch import Prefetcher
from k3lib.read_multiply import unit_stride
from k3lib.system import data_runs
from k3lib.tensors import is_matrix
from k3lib.trunk import Trunk, as_float32, max_concurrent_blocks

DTYPE = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8}
SLOT = 6 * PAGE
ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle13" / "model"


def write_model(folder, tensors, pad=0):
    "One safetensors file of `tensors`, {name: (dtype, array)}; `pad` more spaces in the header than it needs."
    folder.mkdir(exist_ok=True)
    head = header_bytes([(name, dtype, array.shape) for name, (dtype, array) in tensors.items()])
    head = (int.from_bytes(head[:8], "little") + pad).to_bytes(8, "little") + head[8:] + b" " * pad
    (folder / "model.safetensors").write_bytes(head + b"".join(array.tobytes() for _, array in tensors.values()))
    return Checkpoint(folder)


def some_tensors(seed=0):
    "A walk: matrices of odd sizes, a vector, a [1, H] weight, a convolution, a float32 matrix."
    rng = np.random.default_rng(seed)

    def make(dtype, *shape):
        if dtype == "F32":
            return dtype, rng.standard_normal(shape).astype(np.float32)
        return dtype, rng.integers(0x3c00, 0x4100, shape).astype(np.uint16)

    return {"norm": make("BF16", 100), "a": make("BF16", 257, 100), "conv": make("F32", 33, 1, 4), "b": make("BF16", 1000, 33),
            "mlp_res_proj.weight": make("BF16", 1, 100), "c": make("F32", 61, 100), "heads": make("BF16", 12 * 24, 64), "d": make("BF16", 3, 700),
            "e": make("BF16", 8000, 2)}


def same(name, found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape, f"{name}: {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}"
    wrong = np.argwhere(found.view(np.uint8) != expected.view(np.uint8))
    assert not len(wrong), f"{name}: {len(wrong)} bytes differ, the first at {wrong[0]}"


class Slow(Files):
    "Files whose reads begin and end at random moments."

    def __init__(self, seed, most=4e-4):
        super().__init__()
        self.random, self.most = random.Random(seed), most

    def read(self, *args):
        time.sleep(self.random.random() * self.most)
        start = super().read(*args)
        time.sleep(self.random.random() * self.most)
        return start


class Poisoned(Prefetcher):
    "A ring that overwrites a slot the moment it is given back."

    def _give_back(self, number):
        slot = self._slot.get(number)
        if slot is not None:
            self.memory[slot][:] = 0xEE
        super()._give_back(number)


def make_trunk(checkpoint, tensors, files=None, pinned=(), slots=3, slot_bytes=SLOT, readers=2, multiples={"heads": 24}, **more):
    return Trunk(checkpoint, list(tensors), frozenset(pinned), multiples, files or Files(), lambda name: "trunk", slots, slot_bytes, readers, **more)


def one_pass(trunk, tensors, use=None):
    "Take every tensor in order and compare it with what was written; `use(name, rows)` is shown each block."
    trunk.begin()
    for name, (dtype, array) in tensors.items():
        W = trunk.take(name)
        if isinstance(W, np.ndarray):
            same(name, W, as_float32(array.copy()))
            continue
        rows = 0
        for first, block in W.blocks(24 if name == "heads" else 1):
            assert first == rows, f"{name}: a block begins at row {first}, not {rows}"
            same(name, block, array[first:first + len(block)])
            if use is not None:
                use(name, block)
                same(f"{name} after its use", block, array[first:first + len(block)])
            rows += len(block)
        assert rows == len(array) and W.shape == array.shape


# Files

@pytest.mark.parametrize("pad", [0, 1, 2, 3, 2050])
def test_a_header_of_any_length(tmp_path, pad):
    "Offsets that are odd for the dtype: the data are moved, not reinterpreted, and stay aligned."
    tensors = some_tensors()
    checkpoint, files = write_model(tmp_path / "m", tensors, pad), Files()
    for name, (dtype, array) in tensors.items():
        found = files.array(checkpoint.extent(name), "trunk")
        same(name, found, array)
        assert found.flags.aligned and found.flags.c_contiguous and found.flags.writeable
        same(f"rows 0.. of {name}", files.array(checkpoint.extent(name), "trunk", len(array) // 2, 1), array[len(array) // 2:][:1])
    one_pass(make_trunk(checkpoint, tensors), tensors)


def test_moving_needs_no_second_buffer():
    "A matrix of a gigabyte at an odd offset must not take two: the bytes are moved inside their buffer."
    import tracemalloc
    buffer = page_buffer(1 << 22)
    buffer[:] = np.arange(1 << 22, dtype=np.uint32).astype(np.uint8)
    expected = buffer[3:3 + (1 << 21)].tobytes()
    tracemalloc.start()
    moved = typed(buffer, 3, 1 << 21, "BF16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert moved.tobytes() == expected
    assert peak < 100_000, f"{peak} bytes were allocated to move {1 << 21}"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3 * PAGE), st.integers(1, 5 * PAGE))
def test_any_extent_fits_its_widened_buffer(tmp_path_factory, offset, nbytes):
    path = tmp_path_factory.getbasetemp() / "extents.bin"
    if not path.exists():
        path.write_bytes(np.random.default_rng(1).bytes(8 * PAGE + 17))
    file, buffer = File(str(path)), page_buffer(page_padded(nbytes))
    start, moved = file.read(buffer, offset, nbytes)
    file.close()
    assert buffer[start:start + nbytes].tobytes() == path.read_bytes()[offset:offset + nbytes]
    assert nbytes <= moved <= page_padded(nbytes)


def test_a_buffer_too_small_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(bytes(3 * PAGE))
    file = File(str(tmp_path / "f"))
    with pytest.raises(ValueError, match="need a buffer of 8192, this one has 4096"):
        file.read(page_buffer(PAGE), 4000, 200)
    file.close()


@pytest.mark.parametrize("most", [PAGE, 2 * PAGE, 3 * PAGE])
def test_long_reads_are_split_and_short_ones_continued(tmp_path, monkeypatch, most):
    "No call asks for more than ONE_READ, and what a call leaves undone the next one does."
    data = np.random.default_rng(2).bytes(20 * PAGE + 5)
    (tmp_path / "f").write_bytes(data)
    asked = []
    real = os.preadv

    def preadv(fd, views, offset):
        asked.append(len(views[0]))
        return real(fd, [views[0][:most]], offset)

    assert disk.MAX_READ % PAGE == 0 and disk.MAX_READ <= (1 << 31) - PAGE
    monkeypatch.setattr(disk, "MAX_READ", 4 * PAGE)
    monkeypatch.setattr(os, "preadv", preadv)
    file, buffer = File(str(tmp_path / "f")), page_buffer(page_padded(len(data)))
    start, moved = file.read(buffer, 100, len(data) - 100)
    file.close()
    assert buffer[start:start + len(data) - 100].tobytes() == data[100:]
    assert max(asked) == 4 * PAGE and len(asked) >= 20 * PAGE // most


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 700, 2 * PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_early(tmp_path, monkeypatch, size, direct):
    "Whatever is left of the file, in whole pages or not: an error that names file and place, never a wait for more."
    if not direct:
        monkeypatch.setattr(disk, "_DIRECT", 0)
    path = tmp_path / "short"
    path.write_bytes(bytes(size))
    file = File(str(path))
    with pytest.raises(CheckpointError, match=rf"short: ends at byte {size}, but bytes 10 to {2 * PAGE + 5} are needed"):
        file.read(page_buffer(4 * PAGE), 10, 2 * PAGE - 5)
    file.close()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="gone: cannot be opened: No such file"):
        File(str(tmp_path / "gone"))


def refuse_direct(monkeypatch, at):
    "A system that refuses O_DIRECT at open or at read, with EINVAL."
    O_DIRECT, real_open, real_preadv, direct = os.O_DIRECT, os.open, os.preadv, set()

    def open_(path, flags, *more):
        if flags & O_DIRECT and at == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags & ~O_DIRECT, *more)
        (direct.add if flags & O_DIRECT else direct.discard)(fd)
        return fd

    def preadv(fd, views, offset):
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, views, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize("at", ["open", "read"])
def test_refused_direct_reads_go_through_the_page_cache(tmp_path, monkeypatch, at):
    "The same bytes, the report says why, and the pages are dropped again."
    tensors, dropped = some_tensors(), []
    checkpoint = write_model(tmp_path / "m", tensors)
    refuse_direct(monkeypatch, at)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, low, n, advice: dropped.append((low, n, advice)))
    files = Files()
    trunk = make_trunk(checkpoint, tensors, files)
    for _ in range(2):
        one_pass(trunk, tensors)
    trunk.close()
    files.close()
    assert files.how() == {"model.safetensors": f"buffered: O_DIRECT refused at {at}: Invalid argument"}
    assert dropped and all(low % PAGE == 0 and n % PAGE == 0 and advice == os.POSIX_FADV_DONTNEED for low, n, advice in dropped)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_falling_back_leaves_a_reader_its_descriptor(tmp_path, monkeypatch):
    "A second reader may be inside a call on the first descriptor while the first reader falls back: its number must not become another file's."
    (tmp_path / "f").write_bytes(bytes(range(256)) * 64)
    refuse_direct(monkeypatch, "read")
    closed, real_close = [], os.close
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), real_close(fd)))
    file = File(str(tmp_path / "f"))
    first = file.descriptor[0]
    start, _ = file.read(buffer := page_buffer(2 * PAGE), 10, 300)
    assert buffer[start:start + 300].tobytes() == (tmp_path / "f").read_bytes()[10:310]
    assert file.descriptor[0] != first and not closed, "closed while another reader may be using it"
    file.close()
    assert len(closed) == 2


def test_the_account_of_bytes(tmp_path):
    "`bytes_read` counts what was wanted, `moved` what the system moved; /proc agrees with the second to the byte."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)

    def rchar():
        return int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])

    files = Files()
    trunk = make_trunk(checkpoint, tensors, files, pinned=["a", "c"])
    resident = sum(checkpoint.extent(name).nbytes for name in trunk.resident)
    streamed = sum(checkpoint.extent(name).nbytes for name in trunk.reads)
    for _ in range(3):
        one_pass(trunk, tensors)
    trunk.close()
    ahead = files.bytes_read["trunk"] - resident - 3 * streamed
    assert 0 <= ahead <= 3 * SLOT, f"{ahead} bytes beyond three passes: more than the ring can hold"
    assert files.bytes_read["trunk"] <= files.moved
    if os.path.exists("/proc/self/io"):
        before, moved = rchar(), files.moved
        cost = rchar() - before  # of looking
        for name in tensors:
            files.array(checkpoint.extent(name), "other")
        assert rchar() - before - 2 * cost == files.moved - moved
    files.close()


def test_reads_after_the_end(tmp_path):
    checkpoint = write_model(tmp_path / "m", some_tensors())
    files = Files()
    files.array(checkpoint.extent("a"), "trunk")
    files.close()
    with pytest.raises(CheckpointError, match=r"model.safetensors: bytes at offset \d+ are asked for after the files were closed"):
        files.array(checkpoint.extent("a"), "trunk")
    assert files.how()


def test_closing_waits_for_the_reads_under_way(tmp_path, monkeypatch):
    checkpoint, files, inside, go = write_model(tmp_path / "m", some_tensors()), Files(), threading.Event(), threading.Event()
    real = os.preadv

    def preadv(*args):
        inside.set()
        go.wait()
        return real(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    found = []
    reader = threading.Thread(target=lambda: found.append(files.array(checkpoint.extent("a"), "trunk")))
    reader.start()
    inside.wait()
    closer = threading.Thread(target=files.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive(), "closed under a reader's feet"
    go.set()
    closer.join()
    reader.join()
    same("a", found[0], some_tensors()["a"][1])


def test_an_interrupt_at_any_line_of_a_read_lets_the_files_be_closed(tmp_path):
    "Ctrl-C comes to the main thread between any two lines, also of a read's own bookkeeping."
    checkpoint = write_model(tmp_path / "m", some_tensors())
    ended = []

    def broken_off_at(line):
        files, lines = Files(), []

        def trace(frame, event, _):
            if frame.f_code.co_filename != trunk_module.__file__:
                return None
            lines.append(frame.f_lineno)
            if len(lines) == line + 1:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            files.array(checkpoint.extent("a"), "trunk")
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        files.close()
        return len(lines) > line

    def at_every_line():
        line = 0
        while broken_off_at(line):
            line += 1
        ended.append(line)

    thread = threading.Thread(target=at_every_line, daemon=True)
    thread.start()
    thread.join(60)
    assert ended and ended[0] > 50, "closing waits for a read that nobody is at"


# Blocks

@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 5000), row=st.integers(1, 9000), multiple=st.integers(1, 300), pages=st.integers(3, 300))
def test_row_blocks_cover_the_matrix(n, row, multiple, pages):
    extent = Extent("f", 12345, n * row, "U8", (n, row))
    slot = pages * PAGE
    if multiple * row > slot - 2 * PAGE:
        with pytest.raises(ValueError, match=f"a ring slot of {slot} bytes does not hold {multiple} rows of {row} bytes"):
            row_blocks(extent, multiple, slot, "trunk")
        return
    reads = row_blocks(extent, multiple, slot, "trunk")
    assert [r.first for r in reads] == [sum(r.rows for r in reads[:i]) for i in range(len(reads))]
    assert sum(r.rows for r in reads) == n and all(r.rows > 0 for r in reads)
    assert all(r.rows % multiple == 0 for r in reads[:-1]) and len({r.rows for r in reads[:-1]}) <= 1
    for r in reads:
        low = (extent.offset + r.first * row) % PAGE
        assert -(-(low + r.nbytes) // PAGE) * PAGE <= slot, f"{r.nbytes} bytes at {low} of a page do not fit {slot}"
    if (slot - 2 * PAGE) // row >= 4 * multiple:
        assert all(r.rows % 4 == 0 for r in reads[:-1])


# The ring

def test_a_slot_is_never_reused_while_in_use(tmp_path):
    "Fifty runs with readers that sleep at random, slots poisoned when given back, and a consumer that takes its time."
    for run in range(50):
        rng, tensors = random.Random(run), some_tensors(run)
        checkpoint = write_model(tmp_path / "m", tensors, rng.randrange(4))
        slots = rng.choice([1, 2, 3, 5, 40])
        trunk = make_trunk(checkpoint, tensors, Slow(run), slots=1, readers=1)
        trunk.ring.close()
        trunk.ring = Poisoned(trunk.files, trunk.ring.reads, slots, SLOT, rng.choice([1, 2, 4]))
        for number in range(3):
            if number == 1:
                each_pass(trunk, tensors, rng)
            else:
                one_pass(trunk, tensors, use=lambda name, rows: time.sleep(rng.random() * 2e-4))
        trunk.close()
        trunk.files.close()
        checkpoint.close()


def each_pass(trunk, tensors, rng, threads=2):
    "A pass in which the readers compare the blocks they have read."
    trunk.begin()
    for name, (_, array) in tensors.items():
        W = trunk.take(name)
        if isinstance(W, np.ndarray):
            continue
        seen, running, most, lock = [], [0], [0], threading.Lock()

        def work(first, rows):
            with lock:
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(rng.random() * 2e-4)
            same(name, rows, array[first:first + len(rows)])
            with lock:
                running[0] -= 1
                seen.append((first, len(rows)))

        if isinstance(W, ResidentMatrix):
            continue
        give = W.share if threads < CORES else W.each  # with all cores share() lets more in than there are threads
        give(work, threads)
        assert running[0] == 0, f"{name}: each() has returned before its calls"
        assert most[0] <= threads, f"{name}: {most[0]} calls at a time, {threads} allowed"
        assert sorted(seen) == [(r.first, r.rows) for r in trunk.reads[name]], f"{name}: blocks {sorted(seen)}"


def test_readers_run_ahead_of_the_arithmetic_and_no_further_than_the_slots(tmp_path):
    tensors = some_tensors()
    checkpoint, files = write_model(tmp_path / "m", tensors), Files()
    trunk = make_trunk(checkpoint, tensors, files, slots=4)
    reads = trunk.ring.reads
    for taken in (0, 1):
        if taken:
            blocks = trunk.take("a").blocks()
            next(blocks)
        deadline = time.time() + 5
        ahead = sum(r.nbytes for r in reads[:4])
        while files.bytes_read["trunk"] - files.bytes_read["other"] < ahead and time.time() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        resident = sum(checkpoint.extent(name).nbytes for name in trunk.resident)
        assert files.bytes_read["trunk"] - resident == ahead, "four slots hold four blocks, also while one of them is out"
    trunk.close()


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_no_more_blocks_wait_than_may(tmp_path, ahead):
    tensors = some_tensors()
    checkpoint, files = write_model(tmp_path / "m", tensors), Files()
    trunk = make_trunk(checkpoint, tensors, files, slots=6, readers=3, ahead=ahead)
    reads, resident = trunk.ring.reads, sum(checkpoint.extent(name).nbytes for name in trunk.resident)
    deadline, expected = time.time() + 5, sum(r.nbytes for r in reads[:ahead])
    while files.bytes_read["trunk"] - resident < expected and time.time() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    assert files.bytes_read["trunk"] - resident == expected
    for number in range(3):
        each_pass(trunk, tensors, random.Random(number))
        one_pass(trunk, tensors)
    trunk.close()


@pytest.mark.parametrize("slots", [1, 2, 40])
@pytest.mark.parametrize("pinned", [(), ("a", "heads"), ("a", "heads", "c", "d", "e"), ("a", "b", "c", "heads", "d", "e")])
@pytest.mark.parametrize("early", [(), ("b",), ("a", "c", "e")])
def test_any_ring_and_any_pinned_part_give_the_same_bytes(tmp_path, slots, pinned, early):
    "One slot, a ring longer than the walk, early ones, everything pinned: several passes, and what was pinned is not read again."
    tensors = some_tensors()
    checkpoint, told = write_model(tmp_path / "m", tensors), []
    trunk = make_trunk(checkpoint, tensors, pinned=pinned, slots=slots, progress=told.append, early=frozenset(early))
    streamed = {"a", "b", "c", "heads", "d", "e"} - {*pinned}
    assert (trunk.ring is None, trunk.early is None) == (not streamed - {*early}, not streamed & {*early})
    assert sum(told) == sum(checkpoint.extent(name).nbytes for name in trunk.resident)
    before = None if streamed else trunk.files.bytes_read["trunk"]
    for number in range(3):
        each_pass(trunk, tensors, random.Random(number))
        one_pass(trunk, tensors)
    assert before is None or trunk.files.bytes_read["trunk"] == before
    trunk.close()


def test_an_early_matrix_is_there_whole_before_its_turn_and_the_next_when_it_has_gone(tmp_path, monkeypatch):
    "However far back in the walk, while the ring waits for its first block to be taken; in several pieces."
    monkeypatch.setattr(disk, "READ_UNIT", 2 * PAGE)
    tensors = some_tensors()
    checkpoint, files = write_model(tmp_path / "m", tensors), Files()
    trunk = make_trunk(checkpoint, tensors, files, slots=1, ahead=1, early=frozenset("ce"))

    def settle():
        deadline = time.time() + 5
        while len(trunk.early._filled) < len(trunk.early._slot) + len(trunk.early._free) and time.time() < deadline:
            time.sleep(0.001)
        return sorted(trunk.early._filled)

    slots = router_buffers([checkpoint.extent(name) for name in "ce"])[0]
    assert settle() == list(range(slots)) and slots == max(len(trunk.reads[name]) for name in "ce") > 1
    for passes in range(3):
        one_pass(trunk, tensors)
        assert settle()[0] == (passes + 1) * len(trunk.early.reads)
    trunk.close()
    assert not any(thread.is_alive() for thread in trunk.early._readers)


def test_an_interrupted_pass_begins_the_early_ring_anew(tmp_path):
    tensors = some_tensors()
    trunk = make_trunk(write_model(tmp_path / "m", tensors), tensors, early=frozenset("be"))
    for stop in range(len(trunk.ring.reads) + len(trunk.early.reads)):
        left = [stop]

        def use(name, rows):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            one_pass(trunk, tensors, use)
        one_pass(trunk, tensors)
    trunk.close()


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_products_of_a_streamed_matrix_are_those_of_a_resident_one(tmp_path, tokens):
    "Bit for bit, for rows taken in order and for rows multiplied by whoever has read them."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors)
    trunk.begin()
    for name in ("a", "b", "c", "heads", "d", "e"):
        array = tensors[name][1]
        x = np.random.default_rng(3).standard_normal((tokens, array.shape[1])).astype(np.float32)
        same(name, linear(trunk.take(name), x), linear(ResidentMatrix(array), x))
    trunk.close()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("pad", [0, 1, 6])
def test_pieces_of_any_size_give_the_resident_product(tmp_path, monkeypatch, compiled, pad):
    "Also where a piece is one row, where the last one is short, where the offset is odd, and where Python reads."
    monkeypatch.setattr(read_multiply, "COMPILED_READS", compiled and read_multiply.COMPILED_READS)
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors, pad)
    for piece in (1, 3000, 20_000):
        monkeypatch.setattr(disk, "READ_UNIT", piece)
        files = Files()
        trunk = make_trunk(checkpoint, tensors, files, slots=2, slot_bytes=60_000)
        before = dict(files.bytes_read)
        for _ in range(3):
            trunk.begin()
            for name in trunk.reads:
                array = tensors[name][1]
                x = np.random.default_rng(3).standard_normal((3, array.shape[1])).astype(np.float32)
                same(name, linear(trunk.take(name), x), linear(ResidentMatrix(array), x))
        trunk.close()
        size = sum(checkpoint.extent(name).nbytes for name in trunk.reads)
        read = files.bytes_read["trunk"] - before["trunk"]
        assert 3 * size <= read <= 3 * size + 2 * 60_000, "read more than three passes and what the slots hold ahead"
        assert files.moved >= read and files.seconds["arithmetic"] > 0
        files.close()


def test_every_piece_is_drawn_once_and_draws_in_a_row_lie_far_apart():
    "Four readers that draw one after the other are at least a ninth of the matrix apart."
    for n in range(1, 1000):
        order = [p * unit_stride(n) % n for p in range(n)]
        assert sorted(order) == list(range(n))
        if n > 40:
            gaps = [abs(order[i] - order[j]) for i in range(n - 4) for j in range(i + 1, i + 4)]
            assert min(min(gap, n - gap) for gap in gaps) >= n / 9, n


@pytest.mark.skipif(not read_multiply.COMPILED_READS, reason="reads are compiled on Linux alone")
def test_a_file_cut_off_under_the_compiled_loop(tmp_path):
    "The loop stops at the piece that is not whole; File.read says what is wrong, and a repaired file works again."
    tensors = {"a": ("BF16", np.arange(96 * 256, dtype=np.uint16).reshape(96, 256))}
    checkpoint, path = write_model(tmp_path / "m", tensors), tmp_path / "m" / "model.safetensors"
    whole = path.read_bytes()
    trunk = make_trunk(checkpoint, tensors, slots=1)
    os.truncate(path, len(whole) - 9000)
    x = np.ones((1, 256), np.float32)
    for _ in range(2):
        trunk.begin()
        with pytest.raises(CheckpointError, match=rf"model.safetensors: ends at byte {len(whole) - 9000}, but bytes .* are needed"):
            linear(trunk.take("a"), x)
    path.write_bytes(whole)
    trunk.begin()
    same("a", linear(trunk.take("a"), x), linear(ResidentMatrix(tensors["a"][1]), x))
    trunk.close()


def test_fewer_threads_than_cores_are_a_limit_and_all_cores_are_none(monkeypatch):
    monkeypatch.setattr(parallel, "CORES", 4)
    assert [max_concurrent_blocks(threads) >= 5 for threads in (1, 3, 4)] == [False, False, True]
    assert (max_concurrent_blocks(1), max_concurrent_blocks(3)) == (1, 3)


# Interruption

def test_an_interrupted_pass_leaves_nothing_behind(tmp_path):
    "Stopped after any number of blocks, by a consumer that fails or gives up, the next pass begins at its beginning."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors, Slow(5, 1e-4))
    blocks = len(trunk.ring.reads)
    kept, whole = [], lambda: len(trunk.ring._free) + len(trunk.ring._slot) == 3 and all(n >= trunk.ring._taken for n in trunk.ring._slot)
    for stop in [*range(blocks + 1), 0, 1, 0]:
        left = [stop]

        def use(name, rows):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1

        try:
            one_pass(trunk, tensors, use)
        except KeyboardInterrupt as error:
            kept.append(error)  # its traceback keeps the generator alive, as a notebook's last error does
        else:
            assert stop == blocks
        one_pass(trunk, tensors)
        assert whole(), f"stopped after {stop} blocks, a slot was lost"
    trunk.close()


def test_a_pass_given_up_between_two_matrices(tmp_path):
    "Nothing is out, nothing failed; the next pass must still begin at its beginning."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors)
    trunk.begin()
    for _ in trunk.take("a").blocks():
        pass
    one_pass(trunk, tensors)
    trunk.close()


def test_rewinding_waits_for_the_reads_under_way(tmp_path):
    "A read that belongs to the interrupted pass must not land in a slot of the next."
    tensors, inside, gate = some_tensors(), threading.Event(), threading.Event()
    checkpoint = write_model(tmp_path / "m", tensors)

    class Stuck(Files):
        def read(self, *args):
            if threading.current_thread() is not main and self.stuck:
                inside.set()
                gate.wait()
            return super().read(*args)

    main, files = threading.current_thread(), Stuck()
    files.stuck = False
    trunk = make_trunk(checkpoint, tensors, files)
    trunk.begin()
    blocks = trunk.take("a").blocks()
    next(blocks)
    files.stuck = True
    next(blocks)  # gives a slot back: a reader goes into a read and stays there
    inside.wait()
    beginner = threading.Thread(target=trunk.begin)
    beginner.start()
    beginner.join(0.05)
    assert beginner.is_alive(), "the pass began while a read of the one before was under way"
    files.stuck = False
    gate.set()
    beginner.join()
    one_pass(trunk, tensors)
    trunk.close()


def test_what_is_left_of_an_interrupted_pass_cannot_give_back_a_slot_of_the_next(tmp_path):
    "The generator of a broken-off matrix ends while the next pass holds blocks: by then its slot belongs to someone else."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors, slots=2)
    for finish in ("close", "next"):
        trunk.begin()
        stale = trunk.take("a").blocks()
        next(stale)
        trunk.begin()
        first = trunk.take("a").blocks()
        row, block = next(first)
        if finish == "close":
            stale.close()
        else:
            with pytest.raises(RuntimeError, match=r"block \d+ is asked for, but block \d+ is next"):
                next(stale)
        time.sleep(0.02)  # a reader that believes the slot free would fill it now
        same("a", block, tensors["a"][1][:len(block)])
        assert len(trunk.ring._free) + len(trunk.ring._slot) == 2, "a slot was lost or counted twice"
    trunk.close()


def test_a_matrix_left_half_read_is_an_error_not_a_shift(tmp_path):
    "Rows of one matrix must never be taken for those of the next, even where the shapes would allow it."
    tensors = {name: ("BF16", np.full((64, 256), i, np.uint16)) for i, name in enumerate("pqr")}
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors)
    trunk.begin()
    for _ in trunk.take("p").blocks():
        break
    with pytest.raises(RuntimeError, match="block 2 is asked for, but block 1 is next"):
        next(trunk.take("q").blocks())
    trunk.begin()
    trunk.take("p")
    with pytest.raises(RuntimeError, match=r"block \d+ is asked for, but block \d+ is next"):
        trunk.take("q").each(lambda first, rows: None, 1)
    with pytest.raises(RuntimeError, match="the walk asks for p, but r is next"):
        trunk.take("p")
    one_pass(trunk, tensors)
    trunk.close()


def test_rows_that_must_stay_together(tmp_path):
    tensors = {"heads": ("BF16", np.zeros((96, 256), np.uint16))}
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors, multiples={})
    with pytest.raises(ValueError, match="24 rows must stay together, but a block has 32"):
        next(trunk.take("heads").blocks(24))
    trunk.close()
    with pytest.raises(ValueError, match="does not hold 48 rows of 512 bytes"):
        make_trunk(checkpoint, tensors, multiples={"heads": 48})


# Errors of readers

@pytest.mark.parametrize("way", ["blocks", "each"])
def test_a_damaged_file_is_reported_to_the_consumer_and_can_be_repaired(tmp_path, way):
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    path, extent = tmp_path / "m" / "model.safetensors", checkpoint.extent("heads")
    whole = path.read_bytes()
    trunk = make_trunk(checkpoint, tensors)
    one_pass(trunk, tensors)
    os.truncate(path, extent.offset + 5000)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model.safetensors: ends at byte \d+, but bytes \d+ to \d+ are needed") as caught:
            for _ in range(3):  # blocks read before the damage may still be right
                one_pass(trunk, tensors) if way == "blocks" else each_pass(trunk, tensors, random.Random(0))
        assert str(extent.offset + 5000) in str(caught.value)
    path.write_bytes(whole)
    for _ in range(2):
        one_pass(trunk, tensors)
    trunk.close()


def test_a_failed_read_names_file_and_place(tmp_path, monkeypatch):
    checkpoint = write_model(tmp_path / "m", some_tensors())

    def preadv(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    extent = checkpoint.extent("a")
    with pytest.raises(CheckpointError, match=rf"model.safetensors: reading {extent.nbytes} bytes at offset {extent.offset} failed: Input/output error"):
        Files().array(extent, "trunk")


def test_an_error_in_the_arithmetic_reaches_the_caller_when_no_call_runs_any_more(tmp_path):
    "After each() has raised, nobody may still be writing into the caller's output."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors, readers=4)
    for error in (ZeroDivisionError("in a call"), KeyboardInterrupt()):
        for _ in range(3):
            trunk.begin()
            W, begun, ended = trunk.take("a"), [], []

            def work(first, rows):
                begun.append(first)
                if len(begun) == 2:
                    raise error
                time.sleep(5e-3)
                ended.append(first)

            with pytest.raises(type(error)):
                W.each(work, 2)
            running = len(begun) - len(ended) - 1
            time.sleep(0.01)
            assert running == 0 and len(begun) - len(ended) == 1, "a call began or ran on after each() had raised"
        one_pass(trunk, tensors)
    trunk.close()


def test_an_interrupted_caller_waits_for_the_calls_under_way(tmp_path, monkeypatch):
    "Ctrl-C while the readers multiply: each() raises it when they have stopped, and the next pass works."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors)
    trunk.begin()
    W, running, interrupted = trunk.take("a"), [0], []
    wait = trunk.ring._news.wait

    def interrupted_wait():
        if not interrupted:
            time.sleep(2e-3) if running[0] else None
        if running[0] and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        wait(0.001 if not interrupted else None)

    monkeypatch.setattr(trunk.ring._news, "wait", interrupted_wait)

    def work(first, rows):
        running[0] += 1
        time.sleep(0.01)
        running[0] -= 1

    with pytest.raises(KeyboardInterrupt):
        W.each(work, 1)
    assert running[0] == 0
    monkeypatch.undo()
    one_pass(trunk, tensors)
    trunk.close()


def test_arithmetic_on_one_thread_and_readers_on_four(tmp_path):
    "The limit of threads holds although more readers than that have something to multiply."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    trunk = make_trunk(checkpoint, tensors, readers=4, slots=5)
    for _ in range(3):
        each_pass(trunk, tensors, random.Random(1), threads=1)
    trunk.close()


def test_the_log_tells_reads_from_arithmetic(tmp_path):
    tensors = some_tensors()
    checkpoint, files = write_model(tmp_path / "m", tensors), Files()
    trunk = make_trunk(checkpoint, tensors, files)
    files.log = []
    each_pass(trunk, tensors, random.Random(0))
    trunk.close()
    reads = [e for e in files.log if e.what == "trunk"]
    calls = [e for e in files.log if e.what == "arithmetic"]
    size = sum(checkpoint.extent(name).nbytes for name in trunk.reads)
    assert sum(e.nbytes for e in calls) == size <= sum(e.nbytes for e in reads) + 3 * SLOT
    assert all(e.began <= e.ended and e.thread.startswith("k3-trunk-") for e in calls)
    files.close()


def test_closing_wakes_whoever_waits(tmp_path):
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    for way in (lambda W: next(W.blocks()), lambda W: W.each(lambda first, rows: None, 1)):
        trunk = make_trunk(checkpoint, tensors)
        trunk.ring.close()
        trunk.ring, gate = Prefetcher.__new__(Prefetcher), threading.Event()

        class Stuck(Files):
            def read(self, *args):
                gate.wait()
                return super().read(*args)

        trunk.ring.__init__(Stuck(), [r for reads in trunk.reads.values() for r in reads], 2, SLOT, 1)
        raised = []

        def consume():
            try:
                way(trunk.take("a"))
            except RuntimeError as error:
                raised.append(str(error))

        consumer = threading.Thread(target=consume)
        consumer.start()
        time.sleep(0.02)
        closer = threading.Thread(target=trunk.close)
        closer.start()
        consumer.join(5)
        assert not consumer.is_alive() and raised == ["the ring is closed"]
        gate.set()
        closer.join(5)
        assert not closer.is_alive()


def test_a_ring_of_nothing_is_refused():
    for slots, readers in ((0, 2), (2, 0)):
        with pytest.raises(ValueError, match=f"a ring of {slots} slots and {readers} readers moves nothing"):
            Prefetcher(Files(), [], slots, SLOT, readers)


# Trunk

def test_what_arrives_row_by_row(tmp_path):
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors)
    assert [name for name in tensors if is_matrix(name, checkpoint.extent(name))] == ["a", "b", "c", "heads", "d", "e"]


def test_one_row_of_a_table_is_one_read(tmp_path):
    tensors = some_tensors()
    checkpoint, files = write_model(tmp_path / "m", tensors), Files()
    trunk = make_trunk(checkpoint, ["norm"], files)
    before = files.bytes_read["trunk"]
    row = trunk.row("b", 517)
    assert row.dtype == np.float32 and files.bytes_read["trunk"] - before == 66
    same("row 517", row.view(np.uint32), tensors["b"][1][517].astype(np.uint32) << 16)
    assert trunk.wait_seconds == 0.0


def busy(seconds):
    "Arithmetic that takes so much processor time."
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_waiting_is_counted_and_working_is_not(tmp_path):
    tensors = {"a": ("BF16", np.zeros((96, 256), np.uint16))}
    checkpoint = write_model(tmp_path / "m", tensors)
    for way in ("blocks", "each"):
        trunk = make_trunk(checkpoint, tensors, Slow(0, 0), readers=1, slots=1)
        blocks = len(trunk.ring.reads)
        trunk.files.most = 0.02
        trunk.files.random = type("Always", (), {"random": staticmethod(lambda: 1.0)})()
        began = time.perf_counter()
        W = trunk.take("a")
        if way == "blocks":
            for _ in W.blocks():
                time.sleep(0.03)
        else:
            W.each(lambda first, rows: busy(0.03), 1)
        wall = time.perf_counter() - began
        assert 0.02 * blocks <= trunk.wait_seconds <= wall - 0.03 * blocks + 0.02, f"{trunk.wait_seconds} s of {wall} s waiting"
        trunk.close()


# Packing

PREFIX = "language_model.model.layers."


def layered(seed=0, layers=3):
    "A checkpoint's tensors: some layers whose walk is not the order in the file, a head, a table that is not walked."
    rng, tensors = np.random.default_rng(seed), {}
    for L in range(layers):
        for short, shape in (("b", (40, 50)), ("a", (70, 33)), ("norm", (50,))):
            tensors[f"{PREFIX}{L}.{short}"] = "BF16", rng.integers(0x3c00, 0x4100, shape).astype(np.uint16)
        tensors[f"{PREFIX}{L}.bias"] = "F32", rng.standard_normal(7).astype(np.float32)
    tensors["table"] = tensors["head"] = "BF16", rng.integers(0x3c00, 0x4100, (60, 50)).astype(np.uint16)
    walk = [f"{PREFIX}{L}.{short}" for L in range(layers) for short in ("norm", "a", "bias", "b")] + ["head"]
    return tensors, walk


def walked(source, walk, tensors):
    "One pass over `source`, compared with what was written."
    trunk = Trunk(source, walk, frozenset(), {}, Files(), lambda name: "trunk", 3, SLOT, 2)
    one_pass(trunk, {name: tensors[name] for name in walk})
    trunk.close()
    return trunk


def test_a_packed_trunk_is_the_same_trunk(tmp_path):
    "In use order, readable as a checkpoint of its own; what was not walked still comes from where it was."
    tensors, walk = layered()
    checkpoint, told = write_model(tmp_path / "m", tensors, 3), []
    pack(checkpoint, walk, tmp_path / "packed", told.append)
    assert sum(told) == sum(checkpoint.extent(name).nbytes for name in walk)
    packed = Checkpoint(tmp_path / "packed")
    assert list(packed.names()) == walk and len(packed.files) == 4
    for name in walk:
        same(name, packed.raw(name), tensors[name][1])
    source = Packed(checkpoint, walk, tmp_path / "packed")
    trunk = walked(source, walk, tensors)
    assert len(trunk.files.how()) == 4 and "model.safetensors" not in trunk.files.how()
    same("a row of the table", trunk.row("table", 7).view(np.uint32), tensors["table"][1][7].astype(np.uint32) << 16)
    assert "model.safetensors" in trunk.files.how()


def test_the_embedded_model_packs(tmp_path):
    checkpoint = Checkpoint(ORACLE)
    walk = [name for name in checkpoint.names() if ".experts." not in name and name.startswith("language_model.")]
    walk = [name for name in walk if ".layers." in name] + [name for name in walk if ".layers." not in name]
    pack(checkpoint, walk, tmp_path / "packed")
    packed = Checkpoint(tmp_path / "packed")
    assert len(packed.files) == 14 and list(packed.names()) == walk
    for name in walk:
        same(name, packed.raw(name), checkpoint.raw(name))
    assert not [name for name in os.listdir(tmp_path / "packed") if name.endswith(".part")]


@pytest.mark.parametrize("tensor", range(13))
def test_a_broken_off_packing_is_taken_up_again(tmp_path, tensor):
    "Whatever was done stays as it is, a file half written is not there; until all are, the folder is no checkpoint."
    tensors, walk = layered()
    checkpoint, folder, told = write_model(tmp_path / "m", tensors), tmp_path / "packed", []

    def stop(nbytes):
        told.append(nbytes)
        if len(told) == tensor + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, walk, folder, stop)
    done = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert len(done) == tensor // 4, f"{len(done)} files after {tensor + 1} tensors"
    with pytest.raises(CheckpointError):
        Packed(checkpoint, walk, folder)
    pack(checkpoint, walk, folder)
    assert all(path.stat().st_mtime_ns == when for path, when in done.items()), "a complete file was written again"
    assert not list(folder.glob("*.part"))
    walked(Packed(checkpoint, walk, folder), walk, tensors)


def test_what_reaches_the_disk_is_compared_before_it_gets_its_name(tmp_path, monkeypatch):
    tensors, walk = layered()
    checkpoint = write_model(tmp_path / "m", tensors)
    real = os.fsync

    def flip(fd):
        if "00002" in os.readlink(f"/proc/self/fd/{fd}"):
            with open(f"/proc/self/fd/{fd}", "r+b") as file:
                file.seek(-9, os.SEEK_END)
                byte = file.read(1)[0]
                file.seek(-9, os.SEEK_END)
                file.write(bytes([byte ^ 1]))
        real(fd)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("no /proc")
    monkeypatch.setattr(os, "fsync", flip)
    with pytest.raises(CheckpointError, match=rf"model-00002-of-000004.safetensors.part: {PREFIX}1.b is not as in"):
        pack(checkpoint, walk, tmp_path / "packed")
    assert [path.name for path in (tmp_path / "packed").glob("*.safetensors")] == ["model-00001-of-000004.safetensors"]


def test_another_checkpoint_s_packed_trunk_is_refused(tmp_path):
    "The same names and shapes with other values, when packing goes on and when the folder is used; and damage."
    tensors, walk = layered()
    others, _ = layered(1)
    checkpoint, other, folder = write_model(tmp_path / "m", tensors), write_model(tmp_path / "o", others), tmp_path / "packed"
    pack(other, walk, folder)
    with pytest.raises(CheckpointError, match=rf"model-00001-of-000004.safetensors: {PREFIX}0.norm is not as in"):
        pack(checkpoint, walk, folder)
    with pytest.raises(CheckpointError, match=rf"packed: {PREFIX}0.norm is missing or not that of .*m: pack this checkpoint again"):
        Packed(checkpoint, walk, folder)
    with pytest.raises(CheckpointError, match=r"packed: table is missing"):
        Packed(other, [*walk, "table"], folder)
    with pytest.raises(FileNotFoundError):
        Packed(checkpoint, walk, tmp_path / "nowhere")
    path = folder / "model-00003-of-000004.safetensors"
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 128]))
    with pytest.raises(CheckpointError, match=rf"model-00003-of-000004.safetensors: {PREFIX}2.b is not as in"):
        pack(other, walk, folder)
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(CheckpointError, match=r"model-00003-of-000004.safetensors: header or size is not as in"):
        pack(other, walk, folder)


def test_a_folder_of_something_else_is_refused(tmp_path):
    "The checkpoint's own, above all: packing must not write between its shards."
    tensors, walk = layered()
    checkpoint = write_model(tmp_path / "m", tensors)
    before = sorted(os.listdir(tmp_path / "m"))
    with pytest.raises(CheckpointError, match="holds model.safetensors, which is no part of a packed trunk of 4 files"):
        pack(checkpoint, walk, tmp_path / "m")
    assert sorted(os.listdir(tmp_path / "m")) == before


def test_a_layer_in_two_pieces_is_named(tmp_path):
    "It streams as well as any other; but it is not packed."
    tensors, walk = layered()
    names = list(tensors)
    names.insert(5, names.pop(names.index("table")))
    checkpoint = write_model(tmp_path / "m", {name: tensors[name] for name in names})
    with pytest.raises(CheckpointError, match="layer 1 is not in one piece: table lies inside its run in .*; it streams, but it is not packed"):
        pack(checkpoint, walk, tmp_path / "packed")
    walked(checkpoint, walk, tensors)


def test_holes_stay_holes(tmp_path):
    "A matrix of nothing but zeros takes no blocks in the copy, as in the original; the bytes are the same."
    tensors, walk = layered()
    big = np.zeros((4096, 1024), np.uint16)
    big[1500, 3:9] = 0x4000
    tensors[f"{PREFIX}2.b"] = "BF16", big
    checkpoint, path = write_model(tmp_path / "m", tensors), tmp_path / "m" / "model.safetensors"
    whole = path.read_bytes()
    with open(path, "wb") as file:
        file.truncate(len(whole))
        for at in range(0, len(whole), PAGE):
            if any(whole[at:at + PAGE]):
                file.seek(at)
                file.write(whole[at:at + PAGE])
        os.fsync(file.fileno())
    with open(path, "rb") as file:
        runs = list(data_runs(file.fileno(), 0, len(whole)))
    if sum(end - begin for begin, end in runs) > 1 << 20:
        pytest.skip("this file system knows no holes")
    checkpoint = Checkpoint(tmp_path / "m")  # of the file as it is now
    pack(checkpoint, walk, tmp_path / "packed")
    copy = tmp_path / "packed" / "model-00003-of-000004.safetensors"
    assert copy.stat().st_size > 8 << 20 and copy.stat().st_blocks * 512 < 200_000, f"{copy.stat().st_blocks * 512} bytes on the disk"
    walked(Packed(checkpoint, walk, tmp_path / "packed"), walk, tensors)


def test_where_holes_cannot_be_told_everything_is_data(tmp_path, monkeypatch):
    path = tmp_path / "f"
    with open(path, "wb") as file:
        file.truncate(10 * PAGE)
        file.seek(3 * PAGE)
        file.write(b"x" * PAGE)
    with open(path, "rb") as file:
        if list(data_runs(file.fileno(), 0, 10 * PAGE)) == [(3 * PAGE, 4 * PAGE)]:
            assert list(data_runs(file.fileno(), 3 * PAGE + 5, 3 * PAGE + 9)) == [(3 * PAGE + 5, 3 * PAGE + 9)]
            assert list(data_runs(file.fileno(), 5, 3 * PAGE)) == [] == list(data_runs(file.fileno(), 5 * PAGE, 10 * PAGE))
        monkeypatch.delattr(os, "SEEK_DATA", raising=False)
        assert list(data_runs(file.fileno(), 7, 10 * PAGE)) == [(7, 10 * PAGE)]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    tensors, walk = layered()
    checkpoint = write_model(tmp_path / "m", tensors)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: namedtuple("usage", "free")(1000))
    with pytest.raises(OSError, match="bytes are still to be written, but 1000 are free") as caught:
        pack(checkpoint, walk, tmp_path / "packed")
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path / "packed") == []
