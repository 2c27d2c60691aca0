"Sizes as people write them, and the memory that a process may still take."
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


def free(folder):
    "The free bytes of each group of a process, where the files of `group` lie in the folder."
    return [n for n, _ in memory.cgroup_free(folder / "self", folder)]


def test_cgroup_v2_nested_takes_every_limit(tmp_path):
    group(tmp_path / "a" / "b", V2, "max", 10, "inactive_file 0")
    group(tmp_path / "a", V2, 1000, 400, "anon 5\ninactive_file 100")
    (tmp_path / "self").write_text("0::/a/b\n")
    assert free(tmp_path) == [700]


def test_cgroup_v1_nested_in_a_hybrid_system(tmp_path):
    group(tmp_path / "memory" / "x" / "y", V1, 900, 100, "inactive_file 1\ntotal_inactive_file 30")
    group(tmp_path / "memory" / "x", V1, 500, 450, "total_inactive_file 0")
    (tmp_path / "self").write_text("5:cpu:/x/y\n4:memory:/x/y\n0::/\n")
    assert free(tmp_path) == [830, 50]


def test_no_cgroups(tmp_path):
    assert free(tmp_path) == []


@pytest.mark.parametrize("text", ["", "garbage", ":::", "0:", "0::", "x:memory", "4:memory:", "0::relative",
                                  "0::/../outside", "0::/../../outside", "0::/..", "0::/gone/since", "0::/\xff\udc80"])
def test_a_membership_of_any_form_counts_the_groups_that_can_be_seen(tmp_path, text):
    "A group outside a container's view has the path of a sibling of its root. The root itself can be seen."
    root = tmp_path / "root"
    group(root, V2, 1000, 400, "inactive_file 0")
    group(tmp_path / "outside", V2, 10, 0, "inactive_file 0")
    (root / "self").write_bytes(text.encode("utf-8", "surrogateescape") + b"\n\n4:cpu:/x\n")
    assert free(root) == ([600] if text.startswith("0::/") else [])


@pytest.mark.parametrize("names, member", [(V1, "4:memory:/a"), (V2, "0::/a")])
@pytest.mark.parametrize("limit, usage, stat, expected, said", [
    ("max", 1, "", [], ""), ("", 1, "", [], ""), ("12 34", 1, "", [], ""), ("-1", 1, "", [], ""),
    (2**63 - 4096, 10, "", [2**63 - 4106], ""),  # version 1 without a limit
    (1000, 300, "", [700], ""), (1000, 300, "anon x\ninactive_file\n\ntotal_inactive_file many", [700], ""),
    (1000, 1500, "", [0], ""),
    (10**12, "", "", [10**12 - 5], "what this process holds"),
    (10**12, "x", "", [10**12 - 5], "what this process holds"),
])
def test_any_file_of_a_cgroup_may_be_missing_or_malformed(tmp_path, monkeypatch, names, member, limit, usage, stat,
                                                          expected, said):
    monkeypatch.setattr(memory, "resident_bytes", lambda: 5)
    folder = tmp_path / "memory" / "a" if names is V1 else tmp_path / "a"
    group(folder, names, limit, usage, stat)
    (tmp_path / "self").write_text(member + "\n")
    found = list(memory.cgroup_free(tmp_path / "self", tmp_path))
    assert [n for n, _ in found] == expected
    assert all(said in note if said else note == "" for _, note in found)
    for name in names[1:]:
        (folder / name).unlink()
    assert free(tmp_path) == ([limit - 5] if expected else [])


@pytest.mark.parametrize("machine, groups, least, notes", [
    ((1000, ""), [], 1000, ()), ((1000, ""), [(700, ""), (800, "")], 700, ()), ((500, ""), [(700, "x")], 500, ("x",)),
    ((None, "no figure"), [(700, "")], 700, ("free memory of the machine: no figure",)),
    ((None, "no figure"), [], None, ("free memory of the machine: no figure",)),
])
def test_the_least_counts_and_what_stands_in_is_said(monkeypatch, machine, groups, least, notes):
    monkeypatch.setattr(memory, "machine_free", lambda: machine)
    monkeypatch.setattr(memory, "cgroup_free", lambda: groups)
    assert memory.available() == (least, notes)


def test_this_machine_has_memory():
    nbytes, _ = memory.available()
    assert nbytes is None or 10**7 < nbytes < 2**60


def test_every_limit_is_below_its_group(tmp_path):
    "A group that this process is not in does not count, whatever its limit."
    group(tmp_path / "a", V2, 1000, 400, "inactive_file 0")
    group(tmp_path / "other", V2, 10, 0, "inactive_file 0")
    (tmp_path / "self").write_text("0::/a\n")
    assert free(tmp_path) == [600]
