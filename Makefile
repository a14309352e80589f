# make demo | make test: each makes .venv, installs what it needs and runs. A second run starts at once.
#
#   TORCH="torch==2.13.0"   which torch to install; it is installed first, so that nothing later replaces it
#   TORCH_INDEX=URL         from which package index (README.md: the CPU build)
#   PYTHON=python3.12       which Python makes .venv
#   PYTEST_ARGS="-k router" passed to pytest

TORCH ?= torch>=2.11
TORCH_INDEX ?=
PYTHON ?= python3
PYTEST_ARGS ?=

BIN := .venv/bin
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.hpp')

.PHONY: demo test lint test-gpu bench clean FORCE

demo: .venv/installed
	$(BIN)/perseus demo

test: lint
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile $(PYTEST_ARGS)

# mypy reads a copy that is laid out as the wheel is: passes/ is perseus_compile.passes only there.
lint: .venv/installed
	$(BIN)/ruff check .
	rm -rf build/typecheck
	$(BIN)/python setup.py --quiet build_py --build-lib build/typecheck
	cd build/typecheck && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

test-gpu: .venv/installed
	$(BIN)/python -m pytest -m "gpu or gpu2" $(PYTEST_ARGS)

bench: .venv/installed
	$(BIN)/perseus bench moe
	$(BIN)/perseus bench compile

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find perseus_compile -name '*.so' -delete

.venv/installed: .venv/wanted pyproject.toml setup.py $(CXX_FILES)
	@command -v $${CXX:-g++} > /dev/null || { echo "No C++ compiler: install g++ (Debian, Ubuntu: apt-get install g++)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install -e ".[test,lint]"
	touch $@

# Changes only when the torch that is asked for does.
.venv/wanted: FORCE
	@mkdir -p .venv
	@echo "$(TORCH) $(TORCH_INDEX)" | cmp -s - $@ || echo "$(TORCH) $(TORCH_INDEX)" > $@
