#!/usr/bin/env python3
"""Times gmm.grouped_mm against its peers in one run: forward, dgrad, wgrad, host time, first call.

Every figure comes after a comparison with fp32 products. Methods take turns in random order within a round, each call
after a flush of the L2 cache; a figure is the median over rounds. See benchmarks/README.md.

    python benchmarks/bench_grouped_mm.py [--quick] [--check] [--pass forward,dgrad] [--shape 128,512,1536,2048]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gmm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import deepspeed_table
from bars import add_ratios, describe, geometric_mean, missed_bars, size
from cases import MODEL_SHAPES, SPREADS, ModelShape
from overhead import time_first_call, time_host
from peers import PEERS, Method, Variants, version
from problem import PASSES, Problem, least_work
from timing import Call, Ceilings, Row, burst_ms, interleaved, machine, measure_ceilings, print_table, progress, save

DEFAULT_OUT = Path(__file__).parent / "results" / "grouped_mm.json"
SECTIONS = (*PASSES, "deepspeed", "host", "first-call")
OURS = ("cutlass", "triton", "fp16", "list", "cublas")
METHODS = (*OURS, "dense", *PEERS)
NEEDS_SM90 = ("cutlass", "fp16", "list")
DISTRIBUTIONS = {"uniform": "equal", "unbalanced": "unequal"}  # what the command line also calls them
TOLERANCE = 5e-3  # relative norm of any group; rounding to bf16 makes it 1.7e-3
TOLERANCE_FP32 = 1e-3  # of ours, where out is fp32: a detour through bf16 fails

PLOTTED = {"cutlass": "gmm, CUTLASS", "triton": "gmm, Triton", "dense": "dense torch.mm", "best peer": "best peer"}

Work = tuple[ModelShape, str]


def shapes_of(which: str) -> list[ModelShape]:
    """The shapes that a pass runs at: the models', small groups, and uneven distributions."""
    qwen = ModelShape("Qwen3-30B up", 128, 512, 1536, 2048, "")
    many = ModelShape("64 experts", 64, 1024, 2048, 2048, "")
    if which in ("forward", "dgrad"):
        return [
            *MODEL_SHAPES,
            ModelShape("DeepSeek-V3 down", 8, 4096, 7168, 2048, "unequal"),
            ModelShape("small groups", 16, 64, 768, 2048, "unequal"),
            ModelShape("small groups", 128, 100, 1536, 2048, "unequal"),
            *(ModelShape("decode", 128, rows, 1536, 2048, "equal") for rows in (1, 16)),
            *(qwen._replace(spread=spread) for spread in ("zipf", "one-hot", "empty30")),
        ]
    large = [s for s in MODEL_SHAPES if s.tokens >= 512 and "Mixtral" not in s.label and s.groups != 16]
    if which == "wgrad":
        uneven = ("equal", "skewed", "zipf", "one-hot")
        others = [s._replace(spread=spread) for s in (many, qwen) for spread in uneven]
        return large + [s for s in [*others, qwen._replace(spread="empty30")] if s not in large]
    return [*large, qwen._replace(spread="zipf")]


def ours(method: str, p: Problem) -> Variants:
    """gmm.grouped_mm on one backend; "list" and "cublas" are gmm.multi_tensor_gemm with a tensor for each group."""
    layout = p.layout
    if method in ("list", "cublas"):
        backend = "cutlass" if method == "list" else method
        a, b, d = p.lists()

        def multi() -> torch.Tensor:
            flags = {"trans_a": layout.trans_a, "trans_b": layout.trans_b, "accumulate": p.accumulate}
            gmm.multi_tensor_gemm(a, b, d, backend=backend, **flags)
            return p.out

        return {"": Method(multi)}
    if method == "fp16":
        method, p = "cutlass", p.half()
    call = partial(gmm.grouped_mm, p.a.t() if layout.trans_a else p.a, p.b, p.offs, trans_b=layout.trans_b)
    if p.out.dtype is torch.float32:
        return {"": Method(lambda: call(out=p.out, accumulate=p.accumulate, backend=method))}
    return {"": Method(lambda: call(backend=method))}


def dense(p: Problem) -> Variants:
    """One torch.mm of the same FLOPs. Its result is another."""
    a, b = p.dense()
    return {"": Method(lambda: torch.mm(a, b))}


def wanted(method: str, shape: ModelShape, which: str) -> bool:
    """Whether a row has the method at all."""
    if method == "cublas":  # two shapes carry a bar against it
        return which == "forward" and shape in MODEL_SHAPES[:2]
    if method == "list":
        return which in ("forward", "dgrad", "wgrad-accumulate")
    return method != "fp16" or which != "wgrad-fp32"


def checked(shape: ModelShape, which: str, methods: list[str]) -> tuple[Problem, dict[str, Variants], Row]:
    """The methods whose results are right, with their errors. A wrong peer is left out, a wrong one of ours raises."""
    p = Problem(shape, which)
    reference = p.reference()
    variants: dict[str, Variants] = {}
    notes: Row = {"errors": {}, "kernels": {}, "dropped": {}}
    for method in methods:
        if not wanted(method, shape, which):
            continue
        is_ours = method in OURS
        prepare = partial(ours, method) if is_ours else PEERS.get(method, dense)
        tolerance = TOLERANCE_FP32 if is_ours and p.out.dtype is torch.float32 else TOLERANCE
        try:
            candidates = prepare(p)
        except Exception as error:
            raise_if_ours(is_ours, shape, which, method, error)
            notes["dropped"][method] = str(error)
            continue
        for kernel, candidate in candidates.items():
            name = f"{method} {kernel}".strip()
            try:
                p.reset()
                result = candidate.result(candidate.run())
                error = 0.0 if method == "dense" else p.error(result, reference)
                if not error <= tolerance:
                    raise RuntimeError(f"relative error {error:.1e}, at most {tolerance} expected")
            except Exception as error:
                raise_if_ours(is_ours, shape, which, method, error)
                notes["dropped"][name] = str(error)
                continue
            if is_ours:
                notes["kernels"][method] = ran(method)
            notes["errors"][name] = float(f"{error:.1e}")
            variants.setdefault(method, {})[kernel] = candidate
    return p, variants, notes


def raise_if_ours(is_ours: bool, shape: ModelShape, which: str, method: str, error: Exception) -> None:
    """A peer that fails is a note in the table; gmm that fails ends the run."""
    if is_ours:
        raise RuntimeError(f"{describe({**shape._asdict(), 'pass': which})}, {method}: {error}") from error


def ran(method: str) -> str:
    """The kernel of the last call. Raises if it is not of the backend that was asked for."""
    kernel, backend = gmm.last_backend(), {"fp16": "cutlass", "list": "cutlass"}.get(method, method)
    if not kernel.startswith(backend):
        raise RuntimeError(f"asked for {backend}, but {kernel} ran")
    return kernel


def fastest(variants: Variants) -> Variants:
    """Of several kernels the two that a few calls find fastest: the rounds that count are kept for them."""
    if len(variants) <= 2:
        return variants
    ms = interleaved({kernel: method.run for kernel, method in variants.items()}, burst_ms, rounds=3)
    return {kernel: variants[kernel] for kernel in sorted(ms, key=lambda kernel: ms[kernel])[:2]}


@torch.no_grad()
def time_problem(shape: ModelShape, which: str, methods: list[str], seconds: float, ceilings: Ceilings) -> Row:
    """A row: microseconds and TFLOP/s of every method that is right."""
    p, variants, notes = checked(shape, which, methods)
    calls: dict[tuple[str, str], Call] = {
        (method, kernel): m.run for method, of in variants.items() for kernel, m in fastest(of).items()
    }
    names = {f"{method} {kernel}": (method, kernel) for method, kernel in calls}
    ms = interleaved({name: calls[key] for name, key in names.items()}, burst_ms, rounds=3, seconds=seconds)
    best: dict[str, float] = {}
    for name, (method, kernel) in names.items():
        if ms[name] < best.get(method, float("inf")):
            best[method] = ms[name]
            if kernel:
                notes["kernels"][method] = kernel
    flops, moved = least_work(p.splits, p.n, p.k, which)
    return {
        **shape._asdict(),
        "pass": which,
        "rows": sum(p.splits),
        "busy": sum(rows > 0 for rows in p.splits),
        "floor_us": round(ceilings.floor_us(flops, moved), 2),
        "us": {method: round(1e3 * value, 2) for method, value in best.items()},
        "tflops": {method: round(flops / value / 1e9, 1) for method, value in best.items()},
        "peers": [method for method in best if method in PEERS],
        **notes,
    }


def build_kernels(methods: list[str], work: Work) -> None:
    """Runs each method once, in a process of its own: libraries that compile at run time keep the kernels on disk."""
    with torch.no_grad():
        checked(*work, methods)
    torch.cuda.empty_cache()  # for the other processes


def print_results(results: dict[str, Any]) -> None:
    """A table for each pass, one for DeepSpeed's shapes, one for host time and first calls."""
    for which in PASSES:
        rows = [row for row in results["rows"] if row["pass"] == which]
        if not rows:
            continue
        shown = [m for m in METHODS if any(m in row["us"] for row in rows)]
        header = ["experts x average tokens x n x k", "us", *shown, "floor", "/best", "/dense"]
        ceilings = f"dense {results['dense_tflops']:.0f} TFLOP/s, copy {results['copy_tb_s']:.2f} TB/s"
        title = f"{which}, bf16, TFLOP/s; {ceilings}; {results['gpu']}"
        print_table(title, header, list(cells(rows, shown)), width=180)
        for row in rows:
            for name, why in row["dropped"].items():
                print(f"left out: {describe(row)}, {name}: {why}")
        mean = geometric_mean(rows, which)
        if mean:
            print(f"geometric mean over the best peer: {mean:.3f}")
    if results["deepspeed"]:
        shown = list(results["deepspeed"][0]["us"])
        table = [[describe(r), *(f"{r['us'][m]:.0f}" for m in shown)] for r in results["deepspeed"]]
        print_table("DeepSpeed's table, us", ["experts x average tokens x n x k", *shown], table)
    if results["host"]:
        print_table("Host time of a call, us", ["call", "us"], [[r["call"], f"{r['us']:.1f}"] for r in results["host"]])
    for row in results["first_calls"]:
        print(f"first call of a process, {row['backend']}: {row['seconds']:.2f} s")


def cells(rows: list[Row], methods: list[str]) -> Iterator[list[str]]:
    """The table's lines; an empty cell where something was not measured."""
    for row in rows:
        mine = row["us"].get("cutlass", row["us"].get("triton"))
        rates = [f"{row['tflops'][m]:.0f}" if m in row["tflops"] else "" for m in methods]
        ratios = [f"{row['ratios'][r]:.2f}" if r in row["ratios"] else "" for r in ("floor", "best peer", "dense")]
        name = f"{' x '.join(map(str, size(row)))} {row['spread']}"
        yield [name, f"{mine:.0f}" if mine else "", *rates, *ratios]


def plot(results: dict[str, Any], path: Path) -> None:
    """Bars of our rate, dense's and the best peer's, for each pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    passes = [which for which in PASSES if any(row["pass"] == which for row in results["rows"])]
    most = max(sum(row["pass"] == which for row in results["rows"]) for which in passes)
    figure, all_axes = pyplot.subplots(
        len(passes), squeeze=False, figsize=(max(0.75 * most + 2, 8), 3.6 * len(passes)), layout="constrained"
    )
    for axes, which in zip(all_axes[:, 0], passes, strict=True):
        rows = [row for row in results["rows"] if row["pass"] == which]
        for i, (name, label) in enumerate(PLOTTED.items()):
            of = [row["tflops"].get(row.get("best_peer") if name == "best peer" else name, 0.0) for row in rows]
            axes.bar([x + 0.2 * (i - 1.5) for x in range(len(rows))], of, 0.2, label=label)
        labels = [f"{r['groups']}x{r['tokens']}\n{r['n']}x{r['k']}\n{r['spread']}" for r in rows]
        axes.set_xticks(range(len(rows)), labels, fontsize=7)
        axes.margins(x=0.01)
        axes.set_ylabel("TFLOP/s, bf16")
        axes.set_title(f"{which}, {results['gpu']}, torch {results['torch']}, {results['date']}", fontsize=9)
    figure.legend(*all_axes[0, 0].get_legend_handles_labels(), loc="outside upper center", fontsize=8, ncols=4)
    figure.savefig(path, dpi=150)


def names_in(text: str, known: tuple[str, ...]) -> list[str]:
    """Comma-separated names, in the order of `known`."""
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return [name for name in known if name in names]


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """E,rows,N,K."""
    sizes = tuple(int(x) for x in text.split(","))
    if len(sizes) != 4 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"expected experts,average rows,N,K, got {text}")
    return sizes


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = result.add_argument
    add("--pass", dest="sections", type=partial(names_in, known=SECTIONS), default=list(SECTIONS), metavar="NAME,...",
        help=f"of {', '.join(SECTIONS)} (default: all)")  # fmt: skip
    add("--methods", type=partial(names_in, known=METHODS), default=list(METHODS), metavar="NAME,...",
        help=f"of {', '.join(METHODS)} (default: all that can be imported)")  # fmt: skip
    add("--shape", type=parse_shape, action="append", metavar="E,ROWS,N,K", help="this shape instead (repeatable)")
    add("--distribution", default="unbalanced", choices=[*DISTRIBUTIONS, *SPREADS], metavar="NAME",
        help=f"of the tokens of --shape: {', '.join([*DISTRIBUTIONS, *SPREADS])} (default: %(default)s)")  # fmt: skip
    add("--seconds", type=float, default=1.5, help="of timing a row, all methods together (default: %(default)s)")
    add("--quick", action="store_true", help="three shapes a pass, a third of the time each")
    add("--workers", type=int, default=0, help="processes that build the peers' kernels beforehand (default: none)")
    add("--check", action="store_true", help="exit with 1 when a speed bar is missed (an H200's)")
    add("--plot", type=Path, metavar="FILE", help="also draw bar charts (needs matplotlib)")
    add("--out", type=Path, default=DEFAULT_OUT, help="where the JSON goes (default: %(default)s)")
    return result


def importable(methods: list[str]) -> tuple[list[str], dict[str, str]]:
    """The methods that this machine can run, and the peers' versions or why they are missing."""
    versions, usable = {}, []
    sm90 = torch.cuda.get_device_capability() == (9, 0)
    for method in methods:
        if method in PEERS:
            try:
                versions[method] = version(method)
            except ImportError as error:
                versions[method] = f"not importable: {error}"
                continue
        if sm90 or method not in NEEDS_SM90:
            usable.append(method)
    return usable, versions


def main() -> int:
    """Runs it all. Returns 0, 1 when --check finds a missed bar, 2 without a GPU."""
    options = parser().parse_args()
    if not torch.cuda.is_available():
        print("bench_grouped_mm.py needs a CUDA GPU; torch sees none here.", file=sys.stderr)
        return 2
    random.seed(0)
    torch.manual_seed(0)
    begin = time.perf_counter()
    seconds = options.seconds / 3 if options.quick else options.seconds
    spread = DISTRIBUTIONS.get(options.distribution, options.distribution)
    shapes = [ModelShape("--shape", *sizes, spread) for sizes in options.shape or ()]
    work: list[Work] = []
    for which in PASSES:
        if which in options.sections:
            work += [(shape, which) for shape in shapes or shapes_of(which)[: 3 if options.quick else None]]
    methods, versions = importable(options.methods)
    backends = [method for method in ("cutlass", "triton") if method in methods]
    if options.workers:
        spawn = multiprocessing.get_context("spawn")  # CUDA cannot be used in a forked process
        with ProcessPoolExecutor(options.workers, spawn) as pool:
            # In random order: neighbours would wait for one another to build the same kernels.
            list(pool.map(partial(build_kernels, methods), random.sample(work, len(work))))

    ceilings = measure_ceilings(seconds)
    rows = []
    for i, (shape, which) in enumerate(work):
        progress(i, len(work), describe({**shape._asdict(), "pass": which}))
        rows.append(time_problem(shape, which, methods, seconds, ceilings))
        torch.cuda.empty_cache()  # what a CUDA graph held
    progress(len(work), len(work), "")
    add_ratios(rows)
    sections = {name for name in options.sections if name not in PASSES}
    deepspeed = [
        row
        for shape in deepspeed_table.SHAPES
        if "deepspeed" in sections
        for row in deepspeed_table.time_shape(shape, backends, seconds)
    ]
    results = {
        **machine(),
        "dense_tflops": round(ceilings.dense / 1e12, 1),
        "copy_tb_s": round(ceilings.copy / 1e12, 3),
        "peers": versions,
        "rows": rows,
        "deepspeed": deepspeed,
        "host": time_host(backends, 20 if options.quick else 50) if "host" in sections else [],
        "first_calls": [time_first_call(backend) for backend in backends] if "first-call" in sections else [],
    }
    print_results(results)
    print(f"{time.perf_counter() - begin:.0f} s")
    save(results, options.out)
    if options.plot and rows:
        plot(results, options.plot)
    missed = list(missed_bars(rows + deepspeed, results["host"], results["first_calls"])) if options.check else []
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
