# Everything a person types. `make help` lists it. Nothing needs to be installed first but Python 3.11+, git and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
CACHE := $(or $(TWINPOOL_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/twinpool)
VENV := .venv
RUN := $(VENV)/bin/python
CRD := crds/inferencepools.serving.twinpool.dev.yaml
CHART_CRD := charts/twinpool/files/crd.yaml

# The parts that decide: every branch is tested.
PURE := twinpool.core twinpool.operator.logic twinpool.router.logic twinpool.worker.logic \
  twinpool.worker.engines.simulated.logic twinpool.simulate

ENGINE ?= vllm
NAME ?= router
PYTEST_ARGS ?=
# Test processes beside each other. The scenarios mostly wait; each process of them has a cluster of its own.
JOBS ?= $(shell nproc)
E2E_JOBS ?= 2

.PHONY: help setup demo down test unit e2e e2e-vllm check fix generate docs bench placement-clusters placement-growth pictures soak clean requirements

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

setup: $(VENV)/.complete ## the project's own Python environment (.venv)

$(VENV)/.complete: requirements/dev.txt pyproject.toml setup.sh
	@PYTHON="$(PYTHON)" CACHE="$(CACHE)" VENV="$(VENV)" ./setup.sh

demo: setup ## a real control plane, operator, router and two vLLM workers answer a question (ENGINE=simulated: in a minute; CLUSTER=kind: in containers, simulated)
	@$(RUN) -m twinpool.demo up $(if $(filter kind,$(CLUSTER)),--cluster kind,--engine $(ENGINE))

down: setup ## stop what `make demo` left serving
	@$(RUN) -m twinpool.demo down $(if $(filter kind,$(CLUSTER)),--cluster kind)

test: setup ## every test, end-to-end ones with the real engine too
	@$(RUN) -m twinpool.demo prepare
	@$(MAKE) --no-print-directory unit
	@$(RUN) -m pytest e2e -n $(E2E_JOBS) --dist loadfile $(PYTEST_ARGS)

unit: setup ## the tests that need no cluster and no engine; the pure parts must be covered in full
	@$(RUN) -m pytest tests -n $(JOBS) $(PURE:%=--cov=%) --cov-branch --cov-fail-under=100 $(PYTEST_ARGS)

e2e: setup ## the end-to-end tests (CLUSTER=external: against the cluster of KUBECONFIG)
	@$(RUN) -m twinpool.demo prepare
	@$(RUN) -m pytest e2e $(if $(filter external,$(CLUSTER)),--cluster=external,-n $(E2E_JOBS) --dist loadfile) $(PYTEST_ARGS)

e2e-vllm: setup ## the long tests with the real vLLM, and its newest version's names, and load generators as clients (fetches 0.8 GB)
	@$(RUN) -m twinpool.localengine models
	@$(RUN) -m pytest e2e --slow $(PYTEST_ARGS)

check: setup ## format, lint, types, dependency rules, freshness of generated files
	@$(VENV)/bin/ruff format --check --quiet . || { echo "run \`make fix\`"; exit 1; }
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy
	@PYTHONPATH=core:operator:router:worker:simulate:cli:e2e $(VENV)/bin/lint-imports --no-cache | tail -4
	@$(VENV)/bin/twinpool crd --check $(CRD)
	@$(VENV)/bin/twinpool crd -o markdown --check docs/api.md
	@$(VENV)/bin/twinpool manual --check docs/cli.md
	@$(VENV)/bin/twinpool metrics --check docs/metrics.md
	@$(VENV)/bin/twinpool crd --check $(CHART_CRD)
	@$(RUN) -m monitoring check

fix: setup ## format, and mend what ruff can mend
	@$(VENV)/bin/ruff format --quiet .
	@$(VENV)/bin/ruff check --fix --quiet .

docs: setup ## make pages of the documentation in dist/docs (a warning or a link to nowhere fails it)
	@$(RUN) -m sphinx --quiet --fresh-env --write-all --fail-on-warning --keep-going -c docs -b html . dist/docs
	@echo "open dist/docs/index.html"

generate: setup ## write the generated files again
	@$(VENV)/bin/twinpool crd > $(CRD).new && mv $(CRD).new $(CRD)
	@$(VENV)/bin/twinpool manual > docs/cli.md.new && mv docs/cli.md.new docs/cli.md
	@$(VENV)/bin/twinpool metrics > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md
	@$(VENV)/bin/twinpool crd -o markdown > docs/api.md.new && mv docs/api.md.new docs/api.md
	@cp $(CRD) $(CHART_CRD)
	@$(RUN) -m monitoring write

bench: setup ## measure one part beside its baseline: NAME=router|routing|scaling|ratio|simulate|timing|worker|engine|operator|placement [QUICK=1] [OUT=file.json]
	@$(RUN) -m bench $(NAME) $(if $(QUICK),--quick) $(if $(OUT),--out $(OUT))

placement-clusters: setup ## random clusters on a local control plane: is applied what was foretold? [CASES=200] [FIRST=0]
	@$(RUN) -m bench.placement.live --cases $(or $(CASES),200) --first $(or $(FIRST),0)

placement-growth: setup ## draw how placement's time grows with the cluster (docs/placement-growth.svg)
	@$(RUN) -m bench.placement.growth

pictures: setup ## draw the dashboards of a local pool under load, light and dark, as SVG [OUT=pictures]
	@TWINPOOL_PICTURES=$(abspath $(or $(OUT),pictures)) $(RUN) -m pytest e2e/test_observability.py -q -k pictures
	@echo "pictures are in $(or $(OUT),pictures)"

soak: setup ## churn against one router for half an hour: is its memory flat? [SECONDS=1800]
	@$(RUN) -m bench.router.soak --seconds $(or $(SECONDS),1800)

requirements: setup ## compile the pinned lists again from pyproject.toml
	@for extra in operator router worker cli localcluster dev; do \
	  "$(CACHE)/boot/bin/uv" pip compile --quiet --upgrade --universal --python-version 3.11 --no-header --no-annotate \
	    --no-emit-index-url --no-emit-find-links --extra $$extra pyproject.toml -o requirements/$$extra.txt; done

clean: ## remove what was made inside the repository (the cache outside it stays; its path is printed)
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* htmlcov dist
	@echo "kept: $(CACHE) (built control plane, installed engine, models)"
