"The calls that some system lacks: each with the call, and with the call taken away. macOS and Windows are simulated."
import errno
import mmap
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
    assert 0 < system.machine_free()[0] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
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
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert system.machine_free() == (whole, "all memory of the machine") and system.resident_file_bytes() is None


def test_memory_where_nothing_tells(monkeypatch, lacks):
    no_proc(monkeypatch)
    lacks("sysconf")
    monkeypatch.setattr(system, "resource", None)
    assert system.peak_bytes() is None and system.machine_free() == (None, "no figure")


# Files that the system writes

def test_system_files_are_bytes_and_any_line_may_be_malformed(tmp_path):
    text = (b"Name:\t\xe7\xa5\x9e\xe7\nVmRSS:\t   12 kB\nVmSize:\nVmData: x kB\nVmStk: -3 kB\nVmLck: 1.5 kB\n"
            b"Huge: " + b"9" * 5000 + b" kB\nplain 7\n\n:\nline\x0bbreak: 3\nlast: 4")
    (tmp_path / "f").write_bytes(text)
    assert system.system_fields(tmp_path / "f") == {"VmRSS": 12, "plain": 7, "last": 4}
    assert os.fsencode("\n".join(system.system_lines(tmp_path / "f"))) == text
    assert system.system_lines(tmp_path) == system.system_lines(tmp_path / "none") == []


@pytest.mark.parametrize("text, number", [
    ("0", 0), (" 12\n", 12), ("9223372036854771712", 2**63 - 4096), ("max", None), ("", None), ("1 2", None),
    ("-1", None), ("1.5", None), ("9" * 21, None), ("\u0663", None), ("1_0", None)])
def test_system_number(text, number):
    assert system.system_number(text) == number


@pytest.fixture
def system_files(monkeypatch):
    "system_files({path: text}): these files of the system exist, and no others."
    def replace(files):
        monkeypatch.setattr(system, "system_lines", lambda path: files.get(path, "").split("\n"))
    return replace


@pytest.mark.parametrize("text, kibibytes, said", [
    ("MemTotal: 90 kB\nMemFree: 10 kB\nMemAvailable: 60 kB\n", 60, ""),
    ("MemFree: 10 kB\nBuffers: 5 kB\nCached: 40 kB\nShmem: 8 kB", 47, "MemFree + Buffers + Cached - Shmem"),
    ("MemFree: 10 kB\nBuffers: 5 kB\nCached: 40 kB", 15, "MemFree + Buffers"),
    ("MemAvailable: much\nMemFree: 10 kB\nCached: 4 kB\nShmem: 8 kB", 10, "MemFree + Cached - Shmem"),
    ("MemFree: 10 kB", 10, "MemFree"),
])
def test_free_memory_where_meminfo_lacks_a_line(system_files, text, kibibytes, said):
    "What is on the right is never more than what the kernel would count as available."
    system_files({"/proc/meminfo": text})
    assert system.machine_free() == (1024 * kibibytes, said)


@pytest.mark.parametrize("status, statm, resident, of_files", [
    ("VmRSS: 8 kB\nRssFile: 4 kB", "9 3 1", 8192, 4096),
    ("VmRSS: 8 kB", f"{9} 3 1", 8192, mmap.PAGESIZE),
    ("Name: x", "9 3 1 0", 3 * mmap.PAGESIZE, mmap.PAGESIZE),
    ("VmRSS: x\nRssFile:", "9", None, None), ("", "a b c", None, None), ("", "", None, None),
])
def test_memory_of_the_process_where_status_lacks_a_line(system_files, status, statm, resident, of_files):
    system_files({"/proc/self/status": status, "/proc/self/statm": statm})
    assert (system.resident_bytes(), system.resident_file_bytes()) == (resident, of_files)
    assert system.read_call_bytes() is None and system.peak_bytes() > 0


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


@pytest.mark.parametrize("limit, opened, refused", [
    (100, 10, False), (100, 32, False), (100, 33, True), (None, 10**4, False)])
def test_files_that_cannot_be_open_at_the_same_time(monkeypatch, limit, opened, refused):
    "Eight descriptors are left for other things."
    monkeypatch.setattr(system, "_open_files", lambda: opened)
    monkeypatch.setattr(system, "raised_limit", lambda name, wanted: limit)
    said = system.open_files_shortage(60)
    assert bool(said) == refused
    assert not said or said == ("this process needs 68 more open files, but may have 67: run it where `ulimit -n` is "
                                "at least 165")


@pytest.mark.parametrize("soft, hard, wanted, asked, limit", [
    (-1, -1, 10, None, None), (5, -1, 10, 10, 10), (5, 8, 10, 8, 8), (12, 20, 10, None, 12), (9, 8, 10, None, 9)])
def test_a_soft_limit_is_raised_to_what_is_wanted(monkeypatch, soft, hard, wanted, asked, limit):
    calls = []
    monkeypatch.setattr(system, "resource", SimpleNamespace(
        RLIMIT_AS=1, RLIM_INFINITY=-1, getrlimit=lambda which: (soft, hard),
        setrlimit=lambda which, limits: calls.append(limits)))
    assert system.raised_limit("AS", wanted) == limit and calls == ([] if asked is None else [(asked, hard)])
    assert system.raised_limit("NONE", wanted) is None


@pytest.mark.parametrize("limits, option", [
    ({}, None), ({"AS": 1_399}, "-v 2"), ({"AS": 1_400}, None), ({"DATA": 699}, "-d 1"), ({"DATA": 700}, None)])
def test_addresses_are_counted_with_stacks_and_arenas(monkeypatch, limits, option):
    "Of 1,000 bytes reserved 500 are writable; 100 more are wanted; two threads have stacks of 50 and arenas of 100."
    monkeypatch.setattr(system, "status_bytes", {"VmSize": 1000, "VmData": 500}.get)
    monkeypatch.setattr(system, "raised_limit", lambda name, wanted: {"STACK": 50, **limits}.get(name))
    monkeypatch.setattr(system, "ADDRESS_LIMITS", {"AS": ("VmSize", 100, "-v"), "DATA": ("VmData", 0, "-d")})
    said = system.address_shortage(100, 2)
    assert (said is None) == (option is None)
    assert said is None or f"run it where `ulimit {option.split()[0]}` is at least {option.split()[1]}" in said


def test_as_many_threads_as_can_be_started(monkeypatch):
    start, running = threading.Thread.start, []

    def at_most_three(thread):
        if len(running) == 3:
            raise RuntimeError("can't start new thread")
        running.append(thread)
        start(thread)

    before = threading.active_count()
    assert system.startable_threads(5) == 5 and system.startable_threads(0) == 0
    monkeypatch.setattr(threading.Thread, "start", at_most_three)
    assert system.startable_threads(5) == 3
    assert threading.active_count() == before and not any(thread.is_alive() for thread in running)


def test_a_pipe_does_not_block(lacks):
    reader, writer = os.pipe()
    system.make_nonblocking(writer)
    if hasattr(os, "get_blocking"):
        assert not os.get_blocking(writer)
    lacks("set_blocking")
    system.make_nonblocking(reader)
    os.close(reader), os.close(writer)
