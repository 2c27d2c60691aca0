# %% [markdown]
# # 5.1 What depends on the operating system
#
# Nearly all of this book is arithmetic and ordinary files, and runs wherever Python and numba run. A few jobs need
# calls that not every operating system has, for example a read that goes past the page cache. This chapter collects
# these calls, and gives each of them a replacement for the systems that lack it. At the end you can say for each call
# what the engine does on a system without it. You need the chapter when you port the engine; skip it on a first
# reading.
#
# > **Without it:** a call that a system lacks stops the engine there, or is replaced by something slower without a
# > message.
# >
# > **With it:** each call has one function with its replacement beside it, and a missing call changes no result.
#
# Needs only Python. Runs in seconds. Makes `k3lib.system`.
#
# [4.2 Latent experts: sixteen in half the width, two that always speak](../04_moe_router/02_moe.ipynb) ·
# [contents](../README.md) ·
# [5.2 Files read whole or refused, written whole or not at all](02_fileio.ipynb)

# %%
import sys
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "files", "disk")

# %% [markdown]
# Each such call has one function in this chapter, with its replacement, the *fallback*, beside it. All other modules
# call this function and never the system itself. The function decides when it is called, not when the module is
# imported. So a test can remove a call from Python and see the fallback work on Linux.
#
# | job | the call | the fallback |
# |---|---|---|
# | read at an offset | `preadv` | seek, then read, under a lock |
# | read from compiled code | the C library's `pread` | Python reads |
# | bypass the page cache | `O_DIRECT` | macOS: `F_NOCACHE`; else read through the page cache |
# | drop pages from the page cache | `posix_fadvise` | none |
# | memory at a page boundary | `mmap`, private | Windows: its own `mmap` |
# | put a new name on the disk | `fsync` of the folder | none: Windows has no such call |
# | parts of a file that are not holes | `SEEK_DATA`, `SEEK_HOLE` | the whole file |
# | bytes on the disk | `st_blocks` | the file's length |
# | return freed memory to the system | glibc's `mallopt`, `malloc_trim` | none |
# | memory of the process | `/proc/self/status` | `/proc/self/statm`; for its peak `getrusage` |
# | free memory of the machine | `/proc/meminfo` | all its memory, by `sysconf` |
# | open files, threads, addresses | `getrlimit`, `setrlimit` | there are no limits |
# | a pipe that does not block | `os.set_blocking` | none: Windows does not need it |
# | a lock that ends with its process | `flock` | none: what is written has names of its own ([5.19.4]) |
#
# The engine was run on Linux on x86-64, and on an emulated aarch64. macOS and Windows were only simulated, by removing
# the calls that they lack.
#
# [5.19.4]: 19_pack.ipynb#5.19.4-A-name-means-that-the-file-is-right

# %% tags=["export"]
import ctypes
import errno
import mmap
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None  # type: ignore[assignment]

# %%
import tempfile
from contextlib import contextmanager
from pathlib import Path

scratch = tempfile.TemporaryDirectory()
path = Path(scratch.name) / "numbers"
path.write_bytes(bytes(range(256)))


@contextmanager
def without(module, *names):
    "A `with` block in which the module lacks these names, as on a system that does not have the calls."
    had = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name in had:
        delattr(module, name)
    try:
        yield
    finally:
        for name, value in had.items():
            setattr(module, name, value)


# %% [markdown]
# ## 5.1.1 Reading at an offset
#
# `preadv` reads from an offset into a buffer of the caller. It does not use the position of the open file, so many
# threads can read the same file at the same time. Without `preadv`, a thread must first set the position and then read.
# The position belongs to the open file, and all threads share it. Here are two threads that read without a lock, step
# by step. The first wants byte 100, and the second byte 7:

# %% tags=["raises-exception"]
fd = os.open(path, os.O_RDONLY)
os.lseek(fd, 100, os.SEEK_SET)  # the first thread
os.lseek(fd, 7, os.SEEK_SET)  # the second thread, before the first has read
first_reads = os.read(fd, 1)
os.close(fd)
assert first_reads == bytes([100]), f"the first thread has read byte {first_reads[0]}, and wanted byte 100"

# %% [markdown]
# So the fallback holds a lock for the two steps. There are 64 locks, and the number of the descriptor chooses one of
# them, so readers of different files rarely wait for each other. `os.read` makes a copy of the bytes. So the fallback
# reads at most 16 MB at a time.

# %% tags=["export"]
_POSITION_LOCKS = [threading.Lock() for _ in range(64)]
SEEK_READ_MAX = 1 << 24  # bytes that os.read copies at a time


def pread(fd: int, view: memoryview, offset: int) -> int:
    """Read from byte `offset` of the descriptor `fd` into the writable bytes `view`.

    Returns how many bytes were read: 0 at the end of the file, else perhaps fewer than `view` holds. Raises OSError.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    with _POSITION_LOCKS[fd % len(_POSITION_LOCKS)]:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, min(len(view), SEEK_READ_MAX))
    view[:len(data)] = data
    return len(data)


# %%
with path.open("rb", buffering=0) as file:
    four = memoryview(bytearray(4))
    assert pread(file.fileno(), four, 100) == 4 and bytes(four) == bytes([100, 101, 102, 103])
    with without(os, "preadv"):
        assert pread(file.fileno(), four, 7) == 4 and bytes(four) == bytes([7, 8, 9, 10])
        assert pread(file.fileno(), four, 254) == 2 and pread(file.fileno(), four, 256) == 0


# %% [markdown]
# ## 5.1.2 Past the page cache
#
# A model of 1.56 TB would remove everything else from the page cache, and gain nothing, because each byte is read at
# most once for a token. If Linux opens a file with `O_DIRECT`, reads go in whole pages from the disk into the caller's
# buffer. macOS has a switch for an open file, `F_NOCACHE`. If a file had to be read through the page cache,
# `posix_fadvise` drops its pages afterwards. Windows needs the flag `O_BINARY`. Without it, the two bytes 13, 10 would
# be read as the single byte 10.

# %% tags=["export"]
def has_direct() -> bool:
    "Can this system open a file for reads that bypass the page cache (O_DIRECT)? A file system may still refuse it."
    return hasattr(os, "O_DIRECT")


def open_read(path: str | os.PathLike[str], direct: bool = False) -> int:
    """A descriptor for reading the bytes of the file at `path`.

    With `direct`, reads bypass the page cache; offsets, lengths and addresses must then be whole pages. Raises OSError:
    EINVAL where the system has no O_DIRECT or the file system refuses it.
    """
    if direct and not has_direct():
        raise OSError(errno.EINVAL, "this system has no O_DIRECT")
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | (os.O_DIRECT if direct else 0)
    return os.open(path, flags)


# %% tags=["export"]
def keep_uncached(fd: int) -> bool:
    "Ask that reads of `fd` leave no pages in the page cache (macOS: F_NOCACHE). False if that fails."
    if fcntl is None or not hasattr(fcntl, "F_NOCACHE"):
        return False
    try:
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return True
    except OSError:
        return False


def _advise(fd: int, offset: int, nbytes: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, getattr(os, advice))


def forget_pages(fd: int, offset: int, nbytes: int) -> None:
    "Drop the pages of these bytes of `fd` from the page cache, where the system has a call for it."
    _advise(fd, offset, nbytes, "POSIX_FADV_DONTNEED")


def expect_sequential(fd: int) -> None:
    "Announce that `fd` will be read from its beginning to its end, where the system has a call for it."
    _advise(fd, 0, 0, "POSIX_FADV_SEQUENTIAL")


# %% [markdown]
# The check removes these calls. The file is still read. Only its pages stay in the page cache.

# %%
with without(os, "O_DIRECT", "posix_fadvise"):
    try:
        open_read(path, direct=True)
        raise AssertionError("opened")
    except OSError as error:
        print(error.strerror)
    fd = open_read(path)
    assert not keep_uncached(fd) and os.read(fd, 3) == b"\0\1\2"
    forget_pages(fd, 0, 256), expect_sequential(fd), os.close(fd)


# %% [markdown]
# `O_DIRECT` also requires a buffer that begins at a page boundary. `mmap` returns whole pages of zeros. They take no
# memory of the machine until they are written. On Windows `mmap` has no flags, and needs none.

# %% tags=["export"]
def zero_pages(nbytes: int) -> mmap.mmap:
    "Page-aligned anonymous memory of `nbytes` >= 1: zero, and uncommitted until it is written."
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


# %% [markdown]
# The kernel that reads and multiplies row blocks (5.12) calls the C library's `pread` from machine code. An offset must
# have 64 bits there, as it has on 64-bit Linux. On other systems Python reads the same bytes, and the kernel only
# multiplies.

# %% tags=["export"]
COMPILED_PREAD = sys.platform == "linux" and sys.maxsize > 2**32  # may machine code call the C library's pread itself?


# %% [markdown]
# ## 5.1.3 Holes, and the bytes of a file on its disk
#
# A sparse file is longer than the space that it takes on the disk. The system stores nothing for its holes, and reads
# them as zeros. The synthetic model of 5.28 is 1.56 TB long and takes 5 GB. A copy of it must not write the zeros of
# the holes. So the copy needs to know where the data lie.

# %% tags=["export"]
def data_runs(fd: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The (begin, end) of the parts of bytes `begin`..`end` of the file `fd` that are not holes, in order.

    Where the system or the file system cannot tell holes from data, the bytes that remain are one part.
    """
    while begin < end:
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
            stop = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) == errno.ENXIO:  # the rest of the file is a hole
                return
            stop = end
        if begin < end:
            yield begin, stop
        begin = stop


def disk_bytes(status: os.stat_result) -> int:
    "Bytes that a file takes on its disk, from its os.stat; its length where the system does not count blocks."
    return 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size


# %%
sparse = Path(scratch.name) / "sparse"
with sparse.open("wb") as file:
    file.write(b"front")
    file.truncate(1 << 24)
with sparse.open("rb") as file:
    print(f"data at {list(data_runs(file.fileno(), 0, 1 << 24))}, "
          f"{disk_bytes(os.stat(sparse)):,} of {1 << 24:,} bytes on the disk")
    with without(os, "SEEK_DATA"):
        assert list(data_runs(file.fileno(), 0, 1 << 24)) == [(0, 1 << 24)]


# %% [markdown]
# ## 5.1.4 A name that survives a power cut
#
# `fsync` of a file puts the bytes of the file on the disk, but not its name. The name is stored in the folder, and the
# folder needs an `fsync` of its own. If the power fails between the two, the bytes are on the disk and have no name.
# Windows cannot open a folder. There the engine relies on the journal of the file system.

# %% tags=["export"]
def sync_folder(folder: str | os.PathLike[str]) -> None:
    "Put the names in `folder` on the disk, where the system can open a folder. Raises OSError."
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# %% [markdown]
# Two programs that write to the same folder should know of each other. A file that says "in use" would remain if its
# program crashes. A lock of an open file does not remain: the system releases it when the descriptor is closed, also at
# the end of the process. Windows has another call, and some network file systems have none. There no lock is taken, and
# the code that uses the lock must be right without it.

# %% tags=["export"]
def lock_file(fd: int) -> bool | None:
    """Lock the file that `fd` has open, until `fd` is closed. Does not wait: False if another descriptor has locked it.

    None where the system or the file system has no such lock.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


# %%
with open(path) as one, open(path) as other:
    print("locked:", lock_file(one.fileno()), "| by another descriptor meanwhile:", lock_file(other.fileno()))
    one.close()
    print("after the first is closed:", lock_file(other.fileno()))


# %% [markdown]
# ## 5.1.5 Memory: returned, used, free
#
# A budget limits the resident memory of the process. So memory that is freed should go back to the system. The C
# library glibc does not always return it: each time a large array is freed, glibc raises a threshold, and it keeps
# freed arrays below the threshold, up to 32 MB each. They count as resident. `mallopt` fixes the threshold, so that
# freed arrays of 1 MiB and more go back to the system at once. `malloc_trim` returns the free memory between small
# objects. Other C libraries have neither function, and on Windows `ctypes` cannot open the C library in this way.

# %% tags=["export"]
def _c_function(name: str) -> Callable[..., Any] | None:
    "A function of the C library, or None where the library has no such function or cannot be opened."
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def return_freed_memory() -> None:
    "Make freed arrays of 1 MiB and more go back to the system at once, where the C library is glibc."
    if mallopt := _c_function("mallopt"):
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def trim_freed_memory() -> None:
    "Return the free memory between small objects to the system, where the C library is glibc."
    if malloc_trim := _c_function("malloc_trim"):
        malloc_trim(0)


# %% [markdown]
# ## 5.1.6 Files that the system writes
#
# Linux shows its numbers in small text files: `/proc/self/status` has the memory of this process, and `/proc/meminfo`
# that of the machine. A container has more such files. Two facts about these files need care.
#
# First, their bytes need not be valid text. The first line of `/proc/self/status` is the name of the process, cut off
# after 15 bytes, which may be in the middle of a character. To decode the file as UTF-8 would then raise an error. So
# the bytes are decoded like those of a file name: a byte that is no character is kept.
#
# Second, any line may be missing. Old kernels have no `MemAvailable`, some containers show only a part of a file, and
# some systems have no such file. So one function reads the lines, another picks the well-formed ones, and each caller
# decides what takes the place of a missing line.

# %% tags=["export"]
def system_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a small file that the system writes; none if it cannot be read.

    Bytes that are no text stay in the result as os.fsdecode keeps them in file names: no byte raises an error.
    """
    try:
        with open(path, "rb") as file:
            return [os.fsdecode(line) for line in file.read().split(b"\n")]
    except OSError:
        return []


def system_number(text: str) -> int | None:
    "The whole number that `text` is, or None if it is anything else."
    return int(text) if re.fullmatch(r"\s*[0-9]{1,20}\s*", text) else None


def system_fields(path: str | os.PathLike[str]) -> dict[str, int]:
    "{name: number} of the lines `name: number unit` or `name number` of a system's file. Other lines are left out."
    words = [line.replace(":", " ", 1).split() for line in system_lines(path)]
    found = [(name, system_number(number)) for name, number, *_ in (line for line in words if len(line) > 1)]
    return {name: number for name, number in found if number is not None}


# %%
(Path(scratch.name) / "status").write_bytes(b"Name:\t\xe7\xa5\x9e\xe7\nVmRSS:\t 1234 kB\nVmHWM:\nVmData: many kB\n")
print(system_fields(Path(scratch.name) / "status"))
assert system_fields(Path(scratch.name) / "status") == {"VmRSS": 1234}
assert system_lines("/no/such/file") == [] and system_number("max") is None


# %% [markdown]
# The peak is read from `/proc/self/status` and not from `getrusage`, because in `getrusage` a forked process inherits
# the peak of its parent. macOS has only `getrusage`, and counts it in bytes. Other systems count it in KiB.
#
# The memory of a process is also in `/proc/self/statm`, in pages: the second number is all of its memory, and the third
# the part that belongs to files. These two numbers are used if `VmRSS` or `RssFile` is missing.

# %% tags=["export"]
def status_bytes(field: str) -> int | None:
    "A field of /proc/self/status in bytes, or None if the system has no such file or field."
    kibibytes = system_fields("/proc/self/status").get(field)
    return None if kibibytes is None else 1024 * kibibytes


def _status_or_pages(field, number):
    "A field of /proc/self/status in bytes, else the `number`th of the counts of pages in /proc/self/statm, else None."
    found = status_bytes(field)
    counts = [system_number(word) for word in " ".join(system_lines("/proc/self/statm")).split()]
    pages = counts[number] if len(counts) > number else None
    return found if found is not None or pages is None else pages * mmap.PAGESIZE


def resident_bytes() -> int | None:
    "Bytes of this process in memory now, or None if the system does not publish them."
    return _status_or_pages("VmRSS", 1)


def resident_file_bytes() -> int | None:
    "The part of resident_bytes() that belongs to files, such as libraries; None if the system does not publish it."
    return _status_or_pages("RssFile", 2)


def peak_bytes() -> int | None:
    "The most bytes this process has had in memory, or None if the system does not publish them."
    peak = status_bytes("VmHWM")
    if peak is None and resource is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def read_call_bytes() -> int | None:
    "Bytes that read calls have given this process, as Linux counts them (rchar), or None on other systems."
    return system_fields("/proc/self/io").get("rchar")


# %% [markdown]
# A budget is compared with the machine's free memory before anything is allocated. `MemAvailable` is Linux's own
# estimate of the memory that a new program can have. It counts the page cache as free, except `Shmem`: files that exist
# only in memory. If `MemAvailable` is missing, the engine adds up the other fields in the same way.
#
# macOS has no number with this meaning. There the budget is compared with the whole memory of the machine. So a budget
# of 64 GB on a machine of 8 GB is refused, but a budget is not refused because other programs use the memory.

# %% tags=["export"]
def machine_free() -> tuple[int | None, str]:
    "(free bytes of the machine or None, what stands in for the system's own figure: '' if nothing has to)."
    memory = system_fields("/proc/meminfo")
    if "MemAvailable" in memory:
        return 1024 * memory["MemAvailable"], ""
    if "MemFree" in memory:
        cache = ["Buffers", *["Cached"] * ("Shmem" in memory)]  # Shmem lies in Cached: without it, how much is unknown
        names = ["MemFree", *(name for name in cache if name in memory)]
        shared = memory["Shmem"] if "Cached" in names else 0
        shown = " + ".join(names) + " - Shmem" * ("Cached" in names)
        return 1024 * max(memory["MemFree"], sum(memory[name] for name in names) - shared), shown
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "all memory of the machine"
    except (AttributeError, OSError, ValueError):
        return None, "no figure"


# %% tags=["nbval-ignore-output"]
for what, figure in (("in memory now", resident_bytes()), ("at most", peak_bytes()), ("free", machine_free()[0])):
    print(f"{what:14s} {'unknown' if figure is None else f'{figure / 1e9:6.2f} GB'}")


# %% [markdown]
# ## 5.1.7 Limits of a process, and signals
#
# A process has limits of its own: the number of files that it may have open, the number of threads that its user may
# run, and the addresses that it may use. Each limit has two values. The soft value is in force. The process may raise
# it itself, up to the hard value.
#
# The released model has 96 files, a packed trunk has 94 more, and each may need two descriptors. macOS allows a process
# 256 open files at first. The folder `/dev/fd` lists the files that are open now.

# %% tags=["export"]
def raised_limit(name: str, wanted: int) -> int | None:
    """The limit RLIMIT_`name` of this process, which is raised to `wanted` first, as far as the hard limit allows.

    None where there is no such limit.
    """
    which = getattr(resource, f"RLIMIT_{name}", None)
    if which is None:
        return None
    soft, hard = resource.getrlimit(which)
    new = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < new:
        with suppress(OSError, ValueError):  # macOS: the kernel's own bound may be below the hard limit
            resource.setrlimit(which, (new, hard))
            soft = new
    return None if soft == resource.RLIM_INFINITY else soft


# %% tags=["export"]
_SPARE_FILES = 64  # descriptors for everything but a checkpoint's files, if the hard limit allows so many


def _open_files() -> int:
    "How many descriptors this process has open; 0 where the system does not list them."
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def allow_open_files(more: int) -> int | None:
    "Let this process open `more` files, as far as its hard limit allows. How many it may open then; None: no limit."
    now = _open_files()
    limit = raised_limit("NOFILE", now + more + _SPARE_FILES)
    return None if limit is None else max(0, limit - now)


def open_files_shortage(needed: int) -> str | None:
    "None if this process may open `needed` more files, and eight others; else a line of refusal."
    room, needed = allow_open_files(needed), needed + 8
    if room is None or room >= needed:
        return None
    return (f"this process needs {needed} more open files, but may have {room}: run it where `ulimit -n` is at least "
            f"{_open_files() + needed + _SPARE_FILES}")


# %% [markdown]
# How many more threads may a process start? No call of the system says it. The limit of the user, the limit of a
# container or the address space may be reached first. So the engine starts as many threads as a command needs, and ends
# them again.
#
# `ulimit -v` limits the address space, and `ulimit -d` private memory. Both count what is reserved, even if it is not
# used. A thread reserves its whole stack, 8 MB unless `ulimit -s` sets another size. With glibc it also reserves an
# arena, a region for small pieces of memory.

# %% tags=["export"]
def startable_threads(wanted: int) -> int:
    "How many of `wanted` threads could be started, all at the same time. They have ended when this returns."
    go, threads = threading.Event(), []
    try:
        for _ in range(wanted):
            threads.append(threading.Thread(target=go.wait, name="k3-probe", daemon=True))
            threads[-1].start()
    except (RuntimeError, MemoryError):
        threads.pop()
    finally:
        go.set()
        for thread in threads:
            with suppress(RuntimeError):  # an interrupt came before it was started
                thread.join()
    return len(threads)


# %% tags=["export"]
def thread_shortage(wanted: int, what: str) -> str | None:
    "None if this process can start `wanted` more threads, as `what` does; else a line of refusal."
    found = startable_threads(wanted)
    if found == wanted:
        return None
    return address_shortage(0, wanted) or (
        f"{what} starts {wanted} thread{'s' * (wanted > 1)}, but this process can start {found} more: run it where "
        "`ulimit -u` and the container allow more")


STACK_BYTES = 8 << 20  # of a thread, where `ulimit -s` sets no other size
ARENA_BYTES = 64 << 20  # addresses, not memory, that glibc reserves for the small pieces of a thread

# {limit: (the field of /proc/self/status that it bounds, what it counts of a thread beside the stack, its `ulimit`)}
ADDRESS_LIMITS = {"AS": ("VmSize", ARENA_BYTES, "-v"), "DATA": ("VmData", 0, "-d")}


def address_shortage(nbytes: int, threads: int) -> str | None:
    """None if this process may still reserve `nbytes`, and what `threads` threads reserve; else a line of refusal.

    A soft limit is raised as far as the hard one allows.
    """
    stack = raised_limit("STACK", 0) or STACK_BYTES
    for limit, (field, a_thread, option) in ADDRESS_LIMITS.items():
        used = status_bytes(field) or resident_bytes() or 0
        needed = used + nbytes + threads * (stack + a_thread)
        allowed = raised_limit(limit, needed)
        if allowed is not None and allowed < needed:
            return (f"this process would reserve {needed / 1e6:.0f} MB, {threads} threads included, but is limited to "
                    f"{allowed / 1e6:.0f} MB: run it where `ulimit {option}` is at least {-(-needed // 1024)}")
    return None


# %% [markdown]
# NumPy, numba and LLVM alone reserve about 400 MB of addresses. If the limit is lower, they fail in many different
# ways, before there is a plan. Then the error message shows the text of `memory_limits`.

# %% tags=["export"]
def memory_limits() -> str:
    "The limits of addresses and of private memory that are set for this process, as text; '' if none is."
    limits = [(raised_limit(name, 0), option) for name, (_, _, option) in ADDRESS_LIMITS.items()]
    return ", ".join(f"`ulimit {option}` is {allowed // 1024}" for allowed, option in limits if allowed is not None)


# %% [markdown]
# Python can write the number of each signal into a pipe (`signal.set_wakeup_fd`), and requires that writes to this pipe
# never wait. Python on Windows does not require it, and before 3.12 has no `os.set_blocking`.

# %% tags=["export"]
def make_nonblocking(fd: int) -> None:
    "Make writes to the pipe `fd` return at once, where the system can."
    with suppress(AttributeError, OSError):
        os.set_blocking(fd, False)


# %%
scratch.cleanup()

# %% [markdown]
# ## 5.1.8 Processors that are refused
#
# One condition concerns the processor and not the operating system. The weights are little-endian, and the kernels use
# the bytes in the order of the file. On a big-endian processor every number would be wrong, and no error would occur.
# So `import k3lib` refuses a big-endian Python. It also refuses a 32-bit Python, whose addresses are too short for
# these files. The check is in `k3lib/__init__.py`, because the kernels of part 1 need it, too. `make` makes the same
# check before it installs anything.

# %%
import subprocess

for change in "sys.byteorder = 'big'", "sys.maxsize = 2**31 - 1":
    run = subprocess.run([sys.executable, "-c", f"import sys; {change}; import k3lib"], capture_output=True, text=True)
    print(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 1

# %% [markdown]
# ## 5.1.9 Summary
#
# - Each call that some system lacks has one function, with a fallback beside it. The function chooses when it is
#   called.
# - A missing call costs speed or pages of the page cache, and changes no result. Processors on which results would be
#   wrong are refused.
#
# ## Exercises
#
# Answer to 2: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Remove the lock from `pread`'s fallback, and let four threads read one file. After how many reads is a byte wrong?
# 2. Call `data_runs` for a file in `/proc` and for a pipe. Which branch gives the answer, and is the answer right?
