# %% [markdown]
# # 1.3 Threads that share a kernel's work
#
# [1.2 Sixteen lanes as one value](02_simd.ipynb) · [contents](../README.md) · [1.4 One row, one order](04_matmul.ipynb)

# %% [markdown]
# The driver cuts the matrix into tiles of sixteen rows, 30 KB here, which the nearest cache holds, and walks all tokens over a tile before the
# next one. Tiles are independent, so threads may take them in any way. They draw runs of them from one counter: whoever is done takes the
# next, and all end within a run of each other. The addition is atomic, so no tile is drawn twice. A run is several tiles, because at its end
# memory has been asked for rows that another thread will take.

# %% tags=["export"]
import os
import time
from _thread import start_new_thread
from queue import SimpleQueue
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from k3lib.simd import INNER, KERNEL, element_pointer

# %% tags=["export"]
CORES = numba.config.NUMBA_NUM_THREADS


EXHAUSTED = 1 << 62  # a counter set to this gives nothing more to do


CHUNKS_PER_THREAD = 8  # that a thread draws of its share: few enough to lose little where one ends, enough to end together


_NEXT, _DONE, _STEP, _AT_WORK = range(4)  # the counters of spread(): int64, as is the one that chapter 5 draws from


@intrinsic
def _add(typingctx, counters, i, n):
    "(int64 [], int64, int64): counters[i] += n, whoever else does so at this moment; returns what it was. What was stored before is seen after."
    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", element_pointer(context, builder, sig.args[0], args[0], args[1], ir.IntType(64)), args[2], "acq_rel")
    return types.int64(counters, types.int64, types.int64), codegen


@njit(**KERNEL)
def next_item(counter):
    "The next number, from 0, of a `counter` int64 [1] that several threads share."
    return _add(counter, _NEXT, 1)


@njit(**INNER)
def next_chunk(drawn, n):
    "(begin, end) of the next run of range(n) for whoever draws; begin >= n if there is none. `drawn` is what spread() gives a kernel."
    begin = _add(drawn, _NEXT, drawn[_STEP])
    return begin, min(begin + drawn[_STEP], n)


@njit(**INNER)
def chunk_done(drawn, begin, end):
    "Count that a run that was drawn is done."
    _add(drawn, _DONE, end - begin)


@njit(**KERNEL)
def _finished(drawn, n):
    "Whether all n are done, now or within some microseconds."
    for _ in range(1000):
        if _add(drawn, _DONE, 0) >= n:
            return True
    return False


@njit(**KERNEL)
def _count(drawn, i, n):
    return _add(drawn, i, n)


# %% [markdown]
# Who are they? The caller, and threads that wait at a queue: a kernel gives up the interpreter's lock while it runs. numba's `prange` would write
# this for us. But it takes the loop apart and compiles it once more, which is dear where a dozen kernels have to be ready for a first token, some
# of its layers of threads may not be called by two threads at once, and others spin while they wait, on cores that chapter 5 needs for reading.
# Python's own pool of threads hands over through locks that an interrupt at the wrong moment leaves locked; a `SimpleQueue` does it in one call.
#
# To wake a thread takes longer than a small product, so small work stays with the caller. And the caller, when nothing is left to draw, does not
# wait for the others to say that they have ended, which would cost more turns of the interpreter's lock: what counts is that every run is done.
# A helper that comes late finds nothing to draw. The first lines of 1.4.7 measure the prices.
#
# Ctrl-C ends this in order: nothing more can be drawn, and the caller leaves when no helper is at work on its arrays. It may come anywhere, so
# what must be taken back is inside the `try`.

# %% tags=["export"]
MIN_PARALLEL_MACS = 1 << 21  # multiply-adds: with fewer the caller alone is done before a second thread could help


def _forget_helpers():
    global _tasks, _helpers
    _tasks, _helpers = SimpleQueue(), []


_forget_helpers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)  # a child has none of its parent's threads


def _help(tasks):
    "A helper's life."
    while True:
        kernel, args, drawn, failed = tasks.get()
        _count(drawn, _AT_WORK, 1)
        try:
            kernel(*args, drawn)
        except BaseException as error:  # whatever it is, the caller must hear of it
            failed.append(error)
        finally:
            _count(drawn, _AT_WORK, -1)
        del kernel, args, drawn, failed  # or an idle helper would keep the arrays


def threads_for(work):
    "How many threads `work` multiply-adds are worth: numba's number, or one."
    return numba.get_num_threads() if work >= MIN_PARALLEL_MACS else 1


def parallel_for(threads, n, kernel, *args):
    """kernel(n, *args, drawn) on `threads` threads at once, this one among them. Each does the run of range(n) that draw_run(drawn, n) gives it,
    says so by finish(drawn, begin, end), and draws again until there is none.

    Returns when all is done, or, if this thread is interrupted or any fails, when no other is at work any more. Raises what was raised.
    """
    drawn, failed = np.array([0, 0, n if threads == 1 else -(-n // (CHUNKS_PER_THREAD * threads)), 0], np.int64), []
    if threads == 1:
        return kernel(n, *args, drawn)
    kernel(0, *args, np.zeros_like(drawn))  # is compiled here, where Ctrl-C is heard, and not in a helper that would be waited for
    while len(_helpers) < min(threads, CORES) - 1:
        _helpers.append(start_new_thread(_help, (_tasks,)))
    try:
        for _ in range(threads - 1):
            _tasks.put((kernel, (n, *args), drawn, failed))
        kernel(n, *args, drawn)
        while not _finished(drawn, n) and not failed:
            time.sleep(0)  # for the rest of a run: a turn for whoever needs this core
    finally:
        if not _finished(drawn, n):
            _count(drawn, _NEXT, EXHAUSTED)
            while _count(drawn, _AT_WORK, 0):
                time.sleep(0)
    if failed:
        raise failed[0]


# %% [markdown]
# Before the rungs, the two prices of 1.4.5: compiling the driver either way, its `_tile` being there, and calling a second thread.

# %% tags=["nbval-ignore-output"]
@njit(parallel=True, nogil=True)
def with_prange(tiles, packed, scale, halves, out):
    for tile in prange(tiles):
        _packed_tile(packed, scale, halves, out, 0, tile)


@njit(nogil=True)
def busy(n, sums, drawn):
    "n times a microsecond or so."
    while True:
        begin, end = next_chunk(drawn, n)
        if begin >= n:
            return
        for part in range(begin, end):
            for i in range(1000):
                sums[part] *= 0.5
        chunk_done(drawn, begin, end)


def first_call(kernel, *args):
    began = time.perf_counter()
    kernel(4, packed, scale, deinterleaved(x[None]), check, *args)
    return time.perf_counter() - began


print(f"first call: prange {first_call(with_prange):.2f} s, drawing {first_call(njit(nogil=True)(_packed_matmul.py_func), np.array([0, 0, 4, 0])):.2f} s")
sums, parts = np.ones(400), (4, 40, 400)
called = median_seconds({(n, threads): lambda n=n, threads=threads: [parallel_for(threads, n, busy, sums) for _ in range(50)] for n in parts for threads in (1, 2)})
for n in parts:
    print(f"{n:3} parts: {called[n, 1] / 50 * 1e6:6.0f} µs on one thread, {called[n, 2] / 50 * 1e6:6.0f} µs on two")
