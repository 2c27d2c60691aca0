"Saved states: the same bytes after a resumption as without one, or one clear refusal that changes nothing."
import builtins
import errno
import json
import os

import numpy as np
import pytest
from common import MODEL, least
from safetensors import safe_open
from small import write

import k3lib
from k3lib import cli
from k3lib.fileio import UsageError
from k3lib.state import ABOUT_BYTES, StateError

IDS, MORE = [304, 206, 32, 407, 493], [375, 224, 286]


def after(model):
    return b"".join(model.step(i).tobytes() for i in MORE)


@pytest.fixture(scope="module")
def model():
    model = k3lib.load(MODEL, "1GB", context=32)
    yield model
    model.close()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    "A state after IDS, and the bytes of the logits that follow."
    model.reset()
    model.prefill(IDS)
    file = tmp_path_factory.mktemp("state") / "s.state"
    model.save_state(file)
    assert [p.name for p in file.parent.iterdir()] == ["s.state"]
    return file, after(model)


def test_a_resumed_run_at_another_budget_context_and_number_of_threads(model, saved, tmp_path, steady):
    cli.pack_trunk(MODEL, tmp_path / "trunk")
    for how in (dict(ram=least(context=8) + 1_000_000, context=8, threads=1),
                dict(ram="1GB", context=64, trunk=tmp_path / "trunk")):
        other = k3lib.load(MODEL, **how)
        other.prefill([1, 2, 3])
        other.load_state(saved[0])
        assert other.position == len(IDS) and after(other) == saved[1], how
        other.close()
    model.reset()
    model.load_state(saved[0])
    assert after(model) == saved[1]
    model.load_state(saved[0])  # back to the same place
    assert after(model) == saved[1]


def test_the_same_state_is_the_same_file_and_any_reader_of_safetensors_reads_it(model, saved, tmp_path):
    model.load_state(saved[0])
    model.save_state(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == saved[0].read_bytes()
    with safe_open(saved[0], "numpy") as file:
        about = json.loads(file.get_tensor("about").tobytes())
        assert about["position"] == 5 and about["version"] == 1
        layers = model.sequence.layers
        assert np.array_equal(file.get_tensor("layers.3.latent"), layers[3][:5])
        assert np.array_equal(file.get_tensor("layers.0.S"), layers[0].S)


def test_the_state_before_the_first_token(model, tmp_path):
    model.reset()
    model.save_state(tmp_path / "empty")
    first = model.prefill(IDS).tobytes()
    model.load_state(tmp_path / "empty")
    assert model.position == 0 and model.prefill(IDS).tobytes() == first


def unchanged(model, saved, file, kind, match):
    "Loading `file` is refused with one line of this kind, and the model goes on as it would have without."
    model.load_state(saved[0])
    with pytest.raises(kind, match=match) as refused:
        model.load_state(file)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)
    assert model.position == len(IDS) and after(model) == saved[1]


def test_what_is_no_state_of_this_model_is_refused(model, saved, tmp_path):
    good, bad = saved[0].read_bytes(), tmp_path / "bad"
    unchanged(model, saved, tmp_path / "nowhere", FileNotFoundError, "no such file")
    unchanged(model, saved, tmp_path, FileNotFoundError, "is a folder")
    rng = np.random.default_rng(0)
    header = int.from_bytes(good[:8], "little")
    for at in (0, 9, 8 + header, len(good) - ABOUT_BYTES - 1, len(good) - 1, *rng.integers(0, len(good), 12).tolist()):
        bad.write_bytes(good[:at] + bytes([good[at] ^ 1 << rng.integers(8)]) + good[at + 1:])
        unchanged(model, saved, bad, StateError, "state|sha256|bytes")
    for n in (0, 1, ABOUT_BYTES, 8 + header, len(good) // 2, len(good) - 1):
        bad.write_bytes(good[:n])
        unchanged(model, saved, bad, StateError, "truncated")
    for text in (b"[" * ABOUT_BYTES, b"[]", b'{"format": "k3lib state", "position": -1, "sha256": ""}'):
        bad.write_bytes(good[:-ABOUT_BYTES] + text.ljust(ABOUT_BYTES))
        unchanged(model, saved, bad, StateError, "not the description")
    bad.write_bytes(good.replace(b'"version": 1', b'"version": 2'))
    unchanged(model, saved, bad, StateError, "version 2, expected 1")
    bad.write_bytes(good.replace(b'"position": 5', b'"position": 4'))
    unchanged(model, saved, bad, StateError, "expected [0-9,]+ for 4 positions")
    about = good[-ABOUT_BYTES:].replace(b'"position": 5', b'"position": 109951162777')
    bad.write_bytes(good[:-ABOUT_BYTES] + about.rstrip().ljust(ABOUT_BYTES))
    unchanged(model, saved, bad, UsageError, "context of 32")
    bad.write_bytes(good + b"\0")
    unchanged(model, saved, bad, StateError, "not the description")


def test_the_state_of_another_model_of_the_same_shape(model, saved, tmp_path):
    other = k3lib.load(write(tmp_path / "other"), "1GB", context=32)
    other.save_state(tmp_path / "theirs")
    other.close()
    assert (tmp_path / "theirs").stat().st_size < saved[0].stat().st_size
    unchanged(model, saved, tmp_path / "theirs", StateError, "another model")


def test_a_small_context_refuses_a_long_state(saved):
    other = k3lib.load(MODEL, "1GB", context=4)
    before = other.prefill([7]).tobytes()
    with pytest.raises(UsageError, match="5 positions .* context of 4"):
        other.load_state(saved[0])
    other.reset()
    assert other.prefill([7]).tobytes() == before
    other.close()


@pytest.mark.parametrize("when", ["write", "fsync"])
def test_a_full_disk_leaves_the_old_file(model, saved, tmp_path, monkeypatch, when):
    file = tmp_path / "s"
    model.load_state(saved[0])
    model.save_state(file)
    old = file.read_bytes()
    model.step(1)
    model.load_state(saved[0])

    class Full:
        def __init__(self, file):
            self.file, self.flush, self.fileno, self.close = file, file.flush, file.fileno, file.close
            self.writes = 0

        def write(self, data):
            self.writes += 1
            if self.writes > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.file.write(data)

    def no_space(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path, mode="r", *more, real=open, **options):
        found = real(path, mode, *more, **options)
        return Full(found) if "w" in mode else found

    if when == "write":
        monkeypatch.setattr(builtins, "open", opened)
    else:
        monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        model.save_state(file)
    assert file.read_bytes() == old and [p.name for p in tmp_path.iterdir()] == ["s"]
    assert after(model) == saved[1]


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="the change is made between two calls of preadv")
def test_a_file_that_changes_while_it_is_read_leaves_no_half_state(model, saved, tmp_path, monkeypatch):
    "The change comes between the first reading, which compares the checksum, and the second, which fills the state."
    changing = tmp_path / "s"
    changing.write_bytes(saved[0].read_bytes())
    model.load_state(saved[0])
    status, changes = changing.stat(), []

    def preadv(fd, views, offset, real=os.preadv):
        nbytes = real(fd, views, offset)
        if not changes and os.fstat(fd).st_ino == status.st_ino and offset + nbytes == status.st_size - ABOUT_BYTES:
            changes.append(offset)
            with open(changing, "r+b") as file:
                file.seek(status.st_size // 2)
                file.write(b"\xff\xff")
        return nbytes

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StateError, match="sha256"):
        model.load_state(changing)
    assert changes
    with pytest.raises(RuntimeError, match="reset"):
        model.step(1)
    with pytest.raises(RuntimeError, match="reset"):
        model.save_state(tmp_path / "half")
    monkeypatch.undo()
    model.load_state(saved[0])
    assert after(model) == saved[1]


@pytest.mark.parametrize("file", [5, None, b"s", "", True])
def test_a_file_that_is_no_path_is_refused_by_name(model, file):
    for call in model.save_state, model.load_state:
        with pytest.raises(UsageError, match="^file is .*, expected a path"):
            call(file)
