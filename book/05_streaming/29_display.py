# %% [markdown]
# # 5.29 Showing must not cost the result
#
# A run of a day ends with a line on the screen, and writing that line can fail: the reader of a pipe has gone, a device
# is full, a terminal cannot encode a character that the model has chosen. None of that is a fault of the run. After
# this chapter you can write to standard output and standard error so that every character appears in some form, and so
# that a failure of the display is noticed, named, and costs nothing but the display.
#
# Needs chapter [5.2] (errors). Runs in seconds.
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
#
# [5.2]: 02_fileio.ipynb

# %% tags=["export"]
import contextlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TextIO

from k3lib.fileio import K3Error


def escaped(text: str, stream: TextIO) -> str:
    "`text` with the characters that `stream` cannot encode written as escapes, like \\xe9 and \\ufffd."
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def printable(text: str) -> str:
    "`text` as one line: control characters are written as escapes. A path may hold them, and a terminal obeys them."
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text)


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
# exit code 1, and with a line that names what was lost. Only a reader who has closed the pipe, as `head` does after its
# last line, gets no such line: that reader has seen what it wanted. Text need not end a line; where a line of standard
# error may follow it on the screen, the text's line is ended first.
#
# Standard error is never worth ending a command for: what it would have carried is lost, and that is all.

# %% tags=["export"]
class OutputLost(K3Error):
    "Standard output cannot be written to. The command has failed, because what it showed is lost."


class ReaderLeft(OutputLost):
    "The reader of standard output has closed it."


def is_terminal(stream: TextIO | None) -> bool:
    "Is there such a stream, and is it a terminal? One that is closed is none."
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def _is_shared(stdout):
    "Do lines of standard error stand among those of standard output: on a terminal, in one file or pipe?"
    try:
        return is_terminal(stdout) or os.path.sameopenfile(stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # one of them is closed, or has no descriptor
        return False


# %% tags=["export"]
class Display:
    """Standard output as a function: `display(text, end="\\n")` writes `text` at once. It raises no OSError.

    `goes_on`: the command makes files, so it goes on if the output is lost. `lost`: None, or why the output is lost.
    """

    def __init__(self, goes_on: bool):
        self.goes_on = goes_on
        self.lost = None if sys.stdout is not None else "standard output is closed"
        self._error: type[OutputLost] = OutputLost
        self._shared = _is_shared(sys.stdout)
        self._in_line = False  # whether the last text has left a shared output within a line

    def __call__(self, text: str, end: str = "\n") -> None:
        "Show `text`. Raises OutputLost if that fails and the command has nothing else to do."
        if self.lost is None:
            try:
                print(escaped(text, sys.stdout), end=end, flush=True)
                if text + end:
                    self._in_line = self._shared and not (text + end).endswith("\n")
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                self._error = ReaderLeft if isinstance(error, BrokenPipeError) else OutputLost
                self.lost = f"standard output cannot be written: {getattr(error, 'strerror', None) or error}"
        self.check()


# %% tags=["export"]
class Display(Display):
    def end_line(self) -> None:
        "End a line that the last text has not ended, where other lines may follow it. Raises as a call does."
        if self._in_line:
            self("")

    def check(self) -> None:
        "Raise OutputLost if the output is lost and the command has nothing else to do."
        if self.lost is not None and not self.goes_on:
            raise self._error(self.lost)

    def end(self) -> None:
        "To be called when the command has done its work. Raises OutputLost if the output is lost."
        if self.lost is not None:
            raise self._error(f"{self.lost}; everything else is done")


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


def complain(text: str, end: str = "\n") -> None:
    "Write `text` to standard error, if there is one. Never raises."
    if sys.stderr is not None:
        print(text, end=end, file=Unfailing(sys.stderr), flush=True)


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
#
# A line is over when it is shown, and the bar comes back below it. A word of an answer is not the end of a line: where
# standard output is a terminal, the bar would come back on the same line and write over the word. So there the bar goes
# with the first word.

# %% tags=["export"]
def progress_bar(total: int | None, unit: str, shown: bool = True, **options: Any) -> Any:
    "A tqdm bar on stderr where that is a terminal, and `shown` is true, else one that shows nothing."
    from tqdm import tqdm

    quiet = type("Bar", (tqdm,), {"monitor_interval": 0})  # tqdm's own thread would take 72 MB of addresses
    if not shown or not is_terminal(sys.stderr):
        return quiet(total=total, unit=unit, disable=True, **options)
    return quiet(total=total, unit=unit, leave=False, file=Unfailing(sys.stderr), **options)


def close_at_words(bar: Any) -> None:
    "Take `bar` off the screen for good, if the words that follow on standard output go to a terminal."
    if is_terminal(sys.stdout):
        bar.close()


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
