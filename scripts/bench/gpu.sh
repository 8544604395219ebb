#!/usr/bin/env bash
# Measure titan on one GPU within a number of seconds, most valuable part first, also on a machine without a network.
#   scripts/bench/gpu.sh SECONDS OUT [PART…]      parts: look works train decode more; default: all, in this order
#   REHEARSE=1 scripts/bench/gpu.sh 600 OUT       the whole order with tiny models on a CPU: whether the script runs
# Every result is a line of JSON in OUT as soon as it is there. A part that fails or takes too long does not end the
# others; one for which too little time is left is skipped. The table that ends the output is OUT/summary.txt.
# .whl: a folder of wheels that the machine lacks, if it exists (scripts/bench/wheels.sh). Environment: PYTHON, with torch
# for CUDA; WORK, for checkpoints and compiled code (default /tmp/titan-gpu); WORKERS of the tests (default: cores - 2).
set -uo pipefail
ends=$((SECONDS + ${1:?usage: gpu.sh SECONDS OUT [PART...]} - 12)) # the table takes the rest
out=$(mkdir -p "${2:?usage: gpu.sh SECONDS OUT [PART...]}" && cd "$2" && pwd) || exit 2
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
root=$PWD bench=$PWD/scripts/bench python=${PYTHON:-python3} work=${WORK:-/tmp/titan-gpu}
cores=$(nproc) rehearse=${REHEARSE:-}
workers=${WORKERS:-$((cores > 3 ? cores - 2 : 1))}
tiny=() tokens=512 on=cuda
[ -z "$rehearse" ] || { tiny=(--tiny) tokens=8 on=cpu; export CUDA_VISIBLE_DEVICES=; }
mkdir -p "$work"
if [ -d .whl ] && [ ! -e "$work/site/.done" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$work/site" .whl/*.whl || exit 2
    touch "$work/site/.done"
fi
export PYTHONPATH="$root:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 JAX_PLATFORMS=cpu
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton PYTEST_OUTCOMES=$out/tests.jsonl
titan=("$python" -P -m titan_tools)

left() { echo $((ends - SECONDS)); }
run() { # NAME LEAST MOST COMMAND…: its output goes to the log; at most MOST seconds, not with less than LEAST left
    local name=$1 least=$2 most=$3 began=$SECONDS code
    shift 3
    [ -z "$rehearse" ] || { least=5 most=600; } # a busy machine is slow
    if [ "$(left)" -lt "$least" ]; then
        echo "{\"part\": \"$name\", \"skipped\": \"skipped, $(left) s left\"}" | tee -a "$out/parts.jsonl"
        return
    fi
    [ "$most" -le "$(left)" ] || most=$(left)
    printf '\n== %s %s (at most %s s): %s\n' "$(date -u +%T)" "$name" "$most" "$*" >>"$out/log.txt"
    # INT first: pytest and Python then say where they were
    timeout --signal=INT --kill-after=5 "$most" "$@" >>"$out/log.txt" 2>&1 </dev/null
    code=$?
    echo "{\"part\": \"$name\", \"exit\": $code, \"secs\": $((SECONDS - began))}" | tee -a "$out/parts.jsonl"
}

finish() {
    "$python" "$bench/gpu_summary.py" "$out" 2>&1 | tee "$out/summary.txt"
}
trap 'finish; exit 1' TERM INT

look() {
    { nvidia-smi; free -g; nproc; df -h "$work"; "$python" -m pip list; } >"$out/machine.txt" 2>&1
    run look 15 60 bash -c "'$python' '$bench/ceilings.py' --on $on --repeats 10 | tee -a '$out/results.jsonl'"
}

walk() { # what a user does, on one rank; the greedy text must not depend on the format, nor on the device
    set -e
    local one=(--parallelism.data_parallel_shard_degree 1 --parallelism.tensor_parallel_degree 1
        --parallelism.pipeline_parallel_degree 1) say=(--prompt "def __init__(self" --max-new-tokens 20) compiled=()
    [ -n "$rehearse" ] || compiled=(--compile.enable --checkpoint.async_mode async_with_pinned_mem)
    rm -rf "$work/walk" && mkdir -p "$work/walk" && cd "$work/walk"
    "${titan[@]}" data prepare --out data --max-bytes 4000000
    "${titan[@]}" config init debug debug.toml
    "${titan[@]}" seed debug.toml seed
    "${titan[@]}" train debug.toml "${one[@]}" "${compiled[@]}" --checkpoint.initial_load_path seed --training.steps 20 \
        --checkpoint.interval 20
    "${titan[@]}" reshard outputs/debug/checkpoint/step-20 outputs/debug/resharded/step-20 --for-mesh dp_shard=2,cp=2
    "${titan[@]}" train debug.toml "${one[@]}" --checkpoint.folder resharded --training.steps 30 --checkpoint.interval 10
    "${titan[@]}" convert dcp-to-hf outputs/debug/resharded/step-30 hf
    "${titan[@]}" infer outputs/debug/resharded/step-30 "${say[@]}" >dcp.txt
    "${titan[@]}" infer hf "${say[@]}" >hf.txt
    CUDA_VISIBLE_DEVICES= "${titan[@]}" infer hf "${say[@]}" >cpu.txt
    cmp dcp.txt hf.txt
    cmp hf.txt cpu.txt
    echo "the three texts are equal"
}

estimates() { # predicted before anything is measured
    local names=("8B of 8 layers" "8B of 8 layers, compiled" "8B of 8 layers, no checkpointing" "1B, TP 2" "1B, CP 2") cases=()
    [ -z "$rehearse" ] || names=("1B, CP 2")
    for name in "${names[@]}"; do cases+=(--case "$name"); done
    [ -e "$out/predictions.json" ] || "$python" "$bench/estimate_gpu.py" predict "$out/predictions.json" "${cases[@]}" || return
    [ -n "$rehearse" ] || "$python" -P "$bench/estimate_gpu.py" measure "$out/predictions.json" "${cases[@]}" \
        --out "$out/results.jsonl"
}

decode_row() { # NAME LEAST MOST TOKENS ROW…
    local name=$1 least=$2 most=$3 tokens=$4 row=$5
    shift 5
    run "$name" "$least" "$most" "$python" "$bench/infer.py" --rounds 1 --only "$row" --tokens "$tokens" --dir "$work/m" \
        --profile --out "$out/results.jsonl" "${tiny[@]}" "$@"
}
train_rows() { # NAME LEAST MOST ROWS OPTION…
    local name=$1 least=$2 most=$3 rows=$4
    shift 4
    run "$name" "$least" "$most" "$python" "$bench/train.py" --rounds 1 --steps 12 --only "$rows" --out "$out/results.jsonl" \
        "${tiny[@]}" "$@"
}

works() { # nothing here is timed, so these run side by side
    local others=() pid
    export -f walk estimates
    export root bench python work out rehearse
    (run walk 30 170 bash -c "titan=('$python' -P -m titan_tools); walk") &
    others+=($!)
    (run estimates 30 170 bash -c estimates) &
    others+=($!)
    (run "folder of 8B" 30 170 nice "$python" "$bench/infer.py" --make-only --only "8B, bfloat16, --compile" --dir "$work/m" \
        "${tiny[@]}") &
    others+=($!)
    run tests 60 300 "$python" -m pytest -q -p no:cacheprovider -n "$workers" --dist load --maxschedchunk 1 --timeout 150 \
        --tb short -rfE --durations 15 tests/gpu
    for pid in "${others[@]}"; do wait "$pid"; done
}

train() { # compile, eager, float8; 12 layers where they fit, else 8
    local gb=0 layers=8
    gb=$("$python" -c 'import torch; print(torch.cuda.mem_get_info()[1] // 10**9 if torch.cuda.is_available() else 0)')
    [ "${gb:-0}" -lt 105 ] || layers=12
    for row in compile eager "compile, float8"; do
        train_rows "train: $row" 45 110 "8B width, $layers layers: $row" --exact --profile
    done
}

decode() { decode_row decode 40 150 "$tokens" "8B, bfloat16, --compile"; } # half of it compiles and tunes kernels

more() { # what no GPU has run first
    run "memory of inference" 20 60 "$python" -m pytest -q -p no:cacheprovider tests/gpu/test_infer_memory.py
    train_rows "documents" 45 150 "8B width, 2 layers"
    for row in "as stored" "dequantized"; do # fewer layers: an uncompiled step has thousands of kernels to launch
        decode_row "fp8: $row" 30 60 $((tokens / 8)) "64 experts, fp8 folder, $row" --layers 2 --exact
    done
    decode_row "mxfp4" 40 100 $((tokens / 4)) "GPT-OSS 20B" --layers 6
    decode_row "fp8: compiled" 60 150 $((tokens / 4)) "64 experts, fp8 folder, as stored, --compile" --layers 2 --exact
    train_rows "experts" 45 110 "30B-A3B width, 4 layers: compile" --profile
    decode_row "decode: int8" 40 110 "$tokens" "8B, int8, --compile"
}

for part in ${*:-look works train decode more}; do
    case $part in
    look | works | train | decode | more) "$part" ;;
    *) echo "unknown part: $part (look, works, train, decode, more)" >&2 && exit 2 ;;
    esac
done
finish
