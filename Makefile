# Two commands do everything on a fresh machine with Python >= 3.11 and make:
#   make demo    install into .venv and watch a small language model learn, through the whole system
#   make test    install into .venv and run every test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test unit coverage check format install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "coati needs Python >= 3.11, but $(PYTHON) is %d.%d. Try: make PYTHON=python3.11" % v[:2])'
	@echo "coati: installing into $(VENV) (once; about two minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/coati demo

# Two at a time: tests over Ray spend much of their time waiting for processes to start. The ones named here run with
# the unit and end-to-end tests, so that both halves take about as long.
BESIDE := $(addprefix tests/ray/test_,cluster.py learner_ranks.py placement.py strategies_one_rank.py \
	strategies_ranks.py weight_stress.py)

test: $(STAMP)
	@mkdir -p build
	@echo "coati: two halves of the tests run side by side; the output of the second follows that of the first"
	@$(BIN)/python -m pytest tests/ray tests/gpu $(addprefix --ignore=,$(BESIDE)) > build/tests-ray.log 2>&1 & beside=$$!; \
	$(BIN)/python -m pytest tests/unit tests/e2e $(BESIDE); first=$$?; \
	wait $$beside; second=$$?; \
	cat build/tests-ray.log; \
	[ $$first -eq 0 ] && [ $$second -eq 0 ]

unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit

coverage: $(STAMP)
	$(BIN)/python -m pytest tests/unit -q --cov=coati.algos --cov=coati.experience_maker --cov=coati.experience_buffer \
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
