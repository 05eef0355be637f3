#!/usr/bin/env bash
# Runs the sandbox tests where control groups are version 2 alone: in a virtual machine with Debian's own kernel, made here
# out of Debian packages. Needs root, Debian 12/13, and ten minutes: qemu translates each instruction, so that it
# works without hardware virtualisation too.
#
#   scripts/cgroup-v2.sh [TEST-FILTER…]
#
# One test is left out: it kills servers after so many milliseconds, and none has got anywhere by then at such a speed.
#
# What it prints is what the machine said; it fails when a test did.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib.sh

[ "$(id -u)" = 0 ] || die "it needs root"
packages=()
command -v qemu-system-x86_64 >/dev/null || packages+=(qemu-system-x86)
command -v mmdebstrap >/dev/null || packages+=(mmdebstrap)
command -v cpio >/dev/null || packages+=(cpio)
[ ${#packages[@]} -eq 0 ] || DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${packages[@]}" >/dev/null

mkdir -p "$cache"
work=$(mktemp -d "$cache/cgroup-v2.XXXXXX")
trap 'rm -rf "$work"' EXIT
root=$work/root

# --- the kernel: what the cloud package of this release depends on
kernel=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
[ -n "$kernel" ] || die "there is no package linux-image-cloud-amd64: run apt-get update"
(cd "$work" && apt-get -qq download -o APT::Sandbox::User=root "$kernel" && dpkg-deb -x "$kernel"_*.deb kernel)
vmlinuz=$(echo "$work"/kernel/boot/vmlinuz-*)

# --- the programs: the tests, and exuvia at the very path that they know it by
say "building the tests"
built=$(cargo test --locked --test sandbox --no-run --message-format=json 2>/dev/null |
    python3 -c 'import json, sys
for line in sys.stdin:
    found = json.loads(line)
    if found.get("executable") and found["target"]["name"] in ("sandbox", "exuvia"):
        print(found["target"]["kind"][0], found["executable"])')
tests=$(awk '$1 == "test" { print $2 }' <<<"$built")
exuvia=$(awk '$1 == "bin" { print $2 }' <<<"$built")
[ -n "$tests" ] && [ -n "$exuvia" ] || die "cargo built no tests"

# --- the system: essential packages and what the kernels of languages need, in an initramfs
say "building the system"
mmdebstrap --quiet --mode=root --variant=essential --include=python3,nodejs,git,mount,kmod,e2fsprogs \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --skip=output/dev \
    --customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*' \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$root"
install -D "$tests" "$root/tests"
install -D "$exuvia" "$root$exuvia"
strip "$root/tests" "$root$exuvia"
# Overlays, and volumes that are images: loop devices and ext4.
modules=$(cd "$work/kernel" && echo lib/modules/*)
install -d "$root/$modules/kernel/drivers"
cp -r "$work/kernel/$modules"/modules.{order,builtin,builtin.modinfo} "$root/$modules/"
cp -r "$work/kernel/$modules"/kernel/{fs,lib,crypto} "$root/$modules/kernel/"
cp -r "$work/kernel/$modules/kernel/drivers/block" "$root/$modules/kernel/drivers/"
chroot "$root" depmod "${modules##*/}"
mkdir -p "$root/new"
printf '%q ' "$@" >"$root/filter"
echo "$exuvia" >"$root/exuvia"

# The kernel starts this. The root of an initramfs cannot be left by pivot_root, which sandboxes need: so a bind of it is laid
# over it. A plain chroot would not do, since no user namespace can be made in one.
cat >"$root/init" <<'INIT'
#!/bin/sh
mount --bind / /new
cd /new
mount --move . /
exec chroot . /inside
INIT
cat >"$root/inside" <<'INSIDE'
#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root EXUVIA_REQUIRE_ALL=1 RUST_BACKTRACE=0
mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /tmp
mount -t tmpfs none /run
modprobe -a overlay loop ext4 quota_v2
# A data directory whose file system counts projects.
truncate -s 1G /tmp/projects.img
mkfs.ext4 -q -O quota,project -E quotatype=prjquota /tmp/projects.img
mkdir /projects
mount -o loop,prjquota /tmp/projects.img /projects
exuvia=$(cat /exuvia)
{
    echo "== kernel $(uname -r); controllers: $(cat /sys/fs/cgroup/cgroup.controllers)"
    echo "== exuvia doctor"
    "$exuvia" doctor --data-dir /tmp/data
    echo "== exuvia sandbox run: memory"
    "$exuvia" sandbox run --data-dir /tmp/data -- python3 -c 'x = bytearray(2 << 30)'
    echo "exit code $?"
    echo "== exuvia sandbox run: processes"
    "$exuvia" sandbox run --data-dir /tmp/data -- sh -c 'for i in $(seq 400); do sleep 100 & done; echo not reached' 2>&1 | sort | uniq -c
    echo "== exuvia sandbox run: a disk with a project quota"
    printf 'format_version = 1\nname = "small"\nextends = "default"\n[limits]\ndisk = "32MiB"\ndisk_kind = "project"\n' >/tmp/small.toml
    "$exuvia" sandbox run --data-dir /projects/data --policy /tmp/small.toml -- \
        sh -c 'cat /dev/zero >/workspace/big; stat -c %s /workspace/big; df -m /workspace | tail -n 1'
    echo "== tests/sandbox: disks with project quotas"
    TMPDIR=/projects /tests --test-threads=1 --color=never --nocapture disk::
    echo "== these ended with $?"
    echo "== tests/sandbox"
    eval "set -- $(cat /filter)"
    /tests --test-threads=1 --color=never --skip what_a_killed_server_leaves "$@"
    echo "== tests ended with $?"
    echo "== left behind: groups [$(cd /sys/fs/cgroup/exuvia && ls -d */ 2>/dev/null)], sandboxes [$(ls /tmp/data/sandboxes)]"
} 2>&1
echo o >/proc/sysrq-trigger
sleep 60
INSIDE
chmod 755 "$root/init" "$root/inside"
(cd "$root" && find . -print0 | cpio --quiet --null -o -H newc) >"$work/initramfs"

say "starting the machine"
timeout 1500 qemu-system-x86_64 -accel tcg,thread=multi -m 3072 -smp 2 -display none -no-reboot -nodefaults \
    -serial file:"$work/console" -kernel "$vmlinuz" -initrd "$work/initramfs" \
    -append 'console=ttyS0 quiet loglevel=1 panic=-1 sysrq_always_enabled=1' || true
tr -d '\r' <"$work/console" | sed -n '/^== kernel/,$p'
! grep -q "not with .project." "$work/console" || die "no project quota was tried"
grep -q '^== these ended with 0' "$work/console" && grep -q '^== tests ended with 0' "$work/console" || die "the tests did not pass; the end of the console: $(tail -n 5 "$work/console")"
