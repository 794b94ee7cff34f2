# Two commands matter:
#   make demo   install, fetch the default model, start the server, chat with it, stop it
#   make test   the whole test suite
#
# TORCH_INDEX names the package index that torch is taken from (default: whatever pip is set to);
# an index of CPU wheels makes the download a tenth of the size.

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# Torch first and alone: its index may hold nothing else.
TORCH_FROM := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),)

.PHONY: demo test lint types clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-dev
	$(BIN)/tidemill pull smollm2
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest tests

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests benchmarks examples setup.py
	$(BIN)/ruff check src tests benchmarks examples setup.py

types: $(VENV)/.installed-dev
	$(BIN)/mypy

$(VENV)/.torch: constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints-cpu.txt torch $(TORCH_FROM)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py $(wildcard src/tidemill/ops/cpu/csrc/*)
	$(PIP) install -q -c constraints-cpu.txt -e '.[demo]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml setup.py $(wildcard src/tidemill/ops/cpu/csrc/*)
	$(PIP) install -q -c constraints-cpu.txt -e '.[demo,bench,dev]'
	touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/tidemill/ops/cpu/*.so
