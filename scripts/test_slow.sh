#!/usr/bin/env bash
# The tests that take minutes each. The last output is kept in docs/slow_tests.txt.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

python -m pytest -q -m slow "$@" 2>&1 | tee docs/slow_tests.txt
