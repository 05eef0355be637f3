#!/usr/bin/env bash
# gVisor's `runsc`, for sandboxes with isolation `gvisor`: one static file, out of the Debian suite that has a release which
# runs on today's kernels.
#
#   scripts/runsc.sh fetch   puts it into the tools folder; the last line printed is its path
#   scripts/runsc.sh path    prints the path, 1 when it is not there
#
# The mirror is the one that this machine's own apt is set up with. The package is fetched by apt through a root of its own, so
# the archive's signature and the package's hash are checked as for any other, and nothing is installed: one file is taken.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

# Its runsc is of July 2024, with the platform `systrap`. The suite before has one of 2022, which knows only ptrace.
suite=trixie
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
target=$tools/runsc

works() { [ -x "$target" ] && "$target" --version >/dev/null 2>&1; }

# The first mirror of Debian's main archive, not of its security archive, whose suites are named otherwise.
mirror() {
    apt-get indextargets --format '$(ORIGIN) $(COMPONENT) $(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        while read -r origin component codename uri; do
            [ "$origin $component" = "Debian main" ] || continue
            case $codename in *-security | *-updates | *-backports) continue ;; esac
            printf '%s\n' "$uri"
        done | sed -n 1p
}

fetch() {
    works && return
    local uri root
    uri=$(mirror)
    if [ -z "$uri" ]; then
        # The lists may never have been fetched.
        apt-get -qq update >/dev/null 2>&1 || true
        uri=$(mirror)
    fi
    [ -n "$uri" ] || die "apt on this machine has no Debian mirror: put a \`runsc\` of gVisor's own releases on the PATH"
    [ -r "$keyring" ] || die "no $keyring to check the archive with: install the package debian-archive-keyring"
    mkdir -p "$tools"
    root=$(mktemp -d "${TMPDIR:-/tmp}/exuvia-runsc.XXXXXX")
    trap 'rm -rf "$root"' RETURN
    # apt fetches as a user of its own.
    chmod 755 "$root"
    mkdir -p "$root/lists/partial" "$root/cache/archives/partial" "$root/got"
    printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$uri" "$suite" >"$root/sources.list"
    : >"$root/status"
    local apt=(apt-get -qq
        -o "Dir::Etc::SourceList=$root/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o "Dir::State::Lists=$root/lists" -o "Dir::State::status=$root/status" -o "Dir::Cache=$root/cache"
        -o APT::Get::AllowUnauthenticated=false -o Acquire::AllowInsecureRepositories=false -o Acquire::Languages=none
        -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false)
    "${apt[@]}" update </dev/null 9>&- || die "the suite $suite of $uri cannot be read"
    chown -R _apt "$root/got" 2>/dev/null || true
    (cd "$root/got" && "${apt[@]}" download runsc </dev/null 9>&-) || die "$uri has no runsc in $suite that passes its checks"
    dpkg-deb --fsys-tarfile "$root"/got/runsc_*.deb | tar -xO ./usr/bin/runsc >"$root/runsc"
    chmod 755 "$root/runsc"
    "$root/runsc" --version >/dev/null || die "the runsc of $suite does not run here"
    # Another folder, maybe another file system: copied beside, then named.
    cp "$root/runsc" "$target.new" && mv "$target.new" "$target"
    say "fetched $("$target" --version | sed -n 1p) from the suite $suite"
}

case ${1:-} in
fetch)
    fetch
    say "$target"
    ;;
path) works && say "$target" ;;
*) die "usage: $0 fetch|path" ;;
esac
