"""One pass over the experts of one MoE layer: operands as a model holds them, the right result, the least work."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import NamedTuple

import torch
from cases import DGRAD, FORWARD, WGRAD, Layout, ModelShape
from torch import Tensor

# Layout of one expert's product, and the dtype of what comes out where it is not that of the operands.
PASSES: dict[str, tuple[Layout, torch.dtype | None]] = {
    "forward": (FORWARD, None),
    "dgrad": (DGRAD, None),
    "wgrad": (WGRAD, None),
    "wgrad-fp32": (WGRAD, torch.float32),
    "wgrad-accumulate": (WGRAD, torch.float32),
}


class Work(NamedTuple):
    """What a pass cannot do without."""

    flops: float
    moved: float  # bytes


def least_work(splits: list[int], n: int, k: int, which: str) -> Work:
    """Real rows only, 16-bit operands; each operand moved once.

    The weights of experts without tokens need not be read. Their gradients must be written, as zeros, unless they are
    accumulated."""
    tokens, busy = sum(splits), sum(rows > 0 for rows in splits)
    per_weight = {
        "forward": 2 * busy,
        "dgrad": 2 * busy,
        "wgrad": 2 * len(splits),
        "wgrad-fp32": 4 * len(splits),
        "wgrad-accumulate": 8 * busy,  # read and written
    }[which]
    return Work(2.0 * tokens * n * k, 2.0 * tokens * (n + k) + per_weight * n * k)


def loop(a: list[Tensor], b: list[Tensor], d: list[Tensor], layout: Layout, accumulate: bool) -> None:
    """One torch.mm a group on the current stream; into fp32, torch.mm and then copy_ or add_, as a model does it."""
    for x, y, z in zip(a, b, d, strict=True):
        x, y = (x.t() if layout.trans_a else x), (y.t() if layout.trans_b else y)
        if accumulate:
            z.add_(torch.mm(x, y))
        elif z.dtype != x.dtype:
            z.copy_(torch.mm(x, y))
        else:
            torch.mm(x, y, out=z)


class Problem:
    """x [T, K], w [E, N, K] and dy [T, N] of a layer, those that the pass needs, random.

    a, b: forward x and w, dgrad dy and w, wgrad dy and x.
    out: [T, N], [T, K] or [E, N, K], for methods that write into a tensor that they are given; all of them share it.
    offs: [E] ends of the groups, int32, on the device.
    """

    def __init__(self, shape: ModelShape, which: str, device: str = "cuda") -> None:
        self.which, self.n, self.k, self.splits = which, shape.n, shape.k, shape.splits()
        self.layout, out_dtype = PASSES[which]
        self.accumulate = which == "wgrad-accumulate"
        self.is_wgrad = self.layout is WGRAD
        tokens = sum(self.splits)

        def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(size, device=device, dtype=dtype)

        self.a = random(tokens, self.k if which == "forward" else self.n)
        self.b = random(tokens, self.k) if self.is_wgrad else random(len(self.splits), self.n, self.k)
        self._out_shape = {
            "forward": (tokens, self.n),
            "dgrad": (tokens, self.k),
        }.get(which, (len(self.splits), self.n, self.k))
        self.out = random(*self._out_shape, dtype=out_dtype or self.a.dtype)
        self._before = self.out.clone() if self.accumulate else None
        self.offs = torch.tensor(list(accumulate(self.splits)), device=device, dtype=torch.int32)

    def half(self) -> Problem:
        """The same values in float16. An fp32 `out` is shared, so that reset() holds for both."""
        other = copy.copy(self)
        other.a, other.b = self.a.half(), self.b.half()
        if self.out.dtype is not torch.float32:
            other.out = self.out.half()
        return other

    def reset(self) -> None:
        """What `out` holds before a call: the gradient so far when accumulating, else NaN."""
        if self._before is None:
            self.out.fill_(float("nan"))
        else:
            self.out.copy_(self._before)

    def lists(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """a, b and out of each group."""
        a = list(self.a.split(self.splits))
        b = list(self.b.split(self.splits) if self.is_wgrad else self.b.unbind())
        return a, b, self.groups(self.out)

    def groups(self, result: Tensor) -> list[Tensor]:
        """A result's part of each group."""
        return list(result.unbind() if self.is_wgrad else result.split(self.splits))

    def reference(self) -> list[Tensor]:
        """The right result of each group: fp32 products by torch.mm, TF32 off."""
        a, b, _ = self.lists()
        right = torch.empty(self._out_shape, device=self.a.device) if self._before is None else self._before.clone()
        allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
        try:
            for x, y, z in zip(a, b, self.groups(right), strict=True):
                loop([x.float()], [y.float()], [z], self.layout, self.accumulate)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed
        return self.groups(right)

    def error(self, result: Tensor, reference: list[Tensor]) -> float:
        """The largest relative norm of the difference in any group; inf where there is a NaN. Synchronises."""
        if result.shape != self._out_shape:
            raise RuntimeError(f"result: expected shape {list(self._out_shape)}, got {list(result.shape)}")
        pairs = [(x, y) for x, y in zip(self.groups(result), reference, strict=True) if y.numel()]
        errors = [(x.float() - y).norm() / y.norm().clamp(min=1e-30) for x, y in pairs]
        return torch.stack(errors).nan_to_num(nan=float("inf")).max().item()

    def dense(self) -> tuple[Tensor, Tensor]:
        """Operands of one torch.mm of the same FLOPs."""
        if self.is_wgrad:
            return self.a.t(), self.b
        return self.a, self.b[0].t() if self.layout.trans_b else self.b[0]
