#!/usr/bin/env bash
# Measure titan on one GPU, most valuable part first. Each part ends within ten minutes, and writes its results as it
# takes them, so that a kill loses nothing.
#   scripts/bench/gpu.sh OUT                  all parts, into the folder OUT
#   scripts/bench/gpu.sh OUT works train      these parts
# Parts: works (tests/gpu, ceilings, kernels), train, train-more, decode, estimate.
# Environment: PYTHON (with titan's packages and a CUDA build of torch; default python3).
set -uo pipefail
out=$(mkdir -p "${1:?usage: gpu.sh OUT [PART ...]}" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
parts=${*:-works train train-more decode estimate}
gb=$("$python" -c 'import torch; print(torch.cuda.mem_get_info()[1] / 1e9)') || exit 2
failed=0

limited() { # SECONDS LOG COMMAND…: the command's output goes to the terminal and to the log
    local secs=$1 log=$2
    shift 2
    echo "== $(date -u +%T) $* (at most $secs s)"
    timeout "$secs" "$@" 2>&1 | tee -a "$out/$log"
    [ "${PIPESTATUS[0]}" = 0 ] || { failed=1 && echo "== exit ${PIPESTATUS[0]}: $*" | tee -a "$out/$log"; }
}

for part in $parts; do
    case $part in
    works)
        nvidia-smi | tee "$out/machine.txt"
        limited 60 ceilings.jsonl "$python" scripts/bench/ceilings.py
        limited 530 tests.log "$python" -m pytest -q -rA -p no:cacheprovider tests/gpu
        ;;
    train) # the first three rows of the largest size that fits: compile, eager, float8
        size=$("$python" -c "print('8B width, 12 layers' if $gb > 105 else '8B width, 8 layers')")
        for row in compile eager "compile, float8"; do
            limited 190 train.log "$python" scripts/bench/train.py --rounds 1 --profile --gb "$gb" --only "$size: $row" \
                --exact --out "$out/train.jsonl"
        done
        ;;
    train-more)
        limited 590 train.log "$python" scripts/bench/train.py --rounds 1 --gb "$gb" --out "$out/train.jsonl"
        ;;
    decode)
        limited 590 decode.log "$python" scripts/bench/infer.py --rounds 1 --out "$out/decode.jsonl"
        ;;
    estimate)
        [ -e "$out/predictions.json" ] ||
            limited 290 estimate.log "$python" scripts/bench/estimate_gpu.py predict "$out/predictions.json"
        limited 590 estimate.log "$python" scripts/bench/estimate_gpu.py measure "$out/predictions.json"
        ;;
    *)
        echo "unknown part: $part (works, train, train-more, decode, estimate)" >&2
        exit 2
        ;;
    esac
done
exit $failed
