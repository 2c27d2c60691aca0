"""Small parameters of a chapter work, or are refused in words, and before the chapter's experiments.

The chapters are run as papermill runs them: the parameters are set after that cell.
"""
import os
from pathlib import Path

import jupytext
import matplotlib
import pytest

import k3lib

BOOK = Path(k3lib.__file__).parents[1] / "book"


def chapter_with(parameter):
    "(path, cells) of the first chapter with this parameter."
    for path in sorted(BOOK.glob("[0-9]*/[0-9]*.py")):
        if 'tags=["parameters"' in (text := path.read_text(encoding="utf-8")):
            cells = [cell for cell in jupytext.reads(text, fmt="py:percent").cells if cell.cell_type == "code"]
            if any("parameters" in cell.metadata.get("tags", []) and f"\n{parameter} =" in f"\n{cell.source}"
                   for cell in cells):
                return path, cells
    raise AssertionError(f"no chapter has a parameter {parameter}")


@pytest.mark.parametrize("parameter, value", [("tokens", 1), ("tokens", 0), ("tokens", True), ("tokens", "64"),
                                              ("steps", 2), ("steps", 0), ("steps", -1), ("steps", 4.0)])
def test_a_small_or_wrong_parameter_is_refused_in_words(monkeypatch, parameter, value):
    path, cells = chapter_with(parameter)
    monkeypatch.chdir(path.parent)
    matplotlib.use("agg")
    space, after = {"__name__": "__main__"}, None
    with pytest.raises(ValueError, match=rf"^{parameter} is {value!r}: a whole number from \d+ on is needed$"):
        for number, cell in enumerate(cells):
            exec(compile(cell.source, str(path), "exec"), space)
            if "parameters" in cell.metadata.get("tags", []):
                space[parameter], after = value, number
    assert after is not None and number == after + 1, f"refused in cell {number}, the parameters are in {after}"
    assert os.getcwd() == str(path.parent)


def test_a_budget_that_is_refused_costs_no_experiment(monkeypatch):
    path, cells = chapter_with("ram")
    monkeypatch.chdir(path.parent)
    matplotlib.use("agg")
    space, begun = {"__name__": "__main__"}, []
    with pytest.raises(SystemExit, match=r"^a budget of 1\.0 MB is [\d.]+ MB short: "):
        for cell in cells:
            begun.append(cell)
            exec(compile(cell.source, str(path), "exec"), space)
            if "parameters" in cell.metadata.get("tags", []):
                space["ram"] = "1MB"
    assert "run" in begun[-1].metadata.tags and len(begun) < 6, f"refused in cell {len(begun)} of {len(cells)}"
