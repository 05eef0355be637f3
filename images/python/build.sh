#!/usr/bin/env bash
# Builds the `python` image out of this host's own Debian or Ubuntu packages, with no registry of images:
# Python 3 with pip and pytest, git. Leaves rootfs.tar.zst (for `tar:FILE`) and, where an engine answers, the local image
# `exuvia/python` (for `docker:exuvia/python`).
#
#   images/python/build.sh [OUTPUT-DIRECTORY]      needs root, mmdebstrap, zstd
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
out=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/exuvia/images/python}
packages=$(grep -v '^#' "$here/packages.txt" | paste -sd,)
. /etc/os-release

# The host's own package sources, so that its mirror and its keys count.
sources=()
for file in /etc/apt/sources.list.d/"$ID".sources /etc/apt/sources.list; do
    if [ -s "$file" ]; then
        sources=("$file")
        break
    fi
done
[ ${#sources[@]} -eq 1 ] || { echo "no package sources of $ID found below /etc/apt" >&2; exit 1; }

mkdir -p "$out"
part=$(mktemp -d "$out/.part.XXXXXX")
trap 'rm -rf "$part"' EXIT
echo "building the python image from ${sources[0]} ($VERSION_CODENAME)"
# Without documentation, package lists and caches; device nodes are the sandbox's own.
mmdebstrap --quiet --mode=root --variant=minbase --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --skip=output/dev --customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/etc/apt/sources.list.d/* && rm -f "$1"/etc/resolv.conf "$1"/etc/hostname' \
    --customize-hook='mkdir -p "$1"/workspace "$1"/.exuvia' \
    "$VERSION_CODENAME" "$part/rootfs.tar" "${sources[@]}"
zstd --quiet -T0 -10 "$part/rootfs.tar" -o "$part/rootfs.tar.zst"
mv "$part/rootfs.tar.zst" "$out/rootfs.tar.zst"
echo "rootfs: $out/rootfs.tar.zst"

if command -v docker >/dev/null && docker version >/dev/null 2>&1; then
    docker import --change 'CMD ["python3"]' "$part/rootfs.tar" exuvia/python:latest >/dev/null
    echo "image:  exuvia/python:latest"
else
    echo "no Docker engine answers: not imported"
fi
