"""5.33 A terminal to talk in

Made from book/05_streaming/33_talk.py: edit that, then run `make export`.
"""

import sys
from collections.abc import Callable, Iterable, Iterator

from k3lib.conversation import Conversation, ConversationError, Stopped, stopped_by_ctrl_c
from k3lib.display import complain, is_terminal, progress_bar
from k3lib.reply import Delta

VISIBLE = {n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"} | {127: "\u2421"}
VISIBLE |= dict.fromkeys(range(128, 160), "\ufffd")
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def shown_deltas(deltas: Iterable[Delta], dim: bool) -> Iterator[str]:
    "The text to write for each delta. Thinking is dimmed if `dim`, and an empty line divides it from the response."
    channel, empty = None, True
    for delta in deltas:
        text = delta.text.translate(VISIBLE)
        if delta.channel != channel:
            text = ("" if empty else "\n\n") + text
            channel = delta.channel
        empty = empty and not text
        yield f"{DIM}{text}{PLAIN}" if dim and text and delta.channel == "thinking" else text


def line_reader(earlier: Iterable[str]) -> Callable[[], str | None]:
    "A function that returns what the user types next, None at the end. `earlier`: lines of the history."
    if not (is_terminal(sys.stdin) and is_terminal(sys.stdout)):
        def read_line():
            line = sys.stdin.readline() if sys.stdin is not None else ""
            return line.rstrip("\r\n") if line else None
        return read_line

    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory

    session: PromptSession[str] = PromptSession(history=InMemoryHistory(list(earlier)))

    def prompted():
        while True:
            try:
                return session.prompt("> ")
            except KeyboardInterrupt:  # clears the line
                continue
            except EOFError:
                return None
    return prompted


HELP = """/save [FILE]  keep the conversation in FILE; without a name, say where it is kept
/undo         take back the last turn
/retry        another answer to the last question
/stats        what was read and generated
/help         this text
/quit         end, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / is written with two: //"""


class Talk:
    "A talk at a terminal. `show(text, end=)` writes to standard output. `quiet`: no bar and no notes."

    def __init__(self, conversation: Conversation, show: Callable[..., object], quiet: bool = False):
        self.conversation, self.show, self.quiet = conversation, show, quiet
        self.dim = is_terminal(sys.stdout)
        self._told = 0

    def run(self) -> None:
        "Read lines and answer them until the last. Raises what `show` raises, and CheckpointError for a damaged model."
        said = [message["content"] for message in self.conversation.messages if message["role"] == "user"]
        read_line = line_reader(said)
        self.tell_notes()
        while (line := read_line()) is not None and line.strip() != "/quit":
            try:
                self.heed(line)
            except (ConversationError, Stopped, FileNotFoundError) as error:
                complain(f"({error})")
            self.tell_notes()

    def heed(self, line: str) -> None:
        "One line: a command or a message. Raises ConversationError and what a turn raises."
        word, _, rest = line.strip().partition(" ")
        commands = {"/save": self.save, "/undo": self.undo, "/retry": self.retry, "/stats": self.stats,
                    "/help": lambda rest: self.show(HELP)}
        if not line.strip():
            return
        if not line.startswith("/") or line.startswith("//"):
            self.answer(self.conversation.ask(line[1:] if line.startswith("//") else line))
        elif word in commands:
            commands[word](rest.strip())
        else:
            raise ConversationError(f"{word} is no command: /help names them all")

    def answer(self, deltas: Iterator[Delta]) -> None:
        "Show a reply as it comes."
        talk, model = self.conversation, self.conversation.model
        with stopped_by_ctrl_c(talk), progress_bar(None, "layer", not self.quiet, desc="reading") as bar:
            talk.on_layer = lambda L: bar.update()
            try:
                for text in shown_deltas(deltas, self.dim):
                    bar.close()
                    self.show(text, end="")
            finally:
                talk.on_layer = lambda L: None
        self.show("")
        reply = talk.last
        for call in reply.tool_calls if reply else ():
            self.show(f"[calls {call.name} with {call.arguments}]".translate(VISIBLE))
        if reply and reply.stop == "length" and not self.quiet:
            room = model.context - model.position
            complain(f"(stopped after {talk.ids_of_reply} ids; {room} positions are left)")

    def tell_notes(self) -> None:
        "Notes of the conversation that were not told yet."
        notes, self._told = self.conversation.notes[self._told:], len(self.conversation.notes)
        for note in notes if not self.quiet else ():
            complain(f"({note})")

    def save(self, file: str) -> None:
        "/save"
        if file:
            self.conversation.save_as(file)
        elif self.conversation.temporary:
            raise ConversationError("this conversation has no file yet: /save FILE gives it one")
        self.show(f"kept in {self.conversation.file}")

    def undo(self, rest: str) -> None:
        "/undo"
        self.show(f"taken back: {self.conversation.undo()}".translate(VISIBLE))

    def retry(self, rest: str) -> None:
        "/retry"
        self.answer(self.conversation.retry())

    def stats(self, rest: str) -> None:
        "/stats"
        talk, steps = self.conversation, self.conversation.model.steps
        turns = sum(message["role"] == "assistant" for message in talk.messages)
        seconds = sum(step.seconds for step in steps) / max(1, len(steps))
        self.show(f"{turns} turns, {len(talk.ids)} ids of a context of {talk.model.context}; since the start "
                  f"{talk.read} ids read, {talk.again} of them again, {len(steps)} generated, {seconds:.3g} s each")


__all__ = [
    "VISIBLE", "DIM", "PLAIN", "shown_deltas", "line_reader", "HELP", "Talk",
]
