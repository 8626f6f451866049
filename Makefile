# Set-up, checks and the demonstration run. `make help` lists the targets.
#
# PYTHON       interpreter that makes the virtual environment, 3.11 or newer
# WORKERS      processes that run tests at the same time, by default one for each core
# TORCH_INDEX  package index with the torch build you want; on Linux without a GPU it saves gigabytes of CUDA libraries:
#              make install TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
WORKERS ?= auto
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -q -rs
# How tests are shared out follows: files keep their fixtures, but files of few long tests would leave workers idle.
PARALLEL := -n $(WORKERS) --maxprocesses 8 --dist
STAMP := $(VENV)/.installed
REFERENCE := $(addprefix trueturn.,environment training evaluating recorded runs rewards) trainer.callbacks agents.types envs.env envs.tool_env

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint docs release reference mutation clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1|/p' Makefile | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

install: $(STAMP) ## make .venv with the package and its development tools; again after pyproject.toml changed

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: PYTHON: must be Python 3.11 or newer, got $(PYTHON)" \
			"($$($(PYTHON) --version 2>&1 | head -n 1)); try make install PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable ".[dev]"
	@touch $@

demo: $(STAMP) ## train the bundled model on the bundled problems, on the CPU
	$(BIN)/python -m trainer.run --env geo3k --max-turns 3

test: $(STAMP) ## run the tests that prove every claim, on all cores: about fifteen minutes on two
	HYPOTHESIS_PROFILE=quick $(PYTEST) $(PARALLEL) loadfile -m "not slow and not alone"

test-all: test ## run all tests: those of `make test`, the slow ones, random cases in full number, and time limits one by one
	$(PYTEST) $(PARALLEL) worksteal -m "(slow or hypothesis) and not alone"
	$(PYTEST) -m alone

lint: $(STAMP) ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(STAMP) ## build the documentation's site in build/site; a link that leads nowhere fails
	$(BIN)/sphinx-build -c docs --fresh-env --fail-on-warning --keep-going --nitpicky --quiet . build/site
	cp build/site/README.html build/site/index.html

release: $(STAMP) ## build wheel and source archive in dist; resolve every extra, in ten minutes
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m tests.packages dist/*.whl

reference: $(STAMP) ## write the reference of the Python API to build/reference
	$(BIN)/pdoc --output-directory build/reference --docformat google $(REFERENCE)

mutation: $(STAMP) ## put small faults into the core, one by one, and count those that a test notices: an hour or two
	$(BIN)/python -m pip install --quiet --editable ".[mutation]"
	$(BIN)/python -m benchmarks.mutation

clean: ## delete the virtual environment, caches and build products; runs are kept
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find envs agents trainer trueturn starter tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
