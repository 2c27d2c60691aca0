"""Arguments of a wrong type on the public surface: each is refused by name, before anything else happens.

Only the public surface is used. So these tests also run on a commit from before.
"""
import copy
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

import k3lib

MODEL = Path(__file__).resolve().parents[1] / "fixtures" / "oracle13" / "model"


@pytest.fixture(scope="module")
def model():
    with k3lib.load(MODEL, "1GB", context=16) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer():
    return k3lib.Tokenizer(MODEL, 512)


OURS = getattr(k3lib, "K3Error", Exception)  # a commit from before may have no name for it


def refused(call, *words, kind=ValueError):
    "The call raises an error of this package, which is also of Python's `kind`, with all the words in one line."
    with pytest.raises(Exception) as found:
        call()
    assert isinstance(found.value, OURS) and isinstance(found.value, kind), repr(found.value)
    assert all(str(word) in str(found.value) for word in words) and "\n" not in str(found.value), found.value


NO_PATHS = [5, True, None, 1.5, b"model", ["model"], "", "a\0b"]
NO_IDS = ["ab", b"ab", bytearray(b"ab"), memoryview(b"ab"), {1, 2}, {1: 2}, None, 1.5, np.array([[1, 2]]), np.array(1)]
NO_NUMBERS = [True, 1.5, "x", b"1", None, [1], {}, np.array([1, 2])]


def names(values):
    shown = [value if not isinstance(value, memoryview) else value.tobytes() for value in values]  # it shows an address
    return [f"{type(value).__name__} {ascii(text)}".replace("\n", "") for value, text in zip(values, shown)]


# Loading


@pytest.mark.parametrize("path", NO_PATHS, ids=ascii)
def test_a_path_that_is_none(path, model, tmp_path):
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        refused(lambda: k3lib.load(path), "path is", repr(path))
        refused(lambda: k3lib.Tokenizer(path), "model_dir is", repr(path))
        refused(lambda: model.save_state(path), "file is", repr(path))
        refused(lambda: model.load_state(path), "file is", repr(path))
        if path is not None:
            refused(lambda: k3lib.load(MODEL, trunk=path), "trunk is", repr(path))
    finally:
        os.chdir(here)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ram", [None, True, 1.5, b"1GB", [], {}, -1, 0, float("nan"), float("inf"), np.array([1, 2]),
                                 "x", "", "1 GB 2"], ids=ascii)
def test_a_budget_that_is_none(ram):
    refused(lambda: k3lib.load(MODEL, ram), "ram", repr(ram))


@pytest.mark.parametrize("name", ["threads", "context", "readers", "prompt_tokens"])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=names(NO_NUMBERS))
def test_a_number_that_is_none(name, value):
    if value is not None or name == "context":
        refused(lambda: k3lib.load(MODEL, **{name: value}), f"{name} is ", repr(value), "a whole number")


@pytest.mark.parametrize("name", ["on_plan", "progress"])
def test_a_function_that_is_none(name, model):
    refused(lambda: k3lib.load(MODEL, **{name: 5}), f"{name} is 5", "expected a function")
    refused(lambda: model.forward([1], watch=5), "watch is 5", "expected a function")
    refused(lambda: model.generate([1], 2, on_logits="x"), "on_logits is 'x'", "expected a function")


@pytest.mark.parametrize("ram", [10**9, 1e9, np.int64(10**9), "1GB", "1000000000"])
def test_a_budget_in_each_form_it_may_have(ram):
    with k3lib.load(os.fspath(MODEL), ram, context=np.int64(4), threads=1.0) as model:
        assert model.plan.ram == 10**9 and model.context == 4 and model.threads == 1


# Reading


@pytest.mark.parametrize("ids", NO_IDS, ids=names(NO_IDS))
def test_ids_that_are_none(ids, model, tokenizer):
    model.reset()
    for call in (model.prefill, model.forward, model.generate, tokenizer.decode):
        refused(lambda: call(ids), "ids is ", "token ids in their order are needed")
    assert model.position == 0


@pytest.mark.parametrize("value", [True, "1", 1.0, None, b"1", [1], np.bool_(True)], ids=ascii)
def test_an_id_that_is_none(value, model, tokenizer):
    model.reset()
    calls = lambda: model.step(value), lambda: model.prefill([3, value]), lambda: next(model.generate([value], 2))
    for call in calls:
        refused(call, repr(value), "whole numbers are needed")
    for call in (tokenizer.token, lambda value: tokenizer.decode([5, value]), tokenizer.stream().feed):
        refused(lambda: call(value), f"token id {value!r}: expected 0..511")
    assert model.position == 0


def test_one_id_is_no_prompt(model):
    refused(lambda: model.generate(5), "ids is 5", "token ids in their order are needed")


@pytest.mark.parametrize("value", NO_NUMBERS, ids=names(NO_NUMBERS))
def test_a_number_of_tokens_that_is_none(value, model):
    refused(lambda: model.generate([1], value), "max_new_tokens is ", repr(value))


# The tokenizer


@pytest.mark.parametrize("text", [5, None, True, 1.5, [65, 66], ["a"], range(3), np.array([65], np.uint8), Path("a")],
                         ids=ascii)
def test_text_that_is_none(text, tokenizer):
    refused(lambda: tokenizer.encode(text), "text is ", repr(text), "a str or bytes")
    refused(lambda: tokenizer.encode_segments([("a", False), (text, False)]), "text is ", "a str or bytes")


@pytest.mark.parametrize("value", ["no", None, 2, "False", 0.5], ids=ascii)
def test_a_switch_that_is_none(value, tokenizer):
    "A text that says no would have switched control tokens on."
    refused(lambda: tokenizer.encode("[EOS]", value), "allow_special is ", repr(value))
    refused(lambda: tokenizer.encode_segments([("[EOS]", value)]), "allow_special is ", repr(value))


@pytest.mark.parametrize("errors", [5, None, "nothing", b"replace", "a\0b"], ids=ascii)
def test_a_handler_that_is_none(errors, tokenizer):
    refused(lambda: tokenizer.stream(errors), "errors is ", repr(errors))


@pytest.mark.parametrize("size", [True, "x", 1.5, b"512", [512]], ids=ascii)
def test_a_vocabulary_size_that_is_none(size):
    refused(lambda: k3lib.Tokenizer(MODEL, size), "vocab_size is ", repr(size))


def test_what_is_text_in_each_form_it_may_have(tokenizer):
    ids = tokenizer.encode("caf\xe9")
    assert ids == tokenizer.encode("caf\xe9".encode()) == tokenizer.encode(bytearray("caf\xe9".encode()))
    assert ids == tokenizer.encode(memoryview("caf\xe9".encode()), False) == tokenizer.encode("caf\xe9", 0)
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(iter(ids)) == "caf\xe9".encode()


# Errors with two names


def test_what_does_not_exist_is_an_error_of_this_package_and_of_python(model, tmp_path):
    for call in (lambda: k3lib.load("nope"), lambda: k3lib.Tokenizer("nope"), lambda: k3lib.Checkpoint("nope"),
                 lambda: model.load_state(tmp_path / "nope"), lambda: k3lib.load(MODEL, trunk=tmp_path / "nope")):
        refused(call, "nope", kind=FileNotFoundError)


def test_a_closed_model_is_an_error_of_this_package_and_of_python():
    with k3lib.load(MODEL, "1GB", context=4) as model:
        pass
    for call in (lambda: model.step(1), model.reset, lambda: next(model.generate([1], 1))):
        refused(call, "this model is closed", kind=RuntimeError)


# A vocabulary that was converted as text


def test_a_vocabulary_with_the_line_ends_of_windows_is_refused_in_words(tmp_path):
    ranks = (MODEL / "tiktoken.model").read_bytes()
    config = (MODEL / "tokenizer_config.json").read_bytes()
    (tmp_path / "tiktoken.model").write_bytes(ranks)
    (tmp_path / "tokenizer_config.json").write_bytes(config.replace(b"\n", b"\r\n"))
    assert k3lib.Tokenizer(tmp_path).vocab_size == 512, "JSON may have any line ends"
    json.loads((tmp_path / "tokenizer_config.json").read_bytes())
    (tmp_path / "tiktoken.model").write_bytes(ranks.replace(b"\n", b"\r\n"))
    refused(lambda: k3lib.Tokenizer(tmp_path), "tiktoken.model", "lines end with CR LF", "converted as text")


# Copies


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_holds_open_files_has_no_copies(copied, model):
    "A copy closed the files of the original when it was dropped."
    for thing, name in (model, "a model"), (k3lib.Checkpoint(MODEL), "a Checkpoint"):
        refused(lambda: copied(thing), f"{name} holds open files", str(MODEL))
    model.reset()
    assert len(list(model.generate([1], 1))) == 1


@pytest.mark.parametrize("path", ["s\ud800t", "no folder/state", str(MODEL / "state")], ids=ascii)
def test_a_state_that_has_no_place(path, model):
    model.reset()
    model.prefill([1])
    with pytest.raises(k3lib.K3Error, match="can encode|there is no folder|never written to"):
        model.save_state(path)
    assert not (MODEL / "state").exists()
