# Every target sets itself up on a fresh machine: `make run` for the demonstration, `make test` for the checks.
PYTHON ?= python3
# which torch to install, as pip writes it: make test TORCH='torch==2.13.*'
TORCH ?= torch
# the versions of everything but torch, triton and CUDA; `LOCK=` takes the newest
LOCK ?= constraints.txt
# what `make quick` compares with
BASE ?= main
ARGS ?=
JOBS ?= 2

DEV = .venv-dev/bin
# without lines of the source the compiler takes less time, and its code is the same
OLDEST = PYTHONPATH=.triton-oldest TRITON_CACHE_DIR=.triton-oldest/cache TRITON_DISABLE_LINE_INFO=1
# Inductor's cache knows an operator by its name alone: it would run what another commit's operator had compiled to
PYTEST = OMP_NUM_THREADS=1 TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 $(DEV)/pytest -q
PARALLEL = -n $(JOBS) --dist worksteal
# `test-all` takes the slow ones along
CHOSEN = -m 'not slow'
KERNELS = tests/contract tests/ops tests/fused tests/core/test_replay_kernels.py
# Python compiles what is imported, when it is: all that is installed would take pip twice as long as the rest
PIP = -m pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
LOCKED = $(PIP) $(if $(LOCK),--constraint $(LOCK))

.PHONY: run quick test test-all newest gpu slow lint types unit peers interpret codegen doctest dist docs release lock fuzz soak clean FORCE

run: .venv/ready  ## train a small transformer on the standard library's own sources
	.venv/bin/onepass train $(ARGS)

quick: lint types  ## lint, types and the tests of what changed since BASE
	tests=$$($(DEV)/python tests/changed.py $(BASE)) && { [ -z "$$tests" ] || $(PYTEST) $(PARALLEL) -m 'not slow' $$tests; }

test: lint types unit peers interpret codegen doctest  ## everything that needs no GPU, without the slow tests

test-all:  ## the slow tests, the built packages and the site as well; first what takes one process, side by side
	$(MAKE) --jobs=2 JOBS=0 types lint peers doctest dist docs
	$(MAKE) CHOSEN= unit interpret codegen

newest:  ## `test` with the newest of everything; what leans on another library's inside is told apart
	$(MAKE) LOCK= lint types codegen doctest
	$(MAKE) LOCK= unit interpret ARGS="-m 'not slow and not peer'"
	PYTHONPATH= $(PYTEST) $(PARALLEL) -m 'not slow' tests/codegen
	@echo 'The tests that follow lean on the inside of other libraries: a failure is a change of theirs.'
	$(MAKE) LOCK= unit ARGS="-m 'peer and not slow'"
	$(MAKE) LOCK= peers

lint: .venv-dev/ready
	$(DEV)/ruff check .
	$(DEV)/ruff format --check .

types: .venv-dev/ready
	$(DEV)/mypy

unit: .venv-dev/ready
	$(PYTEST) $(PARALLEL) $(CHOSEN) --ignore=tests/codegen --ignore=tests/peers $(ARGS)

peers: .venv-dev/ready  ## torch's own samples of topk and norms, its topics of optimizers on Lion, entmax's own tests
	$(PYTEST) $(PARALLEL) tests/peers $(ARGS)

# the Triton kernels themselves, run by Triton's interpreter on the CPU
interpret: .venv-dev/ready
	TRITON_INTERPRET=1 $(PYTEST) $(PARALLEL) $(CHOSEN) $(KERNELS) $(ARGS)

doctest: .venv-dev/ready
	$(PYTEST) --doctest-modules --ignore-glob='*kernels*' --ignore-glob='*/torchtitan.py' --ignore-glob='*/onepass/transformers.py' src

# every kernel compiled, within its budget of registers, by one Triton: the oldest, whose language is the smallest and
# with which the committed figures were measured. It keeps what it compiled.
codegen: .triton-oldest/ready
	$(OLDEST) $(PYTEST) $(PARALLEL) $(CHOSEN) tests/codegen $(ARGS)

gpu:  ## every test marked gpu on this machine's GPU, with the Python at hand: ARGS='--record FILE'
	PYTHONPATH=src $(PYTHON) tests/gpu.py $(ARGS)

slow: .venv-dev/ready .triton-oldest/ready
	$(PYTEST) $(PARALLEL) -m slow --ignore=tests/codegen $(ARGS)
	TRITON_INTERPRET=1 $(PYTEST) $(PARALLEL) -m slow $(KERNELS) $(ARGS)
	$(OLDEST) $(PYTEST) $(PARALLEL) -m slow tests/codegen $(ARGS)

dist: .venv-dev/ready  ## build sdist and wheel into dist/, check them and try the wheel with torch alone
	$(DEV)/python tests/packages.py

docs: .venv-docs/ready  ## the documentation as a site in .site/; a dead link is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --quiet $(ARGS)
	.venv-docs/bin/python docs/site/links.py .site

release:  ## write VERSION, today and URL where they belong, and say what is left to do
	$(PYTHON) docs/site/release.py '$(VERSION)' '$(URL)'

clean:
	rm -rf .venv .venv-dev .venv-docs .triton-oldest .site .requirement .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

.venv/ready: pyproject.toml $(LOCK) .requirement
	$(NEW)
	.venv/bin/python $(LOCKED) '$(TORCH)' --editable '.[train]'
	touch $@

.venv-dev/ready: pyproject.toml $(LOCK) .requirement
	$(NEW)
	.venv-dev/bin/python $(LOCKED) '$(TORCH)' --editable '.[train]' --group dev
	touch $@

.triton-oldest/ready: .venv-dev/ready
	rm -rf $(@D)
	$(DEV)/python $(PIP) --no-deps --target $(@D) 'triton==3.6.0'
	touch $@

# the site is made from the sources alone, without torch
.venv-docs/ready: pyproject.toml $(LOCK) .requirement
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python $(PIP) 'pip>=25.1'
	$(@D)/bin/python $(LOCKED) --group docs
	touch $@

# an environment; pip 25.1 is the first that knows --group
define NEW
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "onepass needs Python 3.10 or newer, this is " + sys.version)'
@echo 'installing $(TORCH) and what goes with it; on Linux the package index may give gigabytes of CUDA libraries'
$(PYTHON) -m venv --clear $(@D)
$(@D)/bin/python $(PIP) 'pip>=25.1'
endef

# its date changes with PYTHON, TORCH or LOCK only, so that another choice makes another environment
.requirement: FORCE
	@echo '$(PYTHON) $(TORCH) $(LOCK)' | cmp -s - $@ || echo '$(PYTHON) $(TORCH) $(LOCK)' > $@

lock: .venv-dev/ready  ## renew constraints.txt for every supported Python, and show what changed
	$(DEV)/python $(PIP) uv
	UV_CUSTOM_COMPILE_COMMAND='make lock' $(DEV)/uv pip compile --quiet --universal --upgrade --no-annotate \
	  --python-version 3.10 --no-emit-package setuptools --extra train --group dev --group docs --output-file constraints.txt pyproject.toml
	@git --no-pager diff --unified=0 constraints.txt | grep '^[-+][a-z]' || echo 'nothing changed'

soak: .venv/ready  ## stop the main job in the worst ways and resume it 50 times; 10 000 steps in flat memory
	OMP_NUM_THREADS=1 .venv/bin/python benchmarks/soak.py --json benchmarks/results/cpu/raw/soak.json $(ARGS)

MINUTES ?= 10
fuzz: .venv-dev/ready  ## the property tests on fresh examples until MINUTES are over; .hypothesis/ keeps what fails for the next run
	until=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$until ]; do \
	HYPOTHESIS_PROFILE=random $(PYTEST) $(PARALLEL) -m hypothesis $(ARGS) || exit 1; done
