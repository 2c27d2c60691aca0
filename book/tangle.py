"""Make the products of the book from its sources.

    python book/tangle.py                      write k3lib/*.py from the cells tagged `export` (seconds)
    python book/tangle.py --tidy               the same, take out of chapters what Jupyter's save put in, wrap prose at
                                               120 columns, and make the links to neighbours anew (seconds)
    python book/tangle.py --run 02_kda/02_kda  the same as without option, then execute the chapters whose path
                                               contains that text and write their .ipynb
    python book/tangle.py --run all            execute every chapter (minutes)
    python book/tangle.py --check              change nothing; name whatever is stale and the command that mends it
    python book/tangle.py --graph [dot]        print what each module of k3lib imports and how long its code is
    python book/tangle.py --claims TEXT        print what the prose of those chapters claims, and what computes it

The rules of the book that this file enforces:

- Chapters are read in the order of their paths. A module may import only modules that earlier chapters make.
- A chapter without exported cells makes no module. Two chapters never have the same number or make the same module,
  and a module never defines the same name twice.
- Files are compared as bytes. A text file of the tree is UTF-8 with \\n line ends: its digest is that of every clone.
- A class may be continued. An exported `class X(X):` adds its body to the class X of an earlier exported cell.
  In the notebook the same line makes a subclass of the same name, so the notebook runs as it is.
- A chapter begins with a heading that holds its number, which follows from its path. Its sections are numbered 1.2.1,
  1.2.2 and so on.
- The paragraph of a chapter's first cell that links to the contents links to the chapters before and after, with their
  titles. `--tidy` writes it. Every other link to a chapter, and every number of a chapter or section in the prose, must
  be that of one that exists. `--tidy` turns such a number into a link, [1.2.3], whose target stands at the end of its
  cell. A number after the word "section" is one of another work.
- A claim ends with a mark that a reader does not see: 434 MB<!--claim state-->. A line of code of the same chapter ends
  with the comment `# claim state`. That line asserts the claim, or the output of its cell contains the last number
  of the sentence before the mark.
- Answers to exercises are notebooks in book/answers/, one for each folder of chapters. They export nothing.
"""

import argparse
import ast
import copy
import functools
import hashlib
import importlib.util
import itertools
import keyword
import os
import re
import sys
import textwrap
import uuid
from collections import defaultdict
from pathlib import Path

import jupytext
import nbformat

BOOK = Path(__file__).resolve().parent
PACKAGE = BOOK.parent / "k3lib"
TREE = ("book", "k3lib", "tests", "fixtures", ".ci")  # the folders of the repository
TEXTS = {".c", ".cfg", ".in", ".ipynb", ".json", ".jsonl", ".md", ".model", ".mplstyle", ".py", ".sha256", ".tiktoken"}
TEXTS |= {".toml", ".tsv", ".yaml", ".yml", ".gitattributes", ".gitignore", "LICENSE", "Makefile", "run"}
HAND_WRITTEN = ("__init__", "__main__", "arguments", "cli")
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
FILTERS = {"notebook_metadata_filter": "-all", "cell_metadata_filter": "tags,-all"}  # as in jupytext.toml
WIDTH = 120  # columns of a line, code and prose
LONG_MODULE, LONG_CELL, MANY_PARAMETERS = 400, 40, 7  # code lines; lines; positional parameters


class Refused(Exception):
    "A chapter breaks a rule of the book. The text names the chapter, the rule and what was found."


def sources():
    "The paths of all chapters, in reading order."
    return sorted([*BOOK.glob("[0-9]*.py"), *BOOK.glob("[0-9]*/[0-9]*.py")])


def answers():
    "The paths of all notebooks of answers."
    return sorted(BOOK.glob("answers/[0-9]*.py"))


def place(path):
    "A path as messages show it: from the root of the repository, with forward slashes."
    return path.relative_to(BOOK.parent).as_posix()


def write(path, text):
    """Write text as UTF-8 with \\n line ends on every system.

    The file is complete before it gets its name: another tangle.py that runs meanwhile never reads half a file.
    """
    path = path.resolve()  # a link stays a link
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(text.encode())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read(path):
    """Read UTF-8 text, with line ends \\r\\n and a byte order mark taken out. `byte_faults` is what reports them.

    Raises Refused for other bytes.
    """
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise Refused(f"{place(path)} is not UTF-8: {error.reason} at byte {error.start:,}") from None


def holds(path, text):
    "Is `text`, as `write` writes it, what the file holds, byte for byte?"
    return path.exists() and path.read_bytes() == text.encode()


@functools.cache
def parsed(text):
    "A chapter's text as a notebook, which the caller must not change. Parsing takes jupytext a tenth of a second."
    return jupytext.reads(text, fmt="py:percent")


def chapter(source):
    "The chapter as an unexecuted notebook."
    return copy.deepcopy(parsed(read(source)))


# From cells to modules


def exported_cells(source):
    return [cell.source for cell in chapter(source).cells if "export" in cell.metadata.get("tags", [])]


def exported_lines(source):
    "The lines of the chapter's file at which its exported cells begin, numbered from 1."
    text, lines, at = read(source), [], 0
    for cell in exported_cells(source):
        at = text.index(cell, at)
        lines.append(text.count("\n", 0, at) + 1)
        at += len(cell)
    return lines


def continued(node):
    "Is this statement `class X(X):`?"
    return (
        isinstance(node, ast.ClassDef)
        and len(node.bases) == 1
        and not node.keywords
        and isinstance(node.bases[0], ast.Name)
        and node.bases[0].id == node.name
    )


def block_end(lines, node):
    "The number of lines up to the end of the statement's block, with the indented comments that follow it."
    end = node.end_lineno
    while end < len(lines) and (not lines[end].strip() or lines[end][0].isspace()):
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    return end


def join_classes(cells):
    """The cells' texts, with the body of every continued class moved to the end of its first definition.

    Only lines move, whole and unchanged. A docstring of the continuation is for the notebook and is left out.
    Raises ValueError for a continuation that cannot be joined.
    """
    texts = [cell.splitlines() for cell in cells]
    first = {}  # name of a class -> index of the cell that defines it
    for index, cell in enumerate(cells):
        lines, moved = cell.splitlines(), set()
        for node in ast.parse(cell).body:
            if not continued(node):
                continue
            if node.name not in first:
                raise ValueError(f"continues class {node.name}, which no earlier exported cell defines")
            if node.decorator_list:
                raise ValueError(f"decorates the continued class {node.name}: decorate its first definition")
            if node.body[0].lineno == node.lineno:
                raise ValueError(f"continues class {node.name} on one line: begin the body on the next line")
            end = block_end(lines, node)
            moved.update(range(node.lineno - 1, end))
            documented = ast.get_docstring(node, clean=False) is not None
            body = lines[node.body[0].end_lineno if documented else node.lineno : end]
            home = texts[first[node.name]]
            definition = next(
                n for n in ast.parse("\n".join(home)).body if isinstance(n, ast.ClassDef) and n.name == node.name
            )
            at = block_end(home, definition)
            home[at:at] = ["", *"\n".join(body).strip("\n").split("\n")]
        texts[index] = [line for n, line in enumerate(lines) if n not in moved]
        first |= {n.name: index for n in ast.parse(cell).body if isinstance(n, ast.ClassDef) and not continued(n)}
    return [text for lines in texts if (text := "\n".join(lines).strip("\n"))]


def module_name(source):
    "The name of the chapter's module: what follows the number in the name of its file."
    name = re.sub(r"^\d+_?", "", source.stem)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise Refused(f"{place(source)}: its module would be k3lib.{name}, which Python cannot import")
    return name


def stored(node):
    "The names that are assigned to anywhere in the node."
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]


def bindings(node):
    """Pairs for each name that a statement of a module's top level binds: the name, and what binds it.

    That is what is imported for an import, "temporary" for the target of a loop or a `with`, else "definition".
    """
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, "definition"
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from ((name, "definition") for target in targets for name in stored(target))
    elif isinstance(node, ast.Import):
        roots = [alias.name.split(".")[0] for alias in node.names]
        yield from ((a.asname or root, f"import {a.name if a.asname else root}") for a, root in zip(node.names, roots))
    elif isinstance(node, ast.ImportFrom):
        yield from ((a.asname or a.name, f"from {node.level}{node.module} import {a.name}") for a in node.names)
    elif not isinstance(node, (ast.AugAssign, ast.Expr)):
        targets = [getattr(node, "target", None), *(item.optional_vars for item in getattr(node, "items", []))]
        yield from ((name, "temporary") for target in targets if target is not None for name in stored(target))
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            for inner in getattr(node, field, []):
                yield from bindings(inner)


def defined_twice(cells):
    "The first name that two statements of the `cells` bind, with the indices of their cells; None if there is none."
    seen = {}  # name -> [(index of a cell, what binds the name)]
    for index, cell in enumerate(cells):
        for node in ast.parse(cell).body:
            found = {} if continued(node) else dict(bindings(node))  # the branches of one `if` may bind one name
            for name, how in found.items():
                for other, before in seen.setdefault(name, []):
                    if how != before or how == "definition":
                        return name, other, index
                seen[name].append((index, how))
    return None


def defined_names(tree):
    "The names that statements of the module's top level define, in order. Imports define nothing."
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)):
            yield from (name for name, _ in bindings(node))


def book_imports(tree):
    "What the code imports from k3lib, anywhere in it: pairs of a module (None: the package) and the names it takes."
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            name = f"k3lib.{node.module}" if node.level and node.module else "k3lib" if node.level else node.module
            if name == "k3lib" or name.startswith("k3lib."):
                yield name[6:] or None, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name[6:] or None, []) for alias in node.names if alias.name.split(".")[0] == "k3lib")


def wrong_imports(tree, made):
    "Sentences: what the code imports that it must not."
    for other, names in book_imports(tree):
        if other is None or not names:
            yield f"imports k3lib{f'.{other}' if other else ''}: write `from k3lib.module import names`"
        elif other not in made:
            yield f"imports k3lib.{other}, which no earlier chapter makes"
        else:
            yield from (
                f"imports {name}, which is private to k3lib.{other}"
                if name.startswith("_")
                else f"imports {name} from k3lib.{other}, which does not define it"
                for name in names
                if name not in made[other]
            )


def module(source, made):
    """The text of the chapter's module, its public names, and sentences on imports that break the book's rules.

    `made` maps each module made so far to its public names. A chapter that exports nothing has the text None.
    Raises Refused for a module that cannot be made.
    """
    cells = exported_cells(source)
    if not cells:
        return None, set(), []
    try:
        if twice := defined_twice(cells):
            name, *places = twice
            lines = exported_lines(source)
            raise ValueError(
                "defines {} twice, in the exported cells at lines {} and {}".format(
                    name, *(lines[index] for index in places)
                )
            )
        body = "\n\n\n".join(join_classes(cells))
        tree = ast.parse(body)
    except (ValueError, SyntaxError) as error:
        raise Refused(f"{place(source)}: {error}") from None
    names = list(defined_names(tree))
    public = [n for n in names if not n.startswith("_")]
    listing = textwrap.fill(", ".join(f'"{n}"' for n in public), 116, initial_indent="    ", subsequent_indent="    ")
    text = (
        f'"""{title(source)}\n\nMade from {place(source)}: edit that, then run `make export`.\n"""\n\n'
        f"{body}\n\n\n__all__ = [\n{listing},\n]\n"
    )
    return text, set(public), [f"{place(source)} {wrong}" for wrong in wrong_imports(tree, made)]


def modules():
    "Module name -> text, in the order of the chapters, and all sentences on imports that break the rules."
    made, texts, wrong = {}, {}, []
    makers = {name: f"{PACKAGE.name}/{name}.py, which is written by hand," for name in HAND_WRITTEN}
    for source in sources():
        text, names, sentences = module(source, made)
        if text is not None:
            name = module_name(source)
            maker = makers.setdefault(name.lower(), place(source))  # some file systems have one file for both cases
            if maker != place(source):
                raise Refused(f"{place(source)}: makes k3lib.{name}, as {maker} does")
            made[name], texts[name] = names, text
            wrong += sentences
    paths = [path for name in HAND_WRITTEN if (path := PACKAGE / f"{name}.py").exists()]
    trees = {path: ast.parse(read(path)) for path in paths}
    made |= {path.stem: set(defined_names(tree)) for path, tree in trees.items()}
    wrong += [f"{place(path)} {sentence}" for path, tree in trees.items() for sentence in wrong_imports(tree, made)]
    return texts, wrong


# From chapters to notebooks


def notebook(source):
    "The unexecuted notebook. A cell's id is the digest of its text, so that building twice gives the same file."
    nb = chapter(source)
    nb.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    seen = {}
    for cell in nb.cells:
        key = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[key] = seen.get(key, 0) + 1
        cell["id"] = key if seen[key] == 1 else f"{key}-{seen[key]}"
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if "tags" in cell.metadata else {})
    return nb


def execute(source):
    "Run a chapter from nothing and write its .ipynb."
    from nbclient import NotebookClient

    nb = notebook(source)
    options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}  # one text, however it was flushed
    NotebookClient(nb, resources={"metadata": {"path": source.parent}}, **options).execute()
    nb.metadata = notebook(source).metadata
    write(source.with_suffix(".ipynb"), nbformat.writes(nb) + "\n")


ITEM = r"([-*+]|\d+[.)]) +"  # what begins an item of a list
TARGET = r"\[\d+\.\d+(?:\.\d+)?\]: "  # what begins the line that says where a link like [1.2.3] leads


def paragraphs(prose):
    "Pairs: lines that belong together, and whether they may be wrapped. Headings, tables, formulas and code may not."
    lines, fence = [], None
    for line in [*prose.splitlines(), ""]:
        mark = line.strip()[:2] if line.startswith(("```", "$$")) else None
        fixed = fence or mark or not line.strip() or re.match(r"[#|>]|!\[|" + TARGET, line)
        if lines and (fixed or re.match(r"\s*" + ITEM, line)):
            yield lines, not any(line.endswith(("  ", "\\")) for line in lines)
            lines = []
        if fixed:
            yield [line], False
        else:
            lines.append(line)
        if fence == "$$" and line.rstrip().endswith("$$"):
            fence = None
        elif mark and (fence == mark or not fence and not line[2:].rstrip().endswith("$$")):
            fence = None if fence else mark


def wrapped(prose):
    "Markdown text in which every paragraph and every item of a list is wrapped that has a line too long."
    lines = []
    for block, may_wrap in paragraphs(prose):
        if may_wrap and max(map(len, block)) > WIDTH - 2:
            words = " ".join(line.strip() for line in block)
            words = re.sub(rf" (?={ITEM[:-2]}( |$)|[#>|=])", "\0", words)  # at a line's begin these mean something
            margin = re.match(r"\s*", block[0])[0]
            hanging = re.match(rf"\s*({ITEM})?", block[0])[0]
            block = textwrap.wrap(
                words,
                WIDTH - 2,
                initial_indent=margin,
                subsequent_indent=" " * len(hanging),
                break_long_words=False,
                break_on_hyphens=False,
            )
        lines += [line.replace("\0", " ") for line in block]
    return "\n".join(lines[:-1])


def wide_lines(source):
    "Sentences: the lines of a chapter that are too long, rows of tables and targets of links left out."
    for n, line in enumerate(read(source).splitlines(), 1):
        if len(line) > WIDTH and not re.match(r"# (\||" + TARGET + ")", line):
            yield f"{place(source)}:{n} has {len(line)} columns, more than {WIDTH}"


def number(source):
    "The number of a chapter, from its path: 1.2 for 01_mxfp4/02_kernel_cache.py."
    return ".".join(str(int(re.match(r"\d+", part)[0])) for part in source.relative_to(BOOK).parts)


def title(source):
    "The first heading of a chapter, its number included. Raises Refused for a chapter that has none."
    found = re.search(r"^# # (.*)", read(source), re.M)
    if found is None:
        raise Refused(f"{place(source)} has no heading: begin it with `# # {number(source)} Its title`")
    return found[1]


NAVIGATION = re.compile(r"(?:^.+\n)*?^.*\[contents\]\([^)\s]*README\.md\).*(?:\n.+)*", re.M)  # a paragraph


def navigation(source):
    "The lines of a chapter that lead to the chapter before, the contents and the chapter after."
    order = sources()
    at = order.index(source)

    def link(text, path):
        return f"[{text}]({Path(os.path.relpath(path, source.parent)).as_posix()})"

    before, after = (
        [link(title(other), other.with_suffix(".ipynb")) for other in neighbours]
        for neighbours in (order[max(0, at - 1) : at], order[at + 1 : at + 2])
    )
    return " ·\n".join([*before, link("contents", BOOK / "README.md"), *after])


def with_navigation(source, prose):
    "The chapter's first cell with its paragraph of links made anew; the text itself where it has none."
    return NAVIGATION.sub(lambda _: navigation(source), prose, count=1)


@functools.cache
def targets_of(text):
    "The numbers of a chapter's sections and the places of their headings, as JupyterLab and the site name them."
    prose = "\n".join(cell.source for cell in parsed(text).cells if cell.cell_type == "markdown")
    headings = re.findall(r"^## ((\d+\.\d+\.\d+)\b.*?) *$", prose, re.M)
    return {found: heading.replace("`", "").replace(" ", "-") for heading, found in headings}


def targets(source):
    "Where links from a chapter lead: {number of a chapter or section: relative path and place}."
    found = {}
    for other in sources():
        path = Path(os.path.relpath(other.with_suffix(".ipynb"), source.parent)).as_posix()
        page = "" if other == source else path
        found |= {number(other): path} | {n: f"{page}#{at}" for n, at in targets_of(read(other)).items()}
    return found


NO_LINKS = re.compile(
    r"(```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\[[^\]]*\](?:\([^)]*\))?|<!--.*?-->|^#.*?$)", re.M | re.S
)
SECTION = re.compile(r"(?<![\d.])(?<!section )\d+\.\d+\.\d+(?!\.?\d)")
NAMED = r"\d+\.\d+(?!\.?\d)(?: \([^)]*\))?"  # a chapter's number, and what it is about
CHAPTERS = re.compile(rf"\b[Cc]hapters? {NAMED}(?:(?:, | and | to | or ){NAMED})*".replace(" ", r"\s"))


def linked_numbers(source, prose, new=True):
    """A cell's Markdown with a target for each link like [1.2.3].

    With `new`, the numbers of sections, and of chapters after the word "chapter", become such links.
    """
    if not re.search(r"\d\.\d", prose):
        return prose
    known = targets(source)
    lines = [line for line in prose.splitlines() if not re.match(TARGET, line)]
    prose = "\n".join(lines).rstrip("\n") if len(lines) < len(prose.splitlines()) else prose

    def bracket(found):
        return f"[{found[0]}]" if found[0] in known else found[0]

    if new:
        parts = NO_LINKS.split(prose)
        for i in range(0, len(parts), 2):
            text = CHAPTERS.sub(lambda found: re.sub(r"\d+\.\d+", bracket, found[0]), parts[i])
            parts[i] = SECTION.sub(bracket, text)
        prose = "".join(parts)
    plain = re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$", "", prose, flags=re.S)
    named = re.findall(r"\[(\d+\.\d+(?:\.\d+)?)\](?![(:])", plain)
    lines = [f"[{n}]: {known[n]}" for n in dict.fromkeys(named) if n in known]
    return prose + ("\n\n" + "\n".join(lines) if lines else "")


def prose_of(path):
    "The Markdown of a chapter, code left out, or of a Markdown file."
    if path.suffix == ".md":
        return read(path)
    return "\n\n".join(cell.source for cell in chapter(path).cells if cell.cell_type == "markdown")


def wrong_links(path):
    "Sentences: links to files or chapters that do not exist, or to chapters of another number than the link says."
    chapters = {source.resolve(): number(source) for source in sources()}
    chapters |= dict.fromkeys((source.resolve() for source in answers()), "answers")
    for text, target in re.findall(r"\[([^\]]*)\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", prose_of(path)):
        if not target.endswith(".ipynb"):
            if not (path.parent / target).exists():
                yield f"{place(path)} links to {target}, which does not exist"
            continue
        found, says = chapters.get((path.parent / target).with_suffix(".py").resolve()), re.match(r"\d+\.\d+\b", text)
        if found is None:
            yield f"{place(path)} links to {target}, which has no source"
        elif says and says[0] != found:
            yield f"{place(path)} calls {target} {says[0]}, but it is {found}"


def wrong_numbers():
    "Sentences: wrong numbers of titles and sections, and numbers in prose that no chapter or section has."
    numbered = defaultdict(list)
    for source in sources():
        numbered[number(source)].append(source)
    for same, others in numbered.items():
        yield from (f"{place(other)} has the number {same}, as {place(others[0])} has" for other in others[1:])
    chapters = {number(source): re.findall(r"^## (\d+\.\d+\.\d+)\b", prose_of(source), re.M) for source in sources()}
    known = set(chapters).union(*chapters.values())
    for source in sources():
        own = number(source)
        if title(source).split()[0] != own:
            yield f"{place(source)} is titled {title(source)}, but its path says {own}"
        expected = [f"{own}.{n}" for n in range(1, len(chapters[own]) + 1)]
        yield from (
            f"{place(source)} has a section {found} where {n} is expected"
            for found, n in zip(chapters[own], expected)
            if found != n
        )
        named = re.findall(r"\b[Cc]hapters? \[?(\d+\.\d+)(?!\.?\d)", prose_of(source))
        numbers = re.findall(r"(?<![\d.])(?<!section )(\d+\.\d+)(\.\d+)(?!\.?\d)", prose_of(source))
        named += [chapter + section for chapter, section in numbers if chapter in chapters]
        for missing in dict.fromkeys(n for n in named if n not in known):
            yield f"{place(source)} names {missing}, which does not exist"


def tidy_source(source):
    """The chapter's text as jupytext writes it: no header, no metadata of a cell but its tags.

    Prose is wrapped, and the links to its neighbours are made anew.
    """
    nb = chapter(source)
    nb.metadata = nbformat.from_dict({"jupytext": FILTERS})
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            cell.source = wrapped(linked_numbers(source, cell.source))
        if cell is nb.cells[0] and source in sources():
            cell.source = with_navigation(source, cell.source)
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if "tags" in cell.metadata else {})
    return jupytext.writes(nb, fmt="py:percent")


def has_metadata(source):
    "Has a save put metadata into the chapter's text? The number of blank lines between cells does not count."
    text = read(source)
    return (
        text.startswith("# ---\n")
        or re.search(r"^# %%.*lines_to_next_cell", text, re.M) is not None
        or any(set(cell.metadata) - {"tags", "lines_to_next_cell"} for cell in chapter(source).cells)
    )


def code_cells(nb):
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def tidy_notebook(source):
    "The text of the chapter's .ipynb with its outputs, rebuilt from the source; None if code was changed since it ran."
    have, want = nbformat.reads(read(source.with_suffix(".ipynb")), 4), notebook(source)
    if [cell.source for cell in code_cells(have)] != [cell.source for cell in code_cells(want)]:
        return None
    for old, new in zip(code_cells(have), code_cells(want)):
        new.outputs, new.execution_count = old.outputs, old.execution_count
    return nbformat.writes(want) + "\n"


def tidy():
    "Bring all sources to one form, and every .ipynb whose code is still its source's."
    for path in tree_texts():
        if not path.is_relative_to(BOOK.parent / "fixtures") and not holds(path, text := read(path)):
            write(path, text)
    for source in [*sources(), *answers()]:
        if not holds(source, text := tidy_source(source)):
            write(source, text)
        path = source.with_suffix(".ipynb")
        if path.exists() and (text := tidy_notebook(source)) is not None and not holds(path, text):
            write(path, text)


# The check


def run_command(source):
    return f"python book/tangle.py --run {place(source.with_suffix('')).removeprefix('book/')}"


def stale_chapter(source):
    "Pairs: what is wrong with the chapter or its .ipynb, and the command that mends it."
    if has_metadata(source):
        yield f"{place(source)} holds metadata that Jupyter saved", "make tidy"
    prose = [cell.source for cell in chapter(source).cells if cell.cell_type == "markdown"]
    if source in sources() and with_navigation(source, prose[0]) != prose[0]:
        yield f"{place(source)} has stale links to its neighbours", "make tidy"
    if any(linked_numbers(source, text, new=False) != text for text in prose):
        yield f"{place(source)} has stale links to chapters or sections", "make tidy"
    path = source.with_suffix(".ipynb")
    if not path.exists():
        yield f"{place(path)} is missing", run_command(source)
        return
    have, want = nbformat.reads(read(path), 4), notebook(source)
    cells = [[(c.cell_type, c.source, c.id, c.metadata) for c in nb.cells] for nb in (have, want)]
    if [c.source for c in code_cells(have)] != [c.source for c in code_cells(want)]:
        yield f"{place(path)} differs from its source", run_command(source)
    elif cells[0] != cells[1] or have.metadata != want.metadata:
        yield f"{place(path)} differs from its source, though not in its code", "make tidy"
    code = [c for c in code_cells(have) if c.source.strip()]
    if any(c.execution_count is None for c in code):
        yield f"{place(path)} is not executed", run_command(source)
    for cell in code:
        wrong = "raises-exception" in cell.metadata.get("tags", [])  # a wrong version, which its gate must refuse
        failed = any(o.output_type == "error" for o in cell.get("outputs", []))
        if cell.execution_count is not None and failed != wrong:
            fault = f"holds a cell that should fail and does not: {cell.source.splitlines()[0]}"
            yield f"{place(path)} {fault if wrong else 'holds an error'}", run_command(source)


def tree_texts():
    "The paths of all text files of the tree, as their names tell them."
    places = [BOOK.parent.glob("*"), *((BOOK.parent / folder).rglob("*") for folder in TREE)]
    for path in sorted(itertools.chain.from_iterable(places)):
        text = path.suffix in TEXTS or path.name in TEXTS
        if text and path.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & {*path.parts}:
            yield path


def byte_faults():
    "Pairs: what is wrong with the bytes of a text file, though its text may be right, and the command that mends it."
    for path in tree_texts():
        data = path.read_bytes()
        fixture = path.is_relative_to(BOOK.parent / "fixtures")
        command = f"git checkout -- {place(path)}" if fixture else "make tidy"
        if b"\r\n" in data:
            line = data[: data.index(b"\r\n")].count(b"\n") + 1
            yield f"{place(path)} has \\r\\n line ends, the first in line {line}, where \\n is expected", command
        if data.startswith(b"\xef\xbb\xbf"):
            yield f"{place(path)} begins with a byte order mark", command


def check(texts):
    "Pairs of what is stale and the command that mends it. `texts` maps module names to what the chapters make."
    yield from byte_faults()
    for name, text in texts.items():
        path = PACKAGE / f"{name}.py"
        if not path.exists() or read(path) != text:
            yield f"{place(path)} is stale", "make export"
    for path in sorted(PACKAGE.glob("*.py")):
        if path.stem not in {*texts, *HAND_WRITTEN}:
            yield f"{place(path)} has no chapter", f"git rm {place(path)}"
    for source in [*sources(), *answers()]:
        yield from stale_chapter(source)


# The claims


MARK = re.compile(r"<!--claim ([^>]+?)-->")
FIGURE = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")  # a number, as 1,024 or 0.43
COMPARED = re.compile(r"\b(?:faster|slower|larger|smaller|longer|shorter|more|less|fewer|better|worse|times as)\b")


def figures(text):
    "The numbers in a text, without commas."
    return [found.replace(",", "") for found in FIGURE.findall(text)]


def sentences(prose):
    "The sentences of a cell's Markdown, each with its claim's name, or None; formulas, code and tables left out."
    prose = re.sub(r"^[|#][^\n]*|^" + TARGET + r"[^\n]*|```.*?```|\$\$.*?\$\$", "", prose, flags=re.M | re.S)
    prose = re.sub(r"\$[^$]*\$|`[^`]*`", "…", NAVIGATION.sub("", prose).replace("\n> ", "\n"))
    prose = re.sub(r"\[([^\]]*)\](?:\([^)]*\))?", r"\1", prose)
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*\d])", prose):
        text = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.:?])(?:\*\*)? +(?=[A-Z*])|(?<=-->) ?", text):
            if sentence.strip():
                name = MARK.search(sentence)
                yield MARK.sub("", sentence).strip(), name and name[1]


def outputs_text(cell):
    "What a code cell has printed."
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", [])]
    return "".join(texts)


def claims(source):
    """What the prose of a chapter claims: (sentence, name or None, what computes it or None, fault or None).

    Without a mark, a sentence has no name. It is listed if it has a number or compares.
    """
    path = source.with_suffix(".ipynb")
    cells = (nbformat.reads(read(path), 4) if path.exists() else chapter(source)).cells
    lines = {}  # name of a claim -> [(line, cell)]
    for cell in code_cells(chapter(source)):
        ran = next((c for c in cells if c.cell_type == "code" and c.source == cell.source), cell)
        for line in cell.source.splitlines():
            if found := re.search(r"# claim (.+?) *$", line):
                lines.setdefault(found[1], []).append((line[: found.start()].strip(), ran))
    printed = [(cell, set(figures(outputs_text(cell)))) for cell in cells if cell.cell_type == "code"]
    for cell in chapter(source).cells:
        for sentence, name in sentences(cell.source) if cell.cell_type == "markdown" else ():
            if name is None:
                named = CHAPTERS.sub("", SECTION.sub("", sentence))
                if found := [n for n in figures(named) if len(n) > 1]:
                    where = next(
                        (f"printed by: {c.source.splitlines()[0]}" for c, seen in printed if found[-1] in seen), None
                    )
                    yield sentence, None, where, None
                elif COMPARED.search(sentence):
                    yield sentence, None, None, None
                continue
            made = lines.pop(name, [])
            if len(made) != 1:
                yield sentence, name, None, f"{len(made)} lines of code end with `# claim {name}`, expected one"
                continue
            (line, ran), stated = made[0], figures(sentence)[-1:]
            if line.startswith("assert "):
                fault = None
            elif not stated:
                fault = "has no number, and its line of code is no assertion"
            elif stated[0] in figures(outputs_text(ran)):
                fault = None
            else:
                fault = f"says {stated[0]}, which the cell of `{line[:60]}` does not print"
            yield sentence, name, line, fault
    for name, made in lines.items():
        yield "", name, made[0][0], "no sentence has this mark"


def wrong_claims(source):
    "Sentences: claims of a chapter whose number is not the one that their cell prints, or whose cell is missing."
    for _, name, _, fault in claims(source):
        if fault:
            yield f"{place(source)}: claim {name}: {fault}"


def print_claims(text):
    "Print the claims of the chapters whose path contains `text`: the marked ones first. Exit code 1 if one is wrong."
    wrong = False
    for source in [*sources(), *answers()]:
        if text != "all" and text not in place(source):
            continue
        found = list(claims(source))
        print(f"{place(source)}: {sum(name is not None for _, name, *_ in found)} claims are marked")
        for sentence, name, line, fault in sorted(found, key=lambda claim: claim[1] is None):
            wrong |= bool(fault)
            print(
                f"  {'WRONG ' if fault else ''}{name or '-'}: {sentence}\n      {fault or line or 'not computed here'}"
            )
    sys.exit(1 if wrong else 0)


# The graph


def code_lines(text):
    "Lines of the text that hold code: no blank lines, comments or docstrings."
    lines = {n for n, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def long_ones():
    "Sentences: each cell, function and module of the book and of k3lib that is over its bound."
    for source in sources():
        for cell in exported_cells(source):
            if (n := len(cell.splitlines())) > LONG_CELL:
                name = next(defined_names(ast.parse(cell)), "its first line")
                yield f"{place(source)}: the exported cell that begins with {name} has {n} lines"
    for path in sorted(PACKAGE.glob("*.py")):
        text = read(path)
        if (n := code_lines(text)) > LONG_MODULE:
            yield f"{place(path)} has {n} lines of code"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                parameters = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
                n = len(parameters) - (parameters[:1] in (["self"], ["cls"]))
                if n > MANY_PARAMETERS:
                    yield f"{place(path)}:{node.lineno} {node.name} has {n} positional parameters"


def graph(form):
    """Print the import graph of k3lib, read from its files. Exit code 1 if an arrow points to a later chapter.

    Text: one line a module, with its lines of code and its imports. `dot`: the same for Graphviz, each edge that
    follows from two others left out.
    """
    order = [module_name(s) for s in sources() if exported_cells(s)]
    order = [name for name in order if (PACKAGE / f"{name}.py").exists()]
    order += [name for name in HAND_WRITTEN if (PACKAGE / f"{name}.py").exists()]
    edges, backward = {}, []
    for name in order:
        found = {other for other, _ in book_imports(ast.parse(read(PACKAGE / f"{name}.py")))}
        edges[name] = [other for other in order if other in found]
        late = [o for o in edges[name] if order.index(o) >= order.index(name)] if name not in HAND_WRITTEN else []
        backward += [f"k3lib/{name}.py imports {other}, which a later chapter makes" for other in late]
    if form == "dot":
        print("digraph k3lib {\n  rankdir=BT\n  node [shape=box]")
        for name, others in edges.items():
            reached = set(itertools.chain.from_iterable(reach(edges, other) for other in others))
            print("".join(f"  {name} -> {other}\n" for other in others if other not in reached), end="")
        print("}")
    else:
        for name in order:
            print(f"{code_lines(read(PACKAGE / f'{name}.py')):5}  {name:14} {' '.join(edges[name])}".rstrip())
        print("".join(f"over its bound: {sentence}\n" for sentence in long_ones()), end="")
        print(f"{len(order)} modules, {sum(map(len, edges.values()))} arrows, {len(backward)} of them backward")
    sys.exit("\n".join(backward) if backward else 0)


def reach(edges, name):
    "All modules that `name` imports, directly or not."
    found = set()
    for other in edges.get(name, []):
        found |= {other} | reach(edges, other)
    return found


def main(arguments=None):
    "The command line. Ends the process with a text on stderr and exit code 1 where something is stale or refused."
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--run", metavar="TEXT", help="execute chapters whose path contains TEXT, or `all`")
    args.add_argument("--tidy", action="store_true", help="one form for all chapters, links to neighbours made anew")
    args.add_argument("--check", action="store_true", help="change nothing, name what is stale")
    args.add_argument(
        "--claims", metavar="TEXT", help="print the claims of chapters whose path contains TEXT, or `all`"
    )
    args.add_argument("--graph", nargs="?", const="text", choices=("text", "dot"), help="print the import graph")
    try:
        make(args.parse_args(arguments))
    except Refused as refused:
        sys.exit(str(refused))


def make(args):
    "Do what the command line asks."
    if args.graph:
        graph(args.graph)
    if args.claims:
        print_claims(args.claims)
    if args.tidy:
        tidy()
    texts, wrong = modules()
    if args.check:
        wrong += [sentence for source in [*sources(), *answers()] for sentence in wide_lines(source)]
        wrong += [sentence for source in [*sources(), *answers()] for sentence in wrong_claims(source)]
        documents = [path for where in ("*.md", "book/*.md", "fixtures/*/*.md") for path in BOOK.parent.glob(where)]
        wrong += [sentence for path in (*sorted(documents), *sources(), *answers()) for sentence in wrong_links(path)]
        wrong += wrong_numbers()
        stale = list(check(texts))
        commands = dict.fromkeys(f"run: {command}" for _, command in stale)
        sys.exit("\n".join([*wrong, *(what for what, _ in stale), *commands]) if wrong or stale else 0)
    for name, text in texts.items():
        path = PACKAGE / f"{name}.py"
        if not holds(path, text):
            write(path, text)
            # two exports within a second may give files of one size: Python would run the .pyc of the first
            Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    print("".join(f"{sentence}\n" for sentence in wrong), end="", file=sys.stderr)
    for source in [*sources(), *answers()]:
        if args.run and (args.run == "all" or args.run in place(source)):
            print(f"running {place(source)}", flush=True)
            execute(source)


if __name__ == "__main__":
    main()
