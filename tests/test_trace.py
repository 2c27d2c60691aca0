"k3lib.trace: a trace gives back what was requested, is counted once, and is refused with its place if it is damaged."
import pytest
from common import MODEL, PROMPT, k3, refused
from hypothesis import given, settings
from hypothesis import strategies as st

import k3lib
from k3lib.cache_policy import CAPACITIES, replay_text
from k3lib.trace import MAX_TRACE_BYTES, TraceError, packed_trace, read_trace, steps_of

LAYERS = 2, 3, 7
chosen = st.lists(st.integers(0, 895), min_size=1, max_size=5)
passes = st.lists(st.tuples(*[chosen] * 3).map(lambda ids: list(zip(LAYERS, ids))), min_size=1, max_size=6)


# The file

@settings(max_examples=100)
@given(passes)
def test_a_trace_file_gives_back_what_was_requested(tmp_path_factory, passes):
    path = tmp_path_factory.mktemp("trace") / "t"
    path.write_bytes(packed_trace([(layer, e) for one in passes for layer, chosen in one for e in chosen]))
    assert read_trace(path) == passes
    assert path.stat().st_size == 8 * sum(len(chosen) for one in passes for _, chosen in one)


def test_the_bytes_by_hand():
    assert packed_trace([(1, 7), (2, 896)]) == b"\1\0\0\0\7\0\0\0\2\0\0\0\x80\3\0\0" and packed_trace([]) == b""


def test_a_pass_that_repeats_the_one_before_counts_with_what_it_adds():
    again = [[(1, [5, 4]), (2, [0, 0])], [(1, [5, 4, 4, 7]), (2, [0, 0, 3, 1])],
             [(1, [5, 4, 4, 7, 9]), (2, [0, 0, 3, 1, 1])]]
    assert steps_of(again) == ([[(1, [4, 5]), (2, [0])], [(1, [4, 7]), (2, [1, 3])], [(1, [9]), (2, [1])]], 2)


@pytest.mark.parametrize("second", [
    [(1, [5, 4, 4, 7]), (2, [3, 1, 0, 0])],  # one layer begins otherwise
    [(1, [5, 4]), (2, [0, 0])],              # nothing new
    [(1, [5, 4, 9]), (2, [0, 0])],           # nothing new in one layer
    [(1, [5]), (2, [0])],
])
def test_a_pass_that_does_not_repeat_the_one_before_counts_whole(second):
    passes = [[(1, [5, 4]), (2, [0, 0])], second]
    assert steps_of(passes) == ([[(layer, sorted({*ids})) for layer, ids in step] for step in passes], 0)


GOOD = [(1, 7), (1, 3), (2, 0), (5, 1), (1, 4), (2, 5), (5, 1)]


@pytest.mark.parametrize("data, words", [
    (b"", ["ends at byte 0", "8 bytes"]),
    (packed_trace(GOOD)[:-3], ["ends at byte 53", "8 bytes"]),
    (packed_trace(GOOD[:-1]), ["ends at byte 48", "layer 5 is next"]),
    (packed_trace(GOOD[:-2] + [(6, 5), (5, 1)]), ["request 5, at byte 40", "layer 6", "layer 2 is next"]),
    (packed_trace([*GOOD, (7, 0)]), ["request 7, at byte 56", "layer 7", "layer 1 is next"]),
    (packed_trace(GOOD[:3] + [(5, 65536)] + GOOD[4:]), ["request 3, at byte 24", "expert 65536"]),
    (packed_trace([(4, 1), (4, 2)]), ["every request is for layer 4"]),
], ids=["empty", "half a request", "a layer short", "a wrong layer", "one layer more", "no such expert", "one layer"])
def test_a_damaged_trace_is_refused_with_its_place(tmp_path, data, words):
    path = tmp_path / "bad.trace"
    path.write_bytes(data)
    with pytest.raises(TraceError) as error:
        read_trace(path)
    refused(k3("trace", "--replay", path), 2, str(error.value), path, *words)


def test_a_trace_that_would_not_fit_in_memory_is_refused_unread(tmp_path):
    path = tmp_path / "long.trace"
    with open(path, "wb") as file:
        file.truncate(MAX_TRACE_BYTES + 8)
    refused(k3("trace", "--replay", path), 2, path, "268,435,464 bytes, expected 268,435,456 at most")


# The command

def test_a_run_is_recorded_and_replayed(tmp_path):
    file = tmp_path / "run.trace"
    run = k3("trace", MODEL, "--ids", PROMPT, "--max-new-tokens", 6, "--ram", "1GB", "--out", file)
    assert run.returncode == 0 and "generated ids" in run.stdout, run.stderr
    passes = read_trace(file)
    assert len(passes) == 6 and [layer for layer, _ in passes[0]] == list(range(1, 13))
    assert all(len(ids) == 4 for layer, ids in passes[-1])
    run = k3("trace", "--replay", file)
    table, released = run.stdout.strip().rsplit("\n", 1)
    assert run.returncode == 0 and table == replay_text(passes), run.stderr
    assert released == "GB: with experts of 17.5 MB, as in the released model; name MODEL for another"
    of_this_model = k3("trace", MODEL, "--replay", file)
    assert of_this_model.returncode == 0 and of_this_model.stdout != run.stdout
    small = sum(x.nbytes for x in k3lib.Checkpoint(MODEL).expert(1, 0).values())
    assert of_this_model.stdout.strip() == replay_text(passes, small)
    assert len(run.stdout.splitlines()) == 4 + len(CAPACITIES)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.trace"]


@pytest.mark.parametrize("args, words", [
    (["--replay", "nothing.trace"], ["nothing.trace", "no such file"]),
    (["--replay", "."], ["is a folder"]),
    (["--ids", "1", "--out", "t"], ["MODEL"]),
    ([MODEL, "--ids", "1"], ["--out"]),
    ([MODEL, "--ids", "1", "--out", "no/t"], ["there is no folder no"]),
    ([MODEL, "--ids", "1", "--out", "."], [".: is a folder"]),
    (["--replay", "t", "--out", "u"], ["--out", "--replay records nothing"]),
    (["", "--ids", "1", "--out", "t"], ["MODEL", "empty"]),
    ([MODEL, "--ids", "1,x", "--out", "t"], ["'x'"]),
])
def test_bad_arguments(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(k3("trace", *args), 2, *words)
    assert not list(tmp_path.iterdir())


def test_a_trace_of_another_model_is_refused(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(packed_trace([(layer, e) for layer in (0, 1) for e in (1, 2)]))
    refused(k3("trace", MODEL, "--replay", path), 2, "expert 1 of layer 0", "another model's")
