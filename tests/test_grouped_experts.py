"""gmm.nn.GroupedExperts and the whole MoE layer around it, against a loop over the tokens in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from check import seeded
from conftest import MoeTarget, Target
from moe_cases import BF16, FP32, GATED, expected_activation
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gmm
from gmm.moe import KINDS
from gmm.nn import GroupedExperts, GroupedLinear

T, K, E, H, FFN = 14, 3, 5, 16, 24  # expert 2 gets no token, every fifth pair is a sentinel


def operands(device: torch.device, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, expert ids and routing weights."""
    generator = seeded(torch.device("cpu"))
    x, weights = torch.randn(T, H, generator=generator), torch.rand(T, K, generator=generator)
    index = torch.randint(E, (T, K), generator=generator)
    index = torch.where(index == 2, 3, index).flatten()
    index[::5] = torch.tensor([-1, E])[torch.arange(len(index[::5])) % 2]
    return x.to(device, dtype), index.view(T, K).to(device), weights.to(device)


def experts_of(device: torch.device, activation: str = "swiglu", dtype: torch.dtype = FP32, **options: Any):
    torch.manual_seed(0)
    experts = GroupedExperts(E, H, FFN, activation, device=device, dtype=dtype, **options)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.3)
    return experts


def layer(experts: GroupedExperts, x: Tensor, index: Tensor, weights: Tensor, form: str = "offs") -> Tensor:
    """The MoE layer, weighted with the activation; form "combine": weighted in unpermute."""
    rows, row_map, offs = gmm.moe.permute(x, index, E)
    if form == "combine":
        return gmm.moe.unpermute(experts(rows, offs=offs), row_map, weights)
    return gmm.moe.unpermute(experts(rows, weights=gmm.moe.permute_weights(weights, row_map), offs=offs), row_map)


def stacked(linear: GroupedLinear, name: str, tensor: Any = lambda p: p) -> Tensor:
    if not linear.parameter_per_group:
        return tensor(getattr(linear, name))
    return torch.stack([tensor(getattr(linear, f"{name}{i}")) for i in range(E)])


def in_fp64(experts: GroupedExperts) -> dict[str, Tensor]:
    """Parameters as leaves, by name: gate_up.weight, ... of [E, ...]."""
    names = [(n, p) for n, _ in experts.named_children() for p in ("weight", "bias")]
    found = {f"{n}.{p}": getattr(experts, n) for n, p in names if getattr(experts, n)._names[p]}
    return {
        name: stacked(linear, name.split(".")[1]).detach().double().cpu().requires_grad_()
        for name, linear in found.items()
    }


def loop(experts: GroupedExperts, p: dict[str, Tensor], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Token by token."""
    out = [torch.zeros_like(t) for t in x]
    for t in range(len(x)):
        for j, e in enumerate(index[t].tolist()):
            if 0 <= e < E:

                def linear(name: str, value: Tensor, e: int = e) -> Tensor:
                    y = p[f"{name}.weight"][e] @ value
                    return y + p[f"{name}.bias"][e] if f"{name}.bias" in p else y

                options = {"interleaved": experts.interleaved, "limit": experts.limit}
                if "gate_up.weight" in p:
                    h = linear("gate_up", x[t])
                else:
                    h = linear("gate" if "gate.weight" in p else "up", x[t])
                    options["up"] = linear("up", x[t])[None] if "gate.weight" in p else None
                h = expected_activation(h[None], experts.activation, **options)[0]
                out[t] = out[t] + weights[t, j] * linear("down", h)
    return torch.stack(out)


def check(experts: GroupedExperts, device: torch.device, dtype: torch.dtype = FP32, form: str = "offs") -> None:
    """Output and all gradients."""
    x, index, weights = operands(device, dtype)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    dy = torch.randn(T, H, generator=seeded(torch.device("cpu"), 4)).to(device, dtype)
    y = layer(experts, x, index, weights, form)
    y.backward(dy)
    exact_parameters = in_fp64(experts)
    twins = [t.detach().double().cpu().requires_grad_() for t in leaves]
    exact = loop(experts, exact_parameters, twins[0], index, twins[1])
    exact.backward(dy.double().cpu())
    unit = 2.0**-18 if dtype == FP32 else 2.0**-6

    def near(name: str, result: Tensor, want: Tensor) -> None:
        assert result.shape == want.shape and result.isfinite().all(), name
        assert (result.double().cpu() - want).norm() <= unit * want.norm(), name

    near("y", y.detach(), exact.detach())
    near("x", x.grad, twins[0].grad)
    near("weights", weights.grad, twins[1].grad)
    for name, want in exact_parameters.items():
        linear = getattr(experts, name.split(".")[0])
        near(name, stacked(linear, name.split(".")[1], lambda p: p.grad), want.grad)
        assert not want.grad[2].any() and not stacked(linear, name.split(".")[1], lambda p: p.grad)[2].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate_up", ("concatenated", "interleaved", "apart"))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_kinds(auto_target: Target, kind: str, gate_up: str, bias: bool) -> None:
    if kind not in GATED and gate_up != "concatenated":
        pytest.skip("no gate to store")
    experts = experts_of(auto_target.device, kind, gate_up=gate_up, bias=bias, limit=2.0 if kind in GATED else None)
    check(experts, auto_target.device)


@pytest.mark.parametrize("form", ("offs", "combine"))
@pytest.mark.parametrize("dtype", (BF16, FP32))
def test_forms(moe: MoeTarget, form: str, dtype: torch.dtype) -> None:
    """In Triton, too; gpt-oss's kind, and parameters of each expert."""
    check(experts_of(moe.device, dtype=dtype), moe.device, dtype, form)
    options = {"gate_up": "interleaved", "bias": True, "limit": 7.0}
    check(experts_of(moe.device, "swiglu_oai", dtype, **options), moe.device, dtype, form)
    check(experts_of(moe.device, dtype=dtype, parameter_per_group=True), moe.device, dtype, form)
    kernels = {"activation", "activation_backward", "permute", "unpermute", "count_pairs", "place_pairs", "dots"}
    assert moe.ran() <= kernels if moe.in_triton else not moe.ran()


@pytest.mark.parametrize("delayed", (False, True), ids=("", "delayed"))
def test_main_grad(auto_target: Target, delayed: bool) -> None:
    x, index, weights = operands(auto_target.device, BF16)
    plain = experts_of(auto_target.device, dtype=BF16)
    fused = experts_of(auto_target.device, dtype=BF16, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
    for p in fused.parameters():
        p.main_grad = torch.zeros(p.shape, device=p.device)
    for experts in (plain, fused):
        layer(experts, x, index, weights).sum().backward()
    if delayed:
        assert not any(p.main_grad.any() for p in fused.parameters())
    fused.backward_dw()
    for p, q in zip(plain.parameters(), fused.parameters(), strict=True):
        assert q.grad is None and (p.grad - q.main_grad).norm() <= 2.0**-8 * p.grad.norm() and p.grad.any()


def test_list_of_sizes(auto_target: Target) -> None:
    """Equal to the ends of the same groups."""
    experts = experts_of(auto_target.device, bias=True)
    x = torch.randn(12, H, generator=seeded(torch.device("cpu"))).to(auto_target.device)
    weights = torch.rand(12, device=auto_target.device)
    sizes = [5, 0, 3, 4, 0]
    offs = torch.tensor(sizes, device=auto_target.device).cumsum(0)
    torch.testing.assert_close(experts(x, sizes, weights), experts(x, weights=weights, offs=offs))
    assert torch.equal(experts(x, sizes), experts(x, sizes, torch.ones_like(weights)))


def test_rows_of_no_group_may_hold_anything(auto_target: Target) -> None:
    """NaN in the tail of the tokens, of their weights and of the incoming gradient: zeros and finite gradients."""
    for options in ({}, {"bias": True}, {"gate_up": "interleaved"}, {"gate_up": "apart"}):
        experts = experts_of(auto_target.device, **options)
        x = torch.randn(20, H, generator=seeded(torch.device("cpu"))).to(auto_target.device)
        weights = torch.rand(20, device=auto_target.device)
        offs = torch.tensor([3, 3, 8, 12, 13], device=auto_target.device)
        x[13:] = weights[13:] = float("nan")
        leaves = [x.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
        y = experts(x, weights=weights, offs=offs)
        assert not y[13:].any()
        dy = torch.ones_like(y)
        dy[13:] = float("nan")
        grads = torch.autograd.grad(y, leaves, dy)
        assert all(g.isfinite().all() for g in grads) and not grads[0][13:].any() and not grads[1][13:].any()


def test_no_tokens(auto_target: Target) -> None:
    experts = experts_of(auto_target.device, bias=True)
    x, index, weights = operands(auto_target.device)
    for chosen in (index[:0], torch.full_like(index, E)):
        tokens = x[: len(chosen)].detach().requires_grad_()
        experts.zero_grad()
        layer(experts, tokens, chosen, weights[: len(chosen)]).sum().backward()
        assert not tokens.grad.any() and all(not p.grad.any() for p in experts.parameters())


def test_autocast_row_24(auto_target: Target) -> None:
    experts = experts_of(auto_target.device)
    x, index, weights = operands(auto_target.device)
    x.requires_grad_()
    with torch.autocast(auto_target.device.type, dtype=BF16):
        y = layer(experts, x, index, weights)
    assert y.dtype == BF16
    y.sum().backward()
    want = layer(experts_of(auto_target.device).to(BF16), x.detach().to(BF16), index, weights)
    torch.testing.assert_close(y, want, rtol=2.0**-6, atol=2.0**-6)
    assert x.grad.dtype == FP32 and all(p.grad.dtype == FP32 for p in experts.parameters())


@pytest.mark.parametrize("kind", ("swiglu", "relu2"))
def test_compile_and_checkpoint(kind: str) -> None:
    experts = experts_of(torch.device("cpu"), kind)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    x, index, weights = operands(torch.device("cpu"))
    for tokens in (T, 9):
        leaves = [x[:tokens].clone().requires_grad_(), weights[:tokens].clone().requires_grad_()]
        results = []
        for again in ("eager", "compiled", "checkpoint"):
            args = experts, leaves[0], index[:tokens], leaves[1]
            y = checkpoint(layer, *args, use_reentrant=False) if again == "checkpoint" else None
            y = y if y is not None else (compiled if again == "compiled" else layer)(*args)
            results.append((y, *torch.autograd.grad(y.square().sum(), (*leaves, *experts.parameters()))))
        for result in results[1:]:
            for a, b in zip(result, results[0], strict=True):
                torch.testing.assert_close(a, b)


def test_deterministic_row_32(auto_target: Target) -> None:
    experts = experts_of(auto_target.device, dtype=BF16)
    x, index, weights = operands(auto_target.device, BF16)
    runs = []
    for _ in range(3):
        leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
        y = layer(experts, leaves[0], index, leaves[1])
        runs.append((y, *torch.autograd.grad(y.float().square().sum(), (*leaves, *experts.parameters()))))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_meta_device() -> None:
    """Sizes that nobody can read, as on a GPU."""
    experts = GroupedExperts(4, 8, 6, bias=True, device="meta", dtype=BF16)
    x, sizes = torch.empty(20, 8, device="meta", dtype=BF16), torch.empty(4, device="meta", dtype=torch.int64)
    for y in (experts(x, sizes), experts(x, offs=sizes)):
        assert y.is_meta and y.shape == (20, 8) and y.dtype is BF16
    experts.to_empty(device="cpu")
    for p in experts.parameters():
        torch.nn.init.constant_(p, 100.0)
    experts.reset_parameters()
    for linear, bound in ((experts.gate_up, 8**-0.5), (experts.down, 6**-0.5)):
        for p in linear.parameters():
            assert 0.5 * bound < p.abs().max() <= bound
    with pytest.raises(ValueError, match="expected one of them, got both"):
        experts(x, sizes, offs=sizes)


def test_repr_and_errors() -> None:
    experts = GroupedExperts(4, 8, 6, "swiglu_oai", gate_up="interleaved", limit=7.0, device="meta")
    assert "activation=swiglu_oai, interleaved=True, limit=7.0" in repr(experts)
    assert [n for n, _ in experts.named_parameters()] == ["gate_up.weight", "down.weight"]
    assert experts.gate_up.weight.shape == (4, 12, 8) and experts.down.weight.shape == (4, 8, 6)
    with pytest.raises(ValueError, match="activation: expected one of swiglu, .*, got 'swish'"):
        GroupedExperts(4, 8, 6, "swish")
    with pytest.raises(ValueError, match="gate_up: expected one of concatenated, interleaved, apart, got 'fused'"):
        GroupedExperts(4, 8, 6, gate_up="fused")
    with pytest.raises(ValueError, match="limit: expected > 0, got -7.0"):
        GroupedExperts(4, 8, 6, limit=-7.0)
    with pytest.raises(ValueError, match="limit: expected none, as 'relu2' has no gate"):
        GroupedExperts(4, 8, 6, "relu2", limit=7.0)


def test_delayed_gradients_with_a_frozen_projection() -> None:
    experts = GroupedExperts(3, 4, 6, delay_wgrad_compute=True)
    experts.down.requires_grad_(False)
    experts(torch.randn(6, 4), [1, 2, 3]).sum().backward()
    experts.backward_dw()
    assert experts.down.weight.grad is None and experts.gate_up.weight.grad.any()


def test_more_dimensions() -> None:
    """As GroupedLinear takes them."""
    experts, x = GroupedExperts(3, 4, 6, bias=True), torch.randn(2, 3, 4)
    weights = torch.rand(6)
    y = experts(x, [1, 2, 3], weights)
    assert y.shape == x.shape and torch.equal(y.view(6, 4), experts(x.view(6, 4), [1, 2, 3], weights))


@pytest.mark.gpu
@pytest.mark.parametrize("options", ({}, {"bias": True}, {"gate_up": "apart"}, {"fuse_wgrad_accumulation": True}))
def test_no_synchronisation_and_graphs(options: dict[str, Any]) -> None:
    """Forward and backward, captured once, replayed with new routings."""
    device = torch.device("cuda")
    experts = GroupedExperts(8, 256, 128, device=device, dtype=BF16, **options)
    for p in experts.parameters():
        p.main_grad = torch.zeros(p.shape, device=device)
    x = torch.randn(64, 256, device=device, dtype=BF16).requires_grad_()
    weights = torch.rand(64, 2, device=device).requires_grad_()
    indices = [torch.randint(0, 9, (64, 2), device=device) for _ in range(3)]

    def step(index: Tensor) -> list[Tensor]:
        rows, row_map, offs = gmm.moe.permute(x, index, 8)
        y = gmm.moe.unpermute(experts(rows, weights=gmm.moe.permute_weights(weights, row_map), offs=offs), row_map)
        grads = torch.autograd.grad(y.float().square().sum(), (x, weights))
        return [y.detach(), *grads]  # a graph that lives on would bind backward to the stream of its leaves

    want = [step(index) for index in indices]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(indices[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    static, graph = indices[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(static)
    for index, values in zip(indices, want, strict=True):
        static.copy_(index)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, values, strict=True))
