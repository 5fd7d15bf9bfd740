"""gmm.integrations.torchtitan: the override on torchtitan's own experts, where it is installed, and the calls that they
make, wherever."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from typing import Any

import pytest
import torch
from check import seeded
from conftest import Target
from grouped_cases import BF16

import gmm

TOKENS, DIM, HIDDEN, EXPERTS = 20, 32, 48, 4
COUNTS = [5, 0, 9, 4]  # and two rows that no expert owns


def test_the_calls_of_its_experts(auto_target: Target) -> None:
    """GroupedExperts.forward of torchtitan 0.3: bf16, transposed views of [E, N, K], offs by keyword."""
    x, w = (torch.randn(s, generator=seeded(torch.device("cpu"))) for s in ((TOKENS, DIM), (EXPERTS, HIDDEN, DIM)))
    x, w = x.to(auto_target.device).requires_grad_(), w.to(auto_target.device).requires_grad_()
    counts = torch.tensor(COUNTS, device=x.device)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    y = gmm.grouped_mm(x.bfloat16(), w.bfloat16().transpose(-2, -1), offs=offs)
    assert y.dtype is BF16 and not y[18:].any()
    for g, (start, end) in enumerate(((0, 5), (5, 5), (5, 14), (14, 18))):
        exact = x[start:end].bfloat16().double() @ w[g].bfloat16().double().t()
        assert (y[start:end] - exact).norm() <= 4e-3 * exact.norm()
    dx, dw = torch.autograd.grad(y.float().square().sum(), (x, w))
    assert dx.shape == x.shape and dx[:18].all() and not dx[18:].any()
    assert dw.shape == w.shape and dw.is_contiguous() and not dw[1].any()


@pytest.fixture
def titan() -> dict[str, Any]:
    """torchtitan's experts, whose configurations the override takes."""
    pytest.importorskip("torchtitan.models.common.moe", exc_type=ImportError)
    modules = {"GroupedExperts": "common", "GptOssGroupedExperts": "gpt_oss"}
    return {name: getattr(importlib.import_module(f"torchtitan.models.{m}.moe"), name) for name, m in modules.items()}


@pytest.mark.parametrize("name", ("GroupedExperts", "GptOssGroupedExperts"))
def test_override(titan: dict[str, Any], auto_target: Target, name: str) -> None:
    """Named in override.imports; the same parameters, results and gradients as torchtitan's."""
    from torchtitan.config import OverrideConfig
    from torchtitan.config.configurable import Configurable
    from torchtitan.config.override import apply_overrides

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Layer(Configurable.Config):
        experts: Any

    sizes = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": EXPERTS}
    layer = Layer(experts=titan[name].Config(**sizes))
    logged = apply_overrides(OverrideConfig(imports=["gmm.integrations.torchtitan.grouped_experts"]), layer)
    assert len(logged) == 1 and f"Gmm{name}.Config" in logged[0]
    theirs, ours = (config.build().to(auto_target.device) for config in (titan[name].Config(**sizes), layer.experts))
    assert isinstance(ours, titan[name]) and type(ours).__name__ == f"Gmm{name}"
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=seeded(auto_target.device))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(TOKENS, DIM, generator=seeded(torch.device("cpu"))).to(auto_target.device)
    counts = torch.tensor(COUNTS, device=x.device)
    results = []
    for experts in (ours, theirs):
        leaf = x.detach().requires_grad_()
        y = experts(leaf, counts)[: sum(COUNTS)]  # torch leaves the rest undefined
        grads = torch.autograd.grad(y.float().square().sum(), [leaf, *experts.parameters()])
        results.append([y, grads[0][: sum(COUNTS)], *grads[1:]])
        if experts is ours:
            assert gmm.last_backend().startswith("reference" if x.device.type == "cpu" else ("cutlass", "triton"))
    assert all((a - b).norm() <= 2e-2 * b.norm() and b.any() for a, b in zip(*results, strict=True))


def test_override_keeps_the_fields(titan: dict[str, Any]) -> None:
    from gmm.integrations.torchtitan import grouped_experts

    experts = titan["GptOssGroupedExperts"]
    config = experts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS, swiglu_limit=3.0)
    ours = grouped_experts(config)
    assert dataclasses.asdict(ours) == dataclasses.asdict(config)
    assert ours.build().swiglu_limit == 3.0 and type(grouped_experts(config)) is type(ours)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    monkeypatch.delitem(sys.modules, "gmm.integrations.torchtitan", raising=False)
    with pytest.raises(ImportError, match="gmm needs torchtitan.config.*: pip install -U torchtitan"):
        importlib.import_module("gmm.integrations.torchtitan")
