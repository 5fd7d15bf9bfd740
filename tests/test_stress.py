"""Many threads and streams, minutes of random calls, forks, and an interpreter that ends with work in flight.

Each result must have the bits that the same call gave alone. `make soak` sets GMM_TEST_SOAK to the seconds that
test_soak takes, and the others then make many times as many calls. On a CPU the same code runs on the reference.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import cases
import pytest
import torch
from cases import FORWARD, WGRAD
from check import compare, make_call
from grouped_cases import BF16, FP32, MODES, ends_of, expected, operands
from grouped_cases import compare as compare_grouped
from torch import Tensor

import gmm

SOAK = float(os.environ.get("GMM_TEST_SOAK", "0"))
CPU = pytest.param(torch.device("cpu"), id="cpu")
GPU = pytest.param(torch.device("cuda"), id="gpu", marks=pytest.mark.gpu)
devices = pytest.mark.parametrize("device", (CPU, GPU))

Work = Callable[[], list[Tensor]]  # a call, with new outputs each time


def backends(device: torch.device, lists: bool) -> list[str]:
    """Those to mix."""
    if device.type == "cpu":
        return ["reference"]
    named = ["cublas"] if lists else ["triton"]
    return [*named, "cutlass"] if torch.cuda.get_device_capability(device) == (9, 0) else named


def list_work(seed: int, device: torch.device) -> Iterator[Work]:
    """Forward with bias, and the weight gradient into fp32."""
    rows = [40 + seed, 0, 129, 8, 300]
    for layout, d_dtype, bias in ((FORWARD, BF16, True), (WGRAD, FP32, False)):
        groups = cases.ragged(rows, 256, 128, layout)
        call = make_call(groups, layout, BF16, device, d_dtype=d_dtype, bias=bias, seed=seed)
        for backend in backends(device, lists=True):

            def work(call: Any = call, backend: str = backend, d_dtype: torch.dtype = d_dtype) -> list[Tensor]:
                trans_a, trans_b = call.layout
                options = {"trans_a": trans_a, "trans_b": trans_b, "out_dtype": d_dtype, "backend": backend}
                return gmm.multi_tensor_gemm(call.a, call.b, bias=call.bias, **options)

            results = work()
            compare(call, results, results)
            yield work


def grouped_work(seed: int, device: torch.device) -> Iterator[Work]:
    """Forward and weight gradient; odd sizes in every mode, where there is Triton."""
    x, w, offs = operands("ragged_m", ends_of([40 + seed, 0, 129, 87]), 0, 256, 128, BF16, device, seed=seed)
    dy = operands("ragged_m", ends_of([40 + seed, 0, 129, 87]), 0, 1, 256, BF16, device, seed=seed + 1)[0]
    calls = [(backend, x, w, offs) for backend in backends(device, lists=False)]
    calls += [(backend, dy.t(), x, offs) for backend in backends(device, lists=False)]
    calls += [("auto", *operands(mode, [5, 5, 19], 7, 9, 11, BF16, device, seed=seed)) for mode in MODES]
    for backend, a, b, ends in calls:

        def work(backend: str = backend, a: Tensor = a, b: Tensor = b, ends: Tensor | None = ends) -> list[Tensor]:
            return [gmm.grouped_mm(a, b, ends, backend=backend)]

        compare_grouped(work()[0], *expected(a, b, ends, work()[0], None, False))
        yield work


def backward_work(seed: int, device: torch.device) -> Iterator[Work]:
    """A layer's output and gradients."""
    x, w, offs = operands("ragged_m", ends_of([40, 0, 60 + seed]), 0, 256, 128, BF16, device, seed=seed)
    leaves = [x.requires_grad_(), w.requires_grad_()]

    def work() -> list[Tensor]:
        y = gmm.grouped_mm(*leaves, offs)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

    yield work


def all_work(seed: int, device: torch.device) -> list[tuple[Work, list[Tensor]]]:
    """Calls of every kind with the bits that they give alone; those compared with fp64."""
    works = [*list_work(seed, device), *grouped_work(seed, device), *backward_work(seed, device)]
    pairs = [(work, [y.clone() for y in work()]) for work in works]
    synchronize(device)
    return pairs


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def streams_of(device: torch.device, count: int) -> list[AbstractContextManager[Any]]:
    """Contexts of so many streams."""
    if device.type == "cpu":
        return [contextlib.nullcontext() for _ in range(count)]
    return [torch.cuda.stream(torch.cuda.Stream(device)) for _ in range(count)]


def count_differences(count: Tensor, results: list[Tensor], bits: list[Tensor]) -> None:
    """Adds to `count`, without a synchronisation, the elements that differ."""
    for y, want in zip(results, bits, strict=True):
        count += (y != want).sum()


class Threads:
    """Threads whose first failure is this one's."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.threads: list[threading.Thread] = []

    def start(self, work: Callable[..., None], *args: object) -> None:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                self.failures.append(error)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
        assert not self.failures, self.failures


def call_from_streams(seed: int, device: torch.device, calls: int, start: threading.Barrier) -> None:
    """Makes `calls` calls on each of four streams, in turn and at random, and compares all."""
    rng, works = random.Random(seed), all_work(seed, device)
    contexts, counts = streams_of(device, 4), []
    for context in contexts:
        with context:
            counts.append(torch.zeros((), dtype=torch.int64, device=device))
    synchronize(device)
    start.wait()
    for _ in range(calls):
        for context, count in zip(contexts, counts, strict=True):
            work, bits = rng.choice(works)
            with context:
                count_differences(count, work(), bits)
    synchronize(device)
    assert [int(count) for count in counts] == [0] * 4, f"thread {seed}: other bits than alone"


@devices
def test_eight_threads_with_four_streams_each(device: torch.device) -> None:
    calls = 2000 if SOAK else 100 if device.type == "cuda" else 5
    threads, start = Threads(), threading.Barrier(8)
    for seed in range(8):
        threads.start(call_from_streams, seed, device, calls, start)
    threads.join()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thread_for_each_device() -> None:
    count = torch.cuda.device_count()
    threads, start = Threads(), threading.Barrier(count)
    for i in range(count):
        threads.start(call_from_streams, i, torch.device("cuda", i), 100, start)
    threads.join()


def capture(work: Work) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of the call, and its outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()
    return graph, results


@pytest.mark.gpu
def test_captures_beside_the_calls_of_other_threads() -> None:
    device, stop, threads = torch.device("cuda"), threading.Event(), Threads()
    works = all_work(0, device)

    def call_on(seed: int) -> None:
        context, rng = streams_of(device, 1)[0], random.Random(seed)
        count = torch.zeros((), dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        while not stop.is_set():
            work, bits = rng.choice(works[:-1])  # a backward runs in autograd's thread, which captures nothing
            with context:
                count_differences(count, work(), bits)
                torch.cuda.current_stream().synchronize()
        assert int(count) == 0

    for seed in range(3):
        threads.start(call_on, seed)
    try:
        for _ in range(20 if SOAK else 3):
            for work, bits in works:
                graph, results = capture(work)
                for _ in range(3):
                    for y in results:
                        y.fill_(float("nan"))
                    graph.replay()
                    assert all(torch.equal(y, want) for y, want in zip(results, bits, strict=True))
    finally:
        stop.set()
        threads.join()


@devices
def test_memory_that_is_freed_and_reused_at_once(device: torch.device) -> None:
    """Operands and results go while the stream still has the call to do; what takes their memory is NaN."""
    x, w, offs = operands("ragged_m", [40, 40, 169], 0, 256, 128, BF16, device)
    bits = gmm.grouped_mm(x, w, offs)
    synchronize(device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    if device.type == "cuda":
        torch.cuda._sleep(100_000_000)
    for _ in range(200):
        a, b = x.clone(), w.clone()
        y = gmm.grouped_mm(a, b, offs)
        del a, b
        for like in (x, w, y):
            torch.full_like(like, float("nan"))
        count_differences(count, [y], [bits])
    assert int(count) == 0


def resident_bytes() -> int:
    """Of this process's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_ends(rng: random.Random, x: Tensor, w: Tensor, offs: Tensor) -> None:
    """A distribution of tokens never seen before, twice."""
    offs.copy_(torch.tensor(sorted(rng.randint(0, len(x)) for _ in range(len(offs)))))
    first, second = (gmm.grouped_mm(x, w, offs) for _ in range(2))
    assert torch.equal(first, second)


@devices
def test_soak(device: torch.device, request: pytest.FixtureRequest) -> None:
    """Random calls and replays: no growth of host or device memory, no other bits."""
    if device.type == "cuda":
        request.getfixturevalue("whole_gpu")
    rng, works = random.Random(0), all_work(0, device)
    x, w, offs = operands("ragged_m", ends_of([64] * 8), 0, 256, 128, BF16, device)
    graphs = [(*capture(work), bits) for work, bits in works] if device.type == "cuda" else []
    count = torch.zeros((), dtype=torch.int64, device=device)
    seconds = SOAK or 4
    begin, calls, before = time.monotonic(), 0, None
    while (passed := time.monotonic() - begin) < seconds:
        for _ in range(200 if device.type == "cuda" else 20):
            work, bits = rng.choice(works)
            count_differences(count, work(), bits)
            if graphs:
                graph, results, bits = rng.choice(graphs)
                graph.replay()
                count_differences(count, results, bits)
            random_ends(rng, x, w, offs)
            calls += 1
        synchronize(device)
        assert int(count) == 0, f"other bits within the first {calls} calls"
        if before is None and passed > seconds / 4:
            before = memory_in_use(device)
    after = memory_in_use(device)
    print(f"soak: {calls} calls of each kind in {passed:.0f} s; memory before {before}, after {after}")
    assert before is not None
    for name, limit in (("host", 2**25), ("device", 2**25), ("tensors", 2**20)):
        grown = after[name] - before[name]
        assert grown < limit, f"{name}: {grown} bytes more, from {before} to {after}, in {calls} calls"


def memory_in_use(device: torch.device) -> dict[str, int]:
    """Bytes of this process, of the device by whoever asked for them, and of tensors there."""
    if device.type == "cpu":
        return {"host": resident_bytes(), "device": 0, "tensors": 0}
    free, total = torch.cuda.mem_get_info(device)
    return {"host": resident_bytes(), "device": total - free, "tensors": torch.cuda.memory_allocated(device)}


# Processes

WORKERS = """
import os, torch, gmm
torch.set_num_threads(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
x, w = torch.randn(24, 16), torch.randn(2, 16, 8)
ends = torch.tensor([8, 24])
wanted = gmm.grouped_mm(x, w, ends)
on_device = gmm.multi_tensor_gemm([x.to(device)], [w[0].to(device)])[0]

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        assert os.getpid() != parent
        listed = gmm.multi_tensor_gemm(x.split([8, 16]), list(w))
        assert torch.allclose(torch.cat(listed), gmm.grouped_mm(x, w, ends), atol=1e-5)
        assert gmm.explain([(8, 16)], [(16, 8)], sm=90, dtype=torch.bfloat16).backend == "cutlass"
        return gmm.grouped_mm(x, w, ends)

parent = os.getpid()
loader = torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2, multiprocessing_context="fork")
assert all(torch.equal(y, wanted) for y in loader)
assert torch.equal(gmm.multi_tensor_gemm([x.to(device)], [w[0].to(device)])[0], on_device)
child = os.fork()
if child == 0:
    raise SystemExit(0)  # with all that runs at the end of a process
assert os.waitpid(child, 0)[1] == 0
"""


def test_forked_workers(python: Callable[..., Any]) -> None:
    """DataLoader's, after the library has run here, on the GPU as well."""
    python(WORKERS)


SHUTDOWN = """
import threading, time, torch, gmm
device = "cuda" if torch.cuda.is_available() else "cpu"
x, w = (torch.randn(s, device=device, dtype=torch.bfloat16) for s in ((256, 128), (4, 128, 256)))
ends = torch.tensor([8, 100, 100, 256], device=device)
leaf = w.clone().requires_grad_()
if device == "cuda":
    torch.cuda._sleep(500_000_000)
for backend in ("auto", "cublas", "triton") if device == "cuda" else ("auto",):
    for _ in range(50):
        y = gmm.grouped_mm(x, w, ends, backend="auto" if backend == "cublas" else backend)
        z = gmm.multi_tensor_gemm([x], [w[0]], backend="auto" if backend == "triton" else backend)
loss = gmm.grouped_mm(x, leaf, ends).sum()
if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        gmm.grouped_mm(x, w, ends)
    torch.cuda._sleep(500_000_000)
    graph.replay()
loss.backward()
def call_on():
    for _ in range(20):
        gmm.multi_tensor_gemm([x], [w[0]])
threading.Thread(target=call_on).start()
print("ends now", flush=True)
"""


def test_the_interpreter_ends_with_work_in_flight(python: Callable[..., Any]) -> None:
    done = python(SHUTDOWN)
    assert done.stdout == "ends now\n" and not re.search("Traceback|terminate|Fatal|Aborted", done.stderr), done.stderr
