"""Times gmm.grouped_mm against torch's own and a loop of torch.mm on this GPU.

Medians of triton.testing.do_bench, which flushes the L2 cache before each call; random bf16 data, equal groups.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gmm
from gmm.cli.layer import PASSES, Layer, add_layer, layers_of
from gmm.cli.output import print_table, track

_LAYERS = [
    Layer(8, 4096, 768, 2048),
    Layer(128, 512, 1536, 2048),
    Layer(32, 1024, 4096, 7168),
    Layer(128, 8, 1536, 2048),
]
_METHODS = ("gmm", "torch", "loop")

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer(parser, _LAYERS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (needs matplotlib)")


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise RuntimeError("needs a CUDA GPU; torch sees none here")
    if options.plot:
        require_matplotlib()
    work = [(layer, name) for layer in layers_of(options) for name in PASSES]
    rows = [time_pass(layer, name, torch.device("cuda")) for layer, name in track(work, "bench")]
    header = ("layer", "pass", *(f"{m}, TFLOP/s" for m in _METHODS), *(f"gmm / {m}" for m in _METHODS[1:]), "kernel")
    title = f"gmm {gmm.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}, bf16"
    print_table(title, header, [cells(row) for row in rows])
    results = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "gmm": gmm.__version__,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        draw(rows, title, options.plot)
    return 0


def time_pass(layer: Layer, name: str, device: torch.device) -> Row:
    """Milliseconds of each method, and gmm's kernel."""
    calls = methods(layer, name, device)
    calls["gmm"]()
    kernel, ms = gmm.last_backend(), {}
    for method, call in calls.items():
        try:
            ms[method] = measure_ms(call)
        except (NotImplementedError, RuntimeError, ValueError) as error:  # torch's own needs certain GPUs and sizes
            print(f"{method} does not take {name}, {layer}: {str(error).splitlines()[0]}", file=sys.stderr)
    return {"layer": layer._asdict(), "pass": name, "ms": ms, "kernel": kernel, "flops": layer.flops}


def methods(layer: Layer, name: str, device: torch.device) -> dict[str, Callable[[], object]]:
    """What computes the pass, by name."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    offs = torch.arange(layer.rows, layer.tokens + 1, layer.rows, device=device, dtype=torch.int32)
    x, dy = random(layer.tokens, layer.k), random(layer.tokens, layer.n)
    if name == "wgrad":
        a, b = dy.t(), x
        pairs = list(zip(a.split(layer.rows, 1), b.split(layer.rows), strict=True))
    else:
        w = random(*layer.weight)
        a, b = (x, w.mT) if name == "forward" else (dy, w)
        pairs = list(zip(a.split(layer.rows), b, strict=True))
    torch_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return {
        "gmm": functools.partial(gmm.grouped_mm, a, b, offs),
        "torch": lambda: torch_grouped_mm(a, b, offs=offs),
        "loop": lambda: [torch.mm(*pair) for pair in pairs],
    }


def measure_ms(call: Callable[[], object]) -> float:
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=10, rep=50, return_mode="median"))


def cells(row: Row) -> tuple[str, ...]:
    """Of the table; "-" where a method does not take the call."""
    ms = row["ms"]
    rates = [f"{row['flops'] / ms[m] / 1e9:.0f}" if m in ms else "-" for m in _METHODS]
    ratios = [f"{ms[m] / ms['gmm']:.2f}" if m in ms else "-" for m in _METHODS[1:]]
    return str(Layer(**row["layer"])), row["pass"], *rates, *ratios, row["kernel"]


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib") from None


def draw(rows: list[Row], title: str, path: Path) -> None:
    """Bars of TFLOP/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1 + 0.5 * len(rows)), layout="constrained")
    for i, method in enumerate(_METHODS):
        rates = [row["flops"] / row["ms"][method] / 1e9 if method in row["ms"] else 0 for row in rows]
        axes.barh([y + 0.27 * i for y in range(len(rows))], rates, 0.25, label=method)
    axes.set_yticks([y + 0.27 for y in range(len(rows))], [f"{Layer(**r['layer'])}  {r['pass']}" for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
