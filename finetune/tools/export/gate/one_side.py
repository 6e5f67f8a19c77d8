"""One side of a comparison, in a process of its own: texts of all clips, with what they cost.

    python -m finetune.tools.export.gate.one_side REQUEST.json

The request is `sides.Request` as an object; the result goes to its `output`. Each kind of side imports its own runtime
and nothing else, so that memory and start-up are those of the runtime.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Recognise = Callable[[list[np.ndarray]], list[str]]


def nemo(request: dict[str, Any], rate: int) -> tuple[Recognise, str]:
    """The original, as `python -m finetune.transcribe` decodes it."""
    from importlib.metadata import version

    import torch

    from finetune.evaluation.recognise import recognise_batch
    from finetune.models.loading import load_option, move_to_device
    from finetune.models.nemo import set_head

    torch.set_num_threads(request["threads"])
    model = move_to_device(load_option(request["model"], request["tokenizer"]), "cpu")
    set_head(model, request["head"])
    model.eval()
    runtime = f"NeMo {version('nemo_toolkit')}"
    if request.get("look_ahead") is not None:
        return _chunk_by_chunk(model, request["look_ahead"]), runtime

    def recognise(clips: list[np.ndarray]) -> list[str]:
        lengths_B = torch.tensor([len(audio_S) for audio_S in clips])
        audio_BS = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(a) for a in clips], batch_first=True)
        with torch.no_grad():
            return [hypothesis.text for hypothesis in recognise_batch(model, audio_BS, lengths_B)]

    return recognise, runtime


def _chunk_by_chunk(model: Any, look_ahead: str) -> Recognise:
    """NeMo's cache-aware inference, of recordings with the tail of silence that the export gets."""
    import torch

    from finetune.evaluation.streaming import stream_texts
    from finetune.models.look_ahead import one_context
    from finetune.tools.export.online import cut_of

    context = one_context(model, look_ahead)
    cut = cut_of(model, context)

    def recognise(clips: list[np.ndarray]) -> list[str]:
        audio = [torch.from_numpy(cut.with_tail(audio_S)) for audio_S in clips]
        lengths_B = torch.tensor([len(audio_S) for audio_S in audio])
        audio_BS = torch.nn.utils.rnn.pad_sequence(audio, batch_first=True)
        with torch.no_grad():
            return stream_texts(model, audio_BS, lengths_B, context)

    return recognise


def transformers(request: dict[str, Any], rate: int) -> tuple[Recognise, str]:
    """The same model in Hugging Face's format, as its documentation decodes it."""
    import torch
    from transformers import __version__

    from finetune.models.huggingface.layout import KINDS
    from finetune.tools.export.equal_texts import load_written

    torch.set_num_threads(request["threads"])
    directory = Path(request["model"])
    kind = KINDS[json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]]
    model, processor = load_written(directory, torch.float32, kind)

    def recognise(clips: list[np.ndarray]) -> list[str]:
        with torch.no_grad():
            output = model.generate(**processor(clips, sampling_rate=rate))
        return processor.batch_decode(getattr(output, "sequences", output), skip_special_tokens=True)

    return recognise, f"transformers {__version__}"


def exported(request: dict[str, Any], rate: int) -> tuple[Recognise, str]:
    """A written export in the runtime that it is for."""
    from finetune.tools.export.runtimes import load_exported

    loaded = load_exported(Path(request["model"]), threads=request["threads"])
    return lambda clips: loaded.texts(clips, batch_size=len(clips)), f"{loaded.runtime} {loaded.version}"


KINDS_OF_SIDES = {"nemo": nemo, "transformers": transformers, "exported": exported}


def memory_bytes(key: str) -> int | None:
    """Return a value of this process's own memory: VmRSS now, VmHWM at its peak; None where there is no /proc.

    The peak of getrusage would be that of the process which started this one, where that is larger.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Load a side, decode the clips, and return texts, seconds and bytes."""
    import psutil

    from finetune.tools.export.gate.clips import load_clips

    clips = load_clips(Path(request["clips"]))
    began = time.perf_counter()
    recognise, runtime = KINDS_OF_SIDES[request["kind"]](request, clips.rate)
    load_seconds = time.perf_counter() - began
    start_seconds = time.time() - psutil.Process().create_time()
    loaded = memory_bytes("VmRSS")
    # The first clip costs allocations and kernels that later ones find; what that is stands in first_seconds.
    began = time.perf_counter()
    recognise([clips.audio(0)])
    first_seconds = time.perf_counter() - began
    texts: list[str] = []
    decode_seconds = processor_seconds = 0.0
    for first in range(0, len(clips), request["batch"]):
        batch = [clips.audio(i) for i in range(first, min(first + request["batch"], len(clips)))]
        began, spent = time.perf_counter(), time.process_time()
        texts += recognise(batch)
        decode_seconds += time.perf_counter() - began
        processor_seconds += time.process_time() - spent
    return {
        "runtime": runtime,
        "threads": request["threads"],
        "batch": request["batch"],
        "start_seconds": start_seconds,
        "load_seconds": load_seconds,
        "first_seconds": first_seconds,
        "decode_seconds": decode_seconds,
        "processor_seconds": processor_seconds,
        "audio_seconds": clips.seconds,
        "rtfx": clips.seconds / decode_seconds,
        "loaded_bytes": loaded,
        "peak_bytes": memory_bytes("VmHWM"),
        "texts": texts,
    }


def main(argv: list[str]) -> int:
    """Measure what a request names; an error's message goes to standard error."""
    from finetune.errors import UserError
    from finetune.logs import set_up_logging

    set_up_logging()
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        result = measure(request)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    Path(request["output"]).write_text(json.dumps(result, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
