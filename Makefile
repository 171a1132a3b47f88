# Everything runs from .venv, which is made on first use from pyproject.toml under constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests and demo need no network after the install.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow test-upstream style quality bench install

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,quality]'
	touch $(STAMP)

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/rankattn demo

test: quality
	$(BIN)/python -m pytest -n 2

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m slow

# The only target that downloads: transformers' own tests, to a temporary folder.
test-upstream: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,quality,test-upstream]'
	$(BIN)/python tests/upstream/run.py --jobs 2

style: $(STAMP)
	for folder in rank_albert rank_encoder rank_xlnet; do \
		(cd hf_rankattn/models/rank_bert && cp heads.py building.py stock_fields.py ../$$folder/); \
	done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks
