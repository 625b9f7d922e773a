# The recipes. Continuous integration runs `make test` and nothing else (.ci/run).
#
# What each target does is said by `make help`, from the comments behind the targets' names.

keep := $(filter-out 0,$(KEEP))

.DEFAULT_GOAL := help
.PHONY: help setup build test demo bench fmt lint deny descriptor docs behaviours clean-namespaces

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install what the tests and the demo need, and say what and why
	@.ci/setup test

build: ## Build every program, for debugging, into target/debug
	@.ci/setup build
	cargo build --workspace --all-targets --locked

test: setup ## Everything that must pass: format, lints, all tests, doc tests
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo build --workspace --locked
	cargo nextest run --workspace --locked $(if $(CI),--profile ci)
	cargo test --workspace --doc --locked

demo: ## See it work: three nodes, a service, live changes. KEEP=1 leaves it running until Ctrl-C
	@.ci/setup $(if $(keep),try,demo)
	cargo build --workspace --locked
	@exec target/debug/demo $(if $(keep),--keep)

bench: ## Measure, and write JSON to target/bench. ONLY=name runs one; ARGS="--agents 500" and the like
	@.ci/setup bench
	cargo build --release --locked -p headgate-control-plane -p headgate-node-agent -p headgate-tests --bins
	cargo run --release --locked -p headgate-tests --bin bench -- $(if $(ONLY),--only $(ONLY)) $(ARGS)

fmt: ## Format the code
	cargo fmt --all

lint: ## Check format and lints only
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings

deny: ## Check licences, sources and advisories of dependencies with cargo-deny
	@command -v cargo-deny >/dev/null || { \
	  echo "cargo-deny is missing: cargo install --locked cargo-deny" >&2; \
	  echo "(make test holds licences and bans to deny.toml without it; advisories need it)" >&2; exit 1; }
	cargo deny --workspace check

descriptor: ## Write the committed descriptor set of the protocol anew, after a change of it
	HEADGATE_WRITE_DESCRIPTOR=1 cargo nextest run --locked -p headgate-tests --test pure protocol_is_compatible --no-capture

docs: ## Write the generated pages under docs/ anew (configuration, metrics)
	HEADGATE_WRITE_DOCS=1 cargo nextest run --locked -p headgate-node-agent -p headgate-control-plane --lib documents_are_current

behaviours: ## Write docs/behaviours.md anew, from the last `make test`, all of which must have passed
	cargo run --locked -p headgate-tests --bin behaviours

clean-namespaces: ## Remove network namespaces that killed tests or demos left behind
	@for name in $$(ip netns list | awk '$$1 ~ /^hg[0-9]+-/ { print $$1 }'); do \
	  process=$${name#hg}; process=$${process%%-*}; \
	  if [ ! -d "/proc/$$process" ]; then echo "removing $$name"; ip netns del "$$name"; fi; \
	done
