"""What gmm.grouped_mm is compared with: an adapter for each library that offers grouped GEMM, used where importable.

An adapter prepares everything that a caller could keep from call to call (padding, layouts, host copies of the sizes)
outside of what is timed. That is generous: a model would have to do some of it in every step.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from problem import Problem, loop
from torch import Tensor


class Method(NamedTuple):
    """A way to compute a problem."""

    run: Callable[[], Any]  # what is timed; returns the result
    result: Callable[[Any], Tensor] = lambda returned: returned  # brings it into the problem's form


Variants = dict[str, Method]  # by the kernel's name; the fastest counts


def torch_grouped_mm(p: Problem) -> Variants:
    """torch.nn.functional.grouped_mm. It has no fp32 output: copy_ or add_ follows, as a model does it."""
    if p.which == "forward":
        b = p.b.transpose(1, 2)
        return {"": Method(lambda: torch._grouped_mm(p.a, b, offs=p.offs))}
    a = p.a.t() if p.is_wgrad else p.a
    if p.accumulate:
        return {"add_": Method(lambda: p.out.add_(torch._grouped_mm(a, p.b, offs=p.offs)))}
    if p.out.dtype != p.a.dtype:
        return {"copy_": Method(lambda: p.out.copy_(torch._grouped_mm(a, p.b, offs=p.offs)))}
    return {"": Method(lambda: torch._grouped_mm(a, p.b, offs=p.offs))}


def mm_loop(p: Problem) -> Variants:
    """torch.mm for each group, called eagerly."""
    a, b, out = p.lists()

    def run() -> Tensor:
        loop(a, b, out, p.layout, p.accumulate)
        return p.out

    return {"": Method(run)}


def mm_graph(p: Problem) -> Variants:
    """torch.mm for each group, replayed from a CUDA graph: sizes are frozen, and nothing is left of the host time."""
    run = mm_loop(p)[""].run
    run()  # cuBLAS is set up outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> Tensor:
        graph.replay()
        return p.out

    return {"": Method(replay)}


DEEP_GEMM_ROWS = 128  # groups must begin at multiples of it


def deep_gemm(p: Problem) -> Variants:
    """DeepGEMM: groups padded to 128 rows. Its weight gradient is fp32 only."""
    import deep_gemm

    padded = [-(-rows // DEEP_GEMM_ROWS) * DEEP_GEMM_ROWS for rows in p.splits]
    device = p.a.device

    def pad(tokens: Tensor) -> Tensor:
        """Each group's rows, followed by rows of zeros."""
        wide = tokens.new_zeros(sum(padded), tokens.shape[1])
        for source, target in zip(tokens.split(p.splits), wide.split(padded), strict=True):
            target[: len(source)] = source
        return wide

    if p.is_wgrad:
        if p.out.dtype != torch.float32:
            return {}
        dy, x, sizes = pad(p.a), pad(p.b), torch.tensor(padded, device=device, dtype=torch.int32)
        before = p.out if p.accumulate else None

        def wgrad() -> Tensor:
            deep_gemm.k_grouped_bf16_gemm_tn_contiguous(dy, x, p.out, padded, sizes, before)
            return p.out

        return {"": Method(wgrad)}

    a = pad(p.a)
    b = p.b if p.layout.trans_b else p.b.transpose(1, 2).contiguous()
    out = a.new_empty(len(a), b.shape[1])
    group = torch.full((len(a),), -1, dtype=torch.int32)
    for i, (rows, part) in enumerate(zip(p.splits, group.split(padded), strict=True)):
        part[:rows] = i
    group = group.to(device)
    rows_of = (group >= 0).nonzero().squeeze(1)

    def run() -> Tensor:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, out, group)
        return out

    return {"": Method(run, lambda returned: returned[rows_of])}


QUACK_TILES = {  # rows, columns
    "pingpong": ((128, 192), (128, 128), (192, 128)),
    "cooperative": ((128, 256), (256, 192), (256, 128)),
}


def quack(p: Problem) -> Variants:
    """quack, with each of the tiles that its tuner would choose from."""
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    ends = torch.nn.functional.pad(p.offs, (1, 0))
    a = p.a.t() if p.is_wgrad else p.a
    b = p.b.transpose(1, 2) if p.layout.trans_b else p.b
    extra: dict[str, Any] = {"cu_seqlens_k": ends} if p.is_wgrad else {"cu_seqlens_m": ends}
    if p.accumulate:
        extra["add_to_output"] = True

    def method(tile_m: int, tile_n: int, schedule: str) -> Method:
        config = GemmConfig(
            tile_m=tile_m,
            tile_n=tile_n,
            pingpong=schedule == "pingpong",
            cluster_m=2,
            cluster_n=1,
            is_dynamic_persistent=False,
            device_capacity=9,
        )

        def run() -> Tensor:
            gemm_tuned.fn(a, b, p.out, config=config, **extra)
            return p.out

        return Method(run)

    return {f"{m}x{n} {schedule}": method(m, n, schedule) for schedule, tiles in QUACK_TILES.items() for m, n in tiles}


PEERS: dict[str, Callable[[Problem], Variants]] = {
    "torch": torch_grouped_mm,
    "loop": mm_loop,
    "graph": mm_graph,
    "deep_gemm": deep_gemm,
    "quack": quack,
}
# Names that the modules beside torch are published under.
DISTRIBUTIONS = {"deep_gemm": ("deep-gemm", "sgl-deep-gemm"), "quack": ("quack-kernels",)}


@functools.cache
def version(peer: str) -> str:
    """Of the library behind it. Raises ImportError where it cannot be imported."""
    if peer not in DISTRIBUTIONS:
        return torch.__version__
    try:
        importlib.import_module(peer)
    except Exception as error:  # an extension built for other versions raises more than ImportError
        raise ImportError(f"{type(error).__name__}: {error}") from error
    for name in DISTRIBUTIONS[peer]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "unknown"
