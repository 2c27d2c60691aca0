# On a bare machine with Python >= 3.11 and make:
#   make lab       set up, then open the book's first page in JupyterLab
#   make decode    set up, then run the last notebook on the small trained model: prompt, answer, cost
#   make test      the check, pytest over tests/, nbval over every notebook; `make test-all`: every case of large grids
#   make site      the book as static pages in out/site; `make site-test` tries them in headless Chromium
# After editing:
#   make export    k3lib/*.py from the chapters (seconds)
#   make check     is everything in sync, lint-free and typed? changes nothing (seconds)
#   make tidy      undo what Jupyter's save puts into chapters (seconds)
#   make format    let ruff mend what it can (seconds)
ifeq ($(OS),Windows_NT)
PYTHON ?= python
BIN := .venv/Scripts
else
PYTHON ?= python3
BIN := .venv/bin
endif
PY := $(BIN)/python
# Tests and notebooks in one run of two workers; a worker takes whole files, in the order that tests/conftest.py gives.
PYTEST := $(PY) -m pytest -rs -n 2 --dist loadfile --no-loadscope-reorder
NBVAL := --nbval --nbval-sanitize-with tests/nbval.cfg --nbval-kernel-name python3

.PHONY: lab decode test test-all check lint export tidy format graph book site site-test scale matrix bench bench-history faults environments clean

lab: .venv/ready
	$(PY) -m jupyterlab book/00_k3/01_k3.ipynb

decode: .venv/ready
	mkdir -p out
	$(PY) book/show_run.py book/05_streaming/34_decode.ipynb out/34_decode.ipynb

test: .venv/ready check
	$(PYTEST) $(NBVAL) tests book

test-all: .venv/ready check
	$(PYTEST) --all $(NBVAL) tests book

check: .venv/ready lint
	$(PY) book/tangle.py --check

lint: .venv/ready
	$(PY) -m ruff check --quiet
	$(PY) -m ruff format --check --quiet
	$(PY) -m mypy

export: .venv/ready
	$(PY) book/tangle.py

tidy: .venv/ready
	$(PY) book/tangle.py --tidy

format: .venv/ready
	$(PY) -m ruff check --fix --quiet
	$(PY) -m ruff format
	$(PY) book/tangle.py

graph: .venv/ready
	$(PY) book/tangle.py --graph

book: .venv/ready
	$(PY) book/tangle.py --run all

.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -c 'import sys; sys.exit((sys.byteorder, sys.maxsize > 2**32) != ("little", True) and "a 64-bit little-endian Python is needed")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -e ".[book,dev]"
	$(PY) -c "open('.venv/ready', 'w')"

site: .venv/site-ready
	$(PY) -m sphinx -q -W --keep-going -d .venv/doctrees -c book/site book out/site
	@$(PY) -c "print('open out/site/index.html')"

site-test: site  # in headless Chromium: Debian's packages chromium and chromium-driver
	$(PY) book/site/check.py out/site out/site-screenshots

.venv/site-ready: .venv/ready
	$(PY) -m pip install --quiet -e ".[site]"
	$(PY) -c "open('.venv/site-ready', 'w')"

scale: .venv/ready
	$(PY) tests/scale.py

matrix: .venv/ready
	$(PY) tests/matrix.py

bench: .venv/ready
	$(PY) tests/bench.py

bench-history:
	@$(PYTHON) tests/history.py

faults: .venv/ready
	$(PY) tests/faults.py

environments: .venv/ready
	$(PY) tests/environments.py

clean:
	rm -rf .venv out k3lib/__pycache__ .mypy_cache .ruff_cache build dist *.egg-info
