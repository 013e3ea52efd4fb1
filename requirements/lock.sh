#!/usr/bin/env bash
# Rewrites control.lock and dev.lock from pyproject.toml: exact versions with the hashes of all
# their files, for every Python from 3.11 on. Versions already locked are kept unless they no
# longer fit; `requirements/lock.sh --upgrade` takes the newest. Needs a package index.
set -euo pipefail
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet 'uv>=0.13,<0.14'

compile() { # OUTPUT [uv options...]
  "$scratch/venv/bin/uv" pip compile pyproject.toml --quiet --universal --python-version 3.11 \
    --generate-hashes --no-emit-index-url --no-emit-find-links \
    --custom-compile-command requirements/lock.sh --output-file "$@"
}

compile requirements/control.lock "$@"
compile requirements/dev.lock --extra dev --constraint requirements/control.lock "$@"
