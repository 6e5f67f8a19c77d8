#!/usr/bin/env bash
# Everything that only a GPU can show, in a few minutes: bash scripts/gpu_check.sh [FOLDER for the results]
# PYTHON names the interpreter (default: the environment that scripts/setup.sh makes). All figures end up in FOLDER/gpu_check.json.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
results=${1:-runs/gpu_check}
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "gpu_check: torch sees no GPU here" >&2; exit 1; }
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

run loss "the loss on the GPU against the CPU" "$python" scripts/gpu_check_loss.py
run optimizers "optimizers on the GPU: states, offload, time" "$python" scripts/gpu_check_optimizers.py --json "$parts/optimizers.json"
run strategies "memory and time of strategies on the 0.6B layout" "$python" scripts/bench_real_size.py --output-dir "$parts/real_size" --json "$parts/strategies.json"
run loss_time "time and memory of the loss" "$python" scripts/bench_tdt_loss.py --cases gpu_v8192 gpu_24gb --json "$parts/loss_time.json"

"$python" - "$parts" "$results/gpu_check.json" <<'PY'
import json, sys
from pathlib import Path

parts, report = Path(sys.argv[1]), {}
for ended in sorted(parts.glob("*.exit")):
    figures = ended.with_suffix(".json")
    report[ended.stem] = {"exit_code": int(ended.read_text()), **(json.loads(figures.read_text()) if figures.exists() else {})}
Path(sys.argv[2]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
failed = [name for name, part in report.items() if part["exit_code"]]
print(f"\n{sys.argv[2]} holds all figures; " + (f"FAILED: {', '.join(failed)}" if failed else "every check holds"))
sys.exit(bool(failed))
PY
