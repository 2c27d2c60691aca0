"""1.3 Threads that share a kernel's work

Made from book/01_mxfp4/03_parallel.py: edit that, then run `make export`.
"""

# built on simd 82ba8ef1cec4
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


__all__ = [
    "CORES", "EXHAUSTED", "CHUNKS_PER_THREAD", "next_item", "next_chunk", "chunk_done", "MIN_PARALLEL_MACS",
    "threads_for", "parallel_for",
]
