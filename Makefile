# The front door. `make demo` and `make test` set everything up by themselves; run either first on a fresh machine.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

.PHONY: setup demo test test-slow test-pair test-packaging lint models clean

setup: $(VENV)/.installed  ## a virtual environment with Outrider in it

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Outrider needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (use make PYTHON=python3.12)")'
	$(PYTHON) -m venv $(VENV)

# torch first and alone: the pin in constraints.txt names a CPU build, and nothing else may pull in another one.
$(VENV)/.installed: $(VENV)/bin/python $(SOURCES)
	@echo "installing Outrider and its dependencies into $(VENV) (a minute or two)"
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) --editable '.[dev]'
	@touch $@

models: $(VENV)/.installed  ## the embedded default model, about 100 MB, fetched once
	$(BIN)/outrider models pull smollm2-135m

demo: models  ## real text from a real model, plain and speculative
	$(BIN)/outrider demo

test: $(VENV)/.dev models  ## everything that runs in minutes
	$(BIN)/pytest -m "not slow and not pair"

test-slow: $(VENV)/.dev models  ## deeper sweeps, and drafters without the kernels
	$(BIN)/pytest -m "slow and not pair" --ignore tests/packaging
	OUTRIDER_CPU=torch $(BIN)/pytest tests/unit/test_block_drafter.py tests/unit/test_recurrent_chain.py tests/unit/test_copies.py
	OUTRIDER_CPU=torch $(BIN)/pytest -m "not slow and not pair" -k auto tests/contract

test-pair: $(VENV)/.dev models  ## what needs the Qwen2.5-Coder pair (1.6 GB, fetched once)
	$(BIN)/outrider models pull qwen2.5-coder-1.5b
	$(BIN)/outrider models pull qwen2.5-coder-0.5b
	$(BIN)/pytest -m pair

test-packaging: $(VENV)/.dev  ## the wheel, and installs with and without a compiler; several minutes, builds twice
	$(BIN)/pytest tests/packaging

lint: $(VENV)/.dev  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
