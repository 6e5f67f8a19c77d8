"""The losses: TDT and RNN-T straight from the joint's inputs, without the joint's output tensor, and CTC.

`fused_tdt_loss` is the function, `feasible_clips` says which clips have any alignment at all, and `use_in_nemo` and
`use_in_transformers` put the loss into models that others train. `fused.py` works through the joint network
(`joint.py`) block by block, `band.py` finds the cells that matter, `lattice.py` runs through the alignment lattice,
`distillation.py` adds what a teacher says of them, `hidden.py` makes the input of the joint's last layer and takes
its gradient, and `rows.py` turns the layer's outputs into log-sum-exps and gradients; on a GPU the kernels of
`*_triton.py` do lattice, hidden values and rows. `ctc.py` is CTC by utterance.
"""

from finetune.losses.ctc import ctc_losses, feasible_ctc_clips
from finetune.losses.distillation import Teacher
from finetune.losses.dropin import use_in_nemo, use_in_transformers
from finetune.losses.lattice import feasible_clips
from finetune.losses.tdt import fused_tdt_loss

__all__ = [
    "Teacher",
    "ctc_losses",
    "feasible_clips",
    "feasible_ctc_clips",
    "fused_tdt_loss",
    "use_in_nemo",
    "use_in_transformers",
]
