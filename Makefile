# make demo   install what a run needs into .venv and run the embedded demo
# make check  install what the tests need as well; style, types and tests
# make slow   the longer proofs
# make docs   regenerate the configuration reference and config.schema.json

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo check style types test slow docs

demo: $(VENV)/installed
	$(BIN)/python run.py

check: style types test

style: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

# The configuration reference and the editors' schema, from the schema itself.
docs: $(VENV)/installed
	$(BIN)/python -c "from pathlib import Path; from distill.config import write_generated; write_generated(Path('.'))"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
