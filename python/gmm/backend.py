"""Which backend a call takes: backend=, then use_backend(), then GMM_BACKEND, then the library's own choice."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch

from gmm._library import core

BACKENDS = ("auto", "cutlass", "triton", "cublas", "reference")

_selected: ContextVar[str | None] = ContextVar("gmm_backend", default=None)
_environment = os.environ.get("GMM_BACKEND") or "auto"


class Choice(NamedTuple):
    """What an op's backend string says."""

    name: str
    kernel: str  # the CUTLASS kernel that must take the call; "": any
    fall_back: bool  # when the backend cannot take the call: warn, and let the library choose


@functools.lru_cache
def parse(text: str, argument: str = "backend") -> Choice:
    """Reads "NAME" (must take the call), "NAME,auto" (falls back with a warning) or "cutlass: KERNEL" (as in
    last_backend()). Raises ValueError for another name."""
    choice = str(text).removesuffix(",auto")
    name, _, kernel = choice.partition(":")
    if name not in BACKENDS or (name == "auto" and name != choice):
        raise ValueError(f"{argument}: expected {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, got {choice!r}")
    return Choice(name, kernel.strip() if name == "cutlass" else "", choice != text)


class use_backend:
    """Sets the backend of the calls that name none: from now on, or within a `with` block.

    use_backend("cublas") holds until the next one; `with use_backend("cublas"):` restores what was before. Both hold
    for this thread (or asyncio task); a compiled function keeps what held when it was compiled.

    Args:
        name: "auto", "cutlass", "triton", "cublas" or "reference"; what last_backend() gave works, too, and asks for
            that CUTLASS kernel. None takes back what was set, so that GMM_BACKEND holds again.

    Raises:
        ValueError: for another name.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None:
            parse(name)
        self._name = name
        self._before: Token[str | None] | None = _selected.set(name)

    def __enter__(self) -> None:
        if self._before is None:  # used before
            self._before = _selected.set(self._name)

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            _selected.reset(self._before)
        self._before = None


@torch.compiler.assume_constant_result  # a ContextVar cannot be traced by torch < 2.12
def resolve(backend: str | None) -> str:
    """The ops' backend string for a call with that argument."""
    name = backend if backend is not None else _selected.get()
    if name is not None:
        parse(name)
        return name
    if _environment == "auto":
        return "auto"
    text = f"{_environment},auto"
    parse(text, "GMM_BACKEND")
    return text


@torch.compiler.assume_constant_result
def without_kernel(text: str) -> str:
    """The ops' backend string for other products than those that `text` names a kernel for."""
    choice = parse(text)
    return choice.name + (",auto" if choice.fall_back else "")


def last_backend() -> str:
    """What ran this thread's last call, as "backend: kernel"; "" before the first. Does not synchronise.

    A grouped_mm that had nothing to multiply is "reference: no products" on every device. With CUDA tensors, backward
    runs in a thread of autograd's, whose calls are not this thread's.
    """
    return core.last_backend()


def text_of_error(function: Callable[..., None]) -> Callable[..., str]:
    """The function as csrc/torch/call.cpp calls it: returns the text of its error, "" without one."""

    def call(*args: Any, **kwargs: Any) -> str:
        try:
            function(*args, **kwargs)
        except Exception as error:
            text = str(error)
            return text if isinstance(error, RuntimeError) and text else f"{type(error).__name__}: {text}"
        return ""

    return call


_warned: set[str] = set()


TRITON_TAKES_NO_LISTS = "it takes the tensors of grouped_mm, not lists"


def refuse(choice: Choice, why: str) -> None:
    """A backend that was asked for cannot take a call: raises, or warns once where the library may choose instead."""
    text = f"backend '{choice.name}' cannot take this call: {why}"
    if not choice.fall_back:
        raise RuntimeError(text)
    if choice.name not in _warned:
        _warned.add(choice.name)
        _warn(f"GMM_BACKEND: {text}")


def check_reference(backend: str, device: torch.device) -> None:
    """For the reference implementation of lists: refuses one that needs CUDA tensors, and one that takes no lists."""
    choice = parse(backend)
    if choice.name == "triton":
        refuse(choice, TRITON_TAKES_NO_LISTS)
    elif choice.name not in ("auto", "reference"):
        refuse(choice, f"it needs CUDA tensors, a[0] is on {device}")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


torch.library.impl("gmm::warn", "default", _warn)  # csrc/torch/call.cpp's way to a Python warning
