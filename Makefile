# Two commands: `make audit` (the main job on the demo model) and `make test` (everything that guards it).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE := $(VENV)/.docs
HALF = $$($(PYTHON) -c 'import os; print(max(1, os.cpu_count() // 2))')

.PHONY: help venv audit test tests test-slow lint types docs clean

help:
	@echo "make audit      report the position bias of the demo model (installs first; downloads 98 MB once; 3.5 processor minutes)"
	@echo "make test       every check: tests, ruff, strict types, import layers"
	@echo "make test-slow  the tests that take minutes"
	@echo "make docs       the site, with its tutorials run: build/site/index.html"
	@echo "make venv       install into .venv, nothing else"
	@echo "make clean      remove .venv, runs and caches"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "posbias needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Two workers with half of the cores each: a tenth faster than one with all, since some of the work uses a single core.
# A second time the finished audit is taken over and drawn again, or, after a change of the code, made anew (--resume).
audit: venv
	$(BIN)/posbias audit demo --length 256 --count 16 --workers 2 --threads $(HALF) --out runs/demo --resume

# Types take a minute of one core where nothing is known of them yet: they are checked beside the tests.
test: venv lint
	@$(MAKE) --no-print-directory --jobs 2 types tests

# One worker per core, one thread each: twice as fast as one worker with two threads.
# Compiled files are kept whatever the environment says: otherwise each of many processes compiles everything anew.
tests: venv
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

types: venv
	$(BIN)/mypy

test-slow: venv
	$(BIN)/pytest -m slow

$(SITE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

# Every warning is an error. Tutorials that did not change since they last ran are taken from build/notebooks.
docs: $(SITE)
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --jobs 2 --conf-dir docs -d build/doctrees . build/site
	@echo '<meta http-equiv="refresh" content="0; url=README.html">' > build/site/index.html
	@echo "site: build/site/index.html"

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
