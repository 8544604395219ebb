#!/usr/bin/env bash
# Lint, format check and the tests, in the environment that setup.sh makes. Arguments go to pytest.
set -euo pipefail
# What Python reads as it starts; the rest of a user's settings is left out by tests/clean_environment.py
for name in "${!PYTHON@}"; do [ "$name" = PYTHON ] || unset "$name"; done
export LC_ALL=C.UTF-8
source "$(dirname "$0")/setup.sh"

ruff check .
ruff format --check .
# Two at a time: most of a test of ranks is waiting. A file stays with one worker, which keeps its ranks and its models;
# files in their order, the long ones (tests/dist) first.
exec python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
