"""Whatever a call looks like, its result is that of fp64. tests/fuzz.py draws the calls; `make fuzz` runs thousands."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from fuzz import CPU, GPU, GRADS, INTERPRETER, LAYER, Budget, Case

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies  # noqa: E402

randoms = hypothesis.given(strategies.randoms(use_true_random=False))


def examples(count: int) -> hypothesis.settings:
    """The same ones in every run; `make fuzz` draws others."""
    names = ("too_slow", "data_too_large", "function_scoped_fixture")  # conftest.py's restore settings, no more
    quiet = [getattr(hypothesis.HealthCheck, name) for name in names]
    return hypothesis.settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=quiet
    )


def check(rng: random.Random, form: str, budget: Budget, device: str, backend: str) -> None:
    case = Case.draw(rng, form, budget)
    hypothesis.note(str(case))
    case.check(torch.device(device), backend)


@examples(120)
@randoms
def test_lists(rng: random.Random) -> None:
    check(rng, "list", CPU, "cpu", "reference")


@examples(100)
@randoms
def test_grouped_mm(rng: random.Random) -> None:
    check(rng, "grouped", CPU, "cpu", "reference")


@examples(30)
@randoms
def test_gradients(rng: random.Random) -> None:
    check(rng, "grads", GRADS, "cpu", "reference")


@examples(60)
@randoms
def test_feed_forward(rng: random.Random) -> None:
    check(rng, "feed_forward", GRADS, "cpu", "reference")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Triton's, which runs on the CPU."""
    pytest.importorskip("triton")
    pytest.importorskip("numpy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@examples(80)
@randoms
def test_interpreter(interpreter: None, rng: random.Random) -> None:
    check(rng, "grouped", INTERPRETER, "cpu", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ("list", "grouped"))
@pytest.mark.parametrize("backend", ("auto", "cutlass", "cublas"))
@examples(30)
@randoms
def test_on_a_gpu(backend: str, form: str, rng: random.Random) -> None:
    """Few: each new kind of call that Triton takes costs it a second to compile."""
    if backend == "cutlass" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the cutlass backend needs an sm90 GPU")
    check(rng, form, GPU, "cuda", backend)


@pytest.mark.gpu
@examples(60)
@randoms
def test_feed_forward_on_a_gpu(rng: random.Random) -> None:
    check(rng, "feed_forward", LAYER, "cuda", "auto")
