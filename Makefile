# Two commands on a fresh machine: `make demo` and `make test`. Both make .venv if it is not there.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint format bench docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(VENV)/.installed  ## train, evaluate and compare every method on the embedded digits data
	$(BIN)/torchbayes compare --out demo
	@echo "Open demo/report.html in a browser."

test: $(VENV)/.installed lint  ## style, types, then all tests
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed  ## ratios, measured interleaved, and the page of them; nothing else may run meanwhile
	$(BIN)/python benchmarks/steps.py --memory --predict --json results/benchmarks.json
	$(BIN)/python benchmarks/page.py

docs: $(VENV)/.installed  ## the documentation, strictly: a broken link is an error
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) demo build dist site
