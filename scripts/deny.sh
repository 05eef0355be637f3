#!/usr/bin/env bash
# Licences, bans and sources of all dependencies; known vulnerabilities where their database can be had.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

cargo deny --locked --log-level error check licenses bans sources
# The database is a git repository, which a closed network does not reach.
if timeout 120 cargo deny --locked fetch db >/dev/null 2>&1; then
    cargo deny --locked --log-level error check advisories
elif [ -n "$(ls -d "${CARGO_HOME:-$HOME/.cargo}"/advisory-dbs/*/ 2>/dev/null)" ]; then
    say "the advisory database cannot be fetched: checking against the copy of an earlier run"
    cargo deny --locked --offline --log-level error check advisories
else
    say "NOT CHECKED: advisories. Their database cannot be fetched from here, and there is no earlier copy."
fi
