"""Transcribes audio files of any length; one JSON line a file.

    python -m finetune.transcribe --model M FILES... [--timestamps]
    find talks -name '*.wav' | python -m finetune.transcribe --model M -

M: a .nemo file, a run's output directory, a Hugging Face directory, a hub name, or a NeMo model YAML. Files: whatever soundfile reads
(WAV, FLAC, MP3, Ogg), any sample rate, any number of channels. `-` reads paths from standard input, one a line.
"""

import argparse
import json
import sys
from typing import Any

import torch
from tqdm import tqdm

from finetune.data.decode import BadClip, decode_audio
from finetune.errors import UserError
from finetune.evaluation.long_audio import Piece, cut_at_silence
from finetune.evaluation.recognise import evaluation_mode, recognise_batch
from finetune.logs import set_up_logging
from finetune.models.nemo import load_model, move_to_device

SHORTEST_SECONDS = 0.1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune.transcribe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("files", nargs="+", metavar="FILE", help="audio files, or - for a list on standard input")
    parser.add_argument("--timestamps", action="store_true", help="add start and end of each word, in seconds")
    parser.add_argument(
        "--longest", type=float, default=30.0, help="longest piece that is decoded at once, in seconds"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of one file decoded together")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if arguments.batch_size < 1:
        parser.error("--batch-size has to be 1 or more")
    if arguments.longest < 1:
        parser.error("--longest has to be 1 second or more")
    return arguments


def transcribe_file(model: Any, file: str, *, longest: float, batch_size: int, timestamps: bool) -> dict[str, Any]:
    """Text of one file, and on demand its words with start and end in seconds.

    Raises:
        BadClip: the file cannot be read.
    """
    rate = model.preprocessor._sample_rate
    audio_S = decode_audio(file, rate)
    pieces = [p for p in cut_at_silence(audio_S, rate, longest) if len(p.audio_S) >= SHORTEST_SECONDS * rate]
    texts: list[str] = []
    words: list[dict[str, Any]] = []
    for first in range(0, len(pieces), batch_size):
        batch = pieces[first : first + batch_size]
        for piece, hypothesis in zip(batch, _recognise(model, batch, timestamps), strict=True):
            texts.append(hypothesis.text)
            if timestamps:
                words += [
                    {
                        "word": word["word"],
                        "start": round(piece.start + float(word["start"]), 3),
                        "end": round(piece.start + float(word["end"]), 3),
                    }
                    for word in hypothesis.timestamp["word"]
                    if word["word"]
                ]
    result = {"file": file, "duration": round(len(audio_S) / rate, 3), "text": " ".join(" ".join(texts).split())}
    return {**result, "words": words} if timestamps else result


def _recognise(model: Any, pieces: list[Piece], timestamps: bool) -> list[Any]:
    lengths_B = torch.tensor([len(p.audio_S) for p in pieces])
    audio_BS = torch.zeros(len(pieces), int(lengths_B.max()))
    for i, piece in enumerate(pieces):
        audio_BS[i, : len(piece.audio_S)] = torch.from_numpy(piece.audio_S)
    hypotheses = recognise_batch(model, audio_BS, lengths_B)
    if timestamps:
        from nemo.collections.asr.parts.utils.timestamp_utils import process_timestamp_outputs

        hypotheses = process_timestamp_outputs(
            hypotheses, model.encoder.subsampling_factor, model.cfg.preprocessor.window_stride
        )
    return hypotheses


def enable_timestamps(model: Any) -> None:
    """Lets NeMo's decoding keep the frames of its tokens."""
    from omegaconf import open_dict

    decoding = model.cfg.decoding
    with open_dict(decoding):
        decoding.compute_timestamps = True
    model.change_decoding_strategy(decoding, verbose=False)


def main(argv: list[str] | None = None) -> int:
    """Transcribes; 0 when every file could be read, else 1."""
    set_up_logging()
    arguments = parse_arguments(argv)
    files: list[str] = []
    for name in arguments.files:
        files += [line.strip() for line in sys.stdin if line.strip()] if name == "-" else [name]
    try:
        model = move_to_device(load_model(arguments.model, arguments.tokenizer), arguments.device)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.timestamps:
        enable_timestamps(model)
    failed = 0
    with evaluation_mode(model):
        for file in tqdm(files, unit="file", disable=len(files) == 1, delay=2):
            try:
                row = transcribe_file(
                    model,
                    file,
                    longest=arguments.longest,
                    batch_size=arguments.batch_size,
                    timestamps=arguments.timestamps,
                )
            except BadClip as reason:
                failed += 1
                row = {"file": file, "error": str(reason)}
                print(f"error: {file}: {reason}", file=sys.stderr)
            print(json.dumps(row, ensure_ascii=False), flush=True)
    if failed:
        print(f"{failed} of {len(files)} file(s) could not be transcribed", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
