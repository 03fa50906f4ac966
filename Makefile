# Headrace. The two commands to know: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
export PYTHONDONTWRITEBYTECODE :=  # tests start processes by the hundred: each would compile everything again

.PHONY: demo test test-long test-real setup check chaos bench lock reference screenshots clean

demo: setup  ## run the main job on bundled prompts against simulated servers (no GPU, no network)
	$(BIN)/headrace demo

test: $(VENV)/.dev-installed  ## everything CI runs
	$(BIN)/ruff check
	$(BIN)/pyrefly check --min-severity error
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-long: $(VENV)/.dev-installed  ## what is too slow for every run, about ten minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long

REAL_SGLANG ?= .real-sglang
TESTS ?= tests/real
test-real: $(VENV)/.dev-installed  ## against a real SGLang on the CPU (3.5 GB in REAL_SGLANG), or servers elsewhere: ENDPOINTS=URL,URL TOKENIZER=DIR
	$(if $(ENDPOINTS),,tests/real/setup.sh $(REAL_SGLANG))
	REAL_SGLANG=$(REAL_SGLANG) ENDPOINTS=$(ENDPOINTS) TOKENIZER=$(TOKENIZER) CONSUMERS="$(CONSUMERS)" \
	  $(BIN)/python -m pytest -m real $(TESTS) --durations=10

check: test  ## the same by another name

SEEDS ?= 20
ROWS ?= 5000
FAULTS ?= 50
JOBS ?= 1
chaos: $(VENV)/.dev-installed  ## seeded runs under random faults, about two minutes each (as root also a full disk)
	$(BIN)/python -m tests.chaos --seeds $(SEEDS) --rows $(ROWS) --faults $(FAULTS) --jobs $(JOBS)

BENCH ?= /tmp/headrace-bench
PEERS ?= $(BENCH)/peers
bench: $(VENV)/.dev-installed  ## the tables of docs/benchmarks.md, half an hour on an idle machine; JSON in BENCH
	mkdir -p $(BENCH)
	$(BIN)/python -m benchmarks.saturation --servers reserve,free_space --times h200 --json $(BENCH)/saturation.json
	$(BIN)/python -m benchmarks.staged --json $(BENCH)/staged.json
	$(BIN)/python -m benchmarks.overhead --workers 1,2 --json $(BENCH)/overhead.json
	$(BIN)/python -m benchmarks.choices --json $(BENCH)/choices.json
	$(BIN)/python -m benchmarks.lease_cost --leases 1000,2000 --json $(BENCH)/lease_cost.json
	$(BIN)/python -m benchmarks.enqueue --rows 50000 --repeat 5 --json $(BENCH)/enqueue.json
	$(BIN)/python -m benchmarks.goodput --repeat 5 --json $(BENCH)/goodput.json
	$(BIN)/python -m benchmarks.flat --rows 30000 --json $(BENCH)/flat.json
	-test -d $(PEERS) || benchmarks/peers/setup.sh $(PEERS)
	$(BIN)/python -m benchmarks.peers.compare --venvs $(PEERS) --json $(BENCH)/peers.json

setup: $(VENV)/.installed  ## leaves .venv/bin/headrace

$(VENV)/.installed: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes -r requirements.txt
	$(PIP) install --require-hashes -r requirements-build.txt
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.dev-installed: $(VENV)/.installed requirements-dev.txt
	$(PIP) install --require-hashes -r requirements-dev.txt
	touch $@

lock:  ## pin again from the .in files
	test -x $(VENV)-lock/bin/pip-compile || ($(PYTHON) -m venv $(VENV)-lock && $(VENV)-lock/bin/pip install -q pip-tools)
	for f in requirements requirements-build requirements-dev; do \
	  $(VENV)-lock/bin/pip-compile -q --strip-extras --allow-unsafe --generate-hashes --no-emit-index-url --no-emit-find-links $$f.in -o $$f.txt || exit 1; done

reference: $(VENV)/.dev-installed  ## docs/reference.md from the code
	$(BIN)/python -m app.cli.reference > docs/reference.md

screenshots: $(VENV)/.dev-installed  ## docs/screenshots/*.png; needs `apt install chromium`
	$(BIN)/python docs/screenshots/make.py

clean:
	rm -rf $(VENV) $(VENV)-lock
