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
	$(BIN)/paceline generate --compare --dtype float32 --max-tokens 96 \
	  "Repeat the following paragraph exactly, word for word, and add nothing: The old lighthouse stood at the edge of the \
	cliff, where the wind never rested. Every evening at six, Mr. Alder climbed its one hundred and twelve steps, trimmed \
	the wick, polished the great glass lens and lit the lamp."

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
