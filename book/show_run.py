"Print what the cells of an executed notebook printed: python book/show_run.py out/28_decode.ipynb"

import sys

import nbformat

from k3lib.display import Display, OutputLost, complain

show = Display(goes_on=False)
try:
    for cell in nbformat.read(sys.argv[1], 4).cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                show(output.text, end="")
    show(f"executed notebook: {sys.argv[1]}")
except OutputLost as error:
    complain(f"{sys.argv[1]}: is executed, but {error}")
    sys.exit(1)
