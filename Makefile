# A fresh machine needs only Python >= 3.11 with pip: every target makes its own environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes of tests; each has ranks of its own, up to 3 GiB in all. Many tests wait for messages, so three fill two cores.
JOBS ?= 3
READY := $(VENV)/.ready
# Tests start hundreds of interpreters; without this, each may compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-full test-gpu checks docs-check site format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make the virtual environment (every other target does this by itself)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python {v.major}.{v.minor} found; Megalight needs 3.11 or newer. Next: make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## train, resume and sample a small GPT on this machine
	$(BIN)/python examples/demo.py

test: $(READY) ## the tests that every change must pass, in JOBS=3 processes
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

test-full: $(READY) ## also whole matrices, kills and soaks, and GPU tests where there is one; writes tests/results/full.md
	$(BIN)/python -m pytest -m '' --numprocesses $(JOBS) --dist worksteal --summary tests/results/full.md

test-gpu: $(READY) ## the tests that need GPUs, in JOBS processes; writes tests/results/gpu.md (GIT_COMMIT names the commit of a copy)
	$(BIN)/python -m pytest -m gpu --numprocesses $(JOBS) --dist loadgroup --summary tests/results/gpu.md

checks: $(READY) site ## lint, format, types, import levels, the documentation's site; counts files, lines, and what a batch enters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest tests/test_import_levels.py tests/test_package.py
	$(BIN)/python tools/structure.py --enter

docs-check: $(READY) ## run the commands and code that the documentation shows
	$(BIN)/python -m pytest tests/test_docs.py

site: $(READY) ## build the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and everything that runs leave behind
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
