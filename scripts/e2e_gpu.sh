#!/usr/bin/env bash
# `make e2e-gpu` on a machine with GPUs that reaches no package index: from a bare checkout, with the machine's own Python and
# torch, and with the wheels that scripts/pack_gpu.sh packed (and `pack_gpu.sh --nixl`, for prefill and decode). Needs root.
# usage: E2E_NODE=FILE HOST_IMAGE=FILE scripts/e2e_gpu.sh [PYTEST ARGUMENTS]
#   E2E_NODE=FILE      the program that makes a node: FILE up DIR --gpus real (tests/e2e/test_gpu.py); a setup.sh beside it,
#                      if there is one, prints where the Kubernetes programs are
#   HOST_IMAGE=FILE    the program that packs folders into an image (tests/e2e/host_image.sh)
#   GPU_DIR=.gpu GPU_NIXL_DIR=.gpu-nixl   what pack_gpu.sh made
#   SITE=/tmp/mini-infer-site   where it is unpacked, once: what benchmarks/gpu_run.sh has unpacked there is used, too, so
#                      either folder may come in a call of its own, before this one
#   E2E_GPU_MODELS=qwen2.5-7b   shapes to serve beside the demo model (default: qwen3-0.6b,qwen2.5-7b)
set -euo pipefail
cd "$(dirname "$0")/.."
: "${E2E_NODE:?E2E_NODE must name the program that makes a node}" "${HOST_IMAGE:?HOST_IMAGE must name the program that packs images}"
site=${SITE:-/tmp/mini-infer-site} python=${PYTHON:-python3}
mkdir -p "$site"
unpack() { # MARK FOLDER WHEELS...: once
  [ -f "$site/$1" ] || [ ! -e "$3" ] || {
    $python -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site/$2" "${@:3}" && touch "$site/$1"
  }
}
unpack wheels-installed ours "${GPU_DIR:-.gpu}"/wheels/*.whl
unpack nixl-installed nixl "${GPU_NIXL_DIR:-.gpu-nixl}"/wheels/*.whl
packages=
for folder in "$site/ours" "$site/nixl"; do [ ! -d "$folder" ] || packages+=${packages:+:}$folder; done
if [ -z "${KUBEBUILDER_ASSETS:-}" ] && [ -x "$(dirname "$E2E_NODE")/setup.sh" ]; then
  eval "$("$(dirname "$E2E_NODE")/setup.sh")"
fi
export HOST_PACKAGES=$packages E2E_GPU_BUILD=${E2E_GPU_BUILD:-$PWD/tests/e2e/host_image.sh} PYTHONUNBUFFERED=1
ours=$(printf "%s:" "$PWD"/{contract,process,web,prompts,apis,engine,gateway,operator})
export PYTHONPATH=${ours%:}${packages:+:$packages}${PYTHONPATH:+:$PYTHONPATH}
exec $python -m pytest -s -p no:cacheprovider -m 'e2e and gpu' tests/e2e/test_gpu.py "$@"
