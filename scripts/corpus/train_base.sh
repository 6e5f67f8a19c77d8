#!/usr/bin/env bash
# Makes examples/base anew: synthetic speech, both parts of the training, evaluation. Three hours and more on two
# cores. Interrupted, it goes on where it was when it is called again; what is done (data/synthetic, runs/base,
# runs/base_continued and the tokenizer in examples/base) is not done again unless it is deleted. Needs Debian's
# espeak-ng, flite, festival, festvox-us-slt-hts, festvox-kdlpc16k, wamerican and wfrench.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash scripts/setup.sh
python=.venv/bin/python
"$python" -c 'import wordfreq' 2>/dev/null || "$python" -m pip install -q -c constraints.txt -e ".[corpus]"
compgen -G "data/synthetic/data/train-*-of-*.parquet" >/dev/null ||
    "$python" scripts/corpus/build_synthetic_speech.py --output data/synthetic --hours 44
[ -f examples/base/tokenizer/tokenizer.model ] ||
    "$python" -m finetune.tokenizer --data data/synthetic examples/voice_prompts --normalization basic \
        --coverage 1 --size 128 --output examples/base/tokenizer
resume=training.resume_from_checkpoint=true
[ -f runs/base/summary.json ] || "$python" finetune/train.py --config finetune/configs/base.yaml "$resume"
[ -f runs/base_continued/summary.json ] ||
    .venv/bin/torchrun --standalone --nproc_per_node 2 finetune/train.py \
        --config finetune/configs/base_continued.yaml "$resume"
cp runs/base_continued/model.nemo examples/base/fastconformer_tdt_3m.nemo
for data in data/synthetic examples/voice_prompts; do
    "$python" -m finetune.evaluate --model examples/base/fastconformer_tdt_3m.nemo --data "$data" \
        --json "runs/base_continued/$(basename "$data").json"
done
