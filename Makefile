# Every recipe is a plain command that also runs without make. `make setup` needs root and Debian 12/13 or Ubuntu.

# Outside the checkout, so that a fresh clone builds on what an earlier one left.
export CARGO_TARGET_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/exuvia/target
# A test that cannot run fails, instead of saying SKIPPED. `make setup` gives it all it needs.
export EXUVIA_REQUIRE_ALL ?= 1

.PHONY: demo test inspect setup check build clean stop image

demo:
	bash scripts/demo.sh

test: setup check
	bash scripts/test.sh

# Inspect's conformance checks for sandbox providers, over the gRPC API.
inspect: setup
	bash scripts/inspect.sh

setup:
	bash scripts/setup.sh

check:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	bash scripts/deny.sh

build:
	cargo build --locked --release

# The `python` image, out of Debian packages.
image: setup
	bash images/python/build.sh

# Ends the Docker engine that `make setup` started, and no other.
stop:
	bash scripts/dockerd.sh stop

clean:
	cargo clean
