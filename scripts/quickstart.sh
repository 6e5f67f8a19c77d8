#!/usr/bin/env bash
# Set-up, then the main job on the sample data: fine-tunes the small base model on real speech and says how well it went.
# Arguments are passed on, e.g.: bash scripts/quickstart.sh training.resume_from_checkpoint=true
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
output=runs/quickstart
resume=false
for argument in "$@"; do
    case $argument in
        training.output_dir=*) output=${argument#*=} ;;
        training.resume_from_checkpoint=*) resume=${argument#*=} ;;
    esac
done
arguments=("$@")
case $resume in
    false | False | null | "") arguments+=(training.overwrite_output_dir=true) ;;
esac
.venv/bin/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    finetune/train.py --config finetune/configs/quickstart.yaml "${arguments[@]}"
echo
echo "Everything about this run is in $output. Transcribe a file of your own (WAV, FLAC, MP3, Ogg):"
echo "  .venv/bin/python -m finetune.transcribe --model $output FILE"
