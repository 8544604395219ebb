#!/usr/bin/env bash
# The tests that take minutes together. The last output is kept in docs/slow_tests.txt. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

mkdir -p docs
{
    date -u "+%F, $(nproc) cores"
    python -c 'import platform, torch; print(f"Python {platform.python_version()}, torch {torch.__version__}\n")'
    python -m pytest -q -m slow -rpfE --durations=10 "$@"
} 2>&1 | tee docs/slow_tests.txt
