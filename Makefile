PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

comma := ,

# One stamp per set of extras, so that `make test` does not install what only `make bench` needs.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(1)]'
	touch $@
endef

.PHONY: demo test lint bench clean

demo: $(VENV)/.examples
	$(BIN)/python examples/fp8_attention.py
	$(BIN)/python examples/real_model.py

test: lint
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/attention.py

$(VENV)/.examples: pyproject.toml constraints.txt
	$(call install,examples)

$(VENV)/.test: pyproject.toml constraints.txt
	$(call install,test$(comma)bench$(comma)examples)

$(VENV)/.bench: pyproject.toml constraints.txt
	$(call install,bench$(comma)bench-peers)

clean:
	rm -rf $(VENV)
