"""What the machine allows and what the kernels reach (`make bench`): every rate beside the memory's own, measured in the same run.

Cases that are compared take turns (A B A B ...), so that whatever disturbs one disturbs the other; medians are printed, with the
quartiles. Writes out/bench.json and out/bench.png, and adds a line to the history (`make bench-history`). The slice (real bytes,
1.5 GB) and the full shape (holes, 4.8 GB) are written to out/ if they are not there.
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

import history
import numba
import numpy as np
from numba import njit, prange
from scale import machine

import k3lib
from k3lib.plan import PlanError
from k3lib.kda import kda_recurrent, kda_state
from k3lib.matmul import ResidentMatrix, linear
from k3lib.mla import attend
from k3lib.matmul import deinterleaved, mxfp4_rows
from k3lib.parallel import CORES
from k3lib.trunk import max_concurrent_blocks

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "fixtures" / "oracle13" / "model"
SLICE = {"layers": 2, "experts": 16, "vocab": 4096, "intermediate_size": 3584, "kda_num_heads": 32, "num_attention_heads": 48}
C_ENGINE = {"seconds_a_token": 24.5, "prompt_seconds": 116, "bytes": 8.24e9}  # the plain C engine, two cores of this kind, nothing else running


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


def kernels(rounds=15):
    "Matrix products of one token over more memory than any cache holds, beside a sum that only reads."
    rng = np.random.default_rng(0)
    ones = np.ones(1 << 28, np.float32)
    matrices = [ResidentMatrix(rng.integers(0x3c00, 0x3d00, (12288, 7168), np.uint16)) for _ in range(5)]
    experts = [(rng.integers(0, 256, (3072, 1792), np.uint8), rng.integers(120, 124, (3072, 112), np.uint8)) for _ in range(160)]
    x, y = rng.standard_normal((1, 7168), np.float32), np.empty((1, 12288), np.float32)
    halves, ws, pool = deinterleaved(rng.standard_normal((1, 3584), np.float32)), np.empty((CORES, 1, 3072), np.float32), ThreadPoolExecutor(CORES)

    def bf16():
        for matrix in matrices:
            linear(matrix, x, y)

    def mine(first):
        for packed, scale in experts[first::CORES]:
            mxfp4_rows(packed, scale, halves, ws[first], 0)

    def mxfp4():  # each thread its own, as the readers of chapter 5.4
        list(pool.map(mine, range(CORES)))

    seconds = in_turns({"read": lambda: read_sum(ones), "bf16": bf16, "mxfp4": mxfp4}, rounds)
    weights = sum(packed.size * 2 for packed, _ in experts)
    return {"read_sum_GBs": rate(ones.nbytes / 1e9, seconds["read"]),
            "bf16_GBs": rate(sum(m.array.nbytes for m in matrices) / 1e9, seconds["bf16"]),
            "mxfp4_Gweights": rate(weights / 1e9, seconds["mxfp4"])}


def context(rounds=9):
    "Seconds a token of the parts whose cost could grow, at full width: 69 recurrences, 24 attentions at the first and at the 4,096th position."
    rng = np.random.default_rng(0)
    state = kda_state(96, 128, 4)
    q, k, v, g = (rng.standard_normal((1, 96, 128), np.float32) for _ in range(4))
    decay, beta = np.exp(-np.abs(g)), rng.random((1, 96), np.float32)
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    kv_b = ResidentMatrix(rng.integers(0x3c00, 0x3d00, (96 * 256, 512), np.uint16))
    query, cache = rng.standard_normal((1, 96, 192), np.float32), rng.standard_normal((4096, 576), np.float32)
    seconds = in_turns({"kda": lambda: kda_recurrent(q, k, v, decay, beta, state.S),
                        "mla 0": lambda: attend(kv_b, query, cache, 0, 128),
                        "mla 4095": lambda: attend(kv_b, query, cache, 4095, 128)}, rounds)
    return {"kda_seconds": 69 * seconds["kda"][1], "mla_first_seconds": 24 * seconds["mla 0"][1], "mla_4096_seconds": 24 * seconds["mla 4095"][1]}


def python(code, **env):
    "Seconds of a fresh process that runs `code`."
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **env}, capture_output=True)
    return time.perf_counter() - began


def cold_start():
    "Seconds from nothing to the first token of the embedded model, with an empty and with a filled kernel cache; of an import alone."
    first = f"import k3lib; k3lib.load({str(EMBEDDED)!r}, ram='1GB').prefill([304])"
    with tempfile.TemporaryDirectory() as cache:
        empty = python(first, NUMBA_CACHE_DIR=cache)
        warm = min(python(first, NUMBA_CACHE_DIR=cache) for _ in range(3))
    return {"empty_cache_seconds": empty, "warm_cache_seconds": warm, "import_seconds": min(python("import k3lib") for _ in range(3))}


def checkpoint(name, preset, **shape):
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


def least_budget(folder):
    try:
        k3lib.load(folder, ram=1)
    except PlanError as error:
        return error.least


def read_alone(model, expert_bytes, count):
    """Median seconds of reading, with the model's own reads and readers, what its steps read, and computing nothing. Experts are
    counted at the rate of the trunk."""
    ring, seconds = model.trunk.ring, []
    for _ in range(count):
        began, number = time.perf_counter(), ring.begin()
        for name in model.trunk.reads:
            reads = model.trunk.reads[name]
            ring.each(number, len(reads), lambda read, data: None, max_concurrent_blocks(CORES))
            number += len(reads)
        seconds.append(time.perf_counter() - began)
    streamed = sum(read.nbytes for read in ring.reads)
    return float(np.median(seconds)) * (streamed + expert_bytes) / streamed


def streaming(rounds=5):
    "A step of the slice from the device, the page cache bypassed, against its reads alone and its arithmetic alone; a prompt in one chunk."
    folder = checkpoint("slice", "slice", **SLICE)
    pinned = k3lib.load(folder, ram="16GB", context=200)
    compute = steps(pinned, rounds)
    experts = 16 * pinned.plan.expert_slot_bytes
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
    low = k3lib.load(folder, ram=least_budget(folder) + 2 * 10**8, context=200)  # room for a chunk of 64
    wall, read = steps(low, rounds), read_alone(low, experts, rounds)
    low.reset()
    began = time.perf_counter()
    assert low.prefill(prompt).tobytes() == chunk.tobytes(), "a prompt streamed and pinned give different logits"
    streamed = time.perf_counter() - began
    report = low.report
    low.close()
    return {"pinned_step_seconds": compute, "pinned_bytes": pinned.plan.trunk_bytes + experts, "streamed_step_seconds": wall, "read_alone_seconds": read,
            "prompt64_in_steps": streamed / wall, "pinned_prompt64_in_steps": chunked / singly, "files": report.files}


def full_shape():
    "The full shape at 1GB in a process of its own: seconds, peak and ids, from its report."
    folder = checkpoint("full", "full")
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch) / "r.json"

        def decode(model, ram):
            subprocess.run([sys.executable, "-m", "k3lib", "decode", model, "--ids", "5,9,17,3,11", "--max-new-tokens", "4", "--ram", ram,
                            "--json", record], check=True, capture_output=True)

        decode(EMBEDDED, f"{least_budget(EMBEDDED) // 10**6 + 20}MB")  # compiles what is not in the cache yet
        decode(folder, "1GB")
        report = json.loads(record.read_text())
    return {"bytes_a_token": sum(report["step_bytes"][-1].values()), "prompt_seconds": report["step_seconds"][0], "token_seconds": float(np.median(report["step_seconds"][1:])),
            "peak_bytes": report["peak_rss_bytes"], "planned_bytes": report["plan"]["total"], "ids": report["ids"]}


def table(r):
    "The rows of the table: what, measured, target, met."
    k, c, s, f, o = r["kernels"], r["cold_start"], r["streaming"], r["full_shape"], r["context"]
    memory = k["read_sum_GBs"]["median"]
    bound = max(s["read_alone_seconds"], s["pinned_step_seconds"])
    rows = [
        ("memory, a sum that only reads", f"{memory:.1f} GB/s", "", None),
        ("bf16 12288 x 7168, one token", f"{k['bf16_GBs']['median']:.1f} GB/s", "85% of the sum", k["bf16_GBs"]["median"] / memory >= 0.85),
        ("MXFP4 3072 x 3584, one token, a matrix a thread", f"{k['mxfp4_Gweights']['median']:.1f} G weights/s", "25", k["mxfp4_Gweights"]["median"] >= 25),
        ("full shape, 1 GB: peak", f"{f['peak_bytes'] / 1e6:.0f} MB", "1000", f["peak_bytes"] <= 1e9),
        ("full shape, 1 GB: a token", f"{f['token_seconds']:.1f} s", f"{C_ENGINE['seconds_a_token'] / 3:.1f}", f["token_seconds"] <= C_ENGINE["seconds_a_token"] / 3),
        ("the same / (bytes of a token / memory)", f"{f['token_seconds'] / (f['bytes_a_token'] / 1e9 / memory):.2f}", "", None),
        ("full shape, 1 GB: a 5-token prompt", f"{f['prompt_seconds']:.1f} s", f"{C_ENGINE['prompt_seconds'] / 5:.1f}", f["prompt_seconds"] <= C_ENGINE["prompt_seconds"] / 5),
        ("slice from the device / max(read, compute)", f"{s['streamed_step_seconds'] / bound:.2f}", "1.15", s["streamed_step_seconds"] <= 1.15 * bound),
        ("slice, all pinned / (bytes / memory)", f"{s['pinned_step_seconds'] / (s['pinned_bytes'] / 1e9 / memory):.2f}", "1.3",
         s["pinned_step_seconds"] <= 1.3 * s["pinned_bytes"] / 1e9 / memory),
        ("64-token prompt from the device, in single steps", f"{s['prompt64_in_steps']:.1f}", "16", s["prompt64_in_steps"] <= 16),
        ("64-token prompt, all pinned, in single steps", f"{s['pinned_prompt64_in_steps']:.1f}", "16", s["pinned_prompt64_in_steps"] <= 16),
        ("KDA recurrence, share of a step", f"{o['kda_seconds'] / f['token_seconds']:.1%}", "10%", o["kda_seconds"] <= 0.1 * f["token_seconds"]),
        ("MLA at 4,096 positions, share of a step", f"{o['mla_4096_seconds'] / f['token_seconds']:.1%}", "10%", o["mla_4096_seconds"] <= 0.1 * f["token_seconds"]),
        ("first token, empty kernel cache", f"{c['empty_cache_seconds']:.1f} s", "20", c["empty_cache_seconds"] <= 20),
        ("first token, warm", f"{c['warm_cache_seconds']:.1f} s", "3", c["warm_cache_seconds"] <= 3),
        ("import k3lib", f"{c['import_seconds']:.2f} s", "1", c["import_seconds"] <= 1),
    ]
    return rows


def figure(r, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.style.use(ROOT / "book" / "k3.mplstyle")
    k = r["kernels"]
    bars = [("memory, read only", k["read_sum_GBs"], 1.0), ("bf16", k["bf16_GBs"], 1.0), ("MXFP4, packed bytes", k["mxfp4_Gweights"], 17 / 32)]
    fig, ax = plt.subplots(figsize=(6, 2.4))
    for i, (name, found, scale) in enumerate(bars):
        ax.barh(i, found["median"] * scale, xerr=[[(found["median"] - found["low"]) * scale], [(found["high"] - found["median"]) * scale]],
                color="C0" if i else "0.7")
    ax.set_yticks(range(len(bars)), [name for name, *_ in bars])
    ax.invert_yaxis()
    ax.set(xlabel="GB/s, one token, all threads (median and quartiles)", title="What the kernels reach of the memory's own speed")
    fig.savefig(path)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--json", default=str(ROOT / "out" / "bench.json"))
    args = args.parse_args()
    began = time.perf_counter()
    result = {"machine": machine(), "date": str(date.today()), "threads": numba.config.NUMBA_NUM_THREADS}
    for name, measure in (("cold_start", cold_start), ("full_shape", full_shape), ("kernels", kernels), ("context", context), ("streaming", streaming)):
        result[name] = measure()
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"{result['machine']['cpu']}, {result['machine']['cores']} cores, {result['date']}; the full shape and the slice have synthetic weights")
    for what, measured, target, met in table(result):
        print(f"  {what:<50}{measured:>20}   {'' if met is None else ('met:    ' if met else 'NOT met: ') + target}")
    Path(args.json).parent.mkdir(exist_ok=True)
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    history.append("bench", result["machine"], {what: measured for what, measured, *_ in table(result)})
    figure(result, Path(args.json).with_suffix(".png"))


if __name__ == "__main__":
    main()
