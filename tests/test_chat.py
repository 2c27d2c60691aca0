"""k3lib.chat: the release's 23 renderings, control tokens that no field can make, what is refused and in which words.

`chat_k3_tokens.json` holds the tokens that these renderings touch, so their released ids are checked without the
released vocabulary. With it they are checked where the environment variable K3_TIKTOKEN points to its tiktoken.model.
"""
import base64
import copy
import json
import os
import re
from pathlib import Path

import pytest
from common import CONTROL_TOKENS, FIXTURES, MODEL
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lib.chat import CLOSE, END, OPEN, SEP, ChatError, encode_chat, escape, plain, render
from k3lib.fileio import K3Error, UsageError
from k3lib.tokenizer import Tokenizer

KNOWN = json.loads((FIXTURES / "tokenizer" / "chat_k3.json").read_text())["cases"]
TOKENS = json.loads((FIXTURES / "tokenizer" / "chat_k3_tokens.json").read_text())["tokens"]
FIRST = 163_584  # the first control id of the release
SMALL = Tokenizer(MODEL, 512)


def vocabulary(folder, tokens, controls):
    "A Tokenizer with these byte strings as ranks and these names as control tokens."
    ranks = (b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens))
    (folder / "tiktoken.model").write_bytes(b"".join(ranks))
    table = {str(i): {"content": name} for i, name in enumerate(controls, len(tokens))}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
    return Tokenizer(folder)


def rendered(case):
    "The segments of a case. Its options have the names of the release's encoder."
    options = dict(case["options"])
    for theirs, ours in (("thinking_effort", "effort"), ("add_generation_prompt", "reply")):
        if theirs in options:
            options[ours] = options.pop(theirs)
    if "image_prompts" in options:
        sizes = [re.search(r"image (\d+)x(\d+)", prompt) for prompt in options.pop("image_prompts")]
        options["images"] = [(int(size[1]), int(size[2])) for size in sizes]
    return render(case["messages"], **options)


# --- known answers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def touched(tmp_path_factory):
    "The tokens that the known renderings touch, and the released id of each of its ids."
    tokens = [base64.b64decode(token) for _, token in TOKENS]
    ids = [i for i, _ in TOKENS] + list(CONTROL_TOKENS)
    return vocabulary(tmp_path_factory.mktemp("touched"), tokens, CONTROL_TOKENS.values()), ids


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    if not os.environ.get("K3_TIKTOKEN"):
        pytest.skip("K3_TIKTOKEN does not point to the released tiktoken.model: the released vocabulary was NOT tested")
    tokens = [base64.b64decode(line.split()[0]) for line in Path(os.environ["K3_TIKTOKEN"]).read_bytes().splitlines()]
    names = [CONTROL_TOKENS.get(i, f"<|reserved_token_{i}|>") for i in range(FIRST, FIRST + 256)]
    return vocabulary(tmp_path_factory.mktemp("released"), tokens, names)


def test_the_fixture_has_all_cases():
    assert len(KNOWN) == 23 and len(TOKENS) == 497


@pytest.mark.parametrize("case", KNOWN, ids=lambda c: c["name"])
def test_known_renderings(touched, case):
    tokenizer, ids = touched
    messages = copy.deepcopy(case["messages"])
    segments = rendered(case)
    assert segments == [(text, bool(control)) for text, control in case["segments"]]
    assert [ids[i] for i in encode_chat(tokenizer, segments)] == case["ids"]
    assert case["messages"] == messages  # the caller's messages are not changed


def test_known_renderings_with_the_released_vocabulary(released):
    assert [c["name"] for c in KNOWN if encode_chat(released, rendered(c)) != c["ids"]] == []


def test_the_touched_tokens_are_those_of_the_release(released):
    assert all(released.token(i) == base64.b64decode(token) for i, token in TOKENS)


def test_the_trap_of_one_string(touched):
    "Joined and encoded once, the attack of the fixture makes control tokens; all other cases agree."
    tokenizer, ids = touched
    wrong = []
    for case in KNOWN:
        joined = tokenizer.encode("".join(text for text, _ in rendered(case)), allow_special=True)
        wrong += [case["name"]] * ([ids[i] for i in joined] != case["ids"])
    assert wrong == ["markers_in_user_text"]


# --- no field makes a control token --------------------------------------------------------------------------------

MARKERS = [*CONTROL_TOKENS.values(), "<|reserved_token_163600|>", "<|kimi_image_placeholder|>"]
SPICE = ["message", 'role="system"', '"', "&", "&quot;", "&amp;", " ", "\n", "é", "a"]
words = st.lists(st.sampled_from([*MARKERS, *SPICE])
                 | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=6).map("".join)
named = words.filter(bool)
values = st.recursive(st.none() | st.booleans() | st.integers(-10**20, 10**20) | st.floats(allow_nan=False) | words,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
                      max_leaves=6)
arguments = st.dictionaries(words, values, max_size=3)
functions = st.fixed_dictionaries({"name": named, "description": words, "parameters": arguments})
tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}), min_size=1, max_size=2)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=3)


@st.composite
def turns(draw):
    "The messages of one turn: a system's or a user's, then an assistant's, perhaps with calls and their results."
    opening = draw(st.sampled_from(["user", "system"]))
    first = {"role": opening, "content": draw(words | parts)}
    if draw(st.booleans()):
        first["name"] = draw(named)
    given = arguments.map(json.dumps) | arguments | words.map(lambda text: "{" + text)
    calls = [{"id": f"call_{n}", "type": "function", "function": {"name": draw(named), "arguments": draw(given)}}
             for n in range(draw(st.integers(0, 3)))]
    assistant = {"role": "assistant", "content": draw(words), "reasoning": draw(words | st.none())}
    if calls:
        assistant["tool_calls"] = calls
    results = [{"role": "tool", "tool_call_id": call["id"], "content": draw(words)} for call in calls]
    more = [{"role": "system", "tools": draw(tools)}] * draw(st.integers(0, 1))
    return [first, *more, assistant, *draw(st.permutations(results))]


def texts(messages, thinking):
    "The texts that stand between two control tokens as they are, empty ones left out."
    for m in messages:
        content = m.get("content") or ""
        yield content if isinstance(content, str) else "".join(part["text"] for part in content)
        if thinking and (m.get("reasoning") or "").strip():
            yield m["reasoning"]


def runs_of_text(ids):
    "The texts between the control tokens of `ids`."
    runs = [[]]
    for i in ids:
        if i >= SMALL.ranks:
            runs.append([])
        else:
            runs[-1].append(i)
    return [SMALL.decode(run).decode() for run in runs]


conversations = st.lists(turns(), min_size=1, max_size=3).map(lambda lists: [m for turn in lists for m in turn])


@settings(max_examples=40, deadline=None)
@given(conversations, tools | st.none(), arguments, st.booleans())
def test_no_field_makes_a_control_token(messages, declared, schema, thinking):
    "The control ids are those of the renderer's markers, one for one, and no text is changed."
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    segments = render(messages, declared, response_format=form, thinking=thinking)
    ids = encode_chat(SMALL, segments)
    markers = [text for text, control in segments if control]
    assert set(markers) <= {OPEN, CLOSE, SEP, END}
    assert [SMALL.token(i).decode() for i in ids if i >= SMALL.ranks] == markers
    assert SMALL.decode(ids).decode() == "".join(text for text, _ in segments)
    runs = runs_of_text(ids)
    assert [text for text in texts(messages, thinking) if text not in runs] == []


def in_every_field(x):
    function = {"name": x, "arguments": {x: x, x + "2": {x: [x]}}}
    tool = {"type": "function", "function": {"name": x, "description": x, "parameters": {x: x}}}
    messages = [
        {"role": "system", "name": x, "content": x},
        {"role": "system", "tools": [tool]},
        {"role": "user", "name": x, "content": [{"type": "text", "text": x},
                                                {"type": "image_url", "image_url": {"url": x}}]},
        {"role": "assistant", "name": x, "content": x, "reasoning": x, "tool_calls": [
            {"id": x, "function": function}, {"id": x + "2", "function": {"name": x, "arguments": "{" + x}}]},
        {"role": "tool", "tool_call_id": x + "2", "content": x, "name": x},
        {"role": "tool", "tool_call_id": x, "content": x},
    ]
    form = {"type": "json_schema", "json_schema": {"name": x, "schema": {x: x}}}
    return render(messages, [tool], response_format=form, tool_choice="required", effort="max", images=[(1, 2)])


@pytest.mark.parametrize("name", [*MARKERS, "".join(MARKERS), '"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"])
def test_each_field_with_each_marker(touched, name):
    tokenizer, _ = touched
    for build in (in_every_field(name), in_every_field(f"a{name} {name}")):
        controls = [i for i in encode_chat(tokenizer, build) if i >= tokenizer.ranks]
        assert controls == [i for i in encode_chat(tokenizer, in_every_field("x")) if i >= tokenizer.ranks]


@settings(max_examples=50, deadline=None)
@given(words)
def test_an_attribute_cannot_end_early(name):
    assert '"' not in escape(name) and "&" not in re.sub("&amp;|&quot;", "", escape(name))


# --- rendering -----------------------------------------------------------------------------------------------------


def text_of(*arguments, **options):
    return "".join(text for text, _ in render(*arguments, reply=False, **options))


def call(name="f", arguments="{}", **fields):
    return {"function": {"name": name, "arguments": arguments}, **fields}


def asking(*calls):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def test_tools_in_any_order_of_keys_are_the_same_ids():
    one = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [{"d": 1, "c": "é"}]}}}
    other = {"function": {"parameters": {"a": [{"c": "é", "d": 1}], "b": 1}, "name": "f"}, "type": "function"}
    assert render([], [one]) == render([], [other]) and '"a":[{"c":"é","d":1}]' in text_of([], [one])


def test_thinking_off_leaves_all_thinking_out():
    messages = [{"role": "assistant", "content": "a", "reasoning": "b"}]
    assert "think" in text_of(messages) and "think" not in text_of(messages, thinking=False)
    assert render([])[-2:] == [("think", False), (SEP, True)]
    assert render([], thinking=False)[-2:] == [("response", False), (SEP, True)]


@pytest.mark.parametrize("reasoning", [None, "", " \n\t"])
def test_blank_thinking_is_an_empty_element(reasoning):
    said = {"role": "assistant", "content": "a", "reasoning": reasoning}
    assert render([said]) == render([{"role": "assistant", "content": "a"}])


def test_results_without_ids_follow_the_order_of_calls():
    messages = [asking(call("f"), call("g")), {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert text_of(messages).count('tool="f" index="1"') == 2  # of the call and of its result
    assert re.search('role="tool" tool="g" index="2"<.sep.>2', text_of(messages))


def test_results_are_counted_anew_after_each_assistant():
    turn = [asking(call("f", id="a")), {"role": "tool", "content": "1", "tool_call_id": "a"}]
    assert text_of(turn + turn).count('role="tool" tool="f" index="1"') == 2


def test_results_go_on_after_another_message():
    messages = [asking(call("f", id="a"), call("g", id="b")), {"role": "tool", "content": "1", "tool_call_id": "a"},
                {"role": "user", "content": "wait"}, {"role": "tool", "content": "2", "tool_call_id": "b"}]
    assert 'role="tool" tool="g" index="2"' in text_of(messages)


def test_arguments_keep_their_types_and_their_order():
    found = re.findall('key="(.*?)" type="(.*?)"<.sep.>(.*?)<.close', text_of([asking(call("f", json.dumps(
        {"z": "1", "a": 1, "b": True, "n": None, "l": [1, "é"], "o": {"y": 1, "x": 2.5}, "e": 1e400})))]))
    assert found == [("z", "string", "1"), ("a", "number", "1"), ("b", "boolean", "true"), ("n", "null", "null"),
                     ("l", "array", '[1, "é"]'), ("o", "object", '{"y": 1, "x": 2.5}'), ("e", "number", "Infinity")]


@pytest.mark.parametrize("nothing", [None, "", "  ", "{}", {}])
def test_a_call_without_arguments(nothing):
    assert "argument" not in text_of([asking(call("f", nothing))])


def test_fields_that_say_nothing_are_not_refused():
    "Clients send what they got: many keys that are None or empty."
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert render([{"role": "assistant", "content": "a", **empty}]) == render([{"role": "assistant", "content": "a"}])


def test_a_placeholder_in_a_text_is_text():
    "The release replaces it by the image, so a user could show an image twice."
    with pytest.raises(ChatError, match="more sizes than images"):
        render([{"role": "user", "content": "<|kimi_image_placeholder|>"}], images=[(1, 1)])


# --- refusals ------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "x"}
DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]
REFUSED = [
    ("hello", {}, "messages: 'hello', expected a list"),
    (["hello"], {}, "messages[0]: 'hello', expected a dict with the keys role and content"),
    ([{"content": "x"}], {}, "messages[0].role: None, expected system, user, assistant or tool"),
    ([USER, {"role": "developer", "content": "x"}], {}, "messages[1].role: 'developer', expected system, user, "
     "assistant or tool"),
    ([{"role": ["user"], "content": "x"}], {}, "messages[0].role: ['user'], expected system, user, assistant or tool"),
    ([{"role": "user"}], {}, "messages[0].content: None, expected a string or a list of parts"),
    ([{"role": "user", "content": b"x"}], {}, "messages[0].content: b'x', expected a string or a list of parts"),
    ([{"role": "user", "content": {"text": "x"}}], {}, "messages[0].content: {'text': 'x'}, expected a string or a "
     "list of parts"),
    ([{"role": "user", "content": "é" * 99, "nick": "é"}], {}, r"messages[0].nick: '\xe9', expected nothing: role user "
     "has no such field"),
    ([{**USER, "name": 5}], {}, "messages[0].name: 5, expected a string"),
    ([{**USER, "tool_calls": [call()]}], {}, "messages[0].tool_calls: [{'function': {'arguments': '{}', 'name': "
     "'f'}}], expected nothing: role user has no such field"),
    ([{"role": "user", "content": ["x"]}], {}, "messages[0].content[0]: 'x', expected a dict with the key type"),
    ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages[0].content[0].text: None, expected a string"),
    ([{"role": "user", "content": [{"type": "input_audio"}]}], {}, "messages[0].content[0].type: 'input_audio', "
     "expected text, image or image_url"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0]: an image, expected its size "
     "in `images`, or text alone"),
    ([{"role": "user", "content": [{"type": "image"}]}], {"images": [(0, 5)]}, "messages[0].content[0]: (0, 5), "
     "expected an image of positive integers (width, height)"),
    ([USER], {"images": [(1, 1)]}, "images: more sizes than images in the messages, expected one for each image"),
    ([{"role": "system", "content": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}], {},
     "messages[0].content: 'x', expected nothing beside tools"),
    ([{"role": "assistant"}], {}, "messages[0].content: None, expected a string, or tool_calls"),
    ([{"role": "assistant", "content": "", "reasoning": 1}], {}, "messages[0].reasoning: 1, expected a string"),
    ([{"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}], {}, "messages[0].reasoning: "
     "another text than reasoning_content, expected one of the two"),
    ([{"role": "assistant", "content": "", "tool_calls": {"f": 1}}], {}, "messages[0].tool_calls: {'f': 1}, expected a "
     "list"),
    ([asking("f")], {}, "messages[0].tool_calls[0]: 'f', expected a dict with the key function"),
    ([asking(call(""))], {}, "messages[0].tool_calls[0].function.name: '', expected the name of a function"),
    ([asking(call(type="custom"))], {}, "messages[0].tool_calls[0].type: 'custom', expected function"),
    ([asking(call(id=1))], {}, "messages[0].tool_calls[0].id: 1, expected a string"),
    ([asking(call(id="a"), call(id="a"))], {}, "messages[0].tool_calls: ['a', 'a'], expected a different id for each "
     "call"),
    ([asking(call("f", "[1]"))], {}, "messages[0].tool_calls[0].function.arguments: [1], expected a JSON object"),
    ([asking(call("f", {1: 2}))], {}, "messages[0].tool_calls[0].function.arguments: {1: 2}, expected a JSON object"),
    ([asking(call("f", {"a": {1, 2}}))], {}, "messages[0].tool_calls.arguments.a: {1, 2}, expected a value of JSON"),
    ([asking(call("f", {"a": [b"x"]}))], {}, "messages[0].tool_calls.arguments.a: cannot be written as JSON: Object of "
     "type bytes is not JSON serializable"),
    ([{"role": "tool", "content": "x"}], {}, "messages[0]: a result of a tool, expected a call of an assistant before "
     "it"),
    ([{"role": "assistant", "content": "x"}, {"role": "tool", "content": "x", "tool_call_id": "a"}], {},
     "messages[1]: a result of a tool, expected a call of an assistant before it"),
    ([asking(call(id="a")), {"role": "tool", "content": "x", "tool_call_id": "b"}], {}, "messages[1].tool_call_id: "
     "'b', expected one of ['a']"),
    ([asking(call()), {"role": "tool", "content": "x", "tool_call_id": "b"}], {}, "messages[1].tool_call_id: 'b', "
     "expected one of [None]"),
    ([asking(call()), *[{"role": "tool", "content": "x"}] * 2], {}, "messages[2]: result 2, expected 1, as many as "
     "there are calls"),
    ([asking(call(id="a")), *[{"role": "tool", "content": "x", "tool_call_id": "a"}] * 2], {}, "messages[2]: another "
     "result of call 1, expected one for each call"),
    ([asking(call("f")), {"role": "tool", "content": "x", "name": "g"}], {}, "messages[1].name: 'g', expected f, the "
     "function of call 1"),
    ([asking(call("f")), {"role": "tool", "content": None}], {}, "messages[1].content: None, expected a string or a "
     "list of parts"),
    ([], {"tools": {"f": 1}}, "tools: {'f': 1}, expected a list of tools"),
    ([], {"tools": [{"name": "f"}]}, "tools[0]: {'name': 'f'}, expected a dict with type function and a function that "
     "has a name"),
    ([], {"tools": [{"type": "function", "function": {"name": "f", "x": {1, 2}}}]}, "tools: cannot be written as JSON: "
     "Object of type set is not JSON serializable"),
    ([], {"tool_choice": "f"}, "tool_choice: 'f', expected auto, required or none"),
    ([], {"tool_choice": {"type": "function"}}, "tool_choice: {'type': 'function'}, expected auto, required or none"),
    ([], {"effort": "medium"}, "effort: 'medium', expected low, high or max"),
    ([], {"effort": ["low"]}, "effort: ['low'], expected low, high or max"),
    ([], {"effort": "low", "thinking": False}, "effort: 'low', expected nothing when thinking is off"),
    ([], {"thinking": "off"}, "thinking: 'off', expected True or False"),
    ([], {"response_format": "json"}, "response_format: 'json', expected a dict with the key type"),
    ([], {"response_format": {"type": "xml"}}, "response_format.type: 'xml', expected text, json_object or "
     "json_schema"),
    ([], {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema: "
     "{'name': 'x'}, expected a dict with the key schema, a dict"),
]


@pytest.mark.parametrize("messages, options, words", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_rendered_is_refused_by_name(messages, options, words):
    with pytest.raises(ChatError) as caught:
        render(messages, **options)
    assert str(caught.value) == words
    assert isinstance(caught.value, UsageError) and caught.value.exit_code == 2


@pytest.mark.parametrize("arguments", ["[" * 200_000, '{"a": ' + "9" * 5_000 + "}", {"a": DEEP}],
                         ids=["deep", "long", "list"])
def test_arguments_beyond_what_json_reads_end_in_one_line(arguments):
    "They are refused, or rendered: no RecursionError comes out."
    try:
        render([asking(call("f", arguments))])
    except ChatError as error:
        assert "\n" not in str(error) and len(str(error)) < 300


def test_a_vocabulary_of_another_model_is_refused(tmp_path):
    other = vocabulary(tmp_path, [bytes([b]) for b in range(256)], [OPEN, CLOSE, SEP, "[EOS]"])
    with pytest.raises(ChatError, match=r"no control token <\|end_of_msg\|>: its model does not chat in this format"):
        encode_chat(other, render([USER]))
    assert encode_chat(other, plain("<|end_of_msg|>")) == list(b"<|end_of_msg|>")
    with pytest.raises(K3Error, match="media_begin"):
        encode_chat(SMALL, render([{"role": "user", "content": [{"type": "image"}]}], images=[(4, 4)]))
