"""Checks every backend that works here against fp64, in about a minute; exit status 1 where a result is wrong.

Forward, dgrad, wgrad and wgrad accumulated in fp32, with many and with few tokens, empty groups and odd sizes, on
grouped_mm and on multi_tensor_gemm. Outputs are full of NaN before.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gmm
from gmm.backend import BACKENDS
from gmm.cli.layer import DTYPES, PASSES
from gmm.cli.output import print_table, track

_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_ROWS = {"many": [0, 1, 17, 300, 0, 64, 129, 1000, 513, 0], "few": [3, 0, 8, 1, 16, 0, 40, 5, 0]}
_SIZES = {"aligned": (200, 264), "odd": (67, 45)}  # N, K
_BACKENDS = BACKENDS[1:]  # without "auto"


class Case(NamedTuple):
    backend: str
    form: str
    dtype: str
    rows: str
    sizes: str


class Result(NamedTuple):
    """of_bound: the greatest error by what rounding explains; None: not taken."""

    case: Case
    name: str
    ran: str
    of_bound: float | None

    @property
    def wrong(self) -> bool:
        return self.of_bound is not None and self.of_bound > 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU"
    forms = ("grouped_mm", "multi_tensor_gemm")
    cases = [Case(*c) for c in itertools.product(_BACKENDS, forms, DTYPES, _ROWS, _SIZES)]
    results = [result for case in track(cases, "selftest") for result in check(case, device)]
    ran = sorted({r.ran for r in results if r.of_bound is not None})
    work = [name for name in _BACKENDS if any(kernel.startswith(name) for kernel in ran)]
    header = ("backend", "call", "dtype", "right", "wrong", "not taken", "of bound")
    rows = [summary(results, *of) for of in itertools.product(work, forms, DTYPES)]
    print_table(f"gmm {gmm.__version__} on {where}", header, rows)
    wrong = [r for r in results if r.wrong]
    for r in wrong:
        print(f"WRONG: {' '.join(r.case)} {r.name}, {r.ran}: {r.of_bound:.3g} of the bound")
    print(f"\n{sum(r.of_bound is not None for r in results)} results, {len(wrong)} wrong; kernels that ran:")
    print("\n".join(f"  {name}" for name in ran))
    if others := [name for name in _BACKENDS if name not in work]:
        print(f"{', '.join(others)}: not on this machine; python -m gmm info says why")
    return 1 if wrong or not ran else 0


def summary(results: list[Result], backend: str, form: str, dtype: str) -> tuple[str, ...]:
    """A row of the table."""
    of = [r for r in results if r.case[:3] == (backend, form, dtype)]
    taken = [r.of_bound for r in of if r.of_bound is not None]
    wrong = sum(r.wrong for r in of)
    worst = f"{max(taken):.2f}" if taken else "-"
    return backend, form, dtype, str(len(taken) - wrong), str(wrong), str(len(of) - len(taken)), worst


@torch.no_grad()
def check(case: Case, device: torch.device) -> Iterator[Result]:
    """Each pass of a layer, and wgrad accumulated in fp32."""
    rows, (n, k), dtype = _ROWS[case.rows], _SIZES[case.sizes], DTYPES[case.dtype]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, dy, w = random(sum(rows), k), random(sum(rows), n), random(len(rows), n, k)
    exact = {  # the factors of each group's product
        "forward": [(x_, w_.t()) for x_, w_ in zip(x.split(rows), w, strict=True)],
        "dgrad": list(zip(dy.split(rows), w, strict=True)),
        "wgrad": [(dy_.t(), x_) for dy_, x_ in zip(dy.split(rows), x.split(rows), strict=True)],
    }
    for name in (*PASSES, "wgrad += fp32"):
        accumulate, factors = name.endswith("fp32"), exact[name.split()[0]]
        shape = (len(rows), n, k) if "wgrad" in name else (sum(rows), k if name == "dgrad" else n)
        out_dtype = torch.float32 if accumulate else dtype
        out = torch.full(shape, math.nan, device=device, dtype=out_dtype)
        if accumulate:
            out.copy_(torch.randn(shape, generator=generator))
        before, groups = out.clone(), list(out.unbind() if "wgrad" in name else out.split(rows))
        try:
            call(case, name, x, w, dy, rows, out, groups, accumulate)
        except RuntimeError as error:
            if "cannot take this call" not in str(error):
                raise
            yield Result(case, name, str(error), None)
            continue
        ran = gmm.last_backend() or ""
        old = before.unbind() if "wgrad" in name else before.split(rows)
        pairs = zip(groups, factors, old, strict=True)
        worst = 0.0
        for y, (left, right), z in pairs:
            worst = max(worst, of_bound(y, *exact_product(left, right, z if accumulate else None), left.shape[1]))
        yield Result(case, name, ran, worst)


def call(
    case: Case, name: str, x: Tensor, w: Tensor, dy: Tensor, rows: list[int], out: Tensor, groups: list[Tensor],
    accumulate: bool,
) -> None:  # fmt: skip
    """One pass, into out; groups are its parts."""
    accumulates: dict[str, Any] = {"accumulate": accumulate, "backend": case.backend}
    if case.form == "grouped_mm":
        offs = torch.tensor(rows, device=x.device).cumsum(0).int()
        a, b = {"forward": (x, w.mT), "dgrad": (dy, w)}.get(name, (dy.t(), x))
        gmm.grouped_mm(a, b, offs, out=out, **accumulates)
        return
    xs, dys, ws = x.split(rows), dy.split(rows), w.unbind()
    left, right = {"forward": (xs, ws), "dgrad": (dys, ws)}.get(name, (dys, xs))
    layout: dict[str, Any] = {"trans_a": "wgrad" in name, "trans_b": name == "forward"}
    gmm.multi_tensor_gemm(left, right, groups, **layout, **accumulates)


def exact_product(a: Tensor, b: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(before +) a @ b in fp64, and the same of absolute values, by which the errors of sums grow."""
    exact, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    return (exact, scale) if before is None else (exact + before, scale + before.double().abs())


def of_bound(result: Tensor, exact: Tensor, scale: Tensor, k: int) -> float:
    """The greatest |result - exact| by what roundings explain: one of the result, and those of fp32 sums over k, whose
    errors add up like a random walk. Infinite for NaN."""
    if result.numel() == 0:
        return 0.0
    least = torch.finfo(result.dtype).tiny * torch.finfo(result.dtype).eps  # its smallest number
    bound = _ROUNDING[result.dtype] * exact.abs() + math.sqrt(k) * 2.0**-22 * scale + least
    ratio = (result.double() - exact).abs() / bound
    return ratio.nan_to_num(math.inf, math.inf).max().item()
