"""Where an export and its original differ: each part gets NeMo's own inputs, in a process of its own.

    python -m finetune.tools.export.gate.one_parts REQUEST.json

F mel bins, T frames, U tokens, H outputs of the encoder, N cells of the lattice, V outputs of the head.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from finetune.errors import UserError
from finetune.evaluation.recognise import decode_encoded, encode_audio, evaluation_mode
from finetune.evaluation.streaming import chunk_features, encoded_chunks
from finetune.logs import set_up_logging
from finetune.models.features import log_mel
from finetune.models.loading import load_option
from finetune.models.look_ahead import attending, one_context
from finetune.models.nemo import chosen_head, ctc_head, ctc_log_probs, set_head
from finetune.tools.export import TOLERANCE
from finetune.tools.export.gate.clips import load_clips
from finetune.tools.export.gate.graph_parts import Graphs, token_table
from finetune.tools.export.gate.verdict import plain
from finetune.tools.export.graphs import without_one_frame
from finetune.tools.export.layouts import AUTHOR
from finetune.tools.export.online import cut_of
from finetune.tools.export.runtimes import layout_of, load_exported

if TYPE_CHECKING:
    from finetune.models.look_ahead import Context
    from finetune.models.protocols import AsrModel
    from finetune.tools.export.runtimes import SherpaOnnxOnline

LISTED = 3
"""Tokens or settings that a note names."""


@dataclass
class Difference:
    """The largest difference over clips, in parts of NeMo's largest value, and what it does to the texts."""

    difference: float = 0.0
    largest: float = 0.0
    shapes: str = ""
    """The first shapes that are not NeMo's."""
    not_finite: int = 0
    """Clips with infinities or values that are no numbers."""
    changed: int = 0
    """Clips with another text, or cells with another token."""
    of: int = 0

    def add(self, ours: np.ndarray, theirs: np.ndarray) -> bool:
        """Compare one clip's values, ours being NeMo's; return whether they can be compared."""
        if ours.shape != theirs.shape:
            self.shapes = self.shapes or f"{list(theirs.shape)} in place of {list(ours.shape)}"
            return False
        if not np.isfinite(theirs).all():
            self.not_finite += 1
            return False
        self.difference = max(self.difference, float(np.abs(ours - theirs).max(initial=0)))
        self.largest = max(self.largest, float(np.abs(ours).max(initial=0)))
        return True

    @property
    def relative(self) -> float:
        return self.difference / self.largest if self.largest else self.difference

    def row(self, part: str, changes: str) -> dict[str, Any]:
        """Return the part's row of the report.

        Args:
            changes: what `changed` counts, such as "texts".
        """
        if self.shapes:
            return _row(part, "differs", None, f"{part} differ in shape ({self.shapes})")
        if self.not_finite:
            return _row(part, "differs", None, f"{part} are infinite or no numbers on {self.not_finite} clips")
        if self.relative <= TOLERANCE:
            return _row(part, "equal", self.relative, "")
        found = f"{self.changed} of {self.of} {changes} change by it alone"
        if self.changed:
            return _row(part, "differs", self.relative, f"{part} differ by {self.relative:.2g}: {found}")
        return _row(part, "close", self.relative, found)


def _row(part: str, state: str, difference: float | None, note: str) -> dict[str, Any]:
    shown = None if difference is None else f"{difference:.1e}"
    return {"part": part, "state": state, "difference": shown, "note": note}


@dataclass
class Clip:
    """What NeMo computes of one clip."""

    audio_S: np.ndarray
    mel_FT: np.ndarray
    enc_TH: np.ndarray
    text: str
    tokens_U: list[int] = field(default_factory=list)
    u_T: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))
    """Tokens that are emitted before each frame."""


def encode_features(model: AsrModel, mel_FT: np.ndarray, context: Context | None) -> np.ndarray:
    """Return the (T, H) outputs of NeMo's encoder for features: as a whole, or chunk by chunk where there is a context
    to stream with."""
    mel_1FT = torch.from_numpy(np.ascontiguousarray(mel_FT))[None]
    lengths_1 = torch.tensor([mel_FT.shape[1]])
    if context is None:
        enc_1HT, enc_lengths_1 = model.encoder(audio_signal=mel_1FT, length=lengths_1)
        return enc_1HT[0, :, : int(enc_lengths_1[0])].T.numpy()
    chunks = [enc_1HT[0, :, : int(n_1)].T for enc_1HT, n_1 in encoded_chunks(model, mel_1FT, lengths_1, context)]
    return torch.cat(chunks).numpy()


def through_nemo(model: AsrModel, audio_S: np.ndarray, context: Context | None = None) -> Clip:
    """Compute NeMo's features, encoder outputs and text of a clip.

    Args:
        context: to stream with, chunk by chunk, the clip's tail of silence included; None: as a whole.
    """
    if context is None:
        audio_1S, lengths_1 = torch.from_numpy(audio_S)[None], torch.tensor([len(audio_S)])
        mel_1FT, mel_lengths_1 = log_mel(model.preprocessor, audio_1S, lengths_1)
        enc_1HT, enc_lengths_1 = encode_audio(model, audio_1S, lengths_1)
    else:
        audio_1S = torch.from_numpy(cut_of(model, context).with_tail(audio_S))[None]
        mel_1FT, mel_lengths_1 = chunk_features(model, audio_1S, torch.tensor([audio_1S.size(1)]))
        enc_TH = encode_features(model, mel_1FT[0, :, : int(mel_lengths_1[0])].numpy(), context)
        enc_1HT, enc_lengths_1 = torch.from_numpy(enc_TH).T[None], torch.tensor([len(enc_TH)])
    [hypothesis] = decode_encoded(model, enc_1HT, enc_lengths_1)
    frames = int(enc_lengths_1[0])
    clip = Clip(
        audio_S,
        mel_1FT[0, :, : int(mel_lengths_1[0])].numpy(),
        enc_1HT[0, :, :frames].T.numpy(),
        hypothesis.text,
        [int(token) for token in hypothesis.y_sequence],
    )
    stamps = hypothesis.timestamp["timestep"] if isinstance(hypothesis.timestamp, dict) else hypothesis.timestamp
    clip.u_T = np.searchsorted(np.asarray(stamps), np.arange(frames), side="left")
    return clip


def text_of_encoded(model: AsrModel, enc_TH: np.ndarray) -> str:
    """Return what NeMo's decoder makes of encoder outputs."""
    enc_1HT = torch.from_numpy(np.ascontiguousarray(enc_TH.T))[None]
    return decode_encoded(model, enc_1HT, torch.tensor([len(enc_TH)]))[0].text


def compare_features(
    model: AsrModel, clips: list[Clip], exported: Any, context: Context | None = None
) -> dict[str, Any]:
    """Compare the runtime's own features with NeMo's; where they are others by design, by what NeMo itself writes on
    them."""
    found = Difference(of=len(clips))
    for clip in clips:
        mel_FT = exported.features(clip.audio_S)
        if exported.has_nemo_features and not found.add(clip.mel_FT, mel_FT):
            continue
        enc_TH = encode_features(model, mel_FT, context)
        found.changed += plain(text_of_encoded(model, enc_TH)) != plain(clip.text)
    if exported.has_nemo_features:
        return found.row("features", "texts")
    own = f"{exported.runtime} computes features of its own, on which NeMo itself writes"
    note = f"{own} {found.changed} of {len(clips)} clips otherwise"
    return _row("features", "differs" if found.changed else "equal", None, note if found.changed else "")


def compare_encoder(model: AsrModel, clips: list[Clip], graphs: Graphs) -> dict[str, Any]:
    """Compare the encoder's file of a transducer with NeMo's encoder, on NeMo's features."""
    found = Difference(of=len(clips))
    for clip in clips:
        enc_TH = graphs.encode(clip.mel_FT)
        if found.add(clip.enc_TH, enc_TH):
            found.changed += plain(text_of_encoded(model, enc_TH)) != plain(clip.text)
    return found.row("encoder outputs", "texts")


def compare_ctc(model: AsrModel, clips: list[Clip], graphs: Graphs, *, moved: bool) -> dict[str, Any]:
    """Compare the file of a CTC model with NeMo's encoder and head, on NeMo's features.

    Args:
        moved: the file moves frames to the first ones, which are all that sherpa-onnx reads (`without_one_frame`).
    """
    head = ctc_head(model)
    assert head is not None
    found = Difference(of=len(clips))
    for clip in clips:
        enc_1HT = torch.from_numpy(np.ascontiguousarray(clip.enc_TH.T))[None]
        ours_1TV = ctc_log_probs(head, enc_1HT)
        frames = ours_1TV.size(1)
        if moved:
            read = clip.mel_FT.shape[1] // model.encoder.subsampling_factor
            ours_1TV = without_one_frame(ours_1TV, torch.tensor([frames]), torch.tensor([read]))
            frames = min(frames, read)
        ours_TV, theirs_TV = ours_1TV[0, :frames].numpy(), graphs.encode(clip.mel_FT)[:frames]
        if found.add(np.exp(ours_TV), np.exp(theirs_TV)):
            found.changed += best_path(ours_TV) != best_path(theirs_TV)
    return found.row("encoder outputs", "texts")


def best_path(log_probs_TV: np.ndarray) -> list[int]:
    """Return the tokens of a CTC head's best path: labels that come again and blanks, the last label, are dropped."""
    labels_T = log_probs_TV.argmax(1)
    first_T = np.append(True, labels_T[1:] != labels_T[:-1])
    return [int(label) for label in labels_T[first_T] if label != log_probs_TV.shape[1] - 1]


def compare_online_encoder(
    model: AsrModel, clips: list[Clip], graphs: Graphs, exported: SherpaOnnxOnline, context: Context
) -> dict[str, Any]:
    """Compare the file of an encoder that hears chunks with NeMo's encoder, on sherpa-onnx's features, to which
    the file gives NeMo's guard."""
    found = Difference(of=len(clips))
    for clip in clips:
        ours_TH = encode_features(model, exported.features(clip.audio_S), context)
        theirs_TH = graphs.encode(exported.raw_features(clip.audio_S))
        if found.add(ours_TH, theirs_TH):
            found.changed += plain(text_of_encoded(model, theirs_TH)) != plain(text_of_encoded(model, ours_TH))
    return found.row("encoder outputs", "texts")


def compare_joint(model: AsrModel, clips: list[Clip], graphs: Graphs) -> dict[str, Any]:
    """Compare decoder and joint with NeMo's, on NeMo's encoder outputs, at the cells that NeMo's text goes through."""
    found, blank = Difference(), model.tokenizer.vocab_size
    for clip in clips:
        pred_1HU, _, _ = model.decoder(
            targets=torch.tensor([clip.tokens_U], dtype=torch.long), target_length=torch.tensor([len(clip.tokens_U)])
        )
        enc_1TH = model.joint.project_encoder(torch.from_numpy(clip.enc_TH)[None])
        pred_1UH = model.joint.project_prednet(pred_1HU.transpose(1, 2))
        ours_TV = model.joint.joint_net(enc_1TH[0] + pred_1UH[0, clip.u_T]).numpy()
        theirs_TV = graphs.logits(clip.enc_TH, clip.tokens_U, clip.u_T, blank)
        if ours_TV.shape != theirs_TV.shape:
            found.add(ours_TV, theirs_TV)
            continue
        # Logits or log-probabilities: the same but for a constant in each cell.
        ours_TV, theirs_TV = (x - x[:, : blank + 1].max(1, keepdims=True) for x in (ours_TV, theirs_TV))
        found.of += len(ours_TV)
        if found.add(ours_TV, theirs_TV):
            best = [x[:, : blank + 1].argmax(1) for x in (ours_TV, theirs_TV)]
            longest = [x[:, blank + 1 :].argmax(1) if x.shape[1] > blank + 1 else 0 for x in (ours_TV, theirs_TV)]
            found.changed += int(((best[0] != best[1]) | (longest[0] != longest[1])).sum())
    return found.row("decoder and joint", "cells")


def compare_tokens(model: AsrModel, directory: Path) -> dict[str, Any]:
    """Compare the token table with the tokenizer."""
    tokens = model.tokenizer.vocab_size
    ours = {i: model.tokenizer.ids_to_tokens([i])[0] for i in range(tokens)}
    theirs = token_table(directory)
    wrong = [i for i in range(tokens) if theirs.get(i) != ours[i]]
    beyond = sorted(theirs.keys() - ours.keys() - {tokens})
    if not wrong and not beyond and tokens in theirs:
        return _row("token table", "equal", None, "")
    shown = ", ".join(f"{i} is {theirs.get(i)!r} in place of {ours[i]!r}" for i in wrong[:LISTED])
    more = [f"{len(wrong)} of {tokens} tokens ({shown})"] if wrong else []
    more += [f"{len(beyond)} tokens too many"] if beyond else []
    more += [] if tokens in theirs else [f"no blank at {tokens}"]
    return _row("token table", "differs", None, f"token table differs: {'; '.join(more)}")


def compare_settings(
    model: AsrModel, directory: Path, graphs: Graphs, context: Context | None = None
) -> dict[str, Any]:
    """Compare what the files say of features and layout with the model's configuration."""
    said: dict[str, Any] = dict(graphs.metadata())
    config = directory / "config.json"
    if config.is_file():
        said |= json.loads(config.read_text(encoding="utf-8"))
    preprocessor = model.cfg.preprocessor
    ours: dict[str, Any] = {
        "normalize_type": (preprocessor.get("normalize") or "").replace("NA", ""),
        "feat_dim": preprocessor.features,
        "features_size": preprocessor.features,
        "sample_rate": model.preprocessor._sample_rate,
        "subsampling_factor": model.encoder.subsampling_factor,
        "vocab_size": model.tokenizer.vocab_size,
    }
    if not graphs.is_ctc:
        ours |= {"pred_rnn_layers": model.decoder.pred_rnn_layers, "pred_hidden": model.decoder.pred_hidden}
    if context is not None:
        ours |= cut_of(model, context).metadata()
    wrong = {key: said[key] for key in ours if key in said and str(said[key]) != str(ours[key])}
    if not wrong:
        return _row("settings", "equal", None, "")
    shown = ", ".join(f"{key} is {value!r} in place of {ours[key]!r}" for key, value in list(wrong.items())[:LISTED])
    return _row("settings", "differs", None, f"settings differ: {shown}")


def compare_all(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each part."""
    torch.set_num_threads(request["threads"])
    directory, samples = Path(request["directory"]), load_clips(Path(request["clips"]))
    model = load_option(request["model"], request["tokenizer"])
    set_head(model, request["head"])
    parts: list[dict[str, Any]] = []

    def add(part: str, compare: Any, *arguments: Any) -> None:
        try:
            parts.append(compare(*arguments))
        except Exception as error:  # whatever a damaged file brings about names its part
            parts.append(_row(part, "differs", None, f"{part} cannot be run: {str(error).splitlines()[0]}"))

    context = None if request.get("look_ahead") is None else one_context(model, request["look_ahead"])
    with evaluation_mode(model), attending(model.encoder, context):
        clips = [through_nemo(model, samples.audio(i), context) for i in request["chosen"]]
        add("token table", compare_tokens, model, directory)
        graphs = Graphs(directory, request["threads"])
        add("settings", compare_settings, model, directory, graphs, context)

        def load() -> Any:
            return load_exported(directory, threads=request["threads"])

        add("features", lambda: compare_features(model, clips, load(), context))
        if graphs.is_ctc:
            moved = (layout_of(directory) or ("", ""))[0] == "sherpa" and graphs.metadata().get(
                "model_author"
            ) == AUTHOR
            add("encoder outputs", lambda: compare_ctc(model, clips, graphs, moved=moved))
        elif context is None:
            add("encoder outputs", compare_encoder, model, clips, graphs)
        else:
            add("encoder outputs", lambda: compare_online_encoder(model, clips, graphs, load(), context))
        if chosen_head(model) == "transducer":
            add("decoder and joint", compare_joint, model, clips, graphs)
    return parts


def main(argv: list[str]) -> int:
    """Compare what a request names; an error's message goes to standard error."""
    set_up_logging()
    request = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        parts = compare_all(request)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    Path(request["output"]).write_text(json.dumps({"parts": parts}, ensure_ascii=False), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
