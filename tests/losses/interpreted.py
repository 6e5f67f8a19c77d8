"""The GPU kernels under Triton's interpreter, and compiled for GPUs that are not here: python
tests/losses/interpreted.py run | compile [-v].

In processes of their own, since Triton reads TRITON_INTERPRET when it is imported. Ends with 0 when everything is as
it should be; -v prints what each kernel's PTX has.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # loss_cases
if sys.argv[1] == "run":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from finetune.losses import hidden, hidden_triton, lattice, lattice_triton, rows, rows_triton
from finetune.losses.dropout import dropout_mask

DURATIONS = (((0, 1, 2, 3, 4), 5), ((1, 2), 2), ((0, 1), 1), ((0, 2, 4, 8), 4))


def lattices() -> None:
    g = torch.Generator().manual_seed(0)
    for durations, label_durations in DURATIONS:
        wide = [([8, 3], [9, 33])] if len(durations) == 5 else []  # slow: programs of more than one warp
        for frames, tokens in (([7, 5, 1, 0], [3, 0, 2, 1]), ([1], [0]), ([0], [3]), ([2, 3], [7, 5]), *wide):
            N = sum(t * (u + 1) for t, u in zip(frames, tokens))
            for scale in (3, 400) if N == 34 and len(durations) != 4 else (3,):  # 400: below the least float64
                blank_N, label_N = (torch.randn(2, N, generator=g, dtype=torch.float64) * scale - 2).unbind(0)
                duration_ND = torch.log_softmax(
                    scale * torch.randn(N, len(durations), generator=g, dtype=torch.float64), 1
                )
                if N > 30:
                    blank_N[5], label_N[7] = float("-inf"), float("-inf")
                arguments = (blank_N, label_N, duration_ND, frames, tokens, durations, label_durations)
                expected = lattice._solve_numba(*arguments, True)
                actual = lattice_triton.solve(*arguments, True)
                for a, e in zip(actual, expected):
                    torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-14, equal_nan=True)
                if N == 34:
                    losses_B, *none = lattice_triton.solve(*arguments, False)
                    assert torch.equal(losses_B, actual[0])
                    assert not any(x.numel() for x in none)
    blank_N, label_N = torch.full((2, 8), -1.0)
    blank_N[0] = float("nan")
    losses_B, label_N, *_ = lattice_triton.solve(blank_N, label_N, torch.zeros(8, 2), [2, 2], [1, 1], (0, 1), 1, True)
    assert losses_B.isnan().tolist() == [True, False]
    assert label_N.dtype == torch.float32
    assert label_N[:4].isnan().any()
    assert not label_N[4:].isnan().any()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    half=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    V=st.sampled_from([1, 2, 7, 8, 15, 31, 130, 2047, 2048, 2050, 3000]),
    D=st.sampled_from([0, 2, 5]),
    N=st.sampled_from([0, 1, 3]),
    spare=st.integers(0, 2),
    clamp=st.sampled_from([0.0, 0.05]),
)
def joint_rows(half, V, D, N, spare, clamp) -> None:
    """Rows as wide as their outputs, a bit wider, and padded to a multiple of 8."""
    g = torch.Generator().manual_seed(V)
    outputs = V + 1 + D
    width = outputs if spare == 0 else -(-outputs // 8) * 8 if spare == 1 else outputs + 3
    logits_NO = torch.zeros(N, width, dtype=half)
    logits_NO[:, :outputs] = (4 * torch.randn(N, outputs, generator=g)).to(half)
    lse_N = rows_triton.log_sum_exp(logits_NO[:, : V + 1])
    torch.testing.assert_close(lse_N, logits_NO[:, : V + 1].float().logsumexp(1), rtol=1e-5, atol=1e-5)
    arcs_N, rest_N, used_N, label_N, blank_N, scale_N = torch.rand(6, N, generator=g).unbind(0)
    duration_ND = torch.rand(N, max(D, 2), generator=g)[:, : D or 2].contiguous()
    next_token_N = torch.randint(0, V + 1, (N,), generator=g)
    label_N = label_N.masked_fill(next_token_N == V, 0.0)
    options = {"V": V, "D": D, "clamp": clamp}
    posteriors = (lse_N, arcs_N, rest_N, used_N, label_N, blank_N, duration_ND, next_token_N, scale_N)
    expected = rows.gradient_rows(logits_NO.float().clone(), *posteriors, **options)
    actual = rows_triton.gradient_(logits_NO.clone(), *posteriors, **options)
    assert actual.dtype == half
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[half]
    torch.testing.assert_close(actual.float()[:, :outputs], expected[:, :outputs], rtol=tolerance, atol=tolerance)
    assert not actual[:, outputs:].any(), "padding stays zeros"


def rows_of_no_numbers() -> None:
    logits_NV = torch.zeros(4, 11)
    logits_NV[0] = float("-inf")
    logits_NV[1, 3] = logits_NV[2, 9] = float("nan")
    lse_N = rows_triton.log_sum_exp(logits_NV)
    assert lse_N[0] == float("-inf")
    assert lse_N.isnan().tolist() == [False, True, True, False]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    activation=st.sampled_from(["relu", "tanh", "sigmoid"]),
    half=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    dropout=st.sampled_from([0.0, 0.2, 0.9]),
    H=st.sampled_from([1, 5, 100, 129, 160]),
    N=st.sampled_from([0, 1, 16, 37]),
    wanted=st.sampled_from([(True, True), (True, False), (False, True)]),
)
def hidden_values(activation, half, dropout, H, N, wanted) -> None:
    g = torch.Generator().manual_seed(N)
    enc, pred = torch.randn(6, H, generator=g), torch.randn(5, H, generator=g)
    if half != torch.float32 and H > 100:
        enc, pred = enc.to(half), pred.to(half)
    frame_N, position_N = torch.arange(N) * 6 // max(N, 1), torch.arange(N) % 5
    number_N = torch.arange(N) * 3 + 2**33
    cells = (enc, pred, number_N, frame_N, position_N)
    form = hidden.Form(activation, dropout, 2**31 - 5, half)
    expected = hidden.hidden(enc.float(), pred.float(), *cells[2:], form._replace(dtype=torch.float32))
    actual = hidden_triton.dropped(*cells, form)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[half]
    torch.testing.assert_close(actual.float(), expected.dropped_NH, rtol=tolerance, atol=1e-6)
    if dropout and activation == "sigmoid":  # of which none is 0
        assert torch.equal(actual != 0, dropout_mask(number_N, H, dropout, form.seed)), "bit for bit"
    grad_NH = torch.randn(N, H, generator=g).to(half)
    found = [[torch.ones(x.shape) if want else None for x, want in zip((enc, pred), wanted)] for _ in range(2)]
    hidden_triton.add_gradient(grad_NH, *cells, form, *found[0])
    hidden.add_hidden_gradient(grad_NH.float(), expected, *cells, form, *found[1])
    for a, e in zip(*found):
        assert (a is None) == (e is None)
        if e is not None:
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def whole_loss() -> None:
    """The loss as on a GPU, all kernels in place and blocks over many clips, against the one on the CPU."""
    from unittest import mock

    from loss_cases import gradients, learnt_case, make_case

    from finetune.losses import Teacher, band, fused_tdt_loss
    from finetune.losses.operations import REAL, Operations

    def case(durations=(0, 1, 2, 3, 4)):
        return make_case([6, 0, 5], [3, 2, 0], durations, V=9, H=5, dtype=torch.float32)

    def learnt():
        return learnt_case([12, 7], [4, 2], V=12, dtype=torch.float32)

    jobs = [
        (case, None, 1e-5, {"sigma": 0.1, "fastemit_lambda": 0.1, "clamp": 0.02}),
        (lambda: case(()), torch.bfloat16, 2e-2, {"durations": ()}),
        (case, torch.float16, 3e-3, {"rnnt_draw": True}),
        (case, torch.bfloat16, 2e-2, {}),
        (learnt, None, 1e-4, {"occupancy_threshold": 1e-4}),
        (case, None, 1e-5, {"dropout": 0.3, "activation": "tanh"}),
        (case, torch.bfloat16, 2e-2, {"dropout": 0.3}),
        (lambda: make_case([0, 0], [3, 2], V=9, dtype=torch.float32), None, 0.0, {}),
    ]
    jobs += [
        (case, None, 1e-5, {"teacher": case, "sigma": 0.1, "fastemit_lambda": 0.1, "dropout": 0.3}),
        (lambda: case(()), torch.bfloat16, 2e-2, {"teacher": lambda: case(()), "durations": ()}),
        # of a learnt model float32 itself is 1e-4 off float64
        (learnt, None, 5e-4, {"teacher": learnt, "occupancy_threshold": 1e-4}),
    ]

    def results(operations):
        for make, half, _, options in jobs:
            given, options = make(), dict(options)
            if "teacher" in options:
                network = [0.7 * x.detach() for x in options["teacher"]()[:4]]
                options["teacher"] = Teacher(*network, torch.arange(float(len(given[0]))))
            torch.manual_seed(1)  # of dropout
            with torch.autocast("cpu", half, enabled=half is not None):
                loss = fused_tdt_loss(*given, **options, operations=operations)
            yield [loss.detach(), *gradients(loss, given)]

    expected = list(results(REAL))
    launches = mock.Mock(wraps=lattice_triton.solve)
    with (
        mock.patch.object(rows, "on_gpu", lambda x: x.dtype != torch.float64),
        mock.patch.object(lattice, "_solve_numba", lambda *a: lattice.LatticeResult(*launches(*a))),
        mock.patch.object(band, "GPU_FLOPS", 1e-30),  # the band, however small the lattice
    ):
        actual = list(results(Operations(has_kernels=lambda *_: True)))
    assert launches.call_count >= 2 * (len(jobs) - 1)
    for (*_, tolerance, _), a_job, e_job in zip(jobs, actual, expected):
        for a, e in zip(a_job, e_job):
            if e.numel():
                assert (a - e).abs().max() <= tolerance * e.abs().max(), (tolerance, a, e)


def compiled(kernel, signature: dict[str, str], constants: dict, warps: int, capability: int) -> tuple[str, str]:
    """PTX, and what ptxas says of registers and spills, for tensors and strides at multiples of 16 (as on a GPU)."""
    source = ASTSource(
        fn=kernel,
        signature={n: signature.get(n, "constexpr") for n in kernel.arg_names},
        constexprs=constants,
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(kernel.arg_names)
            if n in signature and (signature[n].startswith("*") or n == "H")
        },
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert "cubin" in made.asm
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        report = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", arch, file.name, "-o", os.devnull],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    return made.asm["ptx"], report


def count(ptx: str, pattern: str) -> int:
    return len(re.findall(pattern, ptx))


def compile_for(capability: int) -> None:
    """Each kernel in PTX: what a thread loads at once, how many exponentials it takes, and that nothing spills."""

    def kernel(
        function, tensors: str, numbers: str, constants: dict, warps: int = 4, spills: bool = False, **types: str
    ) -> str:
        signature = {**dict.fromkeys(tensors.split(), "*fp32"), **dict.fromkeys(numbers.split(), "i32"), **types}
        ptx, report = compiled(function, signature, constants, warps, capability)
        name = f"{function.__name__} {constants} {types} for {capability}"
        assert spills or "0 bytes spill stores, 0 bytes spill loads" in report, f"{name}: {report}"
        if "-v" in sys.argv:
            counts = {
                what: count(ptx, what)
                for what in (r"ld\.global\S*", r"ld\.global\S*v4\.b32", r"st\.global\S*", r"st\.global\S*v4\.b32",
                             r"red\.\S*|atom\.\S*", r"ex2\.", r"(?:fma|mul|add|sub)\S*\.f64", r"bar\.sync")
            }  # fmt: skip
            registers = re.search(r"Used (\d+) registers", report)
            print(name, counts, registers and registers.group(0))
        return ptx

    tdt = {"DURATIONS": (0, 1, 2, 3, 4), "D": 5, "LABEL_D": 5}
    rnnt = {"DURATIONS": (0, 1), "D": 2, "LABEL_D": 1}
    lengths = {"first_B": "*i64", "frames_B": "*i32", "tokens_B": "*i32"}
    planes = {"m_PN": "*fp64", "e_PN": "*i32", "z_m_B": "*fp64", "z_e_B": "*i32", **lengths}
    posteriors = "label_N blank_N duration_ND"
    kernel(lattice_triton._arcs, posteriors, "N", {"D": 5, "LANES": 256}, **lengths, m_PN="*fp64", e_PN="*i32")
    for arcs, lanes in ((tdt, 128), (rnnt, 32), (tdt, 1024), (tdt, 2048)):
        constants = {**arcs, "LANES": lanes}
        warps = lattice_triton.warps_for(lanes)
        ptx = kernel(lattice_triton._walk, "", "N", constants, warps, lanes > 1024, **planes, losses_B="*fp64")
        walk = ptx[: ptx.rindex("bar.sync")]
        lanes_a_thread = max(1, lanes // 32 // warps)
        of_an_arc = count(walk, r"(?:fma|mul|add|sub)\S*\.f64") / (4 * arcs["D"]) / lanes_a_thread
        assert of_an_arc < 5, "the walk multiplies and adds; it takes no exponentials"
    kernel(lattice_triton._posteriors, posteriors, "N", {**tdt, "LANES": 256}, **planes)

    for dtype in ("*bf16", "*fp16", "*fp32"):
        vectors = 2048 // 128 // (4 if dtype == "*fp32" else 8)  # of 16 bytes, that a thread takes of a block
        layout = {"UNIT": 8, "COLUMNS": 2048, "TAIL": 8}
        ptx = kernel(rows_triton._log_sum_exp, "lse_N", "stride width V1", layout, logits_NO=dtype)
        assert count(ptx, r"ld\.global\S*\.v4\.b32") == vectors
        assert count(ptx, r"ld\.global") == vectors + 1, "16 bytes at a time, and one element of the tail"
        assert count(ptx, r"ex2\.") == 16 + 1 + 1 + 1, "one an element; one each to rescale"
        ptx = kernel(
            rows_triton._gradient, "lse_N arcs_N rest_N used_N label_N blank_N duration_ND scale_N", "stride width V",
            {"D": 5, "LANES_D": 8, **layout}, logits_NO=dtype, next_token_N="*i64", clamp="fp32",
        )  # fmt: skip
        assert count(ptx, r"ld\.global\S*\.v4\.b32") == vectors
        assert count(ptx, r"st\.global\S*\.v4\.b32") == vectors
        assert count(ptx, r"st\.global") == vectors + 1
        assert count(ptx, r"ex2\.") == 16 + 1 + 1, "one an element; one of the softmax over durations"
        for activation in ("relu", "tanh", "sigmoid"):
            of_hidden = {"ACTIVATION": activation, "DROPOUT": True, "CELLS": 16, "COLUMNS": 128}
            cells = dict.fromkeys(("number_N", "frame_N", "position_N"), "*i64")
            of_hidden_types = {**cells, "enc": dtype, "pred": dtype, "threshold": "i64", "scale": "fp32"}
            ptx = kernel(
                hidden_triton._dropped, "", "N H seed", of_hidden, **of_hidden_types, dropped_NH=dtype
            )  # fmt: skip
            assert count(ptx, r"ld\.global\S*\.v4\.b32") == 2 * vectors, "enc and pred"
            assert count(ptx, r"st\.global\S*\.v4\.b32") == vectors
            ptx = kernel(
                hidden_triton._add_gradient, "grad_enc grad_pred", "N H seed", of_hidden, **of_hidden_types,
                grad_NH=dtype,
            )  # fmt: skip
            assert count(ptx, r"ld\.global\S*\.v4\.b32") == 3 * vectors, "enc, pred and the gradient"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "run":
        for check in (rows_of_no_numbers, hidden_values, joint_rows, lattices, whole_loss):
            start = time.monotonic()
            check()
            print(f"{check.__name__}: {time.monotonic() - start:.1f} s")
    else:
        for capability in (80, 90):
            compile_for(capability)
    print("as it should be")
