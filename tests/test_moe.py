"""gmm.moe: routing, permute, unpermute. In plain torch, and in Triton: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from check import seeded
from conftest import MoeTarget
from moe_cases import BF16, FP16, FP32, ROUTINGS, close, expected_route, routing
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gmm

routings = pytest.mark.parametrize("name", ROUTINGS)


@pytest.fixture
def device(moe: MoeTarget) -> Iterator[torch.device]:
    """The target's; Triton's kernels ran where it is Triton, and nowhere else."""
    yield moe.device
    assert bool(moe.ran()) == moe.in_triton


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(torch.device("cpu"), seed))


# Routing


@routings
@pytest.mark.parametrize("index_dtype", (torch.int64, torch.int32, torch.int16))
def test_route(name: str, index_dtype: torch.dtype, device: torch.device) -> None:
    index, experts = routing(name, device, index_dtype)
    row_map, offs = gmm.moe.route(index, experts)
    for result, want in zip((row_map, offs), expected_route(index, experts), strict=True):
        assert result.dtype == torch.int32 and torch.equal(result.cpu(), want)
    assert torch.equal(gmm.moe.route_sizes(index, experts), offs)
    assert torch.equal(gmm.moe.route_sizes(index.flatten(), experts), offs)


def test_route_of_a_strided_index(device: torch.device) -> None:
    index = torch.randint(6, (4, 19), generator=seeded(torch.device("cpu"))).to(device).t()
    row_map, offs = gmm.moe.route(index, 6)
    want = expected_route(index, 6)
    assert torch.equal(row_map.cpu(), want[0]) and torch.equal(offs.cpu(), want[1])


def test_sentinels_far_out(device: torch.device) -> None:
    """What the CPU refuses is a sentinel where the ids are not known: nothing is accessed out of bounds."""
    index = torch.tensor([[0, -(2**40)], [1, 2]], device=device)
    assert gmm.moe.route(index, 2)[0].tolist() == [[0, -3], [1, -4]]


# Permute, unpermute


def permuted_in_fp64(x: Tensor, row_map: Tensor) -> Tensor:
    """Row by row; differentiable."""
    rows = [torch.zeros_like(x[0]) for _ in range(row_map.numel())] if len(x) else []
    for t in range(row_map.shape[0]):
        for row in row_map[t].tolist():
            if row >= 0:
                rows[row] = x[t]
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[1])


def unpermuted_in_fp64(y: Tensor, row_map: Tensor, weights: Tensor) -> Tensor:
    """Token by token; differentiable."""
    out = y.new_zeros(row_map.shape[0], y.shape[1])
    for t in range(row_map.shape[0]):
        for j, row in enumerate(row_map[t].tolist()):
            if row >= 0:
                out[t] = out[t] + weights[t, j] * y[row]
    return out


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ROUTINGS for dtype in (BF16, FP16, FP32) if dtype == BF16 or ROUTINGS[name][0] < 40],
)
@pytest.mark.parametrize("weighted", (None, BF16, FP32))
def test_permute_and_back(name: str, dtype: torch.dtype, weighted: torch.dtype | None, device: torch.device) -> None:
    """Values and gradients against a loop over the pairs, in fp64."""
    index, experts = routing(name, device)
    (tokens, k), hidden = index.shape, 24
    x = randn(tokens, hidden).to(device, dtype).requires_grad_()
    weights = torch.rand((tokens, k), generator=seeded(torch.device("cpu"))).to(device, weighted or FP32)
    weights.requires_grad_(weighted is not None)
    drows, dout = randn(tokens * k, hidden, seed=1).to(x), randn(tokens, hidden, seed=2).to(x)
    permuted, row_map, offs = gmm.moe.permute(x, index, experts)
    y = randn(tokens * k, hidden, seed=3).to(x).requires_grad_()
    out = gmm.moe.unpermute(y, row_map, weights if weighted else None)
    assert permuted.dtype == out.dtype == dtype and permuted.is_contiguous() and out.is_contiguous()

    twins = [t.detach().double().cpu().requires_grad_() for t in (x, y, weights)]
    want_map = expected_route(index, experts)[0]
    want_permuted = permuted_in_fp64(twins[0], want_map)
    want = unpermuted_in_fp64(twins[1], want_map, twins[2] if weighted else torch.ones_like(twins[2]))
    assert torch.equal(permuted.cpu().double(), want_permuted) and not permuted[int(offs[-1]) :].any()
    close(out.cpu(), want.detach(), k)

    leaves = [x, y, weights] if weighted else [x, y]
    grads = torch.autograd.grad((permuted, out), leaves, (drows, dout))
    nothing = sum(0 * t.sum() for t in twins)
    total = (want_permuted * drows.cpu()).sum() + (want * dout.cpu()).sum() + nothing
    for leaf, grad, exact in zip(leaves, grads, torch.autograd.grad(total, twins[: len(leaves)]), strict=True):
        assert grad.dtype == leaf.dtype
        close(grad.cpu(), exact, 2 * hidden)


@pytest.mark.parametrize("hidden", (1, 7, 129, 1025))
def test_widths(hidden: int, device: torch.device) -> None:
    """Strided inputs, too."""
    index, experts = routing("three_blocks", device)
    x = randn(2 * index.shape[0], hidden + 3).to(device)[::2, 1 : hidden + 1]
    permuted, row_map, _ = gmm.moe.permute(x, index, experts)
    back = gmm.moe.unpermute(permuted[:, :], row_map)
    assert torch.equal(back, x * (row_map >= 0).sum(1, keepdim=True))
    wide = permuted.new_full((len(permuted), hidden + 5), float("nan"))
    wide[:, 2 : hidden + 2] = permuted
    assert torch.equal(gmm.moe.unpermute(wide[:, 2 : hidden + 2], row_map), back)


def test_rows_of_sentinels_do_not_count(device: torch.device) -> None:
    """NaN in y there, and in their weights, reaches nothing; nor do rows that are missing."""
    index, experts = routing("three_blocks", device)
    x = randn(index.shape[0], 16).to(device)
    permuted, row_map, offs = gmm.moe.permute(x, index, experts)
    weights = torch.rand(index.shape).to(device)
    want = gmm.moe.unpermute(permuted, row_map, weights)
    last = int(offs[-1])
    permuted[last:] = float("nan")
    weights = torch.where(row_map < 0, float("nan"), weights).requires_grad_()
    for y in (permuted, permuted[:last]):
        y = y.detach().requires_grad_()
        out = gmm.moe.unpermute(y, row_map, weights)
        assert torch.equal(out, want)
        dout = out.detach().clone()
        dout[(row_map < 0).all(1)] = float("nan")  # tokens without a row
        dy, dw = torch.autograd.grad(out, (y, weights), dout)
        assert dy.isfinite().all() and dw.isfinite().all() and not dy[last:].any() and not dw[row_map < 0].any()
        assert dy[:last].any()


def test_fewer_rows(device: torch.device) -> None:
    """Pairs whose rows were dropped count as zeros, and get none."""
    index, experts = routing("top_2", device)
    x, weights = randn(17, 8).to(device), torch.rand(17, 2).to(device).requires_grad_()
    permuted, row_map, _ = gmm.moe.permute(x, index, experts)
    cut = permuted[:20].clone().requires_grad_()
    out = gmm.moe.unpermute(cut, row_map, weights)
    kept = weights * (row_map < 20)
    torch.testing.assert_close(out, x * kept.sum(1, keepdim=True))
    dy, dw = torch.autograd.grad(out.square().sum(), (cut, weights))
    assert dy.shape == cut.shape and dy.any(1).all() and torch.equal(dw != 0, row_map < 20)


def test_permute_weights(device: torch.device) -> None:
    index, experts = routing("three_blocks", device)
    row_map, offs = gmm.moe.route(index, experts)
    weights = torch.rand(index.shape, generator=seeded(torch.device("cpu"))).to(device).requires_grad_()
    rows = gmm.moe.permute_weights(weights, row_map)
    for t in range(index.shape[0]):
        for j, row in enumerate(row_map[t].tolist()):
            assert rows[row if row >= 0 else ~row] == (weights[t, j] if row >= 0 else 0)
    (grad,) = torch.autograd.grad(rows, weights, torch.arange(rows.numel(), device=device).float())
    assert torch.equal(grad, torch.where(row_map >= 0, row_map, 0).float())


def layer(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    permuted, row_map, _ = gmm.moe.permute(x, index, 7)
    return gmm.moe.unpermute(permuted.sin(), row_map, weights)


def test_derivatives_of_any_order(device: torch.device) -> None:
    index, _ = routing("three_blocks", device)
    index = index[:6].contiguous()
    x, weights = randn(6, 3).to(device).requires_grad_(), torch.rand(6, 3).to(device).requires_grad_()

    def loop(x: Tensor, weights: Tensor) -> Tensor:
        kept = ((index >= 0) & (index < 7)).to(weights)
        return (weights * kept).sum(1, keepdim=True) * x.sin()

    seconds = []
    for function in (lambda x, w: layer(x, index, w), loop):
        y = function(x, weights)
        first = torch.autograd.grad(y.square().sum(), (x, weights), create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), (x, weights)))
    for result, want in zip(*seconds, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)


def test_compile_and_checkpoint() -> None:
    """One graph for every number of tokens; the same values and gradients."""
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (9, 14):
        index, _ = routing("three_blocks", torch.device("cpu"))
        index = index[:tokens]
        x, weights = randn(tokens, 8).requires_grad_(), torch.rand(tokens, 3).requires_grad_()
        want = torch.autograd.grad(layer(x, index, weights).square().sum(), (x, weights))
        for y in (compiled(x, index, weights), checkpoint(layer, x, index, weights, use_reentrant=False)):
            for result, grad in zip(torch.autograd.grad(y.square().sum(), (x, weights)), want, strict=True):
                torch.testing.assert_close(result, grad)


def test_meta() -> None:
    x, index = torch.empty(6, 8, device="meta"), torch.empty(6, 2, dtype=torch.int64, device="meta")
    permuted, row_map, offs = gmm.moe.permute(x, index, 5)
    assert permuted.shape == (12, 8) and row_map.shape == (6, 2) and offs.shape == (5,)
    assert gmm.moe.unpermute(permuted, row_map).shape == (6, 8)
    assert gmm.moe.permute_weights(torch.empty(6, 2, device="meta"), row_map).shape == (12,)


@pytest.mark.parametrize("op", ("moe_permute", "moe_unpermute", "moe_dots"))
def test_opcheck(op: str) -> None:
    index, experts = routing("three_blocks", torch.device("cpu"))
    row_map, _ = gmm.moe.route(index, experts)
    x, rows = randn(*index.shape[:1], 8).requires_grad_(), randn(index.numel(), 8).requires_grad_()
    weights = torch.rand(index.shape).requires_grad_()
    args = {
        "moe_permute": (x, row_map, weights, index.numel()),
        "moe_unpermute": (rows, row_map, weights),
        "moe_dots": (x, rows, row_map),
    }
    torch.library.opcheck(getattr(torch.ops.gmm, op).default, args[op])
    torch.library.opcheck(torch.ops.gmm.moe_route.default, (index, experts))


def test_no_columns() -> None:
    rows, row_map, _ = gmm.moe.permute(torch.zeros(3, 0), torch.zeros(3, 2, dtype=torch.int64), 1)
    assert rows.shape == (6, 0) and gmm.moe.unpermute(rows, row_map).shape == (3, 0)


def test_errors() -> None:
    x, index = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64)
    row_map = torch.zeros(4, 2, dtype=torch.int32)
    for call, text in (
        (lambda: gmm.moe.route(index[0], 3), "top_k_index: expected 2 dimensions, .*, got 1"),
        (lambda: gmm.moe.route(index.float(), 3), "top_k_index: expected integers, got float32"),
        (lambda: gmm.moe.route(index, -1), "num_experts: expected >= 0, got -1"),
        (lambda: gmm.moe.route(index + 4, 3), "top_k_index: expected ids up to 3 .*, got 4"),
        (lambda: gmm.moe.route_sizes(index + 4, 3), "top_k_index: expected ids up to 3 .*, got 4"),
        (lambda: gmm.moe.permute(x[0], index, 3), "x: expected 2 dimensions, .*, got 1"),
        (lambda: gmm.moe.permute(x.double(), index, 3), "x: expected bfloat16, float16 or float32, got float64"),
        (lambda: gmm.moe.permute(x[:3], index, 3), r"top_k_index: expected 3 rows .*, got 4"),
        (lambda: gmm.moe.permute(x, index.to("meta"), 3), "row_map: expected a tensor on cpu .*, got one on meta"),
        (lambda: gmm.moe.unpermute(x, row_map.long()), "row_map: expected int32, got int64"),
        (lambda: gmm.moe.unpermute(torch.zeros(9, 8), row_map), "y: expected at most 8 rows .*, got 9"),
        (lambda: gmm.moe.unpermute(x, row_map, x), r"top_k_weights: expected shape \[4, 2\] .*, got \[4, 8\]"),
        (lambda: gmm.moe.unpermute(x, row_map, row_map), "top_k_weights: expected bfloat16, .*, got int32"),
        *(
            (
                lambda wrong=wrong: gmm.moe.permute_weights(wrong, row_map),
                r"top_k_weights: expected shape \[4, 2\] .*, got",
            )
            for wrong in (x, torch.zeros(2, 4), torch.zeros(8))
        ),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


# On a GPU alone


@pytest.mark.gpu
def test_no_synchronisation_and_graphs() -> None:
    """A captured layer gives what eager gives for the routing that the index then holds."""
    device = torch.device("cuda")
    x = randn(300, 512).to(device, BF16)
    weights = torch.rand(300, 4, device=device)
    indices = [torch.randint(-1, 9, (300, 4), device=device) for _ in range(4)]

    def step(index: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(), weights.detach().requires_grad_()]
        permuted, row_map, offs = gmm.moe.permute(leaves[0], index, 8)
        rows = gmm.moe.permute_weights(leaves[1], row_map)
        h = gmm.moe.gated_activation(permuted, "swiglu", weights=rows, offs=offs)
        y = gmm.moe.unpermute(torch.cat([h, h], 1), row_map, leaves[1])
        return [y, *torch.autograd.grad(y.float().square().sum(), leaves), gmm.moe.route_sizes(index, 8)]

    want = [step(index) for index in indices]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in indices:
            step(index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    static, graph = indices[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(static)
    for _ in range(2):
        for index, values in zip(indices, want, strict=True):
            static.copy_(index)
            for result in results:
                result.fill_(-1)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(results, values, strict=True))


@pytest.mark.gpu
def test_large_on_a_gpu() -> None:
    """Qwen3-30B's layer: the order against torch's own sort, equal bits from run to run."""
    device = torch.device("cuda")
    index = torch.randint(0, 129, (8192, 8), device=device)
    row_map, offs = gmm.moe.route(index, 128)
    want = torch.empty_like(index.flatten())
    want[index.flatten().sort(stable=True).indices] = torch.arange(index.numel(), device=device)
    assert torch.equal(torch.where(row_map >= 0, row_map, ~row_map).flatten(), want.int())
    assert torch.equal(row_map < 0, index == 128)
    assert torch.equal(offs, index.flatten().bincount(minlength=129)[:128].cumsum(0).int())
    x, weights = torch.randn(8192, 2048, device=device, dtype=BF16), torch.rand(8192, 8, device=device)
    runs = []
    for _ in range(3):
        permuted, row_map, _ = gmm.moe.permute(x, index, 128)
        runs.append((permuted, gmm.moe.unpermute(permuted, row_map, weights)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    kept = (weights * (index < 128)).double().sum(1, keepdim=True)
    close(runs[0][1].cpu(), (kept * x.double()).cpu(), 8)


@pytest.mark.gpu
def test_offsets_beyond_2_31() -> None:
    """Rows whose addresses do not fit into 32 bits."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.randn(160_000, 2048, device="cuda", dtype=BF16)
    index = torch.arange(8, device="cuda").expand(160_000, 8)
    permuted, row_map, _ = gmm.moe.permute(x, index, 8)
    assert permuted.numel() > 2**31 and torch.equal(permuted[-1], x[-1]) and torch.equal(permuted[7 * 160_000], x[0])
    back = gmm.moe.unpermute(permuted, row_map)
    assert torch.equal(back, (8 * x.float()).to(BF16))
