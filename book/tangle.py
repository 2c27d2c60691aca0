"""Make the products of the book from its sources.

    python book/tangle.py                      write k3lib/*.py from the cells tagged `export`
    python book/tangle.py --run 02_kda/01_kda  also execute chapters whose path contains that text, write their .ipynb
    python book/tangle.py --run all            the same for every chapter
    python book/tangle.py --check              change nothing; name whatever is stale, exit 1

jupytext parses, nbformat validates and nbclient executes: none of that is ours to write.
"""
import argparse
import ast
import hashlib
import re
import shutil
import sys
from pathlib import Path

import jupytext
import nbformat
from IPython.paths import get_ipython_cache_dir
from nbclient import NotebookClient

BOOK = Path(__file__).resolve().parent
PACKAGE = BOOK.parent / "k3lib"
# The arrows: what each module may import, in the order modules are made. Whatever an import may reach, its own imports may reach too.
MAY_IMPORT = {
    "checkpoint": "", "mxfp4": "checkpoint", "linear": "mxfp4", "kda": "linear", "mla": "mxfp4 linear",
    "residual": "linear", "router": "linear", "moe": "mxfp4 router linear", "config": "checkpoint", "tokenizer": "checkpoint",
    "synth": "checkpoint config", "verify": "checkpoint",
    "trunk": "checkpoint linear", "experts": "linear mxfp4 moe trunk",
    "model": "checkpoint linear kda mla residual router moe config trunk experts",
    "decode": "model config tokenizer checkpoint trunk experts",
}
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def sources():
    "Chapter sources in reading order; the file name after its number is the module's name."
    return sorted(p for p in BOOK.glob("[0-9]*/[0-9]*.py"))


def digest(text, n=12):
    return hashlib.sha256(text.encode()).hexdigest()[:n]


def public_names(tree):
    "Names the module defines at top level, in order, without a leading underscore."
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for target in node.targets for t in ast.walk(target) if isinstance(t, ast.Name))


def module_text(source, made):
    """The text of one module. It names the digest of every module it imports: numba's on-disk cache looks at a
    file's own time and size only, so a kernel must see its file change when a kernel it inlines does."""
    name = source.stem[3:]
    cells = jupytext.read(source, fmt="py:percent").cells
    title = cells[0].source.splitlines()[0].lstrip("# ")
    code = [c.source for c in cells if "export" in c.metadata.get("tags", [])]
    imports = dict.fromkeys(re.findall(r"^\s*from k3lib\.(\w+) import|^\s*import k3lib\.(\w+)", "\n".join(code), re.M))
    imports = ["".join(pair) for pair in imports]
    for other in imports:
        if other not in MAY_IMPORT[name].split():
            sys.exit(f"{source.relative_to(BOOK.parent)}: imports k3lib.{other}, but {name} may import only: "
                     f"{MAY_IMPORT[name] or 'nothing of the book'}")
        if other not in made:
            sys.exit(f"{source.relative_to(BOOK.parent)}: imports k3lib.{other}, which is not made before it")
    head = f'"""{title}\n\nMade from {source.relative_to(BOOK.parent)}: edit that, then run `make export`.\n"""\n'
    head += "".join(f"# built on {other} {digest(made[other])}\n" for other in imports)
    body = "\n\n\n".join(code)
    names = [n for n in dict.fromkeys(public_names(ast.parse(body))) if not n.startswith("_")]
    return f"{head}\n{body}\n\n\n__all__ = {names!r}\n"


def notebook(source):
    "The unexecuted notebook. A cell's id is the digest of its text, so that building twice gives the same file."
    nb = jupytext.read(source, fmt="py:percent")
    nb.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    seen = {}
    for cell in nb.cells:
        key = digest(cell.source, 8)
        seen[key] = seen.get(key, 0) + 1
        cell["id"] = key if seen[key] == 1 else f"{key}-{seen[key]}"
        cell.metadata = nbformat.from_dict({"tags": cell.metadata.tags} if "tags" in cell.metadata else {})
    return nb


def execute(source):
    "Run a chapter from nothing: numba's cache of notebook cells does not see that a kernel another cell inlines has changed."
    shutil.rmtree(Path(get_ipython_cache_dir()) / "numba_cache", ignore_errors=True)
    nb = notebook(source)
    NotebookClient(nb, timeout=600, record_timing=False, resources={"metadata": {"path": source.parent}}).execute()
    nb.metadata = notebook(source).metadata
    nbformat.write(nb, source.with_suffix(".ipynb"))


def stale_notebook(source):
    "Why the .ipynb does not belong to its source, or None."
    path = source.with_suffix(".ipynb")
    if not path.exists():
        return "missing"
    have, want = nbformat.read(path, 4), notebook(source)
    if [(c.cell_type, c.source, c.id, c.metadata) for c in have.cells] != [(c.cell_type, c.source, c.id, c.metadata) for c in want.cells]:
        return "differs from its source"
    for cell in have.cells:
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            return "is not executed"
        raises = "nbval-raises-exception" in cell.metadata.get("tags", [])
        if not raises and any(o.output_type == "error" for o in cell.get("outputs", [])):
            return "holds an error"


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--run", metavar="TEXT", help="execute chapters whose path contains TEXT, or `all`")
    args.add_argument("--check", action="store_true")
    args = args.parse_args()
    made, stale = {}, []
    for source in sorted(sources(), key=lambda s: [*MAY_IMPORT].index(s.stem[3:])):
        name, path = source.stem[3:], PACKAGE / f"{source.stem[3:]}.py"
        made[name] = module_text(source, made)
        if not path.exists() or path.read_text() != made[name]:
            stale.append(f"k3lib/{path.name} is stale")
            if not args.check:
                path.write_text(made[name])
    if args.check:
        stale += [f"{s.with_suffix('.ipynb').relative_to(BOOK.parent)} {why}" for s in sources() if (why := stale_notebook(s))]
        stale += [f"k3lib/{p.name} has no chapter" for p in PACKAGE.glob("*.py") if p.stem not in {*made, "__init__", "__main__", "cli"}]
        sys.exit("\n".join(stale) + "\nrun: python book/tangle.py --run all" if stale else 0)
    for source in sources():
        if args.run and (args.run == "all" or args.run in str(source.relative_to(BOOK))):
            print(f"running {source.relative_to(BOOK.parent)}", flush=True)
            execute(source)


if __name__ == "__main__":
    main()
