"""The book as static HTML: `make site`, which runs sphinx-build -c book/site book out/site.

The pages ask no other host for anything: MathJax comes from the package django-static-mathjax, which is a copy of its
files, and the theme uses the fonts of the reader's system. `tex-svg.js` is one file that needs no fonts; Firefox would
not load fonts from a folder above a page that was opened as file://.

BOOK_REPOSITORY=owner/name adds links that open a page's notebook in Colab or Binder.
"""

import os
import shutil
import sys
from importlib.resources import files
from pathlib import Path

BOOK = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(BOOK / "site"))  # where slugs.py is
PARTS = {  # the first two characters of a chapter's folder: the heading of its list
    "00": "K3",
    "01": "Arithmetic",
    "02": "KDA",
    "03": "MLA and residuals",
    "04": "Experts",
    "05": "Streaming",
}

project = "Kimi K3, notebook by notebook"
root_doc = "README"
extensions = ["myst_nb", "sphinx_copybutton"]
exclude_patterns = ["**/.ipynb_checkpoints", "site/**"]
nb_execution_mode = "off"  # the notebooks hold their outputs
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
myst_heading_slug_func = "slugs.as_in_jupyterlab"  # one link leads to a section in JupyterLab and on the site
suppress_warnings = ["myst.duplicate_def"]  # each cell of a notebook defines the targets of its own links

html_theme = "furo"
html_title = project
html_static_path = ["static", str(files("mathjax") / "static/mathjax/es5/tex-svg.js")]
html_css_files = ["book.css"]
html_show_search_summary = False  # the summary is fetched from the page, which a browser refuses under file://
html_copy_source = False
mathjax_path = "tex-svg.js"
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/open.html",
        "sidebar/scroll-end.html",
    ]
}
html_context = {"repository": os.environ.get("BOOK_REPOSITORY", "")}


def add_chapters(app, docname, source):
    "Give the table of contents the chapters by path, a list for each folder; then answers and pages like a glossary."
    if docname != root_doc:
        return
    lists = {PARTS[folder.name[:2]]: folder.glob("[0-9]*.ipynb") for folder in sorted(BOOK.glob("[0-9]*/"))}
    lists |= {"Answers": BOOK.glob("answers/*.ipynb"), "Reference": BOOK.glob("[!R]*.md")}
    for heading, found in lists.items():
        if pages := sorted(path.relative_to(BOOK).with_suffix("").as_posix() for path in found):
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n" + "\n".join(pages) + "\n```\n"


def add_index(app, error):
    "A web server shows index.html: the table of contents once more."
    if error is None:
        shutil.copy(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")


def setup(app):
    app.connect("source-read", add_chapters)
    app.connect("build-finished", add_index)
