# Everything a person does with the project. `make help` lists it; each target does its own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := headway services tests benchmarks examples tools
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm2 test test-unit test-mutations test-sglang test-images test-compose test-helm check-compose helm verify fix stubs lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make the virtual environment with pinned dependencies and an etcd binary

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headway needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

quickstart: setup ## Train a small model on this machine: services come up, reward rises, a report appears
	$(BIN)/headway up configs/quickstart.yaml

smollm2: setup ## Prepare SmolLM2-135M-Instruct as models/SmolLM2-135M-Instruct
	$(BIN)/python tools/prepare_smollm2.py models/SmolLM2-135M-Instruct

test: setup ## Run the whole test suite
	$(PYTEST)

test-unit: setup ## Run the unit tests
	$(PYTEST) tests/unit

test-mutations: setup ## Take each guard out by hand, and see that a test fails
	$(BIN)/python tools/mutations.py

test-sglang: setup ## Hold the engine contract against real SGLang on CPU, in an environment of its own
	PYTHON=$(PYTHON) tools/sglang_cpu/setup.sh .venv-sglang
	HEADWAY_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(PYTEST) tests/contract/test_engine_*.py tests/contract/test_fleet_real_engines.py

test-images: ## Build every image and check it; skipped where no Docker engine is reachable
	tools/test_images.sh

test-compose: ## Train with Docker Compose, kill every part in turn; skipped where no Docker engine is reachable
	$(PYTHON) tools/test_compose.py

test-helm: setup .cache/helm/4/helm ## Check the chart and install it, with Helm 3 and 4, on a cluster of its own or KUBECONFIG's
	$(BIN)/pip install --quiet "kubernetes-validate==1.37.0"
	$(BIN)/python tools/cluster.py $(PYTEST) tests/contract/test_helm_*.py

check-compose: ## Have Compose read the Compose files; no engine is needed
	tools/check_compose.sh

helm: setup .cache/helm/4/helm ## Make the chart's schema and rendered examples again
	$(BIN)/python tools/helm_schema.py
	$(BIN)/python tools/helm_render.py

.cache/helm/4/helm: tools/get_helm.py
	$(BIN)/python tools/get_helm.py
	@touch $@

verify: setup ## Check style, types, layers and generated stubs
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/generate_stubs.sh --check

fix: setup ## Format, and mend what can be mended
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

stubs: setup ## Generate headway/v1 from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" tools/generate_stubs.sh

lock: ## Pin the newest dependencies that fit into requirements.lock
	tools/lock.sh

clean: ## Remove what runs and builds have left
	rm -rf runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
