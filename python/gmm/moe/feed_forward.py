"""The feed-forward of an MoE layer on sorted tokens: both products and the activation between them.

SwiGLU, the kind of nearly all models, has two ops of its own: a product with the activation behind it, and the backward
of the activation behind the product that gives it its gradient. CUTLASS runs each in one kernel where it takes the
call, so that no kernel reads what a product has just written. Elsewhere, and for all other kinds, it is the functions
one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gmm.backend import parse, resolve, without_kernel
from gmm.check import DTYPES, check, check_no_tangents, dtype_name
from gmm.grouped_mm import grouped_mm
from gmm.moe.activation import (
    KINDS,
    activation,
    activation_backward,
    activation_backward_in_torch,
    check_options,
    check_weights,
    gated_activation,
)
from gmm.moe.register import register
from gmm.ragged.autograd import autocast_is_on, is_column_major, is_plain, within_torch_func, without_autocast
from gmm.ragged.check import check_grouped
from gmm.weight_grad import Owner, WeightGrad, raise_for_create_graph


def feed_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    offs: Tensor,
    weights: Tensor | None = None,
    *,
    kind: str = "swiglu",
    interleaved: bool = False,
    limit: float | None = None,
    trans_b: bool = True,
    sm_margin: int = 0,
) -> Tensor:
    """down(weights[r] * activation(gate_up(x[r]))) of r's expert, for each row r.

    Args:
        x: [T, H] tokens by expert, as permute() gives them. bfloat16, float16 or float32.
        gate_up: [E, 2*I, H], the weights of gate and up, gate first; [E, I, H] where the kind has no gate. In the dtype
            of x.
        down: [E, H, I], the weights of the second product.
        offs: [E] ends of the experts' rows, as of grouped_mm(). Rows at and after the last give zeros.
        weights: [T] routing weights, as permute_weights() gives them; None: all are 1.
        kind: as of gated_activation().
        interleaved: gate_up has gate and up in turn.
        limit: as of gated_activation().
        trans_b: the weights are stored as torch.nn.Linear keeps them; otherwise gate_up is [E, H, 2*I] and down
            [E, I, H].
        sm_margin: SMs to leave to other kernels, such as communication; on backends that can.

    Returns:
        [T, H], in the dtype of x.

    Raises:
        ValueError: as gated_activation().
        RuntimeError: shapes, dtypes or devices contradict; as grouped_mm().

    The same as grouped_mm(), gated_activation() and grouped_mm(), with their choice of backend and rule of autocast.
    For "swiglu" with gate before up and without a limit, the activation and its backward run within the products where
    CUTLASS takes these: gmm.explain(x, gate_up, epilogue="swiglu", trans_b=True) says whether, and why not. What comes
    out is then the same but for the last bit of exp, before it is rounded to the dtype of x. Derivatives of any order,
    by autograd. Compiles with fullgraph=True; torch 2.10 compiles anew for each number of rows. Synchronises where
    grouped_mm() does: with cuBLAS.
    """
    check_options(kind, False, interleaved, limit)
    check_no_tangents("feed_forward", x, gate_up, down, weights)
    check_operands(x, gate_up, down, offs, weights, KINDS[kind].gated, trans_b)
    if (kind, interleaved, limit) == _SWIGLU and not within_torch_func():
        return swiglu_feed_forward(x, gate_up, down, offs, weights, trans_b, sm_margin)
    h = grouped_mm(x, gate_up, offs, trans_b=trans_b, sm_margin=sm_margin)
    h = gated_activation(h, kind, interleaved=interleaved, limit=limit, weights=weights, offs=offs)
    return grouped_mm(h, down, offs, trans_b=trans_b, sm_margin=sm_margin)


def swiglu_feed_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    offs: Tensor,
    weights: Tensor | None,
    trans_b: bool,
    sm_margin: int,
    owners: tuple[Owner | None, Owner | None] = (None, None),
    overwrite: bool = False,
) -> Tensor:
    """feed_forward() of that kind. owners: who takes the gradients of gate_up and down, where autograd does not."""
    options = {"sm_margin": sm_margin, "backend": resolve(None)}
    if autocast_is_on(x.device):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, gate_up, down = (t.to(dtype) if t.dtype in DTYPES else t for t in (x, gate_up, down))
    with without_autocast(x.device):
        grad = torch.is_grad_enabled()
        needs_h = grad and any(t is not None and t.requires_grad for t in (x, gate_up, weights))
        factors = None if weights is None else weights.detach()  # whose gradient is made where that of h is
        if grad and (x.requires_grad or gate_up.requires_grad):
            h, y = GatedProduct.apply(x, gate_up, offs, factors, trans_b, options, owners[0], overwrite)
        else:
            h, y = _swiglu(x, gate_up.mT if trans_b else gate_up, offs, factors, needs_h, **options)
        if needs_h or (grad and down.requires_grad):
            return DownProduct.apply(h, y, down, offs, weights, trans_b, options, owners[1], overwrite)
        return grouped_mm(y, down, offs, trans_b=trans_b, **options)


def check_operands(
    x: Tensor, gate_up: Tensor, down: Tensor, offs: Tensor, weights: Tensor | None, gated: bool, trans_b: bool
) -> None:
    """What the products could not say in these names. Dynamo cannot trace check() on symbolic sizes."""
    for name, t, dims in (("x", x, 2), ("gate_up", gate_up, 3), ("down", down, 3)):
        if t.dim() != dims:
            raise RuntimeError(f"{name}: expected {dims} dimensions, got {t.dim()}")
    if x.dtype not in DTYPES:
        raise RuntimeError(f"x: expected bfloat16, float16 or float32, got {dtype_name(x.dtype)}")
    if not isinstance(offs, Tensor):
        raise RuntimeError(f"offs: expected a tensor, got {type(offs).__name__}")
    experts, hidden, ffn = gate_up.shape[0], x.shape[1], down.shape[2 if trans_b else 1]
    for name, w, n, k in (("gate_up", gate_up, ffn * (1 + gated), hidden), ("down", down, hidden, ffn)):
        expected = [experts, n, k] if trans_b else [experts, k, n]
        if list(w.shape) != expected:
            raise RuntimeError(f"{name}: expected shape {expected}, got {list(w.shape)}")
        if w.dtype is not x.dtype and not autocast_is_on(x.device):
            raise RuntimeError(f"{name}: expected {dtype_name(x.dtype)} (the dtype of x), got {dtype_name(w.dtype)}")
    for name, t in (("gate_up", gate_up), ("down", down), ("offs", offs)):
        if t.device != x.device:
            raise RuntimeError(f"{name}: expected a tensor on {x.device} (where x is), got one on {t.device}")
    if list(offs.shape) != [experts]:
        raise RuntimeError(f"offs: expected shape [{experts}] (the experts of gate_up), got {list(offs.shape)}")
    check_weights(weights, x, "x")


# Two functions, so that backward can let go of h and y before it makes the gradients of x and gate_up.


class GatedProduct(torch.autograd.Function):
    """h = x @ gate_up, which has the gradients; and y, the activation of it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        offs: Tensor,
        weights: Tensor | None,
        trans_b: bool,
        options: dict[str, Any],
        owner: Owner | None,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        h, y = _swiglu(x, gate_up.mT if trans_b else gate_up, offs, weights, True, **options)
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # else backward gets zeros for y, as large as it is
        needs_x, needs_gate_up = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_gate_up else None, gate_up if needs_x else None, offs)
        _keep_options(ctx, gate_up, trans_b, options, owner, overwrite)
        return h, y

    @staticmethod
    def backward(ctx: Any, dh: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, gate_up, offs = ctx.saved_tensors
        needs_x, needs_gate_up = ctx.needs_input_grad[:2]
        dx = dgate_up = None
        with _backward_region(ctx, offs):
            if needs_gate_up:
                dgate_up = _weight_grad(ctx, dh, x, offs)
            if needs_x:
                dx = grouped_mm(dh, gate_up, offs, trans_b=not ctx.trans_b, **ctx.options)
        return dx, dgate_up, *(None,) * 6


class DownProduct(torch.autograd.Function):
    """y @ down, where y is the activation of h."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        y: Tensor,
        down: Tensor,
        offs: Tensor,
        weights: Tensor | None,
        trans_b: bool,
        options: dict[str, Any],
        owner: Owner | None,
        overwrite: bool,
    ) -> Tensor:
        needs_h, _, needs_down, _, needs_weights = ctx.needs_input_grad[:5]
        ctx.needs_h = needs_h = needs_h or needs_weights
        kept = (t if needs_h else None for t in (h, down, weights))
        ctx.save_for_backward(*kept, y if needs_down else None, offs)
        _keep_options(ctx, down, trans_b, options, owner, overwrite)
        return grouped_mm(y, down, offs, trans_b=trans_b, **options)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        h, down, weights, y, offs = ctx.saved_tensors
        needs_down, _, needs_weights = ctx.needs_input_grad[2:5]
        swiglu_backward: Callable[..., tuple[Tensor, Tensor]] = _swiglu_backward
        dh = ddown = dweights = None
        with _backward_region(ctx, offs):
            if torch.is_grad_enabled():  # create_graph: through what is differentiable
                if ctx.needs_h and needs_down:
                    y = activation(h, None, weights, offs, *_SWIGLU)
                swiglu_backward = partial(_swiglu_backward_composed, activation_backward=activation_backward_in_torch)
            d = d.contiguous()  # that of a sum is expanded: no kernel reads it at speed
            if ctx.needs_h:
                w = down if ctx.trans_b else down.mT
                dh, dweights = swiglu_backward(d, w, h, offs, weights, **ctx.options)
            if needs_down:
                ddown = _weight_grad(ctx, d, y, offs)
        return dh, None, ddown, None, dweights if needs_weights else None, *(None,) * 4


def _keep_options(
    ctx: Any, weight: Tensor, trans_b: bool, options: dict[str, Any], owner: Owner | None, overwrite: bool
) -> None:
    ctx.column_major, ctx.trans_b, ctx.owner, ctx.overwrite = is_column_major(weight), trans_b, owner, overwrite
    ctx.options = {**options, "backend": without_kernel(options["backend"])}


def _backward_region(ctx: Any, offs: Tensor) -> AbstractContextManager[Any]:
    """Without the autocast of the region that backward may have been called in."""
    if torch.is_grad_enabled() and ctx.owner is not None:
        raise_for_create_graph()
    return without_autocast(offs.device)


def _weight_grad(ctx: Any, dy: Tensor, x: Tensor, offs: Tensor) -> Tensor | None:
    """In the layout of the weight; None where its owner has taken it."""
    if ctx.owner is not None:
        (grad,) = ctx.owner.take_weight_grad(WeightGrad(dy, x, offs, ctx.overwrite))
        return grad
    a, b = (dy, x) if ctx.trans_b else (x, dy)
    if ctx.column_major:
        return grouped_mm(b.mT, a, offs, **ctx.options).mT
    return grouped_mm(a.mT, b, offs, **ctx.options)


# The ops: y of a product h = x @ w, and the gradients of h and weights from that of the product after it.


def _swiglu(
    x: Tensor, w: Tensor, offs: Tensor, weights: Tensor | None, keep: bool, **options: Any
) -> tuple[Tensor, Tensor]:
    """The op by the shortest way that the call allows."""
    run: Callable[..., tuple[Tensor, Tensor]] = _swiglu_kernel if _goes_directly(x, w, offs, weights) else _swiglu_op
    return run(x, w, offs, weights, keep, **options)


def _swiglu_backward(
    dy: Tensor, w: Tensor, h: Tensor, offs: Tensor, weights: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Likewise."""
    directly = _goes_directly(dy, w, h, offs, weights)
    run: Callable[..., tuple[Tensor, Tensor]] = _swiglu_backward_kernel if directly else _swiglu_backward_op
    return run(dy, w, h, offs, weights, **options)


def _goes_directly(*tensors: Tensor | None) -> bool:
    """Whether the ops' Python may be called without the dispatcher, which takes longer than it does."""
    return not torch.compiler.is_compiling() and is_plain(*tensors)


@torch.no_grad()
def _swiglu_kernel(
    x: Tensor, w: Tensor, offs: Tensor, weights: Tensor | None, keep: bool, sm_margin: int, backend: str
) -> tuple[Tensor, Tensor]:
    fused = _swiglu_in_cutlass(x, w, offs, weights, keep, sm_margin, backend)
    if fused is not None:
        return fused
    h, y = _swiglu_composed(x, w, offs, weights, sm_margin, backend)
    return h if keep else h.new_empty(0), y


def _swiglu_in_cutlass(
    x: Tensor, w: Tensor, offs: Tensor, weights: Tensor | None, keep: bool, sm_margin: int, backend: str
) -> tuple[Tensor, Tensor] | None:
    """None where it does not take the call."""
    if not _may_fuse(x, offs, backend):
        return None
    h, y = _swiglu_fake(x, w, offs, weights, keep, sm_margin, backend)
    factors = None if weights is None else weights.float().contiguous()
    why_not = torch.ops.gmm.swiglu_cutlass.default(x, w, offs, factors, h if keep else None, y, sm_margin=sm_margin)
    return None if why_not else (h, y)


def _swiglu_composed(
    x: Tensor, w: Tensor, offs: Tensor, weights: Tensor | None, sm_margin: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Differentiable."""
    h = grouped_mm(x, w, offs, sm_margin=sm_margin, backend=backend)
    return h, activation(h, None, weights, offs, *_SWIGLU)


def _swiglu_fake(
    x: Tensor, w: Tensor, offs: Tensor, weights: Tensor | None, keep: bool, sm_margin: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Empty results of a call that is as it should be."""
    shape, _ = check_grouped(x, w, offs, sm_margin=sm_margin)
    check(shape.mode == "ragged_m", "x, w: expected 2 and 3 dimensions, got {} and {}", x.dim(), w.dim())
    check(shape.n % 2 == 0, "w: expected an even number of columns, gate and up, got {}", shape.n)
    check_weights(weights, x, "x")
    parse(backend)
    return x.new_empty(shape.out if keep else (0,)), x.new_empty((shape.m, shape.n // 2))


@torch.no_grad()
def _swiglu_backward_kernel(
    dy: Tensor, w: Tensor, h: Tensor, offs: Tensor, weights: Tensor | None, sm_margin: int, backend: str
) -> tuple[Tensor, Tensor]:
    fused = _swiglu_backward_in_cutlass(dy, w, h, offs, weights, sm_margin, backend)
    if fused is not None:
        return fused
    return _swiglu_backward_composed(dy, w, h, offs, weights, sm_margin, backend)


def _swiglu_backward_in_cutlass(
    dy: Tensor, w: Tensor, h: Tensor, offs: Tensor, weights: Tensor | None, sm_margin: int, backend: str
) -> tuple[Tensor, Tensor] | None:
    """None where it does not take the call."""
    if not _may_fuse(dy, offs, backend):
        return None
    dh, dweights = _swiglu_backward_fake(dy, w, h, offs, weights, sm_margin, backend)
    factors = parts = None
    if weights is not None:
        factors = weights.float().contiguous()
        parts = factors.new_empty((4 * -(-w.shape[2] // 128), len(dy)))  # of what dweights sums up
    why_not = torch.ops.gmm.swiglu_backward_cutlass.default(
        dy, w, h.contiguous(), offs, factors, dh, parts, sm_margin=sm_margin
    )
    if why_not:
        return None
    return dh, dweights if parts is None else parts.sum(0).to(dweights.dtype)


def _swiglu_backward_composed(
    dy: Tensor,
    w: Tensor,
    h: Tensor,
    offs: Tensor,
    weights: Tensor | None,
    sm_margin: int,
    backend: str,
    activation_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = activation_backward,
) -> tuple[Tensor, Tensor]:
    dactivation = grouped_mm(dy, w, offs, sm_margin=sm_margin, backend=backend)
    dh, _, dweights = activation_backward(dactivation, h, None, weights, offs, *_SWIGLU)
    return dh, dweights


def _swiglu_backward_fake(
    dy: Tensor, w: Tensor, h: Tensor, offs: Tensor, weights: Tensor | None, sm_margin: int, backend: str
) -> tuple[Tensor, Tensor]:
    """Empty results of a call that is as it should be."""
    shape, dtype = check_grouped(dy, w, offs, sm_margin=sm_margin)
    check(shape.mode == "ragged_m", "dy, w: expected 2 and 3 dimensions, got {} and {}", dy.dim(), w.dim())
    fits = h.dim() == 2 and h.shape[0] == shape.m and h.shape[1] == 2 * shape.n and h.dtype is dtype
    expected = "h: expected shape [{}, {}] and {} (the dtype of dy), got {} and {}"
    check(fits, expected, shape.m, 2 * shape.n, dtype_name(dtype), list(h.shape), dtype_name(h.dtype))
    check_weights(weights, dy, "dy")
    parse(backend)
    return h.new_empty(h.shape), h.new_empty(0) if weights is None else weights.new_empty(weights.shape)


_FEW_ROWS = 80  # an expert: kFewRows of csrc/cutlass/sm90/descriptor_array, which refuses them after more work


def _may_fuse(x: Tensor, offs: Tensor, backend: str) -> bool:
    """Whether CUTLASS is asked. One of its kernels by name is none of these."""
    if not x.is_cuda or x.dtype == torch.float32 or x.shape[0] <= _FEW_ROWS * offs.shape[0]:
        return False
    choice = parse(backend)
    return choice.name in ("auto", "cutlass") and not choice.kernel


_SWIGLU = ("swiglu", False, None)  # kind, interleaved and limit
_OPTIONS = "int sm_margin, str backend"
_swiglu_op = register(
    "moe_swiglu",
    f"(Tensor x, Tensor w, Tensor offs, Tensor? weights, bool keep, {_OPTIONS}) -> (Tensor h, Tensor y)",
    _swiglu_kernel,
    _swiglu_fake,
)
_swiglu_backward_op = register(
    "moe_swiglu_backward",
    f"(Tensor dy, Tensor w, Tensor h, Tensor offs, Tensor? weights, {_OPTIONS}) -> (Tensor dh, Tensor dweights)",
    _swiglu_backward_kernel,
    _swiglu_backward_fake,
)
