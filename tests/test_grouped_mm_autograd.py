"""Derivatives of grouped_mm against fp64 autograd of a loop; weight_grad_out; autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Target
from grouped_cases import BF16, FP16, FP32, MODES, G, N, check_grads, layer_operands, loop, operands
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gmm
from gmm.triton import launch

modes = pytest.mark.parametrize("mode", MODES)


@modes
@pytest.mark.parametrize("column_major", ("neither", "a", "b", "both"))
def test_grads(grouped_target: Target, mode: str, column_major: str) -> None:
    """Values, and the layout: contiguous, or a transposed view where the operand is one."""
    if grouped_target.backend == "cutlass":
        pytest.skip("autograd's products are not all CUTLASS's; auto takes them where it can")
    for dtype, out_dtype in ((FP32, None), (BF16, None), (BF16, FP32)):
        a, b, offs = layer_operands(mode, grouped_target.device, dtype)
        if column_major in ("a", "both"):
            a = a.mT.contiguous().mT
        if column_major in ("b", "both"):
            b = b.mT.contiguous().mT
        bias = torch.randn(G, N).to(a.device, out_dtype or dtype) if b.dim() == 3 else None
        grads = check_grads(a, b, offs, grouped_target.backend, bias=bias, out_dtype=out_dtype)
        assert grads[0].stride() == a.stride() and grads[1].stride() == b.stride()


@pytest.mark.parametrize("native", (True, False), ids=("E_N_K", "view_of_E_K_N"))
def test_grad_of_a_transposed_weight(auto_target: Target, native: bool) -> None:
    """With trans_b, in the layout of the weight that was given."""
    x, w, offs = layer_operands("ragged_m", auto_target.device, BF16)
    given = w.mT.contiguous() if native else w.mT
    grads = check_grads(x, given, offs, trans_b=True)
    assert grads[1].stride() == given.stride()


@modes
def test_grads_of_any_strides(auto_target: Target, mode: str) -> None:
    """out.sum() gives a gradient of stride 0; a transposed consumer a column-major one; a slice odd addresses."""
    a, b, offs = layer_operands(mode, auto_target.device, BF16)
    y = gmm.grouped_mm(a, b, offs)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(y)

    rows, columns = y.shape[-2:]
    odd = random(*y.shape[:-2], rows + 1, columns + 3)[..., 1:, 1:-2]
    for dy in (y.new_ones(()).expand(y.shape), random(*y.shape[:-2], columns, rows).mT, odd):
        check_grads(a, b, offs, dy=dy)


def test_only_the_grads_that_are_needed(auto_target: Target) -> None:
    x, w, offs = layer_operands("ragged_m", auto_target.device)
    for needed, other in ((x, w), (w, x)):
        needed.requires_grad_(True)
        gmm.grouped_mm(x, w, offs).sum().backward()
        assert needed.grad is not None and other.grad is None
        needed.requires_grad_(False).grad = None
    assert not gmm.grouped_mm(x, w, offs).requires_grad
    x.requires_grad_()
    with torch.no_grad():
        assert not gmm.grouped_mm(x, w, offs).requires_grad


class Products(TorchDispatchMode):
    """Notes the operands of each product, and what ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[tuple[Any, ...]] = []
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.gmm.grouped_mm.default, torch.ops.gmm.grouped_mm_out.default):
            self.operands.append((args, kwargs, result))
            self.ran.append(gmm.last_backend())
        return result


def training_step(device: torch.device, trans_b: bool, fused: bool) -> Products:
    """Forward and backward with a bias."""
    x, w, offs = operands("ragged_m", [5, 5, 33], 0, 64, 48, BF16, device, total=40)
    w = w.mT.contiguous() if trans_b else w
    bias = torch.randn(3, 64).to(x)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    main_grad = torch.zeros(w.shape, device=device) if fused else None
    with Products() as products:
        y = gmm.grouped_mm(leaves[0], leaves[1], offs, leaves[2], trans_b=trans_b, weight_grad_out=main_grad)
        y.backward(torch.randn_like(y))
    assert len(products.ran) == 4  # y, and the gradients of a, b and bias
    return products


training_steps = pytest.mark.parametrize(
    ("trans_b", "fused"), ((False, False), (True, False), (False, True), (True, True))
)


@training_steps
def test_training_is_planned_on_cutlass(trans_b: bool, fused: bool) -> None:
    """All products of a step with a bias are in layouts that CUTLASS takes."""
    for (a, b, offs, *rest), given, result in training_step(torch.device("cpu"), trans_b, fused).operands:
        bias, out = rest[0] if rest else None, rest[1] if result is None else result
        options = {name: value for name, value in given.items() if name in ("trans_b", "accumulate")}
        assert gmm.explain(a, b, out, bias, offs=offs, sm=90, **options).backend == "cutlass"


@pytest.mark.gpu
@training_steps
def test_training_runs_on_cutlass(trans_b: bool, fused: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the cutlass backend needs an sm90 GPU")
    launch.forget_plans()
    ran = training_step(torch.device("cuda"), trans_b, fused).ran
    assert all(name.startswith("cutlass: ") for name in ran), ran
    assert not launch._plans, "Triton was prepared"


def test_saves_no_copies(auto_target: Target) -> None:
    x, w, offs = layer_operands("ragged_m", auto_target.device)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gmm.grouped_mm(x.requires_grad_(), w.requires_grad_(), offs)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, w, offs)}


def test_second_derivative(auto_target: Target) -> None:
    """The backward is made of the same op: it has a backward of its own."""
    x, w, offs = layer_operands("ragged_m", auto_target.device)
    x.requires_grad_(), w.requires_grad_()

    def penalty(mm: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        (dx,) = torch.autograd.grad((mm(x, w, offs) ** 2).sum(), x, create_graph=True)
        return torch.autograd.grad((dx**2).sum(), [x, w])

    for ours, exact in zip(penalty(gmm.grouped_mm), penalty(loop), strict=True):
        assert (ours - exact).norm() <= 1e-4 * exact.norm()


def test_forward_mode_is_refused(auto_target: Target) -> None:
    x, w, offs = layer_operands("ragged_m", auto_target.device)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        gmm.grouped_mm(torch.autograd.forward_ad.make_dual(x, x), w, offs)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint(auto_target: Target, reentrant: bool) -> None:
    x, w, offs = layer_operands("ragged_m", auto_target.device)
    main_grads = [torch.zeros_like(w) for _ in range(2)]
    grads = []
    for again, main_grad in zip((False, True), main_grads, strict=True):
        leaves = [t.detach().requires_grad_() for t in (x, w)]

        def layer(x: Tensor, w: Tensor, main_grad: Tensor = main_grad) -> Tensor:
            y = gmm.grouped_mm(x, w, offs).relu()
            return y + gmm.grouped_mm(x, w, offs, weight_grad_out=main_grad)

        y = checkpoint(layer, *leaves, use_reentrant=reentrant) if again else layer(*leaves)
        grads.append(torch.autograd.grad(y.sum(), leaves) if not reentrant else (y.sum().backward(), leaves[1].grad))
    assert torch.equal(grads[0][1], grads[1][1]) and torch.equal(*main_grads) and main_grads[0].any()


# weight_grad_out


@pytest.mark.parametrize("trans_b", (False, True))
@pytest.mark.parametrize("dtype", (BF16, FP32))
def test_weight_grad_out(auto_target: Target, dtype: torch.dtype, trans_b: bool) -> None:
    """Backward adds to it; b gets no gradient; a and bias do."""
    x, w, offs = layer_operands("ragged_m", auto_target.device, BF16)
    w = w.mT.contiguous() if trans_b else w
    bias = torch.randn(G, N).to(x)
    for given, view in ((w, False), (w.mT.contiguous().mT, True)):
        _, want, bias_grad = check_grads(x, given, offs, bias=bias, trans_b=trans_b)
        start = torch.randn(w.shape).to(x.device, dtype)
        main_grad = start.mT.contiguous().mT if view else start.clone()
        leaves = [t.detach().requires_grad_() for t in (x, given, bias)]
        for i in (1, 2):
            version = main_grad._version
            y = gmm.grouped_mm(leaves[0], leaves[1], offs, leaves[2], trans_b=trans_b, weight_grad_out=main_grad)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y))
            assert leaves[1].grad is None and leaves[0].grad is not None and leaves[2].grad is not None
            assert main_grad._version > version
            error = (main_grad.double() - start.double() - i * want.double()).norm()
            assert error <= 2.0**-6 * (want.double().norm() + start.double().norm())
    with torch.no_grad():
        gmm.grouped_mm(x, w, offs, trans_b=trans_b, weight_grad_out=main_grad)


def test_weight_grad_out_that_is_wrong() -> None:
    x, w, offs = layer_operands("ragged_m", torch.device("cpu"), BF16)
    w.requires_grad_()
    good = torch.zeros(w.shape)
    with pytest.raises(ValueError, match="weight_grad_out: expected a b that requires grad"):
        gmm.grouped_mm(x.detach().requires_grad_(), w.detach(), offs, weight_grad_out=good)
    with torch.no_grad():
        gmm.grouped_mm(x, w.detach(), offs, weight_grad_out=good)
    with torch.inference_mode():
        gmm.grouped_mm(x, w, offs, weight_grad_out=good)
    with torch.inference_mode():
        made_in_inference = good.clone()
    for bad, text in (
        (good[:1], "expected shape"),
        (good.half(), "expected bfloat16"),
        (good.to(torch.complex64).conj(), "expected bfloat16"),
        (good.to("meta"), "expected a tensor on cpu"),
        (good.clone().requires_grad_(), "require grad"),
        (made_in_inference, "expected a normal tensor outside of inference mode"),
        (torch._neg_view(good), "expected a tensor without the negative bit"),
        (good[:1].expand(good.shape), "expected elements that do not share memory, got shape"),
        (torch.zeros(200).as_strided(good.shape, (1, 2, 3)), "expected elements that do not share memory, got shape"),
        (good.to_sparse(), "expected a dense tensor, got layout torch.sparse_coo"),
    ):
        with pytest.raises(RuntimeError, match=f"weight_grad_out: .*{text}"):
            gmm.grouped_mm(x, w, offs, weight_grad_out=bad)
    assert not good.any(), "was written"
    with_gaps = torch.zeros(*w.shape[:2], 2 * w.shape[2])[..., ::2]
    gmm.grouped_mm(x, w, offs, weight_grad_out=with_gaps).sum().backward()
    assert with_gaps.any()
    y = gmm.grouped_mm(x.requires_grad_(), w, offs, weight_grad_out=good)
    with pytest.raises(RuntimeError, match="weight_grad_out: .*create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.autograd.backward(y.sum(), create_graph=True)


# Autocast


@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_autocast(auto_target: Target, dtype: torch.dtype) -> None:
    """As torch.mm: a and b are cast, gradients come in the dtypes of the leaves."""
    x, w, offs = layer_operands("ragged_m", auto_target.device)
    bias = torch.randn(G, N).to(x)
    want = gmm.grouped_mm(x.to(dtype), w.to(dtype), offs, bias.to(dtype))
    with torch.autocast(x.device.type, dtype=dtype):
        assert torch.equal(gmm.grouped_mm(x, w.to(BF16), offs), gmm.grouped_mm(x.to(dtype), w.to(BF16).to(dtype), offs))
        for leaves in ([x, w, bias], [t.clone().requires_grad_() for t in (x, w, bias)]):
            y = gmm.grouped_mm(leaves[0], leaves[1], offs, leaves[2])
            assert y.dtype == dtype and torch.equal(y, want)
            assert gmm.grouped_mm(leaves[0], leaves[1], offs, leaves[2], FP32).dtype == FP32
        main_grad = torch.zeros_like(w)
        z = gmm.grouped_mm(leaves[0], leaves[1], offs, weight_grad_out=main_grad)
    y.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == FP32 for t in leaves)
    grad = leaves[1].grad
    z.sum().backward()
    assert leaves[1].grad is grad and (main_grad - grad).norm() <= 2.0**-7 * grad.norm()


def test_backward_within_autocast(auto_target: Target) -> None:
    """In the precision of the forward, which was outside."""
    x, w, offs = layer_operands("ragged_m", auto_target.device)
    leaves = [t.requires_grad_() for t in (x, w)]
    grads = []
    for enabled in (False, True):
        y = gmm.grouped_mm(x, w, offs)
        with torch.autocast(x.device.type, dtype=BF16, enabled=enabled):
            grads.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
    assert all(torch.equal(g, h) for g, h in zip(*grads, strict=True))


def test_meta_tensors() -> None:
    x, w, offs = (t.to("meta") for t in layer_operands("ragged_m", torch.device("cpu")) if t is not None)
    y = gmm.grouped_mm(x.requires_grad_(), w.requires_grad_(), offs, weight_grad_out=torch.empty_like(w))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.shape == (20, 24) and dx.shape == x.shape
