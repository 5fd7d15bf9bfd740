"""gmm.explain: which backend and kernel a call takes, and why each other was refused. Also without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gmm.plan import Operand, Plan, plan_list
from gmm.ragged.explain import plan_grouped


def explain(
    a: Sequence[Operand] | Operand,
    b: Sequence[Operand] | Operand,
    d: Sequence[Operand] | Operand | None = None,
    bias: Sequence[Operand] | Operand | None = None,
    *,
    offs: Operand | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    accumulate: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    sm_margin: int = 0,
    epilogue: str | None = None,
    backend: str | None = None,
    sm: int | None = None,
    sm_count: int | None = None,
) -> Plan:
    """Which backend and kernel gmm.grouped_mm or gmm.multi_tensor_gemm takes for a call, and why, without running it.

    Lists are a call of multi_tensor_gemm; one tensor, or one shape, for a is a call of grouped_mm. No GPU is needed for

        gmm.explain([(512, 2048)] * 128, [(1536, 2048)] * 128, trans_b=True, sm=90)
        gmm.explain((65536, 2048), (128, 1536, 2048), trans_b=True, sm=90)

    Args:
        a: as in multi_tensor_gemm: a list of tensors, on any device, or of shapes of contiguous tensors (stored shapes:
            [K, M] with trans_a). Or one of them, as in grouped_mm.
        b: likewise.
        d: likewise; out of grouped_mm.
        bias: likewise.
        offs: as in grouped_mm, or its shape; where a or b has a group dimension it may be left out.
        trans_a: as in multi_tensor_gemm. Not with grouped_mm, which takes a transposed view.
        trans_b: as in either call.
        accumulate: as in either call; d may be left out.
        dtype: of a and b where they are shapes. d and bias are then of out_dtype.
        out_dtype: as in either call.
        sm_margin: as in either call.
        epilogue: "swiglu" or "swiglu_backward": the product is one of gmm.moe.feed_forward's, tokens (or their
            gradients) times gate_up or down. Where no kernel has both, the plan is the product's, and says why.
        backend: as in either call.
        sm: compute capability to plan for, major * 10 + minor: 90 for H100 and H200. None: the device of the tensors;
            for shapes and meta tensors the current CUDA device, or the CPU on a machine without.
        sm_count: its multiprocessors; None: typical for that architecture. Only with sm.

    Returns:
        The plan. Memory of shapes, and of tensors that are not on a CUDA device, counts as aligned up to the storage
        offset.

    Raises:
        RuntimeError: as the call would: shapes or dtypes contradict; the backend that was asked for cannot take it.
        ValueError: unknown backend or epilogue; sm or sm_count out of range, or sm_count without sm; offs or epilogue
            with lists; trans_a without.

    Does not synchronise.
    """
    if sm is None and sm_count is not None:
        raise ValueError(f"sm_count: expected None without sm, got {sm_count}")
    if sm is not None and not 10 <= sm < 10000:
        raise ValueError(f"sm: expected major * 10 + minor, for instance 90, got {sm}")
    if sm_count is not None and sm_count < 1:
        raise ValueError(f"sm_count: expected >= 1, got {sm_count}")
    options: dict[str, Any] = {
        "trans_b": trans_b,
        "accumulate": accumulate,
        "dtype": dtype,
        "out_dtype": out_dtype,
        "sm_margin": sm_margin,
        "backend": backend,
        "sm": sm,
        "sm_count": sm_count,
    }
    if epilogue not in (None, "swiglu", "swiglu_backward"):
        raise ValueError(f"epilogue: expected swiglu or swiglu_backward, got {epilogue!r}")
    if isinstance(a, Tensor) or (len(a) > 0 and isinstance(a[0], int)):
        if trans_a:
            raise ValueError("trans_a: expected False, as grouped_mm takes a transposed view for a")
        return plan_grouped(a, b, offs, bias, d, epilogue=epilogue, **options)  # type: ignore[arg-type]
    if epilogue is not None:
        raise ValueError(f"epilogue: expected None with lists, got {epilogue!r}")
    if offs is not None:
        raise ValueError("offs: expected None with lists, got one")
    return plan_list(a, b, d, bias, trans_a=trans_a, **options)  # type: ignore[arg-type]
