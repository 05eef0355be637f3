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
recording=examples/demo/fix.jsonl
model=${EXUVIA_MODEL:-scripted:$recording}
data=${EXUVIA_DATA_DIR:-$state/demo}
suite='python3 -B -m unittest'

heading() { printf '\n== %s\n' "$*"; }
who() {
    case $model in
    scripted:*) say "The model is SCRIPTED: ${model#scripted:} is replayed and no model is asked. Set EXUVIA_MODEL for a real one." ;;
    *) say "The model is $model, asked for real." ;;
    esac
}

heading "set-up"
bash scripts/setup.sh demo
[ -x "$CARGO_TARGET_DIR/debug/exuvia" ] || say "building exuvia, which takes some minutes the first time"
cargo build --locked --quiet
exuvia=$CARGO_TARGET_DIR/debug/exuvia

# Not below /tmp, which a sandbox has one of its own of.
work=$(mktemp -d "$cache/demo.XXXXXX")
download=$(mktemp -d "${TMPDIR:-/tmp}/exuvia-demo.XXXXXX")
trap 'rm -rf "$work" "$download"' EXIT

heading "the package: $package $version"
# pip checks the hash before it looks inside. It then asks the package for its metadata, which runs the package's own
# set-up: as `nobody`, in an empty directory.
fetch() {
    printf '%s==%s --hash=sha256:%s\n' "$package" "$version" "$sha256" >"$download/requirements.txt"
    chown -R nobody "$download"
    (cd "$download" && HOME=$download TMPDIR=$download timeout 120 setpriv --reuid=nobody --regid=nogroup --clear-groups \
        /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir --retries 0 --timeout 20 \
        --no-deps --no-binary :all: --no-build-isolation --require-hashes -r requirements.txt -d .) >"$work/pip.log" 2>&1
}
if fetch && [ -f "$download/$archive" ]; then
    cp "$download/$archive" "$work/$archive"
    say "downloaded from PyPI: $archive"
else
    cp "examples/demo/$archive" "$work/$archive"
    say "not downloaded from PyPI, so this is the copy kept in examples/demo: $archive"
    say "(pip says: $(tail -n 1 "$work/pip.log"))"
fi
echo "$sha256  $work/$archive" | sha256sum --quiet --check
say "its SHA-256 is as pinned: $sha256"
project=$work/$package-$version
mkdir "$project"
tar -xzf "$work/$archive" -C "$project" --strip-components=1 --no-same-owner
cp examples/demo/test_int_base.py "$project/"

# In a sandbox of its own, without the model: the package's own tests and the new one.
tests() {
    "$exuvia" sandbox run --data-dir "$data" --policy default --mount-ro "$project" --timeout 2m -- \
        /bin/sh -c 'cd "$1" && exec '"$suite" sh "$project" >"$work/tests.log" 2>&1
}
indented() { sed 's/^/  /' "$@"; }

heading "before: \`$suite\` in a fresh sandbox"
if tests; then
    die "the tests pass already: there is nothing to fix"
fi
grep -q '^FAILED' "$work/tests.log" || die "the tests did not run: $(cat "$work/tests.log")"
sed -n '/^=====/,$p' "$work/tests.log" | indented

heading "the task: \"this test fails, fix it\""
who
if ! "$exuvia" run examples/demo/task.toml --data-dir "$data" --workspace "$project" --model "$model" \
    --check "$suite" --apply >"$work/report"; then
    cat "$work/report"
    die "the run did not finish its task"
fi

heading "after: \`$suite\` in a fresh sandbox"
cmp examples/demo/test_int_base.py "$project/test_int_base.py" || die "the test was changed, not the package"
tests || die "the tests do not pass: $(cat "$work/tests.log")"
tail -n 3 "$work/tests.log" | indented

heading "the run: steps, outcome, what changed"
who
case $model in
scripted:*) say "Its tokens are estimated from the length of the messages." ;;
esac
sed '/./,$!d' "$work/report"

heading "the record"
"$exuvia" audit verify --data-dir "$data"
