# make demo and make test need nothing but Python 3.11 or newer: everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := $(VENV)/oldest

DEMO_FOLDER := runs/demo

.PHONY: demo test test-full test-oldest check lint wheel build bench clean

# Each stamp says that .venv holds what pyproject.toml asked for when it was last read.
$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "autopar needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/train.stamp: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[train]'
	touch $@

$(VENV)/dev.stamp: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@ $(VENV)/train.stamp

.venv: $(VENV)/dev.stamp

# A ViT-Tiny of depth 4 learns to read handwritten digits on two processes.
demo: $(VENV)/train.stamp
	$(BIN)/autopar train vit_tiny_patch16_224 --data digits --devices 2 --pp 2 --epochs 30 --batch-size 32 --lr 1e-3 \
	  --sched onecycle --clip-grad 0.5 --shift 1 --smoothing 0.1 --microbatches 4 \
	  --model-kwargs depth=4 patch_size=8 global_pool=avg class_token=False --output $(DEMO_FOLDER) --overwrite

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --durations=20 --durations-min=2

# Whole matrices, and as many random examples as each test asks for.
test-full: $(VENV)/dev.stamp
	$(BIN)/python -m pytest --full -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=60

# A virtual environment with the lowest versions that pyproject.toml allows. They need a Python that they know: 3.11.
$(OLDEST)/stamp: $(VENV)/dev.stamp tests/support/lower_bounds.py
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python tests/support/lower_bounds.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt -e '.[dev]'
	touch $@

test-oldest: $(OLDEST)/stamp
	$(OLDEST)/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile tests/unit tests/cli \
	  tests/integration/parity/test_parity.py tests/integration/checkpoints/test_checkpoint.py

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

check: lint test

wheel build: $(VENV)/dev.stamp
	$(BIN)/python -m build

bench: $(VENV)/dev.stamp
	$(BIN)/autopar bench vit_small_patch16_224 --devices 2 --pp 2 --microbatches 8 --only plain,single,autopar

clean:
	rm -rf $(VENV) dist runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
