# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv if it does not exist.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PEERS  ?= .venv-peers

.PHONY: campaign demo test lint format records records-check bench bench-peers quality notebooks docs clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	@touch $@

# Other people's packages, which tests/world holds the library against. timm declares torchvision but runs without.
$(VENV)/.world: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[world]"
	$(BIN)/python -m pip install --quiet --no-deps "timm>=1.0"
	$(BIN)/python -m pip install --quiet --no-deps -r tests/laplace/peer.txt
	@touch $@

demo: $(VENV)/.installed  ## train, evaluate and compare every method on the embedded digits data
	$(BIN)/torchbayes compare --out demo
	@echo "Open demo/report.html in a browser."

# One worker per core, because a test uses one thread. At most four: every worker imports and collects everything
# again and takes about a gigabyte, and a container may show more cores than it gives. Idle workers steal runs of
# neighbouring tests, so that a module's fixtures are mostly made once.
test: $(VENV)/.world lint  ## style, types, then all tests of the library
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

records: $(VENV)/.installed  ## README's tables, docs/results.md, docs/results/, docs/benchmarks.md and their pictures, from results/
	$(BIN)/python -m tools.records

records-check: $(VENV)/.installed  ## fail if one of them is not what results/ gives, or if the tools are broken
	$(BIN)/python -m tools.records --check
	$(BIN)/python -m pytest tools/tests

bench: $(VENV)/.world  ## measure ratios in turns and rewrite their page; nothing else may run meanwhile
	$(BIN)/python benchmarks/steps.py --memory --predict --json results/benchmarks.json
	$(BIN)/python benchmarks/latency.py --json results/latency.json
	$(BIN)/python benchmarks/growth.py --json results/growth.json
	$(BIN)/python benchmarks/throughput.py --json results/throughput.json
	$(BIN)/python benchmarks/processes.py --json results/processes.json
	$(BIN)/python benchmarks/kfac_step.py --json results/kfac.json
	$(BIN)/python benchmarks/hypernet_step.py --memory --json results/hypernet.json
	$(BIN)/python benchmarks/batch_norm.py --json results/batch-norm.json
	$(BIN)/python benchmarks/scaling.py --json results/scaling.json
	$(BIN)/python -m tools.records

$(PEERS)/.installed: pyproject.toml constraints.txt benchmarks/peers.txt benchmarks/peers-need.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt -e . -r benchmarks/peers-need.txt
	$(PEERS)/bin/python -m pip install --quiet --no-deps -r benchmarks/peers.txt
	@touch $@

bench-peers: $(PEERS)/.installed $(VENV)/.installed  ## the same for other libraries, in an environment of their own
	$(PEERS)/bin/python benchmarks/peers.py --json results/peers.json
	$(BIN)/python -m tools.records

quality: $(VENV)/.installed  ## every method at its defaults on small tasks, as far as it has changed; docs/quality.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quality.py

notebooks: $(VENV)/.installed  ## the tutorials as notebooks, in notebooks/
	$(BIN)/python -m tools.notebooks

MINUTES ?= 60
SEED    ?=
campaign: $(VENV)/.world  ## look for faults; the result is added to results/campaign.json and docs/reliability.md
	$(BIN)/python -m tests.campaigns --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) --record

docs: $(VENV)/.installed  ## the documentation, strictly: a broken link is an error
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(PEERS) demo build dist site
