"""The autograd function under `fused_tdt_loss`: forward and backward over blocks of lattice cells.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden (the joint's width),
O joint outputs (V + 1 + D: tokens, blank, durations), N lattice cells (all of the batch, or those of one block).
"""

import torch
from torch.autograd.function import once_differentiable

from finetune.losses.band import band_lattice
from finetune.losses.joint import Joint, Plan


class FusedTransducer(torch.autograd.Function):
    """(B,) losses; clips without cells get inf."""

    @staticmethod
    def forward(ctx, enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, plan: Plan):
        joint = Joint(plan, enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU)
        with torch.autocast(enc_BTH.device.type, enabled=False):
            lse_N, lattice = band_lattice(joint, max(plan.occupancy_threshold, torch.finfo(plan.sum_dtype).eps ** 2))
        ctx.plan = plan
        if plan.needs_gradient:
            posteriors = (x.to(plan.sum_dtype) for x in (lattice.label_N, lattice.blank_N, lattice.duration_ND))
            ctx.save_for_backward(enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, lse_N, *posteriors)
        return (lattice.losses_B * (1 + plan.fastemit_lambda)).to(plan.sum_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_B):
        plan: Plan = ctx.plan
        enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, lse_N, label_N, blank_N, duration_ND = ctx.saved_tensors
        need_enc, need_pred, need_weight, need_bias = ctx.needs_input_grad[:4]  # no bias: False
        device, dtype = enc_BTH.device, plan.sum_dtype
        joint = Joint(plan, enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU)
        H = enc_BTH.shape[2]
        grad_enc = torch.zeros(joint.enc.shape, dtype=dtype, device=device) if need_enc else None
        grad_pred = torch.zeros(joint.pred.shape, dtype=dtype, device=device) if need_pred else None
        grad_weight = torch.zeros(weight_OH.shape, dtype=dtype, device=device) if need_weight else None
        grad_bias = torch.zeros(bias_O.shape, dtype=dtype, device=device) if need_bias else None
        # Half precision holds gradient rows up to 1 well; the loss scale goes in after the sums.
        has_cells_B = torch.tensor([t > 0 for t in plan.frames], dtype=torch.bool).to(device, non_blocking=True)
        scale_B = torch.where(has_cells_B, grad_B.to(dtype), 0.0)
        largest = scale_B.abs().amax() if scale_B.numel() else scale_B.sum()
        scale_B = torch.where(largest == 0, 0.0, scale_B / largest)
        # Rows below eps^2 vanish in any sum with the others, and on a CPU their subnormal numbers cost more than all
        # the rest.
        least = max(plan.occupancy_threshold, torch.finfo(dtype).eps ** 2)
        # "not below" keeps cells that are no number, so that a broken forward shows in the gradient.
        kept_N = plan.operations.cells_where(~(label_N + blank_N < least))
        N, step = kept_N.shape[0], plan.block_cells(H)

        def add_block(which: torch.Tensor) -> None:
            cells = joint.cells(which)
            hidden = joint.hidden(cells)
            grad_NO = plan.operations.gradient_rows(
                joint.logits(hidden.dropped_NH),
                lse_N[which],
                label_N[which],
                blank_N[which],
                duration_ND[which],
                cells.next_token,
                scale_B[cells.clip],
                V=plan.V,
                D=len(plan.durations),
                fastemit_lambda=plan.fastemit_lambda,
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
            for start, end in plan.operations.blocks(0, N, step):
                add_block(kept_N[start:end])

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
