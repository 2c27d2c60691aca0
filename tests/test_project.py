"""The house itself: lists of packages that agree, a stated public surface, annotations, an import that stays light,
calls of the system in one module, documents whose paths and commands exist, notebooks that name no machine, sources in
the archive, and a history of measurements."""
import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import typing
from pathlib import Path

import history
import pytest

import k3lib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HAND_WRITTEN = ["__init__", "__main__", "arguments", "cli"]
MADE = sorted({p.stem for p in (ROOT / "k3lib").glob("*.py")} - {*HAND_WRITTEN})  # modules that chapters make
EXTRAS = PROJECT["optional-dependencies"]


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def imported(paths):
    "Packages that are not Python's own and not ours, as the files import them."
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
    return found - set(sys.stdlib_module_names) - {path.stem for path in (ROOT / "tests").glob("*.py")} - {"k3lib"}


def test_environment_names_the_dependencies_of_pyproject():
    wanted = {*PROJECT["dependencies"], *EXTRAS["book"], *EXTRAS["dev"], "python" + PROJECT["requires-python"]}
    lines = re.findall(r"^  - (\S+)$", (ROOT / "environment.yml").read_text(), re.M)
    assert set(lines) - {"conda-forge", "pip", "pip:"} == wanted


def test_dependencies_are_what_the_package_imports():
    assert names(PROJECT["dependencies"]) == imported((ROOT / "k3lib").glob("*.py"))


def test_the_book_and_the_tests_import_what_is_declared():
    by_jupyter = {"IPython", "jupyter_client", "nbclient", "nbformat"}
    own = {path.stem for folder in ("book", "fixtures/stories") for path in (ROOT / folder).glob("*.py")}
    found = imported([*(ROOT / "book").rglob("*.py"), *(ROOT / "tests").glob("*.py")])
    assert found - by_jupyter - own <= names([*PROJECT["dependencies"], *EXTRAS["book"], *EXTRAS["site"]])


def test_packages_whose_private_interfaces_are_used_have_an_upper_bound():
    for requirement in PROJECT["dependencies"]:
        if requirement.startswith(("numba", "llvmlite")):
            assert re.search(r",<\d", requirement), requirement


def test_notebooks_hold_no_path_of_a_machine():
    for path in sorted((ROOT / "book").rglob("*.ipynb")):
        outputs = [o for cell in json.loads(path.read_text())["cells"] for o in cell.get("outputs", [])]
        texts = [{k: v for k, v in o.items() if k != "data"} | {"plain": o.get("data", {}).get("text/plain")}
                 for o in outputs]
        found = re.search(r"(/home/|/root/|/tmp/|/work/|/usr/|/Users/|[A-Z]:\\\\)[^\"]{0,40}", json.dumps(texts))
        assert not found, f"{path.name}: an output names {found[0]!r}"


# Documents

DOCUMENTS = ["README.md", "book/README.md", "CONTRIBUTING.md"]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_contents_list_every_chapter():
    "book/README.md: title, path and module of each chapter, in the order of reading."
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|.*\| (.*?) ?\|$", (ROOT / "book" / "README.md").read_text(), re.M)
    chapters = []
    for path in sorted((ROOT / "book").glob("[0-9]*/[0-9]*.py")):
        text, name = path.read_text(), path.stem[3:]
        title = re.search(r"^# # (.*)", text, re.M)[1]
        module = f"`k3lib.{name}`" if 'tags=["export"]' in text else ""
        chapters.append((title, path.with_suffix(".ipynb").relative_to(ROOT / "book").as_posix(), module))
    assert rows == chapters


def test_the_readme_links_to_every_chapter():
    text = (ROOT / "README.md").read_text()
    linked = re.findall(r"\[\**(\w+)\**\]\((book/\d\w+/\w+)\.ipynb\)", text)
    chapters = [path.relative_to(ROOT).with_suffix("").as_posix() for path in (ROOT / "book").glob("[0-9]*/[0-9]*.py")]
    assert [path for _, path in linked] == sorted(chapters)
    assert all(path.endswith(f"_{name}") for name, path in linked)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_paths_and_modules_in_documents_exist(document):
    "A notebook need not be there before it is made; its source must."
    text, folder = (ROOT / document).read_text(), (ROOT / document).parent
    links = [folder / link for link in re.findall(r"\]\(([^)#:]+)", text)]
    paths = [ROOT / path for path in re.findall(r"\b(?:book|k3lib|tests|fixtures|\.ci)/[\w/.]*\w", text)]
    modules = [ROOT / "k3lib" / f"{name}.py" for name in re.findall(r"\bk3lib\.(\w+)`", text)]
    gone = [str(path) for path in [*links, *paths, *modules]
            if not (path.with_suffix(".py") if path.suffix == ".ipynb" else path).exists()
            and not list(path.parent.glob(f"{path.name}*.py"))]
    assert not gone and paths


@pytest.mark.parametrize("document", [*DOCUMENTS, ".ci/run", ".pre-commit-config.yaml", "pyproject.toml"])
def test_make_targets_in_documents_exist(document):
    named = set(re.findall(r"(?:^|`|: )make ([a-z][a-z-]*)", (ROOT / document).read_text(), re.M))
    assert named and named <= set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))


def test_every_target_is_phony_and_calls_tools_as_modules():
    "Apple's make is 3.81, and a Windows venv has no bin: a recipe calls Python and its modules, nothing else."
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, re.M)
    assert re.search(r"^\.PHONY: (.*)", MAKEFILE, re.M)[1].split() == targets
    recipes = [line.strip() for line in MAKEFILE.splitlines() if line.startswith("\t")]
    others = [line for line in recipes if not re.match(r"@?\$\((PY|PYTHON|PYTEST)\) ", line)]
    assert others == ["mkdir -p out", next(line for line in recipes if line.startswith("rm -rf .venv "))]


# The package

def test_importing_the_package_imports_no_heavy_library():
    code = "import sys, k3lib; print([m for m in ('numba', 'numpy', 'tokenizers', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_python_m_k3lib_is_the_command():
    run = subprocess.run([sys.executable, "-m", "k3lib", "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "decode" in run.stdout and "census" in run.stdout


def test_dir_shows_the_public_surface_and_every_name_is_there():
    assert {"load", "Checkpoint", "Tokenizer", "Report"} <= set(k3lib.__all__)
    assert dir(k3lib) == sorted([*k3lib.__all__, "__version__"])
    for name in k3lib.__all__:
        assert getattr(k3lib, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        k3lib.nothing  # noqa: B018


WRONG_CPUS = ["sys.byteorder = 'big'", "sys.maxsize = 2**31 - 1"]


@pytest.mark.parametrize("module", ["k3lib", "k3lib.mxfp4", "k3lib.matmul"])
@pytest.mark.parametrize("change", WRONG_CPUS)
def test_a_system_whose_answers_would_be_wrong_is_refused(change, module):
    code = f"import sys; {change}; import {module}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and "ImportError: k3lib needs a 64-bit little-endian Python" in run.stderr


@pytest.mark.parametrize("change, code", [("pass", 0), *((change, 1) for change in WRONG_CPUS)])
def test_make_refuses_it_before_it_installs_anything(change, code):
    recipe = MAKEFILE.partition("\n.venv/ready:")[2].partition("$(PYTHON) -m venv")[0]
    checks = re.findall(r"^\t\$\(PYTHON\) -c '(.*)'$", recipe, re.M)
    codes = [f"import sys; {change}; exec({check!r})" for check in checks]
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for code in codes]
    assert len(codes) == 2 and max(run.returncode for run in runs) == code
    assert not code or "a 64-bit little-endian Python is needed" in "".join(run.stderr for run in runs)


# What some system lacks, spelled in Python: chapter 5.1 has a function for each
SYSTEM_CALLS = re.compile(
    r"\bos\.(preadv?|readv|posix_\w+|O_\w+|SEEK_DATA|SEEK_HOLE|set_blocking|sysconf|sched_\w+|mkfifo|statvfs)\b"
    r"|\bst_blocks\b|\bsys\.platform\b|\bplatform\.|\bos\.name\b|/proc/(?!self/cgroup)"
    r"|^\s*(?:import|from) (?:ctypes|fcntl|mmap|resource|termios)\b", re.M)


@pytest.mark.parametrize("module", [*HAND_WRITTEN, *MADE])
def test_calls_that_some_system_lacks_stand_in_one_module(module):
    text = (ROOT / "k3lib" / f"{module}.py").read_text()
    found = [text[:match.start()].count("\n") + 1 for match in SYSTEM_CALLS.finditer(text)]
    assert bool(found) == (module == "system"), [text.splitlines()[n - 1].strip() for n in found]


def public_functions(module):
    "(name, node) of public functions and of public methods of public classes, kernels and intrinsics left out."
    for node in ast.parse((ROOT / "k3lib" / f"{module}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(d).split("(")[0] for d in node.decorator_list}
            if not node.name.startswith("_") and not decorators & {"kernel", "inner", "intrinsic", "njit"}:
                yield node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from ((f"{node.name}.{m.name}", m) for m in node.body if isinstance(m, ast.FunctionDef)
                        and (m.name == "__init__" or not m.name.startswith("_")))


def unannotated(function):
    "Names of parameters without annotation, and `return`."
    a = function.args
    parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    yield from (p.arg for p in parameters if p.annotation is None and p.arg not in ("self", "cls"))
    if function.returns is None and function.name != "__init__":
        yield "return"


@pytest.mark.parametrize("module", ["__init__", "__main__", *MADE])
def test_public_functions_are_annotated(module):
    missing = [f"{name}: {', '.join(found)}" for name, node in public_functions(module)
               if (found := list(unannotated(node)))]
    assert not missing


@pytest.mark.parametrize("module", MADE)
def test_annotations_can_be_evaluated(module):
    "typing.get_type_hints, as documentation tools and IDEs call it, finds every name in an annotation."
    loaded = importlib.import_module(f"k3lib.{module}")
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            typing.get_type_hints(value)


def test_kernels_are_compiled_by_the_books_decorators():
    "numba's own cache does not see an edited function in another file; k3lib.kernel_cache's does."
    for path in (ROOT / "k3lib").glob("*.py"):
        if path.stem != "kernel_cache":
            found = re.search(r"^[ \t]*@\w*jit\b.*|cache=True", path.read_text(), re.M)
            assert not found, f"{path.name}: {found[0]}"


# The archive

def test_the_archive_holds_what_the_tests_read(tmp_path):
    "A source archive, made without network, holds every file of the repository, byte for byte."
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("this tree is no git checkout: its files are those of the archive")
    script = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {file.name.partition("/")[2]: archive.extractfile(file).read() for file in archive if file.isfile()}
    assert set(tracked.stdout.splitlines()) - held.keys() == set()
    assert [name for name in tracked.stdout.splitlines() if held[name] != (ROOT / name).read_bytes()] == []


# The history of measurements

def test_the_history_keeps_machine_commit_and_date(tmp_path):
    file, machine = tmp_path / "measured" / "history.jsonl", {"cpu": "a CPU", "cores": 2}
    history.append("bench", machine, {"a token": "7.7 s", "peak": "950 MB"}, file)
    history.append("bench", machine, {"a token": "6.7 s"}, file)
    lines = history.entries(file)
    assert [set(line) for line in lines] == [{"date", "commit", "command", "machine", "figures"}] * 2
    assert re.fullmatch(r"[0-9a-f]{9}\+?|unknown", lines[0]["commit"])
    text = history.table(lines, "token")
    assert text.splitlines()[:2] == ["a CPU, 2 cores", "  bench: a token"]
    assert text.index("7.7 s") < text.index("6.7 s") and "950 MB" not in text
