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


def main(source, target):
    part = target.with_name(f"{uuid.uuid4().hex}.ipynb")
    try:
        papermill.execute_notebook(source, part, progress_bar=False)
        for cell in nbformat.read(part, 4).cells:
            for output in cell.get("outputs", []):
                if output.output_type == "stream":
                    print(output.text, end="")
    finally:
        if part.exists():
            os.replace(part, target)
    print(f"executed notebook: {target}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
