# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.
#
# Every target sets itself up from a bare clone: Python 3.10 or newer, git and a C++ compiler are
# all that it wants. PYTHON chooses the interpreter, VENV where the environment goes.

PYTHON ?= python3
VENV ?= .venv

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
	$(PYTHON) -m venv $(VENV)
	$(run) -m pip install --quiet --upgrade pip

$(VENV)/requirements: requirements-dev.txt | $(VENV)/bin/python
	$(run) -m pip install --quiet -r requirements-dev.txt
	@touch $@

$(installed): $(VENV)/requirements $(fork_sources)
	$(run) -m pip install --quiet --force-reinstall --no-deps .
	@touch $@

test: $(installed)
	$(run) -m pytest -m "not full and not slow" tests

test-all: $(installed)
	$(run) -m pytest -m "full or slow" tests

demo: $(installed)
	$(run) examples/demo.py

clean:
	rm -rf $(VENV) build dist *.egg-info selective_output.png
