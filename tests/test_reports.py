"""What users of the peers ran into, each report reduced to its smallest input; every one of the project's list of 40.

The name of a test ends with the row's number. Here are the rows that concern grouped_mm and need no GPU to show; the
others stand beside what they belong to, and test_every_report_has_a_test counts them all. Row 20 is also
tests/sanitize.py's, row 39 and the figures behind rows 21, 34 and 40 are benchmarks/bench_grouped_mm.py --check's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Target
from grouped_cases import BF16, FP16, FP32, MODES, check_grads, ends_of, loop, operands, run
from torch import Tensor

import gmm
from gmm.triton.configs import choose, shared_memory

NAN = float("nan")


def test_every_report_has_a_test() -> None:
    rows = set()
    for file in Path(__file__).parent.glob("test_*.py"):
        for numbers in re.findall(r"def test_\w*?_rows?((?:_\d+)+)\(", file.read_text()):
            rows |= set(map(int, numbers.split("_")[1:]))
    assert rows == set(range(1, 41))


def moe(counts: list[int], n: int, k: int, target: Target, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    x, w, offs = operands("ragged_m", ends_of(counts), 0, n, k, dtype, target.device)
    assert offs is not None
    return x, w, offs


def dirty(device: torch.device) -> None:
    """Leaves NaN in the memory that the allocator gives out next."""
    blocks = [torch.full((1 << i,), NAN, device=device) for i in range(6, 22)]
    del blocks


def test_all_groups_empty_row_3(auto_target: Target) -> None:
    """Returns; the autograd graph is kept, and gradients are zero."""
    for total in (0, 12):
        x = torch.randn(total, 16, device=auto_target.device, requires_grad=True)
        w = torch.randn(3, 16, 24, device=auto_target.device, requires_grad=True)
        y = gmm.grouped_mm(x, w, torch.zeros(3, dtype=torch.int32, device=x.device))
        assert y.requires_grad and not y.any()
        y.sum().backward()
        assert x.grad is not None and not x.grad.any() and w.grad is not None and not w.grad.any()


def test_empty_groups_have_no_stale_gradient_row_4(small_target: Target) -> None:
    """Zeros; unchanged when accumulating."""
    dirty(small_target.device)
    x, w, offs = moe([7, 0, 9, 0], 24, 16, small_target)
    dy = torch.randn(16, 24).to(x)
    for accumulate in (False, True):
        run(dy.t(), x, offs, small_target.backend, accumulate=accumulate, out_dtype=FP32)
        run(x.t(), dy, offs, small_target.backend, accumulate=accumulate)


def test_trailing_empty_groups_row_5(small_target: Target) -> None:
    for mode in MODES[:3]:
        a, b, offs = operands(mode, [8, 24, 24, 24], 16, 24, 16, BF16, small_target.device)
        run(a, b, offs, small_target.backend)


def test_contraction_of_zero_row_11(small_target: Target) -> None:
    """Zeros, or the bias alone."""
    for mode in ("ragged_m", "ragged_n", "batched"):
        a, b, offs = operands(mode, [8, 24, 24], 16, 24, 0, BF16, small_target.device)
        result = run(a, b, offs, small_target.backend)
        assert result is None or not result.any()
        if mode != "ragged_n":
            bias = torch.randn(3, 24).to(a)
            for accumulate in (False, True):
                run(a, b, offs, small_target.backend, bias=bias, accumulate=accumulate)


def test_rows_past_the_last_end_row_12(auto_target: Target) -> None:
    """Two layers; garbage in the padding must not reach a gradient, in the first step or the second."""
    x, w1, offs = moe([5, 0, 9], 24, 16, auto_target, FP32)
    x = torch.cat([x, torch.full((18, 16), NAN, device=x.device)]).requires_grad_()
    w1, w2 = w1.requires_grad_(), torch.randn(3, 24, 16, device=x.device, requires_grad=True)
    for _ in range(2):
        dirty(x.device)
        y = gmm.grouped_mm(torch.nn.functional.silu(gmm.grouped_mm(x, w1, offs)), w2, offs)
        assert not y[14:].any()
        grads = torch.autograd.grad((y**2).sum(), [x, w1, w2])
        assert all(g.isfinite().all() for g in grads) and not grads[0][14:].any()
        with torch.no_grad():
            w1 -= 0.01 * grads[1]


def test_weight_gradient_of_an_empty_expert_row_13(auto_target: Target) -> None:
    n, k = (768, 2048) if auto_target.device.type == "cuda" else (96, 256)
    x, w, offs = moe([162, 0, 2577, 446, 0, 83], n, k, auto_target)
    dirty(x.device)
    _, grad = check_grads(x, w, offs)
    assert [bool(g.any()) for g in grad] == [True, False, True, True, False, True]


def test_experts_with_few_tokens_row_14(auto_target: Target) -> None:
    """With a dirty allocator."""
    for counts in ([1, 0, 2, 0, 0, 3], [0, 0, 0, 0, 0, 1], [8] * 6):
        dirty(auto_target.device)
        check_grads(*moe(counts, 40, 24, auto_target))


@pytest.mark.parametrize("transposed", (False, True))
def test_odd_strides_row_15(auto_target: Target, transposed: bool) -> None:
    x, offs = torch.randn(8, 1025).to(auto_target.device, BF16), torch.tensor([2, 2, 7, 8]).to(auto_target.device)
    w = torch.randn(4, 512, 1025).to(x)
    run(x, w.mT, offs, "auto", trans_b=transposed)


def test_unaligned_addresses_row_16(auto_target: Target) -> None:
    memory = torch.randn(4096).to(auto_target.device, BF16)
    x, w = memory[1:401].view(25, 16), memory[403 : 403 + 3 * 16 * 24].view(3, 16, 24)
    offs = torch.zeros(4, dtype=torch.int32, device=memory.device)[1:]
    offs[:] = torch.tensor([3, 3, 25])
    run(x, w, offs, "auto")
    check_grads(x, w, offs)


def test_zero_contraction_compiled_row_17(auto_target: Target) -> None:
    a, b = (torch.ones(shape, device=auto_target.device, dtype=BF16) for shape in ((224, 0), (4, 0, 256)))
    offs = torch.zeros(4, dtype=torch.int32, device=a.device)
    torch._dynamo.reset()
    for f in (gmm.grouped_mm, torch.compile(gmm.grouped_mm, fullgraph=True, backend="aot_eager")):
        dirty(a.device)
        y = f(a, b, offs)
        assert y.shape == (224, 256) and not y.any()


def test_token_count_not_a_multiple_of_16_row_18(auto_target: Target) -> None:
    tokens, k = (16333, 5120) if auto_target.device.type == "cuda" else (333, 512)
    x, w, offs = moe([tokens // 3, 0, tokens - tokens // 3], 64, k, auto_target)
    run(x, w, offs, "auto")
    run(x.t(), x[:, :64], offs, "auto")


def test_small_odd_shapes_stay_in_bounds_row_20(small_target: Target) -> None:
    """Operands between NaN, out between canaries."""
    for mode in MODES:
        a, b, offs = operands(mode, [1, 3, 3, 5], 3, 7, 13, FP16, small_target.device)
        between = [torch.full((x.numel() + 66,), NAN, dtype=x.dtype, device=x.device) for x in (a, b)]
        a, b = (m[33:-33].view(x.shape).copy_(x) for m, x in zip(between, (a, b), strict=True))
        run(a, b, offs, small_target.backend)


def test_fp16_row_23(small_target: Target) -> None:
    x, w, offs = moe([13, 9, 8], 16, 32, small_target, FP16)
    run(x, w, offs, small_target.backend)
    check_grads(x, w, offs)


def test_autocast_row_24(auto_target: Target) -> None:
    a, w = torch.randn(4, 64, device=auto_target.device), torch.randn(2, 64, 128).to(auto_target.device, BF16)
    offs = torch.tensor([1, 4], dtype=torch.int32, device=a.device)
    with torch.autocast(a.device.type, dtype=BF16):
        y = gmm.grouped_mm(a, w, offs)
    assert y.dtype == BF16 and torch.equal(y, gmm.grouped_mm(a.to(BF16), w, offs))


def test_gradient_shape_of_a_batch_of_one_row_25(auto_target: Target) -> None:
    x, w = torch.randn(1, 8, 16, device=auto_target.device), torch.randn(1, 16, 24, device=auto_target.device)
    check_grads(x, w, None)
    check_grads(x[0], w, torch.tensor([8], device=x.device))
    check_grads(x, w[0], torch.tensor([24], device=x.device))


def test_bad_offs_length_row_26(auto_target: Target) -> None:
    x, w, offs = moe([4, 4], 8, 8, auto_target, FP32)
    text = r"offs: expected length 2 \(the groups of b\), got 3"
    torch._dynamo.reset()
    for f in (gmm.grouped_mm, torch.compile(gmm.grouped_mm, fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match=text):
            f(x, w, torch.cat([offs, offs[-1:]]))


def test_expanded_gradients_row_27(auto_target: Target) -> None:
    x, w, offs = moe([4, 0, 9], 21, 8, auto_target)
    check_grads(x, w, offs, dy=torch.ones((), dtype=BF16, device=x.device).expand(13, 21))
    check_grads(x, w, offs)


@pytest.mark.parametrize("limit_kib", (64, 99, 163, 227))
def test_tiles_fit_the_device_row_31(limit_kib: int) -> None:
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        for rows in (1, 16, 64, 100, 1000):
            config = choose(dtype, rows, 4096, limit_kib * 1024)
            assert shared_memory(config, dtype) <= limit_kib * 1024


def test_equal_bits_row_32(small_target: Target) -> None:
    """Forward and all gradients, run after run."""
    x, w, offs = moe([13, 0, 40, 7], 24, 32, small_target)
    bias = torch.randn(4, 24).to(x)
    dy = torch.randn(60, 24).to(x)
    backend = "auto" if small_target.backend == "cutlass" else small_target.backend
    first: list[Tensor] = []
    for _ in range(3 if x.device.type == "cpu" else 50):
        leaves = [t.detach().requires_grad_() for t in (x, w, bias)]
        y = gmm.grouped_mm(leaves[0], leaves[1], offs, leaves[2], backend=backend)
        results = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        first = first or results
        assert all(torch.equal(r, f) for r, f in zip(results, first, strict=True))


def test_fp32_out_and_accumulate_row_33(small_target: Target) -> None:
    x, w, offs = moe([16, 0, 40], 24, 32, small_target)
    for accumulate in (False, True):
        run(x, w, offs, small_target.backend, out_dtype=FP32, accumulate=accumulate)
    if small_target.backend != "cutlass":
        assert gmm.grouped_mm(x, w, offs, None, FP32, backend=small_target.backend).dtype == FP32


def test_argument_then_setter_then_variable_row_35(python: Callable[..., Any]) -> None:
    code = """
import gmm
chosen = lambda **options: gmm.explain((256, 64), (4, 64, 128), sm=90, **options).backend
print(chosen(), chosen(backend="cutlass"))
with gmm.use_backend("reference"):
    print(chosen(), chosen(backend="triton"))
print(chosen())
"""
    chosen = python(code, GMM_BACKEND="triton").stdout.split()
    assert chosen == ["triton", "cutlass", "reference", "triton", "triton"]


def test_second_forward_equals_the_loop() -> None:
    """The loop that the other tests trust is itself right."""
    for mode in MODES:
        a, b, offs = operands(mode, [3, 3, 9], 4, 5, 6, FP32, torch.device("cpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.allclose(loop(a, b, offs), gmm.grouped_mm(a, b, offs), atol=1e-5)
