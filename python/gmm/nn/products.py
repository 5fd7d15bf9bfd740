"""What GroupedLinear computes, with groups whose sizes the host knows (lists) or only the device (offs), and with a
weight that is one parameter [E, N, K] or E of them [N, K].

    y = x @ w^T + bias,    dx = dy @ w,    dw = dy^T @ x,    dbias = the sum of each group's rows of dy
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gmm.grouped_mm import grouped_mm
from gmm.ops import multi_tensor_gemm
from gmm.ragged.autograd import autocast_is_on, without_autocast
from gmm.weight_grad import Groups, Owner, WeightGrad, raise_for_create_graph

Weights = Sequence[Tensor]  # [E, N, K] alone, or E of [N, K]; of biases [E, N], or E of [N]


def product(x: Tensor, weights: Weights, biases: Weights, groups: Groups, sm_margin: int, *, trans_b: bool) -> Tensor:
    """[T, N], or [T, K] without trans_b."""
    if isinstance(groups, Tensor):
        bias = _stacked(biases, 2) if biases else None
        return grouped_mm(x, _stacked(weights, 3), groups, bias, trans_b=trans_b, sm_margin=sm_margin)
    y = x.new_empty((x.shape[0], weights[0].shape[-2 if trans_b else -1]))
    parts, bias_parts = _listed(weights, 3), _listed(biases, 2) if biases else None
    multi_tensor_gemm(x.split(groups), parts, y.split(groups), bias_parts, trans_b=trans_b, sm_margin=sm_margin)
    return y


def weight_grads(dy: Tensor, x: Tensor, weights: Weights, groups: Groups, sm_margin: int) -> Sequence[Tensor]:
    """New tensors; in float32 where autocast gave the factors another dtype than the weights have."""
    like = weights[0]
    dtype = x.dtype if like.dtype == x.dtype else torch.float32
    if isinstance(groups, Tensor):
        dw = grouped_mm(dy.mT, x, groups, out_dtype=dtype, sm_margin=sm_margin)
    else:
        dw = x.new_empty((len(groups), dy.shape[1], x.shape[1]), dtype=dtype)
        add_weight_grads(dy, x, [dw], groups, False, sm_margin)
    return [dw] if like.dim() == 3 else dw.unbind()


def add_weight_grads(
    dy: Tensor, x: Tensor, outs: Sequence[Tensor | None], groups: Groups, accumulate: bool, sm_margin: int
) -> None:
    """Adds them to outs, or overwrites those; not where it is None."""
    whole = outs[0]
    if not isinstance(groups, Tensor):
        every = _listed([whole], 3) if whole is not None and whole.dim() == 3 else outs
        wanted = [parts for parts in zip(dy.split(groups), x.split(groups), every, strict=True) if parts[2] is not None]
        a, b, d = zip(*wanted, strict=True) if wanted else ((), (), ())
        multi_tensor_gemm(a, b, d, trans_a=True, accumulate=accumulate, sm_margin=sm_margin)
    elif whole is not None and whole.dim() == 3:
        grouped_mm(dy.mT, x, groups, out=whole, accumulate=accumulate, sm_margin=sm_margin)
    else:
        dw = grouped_mm(dy.mT, x, groups, out_dtype=torch.float32, sm_margin=sm_margin).unbind()
        pairs = [(out, grad) for out, grad in zip(outs, dw, strict=True) if out is not None]
        add = torch._foreach_add_ if accumulate else torch._foreach_copy_
        add([out for out, _ in pairs], [grad for _, grad in pairs])


def bias_grads(dy: Tensor, biases: Weights, groups: Groups) -> Sequence[Tensor]:
    """A product with ones, 8 at a time: CUTLASS reads rows of 16 bytes."""
    ones = dy.new_ones((dy.shape[0], 8))
    if isinstance(groups, Tensor):
        sums = grouped_mm(ones.t(), dy, groups, out_dtype=torch.float32)
    else:
        sums = dy.new_empty((len(groups), 8, dy.shape[1]), dtype=torch.float32)
        multi_tensor_gemm(ones.split(groups), dy.split(groups), sums.unbind(), trans_a=True)
    dbias = sums[:, 0].to(biases[0].dtype)
    return [dbias.contiguous()] if biases[0].dim() == 2 else dbias.unbind()


def _stacked(tensors: Weights, dims: int) -> Tensor:
    return tensors[0] if tensors[0].dim() == dims else torch.stack(list(tensors))


def _listed(tensors: Weights, dims: int) -> Sequence[Tensor]:
    return tensors[0].unbind() if tensors[0].dim() == dims else tensors


class GroupedLinearFunction(torch.autograd.Function):
    """y = x @ w^T + bias. `count` weights, then biases; owner: see there. Backward is the same products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        groups: Groups,
        owner: Owner | None,
        overwrite: bool,
        sm_margin: int,
        count: int,
        *parameters: Tensor,
    ) -> Tensor:
        cast = parameters
        if autocast_is_on(x.device):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, cast = x.to(dtype), tuple(p.to(dtype) for p in parameters)
        needs_x, needs_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[6 : 6 + count])
        groups_tensor = [groups] if isinstance(groups, Tensor) else []
        ctx.sizes = None if groups_tensor else groups
        ctx.save_for_backward(x if needs_w else None, *(cast[:count] if needs_x else ()), *groups_tensor)
        ctx.parameters, ctx.count = parameters, count  # whose shapes and dtypes count
        ctx.owner, ctx.overwrite, ctx.sm_margin = owner, overwrite, sm_margin
        with without_autocast(x.device):
            return product(x, cast[:count], cast[count:], groups, sm_margin, trans_b=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise_for_create_graph()
        x, *saved = ctx.saved_tensors
        groups = saved.pop() if ctx.sizes is None else ctx.sizes
        count, needs = ctx.count, ctx.needs_input_grad
        weights, biases = ctx.parameters[:count], ctx.parameters[count:]
        dy = dy.contiguous()  # that of a sum is expanded: no kernel reads it at speed
        dx = None
        grads: list[Tensor | None] = [None] * len(ctx.parameters)
        with without_autocast(dy.device):
            if needs[0]:
                dx = product(dy, saved, (), groups, ctx.sm_margin, trans_b=False)
            if any(needs[6 : 6 + count]):
                if ctx.owner is None:
                    grads[:count] = weight_grads(dy, x, weights, groups, ctx.sm_margin)
                else:
                    grads[:count] = ctx.owner.take_weight_grad(WeightGrad(dy, x, groups, ctx.overwrite))
            if any(needs[6 + count :]):
                grads[count:] = bias_grads(dy, biases, groups)
        grads = [g if need else None for g, need in zip(grads, needs[6:], strict=True)]
        return dx, None, None, None, None, None, *grads
