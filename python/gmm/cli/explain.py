"""Which backend and kernel the passes over a layer take, and why each other was refused; no GPU is needed."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import gmm
from gmm.backend import BACKENDS
from gmm.cli.layer import DTYPES, PASSES, Layer, add_layer, layers_of
from gmm.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer(parser, [Layer(128, 512, 1536, 2048)])
    parser.add_argument("--pass", dest="passes", action="append", choices=PASSES, help="only this one")
    parser.add_argument("--list", action="store_true", help="multi_tensor_gemm with a tensor for each expert")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="(default: %(default)s)")
    parser.add_argument("--out-dtype", choices=DTYPES, help="of the result (default: --dtype)")
    parser.add_argument("--accumulate", action="store_true", help="add to the result")
    parser.add_argument("--backend", choices=BACKENDS, help="ask for this one")
    parser.add_argument("--sm", type=int, help="compute capability to plan for, as 90 (default: this machine's)")


def run(options: argparse.Namespace) -> int:
    arguments = {
        "dtype": DTYPES[options.dtype],
        "out_dtype": DTYPES[options.out_dtype or options.dtype],
        "accumulate": options.accumulate,
        "backend": options.backend,
        "sm": options.sm,
    }
    for layer in layers_of(options):
        for name in options.passes or PASSES:
            print(f"{name}, {layer}\n{plan(layer, name, options.list, arguments)}\n")
    return 0


def plan(layer: Layer, name: str, as_lists: bool, arguments: dict[str, Any]) -> Plan:
    """Of a pass, with gmm.explain's arguments."""
    experts, rows, n, k = layer
    if as_lists:
        x, w, dy = [(rows, k)] * experts, [(n, k)] * experts, [(rows, n)] * experts
        if name == "wgrad":
            return gmm.explain(dy, x, trans_a=True, **arguments)
        return gmm.explain(*((x, w) if name == "forward" else (dy, w)), trans_b=name == "forward", **arguments)
    tokens = layer.tokens
    if name == "wgrad":
        dy_t = torch.empty(tokens, n, dtype=arguments["dtype"], device="meta").t()
        return gmm.explain(dy_t, (tokens, k), offs=(experts,), **arguments)
    return gmm.explain((tokens, k if name == "forward" else n), layer.weight, trans_b=name == "forward", **arguments)
