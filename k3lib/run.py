"""5.31 One whole run

Made from book/05_streaming/31_run.py: edit that, then run `make export`.
"""

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


__all__ = [
    "file_blocks", "parse_ids", "prompt_ids", "given_ids", "Show", "show_ids", "show_text", "generate",
    "Interrupted", "MOST_NAMED", "finish", "shown_load", "decode",
]
