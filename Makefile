# Two commands do everything on a machine with git, python 3.11 to 3.14 and make:
#   make demo    makes .venv, installs, writes demo/report.html
#   make test    installs what is missing and runs the suite
# Both are quick when run again: .venv/.installed is as new as pyproject.toml and constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# The first python on the path that is new enough and really runs.
find_python = for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && { echo $$p; exit 0; }; \
	done; echo "situs needs python 3.11 to 3.14 on the path" >&2; exit 1

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

.PHONY: demo test test-oldest lint docs wheel clean help

help:
	@echo "make demo | test | test-oldest | lint | docs | wheel | clean"

demo: .venv/.installed
	@$(BIN)/situs demo --out demo

test: .venv/.installed
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal

# The same contracts on the oldest timm we support, laid over the installed one for this run alone.
test-oldest: .venv/.installed
	@rm -rf .oldest
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --target .oldest timm==1.0.29
	@PYTHONPATH=.oldest $(BIN)/python -c 'import timm; print("timm", timm.__version__)'
	@PYTHONPATH=.oldest $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/contracts tests/backbones tests/train/test_export.py

lint: .venv/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/pyright

docs: .venv/.installed-docs
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "$(CURDIR)/docs/_build/html/index.html"

# The wheel must stand alone: an empty environment, nothing from this checkout on its path, the demo from there.
wheel: .venv/.installed
	@rm -rf dist .wheel-venv
	@echo "building the wheel"
	@$(BIN)/python -m build --quiet --wheel --outdir dist . >/dev/null
	@echo "installing it into an empty environment (the first time about three minutes: torch is large)"
	@$(BIN)/python -m venv .wheel-venv
	@.wheel-venv/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt dist/*.whl
	@cd .wheel-venv && bin/situs demo --out demo
	@echo "$(CURDIR)/.wheel-venv/demo/report.html"

clean:
	rm -rf .venv .wheel-venv .oldest build dist demo docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@python=$$($(find_python)); echo "making .venv with $$($$python --version)"; $$python -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing situs and what it needs into .venv (the first time about three minutes: torch is large)"
	@$(PIP) --editable '.[dev,hf,locks]'
	@touch $@

.venv/.installed-docs: .venv/.installed
	@echo "installing what the documentation needs"
	@$(PIP) --editable '.[docs]'
	@touch $@
