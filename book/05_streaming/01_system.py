# %% [markdown]
# # 5.1 What depends on the operating system
#
# Everything else in this book is arithmetic and files, and runs wherever Python and numba do. This chapter holds the
# exceptions. At the end you can say, for each call of the system that the engine uses, what happens where there is
# none.
#
# [4.2 Latent experts: sixteen in half the width, two that always speak](../04_moe_router/02_moe.ipynb) ·
# [contents](../README.md) ·
# [5.2 Files read whole or refused, written whole or not at all](02_fileio.ipynb)

# %% [markdown]
# A call that only Linux has, spelled in the middle of a reader, ends a Mac's run with a traceback, or worse, reads
# through the page cache and says nothing. So each such call has one function here, its fallback stands beside it, and
# the rest of the package asks the function. The choice is made when the function is called, not when the module is
# imported. A test can therefore take a call away and watch the fallback work on Linux.
#
# | job | the call | where there is none |
# |---|---|---|
# | read at a place | `preadv` | seek, then read, under a lock |
# | read past the page cache | `O_DIRECT` | macOS `F_NOCACHE`, else through the cache |
# | drop what the cache kept | `posix_fadvise` | nothing |
# | a new name on the disk | `fsync` of the folder | nothing: Windows has no such call |
# | parts that are not holes | `SEEK_DATA`, `SEEK_HOLE` | the whole file |
# | bytes on the disk | `st_blocks` | the file's length |
# | memory given back | glibc's `mallopt`, `malloc_trim` | nothing |
# | most memory used | `/proc/self/status` | `getrusage` |
# | memory that is free | `/proc/meminfo` | all there is, by `sysconf` |
# | many open files | `setrlimit` | nothing |
#
# What was really run is Linux, on x86-64 and aarch64. macOS and Windows were simulated, by taking the calls away.

# %% tags=["export"]
import ctypes
import errno
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType

fcntl: ModuleType | None
resource: ModuleType | None
try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

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
# ## 5.1.1 Reading at a place
#
# `preadv` reads at an offset into memory that is already ours. It moves no file position, so many threads can read one
# file at once. Without it, seeking and reading are two calls and the position is shared. Two threads between them
# would read each other's bytes. So the fallback holds a lock, one of 64, chosen by the descriptor: readers of
# different files rarely wait for each other. `os.read` makes a copy, hence its bound of 16 MB a call.

# %% tags=["export"]
_POSITION_LOCKS = [threading.Lock() for _ in range(64)]
_SEEK_READ_MAX = 1 << 24  # bytes that os.read copies at a time


def pread(fd: int, view: memoryview, offset: int) -> int:
    """Read from byte `offset` of the descriptor `fd` into the writable bytes `view`.

    Returns how many bytes arrived: 0 at the end of the file, else perhaps fewer than asked. Raises OSError.
    """
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    with _POSITION_LOCKS[fd % len(_POSITION_LOCKS)]:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, min(len(view), _SEEK_READ_MAX))
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
# A model of 1.56 TB would push everything else out of the page cache and gain nothing, since it comes round only once
# a token. Linux opens a file with `O_DIRECT` and then moves whole pages between the disk and our buffer. macOS has a
# switch for an open file, `F_NOCACHE`. Where a file had to be read through the cache, `posix_fadvise` drops the pages
# again. Windows wants binary mode said aloud: without `O_BINARY` it would turn the bytes 13, 10 into one.

# %% tags=["export"]
def has_direct() -> bool:
    "Can this system open a file for reads that bypass the page cache (O_DIRECT)? A file system may still refuse it."
    return hasattr(os, "O_DIRECT")


def open_read(path: str | os.PathLike, direct: bool = False) -> int:
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
    "Ask that reads of `fd` leave no pages in the page cache (macOS: F_NOCACHE). False if there is no such switch."
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
    "Drop the pages of these bytes of `fd` from the page cache, where the system can be told to."
    _advise(fd, offset, nbytes, "POSIX_FADV_DONTNEED")


def expect_sequential(fd: int) -> None:
    "Say that `fd` will be read from its beginning to its end, where the system can be told."
    _advise(fd, 0, 0, "POSIX_FADV_SEQUENTIAL")


# %% [markdown]
# Without any of the calls a file is still read; it only costs the page cache.

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
# `O_DIRECT` also wants memory at a page boundary. `mmap` gives whole pages, zero, and takes none of the machine's
# memory before they are written. Private pages need no file behind them; Windows has only its own kind.

# %% tags=["export"]
def zero_pages(nbytes: int) -> mmap.mmap:
    "Page-aligned anonymous memory of `nbytes` >= 1: zero, and uncommitted until it is written."
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


COMPILED_PREAD = sys.platform == "linux" and sys.maxsize > 2**32  # may machine code call the C library's pread itself?


# %% [markdown]
# ## 5.1.3 Holes, and what a file takes
#
# A sparse file is longer than what it takes on the disk: the system keeps no pages for its holes and reads them as
# zeros. The synthetic model of 5.24 is 1.56 TB long and takes 5 GB. Who copies it must not write the holes out.

# %% tags=["export"]
def data_runs(fd: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The (begin, end) of the parts of bytes `begin`..`end` of the file `fd` that are not holes, in order.

    All of begin..end is one part where the system or the file system cannot tell.
    """
    while begin < end:
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
            stop = min(os.lseek(fd, begin, os.SEEK_HOLE), end)
        except (AttributeError, OSError) as error:
            if getattr(error, "errno", None) == errno.ENXIO:  # only a hole is left
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
    print(*data_runs(file.fileno(), 0, 1 << 24), f"; {disk_bytes(os.stat(sparse)):,} of {1 << 24:,} bytes on the disk")
    with without(os, "SEEK_DATA"):
        assert list(data_runs(file.fileno(), 0, 1 << 24)) == [(0, 1 << 24)]


# %% [markdown]
# ## 5.1.4 A name that lasts
#
# `fsync` of a file puts its bytes on the disk, not its name: the name is in the folder, and the folder needs an
# `fsync` of its own. A power cut in between leaves the bytes without a name. Windows opens no folders; there the file
# system's journal has to do.

# %% tags=["export"]
def sync_folder(folder: str | os.PathLike) -> None:
    "Put the names in `folder` on the disk, where the system can open a folder. Raises OSError."
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# %% [markdown]
# ## 5.1.5 Memory: given back, used, free
#
# The budget is a promise about the process's resident memory. glibc learns from the first large array it frees to keep
# such pieces for later, up to 32 MB each, and they count as ours. `mallopt` fixes the size from which freed memory goes
# back at once; `malloc_trim` gives back what small objects left. Other C libraries have neither, and Windows'
# `ctypes` refuses to open "the C library" at all.

# %% tags=["export"]
def _c_function(name: str):
    "A function of the C library, or None where there is no such function or no library that can be opened."
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


_M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def return_freed_memory() -> None:
    "From now on, freed arrays of 1 MiB and more go back to the system at once, where the C library is glibc."
    if mallopt := _c_function("mallopt"):
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def trim_freed_memory() -> None:
    "Give free memory between small objects back to the system, where the C library is glibc."
    if malloc_trim := _c_function("malloc_trim"):
        malloc_trim(0)


# %% [markdown]
# Linux tells of a process in `/proc/self`. The peak is read there and not from `getrusage`, whose figure begins with
# what a forking parent had. macOS has only the latter, counted in bytes; other systems count it in KiB.

# %% tags=["export"]
def _proc_number(path: str, field: str) -> int | None:
    "The number behind `field:` in a file of /proc, or None where there is none."
    try:
        with open(path) as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith(field + ":")), None)
    except OSError:
        return None


def status_bytes(field: str) -> int | None:
    "A field of /proc/self/status in bytes, or None where there is no /proc."
    kibibytes = _proc_number("/proc/self/status", field)
    return None if kibibytes is None else 1024 * kibibytes


def resident_bytes() -> int | None:
    "Bytes of this process in memory now, or None where the system does not tell."
    return status_bytes("VmRSS")


def peak_bytes() -> int | None:
    "The most bytes this process has had in memory, or None where the system does not tell."
    peak = status_bytes("VmHWM")
    if peak is None and resource is not None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak


def read_call_bytes() -> int | None:
    "Bytes that read calls have given this process, as the kernel counts them (rchar), or None where it does not."
    return _proc_number("/proc/self/io", "rchar")


# %% [markdown]
# Free memory is what a budget is compared with before anything is allocated. macOS has no figure that means the same as
# `MemAvailable`, so there the whole machine's memory stands in: it refuses 64 GB on a machine of 8 GB, and no more.

# %% tags=["export"]
def machine_free_bytes() -> int | None:
    "Bytes the machine can still give: MemAvailable on Linux, else all its memory, an upper bound; None if not told."
    kibibytes = _proc_number("/proc/meminfo", "MemAvailable")
    if kibibytes is not None:
        return 1024 * kibibytes
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


# %% tags=["nbval-ignore-output"]
for what, figure in (("in memory now", resident_bytes()), ("at most", peak_bytes()), ("free", machine_free_bytes())):
    print(f"{what:14s} {'not told' if figure is None else f'{figure / 1e9:6.2f} GB'}")

# %% [markdown]
# ## 5.1.6 Open files and signals
#
# The released model is 96 files, a packed trunk 94 more, and a reader may hold two descriptors of each. macOS
# allows 256 unless asked; the program may ask for more, up to a hard limit. How many are open now stands in `/dev/fd`.

# %% tags=["export"]
_SPARE_FILES = 64  # descriptors for all that is not a shard


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
        with suppress(OSError, ValueError):  # the system's own bound is below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# %% [markdown]
# Python writes the number of a signal into a pipe, if it is told which, and wants that pipe never to block. Windows
# before Python 3.12 has no `set_blocking`, and does not ask for it.

# %% tags=["export"]
def make_nonblocking(fd: int) -> None:
    "Have writes to the pipe `fd` never wait, where the system can. Windows does not ask for it of a signal's pipe."
    with suppress(AttributeError, OSError):
        os.set_blocking(fd, False)


# %%
scratch.cleanup()

# %% [markdown]
# One dependence is on the processor, not on the system. The weights are little-endian, and the kernels take their bytes
# as they lie in the file. On a big-endian processor every number would be wrong and nothing would fail, so `import
# k3lib` refuses it there; it is the one check that cannot wait for this chapter, because the kernels are made in the
# first.
#
# ## 5.1.7 Summary
#
# - One function for each call that some system lacks, its fallback beside it, chosen when it is called.
# - A missing call costs speed or the page cache, never a right answer; a processor that would cost the answer is
#   refused.
#
# **Exercises.**
# 1. Take the lock out of `pread`'s fallback and let four threads read one file. How soon does a wrong byte show?
# 2. `data_runs` of a file on `/proc` or in a pipe: which branch serves it, and is the answer right?
