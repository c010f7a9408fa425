# `make` alone lists the targets. Every target first installs what it needs into .venv.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin

# make bench MODEL=gpt2-xl RAM=8g OUT=results/mine STRATEGIES=baseline,streaming ARGS="--repeats 3"
# make bench SUITE=layouts      make bench RESUME=results/mine
MODEL ?= gpt2-small
RAM ?= none
SECONDS ?= 60
DRAWS ?= 20000
SAMPLE ?= 100
SEED ?= 0
TESTS ?= tests/unit
RUN ?= $(shell ls -td results/*/records.jsonl 2>/dev/null | head -1 | xargs -r dirname)
PEERS := results/loaders-$(shell date +%Y%m%dT%H%M%S)
BASELINE ?= baseline.json
WHAT = $(if $(SUITE),--suite $(SUITE),$(if $(RESUME),--resume $(RESUME),$(MODEL) --ram $(RAM)))
OPTIONS = $(if $(OUT),--out $(OUT)) $(if $(STRATEGIES),--strategies $(STRATEGIES)) \
          $(if $(ISOLATION),--isolation $(ISOLATION)) $(ARGS)

TARGETS := help setup bench recommend floor peers report check man pages docs publish self-bench doctor test \
           test-all test-fresh test-nightly conformance test-vm test-versions model-types checkpoints faults mutation zoo lint dist fuzz clean
LOADING := bench recommend floor peers
UNKNOWN := $(filter-out $(TARGETS) .venv/% .venv-zoo/%,$(MAKECMDGOALS))
ifneq ($(UNKNOWN),)
$(error $(strip no target is called $(firstword $(UNKNOWN)); to load a model of that name: make \
$(or $(firstword $(filter $(LOADING),$(MAKECMDGOALS))),bench) MODEL=$(firstword $(UNKNOWN)) \
$(filter-out MODEL=%,$(MAKEOVERRIDES))))
endif

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready-dev  ## Create .venv with everything that any target needs

bench: .venv/ready  ## Load MODEL with six strategies under a RAM limit: make bench MODEL=gpt2-xl RAM=8g
	$(BIN)/weighin bench $(WHAT) $(OPTIONS)

floor: .venv/ready  ## Find the smallest RAM limit of each strategy: make floor MODEL=gpt2-medium
	$(BIN)/weighin floor $(if $(RESUME),--resume $(RESUME),$(MODEL)) $(OPTIONS)

peers: .venv/ready  ## Measure all installed loaders, cold and warm, and write docs/results.md: make peers MODEL="gpt2-medium ./folder"
	for model in $(MODEL); do for cache in cold warm; do $(BIN)/weighin bench $$model --strategies all \
	  --repeats 3 --set steady=true --cache $$cache --out $(PEERS)/$$(basename $$model)-$$cache $(ARGS) || exit; done; done
	PYTHONPATH=benchmarks $(BIN)/python -m pages.loaders docs/results.md $(PEERS)/*

report: .venv/ready  ## Write the report of RUN again (default: the newest run)
	$(BIN)/weighin report $(RUN)

check: .venv/ready  ## Compare RUN with a committed BASELINE, and fail if memory grew: make check BASELINE=baseline.json
	$(BIN)/weighin check $(RUN) --baseline $(BASELINE) $(ARGS)

man: .venv/ready-dev  ## Write the manual page, docs/weighin.1, from the command line's definitions
	$(BIN)/python -m pages.manual > docs/weighin.1.new
	mv docs/weighin.1.new docs/weighin.1

pages: .venv/ready-dev  ## Write the tables and pictures of README.md and docs/ from results/published and the code
	$(BIN)/python -m pages.tables README.md docs/*.md

docs: .venv/ready-dev  ## Write the documentation site to site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

publish: .venv/ready-dev  ## Measure all published runs again; ARGS=--status lists those that are older than their code
	$(BIN)/python -m pages.publish $(ARGS)

self-bench: .venv/ready-dev  ## Measure weighin itself, its cost and its errors, and write docs/results.md: a quarter of an hour
	$(BIN)/python benchmarks/self_bench.py --out docs/results.md $(ARGS)

recommend: .venv/ready  ## Recommend a strategy for MODEL under a RAM limit, with the code to paste
	$(BIN)/weighin recommend $(MODEL) --ram $(RAM) $(ARGS)

doctor: .venv/ready  ## Try out what this machine can limit and measure
	$(BIN)/weighin doctor

test: .venv/ready-dev  ## Run the unit tests, on all processors: minutes
	$(BIN)/pytest $(TESTS) --numprocesses auto --dist worksteal $(if $(REQUIRE),--require $(REQUIRE)) $(ARGS)

test-all: test  ## Run all tests but those of the night and of parts that have not changed; REQUIRE=docker,cgroup,browser fails instead of skipping
	$(BIN)/pytest --ignore tests/unit --numprocesses auto --dist loadfile $(if $(REQUIRE),--require $(REQUIRE)) $(ARGS)

conformance: .venv/ready-dev  ## Compare DRAWS=20000 random loads by load_streaming with torch's load_state_dict
	WEIGHIN_DRAWS=$(DRAWS) $(BIN)/pytest tests/conformance tests/checkpoints/test_conversions.py $(ARGS)

test-vm: .venv/ready-dev  ## Test limits and figures on Debian's kernel with cgroup v2, in a virtual machine; KERNEL=bookworm-backports: Linux 6.12
	WEIGHIN_VM_KERNEL=$(KERNEL) $(BIN)/pytest -m vm --require vm,cgroup -rP tests/vm $(ARGS)

test-fresh: .venv/ready-dev  ## Test README's first two commands on a fresh Debian 12, without root and Docker: a quarter of an hour
	$(BIN)/pytest -m fresh --require fresh -rP tests/fresh $(ARGS)

test-nightly: .venv-zoo/ready  ## Test what tests leave out by day: all cases of all grids
	$(BIN)/pytest -m "nightly and not vm" -rP $(ARGS)

model-types: .venv/ready-dev  ## Load a small model of each type of transformers with every strategy; write docs/results.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore benchmarks/model_types.py --out docs/results.md $(ARGS)

checkpoints: .venv-zoo/ready  ## Try every layout of checkpoints with every verb; write tests/checkpoints/layouts.md
	PYTHONPATH=harness:tests $(BIN)/python -W ignore tests/checkpoints --out tests/checkpoints/layouts.md $(ARGS)

faults: .venv/ready-dev  ## Try every fault with real commands, SIGNALS=1 signals to each verb, and print what came of it: half an hour
	WEIGHIN_SIGNALS=$(or $(SIGNALS),1) $(BIN)/python -W ignore tests/faults $(ARGS)

mutation: .venv/ready-dev  ## Change the code in SAMPLE=100 small ways, drawn by SEED=0, and print those that no unit test notices; SAMPLE= tries all
	PYTHONPATH=harness:tests $(BIN)/python -W ignore tests/mutation $(if $(SAMPLE),--sample $(SAMPLE)) --seed $(SEED) $(ARGS)

zoo: .venv-zoo/ready  ## Test the loader and the strategies over torch's and torchvision's models
	OMP_NUM_THREADS=1 .venv-zoo/bin/python -W ignore tests/zoo --out tests/zoo/zoo.md $(ARGS)

test-versions:  ## Test with other versions of torch and Python: make test-versions PAIRS="2.6.0:3.11"
	PAIRS="$(PAIRS)" $(PYTHON) tests/versions $(ARGS)

lint: .venv/ready-dev  ## Check style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

dist: .venv/ready-dev  ## Build the sdist and the wheel; WEIGHIN_REPOSITORY=URL names the repository in them
	rm -rf dist
	$(BIN)/hatchling build -d dist

fuzz: .venv/ready-dev  ## Feed mutated checkpoints to the readers for SECONDS=60
	$(BIN)/pip install --constraint constraints.txt --editable '.[fuzz]'
	mkdir -p tests/fuzz/findings
	PYTHONPATH=. $(BIN)/python tests/fuzz/fuzz_readers.py .fuzz-corpus \
	  -max_total_time=$(SECONDS) -artifact_prefix=tests/fuzz/findings/

clean:  ## Remove all environments, and the caches of tools in this folder
	rm -rf .venv .venv-zoo .venv-versions build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .fuzz-corpus
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Made again when its inputs change, with pip's settings and its output. A mark is written last: a
# half-made environment has none. The first one removes .venv, and so the second one's mark.
.venv/ready: pyproject.toml constraints.txt harness/set_up.py
	@$(PYTHON) harness/set_up.py
	@touch $@

.venv/ready-dev: .venv/ready
	@$(PYTHON) harness/set_up.py --dev
	@touch $@

# transformers imports torchvision if it is there, and its build may not fit torch's: it is no part of .venv.
# timm needs it. This environment has the two packages, and all of .venv's.
.venv-zoo/ready: .venv/ready-dev tests/zoo/environment.py
	$(BIN)/python tests/zoo/environment.py
	$(BIN)/pip --python .venv-zoo/bin/python install --no-deps --constraint constraints.txt torchvision timm
	@touch $@

.PHONY: $(TARGETS)
