#!/usr/bin/env bash
# Packs vLLM for a Hopper GPU machine that has torch, triton and transformers but no package index: .gpu-peer/libraries.tar.xz
# (its compiled kernels, those of experts among them, for sm_90 alone: 21 MB) and .gpu-peer/packages.tar.xz (the rest, 24 MB).
# There, PEER_PARTS=.gpu-peer benchmarks/gpu_run.sh unpacks and uses them; each archive may come in a call of its own.
# usage: scripts/pack_peer.sh PRESENT
#   PRESENT          a file that names the packages which that machine has
#   PEER=vllm==0.26.0 TORCH=torch==2.11.0    what is packed, and what it was built for
#   PEER_DIR=.gpu-peer    where to
#   PYTHON=python3.12     of the GPU machine's version
#   WORK=DIR              keep the environment that packages are taken from (8 GB): the next time takes a minute
set -euo pipefail
cd "$(dirname "$0")/.."
present=$(realpath "${1:?usage: scripts/pack_peer.sh PRESENT (a file with the names of packages that are there)}")
target=$(realpath -m "${PEER_DIR:-.gpu-peer}")
work=${WORK:-$(mktemp -d)}
mkdir -p "$work" "$target"
[ -x "$work/venv/bin/python" ] || "${PYTHON:-python3.12}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-compile "${TORCH:-torch==2.11.0}" "${PEER:-vllm==0.26.0}" transformers==5.17.0
"$work/venv/bin/python" - "$present" "$work/site" <<'PY'
import importlib.metadata, os, re, shutil, sys

def plain(name):
    return re.sub(r"[-_.]+", "-", name.strip()).lower()

with open(sys.argv[1]) as file:
    there = {plain(name) for name in re.split(r"[,\s]+", file.read()) if name}
# Imported by no load of ours: video, audio, other clouds' clients, kernels of other GPUs, compilers.
unused = set("""torch torchaudio torchvision triton flashinfer-python flashinfer-cubin tilelang quack-kernels ray fastsafetensors
tokenspeed-mla tokenspeed-triton humming-kernels soundfile pynvvideocodec z3-solver torchcodec anthropic sentry-sdk scipy llvmlite numba
opencv-python-headless pip setuptools wheel""".split())
site = sys.argv[2]
shutil.rmtree(site, ignore_errors=True)
for distribution in importlib.metadata.distributions():
    name = plain(distribution.metadata["Name"])
    if name in there or name in unused or name.startswith("nvidia-"):
        continue
    for file in distribution.files or []:
        source = distribution.locate_file(file)
        if ".." in file.parts or file.suffix == ".pyc" or not os.path.isfile(source):
            continue
        copy = os.path.join(site, str(file))
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copy2(source, copy)
PY
cd "$work/site"
rm -rf vllm/vllm_flash_attn/_vllm_fa2_C*.so vllm/vllm-rs vllm/_qutlass*.so vllm/_rust* vllm/third_party/deep_gemm \
  vllm/third_party/fmha_sm100 mistral_common/data/tekken* pycountry/locales
find vllm -path '*/configs/*' -name '*.json' -path '*device_name*' ! -name '*H200*' ! -name '*H100*' -delete
find . -name tests -type d -prune -exec rm -rf {} +
find . -name '*.so' -size +1M -exec strip -s {} + 2>/dev/null || true
libraries=$(find vllm -maxdepth 2 \( -name '_C*.so' -o -name '_moe_C*.so' -o -name '_flashmla*.so' -o -name '_vllm_fa3_C*.so' \))
# shellcheck disable=SC2086
"$work/venv/bin/python" "$OLDPWD/scripts/thin_cuda_library.py" --architecture 90 $libraries
# shellcheck disable=SC2086
tar -cf - $libraries | xz -T0 -6 >"$target/libraries.tar.xz"
# shellcheck disable=SC2086
rm $libraries && tar -cf - . | xz -T0 -9 >"$target/packages.tar.xz"
ls -la "$target"
