"""What the tests of gmm.moe and gmm.nn share: routings, and an MoE layer in fp64, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from check import UNIT, seeded
from torch import Tensor
from torch.nn import functional as F

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Tokens, choices of each, experts, share of sentinels.
ROUTINGS = {
    "one_token": (1, 1, 1, 0.0),
    "top_2": (17, 2, 5, 0.0),
    "top_8": (40, 8, 128, 0.0),
    "three_blocks": (101, 3, 7, 0.3),
    "most_elsewhere": (33, 4, 2, 0.9),
    "all_elsewhere": (5, 2, 3, 1.0),
    "no_tokens": (0, 2, 3, 0.0),
    "no_choices": (4, 0, 3, 0.0),
}


def routing(name: str, device: torch.device, dtype: torch.dtype = torch.int64) -> tuple[Tensor, int]:
    """top_k_index and the number of experts. Sentinels are -1 and num_experts; one expert in three gets nothing."""
    tokens, k, experts, elsewhere = ROUTINGS[name]
    generator = seeded(torch.device("cpu"), 3)
    index = torch.randint(experts, (tokens, k), generator=generator)
    index = torch.where(index % 3 == 2, 0, index)
    sentinels = torch.where(torch.rand(tokens, k, generator=generator) < 0.5, -1, experts)
    index = torch.where(torch.rand(tokens, k, generator=generator) < elsewhere, sentinels, index)
    return index.to(device, dtype), experts


def expected_route(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """row_map and offs, pair by pair."""
    ids = [e if 0 <= e < experts else experts for e in index.flatten().tolist()]
    order = sorted(range(len(ids)), key=lambda i: (ids[i], i))
    rows = [0] * len(ids)
    for row, pair in enumerate(order):
        rows[pair] = row if ids[pair] < experts else ~row
    ends = [sum(e <= expert for e in ids) for expert in range(experts)]
    return torch.tensor(rows, dtype=torch.int32).view(index.shape), torch.tensor(ends, dtype=torch.int32)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "reglu": F.relu,
    "swiglu_oai": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "identity": lambda x: x,
}
GATED = ("swiglu", "geglu", "geglu_tanh", "reglu", "swiglu_oai")


def expected_activation(
    h: Tensor, kind: str, up: Tensor | None = None, interleaved: bool = False, limit: float | None = None
) -> Tensor:
    """In the dtype of h, as models write it."""
    if kind not in GATED:
        return ACTIVATIONS[kind](h)
    gate, up = (h, up) if up is not None else (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return ACTIVATIONS[kind](gate) * (up + 1 if kind == "swiglu_oai" else up)


FEED_FORWARD_UNIT = {BF16: 2.0**-6, FP16: 2.0**-9, FP32: 2.0**-18}  # of a norm: four roundings in a row


def exact_feed_forward(leaves: Sequence[Tensor], ends: Sequence[int], dy: Tensor, trans_b: bool) -> list[Tensor]:
    """Of gmm.moe.feed_forward(x, gate_up, down, offs[, weights]) in fp64, expert by expert: the result and all
    gradients. Those of rows after the last end are zeros."""
    twins = [t.detach().double().requires_grad_() for t in leaves]
    x, gate_up, down = twins[:3]
    if trans_b:
        gate_up, down = gate_up.mT, down.mT
    y = x.new_zeros(len(x), dy.shape[1])
    for g, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        h = expected_activation(x[start:end] @ gate_up[g], "swiglu")
        y[start:end] = (h if len(twins) == 3 else h * twins[3][start:end, None]) @ down[g]
    if not y.requires_grad:  # no experts
        return [y, *(torch.zeros_like(t) for t in twins)]
    last = ends[-1]
    return [y.detach(), *torch.autograd.grad(y[:last], twins, dy[:last].double(), materialize_grads=True)]


def close(result: Tensor, exact: Tensor, sums: int = 1, slack: float = 1.0) -> None:
    """Fails where result is off by more than one rounding and the errors of `sums` float32 operations."""
    assert result.shape == exact.shape and result.isfinite().all()
    scale = exact.abs().max() if exact.numel() else 0
    bound = slack * UNIT[result.dtype] * exact.abs() + (4 + sums) * 2.0**-23 * (exact.abs() + scale) + 2.0**-25
    error = (result.double() - exact).abs()
    assert (error <= bound).all(), f"off by {(error - bound).max():.3g} at most; of {exact.abs().max():.3g}"
