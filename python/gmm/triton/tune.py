"""Tuning ahead of time: autotune measures the tiles of configs.py, and later calls of the kind take the best."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.testing import do_bench

from gmm.triton import cache
from gmm.triton.call import describe
from gmm.triton.configs import Config, alternatives
from gmm.triton.launch import forget_plans, run, shared_memory


def autotune(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    allow_tf32: bool = False,
) -> Config:
    """Measures every tile that fits on a call like grouped_mm(a, b, offs, out), and keeps the fastest on disk.

    Calls in this and in later processes take it when they agree in device name, dtype, mode, N, K and the average of
    rows a group, rounded up to a power of two. Nothing is measured but here. Synchronises; takes seconds, mostly to
    compile.

    Args:
        a: as in grouped_mm.
        b: as in grouped_mm.
        offs: as in grouped_mm.
        out_dtype: of out; the dtype of a by default.
        accumulate: whether out is added to.
        allow_tf32: whether fp32 operands may be rounded to TF32.

    Returns:
        The fastest tile.

    Raises:
        RuntimeError: the tensors are on a CPU; others can write to the cache folder.
    """
    if a.device.type == "cpu":
        raise RuntimeError("a: expected a tensor on a GPU (an interpreter's times mean nothing), got one on cpu")
    batch = a.shape[:1] if offs is None else offs.shape if a.dim() == b.dim() else ()
    out = a.new_zeros((*batch, a.shape[-2], b.shape[-1]), dtype=out_dtype or a.dtype)
    call = describe(a, b, offs, out, None, accumulate, allow_tf32)
    tiles = alternatives(call.kind.precision, call.kind.n, shared_memory(call.kind.device))
    with torch.get_device_module(a.device).device(a.device):
        times = {
            config: do_bench(lambda config=config: run(a, b, offs, out, None, accumulate, allow_tf32, config))
            for config in tiles
        }
    best = min(times, key=lambda config: times[config])
    cache.store(call.kind, best)
    forget_plans()
    return best
