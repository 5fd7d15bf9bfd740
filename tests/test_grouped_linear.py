"""gmm.nn.GroupedLinear, against a loop over the groups in fp64."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from check import seeded
from conftest import Target
from moe_cases import BF16, FP16, FP32
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gmm.nn import GroupedLinear

SPLITS = [5, 0, 9, 6]  # the tables' "one forced empty"
FORMS = ("list", "cpu", "sizes", "offs")
forms = pytest.mark.parametrize("form", FORMS)
per_group = pytest.mark.parametrize("parameter_per_group", (False, True), ids=("one_parameter", "parameter_per_group"))
CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(CPU, seed))


def splits_in(form: str, splits: list[int], device: torch.device) -> dict[str, Any]:
    """The arguments of forward."""
    sizes = torch.tensor(splits)
    return {
        "list": {"m_splits": splits},
        "cpu": {"m_splits": sizes},
        "sizes": {"m_splits": sizes.to(device)},
        "offs": {"offs": sizes.cumsum(0).to(device, torch.int32)},
    }[form]


def layer_of(device: torch.device, dtype: torch.dtype = FP32, sizes: tuple[int, int] = (16, 24), **options: Any):
    torch.manual_seed(0)
    return GroupedLinear(len(SPLITS), *sizes, device=device, dtype=dtype, **options)


def in_fp64(layer: GroupedLinear) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases of the groups as leaves."""
    tensors = []
    for name in ("weight", "bias"):
        if layer.parameter_per_group:
            found = [getattr(layer, f"{name}{i}", None) for i in range(layer.num_groups)]
        else:
            stacked = getattr(layer, name, None)
            found = [None] * layer.num_groups if stacked is None else stacked.unbind()
        tensors.append([t.detach().double().cpu().requires_grad_() for t in found if t is not None])
    return tensors[0], tensors[1]


def loop(x: Tensor, weights: list[Tensor], biases: list[Tensor], splits: list[int]) -> Tensor:
    parts = [
        nn.functional.linear(p, w, b) for p, w, b in zip(x.split(splits), weights, biases or [None] * len(weights))
    ]
    return torch.cat(parts)


def grads_of(layer: GroupedLinear, name: str, attribute: str) -> Tensor:
    """[E, ...] of the parameters' attribute grad or main_grad."""
    if not layer.parameter_per_group:
        return getattr(getattr(layer, name), attribute)
    return torch.stack([getattr(getattr(layer, f"{name}{i}"), attribute) for i in range(layer.num_groups)])


def near(result: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Group by group in norm. Of 16-bit factors, tensor cores make float32 sums that are 2^-16 off."""
    unit = 2.0**-15 if dtype == FP32 else 2.0**-7
    assert result.shape == exact.shape and result.isfinite().all()
    for r, e in zip(result.double().cpu(), exact, strict=True):
        assert (r - e).norm() <= unit * e.norm()


def check_step(layer: GroupedLinear, form: str, splits: list[int], dtype: torch.dtype, tail: int = 0) -> None:
    """One training step: result, gradients, main_grad; then backward_dw()."""
    device = next(layer.parameters()).device
    rows, fused = sum(splits), layer.fuse_wgrad_accumulation
    x = randn(rows + tail, layer.in_features).to(device, dtype).requires_grad_()
    dy = randn(rows + tail, layer.out_features, seed=1).to(device, dtype)
    start = randn(layer.num_groups, layer.out_features, layer.in_features, seed=2)
    weights = [p for name, p in layer.named_parameters() if name.startswith("weight")]
    if fused:
        for p, value in zip(weights, start.unbind() if layer.parameter_per_group else [start]):
            p.main_grad = value.to(device, copy=True)
    y = layer(x, **splits_in(form, splits, device))
    y.backward(dy)

    exact_weights, exact_biases = in_fp64(layer)
    leaf = x.detach()[:rows].double().cpu().requires_grad_()
    exact = loop(leaf, exact_weights, exact_biases, splits)
    exact.backward(dy[:rows].double().cpu())
    zeros = torch.zeros(tail, 1, dtype=torch.float64)
    near(y, torch.cat([exact.detach(), zeros.expand(tail, exact.shape[1])]), dtype)
    near(x.grad, torch.cat([leaf.grad, zeros.expand(tail, leaf.shape[1])]), dtype)
    if exact_biases:
        near(grads_of(layer, "bias", "grad"), torch.stack([b.grad for b in exact_biases]), dtype)
    dw = torch.stack([w.grad for w in exact_weights])
    if layer.delay_wgrad_compute:
        assert all(p.grad is None for p in weights)
        if fused:
            assert torch.equal(grads_of(layer, "weight", "main_grad").cpu(), start)
        layer.backward_dw()
    if fused:
        assert all(p.grad is None for p in weights)
        near(grads_of(layer, "weight", "main_grad"), start.double() + dw, FP32)
    else:
        near(grads_of(layer, "weight", "grad"), dw, dtype)


@per_group
@forms
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
@pytest.mark.parametrize("fused", (False, True), ids=("", "fused"))
@pytest.mark.parametrize("delayed", (False, True), ids=("", "delayed"))
def test_step(
    auto_target: Target,
    form: str,
    dtype: torch.dtype,
    bias: bool,
    fused: bool,
    delayed: bool,
    parameter_per_group: bool,
) -> None:
    """CONFORMANCE's module row at a small size."""
    layer = layer_of(
        *(auto_target.device, dtype),
        bias=bias,
        fuse_wgrad_accumulation=fused,
        delay_wgrad_compute=delayed,
        parameter_per_group=parameter_per_group,
    )
    check_step(layer, form, SPLITS, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ("list", "sizes"))
@pytest.mark.parametrize(("batch", "experts"), [(1, 3), (1, 6), (2, 3), (2, 6)])
@pytest.mark.parametrize("fused", (False, True), ids=("", "fused"))
@per_group
def test_step_at_full_size(form: str, batch: int, experts: int, fused: bool, parameter_per_group: bool) -> None:
    """That row as published: hidden 2048 to 8192, sequence 2048, one expert without tokens."""
    rows = 2048 * batch
    cuts = sorted(torch.randint(rows, (experts - 2,), generator=seeded(CPU)).tolist())
    splits = [end - start for start, end in itertools.pairwise([0, *cuts, rows])]
    splits.insert(1, 0)
    layer = GroupedLinear(
        *(experts, 2048, 8192, True),
        parameter_per_group=parameter_per_group,
        fuse_wgrad_accumulation=fused,
        device="cuda",
        dtype=BF16,
    )
    check_step(layer, form, splits, BF16)


@per_group
@pytest.mark.parametrize("form", ("sizes", "offs"))
@pytest.mark.parametrize("bias", (False, True), ids=("", "bias"))
def test_rows_of_no_group(auto_target: Target, form: str, bias: bool, parameter_per_group: bool) -> None:
    if auto_target.device.type == "cpu" and form == "sizes":
        pytest.skip("the host knows these sizes, which must sum to the rows")
    for fused in (False, True):
        layer = layer_of(
            auto_target.device, bias=bias, fuse_wgrad_accumulation=fused, parameter_per_group=parameter_per_group
        )
        check_step(layer, form, SPLITS, FP32, tail=7)


@per_group
@forms
def test_all_groups_empty(auto_target: Target, form: str, parameter_per_group: bool) -> None:
    """The graph is kept, and gradients are zeros, not missing: an all-reduce would wait for ever."""
    layer = layer_of(auto_target.device, bias=True, parameter_per_group=parameter_per_group)
    x = torch.empty(0, 16, device=auto_target.device, requires_grad=True)
    y = layer(x, **splits_in(form, [0] * 4, auto_target.device))
    assert y.shape == (0, 24) and y.requires_grad
    y.sum().backward()
    assert x.grad is not None and all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_leading_dimensions(auto_target: Target) -> None:
    layer = layer_of(auto_target.device)
    x = randn(4, 5, 16).to(auto_target.device)
    assert torch.equal(layer(x, SPLITS), layer(x.view(20, 16), SPLITS).view(4, 5, 24))


@forms
def test_expanded_gradient(auto_target: Target, form: str) -> None:
    layer = layer_of(auto_target.device, bias=True)
    layer(randn(20, 16).to(auto_target.device), **splits_in(form, SPLITS, auto_target.device)).sum().backward()
    assert torch.equal(layer.bias.grad[:, 0].cpu(), torch.tensor(SPLITS).float())


# Megatron's attributes


@per_group
@pytest.mark.parametrize("form", ("list", "sizes"))
def test_megatron_flags(auto_target: Target, form: str, parameter_per_group: bool) -> None:
    """A hook as Megatron's: what is marked as added is not added again, and the hook fires."""
    layer = layer_of(auto_target.device, BF16, fuse_wgrad_accumulation=True, parameter_per_group=parameter_per_group)
    x = randn(20, 16).to(auto_target.device, BF16)
    weights, fired = list(layer.parameters()), []

    def hook(p: nn.Parameter) -> None:
        assert p.grad is not None and p.grad.shape == p.shape
        if not p.grad_added_to_main_grad or getattr(p, "zero_out_wgrad", False):
            p.main_grad.add_(p.grad)
        p.grad = None
        fired.append(p)

    for p in weights:
        p.main_grad = torch.zeros(p.shape, device=p.device)
        p.register_post_accumulate_grad_hook(hook)

    def step(**options: Any) -> Tensor:
        for p in weights:
            p.grad_added_to_main_grad = False
        fired.clear()
        layer(x, **splits_in(form, SPLITS, auto_target.device), **options).sum().backward()
        assert len(fired) == len(weights) and all(p.grad_added_to_main_grad for p in weights)
        return grads_of(layer, "weight", "main_grad").clone()

    once = step()
    assert once.any() and not once[1].any()
    assert torch.equal(step(), 2 * once)
    assert torch.equal(step(is_first_microbatch=True), once)
    assert torch.equal(step(is_first_microbatch=False), 2 * once)
    for p in weights:
        p.zero_out_wgrad = True
    assert torch.equal(step(), 3 * once)
    for p in weights:
        p.overwrite_main_grad = True
        p.main_grad.fill_(float("nan"))
    assert torch.equal(step(), once)


def test_delayed_microbatches(auto_target: Target) -> None:
    """In the order of their backwards; hooks at the end of each."""
    layer = layer_of(auto_target.device, delay_wgrad_compute=True)
    calls: list[int] = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: calls.append(1))
    x = randn(2, 20, 16).to(auto_target.device)
    for i in range(2):
        layer(x[i], SPLITS).sum().backward()
    assert layer.weight.grad is None
    layer.backward_dw()
    first = layer.weight.grad.clone()
    layer.backward_dw()
    both = layer.weight.grad
    plain = layer_of(auto_target.device)
    plain(x[0], SPLITS).sum().backward()
    torch.testing.assert_close(first, plain.weight.grad)
    plain(x[1], SPLITS).sum().backward()
    torch.testing.assert_close(both, plain.weight.grad)
    assert len(calls) == 2
    with pytest.raises(RuntimeError, match="backward_dw: expected a backward before it"):
        layer.backward_dw()
    plain.backward_dw()  # nothing is delayed, and nothing is done


def test_frozen_weights(auto_target: Target) -> None:
    """Gradients of x and bias alone; main_grad need not be there."""
    layer = layer_of(auto_target.device, bias=True, fuse_wgrad_accumulation=True)
    layer.weight.requires_grad_(False)
    x = randn(20, 16).to(auto_target.device).requires_grad_()
    layer(x, SPLITS).sum().backward()
    assert x.grad is not None and layer.bias.grad is not None and layer.weight.grad is None


# State


@pytest.mark.parametrize("bias", (False, True))
def test_state_dict_both_ways(bias: bool) -> None:
    """Transformer Engine's form, with its extra state, and one parameter."""
    one, several = layer_of(CPU, bias=bias), layer_of(CPU, bias=bias, parameter_per_group=True)
    assert set(several.state_dict()) == {f"{n}{i}" for n in ("weight", "bias")[: 1 + bias] for i in range(4)}
    state = {**several.state_dict(), "_extra_state": torch.zeros(3)}
    for assign in (False, True):
        target = layer_of(CPU, bias=bias)
        assert target.load_state_dict(state, assign=assign).missing_keys == []
        assert torch.equal(target.weight, torch.stack([several.get_parameter(f"weight{i}") for i in range(4)]))
        target = nn.Sequential(layer_of(CPU, bias=bias, parameter_per_group=True))
        target.load_state_dict({f"0.{k}": v for k, v in one.state_dict().items()}, assign=assign)
        assert torch.equal(target[0].weight2, one.weight[2]) and len(list(target.parameters())) == 4 * (1 + bias)
        assert not bias or torch.equal(target[0].bias3, one.bias[3])
    for layer in (one, several):
        layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="Missing key.*weight"):
        one.load_state_dict({k: v for k, v in state.items() if k != "weight2"})
    whole = one.state_dict()
    for wrong in (torch.cat([whole["weight"]] * 2), whole["weight"][:3], torch.ones(())):
        with pytest.raises(RuntimeError, match="weight: expected 4 groups, got shape"):
            several.load_state_dict({**whole, "weight": wrong})
    with pytest.raises(RuntimeError, match="weight0, ...: expected one shape for all groups"):
        one.load_state_dict({**several.state_dict(), "weight1": torch.ones(3)})


@per_group
def test_meta_device_and_reset(parameter_per_group: bool) -> None:
    layer = GroupedLinear(3, 64, 32, True, parameter_per_group=parameter_per_group, device="meta", dtype=BF16)
    assert all(p.is_meta and p.dtype == BF16 for p in layer.parameters())
    assert layer(torch.empty(7, 64, device="meta", dtype=BF16), [3, 0, 4]).shape == (7, 32)
    layer.to_empty(device="cpu").reset_parameters()
    for p in layer.parameters():
        assert 0.8 / 8 < p.abs().max() <= 1 / 8 and p.float().std() > 0.8 / 8 / 3**0.5


def test_copies_and_repr() -> None:
    layer = GroupedLinear(3, 64, 32, parameter_per_group=True, sm_margin=8)
    sizes = "num_groups=3, in_features=64, out_features=32, bias=False"
    assert repr(layer) == f"GroupedLinear({sizes}, parameter_per_group=True, sm_margin=8)"
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), other.parameters(), strict=True))


# Beside autograd


@per_group
@forms
@pytest.mark.parametrize("fused", (False, True), ids=("", "fused"))
@pytest.mark.parametrize("reentrant", (False, True), ids=("", "reentrant"))
def test_checkpoint(auto_target: Target, form: str, parameter_per_group: bool, fused: bool, reentrant: bool) -> None:
    layer = layer_of(auto_target.device, fuse_wgrad_accumulation=fused, parameter_per_group=parameter_per_group)
    x = randn(20, 16).to(auto_target.device).requires_grad_()
    splits, results = splits_in(form, SPLITS, auto_target.device), []
    for again in (False, True):
        for p in layer.parameters():
            p.grad, p.main_grad = None, torch.zeros_like(p)
        x.grad = None

        def run(x: Tensor) -> Tensor:
            return layer(x, **splits).square()

        y = checkpoint(run, x, use_reentrant=reentrant) if again else run(x)
        y.sum().backward()
        results.append((x.grad, grads_of(layer, "weight", "main_grad" if fused else "grad")))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][1].any()


@per_group
@forms
@pytest.mark.parametrize("fused", (False, True), ids=("", "fused"))
def test_autocast(auto_target: Target, form: str, parameter_per_group: bool, fused: bool) -> None:
    """Computes in autocast's dtype; gradients in the parameters' dtype, main_grad in float32."""
    layer = layer_of(
        auto_target.device, bias=True, parameter_per_group=parameter_per_group, fuse_wgrad_accumulation=fused
    )
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p)
    x = randn(20, 16).to(auto_target.device).requires_grad_()
    with torch.autocast(auto_target.device.type, dtype=BF16):
        y = layer(x, **splits_in(form, SPLITS, auto_target.device))
    assert y.dtype == BF16
    y.float().square().sum().backward()
    weights, biases = in_fp64(layer)
    leaf = x.detach().cpu().double().requires_grad_()
    exact = loop(leaf, weights, biases, SPLITS)
    near(y.detach(), exact.detach(), BF16)
    exact.square().sum().backward()
    assert x.grad.dtype == FP32
    for result, want in (
        (x.grad, leaf.grad),
        (grads_of(layer, "weight", "main_grad" if fused else "grad"), torch.stack([w.grad for w in weights])),
        (grads_of(layer, "bias", "grad"), torch.stack([b.grad for b in biases])),
    ):
        assert result.dtype == FP32 and (result.cpu() - want).norm() <= 2.0**-6 * want.norm()


@per_group
@forms
def test_autocast_of_another_16_bit_dtype(auto_target: Target, form: str, parameter_per_group: bool) -> None:
    layer = layer_of(auto_target.device, BF16, parameter_per_group=parameter_per_group)
    x = randn(20, 16).to(auto_target.device, BF16).requires_grad_()
    with torch.autocast(auto_target.device.type, dtype=FP16):
        y = layer(x, **splits_in(form, SPLITS, auto_target.device))
    y.sum().backward()
    assert y.dtype == FP16 and x.grad.dtype == BF16 and all(p.grad.dtype == BF16 for p in layer.parameters())
    leaf = x.detach().double().cpu()
    want = torch.stack([part.sum(0).expand(24, 16) for part in leaf.split(SPLITS)])
    near(grads_of(layer, "weight", "grad"), want, BF16)


@per_group
@forms
def test_compile(form: str, parameter_per_group: bool) -> None:
    layer = layer_of(CPU, bias=True, parameter_per_group=parameter_per_group)
    compiled = torch.compile(layer, fullgraph=form != "cpu", dynamic=True)
    for splits in (SPLITS, [8, 8, 1, 11]):
        x = randn(sum(splits), 16).requires_grad_()
        results = []
        for function in (layer, compiled):
            layer.zero_grad()
            y = function(x, **splits_in(form, splits, CPU))
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_compile_with_main_grad() -> None:
    """Outside of compiled code: a break in the graph, and right."""
    layer = layer_of(CPU, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    torch.compile(lambda x: layer(x.sin(), SPLITS).square())(randn(20, 16)).sum().backward()
    compiled = layer.weight.main_grad.clone()
    layer.weight.main_grad.zero_()
    layer(randn(20, 16).sin(), SPLITS).square().sum().backward()
    torch.testing.assert_close(compiled, layer.weight.main_grad)


@pytest.mark.parametrize("form", ("list", "offs"))
@pytest.mark.parametrize("options", ({}, {"delay_wgrad_compute": True}, {"fuse_wgrad_accumulation": True}), ids=str)
def test_frozen_experts(options: dict[str, bool], form: str) -> None:
    """Get no gradient, and need no main_grad; the others' is as ever."""
    layers = [layer_of(CPU, parameter_per_group=True, **options) for _ in range(2)]
    layers[1].weight2.requires_grad_(False)
    for layer in layers:
        for p in layer.parameters():
            if options.get("fuse_wgrad_accumulation") and p.requires_grad:
                p.main_grad = torch.ones_like(p)
        layer(randn(20, 16), **splits_in(form, SPLITS, CPU)).square().sum().backward()
        layer.backward_dw()
    for (name, p), q in zip(layers[1].named_parameters(), layers[0].parameters(), strict=True):
        if name == "weight2":
            assert p.grad is None and not hasattr(p, "main_grad")
        elif options.get("fuse_wgrad_accumulation"):
            torch.testing.assert_close(p.main_grad, q.main_grad)
        else:
            torch.testing.assert_close(p.grad, q.grad)


def test_delayed_gradients_of_changed_tensors() -> None:
    x = torch.ones(20, 16)
    for form, change in (("list", x.zero_), ("offs", None)):
        layer, splits = layer_of(CPU, delay_wgrad_compute=True), splits_in(form, SPLITS, CPU)
        layer(x, **splits).sum().backward()
        (change or splits["offs"].zero_)()
        with pytest.raises(RuntimeError, match="backward_dw: expected x, .*, got one changed in place"):
            layer.backward_dw()
        assert layer.weight.grad is None


def test_delayed_gradients_under_another_autocast() -> None:
    layer, x = layer_of(CPU, BF16, delay_wgrad_compute=True), randn(20, 16).to(BF16)
    with torch.autocast("cpu", torch.float16):
        y = layer(x, SPLITS)
    y.sum().backward()
    layer.backward_dw()
    assert layer.weight.grad.dtype is BF16
    want = torch.stack([rows.sum(0).expand(24, 16) for rows in x.double().split(SPLITS)])
    torch.testing.assert_close(layer.weight.grad.double(), want, rtol=2.0**-7, atol=2.0**-6)


@pytest.mark.parametrize("options", ({}, {"fuse_wgrad_accumulation": True}), ids=str)
def test_no_second_derivative_of_lists(options: dict[str, bool]) -> None:
    layer, x = layer_of(CPU, **options), randn(20, 16).requires_grad_()
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    with pytest.raises(RuntimeError, match="GroupedLinear: expected a backward without create_graph"):
        torch.autograd.grad(layer(x, SPLITS).sum(), x, create_graph=True)


def test_errors() -> None:
    layer, x = layer_of(CPU), torch.zeros(20, 16)
    offs = torch.tensor(SPLITS).cumsum(0)
    for error, call, text in (
        (ValueError, lambda: layer(x), "m_splits, offs: expected one of them, got none"),
        (ValueError, lambda: layer(x, SPLITS, offs=offs), "m_splits, offs: expected one of them, got both"),
        (ValueError, lambda: layer(x, [20]), r"m_splits: expected 4 sizes \(num_groups\), got 1"),
        (ValueError, lambda: layer(x, [5, -1, 9, 7]), r"m_splits\[1\]: expected an integer >= 0, got -1"),
        (ValueError, lambda: layer(x, [5, 0.0, 8, 7]), r"m_splits\[1\]: expected an integer >= 0, got 0.0"),
        (RuntimeError, lambda: layer(x, torch.ones(4) * 5), "m_splits: expected integers, got float32"),
        (ValueError, lambda: layer(x, [5, 0, 9, 7]), r"m_splits: expected sizes that sum to 20 .*, got 21"),
        (ValueError, lambda: layer(x, torch.tensor([5, 0, 9, 7])), "m_splits: expected sizes that sum to 20"),
        (RuntimeError, lambda: layer(x[:, :8], SPLITS), r"x: expected shape \[..., rows, 16\], got \[20, 8\]"),
        (RuntimeError, lambda: layer(x, offs=offs[:3]), r"offs: expected length 4 \(the groups of b\), got 3"),
        (RuntimeError, lambda: layer(x.half(), offs=offs), r"x: expected float32 \(the dtype of weight\), got float16"),
        (RuntimeError, lambda: layer(x.half(), SPLITS), r"x: expected float32 \(the dtype of weight\), got float16"),
        (RuntimeError, lambda: layer(x, offs=[5, 10, 15, 20]), "offs: expected a tensor, got list"),
        (ValueError, lambda: GroupedLinear(-1, 2, 3), "num_groups: expected an integer >= 0, got -1"),
        (ValueError, lambda: GroupedLinear(1, 2, 3.0), "out_features: expected an integer >= 0, got 3.0"),
    ):
        with pytest.raises(error, match=text):
            call()
    assert GroupedLinear(torch.tensor(SPLITS).numpy()[0], 2, 3).num_groups == SPLITS[0]  # an integer of numpy's
    fused = layer_of(CPU, fuse_wgrad_accumulation=True, parameter_per_group=True)
    with pytest.raises(RuntimeError, match=r"weight0.main_grad: expected a tensor of shape \[24, 16\], got none"):
        fused(x, SPLITS)
    for p in fused.parameters():
        p.main_grad = torch.zeros(24, 16, dtype=BF16)
    for splits in ({"m_splits": SPLITS}, {"offs": offs}):
        with pytest.raises(
            RuntimeError, match=r"weight0.main_grad: expected float32 \(the dtype of x\).*, got bfloat16"
        ):
            fused(x, **splits)
    with torch.no_grad():
        fused(x, SPLITS)


def test_no_groups() -> None:
    layer = GroupedLinear(0, 16, 24)
    assert layer(torch.zeros(0, 16), []).shape == (0, 24)
    for sizes in ((0, 24), (16, 0)):
        y = GroupedLinear(2, *sizes)(torch.zeros(5, sizes[0]), [2, 3])
        assert y.shape == (5, sizes[1]) and not y.any()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", (False, True), ids=("", "fused"))
@pytest.mark.parametrize("form", ("list", "sizes", "offs"))
@per_group
def test_no_synchronisation(form: str, fused: bool, parameter_per_group: bool) -> None:
    device = torch.device("cuda")
    layer = layer_of(device, BF16, bias=True, fuse_wgrad_accumulation=fused, parameter_per_group=parameter_per_group)
    for p in layer.parameters():
        p.main_grad = torch.zeros(p.shape, device=device)
    x, splits = randn(20, 16).to(device, BF16).requires_grad_(), splits_in(form, SPLITS, device)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            layer(x, **splits).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
