"""k3lib.reply: replies read id by id and as text, odd ones, and which ids of a grown conversation are not read yet."""
import json

import pytest
from common import FIXTURES, MODEL
from hypothesis import given, settings
from hypothesis import strategies as st

from k3lib.chat import ChatError, encode_chat, escape, render
from k3lib.reply import Reply, ReplyParser, ToolCall, parse_reply, unescape, unread
from k3lib.tokenizer import Tokenizer, TokenizerError

T = Tokenizer(MODEL, 512)
KNOWN = json.loads((FIXTURES / "tokenizer" / "chat_k3.json").read_text())["cases"]
END = T.special_ids["<|end_of_msg|>"]
OPEN = T.special_ids["<|open|>"]


def prompt_ids(messages=(), **options):
    return encode_chat(T, render(list(messages), **options))


def reply_ids(message, thinking=True):
    "The ids that a model would generate to say `message`."
    prompt = prompt_ids(thinking=thinking)
    whole = encode_chat(T, render([message], reply=False, thinking=thinking))
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt):]


def read_text(text, thinking=True, step=1):
    "The reply of a text that comes in steps of this many characters, and the text that was shown meanwhile."
    parser = ReplyParser(thinking=thinking)
    shown = [delta for i in range(0, len(text), step) for delta in parser.feed_text(text[i : i + step])]
    return parser.finish(), shown


# --- what render writes is read back -------------------------------------------------------------------------------

MARKERS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "think", "response", "&quot;", "&amp;", '"',
           "&"]
words = st.lists(st.sampled_from(MARKERS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
                 max_size=5).map("".join)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(st.none() | st.booleans() | numbers | words,
                      lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
                      max_leaves=5)
calls = st.lists(st.tuples(words.filter(bool), st.dictionaries(words, values, max_size=3).map(json.dumps)
                           | words.map(lambda text: "{" + text).filter(lambda text: text[-1:] != "}")), max_size=3)


@st.composite
def assistants(draw):
    message = {"role": "assistant", "content": draw(words)}
    if (reasoning := draw(words)).strip():
        message["reasoning"] = reasoning
    if named := draw(calls):
        message["tool_calls"] = [{"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": text}}
                                 for n, (name, text) in enumerate(named, 1)]
    return message


def as_read(message):
    "The message with arguments as values: their layout as JSON may change."
    def value(text):
        try:
            return json.loads(text)
        except ValueError:
            return text

    made = [(call["function"]["name"], value(call["function"]["arguments"])) for call in message.get("tool_calls", [])]
    return message["content"], message.get("reasoning"), made


@settings(max_examples=60, deadline=None)
@given(assistants(), st.booleans())
def test_messages_come_back(message, thinking):
    reply = parse_reply(T, reply_ids(message, thinking), thinking)
    if not thinking:
        message.pop("reasoning", None)
    assert reply.oddities == ()
    assert as_read(reply.message()) == as_read(message)
    assert reply.stop == ("tool_calls" if "tool_calls" in message else "stop")
    again = render([reply.message()], thinking=thinking)
    assert again == render([message], thinking=thinking)


@pytest.mark.parametrize("case", [c for c in KNOWN if any(m["role"] == "assistant" for m in c["messages"])],
                         ids=lambda c: c["name"])
def test_the_replies_of_the_known_renderings(case):
    for message in case["messages"]:
        if message["role"] == "assistant":
            reply = parse_reply(T, reply_ids(message))
            assert reply.oddities == () and render([reply.message()]) == render([message])


@settings(max_examples=100, deadline=None)
@given(words)
def test_unescape_takes_back_what_escape_did(text):
    assert unescape(escape(text)) == text
    assert unescape(escape(escape(text))) == escape(text)


# --- while the ids come --------------------------------------------------------------------------------------------

SPOKEN = {"role": "assistant", "reasoning": "in short", "content": "日本 🙂 <|sep|>", "tool_calls": [
    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": "日本", "n": 3}'}}]}


def test_text_is_shown_as_it_comes_and_nothing_else():
    "Thinking first, then the response; whole characters; the call when it is complete; done at the end of the message."
    parser, shown, done, made = ReplyParser(T), [], [], []
    ids = reply_ids(SPOKEN)
    for i in ids:
        shown += parser.feed(i)
        done.append(parser.done)
        made.append(len(parser.calls))
    assert "".join(d.text for d in shown if d.channel == "thinking") == "in short"
    assert "".join(d.text for d in shown if d.channel == "response") == "日本 🙂 <|sep|>"
    assert [d.channel for d in shown] == sorted((d.channel for d in shown), reverse=True)
    assert "\ufffd" not in "".join(d.text for d in shown) and all(d.text for d in shown)
    assert done.index(True) == len(ids) - 2 and made.index(1) < done.index(True)  # before <|end_of_msg|>
    assert parser.calls == [ToolCall("f", '{"x": "日本", "n": 3}')]
    assert parser.finish().message() == SPOKEN


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_text_in_any_steps_is_the_same_reply(step):
    message = {**SPOKEN, "content": "a < b <| c"}  # a text that spells a marker would be taken for it
    text = T.decode(reply_ids(message)).decode()
    reply, shown = read_text(text, step=step)
    assert reply.message() == message and reply.oddities == ()
    assert "".join(d.text for d in shown if d.channel == "response") == "a < b <| c"


def test_from_ids_a_spelled_marker_is_text_and_from_text_it_is_the_marker():
    message = {"role": "assistant", "content": "a<|close|>message<|sep|>b"}
    ids = reply_ids(message)
    assert parse_reply(T, ids).response == message["content"]
    reply, _ = read_text(T.decode(ids).decode())
    assert reply.response == "a" and reply.oddities


def test_every_cut_is_read():
    "A reply that stops anywhere: no error, no call that was not complete, and stop is length until the message ends."
    ids = reply_ids(SPOKEN)
    for n in range(len(ids)):
        reply = parse_reply(T, ids[:n])
        assert reply.stop == ("tool_calls" if n >= len(ids) - 2 else "length"), n
        assert SPOKEN["reasoning"].startswith(reply.thinking) and "<|" not in reply.thinking
        assert SPOKEN["content"].startswith(reply.response.rstrip("\ufffd"))
        assert reply.tool_calls in ((), (ToolCall("f", '{"x": "日本", "n": 3}'),))
        assert render([reply.message()])


def test_half_a_character_before_a_tag():
    "It is shown as U+FFFD where it stands, and its bytes do not join those of the next element."
    one, two = T.encode("é".encode()[:1]), T.encode("é".encode()[1:])
    close, think, separator, respond = (T.encode(text, allow_special=True) for text in (
        "<|close|>", "think", "<|sep|>", "<|open|>response<|sep|>"))
    reply = parse_reply(T, [*one, *close, *think, *separator, *respond, *two, END])
    assert (reply.thinking, reply.response) == ("\ufffd", "\ufffd")


def test_another_stop_id_ends_the_reply():
    ids = T.encode("hm") + [T.special_ids["[EOS]"]]
    assert parse_reply(T, ids) == Reply("hm", "", (), "stop", ("think is not closed before message",))


def test_other_control_tokens_are_shown_by_name():
    "They are no part of the format, and as text they cannot become control tokens when the reply is rendered."
    reply = parse_reply(T, [*T.encode("a"), T.special_ids["[BOS]"], END])
    assert reply.thinking == "a[BOS]"
    assert T.special_ids["[BOS]"] not in prompt_ids([reply.message()])


def test_ids_that_do_not_exist_and_parsers_without_a_vocabulary():
    with pytest.raises(TokenizerError, match="token id 512"):
        ReplyParser(T).feed(512)
    with pytest.raises(ChatError, match="reads text, not ids"):
        ReplyParser().feed(1)


# --- odd replies ---------------------------------------------------------------------------------------------------

R, E = "<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"
CALL = '<|open|>call tool="f" index="1"<|sep|>'
ARGUMENT = '<|open|>argument key="a" type="string"<|sep|>1<|close|>argument<|sep|>'
TOOLS = f"<|open|>tools<|sep|>{CALL}{ARGUMENT}"
F = (ToolCall("f", '{"a": "1"}'),)
ODD = [
    # thinking, response, calls, stop of a reply's text, and a word of what was odd
    (f"so<|close|>think<|open|>response<|sep|>Hi{E}", "so", "Hi", (), "stop", "no <|sep|>"),
    (f"so<|close|>think Hi{E}", "so", "Hi", (), "stop", "no <|sep|>"),
    (f"so<|close|>think<|sep|> \n Hi{E}", "so", "Hi", (), "stop", "outside of the elements"),
    (f"so<|close|>think<|sep|><|open|>responseHi{E}", "so", "Hi", (), "stop", "no <|sep|>"),
    (f"so<|close|><|sep|>{R}Hi{E}", "so", "Hi", (), "stop", "no name"),
    (f"so{R}Hi{E}", "so", "Hi", (), "stop", "response begins in think"),
    (f"<|close|>think<|sep|>Hi{E}", "", "Hi", (), "stop", "outside of the elements"),
    (f"<|close|>think<|sep|>\n\n{R}Hi{E}", "", "Hi", (), "stop", ""),
    (f"<|open|>think<|sep|>so<|close|>think<|sep|>{R}Hi{E}", "so", "Hi", (), "stop", "think begins in think"),
    ("so<|close|>message<|sep|>", "so", "", (), "stop", "think is not closed"),
    ("so<|end_of_msg|>", "so", "", (), "stop", "think is not closed"),
    (f"so{TOOLS}<|close|>call<|sep|><|close|>tools<|sep|><|end_of_msg|>", "so", "", F, "tool_calls",
     "tools begins in think"),
    (f"<|close|>think<|sep|>{R}Hi{TOOLS}<|close|>tools<|sep|><|close|>message<|sep|>", "", "Hi", F, "tool_calls",
     "call is not closed before tools"),
    (f"<|close|>think<|sep|>{TOOLS}{CALL}<|end_of_msg|>", "", "", (*F, ToolCall("f", "{}")), "tool_calls",
     "call begins in call"),
    (f"<|close|>think<|sep|>{TOOLS}", "", "", (), "length", "a call of 'f' was cut off"),
    (f"so<|close|>think<|sep|>{R}Hi<|open|>message role=\"user\"<|sep|>Do it", "so", "Hi", (), "stop",
     "another message"),
    (f"so<|close|>think<|sep|>{R}Hi{E}more", "so", "Hi", (), "stop", "after the message"),
    (f"so<|close|>think<|sep|>{R}a<|open|>b<|sep|>c<|close|>d<|sep|>{E}", "so", "a<|open|>b<|sep|>c<|close|>d<|sep|>",
     (), "stop", "taken for text"),
    (f"so<|close|>think<|sep|>{R}{ARGUMENT}{E}", "so", '<|open|>argument key="a" type="string"<|sep|>1', (), "stop",
     "taken for text"),
    (f"so<|sep|>{R}Hi{E}", "so", "Hi", (), "stop", "outside of a tag"),
    (f"so<|close|>response<|sep|>{R}Hi{E}", "so", "Hi", (), "stop", "was not open"),
    (f"<|close|>think<|sep|><|open|>tools<|sep|>x{CALL}y{ARGUMENT}<|end_of_msg|>", "", "", F, "tool_calls",
     "in tools, in no element"),
    ("<|close|>think<|sep|><|open|>tools<|sep|><|open|>call index=\"1\"<|sep|><|close|>call<|sep|><|end_of_msg|>", "",
     "", (), "stop", "names no tool"),
    (f"so<|close|>think<|sep|>{R}Hi<|close|>response<|sep|><|close|>message", "so", "Hi", (), "stop", "cut off"),
    (f"so<|close|>think<|sep|>{R}Hi<|close|>respo", "so", "Hi", (), "length", "cut off"),
    (f"so<|close|>think<|sep|>{R}Hi<|close|>response<|sep|><|open|>tools", "so", "Hi", (), "length", "cut off"),
    (f"so<|close|>think<|sep|>{R}Hi <|", "so", "Hi <|", (), "length", ""),
]


@pytest.mark.parametrize("text, thinking, response, made, stop, odd", ODD, ids=range(len(ODD)))
def test_odd_replies(text, thinking, response, made, stop, odd):
    "Read from the text in one piece and by the character, and from ids."
    ids = T.encode(text, allow_special=True)
    for reply in (read_text(text)[0], read_text(text, step=10_000)[0], parse_reply(T, ids)):
        assert (reply.thinking, reply.response, reply.tool_calls, reply.stop) == (thinking, response, made, stop), text
        assert any(odd in sentence for sentence in reply.oddities) if odd else not reply.oddities
        assert render([reply.message()]) and len(set(reply.oddities)) == len(reply.oddities)


@pytest.mark.parametrize("kind, text, value, odd", [
    ("string", "1", "1", False), ("number", "1", 1, False), ("number", "1e3", 1000.0, False),
    ("boolean", "true", True, False), ("null", "null", None, False), ("array", "[1,2]", [1, 2], False),
    ("object", '{"b":1}', {"b": 1}, False),
    ("number", "one", "one", True), ("array", "[" * 100_000, "[" * 100_000, True), ("number", "", "", True),
    ("string", "", "", False), ("string", '"&quot;', '"&quot;', False)])
def test_values_of_arguments(kind, text, value, odd):
    tag = f'<|open|>argument key="k&amp;quot;&quot;" type="{kind}"<|sep|>'
    reply, _ = read_text(f"<|open|>tools<|sep|>{CALL}{tag}{text}<|close|>argument<|sep|><|close|>call<|sep|>"
                         "<|end_of_msg|>", step=10**6)
    assert json.loads(reply.tool_calls[0].arguments) == {'k&quot;"': value}
    assert any("no JSON" in sentence for sentence in reply.oddities) == odd


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]", "message", "think",
                                 "response", "tools", 'call tool="f"', 'argument key="a" type="number"', "json", " ",
                                 "x", "1", "é"]), max_size=30), st.booleans())
def test_any_soup_of_tags_is_read(pieces, thinking):
    "No error, no control token in what is rendered again, no text that the stream showed and the reply lacks."
    parser, shown = ReplyParser(T, thinking), {"thinking": "", "response": ""}
    for i in T.encode("".join(pieces), allow_special=True):
        for channel, text in parser.feed(i):
            shown[channel] += text
    reply = parser.finish()
    assert reply.thinking == shown["thinking"] and reply.response == shown["response"]
    segments = render([reply.message()], thinking=thinking)
    controls = [i for i in encode_chat(T, segments) if i >= T.ranks]
    assert len(controls) == sum(control for _, control in segments)


# --- what is new ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(words, assistants()), min_size=1, max_size=3), st.booleans(),
       st.sampled_from([None, [{"type": "function", "function": {"name": "f"}}]]))
def test_a_turn_reads_only_what_is_new(talk, thinking, tools):
    "The ids of a turn and of its reply are a prefix of the next turn's: no id is read twice, none is left out."
    messages, read = [], []
    for question, answer in talk:
        messages.append({"role": "user", "content": question})
        wanted = prompt_ids(messages, tools=tools, thinking=thinking)
        kept, new = unread(T, read, wanted)
        assert kept == len(read) and read + new == wanted
        read = wanted + reply_ids(answer, thinking)
        messages.append(parse_reply(T, read[len(wanted):], thinking).message())
        messages += [{"role": "tool", "content": "1", "tool_call_id": call["id"]}
                     for call in answer.get("tool_calls", ())]


def conversation(thinking=True, **options):
    "(ids of prompt and reply, messages) of one turn."
    messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "2+2?"}]
    said = {"role": "assistant", "content": "because four", "reasoning": "add"}
    ids = prompt_ids(messages, thinking=thinking, **options)
    reply = reply_ids(said, thinking)
    return ids, ids + reply, [*messages, parse_reply(T, reply, thinking).message()]


def next_turn(messages, **options):
    return prompt_ids([*messages, {"role": "user", "content": "and 3?"}], **options)


def test_where_rendering_is_not_a_prefix():
    prompt, read, messages = conversation()
    assert unread(T, read, next_turn(messages))[0] == len(read)
    last = len(prompt) - prompt[::-1].index(OPEN)  # where the name of the prompt's last element stands
    assert unread(T, read, next_turn(messages, thinking=False))[0] == last
    forgetful = [{**m, "reasoning": None} for m in messages]
    assert unread(T, read, next_turn(forgetful))[0] == len(prompt)
    assert unread(T, read, next_turn(messages, effort="low"))[0] < len(prompt_ids(messages[:1], reply=False))
    chosen, said, messages = conversation(tool_choice="none")
    at = len(prompt_ids(messages[:2], reply=False))  # there the notice stands, and now a reply
    assert at < unread(T, said, next_turn(messages))[0] < at + len(prompt_ids(tool_choice="none"))


def test_the_end_of_a_reply_need_not_have_been_read():
    "Generation stops at a stop id, which the model has not read yet."
    _, read, messages = conversation()
    wanted = next_turn(messages)
    assert unread(T, read[:-1], wanted) == (len(read) - 1, wanted[len(read) - 1:]) and wanted[len(read) - 1] == END


def test_a_reply_that_was_stopped_goes_on():
    prompt, read, messages = conversation()
    for cut in range(len(prompt), len(read)):
        said = parse_reply(T, read[len(prompt):cut])
        kept, new = unread(T, read[:cut], next_turn([*messages[:2], said.message()]))
        assert kept >= len(prompt) and new


def test_another_spelling_of_a_word_stands():
    "The model may use other ids than the encoder for the same bytes; between control tokens only the bytes count."
    prompt, read, messages = conversation()
    usual, other = T.encode("because four"), [i for letter in "because four" for i in T.encode(letter)]
    at = next(i for i in range(len(read)) if read[i : i + len(usual)] == usual)
    spelled = read[:at] + other + read[at + len(usual):]
    assert len(other) > len(usual)
    assert unread(T, spelled, next_turn(messages)) == (len(spelled), next_turn(messages)[len(read):])
    wrong = read[:at] + T.encode("because five") + read[at + len(usual):]
    kept, new = unread(T, wrong, next_turn(messages))
    assert kept <= at + len(usual) and wrong[:kept] + new == next_turn(messages)
    open_end = spelled[: at + len(other) - 1]  # the text has not ended: there only equal ids count
    kept, new = unread(T, open_end, next_turn(messages))
    assert at <= kept < len(open_end) and open_end[:kept] + new == next_turn(messages)


some_ids = st.lists(st.integers(490, 511) | st.integers(60, 70), max_size=12)


@settings(max_examples=200, deadline=None)
@given(some_ids, some_ids, st.integers(0, 12))
def test_unread_of_any_ids(a, b, shared):
    "The kept ids and the new ones have the bytes and the control tokens of what is wanted."
    read, wanted = b[:shared] + a, b
    kept, new = unread(T, read, wanted)
    assert 0 <= kept <= len(read)
    said = read[:kept] + new
    assert T.decode(said) == T.decode(wanted)
    assert [i for i in said if i >= T.ranks] == [i for i in wanted if i >= T.ranks]
    assert kept >= min(shared, len(b))


def test_nothing_read_and_nothing_wanted():
    assert unread(T, [], [1, 2]) == (0, [1, 2])
    assert unread(T, [1, 2], []) == (0, [])
    assert unread(T, [1, 2], [1, 2]) == (2, [])
