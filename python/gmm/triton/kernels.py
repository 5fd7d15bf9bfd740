"""The device code of gmm.triton: one kernel for the four modes.

Whatever decides what is compiled is a constexpr that launch.py sets; no integer and no address is specialised on its
value. So a new token count compiles nothing, and a kernel is right for every call that has the same constexprs. Only
builtins of triton.language appear, none of its own jit functions: one process can compile this file and interpret it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _multiple(x: tl.tensor, VEC: tl.constexpr) -> tl.tensor:
    """x, of which the compiler learns that it is a multiple of VEC."""
    return x // VEC * VEC


@triton.jit
def _tile(
    base: tl.tensor,
    stride_0: tl.tensor,
    stride_1: tl.tensor,
    SIZE_0: tl.constexpr,
    SIZE_1: tl.constexpr,
    UNIT: tl.constexpr,
    VEC: tl.constexpr,
) -> tl.tensor:
    """Pointers to a tile at base. Axis UNIT (-1: none) has stride 1 and is accessed by VEC elements at a time."""
    i = tl.arange(0, SIZE_0)[:, None].to(tl.int64)
    j = tl.arange(0, SIZE_1)[None, :].to(tl.int64)
    if UNIT == 0:
        pointers = base + (j * _multiple(stride_1, VEC) + i)
        if VEC > 1:
            pointers = tl.multiple_of(pointers, [16, 1])
    elif UNIT == 1:
        pointers = base + (i * _multiple(stride_0, VEC) + j)
        if VEC > 1:
            pointers = tl.multiple_of(pointers, [1, 16])
    else:
        pointers = base + (i * stride_0 + j * stride_1)
    return pointers


@triton.jit
def _first(count: tl.tensor, SIZE: tl.constexpr, VEC: tl.constexpr) -> tl.tensor:
    """The mask of the first `count` elements, a multiple of VEC, of an axis of a tile."""
    return tl.arange(0, SIZE) < _multiple(tl.minimum(count, SIZE).to(tl.int32), VEC)


@triton.jit
def _rasterise(
    index: tl.tensor, tiles_m: tl.tensor, tiles_n: tl.tensor, GROUP_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Tile of an output, in an order in which neighbours share rows of a and columns of b in the L2 cache."""
    band = index // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    within = index - band * GROUP_M * tiles_n
    return band * GROUP_M + within % height, within // height


@triton.jit
def _end(offs: tl.tensor, total: tl.tensor, group: tl.tensor) -> tl.tensor:
    """offs[group], forced into 0..total; 0 for group -1."""
    end = tl.load(offs + group, mask=group >= 0, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(end, 0), total)


@triton.jit
def _rows_of_slot(
    offs: tl.tensor, groups: tl.tensor, total: tl.tensor, slot: tl.tensor, BLOCK_M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Group, first row and number of rows left (0 or less: no work) of a slot.

    Slot start(g) // BLOCK_M + g is the first of group g. That leaves each group slots for all of its tiles, needs no
    sum over the groups before, and rises with g: a binary search finds the group. The rows after the last are one more.
    """
    low = tl.full((), 0, tl.int64)
    high = groups
    while low < high:
        middle = (low + high + 1) // 2
        reached = _end(offs, total, middle - 1) // BLOCK_M + middle <= slot
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    start = _end(offs, total, low - 1)
    end = tl.where(low < groups, _end(offs, total, tl.minimum(low, groups - 1)), total)
    row = start + (slot - (start // BLOCK_M + low)) * BLOCK_M
    return low, row, end - row


@triton.jit
def _product(
    a: tl.tensor,
    b: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    k: tl.tensor,
    a_m: tl.tensor,
    a_k: tl.tensor,
    b_k: tl.tensor,
    b_n: tl.tensor,
    A_UNIT: tl.constexpr,
    A_VEC: tl.constexpr,
    B_UNIT: tl.constexpr,
    B_VEC: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """a[:rows, :k] @ b[:k, :columns] in fp32. What lies outside of that is not read, and counts as zero."""
    a_pointers = _tile(a, a_m, a_k, BLOCK_M, BLOCK_K, A_UNIT, A_VEC)
    b_pointers = _tile(b, b_k, b_n, BLOCK_K, BLOCK_N, B_UNIT, B_VEC)
    a_step = BLOCK_K if A_UNIT == 1 else BLOCK_K * a_k
    b_step = BLOCK_K if B_UNIT == 0 else BLOCK_K * b_k
    row_mask = _first(rows, BLOCK_M, A_VEC if A_UNIT == 0 else 1)[:, None]
    column_mask = _first(columns, BLOCK_N, B_VEC if B_UNIT == 1 else 1)[None, :]
    acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
    for _ in range(((k + (BLOCK_K - 1)) // BLOCK_K).to(tl.int32)):
        if EVEN_K:
            a_tile = tl.load(a_pointers, mask=row_mask, other=0)
            b_tile = tl.load(b_pointers) if EVEN_N else tl.load(b_pointers, mask=column_mask, other=0)
        else:
            a_mask = row_mask & _first(k, BLOCK_K, A_VEC if A_UNIT == 1 else 1)[None, :]
            b_mask = _first(k, BLOCK_K, B_VEC if B_UNIT == 0 else 1)[:, None]
            a_tile = tl.load(a_pointers, mask=a_mask, other=0)
            b_tile = tl.load(b_pointers, mask=b_mask if EVEN_N else b_mask & column_mask, other=0)
            k -= BLOCK_K
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        a_pointers += a_step
        b_pointers += b_step
    return acc


@triton.jit(
    do_not_specialize=[
        *("a", "b", "out", "bias", "offs", "groups", "m", "n", "k"),
        *("a_g", "a_m", "a_k", "b_g", "b_k", "b_n", "out_g", "out_m", "out_n", "bias_g", "bias_x"),
    ]
)
def grouped_gemm(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    bias: tl.tensor,
    offs: tl.tensor,
    groups: tl.int64,
    m: tl.int64,
    n: tl.int64,
    k: tl.int64,
    a_g: tl.int64,
    a_m: tl.int64,
    a_k: tl.int64,
    b_g: tl.int64,
    b_k: tl.int64,
    b_n: tl.int64,
    out_g: tl.int64,
    out_m: tl.int64,
    out_n: tl.int64,
    bias_g: tl.int64,
    bias_x: tl.int64,
    RAGGED: tl.constexpr,
    BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    A_UNIT: tl.constexpr,
    A_VEC: tl.constexpr,
    B_UNIT: tl.constexpr,
    B_VEC: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    OUT_VEC: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """out[g] (+)= a[g] @ b[g] (+ bias[g]), one tile a program. x_y is the stride of x along y, in elements.

    RAGGED: "m" (group g owns the rows offs[g-1]:offs[g] of a and out), "k" (these columns of a and rows of b) or ""
    (all have a batch dimension). BIAS: "n" (bias[g] is a row of out), "m" (a column of out) or "".
    """
    program = tl.program_id(0)
    tiles_n = ((n + (BLOCK_N - 1)) // BLOCK_N).to(tl.int32)
    if RAGGED == "m":
        slots = (m // BLOCK_M + groups + 1).to(tl.int32)
        slot, tile_n = _rasterise(program, slots, tiles_n, GROUP_M)
        group, row, rows = _rows_of_slot(offs, groups, m, slot, BLOCK_M)
        k = tl.where(group < groups, k, 0)
    else:
        tiles_m = ((m + (BLOCK_M - 1)) // BLOCK_M).to(tl.int32)
        group = (program // (tiles_m * tiles_n)).to(tl.int64)
        tile_m, tile_n = _rasterise(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row = tile_m.to(tl.int64) * BLOCK_M
        rows = m - row
        if RAGGED == "k":
            start = _end(offs, k, group - 1)
            k = _end(offs, k, group) - start
            a += start * a_k
            b += start * b_k

    # Nothing to add to these rows: out stays as it is, and costs no traffic.
    in_group = group < groups
    if (rows > 0) & ((k > 0) | (in_group & (BIAS != "")) | (not ACCUMULATE)):
        column = tile_n.to(tl.int64) * BLOCK_N
        columns = n - column
        # fmt: off
        acc = _product(
            a + (group * a_g + row * a_m), b + (group * b_g + column * b_n), rows, columns, k, a_m, a_k, b_k, b_n,
            A_UNIT, A_VEC, B_UNIT, B_VEC, PRECISION, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )
        # fmt: on
        row_mask = _first(rows, BLOCK_M, OUT_VEC if OUT_UNIT == 0 else 1)[:, None]
        column_mask = _first(columns, BLOCK_N, OUT_VEC if OUT_UNIT == 1 else 1)[None, :]
        if BIAS == "n":
            pointers = bias + (group * bias_g + (column + tl.arange(0, BLOCK_N)[None, :]) * bias_x)
            acc += tl.load(pointers, mask=column_mask & in_group, other=0).to(tl.float32)
        elif BIAS == "m":
            pointers = bias + (group * bias_g + (row + tl.arange(0, BLOCK_M)[:, None]) * bias_x)
            acc += tl.load(pointers, mask=row_mask & in_group, other=0).to(tl.float32)
        tile = out + (group * out_g + row * out_m + column * out_n)
        pointers = _tile(tile, out_m, out_n, BLOCK_M, BLOCK_N, OUT_UNIT, OUT_VEC)
        mask = row_mask & column_mask
        if ACCUMULATE:
            acc += tl.load(pointers, mask=mask, other=0).to(tl.float32)
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)
