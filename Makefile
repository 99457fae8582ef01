# `make help` lists the targets. All of them set up .venv first; that costs nothing once it is done.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN := .venv/bin/python
# Two processes, each with servers of its own. Torch's thread pools would wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(or $(TEST_PROCESSES),2)

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint bench bench-results bench-report docs faults setup clean trl-matrix dist sbom extras

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: ## Create or update .venv
	@$(PYTHON) scripts/set_up.py

demo: setup ## Watch a real GRPO run learn over a bucket (S3=1: over a real S3 server)
	@$(RUN) -m demo $(if $(S3),--s3) $(DEMO_ARGS)

test: setup ## Run all tests, with real vLLM, TRL and S3 servers
	-@$(RUN) scripts/vllm_matrix.py --prepare 0.29.0 0.32.0 # without network its test is skipped
	@$(PYTEST) $(TEST_ARGS)

test-fast: setup ## Run the tests that start no vLLM and no TRL
	@$(PYTEST) -m "not slow" $(TEST_ARGS)

lint: setup ## Format check, lint, types
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy -p adapter_bucket -p trl_async_bucket -p vllm_bucket_lora -p bucket_lora_proxy -p demo
	@$(RUN) -m mypy scripts tests benchmarks examples

bench: setup ## Run the benchmarks
	@$(RUN) -m pytest benchmarks --benchmark-only $(BENCH_ARGS)

bench-results: setup ## Take the CPU figures of docs/performance.md anew (half an hour; needs a quiet machine)
	@set -e; export OMP_NUM_THREADS=1; \
	for what in round_trips optimizer_blocked "optimizer_blocked --processes 2" publish_to_ready \
		"end_to_end --way bucket" "end_to_end --way stock" \
		growth_watchers growth_manifest growth_prefixes growth_tensors; \
	do $(RUN) -m benchmarks.$$what --out benchmarks/results; done

bench-report: setup ## Write docs/performance.md from benchmarks/results
	@$(RUN) -m benchmarks.report

docs: setup ## Build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

faults: setup ## Every fault in every phase of a real run, and 20,000 requests through failing replicas (half an hour)
	@$(RUN) -m tests.faults.proxy_run $(FAULTS_ARGS)
	@OMP_NUM_THREADS=1 $(RUN) -m tests.faults.matrix $(MATRIX_ARGS)

trl-matrix: setup ## Run the trainers' tests with every supported TRL release
	@TRL_RELEASES=1.14.2,1.15.0,1.16.0 $(RUN) -m pytest tests/integration/trainers/test_old_trl.py $(TEST_ARGS)

dist: setup ## Build wheel and sdist into dist/ and check them
	@$(RUN) -m scripts.release

sbom: setup ## Write what each extra pulls in (CycloneDX) and all licences into dist/
	@$(RUN) -m scripts.sbom

extras: setup ## Install each extra alone into an empty environment (minutes, gigabytes; needs a package index)
	@$(RUN) -m scripts.extras $(EXTRAS_ARGS)

clean: ## Remove .venv and everything generated
	rm -rf .venv build dist site demo-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
