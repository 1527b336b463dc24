# Two commands: `make reproduce` (notebooks, figures, reports) and `make test`. Both need only python3 >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SAMPLE := .cache/wheels/nvidia_nvjpeg-13.3.2.43-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl

.PHONY: reproduce test lint sample clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[notebooks]"
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

# One real CUDA library (nvJPEG, 4 MB), the same for everybody: version and sha256 are in campaigns/libraries/fetch.py.
sample: $(VENV)/installed
	$(BIN)/python campaigns/libraries/fetch.py .cache/wheels

reproduce: sample
	$(BIN)/gpubloat reproduce
	$(BIN)/gpubloat libraries scan $(SAMPLE) --target sm_90 --kernels --csv reports/nvjpeg --force

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .cache reports
