#!/usr/bin/env bash
# Writes constraints.txt from pyproject.toml, for every supported Python at once. Versions stay unless UPGRADE=1.
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
git --no-pager diff --stat constraints.txt
