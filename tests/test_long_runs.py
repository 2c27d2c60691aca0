"""Long runs: results on the disk as they come, in the memory of the plan, and kept however the run ends.

Only the public surface is used, in processes of their own. So these tests also run on a commit from before.
"""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("resource")
ORACLE = Path(__file__).resolve().parents[1] / "fixtures" / "oracle13"
MODEL, EXPECTED = ORACLE / "model", json.loads((ORACLE / "expected.json").read_text())
PROMPT = ",".join(map(str, EXPECTED["prompt_ids"]))
TWO = {**os.environ, "NUMBA_NUM_THREADS": "2"}  # the floor of a budget grows with the threads

# A process of 12 MB between pytest and the command: the peak that the system counts for a child begins with its
# parent's.
MEASURED = """
import json, resource, subprocess, sys
run = subprocess.run(sys.argv[1:], capture_output=True, text=True)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
json.dump([run.returncode, run.stdout, run.stderr, peak], sys.stdout)
"""


def measured(*args):
    "(exit code, stdout, stderr, peak in bytes as the system counts it) of `k3` in a process of its own."
    command = [sys.executable, "-c", MEASURED, sys.executable, "-m", "k3lib", *map(str, args)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=TWO).stdout)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    "A small model with the vocabulary of K3: its logits are 655,360 bytes a token."
    folder = tmp_path_factory.mktemp("wide") / "model"
    made = subprocess.run([sys.executable, "-m", "k3lib", "synth", folder, "--preset", "oracle", "--vocab", "163840"],
                          capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    run = ["decode", folder, "--ids", "1", "--max-new-tokens", "2"]
    assert measured(*run)[0] == 0  # compiled here: the memory of the compiler is not part of a plan
    return folder


def test_logits_of_a_long_run_take_no_memory(wide, tmp_path):
    "65 MB of logits, in a plan of 233 MB under a budget of 300 MB."
    code, _, error, peak = measured("decode", wide, "--ids", "1,2,3", "--max-new-tokens", 100, "--ram", "300MB",
                                    "--logits", tmp_path / "l.npy", "--json", tmp_path / "r.json")
    assert code == 0, error
    report, logits = json.loads((tmp_path / "r.json").read_text()), np.load(tmp_path / "l.npy", mmap_mode="r")
    assert logits.shape == (100, 163840) and logits.argmax(1).tolist() == report["ids"]
    assert peak <= 1.02 * report["plan"]["total"] < 300e6, (peak, report["plan"])
    assert abs(peak - report["peak_rss_bytes"]) < 2e6, "the report's peak is that of the whole process"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l.npy", "r.json"]


def test_draws_and_log_probabilities_take_no_memory(wide, tmp_path):
    "What they need for 163,840 logits fits where the activations of a pass have been."
    draws = "--temperature", 1, "--top-p", "0.9", "--logprobs", 20
    code, _, error, peak = measured("decode", wide, "--ids", "1,2,3", "--max-new-tokens", 20, "--ram", "300MB", *draws,
                                    "--json", tmp_path / "r.json")
    assert code == 0, error
    report = json.loads((tmp_path / "r.json").read_text())
    assert peak <= 1.02 * report["plan"]["total"] < 300e6, (peak, report["plan"])
    assert len(report["logprobs"]) == 20 and all(len(told["top"]) == 20 for told in report["logprobs"])


@pytest.mark.parametrize("text", ["words", pytest.param("symbols", marks=pytest.mark.large),
                                  pytest.param("no UTF-8", marks=pytest.mark.large)])
def test_a_prompt_file_that_no_budget_holds_is_refused_in_bounded_memory(text, tmp_path):
    rng, file = random.Random(3), tmp_path / "prompt"
    block = {"words": b"the capital of France is ",
             "symbols": "".join(map(chr, rng.choices(range(0x1F300, 0x1F5FF), k=4000))).encode(),
             "no UTF-8": bytes(rng.choices(range(0x80, 0x100), k=4000))}[text]
    file.write_bytes(block * (24_000_000 // len(block)))
    code, _, error, peak = measured("decode", MODEL, "--prompt-file", file, "--ram", "300MB")
    assert code == 2 and error.count("\n") == 1 and "the prompt has more than" in error, error
    assert peak < 300e6, f"{peak / 1e6:.0f} MB"


def started(folder, *args, words='{"event": "token", "n": 3, ', command="decode"):
    "A run of 5000 tokens, read up to a line that begins with `words`."
    run = subprocess.Popen([sys.executable, "-m", "k3lib", command, MODEL, "--ids", PROMPT, "--max-new-tokens", "5000",
                            "--ram", "1GB", "--quiet", "--jsonl", "-", *map(str, args)], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, cwd=folder)
    while not run.stdout.readline().startswith(words):
        assert run.poll() is None, run.stderr.read()
    return run


def ids_of(logits):
    "The ids of the rows of logits, which begin as the known ones."
    ids = np.load(logits).argmax(1).tolist()
    assert len(ids) >= 2 and ids[:20] == EXPECTED["generated_ids"][:len(ids)]
    return ids


def test_what_a_killed_run_had_made_can_be_read(tmp_path):
    for options, command in (["--logits", "l.npy"], "decode"), (["--out", "t"], "trace"):
        run = started(tmp_path, *options, command=command)
        run.kill()
        run.communicate()
    logits, trace = sorted(tmp_path.iterdir())
    assert re.fullmatch(r"l\.npy\.[0-9]+\.part", logits.name) and re.fullmatch(r"t\.[0-9]+\.part", trace.name)
    ids_of(logits)
    replay = subprocess.run([sys.executable, "-m", "k3lib", "trace", MODEL, "--replay", trace], capture_output=True,
                            text=True)
    assert replay.returncode == 0 and re.match(r"[0-9]+ steps over 12 layers", replay.stdout), replay.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.large)])
def test_what_an_interrupted_run_has_made_gets_its_name(number, tmp_path):
    run = started(tmp_path, "--logits", "l.npy", "--json", "r.json")
    run.send_signal(number)
    error = run.communicate()[1]
    assert run.returncode == 128 + number and error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["l.npy", "r.json"]
    ids, report = ids_of(tmp_path / "l.npy"), json.loads((tmp_path / "r.json").read_text())
    assert report["finished"] is False and report["ids"][:len(ids)] == ids and len(report["ids"]) - len(ids) in (0, 1)
    assert f"l.npy holds {len(ids)} rows" in error and "r.json holds the report" in error
    assert len(report["step_seconds"]) == len(report["step_bytes"]) == len(report["ids"])


@pytest.mark.large
def test_an_interrupted_trace_holds_whole_passes(tmp_path):
    run = started(tmp_path, "--out", "t", command="trace")
    run.send_signal(signal.SIGINT)
    error = run.communicate()[1]
    assert run.returncode == 130 and [path.name for path in tmp_path.iterdir()] == ["t"]
    steps = int(re.search("t holds ([0-9]+) forward passes", error)[1])
    replay = subprocess.run([sys.executable, "-m", "k3lib", "trace", MODEL, "--replay", tmp_path / "t"],
                            capture_output=True, text=True)
    assert replay.stdout.startswith(f"{steps} steps over 12 layers"), replay.stderr


def test_damage_in_the_middle_of_a_run_costs_nothing_of_what_it_had_made(tmp_path):
    model, out = Path(shutil.copytree(MODEL, tmp_path / "model")), tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "k3lib", "decode", model, "--ids", PROMPT, "--max-new-tokens", "5000", "--ram",
               "1GB", "--logits", "l.npy", "--json", "r.json", "--quiet", "--jsonl", "-"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out)
    while not run.stdout.readline().startswith('{"event": "token", "n": 3, '):
        assert run.poll() is None, run.stderr.read()
    os.truncate(model / "model-00007-of-000016.safetensors", 400_000)
    error = run.communicate()[1]
    assert run.returncode == 4 and "model-00007-of-000016.safetensors" in error and error.count("\n") == 1, error
    ids, report = ids_of(out / "l.npy"), json.loads((out / "r.json").read_text())
    assert report["ids"] == ids and not report["finished"] and f"l.npy holds {len(ids)} rows" in error


def test_a_full_disk_costs_one_row(tmp_path):
    "A limit on the length of files stands for the disk: 128 bytes of head and ten rows of 2,048 fit."
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (22_000, 22_000)); sys.dont_write_bytecode"
            " = True; from k3lib.cli import main; sys.exit(main(sys.argv[1:]))")
    warm = [sys.executable, "-m", "k3lib", "decode", MODEL, "--ids", PROMPT, "--max-new-tokens", "2"]
    subprocess.run(warm, check=True, capture_output=True)
    run = subprocess.run([sys.executable, "-c", code, *map(str, warm[3:-1]), "20", "--logits", tmp_path / "l.npy",
                          "--json", tmp_path / "r.json"], capture_output=True, text=True)
    assert run.returncode == 1 and "l.npy: writing at byte 22,000 failed: File too large" in run.stderr, run.stderr
    assert "l.npy holds 10 rows" in run.stderr and ids_of(tmp_path / "l.npy") == EXPECTED["generated_ids"][:10]
    assert (tmp_path / "l.npy").stat().st_size == 128 + 10 * 2048
    report = json.loads((tmp_path / "r.json").read_text())
    assert not report["finished"] and report["ids"] == EXPECTED["generated_ids"][:11]


def test_a_run_that_has_made_nothing_leaves_nothing(tmp_path):
    (tmp_path / "l.npy").write_bytes(b"mine")
    code, _, error, _ = measured("decode", MODEL, "--ids", "1", "--ram", "1MB", "--logits", tmp_path / "l.npy",
                                 "--json", tmp_path / "r.json")
    assert code == 2 and (tmp_path / "l.npy").read_bytes() == b"mine", error
    assert [path.name for path in tmp_path.iterdir()] == ["l.npy"]


def test_the_files_of_a_whole_run_are_what_numpy_and_json_would_write(tmp_path):
    code, _, error, _ = measured("decode", MODEL, "--ids", PROMPT, "--max-new-tokens", 20, "--logits",
                                 tmp_path / "l.npy", "--json", tmp_path / "r.json")
    assert code == 0, error
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["finished"] is True and report["ids"] == EXPECTED["generated_ids"]
    np.save(tmp_path / "again.npy", np.load(tmp_path / "l.npy"))
    assert (tmp_path / "again.npy").read_bytes() == (tmp_path / "l.npy").read_bytes()
