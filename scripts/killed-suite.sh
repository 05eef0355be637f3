#!/usr/bin/env bash
# Kills the tests in the middle, and checks that one command makes the host as it was: `exuvia doctor --fix`.
#
#   scripts/killed-suite.sh [ROUNDS]     default: 4
#
# A round starts the tests that make sandboxes, of every backend, kills all their processes at a random instant
# (EXUVIA_KILL_WITHIN seconds, 30), and compares the host with what it was before. In every second round the data directories are
# removed first, so that no start of a server could find what they had. Needs root, and nobody else who makes sandboxes here.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
cd "$(dirname "$0")/.."
rounds=${1:-4}
within=${EXUVIA_KILL_WITHIN:-30}
filter='binary(sandbox) | binary(api) | binary(cli) | binary(chaos) | test(backend::docker) | test(backend::gvisor) | test(backend::oci)'

cargo build --locked --quiet
cargo nextest run --locked --no-run --cargo-quiet
exuvia=$CARGO_TARGET_DIR/debug/exuvia
work=$(mktemp -d)
# The session of the tests that run.
session=
kill_all() {
    local pids
    # Again until none is left: one that dies may have started another.
    while [ -n "$session" ] && pids=$(ps -o pid= -s "$session"); do
        # Some may have ended by themselves.
        kill -KILL $pids 2>/dev/null || true
        sleep 0.1
    done
    session=
}
trap 'kill_all; rm -rf "$work"' EXIT

# Of the data directory $1.
doctor() { "$exuvia" --data-dir "$1" doctor "${@:2}" --json | python3 -c '
import json, sys
for finding in json.loads(sys.stdin.readlines()[-1])["findings"]:
    if finding["name"] == "strays": print(finding["detail"])'; }

failed=0
for round in $(seq "$rounds"); do
    bash scripts/host-state.sh save "$work/before"
    mkdir "$work/tmp"
    TMPDIR=$work/tmp setsid cargo nextest run --locked --no-fail-fast --cargo-quiet -E "$filter" >"$work/tests.log" 2>&1 </dev/null &
    session=$!
    disown
    after=$((RANDOM % (within * 1000)))
    sleep "$((after / 1000)).$(printf %03d $((after % 1000)))"
    running=$(grep -c PASS "$work/tests.log" || true)
    kill_all
    say "round $round: killed after $after ms, when $running tests had passed; left: $(EXUVIA_SETTLE=0 bash scripts/host-state.sh compare "$work/before" 2>/dev/null |
        awk '{ n[$2]++ } END { for (kind in n) printf "%d %s, ", n[kind], kind }')"
    if [ $((round % 2)) = 0 ]; then
        # What is mounted stays.
        rm -rf --one-file-system "$work/tmp" 2>/dev/null || true
        say "  data directories removed"
    fi
    say "  doctor finds: $(doctor "$work/none" | tr ';' '\n' | sed 's/`[^`]*`/…/g; s/(.*)//' | sort | uniq -c | tr -s '\n ' ' ')"
    # Each data directory that is still there: those of the tests, and what the suite of the docker backend has in the build's folder.
    doctor "$work/none" | grep -o 'of `[^`]*`' | cut -d'`' -f2 | sort -u | while read -r data; do
        case $data/ in
            "$work"/* | "$CARGO_TARGET_DIR"/*) if [ -d "$data" ]; then doctor "$data" --fix >/dev/null; fi ;;
        esac
    done
    # What a next server would have gone on with, had its data directory stayed, and what may have been in the making.
    rm -rf --one-file-system "$work/tmp" 2>/dev/null || true
    sleep 6
    doctor "$work/none" --fix >/dev/null
    rm -rf --one-file-system "$work/tmp"
    if left=$(bash scripts/host-state.sh compare "$work/before"); then
        say "  the host is as it was"
    else
        say "  still there:" "$left"
        failed=1
    fi
done
exit "$failed"
