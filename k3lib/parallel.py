"""1.4 Threads that share a kernel's work

Made from book/01_mxfp4/04_parallel.py: edit that, then run `make export`.
"""

import os
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from k3lib.kernel_cache import inner, kernel
from k3lib.simd import call_llvm, element_pointer


CORES = numba.config.NUMBA_NUM_THREADS  # cores this process may use
EXHAUSTED = 1 << 62  # a cursor whose next item is at least this has no items left
CHUNKS_PER_THREAD = 8  # few, as starting a chunk takes time; enough that all threads end at almost the same time

_NEXT, _DONE, _CHUNK, _AT_WORK = range(4)


@intrinsic
def _add(typingctx, cursor, i, n):
    "(int64 [], int64, int64) -> cursor[i] as it was before n was added to it, in one step."
    def codegen(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")
    return types.int64(cursor, types.int64, types.int64), codegen


@kernel
def next_item(cursor):
    "The next number, from 0, of a `cursor` int64 [1] that several threads share. Each number is given once."
    return _add(cursor, _NEXT, 1)


@inner
def next_chunk(cursor, n):
    "(begin, end) of the next chunk of range(n); begin >= n if no chunk is left. `cursor`: from parallel_for."
    begin = _add(cursor, _NEXT, cursor[_CHUNK])
    return begin, min(begin + cursor[_CHUNK], n)


@inner
def chunk_done(cursor, begin, end):
    "Count the items begin..end of a chunk as done. Their results must be stored before."
    _add(cursor, _DONE, end - begin)


@kernel
def _all_done(cursor, n):
    "Wait a few microseconds for all n items to be done. Returns whether they are."
    for _ in range(1000):
        if _add(cursor, _DONE, 0) >= n:
            return True
    return False


@kernel
def _add_from_python(cursor, i, n):
    return _add(cursor, i, n)


_tasks: SimpleQueue = SimpleQueue()  # where helpers wait for tasks
_helpers: list[int] = []  # thread identifiers of the helpers
_process = os.getpid()  # the process that started them


def _forget_helpers():
    global _tasks, _helpers, _process
    _tasks, _helpers, _process = SimpleQueue(), [], os.getpid()


def _help(tasks):
    "The loop of a helper: take a task, run its kernel, append what the kernel raised to the task's `errors`."
    while True:
        kernel, args, cursor, errors = tasks.get()
        _add_from_python(cursor, _AT_WORK, 1)
        try:
            kernel(*args, cursor)
        except BaseException as error:  # parallel_for raises it in the caller
            errors.append(error)
        finally:
            _add_from_python(cursor, _AT_WORK, -1)
        del kernel, args, cursor, errors  # or an idle helper would keep the arrays alive


MIN_PARALLEL_MACS = 1 << 21  # with fewer the caller alone is done before a second thread could help


def threads_for(macs: int, threads: int) -> int:
    "The number of threads to use for `macs` multiply-adds: `threads` if the work is worth sharing, else 1."
    return threads if macs >= MIN_PARALLEL_MACS else 1


_DEFAULT_MODES = {"x86_64": 0x1f80, "aarch64": 0, "arm64": 0}  # of MXCSR and FPCR; other CPUs are left as they are


def _write_mode(builder, arch, new):
    "Write code that sets the register, if `new` is not negative, or else the default mode. Returns what it held."
    word, integer, default = ir.IntType(64), ir.IntType(32), ir.IntType(64)(_DEFAULT_MODES[arch])
    mode = builder.select(builder.icmp_signed("<", new, word(0)), default, new)
    if arch != "x86_64":
        old = call_llvm(builder, "llvm.aarch64.get.fpcr", word)
        call_llvm(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), mode)
        return old
    place = cgutils.alloca_once(builder, integer)
    pointer = builder.bitcast(place, ir.IntType(8).as_pointer())
    call_llvm(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), pointer)
    old = builder.load(place)
    builder.store(builder.trunc(mode, integer), place)
    call_llvm(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), pointer)
    return builder.zext(old, word)


@intrinsic
def _exchange_mode(typingctx, new):
    "(int64) -> the mode of this thread's arithmetic. It becomes `new`, or the default mode if that is negative."
    def codegen(context, builder, sig, args):
        arch = context.codegen().magic_tuple()[0].split("-")[0]
        return _write_mode(builder, arch, args[0]) if arch in _DEFAULT_MODES else args[0]
    return types.int64(types.int64), codegen


@kernel
def exchange_mode(new):
    "Set the mode of this thread's arithmetic to `new`, the default mode if it is negative. Returns the mode it had."
    return _exchange_mode(new)


@contextmanager
def default_arithmetic() -> Iterator[None]:
    "A `with` block or a decorated function: this thread, and those that it starts, compute in the default mode."
    before = exchange_mode(-1)
    try:
        yield
    finally:
        exchange_mode(before)


def parallel_for(threads: int, n: int, kernel: Callable, *args: Any) -> None:
    """Run kernel(n, *args, cursor) on `threads` threads at once, this thread among them.

    The kernel takes chunks of range(n) with next_chunk(cursor, n) until there is none, and calls chunk_done after each.
    Returns when all items are done. If the kernel raises on any thread, or this thread is interrupted, no other chunk
    is begun, and the error is raised here when no thread is at work any more. Several threads may call parallel_for at
    the same time.
    """
    chunk = n if threads == 1 else -(-n // (CHUNKS_PER_THREAD * threads))
    cursor = np.array([0, 0, chunk, 0], np.int64)
    errors: list[BaseException] = []
    if threads == 1:
        return kernel(n, *args, cursor)
    kernel(0, *args, np.zeros_like(cursor))  # compiles the kernel
    _add_from_python(cursor, _AT_WORK, 0)
    if _process != os.getpid():
        _forget_helpers()
    while len(_helpers) < min(threads, CORES) - 1:
        _helpers.append(start_new_thread(_help, (_tasks,)))
    try:
        for _ in range(threads - 1):
            _tasks.put((kernel, (n, *args), cursor, errors))
        kernel(n, *args, cursor)
        while not _all_done(cursor, n) and not errors:
            time.sleep(0)  # gives this core to another thread
    finally:
        if not _all_done(cursor, n):
            _add_from_python(cursor, _NEXT, EXHAUSTED)
            while _add_from_python(cursor, _AT_WORK, 0):
                time.sleep(0)
    if errors:
        raise errors[0]


__all__ = [
    "CORES", "EXHAUSTED", "CHUNKS_PER_THREAD", "next_item", "next_chunk", "chunk_done", "MIN_PARALLEL_MACS",
    "threads_for", "exchange_mode", "default_arithmetic", "parallel_for",
]
