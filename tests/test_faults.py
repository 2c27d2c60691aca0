"A sample of `make faults`, with `--all` every case; and that its judge can tell right from wrong."
import dataclasses
import tempfile
from collections import Counter

import faults
import pytest
import situations

from k3lib import checkpoint, config, engine, fileio, header, matmul, verify

CASES = list(faults.cases())


@pytest.fixture(scope="module")
def judge():
    "In a folder that others may enter: pytest's own are closed to the user that cannot read an unreadable file."
    with tempfile.TemporaryDirectory() as folder:
        yield faults.Judge(folder)


def test_every_case_ends_in_the_right_answer_or_the_right_error(judge, everything):
    chosen = CASES if everything else faults.sample(CASES)
    counts, wrong = faults.run(chosen, judge)
    if everything:
        around = list(situations.situations())
        faults.run_around(around, judge.folder / "around", counts, wrong)
        chosen += around
    assert not wrong, "\n".join(f"{case.group}: {case.what}: {why}" for case, _, why in wrong)
    print(faults.table(counts))
    assert len(counts) == len(faults.GROUPS) + everything * len(situations.GROUPS)
    assert sum(counts.values(), Counter())[faults.REFUSED] > 0.5 * len(chosen)


def test_the_cases_are_many_and_the_same_again():
    names = [(case.group, case.what) for case in CASES]
    assert len(names) >= 300 and names == [(case.group, case.what) for case in faults.cases()]
    other = [(case.group, case.what) for case in faults.cases(1)]
    assert len(other) == len(names) and other != names


def without_places(text, data_bytes, where):
    "parse_header that believes every place."
    entries = fileio.json_object(text, where)
    return [(name, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for name, e in entries.items()
            if name != "__metadata__"]


def verified(*args, really=verify.verify, **options):
    "verify() that says nothing is damaged."
    return dataclasses.replace(really(*args, **options), damaged={})


@pytest.mark.parametrize("group, breaks, outcome", [
    ("extents", [(header, "parse_header", without_places), (header, "quick_header", lambda *_: None)], None),
    ("index", [(checkpoint, "check_list", lambda *_: None)], faults.SAME),
    ("held tensors", [(engine, "check_tensors", lambda *_: None)], faults.SAME),
    ("config values", [(config.ConfigError, "exit_code", 1)], faults.REFUSED),
    ("shard files", [(fileio.CheckpointError, "__str__", lambda error: "a file is damaged")], faults.REFUSED),
    ("payload bytes", [(verify, "verify", verified)], faults.SAME),
    ("numbers", [(matmul, "check_product", lambda *_: None)], None),
])
def test_a_check_that_is_gone_is_noticed(judge, monkeypatch, group, breaks, outcome):
    for where, name, broken in breaks:
        monkeypatch.setattr(where, name, broken)
    some = [case for case in CASES if case.group == group][::5]
    counts, wrong = faults.run(some, judge)
    assert wrong and (outcome is None or outcome in {outcome for _, outcome, _ in wrong}), counts
