"""A call as the kernel sees it: its kind, which decides the tile and what is compiled, and its integer arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gmm.triton.configs import bucket


class Access(NamedTuple):
    """How a matrix can be read or written."""

    unit: int  # the axis of stride 1; -1: none
    vector: int  # elements along it at a time: 16 bytes of them, or 1


class Kind(NamedTuple):
    """What decides the tile and what is compiled. Of the tokens only the bucket of their average number a group counts.

    A call that is ragged in N is meant transposed here, and below: out^T = b^T @ a^T is ragged in M.
    """

    device: torch.device
    mode: str  # "ragged_m", "ragged_n", "ragged_k" or "batched"
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    offs_dtype: torch.dtype | None
    accumulate: bool
    tf32: bool
    a: Access
    b: Access
    out: Access
    rows: int  # a group; a bucket
    n: int
    k: int  # ragged: a bucket

    @property
    def precision(self) -> str:
        """The name of the dtype for configs.py: "tf32" where tensor cores may round fp32 operands to that."""
        return "tf32" if self.tf32 else str(self.dtype).removeprefix("torch.")


class Call(NamedTuple):
    """A call's kind, and the integers that it gives to kernels.grouped_gemm, from `groups` on."""

    kind: Kind
    integers: tuple[int, ...]


def signature(
    a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor, bias: Tensor | None, accumulate: bool, allow_tf32: bool
) -> tuple[tuple[Any, ...], int]:
    """A key of all that describe() makes something of, but for the number of tokens; and that number.

    Tokens are what the groups share, or the rows of each (batched). To describe(), which takes three times as long,
    calls of equal keys differ at most in the integer TOKENS[mode].
    """
    fixed: tuple[Any, ...]
    a_shape, b_shape, groups = a.shape, b.shape, 0 if offs is None else offs.shape[0]
    if offs is None:
        tokens, fixed = a_shape[1], (a_shape, b_shape[2])
    elif len(a_shape) < len(b_shape):
        tokens, fixed = a_shape[0], b_shape
    elif len(a_shape) > len(b_shape):
        tokens, fixed = b_shape[1], a_shape
    else:
        tokens, fixed = a_shape[1], (a_shape[0], b_shape[1])
    key = (
        *(a.stride(), b.stride(), out.stride(), fixed, groups, tokens > 1, bucket_of(tokens, groups)),
        *(a.data_ptr() % 16, b.data_ptr() % 16, out.data_ptr() % 16),
        *(a.dtype, out.dtype, offs is None or offs.dtype, a.device, accumulate, allow_tf32),
        bias is None or (bias.stride(), bias.dtype),
    )
    return key, tokens


TOKENS = {"ragged_m": 1, "ragged_n": 1, "ragged_k": 3, "batched": 1}  # where they are among the integers: m, or k


def describe(
    a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor, bias: Tensor | None, accumulate: bool, allow_tf32: bool
) -> Call:
    """The call grouped_mm(a, b, offs, out, ...)."""
    m, k = a.shape[-2:]
    n = b.shape[-1]
    *a_batch, a_m, a_k = a.stride()
    *b_batch, b_k, b_n = b.stride()
    *out_batch, out_m, out_n = out.stride()
    a_g, b_g, out_g = sum(a_batch), sum(b_batch), sum(out_batch)  # 0 without a batch dimension
    bias_g, bias_x = (0, 0) if bias is None else bias.stride()
    groups = a.shape[0] if offs is None else offs.shape[0]
    ragged = "" if offs is None else "m" if a.dim() < b.dim() else "n" if a.dim() > b.dim() else "k"
    if ragged == "n":
        a, b, m, n, out_m, out_n = b, a, n, m, out_n, out_m
        a_g, a_m, a_k, b_g, b_k, b_n = b_g, b_n, b_k, a_g, a_k, a_m
    rows = _average(m, groups) if ragged in ("m", "n") else m
    ragged_axes = {"": (-1, -1, -1), "k": (1, 0, -1)}.get(ragged, (0, -1, 0))  # of a, b and out
    kind = Kind(
        device=a.device,
        mode=f"ragged_{ragged}" if ragged else "batched",
        dtype=a.dtype,
        out_dtype=out.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        offs_dtype=None if offs is None else offs.dtype,
        accumulate=accumulate,
        tf32=allow_tf32 and a.dtype is torch.float32 and torch.version.hip is None,
        a=_access(a, (m, k), (a_m, a_k), a_g, ragged_axes[0]),
        b=_access(b, (k, n), (b_k, b_n), b_g, ragged_axes[1]),
        out=_access(out, (m, n), (out_m, out_n), out_g, ragged_axes[2]),
        rows=bucket(rows),
        n=n,
        k=bucket(_average(k, groups)) if ragged == "k" else k,
    )
    return Call(kind, (groups, m, n, k, a_g, a_m, a_k, b_g, b_k, b_n, out_g, out_m, out_n, bias_g, bias_x))


def bucket_of(tokens: int, groups: int) -> int:
    """Of the average number of tokens a group."""
    return bucket(_average(tokens, groups))


def _average(tokens: int, groups: int) -> int:
    return -(-tokens // max(groups, 1))


def _access(x: Tensor, size: tuple[int, int], stride: tuple[int, int], batch_stride: int, ragged_axis: int) -> Access:
    """16 bytes at a time where each lies on a multiple of 16 bytes, and as a whole inside or outside of its group."""
    for unit in (1, 0):
        if stride[unit] == 1:
            vector = 16 // x.element_size()
            other_stride = stride[1 - unit] if size[1 - unit] > 1 else 0
            aligned = (size[unit] | other_stride | batch_stride) % vector == 0 and x.data_ptr() % 16 == 0
            return Access(unit, vector if aligned and unit != ragged_axis else 1)
    return Access(-1, 1)
