"""k3lib.prefetch: every block is worked on once, with its own bytes, whatever the readers' timing.

What reads, calls and interrupts do is seen from outside. Trunk and experts share these tests: both only give the pool
blocks and functions.
"""
import _thread
import gc
import random
import signal
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from common import until
from interrupts import at_every_moment, time_limit

from k3lib import prefetch
from k3lib.parallel import CORES
from k3lib.prefetch import Prefetcher, items

WORDS, POISON = 64, -1


@pytest.fixture(autouse=True)
def bounded():
    with time_limit():
        yield


class NumberPool:
    """A pool whose blocks are numbers. Reading one fills a buffer with it, a buffer that has been used is poisoned.

    So a buffer that is filled while it is in use shows, and one that is used when it should not be. `longest`: how long
    a read or a call lasts at most. `broken`: blocks whose read fails, and leaves half of its bytes in the buffer.
    `gate`: an event that reads wait for, all or those of the blocks `stalled`. `begun`: blocks whose read has begun.
    """

    def __init__(self, buffers=3, readers=2, read_ahead=2, seed=0, longest=2e-4, memory=None):
        self.random, self.longest, self.broken, self.gate = random.Random(seed), longest, set(), None
        self.stalled = None
        self.begun, self.inside, self.lock = [], 0, threading.Lock()
        self.used, self.buffers = set(), [np.zeros(WORDS, np.int64) for _ in range(buffers)]
        self.pool = Prefetcher(self.read, self.buffers, readers, read_ahead, "test", memory)

    def pause(self):
        time.sleep(self.random.random() * self.longest)

    def read(self, block, buffer):
        with self.lock:
            self.begun.append(block)
            self.used.add(id(buffer))
        if self.gate is not None and (self.stalled is None or block in self.stalled):
            assert self.gate.wait(20)
        buffer[:WORDS // 2] = block
        if block in self.broken:
            raise OSError(f"block {block} cannot be read")
        self.pause()
        buffer[WORDS // 2:] = block
        return buffer

    def consume(self, blocks, limit=2, work=None, present=()):
        "One batch: each block once, with its own bytes, at most `limit` at a time. Returns the order they came in."
        order, most = [], [0]

        def use(block, data):
            with self.lock:
                self.inside += 1
                most[0] = max(most[0], self.inside)
            try:
                for _ in range(2):
                    assert (data == block).all(), f"block {block} has {data}"
                    self.pause()
                if work is not None:
                    work(block)
                assert (data == block).all(), f"block {block} has {data} after its use"
                if any(data is buffer for buffer in self.buffers):
                    data[:] = POISON
            finally:
                with self.lock:
                    self.inside -= 1
                    order.append(block)

        def stream(rest, buffer, cursor):
            for block in items(rest, cursor):
                use(block, self.read(block, buffer))
            return 0.0

        self.pool.map_blocks(blocks, use, stream, limit, present)
        assert self.inside == 0, "map_blocks has returned before its calls"
        assert sorted(order) == sorted([*blocks, *(block for block, _ in present)])
        assert most[0] <= limit, f"{most[0]} calls at a time, {limit} allowed"
        return order

    def until(self, true, seconds=10):
        "Wait for something to become true, and a little longer for what should not happen."
        deadline = time.time() + seconds
        while not true() and time.time() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)


def in_thread(call, *args):
    "Begin a call on a thread of its own."
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def numbers():
    "numbers(...) makes a NumberPool that is closed when the test has ended."
    made = []

    def make(*args, **more):
        made.append(NumberPool(*args, **more))
        return made[-1]

    yield make
    for each in made:
        if each.gate is not None:
            each.gate.set()
        each.pool.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("k3-test")]


# Right blocks

def test_every_block_comes_once_with_its_own_bytes(numbers):
    "Eighty pools of any size, whose reads and calls last at random; three times through an order cut at random."
    for seed in range(80):
        rng = random.Random(seed)
        b = NumberPool(rng.randint(1, 6), rng.randint(1, 5), rng.choice([0, 1, 2, 3, 100]), seed)
        order = list(range(rng.randint(1, 40)))
        b.pool.restart(order, cyclic=True)
        for _ in range(3):
            assert b.pool.at_start()
            at = 0
            while at < len(order):
                n = rng.randint(1, 8)
                b.consume(order[at:at + n], rng.choice([1, 2, 64]))
                at += n
        b.pool.close()


def test_an_order_that_is_not_cyclic_ends(numbers):
    "As a request of experts, of which there are many, one after the other."
    b = numbers(4, 3, 100)
    for n in (1, 5, 0, 17):
        b.pool.restart(list(range(n)))
        b.consume(list(range(n)), 64)
        assert sorted(b.begun) == list(range(n))
        b.begun.clear()


def test_a_batch_that_is_left_out_is_an_error_and_not_a_shift(numbers):
    b = numbers()
    b.pool.restart([0, 1, 2, 3, 4, 5], cyclic=True)
    b.consume([0, 1])
    for wrong in ([4, 5], [3, 2], [2, 4]):
        with pytest.raises(RuntimeError, match="test: these blocks are not the next ones"):
            b.consume(wrong)
        assert not b.pool.at_start()
        with pytest.raises(RuntimeError, match="test: the batch before was interrupted or has failed: call restart"):
            b.consume([2, 3])
        b.pool.restart([0, 1, 2, 3, 4, 5], cyclic=True)
        b.consume([0, 1])
    b.consume([2, 3, 4, 5])
    assert b.pool.at_start()


def test_what_is_present_is_worked_on_and_not_read(numbers):
    b = numbers(2, 2, 100)
    data = {block: np.full(WORDS, block) for block in (100, 101, 102)}
    b.pool.restart([0, 1, 2])
    b.consume([0, 1, 2], 2, present=data.items())
    assert sorted(b.begun) == [0, 1, 2]
    b.pool.restart([])
    assert sorted(b.consume([], 1, present=data.items())) == [100, 101, 102]


def test_a_block_with_memory_of_its_own_takes_no_buffer(numbers):
    "More such blocks are read ahead than there are buffers, and what is in their memory stays."
    own = {block: np.zeros(WORDS, np.int64) for block in range(0, 12, 2)}
    b = numbers(1, 2, 100, memory=own.get)
    b.pool.restart([0, 2, 4, 6, 8, 10, 1, 3])
    b.until(lambda: len(b.begun) == 7)
    assert sorted(b.begun) == [0, 1, 2, 4, 6, 8, 10], "the only buffer is lent to block 1"
    b.consume([0, 2, 4, 6, 8, 10, 1, 3])
    assert all((memory == block).all() for block, memory in own.items())


# How far ahead

@pytest.mark.parametrize("read_ahead", [0, 1, 2, 4])
def test_no_more_blocks_wait_than_may(numbers, read_ahead):
    b = numbers(6, 3, read_ahead)
    b.pool.restart(list(range(20)), cyclic=True)
    for at in range(0, 20, 4):
        b.until(lambda: len(b.begun) >= at + read_ahead)
        assert len(b.begun) == at + read_ahead
        b.consume(list(range(at, at + 4)), 64)


def test_no_more_blocks_wait_than_there_are_buffers(numbers):
    b = numbers(4, 3, 100)
    b.pool.restart(list(range(20)))
    b.until(lambda: len(b.begun) >= 4)
    assert b.begun == [0, 1, 2, 3]


@pytest.mark.parametrize("buffers, ahead", [(3, []), (6, [10])])
def test_while_a_batch_streams_one_reader_reads_ahead_and_never_into_the_last_buffer(numbers, buffers, ahead):
    """Two blocks were read ahead, two readers linger over them, and no more may work. The rest of the batch is unread.

    Of the other two readers one reads a block of the next batch, the other finds nothing to do. With one buffer left,
    both of them do: that buffer is for the rest.
    """
    b, go = numbers(buffers, 4, 2), threading.Event()
    b.pool.restart(list(range(20)), cyclic=True)
    b.until(lambda: len(b.begun) == 2)
    b.gate, b.stalled = threading.Event(), set(range(10, 20))
    lingering = []

    def linger(block):
        lingering.append(block)
        assert go.wait(20)

    thread = in_thread(b.consume, list(range(10)), 2, linger)
    b.until(lambda: len(lingering) == 2 and len(b.begun) >= 2 + len(ahead))
    assert b.begun[2:] == ahead
    go.set()
    b.gate.set()
    thread.join(20)
    assert not thread.is_alive()


def test_a_reader_that_may_not_work_reads_what_is_left_of_a_used_up_order(numbers):
    "While one call lasts and no other is allowed, the next blocks of the same batch are read."
    b = numbers(4, 3, 100)
    b.pool.restart(list(range(12)))
    b.until(lambda: len(b.begun) == 4)

    seen = []

    def work(block):
        ahead = min(12, len(seen) + 3)  # of four buffers one is in use and one is kept free
        b.until(lambda: len(b.begun) >= ahead)
        assert len(b.begun) >= ahead, "nothing is read while the only call that is allowed lasts"
        seen.append(block)

    b.consume(list(range(12)), 1, work)


def test_buffers_go_out_last_in_first_out(numbers):
    "Of many buffers one reader that reads one block ahead uses two: they are still in its core's cache."
    b = numbers(40, 1, 1)
    b.pool.restart(list(range(30)), cyclic=True)
    for at in range(0, 30, 3):
        b.consume(list(range(at, at + 3)))
    assert len(b.used) == 2


def test_what_was_read_last_is_worked_on_first(numbers):
    b = numbers(4, 1, 4)
    b.pool.restart([0, 1, 2, 3])
    b.until(lambda: len(b.begun) == 4)
    assert b.consume([0, 1, 2, 3]) == [3, 2, 1, 0]


# What goes wrong

@pytest.mark.parametrize("error", [ZeroDivisionError("in a call"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_call_raises_reaches_the_caller_when_no_call_runs_any_more(numbers, error):
    "After map_blocks has raised, nobody may still be writing into the caller's output."
    b = numbers(5, 4, 2)
    for fails in (0, 1, 2, 9):
        b.pool.restart(list(range(10)), cyclic=True)
        begun, ended = [], []

        def work(block):
            begun.append(block)
            if len(begun) == fails + 1:
                raise error
            time.sleep(3e-3)
            ended.append(block)

        with pytest.raises(type(error)):
            b.consume(list(range(10)), 2, work)
        seen = len(begun), len(ended)
        assert b.inside == 0 and len(begun) - len(ended) == 1
        time.sleep(0.01)
        assert (len(begun), len(ended)) == seen, "a call began or ran on after map_blocks had raised"
        assert not b.pool.at_start()


@pytest.mark.parametrize("limit", [1, 64])
@pytest.mark.parametrize("read_ahead", [0, 3])
def test_a_failed_read_reaches_the_caller_and_leaves_none_of_its_bytes(numbers, read_ahead, limit):
    "Read ahead or not. The buffer that it has half filled goes to other blocks; on a repaired device all are right."
    b = numbers(4, 3, read_ahead)
    order = list(range(9))
    for broken in range(9):
        b.broken = {broken}
        b.pool.restart(order, cyclic=True)
        for _ in range(2):
            with pytest.raises(OSError, match=f"block {broken} cannot be read"):
                for at in (0, 3, 6):
                    b.consume(order[at:at + 3], limit)
            b.pool.restart(order, cyclic=True)
        b.broken = set()
        b.pool.restart(order, cyclic=True)  # what was read ahead may be what failed
        for at in (0, 3, 6):
            b.consume(order[at:at + 3], limit)


def test_restarting_waits_for_the_reads_under_way(numbers):
    "A read of the order before must not land in a buffer of the next."
    b = numbers(3, 2, 3)
    b.gate = threading.Event()
    b.pool.restart(list(range(10, 20)), cyclic=True)
    b.until(lambda: len(b.begun) == 2)
    restarting = in_thread(b.pool.restart, [0, 1, 2])
    restarting.join(0.05)
    assert restarting.is_alive(), "restarted while a read of the order before was under way"
    gate, b.gate = b.gate, None
    gate.set()
    restarting.join(10)
    b.consume([0, 1, 2])


def test_a_stalled_read_holds_up_its_own_batch_alone(numbers):
    "A read of the next batch does not end. This batch does, with the buffers and readers that are left."
    b = numbers(3, 2, 1)
    b.gate, b.stalled = threading.Event(), {4}
    b.pool.restart(list(range(8)), cyclic=True)
    b.consume([0, 1, 2, 3], 1)
    b.until(lambda: 4 in b.begun)
    assert 4 in b.begun
    waiting = in_thread(b.consume, [4, 5, 6, 7])
    waiting.join(0.1)
    assert waiting.is_alive(), "the batch has ended without its block"
    b.gate.set()
    waiting.join(10)
    assert not waiting.is_alive() and b.pool.at_start()


# Interrupts

@pytest.mark.parametrize("buffers, readers, read_ahead", [(1, 1, 1), (3, 2, 2), (4, 3, 0)])
def test_an_interrupt_at_any_moment_leaves_a_pool_that_restarts(buffers, readers, read_ahead):
    "Ctrl-C comes to the caller of restart, map_blocks or at_start. Afterwards the pool works, with all of its buffers."
    b = NumberPool(buffers, readers, read_ahead, longest=0)

    def run(b):
        b.pool.at_start()
        b.pool.restart([7, 8, 9, 10, 11], cyclic=True)
        b.consume([7, 8, 9])
        b.pool.map_blocks([10, 11], lambda block, data: None, lambda rest, buffer, cursor: 0.0, 1)

    def check(b):
        b.inside = 0
        order = list(range(buffers))
        b.pool.restart(order, cyclic=True)
        for _ in range(2):
            b.consume(order)
        b.begun.clear()
        b.pool.restart(order)
        deadline = time.time() + 10
        while len(b.begun) < min(buffers, read_ahead):
            assert time.time() < deadline, f"{len(b.begun)} of {buffers} buffers are left"
        b.consume(order)

    at_every_moment(prefetch.__file__, lambda: b, run, check, least=60)
    b.pool.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal for this")
@pytest.mark.parametrize("streams", [False, True])
def test_an_interrupted_caller_waits_for_the_calls_under_way(numbers, streams):
    "Ctrl-C while readers work: it is raised when they have ended, and no other call has begun."
    b, main = numbers(4, 3, 0 if streams else 3), threading.main_thread().ident
    b.pool.restart(list(range(12)))
    begun, ended = [], []

    def work(block):
        begun.append(block)
        if len(begun) == 2:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        ended.append(block)

    with pytest.raises(KeyboardInterrupt):
        b.consume(list(range(12)), 2, work)
    seen = sorted(begun)
    assert sorted(ended) == seen and len(seen) in (2, 3), "raised while a call was under way"
    time.sleep(0.1)
    assert sorted(begun) == seen, "a call has begun after the interrupt"
    b.pool.restart([0, 1, 2])
    b.consume([0, 1, 2])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal for this")
def test_interrupts_at_random_moments(numbers):
    "Real signals to the main thread, wherever it is; many of them while it takes its lock again."
    b, rng = numbers(3, 3, 2, longest=5e-4), random.Random(3)
    interrupted = 0
    for _ in range(60):
        timer = threading.Timer(rng.random() * 6e-3, _thread.interrupt_main)
        try:
            timer.start()
            b.pool.restart(list(range(12)), cyclic=True)
            for at in (0, 4, 8):
                b.consume(list(range(at, at + 4)), rng.choice([1, 64]))
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            timer.cancel()
    assert interrupted > 20
    b.inside = 0
    b.pool.restart([0, 1, 2])
    b.consume([0, 1, 2])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal for this")
def test_an_interrupt_while_the_caller_takes_the_lock_again(numbers):
    """A reader has woken the caller and keeps the lock, while it asks for a block's memory. Now comes the signal.

    With a plain lock the caller would give back the reader's: that reader ends, and nobody works any more.
    """
    main, asked = threading.main_thread().ident, []

    def memory(block):
        asked.append(block)
        if asked == [0, 1]:
            time.sleep(0.05)  # the caller wants the lock
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.05)

    b = numbers(2, 1, 1, memory=memory)
    b.pool.restart([0, 1])
    b.until(lambda: b.begun == [0])
    with pytest.raises(KeyboardInterrupt):
        b.consume([0], 1)
    b.pool.restart([5, 6, 7])
    b.consume([5, 6, 7])


# The end

@pytest.mark.parametrize("working", [False, True])
def test_closing_wakes_a_caller_that_waits(numbers, working):
    "At once while a block is read ahead. While one is worked on, when that has ended: it uses the caller's arrays."
    b, raised = numbers(2, 1, 0 if working else 2), []
    b.gate = gate = threading.Event()
    b.pool.restart([1, 2])

    def wait():
        try:
            b.consume([1, 2], 1)
        except RuntimeError as error:
            raised.append(str(error))

    if not working:
        b.until(lambda: b.begun)
    caller = in_thread(wait)
    b.until(lambda: b.begun)
    closer = in_thread(b.pool.close)
    caller.join(0.1 if working else 5)
    assert caller.is_alive() == working and closer.is_alive()
    gate.set()
    caller.join(5)
    closer.join(5)
    assert raised == ["test: the readers have ended because the model is closed"]
    assert not caller.is_alive() and not closer.is_alive()
    for use in (lambda: b.pool.restart([1]), lambda: b.consume([1])):
        with pytest.raises(RuntimeError, match="the model is closed"):
            use()


def ended(prefix="k3-test", seconds=20):
    "Wait for all readers to have ended; the names of those that have not."
    deadline = time.monotonic() + seconds
    while names := [thread.name for thread in threading.enumerate() if thread.name.startswith(prefix)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return names


def plain_read(block, buffer):
    buffer[:] = block
    return buffer


def dropped_pool(readers=3, read=plain_read, order=range(20)):
    "A pool that owns its buffers; nobody else refers to it."
    pool = Prefetcher(read, [np.zeros(WORDS, np.int64) for _ in range(4)], readers, 2, "test")
    pool.restart(list(order), cyclic=True)
    return pool


def used(pool):
    pool.map_blocks([0, 1, 2], lambda block, data: None, lambda rest, buffer, cursor: 0.0, 2)


def failed(pool):
    def work(*_):
        raise OSError("in a call")

    try:  # pytest.raises would keep the error, and the error its frames
        pool.map_blocks([0, 1, 2], work, work, 2)
    except OSError:
        return
    raise AssertionError("the call did not fail")


def left_out(pool):
    try:
        pool.map_blocks([3], lambda block, data: None, lambda rest, buffer, cursor: 0.0, 2)
    except RuntimeError:
        return
    raise AssertionError("a batch was left out")


@pytest.mark.parametrize("use", [lambda pool: None, used, failed, left_out])
def test_a_pool_that_nobody_refers_to_ends_its_readers_and_frees_its_buffers(use):
    "Without close() and without the garbage collector; whether the readers wait, read, or have just read."
    gc.collect()
    gc.disable()
    try:
        for _ in range(30):
            pool = dropped_pool()
            alive, buffer = weakref.ref(pool), weakref.ref(pool._buffers[0])
            use(pool)
            del pool
            assert ended() == []
            assert alive() is None and buffer() is None
    finally:
        gc.enable()


def test_a_pool_in_a_cycle_is_dropped_by_the_garbage_collector_on_any_thread():
    "Two thousand pools; the collector runs at almost every moment, on the readers too."
    before = gc.get_threshold()
    gc.set_threshold(20, 2, 2)
    try:
        for number in range(2000):
            pool = dropped_pool(2)
            pool.cycle = pool
            if number % 3 == 0:
                used(pool)
            del pool
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert ended() == []


def test_a_pool_is_dropped_on_a_reader_when_its_read_has_ended():
    inside, gate, where = threading.Event(), threading.Event(), []

    def read(block, buffer):
        inside.set()
        assert gate.wait(20)
        return buffer

    pool = dropped_pool(read=read)
    alive = weakref.ref(pool, lambda _: where.append(threading.current_thread().name))
    assert inside.wait(20)
    del pool
    assert alive() is not None and not where, "freed during a read"
    gate.set()
    assert ended() == [] and where[0].startswith("k3-test")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal for this")
def test_a_pool_that_was_interrupted_at_any_moment_and_dropped_ends_its_readers():
    def run(pool):
        pool.restart([7, 8, 9, 10, 11], cyclic=True)
        pool.map_blocks([7, 8, 9], lambda block, data: None, lambda rest, buffer, cursor: 0.0, 2)

    pools = []

    def begin():
        pools.append(dropped_pool(2))
        return pools[-1]

    def check(pool):
        del pool
        pools.clear()

    at_every_moment(prefetch.__file__, begin, run, check, least=30)
    gc.collect()  # the frames of the interrupted calls
    assert ended() == []


def test_a_pool_that_could_bring_nothing_is_refused():
    for buffers, readers in ((0, 2), (2, 0)):
        with pytest.raises(ValueError, match=f"test: {buffers} buffers and {readers} readers, at least one"):
            Prefetcher(None, [None] * buffers, readers, 1, "test")


# The account

class Clocks:
    """The pool's clocks, which only reads and arithmetic of a test move: no matter when the system lets a thread run.

    `wall` is the time of all, `busy` the processor time of each thread.
    """

    def __init__(self, monkeypatch):
        self.wall, self.busy, self.lock = 0, threading.local(), threading.Lock()
        fake = SimpleNamespace(perf_counter=lambda: self.wall, thread_time=self.thread_time)
        monkeypatch.setattr(prefetch, "time", fake)

    def thread_time(self):
        return getattr(self.busy, "seconds", 0)

    def pass_time(self, seconds, busy=False):
        with self.lock:
            self.wall += seconds
        if busy:
            self.busy.seconds = self.thread_time() + seconds


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("read_ahead", [0, 2])
def test_waiting_and_working_are_told_apart(monkeypatch, read_ahead, limit):
    "The wall is reads and calls. What the processor has done, over the threads, is not waiting."
    clocks, read = Clocks(monkeypatch), []

    def late(block, buffer):
        clocks.pass_time(20)
        read.append(block)
        return block

    pool = Prefetcher(late, [None, None], 2, read_ahead, "test")
    pool.restart([1, 2, 3, 4, 5, 6])
    until(lambda: len(read) == read_ahead)

    def work(block, data):
        clocks.pass_time(10, busy=True)

    def stream(rest, buffer, cursor):
        began = clocks.thread_time()
        for _ in items(rest, cursor):
            clocks.pass_time(20)
            clocks.pass_time(10, busy=True)
        return clocks.thread_time() - began

    began = clocks.wall
    pool.map_blocks([1, 2, 3, 4, 5, 6], work, stream, limit)
    wall = clocks.wall - began
    pool.close()
    assert pool.busy_seconds == 60 and wall == 6 * 30 - 20 * read_ahead
    assert pool.wait_seconds == wall - 60 / min(limit, CORES)


def test_a_caller_whose_blocks_were_read_ahead_has_not_waited(monkeypatch, numbers):
    clocks, b = Clocks(monkeypatch), numbers(2, 2, 2, longest=0)
    b.gate = threading.Event()
    b.pool.restart([1, 2])
    b.until(lambda: len(b.begun) == 2)
    clocks.pass_time(1000)
    b.gate.set()
    b.until(lambda: (b.buffers[0] > 0).all() and (b.buffers[1] > 0).all())
    b.consume([1, 2], 1)
    assert b.pool.wait_seconds == 0


def test_a_pool_that_gets_too_few_threads_ends_those_it_has(monkeypatch):
    begun, start = [], threading.Thread.start

    def start_two(thread):
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Prefetcher(lambda block, buffer: block, [0, 1, 2], 3, 1, "few")
    assert len(begun) == 2 and not any(thread.is_alive() for thread in begun)


def test_a_stream_that_returns_no_number_fails_its_batch():
    pool = Prefetcher(lambda block, buffer: block, [0, 1], 1, 0, "no number")
    pool.restart([1, 2])
    with pytest.raises(TypeError):
        pool.map_blocks([1, 2], lambda block, data: None, lambda rest, buffer, cursor: None, 1)
    pool.close()
