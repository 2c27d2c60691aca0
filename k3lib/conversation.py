"""5.32 A conversation that goes on tomorrow

Made from book/05_streaming/32_conversation.py: edit that, then run `make export`.
"""

import contextlib
import dataclasses
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from k3lib.chat import encode_chat, render
from k3lib.engine import Engine
from k3lib.fileio import MissingFile, UsageError, given_path, json_object, small_file
from k3lib.reply import Delta, Reply, ReplyParser, unread
from k3lib.results import write_json
from k3lib.sampling import Sampling
from k3lib.state import StateError
from k3lib.tokenizer import Tokenizer

FORMAT, VERSION = "k3lib conversation", 1
MAX_FILE_BYTES = 1 << 28
KEPT = 2  # snapshots: after the last turn, and after the one before it


class ConversationError(UsageError):
    "A conversation that cannot be opened or gone on with. One line: what was found, what was expected."


class Turn(NamedTuple):
    "The end of a turn: so many messages and ids. `state`: the name of its snapshot beside the file, or None."
    messages: int
    ids: int
    state: str | None


class Settings(NamedTuple):
    "What holds for a whole conversation. `system`: the text of a system message, or None. The others as in render()."
    system: str | None = None
    thinking: bool = True
    effort: str | None = None


class Conversation:
    """A conversation of `model`, whose sequence nobody else may use, in `file` or, if that is None, for this process.

    `messages` (dicts as in render()), `ids`, `turns`, `settings`. `last`: the Reply of the last turn, or None.
    `ids_of_reply`: how many it has. `read`: ids that were given to the model since this object was made, `again`: those
    of them that it had read before. `notes`: what a user would not expect. Raises ConversationError, MissingFile for a
    folder that does not exist, and what render() and the model raise.
    """

    def __init__(self, model: Engine, tokenizer: Tokenizer, file: str | os.PathLike[str] | None = None,
                 settings: dict[str, Any] | None = None, sampling: Sampling | None = None, most: int = 1024):
        "`settings`: fields of Settings that were given. `tokenizer`: that of the model. `most`: ids of a reply."
        self.model, self.tokenizer, self.most = model, tokenizer, most
        self.sampling = sampling or Sampling()
        self.attempt = 0  # of the last turn: retry() counts it up
        self.messages, self.ids, self.turns = list[dict[str, Any]](), list[int](), list[Turn]()
        self.last: Reply | None = None
        self.read, self.again, self.notes = 0, 0, list[str]()
        self.on_layer: Callable[[int], object] = lambda L: None
        self._stopping, self.ids_of_reply = False, 0
        self._scratch = tempfile.TemporaryDirectory(prefix="k3-") if file is None else None
        self.settings = Settings(**settings or {})
        self.file = given_path("file", file or Path(self._scratch.name if self._scratch else "", "talk")).absolute()
        if not self.file.parent.is_dir():
            raise MissingFile(f"{file}: there is no folder {self.file.parent} to keep the conversation in")
        self._begin(settings or {})

    def _begin(self, settings):
        "The conversation of the file, if there is one, and the sequence where it stands."
        if self.file.exists():
            self._open(settings)
        elif self.settings.system is not None:
            self.messages = [{"role": "system", "content": self.settings.system}]
        self._go_back(len(self.ids), "the state after the last turn cannot be used")

    def _open(self, settings):
        "Read the file. Raises ConversationError, also if it is another model's or has other settings."
        tree = json_object(small_file(self.file, MAX_FILE_BYTES, ConversationError), self.file, ConversationError)
        if tree.get("format") != FORMAT or tree.get("version") != VERSION:
            raise ConversationError(f"{self.file}: is no conversation of version {VERSION}")
        if tree.get("model") != self.model.fingerprint():
            raise ConversationError(f"{self.file}: a conversation with another model")
        try:
            self.messages, self.ids, self.attempt = list(tree["messages"]), list(tree["ids"]), int(tree["attempt"])
            self.turns, found = [Turn(**entry) for entry in tree["turns"]], Settings(**tree["settings"])
            good = all(type(i) is int and 0 <= i < self.tokenizer.vocab_size for i in self.ids)
            good &= all(turn.state is None or self._names(turn.state) for turn in self.turns)
            ends = [(0, 0), *((turn.messages, turn.ids) for turn in self.turns)]
            good &= all(a < c and b < d for (a, b), (c, d) in zip(ends, ends[1:]))
            good &= ends[-1] == (len(self.messages), len(self.ids)) or not self.turns and not self.ids
            render(self.messages, thinking=found.thinking, effort=found.effort)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UsageError):
                raise ConversationError(f"{self.file}: {error}") from None
            good = False
        if not good:
            raise ConversationError(f"{self.file}: messages, ids or turns are not of the form of a conversation")
        for name, value in settings.items():
            if value != getattr(found, name):
                raise ConversationError(f"{self.file}: {name} is {getattr(found, name)!a} in this conversation, but "
                                        f"{value!a} was given: begin another one")
        self.settings = found

    def _unread(self):
        "Bring the sequence to where it can go on, and return the ids to read from there."
        wanted = encode_chat(self.tokenizer, render(self.messages, thinking=self.settings.thinking,
                                                    effort=self.settings.effort))
        kept, new = unread(self.tokenizer, self.ids, wanted)
        if kept < self.model.position:
            self._go_back(kept, f"{len(self.ids) - kept} ids of the conversation are no longer as they were read")
        ids = self.ids[self.model.position:kept] + new
        if self.model.unread is not None and ids[:1] != [self.model.unread]:
            self.model.unread = None  # the reply was stopped before it: the conversation goes on without
        room = self.model.context - self.model.position - len(ids)
        if room < 1:
            raise ConversationError(f"the conversation is {self.model.position + len(ids)} ids long, and the context "
                                    f"of {self.model.context} has no room for a reply: choose a larger --context")
        self.ids = self.ids[:kept] + new
        return ids, min(room, self.most)

    def _go_back(self, ids, why):
        "Load the last snapshot that has read no more than the first `ids` ids, or begin anew."
        self.model.reset()
        for turn in reversed(self.turns):
            if turn.state is not None and turn.ids - 1 <= ids:
                try:
                    self.model.load_state(self.file.with_name(turn.state))
                    break
                except (StateError, MissingFile) as error:
                    self.notes.append(f"a snapshot cannot be used: {error}")
        again = ids - (ids == len(self.ids) > 0) - self.model.position  # the last id was not read
        if again > 0:
            self.again += again
            self.notes.append(f"{again} ids have to be read again: {why}")

    def stop(self) -> None:
        "End the answer after the token under way, or take the question back if it is still being read."
        self._stopping = True

    def ask(self, text: str) -> Iterator[Delta]:
        """Add a message of the user and yield the reply as it comes. The turn is saved when the reply has ended.

        If anything else ends it, the conversation is as before. Raises Stopped, ConversationError, and what forward
        passes raise.
        """
        self.attempt = 0
        return self._turn(text)

    def retry(self) -> Iterator[Delta]:
        "The last question again, with the next seed. Raises ConversationError without one, and if nothing is drawn."
        if self.sampling.greedy:
            raise ConversationError("greedy decoding gives the same answer again: choose a temperature")
        return self._other_turn(self.messages[:], self.ids, self.turns, self.attempt)

    def _other_turn(self, messages, ids, turns, attempt):
        finished = False
        try:
            question, self.attempt = self._taken_back(), attempt + 1
            yield from self._turn(question)
            finished = True
        finally:
            if not finished:  # the former answer stands
                self.messages, self.ids, self.turns, self.attempt = messages, ids, turns, attempt
                self._go_back(len(ids), "the state of the former answer cannot be used")

    def _turn(self, text):
        before, ids = len(self.messages), self.ids
        self.messages.append({"role": "user", "content": text})
        self._stopping, self.ids_of_reply, finished = False, 0, False
        try:
            unread, most = self._unread()
            parser, seed = ReplyParser(self.tokenizer, self.settings.thinking), self.sampling.seed + self.attempt
            sampling = self.sampling if self.sampling.greedy else dataclasses.replace(self.sampling, seed=seed % 2**64)
            self.model.on_layer, self.read = self._layer_done, self.read + len(unread)
            for token in self.model.generate(unread, most, sampling=sampling):
                self.read += self.ids_of_reply > 0  # the reply's first id is read with its second
                self.ids_of_reply += 1
                self.ids.append(token)
                yield from parser.feed(token)
                if parser.done or self._stopping:
                    break
            self.last = parser.finish()
            self.messages.append(self.last.message())
            self.save()
            finished = True
        finally:
            if not finished:
                del self.messages[before:]
                self.ids = ids
                self._go_back(len(ids), "the question was taken back")

    def _layer_done(self, L):
        self.on_layer(L)
        if self._stopping and not self.ids_of_reply:
            raise Stopped("the question is taken back")

    def save(self) -> None:
        "Write snapshot and file, each whole or not at all. Raises OSError."
        numbers = [int(path.name.split(".")[-2]) for path in self._states()]
        name = f"{self.file.name}.{max(numbers, default=0) + 1}.state"
        self.model.save_state(self.file.with_name(name))
        self.turns = [*self.turns, Turn(len(self.messages), len(self.ids), name)]
        self._write()

    def _write(self):
        self.turns = [*(turn._replace(state=None) for turn in self.turns[:-KEPT]), *self.turns[-KEPT:]]
        write_json(self.file, {
            "format": FORMAT, "version": VERSION, "model": self.model.fingerprint(), "attempt": self.attempt,
            "settings": self.settings._asdict(), "messages": self.messages, "ids": iter(self.ids),
            "turns": [turn._asdict() for turn in self.turns]})
        named = {turn.state for turn in self.turns}
        for path in (*self._states(), *self._parts()):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _states(self):
        return [path for path in self.file.parent.iterdir() if self._names(path.name)]

    def _parts(self):
        "Files that a killed process has left half-written (5.2.5)."
        for path in self.file.parent.iterdir():
            part = re.fullmatch(r"\.(.+)\.[0-9a-f]{32}\.part", path.name)
            if part and (part[1] == self.file.name or self._names(part[1])):
                yield path

    def _names(self, name):
        "Is this the name of a snapshot of this conversation?"
        return re.fullmatch(re.escape(self.file.name) + r"\.[0-9]{1,18}\.state", name) is not None

    def undo(self) -> str:
        "Take back the last turn. Returns the user's text. Raises ConversationError if there is none."
        text = self._taken_back()
        self._write()
        return text

    def _taken_back(self):
        last = next((n for n in range(len(self.messages) - 1, -1, -1) if self.messages[n]["role"] == "user"), None)
        if last is None:
            raise ConversationError("there is no turn to take back")
        text, self.attempt = self.messages[last]["content"], 0
        del self.messages[last:]
        self.turns = [turn for turn in self.turns if turn.messages <= last]
        self.ids = self.ids[:self.turns[-1].ids if self.turns else 0]
        self._go_back(len(self.ids), "the state before this turn was not kept")
        return text

    def save_as(self, file: str | os.PathLike[str]) -> None:
        "Keep the conversation in another file from now on, which must not exist. Raises UsageError and OSError."
        path = given_path("file", file).absolute()
        if path.exists():
            raise ConversationError(f"{file}: exists already")
        if not path.parent.is_dir():
            raise MissingFile(f"{file}: there is no folder {path.parent} to keep the conversation in")
        self.file = path
        self.turns = [turn._replace(state=None) for turn in self.turns[:-1]]
        self.save()

    @property
    def temporary(self) -> bool:
        "Is the conversation kept for this process alone?"
        return self._scratch is not None and self.file.parent == Path(self._scratch.name)

    def close(self) -> None:
        "Remove what was kept for this process alone."
        if self._scratch is not None:
            self._scratch.cleanup()

    def __enter__(self) -> "Conversation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stopped(Exception):
    "The question was taken back before it was read to its end."


@contextlib.contextmanager
def stopped_by_ctrl_c(conversation: Conversation) -> Iterator[None]:
    "A `with` block in which SIGINT stops the answer of `conversation`. Only the main thread hears signals."
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: conversation.stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


__all__ = [
    "FORMAT", "VERSION", "MAX_FILE_BYTES", "KEPT", "ConversationError", "Turn", "Settings", "Conversation",
    "Stopped", "stopped_by_ctrl_c",
]
