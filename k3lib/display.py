"""5.29 Showing must not cost the result

Made from book/05_streaming/29_display.py: edit that, then run `make export`.
"""

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


__all__ = [
    "escaped", "OutputLost", "Display", "Unfailing", "complain", "progress_bar", "hidden", "with_bar",
]
