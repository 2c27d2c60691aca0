"""Read calls that fail on demand, put where compiled code and Python look for `pread` and `preadv`.

That must be done before anything compiled is loaded, so this is a program: `python tests/shim.py MODEL`. It prints what
happened in each case as JSON, for test_failing_io.py to judge.
"""
import contextlib
import ctypes
import errno
import io
import json
import logging
import os
import sys
import threading
import time

from llvmlite import binding

_real = ctypes.CDLL(None, use_errno=True).pread
_real.restype, _real.argtypes = ctypes.c_ssize_t, [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
_preadv, _lock = os.preadv, threading.Lock()
rule = None  # (who, path, bytes got, offset) -> bytes to admit, or minus an errno
calls = []  # (who, path, offset, bytes asked)


def _admit(who, fd, got, offset, asked):
    path = os.readlink(f"/proc/self/fd/{fd}")
    with _lock:
        calls.append((who, path, offset, asked))
        return got if rule is None else min(got, rule(who, path, got, offset))


@ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
def _compiled(fd, buffer, asked, offset):
    got = _real(fd, buffer, asked, offset)
    admitted = _admit("compiled", fd, got, offset, asked)
    if 0 <= admitted < got:
        ctypes.memset(buffer + admitted, 0xA5, got - admitted)  # what a short read has not delivered must not be used
    return max(admitted, -1)


def _python(fd, buffers, offset):
    (view,) = buffers
    got = _preadv(fd, buffers, offset)
    admitted = _admit("python", fd, got, offset, len(view))
    if admitted < 0:
        raise OSError(-admitted, os.strerror(-admitted))
    view[admitted:got] = b"\xa5" * (got - admitted)
    return admitted


def install():
    binding.add_symbol("pread", ctypes.cast(_compiled, ctypes.c_void_p).value)
    os.preadv = _python


def decoded(model, new=3):
    "What eight ids and `new` more come to: the bytes of all logits, or the error; and what was read."
    calls.clear()
    logits = []
    try:
        model.reset()
        ids = list(model.generate([304, 206, 32, 7, 411, 90, 3, 128], new, logits.append))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "steps": len(logits)}
    return {"ids": ids, "logits": b"".join(each.tobytes() for each in logits).hex()}


def small_model(folder):
    "The model with the least memory: nothing is pinned, everything is read in each pass."
    from k3lib import plan
    from k3lib.engine import load
    from k3lib.plan import PlanError
    plan.resident_bytes = lambda: 150_000_000  # the least then does not depend on what has been loaded meanwhile
    try:
        load(folder, 1, context=16)
    except PlanError as error:
        return load(folder, error.least + 300_000, context=16)


@contextlib.contextmanager
def ruled(new):
    global rule
    rule = new
    try:
        yield
    finally:
        rule = None


def every(who, act):
    return lambda caller, path, got, offset: act(got, offset) if who in (caller, "both") else got


def at(path, offset, act):
    "A read of these bytes by either caller: Python reads again what compiled code did not get."
    return lambda caller, there, got, begin: act if there == path and begin <= offset < begin + max(got, 1) else got


def main(folder):
    import numpy as np

    from k3lib import disk
    from k3lib.cli import main as k3
    install()
    found = {}
    model = small_model(folder)
    found["as it is"] = decoded(model)
    found["who"] = {who: sum(1 for caller, *_ in calls if caller == who) for who in ("compiled", "python")}
    found["how"] = sorted(set(model.files.access().values()))
    reads = sorted({(path, offset, asked) for _, path, offset, asked in calls})

    rng = np.random.default_rng(1)
    for label, new in {
        "compiled reads short": every("compiled", lambda got, _: int(rng.integers(0, max(got, 1)))),
        "compiled reads interrupted": every("compiled", lambda got, _: -errno.EINTR if rng.integers(2) else got),
        "compiled reads failing, repeated by Python": every("compiled", lambda got, _: -errno.EIO),
        "all reads short by pages": every("both", lambda got, _: max(4096, got // 2 // 4096 * 4096)),
        "all reads short by bytes": every("both", lambda got, _: max(1, got - 1 - int(rng.integers(5000)))),
    }.items():
        with ruled(new):
            found[label] = decoded(model)
    model.close()

    model, found["failed"], found["ended"] = small_model(folder), [], []
    for kind, act in (("failed", -errno.EIO), ("ended", 0)):
        for i in rng.permutation(len(reads))[:24]:
            path, offset, asked = reads[i]
            with ruled(at(path, offset + int(rng.integers(min(asked, os.path.getsize(path) - offset))), act)):
                found[kind].append({"path": path, "offset": offset, **decoded(model)})
    found["afterwards"] = decoded(model)

    said = []
    disk._log.addHandler(handler := logging.Handler())
    disk._log.propagate, handler.emit = False, lambda record: said.append(record.getMessage())
    path, offset, asked = reads[len(reads) // 2]
    slow = threading.Event()

    def stall(caller, there, got, begin):
        if there == path and begin <= offset < begin + max(got, 1) and not slow.is_set():
            slow.set()
            time.sleep(1.2)
        return got
    model.close()
    disk.STALL = 0.4
    model = small_model(folder)
    with ruled(stall):
        found["stalled"] = {"path": path, "offset": offset, **decoded(model)}
    found["stalled"]["said"] = said
    model.close()
    found["threads left"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("k3")]

    third, fifth = (os.path.join(folder, f"model-{number:05}-of-000016.safetensors") for number in (3, 5))
    for label, path, args in (
        ("header", third, ["census", folder]),
        ("decode", third, ["decode", folder, "--quiet", "--ids", "1,2"]),
        ("hash", fifth, ["verify", folder]),
    ):
        out, err = io.StringIO(), io.StringIO()
        offset = 12 if label == "header" else 100_000
        with ruled(at(path, offset, -errno.EIO)), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = k3(args)
        found[f"k3 {label}"] = {"path": path, "code": code, "out": out.getvalue(), "err": err.getvalue()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
