"""Launches kernels.grouped_gemm.

Triton's own launch path binds and hashes every argument anew, 30 to 70 us a call. Here the compiled kernel is kept with
the kind of call that it was compiled for, and launched directly.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gmm.triton import cache
from gmm.triton.call import TOKENS, Call, Kind, describe, signature
from gmm.triton.configs import Config, choose

_BACKENDS = {"cuda": "amd" if torch.version.hip else "nvidia", "xpu": "intel"}  # Triton's name for a device type


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    accumulate: bool = False,
    allow_tf32: bool = False,
) -> None:
    """out[g] (+)= a[g] @ b[g] (+ bias[g]) for every group g, in one launch. Takes checked arguments.

        a           b           out         group g
        [M, K]      [G, K, N]   [M, N]      owns the rows offs[g-1]:offs[g]
        [G, M, K]   [K, N]      [M, N]      owns the columns offs[g-1]:offs[g]
        [M, K]      [K, N]      [G, M, N]   contracts over offs[g-1]:offs[g]
        [G, M, K]   [G, K, N]   [G, M, N]   is one of a batch; offs is None

    Args:
        a: bfloat16, float16 or float32; any strides, also overlapping, and any alignment.
        b: in the dtype of a, as free in its layout.
        offs: [G], int32 or int64, on the device of a. A value outside of the buffer counts as its nearest end. Where
            they decrease, rows and columns of out may hold the product of another group, or be left as they were:
            programs search their group by halving. Nothing outside of the tensors is read or written.
        out: the dtype of a, or float32; any strides that do not overlap. Rows or columns from offs[-1] on and groups
            with nothing to contract over get zeros, or stay as they were when accumulating.
        bias: [G, N], added to the rows of group g.
        accumulate: adds to out, in float32, before the one rounding.
        allow_tf32: float32 operands may be rounded to TF32.

    Does not synchronise. May be captured in a CUDA graph after a first call of the same kind. Equal from run to run; a
    row does not depend on other rows and groups, but for the tile that the average of rows a group chooses.
    """
    if out.numel() > 0:
        run(a, b, offs, out, bias, accumulate, allow_tf32)


def supports(device: torch.device) -> str | None:
    """Why Triton cannot run on the device. None where it can: sm80 and newer, AMD and Intel GPUs, and CPUs in its
    interpreter (TRITON_INTERPRET=1)."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return "Triton takes CPU tensors only in its interpreter (TRITON_INTERPRET=1)"
    return _supports(device)


@functools.cache
def _supports(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu":
        return None if importlib.util.find_spec("numpy") else "Triton's interpreter needs numpy"
    from triton.backends import backends

    if _BACKENDS.get(device.type) not in backends:
        return f"this Triton has no backend for {device.type} devices"
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"its tensor core code needs sm80 or newer, {device} is sm{major}{minor}"
    return None


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # a, b, out, bias, offs


@dataclass
class Plan:
    """What calls of one kind share: the tile, and the arguments of the kernel around the number of tokens."""

    kind: Kind
    config: Config
    before: tuple[int, ...]
    after: tuple[int, ...]
    constants: tuple[Any, ...]  # the kernel's constexprs, in its order
    compiled: Any = None  # Triton's compiled kernel, after the first launch

    @staticmethod
    def of(call: Call, config: Config | None) -> Plan:
        """The plan for that tile, or for the one that autotune or configs.py has chosen."""
        kind = call.kind
        limit = shared_memory(kind.device)
        config = config or cache.lookup(kind, limit) or choose(kind.precision, kind.rows, kind.n, limit)
        ragged = {"batched": "", "ragged_k": "k"}.get(kind.mode, "m")
        bias = "" if kind.bias_dtype is None else "m" if kind.mode == "ragged_n" else "n"
        even_n, even_k = kind.n % config.block_n == 0, ragged != "k" and kind.k % config.block_k == 0
        constants = (
            *(ragged, bias, kind.accumulate, "tf32" if kind.tf32 else "ieee", *kind.a, *kind.b, *kind.out),
            *(even_n, even_k, config.block_m, config.block_n, config.block_k, config.group_m),
        )
        i = TOKENS[kind.mode]
        return Plan(kind, config, call.integers[:i], call.integers[i + 1 :], constants)

    def programs(self, groups: int, m: int, n: int) -> int:
        """Tiles of out, or slots for them."""
        block_m, tiles_n = self.config.block_m, -(-n // self.config.block_n)
        if self.kind.mode in ("ragged_m", "ragged_n"):
            return (m // block_m + groups + 1) * tiles_n
        return -(-m // block_m) * groups * tiles_n


# Strides that hold the number of tokens, as those of a row-major [M, K] that is ragged in K, would add plans forever.
_MOST_PLANS = 10_000
_plans: dict[tuple[Any, ...], Plan] = {}
direct_plans: dict[tuple[Any, ...], tuple[Plan, str]] = {}  # see ragged/run.py: with last_backend()'s text
_no_handles = ""  # why compiled kernels are not launched directly


def launch_path() -> str:
    """How kernels are launched: "handle" (directly) or "jit: REASON" (through Triton's own, slower path)."""
    return f"jit: {_no_handles}" if _no_handles else "handle"


def forget_plans() -> None:
    """Lets the next calls choose their tiles anew."""
    _plans.clear()
    direct_plans.clear()


def keep(plans: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: object) -> None:
    """Adds a plan to one of the two."""
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan


def run(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    out: Tensor,
    bias: Tensor | None = None,
    accumulate: bool = False,
    allow_tf32: bool = False,
    config: Config | None = None,
) -> Plan:
    """grouped_mm for an out that is not empty, with that tile or the one that is chosen. Returns what run_plan() takes
    for calls of the same kind."""
    offs = None if offs is None else offs.contiguous()
    key, tokens = signature(a, b, offs, out, bias, accumulate, allow_tf32)
    plan = _plans.get((key, config))
    if plan is None:
        plan = Plan.of(describe(a, b, offs, out, bias, accumulate, allow_tf32), config)
        keep(_plans, (key, config), plan)
    run_plan(plan, tokens, a, b, offs, out, bias)
    return plan


def run_plan(
    plan: Plan, tokens: int, a: Tensor, b: Tensor, offs: Tensor | None, out: Tensor, bias: Tensor | None
) -> None:
    """A call of the plan's kind; of the tensors, only the addresses count."""
    integers = (*plan.before, tokens, *plan.after)
    if plan.kind.mode == "ragged_n":
        a, b = b, a
    index = plan.kind.device.index
    if index is None or index == torch.accelerator.current_device_index():
        _launch(plan, (a, b, out, bias, offs), integers)
    else:
        with torch.accelerator.device_index(index):
            _launch(plan, (a, b, out, bias, offs), integers)


def _launch(plan: Plan, tensors: _Tensors, integers: tuple[int, ...]) -> None:
    """On the current device and stream; compiles the plan's kernel the first time."""
    global _no_handles
    programs = plan.programs(integers[0], integers[1], integers[2])
    if plan.compiled is not None and not _no_handles:
        a, b, out, bias, offs = tensors
        pointers = (
            *(a.data_ptr(), b.data_ptr(), out.data_ptr()),
            *(None if bias is None else bias.data_ptr(), None if offs is None else offs.data_ptr()),
        )
        try:
            _launch_handle(plan, programs, (*pointers, *integers, *plan.constants))
            return
        except (AttributeError, TypeError) as error:  # before anything ran: this Triton's handles work differently
            _no_handles = f"{type(error).__name__}: {error}"
    grid = (programs, 1, 1)
    if _is_interpreted(plan.kind.device):
        _interpret(plan, grid, tensors, integers)
        return
    options = {"num_warps": plan.config.warps, "num_stages": plan.config.stages}
    compiled = _kernel(interpreted=False)[grid](*tensors, *integers, *plan.constants, **options)
    plan.compiled = compiled if type(compiled).__name__ == "CompiledKernel" else None


def _launch_handle(plan: Plan, programs: int, arguments: tuple[Any, ...]) -> None:
    """Launches the compiled kernel. Triton's own compiled[grid](...) does the same, but makes a dictionary for the
    launch hooks, and has the launcher call them, where there are none (their chains are empty); and asks torch for the
    device anew. It takes the calls that a profiler watches."""
    driver, knobs = _triton()
    compiled, hooks = plan.compiled, knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        compiled[(programs, 1, 1)](*arguments)
        return
    stream = driver.active.get_current_stream(plan.kind.device.index)
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


@functools.cache
def _triton() -> tuple[Any, Any]:
    """Triton's driver and knobs; triton may be absent where this module is imported."""
    from triton import knobs
    from triton.runtime import driver

    return driver, knobs


def _is_interpreted(device: torch.device) -> bool:
    return device.type == "cpu"


def _interpret(plan: Plan, grid: tuple[int, int, int], tensors: _Tensors, integers: tuple[int, ...]) -> None:
    """In float32 where tensors are bfloat16, which Triton's interpreter multiplies as integers and does not round."""
    a, b, out, bias, offs = (_in_float32(x) if x is not None and x.dtype is torch.bfloat16 else x for x in tensors)
    _kernel(interpreted=True)[grid](a, b, out, bias, offs, *integers, *plan.constants)
    if out is not None and out is not tensors[2]:
        tensors[2].copy_(out)


def _in_float32(x: Tensor) -> Tensor:
    """x and its memory in float32, in the same strides."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).float()
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


@functools.cache
def _kernel(interpreted: bool) -> Any:
    """kernels.grouped_gemm. triton.jit decides where it decorates whether to interpret: each way has its own module."""
    from triton import knobs

    spec = importlib.util.find_spec("gmm.triton.kernels")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with knobs.runtime.scope():
        knobs.runtime.interpret = interpreted
        spec.loader.exec_module(module)
    if interpreted:  # each call of a device function would patch triton.language anew: 20 times slower
        for name, function in vars(module).copy().items():
            if name != "grouped_gemm" and hasattr(function, "rewrite"):
                setattr(module, name, function.rewrite())
        # What tensors hold in Triton 3.6's interpreter, NumPy 2.4 no longer turns into an index.
        vars(module)["range"] = lambda steps: range(steps.handle.data.item())
    return module.grouped_gemm


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on the device; in the interpreter as many as on an RTX 3090."""
    if _is_interpreted(device):
        return 101376
    from triton.runtime import driver

    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
