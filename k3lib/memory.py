"""5.17 What a process has, and what it may still have

Made from book/05_streaming/17_memory.py: edit that, then run `make export`.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from k3lib.system import machine_free, resident_bytes, system_fields, system_lines, system_number
from k3lib.fileio import UsageError, shown_value


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(text: str | int) -> int:
    "Bytes of '8GB' (8e9), '8GiB' (2^33), '900MB' or a whole number. Raises UsageError."
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if not match or match[2].upper() not in UNITS:
        raise UsageError(f"{shown_value(text)} is not a size: write it like 8GB (8e9 bytes) or 8GiB (2^33)")
    return int(float(match[1]) * UNITS[match[2].upper()])


def shown_size(n: int | float) -> str:
    "`n` bytes as text with a unit: 17.5 MB."
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(n) >= size:
            return f"{n / size:.{2 if unit in ('GB', 'TB') else 1}f} {unit}"
    return f"{n} B"


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    "`value` as an int from `low` to `high`. Raises UsageError, which says `name`, what was found and what is expected."
    try:
        number = int(value)
        exact = isinstance(value, str) or value == number and not isinstance(value, bool)
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact or not low <= number <= high:
        raise UsageError(f"{name} is {shown_value(value)}: a whole number from {low} to {high} is needed")
    return number


# Per version of cgroups: the folder of the memory controller, the files for limit and usage, and the line of
# memory.stat that counts inactive page cache.
CGROUPS = {
    1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("", "memory.max", "memory.current", "inactive_file"),
}


def _group_free(group, version):
    "(free bytes of the cgroup in folder `group`, or None if it has no limit; what stands in for its usage, or '')."
    _, limit_file, usage_file, inactive = CGROUPS[version]
    limit, usage = (system_number("".join(system_lines(group / name))) for name in (limit_file, usage_file))
    if limit is None:
        return None, ""
    if usage is None:
        return limit - (resident_bytes() or 0), f"{group}: no {usage_file}, so what this process holds is its usage"
    return limit - usage + system_fields(group / "memory.stat").get(inactive, 0), ""


def cgroup_free(membership: str | Path = "/proc/self/cgroup",
                root: str | Path = "/sys/fs/cgroup") -> Iterator[tuple[int, str]]:
    """(free bytes, what stands in for the usage or '') of each memory cgroup of this process that has a limit.

    The enclosing groups are included.
    """
    for line in system_lines(membership):
        _, colon, rest = line.partition(":")
        controllers, slash, path = rest.partition(":/")
        if not (colon and slash) or controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        top = Path(root, CGROUPS[version][0])
        folder = top if ".." in path.split("/") else top / path.lstrip("/")
        for group in (folder, *folder.parents):
            free, note = _group_free(group, version)
            if free is not None:
                yield max(0, free), note
            if group == top:
                break


def available() -> tuple[int | None, tuple[str, ...]]:
    """(bytes that this process can still take, notes on what stands in for numbers that the system does not tell).

    The bytes are the least of the machine's free memory and its cgroups' free bytes; None if none of them is known.
    """
    free, stand_in = machine_free()
    known = [(free, f"free memory of the machine: {stand_in}" * bool(stand_in)), *cgroup_free()]
    least = min((n for n, _ in known if n is not None), default=None)
    return least, tuple(dict.fromkeys(note for _, note in known if note))


__all__ = [
    "UNITS", "parse_size", "shown_size", "whole_number", "CGROUPS", "cgroup_free", "available",
]
