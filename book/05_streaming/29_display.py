# %% [markdown]
# # 5.29 Showing must not cost the result
#
# A run of a day ends with a line on the screen, and writing that line can fail: the reader of a pipe has gone, a device
# is full, a terminal cannot encode a character that the model has chosen. None of that is a fault of the run. After
# this chapter you can write to standard output and standard error so that every character appears in some form, and so
# that a failure of the display is noticed, named, and costs nothing but the display.
#
# Needs chapter 5.2 (errors). Runs in seconds.
#
# [5.28 A checkpoint without the weights](28_synth.ipynb) ·
# [contents](../README.md) ·
# [5.30 Results on the disk before the run has ended](30_results.ipynb)
#
# ## 5.29.1 Characters that an output cannot encode
#
# A stream has an encoding. It follows from the locale or from `PYTHONIOENCODING`, and often it is not UTF-8. Python
# raises an error for a character that the encoding lacks. The replacement character U+FFFD, which stands for half a
# character of a model's answer, is missing from every encoding but Unicode's. So such a character is written as its
# escape, `\ufffd`. The same holds for a file name that is not UTF-8: Python keeps its bytes as lone surrogates, which
# no encoding has.

# %% tags=["export"]
import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TextIO

from k3lib.fileio import K3Error


def escaped(text: str, stream: TextIO) -> str:
    "`text` with the characters that `stream` cannot encode written as escapes, like \\xe9 and \\ufffd."
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# %%
import io

for encoding in "utf-8", "latin-1", "ascii", "utf-16", "shift_jis":
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    stream.write(escaped("café 世界 \ufffd, model\udcff.npy", stream))
    stream.flush()
    print(f"{encoding:10}", stream.buffer.getvalue().decode(encoding))

# %% [markdown]
# Without the escape the third line would have been an exception, as it is here:

# %% tags=["raises-exception"]
io.TextIOWrapper(io.BytesIO(), "ascii").write("café")


# %% [markdown]
# ## 5.29.2 An output that is lost
#
# Where nobody can read the answer, an exit code of 0 would be a lie. What should happen before that depends on what was
# asked for. If the answer is only shown, the run should end soon: each further token is computed for nobody. If files
# were asked for too, they are the result, and the run goes on without its display. In both cases the command ends with
# exit code 1, and with a line that names what was lost.
#
# Standard error is never worth ending a command for: what it would have carried is lost, and that is all.

# %% tags=["export"]
class OutputLost(K3Error):
    "Standard output cannot be written to. The command has failed, because what it showed is lost."


class Display:
    """Standard output as a function: `display(text, end="\\n")` writes `text` at once. It raises no OSError.

    `goes_on`: the command makes files, so it goes on if the output is lost. `lost`: None, or why the output is lost.
    """

    def __init__(self, goes_on: bool):
        self.goes_on = goes_on
        self.lost = None if sys.stdout is not None else "standard output is closed"

    def __call__(self, text: str, end: str = "\n") -> None:
        "Show `text`. Raises OutputLost if that fails and the command has nothing else to do."
        if self.lost is None:
            try:
                print(escaped(text, sys.stdout), end=end, flush=True)
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self.lost = f"standard output cannot be written: {getattr(error, 'strerror', None) or error}"
        self.check()

    def check(self) -> None:
        "Raise OutputLost if the output is lost and the command has nothing else to do."
        if self.lost is not None and not self.goes_on:
            raise OutputLost(self.lost)

    def end(self) -> None:
        "To be called when the command has done its work. Raises OutputLost if the output is lost."
        if self.lost is not None:
            raise OutputLost(f"{self.lost}; everything else is done")


# %% tags=["export"]
class Unfailing:
    "The text file `file` without its errors: what cannot be written is lost, and what cannot be encoded is escaped."

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.write(escaped(text, self._file))

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def complain(text: str) -> None:
    "Write a line to standard error, if there is one. Never raises."
    if sys.stderr is not None:
        print(text, file=Unfailing(sys.stderr), flush=True)


# %% [markdown]
# A pipe whose reader leaves after one line, once for a command that only shows, once for one that makes files:

# %%
class Closing(io.StringIO):
    "A terminal or pipe that is closed after `left` calls of write."
    def __init__(self, left):
        super().__init__()
        self.left = left

    def isatty(self):
        return True

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def shown(goes_on):
    "What a Display says of such a pipe, and how many of five lines it was asked to show."
    tried = 0
    with contextlib.redirect_stdout(Closing(2)):  # a line and its end
        display = Display(goes_on)
        try:
            for tried in range(1, 6):
                display(f"line {tried}")
            display.end()
        except OutputLost as error:
            return str(error), tried


print(shown(False), shown(True), sep="\n")
assert shown(False)[1] == 2 and shown(True)[1] == 5


# %% [markdown]
# ## 5.29.3 Progress
#
# A bar on standard error counts bytes or layers. A line that is shown meanwhile must not stand in the middle of the
# bar, so the bar is taken off the screen for it. The bar writes through `Unfailing`: a terminal that was closed does
# not end the run.

# %% tags=["export"]
def progress_bar(total: int | None, unit: str, **options: Any) -> Any:
    "A tqdm bar on stderr where that is a terminal, else one that shows nothing."
    from tqdm import tqdm

    if sys.stderr is None or not sys.stderr.isatty():
        return tqdm(total=total, unit=unit, disable=True, **options)
    return tqdm(total=total, unit=unit, leave=False, file=Unfailing(sys.stderr), **options)


def hidden(bar: Any) -> AbstractContextManager:
    "A `with` block in which the bar is off the screen."
    return bar.external_write_mode(getattr(bar, "fp", None))


def with_bar(show: Callable[..., object], bar: Any) -> Callable[..., object]:
    "show(text, end) for the time in which `bar` is on the screen."
    def above(text, **how):
        with hidden(bar):
            show(text, **how)
    return above


# %%
with contextlib.redirect_stderr(Closing(3)) as terminal, progress_bar(100, "layer", mininterval=0) as bar:
    for _ in range(100):
        bar.update()
print("written until the terminal closed:", len(terminal.getvalue()) > 0, "- counted to the end:", bar.n)
assert bar.n == 100 and terminal.left < 0

# %% [markdown]
# ## Summary
#
# - What an output cannot encode is written as an escape, whatever the locale says.
# - A lost standard output ends a command that has nothing else to do, and is reported by one that has.
# - Standard error and progress bars cannot end a command.
#
# ## Exercises
#
# 1. Let `Display` use the error handler `"replace"`. Which two different outputs look the same then?
# 2. A pipe is closed by its reader after the last line was written, and before the command has ended. Does the command
#    notice? Should it?
#
# Next: [5.30 Results on the disk before the run has ended](30_results.ipynb).
