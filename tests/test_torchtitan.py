"""gmm.integrations.torchtitan: the override on torchtitan's own experts, where it is installed, and on a stand-in with
what the override touches of them, wherever."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from check import seeded
from conftest import Target
from grouped_cases import BF16
from torch import Tensor, nn

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


class StandIn(nn.Module):
    """GroupedExperts of torchtitan 0.3, without what the override leaves alone."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        dim: int
        hidden_dim: int
        num_experts: int

    def __init_subclass__(cls) -> None:
        cls.Config._owner = cls

    def __init__(self, config: Config) -> None:
        super().__init__()
        e, n, k = config.num_experts, config.hidden_dim, config.dim
        for name, shape in (("w1", (e, n, k)), ("w2", (e, k, n)), ("w3", (e, n, k))):
            generator = seeded(torch.device("cpu"))
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) * 0.3))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        offs = counts.cumsum(0, dtype=torch.int32)
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        h = nn.functional.silu(self._grouped_mm(A=x.bfloat16(), B_t=w1, offs=offs))
        h = h * self._grouped_mm(A=x.bfloat16(), B_t=w3, offs=offs)
        return self._grouped_mm(A=h, B_t=w2, offs=offs).type_as(x)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        return torch._grouped_mm(A, B_t, offs=offs)


@pytest.fixture
def override(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """gmm.integrations.torchtitan beside a torchtitan that has StandIn for its experts."""
    config: Any = types.ModuleType("torchtitan.config")
    config.registered = []
    config.override = lambda **what: lambda factory: config.registered.append((what["target"], factory)) or factory
    config.derive = lambda config, cls: cls(**dataclasses.asdict(config))
    moe: Any = types.ModuleType("torchtitan.models.common.moe")
    moe.GroupedExperts = StandIn
    for module in (config, moe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "gmm.integrations.torchtitan"
    before = sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name]
    if before is not None:
        sys.modules[name] = before


def test_override_of_a_stand_in(auto_target: Target, override: Any) -> None:
    """Registered for the experts' configuration and what comes of it; the results and gradients are torch's."""
    ((target, factory),) = sys.modules["torchtitan.config"].registered  # type: ignore[attr-defined]
    assert target is StandIn.Config and factory is override.grouped_experts
    config = StandIn.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS)
    config.__class__._owner = StandIn  # type: ignore[attr-defined]
    derived = override.grouped_experts(config)
    assert dataclasses.asdict(derived) == dataclasses.asdict(config) and "GmmStandIn" in type(derived).__qualname__
    assert type(override.grouped_experts(config)) is type(derived)
    check_experts(type(derived)._owner(derived), StandIn(config), auto_target)


def check_experts(ours: nn.Module, theirs: nn.Module, target: Target) -> None:
    """The same results and gradients, and gmm ran."""
    ours, theirs = ours.to(target.device), theirs.to(target.device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(TOKENS, DIM, generator=seeded(torch.device("cpu"))).to(target.device)
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
    check_experts(ours, theirs, auto_target)


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
