"""Inputs of the transducer loss, and references that share no code with it.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden, O joint outputs.
"""

import math

import torch

TDT = (0, 1, 2, 3, 4)


def make_case(frames, tokens, durations=TDT, V=7, H=5, dtype=torch.float64, seed=0, extra=0):
    """Positional arguments of fused_tdt_loss for clips of these lengths; `extra` frames and tokens of padding."""
    g = torch.Generator().manual_seed(seed)
    B, T, U, outputs = len(frames), max(frames) + extra, max(tokens) + extra, V + 1 + len(durations)
    shapes = (B, T, H), (B, U + 1, H), (outputs, H), (outputs,)
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    targets = torch.randint(0, V, (B, U), generator=g)
    return [*tensors, targets, torch.tensor(frames), torch.tensor(tokens)]


def learnt_case(frames, tokens, durations=TDT, V=50, sharp=8.0, dtype=torch.float64, seed=0):
    """Joint inputs of a model that has learnt: the next token wins over blank at its frame, blank elsewhere."""
    g = torch.Generator().manual_seed(seed)
    B, T, U, D = len(frames), max(frames), max(max(tokens), 1), len(durations)
    H = V + 1 + D + 2 * (T + 1)
    enc, pred = torch.zeros(B, T, H), torch.zeros(B, U + 1, H)
    targets = torch.randint(0, V, (B, U), generator=g)
    for b, (t_end, u_end) in enumerate(zip(frames, tokens)):
        spoken = sorted(torch.randperm(t_end, generator=g)[: min(u_end, t_end)].tolist())
        spoken += [t_end - 1] * (u_end - len(spoken))
        for u, t in enumerate(spoken):
            enc[b, t, targets[b, u]] += 2.0  # "this token sounds here"
            pred[b, u, targets[b, u]] += 1.0  # "this token is next"
        enc[b, :, V] = 1.5
        enc[b, :, V + 1 + min(1, D - 1)] = 2.0
    weight = torch.zeros(V + 1 + D, H)
    weight[: V + 1 + D, : V + 1 + D] = sharp * torch.eye(V + 1 + D)
    weight += 0.1 * torch.randn(weight.shape, generator=g)
    bias = 0.1 * torch.randn(V + 1 + D, generator=g)
    tensors = [x.to(dtype).requires_grad_() for x in (enc, pred, weight, bias)]
    return [*tensors, targets, torch.tensor(frames), torch.tensor(tokens)]


def joint_logits(enc_BTH, pred_BUH, weight_OH, bias_O, activation=torch.relu):
    return activation(enc_BTH[:, :, None] + pred_BUH[:, None]) @ weight_OH.t() + bias_O


def all_alignments_loss(logits_TUO, targets, durations, sigma, rnnt=False):
    """-log of the summed probability of all alignments of one clip, by walking each (float64, autograd follows)."""
    T, U1, outputs = logits_TUO.shape
    V = outputs - 1 - len(durations)
    token_logp = torch.log_softmax(logits_TUO[..., : V + 1], -1) - (0.0 if rnnt else sigma)
    duration_logp = None if rnnt else torch.log_softmax(logits_TUO[..., V + 1 :], -1)
    found = []

    def walk(t, u, logp):
        if rnnt:
            arcs = [(1, True, 0.0), (0, False, 0.0)]
        else:
            arcs = [(d, blank, duration_logp[t, u, i]) for i, d in enumerate(durations) for blank in (True, False)]
        for d, blank, duration in arcs:
            if blank and d > 0:
                after = logp + token_logp[t, u, V] + duration
                if t + d == T and u == U1 - 1:
                    found.append(after)
                elif t + d < T:
                    walk(t + d, u, after)
            elif not blank and u < U1 - 1 and t + d < T:
                walk(t + d, u + 1, logp + token_logp[t, u, targets[u]] + duration)

    if T > 0:
        walk(0, 0, torch.zeros((), dtype=logits_TUO.dtype))
    return -torch.logsumexp(torch.stack(found), 0) if found else torch.tensor(math.inf, dtype=logits_TUO.dtype)


def all_alignments_losses(case, durations, sigma=0.0, rnnt=False, activation=torch.relu):
    *tensors, targets_BU, frames_B, tokens_B = case
    logits_BTUO = joint_logits(*tensors, activation)
    clips = zip(logits_BTUO, targets_BU, frames_B.tolist(), tokens_B.tolist())
    return torch.stack([all_alignments_loss(z[:t, : u + 1], y, durations, sigma, rnnt) for z, y, t, u in clips])


def transformers_losses(case, sigma=0.0, reduction="none"):
    from transformers.loss.loss_tdt import tdt_loss

    *tensors, targets_BU, frames_B, tokens_B = case
    logits_BTUO = joint_logits(*tensors)
    V = logits_BTUO.shape[-1] - 1 - len(TDT)
    tokens, durations = logits_BTUO[..., : V + 1], logits_BTUO[..., V + 1 :]
    return tdt_loss(tokens, durations, targets_BU, frames_B, tokens_B, V, list(TDT), sigma=sigma, reduction=reduction)


def gradients(loss, case):
    return torch.autograd.grad(loss, case[:4], retain_graph=True)


def assert_same(actual, expected, rtol):
    """Largest difference relative to the largest number of each tensor."""
    for a, e in zip(actual, expected):
        assert torch.isfinite(e).all()
        assert (a - e).abs().max() <= rtol * e.abs().max().clamp(min=1e-30), (a - e).abs().max() / e.abs().max()
