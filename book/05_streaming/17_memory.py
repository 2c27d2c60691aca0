# %% [markdown]
# # 5.17 What a process has, and what it may still have
#
# A budget says how many bytes a process may hold. To keep it, the engine must first answer three questions. How many
# bytes are "8GB"? How much does the process hold already? Can the system give it the rest? The third question is easy
# to answer wrongly. In a container, `/proc/meminfo` shows the memory of the whole machine, but the system ends the
# process when the container takes more than its own, smaller limit. At the end you can read a size that a person has
# written, and say how much memory this process may still take.
#
# > **Without it:** a process in a container takes the free memory of the machine for its own, and is ended without a
# > message.
# >
# > **With it:** all limits are asked for, and the tightest one counts: of two groups in the example, one without a
# > limit, 700 bytes<!--claim free--> are free.
#
# Needs chapter [5.1] (what the system tells). Runs in seconds. Makes `k3lib.memory`.
#
# [5.16 Experts: fetched when the router has spoken](16_experts.ipynb) ·
# [contents](../README.md) ·
# [5.18 The dial: bytes to plan](18_plan.ipynb)
#
# [5.1]: 01_system.ipynb

# %%
import sys
import tempfile
from pathlib import Path

from k3lib.config import read_config

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
sys.path.insert(0, str(ROOT / "book"))
import schematics

schematics.where(read_config(ROOT / "fixtures/k3"), "plan")

# %% [markdown]
# ## 5.17.1 A budget is text until it is bytes
#
# A person writes a size with a unit. `8GB` is $8\cdot10^9$ bytes, and `8GiB` is $2^{33}$ bytes, 7% more. Text that is
# no size is refused before any file is opened. Numbers of threads, positions and tokens must be whole numbers, and a
# refusal names the argument.

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
# The system says how many bytes the process holds (5.1): the resident memory now, and the peak so far. The peak is the
# field `VmHWM`, which counts this process's own pages. Where this field does not exist, the engine uses `ru_maxrss`.
# That number begins at the peak of the process that forked this one.
#
# The process may take more memory as long as the machine has free memory and no limit is reached. On Linux a container
# is a *cgroup*: a group of processes with a memory limit of its own. A group can lie inside another group, and the
# limits of all enclosing groups hold. So the tightest of them decides. There are two versions of cgroups, with
# different files.
#
# The usage of a cgroup includes page cache: copies of parts of files that the system keeps while the memory is not
# needed otherwise. Before the system refuses memory, it drops the *inactive* pages, which were not used lately. So
# inactive pages count as free.
#
# Each of these files may be missing or contain something else ([5.1.6]). A limit that is not a number is no limit. If
# the usage is missing, the engine assumes what this process holds, which is less than or equal to the usage of its
# group. A plan shows every number that was assumed.
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
# Which groups is this process in? The file `/proc/self/cgroup` has one line for each hierarchy of groups: its number,
# its controllers, and the path of this process's group. A line without controllers belongs to version 2. The engine
# reads the limits of this group and of all groups up to the root.
#
# A container may see only a part of the hierarchy. The path of a group outside this part begins with `/..`. Then only
# the root of the visible part can be read.

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
# A made-up machine shows the rule. The inner group has no limit. The outer group allows 1000 bytes and uses 400, of
# which 100 are inactive page cache. So 1000 − (400 − 100) = 700 bytes are free.

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
    assert [free for free, _ in cgroup_free(Path(scratch, "self"), scratch)] == [700]  # claim free
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
# - A size has a unit, and text that is no size is refused.
# - A process may still take the free memory of the machine, or less if one of its cgroups allows less.
# - If the system does not tell a number, the engine assumes one, and the plan names it.
#
# ## Exercises
#
# Answer to 2: [exercises of part 5](../answers/05_streaming.ipynb).
#
# 1. Start a container with a memory limit, and compare `/proc/meminfo` inside it with `available()`.
# 2. The files of a group show a limit of 8 GB, a usage of 7.5 GB, and 6 GB of inactive page cache, as after a copy of a
#    large file. How much is free? What would the plan refuse if inactive page cache did not count as free?
#
# Next: [5.18 The dial: bytes to plan](18_plan.ipynb) spends a budget.
