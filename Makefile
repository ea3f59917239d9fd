# Two commands for a new user: `make demo` and `make test`. Everything is installed into .venv, once.
#   PYTHON   the interpreter that makes the virtual environment
#   TORCH    the torch release that is installed first
#   ARGS     extra arguments for pytest, e.g. make test ARGS="-k resume"
#   BENCH_ARGS  arguments for benchmarks/feed.py
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo check test ray-check bench gpu-check clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make .venv and install the package with its development tools

# The stamp is a copy of the pyproject.toml that was installed: when only the file's time is new (a checkout does
# that), nothing is installed again and the network is left alone.
# torch goes first: by itself the range in pyproject.toml would bring the newest release, not the tested one.
$(STAMP): pyproject.toml
	@if cmp -s $< $@; then touch $@; exit 0; fi; \
	if ! command -v "$(PYTHON)" >/dev/null; then \
	    echo "There is no '$(PYTHON)'. Name a Python 3.11 or newer: make setup PYTHON=python3.12" >&2; exit 1; \
	fi; \
	if ! "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    echo "lightning_gpufeed needs Python 3.11 or newer, but '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)." >&2; \
	    echo "Name another one: make setup PYTHON=python3.12" >&2; exit 1; \
	fi; \
	echo "Installing into $(VENV) (needs the network, once)"; \
	$(BIN)/python -m pip --version &>/dev/null || "$(PYTHON)" -m venv --clear $(VENV); \
	$(BIN)/python -m pip install --quiet "pip>=25.1"; \
	$(BIN)/python -m pip install --quiet "$(TORCH)"; \
	$(BIN)/python -m pip install --quiet -e . --group dev; \
	cp $< $@

demo: setup  ## fetch Fashion-MNIST, pack it into HDF5, inspect it, train on it
	$(BIN)/python examples/fashion_mnist.py

check: setup  ## lint, format, types, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Compiled tests are kept, though the variable may say otherwise: the two processes share the work.
test: setup  ## run the whole test suite
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist loadfile $(ARGS)

ray-check: setup  ## install the extra [ray] and run what needs Ray (3 minutes)
	$(BIN)/python -m pip install --quiet -e '.[ray]'
	$(BIN)/pytest tests/strategies/test_ray.py $(ARGS)

bench: setup  ## measure the feed against every peer (25 minutes; BENCH_ARGS=--quick: one)
	$(BIN)/python benchmarks/feed.py --make-peers $(BENCH_ARGS)

gpu-check: setup  ## run what needs a CUDA device
	PYTHON=$(BIN)/python bash benchmarks/gpu_check.sh

clean:  ## remove the virtual environment, caches and build products
	rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
