"The calls that some system lacks: each with the call, and with the call taken away. macOS and Windows are simulated."
import errno
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from common import MODEL, ROOT, digest

import k3lib
from k3lib import system


@pytest.fixture
def lacks(monkeypatch):
    "lacks('preadv', ...) takes calls out of os."
    return lambda *names: [monkeypatch.delattr(os, name, raising=False) for name in names]


@pytest.fixture
def numbers(tmp_path):
    "A file of 100,000 bytes and its contents."
    path = tmp_path / "numbers"
    path.write_bytes(os.urandom(100_000))
    return path, path.read_bytes()


# Reading at a place

@pytest.mark.parametrize("missing", [(), ("preadv",)])
def test_pread(numbers, lacks, missing):
    lacks(*missing)
    path, data = numbers
    fd = system.open_read(path)
    view = memoryview(bytearray(1000))
    for offset, got in (0, 1000), (50_000, 1000), (99_500, 500), (100_000, 0), (200_000, 0):
        assert system.pread(fd, view, offset) == got and view[:got] == data[offset:offset + got]
    os.close(fd)
    with pytest.raises(OSError) as caught:
        system.pread(fd, view, 0)
    assert caught.value.errno == errno.EBADF


def test_pread_without_preadv_copies_a_bounded_piece(numbers, lacks, monkeypatch):
    lacks("preadv")
    monkeypatch.setattr(system, "SEEK_READ_MAX", 300)
    fd = system.open_read(numbers[0])
    view = memoryview(bytearray(1000))
    assert system.pread(fd, view, 10) == 300 and view[:300] == numbers[1][10:310] and not any(view[300:])
    os.close(fd)


def test_pread_without_preadv_by_many_threads(numbers, lacks, monkeypatch):
    "A file's position is shared: without the lock, one thread reads where another has sought."
    lacks("preadv")
    seek = os.lseek

    def slow(fd, offset, whence):
        place = seek(fd, offset, whence)
        threading.Event().wait(0.001)
        return place

    monkeypatch.setattr(os, "lseek", slow)
    path, data = numbers
    fd, wrong = system.open_read(path), []

    def read(first):
        view = memoryview(bytearray(100))
        for offset in range(first, 20_000, 1000):
            system.pread(fd, view, offset)
            wrong.extend([offset] * (view != data[offset:offset + 100]))

    threads = [threading.Thread(target=read, args=(100 * i,)) for i in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
    os.close(fd)
    assert not wrong


# Past the page cache

def test_without_o_direct(numbers, lacks):
    lacks("O_DIRECT")
    assert not system.has_direct()
    with pytest.raises(OSError) as caught:
        system.open_read(numbers[0], direct=True)
    assert (caught.value.errno, caught.value.strerror) == (errno.EINVAL, "this system has no O_DIRECT")
    os.close(system.open_read(numbers[0]))


def test_flags_of_an_open(numbers, monkeypatch):
    "O_BINARY where there is one (Windows); O_DIRECT only when asked for."
    asked = []
    monkeypatch.setattr(os, "O_BINARY", 1 << 25, raising=False)
    monkeypatch.setattr(os, "O_DIRECT", 1 << 26, raising=False)
    monkeypatch.setattr(os, "open", lambda path, flags: asked.append(flags))
    system.open_read(numbers[0]), system.open_read(numbers[0], direct=True)
    assert asked == [os.O_RDONLY | 1 << 25, os.O_RDONLY | 1 << 25 | 1 << 26]


def test_macos_switches_the_cache_off(monkeypatch):
    asked = []

    def take(*args):
        asked.append(args)

    def refuse(*args):
        raise OSError(errno.ENOTTY, "not here")

    for fcntl, answer in (
        (SimpleNamespace(F_NOCACHE=48, fcntl=take), True),
        (SimpleNamespace(F_NOCACHE=48, fcntl=refuse), False),
        (SimpleNamespace(fcntl=take), False),
        (None, False),
    ):
        monkeypatch.setattr(system, "fcntl", fcntl)
        assert system.keep_uncached(7) is answer
    assert asked == [(7, 48, 1)]


def test_advice(numbers, lacks, monkeypatch):
    asked = []
    for name, value in ("POSIX_FADV_DONTNEED", 4), ("POSIX_FADV_SEQUENTIAL", 2):
        monkeypatch.setattr(os, name, value, raising=False)
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args), raising=False)
    system.forget_pages(3, 4096, 8192), system.expect_sequential(3)
    assert asked == [(3, 4096, 8192, 4), (3, 0, 0, 2)]
    lacks("posix_fadvise", "POSIX_FADV_DONTNEED", "POSIX_FADV_SEQUENTIAL")
    system.forget_pages(3, 4096, 8192), system.expect_sequential(3)


@pytest.mark.parametrize("private", [True, False])
def test_pages_are_zero_and_ours(monkeypatch, private):
    made = []
    if not private:
        monkeypatch.delattr(system.mmap, "MAP_PRIVATE", raising=False)
        real = system.mmap.mmap
        monkeypatch.setattr(system.mmap, "mmap", lambda *args, **more: made.append((args, more)) or real(*args, **more))
    pages = system.zero_pages(10_000)
    assert len(pages) == 10_000 and not any(pages[:])
    pages[5:7] = b"ab"
    assert pages[4:8] == b"\0ab\0" and made == ([] if private else [((-1, 10_000), {})])


# Holes

def sparse(path, length=1 << 22):
    "A file whose data are its first five bytes and one in the middle."
    with path.open("wb") as file:
        file.write(b"front")
        file.truncate(length)
        file.seek(length // 2)
        file.write(b"m")
    return path


def test_data_runs(tmp_path, monkeypatch, lacks):
    path, length = sparse(tmp_path / "sparse"), 1 << 22
    with path.open("rb") as file:
        runs = list(system.data_runs(file.fileno(), 0, length))
        inside = list(system.data_runs(file.fileno(), 3, 4))
        parts = [byte for begin, end in runs for byte in path.read_bytes()[begin:end]]
        assert sum(parts) == sum(b"frontm") and inside == [(3, 4)] and all(a < b for a, b in runs)
        if system.disk_bytes(path.stat()) < length:  # a file system that keeps holes
            assert len(runs) == 2 and list(system.data_runs(file.fileno(), length - 8192, length)) == []
        with monkeypatch.context() as patched:
            def refuse(*_):
                raise OSError(errno.EINVAL, "no holes here")
            patched.setattr(os, "lseek", refuse)
            assert list(system.data_runs(file.fileno(), 5, length)) == [(5, length)]
        lacks("SEEK_DATA", "SEEK_HOLE")
        assert list(system.data_runs(file.fileno(), 5, length)) == [(5, length)]
        assert list(system.data_runs(file.fileno(), 5, 5)) == []


def test_disk_bytes():
    assert system.disk_bytes(SimpleNamespace(st_size=1000, st_blocks=8)) == 4096
    assert system.disk_bytes(SimpleNamespace(st_size=1000)) == 1000  # Windows


def test_a_folder_is_synced_where_it_can_be_opened(tmp_path, monkeypatch, lacks):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    system.sync_folder(tmp_path)
    assert len(synced) == hasattr(os, "O_DIRECTORY")
    lacks("O_DIRECTORY")
    system.sync_folder(tmp_path)
    assert len(synced) <= 1


# Memory

@pytest.mark.parametrize("library", [None, OSError("none"), TypeError("argument 1 must be str"), SimpleNamespace()])
def test_memory_is_returned_where_the_c_library_can(monkeypatch, library):
    "glibc; none that can be opened; Windows; musl, which has neither function."
    def opened(name):
        if isinstance(library, Exception):
            raise library
        return library

    if library is not None:
        monkeypatch.setattr(system.ctypes, "CDLL", opened)
    system.return_freed_memory()
    system.trim_freed_memory()


def test_what_glibc_is_asked(monkeypatch):
    asked = []
    libc = SimpleNamespace(mallopt=lambda *args: asked.append(args), malloc_trim=lambda *args: asked.append(args))
    monkeypatch.setattr(system.ctypes, "CDLL", lambda name: libc)
    system.return_freed_memory(), system.trim_freed_memory()
    assert asked == [(-3, 1 << 20), (0,)]


def no_proc(monkeypatch):
    real = open

    def opened(path, *args, **more):
        return real("/nowhere" if str(path).startswith("/proc") else path, *args, **more)

    monkeypatch.setattr("builtins.open", opened)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="/proc")
def test_memory_by_proc():
    assert 0 < system.resident_bytes() <= system.peak_bytes() and system.status_bytes("NoSuchField") is None
    assert 0 < system.machine_free_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    before = system.read_call_bytes()
    with open(__file__, "rb", buffering=0) as file:
        file.read(100)
    assert system.read_call_bytes() >= before + 100


@pytest.mark.parametrize("platform, unit", [("darwin", 1), ("freebsd14", 1024)])
def test_memory_without_proc(monkeypatch, platform, unit):
    no_proc(monkeypatch)
    monkeypatch.setattr(sys, "platform", platform)
    usage = SimpleNamespace(ru_maxrss=123)
    monkeypatch.setattr(system, "resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: usage))
    assert system.resident_bytes() is None and system.read_call_bytes() is None and system.peak_bytes() == 123 * unit
    assert system.machine_free_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_memory_where_nothing_tells(monkeypatch, lacks):
    no_proc(monkeypatch)
    lacks("sysconf")
    monkeypatch.setattr(system, "resource", None)
    assert system.peak_bytes() is None and system.machine_free_bytes() is None


# Everything at once

WITHOUT = """
import builtins, hashlib, mmap, os, sys
import numba
sys.modules["fcntl"] = sys.modules["resource"] = None  # to import them fails
sys.platform = "neither"
for name in "preadv O_DIRECT O_DIRECTORY posix_fadvise SEEK_DATA SEEK_HOLE set_blocking sysconf".split():
    if hasattr(os, name):
        delattr(os, name)
if hasattr(mmap, "MAP_PRIVATE"):
    del mmap.MAP_PRIVATE
real = builtins.open
builtins.open = lambda path, *args, **more: real("/nowhere" if str(path).startswith("/proc") else path, *args, **more)
import k3lib
with k3lib.load("fixtures/oracle13/model", ram="1GB") as model:
    print(hashlib.sha256(model.prefill([304, 206, 32]).tobytes() + model.step(7).tobytes()).hexdigest())
    print(model.report.text())
"""


def test_the_model_runs_without_any_of_the_calls_and_gives_the_same_bytes():
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    with k3lib.load(MODEL, ram="1GB") as model:
        logits = model.prefill([304, 206, 32]), model.step(7)
    found, report = run.stdout.split("\n", 1)
    assert found == digest(*logits)
    assert "buffered: this system has no O_DIRECT" in report and "the system keeps no count" in report


# Open files and signals

@pytest.mark.parametrize("soft, hard, more, set_to", [
    (256, 10_000, 190, 264), (1024, 10_000, 190, None), (256, 200, 190, None), (200, 230, 190, 230),
    (256, -1, 500, 574), (-1, -1, 10**6, None)])
def test_limit_of_open_files(monkeypatch, soft, hard, more, set_to):
    "The soft limit becomes what is open (10 here), what is asked for and 64 more, as far as the hard one goes."
    asked = []
    monkeypatch.setattr(os, "listdir", lambda path: [str(fd) for fd in range(10)])
    monkeypatch.setattr(system, "resource", SimpleNamespace(
        RLIMIT_NOFILE=7, RLIM_INFINITY=-1, getrlimit=lambda which: (soft, hard),
        setrlimit=lambda which, limits: asked.append(limits)))
    system.allow_open_files(more)
    assert asked == ([] if set_to is None else [(set_to, hard)])


def test_a_limit_that_cannot_be_raised(monkeypatch):
    def refuse(which, limits):
        raise ValueError("not allowed to raise maximum limit")

    limited = SimpleNamespace(RLIMIT_NOFILE=7, RLIM_INFINITY=-1, getrlimit=lambda which: (10, 10_000), setrlimit=refuse)
    for resource in None, limited:
        monkeypatch.setattr(system, "resource", resource)
        system.allow_open_files(1000)
    monkeypatch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    system.allow_open_files(1000)


OPEN_MANY = """
import resource, sys, tempfile
from k3lib.system import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
allow_open_files(200)
print(len([tempfile.TemporaryFile() for _ in range(200)]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits")
def test_as_many_files_open_as_were_asked_for():
    made = subprocess.run([sys.executable, "-c", OPEN_MANY], capture_output=True, text=True, cwd=ROOT)
    assert made.stdout == "200\n", made.stderr


def test_a_pipe_does_not_block(lacks):
    reader, writer = os.pipe()
    system.make_nonblocking(writer)
    if hasattr(os, "get_blocking"):
        assert not os.get_blocking(writer)
    lacks("set_blocking")
    system.make_nonblocking(reader)
    os.close(reader), os.close(writer)
