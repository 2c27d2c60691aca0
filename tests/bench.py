"""What the machine allows and what kernels reach (`make bench`): every rate beside the memory's own, in the same run.

Cases that are compared take turns (A B A B ...), so that whatever disturbs one disturbs the other; medians are printed,
with the quartiles. Writes out/bench.json and out/bench.png, and adds a line to the history (`make bench-history`). The
slice (real bytes, 1.5 GB) and the full shape (holes, 4.8 GB) are written to out/ if they are not there. With --quick
everything is small: that shows that all parts run, and measures nothing.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import NamedTuple

import history
import numba
import numpy as np
from common import MODEL, ROOT, least
from numba import njit, prange
from scale import machine

import k3lib
from k3lib.display import complain
from k3lib.kda import kda_recurrent
from k3lib.matmul import PackedMatrix, ResidentMatrix, linear
from k3lib.mla import attend
from k3lib.parallel import CORES

C_ENGINE = {"seconds_a_token": 24.5, "prompt_seconds": 116}  # the plain C engine, two cores of this kind, undisturbed


class Sizes(NamedTuple):
    "How much is measured, and on which checkpoints: (name, preset, changes of its shape)."
    numbers: int  # float32 that are summed
    matrices: int
    experts: int
    rounds: int
    slice: tuple
    full: tuple
    room: int  # bytes that the slice has beyond its smallest budget, enough for a chunk of 64


WHOLE = Sizes(1 << 28, 5, 160, 15, (
    "slice", "slice", {"layers": 2, "experts": 16, "vocab": 4096, "intermediate_size": 3584, "kda_num_heads": 32,
                       "num_attention_heads": 48}), ("full", "full", {}), 2 * 10**8)
QUICK = Sizes(1 << 22, 1, 4, 1, ("quick", "oracle", {}), ("quick", "oracle", {}), 10**6)


@njit(parallel=True, fastmath=True, cache=True)
def read_sum(a):
    total = np.float32(0)
    for i in prange(a.size):
        total += a[i]
    return total


def in_turns(cases, rounds):
    "{name: (lower quartile, median, upper quartile) of the seconds} of functions called in turn."
    for call in cases.values():
        call()
    seconds = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: np.percentile(s, (25, 50, 75)).tolist() for name, s in seconds.items()}


def rate(amount, seconds):
    "(median, lowest, highest quartile) of amount / seconds."
    return {"median": amount / seconds[1], "low": amount / seconds[2], "high": amount / seconds[0]}


def kernels(sizes):
    "Matrix products of one token over more memory than any cache holds, beside a sum that only reads."
    rng = np.random.default_rng(0)
    ones = np.ones(sizes.numbers, np.float32)
    matrices = [ResidentMatrix(rng.integers(0x3c00, 0x3d00, (12288, 7168), np.uint16)) for _ in range(sizes.matrices)]
    experts = [PackedMatrix(rng.integers(0, 256, (3072, 1792), np.uint8), rng.integers(120, 124, (3072, 112), np.uint8))
               for _ in range(sizes.experts)]
    x, y = rng.standard_normal((1, 7168), np.float32), np.empty((1, 12288), np.float32)
    z, ws = rng.standard_normal((1, 3584), np.float32), np.empty((CORES, 1, 3072), np.float32)
    pool = ThreadPoolExecutor(CORES)

    def bf16():
        for matrix in matrices:
            linear(matrix, x, out=y)

    def mine(first):
        for expert in experts[first::CORES]:
            expert.multiply(z, ws[first], 1)

    def mxfp4():  # each thread its own, as the readers of chapter 5.16
        list(pool.map(mine, range(CORES)))

    seconds = in_turns({"read": lambda: read_sum(ones), "bf16": bf16, "mxfp4": mxfp4}, sizes.rounds)
    pool.shutdown()
    weights = sum(expert.packed.size * 2 for expert in experts)
    return {"read_sum_GBs": rate(ones.nbytes / 1e9, seconds["read"]),
            "bf16_GBs": rate(sum(m.array.nbytes for m in matrices) / 1e9, seconds["bf16"]),
            "mxfp4_Gweights": rate(weights / 1e9, seconds["mxfp4"])}


def context(sizes):
    """Seconds a token of the parts whose cost could grow, at full width.

    69 recurrences, and 24 attentions at the first and at the 4,096th position.
    """
    rng = np.random.default_rng(0)
    state = np.zeros((96, 128, 128), np.float32)
    q, k, v, g = (rng.standard_normal((1, 96, 128), np.float32) for _ in range(4))
    decay, beta = np.exp(-np.abs(g)), rng.random((1, 96), np.float32)
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    kv_b = ResidentMatrix(rng.integers(0x3c00, 0x3d00, (96 * 256, 512), np.uint16))
    query, cache = rng.standard_normal((1, 96, 192), np.float32), rng.standard_normal((4096, 576), np.float32)
    cases = {"kda": lambda: kda_recurrent(q, k, v, decay, beta, state, CORES),
             "mla 0": lambda: attend(kv_b, query, cache, 0, 128, CORES),
             "mla 4095": lambda: attend(kv_b, query, cache, 4095, 128, CORES)}
    seconds = {name: middle for name, (_, middle, _) in in_turns(cases, min(9, sizes.rounds)).items()}
    return {"kda_seconds": 69 * seconds["kda"], "mla_first_seconds": 24 * seconds["mla 0"],
            "mla_4096_seconds": 24 * seconds["mla 4095"]}


def python(code, **env):
    "Seconds of a fresh process that runs `code`."
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **env}, capture_output=True)
    return time.perf_counter() - began


def cold_start(sizes):
    """Seconds from nothing to the first token of the embedded model, with an empty and with a filled kernel cache.

    And seconds of an import alone.
    """
    first, rounds = f"import k3lib; k3lib.load({str(MODEL)!r}, ram='1GB').prefill([304])", min(3, sizes.rounds)
    with tempfile.TemporaryDirectory() as cache:
        empty = python(first, NUMBA_CACHE_DIR=cache)
        warm = min(python(first, NUMBA_CACHE_DIR=cache) for _ in range(rounds))
    imported = min(python("import k3lib") for _ in range(rounds))
    return {"empty_cache_seconds": empty, "warm_cache_seconds": warm, "import_seconds": imported}


def checkpoint(name, preset, shape):
    "A synthetic checkpoint under out/, written if it is not there."
    folder = ROOT / "out" / name
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        from k3lib.synth import synth
        synth(folder, preset, **shape)
    return folder


def steps(model, count):
    "Median seconds of `count` steps after a first one."
    token, seconds = 5, []
    for _ in range(count + 1):
        began = time.perf_counter()
        token = int(np.argmax(model.step(token)))
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))


def read_alone(model, expert_bytes, count):
    """Median seconds of reading what the model's steps read, with its own readers, and computing nothing.

    Experts are counted at the rate of the trunk.
    """
    streamed, seconds = model.plan.layout.trunk.streamed, []
    for _ in range(count):
        began = time.perf_counter()
        model.trunk.begin()
        for name in streamed:
            model.trunk.weight(name).map_blocks(lambda first, rows, threads: None, CORES)
        seconds.append(time.perf_counter() - began)
    nbytes = sum(block.nbytes for blocks in streamed.values() for block in blocks)
    return float(np.median(seconds)) * (nbytes + expert_bytes) / nbytes


def streaming(sizes):
    """A step of the slice from the device, the page cache bypassed, against its reads alone and its arithmetic alone.

    And a prompt of 64 tokens in one chunk, streamed and pinned.
    """
    folder, rounds = checkpoint(*sizes.slice), min(5, sizes.rounds)
    pinned = k3lib.load(folder, ram="16GB", context=200)
    compute = steps(pinned, rounds)
    experts = 16 * pinned.plan.layout.experts.slots.nbytes
    prompt = list(range(5, 69))
    pinned.reset()
    began = time.perf_counter()
    chunk = pinned.prefill(prompt)
    chunked = time.perf_counter() - began
    pinned.reset()
    began = time.perf_counter()
    for token in prompt:
        one = pinned.step(token)
    assert one.tobytes() == chunk.tobytes(), "a prompt in one chunk and step by step give different logits"
    singly = (time.perf_counter() - began) / len(prompt)
    pinned.close()
    low = k3lib.load(folder, ram=least(folder, 1024) + sizes.room, context=200)
    wall, read = steps(low, rounds), read_alone(low, experts, rounds)
    low.reset()
    began = time.perf_counter()
    assert low.prefill(prompt).tobytes() == chunk.tobytes(), "a prompt streamed and pinned give different logits"
    streamed = time.perf_counter() - began
    report = low.report
    low.close()
    return {"pinned_step_seconds": compute, "pinned_bytes": pinned.plan.trunk_bytes + experts,
            "streamed_step_seconds": wall, "read_alone_seconds": read, "prompt64_in_steps": streamed / wall,
            "pinned_prompt64_in_steps": chunked / singly, "files": report.files}


def full_shape(sizes):
    "The full shape at 1GB in a process of its own: seconds, peak and ids, from its report."
    folder = checkpoint(*sizes.full)
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "r.json"

        def decode(tokens):
            command = [sys.executable, "-m", "k3lib", "decode", folder, "--ids", "5,9,17,3,11", "--ram", "1GB",
                       "--max-new-tokens", tokens, "--json", record]
            subprocess.run(command, check=True, capture_output=True)

        decode("2")  # compiles what is not in the cache yet
        decode("4")
        report = json.loads(record.read_text())
    prompt, *tokens = report["step_seconds"]
    return {"bytes_a_token": sum(report["step_bytes"][-1].values()), "prompt_seconds": prompt,
            "token_seconds": float(np.median(tokens)), "peak_bytes": report["peak_rss_bytes"],
            "planned_bytes": report["plan"]["total"], "ids": report["ids"]}


def table(r):
    "The rows of the table: what, measured, target, met."
    k, c, s, f, o = r["kernels"], r["cold_start"], r["streaming"], r["full_shape"], r["context"]
    memory, bf16, mxfp4 = (k[name]["median"] for name in ("read_sum_GBs", "bf16_GBs", "mxfp4_Gweights"))
    token, prompt = f["token_seconds"], f["prompt_seconds"]
    token_most, prompt_most = C_ENGINE["seconds_a_token"] / 3, C_ENGINE["prompt_seconds"] / 5
    streamed = s["streamed_step_seconds"] / max(s["read_alone_seconds"], s["pinned_step_seconds"])
    pinned = s["pinned_step_seconds"] / (s["pinned_bytes"] / 1e9 / memory)
    chunk, pinned_chunk = s["prompt64_in_steps"], s["pinned_prompt64_in_steps"]
    kda, mla = o["kda_seconds"] / token, o["mla_4096_seconds"] / token
    empty, warm, imported = (c[f"{name}_seconds"] for name in ("empty_cache", "warm_cache", "import"))
    return [
        ("memory, a sum that only reads", f"{memory:.1f} GB/s", "", None),
        ("bf16 12288 x 7168, one token", f"{bf16:.1f} GB/s", "85% of the sum", bf16 / memory >= 0.85),
        ("MXFP4 3072 x 3584, one token, a matrix a thread", f"{mxfp4:.1f} G weights/s", "25", mxfp4 >= 25),
        ("full shape, 1 GB: peak", f"{f['peak_bytes'] / 1e6:.0f} MB", "1000", f["peak_bytes"] <= 1e9),
        ("full shape, 1 GB: a token", f"{token:.1f} s", f"{token_most:.1f}", token <= token_most),
        ("the same / (bytes of a token / memory)", f"{token / (f['bytes_a_token'] / 1e9 / memory):.2f}", "", None),
        ("full shape, 1 GB: a 5-token prompt", f"{prompt:.1f} s", f"{prompt_most:.1f}", prompt <= prompt_most),
        ("slice from the device / max(read, compute)", f"{streamed:.2f}", "1.15", streamed <= 1.15),
        ("slice, all pinned / (bytes / memory)", f"{pinned:.2f}", "1.3", pinned <= 1.3),
        ("64-token prompt from the device, in single steps", f"{chunk:.1f}", "16", chunk <= 16),
        ("64-token prompt, all pinned, in single steps", f"{pinned_chunk:.1f}", "16", pinned_chunk <= 16),
        ("KDA recurrence, share of a step", f"{kda:.1%}", "10%", kda <= 0.1),
        ("MLA at 4,096 positions, share of a step", f"{mla:.1%}", "10%", mla <= 0.1),
        ("first token, empty kernel cache", f"{empty:.1f} s", "20", empty <= 20),
        ("first token, warm", f"{warm:.1f} s", "3", warm <= 3),
        ("import k3lib", f"{imported:.2f} s", "1", imported <= 1),
    ]


def figure(r, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.style.use(ROOT / "book" / "k3.mplstyle")
    k = r["kernels"]
    bars = [("memory, read only", k["read_sum_GBs"], 1.0), ("bf16", k["bf16_GBs"], 1.0),
            ("MXFP4, packed bytes", k["mxfp4_Gweights"], 17 / 32)]
    fig, ax = plt.subplots(figsize=(6, 2.4))
    for i, (_, found, scale) in enumerate(bars):
        low, median, high = (found[name] * scale for name in ("low", "median", "high"))
        ax.barh(i, median, xerr=[[median - low], [high - median]], color="C0" if i else "0.7")
    ax.set_yticks(range(len(bars)), [name for name, *_ in bars])
    ax.invert_yaxis()
    ax.set(xlabel="GB/s, one token, all threads (median and quartiles)",
           title="What the kernels reach of the memory's own speed")
    fig.savefig(path)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--json", type=Path, default=ROOT / "out" / "bench.json")
    args.add_argument("--quick", action="store_true",
                      help="small sizes, to see that everything runs; nothing is added to the history")
    args = args.parse_args()
    sizes, began = QUICK if args.quick else WHOLE, time.perf_counter()
    result = {"machine": machine(), "date": str(date.today()), "threads": numba.config.NUMBA_NUM_THREADS}
    for measure in (cold_start, full_shape, kernels, context, streaming):
        result[measure.__name__] = measure(sizes)
        complain(f"{measure.__name__}: {time.perf_counter() - began:.0f} s")
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8", newline="\n")
    if not args.quick:
        history.append("bench", result["machine"], {what: measured for what, measured, *_ in table(result)})
    figure(result, args.json.with_suffix(".png"))
    print(f"{result['machine']['cpu']}, {result['machine']['cores']} cores, {result['date']}; "
          "the full shape and the slice have synthetic weights")
    for what, measured, target, met in table(result):
        verdict = "" if met is None else ("met:    " if met else "NOT met: ") + target
        print(f"  {what:<50}{measured:>20}   {verdict}")


if __name__ == "__main__":
    main()
