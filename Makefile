# `make demo` and `make test` set up all they need by themselves: Python 3.11+, make and a package index suffice.
#
#   TORCH     which torch is installed (the CPU build where that is what the index has under this version)
#   PIP_ARGS  further arguments of pip, for example --extra-index-url https://download.pytorch.org/whl/cpu
#   TEST_WORKERS, TEST_LONG_WORKERS   processes that share the tests; 0 runs them one after another in one

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_ARGS ?=
VENV ?= .venv
DEMO_ARGS ?=
TEST_ARGS ?=
# For two cores: tests wait more than they compute; the long ones train in several processes each.
TEST_WORKERS ?= 4
TEST_LONG_WORKERS ?= 3
# Neighbours stay together, for they share daemons; a worker that has nothing left takes from the others.
DISTRIBUTION := --dist worksteal

BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# With it, each of the hundreds of processes of a test run compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long gpu prove lint site release generate clean

demo: $(VENV)/demo.stamp
	$(BIN)/python -m examples.demo $(DEMO_ARGS)

# torch's types differ between its versions: they are checked with one.
test: $(VENV)/test.stamp $(if $(findstring torch==2.13.0,$(TORCH)),lint)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(DISTRIBUTION) $(TEST_ARGS)

test-long: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m slow --timeout 1500 -n $(TEST_LONG_WORKERS) $(DISTRIBUTION) $(TEST_ARGS)

# On a machine without a CUDA device, all of these tests are skipped.
gpu: $(VENV)/test.stamp
	timeout --kill-after 10 480 $(BIN)/python -m pytest -m gpu $(TEST_ARGS)

prove: $(VENV)/test.stamp
	$(BIN)/python -m tests.chaos.prove $(or $(PART),$(error name a part: make prove PART=1)) --result docs/proof/part-$(PART).json

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# The documentation site, into build/site. It needs nothing but the package index.
site: $(VENV)/docs.stamp
	$(BIN)/python -m mkdocs build --strict

# Build and check what a release uploads; VERSION=0.1.0 sets the version. Nothing is published.
release: $(VENV)/test.stamp site
	PYTHON=$(BIN)/python deploy/release.sh

# In an environment of its own: grpcio-tools takes an older protobuf than the daemons.
generate: $(VENV)/generate.stamp
	$(VENV)/generate/bin/python -m lighthouse_protocol.generate

clean:
	rm -rf $(VENV) build dist

$(VENV)/base.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lighthouse-ft needs Python 3.11 or newer; name one by PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet $(PIP_ARGS) "$(TORCH)" numpy
	$(BIN)/pip install --quiet $(PIP_ARGS) --editable .
	touch $@

$(VENV)/demo.stamp: $(VENV)/base.stamp
	$(BIN)/pip install --quiet $(PIP_ARGS) --group demo
	touch $@

$(VENV)/docs.stamp: $(VENV)/base.stamp
	$(BIN)/pip install --quiet $(PIP_ARGS) --group docs
	touch $@

$(VENV)/generate.stamp: $(VENV)/base.stamp
	$(PYTHON) -m venv $(VENV)/generate
	$(VENV)/generate/bin/python -m pip install --quiet $(PIP_ARGS) --upgrade "pip>=25.1"
	$(VENV)/generate/bin/pip install --quiet $(PIP_ARGS) --group generate
	touch $@

$(VENV)/test.stamp: $(VENV)/demo.stamp $(VENV)/docs.stamp
	$(BIN)/pip install --quiet $(PIP_ARGS) --group test
	$(BIN)/pip install --quiet $(PIP_ARGS) --no-deps torchft==0.2.0
	$(BIN)/pip install --quiet $(PIP_ARGS) "$(TORCH)" --group trainers || echo "no trainers' libraries: their tests are skipped"
	$(BIN)/pip install --quiet $(PIP_ARGS) "$(TORCH)" --group torchtitan || echo "no torchtitan: its test is skipped"
	$(BIN)/pip install --quiet $(PIP_ARGS) --no-deps --editable . # both have a command torchft_lighthouse
	touch $@
