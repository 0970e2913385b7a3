# Every target sets up .venv if necessary, from pyproject.toml and constraints.txt.
# PYTHON=python3.12 make demo   uses another interpreter.
# PIP_EXTRA_INDEX_URL=... make demo   adds a package index with another build of torch.
# TEST_OPTIONS="--lf -x" make test   passes options to pytest.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Not the parts of whole_run, and not gpu, which needs one.
BENCHMARKS := $(filter-out __init__ environment bare_gloo slow_line gpu,$(basename $(notdir $(wildcard benchmarks/*.py))))

# One worker per core, up to eight; each takes half a gigabyte. An idle worker takes tests from others.
WORKERS := -n auto --maxprocesses 8 --dist worksteal

.PHONY: demo test test-rest test-all faults lint protos settings bench fuzz
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/splitveil demo

# Every claim and every invariant, in minutes.
test: $(INSTALLED)
	$(BIN)/pytest $(WORKERS) -m "not slow" $(TEST_OPTIONS)

# The long proofs that `make test` leaves out.
test-rest: $(INSTALLED)
	$(BIN)/pytest $(WORKERS) -m slow $(TEST_OPTIONS)

test-all: test test-rest

faults: $(INSTALLED)
	SPLITVEIL_FAULTS=all $(BIN)/pytest -s tests/system/test_faults.py

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/maths/test_house.py

protos: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. protos/*.proto

settings: $(INSTALLED)
	$(BIN)/python docs/settings_reference.py > docs/settings.md

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
