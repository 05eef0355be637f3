#!/usr/bin/env bash
# What of Exuvia there is on this host, in a stable form: one thing a line, sorted.
#
#   host-state.sh              prints it
#   host-state.sh save FILE    writes it to FILE
#   host-state.sh compare FILE prints what has come (+) and gone (-) since, and fails when there is anything
#
# `compare` waits for what is on its way: a killed process is awaited, a file system taken apart (EXUVIA_SETTLE seconds, 20).
set -euo pipefail

here=$(dirname "$(readlink -f "$0")")
temp=${TMPDIR:-/tmp}

containers() {
    command -v docker >/dev/null || return 0
    # An engine that is not there has none of ours.
    timeout 10 docker ps --all --no-trunc --filter label=exuvia.sandbox --format 'container {{.Names}}' 2>/dev/null || true
}

# Of this namespace's table: what a volume mounts, and what else bears the name of a sandbox.
mounts() {
    awk '$5 ~ /\/work\/sbx_[a-z0-9]+\/disk$/ || $5 ~ /\/sandboxes\/sbx_/ { print "mount " $5 }' /proc/self/mountinfo
}

groups() {
    local root
    awk '$3 ~ /^cgroup2?$/ { print $2 }' /proc/self/mounts | while read -r root; do
        [ -d "$root/exuvia" ] || continue
        find "$root/exuvia" -mindepth 1 -maxdepth 1 -type d 2>/dev/null | sed 's/^/cgroup /'
    done
}

# Named network namespaces; those without a name end with their processes, which are listed.
namespaces() {
    find /run/netns /var/run/netns -maxdepth 1 -name '*exuvia*' 2>/dev/null | sed 's/^/netns /' || true
}

loops() {
    local file
    for file in /sys/block/loop*/loop/backing_file; do
        [ -e "$file" ] || continue
        # The image of a volume has no name: `DATA/disks/#INODE (deleted)`.
        awk -v device="$(echo "$file" | cut -d/ -f4)" '/\/disks\/.*\(deleted\)$/ { print "loop " device " " $0 }' "$file" 2>/dev/null || true
    done
}

# Data directories in the place for temporary files.
folders() {
    local dir
    for dir in "$temp"/.tmp*/ "$temp"/tmp.*/; do
        if [ -e "$dir/exuvia.db" ] || [ -d "$dir/sandboxes" ] || [ -d "$dir/disks" ]; then echo "folder ${dir%/}"; fi
    done
}

# Servers, launchers and guests; by what they are, not by number, so that two states compare. Not the tools of this script.
processes() {
    local process name words
    for process in /proc/[0-9]*; do
        name=$(cat "$process/comm" 2>/dev/null) || continue
        case $name in
            exuvia | exuvia-guest | guest | guest-[0-9a-f]*) ;;
            *) continue ;;
        esac
        words=$(tr '\0' ' ' <"$process/cmdline" 2>/dev/null) || continue
        [ -z "$words" ] || echo "process ${process#/proc/} $words"
    done
}

# Ranges of user ids that a living process holds; one that the dead have left is free again.
claims() {
    local file pid
    for file in /run/exuvia/identities/[0-9]*; do
        pid=$(grep -o '"pid":[0-9]*' "$file" 2>/dev/null | cut -d: -f2) || continue
        if [ -d "/proc/$pid" ]; then echo "claim $file"; fi
    done
}

state() {
    { containers; mounts; groups; namespaces; loops; folders; processes; claims; } | LC_ALL=C sort
}

difference() {
    diff --unchanged-line-format= --old-line-format='- %L' --new-line-format='+ %L' "$1" <(state) || true
}

case ${1:-} in
    "") state ;;
    save) state >"${2:?a file to write}" ;;
    compare)
        saved=${2:?a file that save wrote}
        [ -r "$saved" ] || { echo "host-state: cannot read $saved" >&2; exit 2; }
        deadline=$(($(date +%s) + ${EXUVIA_SETTLE:-20}))
        while found=$(difference "$saved") && [ -n "$found" ] && [ "$(date +%s)" -lt "$deadline" ]; do sleep 0.5; done
        [ -z "$found" ] && exit 0
        printf '%s\n' "$found"
        exit 1
        ;;
    *)
        sed -n '2,8s/^# \{0,1\}//p' "$here/host-state.sh" >&2
        exit 2
        ;;
esac
