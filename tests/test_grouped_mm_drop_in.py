"""What users of torch.nn.functional.grouped_mm rely on beside values: arguments, autograd, torch.func, modes."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from check import same_bits
from conftest import Target
from grouped_cases import BF16, FP16, FP32, MODES, G, K, N, T, layer_operands, loop
from torch import Tensor

import gmm

modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def layer(auto_target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and offs of a small layer, on each device."""
    x, w, offs = layer_operands("ragged_m", auto_target.device)
    assert offs is not None
    return x, w, offs


def close(ours: Any, exact: Any) -> None:
    for x, y in zip(ours, exact, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and (x - y).norm() <= 1e-4 * y.norm()


def test_arguments(auto_target: Target) -> None:
    """In the order of torch._grouped_mm, or by name as in torch.nn.functional."""
    x, w, offs = layer_operands("ragged_m", auto_target.device, BF16)
    y = gmm.grouped_mm(x, w, offs, None, FP32)
    assert y.dtype == FP32 and torch.equal(y, gmm.grouped_mm(x, w, offs=offs, bias=None, out_dtype=FP32))
    assert same_bits([gmm.grouped_mm(x, w, offs)], [torch.ops.gmm.grouped_mm(x, w, offs)])
    assert pickle.loads(pickle.dumps(gmm.grouped_mm)) is gmm.grouped_mm


@modes
@pytest.mark.parametrize("needed", ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)))
def test_any_of_the_operands_may_require_grad(auto_target: Target, mode: str, needed: tuple[int, ...]) -> None:
    a, b, offs = layer_operands(mode, auto_target.device)
    bias = torch.randn(G, N).to(a) if b.dim() == 3 else None
    tensors = [x for x in (a, b, bias) if x is not None]
    if max(needed) >= len(tensors):
        pytest.skip("takes no bias")
    for i in needed:
        tensors[i].requires_grad_()
    leaves = [tensors[i] for i in needed]
    grads = [torch.autograd.grad(f(a, b, offs, bias).square().sum(), leaves) for f in (gmm.grouped_mm, loop)]
    close(*grads)


def test_views_and_hooks(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    """A slice of a leaf gets its part of the gradient; hooks run once; the result may be changed in place."""
    x, w, offs = layer
    base, w = torch.cat([x, x]).requires_grad_(), torch.nn.Parameter(w)
    seen: list[str] = []
    base.register_hook(lambda grad: seen.append("a"))
    w.register_post_accumulate_grad_hook(lambda parameter: seen.append("b"))
    y = gmm.grouped_mm(base[T:], w, offs)
    y.mul_(2)
    y.sum().backward()
    assert sorted(seen) == ["a", "b"] and type(y) is Tensor
    assert base.grad is not None and w.grad is not None and not base.grad[:T].any() and base.grad[T:].any()
    w.grad = None
    assert type(copy.deepcopy(w)) is torch.nn.Parameter


@pytest.mark.parametrize("changed", ("a", "b", "offs"))
def test_what_was_saved_must_not_change(layer: tuple[Tensor, Tensor, Tensor], changed: str) -> None:
    x, w, offs = layer
    leaves = [t.requires_grad_() for t in (x, w)]
    given = {"a": x * 1, "b": w * 1, "offs": offs.clone()}
    y = gmm.grouped_mm(**given)
    with torch.no_grad():
        given[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), leaves)


def test_inference_mode(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, offs = layer
    want = gmm.grouped_mm(x, w, offs)
    out = torch.empty_like(want)
    with torch.inference_mode():
        y = gmm.grouped_mm(x, w.clone().requires_grad_(), offs)
        gmm.grouped_mm(x, w, offs, out=out)
        gmm.grouped_mm(x, w, offs, out=torch.empty_like(out))
    assert y.is_inference() and torch.equal(y, want) and torch.equal(out, want)
    with pytest.raises(RuntimeError, match="inference"):
        gmm.grouped_mm(x, w, offs, out=y)
    with pytest.raises(RuntimeError, match=r"d\[0\].*inference"):
        gmm.multi_tensor_gemm([x], [w[0]], [y])
    assert torch.equal(y, want), "was written"


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms, which fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_mode(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, offs = layer
    leaves = [x.requires_grad_(), w.requires_grad_(), torch.ones(G, N, device=x.device, requires_grad=True)]
    y = gmm.grouped_mm(x, w, offs, leaves[2])
    grads = torch.autograd.grad(y.sum(), leaves)
    assert all(t.isfinite().all() for t in (y, *grads)) and not y[18:].any() and not grads[0][18:].any()


def test_nested_autocast(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    """The innermost region holds."""
    x, w, offs = layer
    device = x.device.type
    with torch.autocast(device, dtype=BF16):
        with torch.autocast(device, enabled=False):
            assert gmm.grouped_mm(x, w, offs).dtype == FP32
        with torch.autocast(device, dtype=FP16):
            assert gmm.grouped_mm(x, w, offs).dtype == FP16
        assert gmm.grouped_mm(x, w, offs).dtype == BF16


# torch.func


def loss(mm: Callable[..., Tensor], offs: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, bias: mm(x, w, offs, bias).square().sum()


@pytest.fixture
def quiet() -> Iterator[None]:
    """torch warns that vmap calls an op for each element."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
def test_torch_func(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    """grad of first and second order, vjp, jacrev, vmap, and vmap of grad."""
    x, w, offs = layer
    bias = torch.randn(G, N).to(x)
    every = (0, 1, 2)
    results = []
    for mm in (gmm.grouped_mm, loop):
        f = loss(mm, offs)
        first = torch.func.grad(f, every)

        def penalty(*tensors: Tensor, first: Any = first) -> Tensor:
            return sum(t.square().sum() for t in first(*tensors))

        def rows(x: Tensor, mm: Any = mm) -> Tensor:
            return mm(x, w, offs).sum(1)

        results.append(
            [
                *first(x, w, bias),
                *torch.func.grad(penalty, every)(x, w, bias),
                torch.func.vjp(rows, x)[1](torch.ones(T, device=x.device))[0],
                torch.func.jacrev(rows)(x),
                torch.func.vmap(rows)(torch.stack([x, 2 * x])),
                *torch.func.vmap(first, (0, None, None))(torch.stack([x, 2 * x]), w, bias),
            ]
        )
    close(*results)


@pytest.mark.usefixtures("quiet")
def test_batched_gradients(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, offs = layer
    x, w = x.requires_grad_(), w.requires_grad_()
    dys = torch.randn(3, T, N).to(x)
    ours, exact = (
        torch.autograd.grad(mm(x, w, offs), (x, w), dys, is_grads_batched=True) for mm in (gmm.grouped_mm, loop)
    )
    close(ours, exact)


def test_torch_func_within_autocast(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, offs = layer
    with torch.autocast(x.device.type, dtype=BF16):
        transformed = torch.func.grad(lambda x: gmm.grouped_mm(x, w, offs).sum())(x)
        y = gmm.grouped_mm(x.requires_grad_(), w, offs).sum()
    assert transformed.dtype == FP32 and torch.equal(transformed, torch.autograd.grad(y, x)[0])


def test_weight_grad_out_is_not_for_torch_func(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, offs = layer
    main_grad = torch.zeros_like(w)
    with pytest.raises(RuntimeError, match="weight_grad_out: expected None under torch.func"):
        torch.func.grad(lambda w: gmm.grouped_mm(x, w, offs, weight_grad_out=main_grad).sum())(w)


def test_forward_mode_says_that_there_is_none(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    x, w, offs = layer
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: gmm.grouped_mm(x, w, offs), (x,), (x,))


def test_sizes_that_only_the_data_knows(layer: tuple[Tensor, Tensor, Tensor]) -> None:
    """A compiled graph in which the number of tokens comes from a tensor."""
    x, w, offs = layer

    def f(x: Tensor, w: Tensor, n: Tensor) -> Tensor:
        rows = n.item()
        torch._check(rows >= 0)
        torch._check(rows <= T)
        return gmm.grouped_mm(x[:rows], w, offs)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        for rows in (18, 20):
            leaves = [t.detach().requires_grad_() for t in (x, w)]
            y = compiled(*leaves, torch.tensor(rows))
            assert y.shape == (rows, N) and torch.equal(y, gmm.grouped_mm(x[:rows], w, offs))
            close(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(loop(*leaves, offs).sum(), leaves))
    torch._dynamo.reset()
    assert x.shape == (T, K)
