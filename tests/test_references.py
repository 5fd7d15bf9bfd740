"""What a call holds on to when it is over: nothing. References go under Python's lock, also in several threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch
from conftest import Target
from torch import Tensor

import gmm

GROUPS, M, N, K = 20, 16, 64, 64


def lists(device: torch.device) -> tuple[list[Tensor], ...]:
    """a, b, d and bias."""
    shapes = ((M, K), (K, N), (M, N), (N,))
    return tuple([torch.ones(shape, dtype=torch.bfloat16, device=device) for _ in range(GROUPS)] for shape in shapes)


def calls(target: Target) -> list[tuple[Callable[[], object], list[Tensor]]]:
    """Each form, also one that is refused, and the tensors it gets."""
    a, b, d, bias = lists(target.device)
    options = {"backend": target.backend}

    def refused() -> None:
        with pytest.raises(RuntimeError, match="^b: expected length 20"):
            gmm.multi_tensor_gemm(a, b[:3], d, **options)

    grouped = [
        torch.cat(a),
        torch.stack(b),
        torch.arange(M, GROUPS * M + 1, M, dtype=torch.int32, device=target.device),
    ]
    return [
        (lambda: gmm.multi_tensor_gemm(a, b, d, **options), [*a, *b, *d]),
        (lambda: gmm.multi_tensor_gemm(a, b, d, bias, accumulate=True, **options), [*a, *b, *d, *bias]),
        (lambda: gmm.multi_tensor_gemm(a, b, **options), [*a, *b]),
        (refused, [*a, *b, *d]),
        (lambda: gmm.grouped_mm(*grouped, **options), grouped),
        (lambda: torch.ops.gmm.grouped_mm(*grouped, **options), grouped),
    ]


def counts(tensors: list[Tensor]) -> list[int]:
    return [sys.getrefcount(x) for x in tensors]


def test_nothing_is_held(target: Target) -> None:
    """Neither a tensor nor memory, the workspace included."""
    for call, tensors in calls(target):
        call()
        before = counts(tensors)
        allocated = torch.cuda.memory_allocated() if target.device.type == "cuda" else 0
        for _ in range(3):
            call()
        assert counts(tensors) == before
        assert (torch.cuda.memory_allocated() if target.device.type == "cuda" else 0) == allocated


def test_threads(target: Target) -> None:
    """Tensors that live as long as the call, in four threads."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                a, b, d, bias = lists(target.device)
                gmm.multi_tensor_gemm(list(a), list(b), d, list(bias), backend=target.backend)
                del a, b, bias
                assert all(bool((x == K + 1).all()) for x in d)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
