# `make` lists the targets. A target that needs the environment makes it first, if it is missing.

# The Python of .venv, or else the newest one that can make an environment. Each version has a lock
# file of its own, because the newest megatron-core differs between them.
VENV   := .venv
PYTHON ?= $(shell for python in $(VENV)/bin/python python3.12 python3.11; do \
	$$python -c 'import ensurepip, venv' 2>/dev/null && echo $$python && exit; done; echo python3.12)
LOCK   := requirements/lock$(shell $(PYTHON) -c 'import sys; print("-3.12" if sys.version_info >= (3, 12) else "")' 2>/dev/null).txt
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check
STAMP  := $(VENV)/.stamp
PORT   ?= 5000
# GPUs of this machine, by which `make setup` chooses its packages; `make setup GPUS=` ignores them.
GPUS   := $(shell nvidia-smi --list-gpus 2>/dev/null)
WORKERS ?= 3
STORE  ?= sqlite:///results/mlflow.db
# If this variable is set, every process compiles all modules that it imports, which takes two thirds
# of the start of a job.
export PYTHONDONTWRITEBYTECODE :=
SHELL  := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang demo study tables-tiny test test-slow test-gpu test-package test-container test-documents first-curve test-sglang test-gateway test-frameworks test-environments test-coding-agents test-nodes test-learning test-slurm test-mlflow kills chaos notebooks lint format package site bench bench-gpu gpu-kit gpu-run gpu-acceptance exactness ui retriever lock lock-nccl clean-results clean-env

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with pinned packages, of Python 3.12 or else 3.11 (PYTHON=python3.11); with GPUs also .venv-sglang

# On a machine with GPUs the second stage of environment.yml installs all packages.
# On others torch is installed first, so that its CPU build is chosen if an index offers one. The lock file is
# complete, so no dependencies are resolved, and two pips can each install a part of it at once. Modules are
# compiled when they are first imported.
# A `.venv` that is a link belongs to another checkout and is not changed.
$(STAMP): $(if $(shell test -L $(VENV) && echo link),,pyproject.toml $(LOCK))
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.12 or 3.11 with venv, or say make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) mcore_mas/runtime/project_path.py
	@echo "installing packages into $(VENV); this takes some minutes"
	$(PYTHON) -m venv $(VENV)
ifneq ($(strip $(GPUS)),)
	PATH="$(abspath $(BIN)):$$PATH" bash environment.post-deploy.sh
else
	$(PIP) $$(grep -E '^torch==' $(LOCK))
	grep -vE '^(#|torch==)' $(LOCK) | xargs --max-procs=2 --max-args=60 $(PIP) --no-deps
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
endif
	@touch $@

setup-sglang: $(STAMP) .venv-sglang/.stamp ## make .venv-sglang, the environment of SGLang's servers, for this machine's GPUs or else for its CPUs

demo: $(STAMP) ## run the whole pipeline on two CPU cores, from data to report
	$(BIN)/snakemake

study: $(STAMP) ## compare estimators over seeds, in some hours on two CPU cores
	$(BIN)/snakemake study_stability --configfile workflow/studies/claim.yaml
	$(BIN)/snakemake study_stability --configfile workflow/suites/stability.yaml
	$(BIN)/snakemake study_stability --configfile workflow/suites/stability_path.yaml
	@cat results/tables/claim_study.md results/tables/stability_study.md results/tables/stability_path_study.md

tables-tiny: $(STAMP) ## make every paper's table at the scale tiny and a page about them: random models, generated data
	@status=0; $(BIN)/snakemake tables --keep-going --config scale=tiny || status=$$?; \
	$(BIN)/python -m docs.writers tables_tiny; exit $$status

$(VENV)/chromium: | $(STAMP) # browser for tests of pages, if none is installed
	@command -v chromium chromium-browser google-chrome chrome >/dev/null || \
	  $(BIN)/python -m tests.support.debian $@ chromium usr/lib/chromium/chromium

PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

test: $(STAMP) $(VENV)/chromium ## run the tests that are not slow, in three processes (WORKERS=3), in some minutes
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(STAMP) $(VENV)/chromium ## run the slow tests: whole trainings, killed processes, compilers
	$(PYTEST) --dist loadfile --no-loadscope-reorder -m slow

test-gpu: $(STAMP) ## run the tests that need this machine's GPU
	$(BIN)/python -m pytest -m gpu tests/unit

test-sglang: $(STAMP) .venv-sglang/.stamp ## run engines, transports and a training against real SGLang servers (.venv-sglang)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m sglang --sglang .venv-sglang/bin/python tests/contract/test_engines.py tests/sglang

test-slurm: $(STAMP) ## run jobs, failures, preemption and a paper's table on a real Slurm from Debian's packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --slurm --junitxml results/slurm.xml tests/slurm tests/workflow/test_training.py
	$(BIN)/python -m tests.faults.page results/slurm.xml

test-mlflow: $(STAMP) $(VENV)/chromium .venv-mlflow2/.stamp ## compare two runs in MLflow's real pages, make docs/mlflow.md's pictures; send runs to MLflow 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --mlflow docs/pictures \
	  tests/workflow/test_mlflow_pages.py tests/workflow/test_mlflow_2_server.py

.venv-mlflow2/.stamp: # a server of MLflow 2, whose requirements conflict with ours
	$(PYTHON) -m venv .venv-mlflow2
	.venv-mlflow2/bin/python -m pip install --quiet --no-compile mlflow==2.22.5 'sqlalchemy<2.1'
	@touch $@

DIST ?= dist
package: .venv-package/.stamp ## build a wheel and an sdist in dist/, and check them as an index does (twine upload dist/* publishes)
	rm -rf $(DIST)
	.venv-package/bin/python -m build --outdir $(DIST) . >.venv-package/build.log 2>&1 || { tail -20 .venv-package/build.log; exit 1; }
	rm -rf mcore_mas.egg-info # setuptools writes it beside the sources
	.venv-package/bin/python -m twine check --strict $(DIST)/*

.venv-package/.stamp: # the tools that build a package
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/python -m pip install --quiet --no-compile --disable-pip-version-check 'build>=1.2,<2' 'twine>=6,<7'
	@touch $@

test-package: $(STAMP) ## build the package, check it, and use it in an empty environment and folder
	tests/package.sh $(BIN)/python

first-curve: $(STAMP) ## measure the time from pip install of the wheel to the first learning curve, with all downloads (TORCH=torch==2.13.0+cpu)
	TORCH=$(TORCH) tests/package.sh $(BIN)/python timed

test-container: $(STAMP) ## build containers/Dockerfile with buildah on Debian's packages, train in it, and measure the time to the first learning curve in its base image (as root)
	TORCH=$(TORCH) tests/package.sh $(BIN)/python container

test-gateway: $(STAMP) ## run a thousand random agent programs; check that no sampled token is lost and no call gets a 5xx
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.gateway_fuzz 1000

test-documents: $(STAMP) $(VENV)/chromium ## run every command of the documents that runs on a CPU, also those that take minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --documents tests/workflow/test_shell_blocks.py tests/workflow/test_scaffold.py

kills: $(STAMP) ## kill a pipeline between any two writes, or between a share of them (SHARE=1/4)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.kills $(SHARE)

chaos: kills ## kill, stop and starve runs and damage their files, between writes and at random; update docs/reliability.json
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.slope
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.chaos --out results/chaos.json
	status=0; OMP_NUM_THREADS=1 $(BIN)/python -m pytest --junitxml results/chaos.xml $$($(BIN)/python -m tests.faults.page --list) || status=$$?; \
	$(BIN)/python -m tests.faults.page results/chaos.xml results/chaos.json; \
	exit $$status

test-learning: $(STAMP) ## run trainings whose scores must rise: self-play in poker, and a distillation
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --learning tests/workflow/test_poker.py tests/workflow/test_distill_demo.py

test-nodes: $(STAMP) ## run trainings on several nodes, which are network namespaces of this machine (as root)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nodes tests/workflow/test_nodes.py

notebooks: $(STAMP) ## execute docs/notebooks and store their outputs, in two minutes
	$(BIN)/python -m tests.support.notebooks

test-frameworks: $(STAMP) .venv-frameworks/.stamp .venv-frameworks-2/.stamp .venv-frameworks-3/.stamp .npm-frameworks/.stamp ## train unchanged programs of agent frameworks (or ONLY=LangGraph) and write the table of docs/frameworks.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.frameworks $(if $(ONLY),"$(ONLY)")
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/frameworks

test-environments: $(STAMP) .venv-verifiers/.stamp .venv-openenv/.stamp .venv-openenv-2/.stamp ## play and train published environments of verifiers and OpenEnv
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.environments

.venv-verifiers/.stamp .venv-openenv/.stamp .venv-openenv-2/.stamp: .venv-%/.stamp: requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-compile --requirement $<
	@if [ $* = openenv ]; then rm -rf .venv-$*/my_env && .venv-$*/bin/openenv init my_env --output-dir .venv-$*; fi
	@touch $@

test-coding-agents: $(STAMP) .npm-frameworks/.stamp ## play Codex and Claude Code, as npm installs them, at the gateway
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/frameworks/test_coding_agents.py

.npm-frameworks/.stamp: tests/frameworks/package.json
	rm -rf .npm-frameworks
	mkdir .npm-frameworks
	cp tests/frameworks/package.json .npm-frameworks
	npm install --prefix .npm-frameworks --no-audit --no-fund
	node .npm-frameworks/node_modules/@anthropic-ai/claude-code/install.cjs
	@touch $@

.venv-frameworks/.stamp: requirements/frameworks.txt
	rm -rf .venv-frameworks
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --no-compile --no-deps --requirement requirements/frameworks.txt
	for name in ag2 anthropic langgraph-cli openai-agents; do .venv-frameworks/bin/python -m pip download --quiet \
		--no-deps --no-binary $$name --dest .venv-frameworks/sources "$$(grep "^$$name==" requirements/frameworks.txt)"; done
	cd .venv-frameworks/sources && for file in *.tar.gz; do tar -xzf $$file; done && \
		HOME=$$PWD CREWAI_TESTING=true ../bin/crewai create crew sums --skip_provider
	@touch $@

.venv-frameworks-2/.stamp .venv-frameworks-3/.stamp: .venv-%/.stamp: requirements/%.txt
	rm -rf .venv-$*
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-compile --no-deps --requirement $<
	@touch $@

.venv-sglang/.stamp: requirements/sglang.txt requirements/sglang-cpu.txt requirements/sglang.sh tests/sglang/patch_cpu.py | $(STAMP)
	requirements/sglang.sh $(PYTHON)

lint: $(STAMP) ## check style, types and the workflow
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --line-length 100 --check Snakefile workflow
	$(BIN)/mypy
	$(BIN)/snakemake --lint

format: $(STAMP) ## format all files
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt --line-length 100 Snakefile workflow

bench: $(STAMP) ## run every benchmark and write docs/benchmarks.md
	$(BIN)/python benchmarks/run_all.py

bench-gpu: $(STAMP) ## measure the trainer on one GPU, in nine minutes (results/gpu/results.jsonl)
	$(BIN)/python -m benchmarks.gpu --budget 540 --out results/gpu

# the demo's cold start, which a whole run begins from
results/demo_math/bootstrap/bootstrap.json: | $(STAMP)
	$(BIN)/snakemake $@

gpu-kit: $(STAMP) results/demo_math/bootstrap/bootstrap.json ## pack a whole training for a GPU machine without internet (.gpu)
	$(BIN)/python -m benchmarks.gpu.run_kit --run results/demo_math --out .gpu --packages

.gpu/demo/config.yaml: | $(STAMP) results/demo_math/bootstrap/bootstrap.json
	$(BIN)/python -m benchmarks.gpu.run_kit --run results/demo_math --out .gpu

gpu-run: $(STAMP) .gpu/demo/config.yaml ## train two policies and measure on this machine's GPU, in eight minutes (results/gpu-run)
	$(BIN)/python -m benchmarks.gpu.whole_run --kit .gpu --out results/gpu-run

# Without SGLang, whose wheels need CUDA 13, the sections that start its servers are skipped.
gpu-acceptance: $(STAMP) ## check NCCL, layouts, SGLang and every transport on this machine's GPUs (results/gpu-acceptance)
	-@$(MAKE) --no-print-directory setup-sglang
	$(BIN)/python -m benchmarks.gpu.acceptance --out results/gpu-acceptance

exactness: $(STAMP) ## measure every layout against a Hugging Face model and write docs/exactness.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.exactness

ui: $(STAMP) ## open MLflow on the runs (PORT=5000)
	@$(BIN)/mcore-mas ui --store $(STORE) --port $(PORT)

# Serve an index until Ctrl-C or scancel. A port in ARGS replaces 8000, because the last one counts.
# The path of Python is relative, because a job of sbatch starts in the folder that submitted it.
SERVE_INDEX = $(BIN)/python -m retrieval.server --index $(INDEX) --port 8000 $(ARGS)
retriever: $(STAMP) ## serve an index to runs with retriever.urls (INDEX=data/wiki-18; SLURM=--mem=80G submits a job)
	$(if $(SLURM),sbatch --requeue $(SLURM) --wrap '$(SERVE_INDEX)',$(SERVE_INDEX))

site: $(STAMP) ## write the generated pages of docs/, build the site in build/site, and check every link
	$(BIN)/python -W ignore -m docs.writers site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build # not --quiet: then mkdocs counts no warnings
	@echo "build/site/index.html"

lock: $(STAMP) ## write requirements/lock.txt from .venv (lock-3.12.txt from a .venv of Python 3.12)
	@{ sed -n 1p requirements/lock.txt; $(BIN)/python -m pip list --format=freeze --exclude pip --exclude-editable \
	  | sed -E '/^(cuda|nvidia)-/d; s/\+(cpu|cu[0-9]+)$$//' | LC_ALL=C sort -f; } > requirements/lock.partial
	@mv requirements/lock.partial $(LOCK)

lock-nccl: $(STAMP) ## write requirements/nccl.txt from the metadata of SGLang's pinned release
	$(BIN)/python -m tests.support.nccl_pins

clean-results: ## remove the results of the pipeline, with checkpoints
	rm -rf results .snakemake

clean-env: ## remove .venv
	rm -rf $(VENV)
