"""The exporter and the check: what they refuse, what they join, and that each message names the command that mends it.

All but one test use a small book of three chapters, made in a temporary folder.
"""
import contextlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
LEAF = '''# %% [markdown]
# # 1.1 The leaf

# %% tags=["export"]
SIZE = 2


class Tree:
    "A tree."

    def grow(self):
        return SIZE
    # nothing is pruned


# %% [markdown]
# Why a tree is felled.

# %% tags=["export"]
class Tree(Tree):
    "For the notebook."

    @property
    def height(self):
        return """
text at column 0
"""


def fell(tree):
    return tree.grow()


# %%
assert Tree().grow() == 2
'''
ROOTS = '''# %% [markdown]
# # 1.2 The root

# %% tags=["export"]
from k3lib.leaf import SIZE

DEPTH = 2 * SIZE
'''
STORY = "# %% [markdown]\n# # 2.1 A story without a module\n\n# %%\n1 + 1\n"
RUN = "run: python book/tangle.py --run 02_b/01_story"
CHAPTERS = {"01_a/01_leaf": LEAF, "01_a/02_root": ROOTS, "02_b/01_story": STORY}


class House:
    "A small book in a folder, and what its tangle.py says to some arguments: (exit code, text)."

    def __init__(self, folder):
        self.book, self.package = folder / "book", folder / "k3lib"
        self.package.mkdir(parents=True)
        for name, text in CHAPTERS.items():
            self.write(name, text)
        (self.book / "README.md").write_text("A small book.\n")
        for name in ("tangle.py", "jupytext.toml"):
            shutil.copy(ROOT / "book" / name, self.book)
        spec = importlib.util.spec_from_file_location("tangle", self.book / "tangle.py")
        self.tangle = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.tangle)
        self.pretend_to_run()

    def write(self, name, text):
        path = self.book / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, name, old, new):
        path = self.book / f"{name}.py"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    def pretend_to_run(self):
        "Write the modules, and every .ipynb as if its cells had been executed."
        self()
        for source in [*self.tangle.sources(), *self.tangle.answers()]:
            nb = self.tangle.notebook(source)
            for n, cell in enumerate(self.tangle.code_cells(nb), 1):
                cell.execution_count = n
            source.with_suffix(".ipynb").write_text(nbformat.writes(nb) + "\n")

    def prints(self, name, text):
        "Give the last code cell of a .ipynb this output."
        path = self.book / f"{name}.ipynb"
        nb = nbformat.reads(path.read_text(), 4)
        self.tangle.code_cells(nb)[-1].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
        path.write_text(nbformat.writes(nb) + "\n")

    def __call__(self, *arguments):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            try:
                self.tangle.main(arguments)
                code = None
            except SystemExit as end:
                code = end.code
        text = printed.getvalue()
        return (1, f"{text}{code}\n") if isinstance(code, str) else (code or 0, text)

    def check(self):
        "What --check says, without a new process."
        texts, wrong = self.tangle.modules()
        return [*wrong, *(f"{what}; run: {command}" for what, command in self.tangle.check(texts))]


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def test_the_tree_is_in_sync():
    run = subprocess.run([sys.executable, ROOT / "book" / "tangle.py", "--check"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_small_book_is_in_sync(house):
    assert house("--check") == (0, "")
    assert sorted(p.name for p in house.package.glob("*.py")) == ["leaf.py", "root.py"]


# What the check sees

def test_a_module_edited_by_hand(house):
    with (house.package / "root.py").open("a") as module:
        module.write("# by hand\n")
    assert house("--check") == (1, "k3lib/root.py is stale\nrun: make export\n")
    assert house() == (0, "") and house("--check") == (0, "")


def test_a_changed_constant_rewrites_one_module(house):
    before = {p: p.read_text() for p in house.package.glob("*.py")}
    house.edit("01_a/01_leaf", "SIZE = 2", "SIZE = 3")
    house()
    assert [p.name for p, text in before.items() if p.read_text() != text] == ["leaf.py"]


def test_code_that_moved_on(house):
    house.edit("02_b/01_story", "1 + 1", "1 + 2")
    assert house.check() == [f"book/02_b/01_story.ipynb differs from its source; {RUN}"]


def test_prose_that_moved_on_needs_no_run(house):
    house.edit("02_b/01_story", "A story", "A tale")
    assert house.check() == ["book/02_b/01_story.ipynb differs from its source, though not in its code; run: make tidy"]
    house("--tidy")
    assert house.check() == []


def test_a_notebook_that_was_not_executed(house):
    path = house.book / "02_b" / "01_story.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["execution_count"] = None
    path.write_text(json.dumps(notebook))
    assert house.check() == [f"book/02_b/01_story.ipynb is not executed; {RUN}"]
    path.unlink()
    assert house.check() == [f"book/02_b/01_story.ipynb is missing; {RUN}"]


def test_a_notebook_that_holds_an_error(house):
    path = house.book / "02_b" / "01_story.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][1]["outputs"] = [{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]
    path.write_text(json.dumps(notebook))
    assert house.check() == [f"book/02_b/01_story.ipynb holds an error; {RUN}"]


def test_a_wrong_version_that_no_gate_refuses(house):
    "A cell is tagged raises-exception to show that its gate fails. One that does not fail shows the opposite."
    house.edit("02_b/01_story", "# %%\n1 + 1", '# %% tags=["raises-exception"]\n1 + 1')
    house.pretend_to_run()
    assert house.check() == [
        f"book/02_b/01_story.ipynb holds a cell that should fail and does not: 1 + 1; {RUN}"]


def test_a_module_without_a_chapter(house):
    (house.package / "helpers.py").write_text("")
    assert house.check() == ["k3lib/helpers.py has no chapter; run: git rm k3lib/helpers.py"]


def spoil(path, old, new):
    "Replace bytes of a file, everywhere."
    path.write_bytes(path.read_bytes().replace(old, new))


def test_line_ends_of_a_windows_checkout(house):
    "Every file is named, one command mends all, and an export writes \\n whatever it reads."
    paths = sorted([*house.book.glob("[0-9]*/*"), *house.package.glob("*.py"), house.book / "tangle.py"])
    before = {path: path.read_bytes() for path in paths}
    for path in paths:
        spoil(path, b"\n", b"\r\n")
    wrong = "has \\r\\n line ends, the first in line 1, where \\n is expected; run: make tidy"
    said = [f"{house.tangle.place(path)} {wrong}" for path in paths]
    assert house.check() == said
    house()
    assert house.check() == [line for line in said if "k3lib/" not in line]
    house("--tidy")
    assert house.check() == [] and {path: path.read_bytes() for path in paths} == before


def test_line_ends_and_marks_of_single_files(house):
    "In the middle of a file, in a document, in a fixture, which is never rewritten; and a byte order mark."
    source, document, fixture = house.book / "02_b" / "01_story.py", house.book / "README.md", "fixtures/some/data.json"
    data = house.book.parent / fixture
    data.parent.mkdir(parents=True)
    data.write_bytes(b"{}\r\n")
    spoil(source, b"module\n", b"module\r\n")
    spoil(document, b"A small", b"\xef\xbb\xbfA small")
    assert house.check() == [
        "book/02_b/01_story.py has \\r\\n line ends, the first in line 2, where \\n is expected; run: make tidy",
        "book/README.md begins with a byte order mark; run: make tidy",
        f"{fixture} has \\r\\n line ends, the first in line 1, where \\n is expected; run: git checkout -- {fixture}"]
    house("--tidy")
    assert [line.split()[0] for line in house.check()] == [fixture] and data.read_bytes() == b"{}\r\n"


def test_a_chapter_that_is_not_utf_8(house):
    spoil(house.book / "02_b" / "01_story.py", b"story", b"stor\xff")
    assert house("--check") == (1, "book/02_b/01_story.py is not UTF-8: invalid start byte at byte 30\n")


def test_two_exports_at_once_never_show_half_a_file(house, monkeypatch):
    "What a reader finds in the middle of each write is the old file, whole."
    path = house.package / "leaf.py"
    before, found, really = path.read_bytes(), [], Path.write_bytes

    def halfway(self, data):
        really(self, data[:len(data) // 2])
        found.append(path.read_bytes())
        return really(self, data)

    monkeypatch.setattr(Path, "write_bytes", halfway)
    house.tangle.write(path, "new\n")
    assert found == [before] and path.read_bytes() == b"new\n" and not list(house.package.glob(".*"))


@pytest.mark.parametrize("prose, tidy", [
    ("word " * 30, "# " + "word " * 22 + "word\n# " + "word " * 6 + "word\n"),
    ("- " + "word " * 30, "# - " + "word " * 22 + "word\n#   " + "word " * 6 + "word\n"),
    ("a " * 58 + "aa - b", "# " + "a " * 57 + "a\n# aa - b\n"),  # a line that begins with - would be a list's item
])
def test_prose_is_wrapped(house, prose, tidy):
    source = house.book / "02_b" / "01_story.py"
    source.write_text(source.read_text().replace("# # 2.1", f"# # 2.1 T\n#\n# {prose}\n#\n# # 2.2"))
    assert "book/02_b/01_story.py:4 has" in "".join(house.tangle.wide_lines(source))
    house("--tidy")
    assert tidy in source.read_text()
    assert not [*house.tangle.wide_lines(source)]


@pytest.mark.parametrize("prose", ["|" + " x |" * 40, "$$\n# " + "a + " * 40 + "a\n# $$",
                                   "```\n# " + "code " * 30 + "x\n# ```"], ids=["table", "formula", "code"])
def test_tables_formulas_and_code_are_not_wrapped(house, prose):
    source = house.book / "02_b" / "01_story.py"
    source.write_text(source.read_text().replace("# # 2.1", f"# # 2.1 T\n#\n# {prose}\n#\n# # 2.2"))
    before = source.read_text()
    house("--tidy")
    assert source.read_text() == before


# The arrows

def test_an_import_from_a_later_chapter(house):
    house.edit("01_a/01_leaf", "SIZE = 2", "from k3lib.root import DEPTH\n\nSIZE = 2")
    wrong = "book/01_a/01_leaf.py imports k3lib.root, which no earlier chapter makes\n"
    assert house() == (0, wrong)
    assert house("--check")[0] == 1 and wrong in house("--check")[1]
    code, text = house("--graph")
    assert code == 1 and text.endswith("k3lib/leaf.py imports root, which a later chapter makes\n")


@pytest.mark.parametrize("line, wrong", [
    ("from k3lib.leaf import _hidden", "imports _hidden, which is private to k3lib.leaf"),
    ("from k3lib.leaf import np", "imports np from k3lib.leaf, which does not define it"),
    ("from k3lib import leaf", "imports k3lib: write `from k3lib.module import names`"),
    ("from .leaf import np", "imports np from k3lib.leaf, which does not define it"),
    ("import k3lib.leaf", "imports k3lib.leaf: write `from k3lib.module import names`"),
])
def test_an_import_the_book_does_not_allow(house, line, wrong):
    house.edit("01_a/02_root", "DEPTH = 2 * SIZE", f"def f():\n    {line}\n\n\nDEPTH = 2 * SIZE")
    assert f"book/01_a/02_root.py {wrong}" in house.check()


@pytest.mark.parametrize("name, text, wrong", [
    ("03_c/01_leaf", LEAF, "makes k3lib.leaf, as book/01_a/01_leaf.py does"),
    ("03_c/01_Leaf", LEAF, "makes k3lib.Leaf, as book/01_a/01_leaf.py does"),  # one file on some file systems
    ("03_c/01_cli", LEAF, "makes k3lib.cli, as k3lib/cli.py, which is written by hand, does"),
    ("03_c/01_x-y", LEAF, "its module would be k3lib.x-y, which Python cannot import"),
    *(("03_c/01_x", LEAF.replace("def fell", f"{again}\n\n\ndef fell"),
       f"defines {twice} twice, in the exported cells at lines {lines}") for again, twice, lines in (
        ("def SIZE(): pass", "SIZE", "5 and 20"), ("async def SIZE(): pass", "SIZE", "5 and 20"),
        ("def Tree():\n    pass", "Tree", "5 and 20"), ("class Tree:\n    pass", "Tree", "5 and 20"),
        ("from math import pi as SIZE", "SIZE", "5 and 20"), ("import SIZE.more", "SIZE", "5 and 20"),
        ("try:\n    import a\nexcept ImportError:\n    SIZE = 3", "SIZE", "5 and 20"),
        ("for SIZE in ():\n    pass", "SIZE", "5 and 20"), ("(SIZE, b), c = d", "SIZE", "5 and 20"),
        ("f = 1\nf: int = 2", "f", "20 and 20"), ("import f\nimport g as f", "f", "20 and 20"))),
])
def test_a_name_that_is_made_twice(house, name, text, wrong):
    house.write(name, text)
    for arguments in (), ("--check",):
        assert house(*arguments) == (1, f"book/{name}.py: {wrong}\n")


@pytest.mark.parametrize("again", [
    "if SIZE:\n    a = 1\nelse:\n    a = 2", "import os.path\nimport os\nimport os", "SIZE += 1",
    "for a in ():\n    b = 1\nfor a in ():\n    pass", "f = lambda SIZE: [Tree for Tree in SIZE]",
])
def test_a_name_that_is_made_once(house, again):
    house.write("03_c/01_x", LEAF.replace("def fell", f"{again}\n\n\ndef fell"))
    assert house() == (0, "")


def test_a_number_that_two_chapters_have(house):
    house.write("01_a/02_other", ROOTS)
    assert "book/01_a/02_root.py has the number 1.2, as book/01_a/02_other.py has\n" in house("--check")[1]


def test_the_graph(house):
    assert house("--graph") == (0, "   14  leaf\n    5  root           leaf\n2 modules, 1 arrows, 0 of them backward\n")
    assert "  root -> leaf\n" in house("--graph", "dot")[1]


def test_the_graph_names_what_is_over_its_bound(house):
    body = "".join(f"    x{n} = {n}\n" for n in range(401))
    head = '# %% [markdown]\n# # 3.1 X\n\n# %% tags=["export"]\n'
    house.write("03_c/01_x", f"{head}def f(a, b, c, d, e, f, g, h):\n{body}")
    text = house()[1] + house("--graph")[1]
    assert "over its bound: book/03_c/01_x.py: the exported cell that begins with f has 402 lines" in text
    assert "over its bound: k3lib/x.py has 405 lines of code" in text
    assert "over its bound: k3lib/x.py:6 f has 8 positional parameters" in text


# Links and numbers

@pytest.fixture
def linked(house):
    "The small book with links to the contents and to neighbours in each chapter."
    for name, text in CHAPTERS.items():
        heading = text.splitlines()[1]
        house.edit(name, heading, f"{heading}\n#\n# What it is about.\n#\n# [contents](../README.md)\n#\n# More of it.")
    house("--tidy")
    return house


def links_of(house, name):
    "The lines of the paragraph that links to the contents."
    paragraphs = (house.book / f"{name}.py").read_text().split("# %%")[1].split("\n#\n")
    found, = (paragraph for paragraph in paragraphs if "[contents]" in paragraph)
    return found.splitlines()


def test_links_to_neighbours_are_made(linked):
    assert links_of(linked, "01_a/01_leaf") == ["# [contents](../README.md) ·", "# [1.2 The root](02_root.ipynb)"]
    assert links_of(linked, "01_a/02_root") == [
        "# [1.1 The leaf](01_leaf.ipynb) ·", "# [contents](../README.md) ·",
        "# [2.1 A story without a module](../02_b/01_story.ipynb)"]
    assert links_of(linked, "02_b/01_story") == [
        "# [1.2 The root](../01_a/02_root.ipynb) ·", "# [contents](../README.md)"]
    text = (linked.book / "01_a" / "02_root.py").read_text()
    assert "# # 1.2 The root\n#\n# What it is about.\n#\n# [1.1" in text and "story.ipynb)\n#\n# More of it.\n" in text
    assert linked("--check") == (0, "")


def test_a_chapter_above_the_folders_links_too(linked):
    linked.write("00_all", "# %% [markdown]\n# # 0 All of it\n#\n# [contents](README.md)\n")
    linked("--tidy")
    assert links_of(linked, "00_all") == ["# [contents](README.md) ·", "# [1.1 The leaf](01_a/01_leaf.ipynb)"]
    assert links_of(linked, "01_a/01_leaf")[0] == "# [0 All of it](../00_all.ipynb) ·"


@pytest.mark.parametrize("change, stale", [
    (lambda house: house.write("01_a/03_bark", "# %% [markdown]\n# # 1.3 The bark\n"),
     ["01_a/02_root", "02_b/01_story"]),
    (lambda house: house.edit("01_a/02_root", "# # 1.2 The root", "# # 1.2 Roots"), ["01_a/01_leaf", "02_b/01_story"]),
    (lambda house: house.edit("02_b/01_story", " ·\n# [contents]", " ·\n# [contents!]") or
     house.edit("02_b/01_story", "[contents!](../README.md)", "[contents](../README.md) and more"), ["02_b/01_story"]),
], ids=["new chapter", "new title", "edited by hand"])
def test_links_that_moved_on(linked, change, stale):
    change(linked)
    said = [line for line in linked("--check")[1].splitlines() if "links" in line]
    assert said == [f"book/{name}.py has stale links to its neighbours" for name in stale]
    linked("--tidy")
    assert "links" not in linked("--check")[1]


@pytest.mark.parametrize("prose, wrong", [
    ("[1.2 The leaf](../01_a/01_leaf.ipynb)", "calls ../01_a/01_leaf.ipynb 1.2, but it is 1.1"),
    ("[the bark](../01_a/09_bark.ipynb)", "links to ../01_a/09_bark.ipynb, which has no source"),
    ("[1.1](../01_a/01_leaf.ipynb) and [the root](../01_a/02_root.ipynb#12)", None),
    ("[elsewhere](https://example.org/1.3.ipynb)", None),
    ("as chapter 1.3 says", "names 1.3, which does not exist"),
    ("as 1.1.2 says", "names 1.1.2, which does not exist"),
    ("see Chapter 1.2. Then chapter 2.1, and Python 3.11.9, numpy 2.0.1 and 0.61.", None),
])
def test_links_and_numbers_in_prose(house, prose, wrong):
    house.edit("02_b/01_story", "a module\n", f"a module\n#\n# {prose}\n")
    said = [line for line in house("--check")[1].splitlines() if "story.py" in line]
    assert said == ([f"book/02_b/01_story.py {wrong}"] if wrong else [])


def test_numbers_become_links_to_sections(house):
    house.edit("01_a/01_leaf", "Why a tree is felled.", "## 1.1.1 Why a `tree` is felled")
    prose = "See 1.1.1, `1.1.1` and chapter 1.2, but not section 1.1.1."
    house.edit("02_b/01_story", "a module\n", f"a module\n#\n# {prose}\n")
    house("--tidy")
    lines = (house.book / "02_b" / "01_story.py").read_text().splitlines()
    at = lines.index("# See [1.1.1], `1.1.1` and chapter [1.2], but not section 1.1.1.")
    assert lines[at + 2:at + 4] == ["# [1.1.1]: ../01_a/01_leaf.ipynb#1.1.1-Why-a-tree-is-felled",
                                    "# [1.2]: ../01_a/02_root.ipynb"]
    assert house("--check") == (0, "")
    house.edit("01_a/01_leaf", "## 1.1.1 Why a `tree` is felled", "## 1.1.1 Timber")
    assert "book/02_b/01_story.py has stale links to chapters or sections" in house("--check")[1]
    house("--tidy")
    assert "# [1.1.1]: ../01_a/01_leaf.ipynb#1.1.1-Timber\n" in (house.book / "02_b" / "01_story.py").read_text()
    assert house("--check") == (0, "")


CLAIMS = '''

# %% [markdown]
# A tree of 1,024 m<!--claim height--> is higher than a bush.<!--claim higher-->

# %%
print(f"{tree:,} m")  # claim height
assert tree > bush  # claim higher
'''


@pytest.fixture
def claimed(house):
    "The small book with two claims in its story. The cell that computes them has printed 1,024 m."
    text = (house.book / "02_b" / "01_story.py").read_text()
    house.write("02_b/01_story", text.rstrip("\n") + CLAIMS)
    house.pretend_to_run()
    house.prints("02_b/01_story", "1,024 m\n")
    return house


def test_claims_that_hold(claimed):
    assert claimed("--check") == (0, "")
    code, text = claimed("--claims", "02_b")
    assert code == 0 and "2 claims are marked" in text
    assert 'height: A tree of 1,024 m\n      print(f"{tree:,} m")\n' in text
    assert "higher: is higher than a bush.\n      assert tree > bush\n" in text


@pytest.mark.parametrize("change, fault", [
    (lambda house: house.prints("02_b/01_story", "2,048 m\n"),
     "claim height: says 1024, which the cell of `print(f\"{tree:,} m\")` does not print"),
    (lambda house: house.edit("02_b/01_story", "  # claim height", ""),
     "claim height: 0 lines of code end with `# claim height`, expected one"),
    (lambda house: house.edit("02_b/01_story", "<!--claim higher-->", ""), "claim higher: no sentence has this mark"),
    (lambda house: house.edit("02_b/01_story", "assert tree > bush  #", "print(tree > bush)  #"),
     "claim higher: has no number, and its line of code is no assertion"),
], ids=["a number that changed", "no cell", "no mark", "nothing asserted"])
def test_claims_that_do_not_hold(claimed, change, fault):
    change(claimed)
    code, text = claimed("--check")
    assert code == 1 and f"book/02_b/01_story.py: {fault}\n" in text
    code, text = claimed("--claims", "02_b")
    assert code == 1 and "WRONG" in text


def test_answers_are_checked_like_chapters(house):
    house.write("answers/01_a", "# %% [markdown]\n# # Answers\n#\n# To chapter 1.1.\n\n# %%\n1 + 1\n")
    assert "book/answers/01_a.ipynb is missing\nrun: python book/tangle.py --run answers/01_a\n" in house("--check")[1]
    house("--tidy")
    assert "# [1.1]: ../01_a/01_leaf.ipynb\n" in (house.book / "answers" / "01_a.py").read_text()
    house.edit("02_b/01_story", "a module\n", "a module\n#\n# [answers](../answers/01_a.ipynb)\n")
    house.pretend_to_run()
    assert house("--check") == (0, "")


def test_links_of_the_contents(house):
    (house.book / "README.md").write_text("[1.1 leaf](01_a/01_leaf.ipynb), [1.1 root](01_a/02_root.ipynb)\n")
    (house.book.parent / "README.md").write_text("[the bark](book/01_a/03_bark.ipynb)\n")
    assert house("--check") == (1, "README.md links to book/01_a/03_bark.ipynb, which has no source\n"
                                   "book/README.md calls 01_a/02_root.ipynb 1.1, but it is 1.2\n")


def test_links_of_documents(house):
    (house.book.parent / "fixtures" / "some").mkdir(parents=True)
    (house.book.parent / "NOTES.md").write_text("[a folder](book) [more](https://example.org/a) [lost](CHANGES.md)\n")
    (house.book.parent / "fixtures" / "some" / "README.md").write_text("[up](../../NOTES.md#top) [data](data.bin#x)\n")
    assert house("--check") == (1, "NOTES.md links to CHANGES.md, which does not exist\n"
                                   "fixtures/some/README.md links to data.bin, which does not exist\n")


@pytest.mark.parametrize("line, wrong", [
    ("from k3lib.root import _DEPTH", "imports _DEPTH, which is private to k3lib.root"),
    ("from k3lib.root import SIZE", "imports SIZE from k3lib.root, which does not define it"),
    ("def run():\n    from k3lib.lost import SIZE", "imports k3lib.lost, which no earlier chapter makes"),
    ("from k3lib.root import DEPTH", None),
])
def test_imports_of_a_module_that_is_written_by_hand(house, line, wrong):
    (house.package / "cli.py").write_text(f"{line}\n")
    (house.package / "__main__.py").write_text("from k3lib.cli import run\n\n\ndef main():\n    return run\n"
                                               if "run" in line else "")
    assert house("--check") == ((1, f"k3lib/cli.py {wrong}\n") if wrong else (0, ""))


def test_sections_are_numbered_in_order(house):
    sections = "# ## 2.1.1 One\n#\n# ## 2.1.3 Two\n#\n# ## Summary\n"
    house.edit("02_b/01_story", "a module\n", f"a module\n#\n{sections}")
    said = [line for line in house("--check")[1].splitlines() if "section" in line]
    assert said == ["book/02_b/01_story.py has a section 2.1.3 where 2.1.2 is expected"]


def test_a_title_has_the_number_of_its_path(house):
    house.edit("02_b/01_story", "# # 2.1 A", "# # 2.2 A")
    wrong = "book/02_b/01_story.py is titled 2.2 A story without a module, but its path says 2.1\n"
    assert wrong in house("--check")[1]


def test_a_chapter_without_a_title(linked):
    linked.edit("02_b/01_story", "# # 2.1 A story without a module", "# A story")
    for option in ("--check", "--tidy"):
        assert linked(option) == (
            1, "book/02_b/01_story.py has no heading: begin it with `# # 2.1 Its title`\n")


# A class in several cells

def test_a_continued_class_is_one_class(house):
    text = (house.package / "leaf.py").read_text()
    assert text.count("class Tree") == 1 and "For the notebook" not in text
    names = {}
    exec(text, names)
    assert names["fell"](names["Tree"]()) == 2 and names["Tree"]().height == "\ntext at column 0\n"
    assert text.index("# nothing is pruned") < text.index("    @property") < text.index("def fell")
    assert names["__all__"] == ["SIZE", "Tree", "fell"]


def test_continuations_keep_their_order(house):
    more = "".join(f"class Tree(Tree):\n    def {name}(self):\n        return 1\n\n\n" for name in "zya")
    house.edit("01_a/01_leaf", "def fell", more + "def fell")
    house()
    text = (house.package / "leaf.py").read_text()
    order = [text.index(f"def {name}") for name in ("height", "z", "y", "a", "fell")]
    assert order == sorted(order)


@pytest.mark.parametrize("old, new, wrong", [
    ("class Tree(Tree)", "class Bush(Bush)", "continues class Bush, which no earlier exported cell defines"),
    ("class Tree(Tree)", "@final\nclass Tree(Tree)",
     "decorates the continued class Tree: decorate its first definition"),
    ("def fell", "class Tree(Tree): leaves = 1\n\n\ndef fell",
     "continues class Tree on one line: begin the body on the next line"),
    ("class Tree(Tree)", "class Tree(Tree)(", "invalid syntax (<unknown>, line 1)"),
])
def test_a_continuation_that_cannot_be_joined(house, old, new, wrong):
    house.edit("01_a/01_leaf", old, new)
    code, text = house()
    assert code == 1 and text.startswith(f"book/01_a/01_leaf.py: {wrong[:40]}")


# Jupyter

def save_in_jupyter(folder, opened):
    "Open a chapter as JupyterLab with jupytext does, and save what Lab then holds."
    from jupytext.sync_contentsmanager import TextFileContentsManager
    manager = TextFileContentsManager(root_dir=str(folder))
    content = manager.get(opened, type="notebook", content=True)["content"]
    content["metadata"]["kernelspec"] = {"display_name": "Python (ipykernel)", "language": "python", "name": "python3"}
    content["metadata"]["language_info"] = {"name": "python", "version": "3.99", "file_extension": ".py"}
    content["cells"][1]["metadata"] |= {"editable": True, "slideshow": {"slide_type": ""}}
    manager.save({"type": "notebook", "content": content, "format": "json"}, opened)


@pytest.mark.parametrize("opened", ["book/01_a/01_leaf.ipynb", "book/01_a/01_leaf.py"])
def test_a_chapter_saved_in_jupyter_is_cleaned_by_one_command(house, opened):
    house("--tidy")  # the form that Jupyter saves
    files = [*house.book.glob("*/*"), *house.package.glob("*.py")]
    before = {path: path.read_bytes() for path in files}
    save_in_jupyter(house.book.parent, opened)
    assert {path.read_bytes() == before[path] for path in files} == {True, False}
    assert [text.split("; run: ")[1] for text in house.check()] == ["make tidy"]
    assert house("--tidy") == (0, "")
    assert house.check() == []
    assert {path: path.read_bytes() for path in files} == before


@pytest.mark.parametrize("old, new", [
    ("# %% [markdown]", "# ---\n# jupyter:\n#   jupytext:\n#     main_language: python\n# ---\n\n# %% [markdown]"),
    ("\n# %%\n", "\n# %% editable=true\n"),
    ("\n# %%\n", "\n# %% lines_to_next_cell=2\n"),
])
def test_metadata_in_a_source_is_seen_and_taken_out(house, old, new):
    source = house.book / "02_b" / "01_story.py"
    before = source.read_text()
    house.edit("02_b/01_story", old, new)
    assert "book/02_b/01_story.py holds metadata that Jupyter saved; run: make tidy" in house.check()
    house("--tidy")
    assert source.read_text() == before and house.check() == []


def test_a_chapter_saved_without_the_books_settings(house):
    settings = house.book / "jupytext.toml"
    settings.write_text("".join(line for line in settings.read_text().splitlines(True) if "filter" not in line))
    before = (house.book / "01_a" / "01_leaf.py").read_text()
    save_in_jupyter(house.book.parent, "book/01_a/01_leaf.ipynb")
    assert "jupytext_version" in (house.book / "01_a" / "01_leaf.py").read_text()
    assert "book/01_a/01_leaf.py holds metadata that Jupyter saved; run: make tidy" in house.check()
    house("--tidy")
    assert house.check() == [] and (house.book / "01_a" / "01_leaf.py").read_text() == before
