"""What test_distributed.py runs with gloo: `torchrun --nproc-per-node 2 tests/distributed_cases.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from grouped_cases import MODES, layer_operands
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gmm
import gmm.integrations.dtensor

CPU = torch.device("cpu")


def close(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and bool((x - y).norm() <= 2e-6 * y.norm())


def placements(mode: str) -> list[tuple[Any, Any, Any]]:
    """Of a, b and the result, by the dimension of the product that is sharded; experts are gathered."""
    every, s0, s1, s2 = Replicate(), Shard(0), Shard(1), Shard(2)
    return {
        "ragged_m": [(every, s2, s1), (s1, s1, Partial()), (s0, s0, every)],
        "ragged_n": [(s1, every, s0), (s2, s0, Partial()), (s0, s1, every)],
        "ragged_k": [(s0, every, s1), (every, s1, s2), (s1, s0, every)],
        "batched": [(s1, every, s1), (every, s2, s2), (s2, s1, Partial()), (s0, s0, s0)],
    }[mode]


def dtensor() -> None:
    """Every mode, every sharding, with and without trans_b and bias: values, gradients, and how the result lies."""
    gmm.integrations.dtensor.register()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for mode in MODES:
        for a_place, b_place, out_place in placements(mode):
            for trans_b in (False, True):
                for with_bias in (False, True)[: 1 + (mode in ("ragged_m", "batched"))]:
                    one_sharding(mesh, mode, a_place, b_place, out_place, trans_b, with_bias)


def one_sharding(
    mesh: Any, mode: str, a_place: Any, b_place: Any, out_place: Any, trans_b: bool, with_bias: bool
) -> None:
    a, b, offs = layer_operands(mode, CPU)
    if trans_b:
        b = b.mT.contiguous()
        dims = b.dim()
        swapped = {dims - 1: dims - 2, dims - 2: dims - 1}
        b_place = Shard(swapped.get(b_place.dim, b_place.dim)) if isinstance(b_place, Shard) else b_place
    n = b.shape[-2] if trans_b else b.shape[-1]
    leaves = [a, b, *([torch.linspace(-1, 1, b.shape[0] * n).view(b.shape[0], n)] if with_bias else [])]
    places = [a_place, b_place, Replicate()][: len(leaves)]
    plain = [x.clone().requires_grad_() for x in leaves]
    sharded = [distribute_tensor(x, mesh, [place]).requires_grad_() for x, place in zip(leaves, places)]
    sharded_offs = None if offs is None else distribute_tensor(offs, mesh, [Replicate()])
    y = gmm.grouped_mm(sharded[0], sharded[1], sharded_offs, *sharded[2:], trans_b=trans_b)
    exact = gmm.grouped_mm(plain[0], plain[1], offs, *plain[2:], trans_b=trans_b)
    case = (mode, a_place, b_place, trans_b, with_bias, y.placements)
    if not (with_bias and isinstance(out_place, Partial)):  # each process would add the bias
        assert y.placements == (out_place,), case
    assert close(y.full_tensor(), exact), case
    y.full_tensor().square().sum().backward()
    exact.square().sum().backward()
    assert all(close(s.grad.full_tensor(), p.grad) for s, p in zip(sharded, plain)), case


def same_shape_both_ways() -> None:
    """DTensor remembers calls; one with trans_b, or of another result dtype, is not the one before."""
    gmm.integrations.dtensor.register()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    x, w = torch.randn(6, 8).bfloat16(), torch.randn(2, 8, 8).bfloat16()
    offs = torch.tensor([2, 6])
    x_, w_, offs_ = (distribute_tensor(t, mesh, [p]) for t, p in ((x, Replicate()), (w, Shard(2)), (offs, Replicate())))
    for options in ({}, {"trans_b": True}, {"out_dtype": torch.float32}, {"trans_b": True}, {}):
        y, exact = gmm.grouped_mm(x_, w_, offs_, **options), gmm.grouped_mm(x, w, offs, **options)
        assert y.dtype is exact.dtype and (y.full_tensor() - exact).norm() <= 1e-2 * exact.norm(), options
        assert y.placements == ((Partial(),) if options.get("trans_b") else (Shard(1),)), (options, y.placements)


def fsdp() -> None:
    """fully_shard gives whole plain parameters to forward and backward; gradients are averaged over the processes."""
    torch.manual_seed(0)
    experts, reference = (gmm.nn.GroupedExperts(4, 16, 24, bias=True) for _ in range(2))
    reference.load_state_dict(experts.state_dict())
    fully_shard(experts, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    offs, processes = torch.tensor([3, 3, 9, 11]), dist.get_world_size()
    xs = [torch.randn(12, 16) for _ in range(processes)]
    experts(xs[dist.get_rank()], offs=offs).square().sum().backward()
    (sum(reference(x, offs=offs).square().sum() for x in xs) / processes).backward()
    for name, parameter in experts.named_parameters():
        assert isinstance(parameter.grad, DTensor), name
        assert close(parameter.grad.full_tensor(), reference.get_parameter(name).grad), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in (dtensor, same_shape_both_ways, fsdp):
        case()
        print(f"rank {dist.get_rank()}: {case.__name__} passed", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # as examples/expert_parallel.py
