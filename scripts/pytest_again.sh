#!/usr/bin/env bash
# Runs pytest. What fails beside other tests on a busy machine runs once more, alone: a defect fails again, a test that
# was only too slow is named here, and is to be mended. Ends with the second run's status.
# usage: scripts/pytest_again.sh PYTHON [ARGUMENT ...]
set -euo pipefail
python=$1
shift
"$python" -m pytest "$@" && exit || status=$?
if [ "$status" != 1 ]; then exit "$status"; fi # 1: tests failed; more: pytest itself did, or was ended
echo "=== once more, alone: what failed"
exec "$python" -m pytest "$@" --last-failed --last-failed-no-failures none -n 0 --maxfail 1
