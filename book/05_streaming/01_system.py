# %% [markdown]
# # 5.1 What depends on the operating system
#
# Everything else in this book is arithmetic and files, and runs wherever Python and numba do. This chapter holds the
# exceptions: calls that some operating system lacks. At the end you can say, for each of them, what the engine does on
# a system without it.
#
# [4.2 Latent experts: sixteen in half the width, two that always speak](../04_moe_router/02_moe.ipynb) ·
# [contents](../README.md) ·
# [5.2 Files read whole or refused, written whole or not at all](02_fileio.ipynb)

# %% [markdown]
# A reader that calls a function of Linux directly fails on macOS with a traceback. Or it does not fail, reads through
# the page cache, and tells nobody. So each such call has one function in this chapter, with its fallback beside it, and
# the other modules call that function. The choice is made when the function is called, not when the module is imported.
# A test can therefore remove a call and watch the fallback work on Linux.
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
# | peak memory of the process | `/proc/self/status` | `getrusage` |
# | free memory of the machine | `/proc/meminfo` | all its memory, by `sysconf` |
# | many open files | `setrlimit` | none |
# | a pipe that does not block | `os.set_blocking` | none: Windows does not need it |
# | a lock that ends with its process | `flock` | none: what is written has names of its own (5.19.4) |
#
# Linux on x86-64 is what the engine was run on; aarch64 was emulated. macOS and Windows were only simulated, by
# removing the calls that they lack.

# %% tags=["export"]
import ctypes
import errno
import mmap
import os
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
# `preadv` reads at an offset into a buffer that the caller owns. It moves no file position, so many threads can read
# one file at once. Without `preadv`, seeking and reading are two calls, and all threads share the file's position. If
# one thread seeks between the two calls of another, the other reads the wrong bytes. So the fallback holds a lock.
# There are 64 locks, and the descriptor chooses one: readers of different files rarely wait for each other. `os.read`
# makes a copy, so it is asked for at most 16 MB at a time.

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
# A model of 1.56 TB would push everything else out of the page cache and gain nothing, because each byte is read only
# once a token. A file that Linux opens with `O_DIRECT` is read in whole pages, straight from the disk into the caller's
# buffer. macOS has a switch for an open file, `F_NOCACHE`. Where a file had to be read through the page cache,
# `posix_fadvise` drops its pages afterwards. Windows needs the flag `O_BINARY`: without it, the bytes 13, 10 would be
# read as one byte, 10.

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
# **Check.** Without any of these calls a file is still read. The only cost is that its pages stay in the page cache.

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
# `O_DIRECT` also requires a buffer that begins at a page boundary. `mmap` returns whole pages of zeros and takes none
# of the machine's memory until they are written. On Windows, `mmap` has no flags and needs none.

# %% tags=["export"]
def zero_pages(nbytes: int) -> mmap.mmap:
    "Page-aligned anonymous memory of `nbytes` >= 1: zero, and uncommitted until it is written."
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


# %% [markdown]
# The kernel that reads and multiplies row blocks (5.12) calls the C library's `pread` from machine code, where an
# offset must have 64 bits: it has on 64-bit Linux. Elsewhere Python reads the same bytes and the kernel only
# multiplies.

# %% tags=["export"]
COMPILED_PREAD = sys.platform == "linux" and sys.maxsize > 2**32  # may machine code call the C library's pread itself?


# %% [markdown]
# ## 5.1.3 Holes, and the bytes of a file on its disk
#
# A sparse file is longer than the space it takes on the disk: the system stores no pages for its holes and reads them
# as zeros. The synthetic model of 5.24 is 1.56 TB long and takes 5 GB. A copy of it must not write the holes out.

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
# `fsync` of a file puts its bytes on the disk, but not its name: the name is stored in the folder, and the folder needs
# an `fsync` of its own. After a power cut between the two, the bytes have no name. Windows cannot open a folder; there
# the file system's journal must keep the name.

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
# Two programs that fill one folder should know of each other. A file that says "in use" outlives a program that
# crashes. A lock of an open file does not: the system drops it when the descriptor is closed, also by the end of the
# process. Windows has another call, and some network file systems have none; there no lock is taken, and its user must
# be right without it.

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
# The budget is a promise about the process's resident memory. glibc raises a threshold of its own each time a large
# array is freed, and from then on keeps freed arrays of that size for later, up to 32 MB each. They count as resident.
# `mallopt` fixes the threshold, so that freed arrays of 1 MiB and more go back to the system at once. `malloc_trim`
# returns the free memory between small objects. Other C libraries have neither function, and on Windows `ctypes` cannot
# open "the C library" at all.

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
# Linux publishes a process's memory in `/proc/self`. The peak is read there and not from `getrusage`, because a forked
# process inherits its parent's peak in the figure of `getrusage`. macOS has only `getrusage`, counted in bytes; other
# systems count it in KiB.

# %% tags=["export"]
def _proc_number(path: str, field: str) -> int | None:
    "The number behind `field:` in a file of /proc, or None if the file or the field does not exist."
    try:
        with open(path) as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith(field + ":")), None)
    except OSError:
        return None


def status_bytes(field: str) -> int | None:
    "A field of /proc/self/status in bytes, or None if the system has no /proc or no such field."
    kibibytes = _proc_number("/proc/self/status", field)
    return None if kibibytes is None else 1024 * kibibytes


def resident_bytes() -> int | None:
    "Bytes of this process in memory now, or None if the system does not publish them."
    return status_bytes("VmRSS")


def peak_bytes() -> int | None:
    "The most bytes this process has had in memory, or None if the system does not publish them."
    peak = status_bytes("VmHWM")
    if peak is None and resource is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def read_call_bytes() -> int | None:
    "Bytes that read calls have given this process, as Linux counts them (rchar), or None on other systems."
    return _proc_number("/proc/self/io", "rchar")


# %% [markdown]
# A budget is compared with the machine's free memory before anything is allocated. macOS has no figure that means the
# same as `MemAvailable`, so there the budget is compared with all memory of the machine. A budget of 64 GB on a machine
# of 8 GB is refused; a budget that other programs' memory makes impossible is not.

# %% tags=["export"]
def machine_free_bytes() -> int | None:
    "Free bytes of the machine: MemAvailable on Linux, else all its memory, an upper bound. None if neither is known."
    kibibytes = _proc_number("/proc/meminfo", "MemAvailable")
    if kibibytes is not None:
        return 1024 * kibibytes
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


# %% tags=["nbval-ignore-output"]
for what, figure in (("in memory now", resident_bytes()), ("at most", peak_bytes()), ("free", machine_free_bytes())):
    print(f"{what:14s} {'unknown' if figure is None else f'{figure / 1e9:6.2f} GB'}")

# %% [markdown]
# ## 5.1.6 Open files and signals
#
# The released model has 96 files, a packed trunk 94 more, and a reader may hold two descriptors of each. macOS allows a
# process 256 open files at first; the process may raise this soft limit, up to a hard limit. The folder `/dev/fd` lists
# the files that are open now.

# %% tags=["export"]
_SPARE_FILES = 64  # descriptors for everything but a checkpoint's files


def _open_files() -> int:
    "How many descriptors this process has open; 0 where the system does not list them."
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def allow_open_files(more: int) -> None:
    "Let this process open `more` files beyond those it has open, as far as its hard limit allows."
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _open_files() + more + _SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS: the kernel's own bound may be below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
# ## 5.1.7 Processors that are refused
#
# One dependence is on the processor, not on the operating system. The weights are little-endian, and the kernels use
# their bytes in the order of the file. On a big-endian processor every number would be wrong and nothing would fail. So
# `import k3lib` refuses a big-endian Python, and a 32-bit one, whose addresses cannot span these files. The check
# stands in `k3lib/__init__.py` and not in this chapter, because the kernels of folder 1 need it too; `make` makes the
# same check before it installs anything.

# %%
import subprocess

for change in "sys.byteorder = 'big'", "sys.maxsize = 2**31 - 1":
    run = subprocess.run([sys.executable, "-c", f"import sys; {change}; import k3lib"], capture_output=True, text=True)
    print(run.stderr.strip().splitlines()[-1])
    assert run.returncode == 1

# %% [markdown]
# ## 5.1.8 Summary
#
# - Each call that some system lacks has one function, with its fallback beside it. The choice is made at the call.
# - A missing call costs speed or pages of the page cache, never a right answer. Processors on which the answer would be
#   wrong are refused.
#
# **Exercises.**
# 1. Remove the lock from `pread`'s fallback and let four threads read one file. How soon is a byte wrong?
# 2. Call `data_runs` for a file in `/proc` and for a pipe. Which branch answers, and is the answer right?
