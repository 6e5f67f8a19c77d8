#!/usr/bin/env bash
# Makes examples/base anew: synthetic speech, tokenizer, training from random weights, evaluation. Hours on two cores.
# Needs Debian's espeak-ng, flite, festival, festvox-us-slt-hts, festvox-kdlpc16k, wamerican and wfrench.
# Arguments are settings, e.g.: bash scripts/train_base.sh training.resume_from_checkpoint=true
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
python=.venv/bin/python
"$python" -c 'import wordfreq' 2>/dev/null || "$python" -m pip install -q -c constraints.txt -e ".[corpus]"
compgen -G "data/synthetic/data/train-*" >/dev/null || "$python" scripts/build_synthetic_speech.py --output data/synthetic --hours 12
[ -f examples/base/tokenizer/tokenizer.model ] ||
    "$python" scripts/train_tokenizer.py --data data/synthetic examples/voice_prompts --vocab-size 128 --output examples/base/tokenizer
"$python" finetune/train.py --config finetune/configs/base.yaml "$@"
cp runs/base/model.nemo examples/base/fastconformer_tdt_3m.nemo
"$python" -m finetune.evaluate --model examples/base/fastconformer_tdt_3m.nemo --data data/synthetic --json runs/base/synthetic.json
"$python" -m finetune.evaluate --model examples/base/fastconformer_tdt_3m.nemo --data examples/voice_prompts --json runs/base/voice_prompts.json
