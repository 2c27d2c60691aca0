"""5.21 Bytes to ids and back

Made from book/05_streaming/21_tokenizer.py: edit that, then run `make export`.
"""

import binascii
import codecs
import ctypes
import os
import re
from itertools import groupby, pairwise
from operator import index
from pathlib import Path
import numpy as np
import tokenizers
from k3lib.fileio import json_object, small_file


class TokenizerError(ValueError):
    "A tokenizer file that cannot be believed, or an id that is not in the vocabulary."


MAX_RANKS_BYTES = 16_000_000  # the released tiktoken.model has 2.8 MB


MAX_JSON_BYTES = 4_000_000  # Python's objects take some fifteen times the text


def read_ranks(path):
    "Token bytes by rank from `tiktoken.model`: one blob and offsets uint32 [n + 1]; token i is blob[offsets[i]:offsets[i+1]]."
    blob, ends, seen = bytearray(), [0], {}
    for number, line in enumerate(small_file(path, MAX_RANKS_BYTES, TokenizerError).removesuffix(b"\n").split(b"\n"), 1):
        fields = line.split(b" ")
        where = f"{path} line {number}"
        if len(fields) != 2 or not fields[1].isdigit():
            raise TokenizerError(f"{where}: {line[:40]!r}, expected base64, one space, rank")
        try:
            token = binascii.a2b_base64(fields[0], strict_mode=True)
        except binascii.Error as e:
            raise TokenizerError(f"{where}: bad base64 {fields[0][:40]!r} ({e})") from None
        if fields[1] != b"%d" % (number - 1):
            raise TokenizerError(f"{where}: rank {fields[1][:20].decode()}, expected {number - 1}: ranks count up from 0 by one")
        if not token or token in seen:
            raise TokenizerError(f"{where}: token {token[:40]!r} " + (f"already stands on line {seen[token]}" if token else "is empty"))
        seen[token] = number
        blob += token
        ends.append(len(blob))
    lacking = [b for b in range(256) if bytes([b]) not in seen]
    if lacking:
        raise TokenizerError(f"{path}: no token for byte 0x{lacking[0]:02X}, expected all 256 single bytes ({len(lacking)} lacking)")
    return bytes(blob), np.array(ends, np.uint32)


UPPER = r"(?:(?!\p{Han})[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}])"


LOWER = r"(?:(?!\p{Han})[\p{Ll}\p{Lm}\p{Lo}\p{M}])"


ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


PATTERN = "|".join([
    r"\p{Han}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])


def byte_alphabet():
    "256 printable characters standing for the bytes 0..255: those Latin-1 prints stand for themselves."
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return "".join(chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256))


BYTE_CHARS = dict(enumerate(byte_alphabet()))


def as_chars(data):
    "Bytes as a string of the byte alphabet, one character a byte."
    return data.decode("latin-1").translate(BYTE_CHARS)


def build_encoder(blob, offsets):
    "A `tokenizers` encoder for the ranks, without added tokens: every text is plain text to it."
    tokens = [blob[a:b] for a, b in pairwise(offsets.tolist())]
    rank = {token: i for i, token in enumerate(tokens)}
    names = [as_chars(token) for token in tokens]
    merges = []
    for token in tokens:
        cuts = ((rank.get(token[:i]), rank.get(token[i:])) for i in range(1, len(token)))
        merges += [(names[a], names[b]) for a, b in sorted(cut for cut in cuts if None not in cut)]
    model = tokenizers.models.BPE(dict(zip(names, range(len(names)))), merges, ignore_merges=True)
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    return encoder


CUT_CHARS = 400_000


RUN_CHARS = 25_000


def cut(text):
    "The parts of `text` that are encoded alone: at most 400,000 characters, no run of (non-)whitespace above 25,000."
    for start in range(0, len(text), CUT_CHARS):
        chunk = text[start : start + CUT_CHARS]
        begin = at = 0
        for _, run in groupby(chunk, str.isspace) if len(chunk) > RUN_CHARS else ():
            end = at + sum(1 for _ in run)
            for at in range(at + RUN_CHARS, end, RUN_CHARS):
                yield chunk[begin:at]
                begin = at
            at = end
        yield chunk[begin:]


def read_json(path):
    "The JSON object in `path`, read as strictly as a header (5.5.2)."
    return json_object(small_file(path, MAX_JSON_BYTES, TokenizerError), path, TokenizerError)


def named_specials(path, tree):
    "{id: name} from `added_tokens_decoder`."
    table = tree.get("added_tokens_decoder")
    if not isinstance(table, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder is {str(table)[:40]}, expected an object")
    named = {}
    for key, entry in table.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
            raise TokenizerError(f"{path}: added_tokens_decoder has the key {key[:20]!r}, expected an id")
        if not isinstance(name, str) or not name or re.search("[\ud800-\udfff]", name):
            raise TokenizerError(f"{path}: added_tokens_decoder {key} has content {str(name)[:40]!a}, expected its text")
        named[int(key)] = name
    return named


MAX_SPECIALS = 65_536


def all_specials(path, named, ranks, vocab_size=None):
    "Names of ids ranks..vocab_size-1 in order; those without a name of their own are `<|reserved_token_i|>`."
    end = max(named, default=ranks - 1) + 1 if vocab_size is None else vocab_size
    for i in sorted(named):
        if i < ranks:
            raise TokenizerError(f"{path}: {named[i]!a} has id {i}, which is a rank of tiktoken.model (0..{ranks - 1})")
        if i >= end:
            raise TokenizerError(f"{path}: {named[i]!a} has id {i}, expected less than the vocabulary size {end}")
    if named and min(named) != ranks:
        raise TokenizerError(f"{path}: control ids start at {min(named)}, expected {ranks}, the number of ranks in tiktoken.model")
    if not 0 <= end - ranks <= MAX_SPECIALS:
        raise TokenizerError(f"{path}: {end - ranks:,} control ids after {ranks:,} ranks, expected 0 to {MAX_SPECIALS:,}")
    names = [named.get(i, f"<|reserved_token_{i}|>") for i in range(ranks, end)]
    first = {}
    for i, name in enumerate(names, ranks):
        if first.setdefault(name, i) != i:
            raise TokenizerError(f"{path}: {name!a} has two ids, {first[name]} and {i}")
    return names


def stop_ids(path, tree, ids):
    "Ids that end a reply, found by name in `ids` {name: id}: end of message, end of sequence and the file's eos_token."
    eos = tree.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is not None and (not isinstance(eos, str) or eos not in ids):
        raise TokenizerError(f"{path}: eos_token is {str(eos)[:40]!a}, expected a name of added_tokens_decoder")
    return tuple(sorted({ids[name] for name in ("<|end_of_msg|>", "[EOS]", eos) if name in ids}))


class StreamDecoder:
    "Ids in, whole characters out. Bytes of an unfinished character wait for the next id."

    def __init__(self, tokenizer, errors="replace"):
        "errors='surrogateescape' keeps invalid bytes: text.encode('utf-8', 'surrogateescape') gives them back."
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def feed(self, token_id):
        "The text that `token_id` completes; empty while a character is unfinished."
        return self.utf8.decode(self.tokenizer.decode([token_id]))

    def finish(self):
        "What was still waiting, as invalid bytes: the stream has ended."
        return self.utf8.decode(b"", final=True)


class Tokenizer:
    "Text to ids and ids to bytes, from `tiktoken.model` and `tokenizer_config.json` in a model's folder."

    def __init__(self, model_dir, vocab_size=None):
        "Loads the id table only. `vocab_size` defaults to the last named control id plus one."
        folder = Path(model_dir)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such model folder")
        path = folder / "tokenizer_config.json"
        self.blob, self.offsets = read_ranks(folder / "tiktoken.model")
        self.ranks = len(self.offsets) - 1
        tree = read_json(path)
        self.special_names = all_specials(path, named_specials(path, tree), self.ranks, vocab_size)
        self.special_ids = {name: i for i, name in enumerate(self.special_names, self.ranks)}
        self.vocab_size = self.ranks + len(self.special_names)
        self.stop_ids = stop_ids(path, tree, self.special_ids)
        self.encoder = None

    def encode(self, text, allow_special=False):
        """Ids of `text`, str or bytes. Names of control tokens are plain text unless allow_special.
        In bytes, what is not UTF-8 keeps its bytes; in str, a lone surrogate becomes U+FFFD, having none."""
        if isinstance(text, str):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        else:
            text = bytes(text).decode("utf-8", "surrogateescape")
        self.encoder = self.encoder or build_encoder(self.blob, self.offsets)
        ids = []
        for i, piece in enumerate(re.split("([\udc80-\udcff]+)", text)):
            ids += self.encode_invalid(piece) if i % 2 else self.encode_valid(piece, allow_special)
        return ids

    def encode_valid(self, text, allow_special):
        "Ids of text without surrogates, cut as the reference cuts it."
        if not allow_special:
            return [i for part in cut(text) for i in self.encoder.encode(part, add_special_tokens=False).ids]
        names = "|".join(map(re.escape, sorted(self.special_names, key=len, reverse=True)))
        ids = []
        for part in cut(text):
            for i, piece in enumerate(re.split(f"({names})", part) if names else [part]):
                ids += [self.special_ids[piece]] if i % 2 else self.encode_valid(piece, False)
        return ids

    def encode_invalid(self, escaped):
        "Ids of a run of bytes that are not UTF-8, merged by rank as one piece."
        data = escaped.encode("utf-8", "surrogateescape")
        return [token.id for token in self.encoder.model.tokenize(as_chars(data))]

    def encode_segments(self, segments):
        "Ids of (text, allow_special) pairs, each encoded alone, so that a segment's edge is a token's edge."
        return [i for text, allow_special in segments for i in self.encode(text, bool(allow_special))]

    def token(self, token_id):
        "The bytes of one id; of a control id, its name."
        i = index(token_id)
        if not 0 <= i < self.vocab_size:
            raise TokenizerError(f"token id {i}: expected 0..{self.vocab_size - 1}")
        if i >= self.ranks:
            return self.special_names[i - self.ranks].encode()
        return self.blob[self.offsets[i] : self.offsets[i + 1]]

    def decode(self, ids):
        "The bytes of a sequence of ids, exactly; they need not be whole UTF-8."
        return b"".join(map(self.token, ids))

    def stream(self, errors="replace"):
        "A StreamDecoder over this vocabulary."
        return StreamDecoder(self, errors)

    def drop_encoder(self):
        "Frees what encode built (on the released vocabulary over 100 MB) and returns it to the system. decode needs none of it."
        self.encoder = None
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim:
            trim(0)


def open_tokenizer(path, config):
    "The folder's Tokenizer, or None where it holds no vocabulary; a link to one that is gone is not none."
    return Tokenizer(path, config.vocab_size) if os.path.lexists(Path(path) / "tiktoken.model") else None


__all__ = [
    "TokenizerError", "MAX_RANKS_BYTES", "MAX_JSON_BYTES", "read_ranks", "UPPER", "LOWER", "ENDING", "PATTERN",
    "byte_alphabet", "BYTE_CHARS", "as_chars", "build_encoder", "CUT_CHARS", "RUN_CHARS", "cut", "read_json",
    "named_specials", "MAX_SPECIALS", "all_specials", "stop_ids", "StreamDecoder", "Tokenizer", "open_tokenizer",
]
