"""The classes of `make faults` in which the model is good and something around it is not.

Outputs and displays, the kernel cache, files of the system, limits of the process. Each case runs the command in a
process of its own (environments.py); what is expected of it stands in its drawing.
"""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from environments import MODEL, Judge, Machine, Run

from k3lib.cli import pack_trunk
from k3lib.synth import synth


class Situation(NamedTuple):
    """A run in an environment: `drawn` as environments.draw makes it. Right are `codes`; None: those of Judge.expected.

    `judged(situations, folder)`, if given, runs and judges instead: it returns (exit code, what is wrong or '').
    """
    group: str
    what: str
    drawn: dict
    codes: tuple | None = None
    judged: Callable | None = None
    expected: str = "an end in words"
    code: int = 0
    prompt: tuple = ()


GROUPS = []


def group(make):
    "Mark a function that yields (what, drawn, ...) as a class."
    GROUPS.append(make)
    return make


def situations(seed=0):
    "Every case of every class, the same for the same seed."
    for make in GROUPS:
        rng = random.Random(f"{make.__name__} {seed}")
        for what, *rest in make(rng):
            yield Situation(make.__name__.replace("_", " "), what, *rest)


# Outputs: results come out whole, or as far as the run came, within the budget

STEPS = 160  # of the long runs


# The command in a child of its own, of which the system counts the memory: that of a process which was started by a
# large one would count the large one's too. The child's signals are those of the group; this one does not hear them.
MEASURED = """
import os, resource, signal, sys
limit, where, *command = sys.argv[1:]
child = os.fork()
if child == 0:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(command[0], command)
for number in signal.SIGINT, signal.SIGTERM:
    signal.signal(number, signal.SIG_IGN)
_, status, usage = os.wait4(child, 0)
with open(where, "w") as file:
    file.write(str(1024 * usage.ru_maxrss))
code = os.waitstatus_to_exitcode(status)
sys.exit(code if code >= 0 else 100 - code)
"""


class Long:
    "A long run on a model of many ids. It writes to `folder`."

    def __init__(self, situations, folder, *outputs, tokens=STEPS, command="decode", limit=None):
        self.folder, self.peak = Path(folder), Path(folder) / "peak"
        words = [command, situations.wide, "--ids", "1,2,3", "--max-new-tokens", tokens, "--ram", situations.wide_ram,
                 "--quiet", "--jsonl", "-"]
        start = [sys.executable, "-I", "-S", "-c", MEASURED, "" if limit is None else limit, self.peak]
        command = [*start, sys.executable, "-m", "k3lib", *words, *outputs]
        with open(self.folder / "out", "wb") as out:
            self.process = subprocess.Popen([*map(str, command)], stdout=out if limit is None else subprocess.DEVNULL,
                                            stderr=subprocess.PIPE, text=True, start_new_session=True,
                                            env=situations.usual_environment())

    def shown(self):
        "How many tokens have been shown."
        return (self.folder / "out").read_bytes().count(b'"event": "token"')

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def end(self):
        "(exit code, what was said on stderr, the most bytes in memory)."
        _, said = self.process.communicate()
        return self.process.returncode, said, int(self.peak.read_text())


def grows(rng, outputs):
    "A complete run: within the budget, whatever it writes, and what it writes is right."
    def judged(situations, folder):
        files = {option: folder / name for option, name in outputs.items()}
        for path in list(files.values())[:rng.randrange(2)]:
            path.write_bytes(b"of the run before")
        run = Long(situations, folder, *(word for pair in files.items() for word in pair),
                   command="trace" if "--out" in files else "decode")
        code, said, peak = run.end()
        if code != 0 or said:
            return code, f"exit code {code}, expected 0: {said[-300:]}"
        if peak > situations.wide_ram:
            return code, f"{peak:,} bytes in memory, the budget is {situations.wide_ram:,}"
        return code, situations.wrong_outputs(files, STEPS) or left_over(folder, files.values())
    return judged


def stopped(rng, number, outputs):
    "A run that a signal ends: what it had is left, and can be read."
    after = rng.randrange(20, 60)

    def judged(situations, folder):
        files = {option: folder / name for option, name in outputs.items()}
        run = Long(situations, folder, *(word for pair in files.items() for word in pair), tokens=5000,
                   command="trace" if "--out" in files else "decode")
        while run.process.poll() is None and run.shown() < after:
            threading.Event().wait(0.01)
        run.signal(number)
        code, said, _ = run.end()
        if code != 128 + number or said.count("\n") != 1 or not said.startswith("k3 "):
            return code, f"exit code {code}, expected {128 + number} and one line: {said[-300:]}"
        return code, situations.wrong_outputs(files, after, at_least=True) or left_over(folder, files.values())
    return judged


def does_not_fit(rng, option, limit):
    "A run whose file may not grow: one line that names it, exit code 1, and no file that cannot be read."
    def judged(situations, folder):
        path = folder / "result"
        command = "trace" if option == "--out" else "decode"
        code, said, _ = Long(situations, folder, option, path, limit=limit, command=command).end()
        if code != 1 or said.count("\n") != 1 or "result" not in said:
            return code, f"exit code {code}, expected 1 and one line that names the file: {said[-300:]}"
        return code, (path.exists() and situations.wrong_outputs({option: path}, 0, at_least=True)) or left_over(
            folder, [path])
    return judged


def left_over(folder, wanted):
    names = {path.name for path in folder.iterdir()} - {path.name for path in wanted} - {"out", "peak"}
    return f"leaves {min(names)} behind" if names else ""


@group
def results(rng):
    every = {"--logits": "l.npy"}, {"--json": "r.json"}, {"--logits": "l.npy", "--json": "r.json"}, {"--out": "t.bin"}
    for outputs in every:
        yield f"a long run with {', '.join(outputs)}", {}, None, grows(rng, outputs)
    for number in signal.SIGINT, signal.SIGTERM:
        for outputs in {"--logits": "l.npy"}, {"--out": "t.bin"}:
            what = f"{signal.Signals(number).name} during a run with {', '.join(outputs)}"
            yield what, {}, None, stopped(rng, number, outputs)
    for option, limit in ("--logits", 1000), ("--logits", 5_000_000), ("--json", 0), ("--out", 2000):
        yield f"{option} in a file that may have {limit:,} bytes", {}, None, does_not_fit(rng, option, limit)
    for words in (["--logits", "/dev/full"], ["--json", "."], ["--json", "no/such/folder/r.json"],
                  ["--logits", str(MODEL / "l.npy")], ["--logits", "same", "--json", "same"], ["--json", "/proc/r"]):
        yield f"{' '.join(words)}".replace(str(MODEL), "MODEL"), {"options": words}, (2,)


@group
def displays(rng):
    encodings = ["ascii", "latin-1", "cp1252", "utf-8", "utf-16", "cp037", "big5", "shift_jis", "iso2022_jp", "koi8-r",
                 "euc_kr", "utf-8:strict", "ascii:strict", "cp1252:ignore", "ascii:xmlcharrefreplace", ":namereplace"]
    for encoding in encodings:
        drawn = {"encoding": encoding, "prompt": rng.choice(["text", "text of other scripts"]), "outputs": True}
        if rng.random() < 0.3:
            drawn["stdout"] = "file"
        yield f"stdout in {encoding}", drawn
    for locale in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "zh_TW.BIG5"},
                   {"LC_ALL": "ja_JP.EUC-JP"}, {"LC_ALL": "de_DE.ISO-8859-1"}, {"LC_ALL": "xx_XX.UTF-8"}):
        yield f"the locale {locale['LC_ALL']}", {"locale": locale, "prompt": "text of other scripts", "outputs": True}
    for stdout in "/dev/full", "closed", "closed early", "closed after a line":
        for stderr in None, rng.choice(["closed", "/dev/full"]):
            drawn = {"stdout": stdout, "outputs": True} | ({"stderr": stderr} if stderr else {})
            yield f"stdout {stdout}" + f", stderr {stderr}" * bool(stderr), drawn
    for stderr in "closed", "/dev/full":
        yield f"stderr {stderr}", {"stderr": stderr, "outputs": True, "stdin": "closed"}


@group
def kernel_caches(rng):
    for n in range(8):
        yield f"two damaged entries, {n + 1}", {"cache": "damaged", "umask": rng.choice([0o22, 0o77]), "number": n}
    for home in "unset", "missing", "a file", "unwritable", "relative", "odd bytes", "empty":
        yield f"HOME {home}", {"HOME": home, "XDG_CACHE_HOME": rng.choice(["", "relative", "/nonexistent", "a file"])}
    for cache, home in ("bare installation", "missing"), ("unwritable", "unset"), ("a file", "a file"):
        yield f"no folder: {cache}, HOME {home}", {"cache": cache, "HOME": home}
    for command in ["plan", str(MODEL), "--ram", "1GB"], ["census", str(MODEL)], ["verify", str(MODEL)]:
        cache = rng.choice(["missing", "a file", "unwritable", "bare installation"])
        yield f"k3 {command[0]}, which needs no kernel: {cache}", {"cache": cache, "HOME": "missing", "words": command}
    yield "a full device", {"cache": "full"}


# Files of the system

MEMINFO = {"MemTotal": 33_000_000, "MemFree": 8_000_000, "MemAvailable": 16_000_000, "Buffers": 300_000,
           "Cached": 9_000_000, "SwapCached": 0, "Active": 5_000_000, "Inactive": 9_000_000, "SwapTotal": 0,
           "SwapFree": 0, "Shmem": 50_000, "SReclaimable": 400_000}
STATUS = {"VmPeak": 900_000, "VmSize": 800_000, "VmLck": 0, "VmPin": 0, "VmHWM": 180_000, "VmRSS": 90_000,
          "RssAnon": 40_000, "RssFile": 50_000, "RssShmem": 0, "VmData": 300_000, "VmStk": 132, "VmExe": 4,
          "VmLib": 100_000, "VmPTE": 300, "VmSwap": 0}


def lines(fields, *without, **changed):
    "A system's file of `name: number kB`."
    return b"".join(f"{name}:\t{changed.get(name, number)} kB\n".encode() for name, number in fields.items()
                    if name not in without)


def status(*without, name=b"python3", **changed):
    return b"Name:\t" + name + b"\nUmask:\t0022\nState:\tR (running)\n" + lines(STATUS, *without, **changed)


@group
def system_files(rng):
    meminfo, about, counts = "/proc/meminfo", "/proc/self/status", "/proc/self/io"
    for without in (["MemAvailable"], ["MemFree"], ["MemAvailable", "MemFree"], ["MemAvailable", "Shmem"],
                    ["MemAvailable", "Cached", "Buffers"], [*MEMINFO][1:], [*MEMINFO]):
        yield f"meminfo without {', '.join(without)[:60]}", {"system": {meminfo: lines(MEMINFO, *without)}}
    for value in "", "many", "-1", "1.5", "9" * 30, "0x10":
        changed = {"MemAvailable": value}
        yield f"MemAvailable: {value[:10]!r}", {"system": {meminfo: lines(MEMINFO, **changed)}}
    used = ["VmRSS", "VmHWM", "VmSize", "VmData", "RssFile"]
    for field in rng.sample(sorted(STATUS.keys() - {*used}), 4) + used:
        yield f"status without {field}", {"system": {about: status(field)}}
    yield "status without all of them", {"system": {about: status(*STATUS), "/proc/self/statm": b"1 2\n"}}
    for name in "神神神神神".encode() + b"\xe7\xa5", b"\xff\xfe", b"a\\nb: 3", b"":
        yield f"a process called {name!r}", {"system": {about: status(name=name)}}
    for path in meminfo, about, counts, "/proc/self/cgroup", "/proc/self/statm":
        for error in rng.sample(["ENOENT", "EACCES", "EIO", "ENOSYS"], 2):
            yield f"{path}: {error}", {"system": {path: error}}
        yield f"{path}: empty", {"system": {path: b""}}
    every = dict.fromkeys([meminfo, about, counts, "/proc/self/cgroup", "/proc/self/statm"], "ENOENT")
    yield "no /proc at all", {"system": every}
    group = "/sys/fs/cgroup/k3"
    good = {f"{group}/memory.max": b"3000000000\n", f"{group}/memory.current": b"90000000\n",
            f"{group}/memory.stat": b"anon 5\nfile 7\ninactive_file 4096\n"}
    for what, changed in (
        ("as usual", {}), ("no limit", {f"{group}/memory.max": b"max\n"}),
        ("memory.max empty", {f"{group}/memory.max": b""}),
        ("memory.max in words", {f"{group}/memory.max": b"a lot\n"}),
        ("memory.current missing", {f"{group}/memory.current": "ENOENT"}),
        ("memory.current unreadable", {f"{group}/memory.current": "EACCES"}),
        ("memory.stat missing", {f"{group}/memory.stat": "ENOENT"}),
        ("memory.stat without inactive_file", {f"{group}/memory.stat": b"anon 5\n"}),
        ("memory.stat with odd lines", {f"{group}/memory.stat": b"a\nb c d\n\n\xff 3\ninactive_file x\n"}),
    ):
        yield f"cgroup: {what}", {"system": {"/proc/self/cgroup": b"0::/k3\n", **good, **changed}}
    for text in (b"0::/\n", b"nonsense\n", b"5:memory\n", b"4:memory:/k3\n1:name=systemd:/x\n", b"0::/\xff\xe7\n",
                 b"::\n"):
        yield f"/proc/self/cgroup: {text!r}", {"system": {"/proc/self/cgroup": text}}


@group
def limits(rng):
    for most in 6, 8, 12, 16, 24, 32, 48, 64, 100, 128, 256:
        hard = rng.random() < 0.6
        drawn = {"NOFILE": most, "options": ["--trunk", "TRUNK"] * rng.randrange(2), "hard": hard}
        yield f"{most} open files{', and no more' * hard}{', packed trunk' * bool(drawn['options'])}", drawn, (
            (0, 2) if hard else (0,))
    for most in 64, 100, 128, 200, 256:
        drawn = {"NOFILE": most, "hard": True, "words": ["decode", "MANY", "--ids", "1,2", "--max-new-tokens", "1",
                                                         "--ram", "1GB", "--quiet", "--trunk", "MANY TRUNK"]}
        yield f"{most} open files, and no more, for 90 of a model and its trunk", drawn, (0, 2)
    for name, sizes in ("AS", (0.7, 0.8, 1, 1.5, 2.5, 8)), ("DATA", (0.4, 0.5, 0.7, 1, 2)):
        for size in sizes:
            hard = rng.random() < 0.7
            yield f"{size:g} GB of {name}{', and no more' * hard}", {name: int(size * 1e9), "hard": hard}, (0, 2)
    for most in 1, 2, 4, 6, 8, 12, 40:
        yield f"{most} threads of a user", {"NPROC": most, "hard": True, "user": True}, (0, 2)
    for size in 1 << 20, 64 << 20, 1 << 30, -1:
        yield f"stacks of {size:,}", {"STACK": size}, (0,)
    for size in 0, 1000, 4096:
        yield f"files of {size:,} bytes", {"FSIZE": size, "hard": True}, (0,)
        yield f"files of {size:,} bytes, stdout too", {"FSIZE": size, "hard": True, "stdout": "file"}, (
            (0,) if size else (1,))  # the generated text is short


# Running them

class Situations:
    "Runs situations in a folder of its own, and judges them. What several need is made when the first needs it."

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir()
        self.machine = Machine(self.folder)
        self.judge_of_runs = Judge(self.machine)
        self._lock, self._made, self._number = threading.RLock(), {}, 0

    def made(self, name, make):
        "make(path) once; the path."
        with self._lock:
            if name not in self._made:
                make(self.folder / name)
                self._made[name] = self.folder / name
            return self._made[name]

    @property
    def wide(self):
        "A small model of 65,536 ids: 262 kB of logits a step."
        return self.made("wide", lambda path: synth(path, "oracle", vocab=65_536))

    @property
    def many(self):
        "A model of many files."
        return self.made("many", lambda path: synth(path, "oracle", layers=42))

    def trunk_of(self, model):
        return self.made(f"trunk of {Path(model).name}", lambda path: pack_trunk(model, path))

    def usual_environment(self):
        return {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.folder), "LANG": "C.UTF-8",
                "PYTHONPATH": str(MODEL.parents[2]), "NUMBA_CACHE_DIR": str(self.machine.warm)}

    @property
    def wide_ram(self):
        "A budget that has room for the wide model, and not for the logits of a long run beside it."
        if "ram" not in self._made:
            words = "decode", self.wide, "--ids", "1,2,3", "--max-new-tokens", STEPS, "--ram", "1"
            run = subprocess.run([sys.executable, "-m", "k3lib", *map(str, words)], capture_output=True, text=True,
                                 env=self.usual_environment())
            needed = re.search(r"at least (\d+) MB", run.stderr)
            if needed is None:
                raise SystemExit(f"a budget of one byte is not refused as expected: {run.stderr}")
            self._made["ram"] = int(needed[1]) * 10**6 + 25_000_000
        return self._made["ram"]

    def reference(self):
        "(ids, logits) of the wide model's long run."
        def run(path):
            import k3lib
            with k3lib.load(self.wide, "1GB", context=STEPS + 3) as model:
                rows = []
                ids = list(model.generate([1, 2, 3], STEPS, rows.append))
            np.savez(path.with_suffix(".npz"), ids=np.array(ids), logits=np.stack(rows))
        return np.load(self.made("reference", run).with_suffix(".npz"))

    def wrong_outputs(self, files, steps, at_least=False):
        "What is wrong with the outputs of the wide model's run over `steps` steps, or at least so many; '' if nothing."
        right = self.reference()
        for option, path in files.items():
            if not path.exists():
                return f"{option}: there is no file"
            try:
                if option == "--logits":
                    rows = np.load(path)
                    n = min(len(rows), STEPS)
                    if len(rows) < steps - 1 or not at_least and len(rows) != steps:
                        return f"{len(rows)} rows of logits, expected {steps}"
                    if rows[:n].tobytes() != right["logits"][:n].tobytes():
                        return "other logits"
                elif option == "--json":
                    if json.loads(path.read_bytes())["ids"] != right["ids"].tolist()[:steps]:
                        return "the report holds other ids"
                elif path.stat().st_size % 8 or path.stat().st_size < 8 * 4 * 12 * max(0, steps - 1):
                    return f"a trace of {path.stat().st_size:,} bytes"
            except ValueError as error:
                return f"{option}: cannot be read: {error}"
        return ""

    def judge(self, case):
        "(exit code, what is wrong or ''); the code is None where this machine cannot run the case."
        with self._lock:
            self._number += 1
            folder = self.folder / f"case{self._number}"
        folder.mkdir(mode=0o755)
        try:
            if case.judged:
                return case.judged(self, folder)
            drawn = self.with_paths(case.drawn)
            if drawn is None:
                return None, ""
            run = Run(drawn, self.machine, folder / "run")
            code, out, err = run()
            return code, self.wrong(case, run, code, out, err)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def wrong(self, case, run, code, out, err):
        wrong = self.judge_of_runs.wrong(run, code, out, err, case.codes and {*case.codes})
        return wrong and f"{wrong}: {err.decode(errors='replace')[-600:]}"

    def with_paths(self, drawn):
        "The drawing with the paths of what was made; None for a user or a device that this machine does not have."
        names = {"TRUNK": lambda: self.trunk_of(MODEL), "MANY": lambda: self.many,
                 "MANY TRUNK": lambda: self.trunk_of(self.many)}
        drawn = dict(drawn)
        for key in {"options", "words"} & {*drawn}:
            drawn[key] = [str(names[word]()) if word in names else word for word in drawn[key]]
        if drawn.get("user"):
            drawn["user"] = self.machine.user
        lacks = drawn.get("user") == 0 or drawn.get("cache") == "full" and not self.machine.full
        charset = drawn.get("locale", {}).get("LC_ALL", "xx")
        lacks |= charset[2:3] == "_" and charset[:2] != "xx" and charset not in self.machine.locales
        return None if lacks else drawn
