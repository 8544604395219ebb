#!/usr/bin/env bash
# Training with the environment variables of torchtitan's run_train.sh.
# Arguments go to `titan train`.
#   LOG_RANK=0,1 NGPU=8 CONFIG_FILE=./llama3_8b.toml ./run_train.sh --training.steps 100
# Reads CONFIG_FILE (a TOML file or a preset; default debug), NGPU (ranks to start; default: all GPUs, or as many as the
# degrees need) and COMM_MODE (fake_backend: a dry run of one rank of NGPU). `titan train` reads LOG_RANK and
# PYTORCH_ALLOC_CONF. TITAN_ENVIRONMENT: a virtual environment with titan; default: the `titan` on PATH.
set -euo pipefail
setup=$(dirname "$0")/setup.sh # beside the script in a clone, which installs titan
if [ -e "$setup" ] && { [ -n "${TITAN_ENVIRONMENT:-}" ] || ! command -v titan > /dev/null; }; then
    started_in=$PWD
    source "$setup"
    cd "$started_in"
elif [ -n "${TITAN_ENVIRONMENT:-}" ]; then
    PATH="$TITAN_ENVIRONMENT/bin:$PATH"
fi

if [ "${TRAIN_FILE:-torchtitan.train}" != torchtitan.train ]; then
    echo "error: TRAIN_FILE=$TRAIN_FILE names another training program; this script runs \`titan train\`" >&2
    echo "hint: a module of your own registers families, datasets and losses: --experimental.custom_import MODULE" >&2
    exit 2
fi
if [ -n "${TORCHFT_LIGHTHOUSE:-}" ]; then
    echo "note: TORCHFT_LIGHTHOUSE is not read: TorchFT's replica groups are not covered" >&2
fi

options=()
case "${COMM_MODE:-}" in
    fake_backend) options+=(--dry-run); [ -z "${NGPU:-}" ] || options+=(--world-size "$NGPU") ;;
    "") [ -z "${NGPU:-}" ] || options+=(--nproc "$NGPU") ;;
    *) echo "error: COMM_MODE=$COMM_MODE is not covered; fake_backend is: a dry run" >&2; exit 2 ;;
esac
exec titan train "${CONFIG_FILE:-debug}" "${options[@]}" "$@"
