"""Runs a call with poisoned outputs and compares every group with fp64.

The bound on an element of D, derived and not tuned (u = 2^-p is the unit roundoff of a format with p significant bits):

    |D - exact| <= u_out * |exact|                  D is rounded once
                +  u_out * |D0 + bias|              twice when D and bias are added to it in turn, in 16 bits
                +  u_out * |A B|                cuBLAS alone: it rounds the product before adding it to a 16-bit D
                +  acc   * (|A| |B| + |D0| + |bias|)
    acc = 4 sqrt(K + 2) 2^-24                       rounding errors of fp32 sums behave like a random walk
        + ceil(K / 8) 2^-23   for 16-bit inputs     tensor cores cut instead of rounding, once in 8 or 16 products
        + 2 * 2^-11           for TF32              both inputs lose bits

The products themselves are exact in fp32 for 16-bit inputs. The second bound is on the whole group: errors of
rounding to nearest are spread evenly, so the norm of the error stays under 0.6 of the worst case. Cutting, or one
rounding too many, exceeds it, although each element alone might pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import Group, Layout

import gmm

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
CANARY = 77.0  # exact in every dtype
NAN = float("nan")


@dataclass
class Call:
    """One multi_tensor_gemm call, with outputs that lie inside larger buffers full of the canary."""

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    d: list[torch.Tensor]
    bias: list[torch.Tensor] | None = None
    layout: Layout = Layout(False, False)
    accumulate: bool = False
    guards: list[torch.Tensor] = field(default_factory=list)
    independent: bool = True  # errors of elements; not where rows or columns of an operand repeat

    def kwargs(self) -> dict[str, Any]:
        """Everything but the tensors and the backend."""
        return {"trans_a": self.layout.trans_a, "trans_b": self.layout.trans_b, "accumulate": self.accumulate}

    def operands(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """op(a[i]) and op(b[i])."""
        a, b = self.a[i], self.b[i]
        return (a.t() if self.layout.trans_a else a), (b.t() if self.layout.trans_b else b)


def seeded(device: torch.device, seed: int = 0) -> torch.Generator:
    """A generator on the device."""
    return torch.Generator(device).manual_seed(seed)


def randn(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, generator: torch.Generator
) -> torch.Tensor:
    """Normal values, drawn on the generator's device and rounded to dtype."""
    return torch.randn(shape, generator=generator, device=generator.device).to(device=device, dtype=dtype)


def make_operands(
    groups: Sequence[Group], layout: Layout, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Contiguous a and b."""
    generator = seeded(device, seed)
    a = [randn((k, m) if layout.trans_a else (m, k), dtype, device, generator) for m, n, k in groups]
    b = [randn((n, k) if layout.trans_b else (k, n), dtype, device, generator) for m, n, k in groups]
    return a, b


def guarded(
    m: int, n: int, dtype: torch.dtype, device: torch.device, strided: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A d of [m, n] inside a buffer of canaries: contiguous, or with a gap after each row. Stays 16-byte aligned."""
    if strided:
        buffer = torch.full((m + 2, n + 16), CANARY, dtype=dtype, device=device)
        return buffer[1 : m + 1, 8 : n + 8], buffer
    buffer = torch.full((m * n + 128,), CANARY, dtype=dtype, device=device)
    return buffer[64 : m * n + 64].view(m, n), buffer


def begin_alike(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensors of ones of these shapes, in the dtype and on the device of x, whose first elements are the same."""
    memory = torch.ones(max(x.numel(), y.numel()), device=x.device).to(x.dtype)
    return memory[: x.numel()].view(x.shape), memory[: y.numel()].view(y.shape)


def make_call(
    groups: Sequence[Group],
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    *,
    d_dtype: torch.dtype | None = None,
    bias: bool = False,
    accumulate: bool = False,
    seed: int = 0,
) -> Call:
    """A call on random data with contiguous operands. Every other d is strided."""
    a, b = make_operands(groups, layout, dtype, device, seed)
    call = Call(a, b, [], layout=layout, accumulate=accumulate)
    add_outputs(call, d_dtype or dtype, seed + 1)
    if bias:
        generator = seeded(device, seed + 2)
        call.bias = [randn((n,), d_dtype or dtype, device, generator) for m, n, k in groups]
    return call


def add_outputs(call: Call, d_dtype: torch.dtype, seed: int = 1) -> Call:
    """Gives the call guarded outputs: random when accumulating, else NaN."""
    generator = seeded(call.a[0].device if call.a else torch.device("cpu"), seed)
    for i in range(len(call.a)):
        a, b = call.operands(i)
        d, buffer = guarded(a.shape[0], b.shape[1], d_dtype, a.device, strided=i % 2 == 1)
        d.copy_(randn(d.shape, d_dtype, d.device, generator)) if call.accumulate else d.fill_(NAN)
        call.d.append(d)
        call.guards.append(buffer)
    return call


def cutlass_must_take(call: Call) -> bool:
    """What CUTLASS promises to take: 16-bit inputs, everything on 16-byte boundaries, the ends of d's rows too. It may
    take more."""

    def aligned(x: torch.Tensor) -> bool:
        contiguous = x.stride(1) == 1 and x.stride(0) >= x.shape[1]
        return contiguous and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0

    def must(i: int) -> bool:
        d = call.d[i]
        if d.numel() == 0 or call.a[i].numel() == 0:
            return True
        return all(aligned(x) for x in (call.a[i], call.b[i], d)) and d.shape[1] * d.element_size() % 16 == 0

    return all(must(i) for i in range(len(call.a))) and all(x.dtype != torch.float32 for x in call.a)


def backends_that_may_run(backend: str, call: Call) -> tuple[str, ...]:
    """What gmm.last_backend() may name after this call with backend=backend."""
    if backend != "auto":
        return (backend,)
    if call.a[0].device.type == "cpu":
        return ("reference",)
    if torch.cuda.get_device_capability(call.a[0].device) != (9, 0) or call.a[0].dtype == torch.float32:
        return ("cublas",)
    return ("cutlass",) if cutlass_must_take(call) else ("cutlass", "cublas")


def assert_ran(backend: str, call: Call) -> None:
    """The backend that just ran is the one that this call should have taken; calls without work may take none."""
    if any(call.operands(i)[0].numel() and call.operands(i)[1].numel() for i in range(len(call.a))):
        ran = gmm.last_backend()
        if ":" in backend:  # one kernel
            assert ran == backend
        else:
            assert ran.split(":")[0] in backends_that_may_run(backend, call), f"backend={backend!r}: {ran!r} ran"


def run(
    call: Call, backend: str = "auto", *, sm_margin: int = 0, tf32: bool = False, expect: str | None = None
) -> list[torch.Tensor]:
    """Runs the call and checks everything about it; returns the results. `expect`: the backend that must run, where it
    is not the one that the call's operands lead to.

    Nothing when the CUTLASS backend, or the one kernel "cutlass: NAME", refused a call that it does not promise; then
    its reason was given, and d left alone."""
    before = [x.clone() for x in call.d]
    try:
        returned = gmm.multi_tensor_gemm(
            call.a, call.b, call.d, call.bias, **call.kwargs(), sm_margin=sm_margin, backend=backend
        )
    except RuntimeError as error:
        may_refuse = not cutlass_must_take(call) if backend == "cutlass" else backend.startswith("cutlass:")
        if not may_refuse:
            raise
        assert "cutlass" in str(error) and len(str(error)) > 40, f"no reason given: {error}"
        assert same_bits(call.d, before), "d was written"
        return []
    assert all(x is y for x, y in zip(returned, call.d, strict=True)), "returns the tensors that it was given"
    assert_ran(expect or backend, call)
    results = [x.clone() for x in call.d]
    compare(call, results, before, tf32=tf32)
    check_guards(call)
    return results


def run_functional(call: Call, backend: str = "auto", out_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Runs the functional form on the call's inputs and compares."""
    trans_a, trans_b = call.layout
    results = gmm.multi_tensor_gemm(
        call.a, call.b, bias=call.bias, trans_a=trans_a, trans_b=trans_b, out_dtype=out_dtype, backend=backend
    )
    assert all(x.dtype == (out_dtype or a.dtype) for x, a in zip(results, call.a, strict=True))
    assert_ran(backend, call)
    compare(call, results, results)
    return results


def same_bits(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> bool:
    """Equal bit for bit, NaNs included."""
    pairs = [tuple(t.flatten().contiguous().view(torch.uint8) for t in (x, y)) for x, y in zip(xs, ys, strict=True)]
    return all(torch.equal(x, y) for x, y in pairs)


def check_guards(call: Call) -> None:
    """Nothing around any d was written: with d itself made canary, its whole buffer is."""
    for d in call.d:
        d.fill_(CANARY)
    intact = [(buffer == CANARY).all() for buffer in call.guards]
    if intact and not torch.stack(intact).all():
        pytest.fail(f"written outside of d[{[bool(x) for x in intact].index(False)}]")


def compare(call: Call, results: Sequence[torch.Tensor], before: Sequence[torch.Tensor], *, tf32: bool = False) -> None:
    """Compares every group with fp64 by both bounds. Where fp64 gives NaN or Inf, the result must give the same."""
    verdicts = [_Verdict.of(call, i, x, before[i], tf32) for i, x in enumerate(results)]
    passed = torch.stack([v.passed for v in verdicts]).cpu() if verdicts else torch.ones(0)
    if not passed.all():
        i = int((~passed).nonzero()[0])
        pytest.fail(f"group {i} of {len(verdicts)} ({int((~passed).sum())} wrong): {verdicts[i].text()}")


@dataclass
class _Verdict:
    passed: torch.Tensor  # 0-dimensional, on the device: one transfer for all groups
    text: Callable[[], str]

    @staticmethod
    def of(call: Call, i: int, result: torch.Tensor, before: torch.Tensor, tf32: bool) -> _Verdict:
        exact, bound, typical = fp64_and_bounds(call, i, result.dtype, before, tf32)
        assert result.shape == exact.shape, f"group {i}: {tuple(result.shape)} instead of {tuple(exact.shape)}"
        error = (result.double() - exact).abs()
        finite = exact.isfinite()
        same = (result.double() == exact) | (result.isnan() & exact.isnan())
        passed = torch.where(finite, error <= bound, same).all()
        if call.independent and result.numel() >= 1024:  # the norm says nothing about a few elements
            error_norm = torch.where(finite, error, 0).norm()
            passed &= error_norm <= torch.where(finite, typical, 0).norm()

        def text() -> str:
            sizes = f"{tuple(result.shape)}, K = {call.operands(i)[0].shape[1]}, {result.dtype}"
            wrong = (~torch.where(finite, error <= bound, same)).nonzero()
            if not len(wrong):
                return f"{sizes}: norm of the error {error_norm:.3g}, allowed {typical.norm():.3g}"
            at = tuple(wrong[0].tolist())
            return f"{sizes}: {len(wrong)} elements, first {at}: {result[at]}, exact {exact[at]} +- {bound[at]:.2g}"

        return _Verdict(passed, text)


def fp64_and_bounds(
    call: Call, i: int, out: torch.dtype, before: torch.Tensor, tf32: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group i in fp64, the bound of each element, and of each element's part in the norm (see the top)."""
    a, b = (x.double() for x in call.operands(i))
    k = a.shape[1]
    added = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float64, device=a.device)
    magnitude = (a.float().abs().nan_to_num(0, 0, 0) @ b.float().abs().nan_to_num(0, 0, 0)).double()
    for part in (call.bias[i] if call.bias else None, before if call.accumulate else None):
        if part is not None:
            added += part.double()
            magnitude += part.double().abs()
    exact = a @ b + added
    sixteen_bit = call.a[i].dtype != torch.float32
    walk = math.sqrt(k + 2) * 2.0**-24
    cut = math.ceil(k / 8) * 2.0**-23 if sixteen_bit else 0.0
    inputs = 2.0**-10 if tf32 else 0.0
    rounding = UNIT[out] * exact.abs()
    if sixteen_bit and (call.bias or call.accumulate) and gmm.last_backend().startswith("cublas"):
        rounding = rounding + UNIT[out] * (a @ b).abs()
    if call.bias and call.accumulate:
        rounding = rounding + UNIT[out] * added.abs()
    tiny = torch.finfo(out).smallest_normal * UNIT[out]  # the spacing of subnormal numbers
    bound = rounding * (1 + 2.0**-8) + (4 * walk + cut + inputs) * magnitude + tiny
    # Of the norm, sums count with their own size: the errors of partial sums, which grow like sqrt(K), not K.
    size = exact.abs() + added.abs() + magnitude / math.sqrt(k + 1)
    typical = 0.6 * rounding + (2 * walk + cut + inputs) * size + tiny
    return exact, bound, typical
