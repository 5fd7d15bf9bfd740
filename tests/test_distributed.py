"""Several processes: DTensors, FSDP2, and the example of expert parallelism, with gloo on the CPU and NCCL on GPUs."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import torchrun

CASES = ("dtensor", "same_shape_both_ways", "fsdp")


def test_on_two_processes() -> None:
    """DTensors and FSDP2: the cases of distributed_cases.py."""
    output = torchrun(2, "tests/distributed_cases.py", CUDA_VISIBLE_DEVICES="")
    assert all(f"rank {rank}: {case} passed" in output for rank in range(2) for case in CASES), output


def check_example(output: str, tolerance: float) -> None:
    """Every process computed what one alone does, and the loss fell."""
    difference = re.search(r"largest difference from one process: (\S+)", output)
    losses = re.search(r"loss (\S+) -> (\S+) in", output)
    assert difference and losses, output
    assert float(difference[1]) <= tolerance, output
    assert float(losses[2]) < 0.7 * float(losses[1]), output


FEW = ("--tokens=5", "--experts=16", "--top-k=1")  # processes that get no tokens


@pytest.mark.parametrize("processes, arguments", ((2, ()), (4, ()), (4, FEW)), ids=str)
def test_expert_parallel(processes: int, arguments: tuple[str, ...]) -> None:
    output = torchrun(processes, "examples/expert_parallel.py", *arguments, CUDA_VISIBLE_DEVICES="")
    assert f"{processes} processes on cpu" in output and "(reference" in output
    check_example(output, 2e-6)


@pytest.mark.gpu
def test_expert_parallel_on_gpus() -> None:
    processes = 2 ** (min(torch.cuda.device_count(), 8).bit_length() - 1)
    output = torchrun(processes, "examples/expert_parallel.py", "--dtype=bfloat16", "--steps=100")
    assert f"{processes} processes on cuda" in output and re.search(r"\((cutlass|triton)", output)
    check_example(output, 2e-2)
