#!/usr/bin/env bash
# Starts a training with the launcher and the number of processes that fit this machine and strategy.
#   bash scripts/run_training.sh [--strategy NAME ...] [--config FILE] [key=value ...]
# NUM_PROCESSES sets the number of processes (default: one a GPU, or one).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=
[ -x "$root/.venv/bin/python" ] && bin=$root/.venv/bin/
gpus=$("${bin}python" -c 'import torch; print(torch.cuda.device_count())')
processes=${NUM_PROCESSES:-$((gpus > 0 ? gpus : 1))}
train=$root/finetune/train.py
echo "run_training: $gpus GPU(s), $processes process(es)" >&2
if [ "$processes" -gt 1 ]; then
    exec "${bin}torchrun" --standalone --nproc_per_node "$processes" "$train" "$@"
fi
exec "${bin}accelerate" launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no "$train" "$@"
