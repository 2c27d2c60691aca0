"""5.1 What depends on the operating system

Made from book/05_streaming/01_system.py: edit that, then run `make export`.
"""

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


def zero_pages(nbytes: int) -> mmap.mmap:
    "Page-aligned anonymous memory of `nbytes` >= 1: zero, and uncommitted until it is written."
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


COMPILED_PREAD = sys.platform == "linux" and sys.maxsize > 2**32  # may machine code call the C library's pread itself?


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


def sync_folder(folder: str | os.PathLike[str]) -> None:
    "Put the names in `folder` on the disk, where the system can open a folder. Raises OSError."
    if hasattr(os, "O_DIRECTORY"):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


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


def machine_free_bytes() -> int | None:
    "Free bytes of the machine: MemAvailable on Linux, else all its memory, an upper bound. None if neither is known."
    kibibytes = _proc_number("/proc/meminfo", "MemAvailable")
    if kibibytes is not None:
        return 1024 * kibibytes
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


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


def make_nonblocking(fd: int) -> None:
    "Make writes to the pipe `fd` return at once, where the system can."
    with suppress(AttributeError, OSError):
        os.set_blocking(fd, False)


__all__ = [
    "SEEK_READ_MAX", "pread", "has_direct", "open_read", "keep_uncached", "forget_pages", "expect_sequential",
    "zero_pages", "COMPILED_PREAD", "data_runs", "disk_bytes", "sync_folder", "lock_file", "return_freed_memory",
    "trim_freed_memory", "status_bytes", "resident_bytes", "peak_bytes", "read_call_bytes", "machine_free_bytes",
    "allow_open_files", "make_nonblocking",
]
