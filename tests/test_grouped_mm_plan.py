"""explain() for grouped_mm: the choice on every architecture, without a GPU."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from grouped_cases import BF16, FP16, FP32, MODES, operands
from torch import Tensor

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


def test_in_tritons_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is what runs there."""
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x, w, offs = operands("ragged_m", [6, 20], 0, 16, 24, FP32, torch.device("cpu"))
    plan = gmm.explain(x, w, offs=offs, backend="triton")
    gmm.grouped_mm(x, w, offs, backend="triton")
    assert gmm.last_backend() == f"triton: {plan.kernel}" and plan.tile is not None and plan.launches == 1
    assert gmm.explain(x, w, offs=offs).backend == "reference"


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


# What CUTLASS's ragged kernels take on sm90: forward and dgrad of 1024 tokens, and the weight gradient.


def empty(*shape: int, dtype: torch.dtype = BF16, skip: int = 0) -> Tensor:
    """Contiguous, `skip` elements after an aligned address."""
    return torch.empty(skip + math.prod(shape), dtype=dtype)[skip:].view(shape)


def apart(*shape: int, elements: int) -> Tensor:
    """Contiguous matrices so many elements apart."""
    return empty(shape[0] * elements).as_strided(shape, (elements, shape[2], 1))


OFFS = torch.empty(4, dtype=torch.int32)
FORWARD: dict[str, Any] = {"a": empty(1024, 64), "b": empty(4, 64, 128), "offs": OFFS}
WGRAD: dict[str, Any] = {"a": empty(1024, 128).t(), "b": empty(1024, 64), "offs": OFFS}

FORWARD_TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": {"a": empty(1024, 64, dtype=FP16), "b": empty(4, 64, 128, dtype=FP16)},
    "few_rows": {"a": empty(100, 64)},
    "trans_b": {"b": empty(4, 128, 64), "trans_b": True},
    "dgrad": {"b": empty(4, 128, 64).mT},
    "bias": {"bias": empty(4, 128)},
    "bias_fp32": {"bias": empty(4, 128, dtype=FP32), "out_dtype": FP32},
    "bias_misaligned": {"bias": empty(4, 129)[:, 1:]},
    "bias_expanded": {"bias": empty(1, 128).expand(4, 128)},
    "accumulate": {"d": empty(1024, 128), "accumulate": True},
    "accumulate_fp32": {"d": empty(1024, 128, dtype=FP32), "accumulate": True},
    "accumulate_and_bias": {"d": empty(1024, 128), "bias": empty(4, 128), "accumulate": True},
    "fp32_out": {"out_dtype": FP32},
    "padded_rows": {"a": empty(1024, 128)[:, :64], "d": empty(1024, 256)[:, :128]},
    "every_other_expert": {"b": empty(8, 64, 128)[::2]},
    "one_expert_for_all": {"b": empty(1, 64, 128).expand(4, 64, 128)},
    "int64": {"offs": OFFS.long()},
    "int64_not_16_byte_aligned": {"offs": torch.empty(5, dtype=torch.int64)[1:]},
    "one_group": {"b": empty(1, 64, 128), "offs": OFFS[:1]},
    "many_groups": {"b": empty(5000, 64, 128), "offs": torch.empty(5000, dtype=torch.int32)},
    "sm_margin": {"sm_margin": 130},
}
WGRAD_TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32_out": {"out_dtype": FP32},
    "accumulate": {"d": empty(4, 128, 64), "accumulate": True},
    "accumulate_fp32": {"d": empty(4, 128, 64, dtype=FP32), "accumulate": True},
    "odd_rows_padded": {"a": empty(1024, 128)[:, :127].t()},
    "ones_of_a_bias": {"a": empty(1024, 8).t(), "out_dtype": FP32},
    "one_token": {"a": empty(1, 128).t(), "b": empty(1, 64)},
    "transposed_out": {"d": empty(4, 64, 128).mT},
    "every_other_expert": {"d": empty(8, 128, 64)[::2]},
    "int64": {"offs": OFFS.long()},
}
FORWARD_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fp32": ({"a": empty(1024, 64, dtype=FP32), "b": empty(4, 64, 128, dtype=FP32)}, "bf16 and fp16 inputs, got fp32"),
    "every_other_element": ({"a": empty(1024, 128)[:, ::2]}, "stride 1 in one dimension"),
    "expanded": ({"a": empty(1, 64).expand(1024, 64)}, "do not overlap"),
    "column_major": ({"a": empty(64, 1024).t()}, r"a\[0\] is column-major"),
    "misaligned": ({"a": empty(1024, 64, skip=1)}, r"a\[0\]: data .* is not 16-byte aligned"),
    "leading_dimension": ({"a": empty(1024, 65)[:, :64]}, r"a\[0\]: leading dimension 65"),
    "odd_k": ({"a": empty(1024, 63), "b": empty(4, 63, 128)}, r"a\[0\]: leading dimension 63"),
    "odd_n": ({"b": empty(4, 64, 126)}, r"b\[0\]: leading dimension 126"),
    "odd_n_transposed": ({"b": empty(4, 126, 64).mT}, r"d\[0\]: leading dimension 126"),
    "experts_misaligned": ({"b": apart(4, 64, 128, elements=64 * 128 + 1)}, "b: expected .* 16 bytes .* 8193"),
    "out_misaligned": ({"d": empty(1024, 128, skip=4)}, r"d\[0\]: data"),
    "out_column_major": ({"d": empty(128, 1024).t()}, "row-major out"),
    "bias_strided": ({"bias": empty(4, 256)[:, ::2]}, "bias must be contiguous"),
    "bias_alone": ({"a": empty(1024, 0), "b": empty(4, 0, 128), "bias": empty(4, 128)}, "K = 0"),
    "offs_strided": ({"offs": torch.empty(8, dtype=torch.int32)[::2]}, "contiguous offs"),
    "sm_margin": ({"sm_margin": 131}, "fewer than 2 of 132 SMs"),
}
WGRAD_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "row_major_a": ({"a": empty(128, 1024)}, r"a\[0\] is row-major"),
    "column_major_b": ({"b": empty(64, 1024).t()}, r"b\[0\] column-major"),
    "odd_m": ({"a": empty(1024, 127).t()}, r"a\[0\]: leading dimension 127"),
    "odd_n": ({"b": empty(1024, 63)}, r"b\[0\]: leading dimension 63"),
    "matrices_misaligned": ({"d": apart(4, 128, 64, elements=128 * 64 + 1)}, "d: expected .* 16 bytes .* 8193"),
}


def table(forward: dict[str, Any], wgrad: dict[str, Any]) -> Any:
    """The rows of both, each with what it changes."""
    rows = [pytest.param(FORWARD, row, id=f"forward-{name}") for name, row in forward.items()]
    return [*rows, *(pytest.param(WGRAD, row, id=f"wgrad-{name}") for name, row in wgrad.items())]


@pytest.mark.parametrize(("base", "changes"), table(FORWARD_TAKEN, WGRAD_TAKEN))
def test_ragged_forms_that_cutlass_takes(base: dict[str, Any], changes: dict[str, Any]) -> None:
    """And the backends after it say that it comes first."""
    plan = gmm.explain(**{**base, **changes}, sm=90)
    assert plan.backend == "cutlass" and plan.launches == 1 and plan.tile is not None
    assert plan.kernel.startswith("sm90_descriptor_array_")
    assert plan.reasons["triton"] == "cutlass takes the call and comes first"
    assert gmm.explain(**{**base, **changes}, sm=90, backend=f"cutlass: {plan.kernel}").kernel == plan.kernel


@pytest.mark.parametrize(("base", "row"), table(FORWARD_REFUSED, WGRAD_REFUSED))
def test_ragged_forms_that_cutlass_refuses(base: dict[str, Any], row: tuple[dict[str, Any], str]) -> None:
    """With the reason; Triton takes them."""
    changes, text = row
    plan = gmm.explain(**{**base, **changes}, sm=90)
    assert plan.backend == "triton" and re.search(text, plan.reasons["cutlass"]), plan
    with pytest.raises(RuntimeError, match=f"backend 'cutlass' cannot take this call: .*{text}"):
        gmm.explain(**{**base, **changes}, sm=90, backend="cutlass")


@pytest.mark.parametrize("backend", ("auto", "cutlass", "triton"))
def test_calls_without_a_product(backend: str) -> None:
    """No groups, no rows, a contraction over nothing: out is zeroed, or left alone when accumulating."""
    for base, changes in (
        (FORWARD, {"b": empty(0, 64, 128), "offs": OFFS[:0]}),
        (FORWARD, {"a": empty(0, 64)}),
        (FORWARD, {"a": empty(1024, 0), "b": empty(4, 0, 128)}),
        (WGRAD, {"a": empty(0, 128).t(), "b": empty(0, 64)}),
        (WGRAD, {"offs": OFFS[:0]}),
    ):
        plan = gmm.explain(**{**base, **changes}, sm=90, backend=backend)
        assert (plan.backend, plan.kernel) == ("reference", "no products") and plan.launches <= 1
        assert gmm.explain(**{**base, **changes}, sm=90, accumulate=True).launches == 0


def test_why_the_pointer_array_takes_a_batch() -> None:
    """A batch is a list to the library."""
    plan = gmm.explain((64, 128, 64), (64, 64, 256), out_dtype=torch.float32, sm=90)
    assert "pointer_array" in plan.kernel
    assert plan.reasons["cutlass"] == (
        "chosen: first in order of preference that takes the call; pointer array, as descriptor array refuses: "
        "64 groups need large parameters, which no kernel for this D takes"
    )
    assert ";" not in gmm.explain((64, 128, 64), (64, 64, 256), sm=90).reasons["cutlass"]


@pytest.mark.parametrize("epilogue", ("swiglu", "swiglu_backward"))
def test_epilogue(epilogue: str) -> None:
    """On a kernel of its own for sm90, with enough rows, halves of h in whole 16 bytes; else the plan says why."""
    tokens, few, weights = (4096, 256), (4 * 80, 256), (4, 256, 384)
    plan = gmm.explain(tokens, weights, epilogue=epilogue, sm=90)
    assert plan.backend == "cutlass" and plan.kernel.endswith(f"_1x2_{epilogue}") and plan.launches == 1
    assert gmm.explain(tokens, weights, sm=90).kernel == plan.kernel.removesuffix(f"_{epilogue}")
    refused = [(few, weights, "320 rows in 4 groups")]
    if epilogue == "swiglu":
        refused.append((tokens, (4, 256, 200), "d[0]: leading dimension 100"))
    for a, b, why in refused:
        without = gmm.explain(a, b, epilogue=epilogue, sm=90)
        assert without.backend == "cutlass" and "swiglu" not in without.kernel
        assert f"without the epilogue: {why}" in without.reasons["cutlass"]
    named = gmm.explain(
        tokens, weights, epilogue=epilogue, sm=90, backend="cutlass: " + plan.kernel.split("_swiglu")[0]
    )
    assert "by name" in named.reasons["cutlass"]
    assert gmm.explain(tokens, weights, epilogue=epilogue, sm=80).backend == "triton"
    assert gmm.explain(tokens, weights, epilogue=epilogue).backend in ("reference", "cutlass", "triton")


def test_epilogues_that_are_none() -> None:
    with pytest.raises(ValueError, match="epilogue: expected swiglu or swiglu_backward, got 'relu'"):
        gmm.explain((64, 64), (2, 64, 64), epilogue="relu")
    with pytest.raises(ValueError, match="epilogue: expected None with lists"):
        gmm.explain([(64, 64)], [(64, 64)], epilogue="swiglu")
    with pytest.raises(RuntimeError, match="epilogue: expected an a of 2"):
        gmm.explain((2, 64, 64), (2, 64, 64), epilogue="swiglu", sm=90)
