"Sizes as people write them, and the memory that a process may still take."
from pathlib import Path

import pytest

from k3lib import memory
from k3lib.fileio import UsageError


@pytest.mark.parametrize("text, value", [
    ("8GB", 8 * 10**9), ("8GiB", 8 * 2**30), ("900MB", 9 * 10**8), ("1.5 GB", 15 * 10**8), (12345, 12345),
    ("2kb", 2000),
])
def test_sizes(text, value):
    assert memory.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "8 gigs", "1e9", "nan", "8GBs", None, "9" * 400])
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(UsageError, match="is not a size"):
        memory.parse_size(text)


@pytest.mark.parametrize("n, text", [
    (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (17_547_264, "17.5 MB"), (10**9, "1.00 GB"),
    (1_446_456_066_048, "1.45 TB"),
])
def test_shown_sizes(n, text):
    assert memory.shown_size(n) == text


@pytest.mark.parametrize("value", ["3", 3, 3.0])
def test_whole_numbers(value):
    found = memory.whole_number("threads", value, 1, 8)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [0, 9, "two", "2.5", 2.5, None, float("inf"), float("nan"), "9" * 5000])
def test_what_is_no_whole_number_is_refused_by_name(value):
    with pytest.raises(UsageError, match="threads is .*: a whole number from 1 to 8 is needed"):
        memory.whole_number("threads", value, 1, 8)


# Limits of containers

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
V2 = ("memory.max", "memory.current", "memory.stat")


def group(folder, names, limit, usage, stat):
    "The files of one cgroup."
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, usage, stat)):
        (folder / name).write_text(f"{text}\n")


def test_cgroup_v2_nested_takes_every_limit(tmp_path):
    group(tmp_path / "a" / "b", V2, "max", 10, "inactive_file 0")
    group(tmp_path / "a", V2, 1000, 400, "anon 5\ninactive_file 100")
    (tmp_path / "self").write_text("0::/a/b\n")
    assert list(memory.cgroup_free(tmp_path / "self", tmp_path)) == [700]


def test_cgroup_v1_nested_in_a_hybrid_system(tmp_path):
    group(tmp_path / "memory" / "x" / "y", V1, 900, 100, "inactive_file 1\ntotal_inactive_file 30")
    group(tmp_path / "memory" / "x", V1, 500, 450, "total_inactive_file 0")
    (tmp_path / "self").write_text("5:cpu:/x/y\n4:memory:/x/y\n0::/\n")
    assert list(memory.cgroup_free(tmp_path / "self", tmp_path)) == [830, 50]


def test_no_cgroups(tmp_path):
    assert list(memory.cgroup_free(tmp_path / "self", tmp_path)) == []


@pytest.mark.parametrize("machine, groups, least", [
    (1000, [], 1000), (1000, [700, 800], 700), (500, [700], 500), (None, [700], None),
])
def test_the_least_counts(monkeypatch, machine, groups, least):
    monkeypatch.setattr(memory, "machine_free_bytes", lambda: machine)
    monkeypatch.setattr(memory, "cgroup_free", lambda: groups)
    assert memory.available_bytes() == least


def test_this_machine_has_memory():
    free = memory.available_bytes()
    assert free is None or 10**7 < free < 2**60


def test_every_limit_is_below_its_group(tmp_path):
    "A group that this process is not in does not count, whatever its limit."
    group(tmp_path / "a", V2, 1000, 400, "inactive_file 0")
    group(tmp_path / "other", V2, 10, 0, "inactive_file 0")
    Path(tmp_path, "self").write_text("0::/a\n")
    assert list(memory.cgroup_free(tmp_path / "self", tmp_path)) == [600]
