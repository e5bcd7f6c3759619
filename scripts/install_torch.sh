#!/usr/bin/env bash
# Gives a Python the smallest torch that its machine can use; the images and `make install` both come through here.
# usage: install_torch.sh PYTHON CONSTRAINTS
# An existing torch is kept. With an NVIDIA driver: the pair of torch and Triton in constraints-gpu.txt beside CONSTRAINTS,
# with which all figures were measured. Without one a CPU build is looked for, so that
# gigabytes of CUDA packages are not downloaded for nothing: first wherever pip is set up to look, then where uv knows it to be.
set -euo pipefail
python=${1:?python executable} constraints=${2:?constraints file}
oldest=2.11
version=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$constraints")

say() { printf '    torch: %s\n' "$*"; }

if found=$("$python" - "$oldest" 2>/dev/null <<'PY'
import sys
import torch
numbers = lambda text: tuple(int(part) for part in text.split("+")[0].split(".")[:2])
print(torch.__version__)
sys.exit(numbers(torch.__version__) < numbers(sys.argv[1]))
PY
); then
  say "$found is here already, kept"
  exit
fi

has_nvidia_driver() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

if has_nvidia_driver; then
  pinned=$(dirname "$constraints")/constraints-gpu.txt
  mapfile -t pair < <(grep -oE '^(torch|triton)==[^ ;]+' "$pinned")
  say "NVIDIA driver found: the CUDA builds that were measured, ${pair[*]} (about 3 GB to download)"
  exec "$python" -m pip install "${pair[@]}"
fi
if [ "$(uname -s)" != Linux ]; then
  exec "$python" -m pip install -c "$constraints" "torch==$version" # only Linux wheels bring CUDA along
fi

say "no NVIDIA driver: looking for the CPU build of $version"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
grep -v '^torch==' "$constraints" >"$scratch/constraints.txt"
if "$python" -m pip install -c "$scratch/constraints.txt" "torch==$version+cpu" 2>/dev/null; then
  exit
fi
say "pip is set up with no source for it; asking uv, which knows PyTorch's own"
if "$python" -m pip install --quiet --target "$scratch/uv" uv &&
  "$scratch/uv/bin/uv" pip install --python "$python" --torch-backend cpu -c "$constraints" "torch==$version"; then
  exit
fi
say "no CPU build can be had from here: the CUDA build is downloaded instead (about 3 GB; it runs on a CPU too)"
"$python" -m pip install -c "$constraints" "torch==$version"
