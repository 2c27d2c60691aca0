"What a test needs that must not hang: an end to all waiting, and Ctrl-C at every moment at which it can be heard."
import dis
import functools
import signal
import sys
import threading
from contextlib import contextmanager


def hear_interrupts():
    "Let SIGINT reach this process and those it starts. A shell ignores it for what runs in its background."
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def time_limit(seconds=60):
    "A `with` block that ends with a TimeoutError where it waits for longer. Needs the main thread and SIGALRM."
    def expired(*_):
        raise TimeoutError(f"waited for more than {seconds} s")

    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # once more every second: `finally` may wait too
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@functools.cache
def _instructions(code):
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


def _in_finalizer(frame):
    "Is this the frame of a __del__, or was it called by one?"
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupted(path, number, run):
    """run(), with a KeyboardInterrupt at moment `number`, from 0, in code of the file `path`. False if there are fewer.

    The interpreter looks for signals when a function begins, after a call, and when a loop begins again. Between other
    instructions, as between a `with` and its body, no signal is heard. What is raised in a __del__ Python drops.
    """
    moments, before = 0, {}

    def trace(frame, event, _):
        nonlocal moments
        if frame.f_code.co_filename != path or _in_finalizer(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            last, before[frame] = before.get(frame, ""), _instructions(frame.f_code)[frame.f_lasti]
            if last == "RESUME" or last.startswith("CALL") or "JUMP_BACKWARD" in last:
                moments += 1
                if moments > number:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def at_every_moment(path, begin, run, check, least):
    """For each moment of `run(thing)` in the code of the file `path`: thing = begin(), interrupted, then check(thing).

    In a thread of its own, which may wait for 100 s at most. There must be at least `least` moments.
    """
    moments, errors = [], []

    def all_moments():
        try:
            number, more = 0, True
            while more:
                thing = begin()
                more = interrupted(path, number, lambda: run(thing))
                check(thing)
                number += 1
            moments.append(number)
        except BaseException as error:
            errors.append((number, error))

    thread = threading.Thread(target=all_moments, daemon=True)
    thread.start()
    thread.join(100)
    assert not thread.is_alive(), "an interrupt has left something that is waited for"
    if errors:
        raise AssertionError(f"after an interrupt at moment {errors[0][0]}") from errors[0][1]
    assert moments[0] >= least, f"only {moments[0]} moments"
