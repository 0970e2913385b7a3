# Every target sets up .venv if necessary, from pyproject.toml and constraints.txt.
# PYTHON=python3.12 make demo   uses another interpreter.
# PIP_EXTRA_INDEX_URL=... make demo   adds a package index with another build of torch.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BENCHMARKS := $(filter-out __init__ environment,$(basename $(notdir $(wildcard benchmarks/*.py))))

.PHONY: demo test faults lint protos bench fuzz
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/splitveil-local deploy/examples/breast_cancer --defense none marvell

test: $(INSTALLED)
	$(BIN)/pytest

faults: $(INSTALLED)
	SPLITVEIL_FAULTS=all $(BIN)/pytest -s tests/system/test_faults.py

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	.ci/link-source
	$(BIN)/mypy
	PYTHONPATH=build/source $(BIN)/lint-imports
	$(BIN)/pytest -q tests/maths/test_house.py

protos: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. protos/split_learning.proto

bench: $(INSTALLED)
	@set -e; for benchmark in $(BENCHMARKS); do \
	  echo "== $$benchmark"; $(BIN)/python -m benchmarks.$$benchmark; \
	done

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz --messages 100000

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null || { \
	  echo "splitveil needs Python 3.11 or 3.12, and $(PYTHON) is neither:" \
	    "make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Setting up .venv: takes minutes the first time, mostly for torch"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
