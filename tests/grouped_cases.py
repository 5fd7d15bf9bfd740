"""The calls of grouped_mm that the tests share: its four modes, torch's own table, DeepSpeed's, and results in fp64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from check import CANARY, UNIT, seeded
from torch import Tensor

import gmm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODES = ("ragged_m", "ragged_n", "ragged_k", "batched")

# DeepSpeed's table: tokens of each group, K, N.
COUNTS = [
    ([8] * 3, 32, 16),
    ([13, 9, 8], 32, 16),
    ([0, 16, 8], 32, 16),
    ([20, 0, 30, 14], 48, 40),
    ([40, 10, 0, 50, 30, 26, 60, 40], 128, 96),
    ([1, 1, 1], 16, 16),
    ([0, 0, 0], 16, 16),
]

# torch's: mode, M, N, K (the ragged one is 0) and ends.
ODD_SIZES = [
    ("ragged_k", 3, 7, 0, ([0, 1, 6, 6, 7], [0, 8, 16, 16, 27])),
    ("ragged_m", 0, 7, 259, ([0, 1, 3, 3, 5], [0, 8, 16, 16, 19])),
    ("ragged_n", 3, 0, 13, ([0, 8, 16, 16, 19], [0, 1, 6, 6, 7])),
    ("batched", 3, 7, 13, ([0] * 5,)),
]


def operands(
    mode: str,
    ends: Sequence[int],
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    total: int | None = None,
    offs_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Contiguous a, b and offs; the ragged one of m, n, k is `total`, by default the last end."""
    groups, generator = len(ends), seeded(torch.device("cpu"), seed)
    total = (max(ends, default=0)) if total is None else total
    shapes = {
        "ragged_m": ((total, k), (groups, k, n)),
        "ragged_n": ((groups, m, k), (k, total)),
        "ragged_k": ((m, total), (total, n)),
        "batched": ((groups, m, k), (groups, k, n)),
    }
    a, b = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes[mode])
    return a, b, None if mode == "batched" else torch.tensor(ends, dtype=offs_dtype, device=device)


T, G, K, N = 20, 3, 16, 24  # of a small MoE layer, whose middle group is empty and whose last tokens are in none


def layer_operands(mode: str, device: torch.device, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of that layer, in any mode."""
    return operands(mode, [5, 5, 18], 8, N, K, dtype, device, total=T)


def out_shape(a: Tensor, b: Tensor, offs: Tensor | None) -> tuple[int, ...]:
    batch = a.shape[:1] if offs is None else offs.shape if a.dim() == b.dim() else ()
    return (*batch, a.shape[-2], b.shape[-1])


def expected(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    out: Tensor,
    bias: Tensor | None,
    accumulate: bool,
    product_rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    """out in fp64, and what each element may be off by; more where the product is rounded before something is added."""
    before = out.double() if accumulate else torch.zeros_like(out, dtype=torch.float64)
    product, magnitude = torch.zeros_like(before), before.abs()
    cut = 0.0 if a.dtype is FP32 else math.ceil(a.shape[-1] / 8) * 2.0**-23  # tensor cores cut instead of rounding
    a, b = a.double(), b.double()
    total = {(2, 3): a.shape[0], (3, 2): b.shape[-1], (2, 2): a.shape[-1]}.get((a.dim(), b.dim()), 0)
    ends = [0] * (a.shape[0] + 1) if offs is None else [0, *offs.clamp(0, total).tolist()]
    for g, (start, end) in enumerate(itertools.pairwise(ends)):
        if offs is None:
            index, factors = (g,), (a[g], b[g])
        elif a.dim() < b.dim():
            index, factors = (slice(start, end),), (a[start:end], b[g])
        elif a.dim() > b.dim():
            index, factors = (slice(None), slice(start, end)), (a[g], b[:, start:end])
        else:
            index, factors = (g,), (a[:, start:end], b[start:end])
        product[index] = factors[0] @ factors[1]
        magnitude[index] += factors[0].abs() @ factors[1].abs()
        if bias is not None:
            row = bias[g, start:end] if a.dim() > b.dim() else bias[g]
            product[index] += row.double()
            magnitude[index] += row.double().abs()
    exact = before + product
    unit = 4 * math.sqrt(a.shape[-1] + 2) * 2.0**-24 + cut
    rounding = UNIT[out.dtype] * (exact.abs() + (2 * magnitude if product_rounded else 0))
    return exact, rounding + unit * magnitude + torch.finfo(out.dtype).smallest_normal * UNIT[out.dtype]


def conformance(
    mode: str, strided: bool, a_row_major: bool, b_row_major: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """CONFORMANCE's base case: m, n, k, G = 16, 32, 64, 4."""
    m, n, k, groups, s = 16, 32, 64, 4, int(strided)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=seeded(torch.device("cpu"))).to(device, dtype)

    def plane(rows: int, columns: int, row_major: bool, gap: int) -> Tensor:
        return randn(rows, columns + gap)[:, :columns] if row_major else randn(columns + gap, rows).t()[:, :columns]

    def stack(rows: int, columns: int, row_major: bool) -> Tensor:
        shape = (rows, columns * (1 + s)) if row_major else (columns * (1 + s), rows)
        x = randn(groups * (1 + s), *shape)
        return (x if row_major else x.mT)[:: 1 + s, :, :columns]

    if mode == "ragged_k":
        a = plane(m, k * groups, a_row_major, k * s)
        b = plane(n, k * groups, b_row_major, k * s).t()
    elif mode == "ragged_m":
        a = randn(m * groups, k * (1 + s))[:, :k] if a_row_major else randn(k, (m + 2 * s) * groups).t()[: m * groups]
        b = stack(n, k, b_row_major).mT
    elif mode == "ragged_n":
        a = stack(m, k, a_row_major)
        b = (randn(n * groups, k * (1 + s))[:, :k] if b_row_major else randn(k, n * (groups + s)).t()[: n * groups]).t()
    else:
        a, b = stack(m, k, a_row_major), stack(n, k, b_row_major).mT
    size = {"ragged_m": m, "ragged_n": n, "ragged_k": k}.get(mode)
    if size is None:
        return a, b, [None]
    ends = [size * (g + 1) for g in range(groups)]
    return a, b, [torch.tensor(e, dtype=torch.int32, device=device) for e in (ends, [ends[1], *ends[1:]])]


def ends_of(counts: Sequence[int]) -> list[int]:
    """Cumulative ends of groups with so many tokens."""
    return list(itertools.accumulate(counts))


def guarded_out(
    a: Tensor, b: Tensor, offs: Tensor | None, dtype: torch.dtype, accumulate: bool
) -> tuple[Tensor, Tensor]:
    """out inside a buffer of canaries: NaN, or random values to be added to."""
    shape = out_shape(a, b, offs)
    guard = torch.full((math.prod(shape) + 128,), CANARY, dtype=dtype, device=a.device)
    out = guard[64 : math.prod(shape) + 64].view(shape)
    random = torch.randn(shape, generator=seeded(torch.device("cpu"), 1))
    out.copy_(random) if accumulate else out.fill_(math.nan)
    return out, guard


def cutlass_must_take(a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor, bias: Tensor | None = None) -> bool:
    """What CUTLASS promises to take: 16-bit operands on 16-byte boundaries, rows of tokens in the buffers (forward,
    dgrad), or columns of a and rows of b (wgrad), and batches. It may take more."""

    def aligned(x: Tensor) -> bool:
        unit = 1 if x.stride(-1) == 1 else 0 if x.stride(-2) == 1 else None
        if unit is None or x.data_ptr() % 16:
            return False
        line, length = x.stride(-1 - unit), x.shape[-2 + unit]
        return line >= length and all(n * x.element_size() % 16 == 0 for n in (*x.stride()[:-2], line, length))

    operands = [a, b, out, *([] if bias is None else [bias.unsqueeze(0)])]
    if a.dtype is FP32 or out.stride(-1) != 1 or not all(x.numel() and aligned(x) for x in operands):
        return False
    if (bias is not None and bias.stride(-1) != 1) or (offs is not None and offs.stride(0) != 1 and len(offs) > 1):
        return False
    if offs is None or a.dim() < b.dim():
        return a.stride(-1) == 1
    return a.dim() == b.dim() and a.stride(0) == 1 and b.stride(1) == 1


def backends_that_may_run(
    backend: str, a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor, bias: Tensor | None = None
) -> tuple[str, ...]:
    """What gmm.last_backend() may name after a call with backend=backend."""
    if backend != "auto":
        return (backend,)
    if a.device.type == "cpu":
        return ("reference",)
    capability = torch.cuda.get_device_capability(a.device)
    if capability < (8, 0):
        return ("cublas",)
    if capability != (9, 0) or a.dtype is FP32:
        return ("triton",)
    return ("cutlass",) if cutlass_must_take(a, b, offs, out, bias) else ("cutlass", "triton")


def run(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    backend: str,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    trans_b: bool = False,
    tf32: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> Tensor | None:
    """Runs the call into a guarded out, or into that one and its buffer, and compares it with fp64. b is as in the
    product; with trans_b it is given as its transpose. None when CUTLASS refused a call that it does not promise, with
    its reason, and left out alone."""
    out, guard = out or guarded_out(a, b, offs, out_dtype or a.dtype, accumulate)
    before = out.clone()
    with torch.no_grad():
        try:
            given = b.mT if trans_b else b
            options = {"trans_b": trans_b, "accumulate": accumulate, "backend": backend}
            assert gmm.grouped_mm(a, given, offs, bias, out=out, **options) is out
        except RuntimeError as error:
            if backend != "cutlass" or cutlass_must_take(a, b, offs, out, bias):
                raise
            assert "cutlass" in str(error) and len(str(error)) > 40, f"no reason given: {error}"
            assert torch.equal(out.isnan(), before.isnan()) and out.eq(before).logical_or(out.isnan()).all()
            return None
    groups = (a if offs is None else offs).shape[0]
    if out.numel() and groups and (a.shape[-1] or bias is not None):
        ran = gmm.last_backend().split(":")[0]
        assert ran in backends_that_may_run(backend, a, b, offs, out, bias), f"backend={backend!r}: {ran!r} ran"
    else:
        assert gmm.last_backend() == "reference: no products"
    rounded = gmm.last_backend().startswith("cublas") and (accumulate or bias is not None)
    compare(out, *expected(a, b, offs, before, bias, accumulate, rounded), tf32=tf32)
    result = out.clone()
    out.fill_(CANARY)
    assert (guard == CANARY).all(), "written outside of out"
    return result


def compare(result: Tensor, exact: Tensor, bound: Tensor, tf32: bool = False) -> None:
    """Fails where the result is off by more than the bound, or not NaN or Inf where fp64 is."""
    assert result.shape == exact.shape
    bound = bound + (2.0**-9 * exact.abs().max() if tf32 and exact.numel() else 0)
    wrong = ~torch.where(exact.isfinite(), (result.double() - exact).abs() <= bound, result.isnan() | (result == exact))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        text = f"first {at}: {result[at]}, exact {exact[at]} +- {bound[at]:.2g}"
        pytest.fail(f"{int(wrong.sum())} of {wrong.numel()} wrong, {text}; {gmm.last_backend()} ran")


def loop(a: Tensor, b: Tensor, offs: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """What the op computes, in plain torch, group by group; differentiable."""
    if offs is None:
        product = torch.bmm(a, b)
        return product if bias is None else product + bias[:, None]
    total = a.shape[0] if a.dim() < b.dim() else b.shape[-1] if a.dim() > b.dim() else a.shape[-1]
    ends = [min(end, total) for end in offs.tolist()]
    slices = list(itertools.pairwise([0, *ends]))
    if a.dim() == b.dim():
        return torch.stack([a[:, s:e] @ b[s:e] for s, e in slices]) if slices else a.new_zeros(out_shape(a, b, offs))
    last = ends[-1] if ends else 0
    if a.dim() < b.dim():
        parts = [a[s:e] @ b[g] + (0 if bias is None else bias[g]) for g, (s, e) in enumerate(slices)]
        return torch.cat([*parts, a.new_zeros(total - last, b.shape[-1])])
    parts = [a[g] @ b[:, s:e] for g, (s, e) in enumerate(slices)]
    return torch.cat([*parts, a.new_zeros(a.shape[-2], total - last)], dim=1)


def check_grads(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    backend: str = "auto",
    *,
    bias: Tensor | None = None,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    dy: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of a, b and bias against fp64 autograd of the loop, group by group in norm. b is as it is given."""
    leaves = [x.detach().requires_grad_() for x in (a, b, bias) if x is not None]
    given_bias = leaves[2] if bias is not None else None
    y = gmm.grouped_mm(*leaves[:2], offs, given_bias, out_dtype, trans_b=trans_b, backend=backend)
    dy = torch.randn(y.shape, generator=seeded(torch.device("cpu"), 7)).to(y) if dy is None else dy
    twins = [x.detach().double().requires_grad_() for x in leaves]
    exact = loop(twins[0], twins[1].mT if trans_b else twins[1], offs, twins[2] if bias is not None else None)
    wanted: Sequence[Tensor | None] = [None] * len(twins)  # without groups nothing depends on them
    if exact.requires_grad:
        factor = dy.to(a.dtype).double()  # factors are of one dtype; the sum for the bias is of dy itself
        wanted = torch.autograd.grad(exact, twins, factor, allow_unused=True, retain_graph=True)
        if given_bias is not None:
            wanted = (*wanted[:2], *torch.autograd.grad(exact, twins[2:], dy.double(), allow_unused=True))
    grads = torch.autograd.grad(y, leaves, dy)
    for x, grad, want in zip(leaves, grads, wanted, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype
        want = torch.zeros_like(x, dtype=torch.float64) if want is None else want
        unit = 2.0**-20 if x.dtype == FP32 else 2.0**-8
        assert grad.isfinite().all() and (grad.double() - want).norm() <= unit * want.norm()
    return grads
