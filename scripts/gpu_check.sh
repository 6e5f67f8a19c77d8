#!/usr/bin/env bash
# Everything that only a GPU can show, in a few minutes: bash scripts/gpu_check.sh [FOLDER for the results]
# PYTHON names the interpreter (default: the environment that scripts/setup.sh makes).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
results=${1:-runs/gpu_check}
mkdir -p "$results"
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu_check: torch sees no GPU here" >&2; exit 1; }
echo "== the loss on the GPU against the CPU"
PYTHONPATH=. "$python" scripts/gpu_check_loss.py
echo "== time and memory of the loss"
"$python" scripts/bench_tdt_loss.py --cases gpu_v8192 gpu_24gb --json "$results/bench_tdt_loss_gpu.json"
