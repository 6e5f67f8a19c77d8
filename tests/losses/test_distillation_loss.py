"""Distillation on the lattice's cells against a dense reference over all alignments.

Shape suffixes: B batch, T encoder frames, U target tokens, V vocabulary, D durations, H hidden, O joint outputs.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    TDT,
    all_alignments_losses,
    assert_same,
    dense_distillation,
    dense_distillations,
    gradients,
    joint_logits,
    learnt_case,
    make_case,
)

from finetune.losses import Teacher, band, fused_tdt_loss
from finetune.losses.dropout import dropout_mask
from finetune.tools.planning.accounting import TensorAccount

pytestmark = pytest.mark.usefixtures("one_thread")


def teacher_of(frames, tokens, durations=TDT, V=7, H=4, seed=5, dtype=torch.float64, extra=0):
    """Its network's outputs, of another width than the student's."""
    return [x.detach() for x in make_case(frames, tokens, durations, V, H, dtype, seed, extra)[:4]]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    durations=st.sampled_from([TDT, (1, 2), (0, 2, 4, 8), ()]),
    sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=3),
    V=st.sampled_from([1, 2, 6]),
    sigma=st.sampled_from([0.0, 0.2]),
    weights=st.lists(st.sampled_from([0.0, 0.3, 2.0]), min_size=3, max_size=3),
    rnnt=st.booleans(),
)
def test_equals_the_dense_reference(durations, sizes, V, sigma, weights, rnnt):
    frames, tokens = zip(*sizes)
    frames = [max(1, frames[0]), *frames[1:]]
    case = make_case(frames, tokens, durations, V=V, extra=1)
    network = teacher_of(frames, tokens, durations, V=V, extra=1)
    weight_B = torch.tensor(weights[: len(frames)], dtype=torch.float64)
    plain_B = all_alignments_losses(case, durations, sigma, rnnt=rnnt or not durations)
    part_B = weight_B * dense_distillations(case, network, durations, sigma, rnnt)
    found_B = torch.full_like(weight_B, -1.0)
    actual_B = fused_tdt_loss(
        *case,
        durations=durations,
        sigma=sigma,
        rnnt_draw=rnnt,
        reduction="none",
        teacher=Teacher(*network, weight_B, found_B),
        joint_memory_budget=3_000,
    )
    possible = torch.isfinite(plain_B)
    assert torch.equal(torch.isfinite(actual_B), possible)
    assert not found_B[~possible].any()
    if possible.any():
        assert_same([actual_B[possible]], [(plain_B + part_B)[possible]], 1e-10)
        assert (found_B[possible] - part_B[possible]).abs().max() <= 1e-10
        expected = gradients((plain_B + part_B)[possible].sum(), case)
        assert_same(gradients(actual_B[possible].sum(), case), expected, 1e-9)


def test_the_part_alone_and_no_gradient_for_the_teacher():
    """With gamma a constant, the gradient is that of the reference; the teacher's tensors get none."""
    case = make_case([4, 3], [2, 1])
    network = [x.requires_grad_() for x in teacher_of([4, 3], [2, 1])]
    plain = fused_tdt_loss(*case, reduction="sum")
    whole = fused_tdt_loss(*case, reduction="sum", teacher=Teacher(*network, 0.7))
    expected = gradients(0.7 * dense_distillations(case, network, TDT).sum(), case)
    found = [a - b for a, b in zip(gradients(whole, case), gradients(plain, case))]
    assert_same(found, expected, 1e-10)
    whole.backward()
    assert all(x.grad is None for x in network)


def test_dropout_is_the_students_alone_and_fastemit_multiplies_the_loss_alone():
    case, network = make_case([5, 3], [2, 1], H=11), teacher_of([5, 3], [2, 1])
    enc, pred, weight, bias, targets, frames, tokens = case
    torch.manual_seed(3)
    seed = int(torch.randint(2**31 - 1, ()))
    teacher_BTUO, part, first = joint_logits(*network), 0.0, 0
    for b in range(2):
        t, u1 = frames[b].item(), tokens[b].item() + 1
        mask = dropout_mask(torch.arange(first, first + t * u1), 11, 0.4, seed).view(t, u1, 11)
        hidden = torch.relu(enc[b, :t, None] + pred[b, None, :u1]) * mask / 0.6
        part = part + dense_distillation(hidden @ weight.t() + bias, teacher_BTUO[b, :t, :u1], targets[b], TDT, 0.0)
        first += t * u1
    options = {"dropout": 0.4, "fastemit_lambda": 0.3, "reduction": "sum"}
    losses = []
    for teacher in (None, Teacher(*network)):
        torch.manual_seed(3)
        losses.append(fused_tdt_loss(*case, teacher=teacher, **options))
    assert_same([losses[1] - losses[0]], [part], 1e-10)
    found = [a - b for a, b in zip(gradients(losses[1], case), gradients(losses[0], case))]
    assert_same(found, gradients(part, case), 1e-9)
    with torch.no_grad():
        torch.manual_seed(3)
        assert_same([fused_tdt_loss(*case, teacher=Teacher(*network), **options)], [losses[1].detach()], 1e-12)


def test_the_clamp_holds_for_the_sum():
    case, network = make_case([4], [2]), teacher_of([4], [2])
    loss = fused_tdt_loss(*case, clamp=0.01, teacher=Teacher(*network, 50.0))
    assert gradients(loss, case)[3][:8].abs().max() <= 0.01 * 4 * 3


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    case = learnt_case([20, 12], [6, 0], dtype=torch.float32)
    network = [x.detach() for x in case[:4]]
    plain, part_B = fused_tdt_loss(*case), torch.ones(2)
    whole = fused_tdt_loss(*case, teacher=Teacher(*network, 3.0, part_B))
    assert part_B.abs().max() <= 1e-6
    assert_same(gradients(whole, case), gradients(plain, case), 5e-4)


@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("threshold", [0.0, 1e-4])
def test_sure_models_in_low_precision(half, threshold):
    """Student and teacher are sure of different things: what is left for the other tokens is far below the rounding of
    1 - p."""
    case = learnt_case([40, 25], [12, 7], V=30, sharp=14.0)
    network = [x.detach() for x in case[:4]]
    network[0] = network[0].roll(1, 1)  # hears all one frame later
    network[1] = network[1] + 0.5
    expected = fused_tdt_loss(*case, teacher=Teacher(*network))
    single = [x.detach().float().requires_grad_() for x in case[:4]]
    other = Teacher(*(x.float() for x in network))
    with torch.autocast("cpu", half, enabled=half is not None):
        actual = fused_tdt_loss(*single, *case[4:], teacher=other, occupancy_threshold=threshold)
    tolerance = 5e-4 if half is None else 3e-2
    assert_same([actual.double()], [expected], tolerance)
    found = torch.autograd.grad(actual, single)
    assert_same([x.double() for x in found], gradients(expected, case), tolerance)


@pytest.mark.parametrize("gap", [30.0, 300.0])
def test_a_student_that_excludes_what_the_teacher_says(gap):
    """The ratio of the rests overflows at the second: the gradient stays a number, at most that of the reference."""
    case = make_case([3], [1], (), V=6, dtype=torch.float32)
    with torch.no_grad():
        case[2].zero_()
        case[3].copy_(torch.tensor([-gap] * 6 + [0.0]))
        case[3][case[4][0, 0]] = 0.0
    network = [x.detach().clone() for x in case[:4]]
    network[3] = torch.zeros(7)
    part_B = torch.zeros(1)
    loss = fused_tdt_loss(*case, durations=(), teacher=Teacher(*network, 1.0, part_B))
    assert 0.5 * gap < float(part_B[0]) < 10 * gap
    bias = gradients(loss, case)[3]
    assert torch.isfinite(bias).all()
    if gap < 80:
        others = [v for v in range(6) if v != int(case[4][0, 0])]
        plain = gradients(fused_tdt_loss(*case, durations=()), case)[3]
        assert (bias - plain)[others].sum() < -1.0  # the others get what the teacher gives them


def test_the_band_and_blocks_change_nothing(monkeypatch):
    case = learnt_case([60, 45], [20, 12])
    network = [0.8 * x.detach() for x in case[:4]]
    options = {"teacher": Teacher(*network, torch.tensor([1.0, 0.5])), "occupancy_threshold": 1e-12}
    found = []
    for widest in (0.6, -1.0):
        monkeypatch.setattr(band, "WIDEST_BAND", widest)
        loss = fused_tdt_loss(*case, joint_memory_budget=20_000 if widest > 0 else None, **options)
        found.append([loss, *gradients(loss, case)])
    assert_same(*found, 1e-8)


@pytest.mark.parametrize(("learnt", "threshold"), [(False, 0.0), (True, 0.0), (True, 1e-4)])
def test_a_teacher_takes_little_memory(learnt, threshold):
    """At most 1.3 times what the loss takes itself, with as many cells to a block as at real sizes."""
    sizes = [120, 90, 60], [50, 40, 20]
    case = learnt_case(*sizes, V=300, dtype=torch.float32) if learnt else make_case(*sizes, V=300, H=64)
    case[:4] = [x.detach().float().requires_grad_() for x in case[:4]]
    network = [0.9 * x.detach() for x in case[:4]]
    peaks = []
    for teacher in (None, Teacher(*network)):
        account = TensorAccount()
        account.add([*case, *network], "parameters")
        given = account.total
        with account:
            fused_tdt_loss(*case, occupancy_threshold=threshold, teacher=teacher, joint_memory_budget=2**20).backward()
        peaks.append(account.peak - given)
        for x in case[:4]:
            x.grad = None
    assert peaks[1] <= 1.3 * peaks[0]


def test_empty_batches():
    case = make_case([0, 0], [3, 4])
    loss = fused_tdt_loss(*case, teacher=Teacher(*teacher_of([0, 0], [3, 4])))
    loss.backward()
    assert loss.item() == 0
    assert not any(x.grad.any() for x in case[:4])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"enc_BTH": torch.zeros(2, 3, 4)}, r"teacher.enc_BTH: expected .* \(1, 3, 4\), got \(2, 3, 4\)"),
        ({"weight_OH": torch.zeros(3, 4)}, "teacher.weight_OH"),
        ({"weight": -1.0}, "teacher.weight: expected a finite number >= 0"),
        ({"weight": torch.zeros(3)}, "teacher.weight"),
    ],
)
def test_what_does_not_fit_is_refused(change, named):
    case = make_case([3], [1])
    network = dict(zip(("enc_BTH", "pred_BUH", "weight_OH", "bias_O"), teacher_of([3], [1])))
    with pytest.raises(ValueError, match=named):
        fused_tdt_loss(*case, teacher=Teacher(**{**network, **change}))
