# The commands of this project. A fresh machine needs Python 3.11 or newer and make, nothing else.

PYTHON ?= python3
# Seconds the demo runs; empty: until Ctrl-C.
SECONDS ?=
# Broker of the demo: tansu, or kafka where java and mvn are installed.
BROKER ?= tansu
# Processes the tests are spread over.
WORKERS ?= 2
# More arguments for pytest.
PYTEST ?=
# What is measured, and options: make bench BENCH="drain latency --quick"; empty: everything.
BENCH ?=
# A second PostgreSQL the tests of the database run on where it is installed: another major version.
OTHER_POSTGRES ?= $(wildcard /usr/lib/postgresql/15/bin)

VENV := .venv
BIN := $(VENV)/bin
RUFF := $(BIN)/ruff

.PHONY: bench ci clean constraints demo lint test
.NOTPARALLEL:

# Runs the whole path on this machine, from orders to a consumer that checks: make demo [SECONDS=20]
demo: $(VENV)/demo.stamp
	@$(BIN)/python -m outbox_tasks.demo $(if $(SECONDS),--seconds $(SECONDS)) --broker $(BROKER)

# Tests on embedded PostgreSQL, Redis and Tansu, and on Apache Kafka where java and mvn are installed.
test: $(VENV)/test.stamp
	$(BIN)/pytest -n $(WORKERS) $(PYTEST)

lint: $(VENV)/test.stamp
	$(RUFF) check .
	$(RUFF) format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What .ci/run runs.
ci: lint
	TEST_REQUIRE_KAFKA=1 $(MAKE) test PYTEST="--cov --cov-report=term:skip-covered"
ifneq ($(OTHER_POSTGRES),)
	TEST_POSTGRES_BIN=$(OTHER_POSTGRES) $(MAKE) test PYTEST="-k 'not kafka' tests/integration"
endif
	$(MAKE) demo SECONDS=10

# Measures on fresh servers, against bare producers and naive relays, in one run; needs java and mvn. See
# docs/performance.md: make bench [BENCH="drain latency idle append decay --quick --pictures DIR"]
bench: $(VENV)/bench.stamp
	$(BIN)/python -m bench $(BENCH)

clean:
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.*
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Renews constraints.txt with the newest versions that pyproject.toml allows.
constraints:
	rm -rf $(VENV)/renewed
	$(PYTHON) -m venv $(VENV)/renewed
	$(VENV)/renewed/bin/pip install --quiet --editable '.[bench]'
	grep '^#' constraints.txt > $(VENV)/renewed/constraints.txt
	$(VENV)/renewed/bin/pip freeze --exclude-editable >> $(VENV)/renewed/constraints.txt
	mv $(VENV)/renewed/constraints.txt constraints.txt
	rm -rf $(VENV)/renewed

# The stamps stand for what is installed: nothing is installed again until one of these files changes.
$(VENV)/made.stamp:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[demo]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $(VENV)/demo.stamp $@

$(VENV)/bench.stamp: $(VENV)/made.stamp pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	@touch $(VENV)/demo.stamp $(VENV)/test.stamp $@
