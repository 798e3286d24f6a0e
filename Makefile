# Two commands set themselves up on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
ARGS ?=
JOBS ?= 2
PIP = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: run test lint types unit interpret doctest clean

run: .venv/ready  ## train a routed transformer on the standard library's own sources
	.venv/bin/onepass train $(ARGS)

test: lint types unit interpret doctest  ## everything that needs no GPU

lint: .venv-dev/ready
	.venv-dev/bin/ruff check .
	.venv-dev/bin/ruff format --check .

types: .venv-dev/ready
	.venv-dev/bin/mypy

unit: .venv-dev/ready
	OMP_NUM_THREADS=1 .venv-dev/bin/pytest -q -n $(JOBS) --dist worksteal $(ARGS)

# the Triton kernels themselves, run by Triton's interpreter on the CPU
interpret: .venv-dev/ready
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 .venv-dev/bin/pytest -q -n $(JOBS) --dist worksteal tests/contract tests/ops tests/core/test_replay_kernels.py $(ARGS)

doctest: .venv-dev/ready
	OMP_NUM_THREADS=1 .venv-dev/bin/pytest -q --doctest-modules --ignore-glob='*kernels_*' src

clean:
	rm -rf .venv .venv-dev .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "onepass needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python $(PIP) 'pip>=25.1'
	.venv/bin/python $(PIP) --editable .
	touch $@

.venv-dev/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "onepass needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv --clear .venv-dev
	.venv-dev/bin/python $(PIP) 'pip>=25.1'
	.venv-dev/bin/python $(PIP) --group dev --editable .
	touch $@

MINUTES ?= 10
fuzz: .venv-dev/ready  ## attacks with fresh seeds, MINUTES long; findings go to fuzz-findings/
	PYTHONPATH=src .venv-dev/bin/python -m fuzz --minutes $(MINUTES) --jobs $(JOBS) $(ARGS)
.PHONY: fuzz
