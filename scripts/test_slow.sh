#!/usr/bin/env bash
# The tests that take minutes together. The last output is kept in docs/slow_tests.txt, with what they told: numbers of
# tokens compared, peaks of memory. Arguments go to pytest.
set -euo pipefail
# What Python reads as it starts; the rest of a user's settings is left out by tests/clean_environment.py
for name in "${!PYTHON@}"; do [ "$name" = PYTHON ] || unset "$name"; done
export LC_ALL=C.UTF-8
source "$(dirname "$0")/setup.sh"

# torchtitan's own classes, for the tests that compare with them; apart, so that its requirements change nothing here
export TITAN_TORCHTITAN="${TITAN_TORCHTITAN:-$PWD/.venv/torchtitan}"
[ -d "$TITAN_TORCHTITAN/torchtitan-0.2.2.dist-info" ] || python -m pip install --quiet --disable-pip-version-check \
    --no-deps --target "$TITAN_TORCHTITAN" torchtitan==0.2.2

mkdir -p docs
{
    date -u "+%F, $(nproc) cores"
    python -c 'import platform, torch; print(f"Python {platform.python_version()}, torch {torch.__version__}\n")'
    # Two at a time, each a half of the files, as long as it has any
    python -m pytest -q -n 2 --dist worksteal -m slow -rpfE --durations=10 "$@"
} 2>&1 | tee docs/slow_tests.txt
