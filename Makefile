# Everything sets itself up: `make demo` and `make test` work in a fresh clone with Python 3.11+ and make alone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
# Many images forbid Python to write bytecode, and each process would compile what it imports.
export UV_COMPILE_BYTECODE := 1

.PHONY: help setup demo chaos adversary quick test test-launcher test-docs test-examples test-long test-newest test-oldest test-browser test-slurm test-ray test-kubernetes accelerator parity simulate mutants bench storm loops lint format docs chart release stubs clean

help:  ## this text
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make the environment in .venv

$(STAMP): pyproject.toml coordinator/pyproject.toml launcher/pyproject.toml protocol/pyproject.toml $(wildcard lane/*)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxft needs Python 3.11 or newer; say which: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV)
	@test "$(origin PYTHON)" = file || "$(PYTHON)" -c 'import os, sys; sys.exit(None if os.path.exists("$(VENV)/lib/python%d.%d" % sys.version_info[:2]) else "$(VENV) has another Python than $(PYTHON). Run make clean first, or choose another environment: make VENV=.venv-other ...")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e protocol -e coordinator -e '.[llama3]' -e launcher --group dev
	@$(BIN)/python -m compileall -q jaxft protocol coordinator launcher examples
	@$(BIN)/python lane/build.py || true
	@touch $(STAMP)

demo: $(STAMP)  ## train Llama 3 in three replica groups, kill each with kill -9, compare bit for bit
	$(BIN)/python -m lab demo $(ARGS)

chaos: $(STAMP)  ## 100 seeded kills -9 at every phase of a step, compared bit for bit: make chaos ARGS="--seed 7"
	$(BIN)/python -m lab chaos $(ARGS)

adversary: $(STAMP)  ## half an hour of all faults, the coordinator's death among them, compared bit for bit
	$(BIN)/python -m lab chaos --minutes 30 --faults kill,stop,hang,link,partition,coordinator,corrupt \
		--heartbeat-timeout-ms 2000 --failure-timeout-s 20 $(ARGS)

# What needs a separate system, or half an hour.
ELSEWHERE := storm or slurm or ray or kubernetes

quick: $(STAMP)  ## the protocol and pure values, in about a minute
	$(BIN)/pytest -n 2 -m 'not long and not processes and not ($(ELSEWHERE))' tests/protocol tests/scenarios $(ARGS)

test: $(STAMP)  ## every guarantee and every room, 7 to 10 minutes on 2 cores
	$(BIN)/pytest -m 'not launcher and not manual and not examples and not long and not ($(ELSEWHERE))' $(ARGS)

test-launcher: $(STAMP)  ## the command jaxft: launch, chaos, check, and the demo
	$(BIN)/pytest -m 'launcher and not long and not ($(ELSEWHERE))' $(ARGS)

test-docs: $(STAMP) $(BIN)/helm  ## every block, flag and link of the docs, and the charts
	$(BIN)/pytest -m 'manual and not long and not ($(ELSEWHERE))' $(ARGS)

test-examples: $(STAMP)  ## Llama 3, the ports and the loops of others
	$(BIN)/pytest -m 'examples and not long and not ($(ELSEWHERE))' $(ARGS)

test-long: $(STAMP) $(BIN)/helm  ## more of the same: what takes long each, 15 to 20 minutes on 2 cores
	$(BIN)/pytest -m 'long and not ($(ELSEWHERE))' $(ARGS)

test-newest:  ## the same on the newest JAX, which needs Python 3.12+: make test-newest NEWEST=python3.13
	$(MAKE) test PYTHON="$(NEWEST)" VENV=.venv-newest

test-oldest:  ## the same with the oldest versions that jaxft takes of what it needs, in .venv-oldest
	$(MAKE) setup VENV=.venv-oldest
	.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --upgrade --resolution lowest-direct \
		-e protocol -e 'coordinator[etcd]' -e '.[llama3-all]' -e launcher
	# import-linter needs a newer rich than jaxft does.
	$(MAKE) test VENV=.venv-oldest ARGS="--deselect tests/test_architecture.py::test_the_import_contracts_hold $(ARGS)"

accelerator: $(STAMP)  ## the suite for any backend, on the device that JAX finds: make accelerator ARGS="-k cut"
	$(BIN)/pytest -m accelerator tests/accelerator $(ARGS)

test-browser: $(STAMP)  ## the coordinator's page in a real browser: apt install chromium
	$(BIN)/pytest -m browser -n 0 tests/operate $(ARGS)

test-slurm: $(STAMP)  ## deploy/slurm under a real Slurm, started here as root: apt install slurmctld slurmd slurm-client
	$(BIN)/pytest -m slurm -n 0 tests/slurm $(ARGS)

test-ray:  ## examples/ray under a real Ray, in .venv-ray
	$(MAKE) setup VENV=.venv-ray
	.venv-ray/bin/uv pip install --quiet --python .venv-ray/bin/python --group ray
	.venv-ray/bin/pytest -m ray -n 0 tests/ray $(ARGS)

test-kubernetes: $(STAMP) $(BIN)/helm $(BIN)/kubectl  ## the charts in a real API server, with real controllers: KUBEBUILDER_ASSETS, docs/kubernetes.md
	$(BIN)/pytest -m kubernetes -n 0 tests/kubernetes $(ARGS)

parity:  ## the Llama 3 example against transformers on torch, in .venv-parity
	$(MAKE) setup VENV=.venv-parity
	.venv-parity/bin/uv pip install --quiet --python .venv-parity/bin/python --group parity $(PARITY)
	.venv-parity/bin/pytest -n 0 tests/examples/test_llama3_parity.py $(ARGS)

simulate: $(STAMP)  ## the protocol under attack, on a virtual clock: make simulate SEEDS=100000 SIMULATOR=pypy3
	PYTHONPATH=protocol:coordinator:launcher $(or $(SIMULATOR),$(BIN)/python) -m tests.simulation --seeds $(or $(SEEDS),10000) --jobs 2 $(ARGS)

mutants: $(STAMP)  ## bugs planted into the protocol's cores, and in how many seeds each is found
	$(BIN)/python -m tests.simulation.mutants $(ARGS)

storm: $(STAMP)  ## the long fault storms
	$(BIN)/pytest -m storm -n 0 $(ARGS)

loops: $(STAMP)  ## other people's training loops under kills: the table of docs/porting.md
	$(BIN)/uv pip install --quiet --python $(BIN)/python --group loops
	$(BIN)/python -m tests.loops $(ARGS)

bench: $(STAMP)  ## every figure beside TorchFT, into bench-results: about 40 minutes on 2 cores
	$(BIN)/python -m benchmarks all --json bench-results/all.json
	$(BIN)/python -m benchmarks.report bench-results/all.json bench-results

lint: $(STAMP)  ## ruff, pyright, import contracts, word list
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m tests.words

format: $(STAMP)  ## let ruff put the code in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## the manual, warnings as errors, into docs/_build
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build

chart: $(STAMP) $(BIN)/helm  ## the charts in deploy/charts as plain YAML, into deploy/kubernetes
	$(BIN)/python -m deploy.render

release: $(STAMP) $(BIN)/helm  ## sdists, wheels and charts in dist, nothing uploaded: make release VERSION=0.2.0
	$(BIN)/uv pip install --quiet --python $(BIN)/python --group release
	$(BIN)/python -m deploy.release "$(VERSION)"

$(BIN)/helm $(BIN)/kubectl: | $(STAMP)
	$(BIN)/python deploy/get_binary.py $@

stubs: $(STAMP)  ## regenerate the gRPC stubs
	$(BIN)/python protocol/generate_stubs.py

clean:
	rm -rf $(VENV) .venv-maxtext .venv-newest .venv-oldest .venv-parity .venv-ray docs/_build jaxft/_exchange/liblane.so
