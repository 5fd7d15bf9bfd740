"""Operands and outputs of any strides and addresses: right values, whatever the kernels take."""

from __future__ import annotations

from itertools import product

import cases
import pytest
import torch
from cases import DGRAD, FORWARD, LAYOUTS, WGRAD, Group, Layout
from check import Call, add_outputs, make_call, randn, run, seeded
from conftest import Target

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
def test_leading_dimension_1025(target: Target, dtype: torch.dtype) -> None:
    """x[8, 1025] and w[4, 512, 1025] transposed: strides that a peer accepted and computed wrongly."""
    gen = seeded(target.device)
    x = randn((8, 1025), dtype, target.device, gen)
    w = randn((4, 512, 1025), dtype, target.device, gen)
    call = Call(list(x.split([2, 0, 5, 1])), [w[i].t() for i in range(4)], [], layout=DGRAD)
    run(add_outputs(call, dtype), target.backend)
    call = Call([x[:, :1024]] * 4, [w[i, :, :1024] for i in range(4)], [], layout=FORWARD)
    run(add_outputs(call, dtype), target.backend)


def test_misaligned_d(target: Target) -> None:
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
