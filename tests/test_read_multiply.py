"k3lib.read_multiply: the bits of the resident product, whichever loop reads, however rows lie and buffers are cut."
import os
import threading
import time

import numpy as np
import pytest
from common import bytes_by_the_system, same
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import time_limit

from k3lib import read_multiply as module
from k3lib.disk import PAGE, READ_UNIT, File, Files, page_buffer
from k3lib.fileio import CheckpointError
from k3lib.header import Extent
from k3lib.layout import RowBlock, scale_bytes, streaming_slot_bytes
from k3lib.matmul import TILE, PackedMatrix, ResidentMatrix, deinterleaved, padded
from k3lib.read_multiply import COMPILED_READS, Product, read_multiply, unit_rows, unit_stride


@pytest.fixture(autouse=True)
def bounded():
    with time_limit():
        yield


@pytest.fixture(params=["compiled", "from Python", "buffered"])
def way(request, monkeypatch):
    "How rows are read."
    if request.param == "from Python":
        monkeypatch.setattr(module, "COMPILED_READS", False)
    if request.param == "buffered":
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    return request.param


class Case:
    "A matrix of n rows and k columns at `offset` of a file, and its product with some tokens."

    def __init__(self, path, dtype, n, k, tokens=1, offset=0, seed=0):
        rng = np.random.default_rng(seed)
        self.scale = None
        if dtype == "U8":
            k = k // 32 * 32 or 32
            array = rng.integers(0, 256, (n, k // 2), np.uint8)
            self.scale = rng.integers(118, 125, (n, k // 32), np.uint8)
        elif dtype == "BF16":
            array = rng.integers(0x3c00, 0x4100, (n, k)).astype(np.uint16)
        else:
            array = rng.standard_normal((n, k)).astype(np.float32)
        path.write_bytes(rng.bytes(offset) + array.tobytes())
        self.array, self.path, self.offset = array, path, offset
        self.extent = Extent(str(path), offset, array.nbytes, dtype, array.shape)
        self.x = rng.standard_normal((tokens, k)).astype(np.float32)
        self.expected = np.empty((tokens, n), np.float32)
        resident = ResidentMatrix(array) if self.scale is None else PackedMatrix(array, self.scale)
        resident.multiply(self.x, self.expected, 1)

    def block(self, first=0, rows=None):
        n, row = self.array.shape[0], self.array[0].nbytes
        rows = n - first if rows is None else rows
        return RowBlock(self.extent, first, rows, first * row, rows * row, "trunk")

    def product(self, block=None):
        out = np.full_like(self.expected, np.nan)
        block = block or self.block()
        scale = self.scale if self.scale is None else self.scale[block.first:block.first + block.rows]
        return Product(block, scale, (padded if scale is None else deinterleaved)(self.x), out)

    def least_buffer(self):
        return -(-self.array[0].nbytes // 4) * 4 + 2 * PAGE


def multiplied(case, nbytes, files=None):
    "The product through a buffer of so many bytes, behind which nothing may be written."
    opened, product = files or Files(), case.product()
    memory = page_buffer(nbytes + PAGE)
    memory[nbytes:] = 0xEE
    seconds = read_multiply(opened, product, memory[:nbytes], np.zeros(1, np.int64))
    assert (memory[nbytes:] == 0xEE).all(), "bytes behind the buffer were written"
    assert seconds >= 0
    if files is None:
        opened.close()
    return product.out


# Units

def test_a_unit_is_a_multiple_of_what_a_kernel_takes_where_there_is_room():
    assert unit_rows(1000, 16 * 1000) == 16 == TILE and unit_rows(1000, 39 * 1000) == 32
    assert unit_rows(1000, 15 * 1000) == 12 and unit_rows(1000, 3999) == 1 and unit_rows(1000, 1000) == 1
    assert unit_rows(1 << 30, 1 << 30) == 1, "a row larger than a unit"
    assert unit_rows(14336) * 14336 <= READ_UNIT < (unit_rows(14336) + TILE) * 14336


def test_every_unit_is_taken_once_and_those_in_a_row_lie_far_apart():
    "Four readers that take units one after the other are at least a ninth of the matrix apart."
    for n in range(1, 1000):
        order = [p * unit_stride(n) % n for p in range(n)]
        assert sorted(order) == list(range(n))
        if n > 40:
            gaps = [abs(order[i] - order[j]) for i in range(n - 4) for j in range(i + 1, i + 4)]
            assert min(min(gap, n - gap) for gap in gaps) >= n / 9, n


# The product

@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("offset", [0, 1, 6, 4077])
def test_the_bits_of_the_resident_product(tmp_path, way, dtype, tokens, offset):
    "At odd offsets, in units of one row and more, of which the last is short."
    case = Case(tmp_path / "f", dtype, 257, 96, tokens, offset)
    for nbytes in (case.least_buffer(), case.least_buffer() + 40 * case.array[0].nbytes, 1 << 20):
        same(f"{dtype} through {nbytes} bytes", multiplied(case, nbytes), case.expected)


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(["BF16", "F32", "U8"]), n=st.integers(1, 300), k=st.integers(1, 300),
       tokens=st.integers(1, 5), offset=st.integers(0, PAGE), room=st.integers(0, PAGE), compiled=st.booleans())
def test_whatever_streams_fits_its_buffer(tmp_path_factory, dtype, n, k, tokens, offset, room, compiled):
    "Compiled code does not look where a buffer ends."
    case = Case(tmp_path_factory.getbasetemp() / "one", dtype, n, k, tokens, offset, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COMPILED_READS", compiled and COMPILED_READS)
        same(dtype, multiplied(case, case.least_buffer() + 4 * room), case.expected)


@pytest.mark.parametrize("dtype", ["BF16", "U8"])
def test_some_rows_of_a_matrix_go_to_their_place_in_the_output(tmp_path, way, dtype):
    case = Case(tmp_path / "f", dtype, 300, 64, 2, 10)
    product, files = case.product(case.block(33, 200)), Files()
    read_multiply(files, product, page_buffer(5 * PAGE), np.zeros(1, np.int64))
    files.close()
    same("rows 33 to 233", product.out[:, 33:233].copy(), case.expected[:, 33:233].copy())
    assert np.isnan(product.out[:, :33]).all() and np.isnan(product.out[:, 233:]).all()


def test_several_threads_share_a_cursor(tmp_path, way):
    "Each unit is multiplied once, by one of them; the account is that of one reading."
    case, files = Case(tmp_path / "f", "BF16", 1001, 300, 2, 8), Files()
    for _ in range(5):
        product, cursor = case.product(), np.zeros(1, np.int64)
        before = files.bytes_read["trunk"]
        threads = [threading.Thread(target=read_multiply, args=(files, product, page_buffer(8 * PAGE), cursor))
                   for _ in range(4)]
        [thread.start() for thread in threads], [thread.join(20) for thread in threads]
        same("the product", product.out, case.expected)
        assert files.bytes_read["trunk"] - before == case.array.nbytes
    files.close()


def test_an_exhausted_cursor_reads_nothing(tmp_path, way):
    case, files, cursor = Case(tmp_path / "f", "F32", 50, 50), Files(), np.full(1, 1 << 62)
    assert read_multiply(files, product := case.product(), page_buffer(8 * PAGE), cursor) == 0.0
    assert np.isnan(product.out).all() and files.bytes_read["trunk"] == 0
    files.close()


# Who reads

class Counted(Files):
    "Files that count what Python reads."

    def __init__(self):
        super().__init__()
        self.reads = 0

    def read(self, *args):
        self.reads += 1
        return super().read(*args)


@pytest.mark.parametrize("dtype, offset, python", [("BF16", 8, False), ("BF16", 7, True), ("F32", 4, False),
                                                   ("F32", 6, True), ("U8", 7, False)])
def test_compiled_code_reads_where_it_can(tmp_path, way, dtype, offset, python):
    "Python reads each unit where the address is odd for the dtype, and where compiled code may not."
    case, files = Case(tmp_path / "f", dtype, 256, 256, 1, offset), Counted()
    nbytes = 2 * PAGE + 16 * case.array[0].nbytes
    same("the product", multiplied(case, nbytes, files), case.expected)
    compiled = COMPILED_READS and way == "compiled" and File(str(case.path)).access == "direct" and not python
    assert files.reads == (0 if compiled else 256 // 16)
    assert files.bytes_read["trunk"] == case.array.nbytes <= files.bytes_transferred and files.read_seconds > 0
    files.close()


@pytest.mark.parametrize("dtype, offset", [("BF16", 8), ("BF16", 7), ("F32", 6), ("U8", 7)])
def test_every_read_is_counted(tmp_path, way, dtype, offset):
    "Also where compiled code leaves each unit to Python: the system counts no more bytes than the account."
    case, files = Case(tmp_path / "f", dtype, 256, 256, 1, offset), Files()
    multiplied(case, 2 * PAGE + 16 * case.array[0].nbytes)  # compiles
    counted = bytes_by_the_system()
    multiplied(case, 2 * PAGE + 16 * case.array[0].nbytes, files)
    assert counted() in (None, files.bytes_transferred)
    files.close()


def test_processor_time_is_that_of_the_products(tmp_path, way):
    "Not of the reads, and not the wall: of a product that the same thread makes from memory."
    case, files, buffer = Case(tmp_path / "f", "BF16", 4096, 1024, 16), Files(), page_buffer(1 << 20)
    out, found, direct = np.empty_like(case.expected), [], []
    for _ in range(5):
        found.append(read_multiply(files, case.product(), buffer, np.zeros(1, np.int64)))
        began = time.thread_time()
        ResidentMatrix(case.array).multiply(case.x, out, 1)
        direct.append(time.thread_time() - began)
    files.close()
    assert min(direct) / 3 < min(found) < 3 * min(direct)


# What goes wrong

@pytest.mark.parametrize("dtype", ["BF16", "U8"])
def test_a_file_cut_off(tmp_path, way, dtype):
    "The unit that is not whole is named with file and place, rows of others are right; a repaired file works again."
    case = Case(tmp_path / "f", dtype, 96, 512, 1, 30)
    whole, files = case.path.read_bytes(), Files()
    os.truncate(case.path, len(whole) - 9000)
    for _ in range(2):
        product = case.product()
        where = rf"f: ends at byte {len(whole) - 9000}, but bytes \d+ to \d+ are needed"
        with pytest.raises(CheckpointError, match=where):
            read_multiply(files, product, page_buffer(2 * PAGE + 16 * case.array[0].nbytes), np.zeros(1, np.int64))
        done = ~np.isnan(product.out)
        assert (product.out[done] == case.expected[done]).all() and not done[:, -9000 // case.array[0].nbytes:].any()
    case.path.write_bytes(whole)
    same("the product", multiplied(case, 1 << 20, files), case.expected)
    files.close()


def test_the_slot_of_a_streaming_expert_has_room_for_a_row_and_two_pages():
    for columns in (16, 3000, READ_UNIT + 1):
        six = [Extent("f", 5, 7 * k, "U8", (7, k)) for k in (columns, 3) * 3]
        assert streaming_slot_bytes(six) - scale_bytes(six) >= columns + 2 * PAGE
