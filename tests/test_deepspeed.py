"""gmm.integrations.deepspeed: on DeepSpeed's own experts, where it is installed, and on a stand-in with what the
integration touches of them, wherever."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from check import seeded
from conftest import Target
from grouped_cases import BF16, COUNTS, FP32, ends_of, loop
from torch import Tensor, nn

import gmm
import gmm.integrations.deepspeed as integration


def stand_in() -> types.ModuleType:
    """deepspeed.moe.ep_experts of DeepSpeed 0.19, without what the integration leaves alone."""
    module: Any = types.ModuleType("deepspeed.moe.ep_experts")

    class GroupedExperts(nn.Module):
        def __init__(
            self,
            dim: int,
            hidden_dim: int,
            num_experts: int,
            use_grouped_mm: Any = True,
            disable_triton_grouped_mm: bool = False,
            activation: str = "swiglu",
            activation_alpha: float = 1.702,
            activation_limit: float = 7.0,
            gate_up_impl: str = "separate",
        ) -> None:
            super().__init__()
            self.use_grouped_mm, self.gate_up_impl = use_grouped_mm, gate_up_impl
            self.activation, self.activation_alpha, self.activation_limit = (
                activation,
                activation_alpha,
                activation_limit,
            )
            self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
            self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
            self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))

        def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            outputs, cuts = [], num_tokens_per_expert.tolist()
            for g, t in enumerate(x[: sum(cuts)].split(cuts)):
                form = (self.activation, self.activation_alpha, self.activation_limit)
                h = apply_expert_activation(*(t @ w[g].to(x.dtype).t() for w in (self.w1, self.w3)), *form, fused=False)
                outputs.append(h @ self.w2[g].to(x.dtype).t())
            return torch.cat([*outputs, x.new_zeros(len(x) - sum(cuts), x.shape[1])])

    def apply_expert_activation(
        gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float, fused: bool
    ) -> Tensor:
        if activation == "swiglu":
            return nn.functional.silu(gate) * up
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)

    def apply_packed_expert_activation(
        gate_up: Tensor, activation: str, alpha: float, limit: float, fused: bool
    ) -> Tensor:
        return apply_expert_activation(*gate_up.chunk(2, dim=-1), activation, alpha, limit, fused)

    for part in (GroupedExperts, apply_expert_activation, apply_packed_expert_activation):
        setattr(module, part.__name__, part)
    return module


@pytest.fixture(params=("stand-in", "installed"))
def experts_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """GroupedExperts, after register()."""
    if request.param == "stand-in":
        monkeypatch.setitem(sys.modules, "deepspeed.moe.ep_experts", stand_in())
    else:
        pytest.importorskip("deepspeed.moe.ep_experts", exc_type=ImportError)
    integration.register()
    once = sys.modules["deepspeed.moe.ep_experts"].GroupedExperts.forward
    integration.register()
    assert sys.modules["deepspeed.moe.ep_experts"].GroupedExperts.forward is once
    return sys.modules["deepspeed.moe.ep_experts"].GroupedExperts


BACKENDS = {"cpu": ("reference",), "cuda": ("cutlass", "triton")}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that the integration's products ran on."""
    ran: list[str] = []

    def noted(*args: Any, **options: Any) -> Tensor:
        y = gmm.grouped_mm(*args, **options)
        ran.append(gmm.last_backend().split(":")[0])
        return y

    monkeypatch.setattr(integration, "grouped_mm", noted)
    return ran


@pytest.mark.parametrize("options", ({}, {"activation": "swiglu_oai"}, {"gate_up_impl": "fused"}), ids=str)
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_experts(
    auto_target: Target,
    experts_class: type[nn.Module],
    calls: list[str],
    options: dict[str, str],
    dtype: torch.dtype,
) -> None:
    """use_grouped_mm="gmm" runs gmm, and gives what DeepSpeed's loop over experts gives, with parameters in fp32; True
    stays DeepSpeed's."""
    device, generator = auto_target.device, seeded(torch.device("cpu"))
    switches = {"disable_triton_grouped_mm": True} if options.get("gate_up_impl") else {}
    ours: Any = experts_class(32, 48, 4, use_grouped_mm="gmm", **switches, **options).to(device)
    loop_options = {k: v for k, v in options.items() if k != "gate_up_impl"}
    theirs: Any = experts_class(32, 48, 4, use_grouped_mm=False, **loop_options).to(device)
    for parameter in theirs.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(20, 32, generator=generator).to(device, dtype)
    counts = torch.tensor([5, 0, 9, 4], dtype=torch.int32, device=device)  # no multiples of 8, and 2 rows of padding
    results = []
    for experts in (ours, theirs):
        leaf = x.detach().requires_grad_()
        y = experts(leaf, counts)
        products = (2 if options.get("gate_up_impl") else 3) if experts is ours else 0
        assert len(calls) == products and all(name in BACKENDS[device.type] for name in calls)
        calls.clear()
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [leaf, *experts.parameters()])])
    tolerance = 1e-6 if dtype is FP32 else 2e-2
    assert all(a.dtype is b.dtype and (a - b).norm() <= tolerance * b.norm() for a, b in zip(*results, strict=True))
    if dtype is BF16:  # which torch's kernel takes everywhere
        theirs.use_grouped_mm = True
        theirs(x, counts)
        assert not calls
    assert not results[0][0][18:].any() and not results[0][1][18:].any()


@pytest.mark.parametrize("counts, k, n", COUNTS, ids=str)
@pytest.mark.parametrize("trans_b", (False, True))
def test_group_gemm_triton(auto_target: Target, counts: list[int], k: int, n: int, trans_b: bool) -> None:
    """The calls group_gemm_triton(x, w, offsets, trans_b=True) and without, on DeepSpeed's own table."""
    device, generator = auto_target.device, seeded(torch.device("cpu"))
    x = torch.randn(sum(counts), k, generator=generator).to(device).requires_grad_()
    w = torch.randn((len(counts), n, k) if trans_b else (len(counts), k, n), generator=generator).to(device)
    w.requires_grad_()
    offs = torch.tensor(ends_of(counts), dtype=torch.int32, device=device)
    y = integration.group_gemm_triton(x, w, offs, trans_b=trans_b)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    exact = loop(x64, w64.mT if trans_b else w64, offs)
    results = [[t, *torch.autograd.grad(t.square().sum(), leaves)] for t, leaves in ((y, (x, w)), (exact, (x64, w64)))]
    assert all((a - b).norm() <= 2e-6 * b.norm() for a, b in zip(*results, strict=True))


def test_configuration() -> None:
    """The value passes through DeepSpeed's own reading of its configuration."""
    config = pytest.importorskip("deepspeed.module_inject.auto_ep_config", exc_type=ImportError)
    parsed = config.parse_autoep_config({"enabled": True, "use_grouped_mm": "gmm", "gate_up_impl": "fused"})
    assert parsed.use_grouped_mm == "gmm"


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.moe.ep_experts", None)
    with pytest.raises(ImportError, match="gmm needs deepspeed.moe.ep_experts.*: pip install -U deepspeed"):
        integration.register()
