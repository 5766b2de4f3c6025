# Everything runs from a fresh clone: the targets below create .venv and models/ as needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Handed to the scripts when given: make serve HTTP_PORT=8010 TARGET=Qwen/Qwen3-0.6B DRAFTER=none
export TARGET DRAFTER CONFIG HTTP_PORT GRPC_PORT METRICS_PORT ADDRESS
export TORCH_INDEX PIP_ARGS

.PHONY: help setup serve test lint clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve   install what is missing, then serve on 127.0.0.1 until Ctrl-C'
	@echo '             HTTP_PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002'
	@echo '             TARGET=   Hugging Face id or local folder (default: SmolLM2-135M-Instruct)'
	@echo '             DRAFTER=  dfly, mtp, ngram, none, or the id or folder of a drafter or draft model'
	@echo '             CONFIG=   YAML file with engine options'
	@echo 'make setup   the installing part alone: .venv, packages, kernels, default target'
	@echo '             PYTHON=       the Python to use, 3.10 to 3.13 (default: python3)'
	@echo '             TORCH_INDEX=  a further package index, as for the CPU build of torch'
	@echo '             PIP_ARGS=     further arguments of pip install'
	@echo 'make test    install, lint, and run all tests, a real server included'
	@echo '             PYTEST_ARGS=  arguments of pytest'
	@echo 'make lint    ruff and mypy'
	@echo 'make clean   remove .venv, models/ and run/'

setup:
	@$(PYTHON) scripts/setup.py

serve: setup
	@exec $(BIN)/python scripts/serve.py

test: setup lint
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) models run build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
