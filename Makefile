SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
MODEL ?= gpt2-small
BIN := .venv/bin

help:  ## Say what each target does
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready  ## Make .venv with everything that the other targets need

.venv/ready: pyproject.toml constraints.txt
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

.PHONY: help setup
