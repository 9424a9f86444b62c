# The newcomer's two commands are `make demo` and `make test`; everything else builds on the same .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What covers the core; `make test` runs all.
CORE_TESTS := $(patsubst %,tests/test_%.py,calibration calibration_intervals diagnostics gaussian_process \
	joint_noise kernels likelihood linalg members prediction resampling score_intervals scores selection estimators \
	calibrated_gradients thermo)

# One process for each core, and one thread in each: tests are many and small. A file stays in one process.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: help demo test test-slow check bench docs format lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("qualms needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check,bench,qm9,docs]'
	@touch $@

demo: $(STAMP) ## train, calibrate and judge a model with error bars
	$(BIN)/qualms demo --force

test: $(STAMP) ## the tests
	$(PYTEST) -m 'not slow'

test-slow: $(STAMP) ## the tests that need minutes or large data
	$(BIN)/python -m pytest -m slow

check: $(STAMP) ## format, lint, types, layers, tests with coverage of the core
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -q -m 'not slow' --cov=src/qualms/gp --cov=src/qualms/calibration --cov-branch --cov-fail-under=95 $(CORE_TESTS)

bench: $(STAMP) ## the benchmarks; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

docs: $(STAMP) ## the documentation, in docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -n -b html docs docs/_build/html

format: $(STAMP) ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: ## renew constraints.txt with the newest versions that pyproject.toml allows
	rm -rf .lock-venv
	$(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install --quiet '.[test,check,bench,qm9,docs]'
	.lock-venv/bin/python -m pip freeze --exclude qualms > constraints.txt
	rm -rf .lock-venv

clean: ## remove what the other targets made
	rm -rf $(VENV) .lock-venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage .hypothesis build dist docs/_build docs/api
