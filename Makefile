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

.PHONY: help setup dev build demo test test-all device-tests lint format check-sass sanitize bench clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

# ---- Set-up: marker files inside the environment say what is installed ----

setup: $(VENV)/.flashattn_ext-test  ## the environment and a first build

dev: $(VENV)/.flashattn_ext-dev  ## the same with formatters, mypy and disassemblers

$(PY):
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3 cannot create environments \
	here; on Debian and Ubuntu install the package python3-venv."; exit 1; }

$(VENV)/.flashattn_ext-build: pyproject.toml | $(PY)
	@echo "Installing torch and the build tools into $(VENV) ..."
	$(PY) -m pip install --quiet $(BUILD_REQUIRES) "$(TORCH)"
	@touch $@

# Built before pip does it, which would hide the progress of a build of minutes.
$(VENV)/.flashattn_ext-test: $(VENV)/.flashattn_ext-build
	$(PY) setup.py --quiet build_ext --inplace
	$(PY) -m pip install --quiet --no-build-isolation --editable ".[test]"
	@touch $@

$(VENV)/.flashattn_ext-dev: $(VENV)/.flashattn_ext-test
	$(PY) -m pip install --quiet --no-build-isolation --editable ".[dev]"
	@touch $@

build: setup  ## rebuild the native module after a change in csrc/
	$(PY) setup.py --quiet build_ext --inplace

# ---- Use ----

# OpenMP threads that spin while they wait are ten times slower beside other work on the machine.
demo: export OMP_WAIT_POLICY ?= passive
demo: build  ## train a small GPT through attention, dense and packed, and compare it
	$(PY) examples/train_gpt.py
	$(PY) examples/train_gpt.py --varlen --steps 60

test: build  ## the tests (those that need a GPU skip themselves without one)
	$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: build  ## the slow ones as well
	$(PY) -m pytest $(PYTEST_ARGS)

device-tests: setup  ## unit tests of csrc/ptx, csrc/tile and csrc/attention
	CMAKE_ARGS="$(CMAKE_ARGS) -DFLASHATTN_EXT_DEVICE_TESTS=ON" $(PY) setup.py --quiet build_ext --inplace
	$(PY) -m pytest tests/test_device_units.py $(PYTEST_ARGS)

# ---- Checks ----

lint: dev  ## formatters, mypy, layer rules, links
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@$(CLANG_FORMAT) --dry-run --Werror $(CXX_FILES)
	$(VENV)/bin/mypy
	$(PY) tools/check_layers.py
	$(PY) tools/check_links.py

format: dev  ## let the formatters change the files
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	@$(CLANG_FORMAT) -i $(CXX_FILES)

check-sass: build dev  ## what the compiler made of the kernels
	@module=$$($(PY) -c "from flashattn_ext import _loader; print(_loader.find_native())") && \
	$(PY) -m tools.check_sass $$module && $(PY) -m tools.check_wgmma $$module

# ---- On a GPU ----

sanitize: build  ## compute-sanitizer over the small GPU tests, recorded
	$(PY) -m benchmarks.record --sanitizer

bench: build  ## speed, host cost and memory on this GPU, recorded
	$(PY) -m benchmarks.record --bench --overhead --memory

clean:  ## remove everything that was built
	rm -rf build dist *.egg-info flashattn_ext/*.so
