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


def walk_alignments(token_logp_TUV, duration_logp_TUD, targets, durations):
    """-log of the summed probability of all alignments of one clip, by walking each; no durations: RNN-T."""
    T, U1, V = token_logp_TUV.shape[0], token_logp_TUV.shape[1], token_logp_TUV.shape[2] - 1
    found = []

    def walk(t, u, logp):
        arcs = [(d, blank, duration_logp_TUD[t, u, i]) for i, d in enumerate(durations) for blank in (True, False)]
        for d, blank, duration in arcs or [(1, True, 0.0), (0, False, 0.0)]:
            if blank and d > 0:
                after = logp + token_logp_TUV[t, u, V] + duration
                if t + d == T and u == U1 - 1:
                    found.append(after)
                elif t + d < T:
                    walk(t + d, u, after)
            elif not blank and u < U1 - 1 and t + d < T:
                walk(t + d, u + 1, logp + token_logp_TUV[t, u, targets[u]] + duration)

    if T > 0:
        walk(0, 0, torch.zeros((), dtype=token_logp_TUV.dtype))
    return -torch.logsumexp(torch.stack(found), 0) if found else torch.tensor(math.inf, dtype=token_logp_TUV.dtype)


def all_alignments_loss(logits_TUO, targets, durations, sigma, rnnt=False):
    """The loss of one clip by all its alignments (float64, autograd follows)."""
    V = logits_TUO.shape[-1] - 1 - len(durations)
    token_logp = torch.log_softmax(logits_TUO[..., : V + 1], -1)
    if rnnt:
        return walk_alignments(token_logp, None, targets, ())
    return walk_alignments(token_logp - sigma, torch.log_softmax(logits_TUO[..., V + 1 :], -1), targets, durations)


def all_alignments_losses(case, durations, sigma=0.0, rnnt=False, activation=torch.relu):
    *tensors, targets_BU, frames_B, tokens_B = case
    logits_BTUO = joint_logits(*tensors, activation)
    clips = zip(logits_BTUO, targets_BU, frames_B.tolist(), tokens_B.tolist())
    return torch.stack([all_alignments_loss(z[:t, : u + 1], y, durations, sigma, rnnt) for z, y, t, u in clips])


def dense_distillation(logits_TUO, teacher_TUO, targets, durations, sigma, rnnt=False):
    """Collapsed distillation of one clip from the whole tensors, gamma by autograd over all alignments."""
    D = len(durations)
    V = logits_TUO.shape[-1] - 1 - D
    heads = [
        torch.log_softmax(logits_TUO[..., : V + 1], -1) - (0.0 if rnnt or not D else sigma),
        torch.log_softmax(logits_TUO[..., V + 1 :], -1),
    ]
    heads = [x.detach().requires_grad_() for x in heads]
    plain = walk_alignments(heads[0], None, targets, ()) if rnnt else walk_alignments(*heads, targets, durations)
    if not torch.isfinite(plain):
        return torch.zeros_like(plain)
    gamma_TU = -torch.autograd.grad(plain, heads[0])[0].sum(-1)

    def three(z_TUO):
        p = torch.softmax(z_TUO[..., : V + 1], -1)
        cells = []
        for t in range(p.shape[0]):
            for u in range(p.shape[1]):
                arcs = [V, *([int(targets[u])] if u + 1 < p.shape[1] else [])]
                others = [v for v in range(V) if v not in arcs]
                parts = [*(p[t, u, v] for v in arcs), *([p[t, u, others].sum()] if others else [])]
                cells.append(torch.stack([*parts, *p.new_ones(3 - len(parts))]))
        return torch.stack(cells).view(*p.shape[:2], 3)

    q_TU3, p_TU3 = three(teacher_TUO), three(logits_TUO)
    term_TU = (q_TU3 * (q_TU3.log() - p_TU3.log())).sum(-1)
    if D and not rnnt:
        q_TUD, p_TUD = (torch.log_softmax(z[..., V + 1 :], -1) for z in (teacher_TUO, logits_TUO))
        term_TU = term_TU + (q_TUD.exp() * (q_TUD - p_TUD)).sum(-1)
    return (gamma_TU * term_TU).sum()


def dense_distillations(case, teacher, durations, sigma=0.0, rnnt=False, activation=torch.relu):
    """(B,) of a case and its teacher's first four arguments."""
    *tensors, targets_BU, frames_B, tokens_B = case
    whole = joint_logits(*tensors, activation), joint_logits(*teacher, activation).detach()
    clips = zip(*whole, targets_BU, frames_B.tolist(), tokens_B.tolist())
    rnnt = rnnt or not durations
    return torch.stack(
        [dense_distillation(z[:t, : u + 1], q[:t, : u + 1], y, durations, sigma, rnnt) for z, q, y, t, u in clips]
    )


def dense_losses(case, durations, sigma):
    """The losses by dynamic programming frame by frame over the whole tensor of joint outputs, clip by clip."""
    *tensors, targets_BU, frames_B, tokens_B = case
    losses = []
    for logits_TUO, targets, T, U in zip(joint_logits(*tensors), targets_BU, frames_B.tolist(), tokens_B.tolist()):
        V = logits_TUO.shape[-1] - 1 - len(durations)
        token_logp = torch.log_softmax(logits_TUO[..., : V + 1], -1) - (sigma if durations else 0.0)
        duration_logp = torch.log_softmax(logits_TUO[..., V + 1 :], -1)
        arcs = [(d, duration_logp[..., i], True) for i, d in enumerate(durations)]
        arcs = arcs or [
            (0, torch.zeros_like(token_logp[..., 0]), True),
            (1, torch.zeros_like(token_logp[..., 0]), False),
        ]
        reached = {(0, 0): [torch.zeros((), dtype=logits_TUO.dtype)]}  # log-probabilities of the ways into each cell
        for t in range(T):
            for u in range(U + 1):
                if (t, u) not in reached:
                    continue
                alpha = torch.logsumexp(torch.stack(reached[t, u]), 0)
                for d, duration, labels in arcs:
                    if d > 0 and (t + d < T or (t + d, u) == (T, U)):
                        reached.setdefault((t + d, u), []).append(alpha + token_logp[t, u, V] + duration[t, u])
                    if labels and u < U and t + d < T:
                        label = token_logp[t, u, targets[u]]
                        reached.setdefault((t + d, u + 1), []).append(alpha + label + duration[t, u])
        ends = reached.get((T, U), []) if T > 0 else []
        losses.append(-torch.logsumexp(torch.stack(ends), 0) if ends else torch.tensor(math.inf).to(logits_TUO.dtype))
    return torch.stack(losses)


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
