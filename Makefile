# Every target sets up what it needs in .venv (or .venv-latest, .venv-oldest) and does nothing twice.
PYTHON ?= python3
BIN    := .venv/bin
LATEST := .venv-latest/bin
OLDEST := .venv-oldest/bin
READY  := .venv/.ready
NBTEST := OMP_NUM_THREADS=1 $(BIN)/nbdev_test
# Any of these changing means the environment must be set up again.
SETUP  := settings.ini setup.py pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-latest test-oldest coverage mutants docs bench bench-full ablations readme clean

help: ## Say what each target does
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(READY) ## From the embedded digits to a network and a report
	$(BIN)/kshot_search

test: $(READY) ## Run every notebook as a test, then what stands in tests/
	$(NBTEST)
	$(BIN)/python -m pytest

test-slow: $(READY) ## The same, with the cells and tests flagged slow
	$(NBTEST) --flags slow
	$(BIN)/python -m pytest -m 'slow or not slow'

test-latest: .venv-latest/.ready ## tests/ with the newest fastai and without nbdev
	$(LATEST)/python -m pytest

test-oldest: .venv-oldest/.ready ## tests/ with the oldest versions that settings.ini admits
	$(OLDEST)/python -m pytest

coverage: $(READY) ## Which lines of the package notebooks and tests run, in about half an hour
	$(BIN)/python tools/cover.py

mutants: $(READY) ## Put small faults into the package, one at a time, and list those that no notebook notices: hours
	OMP_NUM_THREADS=1 nice $(BIN)/python -W ignore tools/mutants.py

readme: $(READY) ## Write README.md from nbs/index.ipynb
	$(BIN)/python tools/readme.py

bench: $(READY) ## Measure what K-shot costs against one-shot, in about five minutes
	$(BIN)/python benchmarks/cost.py

bench-full: $(READY) ## The same with more repetitions, every K, and how cost grows: about an hour
	$(BIN)/python benchmarks/cost.py --full
	$(BIN)/python benchmarks/search_overhead.py

ablations: $(READY) ## Compare ways of sharing weights on the digits bench: about an hour
	$(BIN)/python benchmarks/ablations.py
	$(BIN)/python benchmarks/bench_search.py

docs: $(READY) ## Build the docs site in _docs, with Quarto where there is one, else with Sphinx
	$(BIN)/python tools/docs.py

clean: ## Remove the environments and everything that was built
	rm -rf .venv .venv-latest .venv-oldest _docs _proc build dist *.egg-info runs .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): $(SETUP)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

.venv-latest/.ready: $(SETUP)
	$(PYTHON) -m venv .venv-latest
	$(LATEST)/pip install --quiet --upgrade --upgrade-strategy eager --editable . accelerate pytest hypothesis pyflakes setuptools pyyaml
	touch $@

.venv-oldest/.ready: $(SETUP)
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST)/pip install --quiet accelerate==1.0 pytest hypothesis pyflakes 'setuptools==77.*' wheel pyyaml $$(sed -n 's/^requirements = //p' settings.ini | sed -E 's/>=([^ ,]+)(,[^ ]*)?/==\1/g')
	$(OLDEST)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
