"""Tokens into the experts' order and back.

Three ops, each linear in every operand, whose derivatives are one another: with row = row_map[t, j],

    permute     out[row] = weights[t, j] * x[t]
    unpermute   out[t] = the sum over j of weights[t, j] * y[row]
    dots        out[t, j] = <x[t], y[row]>

Where row_map is negative, ~row_map is a row after the last expert's: zeros in permute, nothing in the others. A row
that is not there is neither written nor read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gmm.check import DTYPES, check, check_no_tangents, dtype_name
from gmm.moe.launch import dots_in_triton, permute_in_triton, takes, unpermute_in_triton
from gmm.moe.register import register
from gmm.moe.routing import route


def permute(x: Tensor, top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies each token to a row for each of its k experts, sorted by expert.

    Args:
        x: [T, H] tokens, in bfloat16, float16 or float32.
        top_k_index: [T, k] expert ids, integers. num_experts and negative ids are sentinels, of experts that other
            processes hold.
        num_experts: E.

    Returns:
        tokens: [T*k, H], by expert, then by token. The rows at and after offs[-1], as many as there are sentinels, are
            zeros.
        row_map: [T, k], int32: the row of each token's choices; see route(). For unpermute() and permute_weights().
        offs: [E], int32: the end of each expert's rows. For grouped_mm().

    Raises:
        RuntimeError: shapes, dtypes or devices contradict; ids out of range, where route_sizes() raises it.

    Does not synchronise, drops no token. The gradient of x is the sum of its rows' in float32, rounded once.
    """
    check_no_tangents("permute", x)
    row_map, offs = route(top_k_index, num_experts)
    return _permute(x, row_map, None, row_map.shape[0] * row_map.shape[1]), row_map, offs


def permute_weights(top_k_weights: Tensor, row_map: Tensor) -> Tensor:
    """Each pair's routing weight in the experts' order: [T*k] from [T, k], zeros in the rows of sentinels.

    Raises:
        RuntimeError: shapes, dtypes or devices contradict.
    """
    check_no_tangents("permute_weights", top_k_weights)
    _check_weights_shape(top_k_weights, row_map)
    pairs = row_map.shape[0] * row_map.shape[1]
    return _permute(top_k_weights.reshape(-1, 1), row_map.reshape(-1, 1), None, pairs).view(pairs)


def unpermute(y: Tensor, row_map: Tensor, top_k_weights: Tensor | None = None) -> Tensor:
    """The sum of each token's k rows, weighted or not: what permute() took apart, put together.

    Args:
        y: [T*k, H] rows in the experts' order, in bfloat16, float16 or float32. The rows of sentinels are not read.
            There may be fewer rows: those that are missing count as zeros.
        row_map: [T, k], from permute() or route().
        top_k_weights: [T, k], bfloat16, float16 or float32; None: all are 1, as where gated_activation() has applied
            them, which keeps backward from reading y.

    Returns:
        [T, H] in the dtype of y: summed in float32 in the order of the choices, rounded once. Equal from run to run.

    Raises:
        RuntimeError: shapes, dtypes or devices contradict.
    """
    check_no_tangents("unpermute", y, top_k_weights)
    return _unpermute(y, row_map, top_k_weights)


# The checks are the ops': their kernels' and their fake kernels'.


def _check_permute(x: Tensor, row_map: Tensor, weights: Tensor | None, rows: int) -> None:
    _check("x", x, row_map, weights)
    expected = "row_map, top_k_index: expected {} rows (those of x), got {}"
    check(row_map.shape[0] == x.shape[0], expected, x.shape[0], row_map.shape[0])


def _check_unpermute(y: Tensor, row_map: Tensor, weights: Tensor | None) -> None:
    _check("y", y, row_map, weights)
    pairs = row_map.shape[0] * row_map.shape[1]
    check(y.shape[0] <= pairs, "y: expected at most {} rows (the pairs of row_map), got {}", pairs, y.shape[0])


def _check(name: str, x: Tensor, row_map: Tensor, weights: Tensor | None) -> None:
    check(x.dim() == 2, "{}: expected 2 dimensions, [tokens, hidden], got {}", name, x.dim())
    check(x.dtype in DTYPES, "{}: expected bfloat16, float16 or float32, got {}", name, dtype_name(x.dtype))
    check(row_map.dim() == 2, "row_map: expected 2 dimensions, [tokens, k], got {}", row_map.dim())
    check(row_map.dtype is torch.int32, "row_map: expected int32, got {}", dtype_name(row_map.dtype))
    _check_device("row_map", row_map, name, x)
    if weights is not None:
        _check_weights_shape(weights, row_map)
        known = weights.dtype in DTYPES
        check(known, "top_k_weights: expected bfloat16, float16 or float32, got {}", dtype_name(weights.dtype))
        _check_device("top_k_weights", weights, name, x)


def _check_weights_shape(weights: Tensor, row_map: Tensor) -> None:
    if weights.shape != row_map.shape:  # dynamo cannot trace check() on symbolic sizes
        shape, got = list(row_map.shape), list(weights.shape)
        raise RuntimeError(f"top_k_weights: expected shape {shape} (that of row_map), got {got}")


def _check_device(name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    expected = "{}: expected a tensor on {} (where {} is), got one on {}"
    check(x.device == like.device, expected, name, like.device, like_name, x.device)


# In plain torch.


def _scaled(x: Tensor, weights: Tensor | None) -> Tensor:
    """[T, k, H] in float32."""
    return x.float() if weights is None else x.float() * weights.float().unsqueeze(-1)


def _permute_in_torch(x: Tensor, row_map: Tensor, weights: Tensor | None, rows: int) -> Tensor:
    tokens, k = row_map.shape
    values = _scaled(x.unsqueeze(1).expand(tokens, k, x.shape[1]), weights).to(x.dtype)
    out = x.new_zeros((rows + 1, x.shape[1]))  # the last one takes the pairs without a row
    return out.index_copy_(0, _targets(row_map, rows).reshape(-1), values.reshape(row_map.numel(), x.shape[1]))[:rows]


def _targets(row_map: Tensor, rows: int) -> Tensor:
    """The pairs' rows, `rows` for those without."""
    return torch.where((row_map >= 0) & (row_map < rows), row_map, rows).long()


def _gather(y: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    """[T, k, H], the pairs' rows; [T, k], which pairs have none."""
    targets = _targets(row_map, y.shape[0])
    return torch.cat([y, y.new_zeros((1, y.shape[1]))])[targets], targets == y.shape[0]


def _unpermute_in_torch(y: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    rows, without = _gather(y, row_map)
    return _scaled(rows, weights).masked_fill(without.unsqueeze(-1), 0).sum(1).to(y.dtype)


def _dots_in_torch(x: Tensor, y: Tensor, row_map: Tensor) -> Tensor:
    rows, without = _gather(y, row_map)
    return (x.float().unsqueeze(1) * rows.float()).sum(-1).masked_fill(without, 0)


# The ops.


def _permute_kernel(x: Tensor, row_map: Tensor, weights: Tensor | None, rows: int) -> Tensor:
    _check_permute(x, row_map, weights, rows)
    run = permute_in_triton if takes(x) else _permute_in_torch
    return run(x, row_map, weights, rows)


def _unpermute_kernel(y: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    _check_unpermute(y, row_map, weights)
    run = unpermute_in_triton if takes(y) else _unpermute_in_torch
    return run(y, row_map, weights)


def _dots_kernel(x: Tensor, y: Tensor, row_map: Tensor) -> Tensor:
    run = dots_in_triton if takes(x) else _dots_in_torch
    return run(x, y, row_map)


def _permute_fake(x: Tensor, row_map: Tensor, weights: Tensor | None, rows: int) -> Tensor:
    _check_permute(x, row_map, weights, rows)
    return x.new_empty((rows, x.shape[1]))


def _unpermute_fake(y: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    _check_unpermute(y, row_map, weights)
    return y.new_empty((row_map.shape[0], y.shape[1]))


def _dots_fake(x: Tensor, y: Tensor, row_map: Tensor) -> Tensor:
    return x.new_empty(row_map.shape, dtype=torch.float32)


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, row_map, weights, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, row_map, weights)


def _permute_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, row_map, weights = ctx.saved_tensors
    dx = _unpermute(dy, row_map, weights) if ctx.needs_input_grad[0] else None
    return dx, None, None if x is None else _dots(x, dy, row_map).to(weights.dtype), None


def _save_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, row_map, weights = inputs
    ctx.save_for_backward(y if ctx.needs_input_grad[2] else None, row_map, weights)
    ctx.rows = y.shape[0]


def _unpermute_backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
    y, row_map, weights = ctx.saved_tensors
    dy = _permute(dx, row_map, weights, ctx.rows) if ctx.needs_input_grad[0] else None
    return dy, None, None if y is None else _dots(dx, y, row_map).to(weights.dtype)


def _save_dots(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, row_map = inputs
    needs_x, needs_y = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_y else None, y if needs_x else None, row_map)
    ctx.rows = y.shape[0]


def _dots_backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
    x, y, row_map = ctx.saved_tensors
    dx = None if y is None else _unpermute(y, row_map, dw)
    return dx, None if x is None else _permute(x, row_map, dw, ctx.rows), None


_permute = register(
    "moe_permute",
    "(Tensor x, Tensor row_map, Tensor? weights, SymInt rows) -> Tensor",
    _permute_kernel,
    _permute_fake,
    _permute_backward,
    _save_permute,
)
_unpermute = register(
    "moe_unpermute",
    "(Tensor y, Tensor row_map, Tensor? weights) -> Tensor",
    _unpermute_kernel,
    _unpermute_fake,
    _unpermute_backward,
    _save_unpermute,
)
_dots = register(
    "moe_dots",
    "(Tensor x, Tensor y, Tensor row_map) -> Tensor",
    _dots_kernel,
    _dots_fake,
    _dots_backward,
    _save_dots,
)
