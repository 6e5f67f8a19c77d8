"""The GPU kernels under Triton's interpreter, and compiled for GPUs that are not here: python
tests/losses/interpreted.py run | compile.

In processes of their own, since Triton reads TRITON_INTERPRET when it is imported. Ends with 0 when everything is as
it should be.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # loss_cases
if sys.argv[1] == "run":
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from finetune.losses import lattice, lattice_triton, rows, rows_triton

DURATIONS = (((0, 1, 2, 3, 4), 5), ((1, 2), 2), ((0, 1), 1), ((0, 2, 4, 8), 4))


def lattices() -> None:
    g = torch.Generator().manual_seed(0)
    for durations, label_durations in DURATIONS:
        wide = [([20, 3], [9, 33])] if len(durations) in (2, 5) else []  # slow: programs of more than one warp
        for frames, tokens in (([7, 5, 1, 0], [3, 0, 2, 1]), ([1], [0]), ([0], [3]), *wide):
            N = sum(t * (u + 1) for t, u in zip(frames, tokens))
            blank_N, label_N = (torch.randn(2, N, generator=g, dtype=torch.float64) * 3 - 2).unbind(0)
            duration_ND = torch.log_softmax(torch.randn(N, len(durations), generator=g, dtype=torch.float64), 1)
            if N > 30:
                blank_N[5], label_N[7] = float("-inf"), float("-inf")
            arguments = (blank_N, label_N, duration_ND, frames, tokens, durations, label_durations)
            expected = lattice._solve_numba(*arguments, True)
            actual = lattice_triton.solve(*arguments, True)
            for a, e in zip(actual, expected):
                torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-14, equal_nan=True)
            if N < 100:
                losses_B, *none = lattice_triton.solve(*arguments, False)
                assert torch.equal(losses_B, actual[0])
                assert not any(x.numel() for x in none)


def joint_rows() -> None:
    g = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
        for V, D, clamp in ((7, 5, 0.0), (130, 0, 0.0), (3000, 2, 0.05)):
            logits_NO = (4 * torch.randn(6, V + 1 + D, generator=g)).to(dtype)
            lse_N = rows_triton.log_sum_exp(logits_NO[:, : V + 1])
            torch.testing.assert_close(lse_N, logits_NO[:, : V + 1].float().logsumexp(1), rtol=1e-5, atol=1e-5)
            label_N, blank_N, scale_N = torch.rand(3, 6, generator=g).unbind(0)
            duration_ND = torch.rand(6, max(D, 2), generator=g)[:, : D or 2].contiguous()
            next_token_N = torch.randint(0, V, (6,), generator=g)
            options = {"V": V, "D": D, "fastemit_lambda": 0.1, "clamp": clamp}
            posteriors = (lse_N, label_N, blank_N, duration_ND, next_token_N, scale_N)
            expected = rows.gradient_rows(logits_NO.float().clone(), *posteriors, **options)
            actual = rows_triton.gradient_(logits_NO.clone(), *posteriors, **options)
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


def whole_loss() -> None:
    """The loss as on a GPU, all kernels in place, against the one on the CPU."""
    from unittest import mock

    from loss_cases import gradients, learnt_case, make_case

    from finetune.losses import fused_tdt_loss

    def case(durations=(0, 1, 2, 3, 4)):
        return make_case([6, 0, 5], [3, 2, 0], durations, V=9, H=5, dtype=torch.float32)

    def learnt():
        return learnt_case([20, 12], [5, 3], V=12, dtype=torch.float32)

    jobs = [
        (case, None, 1e-5, {"sigma": 0.1, "fastemit_lambda": 0.1, "clamp": 0.02}),
        (lambda: case(()), torch.bfloat16, 2e-2, {"durations": ()}),
        (case, torch.float16, 3e-3, {"rnnt_draw": True}),
        (case, torch.bfloat16, 2e-2, {}),
        (learnt, None, 1e-4, {"occupancy_threshold": 1e-4}),
        (lambda: make_case([0, 0], [3, 2], V=9, dtype=torch.float32), None, 0.0, {}),
    ]

    def results():
        for make, half, _, options in jobs:
            given = make()
            with torch.autocast("cpu", half, enabled=half is not None):
                loss = fused_tdt_loss(*given, **options)
            yield [loss.detach(), *gradients(loss, given)]

    expected = list(results())
    launches = mock.Mock(wraps=lattice_triton.solve)
    with (
        mock.patch.object(rows, "on_gpu", lambda x: x.dtype != torch.float64),
        mock.patch.object(lattice, "_solve_numba", lambda *a: lattice.LatticeResult(*launches(*a))),
    ):
        actual = list(results())
    assert launches.call_count >= 2 * (len(jobs) - 1)
    for (*_, tolerance, _), a_job, e_job in zip(jobs, actual, expected):
        for a, e in zip(a_job, e_job):
            if e.numel():
                assert (a - e).abs().max() <= tolerance * e.abs().max(), (tolerance, a, e)


def compile_for(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    numbers, counts = "*fp64", "*i64"
    walk = dict.fromkeys(("blank_N", "label_N", "duration_ND", "alpha_N", "beta_N", "log_z_B"), numbers)
    walk |= dict.fromkeys(("first_B", "frames_B", "tokens_B", "durations_D"), counts)
    posteriors = {
        **walk,
        "clip_N": counts,
        **dict.fromkeys(("label_post_N", "blank_post_N", "duration_post_ND"), numbers),
        "N": "i32",
    }
    constants = ("D", "LABEL_D", "LANES")
    jobs = [
        (lattice_triton._walk, walk, dict(zip(constants, (5, 5, 128))), 2),
        (lattice_triton._walk, walk, dict(zip(constants, (2, 1, 32))), 1),
        (lattice_triton._walk, walk, dict(zip(constants, (5, 5, 2048))), lattice_triton.warps_for(2048)),
        (lattice_triton._posteriors, posteriors, dict(zip(constants, (5, 5, 256))), 4),
    ]
    for dtype in ("*bf16", "*fp16", "*fp32"):
        sums = {"logits_NO": dtype, "lse_N": "*fp32", "stride": "i32", "V1": "i32"}
        rows_of = {"logits_NO": dtype, **dict.fromkeys(("lse_N", "label_N", "blank_N", "duration_ND"), "*fp32")}
        rows_of |= {
            "next_token_N": counts,
            "scale_N": "*fp32",
            "stride": "i32",
            "V": "i32",
            "fastemit": "fp32",
            "clamp": "fp32",
        }
        jobs.append((rows_triton._log_sum_exp, sums, {"COLUMNS": 2048}, 4))
        jobs.append((rows_triton._gradient, rows_of, {"D": 5, "LANES_D": 8, "COLUMNS": 2048}, 4))
    for kernel, signature, constexprs, warps in jobs:
        names = kernel.arg_names
        signature = {n: signature.get(n, "constexpr") for n in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        assert "cubin" in compiled.asm


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "run":
        lattices()
        joint_rows()
        whole_loss()
    else:
        for capability in (80, 90):
            compile_for(capability)
    print("as it should be")
