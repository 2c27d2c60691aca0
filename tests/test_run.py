"k3lib.run: the order of a run, what is left of it when a part of it fails, and answers of any length."
import ast
import contextlib
import io
import json

import numpy as np
import pytest
from common import EXPECTED, MODEL, PROMPT

from k3lib import engine, run
from k3lib.fileio import CheckpointError, MissingFile, UsageError
from k3lib.results import Results
from k3lib.tokenizer import Tokenizer

KNOWN = EXPECTED["generated_ids"]


class Shown:
    "A function like print that keeps what it is called with, and can fail."
    def __init__(self, fails_at=None, error=None):
        self.text, self.fails_at, self.error, self.calls = "", fails_at, error, 0

    def __call__(self, text, end="\n"):
        self.calls += 1
        self.text += text + end
        if self.fails_at is not None and self.fails_at in text:
            raise self.error


def decoded(folder, show, new=6):
    "The results of a run of six tokens, and the error that ended it."
    files, error = Results(folder / "l.npy", folder / "t", folder / "r.json"), None
    try:
        run.decode(MODEL, PROMPT, max_new_tokens=new, ram="1GB", show=show, results=files)
    except BaseException as found:
        error = found
    return files, error


@pytest.mark.parametrize("word", ["generated ids", "generated text", "report"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_results_are_complete_before_the_answer_is_shown(word, kind, tmp_path):
    _, error = decoded(tmp_path, Shown(word, kind("in show")))
    assert isinstance(error, kind)
    tree = json.loads((tmp_path / "r.json").read_text())
    assert tree["finished"] is True and tree["ids"] == KNOWN[:6]
    assert np.load(tmp_path / "l.npy").argmax(1).tolist() == KNOWN[:6]
    said = str(error) if kind is KeyboardInterrupt else "; ".join(error.__notes__)
    for name in "l.npy holds 6 rows", "t holds 6 forward passes", "r.json holds the report":
        assert f"{tmp_path}/{name}" in said
    if kind is KeyboardInterrupt:
        made = ",".join(map(str, KNOWN[:6]))
        assert type(error) is run.Interrupted and said.startswith(f"after 6 of 6 tokens: {made}; ")


@pytest.mark.parametrize("word, made", [("plan for", 0), ("prompt ids", 0), ("   1: id", 1), ("   4: id", 4)])
def test_what_was_made_before_an_error_is_kept(word, made, tmp_path):
    _, error = decoded(tmp_path, Shown(word, RuntimeError("in show")))
    left = sorted(path.name for path in tmp_path.iterdir())
    assert str(error) == "in show" and left == (["l.npy", "r.json", "t"] if made else [])
    if made:
        tree = json.loads((tmp_path / "r.json").read_text())
        assert tree["finished"] is False and tree["ids"] == KNOWN[:made] and len(error.__notes__) == 3


def test_a_pass_that_fails_is_not_in_the_trace(tmp_path, monkeypatch):
    "Its layers have requested experts; the third pass ends in its sixth layer."
    calls, original = [], engine.Engine._pass

    def fails(self, chunk, wanted, watch):
        calls.append(self.experts.requests)
        if len(calls) == 3:
            layer_done = self.on_layer

            def stop(L):
                layer_done(L)
                if L == 5:
                    raise CheckpointError("layer 5")
            self.on_layer = stop
        return original(self, chunk, wanted, watch)

    monkeypatch.setattr(engine.Engine, "_pass", fails)
    _, error = decoded(tmp_path, Shown())
    assert type(error) is CheckpointError and f"{tmp_path}/t holds 2 forward passes" in error.__notes__
    assert (tmp_path / "t").stat().st_size == 8 * calls[2]


def test_the_reported_peak_is_read_after_the_results_were_written(tmp_path, monkeypatch):
    happened = []
    monkeypatch.setattr(engine, "peak_bytes", lambda: happened.append("peak") or 7)
    monkeypatch.setattr("k3lib.results.RowsFile.finish", lambda self, whole: happened.append("rows"))
    monkeypatch.setattr("k3lib.results.TraceFile.finish", lambda self, whole: happened.append("trace"))
    decoded(tmp_path, Shown())
    assert happened[:3] == ["rows", "trace", "peak"]


def test_a_program_whose_output_is_closed_gets_its_report(tmp_path):
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "ascii")) as stream:
        stream.close()
        assert run.decode(MODEL, PROMPT, max_new_tokens=2, ram="1GB").ids == KNOWN[:2]


def test_a_long_line_is_shown_in_pieces_and_reads_as_one():
    for n in 0, 1, 1024, 1025, 5000:
        show = Shown()
        run.show_ids(show, "ids", iter(range(n)))
        assert show.text == f"ids: {','.join(map(str, range(n)))}\n" and show.calls == max(1, -(-n // 1024))


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 2048, 3000])
def test_a_long_text_is_a_literal_or_several(n):
    tokenizer = Tokenizer(MODEL, 512)
    ids = (tokenizer.encode("caf\u00e9 \u4e16\u754c 'x' \"y\"\n\U0001f642 ") * 200)[:n]
    show = Shown()
    run.show_text(show, "text", tokenizer, iter(ids))
    whole = tokenizer.stream()
    assert ast.literal_eval(show.text.removeprefix("text: ")) == "".join(map(whole.feed, ids)) + whole.finish()
    assert show.text.count("\n") == 1 and show.calls == max(1, -(-n // 1024))


def test_an_error_names_the_first_thousand_tokens_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MOST_NAMED", 3)
    _, error = decoded(tmp_path, Shown("   5: id", KeyboardInterrupt()))
    assert str(error).startswith("after 5 of 6 tokens, the first 3: 468,342,411; ")


# Prompts


def test_a_prompt_is_refused_when_it_has_more_ids_than_positions_fit():
    tokenizer = Tokenizer(MODEL, 512)
    ids = tokenizer.encode("word " * 100)
    assert run.prompt_ids(tokenizer, "word " * 100, len(ids)).tolist() == ids
    for prompt in "word " * 101, b"word " * 101, iter([b"word "] * 101):
        with pytest.raises(UsageError, match=f"the prompt has more than {len(ids)} tokens"):
            run.prompt_ids(tokenizer, prompt, len(ids))
    assert tokenizer.encoder is not None
    run.prompt_ids(tokenizer, b"a", 1)
    assert tokenizer.encoder is None, "the encoder's memory is free when the plan is made"


def test_a_prompt_file_is_read_in_blocks_and_named_when_it_cannot_be(tmp_path):
    (tmp_path / "p").write_bytes(b"x" * (3 << 20))
    assert [len(block) for block in run.file_blocks(tmp_path / "p")] == [1 << 20] * 3
    with pytest.raises(MissingFile, match="nothing: no such file"):
        next(run.file_blocks(tmp_path / "nothing"))
    with pytest.raises(MissingFile, match="is no regular file"):
        next(run.file_blocks(tmp_path))


@pytest.mark.parametrize("prompt", [5, 1.5, [1, 2], ["text"]])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(UsageError):
        run.decode(MODEL, prompt=prompt, show=Shown())
