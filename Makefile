# Everything a newcomer or CI runs. Each target does its own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-all check format bench docs clean

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

setup: $(READY)  ## the virtual environment with everything pinned

demo: $(READY)  ## one real answer with and without speculation, side by side
	$(BIN)/paceline generate "Repeat this list and add one more fruit: apples, pears, plums, cherries, apricots." \
	  --compare --max-tokens 96

test: $(READY)  ## the test suite
	$(BIN)/python -m pytest -m "not slow"

test-all: $(READY)  ## the test suite with the long runs
	$(BIN)/python -m pytest

check: $(READY)  ## what CI runs: format, lint, types, tests
	$(BIN)/ruff format --check paceline tests bench docs
	$(BIN)/ruff check paceline tests bench docs
	$(BIN)/pyright
	$(BIN)/python -m pytest -m "not slow"

format: $(READY)
	$(BIN)/ruff format paceline tests bench docs
	$(BIN)/ruff check --fix paceline tests bench docs

bench: $(READY)  ## plain and speculative speed beside Transformers, one stream
	bash bench/decode_vs_transformers.sh

docs: $(READY)  ## docs/cli.md from --help
	$(BIN)/python docs/make_cli.py

clean:
	rm -rf $(VENV) build dist *.egg-info
