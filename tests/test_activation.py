"""gmm.moe.gated_activation: in plain torch, and in Triton, interpreted on the CPU and compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from check import seeded
from conftest import MoeTarget
from moe_cases import BF16, FP16, FP32, GATED, close, expected_activation
from torch import Tensor

import gmm
import gmm.compat.grouped_gemm
from gmm.moe import KINDS

kinds = pytest.mark.parametrize("kind", KINDS)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(torch.device("cpu"), seed))


def check(
    moe: MoeTarget,
    kind: str,
    dtype: torch.dtype,
    layout: str = "concatenated",
    *,
    rows: int = 13,
    columns: int = 24,
    limit: float | None = None,
    weights_dtype: torch.dtype | None = None,
    ends: list[int] | None = None,
    strided: bool = False,
) -> None:
    """Values and all gradients against fp64 autograd of what models write. Rows in no group hold NaN."""
    device, last = moe.device, rows if ends is None else min(ends[-1], rows)
    wide = 2 * columns if kind in GATED and layout != "apart" else columns
    h = (2 * randn(rows, wide + 8 * strided)[:, :wide]).to(device, dtype)
    up = (2 * randn(rows, columns, seed=1)).to(device, dtype) if layout == "apart" else None
    weights = (
        None
        if weights_dtype is None
        else torch.rand(rows, generator=seeded(torch.device("cpu"))).to(device, weights_dtype)
    )
    dy = randn(rows, columns, seed=2).to(device, dtype)
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32, device=device)
    for x in (h, up, weights, dy):
        if x is not None:
            x[last:] = float("nan")
    leaves = [x.requires_grad_() for x in (h, up, weights) if x is not None]
    options = {"up": up, "interleaved": layout == "interleaved", "limit": limit}
    y = gmm.moe.gated_activation(h, kind, weights=weights, offs=offs, **options)
    grads = torch.autograd.grad(y, leaves, dy)

    twins = [x.detach()[:last].double().cpu().requires_grad_() for x in leaves]
    options["up"] = twins[1] if up is not None else None
    want = expected_activation(twins[0], kind, **options)
    if weights is not None:
        want = want * twins[-1].unsqueeze(1)
    assert y.dtype == dtype and y.is_contiguous()
    close(y[:last].detach().cpu(), want.detach(), 8)
    for leaf, grad, exact in zip(leaves, grads, torch.autograd.grad(want, twins, dy[:last].double().cpu())):
        assert grad.dtype == leaf.dtype and grad.shape == leaf.shape
        close(grad[:last].cpu(), exact, 2 * columns if leaf is weights else 8)
        assert not grad[last:].any()
    assert not y[last:].any()
    assert moe.ran() == ({"activation", "activation_backward"} if moe.in_triton and rows and columns else set())


@kinds
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32))
def test_kinds(moe: MoeTarget, kind: str, dtype: torch.dtype) -> None:
    check(moe, kind, dtype)


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("layout", ("concatenated", "interleaved", "apart"))
@pytest.mark.parametrize("weights_dtype", (None, BF16, FP32))
def test_layouts(moe: MoeTarget, kind: str, layout: str, weights_dtype: torch.dtype | None) -> None:
    """With all that can be combined."""
    check(moe, kind, FP32, layout, limit=1.5, weights_dtype=weights_dtype, ends=[2, 2, 9])
    check(moe, kind, BF16, layout, weights_dtype=weights_dtype, strided=True)


@pytest.mark.parametrize("kind", ("relu2", "gelu", "identity"))
def test_plain_with_weights(moe: MoeTarget, kind: str) -> None:
    check(moe, kind, BF16, weights_dtype=FP32, ends=[4, 7])


@pytest.mark.parametrize("columns", (1, 3, 130, 1030))
def test_widths(moe: MoeTarget, columns: int) -> None:
    for layout in ("concatenated", "interleaved"):
        check(moe, "swiglu", FP16, layout, columns=columns, rows=3, weights_dtype=FP32)


@pytest.mark.parametrize("ends", ([0, 0], [13], [20], []))
def test_ends(moe: MoeTarget, ends: list[int]) -> None:
    """No rows in a group, all of them, an end past the buffer, no groups."""
    if ends:
        check(moe, "swiglu", FP32, ends=ends) if ends[-1] else _check_zeros(moe, ends)
    else:
        _check_zeros(moe, ends)


def _check_zeros(moe: MoeTarget, ends: list[int]) -> None:
    h = torch.full((13, 8), float("nan"), device=moe.device, requires_grad=True)
    y = gmm.moe.gated_activation(h, offs=torch.tensor(ends, dtype=torch.int64, device=moe.device))
    assert y.shape == (13, 4) and not y.any()
    (grad,) = torch.autograd.grad(y.sum(), h)
    assert not grad.any()


def test_no_rows(moe: MoeTarget) -> None:
    for rows, columns in ((0, 8), (3, 0)):
        h = torch.zeros(rows, columns, device=moe.device, requires_grad=True)
        y = gmm.moe.gated_activation(h, weights=torch.ones(rows, device=moe.device))
        assert y.shape == (rows, columns // 2) and torch.autograd.grad(y.sum(), h)[0].shape == h.shape


def test_large_values_and_nan(moe: MoeTarget) -> None:
    """Saturates without NaN; a NaN stays in its element."""
    for kind in KINDS:
        h = torch.tensor([[-1e4, 1e4, 1.0, float("nan")] * (2 if kind in GATED else 1)], device=moe.device)
        h = h.requires_grad_()
        y = gmm.moe.gated_activation(h, kind)
        (grad,) = torch.autograd.grad(y, h, torch.ones_like(y))
        for result in (y, grad):
            assert result.view(-1, 4)[:, :3].isfinite().all(), kind
        assert y[0, 3].isnan()


def test_derivatives_of_any_order(moe: MoeTarget) -> None:
    h, weights = randn(5, 8).to(moe.device).requires_grad_(), torch.rand(5).to(moe.device).requires_grad_()
    seconds = []
    for y in (
        gmm.moe.gated_activation(h, weights=weights),
        expected_activation(h, "swiglu") * weights.unsqueeze(1),
    ):
        first = torch.autograd.grad(y.square().sum(), (h, weights), create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), (h, weights)))
    for result, want in zip(*seconds, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)


def test_only_the_grads_that_are_needed(moe: MoeTarget) -> None:
    h, weights = randn(5, 8).to(moe.device), torch.rand(5).to(moe.device)
    for needed, other in ((h, weights), (weights, h)):
        needed.requires_grad_()
        gmm.moe.gated_activation(h, weights=weights).sum().backward()
        assert needed.grad is not None and other.grad is None
        needed.requires_grad_(False)
        needed.grad = None


def test_opcheck_and_compile() -> None:
    h, weights = randn(5, 8).requires_grad_(), torch.rand(5).requires_grad_()
    offs = torch.tensor([2, 4])
    torch.library.opcheck(torch.ops.gmm.moe_activation.default, (h, None, weights, offs, "swiglu", True, 2.0))
    torch.library.opcheck(torch.ops.gmm.moe_activation.default, (h, h.detach(), None, None, "geglu", False, None))
    compiled = torch.compile(gmm.moe.gated_activation, fullgraph=True, dynamic=True)
    for rows in (5, 9):
        h = randn(rows, 8).requires_grad_()
        weights = torch.rand(rows).requires_grad_()
        results = [f(h, "swiglu", weights=weights, limit=1.0) for f in (compiled, gmm.moe.gated_activation)]
        grads = [torch.autograd.grad(y.square().sum(), (h, weights)) for y in results]
        for a, b in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
            torch.testing.assert_close(a, b)


def test_create_graph_with_operands_of_one_another() -> None:
    """Each operand's gradient is its own part; the engine goes on from there to what operands have in common."""
    torch.manual_seed(0)
    x, weights = torch.randn(4, 6), torch.randn(4, requires_grad=True)
    h = (x * weights.sigmoid()[:, None]).detach().requires_grad_()
    for loss, leaf in (
        (lambda: gmm.moe.gated_activation(x * weights[:, None], weights=weights.sigmoid()).sum(), weights),
        (lambda: gmm.moe.gated_activation(h, "reglu", up=h).sum(), h),
        (lambda: gmm.moe.gated_activation(h, "geglu", up=h.sin(), limit=0.5).sum(), h),
    ):
        first = torch.autograd.grad(loss(), leaf)[0]
        torch.testing.assert_close(torch.autograd.grad(loss(), leaf, create_graph=True)[0], first)


def test_rows_of_no_group_with_create_graph() -> None:
    """NaN there reaches no gradient of the first or of the second order."""
    torch.manual_seed(0)
    h, weights, offs = torch.randn(4, 6), torch.rand(4), torch.tensor([1, 2])
    h[2:], weights[2:] = float("nan"), float("nan")
    h.requires_grad_(), weights.requires_grad_()
    y = gmm.moe.gated_activation(h, weights=weights, offs=offs)
    dy = torch.full_like(y, float("nan"))
    dy[:2] = 1
    first = torch.autograd.grad(y, (h, weights), dy.requires_grad_(), create_graph=True)
    second = torch.autograd.grad([g.square().sum() for g in first], (h, weights, dy))
    for g in (*first, *second):
        assert g.isfinite().all() and not g[2:].any() and g[:2].any()


@pytest.mark.parametrize("create_graph", (False, True))
def test_limit_between_two_values_of_the_dtype(create_graph: bool) -> None:
    """7 is above 6.99, which is 7 in bfloat16."""
    h = torch.tensor([[7.0, 1.0]], dtype=BF16, requires_grad=True)
    y = gmm.moe.gated_activation(h, limit=6.99)
    assert torch.autograd.grad(y.sum(), h, create_graph=create_graph)[0][0, 0] == 0


def test_no_forward_mode() -> None:
    """It raises; torch alone would return zeros."""
    x, index = torch.randn(4, 8), torch.zeros(4, 1, dtype=torch.int64)
    row_map, _ = gmm.moe.route(index, 1)
    for name, function, primal in (
        ("gated_activation", gmm.moe.gated_activation, x),
        ("permute", lambda x: gmm.moe.permute(x, index, 1)[0], x),
        ("permute_weights", lambda w: gmm.moe.permute_weights(w, row_map), x[:, :1]),
        ("unpermute", lambda y: gmm.moe.unpermute(y, row_map), x),
        ("permute", lambda x: gmm.compat.grouped_gemm.ops.permute(x, index)[0], x),
    ):
        with pytest.raises(NotImplementedError, match=f"{name}: expected tensors without tangents"):
            torch.func.jvp(function, (primal,), (primal,))


def test_errors() -> None:
    h = torch.zeros(4, 6)
    for call, text in (
        (lambda: gmm.moe.gated_activation(h, "swish"), "kind: expected one of swiglu, .*, got 'swish'"),
        (lambda: gmm.moe.gated_activation(h, "relu2", up=h), "up: expected none, as 'relu2' has no gate"),
        (lambda: gmm.moe.gated_activation(h, "gelu", limit=1.0), "limit: expected none"),
        (lambda: gmm.moe.gated_activation(h, up=h, interleaved=True), "interleaved: expected False"),
        (lambda: gmm.moe.gated_activation(h, limit=0.0), "limit: expected > 0, got 0.0"),
        (lambda: gmm.moe.gated_activation(h, limit=float("nan")), "limit: expected > 0, got nan"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for call, text in (
        (lambda: gmm.moe.gated_activation(h[0]), "h: expected 2 dimensions, got 1"),
        (lambda: gmm.moe.gated_activation(h.double()), "h: expected bfloat16, .*, got float64"),
        (lambda: gmm.moe.gated_activation(h[:, :5]), "h: expected an even number of columns, .*, got 5"),
        (lambda: gmm.moe.gated_activation(h, up=h[:, :5]), r"up: expected shape \[4, 6\] .*, got \[4, 5\]"),
        (lambda: gmm.moe.gated_activation(h, up=h.half()), "up: expected float32 .*, got float16"),
        (lambda: gmm.moe.gated_activation(h, weights=h[:, :1]), r"weights: expected shape \[4\] .*, got \[4, 1\]"),
        (lambda: gmm.moe.gated_activation(h, weights=torch.ones(3)), r"weights: expected shape \[4\] .*, got \[3\]"),
        (lambda: gmm.moe.gated_activation(h, offs=torch.ones(3)), "offs: expected int32 or int64, got float32"),
        (lambda: gmm.moe.gated_activation(h, offs=torch.ones(3, 1).int()), "offs: expected 1 dimension, got 2"),
        (lambda: gmm.moe.gated_activation(h, up=h.to("meta")), "up: expected a tensor on cpu .*, got one on meta"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
