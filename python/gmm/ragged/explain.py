"""explain() for grouped_mm: the choice that csrc/torch/grouped_mm.cpp and run.py make between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import gmm.triton
from gmm._library import core
from gmm.backend import Choice, parse, resolve
from gmm.check import check, dtype_name
from gmm.ops import allows_tf32
from gmm.plan import Operand, Plan, address, as_tensor, cuda_ordinal, plan_list, stored_batch
from gmm.ragged.check import Shape, check_grouped
from gmm.ragged.run import has_no_product, kernel_name, refusal
from gmm.triton import cache
from gmm.triton.call import describe
from gmm.triton.configs import choose
from gmm.triton.launch import shared_memory

_ORDER = ("cutlass", "triton", "cublas", "reference")  # of preference
_SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 120: 99, 121: 99}  # KiB that a program may have; else 227


def plan_grouped(
    a: Operand,
    b: Operand,
    offs: Operand | None,
    bias: Operand | None,
    out: Operand | None,
    *,
    trans_b: bool,
    accumulate: bool,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    sm_margin: int,
    epilogue: str | None,
    backend: str | None,
    sm: int | None,
    sm_count: int | None,
) -> Plan:
    """explain() for grouped_mm, whose out is d there."""
    device = a.device if isinstance(a, Tensor) else torch.device("meta")
    a = as_tensor(a, dtype, device)
    b = as_tensor(b, a.dtype, device)
    if offs is None and {a.dim(), b.dim()} == {2, 3}:
        offs = (a if a.dim() == 3 else b).shape[:1]
    offs = None if offs is None else as_tensor(offs, torch.int32, device)
    d_dtype = out.dtype if isinstance(out, Tensor) else out_dtype or a.dtype
    out = None if out is None else as_tensor(out, d_dtype, device)
    bias = None if bias is None else as_tensor(bias, d_dtype, device)
    shape, _ = check_grouped(a, b, offs, bias, out=out, out_dtype=d_dtype, trans_b=trans_b, sm_margin=sm_margin)
    b = b.mT if trans_b else b
    out = as_tensor(shape.out, d_dtype, device) if out is None else out
    tensors = _Tensors(a, b, offs, bias, out, shape)

    choice = parse(resolve(backend))
    if has_no_product(a, offs, bias, out):
        reasons = {name: "there is nothing to multiply" for name in _ORDER}
        return Plan("reference", "no products", None, int(out.numel() > 0 and not accumulate), 1, 0, 0, reasons)
    common: dict[str, Any] = {"accumulate": accumulate, "sm_margin": sm_margin, "sm": sm, "sm_count": sm_count}
    on_host = sm is None and cuda_ordinal(device) is None
    plans: dict[str, Plan | str] = {
        "cutlass": _no_device(device) if on_host else _plan_epilogue(tensors, epilogue, choice.kernel, common),
        "triton": _plan_triton(tensors, accumulate, sm),
        "cublas": _no_device(device) if on_host else _plan_cublas(tensors, dtype=a.dtype, **common),
        "reference": Plan("reference", "torch.mm", None, shape.groups, 1, 0, 0, {}),
    }
    return _choose(plans, choice, on_host)


class _Tensors(NamedTuple):
    """A checked call, in which b is not transposed; also as meta tensors."""

    a: Tensor
    b: Tensor
    offs: Tensor | None
    bias: Tensor | None
    out: Tensor
    shape: Shape


def _no_device(device: torch.device) -> str:
    if device.type == "meta":
        return "this machine has no CUDA device; sm= plans for another"
    return refusal("cutlass", device) or ""


def _plan_epilogue(call: _Tensors, epilogue: str | None, kernel: str, common: dict[str, Any]) -> Plan | str:
    """Of the product with the epilogue, or of the product alone, which then says why."""
    if epilogue is None:
        return _plan_cutlass(call, kernel=kernel, **common)
    check(call.shape.mode == "ragged_m", "epilogue: expected an a of 2 and a b of 3 dimensions, got another form")
    columns = call.shape.n // 2 if epilogue == "swiglu" else 2 * call.shape.n
    after = call._replace(out=as_tensor((call.shape.m, columns), call.out.dtype, call.out.device))
    fused: Plan | str = "a kernel was asked for by name"
    if not kernel:
        fused = _plan_cutlass(after, kernel="", epilogue=epilogue, **common)
    product = _plan_cutlass(call, kernel=kernel, **common)
    if isinstance(fused, Plan) or isinstance(product, str):
        return fused
    product.reasons["cutlass"] += f"; without the epilogue: {fused}"
    return product


def _plan_cutlass(
    call: _Tensors,
    *,
    kernel: str,
    accumulate: bool,
    sm_margin: int,
    sm: int | None,
    sm_count: int | None,
    epilogue: str = "",
) -> Plan | str:
    """The library's own plan, or why CUTLASS refuses."""
    a, b, offs, bias, out, shape = call
    if offs is not None and not offs.is_contiguous():
        return "it reads contiguous offs"
    result = core.plan_grouped(
        mode=shape.mode,
        groups=shape.groups,
        a=stored_batch(a),
        b=stored_batch(b),
        d=stored_batch(out),
        bias=None if bias is None else (address(bias), *bias.stride()),  # type: ignore[arg-type]
        ab_dtype=dtype_name(a.dtype),
        d_dtype=dtype_name(out.dtype),
        offs_int64=offs is not None and offs.dtype is torch.int64,
        accumulate=accumulate,
        sm_margin=sm_margin,
        device=cuda_ordinal(a.device) or 0,
        kernel=kernel,
        epilogue=epilogue,
        sm=sm,
        sm_count=sm_count or 0,
    )
    return result if isinstance(result, str) else Plan(**result)


def _plan_triton(call: _Tensors, accumulate: bool, sm: int | None) -> Plan | str:
    """Of this device, or of one whose compute capability is given."""
    a, b, offs, bias, out, _ = call
    if sm is not None and sm < 80:
        return f"its tensor core code needs sm80 or newer, the device is sm{sm}"
    device = torch.device("cuda", cuda_ordinal(a.device) or 0) if a.is_meta and torch.cuda.is_available() else a.device
    if sm is None:
        why = _no_device(device) if device.type == "meta" else gmm.triton.supports(device)
        if why is not None:
            return why
        limit = shared_memory(device)
    else:
        limit = 1024 * _SHARED_MEMORY.get(sm, 227)
    kind = describe(a, b, offs, out, bias, accumulate, allows_tf32()).kind
    found = cache.lookup(kind, limit) if sm is None and not a.is_meta else None
    config = found or choose(kind.precision, kind.rows, kind.n, limit)
    return Plan("triton", kernel_name(config), config[:3], 1, 1, 0, 0, {})


def _plan_cublas(
    call: _Tensors, *, dtype: torch.dtype, accumulate: bool, sm_margin: int, sm: int | None, sm_count: int | None
) -> Plan | str:
    """The plan of the list form for groups of equal sizes, as nothing is known of theirs."""
    shape = call.shape
    sizes = {"ragged_m": "m", "ragged_n": "n", "ragged_k": "k"}
    if shape.mode in sizes:
        shape = shape._replace(**{sizes[shape.mode]: -(-shape.total // max(shape.groups, 1))})  # type: ignore[arg-type]
    _, groups, m, n, k = shape
    try:
        return plan_list(
            *([(m, k)] * groups, [(k, n)] * groups, None, None if call.bias is None else [(n,)] * groups),
            trans_a=False,
            trans_b=False,
            accumulate=accumulate,
            dtype=dtype,
            out_dtype=call.out.dtype,
            sm_margin=sm_margin,
            backend="cublas",
            sm=sm,
            sm_count=sm_count,
        )
    except RuntimeError as error:
        return str(error).removeprefix("backend 'cublas' cannot take this call: ")


def _choose(plans: dict[str, Plan | str], choice: Choice, on_host: bool) -> Plan:
    """The first that takes the call, with the reasons of the others: strings among the plans."""
    last = "for CPU tensors, or when asked for"
    if choice.name != "auto" and isinstance(plans[choice.name], str) and not choice.fall_back:
        raise RuntimeError(f"backend '{choice.name}' cannot take this call: {plans[choice.name]}")
    asked = choice.name != "auto" and not isinstance(plans[choice.name], str)
    if asked:
        chosen = choice.name
    elif on_host:
        chosen = "reference"
    else:
        takers = [name for name in _ORDER[:3] if not isinstance(plans[name], str)]
        if not takers:
            raise RuntimeError("no backend takes this call. " + ". ".join(f"{x}: {plans[x]}" for x in _ORDER[:3]))
        chosen = takers[0]
    taken = plans[chosen]
    assert isinstance(taken, Plan)
    _, semicolon, why_that_kernel = taken.reasons.get(chosen, "").partition(";")  # as csrc/core/plan.cpp has it
    reasons = {}
    for name in _ORDER:
        plan = plans[name]
        if name == chosen:
            reasons[name] = "chosen: asked for" if asked else "chosen: first in order of preference that takes the call"
            reasons[name] += semicolon + why_that_kernel
        elif isinstance(plan, str):
            reasons[name] = plan
        elif name == "reference":
            reasons[name] = last
        else:
            reasons[name] = "not asked for" if asked or on_host else f"{chosen} takes the call and comes first"
    return Plan(**{**vars(taken), "reasons": reasons})
