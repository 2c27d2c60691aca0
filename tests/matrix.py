"""Budgets x threads x chunk sizes x packed or not x CPU x what the expert cache holds: one answer, compared as bytes.

test_matrix.py runs it on the embedded model, by default a sample in which every two values meet. `make matrix`, which
is `python tests/matrix.py`, runs it on four layers of the released width.
"""
import argparse
import dataclasses
import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import load_with

from k3lib import cli, parallel
from k3lib.checkpoint import Checkpoint
from k3lib.config import read_config
from k3lib.layout import Buffers, expert_slot_bytes
from k3lib.synth import synth

IDS = [304, 206, 32, 407, 493, 375]


def as_planned(layout, whole):
    return layout


def none_cached(layout, whole):
    return dataclasses.replace(layout, slots=Buffers(layout.readers, layout.slots.nbytes))


def a_few_cached(layout, whole):
    return dataclasses.replace(layout, slots=Buffers(layout.readers + 24, whole), whole=True)


CACHES = as_planned, none_cached, a_few_cached  # (layout of experts, bytes of a whole one) -> another layout of experts


def load(folder, ram, trunk, threads, cache, context):
    "A model whose layout of experts is what `cache` makes of the plan's."
    first = read_config(folder).first_k_dense_replace
    with Checkpoint(folder) as checkpoint:
        whole = expert_slot_bytes(list(checkpoint.expert(first, 0).values()))
    return load_with(lambda layout: cache(layout, whole), folder, ram, trunk, threads, context=context)


def answer(folder, ram, threads, trunk, cache, chunks, steps):
    "{chunk size: sha256 of the logits of IDS and of some steps after them} of one loaded model."
    model, found = load(folder, ram, trunk, threads, cache, len(IDS) + steps), {}
    try:
        for chunk in chunks:
            model.reset()
            model.chunk = chunk
            rows = [model.forward(IDS)]
            for _ in range(steps):
                rows.append(model.step(int(rows[-1].reshape(-1, rows[-1].shape[-1])[-1].argmax())))
            found[chunk] = hashlib.sha256(b"".join(row.tobytes() for row in rows)).hexdigest()
    finally:
        model.close()
    return found


def pairs(*dimensions):
    "Combinations, the same each time, in which every value of a dimension meets every value of every other one."
    combinations = [*itertools.product(*map(range, map(len, dimensions)))]
    meetings = {one: {*itertools.combinations(enumerate(one), 2)} for one in combinations}
    to_meet = set().union(*meetings.values())
    while to_meet:
        best = max(combinations, key=lambda one: len(meetings[one] & to_meet))
        to_meet -= meetings[best]
        yield tuple(values[i] for values, i in zip(dimensions, best))


def answers(folder, budgets, threads, trunks, caches, chunks, steps, combine=itertools.product):
    "Yields (budget, threads, trunk, cache, chunk, sha256) of every combination, or of those that `combine` draws."
    for ram, n, trunk, cache in combine(budgets, threads, trunks, caches):
        for chunk, digest in answer(folder, ram() if callable(ram) else ram, n, trunk, cache, chunks, steps).items():
            yield ram, n, "packed" if trunk else "unpacked", cache.__name__, chunk, digest


def main():
    "Every budget on every CPU in a process of its own; exit code 1 if two answers differ."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "TRUNK", "RAM"),
                        help="the combinations of one budget, on this CPU")
    parser.add_argument("--few", action="store_true",
                        help="of these the first: a baseline CPU has no FMA and takes ten times as long")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--budgets", nargs="+", default=["600MB", "1GB", "2GB"])
    args = parser.parse_args()
    if args.one:
        folder, trunk, ram = args.one
        every = sorted({1, parallel.CORES}), [None, trunk], CACHES, [4, 1, len(IDS)]
        for row in answers(folder, [ram], *(values[:1] if args.few else values for values in every), 2):
            print(*row, flush=True)
        return 0
    seen = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, trunk = Path(scratch, "model"), Path(scratch, "trunk")
        synth(folder, "full", layers=args.layers, experts=args.experts)
        cli.pack_trunk(folder, trunk)
        for cpu, ram in itertools.product(["host", "generic"], args.budgets):
            command = [sys.executable, __file__, "--one", folder, trunk, ram, *["--few"] * (cpu != "host")]
            env = {**os.environ, **({"NUMBA_CPU_NAME": cpu} if cpu != "host" else {})}
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
            for line in run.stdout.splitlines():
                print(cpu, line, flush=True)
                seen.setdefault(line.rsplit(" ", 1)[1], []).append(f"{cpu} {line}")
    print(f"{sum(map(len, seen.values()))} runs, {len(seen)} answer{'s' * (len(seen) != 1)}")
    return int(len(seen) != 1)


if __name__ == "__main__":
    sys.exit(main())
