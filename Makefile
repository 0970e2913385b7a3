# Every target sets up .venv if necessary, from pyproject.toml and constraints.txt.
# PYTHON=python3.13 make demo   uses another interpreter.
# INSTALL="uv pip install -c constraints.txt --torch-backend=cpu" make demo   takes torch's CPU build.
# TEST_OPTIONS="--lf -x" make test   passes options to pytest.

PYTHON ?= python3
INSTALL ?= .venv/bin/pip install --quiet -c constraints.txt
BIN := .venv/bin
INSTALLED := .venv/.installed
# Not the parts of whole_run, and not gpu, which needs one.
BENCHMARKS := $(filter-out __init__ environment slow_line gpu,$(basename $(notdir $(wildcard benchmarks/*.py))))

# Twice as many workers as a small machine has cores: many tests wait for processes and sockets. Each
# takes half a gigabyte; an idle one takes tests from others. TEST_OPTIONS="-n 8" asks for more.
PYTEST := $(BIN)/pytest -n 4 --dist worksteal

.PHONY: demo test test-system test-rest test-all check faults fuzz protos settings site lock bench
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/splitveil demo

# Every part of the system, and one journey of real processes through each of its uses.
test: $(INSTALLED)
	$(PYTEST) -m "not slow" --ignore=tests/system --ignore=tests/docs $(TEST_OPTIONS)

# Real processes in all their troubles, every defense against every attack, the documents' programs.
test-system: $(INSTALLED)
	$(PYTEST) -m "not slow" tests/system tests/docs $(TEST_OPTIONS)

# The long proofs that the two leave out.
test-rest: $(INSTALLED)
	$(PYTEST) -m slow tests $(TEST_OPTIONS)

test-all: test test-system test-rest faults fuzz

faults: $(INSTALLED)
	SPLITVEIL_FAULTS=all $(BIN)/pytest -s tests/system/test_faults.py

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz --messages 100000

# What needs no test to run: form, types, imports between packages, and generated code.
check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/house/test_house.py tests/house/test_structure.py tests/docs/test_settings_reference.py

protos: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. protos/*.proto

settings: $(INSTALLED)
	$(BIN)/python docs/settings_reference.py

# The documentation site, in build/site, from copies of the pages; a broken link or anchor is an error.
site: $(BIN)/zensical
	rm -rf build/pages
	mkdir -p build/pages
	cp -r *.md LICENSE docs build/pages
	$(BIN)/zensical build --clean --strict

$(BIN)/zensical: $(INSTALLED)
	$(INSTALL) -e '.[docs]'
	@touch $@

# What constraints.txt pins, with digests: the package and the extras for its users.
lock:
	uv pip compile --quiet --universal --python-version 3.11 --no-header -c constraints.txt \
	  --extra board --extra ids --extra images --extra serve --extra sql --extra text \
	  --format pylock.toml -o pylock.toml pyproject.toml

bench: $(INSTALLED)
	@set -e; for benchmark in $(BENCHMARKS); do \
	  echo "== $$benchmark"; $(BIN)/python -m benchmarks.$$benchmark; \
	done

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "splitveil needs Python 3.11 or newer, and $(PYTHON) is not:" \
	    "make $(MAKECMDGOALS) PYTHON=/path/to/python3.13" >&2; exit 1; }
	@echo "Setting up .venv: takes minutes the first time, mostly for torch"
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[dev]'
	@touch $@
