#!/usr/bin/env bash
# Runs every test; the runner's own summary is what comes last.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

cargo test --locked --doc --quiet
if cargo nextest --version >/dev/null 2>&1; then
    exec cargo nextest run --locked --no-fail-fast
fi
exec cargo test --locked --no-fail-fast --lib --tests
