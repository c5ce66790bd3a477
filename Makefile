# Every command of the project. `make demo` and `make test` start from nothing but python3 and a C++
# compiler: they create .venv, install into it, build and run. An environment of your own is used
# as it is with VENV=/path/to/it; a CUDA toolkit is used where there is one.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11
PYTEST_ARGS ?=

# What pyproject.toml's build-system.requires says: pip reads it only for isolated builds.
BUILD_REQUIRES = "setuptools>=77" "cmake>=3.26" ninja
PY = $(VENV)/bin/python
CLANG_FORMAT = $(VENV)/bin/clang-format
CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: help setup dev build demo test test-all lint format check-sass sanitize bench clean

help:
	@echo "make demo        train a small GPT through flash_attn_func and compare it"
	@echo "make test        the tests (those that need a GPU skip themselves without one)"
	@echo "make test-all    the slow ones as well"
	@echo "make build       rebuild the native module after a change in csrc/"
	@echo "make lint        formatters, mypy, layer rules, links"
	@echo "make check-sass  what the compiler made of the kernels"
	@echo "make sanitize    compute-sanitizer over the small GPU tests; records the result"
	@echo "make bench       speed, host cost and memory on this GPU; records the result"

# ---- Set-up: marker files inside the environment say what is installed ----

setup: $(VENV)/.flashattn_ext-test

dev: $(VENV)/.flashattn_ext-dev

$(PY):
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 cannot create environments \
	here; on Debian and Ubuntu install the package python3-venv."; exit 1; }

$(VENV)/.flashattn_ext-build: pyproject.toml | $(PY)
	$(PY) -m pip install --quiet $(BUILD_REQUIRES) "$(TORCH)"
	@touch $@

$(VENV)/.flashattn_ext-test: $(VENV)/.flashattn_ext-build
	$(PY) -m pip install --quiet --no-build-isolation --editable ".[test]"
	@touch $@

$(VENV)/.flashattn_ext-dev: $(VENV)/.flashattn_ext-test
	$(PY) -m pip install --quiet --no-build-isolation --editable ".[dev]"
	@touch $@

build: setup
	$(PY) setup.py --quiet build_ext --inplace

# ---- Use ----

demo: build
	$(PY) examples/train_gpt.py

test: build
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: build
	$(PY) -m pytest $(PYTEST_ARGS)

# ---- Checks ----

lint: dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)
	$(VENV)/bin/mypy
	$(PY) tools/check_layers.py
	$(PY) tools/check_links.py

format: dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(CLANG_FORMAT) -i $(CXX_FILES)

check-sass: build dev
	$(PY) -m tools.check_sass $$($(PY) -c "from flashattn_ext import _loader; \
	print(_loader.find_native())")

# ---- On a GPU ----

sanitize: build
	$(PY) -m benchmarks.record --sanitizer

bench: build
	$(PY) -m benchmarks.record --bench --overhead --memory

clean:
	rm -rf build dist *.egg-info flashattn_ext/*.so
