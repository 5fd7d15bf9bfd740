"""What only a GPU shows: streams, threads, devices, graphs, memory, synchronisation, and which kernels ran."""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import threading
from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
from cases import FORWARD, WGRAD, Group
from check import Call, add_outputs, compare, make_call, run
from conftest import Target

import gmm

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.device("cuda")
SLEEP = 200_000_000  # cycles: about 0.1 s, far longer than any call here needs

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def start(call: Call, backend: str) -> list[torch.Tensor]:
    """Enqueues the call."""
    return gmm.multi_tensor_gemm(call.a, call.b, call.d, call.bias, **call.kwargs(), backend=backend)


def verify(call: Call) -> None:
    """Compares a call that overwrites."""
    compare(call, call.d, call.d)


def forward_call(rows: list[int] | None = None, **options: Any) -> Call:
    return make_call(cases.ragged(rows or [40, 0, 129, 256], 256, 128, FORWARD), FORWARD, BF16, CUDA, **options)


# Which kernels ran


def kernels_of(work: Callable[[], Any]) -> list[str]:
    """Names of the kernels that the work launched."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [e.name for e in events if not e.name.startswith(("Memset", "Memcpy"))]


def test_the_backend_that_is_named_really_ran(cuda_target: Target) -> None:
    """last_backend() is our word; the profiler's names are the proof."""
    for d_dtype in (BF16, FP32):
        call = forward_call([512, 300, 8], d_dtype=d_dtype)
        start(call, cuda_target.backend)
        names = kernels_of(functools.partial(start, call, cuda_target.backend))
        assert gmm.last_backend().startswith(cuda_target.backend)
        assert any("gmm::sm90" in name for name in names) == (cuda_target.backend == "cutlass"), names


def test_one_launch_for_many_groups(cuda_target: Target) -> None:
    """The plan says how many kernels it takes; CUTLASS needs no more than a few for 64 groups."""
    call = forward_call([64] * 64)
    start(call, cuda_target.backend)
    launches = len(kernels_of(lambda: start(call, cuda_target.backend)))
    planned = gmm.explain(call.a, call.b, call.d, **call.kwargs(), backend=cuda_target.backend).launches
    if cuda_target.backend == "cutlass":
        assert launches == planned <= 4
    else:
        assert launches >= planned == 64  # a cuBLAS call may take several kernels


def test_tf32_only_when_torch_allows_it() -> None:
    """The size of the error tells which arithmetic ran."""
    call = make_call([Group(512, 512, 1024)] * 2, FORWARD, FP32, CUDA)
    exact = call.a[0].double() @ call.b[0].double().t()

    def error() -> float:
        start(call, "cublas")
        return float((call.d[0].double() - exact).norm() / exact.norm())

    torch.backends.cuda.matmul.allow_tf32 = False
    assert error() < 1e-6
    torch.backends.cuda.matmul.allow_tf32 = True
    assert 1e-5 < error() < 1e-3
    torch.backends.cuda.matmul.allow_tf32 = False
    assert error() < 1e-6


# Streams


def test_work_is_ordered_on_the_callers_stream(cuda_target: Target) -> None:
    """Behind a long sleep on a side stream lie the true inputs; work on any other stream would read NaN."""
    for rows in ([40, 0, 129, 256], [8] * 70):
        call = forward_call(rows)
        true_a = [x.clone() for x in call.a]
        for x in call.a:
            x.fill_(float("nan"))
        start(call, cuda_target.backend)  # warm: the first call may create handles
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP)
            for x, true in zip(call.a, true_a, strict=True):
                x.copy_(true)
            start(call, cuda_target.backend)
            results = [d * 1 for d in call.d]  # on the same stream, at once: the join must have been waited for
            for d in call.d:
                d.fill_(float("nan"))
        torch.cuda.synchronize()
        compare(call, results, results)


def test_no_synchronisation_row_6(cuda_target: Target) -> None:
    """The call returns while the stream still sleeps, and torch itself saw no synchronising call."""
    call = forward_call()
    start(call, cuda_target.backend)
    gmm.multi_tensor_gemm(call.a, call.b, trans_b=True, backend=cuda_target.backend)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLEEP)
        done.record()
        start(call, cuda_target.backend)
        results = gmm.multi_tensor_gemm(call.a, call.b, trans_b=True, backend=cuda_target.backend)
        asleep = not done.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert asleep, "the call waited for the stream"
    verify(call)
    compare(call, results, results)


def test_host_arrays_may_go_at_once_row_1(cuda_target: Target) -> None:
    """Calls pile up behind a sleep; each one's lists are freed and their memory reused before any runs."""
    calls = [forward_call([8 + i % 5, 0, 3 * i], seed=i) for i in range(40)]
    start(calls[0], cuda_target.backend)
    torch.cuda._sleep(SLEEP)
    for call in calls:
        gmm.multi_tensor_gemm(list(call.a), list(call.b), list(call.d), trans_b=True, backend=cuda_target.backend)
        gc.collect(0)
        _ = [bytearray(64 * i) for i in range(50)]
    for call in calls:
        verify(call)


def test_two_threads_and_two_streams_at_once(cuda_target: Target) -> None:
    """Shapes mixed, results of every call checked."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                calls = [
                    forward_call([40 + seed, 129, 8, 300], seed=seed),
                    make_call(cases.ragged([64, 0, 200 + seed], 128, 256, WGRAD), WGRAD, FP16, CUDA, d_dtype=FP32),
                    make_call([Group(64, 512, 1024)] * 9, FORWARD, BF16, CUDA, bias=True, seed=seed),
                ]
                expected = []
                for call in calls:
                    start(call, cuda_target.backend)
                    expected.append([d.clone() for d in call.d])
                stream.synchronize()
                for call in calls:
                    verify(call)
                barrier.wait()
                for call, bits in itertools.islice(itertools.cycle(zip(calls, expected, strict=True)), 150):
                    for d in call.d:
                        d.fill_(float("nan"))
                    start(call, cuda_target.backend)
                    assert gmm.last_backend().startswith(cuda_target.backend)
                    if not all(torch.equal(d, e) for d, e in zip(call.d, bits, strict=True)):
                        raise AssertionError(f"thread {seed}: other bits than alone")
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_streams_alternating_in_one_thread(cuda_target: Target) -> None:
    """Calls on two streams overlap in time; workspaces must not be shared between them."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls = [make_call([Group(700, 512, 2048)] * 6, FORWARD, BF16, CUDA, seed=i) for i in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                for d in call.d:
                    d.fill_(float("nan"))
                start(call, cuda_target.backend)
    torch.cuda.synchronize()
    for call in calls:
        verify(call)


# Devices


@two_gpus
def test_the_device_is_the_tensors_row_8(cuda_target: Target) -> None:
    for current, device in ((0, 1), (1, 0)):
        with torch.cuda.device(current):
            groups = cases.ragged([40, 129, 8], 256, 128, FORWARD)
            call = make_call(groups, FORWARD, BF16, torch.device("cuda", device))
            start(call, cuda_target.backend)
            assert torch.cuda.current_device() == current
            results = gmm.multi_tensor_gemm(call.a, call.b, trans_b=True, backend=cuda_target.backend)
            assert all(x.device.index == device for x in results)
            verify(call)
            compare(call, results, results)


@two_gpus
def test_devices_in_turn(cuda_target: Target) -> None:
    calls = [make_call([Group(300, 256, 512)] * 5, FORWARD, BF16, torch.device("cuda", i % 2)) for i in range(6)]
    for call in calls:
        start(call, cuda_target.backend)
    for call in calls:
        verify(call)


@two_gpus
def test_groups_on_different_devices_are_an_error() -> None:
    x = [torch.ones(8, 8, device="cuda:0"), torch.ones(8, 8, device="cuda:1")]
    with pytest.raises((ValueError, RuntimeError), match=r"a\[1\].*cuda:0.*cuda:1"):
        gmm.multi_tensor_gemm(x, x)


# CUDA graphs


GRAPH_CALLS: dict[str, Callable[[], Call]] = {
    "forward": lambda: forward_call([128, 256, 384]),
    "bias": lambda: forward_call([128, 0, 57], bias=True),
    "wgrad": lambda: make_call(cases.ragged([72, 0, 200], 128, 256, WGRAD), WGRAD, BF16, CUDA, d_dtype=FP32),
    "seventy_groups": lambda: forward_call([16] * 70),
    "all_different": lambda: make_call(cases.ALL_DIFFERENT["all"], FORWARD, BF16, CUDA),
}


@pytest.mark.parametrize("make", GRAPH_CALLS.values(), ids=GRAPH_CALLS)
def test_graph_replays_row_7(cuda_target: Target, make: Callable[[], Call]) -> None:
    """Every replay reads what the inputs hold then."""
    call = make()
    start(call, cuda_target.backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start(call, cuda_target.backend)
    for _ in range(5):
        for x in (*call.a, *call.b, *(call.bias or [])):
            x.normal_()
        for d in call.d:
            d.fill_(float("nan"))
        graph.replay()
        verify(call)
    for _ in range(200):
        graph.replay()
    verify(call)


def test_graph_of_accumulation(cuda_target: Target) -> None:
    """Ten replays add ten times."""
    call = make_call([Group(64, 128, 72)] * 3, FORWARD, BF16, CUDA, d_dtype=FP32, accumulate=True)
    start(call, cuda_target.backend)
    for d in call.d:
        d.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start(call, cuda_target.backend)
    for _ in range(10):
        graph.replay()
    for i, d in enumerate(call.d):
        exact = 10 * (call.a[i].double() @ call.b[i].double().t())
        assert (d.double() - exact).norm() < 1e-5 * exact.norm()


def test_graph_of_the_functional_form_and_its_backward(cuda_target: Target) -> None:
    """A training step: outputs and gradients in the graph's own memory."""
    x = torch.randn(200, 64, device=CUDA, dtype=BF16, requires_grad=True)
    weights = [torch.randn(128, 64, device=CUDA, dtype=BF16, requires_grad=True) for _ in range(4)]

    def step() -> list[torch.Tensor]:
        y = torch.cat(gmm.multi_tensor_gemm(x.split([72, 0, 100, 28]), weights, trans_b=True))
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, *weights])]

    with gmm.use_backend(cuda_target.backend):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(3):
            with torch.no_grad():
                x.normal_()
            graph.replay()
            for ours, eager in zip(captured, step(), strict=True):
                assert torch.equal(ours, eager)


def test_capture_as_the_first_call(cuda_target: Target, python: Callable[..., Any]) -> None:
    """No warm-up call is needed."""
    code = f"""
import torch, gmm
from test_cuda import forward_call, start, verify
call = forward_call()
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    start(call, {cuda_target.backend!r})
graph.replay()
verify(call)
"""
    python(code)


def test_capture_beside_eager_calls_of_another_thread(cuda_target: Target) -> None:
    """A capture in one thread does not swallow, or get broken by, another thread's calls."""
    captured, eager = forward_call([128, 40]), forward_call([300, 8, 64], seed=5)
    for call in (captured, eager):
        start(call, cuda_target.backend)
    torch.cuda.synchronize()
    stop = threading.Event()
    failures: list[BaseException] = []

    def call_on() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    start(eager, cuda_target.backend)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=call_on)
    thread.start()
    try:
        for _ in range(5):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                start(captured, cuda_target.backend)
            for d in captured.d:
                d.fill_(float("nan"))
            graph.replay()
            verify(captured)
    finally:
        stop.set()
        thread.join()
    torch.cuda.synchronize()
    assert not failures, failures
    verify(eager)


# Memory


def test_poisoned_allocator_row_14(cuda_target: Target) -> None:
    """Workspaces and outputs come out of memory full of NaN."""
    call = forward_call([8, 0, 1, 300])
    wgrad = make_call(cases.ragged([0, 3, 500, 0], 128, 256, WGRAD), WGRAD, BF16, CUDA)
    for _ in range(5):
        poison = [torch.full((2**n,), float("nan"), device=CUDA) for n in range(8, 25)]
        del poison
        for one in (call, wgrad):
            results = gmm.multi_tensor_gemm(
                one.a, one.b, trans_a=one.layout.trans_a, trans_b=one.layout.trans_b, backend=cuda_target.backend
            )
            compare(one, results, results)


def test_other_matrices_in_the_same_memory(cuda_target: Target) -> None:
    """CUTLASS remembers the descriptors of earlier calls: of other sizes, strides and dtypes at one address they must
    not serve, and a call that comes again must find its own."""
    memory = [torch.randn(2**16, device=CUDA).bfloat16() for _ in range(3)]
    shapes = [
        (64, 128, 64, 0),
        (64, 64, 128, 0),
        (64, 128, 64, 8),
        (40, 128, 64, 0),
        (64, 128, 200, 0),
        (3, 64, 64, 64),
    ]
    for (m, n, k, gap), dtype, d_dtype in 2 * list(itertools.product(shapes, cases.HALVES, (None, torch.float32))):
        size, view = ((m, k), (n, k), (m, n)), (dtype, dtype, d_dtype or dtype)
        a, b, d = (
            x.view(dt).as_strided((rows, columns), (columns + gap, 1))
            for x, (rows, columns), dt in zip(memory, size, view, strict=True)
        )
        for x in (a, b):
            x.copy_(torch.randn(x.shape, device=CUDA))
        call = Call([a], [b], [d.fill_(float("nan"))], layout=FORWARD)
        before = [d.clone()]
        compare(call, start(call, cuda_target.backend), before)


def test_memory_freed_after_the_call_may_be_reused(cuda_target: Target) -> None:
    """Operands are freed while the call still waits; torch gives their memory to later work of the same stream."""
    expected = forward_call()
    start(expected, cuda_target.backend)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    call = Call([x.clone() for x in expected.a], [x.clone() for x in expected.b], [], layout=FORWARD)
    add_outputs(call, BF16)
    results = start(call, cuda_target.backend)
    sizes = [x.shape for x in (*call.a, *call.b)]
    del call
    _ = [torch.full(shape, float("nan"), dtype=BF16, device=CUDA) for shape in sizes]
    assert all(torch.equal(x, y) for x, y in zip(results, expected.d, strict=True))


@pytest.mark.usefixtures("whole_gpu")
def test_no_memory_is_kept(cuda_target: Target) -> None:
    call = forward_call([300] * 16)
    for _ in range(3):
        start(call, cuda_target.backend)
    torch.cuda.synchronize()
    held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    for _ in range(200):
        start(call, cuda_target.backend)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    assert torch.cuda.mem_get_info()[0] >= free


# Determinism, and the price of accumulation


def test_equal_bits_in_1000_runs_row_28(cuda_target: Target) -> None:
    """Groups along K on which a peer's descriptors raced."""
    groups = [Group(cases.RACE_M, cases.RACE_N, k) for k in cases.RACE_KS]
    call = make_call(groups, WGRAD, BF16, CUDA, d_dtype=FP32)
    first = [d.clone() for d in start(call, cuda_target.backend)]
    verify(call)
    different = torch.zeros((), device=CUDA, dtype=torch.int64)
    for _ in range(1000):
        for d in call.d[:2]:
            d.fill_(float("nan"))
        start(call, cuda_target.backend)
        for d, expected in zip(call.d, first, strict=True):
            different += (d != expected).sum()
    assert different == 0


def test_accumulating_costs_its_memory_traffic_and_no_more_row_40(cuda_target: Target) -> None:
    """A peer took four times as long. Reading D once more costs a fraction at this size."""

    def milliseconds(accumulate: bool) -> float:
        groups = [Group(768, 2048, 4096)] * 8
        call = make_call(groups, WGRAD, BF16, CUDA, d_dtype=FP32, accumulate=accumulate)
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)
            begin.record()
            start(call, cuda_target.backend)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)

    assert milliseconds(True) < 2 * milliseconds(False)


def test_large_shapes_of_the_benchmark(cuda_target: Target) -> None:
    """Full-size projections, forward and weight gradient."""
    for shape in cases.MODEL_SHAPES[1:3]:
        for layout in (FORWARD, WGRAD):
            groups = cases.ragged(shape.splits(), shape.n, shape.k, layout)
            d_dtype = FP32 if layout is WGRAD else BF16
            run(make_call(groups, layout, BF16, CUDA, d_dtype=d_dtype), cuda_target.backend)
