# Every target makes .venv by itself: a fresh clone needs nothing but Python.
#
#   make train ARGS="--steps 20 -n 2"      make test ARGS="tests/cli -x"
#
# With TORCH=2.15.0 it uses that torch instead of the pinned one, in an environment of its own, .venv/torch-2.15.0.

PYTHON ?= python3
TORCH :=
VENV := .venv$(TORCH:%=/torch-%)
BIN := $(VENV)/bin
CONSTRAINTS := $(VENV)/constraints.txt
PIP := $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS)
STAMP := $(VENV)/installed
NATIVE := $(VENV)/native
ARGS ?=

# Some machines tell Python to keep no bytecode: every process of the tests, of which there are hundreds, would compile
# all that it imports, and every worker rewrite the assertions of all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: env train test slow extras extras-tests check docs wheel bench faults

env: $(STAMP) $(NATIVE)

# torch comes first and pinned: resolved together with the rest, another build of it may be downloaded too.
# hatchling comes before instep, so that building instep downloads nothing of its own.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(TORCH:%=s/^torch==.*/torch==%/)' constraints.txt > $(CONSTRAINTS)
	$(PIP) torch
	$(PIP) hatchling
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

# Beside its source, by whatever compiler there is; without one a line says so, and ranks use gloo.
$(NATIVE): instep/native/core.c instep/native/build.py $(STAMP)
	$(BIN)/python -m instep.native.build
	@touch $@

train: env
	$(BIN)/instep train $(ARGS)

test: env
	$(BIN)/python -m pytest $(ARGS)

# What is too long for every change: before a release, and after a change to what a test of it is about.
# Some take minutes: each may take ten, and the look at a test that holds the interpreter lock is off, as it ends
# whatever takes two.
slow: env
	$(BIN)/python -m pytest -m slow -o timeout=600 -o faulthandler_timeout=0 $(ARGS)

# The tests that need an optional package, in an environment of its own, .venv/extras. Before a release, like `make slow`.
extras:
	$(MAKE) VENV=$(VENV)/extras extras-tests

extras-tests: env $(VENV)/packages
	$(BIN)/python -m pytest -m '' tests/integrations tests/record/test_loggers.py tests/test_docs.py \
	    tests/native/test_stress.py::test_it_compiles_for_both_processors $(ARGS)

$(VENV)/packages: $(STAMP)
	$(PIP) --no-build-isolation --editable '.[dev,hf,tensorboard,wandb]' accelerate peft lightning datasets ziglang
	@touch $@

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# docs/ as a site: build/site/index.html. A warning is an error, a link that leads nowhere too; nothing is fetched.
docs: env $(VENV)/docs
	rm -rf build/site
	$(BIN)/python -m sphinx -q -E -W --keep-going -n -d build/doctrees -c docs . build/site
	@echo built build/site/index.html

$(VENV)/docs: $(STAMP)
	$(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

# The source distribution, the wheel built from it, and the quick start from the wheel alone: in an environment that has
# what instep needs, but not instep, and in an empty folder. The wheel has the compiled core, where there is a compiler.
WHEEL := build/wheel
define CHECK_WHEEL
import importlib.metadata, sys
from pathlib import Path
import instep
from instep.native import library
home, source = Path(instep.__file__).parent, Path(sys.argv[1])
assert home.is_relative_to(sys.prefix), home
has = {str(f) for f in importlib.metadata.files("instep") if f.parts[0] == "instep" and f.suffix != ".pyc"}
needs = {str(f.relative_to(source.parent)) for f in source.rglob("*.*") if f.is_file() and f.suffix != ".pyc"}
assert has == needs, f"only in the wheel, or missing there: {sorted(has ^ needs)}"
print(library.absence() or "the wheel has the compiled core")
endef
export CHECK_WHEEL
wheel: env
	rm -rf $(WHEEL)
	$(BIN)/python -m hatchling build --target sdist --directory $(WHEEL)
	mkdir $(WHEEL)/empty $(WHEEL)/sdist
	tar -xzf $(WHEEL)/instep-*.tar.gz -C $(WHEEL)/sdist --strip-components 1
	cd $(WHEEL)/sdist && $(abspath $(BIN))/python -m hatchling build --target wheel --directory ..
	$(BIN)/python -m venv --without-pip $(WHEEL)/env
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$(echo $(WHEEL)/env/lib/python*/site-packages)/needed.pth"
	$(BIN)/python -m pip --python $(WHEEL)/env/bin/python install --quiet --no-deps --no-index $(WHEEL)/instep-*.whl
	cd $(WHEEL)/empty && ../env/bin/python -c "$$CHECK_WHEEL" $(CURDIR)/instep
	cd $(WHEEL)/empty && ../env/bin/instep train --steps 5 -n 2
	@echo built $(WHEEL)/*.whl $(WHEEL)/*.tar.gz

# Lists the benchmarks and which results are stale. ARGS="steps link/nodes" runs those, ARGS=--stale all that are.
bench: env
	$(BIN)/python benchmarks/run.py $(ARGS)

# What happens to runs when something goes wrong; exit code 1 if anything is not as expected.
faults: env
	$(BIN)/python benchmarks/faults/run.py $(ARGS)
