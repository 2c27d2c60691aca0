# %% [markdown]
# # 5.33 A terminal to talk in
#
# A conversation (5.32) needs a line to type in and a place where the answer appears. After this chapter you can talk to
# a model in a terminal: with a line that can be edited, with words as they come, with a key that stops them.
#
# Needs chapters [5.29] (displays) and [5.32] (conversations). Runs in seconds.
#
# [5.32 A conversation that goes on tomorrow](32_conversation.ipynb) ·
# [contents](../README.md) ·
# [5.34 The dial: one model, any budget](34_decode.ipynb)
#
# [5.29]: 29_display.ipynb
# [5.32]: 32_conversation.ipynb

# %%
import contextlib
import io
from pathlib import Path

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
MODEL = ROOT / "fixtures" / "oracle13" / "model"

# %% [markdown]
# ## 5.33.1 What a model may not do to a terminal
#
# A terminal obeys what is written to it: `ESC [2J` clears it, other sequences set its title or answer as if the user
# had typed. A model can generate any bytes. So control characters of a reply are shown, as `␛`, and only line ends and
# tabs pass.
#
# Thinking is dimmed, where the output is a terminal.

# %% tags=["export"]
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


# %%
some = [Delta("thinking", "so "), Delta("thinking", "4"), Delta("response", "It is 4.\x1b[2J")]
print(repr("".join(shown_deltas(some, dim=True))))
assert "".join(shown_deltas(some, dim=False)) == "so 4\n\nIt is 4.␛[2J"


# %% [markdown]
# ## 5.33.2 A line to type in
#
# Editing, history, pasting of many lines and Ctrl-C at any moment are hard to get right and have nothing to do with
# models. The library prompt_toolkit does them; it is pure Python, and only a chat at a terminal imports it. Where
# standard input is no terminal each line of it is a message: a script can hold a conversation, too.

# %% tags=["export"]
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


# %% [markdown]
# ## 5.33.3 The talk
#
# A line that begins with `/` is a command, one that begins with `//` a message that begins with `/`. A question that
# fails costs the question only: the talk goes on. While a question is read a bar counts layers, and it goes before the
# first word.

# %% tags=["export"]
HELP = """/save [FILE]  keep the conversation in FILE; without a name, say where it is kept
/undo         take back the last turn
/retry        another answer to the last question
/stats        what was read and generated
/help         this text
/quit         end, as Ctrl-D does
Ctrl-C stops an answer. A message that begins with / is written with two: //"""


# %% tags=["export"]
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


# %% tags=["export"]
class Talk(Talk):
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


# %% tags=["export"]
class Talk(Talk):
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


# %% [markdown]
# ## 5.33.4 The gate
#
# A talk whose lines come from a file, as from a script.

# %%
from k3lib.engine import load
from k3lib.tokenizer import Tokenizer

lines = io.StringIO("2+2?\n/undo\nand 3?\n/retry\n/nonsense\n/stats\n/quit\n")
said: list[str] = []
with load(MODEL, "1GB", context=512) as model, Conversation(model, Tokenizer(MODEL, 512), most=8) as conversation:
    stdin, sys.stdin = sys.stdin, lines
    try:
        with contextlib.redirect_stderr(io.StringIO()) as told:
            Talk(conversation, lambda text, end="\n": said.append(text + end)).run()
    finally:
        sys.stdin = stdin
print("".join(said).splitlines()[-1].partition("; since")[0])
print(told.getvalue())
assert len(conversation.messages) == 2 and "taken back: 2+2?\n" in said and "is no command" in told.getvalue()

# %% [markdown]
# ## Summary
#
# - Control characters of a reply are shown, not obeyed.
# - A line to type in is a library's work; a pipe can talk, too.
# - What goes wrong in a turn costs the turn, and the talk goes on.
#
# ## Exercises
#
# 1. Write a reply that contains `\r`. What could it hide from a user whose terminal obeys it?
# 2. Two programs open one conversation file at once, and both ask. Which turn is lost, and is anything half-written?
#
# Next: [5.34 The dial: one model, any budget](34_decode.ipynb).
