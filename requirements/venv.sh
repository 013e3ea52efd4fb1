#!/usr/bin/env bash
# venv.sh control|dev: makes .venv, or brings it up to the lock of that name. Returns at once when
# it is up to date: a stamp holds the lock's hash and the place of the clone, because a virtual
# environment works only where it was made.
set -euo pipefail
cd "$(dirname "$0")/.."
lock=requirements/$1.lock

want="$(sha256sum < "$lock") $PWD"
[ "$(cat ".venv/.$1.stamp" 2>/dev/null)" != "$want" ] || exit 0

# Another clone's environment, or one whose interpreter is gone, is not repaired but replaced; before
# anything else, for make has its programs on PATH.
if [ -d .venv ] && { [ "$(cat .venv/.place 2>/dev/null)" != "$PWD" ] || ! .venv/bin/python -c ''; }; then
  rm -rf .venv
fi

find_python() {
  local name
  for name in python3.11 python3.12 python3.13 python3.14 python3; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  echo "Python 3.11 or newer is needed: on Debian 12 or Ubuntu 24.04, apt-get install python3" >&2
  return 1
}

python=$(find_python)
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
  if [ "$(id -u)" != 0 ]; then
    echo "$python has no venv module: apt-get install $package" >&2
    exit 1
  fi
  echo "installing $package ..."
  apt-get install -qq -y "$package" >/dev/null ||
    { apt-get update -qq && apt-get install -qq -y "$package" >/dev/null; }
fi

[ -d .venv ] || "$python" -m venv .venv
echo "$PWD" > .venv/.place

echo "installing $lock into .venv ..."
.venv/bin/python -m pip install -qq --require-hashes -r "$lock"

# The clone itself is the installed package: an edit is used at once, and nothing is built.
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD" > "$site/seatrial.pth"
echo "$want" > ".venv/.$1.stamp"
