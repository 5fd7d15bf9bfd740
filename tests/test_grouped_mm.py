"""Values of gmm.grouped_mm on every backend, compared with fp64: torch's and DeepSpeed's tables, edges, tails."""

from __future__ import annotations

import itertools
import math
from typing import Any

import cases
import pytest
import torch
from check import same_bits
from conftest import Target
from grouped_cases import (
    BF16,
    COUNTS,
    FP16,
    FP32,
    MODES,
    ODD_SIZES,
    check_grads,
    conformance,
    ends_of,
    operands,
    run,
)
from torch import Tensor

import gmm

NAN = float("nan")
modes = pytest.mark.parametrize("mode", MODES)
ragged_modes = pytest.mark.parametrize("mode", MODES[:3])


def supported(target: Target, dtype: torch.dtype) -> None:
    if dtype not in target.dtypes:
        pytest.skip(f"{target.backend} does not take {dtype}")


# torch's own table


@modes
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)
@pytest.mark.parametrize("strided", (False, True), ids=("dense", "strided"))
@pytest.mark.parametrize("a_row_major", (False, True), ids=("a_cols", "a_rows"))
@pytest.mark.parametrize("b_row_major", (False, True), ids=("b_cols", "b_rows"))
def test_torch_base_case(
    grouped_target: Target, mode: str, strided: bool, a_row_major: bool, b_row_major: bool, dtype: torch.dtype
) -> None:
    """Forward, into out and as a new tensor, and backward."""
    supported(grouped_target, dtype)
    a, b, all_offs = conformance(mode, strided, a_row_major, b_row_major, dtype, grouped_target.device)
    for offs in all_offs:
        result = run(a, b, offs, grouped_target.backend)
        if result is not None:
            new = gmm.grouped_mm(a, b, offs, backend=grouped_target.backend)
            assert new.is_contiguous() and same_bits([new], [result])
            if grouped_target.backend != "cutlass":
                check_grads(a, b, offs, grouped_target.backend)


@pytest.mark.parametrize("offs_dtype", (torch.int32, torch.int64), ids=("int32", "int64"))
@pytest.mark.parametrize(("mode", "m", "n", "k", "all_ends"), ODD_SIZES, ids=[row[0] for row in ODD_SIZES])
def test_torch_odd_sizes(
    small_target: Target, mode: str, m: int, n: int, k: int, all_ends: Any, offs_dtype: torch.dtype
) -> None:
    for ends, dtype in itertools.product(all_ends, small_target.dtypes):
        run(*operands(mode, ends, m, n, k, dtype, small_target.device, offs_dtype=offs_dtype), small_target.backend)


def test_torch_leading_stride_beyond_32_bits(grouped_target: Target) -> None:
    """Two groups 2^31 elements apart."""
    memory = torch.empty(2**31 + 64, dtype=BF16, device=grouped_target.device)  # only its ends are touched
    for x in (memory[:64], memory[-64:]):
        x.copy_(torch.randn(64))
    a, b = torch.randn(2, 8).to(memory), memory.as_strided((2, 8, 8), (2**31, 1, 8))
    offs = torch.tensor([1, 2], dtype=torch.int32, device=memory.device)
    run(a, b, offs, grouped_target.backend)
    run(a[:, None], b, None, grouped_target.backend)


@pytest.mark.parametrize("groups", (1, 1024, 4096))
def test_torch_group_counts(grouped_target: Target, groups: int) -> None:
    counts = [(7 * i) % 3 for i in range(groups)]
    x, w, offs = operands("ragged_m", ends_of(counts), 0, 8, 16, BF16, grouped_target.device)
    run(x, w, offs, grouped_target.backend)
    run(x.t(), x, offs, grouped_target.backend, out_dtype=FP32)


# DeepSpeed's table


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)
@pytest.mark.parametrize(("counts", "k", "n"), COUNTS)
def test_deepspeed_counts(grouped_target: Target, counts: list[int], k: int, n: int, dtype: torch.dtype) -> None:
    """Forward and both gradients, with weights [E, K, N] and [E, N, K]; M = 0 among them."""
    supported(grouped_target, dtype)
    device, backend = grouped_target
    x, w, offs = operands("ragged_m", ends_of(counts), 0, n, k, dtype, device)
    dy = operands("ragged_m", ends_of(counts), 0, 1, n, dtype, device, seed=5)[0]
    native = w.mT.contiguous().mT
    run(x, w, offs, backend)
    run(x, native, offs, backend, trans_b=True)
    run(dy, w.mT, offs, backend)
    run(dy, native.mT, offs, backend)
    run(dy.t(), x, offs, backend, out_dtype=FP32, accumulate=True)
    run(x.t(), dy, offs, backend)


def test_deepspeed_775_groups(grouped_target: Target) -> None:
    x, w, offs = operands("ragged_m", ends_of([i % 4 for i in range(775)]), 0, 16, 16, FP16, grouped_target.device)
    run(x, w, offs, grouped_target.backend)


# Edges


@modes
@pytest.mark.parametrize("name", cases.EDGE_SPLITS)
def test_edge_groups(grouped_target: Target, mode: str, name: str) -> None:
    ends = ends_of(cases.EDGE_SPLITS[name])
    for dtype in grouped_target.dtypes:
        run(*operands(mode, ends, 24, 40, 24, dtype, grouped_target.device), grouped_target.backend)


@ragged_modes
def test_edge_rows_row_29(small_target: Target, mode: str) -> None:
    for ends in ([n] for n in cases.EDGE_ROWS):
        run(*operands(mode, ends, 16, 24, 16, small_target.dtypes[0], small_target.device), small_target.backend)
    ends = ends_of(cases.EDGE_ROWS)
    run(*operands(mode, ends, 24, 24, 40, FP16, small_target.device), small_target.backend)


@pytest.mark.parametrize("k", cases.EDGE_K)
def test_edge_k(grouped_target: Target, k: int) -> None:
    device, backend = grouped_target
    for mode, dtype in itertools.product(("ragged_m", "ragged_n", "batched"), grouped_target.dtypes[1:]):
        a, b, offs = operands(mode, [7, 7, 30], 7, 24, k, dtype, device)
        run(a, b, offs, backend)
        run(a, b, offs, backend, accumulate=True)
    bias = torch.randn(3, 24).to(device, BF16)
    run(*operands("ragged_m", [7, 7, 30], 7, 24, k, BF16, device), backend, bias=bias)
    run(*operands("ragged_k", [k, k], 17, 24, 0, BF16, device), backend)


@pytest.mark.parametrize("n", cases.EDGE_N)
def test_edge_n(grouped_target: Target, n: int) -> None:
    device, backend = grouped_target
    bias = torch.randn(3, n).to(device, BF16)
    for trans_b in (False, True):
        run(*operands("ragged_m", [7, 7, 30], 0, n, 24, BF16, device), backend, bias=bias, trans_b=trans_b)


def test_no_groups_and_no_rows(grouped_target: Target) -> None:
    device, backend = grouped_target
    offs = torch.zeros(0, dtype=torch.int32, device=device)
    x, w = (torch.randn(shape).to(device, BF16) for shape in ((20, 16), (0, 16, 8)))
    for a, b, o in ((x, w, offs), (w, x.t()[:8], offs), (x.t(), x, offs), (w, w.mT, None)):
        gmm.multi_tensor_gemm([torch.ones(2, 2)], [torch.ones(2, 2)])  # which is then not the last one
        run(a, b, o, backend)
    for mode in MODES[:3]:
        run(*operands(mode, [0, 0], 8, 8, 8, BF16, device), backend)
        run(*operands(mode, [0, 0], 8, 8, 8, BF16, device), backend, accumulate=True)


@ragged_modes
@pytest.mark.parametrize("accumulate", (False, True), ids=("overwrite", "accumulate"))
def test_after_the_last_end(small_target: Target, mode: str, accumulate: bool) -> None:
    """Zeros, also with a bias and where the operands hold NaN; when accumulating they stay as they are."""
    device, backend = small_target
    dtype = small_target.dtypes[-1]
    for ends in ([5, 5, 40], [0, 0, 0], [64, 70, 70]):
        a, b, offs = operands(mode, ends, 24, 24, 16, dtype, device, total=100)
        bias = torch.randn(3, 24).to(device, dtype) if mode == "ragged_m" else None
        tail = {"ragged_m": a[ends[-1] :], "ragged_n": b[:, ends[-1] :], "ragged_k": a[:, ends[-1] :]}[mode]
        tail.fill_(NAN)
        result = run(a, b, offs, backend, bias=bias, accumulate=accumulate)
        if result is not None and mode != "ragged_k" and not accumulate:
            assert not (result[ends[-1] :] if mode == "ragged_m" else result[:, ends[-1] :]).any()


@modes
def test_nan_and_inf_stay_in_their_group(grouped_target: Target, mode: str) -> None:
    a, b, offs = operands(mode, [16, 32, 48], 16, 32, 24, BF16, grouped_target.device)
    middle = {"ragged_m": a[16:32], "ragged_k": a[:, 16:32]}.get(mode, a[1] if a.dim() == 3 else a)
    middle[0, 0], middle[1, 1] = NAN, math.inf
    run(a, b, offs, grouped_target.backend)


def test_padding_reaches_nothing(grouped_target: Target) -> None:
    """NaN beside and between the rows of every operand."""

    def padded(x: Tensor) -> Tensor:
        buffer = torch.full((*x.shape[:-2], x.shape[-2] + 8, x.shape[-1] + 8), NAN, dtype=x.dtype, device=x.device)
        inside = buffer[..., : x.shape[-2], : x.shape[-1]]
        return inside.copy_(x)

    for mode in MODES:
        a, b, offs = operands(mode, [9, 9, 40], 24, 32, 24, BF16, grouped_target.device)
        run(padded(a), padded(b), offs, grouped_target.backend)
        run(padded(a.mT).mT, padded(b), offs, grouped_target.backend)


# dtypes, bias, accumulation


@modes
def test_out_dtype_accumulate_and_bias(small_target: Target, mode: str) -> None:
    device, backend = small_target
    for dtype, out_dtype in itertools.product(small_target.dtypes, (None, FP32)):
        a, b, offs = operands(mode, [9, 9, 16, 24], 16, 24, 24, dtype, device)
        for accumulate, with_bias in itertools.product((False, True), (False, mode in ("ragged_m", "batched"))):
            bias = torch.randn(4, 24).to(device, out_dtype or dtype) if with_bias else None
            run(a, b, offs, backend, bias=bias, out_dtype=out_dtype, accumulate=accumulate)


def test_any_strides(small_target: Target) -> None:
    """Neither dimension adjacent, expanded, odd addresses; out and offs, too. Without a copy, or refused."""
    device, backend = small_target
    if backend == "cutlass":
        pytest.skip("takes what has a leading dimension")
    x, w, offs = operands("ragged_m", [7, 7, 19], 0, 12, 16, FP16, device)
    strided_x = torch.randn(19, 32).to(x)[:, ::2]
    odd_w = torch.randn(3 * 16 * 12 + 1).to(x)[1:].view(3, 16, 12)
    strided_offs = torch.stack([offs, offs], 1)[:, 0]
    for a, b in (
        (strided_x, w),
        (x, odd_w),
        (x[:1].expand(19, 16), w[:1].expand(3, 16, 12)),
        (x.t().contiguous().t(), w),
    ):
        run(a, b, strided_offs, backend)
    out = torch.full((12, 19), NAN, dtype=FP16, device=device)
    gmm.grouped_mm(x, w, offs, out=out.t(), backend=backend)
    assert torch.equal(out.t(), gmm.grouped_mm(x, w, offs, backend=backend))


def test_ends_that_lie(auto_target: Target) -> None:
    """Beyond the buffer, negative, decreasing: nothing outside of out is touched. On the CPU the result is that of ends
    clamped to the buffer and to the greatest before."""
    good = {(-5, 10, 4, 99): [0, 10, 10, 20], (30, 5, 6, 7): [20, 20, 20, 20], (2**31 - 1, -(2**31), 0, 3): [20] * 4}
    for lies, clamped in good.items():
        for mode in MODES[:3]:
            a, b, offs = operands(mode, clamped, 8, 8, 16, BF16, auto_target.device)
            lying = torch.tensor(lies, dtype=torch.int32, device=auto_target.device)
            if auto_target.device.type == "cpu":
                assert torch.equal(gmm.grouped_mm(a, b, lying), gmm.grouped_mm(a, b, offs))
            else:
                guard = torch.full((4 * 8 * 20 * 4,), 77.0, dtype=BF16, device="cuda")
                shape = gmm.grouped_mm(a, b, offs).shape
                out = guard[1024 : 1024 + shape.numel()].view(shape)
                gmm.grouped_mm(a, b, lying, out=out)
                out.fill_(77.0)
                assert (guard == 77.0).all()


def test_environment_checks_offsets(python: Any) -> None:
    code = """
import torch, gmm
device = "cuda" if torch.cuda.is_available() else "cpu"
x, w = torch.ones(8, 4, device=device), torch.ones(3, 4, 2, device=device)
for ends in ([2, 1, 8], [2, 4, 9], [-1, 2, 8], [2, 2, 7]):
    try:
        gmm.grouped_mm(x, w, torch.tensor(ends, device=device))
        print("taken")
    except RuntimeError as error:
        print(str(error).splitlines()[0])
"""
    lines = python(code, GMM_CHECK_OFFSETS="1").stdout.splitlines()
    assert "offs[1]: expected an end from 2 (the one before) to 8, got 1" in lines[0]
    assert "offs[2]: expected an end from 4 (the one before) to 8, got 9" in lines[1]
    assert "offs[0]: expected an end from 0 (the one before) to 8, got -1" in lines[2]
    assert lines[3] == "taken"


@modes
def test_drop_in_for_torch(auto_target: Target, mode: str) -> None:
    """The same arguments as torch's own, wherever it takes the call; it leaves rows past the last end as they are."""
    a, b, offs = operands(mode, [16, 16, 64], 32, 48, 64, BF16, auto_target.device)
    theirs = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)
    b = b.mT.contiguous().mT if mode == "ragged_m" else b
    ours = gmm.grouped_mm(a, b, offs=offs)
    want = theirs(a, b, offs=offs)
    assert ours.shape == want.shape and ours.dtype == want.dtype and ours.is_contiguous()
    assert (ours.float() - want.float()).norm() <= 2.0**-7 * want.float().norm()
