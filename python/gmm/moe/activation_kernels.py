"""The device code of activation.py: one kernel forward, one backward. Computes in float32.

Only builtins of triton.language are called, and one of its reductions: see row_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _value(x: tl.tensor, FUNCTION: tl.constexpr, ALPHA: tl.constexpr) -> tl.tensor:
    """function(x). Comparisons are such that a NaN stays one."""
    if FUNCTION == "silu":
        y = x * _sigmoid(ALPHA * x)
    elif FUNCTION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # 0.5 (1 + tanh(u)) is sigmoid(2 u)
        y = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FUNCTION == "identity":
        y = x
    else:
        y = tl.where(x <= 0, 0.0, x)
        if FUNCTION == "relu2":
            y = y * y
    return y


@triton.jit
def _derivative(x: tl.tensor, FUNCTION: tl.constexpr, ALPHA: tl.constexpr) -> tl.tensor:
    """Of function at x."""
    if FUNCTION == "silu":
        s = _sigmoid(ALPHA * x)
        y = s * (1 + ALPHA * x * (1 - s))
    elif FUNCTION == "gelu":
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif FUNCTION == "gelu_tanh":
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif FUNCTION == "identity":
        y = tl.full(x.shape, 1, tl.float32)
    elif FUNCTION == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    else:
        y = tl.where(x <= 0, 0.0, 2 * x)
    return y


@triton.jit
def _rows(
    offs: tl.tensor, rows: tl.tensor, groups: tl.tensor, ENDS: tl.constexpr, BLOCK_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The program's rows, [BLOCK_M, 1], and the number of rows to read: those before the last end."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    last = tl.minimum(tl.load(offs + (groups - 1)).to(tl.int64), rows) if ENDS else rows
    return row, last


@triton.jit
def _operands(
    h: tl.tensor,
    up: tl.tensor,
    row: tl.tensor,
    last: tl.tensor,
    start: tl.tensor,
    LAYOUT: tl.constexpr,
    COLUMNS: tl.constexpr,
    H_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Gate and up of columns from start on; up is gate where there is none."""
    if LAYOUT == "interleaved":
        pair = 2 * start + tl.arange(0, 2 * BLOCK_N)[None, :]
        both = tl.load(h + (row * H_STRIDE + pair), mask=(row < last) & (pair < 2 * COLUMNS), other=0)
        gate, value = tl.split(tl.reshape(both, (BLOCK_M, BLOCK_N, 2)))
    else:
        column = start + tl.arange(0, BLOCK_N)[None, :]
        mask = (row < last) & (column < COLUMNS)
        gate = tl.load(h + (row * H_STRIDE + column), mask=mask, other=0)
        if LAYOUT == "concatenated":
            value = tl.load(h + (row * H_STRIDE + COLUMNS + column), mask=mask, other=0)
        elif LAYOUT == "apart":
            value = tl.load(up + (row * UP_STRIDE + column), mask=mask, other=0)
        else:
            value = gate
    return gate.to(tl.float32), value.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "groups"])
def activation(
    h: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    offs: tl.tensor,
    out: tl.tensor,
    rows: tl.int64,
    groups: tl.int64,
    FUNCTION: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
    LAYOUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ENDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    H_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """out = weights * function(gate) * (up + SHIFT). LAYOUT: "concatenated", "interleaved", "apart", or "none" (no
    gate)."""
    row, last = _rows(offs, rows, groups, ENDS, BLOCK_M)
    start = tl.program_id(1) * BLOCK_N
    # fmt: off
    gate, value = _operands(h, up, row, last, start, LAYOUT, COLUMNS, H_STRIDE, UP_STRIDE, BLOCK_M, BLOCK_N)
    # fmt: on
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        value = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value))
    y = _value(gate, FUNCTION, ALPHA)
    if LAYOUT != "none":
        y *= value + SHIFT
    if WEIGHTED:
        y *= tl.load(weights + row, mask=row < last, other=0).to(tl.float32)
    column = start + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out + (row * COLUMNS + column), y.to(out.dtype.element_ty), mask=(row < rows) & (column < COLUMNS))


@triton.jit(do_not_specialize=["rows", "groups"])
def activation_backward(
    dy: tl.tensor,
    h: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    offs: tl.tensor,
    dh: tl.tensor,
    dup: tl.tensor,
    dweights: tl.tensor,
    rows: tl.int64,
    groups: tl.int64,
    FUNCTION: tl.constexpr,
    ALPHA: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
    LAYOUT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ENDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    H_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    DY_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """All gradients; dh in the layout of h. A program has whole rows, as dweights is a sum over them."""
    row, last = _rows(offs, rows, groups, ENDS, BLOCK_M)
    if WEIGHTED:
        weight = tl.load(weights + row, mask=row < last, other=0).to(tl.float32)
        acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
    for start in range(0, COLUMNS, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)[None, :]
        mask = (row < rows) & (column < COLUMNS)
        # fmt: off
        gate, value = _operands(h, up, row, last, start, LAYOUT, COLUMNS, H_STRIDE, UP_STRIDE, BLOCK_M, BLOCK_N)
        # fmt: on
        g = tl.load(dy + (row * DY_STRIDE + column), mask=mask & (row < last), other=0).to(tl.float32)
        x, shifted = gate, value + SHIFT
        if LIMIT is not None:
            x = tl.where(gate > LIMIT, LIMIT, gate)
            shifted = tl.where(value > LIMIT, LIMIT, tl.where(value < -LIMIT, -LIMIT, value)) + SHIFT
        f = _value(x, FUNCTION, ALPHA)
        if WEIGHTED:
            acc += g * (f if LAYOUT == "none" else f * shifted)
            g *= weight
        dvalue = g * f
        dgate = g * _derivative(x, FUNCTION, ALPHA)
        if LAYOUT != "none":
            dgate *= shifted
        if LIMIT is not None:
            dgate = tl.where(gate > LIMIT, 0.0, dgate)
            dvalue = tl.where((value > LIMIT) | (value < -LIMIT), 0.0, dvalue)
        dgate, dvalue = dgate.to(dh.dtype.element_ty), dvalue.to(dh.dtype.element_ty)
        if LAYOUT == "interleaved":
            pair = 2 * start + tl.arange(0, 2 * BLOCK_N)[None, :]
            both = tl.reshape(tl.join(dgate, dvalue), (BLOCK_M, 2 * BLOCK_N))
            tl.store(dh + (row * (2 * COLUMNS) + pair), both, mask=(row < rows) & (pair < 2 * COLUMNS))
        elif LAYOUT == "concatenated":
            pointers = dh + (row * (2 * COLUMNS) + column)
            tl.store(pointers, dgate, mask=mask)
            tl.store(pointers + COLUMNS, dvalue, mask=mask)
        else:
            tl.store(dh + (row * COLUMNS + column), dgate, mask=mask)
            if LAYOUT == "apart":
                tl.store(dup + (row * COLUMNS + column), dvalue, mask=mask)
    if WEIGHTED:
        total = tl.reduce(acc, 1, tl.standard._sum_combine)[:, None]
        tl.store(dweights + row, total.to(dweights.dtype.element_ty), mask=row < rows)
