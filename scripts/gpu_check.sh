#!/usr/bin/env bash
# Checks and measures what only a GPU can show, in parts of at most 8 minutes.
#   bash scripts/gpu_check.sh [FOLDER for the results, default runs/gpu_check]
#   bash scripts/gpu_check.sh --rehearsal [FOLDER]      the same code with small sizes, on the CPU
#   PARTS: which, and in which order (default: all, as below)
#   PYTHON: the interpreter (default: the environment that scripts/setup.sh makes)
#   WHEELS: a folder of wheels for a bare machine without network (scripts/gpu/make_wheels.sh makes it); `loss` and the
#           first figures of `loss_time` need none: torch, Triton and numba suffice
#   PART_SECONDS: after which a part is ended with what it has (480)
# FOLDER gets NAME.json (figures, written as they come) and NAME.exit (exit code, seconds) of each part, and
# gpu_check.json and gpu.md, the table of all goals, anew after each part: a check that dies keeps what it had. The
# parts strategies_1 to strategies_3 are the same comparison, which goes on where it was ended.
set -euo pipefail
cd "$(dirname "$0")/.."
all="loss loss_time step throughput largest_batch loss_learnt evaluation optimizers activation_offload encoder
    strategies_1 strategies_2 strategies_3"
rehearsal= results=runs/gpu_check strategies=all sizes=()
if [ "${1:-}" = --rehearsal ]; then
    rehearsal=--rehearsal results=runs/gpu_rehearsal strategies=adamw,lora
    sizes=(--layout finetune/configs/models/fastconformer_tdt_3m.yaml --vocabulary 200 --clips 2 --seconds 2
        --precision fp32 --steps 5)
    shift
fi
python=${PYTHON:-.venv/bin/python}
results=${1:-$results}

fail() { echo "gpu_check: $*" >&2; exit "${code:-1}"; }

for part in ${PARTS:=$all}; do
    [[ " ${all//$'\n'/ } " == *" $part "* ]] || code=2 fail "there is no part $part. PARTS takes some of:" $all
done
command -v "$python" >/dev/null ||
    fail "there is no interpreter $python. Run bash scripts/setup.sh, or name one: PYTHON=/path/to/python bash $0"
"$python" -c 'import torch' || fail "$python has no torch, or one that does not import. Install: bash scripts/setup.sh"
[ -n "$rehearsal" ] || "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "torch sees no GPU here. bash $0 --rehearsal runs everything in small on a CPU"
[ -z "${WHEELS:-}" ] || "$python" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$results"
rm -f "$results/rehearsal"
if [ -n "$rehearsal" ]; then
    touch "$results/rehearsal"
    export TORCH_COMPILE_DISABLE=1 # a processor compiles torchao's steps for minutes
fi
for part in $PARTS; do
    rm -f "$results/$part".{json,exit}
done

run() { # run NAME COMMAND ...: a part that fails, or takes too long, does not keep the others from running
    local code=0 started=$SECONDS
    timeout --kill-after=20 "${PART_SECONDS:-480}" "${@:2}" || code=$?
    [ $code != 124 ] || echo "gpu_check: $1 was ended after ${PART_SECONDS:-480} s, with what it had"
    echo "$code $((SECONDS - started))" >"$results/$1.exit"
}
report() { "$python" scripts/gpu/report.py "$results" "$results/gpu_check.json" "$results/gpu.md"; }

for part in $PARTS; do
    json=(--json "$results/$part.json")
    case $part in
        loss) command=(scripts/gpu/check_loss.py $rehearsal) ;;
        loss_time) command=(scripts/bench/tdt_loss.py --cases gpu_v8192 $rehearsal) ;;
        loss_learnt) command=(scripts/bench/tdt_loss.py --cases gpu_v8192_learnt $rehearsal) ;;
        largest_batch) command=(scripts/bench/tdt_loss.py --cases gpu_24gb $rehearsal) ;;
        step)
            command=(scripts/bench/real_size.py --strategies adamw,recommended,recommended_small
                --output-dir "$results/real_size" "${sizes[@]}")
            ;;
        throughput) command=(scripts/bench/throughput.py --folder "$results/throughput" $rehearsal) ;;
        evaluation) command=(scripts/bench/evaluation.py --folder "$results/evaluation" $rehearsal) ;;
        optimizers) command=(scripts/gpu/check_optimizers.py $rehearsal) ;;
        activation_offload)
            command=(-m pytest -q -p no:cacheprovider tests/strategies/test_memory_strategies.py
                -k offload_frees_gpu_memory)
            json=()
            ;;
        encoder)
            command=(scripts/bench/real_size.py --strategies adamw --matrix compile,attention
                --no-plan --minutes 7 --output-dir "$results/encoder" "${sizes[@]}")
            ;;
        strategies_*)
            command=(scripts/bench/real_size.py --strategies $strategies --no-plan --minutes 7
                --output-dir "$results/real_size" "${sizes[@]}")
            ;;
    esac
    echo "== $part"
    run "$part" "$python" "${command[@]}" "${json[@]}"
    report >/dev/null || true
done
report
