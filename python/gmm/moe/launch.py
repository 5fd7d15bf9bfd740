"""Launches the kernels of gmm.moe."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def takes(x: Tensor) -> bool:
    """Whether Triton runs on that tensor's device."""
    return False


def route_in_triton(*args: Any) -> Any: ...
def permute_in_triton(*args: Any) -> Any: ...
def unpermute_in_triton(*args: Any) -> Any: ...
def dots_in_triton(*args: Any) -> Any: ...
def activation_in_triton(*args: Any) -> Any: ...
def activation_backward_in_triton(*args: Any) -> Any: ...
