"""5.22 A conversation as ids

Made from book/05_streaming/22_chat.py: edit that, then run `make export`.
"""

import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, NoReturn
from k3lib.fileio import UsageError
from k3lib.tokenizer import Tokenizer

Segment = tuple[str, bool]  # a text that is encoded alone; do names of control tokens in it count?

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"


class ChatError(UsageError):
    "A conversation that the chat format cannot hold. One line: the field, what was found, what was expected."


def escape(value: str) -> str:
    "The value of an attribute as it stands between quotation marks."
    return value.replace("&", "&amp;").replace('"', "&quot;")


def plain(*texts: str) -> list[Segment]:
    "Segments of texts in which nothing is a control token. An empty text has none."
    return [(text, False) for text in texts if text]


def open_tag(name: str, /, **attributes: str) -> list[Segment]:
    "The start tag of an element."
    segments = [(OPEN, True), *plain(name)]
    for key, value in attributes.items():
        segments += plain(f" {key}", '="', escape(value), '"')
    return [*segments, (SEP, True)]


def close_tag(name: str) -> list[Segment]:
    "The end tag of an element."
    return [(CLOSE, True), *plain(name), (SEP, True)]


def element(name: str, body: Iterable[Segment], /, **attributes: str) -> list[Segment]:
    "An element around the segments of its body."
    return [*open_tag(name, **attributes), *body, *close_tag(name)]


def message_element(body: Iterable[Segment], **attributes: str) -> list[Segment]:
    "A whole message."
    return [*element("message", body, **attributes), (END, True)]


def encode_chat(tokenizer: Tokenizer, segments: Sequence[Segment]) -> list[int]:
    "Ids of segments, each encoded alone. Raises ChatError if the vocabulary lacks a control token that they need."
    markers = {name for text, control in segments if control for name in re.findall(r"<\|\w+\|>", text)}
    lacking = sorted(markers - tokenizer.special_ids.keys())
    if lacking:
        raise ChatError(f"the vocabulary has no control token {lacking[0]}: its model does not chat in this format")
    return tokenizer.encode_segments(segments)


FIELDS = {
    "system": ("role", "content", "name", "tools"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "reasoning", "reasoning_content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}


def refuse(where: str, found: str, expected: str) -> NoReturn:
    "Raise ChatError with one line of ASCII."
    raise ChatError(f"{where}: {found}, expected {expected}".encode("ascii", "backslashreplace").decode())


def require(good: object, where: str, found: object, expected: str) -> None:
    "Raise ChatError unless `good`. The value `found` is shown shortened."
    if not good:
        refuse(where, reprlib.repr(found), expected)


def check_message(message: Any, where: str) -> str:
    "The role of a message. Raises ChatError unless it is a dict with a known role and fields of that role."
    require(isinstance(message, dict), where, message, "a dict with the keys role and content")
    role = message.get("role")
    require(isinstance(role, str) and role in FIELDS, f"{where}.role", role, "system, user, assistant or tool")
    for key, value in message.items():
        require(key in FIELDS[role] or not value, f"{where}.{key}", value, f"nothing: role {role} has no such field")
    for key in ("name", "reasoning", "reasoning_content", "tool_call_id"):
        value = message.get(key)
        require(value is None or isinstance(value, str), f"{where}.{key}", value, "a string")
    return role


def content_segments(content: Any, where: str, images: Iterator[tuple[int, int]]) -> list[Segment]:
    "Segments of the content of a message. `images`: (width, height) of those to come. Raises ChatError."
    if isinstance(content, str):
        return plain(content)
    require(isinstance(content, list), where, content, "a string or a list of parts")
    segments = []
    for i, part in enumerate(content):
        here = f"{where}[{i}]"
        require(isinstance(part, dict), here, part, "a dict with the key type")
        kind, text = part.get("type"), part.get("text")
        require(kind in ("text", "image", "image_url"), f"{here}.type", kind, "text, image or image_url")
        if kind == "text":
            require(isinstance(text, str), f"{here}.text", text, "a string")
            segments += plain(text)
        else:
            segments.append((image_marker(next(images, None), here), True))
    return segments


def image_marker(size: Any, where: str) -> str:
    "The control text of an image of `size` (width, height). Raises ChatError unless these are two positive integers."
    if size is None:
        refuse(where, "an image", "its size in `images`, or text alone")
    good = isinstance(size, tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    require(good, where, size, "an image of positive integers (width, height)")
    return f"<|media_begin|>image {size[0]}x{size[1]}<|media_content|><|media_pad|><|media_end|>"


class Call(NamedTuple):
    "One tool call of an assistant: `arguments` by name, or the text that is no JSON."

    id: str | None
    name: str
    arguments: dict[str, Any] | str


def call_of(call: Any, where: str) -> Call:
    "A Call from a dict in OpenAI's shape. Raises ChatError."
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        refuse(where, reprlib.repr(call), "a dict with the key function")
    name: Any = function.get("name")
    call_id, arguments = call.get("id"), function.get("arguments")
    require(call.get("type") in (None, "function"), f"{where}.type", call.get("type"), "function")
    require(isinstance(name, str) and name, f"{where}.function.name", name, "the name of a function")
    require(call_id is None or isinstance(call_id, str), f"{where}.id", call_id, "a string")
    where += ".function.arguments"
    if arguments is None or isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return Call(call_id, name, arguments)
        except (ValueError, RecursionError) as error:  # an integer of 5,000 digits, a list in 1,000 lists
            raise ChatError(f"{where}: cannot be read as JSON: {error}") from None
    good = isinstance(arguments, dict) and all(isinstance(key, str) for key in arguments)
    require(good, where, arguments, "a JSON object")
    return Call(call_id, name, arguments)


def calls_of(message: dict[str, Any], where: str) -> list[Call]:
    "The tool calls of an assistant's message. Raises ChatError, also for two calls of one id."
    calls = message.get("tool_calls")
    require(calls is None or isinstance(calls, list), f"{where}.tool_calls", calls, "a list")
    found = [call_of(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls or ())]
    ids = [call.id for call in found if call.id is not None]
    require(len(ids) == len(set(ids)), f"{where}.tool_calls", ids, "a different id for each call")
    return found


TYPES = {bool: "boolean", type(None): "null", int: "number", float: "number", str: "string", dict: "object",
         list: "array"}


def json_text(value: Any, where: str, **layout: Any) -> str:
    "`value` as JSON, in which characters outside ASCII stay as they are. Raises ChatError if it is none."
    try:
        return json.dumps(value, ensure_ascii=False, **layout)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatError(f"{where}: cannot be written as JSON: {error}") from None


def call_segments(call: Call, number: int, where: str) -> list[Segment]:
    "The element of the call with this number, which counts from 1. Raises ChatError."
    body: list[Segment] = []
    if isinstance(call.arguments, str):
        body += element("json", plain(call.arguments), type="object")
    else:
        for key, value in call.arguments.items():
            kind = TYPES.get(type(value))
            require(kind, f"{where}.arguments.{key}", value, "a value of JSON")
            text = value if isinstance(value, str) else json_text(value, f"{where}.arguments.{key}")
            body += element("argument", plain(text), key=key, type=str(kind))
    return element("call", body, tool=call.name, index=str(number))


def call_number(message: dict[str, Any], calls: list[Call], answered: set[int], where: str) -> int:
    "The index of the call that a result belongs to, which is added to `answered`. Raises ChatError if there is none."
    call_id, name, ids = message.get("tool_call_id"), message.get("name"), [call.id for call in calls]
    if not calls:
        refuse(where, "a result of a tool", "a call of an assistant before it")
    if call_id is None:
        n = len(answered)
        if n >= len(calls):
            refuse(where, f"result {n + 1}", f"{len(calls)}, as many as there are calls")
        require(name in (None, calls[n].name), f"{where}.name", name, f"{calls[n].name}, the function of call {n + 1}")
    else:
        require(call_id in ids, f"{where}.tool_call_id", call_id, f"one of {ids}")
        n = ids.index(call_id)
    if n in answered:
        refuse(where, f"another result of call {n + 1}", "one for each call")
    answered.add(n)
    return n


def in_call_order(messages: Sequence[Any]) -> Iterator[tuple[int, dict[str, str]]]:
    """(index, attributes) of each message in the order of rendering. Raises ChatError.

    Results of tools that follow each other come in the order of their calls.
    """
    calls: list[Call] = []
    answered: set[int] = set()
    place = 0
    roles = [check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    for role, run in groupby(range(len(messages)), roles.__getitem__):
        if role == "tool":
            numbers = {i: call_number(messages[i], calls, answered, f"messages[{i}]") for i in run}
            for i in sorted(numbers, key=numbers.__getitem__):
                place += 1
                yield i, {"role": role, "tool": calls[numbers[i]].name, "index": str(place)}
            continue
        for i in run:
            if role == "assistant":
                calls, answered, place = calls_of(messages[i], f"messages[{i}]"), set(), 0
            name = messages[i].get("name")
            yield i, {"role": role, "name": name} if name else {"role": role}


EFFORTS = ("low", "high", "max")
TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
MORE_TOOLS = ("## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
              "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n")
EFFORT = ("`thinking_effort` guides on how much to think in your thinking channel (not including the response "
          "channel), supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with "
          "`thinking_effort={}`.")
CHOICES = {"required": "You MUST call tools in the next message.",
           "none": "You MUST NOT call any tools in the next message."}
RAW_JSON = ("The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown "
            "code blocks (```json) or any additional formatting.")


def notice(kind: str, text: str) -> list[Segment]:
    "A message in which the system states a setting."
    return message_element(plain(text), role="system", type=kind)


def json_block(value: Any, where: str) -> str:
    "`value` as compact JSON with sorted keys, in a code fence. Raises ChatError."
    return f"```json\n{json_text(value, where, separators=(',', ':'), sort_keys=True)}\n```"


def tools_notice(tools: Any, where: str, heading: str) -> list[Segment]:
    "The declaration of tools in OpenAI's shape, [{type: function, function: {name, ...}}]. Raises ChatError."
    require(isinstance(tools, list), where, tools, "a list of tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        good = isinstance(function, dict) and isinstance(function.get("name"), str)
        require(good, f"{where}[{i}]", tool, "a dict with type function and a function that has a name")
    return notice("tool-declare", heading + json_block(tools, where))


def format_notice(response_format: Any) -> list[Segment]:
    "The notice for a response format in OpenAI's shape, none for text. Raises ChatError."
    where = "response_format"
    require(isinstance(response_format, dict), where, response_format, "a dict with the key type")
    kind, schema = response_format.get("type"), response_format.get("json_schema")
    require(kind in ("text", "json_object", "json_schema"), f"{where}.type", kind, "text, json_object or json_schema")
    text = RAW_JSON.format(kind)
    if kind == "json_schema":
        where += ".json_schema"
        require(isinstance(schema, dict) and isinstance(schema.get("schema"), dict), where, schema,
                "a dict with the key schema, a dict")
        block = json_block(schema["schema"], f"{where}.schema")
        text += f"\nThe JSON data must match the following schema:\n{block}"
    return notice("response-format", text) if kind != "text" else []


def assistant_body(message: dict[str, Any], where: str, thinking: bool,
                   images: Iterator[tuple[int, int]]) -> list[Segment]:
    "Segments between the tags of an assistant's message. Raises ChatError."
    calls, content = calls_of(message, where), message.get("content")
    thoughts = {message[key] for key in ("reasoning", "reasoning_content") if message.get(key)}
    if len(thoughts) > 1:
        refuse(f"{where}.reasoning", "another text than reasoning_content", "one of the two")
    require(content is not None or calls, f"{where}.content", None, "a string, or tool_calls")
    body = []
    if thinking:
        body += element("think", plain(*(thought for thought in thoughts if thought.strip())))
    body += element("response", content_segments(content or "", f"{where}.content", images))
    if calls:
        numbered = enumerate(calls, 1)
        body += element("tools", [s for n, call in numbered for s in call_segments(call, n, f"{where}.tool_calls")])
    return body


def message_segments(message: dict[str, Any], where: str, attributes: dict[str, str], thinking: bool,
                     images: Iterator[tuple[int, int]]) -> list[Segment]:
    "Segments of one message. Raises ChatError."
    content = message.get("content")
    if message.get("tools"):
        require(not content, f"{where}.content", content, "nothing beside tools")
        return tools_notice(message["tools"], f"{where}.tools", MORE_TOOLS)
    if attributes["role"] == "assistant":
        body = assistant_body(message, where, thinking, images)
    else:
        body = content_segments(content, f"{where}.content", images)
    return message_element(body, **attributes)


def render(messages: Sequence[Any], tools: Any = None, *, tool_choice: str | None = None, response_format: Any = None,
           thinking: bool = True, effort: str | None = None, images: Iterable[tuple[int, int]] = (),
           reply: bool = True) -> list[Segment]:
    """The segments of a conversation, for encode_chat. No field of it can make a control token.

    `messages`: dicts in OpenAI's shape, with role, content, name, reasoning, tool_calls, tool_call_id, tools. `tools`,
    `tool_choice` (auto, required, none), `response_format`: as in OpenAI's API. `thinking` False leaves thinking out,
    also that of earlier replies. `effort`: low, high or max; None says nothing about it. `images`: (width, height) of
    each image in order. `reply`: end with the tags after which a reply begins. Raises ChatError.
    """
    require(isinstance(messages, (list, tuple)), "messages", messages, "a list")
    require(isinstance(thinking, bool), "thinking", thinking, "True or False")
    segments, sizes = tools_notice(tools, "tools", TOOLS) if tools else [], iter(images)
    if effort is not None:
        require(thinking, "effort", effort, "nothing when thinking is off")
        require(isinstance(effort, str) and effort in EFFORTS, "effort", effort, "low, high or max")
        segments += notice("thinking-effort", EFFORT.format(effort))
    for i, attributes in in_call_order(messages):
        segments += message_segments(messages[i], f"messages[{i}]", attributes, thinking, sizes)
    if next(sizes, None) is not None:
        refuse("images", "more sizes than images in the messages", "one for each image")
    if tool_choice not in (None, "auto"):
        require(isinstance(tool_choice, str) and tool_choice in CHOICES, "tool_choice", tool_choice,
                "auto, required or none")
        segments += notice("tool-choice", f"The system is invoked with `tool_choice={tool_choice}`.\n"
                                          f"{CHOICES[tool_choice]}")
    if response_format is not None:
        segments += format_notice(response_format)
    if reply:
        segments += open_tag("message", role="assistant") + open_tag("think" if thinking else "response")
    return segments


__all__ = [
    "Segment", "OPEN", "CLOSE", "SEP", "END", "ChatError", "escape", "plain", "open_tag", "close_tag", "element",
    "message_element", "encode_chat", "FIELDS", "refuse", "require", "check_message", "content_segments",
    "image_marker", "Call", "call_of", "calls_of", "TYPES", "json_text", "call_segments", "call_number",
    "in_call_order", "EFFORTS", "TOOLS", "MORE_TOOLS", "EFFORT", "CHOICES", "RAW_JSON", "notice", "json_block",
    "tools_notice", "format_notice", "assistant_body", "message_segments", "render",
]
