"""gmm.grouped_mm, and the fake kernels of its ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import gmm.ragged.run  # noqa: F401  registers the CPU kernels
from gmm.autograd import note_write
from gmm.backend import parse, resolve
from gmm.check import check_not_inference
from gmm.ops import allows_tf32, differing
from gmm.ragged.autograd import apply, call
from gmm.ragged.check import check_grouped

_mm_out = torch.ops.gmm.grouped_mm_out.default


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    trans_b: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    sm_margin: int = 0,
    weight_grad_out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """out[g] = a[g] @ b[g] (+ bias[g]) (+ out[g] if accumulate), for groups that are slices of one buffer.

    The drop-in for torch.nn.functional.grouped_mm. The dimensions of a and b tell what the groups are:

        a           b           out         group g
        [M, K]      [G, K, N]   [M, N]      owns the rows offs[g-1]:offs[g]           (forward, dgrad)
        [G, M, K]   [K, N]      [M, N]      owns the columns offs[g-1]:offs[g]
        [M, K]      [K, N]      [G, M, N]   contracts over offs[g-1]:offs[g]          (wgrad)
        [G, M, K]   [G, K, N]   [G, M, N]   is one of a batch; no offs

    Args:
        a: bfloat16, float16 or float32, one dtype for a and b. Any strides and alignment.
        b: as in the table; with trans_b, its last two dimensions are stored the other way round: [.., N, K].
        offs: [G] ends of the groups, int32 or int64, on the device of a, ascending, the last one at most the size of
            the buffer. Equal neighbours make an empty group. What comes at and after the last end is in no group: zeros
            in out and in the gradient of a.
        bias: [G, N], in the dtype of out; added to each row of a group. Only for the first and the last line of the
            table, where b has 3 dimensions.
        out_dtype: of the new tensor; the dtype of a by default, or float32. Its gradient is rounded to the dtype of a
            before it is multiplied.
        trans_b: b is [G, N, K] (or [N, K]), as torch.nn.Linear keeps its weight.
        out: written and returned; in the dtype of a, or float32. Must not overlap a, b or bias: where it
            begins at the first element of a or b, that is an error. Not differentiable.
            None: a new tensor is returned, through which autograd works.
        accumulate: add to out instead of overwriting it; out of no group is left alone. Without, what out held is
            never read.
        sm_margin: SMs to leave to other kernels, such as communication; on backends that can.
        weight_grad_out: a tensor of b's shape, in float32 or the dtype of b (Megatron's main_grad): backward adds the
            gradient of b to it, without a temporary, and gives b itself none (so that no hook of b sees one). b must
            require grad, but where grad mode is off: then there is no backward, and it is left alone.
        backend: "auto", "cutlass", "triton", "cublas" or "reference". A named one must take the call. None: what
            gmm.use_backend set, then the environment variable GMM_BACKEND, then "auto". See gmm.explain.

    Returns:
        out, or the new tensor, contiguous.

    Raises:
        RuntimeError: shapes, dtypes or devices contradict (with argument, expected, got); a backend asked for cannot
            take the call (with the reason); out is given and an argument requires grad while grad mode is on. Nothing
            has been written then.
        ValueError: unknown backend; accumulate without out; out_dtype or weight_grad_out with out; weight_grad_out for
            a b that does not require grad, while grad mode is on.

    The host does not read offs. Ends that decrease or leave the buffer never cause an access out of bounds: the CPU and
    CUTLASS clamp each to the buffer and to the greatest before it; with Triton, what out then holds is undefined. With
    GMM_CHECK_OFFSETS=1 in the environment they raise, at the price of a synchronisation a call.

    Under torch.autocast a and b are cast to its dtype and bias to that of the result, as by torch.mm; with out nothing
    is. float32 products use TF32 only where torch.backends.cuda.matmul allows it. The gradient of b has b's layout: for
    a transposed view of contiguous weights it is such a view. Derivatives are those of backward, of any order, also by
    torch.func (with weight_grad_out of the first, and by backward alone); there is no forward mode. torch.vmap calls
    the op for each element.

    Never synchronises with the device, but on the cublas backend, which copies offs to the host: the choice only below
    sm80, or when asked for. May be compiled with fullgraph=True, and captured in a CUDA graph, whose replays read what
    offs then holds.
    """
    name = resolve(backend)
    allow_tf32 = a.dtype is torch.float32 and allows_tf32()
    if accumulate and out is None:
        raise ValueError("accumulate: expected out to add to, got None")
    if out_dtype is not None and out is not None:
        raise ValueError(f"out_dtype: expected None, as out has its own dtype, got {out_dtype}")
    options = differing(
        out_dtype, trans_b=trans_b, accumulate=accumulate, allow_tf32=allow_tf32, sm_margin=sm_margin, backend=name
    )
    if out is not None:
        return _write(a, b, offs, bias, out, weight_grad_out, options)
    if weight_grad_out is not None:
        return apply(a, b, offs, bias, weight_grad_out, options)
    return call(a, b, offs, bias, options)


def _write(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    weight_grad_out: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Into the caller's tensor."""
    if weight_grad_out is not None:
        raise ValueError("weight_grad_out: expected None, as what is written into out is not differentiable")
    if torch.is_grad_enabled():
        for name, x in (("a", a), ("b", b), ("bias", bias), ("out", out)):
            if x is not None and x.requires_grad:
                raise RuntimeError(
                    f"{name}: expected a tensor that does not require grad, as what is written into out is not "
                    "differentiable; leave out out, or call under torch.no_grad()"
                )
    check_not_inference("out", out)
    _mm_out(a, b, offs, bias, out, **options)
    note_write(out)
    return out


@torch.library.register_fake("gmm::grouped_mm")
def _grouped_mm_fake(
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
    parse(backend)
    return a.new_empty(shape.out, dtype=dtype)


@torch.library.register_fake("gmm::grouped_mm_out")
def _grouped_mm_out_fake(
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
    check_grouped(a, b, offs, bias, out=out, trans_b=trans_b, sm_margin=sm_margin)
    parse(backend)
