#!/usr/bin/env bash
# Run the slow tests. The output, with the counts and peaks that the tests report, is also written to
# $SLOW_TESTS_RECORD (default outputs/slow_tests.txt), which CI keeps as an artifact. Arguments go to pytest.
set -euo pipefail
# What Python reads at start-up; tests/clean_environment.py removes the user's other settings
for name in "${!PYTHON@}"; do [ "$name" = PYTHON ] || unset "$name"; done
export LC_ALL=C.UTF-8
source "$(dirname "$0")/setup.sh"

# torchtitan's classes, for the tests that compare with them; in a folder of its own, so that its requirements are not installed
export TITAN_TORCHTITAN="${TITAN_TORCHTITAN:-$PWD/.venv/torchtitan}"
[ -d "$TITAN_TORCHTITAN/torchtitan-0.2.2.dist-info" ] || python -m pip install --quiet --disable-pip-version-check \
    --no-deps --target "$TITAN_TORCHTITAN" torchtitan==0.2.2

record=${SLOW_TESTS_RECORD:-outputs/slow_tests.txt}
mkdir -p "$(dirname "$record")"
{
    date -u "+%F, $(nproc) cores"
    python -c 'import platform, torch; print(f"Python {platform.python_version()}, torch {torch.__version__}\n")'
    python -m pytest -q -n 2 --dist worksteal -m slow -rpfE --durations=10 "$@"
} 2>&1 | tee "$record"
