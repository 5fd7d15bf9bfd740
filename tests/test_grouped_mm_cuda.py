"""grouped_mm: what only a GPU shows. Synchronisation, graphs, memory, streams, 64-bit addresses, host time, speed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from check import CANARY
from conftest import Target
from grouped_cases import BF16, FP16, FP32, MODES, compare, ends_of, expected, guarded_out, operands, out_shape, run
from torch import Tensor

import gmm

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SLEEP = 200_000_000  # cycles: about 0.1 s, far longer than any call here needs

modes = pytest.mark.parametrize("mode", MODES)
asynchronous = pytest.mark.parametrize("backend", ("cutlass", "triton", "auto"))


def require(backend: str) -> None:
    if backend == "cutlass" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the cutlass backend needs an sm90 GPU")


def calls(backend: str, counts: list[int]) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Forward, dgrad and wgrad; for the others every mode, too."""
    x, w, offs = operands("ragged_m", ends_of(counts), 0, 256, 128, BF16, CUDA)
    dy = operands("ragged_m", ends_of(counts), 0, 1, 256, BF16, CUDA, seed=5)[0]
    yield x, w, offs
    yield x, w.mT.contiguous().mT, offs
    yield dy, w.mT, offs
    yield dy.t(), x, offs
    if backend != "cutlass":
        for mode in MODES:
            yield operands(mode, ends_of(counts), 64, 48, 40, BF16, CUDA)


@pytest.fixture
def no_sync() -> Iterator[Callable[[], None]]:
    """After its call, whatever synchronises raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@asynchronous
def test_no_synchronisation_row_6(backend: str, no_sync: Callable[[], None]) -> None:
    """Forward and backward with bias, accumulation and weight_grad_out."""
    require(backend)
    prepared = [
        (*call, torch.empty(out_shape(*call), dtype=BF16, device=CUDA)) for call in calls(backend, [40, 0, 129])
    ]
    x, w, offs, _ = prepared[1]
    leaves = [t.detach().requires_grad_() for t in (x, w, torch.randn(3, 256, device=CUDA, dtype=BF16))]
    main_grad = torch.zeros(w.shape, device=CUDA)
    for warm in (True, False):
        if not warm:
            no_sync()
        for a, b, o, out in prepared:
            gmm.grouped_mm(a, b, o, out=out, backend=backend)
            gmm.grouped_mm(a, b, o, out=out, accumulate=True, backend=backend)
        gmm.grouped_mm(leaves[0], leaves[1], offs, leaves[2]).sum().backward()
        gmm.grouped_mm(leaves[0], leaves[1], offs, weight_grad_out=main_grad).sum().backward()


@pytest.mark.parametrize("out_dtype", (BF16, FP32))
@pytest.mark.parametrize("mode", ("ragged_m", "ragged_k"))
@pytest.mark.parametrize("counts", ([20, 0, 0, 7] * 18, [0] * 70, [0] * 40 + [300]), ids=("many", "all", "last"))
def test_zeros_where_no_product_is(mode: str, out_dtype: torch.dtype, counts: list[int]) -> None:
    """Of more groups than a window of the kernel's has, more rows than it has CTAs, in lines that fill no warp, with
    gaps between; ends that decrease count as the greatest before."""
    require("cutlass")
    ends = ends_of(counts)
    ends[35] = max(ends[35] - 9, 0)
    a, b, offs = operands(mode, ends, 304, 136, 64, BF16, CUDA, total=1000)
    shape = out_shape(a, b, offs)
    guard = torch.full((*shape[:-1], 152), CANARY, dtype=out_dtype, device=CUDA)
    out = guard[..., :136]
    out.fill_(float("nan"))
    a = a.t().contiguous().t() if mode == "ragged_k" else a
    assert offs is not None
    exact, bound = expected(a, b, offs.cummax(0).values.int(), out.clone(), None, False, False)
    gmm.grouped_mm(a, b, offs, out=out, backend="cutlass")
    compare(out, exact, bound)
    out.fill_(CANARY)
    assert (guard == CANARY).all(), "written outside of out"


@pytest.mark.parametrize("form", ("grouped_mm", "list"))
@pytest.mark.parametrize("groups", (30, 100))
@pytest.mark.parametrize("mode", ("ragged_m", "ragged_k"))
def test_tiles_from_both_ends(mode: str, groups: int, form: str) -> None:
    """Some clusters begin with the groups that have few tokens and go on until they meet the others. One and more
    windows of 32 groups, columns of which the last tile has no neighbour, and ends that decrease."""
    require("cutlass")
    counts = ([900, 33, 700, 80, 1, 0] * groups)[:groups]
    ends = ends_of(counts)
    if form == "grouped_mm":
        ends[7] -= 40
    a, b, offs = operands(mode, ends, 640, 640, 256, BF16, CUDA)
    a = a.t().contiguous().t() if mode == "ragged_k" else a
    assert offs is not None
    out = torch.full(out_shape(a, b, offs), float("nan"), dtype=BF16, device=CUDA)
    exact, bound = expected(a, b, offs.cummax(0).values.int(), out.clone(), None, False, False)
    if form == "grouped_mm":
        gmm.grouped_mm(a, b, offs, out=out, backend="cutlass")
    elif mode == "ragged_m":
        gmm.multi_tensor_gemm(a.split(counts), b.unbind(), out.split(counts), backend="cutlass")
    else:
        gmm.multi_tensor_gemm(a.split(counts, 1), b.split(counts), out.unbind(), backend="cutlass")
    compare(out, exact, bound)
    assert "descriptor_array" in (gmm.last_backend() or ""), gmm.last_backend()


@pytest.mark.parametrize("form", ("grouped_mm", "list"))
def test_counter_of_tiles_in_dirty_memory(form: str) -> None:
    """CUTLASS's clusters share a counter in the workspace, where groups are uneven. What the memory held before is
    nothing to it, nor are other calls, other streams and replays."""
    require("cutlass")
    counts = [700, 0, 96, 1300, 33, 2048, 400, 512]
    x, w, offs = operands("ragged_m", ends_of(counts), 0, 768, 256, BF16, CUDA)
    parts, experts = x.split(counts), w.unbind()

    def call(out: Tensor) -> None:
        if form == "list":
            gmm.multi_tensor_gemm(parts, experts, out.split(counts), backend="cutlass")
        else:
            gmm.grouped_mm(x, w, offs, out=out, backend="cutlass")

    def poison() -> None:  # what the allocator hands out next
        for fill in (0, -1, 0x5A5A5A5A):
            torch.full((128,), fill, dtype=torch.int32, device=CUDA)

    first = torch.full((len(x), 768), float("nan"), dtype=BF16, device=CUDA)
    call(first)
    compare(first, *expected(x, w, offs, first, None, False))
    streams, outs = [torch.cuda.Stream() for _ in range(3)], [torch.empty_like(first) for _ in range(3)]
    graph, captured = torch.cuda.CUDAGraph(), torch.empty_like(first)
    with torch.cuda.graph(graph):
        call(captured)
    for _ in range(30):
        captured.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        for stream, out in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(float("nan"))
                poison()
                call(out)
                call(out)
        torch.cuda.synchronize()
        assert all(torch.equal(first, out) for out in (*outs, captured))


@pytest.mark.parametrize("k", (8184, 8200))
@pytest.mark.parametrize("columns", (264, 392))  # three tiles, of which one has no neighbour, and four
def test_rows_along_a_long_k(columns: int, k: int) -> None:
    """From K = 8192 on CUTLASS takes the longer tiles of a group before the shorter ones: no row is left out, and both
    forms give the same bits."""
    require("cutlass")
    counts = [2500, 0, 1000, 30, 200]  # tiles of one length alone, and of two
    x, w, offs = operands("ragged_m", ends_of(counts), 0, columns, k, BF16, CUDA)
    for weights in (w, w.mT.contiguous().mT):
        ragged = run(x, weights, offs, "cutlass")
        outs, _ = guarded_out(x, weights, offs, BF16, False)
        gmm.multi_tensor_gemm(x.split(counts), weights.unbind(), outs.split(counts), backend="cutlass")
        assert ragged is not None and torch.equal(ragged, outs)


@pytest.mark.parametrize("columns", (8, 64, 128, 136, 192, 200, 256, 320, 448, 2048))
@pytest.mark.parametrize(("dtype", "accumulate"), ((BF16, False), (FP32, False), (FP32, True), (BF16, True)), ids=str)
def test_columns_of_weight_gradients(columns: int, dtype: torch.dtype, accumulate: bool) -> None:
    """CUTLASS cuts them into tiles of 192 and 128, and into 128 alone where that spreads few groups more evenly. The
    ragged form and the list form give the same bits."""
    require("cutlass")
    for rows, counts in ((136, [70, 0, 5, 333]), (512, [100] * 7), (2048, [64])):
        dy, x, offs = operands("ragged_k", ends_of(counts), rows, columns, 0, BF16, CUDA, total=sum(counts) + 9)
        dy = dy.t().contiguous().t()
        ragged = run(dy, x, offs, "cutlass", out_dtype=dtype, accumulate=accumulate)
        outs, _ = guarded_out(dy, x, offs, dtype, accumulate)
        parts = [t[: sum(counts)].split(counts) for t in (dy.t(), x)]
        gmm.multi_tensor_gemm(*parts, outs.unbind(), trans_a=True, accumulate=accumulate)
        assert ragged is not None and torch.equal(ragged, outs)


def test_cublas_synchronises_and_says_so(no_sync: Callable[[], None]) -> None:
    x, w, offs = operands("ragged_m", [5, 9], 0, 16, 8, BF16, CUDA)
    run(x, w, offs, "cublas")
    no_sync()
    with pytest.raises(RuntimeError, match="synchroniz"):
        gmm.grouped_mm(x, w, offs, backend="cublas")


@asynchronous
def test_graph_replays_with_new_offs_and_data_rows_7_22(backend: str) -> None:
    """Any number of times; the distribution of tokens changes, tail and empty groups come and go."""
    require(backend)
    for a, b, offs in calls(backend, [40, 0, 129, 87]):
        out, guard = guarded_out(a, b, offs, BF16, False)
        gmm.grouped_mm(a, b, offs, out=out, backend=backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gmm.grouped_mm(a, b, offs, out=out, backend=backend)
        for i, ends in enumerate(
            ([40, 40, 169, 256], [0, 0, 256, 256], [1, 2, 3, 4], [0, 0, 0, 0], [64, 128, 192, 200])
        ):
            if offs is not None:
                offs.copy_(torch.tensor(ends))
            for x in (a, b):
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(x))
            out.fill_(float("nan"))
            graph.replay()
            compare(out, *expected(a, b, offs, out, None, False))
        out.fill_(77.0)
        assert (guard == 77.0).all()


def test_graph_of_forward_and_backward() -> None:
    """A whole step, with weight_grad_out, replayed on other tokens."""
    x, w, offs = operands("ragged_m", [40, 40, 169], 0, 256, 128, BF16, CUDA)
    assert offs is not None
    leaves, main_grad = [t.requires_grad_() for t in (x, w)], torch.zeros(w.shape, device=CUDA)

    def step() -> Tensor:
        y = gmm.grouped_mm(leaves[0], leaves[1], offs, weight_grad_out=main_grad)
        return torch.autograd.grad(y, leaves[0], torch.ones_like(y))[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = step()
    for ends in ([1, 2, 169], [0, 160, 160]):
        offs.copy_(torch.tensor(ends))
        main_grad.zero_()
        graph.replay()
        dy = torch.ones(169, 256, dtype=BF16, device=CUDA)
        compare(dx, *expected(dy, w.detach().mT, offs, dx, None, False))
        compare(main_grad, *expected(x.detach().t(), dy, offs, main_grad, None, False))


@asynchronous
def test_equal_bits_in_1000_runs_rows_28_32(backend: str) -> None:
    require(backend)
    for a, b, offs in calls(backend, [128, 128, 256, 256, 128, 256, 256, 256]):
        first = gmm.grouped_mm(a, b, offs, backend=backend)
        different = torch.zeros((), dtype=torch.int64, device=CUDA)
        for _ in range(1000 if backend == "auto" else 100):
            different += (gmm.grouped_mm(a, b, offs, backend=backend) != first).sum()
        assert different == 0


@pytest.mark.parametrize("backend", ("cutlass", "triton", "cublas"))
def test_batch_invariance(backend: str) -> None:
    """A row has the same bits whatever else the other groups hold, for one average of rows."""
    require(backend)
    x, w, offs = operands("ragged_m", [64, 128, 192], 0, 256, 512, BF16, CUDA)
    assert offs is not None
    alone = gmm.grouped_mm(x, w, offs, backend=backend)[:64].clone()
    x[64:].normal_()
    offs.copy_(torch.tensor([64, 65, 190]))
    if backend != "cublas":  # which chooses its kernel by the size of each group
        assert torch.equal(gmm.grouped_mm(x, w, offs, backend=backend)[:64], alone)


@asynchronous
def test_ends_that_lie_stay_in_bounds(backend: str) -> None:
    """Operands in the middle of NaN, out in the middle of canaries; then a right call gives right values."""
    require(backend)
    for lies in ([-5, 10, 4, 999], [300, 5, 6, 7], [2**31 - 1, -(2**31), 0, 3], [-1] * 4, [256, 0, 256, 0]):
        for a, b, offs in calls(backend, [40, 0, 129, 87]):
            if offs is None:
                continue
            out, guard = guarded_out(a, b, offs, BF16, False)
            gmm.grouped_mm(a, b, torch.tensor(lies, dtype=offs.dtype, device=CUDA), out=out, backend=backend)
            torch.cuda.synchronize()
            out.fill_(77.0)
            assert (guard == 77.0).all()
            run(a, b, offs, backend)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_offs_of_both_dtypes(dtype: torch.dtype, grouped_target: Target) -> None:
    if grouped_target.device.type == "cpu":
        pytest.skip("see test_grouped_mm.py")
    for a, b, offs in calls(grouped_target.backend, [40, 0, 129]):
        run(a, b, None if offs is None else offs.to(dtype), grouped_target.backend)


@pytest.mark.memory(12)
@pytest.mark.parametrize("trans_b", (False, True))
def test_addresses_beyond_32_bits_row_19(trans_b: bool, grouped_target: Target) -> None:
    """64 experts of 4096 x 14336: the last one starts beyond 2^31 elements."""
    if grouped_target.device.type == "cpu":
        pytest.skip("see test_torch_leading_stride_beyond_32_bits")
    w = torch.zeros((64, 14336, 4096) if trans_b else (64, 4096, 14336), dtype=BF16, device=CUDA)
    w[-1].normal_()
    x = torch.randn(24, 4096, device=CUDA, dtype=BF16)
    offs = torch.tensor([8] * 63 + [24], dtype=torch.int32, device=CUDA)
    y = gmm.grouped_mm(x, w, offs, trans_b=trans_b, backend=grouped_target.backend)
    assert not y[:8].any()
    exact = x[8:].float() @ (w[-1].t() if trans_b else w[-1]).float()
    assert (y[8:].float() - exact).norm() <= 2.0**-8 * exact.norm()


@pytest.mark.memory(16)
@asynchronous
def test_more_than_32_bits_of_tokens(backend: str) -> None:
    """Row times stride beyond 2^31 in a and in out."""
    require(backend)
    tokens, k = 2**31 // 512 + 4096, 512
    x = torch.zeros(tokens, k, dtype=BF16, device=CUDA)
    x[-300:].normal_()
    w = torch.randn(2, k, 512, device=CUDA, dtype=BF16)
    offs = torch.tensor([tokens - 200, tokens - 8], dtype=torch.int32, device=CUDA)
    y = gmm.grouped_mm(x, w, offs, backend=backend)
    for rows, g in ((slice(-300, -200), 0), (slice(-200, -8), 1)):
        exact = x[rows].float() @ w[g].float()
        assert (y[rows].float() - exact).norm() <= 2.0**-8 * exact.norm()
    assert not y[-8:].any()


def test_weight_gradient_without_a_temporary() -> None:
    """Peak memory of a backward into main_grad: no buffer of the weight's size."""
    x, w, offs = operands("ragged_m", [100, 100, 400], 0, 2048, 2048, BF16, CUDA)
    x, w = x.requires_grad_(), w.requires_grad_()
    main_grad = torch.zeros(w.shape, device=CUDA)
    for _ in range(2):
        y = gmm.grouped_mm(x, w, offs, weight_grad_out=main_grad)
        dy = torch.ones_like(y)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y.backward(dy)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < w.numel() * w.element_size() // 4 and w.grad is None


@asynchronous
def test_work_is_ordered_on_the_callers_stream(backend: str) -> None:
    """Behind a long sleep on a side stream lie the true inputs and offs."""
    require(backend)
    for a, b, offs in calls(backend, [40, 0, 129, 87]):
        true = [t.clone() for t in (a, b)]
        for t in (a, b):
            t.fill_(float("nan"))
        gmm.grouped_mm(a, b, offs, backend=backend)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP)
            for t, value in zip((a, b), true, strict=True):
                t.copy_(value)
            y = gmm.grouped_mm(a, b, offs, backend=backend)
        torch.cuda.synchronize()
        compare(y, *expected(a, b, offs, y, None, False))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@asynchronous
def test_device_of_the_tensors_row_8(backend: str) -> None:
    require(backend)
    x, w, offs = operands("ragged_m", [40, 40, 169], 0, 256, 128, BF16, torch.device("cuda:1"))
    run(x, w, offs, backend)
    assert torch.cuda.current_device() == 0


def test_sm_margin_row_9(grouped_target: Target) -> None:
    if grouped_target.device.type == "cpu":
        pytest.skip("no SMs")
    x, w, offs = operands("ragged_m", [40, 40, 168], 0, 256, 128, BF16, CUDA)
    whole = gmm.grouped_mm(x, w, offs, backend=grouped_target.backend)
    part = gmm.grouped_mm(x, w, offs, sm_margin=32, backend=grouped_target.backend)
    assert torch.equal(whole, part)


# Time


def host_time(call: Callable[[], Any], runs: int = 300) -> float:
    """Median microseconds until the call returns."""
    times = []
    for i in range(runs):
        if i % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def test_host_time_row_34() -> None:
    """CUTLASS at most torch's own, Triton at most 25 us; with room for a slow machine."""
    x, w, offs = operands("ragged_m", [64] * 16, 0, 256, 128, BF16, CUDA)
    with torch.no_grad():
        theirs = host_time(lambda: torch._grouped_mm(x, w, offs))
        for backend, limit in (("cutlass", theirs), ("triton", 25.0)):
            if backend == "cutlass" and torch.cuda.get_device_capability() != (9, 0):
                continue
            ours = host_time(lambda backend=backend: gmm.grouped_mm(x, w, offs, backend=backend))
            assert ours <= 1.5 * limit, f"{backend}: {ours:.1f} us, torch._grouped_mm {theirs:.1f} us"


def test_no_tuning_at_run_time_row_30(python: Callable[..., Any]) -> None:
    """The first call of a process, and calls with token counts never seen."""
    code = """
import time, torch, gmm
w = torch.randn(8, 1024, 512, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
def seconds(tokens, backend):
    x = torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16)
    offs = torch.linspace(0, tokens, 9, device="cuda").int()[1:]
    torch.cuda.synchronize()
    start = time.perf_counter()
    gmm.grouped_mm(x, w, offs, backend=backend)
    torch.cuda.synchronize()
    return time.perf_counter() - start
for backend in ("auto", "triton"):
    print(seconds(4096, backend))
    print(max(seconds(tokens, backend) for tokens in range(4000, 4090)))
"""
    first, later, triton_first, triton_later = map(float, python(code).stdout.split())
    assert first < 2 or torch.cuda.get_device_capability() != (9, 0)
    assert triton_first < 10 and later < 0.1 and triton_later < 0.1


def test_never_slower_than_a_loop_row_21() -> None:
    """DeepSpeed's shape and a larger one, forward. With 5 % for noise: run it with nothing else on the GPU."""
    from triton.testing import do_bench

    for counts, n, k in (([64] * 16, 768, 2048), ([4096] * 8, 768, 2048)):
        x, w, offs = operands("ragged_m", ends_of(counts), 0, n, k, BF16, CUDA)
        parts, experts, out = x.split(counts), w.unbind(), torch.empty(len(x), n, dtype=BF16, device=CUDA)
        outs = out.split(counts)

        def loop() -> None:
            for a, b, o in zip(parts, experts, outs, strict=True):  # noqa: B023
                torch.mm(a, b, out=o)

        backends = ["triton", *(["cutlass"] if torch.cuda.get_device_capability() == (9, 0) else [])]
        for backend in backends:
            ours = partial(gmm.grouped_mm, x, w, offs, out=out, backend=backend)
            # In turns, as the clock falls while the GPU warms up.
            times = [(do_bench(loop, rep=30), do_bench(ours, rep=30)) for _ in range(5)]
            loop_ms, ours_ms = map(statistics.median, zip(*times, strict=True))
            assert ours_ms <= 1.05 * loop_ms, f"{backend}: {ours_ms:.3f} ms, loop {loop_ms:.3f} ms"


def test_the_faster_backend_is_chosen_row_39() -> None:
    """Triton by more than a tenth at no shape, as far as other work on the GPU lets one see."""
    require("cutlass")
    from triton.testing import do_bench

    for counts, n, k in (([512] * 128, 1536, 2048), ([512] * 128, 2048, 768), ([8] * 64, 768, 2048)):
        x, w, offs = operands("ragged_m", ends_of(counts), 0, n, k, BF16, CUDA)
        out = torch.empty(len(x), n, dtype=BF16, device=CUDA)

        def time_of(backend: str) -> float:
            call = lambda: gmm.grouped_mm(x, w.mT, offs, trans_b=True, out=out, backend=backend)  # noqa: B023, E731
            return do_bench(call, return_mode="median")

        chosen, triton = time_of("auto"), time_of("triton")
        assert chosen <= 1.1 * triton, f"{len(counts)} x {counts[0]}: {chosen:.3f} ms, triton {triton:.3f} ms"


@modes
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32))
def test_triton_takes_all(mode: str, dtype: torch.dtype) -> None:
    """Every mode and dtype, with IEEE float32 and with TF32 where torch allows it."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("Triton needs sm80")
    a, b, offs = operands(mode, [40, 40, 169], 40, 72, 136, dtype, CUDA)
    run(a, b, offs, "triton")
    torch.backends.cuda.matmul.allow_tf32 = True
    run(a, b, offs, "triton", tf32=dtype is FP32)


def test_auto_never_copies_to_the_host(no_sync: Callable[[], None]) -> None:
    """Odd strides and alignment, fp32, ragged N: another backend, and no synchronisation either."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("Triton needs sm80")
    odd = [operands(mode, [5, 5, 19], 7, 9, 11, dtype, CUDA) for mode in MODES for dtype in (BF16, FP32)]
    for warm in (True, False):
        if not warm:
            no_sync()
        for a, b, offs in odd:
            gmm.grouped_mm(a, b, offs)
            assert gmm.last_backend().startswith("triton: grouped_gemm_")


@pytest.fixture
def lonely_blocks() -> list[Tensor]:
    """64 MiB each, of the device's memory: with nothing mapped before them."""
    blocks = sorted((torch.empty(64 << 20, device=CUDA, dtype=torch.uint8) for _ in range(7)), key=Tensor.data_ptr)
    blocks = blocks[1::2]  # which lay side by side
    torch.cuda.empty_cache()
    ends = {s["address"] + s["total_size"] for s in torch.cuda.memory_snapshot()}
    alone = [b for b in blocks if b.data_ptr() not in ends]
    if not alone:
        pytest.skip("something is mapped before every block")
    return alone


TOTAL, N, K = 500, 400, 464  # no tile is full


@pytest.fixture
def product() -> tuple[Tensor, Tensor, Tensor]:
    require("cutlass")
    offs = torch.tensor([130, 130, 450], device=CUDA, dtype=torch.int32)
    x, w = (torch.randn(s, device=CUDA).to(BF16) for s in ((TOTAL, K), (3, K, N)))
    return x, w, offs


@pytest.mark.parametrize("form", ("ragged", "list"))
def test_d_may_begin_a_mapping(
    form: str, product: tuple[Tensor, Tensor, Tensor], lonely_blocks: Sequence[Tensor]
) -> None:
    """With 16-bit accumulation, which reads it."""
    x, w, offs = product
    want = gmm.grouped_mm(x, w, offs, out_dtype=FP32) + 1
    for block in lonely_blocks:
        d = block.view(BF16)[: TOTAL * N].view(TOTAL, N).fill_(1)
        if form == "ragged":
            gmm.grouped_mm(x, w, offs, out=d, accumulate=True, backend="cutlass")
        else:
            gmm.multi_tensor_gemm(x[:450].split([130, 320]), [w[0], w[2]], d[:450].split([130, 320]), accumulate=True)
        assert "descriptor_array" in gmm.last_backend()
        torch.testing.assert_close(d.float(), want, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize("which", (0, 1))
@pytest.mark.parametrize("epilogue", ("swiglu", "swiglu_backward"))
def test_h_may_begin_a_mapping(
    epilogue: str, which: int, product: tuple[Tensor, Tensor, Tensor], lonely_blocks: Sequence[Tensor]
) -> None:
    """And what the epilogue makes of it. A load of h through a map whose base lay before it was an illegal address."""
    x, w, offs = product

    def run(h: Tensor, d: Tensor) -> None:
        if epilogue == "swiglu":
            assert not torch.ops.gmm.swiglu_cutlass(x, w, offs, None, h, d)
        else:
            assert not torch.ops.gmm.swiglu_backward_cutlass(x, w, h, offs, None, d, None)

    sizes = ((TOTAL, N), (TOTAL, N // 2)) if epilogue == "swiglu" else ((TOTAL, 2 * N), (TOTAL, 2 * N))
    plain = [torch.randn(s, device=CUDA).to(BF16) for s in sizes]
    want = [t.clone() for t in plain]
    run(*want)
    for block in lonely_blocks:
        tensors = [t.clone() for t in plain]
        tensors[which] = block.view(BF16)[: plain[which].numel()].view(sizes[which]).copy_(plain[which])
        run(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
