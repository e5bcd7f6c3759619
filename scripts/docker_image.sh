#!/usr/bin/env bash
# Builds an image with docker and saves it, as E2E_BUILD and E2E_GPU_BUILD want it.
# usage: scripts/docker_image.sh CONTEXT NAME:TAG OUT.tar --target TARGET
set -euo pipefail
[ $# -eq 5 ] && [ "$4" = --target ] || {
  echo "usage: $0 CONTEXT NAME:TAG OUT.tar --target TARGET" >&2
  exit 2
}
docker build --target "$5" --tag "localhost/$2" "$1"
docker save --output "$3" "localhost/$2"
