"""What streaming exports for sherpa-onnx keep: texts, WER and speed for each look-ahead, beside NeMo's.

    python scripts/models/streaming_study.py --head rnnt --output-dir runs/streaming_rnnt
    python scripts/bench/exports_online.py --model runs/streaming_rnnt/run --json docs/benchmarks/online_cpu.json

The validation and test clips of examples/voice_prompts are decoded by NeMo's cache-aware inference and by each export
in fresh processes, one stream at a time. sherpa-onnx's features are nearly NeMo's, so a row also has how many texts
are those that NeMo itself writes on them: what of a difference is the features' and what the networks'.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from finetune.durable_files import write_json
from finetune.evaluation.recognise import evaluation_mode
from finetune.evaluation.scores import Utterance
from finetune.models.loading import load_model
from finetune.models.look_ahead import attending, one_context
from finetune.tools.export.gate.clips import Clips
from finetune.tools.export.gate.gate import gather_clips
from finetune.tools.export.gate.one_parts import encode_features, text_of_encoded
from finetune.tools.export.gate.report import bytes_of, machine
from finetune.tools.export.gate.sides import Request, run_side
from finetune.tools.export.gate.verdict import judge, plain
from finetune.tools.export.layouts import write_layout
from finetune.tools.export.onnx import graphs_of
from finetune.tools.export.runtimes import SherpaOnnxOnline, load_exported

DATA, SPLITS = ROOT / "examples" / "voice_prompts", ("validation", "test")
MAX_LOSS = 1.0
"""Points of WER that the gate is asked about."""


def texts_on_its_features(model_name: str, directory: Path, look_ahead: str, clips: Clips) -> list[str]:
    """Return what NeMo's networks make of the features that sherpa-onnx computes."""
    model, exported = load_model(model_name), load_exported(directory)
    assert isinstance(exported, SherpaOnnxOnline)
    context = one_context(model, look_ahead)
    with evaluation_mode(model), attending(model.encoder, context):
        features = (exported.features(clips.audio(i)) for i in range(len(clips)))
        return [text_of_encoded(model, encode_features(model, mel_FT, context)) for mel_FT in features]


def measure(arguments: argparse.Namespace, clips_of: dict[str, Clips], look_ahead: str) -> list[dict[str, Any]]:
    """Write the exports of one look-ahead, decode with NeMo and with them, and return a row for each."""
    folder = arguments.folder / f"look-ahead-{look_ahead}"
    graphs_folder = folder / "graphs"
    graphs_folder.mkdir(parents=True, exist_ok=True)
    graphs = graphs_of(arguments.model, graphs_folder, "sherpa", look_ahead=look_ahead)
    rows: list[dict[str, Any]] = []
    original: dict[str, dict[str, Any]] = {}
    for precision in arguments.precisions:
        directory = folder / precision
        directory.mkdir(exist_ok=True)
        write_layout(graphs, directory, "sherpa", precision)
        row: dict[str, Any] = {"look_ahead": look_ahead, "precision": precision, "disk_bytes": bytes_of(directory)}
        both: tuple[list[Utterance], list[Utterance]] = ([], [])
        equal, on_its_features = 0, 0
        for split, clips in clips_of.items():
            if split not in original:
                request = Request("nemo", arguments.model, clips.folder, arguments.threads, look_ahead=look_ahead)
                original[split] = run_side(request)
            side = run_side(Request("exported", str(directory), clips.folder, arguments.threads))
            own = texts_on_its_features(arguments.model, directory, look_ahead, clips)
            equal += sum(plain(a) == plain(b) for a, b in zip(side["texts"], original[split]["texts"], strict=True))
            on_its_features += sum(plain(a) == plain(b) for a, b in zip(side["texts"], own, strict=True))
            for utterances, texts in zip(both, (original[split]["texts"], side["texts"]), strict=True):
                utterances += [Utterance(*u) for u in zip(clips.ids, clips.languages, clips.texts, texts, strict=True)]
            row[f"rtfx_{split}"], row[f"rtfx_{split}_nemo"] = side["rtfx"], original[split]["rtfx"]
        verdict = judge(*both, exact=False, max_loss=MAX_LOSS)
        compared = verdict.comparison or {}
        keys = ("wer_a", "wer_b", "difference", "difference_interval", "p_value", "words")
        row |= {"clips": verdict.clips, "equal_to_nemo": equal, "equal_to_nemo_on_its_features": on_its_features}
        row |= {key: compared.get(key) for key in keys} | {"said": verdict.reason}
        rows.append(row)
        print(
            f"look-ahead {look_ahead}, {precision}: {equal} of {verdict.clips} texts are NeMo's, {on_its_features} "
            f"those of NeMo on its features; {verdict.reason}; RTFx {row['rtfx_test']:.1f}, NeMo "
            f"{row['rtfx_test_nemo']:.1f}",
            flush=True,
        )
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a cache-aware RNN-T model: a run's directory or a .nemo file")
    parser.add_argument("--look-aheads", nargs="+", default=["13", "6", "1", "0"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-samples", type=int, default=-1, help="only the first N clips of each split")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_exports_online"))
    parser.add_argument("--note", help="kept with the figures, such as what else the machine did")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.folder = arguments.folder.resolve()
    many = arguments.max_samples
    clips_of = {s: gather_clips([str(DATA)], s, 16000, arguments.folder / s, max_samples=many) for s in SPLITS}
    rows = [row for look_ahead in arguments.look_aheads for row in measure(arguments, clips_of, look_ahead)]
    found = {"command": "python scripts/bench/exports_online.py " + " ".join(sys.argv[1:]), "machine": machine()}
    found |= {"note": arguments.note} if arguments.note else {}
    found |= {"model": arguments.model, "rows": rows}
    print(json.dumps(found["machine"]))
    if arguments.json:
        write_json(arguments.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
