#!/usr/bin/env bash
# Lint, format check and the tests, in the environment that setup.sh makes. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

ruff check .
ruff format --check .
# Two at a time: most of a test of ranks is waiting. A file stays with one worker, which keeps its ranks and its models;
# files in their order, the long ones (tests/dist) first.
exec python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder "$@"
