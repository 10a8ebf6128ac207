# Two commands do everything on a machine with git, python 3.11 to 3.13 and make:
#   make demo    makes .venv, installs, writes demo/report.html
#   make test    installs what is missing and runs the suite
# Both are quick when run again: .venv/.installed is as new as pyproject.toml and constraints.txt.
# PYTHON=python3.13 (a name or a path) takes that interpreter, in an environment of its own: .venv-3.13.0.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
# Else every process compiles anew what it imports: two seconds of each that runs tests.
unexport PYTHONDONTWRITEBYTECODE

# The first of the interpreters named that is new enough and really runs: as named, or among pyenv's, whose shims need not.
find_python = for name in $(1); do for p in "$$name" "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/"$$name"; do \
	"$$p" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo "$$p"; exit 0; }; \
	done; done; echo "situs needs python 3.11 to 3.13: none of $(strip $(1)) is one" >&2; exit 1

PYTHON :=
PYTHONS := python3.11 python3.12 python3.13
ifdef PYTHON
  VENV := .venv-$(shell p=$$($(call find_python,$(PYTHON))) && "$$p" -c 'import platform; print(platform.python_version())')
  ifeq ($(VENV),.venv-)
    $(error PYTHON=$(PYTHON): must be a python 3.11 to 3.13 that runs)
  endif
else
  VENV := .venv
endif
BIN := $(VENV)/bin
EVERYDAY := '.[audio,dense,dev,dp,hf,locks,remote,split]'

# $(call install,ENVIRONMENT,WHAT): by uv, or by pip where uv cannot be had or cannot reach what pip can.
install = $(BIN)/python -m uv pip install --quiet --system-certs --python $(1)/bin/python $(2) || { \
	echo "not by uv: pip installs, which takes about three minutes"; \
	$(1)/bin/python -m pip --disable-pip-version-check install -qq $(2); }

.PHONY: demo test test-slow test-pythons test-oldest lint docs wheel clean help

help:
	@echo "make demo | test | test-slow | test-pythons | test-oldest | lint | docs | wheel | clean   (PYTHON=python3.13: with that one)"

demo: $(VENV)/.installed
	@$(BIN)/situs demo --out demo

# Two processes for two cores: a third waits less for servers, and collects everything once more.
test: $(VENV)/.installed
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal

# The tests that take longer, of which those are skipped whose packages are missing: about an hour on two cores.
test-slow: $(VENV)/.installed
	@$(BIN)/python -m pytest -q -m "slow and not gpu"

# The suite on every python that is found here, each in its own environment.
test-pythons:
	@failed=; for name in $(PYTHONS); do \
		python=$$($(call find_python,$$name)) || { echo "$$name: not here"; continue; }; \
		echo "$$("$$python" --version)"; $(MAKE) --no-print-directory test PYTHON="$$python" || failed="$$failed $$name"; \
	done; [ -z "$$failed" ] || { echo "the suite failed on$$failed"; exit 1; }

# The suite on the oldest version of everything that pyproject.toml names.
test-oldest: .venv-oldest/.installed
	@.venv-oldest/bin/python -m pytest -q -n 3 --dist worksteal

lint: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.installed-docs
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo "$(CURDIR)/docs/_build/html/index.html"

# The wheel must stand alone: an empty environment, nothing from this checkout on its path, the demo from there, which
# needs the extra `split` to make all of its findings.
wheel: $(VENV)/.installed
	@rm -rf dist .wheel-venv
	@echo "building the wheel"
	@$(BIN)/python -m build --quiet --wheel --outdir dist . >/dev/null
	@echo "installing it into an empty environment"
	@$(BIN)/python -m venv .wheel-venv
	@$(call install,.wheel-venv,--constraint constraints.txt "$$(echo dist/*.whl)[split]")
	@cd .wheel-venv && bin/situs demo --out demo
	@echo "$(CURDIR)/.wheel-venv/demo/report.html"

clean:
	rm -rf .venv .venv-* .wheel-venv build dist demo situs-gate docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@python=$$($(call find_python,$(or $(PYTHON),$(PYTHONS) python3))); \
	echo "making $(VENV) with $$("$$python" --version)"; "$$python" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing situs and what it needs into $(VENV) (the first time about half a minute: torch is large)"
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt uv || true
	@$(call install,$(VENV),--constraint constraints.txt --editable $(EVERYDAY))
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "installing what the documentation needs"
	@$(call install,$(VENV),--constraint constraints.txt --editable '.[docs]')
	@touch $@

# Anew each time: what is installed already would satisfy a bound that was lowered.
.venv-oldest/.installed: pyproject.toml | $(VENV)/.installed
	@echo "installing the oldest versions that pyproject.toml allows into .venv-oldest"
	@rm -rf .venv-oldest && $(BIN)/python -m venv .venv-oldest
	@$(BIN)/python -m uv pip install --quiet --system-certs --python .venv-oldest/bin/python \
		--resolution lowest-direct --editable $(EVERYDAY)
	@touch $@
