# `make demo` and `make test` do all their own set-up; they need Linux, Python 3.11 and gcc.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# SGLang wants its own torch and 11 GB, so it has an environment of its own, shared by all clones with the same
# requirements. EAGLEHS_CACHE moves it; EAGLEHS_SGLANG_PYTHON names one that you already have.
CACHE            ?= $(or $(EAGLEHS_CACHE),$(HOME)/.cache/eaglehs)
# VERSION of `make test-sglang` and `make test-hub`: from the command line alone, many environments have one of their own.
ASKED            := $(if $(findstring command,$(origin VERSION)),$(VERSION))
SGLANG_NEWEST    := 0.5.23
SGLANG_VERSION   := $(or $(ASKED),$(SGLANG_NEWEST))
# The newest one's pins are sglang.txt. A version without pins of its own is installed as pip resolves it.
SGLANG_PINS      := $(if $(filter $(SGLANG_NEWEST),$(SGLANG_VERSION)),constraints/sglang.txt,$(wildcard constraints/sglang-$(SGLANG_VERSION).txt))
SGLANG_HASH      := $(shell cat $(or $(SGLANG_PINS),/dev/null) | sha256sum | cut -c1-12)
SGLANG_VENV      := $(CACHE)/sglang-$(SGLANG_VERSION)-$(SGLANG_HASH)
SGLANG_GIVEN     := $(if $(ASKED),,$(EAGLEHS_SGLANG_PYTHON))
SGLANG_PYTHON    := $(or $(SGLANG_GIVEN),$(SGLANG_VENV)/bin/python)

# Two processes, spread as tests/conftest.py says; one thread each for torch, which on few cores is far quicker.
SIDE_BY_SIDE     := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.PHONY: help demo test test-fast test-hub test-kills test-sglang lint bench goldens clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       the whole path on a tiny Kimi-shaped model, on the CPU: about a minute after set-up"
	@echo "make test       lint and all tests, real SGLang on the CPU included (first time: 11 GB, 5 minutes)"
	@echo "make test-fast  lint and all tests that need no SGLang"
	@echo "make test-sglang VERSION=0.5.16   the tests of real SGLang, on the CPU, with that version of it"
	@echo "make test-kills the whole kill matrix on real SGLang, its report printed: about an hour"
	@echo "make test-hub   the tests of publishing and streaming on another huggingface_hub: VERSION=1.31.0"
	@echo "make lint       ruff, mypy and the house rules"
	@echo "make bench      the figures that README quotes"

demo: $(VENV)/.ok
	$(BIN)/eaglehs demo

test: lint $(SGLANG_VENV)/.ok
	EAGLEHS_SGLANG_PYTHON=$(SGLANG_PYTHON) $(SIDE_BY_SIDE) -m "not gpu and not kills"

test-fast: lint
	$(SIDE_BY_SIDE) -m "not sglang and not gpu and not kills"

test-sglang: $(VENV)/.ok $(SGLANG_VENV)/.ok
	EAGLEHS_SGLANG_PYTHON=$(SGLANG_PYTHON) $(BIN)/pytest -m "sglang and not gpu and not kills"

test-kills: $(VENV)/.ok $(SGLANG_VENV)/.ok
	EAGLEHS_SGLANG_PYTHON=$(SGLANG_PYTHON) $(BIN)/pytest -s -m kills tests/kills

# Another version of the Hub's client is laid over the environment, not into it: `make test-hub VERSION=1.31.0`.
HUB_VERSION := $(or $(ASKED),1.31.0)
HUB_OVER    := $(CACHE)/huggingface_hub-$(HUB_VERSION)
HUB_TESTS   := tests/builder/test_publish.py tests/builder/test_publish_faults.py tests/builder/test_hub_errors.py \
               tests/builder/test_remote_check.py tests/builder/test_stream_hub.py tests/cards/test_usage.py \
               tests/eaglehs/commands/test_push.py tests/eaglehs/test_push_stream.py tests/eaglehs/test_hub_refusals.py \
               tests/eaglehs/test_extract_pack.py::test_a_killed_push_goes_on_with_nothing_computed_or_sent_twice

test-hub: $(VENV)/.ok
	@test -d $(HUB_OVER)/huggingface_hub || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(HUB_OVER) huggingface_hub==$(HUB_VERSION)
	@PYTHONPATH=$(abspath $(HUB_OVER)) $(BIN)/python -c "import huggingface_hub as h; assert h.__version__ == '$(HUB_VERSION)'"
	PYTHONPATH=$(abspath $(HUB_OVER)) OMP_NUM_THREADS=1 $(BIN)/pytest $(HUB_TESTS)

lint: $(VENV)/.ok
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@# mypy reads no package-dir map: show it the package as it is installed.
	@mkdir -p build/typed/eaglehs
	@for f in eaglehs/* ; do ln -sfn ../../../$$f build/typed/$$f; done
	@for f in schemas extraction builder cards; do ln -sfn ../../../$$f build/typed/eaglehs/$$f; done
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p eaglehs

# With SGLang where it is there already; it is not fetched for the figure of capture alone.
bench: $(VENV)/.bench
	$(if $(or $(SGLANG_GIVEN),$(wildcard $(SGLANG_VENV)/.ok)),EAGLEHS_SGLANG_PYTHON=$(SGLANG_PYTHON)) $(BIN)/python -m bench

goldens: $(VENV)/.ok
	$(BIN)/python -m tests.golden.remake

$(VENV)/.ok: pyproject.toml constraints/light.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/light.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/light.txt -e '.[train,plots,dev]'
	touch $@

# The peers' requirements contradict ours, so pip must not look at them (constraints/bench.txt).
$(VENV)/.bench: $(VENV)/.ok constraints/bench.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints/bench.txt
	touch $@

# A half-made environment must never look whole, so the mark comes last; a lock keeps two clones from making it at once.
$(SGLANG_VENV)/.ok: $(SGLANG_PINS)
	@test -n "$(SGLANG_GIVEN)" || { mkdir -p $(SGLANG_VENV) && flock $(SGLANG_VENV).lock sh -ec '\
	  test -e $@ && exit 0; echo "Making the SGLang environment in $(SGLANG_VENV) (about 5 minutes, 11 GB)"; \
	  $(PYTHON) -m venv $(SGLANG_VENV); \
	  $(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(addprefix -c ,$(SGLANG_PINS)) sglang==$(SGLANG_VERSION); \
	  touch $@'; }

clean:
	rm -rf $(VENV) build dist *.egg-info demo run dataset
