# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.
#
# Every target sets itself up from a bare clone: Python 3.10 or newer, git and a C++ compiler are
# all that it wants. PYTHON chooses the interpreter, VENV where the environment goes.

# The first one that runs and fits: pyenv has a python3.12 on PATH that may refuse to start.
fits := import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.10; do \
	$$python -c '$(fits)' 2>/dev/null && echo $$python && exit; done; echo python3)
VENV ?= .venv

# A Megatron checkout on PYTHONPATH would be tested in place of the fork.
unexport PYTHONPATH

installed := $(VENV)/installed
run := $(VENV)/bin/python
# What the built fork is made of; any change builds it anew.
fork_sources := setup.py pyproject.toml $(shell find megatron patch_queue patches -type f -not -name "*.pyc")

.PHONY: help test test-all demo clean

help:
	@echo "make demo      the main job on real episodes, about 3 minutes, no GPU"
	@echo "make test      the tests, under 10 minutes on 2 cores, no GPU"
	@echo "make test-all  what 'make test' leaves out: full products, every interpreter at hand"
	@echo "make clean     remove what these targets made"

$(VENV)/bin/python:
	$(PYTHON) -m venv --clear $(VENV)
	$(run) -m pip install --quiet --upgrade pip

$(VENV)/requirements: requirements-dev.txt | $(VENV)/bin/python
	$(run) -m pip install --quiet -r requirements-dev.txt
	@touch $@

$(installed): $(VENV)/requirements $(fork_sources)
	$(run) -m pip install --quiet --force-reinstall --no-deps .
	@touch $@

# Tests run up to four ranks at once; with a thread a core each, they would fight for the cores.
test test-all: export OMP_NUM_THREADS ?= 1

test: $(installed)
	$(run) -m pytest -m "not full and not slow" tests

test-all: $(installed)
	$(run) -m pytest -m "full or slow" tests

demo: $(installed)
	$(run) examples/demo.py

clean:
	rm -rf $(VENV) build dist *.egg-info selective_output.png
