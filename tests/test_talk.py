"k3 chat: three turns at a terminal and from a pipe, Ctrl-C, commands, and what a model may not do to a terminal."
import json
import os
import signal
import subprocess
import sys

import pytest
from common import MODEL, k3, refused

import k3lib
from k3lib.conversation import Conversation
from k3lib.reply import Delta
from k3lib.talk import shown_deltas
from k3lib.tokenizer import Tokenizer

pexpect = pytest.importorskip("pexpect")
READY = "\x1b[?2004h"  # the library asks the terminal to mark what is pasted: it waits for a line
QUESTIONS = "2+2?", "and 3?", "why?"


def chat(*args, input=""):
    command = [sys.executable, "-m", "k3lib", "chat", MODEL, "--ram", "1GB", *map(str, args)]
    return subprocess.run(command, input=input.encode(), capture_output=True)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    "The conversation of the three questions, held through the library: the tree of its file."
    file = tmp_path_factory.mktemp("known") / "c"
    with k3lib.load(MODEL, "1GB", context=512) as model:
        talk = Conversation(model, Tokenizer(MODEL, 512), file, most=8)
        for question in QUESTIONS:
            list(talk.ask(question))
    return json.loads(file.read_text())


def terminal(*args, size=(40, 200)):
    env = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    return pexpect.spawn(sys.executable, ["-m", "k3lib", "chat", str(MODEL), "--ram", "1GB", *map(str, args)], env=env,
                         encoding="utf-8", codec_errors="replace", timeout=60, dimensions=size)


def ended(run):
    run.expect(pexpect.EOF)
    run.close()
    return run.exitstatus


def test_three_turns_at_a_terminal(tmp_path, known):
    run = terminal("--file", tmp_path / "c", "--max-new-tokens", 8)
    run.expect("plan for")
    for question in QUESTIONS:
        run.expect_exact(READY)
        run.send(question + "\r")
        run.expect_exact("\x1b[2m")  # thinking is dimmed
        run.expect_exact("(stopped after 8 ids")
    run.expect_exact(READY)
    run.send("/stats\r")
    told = r"3 turns, (\d+) ids of a context of 4096; since the start (\d+) ids read, 0 of them again, 24 generated"
    run.expect(told)
    assert int(run.match[1]) - 1 == int(run.match[2]) == len(known["ids"]) - 1
    run.expect_exact(READY)
    run.sendcontrol("d")
    assert ended(run) == 0
    tree = json.loads((tmp_path / "c").read_text())
    assert tree["ids"] == known["ids"] and tree["messages"] == known["messages"]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(tmp_path):
    run = terminal("--file", tmp_path / "c", "--max-new-tokens", 3000, "--quiet")
    run.expect_exact(READY)
    run.sendcontrol("c")  # clears the line, and ends nothing
    run.expect_exact(READY)
    run.send("tell me all\r")
    run.expect_exact("\x1b[2m")
    run.sendcontrol("c")
    run.expect_exact(READY)
    run.send("/undo\r")
    run.expect_exact("taken back: tell me all")
    run.expect_exact(READY)
    run.send("2+2?\r")
    run.expect_exact("\x1b[2m")
    run.sendcontrol("c")
    run.expect_exact(READY)
    run.send("/nonsense\r")
    run.expect_exact("/nonsense is no command")
    run.expect_exact(READY)
    run.send("/help\r")
    run.expect_exact("/retry")
    run.send("/quit\r")
    assert ended(run) == 0
    tree = json.loads((tmp_path / "c").read_text())
    assert [message["role"] for message in tree["messages"]] == ["user", "assistant"]
    assert tree["messages"][0]["content"] == "2+2?" and len(tree["ids"]) < 2000
    again = terminal("--file", tmp_path / "c", "--max-new-tokens", 4, "--quiet")
    again.expect_exact(READY)
    again.send("\x1b[A\r")  # the history has the question of yesterday
    again.expect_exact("\x1b[2m")
    again.expect_exact(READY)
    again.send("/quit\r")
    assert ended(again) == 0
    assert json.loads((tmp_path / "c").read_text())["messages"][2]["content"] == "2+2?"


def test_a_conversation_from_a_pipe(tmp_path, known):
    lines = "".join(f"{question}\n" for question in QUESTIONS)
    run = chat("--file", tmp_path / "c", "--max-new-tokens", 8, "--quiet", input=lines)
    assert (run.returncode, run.stderr) == (0, b"") and b"\x1b" not in run.stdout and b"> " not in run.stdout
    tree = json.loads((tmp_path / "c").read_text())
    assert tree["ids"] == known["ids"]
    lines = "//slash\n/save\n\n/save x/y/z\n/retry\n"
    run = chat("--file", tmp_path / "c", "--quiet", "--max-new-tokens", 4, input=lines)
    tree = json.loads((tmp_path / "c").read_text())
    assert run.returncode == 0 and tree["messages"][-2] == {"role": "user", "content": "/slash"}
    assert f"kept in {tmp_path / 'c'}" in run.stdout.decode()
    assert run.stderr.decode().splitlines() == [
        f"(x/y/z: there is no folder {os.path.abspath('x/y')} to keep the conversation in)",
        "(greedy decoding gives the same answer again: choose a temperature)"]


def test_what_is_refused_before_a_model_is_loaded(tmp_path):
    refused(k3("chat", tmp_path / "nowhere"), 2, "nowhere")
    refused(k3("chat", MODEL, "--temperature", "x"), 2, "temperature")
    refused(k3("chat", MODEL, "--max-new-tokens", "0"), 2, "max_new_tokens")
    (tmp_path / "m").mkdir()
    for path in MODEL.iterdir():
        if path.name != "tiktoken.model":
            (tmp_path / "m" / path.name).symlink_to(path)
    refused(k3("chat", tmp_path / "m"), 2, "no tiktoken.model")
    (tmp_path / "c").write_text("{}")
    refused(k3("chat", MODEL, "--file", tmp_path / "c", "--quiet"), 2, tmp_path / "c", "no conversation")


def test_a_signal_before_the_first_question_ends_the_command():
    run = subprocess.Popen([sys.executable, "-m", "k3lib", "chat", MODEL, "--ram", "1GB"], stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stderr.readline().startswith(b"plan for")
    run.send_signal(signal.SIGINT)
    assert run.communicate()[1].splitlines()[-1] == b"k3 chat: interrupted" and run.returncode == 130


@pytest.mark.parametrize("deltas, plain, dimmed", [
    ([], "", ""),
    ([("thinking", "a"), ("thinking", "b"), ("response", "c")], "ab\n\nc", "\x1b[2ma\x1b[0m\x1b[2mb\x1b[0m\n\nc"),
    ([("thinking", ""), ("response", "c")], "c", "c"),
    ([("response", "\x1b[2J\x07\r\n\t\x9b\x7f")], *["\u241b[2J\u2407\u240d\n\t\ufffd\u2421"] * 2),
])
def test_control_characters_are_shown_and_thinking_is_dimmed(deltas, plain, dimmed):
    deltas = [Delta(*delta) for delta in deltas]
    assert "".join(shown_deltas(deltas, False)) == plain and "".join(shown_deltas(deltas, True)) == dimmed
