#!/usr/bin/env bash
# Runs Inspect's conformance checks for sandbox providers (PyPI `inspect-ai`) against a server of this checkout: a small
# client of the public gRPC API in tests/inspect, in a virtual environment of its own. Needs root and PyPI.
#
#   scripts/inspect.sh [POLICY ...]        default: default, strict
#
# Where PyPI cannot be reached it says SKIPPED, and fails only with EXUVIA_REQUIRE_INSPECT=1.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- default strict

venv=$cache/inspect-$(sha256sum tests/inspect/requirements.txt | cut -c1-12)
if [ ! -e "$venv/complete" ]; then
    rm -rf "$venv"
    /usr/bin/python3 -m venv "$venv" || die "no module venv: install python3-venv"
    if ! "$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/inspect/requirements.txt; then
        say "SKIPPED inspect: the packages of tests/inspect/requirements.txt could not be installed"
        [ "${EXUVIA_REQUIRE_INSPECT:-}" != 1 ] || exit 1
        exit 0
    fi
    touch "$venv/complete"
fi

cargo build --locked --quiet
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || { kill "$server"; wait "$server" || true; }; rm -rf "$work"' EXIT
mkdir "$work/stubs"
"$venv/bin/python" -m grpc_tools.protoc -I proto --python_out="$work/stubs" --grpc_python_out="$work/stubs" \
    proto/exuvia/v1/sandbox.proto
"$CARGO_TARGET_DIR/debug/exuvia" --data-dir "$work/data" serve --listen 127.0.0.1:0 --on-shutdown end \
    >"$work/serve.log" 2>&1 &
server=$!
for _ in $(seq 100); do
    address=$(grep -o '127\.0\.0\.1:[0-9]*' "$work/serve.log" | head -1) && break
    kill -0 "$server" || { cat "$work/serve.log" >&2; die "the server did not start"; }
    sleep 0.1
done
for policy; do
    say "policy $policy:"
    EXUVIA_SERVER=$address EXUVIA_POLICY=$policy EXUVIA_STUBS=$work/stubs PYTHONDONTWRITEBYTECODE=1 \
        "$venv/bin/python" -m pytest -c tests/inspect/pytest.ini --rootdir tests/inspect tests/inspect/test_self_check.py
done
