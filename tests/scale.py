"""The full 2.78T shape on this machine (`make scale`): the same bytes at every budget, in the memory it says, how fast.

Writes a synthetic checkpoint of the released layout to out/full (about 5 GB on disk) and its packed trunk (4 GB) to
out/trunk if they are not there, then runs `k3 decode` in a process of its own for every row of the table. The first
rows may have no more memory than their budget: a limit on private memory, and a memory cgroup where this user may make
one. The figures go to fixtures/measured/scale.json, from which the last notebook draws the memory ladder.
"""
import argparse
import hashlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import history
import numba
import numpy as np
from common import ROOT

from k3lib.display import Display
from k3lib.system import system_lines

MEASURED = ROOT / "fixtures" / "measured" / "scale.json"
GROUP = Path("/sys/fs/cgroup/memory/k3-scale")  # v1; elsewhere the limit on private memory has to do
IDS = "5,9,17,3,11"
KEPT = ("ids", "threads", "step_seconds", "step_bytes", "peak_rss_bytes", "plan", "wall_seconds", "compute_seconds",
        "io_wait_seconds", "expert_requests", "expert_hits", "read_bytes_per_second")
LONG = """
import gc, json, sys, time, k3lib
ram, model = sys.argv[2], None
while model is None:
    try:
        model = k3lib.load(sys.argv[1], ram, threads=2, context=4096)
    except k3lib.PlanError as error:  # right after an installation more of the libraries is resident (5.18.1)
        if error.least is None:
            raise
        ram = f"{error.least // 10**6 + 2} MB"
    gc.collect()
for state in model.sequence.layers:
    if not isinstance(state, tuple):  # a KV cache, as it is after so many tokens
        state[:] = 0.01
model.sequence.position, seconds = 4094, []
for token in (5, 9):
    began = time.perf_counter()
    model.step(token)
    seconds.append(time.perf_counter() - began)
print(json.dumps({**model.report.as_dict(), "step_seconds": seconds}))
"""


def machine():
    "What the figures were measured on."
    names = [line.partition(":")[2].strip() for line in system_lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": names[0] if names else platform.machine(), "cores": os.cpu_count(), "memory_bytes": memory,
            "system": f"{platform.system()} {platform.release()}", "python": platform.python_version(),
            "numpy": np.__version__, "numba": numba.__version__}


def enforced(limit):
    "(function for the child that limits its memory to `limit` bytes, whether a cgroup is part of that)"
    try:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "memory.limit_in_bytes").write_text(str(limit))
        (GROUP / "memory.max_usage_in_bytes").write_text("0")
        group = True
    except OSError:
        group = False

    def limits():
        resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, 1 << 20))  # a thread's stack counts whole, used or not
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        if group:
            (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    return limits, group


def size(ram):
    return int(ram.removesuffix("GB")) * 10**9


def child(command, limit):
    "Run it; (standard output, how its memory was limited)."
    limits, group = enforced(limit) if limit else (None, False)
    done = subprocess.run([sys.executable, *map(str, command)], preexec_fn=limits, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr.strip()}")
    if not limit:
        return done.stdout, "observed"
    peak = f", which saw {int((GROUP / 'memory.max_usage_in_bytes').read_text()) / 1e6:.0f} MB at most" if group else ""
    return done.stdout, "private memory limited" + " and in a cgroup" * group + peak


def decode(folder, ram, threads, tokens, prompt=("--ids", IDS), trunk=None, limited=False):
    "One decode: its report, with a digest of each step's logits and what limited its memory; and what it printed."
    with tempfile.TemporaryDirectory() as scratch:
        record, logits = Path(scratch) / "r.json", Path(scratch) / "l.npy"
        command = ["-m", "k3lib", "decode", folder, *prompt, "--max-new-tokens", tokens, "--ram", ram,
                   "--threads", threads, "--json", record, "--logits", logits, *(["--trunk", trunk] if trunk else [])]
        text, memory = child(command, limited and size(ram))
        report = json.loads(record.read_text())
        digests = [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in np.load(logits)]
    return table_row(ram, trunk is not None, report, digests, memory), text


def table_row(ram, packed, report, digests, memory):
    "A row of the file: what is kept of a report, and how it was made."
    kept = {key: report[key] for key in KEPT}
    return {"ram": size(ram), "packed": packed, **kept, "digests": digests, "memory": memory}


def long_context(folder, ram):
    "Two steps at the end of a context of 4,096 positions, at `ram` or the smallest budget, whichever is larger."
    text, memory = child(["-c", LONG, folder, ram], 0)
    report = json.loads(text)
    return {**table_row(ram, False, report, [], memory), "ram": report["plan"]["ram"]}


def with_vocabulary(folder, scratch):
    "A folder of links to the checkpoint's files and to the vocabulary that K3_TIKTOKEN names."
    for file in Path(folder).resolve().iterdir():
        (scratch / file.name).symlink_to(file)
    (scratch / "tiktoken.model").symlink_to(Path(os.environ["K3_TIKTOKEN"]).resolve())
    return scratch


class Table:
    "The rows so far. A row that is no good ends the run; an output that nobody reads does not."

    def __init__(self, path, command):
        self.path, self.show = path, Display(goes_on=True)
        about = ("decodes of the synthetic checkpoint of the full released shape, most of which is holes: "
                 "bytes are read at the speed of memory, not of a disk")
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        self.tree = {"about": about, "made_by": command, "date": today, "machine": machine(), "rows": []}

    def add(self, what, row, most, like=None):
        peak, planned, steps = row["peak_rss_bytes"], row["plan"]["total"], row["step_seconds"]
        self.tree["rows"].append({"what": what, **row})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.tree, indent=1) + "\n", "utf-8", newline="\n")
        later = f"{np.median(steps[1:]):6.1f} s a token" if steps[1:] else " " * 14
        prompt = f"prompt {steps[0]:6.1f} s" if steps else " " * 15
        self.show(f"{what:<36} peak {peak / 1e6:6.0f} MB of {planned / 1e6:6.0f} planned, {prompt}, {later}, "
                  f"ids {row['ids']}, {row['memory']}")
        if peak > most:
            sys.exit(f"{what}: a peak of {peak} bytes, at most {most:.0f} are allowed")
        n = min(len(row["digests"]), len(like["digests"])) if like else 0
        if like and row["digests"][:n] != like["digests"][:n]:
            sys.exit(f"{what}: the logits differ from those of the first row")

    def figures(self):
        "What was measured, as the history keeps it: text by row."
        return {row["what"]: f"peak {row['peak_rss_bytes'] / 1e6:.0f} MB, "
                             f"prompt and tokens {' '.join(f'{s:.1f}' for s in row['step_seconds'])} s"
                for row in self.tree["rows"]}


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--folder", default=str(ROOT / "out" / "full"))
    args.add_argument("--trunk", default=str(ROOT / "out" / "trunk"))
    args.add_argument("--budgets", default="1GB,2GB,4GB,8GB,16GB", help="in ascending order, whole gigabytes")
    args.add_argument("--tokens", type=int, default=4)
    args.add_argument("--only-budgets", action="store_true", help="leave out the rows that vary something else")
    args.add_argument("--json", type=Path, default=MEASURED, help="another file than the default: no line of history")
    args = args.parse_args()
    budgets, tokens, folder = args.budgets.split(","), args.tokens, args.folder
    lowest = budgets[0]
    if not Path(folder).exists():
        Path(folder).parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "k3lib", "synth", folder, "--preset", "full"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    options = f"--budgets {args.budgets} --tokens {tokens}" + " --only-budgets" * args.only_budgets
    table = Table(args.json, f"tests/scale.py {options}")

    if not args.only_budgets:
        kernels = tempfile.TemporaryDirectory()  # the other rows find there what this one compiles
        os.environ["NUMBA_CACHE_DIR"] = kernels.name
        table.add(f"{lowest}, nothing compiled yet", decode(folder, lowest, 2, 2)[0], size(lowest))
    first, text = decode(folder, lowest, 2, tokens, limited=True)
    table.add(lowest, first, size(lowest))
    table.show(text)
    for ram in budgets[1:]:
        table.add(ram, decode(folder, ram, 2, tokens)[0], size(ram), first)
    if not args.only_budgets:
        command = [sys.executable, "-m", "k3lib", "pack", folder, args.trunk]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for ram, threads, trunk in (lowest, 1, None), (lowest, 2, args.trunk), (budgets[-1], 1, args.trunk):
            what = f"{ram}, {threads} thread{'s' * (threads > 1)}{', packed trunk' if trunk else ''}"
            found, _ = decode(folder, ram, threads, 2, trunk=trunk, limited=True)
            table.add(what, found, size(ram), first)
        found = long_context(folder, lowest)
        needed = f"{found['ram'] / 1e9:.4g}GB"
        table.add(f"{needed}, 4,096 positions", found, found["ram"])
        if "K3_TIKTOKEN" in os.environ:
            with tempfile.TemporaryDirectory() as scratch:
                model = with_vocabulary(folder, Path(scratch))
                found, _ = decode(model, lowest, 2, 2, prompt=("--prompt", "How small can it be?"), limited=True)
                table.add(f"{lowest}, a prompt of text", found, size(lowest))
    if args.json == MEASURED:
        history.append("scale", table.tree["machine"], table.figures())
    table.show(f"the same logits in every row; figures in {args.json}")
    if GROUP.exists():
        GROUP.rmdir()


if __name__ == "__main__":
    main()
