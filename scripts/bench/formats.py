"""Take a model from NeMo to Hugging Face and back, and compare the texts of every way of recognising with each.

    python scripts/bench/formats.py --model M --data D [--split test] [--json FILE]

Three models: the .nemo that M has, the Hugging Face directory made of it, and the .nemo made of that. Three ways:
NeMo's own transcribe() (of a .nemo, or of the model that this project loads from the directory), transformers'
pipeline("automatic-speech-recognition") in batches (of a directory; a .nemo goes through the directory made of it),
and this project's transcribe. Ends with 1 if one text or one weight differs.
"""

import argparse
import contextlib
import io
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import soundfile
import torch

from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.logs import set_up_logging
from finetune.models.loading import load_model
from finetune.models.nemo_archive import read_nemo
from finetune.tools.export.equal_texts import Samples, read_samples
from finetune.tools.export.hugging_face import export_hugging_face, nemo_file
from finetune.tools.export.nemo import export_nemo
from finetune.transcribe import main as transcribe

PACKAGES = ("torch", "nemo_toolkit", "transformers", "tokenizers", "sentencepiece", "safetensors")


def with_nemo(model: Any, files: list[str], batch_size: int) -> list[str]:
    """Texts of NeMo's own transcribe()."""
    found = model.transcribe(files, batch_size=batch_size, verbose=False)
    return [hypothesis.text for hypothesis in found]


def with_transformers(directory: Path, files: list[str], batch_size: int) -> list[str]:
    """Texts of transformers' pipeline, as its documentation shows it."""
    from transformers import pipeline

    recognise = pipeline("automatic-speech-recognition", model=str(directory), device="cpu")
    audio = [{"raw": (read := soundfile.read(f, dtype="float32"))[0], "sampling_rate": read[1]} for f in files]
    return [result["text"] for result in recognise(audio, batch_size=batch_size)]


def with_this_project(model: Path, files: list[str]) -> list[str]:
    """Texts of `python -m finetune.transcribe`."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = transcribe(["--model", str(model), "--device", "cpu", *files])
    if code:
        raise UserError(f"finetune.transcribe ended with {code} on {model}.", exit_code=1)
    return [json.loads(line)["text"] for line in said.getvalue().splitlines()]


def check(model: str, data: list[str], split: str, samples: Samples, folder: Path, batch_size: int) -> dict[str, Any]:
    """Converts there and back and recognises in every way; the result as one object."""
    first = nemo_file(model, folder)
    there, back = folder / "there", folder / "back"
    export_hugging_face(str(first), there, data=data, split=split)
    again = export_nemo(str(there), back)
    one, two = read_nemo(first), read_nemo(again)
    different = sorted(
        set(one.weights) ^ set(two.weights)
        | {k for k in one.weights if k in two.weights and not torch.equal(one.weights[k], two.weights[k])}
    )
    once_more = folder / "once-more"
    export_hugging_face(str(again), once_more, data=data, split=split)
    files = write_files(samples, load_rate(one), folder)
    models = {"before (.nemo)": (first, there), "Hugging Face": (there, there), "back (.nemo)": (again, once_more)}
    rows, reference = [], None
    for name, (path, directory) in models.items():
        nemo_model = load_model(str(path))
        ways: dict[str, Callable[[], list[str]]] = {
            "NeMo transcribe": lambda m=nemo_model: with_nemo(m, files, batch_size),
            "transformers pipeline": lambda d=directory: with_transformers(d, files, batch_size),
            "finetune.transcribe": lambda p=path: with_this_project(p, files),
        }
        for way, recognise in ways.items():
            started = time.perf_counter()
            texts = recognise()
            seconds = time.perf_counter() - started
            reference = texts if reference is None else reference
            differing = [
                {"id": samples.ids[i], "first": reference[i], "this": text}
                for i, text in enumerate(texts)
                if text != reference[i]
            ]
            rows.append(
                {
                    "model": name,
                    "way": way,
                    "clips": len(texts),
                    "identical": len(texts) - len(differing),
                    "seconds": round(seconds, 1),  # the loading of the model included, but for NeMo's
                    "different": differing,
                }
            )
    return {
        "weights": len(one.weights),
        "different_weights": different,
        "words": sum(len(text.split()) for text in reference or []),
        "rows": rows,
    }


def load_rate(nemo: Any) -> int:
    """Sample rate of a model in Hz."""
    return int(nemo.config["preprocessor"].get("sample_rate", 16000))


def write_files(samples: Samples, rate: int, folder: Path) -> list[str]:
    """The clips as 32-bit WAV files, so that each way reads the same numbers."""
    files = []
    for i, audio_S in enumerate(samples.audio):
        files.append(str(folder / f"clip-{i:05d}.wav"))
        soundfile.write(files[-1], audio_S.numpy(), rate, subtype="FLOAT")
    return files


def print_table(result: dict[str, Any]) -> None:
    """The outcome as an aligned table."""
    print(f"{'model':16} {'recognised by':24} {'clips':>6} {'identical':>10} {'seconds':>8}")
    for row in result["rows"]:
        print(f"{row['model']:16} {row['way']:24} {row['clips']:6d} {row['identical']:10d} {row['seconds']:8.1f}")
    for row in result["rows"]:
        for pair in row["different"][:3]:
            print(f"  {row['model']}, {row['way']}, {pair['id']}: {pair['this']!r} instead of {pair['first']!r}")
    same = result["weights"] - len(result["different_weights"])
    print(
        f"{same} of {result['weights']} tensors bit for bit equal after the way there and back; "
        f"{result['words']} words"
    )


def main(argv: list[str] | None = None) -> int:
    """0 when every text and weight is the same, 1 when one differs, 2 for bad arguments."""
    set_up_logging()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", required=True, help="a .nemo file, a run's output directory, an adapter's directory, or a hub name"
    )
    parser.add_argument("--data", required=True, nargs="+")
    parser.add_argument("--split", default="test", help="split of the data (default: test)")
    parser.add_argument("--max-samples", type=int, default=-1, help="only the first N clips")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rate = load_rate(read_nemo(nemo_file(arguments.model, Path(folder))))
            samples = read_samples(arguments.data, arguments.split, rate, arguments.max_samples)
            result = check(
                arguments.model, arguments.data, arguments.split, samples, Path(folder), arguments.batch_size
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print_table(result)
    equal = not result["different_weights"] and all(row["identical"] == row["clips"] for row in result["rows"])
    if arguments.json:
        about = {
            "command": "python scripts/bench/formats.py " + " ".join(argv if argv is not None else sys.argv[1:]),
            "date": str(date.today()),
            "machine": f"{_processor()}, {torch.get_num_threads()} thread(s)",
            "versions": {name: metadata.version(name) for name in PACKAGES},
            "python": platform.python_version(),
            "data": f"{samples.source}, {len(samples.ids)} clips, {sum(map(len, samples.audio)) / rate:.0f} s",
            "equal": equal,
        }
        write_json(arguments.json, {**about, **result})
    print("all equal" if equal else "NOT equal")
    return 0 if equal else 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
