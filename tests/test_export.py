"""torch.export without dynamo: gmm's Python runs on fake tensors, and the program holds gmm's ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from check import seeded
from conftest import Target
from torch import Tensor, nn

import gmm
from gmm.compat.grouped_gemm import ops as grouped_gemm

SIZES = [5, 0, 9, 4]
ROWS, EXPERTS, K, N = sum(SIZES), len(SIZES), 32, 48


def into_lists(x: Tensor, w: Tensor, sizes: Tensor, d: Tensor) -> Tensor:
    gmm.multi_tensor_gemm([x, x], [w[0], w[1]], [d[0], d[1]], accumulate=True)
    return d * 2


def into_out(x: Tensor, w: Tensor, sizes: Tensor, d: Tensor) -> Tensor:
    gmm.grouped_mm(x, w, sizes.cumsum(0), out=d[0], accumulate=True)
    return d * 2


def as_grouped_gemm(x: Tensor, w: Tensor, sizes: Tensor, d: Tensor) -> Tensor:
    return grouped_gemm.gmm(x, w, sizes)


def of_routed_tokens(x: Tensor, w: Tensor, sizes: Tensor, d: Tensor) -> Tensor:
    """Experts 0 to 3, in turn."""
    index = (torch.arange(len(x), device=x.device) % EXPERTS).unsqueeze(1)
    rows, row_map, offs = gmm.moe.permute(x, index, EXPERTS)
    y = gmm.moe.unpermute(gmm.grouped_mm(rows, w, offs), row_map)
    return y + gmm.grouped_mm(rows, w, gmm.moe.route_sizes(index, EXPERTS))


class Layers(nn.Module):
    """Both modules, with sizes in a tensor."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = gmm.nn.GroupedLinear(EXPERTS, K, K, bias=True)
        self.experts = gmm.nn.GroupedExperts(EXPERTS, K, N, activation)

    def forward(self, x: Tensor, w: Tensor, sizes: Tensor, d: Tensor) -> Tensor:
        return self.experts(self.linear(x, sizes), sizes)


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


PROGRAMS = {
    "multi_tensor_gemm": lambda: Function(into_lists),
    "grouped_mm_out": lambda: Function(into_out),
    "grouped_mm": lambda: Function(as_grouped_gemm),
    "moe_route_sizes": lambda: Function(of_routed_tokens),
    "moe_activation": lambda: Layers("geglu"),
    "moe_swiglu": lambda: Layers("swiglu"),
}


@pytest.mark.parametrize("op", PROGRAMS)
def test_exported_program(auto_target: Target, op: str) -> None:
    """The results of the module itself, bit for bit, also for other sizes, and what it has written."""
    module = PROGRAMS[op]().to(auto_target.device)

    def inputs(sizes: list[int]) -> tuple[Tensor, ...]:
        generator = seeded(torch.device("cpu"))
        x, w, d = (torch.randn(s, generator=generator) for s in ((ROWS, K), (EXPERTS, K, N), (2, ROWS, N)))
        return tuple(t.to(auto_target.device) for t in (x, w, torch.tensor(sizes), d))

    with torch.no_grad():
        program = torch.export.export(module, inputs(SIZES), strict=False)
        assert f"gmm.{op}.default" in [str(node.target) for node in program.graph.nodes]
        for sizes in (SIZES, [0, 1, 2, 15]):
            ours, direct = inputs(sizes), inputs(sizes)
            y = module(*direct)
            assert y.any() and torch.equal(program.module()(*ours), y)
            assert all(torch.equal(*pair) for pair in zip(ours, direct))
