"""The ops of gmm.moe: Python kernels for every device, with fake ones, and a backward where they have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> Any:
    """Defines the op gmm::name, and returns it."""
    torch.library.define(f"gmm::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(f"gmm::{name}", "default", kernel)
    torch.library.register_fake(f"gmm::{name}", fake)
    if backward is not None:
        torch.library.register_autograd(f"gmm::{name}", backward, setup_context=save)
    return getattr(torch.ops.gmm, name).default
