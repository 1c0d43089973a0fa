# `make help` lists the targets. All output is below target/.

.DEFAULT_GOAL := help
SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c

TARGET := $(abspath $(or $(CARGO_TARGET_DIR),target))
# Version of Kubernetes for `make cluster` and the figures: 1.27 to 1.37.
KUBERNETES_VERSION ?= 1.37.2
# Kubernetes versions for `make test`: one for classic mode, and the latest for structured mode.
TEST_VERSIONS := 1.30.14 1.37.2
CLUSTER := $(TARGET)/cluster/cluster
# Tools installed by cargo, each version in its own directory.
CARGO_DENY_VERSION := 0.20.2
CARGO_DENY_ROOT := $(TARGET)/tools/cargo-deny-$(CARGO_DENY_VERSION)
CARGO_DENY := $(CARGO_DENY_ROOT)/bin/cargo-deny
# The last version for our `rust-version`.
CARGO_NEXTEST_VERSION := 0.9.128
CARGO_NEXTEST_ROOT := $(TARGET)/tools/cargo-nextest-$(CARGO_NEXTEST_VERSION)
CARGO_NEXTEST := $(CARGO_NEXTEST_ROOT)/bin/cargo-nextest
MDBOOK_VERSION := 0.5.4
MDBOOK_ROOT := $(TARGET)/tools/mdbook-$(MDBOOK_VERSION)
MDBOOK := $(MDBOOK_ROOT)/bin/mdbook
# Debug builds take a fifth of the time; the tools run only for a second.
INSTALL = CARGO_PROFILE_DEV_DEBUG=false CARGO_TARGET_DIR="$(1)/build" cargo install --locked --debug --root "$(1)"

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Every commit

.PHONY: check
check: format lint $(CARGO_NEXTEST) ## Format, clippy, rustdoc, and the short tests that need no cluster
	CARGO_NEXTEST="$(CARGO_NEXTEST)" hack/test quick

.PHONY: format
format:
	cargo fmt --check

.PHONY: lint
lint: clippy docs surface words defects

.PHONY: clippy
clippy:
	cargo clippy --locked --all-targets -- -D warnings

# Only rustdoc detects broken links in comments.
.PHONY: docs
docs:
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --document-private-items

# The library's public items; internal modules are public with the feature `internals` only.
.PHONY: surface
surface:
	hack/measure --public 160 >/dev/null

# Limits the hand-written words of docs/, and checks the names of tests.
.PHONY: words
words:
	hack/measure --docs 20000 >/dev/null
	hack/measure --tests

# Checks that each seeded defect still applies; hack/defects without an argument runs them all.
.PHONY: defects
defects:
	hack/defects --check

##@ Everything

# Kubernetes is built meanwhile, since building the tests alone leaves processors idle.
.PHONY: test
test: ## Everything: check, then the tests on real Kubernetes (root and Go are needed)
	$(MAKE) kubernetes & built=$$!; trap "kill $$built 2>/dev/null || true" EXIT; \
	    $(MAKE) format lint $(CARGO_NEXTEST); cargo test --locked --quiet --no-run --lib --bins --tests; wait $$built
	CARGO_NEXTEST="$(CARGO_NEXTEST)" hack/test all

.PHONY: kubernetes
kubernetes: $(CLUSTER)
	for version in $(TEST_VERSIONS); do $(CLUSTER) build --target "$(TARGET)" --version $$version --nodes 1; done

.PHONY: test-all
test-all: format lint $(CARGO_NEXTEST) ## All seeds and faults, and each Kubernetes from 1.27 to 1.37 (the first time an hour more, to build them)
	CARGO_NEXTEST="$(CARGO_NEXTEST)" hack/test versions

.PHONY: verify
verify: book deny crate bench requests ## Slow checks: the book, dependencies, the crate, and figures with limits

.PHONY: faults
faults: ## Run the programs on the test cluster with every fault at every request, event, disk step and call (needs root)
	EVERY_FAULT=1 cargo test --locked --test faults -- --nocapture

.PHONY: reproducible
reproducible: ## Compile what is committed twice, in different places, and compare the images (two release builds)
	hack/reproducible

.PHONY: soak
soak: ## Run SEEDS seeds of the simulation (1000000), continuing the last run
	hack/soak

.PHONY: fuzz
fuzz: ## Fuzz every parser for a minute each (FUZZ_SECONDS); failing inputs go to tests/fuzz/corpus
	FUZZ_SECONDS=$${FUZZ_SECONDS:-60} cargo test --locked --test fuzz -- --nocapture --test-threads 1

.PHONY: book
book: $(MDBOOK) ## Build docs/ as a book in target/book
	hack/book "$(MDBOOK)" "$(TARGET)/book"

.PHONY: deny
deny: $(CARGO_DENY) ## Check licences, sources and bans of all dependencies (deny.toml)
	$(CARGO_DENY) --locked check licenses sources
	$(CARGO_DENY) --locked --exclude-dev check bans

.PHONY: advisories
advisories: $(CARGO_DENY) ## Check all dependencies for known vulnerabilities (needs the network)
	$(CARGO_DENY) --locked check advisories

# Far below the limit of crates.io, 10 MB.
CRATE_BYTES := 2000000

.PHONY: crate
crate: ## Package what is committed as a crate, limit its size, and build it from the package
	cargo publish --locked --dry-run
	rm -f $(TARGET)/package/drayman-*.crate
	cargo package --locked --quiet --no-verify
	size=$$(stat --format %s $(TARGET)/package/drayman-*.crate); \
	    ((size <= $(CRATE_BYTES))) || { echo "the crate has $$size bytes; at most $(CRATE_BYTES) are allowed: see include in Cargo.toml" >&2; exit 1; }

$(CARGO_DENY):
	$(call INSTALL,$(CARGO_DENY_ROOT)) cargo-deny --version $(CARGO_DENY_VERSION)
	rm -rf "$(CARGO_DENY_ROOT)/build"

$(CARGO_NEXTEST):
	$(call INSTALL,$(CARGO_NEXTEST_ROOT)) cargo-nextest --version $(CARGO_NEXTEST_VERSION) --no-default-features --features default-no-update
	rm -rf "$(CARGO_NEXTEST_ROOT)/build"

$(MDBOOK):
	$(call INSTALL,$(MDBOOK_ROOT)) mdbook --version $(MDBOOK_VERSION) --no-default-features --features search
	rm -rf "$(MDBOOK_ROOT)/build"

# The program in the image.
RELEASED = $(TARGET)/$(shell rustc --print host-tuple)/release/drayman

.PHONY: bench
bench: $(CLUSTER) ## Print size and memory of the release build and fail beyond their limits
	hack/image
	hack/footprint size "$(RELEASED)"
	for version in $(TEST_VERSIONS); do \
	    $(CLUSTER) up --target "$(TARGET)" --version $$version --nodes 1 --hook 'hack/footprint memory "$(RELEASED)"'; \
	done

.PHONY: requests
requests: ## Print the requests of a pod's life in both modes, counted from the API server's audit log (root is needed)
	cargo test --locked --test e2e -- --nocapture a_pod_with_one_claim_costs structured::lifecycle::a_pod_reads

##@ Release

.PHONY: release
release: $(CLUSTER) ## Make image, chart, plugin, SBOM, notes and checksums in target/release-VERSION (REGISTRY, REPOSITORY, ARCHITECTURES, TAG)
	HELM="$${HELM:-$$($(CLUSTER) helm --target "$(TARGET)")}" hack/release
	$(MAKE) crate

##@ Work

.PHONY: demo
demo: ## Run the demonstration on an embedded cluster (needs only Rust)
	cargo run --locked -- demo

.PHONY: cluster
cluster: $(CLUSTER) ## Start a real Kubernetes with drayman in it; Ctrl-C ends it
	cargo build --locked
	$(CLUSTER) up --target "$(TARGET)" --version "$(KUBERNETES_VERSION)" --nodes 1 \
	    --hook 'hack/run-in-cluster "$(TARGET)/debug/drayman"'

.PHONY: generate
generate: ## Regenerate crds/, the chart's schema, docs/reference and the lists of docs/reference/metrics.md
	DRAYMAN_GENERATE=1 cargo test --locked --quiet --lib cli::crds
	DRAYMAN_GENERATE=1 cargo test --locked --quiet --test docs reference
	DRAYMAN_GENERATE=1 cargo test --locked --quiet --lib observe::tests

.PHONY: clean
clean: ## Remove all build output, including the Kubernetes of the tests
	cargo clean

# Always run; Go's cache decides whether to rebuild.
.PHONY: $(CLUSTER)
$(CLUSTER):
	@command -v go >/dev/null || { echo "Go is missing: it builds the Kubernetes of the tests; install Go 1.26 or newer from your distribution or from the Go project" >&2; exit 1; }
	@mkdir -p "$(dir $@)"
	cd tests/cluster && CGO_ENABLED=0 GOTOOLCHAIN=local GOWORK=off go build -buildvcs=false -o "$@" .
