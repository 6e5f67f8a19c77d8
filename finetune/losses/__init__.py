"""The transducer losses: TDT and RNN-T straight from the joint's inputs, without the joint's output tensor.

`fused_tdt_loss` is the function, `FusedTDTLoss` a module that holds its options, and `feasible_clips` says which clips have any
alignment at all. `tdt.py` works through the joint network block by block, `lattice.py` through the alignment lattice.
"""

from finetune.losses.lattice import feasible_clips
from finetune.losses.tdt import FusedTDTLoss, fused_tdt_loss

__all__ = ["FusedTDTLoss", "feasible_clips", "fused_tdt_loss"]
