#!/usr/bin/env bash
# Builds a root file system out of this host's own Debian or Ubuntu packages, with no registry of images. Called by the
# `build.sh` of the folders beside it:
#
#   debian.sh FOLDER OUTPUT-DIRECTORY      needs root, mmdebstrap, zstd
#
# Leaves OUTPUT-DIRECTORY/rootfs.tar.zst (for `exuvia image import`, or `tar:FILE`). Where an engine answers, the local image
# `exuvia/NAME` too, unless EXUVIA_TAR_ONLY is set, as `exuvia image build` does. EXUVIA_EXTRA_PACKAGES (`gcc,make`) is added to
# FOLDER/packages.txt.
set -euo pipefail

folder=$(cd "$1" && pwd)
name=$(basename "$folder")
out=${2:-${XDG_CACHE_HOME:-$HOME/.cache}/exuvia/images/$name}
packages=$(grep -v '^#' "$folder/packages.txt" | paste -sd,)
[ -z "${EXUVIA_EXTRA_PACKAGES:-}" ] || packages="$packages,$EXUVIA_EXTRA_PACKAGES"
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
echo "building the $name image from ${sources[0]} ($VERSION_CODENAME)"
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

if [ -n "${EXUVIA_TAR_ONLY:-}" ]; then
    exit 0
elif command -v docker >/dev/null && docker version >/dev/null 2>&1; then
    docker import "$part/rootfs.tar" "exuvia/$name:latest" >/dev/null
    echo "image:  exuvia/$name:latest"
else
    echo "no Docker engine answers: not imported"
fi
