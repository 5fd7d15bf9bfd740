"""The backend toggle: the argument, then use_backend(), then GMM_BACKEND, then the library's choice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gmm
from gmm.backend import text_of_error

FP32 = torch.float32


def chosen_backend(backend: str | None = None, **options: Any) -> str:
    """Of a call that every backend takes on sm90."""
    return gmm.explain([(64, 72)], [(128, 72)], trans_b=True, backend=backend, **{"sm": 90, **options}).backend


def test_setter_and_context_manager() -> None:
    assert chosen_backend() == "cutlass"
    with gmm.use_backend("cublas"):
        assert chosen_backend() == "cublas"
        with gmm.use_backend("auto"):
            assert chosen_backend() == "cutlass"
        with gmm.use_backend("reference"):
            assert chosen_backend() == "reference"
        assert chosen_backend() == "cublas"
    assert chosen_backend() == "cutlass"
    gmm.use_backend("cublas")
    assert chosen_backend() == "cublas"
    gmm.use_backend(None)
    assert chosen_backend() == "cutlass"


def test_context_manager_restores_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), gmm.use_backend("cublas"):
        _ = 1 / 0
    assert chosen_backend() == "cutlass"


def test_a_setter_used_twice() -> None:
    setter = gmm.use_backend("cublas")
    for _ in range(2):
        with setter:
            assert chosen_backend() == "cublas"
        assert chosen_backend() == "cutlass"


def test_argument_overrules_the_setter() -> None:
    with gmm.use_backend("cublas"):
        assert chosen_backend("cutlass") == "cutlass"
        assert chosen_backend("auto") == "cutlass"


def test_setter_holds_for_calls() -> None:
    x = [torch.ones(8, 8)]
    with gmm.use_backend("reference"):
        gmm.multi_tensor_gemm(x, x)
        assert gmm.last_backend().startswith("reference")
    with gmm.use_backend("cublas"), pytest.raises(RuntimeError, match="cublas.*CUDA"):
        gmm.multi_tensor_gemm(x, x)


@pytest.mark.parametrize("name", ("", "CUTLASS", "cutlas", "cublas,often", "triton2", "cublas ", 90))
def test_unknown_names(name: Any) -> None:
    x = [torch.ones(8, 8)]
    for ask in (
        lambda: gmm.use_backend(name),
        lambda: gmm.multi_tensor_gemm(x, x, backend=name),
        lambda: gmm.explain(x, x, sm=90, backend=name),
        lambda: gmm.multi_tensor_gemm([], [], backend=name),
    ):
        with pytest.raises(ValueError, match="backend.*auto.*cutlass.*cublas.*reference"):
            ask()
    assert chosen_backend() == "cutlass"


def test_a_backend_asked_for_that_cannot() -> None:
    """By argument or setter it raises, with the reason."""
    for options in ({"dtype": FP32}, {"sm": 80}):
        with pytest.raises(RuntimeError, match="cutlass"):
            chosen_backend("cutlass", **options)
        with gmm.use_backend("cutlass"), pytest.raises(RuntimeError, match="cutlass"):
            chosen_backend(**options)


ENVIRONMENT = """
import warnings
import torch, gmm
shapes = [(64, 72)], [(128, 72)]
def chosen(**options):
    return gmm.explain(*shapes, trans_b=True, **{"sm": 90, **options}).backend
"""


def test_environment(python: Callable[..., Any]) -> None:
    code = """
print(chosen(), chosen(backend="cutlass"), chosen(backend="auto"))
with gmm.use_backend("cutlass"):
    print(chosen())
print(chosen())
"""
    chosen = python(ENVIRONMENT + code, GMM_BACKEND="cublas").stdout.split()
    assert chosen == ["cublas", "cutlass", "cutlass", "cutlass", "cublas"]


def test_environment_falls_back_and_warns_once(python: Callable[..., Any]) -> None:
    """Where the named backend cannot take the call, the library's choice does, and says so with the reason."""
    code = """
print(chosen(), chosen(sm=80), chosen(dtype=torch.float32))
x = [torch.ones(8, 8)]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        gmm.multi_tensor_gemm(x, x)
        gmm.multi_tensor_gemm(x, x, [torch.empty(8, 8)])
print(gmm.last_backend())
for warning in caught:
    print("warned:", warning.message)
"""
    plans, ran, *warned = python(ENVIRONMENT + code, GMM_BACKEND="cutlass").stdout.splitlines()
    assert plans.split() == ["cutlass", "cublas", "cublas"]
    assert ran.startswith("reference")
    assert len(warned) == 1 and all(word in warned[0] for word in ("GMM_BACKEND", "cutlass", "CUDA"))


@pytest.mark.gpu
def test_environment_warns_once_on_a_gpu(python: Callable[..., Any]) -> None:
    code = """
x = [torch.ones(8, 8, device="cuda")]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        gmm.multi_tensor_gemm(x, x)
print(gmm.last_backend())
for warning in caught:
    print("warned:", warning.message)
"""
    ran, *warned = python(ENVIRONMENT + code, GMM_BACKEND="cutlass").stdout.splitlines()
    assert ran.startswith("cublas")
    assert len(warned) == 1 and all(word in warned[0] for word in ("GMM_BACKEND", "cutlass", "fp32"))


def test_unknown_name_in_the_environment(python: Callable[..., Any]) -> None:
    code = """
try:
    chosen()
except ValueError as error:
    print(error)
print(chosen(backend="cublas"))
"""
    for name in ("fast", "triton,auto"):
        error, other = python(ENVIRONMENT + code, GMM_BACKEND=name).stdout.splitlines()
        assert all(word in error for word in ("GMM_BACKEND", f"'{name}'", "cutlass")) and other == "cublas"


@pytest.mark.parametrize(
    "error, text",
    (
        (None, ""),
        (RuntimeError("a: too long"), "a: too long"),
        (RuntimeError(), "RuntimeError: "),
        (KeyError("x"), "KeyError: 'x'"),
    ),
    ids=repr,
)
def test_errors_as_the_ops_pass_them_on(error: Exception | None, text: str) -> None:
    """csrc/torch takes an empty text for success: no error may become one."""
    arguments = []

    def function(*args: int, **options: int) -> None:
        arguments.append((args, options))
        if error is not None:
            raise error

    assert text_of_error(function)(1, k=2) == text and arguments == [((1,), {"k": 2})]


def test_no_warning_without_need() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = [torch.ones(8, 8)]
        gmm.multi_tensor_gemm(x, x)
        gmm.explain(x, x, sm=90)
        with gmm.use_backend("reference"):
            gmm.multi_tensor_gemm(x, x)
