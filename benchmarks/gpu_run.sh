#!/usr/bin/env bash
# Everything that is to be shown on a GPU machine, in one call: unpacks what scripts/pack_gpu.sh packed, runs the GPU tests,
# then the benchmarks beside the peer where it is present, and leaves JSON, logs and pytest's report in a folder.
# usage: benchmarks/gpu_run.sh [STAGE...]      default: tests offline serving startup attention ablations interference memory
#   OUT=results          where results go
#   MODELS=a,b REPEATS=3 SOAK_S=60 MNS=512     of the benchmarks; LIMIT_S=3000 the most seconds a stage may take
#   GPU_DIR=.gpu         what pack_gpu.sh made; not needed where all packages are installed
#   PEER_SITE=DIR        a folder of the peer's packages, if it is not installed
#   PEER_PARTS=DIR       or the parts of which unpack.sh there makes that folder
#   SITE=/tmp/mini-infer-site   where things are unpacked, once
# A stage that fails ends neither the run nor the others; the exit status is the number of them.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${OUT:-results}")
directory=${GPU_DIR:-.gpu}
site=${SITE:-/tmp/mini-infer-site}
python=${PYTHON:-python3}
models=${MODELS:-qwen2.5-7b,qwen2.5-1.5b,qwen3-0.6b}
mns=${MNS:-512}
stages=${*:-tests offline serving startup attention ablations interference memory}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$site/triton}

if [ -d "$directory/wheels" ] && [ ! -f "$site/ours/unpacked" ]; then
  $python -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site/ours" "$directory"/wheels/*.whl || exit 100
  for archive in "$directory"/flash_attn.tar.*; do
    [ -f "$archive" ] || continue
    mkdir -p "$site/flash" && tar -xf "$archive" -C "$site/flash" || exit 101
  done
  touch "$site/ours/unpacked"
fi
flash=$(find "$site/flash" -maxdepth 3 -type d -name flash_attn 2>/dev/null | head -1)
parts=("$PWD/contract" "$PWD/engine" "$PWD/gateway" "$PWD/operator")
[ -d "$site/ours" ] && parts+=("$site/ours")
[ -n "$flash" ] && parts+=("$(dirname "$flash")")
[ -n "${PYTHONPATH:-}" ] && parts+=("$PYTHONPATH")
PYTHONPATH=$(IFS=:; echo "${parts[*]}")
export PYTHONPATH
if [ -n "${PEER_PARTS:-}" ] && [ ! -f "$site/peer/unpacked" ]; then
  unpack=$(find "$PEER_PARTS" -maxdepth 2 -name unpack.sh | head -1)
  [ -n "$unpack" ] && sh "$unpack" "$PEER_PARTS" "$site/peer" && touch "$site/peer/unpacked"
fi
[ -z "${PEER_SITE:-}" ] && [ -f "$site/peer/unpacked" ] && export PEER_SITE=$site/peer

failed=0
stage() { # name command...
  local name=$1 begin=$SECONDS status
  shift
  echo "=== $name: $*"
  timeout "${LIMIT_S:-3000}" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  echo "=== $name: exit $status after $((SECONDS - begin)) s"
  [ "$status" = 0 ] || failed=$((failed + 1))
}
for name in $stages; do
  case $name in
  tests) OMP_NUM_THREADS=2 stage tests "$python" -m pytest -n 6 --dist worksteal -m gpu tests/gpu -q -rfE --durations=15 --junitxml "$out/tests.xml" -p no:cacheprovider ;;
  offline) stage offline "$python" benchmarks/engine_offline.py --models "$models" --repeats "${REPEATS:-3}" --max-num-seqs "$mns" --out "$out/offline.json" --plot "$out/offline.png" ;;
  serving) stage serving "$python" benchmarks/engine_serving.py --models "$models" --max-num-seqs "${mns%%,*}" --out "$out/serving.json" ;;
  startup) stage startup "$python" benchmarks/startup.py --models "$models" --out "$out/startup.json" ;;
  attention) stage attention "$python" benchmarks/attention.py --out "$out/attention.json" ;;
  products) stage products "$python" benchmarks/gpu_kernels.py --out "$out" ;;
  ablations) stage ablations "$python" benchmarks/ablations.py --out "$out/ablations.json" ;;
  interference) stage interference "$python" benchmarks/interference.py --out "$out/interference.json" ;;
  memory) stage memory "$python" benchmarks/memory.py --soak-s "${SOAK_S:-60}" --out "$out/memory.json" ;;
  *) echo "gpu_run.sh: there is no stage $name" >&2; failed=$((failed + 1)) ;;
  esac
done
exit "$failed"
