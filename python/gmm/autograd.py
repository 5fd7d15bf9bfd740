"""Autograd of the functional op. Its backward calls the same op: it runs on the same backend and has a backward itself.

    y = op(a) @ op(b) + bias:    da = dy @ op(b)^T,    db = op(a)^T @ dy,    dbias = the sum of dy's rows

or the transposes of the first two, where the operand is stored transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gmm.check import check_lengths

_mm = torch.ops.gmm.multi_tensor_mm.default
_redispatch = torch._C._dispatch_find_schema_or_throw("gmm::multi_tensor_mm", "").redispatch_boxed
_DEFAULTS = {"trans_a": False, "trans_b": False, "allow_tf32": False, "sm_margin": 0, "backend": "auto"}


class _MultiTensorMM(torch.autograd.Function):
    """The op with its tensors in one flat list.

    torch.library.register_autograd would make this class, but with pytrees: two thirds of the forward's host time with
    64 groups.
    """

    @staticmethod
    def forward(ctx: Any, groups: int, options: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        a, b, bias = tensors[:groups], tensors[groups : 2 * groups], tensors[2 * groups :]
        with torch._C._AutoDispatchBelowAutograd():
            y = _mm(a, b, bias or None, **options)
        needs_a, needs_b, _ = _split(ctx.needs_input_grad, groups)
        ctx.save_for_backward(*(a if any(needs_b) else ()), *(b if any(needs_a) else ()))
        ctx.groups, ctx.options, ctx.dtype = groups, options, a[0].dtype
        ctx.bias_dtype = bias[0].dtype if bias else None
        ctx.a_column_major = all(_is_column_major(x) for x in a)
        ctx.b_column_major = all(_is_column_major(x) for x in b)
        return tuple(y)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Any, ...]:
        """Where dy is in another dtype than a and b, it is rounded: the kernels take factors of one dtype."""
        needs_a, needs_b, needs_bias = _split(ctx.needs_input_grad, ctx.groups)
        saved = ctx.saved_tensors
        a = saved[: ctx.groups] if any(needs_b) else ()
        b = saved[-ctx.groups :] if any(needs_a) else ()
        options = {name: ctx.options[name] for name in ("allow_tf32", "sm_margin", "backend")}
        trans_a, trans_b = ctx.options["trans_a"], ctx.options["trans_b"]
        factors = [g if g.dtype == ctx.dtype else g.to(ctx.dtype) for g in dy]
        if trans_a:
            da = _products(needs_a, b, factors, trans_b, True, ctx.a_column_major, options)
        else:
            da = _products(needs_a, factors, b, False, not trans_b, ctx.a_column_major, options)
        if trans_b:
            db = _products(needs_b, factors, a, True, trans_a, ctx.b_column_major, options)
        else:
            db = _products(needs_b, a, factors, not trans_a, False, ctx.b_column_major, options)
        dbias = [
            g.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need else None
            for need, g in zip(needs_bias, dy)  # no bias: none at all
        ]
        return None, None, *da, *db, *dbias


def _split(needs_input_grad: Sequence[bool], groups: int) -> tuple[Sequence[bool], Sequence[bool], Sequence[bool]]:
    """Of a, b and bias."""
    return needs_input_grad[2 : 2 + groups], needs_input_grad[2 + groups :][:groups], needs_input_grad[2 + 2 * groups :]


def _is_column_major(x: Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) > 1


def _products(
    needed: Sequence[bool],
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    trans_x: bool,
    trans_y: bool,
    column_major: bool,
    options: dict[str, Any],
) -> Sequence[Tensor | None]:
    """op(x[i]) @ op(y[i]) for the groups that need it, else None; column-major as the tensors they are gradients of."""
    groups = [i for i, need in enumerate(needed) if need]
    grads: list[Tensor | None] = [None] * len(needed)
    if not groups:
        return grads
    x, y = [x[i] for i in groups], [y[i] for i in groups]
    if column_major:  # (x y)^T = y^T x^T
        x, y, trans_x, trans_y = y, x, not trans_y, not trans_x
    products = _mm(x, y, trans_a=trans_x, trans_b=trans_y, **options)
    for i, product in zip(groups, products, strict=True):
        grads[i] = product.t() if column_major else product
    return grads


def _autograd_kernel(
    keys: Any, a: Sequence[Tensor], b: Sequence[Tensor], bias: Sequence[Tensor] | None = None, **options: Any
) -> Sequence[Tensor]:
    """libtorch passes only options that differ from the op's defaults."""
    tensors = (*a, *b, *(bias or ()))
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if differentiated or forward_ad._current_level >= 0:  # the class has no jvp, and says so where there are tangents
        check_lengths(a, b, None, bias)  # which tells them apart in the flat list
        return list(_MultiTensorMM.apply(len(a), {**_DEFAULTS, **options}, *tensors))
    return _redispatch(keys & torch._C._after_autograd_keyset, a, b, bias, **options)


def note_write(written: Tensor | Sequence[Tensor]) -> None:
    """Tells autograd what an op has written, which it does not see: a graph that has saved the old values then raises
    in its backward."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(written)


_library = torch.library.Library("gmm", "IMPL")
_library.impl("multi_tensor_mm", _autograd_kernel, "Autograd", with_keyset=True)
