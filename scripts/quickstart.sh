#!/usr/bin/env bash
# The whole path on one laptop: data, seed, 4D training, reshard, resume, convert, check, estimate, generate.
# You can type each command after `run TITLE` yourself.
# Usage: quickstart.sh [FOLDER]; the default is ./quickstart. An earlier quickstart in FOLDER is replaced.
set -euo pipefail
out=$(realpath -m "${1:-$(dirname "$0")/../quickstart}")
source "$(dirname "$0")/setup.sh"

if [ -e "$out" ]; then
    [ -e "$out/.made-by-quickstart" ] || { echo "error: $out exists and is not a quickstart's; move it away" >&2; exit 2; }
    rm -rf "$out"
fi
home=$PWD
mkdir -p "$out" && touch "$out/.made-by-quickstart" && cd "$out"

steps=()
started=$SECONDS
exec 3>&1 # commands are shown here, also if their output goes to a file
run() { # run TITLE COMMAND…: show the command, run it, record its time
    local title=$1 begin=$SECONDS; shift
    { printf '\n── %s\n$' "$title"; printf ' %q' "$@"; echo; } >&3
    "$@"
    steps+=("$(printf '%4ds  %s' $((SECONDS - begin)) "$title")")
}

run "text to tokens"            titan data prepare --out data
run "a config to start from"    titan config init debug debug.toml
run "seed checkpoint"           titan seed debug.toml seed
run "train, FSDP 2 x TP 2 x PP 2" titan train debug.toml --checkpoint.initial_load_path seed
newest=$(ls -d outputs/debug/checkpoint/step-* | sort -t- -k2 -n | tail -1)
last=${newest##*-}
run "reshard for FSDP 2 x CP 2" titan reshard "$newest" "outputs/debug/resharded/step-$last" --for-mesh dp_shard=2,cp=2
run "resume as FSDP 2 x CP 2"   titan train debug.toml --checkpoint.folder resharded --training.steps $((last + 20)) \
    --parallelism.tensor_parallel_degree 1 --parallelism.pipeline_parallel_degree 1 \
    --parallelism.data_parallel_shard_degree 2 --parallelism.context_parallel_degree 2
trained=outputs/debug/resharded/step-$((last + 20))
run "to a Hugging Face folder"  titan convert dcp-to-hf "$trained" hf
run "and back"                  titan convert hf-to-dcp hf back
run "verify the way back"       titan verify back
run "compare the two"           titan diff hf back
run "to Meta's format"          titan convert dcp-to-meta "$trained" meta
run "from Meta's format"        titan convert meta-to-dcp meta from-meta
run "compare them too"          titan diff hf from-meta
run "does this run fit?"        titan estimate-memory debug.toml
run "does Llama 3 8B?"          titan estimate-memory llama3_8b --world-size 8
run "does Llama 3 70B?"         titan estimate-memory llama3_70b --world-size 256
run "does Llama 3 405B?"        titan estimate-memory llama3_405b --world-size 512
say=(--tp 2 --prompt "import " --temperature 0.8 --seed 1 --max-new-tokens 40)
run "what does it say? (DCP)"   titan infer "$trained" "${say[@]}" > from_dcp.txt
cat from_dcp.txt
run "what does the export say?" titan infer hf "${say[@]}" > from_hf.txt
cmp from_dcp.txt from_hf.txt
echo "the same"
run "how well does it know Python?" titan infer hf --score --prompt-file "$home/titan_tools/cli.py"
run "the run, drawn"            titan inspect outputs/debug --plot run.png

printf '\n── done in %ds\n' $((SECONDS - started))
printf '%s\n' "${steps[@]}"
cat <<SUMMARY

made in $out
  data/                      token index and tokenizer
  seed/                      seed checkpoint, sharded for the first mesh
  outputs/debug/             the run: checkpoints, metrics.jsonl, TensorBoard
  hf/                        the trained model for transformers
  run.png                    losses, speed, memory

try next, in that folder and the environment (cd $out; source $home/.venv/bin/activate)
  titan inspect $trained
  titan infer hf --prompt "import " --temperature 0.8
  titan config show debug.toml
  tensorboard --logdir outputs/debug/tb
SUMMARY
