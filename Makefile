# What people type. `make help` lists it; CONTRIBUTING.md says when to use what.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PY := .venv/bin/python
# ansible-lint, mypy and the gates look up their sister programs on PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# program=Debian package
# What the driver and Ansible need; rehearsal/hosts.sh sees to what the hosts need.
REHEARSAL_PROGRAMS := git=git ssh=openssh-client nsenter=util-linux zstd=zstd
# The linters, and the programs that tests ask whether they accept a template.
CHECK_PROGRAMS := git=git shellcheck=shellcheck zstd=zstd systemd-analyze=systemd haproxy=haproxy \
  webhook=webhook gpg=gnupg ssh-keygen=openssh-client

SHELL_SCRIPTS = $(shell git ls-files --cached --others --exclude-standard -- '*.sh' .ci/run \
  rehearsal/ssh rehearsal/sh)
# What nvcc, which comes as wheels (kernels/nvcc.lock), asks of the machine.
COMPILE_PROGRAMS := g++=g++ c++filt=binutils
COMPILE_TESTS := $(PY) -m pytest kernels/tests/native -q
UNIT_TESTS := $(PY) -m pytest tests --ignore=tests/e2e --ignore=tests/scenarios \
  --ignore=tests/gitops/test_cut_off.py -n 2 -q
# Most of a rollout is waiting: several fleets at once, each case to whichever is free.
TO_A_FREE_FLEET := --maxschedchunk=1
# Whole lines, for two that print side by side.
ONE_FLEET := -n 1

.PHONY: help rehearsal test telling-faults telling-gitops real-faults all-gitops check kernels lint scenarios fmt clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

rehearsal: ## a real rollout on test hosts; SCENARIO=bad-topk for one that is refused, KEEP=1 to look around
	@requirements/programs.sh $(REHEARSAL_PROGRAMS)
	@requirements/venv.sh control
	@$(PY) rehearsal/run.py $(if $(SCENARIO),--scenario '$(SCENARIO)') $(if $(KEEP),--keep)

check: lint ## linters, types and unit tests: some minutes
	@$(UNIT_TESTS)

test: lint ## everything a change must pass: linters, unit tests, rehearsals; three quarters of an hour
	@requirements/programs.sh $(REHEARSAL_PROGRAMS) $(COMPILE_PROGRAMS)
	@$(COMPILE_TESTS)
	@$(UNIT_TESTS)
	@$(MAKE) --no-print-directory --jobs=2 telling-faults telling-gitops
	@$(PY) -m pytest tests/gitops/test_cut_off.py -n 2 -q
	@$(PY) -m pytest tests/e2e -v

# Side by side: two fleets for faults, a third that follows a branch.
telling-faults:
	@$(PY) -m pytest tests/scenarios/test_faults.py -m telling -n 2 $(TO_A_FREE_FLEET) -v

telling-gitops:
	@SEATRIAL_BERTH=2 $(PY) -m pytest tests/scenarios/test_gitops.py -m telling $(ONE_FLEET) -v

kernels: ## compile the CUDA kernels and hold their sm_120a code against the rules; a minute, no GPU
	@requirements/programs.sh $(COMPILE_PROGRAMS)
	@requirements/venv.sh dev
	@$(PY) kernels/compile_gate/gate.py

# A line that names $(MAKE) would run all of this for `make -n` too.
scenarios: ## every fault at every phase, every bad merge; writes docs/faults.md
	@requirements/programs.sh $(REHEARSAL_PROGRAMS)
	@requirements/venv.sh dev
	@status=0; \
	$(PY) -m pytest tests/scenarios/test_faults.py -n 3 $(TO_A_FREE_FLEET) -v || status=$$?; \
	make --no-print-directory --jobs=2 --keep-going real-faults all-gitops || status=$$?; \
	$(PY) -m tests.faults.report; exit $$status

real-faults:
	@$(PY) -m pytest tests/scenarios/test_real_engine.py $(ONE_FLEET) -v

all-gitops:
	@SEATRIAL_BERTH=2 $(PY) -m pytest tests/scenarios/test_gitops.py $(ONE_FLEET) -v

lint:
	@requirements/programs.sh $(CHECK_PROGRAMS)
	@requirements/venv.sh dev
	@echo 'ruff ...';         ruff check --quiet . && ruff format --quiet --check .
	@echo 'shellcheck ...';   shellcheck $(SHELL_SCRIPTS)
	@echo 'yamllint ...';     yamllint --strict .
	@echo 'mypy ...';         mypy --no-error-summary seatrial gates tests rehearsal plugins fabfile.py
	@                         mypy --no-error-summary kernels
	@echo 'ansible-lint ...'; ansible-lint --offline -q

fmt: ## format Python and apply the linter's safe repairs
	@requirements/venv.sh dev
	@ruff check --quiet --fix-only . && ruff format .

clean: ## test hosts down, caches and .venv removed
	@for berth in '' 1 2; do SEATRIAL_BERTH=$$berth rehearsal/hosts.sh down; done
	@rm -rf .venv .ansible .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
