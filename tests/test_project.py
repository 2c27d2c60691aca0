"""The house itself: lists of packages that agree, a stated public surface, annotations, an import that stays light,
notebooks that name no machine, sources in the archive, and a history of measurements."""
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
MADE = sorted(p.stem for p in (ROOT / "k3lib").glob("[a-z]*.py") if p.stem != "cli")  # modules that chapters make
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
    found = imported([*(ROOT / "book").rglob("*.py"), *(ROOT / "tests").glob("*.py")])
    assert found - by_jupyter <= names([*PROJECT["dependencies"], *EXTRAS["book"]])


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


@pytest.mark.parametrize("change", ["sys.byteorder = 'big'", "sys.maxsize = 2**31 - 1"])
def test_a_system_whose_answers_would_be_wrong_is_refused(change):
    run = subprocess.run([sys.executable, "-c", f"import sys; {change}; import k3lib"], capture_output=True, text=True)
    assert run.returncode == 1 and "ImportError: k3lib needs a 64-bit little-endian Python" in run.stderr


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
    "A source archive, made without network, holds every file of the repository."
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("this tree is no git checkout: its files are those of the archive")
    script = f"from setuptools.build_meta import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked.stdout.splitlines()) - held == set()


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
