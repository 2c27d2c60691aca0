"""`make faults`: spoil the embedded model, or what is around it, in some hundred seeded ways, and say what came of it.

Right are two answers: the ids of the undamaged model, or an error of the right kind (its exit code, one line, and in it
the name of the file, tensor or field). Other ids without an error are right only where no reader could know without a
manifest, and only if `k3 verify` then finds the damage. Exit code 1 if any case is wrong.

The classes below spoil the model's files, or write them in an unusual way, and call the command in this process. Those
of situations.py spoil outputs, displays, caches, files of the system and limits, and call it in processes of their own.
"""
import argparse
import base64
import contextlib
import copy
import faulthandler
import json
import os
import random
import re
import shutil
import stat
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import common
import situations
from common import MODEL
from interrupts import hear_interrupts

import k3lib.synth  # noqa: F401 what an error's exit code is may not have to be looked up without the right to read it
from k3lib.display import Display

INDEX, CONFIG, RANKS, CONTROL = "model.safetensors.index.json", "config.json", "tiktoken.model", "tokenizer_config.json"
SHARDS = sorted(path.name for path in MODEL.glob("*.safetensors"))
USED = SHARDS[:14]  # the last two hold the image side, of which decoding reads no byte
LAYER, EMBED = "language_model.model.layers.", "language_model.model.embed_tokens.weight"
TEXT, IDS = ("--prompt", "The capital of France is"), ("--ids", "466,261,312,284,313,379,220,37,81,307,306,472")
SECONDS = 600  # a case that takes longer has hung: the process ends and says where

REFUSED = "refused"  # decode must refuse it
EITHER = "refused or no matter"  # refused, or the ids are the right ones and verify finds it
UNKNOWABLE = "unknowable"  # whatever the ids, if it is not refused verify must find it
HARMLESS = "no damage"  # the ids must be the right ones
SAME, SILENT = "same ids", "silent difference"


class Case(NamedTuple):
    "`damage(folder)` spoils a copy of the model. Its refusal has `code` and all of `words` (any one of each tuple)."
    group: str
    what: str
    damage: Callable
    expected: str = REFUSED
    code: int = 4
    words: tuple = ()
    prompt: tuple = TEXT


# Pieces of a model

def put(path, data):
    "A new file in place of a link to the undamaged one."
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def taken_apart(data):
    "The header of a shard's bytes as a dict, and its payload."
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def put_together(text, payload):
    "A shard's bytes from the header's text, or a dict, and the payload."
    if isinstance(text, dict):
        text = json.dumps(text, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + payload


HEADERS = {name: {tensor: entry for tensor, entry in taken_apart((MODEL / name).read_bytes())[0].items()
                  if tensor != "__metadata__"} for name in SHARDS}
PLACE = {tensor: shard for shard, header in HEADERS.items() for tensor in header}
TREES = {name: json.loads((MODEL / name).read_text()) for name in (INDEX, CONFIG, CONTROL)}
LINES = (MODEL / RANKS).read_bytes().splitlines(keepends=True)


def header(shard, change):
    "Damage: change(header of `shard` as a dict). What it returns, a dict or text, takes the header's place."
    def damage(folder):
        entries, payload = taken_apart((MODEL / shard).read_bytes())
        changed = change(entries)
        put(folder / shard, put_together(entries if changed is None else changed, payload))
    return damage


def entry(shard, tensor, **fields):
    "Damage: these fields of one entry."
    return header(shard, lambda entries: entries[tensor].update(fields))


def text(name, change):
    "Damage: a file's bytes become change(bytes)."
    return lambda folder: put(folder / name, change((MODEL / name).read_bytes()))


def tree(name, change):
    "Damage: `change` the JSON tree of a file."
    def damage(folder):
        changed = copy.deepcopy(TREES[name])
        change(changed)
        put(folder / name, json.dumps(changed, indent=1).encode())
    return damage


def terabyte(name):
    "Damage: a file that says it has a terabyte, nearly all of it a hole."
    return lambda folder: [put(folder / name, b"{"), os.truncate(folder / name, 10**12)]


def at(path, value):
    "Change of a tree: the value at a dotted path, or none there."
    def change(found):
        *above, key = path.split(".")
        for name in above:
            found = found[name]
        found.pop(key) if value is ABSENT else found.update({key: value})
    return change


ABSENT = object()


def held_by_shard():
    "The undamaged model as {shard: {tensor: (dtype, shape, bytes)}}."
    model = {}
    for shard, entries in HEADERS.items():
        payload = taken_apart((MODEL / shard).read_bytes())[1]
        model[shard] = {name: (e["dtype"], e["shape"], payload[slice(*e["data_offsets"])])
                        for name, e in entries.items()}
    return model


def tensors(edit, indexed=True):
    """Damage: `edit` the model as {shard: {tensor: (dtype, shape, bytes)}}, then write the shards that differ.

    Their headers and payloads agree, and so does the index if `indexed`.
    """
    def damage(folder):
        model = held_by_shard()
        before = {shard: dict(held) for shard, held in model.items()}
        edit(model)
        for shard, held in model.items():
            if held != before.get(shard):
                entries, end = {}, 0
                for name, (dtype, shape, data) in held.items():
                    entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + len(data)]}
                put(folder / shard, put_together(entries, b"".join(data for _, _, data in held.values())))
        if indexed:
            total = sum(len(data) for held in model.values() for _, _, data in held.values())
            places = {name: shard for shard, held in model.items() for name in held}
            put(folder / INDEX, json.dumps({"metadata": {"total_size": total}, "weight_map": places}).encode())
    return damage


def some_byte(rng, name, low=0, high=None, byte=None):
    "Damage: one byte of a file between two places, replaced by another, one of `byte` if given, taken out or put in."
    size = (MODEL / name).stat().st_size
    place = rng.randrange(low, size if high is None else high)
    how = rng.choice("replace take put".split()) if byte is None else "replace"

    def change(data):
        new = rng_byte(random.Random(place), data[place]) if byte is None else byte(data[place])
        return {"replace": data[:place] + bytes([new]) + data[place + 1:], "take": data[:place] + data[place + 1:],
                "put": data[:place] + bytes([new]) + data[place:]}[how]
    return f"{how} byte {place:,} of {name}", text(name, change)


def rng_byte(rng, old):
    "Another byte: mostly one that JSON knows."
    return rng.choice([b for b in b'0123456789{}[]",:.-e \\\x00\xff' if b != old])


def some_tensor(rng, shards=USED, fits=lambda name, entry: True):
    "(shard, name, entry) of a random tensor."
    shard, name = rng.choice([(shard, name) for shard in shards for name, entry in HEADERS[shard].items()
                              if fits(name, entry)])
    return shard, name, HEADERS[shard][name]


# The classes of damage

GROUPS = []


def group(make):
    "Mark a function that yields (what, damage, ...) as a class of damage. The class has the function's name."
    GROUPS.append(make)
    return make


@group
def header_length(rng):
    for length in (0, 1, 2, 9, 1 << 31, 100_000_000, 100_000_001, 400_000_000, 1 << 62, 1 << 63, (1 << 64) - 1,
                   rng.randrange(1 << 64)):
        shard = rng.choice(USED)
        yield (f"length {length:,}", text(shard, lambda data, n=length: n.to_bytes(8, "little") + data[8:]), REFUSED, 4,
               (shard, "header"))
    for step in -9, -8, -2, -1, 1, 2, 8, 4096:
        shard = rng.choice(USED)
        wrong = lambda data, n=step: (int.from_bytes(data[:8], "little") + n).to_bytes(8, "little") + data[8:]
        yield f"length {step:+}", text(shard, wrong), REFUSED, 4, (shard,)
    shard = rng.choice(USED)

    def sparse(folder):
        put(folder / shard, (300_000_000).to_bytes(8, "little") + b"{")
        os.truncate(folder / shard, 400_000_000)
    yield "300 MB of header in a sparse file", sparse, REFUSED, 4, (shard, "300,000,000")


@group
def header_text(rng):
    for label, change in {
        "empty object": lambda e: {}, "a list": lambda e: json.dumps([e]).encode(), "null": lambda e: b"null",
        "a number": lambda e: b"12",
        "nested 100,000 deep": lambda e: b'{"a":' + b"[" * 100_000, "spaces": lambda e: b" " * 80,
        "nothing": lambda e: b"\0" * 80,
        "not UTF-8": lambda e: json.dumps(e).encode().replace(b"language", b"l\xffnguage", 1),
        "UTF-16": lambda e: json.dumps(e).encode("utf-16"),
        "single quotes": lambda e: repr(e).encode(), "a comma too many": lambda e: json.dumps(e).encode()[:-1] + b",}",
        "cut": lambda e: json.dumps(e).encode()[:-20], "text after it": lambda e: json.dumps(e).encode() + b" x",
        "two objects": lambda e: json.dumps(e).encode() + b"{}",
        "a byte order mark": lambda e: b"\xef\xbb\xbf" + json.dumps(e).encode(),
        "half a surrogate pair": lambda e: {"\ud800": {}, **e},
        "a number of 5,000 digits": lambda e: json.dumps(e).encode()[:-1] + b',"x":' + b"9" * 5000 + b"}",
    }.items():
        shard = rng.choice(USED)
        yield label, header(shard, change), REFUSED, 4, (shard,)
    for again in "same entry", "another entry":
        shard, name, mine = some_tensor(rng)
        other = mine if again == "same entry" else HEADERS[shard][rng.choice([*HEADERS[shard]])]
        added = f",{json.dumps(name)}:{json.dumps(other)}}}".encode()
        twice = lambda e, added=added: json.dumps(e).encode()[:-1] + added
        yield f"name twice, {again}", header(shard, twice), REFUSED, 4, (shard, name)
    for how in {"indent": 1}, {"separators": (" , ", " : ")}, {"sort_keys": True}:
        shard = rng.choice(USED)
        yield f"written with {how}", header(shard, lambda e, how=how: json.dumps(e, **how).encode()), HARMLESS
    for notes in {"by": "hand"}, None, {"format": 1}, [], "pt", {"a": {"b": [1]}}:  # nothing is computed from them
        shard = rng.choice(SHARDS)
        yield f"metadata {notes}", header(shard, lambda e, n=notes: {**e, "__metadata__": n}), HARMLESS
    for _ in range(30):
        shard = rng.choice(USED)
        what, damage = some_byte(rng, shard, 8, 8 + int.from_bytes((MODEL / shard).read_bytes()[:8], "little"))
        yield what, damage, EITHER, 4, (shard,)


@group
def header_fields(rng):
    whole = [-1, 1.5, float("nan"), float("inf"), True, None, "8", [], {}, 1 << 63, 10**40]
    for bad in whole:
        shard, name, mine = some_tensor(rng)
        yield f"shape with {bad!r}", entry(shard, name, shape=[bad, *mine["shape"][1:]]), REFUSED, 4, (shard, name)
        shard, name, mine = some_tensor(rng)
        side = rng.randrange(2)
        offsets = [bad if i == side else place for i, place in enumerate(mine["data_offsets"])]
        yield f"offset {side} is {bad!r}", entry(shard, name, data_offsets=offsets), REFUSED, 4, (shard, name)
    for field, value in (("dtype", "BF17"), ("dtype", "bf16"), ("dtype", None), ("dtype", 16), ("dtype", ["BF16"]),
                         ("dtype", ""), ("shape", None), ("shape", 8), ("shape", {}), ("shape", [1] * 40),
                         ("shape", [1 << 62, 4]), ("shape", [0]), ("shape", []), ("data_offsets", [0]),
                         ("data_offsets", []), ("data_offsets", None), ("data_offsets", [0, 2, 4]),
                         ("data_offsets", {"0": 1})):
        shard, name, _ = some_tensor(rng, fits=lambda name, e: e["shape"] != value and len(e["shape"]) > 1)
        yield f"{field} {value!r}", entry(shard, name, **{field: value}), REFUSED, 4, (shard, name)
    for field in "dtype", "shape", "data_offsets":
        shard, name, _ = some_tensor(rng)
        yield f"no {field}", header(shard, lambda e, n=name, f=field: e[n].pop(f) and None), REFUSED, 4, (shard, name)
    for value in [], {}, None, 3, "x", {"dtype": "U8", "shape": [], "data_offsets": [0, 1], "more": 1}:
        shard, name, _ = some_tensor(rng)
        yield f"entry {value!r}", header(shard, lambda e, n=name, v=value: e.update({n: v})), REFUSED, 4, (shard, name)
    for dtype, other in (("BF16", "F16"), ("BF16", "I16"), ("F32", "I32"), ("U8", "I8"), ("U8", "F8_E4M3"),
                         ("BF16", "F32"), ("U8", "BF16")):
        shard, name, _ = some_tensor(rng, SHARDS[1:3], lambda name, e: e["dtype"] == dtype)
        yield f"{dtype} called {other}", entry(shard, name, dtype=other), REFUSED, 4, (shard, name)
    for _ in range(6):
        shard, name, mine = some_tensor(rng, fits=lambda name, e: len(e["shape"]) == 2 and len({*e["shape"], 1}) == 3)
        yield "shape turned round", entry(shard, name, shape=mine["shape"][::-1]), REFUSED, 4, (shard, name)
    shard, name, mine = some_tensor(rng, SHARDS[14:], lambda name, e: e["shape"] != [1])
    yield "shape of the image side grows", entry(shard, name, shape=[*mine["shape"], 2]), REFUSED, 4, (shard, name)
    for dtype in "F8_E8M0FNU", "bf16", "":
        shard, name, _ = some_tensor(rng, SHARDS[14:])
        yield f"type {dtype!r} of the image side", entry(shard, name, dtype=dtype), HARMLESS
    shard, name, _ = some_tensor(rng)
    yield "a field without a meaning", entry(shard, name, strides=[1]), HARMLESS


@group
def extents(rng):
    for step, move in ((-2, "begin"), (-2, "end"), (2, "begin"), (2, "end"), (-2, "both"), (2, "both"), (4096, "both"),
                       (1 << 40, "both"), (1 << 40, "end")):
        shard, name, mine = some_tensor(rng, fits=lambda name, e: e["data_offsets"][0] > 4096)
        begin, end = mine["data_offsets"]
        offsets = [begin + step * (move != "end"), end + step * (move != "begin")]
        yield (f"{move} moved by {step:,}", entry(shard, name, data_offsets=offsets), REFUSED, 4,
               (shard, tuple(HEADERS[shard])))
    for label, change in {
        "backwards": lambda b, e: [e, b], "at the front": lambda b, e: [0, e - b],
        "counted from the file's start": lambda b, e: [b + 8000, e + 8000],
        "negative": lambda b, e: [b - e, 0], "empty": lambda b, e: [b, b],
    }.items():
        shard, name, mine = some_tensor(rng, fits=lambda name, e: e["data_offsets"][0] > 0)
        yield (label, entry(shard, name, data_offsets=change(*mine["data_offsets"])), REFUSED, 4,
               (shard, tuple(HEADERS[shard])))
    for _ in range(4):
        shard, name, mine = some_tensor(rng, USED[:13])
        other = next(e["data_offsets"] for e in HEADERS[shard].values()
                     if e["shape"] != mine["shape"] and e["dtype"] != mine["dtype"])
        yield "the place of another size", entry(shard, name, data_offsets=other), REFUSED, 4, (shard, name)
    for _ in range(3):
        fits = lambda name, e: "w1.weight_packed" in name or "lm_head" in name or "o_proj" in name
        shard, one, _ = some_tensor(rng, fits=fits)
        mine = HEADERS[shard][one]
        other = next((n for n, e in HEADERS[shard].items() if e["shape"] == mine["shape"] and n != one), None)
        if other:
            swap = lambda e, a=one, b=other: (e.update({a: e[b], b: e[a]}))
            yield "two of a shape swapped", header(shard, swap), UNKNOWABLE, 4, (shard,)


@group
def held_tensors(rng):
    for _ in range(6):
        shard, name, _ = some_tensor(rng)
        yield f"{name} missing", tensors(lambda m, s=shard, n=name: m[s].pop(n)), REFUSED, 4, (name,)
        shard, name, _ = some_tensor(rng)
        yield (f"{name} missing, the index still lists it", tensors(lambda m, s=shard, n=name: m[s].pop(n), False),
               REFUSED, 4, (INDEX, name))
    for L, e in (1, 0), (7, 11), (12, 15):
        expert = f"{LAYER}{L}.block_sparse_moe.experts.{e}."
        gone = lambda m, s=SHARDS[L], p=expert: [m[s].pop(n) for n in [*m[s]] if n.startswith(p)]
        yield f"expert {e} of layer {L} missing", tensors(gone), REFUSED, 4, (expert, "6 tensors")
    for name in (f"{LAYER}13.input_layernorm.weight", f"{LAYER}3.block_sparse_moe.experts.16.w1.weight_packed",
                 "language_model.x"):
        shard = rng.choice(USED)
        more = lambda m, s=shard, n=name: m[s].update({n: ("U8", [4], b"abcd")})
        yield f"one more, {name}", tensors(more), REFUSED, 4, (shard, name)
    for name in "lm_head.bias", "../../etc/passwd", "/etc/passwd", "é", "a\nb", "":
        shard = rng.choice(USED)
        more = lambda m, s=shard, n=name: m[s].update({n: ("U8", [4], b"abcd")})
        yield f"one more, {name!r}", tensors(more), HARMLESS
        yield f"one more, {name!r}, not in the index", tensors(more, False), HARMLESS
    for _ in range(4):
        shard, name, _ = some_tensor(rng)
        other = name + "_"
        renamed = lambda m, s=shard, a=name, b=other: m[s].update({b: m[s].pop(a)})
        yield f"{name} renamed", tensors(renamed), REFUSED, 4, (name,)
        yield f"{name} renamed, not in the index", tensors(renamed, False), REFUSED, 4, (INDEX, (name, other))
    for _ in range(4):
        shard, name, _ = some_tensor(rng)
        to = rng.choice([s for s in USED if s != shard])
        moved = lambda m, a=shard, b=to, n=name: m[b].update({n: m[a].pop(n)})
        yield f"{name} in another shard", tensors(moved), HARMLESS
        yield f"{name} in another shard than the index says", tensors(moved, False), REFUSED, 4, (INDEX, name)
        yield (f"{name} in two shards", tensors(lambda m, a=shard, b=to, n=name: m[b].update({n: m[a][n]})), REFUSED, 4,
               (name, shard, to))
    for _ in range(3):
        one, name, mine = some_tensor(rng, SHARDS[1:6], lambda name, e: "w2" in name and "packed" in name)
        other = name.replace(f"layers.{USED.index(one)}.", f"layers.{USED.index(one) + 5}.")
        to = PLACE[other]

        def crossed(m, a=one, b=to, n=name, o=other):
            m[a][o], m[b][n] = m[b].pop(o), m[a].pop(n)
        yield "two of different layers change places", tensors(crossed), HARMLESS
        yield ("two of different layers change places, not in the index", tensors(crossed, False), REFUSED, 4,
               (INDEX, (name, other)))

        def values(m, a=one, b=to, n=name, o=other):
            m[a][n], m[b][o] = m[b][o], m[a][n]
        yield "two of different layers change values", tensors(values), UNKNOWABLE
    for dtype, width in ("F32", 2), ("F16", 1):
        shard, name, mine = some_tensor(rng, fits=lambda name, e: e["dtype"] == "BF16")
        stored = lambda m, s=shard, n=name, d=dtype, w=width: m[s].update({n: (d, m[s][n][1], m[s][n][2] * w)})
        yield f"BF16 stored as {dtype}", tensors(stored), REFUSED, 4, (shard, name)
    shard, name, mine = some_tensor(rng, fits=lambda name, e: "q_proj" in name or "o_proj" in name)
    row = lambda m: m[shard].update({name: ("BF16", [m[shard][name][1][0] - 1, m[shard][name][1][1]],
                                            m[shard][name][2][:-2 * m[shard][name][1][1]])})
    yield "a matrix with a row less", tensors(row), REFUSED, 4, (shard, name)


@group
def index(rng):
    names = [name for shard in USED for name in HEADERS[shard]]
    twice = names[0].encode(), USED[0].encode()
    for to in (SHARDS[0], SHARDS[-1], "model-00017-of-000016.safetensors", "../" + SHARDS[0], "/etc/passwd", "", 3,
               None, [SHARDS[0]], ".."):
        name = rng.choice([n for n in names if PLACE[n] != to])
        yield (f"a tensor said to be in {to!r}", tree(INDEX, lambda i, n=name, t=to: i["weight_map"].update({n: t})),
               REFUSED, 4, (INDEX, name))
    for name in rng.sample(names, 3):
        yield (f"{name} not listed", tree(INDEX, lambda i, n=name: i["weight_map"].pop(n) and None), REFUSED, 4,
               (INDEX, name))
        yield (f"{name} listed with another name",
               tree(INDEX, lambda i, n=name: i["weight_map"].update({n + ".": i["weight_map"].pop(n)})), REFUSED, 4,
               (INDEX, name))
    for label, change in {  # nothing is computed from these
        "total_size + 1": lambda i: i["metadata"].update(total_size=i["metadata"]["total_size"] + 1),
        "total_size 0": lambda i: i["metadata"].update(total_size=0),
        "total_size text": lambda i: i["metadata"].update(total_size="6612160"),
        "total_size NaN": lambda i: i["metadata"].update(total_size=float("nan")),
        "metadata 3": lambda i: i.update(metadata=3),
        "a tensor of the image side not listed": lambda i: i["weight_map"].pop(rng.choice([*HEADERS[SHARDS[14]]])),
        "a tensor of the image side elsewhere": lambda i: i["weight_map"].update(
            {rng.choice([*HEADERS[SHARDS[15]]]): SHARDS[3]}),
        "a tensor that no file has": lambda i: i["weight_map"].update({"audio.w": "audio.safetensors"}),
    }.items():
        yield label, tree(INDEX, lambda i, c=change: c(i) and None), HARMLESS
    for label, change in {
        "no weight_map": lambda i: i.pop("weight_map") and None,
        "weight_map a list": lambda i: i.update(weight_map=[*i["weight_map"]]),
        "weight_map empty": lambda i: i.update(weight_map={}), "weight_map null": lambda i: i.update(weight_map=None),
    }.items():
        yield label, tree(INDEX, change), REFUSED, 4, (INDEX,)
    for label, change in {
        "empty": lambda data: b"", "one byte": lambda data: b"{", "half": lambda data: data[:len(data) // 2],
        "twice": lambda data: data * 2,
        "a list": lambda data: b"[" + data + b"]", "zeros": lambda data: bytes(len(data)),
        "nested": lambda data: b'{"weight_map":' + b"[" * 10**5,
        "a pointer to large files": lambda data: b"version https://git-lfs.github.com/spec/v1\n",
        "not UTF-8": lambda data: data.replace(b"layers", b"lay\xffrs", 1),
        "a tensor twice": lambda data: data.replace(b'"weight_map": {', b'"weight_map": {"%s": "%s",' % twice, 1),
        "UTF-16": lambda data: data.decode().encode("utf-16"),
    }.items():
        yield label, text(INDEX, change), REFUSED, 4, (INDEX,)
    yield "of a terabyte", terabyte(INDEX), REFUSED, 4, (INDEX, "1,000,000,000,000 bytes")
    yield "not there", lambda folder: (folder / INDEX).unlink(), HARMLESS
    yield "without metadata", tree(INDEX, lambda i: i.pop("metadata") and None), HARMLESS
    for _ in range(20):
        what, damage = some_byte(rng, INDEX)
        yield what, damage, EITHER, 4, (INDEX,)


def odd_files(name):
    "Damages that put something else than the file in its place."
    return {
        "missing": lambda folder: (folder / name).unlink(),
        "a folder": lambda folder: [(folder / name).unlink(), (folder / name).mkdir()],
        "a link to nothing": lambda folder: [(folder / name).unlink(), (folder / name).symlink_to("nowhere")],
        "a link to itself": lambda folder: [(folder / name).unlink(), (folder / name).symlink_to(name)],
        "a link to a folder": lambda folder: [(folder / name).unlink(), (folder / name).symlink_to(".")],
        "a pipe": lambda folder: [(folder / name).unlink(), os.mkfifo(folder / name)],
        "empty": lambda folder: put(folder / name, b""),
        "unreadable": lambda folder: [put(folder / name, (MODEL / name).read_bytes()), os.chmod(folder / name, 0)],
    }


@group
def shard_files(rng):
    for label in odd_files(""):
        shard = rng.choice(USED if label == "missing" else SHARDS)
        yield f"{label}: {shard}", odd_files(shard)[label], REFUSED, 4, (shard,)
    yield "the image side is missing", lambda f: [(f / s).unlink() for s in SHARDS[14:]], HARMLESS
    for cut in 1, 2, 9, 1000, "half", "header", "last byte of the last shard":
        shard = SHARDS[-1] if "last" in str(cut) else rng.choice(USED)
        keep = lambda data, c=cut: data[:{"half": len(data) // 2, "header": 100}.get(
            c, -1 if isinstance(c, str) else c)]
        yield f"cut to {cut}: {shard}", text(shard, keep), REFUSED, 4, (shard,)
    for _ in range(6):
        shard = rng.choice(SHARDS)
        size = rng.randrange((MODEL / shard).stat().st_size)
        yield f"cut to {size:,} bytes: {shard}", text(shard, lambda data, n=size: data[:n]), REFUSED, 4, (shard,)
    for more in b"\0", b"x" * 4096:
        shard = rng.choice(SHARDS)
        yield f"{len(more)} bytes more: {shard}", text(shard, lambda data, m=more: data + m), REFUSED, 4, (shard,)
    for make in (lambda data: bytes(len(data)), lambda data: b"<!DOCTYPE html>" + data,
                 lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"):
        shard = rng.choice(SHARDS)
        yield f"something else: {shard}", text(shard, make), REFUSED, 4, (shard,)
    for _ in range(4):
        one, other = rng.sample(USED, 2)
        yield (f"{one} is a copy of {other}", lambda folder, a=one, b=other: put(folder / a, (MODEL / b).read_bytes()),
               REFUSED, 4, (one, other))
        swap = lambda folder, a=one, b=other: [put(folder / a, (MODEL / b).read_bytes()),
                                               put(folder / b, (MODEL / a).read_bytes())]
        yield f"{one} and {other} swapped", swap, REFUSED, 4, (INDEX, (one, other))
        yield (f"{one} and {other} swapped, no index", lambda folder, s=swap: [s(folder), (folder / INDEX).unlink()],
               HARMLESS)
    last = SHARDS[-1]
    from_zero = lambda f: [os.rename(f / s, f / s.replace(f"{i:05d}", f"{i - 1:05d}", 1))
                           for i, s in enumerate(SHARDS, 1)]
    # what the index says of them, and without an index: its words, or none if the files that it means are there
    for label, damage, told, words in (
        ("numbered from 0", from_zero, (INDEX,), ("model-00000-of-000016", "model-00016-of-000016")),
        ("of 17", lambda f: [os.rename(f / s, f / s.replace("000016.", "000017.")) for s in SHARDS],
         (INDEX, "of-000016.safetensors"), ("model-00017-of-000017.safetensors is missing",)),
        ("one of 17", lambda f: os.rename(f / last, f / last.replace("000016.", "000017.")), (),
         ("of-000017", "of-000016")),
        ("a 17th", lambda f: shutil.copy(f / last, f / last.replace("00016-", "00017-")), (),
         ("model-00017-of-000016.safetensors",)),
        ("five digits", lambda f: os.rename(f / last, f / last.replace("000016.", "00016.")), (),
         ("model-00016-of-00016.safetensors", "model-00016-of-000016")),
        ("the file of another download", lambda f: os.rename(f / last, f / (last + ".part")), (), (last,)),
        ("both kinds", lambda f: shutil.copy(f / last, f / "model.safetensors"), (), ("model.safetensors",)),
        ("none", lambda f: [(f / s).unlink() for s in SHARDS], (INDEX, "found no such file"), ("no weight files",)),
    ):
        yield label, damage, REFUSED if told else HARMLESS, 4, told
        yield f"{label}, no index", lambda f, d=damage: [d(f), (f / INDEX).unlink()], REFUSED, 4, words
    yield ("other files beside them",
           lambda f: [put(f / n, b"x") for n in ("README.md", "model-1.safetensors", "consolidated.safetensors",
                                                 ".hidden")],
           HARMLESS)


@group
def links(rng):
    def cache(folder, absolute=False, names=None):
        blobs = folder.parent / f"{folder.name}-blobs"
        blobs.mkdir()
        for i, name in enumerate(names or sorted(os.listdir(folder))):
            shutil.copy(MODEL / name, blobs / f"{i:064x}")
            (folder / name).unlink()
            (folder / name).symlink_to((blobs if absolute else Path("..", blobs.name)) / f"{i:064x}")
        return blobs

    yield "every file, as a hub cache has them", cache, HARMLESS
    yield "every file, by absolute paths", lambda f: cache(f, True), HARMLESS
    yield "one shard", lambda f: cache(f, names=[SHARDS[4]]), HARMLESS
    yield "config and tokenizer", lambda f: cache(f, names=[CONFIG, RANKS, CONTROL]), HARMLESS
    for name, code in (SHARDS[2], 4), (INDEX, 4), (CONFIG, 2), (RANKS, 2), (CONTROL, 2):
        lost = lambda f, n=name: [cache(f, names=[n]), shutil.rmtree(f.parent / f"{f.name}-blobs")]
        yield f"the blob of {name} is gone", lost, REFUSED, code, (name,)
    short = lambda f: (cache(f, names=[SHARDS[5]]) / f"{0:064x}").write_bytes(b"{}")
    yield "the blob of a shard is not complete", short, REFUSED, 4, (SHARDS[5],)


@group
def config_files(rng):
    for label, damage in odd_files(CONFIG).items():
        yield label, damage, REFUSED, 2, (CONFIG,)
    for label, change in {
        "half": lambda data: data[:len(data) // 2], "a list": lambda data: b"[" + data + b"]",
        "nested": lambda data: b'{"a":' + b"[" * 10**5,
        "zeros": lambda data: bytes(len(data)), "UTF-16": lambda data: data.decode().encode("utf-16"),
        "not UTF-8": lambda data: data.replace(b"kimi", b"k\xffmi"),
        "text": lambda data: b"hello",
        "a number of 5,000 digits": lambda data: data.replace(b'"vocab_size": 512', b'"vocab_size": ' + b"9" * 5000, 1),
        "twice": lambda data: data + data,
        "a field twice": lambda data: data.replace(b'"vocab_size"', b'"vocab_size": 512, "vocab_size"', 1),
        "null": lambda data: b"null", "{}": lambda data: b"{}",
        "a comma too many": lambda data: data.rstrip()[:-1] + b",}",
    }.items():
        yield label, text(CONFIG, change), REFUSED, 2, (CONFIG,)
    yield "of a terabyte", terabyte(CONFIG), REFUSED, 2, (CONFIG, "1,000,000,000,000 bytes")
    yield "a field nobody reads", tree(CONFIG, lambda c: c.update(torch_dtype="x", extra={"a": [1]})), HARMLESS
    for _ in range(24):
        what, damage = some_byte(rng, CONFIG)
        yield what, damage, UNKNOWABLE, (2, 4), ()


@group
def config_values(rng):
    numbers = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
               "attn_res_block_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
               "v_head_dim", "num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size",
               "first_k_dense_replace", "routed_expert_hidden_size", "linear_attn_config.num_heads",
               "linear_attn_config.head_dim", "linear_attn_config.short_conv_kernel_size"]
    reals = ["rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor",
             "linear_attn_config.gate_lower_bound"]
    bad = [-1, 1.5, float("nan"), float("inf"), float("-inf"), True, "4", [4], {}, None, ABSENT, 10**12, 2**63, 10**400]
    for i, field in enumerate(numbers + reals):
        for value in rng.sample(bad if i < len(numbers) else [v for v in bad if v not in (1.5, -1)], 2) + [ABSENT]:
            what = "no" if value is ABSENT else str(value)[:12]
            yield (f"{field}: {what}", tree(CONFIG, at(f"text_config.{field}", value)), REFUSED, 2,
                   (CONFIG, field.rpartition(".")[2]))
    for field in ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                  "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts",
                  "num_shared_experts", "linear_attn_config.num_heads", "linear_attn_config.head_dim",
                  "linear_attn_config.short_conv_kernel_size", "first_k_dense_replace", "moe_intermediate_size",
                  "routed_expert_hidden_size"]:
        def more(c, field=field):
            part, key = c["text_config"], field
            if "." in field:
                part, key = part["linear_attn_config"], field.rpartition(".")[2]
            part[key] += 32 if "moe_inter" in field or "routed" in field else 1
        names = (".safetensors", field, "tensors are missing", "kda_layers", RANKS, "num_key_value_heads")
        yield f"{field} larger than the files", tree(CONFIG, more), REFUSED, (2, 4), (names,)
    for field, value in (("rms_norm_eps", 1e-6), ("routed_scaling_factor", 2.5), ("activation_situ_beta", 2.0),
                         ("linear_attn_config.gate_lower_bound", -4.0), ("num_experts_per_token", 3),
                         ("attn_res_block_size", 4), ("activation_situ_linear_beta", 24.0)):
        yield f"{field}: {value}", tree(CONFIG, at(f"text_config.{field}", value)), UNKNOWABLE
    kda, mla = "text_config.linear_attn_config.kda_layers", "text_config.linear_attn_config.full_attn_layers"
    for label, path, value in (("overlap", kda, [1, 2, 3, 4, 5, 6, 7, 9, 10, 11]),
                               ("a layer in neither", mla, [4, 8, 12]),
                               ("twice", kda, [1, 1, 2, 3, 5, 6, 7, 9, 10, 11]),
                               ("from zero", mla, [3, 7, 11, 12]), ("out of range", mla, [4, 8, 12, 13, 14]),
                               ("empty", mla, []), ("text", mla, ["4", "8", "12", "13"]),
                               ("fractions", mla, [4.0, 8, 12, 13]), ("NaN", mla, [float("nan"), 8, 12, 13]),
                               ("an object", kda, {"1": 2}), ("absent", kda, ABSENT),
                               ("huge numbers", mla, [4, 8, 12, 10**300]), ("negative", mla, [-4, 8, 12, 13])):
        yield (f"layer lists: {label}", tree(CONFIG, at(path, value)), REFUSED, 2,
               (CONFIG, ("kda_layers", "full_attn_layers")))
    exchanged = lambda c: [at(kda, [1, 2, 4, 5, 6, 7, 9, 10, 11])(c), at(mla, [3, 8, 12, 13])(c)]
    yield "two layers change kind", tree(CONFIG, exchanged), REFUSED, 4, (("layers.2.", "layers.3."),)
    fewer = lambda c: [at("text_config.num_hidden_layers", 12)(c), at(mla, [4, 8, 12])(c)]
    yield "the last layer left out", tree(CONFIG, fewer), REFUSED, 4, ("layers.12.",)
    for field, value in (("hidden_act", "silu"), ("moe_router_activation_func", "softmax"), ("num_expert_group", 4),
                         ("mla_use_nope", False), ("tie_word_embeddings", True),
                         ("quantization_config.format", "int4"), ("quantization_config.config_groups", {}),
                         ("num_nextn_predict_layers", -1), ("topk_method", "greedy"), ("moe_layer_freq", 2),
                         ("text_config", 3),
                         ("linear_attn_config", [])):
        path = field if field in ("text_config", "tie_word_embeddings") else f"text_config.{field}"
        yield f"{field}: {value!r}", tree(CONFIG, at(path, value)), REFUSED, 2, (CONFIG, field)
    for field in "bos_token_id", "eos_token_id", "pad_token_id":  # only the second one is used
        for value in 512, -1, 1.0, "5", float("nan"), {}:
            expected = REFUSED if field == "eos_token_id" else HARMLESS
            yield f"{field}: {value!r}", tree(CONFIG, at(field, value)), expected, 2, (CONFIG, field)
    for field, value in (("num_nextn_predict_layers", 1), ("num_key_value_heads", 1), ("moe_layer_freq", [1] * 13)):
        yield f"{field}: {value!r}", tree(CONFIG, at(f"text_config.{field}", value)), HARMLESS


@group
def tokenizer_files(rng):
    for name in RANKS, CONTROL:
        for label, damage in odd_files(name).items():
            yield f"{name}: {label}", damage, REFUSED, 2, (name,)
        yield f"{name}: of a terabyte", terabyte(name), REFUSED, 2, (name, "1,000,000,000,000 bytes")
    def lines(edit):
        def damage(folder):
            new = [*LINES]
            edit(new)
            put(folder / RANKS, b"".join(new))
        return damage
    i = rng.randrange(260, 480)
    for label, edit in {
        "a line lost": lambda n: n.pop(i), "a line twice": lambda n: n.insert(i, n[i]),
        "bad base64": lambda n: n.__setitem__(i, b"J*== %d\n" % i),
        "no padding": lambda n: n.__setitem__(i, b"KA %d\n" % i),
        "a gap": lambda n: n.__setitem__(i, n[i].replace(b" %d\n" % i, b" %d\n" % (i + 1))),
        "a rank twice": lambda n: n.__setitem__(i, n[i].replace(b" %d\n" % i, b" %d\n" % (i - 1))),
        "a token twice": lambda n: n.__setitem__(i, n[3].split()[0] + b" %d\n" % i),
        "no rank": lambda n: n.__setitem__(i, n[i].split()[0] + b"\n"),
        "negative": lambda n: n.__setitem__(i, n[i].split()[0] + b" -%d\n" % i),
        "fraction": lambda n: n.__setitem__(i, n[i].split()[0] + b" %d.0\n" % i),
        "digits of another script": lambda n: n.__setitem__(i, n[i].split()[0] + " \u0663\n".encode()),
        "an empty token": lambda n: n.__setitem__(i, b" %d\n" % i), "an empty line": lambda n: n.insert(i, b"\n"),
        "the last lost": lambda n: n.pop(),
        "half": lambda n: n.__delitem__(slice(250, None)),
        "two lines swapped": lambda n: n.__setitem__(slice(i, i + 2), n[i:i + 2][::-1]),
        "one more": lambda n: n.append(base64.b64encode(b"unlikely") + b" 496\n"),
        "CRLF": lambda n: n.__setitem__(slice(None), [x[:-1] + b"\r\n" for x in n]),
        "no token for a byte": lambda n: n.__setitem__(7, base64.b64encode(b"unlikely") + b" 7\n"),
        "a rank of 5,000 digits": lambda n: n.__setitem__(i, b"KA== " + b"9" * 5000 + b"\n"),
    }.items():
        yield f"ranks: {label}", lines(edit), REFUSED, 2, ((RANKS, CONTROL),)
    exchange = lambda n: n.__setitem__(slice(300, 302), [n[301].split()[0] + b" 300\n", n[300].split()[0] + b" 301\n"])
    yield "ranks: two tokens change ranks", lines(exchange), UNKNOWABLE
    table = "added_tokens_decoder"
    entries = TREES[CONTROL][table]
    first, last = min(entries, key=int), max(entries, key=int)
    for label, change in {
        "an id that is a rank": lambda t: t[table].update({"5": {"content": "<x>"}}),
        "an id past the vocabulary": lambda t: t[table].update({"512": {"content": "<x>"}}),
        "a huge id": lambda t: t[table].update({"9" * 30: {"content": "<x>"}}),
        "a negative id": lambda t: t[table].update({"-1": {"content": "<x>"}}),
        "two ids of a name": lambda t: t[table][last].update(content=t[table][first]["content"]),
        "no name": lambda t: t[table][first].pop("content") and None,
        "a name that is a number": lambda t: t[table][first].update(content=5),
        "an empty name": lambda t: t[table][first].update(content=""),
        "the first lost": lambda t: t[table].pop(first) and None, "no table": lambda t: t.pop(table) and None,
        "a list": lambda t: t.update({table: []}),
        "an end that is no name": lambda t: t.update(eos_token="[STOP]"),
        "an end that is a list": lambda t: t.update(eos_token=["[EOS]"]),
    }.items():
        yield f"control: {label}", tree(CONTROL, change), REFUSED, 2, ((RANKS, CONTROL),)
    for label, change in {
        "half": lambda data: data[:len(data) // 2], "a list": lambda data: b"[]",
        "nested": lambda data: b'{"a":' + b"[" * 10**5,
        "not UTF-8": lambda data: b"\xff" + data, "null": lambda data: b"null",
        "an id twice": lambda data: data.replace(b'"%s":' % last.encode(), b'"%s":' % first.encode(), 1),
    }.items():
        yield f"control: {label}", text(CONTROL, change), REFUSED, 2, (CONTROL,)
    for name in RANKS, CONTROL:  # no text to encode, but stop ids to know
        for label in "a link to nothing", "a folder", "unreadable":
            yield f"{name}: {label}, prompt in ids", odd_files(name)[label], REFUSED, 2, (name,), IDS
    yield f"{CONTROL}: missing, prompt in ids", odd_files(CONTROL)["missing"], REFUSED, 2, (CONTROL,), IDS
    yield f"{RANKS}: missing, prompt in ids", odd_files(RANKS)["missing"], HARMLESS, 2, (), IDS
    yield ("no vocabulary, prompt in ids", lambda folder: [(folder / RANKS).unlink(), (folder / CONTROL).unlink()],
           HARMLESS, 2, (), IDS)
    for name in RANKS, CONTROL:
        for _ in range(12):
            what, damage = some_byte(rng, name)
            yield what, damage, UNKNOWABLE, 2, ((RANKS, CONTROL),)


@group
def payload_bytes(rng):
    for _ in range(40):
        shard = rng.choice(SHARDS)
        start = 8 + int.from_bytes((MODEL / shard).read_bytes()[:8], "little")
        bit = 1 << rng.randrange(8)
        what, damage = some_byte(rng, shard, start, byte=lambda old, bit=bit: old ^ bit)
        yield what, damage, UNKNOWABLE
    for _ in range(6):
        shard = rng.choice(USED)
        size = (MODEL / shard).stat().st_size
        begin = rng.randrange(size // 2, size - 4096)
        yield (f"4,096 zeros at {begin:,} of {shard}",
               text(shard, lambda data, b=begin: data[:b] + bytes(4096) + data[b + 4096:]), UNKNOWABLE)


def spoiled(tensor, value, where):
    "Damage: `value`, bytes, in place of the element of `tensor` at the share `where` of it."
    def damage(folder):
        shard = PLACE[tensor]
        data = bytearray((folder / shard).read_bytes())
        begin, end = HEADERS[shard][tensor]["data_offsets"]
        place = 8 + int.from_bytes(data[:8], "little") + begin + int(where * ((end - begin) // len(value))) * len(value)
        data[place:place + len(value)] = value
        put(folder / shard, bytes(data))
    return damage


@group
def numbers(rng):
    "A NaN or an infinity stops the run where it is used: every row of the trunk is, and some expert of a layer."
    bits = {"BF16": {"NaN": b"\xc0\x7f", "infinity": b"\x80\x7f", "-infinity": b"\x80\xff"},
            "F32": {"NaN": b"\0\0\xc0\x7f", "infinity": b"\0\0\x80\x7f", "-infinity": b"\0\0\x80\xff"}}
    shorts = sorted({re.sub(r".*layers\.\d+\.", "", n) for s in USED for n in HEADERS[s]
                     if ".experts." not in n and "embed" not in n})
    for short in shorts:
        tensor = rng.choice([n for s in USED for n in HEADERS[s] if n.endswith(short) and ".experts." not in n])
        label, value = rng.choice([*bits[HEADERS[PLACE[tensor]][tensor]["dtype"]].items()])
        yield (f"{label} in {tensor}", spoiled(tensor, value, 0.0), REFUSED, 4,
               (tensor, "row"))  # its first entry: A_log has padding further on
    for L in rng.sample(range(1, 13), 6):
        w = rng.choice(["w1", "w2", "w3"])
        scales = [n for n in HEADERS[SHARDS[L]] if n.endswith(f"{w}.weight_scale")]
        where = rng.random()
        every = lambda f, s=scales, x=where: [spoiled(n, b"\xff", x)(f) for n in s]
        yield (f"scale 255 in {w} of every expert of layer {L}", every, REFUSED, 4,
               (f"layers.{L}.", f"{w}.weight_scale", "row"))
    for _ in range(8):
        L, e, w = rng.randrange(1, 13), rng.randrange(16), rng.choice(["w1", "w2", "w3"])
        name = f"{LAYER}{L}.block_sparse_moe.experts.{e}.{w}.weight_scale"
        yield f"scale 255 in {name}", spoiled(name, b"\xff", rng.random()), EITHER, 4, (name, "row")
    for label, value in bits["BF16"].items():
        yield (f"{label} in the embedding", spoiled(EMBED, value, rng.random()),
               EITHER, 4, ("embed_tokens", "row"))
        used = lambda f, v=value: [spoiled(EMBED, v, i / 512)(f) for i in range(512)]
        yield f"{label} in every row of the embedding", used, REFUSED, 4, ("embed_tokens", "row")


def rearranged(place, indexed=True):
    """Damage: every tensor in the file place(shard, tensor), which are numbered in the order of their first tensor.

    Without an index unless `indexed`. One file is called model.safetensors.
    """
    def damage(folder):
        files = {}
        for shard, held in held_by_shard().items():
            for name, tensor in held.items():
                files.setdefault(place(shard, name), {})[name] = tensor
        for shard in SHARDS:
            (folder / shard).unlink()
        names = {}
        for number, held in enumerate(files.values(), 1):
            path = f"model-{number:05d}-of-{len(files):06d}.safetensors" if len(files) > 1 else "model.safetensors"
            entries, end = {}, 0
            for name, (dtype, shape, data) in held.items():
                entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end := end + len(data)]}
                names[name] = path
            put(folder / path, put_together(entries, b"".join(data for _, _, data in held.values())))
        (folder / INDEX).unlink()
        if indexed:
            put(folder / INDEX, json.dumps({"metadata": {}, "weight_map": names}).encode())
    return damage


def extra_shard(name, entries, listed):
    "Damage: one more file with tensors of its own; the index lists them if `listed`."
    def damage(folder):
        data = put_together({tensor: {"dtype": "U8", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]}
                             for i, tensor in enumerate(entries)}, bytes(4 * len(entries)))
        put(folder / name, data)
        if listed:
            changed = copy.deepcopy(TREES[INDEX])
            changed["weight_map"].update(dict.fromkeys(entries, name))
            put(folder / INDEX, json.dumps(changed).encode())
    return damage


@group
def unusual_checkpoints(rng):
    "Other files, and other ways to write them, that say the same about every tensor of the run."
    for label, value in (("null", None), ("empty", {}), ("a long text", {"format": "pt" * 50_000}),
                         ("odd text", {"é\n\t": "\u2028\"\\"}), ("a name of a tensor", {EMBED: EMBED})):
        shard = rng.choice(USED)
        yield f"metadata {label}", header(shard, lambda e, v=value: {**e, "__metadata__": v}), HARMLESS
    for last in False, True:
        null = {"__metadata__": None}
        yield f"metadata null in every shard, {'last' if last else 'first'}", lambda folder, x=last: [
            header(shard, lambda e: HEADERS[shard] | null if x else null | HEADERS[shard])(folder) for shard in SHARDS
        ], HARMLESS
    for label, how in (("spaces behind it", lambda e: json.dumps(e).encode() + b" " * rng.randrange(9, 5000)),
                       ("escaped names", lambda e: json.dumps(e).encode().replace(b"language", b"l\\u0061nguage")),
                       ("line ends", lambda e: json.dumps(e, indent=1).replace("\n", "\r\n").encode()),
                       ("tabs", lambda e: json.dumps(e, indent="\t").encode()),
                       ("other order of fields", lambda e: {n: dict(sorted(f.items())) for n, f in e.items()}),
                       ("other order of names", lambda e: dict(sorted(e.items(), reverse=True)))):
        yield f"a header with {label}", header(rng.choice(USED), how), HARMLESS
    yield "one file", rearranged(lambda shard, name: 0), HARMLESS
    yield "one file, no index", rearranged(lambda shard, name: 0, False), HARMLESS
    for n in rng.sample(range(2, 40), 2):
        yield f"{n} files by chance", rearranged(lambda shard, name, n=n: random.Random(name).randrange(n)), HARMLESS
    yield "two files, no index", rearranged(lambda shard, name: shard in SHARDS[3:9], False), HARMLESS
    yield "a file for each kind of tensor", rearranged(lambda shard, name: re.sub(r"\d+", "", name)), HARMLESS
    for label, tensor in (("no element", ("BF16", [0, 7], b"")), ("no axis", ("F32", [], b"1234")),
                          ("many axes", ("U8", [1] * 20 + [4], b"1234"))):
        shard = rng.choice(SHARDS)
        yield f"one more tensor, of {label}", tensors(lambda m, s=shard, t=tensor: m[s].update({"more": t})), HARMLESS
    for dtype in "F8_E4M3", "I64", "BOOL", "F64", "C64", "F4", "F8_E8M0", "NEW_9":
        nbytes = {"I64": 8, "F64": 8, "C64": 8}.get(dtype, 1)
        add = lambda m, d=dtype, n=nbytes: m[SHARDS[-1]].update({"vision_tower.more": (d, [2], bytes(2 * n))})
        known = dtype not in ("F4", "NEW_9")  # of another type, the bytes of an element are not known
        yield f"a tensor of the image side in {dtype}", tensors(add), HARMLESS if known else EITHER, 4, (SHARDS[-1],)
    for listed in True, False:
        for name in "adapter_model.safetensors", "mtp.safetensors", "model_extra-00001-of-00002.safetensors":
            label = "and listed" if listed else "not listed"
            yield f"{name}, of other tensors, {label}", extra_shard(name, ["mtp.0.x", "mtp.0.y"], listed), HARMLESS
    yield "other files that are not weights", lambda f: [put(f / n, b"x") for n in (
        "generation_config.json", "pytorch_model.bin", ".model-00001-of-000016.safetensors.lock", "Model.SAFETENSORS",
        "model-00001-of-000016.safetensors.sha256", "tokenizer.json", "chat_template.jinja", "a\nb")], HARMLESS
    folders = "original", ".cache", ".git", "x.safetensors"
    yield "folders beside the files", lambda f: [(f / n).mkdir() for n in folders], HARMLESS
    for label, change in {
        "total_size a float": lambda i: i["metadata"].update(total_size=float(i["metadata"]["total_size"])),
        "no total_size": lambda i: i["metadata"].pop("total_size") and None,
        "no metadata": lambda i: i.pop("metadata") and None, "metadata null": lambda i: i.update(metadata=None),
        "metadata empty": lambda i: i.update(metadata={}),
        "more metadata": lambda i: i["metadata"].update(total_parameters=3, note={"a": [1]}, format="pt"),
        "more fields": lambda i: i.update(version=2, x=[None]),
        "other order": lambda i: i.update(weight_map=dict(sorted(i["weight_map"].items(), reverse=True))),
    }.items():
        yield f"an index with {label}", tree(INDEX, change), HARMLESS
    for label, change in {
        "on one line": lambda data: json.dumps(json.loads(data), separators=(",", ":")).encode(),
        "with other line ends": lambda data: data.replace(b"\n", b"\r\n"),
        "with escapes": lambda data: data.replace(b"language", b"l\\u0061nguage"),
    }.items():
        for name in INDEX, CONFIG, CONTROL:
            yield f"{name} {label}", text(name, change), HARMLESS
    for label, change in {
        "an author in other scripts": lambda c: c.update(author="Сергей 神 \U0001f600"),
        "fields of other programs": lambda c: c.update(auto_map={"AutoModel": "x.Y"}, transformers_version="9", a=None),
        "an image side of another kind": lambda c: c.update(vision_config={"hidden_size": -3, "x": [1.5]}),
        "another order": lambda c: c.update(text_config=dict(sorted(c["text_config"].items(), reverse=True))),
        "large numbers elsewhere": lambda c: c["text_config"].update(max_position_embeddings=10**18, initializer=1e308),
    }.items():
        yield f"{CONFIG} with {label}", tree(CONFIG, change), HARMLESS
    table = "added_tokens_decoder"
    for label, change in {
        "more about a token": lambda t: [e.update(lstrip=True, more=None) for e in t[table].values()],
        "a chat template": lambda t: t.update(chat_template="{% for m in messages %}", model_max_length=10**30),
    }.items():
        yield f"{CONTROL} with {label}", tree(CONTROL, change), HARMLESS
    yield f"{RANKS} without the last line end", text(RANKS, lambda data: data.rstrip(b"\n")), HARMLESS
    yield f"{RANKS} with other line ends", text(RANKS, lambda data: data.replace(b"\n", b"\r\n")), EITHER, 2, (RANKS,)
    for mode in 0o444, 0o400, 0o777:
        yield f"files of mode {mode:o}", lambda f, m=mode: [
            put(path, path.read_bytes()) or path.chmod(m) for path in sorted(f.iterdir())], HARMLESS
    times = lambda f: [put(path, path.read_bytes()) or os.utime(path, (t, t)) for path, t in zip(
        sorted(f.iterdir()), (0, 1, -1, 2**31, 2**32, 10**10, 86400))]
    yield "files of odd times", times, HARMLESS


def cases(seed=0):
    "Every case of every class, the same for the same seed."
    for make in GROUPS:
        rng = random.Random(f"{make.__name__} {seed}")
        for what, damage, *expected in make(rng):
            yield Case(make.__name__.replace("_", " "), what, damage, *expected)


def sample(cases, every=5):
    "Of the cases of each class that expect the same answer the first, and every fifth after it."
    alike = {}
    for case in cases:
        alike.setdefault((case.group, case.expected, case.code, case.prompt), []).append(case)
    return [case for some in alike.values() for case in some[::every]]


# Running them

def k3(*args):
    "(exit code, output, error output) of the command, in this process."
    run = common.k3(*args)
    return run.returncode, run.stdout, run.stderr


def decode(folder, prompt):
    "What k3 gives for three tokens after the prompt."
    return k3("decode", folder, *prompt, "--max-new-tokens", 3, "--ram", "2GB", "--quiet", "--json", "-")


def answer(out):
    "What decode's output says of prompt and answer: ids, ids and, where there is a vocabulary, the text."
    tree = json.loads(out)
    return [tree[name] for name in ("prompt_ids", "ids", "text") if tree[name] is not None]


@contextlib.contextmanager
def reader_of(folder):
    "Where a file of the folder is unreadable: without the superuser's right to read it all the same."
    root = os.geteuid() == 0 and any(stat.S_IMODE(path.lstat().st_mode) == 0 for path in folder.iterdir())
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


class Judge:
    "Judges cases in a folder of its own, against the answer of the undamaged model."

    def __init__(self, folder):
        self.folder, self.number = Path(folder), 0
        os.chmod(folder, 0o755)
        shutil.copytree(MODEL, self.folder / "whole")
        code, out, err = decode(self.folder / "whole", TEXT)
        self.answer = answer(out) if code == 0 else []
        if len(self.answer) != 3 or ",".join(map(str, self.answer[0])) != IDS[1]:
            raise SystemExit(f"the undamaged model does not decode as expected: exit code {code}: {err or out}")
        k3("verify", self.folder / "whole", "--write-manifest")
        self.manifest = self.folder / "whole.sha256"

    def copy(self):
        "A folder of hard links to the undamaged files."
        self.number += 1
        folder = self.folder / f"case{self.number}"
        folder.mkdir()
        for path in (self.folder / "whole").iterdir():
            os.link(path, folder / path.name)
        if self.manifest.exists():
            os.link(self.manifest, self.folder / f"{folder.name}.sha256")
        return folder

    def judge(self, case):
        "(outcome, why it is wrong or ''): outcome is 'same ids', 'refused' or 'silent difference'."
        folder = self.copy()
        case.damage(folder)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            with reader_of(folder), warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                code, out, err = decode(folder, case.prompt)
            verified = k3("verify", folder) if code == 0 and case.expected in (EITHER, UNKNOWABLE) else None
        finally:
            faulthandler.cancel_dump_traceback_later()
            for left in self.folder.glob(f"{folder.name}[-.]*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            shutil.rmtree(folder)
        if code != 0:
            outcome, why = REFUSED, self.not_a_refusal(case, code, out, err, folder)
        else:
            outcome = SAME if answer(out) in (self.answer, self.answer[:2] if case.prompt is IDS else None) else SILENT
            why = self.not_to_be_passed(case, outcome, verified)
        return outcome, why or (f"warned: {warned[0].message}" if warned else "")

    def not_a_refusal(self, case, code, out, err, folder):
        "What is wrong with a refusal, '' if nothing is."
        lines = err.splitlines()
        codes = case.code if isinstance(case.code, tuple) else (case.code,)
        if case.expected == HARMLESS:
            return f"refused, though nothing is wrong: {err}"
        if code not in codes:
            return f"exit code {code}, expected {case.code}: {err}"
        if len(lines) != 1 or not lines[0].startswith("k3 decode: ") or len(lines[0]) > 3000 or out:
            return f"expected one line and no ids: {err[:3000]}"
        lacking = [word for word in case.words
                   if not any(w in err for w in (word if isinstance(word, tuple) else (word,)))]
        if not lacking:
            return ""
        missing = lacking[0] if isinstance(lacking[0], str) else "any of " + ", ".join(lacking[0][:4])
        return f"does not name {missing}: {err}"

    def not_to_be_passed(self, case, outcome, verified):
        "Why a run that ended well should not have, '' if it was right to."
        if case.expected == REFUSED:
            return f"{outcome}, expected a refusal"
        if outcome == SILENT and case.expected != UNKNOWABLE:
            return f"{outcome}, expected the right ids" + (" or a refusal" if case.expected == EITHER else "")
        if verified and verified[0] != 4:
            return f"{outcome}, and k3 verify does not find it: exit code {verified[0]}: {verified[2]}"
        return ""


def run(chosen, judge):
    "{class: Counter of outcomes} and the wrong cases as (case, outcome, why)."
    counts, wrong = {}, []
    for case in chosen:
        note(counts, wrong, case, *judge.judge(case))
    return counts, wrong


def note(counts, wrong, case, outcome, why):
    counts.setdefault(case.group, Counter())["wrong" if why else outcome] += 1
    if why:
        wrong.append((case, outcome, why))


def run_around(chosen, folder, counts, wrong):
    "Judge situations, two at a time, and note the outcomes. How many of them this machine cannot run."
    if not chosen:
        return 0
    around = situations.Situations(folder)
    with ThreadPoolExecutor(2) as pool:
        for case, (code, why) in zip(chosen, pool.map(around.judge, chosen)):
            if code is not None or why:
                note(counts, wrong, case, SAME if code == 0 else REFUSED, why)
    return len(chosen) - sum(counts[case.group].total() for case in {case.group: case for case in chosen}.values())


def table(counts):
    "The counts as text, a class a line, the sum last."
    columns = {SAME: 10, REFUSED: 13, SILENT: 25, "wrong": 7}
    rows = [(group, count) for group, count in counts.items()] + [("together", sum(counts.values(), Counter()))]
    head = (f"{'class of damage':20}{'cases':>7}{'same ids':>10}{'right error':>13}"
            f"{'silent, found by verify':>25}{'wrong':>7}")
    lines = [f"{name:20}{sum(count.values()):7}" + "".join(f"{count[x]:{w}}" for x, w in columns.items())
             for name, count in rows]
    return "\n".join([head, *lines])


def report():
    "Run the command line: all cases or a class, the table, and every case that is wrong."
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose class or description holds TEXT")
    args = parser.parse_args()
    hear_interrupts()
    start = time.perf_counter()
    chosen = lambda cases: [case for case in cases if args.only in f"{case.group}: {case.what}"]
    damages, around = chosen(cases(args.seed)), chosen(situations.situations(args.seed))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)  # another user's cases run here, too
        counts, wrong = run(damages, Judge(folder)) if damages else ({}, [])
        lacking = run_around(around, Path(folder) / "around", counts, wrong)
    show = Display(goes_on=False)
    for case, _, why in wrong:
        show(f"WRONG {case.group}: {case.what}: {why.strip()}")
    show(table(counts) + f"\n{time.perf_counter() - start:.0f} s, seed {args.seed}"
          + f"; {lacking} cases need what this machine lacks" * bool(lacking))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(report())
