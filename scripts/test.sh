#!/usr/bin/env bash
# Runs every test; the runner's own summary is what comes last, but for what the tests left on the host. That fails them too, unless
# EXUVIA_REQUIRE_CLEAN=0: where others make sandboxes meanwhile.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

before=$(mktemp)
trap 'rm -f "$before"' EXIT
bash "$(dirname "$0")/host-state.sh" save "$before"

run() {
    cargo test --locked --doc --quiet || return
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --locked --no-fail-fast
    else
        cargo test --locked --no-fail-fast --lib --tests
    fi
}
passed=0
run || passed=$?

if ! left=$(bash "$(dirname "$0")/host-state.sh" compare "$before"); then
    say "the tests left this on the host (or took it away):"
    say "$left"
    # Told in any case: a test that fails is killed with its server, and leaves what that had.
    [ "$passed" -ne 0 ] || [ "${EXUVIA_REQUIRE_CLEAN:-1}" = 0 ] || passed=1
fi
exit "$passed"
