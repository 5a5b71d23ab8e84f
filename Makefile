# Two commands: `make tune` and `make test`. Both make .venv first; nothing but Python, make and a package index is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: tune test check results install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml tools/install.sh
	PYTHON="$(PYTHON)" VENV="$(VENV)" sh tools/install.sh
	touch $@

tune: install
	$(BIN)/tilewright tune --effort quick
	$(BIN)/tilewright results

test: install
	sh tools/postgres.sh
	$(BIN)/python -m pytest

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

results: install
	$(BIN)/tilewright results

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
