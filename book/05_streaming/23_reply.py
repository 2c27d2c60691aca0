# %% [markdown]
# # 5.23 A reply as it comes
#
# A reply is ids, one at a time: thinking first, then what is said, then perhaps calls of tools. After this chapter you
# can show each word as it comes and know which of the three it is, and you can find out which ids of a grown
# conversation a sequence has not read yet.
#
# Without this chapter a chat shows its tags to the user, runs a call that was cut off in the middle, and reads the
# whole conversation again at every turn.
#
# Needs chapters [5.21] (ids) and [5.22] (the chat format). Runs in seconds.
#
# [5.22 A conversation as ids](22_chat.ipynb) ·
# [contents](../README.md) ·
# [5.24 A draw that can be repeated](24_sampling.ipynb)
#
# [5.21]: 21_tokenizer.ipynb
# [5.22]: 22_chat.ipynb

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "fixtures").is_dir())
plt.style.use(ROOT / "book" / "k3.mplstyle")

# %% [markdown]
# | word | meaning | name in code |
# |---|---|---|
# | reply | the ids that the model generates after the start tag of `think` or `response` | `Reply` |
# | channel | where a reply's text belongs: thinking or response | `Delta` |
# | oddity | where a reply is not of the format, in a sentence | `oddities` |
# | read | ids that a sequence holds already | `read` |
# | wanted | ids of the conversation as it is now | `wanted` |
#
# ## 5.23.1 A list of open elements
#
# The prompt ends inside an element: the reply begins with thinking, or with the response. A parser keeps the list of
# elements that are open. A start tag adds one, an end tag removes one, and text belongs to the last.
#
# Models write tags wrong. Authors of other parsers report what they have seen (pull requests 32567 of
# sgl-project/sglang, 1983 of smg-project/smg, 537 of code-yeongyu/senpi). For each there is one reading that loses no
# word:
#
# | seen | what it means |
# |---|---|
# | `<|close|>think<|open|>response` | a tag without `<|sep|>` ends where the next begins |
# | `<|close|><|sep|>` | the last open element ends |
# | `response` or `tools` opened inside `think` | `think` ends |
# | text after `think` without a start tag of `response` | it is the response, without white space before it |
# | `<|close|>message` while an element is open | all elements end |
# | the start of another message | the reply ends: a model does not speak for the user |
# | ids end inside a call | the call was cut off and is not made |
#
# `Reply.oddities` names each of them, so that nothing is repaired without a word.

# %% tags=["export"]
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


# %% tags=["export"]
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


# %% [markdown]
# The parser takes ids one at a time, so that a reply can be shown while it is generated. From ids it knows control
# tokens from text that spells them. Where only text is at hand, `feed_text` takes each spelling for the token, and
# holds back what may become one.

# %% tags=["export"]
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


# %% [markdown]
# Markers and text drive the list of open elements.

# %% tags=["export"]
class ReplyParser(ReplyParser):
    def feed_text(self, text: str) -> list[Delta]:
        "As feed, from text, in which every spelling of a marker is taken for the marker."
        *parts, last = re.split(f"({'|'.join(map(re.escape, MARKERS))})", self.held + text)
        deltas = [d for i, part in enumerate(parts) for d in (self._marker(part) if i % 2 else self._text(part))]
        keep = next((n for n in range(min(len(last), len(END)), 0, -1)
                     if any(marker.startswith(last[-n:]) for marker in MARKERS)), 0)
        self.held = last[len(last) - keep:]
        return deltas + self._text(last[:len(last) - keep])


# %% tags=["export"]
class ReplyParser(ReplyParser):
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


# %% [markdown]
# A tag ends with its separator, or, where that was forgotten, when its name is complete and more text comes.

# %% tags=["export"]
class ReplyParser(ReplyParser):
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


# %% [markdown]
# The end of an argument makes a value, the end of a call makes a ToolCall. At the end of the ids, what is still open
# was cut off.

# %% tags=["export"]
class ReplyParser(ReplyParser):
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


# %% tags=["export"]
class ReplyParser(ReplyParser):
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


# %% tags=["export"]
class ReplyParser(ReplyParser):
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


# %% [markdown]
# **Check.** What `render` writes, the parser reads. The ids of an assistant's message after the generation prompt are a
# reply, so each such message of the fixture comes back. The vocabulary is that of the embedded model, 496 tokens and 16
# control tokens: the parser asks it for names, not for numbers.

# %%
from k3lib.chat import encode_chat, escape, render

t = Tokenizer(ROOT / "fixtures/oracle13/model", vocab_size=512)
known = json.loads((ROOT / "fixtures/tokenizer/chat_k3.json").read_text())


def reply_ids(message, **options):
    "The ids that a model would generate to say `message`: its rendering without the prompt that it follows."
    prompt = encode_chat(t, render([], **options))
    whole = encode_chat(t, render([message], reply=False, **options))
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt):]


spoken = {
    "role": "assistant", "content": "It is 18 °C & \"sunny\" <|sep|>", "reasoning": "They want Paris.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": 'a"&quot;b', "arguments": '{"x": "Paris", "n": 3}'}},
        {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": '{"tz":'}},
    ],
}
reply = parse_reply(t, reply_ids(spoken))
assert reply.message() == spoken and reply.stop == "tool_calls" and reply.oddities == ()
checked = 0
for case in known["cases"]:
    for message in case["messages"]:
        if message["role"] == "assistant":
            back = parse_reply(t, reply_ids(message)).message()
            again = encode_chat(t, render([back], reply=False))
            checked += again == encode_chat(t, render([message], reply=False))
print(f"a reply with two calls, and {checked} of the fixture, read back")
assert checked == 5

# %% [markdown]
# While the ids come, text goes to its channel: t for thinking, r for the response. A character whose bytes are not
# complete waits, as in [5.21.8], and tags are never shown.
#
# [5.21.8]: 21_tokenizer.ipynb#5.21.8-The-tokenizer

# %%
parser = ReplyParser(t)
for token_id in reply_ids({"role": "assistant", "content": "日本 <|sep|>", "reasoning": "in short"}):
    for delta in parser.feed(token_id):
        print(f"{delta.channel[0]}:{delta.text!r}", end="  ")
print("\n", parser.finish())


# %% [markdown]
# Unescaping in the other order is the second trap. It passes for every value without `&`.

# %%
def unescape_wrong(value):
    return value.replace("&amp;", "&").replace("&quot;", '"')


assert unescape(escape("say &quot;")) == "say &quot;"
assert unescape_wrong(escape("say &quot;")) != "say &quot;"  # the check sees the trap
print(repr(unescape_wrong(escape("say &quot;"))), "instead of", repr("say &quot;"))

# %% [markdown]
# ## 5.23.2 Odd replies
#
# The rows of the table, as text, one character at a time. Each loses nothing and says what was odd.

# %%
odd = {
    "a tag cut short": "so<|close|>think<|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>message<|sep|>",
    "no name": "so<|close|><|sep|><|open|>response<|sep|>Hi<|close|>message<|sep|>",
    "no response tag": "<|close|>think<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>",
    "tools in think": 'so<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|end_of_msg|>',
    "cut in a call": 'so<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|>',
    "speaks as user": 'so<|close|>think<|sep|>Hi<|open|>message role="user"<|sep|>Me too<|close|>message<|sep|>',
}
for label, text in odd.items():
    parser = ReplyParser()
    for character in text:
        parser.feed_text(character)
    reply = parser.finish()
    print(f"{label:16} {reply.thinking!r:4} {reply.response!r:4} {[c.name for c in reply.tool_calls]} {reply.stop}",
          *reply.oddities, sep="\n                 - ")
    assert reply.thinking in ("so", "") and reply.oddities


# %% [markdown]
# ## 5.23.3 What is new
#
# A conversation grows at its end, and a turn should read only that. The ids of turn $n$ and the reply are a prefix of
# the ids of turn $n+1$ if rendering is *prefix-stable*: what stands in a message decides its segments, and nothing
# after it does.
#
# One thing must not break this. A model may spell a word with other tokens than the encoder would: `th` and `e` for
# `the`. The conversation is the same, and the sequence has read the model's spelling. So ids are compared between
# control tokens, and there equal text is enough. Bytes that are no UTF-8, as those of half a character at which a reply
# was stopped, are U+FFFD in the text.

# %% tags=["export"]
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


# %% [markdown]
# Three turns, each with a reply. `kept` must be all that was read, every time.

# %%
def turns(**options):
    "Per turn: (the ids of the rendering, how many of them stand, the ids read after the reply)."
    messages, read, log = [], [], []
    for question, thought, answer in (("2+2?", "add", "4"), ("and 3?", "add 3", "7"), ("why?", "they ask", "because")):
        messages.append({"role": "user", "content": question})
        wanted = encode_chat(t, render(messages, **options))
        kept, new = unread(t, read, wanted)
        said = reply_ids({"role": "assistant", "content": answer, "reasoning": thought},
                         thinking=options.get("thinking", True))
        log.append((wanted, kept, len(read)))
        read = read[:kept] + new + said
        messages.append(parse_reply(t, said, options.get("thinking", True)).message())
    return log, read, messages


log, read, messages = turns(effort="max")
print([f"{len(wanted)} ids, {kept} of {had} stand" for wanted, kept, had in log])
assert all(kept == had for _, kept, had in log)
usual, other = t.encode("because"), [i for letter in "because" for i in t.encode(letter)]
at = next(i for i in range(len(read)) if read[i:i + len(usual)] == usual)
spelled = [*read[:at], *other, *read[at + len(usual):]]
print(f"'because' spelled with {len(other)} ids instead of {len(usual)}:", unread(t, spelled, [*read, 5]))
assert spelled != read and unread(t, spelled, [*read, 5]) == (len(spelled), [5])


# %% [markdown]
# Where it is *not* a prefix, `kept` says so. There are five such cases, each checked below. A chat that wants to read
# nothing twice avoids the first three, and keeps its own messages rather than a client's copy because of the fourth.
#
# | what changes | kept |
# |---|---|
# | tools, or effort: they stand before the messages | nothing beyond them |
# | thinking is switched off: earlier thinking is dropped | up to the first reply |
# | tool choice, response format: they stand behind the messages, and the next turn's stand behind the reply | up to the notice |
# | a client sends the reply back without its thinking | up to that thinking |
# | the reply was odd, cut, blank in its thinking, or has JSON in another layout, as 1.50 | up to the oddity |

# %%
def kept_after(read, messages, **options):
    more = [*messages, {"role": "user", "content": "go on"}]
    return unread(t, read, encode_chat(t, render(more, **options)))[0]


forgetful = [{**m, "reasoning": None} for m in messages]
kept = {
    "nothing": kept_after(read, messages, effort="max"),
    "effort low": kept_after(read, messages, effort="low"),
    "thinking lost": kept_after(read, forgetful, effort="max"),
}
quiet_log, quiet, _ = turns()
kept["thinking off"] = kept_after(quiet, messages, thinking=False)
prompt, chosen = (encode_chat(t, render(messages[:1], tool_choice=choice)) for choice in ("auto", "none"))
kept["tool choice"] = kept_after(chosen + reply_ids(messages[1]), messages[:2])
f_of_1_5 = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1.5}'}}]}
said = reply_ids(f_of_1_5)
at = next(i for i in range(len(said)) if t.decode(said[:i]).endswith(b">1.5"))
said[at:at] = t.encode("0")
kept["1.50"] = kept_after(prompt + said, [messages[0], parse_reply(t, said).message()])
for what, n in kept.items():
    print(f"{what:14} {n:4} ids stand")
effort = len(encode_chat(t, render([], effort="max", reply=False)))
assert kept["nothing"] == len(read) and kept["effort low"] < effort
think = len(prompt) - prompt[::-1].index(t.special_ids[OPEN])  # where the name of the prompt's last element stands
assert kept["thinking lost"] == len(log[0][0]) and kept["thinking off"] == think
assert kept["tool choice"] < len(chosen) and kept["1.50"] == len(prompt) + at

# %% [markdown]
# The figure shows the ids of four renderings, one a row. Grey ids have been read before; the colours are those to read.
# In the first three rows only the end has a colour. In the fourth thinking was switched off, and everything from the
# first reply on has to be read again.

# %%
KINDS = {"read before": "#d9dde0", "control": "C5", "names and notices": "C4", "user": "C0", "assistant": "C1"}


def kinds(ids):
    "Of each id, the row of KINDS that it belongs to: by the tag before it."
    found, role, tag = [], "", None
    for i in ids:
        name = t.token(i).decode("utf-8", "replace")
        if i >= t.ranks:
            found.append("control")
            if tag is not None and name == SEP:
                role = next((r for r in ("system", "user", "assistant") if f'role="{r}"' in tag), role)
                tag = None
            tag = "" if name in (OPEN, CLOSE) else tag
        elif tag is not None:
            tag += name
            found.append("names and notices")
        else:
            found.append(role if role in KINDS else "names and notices")
    return found


rows = [(f"turn {n}", wanted, stand) for n, (wanted, stand, _) in enumerate(quiet_log, 1)]
again = encode_chat(t, render([*messages, {"role": "user", "content": "go on"}], thinking=False))
rows.append(("thinking off", again, unread(t, quiet, again)[0]))
picture = np.full((len(rows), max(len(ids) for _, ids, _ in rows), 3), 1.0)
colour = {kind: plt.matplotlib.colors.to_rgb(value) for kind, value in KINDS.items()}
for y, (_, ids, stand) in enumerate(rows):
    for x, kind in enumerate(kinds(ids)):
        picture[y, x] = colour["read before" if x < stand else kind]
fig, ax = plt.subplots(figsize=(8, 2.4))
ax.imshow(picture, aspect="auto", interpolation="nearest")
ax.set_yticks(range(len(rows)), [label for label, _, _ in rows])
ax.set_xlabel("position")
ax.legend(handles=[plt.matplotlib.patches.Patch(color=value, label=kind) for kind, value in KINDS.items()],
          ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.32))
new = [len(ids) - stand for _, ids, stand in rows]
ax.set_title(f"Turns read {new[0]}, {new[1]} and {new[2]} new ids; after a change of thinking {new[3]} are read")
plt.show()


# %% [markdown]
# ## 5.23.4 Text without a form
#
# A prompt that is plain text is continued as plain text, up to a stop id, or up to a text that the user has named, as
# `\n\n`. Two things may not be shown too early: the first bytes of a character, and text that may turn out to be the
# beginning of a stop text. Both wait for the next id. A stop text can end in the middle of an id, and can begin in one
# id and end three ids later.

# %% tags=["export"]
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


# %% [markdown]
# By hand, with one id a byte. The emoji waits for its fourth byte, `EN` for the byte that shows whether it is the
# beginning of `END`.

# %%
byte_ids = {t.token(i): i for i in range(t.ranks) if len(t.token(i)) == 1}
stream = TextStream(t, t.stop_ids, ["END"])
shown = []
for b in "a🙂 EN. END b".encode():
    shown.append(stream.feed(byte_ids[bytes([b])]))
    if stream.ended:
        break
print(shown, stream.ended)
assert "".join(shown) == "a🙂 EN. " and stream.ended == "stop_text" and stream.finish() == ""

# %% [markdown]
# ## Summary
#
# - The parser keeps a list of open elements and takes one id at a time. From ids it knows a control token from its
#   spelling; from text it cannot.
# - What is odd is read in the one way that loses no word, and named. A call that was cut off is not made.
# - Rendering is prefix-stable except in five stated cases, so a turn reads only what is new. The text between control
#   tokens decides, not how they were spelled with ids.
#
# ## Exercises
#
# 1. A server gets the whole conversation with every request, and clients drop the thinking. Which table must it keep so
#    that it still reads nothing twice?
# 2. Change `unread` to compare ids only. Let a model spell one word of a long reply differently, and count what is read
#    again.
# 3. Keep the text of an argument beside its value, so that 1.50 is rendered as 1.50. Which of OpenAI's fields could
#    carry it?
#
# Next: [5.24 A draw that can be repeated](24_sampling.ipynb).
