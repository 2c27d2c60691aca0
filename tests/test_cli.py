"The `k3` command as a user meets it: output, exit codes, one clear line for every bad input, and nothing half-written."
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from common import EXPECTED, MODEL, PROMPT, k3, k3_process, refused, token_line
from small import rewritten, write

import k3lib
from k3lib import engine, run
from k3lib.fileio import UsageError
from k3lib.results import Results
from k3lib.tokenizer import Tokenizer


@pytest.fixture
def model(tmp_path):
    "A copy of the embedded model, to damage."
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def edit_config(model, edit):
    path = model / "config.json"
    config = json.loads(path.read_text())
    edit(config["text_config"])
    path.write_text(json.dumps(config))


def test_decode_prints_the_expected_ids_and_writes_what_it_is_asked(tmp_path):
    run = k3_process("decode", MODEL, "--ids", PROMPT, "--max-new-tokens", 20, "--json", tmp_path / "r.json",
                     "--logits", tmp_path / "l.npy")
    assert run.returncode == 0, run.stderr
    assert "generated ids: " + ",".join(map(str, EXPECTED["generated_ids"])) in run.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ids"] == EXPECTED["generated_ids"] and report["prompt_ids"] == EXPECTED["prompt_ids"]
    assert run.stdout == report["text"] and report["stop_reason"] == "length"
    for key in ("ids", "step_seconds", "peak_rss_bytes", "plan", "bytes_read", "expert_requests", "expert_hits",
                "io_wait_seconds", "compute_seconds", "wall_seconds", "threads"):
        assert key in report
    assert set(report["bytes_read"]) == {"trunk", "experts", "other"}
    logits = np.load(tmp_path / "l.npy")
    assert logits.shape == (20, 512) and logits.dtype == np.float32
    assert logits.argmax(1).tolist() == EXPECTED["generated_ids"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["l.npy", "r.json"]


def test_tokens_are_shown_as_they_come(monkeypatch):
    happened, prefill = [], engine.Engine.prefill
    monkeypatch.setattr(engine.Engine, "prefill", lambda self, ids: (happened.append("a step"), prefill(self, ids))[1])
    results = Results(events="-", out=lambda line: happened.append(json.loads(line)))
    report = run.decode(MODEL, ids=PROMPT, max_new_tokens=3, ram="1GB", quiet=True, results=results,
                        write=lambda text, end: happened.append(text + end))
    assert happened[1:-2:3] == ["a step"] * 3 and happened[0] == {"event": "prompt", "tokens": 12}
    events, texts = happened[2:-2:3], happened[3:-2:3]
    assert [(event["event"], event["n"], event["id"]) for event in events] == [
        ("token", 1, 468), ("token", 2, 342), ("token", 3, 411)]
    assert [event["text"] for event in events] == texts and texts[0] == " we" and report.ids == [468, 342, 411]
    assert happened[-2] == {"event": "end", "stop_reason": "length", "tokens": 3, "text": happened[-1]}


def test_an_id_out_of_range_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(engine, "load", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(UsageError, match="token id 512 is out of range: the vocabulary has ids 0..511"):
        run.decode(MODEL, ids="1,512", quiet=True)


@pytest.mark.parametrize("how, words", [
    (dict(), "exactly one"), (dict(ids="1", prompt="a"), "exactly one"), (dict(ids=""), "'' is not a token id"),
    (dict(prompt=""), "the prompt is empty"),
])
def test_a_prompt_or_ids(how, words):
    with pytest.raises(UsageError, match=words):
        run.decode(MODEL, **how, quiet=True)


def test_a_text_prompt(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"Hello <|open|>")
    by_file = k3("decode", MODEL, "--prompt-file", tmp_path / "p.txt", "--max-new-tokens", 3)
    by_text = k3("decode", MODEL, "--prompt", "Hello <|open|>", "--max-new-tokens", 3)
    assert by_file.returncode == by_text.returncode == 0, by_file.stderr
    by_pipe = subprocess.run([sys.executable, "-m", "k3lib", "decode", MODEL, "--prompt", "-", "--max-new-tokens", "3"],
                             input=b"Hello <|open|>", capture_output=True)
    line = next(line for line in by_text.stderr.splitlines() if line.startswith("prompt ids: "))
    assert line in by_file.stderr and line.encode() in by_pipe.stderr and by_pipe.stdout.decode() == by_text.stdout
    assert all(int(i) < 496 for i in line.removeprefix("prompt ids: ").split(",")), (
        "a control token came out of the text")


def test_plan_and_census(tmp_path):
    run = k3("plan", MODEL, "--ram", "1GB")
    assert run.returncode == 0 and "pinned trunk" in run.stdout
    run = k3("census", MODEL, "--json", tmp_path / "c.json")
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "c.json").read_text())


def test_missing_folder(tmp_path):
    for command in ("decode", "plan", "census"):
        extra = ["--ids", "1"] if command == "decode" else []
        refused(k3(command, tmp_path / "nowhere", *extra), 2, tmp_path / "nowhere")


def test_empty_folder_and_no_config(tmp_path, model):
    refused(k3("decode", tmp_path, "--ids", "1"), 2, tmp_path, "config.json")
    (model / "config.json").unlink()
    refused(k3("decode", model, "--ids", "1"), 2, "config.json")


def test_config_with_missing_and_unsupported_fields(model):
    edit_config(model, lambda c: [c.pop("hidden_size"), c["linear_attn_config"].pop("head_dim")])
    refused(k3("decode", model, "--ids", "1"), 2, "hidden_size", "linear_attn_config.head_dim")
    shutil.copy(MODEL / "config.json", model)
    edit_config(model, lambda c: c.update(hidden_act="gelu"))
    refused(k3("decode", model, "--ids", "1"), 2, "hidden_act", "gelu", "situ")


def test_missing_and_truncated_shards(model):
    shard = model / "model-00007-of-000016.safetensors"
    whole = shard.read_bytes()
    shard.unlink()
    refused(k3("decode", model, "--ids", "1"), 4, shard.name)
    shard.write_bytes(whole[:-100])
    refused(k3("decode", model, "--ids", "1"), 4, shard.name)


@pytest.mark.parametrize("args, words", [
    (["--ids", "5,512"], ["512", "0..511"]),
    (["--ids", ""], ["ids"]),
    (["--ids", "1,x"], ["'x'"]),
    (["--ids", "1,-2"], ["-2"]),
    (["--prompt", ""], ["empty"]),
    (["--ids", "1 2;3"], ["'2;3'"]),
    ([], ["prompt or ids"]),
    (["--ids", "1", "--temperature", "hot"], ["temperature", "'hot'", "a number"]),
    (["--ids", "1", "--temperature", "1", "--seed", "0.5"], ["seed", "'0.5'", "an integer"]),
    (["--ids", "1", "--seed", "5"], ["seed 5 without a temperature"]),
    (["--ids", "1", "--top-p", "2", "--temperature", "1"], ["top_p", "2.0"]),
    (["--ids", "1", "--logprobs", "2"], ["--json or --jsonl"]),
    (["--ids", "1", "--logprobs", "21", "--json", "-"], ["logprobs", "21", "0 to 20"]),
    (["--ids", "1", "--stop", ""], ["stop is empty"]),
    (["--ids", "1", "--json", "-", "--jsonl", "-"], ["standard output", "two outputs"]),
    (["--load-state", "nothing"], ["nothing: no such file"]),
    (["--load-state", "s", "--state-cache", "d"], ["--load-state and --state-cache"]),
    (["--ids", "1", "--state-cache", "d", "--state-cache-size", "much"], ["'much' is not a size"]),
    (["--ids", "1", "--max-new-tokens", "0"], ["max_new_tokens", "0"]),
    (["--ids", "1", "--max-new-tokens", "two"], ["max_new_tokens", "two"]),
    (["--ids", "1", "--ram", "lots"], ["lots", "8GB"]),
    (["--ids", "1", "--ram", "1MB"], ["short", "at least"]),
    (["--ids", "1", "--threads", "1000"], ["threads", "1000"]),
    (["--ids", "9" * 5000], ["'9999", "is not a token id"]),
    (["--ids", "1", "--ram", "9" * 400], ["'9999", "is not a size"]),
    (["--prompt-file", "nothing.txt"], ["nothing.txt"]),
    (["--prompt-file", "."], [".: is no regular file"]),
])
def test_bad_arguments(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(k3("decode", MODEL, "--quiet", *args), 2, *words)


def test_an_unwritable_report_is_refused_before_the_run(tmp_path):
    refused(k3("decode", MODEL, "--ids", "1", "--json", tmp_path / "no" / "r.json"), 2, tmp_path / "no")


def test_synth_says_synthetic_and_overwrites_nothing(tmp_path):
    run = k3("synth", tmp_path / "m", "--preset", "oracle")
    assert run.returncode == 0 and "synthetic" in run.stdout, run.stderr
    refused(k3("synth", tmp_path / "m", "--preset", "oracle"), 2, tmp_path / "m")
    run = k3("decode", tmp_path / "m", "--ids", "1,2", "--max-new-tokens", 2)
    assert run.returncode == 0 and "synthetic weights" in run.stderr, run.stderr


def test_outputs_that_would_replace_something_else_are_refused_before_the_run(tmp_path, model):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in (tmp_path, tmp_path / "link", "/dev/null", model / "config.json", ""):
        refused(k3("decode", model, "--ids", "1", "--json", path), 2)
    refused(k3("decode", model, "--ids", "1", "--json", tmp_path / "x", "--logits", tmp_path / "x"), 2, "two outputs")
    (tmp_path / "mine").write_text("a prompt")
    refused(k3("decode", model, "--prompt-file", tmp_path / "mine", "--json", tmp_path / "." / "mine"), 2, "to be read")
    assert (tmp_path / "mine").read_text() == "a prompt"
    assert not (tmp_path / "x").exists() and json.loads((model / "config.json").read_text())


def test_pack_and_decode_from_it(tmp_path):
    first, again = k3("pack", MODEL, tmp_path / "t"), k3("pack", MODEL, tmp_path / "t")
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert first.stdout.startswith(f"{tmp_path / 't'}: 14 files of ") and "14 written and 0 found" in first.stdout
    assert "0 written and 14 found" in again.stdout and not first.stderr
    run = k3("decode", MODEL, "--ids", PROMPT, "--max-new-tokens", 20, "--trunk", tmp_path / "t", "--json",
             tmp_path / "r.json")
    assert run.returncode == 0, run.stderr
    assert "generated ids: " + ",".join(map(str, EXPECTED["generated_ids"])) in run.stderr
    assert f"packed in {tmp_path / 't'}" in run.stderr
    assert json.loads((tmp_path / "r.json").read_text())["trunk"] == str(tmp_path / "t")


def test_what_is_no_packed_trunk(tmp_path, model):
    refused(k3("decode", MODEL, "--ids", "1", "--trunk", tmp_path / "nowhere"), 2, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused(k3("decode", MODEL, "--ids", "1", "--trunk", tmp_path / "empty"), 4, tmp_path / "empty")
    write(tmp_path / "other")
    assert k3("pack", tmp_path / "other", tmp_path / "t").returncode == 0
    refused(k3("decode", MODEL, "--ids", "1", "--trunk", tmp_path / "t"), 4, tmp_path / "t", "not that of")
    (tmp_path / "t" / "model-00003-of-000014.safetensors").unlink()
    refused(k3("decode", tmp_path / "other", "--ids", "1", "--trunk", tmp_path / "t"), 4,
            "model-00003-of-000014.safetensors")


def test_what_cannot_be_packed_or_packed_to(tmp_path, model):
    refused(k3("pack", tmp_path / "nowhere", tmp_path / "t"), 2, tmp_path / "nowhere")
    rewritten(model, tmp_path / "shuffled")
    refused(k3("pack", tmp_path / "shuffled", tmp_path / "t"), 4, "layer 1", "not in one piece")
    assert not (tmp_path / "t").exists()
    (tmp_path / "file").write_text("mine")
    refused(k3("pack", model, tmp_path / "file"), 2, tmp_path / "file", "is a file")
    before = sorted(model.iterdir())
    for folder in (model, model / "trunk"):
        refused(k3("pack", model, folder), 2, "the model's own folder")
    assert sorted(model.iterdir()) == before and (tmp_path / "file").read_text() == "mine"


# Scripts


def test_version_help_and_a_command_that_does_not_exist():
    assert k3("--version").stdout == f"k3 {k3lib.__version__}\n"
    bare = k3()
    assert (bare.returncode, bare.stderr) == (0, "") and bare.stdout == k3("--help").stdout and "decode" in bare.stdout
    assert k3("dekode").returncode == 2


def test_standard_output_carries_the_text_alone_and_quiet_silences_the_rest():
    loud, quiet = (k3("decode", MODEL, "--ids", PROMPT, *more) for more in ([], ["--quiet"]))
    assert loud.stdout == quiet.stdout == Tokenizer(MODEL).decode(EXPECTED["generated_ids"][:8]).decode()
    assert quiet.stderr == "" and loud.stderr.startswith("plan for") and "\nreport\n" in loud.stderr


def test_a_model_without_a_vocabulary_writes_ids_that_it_reads_again(model):
    (model / "tiktoken.model").unlink()
    run = k3("decode", model, "--ids", PROMPT, "--quiet")
    assert run.stdout == ",".join(map(str, EXPECTED["generated_ids"][:8])) + "\n"
    again = k3("decode", model, "--ids", f"{PROMPT} {run.stdout}", "--quiet", "--json", "-", "--max-new-tokens", 1)
    tree = json.loads(again.stdout)
    assert tree["ids"] == EXPECTED["generated_ids"][8:9] and tree["text"] is None and len(tree["prompt_ids"]) == 20
    refused(k3("decode", model, "--ids", "1", "--quiet", "--stop", "x"), 2, "no tiktoken.model")


def test_one_object_or_a_line_for_each_token_on_standard_output(tmp_path):
    run = k3("decode", MODEL, "--ids", PROMPT, "--json", "-", "--jsonl", tmp_path / "events", "--logprobs", 2,
             "--logits", tmp_path / "l.npy")
    tree, events = json.loads(run.stdout), [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert tree["ids"] == EXPECTED["generated_ids"][:8] and tree["finished"] and tree["stop_reason"] == "length"
    assert [event["event"] for event in events] == ["prompt", *["token"] * 8, "end"]
    assert [event["id"] for event in events[1:-1]] == tree["ids"]
    assert "".join(event["text"] for event in events[1:]) == tree["text"]
    for row, event, told in zip(np.load(tmp_path / "l.npy").astype(np.float64), events[1:-1], tree["logprobs"]):
        logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert event["logprob"] == told["logprob"] == pytest.approx(logs[event["id"]], abs=1e-9)
        assert event["top"] == told["top"] and [entry["id"] for entry in told["top"]] == np.argsort(-logs)[:2].tolist()
    lines = k3("decode", MODEL, "--ids", PROMPT, "--jsonl", "-", "--quiet").stdout.splitlines()
    assert [json.loads(line).get("id") for line in lines] == [None, *tree["ids"], None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events", "l.npy"]


def test_a_stop_text_ends_the_answer_before_it(tmp_path):
    whole = k3("decode", MODEL, "--ids", PROMPT, "--quiet", "--json", "-", "--max-new-tokens", 20)
    text = json.loads(whole.stdout)["text"]
    stop = text[10:13]  # begins in one token and ends in another
    run = k3("decode", MODEL, "--ids", PROMPT, "--quiet", "--stop", "nowhere", "--stop", stop, "--json", tmp_path / "r",
             "--max-new-tokens", 20)
    tree = json.loads((tmp_path / "r").read_text())
    assert run.stdout == tree["text"] == text[:text.index(stop)] and tree["stop_reason"] == "stop_text"
    assert tree["finished"] and tree["ids"] == EXPECTED["generated_ids"][:len(tree["ids"])]


def test_a_draw_from_the_command_line_is_that_of_the_library(tmp_path):
    words = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--seed", "11"]
    tree = json.loads(k3("decode", MODEL, "--ids", PROMPT, *words, "--quiet", "--json", "-").stdout)
    settings = {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 11}
    assert tree["sampling"] == settings
    with k3lib.load(MODEL, "1GB", context=32) as model:
        sampling = k3lib.Sampling(**settings)
        assert list(model.generate(EXPECTED["prompt_ids"], sampling=sampling)) == tree["ids"]
    assert tree["ids"] != EXPECTED["generated_ids"][:8]


# States


def test_a_run_goes_on_from_the_state_of_another(tmp_path):
    state, whole = tmp_path / "s", EXPECTED["generated_ids"]
    def ids(*args):
        run = k3("decode", MODEL, "--quiet", "--json", "-", *args)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)["ids"]

    assert ids("--ids", PROMPT, "--max-new-tokens", 5, "--save-state", state) == whole[:5]
    assert ids("--load-state", state, "--max-new-tokens", 5, "--save-state", state, "--ram", "1GB") == whole[5:10]
    more = ",".join(map(str, whole[10:12]))  # as if the user had typed what the model would have said
    assert ids("--load-state", state, "--ids", more, "--max-new-tokens", 3) == whole[12:15]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_state_that_leaves_nothing_to_read_needs_a_prompt(tmp_path):
    with k3lib.load(MODEL, "1GB", context=32) as model:
        model.prefill(EXPECTED["prompt_ids"])
        model.save_state(tmp_path / "s")
    refused(k3("decode", MODEL, "--load-state", tmp_path / "s"), 2, tmp_path / "s", "give ids or a prompt")
    (tmp_path / "s").write_bytes(b"no state")
    refused(k3("decode", MODEL, "--load-state", tmp_path / "s"), 4, tmp_path / "s", "not the description")


def test_a_prompt_begins_where_the_longest_known_prefix_ends(tmp_path):
    folder, tokens = tmp_path / "states", EXPECTED["prompt_ids"]

    def decoded(n, *more):
        ids = ",".join(map(str, tokens[:n]))
        run = k3("decode", MODEL, "--ids", ids, "--state-cache", folder, "--json", tmp_path / "r", "--max-new-tokens",
                 3, *more)
        assert run.returncode == 0, run.stderr
        plain = k3("decode", MODEL, "--ids", ids, "--max-new-tokens", 3)
        assert run.stdout == plain.stdout
        tree = json.loads((tmp_path / "r").read_text())
        read = re.search(rf"(\d+) of {n} prompt tokens have been read before", run.stderr)
        return int(read[1]) if read else 0, tree["expert_requests"]

    every = [decoded(n) for n in (6, 12, 12, 4, 9)]
    assert [read for read, _ in every] == [0, 5, 11, 0, 5]
    assert every[2][1] == 3 * 12 * 4, "a token of the prompt and two of the answer are read, in 12 layers of 4 experts"
    assert sorted(int(path.name.split("-")[0]) for path in folder.iterdir()) == [3, 5, 8, 11]
    longest = next(folder.glob("11-*"))
    longest.write_bytes(longest.read_bytes()[:-1])
    run = k3("decode", MODEL, "--ids", PROMPT, "--state-cache", folder)
    assert run.returncode == 0 and f"{longest}: " in run.stderr and "removed" in run.stderr
    assert longest.exists() and "8 of 12 prompt tokens" in run.stderr


def test_a_folder_of_states_never_holds_more_than_it_may(tmp_path):
    folder, size = tmp_path / "states", 210_000  # a state is 190 kB and more
    for n in (4, 6, 8):
        run = k3("decode", MODEL, "--ids", ",".join(map(str, EXPECTED["prompt_ids"][:n])), "--state-cache", folder,
                 "--state-cache-size", f"{2 * size}B", "--max-new-tokens", 1)
        assert run.returncode == 0, run.stderr
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["5", "7"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2 * size
    run = k3("decode", MODEL, "--ids", PROMPT, "--state-cache", tmp_path / "small", "--state-cache-size", "1kB",
             "--max-new-tokens", 1)
    assert run.returncode == 0 and "is not kept in 1.0 kB" in run.stderr and not list((tmp_path / "small").iterdir())


# Ended early


def running(*args, tokens=5000):
    "A long decode, read up to its first token."
    run = subprocess.Popen([sys.executable, "-m", "k3lib", "decode", MODEL, "--ids", PROMPT, "--max-new-tokens",
                            str(tokens), "--quiet", "--jsonl", "-", *map(str, args)],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not run.stdout.readline().startswith(token_line(1)):
        assert run.poll() is None, run.stderr.read()
    return run


def test_ctrl_c(tmp_path):
    run = running("--json", tmp_path / "r.json")
    run.send_signal(signal.SIGINT)
    output, error = run.communicate()
    report = re.escape(f"{tmp_path / 'r.json'} holds the report")
    words = rf"k3 decode: interrupted after (\d+) of 5000 tokens: (468[0-9,]*); {report}\n"
    assert run.returncode == 130 and (found := re.fullmatch(words, error)), error
    ids = json.loads((tmp_path / "r.json").read_text())["ids"]
    assert '"end"' not in output and len(ids) == int(found[1]) and ids == json.loads(f"[{found[2]}]")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_folder_that_may_not_be_written_to_is_refused_before_the_run(tmp_path, monkeypatch):
    def refuses(dir):
        raise PermissionError(13, "Permission denied")

    assert k3("census", MODEL, "--json", tmp_path / "r.json").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    monkeypatch.setattr(tempfile, "TemporaryFile", refuses)  # root may write anywhere
    refused(k3("census", MODEL, "--json", tmp_path / "again"), 2,
            f"{tmp_path / 'again'}: the folder {tmp_path} cannot be written to: Permission denied")
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


DROPPED = """
import contextlib, io, signal, sys
from k3lib.cli import main

class Drops:
    "Python drops what a finalizer raises, and shows it."
    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error

class Output(io.StringIO):
    def write(self, text):
        if not shown:
            Drops(KeyboardInterrupt())  # no signal came: something else is wrong
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            Drops(KeyboardInterrupt())
            Drops(ValueError())
        return super().write(text)

shown = []
sys.unraisablehook = lambda what: shown.append(what.exc_type.__name__)
with contextlib.redirect_stdout(Output()):
    main(["census", sys.argv[1]])
Drops(MemoryError())
print(*shown)
"""


def test_a_signal_that_a_callback_drops_is_not_shown():
    "A process of its own: one that has had its signal is ended soon, come what may."
    run = subprocess.run([sys.executable, "-c", DROPPED, MODEL], capture_output=True, text=True)
    assert run.stdout.split() == ["KeyboardInterrupt", "ValueError", "MemoryError"], run.stderr


def test_what_cannot_even_be_imported_is_one_line():
    run = subprocess.run([sys.executable, "-m", "k3lib", "decode", MODEL, "--ids", "1"], capture_output=True, text=True,
                         env={**os.environ, "NUMBA_NUM_THREADS": "0"})
    refused(run, 1, "threads")


def test_a_current_folder_that_was_removed_is_named(tmp_path):
    "Python's own error names no file. Where the model's path is absolute, nothing of K3 needs the folder."
    script = "import os, sys; os.rmdir(os.getcwd()); from k3lib.cli import main; sys.exit(main(sys.argv[1:]))"
    (tmp_path / "gone").mkdir()
    run = subprocess.run([sys.executable, "-c", script, "plan", "model"], cwd=tmp_path / "gone", capture_output=True,
                         text=True)
    refused(run, 2, "current folder")
