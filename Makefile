# make demo    everything set up, then a real agent with a real model on this machine; result in runs/demo/
# make test    everything set up, then linters, types, import contracts and all tests that need no server
# make soak    the long ones: histories of the registry, simulated clusters (hours)
# make integration    the same tasks against a real vLLM CPU server, in an environment of its own
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
FIND_PYTHON = for p in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  "$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && { echo "$$p"; exit 0; }; done; \
	  echo "Python 3.11 to 3.14 is needed; fix: apt-get install python3 python3-venv" >&2; exit 1

.PHONY: demo test lint types tests integration soak clean

demo: $(VENV)/.demo
	@$(BIN)/polynya demo

test: lint types tests

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: $(VENV)/.dev
	@$(BIN)/mypy

tests: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not vllm and not clis and not postgres and not faults" --cov --cov-report=
	@$(BIN)/coverage report --include='src/polynya/tokens/*,src/polynya/capture/*' --fail-under=100
	@$(BIN)/coverage report --fail-under=85 --skip-covered --format=total

integration: $(VENV)/.dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/integration.sh

soak: $(VENV)/.dev
	@POLYNYA_SOAK=1 $(BIN)/python -m pytest tests/rollout/registry --timeout=36000 -q
	@$(BIN)/python scripts/simulate.py rough --seeds 1000 --hours 1
	@$(BIN)/python scripts/simulate.py large --nodes 1000 --slots 16 --sessions 100000

$(VENV)/bin/python:
	@python="$$($(FIND_PYTHON))" && { "$$python" -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "cannot make $(VENV); fix: apt-get install python3-venv" >&2; exit 1; }; }

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "installing polynya into $(VENV)"
	@$(PIP) install -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing polynya and its development tools into $(VENV)"
	@$(PIP) install -e '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .venv-vllm .venv-differential .venv-ray .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
