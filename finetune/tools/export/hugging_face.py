"""Write a .nemo as a directory that transformers loads, kept only if both give the same texts."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch

from finetune.errors import UserError
from finetune.models.adapters import is_adapter
from finetune.models.huggingface.layout import RECOMPUTED, Kind, feature_settings, kind_of, prompts_of
from finetune.models.huggingface.reading import cached_file, files_on_hub, is_hugging_face
from finetune.models.huggingface.writing import check_expressible, check_texts, head_of_hybrid, write_hugging_face
from finetune.models.loading import check_hub_name, load_model
from finetune.models.nemo import import_nemo, set_head
from finetune.models.nemo_archive import NemoFile, archive_of, read_nemo, save_nemo
from finetune.paths import check_access
from finetune.tools.export import CLIPS, TOLERANCE
from finetune.tools.export.equal_texts import (
    Agreement,
    Samples,
    compare,
    known_languages,
    load_written,
    read_samples,
    same_text,
    synthetic_samples,
    through_nemo,
    through_transformers,
)
from finetune.tools.export.own_data import own_data

log = logging.getLogger(__name__)

LONGEST_CLIP = 30.0  # seconds: the outputs of all clips are kept, four times


def nemo_file(name: str, folder: Path) -> Path:
    """Find the .nemo file of a model, or download it from the hub. Only an adapter needs NeMo, whose merged model is
    written to `folder`.

    Raises:
        UserError: there is none.
    """
    check_access(name, "--model")
    path = Path(name)
    if (archive := archive_of(path, "--model")) is not None:
        return archive
    if is_adapter(path):
        merged = folder / f"{path.resolve().name}.nemo"
        try:
            save_nemo(load_model(name), merged)
        except ImportError as error:
            raise UserError(
                f"--model: {name} is an adapter, and merging it into its base model needs NeMo, which cannot be "
                f"imported here: {error}."
            ) from error
        return merged
    if is_hugging_face(path):
        raise UserError(f"--model: {name} is in Hugging Face's format already. --to nemo makes a .nemo of it.")
    if path.suffix in (".yaml", ".yml") and path.is_file():
        raise UserError(
            f"--model: {name} describes a model with random weights. Train it first, then give the run's directory."
        )
    if path.exists():
        raise UserError(f"--model: {name} is no .nemo file, run directory with model.nemo or adapter.")
    check_hub_name(name, "--model")
    from huggingface_hub import hf_hub_download

    file = name.split("/")[1] + ".nemo"
    try:
        if cached_file(name, file) is None:
            files_on_hub(name)  # without a network this fails at once, the download after five attempts
        return Path(hf_hub_download(name, file))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"--model: {name} is not a local file, and downloading {file} from the hub failed: "
            f"{type(error).__name__}: {reason}",
            exit_code=1,
        ) from error


def samples_for(model_name: str, data: list[str] | None, split: str, rate: int) -> Samples:
    """Choose clips to compare on: of --data, else of the run's own data.validation, else synthetic signals.

    Raises:
        UserError: --data cannot be read.
    """
    if data:
        return read_samples(list(data), split, rate, CLIPS, longest=LONGEST_CLIP)
    reason = "no --data was given"
    if own := own_data(model_name, "validation"):
        try:
            return read_samples(own, "validation", rate, CLIPS, "data.validation", LONGEST_CLIP)
        except UserError as error:
            reason = f"the run's own data.validation cannot be read here ({error})"
    log.warning("no speech was compared: %s. Give validation clips with --data", reason)
    return synthetic_samples(rate)


def export_hugging_face(
    model_name: str,
    output: Path,
    *,
    data: list[str] | None = None,
    split: str = "validation",
    tolerance: float = TOLERANCE,
    dtype: str = "float32",
    head: str | None = None,
) -> str:
    """Write a model in Hugging Face's format, whole or not at all.

    Args:
        model_name: a .nemo file, a run's output directory, an adapter's directory, or the hub name of a NeMo model.
        output: the directory; if it exists, it has to be empty.
        data: data sets whose first clips are compared.
        split: of them.
        tolerance: largest difference of encoder and joint outputs, in parts of the largest value.
        dtype: of the written weights.
        head: "ctc" or "transducer", which a hybrid model has both of; None: its transducer.

    Returns:
        What was written and compared, in lines to print.

    Raises:
        UserError: the model cannot be expressed (with every reason), or what was written is not the same recogniser.
    """
    output = output.resolve()
    if output == Path.cwd().resolve():
        raise UserError(
            f"--output: {output} is the directory that this command runs in, and the result would replace it. Name a "
            "directory in it."
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output: {output} is not empty. Name another directory, or remove it.")
    aside = output.with_name(f".{output.name}.tmp")
    with tempfile.TemporaryDirectory(prefix="finetune-export-") as folder:
        nemo, left_out = head_of_hybrid(read_nemo(nemo_file(model_name, Path(folder))), head)
        check_expressible(nemo)
        samples = samples_for(model_name, data, split, feature_settings(nemo.config)["sampling_rate"])
        check_texts(nemo, [" ".join(text.split()) for text in samples.texts])
        if prompts := prompts_of(nemo.config):
            samples.languages = known_languages(samples.languages, prompts)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            write_hugging_face(nemo, aside, dtype)
            nemo.weights.clear()  # both models are loaded now
            agreement = _check(nemo, aside, samples, tolerance, dtype)
            _put_in_place(aside, output)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return describe_export(output, samples, agreement, tolerance, dtype, kind_of(nemo.config), left_out)


def _put_in_place(aside: Path, output: Path) -> None:
    try:
        os.replace(aside, output)
    except OSError as error:
        raise UserError(
            f"--output: the result cannot be moved to {output}: {error}. Name a directory that does not exist yet.",
            exit_code=1,
        ) from error


def _check(nemo: NemoFile, directory: Path, samples: Samples, tolerance: float, dtype: str) -> Agreement:
    """Compare the written directory with NeMo, in float32 on the written weights; then see what the written type
    changes."""
    kind = kind_of(nemo.config)
    try:
        import_nemo()
    except ImportError as error:
        log.warning(
            "NeMo cannot be imported here (%s): only transformers single was compared with transformers batched", error
        )
        return compare(None, directory, samples, tolerance, kind)
    reference = load_model(str(nemo.path))
    set_head(reference, "ctc" if kind.head == "ctc" else "transducer")
    if dtype == "float32":
        return compare(reference, directory, samples, tolerance, kind)
    before, rounded = through_nemo(reference, samples, 1, kind).texts, getattr(torch, dtype)
    for name, tensor in reference.state_dict().items():
        if tensor.is_floating_point() and not RECOMPUTED.match(name):
            tensor.copy_(tensor.to(rounded))
    agreement = compare(reference, directory, samples, tolerance, kind)
    model, processor = load_written(directory, rounded, kind)
    after = through_transformers(model, processor, samples, 1, kind).texts
    agreement.changed_by_rounding = [
        row for row in zip(samples.ids, before, after, strict=True) if not same_text(row[1], row[2], kind.prompt)
    ]
    return agreement


def describe_export(
    output: Path, samples: Samples, agreement: Agreement, tolerance: float, dtype: str, kind: Kind, left_out: str = ""
) -> str:
    """Report what was written and compared."""
    size = sum(file.stat().st_size for file in output.iterdir())
    lines = [
        f"{output} ({kind.name}, {size / 1e6:.1f} MB, {dtype})",
        *([f"left out: {left_out}"] if left_out else []),
        f"compared on {agreement.clips} clip{'s' if agreement.clips > 1 else ''} of {samples.source}: "
        f"{', '.join(agreement.ways)}",
        f"  texts equal, {agreement.said} not empty; encoder outputs within {agreement.encoder:.1e}, {kind.head_name} "
        f"outputs within {agreement.logits:.1e} of the largest (allowed {tolerance:g})",
    ]
    if samples.passed_over:
        lines.append(f"  {samples.passed_over} clip(s) longer than {LONGEST_CLIP:g} s were passed over")
    if not samples.texts:
        lines.append("  no speech was compared: give validation clips with --data")
    if agreement.unknown:
        lines.append(f"  {agreement.unknown} text(s) hold ⁇ for the unknown piece, which transformers leaves out")
    if changed := agreement.changed_by_rounding:
        clip, one, other = changed[0]
        lines.append(
            f"  in {dtype} {len(changed)} text(s) are others than in float32, such as {clip}: {one!r} and {other!r}"
        )
    elif dtype != "float32" and "NeMo single" in agreement.ways:
        lines.append(f"  in {dtype} all texts are those of float32")
    return "\n".join(lines)
