# Every target installs what it needs first. `make help` lists the targets.
.DEFAULT_GOAL := help
# Debian installs nginx, losetup and mkfs in directories that may not be in a user's PATH.
export PATH := $(PATH):/usr/sbin:/sbin
# The tests' modules, with rewritten asserts, take 8 s to compile in each test process.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help import boot setup test quick test-lowest test-newest check format docs share bench fuzz simulate crash soak mutants prove image test-image lock release sbom try-debian clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

import: ## import a disk: URL=... TARGET=...; default: a real disk served on loopback
	@tools/setup $(if $(URL),run,demo)
	@tools/demo $(if $(URL),'$(URL)') $(if $(TARGET),--target '$(TARGET)')

boot: setup ## import the real disk and boot it in qemu to its menu
	@.venv/bin/python -m pytest tests/proofs/test_boot.py

try-debian: ## run import, check and test in a fresh Debian root: RELEASE=trixie
	@tools/try-debian $(or $(RELEASE),trixie)

setup: ## install everything that the tests need
	@tools/setup test

# Three for each core, as many tests wait for time-outs; each process needs 1.3 GB.
JOBS = $(shell awk -v cores=$$(nproc) '/^MemAvailable/ {jobs = int($$2 / 1300000); \
	if (jobs > 3 * cores) jobs = 3 * cores; print (jobs > 1 ? jobs : 1)}' /proc/meminfo)

test: setup ## run all tests: JOBS=6 at a time
	@.venv/bin/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

quick: setup ## run the tests that start no server and need no root, in about a minute
	@.venv/bin/python -m pytest -n 4 --dist worksteal --quick $(PYTEST_ARGS)

test-lowest: setup ## run all tests with the lowest version of every dependency
	@tools/lowest $(PYTEST_ARGS)

test-newest: setup ## run every role with the newest dependencies, and with each release that is excluded
	@tools/newest $(PYTEST_ARGS)

check: setup ## check format, lint, types, layers, licences, the wheel, and what the docs and the files of a release say
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo
	.venv/bin/reuse lint --lines
	@rm -rf build/dist && mkdir -p build/dist
	@.venv/bin/python -m build --no-isolation --outdir build/dist . >build/wheel.log 2>&1 || { cat build/wheel.log; exit 1; }
	.venv/bin/check-wheel-contents build/dist/*.whl
	.venv/bin/python -m pytest -q -n 2 --dist loadfile tests/check $(PYTEST_ARGS)

format: setup ## format the code, and fix what ruff can fix
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

docs: ## build the documentation site: build/docs/index.html; REPOSITORY=https://github.com/... adds links that change a page
	@tools/setup docs
	@.venv/bin/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs build/docs \
		$(if $(REPOSITORY),-D html_theme_options.source_repository=$(REPOSITORY))
	@echo "build/docs/index.html"

share: setup ## write shell completions and man pages from the commands: share/
	@.venv/bin/pip install -qq --group share
	@.venv/bin/python tools/share

bench: setup ## compare with the commands that people use (as root); writes docs/about/benchmarks.md: BENCH_ARGS='--only qcow2', --more; RELEASE=trixie
	@$(if $(RELEASE),$(bench_in_root),.venv/bin/python -m tests.bench $(BENCH_ARGS))

# In a fresh Debian root. Its clone starts with the committed figures, to which the new ones are added; they are
# copied back also if a row has failed.
define bench_in_root
tools/try-debian $(RELEASE) 'make bench BENCH_ARGS="$(BENCH_ARGS)"'; status=$$?; \
	git -C build/try/$(RELEASE)/root/cdi-worker ls-files --modified --others 'docs/about/benchmarks/*.jsonl' | \
	while read -r file; do cp "build/try/$(RELEASE)/root/cdi-worker/$$file" "$$file"; done; \
	.venv/bin/python -m tests.bench --page; exit $$status
endef

fuzz: setup ## search for input that breaks a reader: TARGET=qcow2|vmdk|vdi|vpc|vhdx|formats|documents SECONDS=60, or RUNS=100000
	@.venv/bin/pip install -qq --group fuzz
	@mkdir -p build/fuzz
	@.venv/bin/python -m $(if $(filter formats documents,$(TARGET)),tests.proofs.fuzz,tests.proofs.fuzz.mapped) $(or $(TARGET),qcow2) \
		build/fuzz/$(or $(TARGET),qcow2) $(if $(RUNS),-runs=$(RUNS),-max_total_time=$(or $(SECONDS),60)) \
		-rss_limit_mb=2048 -artifact_prefix=build/fuzz/

crash: setup ## replay recorded imports up to every flush, as after power cuts (as root)
	@.venv/bin/python -m pytest -n 3 --dist worksteal tests/proofs/crash $(PYTEST_ARGS)

soak: setup ## run N=500 imports and N upload servers in a row, and look for what they leave behind
	@.venv/bin/python -m pytest -n 2 tests/proofs/soak --soak $(or $(N),500) $(PYTEST_ARGS)

mutants: setup ## change the product at drawn places, and list the changes that no test notices: COUNT=60 SEED=17
	@.venv/bin/pip install -qq --group mutants
	@.venv/bin/python -m tests.proofs.mutants --count $(or $(COUNT),60) $(if $(SEED),--seed $(SEED))

prove: setup ## run every slow proof whole, with new seeds (as root, an hour): PROOFS="soak boot", "--seconds 60"; writes docs/about/proofs.md
	@.venv/bin/pip install -qq --group fuzz --group mutants
	@tools/prove $(PROOFS)

simulate: setup ## run imports in simulated worlds with faults: SEEDS=10000
	@.venv/bin/python -m tests.proofs.simulation --seeds $(or $(SEEDS),10000) $(SIMULATE_ARGS)

image: ## build the container image with buildah, podman or docker: IMAGE=name PLATFORMS=linux/amd64,linux/arm64 IMAGE_OPTIONS=...
	@$(if $(PLATFORMS),tools/emulated $(PLATFORMS)) tools/image $(IMAGE_OPTIONS)

test-image: setup ## build the image on a base made here, run every role in containers (as root): PLATFORM=linux/arm64
	@$(if $(PLATFORM),tools/setup emulation && tools/emulated $(PLATFORM)) tools/test-image $(PYTEST_ARGS)

lock: ## update requirements.lock, the image's Python packages
	@tools/lock

release: setup ## cut VERSION=1.2.0 and build its files: wheel, sdist, image archive, components, checksums: IMAGE=name SIGN=key
	@.venv/bin/python tools/release '$(VERSION)'

sbom: setup ## list the components of the wheel and of the built image, in build/sbom: IMAGE=name
	@rm -rf build/sbom && mkdir -p build/sbom
	@.venv/bin/python -m build --no-isolation --wheel --outdir build/sbom . >build/sbom/log 2>&1 || { cat build/sbom/log; exit 1; }
	@.venv/bin/python tools/sbom wheel build/sbom/*.whl >build/sbom/wheel.cdx.json
	@tools/save-image '$(or $(IMAGE),cdi-worker)' build/sbom/image.tar
	@.venv/bin/python tools/sbom image build/sbom/image.tar >build/sbom/image.cdx.json
	@ls build/sbom/*.cdx.json

clean: ## remove generated files; Debian packages stay installed
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
