"""The full 2.78T shape on this machine (`make scale`): peak memory at 1 GB, cold and warm, and the same bytes at every budget.

Writes a synthetic checkpoint of the released layout to out/full (about 5 GB on disk) if it is not there, then runs `k3 decode` in a
process of its own for every row of the table. Where this user may make a memory cgroup, the first rows run inside one whose limit
is the budget itself, so that the figure is enforced and not only observed.
"""
import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
GROUP = Path("/sys/fs/cgroup/memory/k3-scale")  # v1; without it the run is observed by VmHWM alone


def enforced(limit):
    "A function for subprocess's preexec_fn that puts the child under `limit` bytes, or None where that is not allowed."
    try:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "memory.limit_in_bytes").write_text(str(limit))
        (GROUP / "memory.max_usage_in_bytes").write_text("0")
    except OSError:
        return None
    return lambda: (GROUP / "cgroup.procs").write_text(str(os.getpid()))


def run(folder, ram, threads, tokens, limit=None, **env):
    "One decode: its report, with `digest` of the logits, `enforced` and `cgroup_peak_bytes`."
    inside = enforced(limit) if limit else None
    with tempfile.TemporaryDirectory() as scratch:
        record, logits = Path(scratch) / "r.json", Path(scratch) / "l.npy"
        command = [sys.executable, "-m", "k3lib", "decode", folder, "--ids", "5,9,17,3,11", "--max-new-tokens", str(tokens),
                   "--ram", ram, "--threads", str(threads), "--json", record, "--logits", logits]
        done = subprocess.run(command, preexec_fn=inside, capture_output=True, text=True, env={**os.environ, **env})
        if done.returncode:
            sys.exit(f"k3 decode --ram {ram} ended with {done.returncode}: {done.stderr.strip()}")
        report = json.loads(record.read_text())
        report["digest"] = hashlib.sha256(np.load(logits).tobytes()).hexdigest()
    report["enforced"] = bool(inside)
    report["cgroup_peak_bytes"] = int((GROUP / "memory.max_usage_in_bytes").read_text()) if inside else None
    report["text"] = done.stdout
    return report


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--folder", default=str(ROOT / "out" / "full"))
    args.add_argument("--tokens", type=int, default=4)
    args.add_argument("--json", default=str(ROOT / "out" / "scale.json"))
    args = args.parse_args()
    if not Path(args.folder).exists():
        Path(args.folder).parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-m", "k3lib", "synth", args.folder, "--preset", "full"], check=True)
    rows = []

    def row(what, most=None, **how):
        report = run(args.folder, **how)
        peak, plan = report["peak_rss_bytes"], report["plan"]["total"]
        steps = report["step_seconds"]
        rows.append({"what": what, **report})
        print(f"{what:<26} peak {peak / 1e6:7.0f} MB of {plan / 1e6:7.0f} planned{' (enforced)' if report['enforced'] else ''}, "
              f"prompt {steps[0]:6.1f} s, then {np.median(steps[1:]) if steps[1:] else float('nan'):6.1f} s a token, "
              f"ids {report['ids']}, logits {report['digest'][:12]}", flush=True)
        if most is not None and peak > most:
            sys.exit(f"{what}: peak of {peak} bytes, at most {most} allowed")
        return report

    with tempfile.TemporaryDirectory() as cold:
        row("1GB, empty numba cache", most=1.3e9, ram="1GB", threads=2, tokens=1, NUMBA_CACHE_DIR=cold)
    first = row("1GB", most=1.0e9, ram="1GB", threads=2, tokens=args.tokens, limit=10**9)
    print(first["text"])
    for ram in ("2GB", "4GB", "8GB", "16GB"):
        report = row(ram, most=int(ram[:-2]) * 1e9, ram=ram, threads=2, tokens=args.tokens)
        if report["digest"] != first["digest"]:
            sys.exit(f"{ram}: the logits differ from those at 1GB")
    if row("1GB, one thread", ram="1GB", threads=1, tokens=2)["ids"] != first["ids"][:2]:
        sys.exit("one thread: the ids differ from those of two")
    Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    print(f"the same logits at every budget; rows in {args.json}")


if __name__ == "__main__":
    main()
