"""gmm.moe.feed_forward: values and gradients against fp64, and that SwiGLU takes its own ops wherever it may."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from check import seeded
from conftest import Target
from moe_cases import BF16, FEED_FORWARD_UNIT, FP16, FP32, exact_feed_forward
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gmm
from gmm.moe import KINDS, feed_forward
from gmm.nn import GroupedExperts, GroupedLinear

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
H, FFN, SIZES, TAIL = 16, 24, (5, 0, 9, 3), 4  # the second expert gets no row, the last rows are no expert's
UNIT = FEED_FORWARD_UNIT
OPS = torch.ops.gmm
both_layouts = pytest.mark.parametrize("trans_b", (True, False))


class Call:
    """The operands of a call. NaN is in all rows of no expert."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype = FP32,
        weights_dtype: torch.dtype | None = FP32,
        trans_b: bool = True,
        sizes: Sequence[int] = SIZES,
        hidden: int = H,
        ffn: int = FFN,
        offs_dtype: torch.dtype = torch.int32,
    ) -> None:
        generator, experts = seeded(CPU), len(sizes)
        self.ends = list(itertools.accumulate(sizes))
        self.last = self.ends[-1] if sizes else 0
        rows = self.last + TAIL

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(device, dtype)

        x, dy = randn(rows, hidden), randn(rows, hidden)
        gate_up, down = randn(experts, 2 * ffn, hidden, scale=max(hidden, 1) ** -0.5), randn(experts, hidden, ffn)
        weights = torch.rand(rows, generator=generator).to(device, weights_dtype or FP32)
        for t in (x, dy, weights):
            t[self.last :] = float("nan")
        if not trans_b:
            gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
        self.leaves = [x, gate_up, down] + ([] if weights_dtype is None else [weights])
        self.dy, self.trans_b = dy, trans_b
        self.offs = torch.tensor(self.ends, dtype=offs_dtype, device=device)

    def run(self, function: Callable[..., Tensor] = feed_forward, **options: Any) -> Tensor:
        x, gate_up, down, *weights = self.leaves
        return function(x, gate_up, down, self.offs, *weights, trans_b=self.trans_b, **options)

    def composed(self) -> Tensor:
        x, gate_up, down, *weights = self.leaves
        h = gmm.grouped_mm(x, gate_up, self.offs, trans_b=self.trans_b)
        h = gmm.moe.gated_activation(h, weights=weights[0] if weights else None, offs=self.offs)
        return gmm.grouped_mm(h, down, self.offs, trans_b=self.trans_b)

    def results(self, run: Callable[..., Tensor], **options: Any) -> list[Tensor]:
        """Of run, and all gradients."""
        self.leaves = [t.detach().requires_grad_() for t in self.leaves]
        y = run(**options)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]

    def exact(self) -> list[Tensor]:
        """The same in fp64."""
        return exact_feed_forward(self.leaves, self.ends, self.dy, self.trans_b)


def check(call: Call, **options: Any) -> None:
    """Values and gradients; rows of no expert, and the gradients of an expert without rows, are zeros."""
    for i, (result, exact) in enumerate(zip(call.results(call.run, **options), call.exact(), strict=True)):
        like = [call.leaves[0], *call.leaves][i]
        assert result.dtype is like.dtype and result.shape == like.shape == exact.shape and result.is_contiguous()
        assert result.isfinite().all() and not result[exact == 0].any()
        unit = max(UNIT[call.leaves[0].dtype], UNIT[result.dtype])
        assert (result.double() - exact).norm() <= unit * exact.norm(), i


class Ran(TorchDispatchMode):
    """The ops of gmm that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "gmm":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32))
@pytest.mark.parametrize("weights_dtype", (None, FP32, BF16))
@both_layouts
def test_against_fp64(
    grouped_target: Target, dtype: torch.dtype, weights_dtype: torch.dtype | None, trans_b: bool
) -> None:
    if dtype not in grouped_target.dtypes:
        pytest.skip("CUTLASS takes 16 bits")
    with gmm.use_backend(grouped_target.backend):
        check(Call(grouped_target.device, dtype, weights_dtype, trans_b))
        check(Call(grouped_target.device, dtype, weights_dtype, trans_b, offs_dtype=torch.int64))
        assert grouped_target.backend in ("auto", gmm.last_backend().split(":")[0])


@pytest.mark.parametrize("kind", KINDS)
@both_layouts
def test_other_kinds_are_the_functions_one_after_the_other(kind: str, trans_b: bool) -> None:
    call = Call(CPU, trans_b=trans_b)
    x, gate_up, down, weights = call.leaves
    for options in ({}, {"interleaved": True}, {"limit": 0.5}):
        if not KINDS[kind].gated:
            options, gate_up = {}, gate_up[:, :FFN] if trans_b else gate_up[:, :, :FFN]
        h = gmm.grouped_mm(x, gate_up, call.offs, trans_b=trans_b)
        h = gmm.moe.gated_activation(h, kind, weights=weights, offs=call.offs, **options)
        want = gmm.grouped_mm(h, down, call.offs, trans_b=trans_b)
        y = feed_forward(x, gate_up, down, call.offs, weights, kind=kind, trans_b=trans_b, **options)
        assert y.any() and torch.equal(y, want)


@pytest.mark.parametrize("sizes", ((), (0, 0), (3, 0)))
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_nothing(auto_target: Target, sizes: Sequence[int], dtype: torch.dtype) -> None:
    """No experts, no row of any, no rows at all, no columns."""
    call = Call(auto_target.device, dtype, sizes=sizes)
    results = call.results(call.run)
    assert all(t.isfinite().all() and (t.any() == (sum(sizes) > 0)) for t in results)
    for hidden, ffn in ((0, FFN), (H, 0)):
        call = Call(auto_target.device, dtype, sizes=sizes, hidden=hidden, ffn=ffn)
        assert not any(t.any() for t in call.results(call.run))
    call.leaves = [call.leaves[0][:0], *call.leaves[1:3], call.leaves[3][:0]]
    call.dy, call.offs = call.dy[:0], torch.zeros_like(call.offs)
    assert not any(t.any() for t in call.results(call.run))


def test_only_the_gradients_that_are_needed(auto_target: Target) -> None:
    call = Call(auto_target.device, BF16)
    want = call.results(call.run)[1:]
    for needed in itertools.product((False, True), repeat=4):
        call.leaves = [t.detach().requires_grad_(need) for t, need in zip(call.leaves, needed, strict=True)]
        with Ran() as ran:
            y = call.run()
            if any(needed):
                y.backward(call.dy)
        for leaf, need, grad in zip(call.leaves, needed, want, strict=True):
            assert torch.equal(leaf.grad, grad) if need else leaf.grad is None
        needs_h = needed[0] or needed[1] or needed[3]
        products = 1 + needed[2] + needed[1] + needed[0]
        assert sorted(ran.names) == [*["grouped_mm"] * products, "moe_swiglu", *["moe_swiglu_backward"] * needs_h]


def test_without_grad_nothing_is_kept(auto_target: Target) -> None:
    call = Call(auto_target.device)
    want = call.results(call.run)[0]
    for region in (torch.no_grad(), torch.inference_mode()):
        with region:
            assert torch.equal(call.run(), want)
    args = call.leaves[0].detach(), call.leaves[1].detach().mT, call.offs, call.leaves[3].detach()
    kept, dropped = (OPS.moe_swiglu(*args, keep, 0, "auto") for keep in (True, False))
    assert kept[0].shape == (len(want), 2 * FFN) and dropped[0].numel() == 0 and torch.equal(kept[1], dropped[1])
    assert not kept[0][call.last :].any() and not kept[1][call.last :].any()


def test_parameters_are_saved_as_they_are() -> None:
    """What offloads saved activations tells parameters apart by their type."""
    call = Call(CPU)
    call.leaves = [nn.Parameter(t) for t in call.leaves]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call.run()
    assert all(any(t is leaf for t in saved) for leaf in call.leaves[1:3])


@pytest.mark.parametrize(
    ("needs", "kept"),
    (((0,), (1, 2, 3)), ((1,), (0, 2, 3)), ((2,), ()), ((3,), (2, 3)), ((0, 2), (1, 2, 3))),
    ids=str,
)
def test_what_is_saved(needs: tuple[int, ...], kept: tuple[int, ...]) -> None:
    """Only what the gradients asked for are made of: the rest may be freed, or changed. With frozen experts not x."""
    call = Call(CPU)
    call.leaves = [t.detach().nan_to_num(1.0).requires_grad_(i in needs) for i, t in enumerate(call.leaves)]
    call.dy.nan_to_num_(1.0)
    leaves = [call.leaves[i] for i in needs]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = call.run()
    assert {i for i, leaf in enumerate(call.leaves) if any(t is leaf for t in saved)} == set(kept)
    want = torch.autograd.grad(call.composed(), leaves, call.dy)
    with torch.no_grad():
        for i, leaf in enumerate(call.leaves):
            if i not in kept:
                leaf.fill_(float("nan"))
    for ours, theirs in zip(torch.autograd.grad(y, leaves, call.dy, create_graph=True), want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_peak_memory() -> None:
    """h and y are let go of before the gradients of x and gate_up are made, as by the functions one after the other."""
    call = Call(CPU, BF16, sizes=(64,) * 8, hidden=256, ffn=96)
    call.leaves = [t.detach().nan_to_num(1.0).requires_grad_() for t in call.leaves]
    call.dy.nan_to_num_(1.0)

    def peak(run: Callable[[], Tensor]) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            torch.autograd.grad(run(), call.leaves, call.dy)
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))

    assert 0 < peak(call.run) <= peak(call.composed)


def test_gradients_in_the_layout_of_the_weights(auto_target: Target) -> None:
    call = Call(auto_target.device)
    want = call.results(call.run)
    call.leaves[1:3] = [t.detach().mT.contiguous().mT for t in call.leaves[1:3]]
    call.leaves[3] = torch.stack([call.leaves[3].detach()] * 2, dim=1)[:, 0]
    got = call.results(call.run)
    assert [t.stride() for t in got[2:4]] == [t.stride() for t in call.leaves[1:3]]
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)
    call.dy = call.dy[:, :1].expand(-1, H)
    assert call.results(call.run)[1].isfinite().all()


@both_layouts
def test_second_derivatives(auto_target: Target, trans_b: bool) -> None:
    """Those of the functions one after the other, also where an operand is made of another."""
    call = Call(auto_target.device, trans_b=trans_b)
    call.leaves = [t.detach().requires_grad_() for t in call.leaves]
    for dependent in (False, True):
        results = []
        leaves, dy = call.leaves, call.dy.clone().requires_grad_()
        for run in (call.run, call.composed):
            x, gate_up, down, weights = leaves
            if dependent:
                call.leaves = [x * weights[:, None], gate_up, down * gate_up.mean(), weights.sin()]
            first = torch.autograd.grad(run(), leaves, dy, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), [*leaves, dy])
            results.append([*first, *second])
            call.leaves = leaves
        for ours, theirs in zip(*results, strict=True):
            assert theirs.any() and theirs[: call.last].isfinite().all() or dependent
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=dependent)


class Compiler:
    """aot_eager, with the ops of gmm in each graph that it is given."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
        targets = {str(node.target) for part in parts for node in part.graph.nodes}
        self.graphs.append(sorted(target for target in targets if target.startswith("gmm.")))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)


def test_compile() -> None:
    """One graph, with its backward, for every number of rows; one more without weights."""
    compiler = Compiler()
    compiled = torch.compile(feed_forward, fullgraph=True, dynamic=True, backend=compiler)
    for sizes, weights_dtype in ((SIZES, FP32), ((1, 2, 3, 4), FP32), (SIZES, None)):
        call = Call(CPU, weights_dtype=weights_dtype, sizes=sizes)
        for a, b in zip(call.results(call.run, function=compiled), call.results(call.run), strict=True):
            torch.testing.assert_close(a, b)
    graph = ["gmm.grouped_mm.default", "gmm.moe_swiglu.default", "gmm.moe_swiglu_backward.default"]
    assert compiler.graphs == [graph] * (3 if torch.__version__.startswith("2.10.") else 2)  # which has one for each


def test_compiled_experts() -> None:
    experts, call, compiler = experts_of(Call(CPU)), Call(CPU), Compiler()
    compiled = torch.compile(experts, fullgraph=True, backend=compiler)
    with torch.no_grad():
        args, options = call.leaves[:1], {"weights": call.leaves[3], "offs": call.offs}
        torch.testing.assert_close(compiled(*args, **options), experts(*args, **options))
    assert compiler.graphs == [["gmm.grouped_mm.default", "gmm.moe_swiglu.default"]]


@both_layouts
def test_opcheck(trans_b: bool) -> None:
    call = Call(CPU, trans_b=trans_b)
    x, gate_up, down, weights = call.leaves
    w, w_backward = (gate_up.mT, down) if trans_b else (gate_up, down.mT)
    for factors, keep in ((weights, True), (None, False)):
        h, _ = OPS.moe_swiglu(x, w, call.offs, factors, True, 0, "auto")
        torch.library.opcheck(OPS.moe_swiglu.default, (x[: call.last], w, call.offs, None, keep, 0, "auto"))
        dy = call.dy[: call.last]
        factors = None if factors is None else factors[: call.last]
        args = dy, w_backward, h[: call.last], call.offs, factors, 0, "auto"
        torch.library.opcheck(OPS.moe_swiglu_backward.default, args)


def test_autocast(auto_target: Target) -> None:
    """Products in autocast's dtype, gradients in those of the operands; backward within the region, too."""
    call = Call(auto_target.device)
    low = Call(auto_target.device, BF16)
    want = low.results(low.run)
    for within in (False, True):
        call.leaves = [t.detach().requires_grad_() for t in call.leaves]
        with torch.autocast(auto_target.device.type, BF16):
            y = call.run()
            grads = torch.autograd.grad(y, call.leaves, low.dy) if within else ()
        grads = grads or torch.autograd.grad(y, call.leaves, low.dy)
        assert y.dtype is BF16 and all(g.dtype is FP32 for g in grads)
        for ours, theirs in zip((y.detach(), *grads), want, strict=True):
            torch.testing.assert_close(ours, theirs.to(ours.dtype))


def test_transforms() -> None:
    """Those that gated_activation() has: vmap. The others raise."""
    call = Call(CPU)
    x, gate_up, down, weights = call.leaves

    def run(x: Tensor) -> Tensor:
        return feed_forward(x, gate_up, down, call.offs, weights)

    torch.testing.assert_close(torch.func.vmap(run)(torch.stack([x, 2 * x]))[1], run(2 * x))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: run(x).sum())(x)
    with pytest.raises(NotImplementedError, match="feed_forward: expected tensors without tangents"):
        torch.func.jvp(run, (x,), (x,))
    experts = GroupedExperts(len(SIZES), H, FFN)
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="GroupedExperts: expected tensors without tangents"),
    ):
        experts(torch.autograd.forward_ad.make_dual(x, x), offs=call.offs)


def test_backend_that_cannot() -> None:
    call = Call(CPU, BF16)
    with (
        gmm.use_backend("cutlass"),
        pytest.raises(RuntimeError, match="'cutlass' cannot take this call: it needs CUDA"),
    ):
        call.run()


def test_errors() -> None:
    call = Call(CPU)
    x, gate_up, down, weights = call.leaves
    offs = call.offs
    for args, options, text in (
        ((x, gate_up, down, offs), {"kind": "swish"}, "kind: expected one of swiglu, .*, got 'swish'"),
        ((x, gate_up, down, offs), {"limit": 0.0}, "limit: expected > 0, got 0.0"),
        ((x, gate_up, down, offs), {"kind": "relu2", "interleaved": True}, "interleaved: expected none"),
    ):
        with pytest.raises(ValueError, match=text):
            feed_forward(*args, **options)
    for args, options, text in (
        ((x[0], gate_up, down, offs), {}, "x: expected 2 dimensions, got 1"),
        ((x, gate_up[0], down, offs), {}, "gate_up: expected 3 dimensions, got 2"),
        ((x, gate_up, down[0], offs), {}, "down: expected 3 dimensions, got 2"),
        ((x, gate_up[:, 1:], down, offs), {}, r"gate_up: expected shape \[4, 48, 16\], got \[4, 47, 16\]"),
        ((x, gate_up, down, offs), {"kind": "silu"}, r"gate_up: expected shape \[4, 24, 16\], got \[4, 48, 16\]"),
        ((x, gate_up, down, offs), {"trans_b": False}, r"gate_up: expected shape \[4, 16, 32\], got \[4, 48, 16\]"),
        ((x, gate_up, down[:, 1:], offs), {}, r"down: expected shape \[4, 16, 24\], got \[4, 15, 24\]"),
        ((x.double(), gate_up, down, offs), {}, "x: expected bfloat16, float16 or float32, got float64"),
        ((x, gate_up.half(), down, offs), {}, r"gate_up: expected float32 \(the dtype of x\), got float16"),
        ((x, gate_up, down, None), {}, "offs: expected a tensor, got NoneType"),
        ((x, gate_up, down, offs.to("meta")), {}, "offs: expected a tensor on cpu .*, got one on meta"),
        ((x, gate_up, down, offs, weights.to("meta")), {}, "weights: expected a tensor on cpu .*, got one on meta"),
        ((x, gate_up, down.half(), offs), {}, r"down: expected float32 \(the dtype of x\), got float16"),
        ((x, gate_up.to("meta"), down, offs), {}, r"gate_up: expected a tensor on cpu .*, got one on meta"),
        ((x, gate_up, down, offs[1:]), {}, r"offs: expected shape \[4\] \(the experts of gate_up\), got \[3\]"),
        ((x, gate_up, down, offs.float()), {}, "offs: expected int32 or int64, got float32"),
        ((x, gate_up, down, offs, weights[1:]), {}, r"weights: expected shape \[21\] .*, got \[20\]"),
        ((x, gate_up, down, offs, weights.long()), {}, "weights: expected bfloat16, .*, got int64"),
        ((x, gate_up, down, offs), {"sm_margin": -1}, "sm_margin: expected >= 0, got -1"),
    ):
        with pytest.raises(RuntimeError, match=text):
            feed_forward(*args, **options)
    h = torch.zeros(len(x), 2 * FFN)
    for op, args, text in (
        (OPS.moe_swiglu, (x, gate_up.mT[:, :, 1:], offs, None, True), "w: expected an even number of columns"),
        (OPS.moe_swiglu_backward, (x, down, h[1:], offs, None), r"h: expected shape \[21, 48\] and float32"),
    ):
        with pytest.raises(RuntimeError, match=text):
            op(*[t.to("meta") if isinstance(t, Tensor) else t for t in args], 0, "auto")


# The module, and gradients that do not go to autograd.


def experts_of(call: Call, **options: Any) -> GroupedExperts:
    experts = GroupedExperts(len(SIZES), H, FFN, device=call.offs.device, dtype=call.leaves[0].dtype, **options)
    experts.load_state_dict({"gate_up.weight": call.leaves[1], "down.weight": call.leaves[2]})
    return experts


@pytest.mark.parametrize("delayed", (False, True), ids=("", "delayed"))
@pytest.mark.parametrize("fused", (False, True), ids=("", "main_grad"))
def test_owners(auto_target: Target, fused: bool, delayed: bool) -> None:
    """Gradients where GroupedLinear puts them, from one call; overwritten in the first microbatch."""
    call = Call(auto_target.device, BF16)
    want = call.results(call.run)
    experts = experts_of(call, fuse_wgrad_accumulation=fused, delay_wgrad_compute=delayed)
    projections = experts.gate_up, experts.down
    for linear in projections:
        linear.weight.main_grad = torch.full_like(linear.weight, 9.0, dtype=FP32)
    x, weights = (call.leaves[i].detach().requires_grad_() for i in (0, 3))
    for first in (True, False):
        with Ran() as ran:
            y = experts(x, weights=weights, offs=call.offs, is_first_microbatch=first)
            y.backward(call.dy)
        assert {"moe_swiglu", "moe_swiglu_backward"} <= set(ran.names)
        experts.backward_dw()
    assert torch.equal(y, want[0]) and torch.equal(x.grad, 2 * want[1]) and torch.equal(weights.grad, 2 * want[4])
    for linear, grad in zip(projections, want[2:4], strict=True):
        assert (linear.weight.grad is None) == fused
        ours = linear.weight.main_grad if fused else linear.weight.grad
        assert (ours - 2 * grad).norm() <= 2.0**-7 * ours.norm()


def test_owners_errors_and_frozen_weights() -> None:
    call = Call(CPU)
    want = call.results(call.run)
    experts = experts_of(call, fuse_wgrad_accumulation=True)
    x = call.leaves[0].detach()[: call.last].requires_grad_()
    for missing in ("gate_up", "down"):
        with pytest.raises(RuntimeError, match="weight.main_grad: expected a tensor of shape"):
            experts(x, offs=call.offs)
        weight = getattr(experts, missing).weight
        weight.main_grad = torch.zeros_like(weight)
    y = experts(x, offs=call.offs)
    with pytest.raises(RuntimeError, match="GroupedLinear: expected a backward without create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    experts.down.fuse_wgrad_accumulation = False  # one of two
    experts(call.leaves[0], weights=call.leaves[3], offs=call.offs).backward(call.dy)
    torch.testing.assert_close(experts.gate_up.weight.main_grad, want[2])
    torch.testing.assert_close(experts.down.weight.grad, want[3])
    experts.gate_up.weight.requires_grad_(False)
    experts(call.leaves[0], weights=call.leaves[3], offs=call.offs).backward(call.dy)
    torch.testing.assert_close(experts.gate_up.weight.main_grad, want[2])
    compiled = torch.compile(experts, backend="aot_eager")
    torch.testing.assert_close(compiled(x, offs=call.offs), experts(x, offs=call.offs))


@pytest.mark.parametrize("fused", (False, True), ids=("delayed", "main_grad"))
def test_owners_under_autocast(auto_target: Target, fused: bool) -> None:
    """float32 parameters; gradients as GroupedLinear's own calls give them, which a hook brings about."""
    call, grads = Call(auto_target.device), []
    for hooked in (False, True):
        experts = experts_of(call, fuse_wgrad_accumulation=fused, delay_wgrad_compute=not fused)
        for p in experts.parameters():
            p.main_grad = torch.zeros_like(p)
        if hooked:
            experts.down.register_forward_hook(lambda *_: None)
        with torch.autocast(auto_target.device.type, BF16), Ran() as ran:
            y = experts(call.leaves[0], weights=call.leaves[3], offs=call.offs)
        assert ("moe_swiglu" in ran.names) != hooked
        y.backward(call.dy.to(BF16))
        experts.backward_dw()
        grads.append([p.main_grad if fused else p.grad for p in experts.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs)


def test_when_experts_are_one_call() -> None:
    call = Call(CPU)

    def runs(experts: GroupedExperts, *sizes: Any, **options: Any) -> bool:
        with Ran() as ran:
            y = experts(call.leaves[0][: call.last], *sizes, **options)
        assert y.any()
        return "moe_swiglu" in ran.names

    sizes = torch.tensor(SIZES)
    assert runs(experts_of(call), offs=call.offs) and not runs(experts_of(call), sizes)
    for options in ({"bias": True}, {"limit": 1.0}, {"gate_up": "apart"}, {"gate_up": "interleaved"}):
        assert not runs(GroupedExperts(len(SIZES), H, FFN, **options), offs=call.offs)
    for activation in ("geglu", "relu2"):
        assert not runs(GroupedExperts(len(SIZES), H, FFN, activation), offs=call.offs)
    assert not runs(GroupedExperts(len(SIZES), H, FFN, parameter_per_group=True), offs=call.offs)

    called: list[str] = []

    def hook(*_: Any) -> None:
        called.append("hook")

    def patch(linear: nn.Module) -> None:
        forward = linear.forward
        linear.forward = lambda *args, **options: [called.append("patch"), forward(*args, **options)][1]

    def margin(linear: nn.Module) -> None:
        linear.sm_margin = 8
        called.append("margin")

    for change in (lambda m: m.register_forward_hook(hook), lambda m: m.register_forward_pre_hook(hook), patch, margin):
        for name in ("gate_up", "down"):
            experts = experts_of(call)
            change(getattr(experts, name))
            called.clear() if change is not margin else None
            assert not runs(experts, offs=call.offs) and len(called) == 1
            called.clear()
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *_: called.append(type(module).__name__))
    assert not runs(experts_of(call), offs=call.offs)
    everywhere.remove()
    assert sorted(called) == ["GroupedExperts", "GroupedLinear", "GroupedLinear"]
    experts = experts_of(call)
    experts.down = GroupedLinear(len(SIZES), FFN, H + 4)
    assert not runs(experts, offs=call.offs)


def test_sizes_on_the_device_are_integers() -> None:
    experts = GroupedExperts(2, H, FFN, device="meta")
    with pytest.raises(RuntimeError, match="m_splits: expected integers, got float32"):
        experts(torch.empty(5, H, device="meta"), torch.empty(2, device="meta"))


# On a GPU, in CUTLASS's kernels.

UNEVEN = (1000, 0, 37, 128, 512, 1, 900, 422)  # 3000 rows of 8 experts
shapes = pytest.mark.parametrize(
    ("sizes", "hidden", "ffn"),
    (
        *((UNEVEN, 256, ffn) for ffn in (192, 136, 768)),
        ((3000, 0, 0, 0, 0, 0, 0, 0), 256, 192),
        ((0, 0, 0, 129, 0, 0, 0, 871), 128, 64),
        ((128,) * 5, 64, 40),
        ((4096, 100), 1024, 512),
    ),
)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels need an sm90 GPU")


def fused(call: Call, keep: bool = True, sm_margin: int = 0) -> tuple[Tensor, Tensor]:
    """The op, in memory full of NaN, in one kernel."""
    x, gate_up, _, *weights = call.leaves
    torch.full((8, len(x), gate_up.shape[1 if call.trans_b else 2]), float("nan"), dtype=x.dtype, device=CUDA)
    w = gate_up.mT if call.trans_b else gate_up
    results = OPS.moe_swiglu(x, w, call.offs, weights[0] if weights else None, keep, sm_margin, "auto")
    assert "swiglu" in gmm.last_backend()
    return results


def fused_backward(call: Call, h: Tensor, sm_margin: int = 0) -> tuple[Tensor, Tensor]:
    """The same of backward."""
    down, weights = call.leaves[2], call.leaves[3] if len(call.leaves) > 3 else None
    torch.full((8, *h.shape), float("nan"), dtype=h.dtype, device=CUDA)
    w = down if call.trans_b else down.mT
    results = OPS.moe_swiglu_backward(call.dy, w, h, call.offs, weights, sm_margin, "auto")
    assert "swiglu" in gmm.last_backend()
    return results


@pytest.mark.gpu
@shapes
@pytest.mark.parametrize("dtype", (BF16, FP16))
@pytest.mark.parametrize("weights_dtype", (None, FP32, BF16))
@both_layouts
def test_fused(
    hopper: None,
    sizes: Sequence[int],
    hidden: int,
    ffn: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
    trans_b: bool,
) -> None:
    """Each op against fp64 and the functions one after the other, then the whole."""
    call = Call(CUDA, dtype, weights_dtype, trans_b, sizes, hidden, ffn)
    x, gate_up, down, *weights = call.leaves
    h, y = fused(call)
    want_h = gmm.grouped_mm(x, gate_up, call.offs, trans_b=trans_b)
    want_y = gmm.moe.gated_activation(want_h, weights=weights[0] if weights else None, offs=call.offs)
    dh, dweights = fused_backward(call, h)
    dactivation = gmm.grouped_mm(call.dy, down, call.offs, trans_b=not trans_b)
    factors = weights[0] if weights else None
    want_dh, _, want_dweights = OPS.moe_activation_backward(
        dactivation, want_h, None, factors, call.offs, "swiglu", False, None
    )
    assert dweights.dtype is want_dweights.dtype
    pairs = (h, want_h), (y, want_y), (dh, want_dh), (dweights, want_dweights)
    for ours, theirs in pairs[: 4 if weights else 3]:
        assert ours.is_contiguous() and ours.isfinite().all() and not ours[call.last :].any()
        assert ours.shape == theirs.shape and (ours - theirs).float().norm() <= UNIT[dtype] / 2 * theirs.float().norm()
    check(call)


def test_few_rows_are_as_many_everywhere() -> None:
    source = Path(__file__).parents[1] / "csrc" / "cutlass" / "sm90" / "descriptor_array" / "heuristics.h"
    (few,) = re.findall(r"kFewRows = (\d+);", source.read_text())
    assert int(few) == sys.modules["gmm.moe.feed_forward"]._FEW_ROWS


@pytest.mark.gpu
def test_few_rows_are_not_fused(hopper: None) -> None:
    call = Call(CUDA, BF16, sizes=(96, 0, 90, 10), hidden=256, ffn=192)
    x, gate_up, _, weights = call.leaves
    OPS.moe_swiglu(x, gate_up.mT, call.offs, weights, True, 0, "auto")
    assert "swiglu" not in gmm.last_backend()
    check(call)


@pytest.mark.gpu
def test_fused_backends(hopper: None) -> None:
    """Other backends, and one kernel by name, are what they are for grouped_mm()."""
    call = Call(CUDA, BF16, sizes=UNEVEN, hidden=256, ffn=192)
    x, gate_up, _, weights = call.leaves
    gmm.grouped_mm(x, gate_up, call.offs, trans_b=True, backend="cutlass")
    kernel = gmm.last_backend()
    for backend in ("auto", "cutlass", "cutlass,auto", "triton", "reference", kernel):
        OPS.moe_swiglu(x, gate_up.mT, call.offs, weights, True, 0, backend)
        assert ("swiglu" in gmm.last_backend()) == (backend in ("auto", "cutlass", "cutlass,auto"))
    for backend in ("cutlass", "triton"):
        with gmm.use_backend(backend):
            check(call)


@pytest.mark.gpu
@pytest.mark.parametrize("sm_margin", (0, 1, 66, 130))
def test_fused_bits(hopper: None, sm_margin: int) -> None:
    """Equal in every run, with any number of SMs, and whether or not h is kept."""
    call = Call(CUDA, BF16, sizes=UNEVEN, hidden=256, ffn=768)
    h, y = fused(call)
    first = [h, y, *fused_backward(call, h)]
    for _ in range(20):
        again = [*fused(call, sm_margin=sm_margin), *fused_backward(call, h, sm_margin)]
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
        assert torch.equal(fused(call, keep=False, sm_margin=sm_margin)[1], y)
    check(call, sm_margin=sm_margin)


@pytest.mark.gpu
def test_fused_in_a_graph(hopper: None) -> None:
    """Forward and backward, replayed with new ends and rows, without a synchronisation."""
    call = Call(CUDA, BF16, sizes=UNEVEN, hidden=256, ffn=192)
    call.leaves = [t.detach().nan_to_num(0.5).requires_grad_() for t in call.leaves]
    call.dy.nan_to_num_(0.5)

    def step() -> list[Tensor]:
        y = call.run()
        return [y.detach(), *torch.autograd.grad(y, call.leaves, call.dy)]

    for strict in (False, True):
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for ends in ([0, 0, 0, 0, 0, 0, 0, 3004], [100, 100, 500, 900, 901, 902, 2000, 2500], [0] * 8):
        call.offs.copy_(torch.tensor(ends))
        with torch.no_grad():
            call.leaves[0].normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))


@pytest.mark.gpu
def test_fused_memory(hopper: None) -> None:
    """As test_peak_memory, of a layer whose weights and their gradients take most."""
    call = Call(CUDA, BF16, sizes=(512,) * 8, hidden=1024, ffn=768)
    call.leaves = [t.detach().nan_to_num(1.0).requires_grad_() for t in call.leaves]
    call.dy.nan_to_num_(1.0)

    def peak(run: Callable[[], Tensor]) -> int:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(run(), call.leaves, call.dy)
        return torch.cuda.max_memory_allocated()

    assert peak(call.run) <= peak(call.composed) + 2**19  # the parts of the gradient of weights: 384 KiB


@pytest.mark.gpu
def test_fused_experts(hopper: None) -> None:
    """The module, with main_grad and delayed."""
    torch.manual_seed(0)
    call = Call(CUDA, BF16, sizes=UNEVEN, hidden=256, ffn=192)
    want = call.exact()
    for options in ({}, {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        experts = GroupedExperts(len(UNEVEN), 256, 192, device=CUDA, dtype=BF16, **options)
        experts.load_state_dict({"gate_up.weight": call.leaves[1], "down.weight": call.leaves[2]})
        for p in experts.parameters():
            p.main_grad = torch.zeros(p.shape, device=CUDA)
        x, weights = (call.leaves[i].detach().requires_grad_() for i in (0, 3))
        y = experts(x, weights=weights, offs=call.offs)
        y.backward(call.dy)
        experts.backward_dw()
        fuse = "fuse_wgrad_accumulation" in options
        grads = [p.main_grad if fuse else p.grad for p in (experts.gate_up.weight, experts.down.weight)]
        for ours, exact in zip((y.detach(), x.grad, *grads, weights.grad), want, strict=True):
            assert ours.isfinite().all() and (ours.double() - exact).norm() <= 2.0**-6 * exact.norm()


@pytest.fixture(autouse=True)
def _compiler_restored() -> Iterator[None]:
    yield
    torch._dynamo.reset()
