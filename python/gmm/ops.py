"""gmm.multi_tensor_gemm, and the fake kernels of its ops."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import gmm.dense
import gmm.reference  # noqa: F401  registers the CPU kernels
from gmm.autograd import note_write
from gmm.backend import parse, resolve
from gmm.check import check_call, check_dense, check_lengths, check_not_inference

_gemm = torch.ops.gmm.multi_tensor_gemm.default
_mm = torch.ops.gmm.multi_tensor_mm.default
_version = operator.attrgetter("_version")


def multi_tensor_gemm(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    d: Sequence[Tensor] | None = None,
    bias: Sequence[Tensor] | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
    sm_margin: int = 0,
    backend: str | None = None,
) -> list[Tensor]:
    """d[i] = op(a[i]) @ op(b[i]) (+ bias[i]) (+ d[i] if accumulate), for every group i in one call.

    The products of an MoE layer with E experts, x of [tokens, K], w of [N, K], dy of [tokens, N] for each expert:

        forward   y  = multi_tensor_gemm(x, w, trans_b=True)
        dgrad     dx = multi_tensor_gemm(dy, w)
        wgrad     multi_tensor_gemm(dy, x, main_grad, trans_a=True, accumulate=True)

    Args:
        a: [M, K] each, or [K, M] with trans_a. bfloat16, float16 or float32, one dtype for a and b. Any strides.
            M, N and K may differ between groups, and may be 0.
        b: [K, N] each, or [N, K] with trans_b.
        d: [M, N] each, written and returned; in the dtype of a, or float32. Must not overlap one another, a or b:
            where two begin at the same element, that is an error.
            None: new tensors are returned, through which autograd works.
        bias: [N] each, in the dtype of d; added to every row.
        trans_a: each a is stored [K, M].
        trans_b: each b is stored [N, K], as torch.nn.Linear keeps its weight.
        accumulate: add to d instead of overwriting it. Without, what d held is never read.
        out_dtype: of the new tensors when d is None; the dtype of a by default. Their gradients are rounded to the
            dtype of a before they are multiplied.
        sm_margin: SMs to leave to other kernels, such as communication; on backends that can.
        backend: "auto", "cutlass", "cublas" or "reference". A named one must take the call. None: what
            gmm.use_backend set, then the environment variable GMM_BACKEND, then "auto". See gmm.explain.

    Returns:
        d, or the new tensors. An empty list for empty lists.

    Raises:
        RuntimeError: shapes, dtypes or devices contradict (with argument, group, expected, got); a backend asked for
            cannot take the call (with the reason); d is given and an argument requires grad while grad mode is on.
            Nothing has been written then.
        ValueError: unknown backend; accumulate without d; out_dtype with d.

    fp32 products use TF32 only where torch.backends.cuda.matmul allows it; autocast changes no dtype here. Derivatives
    are those of backward, of any order; there is no forward mode, vmap or torch.func.grad. Never synchronises with the
    device; may be captured in a CUDA graph and compiled with fullgraph=True.
    """
    if d is None and accumulate:
        raise ValueError("accumulate: expected d to add to, got None")
    if d is not None and out_dtype is not None:
        raise ValueError(f"out_dtype: expected None, as d has its own dtype, got {out_dtype}")
    name = resolve(backend)
    if len(a) == 0:  # an op could not tell which device's kernel to take
        check_lengths(a, b, d, bias)
        return []
    allow_tf32 = a[0].dtype is torch.float32 and allows_tf32()
    if bias is not None and not torch.compiler.is_compiling():
        bias = _readable(bias)
    options = differing(
        out_dtype,
        trans_a=trans_a,
        trans_b=trans_b,
        accumulate=accumulate,
        allow_tf32=allow_tf32,
        sm_margin=sm_margin,
        backend=name,
    )
    if d is None:
        return _mm(a, b, bias, **options)
    if torch.is_grad_enabled():
        _check_no_grad(a, b, d, () if bias is None else bias)
    if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
        _check_none_is_inference(d)
    _gemm(a, b, d, bias, **options)
    note_write(d)
    return list(d)


def differing(
    out_dtype: torch.dtype | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    allow_tf32: bool = False,
    sm_margin: int = 0,
    backend: str = "auto",
) -> dict[str, Any]:
    """Those that differ from the ops' defaults: to parse each takes libtorch half a microsecond."""
    options: dict[str, Any] = {}
    if out_dtype is not None:
        options["out_dtype"] = out_dtype
    if trans_a:
        options["trans_a"] = True
    if trans_b:
        options["trans_b"] = True
    if accumulate:
        options["accumulate"] = True
    if allow_tf32:
        options["allow_tf32"] = True
    if sm_margin:
        options["sm_margin"] = sm_margin
    if backend != "auto":
        options["backend"] = backend
    return options


@torch.compiler.assume_constant_result  # not traceable; compiled code is guarded by this setting anyway
def allows_tf32() -> bool:
    """Whether torch lets CUDA fp32 matrix products use TF32. allow_tf32 would raise after the newer setter."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _readable(bias: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of dense tensors without the negative bit. For a, b and d the dispatcher sees to that (gmm/dense.py), but it does
    not look into optional lists."""
    for i, x in enumerate(bias):
        if x.is_nested or x.layout is not torch.strided:
            check_dense(f"bias[{i}]", x)
    return [x.resolve_neg() for x in bias] if any(map(Tensor.is_neg, bias)) else bias


def _check_none_is_inference(d: Sequence[Tensor]) -> None:
    """By their versions, which inference tensors have none of: Tensor.is_inference takes half as long again."""
    try:
        for _ in map(_version, d):
            pass
    except RuntimeError:
        for i, x in enumerate(d):
            check_not_inference(f"d[{i}]", x)


def _check_no_grad(*lists: Sequence[Tensor]) -> None:
    for name, tensors in zip(("a", "b", "d", "bias"), lists, strict=True):
        for x in tensors:
            if x.requires_grad:
                i = [y.requires_grad for y in tensors].index(True)
                raise RuntimeError(
                    f"{name}[{i}]: expected a tensor that does not require grad, as what is written into d is not "
                    "differentiable; leave d out, or call under torch.no_grad()"
                )


@torch.library.register_fake("gmm::multi_tensor_gemm")
def _multi_tensor_gemm_fake(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    d: Sequence[Tensor],
    bias: Sequence[Tensor] | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    allow_tf32: bool = False,
    sm_margin: int = 0,
    backend: str = "auto",
) -> None:
    check_call(a, b, d, bias, trans_a=trans_a, trans_b=trans_b, sm_margin=sm_margin)
    parse(backend)


@torch.library.register_fake("gmm::multi_tensor_mm")
def _multi_tensor_mm_fake(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    bias: Sequence[Tensor] | None = None,
    *,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    allow_tf32: bool = False,
    sm_margin: int = 0,
    backend: str = "auto",
) -> list[Tensor]:
    dtype = check_call(a, b, None, bias, trans_a=trans_a, trans_b=trans_b, out_dtype=out_dtype, sm_margin=sm_margin)
    parse(backend)
    shapes = [(x.shape[trans_a], y.shape[not trans_b]) for x, y in zip(a, b, strict=True)]
    return [a[0].new_empty(shape, dtype=dtype) for shape in shapes]
