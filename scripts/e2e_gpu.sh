#!/usr/bin/env bash
# `make e2e-gpu` on a machine with GPUs that reaches no package index: from a bare checkout, with the machine's own Python and
# torch, and with the wheels that scripts/pack_gpu.sh packed. Needs root.
# usage: E2E_NODE=FILE HOST_IMAGE=FILE scripts/e2e_gpu.sh [PYTEST ARGUMENTS]
#   E2E_NODE=FILE      the program that makes a node: FILE up DIR --gpus real (tests/e2e/test_gpu.py); a setup.sh beside it,
#                      if there is one, prints where the Kubernetes programs are
#   HOST_IMAGE=FILE    the program that packs folders into an image (tests/e2e/host_image.sh)
#   GPU_DIR=.gpu       what pack_gpu.sh made
#   SITE=/tmp/mini-infer-e2e-site   where it is unpacked, once
set -euo pipefail
cd "$(dirname "$0")/.."
: "${E2E_NODE:?E2E_NODE must name the program that makes a node}" "${HOST_IMAGE:?HOST_IMAGE must name the program that packs images}"
site=${SITE:-/tmp/mini-infer-e2e-site} python=${PYTHON:-python3}
if [ ! -f "$site/.installed" ]; then
  $python -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "${GPU_DIR:-.gpu}"/wheels/*.whl
  touch "$site/.installed"
fi
[ -n "${KUBEBUILDER_ASSETS:-}" ] || { [ -x "$(dirname "$E2E_NODE")/setup.sh" ] && eval "$("$(dirname "$E2E_NODE")/setup.sh")"; }
export HOST_PACKAGES=$site E2E_GPU_BUILD=${E2E_GPU_BUILD:-$PWD/tests/e2e/host_image.sh} PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD/contract:$PWD/engine:$PWD/gateway:$PWD/operator:$site${PYTHONPATH:+:$PYTHONPATH}
exec $python -m pytest -s -p no:cacheprovider -m 'e2e and gpu' tests/e2e/test_gpu.py "$@"
