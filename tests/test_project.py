"The house itself: two lists of packages that must agree, notebooks that name no machine, an import that stays light."
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_environment_names_the_dependencies_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = set(project["dependencies"]) | set(project["optional-dependencies"]["book"]) | {"python" + project["requires-python"]}
    lines = re.findall(r"^  - (\S+)$", (ROOT / "environment.yml").read_text(), re.M)
    assert set(lines) - {"conda-forge", "pip", "pip:"} == wanted


def test_notebooks_hold_no_path_of_a_machine():
    for path in sorted((ROOT / "book").glob("*/*.ipynb")):
        outputs = [o for cell in json.loads(path.read_text())["cells"] for o in cell.get("outputs", [])]
        text = json.dumps([{k: v for k, v in o.items() if k != "data"} | {"plain": o.get("data", {}).get("text/plain")} for o in outputs])
        found = re.search(r"(/home/|/root/|/tmp/|/work/|/usr/|/Users/|[A-Z]:\\\\)[^\"]{0,40}", text)
        assert not found, f"{path.name}: an output names {found[0]!r}"


def test_importing_the_package_imports_no_heavy_library():
    code = "import sys, k3lib; print([m for m in ('numba', 'numpy', 'tokenizers', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_python_m_k3lib_is_the_command():
    run = subprocess.run([sys.executable, "-m", "k3lib", "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "decode" in run.stdout and "census" in run.stdout
