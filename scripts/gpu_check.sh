#!/usr/bin/env bash
# Checks and measures what only a GPU can show, in a few minutes.
#   bash scripts/gpu_check.sh [FOLDER for the results, default runs/gpu_check]
#   PARTS: which, and in which order (default: loss optimizers activation_offload strategies loss_time)
#   PYTHON: the interpreter (default: the environment that scripts/setup.sh makes)
#   WHEELS: a folder of wheels to install first, where packages are missing and there is no network
# FOLDER gets NAME.json and NAME.exit (figures, exit code) of each part as it ends, and gpu_check.json, which is
# written anew after each part, so an interrupted check leaves what it has measured.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
results=${1:-runs/gpu_check}
all="loss optimizers activation_offload strategies loss_time"

fail() { echo "gpu_check: $*" >&2; exit "${code:-1}"; }

for part in ${PARTS:=$all}; do
    [[ " $all " == *" $part "* ]] || code=2 fail "there is no part $part. PARTS takes some of: $all"
done
command -v "$python" >/dev/null ||
    fail "there is no interpreter $python. Run bash scripts/setup.sh, or name one: PYTHON=/path/to/python bash $0"
"$python" -c 'import torch' || fail "$python has no torch, or one that does not import. Install: bash scripts/setup.sh"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || fail "torch sees no GPU here"
[ -z "${WHEELS:-}" ] || "$python" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
export HF_HUB_OFFLINE=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$results"
# A comparison of strategies that was interrupted goes on with the rows that it lacks; one that ended starts anew.
[[ " $PARTS " != *" strategies "* || ! -e $results/strategies.exit ]] || rm -rf "$results/real_size"
for part in $PARTS; do
    rm -f "$results/$part".{json,exit}
done

run() { # run NAME COMMAND ...: a part that fails does not keep the others from running
    local code=0
    "${@:2}" || code=$?
    echo "$code" >"$results/$1.exit"
}
report() {
    "$python" scripts/gpu/report.py "$results" "$results/gpu_check.json" "$@"
}

for part in $PARTS; do
    case $part in
        loss) title="the loss on the GPU against the CPU" command=(scripts/gpu/check_loss.py) ;;
        optimizers)
            title="optimizers on the GPU: states, offload, time"
            command=(scripts/gpu/check_optimizers.py --json "$results/optimizers.json")
            ;;
        activation_offload)
            title="activation offload: memory and gradients"
            command=(-m pytest -q -p no:cacheprovider tests/strategies/test_memory_strategies.py
                -k offload_frees_gpu_memory)
            ;;
        strategies)
            title="memory and time of strategies on the 0.6B layout"
            command=(scripts/bench/real_size.py --output-dir "$results/real_size" --json "$results/strategies.json")
            ;;
        loss_time)
            title="time and memory of the loss"
            command=(scripts/bench/tdt_loss.py --cases gpu_v8192 gpu_24gb --json "$results/loss_time.json")
            ;;
    esac
    echo "== $title"
    run "$part" "$python" "${command[@]}"
    echo "$SECONDS" >"$results/seconds"
    report >/dev/null || true
done
report
