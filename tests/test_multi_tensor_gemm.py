"""Values of the list form against fp64: every backend, layout and dtype, the field's tables and the edges."""

from __future__ import annotations

import random
from itertools import product

import cases
import pytest
import torch
from cases import DGRAD, FORWARD, LAYOUTS, WGRAD, Group, Layout
from check import Call, add_outputs, assert_ran, make_call, randn, run, run_functional, seeded
from conftest import CPU, GPU, Target

import gmm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)
halves = pytest.mark.parametrize("dtype", cases.HALVES, ids=cases.dtype_name)
accumulate = pytest.mark.parametrize("accumulate", (False, True), ids=("overwrite", "accumulate"))


# The field's tables


@accumulate
@dtypes
@layouts
@pytest.mark.parametrize("shape", cases.LIST_GEMMS, ids=lambda s: "x".join(map(str, s)))
def test_list_gemm(
    target: Target, shape: tuple[int, ...], layout: Layout, dtype: torch.dtype, accumulate: bool
) -> None:
    z, tokens, k, n = shape
    groups = cases.ragged(cases.random_splits(tokens, z), n, k, layout)
    run(make_call(groups, layout, dtype, target.device, accumulate=accumulate), target.backend)


@layouts
def test_no_rows_at_all(target: Target, layout: Layout) -> None:
    call = make_call(cases.ragged([0], 1536, 2048, layout), layout, BF16, target.device)
    (d,) = run(call, target.backend)
    assert not d.any()


@accumulate
@pytest.mark.parametrize("empty", ([], [7], [0, 10, 11, 19]), ids=("none", "one", "several"))
def test_wgrad_ragged_into_fp32_rows_2_13(target: Target, empty: list[int], accumulate: bool) -> None:
    tokens = [0 if i in empty else t for i, t in enumerate(cases.WGRAD_TOKENS)]
    outer, inner = (2048, 512) if target.device.type == "cuda" else (64, 16)
    call = make_call(
        cases.ragged(tokens, outer, inner, WGRAD), WGRAD, BF16, target.device, d_dtype=FP32, accumulate=accumulate
    )
    before = [d.clone() for d in call.d]
    results = run(call, target.backend)
    for i in empty:
        assert torch.equal(results[i], before[i] if accumulate else torch.zeros_like(before[i]))


@layouts
@pytest.mark.parametrize("groups", cases.ALL_DIFFERENT.values(), ids=cases.ALL_DIFFERENT)
def test_groups_that_all_differ(target: Target, groups: list[Group], layout: Layout) -> None:
    for accumulate, d_dtype in product((False, True), (BF16, FP32)):
        run(make_call(groups, layout, BF16, target.device, d_dtype=d_dtype, accumulate=accumulate), target.backend)


@accumulate
@layouts
def test_zero_work_row_4(target: Target, layout: Layout, accumulate: bool) -> None:
    call = make_call(cases.ragged([0] * 4, 512, 256, layout), layout, BF16, target.device, accumulate=accumulate)
    before = [d.clone() for d in call.d]
    for d, old in zip(run(call, target.backend), before, strict=True):
        assert torch.equal(d, old if accumulate else torch.zeros_like(d))


# Edge groups


@halves
@accumulate
@layouts
def test_edge_rows_row_29(target: Target, layout: Layout, accumulate: bool, dtype: torch.dtype) -> None:
    for outer, inner in ((64, 128), (200, 24)):
        groups = cases.ragged(cases.EDGE_ROWS, outer, inner, layout)
        for d_dtype in (dtype, FP32):
            call = make_call(groups, layout, dtype, target.device, d_dtype=d_dtype, accumulate=accumulate)
            run(call, target.backend)


@layouts
def test_edge_rows_fp32(target: Target, layout: Layout) -> None:
    run(make_call(cases.ragged(cases.EDGE_ROWS, 200, 24, layout), layout, FP32, target.device), target.backend)


@accumulate
@layouts
@pytest.mark.parametrize("ks", (cases.EDGE_K_ALIGNED, cases.EDGE_K), ids=("aligned", "any"))
def test_edge_k_row_11(target: Target, layout: Layout, ks: list[int], accumulate: bool) -> None:
    for d_dtype in (BF16, FP32):
        groups = [Group(m, 136, k) for k in ks for m in (8, 120)]
        run(make_call(groups, layout, BF16, target.device, d_dtype=d_dtype, accumulate=accumulate), target.backend)


@accumulate
@layouts
@pytest.mark.parametrize("ns", (cases.EDGE_N_ALIGNED, cases.EDGE_N), ids=("aligned", "any"))
def test_edge_n(target: Target, layout: Layout, ns: list[int], accumulate: bool) -> None:
    groups = [Group(m, n, 72) for n in ns for m in (8, 96)]
    for dtype in (BF16, FP32):
        run(make_call(groups, layout, dtype, target.device, bias=True, accumulate=accumulate), target.backend)


@layouts
@pytest.mark.parametrize("splits", cases.EDGE_SPLITS.values(), ids=cases.EDGE_SPLITS)
def test_empty_groups_row_5(target: Target, splits: list[int], layout: Layout) -> None:
    groups = cases.ragged(splits, 96, 64, layout)
    for accumulate, d_dtype in product((False, True), (BF16, FP32)):
        call = make_call(groups, layout, BF16, target.device, d_dtype=d_dtype, accumulate=accumulate)
        run(call, target.backend)


@pytest.mark.parametrize("count", cases.GROUP_COUNTS)
def test_many_groups(target: Target, count: int) -> None:
    sizes = cases.unbalanced_splits(24, count, seed=1)
    for layout in (FORWARD, WGRAD):
        run(make_call(cases.ragged(sizes, 32, 16, layout), layout, BF16, target.device), target.backend)


@pytest.mark.parametrize("wgrad_tokens", (0, 1, 129, 8192))
def test_one_group_with_all_tokens(target: Target, wgrad_tokens: int) -> None:
    tokens = [0, wgrad_tokens, 0]
    call = make_call(cases.ragged(tokens, 128, 64, WGRAD), WGRAD, BF16, target.device, d_dtype=FP32, accumulate=True)
    run(call, target.backend)


# Slices of one buffer, as torch.split gives them


def split_call(
    tokens: list[int], outer: int, inner: int, layout: Layout, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Call, list[torch.Tensor]]:
    """A call on torch.split slices of one buffer an operand, without outputs, and the buffers that were split."""
    gen = seeded(device, seed)
    total = sum(tokens)
    a = randn((total, outer if layout.trans_a else inner), dtype, device, gen)
    if layout.trans_a:
        b = randn((total, inner), dtype, device, gen)
        b_list = list(b.split(tokens))
    else:
        shape = (outer, inner) if layout.trans_b else (inner, outer)
        b = randn((len(tokens), *shape), dtype, device, gen)
        b_list = list(b)
    return Call(list(a.split(tokens)), b_list, [], layout=layout), [a, b]


@dtypes
@pytest.mark.parametrize("layout", (FORWARD, DGRAD, WGRAD), ids=("forward", "dgrad", "wgrad"))
def test_slices_of_one_buffer(target: Target, layout: Layout, dtype: torch.dtype) -> None:
    for tokens in ([40, 129, 1, 0, 86, 0], [0, 7, 64, 320]):
        call, _ = split_call(tokens, 128, 64, layout, dtype, target.device)
        if layout.trans_a:
            add_outputs(call, FP32)
        else:  # d as well: each group's neighbours are its guards
            out = torch.full((sum(tokens), 128), float("nan"), dtype=dtype, device=target.device)
            call.d = list(out.split(tokens))
        run(call, target.backend)


def test_sixteen_thousand_tokens_row_18(auto_target: Target) -> None:
    """A token count that no tile divides."""
    cuda = auto_target.device.type == "cuda"
    tokens = cases.random_splits(16333, 8)
    call, _ = split_call(tokens, 1024 if cuda else 8, 5120 if cuda else 64, FORWARD, BF16, auto_target.device)
    run(add_outputs(call, BF16), auto_target.backend)


# Contents that must not spread


@pytest.mark.parametrize("poison", (float("nan"), float("inf"), float("-inf")), ids=("nan", "inf", "-inf"))
@pytest.mark.parametrize("layout", (FORWARD, DGRAD, WGRAD), ids=("forward", "dgrad", "wgrad"))
def test_poison_stays_in_its_group(target: Target, layout: Layout, poison: float) -> None:
    tokens = [40, 24, 72, 1, 130]  # ends inside tiles: the next group's tokens lie where a tile reads on
    for poisoned, d_dtype in ((1, BF16), (3, BF16), (1, FP32), (3, FP32)):
        call, _ = split_call(tokens, 128, 64, layout, BF16, target.device)
        call.a[poisoned].fill_(poison)
        if layout.trans_a:
            call.b[poisoned].fill_(poison)
        results = run(add_outputs(call, d_dtype), target.backend)
        for i, d in enumerate(results):
            assert bool(d.isfinite().all()) == (i != poisoned)


@layouts
@halves
def test_nan_in_the_padding_of_strided_operands(target: Target, layout: Layout, dtype: torch.dtype) -> None:
    """Rows and columns around each operand are NaN."""
    tokens = [40, 136, 8, 64] if layout.trans_a and layout.trans_b else [40, 129, 1, 65]
    call = make_call(cases.ragged(tokens, 72, 24, layout), layout, dtype, target.device)
    for operands in (call.a, call.b):
        for i, x in enumerate(operands):
            rows, cols = x.shape
            buffer = torch.full((rows + 9, cols + 24), float("nan"), dtype=dtype, device=target.device)
            buffer[1 : rows + 1, 8 : cols + 8] = x
            operands[i] = buffer[1 : rows + 1, 8 : cols + 8]
    run(call, target.backend)


def test_old_d_is_not_read_unless_accumulating(target: Target) -> None:
    """NaN times zero is NaN: D's old contents must be skipped, not scaled. K = 0 too."""
    groups = [Group(64, 64, 64), Group(64, 64, 0), Group(1, 8, 8)]
    for d_dtype in (BF16, FP32):
        results = run(make_call(groups, FORWARD, BF16, target.device, d_dtype=d_dtype), target.backend)
        assert all(d.isfinite().all() for d in results)


# Bias, dtypes of d


@accumulate
@layouts
@dtypes
def test_bias(target: Target, dtype: torch.dtype, layout: Layout, accumulate: bool) -> None:
    groups = [Group(40, 72, 64), Group(8, 24, 0), Group(0, 16, 8), Group(129, 256, 40), Group(256, 200, 128)]
    for d_dtype in {dtype, FP32}:
        call = make_call(
            groups, layout, dtype, target.device, d_dtype=d_dtype, bias=True, accumulate=accumulate, seed=3
        )
        before = call.d[1].clone()
        results = run(call, target.backend)
        if results and call.bias:  # K = 0: the bias, exactly
            bias = call.bias[1].expand_as(before)
            assert torch.equal(results[1], before + bias if accumulate else bias)


def test_strided_bias(target: Target) -> None:
    """Every second element, one value for all columns, an odd address."""
    values = torch.arange(128, device=target.device).to(BF16)
    call = make_call([Group(40, 64, 32)] * 3, FORWARD, BF16, target.device)
    call.bias = [values[::2], values[5].expand(64), values[1:65]]
    run(call, target.backend)


@halves
@layouts
def test_fp32_d_keeps_what_16_bits_lose_row_33(target: Target, layout: Layout, dtype: torch.dtype) -> None:
    """main_grad in fp32: the sum of many small steps, each below the spacing of 16-bit numbers at the sum."""
    groups = cases.ragged([72, 128], 64, 96, layout)
    call = make_call(groups, layout, dtype, target.device, d_dtype=FP32, accumulate=True)
    for d in call.d:
        d.add_(1000)
    before = [d.double() for d in call.d]
    for _ in range(8):
        gmm.multi_tensor_gemm(call.a, call.b, call.d, **call.kwargs(), backend=target.backend)
        assert_ran(target.backend, call)
    for i, d in enumerate(call.d):
        a, b = call.operands(i)
        exact = before[i] + 8 * (a.double() @ b.double())
        assert (d.double() - exact).abs().max() < 8 * 2.0**-23 * exact.abs().max()


# Functional form


@layouts
def test_functional_form(target: Target, layout: Layout) -> None:
    groups = [Group(40, 72, 64), Group(0, 24, 8), Group(8, 24, 0), Group(136, 136, 40)]
    for dtype, (bias, out_dtype) in product(target.dtypes, ((False, None), (True, None), (False, FP32), (True, FP32))):
        call = make_call(groups, layout, dtype, target.device, d_dtype=out_dtype, bias=bias)
        run_functional(call, target.backend, out_dtype)


def test_results_do_not_share_memory(target: Target) -> None:
    call = make_call([Group(8, 16, 8)] * 3, FORWARD, BF16, target.device)
    first, second, third = run_functional(call, target.backend)
    kept = first.clone(), third.clone()
    second.fill_(5)
    assert torch.equal(first, kept[0]) and torch.equal(third, kept[1])
    assert all(x.is_contiguous() for x in (first, second, third))


def test_empty_lists() -> None:
    assert gmm.multi_tensor_gemm([], []) == []
    assert gmm.multi_tensor_gemm([], [], []) == []
    assert gmm.multi_tensor_gemm([], [], [], [], trans_a=True, accumulate=True) == []


def test_tuples_and_generators_of_split(target: Target) -> None:
    """torch.split and unbind return tuples."""
    x = torch.randn(24, 16, device=target.device).bfloat16()
    w = torch.randn(3, 8, 16, device=target.device).bfloat16()
    results = gmm.multi_tensor_gemm(x.split([8, 0, 16]), w.unbind(), trans_b=True, backend=target.backend)
    assert [tuple(y.shape) for y in results] == [(8, 8), (0, 8), (16, 8)]


def test_one_weight_for_every_group(target: Target) -> None:
    """The same tensor may stand in a list several times."""
    call = make_call([Group(32, 64, 48)] * 4, FORWARD, BF16, target.device)
    call.a, call.b = [call.a[0]] * 4, [call.b[0]] * 4
    results = run(call, target.backend)
    assert all(torch.equal(results[0], d) for d in results)


# SM margin, TF32, determinism, batch invariance


@pytest.mark.parametrize("sm_margin", (1, 16, 100))
def test_sm_margin_row_9(target: Target, sm_margin: int) -> None:
    for layout in (FORWARD, WGRAD):
        groups = cases.ragged([300, 8, 0, 700], 512, 256, layout)
        run(make_call(groups, layout, BF16, target.device), target.backend, sm_margin=sm_margin)


@pytest.mark.parametrize("target", [CPU, *GPU[1:]])
def test_sm_margin_that_leaves_nothing(target: Target) -> None:
    """The margin is a wish: where no SM would be left, the call runs all the same, through cuBLAS."""
    expect = "cublas" if target.backend == "auto" and target.device.type == "cuda" else None
    for sm_margin in (131, 132, 10**6):
        call = make_call([Group(300, 512, 256)] * 3, FORWARD, BF16, target.device)
        run(call, target.backend, sm_margin=sm_margin, expect=expect)


@pytest.mark.parametrize("target", [CPU, *GPU[1:]])
def test_fp32_is_ieee_unless_torch_allows_tf32(target: Target) -> None:
    groups = [Group(256, 128, 512), Group(64, 256, 1024)]
    torch.backends.cuda.matmul.allow_tf32 = False
    run(make_call(groups, FORWARD, FP32, target.device), target.backend)
    torch.backends.cuda.matmul.allow_tf32 = True
    run(make_call(groups, FORWARD, FP32, target.device), target.backend, tf32=True)


@layouts
def test_repeated_calls_give_equal_bits_row_32(target: Target, layout: Layout) -> None:
    groups = cases.ragged([304, 0, 24, 8, 520, 64], 256, 136, layout)
    for dtype in target.dtypes:
        call = make_call(groups, layout, dtype, target.device)
        first, *others = (run_functional(call, target.backend, FP32) for _ in range(5))
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@halves
@layouts
def test_a_group_alone_gives_the_bits_it_gives_among_others(target: Target, layout: Layout, dtype: torch.dtype) -> None:
    """Other groups change the tile that is chosen, and nothing in any result."""
    small, large = [8, 16, 40], [640, 1024, 2048]
    companies = [small + large, small, [40], [1024], large]
    outer, inner = 256, 1032
    results: dict[int, torch.Tensor] = {}
    for company in companies:
        call = make_call(cases.ragged(company, outer, inner, layout), layout, dtype, target.device, d_dtype=FP32)
        for i, tokens in enumerate(company):
            groups = cases.ragged([tokens], outer, inner, layout)
            one = make_call(groups, layout, dtype, target.device, seed=tokens)  # its data depends on its size alone
            call.a[i], call.b[i] = one.a[0], one.b[0]
        for tokens, d in zip(company, run(call, target.backend), strict=True):
            assert torch.equal(results.setdefault(tokens, d), d), f"{tokens} tokens among {company}"


# Calls that nobody thought of


def random_call(seed: int, device: torch.device) -> Call:
    """Any groups, layout, dtypes, bias, strides."""
    rng = random.Random(seed)
    step = rng.choice((1, 8, 8))  # multiples of 8 are what CUTLASS takes

    def size(largest: int) -> int:
        return rng.choice((0, 1, rng.randint(1, 40), rng.randint(1, largest), largest)) * step

    def dims() -> Group:
        return Group(size(60), size(40), size(40))

    groups = [dims() for _ in range(rng.randint(1, 12))]
    if rng.random() < 0.5:  # one weight shape, as in a layer
        groups = [Group(g.m, groups[0].n, groups[0].k) for g in groups]
    dtype = rng.choice(cases.DTYPES)
    call = make_call(
        groups,
        rng.choice(list(LAYOUTS.values())),
        dtype,
        device,
        d_dtype=rng.choice((dtype, FP32)),
        bias=rng.random() < 0.4,
        accumulate=rng.random() < 0.5,
        seed=seed,
    )
    for operands in (call.a, call.b):
        for i, x in enumerate(operands):
            if rng.random() < 0.1:
                operands[i] = x.t().contiguous().t()
            elif rng.random() < 0.1:
                operands[i] = torch.nn.functional.pad(x, (0, rng.choice((1, 8))))[:, : x.shape[1]]
    return call


@pytest.mark.parametrize("block", range(8))
def test_random_calls(target: Target, block: int) -> None:
    for seed in range(block * 12, block * 12 + 12):
        run(random_call(seed, target.device), target.backend)
