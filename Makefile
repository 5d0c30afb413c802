# make demo   install into .venv, get the default model, print an answer
# make test   the quick test suite (its tools, torch among them, make .venv about 1.5 GB large)
# make check  lint, types and all tests
# make check-kernels   every kernel family of this processor against the portable one, without Python
# make check-neon      that, and the ARM kernels under qemu (g++-aarch64-linux-gnu, qemu-user-static)
# make clean  remove what these made (the models in the cache stay)

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-dev.lock
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
MODEL ?= smollm2-135m
PROMPT ?= Why is the sky blue?
SOURCES := pyproject.toml README.md $(wildcard CMakeLists.txt) $(shell find src csrc -type f -not -name '*.pyc')

.PHONY: demo test check check-kernels check-neon clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: $(VENV)/installed
	@$(BIN)/outpace pull $(MODEL)
	@$(BIN)/outpace generate --model $(MODEL) "$(PROMPT)"

test: $(VENV)/test-tools $(VENV)/installed
	@$(BIN)/python -m pytest -q -m "not slow"

check: $(VENV)/test-tools $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@$(BIN)/outpace pull $(MODEL)
	$(BIN)/python -m pytest -q

check-kernels: $(VENV)/build-tools
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check_kernels.sh

check-neon: $(VENV)/build-tools
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check_kernels.sh neon

# The build tools go into .venv, so that a changed source is rebuilt in place (build/) and nothing is fetched again.
$(VENV)/build-tools: $(LOCK) scripts/make_venv.sh
	@scripts/make_venv.sh $(VENV)
	@echo "fetching the build tools (cmake and others, 90 MB in .venv)"
	@$(PIP) install --constraint $(LOCK) scikit-build-core nanobind cmake ninja
	@touch $@

$(VENV)/test-tools: $(LOCK) $(VENV)/build-tools
	@echo "fetching the test tools (torch, transformers and others: .venv grows to about 1.5 GB; a minute or more)"
	@$(PIP) install --requirement $(LOCK)
	@touch $@

$(VENV)/installed: $(SOURCES) $(VENV)/build-tools
	@echo "building outpace and fetching its libraries (a minute or two, in silence)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --constraint $(LOCK) --no-build-isolation \
		--config-settings=build-dir=build/make .
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
