"""Weight gradients that do not go to autograd: what backward hands over, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

Groups = Tensor | tuple[int, ...]  # ends on the device of x, or sizes


class WeightGrad(NamedTuple):
    """A weight gradient that is still to be computed: dy^T @ x of each group."""

    dy: Tensor
    x: Tensor
    groups: Groups
    overwrite: bool


class Owner(Protocol):
    """Whose parameters they are, if it puts their gradients where they belong itself."""

    def take_weight_grad(self, pending: WeightGrad) -> Sequence[Tensor | None]:
        """Computes or keeps it. Returns what autograd is to accumulate into the weights."""


def raise_for_create_graph() -> None:
    """Of backwards that an owner, or sizes on the host, keep from being differentiable."""
    raise RuntimeError(
        "GroupedLinear: expected a backward without create_graph, which goes with offs or with sizes on the"
        " device, and without fuse_wgrad_accumulation and delay_wgrad_compute"
    )
