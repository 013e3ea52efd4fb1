#!/bin/bash
# Make the rehearsal hosts' root image once, and print where it lies. Usage: make.sh
#
# The image is named by its recipe, so a changed recipe makes a new one and an unchanged one is
# found again. It is kept outside the clone, in $XDG_CACHE_HOME/seatrial or ~/.cache/seatrial.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
suite=bookworm

main() {
  local image
  cache=${XDG_CACHE_HOME:-$HOME/.cache}/seatrial
  image=$cache/image-$(recipe_digest)/root.squashfs
  if [[ ! -e $image ]]; then
    mkdir -p "$cache"
    exec 9>"$cache/image.lock"
    flock 9 # a second caller waits here and then finds the image
    [[ -e $image ]] || make_image "$image" >&2
  fi
  echo "$image"
}

recipe_digest() {
  { echo "$suite" && cat "$here/packages.txt" "$here/configure.sh" "$here/make.sh"; } |
    sha256sum | cut -c1-16
}

make_image() {
  local image=$1 packages
  packages=$(sed '/^#/d; /^$/d' "$here/packages.txt" | paste -sd,)
  echo "Making the root image of the rehearsal hosts (once; two to four minutes on two cores)"
  work=$(mktemp -d "$cache/making-image.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  chmod 755 "$work"
  # force-unsafe-io: a half-made image is thrown away, so nothing needs to be synced.
  mmdebstrap --mode=root --variant=minbase --format=directory \
    --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
    --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --include="$packages" \
    --customize-hook="$here/configure.sh \"\$1\"" \
    "$suite" "$work/root"
  mksquashfs "$work/root" "$work/root.squashfs" -comp zstd -no-progress -quiet
  rm -rf "$work/root"
  rm -rf "$(dirname "$image")"
  mv "$work" "$(dirname "$image")"
  trap - EXIT
}

main
