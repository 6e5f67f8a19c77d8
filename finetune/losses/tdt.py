"""The TDT and RNN-T losses, computed from the joint network's inputs block by block.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden (the joint's width),
O joint outputs (V + 1 + D: tokens, blank, durations), N lattice cells (all of the batch, or those of one block).

The joint network says for each lattice cell n = (b, t, u)
    z_n = weight dropout(activation(enc[b, t] + pred[b, u])) + bias          log p_n = log_softmax of each head of z_n
and the lattice (lattice.py) needs of z_n only the log-probabilities of blank, of the next target token and of the D durations.
So the logits are made for a block of cells at a time, reduced to those D + 2 numbers and the log-sum-exp, and dropped. Backward makes
them again: with the posterior probabilities label_n, blank_n, duration_n that an alignment leaves cell n by such an arc and its occupancy
gamma_n = label_n + blank_n, the gradient row is
    d loss / d z_n[v] = gamma_n softmax(z_n)[v] - label_n [v = next token] - blank_n [v = blank]        tokens and blank
    d loss / d z_n[d] = gamma_n softmax(z_n)[d] - duration_n[d]                                         durations
TDT: arXiv 2304.06795. RNN-T: arXiv 1211.3711. FastEmit: arXiv 2010.11148.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from finetune.losses.checks import check_options, check_shapes, check_values
from finetune.losses.dropout import dropout_mask
from finetune.losses.lattice import check_durations, feasible_clips, forward_backward

# activation(x) in place, and the gradient in place given activation(x)
ACTIVATIONS: dict[str, tuple[Callable, Callable]] = {
    "relu": (torch.relu_, lambda grad, y: grad.mul_(y > 0)),
    "tanh": (torch.tanh_, lambda grad, y: grad.mul_(1 - y.to(grad.dtype) ** 2)),
    "sigmoid": (torch.sigmoid_, lambda grad, y: grad.mul_(y.to(grad.dtype) * (1 - y.to(grad.dtype)))),
}
# Measured: 16 to 128 MiB are equally fast, for 1,024 and 8,192 tokens.
CPU_BLOCK_BYTES = 32 * 2**20
GPU_BLOCK_BYTES = 512 * 2**20
# Kernels count with 32-bit numbers in places.
MOST_ELEMENTS = 2**31 - 1


def fused_tdt_loss(
    enc_BTH: torch.Tensor,
    pred_BUH: torch.Tensor,
    weight_OH: torch.Tensor,
    bias_O: torch.Tensor | None,
    targets_BU: torch.Tensor,
    enc_lengths_B: torch.Tensor,
    target_lengths_B: torch.Tensor,
    *,
    durations: Sequence[int] = (0, 1, 2, 3, 4),
    activation: str = "relu",
    dropout: float = 0.0,
    sigma: float = 0.0,
    omega: float = 0.0,
    rnnt_draw: bool | None = None,
    generator: torch.Generator | None = None,
    reduction: str = "mean_batch",
    occupancy_threshold: float = 0.0,
    fastemit_lambda: float = 0.0,
    clamp: float = 0.0,
    joint_memory_budget: int | None = None,
) -> torch.Tensor:
    """TDT loss (or RNN-T loss, with `durations=()`) without the (B, T, U + 1, O) tensor of joint outputs.

    Matrix products run in autocast's dtype where autocast is on, else in the inputs' own; log-sum-exp in float32 and the lattice in
    float64 (float64 inputs: all in float64). An empty or all-infeasible batch gives 0 with zero gradients (inf under "none").

    Args:
        enc_BTH: (B, T, H) encoder outputs, already projected to the joint's width.
        pred_BUH: (B, U + 1, H) prediction network outputs for start of sequence and each target, projected to the joint's width.
        weight_OH: (O, H) weight of the joint's last linear layer, O = V + 1 + len(durations); the blank is row V, durations come last.
        bias_O: (O,) its bias, or None.
        targets_BU: (B, U) token ids in [0, V), padded with anything; int32 or int64.
        enc_lengths_B: (B,) frames of each clip, 0 <= length <= T.
        target_lengths_B: (B,) tokens of each clip, 0 <= length <= U.
        durations: what each duration output stands for, in encoder frames; () for plain RNN-T.
        activation: "relu", "tanh" or "sigmoid", between the sum of `enc` and `pred` and the linear layer.
        dropout: probability with which an activation is zeroed (the others are scaled up), before the linear layer. The masks come
            from a seed drawn from torch's global CPU generator, so torch.manual_seed reproduces them on any device and for any
            block size.
        sigma: logit under-normalisation: subtracted from the log-probability of each token and blank, not of durations. No effect
            on the RNN-T loss, as in NeMo.
        omega: probability with which the whole batch gets the RNN-T loss on the token outputs in place of the TDT loss. No effect with
            `durations=()` or when `rnnt_draw` is given.
        rnnt_draw: the outcome of that draw, where the caller makes it (several processes, or accumulated batches): True RNN-T, False TDT.
        generator: CPU generator for the draw; None draws from torch's global CPU generator.
        reduction: "none": (B,) losses; "sum"; "mean_batch": sum / clips; "mean": mean over clips of loss / tokens; "mean_volume": sum /
            tokens of all clips. As NeMo's, except that infeasible clips take no part in sums, counts and token counts, and that a
            number of tokens (of a clip in "mean", of the batch in "mean_volume") counts as at least 1, where NeMo divides by 0.
        occupancy_threshold: cells whose occupancy (posterior probability that an alignment passes through) is below this are left out of
            backward; each changes the gradient by a row whose absolute values sum to less than 4 thresholds. 0 is exact: only cells
            below the square of the dtype's eps (1e-14 in float32) are left out, which no sum could tell.
        fastemit_lambda: FastEmit regularisation as in NeMo: label arcs weigh 1 + lambda in the gradient of the token outputs, and the
            loss is multiplied by 1 + lambda.
        clamp: above 0, each clip's gradient of the token outputs of a cell is clamped to [-clamp, clamp], as in NeMo.
        joint_memory_budget: bytes for the tensors of a block of cells. None: 32 MiB on the CPU, 512 MiB elsewhere.

    Returns:
        A scalar, or (B,) under "none": losses in nats, float32 (float64 for float64 inputs). A clip without any alignment
        (`feasible_clips`) is inf under "none", with zero gradient, and left out otherwise.

    Raises:
        ValueError: an argument has the wrong shape, type or range; names the argument and what was expected.
    """
    durations = check_durations(durations)
    V = check_shapes(enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, enc_lengths_B, target_lengths_B, len(durations))
    check_options(
        activation, dropout, sigma, omega, reduction, occupancy_threshold, fastemit_lambda, joint_memory_budget
    )
    frames, tokens = check_values(enc_BTH, targets_BU, enc_lengths_B, target_lengths_B, V)

    plain_rnnt = not durations
    if durations and rnnt_draw is None and omega > 0:
        rnnt_draw = bool(torch.rand((), generator=generator) < omega)
    if plain_rnnt or rnnt_draw:
        durations, plain_rnnt = (), True
    feasible = feasible_clips(torch.tensor(frames), torch.tensor(tokens), durations)
    device = enc_BTH.device
    if device.type == "cpu":
        budget = joint_memory_budget or CPU_BLOCK_BYTES
    else:
        budget = joint_memory_budget or GPU_BLOCK_BYTES
    inputs = (enc_BTH, pred_BUH, weight_OH, bias_O)
    plan = _Plan(
        frames=[t if ok else 0 for t, ok in zip(frames, feasible.tolist())],
        tokens=[u if ok else 0 for u, ok in zip(tokens, feasible.tolist())],
        V=V,
        durations=durations,
        activation=activation,
        dropout=float(dropout),
        seed=int(torch.randint(2**31 - 1, ())) if dropout > 0 else 0,
        sigma=0.0 if plain_rnnt else float(sigma),
        occupancy_threshold=float(occupancy_threshold),
        fastemit_lambda=float(fastemit_lambda),
        clamp=float(clamp),
        budget=budget,
        compute_dtype=_compute_dtype(device, inputs),
        needs_gradient=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs),
    )
    losses_B = _FusedTransducer.apply(enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, plan)
    return _reduce(losses_B, feasible, tokens, reduction)


class FusedTDTLoss(nn.Module):
    """`fused_tdt_loss` with its options held; the arguments are those of the function.

    In eval mode neither dropout nor the draw of omega takes place (unless `rnnt_draw` is passed), so validation losses can be compared.
    """

    def __init__(
        self,
        *,
        durations: Sequence[int] = (0, 1, 2, 3, 4),
        activation: str = "relu",
        dropout: float = 0.0,
        sigma: float = 0.0,
        omega: float = 0.0,
        generator: torch.Generator | None = None,
        reduction: str = "mean_batch",
        occupancy_threshold: float = 0.0,
        fastemit_lambda: float = 0.0,
        clamp: float = 0.0,
        joint_memory_budget: int | None = None,
    ):
        super().__init__()
        check_options(
            activation, dropout, sigma, omega, reduction, occupancy_threshold, fastemit_lambda, joint_memory_budget
        )
        self.dropout, self.omega, self.generator = dropout, omega, generator
        self.options = {
            "durations": check_durations(durations),
            "activation": activation,
            "sigma": sigma,
            "reduction": reduction,
            "occupancy_threshold": occupancy_threshold,
            "fastemit_lambda": fastemit_lambda,
            "clamp": clamp,
            "joint_memory_budget": joint_memory_budget,
        }

    def forward(
        self,
        enc_BTH: torch.Tensor,
        pred_BUH: torch.Tensor,
        weight_OH: torch.Tensor,
        bias_O: torch.Tensor | None,
        targets_BU: torch.Tensor,
        enc_lengths_B: torch.Tensor,
        target_lengths_B: torch.Tensor,
        rnnt_draw: bool | None = None,
    ) -> torch.Tensor:
        return fused_tdt_loss(
            enc_BTH,
            pred_BUH,
            weight_OH,
            bias_O,
            targets_BU,
            enc_lengths_B,
            target_lengths_B,
            dropout=self.dropout if self.training else 0.0,
            omega=self.omega if self.training else 0.0,
            rnnt_draw=rnnt_draw,
            generator=self.generator,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(
            f"{k}={v!r}" for k, v in {"dropout": self.dropout, "omega": self.omega, **self.options}.items()
        )


# --------------------------------------------------------------------------------------------------- the loss over blocks of cells


@dataclass(frozen=True)
class _Plan:
    """What one call computes, decided before any cell is touched; durations () means RNN-T."""

    frames: list[int]  # of each clip, 0 where it is infeasible: it then has no cells
    tokens: list[int]
    V: int
    durations: tuple[int, ...]
    activation: str
    dropout: float
    seed: int
    sigma: float
    occupancy_threshold: float
    fastemit_lambda: float
    clamp: float
    budget: int
    compute_dtype: torch.dtype
    needs_gradient: bool

    @property
    def outputs(self) -> int:
        """The joint outputs in use: RNN-T on a TDT joint leaves the duration outputs out."""
        return self.V + 1 + len(self.durations)

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.compute_dtype == torch.float64 else torch.float32

    @property
    def cells(self) -> int:
        return sum(t * (u + 1) for t, u in zip(self.frames, self.tokens))

    def block_cells(self, H: int) -> int:
        """Cells in a block such that its tensors stay within the budget."""
        wide = self.sum_dtype.itemsize
        narrow = self.compute_dtype.itemsize if self.compute_dtype != self.sum_dtype else 0
        # Logits and their copy in the other precision; enc, pred, activation, its gradient and a temporary; cell indices and D + 4 numbers.
        a_cell = self.outputs * (wide + narrow) + H * (5 * wide + narrow) + 8 * (8 + len(self.durations))
        if self.dropout:
            a_cell += H * (wide + 24)  # the mask is hashed in 64-bit numbers on a GPU
        return max(1, min(self.budget // a_cell, MOST_ELEMENTS // max(self.outputs, H)))


class _FusedTransducer(torch.autograd.Function):
    """(B,) losses; clips without cells get inf."""

    @staticmethod
    def forward(ctx, enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, plan: _Plan):
        device, N, D = enc_BTH.device, plan.cells, len(plan.durations)
        joint = _Joint(plan, enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU)
        lse_N, blank_N, label_N = torch.empty(3, N, dtype=plan.sum_dtype, device=device)
        duration_ND = torch.zeros(N, D or 2, dtype=plan.sum_dtype, device=device)
        step = plan.block_cells(enc_BTH.shape[2])
        with torch.autocast(device.type, enabled=False):
            for start in range(0, N, step):
                block = slice(start, min(start + step, N))
                cells = joint.cells(torch.arange(block.start, block.stop, device=device))
                logits_NO = joint.logits(joint.dropped(joint.hidden(cells), joint.kept(cells)))
                if D:
                    duration_ND[block] = torch.log_softmax(logits_NO[:, plan.V + 1 :], 1)
                tokens_NV = logits_NO[:, : plan.V + 1]
                blank_N[block] = tokens_NV[:, plan.V]
                label_N[block] = tokens_NV.gather(1, cells.next_token[:, None])[:, 0]
                top_N1 = tokens_NV.amax(1, keepdim=True)
                lse_N[block] = tokens_NV.sub_(top_N1).exp_().sum(1).log_().add_(top_N1[:, 0])
            norm_N = lse_N + plan.sigma
            lattice = forward_backward(
                blank_N - norm_N,
                label_N - norm_N,
                duration_ND,
                plan.frames,
                plan.tokens,
                plan.durations or (0, 1),
                labels_stay=not plan.durations,
                posteriors=plan.needs_gradient,
            )
        ctx.plan = plan
        if plan.needs_gradient:
            posteriors = (x.to(plan.sum_dtype) for x in (lattice.label_N, lattice.blank_N, lattice.duration_ND))
            ctx.save_for_backward(enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, lse_N, *posteriors)
        return (lattice.losses_B * (1 + plan.fastemit_lambda)).to(plan.sum_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_B):
        plan: _Plan = ctx.plan
        enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU, lse_N, label_N, blank_N, duration_ND = ctx.saved_tensors
        need_enc, need_pred, need_weight, need_bias = ctx.needs_input_grad[:4]
        device, dtype, V, D = enc_BTH.device, plan.sum_dtype, plan.V, len(plan.durations)
        joint = _Joint(plan, enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU)
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
        # Rows below eps^2 vanish in any sum with the others, and on a CPU their subnormal numbers cost more than all the rest.
        least = max(plan.occupancy_threshold, torch.finfo(dtype).eps ** 2)
        # "not below" keeps cells that are no number, so that a broken forward shows in the gradient.
        kept_N = torch.nonzero(~(label_N + blank_N < least))[:, 0]
        N, step = kept_N.shape[0], plan.block_cells(H)
        with torch.autocast(device.type, enabled=False):
            for start in range(0, N, step):
                which = kept_N[start : start + step]
                cells = joint.cells(which)
                hidden_NH = joint.hidden(cells)
                kept_NH = joint.kept(cells)
                dropped_NH = joint.dropped(hidden_NH, kept_NH)
                grad_NO = joint.logits(dropped_NH)
                label_block, blank_block, scale_N1 = label_N[which], blank_N[which], scale_B[cells.clip][:, None]
                gamma_N1 = (label_block + blank_block)[:, None]
                label_weighted = label_block * (1 + plan.fastemit_lambda)
                tokens_NV = grad_NO[:, : V + 1]
                tokens_NV.sub_(lse_N[which][:, None]).exp_().mul_((label_weighted + blank_block)[:, None])
                tokens_NV[:, V] -= blank_block
                tokens_NV.scatter_add_(1, cells.next_token[:, None], -label_weighted[:, None])
                if plan.clamp > 0:
                    tokens_NV.clamp_(-plan.clamp, plan.clamp)
                if D:
                    grad_NO[:, V + 1 :] = torch.softmax(grad_NO[:, V + 1 :], 1).mul_(gamma_N1).sub_(duration_ND[which])
                grad_NO.mul_(scale_N1)
                if need_bias:
                    grad_bias[: plan.outputs] += grad_NO.sum(0)
                grad_NO = grad_NO.to(plan.compute_dtype)
                if need_weight:
                    if dtype == plan.compute_dtype:
                        grad_weight[: plan.outputs].addmm_(grad_NO.t(), dropped_NH)
                    else:
                        grad_weight[: plan.outputs] += grad_NO.t() @ dropped_NH
                if need_enc or need_pred:
                    grad_NH = (grad_NO @ joint.weight).to(dtype)
                    grad_NH = joint.hidden_gradient(grad_NH, hidden_NH, kept_NH)
                    if need_enc:
                        grad_enc.index_add_(0, cells.frame, grad_NH)
                    if need_pred:
                        grad_pred.index_add_(0, cells.position, grad_NH)

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


@dataclass(frozen=True)
class _Cells:
    """The cells of a block: number in the batch, clip, row of enc (b, t), row of pred (b, u), next token (0 where u = U)."""

    number: torch.Tensor
    clip: torch.Tensor
    frame: torch.Tensor
    position: torch.Tensor
    next_token: torch.Tensor


class _Joint:
    """The joint network on chosen cells, with its tensors cast and laid out once."""

    def __init__(self, plan: _Plan, enc_BTH, pred_BUH, weight_OH, bias_O, targets_BU):
        self.plan = plan
        self.T, self.U1 = enc_BTH.shape[1], pred_BUH.shape[1]
        self.enc = enc_BTH.reshape(-1, enc_BTH.shape[2])
        self.pred = pred_BUH.reshape(-1, pred_BUH.shape[2])
        self.weight = weight_OH[: plan.outputs].to(plan.compute_dtype)
        self.bias = None if bias_O is None else bias_O[: plan.outputs].to(plan.compute_dtype)
        device = enc_BTH.device
        # The token after position u, one column longer than the targets so that u = U has an (unused) entry too; padding may hold anything.
        next_token = torch.zeros(pred_BUH.shape[:2], dtype=torch.int64, device=device)
        next_token[:, : targets_BU.shape[1]] = targets_BU
        lengths = torch.tensor([plan.frames, plan.tokens], dtype=torch.int64).to(device, non_blocking=True)
        inside = torch.arange(self.U1, device=device) < lengths[1][:, None]
        self.next_token = next_token.mul_(inside).reshape(-1)
        self.width_B = lengths[1] + 1
        self.end_B = (lengths[0] * self.width_B).cumsum(0)
        self.first_B = self.end_B - lengths[0] * self.width_B

    def cells(self, number_N: torch.Tensor) -> _Cells:
        clip = torch.searchsorted(self.end_B, number_N, right=True)
        within, width = number_N - self.first_B[clip], self.width_B[clip]
        t = torch.div(within, width, rounding_mode="floor")
        position = clip * self.U1 + within - t * width
        return _Cells(number_N, clip, clip * self.T + t, position, self.next_token[position])

    def hidden(self, cells: _Cells) -> torch.Tensor:
        """activation(enc + pred), (N, H), in the compute dtype."""
        activate, _ = ACTIVATIONS[self.plan.activation]
        sum_NH = self.enc.index_select(0, cells.frame) + self.pred.index_select(0, cells.position)
        return activate(sum_NH).to(self.plan.compute_dtype)

    def kept(self, cells: _Cells) -> torch.Tensor | None:
        """(N, H) bool, False where dropout zeroes; None without dropout."""
        plan = self.plan
        return dropout_mask(cells.number, self.enc.shape[1], plan.dropout, plan.seed) if plan.dropout else None

    def dropped(self, hidden_NH: torch.Tensor, kept_NH: torch.Tensor | None) -> torch.Tensor:
        return hidden_NH if kept_NH is None else (hidden_NH * kept_NH).mul_(1 / (1 - self.plan.dropout))

    def logits(self, dropped_NH: torch.Tensor) -> torch.Tensor:
        """(N, O) in float32 or float64."""
        return nn.functional.linear(dropped_NH, self.weight, self.bias).to(self.plan.sum_dtype)

    def hidden_gradient(
        self, grad_NH: torch.Tensor, hidden_NH: torch.Tensor, kept_NH: torch.Tensor | None
    ) -> torch.Tensor:
        """The gradient of enc + pred from that of the linear layer's input, in place."""
        if kept_NH is not None:
            grad_NH.mul_(kept_NH).mul_(1 / (1 - self.plan.dropout))
        _, activation_gradient = ACTIVATIONS[self.plan.activation]
        return activation_gradient(grad_NH, hidden_NH)


def _reduce(losses_B: torch.Tensor, feasible_B: torch.Tensor, tokens: list[int], reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses_B
    kept_B = torch.where(feasible_B.to(losses_B.device, non_blocking=True), losses_B, 0.0)
    clips = max(int(feasible_B.sum()), 1)
    if reduction == "sum":
        return kept_B.sum()
    if reduction == "mean_batch":
        return kept_B.sum() / clips
    if reduction == "mean":
        tokens_B = torch.tensor(tokens).clamp(min=1).to(losses_B.device, non_blocking=True)
        return (kept_B / tokens_B).sum() / clips
    return kept_B.sum() / max(sum(u for u, ok in zip(tokens, feasible_B.tolist()) if ok), 1)


def _compute_dtype(device: torch.device, inputs: Sequence[torch.Tensor | None]) -> torch.dtype:
    """The dtype of the matrix products: autocast's where it is on (it leaves float64 alone), else that of the inputs together."""
    dtype = inputs[0].dtype
    for x in inputs[1:]:
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype
