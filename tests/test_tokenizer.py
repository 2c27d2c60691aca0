"""k3lib.tokenizer: known answers, bytes that survive, text that stays text, files that are refused.

Tests of the released vocabulary run where the environment variable K3_TIKTOKEN points to its tiktoken.model.
"""
import base64
import codecs
import hashlib
import json
import os
import random
import re
import struct
import subprocess
import sys
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tokenizers
from common import CONTROL_TOKENS, EXPECTED, FIXTURES, MODEL, ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3lib import tokenizer
from k3lib.fileio import UsageError
from k3lib.tokenizer import (
    PATTERN,
    RUN_CHARS,
    Tokenizer,
    TokenizerError,
    as_chars,
    cut,
    decoded,
    open_tokenizer,
    read_ranks,
    text_parts,
)

VOCABULARY = FIXTURES / "tokenizer"
RANKS = (VOCABULARY / "synthetic.tiktoken").read_bytes()
LINES = RANKS.splitlines(keepends=True)
CONFIG = json.loads((VOCABULARY / "synthetic_config.json").read_text())
SPECIALS = {int(i): entry["content"] for i, entry in CONFIG["added_tokens_decoder"].items()}
# The release's own pattern, with its class intersections.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PAT_STR = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
SPLIT = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PAT_STR), "isolated")


def write(folder, ranks=RANKS, config=CONFIG):
    "Write the two files of a vocabulary into `folder`; returns it."
    (folder / "tiktoken.model").write_bytes(ranks)
    (folder / "tokenizer_config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Tokenizer(write(tmp_path_factory.mktemp("small")))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    if not os.environ.get("K3_TIKTOKEN"):
        pytest.skip("K3_TIKTOKEN does not point to the released tiktoken.model: the released vocabulary was NOT tested")
    ranks = Path(os.environ["K3_TIKTOKEN"]).read_bytes()
    assert hashlib.sha256(ranks).hexdigest() == "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
    table = {str(i): {"content": name, "special": i not in (163587, 163588, 163589)}
             for i, name in CONTROL_TOKENS.items()}
    config = {"added_tokens_decoder": table, "eos_token": "[EOS]"}
    return Tokenizer(write(tmp_path_factory.mktemp("released"), ranks, config))


def plain_merge(piece, rank):
    "Ids of one piece by the definition: join the adjacent pair of lowest rank, leftmost first."
    if piece in rank:
        return [rank[piece]]
    parts = [bytes([b]) for b in piece]
    while len(parts) > 1:
        joins = [rank.get(a + b, len(rank)) for a, b in pairwise(parts)]
        i = joins.index(min(joins))
        if joins[i] == len(rank):
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [rank[part] for part in parts]


def plain_encode(text, rank):
    return [i for piece, _ in SPLIT.pre_tokenize_str(text) for i in plain_merge(piece.encode(), rank)]


SMALL_RANK = {base64.b64decode(line.split()[0]): i for i, line in enumerate(LINES)}


def case_text(case):
    return case["text"] if "text" in case else case["repeat"][0] * case["repeat"][1]


def fnv1a64(data):
    h = 0xCBF29CE484222325
    for b in data:
        h = (h ^ b) * 0x100000001B3 % 2**64
    return f"{h:016x}"


def check_case(tokenizer, case):
    text = case_text(case)
    ids = tokenizer.encode(text, allow_special=case.get("special", False))
    data = struct.pack(f"<{len(ids)}I", *ids)
    assert ids == case.get("ids", ids), f"{text[:60]!r}: {ids[:12]}, expected {case['ids'][:12]}"
    assert len(ids) == case.get("n", len(ids)), f"{text[:60]!r}: {len(ids)} ids, expected {case['n']}"
    assert hashlib.sha256(data).hexdigest() == case.get("sha256_le32", hashlib.sha256(data).hexdigest()), text[:60]
    if "fnv1a64_le32" in case:
        assert fnv1a64(data) == case["fnv1a64_le32"], text[:60]
    if "ids_special" in case:
        assert tokenizer.encode(text, allow_special=True) == case["ids_special"], text
    assert tokenizer.decode(ids) == text.encode()


def cases(name):
    return json.loads((VOCABULARY / name).read_text())["cases"]


# --- known answers, small vocabulary -------------------------------------------------------------------------------


def test_id_table(small):
    assert (small.ranks, small.vocab_size) == (1000, 1256)
    assert [small.token(i) for i in (0, 32, 64, 188, 198, 220, 187)] == [b"!", b"A", b"a", b"\0", b"\n", b" ", b"\xff"]
    assert [small.token(i) for i in (1000, 1255, 1008)] == [b"[BOS]", b"[PAD]", b"<|reserved_token_1008|>"]
    assert [small.token(i) for i in range(1000)] == list(SMALL_RANK)


@pytest.mark.parametrize("case", cases("synthetic_known.json"), ids=lambda c: ascii(case_text(c)[:16]))
def test_known_answers(small, case):
    check_case(small, case)


def test_stop_ids_by_name(small, tmp_path):
    assert small.stop_ids == (1001, 1002)
    table = {"1000": {"content": "<end>"}, "1001": {"content": "<|end_of_msg|>"}, "1002": {"content": "[PAD]"}}
    for eos in ("<end>", {"content": "<end>"}):
        folder = write(tmp_path, config={"added_tokens_decoder": table, "eos_token": eos})
        assert Tokenizer(folder).stop_ids == (1000, 1001)
    assert Tokenizer(write(tmp_path, config={"added_tokens_decoder": table})).stop_ids == (1001,)


# --- text and control ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECIALS.values())
def test_control_text_stays_text(small, name):
    "Also for the three whose entry says special: false, which `tokenizers` would match in any text."
    for text in (name, f"a{name}b", f" {name} {name}\n"):
        for ids in (small.encode(text), small.encode(text.encode())):
            assert max(ids) < small.ranks and small.decode(ids) == text.encode()
        assert small.encode(text, allow_special=True).count(small.special_ids[name]) == text.count(name)


def test_reserved_names_are_control_too(small):
    assert small.encode("<|reserved_token_1100|>", allow_special=True) == [1100]
    named = "<|reserved_token_1000|>"  # 1000 has a name of its own
    assert small.encode(named, allow_special=True) == small.encode(named)
    assert max(small.encode("<|reserved_token_1100|>")) < 1000


def test_the_trap_of_added_tokens(small):
    "Adding control tokens to the encoder and asking it not to use them still injects those with special: false."
    small.encode("")
    obvious = tokenizers.Tokenizer.from_str(small.encoder.to_str())
    for i in range(1000, 1006):
        token = tokenizers.AddedToken(SPECIALS[i], special=not 1003 <= i <= 1005, normalized=False)
        (obvious.add_tokens if 1003 <= i <= 1005 else obvious.add_special_tokens)([token])
    obvious.encode_special_tokens = True
    text = "[EOS]<|open|>"
    assert 1003 in obvious.encode(text).ids and 1001 not in obvious.encode(text).ids
    assert small.encode(text) == [i for c in ("[EOS]", "<|open|>") for i in plain_encode(c, SMALL_RANK)]


def test_segments_are_encoded_alone(small):
    segments = [("<|open|>", 1), ("message", 0), (" role", 0), ('="', 0), ("<|open|>", 0), ('"', 0), ("<|sep|>", True)]
    ids = small.encode_segments(segments)
    assert ids == [1003] + [i for text, _ in segments[1:-1] for i in small.encode(text)] + [1005]
    assert small.encode_segments([("th", 0), ("e", 0)]) != small.encode("the")


# --- in blocks -----------------------------------------------------------------------------------------------------


def encoded_whole(tokenizer, data):
    "Ids of bytes by the rule, from the whole text at once."
    ids = []
    for i, piece in enumerate(re.split("([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape"))):
        if i % 2:
            run = as_chars(piece.encode("utf-8", "surrogateescape"))
            for start in range(0, len(run), RUN_CHARS):
                ids += [token.id for token in tokenizer.encoder.model.tokenize(run[start:start + RUN_CHARS])]
        else:
            for part in cut_by_counting(piece) if piece else ():
                ids += tokenizer.encoder.encode(part, add_special_tokens=False).ids
    return ids


def blocks(data, sizes):
    "The bytes in blocks of these sizes, again and again."
    ends = [0]
    while ends[-1] < len(data):
        ends += [ends[-1] + sizes[len(ends) % len(sizes)]]
    return [data[a:b] for a, b in pairwise(ends)]


def in_blocks(tokenizer, data, sizes):
    return [i for ids in tokenizer.encode_blocks(blocks(data, sizes)) for i in ids]


WORD = "We stream 12345 tokens, don'\u017ft we? \u4e16\u754c \U0001f642\n".encode()
LONG = {
    "words over a cut": WORD * (450_000 // len(WORD.decode())),
    "a cut inside a character's bytes": b"a" + "\U0001f642\u4e16".encode() * 30_000,
    "runs over a cut": b" " * 399_990 + b"x" * 25_030 + b"\n" * 25_001,
    "no UTF-8, longer than a run": b"text" + b"\xff" * 25_001 + b"\x80" * 30_000 + b"text",
    "a cut counted from the last bad byte": b"x \xe4" + b"ab " * 133_400,
    "bad bytes at each place": b"ab\xffc\xc3\x28 \xf0\x9f\x99 " * 2_000,
}


@pytest.mark.parametrize("what", LONG)
def test_a_long_text_in_blocks_has_the_ids_of_the_whole(small, what):
    small.encode("a")  # makes the encoder
    data = LONG[what]
    expected = encoded_whole(small, data)
    assert in_blocks(small, data, [399_999, 2]) == expected and small.decode(expected) == data
    whole = list(text_parts([data.decode("utf-8", "surrogateescape")]))
    for sizes in [1 << 20], [65_536], [7919, 1, 13]:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        assert list(text_parts(decoded(decoder, blocks(data, sizes)))) == whole, sizes


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=6) | st.text(max_size=4).map(lambda s: s.encode("utf-8", "replace")),
                max_size=8).map(b"".join), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_any_bytes_in_any_blocks_have_the_ids_of_the_whole(small, data, sizes):
    assert in_blocks(small, data, sizes) == small.encode(data)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(codec=None), max_size=30), st.integers(0, 4))
def test_a_long_str_is_decoded_in_blocks_as_in_one(small, text, shift):
    "Characters, pairs of surrogates and lone ones stand over the end of the first block of 65,536."
    text = "a" * (65_536 - shift) + text
    assert small.encode(text) == small.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["a", " ", "\udc80", "\n"]).flatmap(lambda c: st.integers(1, 9).map(lambda n: c * n)),
                max_size=12), st.integers(1, 7))
def test_parts_by_counting(runs, size):
    "The rule with cuts after 8 and 4 characters instead of 400,000 and 25,000."
    with mock.patch.object(tokenizer, "CUT_CHARS", 8), mock.patch.object(tokenizer, "RUN_CHARS", 4):
        text = "".join(runs)
        found = list(text_parts(text[i:i + size] for i in range(0, len(text), size)))
        assert found == list(text_parts([text])) and "".join(part for _, part in found) == text
        for broken, part in found:
            assert part and len(part) <= (4 if broken else 8) and ("\udc80" in part) == broken
            longest = max(len(list(run)) for _, run in groupby(part, str.isspace))
            assert longest <= 4 or len(part) <= 4


def test_a_block_that_is_no_bytes_is_refused(small):
    for block in "text", 5, None:
        with pytest.raises(UsageError, match="a block of the text is"):
            list(small.encode_blocks([b"a", block]))


# --- bytes ---------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=12) | st.text(max_size=8).map(lambda s: s.encode("utf-8", "replace")),
                max_size=6).map(b"".join))
def test_any_bytes_come_back(small, data):
    ids = small.encode(data)
    assert small.decode(ids) == data
    assert not ids or max(ids) < small.ranks
    assert small.decode(small.encode(data, allow_special=True)) == data


@pytest.mark.parametrize("data", [
    bytes(range(256)), bytes(range(255, -1, -1)), b"\xff", b"\xc3", b"a\xf0\x9f\x99", b"\xed\xa0\x80",
    b"\xf5\x80\x80\x80", b"\xc0\xaf", b"\xe4\xb8\xe4\xb8\x96", b"\x80" * 30_000, b"\xef\xbb\xbfx"])
def test_hard_bytes_come_back(small, data):
    assert small.decode(small.encode(data)) == data


def test_valid_bytes_are_text(small):
    text = "caf\u00e9 \u4e16\u754c \U0001f642 [EOS]"
    for allow in (False, True):
        ids = small.encode(text, allow)
        assert small.encode(text.encode(), allow) == small.encode(bytearray(text.encode()), allow) == ids


def test_invalid_bytes_merge_by_rank(small):
    "A stretch that is not UTF-8 is one piece; here it merges to a token that is part of a character."
    part = next(t for t in SMALL_RANK if len(t) > 1 and t.decode("utf-8", "ignore") == "")
    assert small.encode(b"a" + part + b"b") == [SMALL_RANK[b"a"], SMALL_RANK[part], SMALL_RANK[b"b"]]
    assert small.encode(b"a\xffb") == [SMALL_RANK[b"a"], SMALL_RANK[b"\xff"], SMALL_RANK[b"b"]]


def test_lone_surrogates_become_u_fffd(small):
    "As tiktoken does with a str; a pair of surrogates is the character it stands for."
    assert small.encode("a\ud800b\udcff") == small.encode("a\ufffdb\ufffd")
    assert small.encode("\ud83d\ude42") == small.encode("\U0001f642")
    assert small.encode("\ufeffx") == small.encode(b"\xef\xbb\xbfx")


# --- against the definition ----------------------------------------------------------------------------------------


def pieces(split, text):
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize("text, expected", [
    ("We'LL pay 1234567 now!\n\n", ["We'LL", " pay", " ", "123", "456", "7", " now", "!\n\n"]),
    ("\u3005\u3007\u30fc\u6f22", ["\u3005\u3007", "\u30fc", "\u6f22"]),  # the third mark is not of the Han script
    ("\u6f22\u5b57\u30ab\u30ca\u6f22", ["\u6f22\u5b57", "\u30ab\u30ca", "\u6f22"]),
    ("it'\u017f  ok", ["it'\u017f", " ", " ok"]),  # the long s folds to s
    ("\uff11\uff12\uff13\uff14\u216b\u00bd", ["\uff11\uff12\uff13", "\uff14\u216b\u00bd"]),
    ("a\u00a0b (c d\u0301", ["a", "\u00a0b", " (", "c", " d\u0301"]),
    ("ABCdef XMLHttp", ["ABCdef", " XMLHttp"]),
    ("x \x1c y", ["x", " \x1c", " y"]),  # U+001C is no white space to the pattern
    (" \n  \n a", [" \n  \n", " a"]),
])
def test_splits(text, expected):
    own = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    assert pieces(own, text) == expected


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40) | st.text(
    "aALlsSdt\u017f'19\u00bd \t\n\r._(\u00a0\u0301\u4e16\u3005\u30fc\u30ab\u00e9\u01c5\u02b0\u05d0\U0001f642",
    max_size=40))
def test_the_pattern_splits_as_the_releases(text):
    "The lookahead form against the class intersections of the release."
    own = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    assert pieces(own, text) == pieces(SPLIT, text)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=40) | st.text("aeinrst  '\n\r\tLlS19._(漢々〇ーカé\u0301\u00a0\u017f\U0001f642", max_size=40))
def test_encode_is_split_then_merge(small, text):
    assert small.encode(text) == plain_encode(text, SMALL_RANK)


def test_other_vocabularies_merge_by_rank(tmp_path):
    "Forty random vocabularies, their bytes in any order."
    rng = random.Random(7)
    for _ in range(40):
        tokens = [bytes([b]) for b in range(256)]
        rng.shuffle(tokens)
        pool = [b"a", b"b", b"c"]
        for _ in range(rng.randint(1, 40)):
            token = rng.choice(pool) + rng.choice(pool)
            if token not in tokens and len(token) < 12:
                tokens.append(token)
                pool.append(token)
        ranks = b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))
        t = Tokenizer(write(tmp_path, ranks, {"added_tokens_decoder": {}}))
        rank = {token: i for i, token in enumerate(tokens)}
        for _ in range(50):
            text = "".join(rng.choices("abc", k=rng.randint(1, 30)))
            assert t.encode(text) == plain_merge(text.encode(), rank)


def test_a_token_no_merge_makes(tmp_path):
    "A whole piece that is a token is that token, even if no two tokens join to it."
    tokens = [bytes([b]) for b in range(256)] + [b"xyz"]
    ranks = b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))
    t = Tokenizer(write(tmp_path, ranks, {"added_tokens_decoder": {}}))
    assert t.encode("xyz") == [256] and t.encode("axyz") == list(b"axyz")


def cut_by_counting(text):
    "The cutting rule one character at a time."
    parts = []
    for start in range(0, len(text), 400_000):
        chunk, begin, run = text[start : start + 400_000], 0, 0
        for i, c in enumerate(chunk):
            run = run + 1 if i and c.isspace() == chunk[i - 1].isspace() else 1
            if run > 25_000:
                parts.append(chunk[begin:i])
                begin, run = i, 1
        parts.append(chunk[begin:])
    return parts


@pytest.mark.parametrize("runs", [
    [24_999], [25_000], [25_001], [50_000], [50_001], [10, 25_001, 3], [25_000, 25_000, 25_001], [399_999, 2, 60_000],
    [1, 400_001], [800_000]])
def test_cutting_rule(runs):
    text = "".join("a\u3000"[i % 2] * n for i, n in enumerate(runs))
    assert list(cut(text)) == cut_by_counting(text)


def test_cut_classes_are_pythons(small):
    "U+001C is white space to str.isspace, though not to the pattern."
    assert [len(part) for part in cut("\x1c" * 20_000 + " " * 20_000)] == [25_000, 15_000]
    assert small.encode(" " * 25_001) == small.encode(" " * 25_000) + small.encode(" ")
    assert list(cut("")) == []


# --- streaming -----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 1255) | st.integers(94, 255), max_size=30))
def test_a_stream_shows_what_decode_gives(small, ids):
    text, raw = small.stream(), small.stream("surrogateescape")
    shown = [text.feed(i) for i in ids] + [text.finish()]
    kept = [raw.feed(i) for i in ids] + [raw.finish()]
    assert "".join(shown) == small.decode(ids).decode("utf-8", "replace")
    assert "".join(kept).encode("utf-8", "surrogateescape") == small.decode(ids)


def test_a_stream_holds_back_half_a_character(small):
    smile = [SMALL_RANK[bytes([b])] for b in b"\xf0\x9f\x99\x82"]
    stream = small.stream()
    assert [stream.feed(i) for i in smile] == ["", "", "", "\U0001f642"] and stream.finish() == ""
    stream = small.stream()
    assert [stream.feed(i) for i in [*smile[:3], SMALL_RANK[b"a"]]] == ["", "", "", "\ufffda"]
    stream = small.stream()
    assert [stream.feed(i) for i in smile[:2]] == ["", ""] and stream.finish() == "\ufffd"


# --- ids and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 1256, 2**40])
def test_ids_out_of_range(small, bad):
    for call in (small.token, lambda i: small.decode([5, i]), small.stream().feed):
        with pytest.raises(TokenizerError, match=f"token id {bad}: expected 0..1255"):
            call(bad)
    with pytest.raises(TokenizerError, match="token id 1.0: expected 0..1255"):
        small.decode([1.0])


def test_ids_may_be_numpy_integers(small):
    assert small.decode(np.array([64, 1000], np.int32)) == b"a[BOS]"


def test_the_encoder_is_built_when_needed_and_dropped(small, tmp_path):
    t = Tokenizer(write(tmp_path))
    assert t.encoder is None and t.decode([64]) == b"a" and t.encoder is None
    ids = t.encode("The plan")
    assert t.encoder is not None
    t.drop_encoder()
    assert t.encoder is None and t.decode(ids) == b"The plan" and t.encode("The plan") == ids


def test_the_table_is_compact(tmp_path):
    blob, offsets = read_ranks(write(tmp_path) / "tiktoken.model")
    assert isinstance(blob, bytes) and offsets.dtype == np.uint32 and offsets.shape == (1001,)
    assert len(blob) == offsets[-1] == sum(map(len, SMALL_RANK))


# --- files that are refused ----------------------------------------------------------------------------------------


def refusal(folder, **options):
    with pytest.raises(TokenizerError) as e:
        Tokenizer(folder, **options)
    assert str(e.value).startswith(str(folder)) and "\n" not in str(e.value)
    return str(e.value).removeprefix(f"{folder}/")


@pytest.mark.parametrize("lines, told", [
    ([*LINES[:7], b"J*== 7\n", *LINES[8:]], "tiktoken.model line 8: bad base64"),
    ([*LINES[:7], b"KA 7\n", *LINES[8:]], "tiktoken.model line 8: bad base64"),
    ([*LINES[:7], b"KA==KA== 7\n", *LINES[8:]], "tiktoken.model line 8: bad base64"),
    ([*LINES[:300], *LINES[301:]], "tiktoken.model line 301: rank 301, expected 300"),
    ([*LINES[:301], *LINES[300:]], "tiktoken.model line 302: rank 300, expected 301"),
    ([*LINES[:300], LINES[299].split()[0] + b" 300\n", *LINES[301:]],
     "tiktoken.model line 301: token b' l' already stands on line 300"),
    ([*LINES[:7], b" 7\n", *LINES[8:]], "tiktoken.model line 8: token b'' is empty"),
    ([*LINES[:7], b"KA== 07\n", *LINES[8:]], "tiktoken.model line 8: rank 07, expected 7"),
    ([*LINES[:7], b"KA== 7 \n", *LINES[8:]], "tiktoken.model line 8: b'KA== 7 ', expected base64, one space, rank"),
    ([*LINES[:7], b"KA== -7\n", *LINES[8:]], "tiktoken.model line 8: b'KA== -7', expected"),
    ([*LINES[:7], b"KA== 7\r\n", *LINES[8:]], "tiktoken.model line 8: b'KA== 7\\r', expected"),
    ([*LINES[:7], b"\n", *LINES[7:]], "tiktoken.model line 8: b'', expected"),
    ([b"{}"], "tiktoken.model line 1: b'{}', expected"),
    ([b"version https://git-lfs.github.com/spec/v1\n"], "tiktoken.model line 1: b'version"),
    (LINES[:200], "tiktoken.model: no token for byte 0x"),
    ([], "tiktoken.model: 0 bytes, expected 1 to"),
    (LINES[:990], "tokenizer_config.json: control ids start at 1000, expected 990, the number of ranks"),
    ([*LINES[:-1], LINES[-1][:-3]], "tiktoken.model line 1000: rank 9, expected 999"),
])
def test_damaged_rank_files(tmp_path, lines, told):
    assert told in refusal(write(tmp_path, b"".join(lines)))


def test_the_last_newline_may_be_missing(tmp_path):
    assert Tokenizer(write(tmp_path, b"".join(LINES)[:-1])).ranks == 1000


def table(**entries):
    return {**CONFIG, "added_tokens_decoder": {**CONFIG["added_tokens_decoder"], **entries}}


def nested(depth):
    return b'{"added_tokens_decoder": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize("config, told", [
    (table(**{"5": {"content": "<x>"}}), "'<x>' has id 5, which is a rank of tiktoken.model (0..999)"),
    (table(**{"1100": {"content": "[BOS]"}}), "'[BOS]' has two ids, 1000 and 1100"),
    (table(**{"1100": {"content": "<|reserved_token_1101|>"}}), "'<|reserved_token_1101|>' has two ids, 1100 and 1101"),
    (table(**{"9999999": {"content": "<x>"}}), "9,999,000 control ids after 1,000 ranks, expected 0 to"),
    (table(**{"01100": {"content": "<x>"}}), "has the key '01100', expected an id"),
    (table(**{"-1": {"content": "<x>"}}), "has the key '-1', expected an id"),
    (table(**{"\u0661\u0661": {"content": "<x>"}}), "has the key"),
    (table(**{"1100": {"content": ""}}), "added_tokens_decoder 1100 has content ''"),
    (table(**{"1100": {"content": 5}}), "added_tokens_decoder 1100 has content '5'"),
    (table(**{"1100": {"content": "\ud800"}}), "added_tokens_decoder 1100 has content"),
    (table(**{"1100": "<x>"}), "added_tokens_decoder 1100 has content 'None'"),
    ({"added_tokens_decoder": []}, "added_tokens_decoder is [], expected an object"),
    ({}, "added_tokens_decoder is None, expected an object"),
    ({**CONFIG, "eos_token": "[STOP]"}, "eos_token is '[STOP]', expected a name"),
    ({**CONFIG, "eos_token": 1001}, "eos_token is '1001', expected a name"),
    (b"", "0 bytes, expected 1 to"), (b"{", "not JSON"), (b"[]", "a JSON list, expected an object"),
    (b"\xff", "not JSON"), (b"[" * 100_000, "not JSON"), (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
    (b'{"a": 1, "a": 2}', "name 'a' found twice"),
    (nested(16), "more than 16 deep"),
    *((nested(depth), "tokenizer_config.json") for depth in range(940, 1010, 3)),  # near Python's limit of recursion
])
def test_damaged_configs(tmp_path, config, told):
    assert told in refusal(write(tmp_path, config=config))


def test_the_vocabulary_size_is_a_bound(tmp_path):
    folder = write(tmp_path)
    assert Tokenizer(folder, vocab_size=1300).token(1299) == b"<|reserved_token_1299|>"
    assert "'[PAD]' has id 1255, expected less than the vocabulary size 1255" in refusal(folder, vocab_size=1255)
    write(tmp_path, config={"added_tokens_decoder": {}})
    assert "-1 control ids after 1,000 ranks" in refusal(folder, vocab_size=999)
    assert Tokenizer(folder).vocab_size == 1000 and Tokenizer(folder).encode("a<|open|>", allow_special=True)[0] == 64


def test_huge_files_are_not_read(tmp_path):
    for name in ("tiktoken.model", "tokenizer_config.json"):
        write(tmp_path)
        with (tmp_path / name).open("r+b") as f:
            f.truncate(10**12)  # sparse
        assert f"{name}: 1,000,000,000,000 bytes, expected" in refusal(tmp_path)


def test_missing_folder_and_files(tmp_path):
    for path, told in ((tmp_path / "nowhere", "nowhere: no such model folder"), (tmp_path, "no such file")):
        with pytest.raises(FileNotFoundError, match=told):
            Tokenizer(path)
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(FileNotFoundError, match="tokenizer_config.json: no such file"):
        Tokenizer(tmp_path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(RANKS) - 1), st.integers(0, 255), st.integers(0, 2))
def test_any_damaged_byte_is_refused_or_harmless(tmp_path, at, byte, how):
    "One byte replaced, inserted or removed anywhere: an error of the right kind, or a vocabulary of as many tokens."
    data = RANKS[:at] + bytes([byte]) * (how < 2) + RANKS[at + (how != 1) :]
    try:
        t = Tokenizer(write(tmp_path, data))
    except TokenizerError as e:
        assert "tiktoken.model" in str(e) and "\n" not in str(e)
        return
    assert t.ranks == 1000 and len({t.token(i) for i in range(1000)}) == 1000


NAMES = st.sampled_from(["content", "special"]) | st.text(max_size=3)
LEAVES = (st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
          | st.sampled_from([*SPECIALS.values()][:3]))
JSONS = st.recursive(LEAVES, max_leaves=5, extend=lambda inner: (
    st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3)))
FIELDS = st.dictionaries(st.sampled_from(["added_tokens_decoder", "eos_token"]), JSONS, max_size=2)
IDS = (st.integers(990, 1260).map(str) | st.text(max_size=4)
       | st.sampled_from(["0", "01000", "-1", "1e3", "9" * 11, "9" * 5000, "\u0661"]))
ENTRIES = st.dictionaries(IDS, JSONS | st.fixed_dictionaries({"content": st.text(max_size=6)}), max_size=4)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FIELDS, ENTRIES, st.booleans())
def test_any_control_table_is_refused_or_consistent(tmp_path, fields, entries, among):
    "Any tokenizer_config.json: an error of the right kind, or a vocabulary whose names and ids are a bijection."
    table = {"added_tokens_decoder": {**(CONFIG["added_tokens_decoder"] if among else {}), **entries}, **fields}
    try:
        t = Tokenizer(write(tmp_path, config=table))
    except TokenizerError as e:
        assert "tokenizer_config.json" in str(e) and "\n" not in str(e) and len(str(e)) < 600
        return
    assert t.vocab_size == 1000 + len(t.special_names)
    assert all(t.token(i).decode() == name for name, i in t.special_ids.items())
    assert set(t.stop_ids) <= set(t.special_ids.values()) and len(t.special_ids) == len(t.special_names)
    assert max(t.encode("[EOS]<|open|> a")) < 1000


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_are_refused(tmp_path, ranks, config):
    for case in {"ranks": ranks or b"\n"}, {"config": config or b"\n"}:
        refusal(write(tmp_path, **case))


# --- the embedded model --------------------------------------------------------------------------------------------


def test_the_embedded_vocabulary():
    t = Tokenizer(MODEL)
    assert (t.ranks, t.vocab_size, t.stop_ids) == (496, 512, (503, 505))
    assert [t.token(i) for i in range(496)] == list(SMALL_RANK)[:496]
    for ids in (EXPECTED["generated_ids"], EXPECTED["prompt_ids"]):
        assert not set(ids) & set(t.stop_ids)
        assert t.decode(t.encode(t.decode(ids))) == t.decode(ids)
    text = "The capital of France is <|open|> \u4f60\u597d \U0001f642"
    assert max(t.encode(text)) < 496 and t.decode(t.encode(text)) == text.encode()


def test_a_folder_without_a_vocabulary_has_none_and_one_with_a_broken_link_is_refused(tmp_path):
    config = SimpleNamespace(vocab_size=512)
    assert open_tokenizer(MODEL, config).vocab_size == 512
    assert open_tokenizer(tmp_path, config) is None
    (tmp_path / "tiktoken.model").symlink_to("gone")
    with pytest.raises(FileNotFoundError, match="tiktoken.model: a link to nothing"):
        open_tokenizer(tmp_path, config)


def test_a_refusal_is_one_of_usage():
    "So a command that meets one ends with code 2, and code that expects a ValueError goes on working."
    assert issubclass(TokenizerError, UsageError) and issubclass(TokenizerError, ValueError)
    assert TokenizerError.exit_code == 2


# --- the released vocabulary ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["known_published.json", "known_computed.json"])
def test_released_known_answers(released, name):
    for case in cases(name):
        check_case(released, case)


def test_released_chats(released):
    for case in cases("chat_k3.json"):
        assert released.encode_segments(case["segments"]) == case["ids"], case["name"]


def test_released_bytes(released):
    for case in cases("bytes.json"):
        if "bytes_b64" in case:
            data = base64.b64decode(case["bytes_b64"])
            stream = released.stream()
            shown = "".join(map(stream.feed, case["ids"])) + stream.finish()
            assert released.decode(case["ids"]) == data and shown == case["text_replace"]
        else:
            data = base64.b64decode(case["input_b64"])
            assert data.decode("utf-8", "replace") == case["replaced"]
            assert released.encode(case["replaced"]) == case["ids"] and released.decode(released.encode(data)) == data


def test_released_table(released):
    assert (released.ranks, released.vocab_size, released.stop_ids) == (163_584, 163_840, (163_585, 163_586))
    assert len(released.blob) == 1_105_983 and released.blob == b"".join(map(released.token, range(released.ranks)))
    assert max(len(released.token(i)) for i in range(released.ranks)) == 256
    sample = random.Random(3).sample(range(released.ranks), 2_000)
    assert [i for i in sample if released.encode(released.token(i)) != [i] and released.token(i).isascii()] == []


MEMORY = """
import sys
from k3lib.system import peak_bytes, resident_bytes
from k3lib.tokenizer import Tokenizer
start = resident_bytes()
t = Tokenizer(sys.argv[1])
print((resident_bytes() - start) / 1e6)
t.encode("a")
print((peak_bytes() - start) / 1e6)
t.drop_encoder()
print((resident_bytes() - start) / 1e6)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc: Linux only")
def test_released_memory(released, tmp_path):
    "The table is some MB; the encoder's peak stays below 200 MB, and little of it remains once dropped."
    config = {"added_tokens_decoder": {"163584": {"content": "[BOS]"}}}
    folder = write(tmp_path, Path(os.environ["K3_TIKTOKEN"]).read_bytes(), config)
    command = [sys.executable, "-c", MEMORY, folder]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    table_only, peak, dropped = map(float, run.stdout.split())
    print(f"id table {table_only:.0f} MB, encoder's peak {peak:.0f} MB, after dropping it {dropped:.0f} MB")
    assert table_only < 30 and peak < 200 and dropped < 30
