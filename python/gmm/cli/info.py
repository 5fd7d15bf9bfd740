"""Versions, GPUs, what was built, and which backends work here and why the others do not.

Each backend is given a small call; exit status 1 where one fails that should work.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import platform

import torch

import gmm
from gmm.backend import BACKENDS
from gmm.cli.output import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(options: argparse.Namespace) -> int:
    print_table("Versions", ("what", "version"), list(versions().items()))
    print_table("gmm's build", ("what", "value"), list(gmm.build_info().items()))
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    rows = []
    for device in devices:
        of = torch.cuda.get_device_properties(device)
        memory = f"{of.total_memory / 2**30:.0f} GiB"
        rows.append((str(device), of.name, f"sm_{of.major}{of.minor}", f"{of.multi_processor_count} SMs", memory))
    print_table("GPUs", ("device", "name", "architecture", "size", "memory"), rows or [("none", "", "", "", "")])
    works = []
    for device in devices or [torch.device("cpu")]:
        calls = [(name, call, *probe(name, call, device)) for name in BACKENDS[1:] for call in ("grouped_mm", "lists")]
        print_table(f"Backends on {device}", ("backend", "call", "works", "what ran, or why not"), calls)
        works += [row[2] for row in calls]
    return int("FAILS" in works)


def versions() -> dict[str, str]:
    """Of what gmm runs on."""
    found = {"gmm": gmm.__version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch's CUDA"] = str(torch.version.cuda or "none")
    found["NVIDIA driver"] = driver()
    return found


def driver() -> str:
    """Its version, from NVIDIA's management library."""
    text = ctypes.create_string_buffer(80)  # as long as nvml.h says
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        found = nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
    except (OSError, AttributeError):
        found = False
    return text.value.decode() if found else "unknown"


def probe(backend: str, call: str, device: torch.device) -> tuple[str, str]:
    """Whether the backend takes a small call and gets through, and the kernel or the reason."""
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    a, b = (torch.ones(shape, dtype=dtype, device=device) for shape in ((64, 128), (4, 128, 64)))
    offs = torch.tensor([16, 16, 40, 64], dtype=torch.int32, device=device)
    try:
        if call == "grouped_mm":
            result = gmm.grouped_mm(a, b, offs, backend=backend)
        else:
            result = torch.cat(gmm.multi_tensor_gemm(a.split([16, 0, 24, 24]), b.unbind(), backend=backend))
        if not bool((result == 128).all()):  # waits for the kernel
            return "FAILS", f"{gmm.last_backend()}: wrong values"
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        refusal = f"backend {backend!r} cannot take this call: "
        return ("no", reason.removeprefix(refusal)) if reason.startswith(refusal) else ("FAILS", reason)
    return "yes", gmm.last_backend()
