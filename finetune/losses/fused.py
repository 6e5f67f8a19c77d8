"""The autograd function under `fused_tdt_loss`: forward and backward over blocks of lattice cells.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden (the joint's width),
O joint outputs (V + 1 + D: tokens, blank, durations), N lattice cells (all of the batch, or those of one block).
"""

import torch
from torch.autograd.function import once_differentiable

from finetune.losses.band import band_lattice
from finetune.losses.distillation import RowNumbers, Teacher, distil, numbers_of_rows
from finetune.losses.joint import Joint, Plan


class FusedTransducer(torch.autograd.Function):
    """(B,) losses; clips without cells get inf."""

    @staticmethod
    def forward(ctx, enc_BTH, pred_BUH, weight_OH, bias_O, plan: Plan, teacher: Teacher | None):
        joint = Joint(plan, enc_BTH, pred_BUH, weight_OH, bias_O)
        # Rows below eps^2 vanish in any sum with the others, and on a CPU their subnormal numbers cost more than all
        # the rest.
        tolerance = max(plan.occupancy_threshold, torch.finfo(plan.sum_dtype).eps ** 2)
        with torch.autocast(enc_BTH.device.type, enabled=False):
            losses_B, kept = band_lattice(joint, tolerance)
            losses_B = (losses_B * (1 + plan.fastemit_lambda)).to(plan.sum_dtype)
            saved: tuple[torch.Tensor, ...] = ()
            if kept is not None:
                numbers = numbers_of_rows(plan, kept)
                if teacher is not None:
                    part_B, numbers = distil(joint, teacher, kept, numbers)
                    losses_B += part_B
                    if teacher.part_B is not None:
                        teacher.part_B.copy_(part_B)
                saved = kept.number_N, *numbers
        ctx.plan = plan
        ctx.save_for_backward(enc_BTH, pred_BUH, weight_OH, bias_O, *saved)
        return losses_B

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_B):
        plan: Plan = ctx.plan
        enc_BTH, pred_BUH, weight_OH, bias_O, number_N, *rest = ctx.saved_tensors
        numbers = RowNumbers(*rest)
        need_enc, need_pred, need_weight, need_bias = ctx.needs_input_grad[:4]  # no bias: False
        device, dtype = enc_BTH.device, plan.sum_dtype
        joint = Joint(plan, enc_BTH, pred_BUH, weight_OH, bias_O)
        H = enc_BTH.shape[2]
        grad_enc = torch.zeros(joint.enc.shape, dtype=dtype, device=device) if need_enc else None
        grad_pred = torch.zeros(joint.pred.shape, dtype=dtype, device=device) if need_pred else None
        grad_weight = torch.zeros(weight_OH.shape, dtype=dtype, device=device) if need_weight else None
        grad_bias = torch.zeros(bias_O.shape, dtype=dtype, device=device) if need_bias else None
        # Half precision holds gradient rows up to 1 well; the loss scale goes in after the sums.
        scale_B = torch.where(joint.cells_B > 0, grad_B.to(dtype), 0.0)
        largest = scale_B.abs().amax() if scale_B.numel() else scale_B.sum()
        scale_B = torch.where(largest == 0, 0.0, scale_B / largest)
        kept = joint.all if len(number_N) == plan.cells else joint.cells(number_N)
        next_token_N, scale_N = joint.next_token.index_select(0, kept.position), joint.of_clip(scale_B, kept)

        def add_block(block: slice) -> None:
            cells = kept[block]
            hidden = joint.hidden(cells)
            grad_NO = plan.operations.gradient_rows(
                joint.logits(hidden.dropped_NH),
                *(x[block] for x in numbers),
                next_token_N[block],
                scale_N[block],
                V=plan.V,
                D=len(plan.durations),
                clamp=plan.clamp,
            )
            own_NO = grad_NO[:, : plan.outputs]
            if grad_bias is not None:
                grad_bias[: plan.outputs] += own_NO.sum(0, dtype=dtype)
            if grad_weight is not None:
                if dtype == plan.compute_dtype:
                    grad_weight[: plan.outputs].addmm_(own_NO.t(), hidden.dropped_NH)
                else:
                    grad_weight[: plan.outputs] += (grad_NO.t() @ hidden.dropped_NH)[: plan.outputs]
            if grad_enc is not None or grad_pred is not None:
                joint.add_hidden_gradient(grad_NO @ joint.weight, hidden, cells, grad_enc, grad_pred)

        # A function call a block: its tensors are gone before the next one's are made.
        with torch.autocast(device.type, enabled=False):
            for start, end in plan.operations.blocks([0, len(kept)], plan.block_cells(H)):
                add_block(slice(start, end))

        def finish(grad: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
            return None if grad is None else grad.mul_(largest).view(like.shape).to(like.dtype)

        return (
            finish(grad_enc, enc_BTH),
            finish(grad_pred, pred_BUH),
            finish(grad_weight, weight_OH),
            finish(grad_bias, bias_O),
            None,
            None,
        )
