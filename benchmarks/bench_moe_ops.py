#!/usr/bin/env python3
"""Times what surrounds the products of an MoE layer against a copy of as many bytes, and gmm.nn.GroupedExperts.

The experts' peers are the same layer on torch._grouped_mm: "torch products" with gmm.moe around them, "torch" with
torch's own elementwise operations, sort and gathers. The experts alone, on sorted tokens, are timed as well: the
module, and the same functions on torch._grouped_mm. And what SwiGLU within the products saves: the product, the product
and the activation in two kernels, and both in one. With transformers 5 installed its experts module of Qwen3-MoE is
timed on gmm's implementation and on its own two.

    python benchmarks/bench_moe_ops.py [--model NAME,...] [--quick] [--out results.json]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_moe_layer import MODELS, Model, peak_gib, torch_grouped_mm
from timing import Call, Row, burst_ms, interleaved, machine, measure_ceilings, print_table, progress, save
from torch import Tensor

import gmm
import gmm.integrations.transformers

DEFAULT_OUT = Path(__file__).parent / "results" / "moe_ops.json"
TOLERANCE = 2e-2  # relative norm; every intermediate value is rounded to bf16
METHODS = ("gmm", "torch products", "torch")


class Operands(NamedTuple):
    """Of a layer: tokens, routing, and the experts' weights."""

    x: Tensor
    index: Tensor
    weights: Tensor
    dy: Tensor
    gate_up: Tensor
    down: Tensor


def make_operands(model: Model, device: str) -> Operands:
    """Each token's experts differ from one another; values stay near one."""
    e, hidden, inner, tokens = model.experts, model.hidden, model.intermediate, model.tokens

    def leaf(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, device=device, dtype=torch.bfloat16) * scale).requires_grad_()

    weights, index = torch.rand(tokens, e, device=device).topk(model.top_k)
    x, dy = leaf(tokens, hidden), leaf(tokens, hidden).detach()
    gate_up, down = leaf(e, 2 * inner, hidden, scale=hidden**-0.5), leaf(e, hidden, inner, scale=inner**-0.5)
    return Operands(x, index, weights.requires_grad_(), dy, gate_up, down)


def layer(o: Operands, method: str) -> Tensor:
    """[tokens, hidden]."""
    experts = len(o.gate_up)
    if method == "torch":
        return torch_layer(o)
    rows, row_map, offs = gmm.moe.permute(o.x, o.index, experts)
    factors = gmm.moe.permute_weights(o.weights, row_map)
    if method == "gmm":
        return gmm.moe.unpermute(gmm.moe.feed_forward(rows, o.gate_up, o.down, offs, factors), row_map)
    return gmm.moe.unpermute(on_torch_products(rows, factors, offs, o), row_map)


def on_torch_products(rows: Tensor, factors: Tensor, offs: Tensor, o: Operands) -> Tensor:
    """gmm.moe.feed_forward()."""
    h = gmm.moe.gated_activation(torch_grouped_mm(rows, o.gate_up, offs), "swiglu", weights=factors, offs=offs)
    return torch_grouped_mm(h, o.down, offs)


def experts_alone(o: Operands) -> dict[str, Callable[[], list[Tensor]]]:
    """The output and all gradients of gmm.nn.GroupedExperts on sorted tokens, and of the same on torch._grouped_mm."""
    rows, row_map, offs = gmm.moe.permute(o.x.detach(), o.index, len(o.gate_up))
    rows.requires_grad_()
    factors = gmm.moe.permute_weights(o.weights.detach(), row_map).requires_grad_()
    module = gmm.nn.GroupedExperts(len(o.down), o.x.shape[1], o.down.shape[2], device=o.x.device, dtype=o.x.dtype)
    with torch.no_grad():
        module.gate_up.weight.copy_(o.gate_up)
        module.down.weight.copy_(o.down)
    dy = torch.randn_like(rows)

    def run_module() -> list[Tensor]:
        y = module(rows, weights=factors, offs=offs)
        return [y, *torch.autograd.grad(y, (rows, factors, module.gate_up.weight, module.down.weight), dy)]

    def run_torch() -> list[Tensor]:
        y = on_torch_products(rows, factors, offs, o)
        return [y, *torch.autograd.grad(y, (rows, factors, o.gate_up, o.down), dy)]

    return {"gmm": run_module, "torch products": run_torch}


def torch_layer(o: Operands) -> Tensor:
    """As models write it."""
    experts, k = len(o.gate_up), o.index.shape[1]
    chosen = o.index.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(experts, device=chosen.device, dtype=torch.int32)
    offs = counts.scatter_add(0, chosen, torch.ones_like(chosen, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    gate, up = torch_grouped_mm(o.x.index_select(0, order // k), o.gate_up, offs).chunk(2, -1)
    rows = torch_grouped_mm(torch.nn.functional.silu(gate) * up, o.down, offs)
    rows = rows * o.weights.flatten()[order].unsqueeze(1).to(rows.dtype)
    return rows.index_select(0, order.argsort()).view(*o.index.shape, -1).sum(1)


def step(o: Operands, method: str) -> list[Tensor]:
    """The output and all gradients."""
    y = layer(o, method)
    return [y, *torch.autograd.grad(y, (o.x, o.weights, o.gate_up, o.down), o.dy)]


def check(o: Operands, methods: tuple[str, ...] = METHODS) -> None:
    """Each method against the last, and the experts alone. Raises RuntimeError where they differ."""
    right = step(o, methods[-1])
    for method in methods[:-1]:
        check_close(method, step(o, method), right)
    alone = experts_alone(o)
    check_close("gmm.nn.GroupedExperts", alone["gmm"](), alone["torch products"]())


def check_close(method: str, results: list[Tensor], right: list[Tensor]) -> None:
    """The output and the gradients in the order of step()."""
    for name, got, wanted in zip(("output", "x", "weights", "gate_up", "down"), results, right, strict=True):
        error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
        if not error <= TOLERANCE:
            raise RuntimeError(f"{method}, {name}: relative error {error:.1e}, at most {TOLERANCE} expected")


def ops(o: Operands) -> dict[str, tuple[Callable[[], Any], int]]:
    """Each op: a call, and the bytes that it must move."""
    experts = len(o.gate_up)
    x, index, weights, inner = o.x.detach(), o.index, o.weights.detach(), o.down.shape[2]
    rows, row_map, offs = gmm.moe.permute(x, index, experts)
    h = torch.randn(rows.shape[0], 2 * inner, device=x.device, dtype=x.dtype)
    factors = gmm.moe.permute_weights(weights, row_map)
    d = torch.randn(rows.shape[0], inner, device=x.device, dtype=x.dtype)
    unpermute, backward = torch.ops.gmm.moe_unpermute, torch.ops.gmm.moe_activation_backward
    options = factors, offs, "swiglu", False, None
    moved = x.nbytes + rows.nbytes
    return {
        "route": (lambda: gmm.moe.route(index, experts), 3 * index.numel() * 8),
        "permute": (lambda: torch.ops.gmm.moe_permute(x, row_map, None, len(rows)), moved),
        "unpermute": (lambda: unpermute(rows, row_map, None), moved),
        "unpermute, weighted": (lambda: unpermute(rows, row_map, weights), moved),
        "dots": (lambda: torch.ops.gmm.moe_dots(x, rows, row_map), moved),
        "permute_weights": (lambda: gmm.moe.permute_weights(weights, row_map), 3 * weights.nbytes),
        "activation": (lambda: torch.ops.gmm.moe_activation(h, None, *options), h.nbytes + d.nbytes),
        "activation backward": (lambda: backward(d, h, None, *options), 2 * h.nbytes + d.nbytes),
    }


def swiglu(o: Operands) -> dict[str, Callable[[], Any]]:
    """Forward, the product with gate_up; backward, that of the gradient with down. Each alone and with the
    activation."""
    experts = len(o.gate_up)
    rows, row_map, offs = gmm.moe.permute(o.x.detach(), o.index, experts)
    factors = gmm.moe.permute_weights(o.weights.detach(), row_map)
    w, down, dy = o.gate_up.detach().mT, o.down.detach(), torch.randn_like(rows)
    h = gmm.grouped_mm(rows, w, offs)
    activation, backward = torch.ops.gmm.moe_activation, torch.ops.gmm.moe_activation_backward
    in_one, backward_in_one = torch.ops.gmm.moe_swiglu, torch.ops.gmm.moe_swiglu_backward
    options = None, factors, offs, "swiglu", False, None
    return {
        "product": lambda: gmm.grouped_mm(rows, w, offs),
        "two kernels": lambda: activation(gmm.grouped_mm(rows, w, offs), *options),
        "one kernel": lambda: in_one(rows, w, offs, factors, True, 0, "auto"),
        "backward, product": lambda: gmm.grouped_mm(dy, down, offs),
        "backward, two kernels": lambda: backward(gmm.grouped_mm(dy, down, offs), h, *options),
        "backward, one kernel": lambda: backward_in_one(dy, down, h, offs, factors, 0, "auto"),
    }


def hugging_face(model: Model, device: str) -> dict[str, Callable[[], list[Tensor]]]:
    """The output and all gradients of transformers' Qwen3MoeExperts by experts_implementation; of none without it."""
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        gmm.integrations.transformers.register()
    except ImportError:
        return {}
    config = Qwen3MoeConfig(
        hidden_size=model.hidden,
        moe_intermediate_size=model.intermediate,
        num_experts=model.experts,
        num_experts_per_tok=model.top_k,
    )
    o = make_operands(model, device)
    experts = Qwen3MoeExperts(config).to(device, torch.bfloat16)
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(o.gate_up), torch.nn.Parameter(o.down)
    leaves = (o.x, o.weights, experts.gate_up_proj, experts.down_proj)

    def run(implementation: str) -> list[Tensor]:
        config._experts_implementation = implementation
        y = experts(o.x, o.index, o.weights)
        return [y, *torch.autograd.grad(y, leaves, o.dy)]

    return {name: partial(run, name) for name in ("gmm", "grouped_mm", "eager")}


def time_hugging_face(name: str, model: Model, seconds: float) -> Row | None:
    """Milliseconds and memory of each implementation, checked against the eager one."""
    steps = hugging_face(model, "cuda")
    if not steps:
        return None
    right = steps["eager"]()
    for implementation in ("gmm", "grouped_mm"):
        check_close(implementation, steps[implementation](), right)
    del right
    ms = interleaved(dict(steps), burst_ms, rounds=3, seconds=seconds)
    return {
        "model": name,
        "transformers": version("transformers"),
        "ms": {method: round(value, 3) for method, value in ms.items()},
        "peak_gib": {method: round(peak_gib(call), 2) for method, call in steps.items()},
    }


def time_model(name: str, model: Model, seconds: float, copy: float) -> Row:
    """Microseconds of each op and its share of a copy's rate; milliseconds and memory of the layer."""
    o = make_operands(model, "cuda")
    check(o)
    timed = ops(o)
    with torch.no_grad():
        ms = interleaved({op: call for op, (call, _) in timed.items()}, burst_ms, rounds=3, seconds=seconds)
    del timed
    with torch.no_grad():
        epilogue = interleaved(dict(swiglu(o)), burst_ms, rounds=3, seconds=seconds)
    alone = interleaved(dict(experts_alone(o)), burst_ms, rounds=3, seconds=seconds)
    steps: dict[str, Call] = {method: lambda method=method: step(o, method) for method in METHODS}
    return {
        "model": name,
        **model._asdict(),
        "us": {op: round(1e3 * value, 1) for op, value in ms.items()},
        "of_copy": {op: round(moved / copy / ms[op] * 1e3, 3) for op, (_, moved) in ops(o).items()},
        "layer_ms": {m: round(v, 3) for m, v in interleaved(steps, burst_ms, rounds=3, seconds=seconds).items()},
        "peak_gib": {method: round(peak_gib(call), 2) for method, call in steps.items()},
        "experts_ms": {m: round(v, 3) for m, v in alone.items()},
        "swiglu_us": {name: round(1e3 * v, 1) for name, v in epilogue.items()},
    }


def print_results(results: dict[str, Any]) -> None:
    """A table of ops, and one of layers."""
    rows = results["rows"]
    ops_of = list(rows[0]["us"])
    cells = [[r["model"], *(f"{r['us'][op]:.0f} ({r['of_copy'][op]:.2f})" for op in ops_of)] for r in rows]
    title = f"us (share of a copy's {results['copy_tb_s']:.2f} TB/s), bf16, {results['gpu']}"
    print_table(title, ["layer", *ops_of], cells, width=200)
    cells = [
        [
            r["model"],
            *(f"{r['layer_ms'][m]:.2f}" for m in METHODS),
            *(f"{r['layer_ms'][m] / r['layer_ms']['gmm']:.2f}" for m in METHODS[1:]),
            *(f"{r['peak_gib'][m]:.2f}" for m in METHODS),
        ]
        for r in rows
    ]
    header = [
        "layer",
        *(f"{m}, ms" for m in METHODS),
        *(f"{m} / gmm" for m in METHODS[1:]),
        *(f"{m}, GiB" for m in METHODS),
    ]
    print_table("Permute, experts, unpermute: forward and backward", header, cells, width=200)
    alone = [r["experts_ms"] for r in rows]
    cells = [
        [r["model"], *(f"{v:.2f}" for v in e.values()), f"{e['torch products'] / e['gmm']:.2f}"]
        for r, e in zip(rows, alone)
    ]
    print_table("The experts alone: forward and backward", ["layer", *(f"{m}, ms" for m in alone[0]), "ratio"], cells)
    swiglus = list(rows[0]["swiglu_us"])
    cells = [[r["model"], *(f"{r['swiglu_us'][name]:.0f}" for name in swiglus)] for r in rows]
    print_table("Gate and up, and the gradient of their activation: us", ["layer", *swiglus], cells, width=200)
    if hf := results["hugging_face"]:
        header = [f"{method}, {unit}" for unit in ("ms", "GiB") for method in hf["ms"]]
        cells = [[f"{value:.2f}" for unit in ("ms", "peak_gib") for value in hf[unit].values()]]
        print_table(f"transformers {hf['transformers']}: Qwen3MoeExperts, {hf['model']}", header, cells, width=200)


def main() -> int:
    """Runs it all. Returns 0, or 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", action="append", choices=list(MODELS), metavar="NAME", help="only this one")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timing each table's row (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a third of the time")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the JSON goes (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_moe_ops.py needs a CUDA GPU; torch sees none here.", file=sys.stderr)
        return 2
    random.seed(0)
    torch.manual_seed(0)
    ceilings = measure_ceilings(1.0)
    names, rows = options.model or list(MODELS), []
    for i, name in enumerate(names):
        progress(i, len(names), name)
        rows.append(time_model(name, MODELS[name], options.seconds / (3 if options.quick else 1), ceilings.copy))
        torch.cuda.empty_cache()
    progress(len(names), len(names), "")
    hf = time_hugging_face("Qwen3-30B", MODELS["Qwen3-30B"], options.seconds) if "Qwen3-30B" in names else None
    results = {**machine(), "copy_tb_s": ceilings.copy / 1e12, "rows": rows, "hugging_face": hf}
    print_results(results)
    save(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
