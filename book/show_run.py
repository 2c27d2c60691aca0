"""Execute a notebook and show what its cells tagged `run` print, as it comes:

    python book/show_run.py NOTEBOOK EXECUTED

The second name is that of the executed notebook. It is complete before it gets this name, also if a cell has failed, so
two runs at once never write to one file.
"""

import os
import sys
import uuid
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from k3lib.display import Display, OutputLost, complain

TAG = "run"


class Shown(NotebookClient):
    "Executes a notebook, and calls `show` with what tagged cells print as they print it, which papermill cannot."

    def __init__(self, notebook, show):
        super().__init__(notebook, timeout=None, kernel_name="python3")
        self.show = show

    def process_message(self, msg, cell, cell_index):
        printed = msg["msg_type"] == "stream" and msg["content"]["name"] == "stdout"
        if printed and TAG in cell.metadata.get("tags", []):
            self.show(msg["content"]["text"], end="")
        return super().process_message(msg, cell, cell_index)


def main(source, target):
    "Execute `source` into `target`. Returns the exit code."
    part, show, failed = target.with_name(f"{uuid.uuid4().hex}.ipynb"), Display(goes_on=True), None
    notebook = nbformat.read(source, 4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    try:
        Shown(notebook, show).execute()
    except CellExecutionError as error:
        failed = f"{source}: a cell failed: {error.evalue or error.ename}"
    finally:
        nbformat.write(notebook, part)
        os.replace(part, target)
    show(f"\nexecuted notebook, with all experiments of the chapter: {target}")
    if failed:
        complain(failed)
    show.end()
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(*map(Path, sys.argv[1:])))
    except OutputLost as error:
        complain(f"{sys.argv[2]}: {error}")
        sys.exit(1)
