# Everything a newcomer or CI runs. Each target does its own set-up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
INSTALLED := $(VENV)/.installed
COMPILED := build/native/.compiled
COMPILED_HERE := build/native/.compiled-here
READY := $(INSTALLED) $(COMPILED)
NATIVE := paceline/model/native
NATIVE_CODE := $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h $(NATIVE)/*.inl)
NATIVE_SOURCES := $(NATIVE)/build.py $(wildcard $(NATIVE)/probes/*.cpp) $(NATIVE_CODE)
CPP := $(NATIVE_CODE) $(wildcard $(NATIVE)/probes/*.cpp tests/native/*.cpp)
SANITIZED := $(CURDIR)/build/native/libpaceline_native_sanitize.so

BUILDER := build/wheel
SITE := build/site

SOURCES := paceline tests experiments deploy docs drafters notebooks setup.py

.PHONY: setup demo own test test-quick test-machines test-arm lint check format bench docs site native sanitize wheel wheel-drafters clean

# Bytecode is written when a module is first imported: most of what is installed never is.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps

# What demo, own and a server after them need, half of the lock's bytes: its lines that end in "# run".
$(RUNTIME): requirements.lock pyproject.toml setup.py drafters/pyproject.toml
	$(PYTHON) -m venv $(VENV)
	grep '# run$$' requirements.lock | $(PIP) -r /dev/stdin
	PACELINE_NATIVE_BUILD=0 $(PIP) --no-build-isolation --editable . --editable ./drafters
	touch $@

$(INSTALLED): $(RUNTIME)
	$(PIP) -r requirements.lock
	touch $@

# The library apart from pip, which would hide the one line that says there is no compiler, and beside it with --jobs=2.
# Emulated instruction sets would double the time to compile it.
$(COMPILED): $(NATIVE_SOURCES)
	$(PYTHON) $(NATIVE)/build.py --optional $(if $(PACELINE_NIGHTLY),--emulated)
	mkdir -p $(@D) && touch $@

# Without instruction sets that this processor lacks: a third of the time where it has no tiles.
$(COMPILED_HERE): $(NATIVE_SOURCES)
	$(PYTHON) $(NATIVE)/build.py --optional --here
	mkdir -p $(@D) && touch $@

# Both at the same time, also where make was given no --jobs.
QUICK_SETUP = $(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,--jobs=2) $(RUNTIME) \
  $(if $(wildcard $(COMPILED)),$(COMPILED),$(COMPILED_HERE))

setup: $(READY)  ## the virtual environment with everything pinned

demo:  ## a small coding model changes a function, plainly, with drafts and in Transformers; what it wrote is run
	@+$(QUICK_SETUP)
	$(BIN)/python experiments/demo.py

own:  ## a drafter learns one workload in two minutes, with a live chart, then answers unseen requests beside the generic one
	@+$(QUICK_SETUP)
	$(BIN)/python experiments/own.py

# A process for each core; tests of one file stay together, because they share what is slow to make. tests/conftest.py has
# their order: slow files first, which pytest-xdist would undo.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

# Also where the environment forbids them: without files of bytecode each process would compile paceline and its tests anew.
test test-quick test-machines test-arm: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)  ## the whole test suite but test-arm; ends with the slowest tests, and with what was skipped and why
	$(PYTEST) -rs --durations=50 --ignore tests/native

test-quick: $(READY)  ## the test suite without the tests that are marked slow
	$(PYTEST) -m "not slow" --ignore tests/native

test-machines: $(READY)  ## the test suite as on other processors, with more threads, and beside other work: an hour or two
	$(BIN)/python tests/machines.py

test-arm: $(READY)  ## the native library for ARM, under QEMU, against this machine's
	$(BIN)/python -m pytest -rs tests/native

lint: $(INSTALLED)  ## format, lint and types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/pyright

check: lint test  ## what CI runs

format: $(READY)  ## format, and mend what the linter can
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/clang-format -i $(CPP)

bench: $(READY)  ## plain and speculative speed beside Transformers, one stream
	bash experiments/decode_vs_transformers.sh

docs: $(READY)  ## the pages that are made: the command line, the Python API, predictions beside published figures
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_python.py
	$(BIN)/python docs/make_landmarks.py

# mkdocs and its theme in an environment of their own: neither setup nor CI needs them.
$(SITE)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

site: $(SITE)/.ready  ## build/html: docs/ as a site; a link or an anchor that leads nowhere is an error
	$(SITE)/bin/mkdocs build --strict

native:  ## only the native library, from its C++ sources
	$(PYTHON) $(NATIVE)/build.py

# PyTorch throws C++ exceptions, which the address sanitizer can only follow when the C++ runtime is there before it.
sanitize: $(READY)  ## the tests of the native library, with address and undefined-behaviour checks
	CXX="$(CXX)" $(PYTHON) $(NATIVE)/build.py --sanitize --emulated --out $(SANITIZED)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PACELINE_NATIVE_LIBRARY=$(SANITIZED) \
	  $(BIN)/python -m pytest tests/model/test_native_*.py

# What a wheel needs: pip, setuptools and a compiler, not the whole lock.
$(BUILDER)/.ready: requirements.lock
	$(PYTHON) -m venv $(BUILDER)
	grep '^setuptools==' requirements.lock | \
	  $(BUILDER)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r /dev/stdin
	touch $@

WHEEL := $(BUILDER)/bin/python -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist

wheel: $(BUILDER)/.ready  ## dist/paceline-*.whl for this platform, with the native library; at most 8 MB
	rm -rf build/lib build/lib.* build/bdist.* dist/paceline-*.whl
	PACELINE_NATIVE_BUILD=$${PACELINE_NATIVE_BUILD:-require} $(WHEEL) .
	test "$$(cat dist/paceline-*.whl | wc -c)" -le 8000000

wheel-drafters: $(BUILDER)/.ready  ## dist/paceline_drafters-*.whl: the weights of the drafters that ship
	rm -rf drafters/build
	$(WHEEL) ./drafters

clean:
	rm -rf $(VENV) build dist *.egg-info drafters/build drafters/*.egg-info $(NATIVE)/libpaceline_native.*
