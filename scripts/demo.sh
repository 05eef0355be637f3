#!/usr/bin/env bash
# Fixes a real bug in a real package inside a real sandbox: see examples/demo/README.md.
# With EXUVIA_MODEL (a MODEL as for `exuvia run --model`) and its key set, a real model does it; else a recorded script.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh
umask 022

package=parse
version=1.17.0
sha256=c7806139a481ec8c8336a54418894c8b201314f8ecc63e55f438f4b72bdc4485
archive=$package-$version.tar.gz
model=${EXUVIA_MODEL:-scripted:examples/demo/fix.jsonl}
data=${EXUVIA_DATA_DIR:-$state/demo}

heading() { printf '\n== %s\n' "$*"; }

heading "set-up"
bash scripts/setup.sh
cargo build --locked --quiet
exuvia=$CARGO_TARGET_DIR/debug/exuvia

work=$(mktemp -d "${TMPDIR:-/tmp}/exuvia-demo.XXXXXX")
trap 'rm -rf "$work"' EXIT

heading "the package: $package $version"
# pip checks the hash before it looks inside. It then asks the package for its metadata, which runs the package's own
# set-up: as `nobody`, in an empty directory.
fetch() {
    install -d -o nobody -m 700 "$work/fetch"
    printf '%s==%s --hash=sha256:%s\n' "$package" "$version" "$sha256" >"$work/fetch/requirements.txt"
    (cd "$work/fetch" && HOME=$work/fetch TMPDIR=$work/fetch timeout 120 setpriv --reuid=nobody --regid=nogroup --clear-groups \
        /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --retries 0 --timeout 20 \
        --no-deps --no-binary :all: --no-build-isolation --require-hashes -r requirements.txt -d .) >"$work/pip.log" 2>&1
}
chmod 711 "$work"
if fetch && [ -f "$work/fetch/$archive" ]; then
    cp "$work/fetch/$archive" "$work/$archive"
    say "downloaded from PyPI: $archive"
else
    cp "examples/demo/$archive" "$work/$archive"
    say "not downloaded from PyPI, so this is the copy kept in examples/demo ($(tail -n 1 "$work/pip.log"))"
fi
echo "$sha256  $work/$archive" | sha256sum --quiet --check
say "SHA-256 is as pinned: $sha256"

for folder in before project; do
    mkdir "$work/$folder"
    tar -xzf "$work/$archive" -C "$work/$folder" --strip-components=1 --no-same-owner
    cp examples/demo/test_int_base.py "$work/$folder/"
done

# In a sandbox of its own, without the model: the package's tests and the new one. Prints the tail of what it says.
tests() {
    local code=0
    "$exuvia" sandbox run --data-dir "$data" --policy default --mount-ro "$1" --timeout 2m -- \
        /bin/sh -c 'cd "$1" && exec python3 -B -m unittest' sh "$1" >"$work/tests.log" 2>&1 || code=$?
    tail -n 3 "$work/tests.log" | sed 's/^/  /'
    return "$code"
}

heading "before: the tests in a fresh sandbox"
if tests "$work/project"; then
    die "the tests pass already: there is nothing to fix"
fi

heading "the task: \"this test fails, fix it\""
case $model in
scripted:*) say "The model is SCRIPTED: a recording is replayed, no model is asked. Set EXUVIA_MODEL for a real one." ;;
*) say "The model is $model." ;;
esac
"$exuvia" run examples/demo/task.toml --data-dir "$data" --workspace "$work/project" --model "$model" \
    --check 'python3 -B -m unittest' --apply

heading "after: the tests in a fresh sandbox"
tests "$work/project" || die "the tests do not pass: $(cat "$work/tests.log")"

heading "what changed"
(cd "$work" && diff -ru before project) || [ $? -eq 1 ]

heading "the record"
"$exuvia" audit verify --data-dir "$data"
say "data directory, with the audit log: $data"
case $model in
scripted:*) say "The model was SCRIPTED (examples/demo/fix.jsonl)." ;;
esac
