#!/usr/bin/env bash
# Runs pytest. What fails beside other tests on a busy machine runs once more, alone: a defect fails again; the name of
# a test that passes then is added to the file $SECOND_RUNS, which .ci/run judges. Ends with the second run's status.
# usage: scripts/pytest_again.sh PYTHON [ARGUMENT ...]
set -euo pipefail
python=$1
shift
cache=${AGAIN_CACHE:-.pytest_cache} # two at a time need one each
failed=$cache/v/cache/lastfailed # pytest's record of failures, to which an earlier run may have added its own
names=${SECOND_RUNS:-.pytest_cache/second_runs}
set -- "$@" -o cache_dir="$cache"
rm -f "$failed"
"$python" -m pytest "$@" && exit || status=$?
if [ "$status" != 1 ]; then exit "$status"; fi # 1: tests failed; more: pytest itself did, or was ended
echo "=== once more, alone: what failed"
found=$("$python" "$(dirname "$0")/failed_tests.py" "$cache")
"$python" -m pytest "$@" --last-failed --last-failed-no-failures none -n 0 --maxfail 1
echo "$found" >>"$names"
echo "=== needed a second run, and is to be mended"
echo "$found"
