"""The choice of backend and kernel: a table for every architecture, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from cases import DGRAD, FORWARD, LAYOUTS, WGRAD, Group, Layout
from check import make_call

import gmm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
SMS = (70, 75, 80, 86, 89, 90, 100, 120)

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def plan(groups: list[Group], layout: Layout = FORWARD, sm: int | None = 90, **options: Any) -> gmm.Plan:
    """What contiguous operands of these sizes would take."""
    a = [(k, m) if layout.trans_a else (m, k) for m, n, k in groups]
    b = [(n, k) if layout.trans_b else (k, n) for m, n, k in groups]
    return gmm.explain(a, b, trans_a=layout.trans_a, trans_b=layout.trans_b, sm=sm, **options)


# The decision table


@pytest.mark.parametrize("out_dtype", (None, FP32), ids=("same", "fp32"))
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)
@layouts
@pytest.mark.parametrize("sm", SMS)
def test_backend(sm: int, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    groups = [Group(256, 512, 128), Group(0, 512, 128), Group(8, 64, 24)]
    for accumulate in (False, True):
        call = {"dtype": dtype, "out_dtype": out_dtype, "accumulate": accumulate}
        if dtype is BF16 and sm < 80:
            with pytest.raises(RuntimeError, match=f"(?s)no backend.*bf16.*sm{sm}"):
                plan(groups, layout, sm, **call)
            continue
        chosen = plan(groups, layout, sm, **call)
        cutlass = sm == 90 and dtype is not FP32
        assert chosen.backend == ("cutlass" if cutlass else "cublas")
        assert set(chosen.reasons) == {"cutlass", "triton", "cublas", "reference"} and all(chosen.reasons.values())
        assert chosen.reasons[chosen.backend].startswith("chosen")
        if sm != 90:
            assert f"sm{sm}" in chosen.reasons["cutlass"]
        elif dtype is FP32:
            assert "fp32" in chosen.reasons["cutlass"]
        assert (chosen.tile is not None) == cutlass
        assert chosen.kernel.startswith("sm90" if cutlass else "cublas")
        assert chosen.backend in str(chosen) and chosen.kernel in str(chosen)


def misplaced(operand: str, group: int, what: str) -> Callable[[Any], None]:
    """Moves one tensor of a call to an odd address, or gives it an odd leading dimension."""

    def change(call: Any) -> None:
        x = getattr(call, operand)[group]
        if what == "address":
            call_with = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        else:
            call_with = torch.empty(x.shape[0], x.shape[1] + 1, dtype=x.dtype)[:, :-1]
        getattr(call, operand)[group] = call_with

    return change


@pytest.mark.parametrize("what", ("address", "leading dimension"))
@pytest.mark.parametrize("operand", ("a", "b", "d"))
@layouts
def test_alignment_row_10(layout: Layout, operand: str, what: str) -> None:
    """One misplaced tensor sends the call to cuBLAS, and the reason names it."""
    for d_dtype in (BF16, FP32):
        call = make_call([Group(64, 128, 72)] * 3, layout, BF16, CPU, d_dtype=d_dtype)
        assert gmm.explain(call.a, call.b, call.d, **call.kwargs(), sm=90).backend == "cutlass"
        misplaced(operand, 2, what)(call)
        chosen = gmm.explain(call.a, call.b, call.d, **call.kwargs(), sm=90)
        assert chosen.backend == "cublas" and chosen.copies == 0
        assert f"{operand}[2]" in chosen.reasons["cutlass"] and "16" in chosen.reasons["cutlass"]
        with pytest.raises(RuntimeError, match=rf"cutlass.*{operand}\[2\]"):
            gmm.explain(call.a, call.b, call.d, **call.kwargs(), sm=90, backend="cutlass")


@layouts
def test_what_is_misplaced_does_not_matter_without_work(layout: Layout) -> None:
    """Empty groups ask for nothing, and so does K = 0."""
    for empty in (Group(0, 7, 3), Group(5, 0, 3), Group(5, 7, 0)):
        assert plan([Group(64, 64, 64), empty], layout).backend == "cutlass"


def test_copies_are_counted() -> None:
    """What has no leading dimension is copied first; the copy is aligned, so CUTLASS takes it."""
    call = make_call([Group(64, 128, 72)] * 2, FORWARD, BF16, CPU)
    call.a[1] = torch.ones(1, dtype=BF16).expand(64, 72)
    call.b[0] = torch.ones(128, 144, dtype=BF16)[:, ::2]
    call.d[1] = torch.ones(128, 64, dtype=BF16).t()
    chosen = gmm.explain(call.a, call.b, call.d, trans_b=True, sm=90)
    assert (chosen.backend, chosen.copies) == ("cutlass", 3) and ", 3 contiguous copies\n" in str(chosen)


def test_why_the_pointer_array_takes_a_list() -> None:
    """Or does not: the fast path is the first choice, and needs no words; one asked for by name neither."""
    few, many = [Group(64, 128, 64)] * 8, [Group(64, 128, 64)] * 300
    first = "chosen: first in order of preference that takes the call"
    for groups, options, refusal in (
        (few, {}, ""),
        (few, {"layout": LAYOUTS["tt"]}, "a[0] is column-major and b[0] column-major"),
        (few, {"out_dtype": FP32}, "8 groups need large parameters, which no kernel for this D takes"),
        (many, {}, "300 groups need 5 launches"),
    ):
        taken = plan(groups, **options)
        assert ("pointer_array" in taken.kernel) == bool(refusal)
        reason = taken.reasons["cutlass"]
        assert reason.startswith(
            first + (f"; pointer array, as descriptor array refuses: {refusal}" if refusal else "")
        )
        assert bool(refusal) == (";" in reason)
    asked = plan(many, backend="cutlass").reasons["cutlass"]
    assert asked == "chosen: asked for; pointer array, as descriptor array refuses: 300 groups need 5 launches"
    kernel = "cutlass: " + plan(many).kernel
    assert plan(few, backend=kernel).reasons["cutlass"] == "chosen: asked for"


def test_slices_of_one_buffer_are_no_special_case() -> None:
    x = torch.empty(400, 64, dtype=BF16)
    w = [torch.empty(128, 64, dtype=BF16) for _ in range(4)]
    y = torch.empty(400, 128, dtype=BF16)
    tokens = [72, 0, 1, 327]
    assert gmm.explain(x.split(tokens), w, y.split(tokens), trans_b=True, sm=90).backend == "cutlass"
    assert gmm.explain(y.split(tokens), w, x.split(tokens), sm=90).backend == "cutlass"
    grads = [torch.empty(128, 64) for _ in w]
    assert (
        gmm.explain(y.split(tokens), x.split(tokens), grads, trans_a=True, accumulate=True, sm=90).backend == "cutlass"
    )


def test_bias() -> None:
    """CUTLASS takes it; at an odd address it need not."""
    groups = [Group(64, 128, 72)] * 2
    for accumulate, d_dtype in ((False, BF16), (True, BF16), (False, FP32), (True, FP32)):
        call = make_call(groups, FORWARD, BF16, CPU, bias=True, d_dtype=d_dtype, accumulate=accumulate)
        chosen = gmm.explain(call.a, call.b, call.d, call.bias, **call.kwargs(), sm=90)
        assert chosen.backend == "cutlass"
        call.bias = [torch.empty(129, dtype=d_dtype)[1:]] * 2
        chosen = gmm.explain(call.a, call.b, call.d, call.bias, **call.kwargs(), sm=90)
        assert chosen.backend == "cutlass" or "bias[0]" in chosen.reasons["cutlass"]


def test_no_groups() -> None:
    for sm in SMS[2:]:
        assert gmm.explain([], [], sm=sm).launches == 0
    assert plan([Group(0, 64, 64)] * 3).launches == 0


def test_launches() -> None:
    """CUTLASS: hardly any, however many groups. cuBLAS: one a group, on four streams at most."""
    for count in (1, 8, 64, 128, 1024):
        cutlass, cublas = (plan([Group(64, 128, 72)] * count, backend=name) for name in ("cutlass", "cublas"))
        assert 1 <= cutlass.launches <= 3 + count // 64
        assert cublas.launches == count and 1 <= cublas.streams <= 4
        assert cutlass.streams == 1


def test_workspace_is_modest() -> None:
    assert plan([Group(64, 128, 72)] * 1024).workspace_bytes < 64 * 2**20
    assert plan([Group(64, 128, 72)] * 1024, backend="cublas").workspace_bytes <= 4 * 64 * 2**20


def test_huge_products_keep_to_one_cublas_stream() -> None:
    assert plan([Group(4096, 28672, 4096)] * 8, backend="cublas").streams == 1
    assert plan([Group(4096, 28672, 4096), Group(64, 128, 72)], backend="cublas").streams == 2


def test_number_of_cublas_streams(python: Callable[..., Any]) -> None:
    """GMM_CUBLAS_STREAMS; what is no number of streams is an error that says so."""
    code = """
import os
import gmm
def streams():
    return gmm.explain([(64, 512)] * 24, [(256, 512)] * 24, trans_b=True, sm=90, backend="cublas").streams
for wrong in ("many", "0", "-1", "4.5", "1000"):
    os.environ["GMM_CUBLAS_STREAMS"] = wrong
    try:
        streams()
    except (ValueError, RuntimeError) as error:
        assert "GMM_CUBLAS_STREAMS" in str(error) and f"'{wrong}'" in str(error), error
    else:
        raise AssertionError(wrong)
os.environ["GMM_CUBLAS_STREAMS"] = "16"
print(streams())
"""
    assert python(code).stdout.strip() == "16"


# The tile


def tile_size(chosen: gmm.Plan) -> int:
    """Elements of D in a tile."""
    assert chosen.tile is not None
    return chosen.tile[0] * chosen.tile[1]


@pytest.mark.parametrize("shape", cases.MODEL_SHAPES, ids=lambda s: f"{s.label}-{s.tokens}")
def test_tile_follows_the_size_of_the_groups(shape: cases.ModelShape) -> None:
    """Regimes only: hundreds of rows a group fill large tiles, a few rows want small ones."""
    for layout in (FORWARD, DGRAD):
        n, k = (shape.n, shape.k) if layout is FORWARD else (shape.k, shape.n)
        size = tile_size(plan(cases.ragged(shape.splits(), n, k, layout), layout))
        if shape.tokens >= 512:
            assert size >= 128 * 192
        if shape.tokens <= 8:
            assert size <= 128 * 128


@pytest.mark.parametrize(
    ("groups", "rows", "n", "tile"),
    [
        (128, 1, 1536, (128, 128, 64)),
        (128, 80, 1536, (128, 128, 64)),
        (128, 81, 1536, (192, 128, 64)),
        (8, 64, 768, (128, 64, 64)),  # 96 tiles on 132 SMs
        (16, 64, 768, (128, 128, 64)),  # 192 tiles would be two rounds, where 96 are one
        (32, 64, 768, (128, 64, 64)),  # three rounds, of tiles that load two thirds of what two rounds of wide ones do
    ],
)
def test_tile_of_few_rows(groups: int, rows: int, n: int, tile: tuple[int, int, int]) -> None:
    listed = plan([Group(rows, n, 2048)] * groups)
    ragged = gmm.explain((groups * rows, 2048), (groups, n, 2048), offs=(groups,), trans_b=True, sm=90)
    for chosen in (listed, ragged):
        assert (chosen.backend, chosen.tile) == ("cutlass", tile)


@pytest.mark.parametrize("shape", cases.MODEL_SHAPES[:7], ids=lambda s: f"{s.label}-{s.tokens}")
def test_tile_of_weight_gradients(shape: cases.ModelShape) -> None:
    """D is a whole weight: large tiles, into fp32 as well, whatever the tokens."""
    groups = cases.ragged(shape.splits(), shape.n, shape.k, WGRAD)
    for out_dtype in (None, FP32):
        assert tile_size(plan(groups, WGRAD, out_dtype=out_dtype, accumulate=out_dtype is FP32)) >= 128 * 128


def test_kernel_names_tell_their_tile() -> None:
    for groups in ([Group(4096, 768, 2048)] * 8, [Group(8, 1536, 2048)] * 64, [Group(1024, 4096, 7168)] * 8):
        for out_dtype in (BF16, FP32):
            chosen = plan(groups, out_dtype=out_dtype)
            assert chosen.tile is not None
            assert "x".join(map(str, chosen.tile)) in chosen.kernel


def test_sm_margin_and_sm_count() -> None:
    """The choice knows how many SMs it has, and refuses what leaves none."""
    groups = [Group(4096, 768, 2048)] * 8
    assert plan(groups, sm_margin=16).backend == "cutlass"
    assert plan(groups, sm_count=78, sm_margin=8).backend == "cutlass"
    chosen = plan(groups, sm_margin=132)
    assert chosen.backend == "cublas" and "sm_margin" in chosen.reasons["cutlass"]


@pytest.mark.parametrize("sm", (0, -90, 9, 90000))
def test_impossible_architectures(sm: int) -> None:
    with pytest.raises(ValueError, match=f"^sm: expected .*, got {sm}$"):
        plan([Group(8, 8, 8)], sm=sm)


def test_bad_calls_are_explained_too() -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"b\[1\].*16.*24"):
        gmm.explain([(8, 16)] * 2, [(16, 8), (24, 8)], sm=90)
    with pytest.raises(ValueError, match="sm_count"):
        gmm.explain([(8, 16)], [(16, 8)], sm_count=10)
    with pytest.raises(ValueError, match="sm_count: expected >= 1, got -1"):
        gmm.explain([(8, 16)], [(16, 8)], sm=90, sm_count=-1)


def test_planning_writes_nothing_and_needs_no_gpu() -> None:
    """The tensors may be anywhere; 3.7 TB of operands are planned as fast as any."""
    groups = [Group(2**20, 2**20, 2**20)] * 2
    assert plan(groups).backend == "cutlass"
    call = make_call([Group(64, 128, 72)], FORWARD, BF16, CPU, accumulate=True)
    before = call.d[0].clone()
    gmm.explain(call.a, call.b, call.d, **call.kwargs(), sm=90)
    assert torch.equal(call.d[0], before)


def test_cpu_tensors_take_the_reference() -> None:
    call = make_call([Group(8, 16, 8)], FORWARD, BF16, CPU)
    chosen = gmm.explain(call.a, call.b, call.d, trans_b=True)
    assert chosen.backend == "reference"
    assert "CUDA" in chosen.reasons["cutlass"] and "CUDA" in chosen.reasons["cublas"]
    assert gmm.explain(call.a, call.b, trans_b=True, sm=90, backend="reference").backend == "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="shapes are then planned for the GPU")
def test_shapes_on_a_machine_without_a_gpu() -> None:
    """Both forms take the reference, and say how to plan for a GPU."""
    for a, b in (([(8, 16)], [(16, 24)]), ((8, 16), (2, 16, 24))):
        chosen = gmm.explain(a, b)
        assert chosen.backend == "reference"
        assert all("sm= plans for another" in chosen.reasons[name] for name in ("cutlass", "cublas"))


@pytest.mark.gpu
def test_the_plan_is_what_runs() -> None:
    for layout in LAYOUTS.values():
        for dtype, d_dtype in ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)):
            for groups in ([Group(64, 128, 72)] * 3, [Group(1024, 768, 2048)] * 4, [Group(7, 9, 5)]):
                call = make_call(groups, layout, dtype, torch.device("cuda"), d_dtype=d_dtype)
                chosen = gmm.explain(call.a, call.b, call.d, **call.kwargs())
                gmm.multi_tensor_gemm(call.a, call.b, call.d, **call.kwargs())
                assert gmm.last_backend() == f"{chosen.backend}: {chosen.kernel}"


def test_build_info() -> None:
    info = gmm.build_info()
    assert info["version"] == gmm.__version__
    assert {"cuda", "cutlass", "cublas", "archs", "compiler"} <= set(info)
