"""The device code of routing.py and permute.py. What is a constexpr is a model's; token counts compile nothing anew.

As in gmm/triton/kernels.py, only builtins of triton.language are called, so that one process can compile this file and
interpret it: tl.sum, which is none, is the reduction that it stands for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _key(ids: tl.tensor, i: tl.tensor, pairs: tl.tensor, EXPERTS: tl.constexpr) -> tl.tensor:
    """Experts of the pairs i; EXPERTS for sentinels, one more after the last pair."""
    expert = tl.load(ids + i, mask=i < pairs, other=0)
    key = tl.where((expert < 0) | (expert > EXPERTS), EXPERTS, expert).to(tl.int32)
    return tl.where(i < pairs, key, EXPERTS + 1)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def count_pairs(
    ids: tl.tensor,
    counts: tl.tensor,
    pairs: tl.int64,
    blocks: tl.int64,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """counts[e, b]: the pairs of expert e in block b. [EXPERTS + 1, blocks]."""
    block = tl.program_id(0).to(tl.int64)
    key = _key(ids, block * BLOCK + tl.arange(0, BLOCK), pairs, EXPERTS)
    for start in range(0, EXPERTS + 1, BLOCK_E):
        expert = start + tl.arange(0, BLOCK_E)
        count = tl.reduce((key[:, None] == expert[None, :]).to(tl.int32), 0, tl.standard._sum_combine)
        tl.store(counts + (expert * blocks + block), count, mask=expert <= EXPERTS)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def place_pairs(
    ids: tl.tensor,
    ends: tl.tensor,
    row_map: tl.tensor,
    offs: tl.tensor,
    pairs: tl.int64,
    blocks: tl.int64,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """row_map and offs from the running sum of counts: what is before a pair's expert and block, and then in it."""
    block = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    i = block * BLOCK + within
    key = _key(ids, i, pairs, EXPERTS)
    at = key * blocks + block
    before = tl.load(ends + at - 1, mask=(i < pairs) & (at > 0), other=0)
    earlier = (key[:, None] == key[None, :]) & (within[None, :] < within[:, None])
    row = before + tl.reduce(earlier.to(tl.int32), 1, tl.standard._sum_combine)
    tl.store(row_map + i, tl.where(key == EXPERTS, -row - 1, row), mask=i < pairs)
    if block == 0:
        for start in range(0, EXPERTS, BLOCK_E):
            expert = start + tl.arange(0, BLOCK_E)
            end = tl.load(ends + ((expert + 1) * blocks - 1), mask=expert < EXPERTS, other=0)
            tl.store(offs + expert, end, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["tokens", "rows"])
def permute(
    x: tl.tensor,
    row_map: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    tokens: tl.int64,
    rows: tl.int64,
    WEIGHTED: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    X_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Reads a token once, and writes its k rows."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    mask = (token < tokens)[:, None] & (column < H)
    tile = tl.load(x + (token[:, None] * X_STRIDE + column), mask=mask, other=0)
    for j in tl.static_range(K):
        row = tl.load(row_map + (token * K + j), mask=token < tokens, other=0).to(tl.int64)[:, None]
        value = tile
        if WEIGHTED:
            weight = tl.load(weights + (token * K + j), mask=token < tokens, other=0).to(tl.float32)[:, None]
            value = (tile.to(tl.float32) * weight).to(tile.dtype)
        value = tl.where(row >= 0, value, tl.full(value.shape, 0, value.dtype))
        target = tl.where(row >= 0, row, -row - 1)
        tl.store(out + (target * H + column), value, mask=mask & (target < rows))


@triton.jit(do_not_specialize=["tokens", "rows"])
def unpermute(
    y: tl.tensor,
    row_map: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    tokens: tl.int64,
    rows: tl.int64,
    WEIGHTED: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Reads a token's k rows, and writes their sum, always in the order of the choices."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    acc = tl.full((BLOCK_T, BLOCK_H), 0, tl.float32)
    for j in tl.static_range(K):
        row = tl.load(row_map + (token * K + j), mask=token < tokens, other=-1).to(tl.int64)
        has_row = (row >= 0) & (row < rows)
        mask = has_row[:, None] & (column < H)
        value = tl.load(y + (row[:, None] * Y_STRIDE + column), mask=mask, other=0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + (token * K + j), mask=has_row, other=0).to(tl.float32)[:, None]
        acc += value
    pointers = out + (token[:, None] * H + column)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (column < H))


@triton.jit(do_not_specialize=["tokens", "rows"])
def dots(
    x: tl.tensor,
    y: tl.tensor,
    row_map: tl.tensor,
    out: tl.tensor,
    tokens: tl.int64,
    rows: tl.int64,
    K: tl.constexpr,
    H: tl.constexpr,
    X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """One choice of some tokens: neighbouring programs share x in the caches."""
    j = tl.program_id(0) % K
    token = (tl.program_id(0) // K).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = tl.load(row_map + (token * K + j), mask=token < tokens, other=-1).to(tl.int64)
    has_row = (row >= 0) & (row < rows)
    acc = tl.full((BLOCK_T, BLOCK_H), 0, tl.float32)
    for start in range(0, H, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)[None, :]
        mask = has_row[:, None] & (column < H)
        left = tl.load(x + (token[:, None] * X_STRIDE + column), mask=mask, other=0).to(tl.float32)
        right = tl.load(y + (row[:, None] * Y_STRIDE + column), mask=mask, other=0).to(tl.float32)
        acc += left * right
    tl.store(out + (token * K + j), tl.reduce(acc, 1, tl.standard._sum_combine), mask=token < tokens)
