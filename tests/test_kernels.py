"""Every CUTLASS kernel by its name: the automatic choice takes only some of them at any size."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import DGRAD, FORWARD, KERNELS, LAYOUTS, WGRAD, Group, Layout
from check import make_call, run, same_bits

import gmm

BF16, FP32 = torch.bfloat16, torch.float32
CUDA = torch.device("cuda")

kernels = pytest.mark.parametrize("kernel", KERNELS)
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def explain_layout(kernel: str, layout: Layout) -> gmm.Plan:
    """The plan of a plain call of the kernel in the layout."""
    a, b = (128, 512) if layout.trans_a else (512, 128), (256, 128) if layout.trans_b else (128, 256)
    trans_a, trans_b = layout
    return gmm.explain([a] * 4, [b] * 4, trans_a=trans_a, trans_b=trans_b, sm=90, backend=f"cutlass: {kernel}")


def layouts_of(kernel: str) -> list[Layout]:
    """Those that the kernel takes: some are for weight gradients alone."""
    taken = []
    for layout in LAYOUTS.values():
        try:
            explain_layout(kernel, layout)
        except RuntimeError as error:
            assert kernel in str(error)
        else:
            taken.append(layout)
    return taken


def test_there_are_kernels() -> None:
    assert len(KERNELS) >= 2


@kernels
def test_each_can_be_asked_for(kernel: str) -> None:
    """In the form that last_backend() gives."""
    taken = layouts_of(kernel)
    assert taken, "no layout takes it"
    for layout in taken:
        chosen = explain_layout(kernel, layout)
        assert (chosen.backend, chosen.kernel) == ("cutlass", kernel)
        assert chosen.tile is not None and "x".join(map(str, chosen.tile)) in kernel
    with gmm.use_backend(chosen.backend + ": " + chosen.kernel):
        assert explain_layout(kernel, layout) == chosen


def test_each_layout_has_a_kernel() -> None:
    assert {layout for kernel in KERNELS for layout in layouts_of(kernel)} == set(LAYOUTS.values())


def test_unknown_kernel() -> None:
    with pytest.raises((ValueError, RuntimeError), match="sm90_fastest"):
        gmm.explain([(8, 8)], [(8, 8)], sm=90, backend="cutlass: sm90_fastest")


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", (False, True), ids=("overwrite", "accumulate"))
@pytest.mark.parametrize("dtype", cases.HALVES, ids=cases.dtype_name)
@layouts
@kernels
def test_values(kernel: str, layout: Layout, dtype: torch.dtype, accumulate: bool) -> None:
    """Edge rows, K and N, and sizes of several tiles; a kernel may refuse a form, but not with a wrong result."""
    edges = [
        cases.ragged(cases.EDGE_ROWS, 200, 136, layout),
        [Group(m, 136, k) for k in cases.EDGE_K_ALIGNED for m in (8, 120)],
        [Group(m, n, 72) for n in cases.EDGE_N_ALIGNED for m in (8, 96)],
        cases.ragged([0, 700, 1, 0, 1032, 64], 520, 776, layout),
        [Group(16, 64, 64)] * 100,
    ]
    took = 0
    for groups in edges:
        for d_dtype in (dtype, FP32):
            for bias in (False, True):
                call = make_call(groups, layout, dtype, CUDA, d_dtype=d_dtype, bias=bias, accumulate=accumulate)
                took += bool(run(call, f"cutlass: {kernel}"))
    if layout in layouts_of(kernel) and not accumulate:
        assert took >= 4, "a kernel that is never taken"


@pytest.mark.gpu
@pytest.mark.parametrize("layout", (FORWARD, DGRAD, WGRAD), ids=("forward", "dgrad", "wgrad"))
def test_all_give_equal_bits(layout: Layout) -> None:
    """The choice of a kernel changes the speed alone, so a group gives the same bits in any company."""
    for groups in (cases.ragged([0, 700, 1, 1032, 64], 520, 776, layout), cases.ragged([8] * 40, 256, 4096, layout)):
        results = {}
        for kernel in KERNELS:
            result = run(make_call(groups, layout, BF16, CUDA), f"cutlass: {kernel}")
            if result:
                results[kernel] = result
        first, *others = results.values()
        assert all(same_bits(first, other) for other in others), list(results)


@pytest.mark.gpu
@kernels
def test_sm_margin_of_each(kernel: str) -> None:
    """Any number of SMs gives the same bits, down to two."""
    layout = layouts_of(kernel)[0]
    groups = cases.ragged([300, 8, 0, 1100], 512, 256, layout)
    results = [
        run(make_call(groups, layout, BF16, CUDA), f"cutlass: {kernel}", sm_margin=margin) for margin in (0, 1, 65, 130)
    ]
    assert all(result and same_bits(results[0], result) for result in results)
