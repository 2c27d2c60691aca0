# %% [markdown]
# # 1.4 Threads that share a kernel's work
#
# A matrix product consists of many independent sums, and a machine has several cores. One thread uses only one of them.
# This chapter shares the work of a kernel among threads. It must keep three promises: every part of the work is done
# exactly once, the result does not depend on the number of threads, and an error or Ctrl-C ends the work of all
# threads. At the end you can share any kernel in ten lines, and say why no thread uses the caller's arrays after
# `parallel_for` has ended.
#
# > **Without it:** a kernel runs on one core, whatever the machine has.
# >
# > **With it:** all threads take items from one counter, and each of 100,000 items is taken once,<!--claim once--> with
# > 1, 2 or 3 threads.
#
# Needs chapters [1.2] (kernels) and [1.3] (vectors). Runs in half a minute. Makes `k3lib.parallel`.
#
# [1.3 Sixteen lanes as one value](03_simd.ipynb) ·
# [contents](../README.md) ·
# [1.5 One row, one order](05_matmul.ipynb)
#
# [1.2]: 02_kernel_cache.ipynb
# [1.3]: 03_simd.ipynb

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "kernels")

# %%
import statistics

from numba import njit

# %% tags=["export"]
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

# %% tags=["parameters"]
rounds = 5  # A B A B ... and the median

# %% [markdown]
# ## 1.4.1 One counter for all
#
# The work of a kernel is a range of items, for example the tiles of a matrix or the heads of a layer. Items are
# independent of each other, so any thread may compute any item, and the result is the same. The simplest division gives
# each thread an equal part beforehand. But one core may be slower than another, or busy with another program, and then
# all threads wait for the slowest.
#
# So threads take *chunks*, which are runs of neighbouring items, from one shared *cursor*. A thread that has finished
# its chunk takes the next one. So all threads end at almost the same time: the last one at most one chunk later than
# the first.
#
# The cursor is four int64:
#
# | element | meaning |
# |---|---|
# | `_NEXT` | first item that no thread has taken |
# | `_DONE` | items of the chunks that are done |
# | `_CHUNK` | items in a chunk |
# | `_AT_WORK` | helpers that are inside the kernel |
#
# Two threads may add to the same element at the same moment. An ordinary addition reads the element, adds, and writes
# it back. Here are two threads that take an item in this way, step by step. Both read before one of them writes:

# %% tags=["raises-exception"]
cursor = [0]
taken_by_first = cursor[0]  # the first thread reads
taken_by_second = cursor[0]  # the second thread reads, before the first has written
cursor[0] = taken_by_first + 1
cursor[0] = taken_by_second + 1
assert taken_by_first != taken_by_second, f"both threads have taken item {taken_by_first}"

# %% [markdown]
# So the cursor uses an *atomic* addition: reading, adding and writing are one step, and no other thread can come
# between. Its memory order, `acq_rel`, gives a second promise. What a thread has stored before its addition is visible
# to every thread that sees the result of the addition. So a thread that reads that all items are done can also read
# their results.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# A kernel that shares its work has the form of the kernel below. Its first argument is the number of items, and its
# last argument is the cursor.

# %%
@njit(nogil=True)
def busy(n, sums, cursor):
    "n items of about a microsecond each."
    while True:
        begin, end = next_chunk(cursor, n)
        if begin >= n:
            return
        for item in range(begin, end):
            for _ in range(1000):
                sums[item] *= 0.5
        chunk_done(cursor, begin, end)


# %% [markdown]
# ## 1.4.2 Who the threads are
#
# The work is done by the thread that calls `parallel_for`, the *caller*, and by *helpers*, which wait at a queue. A
# kernel releases Python's interpreter lock while it runs, so several Python threads can compute at the same time.
#
# **Why not `prange`?** Numba can share a loop among threads by itself, with `prange`. Three reasons are against it.
# Numba compiles such a loop twice, so that the kernels of a first token took a third longer to compile. Some of its
# threading libraries may not be called by two threads at the same time. Others keep their cores busy while they wait,
# and part 5 needs these cores for reading.
#
# **Why not Python's thread pool?** It passes work on through several locks. If Ctrl-C interrupts it between two steps,
# a lock can stay locked. A `SimpleQueue` passes work on in one call, which a signal cannot interrupt.
# `threading.Thread.start` has the same fault: it waits, at a lock, until the new thread runs.
# `_thread.start_new_thread` does not wait.
#
# **What about fork?** A forked process has no threads but the one that called `fork`. It recognises by the process
# number that another process started the helpers, and begins with a new queue and no helpers.

# %% tags=["export"]
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


# %% [markdown]
# To wake a thread takes longer than a small product. So the caller does small work alone. The size of the work is its
# number of multiply-adds (macs).

# %% tags=["export"]
MIN_PARALLEL_MACS = 1 << 21  # with fewer the caller alone is done before a second thread could help


def threads_for(macs: int, threads: int) -> int:
    "The number of threads to use for `macs` multiply-adds: `threads` if the work is worth sharing, else 1."
    return threads if macs >= MIN_PARALLEL_MACS else 1


# %% [markdown]
# ## 1.4.3 The mode of a thread's arithmetic
#
# Each thread has a register that controls its floating-point arithmetic: MXCSR on x86, FPCR on Arm. One bit of it turns
# results that are *subnormal*, smaller than $2^{-126}$, into zero. Another bit does so with inputs. More bits choose
# the direction of rounding. A library that was compiled with `-ffast-math` may set the first two bits when it is
# loaded. Then they hold for the thread that loads the library, and for all threads that this thread starts later. From
# then on, some products have other bits, without any message.
#
# So arithmetic whose bits matter runs in the default mode, which rounds to nearest and keeps subnormal numbers.
# Afterwards the mode that the thread had is restored, because the other library may need it. A thread inherits the mode
# of the thread that starts it. So threads that are started in the default mode need not set it themselves.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# The check halves the smallest normal number, first with the two bits of MXCSR set, then in the default mode. NumPy's
# division depends on the mode like every other floating-point instruction. (On a CPU that is not x86, the check leaves
# the mode unchanged.)

# %%
smallest, halves = np.array([2.0 ** -126], np.float32), []
before = exchange_mode(-1)
fast = 0x9fc0 if before & ~63 == 0x1f80 else before  # bits 15 and 6; the lowest six only note what has happened
exchange_mode(fast)
halves.append((smallest / 2)[0])
with default_arithmetic():
    halves.append((smallest / 2)[0])
exchange_mode(before)
print(f"half of 2^-126: {halves[0]:.3g} in the mode of another library, {halves[1]:.3g} in the default mode")
assert halves[1] > 0


# %% [markdown]
# ## 1.4.4 parallel_for
#
# When may `parallel_for` return? It waits until all items are done. It does not wait until the helpers have left the
# kernel, because for this each helper would first have to take the interpreter lock. A helper that wakes up late finds
# no chunk left and uses no array.
#
# Three statements hold at every moment, also when Ctrl-C interrupts the caller once. A second Ctrl-C, while the first
# one's error waits for the helpers, ends that wait, and helpers may still use the arrays:
#
# - A helper uses the caller's arrays only between its two changes of `_AT_WORK`, and only for chunks that it has taken.
# - After `EXHAUSTED` has been added to `_NEXT`, no thread takes another chunk.
# - So when `_NEXT` is exhausted and `_AT_WORK` is zero, no helper uses the arrays. Before the caller leaves with an
#   error, it makes both true. If it leaves without an error, all items are done, and a helper that is still inside the
#   kernel has no chunk.
#
# Ctrl-C may come between any two lines. So everything that must be undone is inside the `try`. Before the `try`, a call
# with no items compiles the kernel, and another call compiles the kernel with which helpers count themselves. A
# compilation takes about a second. In the caller, Ctrl-C can end it. If a helper compiled, the caller would have to
# wait.

# %% tags=["export"]
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


# %%
sums = np.ones(400)
parallel_for(2, 400, busy, sums)
assert (sums == np.float64(0.5) ** 1000).all()


@njit(nogil=True)
def count(n, taken, cursor):
    while True:
        begin, end = next_chunk(cursor, n)
        if begin >= n:
            return
        for item in range(begin, end):
            taken[item] += 1
        chunk_done(cursor, begin, end)


taken = np.zeros(100_000, np.int64)
for threads in (1, 2, 3):
    parallel_for(threads, len(taken), count, taken)
assert len(taken) == 100_000 and (taken == 3).all()  # claim once
print(f"{len(taken):,} items, each taken once in each of three runs")

# %% [markdown]
# ## 1.4.5 The price of a second thread
#
# A call with two threads must wake the second one. This takes time, so for a few microseconds of work it can be slower
# than one thread alone.

# %% tags=["nbval-ignore-output"]
parts, times = (4, 40, 400), {}
for _ in range(rounds):
    for n in parts:
        for threads in (1, 2):
            began = time.perf_counter()
            for _ in range(50):
                parallel_for(threads, n, busy, sums)
            times.setdefault((n, threads), []).append((time.perf_counter() - began) / 50)
for n in parts:
    one, two = (1e6 * statistics.median(times[n, threads]) for threads in (1, 2))
    print(f"{n:3} items: {one:6.0f} µs on one thread, {two:6.0f} µs on two")

# %% [markdown]
# ## Summary
#
# - Threads take chunks from one atomic counter. Items are independent, so it does not matter which thread computes an
#   item.
# - The number of threads is an argument of the call. No hidden setting changes it.
# - Work is passed on in one call that a signal cannot interrupt. So after Ctrl-C no lock stays locked, and no thread is
#   at work.
# - Arithmetic runs in the default mode of the processor, even if another library has set another mode.
#
# ## Exercises
#
# Answer to 1: [exercises of part 1](../answers/01_mxfp4.ipynb).
#
# 1. Two threads share 16 items of one tick each, but the item that is taken first takes 8 ticks. How many ticks does
#    the work take with 1 chunk for each thread, and how many with 8?
# 2. Replace the atomic addition in `next_chunk` by `cursor[_NEXT] += cursor[_CHUNK]`. How many runs does it take until
#    `count` finds an item that was taken twice?
#
# Next: [1.5](05_matmul.ipynb) multiplies matrices of every format with one kernel.
