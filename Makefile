# Everything a newcomer or CI runs. Each target does its own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test check format bench docs clean

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

setup: $(READY)  ## the virtual environment with everything pinned

demo: $(READY)  ## one real answer with and without speculation, side by side
	$(BIN)/paceline generate --compare --dtype float32 --max-tokens 128 \
	  "A baker sells 24 loaves in the morning and half as many in the afternoon. Each loaf costs 3 dollars. How much does she \
	earn in a day? Please reason step by step."

test: $(READY)  ## the test suite
	$(BIN)/python -m pytest

check: $(READY)  ## what CI runs: format, lint, types, tests
	$(BIN)/ruff format --check paceline tests bench docs
	$(BIN)/ruff check paceline tests bench docs
	$(BIN)/pyright
	$(BIN)/python -m pytest

format: $(READY)
	$(BIN)/ruff format paceline tests bench docs
	$(BIN)/ruff check --fix paceline tests bench docs

bench: $(READY)  ## plain and speculative speed beside Transformers, one stream
	bash bench/decode_vs_transformers.sh

docs: $(READY)  ## docs/cli.md from --help
	$(BIN)/python docs/make_cli.py

clean:
	rm -rf $(VENV) build dist *.egg-info
