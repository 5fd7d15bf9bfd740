"""gmm.compat.grouped_gemm: the old package's table, its call patterns in Megatron-LM and MegaBlocks, and its errors."""

from __future__ import annotations

import pytest
import torch
from check import randn, seeded
from conftest import Target
from grouped_cases import BF16, FP16, FP32, loop
from torch import Tensor

import gmm
from gmm.compat import grouped_gemm as gg

CPU = torch.device("cpu")


def sizes_of(groups: int, rows: int, equal: bool) -> Tensor:
    """Of groups with so many rows on average, on the CPU as the old package has them."""
    if equal:
        return torch.full((groups,), rows)
    cuts = torch.randint(0, groups * rows + 1, (groups - 1,), generator=seeded(CPU, 3)).sort().values
    return torch.cat([cuts, torch.tensor([groups * rows])]).diff(prepend=torch.zeros(1, dtype=torch.int64))


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype is dtype and ours.shape == exact.shape
    error = (ours.double() - exact.double()).norm()
    assert error <= {BF16: 5e-3, FP16: 6e-4, FP32: 2e-6}[dtype] * exact.double().norm()


@pytest.mark.parametrize("groups", (1, 8, 16))
@pytest.mark.parametrize("mkn", ((128, 128, 128), (128, 256, 512)), ids=str)
@pytest.mark.parametrize("equal", (True, False), ids=("equal", "unequal"))
@pytest.mark.parametrize("trans_b", (False, True), ids=("kn", "nk"))
def test_gmm(
    auto_target: Target, groups: int, mkn: tuple[int, int, int], equal: bool, trans_b: bool, dtype: torch.dtype = BF16
) -> None:
    """The old package's own table, forward and backward, sizes on the CPU and on the device."""
    m, k, n = mkn
    device, generator = auto_target.device, seeded(CPU)
    sizes = sizes_of(groups, m, equal)
    a = randn((groups * m, k), dtype, device, generator).requires_grad_()
    b = randn((groups, n, k) if trans_b else (groups, k, n), dtype, device, generator).requires_grad_()
    dy = randn((groups * m, n), dtype, device, generator)
    a64, b64 = (t.detach().double().requires_grad_() for t in (a, b))
    exact = loop(a64, b64.mT if trans_b else b64, sizes.cumsum(0))
    exact_grads = torch.autograd.grad(exact, (a64, b64), dy.double())
    for batch_sizes in (sizes, sizes.to(device), sizes.to(device, torch.int32)):
        y = gg.ops.gmm(a, b, batch_sizes, trans_b=trans_b)
        ran = gmm.last_backend()
        close(y, exact, dtype)
        for grad, exact_grad in zip(torch.autograd.grad(y, (a, b), dy), exact_grads):
            close(grad, exact_grad, dtype)
        assert ran.startswith("reference" if device.type == "cpu" else ("cutlass", "triton", "cublas")), ran


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_backend_gmm(auto_target: Target, dtype: torch.dtype) -> None:
    """MegaBlocks writes its backward with these: forward and dgrad, into c or not, and the weights' gradient."""
    device, generator = auto_target.device, seeded(CPU)
    sizes = torch.tensor([5, 0, 11, 8])
    x = randn((24, 32), dtype, device, generator)
    w = randn((4, 32, 40), dtype, device, generator).requires_grad_()
    dy = randn((24, 40), dtype, device, generator)
    starts = [0, *sizes.cumsum(0).tolist()]
    rows = [slice(*ends) for ends in zip(starts, starts[1:])]

    def by_group(f: object) -> list[Tensor]:
        return [f(g, r) for g, r in enumerate(rows)]  # type: ignore[operator]

    x64, w64, dy64 = (t.detach().double() for t in (x, w, dy))
    y = torch.cat(by_group(lambda g, r: x64[r] @ w64[g]))
    dx = torch.cat(by_group(lambda g, r: dy64[r] @ w64[g].t()))
    dw = torch.stack(by_group(lambda g, r: x64[r].t() @ dy64[r]))
    for exact, args, options in (
        (y, (x, w, sizes), {}),
        (y, (x, w.mT.contiguous(), sizes), {"trans_b": True}),
        (dx, (dy, w, sizes), {"trans_b": True}),
        (dw, (x, dy, sizes), {"trans_a": True}),
    ):
        result = gg.backend.gmm(*args, **options)
        assert not result.requires_grad
        close(result, exact, dtype)
        c = torch.full_like(result, float("nan"))
        assert gg.backend.gmm(*args, **options, c=c) is c and torch.equal(c, result)


def test_no_tokens() -> None:
    """Megatron-LM steps around empty inputs, because the old package does not take them."""
    x, w = torch.zeros(0, 16, requires_grad=True), torch.randn(3, 16, 8, requires_grad=True)
    y = gg.ops.gmm(x, w, torch.zeros(3, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, 8) and w.grad is not None and not w.grad.any()


def test_errors() -> None:
    x, w = torch.randn(6, 16), torch.randn(3, 16, 8)
    with pytest.raises(RuntimeError, match="batch_sizes: expected a sum of 6, the rows of a, got 7"):
        gg.ops.gmm(x, w, torch.tensor([3, 0, 4]))
    with pytest.raises(RuntimeError, match=r"batch_sizes\[1\]: expected >= 0, got -1"):
        gg.ops.gmm(x, w, torch.tensor([3, -1, 4]))
    with pytest.raises(RuntimeError, match="batch_sizes: expected 1 dimension of integers, got .*float32"):
        gg.ops.gmm(x, w, torch.tensor([3.0, 0, 3]))
    with pytest.raises(RuntimeError, match="offs: expected"):
        gg.ops.gmm(x, w, torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="trans_b: expected False with trans_a, got True"):
        gg.backend.gmm(x, w, torch.tensor([3, 0, 3]), trans_a=True, trans_b=True)
    with pytest.raises(RuntimeError, match=r"indices: expected shape \[6, k\]"):
        gg.ops.permute(x, torch.zeros(5, 2, dtype=torch.int32))
    for number in (-1, 13):
        with pytest.raises(RuntimeError, match=f"num_out_tokens: expected 0 to 12 .*, got {number}"):
            gg.ops.permute(x, torch.zeros(6, 2, dtype=torch.int32), number)
    with pytest.raises(RuntimeError, match="probs: expected 2 dimensions, got 1"):
        gg.ops.unpermute(x, torch.zeros(6, dtype=torch.int32), torch.ones(6))
    with pytest.raises(RuntimeError, match="row_id_map: expected 12 elements .*, got 6"):
        gg.ops.unpermute(x, torch.zeros(6, dtype=torch.int32), torch.ones(6, 2))


def test_permute_is_that_of_its_documentation(auto_target: Target) -> None:
    """The example of the old package's README, with its row_id_map."""
    device = auto_target.device
    indices = torch.tensor([[1, 2], [0, 1], [0, 2], [1, 2]], dtype=torch.int32, device=device)
    x = torch.arange(4.0, device=device)[:, None].expand(4, 4).contiguous()
    permuted, row_id_map = gg.ops.permute(x, indices)
    assert row_id_map.dtype == torch.int32 and row_id_map.tolist() == [2, 0, 1, 4, 5, 3, 6, 7]
    assert permuted[:, 0].tolist() == [1, 2, 0, 1, 3, 0, 2, 3]
    assert gg.ops.unpermute(permuted, row_id_map, torch.ones(4, 2, device=device))[:, 0].tolist() == [0, 2, 4, 6]


def permuted_in_torch(x: Tensor, indices: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """By gathers, and the flat choice that each row is."""
    order = indices.reshape(-1).argsort(stable=True)[:rows]
    return x[order // indices.shape[1]], order


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("top_k", (1, 2, 5))
@pytest.mark.parametrize("dropped", (0, 7), ids=("all", "dropping"))
def test_permute_and_unpermute(auto_target: Target, top_k: int, dropped: int, dtype: torch.dtype) -> None:
    """Values and gradients against gathers in fp64, with and without dropped rows."""
    device, generator, tokens, hidden = auto_target.device, seeded(CPU), 37, 48
    indices = torch.rand(tokens, 8, generator=generator).argsort(1)[:, :top_k].to(device)
    rows = tokens * top_k - dropped
    x = randn((tokens, hidden), dtype, device, generator).requires_grad_()
    probs = torch.rand(tokens, top_k, generator=generator).to(device).requires_grad_()
    x64, probs64 = (t.detach().double().requires_grad_() for t in (x, probs))

    permuted, row_id_map = gg.permute(x, indices.int(), num_out_tokens=rows)
    exact, order = permuted_in_torch(x64, indices, rows)
    assert torch.equal(permuted.double(), exact) and row_id_map.shape == (top_k * tokens,)
    assert int((row_id_map < 0).sum()) == dropped and int(row_id_map.max()) == rows - 1
    scale = torch.linspace(0.5, 2, rows, device=device)[:, None]  # so that no row stands for another
    back = gg.unpermute(permuted * scale.to(dtype), row_id_map, probs)
    flat = torch.zeros(tokens * top_k, hidden, dtype=torch.float64, device=device)
    flat = flat.index_copy(0, order, exact * scale.to(dtype).double())
    exact_back = (flat.view(tokens, top_k, hidden) * probs64[..., None]).sum(1)
    close(back, exact_back, dtype)

    dy = randn((tokens, hidden), dtype, device, generator)
    dx, dprobs = torch.autograd.grad(back, (x, probs), dy)
    exact_dx, exact_dprobs = torch.autograd.grad(exact_back, (x64, probs64), dy.double())
    close(dx, exact_dx, dtype)
    assert (dprobs - exact_dprobs).norm() <= (5e-3 if dtype is not FP32 else 2e-6) * exact_dprobs.norm()


def test_top_1(auto_target: Target) -> None:
    """One dimension of indices, no weights: a permutation and back."""
    x = torch.randn(9, 16, device=auto_target.device)
    permuted, row_id_map = gg.permute(x, torch.tensor([2, 0, 1, 2, 2, 0, 1, 1, 0], device=x.device))
    assert not torch.equal(permuted, x) and torch.equal(gg.unpermute(permuted, row_id_map), x)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ("cpu", "cuda"))
def test_does_not_synchronise(where: str) -> None:
    """Not even for sizes on the CPU, which are sent."""
    sizes = torch.tensor([5, 0, 11, 8], device=where)
    x = torch.randn(24, 32, device="cuda", dtype=BF16, requires_grad=True)
    w = torch.randn(4, 32, 40, device="cuda", dtype=BF16, requires_grad=True)
    indices = torch.randint(0, 4, (24, 2), device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y, row_id_map = gg.ops.permute(gg.ops.gmm(x, w, sizes), indices)
            gg.ops.unpermute(y, row_id_map, torch.ones(24, 2, device="cuda")).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
