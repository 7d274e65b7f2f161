# The words of this project; CI says the same ones. `make demo` and `make test` set up what is missing.
VENV ?= .venv
PY = $(VENV)/bin/python
JSON ?=
JSON_FLAG = $(if $(JSON),--json $(JSON),)

.PHONY: help setup demo check test test-js pyodide test-pyodide oracles e2e bench bench-kernel bench-relay bench-malice bench-wire bench-floor bench-llama-cpp bench-nat bench-paths bench-stragglers clean

help:            ## show this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

setup:           ## make $(VENV) ready and compile kernel and device
	@tools/setup.sh $(VENV)

demo: setup      ## one real answer from a real swarm (ONCE=1 exits after the check)
	@$(PY) -m backbone.demo $(if $(ONCE),--once,) $(if $(NO_TAB),--no-tab,) $(DEMO_FLAGS)

check: setup     ## format, lint, types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	tools/check-js.sh $(VENV)

test: setup      ## all tests that need no network and no browser
	$(PY) -m pytest
	tools/test-js.sh $(VENV)

pyodide: setup   ## Pyodide itself, to test the wheel that /verify loads in it (needs the npm registry once)
	tools/pyodide.sh $(VENV)

test-pyodide: pyodide  ## that wheel gives the known bytes in Pyodide
	$(PY) -m pytest tests/wasm/test_pyodide.py

oracles: setup   ## ggml's own libraries, by which tests and bench-kernel judge ours (needs the npm registry once)
	tools/oracles.sh $(VENV)

e2e: setup       ## real parts together: llama.cpp, relay, nodes, Chromium
	$(PY) -m pytest e2e

bench: bench-wire bench-floor bench-relay bench-kernel bench-llama-cpp  ## every table

bench-kernel: setup
	$(PY) bench/bench_kernel.py $(JSON_FLAG) $(ARGS)

bench-relay: setup
	$(PY) bench/bench_relay.py $(JSON_FLAG) $(ARGS)

bench-malice: setup  ## what a stranger does to another pair's round trips through the relay
	$(PY) bench/bench_malice.py $(JSON_FLAG) $(ARGS)

bench-wire: setup
	$(PY) bench/bench_wire.py $(JSON_FLAG) $(ARGS)
	$(PY) bench/bench_seal.py

bench-floor: setup
	$(PY) bench/bench_floor.py $(JSON_FLAG) $(ARGS)

bench-llama-cpp: setup
	$(PY) bench/bench_llama_cpp.py $(JSON_FLAG) $(ARGS)

bench-nat: setup  ## which pairs of NATs end direct, which relayed (Linux, root, nftables)
	$(PY) bench/bench_nat.py $(JSON_FLAG) $(ARGS)

bench-paths: setup  ## message round trips over each lane (Linux, root, nftables)
	$(PY) bench/bench_paths.py $(JSON_FLAG) $(ARGS)

bench-stragglers: setup  ## what slow nodes cost an answer (ARGS="--kinds thin --counts 1 4 --offload always")
	$(PY) bench/bench_stragglers.py $(JSON_FLAG) $(ARGS)

clean:           ## remove what was built
	rm -rf relay/_built backbone/_built dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
