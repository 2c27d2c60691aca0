"The sync check: it must see a module edited by hand, a source that moved on, a notebook not executed, an arrow against the book."
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def house(tmp_path):
    for folder in ("book", "k3lib"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    return tmp_path


def check(house):
    run = subprocess.run([sys.executable, house / "book" / "tangle.py", "--check"], capture_output=True, text=True)
    return run.returncode, run.stderr


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_tree_is_in_sync(house):
    assert check(house) == (0, "")


def test_a_module_edited_by_hand(house):
    with (house / "k3lib" / "router.py").open("a") as module:
        module.write("# by hand\n")
    code, text = check(house)
    assert code == 1 and "k3lib/router.py is stale" in text


def test_a_source_that_moved_on(house):
    edit(house / "book" / "04_moe_router" / "01_router.py", "# # 4.1", "# # 4.1 really,")
    code, text = check(house)
    assert code == 1 and "01_router.ipynb differs from its source" in text


def test_a_notebook_that_was_not_executed(house):
    path = house / "book" / "04_moe_router" / "01_router.ipynb"
    notebook = json.loads(path.read_text())
    next(c for c in notebook["cells"] if c["cell_type"] == "code")["execution_count"] = None
    path.write_text(json.dumps(notebook))
    code, text = check(house)
    assert code == 1 and "01_router.ipynb is not executed" in text


def test_an_import_against_the_arrows(house):
    edit(house / "book" / "01_mxfp4" / "03_linear.py", "from k3lib.mxfp4 import", "from k3lib.model import Model\nfrom k3lib.mxfp4 import")
    code, text = check(house)
    assert code == 1 and "imports k3lib.model, but linear may import only" in text


def test_a_module_without_a_chapter(house):
    (house / "k3lib" / "helpers.py").write_text("")
    code, text = check(house)
    assert code == 1 and "k3lib/helpers.py has no chapter" in text
