# %% [markdown]
# # 5.31 One whole run
#
# `k3 decode` is seven steps in a line: encode, plan, load, decode, save, show, report. Their order matters. What can be
# refused is refused before anything large is read. Results are on the disk before they are shown. The peak of memory is
# read after the last step that takes any. At the end you can start a run with one call, interrupt it at any moment, and
# find what it has made.
#
# Needs chapters 5.18, 5.21, 5.26, 5.29 and 5.30. Runs in seconds.
#
# [5.30 Results on the disk before the run has ended](30_results.ipynb) ·
# [contents](../README.md) ·
# [5.32 The dial: one model, any budget](32_decode.ipynb)

# %%
import json
import tempfile
from pathlib import Path

import numpy as np

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
ORACLE = ROOT / "fixtures" / "oracle13"
EXPECTED = json.loads((ORACLE / "expected.json").read_text())

# %% [markdown]
# ## 5.31.1 A prompt of any length
#
# A prompt is a list of ids, a text, or the bytes of a file. A file may be longer than memory. So it is read a megabyte
# at a time, encoded a part at a time (5.21.5), and its ids are kept as four bytes each. Each id will need a position of
# the KV cache, and a budget has room for only so many of those. As soon as there are more ids, the prompt is refused: a
# file of a terabyte is refused as soon, and in as little memory, as one that is a page too long.

# %% tags=["export"]
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from k3lib.config import Config, read_config
from k3lib.display import Display, progress_bar, with_bar
from k3lib.engine import Engine, budget_argument, check_vocabulary, load
from k3lib.fileio import MissingFile, UsageError, shown_value
from k3lib.memory import whole_number
from k3lib.plan import position_bytes
from k3lib.results import Results, blocks
from k3lib.report import Report
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


def parse_ids(text: str) -> list[int]:
    "Token ids from '1,2,3'. Raises UsageError, which shows the word that is no id."
    ids = []
    for word in str(text).replace(" ", "").split(","):
        if not word.isdecimal() or len(word) > 18:
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


def given_ids(path: str | os.PathLike[str], config: Config, ids: str | None,
              prompt: str | bytes | Iterable[bytes] | None, budget: int) -> Sequence[int]:
    "The ids of a run's prompt, given as `ids` ('1,2,3') or as `prompt`; the other one is None. Raises UsageError."
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
# ## 5.31.2 Decode, save, show
#
# Each token is shown as it comes. The ids and the text of the whole answer are shown at the end, a few thousand tokens
# at a time, so that nothing in memory grows with the answer but the records of its steps (5.25.1).

# %% tags=["export"]
Show = Callable[..., object]  # called as print is: with text, and perhaps with end=""


def show_ids(show: Show, label: str, ids: Iterable[int]) -> None:
    "Show 'label: 1,2,3' as one line."
    line = f"{label}: "
    for n, block in enumerate(blocks(ids)):
        if n:
            show(line + ",", end="")
            line = ""
        line += ",".join(map(str, block))
    show(line)


def show_text(show: Show, label: str, tokenizer: Tokenizer, ids: Iterable[int]) -> None:
    "Show the text of `ids` as one line: a Python literal, or several with spaces between where it is long."
    line, stream, text = f"{label}: ", tokenizer.stream(), None
    for block in blocks(ids):
        if text is not None:
            show(f"{line}{text!r} ", end="")
            line = ""
        text = "".join(map(stream.feed, block))
    show(f"{line}{(text or '') + stream.finish()!r}")


# %% tags=["export"]
def generate(model: Engine, ids: Sequence[int], max_new_tokens: int, show: Show, results: Results) -> None:
    "Decode with a bar that counts layers, show each token and its text as they come, and fill `results`."
    passes, layers = -(-len(ids) // model.chunk) + max_new_tokens - 1, model.config.num_hidden_layers
    stream = model.tokenizer.stream() if model.tokenizer else None
    with progress_bar(passes * layers, "layer") as bar:
        above = with_bar(show, bar)

        def layer_done(L):
            bar.update()
            if L == layers - 1:
                results.end_pass()

        model.on_layer, model.experts.on_request = layer_done, results.request
        show_ids(above, "prompt ids", ids)
        for n, token in enumerate(model.generate(ids, max_new_tokens, on_logits=results.row), 1):
            line = f"{n:>4}: id {token}, {model.steps[-1].seconds:.3g} s"
            if stream is not None and token not in model.stop:
                line += f", {stream.feed(token)!r}"
            above(line)


# %% [markdown]
# A run can end in the middle: by a signal, by damage that only a forward pass finds, by a full disk. Then what has been
# made is saved, and the error says what the files hold. `finished` in the report tells such a run from one that reached
# its last token. A signal becomes an `Interrupted`, whose text says how far the run came.

# %% tags=["export"]
class Interrupted(KeyboardInterrupt):
    "A signal has ended a command. The text says how far the command came."


MOST_NAMED = 1000  # ids in an error message: all of them have been shown


def finish(model: Engine, ids: Sequence[int], max_new_tokens: int, show: Show, results: Results) -> Report:
    "generate(), then save, show the answer and the report. After an error, save what there is, and say so."
    finished = False
    results.tree = lambda: {"finished": finished, **model.report.tree()} if len(model.steps) else None
    try:
        generate(model, ids, max_new_tokens, show, results)
        finished = True
        results.save()
        show_ids(show, "generated ids", (step.token for step in model.steps))
        if model.tokenizer is not None:
            answer = (step.token for step in model.steps if step.token not in model.stop)
            show_text(show, "generated text", model.tokenizer, answer)
        report = model.report
        show(report.text())
        return report
    except BaseException as error:
        made, kept = len(model.steps), results.keep()
        if not isinstance(error, KeyboardInterrupt):
            for line in kept:
                error.add_note(line)
            raise
        named = ",".join(str(model.steps[n].token) for n in range(min(made, MOST_NAMED)))
        tokens = (f", the first {MOST_NAMED}" * (made > MOST_NAMED) + f": {named}") * bool(made)
        raise Interrupted("; ".join([f"after {made} of {max_new_tokens} tokens{tokens}", *kept])) from None


# %% tags=["export"]
def shown_load(path: str | os.PathLike[str], show: Show, **options: Any) -> Engine:
    "Load the model. `show` is called with its plan, and a bar grows while the trunk is pinned. Raises what load does."
    with progress_bar(None, "B", desc="pinning", unit_scale=True) as pinning:
        above = with_bar(show, pinning)
        return load(path, progress=pinning.update, on_plan=lambda plan: above(plan.text()), **options)


def decode(
    path: str | os.PathLike[str], ids: str | None = None, prompt: str | bytes | Iterable[bytes] | None = None, *,
    max_new_tokens: int | str = 8, ram: int | str = "8GB", show: Show | None = None, results: Results | None = None,
    **options: Any,
) -> Report:
    """One whole run: encode, plan, load, decode greedily, save, show, report.

    `ids` '1,2,3' or `prompt`: text, bytes, or bytes in blocks. `show` is called with the text of the plan, the prompt,
    each token as it comes, all ids and their text, and the report; None is standard output, as far as it can be
    written. `results`: the files to write. `options`: trunk, threads, readers of `load`. Raises what `load` and forward
    passes raise, and Interrupted with the tokens so far. In the notes of any other error are sentences that say what
    the files hold.
    """
    show = Display(goes_on=True) if show is None else show
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, 1, 1 << 20)
    config, budget = read_config(path), budget_argument(ram)
    numbers = given_ids(path, config, ids, prompt, budget)
    context = len(numbers) + max_new_tokens
    with shown_load(path, show, ram=budget, context=context, prompt_tokens=len(numbers), **options) as model:
        return finish(model, numbers, max_new_tokens, show, results or Results())


# %% [markdown]
# ## 5.31.3 The gate
#
# A run to its end: the twenty known ids, a row of logits for each, and a report whose peak is that of the whole
# process.

# %%
PROMPT = ",".join(map(str, EXPECTED["prompt_ids"]))


def quiet(*text, **how):
    "Shows nothing."


with tempfile.TemporaryDirectory() as scratch:
    logits, record = Path(scratch, "l.npy"), Path(scratch, "r.json")
    report = decode(ORACLE / "model", PROMPT, max_new_tokens=20, ram="1GB", show=quiet,
                    results=Results(logits, report=record))
    rows, tree = np.load(logits), json.loads(record.read_text())
print("finished:", tree["finished"], "- rows of logits:", rows.shape, "- the known ids:", report.ids[:4], "...")
assert report.ids == tree["ids"] == rows.argmax(1).tolist() == EXPECTED["generated_ids"] and tree["finished"]


# %% [markdown]
# The same run, interrupted when its fourth token is shown.

# %%
def interrupt_at(word):
    def show(text, **how):
        if word in text:
            raise KeyboardInterrupt
    return show


with tempfile.TemporaryDirectory() as scratch:
    logits, record = Path(scratch, "l.npy"), Path(scratch, "r.json")
    try:
        decode(ORACLE / "model", PROMPT, max_new_tokens=20, ram="1GB", show=interrupt_at("   4: id"),
               results=Results(logits, report=record))
    except Interrupted as error:
        print(str(error).replace(f"{scratch}/", ""))
    tree = json.loads(record.read_text())
    assert not tree["finished"] and tree["ids"] == EXPECTED["generated_ids"][:4]
    assert np.array_equal(np.load(logits), rows[:4])

# %% [markdown]
# ## Summary
#
# - A prompt is refused as soon as its ids need more positions than the budget can hold.
# - Files are complete and named before the answer is shown. What was made before an error is kept.
# - A report that says `finished` is that of a run which made all its tokens.
#
# ## Exercises
#
# 1. Call `show_text` for two thousand tokens, whose thousand and twenty-fourth ends in the middle of a character. What
#    stands at the end of the first literal?
# 2. Interrupt a run while it writes its report. Is `finished` true in the report that is found?
#
# Next: [5.32 The dial: one model, any budget](32_decode.ipynb).
