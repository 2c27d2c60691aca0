"""5.1 What depends on the operating system

Made from book/05_streaming/01_system.py: edit that, then run `make export`.
"""

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


def memory_limits() -> str:
    "The limits of addresses and of private memory that are set for this process, as text; '' if none is."
    limits = [(raised_limit(name, 0), option) for name, (_, _, option) in ADDRESS_LIMITS.items()]
    return ", ".join(f"`ulimit {option}` is {allowed // 1024}" for allowed, option in limits if allowed is not None)


def make_nonblocking(fd: int) -> None:
    "Make writes to the pipe `fd` return at once, where the system can."
    with suppress(AttributeError, OSError):
        os.set_blocking(fd, False)


__all__ = [
    "SEEK_READ_MAX", "pread", "has_direct", "open_read", "keep_uncached", "forget_pages", "expect_sequential",
    "zero_pages", "COMPILED_PREAD", "data_runs", "disk_bytes", "sync_folder", "lock_file", "return_freed_memory",
    "trim_freed_memory", "system_lines", "system_number", "system_fields", "status_bytes", "resident_bytes",
    "resident_file_bytes", "peak_bytes", "read_call_bytes", "machine_free", "raised_limit", "allow_open_files",
    "open_files_shortage", "startable_threads", "thread_shortage", "STACK_BYTES", "ARENA_BYTES", "ADDRESS_LIMITS",
    "address_shortage", "memory_limits", "make_nonblocking",
]
