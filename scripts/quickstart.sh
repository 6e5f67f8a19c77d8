#!/usr/bin/env bash
# Set-up, then the main job on the sample data: fine-tunes the small base model on real speech and says how well it
# went. Arguments are passed on, e.g.: bash scripts/quickstart.sh training.resume_from_checkpoint=true
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
output=runs/quickstart
own_choice=
for argument in "$@"; do
    case $argument in
        training.output_dir=*) output=${argument#*=} own_choice=yes ;;
        training.resume_from_checkpoint=* | training.overwrite_output_dir=*) own_choice=yes ;;
        --config*) own_choice=yes output= ;;
    esac
done
arguments=("$@")
if [ -z "$own_choice" ]; then
    # Its own directory, so a finished quickstart may go; one that was interrupted goes on.
    if [ -f "$output/summary.json" ] || ! compgen -G "$output/checkpoints/step-*" >/dev/null; then
        arguments+=(training.overwrite_output_dir=true)
    else
        echo "quickstart: going on with the interrupted run in $output (rm -r $output to start anew)"
        arguments+=(training.resume_from_checkpoint=true)
    fi
fi
NUM_PROCESSES=1 bash scripts/run_training.sh --config finetune/configs/quickstart.yaml "${arguments[@]}"
[ -n "$output" ] || exit 0
echo
echo "Everything about this run is in $output. Transcribe a file of your own (WAV, FLAC, MP3, Ogg):"
echo "  .venv/bin/python -m finetune.transcribe --model $output FILE"
