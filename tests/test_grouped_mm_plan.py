"""explain() for grouped_mm: the choice on every architecture, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grouped_cases import BF16, FP16, FP32, MODES, operands

import gmm

SHAPES: dict[str, Any] = {
    "ragged_m": {"a": (1024, 64), "b": (4, 64, 128)},
    "ragged_n": {"a": (4, 128, 64), "b": (64, 1024)},
    "ragged_k": {"a": (128, 1024), "b": (1024, 64), "offs": (4,)},
    "batched": {"a": (4, 128, 64), "b": (4, 64, 128)},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32))
@pytest.mark.parametrize("sm", (70, 75, 80, 86, 89, 90, 100, 120))
def test_backend(sm: int, dtype: torch.dtype, mode: str) -> None:
    if sm < 80 and dtype is BF16:
        with pytest.raises(RuntimeError, match=f"(?s)no backend.*bf16.*sm{sm}"):
            gmm.explain(**SHAPES[mode], sm=sm, dtype=dtype)
        return
    plan = gmm.explain(**SHAPES[mode], sm=sm, dtype=dtype)
    cutlass = sm == 90 and dtype is not FP32 and mode in ("ragged_m", "batched")
    assert plan.backend == ("cutlass" if cutlass else "triton" if sm >= 80 else "cublas")
    assert list(plan.reasons) == ["cutlass", "triton", "cublas", "reference"] and all(plan.reasons.values())
    assert plan.reasons[plan.backend].startswith("chosen: first")
    if plan.backend == "triton":
        assert plan.kernel.startswith("grouped_gemm_") and plan.launches == 1 and plan.tile is not None
    if sm != 90 and mode != "ragged_n":  # that is refused for its out
        assert f"sm{sm}" in plan.reasons["cutlass"]
    if sm < 80:
        assert f"sm{sm}" in plan.reasons["triton"]


def test_transposed_operands_of_wgrad() -> None:
    """a column-major: dy.t() @ x is CUTLASS's."""
    dy, x = torch.empty(1024, 128, dtype=BF16), torch.empty(1024, 64, dtype=BF16)
    assert gmm.explain(dy.t(), x, offs=(4,), sm=90).backend == "cutlass"


def test_column_major_out_of_ragged_n() -> None:
    """Planned as the transposed product."""
    a, b, offs = operands("ragged_n", [64, 128], 64, 0, 64, BF16, torch.device("cpu"))
    out = torch.empty(128, 64, dtype=BF16).t()
    assert gmm.explain(a, b.t().contiguous().t(), out, offs=offs, sm=90).backend == "cutlass"
    refused = gmm.explain(a, b, offs=offs, sm=90)
    assert refused.backend == "triton" and "column-major" in refused.reasons["cutlass"]


def test_what_is_refused() -> None:
    """By argument it raises with the reason; a misaligned or strided operand goes to Triton."""
    x, w, offs = operands("ragged_m", [64, 128], 0, 64, 64, BF16, torch.device("cpu"))
    for a, b in ((x.repeat(1, 2)[:, ::2], w), (x[:, 1:], w[:, 1:])):
        assert gmm.explain(a, b, offs=offs, sm=90).backend == "triton"
        with pytest.raises(RuntimeError, match="backend 'cutlass' cannot take this call: .{20}"):
            gmm.explain(a, b, offs=offs, sm=90, backend="cutlass")
    with pytest.raises(RuntimeError, match="backend 'triton' cannot take this call: .*sm75"):
        gmm.explain(x.half(), w.half(), offs=offs, sm=75, backend="triton")
    with pytest.raises(RuntimeError, match="backend 'triton' cannot take this call: .*lists"):
        gmm.explain([x], [w[0]], sm=90, backend="triton")


def test_without_a_device() -> None:
    x, w, offs = operands("ragged_m", [64, 128], 0, 64, 64, BF16, torch.device("cpu"))
    plan = gmm.explain(x, w, offs=offs)
    assert plan.backend == "reference" and "CUDA" in plan.reasons["cutlass"]
    assert gmm.explain(x, w, offs=offs, sm=90, backend="reference").reasons["reference"] == "chosen: asked for"


def test_bad_calls() -> None:
    for bad, text in (
        ({"a": (8, 16), "b": (16, 8)}, "offs: expected a tensor"),
        ({"a": (8, 16), "b": (2, 8, 8)}, "b: expected 16 rows"),
        ({"a": (8, 16), "b": (2, 16, 8), "bias": (2, 7)}, "bias: expected shape"),
        ({"a": (8, 16), "b": (2, 16, 8), "d": (8, 7)}, "out: expected shape"),
    ):
        with pytest.raises(RuntimeError, match=text):
            gmm.explain(**bad, sm=90)
    with pytest.raises(ValueError, match="trans_a"):
        gmm.explain((8, 16), (2, 16, 8), trans_a=True)
    with pytest.raises(ValueError, match="offs"):
        gmm.explain([(8, 16)], [(16, 8)], offs=(1,))
