# %% [markdown]
# # 5.17 What a process has, and what it may still have
#
# A budget says how many bytes a process may hold. Three questions come before it can be kept: what does "8GB" mean, how
# much does the process hold already, and can the system give it the rest? The last one has a trap. A process in a
# container sees the memory of the whole machine in `/proc/meminfo`, and is killed when the container takes more than
# its own limit.
#
# At the end you can read a size that a person has written, and say how much memory this process may still take.
#
# Needs chapter [5.1] (what the system tells). Runs in seconds.
#
# [5.16 Experts: fetched when the router has spoken](16_experts.ipynb) ·
# [contents](../README.md) ·
# [5.18 The dial: bytes to plan](18_plan.ipynb)
#
# [5.1]: 01_system.ipynb

# %%
import tempfile

# %% [markdown]
# ## 5.17.1 A budget is text until it is bytes
#
# Sizes carry their unit. `8GB` is $8\cdot10^9$ bytes, `8GiB` is $2^{33}$. Text that is no size is refused before a file
# is opened. Threads, positions and tokens are whole numbers, and a refusal names the argument.

# %% tags=["export"]
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from k3lib.system import machine_free, resident_bytes, system_fields, system_lines, system_number
from k3lib.fileio import UsageError, shown_value

# %% tags=["export"]
UNITS = {"": 1, "B": 1} | {f"{prefix}{end}": size for end in ("", "B") for prefix, size in
                           [(p, 10**(3 * n)) for n, p in enumerate("KMGT", 1)] +
                           [(f"{p}I", 2**(10 * n)) for n, p in enumerate("KMGT", 1)]}


def parse_size(text: str | int) -> int:
    "Bytes of '8GB' or '8G' (8e9), '8GiB' or '8Gi' (2^33), '900MB' or a whole number. Raises UsageError."
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


# %%
print(parse_size("8GB"), parse_size("8GiB"), parse_size("900 MB"), shown_size(1_446_456_066_048))
for text in ("lots", "-1GB", "8 gigs"):
    try:
        parse_size(text)
    except UsageError as error:
        print("refused:", error)
assert whole_number("threads", "2", 1, 8) == 2

# %% [markdown]
# ## 5.17.2 What the process may still take
#
# The system tells how many bytes the process holds (5.1): resident now, and the peak so far. The peak is `VmHWM`, a
# high-water mark of this process's own pages. Where there is no such field, `ru_maxrss` takes its place, which starts
# from the peak of the process that forked this one.
#
# The process may still take the machine's free memory, or less. On Linux a container is a group of processes with a
# limit of its own, a cgroup, and groups lie inside groups: the tightest limit on the way to the root is the one that
# counts. There are two versions of their files.
#
# A cgroup's usage includes page cache: copies of file contents that the kernel keeps as long as nobody needs the
# memory. Inactive pages, those that were not used lately, are dropped before memory is refused, so they count as free.
#
# Each of these files may be missing or hold something else ([5.1.6]). A limit that is no number limits nothing. Where
# the usage is missing, it is at least what this process holds. Whatever stands in for a number is said, and the plan
# shows it.
#
# [5.1.6]: 01_system.ipynb#5.1.6-Files-that-the-system-writes

# %% tags=["export"]
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


# %% [markdown]
# `/proc/self/cgroup` has one line for each hierarchy of groups: its number, its controllers, and the path of this
# process's group. A line without controllers belongs to version 2. From that group the limits are read up to the root.
#
# A container may have its own view of the hierarchy. A group outside that view has a path that begins with `/..`. Only
# the root of the view can be read then.

# %% tags=["export"]
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


# %% [markdown]
# A made-up machine shows the rule. The inner group has no limit. The outer one allows 1000 bytes and uses 400, 100 of
# them inactive page cache: 700 are free.

# %%
with tempfile.TemporaryDirectory() as scratch:
    inner = Path(scratch, "outer", "inner")
    inner.mkdir(parents=True)
    for group, limit, usage, inactive in ((inner, "max", 10, 0), (inner.parent, 1000, 400, 100)):
        stat = f"inactive_file {inactive}"
        for name, text in (("memory.max", limit), ("memory.current", usage), ("memory.stat", stat)):
            (group / name).write_text(f"{text}\n")
    Path(scratch, "self").write_text("0::/outer/inner\n")
    print("free in the groups with a limit:", list(cgroup_free(Path(scratch, "self"), scratch)))
    (inner.parent / "memory.current").unlink()
    (free, note), = cgroup_free(Path(scratch, "self"), scratch)
    print(note.replace(scratch, "..."))

# %% tags=["nbval-ignore-output"]
from k3lib.system import peak_bytes

for what, n in (("resident", resident_bytes()), ("peak", peak_bytes()), ("available", available()[0])):
    print(f"{what:<10}", "not told" if n is None else shown_size(n))

# %% [markdown]
# ## Summary
#
# - Sizes carry their unit, and text that is no size is refused.
# - A process may take the machine's free memory or what its cgroups still allow, whichever is least.
# - A number that the system does not tell has a stand-in, and the stand-in is named.
#
# ## Exercises
#
# 1. Start a container with a memory limit and compare `/proc/meminfo` inside it with `available()`.
# 2. Read a large file through the page cache and watch `memory.current` and `inactive_file` of your cgroup. What would
#    be refused if inactive page cache did not count as free?
#
# Next: [5.18 The dial: bytes to plan](18_plan.ipynb) spends a budget.
