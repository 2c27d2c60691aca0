"""Every file has the same bytes in every clone and archive, whatever a user's configuration of git says.

The repository is that of the package which is imported: its files as they lie in the working tree.
"""
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import k3lib

TREE = Path(k3lib.__file__).parents[1]
HOSTILE = """* text eol=crlf ident filter=loud working-tree-encoding=UTF-16 export-ignore export-subst
*.json text
*.tiktoken text
"""  # a user's own file of attributes
MODEL = "fixtures/oracle13/model"


def git(folder, *arguments, env=None):
    "What git prints, without the configuration of this machine but with a user's `env`."
    quiet = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1"}
    names = [f"GIT_{role}_{what}" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=True,
                         env=kept | quiet | dict.fromkeys(names, "x") | (env or {}))
    return run.stdout


@pytest.fixture(scope="module")
def files():
    "{name: bytes} of the repository's files."
    if shutil.which("git") is None:
        pytest.skip("there is no git here")
    tracked = subprocess.run(["git", "-c", f"safe.directory={TREE}", "ls-files", "-z"], cwd=TREE, capture_output=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("this tree is no git checkout: it has no list of its files")
    names = [os.fsdecode(name) for name in tracked.stdout.split(b"\0")[:-1]]
    return {name: (TREE / name).read_bytes() for name in names if (TREE / name).exists()}


@pytest.fixture(scope="module")
def repository(files, tmp_path_factory):
    "A repository of these files; git changes no byte on their way in, so what it holds is what lies here."
    home = tmp_path_factory.mktemp("repository")
    for name, data in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)
    git(home, "init", "--quiet", "--initial-branch=main")
    (home / ".git" / "info").mkdir(exist_ok=True)
    (home / ".git" / "info" / "attributes").write_text("* -text\n")
    git(home, "add", "--all", "--force")
    git(home, "commit", "--quiet", "--message=all")
    (home / ".git" / "info" / "attributes").unlink()
    return home


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    "Variables of a user whose configuration changes whatever it can."
    folder = tmp_path_factory.mktemp("user")
    (folder / "attributes").write_text(HOSTILE)
    (folder / "config").write_text(f"""[core]
    autocrlf = true
    attributesFile = {(folder / "attributes").as_posix()}
[filter "loud"]
    smudge = tr a-z A-Z
    clean = tr A-Z a-z
    required = true
""")
    return {"GIT_CONFIG_GLOBAL": str(folder / "config")}


def differing(files, folder):
    "Names of files that are missing or have other bytes."
    return [name for name, data in files.items()
            if not (folder / name).is_file() or (folder / name).read_bytes() != data]


def clone(repository, folder, *options, env=None):
    git(repository, "clone", "--quiet", *options, str(repository), str(folder), env=env)
    return folder


@pytest.mark.parametrize("options", [["autocrlf=true"], ["autocrlf=false", "eol=crlf"], ["autocrlf=input"]], ids=str)
def test_a_clone_has_the_same_bytes(files, repository, tmp_path, options):
    words = [word for option in options for word in ("-c", f"core.{option}")]
    assert differing(files, clone(repository, tmp_path / "clone", *words)) == []


def test_a_clone_of_a_user_whose_attributes_change_everything(files, repository, hostile, tmp_path):
    folder = clone(repository, tmp_path / "clone", env=hostile)
    assert differing(files, folder) == []
    for name in files:
        (folder / name).unlink()
    git(folder, "-c", "core.autocrlf=true", "checkout", "--quiet", "--", ".", env=hostile)
    assert differing(files, folder) == [] and git(folder, "status", "--porcelain", env=hostile) == b""


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_an_archive_has_the_same_bytes(files, repository, hostile, form):
    data = io.BytesIO(git(repository, "archive", f"--format={form}", "HEAD", env=hostile))
    if form == "zip":
        with zipfile.ZipFile(data) as archive:
            held = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    else:
        with tarfile.open(fileobj=data) as archive:
            held = {file.name: archive.extractfile(file).read() for file in archive if file.isfile()}
    assert sorted(held) == sorted(files) and [name for name in files if held[name] != files[name]] == []


def test_git_is_told_what_every_file_is(files, repository):
    "No file's line ends are left to a configuration."
    answer = git(repository, "check-attr", "-z", "text", "eol", "--", *files).split(b"\0")
    told = {}
    for name, attribute, value in zip(answer[::3], answer[1::3], answer[2::3]):
        told.setdefault(os.fsdecode(name), {})[attribute] = value
    assert [name for name, said in told.items() if said[b"text"] != b"unset" and said[b"eol"] != b"lf"] == []
    assert {said[b"text"] for name, said in told.items() if name.startswith("fixtures/")} == {b"unset"}


def test_the_embedded_model_of_such_a_clone(repository, hostile, tmp_path):
    "It is whole, and it decodes a text prompt."
    folder = clone(repository, tmp_path / "clone", "-c", "core.autocrlf=true", env=hostile) / MODEL
    for words in ["verify", folder], ["decode", folder, "--prompt", "The capital", "--max-new-tokens", "1"]:
        run = subprocess.run([sys.executable, "-m", "k3lib", *words], cwd=TREE, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_check_reads_bytes(repository, tmp_path):
    "A chapter, a module, a notebook, a fixture, a document and a test get other line ends: each is named."
    folder = clone(repository, tmp_path / "clone")
    names = ["README.md", "book/02_kda/02_kda.ipynb", "book/02_kda/02_kda.py", f"{MODEL}/tiktoken.model",
             "k3lib/kda.py", "tests/test_kda.py"]
    for name in names:
        (folder / name).write_bytes((folder / name).read_bytes().replace(b"\n", b"\r\n"))
    run = subprocess.run([sys.executable, "book/tangle.py", "--check"], cwd=folder, capture_output=True, text=True)
    said = sorted(line.split()[0] for line in run.stderr.splitlines() if line.endswith("where \\n is expected"))
    assert run.returncode == 1 and said == names, run.stderr


# What other systems and hosts allow

def test_names_and_sizes_that_every_system_can_hold(files):
    lower = [name.lower() for name in files]
    assert len({*lower}) == len(lower), "two names differ by case only"
    reserved = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")
    bad = [name for name in files if len(name) > 150 or not re.fullmatch(r"[\w./-]+", name, re.ASCII)
           or any(part.endswith(".") or reserved.match(part) for part in name.split("/"))]
    assert bad == []
    assert [name for name, data in files.items() if len(data) > 10_000_000] == []
    assert [name for name in files if (TREE / name).is_symlink()] == []


def test_text_is_written_with_newlines_on_every_system(files):
    "Where the package, or a program whose outputs are kept, opens a file for text, it says which line ends it has."
    programs = [name for name in files if re.fullmatch(r"k3lib/.*\.py|book/\w+\.py|tests/(bench|history)\w*\.py", name)]
    text = re.compile(r"""\.write_text\((?!.*newline=).*|\bopen\([^#\n]*["'][wax]\+?t?["'](?!.*newline=).*""")
    found = [f"{name}: {match[0]}" for name in programs for match in text.finditer(files[name].decode())]
    assert len(programs) > 35 and found == []
