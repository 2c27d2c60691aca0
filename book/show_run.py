"""Execute a notebook and print what its cells printed: python book/show_run.py NOTEBOOK EXECUTED

The second name is that of the executed notebook. It is complete before it gets this name, also if a cell has failed, so
two runs at once never write to one file.
"""

import os
import sys
import uuid
from pathlib import Path

import nbformat
import papermill

from k3lib.display import Display, OutputLost, complain


def main(source, target):
    part, show = target.with_name(f"{uuid.uuid4().hex}.ipynb"), Display(goes_on=True)
    try:
        papermill.execute_notebook(source, part, progress_bar=False)
        for cell in nbformat.read(part, 4).cells:
            for output in cell.get("outputs", []):
                if output.output_type == "stream":
                    show(output.text, end="")
    finally:
        if part.exists():
            os.replace(part, target)
    show(f"executed notebook: {target}")
    show.end()


if __name__ == "__main__":
    try:
        main(*map(Path, sys.argv[1:]))
    except OutputLost as error:
        complain(f"{sys.argv[2]}: {error}")
        sys.exit(1)
