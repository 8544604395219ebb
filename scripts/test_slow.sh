#!/usr/bin/env bash
# The tests that take minutes together. The last output is kept in docs/slow_tests.txt, with what they told: numbers of
# tokens compared, peaks of memory. Arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"

mkdir -p docs
{
    date -u "+%F, $(nproc) cores"
    python -c 'import platform, torch; print(f"Python {platform.python_version()}, torch {torch.__version__}\n")'
    # Two at a time, each a half of the files, as long as it has any
    python -m pytest -q -n 2 --dist worksteal -m slow -rpfE --durations=10 "$@"
} 2>&1 | tee docs/slow_tests.txt
