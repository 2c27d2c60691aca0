"k3lib.disk: reads that are exact however the system serves them, one error with file and place where they cannot be."
import errno
import gc
import logging
import os
import threading
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from common import bytes_by_the_system, same
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import at_every_moment, time_limit
from matrices import some_tensors, write_model

from k3lib import disk, system
from k3lib.disk import PAGE, File, Files, enough_readers, page_buffer, page_padded, read_rates, typed, whole_pages
from k3lib.fileio import CheckpointError

direct_only = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")


@pytest.fixture(autouse=True)
def bounded():
    with time_limit():
        yield


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "m", some_tensors())


@pytest.fixture
def files():
    files = Files()
    yield files
    files.close()


# Memory

@pytest.mark.parametrize("nbytes, pages", [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_page_buffers_are_whole_pages_at_a_page(nbytes, pages):
    buffer = page_buffer(nbytes)
    assert len(buffer) == pages * PAGE and buffer.ctypes.data % PAGE == 0 and not buffer.any()
    assert whole_pages(nbytes) == len(buffer) or nbytes == 0


def test_moving_to_an_aligned_address_needs_no_second_buffer():
    "A matrix of a gigabyte at an odd offset must not take two: the bytes are moved inside their buffer."
    buffer = page_buffer(1 << 22)
    buffer[:] = np.arange(1 << 22, dtype=np.uint32).astype(np.uint8)
    expected = buffer[3:3 + (1 << 21)].tobytes()
    tracemalloc.start()
    moved = typed(buffer, 3, 1 << 21, "BF16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert moved.tobytes() == expected and moved.flags.aligned
    assert peak < 100_000, f"{peak} bytes were allocated to move {1 << 21}"


# One file

@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3 * PAGE), st.integers(1, 5 * PAGE))
def test_any_extent_fits_its_padded_buffer(tmp_path_factory, offset, nbytes):
    path = tmp_path_factory.getbasetemp() / "extents.bin"
    if not path.exists():
        path.write_bytes(np.random.default_rng(1).bytes(8 * PAGE + 17))
    file, buffer = File(str(path)), page_buffer(page_padded(nbytes))
    start, transferred = file.read(buffer, offset, nbytes)
    file.close()
    assert buffer[start:start + nbytes].tobytes() == path.read_bytes()[offset:offset + nbytes]
    assert nbytes <= transferred <= page_padded(nbytes)


def test_a_buffer_too_small_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(bytes(3 * PAGE))
    file = File(str(tmp_path / "f"))
    with pytest.raises(ValueError, match="need a buffer of 8192 bytes, not 4096"):
        file.read(page_buffer(PAGE), 4000, 200)
    file.close()


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, PAGE + 700])
def test_long_reads_are_split_and_short_ones_continued(tmp_path, monkeypatch, most):
    "No call asks for more than MAX_READ. What a call leaves undone the next one does, from a whole page on."
    data = np.random.default_rng(2).bytes(20 * PAGE + 5)
    (tmp_path / "f").write_bytes(data)
    asked = []
    real = os.preadv

    def preadv(fd, views, offset):
        asked.append(len(views[0]))
        got = real(fd, views, offset)
        views[0][most:got] = b"\xa5" * max(0, got - most)  # what a short read has not delivered
        return min(got, most)

    assert disk.MAX_READ % PAGE == 0 and disk.MAX_READ <= (1 << 31) - PAGE
    monkeypatch.setattr(disk, "MAX_READ", 4 * PAGE)
    monkeypatch.setattr(os, "preadv", preadv)
    file, buffer = File(str(tmp_path / "f")), page_buffer(page_padded(len(data)))
    how = file.access
    start, _ = file.read(buffer, 100, len(data) - 100)
    file.close()
    assert buffer[start:start + len(data) - 100].tobytes() == data[100:] and file.access == how
    assert max(asked) == 4 * PAGE and len(asked) >= 20 * PAGE // most


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 700, 2 * PAGE])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_too_soon(tmp_path, monkeypatch, size, direct):
    "However much is left, in whole pages or not: an error that names file and place, never a wait for more."
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    path = tmp_path / "short"
    path.write_bytes(bytes(size))
    file = File(str(path))
    where = f"short: ends at byte {size}, but bytes 10 to {2 * PAGE + 5} are needed"
    with pytest.raises(CheckpointError, match=where):
        file.read(page_buffer(4 * PAGE), 10, 2 * PAGE - 5)
    file.close()


def test_a_file_that_gives_nothing_before_its_end(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(bytes(3 * PAGE))
    file = File(str(tmp_path / "f"))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(CheckpointError, match="f: gave nothing at byte 0 of 12288, but bytes 5 to 25 are needed"):
        file.read(page_buffer(2 * PAGE), 5, 20)
    file.close()


def test_a_file_refused_at_open_keeps_no_descriptor(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(PAGE))
    probe = os.dup(0)
    os.close(probe)  # the lowest number that is free
    for _ in range(3):
        with pytest.raises(CheckpointError, match="was replaced"):
            File(str(path), (0, 0, PAGE, 0))
    again = os.dup(0)
    os.close(again)
    assert again == probe


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="gone: cannot be opened: No such file"):
        File(str(tmp_path / "gone"))


# Where the page cache cannot be bypassed

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


@direct_only
@pytest.mark.parametrize("at", ["open", "read"])
def test_refused_direct_reads_go_through_the_page_cache(model, monkeypatch, at):
    "The same bytes, the report says why, and the pages are dropped again."
    dropped, files = [], Files()
    refuse_direct(monkeypatch, at)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, low, n, advice: dropped.append((low, n, advice)))
    for name, (_, array) in some_tensors().items():
        same(name, files.array(model.extent(name), "trunk"), array)
    files.close()
    assert files.access() == {"model.safetensors": f"buffered: O_DIRECT refused at {at}: Invalid argument"}
    assert len(dropped) == len(some_tensors())
    assert all(low % PAGE == 0 and n % PAGE == 0 and advice == os.POSIX_FADV_DONTNEED for low, n, advice in dropped)


def test_without_o_direct_the_cache_is_switched_off_where_there_is_a_switch(tmp_path, monkeypatch):
    "macOS, simulated."
    asked = []
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    monkeypatch.setattr(system, "fcntl", SimpleNamespace(F_NOCACHE=48, fcntl=lambda *args: asked.append(args)))
    (tmp_path / "f").write_bytes(b"12345")
    file = File(str(tmp_path / "f"))
    assert file.access == "buffered: this system has no O_DIRECT" and asked == [(file.descriptor[0], 48, 1)]
    start, _ = file.read(buffer := page_buffer(PAGE), 1, 3)
    assert buffer[start:start + 3].tobytes() == b"234"
    file.close()


@direct_only
def test_falling_back_leaves_a_reader_its_descriptor(tmp_path, monkeypatch):
    "A second reader may be inside a call on the first descriptor: its number must not become another file's."
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


# All files, and the account

@pytest.mark.parametrize("pad", [0, 1, 2, 3, 2050])
def test_a_header_of_any_length(tmp_path, files, pad):
    "Offsets that are odd for the dtype: the data are moved, not reinterpreted, and stay aligned."
    tensors = some_tensors()
    checkpoint = write_model(tmp_path / "m", tensors, pad)
    for name, (_, array) in tensors.items():
        found = files.array(checkpoint.extent(name), "trunk")
        same(name, found, array)
        assert found.flags.aligned and found.flags.c_contiguous and found.flags.writeable
        middle = len(array) // 2
        same(f"a row of {name}", files.array(checkpoint.extent(name), "trunk", middle, 1), array[middle:middle + 1])


def test_one_row_of_a_table_is_one_small_read(model, files):
    row = files.array(model.extent("b"), "other", 517, 1)
    same("row 517", row, some_tensors()["b"][1][517:518])
    assert files.bytes_read == {"trunk": 0, "experts": 0, "other": 66} and files.bytes_transferred in (PAGE, 2 * PAGE)


def test_the_account_of_bytes(model, files):
    "`bytes_read` counts what was asked for, `bytes_transferred` whole pages; /proc agrees with these to the byte."
    counted = bytes_by_the_system()
    for name in some_tensors():
        files.array(model.extent(name), "other")
    sizes = sum(array.nbytes for _, array in some_tensors().values())
    assert files.bytes_read == {"trunk": 0, "experts": 0, "other": sizes} and files.bytes_transferred >= sizes
    assert counted() in (None, files.bytes_transferred)
    assert files.read_seconds > 0


def test_a_failed_read_names_file_and_place_and_is_not_counted(model, files, monkeypatch):
    def preadv(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    extent = model.extent("a")
    where = rf"model.safetensors: reading {extent.nbytes} bytes at offset {extent.offset} failed: Input/output error"
    with pytest.raises(CheckpointError, match=where):
        files.array(extent, "trunk")
    assert files.bytes_read["trunk"] == files.bytes_transferred == 0


def test_a_stream_is_for_direct_reads_and_is_counted(model, monkeypatch):
    extent, count = model.extent("a"), disk.ReadCount(0.5, 1000, 4096)
    files = Files()
    found = files.stream(extent, 8, "experts", lambda fd: ((os.fstat(fd).st_size, "result"), count))
    if list(files.access().values()) == ["direct"]:
        assert found == (os.stat(extent.file).st_size, "result")
        assert (files.bytes_read["experts"], files.bytes_transferred, files.read_seconds) == (1000, 4096, 0.5)
    files.close()
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    files = Files()
    assert files.stream(extent, 8, "experts", lambda fd: pytest.fail("streamed through the page cache")) is None
    files.close()


# The end

def test_reads_after_the_end(model):
    files = Files()
    files.array(model.extent("a"), "trunk")
    files.close()
    where = r"model.safetensors: read at offset \d+ after the files were closed"
    with pytest.raises(CheckpointError, match=where):
        files.array(model.extent("a"), "trunk")
    with pytest.raises(CheckpointError, match=where):
        files.stream(model.extent("a"), 0, "trunk", lambda fd: pytest.fail("streamed"))
    assert files.access()
    files.check()


@pytest.mark.parametrize("stream", [False, True])
def test_closing_waits_for_the_reads_under_way(model, monkeypatch, stream):
    files, inside, go, found = Files(), threading.Event(), threading.Event(), []
    real = os.preadv

    def wait(fd, *args):
        inside.set()
        assert go.wait(20)
        os.fstat(fd)  # EBADF if it is closed
        return real(fd, *args) if args else (True, disk.ReadCount(0.0, 0, 0))

    def read():
        if stream:
            found.append(files.stream(model.extent("a"), 0, "trunk", wait))
        else:
            found.append(files.array(model.extent("a"), "trunk"))

    if stream and File(model.extent("a").file).access != "direct":
        pytest.skip("only direct reads are streamed")
    monkeypatch.setattr(os, "preadv", wait)
    reader, closer = threading.Thread(target=read), threading.Thread(target=files.close)
    reader.start()
    assert inside.wait(20)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive(), "closed while a read was under way"
    go.set()
    closer.join(20)
    reader.join(20)
    assert not closer.is_alive() and len(found) == 1
    if not stream:
        same("a", found[0], some_tensors()["a"][1])


def test_an_interrupt_at_any_moment_of_a_read_lets_the_files_be_closed(model):
    "Ctrl-C comes to the caller, also while it keeps the account."
    at_every_moment(disk.__file__, Files, lambda files: files.array(model.extent("a"), "trunk"), Files.close, least=40)


# Reads that do not end

@pytest.fixture
def warnings(monkeypatch):
    "Warnings of stalled reads, which come after 50 ms."
    said, logger = [], logging.getLogger("k3lib")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    monkeypatch.setattr(disk, "STALL", 0.05)
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def test_a_stalled_read_is_told_and_waited_for(model, monkeypatch, warnings):
    files, real = Files(), os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (time.sleep(0.3), real(*args))[1])
    extent = model.extent("a")
    same("a", files.array(extent, "trunk"), some_tensors()["a"][1])
    files.close()
    where = f"{extent.file}: reading from offset {extent.offset} on is not done after 0 s; still waiting"
    assert warnings and set(warnings) == {where}
    assert "k3-watch" not in [thread.name for thread in threading.enumerate()]


def test_reads_that_end_are_not_told(model, monkeypatch, warnings):
    "However often one is under way when the watching thread looks."
    files, real = Files(), os.preadv
    monkeypatch.setattr(disk, "STALL", 0.2)
    monkeypatch.setattr(os, "preadv", lambda *args: (time.sleep(0.05), real(*args))[1])
    for _ in range(10):
        files.array(model.extent("a"), "trunk")
    files.close()
    assert not warnings


def test_files_that_nobody_closes_are_let_go(model, warnings):
    "The thread that watches them does not keep them, and ends."
    files = Files()
    files.array(model.extent("a"), "trunk")
    del files
    gc.collect()
    deadline = time.time() + 10
    while "k3-watch" in [thread.name for thread in threading.enumerate()]:
        assert time.time() < deadline, "the watching thread goes on"
        time.sleep(0.01)


def test_files_that_are_dropped_close_their_descriptors_and_end_their_watcher_at_once(model):
    "Not at its next look, a minute later."
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            before = len(os.listdir("/dev/fd"))
            files = Files()
            files.array(model.extent("a"), "trunk")
            assert len(os.listdir("/dev/fd")) > before
            del files
            assert len(os.listdir("/dev/fd")) == before
            deadline = time.monotonic() + 20
            while "k3-watch" in [thread.name for thread in threading.enumerate()]:
                assert time.monotonic() < deadline, "the watching thread goes on"
                time.sleep(0.001)
    finally:
        gc.enable()


# How many readers

@pytest.mark.parametrize("rates, enough", [({1: 1.0, 2: 1.85, 4: 2.0, 8: 1.9}, 2), ({1: 2.0, 2: 1.0}, 1),
                                           ({1: 1.0, 2: 2.0, 4: 4.0}, 4)])
def test_enough_readers(rates, enough):
    assert enough_readers(rates) == enough


def test_the_rates_of_a_device_that_serves_one_read_at_a_time_do_not_grow(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(bytes(3 * disk.READ_UNIT + 5))
    device, real, seen = threading.Lock(), os.preadv, set()

    def preadv(fd, views, offset):
        with device:
            seen.add(offset)
            time.sleep(0.02)
            return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    rates = read_rates(tmp_path / "f", (1, 4), 0.3)
    assert list(rates) == [1, 4] and enough_readers(rates) == 1
    assert seen == {0, disk.READ_UNIT, 2 * disk.READ_UNIT}, "reads did not come from all over the file"

