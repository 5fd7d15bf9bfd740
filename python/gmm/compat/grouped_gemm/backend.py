"""grouped_gemm.backend: the products themselves, without autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from gmm.grouped_mm import grouped_mm


@torch.no_grad()
def gmm(
    a: Tensor,
    b: Tensor,
    batch_sizes: Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    c: Tensor | None = None,
) -> Tensor:
    """a[g] @ b[g] of each group g, which owns the next batch_sizes[g] rows of a. Not differentiable.

    Args:
        a: [tokens, K].
        b: [E, K, N]; [E, N, K] with trans_b; [tokens, N] with trans_a, which gives the weights' gradient.
        batch_sizes: [E], integers, on the CPU or on a's device.
        trans_a: contracts over the rows of a group.
        trans_b: each b[g] is stored [N, K].
        c: written and returned: [tokens, N], or [E, K, N] with trans_a. None: a new tensor.

    Raises:
        ValueError: trans_a with trans_b.
        RuntimeError: as ends() and gmm.grouped_mm.

    Never synchronises with the device.
    """
    if trans_a and trans_b:
        raise ValueError("trans_b: expected False with trans_a, got True")
    return grouped_mm(a.t() if trans_a else a, b, ends(batch_sizes, a), trans_b=trans_b, out=c)


def ends(batch_sizes: Tensor, a: Tensor) -> Tensor:
    """Where each group ends, on a's device. Sizes on the host are checked, and sent without waiting for the device.

    Raises:
        RuntimeError: batch_sizes is not 1-D of integers; on the host, it has a negative size or another sum than a has
            rows.
    """
    if batch_sizes.dim() != 1 or batch_sizes.is_floating_point():
        expected, got = "1 dimension of integers", f"{list(batch_sizes.shape)} of {batch_sizes.dtype}"
        raise RuntimeError(f"batch_sizes: expected {expected}, got {got}")
    if batch_sizes.device.type == "cpu" and not torch.compiler.is_compiling():
        sizes = batch_sizes.tolist()
        for g, size in enumerate(sizes):
            if size < 0:
                raise RuntimeError(f"batch_sizes[{g}]: expected >= 0, got {size}")
        if sum(sizes) != a.shape[0]:
            raise RuntimeError(f"batch_sizes: expected a sum of {a.shape[0]}, the rows of a, got {sum(sizes)}")
    return batch_sizes.cumsum(0).to(a.device, non_blocking=True)
