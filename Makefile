# The recipes. Continuous integration runs only `make test` and `make page-test` (.ci/run).
#
# `make help` prints each target with the comment after its name.

keep := $(filter-out 0,$(KEEP))

.DEFAULT_GOAL := help
.PHONY: help setup build test page-test count simulate demo bench fuzz kernels dist skew roots cluster fmt lint deny descriptor docs behaviours budgets path clean-namespaces

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install missing programs for the tests and the demo, and print their purpose
	@.ci/setup test

build: ## Build every program in the debug profile, into target/debug
	@.ci/setup build
	cargo build --workspace --all-targets --locked

test: setup ## Run everything that must pass: format, lints, all tests, doc tests, counts of instructions
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo build --workspace --locked
	cargo nextest run --workspace --locked $(if $(CI),--profile ci)
	cargo test --workspace --doc --locked
	@$(MAKE) --no-print-directory count

page-test: ## Test the page of headgatectl dashboard in Chromium; pictures in target/page. FLEET=5000 simulates this number of agents, ONLY=alone needs no build
	@.ci/setup page
	$(if $(filter alone,$(ONLY)),,cargo build --workspace --locked)
	@FLEET=$(FLEET) ONLY=$(ONLY) exec node tests/page/run.js

count: setup ## Count instructions of hot paths; fail above tests/counts.txt + 2 %. WRITE=1 REASON="…" writes it, ONLY=name counts one
	cargo build --config .ci/count.toml --workspace --locked --bin count
	@target/debug/count $(if $(ONLY),--only $(ONLY)) $(if $(filter-out 0,$(WRITE)),--write --reason "$$REASON")

simulate: ## Run the fleet in simulated time. SEEDS=1000 seeds from FIRST=1, or SEED=7 for its story; ACTS=0,4 runs some acts, ARGS=--logs shows logs
	cargo build --workspace --locked
	@exec target/debug/simulate $(if $(SEED),--seed $(SEED) $(if $(ACTS),--acts $(ACTS)),--seeds $(or $(SEEDS),1000) --first $(or $(FIRST),1)) $(ARGS)

demo: ## Show Headgate at work on three nodes. KEEP=1 leaves it running until Ctrl-C
	@.ci/setup $(if $(keep),try,demo)
	cargo build --workspace --locked
	@exec target/debug/demo $(if $(keep),--keep)

bench: ## Measure; write JSON to target/bench. ONLY=name runs one; ARGS="…" passes options
	@.ci/setup bench
	cargo build --release --locked -p headgate-control-plane -p headgate-node-agent -p headgate-tests --bins
	cargo run --release --locked -p headgate-tests --bin bench -- $(if $(ONLY),--only $(ONLY)) $(ARGS)

fuzz: ## Run each fuzz target for TIME seconds (600), two at a time, and print inputs and findings
	cargo build --release --locked -p headgate-node-agent --bins
	HEADGATE_FUZZ_SECONDS=$(or $(TIME),600) cargo nextest run --release --locked -p headgate-tests --test streams --test programs --profile fuzz

kernels: setup ## Test nftables mode on Linux 5.10, 6.1 and 6.12 of Debian, in QEMU. ONLY=name runs some tests, SUITE=bookworm one kernel
	@.ci/setup kernels
	cargo build --workspace --locked
	cargo test --workspace --locked --test kernel --no-run
	SUITE=$(SUITE) .ci/kernels $(ONLY)

dist: ## Build static programs, a list of dependencies (SBOM) and checksums. COMPARE=1 builds twice and compares
	@.ci/setup dist
	@.ci/dist $(if $(filter-out 0,$(COMPARE)),--compare)

skew: setup ## Test agents of the last release, or of the last base of the protocol, with this control plane, and the other way round. TAG=name takes another commit
	cargo build --workspace --locked
	@TAG=$(TAG) .ci/skew $(ONLY)

roots: setup ## Test the agent of `make dist` in file systems of Debian 11 to 13, with the manifest's capabilities
	@.ci/setup roots
	cargo build --workspace --locked
	@.ci/roots $(ONLY)

cluster: ## Follow the pages in a real Kubernetes cluster of two nodes. BIN=folder has its programs, STEPS="up migrate" runs some steps
	@BIN=$(BIN) STEPS="$(STEPS)" .ci/cluster check
	@.ci/setup cluster
	$(if $(PROGRAMS),,cargo build --workspace --locked)
	@BIN=$(BIN) STEPS="$(STEPS)" .ci/cluster

fmt: ## Format the code
	cargo fmt --all

lint: ## Check format and lints only
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

deny: setup ## Check advisories of dependencies, with the network, and what make test checks with cargo-deny
	PATH="$$PATH:$(CURDIR)/target/tools" cargo deny --workspace check

descriptor: ## Write the protocol's descriptor set again, after a change of the protocol
	HEADGATE_WRITE_DESCRIPTOR=1 cargo nextest run --locked -p headgate-tests --test pure protocol_is_compatible --no-capture

docs: ## Write the generated pages under docs/ again (configuration, metrics)
	HEADGATE_WRITE_DOCS=1 cargo nextest run --locked -p headgate-node-agent -p headgate-control-plane --lib documents_are_current

behaviours: ## Write docs/behaviours.md again, from the last `make test` (all tests must pass)
	cargo run --locked -p headgate-tests --bin behaviours

budgets: ## Lower the budgets in ARCHITECTURE.md to what the mechanisms need
	HEADGATE_WRITE_DOCS=1 cargo nextest run --locked -p headgate-tests --test pure keeps_its_budget

path: setup ## List the files through which the change of one endpoint passes, mode nftables
	@.ci/path

clean-namespaces: ## Remove network namespaces that tests or demos left behind when they were killed
	@for name in $$(ip netns list | awk '$$1 ~ /^hg[0-9]+-/ { print $$1 }'); do \
	  process=$${name#hg}; process=$${process%%-*}; \
	  if [ ! -d "/proc/$$process" ]; then echo "removing $$name"; ip netns del "$$name"; fi; \
	done
