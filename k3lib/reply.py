"""5.23 A reply as it comes

Made from book/05_streaming/23_reply.py: edit that, then run `make export`.
"""

import json
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from k3lib.tokenizer import Tokenizer
from k3lib.chat import CLOSE, END, OPEN, SEP, ChatError

MARKERS = (OPEN, CLOSE, SEP, END)
PARENTS = {"think": "message", "response": "message", "tools": "message", "call": "tools", "argument": "call",
           "json": "call"}  # element -> the element around it
CHANNELS = {"think": "thinking", "response": "response"}


def unescape(value: str) -> str:
    "What `escape` (5.22.1) was given. The order matters: `&amp;quot;` is `&quot;`, not a quotation mark."
    return value.replace("&quot;", '"').replace("&amp;", "&")


class Delta(NamedTuple):
    "New text of a reply. `channel` is thinking or response."

    channel: str
    text: str


class ToolCall(NamedTuple):
    "A whole tool call of a reply. `arguments` is the text of a JSON object, or what the model wrote instead."

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """A reply that was read. `stop`: stop or tool_calls if the message ended, length if its ids ran out before.

    `oddities`: where the reply was not of the format, a sentence each.
    """

    thinking: str
    response: str
    tool_calls: tuple[ToolCall, ...]
    stop: str
    oddities: tuple[str, ...]

    def message(self) -> dict[str, Any]:
        "The reply as an assistant's message for `render`, in OpenAI's shape. Calls have the ids call_1, call_2 ..."
        message: dict[str, Any] = {"role": "assistant", "content": self.response}
        if self.thinking:
            message["reasoning"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [{"id": f"call_{n}", "type": "function", "function": call._asdict()}
                                     for n, call in enumerate(self.tool_calls, 1)]
        return message


class ReplyParser:
    """Reads a reply as it is generated. `calls`: the ToolCalls that are complete. `done`: the message has ended.

    `thinking`: does the reply begin with thinking, as render(thinking=...) was told? `tokenizer` is needed for `feed`.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, thinking: bool = True):
        self.open = ["message", "think" if thinking else "response"]
        self.tag: tuple[str, str] | None = None  # (OPEN or CLOSE, the text so far) of a tag that has not ended
        self.texts: dict[str, list[str]] = {"thinking": [], "response": []}
        self.calls: list[ToolCall] = []
        self.oddities: list[str] = []
        self.call: dict[str, Any] = {}  # the open call: its tool, its arguments by name, its json
        self.attributes: dict[str, str] = {}  # of the open argument
        self.value = ""  # text of the open argument or json
        self.held = ""  # of feed_text: the begin of a marker, perhaps
        self.tokenizer = tokenizer
        if tokenizer is not None:
            self.markers = {i: tokenizer.token(i).decode() for i in tokenizer.stop_ids}
            self.markers |= {i: m for m in MARKERS if (i := tokenizer.special_ids.get(m)) is not None}
            self.utf8 = tokenizer.stream()

    @property
    def done(self) -> bool:
        return not self.open

    def feed(self, token_id: int) -> list[Delta]:
        "The text that this id adds to thinking or response. Raises TokenizerError for an id that does not exist."
        if self.tokenizer is None:
            raise ChatError("a ReplyParser without a tokenizer reads text, not ids: use feed_text")
        marker = self.markers.get(token_id)
        if marker is None:
            return self._text(self.utf8.feed(token_id))
        rest, self.utf8 = self.utf8.finish(), self.tokenizer.stream()
        return self._text(rest) + self._marker(marker)

    def feed_text(self, text: str) -> list[Delta]:
        "As feed, from text, in which every spelling of a marker is taken for the marker."
        *parts, last = re.split(f"({'|'.join(map(re.escape, MARKERS))})", self.held + text)
        deltas = [d for i, part in enumerate(parts) for d in (self._marker(part) if i % 2 else self._text(part))]
        keep = next((n for n in range(min(len(last), len(END)), 0, -1)
                     if any(marker.startswith(last[-n:]) for marker in MARKERS)), 0)
        self.held = last[len(last) - keep:]
        return deltas + self._text(last[:len(last) - keep])

    def _marker(self, marker: str) -> list[Delta]:
        "One of the four control tokens, or the name of another id that ends a reply."
        deltas = []
        if self.tag is not None:
            if marker != SEP:
                self._odd(f"the tag {''.join(self.tag)} has no {SEP}")
            deltas = self._end_tag(marker == SEP)
        elif marker == SEP:
            self._odd(f"{SEP} stands outside of a tag")
        if marker in (OPEN, CLOSE):
            self.tag = marker, ""
        elif marker != SEP:
            self._close("message")
        return deltas

    def _text(self, text: str) -> list[Delta]:
        "Text in a tag, in an element, or where none should be."
        if not text:
            return []
        if self.tag is not None:
            return self._tag_text(text)
        top = self.open[-1] if self.open else ""
        if top == "message" and text.strip():
            self._odd("text stands outside of the elements: it is taken for the response")
            self.open.append(top := "response")
            text = text.lstrip()
        if channel := CHANNELS.get(top):
            self.texts[channel].append(text)
            return [Delta(channel, text)]
        if top in ("argument", "json"):
            self.value += text
        elif text.strip():
            self._odd(f"text stands {f'in {top}, in no element' if top else 'after the message'}: it is left out")
        return []

    def _odd(self, sentence: str) -> None:
        "Note what is odd, once."
        if sentence not in self.oddities:
            self.oddities.append(sentence)

    def _tag_text(self, text: str) -> list[Delta]:
        "Text of a tag. If more text follows a name that needs no attributes, the separator was forgotten."
        marker, body = self.tag or ("", "")
        body += text
        names = (*PARENTS, "message") if marker == CLOSE else ("think", "response", "tools")
        name = next((name for name in names if body.startswith(name) and body != name), "")
        self.tag = marker, name or body
        if not name:
            return []
        self._odd(f"the tag {marker}{name} has no {SEP}")
        return self._end_tag(False) + self._text(body[len(name):])

    def _end_tag(self, separated: bool) -> list[Delta]:
        "A tag has ended. One that the format does not have is text."
        marker, body = self.tag or ("", "")
        self.tag = None
        name = body.partition(" ")[0]
        if marker == CLOSE and (name in PARENTS or name in ("", "message")):
            self._close(name)
        elif marker == OPEN and name == "message":
            self._odd("another message begins: the reply ends")
            self._close("message")
        elif marker == OPEN and PARENTS.get(name) in self.open:
            attributes = {key: unescape(value) for key, value in re.findall(r' (\w+)="([^"]*)"', body)}
            self._open(name, attributes)
        else:
            self._odd(f"the tag {marker}{body!a:.40} is not of the format: it is taken for text")
            return self._text(marker + body + SEP * separated)
        return []

    def _open(self, name: str, attributes: dict[str, str]) -> None:
        "Open an element in its parent, which is open."
        while self.open[-1] != PARENTS[name]:
            self._odd(f"{name} begins in {self.open[-1]}")
            self._pop()
        self.open.append(name)
        self.value = ""
        if name == "call":
            self.call = {"tool": attributes.get("tool"), "arguments": {}, "json": None}
        self.attributes = attributes

    def _close(self, name: str) -> None:
        "Close the last element of this name and all in it; the empty name: the last element."
        if name == "" and self.open:
            self._odd("an end tag has no name")
            self._pop()
        elif name in self.open:
            while self.open[-1] != name:
                self._odd(f"{self.open[-1]} is not closed before {name}")
                self._pop()
            self._pop()
        elif self.open:
            self._odd(f"{name} is closed and was not open")

    def _pop(self) -> None:
        "Close the last element."
        name = self.open.pop()
        if name == "argument":
            value: Any = self.value
            if self.attributes.get("type") != "string":
                try:
                    value = json.loads(self.value)
                except (ValueError, RecursionError):
                    self._odd(f"the argument {value!a:.40} is no JSON: it is taken for a string")
            self.call["arguments"][self.attributes.get("key", "")] = value
        elif name == "json":
            self.call["json"] = self.value
        elif name == "call" and not self.call["tool"]:
            self._odd("a call names no tool: it is left out")
        elif name == "call":
            arguments = self.call["json"]
            if arguments is None:
                arguments = json.dumps(self.call["arguments"], ensure_ascii=False)
            self.calls.append(ToolCall(self.call["tool"], arguments))

    def finish(self) -> Reply:
        "The reply, after its last id. Text that `feed` held back, part of a character or of a marker, is in it."
        self._text(self.held + (self.utf8.finish() if self.tokenizer is not None else ""))
        self.held = ""
        if self.tag is not None:
            self._odd(f"the tag {''.join(self.tag)!a:.40} was cut off")
            if self.tag[0] == CLOSE and self.tag[1] in (*PARENTS, "message"):
                self._end_tag(False)
        if "call" in self.open:
            self._odd(f"a call of {self.call['tool']!a:.40} was cut off: it is left out")
        stop = "length" if self.open else "tool_calls" if self.calls else "stop"
        thinking, response = ("".join(self.texts[channel]) for channel in ("thinking", "response"))
        return Reply(thinking, response, tuple(self.calls), stop, tuple(self.oddities))


def parse_reply(tokenizer: Tokenizer, ids: Iterable[int], thinking: bool = True) -> Reply:
    "The reply of these ids, which follow the ids of `render`. Raises TokenizerError for an id that does not exist."
    parser = ReplyParser(tokenizer, thinking)
    for token_id in ids:
        parser.feed(token_id)
    return parser.finish()


def unread(tokenizer: Tokenizer, read: Sequence[int], wanted: Sequence[int]) -> tuple[int, list[int]]:
    """(kept, ids): the first `kept` of the ids `read` stand, and then come `ids`, to have read the ids `wanted`.

    If kept is len(read), the sequence goes on as it is; else it must go back to `kept` positions or fewer. Text between
    two control tokens may be spelled with other ids, if it is the same text. `ids` is empty if all has been read.
    """
    def text(ids):
        return tokenizer.decode(ids).decode("utf-8", "replace")

    def text_end(ids, at):
        "Where the text that begins at `at` ends: at the next control token."
        return next((i for i in range(at, len(ids)) if ids[i] >= tokenizer.ranks), len(ids))

    i = j = 0
    while i < len(read) and j < len(wanted):
        a, b = text_end(read, i), text_end(wanted, j)
        if a == i or b == j:
            if read[i] != wanted[j]:
                break
            i, j = i + 1, j + 1
        elif read[i:a] == wanted[j:b] or text(read[i:a]) == text(wanted[j:b]):
            i, j = a, b
        else:
            same = next((n for n, (x, y) in enumerate(zip(read[i:a], wanted[j:b])) if x != y), min(a - i, b - j))
            return i + same, list(wanted[j + same:])
    return i, list(wanted[j:])


class TextStream:
    """The text of generated ids as it comes, up to a stop id or a stop text, neither of which is part of it.

    `stop`: ids that end the text. `stop_texts`: texts that do, none of them empty. `ended`: None while the text goes
    on, then stop_id or stop_text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Container[int], stop_texts: Iterable[str] = ()):
        self._stop, self._texts, self._utf8 = stop, tuple(stop_texts), tokenizer.stream()
        self._held = ""
        self.ended: str | None = None

    def feed(self, token_id: int) -> str:
        "The text that is certain with this id and was not before. Raises TokenizerError for an id that does not exist."
        if token_id in self._stop:
            self.ended = "stop_id"
            return ""
        text = self._up_to_stop(self._held + self._utf8.feed(token_id))
        begun = (n for n in range(len(text), 0, -1) if any(stop.startswith(text[-n:]) for stop in self._texts))
        keep = 0 if self.ended else next(begun, 0)
        self._held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def finish(self) -> str:
        "The text that still waits. Call it once, after the last id, or after the text has ended."
        return "" if self.ended == "stop_text" else self._up_to_stop(self._held + self._utf8.finish())

    def _up_to_stop(self, text: str) -> str:
        "The text before the first stop text in it, if there is one."
        found = [at for stop in self._texts if (at := text.find(stop)) >= 0]
        if found:
            self.ended = "stop_text"
        return text[:min(found, default=len(text))]


__all__ = [
    "MARKERS", "PARENTS", "CHANNELS", "unescape", "Delta", "ToolCall", "Reply", "ReplyParser", "parse_reply",
    "unread", "TextStream",
]
