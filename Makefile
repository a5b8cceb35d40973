# `make demo` runs the main job, `make test` checks everything; both set up what they need first.
#
# Which Python: the one given by PYTHON=..., else the active `python3` if it already has all that is needed and is a
# virtual environment or has torch with CUDA, else a new environment in .venv, filled by pip.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help demo test lint format resources static setup-demo setup-test clean
.DEFAULT_GOAL := help

BASE_PYTHON ?= python3
MODEL ?= nemotron_h
PYTEST_ARGS ?=
# More workers than this gain little on the CPU, and on a GPU all of them share its memory.
WORKERS ?= -n auto --maxprocesses=4 --dist=worksteal

# Any sign of an NVIDIA GPU lifts the pin that keeps a CUDA build of torch away; GPU=0 or GPU=1 overrides.
GPU ?= $(shell { nvidia-smi -L || ldconfig -p | grep -F libcuda.so; } >/dev/null 2>&1 && echo 1 || echo 0)
CONSTRAINTS := -c constraints.txt $(if $(filter 0,$(GPU)),-c constraints-cpu.txt)

MODULES := torch numpy cutlass tvm_ffi cuda transformers click rich
MODULES += $(if $(filter-out demo setup-demo,$(MAKECMDGOALS)),pytest xdist hypothesis)
PROBE := import importlib.util as u, sys; ok = all(map(u.find_spec, sys.argv[1:])) and \
    (sys.prefix != sys.base_prefix or __import__("torch").version.cuda); print(sys.executable if ok else "")

ifneq ($(filter demo test lint format resources static setup-demo setup-test,$(MAKECMDGOALS)),)
ifndef PYTHON
PYTHON := $(shell $(BASE_PYTHON) -c '$(PROBE)' $(MODULES) 2>/dev/null)
endif
ifeq ($(PYTHON),)
PYTHON := .venv/bin/python
DEMO_STAMP := .venv/.stamp-demo
TEST_STAMP := .venv/.stamp-test
endif
endif

# $(call tool,name,arguments): a tool of the `dev` extra; an environment of the user's own may lack it, CI may not.
define tool
@if $(PYTHON) -m $(1) --version >/dev/null 2>&1; then \
  echo "== $(strip $(1) $(2))"; $(PYTHON) -m $(1) $(2); \
elif [[ -n "$${CI:-}" ]]; then \
  echo "ERROR: $(1) is not installed in $(PYTHON), and CI must not skip it" >&2; exit 1; \
else \
  echo "== SKIPPED $(strip $(1) $(2)): not installed in $(PYTHON); pip install '.[dev]' brings it" >&2; \
fi
endef

# Fills .venv with the package and $(EXTRAS); pip itself reports each package as it comes.
define install
@$(BASE_PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, this is " + sys.version if sys.version_info < (3, 10) else 0)'
@[[ -x .venv/bin/pip ]] || { echo "== making .venv with $$($(BASE_PYTHON) --version)"; $(BASE_PYTHON) -m venv --clear .venv; }
@echo "== installing replayssm[$(EXTRAS)] into .venv: torch$(if $(filter 0,$(GPU)), (CPU build where the index has one)),"\
  "CuTe DSL (about 300 MB), transformers and smaller packages; once, a few minutes"
@.venv/bin/python -m pip install --disable-pip-version-check $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
endef

help:
	@echo "make demo    set up, then decode a hybrid model with and without ReplaySSM   (MODEL=qwen3_5 for another)"
	@echo "make test    set up, then lint, type check and run all tests   (PYTEST_ARGS='-k ring' to choose)"
	@echo "make lint    only ruff and mypy          make format  rewrite the sources with ruff"
	@echo "make resources  rewrite docs/records/resources.json (registers, memory and instructions of the kernels) and its tables"
	@echo "make static     rewrite docs/records/static.json: what the static verifier decides about them"
	@echo "make clean   remove .venv and caches     PYTHON=...   use this Python as it is, install nothing"

.venv/.stamp-demo: EXTRAS := hf
.venv/.stamp-demo: pyproject.toml constraints.txt constraints-cpu.txt
	$(install)
	@touch $@

.venv/.stamp-test: EXTRAS := hf,dev
.venv/.stamp-test: pyproject.toml constraints.txt constraints-cpu.txt
	$(install)
	@touch $@ .venv/.stamp-demo

setup-demo: $(DEMO_STAMP)
	@echo "== using $$($(PYTHON) -c 'import sys; print(sys.executable, sys.version.split()[0])')"

setup-test: $(TEST_STAMP)
	@echo "== using $$($(PYTHON) -c 'import sys; print(sys.executable, sys.version.split()[0])')"

demo: setup-demo
	@$(PYTHON) -m replayssm.demo --model $(MODEL)

lint: setup-test
	$(call tool,ruff,check)
	$(call tool,ruff,format --check)
	$(call tool,mypy)

test: lint
	@echo "== pytest"
	@$(PYTHON) -m pytest $(WORKERS) $(PYTEST_ARGS)

format: setup-test
	$(call tool,ruff,check --fix)
	$(call tool,ruff,format)

resources: setup-test
	@$(PYTHON) -m tests.cute_kernels.resources
	@$(PYTHON) -m tuning refresh docs/performance.md

static: setup-test
	@$(PYTHON) -m tests.ptx.test_static

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
