# Sourced by the other scripts: where things outside the checkout live, and a few words.

cache=${XDG_CACHE_HOME:-$HOME/.cache}/exuvia
state=${XDG_STATE_HOME:-$HOME/.local/state}/exuvia
# Tools that set-up fetched; cargo finds `cargo-NAME` through it.
tools=$cache/tools
export PATH="$tools:$PATH"
# As the Makefile has it, for scripts that are run by themselves.
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}

say() { printf '%s\n' "$*"; }
die() { printf '%s\n' "$*" >&2; exit 1; }
