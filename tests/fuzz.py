#!/usr/bin/env python3
"""Random calls of both forms, each compared with fp64, into outputs full of NaN between canaries.

    python tests/fuzz.py                     2000 calls on the GPU (without one: the CPU and Triton's interpreter)
    python tests/fuzz.py --seed 3 --case 17  one of them again, in this process

test_properties.py draws the same calls with hypothesis, which reduces what fails.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import grouped_cases
import pytest
import torch
from cases import DTYPES, HALVES, KERNELS, LAYOUTS, Group, Layout, ragged
from check import CANARY, NAN, Call, run, seeded
from conftest import environment
from grouped_cases import MODES, check_grads, out_shape
from moe_cases import FEED_FORWARD_UNIT, exact_feed_forward
from torch import Tensor

import gmm

PRIMES = (2, 3, 5, 7, 13, 31, 61, 127, 257, 521, 1031, 2053, 4093)
DIMENSIONS = (1, 8, 16, 24, 40, 64, 96, 128, 256, 704, 768, 1024, 1408, 2048, 4096)
SPREADS = ("uniform", "equal", "zipf", "one-hot", "many-empty", "edges", "all-empty")
EDGES = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 257, 1000, 3000)


class Budget(NamedTuple):
    """How large a call may be: groups, tokens of a group, N and K, elements of an operand, products of elements."""

    groups: int
    rows: int
    dimension: int
    elements: int
    products: int


GPU = Budget(300, 3000, 4096, 30_000_000, 20_000_000_000)
CPU = Budget(300, 3000, 4096, 300_000, 10_000_000)
INTERPRETER = Budget(20, 130, 140, 30_000, 200_000)  # a millisecond for each tile and step
GRADS = Budget(40, 200, 256, 500_000, 10_000_000)
LAYER = Budget(40, 3000, 1024, 3_000_000, 1_000_000_000)  # of feed_forward on a GPU: enough rows for its own kernels


class Place(NamedTuple):
    """How a matrix lies in memory: its strides, what lies between its lines, and how far behind an aligned address."""

    column_major: bool
    gap: int  # elements after each line, and between the matrices of a batch
    offset: int  # elements before the first
    step: int  # from one element of a line to the next
    expanded: bool  # all rows of one memory; of a batch, all matrices


PLAIN = Place(False, 0, 64, 1, False)


def draw_place(rng: random.Random, *, output: bool = False) -> Place:
    """Aligned and row-major half of the time, which is what CUTLASS takes in most layouts."""
    if rng.random() < 0.5:
        return PLAIN._replace(gap=rng.choice((0, 0, 8, 64)))
    return Place(
        column_major=rng.random() < 0.4,
        gap=rng.choice((0, 1, 8)),
        offset=64 + rng.choice((0, 0, 8, 1)),
        step=rng.choice((1, 1, 1, 2)),
        expanded=not output and rng.random() < 0.1,
    )


def place(
    shape: Sequence[int], spot: Place, dtype: torch.dtype, device: torch.device, fill: float
) -> tuple[Tensor, Tensor]:
    """A tensor of that shape in such a place, and the buffer around it, all of `fill`."""
    *batch, rows, columns = (1, *shape) if len(shape) == 1 else shape
    lines, length = (columns, rows) if spot.column_major else (rows, columns)
    line = length * spot.step + spot.gap
    matrix = lines * line + spot.gap
    buffer = torch.full((spot.offset + math.prod(batch) * matrix + 64,), fill, dtype=dtype, device=device)
    strides = (*([matrix] * len(batch)), *((spot.step, line) if spot.column_major else (line, spot.step)))
    return buffer.as_strided(shape, strides[-len(shape) :], spot.offset), buffer


def operand(shape: Sequence[int], spot: Place, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random values with NaN around them."""
    device = generator.device
    if spot.expanded and len(shape) > 1 and shape[0] > 0:
        one = operand((1, *shape[1:]), spot._replace(expanded=False), dtype, generator)
        return one.expand(tuple(shape))
    x, _ = place(shape, spot, dtype, device, NAN)
    return x.copy_(torch.randn(tuple(shape), generator=generator, device=device))


def output(
    shape: Sequence[int], spot: Place, dtype: torch.dtype, generator: torch.Generator, accumulate: bool
) -> tuple[Tensor, Tensor]:
    """NaN, or random values to be added to, and the buffer of canaries around it."""
    x, buffer = place(shape, spot, dtype, generator.device, CANARY)
    if accumulate:
        x.copy_(torch.randn(tuple(shape), generator=generator, device=generator.device))
    else:
        x.fill_(NAN)
    return x, buffer


def draw_dimension(rng: random.Random, budget: Budget) -> int:
    """An N or K: what models have, primes, anything."""
    kind = rng.choice(("model", "model", "prime", "any"))
    size = rng.choice({"model": DIMENSIONS, "prime": PRIMES, "any": (rng.randint(1, 4096), rng.randint(1, 100))}[kind])
    return min(size, budget.dimension)


def draw_rows(rng: random.Random, budget: Budget, products: int) -> list[int]:
    """Tokens of each group, with at most so many in all."""
    few, many = min(8, budget.groups), min(64, budget.groups)
    groups = rng.choice(
        (0, 1, 1, *[rng.randint(2, few)] * 10, *[rng.randint(few, many)] * 6, rng.randint(many, budget.groups))
    )
    spread, most = rng.choice(SPREADS), rng.choice((8, 40, 300, budget.rows))
    most = min(most, budget.rows)
    if spread == "zipf":
        rows = [int(most * (g + 1) ** -1.2) for g in range(groups)]
        rng.shuffle(rows)
    elif spread == "one-hot":
        hot = rng.randint(0, max(groups - 1, 0))
        rows = [most * (g == hot) for g in range(groups)]
    else:
        draw = {
            "uniform": lambda: rng.randint(0, most),
            "equal": lambda: most,
            "many-empty": lambda: rng.randint(1, most) if rng.random() < 0.2 else 0,
            "edges": lambda: min(rng.choice(EDGES), budget.rows),
            "all-empty": lambda: 0,
        }[spread]
        rows = [draw() for _ in range(groups)]
    if rng.random() < 0.4:
        rows = [r // 8 * 8 for r in rows]
    if sum(rows) > products:
        rows = [r * products // sum(rows) for r in rows]
    return rows


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: its form ("list", "grouped", "grads" of grouped_mm, or "feed_forward", where n is between the products)
    and all that was drawn for it."""

    form: str
    mode: str
    groups: list[Group] | list[int]  # of a list, of grouped_mm
    n: int
    k: int
    tail: int  # tokens after the last group
    layout: Layout
    dtype: torch.dtype
    out_dtype: torch.dtype
    places: tuple[Place, Place, Place]  # of a, b and the output
    slices: bool  # operands of tokens follow one another in one buffer
    bias: bool
    accumulate: bool
    offs_dtype: torch.dtype
    offs_step: int
    seed: int

    @staticmethod
    def draw(rng: random.Random, form: str, budget: Budget) -> Case:
        """Any call of that form within the budget."""
        mode = rng.choice(MODES)
        n, k = draw_dimension(rng, budget), draw_dimension(rng, budget)
        rows = draw_rows(rng, budget, budget.elements // 8)
        while max(len(rows), 1) * n * k > budget.elements:
            n, k = (n // 2, k) if n > k else (n, k // 2)
        most = min(budget.products // (n * k), budget.elements // max(n, k))
        if sum(rows) > most:
            rows = [r * most // sum(rows) for r in rows]
        layout = rng.choice(list(LAYOUTS.values()))
        groups: list[Group] | list[int] = rows
        if form == "list":
            groups = ragged(rows, n, k, layout)
            if rng.random() < 0.2:  # groups that agree in nothing
                groups = [Group(*rng.sample(g, 3)) for g in groups]
            if rng.random() < 0.1:
                groups = [g._replace(k=0) if rng.random() < 0.5 else g for g in groups]
        dtype = rng.choice((*HALVES, *DTYPES))
        return Case(
            form=form,
            mode=mode,
            groups=groups,
            n=n,
            k=0 if form != "list" and rng.random() < 0.03 else k,
            tail=rng.choice((0, 0, 1, 8, 50)),
            layout=layout,
            dtype=dtype,
            out_dtype=rng.choice((dtype, dtype, torch.float32)),
            places=(draw_place(rng), draw_place(rng), draw_place(rng, output=True)),
            slices=rng.random() < 0.5,
            bias=rng.random() < 0.3,
            accumulate=rng.random() < 0.4,
            offs_dtype=rng.choice((torch.int32, torch.int64)),
            offs_step=rng.choice((1, 1, 1, 2)),
            seed=rng.randint(0, 2**31),
        )

    def check(self, device: torch.device, backend: str) -> bool:
        """Runs it and compares. False when CUTLASS refused it, giving a reason, as it may."""
        if self.form == "list":
            return self._check_list(device, backend)
        if self.form == "feed_forward":
            return self._check_feed_forward(device, backend)
        return self._check_grouped(device, backend)

    def _check_list(self, device: torch.device, backend: str) -> bool:
        generator = seeded(device, self.seed)
        (trans_a, trans_b), (spot_a, spot_b, spot_d) = self.layout, self.places
        call = Call([], [], [], layout=self.layout, accumulate=self.accumulate)
        call.independent = not (spot_a.expanded or spot_b.expanded)
        for m, n, k in self.groups:  # type: ignore[misc]
            call.a.append(operand((k, m) if trans_a else (m, k), spot_a, self.dtype, generator))
            call.b.append(operand((n, k) if trans_b else (k, n), spot_b, self.dtype, generator))
            d, guard = output((m, n), spot_d, self.out_dtype, generator, self.accumulate)
            call.d.append(d)
            call.guards.append(guard)
        if self.slices and len({x.shape[1] for x in call.a}) == 1:
            joined = operand((sum(len(x) for x in call.a), call.a[0].shape[1]), spot_a, self.dtype, generator)
            call.a = list(joined.split([len(x) for x in call.a]))
        if self.bias:
            call.bias = [
                torch.randn(n, generator=generator, device=device).to(self.out_dtype) for _, n, _ in self.groups
            ]  # type: ignore[misc]
        if not call.a:
            assert gmm.multi_tensor_gemm([], [], [], **call.kwargs(), backend=backend) == []
            return True
        return bool(run(call, backend))

    def _check_grouped(self, device: torch.device, backend: str) -> bool:
        generator = seeded(device, self.seed)
        rows: list[int] = self.groups  # type: ignore[assignment]
        count, n, k = len(rows), self.n, self.k
        total = sum(rows) + self.tail
        each = rows[0] if rows else 3
        each = min(each, 20_000_000 // max(count * max(n, k), 1))
        shape_a, shape_b = {
            "ragged_m": ((total, k), (count, k, n)),
            "ragged_n": ((count, n, k), (k, total)),
            "ragged_k": ((k, total), (total, n)),
            "batched": ((count, each, k), (count, k, n)),
        }[self.mode]
        spot_a, spot_b, spot_out = self.places
        a = operand(shape_a, spot_a, self.dtype, generator)
        b = operand(shape_b, spot_b, self.dtype, generator)
        offs = None
        if self.mode != "batched":
            memory = torch.full((count * self.offs_step,), -(2**30), dtype=self.offs_dtype, device=device)
            offs = memory[:: self.offs_step]
            offs.copy_(torch.tensor(rows, dtype=torch.int64).cumsum(0))
        bias = None
        if self.bias and self.mode in ("ragged_m", "batched"):
            bias = operand((count, n), spot_b._replace(expanded=False), self.out_dtype, generator)
        trans_b = self.layout.trans_b
        if self.form == "grads":
            given = b.mT if trans_b else b
            check_grads(a, given, offs, backend, bias=bias, trans_b=trans_b, out_dtype=self.out_dtype)
            return True
        out = output(out_shape(a, b, offs), spot_out, self.out_dtype, generator, self.accumulate)
        options = {"out": out, "bias": bias, "accumulate": self.accumulate, "trans_b": trans_b}
        return grouped_cases.run(a, b, offs, backend, out_dtype=self.out_dtype, **options) is not None

    def _check_feed_forward(self, device: torch.device, backend: str) -> bool:
        """Against fp64, by the norms of the result and of each gradient that has a few values at least."""
        generator, rows, trans_b = seeded(device, self.seed), self.groups, self.layout.trans_b
        count, n, k = len(rows), self.n, self.k
        last = sum(rows)  # type: ignore[arg-type]
        total = last + self.tail
        shapes = (total, k), (count, 2 * n, k), (count, k, n)
        if not trans_b:
            shapes = (total, k), (count, k, 2 * n), (count, n, k)
        leaves = [operand(s, spot, self.dtype, generator) for s, spot in zip(shapes, self.places, strict=True)]
        leaves[1:] = [w / max(size, 1) ** 0.5 for w, size in zip(leaves[1:], (k, n), strict=True)]
        if self.bias:
            leaves.append(operand((total,), self.places[1], self.out_dtype, generator))
        dy = operand((total, k), self.places[1], self.dtype, generator)
        for t in (leaves[0], dy, *leaves[3:]):
            if 0 not in t.stride():
                t[last:] = NAN
        offs = torch.tensor(rows, device=device).cumsum(0).to(self.offs_dtype)
        leaves = [t.detach().requires_grad_() for t in leaves]
        with gmm.use_backend(backend):
            y = gmm.moe.feed_forward(*leaves[:3], offs, *leaves[3:], trans_b=trans_b)
            results = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        exact = exact_feed_forward(leaves, offs.tolist(), dy, trans_b)
        for i, (result, want) in enumerate(zip(results, exact, strict=True)):
            assert result.shape == want.shape and result.isfinite().all() and not result[want == 0].any()
            unit = max(FEED_FORWARD_UNIT[self.dtype], FEED_FORWARD_UNIT[result.dtype])
            if int((want != 0).sum()) >= 8:
                error, norm = float((result.double() - want).norm()), float(want.norm())
                assert error <= unit * norm, f"result {i} is off by {error:.2g} of {norm:.2g}"
        return True


def draw_backend(rng: random.Random, form: str, device: torch.device) -> str:
    """One that the machine has. Each new kind of call costs Triton a second to compile, so it comes less often."""
    if device.type == "cpu":
        return "reference" if form in ("list", "feed_forward") or rng.random() < 0.5 else "triton"
    has_cutlass = torch.cuda.get_device_capability() == (9, 0)
    if form in ("grads", "feed_forward"):
        return "auto"
    if form == "list":
        names = ("auto", "cutlass", "cutlass", "cublas", f"cutlass: {rng.choice(KERNELS)}")
    else:
        names = ("auto", "auto", "cutlass", "cutlass", "cutlass", "cublas", "triton")
    return rng.choice([name for name in names if has_cutlass or not name.startswith("cutlass")])


def draw(rng: random.Random, device: torch.device) -> tuple[Case, str]:
    """A case for that device and the backend to run it on."""
    form = rng.choice(("list", "list", "list", "grouped", "grouped", "grouped", "grads", "feed_forward"))
    backend = draw_backend(rng, form, device)
    interpreted = device.type == "cpu" and backend == "triton"
    budget = INTERPRETER if interpreted else GRADS if form == "grads" else GPU if device.type == "cuda" else CPU
    if form == "feed_forward":
        budget = LAYER if device.type == "cuda" else GRADS
    return Case.draw(rng, form, budget), backend


def machine() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Result(NamedTuple):
    """What came of some cases."""

    ran: collections.Counter[str]  # by backend, "refused" among them
    failed: list[str]


def run_cases(seed: int, numbers: Sequence[int], end: float) -> Result:
    """Those numbers, until the time is up. Five failures are enough."""
    device = machine()
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    result = Result(collections.Counter(), [])
    for number in numbers:
        if time.time() > end or len(result.failed) == 5:
            break
        case, backend = draw(random.Random(f"{seed}:{number}"), device)
        try:
            took = case.check(device, backend)
            result.ran[gmm.last_backend().split(":")[0] if took else "refused"] += 1
        except (Exception, pytest.fail.Exception) as error:
            text = f"--seed {seed} --case {number}, backend {backend!r}: {type(error).__name__}: {error}\n  {case}"
            result.failed.append(text)
            print(text, file=sys.stderr, flush=True)
    return result


def main() -> int:
    """Runs the cases in as many processes as there are cores: most of the time is the host's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=90, help="no case starts after that (default: 90)")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--workers", type=int, default=min(16, len(os.sched_getaffinity(0))))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    end = time.time() + options.seconds
    if options.case is not None:
        print(
            *draw(
                random.Random(f"{options.seed}:{options.case}"),
                torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            )
        )
        return len(run_cases(options.seed, [options.case], end).failed)
    if options.worker is not None:
        result = run_cases(options.seed, range(options.worker, options.cases, options.workers), end)
        print(json.dumps([result.ran, len(result.failed)]))
        return 0
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"
    print(f"fuzz: seed {options.seed}, {options.cases} cases on {where}, {options.workers} processes", flush=True)
    return gather(options, time.time())


def gather(options: argparse.Namespace, start: float) -> int:
    """Starts the processes and adds up what they print. One that dies is a failure."""
    fixed = ("cases", "seconds", "seed", "workers")
    command = [sys.executable, str(Path(__file__)), *(f"--{name}={getattr(options, name)}" for name in fixed)]
    env = environment(TRITON_INTERPRET=os.environ.get("TRITON_INTERPRET", "0"))
    processes = [
        subprocess.Popen([*command, f"--worker={i}"], stdout=subprocess.PIPE, text=True, env=env)
        for i in range(options.workers)
    ]
    ran: collections.Counter[str] = collections.Counter()
    failed = 0
    for i, process in enumerate(processes):
        output, _ = process.communicate()
        if process.returncode:
            print(f"fuzz: process {i} died with {process.returncode}")
            failed += 1
            continue
        counts, failures = json.loads(output.splitlines()[-1])
        ran += collections.Counter(counts)
        failed += failures
    by_backend = ", ".join(f"{name} {count}" for name, count in sorted(ran.items()))
    print(f"fuzz: {sum(ran.values())} cases in {time.time() - start:.0f} s, {failed} failures; ran on: {by_backend}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
