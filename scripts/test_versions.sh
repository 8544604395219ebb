#!/usr/bin/env bash
# Test titan with several versions of Python, torch and the other requirements: a cell for each, one environment at a time,
# made with pip and deleted after use (7 GB with a CUDA build of torch). Writes the table of docs/versions.md.
# Usage: test_versions.sh [CELL…]. Without arguments the missing cells run: a finished one is kept, also of an older commit,
# which the table shows. A named cell runs (again).
# Environment: PYTHON311, PYTHON312, PYTHON313 (interpreters; default: python3.11 … on PATH, then ~/.pyenv/versions),
# WORKERS (of pytest; default 2), and pip's own variables.
# The commit is tested, not the working tree. Results are in outputs/versions/CELL.
set -euo pipefail
for name in "${!PYTHON@}"; do [[ $name =~ ^PYTHON(3[0-9]+)?$ ]] || unset "$name"; done
export LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
cd "$(dirname "$0")/.."
root=$PWD state=$PWD/outputs/versions
environment=$state/environment

cells=(pinned-3.11 pinned-3.12 pinned-3.13 oldest-3.12 newest-3.12)

# The sample: tests that fail if an API of these packages changes.
sample=(
    # torch: parallel wrappers, process groups, pipelines, compile, optimizers, attention kernels
    tests/dist/test_{parity,one_rank,ddp,stock_dcp}.py
    tests/unit/trainer/{models,parallel,loss,optim,ranks}
    # torch: DCP's and torch.save's files; the dispatcher, Inductor and the allocator behind estimates
    tests/unit/trainer/checkpoints
    tests/unit/converters/containers/test_{dcp,dcp_write,safe_pickle,safetensors,stored_zip,target,torch_file,torch_write}.py
    tests/unit/titan_tools/memory/{trace,replay}
    # torchao: float8 training, quantized weights, optimizer states
    tests/dist/test_float8.py tests/unit/titan_tools/infer/model/test_{compiling,linear,mxfp4_blocks,quantize,tensor_parallel}.py
    tests/unit/converters/{test_torchao_states,views/test_mxfp4}.py
    # transformers: logits, tokenizers, chat templates
    tests/unit/titan_tools/infer/{text,test_families.py} tests/unit/converters/tokenizers
    # huggingface_hub
    tests/unit/titan_tools/test_download.py
    # all: what titan says of versions that it does not know
    tests/unit/titan_tools/test_installation.py
)
# Left out of the sample: further cases of what other tests of it show, and files whose size is what is tested.
left_out="accumulated or bit_equal or loss_falls or with_or_without_float8 or large_metadata or many_chunks or in_its_own_layout
    or killed_download or timeline"
# Installed after the others: torchtune needs an older torchao than the newest.
torchtune_sample=(tests/unit/converters/{torchtune,test_torchao_states.py} tests/unit/titan_tools/infer/model/test_quantize.py
    tests/unit/trainer/parallel/test_float8.py)

interpreter() { # interpreter 3.12: its path, or nothing
    local variable=PYTHON${1/./} found
    for found in "${!variable:-}" "python$1" ~/.pyenv/versions/"$1".*/bin/python; do
        if [ "$("$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
            "$found" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

# The parts of a cell follow each other in its environment. A part leaves PART.install (pip's output), PART.versions,
# PART.xml and PART.txt (pytest's), and `commands` with its output in commands.txt.
install() { # install PART PACKAGE…
    local part=$1; shift
    "$environment/bin/python" -m pip install --disable-pip-version-check --no-compile "$@" > "$cell/$part.install" 2>&1 || return 1
    "$environment/bin/python" - > "$cell/$part.versions" <<'END'
import platform
from importlib.metadata import distributions
versions = {d.name.lower(): d.version for d in distributions()}
names = ("torch", "torchao", "transformers", "huggingface_hub", "torchtune")
print("python", platform.python_version())
print(*(f"{name} {versions[name]}" for name in names if name in versions), sep="\n")
END
}

run_tests() { # run_tests PART FILE…
    local part=$1; shift
    ls -d "$@" > /dev/null || return 1
    "$environment/bin/python" -m pytest -q -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder -p no:cacheprovider -rfE --tb=short --durations=10 \
        -k "not (${left_out//$'\n'/ })" \
        -o junit_family=xunit1 --junitxml "$cell/$part.xml" "$@" > "$cell/$part.txt" 2>&1 || true
}

run_commands() { # the installed titan, away from its source
    mkdir "$environment/commands"
    cd "$environment/commands"
    local one_rank=(--parallelism.data_parallel_shard_degree 1 --parallelism.tensor_parallel_degree 1
        --parallelism.pipeline_parallel_degree 1 --job.dump_folder one_rank)
    check "data prepare" titan data prepare --out data
    check "config init" titan config init debug debug.toml
    check "train on 8 ranks" titan train debug.toml --training.steps 10
    check "train on 1 rank" titan train debug.toml --training.steps 10 "${one_rank[@]}"
    check "train compiled" titan train debug.toml --training.steps 10 --compile.enable "${one_rank[@]}" --job.dump_folder compiled
    check "convert" titan convert dcp-to-hf outputs/debug/checkpoint/step-10 hf
    check "infer --tp 2" titan infer hf --tp 2 --prompt "def __init__(self" --max-new-tokens 10
    check "infer --compile" titan infer hf --compile --prompt "def __init__(self" --max-new-tokens 10
    check "estimate-memory" titan estimate-memory llama3_8b --world-size 8
    check "estimate-memory, compiled" titan estimate-memory llama3_8b --world-size 8 --compile.enable
    cd "$root"
}

check() { # check TITLE COMMAND…: run a command of the environment, record whether it succeeds
    local title=$1 result=passed; shift
    printf '\n$ %s\n' "$*" >> "$cell/commands.txt"
    PATH="$environment/bin:$PATH" timeout 300 "$@" >> "$cell/commands.txt" 2>&1 < /dev/null || result=failed
    printf '%s %s\n' "$result" "$title" >> "$cell/commands"
}

run_cell() { # run_cell NAME: 1 if it has to be run again
    local name=$1 python begin=$SECONDS packages=()
    cell=$state/$name
    rm -rf "$cell" "$environment"
    mkdir -p "$cell"
    python=$(interpreter "${name#*-}")
    if [ -z "$python" ]; then
        echo "$name: no interpreter; set PYTHON${name//[^0-9]/} or install Python ${name#*-}" >&2
        touch "$cell/no_interpreter"
        return 1
    fi
    echo "$name: installing" >&2
    git rev-parse --short=8 HEAD > "$cell/commit"
    date -u +%F > "$cell/date"
    "$python" -m venv "$environment" && mkdir "$environment/source" || return 1
    git archive HEAD | tar -x -C "$environment/source" || return 1
    cd "$environment/source"
    case $name in
        pinned-*) packages=(--constraint constraints.txt) ;;
        oldest-*) packages=("$(grep -o 'torch>=[0-9.]*' pyproject.toml | sed 's/>=/==/').*") ;;
    esac
    if ! install tests '.[test]' "${packages[@]}"; then
        cd "$root"
        echo "$name: pip failed; see $cell/tests.install" >&2
        return 1
    fi
    echo "$name: installed in $((SECONDS - begin)) s; testing" >&2
    run_tests tests "${sample[@]}" &
    run_commands
    if ! wait $!; then
        cd "$root"
        echo "$name: a file of the sample is not there" >&2
        return 1
    fi
    cd "$environment/source"
    if install torchtune '.[torchtune]' "${packages[@]}"; then
        run_tests torchtune "${torchtune_sample[@]}"
    elif ! grep -q "conflicting dependencies" "$cell/torchtune.install"; then
        cd "$root"
        echo "$name: pip failed; see $cell/torchtune.install" >&2
        return 1
    fi
    cd "$root"
    echo $((SECONDS - begin)) > "$cell/seconds"
    echo "$name: finished in $((SECONDS - begin)) s" >&2
}

mkdir -p "$state"
exec 8> "$state/lock"
flock --nonblock 8 || { echo "error: another run has the lock on $state" >&2; exit 2; }
trap 'rm -rf "$environment"' EXIT
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "note: changes that are not committed are not tested" >&2
for name in "$@"; do
    [[ " ${cells[*]} " == *" $name "* ]] || { echo "error: no cell $name; there are: ${cells[*]}" >&2; exit 2; }
    rm -rf "${state:?}/$name"
done
status=0
for name in "${cells[@]}"; do
    # `seconds` is written last
    [ $# -gt 0 ] && [[ " $* " != *" $name "* ]] || [ -e "$state/$name/seconds" ] || run_cell "$name" || status=1
    rm -rf "$environment"
    python3 scripts/versions_table.py "$state" "${cells[@]}"
done
exit $status
