"k3lib.layout: blocks that cover a matrix and fit their buffers, and sizes that hold whatever streams through them."
import math

import pytest
from common import MODEL, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.disk import PAGE, READ_UNIT, page_padded, whole_pages
from k3lib.header import ITEMSIZE, Extent
from k3lib.layout import (
    BLOCK_ENTRY_BYTES,
    BUFFER_BYTES,
    READ_AHEAD,
    Buffers,
    ExpertLayout,
    expert_slot_bytes,
    router_buffers,
    row_blocks,
    row_buffers,
    scale_bytes,
    streaming_slot_bytes,
    trunk_layout,
)
from k3lib.tensors import forward_order, is_matrix, is_router, row_multiples, text_tensors


def matrix(n, row, offset=12345):
    "A matrix of n rows of so many bytes."
    return Extent("f", offset, n * row, "U8", (n, row))


def pages_of(block):
    "Bytes of a buffer that the block takes, with the rest of its first and last page."
    low = (block.extent.offset + block.begin) % PAGE
    return -(-(low + block.nbytes) // PAGE) * PAGE


# Row blocks

@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 5000), row=st.integers(1, 9000), multiple=st.integers(1, 300), pages=st.integers(3, 300))
def test_row_blocks_cover_the_matrix_and_fit_their_buffer(n, row, multiple, pages):
    extent, nbytes = matrix(n, row), pages * PAGE
    if multiple * row > nbytes - 2 * PAGE:
        what = f"a buffer of {nbytes} bytes does not hold {multiple} rows of {row} bytes"
        with pytest.raises(ValueError, match=what):
            row_blocks(extent, multiple, nbytes, "trunk")
        return
    blocks = row_blocks(extent, multiple, nbytes, "trunk")
    assert [b.first for b in blocks] == [sum(b.rows for b in blocks[:i]) for i in range(len(blocks))]
    assert sum(b.rows for b in blocks) == n and all(b.rows > 0 for b in blocks)
    assert all(b.begin == b.first * row and b.nbytes == b.rows * row and b.part == "trunk" for b in blocks)
    assert all(b.rows % multiple == 0 for b in blocks[:-1]) and len({b.rows for b in blocks[:-1]}) <= 1
    assert max(map(pages_of, blocks)) <= nbytes
    if (nbytes - 2 * PAGE) // row >= 4 * multiple:
        assert all(b.rows % 4 == 0 for b in blocks[:-1])


def test_blocks_are_as_few_as_can_be():
    "Of equal size, so that no reader gets a crumb: 100 rows where 40 fit are 3 blocks of 36, 36 and 28."
    assert [b.rows for b in row_blocks(matrix(100, 100), 1, 4000 + 2 * PAGE, "trunk")] == [36, 36, 28]


def test_one_range_of_several_blocks():
    blocks = row_blocks(matrix(100, 100), 1, 4000 + 2 * PAGE, "trunk")
    joined = blocks[1].through(blocks[2])
    assert (joined.first, joined.rows, joined.begin, joined.nbytes) == (36, 64, 3600, 6400)
    assert blocks[1].through(blocks[1]) == blocks[1]


# Buffers

shape = st.tuples(st.integers(1, 2000), st.integers(1, 9000))
matrices = st.dictionaries(st.text("abc", min_size=1, max_size=2), shape, max_size=5)


@settings(max_examples=200, deadline=None)
@given(shapes=matrices, multiple=st.integers(1, 600), readers=st.integers(1, 9))
def test_any_matrix_streams_through_the_row_buffers(shapes, multiple, readers):
    extents = {name: matrix(*shape) for name, shape in shapes.items()}
    multiples = dict.fromkeys(list(extents)[:1], multiple)
    buffers = row_buffers(extents, multiples, readers)
    if not extents:
        assert buffers == Buffers(0, 0) and buffers.total == 0
        return
    assert buffers.count == readers + READ_AHEAD
    for name, extent in extents.items():
        blocks = row_blocks(extent, multiples.get(name, 1), buffers.nbytes, "trunk")
        assert max(map(pages_of, blocks)) <= buffers.nbytes
    need = max(multiples.get(name, 1) * shapes[name][1] for name in shapes)
    assert buffers.nbytes <= max(BUFFER_BYTES, need + 4 * PAGE), "more memory than a block takes"
    assert buffers.total == buffers.count * buffers.nbytes


@settings(max_examples=200, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 1_500_000)), min_size=1, max_size=4))
def test_any_router_fits_its_buffers_whole(shapes):
    extents = [matrix(*shape) for shape in shapes if shape[0] * shape[1] < 1 << 28]
    buffers = router_buffers(extents)
    counts = [len(row_blocks(extent, 1, buffers.nbytes, "trunk")) for extent in extents]
    assert buffers.count == max(counts, default=0)
    assert buffers.nbytes <= max([READ_UNIT, *(row for _, row in shapes)]) + 3 * PAGE


# The trunk's layout

@pytest.fixture(scope="module")
def k3():
    "The released shapes: the layout with every matrix streamed, and extents in the order of the forward pass."
    config = read_config(ROOT / "fixtures" / "k3")
    names = list(forward_order(config))
    wanted = frozenset(names)
    kinds = {name: (dtype, shape) for name, dtype, shape in text_tensors(config) if name in wanted}
    extents = {}
    for name in names:
        dtype, shape = kinds[name]
        extents[name] = Extent("", 8, math.prod(shape) * ITEMSIZE[dtype], dtype, shape)
    return trunk_layout(extents, row_multiples(config), 5), extents


def test_every_tensor_is_resident_or_streamed_in_the_order_of_the_pass(k3):
    layout, extents = k3
    assert list(layout.streamed) == [name for name, e in extents.items() if is_matrix(name, e)]
    assert list(layout.resident) == [name for name, e in extents.items() if not is_matrix(name, e)]
    assert not any(tensor.is_matrix for tensor in layout.resident.values())
    assert layout.routers == {name for name in layout.streamed if is_router(name)} and len(layout.routers) == 92
    for name, blocks in layout.streamed.items():
        buffers = layout.router_rows if name in layout.routers else layout.rows
        assert sum(block.nbytes for block in blocks) == extents[name].nbytes
        assert max(map(pages_of, blocks)) <= buffers.nbytes


def test_rows_that_must_stay_together_do(k3):
    layout, _ = k3
    multiples = row_multiples(read_config(ROOT / "fixtures" / "k3"))
    assert multiples
    for name, multiple in multiples.items():
        assert all(block.first % multiple == 0 for block in layout.streamed[name])


def test_the_buffers_of_k3_are_a_fiftieth_of_its_largest_layer(k3):
    layout, extents = k3
    blocks = sum(len(blocks) for name, blocks in layout.streamed.items() if name not in layout.routers)
    routers = BLOCK_ENTRY_BYTES * layout.router_rows.count * len(layout.routers)
    assert layout.buffer_bytes == layout.rows.total + layout.router_rows.total + BLOCK_ENTRY_BYTES * blocks + routers
    assert layout.buffer_bytes < sum(e.nbytes for name, e in extents.items() if ".layers.0." in name) / 50


def test_pinned_matrices_are_resident_and_the_last_one_takes_the_buffers_along(k3):
    layout, extents = k3
    first, *_, last = layout.streamed
    pinned = layout.pin(frozenset([first]))
    assert pinned.resident[first].is_matrix and pinned.resident[first].extent == extents[first]
    assert pinned.streamed == {name: blocks for name, blocks in layout.streamed.items() if name != first}
    assert (pinned.rows, pinned.router_rows, pinned.routers) == (layout.rows, layout.router_rows, layout.routers)
    but_one = layout.pin(frozenset(layout.streamed) - {last})
    assert but_one.rows == layout.rows and but_one.routers == frozenset()
    everything = but_one.pin(frozenset([last]))
    assert not everything.streamed and everything.buffer_bytes == 0
    assert everything.resident.keys() == extents.keys()


# Experts

@pytest.fixture(scope="module")
def expert():
    with Checkpoint(MODEL) as checkpoint:
        return list(checkpoint.expert(1, 0).values())


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 4000), columns=st.integers(1, 4000), groups=st.integers(1, 400),
       offsets=st.lists(st.integers(0, PAGE), min_size=6, max_size=6))
def test_an_expert_fits_its_slot_wherever_its_tensors_lie(rows, columns, groups, offsets):
    "Read one behind the other, or streamed: the scales of a matrix first, then its rows by units of one row at least."
    six = [Extent("f", offset, rows * k, "U8", (rows, k)) for offset, k in zip(offsets, (columns, groups) * 3)]
    begin = 0
    for extent in six:
        assert begin + whole_pages(extent.offset + extent.nbytes) <= expert_slot_bytes(six)
        begin += page_padded(extent.nbytes)
    assert max(whole_pages(scale.offset + scale.nbytes) for scale in six[1::2]) <= scale_bytes(six)
    assert streaming_slot_bytes(six) == scale_bytes(six) + max(READ_UNIT, columns) + 2 * PAGE


def test_slots_beyond_one_a_reader_cache_experts(expert):
    whole = expert_slot_bytes(expert)
    assert ExpertLayout((1, 2), Buffers(9, whole), 4, True).cached == 5
    assert ExpertLayout((1, 2), Buffers(3, whole), 4, True).cached == 0
    assert ExpertLayout((1, 2), Buffers(9, streaming_slot_bytes(expert)), 4, False).cached == 0
