"Small checkpoints of odd matrices, and files that are slow, for the tests of everything that streams."
import random
import time

import numpy as np

from k3lib.checkpoint import Checkpoint
from k3lib.disk import PAGE, Files
from k3lib.header import header_bytes
from k3lib.layout import READ_AHEAD, Buffers, ResidentTensor, TrunkLayout, row_blocks
from k3lib.tensors import is_matrix

BUFFER = 6 * PAGE  # bytes of a buffer through which any matrix of some_tensors() streams in several blocks


def write_model(folder, tensors, pad=0):
    "One safetensors file of `tensors`, {name: (dtype, array)}, opened; `pad` more spaces in the header than it needs."
    folder.mkdir(exist_ok=True)
    head = header_bytes([(name, dtype, array.shape) for name, (dtype, array) in tensors.items()])
    head = (int.from_bytes(head[:8], "little") + pad).to_bytes(8, "little") + head[8:] + b" " * pad
    data = b"".join(array.tobytes() for _, array in tensors.values())
    (folder / "model.safetensors").write_bytes(head + data)
    return Checkpoint(folder)


def some_tensors(seed=0):
    "In the order of a pass: matrices of odd sizes, two of them routers, vectors, a [1, H] weight, a convolution."
    rng = np.random.default_rng(seed)

    def bf16(*shape):
        return "BF16", rng.integers(0x3c00, 0x4100, shape).astype(np.uint16)

    def f32(*shape):
        return "F32", rng.standard_normal(shape).astype(np.float32)

    return {"norm": bf16(100), "a": bf16(257, 100), "conv": f32(33, 1, 4), "1.gate.weight": f32(96, 100),
            "b": bf16(1000, 33), "mlp_res_proj.weight": bf16(1, 100), "c": f32(61, 100), "heads": bf16(12 * 24, 64),
            "2.gate.weight": bf16(601, 50), "d": bf16(3, 700), "e": bf16(8000, 2)}


MATRICES = [name for name, (_, array) in some_tensors().items() if array.ndim == 2 and len(array) > 1]


def layout_of(checkpoint, names, pinned=(), routers=(), count=3, nbytes=BUFFER, router_nbytes=BUFFER, readers=2,
              read_ahead=READ_AHEAD):
    "A layout of buffers of any number and size; the rows of `heads` come 24 together."
    extents = {name: checkpoint.extent(name) for name in names}
    resident, streamed = {}, {}
    for name, extent in extents.items():
        if not is_matrix(name, extent) or name in pinned:
            resident[name] = ResidentTensor(extent, "trunk", is_matrix(name, extent))
        else:
            size = router_nbytes if name in routers else nbytes
            streamed[name] = row_blocks(extent, 24 if name == "heads" else 1, size, "trunk")
    routers = frozenset(routers) & streamed.keys()
    most = max((len(streamed[name]) for name in routers), default=0)
    return TrunkLayout(resident, streamed, routers, Buffers(count, nbytes), Buffers(most, router_nbytes), readers,
                       read_ahead)


class Slow(Files):
    "Files whose reads begin and end at random moments."

    def __init__(self, seed=0, longest=4e-4):
        super().__init__()
        self.random, self.longest = random.Random(seed), longest

    def read(self, *args):
        time.sleep(self.random.random() * self.longest)
        start = super().read(*args)
        time.sleep(self.random.random() * self.longest)
        return start

    def stream(self, *args):
        time.sleep(self.random.random() * self.longest)
        return super().stream(*args)
