"""The table that DeepSpeed publishes for its Triton grouped GEMM, against the for loop over experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from cases import ModelShape
from timing import Call, Row, burst_ms, interleaved
from torch import Tensor

import gmm

SHAPES = [ModelShape("DeepSpeed's table", experts, 64, 768, 2048, "unequal") for experts in (16, 32)]
TOLERANCE = 1e-2  # relative norm; the gradients are products of rounded bf16 values

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]  # x [T, K], w [E, N, K], offs [E] -> [T, N]


def loop_layer(splits: list[int]) -> Layer:
    """A product for each expert. unbind and split have one backward for all experts, indexing has one for each."""
    return lambda x, w, _: torch.cat([part @ e.t() for part, e in zip(x.split(splits), w.unbind(), strict=True)])


def layers(splits: list[int], backends: list[str]) -> dict[str, Layer]:
    """Of each method."""
    return {
        **{b: lambda x, w, offs, b=b: gmm.grouped_mm(x, w, offs, trans_b=True, backend=b) for b in backends},
        "torch": lambda x, w, offs: torch._grouped_mm(x, w.transpose(1, 2), offs=offs),
        "loop": loop_layer(splits),
    }


def results(layer: Layer, x: Tensor, w: Tensor, offs: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx and dw."""
    y = layer(x, w, offs)
    return [y, *torch.autograd.grad(y, (x, w), dy)]


def time_shape(shape: ModelShape, backends: list[str], seconds: float, device: str = "cuda") -> list[Row]:
    """Forward, and forward with backward, of each method; each method's results are compared with fp32 ones first."""
    splits = shape.splits()
    x = torch.randn(sum(splits), shape.k, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(shape.groups, shape.n, shape.k, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(sum(splits), shape.n, device=device, dtype=torch.bfloat16)
    offs = torch.tensor(splits, device=device).cumsum(0).int()
    methods = layers(splits, backends)
    exact = [t.detach().float().requires_grad_() for t in (x, w)]
    right = results(methods["loop"], *exact, offs, dy.float())
    for name, layer in methods.items():
        for got, wanted in zip(results(layer, x, w, offs, dy), right, strict=True):
            error = ((got.float() - wanted).norm() / wanted.norm()).item()
            if not error <= TOLERANCE:
                raise RuntimeError(f"{shape.label}, {name}: relative error {error:.1e}, at most {TOLERANCE} expected")

    values = x.detach(), w.detach()

    def forward(layer: Layer) -> Call:
        return lambda: layer(*values, offs)

    def both(layer: Layer) -> Call:
        return lambda: results(layer, x, w, offs, dy)

    rows = []
    for which, call in {"forward": forward, "forward+backward": both}.items():
        ms = interleaved({m: call(layer) for m, layer in methods.items()}, burst_ms, rounds=3, seconds=seconds)
        us = {method: round(1e3 * value, 2) for method, value in ms.items()}
        rows.append({**shape._asdict(), "pass": f"deepspeed {which}", "us": us})
        rows[-1]["ratios"] = {f"{b}/loop": round(us["loop"] / us[b], 3) for b in backends}
    return rows
