"""Write the directories that onnx-asr and sherpa-onnx load, from the float32 graphs of a model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import UserError
from finetune.tools.export.precision import convert
from finetune.tools.export.refusals import BLANK

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from finetune.tools.export.graphs import Graphs

NO_LIMIT = 10**6  # tokens on one frame
FULL = 2**20  # bytes: a disk with less is full
MODEL_TYPES = {"tdt": "nemo-conformer-tdt", "rnnt": "nemo-conformer-rnnt", "ctc": "nemo-conformer-ctc"}
"""onnx-asr's names of the kinds."""
AUTHOR = "parakeet-finetune"
PARTS = {
    "onnx": {"encoder": "encoder-model", "decoder_joint": "decoder_joint-model", "model": "model"},
    "sherpa": {"encoder": "encoder", "decoder": "decoder", "joiner": "joiner", "model": "model"},
}
"""File names of the parts in each layout, without precision and ending."""


def suffix_of(precision: str) -> str:
    """Return what stands before `.onnx`, as both runtimes name quantised files; nothing for fp32."""
    return "" if precision == "fp32" else f".{precision}"


def write_layout(
    graphs: Graphs,
    directory: Path,
    to: str,
    precision: str,
    keep_float: Collection[str] = frozenset(),
    ranges: Path | None = None,
) -> None:
    """Write what a runtime loads into `directory`, which has to exist.

    Args:
        graphs: of `finetune.tools.export.graphs.write_graphs`; they are left as they are.
        to: onnx (for onnx-asr) or sherpa (for sherpa-onnx).
        precision: fp32, fp16 or int8.
        keep_float: nodes of the encoder's graph that int8 leaves in float32, by name
            (`finetune.tools.export.precision.sensitivities`).
        ranges: for static int8 of the encoder, of `finetune.tools.export.precision.calibrate`; None: dynamic.
    """
    metadata = _sherpa_metadata(graphs) if to == "sherpa" else {}
    for part, stem in PARTS[to].items():
        if part in graphs.files:
            path = directory / f"{stem}{suffix_of(precision)}.onnx"
            encoder = part in ("encoder", "model")
            more = (metadata, ranges) if encoder else ({}, None)
            convert(graphs.files[part], path, precision, keep_float, *more)
    lines = "".join(f"{piece} {i}\n" for i, piece in enumerate([*graphs.pieces, BLANK]))
    (directory / ("vocab.txt" if to == "onnx" else "tokens.txt")).write_text(lines, encoding="utf-8")
    if to == "onnx":
        config = {
            "model_type": MODEL_TYPES[graphs.kind],
            "features_size": graphs.features,
            "subsampling_factor": graphs.subsampling_factor,
        }
        if graphs.kind != "ctc":
            config["max_tokens_per_step"] = graphs.max_symbols or NO_LIMIT
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _sherpa_metadata(graphs: Graphs) -> dict[str, str]:
    """What sherpa-onnx reads of a graph. It takes a transducer for a TDT model by `tdt` in the url."""
    values = {
        "vocab_size": len(graphs.pieces),
        "normalize_type": graphs.normalize if graphs.normalize != "NA" else "",
        "subsampling_factor": graphs.subsampling_factor,
        "model_type": "EncDecCTCModelBPE" if graphs.kind == "ctc" else "EncDecRNNTBPEModel",
        "version": 1,
        "model_author": AUTHOR,
        "url": f"urn:parakeet-finetune:{graphs.kind}",
        "comment": f"{graphs.kind} head",
        "feat_dim": graphs.features,
        "sample_rate": graphs.sample_rate,
    }
    if graphs.kind != "ctc":
        values |= {"pred_rnn_layers": graphs.layers, "pred_hidden": graphs.width}
    if graphs.online is not None:
        values |= graphs.online.metadata()
    return {key: str(value) for key, value in values.items()}


def check_output(output: Path) -> None:
    """Raise UserError where `whole_or_nothing` could not put a directory: it is not empty, a mount point, or the one
    that the command runs in."""
    output = output.resolve()
    if output == Path.cwd().resolve():
        raise UserError(
            f"--output: {output} is the directory that this command runs in, and the result would replace it. Name a "
            "directory in it."
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} is not empty. Name another directory, or remove it.")
    if os.path.ismount(output):
        raise UserError(
            f"--output: {output} is a mount point, which nothing can be renamed to. Name a directory in it."
        )


@contextlib.contextmanager
def whole_or_nothing(output: Path) -> Iterator[Path]:
    """Yield a directory beside `output` to write into, and rename it to `output` in the end; if anything is raised, it
    is removed and `output` is left as it was.

    Raises:
        UserError: as from `check_output`, or a disk is full.
    """
    check_output(output)
    output = output.resolve()
    aside = output.with_name(f".{output.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        os.replace(aside, output)
    except UserError:
        raise
    except Exception as error:
        # torch and onnxruntime report a full disk as errors of their own.
        full = shutil.disk_usage(output.parent).free < FULL if output.parent.is_dir() else False
        if not (full or isinstance(error, OSError)):
            raise
        why = f"the disk is full ({error})" if full else str(error)
        raise UserError(f"--output: {output} cannot be written: {why}. Nothing was kept.", exit_code=1) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
