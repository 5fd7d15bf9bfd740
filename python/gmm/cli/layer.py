"""The three passes over the experts of an MoE layer, by whose shape the commands are told what to do."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch

PASSES = ("forward", "dgrad", "wgrad")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Layer(NamedTuple):
    """`experts` with `rows` tokens each, and a weight [n, k] each."""

    experts: int
    rows: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.experts} x {self.rows}, {self.n} x {self.k}"

    @property
    def tokens(self) -> int:
        return self.experts * self.rows

    @property
    def flops(self) -> float:
        """Of each pass."""
        return 2.0 * self.tokens * self.n * self.k

    @property
    def weight(self) -> tuple[int, int, int]:
        return self.experts, self.n, self.k


def parse_layer(text: str) -> Layer:
    """E,rows,N,K."""
    try:
        layer = Layer(*map(int, text.split(",")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"expected E,rows,N,K, as 128,512,1536,2048, got {text!r}") from None
    if min(layer) < 1 or max(layer) >= 2**31:
        raise argparse.ArgumentTypeError(f"expected positive numbers below 2^31, got {text!r}")
    return layer


def add_layer(parser: argparse.ArgumentParser, default: list[Layer]) -> None:
    """--shape, which may come more than once."""
    shapes = "; ".join(",".join(map(str, layer)) for layer in default)
    parser.add_argument(
        "--shape",
        dest="layers",
        action="append",
        type=parse_layer,
        metavar="E,ROWS,N,K",
        help=f"experts, tokens of each, and the weight [N, K] of each (default: {shapes})",
    )
    parser.set_defaults(default_layers=default)


def layers_of(options: argparse.Namespace) -> list[Layer]:
    return options.layers or options.default_layers
