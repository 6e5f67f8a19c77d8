#!/usr/bin/env bash
# Everything that only a GPU can show, in a few minutes: bash scripts/gpu_check.sh [FOLDER for the results]
# WHEELS names a folder of wheels to install first, where packages are missing and there is no network.
# PYTHON names the interpreter (default: the environment that scripts/setup.sh makes). All figures end up in FOLDER/gpu_check.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
results=${1:-runs/gpu_check}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu_check: torch sees no GPU here" >&2; exit 1; }
[ -z "${WHEELS:-}" ] || "$python" -m pip install --quiet --no-index --no-deps "$WHEELS"/*.whl
export HF_HUB_OFFLINE=1
mkdir -p "$results"
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
export PYTHONPATH=.

# A part that fails does not keep the others from running.
run() {
  local name=$1 title=$2 code=0
  echo "== $title"
  "${@:3}" || code=$?
  echo "$code" >"$parts/$name.exit"
}

run loss "the loss on the GPU against the CPU" "$python" scripts/gpu/check_loss.py
run optimizers "optimizers on the GPU: states, offload, time" "$python" scripts/gpu/check_optimizers.py --json "$parts/optimizers.json"
run activation_offload "activation offload: memory and gradients" "$python" -m pytest -q -p no:cacheprovider tests/strategies/test_memory_strategies.py -k offload_frees_gpu_memory
run strategies "memory and time of strategies on the 0.6B layout" "$python" scripts/bench/real_size.py --output-dir "$parts/real_size" --json "$parts/strategies.json"
run loss_time "time and memory of the loss" "$python" scripts/bench/tdt_loss.py --cases gpu_v8192 gpu_24gb --json "$parts/loss_time.json"

echo "$SECONDS" >"$parts/seconds"
"$python" scripts/gpu/report.py "$parts" "$results/gpu_check.json"
