"""What enters the products of an encoder: ranges for static int8, measured in a process of its own.

    python -m finetune.tools.export.gate.one_calibration REQUEST.json

F mel bins, T frames.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import UserError
from finetune.logs import set_up_logging
from finetune.tools.export.gate.one_ranking import features_of
from finetune.tools.export.online import cut_of_metadata, run_windows
from finetune.tools.export.precision import calibrate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.tools.export.online import Cut


def inputs_of(path: Path, mels: list[np.ndarray], threads: int, cut: Cut | None) -> Iterator[dict[str, np.ndarray]]:
    """Yield the inputs of an encoder's graph for (F, T) features, clip by clip, or window by window where it is made
    so."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    for mel_FT in mels:
        if cut is None:
            yield dict(zip(names, (mel_FT[None], np.array([mel_FT.shape[1]])), strict=True))
        else:
            yield from (inputs for inputs, _ in run_windows(session, mel_FT, cut))


def main(argv: list[str]) -> int:
    """Measure what a request names; an error's message goes to standard error."""
    set_up_logging()
    request: dict[str, Any] = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    source = Path(request["graph"])
    cut = None if request.get("online") is None else cut_of_metadata(request["online"])
    try:
        mels = features_of(request, cut)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    calibrate(source, Path(request["ranges"]), inputs_of(source, mels, request["threads"], cut))
    Path(request["output"]).write_text(json.dumps({"clips": len(mels)}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
