#!/usr/bin/env bash
# Builds the engine's image for a node that gives engines its own /usr: our code and the packages that its Python lacks, and no
# system. A builder as E2E_GPU_BUILD names one, for machines with GPUs that reach no registry.
# usage: host_image.sh CONTEXT NAME:TAG OUT.tar [ignored...]
#   HOST_IMAGE=FILE      the Python program that packs folders into an image: FILE NAME:TAG OUT.tar SRC:DEST... -e K=V...
#   HOST_PACKAGES=DIR:.. folders of packages, if the machine's Python lacks some
set -euo pipefail
context=${1:?context} name=${2:?name:tag} out=${3:?out.tar}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/bin" "$scratch/site"
cp -r "$context/contract/mini_infer_contract" "$context/engine/mini_infer_engine" "$scratch/site/"
IFS=: read -ra folders <<<"${HOST_PACKAGES:-}"
for folder in "${folders[@]}"; do cp -r "$folder/." "$scratch/site/"; done
cat >"$scratch/bin/mini-infer-serve" <<'RUN'
#!/usr/bin/env bash
exec python3 -c 'import sys; from mini_infer_engine.server.entry import main; sys.exit(main())' "$@"
RUN
chmod 755 "$scratch" "$scratch/bin/mini-infer-serve"
python3 "${HOST_IMAGE:?HOST_IMAGE must name the program that packs folders into an image}" "$name" "$out" \
  "$scratch/bin:/app/bin" "$scratch/site:/app/site" -e PYTHONPATH=/app/site -e HOME=/tmp
