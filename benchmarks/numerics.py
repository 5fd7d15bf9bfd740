#!/usr/bin/env python3
"""Measures what docs/numerics.md says, and writes it: errors against fp64, and which bits depend on what.

python benchmarks/numerics.py            on a GPU, about a minute; writes results/numerics.json and docs/numerics.md
python benchmarks/numerics.py --render   the document again, from the JSON
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from timing import machine, progress, save
from torch import Tensor

import gmm

ROOT = Path(__file__).parents[1]
RESULTS, DOCUMENT = ROOT / "benchmarks" / "results" / "numerics.json", ROOT / "docs" / "numerics.md"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BACKENDS = ("cutlass", "triton", "cublas")
KS = (64, 1024, 8192, 65536)
DTYPES = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32))
COUNTS, N, K = [64, 0, 100, 28], 256, 512
# Of the operands: normal values, normal values of large magnitude (fp16: as large as its results bear), and positive
# ones, whose sums grow with K while each product stays small beside them.
INPUTS = ("normal", "large", "positive")


def name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]


def ends_of(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


@functools.cache
def normal_values(k: int, device: torch.device) -> list[Tensor]:
    """x and w in fp32. Not to be written to."""
    generator = torch.Generator().manual_seed(k)
    shapes = ((sum(COUNTS), k), (len(COUNTS), k, N))
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def operands(inputs: str, dtype: torch.dtype, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [tokens, k] and w [groups, k, N], the same ones in every process."""
    drawn = normal_values(k, device)
    if inputs == "positive":
        drawn = [x.abs() for x in drawn]
    if inputs == "large":
        drawn = [x * (4 if dtype is FP16 else 1e8) for x in drawn]
    return drawn[0].to(dtype), drawn[1].to(dtype)


def run(x: Tensor, w: Tensor, offs: Tensor, backend: str, **options: Any) -> Tensor | None:
    """None where the backend does not take the call."""
    try:
        return gmm.grouped_mm(x, w, offs, backend=backend, **options)
    except RuntimeError as error:
        if "cannot take this call" not in str(error):
            raise
        return None


def relative_error(y: Tensor, exact: Tensor) -> float:
    """In norm: of random errors it is what an element has on average."""
    return float((y.double() - exact).norm() / exact.norm())


def exact_forward(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([part.double() @ w[g].double() for g, part in enumerate(x.split(COUNTS))])


def errors(device: torch.device, backends: Sequence[str], ks: Sequence[int]) -> list[dict[str, Any]]:
    """Forward, and the weight gradient of one group with K tokens."""
    rows = []
    cases = [(which, d, i) for which in ("forward", "wgrad") for d in DTYPES for i in INPUTS]
    for done, (which, (dtype, out_dtype), inputs) in enumerate(cases):
        progress(done, len(cases), f"{which} {name(dtype)} {inputs}")
        for k in ks:
            x, w = operands(inputs, dtype, k, device)
            offs = ends_of(COUNTS, device)
            if which == "wgrad":  # K tokens: dy [K, 192] and x [K, N]
                x, w, offs = x.t().contiguous().t(), w[0], ends_of([k], device)
                exact = (x.double() @ w.double())[None]
            else:
                exact = exact_forward(x, w)
            found = {backend: run(x, w, offs, backend, out_dtype=out_dtype) for backend in backends}
            row = {"pass": which, "dtype": name(dtype), "out": name(out_dtype), "inputs": inputs, "k": k}
            rows.append(
                row | {"errors": {b: None if y is None else relative_error(y, exact) for b, y in found.items()}}
            )
    progress(len(cases), len(cases), "")
    return rows


# Which bits depend on what: of each backend "yes", "no" or "–" (does not take it), in bf16.

Fact = Callable[[str, torch.device], bool | None]


def equal_runs(backend: str, device: torch.device) -> bool | None:
    x, w = operands("normal", BF16, K, device)
    runs = [run(x, w, ends_of(COUNTS, device), backend) for _ in range(20)]
    return None if runs[0] is None else all(torch.equal(runs[0], y) for y in runs if y is not None)


def digest(backend: str, device: torch.device) -> str:
    """Of a result's bits; "" where the backend does not take the call."""
    x, w = operands("normal", BF16, K, device)
    y = run(x, w, ends_of(COUNTS, device), backend)
    return "" if y is None else hashlib.sha256(y.cpu().view(torch.int16).numpy().tobytes()).hexdigest()


def equal_processes(backend: str, device: torch.device) -> bool | None:
    command = [sys.executable, __file__, "--digest", backend, "--device", device.type]
    paths = os.pathsep.join(path for path in sys.path if path)
    others = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, check=True
    )
    return others.stdout.strip() == digest(backend, device) if digest(backend, device) else None


def equal_sm_counts(backend: str, device: torch.device) -> bool | None:
    x, w = operands("normal", BF16, K, device)
    runs = [run(x, w, ends_of(COUNTS, device), backend, sm_margin=margin) for margin in (0, 1, 66, 130)]
    return None if runs[0] is None else all(torch.equal(runs[0], y) for y in runs if y is not None)


def first_group(x: Tensor, w: Tensor, counts: Sequence[int], backend: str) -> Tensor | None:
    y = run(x, w, ends_of(counts, x.device), backend)
    return None if y is None else y[: COUNTS[0]]


def equal_other_values(backend: str, device: torch.device) -> bool | None:
    """Of the first group, when all other rows change."""
    x, w = operands("normal", BF16, K, device)
    before = first_group(x, w, COUNTS, backend)
    x[COUNTS[0] :] *= 3
    after = first_group(x, w, COUNTS, backend)
    return None if before is None or after is None else torch.equal(before, after)


def equal_other_sizes(backend: str, device: torch.device) -> bool | None:
    """Of the first group, when the others share out the rows anew."""
    x, w = operands("normal", BF16, K, device)
    before, after = (first_group(x, w, counts, backend) for counts in (COUNTS, [COUNTS[0], 1, 2, 125]))
    return None if before is None or after is None else torch.equal(before, after)


def equal_alone(backend: str, device: torch.device) -> bool | None:
    """Of the first group, when there are no other rows, and 4096 more."""
    x, w = operands("normal", BF16, K, device)
    more = torch.cat([x, *[x] * 22])
    counts = [COUNTS[0], 0, 0, 0], [COUNTS[0], 2000, len(more) - 4064, 2000]
    alone, among, many = (
        first_group(t, w, c, backend) for t, c in ((x[: COUNTS[0]], counts[0]), (x, COUNTS), (more, counts[1]))
    )
    if alone is None or among is None or many is None:
        return None
    return torch.equal(alone, among) and torch.equal(alone, many)


def isolated(poison: float) -> Fact:
    """Whether a NaN or Inf in one group leaves the bits of the others, as well as the tail's zeros, alone."""

    def fact(backend: str, device: torch.device) -> bool | None:
        x, w = operands("normal", BF16, K, device)
        counts = [64, 0, 64, 32]  # and 32 rows in no group
        before = run(x, w, ends_of(counts, device), backend)
        x[70] = poison
        x[170] = poison
        after = run(x, w, ends_of(counts, device), backend)
        if before is None or after is None:
            return None
        kept = [before[:64], before[128:]], [after[:64], after[128:]]
        touched = after[64 + 6 : 64 + 7]
        return all(torch.equal(p, q) for p, q in zip(*kept)) and not bool(touched.isfinite().any())

    return fact


def keeps_subnormal(dtype: torch.dtype, where: str) -> Fact:
    """Whether subnormal operands count, or a subnormal result is written, exactly."""
    smallest = torch.finfo(dtype).smallest_normal

    def fact(backend: str, device: torch.device) -> bool | None:
        if where == "operands":  # 64 products of a subnormal and 1
            factors, out_dtype = (smallest / 4, 1.0), FP32
        else:  # 64 products that sum to a quarter of the smallest normal number
            factors, out_dtype = (smallest**0.5 / 2**4, smallest**0.5 / 2**4), dtype
        x = torch.full((8, 64), factors[0], dtype=dtype, device=device)
        w = torch.full((1, 64, 8), factors[1], dtype=dtype, device=device)
        y = run(x, w, ends_of([8], device), backend, out_dtype=out_dtype)
        return None if y is None else bool((y.double() == x.double() @ w[0].double()).all())

    return fact


FACTS: dict[str, Fact] = {
    "equal bits in 20 runs": equal_runs,
    "equal bits in another process": equal_processes,
    "equal bits with 1, 66 and 130 SMs fewer": equal_sm_counts,
    "a group's bits do not depend on the values of other rows": equal_other_values,
    "… nor on the sizes of the other groups": equal_other_sizes,
    "… nor on how many other rows there are": equal_alone,
    "a NaN stays in its row's group": isolated(float("nan")),
    "an Inf stays in its row's group": isolated(float("inf")),
    "subnormal bf16 operands count": keeps_subnormal(BF16, "operands"),
    "subnormal fp16 operands count": keeps_subnormal(FP16, "operands"),
    "subnormal fp32 operands count": keeps_subnormal(FP32, "operands"),
    "subnormal bf16 results are exact": keeps_subnormal(BF16, "results"),
    "subnormal fp16 results are exact": keeps_subnormal(FP16, "results"),
    "subnormal fp32 results are exact": keeps_subnormal(FP32, "results"),
}


def measure(device: torch.device, backends: Sequence[str], ks: Sequence[int]) -> dict[str, Any]:
    """All of it."""
    with torch.no_grad():
        facts = {text: {backend: fact(backend, device) for backend in backends} for text, fact in FACTS.items()}
        return {"errors": errors(device, backends, ks), "facts": facts}


def markdown(results: dict[str, Any]) -> str:
    """docs/numerics.md."""
    ks = sorted({row["k"] for row in results["errors"]})
    where = f"{results['gpu']}, driver {results['driver']}, torch {results['torch']}, {results['date']}"
    lines = [
        "# Numerics",
        "",
        f"Written by `benchmarks/numerics.py` from its run on one {where}. The calls are `grouped_mm`'s; lists run the "
        "same kernels.",
        "",
        "## Errors",
        "",
        f"Relative error in norm against fp64, at K = {ks[-1]}, and in brackets the greatest multiple of cuBLAS's over "
        f"K = {', '.join(map(str, ks))}. "
        "fp32 is IEEE. Every backend sums in fp32 and rounds once.",
        "",
        "| pass | dtype → out | operands | " + " | ".join(f"`{b}`" for b in BACKENDS) + " |",
        "|---|---|---|" + "---|" * len(BACKENDS),
    ]
    kinds = dict.fromkeys((r["pass"], r["dtype"], r["out"], r["inputs"]) for r in results["errors"])
    for which, dtype, out, inputs in kinds:
        rows = [
            r
            for r in results["errors"]
            if (r["pass"], r["dtype"], r["out"], r["inputs"]) == (which, dtype, out, inputs)
        ]
        last = max(rows, key=lambda r: r["k"])["errors"]
        cells = []
        for backend in BACKENDS:
            if last[backend] is None:
                cells.append("–")
                continue
            worst = max(r["errors"][backend] / max(r["errors"]["cublas"], 1e-30) for r in rows)
            cells.append(f"{last[backend]:.1e} ({worst:.2f})")
        lines.append(f"| {which} | {dtype} → {out} | {inputs} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "`large`: normal values times 10⁸ (fp16: 4). `positive`: absolute values of normal ones; the sums grow with K.",
        "",
        "## What a result depends on",
        "",
        "| | " + " | ".join(f"`{b}`" for b in BACKENDS) + " |",
        "|---|" + "---|" * len(BACKENDS),
    ]
    words = {True: "yes", False: "no", None: "–"}
    for text, found in results["facts"].items():
        lines.append(f"| {text} | " + " | ".join(words[found[b]] for b in BACKENDS) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only write the document, from the JSON")
    parser.add_argument("--digest", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.digest:
        print(digest(options.digest, torch.device(options.device)))
        return 0
    if not options.render:
        if not torch.cuda.is_available():
            sys.exit("numerics.py measures on a GPU, and torch finds none")
        save(machine() | measure(torch.device("cuda"), BACKENDS, KS), RESULTS)
    DOCUMENT.write_text(markdown(json.loads(RESULTS.read_text())))
    print(f"written to {DOCUMENT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
