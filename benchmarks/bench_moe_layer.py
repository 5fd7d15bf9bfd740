#!/usr/bin/env python3
"""Times a whole MoE layer, forward and backward, on gmm.grouped_mm and on torch._grouped_mm.

The layer routes, permutes, multiplies by the gate and up weights, applies SwiGLU, multiplies by the down weights, and
unpermutes; only its two grouped products differ. Results are first compared with those of a loop over the experts in
fp32.

    python benchmarks/bench_moe_layer.py [--model NAME,...] [--quick] [--out results.json]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import Call, Row, burst_ms, interleaved, machine, print_table, progress, save
from torch import Tensor
from torch.nn.functional import silu

import gmm

DEFAULT_OUT = Path(__file__).parent / "results" / "moe_layer.json"
TOLERANCE = 2e-2  # relative norm of the output and each gradient; every intermediate value is rounded to bf16

# x [rows, K], w [E, N, K], offs [E] -> [rows, N]
GroupedMM = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(NamedTuple):
    """An MoE layer of a model, or the part of it that one GPU holds."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: int


MODELS = {
    "Qwen3-30B": Model(128, 8, 2048, 768, 8192),
    # Expert parallel: each row that arrives is for one of the local experts.
    "DeepSeek-V3, 8 local experts": Model(8, 1, 7168, 2048, 32768),
    "DeepSeek-V3, 32 local experts": Model(32, 1, 7168, 2048, 32768),
    "Mixtral-8x7B": Model(8, 2, 4096, 14336, 16384),
    "gpt-oss-20b": Model(32, 4, 2880, 2880, 4096),
}


def gmm_grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The backend is the library's choice."""
    return gmm.grouped_mm(x, w, offs, trans_b=True)


def torch_grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """torch.nn.functional.grouped_mm, by the name that torch 2.10 has, too."""
    return torch._grouped_mm(x, w.transpose(1, 2), offs=offs)


def loop_grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """A product for each expert. Synchronises."""
    ends = offs.tolist()
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return torch.cat([rows @ expert.t() for rows, expert in zip(x.split(sizes), w.unbind(), strict=True)])


METHODS: dict[str, GroupedMM] = {"gmm": gmm_grouped_mm, "torch": torch_grouped_mm}


class Weights(NamedTuple):
    """Parameters of a layer."""

    router: Tensor  # [E, hidden]
    gate_up: Tensor  # [E, 2 * intermediate, hidden]
    down: Tensor  # [E, hidden, intermediate]


def make_operands(model: Model, device: str = "cuda") -> tuple[Tensor, Weights, Tensor]:
    """x [tokens, hidden], the weights, and dy like x, in bf16; scaled so that values stay near one."""

    def random_tensor(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, device=device, dtype=torch.bfloat16) * scale).requires_grad_()

    e, hidden, inner = model.experts, model.hidden, model.intermediate
    weights = Weights(
        random_tensor(e, hidden, scale=hidden**-0.5),
        random_tensor(e, 2 * inner, hidden, scale=hidden**-0.5),
        random_tensor(e, hidden, inner, scale=inner**-0.5),
    )
    return random_tensor(model.tokens, hidden), weights, random_tensor(model.tokens, hidden).detach()


def choose(x: Tensor, router: Tensor, top_k: int) -> Tensor:
    """The experts of each token, [tokens, top_k]."""
    return (x @ router.t()).topk(top_k).indices


def moe_layer(x: Tensor, weights: Weights, experts: Tensor, grouped_mm: GroupedMM) -> Tensor:
    """[tokens, hidden]: each token's weighted sum over its experts. Does not synchronise if grouped_mm does not."""
    scores = (x @ weights.router.t()).softmax(-1, dtype=torch.float32).gather(1, experts)
    share = scores / scores.sum(-1, keepdim=True)
    counts = torch.zeros(len(weights.router), device=x.device, dtype=torch.int32)
    chosen = experts.flatten()
    counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))  # bincount would synchronise
    offs = counts.cumsum(0, dtype=torch.int32)

    order = chosen.argsort(stable=True)
    gate, up = grouped_mm(x.index_select(0, order // experts.shape[1]), weights.gate_up, offs).chunk(2, -1)
    rows = grouped_mm(silu(gate) * up, weights.down, offs)
    by_token = rows.index_select(0, order.argsort()).view(*experts.shape, -1)
    return (by_token * share.unsqueeze(-1).to(rows.dtype)).sum(1)


def forward_backward(x: Tensor, weights: Weights, experts: Tensor, dy: Tensor, grouped_mm: GroupedMM) -> list[Tensor]:
    """Output, and the gradients of x and the weights."""
    y = moe_layer(x, weights, experts, grouped_mm)
    return [y, *torch.autograd.grad(y, (x, *weights), dy)]


def check(model: Model, x: Tensor, weights: Weights, dy: Tensor) -> None:
    """Compares each method with fp32. Raises RuntimeError where it is wrong."""
    with torch.no_grad():
        experts = choose(x, weights.router, model.top_k)  # once: rounding must not change it
    wide = [t.detach().float().requires_grad_() for t in (x, *weights)]
    right = forward_backward(wide[0], Weights(*wide[1:]), experts, dy.float(), loop_grouped_mm)
    names = ("output", "gradient of x", "of the router", "of gate_up", "of down")
    for method, grouped_mm in METHODS.items():
        got = forward_backward(x, weights, experts, dy, grouped_mm)
        for name, value, wanted in zip(names, got, right, strict=True):
            if name == "of the router" and model.top_k == 1:  # zero but for rounding: the weight of one expert is 1
                continue
            error = ((value.float() - wanted).norm() / wanted.norm()).item()
            if not error <= TOLERANCE:
                raise RuntimeError(f"{method}, {name}: relative error {error:.1e}, at most {TOLERANCE} expected")


def peak_gib(call: Call) -> float:
    """What a call allocates at its peak beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def time_model(name: str, model: Model, seconds: float) -> Row:
    """Milliseconds and peak memory of each method."""
    x, weights, dy = make_operands(model)
    check(model, x, weights, dy)
    torch.cuda.empty_cache()

    def forward(grouped_mm: GroupedMM) -> Call:
        def run() -> Tensor:
            with torch.no_grad():
                return moe_layer(x, weights, choose(x, weights.router, model.top_k), grouped_mm)

        return run

    def both(grouped_mm: GroupedMM) -> Call:
        return lambda: forward_backward(x, weights, choose(x, weights.router, model.top_k), dy, grouped_mm)

    calls = {f"{method} forward": forward(f) for method, f in METHODS.items()}
    calls |= {f"{method} forward+backward": both(f) for method, f in METHODS.items()}
    ms = interleaved(calls, burst_ms, rounds=3, seconds=seconds)
    # Three products of 2 * rows * hidden * intermediate forward (gate, up, down), twice as many backward.
    flops = 6.0 * model.tokens * model.top_k * model.hidden * model.intermediate
    return {
        "model": name,
        **model._asdict(),
        "ms": {call: round(value, 3) for call, value in ms.items()},
        "tflops": {call: round(flops * (3 if "backward" in call else 1) / ms[call] / 1e9, 1) for call in calls},
        "peak_gib": {call: round(peak_gib(run), 2) for call, run in calls.items()},
    }


def print_results(results: dict[str, Any]) -> None:
    """Times, the speed of the whole layer counted in its grouped products' FLOPs, and memory."""
    table = []
    for row in results["rows"]:
        for which in ("forward", "forward+backward"):
            ours, theirs = (row["ms"][f"{method} {which}"] for method in METHODS)
            memory = [f"{row['peak_gib'][f'{method} {which}']:.2f}" for method in METHODS]
            rate = f"{row['tflops'][f'gmm {which}']:.0f}"
            table.append(
                [f"{row['model']}, {which}", f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}", rate, *memory]
            )
    header = ["layer", "gmm, ms", "torch, ms", "torch/gmm", "gmm, TFLOP/s", "gmm, GiB", "torch, GiB"]
    print_table(f"A whole MoE layer, bf16, {results['gpu']}, torch {results['torch']}", header, table)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = ", ".join(MODELS)
    result.add_argument(
        "--model", action="append", choices=list(MODELS), metavar="NAME", help=f"only this one: {names}"
    )
    result.add_argument("--seconds", type=float, default=2.0, help="of timing a layer (default: %(default)s)")
    result.add_argument("--quick", action="store_true", help="a third of the time")
    result.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the JSON goes (default: %(default)s)")
    return result


def main() -> int:
    """Runs it all. Returns 0, or 2 without a GPU."""
    options = parser().parse_args()
    if not torch.cuda.is_available():
        print("bench_moe_layer.py needs a CUDA GPU; torch sees none here.", file=sys.stderr)
        return 2
    random.seed(0)
    torch.manual_seed(0)
    begin = time.perf_counter()
    rows = []
    names = options.model or list(MODELS)
    for i, name in enumerate(names):
        progress(i, len(names), name)
        rows.append(time_model(name, MODELS[name], options.seconds / (3 if options.quick else 1)))
        torch.cuda.empty_cache()
    progress(len(names), len(names), "")
    results = {**machine(), "rows": rows}
    print_results(results)
    print(f"{time.perf_counter() - begin:.0f} s")
    save(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
