#!/usr/bin/env python3
"""A small call of every kernel under each tool of compute-sanitizer.

    python tests/sanitize.py                  memcheck, racecheck, initcheck and synccheck, at the same time
    python tests/sanitize.py --tools memcheck
    python tests/sanitize.py --calls          the calls without a tool, as test_sanitize.py makes them

Operands are allocations of exactly their size, copied from the host, so that the tools see every access outside of
them and every read of what nobody wrote, and instrument no kernel but those under test. Outputs are NaN between
canaries, or exact, too; the workspace lies between canaries. Results are compared on the host. Without a GPU the
calls are planned for sm90, and what is expected takes the place of results: that checks this file.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import c_api
import torch
from c_api import LIST, RAGGED_K, RAGGED_M, Operands
from cases import DGRAD, FORWARD, KERNELS, LAYOUTS, SWIGLU, SWIGLU_BACKWARD, Layout
from check import CANARY, NAN
from torch import Tensor

import gmm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# CUTLASS's kernel of 64 x 128 rewrites a TMA descriptor in shared memory for each group: all lanes of a warp copy it
# out (LDS), later one of them writes the next group's (STS), with nothing between that racecheck counts as order. It
# warns of these instructions. (Told to leave these kernels out, it breaks off at the first.)
KNOWN = (
    "cutlass::device_kernel<gmm::sm90::pointer_array::GroupedGemm<",
    "cute::tuple<cute::C<(int)64>, cute::C<(int)128>, cute::C<(int)128>>",
)

ROWS = [130, 0, 1, 65, 8, 200]
N, K = 200, 136  # two tiles of N with a ragged end, three steps of K with a ragged end
TOTAL = 230  # tokens of the ragged forms
ENDS = {
    "ends": [130, 130, 131, 196],
    "empty": [0, 0, 0, 0],
    "all in one": [0, 230, 230, 230],
    "decreasing": [200, 40, 7, 130],
    "outside": [-5, 2**31 - 1, -(2**31), 4000],
}


class Buffer(NamedTuple):
    """A tensor and the memory that it lies in."""

    tensor: Tensor
    memory: Tensor  # all of the canary but for the tensor

    def intact(self) -> bool:
        """Whether nothing beside the tensor was written."""
        memory = self.memory.cpu()
        start = (self.tensor.data_ptr() - self.memory.data_ptr()) // memory.element_size()
        memory.as_strided(self.tensor.shape, self.tensor.stride(), start).fill_(CANARY)
        return bool((memory == CANARY).all())


def random(*shape: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """On the device, in an allocation of its own."""
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def buffer(values: Tensor, exact: bool) -> Buffer:
    """An output that holds these values, in an allocation of exactly its size or between canaries."""
    if exact:
        memory = values.flatten().to(DEVICE)
        return Buffer(memory.view(values.shape), memory)
    memory = torch.full((values.numel() + 256,), CANARY, dtype=values.dtype)
    memory[128:-128] = values.flatten()
    memory = memory.to(DEVICE)
    return Buffer(memory[128:-128].view(values.shape), memory)


def clamped(ends: Sequence[int], total: int) -> list[int]:
    """As gmm.h has it."""
    return list(itertools.accumulate((min(max(end, 0), total) for end in ends), max))


def expected(x: Operands, before: Sequence[Tensor], form: int, accumulate: bool) -> list[Tensor]:
    """What each d must hold, in float32: check_values() allows for much more than its rounding."""
    a, b = ([t.cpu().float() for t in tensors] for tensors in (x.a, x.b))
    bias = None if x.bias is None else [t.cpu().float() for t in x.bias]
    if form == LIST:
        products = [p @ q for p, q in zip(a, b, strict=True)]
        if bias:
            products = [p + row for p, row in zip(products, bias, strict=True)]
    else:
        assert x.offs is not None
        ends = clamped(x.offs.tolist(), a[0].shape[0 if form == RAGGED_M else 1])
        product = torch.zeros(x.d[0].shape, dtype=torch.float32)
        for g, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            if form == RAGGED_K:
                product[g] = a[0][:, start:end] @ b[0][start:end]
            else:
                product[start:end] = a[0][start:end] @ b[0][g] + (bias[0][g] if bias else 0)
        products = [product]
    return [p + d.float() for p, d in zip(products, before, strict=True)] if accumulate else products


def check_values(d: Sequence[Tensor], exact: Sequence[Tensor], what: str) -> None:
    """To the rounding of d's dtype; what is wrong by more than that is no product."""
    for i, (x, want) in enumerate(zip(d, exact, strict=True)):
        unit = 2.0**-7 if x.dtype == BF16 else 2.0**-9
        assert x.isfinite().all(), f"{what}: d[{i}] is not finite"
        error = (x.cpu().float() - want).abs().max() if x.numel() else 0.0
        assert error <= unit * (1 + float(want.abs().max() if x.numel() else 0)), f"{what}: d[{i}] is off by {error}"


def call(x: Operands, buffers: Sequence[Buffer], form: int, accumulate: bool, kernel: str, backend: int) -> str | None:
    """Runs one call and checks all of it. What it was, or None where the kernel does not take it."""
    args = c_api.arguments(x, form, accumulate=accumulate, kernel=kernel, backend=backend)
    return run_checked(args, x.d, expected(x, [d.cpu() for d in x.d], form, accumulate), buffers)


def run_checked(
    args: c_api.Args, outputs: Sequence[Tensor], exact: Sequence[Tensor], buffers: Sequence[Buffer]
) -> str | None:
    """The same, given what the outputs must hold."""
    plan = c_api.plan(args, None if DEVICE.type == "cuda" else 90)
    if plan is None:
        return None
    what = f"{plan.kernel.decode()} form {args.form} into {outputs[0].dtype}"
    memory = torch.full((plan.workspace_bytes + 512,), int(CANARY), dtype=torch.uint8).to(DEVICE)
    space = Buffer(memory[256:-256], memory)  # allocations are 256-byte aligned
    if DEVICE.type == "cuda":
        c_api.run(args, space.tensor)
        torch.cuda.synchronize()
    else:
        for d, want in zip(outputs, exact, strict=True):
            d.copy_(want)
    check_values(outputs, exact, what)
    assert all(b.intact() for b in buffers), f"{what}: wrote outside of its outputs"
    assert space.intact(), f"{what}: wrote outside of its workspace"
    return what


def list_calls(kernel: str, backend: int) -> Iterator[str | None]:
    """Separate tensors, slices of one buffer, and more groups than small parameters hold, in every layout."""
    forms = (([*ROWS], False), ([*ROWS], True), ([9] * 30, False))
    options = (
        (BF16, BF16, False, False),
        (FP16, FP32, True, False),
        (BF16, BF16, False, True),
        (FP16, FP16, True, True),
    )
    for (rows, slices), layout, (dtype, d_dtype, accumulate, bias) in itertools.product(
        forms, LAYOUTS.values(), options
    ):
        yield list_call(rows, slices, layout, dtype, d_dtype, accumulate, bias, kernel, backend)


def list_call(
    rows: list[int],
    slices: bool,
    layout: Layout,
    dtype: torch.dtype,
    d_dtype: torch.dtype,
    accumulate: bool,
    bias: bool,
    kernel: str,
    backend: int,
) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def tokens(columns: int) -> list[Tensor]:
        if slices:
            return list(random(sum(rows), columns, dtype=dtype, generator=generator).split(rows))
        return [random(r, columns, dtype=dtype, generator=generator) for r in rows]

    def weights(transposed: bool) -> list[Tensor]:
        stored = [random(*((N, K) if transposed else (K, N)), dtype=dtype, generator=generator) for _ in rows]
        return [w.t() for w in stored] if transposed else stored

    if layout.trans_a and not layout.trans_b:
        a, b = [t.t() for t in tokens(N)], tokens(K)
    elif layout.trans_a:
        a = [random(K, (r + 7) // 8 * 8, dtype=dtype, generator=generator)[:, :r].t() for r in rows]
        b = weights(True)
    else:
        a, b = tokens(K), weights(layout.trans_b)
    shapes = [(x.shape[0], y.shape[1]) for x, y in zip(a, b, strict=True)]
    fill = [torch.randn(s, generator=generator) if accumulate else torch.full(s, NAN) for s in shapes]
    buffers = [buffer(values.to(d_dtype), exact=i % 2 == 1) for i, values in enumerate(fill)]
    biases = [random(n, dtype=d_dtype, generator=generator) for _, n in shapes] if bias else None
    x = Operands(a, b, [d.tensor for d in buffers], biases)
    return call(x, buffers, LIST, accumulate, kernel, backend)


def ragged_calls(kernel: str) -> Iterator[str | None]:
    """Right and hostile ends, of both dtypes."""
    options = ((torch.int32, FORWARD, BF16, False), (torch.int64, DGRAD, FP32, True))
    for form, ends, (offs_dtype, layout, d_dtype, accumulate) in itertools.product(
        (RAGGED_M, RAGGED_K), ENDS.values(), options
    ):
        yield ragged_call(form, ends, offs_dtype, layout, d_dtype, accumulate, kernel)


def ragged_call(
    form: int,
    ends: list[int],
    offs_dtype: torch.dtype,
    layout: Layout,
    d_dtype: torch.dtype,
    accumulate: bool,
    kernel: str,
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    groups = len(ends)
    x = random(TOTAL, K, dtype=BF16, generator=generator)
    if form == RAGGED_K:
        a, b = random(TOTAL, N, dtype=BF16, generator=generator).t(), x
        shape: tuple[int, ...] = (groups, N, K)
    else:
        stored = random(groups, *((N, K) if layout.trans_b else (K, N)), dtype=BF16, generator=generator)
        a, b, shape = x, stored.mT if layout.trans_b else stored, (TOTAL, N)
    values = torch.randn(shape, generator=generator) if accumulate else torch.full(shape, NAN)
    d = buffer(values.to(d_dtype), exact=layout == DGRAD)
    bias = None
    if form == RAGGED_M and layout == FORWARD:
        bias = [random(groups, N, dtype=d_dtype, generator=generator)]
    offs = torch.tensor(ends, dtype=offs_dtype).to(DEVICE)
    return call(Operands([a], [b], [d.tensor], bias, offs), [d], form, accumulate, kernel, c_api.CUTLASS)


def swiglu_calls(kernel: str) -> Iterator[str | None]:
    """Right and hostile ends, with and without routing weights; forward with and without h."""
    options = ((torch.int32, True, BF16, True), (torch.int64, False, FP16, False))
    for ends, (offs_dtype, trans_b, dtype, weighted) in itertools.product(ENDS.values(), options):
        offs = torch.tensor(ends, dtype=offs_dtype).to(DEVICE)
        if kernel == SWIGLU:
            yield swiglu_call(offs, trans_b, dtype, weighted, keeps_h=weighted)
        else:
            yield swiglu_backward_call(offs, trans_b, dtype, weighted)


def swiglu_call(offs: Tensor, trans_b: bool, dtype: torch.dtype, weighted: bool, keeps_h: bool) -> str | None:
    x, weights, w, product = swiglu_operands(offs, K, 2 * N, trans_b, dtype, weighted)
    gate, up = product.chunk(2, 1)
    exact = [torch.nn.functional.silu(gate) * up * (1 if weights is None else weights.cpu()[:, None])]
    outputs = [buffer(torch.full((TOTAL, N), NAN, dtype=dtype), exact=False)]
    args = c_api.arguments(Operands([x], [w], [outputs[0].tensor], None, offs), RAGGED_M, accumulate=False)
    args.kernel, args.epilogue = SWIGLU.encode(), 1
    args.row_weights = None if weights is None else weights.data_ptr()
    if keeps_h:
        exact.append(product)
        outputs.append(buffer(torch.full((TOTAL, 2 * N), NAN, dtype=dtype), exact=True))
        args.h = c_api.Matrix.of(outputs[1].tensor)
    return run_checked(args, [b.tensor for b in outputs], exact, outputs)


def swiglu_backward_call(offs: Tensor, trans_b: bool, dtype: torch.dtype, weighted: bool) -> str | None:
    dy, weights, w, product = swiglu_operands(offs, K, N, trans_b, dtype, weighted)
    h = random(TOTAL, 2 * N, dtype=dtype, generator=torch.Generator().manual_seed(1))
    gate, up = h.cpu().float().chunk(2, 1)
    s = torch.sigmoid(gate)
    scaled = product * (1 if weights is None else weights.cpu()[:, None])
    exact = [torch.cat([scaled * up * (s * (1 + gate * (1 - s))), scaled * gate * s], 1)]
    outputs = [buffer(torch.full((TOTAL, 2 * N), NAN, dtype=dtype), exact=False)]
    args = c_api.arguments(Operands([dy], [w], [h], None, offs), RAGGED_M, accumulate=False)
    args.d = (c_api.Matrix * 1)(c_api.Matrix.of(outputs[0].tensor))
    args.kernel, args.epilogue, args.h = SWIGLU_BACKWARD.encode(), 2, c_api.Matrix.of(h)
    parts = buffer(torch.full((4 * -(-N // 128), TOTAL), NAN), exact=False)
    if weights is not None:
        args.row_weights, args.row_sums = weights.data_ptr(), parts.tensor.data_ptr()
        outputs.append(parts)
    what = run_checked(args, [outputs[0].tensor], exact, outputs)
    if weights is not None and DEVICE.type == "cuda":
        check_values([parts.tensor.cpu().sum(0)], [(product * gate * s * up).sum(1)], f"{what}, row sums")
    return what


def swiglu_operands(
    offs: Tensor, inner: int, columns: int, trans_b: bool, dtype: torch.dtype, weighted: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """a, routing weights, b [E, inner, columns], and their product as it is rounded, in float32 on the host."""
    generator = torch.Generator().manual_seed(0)
    a = random(TOTAL, inner, dtype=dtype, generator=generator)
    weights = random(TOTAL, dtype=FP32, generator=generator) if weighted else None
    shape = (columns, inner) if trans_b else (inner, columns)
    stored = random(len(offs), *shape, dtype=dtype, generator=generator)
    b = stored.mT if trans_b else stored
    product = torch.zeros(TOTAL, columns)
    ends = clamped(offs.tolist(), TOTAL)
    for g, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        product[start:end] = a[start:end].cpu().float() @ b[g].cpu().float()
    return a, weights, b, product.to(dtype).float()


def triton_calls() -> Iterator[str]:
    """Every mode, aligned and odd, with right and hostile ends. Decreasing ones may give anything inside of out."""
    if DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    for mode, odd in itertools.product(("ragged_m", "ragged_n", "ragged_k", "batched"), (False, True)):
        m, n, k, total = (33, 35, 37, 101) if odd else (48, 136, 72, 160)
        dtype, generator = (FP32 if odd else BF16), torch.Generator().manual_seed(0)
        shapes = {
            "ragged_m": ((total, k), (4, k, n), (total, n)),
            "ragged_n": ((4, m, k), (k, total), (m, total)),
            "ragged_k": ((m, total), (total, n), (4, m, n)),
            "batched": ((4, m, k), (4, k, n), (4, m, n)),
        }
        a, b = (random(*s, dtype=dtype, generator=generator) for s in shapes[mode][:2])
        for name, ends in ENDS.items():
            ends = [min(e, total) if 0 < e <= TOTAL else e for e in ends]
            offs = None if mode == "batched" else torch.tensor(ends, dtype=torch.int64).to(torch.int32).to(DEVICE)
            out = buffer(torch.full(shapes[mode][2], NAN, dtype=dtype), exact=name == "ends")
            gmm.grouped_mm(a, b, offs, out=out.tensor, backend="triton")
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            what = f"triton {mode} {name}"
            if name != "decreasing" and name != "outside" and mode in ("ragged_m", "ragged_k"):
                x = Operands([a], [b], [out.tensor], None, offs)
                exact = expected(x, [out.tensor.cpu()], RAGGED_M if mode == "ragged_m" else RAGGED_K, False)
                check_values([out.tensor], exact, what)
            assert out.intact(), f"{what}: wrote outside of out"
            yield what


def run_calls() -> None:
    """All of them. Raises at the first that is wrong, or when a kernel was never taken."""
    counts: dict[str, int] = {}
    has_cutlass = DEVICE.type == "cpu" or torch.cuda.get_device_capability() == (9, 0)
    for kernel in [*KERNELS, SWIGLU, SWIGLU_BACKWARD] if has_cutlass else ():
        plain = kernel in KERNELS
        calls = [*list_calls(kernel, c_api.CUTLASS), *ragged_calls(kernel)] if plain else [*swiglu_calls(kernel)]
        counts[kernel] = sum(what is not None for what in calls)
        assert counts[kernel] >= 4, f"{kernel}: never taken"
    if DEVICE.type == "cuda":  # whose fills are ours
        counts["cublas"] = sum(what is not None for what in itertools.islice(list_calls("", c_api.CUBLAS), 8))
    counts["triton"] = len(list(triton_calls()))
    print("sanitize:", ", ".join(f"{name} {count}" for name, count in counts.items()), flush=True)


def sanitizer() -> str:
    """compute-sanitizer's path, or the end of this program."""
    folders = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    found = [shutil.which("compute-sanitizer"), *(shutil.which(f"{f}/bin/compute-sanitizer") for f in folders)]
    path = next(filter(None, found), None)
    if path is None or DEVICE.type != "cuda":
        sys.exit("sanitize: needs a GPU and compute-sanitizer, which comes with the CUDA toolkit")
    return path


def only_known(lines: Sequence[str]) -> bool:
    """Whether all calls were made, and racecheck reported nothing but what is known of CUTLASS's kernel."""
    hazards = [line for line in lines if "Race reported" in line]
    summary = f"RACECHECK SUMMARY: {len(hazards)} hazards displayed (0 errors, {len(hazards)} warnings)"
    made = any(line.startswith("sanitize: sm90_") for line in lines)
    return made and all(part in line for line in hazards for part in KNOWN) and any(summary in line for line in lines)


def run_tools(tools: Sequence[str], seconds: float) -> int:
    """Every tool over all calls, at the same time; a summary of each. 1 when one found something or was not done."""
    options = (
        "--error-exitcode",
        "99",
        "--report-api-errors",
        "no",
        "--print-limit",
        "100",
        "--target-processes",
        "all",
    )
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(gmm.__file__).parents[1]), env.get("PYTHONPATH"))))
    path, start, failed = sanitizer(), time.monotonic(), 0
    running = {}
    for tool in tools:
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [path, "--tool", tool, *options, sys.executable, __file__, "--calls"]
        running[tool] = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True), log
    for tool, (process, log) in running.items():
        try:
            status = str(process.wait(max(seconds - (time.monotonic() - start), 1)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = "not done in time"
        log.seek(0)
        lines = log.read().strip().splitlines()
        known = tool == "racecheck" and only_known(lines)
        if status != "0" and not known:
            failed = 1
            print("\n".join(lines[-60:]))
        summary = " ".join(line.removeprefix("=========").strip() for line in lines if "SUMMARY" in line)
        summary += ", all of them known (KNOWN in sanitize.py)" if known else ""
        print(f"sanitize: {tool}, {time.monotonic() - start:.0f} s: exit status {status}, {summary}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--calls", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.calls:
        run_calls()
        return 0
    return run_tools(options.tools, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
