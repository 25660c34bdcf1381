# The one door: every command that a developer, a reader or CI runs.
# Variables: PYTHON= (another interpreter), VLLM= (another release of vLLM), MODES=, NAME=, DURATION=, SEED=, JOBS=

WORKERS = 2
BIN := .venv/bin
PYTEST := $(BIN)/pytest
C_FILES = $(wildcard csrc/*.[ch] tests/c/*.[ch] tests/doubles/*.[ch])
BENCHMARKS = $(patsubst benchmarks/bench_%.py,%,$(wildcard benchmarks/bench_*.py))

# Where bytecode may not be written, each process compiles what it imports again: torch for 2 s, vLLM for
# 10 s of a core. Then .venv keeps it, and no folder of the sources.
ifdef PYTHONDONTWRITEBYTECODE
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX ?= $(CURDIR)/.venv/pycache
endif

.DEFAULT_GOAL := help
.PHONY: help setup nixl demo test test-options test-c tsan asan attack chaos soak restarts changes weights stalls backlog model mutants scale fuzz fuzz-c bench bench-check plots test-vllm test-ray test-upstream test-gpu bench-gpu gpu-wheels check fix screenshots coverage docs wheels deploy check-deploy clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with everything; quick when it is up to date
	@scripts/setup.sh

demo: setup  ## real vLLM, one prefill and one decode instance, token for token (MODES=all)
	@$(BIN)/p2p-engine demo $(if $(MODES),--modes $(MODES))

test: setup test-c tsan asan  ## all tests but the longest with real vLLM (test-vllm); about 17 minutes on two cores
	$(PYTEST) tests/unit tests/property tests/contract tests/integration tests/vllm \
		-m "not vllm" --durations=20 --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 0

nixl: setup  ## install NIXL, so that the tests of its transport are not skipped
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps nixl==1.5.1 nixl-cu13==1.5.1

scale: setup  ## stand-ins come and go at random under load for DURATION= seconds (600)
	$(BIN)/python -m tests.scale.run $(if $(DURATION),--seconds $(DURATION))

test-c: setup  ## the C tests under AddressSanitizer and UBSan
	tests/c/run.sh

attack: setup  ## attacks on a real proxy, beside a healthy load; NAME= part of a name, SCALE= share of the full numbers (1)
	@scripts/get_fronts.sh "$(CURDIR)/build/fronts" || echo "nginx and HAProxy cannot be had; what needs them is skipped"
	$(BIN)/python -m tests.attack.run $(if $(NAME),--name "$(NAME)") $(if $(SCALE),--scale $(SCALE))

chaos: setup  ## the fault campaign: DURATION= seconds, SEED=, JOBS= rounds in parallel, ONLY= such ones; continues where it stopped
	$(BIN)/python -m tests.chaos.campaign --seconds $(or $(DURATION),60) --seed $(or $(SEED),1) \
		--jobs $(or $(JOBS),4) $(if $(ONLY),--only "$(ONLY)") --record build/chaos$(if $(ONLY),-some).jsonl

soak: setup  ## two processes under load for DURATION= seconds (1200), beside LINKS= peers (0); reports what each process uses
	$(BIN)/python -m tests.chaos.soak $(if $(DURATION),--seconds $(DURATION)) $(if $(LINKS),--links $(LINKS)) \
		--output benchmarks/results/soak.jsonl

restarts: setup  ## real vLLM instances restart under load: TURNS= restarts (20), from FIRST= (0) on
	$(BIN)/python -m tests.vllm.restarts $(if $(TURNS),--turns $(TURNS)) $(if $(FIRST),--first $(FIRST))

changes: setup  ## a fleet of real vLLM changes under load, beside the protocol's version before; records what it saw
	P2P_CHANGES_OUTPUT=benchmarks/results/changes.jsonl $(PYTEST) tests/vllm/test_changes.py

weights: setup  ## real vLLM's weights are swapped under load by one order, which one instance fails; records what it saw
	P2P_WEIGHTS_OUTPUT=benchmarks/results/weights.jsonl $(PYTEST) tests/vllm/test_weights_update.py

stalls: setup  ## real vLLM's first loads on busy cores, TURNS= times (50) beside BUSY= processes (16), ANSWERS= each (24)
	$(BIN)/python -m tests.vllm.stalls $(if $(TURNS),--turns $(TURNS)) $(if $(BUSY),--busy $(BUSY)) \
		$(if $(ANSWERS),--answers $(ANSWERS)) $(if $(SECONDS),--seconds $(SECONDS))

backlog: setup  ## real vLLM: requests queue on a decode instance for SECONDS= (300), and none may fail
	$(if $(SECONDS),P2P_BACKLOG_SECONDS=$(SECONDS)) $(PYTEST) tests/vllm/test_backlog.py

model: setup  ## every state of KEYS= transfers, or (TURNS=1) of a session's turns, with FAULTS= faults (and RENEWALS=1), or (CORE=1) of docs/core.md: more than half an hour
	$(BIN)/python -m $(if $(CORE),tests.property.core_model.runs --name "$(NAME)",tests.property.protocol_model \
		--keys $(or $(KEYS),2) --faults $(or $(FAULTS),1) --renewals $(or $(RENEWALS),0) $(if $(TURNS),--turns))

mutants: setup  ## COUNT= mutants (50) in SEED='s order (1): which do the tests kill? NAME= folders or files, TESTS= of those only; goes on where it stopped
	$(BIN)/python -m tests.mutants.campaign $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED)) \
		$(if $(NAME),--packages $(NAME)) $(if $(TESTS),--tests $(TESTS))

tsan: setup  ## the C tests of everything with threads under ThreadSanitizer
	P2P_SANITIZER=thread tests/c/run.sh test_arena test_channel test_crc32c test_lanes test_mover test_regions

fuzz-c:  ## libFuzzer over the frames of a data connection for DURATION= seconds (60); needs clang
	tests/c/fuzz.sh $(DURATION)

asan: setup  ## the Python tests of the C extension under AddressSanitizer and UBSan
	tests/c/asan.sh

fuzz: setup  ## COUNT= frames (a million) of SEED= into every socket of an engine and a proxy
	$(BIN)/python -m tests.fuzz.campaign $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

bench: setup  ## one benchmark: NAME=transfer, and without NAME= a list; ROUNDS= repetitions
	@test -f benchmarks/bench_$(NAME).py || { echo "NAME= is one of: $(BENCHMARKS)"; exit 2; }
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirements pyproject.toml --extra bench
	$(BIN)/python -m benchmarks.bench_$(NAME) $(if $(ROUNDS),--repetitions $(ROUNDS))

bench-check: setup  ## are we slower? ratios of the quick benchmarks beside those in benchmarks/results
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirements pyproject.toml --extra bench
	$(BIN)/python -m benchmarks.check

plots: setup  ## the pictures of benchmarks/pages, from benchmarks/results
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirements pyproject.toml --extra bench
	$(BIN)/python -m benchmarks.plots

test-vllm: setup  ## every test with real vLLM; with VLLM=0.29.0, a comparison on that release
	$(if $(VLLM),$(BIN)/python -m tests.compat.matrix $(VLLM),$(PYTEST) tests/vllm)

test-options: setup  ## real vLLM: each option on one side of a pair, for SECONDS= (21600); ONLY= names; goes on where it stopped
	$(BIN)/python -m tests.options.campaign $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only '$(ONLY)')

test-ray: setup  ## our backend with Ray Serve LLM, in an environment of its own
	$(BIN)/python -m tests.ray_serve.run

test-upstream: setup  ## vLLM's own connector tests, run against ours (VLLM=0.33.0)
	$(BIN)/python -m tests.upstream.run $(if $(VLLM),--vllm $(VLLM))

test-gpu:  ## what a GPU has to show, or PART= of it, into OUT=; GPU_PYTHON= an interpreter with torch for CUDA, no network
	@OUT="$(OUT)" scripts/gpu.sh test $(PART)

bench-gpu:  ## rates, latencies and memory on a GPU, or PART= of them, each with its limit
	@scripts/gpu.sh bench $(PART)

gpu-wheels: setup  ## fetch packages for a GPU machine without a network, into build/gpu-wheels
	@scripts/gpu.sh wheels

check: setup  ## ruff, mypy, import contracts, oldest Python, C format, shell, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vermin --quiet --no-tips --target=3.10- --violations mempool p2p_engine proxy
	$(BIN)/python scripts/c_layers.py
	$(BIN)/python scripts/structure.py
	$(if $(C_FILES),$(BIN)/clang-format --dry-run -Werror $(C_FILES))
	$(BIN)/shellcheck scripts/*.sh .ci/run $(wildcard tests/c/*.sh)
	$(BIN)/codespell

fix: setup  ## format everything and apply the linters' fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(C_FILES),$(BIN)/clang-format -i $(C_FILES))

screenshots: setup  ## pictures of the status page for docs/; needs Chromium
	$(BIN)/python -m tests.page.screenshots

coverage: setup  ## coverage of lines and branches by the quick tests
	$(BIN)/coverage run -m pytest tests/unit tests/property tests/contract -m "not vllm"
	$(BIN)/coverage report

docs: setup  ## a site of all pages in build/docs; a broken link or any warning fails it
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirements pyproject.toml --extra docs
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --nitpicky -c docs . build/docs

wheels: setup  ## wheels for x86-64 and aarch64 in dist/, tried in clean environments on every Python that is here
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirements pyproject.toml --extra wheels
	scripts/wheels.sh
	$(BIN)/python -m tests.installed.run

deploy: setup  ## render the chart's plain manifests into deploy/kubernetes
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirements pyproject.toml --extra deploy
	$(BIN)/python scripts/deploy.py render

check-deploy: setup  ## hold deploy/ against the schemas of what reads it; says what could not be checked here
	$(BIN)/uv pip install --quiet --python $(BIN)/python --requirements pyproject.toml --extra deploy
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/deploy.py check

clean:  ## remove the environment and everything built
	rm -rf .venv build dist *.egg-info mempool/*.so .coverage .*_cache
