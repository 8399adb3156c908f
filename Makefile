# Set-up, build, tests and demo, each in one command on a machine with Python, a C++ compiler and make.
#
#   make demo                      train a small GPT on all ranks of this machine
#   make test                      run the tests of each change, one more at a time than cores; on
#                                  two cores 15 to 40 minutes
#   make nightly                   run all: more stages, seeds and trainers than `make test`, then
#                                  `make speed` beside the last commit that was measured
#   make speed BASE=<commit>       compare the speed of this checkout with that of a commit, in ten
#                                  minutes; ARGS=--quick: two rows in three
#   make torch TORCH=2.15.0        run the tests of what depends on torch with that release of it,
#                                  in a clone of the last commit: build/torch-2.15.0
#   make docs                      build the documentation's site in build/site
#   make test ARGS="tests/plan"    run some of them: ARGS go to pytest
#   PYTHON=/path/to/python make test   where that Python has a suitable torch, use it
#
# Everything is installed in .venv (scripts/setup_env.py says what); after `make distclean`,
# another PYTHON takes effect.

PYTHON ?= python3
VENV := $(CURDIR)/.venv
PY := $(VENV)/bin/python
CXX ?= g++
# The tests of a file stay together, because they share what the first of them measures. Files begin
# in the order of collection, which has the slow ones first.
# Without a GPU, tests/gpu is rehearsed on the CPU.
ALL_TESTS := -n logical --dist loadfile --no-loadscope-reorder --rehearse
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
TEST_CXX_FILES = $(shell find tests -name '*.h' -o -name '*.cpp')

# ninja, cmake and clang-format may be installed in .venv or come with $(PYTHON).
export PATH := $(VENV)/bin:$(PATH):$(shell $(PYTHON) -c 'import sys; print(sys.prefix)')/bin

.PHONY: demo test nightly speed torch build docs lint format sanitize tsan clean distclean

demo: $(VENV)/.built $(VENV)/.has-demo
	@echo "training on all ranks of this machine: some 40 seconds on two cores"
	$(PY) examples/train_gpt.py $(ARGS)

# Each of many processes would else compile the tests and zerocore anew, where that variable is set.
test: $(VENV)/.built $(VENV)/.has-test
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest $(or $(ARGS),$(ALL_TESTS))

nightly: $(VENV)/.built $(VENV)/.has-test $(VENV)/.has-demo
	PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -m "" $(or $(ARGS),$(ALL_TESTS))
	$(if $(ARGS),,$(if $(wildcard benchmarks/results/speed.md),$(PY) benchmarks/speed.py))

# Status 1: a row is slower; 2: BASE cannot be compared.
speed: $(VENV)/.built $(VENV)/.has-demo
	$(PY) benchmarks/speed.py $(ARGS) -- $(BASE)

# Functions and hooks that zerocore replaces, FSDP2, DTensors, files: one set of parameters of each.
TORCH_TESTS = hooks checkpoint fsdp sharding tensor repository/test_python_tree.py
torch: OTHER = $(CURDIR)/build/torch-$(TORCH)
torch:
	test -d $(OTHER) || git clone --quiet . $(OTHER)
	git -C $(OTHER) fetch --quiet origin HEAD && git -C $(OTHER) checkout --quiet FETCH_HEAD
	$(PYTHON) -m venv $(OTHER)/build/python
	$(OTHER)/build/python/bin/python -m pip install torch==$(TORCH)
	$(MAKE) -C $(OTHER) test PYTHON=$(OTHER)/build/python/bin/python \
	  ARGS="$(or $(ARGS),--one-each $(addprefix tests/,$(TORCH_TESTS)))"

build: $(VENV)/.built

# The site in build/site, with warnings as errors.
docs: $(VENV)/.built $(VENV)/.has-docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

lint: $(VENV)/.has-lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	clang-format --dry-run -Werror $(CXX_FILES) $(TEST_CXX_FILES)

format: $(VENV)/.has-lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	clang-format -i $(CXX_FILES) $(TEST_CXX_FILES)

# The tests that exercise the C++ most, under AddressSanitizer and UndefinedBehaviorSanitizer.
# Run from the folder of the sanitized package, so that `import zerocore` finds that one. Python
# itself is not sanitized, hence the preload; its own allocations at exit are no leaks of ours. An
# allocation that cannot be is an error for the caller, as a test of the pool expects. Left out are
# a limit of memory, which the sanitizer's own exceeds, and nvcc, which crashes beside a sanitizer.
sanitize: SANITIZED = -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
sanitize: $(VENV)/.has-test $(VENV)/.has-cpp
	cmake -S . -B build/sanitize -G Ninja -DZEROCORE_SANITIZE=ON -DPython_EXECUTABLE=$(PY)
	cmake --build build/sanitize
	TEST_CXX_FLAGS="$(SANITIZED)" $(PY) -c \
	  "from tests.bindings._C_testing import EXTENSION; EXTENSION.compile()"
	cd build/sanitize/python && \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	TEST_CXX_FLAGS="$(SANITIZED)" \
	PYTHONPATH=$(CURDIR) $(PY) -m pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) \
	  $(addprefix $(CURDIR)/tests/,io plan kernels device memory emulation \
	    engine/test_engine.py engine/test_hand_overs.py engine/test_hand_overs_of_offload.py) \
	  --ignore=$(CURDIR)/tests/kernels/test_ptx.py \
	  --deselect=tests/memory/test_host_memory.py::test_a_limit_is_an_error $(ARGS)

# Two ranks on the test device of tests/async_device, under ThreadSanitizer: it sees the code of
# zerocore and of the device, and of torch its locks only. Address layouts that it cannot map are
# switched off (setarch -R). What it cannot see of torch is in tests/async_device/tsan.txt, with the
# reason; it reports nothing else, so a report is to be read.
tsan: $(VENV)/.has-test $(VENV)/.has-cpp
	cmake -S . -B build/tsan -G Ninja -DZEROCORE_SANITIZE=thread -DPython_EXECUTABLE=$(PY)
	cmake --build build/tsan
	TEST_CXX_FLAGS="-fsanitize=thread -g1" $(PY) -c \
	  "from tests.async_device.device import EXTENSION; EXTENSION.compile()"
	cd build/tsan/python && TEST_CXX_FLAGS="-fsanitize=thread -g1" \
	TSAN_OPTIONS=suppressions=$(CURDIR)/tests/async_device/tsan.txt:exitcode=66 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	PYTHONPATH=.:$(CURDIR) setarch -R $(PY) -m tests.async_device.under_tsan

clean:
	rm -rf build dist *.egg-info zerocore/_C*.so $(VENV)/.built
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV)

$(VENV)/.created:
	@echo "installing torch, unless $(PYTHON) has one: a minute or two, as the network goes"
	$(PYTHON) scripts/setup_env.py create $(VENV)
	touch $@

# --no-build-isolation: compile against the torch that will be imported. ninja compiles again
# only what changed.
$(VENV)/.built: $(VENV)/.created setup.py pyproject.toml csrc/sources.txt $(CXX_FILES)
	@echo "compiling the C++ core: about two minutes on two cores, then only what changes"
	$(PY) -m pip install --no-build-isolation --no-deps -e .
	touch $@

$(VENV)/.has-%: pyproject.toml scripts/setup_env.py | $(VENV)/.built
	@echo "installing what '$*' needs and is missing: some seconds"
	$(PY) scripts/setup_env.py install $*
	touch $@
