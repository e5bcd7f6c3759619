#!/usr/bin/env bash
# Makes .venv hold this checkout (editable) with everything to run, test and check it, or with what running it and its examples need.
# Does nothing when nothing changed.
# usage: PYTHON=python3 scripts/install.sh [run]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv
case ${1:-} in
'') extras=all,dev installed=installed ;;
run) extras=all,examples installed=installed-to-run ;;
*) echo "usage: scripts/install.sh [run]" >&2; exit 2 ;;
esac
fail() { printf 'make install: %s\n' "$*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "there is no $python; install Python 3.11-3.13 (Debian, Ubuntu: apt-get install python3 python3-venv) or name one: make install PYTHON=python3.12"
python_version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $python_version in
3.11 | 3.12 | 3.13) ;;
*) fail "$python is Python $python_version, but 3.11, 3.12 or 3.13 is needed; name another one: make install PYTHON=python3.12" ;;
esac

stamp=$(cat pyproject.toml constraints.txt constraints-gpu.txt scripts/install.sh scripts/install_torch.sh <(echo "$PWD $python_version") | cksum)
if [ -x $venv/bin/python ] && { cat $venv/installed $venv/$installed 2>/dev/null || true; } | grep -qxF "$stamp"; then exit; fi

started=$SECONDS
if [ ! -x $venv/bin/python ] || [ "$($venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$python_version" ]; then
  "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python$python_version-venv"
  echo "==> 1/3 $venv with Python $python_version"
  rm -rf $venv
  "$python" -m venv $venv
  # That of Python 3.11 takes half a minute to find the packages, later ones a third of that; where there is none it will do.
  $venv/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip || true
fi
rm -f $venv/installed $venv/installed-to-run
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_COMPILE=0
# pip would make bytecode on one core, also of thousands of modules that nothing imports. Here all cores do, and torch's is
# made while pip looks for the other packages. Modules for newer Pythons cannot be compiled: nobody need hear of it.
seldom='sympy|networkx|transformers/models|kubernetes/(aio/)?client/(api|models)|torch/(testing|onnx|_inductor)|torchgen'
seldom+='|matplotlib|mpl_toolkits|fontTools|pygments/lexers|openai/types|tests|pip|setuptools|mypyc?'
bytecode() { # bytecode FOLDER [PASSED_OVER]
  nice $venv/bin/python -m compileall -qq -j 0 -x "/($seldom${2:+|$2})/" "$1" || true
}

echo "==> 2/3 torch"
bash scripts/install_torch.sh "$PWD/$venv/bin/python" constraints.txt
packages=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
bytecode "$packages/torch" &

echo "==> 3/3 the other packages"
# The torch and Triton that are there stay, whichever they are: their pins are replaced by themselves, other pins are dropped.
grep -vE '^(torch|triton|nvidia-|cuda-)' constraints.txt >$venv/constraints.txt
$venv/bin/python -c 'import importlib.metadata as m; print(*(f"{d.name}=={d.version}" for d in m.distributions() if d.name in ("torch", "triton")), sep="\n")' >>$venv/constraints.txt
$venv/bin/python -m pip install -c $venv/constraints.txt -e ".[$extras]" | sed '/^Requirement already satisfied/d'
wait
bytecode "$packages" torch

echo "$stamp" >$venv/$installed
echo "==> $venv is ready ($((SECONDS - started)) s)"
