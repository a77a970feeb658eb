PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo up test lint bench mutants chaos

demo: .venv/installed
	$(BIN)/penstock demo

up: .venv/installed
	$(BIN)/penstock up

test: .venv/installed
	$(BIN)/pytest -n 2 --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Each defence taken out in a copy of the tree, and a test seen to fail for it.
mutants: .venv/installed
	$(BIN)/python tests/faults/mutants.py --only "$(ONLY)" --jobs $(or $(JOBS),1) $(if $(CHECK),--check)

# Random schedules of faults on whole systems of real processes; prints seeds that reproduce.
chaos: .venv/installed
	PYTHONPATH=tests:. $(BIN)/python -m faults.chaos --seed $(or $(SEED),1) --schedules $(or $(SCHEDULES),20) \
	  --lanes $(or $(LANES),2) --lease-ms $(or $(LEASE_MS),1500)

bench: .venv/installed
	$(BIN)/penstock bench

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer; say which one: make PYTHON=python3.11")'
	@echo "Installing into .venv (the first time takes a minute or two)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[worker]' --group dev
	@touch $@
