#!/usr/bin/env python3
"""Times gmm.multi_tensor_gemm side by side: its CUTLASS backend, its multi-stream cuBLAS backend, a loop of torch.mm.

Shapes are the ones that the tests use (tests/cases.py). Operands are what a model has: x and dy are torch.split slices
of one buffer, every expert has a weight of its own, data are random. Each figure is the median over rounds of the
median of triton.testing.do_bench; within a round the methods run in random order, because the order alone shifts
results (power). Host time is the mean time of a call that does not wait for the GPU.

    python benchmarks/bench_multi_tensor_gemm.py [--quick] [--check] [--plot speed.png] [--out results.json]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timing import Row, do_bench_ms, host_us, interleaved, machine, print_table, progress, save

import gmm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from cases import DGRAD, FORWARD, MODEL_SHAPES, WGRAD, Layout, ModelShape

DEFAULT_OUT = Path(__file__).parent / "results" / "multi_tensor_gemm.json"
Tensors = list[torch.Tensor]

# Speed bars of the project, on an H200.
MIN_CUTLASS_OVER_CUBLAS = {"8 experts": 1.12, "16 experts": 1.34}  # forward, equal groups
MIN_CUBLAS_OVER_LOOP = 1.0
NOISE = 0.02  # two runs of one thing differ by this much; only "not slower than the loop" is given it
MAX_HOST_US = {8: 30.0, 64: 70.0}  # whole Python call, CUTLASS

METHODS = ("cutlass", "cublas", "loop")
PASSES = {"forward": FORWARD, "dgrad": DGRAD, "wgrad": WGRAD, "wgrad accumulate": WGRAD}
GRADIENT_SHAPES = (0, 2, 3, 5)  # of MODEL_SHAPES; forward runs at all


def make_operands(shape: ModelShape, which: str) -> tuple[Tensors, Tensors, Tensors]:
    """a, b and d of one pass of a layer: x [T, K], w [N, K], y [T, N]; wgrad is into fp32 [N, K]."""
    splits = shape.splits()

    def buffer(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=dtype)

    def tokens(width: int) -> Tensors:
        return list(buffer(sum(splits), width).split(splits))

    if which.startswith("wgrad"):
        grads = [buffer(shape.n, shape.k, dtype=torch.float32) for _ in splits]
        return tokens(shape.n), tokens(shape.k), grads
    weights = [buffer(shape.n, shape.k) for _ in splits]
    if which == "dgrad":
        return tokens(shape.n), weights, tokens(shape.k)
    return tokens(shape.k), weights, tokens(shape.n)


def loop(a: Tensors, b: Tensors, d: Tensors, layout: Layout, accumulate: bool) -> None:
    """One torch.mm a group on the current stream; into fp32, torch.mm and then copy_ or add_, as a model does it."""
    for x, y, z in zip(a, b, d, strict=True):
        x, y = (x.t() if layout.trans_a else x), (y.t() if layout.trans_b else y)
        if accumulate:
            z.add_(torch.mm(x, y))
        elif z.dtype != x.dtype:
            z.copy_(torch.mm(x, y))
        else:
            torch.mm(x, y, out=z)


def time_shape(shape: ModelShape, which: str, rounds: int) -> Row:
    """TFLOP/s of every method."""
    a, b, d = make_operands(shape, which)
    layout, accumulate = PASSES[which], which.endswith("accumulate")

    def call(method: str) -> Callable[[], object]:
        if method == "loop":
            return lambda: loop(a, b, d, layout, accumulate)
        return lambda: gmm.multi_tensor_gemm(
            a, b, d, trans_a=layout.trans_a, trans_b=layout.trans_b, accumulate=accumulate, backend=method
        )

    calls = {method: call(method) for method in METHODS}
    kernels = {}
    for method, run in calls.items():
        run()
        kernels[method] = "torch.mm" if method == "loop" else gmm.last_backend()
        if method not in kernels[method] and method != "loop":
            raise RuntimeError(f"asked for {method}, but {kernels[method]} ran")
    ms = interleaved(calls, do_bench_ms, rounds=rounds)
    flops = 2.0 * sum(shape.splits()) * shape.n * shape.k
    tflops = {method: flops / ms[method] / 1e9 for method in METHODS}
    return {
        "shape": shape.label,
        "groups": shape.groups,
        "tokens": shape.tokens,
        "n": shape.n,
        "k": shape.k,
        "spread": shape.spread,
        "pass": which,
        "tflops": {method: round(value, 1) for method, value in tflops.items()},
        "cutlass_over_cublas": round(tflops["cutlass"] / tflops["cublas"], 3),
        "cublas_over_loop": round(tflops["cublas"] / tflops["loop"], 3),
        "kernels": kernels,
    }


def time_host(groups: int, backend: str, batches: int) -> Row:
    """Host time of each way to call, with matrices so small that the GPU is never the limit."""
    a = list(torch.randn(16 * groups, 64, device="cuda", dtype=torch.bfloat16).split(16))
    b = [torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(groups)]
    d = list(torch.empty(16 * groups, 64, device="cuda", dtype=torch.bfloat16).split(16))
    op = torch.ops.gmm.multi_tensor_gemm.default
    with torch.no_grad():
        return {
            "groups": groups,
            "backend": backend,
            "op": round(host_us(lambda: op(a, b, d, trans_b=True, backend=backend), batches), 1),
            "python": round(host_us(lambda: gmm.multi_tensor_gemm(a, b, d, trans_b=True, backend=backend), batches), 1),
            "functional": round(
                host_us(lambda: gmm.multi_tensor_gemm(a, b, trans_b=True, backend=backend), batches), 1
            ),
        }


def missed_bars(rows: list[Row], host: list[Row]) -> Iterator[str]:
    """A line for every bar that the measurement misses."""
    for row in rows:
        where = describe(row)
        has_bar = row["spread"] == "equal" and row["pass"] == "forward"
        bar = MIN_CUTLASS_OVER_CUBLAS.get(row["shape"], 0.0) if has_bar else 0.0
        if row["cutlass_over_cublas"] < bar:
            yield f"{where}: cutlass / cublas is {row['cutlass_over_cublas']}, at least {bar} wanted"
        if row["cublas_over_loop"] < MIN_CUBLAS_OVER_LOOP - NOISE:
            yield (
                f"{where}: cublas / loop is {row['cublas_over_loop']}, "
                f"at least {MIN_CUBLAS_OVER_LOOP} wanted (noise of {NOISE} allowed)"
            )
    for row in host:
        bar = MAX_HOST_US[row["groups"]]
        if row["backend"] == "cutlass" and row["python"] > bar:
            yield f"host time with {row['groups']} groups: {row['python']} us, at most {bar} wanted"


def describe(row: Row) -> str:
    """The row's shape in one line."""
    sizes = f"{row['groups']} x {row['tokens']} x {row['n']} x {row['k']}"
    return f"{row['shape']} ({sizes}, {row['spread']}), {row['pass']}"


def print_results(results: dict[str, Any]) -> None:
    """Both tables."""
    print_table(
        f"bf16, TFLOP/s, {results['gpu']}, {results['date']}",
        ["groups x average tokens x n x k", *METHODS, "cutlass/cublas", "cublas/loop"],
        [
            [
                describe(row),
                *(f"{row['tflops'][m]:.0f}" for m in METHODS),
                f"{row['cutlass_over_cublas']:.2f}",
                f"{row['cublas_over_loop']:.2f}",
            ]
            for row in results["rows"]
        ],
    )
    ways = ["op", "python", "functional"]
    print_table(
        "Host time of a call, us",
        ["groups, backend", "torch.ops", "gmm, d given", "gmm, functional"],
        [[f"{row['groups']}, {row['backend']}", *(f"{row[way]:.1f}" for way in ways)] for row in results["host"]],
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """A bar chart of the forward rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["rows"] if row["pass"] == "forward"]
    figure, axes = pyplot.subplots(figsize=(1.2 * len(rows) + 2, 4.5), layout="constrained")
    names = {"cutlass": "gmm, CUTLASS", "cublas": "gmm, multi-stream cuBLAS", "loop": "loop of torch.mm"}
    for i, method in enumerate(METHODS):
        at = [x + 0.27 * (i - 1) for x in range(len(rows))]
        axes.bar(at, [row["tflops"][method] for row in rows], 0.27, label=names[method])
    labels = [f"{r['shape']}\n{r['groups']}x{r['tokens']}\n{r['n']}x{r['k']}\n{r['spread']}" for r in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylabel("TFLOP/s, bf16")
    axes.set_title(f"Forward, {results['gpu']}, torch {results['torch']}, {results['date']}")
    axes.set_ylim(top=1.15 * max(value for row in rows for value in row["tflops"].values()))
    axes.legend(loc="upper right", ncols=len(METHODS))
    figure.savefig(path, dpi=150)


def main() -> int:
    """Runs it all. Returns 0, 1 when --check finds a missed bar, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="the two shapes with speed bars, few rounds")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a speed bar is missed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw a bar chart (needs matplotlib)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the JSON goes (default: %(default)s)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_multi_tensor_gemm.py needs a CUDA GPU; torch sees none here.", file=sys.stderr)
        return 2

    random.seed(0)
    torch.manual_seed(0)
    work = [(shape, "forward") for shape in MODEL_SHAPES[: 2 if options.quick else None]]
    if not options.quick:
        work += [(MODEL_SHAPES[i], which) for i in GRADIENT_SHAPES for which in list(PASSES)[1:]]
    rounds, batches = (3, 20) if options.quick else (7, 50)
    rounds_of_bars = 3 * rounds  # of the two shapes that a bar stands on
    begin = time.perf_counter()
    rows = []
    for i, (shape, which) in enumerate(work):
        progress(i, len(work), f"{shape.label}, {which}")
        rows.append(time_shape(shape, which, rounds_of_bars if i < 2 else rounds))
    progress(len(work), len(work), "")
    host = [time_host(groups, backend, batches) for groups in MAX_HOST_US for backend in ("cutlass", "cublas")]
    results = {**machine(), "rows": rows, "host": host}

    print_results(results)
    print(f"{time.perf_counter() - begin:.0f} s")
    save(results, options.out)
    if options.plot:
        plot(results, options.plot)
    missed = list(missed_bars(rows, host)) if options.check else []
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
