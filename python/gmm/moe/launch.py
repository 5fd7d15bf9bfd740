"""Launches the kernels of gmm.moe.

Triton's own launch path binds and hashes every argument anew, which takes the host longer than a kernel takes the GPU.
Here the compiled kernel is kept with all that it was compiled for, and launched directly, as in gmm/triton/launch.py.
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import gmm.triton

_PAIRS = 128  # of a block in count_pairs and place_pairs, which compares all with all
_EXPERTS = 32  # of them at a time


def takes(x: Tensor) -> bool:
    """Whether Triton runs on that tensor's device."""
    return gmm.triton.supports(x.device) is None


def route_in_triton(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """row_map and offs of at least one expert: a counting sort. Its sums of integers are exact in any order."""
    ids, pairs = top_k_index.contiguous(), top_k_index.numel()
    blocks = max(1, -(-pairs // _PAIRS))
    row_map = ids.new_empty(ids.shape, dtype=torch.int32)
    offs = ids.new_empty((num_experts,), dtype=torch.int32)
    counts = ids.new_empty(((num_experts + 1) * blocks,), dtype=torch.int32)
    constants = num_experts, _PAIRS, _EXPERTS
    _launch("row_kernels", "count_pairs", (blocks, 1), (ids, counts), (pairs, blocks), constants)
    ends = counts.cumsum(0, dtype=torch.int32)  # over experts, and over the blocks of each
    _launch("row_kernels", "place_pairs", (blocks, 1), (ids, ends, row_map, offs), (pairs, blocks), constants)
    return row_map, offs


def permute_in_triton(x: Tensor, row_map: Tensor, weights: Tensor | None, rows: int) -> Tensor:
    """[rows, H]."""
    x, row_map = _row_major(x), row_map.contiguous()
    weights = None if weights is None else weights.contiguous()
    (tokens, k), columns = row_map.shape, x.shape[1]
    out = x.new_empty((rows, columns))
    if out.numel() > 0:
        block_t, block_h = _tile(columns, 1024)
        constants = weights is not None, k, columns, x.stride(0), block_t, block_h
        grid = -(-tokens // block_t), -(-columns // block_h)
        _launch("row_kernels", "permute", grid, (x, row_map, weights, out), (tokens, rows), constants)
    return out


def unpermute_in_triton(y: Tensor, row_map: Tensor, weights: Tensor | None) -> Tensor:
    """[T, H]."""
    y, row_map = _row_major(y), row_map.contiguous()
    weights = None if weights is None else weights.contiguous()
    (tokens, k), (rows, columns) = row_map.shape, y.shape
    out = y.new_empty((tokens, columns))
    if out.numel() > 0:
        block_t, block_h = _tile(columns, 1024)
        constants = weights is not None, k, columns, y.stride(0), block_t, block_h
        grid = -(-tokens // block_t), -(-columns // block_h)
        _launch("row_kernels", "unpermute", grid, (y, row_map, weights, out), (tokens, rows), constants)
    return out


def dots_in_triton(x: Tensor, y: Tensor, row_map: Tensor) -> Tensor:
    """[T, k] in float32."""
    x, y, row_map = _row_major(x), _row_major(y), row_map.contiguous()
    (tokens, k), columns = row_map.shape, x.shape[1]
    out = x.new_empty((tokens, k), dtype=torch.float32)
    if out.numel() > 0:
        block_t, block_h = _tile(columns, 1024)
        constants = k, columns, x.stride(0), y.stride(0), block_t, block_h
        grid = -(-tokens // block_t) * k, 1
        _launch("row_kernels", "dots", grid, (x, y, row_map, out), (tokens, y.shape[0]), constants)
    return out


class Activation:
    """What forward and backward of an activation share: the operands as the kernels read them, and the constexprs."""

    def __init__(
        self,
        h: Tensor,
        up: Tensor | None,
        weights: Tensor | None,
        offs: Tensor | None,
        kind: tuple[str, bool, float, float],
        interleaved: bool,
        limit: float | None,
    ) -> None:
        function, gated, alpha, shift = kind
        layout = "none" if not gated else "apart" if up is not None else "concatenated"
        self.layout = "interleaved" if interleaved else layout
        self.rows = h.shape[0]
        self.columns = h.shape[1] // 2 if self.layout in ("concatenated", "interleaved") else h.shape[1]
        self.h, self.up = _row_major(h), None if up is None else _row_major(up)
        self.weights = None if weights is None else weights.contiguous()
        self.offs = None if offs is None else offs.contiguous()
        self.integers = self.rows, 0 if offs is None else offs.shape[0]
        strides = self.h.stride(0), 0 if self.up is None else self.up.stride(0)
        options = function, alpha, shift, None if limit is None else float(limit), self.layout
        self.constants = (*options, weights is not None, offs is not None, self.columns, *strides)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.h, self.up, self.weights, self.offs

    @property
    def is_nothing(self) -> bool:
        """No element is in a group."""
        return self.rows * self.columns == 0 or (self.offs is not None and self.integers[1] == 0)


def activation_in_triton(call: Activation) -> Tensor:
    """[R, I]."""
    out = call.h.new_empty((call.rows, call.columns))
    if call.is_nothing:
        return out.zero_()
    block_m, block_n = _tile(call.columns, 2048)
    grid = -(-call.rows // block_m), -(-call.columns // block_n)
    constants = *call.constants, block_m, block_n
    _launch("activation_kernels", "activation", grid, (*call.tensors, out), call.integers, constants)
    return out


def activation_backward_in_triton(dy: Tensor, call: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """dh, dup and dweights; empty where there is no up and where there are no weights."""
    dh = call.h.new_empty(call.rows, call.h.shape[1])
    dup = call.h.new_empty(0 if call.up is None else call.up.shape)
    dweights = call.h.new_empty(0) if call.weights is None else torch.empty_like(call.weights)
    if call.is_nothing:
        return dh.zero_(), dup.zero_(), dweights.zero_()
    dy = _row_major(dy)
    block_m, block_n = _tile(call.columns, 2048)
    tensors = dy, *call.tensors, dh, dup, dweights
    constants = *call.constants, dy.stride(0), block_m, block_n
    grid = -(-call.rows // block_m), 1
    _launch("activation_kernels", "activation_backward", grid, tensors, call.integers, constants)
    return dh, dup, dweights


def _row_major(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _tile(columns: int, elements: int) -> tuple[int, int]:
    """Rows and columns of a program, both powers of two: the widest of which at most an eighth lies outside."""
    widths = [width for width in (1024, 512, 256, 128) if -columns % width <= columns // 8]
    width = widths[0] if widths else min(128, 1 << (columns - 1).bit_length())
    return elements // width, width


_compiled: dict[tuple[Any, ...], Any] = {}
_handles_work = True  # whether this Triton's compiled kernels can be launched as below


def _launch(
    module: str,
    name: str,
    programs: tuple[int, int],
    tensors: tuple[Tensor | None, ...],
    integers: tuple[int, ...],
    constants: tuple[Any, ...],
) -> None:
    """On the device of the tensors, in its current stream. The kernel takes the arguments in this order."""
    global _handles_work
    grid = (*programs, 1)
    given = [x for x in tensors if x is not None]
    device = given[0].device
    if device.type == "cpu":
        _interpret(_kernels(module, True)[name][grid], tensors, (*integers, *constants))
        return
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    kinds = [None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    key = (name, device.index, *kinds, *constants)
    compiled = _compiled.get(key)
    with _on(device):
        if compiled is not None and _handles_work:
            try:
                compiled[grid](*addresses, *integers, *constants)
                return
            except (AttributeError, TypeError):  # before anything ran
                _handles_work = False
        compiled = _kernels(module, False)[name][grid](*tensors, *integers, *constants, num_warps=4)
    if type(compiled).__name__ == "CompiledKernel":
        _compiled[key] = compiled


def _interpret(kernel: Any, tensors: tuple[Tensor | None, ...], rest: tuple[Any, ...]) -> None:
    """In float32 where tensors are bfloat16, to which Triton's interpreter does not round."""
    memory = [_in_float32(x) if x is not None and x.dtype is torch.bfloat16 else x for x in tensors]
    kernel(*memory, *rest)
    for x, y in zip(tensors, memory, strict=True):
        if x is not None and y is not None and y is not x:
            x.copy_(y)


def _in_float32(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.float32).copy_(x)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    current = torch.accelerator.current_device_index()
    return nullcontext() if device.index in (None, current) else torch.accelerator.device_index(device.index)


@functools.cache
def _kernels(module: str, interpreted: bool) -> dict[str, Any]:
    """The module's functions. triton.jit decides where it decorates whether to interpret: each way is loaded apart."""
    from triton import knobs

    spec = importlib.util.find_spec(f"gmm.moe.{module}")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with knobs.runtime.scope():
        knobs.runtime.interpret = interpreted
        spec.loader.exec_module(loaded)
    functions = vars(loaded)
    if interpreted:  # each call of a device function would patch triton.language anew: 20 times slower
        for name, function in functions.copy().items():
            if name.startswith("_") and hasattr(function, "rewrite"):
                functions[name] = function.rewrite()
    return functions
