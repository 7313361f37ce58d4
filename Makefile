# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, which requirements/environment.py makes from the pinned lock files.

# The first of these that is Python 3.11-3.13 and can make virtual environments.
PYTHONS := python3.12 python3 python3.13 python3.11
PYTHON ?= $(firstword $(foreach python,$(PYTHONS),$(if $(shell $(call usable,$(python)) && echo yes),$(python))))
usable = $(1) -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null

# Processes that share the tests; 0 runs them in pytest's own. Each imports vLLM once, so few do better than many.
WORKERS ?= 2
# More arguments for pytest, such as ARGS="-k ladder".
ARGS ?=

IN_VENV := .venv/bin/python -m
CHECKED := $(wildcard vllm vllm_kda_prefill benchmarks) kda_prefill_finder requirements setup.py tests

.PHONY: help venv demo test soak mutants gpu-test lint format clean clean-cache

help:  ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
	  printf '  %-12s %s\n' "$$target" "$$text"; done

venv:  ## Make .venv with stock vLLM, this fork and the test tools
	@python='$(PYTHON)'; \
	if [ -z "$$python" ] || ! $(call usable,"$$python"); then \
	  echo "error: $${python:-python3} is not Python 3.11, 3.12 or 3.13 with venv and ensurepip (on Debian:" \
	    "python3-venv); name one that is: make PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	"$$python" requirements/environment.py

demo: venv  ## Serve a branching conversation on the CPU, stock and coalesced
	.venv/bin/kda-prefill demo

test: venv  ## Run the CPU test suite, spread over WORKERS processes
	$(IN_VENV) pytest -n $(WORKERS) --dist worksteal $(ARGS) tests

soak: venv  ## Random traffic against the toy model for MINUTES (10), with fresh seeds
	MINUTES=$(or $(MINUTES),10) $(IN_VENV) tests.traffic.soak

mutants: venv  ## Plant faults and show that the traffic tests find them
	$(IN_VENV) tests.traffic.mutants

gpu-test: venv  ## Run the tests that need a GPU
	$(IN_VENV) pytest -m gpu $(ARGS) tests

lint: venv  ## Check style, formatting and types
	$(IN_VENV) ruff check .
	$(IN_VENV) ruff format --check .
	$(IN_VENV) mypy $(CHECKED)

format: venv  ## Fix what ruff can fix, and format
	$(IN_VENV) ruff check --fix .
	$(IN_VENV) ruff format .

clean:  ## Remove .venv and everything made by builds and tools
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-cache:  ## Remove the cached stacks of every checkout
	rm -rf "$${KDA_PREFILL_CACHE:-$$HOME/.cache/vllm-kda-prefill}"
