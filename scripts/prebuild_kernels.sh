#!/usr/bin/env bash
# Adds the compiled kernels of a model to the engine's image for GPUs, so that its pods start without compiling. Run it on a
# machine with docker, the NVIDIA container toolkit and one GPU of the kind that pods will get. Other kinds, other models and engine
# options that change a kernel still work: what is not there is compiled, as without this. For several models run it again.
# usage: scripts/prebuild_kernels.sh IMAGE NEW_IMAGE MODEL [ENGINE OPTIONS...]
#   MODEL            as mini-infer-serve takes it: demo, or a name on the hub (with --load-format dummy without its weights)
#   ENGINE OPTIONS   those of the service (`mini-infer plan -f SERVICE` shows them): they decide which kernels are compiled
#   DOCKER=docker    or podman
#   LIMIT_S=900      for the engine's start
set -euo pipefail
fail() { printf 'prebuild_kernels.sh: %s\n' "$*" >&2; exit 1; }
[ $# -ge 3 ] || { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }
image=$1 new_image=$2
shift 2
docker=${DOCKER:-docker}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -m 777 "$folder/kernels" # the engine is another user than we are

# Kernels are compiled before an engine is ready, or within seconds after it.
start='import socket, subprocess, sys, time, urllib.request
with socket.create_server(("127.0.0.1", 0)) as free:
    port = str(free.getsockname()[1])
engine = subprocess.Popen(["mini-infer-serve", *sys.argv[2:], "--host", "127.0.0.1", "--port", port])
deadline, ready = time.monotonic() + float(sys.argv[1]), False
while not ready and engine.poll() is None and time.monotonic() < deadline:
    time.sleep(1)
    try:
        ready = urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).status == 200
    except OSError:
        pass
if ready:
    time.sleep(10)  # what was deferred follows while the engine is idle
engine.terminate()
engine.wait(60)
sys.exit(0 if ready else "the engine did not get ready")'
"$docker" run --rm --gpus all --volume "$folder/kernels:/kernels" --env TRITON_CACHE_DIR=/kernels --entrypoint python3 "$image" \
  -c "$start" "${LIMIT_S:-900}" "$@" || fail "$image did not start with $*: see above"
compiled=$(find "$folder/kernels" -name '*.cubin' | wc -l)
[ "$compiled" -gt 0 ] || fail "nothing was compiled: $image has the kernels of this model, or ran without a GPU"
printf 'FROM %s\nCOPY kernels /opt/mini-infer/kernels\n' "$image" >"$folder/Dockerfile"
"$docker" build --quiet --tag "$new_image" "$folder"
echo "$new_image has $compiled more kernels, $(du -sh "$folder/kernels" | cut -f1)"
