"""Versions, GPUs, what was built, and which backends work here and why the others do not."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import torch

import gmm
from gmm.cli.output import print_table

_FORMS = {  # of a call, by what it is written as
    "gmm.grouped_mm": ((256, 128), (4, 128, 256)),
    "gmm.multi_tensor_gemm": ([(64, 128)] * 4, [(128, 256)] * 4),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    print_table("Versions", ("what", "version"), list(versions().items()))
    print_table("gmm's build", ("what", "value"), list(gmm.build_info().items()))
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    rows = []
    for device in devices:
        of = torch.cuda.get_device_properties(device)
        rows.append((str(device), of.name, f"sm_{of.major}{of.minor}", f"{of.multi_processor_count} SMs", gib(of)))
    print_table("GPUs", ("device", "name", "architecture", "size", "memory"), rows or [("none", "", "", "", "")])
    for device in devices or [torch.device("cpu")]:
        for form, why in backends(device).items():
            print_table(f"Backends of {form} on {device}, bf16", ("backend", "works", "why"), why)
    return 0


def gib(of: torch.cuda._CudaDeviceProperties) -> str:
    return f"{of.total_memory / 2**30:.0f} GiB"


def versions() -> dict[str, str]:
    """Of what gmm runs on."""
    found = {"gmm": gmm.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch's CUDA"] = str(torch.version.cuda or "none")
    return found


def backends(device: torch.device) -> dict[str, list[tuple[str, str, str]]]:
    """By form of a call: each backend, whether it takes an ordinary call on the device, and why not or what runs."""
    rows: dict[str, list[tuple[str, str, str]]] = {}
    for form, (a, b) in _FORMS.items():
        rows[form] = []
        for name in ("cutlass", "triton", "cublas", "reference"):
            try:
                plan = gmm.explain(_on(device, a), _on(device, b), backend=name)
                rows[form].append((name, "yes", plan.kernel))
            except (RuntimeError, ValueError) as error:
                reason = str(error).removeprefix(f"backend {name!r} cannot take this call: ")
                rows[form].append((name, "no", reason.splitlines()[0]))
    return rows


def _on(device: torch.device, shapes):  # type: ignore[no-untyped-def]  # of lists lists, of a shape a tensor
    if isinstance(shapes, list):
        return [_on(device, shape) for shape in shapes]
    return torch.empty(shapes, dtype=torch.bfloat16, device=device)
