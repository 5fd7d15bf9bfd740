"""Operands and outputs of any strides and addresses: right values, whatever the kernels take."""

from __future__ import annotations

from itertools import product

import cases
import pytest
import torch
from cases import DGRAD, FORWARD, LAYOUTS, WGRAD, Group, Layout
from check import CANARY, Call, add_outputs, make_call, randn, run, seeded
from conftest import GPU, Target

import gmm

BF16, FP32 = torch.bfloat16, torch.float32

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)
halves = pytest.mark.parametrize("dtype", cases.HALVES, ids=cases.dtype_name)


def strided_variants(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x in other memory, by what is odd about it. Same values, except for the broadcasts."""
    rows, cols = x.shape
    variants = {}
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.flatten()
    variants["storage_offset_1"] = flat[1:].view(rows, cols)
    wide = x.new_zeros(rows, 1025)
    wide[:, :cols] = x
    variants["leading_dimension_1025"] = wide[:, :cols]
    variants["transposed"] = x.t().contiguous().t()
    tall = x.new_zeros(cols, 1025)
    tall[:, 1 : rows + 1] = x.t()
    variants["transposed_misaligned"] = tall[:, 1 : rows + 1].t()
    every_second = x.new_zeros(rows, 2 * cols)
    every_second[:, ::2] = x
    variants["every_second_column"] = every_second[:, ::2]
    rows_apart = x.new_zeros(3 * rows, cols)
    rows_apart[::3] = x
    variants["every_third_row"] = rows_apart[::3]
    variants["one_row_repeated"] = x[:1].expand(rows, cols)
    variants["one_column_repeated"] = x[:, :1].expand(rows, cols)
    variants["one_value_repeated"] = x[:1, :1].expand(rows, cols)
    variants["overlapping_windows"] = x.flatten().as_strided((rows, cols), (1, 1))
    variants["overlapping_rows"] = x.flatten().as_strided((rows, cols), (8, 1))
    return variants


VARIANTS = list(strided_variants(torch.zeros(16, 16)))


@layouts
@pytest.mark.parametrize("variant", VARIANTS)
def test_strided_operands(target: Target, variant: str, layout: Layout) -> None:
    for dtype, d_dtype in ((BF16, BF16), (FP32, FP32)):
        for operand in ("a", "b", "ab"):
            call = make_call([Group(40, 72, 64), Group(136, 16, 24)], layout, dtype, target.device, d_dtype=d_dtype)
            for one in operand:
                operands = getattr(call, one)
                operands[:] = [strided_variants(x)[variant] for x in operands]
            call.independent = "repeated" not in variant
            run(call, target.backend)


@layouts
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "repeated" not in v and "overlapping" not in v])
def test_strided_d(target: Target, variant: str, layout: Layout) -> None:
    for dtype, accumulate in product((BF16, FP32), (False, True)):
        call = make_call([Group(40, 72, 64), Group(136, 16, 24)], layout, dtype, target.device, accumulate=accumulate)
        call.d[:] = [strided_variants(x)[variant] for x in call.d]
        call.guards.clear()
        run(call, target.backend)


@dtypes
def test_column_major_d_leaves_its_surroundings(target: Target, dtype: torch.dtype) -> None:
    call = make_call([Group(24, 40, 16)], FORWARD, dtype, target.device)
    buffer = torch.full((42, 26), 77.0, dtype=dtype, device=target.device)
    call.d, call.guards = [buffer[1:41, 1:25].t()], [buffer]
    run(call, target.backend)


@halves
def test_leading_dimension_1025_row_15(target: Target, dtype: torch.dtype) -> None:
    """x[8, 1025] and w[4, 512, 1025] transposed: strides that a peer accepted and computed wrongly."""
    gen = seeded(target.device)
    x = randn((8, 1025), dtype, target.device, gen)
    w = randn((4, 512, 1025), dtype, target.device, gen)
    call = Call(list(x.split([2, 0, 5, 1])), [w[i].t() for i in range(4)], [], layout=DGRAD)
    run(add_outputs(call, dtype), target.backend)
    call = Call([x[:, :1024]] * 4, [w[i, :, :1024] for i in range(4)], [], layout=FORWARD)
    run(add_outputs(call, dtype), target.backend)


def test_misaligned_d_rows_10_16(target: Target) -> None:
    """A d at an odd address, with odd strides, and with N = 1 to 9: right values, whatever runs."""
    for n, offset in ((72, 1), (72, 4), (1, 0), (7, 0), (9, 3)):
        call = make_call([Group(40, n, 64), Group(16, n, 24)], FORWARD, BF16, target.device)
        for i, d in enumerate(call.d):
            buffer = torch.full((d.numel() + 16,), 77.0, dtype=BF16, device=target.device)
            call.d[i], call.guards[i] = buffer[offset : offset + d.numel()].view_as(d), buffer
        run(call, target.backend)


def test_one_row_and_one_column_in_any_stride(target: Target) -> None:
    """The stride of a dimension of size 1 means nothing."""
    for strides in ((1, 1), (3, 1), (64, 1), (0, 1)):
        row = randn((64,), BF16, target.device, seeded(target.device)).as_strided((1, 64), strides)
        column = randn((64,), BF16, target.device, seeded(target.device)).as_strided((64, 1), strides[::-1])
        other = randn((8, 64), BF16, target.device, seeded(target.device))
        for a, b, layout in (
            (row, other, FORWARD),
            (row, row, FORWARD),
            (column, other, Layout(True, True)),
            (other, column, DGRAD),
            (column, column, WGRAD),
            (column, row, DGRAD),
        ):
            call = add_outputs(Call([a], [b], [], layout=layout), BF16)
            run(call, target.backend)


def test_columns_beside_d_stay(target: Target) -> None:
    """d is some columns of a buffer. TMA stores write whole 16 bytes: a d whose rows end elsewhere is not for them."""
    for n in (1, 3, 7, 100, 129):
        for d_dtype in (BF16, FP32):
            call = make_call([Group(70, n, 64), Group(5, n, 72)], FORWARD, BF16, target.device, d_dtype=d_dtype)
            for i, d in enumerate(call.d):
                call.guards[i] = torch.full((d.shape[0], n + 16 - n % 8), CANARY, dtype=d_dtype, device=target.device)
                call.d[i] = call.guards[i][:, :n].fill_(float("nan"))
            run(call, target.backend)


def test_columns_beside_a_and_b_reach_nothing(target: Target) -> None:
    """a and b are some columns of buffers of NaN, of any number: what TMA loads is cut to the element."""
    for layout in LAYOUTS.values():
        for group in (Group(70, 64, 13), Group(13, 64, 64), Group(5, 64, 1), Group(200, 136, 100)):
            call = make_call([group], layout, BF16, target.device)
            for operands in (call.a, call.b):
                rows, columns = operands[0].shape
                buffer = torch.full((rows, columns + 16 - columns % 8), float("nan"), dtype=BF16, device=target.device)
                buffer[:, :columns] = operands[0]
                operands[0] = buffer[:, :columns]
            run(call, target.backend)


# 64-bit addressing


@pytest.mark.memory(24)
@pytest.mark.parametrize("target", GPU[:2] + GPU[3:])
def test_more_than_2_31_elements(target: Target) -> None:
    """A, then D, beyond 2^31 elements; checked at the far end."""
    rows, wide = 2**21 + 8, 1032
    a = torch.zeros(rows, wide, dtype=BF16, device="cuda")
    a[-64:] = torch.randn(64, wide, device="cuda")
    w = torch.randn(8, wide, device="cuda").bfloat16()
    (d,) = gmm.multi_tensor_gemm([a], [w], trans_b=True, backend=target.backend)
    assert target.backend in ("auto", gmm.last_backend().split(":")[0])
    _same_as_alone(d[-64:], a[-64:], w.t())
    assert not d[:-64].any()
    (back,) = gmm.multi_tensor_gemm([d], [w], backend=target.backend)  # [rows, 8] @ [8, wide]
    _same_as_alone(back[-64:], d[-64:], w)
    assert not back[:-64].any()
    (dw,) = gmm.multi_tensor_gemm([d], [a], trans_a=True, out_dtype=FP32, backend=target.backend)
    _same_as_alone(dw, d[-64:].t(), a[-64:])


@pytest.mark.memory(24)
@pytest.mark.parametrize("target", [GPU[1], GPU[3]])
def test_row_stride_of_2_31(target: Target) -> None:
    stride = 2**31 + 8
    a = torch.zeros(stride + 64, dtype=BF16, device="cuda").as_strided((2, 64), (stride, 1))
    a.copy_(torch.randn(2, 64, device="cuda"))
    w = torch.randn(8, 64, device="cuda").bfloat16()
    (d,) = gmm.multi_tensor_gemm([a], [w], trans_b=True, backend=target.backend)
    _same_as_alone(d, a, w.t())


@pytest.mark.memory(24)
@pytest.mark.parametrize("target", GPU[:2] + GPU[3:])
def test_expert_offsets_beyond_2_31_row_19(target: Target) -> None:
    """64 experts of 4096 x 14336 in one buffer of 3.8e9 elements."""
    w = torch.zeros(64, 4096, 14336, dtype=BF16, device="cuda")
    w[-1] = torch.randn(4096, 14336, device="cuda")
    x = torch.randn(64 * 8, 14336, device="cuda").bfloat16()
    results = gmm.multi_tensor_gemm(x.split(8), w.unbind(), trans_b=True, backend=target.backend)
    _same_as_alone(results[-1], x[-8:], w[-1].t())
    assert not any(y.any() for y in results[:-1])


def _same_as_alone(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    exact = a.double() @ b.double()
    assert (d.double() - exact).norm() <= 2.0**-8 * exact.norm()
