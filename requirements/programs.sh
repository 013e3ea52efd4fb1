#!/usr/bin/env bash
# programs.sh PROGRAM=PACKAGE...: makes sure that each program is there. As root it installs the
# Debian package of a missing one; for anyone else it says in one sentence what to install.
set -euo pipefail
# Where Debian keeps programs that an ordinary user's PATH leaves out.
PATH=$PATH:/usr/sbin:/sbin

missing=()
for pair; do
  command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
done
[ "${#missing[@]}" -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "Programs are missing; as root on Debian or Ubuntu: apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]} ..."
install_missing() {
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" \
    </dev/null >/dev/null
}
install_missing 2>/dev/null || { apt-get update -qq && install_missing; }
