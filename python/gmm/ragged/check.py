"""The checks of a grouped_mm call, before anything is written.

The CPU and fake kernels and explain() use them; the CUDA ops have the same in csrc/torch/grouped_check.h, with the same
texts.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from gmm.backend import text_of_error
from gmm.check import (
    DTYPES,
    check,
    check_d_dtype,
    check_dense,
    check_no_negative_bit,
    check_no_overlap,
    check_not_inference,
    check_own_memory,
    dtype_name,
)

CHECKS_OFFSETS = os.environ.get("GMM_CHECK_OFFSETS") == "1"


class Shape(NamedTuple):
    """Sizes of a checked call: groups, and M, N, K with the ragged one as the buffers have it."""

    mode: str  # "ragged_m", "ragged_n", "ragged_k" or "batched"
    groups: int
    m: int
    n: int
    k: int

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of out."""
        return (self.groups, self.m, self.n) if self.mode in ("ragged_k", "batched") else (self.m, self.n)

    @property
    def total(self) -> int:
        """The size of the ragged dimension."""
        return {"ragged_m": self.m, "ragged_n": self.n}.get(self.mode, self.k)


def check_grouped(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    trans_b: bool = False,
    sm_margin: int = 0,
) -> tuple[Shape, torch.dtype]:
    """Checks a call as in grouped_mm, and returns its sizes and the dtype of out. Works on symbolic sizes.

    Raises:
        RuntimeError: naming the argument, what was expected and what came.
    """
    for name, x in (("a", a), ("b", b)):
        check(x.dim() in (2, 3), "{}: expected 2 or 3 dimensions, got {}", name, x.dim())
    check(a.dtype in DTYPES, "a: expected bfloat16, float16 or float32, got {}", dtype_name(a.dtype))
    _check_device("a", a, a)
    _check_device("b", b, a)
    _check_dtype("b", b, a.dtype, "a")
    check(sm_margin >= 0, "sm_margin: expected >= 0, got {}", sm_margin)
    shape = _check_sizes(a, b, offs, trans_b)
    if out is not None:
        dtype = _check_out(a, b, out, shape)
    else:
        dtype = out_dtype or a.dtype
        check_d_dtype("out_dtype", dtype, a.dtype, "a")
    if bias is not None:
        _check_bias(a, bias, dtype, shape)
    return shape, dtype


def check_weight_grad_out(x: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """Whether the gradient of b, made of factors in dtype, can be added to x. Raises ValueError where b has none.

    What would be refused in backward is refused here, where it can be found."""
    if torch.is_grad_enabled() and not b.requires_grad:
        raise ValueError("weight_grad_out: expected a b that requires grad, as its gradient is what is added")
    check_dense("weight_grad_out", x)
    if x.shape != b.shape:  # dynamo cannot trace check() on symbolic sizes
        raise RuntimeError(f"weight_grad_out: expected shape {list(b.shape)}, got {list(x.shape)}")
    check_d_dtype("weight_grad_out", x.dtype, dtype, "b")
    expected = "weight_grad_out: expected a tensor on {} (where b is), got one on {}"
    check(x.device == b.device, expected, b.device, x.device)
    check(not x.requires_grad, "weight_grad_out: expected a tensor that does not require grad")
    if not torch.compiler.is_compiling():  # cannot be traced
        check_not_inference("weight_grad_out", x)
        check_no_negative_bit("weight_grad_out", x)
        check_no_overlap("weight_grad_out", x)


def check_offsets(offs: Tensor, total: int) -> None:
    """For GMM_CHECK_OFFSETS=1: synchronises, and raises a RuntimeError for ends that decrease or leave the buffer."""
    before = 0
    for i, end in enumerate(offs.tolist()):
        if not before <= end <= total:
            raise RuntimeError(f"offs[{i}]: expected an end from {before} (the one before) to {total}, got {end}")
        before = end


def _check_device(name: str, x: Tensor, a: Tensor) -> None:
    check(x.device == a.device, "{}: expected a tensor on {} (where a is), got one on {}", name, a.device, x.device)
    check_dense(name, x)


def _check_dtype(name: str, x: Tensor, dtype: torch.dtype, like: str) -> None:
    if x.dtype != dtype:
        expected, got = dtype_name(dtype), dtype_name(x.dtype)
        raise RuntimeError(f"{name}: expected {expected} (the dtype of {like}), got {got}")


def _check_offs(a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    if a.dim() == 3 and b.dim() == 3:
        check(offs is None, "offs: expected None, as a and b both have 3 dimensions, got a tensor")
        return
    if offs is None:
        raise RuntimeError(f"offs: expected a tensor, as a has {a.dim()} and b has {b.dim()} dimensions, got None")
    check(offs.dim() == 1, "offs: expected 1 dimension, got {}", offs.dim())
    check(offs.dtype in (torch.int32, torch.int64), "offs: expected int32 or int64, got {}", dtype_name(offs.dtype))
    _check_device("offs", offs, a)


def _check_sizes(a: Tensor, b: Tensor, offs: Tensor | None, trans_b: bool) -> Shape:
    _check_offs(a, b, offs)
    m, k = a.shape[-2:]
    b_k, n = (b.shape[-1], b.shape[-2]) if trans_b else (b.shape[-2], b.shape[-1])
    axis = "columns" if trans_b else "rows"
    check(k == b_k, "b: expected {} {} (a has {} columns), got {}", k, axis, k, b_k)
    if offs is None:
        check(a.shape[0] == b.shape[0], "b: expected {} groups (those of a), got {}", a.shape[0], b.shape[0])
        return Shape("batched", a.shape[0], m, n, k)
    groups = offs.shape[0]
    if a.dim() == b.dim():
        return Shape("ragged_k", groups, m, n, k)
    mode, name, x = ("ragged_m", "b", b) if a.dim() < b.dim() else ("ragged_n", "a", a)
    expected = "offs: expected length {} (the groups of {}), got {}"
    check(groups == x.shape[0], expected, x.shape[0], name, groups)
    return Shape(mode, groups, m, n, k)


def _check_bias(a: Tensor, bias: Tensor, dtype: torch.dtype, shape: Shape) -> None:
    if shape.mode in ("ragged_n", "ragged_k"):
        raise RuntimeError(
            "bias: expected None, as it takes a b of 3 dimensions, one for each group's rows; got a tensor"
        )
    expected = (shape.groups, shape.n)
    matches = len(bias.shape) == 2 and bias.shape[0] == expected[0] and bias.shape[1] == expected[1]
    check(matches, "bias: expected shape {}, got {}", list(expected), list(bias.shape))
    _check_device("bias", bias, a)
    _check_dtype("bias", bias, dtype, "out")


def _check_out(a: Tensor, b: Tensor, out: Tensor, shape: Shape) -> torch.dtype:
    check_d_dtype("out", out.dtype, a.dtype, "a")
    _check_device("out", out, a)
    expected = shape.out
    check(out.dim() == len(expected), "out: expected shape {}, got {}", list(expected), list(out.shape))
    for size, want in zip(out.shape, expected, strict=True):
        check(size == want, "out: expected shape {}, got {}", list(expected), list(out.shape))
    check_no_overlap("out", out)
    check_own_memory({"out": out}, {"a": a, "b": b})
    return out.dtype


torch.library.impl("gmm::check_offsets", "default", text_of_error(check_offsets))
