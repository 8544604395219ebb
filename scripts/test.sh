#!/usr/bin/env bash
# Lint, format check and the tests, in the environment that setup.sh makes. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

ruff check .
ruff format --check .
exec python -m pytest -q "$@"
