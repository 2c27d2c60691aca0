# %% [markdown]
# # 5.31 One whole run
#
# `k3 decode` is seven steps in a line: encode, plan, load, decode, save, show, report. Their order matters. What can be
# refused is refused before anything large is read. Results are on the disk before they are shown. The peak of memory is
# read after the last step that takes any. At the end you can start a run with one call, interrupt it at any moment, and
# find what it has made.
#
# Needs chapters [5.18], [5.21], [5.26], [5.29] and [5.30]. Runs in seconds.
#
# [5.30 Results on the disk before the run has ended](30_results.ipynb) ·
# [contents](../README.md) ·
# [5.32 A conversation that goes on tomorrow](32_conversation.ipynb)
#
# [5.18]: 18_plan.ipynb
# [5.21]: 21_tokenizer.ipynb
# [5.26]: 26_engine.ipynb
# [5.29]: 29_display.ipynb
# [5.30]: 30_results.ipynb

# %%
import json
import tempfile
from pathlib import Path

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
ORACLE = ROOT / "fixtures" / "oracle13"
EXPECTED = json.loads((ORACLE / "expected.json").read_text())

# %% [markdown]
# ## 5.31.1 A prompt of any length
#
# A prompt is a list of ids, a text, or the bytes of a file. A file may be longer than memory. So it is read a megabyte
# at a time, encoded a part at a time ([5.21.5]), and its ids are kept as four bytes each. Each id will need a position
# of the KV cache, and a budget has room for only so many of those. As soon as there are more ids, the prompt is
# refused: a file of a terabyte is refused as soon, and in as little memory, as one that is a page too long.
#
# [5.21.5]: 21_tokenizer.ipynb#5.21.5-Very-long-texts

# %% tags=["export"]
import dataclasses
import os
import re
import sys
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from k3lib.config import Config, read_config
from k3lib.display import Display, close_at_words, complain, hidden, progress_bar, with_bar
from k3lib.engine import Engine, budget_argument, check_vocabulary, load
from k3lib.fileio import MissingFile, UsageError, shown_value
from k3lib.memory import shown_size, whole_number
from k3lib.plan import position_bytes
from k3lib.reply import TextStream
from k3lib.results import Results, blocks
from k3lib.report import Report
from k3lib.sampling import Sampling, log_probabilities, logprobs
from k3lib.state import PrefixCache, StateError, description, state_file_bytes
from k3lib.tokenizer import Tokenizer, open_tokenizer, slices


def file_blocks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    "The bytes of a regular file, a megabyte at a time. Raises MissingFile, and OSError, which names the file."
    if not os.path.isfile(path):
        raise MissingFile(f"{path}: {'is no regular file' if os.path.exists(path) else 'no such file'}")
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                yield block
    except OSError as error:
        raise OSError(error.errno, f"{path}: cannot be read: {error.strerror}") from None


# %% tags=["export"]
def stdin_blocks() -> Iterator[bytes]:
    "The bytes of standard input up to its end, in blocks. Raises UsageError if it is closed, and OSError."
    if sys.stdin is None:
        raise UsageError("standard input is closed, but the prompt should be read from it")
    while block := sys.stdin.buffer.read(1 << 20):
        yield block


def parse_ids(text: str) -> list[int]:
    "Token ids from '1,2,3' or '1 2 3'. Raises UsageError, which shows the word that is no id."
    ids = []
    for word in re.split(r"\s*,\s*|\s+", str(text).strip()):
        if not (word.isascii() and word.isdecimal()) or len(word) > 18:
            raise UsageError(f"ids: {shown_value(word)} is not a token id: write them like 1,2,3")
        ids.append(int(word))
    return ids


# %% tags=["export"]
def prompt_ids(tokenizer: Tokenizer, prompt: str | bytes | Iterable[bytes], most: int) -> array:
    """The ids of `prompt`, text or bytes or bytes in blocks, as an array of uint32. Raises UsageError.

    A prompt of more than `most` ids is refused as soon as that is known. The encoder is dropped before this returns, so
    its memory is free when the plan is made.
    """
    ids = array("I")
    if isinstance(prompt, str):
        encoded = iter([tokenizer.encode(prompt)])
    else:
        encoded = tokenizer.encode_blocks(slices(prompt) if isinstance(prompt, bytes) else prompt)
    for part in encoded:
        ids.extend(part)
        if len(ids) > most:
            raise UsageError(f"the prompt has more than {most:,} tokens, and the budget has no room for the KV cache "
                             "of more positions")
    tokenizer.drop_encoder()
    return ids


# %% tags=["export"]
def given_ids(path: str | os.PathLike[str], config: Config, ids: str | None,
              prompt: str | bytes | Iterable[bytes] | None, budget: int, state: bool = False) -> Sequence[int]:
    """The ids of a run's prompt, given as `ids` ('1,2,3') or as `prompt`; the other one is None. Raises UsageError.

    `state`: the run begins after a saved state, so neither need be given.
    """
    if ids is None and prompt is None and state:
        return []
    if (ids is None) == (prompt is None):
        raise UsageError("give a prompt or ids: exactly one of the two")
    if ids is not None or prompt is None:
        numbers: Sequence[int] = parse_ids(ids or "")
    else:
        tokenizer = open_tokenizer(path, config)
        if tokenizer is None:
            raise UsageError(f"{path}: holds no tiktoken.model, so a text prompt cannot be encoded: give ids")
        numbers = prompt_ids(tokenizer, prompt, max(1, budget // max(4, position_bytes(config))))
    if not numbers:
        raise UsageError("the prompt is empty: at least one token id is needed")
    check_vocabulary(numbers, config)  # before gigabytes are read
    return numbers


# %%
tokenizer, file = Tokenizer(ORACLE / "model", 512), ROOT / "LICENSE"
whole = tokenizer.encode(file.read_bytes())
assert prompt_ids(tokenizer, file_blocks(file), 10**6).tolist() == whole
print(f"{file.stat().st_size} bytes of LICENSE: {len(whole)} ids")


def endless():
    "A file without an end."
    while True:
        yield b"All work and no play makes Jack a dull boy. " * 1000


try:
    prompt_ids(tokenizer, endless(), 100_000)
except UsageError as error:
    print("a file without an end:", error)

# %% [markdown]
# ## 5.31.2 What is asked for, and what comes
#
# The answer is for whoever asked: a person who reads along, or a program that reads a pipe. So standard output carries
# the text that was generated, as it comes, and nothing else. Plan, progress and report are about the run, and go to
# standard error. A model without a vocabulary has no text; then the ids stand for it, `1,2,3`, a form in which `k3
# decode` takes them back.

# %% tags=["export"]
Show = Callable[..., object]  # called as print is: with text, and perhaps with end=""


class Request(NamedTuple):
    "What a run is asked for. `logprobs`: how many of the likeliest ids are told for each token, or None."
    ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop_texts: tuple[str, ...] = ()
    logprobs: int | None = None


class IdStream:
    "As TextStream, for a model without a vocabulary: its text is the ids, 1,2,3, and a line end."

    def __init__(self, stop: Container[int]):
        self._stop, self._comma = stop, ""
        self.ended: str | None = None

    def feed(self, token_id: int) -> str:
        "The id, after a comma if it is not the first."
        text, self._comma = f"{self._comma}{token_id}", ","
        self.ended = "stop_id" if token_id in self._stop else None
        return text

    def finish(self) -> str:
        "The end of the line."
        return "\n"


def text_stream(model: Engine, stop_texts: Sequence[str]) -> TextStream | IdStream:
    "A new stream of what `model` generates. Raises UsageError for stop texts that are empty or cannot be found."
    if model.tokenizer is None and stop_texts:
        raise UsageError(f"stop is {stop_texts[0]!a}: {model.source.path} holds no tiktoken.model, so ids have no text")
    if not all(stop_texts):
        raise UsageError("stop is empty: a text is needed")
    return TextStream(model.tokenizer, model.stop, stop_texts) if model.tokenizer else IdStream(model.stop)


# %% tags=["export"]
def show_ids(show: Show, label: str, ids: Iterable[int]) -> None:
    "Show 'label: 1,2,3' as one line."
    line = f"{label}: "
    for n, block in enumerate(blocks(ids)):
        if n:
            show(line + ",", end="")
            line = ""
        line += ",".join(map(str, block))
    show(line)


def told_logprobs(logits: np.ndarray, token: int, n: int) -> dict[str, Any]:
    "The logarithm of the probability of `token`, and those of the `n` likeliest ids. `logits`: float32 [vocab]."
    return {"logprob": float(log_probabilities(logits)[token]),
            "top": [{"id": i, "logprob": value} for i, value in logprobs(logits, n)]}


# %% [markdown]
# `Run` keeps what the report needs besides the engine's own records. Nothing in memory grows with the answer but the
# records of its steps ([5.25.1]) and, if they were asked for, the log probabilities. The whole text is made from the
# ids when the report is written.
#
# [5.25.1]: 25_report.ipynb#5.25.1-A-step-in-36-bytes

# %% tags=["export"]
class Run:
    "A run as it goes. `stop_reason`: None, then stop_id, stop_text or length. `finished`: has it reached its end?"

    def __init__(self, model: Engine, request: Request, results: Results, unread: Sequence[int]):
        "`unread`: the ids that the model is to read; those of the prompt, and perhaps one before."
        self.model, self.request, self.results, self.unread = model, request, results, unread
        self.finished = False
        self.stop_reason: str | None = None
        self.logprobs: list[dict[str, Any]] = []
        self._logits: np.ndarray | None = None
        self.stream = text_stream(model, request.stop_texts)

    def tree(self) -> dict[str, Any] | None:
        "The report with what was asked and answered, as write_json takes it; None before the first token."
        model, request = self.model, self.request
        if not len(model.steps):
            return None
        told = {"logprobs": iter(self.logprobs)} if request.logprobs is not None else {}
        sampling = None if request.sampling.greedy else dataclasses.asdict(request.sampling)
        return {"finished": self.finished, "stop_reason": self.stop_reason, "prompt_ids": iter(request.ids),
                "text": self.text(), "sampling": sampling, **model.report.tree(), **told}

    def text(self) -> str | None:
        "All that was generated, as text; None without a vocabulary."
        if self.model.tokenizer is None:
            return None
        stream = text_stream(self.model, self.request.stop_texts)
        return "".join(stream.feed(step.token) for step in self.model.steps) + stream.finish()


# %% tags=["export"]
class Run(Run):
    def row(self, logits: np.ndarray) -> None:
        "The logits of a step, float32 [vocab]."
        self.results.row(logits)
        self._logits = logits if self.request.logprobs is not None else None

    def token(self, n: int, token: int) -> str:
        "Token number `n`: the text that it adds."
        text, told, logits, self._logits = self.stream.feed(token), {}, self._logits, None
        if self.request.logprobs is not None and logits is not None:
            told = told_logprobs(logits, token, self.request.logprobs)
            self.logprobs.append(told)
        self.results.event({"event": "token", "n": n, "id": token, "text": text,
                            "seconds": self.model.steps[-1].seconds, **told})
        return text

    def end(self) -> str:
        "After the last token: the text that has waited."
        text = self.stream.finish()
        self.finished, self.stop_reason = True, self.stream.ended or "length"
        self.results.event({"event": "end", "stop_reason": self.stop_reason, "tokens": len(self.model.steps),
                            "text": text})
        return text


# %% [markdown]
# A run may begin where another has ended: with a saved state, or with the longest prefix of its prompt that is in a
# folder of states ([5.20.6]). A damaged state in that folder costs no run. It is removed, which is said, and the next
# longest prefix is taken.
#
# [5.20.6]: 20_state.ipynb#5.20.6-Prompts-that-begin-alike

# %% tags=["export"]
def load_prefix(model: Engine, cache: PrefixCache, ids: Sequence[int], show: Show) -> int:
    "Load the state of the longest prefix of `ids` that is kept. Returns how many ids it has read, 0 if there is none."
    while found := cache.longest(model.fingerprint(), ids):
        try:
            model.load_state(found[0])
            cache.used(found[0])
            show(f"{found[1]} of {len(ids)} prompt tokens have been read before: {found[0]}")
            return found[1]
        except StateError as error:
            found[0].unlink(missing_ok=True)
            model.reset()
            show(f"{error}: removed")
    return 0


def read_prefix(model: Engine, cache: PrefixCache, ids: Sequence[int], read: int, show: Show) -> int:
    "Read `ids`, of which `read` have been read, up to the last one, and keep the state. Returns how many are read now."
    if read < len(ids) - 1:
        model.prefill(ids[read:-1])
        nbytes = state_file_bytes(model.sequence)
        if cache.room(nbytes):
            model.save_state(cache.name(model.fingerprint(), ids[:-1]))
        else:
            show(f"{cache.folder}: a state of {shown_size(nbytes)} is not kept in {shown_size(cache.most)}")
    return len(ids) - 1


# %% tags=["export"]
def generate(run: Run, show: Show, write: Show, cache: PrefixCache | None, bars: bool) -> None:
    "Decode with a bar that counts layers, write the text as it comes, and fill the results."
    model, request, results = run.model, run.request, run.results
    layers = model.config.num_hidden_layers
    read = 0 if cache is None else load_prefix(model, cache, request.ids, show)
    passes = -(-(len(run.unread) - read) // model.chunk) + request.max_new_tokens - 1
    with progress_bar(passes * layers, "layer", bars) as bar:

        def layer_done(L):
            bar.update()
            if L == layers - 1:
                results.end_pass()

        model.on_layer, model.experts.on_request = layer_done, results.request
        show_ids(with_bar(show, bar), "prompt ids", request.ids)
        results.event({"event": "prompt", "tokens": len(request.ids)})
        if cache is not None:
            read = read_prefix(model, cache, request.ids, read, show)
        ids = model.generate(run.unread[read:], request.max_new_tokens, run.row, request.sampling)
        for n, token in enumerate(ids, 1):
            text = run.token(n, token)
            close_at_words(bar)
            with hidden(bar):
                write(text, end="")
            if run.stream.ended:
                break
    write(run.end(), end="")


# %% [markdown]
# A run can end in the middle: by a signal, by damage that only a forward pass finds, by a full disk. Then what has been
# made is saved, and the error says what the files hold. `finished` in the report tells such a run from one that reached
# its last token. A signal becomes an `Interrupted`, whose text says how far the run came.

# %% tags=["export"]
class Interrupted(KeyboardInterrupt):
    "A signal has ended a command. The text says how far the command came."


MOST_NAMED = 1000  # ids in an error message


def finish(run: Run, show: Show, write: Show, cache: PrefixCache | None = None,
           save_state: str | os.PathLike[str] | None = None, bars: bool = True) -> Report:
    "generate(), then save, show ids and report. After an error, save what there is, and say so."
    model, results = run.model, run.results
    results.tree = run.tree
    try:
        generate(run, show, write, cache, bars)
        failed = None
        try:
            results.save()
            if save_state is not None:
                model.save_state(save_state)
        except OSError as error:  # a disk that is full must not hide the answer
            failed = error
        show_ids(show, "generated ids", (step.token for step in model.steps))
        if failed is None:
            results.show()
        report = model.report
        show(report.text())
        if failed is not None:
            raise failed
        return report
    except BaseException as error:
        made, kept = len(model.steps), results.keep()
        if not isinstance(error, KeyboardInterrupt):
            for line in kept:
                error.add_note(line)
            raise
        named = ",".join(str(model.steps[n].token) for n in range(min(made, MOST_NAMED)))
        tokens = (f", the first {MOST_NAMED}" * (made > MOST_NAMED) + f": {named}") * bool(made)
        raise Interrupted("; ".join([f"after {made} of {run.request.max_new_tokens} tokens{tokens}", *kept])) from None


# %% tags=["export"]
MOST_LOGPROBS = 20


def quietly(*text: object, **how: object) -> None:
    "Shows nothing."


def shown_load(path: str | os.PathLike[str], show: Show, bars: bool = True, **options: Any) -> Engine:
    "Load the model. `show` is called with its plan, and a bar grows while the trunk is pinned. Raises what load does."
    with progress_bar(None, "B", bars, desc="pinning", unit_scale=True) as pinning:
        above = with_bar(show, pinning)
        return load(path, progress=pinning.update, on_plan=lambda plan: above(plan.text()), say=show, **options)


# %% tags=["export"]
def decode(
    path: str | os.PathLike[str], ids: str | None = None, prompt: str | bytes | Iterable[bytes] | None = None, *,
    max_new_tokens: int | str = 8, ram: int | str = "8GB", show: Show | None = None, write: Show | None = None,
    quiet: bool = False, results: Results | None = None, sampling: Sampling | None = None, stop: Sequence[str] = (),
    logprobs: int | str | None = None, load_state: str | os.PathLike[str] | None = None,
    save_state: str | os.PathLike[str] | None = None, cache: PrefixCache | None = None, **options: Any,
) -> Report:
    """One whole run: encode, plan, load, decode, save, report.

    `ids` '1,2,3' or `prompt`: text, bytes, or bytes in blocks; with `load_state` also neither. `write` gets the text as
    it comes; None is standard output, as far as it can be written. `show` gets plan, prompt ids, all ids and report;
    None is standard error, and nothing if `quiet`. `stop`: texts that end the answer. `load_state`, `save_state`: files
    of a state to begin after, and of that at the end. `options`: trunk, threads, readers of `load`. Raises what `load`
    and forward passes raise, and Interrupted with the tokens so far. In the notes of any other error are sentences that
    say what the files hold.
    """
    show = quietly if quiet else complain if show is None else show
    write = Display(goes_on=True) if write is None else write
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 1, 1 << 20)
    told = None if logprobs is None else whole_number("logprobs", logprobs, 0, MOST_LOGPROBS)
    config, budget = read_config(path), budget_argument(ram)
    before: dict[str, Any] = {"position": 0, "unread": None} if load_state is None else description(load_state)
    numbers = given_ids(path, config, ids, prompt, budget, load_state is not None)
    unread = numbers if before["unread"] is None else [before["unread"], *numbers]
    if not unread:
        raise UsageError(f"{load_state}: all that was generated has been read: give ids or a prompt to go on")
    context = before["position"] + len(unread) + max_new_tokens
    options |= {"ram": budget, "context": context, "prompt_tokens": len(unread)}
    with shown_load(path, show, not quiet, **options) as model:
        request = Request(numbers, max_new_tokens, sampling or Sampling(), tuple(stop), told)
        run = Run(model, request, results or Results(), unread)
        if load_state is not None:
            model.load_state(load_state)
            show(f"{load_state}: goes on after {model.position} tokens")
        return finish(run, show, write, cache, save_state, not quiet)


# %% [markdown]
# ## 5.31.3 The gate
#
# A run to its end: the twenty known ids, a row of logits for each, and a report whose peak is that of the whole
# process.

# %%
PROMPT = ",".join(map(str, EXPECTED["prompt_ids"]))


words: list[str] = []


def collect(text, end="\n"):
    words.append(text + end)


with tempfile.TemporaryDirectory() as scratch:
    logits, record = Path(scratch, "l.npy"), Path(scratch, "r.json")
    report = decode(ORACLE / "model", PROMPT, max_new_tokens=20, ram="1GB", quiet=True, write=collect,
                    results=Results(logits, report=record))
    rows, tree = np.load(logits), json.loads(record.read_text())
print("finished:", tree["finished"], "- rows of logits:", rows.shape, "- the known ids:", report.ids[:4], "...")
print("written as it came:", words[:6], "...")
assert "".join(words) == tree["text"] and tree["stop_reason"] == "length"
assert report.ids == tree["ids"] == rows.argmax(1).tolist() == EXPECTED["generated_ids"] and tree["finished"]


# %% [markdown]
# The same run, interrupted when the text of its fourth token is written.

# %%
def interrupt_at(call):
    calls = []

    def write(text, **how):
        calls.append(text)
        if len(calls) == call:
            raise KeyboardInterrupt
    return write


with tempfile.TemporaryDirectory() as scratch:
    logits, record = Path(scratch, "l.npy"), Path(scratch, "r.json")
    try:
        decode(ORACLE / "model", PROMPT, max_new_tokens=20, ram="1GB", quiet=True, write=interrupt_at(4),
               results=Results(logits, report=record))
    except Interrupted as error:
        print(str(error).replace(f"{scratch}/", ""))
    tree = json.loads(record.read_text())
    assert not tree["finished"] and tree["ids"] == EXPECTED["generated_ids"][:4]
    assert np.array_equal(np.load(logits), rows[:4])

# %% [markdown]
# The same run in two halves, the second of which begins with the state that the first has saved. And a prompt that
# begins like one before: only its new ids, and the last one before them, are read.

# %%
with tempfile.TemporaryDirectory() as scratch:
    state, ids = Path(scratch, "state"), EXPECTED["generated_ids"]
    half = decode(ORACLE / "model", PROMPT, max_new_tokens=10, ram="1GB", quiet=True, write=collect, save_state=state)
    rest = decode(ORACLE / "model", max_new_tokens=10, ram="1GB", quiet=True, write=collect, load_state=state)
    print("two halves, the same ids:", half.ids + rest.ids == ids)
    cache, said = PrefixCache(Path(scratch, "prefixes"), 10**8), []
    for prompt in PROMPT, f"{PROMPT},{ids[0]},{ids[1]}":
        report = decode(ORACLE / "model", prompt, ram="1GB", show=lambda text, **how: said.append(text), write=collect,
                        cache=cache)
    print(*(line.partition(":")[0] for line in said if "read before" in line), sep="\n")
    assert half.ids + rest.ids == ids and report.ids == ids[2:10]

# %% [markdown]
# ## Summary
#
# - A prompt is refused as soon as its ids need more positions than the budget can hold.
# - Files are complete and named before the answer is shown. What was made before an error is kept.
# - A report that says `finished` is that of a run which made all its tokens.
# - Standard output carries the answer alone. A run can begin where another has ended.
#
# ## Exercises
#
# 1. Stop a run with a text that ends in the middle of an id, save its state, and go on from there. What is the text of
#    both runs together?
# 2. Interrupt a run while it writes its report. Is `finished` true in the report that is found?
#
# Next: [5.34 The dial: one model, any budget](34_decode.ipynb).
