#!/usr/bin/env bash
# Download what titan needs on a machine that has torch for CUDA, transformers and pytest, but no network: wheels for
# Python 3.12 on x86-64 Linux, about 15 MB, in the versions of constraints.txt.
#   scripts/bench/wheels.sh [FOLDER]      default: .whl, which scripts/bench/gpu.sh installs
set -euo pipefail
cd "$(dirname "$0")/../.."
names=(isal torchao grain array_record portpicker typer pydantic pydantic_core annotated-types typing-inspection
    typing_extensions xxhash)
wanted=()
for name in "${names[@]}"; do
    wanted+=("$(grep -iE "^${name//[-_]/[-_]}==" constraints.txt)") || { echo "constraints.txt lacks $name" >&2; exit 2; }
done
platforms=(--platform=manylinux_2_28_x86_64 --platform=manylinux_2_17_x86_64 --platform=manylinux2014_x86_64)
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --dest "${1:-.whl}" "${wanted[@]}"
