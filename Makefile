# Every command sets up .venv first (nothing to do the second time) and needs no step by hand.
SHELL := /bin/sh
PYTHON_BIN := $(CURDIR)/.venv/bin
export PATH := $(PYTHON_BIN):$(PATH)
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := 1
# without bytecode every stage spends three times as long on its imports
unexport PYTHONDONTWRITEBYTECODE

PORT ?= 5000
REJECTED ?= gptq-short
JOBS ?= auto

.PHONY: help demo setup plan repro repro-rejected ui test certify lint clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

demo:  ## a first verdict on shipped records, in an environment of six packages (.venv-demo); writes demo.html
	@scripts/demo.sh

setup:  ## make .venv (uv where present, pip otherwise)
	@scripts/setup.sh
	@install -m 755 scripts/quantgate "$(PYTHON_BIN)/quantgate"

plan: setup  ## check all that a run needs, and say what the gate's suites can prove and what a run will cost
	@python scripts/plan.py

repro: setup  ## run what is out of date, to the verdict; fails when the gate fails; JOBS=4: four candidates at once
	@python -m scripts.check_settings
	python -m pipeline repro --jobs $(JOBS)

repro-rejected: setup  ## show a failing gate: REJECTED=<candidate> is released in a temporary copy
	python scripts/repro_rejected.py $(REJECTED)

ui: setup  ## open MLflow on the runs; PORT=5000
	@test -f mlflow.db || python -m dvc repro --single-item --force track
	@echo "MLflow at http://127.0.0.1:$(PORT), once it says that startup is complete:"
	-@python -m scripts.show_pages http://127.0.0.1:$(PORT)
	python -m mlflow ui --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port $(PORT) --workers 1

test: setup  ## run the tests, two files at a time
	python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

certify: setup  ## plant defects in copies of a finished project, none of which may pass: the kill table
	python -m benchmarks.certify

lint: setup  ## ruff (rules and layout) and mypy
	python -m ruff check .
	python -m ruff format --check .
	python -m mypy pipeline stages tests examples

clean:  ## remove the environment, caches and everything the pipeline made
	rm -rf .venv .venv-demo demo.html build mlflow.db mlartifacts mlruns .dvc/cache .dvc/tmp .pytest_cache .hypothesis .mypy_cache .ruff_cache
