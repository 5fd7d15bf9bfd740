"""Runs what CUTLASS does not take: Triton, then cuBLAS; on a CPU the reference. The kernels of the ops for CPU tensors.

csrc/torch/grouped_mm.cpp comes first for CUDA tensors, and calls gmm::grouped_mm_python for the rest.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

import gmm.triton
from gmm._library import core
from gmm.backend import parse, refuse, text_of_error
from gmm.ragged.check import CHECKS_OFFSETS, Shape, check_grouped, check_offsets
from gmm.triton.call import bucket_of
from gmm.triton.configs import Config
from gmm.triton.launch import Plan, direct_plans, keep, run_plan
from gmm.triton.launch import run as run_triton


class Options(NamedTuple):
    """What the ops take beside tensors."""

    accumulate: bool
    allow_tf32: bool
    sm_margin: int
    backend: str


def run(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, out: Tensor, options: Options) -> Plan | None:
    """Runs a checked call, in which b is not transposed, on the backend asked for or the first that takes it. Returns
    Triton's plan where it ran."""
    choice = parse(options.backend)
    name = first_backend(a.device) if choice.name == "auto" else choice.name
    why_not = refusal(name, a.device)
    if why_not is not None:
        refuse(choice, why_not)
        _mm_out(a, b, offs, bias, out, **options._replace(backend="auto")._asdict())
    elif has_no_product(a, offs, bias, out):
        if not options.accumulate:
            out.zero_()
        core.set_last_backend("reference: no products")
    elif name == "triton":
        for text, x in (("a", a), ("b", b), ("offs", offs)):
            if x is not None and x.numel() and x.data_ptr() == 0:  # freed by untyped_storage().resize_(0)
                raise RuntimeError(f"{text}: expected memory for shape {list(x.shape)}, its storage is empty")
        plan = run_triton(a, b, offs, out, bias, options.accumulate, options.allow_tf32)
        core.set_last_backend(f"triton: {kernel_name(plan.config)}")
        return plan
    else:
        _run_list(name, a, b, offs, bias, out, options)
    return None


def run_directly(
    a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype | None, trans_b: bool, allow_tf32: bool, backend: str
) -> Tensor:
    """grouped_mm on Triton, ragged in M, or in K without trans_b; without the way through the dispatcher to C++ and
    back, which takes longer than all else. Calls that differ in the number of tokens alone are checked once. backend:
    "triton", or "triton,auto"."""
    b_shape, groups = b.shape, offs.shape
    in_m = len(b_shape) == 3
    tokens, rest = a.shape if in_m else reversed(a.shape)
    a_at, b_at = a.data_ptr(), b.data_ptr()
    key = (
        (rest, b_shape if in_m else (b_shape[1], b_shape[0] == tokens), a.stride(), b.stride(), groups, trans_b),
        (a.dtype, b.dtype, offs.dtype, out_dtype, allow_tf32, a.device, b.device, offs.device, offs.is_contiguous()),
        (tokens > 1, bucket_of(tokens, groups[0] if groups else 0), a_at % 16, b_at % 16),
    )
    found = direct_plans.get(key) if a_at and b_at and offs.data_ptr() else None
    if found is None:
        shape, dtype = check_grouped(a, b, offs, out_dtype=out_dtype, trans_b=trans_b)
        out = a.new_empty(shape.out, dtype=dtype)
        plan = run(a, b.mT if trans_b else b, offs, None, out, Options(False, allow_tf32, 0, backend))
        if plan is not None and offs.is_contiguous():
            keep(direct_plans, key, (plan, core.last_backend()))
        return out
    plan, name = found
    kind = plan.kind
    sizes = (tokens, kind.n) if in_m else (groups[0], rest, kind.n)
    out = a.new_empty(*sizes, dtype=kind.out_dtype)
    run_plan(plan, tokens, a, b, offs, out, None)
    core.set_last_backend(name)
    return out


def has_no_product(a: Tensor, offs: Tensor | None, bias: Tensor | None, out: Tensor) -> bool:
    """Whether out is empty, or all of it in no group, or a sum of nothing: no backend is needed for that."""
    groups = (a if offs is None else offs).shape[0]
    return out.numel() == 0 or groups == 0 or (a.shape[-1] == 0 and bias is None)


def first_backend(device: torch.device) -> str:
    """What calls take that CUTLASS does not."""
    if device.type == "cpu":
        return "reference"
    return "triton" if gmm.triton.supports(device) is None else "cublas"


def refusal(name: str, device: torch.device) -> str | None:
    """Why that backend does not take tensors on the device; None where it does."""
    if name == "triton":
        return gmm.triton.supports(device)
    if name == "reference" or device.type == "cuda":
        return None
    return f"it needs CUDA tensors, a is on {device}"


@functools.cache
def kernel_name(config: Config) -> str:
    """Of the Triton kernel with that tile, for last_backend() and explain()."""
    return f"grouped_gemm_{config.block_m}x{config.block_n}x{config.block_k}"


_mm_out = torch.ops.gmm.grouped_mm_out.default


@torch.no_grad()
def _run_list(
    backend: str, a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None, out: Tensor, options: Options
) -> None:
    """The list form, on slices. Copies offs to the host, which synchronises with a GPU."""
    total = {(2, 3): a.shape[0], (3, 2): b.shape[-1], (2, 2): a.shape[-1]}.get((a.dim(), b.dim()), 0)
    ends = [0] * a.shape[0] if offs is None else clamped(offs.tolist(), total)
    lists: tuple[list[Tensor], ...] = ([], [], [], [])
    for g, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if offs is None:
            slices = a[g], b[g], out[g]
        elif a.dim() == b.dim():
            slices = a[:, start:end], b[start:end], out[g]
        elif a.dim() < b.dim():
            slices = a[start:end], b[g], out[start:end]
        else:
            slices = a[g], b[:, start:end], out[:, start:end]
        for slices_so_far, x in zip(lists, (*slices, *(() if bias is None else (bias[g],)))):
            slices_so_far.append(x)
    if offs is not None and a.dim() != b.dim() and not options.accumulate:
        (out[ends[-1] :] if a.dim() < b.dim() else out[:, ends[-1] :]).zero_()
    a_list, b_list, d_list, bias_list = lists
    more = options._replace(backend=backend)._asdict()
    torch.ops.gmm.multi_tensor_gemm.default(a_list, b_list, d_list, bias_list or None, **more)


def clamped(ends: list[int], total: int) -> list[int]:
    """As gmm.h has it: each end within 0..total, and at least the one before."""
    return list(itertools.accumulate((min(max(end, 0), total) for end in ends), max))


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    trans_b: bool = False,
    allow_tf32: bool = False,
    sm_margin: int = 0,
    backend: str = "auto",
) -> Tensor:
    shape, dtype = check_grouped(a, b, offs, bias, out_dtype=out_dtype, trans_b=trans_b, sm_margin=sm_margin)
    out = a.new_empty(shape.out, dtype=dtype)
    _run_checked(a, b, offs, bias, out, trans_b, shape, Options(False, allow_tf32, sm_margin, backend))
    return out


def _grouped_mm_out(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    *,
    trans_b: bool = False,
    accumulate: bool = False,
    allow_tf32: bool = False,
    sm_margin: int = 0,
    backend: str = "auto",
) -> None:
    shape, _ = check_grouped(a, b, offs, bias, out=out, trans_b=trans_b, sm_margin=sm_margin)
    if out.numel() > 0 and out.data_ptr() == 0:  # freed by untyped_storage().resize_(0); writing would crash
        raise RuntimeError(f"out: expected memory for shape {list(out.shape)}, its storage is empty")
    _run_checked(a, b, offs, bias, out, trans_b, shape, Options(accumulate, allow_tf32, sm_margin, backend))


def _run_checked(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    trans_b: bool,
    shape: Shape,
    options: Options,
) -> None:
    if CHECKS_OFFSETS and offs is not None:
        check_offsets(offs, shape.total)
    run(a, b.mT if trans_b else b, offs, bias, out, options)


def _grouped_mm_python(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    *,
    trans_b: bool = False,
    accumulate: bool = False,
    allow_tf32: bool = False,
    sm_margin: int = 0,
    backend: str = "auto",
) -> None:
    """For calls that csrc/torch/grouped_mm.cpp has checked."""
    run(a, b.mT if trans_b else b, offs, bias, out, Options(accumulate, allow_tf32, sm_margin, backend))


for _device in ("cpu", "xpu"):  # Triton has a backend for XPU
    torch.library.impl("gmm::grouped_mm", _device, _grouped_mm)
    torch.library.impl("gmm::grouped_mm_out", _device, _grouped_mm_out)
torch.library.impl("gmm::grouped_mm_python", "default", text_of_error(_grouped_mm_python))
