"""The backend that runs everywhere: torch.mm for each group, accumulated in fp32 and rounded once. For CPU tensors, and
on any device when asked for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gmm._library import core
from gmm.backend import check_reference, text_of_error
from gmm.check import check_call


def _product(a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool, trans_b: bool) -> Tensor:
    """op(a) @ op(b) (+ bias) in fp32, whose products of 16-bit factors are exact."""
    with torch.autocast(a.device.type, enabled=False):  # would round the factors of mm again
        product = torch.mm((a.t() if trans_a else a).float(), (b.t() if trans_b else b).float())
    return product if bias is None else product + bias


@torch.no_grad()
def multi_tensor_gemm(
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
    """The op of that name. TF32 is torch's own setting here, and an SM margin has no meaning."""
    check_call(a, b, d, bias, trans_a=trans_a, trans_b=trans_b, sm_margin=sm_margin)
    check_reference(backend, a[0].device)
    for name, tensors in (("d", d), ("bias", bias or ())):
        for i, x in enumerate(tensors):
            if x.numel() > 0 and x.data_ptr() == 0:  # freed by untyped_storage().resize_(0); copy_ would crash
                raise RuntimeError(f"{name}[{i}]: expected memory for shape {list(x.shape)}, its storage is empty")
    for i, out in enumerate(d):
        product = _product(a[i], b[i], bias[i] if bias is not None else None, trans_a, trans_b)
        out.copy_(product + out if accumulate else product)
    core.set_last_backend("reference: torch.mm")


def multi_tensor_mm(
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
    """The op of that name; see multi_tensor_gemm."""
    d_dtype = check_call(a, b, None, bias, trans_a=trans_a, trans_b=trans_b, out_dtype=out_dtype, sm_margin=sm_margin)
    check_reference(backend, a[0].device)
    biases = bias if bias is not None else [None] * len(a)
    products = [_product(*group, trans_a, trans_b).to(d_dtype) for group in zip(a, b, biases, strict=True)]
    core.set_last_backend("reference: torch.mm")
    return products


torch.library.impl("gmm::multi_tensor_gemm", "cpu", multi_tensor_gemm)
torch.library.impl("gmm::multi_tensor_gemm_reference", "default", text_of_error(multi_tensor_gemm))
torch.library.impl("gmm::multi_tensor_mm", "cpu", multi_tensor_mm)
