#!/usr/bin/env bash
# Writes constraints.txt from pyproject.toml, for every supported Python at once. Versions stay unless UPGRADE=1. From it
# come constraints-control-plane.txt and constraints-engine.txt, with hashes, which images are built from.
# usage: scripts/lock.sh
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
.venv/bin/python -m pip install --quiet --target "$scratch/uv" uv
head=$(grep '^#' constraints.txt)
cp constraints.txt "$scratch/constraints.txt"
"$scratch/uv/bin/uv" pip compile --quiet --universal --python-version 3.11 --extra all --extra dev --no-header --no-annotate \
  ${UPGRADE:+--upgrade} --output-file "$scratch/constraints.txt" pyproject.toml
{ echo "$head"; cat "$scratch/constraints.txt"; } >constraints.txt
with_hashes() { # with_hashes EXTRA...: what these extras need, to standard output
  "$scratch/uv/bin/uv" pip compile --quiet --universal --python-version 3.11 "${@/#/--extra=}" --no-header --no-annotate \
    --generate-hashes --constraint constraints.txt pyproject.toml
}
note="# Written by scripts/lock.sh, for pip install --no-deps --require-hashes."
{ echo "$note"; with_hashes gateway operator; } >constraints-control-plane.txt
{ echo "$note"; with_hashes engine disaggregated | .venv/bin/python scripts/without_torch.py; } >constraints-engine.txt
git --no-pager diff --stat 'constraints*.txt'
