# One vocabulary of commands for people, hooks and CI. `make help` prints it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The first that runs and is new enough: pyenv, for one, leaves names behind that do not run.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3; do \
  $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$name && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL := models/SmolLM2-135M-Instruct
# Images of Python forbid it to keep what it compiles: each of the hundreds of processes then compiles the modules anew.
export PYTHONDONTWRITEBYTECODE :=
# The downloads are large; a registry that hiccups once should not cost the whole set-up.
PIP_INSTALL := $(BIN)/pip install --quiet --retries 10 --timeout 180

.PHONY: help setup kernels run model demo test simulate chaos soak ray-test acceptance check format bench bench-generate bench-push bench-life bench-host image image-test clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: kernels ## create .venv and install everything (does nothing when it is up to date)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python of 3.11 or later runs here; PYTHON=PATH names one" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "installing into $(VENV): 1.5 GB, some minutes the first time"
	@for try in 1 2 3; do \
	  if $(PIP_INSTALL) -e '.[serve,dev]'; then touch $@; exit 0; fi; \
	  echo "pip failed (try $$try of 3)" >&2; sleep $$((try * 5)); \
	done; exit 1

# Kept in the user's cache, by processor and source: seconds once, so that no first start has to wait for it.
kernels: $(STAMP) # compile the kernels for this processor
	@$(BIN)/python -m worker.cpu.native >/dev/null
	@$(BIN)/python -m api.lanes >/dev/null

model: $(MODEL)/model.safetensors ## fetch SmolLM2-135M-Instruct and convert it to models/

$(MODEL)/model.safetensors: | $(STAMP)
	$(BIN)/python -m scripts.fetch_smollm2 --out $(MODEL)

run: kernels model ## serve SmolLM2 on http://127.0.0.1:8000
	$(BIN)/paddle-rollout serve $(MODEL)

demo: kernels ## train a policy against two live replicas; writes out/demo/
	$(BIN)/python -m examples.grpo_paddle --out out/demo

check: $(STAMP) ## ruff, mypy, import-linter, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m scripts.render_states --check
	$(BIN)/python -m scripts.render_options --check
	$(BIN)/python -m scripts.render_dialects --check

test: check kernels model ## everything that must hold before a commit: check, then all tests, two files at a time; out/tests.*
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 30 --junitxml out/tests.xml

simulate: $(STAMP) ## the hub's stores under a simulated clock, network, disk and death, 10,000 seeds; SIMULATE_ARGS
	$(BIN)/python -m tests.simulation $(SIMULATE_ARGS)

chaos: kernels ## break a service at random under load for ten minutes, then account for every token; CHAOS_ARGS
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

soak: kernels ## load a service for an hour and say what of it grew: memory, descriptors, threads; SOAK_ARGS
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

acceptance: kernels model ## outside clients, promtool and Chromium against live services, each in an environment of its own
	tests/acceptance/tools.sh
	$(BIN)/python -m scripts.client_venvs
	ACCEPTANCE=1 $(BIN)/python -m pytest -vv --durations 10 tests/acceptance

ray-test: kernels ## all tests of the Ray cluster, also those of minutes: nodes that lose their power (root for these)
	RAY_TESTS=1 $(BIN)/python -m pytest -p no:cacheprovider --durations 10 tests/ray

format: $(STAMP) ## rewrite files the way `make check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m scripts.render_states
	$(BIN)/python -m scripts.render_options
	$(BIN)/python -m scripts.render_dialects

bench: bench-push bench-generate bench-life ## every benchmark with its peers; results as JSON in benchmarks/results/

bench-generate: kernels model ## generation beside vLLM's CPU build and HF transformers; an hour, in pieces that go on where one ended
	$(BIN)/python -m benchmarks.generate $(BENCH_ARGS)

bench-push: $(STAMP) ## pushes of Qwen3-0.6B against memory's speed and other ways; needs 16 GB of memory
	$(BIN)/python -m benchmarks.push $(BENCH_ARGS)

bench-life: kernels model ## what deaths, clears, idling and ticks cost; LIFE_ARGS=idle for ten minutes of idling
	$(BIN)/python -m benchmarks.life $(LIFE_ARGS)

bench-host: kernels model ## what a token costs outside the model: CPU time in rank 0, API and client; BENCH_ARGS
	$(BIN)/python -m benchmarks.host $(BENCH_ARGS)

image: ## build the container images: the service, and the demo's trainer
	DOCKER_BUILDKIT=1 docker build $(IMAGE_ARGS) --target service -t paddle-rollout .
	DOCKER_BUILDKIT=1 docker build $(IMAGE_ARGS) --target trainer -t paddle-rollout-trainer .

image-test: $(STAMP) ## build and run the images and deploy/compose.yaml for real (root, Debian; a quarter of an hour, more the first time)
	deploy/test/run.sh

clean: ## remove what the other targets made, except models/
	rm -rf $(VENV) out dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
