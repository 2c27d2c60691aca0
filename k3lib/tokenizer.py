"""5.21 Bytes to ids and back

Made from book/05_streaming/21_tokenizer.py: edit that, then run `make export`.
"""

import binascii
import codecs
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
import numpy as np
import tokenizers
from k3lib.system import trim_freed_memory
from k3lib.fileio import MissingFile, UsageError, json_object, given_path, shown_value, small_file
from k3lib.config import Config
from k3lib.memory import whole_number


class TokenizerError(UsageError):
    "A tokenizer's file that is damaged or contradicts itself, or an id that is not in the vocabulary."


MAX_RANKS_BYTES = 16_000_000  # the released tiktoken.model has 2.8 MB
MAX_JSON_BYTES = 4_000_000  # Python's objects take some fifteen times the text


def token_of(line: bytes, rank: int, where: str) -> bytes:
    "The token on one line of `tiktoken.model`. Raises TokenizerError unless the line is right and has this rank."
    fields = line.split(b" ")
    if len(fields) != 2 or not fields[1].isdigit():
        raise TokenizerError(f"{where}: {line[:40]!r}, expected base64, one space, rank")
    try:
        token = binascii.a2b_base64(fields[0], strict_mode=True)
    except binascii.Error as error:
        raise TokenizerError(f"{where}: bad base64 {fields[0][:40]!r} ({error})") from None
    if fields[1] != b"%d" % rank:
        found = fields[1][:20].decode()
        raise TokenizerError(f"{where}: rank {found}, expected {rank}: ranks count up from 0 by one")
    return token


def read_ranks(path: str | os.PathLike) -> tuple[bytes, np.ndarray]:
    """The tokens in `tiktoken.model` by rank: their bytes in one string `blob`, and `offsets` uint32 [ranks + 1].

    Token i is blob[offsets[i]:offsets[i + 1]]. Raises MissingFile, and TokenizerError for a file that is damaged.
    """
    blob, ends, line_of = bytearray(), [0], dict[bytes, int]()
    lines = small_file(Path(path), MAX_RANKS_BYTES, TokenizerError).rstrip(b"\n").split(b"\n")
    if lines[0].endswith(b"\r"):
        raise TokenizerError(f"{path}: lines end with CR LF, expected LF alone: the file was converted as text on its "
                             "way here; fetch it again byte for byte")
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        token = token_of(line, number - 1, where)
        if not token or token in line_of:
            fault = f"already stands on line {line_of[token]}" if token else "is empty"
            raise TokenizerError(f"{where}: token {token[:40]!r} {fault}")
        line_of[token] = number
        blob += token
        ends.append(len(blob))
    lacking = [b for b in range(256) if bytes([b]) not in line_of]
    if lacking:
        raise TokenizerError(f"{path}: no token for byte 0x{lacking[0]:02X}, "
                             f"expected all 256 single bytes ({len(lacking)} lacking)")
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


def byte_alphabet() -> str:
    "256 printable characters, one for each byte 0..255. Printable Latin-1 characters stand for themselves."
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return "".join(chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256))


BYTE_CHARS = dict(enumerate(byte_alphabet()))


def as_chars(data: bytes) -> str:
    "The bytes `data` as a string of the byte alphabet, one character a byte."
    return data.decode("latin-1").translate(BYTE_CHARS)


def build_encoder(blob: bytes, offsets: np.ndarray) -> tokenizers.Tokenizer:
    "A `tokenizers` encoder for the table of read_ranks, without added tokens: every text is plain text to it."
    tokens = [blob[a:b] for a, b in pairwise(offsets.tolist())]
    rank = {token: i for i, token in enumerate(tokens)}
    names = [as_chars(token) for token in tokens]
    merges = []
    for token in tokens:
        cuts = sorted((a, b) for i in range(1, len(token))
                      if (a := rank.get(token[:i])) is not None and (b := rank.get(token[i:])) is not None)
        merges += [(names[a], names[b]) for a, b in cuts]
    model = tokenizers.models.BPE(dict(zip(names, range(len(names)))), merges, ignore_merges=True)
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    return encoder


CUT_CHARS = 400_000
RUN_CHARS = 25_000


def cut(text: str) -> Iterator[str]:
    """The parts of `text` that are encoded alone, in order.

    A part has at most CUT_CHARS characters, and no run of white space or of other characters above RUN_CHARS.
    """
    for start in range(0, len(text), CUT_CHARS):
        chunk = text[start : start + CUT_CHARS]
        begin = end = 0
        for _, run in groupby(chunk, str.isspace) if len(chunk) > RUN_CHARS else ():
            at, end = end, end + sum(1 for _ in run)
            while end - at > RUN_CHARS:
                at += RUN_CHARS
                yield chunk[begin:at]
                begin = at
        yield chunk[begin:]


NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # what the error handler 'surrogateescape' makes of bytes


def text_parts(blocks: Iterable[str]) -> Iterator[tuple[bool, str]]:
    """(not UTF-8, part): the parts that are encoded alone of the text that the `blocks` hold in order.

    A part is a run of bytes that are not UTF-8, at most RUN_CHARS of them as lone surrogates, or text without any.
    """
    kept, broken = "", False

    def complete(text):
        return ((broken, part) for part in ([text] if broken else cut(text)) if part)

    for block in blocks:
        for i, run in enumerate(NOT_UTF8.split(block)):
            if run and broken != bool(i % 2):
                yield from complete(kept)
                kept, broken = "", not broken
            kept += run
            most = RUN_CHARS if broken else CUT_CHARS
            while len(kept) >= most:
                yield from complete(kept[:most])
                kept = kept[most:]
    yield from complete(kept)


def read_json(path: Path) -> dict[str, Any]:
    "The JSON object in the file `path`, read as strictly as a header (5.5). Raises MissingFile, TokenizerError."
    return json_object(small_file(path, MAX_JSON_BYTES, TokenizerError), path, TokenizerError)


def named_specials(path: Path, tree: dict[str, Any]) -> dict[int, str]:
    "{id: name} from `added_tokens_decoder` of the object `tree`, which `path` holds. Raises TokenizerError."
    table = tree.get("added_tokens_decoder")
    if not isinstance(table, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder is {str(table)[:40]}, expected an object")
    named = {}
    for key, entry in table.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
            raise TokenizerError(f"{path}: added_tokens_decoder has the key {key[:20]!r}, expected an id")
        if not isinstance(name, str) or not name or re.search("[\ud800-\udfff]", name):
            raise TokenizerError(f"{path}: added_tokens_decoder {key} has content {str(name)[:40]!a}, "
                                 "expected its text")
        named[int(key)] = name
    return named


MAX_SPECIALS = 65_536


def all_specials(path: Path, named: dict[int, str], ranks: int, vocab_size: int | None = None) -> list[str]:
    """Names of the ids ranks..vocab_size-1 in order. An id that is not in `named` is `<|reserved_token_i|>`.

    `vocab_size` None means one more than the last named id. Raises TokenizerError.
    """
    end = max(named, default=ranks - 1) + 1 if vocab_size is None else vocab_size
    for i in sorted(named):
        if i < ranks:
            raise TokenizerError(f"{path}: {named[i]!a} has id {i}, which is a rank of tiktoken.model (0..{ranks - 1})")
        if i >= end:
            raise TokenizerError(f"{path}: {named[i]!a} has id {i}, expected less than the vocabulary size {end}")
    if named and min(named) != ranks:
        raise TokenizerError(f"{path}: control ids start at {min(named)}, expected {ranks}, "
                             "the number of ranks in tiktoken.model")
    if not 0 <= end - ranks <= MAX_SPECIALS:
        raise TokenizerError(f"{path}: {end - ranks:,} control ids after {ranks:,} ranks, "
                             f"expected 0 to {MAX_SPECIALS:,}")
    names = [named.get(i, f"<|reserved_token_{i}|>") for i in range(ranks, end)]
    first = dict[str, int]()
    for i, name in enumerate(names, ranks):
        if first.setdefault(name, i) != i:
            raise TokenizerError(f"{path}: {name!a} has two ids, {first[name]} and {i}")
    return names


def stop_ids(path: Path, tree: dict[str, Any], ids: dict[str, int]) -> tuple[int, ...]:
    """Ids that end a reply, ascending: those of the names for end of message and end of sequence, and of `eos_token`.

    `ids`: {name: id}. `tree`: the object that `path` holds. Raises TokenizerError if its eos_token has no id.
    """
    eos = tree.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos is not None and (not isinstance(eos, str) or eos not in ids):
        raise TokenizerError(f"{path}: eos_token is {str(eos)[:40]!a}, expected a name of added_tokens_decoder")
    return tuple(sorted({ids[name] for name in ("<|end_of_msg|>", "[EOS]", eos) if name in ids}))


def ids_argument(name: str, ids: Any) -> Iterable[Any]:
    "`ids`, which its caller reads once. Raises UsageError, which says `name`, unless it is a sequence or an iterator."
    wrong = isinstance(ids, (str, bytes, bytearray, memoryview, Set, Mapping)) or not isinstance(ids, Iterable)
    if wrong or isinstance(ids, np.ndarray) and ids.ndim != 1:
        raise UsageError(f"{name} is {shown_value(ids)}: token ids in their order are needed, as in a list")
    return ids


def is_whole(value: object) -> bool:
    "Is `value` a whole number of Python or NumPy? True and False are none."
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class StreamDecoder:
    """Turns ids into text as they come, whole characters only. Bytes of an unfinished character wait for the next id.

    `errors` is a codec's error handler for invalid bytes: 'replace' shows U+FFFD, 'surrogateescape' keeps the bytes,
    and text.encode('utf-8', 'surrogateescape') gives them back. Raises UsageError if there is no such handler.
    """

    def __init__(self, tokenizer: "Tokenizer", errors: str = "replace"):
        try:
            codecs.lookup_error(errors)
        except (LookupError, TypeError, ValueError):
            raise UsageError(f"errors is {shown_value(errors)}: the name of an error handler is needed, as 'replace' "
                             "or 'surrogateescape'") from None
        self.tokenizer = tokenizer
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def feed(self, token_id: int) -> str:
        "The text that `token_id` completes, empty while a character is unfinished. Raises TokenizerError."
        return self.utf8.decode(self.tokenizer.token(token_id))

    def finish(self) -> str:
        "The text of the bytes that still wait, treated as invalid. Call it once, after the last id."
        return self.utf8.decode(b"", final=True)


class Tokenizer:
    """Text to ids and ids to bytes, from `tiktoken.model` and `tokenizer_config.json` in a model's folder.

    The fields `blob`, `offsets` (read_ranks), `ranks`, `special_names`, `special_ids`, `vocab_size` and `stop_ids` are
    set once and never change. `encoder` is None until the first text is encoded, and after drop_encoder().
    """

    def __init__(self, model_dir: str | os.PathLike, vocab_size: int | None = None):
        """Read the table. `vocab_size` None means one more than the last named control id.

        Raises MissingFile, TokenizerError for files that are damaged or contradict each other, and UsageError for an
        argument of a wrong type.
        """
        folder = given_path("model_dir", model_dir)
        vocab_size = None if vocab_size is None else whole_number("vocab_size", vocab_size, 1, 1 << 30)
        if not folder.is_dir():
            raise MissingFile(f"{folder}: no such model folder")
        path = folder / "tokenizer_config.json"
        self.blob, self.offsets = read_ranks(folder / "tiktoken.model")
        self.ranks = len(self.offsets) - 1
        tree = read_json(path)
        self.special_names = all_specials(path, named_specials(path, tree), self.ranks, vocab_size)
        self.special_ids = {name: i for i, name in enumerate(self.special_names, self.ranks)}
        self.vocab_size = self.ranks + len(self.special_names)
        self.stop_ids = stop_ids(path, tree, self.special_ids)
        self.encoder: tokenizers.Tokenizer | None = None

    def token(self, token_id: int) -> bytes:
        "The bytes of one id; for a control id, those of its name. Raises TokenizerError if there is no such id."
        if not is_whole(token_id) or not 0 <= token_id < self.vocab_size:
            raise TokenizerError(f"token id {shown_value(token_id)}: expected 0..{self.vocab_size - 1}")
        if token_id >= self.ranks:
            return self.special_names[token_id - self.ranks].encode()
        return self.blob[self.offsets[token_id] : self.offsets[token_id + 1]]

    def encode(self, text: str | bytes | bytearray | memoryview, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Names of control tokens are plain text unless `allow_special`.

        Bytes that are not UTF-8 are kept. A lone surrogate of a str has no bytes and becomes U+FFFD. Raises UsageError
        for anything but text.
        """
        if allow_special not in (0, 1):
            raise UsageError(f"allow_special is {shown_value(allow_special)}: True or False is needed")
        if isinstance(text, str):
            decoder = codecs.getincrementaldecoder("utf-16-le")("replace")
            blocks: Iterable[bytes] = (block.encode("utf-16-le", "surrogatepass") for block in slices(text))
        elif isinstance(text, (bytes, bytearray, memoryview)):
            decoder, blocks = codecs.getincrementaldecoder("utf-8")("surrogateescape"), slices(bytes(text))
        else:
            raise UsageError(f"text is {shown_value(text)}: text is needed, a str or bytes")
        return [i for ids in self._encoded(decoder, blocks, allow_special) for i in ids]

    def encode_blocks(self, blocks: Iterable[bytes]) -> Iterator[list[int]]:
        """Ids of the bytes that `blocks` hold in order, those of one part at a time: together those of `encode`.

        Memory is bounded, however long the text is: that of a block and of a part (5.21.5). Raises UsageError.
        """
        if not isinstance(blocks, Iterable):
            raise UsageError(f"blocks is {shown_value(blocks)}: bytes in blocks are needed")
        return self._encoded(codecs.getincrementaldecoder("utf-8")("surrogateescape"), blocks, False)

    def _encoded(self, decoder, blocks, allow_special):
        "Yields the ids of each part of what `decoder` makes of `blocks`."
        encoder = self.encoder = self.encoder or build_encoder(self.blob, self.offsets)
        for broken, part in text_parts(decoded(decoder, blocks)):
            if broken:
                data = part.encode("utf-8", "surrogateescape")
                yield [token.id for token in encoder.model.tokenize(as_chars(data))]
            else:
                yield self._encode_part(encoder, part, allow_special)

    def _encode_part(self, encoder, part, allow_special):
        "Ids of a part of a text without surrogates."
        if not (allow_special and self.special_names):
            return encoder.encode(part, add_special_tokens=False).ids
        names = "|".join(map(re.escape, sorted(self.special_names, key=len, reverse=True)))
        ids = []
        for i, piece in enumerate(re.split(f"({names})", part)):
            ids += [self.special_ids[piece]] if i % 2 else encoder.encode(piece, add_special_tokens=False).ids
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        "Ids of (text, allow_special) pairs, each encoded alone. Raises UsageError."
        return [i for text, allow_special in segments for i in self.encode(text, allow_special)]

    def decode(self, ids: Iterable[int]) -> bytes:
        "The bytes of a sequence of ids, exactly; they need not be whole UTF-8. Raises TokenizerError, UsageError."
        return b"".join(map(self.token, ids_argument("ids", ids)))

    def stream(self, errors: str = "replace") -> StreamDecoder:
        "A new StreamDecoder over this vocabulary. Raises UsageError."
        return StreamDecoder(self, errors)

    def drop_encoder(self) -> None:
        "Free the encoder, over 100 MB for the released vocabulary, and give its memory back to the system."
        self.encoder = None
        trim_freed_memory()


BLOCK = 1 << 16  # characters or bytes that are decoded at a time


def slices(text: Any) -> Iterator[Any]:
    "The str or bytes `text` in blocks."
    return (text[i : i + BLOCK] for i in range(0, len(text), BLOCK))


def decoded(decoder: codecs.IncrementalDecoder, blocks: Iterable[bytes]) -> Iterator[str]:
    "The text of `blocks`, in blocks. Raises UsageError for a block that is not bytes."
    for block in blocks:
        if not isinstance(block, bytes):
            raise UsageError(f"a block of the text is {shown_value(block)}: bytes are needed")
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def open_tokenizer(path: str | os.PathLike, config: Config) -> Tokenizer | None:
    "The Tokenizer of the model folder `path`, None where the folder has no `tiktoken.model`. Raises as Tokenizer does."
    return Tokenizer(path, config.vocab_size) if os.path.lexists(Path(path) / "tiktoken.model") else None


__all__ = [
    "TokenizerError", "MAX_RANKS_BYTES", "MAX_JSON_BYTES", "token_of", "read_ranks", "UPPER", "LOWER", "ENDING",
    "PATTERN", "byte_alphabet", "BYTE_CHARS", "as_chars", "build_encoder", "CUT_CHARS", "RUN_CHARS", "cut",
    "NOT_UTF8", "text_parts", "read_json", "named_specials", "MAX_SPECIALS", "all_specials", "stop_ids",
    "ids_argument", "is_whole", "StreamDecoder", "Tokenizer", "BLOCK", "slices", "decoded", "open_tokenizer",
]
