"""The tiny layout of conftest with a CTC head: beside the transducer, or instead of it."""

from typing import Any

from conftest import tiny_layout

HEAD = {
    "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
    "feat_in": None,
    "num_classes": -1,
    "vocabulary": [],
}


def hybrid_layout() -> dict[str, Any]:
    layout = tiny_layout()
    layout["model"]["aux_ctc"] = {"ctc_loss_weight": 0.3, "decoder": dict(HEAD), "decoding": {"strategy": "greedy"}}
    return layout


def ctc_layout() -> dict[str, Any]:
    layout = tiny_layout()
    for name in ("joint", "loss", "model_defaults", "rnnt_reduction"):
        del layout["model"][name]
    layout["model"].update(decoder=dict(HEAD), decoding={"strategy": "greedy"}, ctc_reduction="mean_batch")
    return layout
