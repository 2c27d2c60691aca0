"""What the small trained model has learned, read from its inside for the figures of the chapters.

    reader = learned.Reader()                       the model of fixtures/stories, all of it in memory
    reading = reader.read("Mia has the red ball.")  what happens in one forward pass
    reader.accuracy(reader.memory)                  the share of right answers to held-out questions, by kind

The forward pass is k3lib's own: its functions are replaced by ones that call them and keep what they saw.
"""

import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "fixtures" / "stories"
sys.path.insert(0, str(FOLDER))
import broken  # noqa: E402
import listen  # noqa: E402
import world  # noqa: E402

from k3lib import kda, mla, model, moe  # noqa: E402
from k3lib.matmul import bf16_to_float32  # noqa: E402
from k3lib.residual import depth_weights  # noqa: E402
from k3lib.tensors import tensor_name  # noqa: E402
from k3lib.tokenizer import Tokenizer  # noqa: E402

WORDS = {
    "name": world.NAMES,
    "thing": world.THINGS,
    "colour": world.COLOURS,
    "place": world.PLACES,
    "gave, went": ("gave", "went"),
    **{word: (word,) for word in ("has", "is", "in", "to", "the", ".", "?")},
    "of a question": ("Who", "Where", "What", "How", "colour", "many", "things", "does", "have", "thing"),
}


def kind_of(token: str) -> str:
    "The kind of a token's word: a key of WORDS."
    return next(kind for kind, words in WORDS.items() if token.strip() in words)


def broken_table() -> dict[str, Any]:
    "The table that `listen.py --broken` wrote."
    return json.loads((FOLDER / "broken.json").read_text(encoding="utf-8"))


def what_breaks(*names: str) -> str:
    "Rows of the table that `listen.py --broken` wrote: right answers by kind, as it is and with one thing wrong."
    table = broken_table()
    rows = {row["name"]: row["right"] for row in table["rows"]}
    lines = [
        f"right answers to {table['each']} questions of each kind",
        " " * 36 + "".join(f"{k:>10}" for k in world.KINDS),
    ]
    for name in ("nothing is wrong", *names):
        lines.append(f"{name:<36}" + "".join(f"{rows[name][kind]:>10.0%}" for kind in world.KINDS))
    return "\n".join(lines)


def held_out_texts(seed: int, each: int) -> list[str]:
    "`each` held-out stories of each kind of question, with the question and no answer."
    return [f"{example.story} {example.asked[0].text}" for example in world.held_out_examples(seed, each)]


class Change(NamedTuple):
    "A story whose last sentence changes who has a thing. The question asks for it."

    before: str  # the story up to there
    sentence: str  # " Mia gave the cup to Tom."
    question: str  # " Who has the cup?"
    old: str  # the answer before: " Mia"
    new: str  # the answer after: " Tom"


def gifts(seed: int, n: int) -> list[Change]:
    "`n` held-out stories that end with a gift."
    random, found = Random(f"gifts {seed}"), list[Change]()
    while len(found) < n:
        *before, last = world.make_story(random, world.LONG, held_out=True).sentences
        if " gave " in last:
            giver, _, _, thing, _, taker = last.rstrip(".").split()
            found.append(Change(" ".join(before), f" {last}", f" Who has the {thing}?", f" {giver}", f" {taker}"))
    return found


class Recurrence(NamedTuple):
    "What a KDA layer's recurrence was given: `q`, `k`, `v`, `alpha` float32 [T, heads, d], `beta` [T, heads]."

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray


@dataclass
class Reading:
    "One forward pass over T tokens."

    tokens: list[str]  # the text of each
    kda: dict[int, Recurrence] = field(default_factory=dict)  # by layer
    mla: dict[int, np.ndarray] = field(default_factory=dict)  # by layer: attention weights [heads, T, T]
    mixes: list[np.ndarray] = field(default_factory=list)  # before each half-layer and the head: weights [sources, T]
    experts: dict[int, np.ndarray] = field(default_factory=dict)  # by layer: chosen ids [T, k]
    unsteered: dict[int, np.ndarray] = field(default_factory=dict)  # what would be chosen without the bias
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))  # float32 [T, vocab]

    def last(self, word: str) -> int:
        "The last position of the token whose text is `word`, without a space before it."
        return max(t for t, token in enumerate(self.tokens) if token.strip() == word)


class Forgetful:
    "The model `memory`, which loses channels of its KDA states when the question comes: `lost` {layer: [heads, d]}."

    def __init__(self, memory: broken.MemoryModel, lost: dict[int, np.ndarray]):
        self.memory, self.lost = memory, lost

    def logits(self, ids: Sequence[int], cut: int, wanted: int = 1) -> np.ndarray:
        "As MemoryModel.logits: the question begins at `cut`."
        sequence = model.Sequence(self.memory.config, len(ids))
        self.memory.model.forward(ids[:cut], sequence, 0)
        for L, channels in self.lost.items():
            sequence.layers[L].S[channels] = 0
        return self.memory.model.forward(ids[cut:], sequence, wanted)


class Reader:
    "The small model, all of it in memory, and what goes on in it while it reads."

    def __init__(self, folder: Path = FOLDER / "model"):
        self.config, self.weights = broken.read_weights(folder)
        self.tokenizer = Tokenizer(folder)
        self.memory = broken.MemoryModel(self.config, self.weights)

    def accuracy(self, asked: broken.MemoryModel | Forgetful, each: int = 20) -> dict[str, float]:
        "The share of right answers that the model `asked` gives to `each` held-out questions of each kind."
        return listen.Questioner(self.tokenizer, 1, each).accuracy(asked)

    def changed(self, change: Callable[[np.ndarray], np.ndarray], chosen: Callable[[str], bool]) -> broken.MemoryModel:
        "The model whose arrays with a `chosen` name are `change`d."
        weights = {name: change(w) if chosen(name) else w for name, w in self.weights.items()}
        return broken.MemoryModel(self.config, weights)

    def read(self, text: str) -> Reading:
        "One forward pass over `text`."
        ids = self.tokenizer.encode(text)
        reading = Reading([self.tokenizer.token(i).decode() for i in ids])
        with self._kept(reading):
            sequence = model.Sequence(self.config, len(ids))
            reading.logits = self.memory.model.forward(ids, sequence, len(ids))
        return reading

    def after(self, text: str, room: int = 32) -> model.Sequence:
        "The model's state after `text`, with room for more tokens."
        ids = self.tokenizer.encode(text)
        sequence = model.Sequence(self.config, len(ids) + room)
        self.memory.model.forward(ids, sequence, 0)
        return sequence

    def next_word(self, sequence: model.Sequence, text: str) -> dict[str, float]:
        "The probability of each word after `text`, which follows what `sequence` has read; it stays as it is."
        logits = self.memory.model.forward(self.tokenizer.encode(text), copy.deepcopy(sequence), 1)[0]
        weights = np.exp(logits - logits.max())
        share = weights / weights.sum()
        return {
            word: float(share[self.tokenizer.encode(word)[0]])
            for words in WORDS.values()
            for word in (f" {word}" for word in words)
            if len(self.tokenizer.encode(word)) == 1
        }

    @contextlib.contextmanager
    def _kept(self, reading: Reading) -> Iterator[None]:
        "A `with` block in which recurrences, attention weights and mixes are kept in `reading`."
        kda_layers, mla_layers = iter(sorted(self.config.kda_layers)), iter(sorted(self.config.mla_layers))
        moe_layers = iter(range(self.config.first_k_dense_replace, self.config.num_hidden_layers))
        recurrent, attend, mix, route = kda.kda_recurrent, mla.attend, model.mix, moe.route

        def kept_recurrent(q, k, v, alpha, beta, S, threads):
            reading.kda[next(kda_layers)] = Recurrence(*(x.copy() for x in (q, k, v, alpha, beta)))
            return recurrent(q, k, v, alpha, beta, S, threads)

        def kept_attend(kv_b, q, cache, position, v_dim, threads):
            L = next(mla_layers)
            reading.mla[L] = self._attention(L, q, cache[: len(q)])
            return attend(kv_b, q, cache, position, v_dim, threads)

        def kept_mix(sources, n, norm, proj, eps, out):
            reading.mixes.append(depth_weights(sources, n, norm, proj, eps))
            return mix(sources, n, norm, proj, eps, out)

        def kept_route(logits, bias, k, scale):
            L, chosen = next(moe_layers), route(logits, bias, k, scale)
            reading.experts[L], reading.unsteered[L] = chosen[0], route(logits, np.zeros_like(bias), k, scale)[0]
            return chosen

        with (
            mock.patch.object(moe, "route", kept_route),
            mock.patch.object(kda, "kda_recurrent", kept_recurrent),
            mock.patch.object(mla, "attend", kept_attend),
            mock.patch.object(model, "mix", kept_mix),
        ):
            yield

    def _attention(self, L: int, q: np.ndarray, rows: np.ndarray) -> np.ndarray:
        "The softmax weights [heads, T, T] of an MLA layer for queries [T, heads, d] and cached rows [T, width]."
        c, T = self.config, len(q)
        up = bf16_to_float32(self.weights[tensor_name(L, "mla", "kv_b_proj")]).reshape(q.shape[1], -1, c.kv_lora_rank)
        key = np.einsum("hnl,pl->hpn", up[:, : c.qk_nope_head_dim], rows[:, : c.kv_lora_rank])
        shared = np.broadcast_to(rows[:, c.kv_lora_rank :], (len(key), T, c.qk_rope_head_dim))
        score = np.einsum("thd,hpd->htp", q, np.concatenate([key, shared], 2)) / np.sqrt(q.shape[2])
        score = np.where(np.tri(T, dtype=bool), score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        return weight / weight.sum(-1, keepdims=True)
