"""The ONNX files of an export, run part by part with onnxruntime alone.

A file is known by its inputs, so that the layouts of all runtimes are read alike.

F mel bins, T frames, H outputs of the encoder, N cells of the lattice, V outputs of the head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from finetune.errors import UserError
from finetune.tools.export.online import cut_of_metadata, encode_windows

TYPES = {"tensor(float16)": np.float16, "tensor(int32)": np.int32, "tensor(int64)": np.int64}


class Graphs:
    """The parts of one export.

    Args:
        directory: of the export.
        threads: of onnxruntime.

    Raises:
        UserError: the files are no encoder with a decoder, and no CTC model.
    """

    def __init__(self, directory: Path, threads: int):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self.parts: dict[str, Any] = {}
        for path in sorted(directory.glob("*.onnx")):
            try:
                session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            except Exception as error:  # onnxruntime's errors have no class of their own in common
                raise UserError(f"{path.name} cannot be loaded: {str(error).splitlines()[0]}", exit_code=1) from error
            self.parts[_part(session)] = session
        heads = {"decoder", "joiner"}, {"decoder_joint"}, set()
        if set(self.parts) - {"encoder"} not in heads or "encoder" not in self.parts:
            names = ", ".join(sorted(path.name for path in directory.glob("*.onnx"))) or "no .onnx file"
            raise UserError(f"{directory} holds {names}: no encoder with a decoder, and no CTC model.")

    @property
    def is_ctc(self) -> bool:
        """The encoder's file has the head, and no other is there."""
        return set(self.parts) == {"encoder"}

    def metadata(self) -> dict[str, str]:
        """Return what the encoder's file says of the model."""
        return dict(self.parts["encoder"].get_modelmeta().custom_metadata_map)

    def encode(self, mel_FT: np.ndarray) -> np.ndarray:
        """Return the encoder's outputs for the features of one clip, (T, H); of a CTC model log-probabilities, (T, V).

        Args:
            mel_FT: (F, T) float32.
        """
        if (cut := cut_of_metadata(self.metadata())) is not None:
            return encode_windows(self.parts["encoder"], mel_FT, cut)[0].T
        frames = mel_FT.shape[1]
        found = self._run("encoder", [mel_FT[None], np.array([frames])])
        out = found[0].astype(np.float32)[0]
        if self.is_ctc:
            return out
        return out[:, : int(found[1][0])].T

    def logits(self, enc_TH: np.ndarray, tokens_U: list[int], u_T: np.ndarray, blank: int) -> np.ndarray:
        """Return the joint's outputs at one cell of the lattice for each frame, (T, V).

        Args:
            enc_TH: outputs of the encoder.
            tokens_U: of the text.
            u_T: tokens before each frame, which do not fall.
            blank: what the prediction network begins with.
        """
        name = "decoder_joint" if "decoder_joint" in self.parts else "decoder"
        inputs = [i for i in self.parts[name].get_inputs() if "state" in i.name]
        states = [np.zeros([1 if isinstance(n, str) else n for n in i.shape], _type(i)) for i in inputs]
        rows: list[np.ndarray] = []
        for u, token in enumerate([blank, *tokens_U]):
            chosen_NH = enc_TH[u_T == u]
            enc_1HN = (chosen_NH if len(chosen_NH) else enc_TH[:1]).T[None]
            token_11, one_1 = np.array([[token]]), np.array([1])
            if name == "decoder_joint":
                out, *rest = self._run(name, [enc_1HN, token_11, one_1, *states])
                states = rest[-len(states) :]
                cells_NV = out.reshape(-1, out.shape[-1])
            else:
                pred_1H1, *rest = self._run(name, [token_11, one_1, *states])
                states = rest[-len(states) :]
                cells = [self._run("joiner", [enc_1HN[:, :, n : n + 1], pred_1H1])[0] for n in range(enc_1HN.shape[2])]
                cells_NV = np.concatenate([cell.reshape(1, -1) for cell in cells])
            rows.append(cells_NV[: len(chosen_NH)].astype(np.float32))
        return np.concatenate(rows)

    def _run(self, part: str, values: list[np.ndarray]) -> list[np.ndarray]:
        session = self.parts[part]
        inputs = session.get_inputs()
        named = {i.name: value.astype(_type(i)) for i, value in zip(inputs, values, strict=True)}
        return session.run(None, named)


def _type(tensor: Any) -> Any:
    return TYPES.get(tensor.type, np.float32)


def _part(session: Any) -> str:
    names = {i.name for i in session.get_inputs()}
    if "encoder_outputs" in names:
        return "decoder_joint" if "targets" in names else "joiner"
    return "decoder" if "targets" in names else "encoder"


def token_table(directory: Path) -> dict[int, str]:
    """Read an export's table of tokens, by their ids.

    Raises:
        UserError: there is none, or a line is no token with its number.
    """
    path = next((directory / name for name in ("tokens.txt", "vocab.txt") if (directory / name).is_file()), None)
    if path is None:
        raise UserError(f"{directory} holds neither tokens.txt nor vocab.txt.")
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line:
            continue
        token, _, index = line.rpartition(" ")
        if not index.isdecimal():
            raise UserError(f"{path}: line {number} is no token with its number.")
        found[int(index)] = token
    return found
