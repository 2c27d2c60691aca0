"""5.17 What a process has, and what it may still have

Made from book/05_streaming/17_memory.py: edit that, then run `make export`.
"""

import re
from pathlib import Path
from k3lib.fileio import UsageError


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text):
    "Bytes of '8GB' (8e9), '8GiB' (2^33), '900MB' or a whole number. Raises UsageError."
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].upper() not in UNITS:
        raise UsageError(f"{text!r} is not a size: write it like 8GB (8e9 bytes) or 8GiB (2^33)")
    return int(float(match[1]) * UNITS[match[2].upper()])


def shown_size(n):
    "A number of bytes with a unit: 17.5 MB."
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n) >= size:
            return f"{n / size:.{2 if unit in ('GB', 'TB') else 1}f} {unit}"
    return f"{n} B"


def whole_number(name: str, value: object, low: int, high: int) -> int:
    "`value` as an int between `low` and `high`. Raises UsageError naming the argument."
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, float) and value != number or not low <= number <= high:
        raise UsageError(f"{name} is {value!r}: a whole number from {low} to {high} is needed")
    return number


def status_bytes(field):
    "A field of /proc/self/status in bytes, or None where there is no /proc."
    try:
        with open("/proc/self/status") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)
    except OSError:
        return None


def resident_bytes():
    "Bytes of this process in memory now, or None where the system does not tell."
    return status_bytes("VmRSS")


def peak_bytes():
    "The most bytes this process has had in memory, or None. VmHWM: ru_maxrss would count what a forking parent had."
    return status_bytes("VmHWM")


def read_call_bytes():
    "Bytes this process has been given by read calls, as the kernel counts them (rchar), or None where it does not."
    try:
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))
    except OSError:
        return None


def available_bytes():
    """Bytes this process can still have: what the machine has free, or its cgroup if that is less.

    None where the system does not tell.
    """
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except OSError:
        return None
    return min([free, *cgroup_free()])


# Per version of cgroups: where the memory controller's folders begin, the files for limit and usage, and the line of
# memory.stat that counts page cache which nobody has used lately.
CGROUPS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def cgroup_free(membership="/proc/self/cgroup", root="/sys/fs/cgroup"):
    """Free bytes of each memory cgroup the process is in, the enclosing ones included, as far as they have a limit.

    Page cache that nobody has used lately counts as free: the kernel drops it before it refuses memory.
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit_file, usage_file, cold = CGROUPS[1 if controllers else 2]
        folder = Path(root, top, path.lstrip("/"))
        for group in (folder, *folder.parents):
            try:
                limit, usage = ((group / name).read_text().strip() for name in (limit_file, usage_file))
                stat = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
            except OSError:
                limit = "max"
            if limit != "max":
                yield int(limit) - int(usage) + int(stat.get(cold, 0))
            if group == Path(root, top):
                break


__all__ = [
    "UNITS", "parse_size", "shown_size", "whole_number", "status_bytes", "resident_bytes", "peak_bytes",
    "read_call_bytes", "available_bytes", "CGROUPS", "cgroup_free",
]
