"""Autograd and the autocast rule of the op. Its backward calls the same op: it runs on the same backend and has a
backward itself.

    y = a @ b + bias:    da = dy @ b^T,    db = a^T @ dy,    dbias = the sum of each group's rows of dy

or the transposes of the first two, where the operand is stored transposed. The dimensions of the factors tell the mode
of each product: of a call that is ragged in M, da is ragged in M, and db in K.
"""

from __future__ import annotations

import functools
import operator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import (  # 0.04 us less a call than by their module's name
    _after_autograd_keyset,
    _dispatch_keys,
    _get_tracing_state,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad

from gmm.autograd import note_write
from gmm.backend import without_kernel
from gmm.check import DTYPES
from gmm.ragged.check import CHECKS_OFFSETS, check_weight_grad_out
from gmm.ragged.run import run_directly

_mm = torch.ops.gmm.grouped_mm.default
_mm_out = torch.ops.gmm.grouped_mm_out.default
_redispatch = torch._C._dispatch_find_schema_or_throw("gmm::grouped_mm", "").redispatch_boxed
_DEFAULTS = {"trans_b": False, "allow_tf32": False, "sm_margin": 0, "backend": "auto"}


class GroupedMM(torch.autograd.Function):
    """The op. weight_grad_out: None, or what the gradient of b is added to, which is then None."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        offs: Tensor | None,
        bias: Tensor | None,
        weight_grad_out: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        y = below_autograd(a, b, offs, bias, options)
        _save(ctx, a, b, offs, bias, weight_grad_out, options)  # of tensors that the op has checked
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(dy.device):  # backward may have been called within a region of it
            return _gradients(ctx, dy)


class TransformedGroupedMM(GroupedMM):
    """The same in the form that torch.func asks for, which takes twice the host time."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        a: Tensor,
        b: Tensor,
        offs: Tensor | None,
        bias: Tensor | None,
        weight_grad_out: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        return below_autograd(a, b, offs, bias, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, *inputs)


def _save(
    ctx: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    weight_grad_out: Tensor | None,
    options: dict[str, Any],
) -> None:
    """What backward needs."""
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None, offs)
    ctx.options, ctx.weight_grad_out = options, weight_grad_out
    ctx.dtype, ctx.bias_dtype = a.dtype, None if bias is None else bias.dtype
    ctx.a_column_major, ctx.b_column_major = is_column_major(a), is_column_major(b)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Where dy is in another dtype than a and b, it is rounded: the kernels take factors of one dtype."""
    a, b, offs = ctx.saved_tensors
    needs_a, needs_b, _, needs_bias = ctx.needs_input_grad[:4]
    trans_b, backend = ctx.options["trans_b"], without_kernel(ctx.options["backend"])
    options = {"allow_tf32": ctx.options["allow_tf32"], "sm_margin": ctx.options["sm_margin"], "backend": backend}
    if backend.startswith("cutlass") or dy.stride(-1) != 1 or dy.stride(-2) < dy.shape[-1]:
        dy = dy.contiguous()  # an expanded dy, of a sum for instance: no kernel reads it at speed, CUTLASS refuses it
    factor = dy if dy.dtype == ctx.dtype else dy.to(ctx.dtype)
    da = db = dbias = None
    if needs_a:
        da = _product(factor, b if trans_b else b.mT, offs, ctx.a_column_major, options)
    if needs_b and ctx.weight_grad_out is not None:
        _add_product(a.mT, factor, offs, ctx.weight_grad_out, trans_b, options)
    elif needs_b:
        db = _product(a.mT, factor, offs, ctx.b_column_major != trans_b, options)
        db = db.mT if trans_b else db
    if needs_bias:
        dbias = _sums(dy, offs, options).to(ctx.bias_dtype)
    return da, db, None, dbias, None, None


def is_column_major(x: Tensor) -> bool:
    """In its last two dimensions."""
    return bool(x.stride(-2) == 1 and x.stride(-1) > 1)


def _product(x: Tensor, y: Tensor, offs: Tensor | None, column_major: bool, options: dict[str, Any]) -> Tensor:
    """x @ y; column-major as the tensor that it is the gradient of."""
    return call(y.mT, x.mT, offs, None, options).mT if column_major else call(x, y, offs, None, options)


def _add_product(
    x: Tensor, y: Tensor, offs: Tensor | None, out: Tensor, trans_out: bool, options: dict[str, Any]
) -> None:
    """out += x @ y, or its transpose."""
    if torch.is_grad_enabled():
        raise RuntimeError("weight_grad_out: expected a backward without create_graph: what is added is not recorded")
    _mm_out(x, y, offs, None, out.mT if trans_out else out, accumulate=True, **options)
    note_write(out)


def _sums(dy: Tensor, offs: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The sum of each group's rows in float32: [G, N].

    A product with ones, in the layout of a weight gradient and 8 at a time: CUTLASS reads rows of 16 bytes. It is the
    one product here that CUTLASS cannot take for a float32 dy, which is not rounded for it.
    """
    if offs is None:
        return dy.sum(1, dtype=torch.float32)
    backend = options["backend"]
    if dy.dtype is torch.float32 and backend.startswith("cutlass"):
        backend = "auto"
    ones = dy.new_ones((dy.shape[0], 8))
    options = {**options, "out_dtype": torch.float32, "allow_tf32": False, "backend": backend}
    return call(ones.t(), dy, offs, None, options)[:, 0].contiguous()


def _autograd_kernel(
    keys: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, **options: Any
) -> Tensor:
    """libtorch passes only options that differ from the op's defaults."""
    if records(a, b, bias):
        return GroupedMM.apply(a, b, offs, bias, None, {**_DEFAULTS, **options})
    if options.get("backend") in _TRITON and _goes_directly(a, b, offs, bias, options):
        return _run_directly(a, b, offs, options)
    return _redispatch(keys & _after_autograd_keyset, a, b, offs, bias, **options)


def call(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The op by the shortest way that the call allows. options: keyword arguments of the op."""
    if not records(a, b, bias):
        return below_autograd(a, b, offs, bias, options)
    if within_torch_func():
        return apply(a, b, offs, bias, None, options)  # which the op's autograd kernel cannot do for torch.func
    if not torch.compiler.is_dynamo_compiling() and is_plain(a, b, offs, bias):
        return GroupedMM.apply(a, b, offs, bias, None, {**_DEFAULTS, **options})  # what the op would end in
    return _mm(a, b, offs, bias, **options)


def apply(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    weight_grad_out: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """The autograd function itself, with the autocast rule: the op cannot give it a tensor to write into."""
    if autocast_is_on(a.device):
        a, b, bias = autocast(a, b, bias, options.get("out_dtype"))
    if weight_grad_out is not None:
        if within_torch_func():
            raise RuntimeError(
                "weight_grad_out: expected None under torch.func, whose gradients are results, got a tensor"
            )
        check_weight_grad_out(weight_grad_out, b, a.dtype)
    function = TransformedGroupedMM if weight_grad_out is None else GroupedMM
    with without_autocast(a.device):
        return function.apply(a, b, offs, bias, weight_grad_out, {**_DEFAULTS, **options})


def within_torch_func() -> bool:
    """Whether a transform of torch.func is at work."""
    return not torch.compiler.is_dynamo_compiling() and torch._C._are_functorch_transforms_active()


def below_autograd(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The op without its autograd kernel, whose Python takes half of the host time. Dynamo cannot trace the guard."""
    if torch.compiler.is_dynamo_compiling():
        return _mm(a, b, offs, bias, **options)
    if options.get("backend") in _TRITON and _goes_directly(a, b, offs, bias, options):
        return _run_directly(a, b, offs, options)
    with torch._C._AutoDispatchBelowAutograd():
        return _mm(a, b, offs, bias, **options)


def _run_directly(a: Tensor, b: Tensor, offs: Tensor | None, options: dict[str, Any]) -> Tensor:
    assert offs is not None  # see _goes_directly()
    dtype, trans_b, tf32 = options.get("out_dtype"), options.get("trans_b", False), options.get("allow_tf32", False)
    return run_directly(a, b, offs, dtype, trans_b, tf32, options["backend"])


def _goes_directly(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, options: dict[str, Any]) -> bool:
    """Whether Python may run the call itself: it is of the forms that run_directly() knows."""
    if offs is None or bias is not None or options.get("sm_margin") or CHECKS_OFFSETS or not is_plain(a, b, offs):
        return False
    dims = len(a.shape), len(b.shape)
    return dims == (2, 3) or (dims == (2, 2) and not options.get("trans_b"))


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher has nothing to do for the op on them but to call autograd and the device's kernel."""
    if _is_any_autocast_enabled() or _len_torch_dispatch_stack() or _get_tracing_state() is not None:
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or _dispatch_keys(x).raw_repr() & _SPECIAL_KEYS):
            return False
    return True


_TRITON = ("triton", "triton,auto")  # backend=, use_backend(); GMM_BACKEND
_PLAIN = (Tensor, torch.nn.Parameter)
# All but those of a dense tensor. They have the dispatcher do something before a kernel, or take another: negated
# views, zero tensors, meta tensors, torch.func's and so on.
_SPECIAL_KEYS = ~functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, prefix + device)).raw_repr()
        for prefix in ("", "Autograd", "Autocast")
        for device in ("CPU", "CUDA", "XPU")
    ),
    torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).raw_repr(),
)


def records(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Whether autograd must see the call. GroupedMM has no jvp, and says so where there are tangents."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad))


def autocast_is_on(device: torch.device) -> bool:
    """Whether the autocast rule below holds."""
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A region in which it does not."""
    return torch.autocast(device.type, enabled=False) if autocast_is_on(device) else nullcontext()


def autocast(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """a, b and bias as torch.autocast wants them, which is on: the rule of torch.mm."""
    dtype = torch.get_autocast_dtype(a.device.type)
    a, b = (x.to(dtype) if x.dtype in DTYPES else x for x in (a, b))
    if bias is not None and bias.dtype in DTYPES:
        bias = bias.to(out_dtype or dtype)
    return a, b, bias


def _autocast_kernel(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    a, b, bias = autocast(a, b, bias, out_dtype)
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
        return _mm(a, b, offs, bias, out_dtype=out_dtype, **options)


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_AUTOCAST_KEYS = _AUTOCAST_KEYS | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

_library = torch.library.Library("gmm", "IMPL")
_library.impl("grouped_mm", _autograd_kernel, "Autograd", with_keyset=True)
_library.impl("grouped_mm", _autocast_kernel, "AutocastCPU")
_library.impl("grouped_mm", _autocast_kernel, "AutocastCUDA")
