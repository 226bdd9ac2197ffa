# make demo | test | lint | types | clean -- each sets up what it needs in .venv first.

VENV := .venv
BIN := $(VENV)/bin
# The first Python on the path that is new enough; override with `make PYTHON=/path/to/python`.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint types clean python

demo: $(VENV)/.embedded
	$(BIN)/dlite-agent demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# A stamp is written last, so a set-up that was interrupted is done again.
$(VENV)/.embedded: pyproject.toml constraints.txt | python
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[embedded]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | python
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[dev]'
	$(PIP_INSTALL) --no-deps bfcl-eval==2026.3.23  # it names more than its tools need
	touch $(VENV)/.embedded $@

python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "dlite-agent needs Python 3.11 or newer, and none was found; install one or run make PYTHON=/path/to/python" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "$(PYTHON) cannot make virtual environments; install its venv package (python3-venv)" >&2; exit 1; }
