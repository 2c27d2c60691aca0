"""What the display cannot do costs the display only: no result, no right exit code, and the right thing is named.

The tests of the command use only the public surface, in processes of their own. So they also run on a commit from
before.
"""
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
MODEL, EXPECTED = ROOT / "fixtures/oracle13/model", json.loads((ROOT / "fixtures/oracle13/expected.json").read_text())
PROMPT = ",".join(map(str, EXPECTED["prompt_ids"]))
# An unbuffered output hides what Python does on its way out with what an output could not take.
PLAIN = {name: value for name, value in os.environ.items()
         if name not in ("PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8")}
DECODE = ["decode", MODEL, "--ids", PROMPT, "--quiet", "--max-new-tokens", "8"]
TOKEN = b'{"event": "token", "n": %d, '
posix = pytest.mark.skipif(os.name != "posix", reason="descriptors are closed as POSIX does")


def sample(cases, kept):
    "The cases of a large grid for parametrize. Those that are not `kept` run only with `--all`."
    return [case if kept(*case) else pytest.param(*case, marks=pytest.mark.large) for case in cases]


def k3(*args, env=(), **options):
    "Run `k3`; its outputs are bytes."
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([sys.executable, "-m", "k3lib", *map(os.fspath, args)], env={**PLAIN, **dict(env)}, **options)


# What cannot be encoded

OUTPUTS = {
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "ascii": {"PYTHONIOENCODING": "ascii:strict"},
    "utf-8, which has no half characters": {"PYTHONIOENCODING": "utf-8:strict"},
    "cp932": {"PYTHONIOENCODING": "cp932:ignore"},
    "utf-16": {"PYTHONIOENCODING": "utf-16"},
    "the locale C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.mark.parametrize("output,", sample([(output,) for output in OUTPUTS],
                                           lambda output: output in ("latin-1", "the locale C")))
def test_an_answer_that_cannot_be_encoded_is_escaped_and_saved(output, tmp_path):
    run = k3(*DECODE[:-1], "20", "--json", tmp_path / "r.json", "--logits", tmp_path / "l.npy", env=OUTPUTS[output])
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert json.loads((tmp_path / "r.json").read_text())["ids"] == EXPECTED["generated_ids"]
    assert len(np.load(tmp_path / "l.npy")) == 20
    encoding = OUTPUTS[output].get("PYTHONIOENCODING", "ascii").partition(":")[0]
    text = run.stdout.decode(encoding)
    known = "\u30ab"  # in the text of the known ids
    for character in known, "\xab":
        with contextlib.suppress(UnicodeEncodeError):
            character.encode(encoding)
            assert character in text
            continue
        assert character.encode("ascii", "backslashreplace").decode() in text, text[-2000:]
    assert text.startswith(" we ")


@pytest.mark.parametrize("command, encoding", sample(
    [(command, encoding) for command in ("pack", "verify", "synth") for encoding in ("ascii", "utf-8")],
    lambda command, encoding: (command, encoding) == ("pack", "ascii")))
def test_a_file_name_that_cannot_be_encoded_is_escaped(command, encoding, tmp_path):
    name = "mod\u00e8le \udcff"
    folder, target = tmp_path / name, tmp_path / f"{name} 2"
    shutil.copytree(MODEL, folder)
    args = {"pack": ["pack", folder, target], "verify": ["verify", folder, "--write-manifest", target],
            "synth": ["synth", target, "--preset", "oracle"]}[command]
    run = k3(*args, env={"PYTHONIOENCODING": encoding})
    shown = f"{name} 2".encode(encoding, "backslashreplace")
    assert run.returncode == 0 and shown in run.stdout and target.exists(), run.stderr


# Outputs that take nothing


def closed(number):
    return {"preexec_fn": lambda: os.close(number)}


def broken(number):
    reader, writer = os.pipe()
    os.close(reader)
    return {["", "stdout", "stderr"][number]: writer}


def full(number):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    return {["", "stdout", "stderr"][number]: os.open("/dev/full", os.O_WRONLY)}


LOST = {closed: b"standard output is closed", broken: b"standard output cannot be written: Broken pipe",
        full: b"standard output cannot be written: No space left on device"}
SAVING = {
    "decode": ([*DECODE, "--json", "{}/r.json", "--logits", "{}/l.npy"], ["l.npy", "r.json"]),
    "trace": (["trace", *DECODE[1:], "--out", "{}/t"], ["t"]),
    "census": (["census", MODEL, "--json", "{}/c.json"], ["c.json"]),
    "verify": (["verify", MODEL, "--json", "{}/v.json"], ["v.json"]),
    "manifest": (["verify", MODEL, "--write-manifest", "{}/m"], ["m"]),
    "pack": (["pack", MODEL, "{}/trunk"], ["trunk"]),
    "synth": (["synth", "{}/model", "--preset", "oracle"], ["model"]),
}


def lost(stream, *args, number=1, **options):
    "Run `k3` with standard output, or error, in such a state."
    how = stream(number)
    run = k3(*args, **options, **how)
    for descriptor in how.values():
        if isinstance(descriptor, int):
            os.close(descriptor)
    return run


@posix
@pytest.mark.parametrize("what, stream", sample(
    [(what, stream) for what in SAVING for stream in (closed, full)],
    lambda what, stream: (what, stream) in [("decode", closed), ("trace", full), ("manifest", full),
                                            ("synth", closed)]))
def test_results_are_saved_where_nothing_can_be_shown(what, stream, tmp_path):
    args, files = SAVING[what]
    args = [os.fspath(word).format(tmp_path) for word in args]
    run = lost(stream, *args)
    lines = [line for line in run.stderr.splitlines() if not line[:1].isdigit() and b"synthetic" not in line]
    assert lines == [b"k3 %s: %s; everything else is done" % (args[0].encode(), LOST[stream])], run.stderr
    assert run.returncode == 1 and sorted(path.name for path in tmp_path.iterdir()) == files
    if what == "decode":
        report, ids = json.loads((tmp_path / "r.json").read_text()), EXPECTED["generated_ids"][:8]
        assert report["ids"] == np.load(tmp_path / "l.npy").argmax(1).tolist() == ids and report["finished"]
    elif what == "trace":
        assert k3("trace", "--replay", tmp_path / "t").stdout.startswith(b"8 steps over 12 layers")
    elif what == "manifest":
        assert (tmp_path / "m").read_text().splitlines()[1:] == (
            MODEL.parent / "model.sha256").read_text().splitlines()[1:]
    elif what in ("census", "verify"):
        assert json.loads((tmp_path / files[0]).read_text())
    else:
        assert len(list((tmp_path / files[0]).glob("*.safetensors"))) == {"pack": 14, "synth": 16}[what]


@posix
@pytest.mark.parametrize("args, stream", sample(
    [(args, stream) for args in ([*DECODE[:-1], "5000"], ["plan", MODEL], ["census", MODEL], ["--help"])
     for stream in LOST],
    lambda args, stream: (args[0], stream) in [("decode", broken), ("census", closed), ("plan", full),
                                               ("--help", full)]))
def test_a_command_that_only_shows_ends_with_its_display(args, stream):
    "In a line, or none if its reader has left, and with exit code 1: Python's own end would be code 120."
    run = lost(stream, *args)
    assert run.returncode == 1 and run.stderr.count(b"\n") == (stream is not broken), run.stderr
    assert stream is broken or LOST[stream] in run.stderr, run.stderr


@posix
def test_a_reader_who_leaves_half_way_costs_no_result(tmp_path):
    command = [sys.executable, "-m", "k3lib", *map(str, DECODE[:-1]), "60", "--json", tmp_path / "r.json", "--jsonl",
               "-"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=PLAIN)
    while not run.stdout.readline().startswith(TOKEN % 1):
        assert run.poll() is None, run.stderr.read()
    run.stdout.close()
    error = run.stderr.read()
    assert run.wait() == 1 and error == b"", "who leaves on purpose need not be told"
    report = json.loads((tmp_path / "r.json").read_text())
    assert len(report["ids"]) == 60 and report["ids"][:20] == EXPECTED["generated_ids"]


# Standard error


ERRORS = [(DECODE, 0), (["synth", "{}/m", "--preset", "oracle"], 0), (["plan", MODEL, "--ram", "1MB"], 2),
          (["plan", "nowhere"], 2), (["decode", MODEL, "--ids", "1,x"], 2), (["decode", MODEL], 2)]


@posix
@pytest.mark.parametrize("args, code, stream", sample(
    [(*error, stream) for error in ERRORS for stream in (closed, broken, full)],
    lambda args, code, stream: (args, stream) in [(DECODE, closed), *((ERRORS[n][0], full) for n in (1, 3, 5))]))
def test_an_error_that_nobody_hears_keeps_its_exit_code(args, code, stream, tmp_path):
    run = lost(stream, *(os.fspath(word).format(tmp_path) for word in args), number=2)
    assert run.returncode == code and (run.stdout[:4] == b" we ") == (args is DECODE)


def test_a_path_moves_no_cursor(tmp_path):
    "A terminal obeys the control characters in an error message, and a newline would make two lines of one."
    command = [sys.executable, "-m", "k3lib", "plan", tmp_path / "a\x1b[2J\nb"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and "a\\x1b[2J\\nb: no such model" in run.stderr, run.stderr
    assert run.stderr.count("\n") == 1


def test_a_bar_starts_no_thread():
    "tqdm starts one for all bars of a process, also for a bar that is not shown. No plan counts it."
    code = ("import threading; from k3lib.display import progress_bar; bar = progress_bar(10, 'B'); bar.update(3); "
            "print(threading.active_count()); bar.close()")
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1\n"


@posix
def test_a_terminal_that_is_closed_ends_no_run(tmp_path):
    "The progress bar writes to a terminal, which is closed after the first token."
    import pty
    ours, theirs = pty.openpty()
    loud = [word for word in map(str, DECODE[:-1]) if word != "--quiet"]
    command = [sys.executable, "-m", "k3lib", *loud, "60", "--json", tmp_path / "r.json", "--jsonl", "-"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=PLAIN)
    os.close(theirs)
    while not run.stdout.readline().startswith(TOKEN % 1):
        assert run.poll() is None, os.read(ours, 10_000)
    assert b"layer" in os.read(ours, 10_000)
    os.close(ours)
    assert b'"n": 60, ' in run.communicate()[0] and run.returncode == 0
    assert len(json.loads((tmp_path / "r.json").read_text())["ids"]) == 60


@posix
@pytest.mark.parametrize("number,", sample([(signal.SIGINT,), (signal.SIGTERM,)], lambda n: n == signal.SIGINT))
def test_a_signal_is_told_by_the_exit_code_where_nobody_listens(number, tmp_path):
    command = [sys.executable, "-m", "k3lib", *map(str, DECODE[:-1]), "5000", "--json", tmp_path / "r.json", "--jsonl",
               "-"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, env=PLAIN, preexec_fn=lambda: os.close(2))
    while not run.stdout.readline().startswith(TOKEN % 2):
        assert run.poll() is None
    for other in Path(f"/proc/{run.pid}/fd").glob("2"):
        assert os.readlink(other) == os.devnull, "a file of the run has the number to which libraries write errors"
    run.send_signal(number)
    run.communicate()
    assert run.returncode == 128 + number and json.loads((tmp_path / "r.json").read_text())["finished"] is False


def shown_notebook(folder, cells, env=PLAIN):
    "What show_run.py does with a notebook of `cells`, (source, tags) each; and the notebook that it has executed."
    import nbformat
    made = [nbformat.v4.new_code_cell(source, metadata={"tags": tags}) for source, tags in cells]
    notebook = nbformat.v4.new_notebook(cells=made)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python", "language": "python"}
    nbformat.write(notebook, folder / "n.ipynb")
    command = [sys.executable, ROOT / "book" / "show_run.py", folder / "n.ipynb", folder / "executed.ipynb"]
    run = subprocess.run(command, capture_output=True, env=env)
    return run, nbformat.read(folder / "executed.ipynb", 4)


def test_an_executed_notebook_is_shown_in_any_encoding(tmp_path):
    cells = [(r"print('half: \ufffd, whole: \u4e16')", ["run"])]
    run, _ = shown_notebook(tmp_path, cells, {**PLAIN, "PYTHONIOENCODING": "latin-1"})
    assert run.returncode == 0 and run.stdout.startswith(b"half: \\ufffd, whole: \\u4e16\n"), run.stderr


@posix
def test_a_progress_bar_never_shares_a_line_with_a_word(tmp_path):
    "Both outputs are one terminal. The bar is there while the prompt is read, and gone before the first word."
    import pty
    ours, theirs = pty.openpty()
    loud = [word for word in map(str, DECODE) if word != "--quiet"]
    run = subprocess.Popen([sys.executable, "-m", "k3lib", *loud], stdout=theirs, stderr=theirs, env=PLAIN)
    os.close(theirs)
    data = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while more := os.read(ours, 10_000):
            data += more
    assert run.wait() == 0 and b"layer" in data
    text = k3(*DECODE).stdout
    lines = [line.rpartition(b"\r")[2] for line in data.replace(b"\r\n", b"\n").split(b"\n")]
    assert text in lines, lines
    assert b"layer" not in data[data.index(text[:12]):]


def test_of_a_notebook_only_the_run_is_shown_and_a_cell_that_fails_is_told_in_one_line(tmp_path):
    cells = [("print('an experiment')", []), ("print('the answer')", ["run"]), ("raise SystemExit('no room')", ["run"]),
             ("print('never')", ["run"])]
    run, executed = shown_notebook(tmp_path, cells)
    assert run.returncode == 1 and run.stderr.endswith(b"n.ipynb: a cell failed: no room\n"), run.stderr
    assert run.stdout.startswith(b"the answer\n") and run.stdout.count(b"\n") == 3, run.stdout
    assert [bool(cell.outputs) for cell in executed.cells] == [True, True, True, False]


# The module


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "utf-16", "shift_jis", "big5", "cp437", "koi8-r"])
def test_what_is_escaped_can_be_written(encoding):
    from k3lib.display import escaped
    text = "plain, caf\xe9 \u4e16\u754c \U0001f642 \ufffd \udcff \ud83d"
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="strict")
    stream.write(escaped(text, stream))
    stream.flush()
    shown = stream.buffer.getvalue().decode(encoding)
    assert shown.encode("utf-8").decode("unicode_escape", "replace").startswith("plain, caf")
    assert "\\udcff \\ud83d" in shown and ("\\ufffd" in shown) != ("\ufffd" in shown)


def test_a_stream_without_an_encoding_takes_everything():
    from k3lib.display import complain
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        complain("\ufffd \udcff")
    assert stream.getvalue() == "\ufffd \\udcff\n"
    with contextlib.redirect_stderr(None):
        complain("nobody")
    stream.close()
    with contextlib.redirect_stderr(stream):
        complain("nobody")
