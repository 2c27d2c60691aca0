"k3lib.conversation: each id is read once, a turn back costs nothing, and a crash costs a turn at most."
import itertools
import json
import os
import random
import subprocess
import sys
import time

import pytest
from common import MODEL

import k3lib
from k3lib.conversation import KEPT, Conversation, ConversationError, Stopped
from k3lib.engine import Engine
from k3lib.sampling import Sampling
from k3lib.tokenizer import Tokenizer

T = Tokenizer(MODEL, 512)
QUESTIONS = "2+2?", "and 3?", "why?"
DRAWN = Sampling(temperature=1.0, seed=1)


@pytest.fixture(scope="module")
def model():
    with k3lib.load(MODEL, "1GB", context=1024) as model:
        yield model


def held(model, file=None, questions=QUESTIONS, most=8, **how):
    talk = Conversation(model, T, file, most=most, **how)
    for question in questions:
        list(talk.ask(question))
    return talk


@pytest.fixture
def counted(monkeypatch):
    "How many ids each forward pass has read."
    passes, forward = [], Engine._pass
    monkeypatch.setattr(Engine, "_pass", lambda self, ids, *more: passes.append(len(ids)) or forward(self, ids, *more))
    return passes


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_long_prompt_and_ten_turns_read_no_id_twice(tmp_path, counted):
    system = "The quick brown fox jumps over the lazy dog. " * 80
    with k3lib.load(MODEL, "1GB", context=4096) as model:
        talk = held(model, tmp_path / "c", ["more?"] * 10, 5, settings={"system": system})
        assert len(T.encode(system)) > 2000 and sum(counted) == len(talk.ids) - 1 == model.position
        assert (talk.read, talk.again, talk.notes) == (len(talk.ids) - 1, 0, [])
    assert files(tmp_path) == ["c", "c.10.state", "c.9.state"] and len(talk.messages) == 21


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN])
def test_a_conversation_that_is_opened_again_goes_on_with_the_same_bytes(model, tmp_path, sampling, counted):
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    whole = held(model, tmp_path / "one" / "c", sampling=sampling)
    before = sum(counted)
    for question in QUESTIONS:
        with k3lib.load(MODEL, "1GB", context=512, threads=1) as other:
            parts = held(other, tmp_path / "two" / "c", [question], sampling=sampling)
            assert (parts.again, parts.notes) == (0, [])
    assert parts.ids == whole.ids and parts.messages == whole.messages and sum(counted) == 2 * before
    for name in files(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_without_a_file_nothing_stays(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with Conversation(model, T, most=4) as talk:
        list(talk.ask("hello"))
        assert talk.temporary and len(files(tmp_path)) == 1
        talk.save_as(tmp_path / "kept")
        assert not talk.temporary
        with pytest.raises(ConversationError, match="exists already"):
            talk.save_as(tmp_path / "kept")
    assert files(tmp_path) == ["kept", "kept.1.state"]
    assert Conversation(model, T, tmp_path / "kept").messages == talk.messages


# Back


def test_a_turn_back_reads_nothing_again_and_two_say_so(model, tmp_path):
    talk = held(model, tmp_path / "c")
    ids, read = talk.ids, talk.read
    assert talk.undo() == "why?" and talk.messages == talk.messages[:4] and (talk.read, talk.again) == (read, 0)
    list(talk.ask("why?"))
    assert talk.ids == ids and talk.again == 0
    talk.undo(), talk.undo(), talk.undo()
    assert talk.messages == talk.ids == talk.turns == [] and model.position == 0
    with pytest.raises(ConversationError, match="no turn"):
        talk.undo()
    assert files(tmp_path) == ["c"]


def test_beyond_the_snapshots_ids_are_read_again_and_counted(model, tmp_path, counted):
    talk = held(model, tmp_path / "c", [*QUESTIONS, "so?"])
    ends = [turn.ids for turn in talk.turns]
    talk.undo()
    assert (talk.again, talk.notes) == (0, [])
    talk.undo()
    assert talk.again == ends[1] - 1 and "the state before this turn was not kept" in talk.notes[-1]
    before, ids = sum(counted), talk.ids
    list(talk.ask("why?"))
    assert sum(counted) - before == len(talk.ids) - 1 and talk.ids[:len(ids)] == ids
    assert talk.ids == held(model, None).ids


def test_another_answer_has_another_seed_and_its_own_place(model, tmp_path):
    talk = held(model, tmp_path / "c", sampling=DRAWN)
    answers = [talk.ids]
    for attempt in 1, 2:
        list(talk.retry())
        answers.append(talk.ids)
        assert len(talk.messages) == 6 and talk.attempt == attempt and talk.again == 0
        assert sum(turn.state is not None for turn in talk.turns) == KEPT and len(files(tmp_path)) == 1 + KEPT
    prompt = len(answers[0]) - 8
    assert len({tuple(ids) for ids in answers}) == 3 and len({tuple(ids[:prompt]) for ids in answers}) == 1
    again = Conversation(model, T, tmp_path / "c", sampling=DRAWN, most=8)
    list(again.retry())
    assert again.attempt == 3 and tuple(again.ids) not in {tuple(ids) for ids in answers}
    list(again.ask("next"))
    assert again.attempt == 0
    with pytest.raises(ConversationError, match="greedy decoding gives the same answer"):
        Conversation(model, T, tmp_path / "c").retry()


# Stopped


def stop_at(talk, layers):
    "Stop when so many layers have ended."
    left = iter(range(layers, -1, -1))
    talk.on_layer = lambda L: talk.stop() if next(left, 1) == 0 else None


def test_an_answer_that_is_stopped_is_kept_and_gone_on_from(model, tmp_path, counted):
    talk = held(model, tmp_path / "c", QUESTIONS[:1])
    position = talk.model.position
    answer = talk.ask("tell me all")
    shown = "".join(delta.text for delta in itertools.islice(answer, 3))
    talk.stop()
    shown += "".join(delta.text for delta in answer)
    assert talk.last.thinking + talk.last.response == shown and talk.last.stop == "length" and talk.ids_of_reply < 8
    assert talk.messages[-1]["role"] == "assistant" and model.position > position
    list(talk.ask("go on"))
    assert talk.again == 0 and sum(counted) == len(talk.ids) - 1, "what was not said is not read"
    assert Conversation(model, T, tmp_path / "c").ids == talk.ids


def test_ctrl_c_in_the_middle_of_a_pass_of_the_answer_waits_for_its_token(model, tmp_path):
    talk = held(model, tmp_path / "c", QUESTIONS[:1])
    stop_at(talk, 13 + 13 + 5)  # layers of passes that read the question, and some of a pass of the answer
    list(talk.ask("tell me all"))
    assert 1 < talk.ids_of_reply < 8 and talk.messages[-1]["role"] == "assistant"
    assert json.loads((tmp_path / "c").read_text())["ids"] == talk.ids


@pytest.mark.parametrize("layers", [0, 5, 12])
def test_a_question_that_is_stopped_while_it_is_read_is_taken_back(model, tmp_path, layers):
    talk = held(model, tmp_path / "c", QUESTIONS[:2])
    before = talk.ids, talk.messages[:], (tmp_path / "c").read_bytes()
    stop_at(talk, layers)
    with pytest.raises(Stopped):
        list(talk.ask("why?"))
    assert (talk.ids, talk.messages, (tmp_path / "c").read_bytes()) == before
    talk.on_layer = lambda L: None
    list(talk.ask("why?"))
    assert talk.ids == held(model, None).ids


def test_a_retry_that_is_stopped_leaves_the_former_answer(model, tmp_path):
    talk = held(model, tmp_path / "c", sampling=DRAWN)
    before = talk.ids, talk.messages[:], talk.attempt
    stop_at(talk, 3)
    with pytest.raises(Stopped):
        list(talk.retry())
    assert (talk.ids, talk.messages, talk.attempt) == before and model.position == len(talk.ids) - 1
    assert (talk.again, talk.notes) == (0, [])
    assert json.loads((tmp_path / "c").read_text())["ids"] == talk.ids


def test_an_answer_that_nobody_reads_to_its_end_leaves_no_turn(model, tmp_path):
    talk = held(model, tmp_path / "c", QUESTIONS[:1])
    ids, answer = talk.ids, talk.ask("why?")
    next(answer)
    answer.close()
    assert talk.ids == ids and len(talk.messages) == 2 and model.position == len(ids) - 1


def test_a_full_context_is_refused_before_anything_is_read(tmp_path):
    with k3lib.load(MODEL, "1GB", context=120) as model:
        talk = held(model, tmp_path / "c", ["2+2?"])
        ids = talk.ids
        with pytest.raises(ConversationError, match="context of 120 has no room for a reply"):
            list(talk.ask("a long question " * 20))
        assert talk.ids == ids and len(talk.messages) == 2
        list(talk.ask("?"))
        assert len(talk.ids) <= 121


# What is opened


def changed(file, **fields):
    tree = json.loads(file.read_text())
    file.write_text(json.dumps(tree | fields))


@pytest.mark.parametrize("fields, words", [
    ({"version": 2}, "no conversation of version 1"), ({"format": "x"}, "no conversation"),
    ({"model": "0" * 64}, "another model"), ({"ids": [512]}, "not of the form"), ({"ids": "1,2"}, "not of the form"),
    ({"messages": [{"role": "root"}]}, "root"), ({"messages": 5}, "not of the form"),
    ({"attempt": None}, "not of the form"), ({"ids": [1, 2]}, "not of the form"),
    ({"turns": [{"messages": 2, "ids": 54, "state": "../c.1.state"}]}, "not of the form"),
    ({"turns": [{"messages": 9, "ids": 5, "state": "c.1.state"}]}, "not of the form"),
    ({"settings": {"x": 1}}, "not of the form"),
])
def test_a_file_that_is_no_conversation_of_this_model_is_refused_and_stays(model, tmp_path, fields, words):
    held(model, tmp_path / "c", QUESTIONS[:1])
    changed(tmp_path / "c", **fields)
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    with pytest.raises(ConversationError, match=words) as refused:
        Conversation(model, T, tmp_path / "c")
    assert str(refused.value).count(str(tmp_path / "c")) == 1 and "\n" not in str(refused.value)
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before


def test_a_snapshot_of_another_folder_is_refused(model, tmp_path):
    (tmp_path / "f").mkdir()
    held(model, tmp_path / "f" / "c", QUESTIONS[:1])
    (tmp_path / "c.1.state").write_bytes((tmp_path / "f" / "c.1.state").read_bytes())
    turn = json.loads((tmp_path / "f" / "c").read_text())["turns"][0]
    for name in "../c.1.state", "c.1.state/../c.1.state", "d.1.state", "c.one.state", "c.1.state\n":
        changed(tmp_path / "f" / "c", turns=[turn | {"state": name}])
        with pytest.raises(ConversationError, match="not of the form"):
            Conversation(model, T, tmp_path / "f" / "c")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"format": 1, "format": 2}'])
def test_a_file_that_is_no_json_is_refused(model, tmp_path, data):
    (tmp_path / "c").write_bytes(data)
    with pytest.raises(ConversationError, match=str(tmp_path / "c")):
        Conversation(model, T, tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == data


def test_settings_are_those_of_the_file(model, tmp_path):
    held(model, tmp_path / "c", QUESTIONS[:1], settings={"system": "Be brief.", "thinking": False})
    assert Conversation(model, T, tmp_path / "c").settings.thinking is False
    assert Conversation(model, T, tmp_path / "c", {"system": "Be brief."}).settings.system == "Be brief."
    with pytest.raises(ConversationError, match="system is 'Be brief.' in this conversation, but 'Be long.' was given"):
        Conversation(model, T, tmp_path / "c", {"system": "Be long."})
    with pytest.raises(k3lib.MissingFile, match="no folder"):
        Conversation(model, T, tmp_path / "nowhere" / "c")


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x"),
                                    lambda path: os.truncate(path, 1000)])
def test_a_snapshot_that_is_lost_costs_reading_and_is_said(model, tmp_path, damage):
    talk = held(model, tmp_path / "c")
    damage(tmp_path / talk.turns[-1].state)
    with k3lib.load(MODEL, "1GB", context=512) as other:
        again = Conversation(other, T, tmp_path / "c", most=8)
        lost = len(talk.ids) - talk.turns[-2].ids
        assert again.again == lost and "c.3.state" in again.notes[0] and f"{lost} ids have to be read" in again.notes[1]
        assert again.messages == talk.messages and again.ids == talk.ids
        list(again.ask("so?"))
    assert again.ids == held(model, None, [*QUESTIONS, "so?"]).ids and again.again == lost


# Crashes

CRASH = """
import os, pathlib, sys
import k3lib
from k3lib.conversation import Conversation
from k3lib.tokenizer import Tokenizer

model_folder, file, moment, *questions = sys.argv[1:]
moment, calls = int(moment), 0

def dies(name, module):
    original = getattr(module, name)
    def call(*args, **more):
        global calls
        calls += 1
        if calls == moment:
            os._exit(9)
        result = original(*args, **more)
        calls += 1
        if calls == moment:
            os._exit(9)
        return result
    setattr(module, name, call)

with k3lib.load(model_folder, "1GB", context=512) as model:
    talk = Conversation(model, Tokenizer(model_folder, 512), file, most=4)
    for name, module in ("replace", os), ("fsync", os), ("unlink", pathlib.Path):
        dies(name, module)
    for question in questions[len(talk.messages) // 2:]:
        list(talk.ask(question))
print(calls, talk.again)
"""


def crashing(file, moment):
    command = [sys.executable, "-c", CRASH, MODEL, file, str(moment), *QUESTIONS]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_crash_at_any_moment_of_saving_costs_a_turn_at_most(tmp_path, everything):
    "The process ends before or after each call that makes a file durable, names it or removes it."
    (tmp_path / "whole").mkdir()
    whole = crashing(tmp_path / "whole" / "c", 0)
    calls = int(whole.stdout.split()[0])
    expected = {name: (tmp_path / "whole" / name).read_bytes() for name in files(tmp_path / "whole")}
    assert calls > 20
    moments = range(1, calls + 1) if everything else range(calls // 3, 2 * calls // 3, 2)  # of the second turn
    for moment in moments:
        folder = tmp_path / str(moment)
        folder.mkdir()
        assert crashing(folder / "c", moment).returncode == 9
        run = crashing(folder / "c", 0)
        assert run.returncode == 0 and run.stdout.split()[1] == "0", f"moment {moment}: {run.stdout} {run.stderr}"
        found = {name: (folder / name).read_bytes() for name in files(folder)}
        assert moment > 2 * calls // 3 or not any(".part" in name for name in found), (moment, files(folder))
        tree, right = json.loads(found["c"]), json.loads(expected["c"])
        assert tree["ids"] == right["ids"] and tree["messages"] == right["messages"], moment
        assert found[tree["turns"][-1]["state"]] == expected[right["turns"][-1]["state"]], moment
        assert len([name for name in found if name.endswith(".state")]) <= 3, "the next turn removes the third"


@pytest.mark.large
def test_twenty_kills_at_random_moments(tmp_path):
    (tmp_path / "whole").mkdir()
    lines = "".join(f"{question}\n" for question in QUESTIONS * 3)
    command = [sys.executable, "-m", "k3lib", "chat", MODEL, "--ram", "1GB", "--quiet", "--max-new-tokens", "4",
               "--file"]
    subprocess.run([*command, tmp_path / "whole" / "c"], input=lines, text=True, check=True, stdout=subprocess.DEVNULL)
    right, rng, file = json.loads((tmp_path / "whole" / "c").read_text()), random.Random(7), tmp_path / "c"
    killed = 0
    while killed < 20:
        done = len(json.loads(file.read_text())["messages"]) // 2 if file.exists() else 0
        run = subprocess.Popen([*command, file], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        run.stdin.write("".join(lines.splitlines(True)[done:]))
        run.stdin.close()
        time.sleep(rng.uniform(0.6, 2.5))
        killed += run.poll() is None
        run.kill()
        run.wait()
        if file.exists():
            tree = json.loads(file.read_text())
            n = len(tree["messages"])
            assert tree["messages"] == right["messages"][:n] and n >= 2 * done
            assert tree["ids"] == right["ids"][:len(tree["ids"])]
            if n == len(right["messages"]):
                for path in tmp_path.glob("c*"):
                    path.unlink()
