"""5.29 Showing must not cost the result

Made from book/05_streaming/29_display.py: edit that, then run `make export`.
"""

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


__all__ = [
    "escaped", "printable", "OutputLost", "ReaderLeft", "is_terminal", "Display", "Unfailing", "complain",
    "progress_bar", "close_at_words", "hidden", "with_bar",
]
