"""An MoE layer whose experts are spread over processes: tokens travel to their experts and back, weights stay.

    torchrun --nproc-per-node 2 examples/expert_parallel.py     # CPU processes with gloo, or a GPU each with NCCL
    torchrun --nproc-per-node 8 examples/expert_parallel.py --experts 128 --top-k 8 --hidden 2048 --ffn 768 \\
        --tokens 8192 --dtype bfloat16

Each process has its own tokens, its own experts (parameters that are DTensors, sharded in the experts) and a copy of
the router. The layer learns what a dense one does. Before that, its outputs and all gradients are compared with those
of the same layer in one process, with all tokens and all experts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

import gmm


class AllToAll(torch.autograd.Function):
    """Sends the first splits[0] rows to process 0, the next splits[1] to process 1 and so on, and receives likewise.
    Backward sends the gradients where the rows came from."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.splits, ctx.group = (sent, received), group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sent, received = ctx.splits
        return AllToAll.apply(grad, received, sent, ctx.group), None, None, None


def shard_experts(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves each process its experts' part of the module's parameters."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(key, nn.Parameter(part))


class MoE(nn.Module):
    """A router in float32, and SwiGLU experts in dtype. With a mesh, this process has its share of the experts.

    Every process must have seeded torch alike: each draws all weights, and keeps its own.
    """

    def __init__(
        self, hidden: int, ffn: int, experts: int, top_k: int, dtype: torch.dtype, mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        self.experts, self.top_k, self.mesh = experts, top_k, mesh
        self.router = nn.Linear(hidden, experts, bias=False)
        self.network = gmm.nn.GroupedExperts(experts, hidden, ffn, "swiglu", dtype=dtype)
        if mesh is not None:
            distribute_module(self.network, mesh, shard_experts)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        weights, index = self.router(x.float()).softmax(-1).topk(self.top_k)
        rows, row_map, ends = gmm.moe.permute(x, index, self.experts)
        rows = self.network(rows, offs=ends) if self.mesh is None else self.dispatched(rows, ends)
        return gmm.moe.unpermute(rows, row_map, weights)

    def dispatched(self, rows: Tensor, ends: Tensor) -> Tensor:
        """The network on rows sorted by expert of all processes: there, through the experts, and back."""
        group, processes = self.mesh.get_group(), self.mesh.size()
        counts = ends.diff(prepend=ends.new_zeros(1)).view(processes, -1)  # rows for each process and expert of it
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        # The one synchronisation with the device: all_to_all wants sizes on the host.
        sent, received = torch.stack([counts.sum(1), arriving.sum(1)]).tolist()
        rows = AllToAll.apply(rows, sent, received, group)
        # They come sorted by process, then by expert; grouped_mm wants them by expert.
        local = torch.arange(counts.shape[1], device=rows.device).repeat(processes)
        expert = local.repeat_interleave(arriving.view(-1), output_size=rows.shape[0])
        rows, row_map, ends = gmm.moe.permute(rows, expert[:, None], counts.shape[1])
        rows = gmm.moe.unpermute(self.network(rows, offs=ends), row_map)
        return AllToAll.apply(rows, received, sent, group)


def train(layer: MoE, x: Tensor, target: Tensor, steps: int) -> list[float]:
    """The losses over all processes, step by step."""
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3, foreach=False)  # foreach mixes no DTensors with tensors
    losses = []
    for _ in range(steps):
        losses.append(step(layer, x, target))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def step(layer: MoE, x: Tensor, target: Tensor) -> Tensor:
    """Gradients of the mean squared error over the tokens of all processes, and that error."""
    processes = dist.get_world_size()
    loss = (layer(x) - target).float().square().mean() / processes
    loss.backward()
    for parameter in layer.parameters():  # the experts' gradients are complete: their tokens were here
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss


def check(layer: MoE, x: Tensor, target: Tensor, sizes: dict[str, Any]) -> float:
    """The largest relative error of the output and of any gradient, against one process that has everything."""
    reference = MoE(**sizes).to(x.device)
    with torch.no_grad():
        for parameter, whole in zip(reference.parameters(), layer.parameters()):
            parameter.copy_(whole.full_tensor() if isinstance(whole, DTensor) else whole)
    xs, targets = (torch.cat(_gathered(t)) for t in (x, target))
    outputs = reference(xs)
    (outputs - targets).float().square().mean().backward()
    step(layer, x, target)
    pairs = [(torch.cat(_gathered(layer(x).detach())), outputs.detach())]
    for ours, theirs in zip(layer.parameters(), reference.parameters()):
        pairs.append((ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad, theirs.grad))
    layer.zero_grad()
    return max(((a - b).float().norm() / b.float().norm()).item() for a, b in pairs)


def _gathered(x: Tensor) -> list[Tensor]:
    tensors = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, x.contiguous())
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 256), ("hidden", 64), ("ffn", 96), ("experts", 8), ("top-k", 2), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:  # not under torchrun: alone
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("experts",))
    rank, processes = mesh.get_rank(), mesh.size()
    if options.experts % processes:
        raise SystemExit(f"--experts: expected a multiple of the {processes} processes, got {options.experts}")

    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    sizes = {"dtype": dtype, **{name: getattr(options, name) for name in ("hidden", "ffn", "experts", "top_k")}}
    layer = MoE(**sizes, mesh=mesh).to(device)
    teacher = torch.randn(options.hidden, options.hidden, device=device) * options.hidden**-0.5
    torch.manual_seed(1 + rank)
    x = torch.randn(options.tokens, options.hidden, device=device)
    x, target = x.to(dtype), (x @ teacher).relu().to(dtype)
    error = check(layer, x, target, sizes)
    started = time.perf_counter()
    losses = train(layer, x, target, options.steps)
    seconds = (time.perf_counter() - started) / options.steps
    if rank == 0:
        print(f"{processes} processes on {device}, {options.experts // processes} of {options.experts} experts each")
        print(f"largest difference from one process: {error:.1e} ({gmm.last_backend()})")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {options.steps} steps of {1e3 * seconds:.1f} ms")
    dist.destroy_process_group()
    # Caches of DTensor keep the group, and so gloo's threads, beyond that. One of them that lets go of a tensor while
    # the interpreter ends aborts the process; so that step is left out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
