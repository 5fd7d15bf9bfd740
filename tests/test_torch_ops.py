"""The torch ops: schemas, fake kernels, opcheck, torch.compile, autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import cases
import pytest
import torch
from cases import FORWARD, LAYOUTS, Group, Layout
from check import Call, make_call
from conftest import Target

import gmm

BF16, FP32 = torch.bfloat16, torch.float32
GROUPS = [Group(24, 40, 16), Group(0, 16, 8), Group(8, 24, 0), Group(33, 8, 72)]

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)

Tensors = list[torch.Tensor]


def flags(layout: Layout) -> dict[str, Any]:
    return {"trans_a": layout.trans_a, "trans_b": layout.trans_b}


def leaves(call: Call) -> Iterator[torch.Tensor]:
    """Inputs of a call, made to require gradients."""
    for x in (*call.a, *call.b, *(call.bias or [])):
        yield x.requires_grad_()


def loop(a: Tensors, b: Tensors, bias: Tensors | None = None, trans_a: bool = False, trans_b: bool = False) -> Tensors:
    """What the op computes, in plain torch."""
    products = [(x.t() if trans_a else x) @ (y.t() if trans_b else y) for x, y in zip(a, b, strict=True)]
    return [p + c for p, c in zip(products, bias, strict=True)] if bias else products


def assert_grads_match(call: Call, outputs: Tensors, grads: Tensors) -> None:
    """Gradients of a, b and bias against the same graph in fp64."""
    twin = Call([x.detach().double() for x in call.a], [x.detach().double() for x in call.b], [], layout=call.layout)
    twin.bias = [x.detach().double() for x in call.bias] if call.bias else None
    inputs = list(leaves(twin))
    exact = loop(twin.a, twin.b, twin.bias, **flags(call.layout))
    torch.autograd.backward(exact, [g.double() for g in grads])
    torch.autograd.backward(outputs, grads)
    for x, y in zip(leaves(call), inputs, strict=True):
        assert x.grad is not None and y.grad is not None
        assert x.grad.shape == x.shape and x.grad.dtype == x.dtype
        unit = 2.0**-20 if x.dtype == FP32 else 2.0**-8
        assert (x.grad.double() - y.grad).norm() <= unit * y.grad.norm()


def random_grads(outputs: Tensors) -> Tensors:
    return [torch.randn(y.shape, device=y.device).to(y.dtype) for y in outputs]


# Schemas and fake kernels


def test_schemas() -> None:
    out = torch.ops.gmm.multi_tensor_gemm.default._schema
    assert str(out) == (
        "gmm::multi_tensor_gemm(Tensor[] a, Tensor[] b, Tensor(c!)[] d, Tensor[]? bias=None, *, bool trans_a=False, "
        'bool trans_b=False, bool accumulate=False, bool allow_tf32=False, int sm_margin=0, str backend="auto") -> ()'
    )
    functional = torch.ops.gmm.multi_tensor_mm.default._schema
    assert str(functional) == (
        "gmm::multi_tensor_mm(Tensor[] a, Tensor[] b, Tensor[]? bias=None, *, bool trans_a=False, bool trans_b=False, "
        'ScalarType? out_dtype=None, bool allow_tf32=False, int sm_margin=0, str backend="auto") -> Tensor[]'
    )
    assert out.is_mutable and not functional.is_mutable


@pytest.mark.parametrize("bias", (False, True))
@layouts
def test_meta(layout: Layout, bias: bool) -> None:
    for d_dtype in (BF16, FP32):
        call = make_call(GROUPS, layout, BF16, torch.device("cpu"), bias=bias, d_dtype=d_dtype)
        a, b, d, biases = ([x.to("meta") for x in xs or []] for xs in (call.a, call.b, call.d, call.bias))
        results = gmm.multi_tensor_gemm(a, b, bias=biases or None, **flags(layout), out_dtype=d_dtype)
        assert [(y.shape, y.dtype, y.device.type) for y in results] == [((m, n), d_dtype, "meta") for m, n, k in GROUPS]
        gmm.multi_tensor_gemm(a, b, d, biases or None, **flags(layout), accumulate=True)


@pytest.mark.parametrize("bias", (False, True))
def test_opcheck_out(auto_target: Target, bias: bool) -> None:
    for layout, (accumulate, d_dtype) in product((FORWARD, cases.WGRAD), ((False, BF16), (True, FP32))):
        call = make_call(GROUPS, layout, BF16, auto_target.device, d_dtype=d_dtype, bias=bias, accumulate=accumulate)
        for d in call.d:
            d.nan_to_num_(0)  # opcheck compares with ==
        args = (call.a, call.b, call.d, call.bias)
        torch.library.opcheck(torch.ops.gmm.multi_tensor_gemm, args, call.kwargs())


@pytest.mark.parametrize("bias", (False, True))
@layouts
def test_opcheck_functional(auto_target: Target, layout: Layout, bias: bool) -> None:
    for dtype, out_dtype, grad in ((FP32, None, True), (BF16, FP32, False)):
        call = make_call(GROUPS, layout, dtype, auto_target.device, d_dtype=out_dtype, bias=bias)
        if grad:
            list(leaves(call))
        kwargs = {**flags(layout), "out_dtype": out_dtype}
        torch.library.opcheck(torch.ops.gmm.multi_tensor_mm, (call.a, call.b, call.bias), kwargs)


# Autograd


@pytest.mark.parametrize("bias", (False, True))
@layouts
def test_grads(auto_target: Target, layout: Layout, bias: bool) -> None:
    for dtype, out_dtype in ((FP32, None), (BF16, None), (BF16, FP32)):
        call = make_call(GROUPS, layout, dtype, auto_target.device, d_dtype=out_dtype, bias=bias)
        list(leaves(call))
        outputs = gmm.multi_tensor_gemm(call.a, call.b, bias=call.bias, **flags(layout), out_dtype=out_dtype)
        assert_grads_match(call, outputs, random_grads(outputs))


@layouts
def test_grads_of_any_strides_row_27(auto_target: Target, layout: Layout) -> None:
    """out.sum() gives a gradient of stride 0; a transposed consumer a column-major one; slices odd addresses."""

    def transposed(y: torch.Tensor) -> torch.Tensor:
        return torch.randn(y.shape[::-1], device=y.device).to(y.dtype).t()

    def sliced(y: torch.Tensor) -> torch.Tensor:
        return torch.randn((y.shape[0] + 1, y.shape[1] + 3), device=y.device).to(y.dtype)[1:, 1:-2]

    def expanded(y: torch.Tensor) -> torch.Tensor:
        return torch.ones((), dtype=y.dtype, device=y.device).expand(y.shape)

    for make, groups in product((transposed, sliced, expanded), (GROUPS, [Group(5, 7, 3), Group(9, 13, 27)])):
        call = make_call(groups, layout, BF16, auto_target.device)
        list(leaves(call))
        outputs = gmm.multi_tensor_gemm(call.a, call.b, **flags(layout))
        assert_grads_match(call, outputs, [make(y) for y in outputs])


@layouts
def test_grads_of_column_major_operands(auto_target: Target, layout: Layout) -> None:
    """Gradients come in the strides of what they are gradients of, so that optimizers need no copy."""
    groups = [Group(24, 40, 16), Group(33, 8, 72)]
    for a_too, count in ((False, 2), (True, 2), (True, 1)):
        call = make_call(groups, layout, FP32, auto_target.device)
        for operands in (call.a, call.b) if a_too else (call.b,):
            operands[:count] = [x.t().contiguous().t() for x in operands[:count]]
        inputs = list(leaves(call))
        outputs = gmm.multi_tensor_gemm(call.a, call.b, **flags(layout))
        grads = random_grads(outputs)
        ours = torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
        assert count == 1 or all(g.stride() == x.stride() for g, x in zip(ours, inputs, strict=True))
        assert_grads_match(call, outputs, grads)


def test_only_the_grads_that_are_needed(auto_target: Target) -> None:
    """A frozen weight, an unused output, an input that needs none."""
    call = make_call([Group(24, 40, 16)] * 3, FORWARD, FP32, auto_target.device)
    needed = [call.b[1].requires_grad_(), call.a[2].requires_grad_()]
    outputs = gmm.multi_tensor_gemm(call.a, call.b, trans_b=True)
    outputs[1].sum().backward()
    exact = torch.ones(40, 24, device=auto_target.device) @ call.a[1]
    assert needed[0].grad is not None and torch.allclose(needed[0].grad, exact, rtol=1e-5, atol=1e-5)
    assert needed[1].grad is None or not needed[1].grad.any()
    assert all(x.grad is None for x in (call.a[0], call.a[1], call.b[0], call.b[2]))


@pytest.mark.parametrize("tokens", ([0, 0, 0], [0, 24, 0]), ids=("all_empty", "some_empty"))
def test_empty_groups_keep_the_graph_and_give_zero_grads_row_3(auto_target: Target, tokens: list[int]) -> None:
    x = torch.randn(sum(tokens), 16, device=auto_target.device, requires_grad=True)
    weights = [torch.randn(40, 16, device=auto_target.device, requires_grad=True) for _ in tokens]
    out = torch.cat(gmm.multi_tensor_gemm(x.split(tokens), weights, trans_b=True))
    assert out.requires_grad
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    for w, t in zip(weights, tokens, strict=True):
        assert w.grad is not None and w.grad.shape == w.shape and bool(w.grad.any()) == (t > 0)


def test_no_graph_without_need(auto_target: Target) -> None:
    call = make_call([Group(8, 8, 8)], FORWARD, FP32, auto_target.device)
    assert not gmm.multi_tensor_gemm(call.a, call.b, trans_b=True)[0].requires_grad
    call.a[0].requires_grad_()
    with torch.no_grad():
        assert not gmm.multi_tensor_gemm(call.a, call.b, trans_b=True)[0].requires_grad
    assert gmm.multi_tensor_gemm(call.a, call.b, trans_b=True)[0].requires_grad


def test_second_derivative(auto_target: Target) -> None:
    """The backward is made of the same op: it has a backward of its own."""
    a = torch.randn(8, 16, device=auto_target.device, requires_grad=True)
    b = torch.randn(24, 16, device=auto_target.device, requires_grad=True)

    def penalty(mm: Callable[..., Tensors]) -> Tensors:
        (y,) = mm([a], [b], trans_b=True)
        (da,) = torch.autograd.grad((y**2).sum(), a, create_graph=True)
        return list(torch.autograd.grad((da**2).sum(), [a, b]))

    for ours, exact in zip(penalty(gmm.multi_tensor_gemm), penalty(loop), strict=True):
        assert torch.allclose(ours, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast_changes_nothing(target: Target, dtype: torch.dtype) -> None:
    """Not the precision of the reference's products either: 200^2 * 8 is infinite in fp16."""
    a, b = torch.full((1, 8), 200.0, device=target.device), torch.full((8, 1), 200.0, device=target.device)
    if target.backend == "cutlass":
        a, b = a.bfloat16(), torch.full((8, 8), 200.0, device=target.device).bfloat16()
    a.requires_grad_()
    with torch.autocast(target.device.type, dtype=dtype):
        (y,) = gmm.multi_tensor_gemm([a], [b], out_dtype=torch.float32, backend=target.backend)
        y.sum().backward()
    assert y.eq(320000).all()
    assert a.grad is not None and a.grad.eq(200 * b.shape[1]).all()


def test_forward_mode_is_refused(auto_target: Target) -> None:
    """An error instead of tangents that are zero."""
    x, w = (torch.randn(8, 8, device=auto_target.device) for _ in range(2))

    def f(x: torch.Tensor) -> torch.Tensor:
        return gmm.multi_tensor_gemm([x], [w])[0]

    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        f(torch.autograd.forward_ad.make_dual(x, x))
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.jvp(f, (x,), (x,))


def test_autograd_saves_no_copies(auto_target: Target) -> None:
    """What the graph keeps alive is the inputs themselves."""
    call = make_call([Group(64, 64, 64)] * 4, FORWARD, BF16, auto_target.device)
    inputs = {x.data_ptr() for x in leaves(call)}
    saved: Tensors = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        gmm.multi_tensor_gemm(call.a, call.b, trans_b=True)
    assert saved and all(x.data_ptr() in inputs for x in saved)


# torch.compile


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """torch.compile(fullgraph=True) from a clean cache."""
    torch._dynamo.reset()
    yield lambda f, **options: torch.compile(f, fullgraph=True, **options)
    torch._dynamo.reset()


def layer(x: torch.Tensor, w1: Tensors, w2: Tensors, tokens: list[int]) -> torch.Tensor:
    """Two grouped linears with an activation between."""
    hidden = torch.cat(gmm.multi_tensor_gemm(x.split(tokens), w1, trans_b=True))
    return torch.cat(gmm.multi_tensor_gemm(torch.nn.functional.silu(hidden).split(tokens), w2, trans_b=True))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_layer(auto_target: Target, compiled: Callable[..., Any], backend: str) -> None:
    tokens = [8, 0, 24, 16]
    generator = torch.Generator(auto_target.device).manual_seed(0)

    def parameter(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=auto_target.device, generator=generator, requires_grad=True)

    inputs = [parameter(48, 16), *(parameter(40, 16) for _ in tokens), *(parameter(16, 40) for _ in tokens)]
    grad = torch.randn(48, 16, device=auto_target.device, generator=generator)

    def step(f: Callable[..., torch.Tensor]) -> Tensors:
        out = f(inputs[0], inputs[1:5], inputs[5:], tokens)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    for x, y in zip(step(compiled(layer, backend=backend)), step(layer), strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
def test_compiled_out_form(auto_target: Target, compiled: Callable[..., Any], backend: str) -> None:
    """Writes into d, and what follows sees it."""

    def f(a: Tensors, b: Tensors, d: Tensors) -> Tensors:
        gmm.multi_tensor_gemm(a, b, d, trans_a=True, accumulate=True)
        return [x * 2 for x in d]

    call = make_call([Group(24, 40, 16)] * 3, cases.WGRAD, BF16, auto_target.device, d_dtype=FP32, accumulate=True)
    eager = [x.clone() for x in call.d]
    exact = f(call.a, call.b, eager)
    results = compiled(f, backend=backend)(call.a, call.b, call.d)
    for x, y in zip([*results, *call.d], [*exact, *eager], strict=True):
        assert torch.equal(x, y)


def test_compiled_with_dynamic_tokens(auto_target: Target, compiled: Callable[..., Any]) -> None:
    """One graph for any number of tokens."""

    def f(a: Tensors, b: Tensors) -> Tensors:
        return [y.relu() for y in gmm.multi_tensor_gemm(a, b, trans_b=True)]

    run = compiled(f, backend="aot_eager")
    weights = [torch.randn(40, 16, device=auto_target.device) for _ in range(3)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for sizes in ([8, 24, 40], [3, 129, 17], [64, 5, 2]):
            a = [torch.randn(t, 16, device=auto_target.device) for t in sizes]
            for x in a:
                torch._dynamo.mark_dynamic(x, 0)
            for x, y in zip(run(a, weights), f(a, weights), strict=True):
                assert torch.allclose(x, y, rtol=1e-5, atol=1e-5)


def test_compiled_zero_contraction_row_17(auto_target: Target, compiled: Callable[..., Any]) -> None:
    def f(a: Tensors, b: Tensors) -> Tensors:
        return gmm.multi_tensor_gemm(a, b)

    a = [torch.ones(56, 0, device=auto_target.device) for _ in range(4)]
    b = [torch.ones(0, 256, device=auto_target.device) for _ in range(4)]
    for run in (f, compiled(f)):
        assert all(y.shape == (56, 256) and not y.any() for y in run(a, b))


def test_compiled_empty_lists(compiled: Callable[..., Any]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        assert gmm.multi_tensor_gemm([], []) == []
        return x + 1

    assert compiled(f, backend="aot_eager")(torch.ones(2)).sum() == 4


def test_export(auto_target: Target) -> None:
    """torch.export keeps the op as one node."""

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.cat(gmm.multi_tensor_gemm(x.split([8, 16]), w.unbind(), trans_b=True))

    x, w = torch.randn(24, 16, device=auto_target.device), torch.randn(2, 40, 16, device=auto_target.device)
    program = torch.export.export(Module(), (x, w))
    names = [str(node.target) for node in program.graph.nodes]
    assert "gmm.multi_tensor_mm.default" in names
    assert torch.allclose(program.module()(x, w), Module()(x, w))
