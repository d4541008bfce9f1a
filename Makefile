# `make` alone lists what there is.  Everything runs in .venv, which is made from requirements.lock when it is missing or old.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
.PHONY: help demo test coverage check bench heavy clean lock

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
ARGS ?=
WORKERS ?= 3
NAME ?=

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):[^#]*## /\1\t/' | expand -t 10

demo: $(READY)  ## the product at work on an embedded Postgres, with a kill in the middle and a proof at the end
	@$(BIN)/pgtide demo $(ARGS)

test: $(READY)  ## all tests but the heavy ones (ARGS="tests/log -k offsets" chooses)
	@$(if $(ARGS),,$(BIN)/python -c 'from pgtide.local.s3 import prepare_s3; prepare_s3()' || echo 'The tests on S3 will be left out.' >&2)
	@$(if $(ARGS),,$(BIN)/python -c 'from pgtide.local.class_archive import make_archive; make_archive()' 2>&1 | tail -1 >&2)
	@$(BIN)/pytest -q -n $(WORKERS) --no-loadscope-reorder $(COVERAGE) $(ARGS)

coverage:  ## the same, and what of the code they reach; takes half as long again
	@$(MAKE) --no-print-directory test COVERAGE='--cov --cov-report=term'

check: $(READY)  ## all that is static: lint, format, types
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { $(BIN)/ruff format --diff --quiet; echo 'format: run .venv/bin/ruff format' >&2; exit 1; }
	@$(BIN)/mypy

bench: $(READY)  ## measure (NAME=… chooses one)
	@$(BIN)/pgtide bench $(NAME) $(ARGS)

heavy: $(READY)  ## the tests that take long or much of the machine
	@$(BIN)/pytest -q -m heavy --timeout 3600 $(ARGS)

clean:  ## remove what tools and tests left behind; the environment (.venv) and the downloads (.cache) stay
	@rm -rf build dist htmlcov .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

lock: $(READY)  ## resolve the dependencies anew into requirements.lock (needs uv)
	@uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --upgrade -q -o requirements.lock

# The mark is written last: an environment whose making was interrupted is made again.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'pgtide needs Python 3.11 or newer: make PYTHON=python3.12 …' >&2; exit 1; }
	@echo 'preparing .venv (once)' >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { apt-get -qq update; apt-get -qq install -y python3-venv; } >&2; } || { \
	    echo 'This Python cannot make environments. Debian, Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv --clear .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)
