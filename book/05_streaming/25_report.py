# %% [markdown]
# # 5.25 What a run has cost
#
# A plan is a promise: so many bytes of memory, so many of them pinned. Whether the promise was kept must be measured,
# and shown beside it. This chapter makes the report that every run ends with.
#
# Needs chapter [5.18] (the plan). Runs in seconds.
#
# [5.24 A draw that can be repeated](24_sampling.ipynb) ·
# [contents](../README.md) ·
# [5.26 From a folder to a running model](26_engine.ipynb)
#
# [5.18]: 18_plan.ipynb

# %% tags=["export"]
import dataclasses
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple
import numpy as np
from k3lib.memory import shown_size
from k3lib.plan import Plan


# %% [markdown]
# ## 5.25.1 A step in 36 bytes
#
# What is kept of each token must be small, because a run may have a million of them. As Python objects a token's id,
# its seconds and its bytes by part take 500 bytes. In one growing string of bytes they take 36, and an eighth more for
# its growth. A step is added in one operation, so Ctrl-C leaves whole steps.

# %% tags=["export"]
class Step(NamedTuple):
    "One generated token: its id, the seconds it took, and the bytes read for it by part."
    token: int
    seconds: float
    bytes_read: dict[str, int]


# %% tags=["export"]
class Steps:
    """A Step for each generated token, in order: `len(steps)`, `steps[n]`, iteration.

    `parts`: the names of the parts of which bytes are counted. Steps are only added. snapshot() shares their memory.
    """

    def __init__(self, parts: Iterable[str]):
        self.parts, self._data = tuple(parts), bytearray()
        self._len: int | None = None  # of a snapshot
        self._dtype = np.dtype([("token", "<u4"), ("seconds", "<f8"), *((part, "<u8") for part in self.parts)])

    def append(self, step: Step) -> None:
        "Add the step that has just been made."
        row = (step.token, step.seconds, *(step.bytes_read[part] for part in self.parts))
        self._data += np.array(row, self._dtype).tobytes()

    def snapshot(self) -> "Steps":
        "The steps so far, which later ones are not added to."
        steps = Steps(self.parts)
        steps._data, steps._len = self._data, len(self)
        return steps

    def __len__(self) -> int:
        return len(self._data) // self._dtype.itemsize if self._len is None else self._len

    def __getitem__(self, n: int) -> Step:
        n = range(len(self))[n]
        return next(self._between(n, n + 1))

    def __iter__(self) -> Iterator[Step]:
        return chain.from_iterable(self._between(n, n + 1024) for n in range(0, len(self), 1024))

    def _between(self, begin, end):
        size = self._dtype.itemsize
        rows = np.frombuffer(bytes(self._data[begin * size:min(end, len(self)) * size]), self._dtype)
        for token, seconds, *nbytes in rows.tolist():
            yield Step(token, seconds, dict(zip(self.parts, nbytes)))


# %%
few = Steps(["trunk", "experts"])
for token in range(3):
    few.append(Step(token, 0.5, {"trunk": 7, "experts": token}))
before = few.snapshot()
few.append(Step(9, 0.25, {"trunk": 1 << 40, "experts": 0}))
print(len(before), len(few), few[-1])
assert [step.token for step in before] == [0, 1, 2] and few[3].bytes_read["trunk"] == 1 << 40


# %% [markdown]
# ## 5.25.2 The report
#
# A report compares what the plan promised with what happened: bytes read by part, cache hits among the experts, seconds
# of arithmetic and seconds of waiting, the measured peak beside the planned one. It holds the numbers of one moment,
# and asking for it changes nothing.

# %% tags=["export"]
@dataclasses.dataclass(frozen=True)
class Report:
    "What a model has decoded so far, and the time, memory and reading that it took. All times are in seconds."
    model: str
    synthetic: bool
    threads: int
    plan: Plan
    trunk: str | None  # the folder of a packed trunk, or None
    steps: Steps
    wall_seconds: float
    io_wait_seconds: float
    peak_rss_bytes: int | None
    bytes_read: dict[str, int]
    expert_requests: int
    expert_hits: int
    files: dict[str, str]  # file name -> how it is read
    asked_bytes: int  # of the whole pages that the engine's reads transferred
    kernel_bytes: int | None  # of this process's read calls, as the system counted them; None if it does not
    read_bytes_per_second: float  # of one reader, while it reads

    @property
    def compute_seconds(self) -> float:
        "Seconds of all forward passes, less those in which the arithmetic waited for bytes."
        return self.wall_seconds - self.io_wait_seconds


# %% tags=["export"]
class Report(Report):
    @property
    def ids(self) -> list[int]:
        "The id of each token, in a new list."
        return [step.token for step in self.steps]

    @property
    def step_seconds(self) -> list[float]:
        "The seconds of each step, in a new list."
        return [step.seconds for step in self.steps]

    @property
    def step_bytes(self) -> list[dict[str, int]]:
        "The bytes read in each step, by part, in a new list."
        return [step.bytes_read for step in self.steps]

    def tree(self) -> dict[str, Any]:
        "as_dict() with an iterator in the place of each list that has an entry for each token."
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "steps"}
        return {**fields, "plan": self.plan.as_dict(), "compute_seconds": self.compute_seconds,
                "ids": (step.token for step in self.steps), "step_seconds": (step.seconds for step in self.steps),
                "step_bytes": (step.bytes_read for step in self.steps)}

    def as_dict(self) -> dict[str, Any]:
        "Plain data, ready for JSON."
        return {name: [*value] if isinstance(value, Iterator) else value for name, value in self.tree().items()}


# %% [markdown]
# As text a report is a table with one line for each quantity.

# %% tags=["export"]
def _by_part(bytes_read):
    return ", ".join(f"{part} {shown_size(n)}" for part, n in bytes_read.items())


class Report(Report):
    def text(self) -> str:
        "The report as a table."
        rows = [
            ("model", self.model + " (synthetic weights)" * self.synthetic),
            ("trunk", "read from the model's own files" if self.trunk is None else f"packed in {self.trunk}"),
            ("tokens", f"{len(self.steps)} new, {self.threads} threads"),
            ("seconds a step", self._seconds()),
            ("wall", f"{self.wall_seconds:.2f} s: {self.compute_seconds:.2f} s computing, "
                     f"{self.io_wait_seconds:.2f} s waiting for bytes"),
            ("read", _by_part(self.bytes_read)),
            ("in the last step", _by_part(self.steps[-1].bytes_read) if len(self.steps) else "no step yet"),
            ("read calls", self._read_calls()),
            ("experts", f"{self.expert_requests} requested, {self.expert_hits} cache hits"),
            ("files", self._read_modes()),
            ("peak memory", self._peak()),
        ]
        return "\n".join(["report", *(f"  {name:<18}{value}" for name, value in rows)])


# %% [markdown]
# Bytes are counted twice. The engine counts the whole pages that its reads transferred. The system counts what its read
# calls delivered to this process, which includes other files that were read meanwhile, such as compiled kernels.

# %% tags=["export"]
class Report(Report):
    def _seconds(self):
        first = ", ".join(f"{step.seconds:.3g}" for step in islice(self.steps, 6))
        return first + ", ..." * (len(self.steps) > 6)

    def _read_calls(self):
        counted = ("the system keeps no count" if self.kernel_bytes is None
                   else f"the system counted {shown_size(self.kernel_bytes)}, compiled kernels included")
        return (f"{shown_size(self.asked_bytes)} in whole pages, {counted}; "
                f"{shown_size(self.read_bytes_per_second)}/s a reader")

    def _read_modes(self):
        modes = list(dict.fromkeys(self.files.values()))
        return "; ".join(f"{list(self.files.values()).count(mode)} {mode}" for mode in modes)

    def _peak(self):
        if self.peak_rss_bytes is None:
            return "not told by this system"
        share = 100 * self.peak_rss_bytes / self.plan.total
        return f"{shown_size(self.peak_rss_bytes)} ({share:.0f}% of the plan's {shown_size(self.plan.total)})"

# %% [markdown]
# ## Summary
#
# - A step takes 36 bytes, so a million of them fit in the plan's records.
# - A report holds one moment. The steps that come later are not in it.
# - Bytes are counted by the engine and by the system, so that one count checks the other.
#
# ## Exercises
#
# 1. Why can a snapshot share the memory of the steps, although steps are added after it?
# 2. Which of the two counts of bytes is larger, and for which reasons?
#
# Next: [5.26 From a folder to a running model](26_engine.ipynb).
