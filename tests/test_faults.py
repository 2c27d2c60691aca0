"A sample of `make faults`, with `--all` every case; and that its judge can tell right from wrong."
import tempfile
from collections import Counter

import faults
import pytest

from k3lib import checkpoint, cli, engine, fileio, matmul

CASES = list(faults.cases())


@pytest.fixture(scope="module")
def bench():
    "In a folder that others may enter: pytest's own are closed to the user that cannot read an unreadable file."
    with tempfile.TemporaryDirectory() as folder:
        yield faults.Bench(folder)


def test_every_case_ends_in_the_right_answer_or_the_right_error(bench, everything):
    chosen = CASES if everything else faults.sample(CASES)
    counts, wrong = faults.run(chosen, bench)
    assert not wrong, "\n".join(f"{case.group}: {case.what}: {why}" for case, _, why in wrong)
    print(faults.table(counts))
    assert len(counts) == len(faults.GROUPS) and sum(counts.values(), Counter())[faults.REFUSED] > 0.6 * len(chosen)


def test_the_cases_are_many_and_the_same_again():
    names = [(case.group, case.what) for case in CASES]
    assert len(names) >= 300 and names == [(case.group, case.what) for case in faults.cases()]
    other = [(case.group, case.what) for case in faults.cases(1)]
    assert len(other) == len(names) and other != names


def without_places(text, data_bytes, where):
    "parse_header that believes every place."
    entries = fileio.json_object(text, where)
    return [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in entries.items() if name != "__metadata__"]


@pytest.mark.parametrize("group, breaks, outcome", [
    ("extents", [(checkpoint, "parse_header", without_places), (checkpoint, "quick_header", lambda *_: None)], None),
    ("index", [(checkpoint, "check_index", lambda checkpoint: None)], faults.SAME),
    ("held tensors", [(engine, "check_tensors", lambda config, checkpoint: None)], faults.SAME),
    ("config values", [(cli, "_exit_code", lambda error: 1)], faults.REFUSED),
    ("shard files", [(fileio.CheckpointError, "__str__", lambda error: "a file is damaged")], faults.REFUSED),
    ("payload bytes", [(cli, "_verify", lambda args: None)], faults.SAME),
    ("numbers", [(matmul, "check_product", lambda *_: None)], None),
])
def test_a_check_that_is_gone_is_noticed(bench, monkeypatch, group, breaks, outcome):
    for where, name, broken in breaks:
        monkeypatch.setattr(where, name, broken)
    some = [case for case in CASES if case.group == group][::5]
    counts, wrong = faults.run(some, bench)
    assert wrong and (outcome is None or outcome in {outcome for _, outcome, _ in wrong}), counts
