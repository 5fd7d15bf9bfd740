"""What a call of grouped_mm costs beside the product: host time, and the first call of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import torch
from timing import Call, Row, host_us

import gmm

HOST_GROUPS = 128


def time_host(backends: list[str], batches: int) -> list[Row]:
    """Microseconds of a call, eager, without grad, with matrices so small that the GPU is never the limit."""
    x = torch.randn(16 * HOST_GROUPS, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(HOST_GROUPS, 64, 64, device="cuda", dtype=torch.bfloat16)
    offs = torch.arange(16, 16 * HOST_GROUPS + 1, 16, device="cuda", dtype=torch.int32)
    wt = w.transpose(1, 2)
    op = torch.ops.gmm.grouped_mm.default
    calls: dict[str, Call] = {"torch._grouped_mm": lambda: torch._grouped_mm(x, wt, offs=offs)}
    for backend in backends:
        calls[f"torch.ops, {backend}"] = lambda b=backend: op(x, w, offs, trans_b=True, backend=b)
        calls[f"gmm.grouped_mm, {backend}"] = lambda b=backend: gmm.grouped_mm(x, w, offs, trans_b=True, backend=b)
    with torch.no_grad():
        return [{"call": name, "us": round(host_us(call, batches), 1)} for name, call in calls.items()]


# The library and the CUDA context are there, as in a training script by the time of its first expert layer.
FIRST_CALL = """
import sys, time, torch, gmm
x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
w = torch.randn(8, 768, 2048, device="cuda", dtype=torch.bfloat16)
offs = torch.arange(64, 513, 64, device="cuda", dtype=torch.int32)
torch.cuda.synchronize()
begin = time.perf_counter()
gmm.grouped_mm(x, w, offs, trans_b=True, backend=sys.argv[1])
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def time_first_call(backend: str) -> Row:
    """Seconds of the first call of a fresh process; Triton has compiled nothing yet."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, "-c", FIRST_CALL, backend]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"first call, {backend}: {done.stderr}")
    return {"backend": backend, "seconds": round(float(done.stdout), 2)}
