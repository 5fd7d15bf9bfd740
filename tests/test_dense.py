"""Tensors that are not dense, or have the negative bit: each argument of each op, by the op and by the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gmm

M, N, K = 6, 16, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sparse": (Tensor.to_sparse, "got layout torch.sparse_coo"),
    "csr": (lambda x: torch.eye(M, dtype=x.dtype).to(x.device).to_sparse_csr(), "got layout torch.sparse_csr"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "got a nested one"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "got layout torch._mkldnn"),
    "quantized": (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "got a quantized one"),
}
OPS: dict[str, tuple[str, ...]] = {
    "multi_tensor_gemm": ("a", "b", "d", "bias"),
    "multi_tensor_mm": ("a", "b", "bias"),
    "grouped_mm": ("a", "b", "offs", "bias"),
    "grouped_mm_out": ("a", "b", "offs", "bias", "out"),
}
ARGUMENTS = [(op, argument) for op, arguments in OPS.items() for argument in arguments]

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support|The PyTorch API of nested|.*quantize")


def arguments(op: str, device: str) -> dict[str, Any]:
    """Of a call that is in order, what is written filled with -1."""
    x = torch.ones(M, K, device=device)
    if op.startswith("multi"):
        call = {"a": [x, x], "b": [x.new_ones(K, N), x.new_ones(K, N)], "bias": [x.new_ones(N), x.new_ones(N)]}
        return {**call, "d": [x.new_full((M, N), -1) for _ in x[:2]]}
    offs = torch.tensor([2, M], dtype=torch.int32, device=device)
    call = {"a": x, "b": x.new_ones(2, K, N), "offs": offs, "bias": x.new_ones(2, N)}
    return {**call, "out": x.new_full((M, N), -1)}


def put(call: dict[str, Any], argument: str, change: Callable[[Tensor], Tensor]) -> str:
    """Changes the argument, of a list the second, and returns its name in errors."""
    if isinstance(call[argument], list):
        call[argument] = [call[argument][0], change(call[argument][1])]
        return f"{argument}[1]"
    call[argument] = change(call[argument])
    return argument


def by_both_ways(op: str, call: dict[str, Any]) -> list[Callable[[], Any]]:
    function = gmm.multi_tensor_gemm if op.startswith("multi") else gmm.grouped_mm
    given = {name: call[name] for name in OPS[op]}
    return [lambda: getattr(torch.ops.gmm, op)(*given.values()), lambda: function(**given)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_not_dense(op: str, argument: str, kind: str, device: str) -> None:
    if device == "cuda" and kind in ("mkldnn", "quantized"):
        pytest.skip("a kind of CPU tensors")
    change, got = KINDS[kind]
    call = arguments(op, device)
    name = put(call, argument, change)
    ways = by_both_ways(op, call)
    if device == "cuda" and op.startswith("multi") and argument == "bias":
        ways = ways[1:]  # the dispatcher does not look into optional lists; the function does
    for way in ways:
        with pytest.raises(RuntimeError) as caught:
            way()
        assert str(caught.value) == f"{name}: expected a dense tensor, {got}"
    for written in (call["d"][0], call["d"][1]) if op.startswith("multi") else (call["out"],):
        assert written.layout is not torch.strided or written.is_nested or written.is_quantized or (written == -1).all()


@pytest.mark.parametrize("op", ("multi_tensor_mm", "grouped_mm"))
@pytest.mark.parametrize("kind", ("sparse", "csr", "mkldnn"))
def test_not_dense_with_gradient(op: str, kind: str) -> None:
    for argument in ("a", "b", "bias"):
        call = arguments(op, "cpu")
        name = put(call, argument, lambda x: KINDS[kind][0](x).requires_grad_())
        for way in by_both_ways(op, call):
            with pytest.raises(RuntimeError) as caught:
                way()
            assert str(caught.value) == f"{name}: expected a dense tensor, {KINDS[kind][1]}"


@pytest.mark.parametrize("device", ["meta", *DEVICES])
@pytest.mark.parametrize(("op", "argument"), ARGUMENTS)
def test_negative_bit(op: str, argument: str, device: str) -> None:
    """What is read has the value it shows; what is written may not have the bit, and is left alone."""
    call = arguments(op, device)
    name = put(call, argument, lambda x: torch._neg_view(x if argument in ("d", "out") else -x))
    ways = by_both_ways(op, call)
    if device == "cuda" and op.startswith("multi") and argument == "bias":
        ways = ways[1:]  # as above
    for way in ways:
        if argument in ("d", "out"):
            with pytest.raises(RuntimeError) as caught:
                way()
            assert str(caught.value) == f"{name}: expected a tensor without the negative bit, got one with it; see " + (
                "resolve_neg()"
            )
            written = call["d"][1] if argument == "d" else call["out"]
            assert device == "meta" or (written == 1).all(), "was written"
            continue
        result = way()
        if device != "meta":
            result = next(x for x in (result, call.get("d"), call.get("out")) if x is not None and len(x))
            assert all(bool((x == K + 1).all()) for x in (result if isinstance(result, list) else [result]))
