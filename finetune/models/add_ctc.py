"""A CTC head beside the transducer: a TDT or RNN-T model as the hybrid that NeMo restores."""

import logging
from typing import Any

from omegaconf import OmegaConf, open_dict

from finetune.errors import UserError
from finetune.models.nemo import ctc_head, import_nemo, pieces_of
from finetune.models.protocols import AsrModel

log = logging.getLogger(__name__)

LOSS_WEIGHT = 0.3
"""As in the published hybrid models."""


def aux_ctc_section(encoder_width: int, pieces: list[str]) -> dict[str, Any]:
    """Return `aux_ctc` of a hybrid model's configuration: NeMo's ConvASRDecoder on the encoder's outputs."""
    return {
        "ctc_loss_weight": LOSS_WEIGHT,
        "use_cer": False,
        "ctc_reduction": "mean_batch",
        "decoder": {
            "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
            "feat_in": encoder_width,
            "num_classes": len(pieces),
            "vocabulary": pieces,
        },
        "decoding": {"strategy": "greedy_batch"},
    }


def add_ctc_head(model: AsrModel, name: str) -> bool:
    """Give a transducer a CTC head with random weights, in place; its class becomes EncDecHybridRNNTCTCBPEModel.

    Returns:
        Whether it had none.

    Raises:
        UserError: NeMo has no hybrid of the model's class here.
    """
    if ctc_head(model) is not None:
        log.info("model.add_ctc: %s has a CTC head already", name)
        return False
    models = import_nemo()
    if type(model) is not models.EncDecRNNTBPEModel:
        raise UserError(
            f"model.add_ctc: {name} is a {type(model).__name__}; a CTC head can be added to an EncDecRNNTBPEModel "
            "(Parakeet TDT or RNN-T). Set model.add_ctc: false."
        )
    from nemo.collections.asr.losses.ctc import CTCLoss
    from nemo.collections.asr.metrics.wer import WER
    from nemo.collections.asr.parts.submodules.ctc_decoding import CTCBPEDecoding

    hybrid: Any = models.EncDecHybridRNNTCTCBPEModel
    section: Any = OmegaConf.create(aux_ctc_section(model.encoder.d_model, pieces_of(model)))
    tokenizer: Any = model.tokenizer
    with open_dict(model.cfg):
        model.cfg.aux_ctc = section
        model.cfg.target = f"{hybrid.__module__}.{hybrid.__name__}"
    # Building the hybrid anew would take the memory of two models, and the tokenizer's files out of the archive.
    model.__class__ = hybrid
    model.ctc_decoder = hybrid.from_config_dict(section.decoder)
    model.ctc_loss_weight = section.ctc_loss_weight
    model.ctc_loss = CTCLoss(num_classes=section.decoder.num_classes, zero_infinity=True, reduction="mean_batch")
    model.ctc_decoding = CTCBPEDecoding(section.decoding, tokenizer=tokenizer)
    model.ctc_wer = WER(decoding=model.ctc_decoding, use_cer=False, dist_sync_on_step=True)
    model.cur_decoder = "rnnt"
    model.setup_interctc(decoder_name="ctc_decoder", loss_name="ctc_loss", wer_name="ctc_wer")
    log.info("a CTC head of %d outputs was added to %s", section.decoder.num_classes + 1, name)
    return True
