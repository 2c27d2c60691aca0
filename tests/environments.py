"""`make environments`: decode the embedded model in environments drawn at random, and judge how each run ends.

Right are two ends: the ids, and the files that were asked for, or one clear line on stderr with the right exit code.
Wrong are other ids, a traceback, silence, an end by a signal, another exit code, a line too many, files that are left
over, and a run that hangs. Each run is drawn from its number and the seed, so it can be run again alone.

A run may have to compile kernels, which takes ten times as long as all the rest. So --compiled runs do, and the others
read them from a folder.
"""
import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import k3lib

ROOT = Path(k3lib.__file__).parents[1]
MODEL = ROOT / "fixtures" / "oracle13" / "model"
EXPECTED = json.loads((MODEL.parent / "expected.json").read_bytes())
NEW = 8  # tokens
PROMPTS = {
    "ids": ("--ids", ",".join(map(str, EXPECTED["prompt_ids"]))),
    "text": ("--prompt", "The capital of France is"),
    "text of other scripts": ("--prompt", "Привет, 世界 \u00e9"),
}
SECONDS = 100  # after which a run has hung; three times as long if it compiles
OTHER_USER = 54321  # of whom no list of users knows

# What a run goes through before it becomes Python: `spec` says what is changed. Nothing of the machine's environment is
# left but the search path.
LAUNCH = r"""
import json, os, resource, signal, sys
spec = json.loads(sys.argv[1])
os.umask(spec["umask"])
os.chdir(spec["cwd"])
for name in spec["ignored"]:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in spec["blocked"]])
for name in {"SIGPIPE", "SIGXFSZ"} - {*spec["ignored"]}:  # what Python ignores would be ignored by its child
    signal.signal(getattr(signal, name), signal.SIG_DFL)
os.nice(spec["nice"])
if spec["cpus"]:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:spec["cpus"]])
if spec["user"]:
    os.setgroups([])
    os.setgid(spec["user"])
    os.setuid(spec["user"])
for number, kind in enumerate(spec["streams"]):
    if kind == "closed":
        os.close(number)
    elif kind != "pipe":
        fd = os.open(kind, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(fd, number)
        os.close(fd)
if spec["cwd removed"]:
    os.rmdir(spec["cwd"])
for name, (soft, hard) in spec["limits"].items():
    which = getattr(resource, "RLIMIT_" + name)
    most = resource.getrlimit(which)[1]
    fits = lambda n: n if most < 0 else most if n < 0 else min(n, most)
    resource.setrlimit(which, (fits(soft), fits(hard)))
os.execve(spec["command"][0], spec["command"], spec["env"])
"""
# `-I` and `-E` hide PYTHONPATH: the package is then found by this
BOOTSTRAP = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy; runpy._run_module_as_main('k3lib')"
# Other files in place of the system's: {path: another path, or the name of the error of an open}
OTHER_FILES = """import builtins, errno, io, os
files, opened, os_open = {files!r}, io.open, os.open
def other(path):
    path = files.get(os.fsdecode(path), path) if isinstance(path, (str, bytes, os.PathLike)) else path
    if isinstance(path, str) and path in errno.errorcode.values():
        raise OSError(getattr(errno, path), os.strerror(getattr(errno, path)))
    return path
builtins.open = io.open = lambda path, *args, **options: opened(other(path), *args, **options)
os.open = lambda path, *args, **options: os_open(other(path), *args, **options)
"""


def run_quietly(*command, **options):
    return subprocess.run([*map(str, command)], capture_output=True, **options)


# What this machine can do

class Machine:
    "What can be drawn here, and folders that runs share. `lacks`: what cannot be drawn, and why."

    def __init__(self, home):
        self.home, self.lacks = Path(home), []
        os.chmod(home, 0o755)
        self.warm = self.home / "warm"
        self.warm.mkdir()
        caches = os.environ.get("NUMBA_CACHE_DIR", ROOT / "k3lib" / "__pycache__"), Path.home() / ".cache" / "k3"
        for folder in caches:
            for entry in Path(folder).glob("*.kernel"):
                shutil.copy(entry, self.warm)
        self.bare = self.home / "bare"  # an installation that holds no machine code
        shutil.copytree(ROOT / "k3lib", self.bare / "k3lib", ignore=shutil.ignore_patterns("__pycache__"))
        self.locales = self.made_locales()
        self.user = self.other_user()
        self.full = self.full_device()

    def made_locales(self):
        "Locales of other charsets, made from the system's descriptions."
        found = []
        for name, charset in ("zh_TW", "BIG5"), ("ja_JP", "EUC-JP"), ("de_DE", "ISO-8859-1"), ("tr_TR", "ISO-8859-9"):
            with contextlib.suppress(OSError):
                folder = self.home / "locales"
                folder.mkdir(exist_ok=True)
                made = run_quietly("localedef", "-f", charset, "-i", name, folder / f"{name}.{charset}")
                if made.returncode == 0:
                    found.append(f"{name}.{charset}")
        if not found:
            self.lacks.append("locales of other charsets: localedef cannot make them")
        return found

    def other_user(self):
        "A user without an entry, who can read the package; 0 if there cannot be one."
        if os.geteuid() != 0:
            self.lacks.append("another user: only the superuser can become one")
            return 0
        code = f"import os; os.setgid({OTHER_USER}); os.setuid({OTHER_USER}); import k3lib.engine"
        env = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(self.warm), "PYTHONDONTWRITEBYTECODE": "1"}
        if run_quietly(sys.executable, "-c", code, env=env, cwd="/").returncode:
            self.lacks.append("another user: has no access to this tree or to Python")
            return 0
        return OTHER_USER

    def full_device(self):
        "A command in front of another that puts a full file system at its first argument; None where that is refused."
        mount = 'mount -t tmpfs -o size=4k,mode=1777 none "$1" && { cat /dev/zero > "$1/filler" 2>/dev/null; '
        command = ["unshare", "-m", "sh", "-c", mount + 'shift; exec "$@"; }', "sh"]
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
            if os.geteuid() == 0 and run_quietly(*command, folder, "true").returncode == 0:
                return command
        self.lacks.append("a full device: no file system can be mounted")
        return None


# What is drawn

def draw(rng, machine, compiles):
    """An environment as {axis: value}. Axes that are left out are as usual. `compiles`: whether it compiles kernels.

    Each axis is unusual in about one of four runs.
    """
    found = {}

    def axis(name, values, chance=0.25):
        if rng.random() < chance:
            found[name] = rng.choice(values)

    axis("prompt", ["text", "text of other scripts"], 0.6)
    axis("outputs", [True], 0.4)
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # Python makes no UTF-8 of it
    axis("locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LC_ALL": "C.UTF-8"}, {"LC_ALL": "xx_XX.UTF-8"},
                    {"LANG": "C"}, {"LC_CTYPE": "xx_XX"}, plain, *({"LC_ALL": name} for name in machine.locales)], 0.4)
    axis("encoding", ["ascii", "latin-1", "cp1252", "utf-8", "utf-16", "cp037", "big5", "iso2022_jp", "koi8-r",
                      "ascii:strict", "utf-8:strict", ":strict", "latin-1:replace"], 0.4)
    axis("stdout", ["file", "/dev/full", "closed", "closed early", "closed after a line"])
    axis("stderr", ["/dev/full", "closed", "/dev/null"], 0.08)
    axis("stdin", ["closed", "/dev/zero"])
    axis("HOME", ["unset", "missing", "a file", "unwritable", "relative", "odd bytes", "empty"])
    if compiles:
        found["cache"] = rng.choice(["missing", "a file", "unwritable", "empty", "bare installation",
                                     *["full"] * bool(machine.full)])
    else:
        axis("cache", ["damaged", "relative"])
    axis("XDG_CACHE_HOME", ["", "relative", "/nonexistent", "a file"], 0.1)
    axis("TMPDIR", ["missing", "a file", "unwritable", "relative", "odd bytes", "empty"])
    axis("cwd", ["removed", "unwritable", "odd bytes", "/"])
    axis("umask", [0, 0o77, 0o777])
    axis("user", [machine.user], 0.25 * bool(machine.user))
    axis("flags", [["-O"], ["-OO"], ["-I"], ["-E"], ["-s"], ["-B"], ["-b"], ["-bb"], ["-P"], ["-u"], ["-W", "error"],
                   ["-W", "default"], ["-X", "utf8=0"], ["-X", "utf8=1"], ["-X", "dev"], ["-X", "faulthandler"],
                   ["-X", "int_max_str_digits=640"], ["-X", "no_debug_ranges"],
                   ["-I", "-X", "utf8=0", "-W", "error"]], 0.4)
    axis("variables", [{"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "4294967295"}, {"PYTHONDEVMODE": "1"},
                       {"PYTHONMALLOC": "debug"}, {"PYTHONMALLOC": "malloc"}, {"PYTHONWARNINGS": "error"},
                       {"PYTHONOPTIMIZE": "2"}, {"PYTHONPYCACHEPREFIX": "/nonexistent/prefix"}, {"PYTHONUTF8": "0"},
                       {"PYTHONUNBUFFERED": "1"}, {"PYTHONNOUSERSITE": "1"}, {"PYTHONSAFEPATH": "1"}, {"TERM": "dumb"},
                       {"COLUMNS": "0"}, {"COLUMNS": "x"}, {"OMP_NUM_THREADS": "1"}, {"TZ": "Nowhere/None"}], 0.4)
    axis("ignored", [["SIGINT"], ["SIGHUP"], ["SIGINT", "SIGTERM", "SIGQUIT", "SIGHUP"], ["SIGPIPE"], ["SIGCHLD"]])
    axis("blocked", [["SIGINT", "SIGTERM"], ["SIGPIPE"], ["SIGALRM", "SIGUSR1"]], 0.1)
    axis("nice", [19], 0.1)
    axis("cpus", [1], 0.15)
    axis("NOFILE", [8, 12, 20, 32, 48, 64, 128, 256])
    axis("AS", [int(gb * 1e9) for gb in (0.3, 0.5, 0.6, 0.7, 0.8, 1, 1.5, 2, 4, 16)])
    axis("DATA", [int(gb * 1e9) for gb in (0.2, 0.3, 0.4, 0.5, 0.7, 1, 2, 4)], 0.15)
    axis("FSIZE", [0, 1000, 5000, 1 << 20], 0.1)
    axis("STACK", [1 << 20, 64 << 20, 1 << 30, -1], 0.15)
    axis("NPROC", [1, 3, 6, 10, 30, 100], 0.25)
    axis("CORE", [0], 0.1)
    if any(name in found for name in ("NOFILE", "AS", "DATA", "FSIZE", "STACK", "NPROC")):
        axis("hard", [True], 0.7)  # the hard limit too, so that it cannot be raised
    return found


LIMITS = "NOFILE", "AS", "DATA", "FSIZE", "STACK", "NPROC", "CORE"
UNKEPT = "missing", "a file", "unwritable", "empty", "full", "bare installation"  # caches with which a run compiles


def compiled(drawn):
    return drawn.get("cache") in UNKEPT


# From a drawing to a process

class Run:
    "A drawn environment, made real in a folder of its own."

    def __init__(self, drawn, machine, folder):
        self.drawn, self.machine, self.folder = drawn, machine, Path(folder)
        for name in ("cwd", "home", "tmp", "out", "full"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "file").write_bytes(b"")
        self.odd = os.fsdecode(os.fsencode(self.folder) + b"/odd \xff\xe7\n '\"$ ")
        os.mkdir(self.odd)
        self.closed_to_others = self.folder / "locked"
        self.closed_to_others.mkdir()
        self.cwd = {"unwritable": self.closed_to_others, "odd bytes": self.odd, "/": "/",
                    None: self.folder / "cwd", "removed": self.folder / "cwd"}[drawn.get("cwd")]
        self.env = self.environment()
        self.outputs = [self.folder / "out" / name for name in ("r.json", "l.npy")] if drawn.get("outputs") else []
        if user := drawn.get("user"):
            for path in (self.folder, *self.folder.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)
            os.chown(self.closed_to_others, 0, 0)
        self.closed_to_others.chmod(0o555)
        self.specification = self.spec()
        self.before = self.everything()

    def state(self, what):
        "The value of a variable that names a folder, by the words that were drawn for it."
        return {"missing": str(self.folder / "none" / "none"), "a file": str(self.folder / "file"),
                "unwritable": str(self.closed_to_others), "relative": os.path.join("some", "where"),
                "odd bytes": self.odd, "empty": "", "full": str(self.folder / "full")}.get(what, what)

    def environment(self):
        drawn = self.drawn
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.folder / "home"), "PYTHONPATH": str(ROOT),
               "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8", "LOCPATH": str(self.machine.home / "locales"),
               "TMPDIR": str(self.folder / "tmp")}
        for name in "HOME", "TMPDIR", "XDG_CACHE_HOME":
            if name in drawn:
                env[name] = self.state(drawn[name])
        if drawn.get("HOME") == "unset":
            del env["HOME"]
        if "encoding" in drawn:
            env["PYTHONIOENCODING"] = drawn["encoding"]
        env |= self.cache() | drawn.get("locale", {}) | drawn.get("variables", {})
        return env

    def cache(self):
        kind, warm = self.drawn.get("cache"), self.machine.warm
        if kind == "damaged":
            return {"NUMBA_CACHE_DIR": str(self.damaged())}
        if kind == "bare installation":
            return {"PYTHONPATH": str(self.machine.bare)}
        if kind == "relative":
            gone = self.drawn.get("cwd") == "removed"
            return {"NUMBA_CACHE_DIR": str(warm) if gone else os.path.relpath(warm, self.cwd)}
        if kind == "empty":
            (self.folder / "cache").mkdir()
            return {"NUMBA_CACHE_DIR": str(self.folder / "cache")}
        return {"NUMBA_CACHE_DIR": self.state(kind) if kind in UNKEPT else str(warm)}

    def damaged(self):
        "A copy of the cache in which two entries are damaged, each in another way."
        folder = Path(shutil.copytree(self.machine.warm, self.folder / "cache"))
        rng = random.Random(str(self.drawn))
        small = [path for path in sorted(folder.iterdir()) if path.stat().st_size < 60_000]  # the fewest to compile
        for path in rng.sample(small, 2):
            data = path.read_bytes()
            path.unlink()
            how = rng.choice(["empty", "cut", "zeros", "a byte", "a folder", "a link to nothing", "unreadable"])
            if how == "a folder":
                path.mkdir()
            elif how == "a link to nothing":
                path.symlink_to("nowhere")
            else:
                at = rng.randrange(len(data))
                path.write_bytes({"empty": b"", "cut": data[:at], "zeros": bytes(len(data)), "unreadable": data,
                                  "a byte": data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]}[how])
                path.chmod(0 if how == "unreadable" else 0o644)
        return folder

    def system_files(self):
        "The code that puts other files in place of the system's: {path: bytes, or the name of an error}."
        files = dict(self.drawn["system"])
        for number, (path, content) in enumerate(files.items()):
            if isinstance(content, bytes):
                files[path] = str(self.folder / f"system{number}")
                Path(files[path]).write_bytes(content)
        return OTHER_FILES.format(files=files)

    def command(self):
        flags, drawn = self.drawn.get("flags", []), self.drawn
        module = ["-c", BOOTSTRAP] if {"-I", "-E"} & {*flags} else ["-m", "k3lib"]
        if "system" in drawn:
            module = ["-c", self.system_files() + BOOTSTRAP]
        words = ["decode", str(drawn.get("model", MODEL)), *PROMPTS[drawn.get("prompt", "ids")],
                 "--max-new-tokens", str(NEW), "--ram", "1GB", "--quiet", *drawn.get("options", [])]
        if drawn.get("stdout") == "closed after a line":
            words += ["--jsonl", "-"]
        for option, path in zip(("--json", "--logits"), self.outputs):
            words += [option, str(path)]
        return [sys.executable, *flags, *module, *drawn.get("words", words)]

    def spec(self):
        drawn = self.drawn
        limits = {name: (drawn[name], drawn[name] if drawn.get("hard") or name == "CORE" else -1)
                  for name in LIMITS if name in drawn}
        streams = [drawn.get("stdin", "/dev/null"), drawn.get("stdout", "pipe"), drawn.get("stderr", "pipe")]
        if streams[1] == "file":
            streams[1] = str(self.folder / "stdout")
        return {"umask": drawn.get("umask", 0o22), "cwd": str(self.cwd), "cwd removed": drawn.get("cwd") == "removed",
                "ignored": drawn.get("ignored", []), "blocked": drawn.get("blocked", []), "nice": drawn.get("nice", 0),
                "cpus": drawn.get("cpus", 0), "user": drawn.get("user", 0), "limits": limits, "env": self.env,
                "streams": ["pipe" if kind.startswith("closed ") else kind for kind in streams],
                "command": self.command()}

    def kept(self):
        "Folders in which machine code may be kept."
        named = [self.env.get("NUMBA_CACHE_DIR") or None, self.folder / "none"]
        named += [Path(self.env[name], *rest) for name, *rest in (("HOME", ".cache"), ("XDG_CACHE_HOME", "k3"))
                  if os.path.isabs(self.env.get(name, ""))]
        return [self.folder / path for path in named if path]

    def everything(self):
        "All files that this run could leave behind."
        return {os.fsencode(path) for path in self.folder.rglob("*")}

    def __call__(self):
        "Run it: (exit code, or None if it hangs; what came on stdout; what came on stderr), both bytes."
        front = [*self.machine.full, str(self.folder / "full")] if self.drawn.get("cache") == "full" else []
        command = [*front, sys.executable, "-I", "-S", "-c", LAUNCH, json.dumps(self.specification)]
        kind, early = self.drawn.get("stdout"), None
        if kind == "closed early":
            reader, early = os.pipe()
            os.close(reader)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=early or subprocess.PIPE,
                                   stderr=subprocess.PIPE, env={"PATH": os.environ.get("PATH", os.defpath)})
        if early:
            os.close(early)
        elif kind == "closed after a line":
            line = process.stdout.readline()
            process.stdout.close()
            process.stdout = None
        try:
            out, err = process.communicate(timeout=SECONDS * (3 if compiled(self.drawn) else 1))
        except subprocess.TimeoutExpired:
            process.kill()
            return None, *process.communicate()
        if kind == "file":
            out = (self.folder / "stdout").read_bytes()
        return process.returncode, line if kind == "closed after a line" else out or b"", err


# Right and wrong

def encoding_of(drawn):
    "The encoding that Python was told to use; None where it was told to ignore what the environment says."
    return None if {"-I", "-E"} & {*drawn.get("flags", [])} else drawn.get("encoding")


def text_of(data, encoding):
    return data.decode((encoding or "utf-8").split(":")[0] or "utf-8", "replace")


class Judge:
    "Judges how a run ended. `ids`, `texts` and `logits`: those of each prompt in a usual environment."

    def __init__(self, machine):
        self.ids, self.texts, self.logits = {}, {}, {}
        for prompt in PROMPTS:
            with tempfile.TemporaryDirectory(dir=machine.home) as folder:
                run = Run({"prompt": prompt, "outputs": True}, machine, Path(folder) / "run")
                run.drawn["cache"] = "empty"  # it may have to fill the shared folder, which takes time
                code, out, err = run()
                if code != 0 or err:
                    raise SystemExit(f"a run in a usual environment fails: exit code {code}: {err.decode()}")
                self.ids[prompt], self.logits[prompt] = (path.read_bytes() for path in run.outputs)
                report = json.loads(self.ids[prompt])
                self.ids[prompt], self.texts[prompt] = report["ids"], report["text"]
        if self.ids["ids"] != EXPECTED["generated_ids"][:NEW]:
            raise SystemExit(f"a run in a usual environment decodes {self.ids['ids']}")
        for entry in machine.warm.iterdir():
            entry.chmod(0o644)

    def expected(self, drawn):
        "Exit codes that are right in the environment."
        lost = drawn.get("stdout") in ("/dev/full", "closed", "closed early", "closed after a line")
        codes = {1} if lost else {0}
        low = {"NOFILE": 64, "AS": 1_600_000_000, "DATA": 800_000_000, "NPROC": 1000, "STACK": 4 << 20}
        if not drawn.get("hard"):
            del low["NOFILE"]  # the soft limit can be raised
        if any(0 <= drawn.get(name, -1) <= most for name, most in low.items()):
            codes |= {2}
        if 0 <= drawn.get("STACK", 0) > 1 << 29 or drawn.get("STACK") == -1:  # reserved for each thread
            codes |= {2} if {"AS", "DATA"} & {*drawn} else set()
        if min(drawn.get("AS", 1 << 40), drawn.get("DATA", 1 << 40)) <= 500_000_000:
            codes |= {1}  # the libraries themselves do not fit
        if "FSIZE" in drawn and (drawn.get("stdout") == "file" or drawn.get("outputs")):
            codes |= {1}
        if drawn.get("cwd") == "removed":
            codes |= {2}  # a library may ask for the current folder when it is imported
        charset = drawn.get("locale", {}).get("LC_ALL", "")
        if drawn.get("prompt") == "text of other scripts" and charset.endswith(("BIG5", "EUC-JP")):
            codes |= {2}  # bytes that are no text in the locale's charset do not all come through to Python
        return codes

    def wrong(self, run, code, out, err, codes=None):
        "What is wrong with the end of a run, '' if nothing is. `codes`: other exit codes than those of `expected`."
        drawn, codes = run.drawn, codes or self.expected(run.drawn)
        said, prompt = text_of(err, encoding_of(drawn)), drawn.get("prompt", "ids")
        lines = said.splitlines()
        told = [line for line in lines if not (compiled(drawn) or drawn.get("cache") == "damaged")
                or "NUMBA_CACHE_DIR" not in line]
        if code is None:
            return "hangs"
        if code < 0 or code > 128:
            return f"ended by a signal, {code}"
        if "Traceback" in said:
            return "a traceback"
        if code not in codes:
            return f"exit code {code}, expected {' or '.join(map(str, sorted(codes)))}"
        left = code == 1 and drawn.get("stdout") in ("closed early", "closed after a line")  # then nothing need be said
        if len(lines) - len(told) > 1 or not (left and not told) and (
                len(told) != (code != 0) * (drawn.get("stderr") is None)):
            return f"{len(lines)} lines on stderr, expected {'one' if code else 'none'}"
        command = drawn.get("words", ["decode"])[0]
        if told and not (told[0].startswith((f"k3 {command}: ", "k3: ")) and 20 < len(told[0]) < 1500):
            return "not a clear line"
        if code == 0 and "words" not in drawn:
            charsets = [(encoding_of(drawn) or ":").split(":")[0]]
            charsets = [*filter(None, charsets)] or ["utf-8", "ascii", "big5", "euc-jp", "iso8859-1", "iso8859-9"]
            expected = [self.texts[prompt].encode(name, "backslashreplace").decode(name) for name in charsets]
            if not any(text_of(out, name) == text for name, text in zip(charsets, expected)):
                return f"another text: {out!r}"
        return self.wrong_files(run, code, prompt)

    def wrong_files(self, run, code, prompt):
        "What is wrong with the files that a run has left."
        own = [*run.outputs, run.folder / "stdout", *run.kept()]
        left = sorted(path for path in run.everything() - run.before
                      if not any(Path(os.fsdecode(path)).is_relative_to(mine) for mine in own))
        if left:
            return f"leaves {left[0]!r} behind"
        saved = [path for path in run.outputs if path.exists()]
        if code in (0, 1) and len(saved) < len(run.outputs) and "FSIZE" not in run.drawn and not (
                code == 1 and {"AS", "DATA", "NPROC", "NOFILE"} & {*run.drawn}):
            return f"{len(saved)} of {len(run.outputs)} files are saved"
        for path in saved:
            data = path.read_bytes()
            part = code == 1 and "FSIZE" in run.drawn  # a run that fails half way keeps what it has
            if path.suffix == ".json":
                ids = json.loads(data)["ids"]
                if ids != self.ids[prompt][:len(ids) if part else NEW]:
                    return "the report holds other ids"
            elif data != self.logits[prompt] and not (part and self.logits[prompt][128:].startswith(data[128:])):
                return "other logits"
        return ""


def description(drawn):
    "The drawing on one line."
    return ", ".join(f"{name}={value!r}" for name, value in drawn.items()) or "as usual"


def one(number, seed, compiles, machine, judge):
    "Run number `number`: (drawing, exit code, what is wrong or '', what was said)."
    rng = random.Random(f"{seed} {number}")
    drawn = draw(rng, machine, compiles)
    with tempfile.TemporaryDirectory(dir=machine.home, ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        run = Run(drawn, machine, Path(folder) / "run")
        code, out, err = run()
        wrong = judge.wrong(run, code, out, err)
    return drawn, code, wrong, text_of(err, encoding_of(drawn))


def numbers_that_compile(runs, most):
    "Which runs compile: `most` of them, spread evenly."
    return {n * runs // most for n in range(most)}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--only", type=int, metavar="N", help="run number N of the seed alone, and show all it said")
    parser.add_argument("--compiled", type=int, default=6, metavar="N", help="runs that compile kernels (default: 6)")
    args = parser.parse_args(arguments)
    began, lock, counts, bad, compilations = time.perf_counter(), threading.Lock(), Counter(), [], 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        machine = Machine(home)
        judge = Judge(machine)
        may = numbers_that_compile(args.runs, args.compiled)
        numbers = range(args.runs) if args.only is None else [args.only]

        def run(number):
            nonlocal compilations
            drawn, code, wrong, said = one(number, args.seed, number in may, machine, judge)
            with lock:
                compilations += compiled(drawn)
                counts["wrong" if wrong else "same ids" if code == 0 else f"one clear line, exit code {code}"] += 1
                if wrong:
                    bad.append(number)
                    print(f"WRONG {number}: {wrong}\n  {description(drawn)}\n  said: {said.strip()[-600:]!r}\n  again: "
                          f"python tests/environments.py --seed {args.seed} --runs {args.runs} "
                          f"--compiled {args.compiled} --only {number}", flush=True)
                elif args.only is not None:
                    print(f"{description(drawn)}\nexit code {code}: {said}")

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(run, numbers))
    print("\n".join(f"not drawn here: {line}" for line in machine.lacks) + "\n" * bool(machine.lacks), end="")
    print(f"{len(numbers)} runs, seed {args.seed}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
          + f"; {compilations} compiled kernels; {time.perf_counter() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
