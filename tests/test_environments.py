"The judge of `make environments` and `make faults` can tell right from wrong, and the same number draws the same run."
import random
from types import SimpleNamespace

import environments
import pytest
import situations

MACHINE = SimpleNamespace(user=7, full=["unshare"], locales=["zh_TW.BIG5"])
IDS = "1,2,3"


@pytest.fixture
def judge():
    made = environments.Judge.__new__(environments.Judge)
    made.ids, made.logits = {"ids": [1, 2, 3]}, {"ids": b"logits"}
    return made


class Ended:
    "A run that left the files `left`, of which `saved` had been asked for."

    def __init__(self, tmp_path, drawn, saved=(), left=()):
        self.drawn, self.before = drawn, set()
        self.outputs = [tmp_path / name for name in ("r.json", "l.npy")] if drawn.get("outputs") else []
        for path, data in zip(self.outputs, saved):
            path.write_bytes(data)
        self.left, self.folder = left, tmp_path

    def kept(self):
        return [self.folder / "cache"]

    def everything(self):
        return {*self.left}


GOOD, LINE = f"plan\ngenerated ids: {IDS}\n".encode(), b"k3 decode: standard output cannot be written\n"


@pytest.mark.parametrize("drawn, code, out, err, wrong", [
    ({}, 0, GOOD, b"", ""),
    ({}, 0, b"generated ids: 1,2,4\n", b"", "other ids"),
    ({}, 0, b"", b"", "other ids"),
    ({}, 0, GOOD, b"a warning\n", "1 lines on stderr, expected none"),
    ({}, 1, b"", LINE, "exit code 1, expected 0"),
    ({}, None, b"", b"", "hangs"),
    ({}, -11, b"", b"", "ended by a signal, -11"),
    ({}, 134, b"", b"", "ended by a signal, 134"),
    ({"stdout": "/dev/full"}, 1, b"", LINE, ""),
    ({"stdout": "/dev/full"}, 0, GOOD, b"", "exit code 0, expected 1"),
    ({"stdout": "/dev/full"}, 1, b"", b"", "0 lines on stderr, expected one"),
    ({"stdout": "/dev/full"}, 1, b"", LINE * 2, "2 lines on stderr, expected one"),
    ({"stdout": "/dev/full"}, 1, b"", b"Traceback (most recent call last):\n" + LINE, "a traceback"),
    ({"stdout": "/dev/full"}, 1, b"", b"Exception ignored in stdout\n", "not a clear line"),
    ({"stdout": "/dev/full", "stderr": "closed"}, 1, b"", b"", ""),
    ({"encoding": "utf-16"}, 0, GOOD.decode().encode("utf-16"), b"", ""),
    ({"encoding": "cp037:strict"}, 0, GOOD.decode().encode("cp037"), b"", ""),
    ({"encoding": "cp037:strict"}, 0, GOOD, b"", "other ids"),
    ({"NOFILE": 32, "hard": True}, 2, b"", LINE, ""),
    ({"NOFILE": 32, "hard": True}, 4, b"", LINE, "exit code 4, expected 0 or 2"),
    ({"NOFILE": 32}, 2, b"", LINE, "exit code 2, expected 0"),
    ({"NOFILE": 256, "hard": True}, 2, b"", LINE, "exit code 2, expected 0"),
    ({"cache": "a file"}, 0, GOOD, b"k3: ... Set NUMBA_CACHE_DIR to a folder\n", ""),
    ({"cache": "a file"}, 0, GOOD, b"k3: ... Set NUMBA_CACHE_DIR to a folder\n" * 2, "2 lines on stderr"),
    ({"HOME": "unset"}, 0, GOOD, b"k3: ... Set NUMBA_CACHE_DIR to a folder\n", "1 lines on stderr"),
])
def test_ends_of_runs(judge, tmp_path, drawn, code, out, err, wrong):
    said = judge.wrong(Ended(tmp_path, drawn), code, out, err)
    assert said.startswith(wrong) and bool(said) == bool(wrong)


REPORT = b'{"ids": [1, 2, 3]}'


@pytest.mark.parametrize("drawn, code, saved, left, wrong", [
    ({}, 0, [REPORT, b"logits"], [], ""),
    ({}, 0, [REPORT], [], "1 of 2 files are saved"),
    ({}, 0, [REPORT, b"other"], [], "other logits"),
    ({}, 0, [b'{"ids": [1]}', b"logits"], [], "the report holds other ids"),
    ({}, 0, [REPORT, b"logits"], [b"/x/.r.json.part"], "leaves b'/x/.r.json.part' behind"),
    ({}, 0, [REPORT, b"logits"], [b"/x/cache/a.kernel"], "leaves b'/x/cache/a.kernel' behind"),
    ({"stdout": "closed early"}, 1, [], [], "0 of 2 files are saved"),
    ({"stdout": "closed early"}, 1, [REPORT, b"logits"], [], ""),
    ({"NOFILE": 8, "hard": True}, 2, [], [], ""),
])
def test_files_of_runs(judge, tmp_path, drawn, code, saved, left, wrong):
    run = Ended(tmp_path, drawn | {"outputs": True}, saved, left)
    said = judge.wrong(run, code, b"" if code else GOOD, LINE if code else b"")
    assert said.startswith(wrong) and bool(said) == bool(wrong)


def test_machine_code_is_no_leftover(judge, tmp_path):
    run = Ended(tmp_path, {}, left=[bytes(tmp_path / "cache" / "a.kernel"), bytes(tmp_path / "stdout")])
    assert judge.wrong(run, 0, GOOD, b"") == ""


def test_draws_are_the_same_again_and_every_axis_is_drawn():
    def drawn(seed, compiles=False):
        return [environments.draw(random.Random(f"{seed} {n}"), MACHINE, compiles) for n in range(400)]

    assert drawn(0) == drawn(0) != drawn(1)
    axes = {name for each in drawn(0) for name in each}
    assert axes >= {"locale", "encoding", "stdout", "stderr", "stdin", "HOME", "cache", "TMPDIR", "cwd", "umask",
                    "user", "flags", "variables", "ignored", "blocked", "nice", "cpus", *environments.LIMITS}
    assert not any(map(environments.compiled, drawn(0))) and all(map(environments.compiled, drawn(0, True)))
    assert len(environments.numbers_that_compile(100, 6)) == 6 and not environments.numbers_that_compile(9, 0)


def test_situations_are_many_and_the_same_again():
    cases = [(case.group, case.what) for case in situations.situations()]
    assert len(cases) == len({*cases}) > 150
    assert cases == [(case.group, case.what) for case in situations.situations()]
    assert {group for group, _ in cases} == {"results", "displays", "kernel caches", "system files", "limits"}


@pytest.mark.large
def test_some_environments():
    "Runs as they are drawn. It takes a minute."
    assert environments.main(["--runs", "10", "--compiled", "1"]) == 0
