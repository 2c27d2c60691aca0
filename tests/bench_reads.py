"""Is the compiled loop of chapter 5.12 worth its room? This measures it against the same loop in Python.

    python tests/bench_reads.py                          devices of 3, 7 and 14 GB/s, real bytes in memory, holes
    python tests/bench_reads.py --rates 1 28 --rounds 31
    python tests/bench_reads.py --model DIR --ram 1GB    a step of a checkpoint instead

A matrix is streamed by the readers of one pool, with three loops that take turns: compiled code; `lean`, the least that
Python can do for a unit (one descriptor for all of a matrix, no lock, no account); and `engine`, what Python does where
compiled code cannot read. A device is simulated: a read is a wait, without the processor, that ends when a queue of so
many bytes a second would have delivered it. Needs Linux.

Printed are the rate of the compiled loop, and wall and processor time of the others as multiples of its own. Each time
is the shortest of the rounds, which another program has disturbed least.
"""
import argparse
import ctypes
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numba
import numpy as np
from llvmlite import binding

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
ROWS, COLUMNS = 12288, 3584  # bfloat16: half of K3's q_proj, 88 MB


# A simulated device: one queue for all readers. Compiled, because a compiled loop must not wait for the interpreter.

libc, c = ctypes.CDLL(None, use_errno=True), ctypes


def c_function(name, result, *arguments):
    function = getattr(libc, name)
    function.restype, function.argtypes = result, arguments
    return function


pread = c_function("pread", c.c_int64, c.c_int, c.c_void_p, c.c_size_t, c.c_int64)
clock_gettime = c_function("clock_gettime", c.c_int, c.c_int, c.c_void_p)
usleep = c_function("usleep", c.c_int, c.c_uint32)
memcpy = c_function("memcpy", c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t)
lock = c_function("pthread_mutex_lock", c.c_int, c.c_void_p)
unlock = c_function("pthread_mutex_unlock", c.c_int, c.c_void_p)

device = np.zeros(2)  # bytes a second, 0 for real reads; when the last read in the queue ends
mutex = np.zeros(64, np.uint8)  # zeros are a mutex that nobody holds
DEVICE, MUTEX = device.ctypes.data, mutex.ctypes.data


@numba.njit
def now():
    spec = np.empty(2, np.int64)
    clock_gettime(1, spec.ctypes.data)
    return spec[0] + 1e-9 * spec[1]


@numba.cfunc("int64(int32, intp, uint64, int64)")
def device_pread(fd, buffer, nbytes, offset):
    "pread, or a wait of the simulated device that leaves the buffer as it is."
    state = np.empty(2)
    lock(MUTEX)
    memcpy(state.ctypes.data, DEVICE, 16)
    if state[0] == 0:
        unlock(MUTEX)
        return pread(fd, buffer, nbytes, offset)
    state[1] = max(now(), state[1]) + nbytes / state[0]
    memcpy(DEVICE, state.ctypes.data, 16)
    unlock(MUTEX)
    wait = state[1] - now()
    if wait > 0:
        usleep(numba.uint32(1e6 * wait))
    return numba.int64(nbytes)


def install():
    "Compiled code and Python find the device in place of pread and preadv. Before a kernel is loaded."
    binding.add_symbol("pread", device_pread.address)
    real, wait = os.preadv, device_pread.ctypes
    os.preadv = lambda fd, views, offset: wait(fd, 0, len(views[0]), offset) if device[0] else real(fd, views, offset)
    libc.prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: waits that end within a microsecond, here and in all later threads


# The loops

def lean(files, product, buffer, cursor):
    "read_multiply, for rows that are read directly and whole."
    from k3lib.disk import PAGE, ReadCount, typed
    from k3lib.matmul import matmul_rows
    from k3lib.parallel import next_item
    from k3lib.read_multiply import unit_rows, unit_stride
    block, scale, x, out = product
    row, offset, rows, first = block.nbytes // block.rows, block.extent.offset + block.begin, block.rows, block.first
    unit, dtype = unit_rows(row, len(buffer) - 2 * PAGE), block.extent.dtype
    units, view = -(-rows // unit), memoryview(buffer)
    stride, read, take, multiply, clock = unit_stride(units), os.preadv, next_item, matmul_rows, time.thread_time

    def loop(fd):
        seconds = 0.0
        while (p := take(cursor)) < units:
            at = p * stride % units * unit
            n, skip = min(unit, rows - at), (offset + at * row) % PAGE
            read(fd, [view[:-(-(skip + n * row) // PAGE) * PAGE]], offset + at * row - skip)
            w = typed(buffer, skip, n * row, dtype).reshape(n, -1)
            began = clock()
            multiply(w if scale is None else (w, scale[at:at + n]), x, out, first + at)
            seconds += clock() - began
        return seconds, ReadCount(0.0, 0, 0)

    return files.stream(block.extent, block.begin, block.part, loop)


def engine(*args):
    "The Python half of read_multiply."
    from k3lib import read_multiply
    read_multiply.COMPILED_READS = False
    try:
        return read_multiply.read_multiply(*args)
    finally:
        read_multiply.COMPILED_READS = True


def ratios(title, rate, path, args):
    "A row of the table: the loops in turn on one file."
    from k3lib import trunk as trunk_module
    from k3lib.disk import Files
    from k3lib.header import Extent
    from k3lib.layout import Buffers, TrunkLayout, row_blocks
    from k3lib.matmul import linear
    from k3lib.read_multiply import read_multiply
    device[:] = rate, 0
    extent, files = Extent(str(path), 8, 2 * ROWS * COLUMNS, "BF16", (ROWS, COLUMNS)), Files()
    layout = TrunkLayout({}, {"m": row_blocks(extent, 1, 2 << 20, "trunk")}, frozenset(),
                         Buffers(args.readers + 3, 2 << 20), Buffers(0, 0), args.readers)
    trunk, x, found = trunk_module.Trunk(layout, files), np.linspace(-1, 1, COLUMNS, dtype=np.float32)[None], []
    expected = None
    for number in range(args.rounds + 1):
        times = []
        for loop in (read_multiply, lean, engine):
            trunk_module.read_multiply = loop
            trunk.begin()
            began, busy = time.perf_counter(), time.process_time()
            out = linear(trunk.weight("m"), x)
            times.append((time.perf_counter() - began, time.process_time() - busy))
            expected = out if expected is None else expected
            assert rate or out.tobytes() == expected.tobytes()
        if number:  # the first compiles
            found.append(times)
    trunk_module.read_multiply = read_multiply
    how = ", ".join(files.access().values())
    trunk.close()
    files.close()
    device[0] = 0
    show(title, lambda seconds: f"{extent.nbytes / 1e9 / seconds:.2f} GB/s", found, how)


def show(title, measured, found, how=""):
    "A row: `found` [rounds][loop] = (wall, processor seconds)."
    shortest = np.array(found).min(axis=0)
    ratios = "".join(f"{wall:>10.3f}{cpu:>8.3f}" for wall, cpu in shortest[1:] / shortest[0])
    print(f"{title:<34}{measured(shortest[0, 0]):>12}{ratios}   {how}", flush=True)


def heading(args):
    print(f"{os.cpu_count()} cores, {args.readers} readers, {args.rounds} rounds, load {os.getloadavg()[0]:.1f}")
    print(f"{'':<34}{'compiled':>12}{'lean':>10}{'':>8}{'engine':>10}")
    print(f"{'':<34}{'':>12}" + f"{'wall':>10}{'cpu':>8}" * 2)


def steps(args):
    "Steps of a checkpoint, the loops in turn; processor time is that of the process."
    import k3lib
    from k3lib import experts, trunk
    from k3lib.read_multiply import read_multiply
    model, token, found = k3lib.load(args.model, ram=args.ram), 5, []
    for number in range(args.rounds + 1):
        times = []
        for loop in (read_multiply, lean, engine):
            trunk.read_multiply = experts.read_multiply = loop
            began, busy = time.perf_counter(), time.process_time()
            token = int(np.argmax(model.step(token)))
            times.append((time.perf_counter() - began, time.process_time() - busy))
        if number:
            found.append(times)
    model.close()
    show(f"a step at {args.ram}", lambda seconds: f"{seconds:.2f} s", found)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--rates", type=float, nargs="*", default=[3, 7, 14], help="GB/s of the simulated devices")
    args.add_argument("--readers", type=int, default=2)
    args.add_argument("--rounds", type=int, default=41)
    args.add_argument("--model", help="measure steps of this checkpoint")
    args.add_argument("--ram", default="1GB")
    args = args.parse_args()
    if sys.platform != "linux":
        sys.exit("compiled code reads on Linux only: there is nothing to compare")
    heading(args)
    if args.model:
        return steps(args)
    install()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    try:
        real, holes = folder / "real", folder / "holes"
        numbers = np.random.default_rng(0).integers(0x3c00, 0x4000, ROWS * COLUMNS).astype(np.uint16)
        real.write_bytes(bytes(8) + numbers.tobytes())
        with open(holes, "wb") as file:
            file.truncate(8 + 2 * ROWS * COLUMNS)
        for rate in args.rates:
            ratios(f"device of {rate:g} GB/s", rate * 1e9, real, args)
        ratios("real bytes in memory", 0, real, args)
        ratios("holes", 0, holes, args)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
