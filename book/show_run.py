"Print what the cells of an executed notebook printed: python book/show_run.py out/25_decode.ipynb"

import sys

import nbformat

for cell in nbformat.read(sys.argv[1], 4).cells:
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            print(output.text, end="")
print(f"executed notebook: {sys.argv[1]}")
