# On a fresh machine with python3 (venv, pip), g++ and make:
#   make demo     trains a small MoE layer and checks every result
#   make test     builds all that can be built here and runs all tests that this machine can run
# Each sets up what it needs in .venv by itself. For development:
#   make build    the libraries, into python/gmm (incremental)
#   make format   make lint   make wheel
#   make fuzz   make fuzz-c   make sanitize   make soak   make coverage    long tests: see CONTRIBUTING.md
#   make test PYTEST_ARGS="-k plan"
#   make test VENV= PYTHON=python3    in the environment at hand: no venv, nothing is installed (torch, pytest, setuptools,
#                                     cmake, ninja and pybind11 must be there), no network
# GMM_CUDA, CUDA_HOME, GMM_CUTLASS_DIR and MAX_JOBS: see setup.py.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

# Without an NVIDIA driver the demo needs no CUDA parts. A CUDA build that is there already stays.
HAS_CUDA := $(or $(wildcard /proc/driver/nvidia),$(shell command -v nvidia-smi),$(wildcard build/cuda/gmm/libgmm.so))
DEMO_CUDA := $(or $(GMM_CUDA),$(if $(HAS_CUDA),auto,0))

ifeq ($(VENV),)
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)/python
else
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
TOOLS := $(VENV)/.tools
INSTALLED := $(VENV)/.installed
DEV := $(VENV)/.dev
export PATH := $(abspath $(VENV))/bin:$(PATH)
endif

CXX_FILES = $(shell find csrc tests -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu' -o -name '*.c')

.PHONY: demo test build installed dev format lint wheel fuzz fuzz-c sanitize soak coverage docs

demo:
	$(MAKE) --no-print-directory installed GMM_CUDA=$(DEMO_CUDA)
	$(PY) -m gmm.demo

test: dev
	$(PY) -m pytest $(PYTEST_ARGS)

build: $(TOOLS)
	$(PY) setup.py -q build_ext --inplace

format: dev
	ruff check -q --fix .; ruff format -q .
	clang-format -i $(CXX_FILES)

lint: dev
	ruff check .
	ruff format --check .
	mypy
	clang-format --dry-run -Werror $(CXX_FILES)

wheel: dev
	rm -rf build/lib.*  # setuptools would pack what an earlier state of the tree left there
	$(PY) -m build --wheel --no-isolation

# The API reference and the pages of docs/, into build/site. Needs neither torch nor a build.
docs:
	test -x build/docs-venv/bin/mkdocs || $(PYTHON) -m venv build/docs-venv
	build/docs-venv/bin/pip install -q mkdocs-material 'mkdocstrings[python]' ruff
	build/docs-venv/bin/mkdocs build --strict

installed: build $(INSTALLED)

dev: build $(DEV)

$(VENV)/.tools: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c "import torch" 2>/dev/null || $(PIP) install "torch>=2.10"
	sed -n 's/^requires = \[\(.*\)\]/\1/p' pyproject.toml | tr -d , | xargs $(PIP) install -q
	@touch $@

# The libraries are up to date by then: these two only link the source tree into the environment.
$(VENV)/.installed: pyproject.toml setup.py | build
	$(PIP) install -q --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: pyproject.toml setup.py | build
	$(PIP) install -q --no-build-isolation -e ".[dev]"
	@touch $@ $(INSTALLED)

# Random calls against fp64, by the thousand on a GPU: make fuzz FUZZ_ARGS="--cases 20000 --seconds 600 --seed 3"
fuzz: dev
	$(PY) tests/fuzz.py $(FUZZ_ARGS)

# Every kernel under the tools of compute-sanitizer.
sanitize: dev
	$(PY) tests/sanitize.py $(SANITIZE_ARGS)

# Threads, streams, forks and ten minutes of random calls: nothing grows, no bit changes.
soak: dev
	GMM_TEST_SOAK=$(or $(SOAK_SECONDS),600) $(PY) -m pytest -s tests/test_stress.py --timeout 3600

# What the tests run of the Python code, lines and branches apart, and tests/c of the core's host part
# (what needs CUDA, the run itself and the fills, is not compiled here).
coverage: dev build/coverage/plan build/coverage/fuzz
	rm -f .coverage .coverage.*
	$(PY) -m coverage run -m pytest $(PYTEST_ARGS)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report
	$(PY) -m coverage json -q -o build/coverage/python.json
	$(PY) -c "import json; t = json.load(open('build/coverage/python.json'))['totals']; \
	  lines, branches = t['covered_lines'] / t['num_statements'], t['covered_branches'] / t['num_branches']; \
	  print(f'python/gmm: {lines:.1%} of {t[\"num_statements\"]} lines, {branches:.1%} of {t[\"num_branches\"]} branches'); \
	  exit(min(lines, branches) < 0.95)"
	find build/coverage -name '*.gcda' -delete
	build/coverage/plan && build/coverage/fuzz 5 1
	gcov -n `find build/coverage -name '*.gcda'` | awk -F "[:% ]+" '/^File/ {core = /csrc.core/} \
	  core && /^Lines/ {lines += $$5; run += $$3 * $$5 / 100; core = 0} \
	  END {printf "csrc/core: %.1f %% of %d lines\n", 100 * run / lines, lines; exit run < 0.9 * lines}'

# The core without CUDA, instrumented: every input may only be refused, and nothing be read but what it says is there.
# FUZZ_SECONDS and SEED choose another run.
fuzz-c: FUZZ_SECONDS ?= 300
fuzz-c: build/fuzz/fuzz
	cd build/fuzz && ./fuzz $(FUZZ_SECONDS) $(SEED)

# ---- the core's host part without CUDA, in two instrumented builds of tests/c's programs

HOST_SOURCES := $(wildcard csrc/core/*.cpp csrc/cublas/heuristics.cpp csrc/cutlass/sm90/*/heuristics.cpp)
HOST_HEADERS := $(wildcard csrc/core/*.h csrc/cublas/*.h csrc/cutlass/sm90/*.h csrc/cutlass/sm90/*/*.h) \
  csrc/include/gmm/gmm.h
HOST_FLAGS := -std=c++17 -g -Icsrc -Icsrc/include -DGMM_WITH_CUDA=0 -DGMM_ARCHS='"none"' \
  $(foreach name,CUDA CUTLASS CUBLAS,-DGMM_$(name)_VERSION='"none"')
SANITIZERS := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all

build/fuzz/%.o: %.cpp $(HOST_HEADERS)
	@mkdir -p $(@D)
	$(CXX) $(HOST_FLAGS) $(SANITIZERS) -fsanitize-coverage=trace-pc -c $< -o $@

build/fuzz/fuzz: $(HOST_SOURCES:%.cpp=build/fuzz/%.o) tests/c/fuzz.cpp
	$(CXX) $(HOST_FLAGS) $(SANITIZERS) $^ -o $@

build/coverage/%.o: %.cpp $(HOST_HEADERS)
	@mkdir -p $(@D)
	$(CXX) $(HOST_FLAGS) --coverage -c $< -o $@

build/coverage/tests/c/plan.o: tests/c/plan.c $(HOST_HEADERS)
	@mkdir -p $(@D)
	$(CC) -Icsrc/include -c $< -o $@

build/coverage/plan build/coverage/fuzz: build/coverage/%: $(HOST_SOURCES:%.cpp=build/coverage/%.o) build/coverage/tests/c/%.o
	$(CXX) --coverage $^ -o $@
