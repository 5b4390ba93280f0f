# make demo | make test do everything on a fresh Debian or Ubuntu machine; each step is skipped when done.
#
# TORCH names the torch to install and TORCH_PIP adds pip arguments (an index of CUDA builds, say):
#   make setup TORCH=torch==2.13.0 TORCH_PIP="--index-url URL"
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
# An environment that keeps Python from storing what it compiles (images of containers often do) has each of the
# processes here compile torch again.
unexport PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX

TORCH ?= torch==2.13.0
TORCH_PIP ?=
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
APT_PACKAGES := g++ libasio-dev libxxhash-dev doctest-dev librocksdb-dev libssl-dev python3-venv python3-dev
# For tests that are skipped without: hosts of their own (tests/e2e/test_several_hosts.py), packets that get lost between
# them, several coordinators (tests/faults/test_etcd.py), the check of locks in lint, and pages in a browser.
APT_TEST_PACKAGES := iproute2 nftables etcd-server clang chromium chromium-driver
# Modules are compiled when they are first imported, since most of those that come are never imported. COMPILE_USED and
# COMPILE_OWN do so with those that all processes of a job import at once.
COMPILE_USED := $(PY) -c "import torch._dynamo"
COMPILE_OWN := { $(PY) -m sparserow.deploy.cli --help && $(PY) -c "import sparserow.worker"; } > /dev/null
PIP := $(PY) -m pip install -q --disable-pip-version-check --no-compile
GPU_VENV := build/gpu-venv
GPU_PIP := $(GPU_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-compile
# The part of the native core that needs no Python is compiled while packages come. Building the native core goes on
# from there, and tells what is wrong with it.
START_CORE = { PATH="$(CURDIR)/$(VENV)/bin:$$PATH"; \
	cmake -S cpp_ext -B build/release -G Ninja -DCMAKE_BUILD_TYPE=Release -DSPARSEROW_PYTHON=OFF \
	-DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(VENV)/bin/ninja" && cmake --build build/release --parallel --target sparserow_core; } \
	> build/core.log 2>&1 || true
NATIVE_SOURCES := $(shell find cpp_ext -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt) $(wildcard proto/*.proto) setup.py pyproject.toml
PYTEST := $(PY) -m pytest --rootdir tests -c tests/pytest.ini
CPP_FILES = $(shell git ls-files -co --exclude-standard 'cpp_ext/*.cc' 'cpp_ext/*.h' 'tests/cpp/*.cc' 'tests/cpp/*.h' 'tests/support/*.cc' 'deploy/*.cc')
CMAKE_TESTS = PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake -S cpp_ext -G Ninja -DSPARSEROW_PYTHON=OFF -DSPARSEROW_TESTS=ON -DCMAKE_BUILD_TYPE=RelWithDebInfo

.PHONY: packages setup demo pictures test check test-py test-cpp test-full test-gpu fixtures bench lint lint-locks format sanitize test-arm audit docs wheel release images lock clean
# The system packages, for who installs them before; tests want the last ones.
packages:
	@echo $(APT_PACKAGES) $(APT_TEST_PACKAGES)

# Everything that a developer needs; `make demo` leaves the packages of tests out.
setup: $(VENV)/.stamp-tests

build/.stamp-apt:
	@mkdir -p build
	@deploy/install_system_packages.sh $(APT_PACKAGES)
	@touch $@

build/.stamp-apt-tests: | build/.stamp-apt
	@test "$$(id -u)" -ne 0 || deploy/install_system_packages.sh $(APT_TEST_PACKAGES)
	@touch $@

# run.txt is complete, and test.txt has what it lacks, so pip resolves nothing but torch's.
$(VENV)/.stamp-python: requirements/run.txt | build/.stamp-apt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "sparserow: installing Python packages"
	@$(PIP) --no-deps -r $<
	@$(START_CORE) & code=0; { $(PIP) $(TORCH_PIP) "$(TORCH)" && $(COMPILE_USED); } || code=$$?; wait; exit $$code
	@touch $@

$(VENV)/.stamp-tests: requirements/test.txt | $(VENV)/.stamp-native
	@echo "sparserow: installing the Python packages of tests"
	@$(PIP) --no-deps -r $<
	@touch $@

$(VENV)/.stamp-native: $(VENV)/.stamp-python $(NATIVE_SOURCES)
	@echo "sparserow: building the native core"
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(COMPILE_OWN)
	@touch $@

demo: $(VENV)/.stamp-native
	@$(PY) -m sparserow.deploy.cli demo $(DEMO)

# Each part runs whatever the others end with; one that fails is named at once, and again at the end. lint keeps one core
# busy, and does not read what test-cpp writes. (Ninja would take a number of jobs for its own, hence MAKEFLAGS there.)
test: FAILED := build/failed
test: setup
	@rm -f $(FAILED); \
	part() { $(MAKE) --no-print-directory $$1 || { echo "sparserow: $$1 FAILED"; echo $$1 >> $(FAILED); }; }; \
	part lint & part test-cpp; wait; part test-py; \
	test ! -e $(FAILED) || { echo "sparserow: failed: $$(sort $(FAILED) | xargs)"; exit 1; }

# What a change needs before it is committed: lint, and the tests of the folders that it touches. BASE: since which commit.
check: setup
	@$(MAKE) --no-print-directory lint
	@$(PY) tests/support/changed_tests.py $(BASE)

# Three at a time, since many wait for processes; each file's tests stay together. One by one: ARGS="-n 0".
test-py: setup build/.stamp-apt-tests
	@$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder $(ARGS) tests

# C++ tests under the address and undefined-behaviour sanitizers; FUZZ_FRAMES of broken frames. CTEST chooses some.
test-cpp: FUZZ_FRAMES ?= 300000
test-cpp: setup
	@$(CMAKE_TESTS) -B build/asan "-DSPARSEROW_SANITIZE=address;undefined" > build/asan.log || { cat build/asan.log; exit 1; }
	@MAKEFLAGS= PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build build/asan --parallel
	@cd build/asan && SPARSEROW_FUZZ_FRAMES=$(FUZZ_FRAMES) $(CURDIR)/$(VENV)/bin/ctest --parallel 2 --output-on-failure $(CTEST)

# The same tests under the thread sanitizer.
sanitize: setup
	@$(CMAKE_TESTS) -B build/tsan -DSPARSEROW_SANITIZE=thread > /dev/null
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build build/tsan --parallel
	@cd build/tsan && TSAN_OPTIONS="halt_on_error=1 suppressions=$(CURDIR)/tests/cpp/tsan_suppressions.txt" $(CURDIR)/$(VENV)/bin/ctest --parallel 2 --output-on-failure

# The C++ tests for aarch64, without RocksDB: by Debian's cross compiler, with -O1 as for sanitizers, and run by qemu.
test-arm: FUZZ_FRAMES ?= 3000
test-arm: SYSROOT := $(CURDIR)/build/arm64-sysroot
test-arm: setup
	@test "$$(id -u)" -ne 0 || deploy/install_system_packages.sh g++-aarch64-linux-gnu qemu-user-static
	@test -e $(SYSROOT)/.stamp || tests/support/arm64_sysroot.sh $(SYSROOT)
	@$(CMAKE_TESTS) -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=aarch64.cmake -DSPARSEROW_SYSROOT=$(SYSROOT) \
	  -DSPARSEROW_ROCKSDB=OFF -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE=-O1 > build/aarch64.log || \
	  { cat build/aarch64.log; exit 1; }
	@MAKEFLAGS= PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build build/aarch64 --parallel
	@cd build/aarch64 && SPARSEROW_FUZZ_FRAMES=$(FUZZ_FRAMES) $(CURDIR)/$(VENV)/bin/ctest --output-on-failure $(CTEST)

# Everything, the long forms too (fuzzing of a million frames, three seeds of Adult), with programs that are started.
test-full: setup
	@$(MAKE) --no-print-directory test FUZZ_FRAMES=1000000 SPARSEROW_TEST_FULL=1

# tests/fixtures of this version anew; after its release they stay as they are (docs/versioning.md).
fixtures: setup
	@$(PY) tests/support/fixtures.py

# Every benchmark but the longest, three rounds; it goes on where it was interrupted.
bench: setup
	@$(PY) -m sparserow.deploy.cli bench all --json build/bench.json --plot build/bench.svg $(ARGS)

# The pictures of the documents: drawings, and the page of a cluster as a browser shows it.
pictures: setup build/.stamp-apt-tests
	@$(PY) -m sparserow.deploy.reference.pictures
	@$(PY) tests/support/page_pictures.py

# Tests of what runs on a GPU, in an environment of their own with a build of torch for CUDA; TORCH_PIP says where it is:
#   make test-gpu TORCH_PIP="--index-url URL"
# OFFLINE=1 installs nothing: PYTHON and the torch (2.11 or newer), triton and pytest that it has run what they can, and
# what is skipped is named. Without a GPU the kernels run under Triton's interpreter then.
ifdef OFFLINE
test-gpu:
	@$(PYTHON) tests/support/gpu_tests.py
else
test-gpu: $(GPU_VENV)/.stamp-native
	@$(GPU_VENV)/bin/python tests/support/gpu_tests.py --needs-cuda
endif

# The package is installed, not linked, as the libraries in the tree belong to the torch of $(VENV).
$(GPU_VENV)/.stamp-native: requirements/run.txt requirements/test.txt $(NATIVE_SOURCES) | build/.stamp-apt
	@test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	@echo "sparserow: installing Python packages for the GPU"
	@$(GPU_PIP) $(TORCH_PIP) "$(TORCH)"
	@$(GPU_VENV)/bin/python -c "import torch; assert torch.version.cuda" 2>/dev/null || \
	  { echo "test-gpu: torch was installed without CUDA; name where pip finds a build with CUDA: TORCH_PIP=..."; exit 1; }
	@$(GPU_PIP) --no-deps -r requirements/run.txt -r requirements/test.txt
	@$(GPU_PIP) --no-deps --no-build-isolation .
	@touch $@

# clang checks each file that has an annotated Mutex (cpp_ext/util/mutex.h), and those of its folder that include it; a
# header with its .cc.
LOCK_HEADERS = $(shell git grep -l --untracked '"util/mutex.h"' -- 'cpp_ext/*.h' 'cpp_ext/*.cc')
LOCK_USERS = $(foreach f,$(LOCK_HEADERS),$(shell git grep -l --untracked -F '"$(f:cpp_ext/%=%)"' -- '$(dir $(f))*.cc'))
LOCK_FILES = $(sort $(filter-out $(LOCK_USERS:.cc=.h),$(LOCK_HEADERS)) $(LOCK_USERS))
CHECK_LOCKS := clang++ -fsyntax-only -x c++ -std=c++20 -Icpp_ext -DASIO_STANDALONE -DASIO_NO_DEPRECATED \
	-DASIO_HAS_CO_AWAIT -Wno-pragma-once-outside-header -Wthread-safety -Werror=thread-safety
lint-locks: setup build/.stamp-apt-tests
	@if command -v clang++ > /dev/null; then printf '%s\n' $(LOCK_FILES) | xargs -P 2 -n 1 $(CHECK_LOCKS); \
	else echo "sparserow: the check of locks is skipped: clang is not installed"; fi

lint: setup lint-locks
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@mkdir -p build/lint && ln -sfn "$(CURDIR)" build/lint/sparserow
	@MYPYPATH=build/lint $(PY) -m mypy --config-file pyproject.toml -m sparserow $(foreach f,proto cpp_ext ps_server worker serving deploy,-p sparserow.$(f))

format: setup
	@$(VENV)/bin/ruff check --fix-only -q . && $(VENV)/bin/ruff format -q .
	@$(VENV)/bin/clang-format -i $(CPP_FILES)

# Known vulnerabilities of the installed Python packages, where an index of advisories can be reached.
audit: setup
	@test -x build/audit/bin/pip-audit || { $(PY) -m venv build/audit && \
	  build/audit/bin/pip install -q --disable-pip-version-check pip-audit; } || true
	@$(PY) tests/support/audit.py

# The documents as a site in build/site; a broken link or a parameter that no signature has fails it.
docs: setup
	@test -x build/docs/bin/mkdocs || $(PY) -m venv build/docs
	@build/docs/bin/pip install --quiet --no-deps -r requirements/docs.txt
	@mkdir -p build/lint && ln -sfn "$(CURDIR)" build/lint/sparserow
	@NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --quiet
	@echo "sparserow: build/site/index.html"

# dist/*.whl, with RocksDB, OpenSSL and the libraries that they need inside: it installs without a compiler and a system
# package. It is for this Python and this torch, and for those that are named: TORCHES="2.12 2.14" has pip find headers of
# torch, and PYTHONS="python3.12 python3.13" are interpreters with headers.
TORCHES ?=
PYTHONS ?=
wheel: setup
	@$(PY) -m sparserow.deploy.package.build_wheel --torches $(TORCHES) --pythons $(PYTHONS)

# A release of this checkout: its version, the section of the changelog, wheel, sdist, commit and tag. Publishes nothing.
release: setup
	@$(PY) -m sparserow.deploy.package.release "$(VERSION)" --torches $(TORCHES) --pythons $(PYTHONS)

# The images of deploy/Dockerfile: with docker, or as root without a daemon and a registry of images, in build/images.
# ARGS names some of them: server, worker, etcd.
images: setup
	@docker info > /dev/null 2>&1 || test "$$(id -u)" -ne 0 || deploy/install_system_packages.sh mmdebstrap buildah
	@$(PY) -m sparserow.deploy.package.build_images $(ARGS)

# requirements/*.txt anew, with the versions that they have where pyproject.toml allows these; ARGS="--upgrade" takes the
# newest. torch is in none, since TORCH names it; a build without CUDA is where TORCH_PIP="--index-url URL" says.
COMPILE = build/lock/bin/uv pip compile -q --custom-compile-command "make lock" --generate-hashes --no-annotate \
	--python-version 3.11 --python-platform x86_64-manylinux_2_35 --no-emit-package torch $(TORCH_PIP) $(ARGS) pyproject.toml
lock:
	@test -x build/lock/bin/uv || { $(PYTHON) -m venv build/lock && build/lock/bin/pip install -q --disable-pip-version-check uv; }
	@build/lock/bin/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')" > build/lock/build.in
	@$(COMPILE) build/lock/build.in -o requirements/run.txt
	@$(COMPILE) --all-extras --group test -c requirements/run.txt -o requirements/test.txt \
	  $$(sed -n 's/^\([a-z0-9.-]*\)==.*/--no-emit-package \1/p' requirements/run.txt)
	@$(COMPILE:pyproject.toml=) --group docs -o requirements/docs.txt

clean:
	@rm -rf build dist *.egg-info cpp_ext/*.so proto/*_pb2*.py proto/*_pb2.pyi $(VENV)
