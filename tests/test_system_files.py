"""What the system tells is bytes, in no language, and any line of it may be missing: each run says what stands in."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import k3lib

PACKAGE = Path(k3lib.__file__).parent
MODEL = Path(__file__).resolve().parents[1] / "fixtures" / "oracle13" / "model"


def python(code, *args, flags=(), **env):
    "Run Python code with these arguments."
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **env}
    return subprocess.run([sys.executable, *flags, "-c", code, *map(str, args)], env=env, capture_output=True,
                          encoding="utf-8", errors="surrogateescape")


# Bytes, whatever the language

@pytest.mark.skipif(not os.path.exists("/proc/self/comm"), reason="this system has no such file")
def test_the_name_of_a_process_may_end_in_the_middle_of_a_character():
    "The system keeps 15 bytes of a name: of these sixteen, one third of a character is left over."
    name = "a" + 5 * "\N{CJK UNIFIED IDEOGRAPH-795E}"
    run = python(f"open('/proc/self/comm', 'wb').write({name.encode()!r})\n"
                 "b = open('/proc/self/status', 'rb').read()\n"
                 "import k3lib, sys\n"
                 "k3lib.load(sys.argv[1], '1GB').close()\n"
                 "print(b.split()[1])", MODEL)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{name.encode()[:15]}\n"


@pytest.fixture(scope="module")
def authored(tmp_path_factory):
    "The embedded model with an author in its config, whose name is UTF-8."
    folder = tmp_path_factory.mktemp("models") / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["author"] = "\N{CJK UNIFIED IDEOGRAPH-795E}\N{LATIN SMALL LETTER E WITH ACUTE}"
    (folder / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def locales(tmp_path_factory):
    "{name: environment}. Python's own UTF-8 mode is off; BIG5 only where this system can make such a locale."
    folder = tmp_path_factory.mktemp("locales")
    off = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8", "LANG": ""}
    found = {"C": {"LC_ALL": "C", **off}}
    command = ["localedef", "-i", "zh_TW", "-f", "BIG5", str(folder / "zh_TW.BIG5")]
    if shutil.which("localedef") and subprocess.run(command, capture_output=True).returncode in (0, 1):
        found["BIG5"] = {"LC_ALL": "zh_TW.BIG5", "LOCPATH": str(folder), **off}
    return found


COMMANDS = """
import json, locale, sys
from k3lib.cli import main
model, out, *names = sys.argv[1:]
commands = {
    "plan": ["plan", model, "--ram", "1GB"], "census": ["census", model, "--json", out], "verify": ["verify", model],
    "decode": ["decode", model, "--ids", "5,9", "--max-new-tokens", "2", "--ram", "1GB", "--json", out],
}
print([main(commands[name]) for name in names], locale.getpreferredencoding(False))
"""


def test_no_locale_decides_how_a_file_is_read(authored, locales, tmp_path):
    for name, env in locales.items():
        run = python(COMMANDS, authored, tmp_path / "out.json", "plan", "census", **env)
        codes, _, encoding = run.stdout.strip().splitlines()[-1].rpartition(" ")
        assert codes == "[0, 0]", f"{name}: {run.stderr}"
        assert encoding.upper().replace("-", "") != "UTF8", f"{name}: this run shows nothing"
        assert json.loads((tmp_path / "out.json").read_bytes())


STRICT = """
import sys, warnings
warnings.filterwarnings("error", category=EncodingWarning, module="k3lib")
""" + COMMANDS


def test_no_file_is_opened_without_saying_its_encoding(authored, tmp_path):
    commands = "plan", "census", "verify", "decode"
    run = python(STRICT, authored, tmp_path / "out.json", *commands, flags=("-X", "warn_default_encoding"))
    assert run.stdout.strip().splitlines()[-1].startswith("[0, 0, 0, 0]"), run.stderr


# Lines that are missing

# Each case replaces files of the system by a text, or takes them away (None)
PROC = "/proc/self/status", "/proc/self/statm", "/proc/self/io", "/proc/meminfo", "/proc/self/cgroup"
STATUS = "Name:\tx\nVmHWM:\t 99 kB\nVmRSS:\t 120000 kB\nRssFile:\t 60000 kB\n"
MEMINFO = "MemTotal: 99999999 kB\nMemFree: 20000000 kB\nBuffers: 10 kB\nCached: 500 kB\nShmem: 9 kB\n"
CASES = {  # case: (files, what the plan says)
    "no MemAvailable": ({"/proc/meminfo": MEMINFO}, "free memory of the machine: MemFree + Buffers + Cached - Shmem"),
    "no Shmem": ({"/proc/meminfo": "MemFree: 20000000 kB\nCached: 1 kB\n"}, "free memory of the machine: MemFree"),
    "an empty meminfo": ({"/proc/meminfo": ""}, "free memory of the machine: all memory of the machine"),
    "a malformed meminfo": ({"/proc/meminfo": "MemAvailable:\nMemFree\n\nMemFree: kB 5\n"},
                            "free memory of the machine: all memory of the machine"),
    "no VmRSS": ({"/proc/self/status": "Name:\tx\n", "/proc/self/statm": None},
                 "memory of this process: 150.0 MB assumed"),
    "no RssFile": ({"/proc/self/status": "VmRSS: 120000 kB\n", "/proc/self/statm": "1\n"},
                   "of libraries: 60.0 MB assumed"),
    "a malformed status": ({"/proc/self/status": "VmRSS: many kB\nRssFile:\n", "/proc/self/statm": "a b c"},
                           "memory of this process: 150.0 MB assumed"),
    "an empty status": ({"/proc/self/status": ""}, ""),
    "a malformed cgroup": ({"/proc/self/cgroup": "\n:\nmemory\n4:memory\n0::\n5:cpu:/a:b\n0::/../../elsewhere\n"}, ""),
    "no rchar": ({"/proc/self/io": "wchar: 5\nrchar:\n"}, ""),
    "no files at all": (dict.fromkeys(PROC), "memory of this process: 150.0 MB assumed"),
}
REPLACED = """
import builtins, contextlib, io, json, os, sys
real, texts = builtins.open, {}
def replaced(file, mode="r", *args, **more):
    text = texts.get(str(file), "")
    if str(file) not in texts:
        return real(file, mode, *args, **more)
    if text is None:
        raise FileNotFoundError(2, "No such file or directory", file)
    return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text)
builtins.open = io.open = replaced
from k3lib.cli import main
found = {}
for command, words in json.loads(sys.argv[2]).items():
    for name, (files, _) in json.loads(sys.argv[1]).items():
        texts.clear()
        texts.update(files)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        found.setdefault(command, {})[name] = code, out.getvalue(), err.getvalue()
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def runs():
    "{command: {case: (exit code, stdout, stderr)}}, all in one process."
    commands = {"plan": ["plan", str(MODEL), "--ram", "1GB"],
                "decode": ["decode", str(MODEL), "--ids", "5,9", "--max-new-tokens", "2", "--ram", "1GB"]}
    run = python(REPLACED, json.dumps({"as it is": ({}, ""), **CASES}), json.dumps(commands))
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES)
def test_a_line_that_is_missing_stops_nothing_and_what_stands_in_is_said(runs, case):
    for command, cases in runs.items():
        code, out, err = cases[case]
        assert code == 0 and err == "", f"{command}: {err}"
        assert CASES[case][1] in out
        if command == "decode":
            ids, usual = (text[text.index("generated ids"):].splitlines()[0] for text in (out, cases["as it is"][1]))
            assert ids == usual
        if not CASES[case][1]:
            assert "assumed" not in out and "free memory of the machine" not in out


CORES = """
import os, sys
os.cpu_count = lambda: None
if hasattr(os, "sched_getaffinity"):
    del os.sched_getaffinity
from k3lib.cli import main
sys.exit(main(["decode", sys.argv[1], "--ids", "5", "--max-new-tokens", "1", "--ram", "1GB"]))
"""


@pytest.mark.large
def test_a_system_that_does_not_count_its_cores():
    run = python(CORES, MODEL)
    assert run.returncode == 0 and "1 new, 1 threads" in run.stdout, run.stderr
