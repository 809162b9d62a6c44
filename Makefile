.DEFAULT_GOAL := help
.PHONY: help images check test test-long bench demo

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

images: ## make sure that the container images of the test servers are on this machine
	@tests/images/provide

check: ## format, lints, each feature alone, documentation and its examples; needs no server
	cargo fmt --all -- --check
	cargo clippy --locked --workspace --all-targets --all-features -- -D warnings
	@for features in '' postgres mysql sqlite nats sqlite,testing; do \
		echo "cargo check --no-default-features --features '$$features'"; \
		cargo check --locked --quiet --lib --no-default-features --features "$$features" \
			|| exit 1; \
	done
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --all-features --no-deps
	cargo test --locked --workspace --all-features --doc

test: images ## all tests except those in the documentation, against real servers
	cargo test --locked --workspace --all-features --lib --bins --tests --examples

test-long: images ## the same with millions of rows and faults that last ten minutes: about an hour
	TEST_LONG=1 cargo test --locked --workspace --all-features --lib --bins --tests --examples

bench: images ## measure the relay, and workers in each other's way
	cargo bench --locked --all-features --bench relay --bench contention

demo: images ## PostgreSQL, NATS and three relay processes, one of them killed
	cargo build --locked --example nats_relay --example demo
	cargo run --locked --quiet --example demo
