# Two commands do everything on a bare machine with Python >= 3.11 and make:
#   make decode    set up, then run the last notebook on the embedded model
#   make test      nbval over every notebook, pytest over tests/, and the check that book, notebooks and package agree
PYTHON ?= python3
PY := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: decode test check export book scale matrix bench faults clean

decode: .venv/ready
	mkdir -p out
	papermill --log-level WARNING --no-progress-bar book/05_streaming/06_decode.ipynb out/06_decode.ipynb
	$(PY) book/show_run.py out/06_decode.ipynb

test: .venv/ready check
	$(PY) -m pytest -rs tests
	$(PY) -m pytest --nbval --nbval-sanitize-with tests/nbval.cfg --nbval-kernel-name python3 book

check: .venv/ready
	$(PY) book/tangle.py --check

export: .venv/ready
	$(PY) book/tangle.py

book: .venv/ready
	$(PY) book/tangle.py --run all

.venv/ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -e '.[book]'
	touch $@

scale: .venv/ready
	$(PY) tests/scale.py

matrix: .venv/ready
	$(PY) tests/matrix.py

bench: .venv/ready
	$(PY) tests/bench.py

faults: .venv/ready
	$(PY) tests/faults.py

clean:
	rm -rf .venv out k3lib/__pycache__ *.egg-info
