"""Measurements of earlier commits (`make bench-history`). Every run of `make bench` and `make scale` adds a line.

The file is fixtures/measured/history.jsonl, one JSON object a line. Only lines of the same machine can be compared, and
even those only roughly: to compare two commits, let them take turns in one run. Needs no package but Python's own.
"""
import argparse
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "fixtures" / "measured" / "history.jsonl"


def commit():
    "Short name of the checked-out commit, with + if files differ from it; `unknown` outside a repository."
    def git(*arguments):
        return subprocess.check_output(["git", "-C", ROOT, *arguments], stderr=subprocess.DEVNULL, text=True).strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ":!fixtures/measured")  # a run writes it
        return git("rev-parse", "--short=9", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def append(command, machine, figures, file=FILE):
    "Add a line. `machine` holds cpu, cores and more; `figures` maps what was measured to a text with its unit."
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    line = {"date": now, "commit": commit(), "command": command, "machine": machine, "figures": figures}
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8", newline="\n") as out:
        out.write(json.dumps(line) + "\n")


def entries(file=FILE):
    "All lines of the file, oldest first."
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def table(lines, word=""):
    "Text: under each machine and figure, one row a run. Only figures whose name contains `word`."
    rows = {}
    for line in lines:
        for what, value in line["figures"].items():
            if word in what:
                machine = f"{line['machine']['cpu']}, {line['machine']['cores']} cores"
                rows.setdefault(machine, {}).setdefault(f"{line['command']}: {what}", []).append(
                    f"    {line['date']}  {line['commit']:<10}  {value}")
    return "\n".join(text for machine, figures in rows.items()
                     for text in (machine, *(t for what, runs in figures.items() for t in (f"  {what}", *runs))))


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("word", nargs="?", default="", help="print only figures whose name contains this")
    text = table(entries(), args.parse_args().word)
    print(text or f"nothing measured yet: `make bench` adds to {FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
