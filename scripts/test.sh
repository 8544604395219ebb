#!/usr/bin/env bash
# Lint, format check, types and tests, in the environment that setup.sh creates. Arguments go to pytest.
set -euo pipefail
# What Python reads at start-up; tests/clean_environment.py removes the user's other settings
for name in "${!PYTHON@}"; do [ "$name" = PYTHON ] || unset "$name"; done
export LC_ALL=C.UTF-8
source "$(dirname "$0")/setup.sh"

ruff check .
ruff format --check .
mypy
# Two workers: tests of ranks mostly wait. A file stays with one worker, which keeps its ranks and models; files run in
# order, the long ones (tests/dist) first.
exec python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
